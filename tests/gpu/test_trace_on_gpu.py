"""mt.trace on CUDA: stamps of three streams and the host's clock make one timeline."""
from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.figures.report import Slice, by_lane

WIDTH, LAYERS, STEPS = 4096, 4, 6
APART_NS = 200_000       # what the host's clock and the stamps' may differ by


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


@pytest.fixture(scope="module", params=["ram", "vram"])
def traced(request: Any) -> tuple[str, mt.Trace, int, int]:
    torch.manual_seed(0)
    model = mt.stream(Net(WIDTH, LAYERS).to(torch.bfloat16), "cuda", plan={"activations": "saved", "slots": 2, "homes": request.param})
    opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    x = torch.randn(8192, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x).backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        step()
    mt.model.stream.runtime_of(model).drain()
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    with mt.trace(model) as t:
        for _ in range(STEPS):
            step()
    torch.cuda.synchronize()
    return request.param, t, began, time.perf_counter_ns()


def test_all_clocks_agree(traced: tuple[str, mt.Trace, int, int]) -> None:
    _, t, began, ended = traced
    for s in t.slices():
        assert began - APART_NS <= s.begin <= s.end <= ended + APART_NS, s


def test_lanes_do_one_thing_at_a_time(traced: tuple[str, mt.Trace, int, int]) -> None:
    home, t, _, _ = traced
    lanes = by_lane(t.slices())
    wanted = {"compute", "h2d", "d2h", "host update"} if home == "ram" else {"compute", "d2h", "device update"}
    assert wanted <= set(lanes)
    for lane in lanes.values():
        assert all(a.end <= b.begin + 1000 for a, b in pairwise(lane))     # ns: stamps count in half microseconds


def test_copies_run_at_the_bus_and_updates_follow_them(traced: tuple[str, mt.Trace, int, int]) -> None:
    home, t, _, _ = traced
    lanes = by_lane(t.slices())
    updates = [s for s in lanes["host update" if home == "ram" else "device update"] if s.work == "update"]
    assert len(updates) >= (STEPS - 1) * LAYERS
    for s in updates:
        given = [o for o in lanes["d2h"] if o.unit == s.unit and o.begin < s.begin]
        assert not given or max(o.end for o in given) <= s.begin + APART_NS, s
    for s in lanes["h2d"] if home == "ram" else ():
        assert 1 < s.nbytes / (s.end - s.begin) < 500, s                  # GB/s: PCIe 3 to NVLink-C2C


def test_windows_take_the_time_that_their_products_take(traced: tuple[str, mt.Trace, int, int]) -> None:
    """2 x 8192 x 4096 x 4096 operations: at 50 to 2,000 TFLOP/s, once in forward and twice in backward."""
    _, t, _, _ = traced
    work: dict[str, list[Slice]] = {}
    for s in t.slices():
        work.setdefault(s.work, []).append(s)
    least = 2 * 8192 * WIDTH * WIDTH / 2e15
    for kind, times in (("forward", 1), ("backward", 2)):
        total = sum(s.seconds for s in work[kind]) / (STEPS * LAYERS)
        assert times * least < total < 40 * times * least, (kind, total)


def test_tracing_costs_little() -> None:
    """Where the host is what binds: small layers, nothing to compute. A window's stamps and Python's part of them."""
    model = mt.stream(Net(64, 32), "cuda", plan={"activations": "saved", "slots": 3})
    x = torch.randn(16, 64, device="cuda")

    def seconds() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            model(x).backward()
            model.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 20

    seconds()
    off = min(seconds() for _ in range(3))
    with mt.trace(model):
        on = min(seconds() for _ in range(3))
    per_window_us = (on - off) / 64 * 1e6
    assert per_window_us < 60, f"{per_window_us:.0f} us for each window; {off * 1e3:.1f} ms a step without"
