"""Masks that need not exist: what transformers asks for is told from its functions, and trains as with the real one."""
from __future__ import annotations

import functools
from typing import Any

import fusing
import parity
import pytest
import torch
import zoo
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface

import megatrain_torch as mt
from megatrain_torch.base.packed import Packed
from megatrain_torch.fused.templates import attention
from megatrain_torch.fused.templates.attention import Attention
from megatrain_torch.graph import hf_calls as masks
from megatrain_torch.graph.hf_calls import Sight, StandIn

CPU = torch.device("cpu")
TOKENS = 24
WIDE = {"sliding_window": 6, "head_dim": 8}
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
FAMILIES = {
    "mistral": fusing.lm("mistral", **WIDE), "phi3": fusing.lm("phi3", sliding_window=6),
    "gemma3": fusing.lm("gemma3_text", sliding_window_pattern=2, query_pre_attn_scalar=8, **WIDE),
    "gemma2": fusing.lm("gemma2", query_pre_attn_scalar=8, attn_implementation="eager", **WIDE),
    "qwen3": fusing.lm("qwen3", use_sliding_window=True, max_window_layers=1, **WIDE),
    "gpt_oss": fusing.lm("gpt_oss", **EXPERTS, **WIDE), "llama_eager": fusing.lm("llama", attn_implementation="eager"),
}
NEEDED = {"gemma2"}          # caps its logits: products and softmax one by one, by the real mask


def text(step: int) -> dict[str, Tensor]:
    ids = zoo.tokens(zoo.generator(step), rows=2, length=TOKENS)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def packed_text(step: int) -> dict[str, Tensor]:
    lengths = (13, 1, 10)
    ids = zoo.tokens(zoo.generator(step), rows=1, length=TOKENS)
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
            "use_cache": False}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Sight]:
    """What real masks are made of."""
    found: list[Sight] = []
    own = Sight.real.func
    monkeypatch.setattr(Sight, "real", property(lambda self: (found.append(self), own(self))[1]))
    return found


def count(made: list[Tensor], own: Any, **asked: Any) -> Tensor | None:
    mask = own(**asked)
    made += [] if mask is None else [mask]
    return mask


ALIKE = {("phi3", "saved"), ("gpt_oss", "replay")}        # phi3 asks as mistral does; gemma3's windows are replayed too


# Each with one of the batches, in turn; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("family, keep, batch", [
    (family, keep, batch) for i, (family, keep) in enumerate([
        *((f, "saved") for f in FAMILIES), ("gemma3", "replay"), ("gpt_oss", "replay")])
    for j, batch in enumerate([text, packed_text]) if parity.FULL or ((i + j) % 3 == 0 and (family, keep) not in ALIKE)])
def test_a_model_trains_as_plain_torch_with_its_masks(family: str, keep: str, batch: fusing.Batch, made: list[Sight],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[Tensor] = []
    for kind in masks.KINDS:
        theirs = getattr(AttentionMaskInterface()[kind], "__wrapped__", AttentionMaskInterface()[kind])
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, kind, functools.partial(count, own, theirs))
        masks._patch(AttentionMaskInterface, kind)
    right = fusing.plain(FAMILIES[family], batch)
    assert own
    own.clear()
    run = fusing.fused(FAMILIES[family], batch, keep)
    fusing.all_fused(run.codes)
    fusing.agree(right, run)
    assert not own, "transformers made a mask"
    if family not in NEEDED:
        # On the CPU device a window's definition is a mask of one row, while its layer has need of it; and trials have one.
        assert all(sight.rows == 1 for sight in made)


def functions(**change: Any) -> dict[str, Any]:
    """What a mask function is called with."""
    return {"batch_size": 2, "q_length": 8, "kv_length": 8, "q_offset": 0, "kv_offset": 0, "attention_mask": None,
            "mask_function": masking_utils.causal_mask_function, "allow_is_causal_skip": True, "dtype": torch.bfloat16,
            "use_vmap": False, "device": CPU, **change}


PAIRS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
OVER, ALL = masking_utils.sliding_window_causal_mask_function(3), masking_utils.and_masks


@pytest.mark.parametrize("change", [
    {}, {"mask_function": OVER, "local_size": 3}, {"mask_function": masking_utils.sliding_window_causal_mask_function(99)},
    {"attention_mask": torch.ones(2, 8, dtype=torch.bool)},
    {"batch_size": 1, "mask_function": ALL(OVER, masking_utils.packed_sequence_mask_function(PAIRS))}])
