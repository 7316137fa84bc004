"""mt.AdamW against its definition to the bit, and against torch.optim.AdamW as far as that goes.

The definition is `_core.adam_step` on plain fp32 memory (scalar kernel), itself held to double precision in
tests/c/test_adam.c. Gradients are chosen here: the model `Dots` multiplies each weight by a given tensor and
adds up, so that tensor is the weight's gradient, exactly, in every type. They take the ordinary road through
backward, the copy home and the update, and two trajectories fed alike cannot drift apart on their own.
"""
from __future__ import annotations

import copy
import gc
import io
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import parity
import pytest
import torch
from situations import batch, lm_loss, made
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt

_core = mt._core

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
SHAPES = [(33,), (7, 13), (), (16, 40)]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])


class Dot(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, g: Tensor) -> Tensor:
        return (self.weight * g).sum()


class Dots(nn.Module):
    """forward(grads): a number whose gradient by weight i is grads[i]; None leaves weight i out."""

    def __init__(self, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dot(s) for s in shapes)

    def forward(self, grads: list[Tensor | None]) -> Tensor:
        return sum(layer(g) for layer, g in zip(self.layers, grads) if g is not None)


def plain_dots(dtype: torch.dtype = F32, shapes: list[tuple[int, ...]] = SHAPES) -> Dots:
    return made(lambda: Dots(shapes)).to(dtype)


def dots(dtype: torch.dtype = F32, shapes: list[tuple[int, ...]] = SHAPES, **kw: Any) -> Dots:
    return parity.stream_for_test(plain_dots(dtype, shapes), **kw)


def grads_for(model: nn.Module, step: int, decades: float = 3.0) -> list[Tensor]:
    """Gradients of step `step`: normal numbers over some decades."""
    g = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(p.shape, generator=g) * 10 ** (-decades * torch.rand(p.shape, generator=g))).to(p.dtype)
            for p in model.parameters()]


def feed(model: nn.Module, opt: torch.optim.Optimizer, grads: list[Tensor | None]) -> None:
    update(model(grads), opt)


def fed(model: nn.Module, opt: torch.optim.Optimizer, steps: Iterable[int]) -> tuple[Any, Any]:
    """After these steps."""
    for step in steps:
        feed(model, opt, grads_for(model, step))
    return model, opt


def feed_only(model: nn.Module, step: int) -> None:
    """Gradients, and no step with them."""
    model.zero_grad()
    model(grads_for(model, step)).backward()


class Reference:
    """The definition: fp32 weight and moments in plain memory."""

    def __init__(self, p: Tensor, **hyper: Any) -> None:
        self.p = p.detach().float().clone()
        self.m, self.v, self.t = torch.zeros_like(self.p), torch.zeros_like(self.p), 0
        self.hyper = {**HYPER, "maximize": False, **hyper}

    def step(self, grad: Tensor, clip: float = 1.0) -> None:
        g, h = grad.float().clone(), self.hyper
        self.t += 1
        _core.adam_step([(_core.DTYPES["F32"], g.numel(), self.p.data_ptr(), 0, 0, self.m.data_ptr(), self.v.data_ptr(),
                          g.data_ptr(), _core.DTYPES["F32"], float(h["lr"]), *h["betas"], h["eps"], h["weight_decay"],
                          self.t, int(h["maximize"]))], clip, 1, 0)


def references(model: nn.Module, **hyper: Any) -> list[Reference]:
    return [Reference(p, **hyper) for p in model.parameters()]


def follow(refs: list[Reference], grads: list[Tensor | None], clip: float = 1.0) -> None:
    for ref, g in zip(refs, grads):
        if g is not None:
            ref.step(g, clip)


def feed_both(model: nn.Module, opt: torch.optim.Optimizer, refs: list[Reference], grads: list[Tensor | None]) -> None:
    feed(model, opt, grads)
    follow(refs, grads)


def followed(model: nn.Module, **asked: Any) -> tuple[nn.Module, list[Reference], mt.AdamW]:
    return model, references(model), mt.AdamW(model.parameters(), **HYPER | asked)


def rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to a weight's type. bf16: to nearest, ties away from zero, as split weights are."""
    if dtype != BF16:
        return p.to(dtype)
    return ((p.view(torch.int32).long() + 0x8000) >> 16).to(torch.int16).view(BF16)


def assert_follows(model: nn.Module, opt: torch.optim.Optimizer, refs: list[Reference]) -> None:
    """Weights, masters, moments and counts have the definition's bits."""
    for (name, p), master, ref in zip(model.named_parameters(), mt.masters(model).values(), refs):
        assert_same(master, ref.p, f"master of {name}")
        assert_same(p, rounded(ref.p, p.dtype), name)
        if p in opt.state:
            assert_same(opt.state[p]["exp_avg"], ref.m, f"exp_avg of {name}")
            assert_same(opt.state[p]["exp_avg_sq"], ref.v, f"exp_avg_sq of {name}")
            assert int(opt.state[p]["step"]) == ref.t, f"step of {name}"


