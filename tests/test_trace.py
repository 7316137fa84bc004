"""mt.trace: what queues did, in order and whole; reports that name what bound a step; the files it writes."""
from __future__ import annotations

import contextlib
import json
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import doors
import pytest
import torch
from parity import assert_same
from several_odd import Breaks
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.figures.report import Slice, StepReport, by_lane, measure
from megatrain_torch.graph.door import UNTRACED

WAYS = ["saved", "replay"]
LAYERS = 4
WIDTH = 24
ORDER = ["first", *(f"layers.{i}" for i in range(LAYERS)), "last"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.nap = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.nap)
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def streamed(way: str = "saved", slots: int = 2, delay_us: int = 0, seed: int = 0, model: nn.Module | None = None,
             homes: Any = "ram") -> nn.Module:
    torch.manual_seed(5)
    debug = {"delay_us": delay_us, "seed": seed} if delay_us else {}
    return doors.stream(model or Net(), device="cpu",
                        plan={"activations": way, "slots": slots, "threads": 1, "homes": homes, "debug": debug})


def adamw(model: nn.Module) -> mt.AdamW:
    return mt.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)


def step(model: nn.Module, opt: torch.optim.Optimizer | None = None, micro: int = 1) -> None:
    for i in range(micro):
        (model(torch.full((2, 8), 0.1 * (i + 1))) / micro).backward()
    if opt is not None:
        opt.step()
        opt.zero_grad()
    else:
        model.zero_grad()


def traced(steps: int = 3, micro: int = 1, before: int = 2, **kw: Any) -> tuple[mt.Trace, nn.Module]:
    """A trace of some steps of a model that has made its schedule already."""
    model = streamed(**kw)
    opt = adamw(model)
    for _ in range(before):
        step(model, opt, micro)
    mt.model.stream.runtime_of(model).drain()
    with mt.trace(model) as t:
        for _ in range(steps):
            step(model, opt, micro)
    return t, model


def windows(slices: list[Slice]) -> list[list[Slice]]:
    """The pieces of each window, in order: before and behind a wait for weights, around a replay."""
    found: list[list[Slice]] = []
    for s in slices:
        if s.lane == "compute" and s.work in ("forward", "backward"):
            if not found or (found[-1][0].work, found[-1][0].unit) != (s.work, s.unit):
                found.append([])
            found[-1].append(s)
    return found


def latest(slices: list[Slice], work: str, unit: str, by: int) -> Slice | None:
    """The last that is over by then."""
    return max((s for s in slices if (s.work, s.unit) == (work, unit) and s.end <= by), key=lambda s: s.end, default=None)


# ---------------------------------------------------------------- what is recorded

@pytest.mark.parametrize("way", WAYS)
def test_units_are_in_the_order_of_the_model(way: str) -> None:
    t, _ = traced(way=way, delay_us=200)
    order = [(w[0].work, w[0].unit) for w in windows(t.slices())]
    assert order == ([("forward", u) for u in ORDER] + [("backward", u) for u in reversed(ORDER)]) * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro", [1, 2])
def test_work_follows_what_it_needs(way: str, micro: int) -> None:
    """Whatever the queues' pace: a window is behind a fetch of its unit, a hand-over behind the backward window, an
    update behind the hand-over, and no fetch beside the update."""
    for seed in range(3):
        t, _ = traced(way=way, micro=micro, delay_us=300, seed=seed, before=0)
        slices = t.slices()
        updates = [s for s in slices if s.work == "update"]
        assert len(updates) == 3 * len(ORDER)
        for window in windows(by_lane(t._slices)["compute"]):     # before pieces are joined
            assert latest(slices, "fetch", window[-1].unit, window[-1].begin), window
        for s in slices:
            if s.work == "offload":
                assert latest(slices, "backward", s.unit, s.begin), s
            elif s.work == "update":
                given = [o for o in slices if (o.work, o.unit) == ("offload", s.unit) and o.begin < s.begin]
                assert given and max(o.end for o in given) <= s.begin, s
            elif s.work == "fetch":      # no update of the unit runs while it is copied
                assert not [u for u in updates if u.unit == s.unit and u.begin < s.end and s.begin < u.end], s


