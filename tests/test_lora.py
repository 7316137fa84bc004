"""Decoder layers with LoRA, run by templates: the training of PEFT's own code, within rounding; and what they refuse.

Bases of codes, with the same adapters: test_bases.py."""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import fusing
import parity
import pytest
import test_fused
import torch
import zoo
from fusing import KEEPS, all_fused, codes, fused, lm, none_fused, padded, plain, stream
from torch import Tensor, nn

peft = pytest.importorskip("peft", reason="PEFT is not installed")

import megatrain_torch as mt  # noqa: E402
from megatrain_torch.fused.templates import decoder  # noqa: E402
from megatrain_torch.plans import shapes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = lm("llama")
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "all of llama": (LLAMA, {}),
    "some of qwen2": (lm("qwen2"), {"target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "phi3, rank-stabilised": (lm("phi3"), {"use_rslora": True, "lora_alpha": 3}),
    "qwen3, odd ranks": (lm("qwen3", head_dim=8), {"r": 3}),
    "llama with biases": (lm("llama", attention_bias=True, mlp_bias=True), {"target_modules": ["o_proj", "k_proj"]}),
    "granite": (lm("granite", embedding_multiplier=2.0, residual_multiplier=0.5), {"r": 5}),
    "norms trained too": (LLAMA, {"modules_to_save": ["input_layernorm"], "target_modules": ["q_proj", "down_proj"]}),
    "a mixture with a shared expert": (lm("qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                          shared_expert_intermediate_size=32), {}),
    "latent attention": (test_fused.FAMILIES["youtu"], {}),
}


def with_lora(build: Callable[[], nn.Module], **config: Any) -> Callable[[], nn.Module]:
    said = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False,
            "task_type": "CAUSAL_LM"} | config

    def made() -> nn.Module:
        torch.manual_seed(7)
        return peft.get_peft_model(build(), peft.LoraConfig(**said)).train()

    return made


def in_turn() -> list[tuple[str, str]]:
    return [(c, k) for i, c in enumerate(CASES) for j, k in enumerate(KEEPS)
            if parity.FULL or (i == 1 and j == 1)]


@pytest.mark.parametrize(("case", "keep"), in_turn())
def test_layers_with_lora_train_as_pefts_own(case: str, keep: str) -> None:
    build = with_lora(CASES[case][0], **CASES[case][1])
    run = fused(build, padded, keep)
    if "norms" in case:
        none_fused(run.codes, "is no RMSNorm with one weight")
    else:
        all_fused(run.codes)
    fusing.agree(plain(build, padded), run)


def errors(truth: fusing.Run, found: fusing.Run) -> list[float]:
    return [fusing.error(t, found.grads[n]) for n, t in truth.grads.items() if t is not None]


def test_adapters_in_fp32_beside_16_bits_have_gradients_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same numbers in fp32. PEFT rounds what base and adapter add up to, twice; here adapters, and what is
    between its two matrices, are rounded besides: five roundings for two."""
    build = with_lora(LLAMA)

    def halved() -> nn.Module:
        model = build()
        for n, p in model.named_parameters():
            if ".lora_" not in n:
                p.data = p.data.bfloat16()
        return model

    def wide() -> nn.Module:
        return halved().float()

    monkeypatch.setattr(decoder, "TILE_BYTES", 1)
    monkeypatch.setattr(decoder, "LEAST_ROWS", 8)
    truth = plain(wide, padded, steps=1)
    run, own = (how(halved, padded, steps=1) for how in (lambda *a, **k: fused(*a, "selective", **k), plain))
    all_fused(run.codes)
    assert {t.dtype for n, t in run.grads.items() if t is not None} == {torch.float32}
    found, theirs = errors(truth, run), errors(truth, own)
    assert statistics.median(found) <= 2.5 * statistics.median(theirs) and max(found) <= 5 * max(theirs)
    assert fusing.error(truth.losses[0], run.losses[0]) <= fusing.ROUNDED_LOSS


@parity.LONG
def test_bases_lie_side_by_side_in_their_slot() -> None:
    """Else each product would copy its matrix first."""
    model = stream(with_lora(LLAMA)())
    units = fusing.runtime_of(model).units
    at = {id(r.param): r for unit in units for r in unit}
    layer = model.base_model.model.model.layers[1]
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        found = [at[id(layer.get_submodule(f"{n}.base_layer").weight)] for n in group]
        for one, next_ in itertools.pairwise(found):
            assert next_.offset == one.offset + one.numel * one.dtype.itemsize


@pytest.mark.parametrize(("config", "why"), [
    ({"lora_dropout": 0.1}, "drops out"), ({"use_dora": True}, "another adapter than plain LoRA"),
    ({"lora_bias": True, "bias": "none", "target_modules": ["q_proj"]}, "another adapter than plain LoRA"),
])
def test_what_is_no_plain_lora_runs_pefts_code_and_says_so(config: dict[str, Any], why: str) -> None:
    build = with_lora(lm("llama", attention_bias="lora_bias" in config), **config)
    model = stream(build())
    zoo.model_loss(model, padded(0)).backward()
    none_fused(codes(model), why)


@parity.LONG
def test_adapters_of_two_types_run_pefts_code_and_frozen_ones_have_no_gradient() -> None:
    model = with_lora(LLAMA)()
    layers = model.base_model.model.model.layers
    for part in (layers[0].self_attn.k_proj.lora_A, layers[0].self_attn.k_proj.lora_B):
        part.default.double()
    layers[1].mlp.up_proj.lora_A.default.weight.requires_grad_(False)
    layers[2].self_attn.v_proj.lora_B.default.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    stream(model)
    fusing.grads_agree(grads(twin), grads(model))
    first, *rest = codes(model).values()
    assert "are of several types" in first and rest == ["template", "template"]


def grads(model: nn.Module, **batch: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    zoo.model_loss(model, padded(0) | batch).backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@parity.LONG
def test_adapters_that_change_are_followed() -> None:
    """Another scale, and none in use: each is proved anew."""
    def run(model: nn.Module) -> list[dict[str, Tensor | None]]:
        found = [grads(model)]
        for m in model.modules():
            if isinstance(getattr(m, "scaling", None), dict):
                m.scaling["default"] = 0.5
        found.append(grads(model))
        with contextlib.ExitStack() as stack:
            stack.enter_context(model.disable_adapter())
            model.get_input_embeddings().weight.requires_grad_()
            found.append(grads(model))
        model.get_input_embeddings().weight.requires_grad_(False)
        found.append(grads(model))
        return found

    build = with_lora(LLAMA, target_modules=["q_proj", "down_proj"])
    streamed = stream(build())
    for truth, other in zip(run(build()), run(streamed), strict=True):
        fusing.grads_agree(truth, other)
    all_fused(codes(streamed))


@parity.LONG
def test_a_wrapper_that_computes_something_else_is_found_out() -> None:
    class Louder(peft.tuners.lora.Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x, *args, **kwargs) * 1.5

    Louder.__module__, Louder.__name__ = peft.tuners.lora.Linear.__module__, "Linear"
    build = with_lora(LLAMA, target_modules=["q_proj"])

    def louder() -> nn.Module:
        model = build()
        for m in model.modules():
            if type(m) is peft.tuners.lora.Linear:
                m.__class__ = Louder
        return model

    model = stream(louder())
    fusing.grads_agree(grads(louder()), grads(model))
    none_fused(codes(model), "no template has its")


def test_plans_count_layers_with_lora_as_templates() -> None:
    model = with_lora(LLAMA)().bfloat16()
    for n, p in model.named_parameters():
        if ".lora_" in n:
            p.data = p.data.float()
    bare = shapes.shapes_of(LLAMA().bfloat16())("fp32").windows[1]
    found = shapes.shapes_of(model)("fp32").windows[1]
    assert found.kind == "layer" and found.itemsize == 2 and found.attention == bare.attention
    assert found.template == bare.template
    beside = [p for p in found.products if p.part == "adapter"]
    assert len(beside) == 14 and all(p.trained for p in beside)
    own = [p for p in found.products if p.part != "adapter"]
    assert own == [dataclasses.replace(p, trained=False) for p in bare.products]
    assert mt.plan(model, tokens=24, seq=12, machine="h200").seconds > 0