def assert_same(ours: Tensor, theirs: Tensor, what: str) -> None:
    a, b = parity.frozen(theirs), parity.frozen(ours)
    assert parity.same_bits(a, b), f"{what} ('plain' is what was expected): {parity.describe(a, b)}"


def everything(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of all that training moves."""
    out = {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
    out |= {f"master {n}": m for n, m in mt.masters(model).items()}
    for i, s in opt.state_dict()["state"].items():
        out |= {f"{k} {i}": torch.as_tensor(v).clone() for k, v in s.items()}
    return out


def assert_all_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for k in a:
        assert_same(b[k], a[k], k)


# ---------------------------------------------------------------- the update itself

@TYPES
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["no_clip", "clip"])
def test_weights_are_the_rounding_of_the_fp32_trajectory(dtype: torch.dtype, max_norm: float | None) -> None:
    """To the bit: 16-bit weights are trained as fp32 ones are, and rounded where they are read."""
    model, refs, opt = followed(dots(dtype, delay_us=50), max_grad_norm=max_norm)
    for step in range(40):
        grads = grads_for(model, step)
        feed(model, opt, grads)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        follow(refs, grads, 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)))
    assert_follows(model, opt, refs)


@pytest.mark.parametrize("activations", ["saved", "replay"])
def test_the_first_backward_has_torchs_bits(activations: str) -> None:
    plain, model = made(), parity.stream_for_test(made(), activations)
    mt.AdamW(model.parameters(), max_grad_norm=1.0)
    values = [lm_loss(m, batch(0)) for m in (plain, model)]
    for v in values:
        v.backward()
    assert_same(values[1], values[0], "loss")
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert_same(q.grad, p.grad, name)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("lr, beta2", [(1e-3, 0.999), (1e-5, 0.95)])
def test_200_steps_are_no_further_from_double_precision_than_torch_is(decay: float, lr: float, beta2: float) -> None:
    """Same fp32 gradients for three trajectories: double (torch's AdamW on fp64 weights), torch in fp32, ours.

    Distance: root mean square over 20,000 weights of |p - p64| in ulps of p64. Both round the subtraction from p
    once a step, which is most of the distance without decay: ours may be a twentieth more there. With decay torch
    rounds 1 - lr*wd to fp32 as well, the same way in every step. v is compared by its relative error: one
    rounding less here."""
    hyper = dict(lr=lr, betas=(0.9, beta2), eps=1e-8, weight_decay=decay)
    shapes = [(100, 100), (10000,)]
    plain, double, model = plain_dots(F32, shapes), plain_dots(torch.float64, shapes), dots(F32, shapes)
    models = [(plain, torch.optim.AdamW), (double, torch.optim.AdamW), (model, mt.AdamW)]
    trained = [(m, cls(m.parameters(), **hyper)) for m, cls in models]
    for step in range(200):
        grads = grads_for(model, step)
        for m, opt in trained:
            for p, g in zip(m.parameters(), grads):
                p.grad = g.to(p.dtype)
            opt.step()
    (theirs, v_theirs), (exact, v_exact), (ours, v_ours) = [
        (flat(m.parameters()), flat(o.state[p]["exp_avg_sq"] for p in m.parameters())) for m, o in trained]
    ulp = 2.0 ** (torch.frexp(exact).exponent - 24).double()
    ours_off, theirs_off = ((x - exact).div(ulp).square().mean().sqrt().item() for x in (ours, theirs))
    assert ours_off <= theirs_off * (1.05 if decay == 0 else 1.0), f"p: ours {ours_off:.3g} ulps, torch {theirs_off:.3g}"
    ours_off, theirs_off = (((x - v_exact) / v_exact).abs().max().item() for x in (v_ours, v_theirs))
    assert ours_off <= theirs_off, f"v: ours {ours_off:.3g} relative, torch {theirs_off:.3g}"


def flat(tensors: Any) -> Tensor:
    return torch.cat([parity.frozen(t).double().flatten() for t in tensors])


@TYPES
def test_maximize_is_the_update_of_negated_gradients(dtype: torch.dtype) -> None:
    up, down = dots(dtype), dots(dtype)
    up_opt, down_opt = mt.AdamW(up.parameters(), maximize=True, **HYPER), mt.AdamW(down.parameters(), **HYPER)
    for step in range(3):
        grads = grads_for(up, step)
        feed(up, up_opt, grads)
        feed(down, down_opt, [-g for g in grads])
    assert_all_same(everything(down, down_opt), everything(up, up_opt))


# ---------------------------------------------------------------- clipping

@pytest.mark.parametrize("max_norm", [0.01, 1.0, 7.5, 1e6])
def test_the_clip_factor_is_torchs_within_an_ulp(max_norm: float) -> None:
    """With beta1 = 0 the first moment is the clipped gradient; where the gradient is 1 it is the factor. Ours is the
    fp64 quotient rounded once; torch's norm and quotient are fp32, in sizes as small as these good to an ulp."""
    model, plain = dots(), plain_dots()
    opt = mt.AdamW(model.parameters(), max_grad_norm=max_norm, betas=(0.0, 0.99))
    grads = grads_for(model, 0)
    grads[0][0] = 1.0
    for p, g in zip(plain.parameters(), grads):
        p.grad = g.clone()
    theirs_norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    theirs = next(plain.parameters()).grad[0]
    feed(model, opt, grads)
    ours = opt.state[model.layers[0].weight]["exp_avg"][0]
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert opt.grad_norm == pytest.approx(exact, rel=1e-14), "squares are exact in fp64 and added in fp64"
    assert opt.grad_norm == pytest.approx(theirs_norm.item(), rel=2e-7)
    assert_same(ours, torch.tensor(min(1.0, max_norm / (exact + 1e-6))), "factor")
    assert abs(ours - theirs) <= 2.0 ** -23 * abs(theirs), f"ours {ours.item()!r}, torch's {theirs.item()!r}"


def test_grad_norm_is_none_before_the_first_step_and_then_before_clipping() -> None:
    model, _, opt = followed(dots(delay_us=500), max_grad_norm=0.1)
    assert opt.grad_norm is None
    for step in range(3):
        grads = grads_for(model, step)
        feed(model, opt, grads)
        assert opt.grad_norm == pytest.approx(flat(grads).norm().item(), rel=1e-12), f"step {step}"


def test_parameters_that_are_not_of_one_streamed_model_are_refused() -> None:
    one, two, extra = dots(), dots(), nn.Parameter(torch.ones(3))
    with pytest.raises(mt.MegatrainError, match="several streamed models"):
        mt.AdamW([*one.parameters(), *two.parameters()])
    refs, opt = references(one), mt.AdamW([*one.parameters(), extra], **HYPER)
    grads = grads_for(one, 0)
    (one(grads) + extra.sum()).backward()
    with pytest.raises(mt.MegatrainError, match=r"one of \[3\] has a gradient.*torch.optim.AdamW"):
        opt.step()
    extra.grad = None
    opt.step()
    follow(refs, grads)
    assert_follows(one, opt, refs)               # what was refused did not count
    opt.param_groups[0]["params"].extend(two.parameters())
    with pytest.raises(mt.MegatrainError, match="several streamed models"):
        opt.step()
    plain = plain_dots()
    opt = mt.AdamW([*two.parameters(), *plain.parameters()], **HYPER)
    feed_only(mt.stream(plain, device="cpu"), 0)             # streamed since
    with pytest.raises(mt.MegatrainError, match="several streamed models"):
        opt.step()


# ---------------------------------------------------------------- micro-batches

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_micro_batches_of_16_bits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    model, refs, opt = followed(dots(dtype, delay_us=50))
    for step in range(3):
        micros = [grads_for(model, 10 * step + k, decades=1) for k in range(4)]
        sums = [torch.zeros(g.shape) for g in micros[0]]
        for grads in micros:
            model(grads).backward()
            sums = [s + g.float() for s, g in zip(sums, grads)]
            assert step != 1 or all(torch.equal(p.grad, s.to(dtype)) for p, s in zip(model.parameters(), sums))
        short = [((m[0] + m[1]) + m[2]) + m[3] for m in zip(*micros)]
        exact = [sum(g.double() for g in m) for m in zip(*micros)]
        assert (flat(sums) - flat(exact)).abs().sum() < 0.01 * (flat(short) - flat(exact)).abs().sum()
        for p, s in zip(model.parameters(), sums):
            assert_same(p.grad, s.to(dtype), "p.grad is the fp32 sum, rounded once")
        opt.step()
        opt.zero_grad()
        follow(refs, sums)
    assert_follows(model, opt, refs)


def test_micro_batches_of_fp32_are_summed_as_torch_does() -> None:
    model, plain = dots(delay_us=50), plain_dots()
    refs, opt = references(model), mt.AdamW(model.parameters(), **HYPER)
    for step in range(3):
        for k in range(3):
            for m in (model, plain):
                m(grads_for(model, 10 * step + k)).backward()
        opt.step()
        opt.zero_grad()
        follow(refs, [p.grad for p in plain.parameters()])
        plain.zero_grad()
    assert_follows(model, opt, refs)


# ---------------------------------------------------------------- groups, schedules, closures

@pytest.mark.parametrize("make", [
    lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4, eta_min=1e-4),
    lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.02, total_steps=8)], ids=["lambda", "cosine", "one_cycle"])