def test_bytes_are_those_counted() -> None:
    model = streamed(delay_us=100)
    opt = adamw(model)
    core = mt.model.stream.runtime_of(model).core
    with mt.trace(model) as t:
        step(model, opt, micro=2)
        step(model, opt, micro=2)
        t.finish()
        moved: dict[str, int] = {}
        until = time.monotonic() + 10
        while moved.get("h2d") != core.stats()["h2d_bytes"] and time.monotonic() < until:
            time.sleep(0.01)             # fetches for a forward that does not come
            moved = {lane: sum(s.nbytes for s in part) for lane, part in by_lane(t.slices()).items()}
    parameters = sum(p.numel() for p in model.parameters())
    assert moved["h2d"] == core.stats()["h2d_bytes"] >= 2 * 4 * parameters
    assert moved["d2h"] == core.stats()["d2h_bytes"] == 4 * 4 * parameters
    assert moved["host sum"] == 2 * 4 * parameters                   # the second micro-batch of each step
    assert moved["host update"] == 2 * 28 * parameters


def test_units_on_the_device_are_updated_there() -> None:
    homes = {u: "vram" for u in ORDER[:3]}
    t, _ = traced(homes=homes, delay_us=200)
    lanes = by_lane(t.slices())
    assert {s.unit for s in lanes["device update"] if s.work == "update"} == set(homes)
    assert {s.unit for s in lanes["host update"] if s.work == "update"} == {s.unit for s in lanes["h2d"]} == set(ORDER[3:])
    used = [w[-1] for w in windows(by_lane(t._slices)["compute"])]       # behind the wait for the weights
    for s in lanes["device update"]:
        given = [o for o in lanes["d2h"] if o.unit == s.unit and o.begin < s.begin]
        assert given and max(o.end for o in given) <= s.begin, s
        assert not [w for w in used if w.unit == s.unit and w.begin < s.end and s.begin < w.end], s


def test_a_checkpointed_window_is_replayed_in_backward() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
            return self.last(self.layers[0](x)).square().mean()

    model = streamed(model=Checkpointed())
    with mt.trace(model) as t:
        step(model)
    mine = [s.work for s in t.slices() if s.unit == "first" and s.lane == "compute"]
    assert list(dict.fromkeys(mine)) == ["forward", "replay", "backward"]


@pytest.mark.parametrize("way", WAYS)
def test_tracing_changes_no_bits(way: str) -> None:
    found = []
    for on in (False, True):
        model = streamed(way)
        opt = adamw(model)
        with mt.trace(model) if on else contextlib.nullcontext():
            for _ in range(3):
                step(model, opt, micro=2)
        found.append({k: v.clone() for k, v in model.state_dict().items()})
    assert_same(*found)


@pytest.mark.parametrize("way", WAYS)
def test_progress_tells_another_thread_how_far_a_step_is(way: str) -> None:
    model, found = streamed(way), []
    opt = adamw(model)

    def ask(*_: Any) -> None:
        found.append(str(other.submit(t.progress).result()))

    def before(_: nn.Module, args: tuple[Tensor]) -> None:
        ask()
        args[0].register_hook(ask)

    model.layers[2].register_forward_pre_hook(before)
    with ThreadPoolExecutor(1) as other, mt.trace(model) as t:
        for _ in range(2):
            ask()
            step(model, opt, micro=2)
    assert found == ["forward 0/6", *["forward 3/6", "backward 3/6"] * 2] * 2
    assert t.progress() == (0, 0, 6)


def test_a_backward_that_raises_leaves_no_window_open() -> None:
    class Broken(Net):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](self.first(x)))
            return self.last(Breaks.apply(x) if self.broken else x).square().mean()

    model = streamed(model=Broken())
    with mt.trace(model) as t:
        with pytest.raises(RuntimeError, match="out of memory, so to say"):
            step(model)
        model.broken = False
        step(model)
    ours = list(dict.fromkeys((w[0].work, w[0].unit) for w in windows(t.slices())))
    names = ["first", "layers.0", "layers.1", "last"]
    assert ours == [("forward", n) for n in names] + [("backward", n) for n in reversed(names)]


# ---------------------------------------------------------------- steps

def test_a_step_goes_from_one_step_of_the_optimizer_to_the_next() -> None:
    t, _ = traced(steps=4, micro=2)
    reports = t.steps()
    assert len(reports) == 4
    assert t.steps(2) == reports[-2:]
    times = list(t._between_steps().values())
    for report, a, b in zip(reports, times, times[1:]):
        assert report.seconds == pytest.approx((b - a) * 1e-9)
        assert {s.unit for s in t.slices() if s.work == "forward" and a <= s.begin < b} == set(ORDER)
    for report, begin in zip(reports[1:], times[1:]):    # the step before's updates run in it
        assert len([s for s in t.slices() if s.work == "update" and s.begin >= begin]) >= len(ORDER)
        assert report.busy["host update"] > 0


