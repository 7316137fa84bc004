"""Updates that begin during backward: always the bits of updates that do not, whoever looks or writes in between.

With debug sync=True every update that may begin early has been made when backward() returns, so what happens
between backward and step() meets it for certain.
"""
from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import parity
import placement
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("streaming")
if parity.IDENTITY:
    pytest.skip("plain against plain was asked for", allow_module_level=True)
from test_adamw import HYPER, SHAPES, Dots, feed, grads_for, plain_dots  # noqa: E402

import megatrain_torch as mt  # noqa: E402

UNITS = len(SHAPES)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
Pair = tuple[Dots, mt.AdamW]


def trained(early: Any = True, dtype: torch.dtype = torch.bfloat16, steps: int = 2, clip: float | None = 1e9,
            **hyper: Any) -> Pair:
    """A model and its optimizer after some steps; each backward from then on begins updates, where early."""
    model = mt.stream(plain_dots(dtype), device="cpu", plan={"speculate": early, "debug": {"sync": True}})
    opt = mt.AdamW(model.parameters(), max_grad_norm=clip, **{**HYPER, **hyper})
    for step in range(steps):
        feed(model, opt, grads_for(model, step))
    return model, opt


def counted(model: Dots) -> dict[str, int]:
    stats = mt.wrap.runtime_of(model).core.stats()
    return {k: stats[k] for k in ("speculated", "committed", "undone")}