def test_schedules_set_the_rate_of_each_step(make: Callable[[Any], Any]) -> None:
    model, plain = dots(), plain_dots()
    refs, opt = references(model), mt.AdamW(model.parameters(), **HYPER)
    theirs = torch.optim.AdamW(plain.parameters(), **HYPER)
    schedules, rates = [make(opt), make(theirs)], []
    for step in range(6):
        group, other = opt.param_groups[0], theirs.param_groups[0]
        assert (group["lr"], group["betas"]) == (other["lr"], other["betas"])
        rates.append(group["lr"])
        for ref in refs:
            ref.hyper |= {"lr": group["lr"], "betas": group["betas"]}
        grads = grads_for(model, step)
        feed_both(model, opt, refs, grads)
        feed(plain, theirs, grads)
        for s in schedules:
            s.step()
    assert len(set(rates)) > 3, "the rate did not move"
    assert_follows(model, opt, refs)


def test_groups_have_their_own_numbers_and_can_be_added() -> None:
    model = dots()
    a, b, c, d = model.parameters()
    own = [dict(lr=1e-3, weight_decay=0.0), dict(betas=(0.5, 0.9), eps=1e-3), dict(lr=torch.tensor(5e-3), maximize=True)]
    refs = [Reference(a, **own[0]), Reference(b, **own[0]), Reference(c, **own[1]), Reference(d, **own[2])]
    opt = mt.AdamW([{"params": [a, b], **own[0]}, {"params": [c], **own[1]}], **HYPER)
    for step in range(5):
        if step == 2:
            opt.add_param_group({"params": [d], **own[2]})
        grads: list[Tensor | None] = list(grads_for(model, step))
        if step < 2:
            grads[3] = None
        feed_both(model, opt, refs, grads)
    assert_follows(model, opt, refs)
    assert int(opt.state[d]["step"]) == 3, "a parameter counts its own steps"


