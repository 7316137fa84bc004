"""Optimizer states that somebody moves: those of the store are copied into it, torch's come home before a step."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_adamw import assert_all_same, dots, everything, feed, grads_for
from torch import Tensor

import megatrain_torch as mt


def trained(make: Any, **kw: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = dots(**kw)
    opt = make(model.parameters(), lr=1e-2)
    for step in range(2):
        feed(model, opt, grads_for(model, step))
    return model, opt


def move(opt: torch.optim.Optimizer, to: Any) -> None:
    """As Lightning does with what it loaded."""
    for states in opt.state.values():
        for name, value in states.items():
            if name != "step":
                states[name] = to(value)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_what_is_put_over_the_stores_states_is_copied_into_it(states: str) -> None:
    made = [trained(lambda p, **kw: mt.AdamW(p, states=states, **kw)) for _ in range(2)]
    (model, opt), (other, moved) = made
    kept = [dict(s) for s in moved.state.values()]
    move(moved, lambda t: Tensor.detach(t).clone())
    assert all(s[name] is value for s, before in zip(moved.state.values(), kept) for name, value in before.items())
    for m, o in made:
        feed(m, o, grads_for(m, 2))
    assert_all_same(everything(model, opt), everything(other, moved))
    move(moved, torch.zeros_like)
    for p in other.parameters():
        assert not any(t.any() for t in moved.moments(p))


def test_states_are_plain_dicts_when_they_are_saved() -> None:
    _, opt = trained(mt.AdamW)
    saved = opt.state_dict()["state"]
    assert {type(s) for s in saved.values()} == {dict}
    assert copy.deepcopy(saved).keys() == saved.keys()


def test_torchs_states_come_home_before_the_step() -> None:
    """There is no other device here than meta, from which nothing can be brought: that says that it is tried."""
    model, opt = trained(torch.optim.AdamW)
    move(opt, lambda t: t.to("meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        feed(model, opt, grads_for(model, 2))


def test_an_optimizer_of_somebody_elses_may_keep_states_elsewhere() -> None:
    class Momentum(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            seen.extend(s["m"].device.type for s in self.state.values())

    seen: list[str] = []
    model = dots()
    opt = Momentum(model.parameters(), {})
    for p in model.parameters():
        opt.state[p]["m"] = torch.empty(p.shape, device="meta")
    feed(model, opt, grads_for(model, 0))
    assert set(seen) == {"meta"}


def test_an_optimizer_of_other_parameters_is_left_alone() -> None:
    dots()
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    opt = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    p.grad = torch.ones(3, device="meta")
    opt.step()
    assert opt.state[p]["momentum_buffer"].is_meta