@pytest.mark.parametrize("own", [True, False])
def test_torchs_own_optimizer_ends_steps_too_and_without_one_a_pass(own: bool) -> None:
    model = streamed()
    opt = torch.optim.SGD(model.parameters(), lr=0.1) if own else None
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with mt.trace(model) as t:
        for _ in range(3):
            step(model, opt, 1 + own)
            other.step()
    assert len(t.steps()) == 3


def test_evaluation_is_a_step_of_its_own() -> None:
    model = streamed()
    opt = adamw(model)
    with mt.trace(model) as t:
        step(model, opt)
        with torch.no_grad():
            model(torch.ones(2, 8))
            model(torch.ones(2, 8))
        step(model, opt)
    works = [{s.work for s in t.slices() if s.lane == "compute" and a <= s.begin < b}
             for a, b in pairwise(list(t._between_steps().values()))]
    assert works == [{"forward", "loss", "backward"}, {"forward"}, {"forward"}, {"forward", "loss", "backward"}]


def test_last_step_is_the_last_finished_step_of_the_trace() -> None:
    model = streamed()
    opt = adamw(model)
    with mt.trace(model) as t:
        assert not mt.last_step(model).traced           # none is finished yet
        step(model, opt)
        step(model, opt)
        step(model, opt)
        mt.model.stream.runtime_of(model).drain()        # copies of the last step may be under way, which both count
        report = mt.last_step(model)
        assert report.traced and report == t.steps()[-1]
    step(model, opt)
    mt.model.stream.runtime_of(model).drain()
    after = mt.last_step(model)
    assert not after.traced and after.bound == "" and after.busy["host update"] > 0


def test_idle_and_busy_make_the_step() -> None:
    t, _ = traced(delay_us=500)
    for report in t.steps():
        assert report.busy["compute"] + sum(report.idle.values()) == pytest.approx(report.seconds, rel=1e-6)
        assert 0 <= report.between_steps <= sum(report.idle.values()) + 1e-9


# ---------------------------------------------------------------- what binds

def test_slow_layers_are_bound_by_compute() -> None:
    model = streamed()
    for layer in model.layers:
        layer.nap = 0.02
    opt = adamw(model)
    with mt.trace(model) as t:
        for _ in range(3):
            step(model, opt)
    report = t.steps()[-1]
    assert report.bound == "compute"
    assert report.busy["compute"] >= LAYERS * 0.02
    assert report.why.startswith("bound by compute: busy ")


def test_slow_fetches_are_bound_by_copies_to_the_device() -> None:
    """Evaluation: nothing but fetches goes through a delayed queue."""
    model = streamed(delay_us=60_000)
    with mt.trace(model) as t, torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 8))
    report = t.steps()[-1]
    assert report.bound == "h2d"
    assert max(report.idle, key=lambda k: report.idle[k]) == "h2d"
    assert "compute stood still" in report.why and "for copies to the device" in report.why


def test_slow_hand_overs_are_bound_by_copies_to_the_host() -> None:
    """Four gradients a layer, each measured and copied: eight naps to the one or two of its fetches."""
    t, _ = traced(delay_us=5_000)
    assert t.steps()[-1].bound == "d2h"


def test_large_updates_are_bound_by_the_host() -> None:
    """A parameter that no forward reads, with a gradient of the user's: nothing but the update touches it. A busy
    machine may keep Python waiting for longer than the update takes; of the lanes it is the busiest all the same."""
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(4, 4)
            self.large = nn.Parameter(torch.zeros(16_000_000))

        def forward(self, x: Tensor) -> Tensor:
            return self.small(x).square().mean()

    model = streamed(model=Spare())
    opt = adamw(model)
    grad = torch.full((16_000_000,), 1e-3)
    with mt.trace(model) as t:
        for _ in range(5):
            model(torch.ones(2, 4)).backward()
            model.large.grad = grad
            opt.step()
    bounds = [max(r.busy, key=lambda lane: r.busy[lane]) for r in t.steps()[1:]]
    assert bounds.count("host update") >= 2, [r.why for r in t.steps()]


MS = 1_000_000


def lanes_of(*slices: tuple[str, str, str, int, int]) -> dict[str, list[Slice]]:
    return by_lane([Slice(lane, work, unit, 1000, a * MS, b * MS) for lane, work, unit, a, b in slices])