def test_named_parameters_give_the_names_in_the_state() -> None:
    model = dots()
    opt = mt.AdamW(model.named_parameters(), **HYPER)
    feed(model, opt, grads_for(model, 0))
    assert opt.state_dict()["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]


def test_a_parameter_without_gradient_keeps_everything() -> None:
    model, refs, opt = followed(dots(BF16))
    for step in range(6):
        grads: list[Tensor | None] = list(grads_for(model, step))
        grads[step % 4] = None
        feed_both(model, opt, refs, grads)
    assert_follows(model, opt, refs)


@TYPES
def test_frozen_parameters_keep_their_bits(dtype: torch.dtype) -> None:
    model = dots(dtype)
    model.layers[1].weight.requires_grad_(False)
    refs, opt = references(model), mt.AdamW(model.parameters(), **HYPER)
    for step in range(3):
        grads = grads_for(model, step)
        feed(model, opt, grads)
        follow(refs, [grads[0], None, *grads[2:]])
    assert_follows(model, opt, refs)
    assert model.layers[1].weight not in opt.state


def test_a_closure_gives_its_value_and_one_update() -> None:
    model, refs, opt = followed(dots())
    for step in range(3):
        grads = grads_for(model, step)

        def closure(grads: list[Tensor] = grads) -> Tensor:
            opt.zero_grad()
            loss = model(grads)
            loss.backward()
            return loss

        expected = model(grads).detach()
        assert_same(opt.step(closure), expected, "the closure's value")
        follow(refs, grads)
    assert_follows(model, opt, refs)


# ---------------------------------------------------------------- gradients that the user touches

@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_dropping_gradients_does_not_wait(whose: str) -> None:
    model, refs, opt = followed(dots(delay_us=20000))
    took = []
    for step in range(3):                    # what else runs may disturb one
        model(grads_for(model, step)).backward()
        opt.step()
        began = time.perf_counter()
        (opt if whose == "optimizer" else model).zero_grad()
        took.append(time.perf_counter() - began)
        assert all(p.grad is None for p in model.parameters())
        follow(refs, grads_for(model, step))
        assert_follows(model, opt, refs)
    assert min(took) < 0.01, f"zero_grad() took {took} s, while eight naps of 10 ms on average bring gradients home"


@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_zeroing_gradients_in_place_does_not_disturb_the_update_under_way(how: str) -> None:
    """set_to_none=False right behind step(), when the update has not read the gradients yet."""
    model, refs, opt = followed(dots(delay_us=2000))
    for step in range(4):
        grads = grads_for(model, step)
        model(grads).backward()
        opt.step()
        (opt if how == "optimizer" else model).zero_grad(set_to_none=False)
        follow(refs, grads)
        assert all(not p.grad.any() for p in model.parameters()), "zero_grad(set_to_none=False) left something"
    assert_follows(model, opt, refs)


def test_gradients_set_by_hand_count() -> None:
    model, refs, opt = followed(dots(BF16, delay_us=100))
    for step in range(4):
        grads = grads_for(model, step)
        for p, g in zip(model.parameters(), grads):
            p.grad = g.clone()
        opt.step()
        for p in model.parameters():
            p.grad.zero_()              # ours by now: the update must have what it needs
        follow(refs, grads)
    assert_follows(model, opt, refs)


def test_a_gradient_that_the_user_keeps_outlives_one_set_by_hand() -> None:
    model, _, opt = followed(dots())
    model(grads_for(model, 0)).backward()
    kept = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    opt.step()
    for k, g in zip(kept, grads_for(model, 0)):
        assert_same(k, g, "a gradient kept from before")


def test_a_gradient_set_by_hand_waits_for_the_update_before() -> None:
    """It goes where the update before still reads; that one takes milliseconds for four million weights."""
    model, refs, opt = followed(dots(shapes=[(1 << 22,), (3,)]))
    steps = [[torch.full(p.shape, 1.0 - 0.4 * k) for p in model.parameters()] for k in range(4)]
    for grads in steps:
        for p, g in zip(model.parameters(), grads):
            p.grad = g
        opt.step()
    for grads in steps:
        follow(refs, grads)
    assert_follows(model, opt, refs)


def test_gradients_set_by_hand_are_not_hoarded() -> None:
    """No copy of them outlives the next step."""
    model, _, opt = followed(dots())

    def step_by_hand() -> int:
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        opt.step()
        opt.zero_grad()
        _ = opt.grad_norm
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    counts = [step_by_hand() for _ in range(6)]
    assert counts[-1] <= counts[2], f"tensors alive after each step: {counts}"


def test_gradients_edited_in_place_count_also_after_micro_batches() -> None:
    model, refs, opt = followed(dots(BF16, delay_us=100))
    for step in range(3):
        for k in range(2):
            model(grads_for(model, 10 * step + k)).backward()
        for p in model.parameters():
            p.grad.mul_(0.25)
        edited = [p.grad.clone() for p in model.parameters()]
        opt.step()
        opt.zero_grad()
        follow(refs, edited)
    assert_follows(model, opt, refs)


# ---------------------------------------------------------------- weights that the user touches

def written(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Reference, mt.AdamW], None]:
    def change(p: Tensor, ref: Reference, opt: mt.AdamW) -> None:
        value = torch.full(p.shape, 0.37).to(p.dtype)
        write(p, value)
        ref.p = value.float()
    return change


