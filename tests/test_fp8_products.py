"""Layers whose products are of 8-bit codes: mt.stream(products="fp8").

What a product must be is said by torch's own casts and fp64 (test_ops_fp8). Whatever keeps, moves or delays tensors
changes no bit of it; what is no product of an inner layer is as it was.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import fusing
import parity
import pytest
import torch
import zoo
from op_cases import TYPES
from test_ops_fp8 import reference
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import MegatrainError, ops
from megatrain_torch.base import modes as rules
from megatrain_torch.base.modes import check_products
from megatrain_torch.fused.templates import Coded, Weights
from megatrain_torch.model.stream import runtime_of

DEEP = fusing.lm("llama", num_hidden_layers=4)
MODES = ("selective", "replay", "attention", "linked", "saved+host", "linked+host", "linked+disk")
FP8 = "template, products in fp8"


def tiny(keep: Any = "saved", build: Callable[[], nn.Module] = DEEP, products: str | None = "fp8", nvme: Any = None,
         change: Callable[[nn.Module], None] = lambda _: None, **debug: Any) -> nn.Module:
    parity.seed()
    model = build().to(torch.bfloat16)
    change(model)
    return doors.stream(model, "cpu", compute="fused", products=products, nvme=nvme,
                        plan={"activations": keep, "slots": 2, "debug": {"poison": True, **debug}})


def run(keep: Any = "saved", accumulate: int = 1, **how: Any) -> fusing.Run:
    model = tiny(keep, **how)
    found = fusing.train(model, fusing.padded, mt.AdamW, 2, accumulate)
    found.codes = fusing.codes(model)
    return found


def same(a: fusing.Run, b: fusing.Run) -> bool:
    assert a.codes == b.codes
    return all(map(parity.same_bits, a.losses, b.losses)) and all(
        parity.same_bits(mine[n], other[n]) for mine, other in ((a.grads, b.grads), (a.weights, b.weights)) for n in mine)


@pytest.fixture(scope="module")
def saved() -> fusing.Run:
    return run()


# ---------------------------------------------------------------- one product

T, N, K = 24, (32, 16), 48                   # tokens are no multiple of 16


def dense(x: Tensor) -> Tensor:
    """What the codes of x's rows stand for, in fp64, by torch's own cast."""
    codes, scale = reference(x)
    return codes.double() * scale.double()[:, None]


def operands() -> tuple[Coded, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    def make(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=g)
        return (x * torch.exp2(torch.randint(-6, 6, (shape[0], 1), generator=g)) if len(shape) > 1 else x).bfloat16()
    own = {"a": make(N[0], K), "b": make(N[1], K), "a_bias": make(N[0]), "b_bias": make(N[1])}
    return Coded(Weights(own), {"a", "b"}), make(T, K), make(T, sum(N)), make(T, sum(N))


NAMES, BIASES = ("a", "b"), ("a_bias", "b_bias")


def near(found: Tensor, a: Tensor, b: Tensor, *more: Tensor, factor: float = 1.0) -> None:
    """found = factor * a @ b' and what is added: summed in fp32, rounded once, or twice where something is added."""
    product, largest = factor * (a @ b.t()), abs(factor) * (a.abs() @ b.abs().t()) + sum(t.abs() for t in more)
    wanted = product + sum(more)
    bound = a.shape[1] * 2**-24 * largest + (1 + len(more)) * TYPES[found.dtype] * (wanted.abs() + bool(more) * largest)
    assert ((found.double() - wanted).abs() <= bound).all()


def test_each_product_is_that_of_the_codes_of_its_lines() -> None:
    w, x, dy, base = operands()
    matrix = w.joint(NAMES)
    near(w.product(NAMES, x), dense(x), dense(matrix))
    near(w.product(NAMES, x, BIASES), dense(x), dense(matrix), w.joint(BIASES).double().expand(T, -1))
    near(w.product(NAMES, x, (), base, 0.25), dense(x), dense(matrix), base.double(), factor=0.25)
    near(w.input_grad(NAMES, dy), dense(dy), dense(matrix.t()))
    near(w.weight_grad(NAMES, dy, x), dense(dy.t()), dense(x.t()))