HANDS_OVER = [("compute", "backward", "b", 0, 10), ("hand-over", "wait", "c", 12, 40), ("compute", "backward", "a", 41, 80)]
GAPS: dict[str, tuple[int, dict[str, float], list[tuple[str, str, str, int, int]]]] = {
    "a gap is the fetch's that ended it": (100, {"h2d": 40, "host": 10}, [
        ("h2d", "fetch", "a", 10, 30), ("h2d", "fetch", "b", 30, 60), ("compute", "forward", "a", 30, 40),
        ("compute", "forward", "b", 60, 100)]),
    # Gradients land until 20, updates of a and b run until 50, b is copied until 60.
    "before the fetch it is the updates it waited for": (100, {"d2h": 10, "host update": 30, "h2d": 10, "host": 2}, [
        ("compute", "backward", "a", 0, 10), ("d2h", "offload", "a", 10, 20), ("host update", "wait", "", 10, 20),
        ("host update", "update", "a", 20, 30), ("host update", "update", "b", 30, 50), ("h2d", "fetch", "b", 50, 60),
        ("compute", "forward", "b", 62, 100)]),
    "a unit that lives on the device waits for its update there": (100, {"device update": 30, "d2h": 5, "host": 6}, [
        ("compute", "backward", "a", 0, 10), ("d2h", "offload", "a", 10, 15), ("device update", "update", "a", 20, 40),
        ("device update", "update", "b", 40, 60), ("compute", "forward", "a", 40, 50), ("compute", "forward", "b", 61, 100)]),
    "states that arrive late are what an update on the device waits for": (100, {"device update": 10, "through": 20}, [
        ("compute", "backward", "a", 0, 10), ("through", "fetch", "a", 5, 30), ("device update", "update", "a", 30, 40),
        ("compute", "forward", "a", 40, 100)]),
    "a fetch that stood in line is the line's": (100, {"h2d": 40}, [
        ("h2d", "fetch", "a", 0, 20), ("h2d", "fetch", "b", 20, 40), ("compute", "forward", "b", 40, 100)]),
    # Its first piece is copied while the second is read.
    "weights that come from the disk are the disk's": (100, {"h2d": 10, "disk": 35}, [
        ("disk", "read", "b", 0, 20), ("h2d", "fetch", "b", 20, 25), ("disk", "read", "b", 20, 40),
        ("h2d", "fetch", "b", 40, 45), ("compute", "forward", "b", 45, 100)]),
    "another unit's read is not": (100, {"h2d": 5, "host": 20}, [
        ("disk", "read", "c", 0, 20), ("h2d", "fetch", "b", 20, 25), ("compute", "forward", "b", 25, 100)]),
    "before backward it may be gradients that leave": (100, {"d2h": 20}, [
        ("compute", "backward", "c", 0, 10), ("d2h", "offload", "d", 5, 30), ("compute", "backward", "b", 30, 100)]),
    # Python hands b's gradients over from 10 on, and waits until c's update is over; then it launches a.
    "a wait for a buffer is the update's that gave it back": (80, {"host update": 25, "d2h": 3, "host": 3}, [
        *HANDS_OVER, ("d2h", "offload", "c", 0, 15), ("host update", "update", "c", 15, 40)]),
    "one through the device": (80, {"through": 28, "host": 3}, [*HANDS_OVER, ("through", "update", "c", 10, 39)]),
    "a fetch behind it": (80, {"host update": 28, "h2d": 1, "host": 2}, [
        *HANDS_OVER, ("h2d", "fetch", "a", 38, 41), ("host update", "update", "c", 10, 40)]),
    "a wait for an update from disk is that of which there was more": (80, {"disk": 26, "disk update": 2, "host": 3}, [
        *HANDS_OVER, ("disk", "read", "c", 10, 20), ("disk", "write", "c", 20, 38), ("disk update", "update", "c", 30, 40)]),
    "more of the update": (80, {"disk update": 20, "disk": 8, "host": 3}, [
        *HANDS_OVER, ("disk", "read", "c", 10, 20), ("disk update", "update", "c", 20, 40)]),
    "a wait for an update on the device is for what comes before": (80, {"device update": 19, "d2h": 9, "host": 3}, [
        *HANDS_OVER, ("device update", "update", "d", 10, 30), ("d2h", "offload", "c", 30, 39),
        ("device update", "update", "c", 41, 50)]),
    "another unit's update": (80, {"host update": 28, "host": 3}, [*HANDS_OVER, ("host update", "update", "d", 10, 39)]),
    "a wait for earlier gradients is their sums": (80, {"host sum": 24, "d2h": 6}, [
        ("compute", "backward", "b", 0, 10), ("hand-over", "wait", "", 10, 40), ("d2h", "offload", "c", 5, 16),
        ("host sum", "add", "c", 16, 39), ("compute", "backward", "a", 40, 80)]),
    # Compute is behind: a's backward waits for its weights while Python hands its gradients over already.
    "a window that was launched before a hand-over does not wait for it": (80, {"h2d": 20}, [
        ("compute", "backward", "b", 0, 10), ("h2d", "fetch", "a", 10, 30), ("hand-over", "wait", "c", 5, 60),
        ("host update", "update", "c", 20, 60), ("compute", "backward", "a", 30, 80)]),
    "a wait between the last window and the step's end counts": (32, {"host update": 20, "host": 2}, [
        ("compute", "backward", "b", 0, 10), ("hand-over", "wait", "c", 10, 30), ("host update", "update", "c", 10, 30)]),
    "fetches of other units and of other times are not blamed": (100, {"host": 35}, [
        ("compute", "forward", "a", 0, 10), ("h2d", "fetch", "c", 10, 20), ("h2d", "fetch", "b", 0, 9),
        ("compute", "forward", "b", 25, 80)]),
}