def halve_moment(p: Tensor, ref: Reference, opt: mt.AdamW) -> None:
    opt.state[p]["exp_avg"].mul_(0.5)
    ref.m.mul_(0.5)


# An old master must not come back, and below a zeroed half its low bits would make a NaN; moments go on.
WRITES = {"copy_": written(lambda p, x: p.copy_(x)), "data": written(lambda p, x: p.data.copy_(x)),
          "arithmetic": written(lambda p, x: p.mul_(0).add_(x)),
          "zeros": lambda p, ref, opt: (p.zero_(), ref.p.zero_()), "moment": halve_moment}


@TYPES
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_between_steps_is_what_the_next_one_starts_from(dtype: torch.dtype, write: str) -> None:
    model, refs, opt = followed(dots(dtype, delay_us=200))
    for step in range(4):
        feed_both(model, opt, refs, grads_for(model, step))
        with torch.no_grad():
            for p, ref in zip(model.parameters(), refs) if step % 2 else ():
                WRITES[write](p, ref, opt)
        assert_follows(model, opt, refs)


# ---------------------------------------------------------------- gradients that are not finite

@TYPES
@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["no_clip", "clip"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_a_step_that_is_not_finite_changes_nothing(dtype: torch.dtype, max_norm: float | None, bad: float) -> None:
    model, refs, opt = followed(dots(dtype), max_grad_norm=max_norm)
    skipped = 0
    for step in range(6):
        grads = grads_for(model, step, decades=1)
        if step in (0, 3, 5):
            grads[1][2, 3] = bad
            skipped += 1
        feed(model, opt, grads)
        if step not in (0, 3, 5):
            norm = flat(grads).norm().item()
            follow(refs, grads, 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)))
        else:
            state = opt.state_dict()["state"]
            assert all(int(s["step"]) == ref.t for s, ref in zip(state.values(), refs)), "the step was counted"
            for s, ref in zip(state.values(), refs):
                assert_same(s.get("master", ref.p), ref.p, "master in the state")
            assert not math.isfinite(opt.grad_norm)
        assert opt.skipped_steps == skipped, f"after step {step}"
    assert_follows(model, opt, refs)


