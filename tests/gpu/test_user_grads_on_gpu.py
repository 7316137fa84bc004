"""What tests/test_user_grads.py says of the CPU device, on a GPU: the same numbers, copies that really overlap."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from test_adamw import BF16, F16, F32, HYPER, assert_same, feed, grads_for, plain_dots, references
from test_user_grads import CHANGES, KEEPERS, ORDERS, PENALTIES, between, same_grads, stepped, value

import megatrain_torch as mt

SHAPES = [(3000, 700), (33,), (7, 13), (2000, 900)]
HOMES = pytest.mark.parametrize("homes", ["ram", "vram", "arrive", "through"])


def pair(homes: str, dtype: torch.dtype = F32) -> tuple[Any, Any, mt.AdamW]:
    model = mt.stream(plain_dots(dtype, SHAPES), device="cuda", plan={"homes": homes})
    return model, plain_dots(dtype, SHAPES), mt.AdamW(model.parameters(), **HYPER)


@HOMES
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_graphs_on_the_host_give_torchs_gradients(homes: str, dtype: torch.dtype) -> None:
    model, plain, opt = pair(homes, dtype)
    refs = references(model)
    for pen in ("sum", "function"):
        for order in ORDERS if dtype == F32 else [o for o in ORDERS if o is not between]:
            for m in (model, plain):
                order(m, grads_for(m, 1), PENALTIES[pen])
            stepped(model, plain, opt, refs)


@HOMES
def test_changes_and_keepers_are_torchs(homes: str) -> None:
    model, plain, opt = pair(homes)
    refs = references(model)
    for step, (change, keep) in enumerate(zip(CHANGES.values(), KEEPERS.values())):
        kept: dict[Any, Any] = {}
        for m in (model, plain):
            m(grads_for(m, step)).backward()
            kept[m] = [keep(p) for p in m.parameters()]
            if keep is not KEEPERS["graph"]:
                change(m.layers[0].weight)
                m(grads_for(m, step + 20)).backward()
        same_grads(model, plain)
        stepped(model, plain, opt, refs)
        model(grads_for(model, step + 40)).backward()
        assert [value(k) for k in kept[model]] == [value(k) for k in kept[plain]]
        model.zero_grad()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_16_bit_parameters_on_the_gpu_are_updated_as_streamed_ones(dtype: torch.dtype) -> None:
    twin, ours = mt.stream(plain_dots(dtype, SHAPES), device="cuda"), plain_dots(dtype, SHAPES).cuda()
    theirs, opt = mt.AdamW(twin.parameters(), **HYPER), mt.AdamW(ours.parameters(), **HYPER)
    for step in range(5):
        feed(twin, theirs, grads_for(twin, step))
        feed(ours, opt, [g.cuda() for g in grads_for(twin, step)])
        for p, q in zip(twin.parameters(), ours.parameters()):
            assert_same(q.cpu(), p, "weight")


def test_gradscaler_trains_as_without_it() -> None:
    for homes in ("ram", "vram"):
        model, _, opt = pair(homes)
        other, _, theirs = pair(homes)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        for step in range(3):
            scaler.scale(model(grads_for(model, step))).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            feed(other, theirs, grads_for(model, step))
            assert opt.grad_norm == theirs.grad_norm
        for p, q in zip(model.parameters(), other.parameters()):
            assert_same(p, q, "weight")
