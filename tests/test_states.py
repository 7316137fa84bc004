"""Moments of 8 bits through the whole engine: the same bits wherever they are, saved and loaded, and what they take.

What a byte means is tested in tests/c/test_adam8.c; here the definition is `_core.adam_step` on plain memory.
"""
from __future__ import annotations

import dataclasses
import gc
import io
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doors
import edges
import pytest
import test_adamw
import torch
from between import assert_equal
from parity import LONG, assert_same
from test_adamw import Dots, assert_all_same, dots, everything, fed, feed, grads_for, plain_dots
from torch import Tensor, nn
from zoo import Chain, update

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.base.modes import FORMATS, LOW_BYTES, moment_bytes
from megatrain_torch.model import runtime
from megatrain_torch.plans.machine import MACHINES
from megatrain_torch.plans.shapes import unit_bytes
from megatrain_torch.store.arrivals import Arrivals

EIGHT = [name for name in FORMATS if name != "fp32"]
BF16 = torch.bfloat16
SHAPES = [(300, 7), (257,), (64, 32), (1,)]


def trained(states: str, steps: int = 5, dtype: torch.dtype = BF16, **plan: Any) -> tuple[Dots, mt.AdamW]:
    model = mt.stream(plain_dots(dtype, SHAPES), device="cpu", plan=plan)
    return fed(model, mt.AdamW(model.parameters(), lr=1e-2, states=states), range(steps))


# ---- the same bits everywhere ----

@pytest.fixture(scope="module")
def at_home() -> dict[str, Any]:
    return {states: edges.placed("ram", "cpu", BF16, states)[0] for states in EIGHT}


@pytest.mark.parametrize("name, states", [
    *[(name, "8bit-lo8") for name in ("some_arrive-delays", "some_on_disk-delays")],
    *[("some_through-delays", states) for states in EIGHT], ("some_arrive-delays", "8bit-sr")])
def test_every_home_gives_the_same_bits(name: str, states: str, at_home: dict[str, Any]) -> None:
    found = edges.misplaced(name, "cpu", BF16, at_home[states], states)
    assert found is None, found


def test_a_parameter_that_is_cut_draws_what_a_whole_one_does(tmp_path: Path) -> None:
    found, numel = [], 77_101
    for where in ("ram", "disk"):
        plan = {"homes": where} | ({"debug": {"disk": edges.TIGHT}} if where == "disk" else {})
        model = doors.stream(plain_dots(BF16, [(numel,)]), device="cpu", plan=plan,
                             nvme=str(tmp_path) if where == "disk" else None)
        opt = mt.AdamW(model.parameters(), lr=1e-2, states="8bit-sr")
        for step in range(2):
            feed(model, opt, [torch.sin(torch.arange(numel) * (0.37 + step))])
        found.append(everything(model, opt))
        mt.unstream(model)
    assert_all_same(*found)