# ---------------------------------------------------------------- in_backward

def real_training(in_backward: bool, seed: int) -> dict[str, Tensor]:
    parity.seed()
    model = parity.stream_for_test(made(), "replay", 2, 150, debug={"seed": seed})
    opt = mt.AdamW(model.parameters(), in_backward=in_backward, **HYPER)
    for step in range(4):
        update(lm_loss(model, batch(step)), opt)
    return everything(model, opt)


def test_updating_in_backward_gives_the_bits_of_updating_afterwards() -> None:
    right = real_training(False, 0)
    for seed in range(3):
        assert_all_same(right, real_training(True, seed))


def test_in_backward_refuses_a_second_backward() -> None:
    model, _, opt = followed(dots(), in_backward=True)
    model(grads_for(model, 0)).backward()
    with pytest.raises(mt.MegatrainError, match="second backward before step"):
        model(grads_for(model, 1)).backward()
    del opt


@pytest.mark.parametrize("units", [67, 150])
def test_in_backward_takes_any_number_of_units(units: int) -> None:
    """More than half, and more than all, of the results that an engine keeps."""
    model, refs, opt = followed(dots(shapes=[(3,)] * units), in_backward=True)
    for step in range(3):
        grads = grads_for(model, step)
        if step == 1:
            grads[0] = torch.full((3,), math.nan)        # the oldest unread result is not lost either
        feed(model, opt, grads)
        follow(refs, grads if step != 1 else [None, *grads[1:]])
    assert opt.skipped_steps == 1
    assert_follows(model, opt, refs)


def test_in_backward_skips_units_that_are_not_finite() -> None:
    """The norm of all is not known yet, so each unit is judged by its own gradients."""
    model, refs, opt = followed(dots(BF16), in_backward=True)
    for step in range(3):
        grads: list[Tensor | None] = list(grads_for(model, step))
        if step == 1:
            grads[2] = torch.tensor(math.inf, dtype=BF16)
        feed(model, opt, grads)
        follow(refs, grads if step != 1 else [*grads[:2], None, grads[3]])
        assert opt.grad_norm == pytest.approx(flat(grads).norm().item(), rel=1e-12)
    assert opt.skipped_steps == 1
    assert_follows(model, opt, refs)


def test_an_optimizer_that_is_gone_updates_no_more() -> None:
    model = dots()
    gone = mt.AdamW(model.parameters(), in_backward=True, **HYPER)
    del gone
    gc.collect()
    refs, opt = references(model), mt.AdamW(model.parameters(), **HYPER)
    for step in range(2):
        feed_both(model, opt, refs, grads_for(model, step))
    assert_follows(model, opt, refs)


# ---------------------------------------------------------------- saving and loading

def halfway(dtype: torch.dtype, **kw: Any) -> tuple[Dots, Any]:
    model = dots(dtype, delay_us=100)
    return fed(model, mt.AdamW(model.parameters(), max_grad_norm=0.5, **{**HYPER, **kw}), range(3))


def finish(model: Dots, opt: Any) -> dict[str, Tensor]:
    fed(model, opt, range(3, 6))
    return everything(model, opt)


@TYPES
@pytest.mark.parametrize("fresh", [False, True], ids=["same_model", "fresh_model"])
@pytest.mark.parametrize("through", ["file", "deepcopy"])
def test_a_saved_state_goes_on_with_the_same_bits(dtype: torch.dtype, fresh: bool, through: str) -> None:
    model, opt = halfway(dtype)
    state = {"model": model.state_dict(), "opt": opt.state_dict()}
    if through == "file":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    else:
        state = copy.deepcopy(state)
    right = finish(model, opt)
    if fresh:
        model = dots(dtype)
        opt = mt.AdamW(model.parameters(), max_grad_norm=0.5, lr=1.0)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    assert opt.param_groups[0]["lr"] == HYPER["lr"]
    assert_all_same(right, finish(model, opt))


@TYPES
def test_a_new_optimizer_starts_from_nothing(dtype: torch.dtype) -> None:
    """Its moments are zero, as a new torch optimizer's are; the master goes on."""
    model, opt = halfway(dtype)
    masters = mt.masters(model)
    del opt
    refs, opt = references(model), mt.AdamW(model.parameters(), **HYPER)
    for ref, m in zip(refs, masters.values()):
        ref.p = m
    for step in range(2):
        feed_both(model, opt, refs, grads_for(model, step))
    assert_follows(model, opt, refs)


def test_loading_an_empty_state_starts_from_nothing() -> None:
    model, _, opt = followed(dots())
    empty = copy.deepcopy(opt.state_dict())
    feed(model, opt, grads_for(model, 0))
    opt.load_state_dict(empty)
    refs = references(model)
    feed_both(model, opt, refs, grads_for(model, 1))
    assert_follows(model, opt, refs)