# What docs/numerics.md has a table of: operands of a layer, by what they are like.
LIKE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all alike": lambda x, dy: None,
    "tokens apart": lambda x, dy: [t.mul_(torch.exp2(torch.linspace(-6, 6, len(t)).round())[:, None]) for t in (x, dy)],
    "a channel out": lambda x, dy: x[:, 7].mul_(1000),
    "channels out": lambda x, dy: (x[:, 7].mul_(1000), dy[:, 3].mul_(1000)),
    "an element out": lambda x, dy: (x[5, 7].fill_(1000), dy[9, 3].fill_(1000)),
}


def worst(exact: Tensor, found: Tensor, dim: int) -> float:
    """The largest error of a line, of its own norm."""
    return float(((found.double() - exact).norm(dim=dim) / exact.norm(dim=dim)).max())


OUTLIERS: dict[str, Callable[[Tensor, Tensor, float], Any]] = {
    "masked token": lambda x, dy, times: (x[0].mul_(times), dy[0].zero_()),
    "hardly used token": lambda x, dy, times: (x[0].mul_(times), dy[0].div_(times)),
    "masked tokens": lambda x, dy, times: (x[::16].mul_(times), dy[::16].zero_()),
    "masked element": lambda x, dy, times: (x[0, 7].mul_(times), dy[0].zero_()),
    "token in some channels": lambda x, dy, times: (dy[3].mul_(times), x[3].zero_(), x[3, 5].fill_(1)),
    "elements of a token": lambda x, dy, times: (x[3, 7].mul_(times), dy[3].mul_(0.1)),
    "channel": lambda x, dy, times: x[:, 7].mul_(times),
    "channel and masked token": lambda x, dy, times: (x[:, 7].mul_(times), x[0].mul_(times), dy[0].zero_()),
}


@pytest.mark.parametrize("times", [1e4, 1e5, 1e6, 1e7])
@pytest.mark.parametrize("change", OUTLIERS)
def test_no_channel_loses_its_bits_to_an_outlier(change: str, times: float) -> None:
    """The largest error of a token of y and dx, and of a channel of x and dy in dW: 0.04 to 0.05 where many products are
    added, and where one is nearly all of a line what two roundings to 4 bits are off by at most, 2 * 2^-4. In the lines
    of dW that an outlying channel of x is nearly all of, single sums decide, which may cancel."""
    g = torch.Generator().manual_seed(1)
    x, dy = torch.randn(512, 96, generator=g), torch.randn(512, 64, generator=g)
    OUTLIERS[change](x, dy, times)
    x, dy, matrix = x.bfloat16(), dy.bfloat16(), (0.02 * torch.randn(64, 96, generator=g)).bfloat16()
    w = Coded(Weights({"w": matrix}), {"w"})
    y, dx, dw = w.product(("w",), x), w.input_grad(("w",), dy), w.weight_grad(("w",), dy, x)
    x, dy, matrix = x.double(), dy.double(), matrix.double()
    live = dy.any(1)
    found = [worst(x @ matrix.t(), y, 1), worst((dy @ matrix)[live], dx[live], 1), worst(dy.t() @ x, dw, 0)]
    if not change.startswith("channel"):
        found.append(worst(dy.t() @ x, dw, 1))
    assert max(found) < 0.13, found
    assert "masked token" not in change or max(found[1:]) < 0.06, found


@pytest.mark.parametrize("times", [1e4, 1e6])
def test_no_channel_of_an_mlp_loses_its_bits_to_a_token(times: float) -> None:
    """What goes straight to codes: down's input with a massive activation, and gate's and up's where no norm is before
    them; the tokens count for little."""
    g = torch.Generator().manual_seed(2)
    x, dd = torch.randn(256, 48, generator=g).bfloat16(), torch.randn(256, 48, generator=g).bfloat16()
    gu = torch.randn(256, 64, generator=g).bfloat16()
    gu[0, 32:] *= times                                      # of up: h is as large, dgate too
    x[0] *= times
    dd[0] = 0
    x[9] *= times
    dd[9] /= times
    own = Weights({"gu": torch.randn(64, 48, generator=g).bfloat16(), "down": torch.randn(48, 32, generator=g).bfloat16()})
    w = Coded(own, {"gu", "down"})
    dh = w.input_grad(("down",), dd)
    before = own.gated_grads(("gu",), ("down",), dh.clone(), gu.clone(), ops.SILU, x)
    d, h = w.gated_grads(("gu",), ("down",), dh, gu, ops.SILU, x)
    for found, exact in ((w.weight_grad(("down",), dd, h), dd.double().t() @ before[1].double()),
                         (w.weight_grad(("gu",), d, x), before[0].double().t() @ x.double())):
        assert max(worst(exact, found, dim) for dim in (0, 1)) < 0.08