@pytest.mark.parametrize("states", EIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_engine_takes_the_step_of_the_definition(dtype: torch.dtype, states: str) -> None:
    model, opt = trained(states, steps=1, dtype=dtype)
    before = plain_dots(dtype, SHAPES)
    for key, (p, start) in enumerate(zip(model.parameters(), before.parameters())):
        n, number = p.numel(), _core.DTYPES["F32" if dtype == torch.float32 else "BF16"]
        hi, grad = start.detach().clone(), grads_for(before, 0)[key].to(dtype).clone()
        lo, m, v = torch.zeros(n, dtype=torch.int16), torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8)
        scale = torch.zeros(-(-n // 128), 2)
        _core.adam_step([(number, n, hi.data_ptr(), lo.data_ptr(), 0, m.data_ptr(), v.data_ptr(), grad.data_ptr(),
                          number, 1e-2, 0.9, 0.999, 1e-8, 1e-2, 1, False, _core.STATES[states], scale.data_ptr(), key)],
                        1.0, 1, 0)
        assert torch.equal(p.detach(), hi)
        state = opt.state[p]
        assert torch.equal(state["exp_avg_codes"].flatten(), m) and torch.equal(state["exp_avg_sq_codes"].flatten(), v)
        assert torch.equal(state["scales"], scale)


def test_each_parameter_draws_its_own_numbers() -> None:
    model = mt.stream(plain_dots(BF16, [(4096,), (4096,)]), device="cpu")
    opt = mt.AdamW(model.parameters(), lr=1e-4, states="8bit-sr")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    feed(model, opt, [torch.ones(4096), torch.ones(4096)])
    one, other = (p.detach().clone() for p in model.parameters())
    assert 20 < (one != 1).sum() < 4000 and not torch.equal(one, other)


def test_updates_pass_bitsandbytes_own_test() -> None:
    """Its thresholds for the updates of 8-bit Adam in fp32 (tests/test_optim.py, test_optimizer8bit): weights of deviation
    0.1, gradients of 0.01, lr 1e-3; after each step torch's weights are ours again. There torch's moments are too, and
    an update would be the same to rounding; here they stay its own, in fp32, over all steps."""
    shape, rng = (1024, 32), torch.Generator().manual_seed(0)
    model = mt.stream(plain_dots(torch.float32, [shape]), device="cpu")
    p = next(model.parameters())
    with torch.no_grad():
        p.copy_(torch.randn(shape, generator=rng) * 0.1)
    q = torch.nn.Parameter(p.detach().clone())
    opt = mt.AdamW([p], lr=1e-3, weight_decay=0.0, states="8bit")
    reference = torch.optim.Adam([q], lr=1e-3)
    errors, shares = [], []
    for _ in range(50):
        grad = torch.randn(shape, generator=rng) * 0.01
        feed(model, opt, [grad])
        q.grad = grad
        reference.step()
        error = (p.detach() - q.detach()).abs()
        errors.append(error.mean().item())
        shares.append((error / (q.detach().abs() + 1e-9)).mean().item())
        with torch.no_grad():
            q.copy_(p.detach())
    assert max(errors) < 6e-5, max(errors)                  # measured: 5e-6
    # The mean of error / |weight| has a long tail, weights near zero: of steps the median counts. Measured: 4.5e-4.
    assert sorted(shares)[25] < 6e-4, sorted(shares)


# ---- saved and loaded ----

@pytest.mark.parametrize("states", EIGHT)
@pytest.mark.parametrize("home", ["ram", "vram"])
def test_a_saved_state_goes_on_with_the_same_bits(home: str, states: str) -> None:
    model, opt = trained(states, homes=home)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    fresh, after = trained(states, steps=0, homes=home)
    fresh.load_state_dict(saved["model"])
    after.load_state_dict(saved["opt"])
    for pair in ((model, opt), (fresh, after)):
        fed(*pair, range(5, 9))
    assert_all_same(everything(model, opt), everything(fresh, after))


@pytest.mark.parametrize("states", EIGHT)
def test_a_state_is_taken_from_any_format_to_any(states: str) -> None:
    model, opt = trained("fp32")
    _, small = trained(states, steps=0)
    small.load_state_dict(opt.state_dict())
    _, wide = trained("fp32", steps=0)
    wide.load_state_dict(small.state_dict())
    for p, q, r in zip(model.parameters(), *([p for g in o.param_groups for p in g["params"]] for o in (small, wide))):
        for mine, rounded, back in zip(opt.moments(p), small.moments(q), wide.moments(r)):
            assert torch.equal(rounded, back)               # what bytes say is an fp32 value
            assert (mine - rounded).abs().max() <= mine.abs().max() / 100
        assert opt.state[p]["step"] == small.state[q]["step"] == wide.state[r]["step"] == 5


@pytest.mark.parametrize("states", FORMATS)
def test_scales_of_another_type_count_by_their_values(states: str) -> None:
    """A checkpoint that went through .half(), into states of any format."""
    _, opt = trained("8bit")
    saved = opt.state_dict()
    for state in saved["state"].values():
        state["scales"] = (state["scales"] * 2.0**20).half()
    _, after = trained(states, steps=0)
    after.load_state_dict(saved)
    for p, q in zip(*([p for g in o.param_groups for p in g["params"]] for o in (opt, after))):
        for mine, theirs, power in zip(opt.moments(p), after.moments(q), (20, 40)):      # v is a scale's square
            assert torch.allclose(theirs, mine * 2.0**power, rtol=2e-3, atol=0.0) and theirs.any()


def test_scales_of_another_size_are_refused() -> None:
    _, opt = trained("8bit")
    for states in ("8bit", "fp32"):
        saved = opt.state_dict()
        saved["state"][0]["scales"] = saved["state"][0]["scales"][:1]
        with pytest.raises(mt.MegatrainError, match=r"scales of shape \[1, 2\]"):
            trained(states, steps=0)[1].load_state_dict(saved)


def test_moments_are_those_of_the_state_in_fp32() -> None:
    model, opt = trained("fp32")
    p = next(model.parameters())
    assert all(torch.equal(a, opt.state[p][k]) for a, k in zip(opt.moments(p), ("exp_avg", "exp_avg_sq")))
    plain = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(mt.MegatrainError, match="no states"):
        mt.AdamW([plain]).moments(plain)


# ---- given back to the store that they are a part of, with no copy in between ----

HOMES = ("ram", "vram", "disk", *(pytest.param(home, marks=LONG) for home in ("arrive", "disk+weights")))


def layers(tmp_path: Path, homes: str = "ram", states: str = "fp32", dtype: torch.dtype = BF16,
           steps: int = 2) -> tuple[nn.Module, mt.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))).to(dtype)
    model = mt.stream(model, "cpu", plan={"homes": homes}, nvme=tmp_path if homes.startswith("disk") else None)
    opt = mt.AdamW(model.parameters(), lr=1e-2, states=states)
    for number in range(steps):
        step_layers(model, opt, number)
    return model, opt