def test_an_optimizer_whose_moments_were_taken_over_is_refused() -> None:
    model = dots()
    first, second = (mt.AdamW(model.parameters(), **HYPER) for _ in range(2))
    for opt in (first, second):
        feed(model, opt, grads_for(model, 0))
    model(grads_for(model, 1)).backward()
    with pytest.raises(mt.MegatrainError, match=r"layers\.0\.weight: .*another mt\.AdamW"):
        first.step()


@pytest.mark.parametrize("between", ["a step", "nothing"])
def test_an_optimizer_whose_model_was_unstreamed_is_refused_from_then_on(between: str) -> None:
    model, opt = halfway(F32)
    state = opt.state_dict()
    mt.unstream(model)
    refused = [opt.step, opt.state_dict, lambda: opt.load_state_dict(state), lambda: opt.moments(model.layers[0].weight)]
    for again in (False, True):
        if again:
            mt.stream(model, device="cpu")
        if again or between == "a step":
            feed_only(model, 3)
            for call in refused:
                with pytest.raises(mt.MegatrainError, match=r"belonged to a model that was unstreamed.*make a new one"):
                    call()
    with pytest.raises(mt.MegatrainError, match=r"was unstreamed.*make a new one"):
        mt.save(model, opt, "nowhere")
    with pytest.raises(mt.MegatrainError, match=r"was unstreamed.*make a new one"):
        mt.load(model, opt, "nowhere")
    finish(model, mt.AdamW(model.parameters(), **HYPER))


def test_an_optimizer_may_be_made_before_its_model_is_streamed_and_not_step() -> None:
    plain = plain_dots(BF16)
    opt = mt.AdamW(plain.parameters(), states="8bit", **HYPER)
    plain(grads_for(plain, 0)).backward()
    with pytest.raises(mt.MegatrainError, match="has a gradient"):
        opt.step()
    opt.zero_grad()
    model, other = mt.stream(plain, device="cpu"), mt.stream(plain_dots(BF16), device="cpu")
    for m, o in ((model, opt), (other, mt.AdamW(other.parameters(), states="8bit", **HYPER))):
        feed(m, o, grads_for(m, 0))
    for p, q in zip(model.parameters(), other.parameters()):
        assert_same(p, q, "weight")
    plain = plain_dots(BF16)
    loads = mt.AdamW(plain.parameters(), states="8bit", **HYPER)
    mt.stream(plain, device="cpu")
    loads.load_state_dict(opt.state_dict())
    assert mt.model.stream.runtime_of(plain).states == "8bit"
    with pytest.raises(mt.MegatrainError, match="cannot be loaded"):
        mt.AdamW(plain_dots(BF16).parameters()).load_state_dict(opt.state_dict())


def test_a_state_dict_is_whole_for_who_reads_memory() -> None:
    """Writers of files look behind torch's functions. Four million weights take milliseconds to update; the last are
    looked at first."""
    model, refs, opt = followed(dots(shapes=[(1 << 22,), (3,)]))
    steps, last = [grads_for(model, k) for k in range(5)], []
    for grads in steps:
        feed(model, opt, grads)
        state = opt.state_dict()["state"]
        with torch._C.DisableTorchFunctionSubclass():
            last.append(state[0]["exp_avg"].as_subclass(Tensor)[-100:].clone())
    for step, grads in enumerate(steps):
        follow(refs, grads)
        assert_same(last[step], refs[0].m[-100:], f"exp_avg after step {step}")


def test_torchs_state_is_taken_to_the_bit() -> None:
    plain, model = plain_dots(), dots()
    theirs = torch.optim.AdamW(plain.parameters(), **HYPER)
    fed(plain, theirs, range(3))
    model.load_state_dict(plain.state_dict())
    opt = mt.AdamW(model.parameters(), lr=1.0)
    opt.load_state_dict(theirs.state_dict())
    refs = references(model)
    for ref, s in zip(refs, theirs.state.values()):
        ref.m, ref.v, ref.t = s["exp_avg"].clone(), s["exp_avg_sq"].clone(), int(s["step"])
    assert_follows(model, opt, refs)
    feed_both(model, opt, refs, grads_for(model, 3))
    assert_follows(model, opt, refs)


def test_torchs_amsgrad_state_is_refused() -> None:
    plain, model = plain_dots(), dots()
    theirs = torch.optim.AdamW(plain.parameters(), amsgrad=True)
    feed(plain, theirs, grads_for(plain, 0))
    with pytest.raises(mt.MegatrainError, match="amsgrad"):
        mt.AdamW(model.parameters()).load_state_dict(theirs.state_dict())


