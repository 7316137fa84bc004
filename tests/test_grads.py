"""Gradients that are kept nowhere (plan={"grads": "none"}): the bits of updates inside backward, and what is refused.

The C side is tests/c/test_lend.c.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import doors
import edges
import parity
import pytest
import torch
from between import assert_equal
from situations import batch, lm_loss, made
from test_adamw import HYPER, Dots, fed, feed, grads_for, plain_dots
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.graph import exchange
from megatrain_torch.plans.search import Problem
from megatrain_torch.plans.tally import Asked

NONE = {"grads": "none"}
GRAD = _core.PLANES["GRAD"]


def trained(plan: dict[str, Any], dtype: torch.dtype = torch.bfloat16, steps: int = 6) -> tuple[Dots, mt.AdamW]:
    model = doors.stream(plain_dots(dtype), device="cpu", plan=plan)
    return fed(model, mt.AdamW(model.parameters(), in_backward=True, **HYPER), range(steps))


def core_of(model: nn.Module) -> Any:
    return mt.model.stream.runtime_of(model).core


@pytest.mark.parametrize("plan, dtype", [
    ({}, torch.float32), ({}, torch.float16), ({"debug": {"delay_us": 200, "seed": 3}}, torch.bfloat16),
    ({"homes": "through"}, torch.bfloat16), ({"homes": {"layers.0": "arrive", "layers.1": "vram"}}, torch.bfloat16),
    ({"homes": "vram", "debug": {"delay_us": 200, "seed": 4}}, torch.bfloat16), ({"lent": 2}, torch.bfloat16),
    ({"lent": 1, "homes": {"layers.1": "vram"}, "debug": {"delay_us": 200, "seed": 5}}, torch.bfloat16)],
    ids=["fp32", "fp16", "delays", "through", "some_on_the_device", "vram-delays", "two buffers", "one-delays"])
def test_bits_are_those_of_gradients_that_are_kept(plan: dict[str, Any], dtype: torch.dtype) -> None:
    none, kept = trained(plan | NONE, dtype), trained({}, dtype)
    assert_equal(none, kept)
    assert none[1].grad_norm == kept[1].grad_norm


def test_a_transformer_with_tied_weights_trains_to_the_same_bits() -> None:
    def run(plan: dict[str, Any]) -> dict[str, Tensor]:
        parity.seed()
        model = mt.stream(made(edges.Walk).to(torch.bfloat16), device="cpu", plan=plan, compute="eager")
        opt = mt.AdamW(model.parameters(), lr=1e-2, eps=1e-4, in_backward=True)
        losses = {}
        for step in range(8):
            losses[f"loss {step}"] = update(lm_loss(model, batch(step)), opt).detach()
        return losses | {n: p.detach().clone() for n, p in model.named_parameters()}
    kept = run({})
    assert edges.difference(kept, run(NONE)) is None
    assert edges.difference(kept, run(NONE | {"lent": 1})) is None


def test_nothing_is_kept() -> None:
    model, opt = trained(NONE, steps=2)
    model(grads_for(model, 3)).backward()
    assert all(p.grad is None for p in model.parameters())
    opt.step()
    core_of(model).drain()
    assert core_of(model).host_bytes(GRAD) <= 3 << 20          # buffers of the least size
    model = mt.stream(plain_dots(torch.bfloat16, [(1 << 19,)] * 8), device="cpu", plan=NONE)
    opt = mt.AdamW(model.parameters(), in_backward=True, **HYPER)
    feed(model, opt, grads_for(model, 0))
    core_of(model).drain()
    assert core_of(model).host_bytes(GRAD) <= 3 << 20


def test_fewer_buffers_are_fewer_bytes() -> None:
    model = mt.stream(plain_dots(torch.bfloat16, [(1 << 19,)] * 8), device="cpu", plan=NONE | {"lent": 1})
    opt = mt.AdamW(model.parameters(), in_backward=True, **HYPER)
    feed(model, opt, grads_for(model, 0))
    core_of(model).drain()
    assert core_of(model).host_bytes(GRAD) == 1 << 20
    assert mt.model.stream.runtime_of(model).room.asked.host()["gradients"] == 1 << 20
    with pytest.raises(mt.MegatrainError, match="lent=4: 1 to 3 buffers"):
        mt.stream(plain_dots(), device="cpu", plan=NONE | {"lent": 4})


def test_nothing_is_kept_on_the_device_either() -> None:
    big = [(1 << 19,)] * 8

    def device_bytes(plan: dict[str, Any]) -> int:
        model = mt.stream(plain_dots(torch.bfloat16, big), device="cpu", plan=plan | {"homes": "vram"})
        opt = mt.AdamW(model.parameters(), in_backward=True, **HYPER)
        fed(model, opt, range(2))
        assert plan != NONE or all(p.grad is None for p in model.parameters())
        core_of(model).drain()
        asked = mt.model.stream.runtime_of(model).room.asked.device()
        assert core_of(model).device_bytes() <= sum(n for what, n in asked.items() if what.startswith("at home"))
        assert core_of(model).host_bytes() == 0
        return core_of(model).device_bytes()

    assert device_bytes({}) - device_bytes(NONE) >= 5 << 20         # 8 planes of 1 MiB, or 3 buffers


@pytest.mark.parametrize("lent, most", [(1, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("homes", ["ram", "vram", {"layers.1": "vram", "layers.3": "vram"}], ids=["ram", "vram", "turns"])
def test_gradients_of_so_many_units_are_on_their_way(homes: Any, lent: int, most: int) -> None:
    """Beside those that are being computed: what a plan counts. Each place has buffers of its own to wait for."""
    debug = {"delay_us": 3000, "seed": 1}
    model = doors.stream(plain_dots(), device="cpu", plan=NONE | {"homes": homes, "lent": lent, "debug": debug})
    opt = mt.AdamW(model.parameters(), in_backward=True, **HYPER)
    rt = mt.model.stream.runtime_of(model)
    found, sent = [], rt.handover._send_unit

    def send(unit: int, pairs: Any) -> None:
        sent(unit, pairs)
        found.append(len(rt.handover.alive))

    rt.handover._send_unit = send
    fed(model, opt, range(3))
    assert max(found) <= most
    if lent > 1 or homes != "ram":
        assert max(found) == most


@pytest.mark.parametrize("homes", ["ram", "vram"])
def test_a_unit_that_is_not_finite_is_skipped_alone(homes: str) -> None:
    pairs = trained(NONE | {"homes": homes}), trained({})
    for model, opt in pairs:
        bad = grads_for(model, 9)
        bad[1][2, 3] = float("nan")
        feed(model, opt, bad)
        assert opt.skipped_steps == 1
        feed(model, opt, grads_for(model, 10))
    assert_equal(*pairs)


@pytest.mark.parametrize("homes", ["ram", "vram"])
def test_a_second_backward_is_refused_and_changes_nothing(homes: str) -> None:
    pairs = trained(NONE | {"homes": homes}), trained({})
    for model, opt in pairs:
        model(grads_for(model, 9)).backward()
        if (model, opt) == pairs[0]:
            with pytest.raises(mt.MegatrainError, match=r"kept nowhere .*second backward before step"):
                model(grads_for(model, 10)).backward()
        opt.step()
        opt.zero_grad()
        feed(model, opt, grads_for(model, 11))
    assert_equal(*pairs)


def test_who_cannot_use_them_at_once_is_refused() -> None:
    model = mt.stream(plain_dots(), device="cpu", plan=NONE)
    with pytest.raises(mt.MegatrainError, match="nobody who updates in backward is there"):
        model(grads_for(model, 0)).backward()
    late = mt.AdamW(model.parameters(), **HYPER)
    with pytest.raises(mt.MegatrainError, match="nobody who updates in backward is there"):
        model(grads_for(model, 0)).backward()
    del late
    opt = mt.AdamW([model.layers[0].weight, model.layers[1].weight, model.layers[2].weight], in_backward=True)
    with pytest.raises(mt.MegatrainError, match=r"does not have layers\.3\.weight"):
        model(grads_for(model, 0)).backward()
    opt.step()
    model.layers[3].weight.requires_grad_(False)
    feed(model, opt, grads_for(model, 0))
    model.layers[0].weight.grad = torch.ones(33)
    with pytest.raises(mt.MegatrainError, match=r"there is a \.grad to add to"):
        model(grads_for(model, 1)).backward()
    del opt
    model.layers[0].weight.grad = None
    with pytest.raises(mt.MegatrainError, match="its optimizer is gone"):
        model(grads_for(model, 2)).backward()


def test_a_gradient_of_torchs_own_has_no_place() -> None:
    model, opt = trained(NONE, steps=1)
    model.layers[1].weight.register_hook(lambda g: g)
    model(grads_for(model, 2)).backward()
    with pytest.raises(mt.MegatrainError, match=r"layers\.1\.weight: it has a \.grad of its own"):
        opt.step()


def test_a_plan_with_a_disk_has_the_buffers_that_take_least_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flat import FLAT, small
    best, seconds = Problem.best, {3: 3.0, 2: 1.0, 1: 2.0}

    def timed(self: Problem, than: float) -> Any:
        (choice, timing), took = best(self), seconds[self.wishes.lent]
        return (choice, timing._replace(seconds=took)) if took < than else None

    monkeypatch.setattr(Problem, "best", timed)
    asked = dict(tokens=4096, seq=512, machine=FLAT, nvme=tmp_path, grads="none")
    lent = {home: mt.plan(small(8), homes=home, **asked).lent for home in ("ram", "disk", "disk+weights")}
    assert lent == {"ram": 3, "disk": 2, "disk+weights": 2}


def test_plans_count_what_is_not_kept_and_refuse_what_needs_it() -> None:
    from flat import FLAT, small
    asked = dict(tokens=4096, seq=512, machine=FLAT, homes="vram")
    none, kept = mt.plan(small(8), grads="none", **asked), mt.plan(small(8), micro=1, **asked)
    there = "at home: gradients"
    assert none.vram[there] < 0.7 * kept.vram[there] and "weights" not in none.host
    asked["homes"] = "ram"
    none, kept = mt.plan(small(8), grads="none", **asked), mt.plan(small(8), **asked)
    assert none.micro == 1 and none.grads == "none" and none.host["gradients"] < 0.7 * kept.host["gradients"]
    assert none.host_bytes - none.host["gradients"] == kept.host_bytes - kept.host["gradients"]
    tight = mt.plan(small(8), grads="none", **asked, host=none.host_bytes - 1)
    assert (none.lent, tight.lent) == (3, 2) and tight.host["gradients"] < none.host["gradients"]
    least = mt.plan(small(8), grads="none", **asked, host=tight.host_bytes - 1)
    assert least.lent == 1 and "1 buffer for gradients" in str(least)
    assert "2 buffers for gradients" in str(tight) and "buffers for gradients" not in str(none)
    for wrong, says in (({"grads": "gone"}, "grads='gone'"), ({"grads": None}, "grads=None: use 'ram', 'none'"),
                        ({"grads": "none", "micro": 2}, "one micro-batch")):
        with pytest.raises(mt.MegatrainError, match=says):
            mt.plan(small(), **asked | wrong)
    with pytest.raises(mt.MegatrainError, match="grads='disk'"):
        mt.stream(plain_dots(), device="cpu", plan={"grads": "disk"})
    groups = [(f"layers.{i}", [("weight", nn.Parameter(torch.empty(1 << 20, device="meta")))]) for i in range(40)]
    counted = [Asked("dots", groups, torch.bfloat16, ("ram",) * 40, keeps=keeps).host()["gradients"]
               for keeps in (True, False)]
    assert counted == [40 * 2 << 20, 3 * 2 << 20]


@pytest.mark.parametrize("kinds", [["bfloat16"], ["float16"], ["float32"], ["float64"], ["bfloat16", "float32"]], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_gradients_of_ranks_are_added_in_their_order_in_fp32(kinds: list[str], scale: float) -> None:
    """And rounded once; -0 stays what it is."""
    records: list[Any] = []
    for i, n in enumerate((5000, 3, 129)):
        dtype = getattr(torch, kinds[i % len(kinds)])
        records.append(type("Place", (), {"dtype": dtype, "offset": i << 20, "nbytes": n * dtype.itemsize})())
    layout = exchange.Layout((0, 1 << 20, 3 << 20), records)
    assert [len(own) for own in layout.parcels] == [1, 2]
    parts = torch.zeros(3, layout.bytes[1], dtype=torch.uint8)
    grads = [{p.record.nbytes: torch.randn(p.n).to(p.record.dtype) for p in layout.parcels[1]} for _ in range(3)]
    for part, own in zip(parts, grads):
        for p in layout.parcels[1]:
            own[p.record.nbytes][0] = -0.0
            p.of(part).copy_(own[p.record.nbytes])
    layout.bytes[:] = [layout.bytes[1]] * 3
    layout.parcels.append(layout.parcels[1])
    for record, found in layout.total(1, parts.view(-1), scale).items():
        wanted = exchange.total([own[record.nbytes] for own in grads], scale).to(record.dtype)
        assert torch.equal(found, wanted) and torch.equal(found.signbit(), wanted.signbit()), record