def test_a_known_mask_is_what_transformers_makes(change: dict[str, Any]) -> None:
    asked = functions(allow_is_causal_skip=False, **change)
    plain, added = masks._wanted(asked, False), masks._wanted(asked, True)
    assert torch.equal(plain.real, masking_utils.sdpa_mask(**asked)) and plain.window in (0, 3)
    assert torch.equal(added.real, masking_utils.eager_mask(**asked))
    assert added.real.dtype == torch.bfloat16 and StandIn(added).shape == added.real.shape


@pytest.mark.skipif(not hasattr(masking_utils, "packed_sequence_compatibility_function"), reason="an older transformers")
def test_a_window_within_packed_sequences_is_too() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    fn = masking_utils.packed_sequence_compatibility_function(OVER, positions, PAIRS)
    asked = functions(batch_size=1, mask_function=fn, allow_is_causal_skip=False)
    sight = masks._wanted(asked, False)
    assert sight.packed.lengths == (3, 2, 3) and sight.window == 3
    assert torch.equal(sight.real, masking_utils.sdpa_mask(**asked))
    remapped = masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, positions)
    assert masks._wanted(functions(batch_size=1, mask_function=remapped), False) is None


@pytest.mark.parametrize("change", [
    {"kv_length": 9}, {"q_offset": 1}, {"use_vmap": True},
    {"attention_mask": torch.tensor([[True] * 7 + [False]] * 2)},
    {"mask_function": masking_utils.bidirectional_mask_function},
    {"mask_function": masking_utils.sliding_window_overlay(3)},
    {"mask_function": masking_utils.or_masks(masking_utils.causal_mask_function, OVER)},
    {"mask_function": masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))},
    {"mask_function": ALL(OVER, masking_utils.sliding_window_overlay(2))},
    {"mask_function": ALL(masking_utils.causal_mask_function, lambda b, h, q, k: k >= 0)},
    {"mask_function": lambda b, h, q, k: k <= q},
    {"mask_function": ALL(OVER, masking_utils.packed_sequence_mask_function(PAIRS))}])      # of two rows
def test_an_unknown_mask_is_transformers_own(change: dict[str, Any]) -> None:
    assert masks._wanted(functions(**change), False) is None


def test_padding_keeps_the_models_mask(made: list[Sight]) -> None:
    run = fusing.fused(FAMILIES["gemma3"], fusing.padded)
    fusing.agree(fusing.plain(FAMILIES["gemma3"], fusing.padded), run)
    assert not made


def test_only_where_gradients_are_wanted_and_layers_have_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_wanted", lambda *_: pytest.fail("a stand-in"))
    model = fusing.stream(FAMILIES["gemma3"](), "saved")
    with torch.no_grad():
        model(**text(0))
    fusing.lm("gemma3_text", **WIDE)()(**text(0)).loss.backward()          # a model of its own, beside it
    eager = mt.stream(FAMILIES["gemma3"](), "cpu", compute="eager")
    eager(**text(0)).loss.backward()


def test_a_plain_model_is_compiled_to_one_graph_whatever_is_streamed_beside_it() -> None:
    """Neither mask functions nor `device` nor what watches modules make a guard that others' lives break."""
    streamed = [fusing.stream(FAMILIES["gemma3"](), "saved") for _ in range(2)]
    model, ids = FAMILIES["gemma3"]().eval(), text(0)["input_ids"]

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def logits(ids: Tensor) -> Tensor:
        return model(input_ids=ids.to(model.device), use_cache=False).logits

    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        assert parity.same_bits(logits(ids), model(input_ids=ids, use_cache=False).logits)
        mt.unstream(streamed.pop())
        streamed += [fusing.stream(FAMILIES["gemma3"](), "saved") for _ in range(2)]
        logits(ids)
    assert all(m.device == CPU for m in streamed)


def test_a_layer_that_runs_its_own_code_is_given_the_mask(made: list[Sight]) -> None:
    for a, b in zip(*fusing.with_a_hook(FAMILIES["gpt_oss"], "self_attn.o_proj", text)):
        assert torch.allclose(a, b, rtol=1e-5)
    assert any(s.rows == 2 for s in made)