def test_torch_takes_our_state() -> None:
    model, opt = halfway(F32)
    plain = plain_dots()
    theirs = torch.optim.AdamW(plain.parameters(), **HYPER)
    plain.load_state_dict(model.state_dict())
    theirs.load_state_dict(opt.state_dict())
    for p, q in zip(model.parameters(), plain.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(theirs.state[q][key], opt.state[p][key], key)
    opt.param_groups[0]["lr"] = 0.0
    feed(plain, theirs, grads_for(plain, 3))
    assert all(int(s["step"]) == 4 for s in theirs.state.values())


# ---------------------------------------------------------------- time

def test_step_returns_before_updates_are_over_and_reads_wait() -> None:
    """Gradients take 8 naps of 15 ms on average to come home; step() is host work of a millisecond."""
    model, refs, opt = followed(dots(delay_us=30000), max_grad_norm=1.0)
    times = []
    for step in range(3):
        grads = grads_for(model, step)
        model(grads).backward()
        began = time.perf_counter()
        opt.step()
        opt.zero_grad()
        returned = time.perf_counter()
        assert_same(model.layers[3].weight, parity.frozen(model.layers[3].weight), "a read")
        times.append((returned - began, time.perf_counter() - returned))
        follow(refs, grads, min(1.0, 1.0 / (flat(grads).norm().item() + 1e-6)))
        assert_follows(model, opt, refs)
    inside, waited = min(t[0] for t in times), max(t[1] for t in times)
    assert inside < 0.01 < waited, f"step() took {inside:.4f} s, reading a weight then {waited:.4f} s"


READS: dict[str, Callable[[Dots, Any, Reference], tuple[Tensor, Tensor]]] = {
    "weight": lambda model, opt, ref: (model.layers[0].weight, rounded(ref.p, BF16)),
    "converted": lambda model, opt, ref: (model.layers[0].weight.type(torch.float64), rounded(ref.p, BF16).double()),
    "moment": lambda model, opt, ref: (opt.state[model.layers[0].weight]["exp_avg"], ref.m),
    "state_dict": lambda model, opt, ref: (opt.state_dict()["state"][0]["master"], ref.p),
    "masters": lambda model, opt, ref: (mt.masters(model)["layers.0.weight"], ref.p)}


@pytest.mark.parametrize("read", READS)
def test_whatever_is_read_after_step_is_whole(read: str) -> None:
    for seed in range(3):
        model, refs, opt = followed(dots(BF16, delay_us=3000, debug={"seed": seed}))
        feed_both(model, opt, refs, grads_for(model, 0))
        assert_same(*READS[read](model, opt, refs[0]), read)


# ---------------------------------------------------------------- refusals

@pytest.mark.parametrize("bad, words", [
    (dict(amsgrad=True), "amsgrad=True"), (dict(differentiable=True), "differentiable=True"),
    (dict(capturable=True), "capturable=True"), (dict(lr=-1.0), "lr=-1.0"), (dict(lr=math.nan), "lr=nan"),
    (dict(betas=(1.0, 0.9)), r"betas=\(1\.0, 0\.9\)"), (dict(betas=(0.9, -0.1)), "betas"), (dict(eps=-1.0), "eps=-1.0"),
    (dict(weight_decay=-0.1), "weight_decay=-0.1"), (dict(lr="1e-3"), "lr"), (dict(max_grad_norm=0.0), "max_grad_norm=0.0 must be > 0"),
    (dict(max_grad_norm=-1.0), "max_grad_norm"), (dict(states="4bit"), "states='4bit'"),
    (dict(in_backward=True, max_grad_norm=1.0), "cannot clip")],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_a_bad_argument_is_named(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(mt.MegatrainError, match=words):
        mt.AdamW(dots().parameters(), **bad)


def test_words_of_torch_that_change_nothing_are_taken() -> None:
    model, refs, opt = followed(dots(), foreach=True, fused=False, amsgrad=False)
    feed_both(model, opt, refs, grads_for(model, 0))
    assert_follows(model, opt, refs)


def test_a_bad_number_in_a_group_is_refused_with_the_units_name() -> None:
    model, _, opt = followed(dots())
    refs = references(model)
    opt.param_groups[0]["eps"] = -1.0
    model(grads_for(model, 0)).backward()
    with pytest.raises(mt.MegatrainError, match=r"layers\.0.*eps"):
        opt.step()
    opt.param_groups[0]["eps"] = HYPER["eps"]
    opt.step()
    follow(refs, grads_for(model, 0))
    assert_follows(model, opt, refs)        # what was refused does not count


def test_double_precision_is_refused_by_name() -> None:
    model, _, opt = followed(dots(torch.float64))
    model(grads_for(model, 0)).backward()
    with pytest.raises(mt.MegatrainError, match=r"layers\.0\.weight: AdamW trains fp32, bf16 and fp16"):
        opt.step()