def step_layers(model: nn.Module, opt: mt.AdamW, number: int) -> None:
    torch.manual_seed(number)
    update(model(torch.randn(4, 24, dtype=model[0].weight.dtype)).float().square().mean(), opt)


def kept(model: nn.Module, opt: mt.AdamW) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()] + [t for p in model.parameters() for t in (
        *opt.moments(p), opt.state[p]["step"].clone())]


@pytest.mark.parametrize("homes, states, dtype", [
    ("ram", "fp32", BF16), ("disk", "fp32", BF16), ("vram", "fp32", torch.float32),
    ("vram", "8bit-sr", BF16), *(pytest.param(*how, marks=LONG) for how in (
        ("vram", "fp32", BF16), ("arrive", "fp32", BF16), ("disk+weights", "fp32", BF16),
        ("ram", "8bit", BF16), ("disk", "fp32", torch.float32)))])
def test_an_optimizer_takes_its_own_state(homes: str, states: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, opt = layers(tmp_path, homes, states, dtype)
    plain, other = layers(tmp_path, homes, states, dtype)
    opt.load_state_dict(opt.state_dict())
    assert_same(kept(model, opt), kept(plain, other))
    assert kept(model, opt)[-2].any()
    for one in ((model, opt), (plain, other)):
        step_layers(*one, 7)
    assert_same(kept(model, opt), kept(plain, other))


def detached(state: dict[str, Any]) -> dict[str, Any]:
    return {key: v.detach() if isinstance(v, Tensor) else v for key, v in state.items()}


@pytest.mark.parametrize("homes, dtype", [("ram", BF16), ("vram", torch.float32),
                                          pytest.param("disk", torch.float32, marks=LONG)])
@pytest.mark.parametrize("given", [dict, detached])
def test_states_of_one_parameter_are_given_to_another(homes: str, dtype: torch.dtype, given: Callable[..., Any],
                                                      tmp_path: Path) -> None:
    """Each layer takes what the one before it had: what was written first is not what the next one takes."""
    model, opt = layers(tmp_path, homes, dtype=dtype)
    saved = opt.state_dict()
    wanted = [[m.clone() for m in opt.moments(p)] for p in model.parameters()]
    saved["state"] = {(index + 2) % 6: {k: v for k, v in given(state).items() if k != "master"}
                      for index, state in saved["state"].items()}
    opt.load_state_dict(saved)
    for index, p in enumerate(model.parameters()):
        assert_same(list(opt.moments(p)), wanted[(index - 2) % 6])


@pytest.mark.parametrize("homes", HOMES)
def test_states_of_another_store_are_as_they_are(homes: str, tmp_path: Path) -> None:
    """Of fp32 parameters nothing is looked at on the way."""
    model, opt = layers(tmp_path, homes, dtype=torch.float32)
    fresh, after = layers(tmp_path, homes, dtype=torch.float32, steps=0)
    after.load_state_dict(opt.state_dict())
    assert_same(kept(fresh, after)[6:], kept(model, opt)[6:])


def test_another_optimizer_of_the_model_takes_them() -> None:
    model, opt = layers(Path())
    wanted = kept(model, opt)
    after = mt.AdamW(reversed(list(model.parameters())), lr=1e-2)
    saved = opt.state_dict()
    saved["state"] = {5 - index: state for index, state in saved["state"].items()}
    after.load_state_dict(saved)
    assert_same(kept(model, after), wanted)


# ---- weights ----

def test_masters_of_8_bits_continue_the_weight() -> None:
    model, _ = trained("8bit-lo8")
    for name, p in model.named_parameters():
        master = mt.masters(model)[name]
        assert not (master.view(torch.int32) & 0xff).any(), "24 bits"
        assert (master - p.detach().float()).abs().max() <= p.detach().float().abs().max() / 250
        assert p.numel() < 100 or not torch.equal(master, p.detach().float())


def test_without_masters_the_weight_is_all_there_is() -> None:
    model, opt = trained("8bit-sr")
    assert all(torch.equal(m, p.detach().float()) for m, p in zip(mt.masters(model).values(), model.parameters()))
    assert not any("master" in s for s in opt.state_dict()["state"].values())


@pytest.mark.parametrize("states", EIGHT)
def test_a_weight_written_between_steps_counts(states: str) -> None:
    model, opt = trained(states)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    assert all((m == 0.5).all() for m in mt.masters(model).values())
    feed(model, opt, grads_for(model, 5))
    assert all((p.detach().float() - 0.5).abs().max() < 0.05 for p in model.parameters())


@pytest.mark.parametrize("states", EIGHT)
def test_a_step_that_is_not_finite_changes_nothing(states: str) -> None:
    model, opt = trained(states)
    before = everything(model, opt)
    grads = grads_for(model, 5)
    grads[1][0] = torch.inf
    feed(model, opt, grads)
    assert opt.skipped_steps == 1
    assert_all_same(before, everything(model, opt))


# ---- what they take ----

@pytest.mark.parametrize("states, low", [("fp32", 2), ("8bit", 2), ("8bit-lo8", 1), ("8bit-sr", 0)])
def test_planes_take_what_the_format_says(states: str, low: int) -> None:
    model = mt.stream(plain_dots(BF16, [(256, 4096)]), device="cpu")
    feed(model, mt.AdamW(model.parameters(), states=states), [torch.ones(256, 4096)])
    core, n = mt.model.stream.runtime_of(model).core, 256 * 4096
    core.drain()
    size = {name: core.host_bytes(number) for name, number in _core.PLANES.items()}
    assert size["LO"] == low * n
    assert size["M"] == size["V"] == (4 if states == "fp32" else 1) * n
    assert size["SCALE"] == (0 if states == "fp32" else n // 128 * 8)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("states", FORMATS)
def test_what_is_planned_is_what_planes_take(states: str, dtype: torch.dtype) -> None:
    unit = unit_bytes("u", list(plain_dots(dtype, [(300, 7), (257,)]).named_parameters()), dtype, states)
    sizes = [300 * 7, 257]
    assert unit.moments == sum(8 * n if states == "fp32" else 2 * n + 8 * -(-n // 128) for n in sizes)
    low = {torch.float32: 0, torch.float16: 4, BF16: {"fp32": 2, "8bit": 2, "8bit-lo8": 1, "8bit-sr": 0}[states]}
    assert unit.masters == low[dtype] * sum(sizes)


def test_a_plan_counts_bytes_and_the_rate_of_its_format() -> None:
    model = plain_dots(BF16, [(512, 512)] * 4)
    plans = {s: mt.plan(model, tokens=64, seq=16, machine="h200-128g", compute="eager", homes="ram", states=s)
             for s in FORMATS}
    for states, plan in plans.items():
        assert plan.states == states and (f"{states} states" in str(plan)) == (states != "fp32")
        assert plan.host.get("masters", 0) == LOW_BYTES[states] * 4 * 512 * 512
        assert plan.host["moments"] == moment_bytes(states, BF16, 512 * 512) * 4
    assert plans["8bit"].busy["host update"] < 0.65 * plans["fp32"].busy["host update"]
    model = mt.stream(model, device="cpu", plan=dataclasses.replace(plans["8bit-sr"], machine=MACHINES["cpu"]))
    opt = mt.AdamW(model.parameters())
    feed(model, opt, [torch.ones(512, 512)] * 4)
    assert "scales" in opt.state[next(model.parameters())]
    assert mt.explain(model).endswith("AdamW's states: 8bit-sr")


def test_a_rate_that_was_not_measured_follows_the_bytes() -> None:
    slow, many = MACHINES["cpu"], dataclasses.replace(MACHINES["cpu"], adam_gparams=((1, 0.5), (100, 4.0)))
    assert many.adam_rate(states="8bit") == pytest.approx(4e9 * 26 / 14.125)
    assert many.adam_rate(1, "8bit") == pytest.approx(0.5e9 * 26 / 14.125)
    assert slow.adam_rate(states="8bit-sr") == pytest.approx(1.5e9), "arithmetic binds two threads"
    known = dataclasses.replace(many, adam8_gparams=(("8bit", 5.0),))
    assert known.adam_rate(states="8bit") == 5e9 and known.adam_rate(50, "8bit") < 5e9


# ---- who says ----

def test_the_plan_says_how_states_are_kept() -> None:
    model = mt.stream(plain_dots(BF16), device="cpu", plan={"states": "8bit"})
    opt = mt.AdamW(model.parameters())
    feed(model, opt, grads_for(model, 0))
    assert "scales" in opt.state[next(model.parameters())]
    with pytest.raises(mt.MegatrainError, match="this model keeps '8bit' ones"):
        mt.AdamW(model.parameters(), states="fp32")


def test_a_second_optimizer_cannot_keep_them_in_another_way() -> None:
    model, _ = trained("fp32", steps=1)
    with pytest.raises(mt.MegatrainError, match="this model keeps 'fp32' ones"):
        mt.AdamW(model.parameters(), states="8bit")
    mt.unstream(model)
    model = mt.stream(model, device="cpu")
    feed(model, mt.AdamW(model.parameters(), states="8bit"), grads_for(model, 0))


def test_a_limit_of_host_memory_counts_the_format() -> None:
    shapes = [(1024, 1024)]
    with pytest.raises(mt.MegatrainError) as refused:
        mt.stream(plain_dots(BF16, shapes), device="cpu", host=1)
    limit = refused.value.changes["host"]
    with pytest.raises(mt.MegatrainError):
        mt.stream(plain_dots(BF16, shapes), device="cpu", host=limit - 5 * 2**20)
    mt.stream(plain_dots(BF16, shapes), device="cpu", host=limit - 5 * 2**20, plan={"states": "8bit"})


@pytest.mark.parametrize("make", [lambda: mt.AdamW(dots().parameters(), states="4bit"),
                                  lambda: mt.stream(plain_dots(), device="cpu", plan={"states": "4bit"})])
def test_an_unknown_format_is_refused(make: Any) -> None:
    with pytest.raises(mt.MegatrainError, match="'4bit': use 'fp32', '8bit' or '8bit-sr'"):
        make()


# ---- states that are on the device around their unit's update alone: when they come and go; no bit changes ----

Pair = tuple[Dots, mt.AdamW]
def visited(homes: Any, dtype: torch.dtype = torch.bfloat16, steps: int = 2, clip: float | None = 0.5,
            debug: Any = None, **hyper: Any) -> Pair:
    model = doors.stream(plain_dots(dtype), device="cpu", plan={"homes": homes, "debug": debug or {}})
    return fed(model, mt.AdamW(model.parameters(), max_grad_norm=clip, **{**test_adamw.HYPER, **hyper}), range(steps))


def arrivals_of(model: Dots) -> Arrivals:
    return mt.model.stream.runtime_of(model).homes.arrivals


def lifted(model: Dots) -> set[int]:
    return set(arrivals_of(model).pieces)


# ---- when ----

def test_states_come_during_backward_and_leave_during_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_torch.store.arrivals.AHEAD", 2)
    model, opt = visited("arrive")
    arrivals = arrivals_of(model)
    order, up = [], []
    handed = arrivals.handed
    arrivals.handed = lambda unit: (handed(unit), order.append(unit), up.append(lifted(model)))
    loss = model(grads_for(model, 5))
    mt.model.stream.runtime_of(model).drain()
    assert lifted(model) == set()
    loss.backward()
    due = {unit: max(order.index(unit) + 1 - 2, 1) for unit in order}
    assert up == [{u for u in order if due[u] <= at} for at in range(1, len(order) + 1)]
    opt.step()
    assert lifted(model) == set(order)
    model(grads_for(model, 6))
    mt.model.stream.runtime_of(model).drain()
    assert lifted(model) == set()


def test_units_that_step_does_not_ask_for_stay_until_it_does() -> None:
    model, opt = visited("arrive")
    mt.model.stream.runtime_of(model).drain()
    model(grads_for(model, 5)).backward()
    opt.zero_grad()
    model(grads_for(model, 5))
    mt.model.stream.runtime_of(model).drain()
    assert lifted(model) == {0, 1, 2, 3}
    feed(model, opt, grads_for(model, 6))
    mt.model.stream.runtime_of(model).drain()
    assert lifted(model) == set()


def test_states_leave_after_an_update_in_backward_whichever_unit_is_the_first_handed_over() -> None:
    model, _opt = visited("arrive", clip=None, in_backward=True, steps=3)
    assert lifted(model) == {0, 1, 2, 3}
    mt.model.stream.runtime_of(model).drain()
    model(grads_for(model, 5))
    assert lifted(model) == set()


def test_only_named_units_arrive_and_their_states_cross_once_each_way() -> None:
    model, opt = visited({"layers.3": "arrive"}, steps=3)
    rt = mt.model.stream.runtime_of(model)
    rt.drain()
    before = rt.core.stats()
    feed(model, opt, grads_for(model, 5))
    rt.drain()
    crossed = {k: n - before[k] for k, n in rt.core.stats().items()}
    gradients = sum(p.numel() for layer in model.layers[:3] for p in layer.parameters()) * 2
    assert crossed["d2h_bytes"] == gradients + 640 * 10
    assert rt.core.device_bytes() == 1536            # the gradient, aligned


def test_memory_that_is_short_in_backward_is_asked_for_again_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = visited("arrive"), visited("ram")
    short = [True]
    empty = torch.empty

    def scarce(*size: Any, **how: Any) -> torch.Tensor:
        if short[0] and how.get("dtype") is torch.uint8:         # a piece of a stay
            raise torch.OutOfMemoryError("no memory")
        return empty(*size, **how)
    monkeypatch.setattr(torch, "empty", scarce)
    for model, _ in pairs:
        mt.model.stream.runtime_of(model).drain()
        model(grads_for(model, 5)).backward()
        assert lifted(model) == set()
    with pytest.raises(torch.OutOfMemoryError):
        pairs[0][1].step()
    short[0] = False
    for _, opt in pairs:
        opt.step()
    assert_equal(*pairs)


# ---- doors ----

def test_a_model_that_goes_at_once_waits_for_its_copies() -> None:
    for _ in range(2):
        model, opt = visited("arrive", debug={"delay_us": 200, "seed": 5})
        model(grads_for(model, 5)).backward()
        opt.step()
        del model, opt
        gc.collect()


def test_limits_count_states_in_both_places() -> None:
    needs = {}
    for home, limit in (("ram", "host"), ("arrive", "host"), ("arrive", "vram"), ("vram", "vram")):
        with pytest.raises(mt.MegatrainError, match="does not fit") as refused:
            mt.stream(plain_dots(torch.bfloat16), device="cpu", plan={"homes": home}, **{limit: 1})
        needs[home, limit] = refused.value.changes.get(limit)
    numel = 33 + 7 * 13 + 1 + 16 * 40
    assert 10 * numel <= needs["arrive", "host"] < needs["ram", "host"]
    assert needs["arrive", "vram"] == needs["vram", "vram"]
    mt.stream(plain_dots(torch.bfloat16), device="cpu", host=needs["arrive", "host"], plan={"homes": "arrive"})
    mt.stream(plain_dots(torch.bfloat16), device="cpu", host=1, plan={"homes": "vram"})        # nothing of it is there


@pytest.mark.parametrize("homes, states", [("ram", "fp32"), ("ram", "8bit"), ("vram", "fp32"), ("disk", "fp32")])
def test_moments_are_made_while_the_first_pass_is_computed(homes: str, states: str, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    expected = kept(*layers(tmp_path, homes, states))
    monkeypatch.setattr(runtime, "AHEAD", 1)
    model, opt = layers(tmp_path, homes, states, steps=0)
    rt = runtime.runtime_of(model)
    with torch.no_grad():
        model(torch.zeros(1, 24, dtype=BF16))
    assert rt._maker is None                     # nothing is trained by that
    model(torch.zeros(1, 24, dtype=BF16))
    rt._maker.join()
    assert (rt.core.host_bytes(_core.PLANES["M"]) > 0) == (homes == "ram") and not opt.state
    for number in range(2):
        step_layers(model, opt, number)
    assert all(map(torch.equal, kept(model, opt), expected))


def test_no_moment_is_made_without_an_optimizer_or_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "AHEAD", 1)
    made, begun = [], threading.Event()

    def slowly(core: Any, planes: Any) -> None:
        begun.set()
        while planes:
            made.append(core.plane(*planes.popleft()))
            time.sleep(0.01)

    monkeypatch.setattr(runtime, "_make_planes", slowly)
    model = mt.stream(nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))), "cpu")
    x, rt = torch.randn(2, 8), runtime.runtime_of(model)
    model(x).sum().backward()
    assert rt._maker is None and rt.core.host_bytes(_core.PLANES["M"]) == 0
    mt.AdamW(model.parameters())
    model(x)
    assert begun.wait(60)
    mt.unstream(model)
    assert not rt._maker.is_alive() and len(made) < 200


def test_moments_are_made_of_parameters_that_an_optimizer_has_and_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "AHEAD", 1)
    alive: list[bool] = []
    own = runtime._make_planes

    def slowly(core: Any, planes: Any) -> None:
        alive.append(len([t for t in threading.enumerate() if t.name == "mt-states"]) > 1)
        time.sleep(0.1)
        own(core, planes)

    monkeypatch.setattr(runtime, "_make_planes", slowly)
    model = mt.stream(Chain(*(nn.Linear(64, 64, bias=False) for _ in range(6))), "cpu")
    x, rt = torch.randn(2, 64), runtime.runtime_of(model)
    for first in (0, 1):                         # the second comes while the first one's are made
        opt = mt.AdamW(model.layers[first].parameters())
        model(x)
    rt._maker.join()
    assert alive == [False, False] and rt.core.host_bytes(_core.PLANES["M"]) <= 2 * 64 * 64 * 4
    assert not opt.state


def test_a_process_that_ends_makes_no_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    main, made = threading.Thread(), []
    monkeypatch.setattr(threading, "main_thread", lambda: main)      # which is not alive
    runtime._make_planes(SimpleNamespace(plane=lambda *at: made.append(at)), deque([(0, 0, 0)]))
    assert not made
