"""Decoder layers with LoRA, run by templates: the training of PEFT's own code, within rounding; and what they refuse.

Bases of codes, with the same adapters: test_bases.py."""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusing
import parity
import pytest
import test_experts
import test_fused
import torch
import zoo
from fusing import KEEPS, all_fused, codes, fused, lm, none_fused, padded, plain, stream
from torch import Tensor, nn

peft = pytest.importorskip("peft", reason="PEFT is not installed")

import megatrain_torch as mt  # noqa: E402
from megatrain_torch.base.codes import Coded  # noqa: E402
from megatrain_torch.fused.templates import decoder  # noqa: E402
from megatrain_torch.plans import shapes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = lm("llama")
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "all of llama": (LLAMA, {}),
    "some of qwen2": (lm("qwen2"), {"target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "phi3, rank-stabilised": (lm("phi3"), {"use_rslora": True, "lora_alpha": 3}),
    "qwen3, odd ranks": (lm("qwen3", head_dim=8), {"r": 3, "lora_alpha": 2}),
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
    return [(c, k) for i, c in enumerate(CASES) for j, k in enumerate(KEEPS) if parity.FULL or (i == 1 and j == 1)]


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
    at = {id(r.param): r for unit in fusing.runtime_of(model).units for r in unit}
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


# ---------------------------------------------------------------- on experts' own matrices

GU, DOWN = "experts.gate_up_proj", "experts.down_proj"
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
OF_EXPERTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "qwen3_moe": (lm("qwen3_moe", **FOUR, norm_topk_prob=True), {}),
    "mixtral, rank-stabilised": (lm("mixtral", num_local_experts=4), {"use_rslora": True, "lora_alpha": 3, "r": 3}),
    "gpt_oss, transposed": (lm("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8), {"r": 8}),
    "beside a shared expert": (lm("qwen2_moe", **FOUR, shared_expert_intermediate_size=32), {"target_parameters": [DOWN]}),
}


def on_experts(case: str, **config: Any) -> Callable[[], nn.Module]:
    build, own = OF_EXPERTS[case]
    return with_lora(build, **{"target_modules": ["q_proj"], "target_parameters": [GU, DOWN], **own, **config})


@pytest.mark.parametrize(("case", "keep"), [
    pytest.param(c, k, marks=() if i == j + 1 else parity.LONG)
    for i, c in enumerate(OF_EXPERTS) for j, k in enumerate(KEEPS)])
def test_layers_with_lora_on_experts_matrices_train_as_pefts_own(case: str, keep: str) -> None:
    fusing.same_as_plain(on_experts(case), padded, keep)


def experts_in_16_bits(arch: str, form: str) -> nn.Module:
    return with_lora(lambda: test_experts.model_of(arch, "grouped_mm", form), lora_alpha=6, target_modules=["q_proj"],
                     target_parameters=[GU, DOWN])()


@pytest.mark.parametrize(("arch", "form", "keep", "experts", "home"), [
    ("qwen3", "nf4", "replay", 3, "ram"), pytest.param("mixtral", "", "saved", 1, "ram", marks=parity.LONG),
    pytest.param("gpt-oss", "mxfp4", "replay", 3, "vram", marks=parity.LONG),
    pytest.param("qwen3", "", "replay", 3, "disk", marks=parity.LONG)])
def test_experts_with_lora_may_be_codes_and_be_fetched_a_few_at_a_time(arch: str, form: str, keep: str, experts: int,
                                                                       home: str, tmp_path: Path) -> None:
    """The bits of all at once; from fp32 as far as PEFT's own code, which gives adapters of 32 bits gradients of 32."""
    parity.seed()
    model = experts_in_16_bits(arch, form)
    wide = copy.deepcopy(model)
    for m in wide.modules():
        for name, p in m._parameters.items():
            if isinstance(p, Coded):
                m._parameters[name] = nn.Parameter(p.expand_codes(), requires_grad=False)
    found = {}
    for compute, at_once in (("eager", 0), ("fused", 0), ("fused", experts)):
        streamed = test_experts.streamed(copy.deepcopy(model), compute, activations=keep, experts=at_once, homes=home,
                                         nvme=str(tmp_path) if home == "disk" else None)
        found[compute, at_once] = test_experts.trained(streamed, 1)
        assert all(code.startswith("template") == (compute == "fused") for code in codes(streamed).values())
    parity.assert_same(found["fused", 0], found["fused", experts])
    parity.assert_same(test_experts.trained(copy.deepcopy(wide), 1), found["eager", 0])
    truth = test_experts.trained(wide.float(), 1)
    theirs, ours = ([fusing.error(t, f) for t, f in zip(truth, found[how, 0], strict=True)] for how in ("eager", "fused"))
    assert statistics.median(ours) <= 1.5 * statistics.median(theirs) and max(ours) <= 2 * max(theirs)


def test_adapters_of_experts_that_change_are_followed_or_refused() -> None:
    """What a template takes of them it looks at before each call; each is proved anew."""
    def wrappers(model: nn.Module) -> list[Any]:
        return [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]

    def scaled(model: nn.Module, scale: float) -> None:
        for m in wrappers(model):
            m.scaling["default"] = scale

    build = on_experts("qwen3_moe")
    model, twin = stream(build()), build()
    for change in (lambda m: None, lambda m: scaled(m, 0.5), lambda m: wrappers(m)[0].enable_adapters(False),
                   lambda m: wrappers(m)[0].enable_adapters(True)):
        change(model)
        change(twin)
        fusing.grads_agree(grads(twin), grads(model))
        all_fused(codes(model))
    one = wrappers(model)[1]
    one.merged_adapters.append("default")                # PEFT then adds nothing: the sum is taken for the weight
    name = next(name for name, m in model.named_modules() if m is one)
    assert grads(model)[f"{name}.lora_A.default.weight"] is None
    assert [code for code in codes(model).values() if "has adapters merged into it" in code]
    one.merged_adapters.clear()
    one.get_delta_factors = lambda name: (*type(one).get_delta_factors(one, name)[:2], 3.0)
    grads(model)
    assert [code for code in codes(model).values() if "is not PEFT's own" in code]
    del one.get_delta_factors
    fusing.grads_agree(grads(twin), grads(model))
    all_fused(codes(model))


def another_too(model: Any) -> None:
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])


@pytest.mark.parametrize(("why", "case", "parameters", "change"), [
    ("several active adapters of down_proj", "qwen3_moe", [GU, DOWN], another_too),
    ("has adapters merged into it", "qwen3_moe", [GU, DOWN], lambda model: model.merge_adapter()),
    ("gate_up_proj_bias has an adapter of", "gpt_oss, transposed", [f"{GU}_bias"], lambda model: None)])
def test_experts_with_other_adapters_run_pefts_code_and_say_so(why: str, case: str, parameters: list[str],
                                                               change: Callable[[Any], Any]) -> None:
    model = on_experts(case, target_parameters=parameters)()
    change(model)
    model.get_input_embeddings().weight.requires_grad_()
    twin = copy.deepcopy(model)
    stream(model)
    fusing.grads_agree(grads(twin), grads(model))
    none_fused(codes(model), why)


def test_an_adapter_of_experts_adds_at_most_two_matrices_at_once_and_plans_count_them(monkeypatch: Any) -> None:
    made: list[int] = []
    own = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda w, *a, **k: made.append(w.numel()) or own(w, *a, **k))
    model = stream(on_experts("qwen3_moe")(), "replay")
    grads(model)
    made.clear()
    grads(model)
    gate_up, down = 4 * 32 * zoo.H, 4 * 16 * zoo.H
    assert sorted(made) == sorted([gate_up, down] * 2 * len(codes(model))), "once in a forward, once in a backward"
    monkeypatch.undo()
    build = on_experts("qwen3_moe")
    assert shapes.shapes_of(build(), dtype=torch.bfloat16)("fp32") == shapes.shapes_of(build().bfloat16())("fp32")
    of, plain = (shapes.shapes_of(make().bfloat16()) for make in (build, OF_EXPERTS["qwen3_moe"][0]))
    with_codes, bare, some = of("fp32").windows[1], plain("fp32").windows[1], of("fp32", 1).windows[1]
    adapters = 4 * 8 * (zoo.H + 32 + 16 + zoo.H)         # of rank 4, filled up
    assert with_codes.template.expanded == (2 * (gate_up + down + adapters), 3 * 2 * (gate_up + down))
    assert some.template.expanded[0] == 2 * ((gate_up + down) // 4 + adapters), "those of all experts are there"
    assert with_codes.dense == (2 * 2 * (gate_up + down), 2 * (gate_up + down)) and bare.template.expanded == (0, 0)
    folded = [(p.fan_in, p.fan_out, p.rows) for p in with_codes.products if p.part == "folded"]
    assert sorted(folded) == sorted([(zoo.H, 4, 2.0), (4, 32, 2.0), (16, 4, 2.0), (4, zoo.H, 2.0)])