@pytest.mark.parametrize("case", GAPS)
def test_each_gap_of_compute_has_its_cause(case: str) -> None:
    until, causes, slices = GAPS[case]
    found = measure(lanes_of(*slices), 0, until * MS, {"demand_fetches": 0, "await_ns": 0}, 0).idle
    assert {k: round(v * 1e3, 6) for k, v in found.items()} == causes


def overlap(slices: list[Slice], gaps: list[tuple[int, int]]) -> float:
    return sum(max(0, min(s.end, b) - max(s.begin, a)) for s in slices for a, b in gaps) * 1e-9


def assert_no_wait_is_the_hosts_own(t: mt.Trace) -> set[str]:
    """Compute's gaps less the time in which Python waited is the most that may be its own. Returns all causes."""
    lanes, marks, causes = by_lane(t.slices()), list(t._between_steps().values()), set()
    assert lanes["hand-over"] and all(s.work == "wait" for s in lanes["hand-over"])
    for report, a, b in zip(t.steps(), marks, marks[1:]):
        edges = [a, *(x for s in lanes["compute"] for x in (s.begin, s.end) if a <= s.begin and s.end <= b), b]
        gaps = list(zip(edges[::2], edges[1::2]))
        waited = overlap(lanes["hand-over"], gaps)
        assert report.idle.get("host", 0.0) <= overlap([Slice("", "", "", 0, a, b)], gaps) - waited + 1e-6
        causes |= {k for k, v in report.idle.items() if v > 0}
        assert "hand-over" not in report.busy and report.bound != "hand-over"
    return causes


@pytest.mark.parametrize("homes, one_of", [("ram", {"host update"}), ("through", {"through"}), ("vram", {"d2h"}),
                                           ("disk", {"disk", "disk update"})])
def test_python_that_waits_for_an_update_is_not_the_hosts_own_work(homes: str, one_of: set[str], tmp_path: Path) -> None:
    """One buffer for gradients that are kept nowhere: each hand-over waits for the update before."""
    torch.manual_seed(5)
    model = doors.stream(Net(), device="cpu", nvme=tmp_path if homes == "disk" else None,
                         plan={"homes": homes, "grads": "none", "lent": 1, "debug": {"delay_us": 2000, "seed": 1}})
    opt = mt.AdamW(model.parameters(), lr=1e-2, in_backward=True)
    step(model, opt)
    with mt.trace(model) as t:
        for _ in range(2):
            step(model, opt)
    assert assert_no_wait_is_the_hosts_own(t) & one_of
    assert {s.unit for s in t.slices() if s.lane == "hand-over"} <= set(ORDER)


def test_python_that_waits_for_sums_is_not_the_hosts_own_work() -> None:
    """Gradients of further micro-batches go through two staging buffers."""
    t, _ = traced(micro=2, steps=2, before=1, delay_us=2000)
    assert assert_no_wait_is_the_hosts_own(t) & {"d2h", "host sum"}
    assert {s.unit for s in t.slices() if s.lane == "hand-over"} == {""}