def test_a_model_of_which_no_product_fits_is_refused() -> None:
    build = fusing.lm("llama", num_hidden_layers=4, hidden_size=24, intermediate_size=40, num_attention_heads=2, head_dim=12)
    with pytest.raises(MegatrainError, match=r"has no layer for them.*sizes are multiples of 16"):
        tiny(build=build)


@pytest.mark.parametrize("like", LIKE)
def test_errors_are_those_of_the_page(like: str) -> None:
    """Of y, dx, dW against fp64: what rounding both operands to 4 bits gives, 0.038 of the norm, and no more where a
    channel, a token or an element is a thousand times the others; nor is what lies beside the outlier any worse. Where
    one line of dW is nearly all of it, its own sums decide: up to 0.045."""
    g = torch.Generator().manual_seed(1)
    x, dy = torch.randn(128, 96, generator=g), torch.randn(128, 64, generator=g)
    LIKE[like](x, dy)
    matrix = 0.02 * torch.randn(64, 96, generator=g)
    x, dy, matrix = x.bfloat16(), dy.bfloat16(), matrix.bfloat16()
    w = Coded(Weights({"w": matrix}), {"w"})
    found = w.product(("w",), x), w.input_grad(("w",), dy), w.weight_grad(("w",), dy, x)
    x, dy, matrix = x.double(), dy.double(), matrix.double()
    exact = x @ matrix.t(), dy @ matrix, dy.t() @ x
    errors = [fusing.error(a, b) for a, b in zip(exact, found)]
    assert all(0.025 < e < 0.05 for e in errors) and max(errors[:2]) < 0.042, errors
    beside = [torch.cat((t[:, :7], t[:, 8:]), 1)[4:] for t in (exact[2], found[2])]
    assert fusing.error(*beside) < 0.042


def test_sums_of_weight_gradients_grow_in_fp32() -> None:
    w, x, dy, _ = operands()
    total = torch.full((sum(N), K), float("nan"))
    w.weight_grad(NAMES, dy, x, total, False)
    near(total, dense(dy.t()), dense(x.t()))
    before = total.clone().double()
    w.weight_grad(NAMES, dy, x, total, True)
    near(total, dense(dy.t()), dense(x.t()), before)


def test_forward_sums_are_fast_and_gradients_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spied(monkeypatch, "fp8_gemm_", lambda *_, fast=False, **__: fast)
    w, x, dy, base = operands()
    w.product(NAMES, x), w.product(NAMES, x, (), base)
    w.input_grad(NAMES, dy), w.weight_grad(NAMES, dy, x)
    w.weight_grad(NAMES, dy, x, torch.zeros(sum(N), K), True)
    assert asked == [True, True, False, False, False]


def spied(monkeypatch: pytest.MonkeyPatch, name: str, note: Callable[..., Any]) -> list[Any]:
    own, seen = getattr(ops, name), []
    monkeypatch.setattr(ops, name, lambda *args, **more: (seen.append(note(*args, **more)), own(*args, **more))[1])
    return seen


def test_codes_that_wait_are_for_their_own_tensor() -> None:
    w, x, dy, _ = operands()
    w.input_grad(NAMES, dy)
    other = 3 * dy
    near(w.weight_grad(NAMES, other, x), dense(other.t()), dense(x.t()))


@pytest.mark.parametrize("dtype, n, k", [(torch.bfloat16, 24, 32), (torch.bfloat16, 32, 40), (torch.float16, 32, 32)])
def test_what_does_not_fit_is_multiplied_as_it_was(dtype: torch.dtype, n: int, k: int) -> None:
    own = Weights({"a": torch.randn(n, k).to(dtype)})
    w, x, dy = Coded(own, {"a"}), torch.randn(16, k).to(dtype), torch.randn(16, n).to(dtype)
    for name, args in (("product", (x,)), ("product", (x, (), dy, 0.5)), ("input_grad", (dy,)), ("weight_grad", (dy, x))):
        assert torch.equal(getattr(w, name)(("a",), *args), getattr(own, name)(("a",), *args))
    totals = torch.zeros(2, n, k)
    w.weight_grad(("a",), dy, x, totals[0], False)
    own.weight_grad(("a",), dy, x, totals[1], False)
    assert torch.equal(*totals)


