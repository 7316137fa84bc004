"""What may happen between a backward and its step, and how two trained models are compared.

Shared by the tests of units at home elsewhere than in host memory.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_adamw import SHAPES, Dots, feed, grads_for
from torch import Tensor

import megatrain_torch as mt

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
Pair = tuple[Dots, mt.AdamW]


def states(model: Dots, opt: mt.AdamW) -> dict[str, Tensor]:
    out = {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
    out |= {f"master {n}": m for n, m in mt.masters(model).items()}
    return out | {f"{k} {n}": v.clone() for n, p in model.named_parameters() for k, v in opt.state[p].items()}


def assert_equal(a: Pair, b: Pair) -> None:
    one, other = states(*a), states(*b)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


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
    mt.optim.states.set_master(model.layers[3].weight, torch.full(SHAPES[3], 0.3))


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


def train_with(between: Callable[[Dots, mt.AdamW], Any], *pairs: Pair) -> None:
    """Three steps of each pair; `between` comes before and behind the first two's step()."""
    for model, opt in pairs:
        for step in (5, 6):
            model(grads_for(model, step)).backward()
            between(model, opt)
            opt.step()
            between(model, opt)
            opt.zero_grad()
        feed(model, opt, grads_for(model, 7))