def test_a_report_counts_what_lies_in_the_step() -> None:
    lanes = lanes_of(("compute", "forward", "a", 10, 60), ("h2d", "fetch", "a", -10, 10), ("h2d", "fetch", "b", 90, 120),
                     ("host update", "wait", "", 0, 30), ("host update", "update", "a", 30, 110))
    r = measure(lanes, 0, 100 * MS, {"demand_fetches": 1, "await_ns": 5 * MS}, 77)
    assert r.busy == pytest.approx({"compute": 0.05, "h2d": 0.02, "host update": 0.07})
    assert (r.fetches, r.h2d_bytes, r.demand_fetches, r.await_seconds, r.host_bytes) == (1, 1000, 1, 0.005, 77)
    assert r.bound == "host update"
    assert r.between_steps == pytest.approx(0.01)
    assert r.why == ("bound by the host update: busy 0.07 s of 0.1 s; compute was busy 0.05 s; "
                     "compute stood still 0.05 s, 0.04 s of it for the host's own work")


def test_a_report_prints_as_a_table() -> None:
    r = StepReport(1.0, 2_000_000_000, 0, 3, 0, 0.25, 5_000_000_000, {"compute": 0.5, "h2d": 0.75, "d2h": 0.0},
                   {"h2d": 0.4, "host": 0.1}, 0.05, True)
    lines = str(r).splitlines()
    assert lines[0] == ("bound by copies to the device: busy 0.75 s of 1 s; compute was busy 0.5 s; compute stood "
                        "still 0.5 s, 0.4 s of it for copies to the device")
    assert lines[5].split() == ["compute", "0.5", "50%"] and lines[6].split() == ["H2D", "0.75", "75%", "2"]
    assert len(lines) == 7 and "D2H" not in str(r)
    assert "<pre>" in r._repr_html_() and "75%" in r._repr_html_() and "copies to the device" in r._repr_html_()


# ---------------------------------------------------------------- files

def test_the_chrome_trace_is_valid_and_its_rows_do_not_overlap(tmp_path: Path) -> None:
    t, _ = traced(way="replay", micro=2, delay_us=100)
    t.chrome(tmp_path / "steps.json")
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    work = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"} and len(work) > 100
    for tid, name in names.items():
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == tid)
        assert row or name in ("hand-over", "device update", "through", "exchange", "gather", "disk", "disk update", "swap out", "swap back", "swap disk"), name
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(row)), name          # us; a float's last digits
        assert all(a[0] >= 0 and a[1] >= a[0] for a in row)
    fetch = next(e for e in work if e["name"] == "fetch layers.1")
    assert names[fetch["tid"]] == "h2d"
    assert fetch["args"]["bytes"] >= 4 * (4 * WIDTH * WIDTH + 3 * WIDTH)
    assert fetch["args"]["GB/s"] == pytest.approx(fetch["args"]["bytes"] / fetch["dur"] / 1000, abs=1e-3)
    assert [e["name"] for e in work if names[e["tid"]] == "step"] == ["step 0", "step 1", "step 2"]


def test_a_picture_is_written(tmp_path: Path) -> None:
    t, _ = traced(micro=2)
    t.picture(tmp_path / "steps.png")
    head = (tmp_path / "steps.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (1200, 400)
    t.picture(tmp_path / "steps.svg", steps=1)
    assert "<svg" in (tmp_path / "steps.svg").read_text()


def test_a_picture_without_matplotlib_or_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t, model = traced()
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(mt.MegatrainError, match="pip install matplotlib"):
        t.picture(tmp_path / "steps.png")
    with mt.trace(model) as t, pytest.raises(mt.MegatrainError, match="no step is finished"):
        t.picture(tmp_path / "steps.png")


# ---------------------------------------------------------------- the door

def test_a_trace_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(mt.MegatrainError, match="not streamed"), mt.trace(nn.Linear(2, 2)):
        pass
    model = streamed()
    with mt.trace(model):
        with pytest.raises(mt.MegatrainError, match="traced already"), mt.trace(model):
            pass
        step(model)
    with mt.trace(model) as t:           # again, afterwards
        step(model)
    assert len(t.steps()) == 1


def test_an_exception_ends_the_trace() -> None:
    model = streamed()
    with pytest.raises(ValueError, match="mine"), mt.trace(model) as t:
        step(model)
        raise ValueError("mine")
    assert mt.model.stream.runtime_of(model).trace is UNTRACED
    step(model)
    assert t.slices() == [] or all(s.work for s in t.slices())


def test_unstream_ends_the_trace() -> None:
    model = streamed()
    opt = adamw(model)
    with mt.trace(model) as t:
        step(model, opt)
        step(model, opt)
        mt.unstream(model)
        model(torch.ones(2, 8)).backward()
    assert len(t.steps()) == 2
