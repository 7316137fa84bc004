"""Experts of a mixture that are fetched a few at a time: the resident model's bits, by transformers' own loops."""
from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import doors
import parity
import pytest
import torch
from parity import assert_same
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import megatrain_torch as mt  # noqa: E402
from megatrain_torch.base.codes import NF4_BLOCK, Coded  # noqa: E402
from megatrain_torch.base.units import usual_experts  # noqa: E402
from megatrain_torch.graph.window import Stack  # noqa: E402
from megatrain_torch.model.homes import move  # noqa: E402
from megatrain_torch.model.stream import runtime_of  # noqa: E402

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=48, head_dim=16, max_position_embeddings=64)
EXPERTS = 8
ARCHES = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "qwen3": lambda: transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=EXPERTS,
                                                 num_experts_per_tok=3),
    "gpt-oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_hidden_layers": 3, "head_dim": 8, "num_key_value_heads": 4}, moe_intermediate_size=32,
        n_routed_experts=EXPERTS, num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16),
}


def is_stack(name: str, p: Tensor) -> bool:
    return "experts" in name and p.dim() == 3


def coded(w: Tensor, form: str) -> Coded:
    """Random codes in the place of a stack."""
    experts, fan_in, fan_out = w.shape
    if form == "nf4":
        scales = torch.rand(experts, 1, fan_in * fan_out // NF4_BLOCK) * 0.05
        return Coded(torch.randint(0, 256, (experts, fan_in, fan_out // 2), dtype=torch.uint8), scales, form, w.dtype)
    groups = experts, fan_out, fan_in // 32
    return Coded(torch.randint(0, 256, (*groups, 16), dtype=torch.uint8),
                 torch.randint(118, 124, groups, dtype=torch.uint8), form, w.dtype)


@functools.cache
def made(arch: str, how: str, codes: str = "") -> nn.Module:
    """Frozen experts; all else trains. codes: their form; "": they are none."""
    parity.seed()
    model = transformers.AutoModelForCausalLM.from_config(ARCHES[arch](), dtype=torch.bfloat16, experts_implementation=how)
    for name, p in list(model.named_parameters()):
        if is_stack(name, p):
            p.requires_grad_(False)
            if codes:
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, nn.Parameter(coded(p, codes), requires_grad=False))
    return model.train()


def model_of(arch: str, how: str, codes: str = "") -> nn.Module:
    return copy.deepcopy(made(arch, how, codes))


def batch(step: int, tokens: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(0, 48, (2, tokens), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def trained_once(model: nn.Module, own: list[nn.Parameter], opt: torch.optim.Optimizer, step: int) -> list[Tensor]:
    """The loss and every gradient."""
    loss = model(**batch(step)).loss
    loss.backward()
    seen = [loss.detach().clone(), *(p.grad.clone() for p in own)]
    opt.step()
    opt.zero_grad()
    return seen


def trained(model: nn.Module, steps: int = 2) -> list[Tensor]:
    own = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(own, lr=1e-2)
    return [t for step in range(steps) for t in trained_once(model, own, opt, step)]


@functools.cache
def wanted(arch: str, how: str, codes: str = "") -> list[Tensor]:
    model = model_of(arch, how, codes)
    if codes:
        for m in model.modules():
            for name, p in m._parameters.items():
                if isinstance(p, Coded):
                    m._parameters[name] = nn.Parameter(p.expand_codes(), requires_grad=False)
    return trained(model)


def streamed(model: nn.Module, compute: str = "eager", **plan: Any) -> nn.Module:
    nvme = plan.pop("nvme", None)
    return doors.stream(model, "cpu", compute=compute, nvme=nvme,
                        plan={"slots": 2, "debug": {"poison": True, "delay_us": 100}, **plan})


ALL = [(a, how, c, k, n, h) for a in ARCHES for how in ("eager", "grouped_mm", "batched_mm")
       for c in ("", "nf4", "mxfp4")[:2 + (a == "gpt-oss")] for k in ("replay", "saved") for n in (1, 3, 4)
       for h in ("ram", "vram", "disk", "disk+weights")]
SOME = [("mixtral", "eager", "nf4", "replay", 2, "ram"), ("qwen3", "grouped_mm", "", "saved", 3, "ram"),
        ("qwen3", "eager", "", "saved", 2, "disk"), ("gpt-oss", "eager", "mxfp4", "replay", 1, "ram"),
        ("gpt-oss", "grouped_mm", "mxfp4", "replay", 3, "ram"),
        ("gpt-oss", "eager", "nf4", "saved", 3, "disk+weights"),
        ("deepseek", "grouped_mm", "nf4", "saved", 4, "vram"), ("deepseek", "eager", "", "replay", 3, "ram"),
        ("mixtral", "batched_mm", "", "replay", 3, "ram"), ("qwen3", "grouped_mm", "nf4", "saved", 4, "ram")]


@pytest.mark.parametrize(("arch", "how", "codes", "keeps", "experts", "home"), ALL if parity.FULL else SOME)
def test_experts_fetched_a_few_at_a_time_give_the_resident_models_bits(
        arch: str, how: str, codes: str, keeps: str, experts: int, home: str, tmp_path: Path) -> None:
    model = streamed(model_of(arch, how, codes), activations=keeps, experts=experts, homes=home,
                     nvme=str(tmp_path) if "disk" in home else None)
    assert_same(trained(model), wanted(arch, how, codes))
    rt = runtime_of(model)
    assert len(rt.ring.stacks) == 4
    if home in ("ram", "disk") and not (arch == "deepseek" and codes):       # whose first layer has no experts
        layer = max(rt.core.hi_bytes(unit) for unit in range(len(rt.units)))
        assert max(s.nbytes for s in rt.ring.slots) < 0.6 * layer, "a slot holds a part of a layer"


def by_templates(arch: str, codes: str, **plan: Any) -> tuple[nn.Module, list[Tensor]]:
    """GPT-OSS' biases of experts train too."""
    model = streamed(model_of(arch, "grouped_mm", codes), "fused", **plan)
    found = trained(model)
    at = f"experts are fetched {plan['experts']} at a time" if plan["experts"] else ""
    layers = [w for w in runtime_of(model).windows if "layers." in w.name]
    assert [w.code for w in layers if w.fused.template.routes] == [", ".join(filter(None, ("template", at)))] * 2
    assert all(w.code.startswith("template") for w in layers)
    return model, found


@functools.cache
def whole(arch: str, codes: str) -> list[Tensor]:
    return by_templates(arch, codes, activations="saved", experts=0)[1]


PIECES = [(a, c, k, n, s, h) for a, c in (("mixtral", ""), ("qwen3", "nf4"), ("gpt-oss", "mxfp4"), ("qwen3", ""),
                                               ("deepseek", "nf4"), ("deepseek", ""))
          for k in ("saved", "selective", "attention", "replay") for n, s in ((1, 2), (3, 4)) for h in ("ram", "vram")]
FEW = [("deepseek", "nf4", "replay", 3, 2, "ram")]


@pytest.mark.parametrize(("arch", "codes", "keeps", "experts", "ring", "home"), PIECES if parity.FULL else FEW)
def test_templates_over_a_few_experts_at_a_time_give_their_own_bits(arch: str, codes: str, keeps: str, experts: int,
                                                                    ring: int, home: str) -> None:
    assert_same(by_templates(arch, codes, activations=keeps, experts=experts, slots=ring, homes=home)[1],
                whole(arch, codes))


@parity.LONG
def test_a_template_has_experts_cross_twice_and_the_modules_own_code_three_times() -> None:
    crossed = {}
    for compute in ("fused", "eager"):
        model = streamed(model_of("mixtral", "grouped_mm"), compute, activations="replay", experts=1, slots=4)
        core, seen = runtime_of(model).core, []
        for step in range(3):
            before = core.stats()["h2d_bytes"]
            model(**batch(step, 64)).loss.backward()
            seen.append(core.stats()["h2d_bytes"] - before)
        crossed[compute] = seen[-1] / sum(core.hi_bytes(u) for u in range(len(runtime_of(model).units)))
    assert 1.5 < crossed["fused"] < 2.1 and crossed["eager"] > 2.3, crossed


@parity.LONG
def test_a_look_at_numbers_goes_through_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain_torch.fused.templates.weights import Pieces
    own = Pieces.experts
    monkeypatch.setattr(Pieces, "experts", lambda self, name, which: own(self, name, which) * 1.1)
    model = streamed(model_of("mixtral", "grouped_mm"), "fused", experts=3)
    trained(model, 1)
    assert "is off from fp32 by" in runtime_of(model).windows[1].code


def test_codes_are_expanded_a_few_experts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[int] = []
    own = Coded.expand_codes
    monkeypatch.setattr(Coded, "expand_codes", lambda stack: made_of.append(stack.shape[0]) or own(stack))
    trained(streamed(model_of("gpt-oss", "grouped_mm", "mxfp4"), activations="replay", experts=3, homes="vram"), 1)
    assert made_of and max(made_of) == 3


def test_experts_that_no_token_chose_are_not_fetched() -> None:
    model = streamed(model_of("mixtral", "eager"), experts=1).eval()
    ids = torch.tensor([[5]])
    fetched = []
    with torch.no_grad():
        for _ in range(2):
            before = runtime_of(model).core.stats()["fetches"]
            out = model(input_ids=ids).logits
            fetched.append(runtime_of(model).core.stats()["fetches"] - before)
        assert torch.equal(out, model_of("mixtral", "eager").eval()(input_ids=ids).logits)
    chosen, ends = 2, 3                      # of each of two layers; embedding, norm, head
    assert fetched[1] <= 2 * (1 + 2 * chosen) + ends


def test_what_else_is_done_with_a_stack_is_done_with_all_its_experts() -> None:
    model = streamed(model_of("qwen3", "eager"), experts=3)
    experts, plain = model.model.layers[0].mlp.experts, model_of("qwen3", "eager").model.layers[0].mlp.experts
    seen: list[Any] = []

    def look(module: nn.Module, args: Any) -> None:
        stack = module.gate_up_proj
        seen.append((type(stack), stack.shape, stack.dtype, stack.device.type, (stack * 2).sum(-1),
                     stack[-1], stack.mT[2], torch.transpose(stack, 1, 2)[1:3], stack.transpose(dim0=-1, dim1=1)[0]))

    experts.register_forward_pre_hook(look)
    with torch.no_grad():
        model(**batch(0))
    w = plain.gate_up_proj.detach()
    kind, *found = seen[0]
    assert kind is Stack and found[:3] == [w.shape, w.dtype, "cpu"]
    for a, b in zip(found[3:], ((w * 2).sum(-1), w[-1], w.mT[2], w.mT[1:3], w.mT[0]), strict=True):
        assert torch.equal(a, b)


def test_rows_of_no_expert_give_zeros_there_and_back() -> None:
    """As transformers' own function has them, which pads rows so; what is not written would be NaN."""
    pytest.importorskip("transformers.integrations.moe")         # which makes the function
    product, offs = torch.ops.transformers.grouped_mm_fallback, torch.tensor([1, 1, 4, 4, 4, 4, 4, 4], dtype=torch.int32)

    def of(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()

        def look(module: nn.Module, args: Any) -> None:
            with torch.enable_grad():
                y = product(x, module.gate_up_proj.mT, offs=offs)
                seen.extend([y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))])

        model.model.layers[0].mlp.experts.register_forward_pre_hook(look)
        with torch.no_grad():
            model(**batch(0))
        return seen

    torch.use_deterministic_algorithms(True)             # fills what is new with NaN
    try:
        found = of(streamed(model_of("qwen3", "eager"), experts=3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(t[4:].any() for t in found) and all(t[:4].any() for t in found)
    assert_same(found, of(model_of("qwen3", "eager")))


def test_the_model_outside_of_a_forward_is_what_it_was(tmp_path: Path) -> None:
    plain, model = model_of("gpt-oss", "eager"), streamed(model_of("gpt-oss", "eager"), experts=3)
    for (name, a), (_, b) in zip(model.state_dict().items(), plain.state_dict().items()):
        assert torch.equal(a, b), name
    with torch.no_grad():                    # what is written is what is fetched next
        for m in (model, plain):
            m.model.layers[1].mlp.experts.down_proj.mul_(0.5)
    assert torch.equal(model(**batch(0)).loss, plain(**batch(0)).loss)
    mt.unstream(model)
    assert_same(trained(model, 1), trained(plain, 1))


def test_experts_that_come_to_be_trained_are_refused() -> None:
    model = streamed(model_of("qwen3", "eager"), experts=2)
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(mt.MegatrainError, match=r"down_proj: its experts are fetched a few at a time"):
            model(**batch(0))
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    model(**batch(0)).loss.backward()


def test_trained_experts_are_fetched_with_their_layer() -> None:
    model = model_of("qwen3", "eager")
    for p in model.parameters():
        p.requires_grad_(True)
    assert not runtime_of(streamed(model, experts=2)).ring.stacks


def test_weights_changed_between_forward_and_backward_are_refused() -> None:
    for how in ("eager", "grouped_mm"):
        model = streamed(model_of("qwen3", how), experts=3, activations="saved")
        loss = model(**batch(0)).loss
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj.mul_(0.5)
        with pytest.raises(RuntimeError, match="updated between forward and backward"):
            loss.backward()


# ---- plans ---------------------------------------------------------------------------------------

def large() -> nn.Module:
    """On the meta device: 48 experts, of which one has 24 MiB in all."""
    config = transformers.Qwen3MoeConfig(**SIZES | {"hidden_size": 2048, "num_hidden_layers": 4},
                                         moe_intermediate_size=2048, num_experts=48, num_experts_per_tok=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        p.requires_grad_(not is_stack(name, p))
    return model


def test_a_plan_fetches_experts_a_few_at_a_time_where_all_of_a_layer_do_not_fit() -> None:
    asked = dict(tokens=1024, seq=512, machine="h200-128g", compute="eager")
    assert mt.plan(large(), **asked, vram="40GiB").experts == 0
    tight = mt.plan(large(), **asked, vram="3GiB")
    assert tight.experts == 16 and "experts 16 at a time" in str(tight)
    assert tight.vram["slots"] < 2 * 2**30 and tight.vram_bytes <= 3 * 2**30
    with pytest.raises(mt.MegatrainError, match="does not fit"):
        mt.plan(large(), **asked, vram="3GiB", experts=0)
    assert mt.plan(large(), **asked, vram="3GiB", experts=4).vram["slots"] < tight.vram["slots"]
    with pytest.raises(mt.MegatrainError, match="experts=-1: a whole number"):
        mt.plan(large(), **asked, experts=-1)


def test_a_plan_and_the_model_have_the_same_slots() -> None:
    model = model_of("gpt-oss", "eager", "mxfp4")
    plan = mt.plan(model, tokens=24, seq=12, machine="cpu", experts=3, compute="eager", homes="ram")
    assert plan.experts == 3 and usual_experts([("experts.w", torch.nn.Parameter(torch.ones(2, 3, 4)))]) == 0
    mt.stream(model, "cpu", plan=plan)
    assert sum(s.nbytes for s in runtime_of(model).ring.slots) == plan.vram["slots"]
    assert "experts are fetched 3 at a time" in str(mt.explain(model))
    assert_same(trained(model), wanted("gpt-oss", "eager", "mxfp4"))


def test_a_plan_with_a_disk_fetches_what_is_on_it_with_its_layer(tmp_path: Path) -> None:
    asked = dict(tokens=1024, seq=512, machine="h200-128g", compute="eager", nvme={"limit": "1TB"})
    tight = mt.plan(large(), **asked, vram="3GiB")
    assert tight.experts == 16 and not {"disk", "disk+weights"} & set(tight.homes.values())
    assert mt.plan(large(), **asked, vram="40GiB", homes="disk+weights").experts == 0
    filed = mt.plan(large(), **asked, homes="disk+weights", experts=8)
    assert filed.experts == 8 and filed.vram["slots"] > tight.vram["slots"]
    short = mt.plan(large(), **asked, vram="4GiB", host="3.7GiB", experts=16)
    assert "disk+weights" in short.homes.values() and short.vram_bytes <= 4 << 30


def test_a_plan_of_a_streamed_mixture_of_codes_is_that_of_the_model() -> None:
    asked = dict(tokens=24, seq=12, machine="cpu", compute="eager")
    plan = mt.plan(model_of("qwen3", "eager", "nf4"), **asked)
    assert mt.plan(streamed(model_of("qwen3", "eager", "nf4")), **asked) == plan


@pytest.mark.parametrize("home", ["disk", "disk+weights"])
def test_a_plan_and_the_model_have_the_same_slots_with_a_disk(home: str, tmp_path: Path) -> None:
    model = model_of("gpt-oss", "eager", "mxfp4")
    homes = {"model.layers.0": home}
    plan = mt.plan(model, tokens=24, seq=12, machine="cpu", experts=3, compute="eager", homes=homes, nvme=str(tmp_path))
    mt.stream(model, "cpu", plan=plan, nvme=str(tmp_path))
    assert sum(s.nbytes for s in runtime_of(model).ring.slots) == plan.vram["slots"]
    assert_same(trained(model), wanted("gpt-oss", "eager", "mxfp4"))


def test_a_running_model_comes_to_fetch_other_numbers_of_experts_beside_a_disk(tmp_path: Path) -> None:
    model = streamed(model_of("gpt-oss", "eager", "mxfp4"), activations="replay", nvme=str(tmp_path))
    asked = dict(tokens=24, seq=12, machine="cpu", compute="eager", nvme=str(tmp_path))
    plan = mt.plan(model_of("gpt-oss", "eager", "mxfp4"), **asked, homes="ram", experts=3)
    own, seen = [p for p in model.parameters() if p.requires_grad], []
    opt = torch.optim.AdamW(own, lr=1e-2)
    for step, experts in enumerate((3, 1)):
        homes = {**plan.homes, "model.layers.0": "disk+weights"}
        move(runtime_of(model), dataclasses.replace(plan, homes=homes, experts=experts), 1 << 40)
        seen += trained_once(model, own, opt, step)
        assert {len(s.pieces[0].experts) for s in runtime_of(model).ring.stacks.values()} == {experts}
    assert_same(seen, wanted("gpt-oss", "eager", "mxfp4"))
