"""Latent attention (DeepSeek-V3) by templates: what is its own beside test_fused.py and test_moe.py, which train families
of it as plain torch does and hold it to finite differences."""
from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from typing import Any

import fusing
import parity
import pytest
import torch
import zoo
from fusing import all_fused, codes, error, fused, lm, plain, stream
from kept import same
from test_fp8_products import FP8, run, spied
from test_moe import LATENT
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import megatrain_torch as mt  # noqa: E402
from megatrain_torch.fused.templates import attention as rows  # noqa: E402
from megatrain_torch.fused.templates.attention import Attention, _filled  # noqa: E402
from megatrain_torch.plans.cost import cost_of  # noqa: E402
from megatrain_torch.plans.machine import MACHINES  # noqa: E402
from megatrain_torch.plans.shapes import shapes_of  # noqa: E402

SIZES = {**LATENT, "v_head_dim": 8, "num_hidden_layers": 2}        # a dense layer, and a mixture
DEEPSEEK = lm("deepseek_v3", **SIZES)


@pytest.mark.parametrize("mode", ["attention", *(pytest.param(m, marks=parity.LONG) for m in (
    "selective", "linked", "replay", "saved+host", "selective+host"))])
def test_it_trains_as_plain_torch_and_whatever_is_kept_to_the_same_bits(mode: str) -> None:
    right = fused(DEEPSEEK, zoo.text_unpadded, "saved", steps=2)
    fusing.agree(plain(DEEPSEEK, zoo.text_unpadded, steps=2), right)
    assert same(right, fused(DEEPSEEK, zoo.text_unpadded, mode, {"delay_us": 100}, steps=2))


@pytest.mark.parametrize("form", ["", pytest.param("otherwise", marks=parity.LONG)])
def test_a_cache_gathers_what_the_models_own_code_gives_it(form: str) -> None:
    build = lm("deepseek_v3", **SIZES, rope_interleave=False) if form else DEEPSEEK
    batch, own, model = zoo.text_unpadded(0), build(), stream(build(), "selective")
    wanted, found = (m(**batch, use_cache=True) for m in (own, model))
    all_fused(codes(model))
    for a, b in zip(wanted.past_key_values.layers, found.past_key_values.layers, strict=True):
        assert a.keys.shape == b.keys.shape and a.values.shape == b.values.shape
        assert error(a.keys.detach(), b.keys.detach()) < 1e-6 and error(a.values.detach(), b.values.detach()) < 1e-6
    with pytest.raises(mt.MegatrainError, match="key-value cache"):
        found.past_key_values.layers[0].keys.sum().backward()


# ---------------------------------------------------------------- heads of values of another size

def test_values_of_another_size_are_attention_by_blocks_of_queries_and_filled_up_too() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 13, 4, n, generator=g, dtype=torch.float64) for n in (12, 12, 8))
    right, _ = Attention(0.3, causal=True, values=8).forward(q, k, v)
    assert right.shape == v.shape

    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        logits = q @ k.mT * 0.3
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits[0, 0]).triu(1) > 0, float("-inf"))
        return logits.softmax(-1) @ v, logits.logsumexp(-1)

    assert error(right, rows.by_rows(kernel, q, k, v, 5)[0]) < 1e-14
    whole, _ = Attention(0.3, causal=True).forward(*_filled(q, k, v))
    assert error(right, whole[..., :8]) < 1e-14 and not whole[..., 8:].any()


# ---------------------------------------------------------------- what the proof must refuse

OWN_CACHE = "kv_nope, k_rot = past_key_values.update(kv_nope, k_rot, self.layer_idx)"
# Of a class of modeling_deepseek_v3, the method, what stands there, and what instead. None shows at the first random rows
# in all its cases, or is told by a size.
WRONG: dict[str, tuple[str, str, str, str]] = {
    "a swapped half": ("Attention", "forward", "torch.cat((q_pass, q_rot), dim=-1)", "torch.cat((q_rot, q_pass), dim=-1)"),
    "another scale": ("Attention", "forward", "scaling=self.scaling", "scaling=self.scaling * 1.0000001"),
    "a norm left out": ("Attention", "forward", "kv_nope = self.kv_a_layernorm(kv_nope)", "kv_nope = kv_nope"),
    "keys that are not turned": ("Attention", "forward", "q_rot, k_rot = apply_rotary_pos_emb_interleave(",
                                 "q_rot, _ = apply_rotary_pos_emb_interleave("),
    "a cache of something else": ("Attention", "forward", OWN_CACHE, OWN_CACHE.replace(
        "kv_nope, k_rot = ", "").replace("k_rot", "2 * k_rot")),
    "keys for values": ("Attention", "expand_kv", "k_nope, value_states =", "value_states, k_nope ="),
    "columns that are not written": ("Attention", "expand_kv", "key_states[..., self.qk_nope_head_dim :].copy_(k_rot)", ""),
    "columns that overlap": ("Attention", "expand_kv", "key_states[..., self.qk_nope_head_dim :].copy_(k_rot)",
                             "key_states[..., 1:5].copy_(k_rot); key_states[..., self.qk_nope_head_dim :].copy_(k_rot)"),
    "columns of other columns": ("Attention", "expand_kv", "return key_states",
                                 "key_states[..., :1].copy_(key_states[..., 1:2]); return key_states"),
    "experts of other groups at zero": ("TopkRouter", "forward", 'float("-inf")', "0.0"),
    "weights of corrected scores": ("TopkRouter", "forward", "scores.gather(1", "scores_for_choice.gather(1"),
    "groups by their best expert": ("TopkRouter", "forward", ".topk(2, dim=-1)", ".topk(1, dim=-1)"),
}
SHARED = "into memory that other tensors share"
UNKNOWN = "no template has its slice(new_empty("          # of the attention's output
REASONS = {"columns that overlap": SHARED, "columns of other columns": SHARED, "another scale": UNKNOWN,
           "columns that are not written": UNKNOWN}