def states(model: Dots, opt: mt.AdamW) -> dict[str, Tensor]:
    out = {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
    out |= {f"master {n}": m for n, m in mt.masters(model).items()}
    return out | {f"{k} {n}": v.clone() for n, p in model.named_parameters() for k, v in opt.state[p].items()}


def assert_equal(a: Pair, b: Pair) -> None:
    one, other = states(*a), states(*b)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


# ---- what is kept, and what is taken back ----

@pytest.mark.parametrize("dtype", placement.DTYPES)
@pytest.mark.parametrize("name", [n for n in placement.PLACES if placement.first_of(n) != n])
@pytest.mark.filterwarnings("ignore:.*could not be locked")
def test_every_placement_gives_the_same_bits(name: str, dtype: str, right: Callable[..., Any]) -> None:
    found = placement.difference(name, "cpu", placement.DTYPES[dtype], right(placement.first_of(name), dtype))
    assert found is None, found


@pytest.fixture(scope="module")
def right() -> Callable[..., Any]:
    known: dict[tuple[str, str], Any] = {}

    def get(name: str, dtype: str) -> Any:
        if (name, dtype) not in known:
            known[name, dtype] = placement.train(name, "cpu", placement.DTYPES[dtype])[0]
        return known[name, dtype]
    return get


@TYPES
@pytest.mark.parametrize("clip", [None, 1e9])
def test_unclipped_steps_keep_every_update_that_began(dtype: torch.dtype, clip: float | None) -> None:
    early, plain = trained(dtype=dtype, steps=6, clip=clip), trained(False, dtype, 6, clip)
    assert counted(early[0]) == {"speculated": 5 * UNITS, "committed": 5 * UNITS, "undone": 0}
    assert counted(plain[0])["speculated"] == 0
    assert_equal(early, plain)


@TYPES
def test_clipped_steps_take_updates_back_and_soon_begin_none(dtype: torch.dtype) -> None:
    early = trained(dtype=dtype, steps=20, clip=1e-3)
    assert counted(early[0]) == {"speculated": 4 * UNITS, "committed": 0, "undone": 4 * UNITS}   # steps 2, 3, 11, 19
    assert_equal(early, trained(False, dtype, 20, 1e-3))


def test_updates_begin_again_when_steps_are_clipped_no_more() -> None:
    early, plain = trained(steps=9, clip=1e-3), trained(False, steps=9, clip=1e-3)
    for model, opt in (early, plain):
        opt.max_grad_norm = None
        for step in range(9, 20):
            feed(model, opt, grads_for(model, step))
    assert counted(early[0])["committed"] == 10 * UNITS
    assert_equal(early, plain)


def test_of_several_micro_batches_only_the_last_begins_updates() -> None:
    pairs = trained(steps=0), trained(False, steps=0)
    for model, opt in pairs:
        for step in range(5):
            for micro in range(3):
                model(grads_for(model, 10 * step + micro)).backward()
            opt.step()
            opt.zero_grad()
    assert counted(pairs[0][0]) == {"speculated": 4 * UNITS, "committed": 4 * UNITS, "undone": 0}
    assert_equal(*pairs)


def test_an_update_that_drew_other_numbers_is_not_kept() -> None:
    """The same parameter, under another number than its update began with."""
    model, opt = trained(steps=4)
    before = counted(model)
    model(grads_for(model, 4)).backward()
    opt._keys[model.layers[1].weight] += 1000
    opt.step()
    mt.wrap.runtime_of(model).core.drain()
    after = counted(model)
    assert after["undone"] - before["undone"] == 1
    assert after["committed"] - before["committed"] == UNITS - 1


def test_named_units_alone_begin_early() -> None:
    early = trained(["layers.1", "layers.3"], steps=4)
    assert counted(early[0])["committed"] == 3 * 2
    assert_equal(early, trained(False, steps=4))


def test_step_that_is_not_finite_changes_nothing() -> None:
    pairs = trained(), trained(False)
    bad = grads_for(pairs[0][0], 9)
    bad[1][2, 3] = float("inf")
    for model, opt in pairs:
        before = states(model, opt)
        feed(model, opt, bad)
        assert opt.skipped_steps == 1
        assert all(torch.equal(v, before[k]) for k, v in states(model, opt).items())
        feed(model, opt, grads_for(model, 10))
    assert counted(pairs[0][0]) == {"speculated": 3 * UNITS - 1, "committed": 2 * UNITS, "undone": UNITS - 1}
    assert_equal(*pairs)


# ---- between backward and step() ----

def look_at_states(model: Dots, opt: mt.AdamW) -> None:
    opt.state_dict()


def look_at_masters(model: Dots, opt: mt.AdamW) -> None:
    mt.masters(model)


def change_gradients(model: Dots, opt: mt.AdamW) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def replace_a_gradient(model: Dots, opt: mt.AdamW) -> None:
    p = model.layers[1].weight
    p.grad = p.grad.clone().mul_(3)


def drop_a_gradient(model: Dots, opt: mt.AdamW) -> None:
    model.layers[3].weight.grad = None


def write_a_weight(model: Dots, opt: mt.AdamW) -> None:
    with torch.no_grad():
        model.layers[0].weight.mul_(2)


def write_a_moment(model: Dots, opt: mt.AdamW) -> None:
    opt.state[model.layers[0].weight]["exp_avg"].mul_(0.5)


def write_a_master(model: Dots, opt: mt.AdamW) -> None:
    mt.optim.set_master(model.layers[3].weight, torch.full(SHAPES[3], 0.3))


def lower_the_rate(model: Dots, opt: mt.AdamW) -> None:
    opt.param_groups[0]["lr"] *= 0.5


def go_backward_again(model: Dots, opt: mt.AdamW) -> None:
    model(grads_for(model, 77)).backward()


def drop_the_batch(model: Dots, opt: mt.AdamW) -> None:
    opt.zero_grad()
    model(grads_for(model, 78)).backward()


def load_states(model: Dots, opt: mt.AdamW) -> None:
    saved = copy.deepcopy(opt.state_dict())
    for s in saved["state"].values():
        s["exp_avg"].mul_(0.5)
    opt.load_state_dict(saved)


def evaluate(model: Dots, opt: mt.AdamW) -> None:
    with torch.no_grad():
        model(grads_for(model, 79))


def look_at_weights(model: Dots, opt: mt.AdamW) -> None:
    model.state_dict()
    assert all(p.isfinite().all() for p in model.parameters())


def step_twice(model: Dots, opt: mt.AdamW) -> None:
    opt.step()


BETWEEN = [look_at_states, look_at_masters, change_gradients, replace_a_gradient, drop_a_gradient, write_a_weight,
           write_a_moment, write_a_master, lower_the_rate, go_backward_again, drop_the_batch, load_states, evaluate,
           look_at_weights, step_twice]
KEPT = {evaluate, look_at_weights}


@TYPES
@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_nobody_sees_an_update_before_its_step(between: Callable[[Dots, mt.AdamW], None], dtype: torch.dtype) -> None:
    pairs = trained(dtype=dtype), trained(False, dtype)
    for model, opt in pairs:
        before = states(model, opt)
        model(grads_for(model, 5)).backward()
        if between in (look_at_states, look_at_masters):
            assert all(torch.equal(v, before[k]) for k, v in states(model, opt).items()), "states moved before step()"
        between(model, opt)
        opt.step()
        opt.zero_grad()
        feed(model, opt, grads_for(model, 6))
    seen = counted(pairs[0][0])
    assert seen["speculated"] > UNITS
    assert (seen["undone"] == 0) == (between in KEPT | {step_twice})
    assert_equal(*pairs)


def test_saved_between_backward_and_step_is_the_state_before_it() -> None:
    model, opt = trained()
    before = states(model, opt)
    model(grads_for(model, 5)).backward()
    saved = pickle.loads(pickle.dumps(opt.state_dict()))
    assert counted(model)["undone"] == UNITS
    for i, name in enumerate(n for n, _ in model.named_parameters()):
        for k in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(saved["state"][i][k], before[f"{k} {name}"]), f"{k} of {name}"


def test_unstreamed_before_its_step_has_the_weights_before_it() -> None:
    model, opt = trained()
    before = states(model, opt)
    model(grads_for(model, 5)).backward()
    assert counted(model)["speculated"] == 2 * UNITS
    mt.unstream(model)
    assert all(torch.equal(p, before[f"weight {n}"]) for n, p in model.named_parameters())


def test_another_optimizer_begins_with_clean_states() -> None:
    pairs = trained(), trained(False)
    for model, opt in pairs:
        model(grads_for(model, 5)).backward()
        del opt
    left = []
    for model, _ in pairs:
        other = mt.AdamW(model.parameters(), **HYPER)
        other.step()
        other.zero_grad()
        feed(model, other, grads_for(model, 6))
        left.append((model, other))
    assert_equal(*left)


def test_an_optimizer_that_is_gone_begins_nothing() -> None:
    model, opt = trained()
    counts = counted(model)
    opt.zero_grad()
    del opt
    gc.collect()
    model(grads_for(model, 5)).backward()
    assert counted(model) == counts


# ---- doors ----

def test_last_step_says_how_many_began_and_how_they_ended() -> None:
    model, opt = trained(steps=4)
    feed(model, opt, grads_for(model, 8))
    report = mt.last_step(model)
    assert (report.speculated, report.committed, report.undone) == (4 * UNITS, 4 * UNITS, 0)
    assert f"{4 * UNITS} updates begun in backward, {4 * UNITS} kept, 0 taken back" in str(report)


@pytest.mark.parametrize("asked", ["layers.0", ["layers.9"], 3])
def test_plan_refuses_units_that_are_not_there(asked: Any) -> None:
    with pytest.raises(mt.MegatrainError, match=r"speculate=.*layers\.0, layers\.1"):
        mt.stream(plain_dots(), device="cpu", plan={"speculate": asked})


def test_host_limit_counts_what_may_be_taken_back() -> None:
    numel = sum(p.numel() for p in plain_dots().parameters())
    with pytest.raises(mt.MegatrainError, match="moments") as least:
        mt.stream(plain_dots(torch.bfloat16), device="cpu", host=1)
    limit = least.value.changes["host"]
    mt.unstream(mt.stream(plain_dots(torch.bfloat16), device="cpu", host=limit))
    with pytest.raises(mt.MegatrainError, match="to take updates back") as refused:
        mt.stream(plain_dots(torch.bfloat16), device="cpu", host=limit, plan={"speculate": True})
    assert refused.value.changes["speculate"] is False and refused.value.changes["host"] == limit + 12 * numel
    mt.stream(plain_dots(torch.bfloat16), device="cpu", host=limit + 12 * numel, plan={"speculate": True})


def test_engine_refuses_an_update_that_nobody_could_take_back() -> None:
    model, _ = trained()
    model(grads_for(model, 5)).backward()
    rt = mt.wrap.runtime_of(model)
    entry = (0, 1e-2, 0.9, 0.99, 1e-6, 0.1, 3, 0, 0, mt._core.DTYPES["BF16"], 1)
    with pytest.raises(mt.MegatrainError, match="its gradient was changed"):
        rt.core.speculate(0, [entry])
    home = mt.stream(plain_dots(torch.bfloat16), device="cpu", plan={"homes": "vram"})
    with pytest.raises(mt.MegatrainError, match="is updated on the device"):
        mt.wrap.runtime_of(home).core.speculate(0, [(*entry[:-1], 0)])