def test_a_stand_in_used_as_a_tensor_is_the_mask() -> None:
    sight = Sight(2, 5, CPU, window=2)
    mask = StandIn(sight)
    assert masks.sight_of(mask) is sight and masks.sight_of(sight.real) is None and masks.sight_of(None) is None
    assert (mask.shape, mask.dim(), mask.dtype, mask.device, len(mask)) == ((2, 1, 5, 5), 4, torch.bool, CPU, 2)
    for fn in (lambda m: m[:, :, -2:], lambda m: m & True, lambda m: torch.cat([m, m], 1), lambda m: m.to(torch.float32)):
        assert torch.equal(fn(mask), fn(sight.real)) and type(fn(mask)) is Tensor
    q = torch.randn(2, 3, 5, 4)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(sdpa(q, q, q, attn_mask=mask), sdpa(q, q, q, attn_mask=sight.real))
    seen: list[Tensor] = []
    (args, same), rest = masks.dense(((mask, seen), {"masks": {"full": mask}, "n": 3}))
    assert args is sight.real and rest["masks"]["full"] is sight.real and rest["n"] == 3 and same is seen


# ---- flash's arguments, on its definition ----

def flash_forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _: Any, most: int, __: int, dropout: float, causal: bool,
                  debug: bool, scale: float, **window: int) -> tuple[Any, ...]:
    logits = seen_logits(q, k, cu, causal, scale, window)
    out = logits.softmax(2) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
    return out.transpose(0, 1).contiguous(), logits.logsumexp(2), None, None, None


def seen_logits(q: Tensor, k: Tensor, cu: Tensor, causal: bool, scale: float, window: dict[str, int]) -> Tensor:
    """[hq, T, T]; a window as flash's documentation has it: keys from i - left to i + right."""
    number = Packed.of(tuple(cu.diff().tolist()), CPU).numbers()
    at = torch.arange(len(number))
    seen = (number[:, None] == number) & (at[:, None] >= at if causal else True)
    if window:
        seen &= (at >= at[:, None] - window["window_size_left"]) & (at <= at[:, None] + window["window_size_right"])
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q.transpose(0, 1) @ k.permute(1, 2, 0) * scale).masked_fill(~seen, -torch.inf)


def flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu: Tensor, _: Any, most: int,
                   __: int, dropout: float, causal: bool, rng: Any, unused: Any, scale: float, **window: int
                   ) -> tuple[Tensor, ...]:
    """From log-sum-exp and the output, as the kernel does."""
    groups, (dout, out) = q.shape[1] // k.shape[1], (t.transpose(0, 1) for t in (dout, out))
    p = torch.exp(seen_logits(q, k, cu, causal, scale, window) - lse[..., None])
    ds = p * (dout @ v.repeat_interleave(groups, 1).permute(1, 2, 0) - (dout * out).sum(2, keepdim=True)) * scale
    dq = ds @ k.repeat_interleave(groups, 1).transpose(0, 1)
    dk, dv = ds.transpose(1, 2) @ q.transpose(0, 1), p.transpose(1, 2) @ dout
    return dq.transpose(0, 1), *(t.unflatten(0, (-1, groups)).sum(1).transpose(0, 1) for t in (dk, dv))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("lengths, rows, window", [((), 2, 5), ((7, 1, 4), 1, 0), ((7, 1, 4), 1, 3), ((), 1, 1)])
def test_flash_is_given_windows_sequences_and_sinks(lengths: tuple[int, ...], rows: int, window: int, with_sinks: bool,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    qkv, dout = (torch.randn(rows, 12, h, 8, dtype=torch.float64, generator=g) for h in (8, 4))
    q, k, v = qkv.split((4, 2, 2), 2)
    sinks = torch.rand(4, dtype=torch.float64, generator=g) if with_sinks else None
    packed = Packed.of(lengths, CPU) if lengths else None
    one = Attention(0.3, True, packed=packed, window=window)
    by_mask = Attention(0.3, False, Sight(rows, 12, CPU, window, packed, torch.float64).real, spelled=True)

    def all_of(one: Attention) -> list[Tensor]:
        out, kept = one.forward(q, k, v, sinks)
        return [out, *(d for d in one.backward(dout, q, k, v, out, kept, sinks) if d is not None)]

    right, without = all_of(by_mask), all_of(one)
    monkeypatch.setattr(attention, "_flash_forward", flash_forward)
    monkeypatch.setattr(attention, "_flash_backward", flash_backward)
    monkeypatch.setattr(Attention, "_flash", lambda self, q: True)
    found = all_of(one)
    assert len(found) == len(right) == 4 + with_sinks
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, right))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(without, right))