# ---------------------------------------------------------------- layers

def test_inner_layers_alone_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products forward and eight backward in each of two layers of four: not the first, the last, nor the head."""
    products = spied(monkeypatch, "fp8_gemm_", lambda c, a, b, **_: tuple(c.shape))
    model = tiny()
    model(**fusing.padded(0)).loss.backward()
    assert fusing.codes(model) == {f"model.layers.{i}": FP8 if i in (1, 2) else "template" for i in range(4)}
    tokens, h, i = zoo.B * zoo.T, zoo.H, 64
    forward = [(tokens, 2 * h), (tokens, h), (tokens, 2 * i), (tokens, h)]
    backward = [(tokens, i), (h, i), (tokens, h), (2 * i, h), (h, h), (tokens, h), (tokens, h), (2 * h, h)]
    assert products == forward * 2 + backward * 2
    assert "model.layers.1" in mt.explain(model) and mt.explain(model).count("products in fp8") == 2


def test_norms_and_gates_go_straight_to_codes_and_no_bit_tells(monkeypatch: pytest.MonkeyPatch, saved: fusing.Run) -> None:
    seen = {name: spied(monkeypatch, name, lambda *_: 1) for name in ("fp8_rms_norm", "fp8_glu", "fp8_glu_backward")}
    tiny()(**fusing.padded(0)).loss.backward()
    assert [len(calls) for calls in seen.values()] == [4, 2, 2], "layers 1 and 2 of 0 to 3"
    monkeypatch.setattr(Coded, "normed", Weights.normed)
    monkeypatch.setattr(Coded, "gated", Weights.gated)
    monkeypatch.setattr(Coded, "gated_grads", Weights.gated_grads)
    assert same(saved, run())


def test_gated_activations_that_something_else_reads_are_there_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of the two matrices is frozen, its gradient's codes are nobody's."""
    seen = spied(monkeypatch, "fp8_glu_backward", lambda *_: 1)
    gu, dh = torch.randn(T, 64).bfloat16(), torch.randn(T, 32).bfloat16()
    own = Weights({"gu": torch.randn(64, 48).bfloat16(), "down": torch.randn(48, 32).bfloat16()})
    for wanted in ({"gu"}, {"down"}, set()):
        d, h = Coded(own, wanted).gated_grads(("gu",), ("down",), dh.clone(), gu.clone(), ops.SILU, None)
        assert type(d) is Tensor and type(h) is Tensor
    assert not seen
    w = Coded(own, {"gu", "down"})
    d, h = w.gated_grads(("gu",), ("down",), w.input_grad(("down",), torch.randn(T, 48).bfloat16()), gu, ops.SILU, None)
    assert (d.shape, h.shape, d.dtype) == (gu.shape, dh.shape, gu.dtype) and seen == [1]


def test_gradients_are_as_near_as_codes_let_them_be() -> None:
    """A code is off by 2^-4 of itself at most, 0.026 in the mean square, and a product of two by 0.037; a gradient of a
    layer in the middle has gone through some six products. Without codes 0.01 (fusing.ROUNDED)."""
    def grads(dtype: torch.dtype, products: str) -> dict[str, Tensor]:
        parity.seed()
        model = DEEP().to(torch.bfloat16).to(dtype)
        model = doors.stream(model, "cpu", compute="fused" if products == "fp8" else "eager", products=products)
        model(**fusing.padded(0)).loss.backward()
        return {n: parity.frozen(p.grad).double() for n, p in model.named_parameters()}

    exact, plain, coded = grads(torch.float32, "bf16"), grads(torch.bfloat16, "bf16"), grads(torch.bfloat16, "fp8")
    for name, g in exact.items():
        off, before = fusing.error(g, coded[name]), fusing.error(g, plain[name])
        assert off < 0.15, f"{name}: {off:.3f}, in bf16 {before:.3f}"
        if ".1.mlp" in name:
            assert off > 2 * before, f"{name}: {off:.4f} is too near to bf16's {before:.4f} for products of codes"