FEW = ("a cache of something else", "columns that overlap", "weights of corrected scores")


def changed(module: nn.Module, method: str, old: str, new: str) -> None:
    """The module has a class whose method's text says something else."""
    kind = type(module)
    text = textwrap.dedent(inspect.getsource(getattr(kind, method)))
    assert text.count(old) == 1, text
    made: dict[str, Any] = {}
    exec(compile(text.replace(old, new), __file__, "exec"), vars(sys.modules[kind.__module__]), made)
    module.__class__ = type(kind.__name__, (kind,), made | {"__module__": kind.__module__})


@pytest.mark.parametrize("what", [pytest.param(w, marks=() if w in FEW else parity.LONG) for w in WRONG])
def test_what_computes_something_else_runs_its_own_code(what: str) -> None:
    kind, *change = WRONG[what]
    model = DEEPSEEK()
    dense, sparse = model.model.layers
    changed(dense.self_attn if kind == "Attention" else sparse.mlp.gate, *change)
    model = stream(model)
    model(**zoo.text_unpadded(0), use_cache=True)        # without a backward: some read memory that nobody wrote
    own, other = list(codes(model).values())[::1 if kind == "Attention" else -1]
    assert other == "template" and own.startswith("its own (") and REASONS.get(what, "") in own, own


@parity.LONG
def test_a_method_of_the_same_meaning_is_proved() -> None:
    """So what the others are refused for is what they say, not that they were changed."""
    written = "key_states[..., : self.qk_nope_head_dim].copy_(k_nope"
    model = DEEPSEEK()
    changed(model.model.layers[0].self_attn, "expand_kv", written, f"{written} * 1.0")
    model = stream(model)
    model(**zoo.text_unpadded(0), use_cache=True).loss.backward()
    all_fused(codes(model))


# ---------------------------------------------------------------- products in fp8, plans

@parity.LONG
def test_products_in_fp8_are_those_of_both_steps_and_what_is_kept_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    build = lm("youtu", **wide, num_key_value_heads=4, tie_word_embeddings=False, num_hidden_layers=3)
    multiplied = spied(monkeypatch, "fp8_gemm_", lambda out, *_, **__: out.shape[1])
    right = run(build=build)
    assert right.codes["model.layers.1"] == FP8, right.codes
    assert {16 + 32, 4 * 32} <= set(multiplied), "Wqa and Wkva together, Wqb, Wkvb"
    again = run("selective", build=build)
    assert right.codes == again.codes and all(map(parity.same_bits, right.losses, again.losses))
    assert all(parity.same_bits(right.weights[n], again.weights[n]) for n in right.weights)


def test_a_plan_counts_both_steps_and_heads_of_both_sizes() -> None:
    layer = next(w for w in shapes_of(transformers.DeepseekV3Config(num_hidden_layers=1))("fp32").windows
                 if w.kind == "layer")
    sizes = {(p.part, p.fan_in, p.fan_out) for p in layer.products}
    assert {("qkv", 7168, 1536), ("qkv", 7168, 576), ("latent", 1536, 128 * 192), ("latent", 512, 128 * 256),
            ("out", 128 * 128, 7168)} <= sizes and layer.attention == 128 * (192 + 128) // 2
    kept = dict(layer.template.kept)
    made = 128 * 192 + 128 * 256             # numbers of a token that "selective" makes again, beside gate|up
    assert kept["saved"] - kept["selective"] == 2 * (made + 2 * 18432)
    assert kept["attention"] == 2 * 128 * 128 + 4 * 128
    cost = cost_of(layer, MACHINES["h200-128g"], 8192, 1024, True)
    alone = cost_of(dataclasses.replace(layer, products=tuple(p for p in layer.products if p.part != "latent")),
                    MACHINES["h200-128g"], 8192, 1024, True)
    again = [c.backward_s["selective"] - c.backward_s["saved"] for c in (cost, alone)]
    assert again[0] > 1.05 * again[1]
