"""States that are on the device around their unit's update alone: when they come and go, and that it changes no bit.

That training gives the same bits in each placement is test_overlap.py's; the C side is tests/c/test_arrive.c.
"""
from __future__ import annotations

import gc
from typing import Any

import doors
import pytest
import torch
from between import assert_equal
from test_adamw import HYPER, Dots, fed, feed, grads_for, plain_dots

import megatrain_torch as mt
from megatrain_torch.store.arrivals import Arrivals

Pair = tuple[Dots, mt.AdamW]
def trained(homes: Any, dtype: torch.dtype = torch.bfloat16, steps: int = 2, clip: float | None = 0.5,
            debug: Any = None, **hyper: Any) -> Pair:
    model = doors.stream(plain_dots(dtype), device="cpu", plan={"homes": homes, "debug": debug or {}})
    opt = mt.AdamW(model.parameters(), max_grad_norm=clip, **{**HYPER, **hyper})
    return fed(model, opt, range(steps))


def arrivals_of(model: Dots) -> Arrivals:
    return mt.model.stream.runtime_of(model).homes.arrivals


def lifted(model: Dots) -> set[int]:
    return set(arrivals_of(model).pieces)


# ---- when ----

def test_states_come_during_backward_and_leave_during_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_torch.store.arrivals.AHEAD", 2)
    model, opt = trained("arrive")
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
    model, opt = trained("arrive")
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
    model, _opt = trained("arrive", clip=None, in_backward=True, steps=3)
    assert lifted(model) == {0, 1, 2, 3}
    mt.model.stream.runtime_of(model).drain()
    model(grads_for(model, 5))
    assert lifted(model) == set()


def test_only_named_units_arrive_and_their_states_cross_once_each_way() -> None:
    model, opt = trained({"layers.3": "arrive"}, steps=3)
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
    pairs = trained("arrive"), trained("ram")
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
        model, opt = trained("arrive", debug={"delay_us": 200, "seed": 5})
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