# Every second one; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("keep", [pytest.param(m, marks=parity.LONG if i % 2 else ()) for i, m in enumerate(MODES)])
def test_what_is_kept_of_a_forward_changes_no_bit(keep: str, saved: fusing.Run, tmp_path: Path) -> None:
    assert same(saved, run(keep, nvme=str(tmp_path) if keep.endswith("+disk") else None))


def test_the_same_run_has_the_same_bits_and_so_under_delays(saved: fusing.Run) -> None:
    assert same(saved, run())
    assert same(saved, run(delay_us=300, seed=4)) and same(saved, run("linked", delay_us=200, seed=5))
    assert same(saved, run("replay", sync=True))


def test_micro_batches_are_added_up() -> None:
    both = run("selective", accumulate=2)
    assert same(both, run("replay", accumulate=2, delay_us=200, seed=6))
    model, sums = tiny(), {}
    for step in range(2):
        model.zero_grad()
        (model(**fusing.padded(step)).loss / 2).backward()
        for n, p in model.named_parameters():
            sums[n] = sums.get(n, 0) + parity.frozen(p.grad).double()
    for n, total in sums.items():            # each of the two, and their sum, is rounded to bf16
        assert fusing.error(total, both.grads[n]) < 2**-7, n


def freeze(*words: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for n, p in model.named_parameters():
            p.requires_grad_(not any(w in n for w in words))
    return change


@pytest.mark.parametrize("words", [("q_proj", "down_proj"), ("mlp",), ("layers.1", "layers.2")], ids=str)
def test_frozen_weights_have_no_gradients_and_change_nobodys(words: tuple[str, ...]) -> None:
    grads = []
    for change in (freeze(), freeze(*words)):
        model = tiny(change=change)
        model(**fusing.padded(0)).loss.backward()
        grads.append({n: parity.frozen(p.grad) for n, p in model.named_parameters()})
    for n, g in grads[1].items():
        assert g is None if any(w in n for w in words) else parity.same_bits(g, grads[0][n]), n


def test_a_layer_that_falls_back_says_so_and_runs_its_own_code() -> None:
    """A hook inside of layer 1: its outputs are those of the module's own code, and layer 2 has its codes still."""
    def hook(model: nn.Module) -> None:
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)

    model = tiny(change=hook)
    model(**fusing.padded(0)).loss.backward()
    found = fusing.codes(model)
    assert found["model.layers.2"] == FP8 and found["model.layers.1"].startswith("its own (there are hooks inside it")


def test_layers_with_lora_are_left_out_and_none_at_all_is_refused() -> None:
    peft = pytest.importorskip("peft")

    def adapted(*layers: int) -> nn.Module:
        config = peft.LoraConfig(r=16, target_modules=["q_proj"], layers_to_transform=list(layers), task_type="CAUSAL_LM")
        return peft.get_peft_model(DEEP(), config)

    model = tiny(build=lambda: adapted(0))
    model(**fusing.padded(0)).loss.backward()
    found = list(fusing.codes(model).values())
    assert [FP8 == code for code in found] == [False, False, True, False], found
    with pytest.raises(MegatrainError, match="has no layer for them"):
        tiny(build=lambda: adapted(0, 1, 2, 3))


def test_mixtures_have_them_around_their_experts() -> None:
    mixture = fusing.lm("qwen2_moe", num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                        shared_expert_intermediate_size=48, decoder_sparse_step=1, norm_topk_prob=True)
    model = tiny(build=mixture)
    found = {w.name: w.fused.products for w in runtime_of(model).windows if "layers." in w.name}
    assert found == {"model.layers.0": "", "model.layers.2": "", "model.layers.1":
                     "products in fp8 but for mlp.shared_expert_gate.weight (1 x 32), experts"}


# ---------------------------------------------------------------- what is refused, and who is told

@pytest.mark.parametrize("asked, words", [
    ({"products": "int4"}, "products='int4': use 'bf16' or 'fp8'"),
    ({"products": "fp8", "compute": "eager"}, "compute='eager': only templates make such products"),
    ({"products": "fp8", "dtype": torch.float32}, "weights of type torch.float32.*dtype=torch.bfloat16"),
    ({"products": "fp8", "dtype": torch.float16}, "weights of type torch.float16"),
])
def test_what_cannot_be_is_refused_before_anything_changes(asked: dict[str, Any], words: str) -> None:
    model = DEEP()
    with pytest.raises(MegatrainError, match=words):
        mt.stream(model, "cpu", **asked)
    assert "forward" not in model.__dict__ and model.lm_head.weight.dtype == torch.float32
    with pytest.raises(MegatrainError, match="no layer for them"):
        mt.stream(fusing.lm("llama", num_hidden_layers=2)(), "cpu", dtype=torch.bfloat16, products="fp8")


@pytest.mark.parametrize("capability, fine", [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_device_without_them_is_refused_by_name(capability: tuple[int, int], fine: bool,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules.torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(rules.torch.cuda, "get_device_name", lambda _: "Some Card")
    check_products("bf16", "auto", torch.device("cuda"))
    if fine:
        check_products("fp8", "auto", torch.device("cuda"))
        return
    with pytest.raises(MegatrainError, match=f"Some Card has compute capability {capability[0]}.{capability[1]}"):
        check_products("fp8", "auto", torch.device("cuda"))


CONFIG = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16,
              num_key_value_heads=8, vocab_size=32000)


def planned(**asked: Any) -> mt.Plan:
    import transformers
    config = transformers.LlamaConfig(**CONFIG, dtype=torch.bfloat16)
    return mt.plan(config, tokens=16384, seq=1024, **{"machine": "h200", **asked})


def test_plans_count_on_their_rate() -> None:
    before, after = planned(), planned(products="fp8")
    assert (before.products, after.products) == ("bf16", "fp8") and after.seconds < before.seconds
    assert [("products in fp8" in str(p).splitlines()[1]) for p in (before, after)] == [False, True]
    with pytest.raises(MegatrainError, match=r"products='fp8': .*a100-80g.* has no products of 8-bit codes"):
        planned(machine="a100-80g", products="fp8")
    with pytest.raises(MegatrainError, match="only templates"):
        planned(products="fp8", compute="eager")


def test_a_plan_says_it_to_stream() -> None:
    plan = mt.plan(DEEP().bfloat16(), tokens=48, seq=12, machine="cpu", products="fp8")
    for given, coded in ((None, True), ("fp8", True), ("bf16", False)):
        model = mt.stream(DEEP().bfloat16(), "cpu", plan=plan, products=given)
        assert runtime_of(model).products == ("fp8" if coded else "bf16")
        model(**fusing.padded(0)).loss.backward()
        assert ("fp8" in mt.explain(model)) is coded
    model = mt.stream(DEEP(), "cpu", tokens=48, seq=12, dtype=torch.bfloat16, products="fp8")
    assert runtime_of(model).products == "fp8"


def test_checkpoints_tell_of_another_choice(tmp_path: Path) -> None:
    def steps(model: nn.Module, opt: Any, which: range) -> list[Tensor]:
        return [zoo.update(model(**fusing.padded(step)).loss, opt) for step in which]

    model = tiny()
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    steps(model, opt, range(2))
    mt.save(model, opt, tmp_path / "c")
    truth = steps(model, opt, range(2, 4))
    model = tiny("replay")
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.load(model, opt, tmp_path / "c")
    assert all(map(parity.same_bits, truth, steps(model, opt, range(2, 4))))
    other = tiny(products="bf16")
    with pytest.warns(UserWarning, match="products fp8 there and bf16 here"):
        mt.load(other, mt.AdamW(other.parameters()), tmp_path / "c")


# ---------------------------------------------------------------- training

TEXT = Path(__file__).parents[1] / "examples/data/tinyshakespeare.txt"


def trained(products: str, seed: int, steps: int, change: Callable[[nn.Module], None] = lambda _: None) -> list[float]:
    """Losses: of the last steps' held-out text last."""
    ids = torch.tensor(list(TEXT.read_bytes()[:40_000])) % 128
    build = fusing.lm("llama", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    torch.manual_seed(seed)
    import transformers
    transformers.set_seed(seed)
    model = build().to(torch.bfloat16)
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():             # zoo's builds are seeded: another start for each
        p.data += (0.01 * torch.randn(p.shape, generator=g)).to(p.dtype)
    change(model)
    model = mt.stream(model, "cpu", compute="fused", products=products)
    opt = mt.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        batch = torch.stack([ids[i:i + 48] for i in torch.randint(0, 30_000, (4,), generator=g).tolist()])
        losses.append(float(zoo.update(model(input_ids=batch, labels=batch).loss, opt)))
    held = ids[32_000:32_000 + 64 * 48].view(64, 48)
    with torch.no_grad():
        losses.append(float(model(input_ids=held, labels=held).loss))
    return losses


@parity.LONG
def test_training_ends_within_the_spread_of_three_seeds_in_bf16() -> None:
    before = [trained("bf16", seed, 200)[-1] for seed in range(3)]
    after = [trained("fp8", seed, 200)[-1] for seed in range(3)]
    spread = max(before) - min(before)
    assert max(before) < 3.5, "nothing was learnt"
    assert abs(sum(after) - sum(before)) / 3 <= spread and max(after) <= max(before) + spread, (before, after)


def outlying(model: nn.Module) -> None:
    """One channel of the input of each MLP is a thousand times as large as the others, and its weights that much
    smaller."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[5] *= 1000
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                linear.weight[:, 5] /= 1000


@parity.LONG
def test_outliers_of_a_thousand_sigma_do_not_diverge() -> None:
    before, after = (trained(products, 0, 200, outlying) for products in ("bf16", "fp8"))
    assert all(map(math.isfinite, after)) and after[-1] < after[0]
    assert after[-1] < before[-1] + 0.3, (before[-1], after[-1])


# ---------------------------------------------------------------- the command line

@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from test_cli import bytes_tokenizer
    where = tmp_path_factory.mktemp("toy")
    fusing.lm("llama", vocab_size=257, num_hidden_layers=3, max_position_embeddings=128, pad_token_id=None,
              bos_token_id=None, eos_token_id=256)().save_pretrained(where)
    bytes_tokenizer().save_pretrained(where)
    (where / "my.txt").write_bytes(TEXT.read_bytes()[:2000])
    return where


def test_settings_of_a_run_say_it_to_stream() -> None:
    """Weights are bf16 then, on the CPU too."""
    from megatrain_torch.commands.settings import Settings
    from megatrain_torch.commands.train import _planned
    threads = torch.get_num_threads()
    try:
        settings, other = (Settings.of(asked | {"device": "cpu"}, "here").for_machine() for asked in ({"products": "fp8"}, {}))
    finally:
        torch.set_num_threads(threads)
    assert (settings.dtype, other.dtype) == ("bfloat16", "float32")
    model = mt.stream(DEEP().bfloat16(), **_planned(None, settings, None)[1])
    assert runtime_of(model).products == "fp8"
    with pytest.raises(MegatrainError, match="use one of bf16, fp8"):
        Settings.of({"products": "fp4"}, "here")
    with pytest.raises(MegatrainError, match="products=fp8, dtype=float32"):
        Settings.of({"products": "fp8", "dtype": "float32"}, "here")


@parity.LONG
def test_a_run_is_told_on_the_command_line_and_keeps_it(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In config.yaml, which `resume` reads; and in the checkpoint."""
    from megatrain_torch import cli
    from megatrain_torch.commands import folder
    products, threads = spied(monkeypatch, "fp8_gemm_", lambda *_, **__: 1), torch.get_num_threads()
    try:
        assert cli.main(["train", str(toy), str(toy / "my.txt"), "--out", str(tmp_path / "run"), "--seq", "64", "--tokens",
                         "128", "--steps", "2", "--save-every", "1", "--products", "fp8", "--device", "cpu"]) == 0
    finally:
        torch.set_num_threads(threads)
    settings = folder.settings_of(tmp_path / "run")
    assert (settings.products, settings.dtype, len(products)) == ("fp8", "bfloat16", 2 * 12)
    assert mt.checkpoint.manifest.read(tmp_path / "run/checkpoint-2")["likeness"]["products"] == "fp8"


def test_plan_takes_it_on_the_command_line(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatrain_torch import cli

    def plan(*words: str) -> tuple[int, str, str]:
        status = cli.main(["plan", str(toy), "--tokens", "4096", "--seq", "128", "--products", "fp8", *words])
        return status, *capsys.readouterr()

    status, out, _ = plan("--machine", "h200", "--json")
    assert status == 1 or '"products": "fp8"' in out
    status, _, err = plan("--machine", "a100-80g")
    assert status == 1 and "--products fp8" in err and "use --products bf16" in err
