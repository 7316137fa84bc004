"""The walk (csrc/walk/walk.h) against the engine's own timeline, and its door to Python; tests/c/test_walk.c has the rest.

A small model streams on the CPU device, whose queues are threads that dawdle. What each piece of work took is read from
the timeline and given to the walk, which is then to find the order and the length of the engine's own steps.
"""
from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
import torch
from kept import plain_step
from steps import HOST, Lists, Step, simulate
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.base.testing import engine_doors
from megatrain_torch.figures.timeline import Slice
from megatrain_torch.model.stream import runtime_of
from megatrain_torch.plans.search import ROWS

LAYERS, STEPS, NAP_S, DELAY_US = 8, 7, 0.005, 1200
NEAR_S = 0.01               # of what begins less than that apart in the walk, the engine's threads may take either first
LANES = ("host update", "h2d", "compute", "d2h", "host sum")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP_S)
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Piece(NamedTuple):
    """One piece of work: the unit, or the window of the same number."""

    lane: str
    of: int
    begin: float
    seconds: float


def steps_of_engine(micro: int) -> tuple[list[list[Piece]], list[float], list[int], list[int]]:
    """Pieces of each step but the first and the last, and its length; bytes of units and of slots."""
    torch.manual_seed(0)
    model = Net()
    with engine_doors(delay_us=DELAY_US, seed=1):
        mt.stream(model, device="cpu", plan={"activations": "replay", "slots": 2, "threads": 1})
    opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    rt = runtime_of(model)
    with mt.trace(model) as trace:
        for _ in range(STEPS):
            for _ in range(micro):
                model(torch.ones(2, 64)).backward()
            opt.step()
            opt.zero_grad()
        trace.finish()
        slices = trace.slices()
    units, slots = [rt.core.hi_bytes(u) for u in range(LAYERS)], [slot.nbytes for slot in rt.ring.slots]
    names = rt.unit_names
    mt.unstream(model)
    cuts = sorted(s.begin for s in slices if s.lane == "host update" and s.work == "update")[::LAYERS][1:]
    parts = [[s for s in slices if a <= s.begin < b] for a, b in pairwise(cuts)]
    return [pieces(part, names) for part in parts], [(b - a) * 1e-9 for a, b in pairwise(cuts)], units, slots


def pieces(slices: list[Slice], names: list[str]) -> list[Piece]:
    """A window's parts, before and behind its waits and around its replay, are one piece: it begins with the longest."""
    found: list[Piece] = []
    windows: list[list[Slice]] = []
    for s in sorted(slices, key=lambda s: s.begin):
        if s.lane != "compute" and s.work != "wait" and s.lane in LANES:
            found.append(Piece(s.lane, names.index(s.unit), s.begin * 1e-9, s.seconds))
        elif s.lane == "compute" and s.unit:
            back = s.work != "forward"
            if not windows or (windows[-1][0].unit, windows[-1][0].work != "forward") != (s.unit, back):
                windows.append([])
            windows[-1].append(s)
    if windows[-1][0].work == "forward":        # of the next step's first window, what is before its wait
        windows.pop()
    for parts in windows:
        longest = max(parts, key=lambda s: s.seconds)
        if longest.seconds > NAP_S / 2:         # this step's first window, behind its wait
            found.append(Piece("compute", names.index(longest.unit), longest.begin * 1e-9, sum(s.seconds for s in parts)))
    return found


def step_of(part: list[Piece], units: list[int], slots: list[int], micro: int) -> Step:
    """With what each piece took, or, of several of a unit, their mean; as bytes at a byte a nanosecond."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for piece in part:
        took[piece.lane, piece.of].append(piece.seconds)

    def mean(lane: str, which: slice = slice(None)) -> list[float]:
        return [statistics.fmean(took[lane, u][which]) for u in range(LAYERS)]

    def nanoseconds(seconds: list[float]) -> list[int]:
        return [round(s * 1e9) for s in seconds]

    own, none = Lists.of((u,) for u in range(LAYERS)), [0.0] * LAYERS
    return Step(forward_s=mean("compute", slice(0, None, 2)), backward_s=mean("compute", slice(1, None, 2)),
                forward_host_s=none, backward_host_s=none, units=own, again=own, leaving=own,
                updated_on=[HOST] * LAYERS, weights=units, gradients=nanoseconds(mean("d2h")),
                update_s=mean("host update"), add_s=mean("host sum") if micro > 1 else none, slots=slots, micro=micro, h2d=1e9, d2h=1e9, both=1e9,
                busy=1e9), nanoseconds(mean("h2d"))


def walked(step: Step, weights: list[int]) -> tuple[float, list[Piece]]:
    """By the schedule of the units' own bytes. Seconds, and pieces as they are in the engine's timeline."""
    schedule = _core.schedule(step)
    step.weights[:] = type(step.weights)("q", weights)
    seconds, *_, events = _core.walk(step, schedule, math.inf, True)
    rows = {row: name for name, row in ROWS.items()}
    return seconds, [Piece(rows[row], of, begin, end - begin) for row, of, begin, end in events if rows[row] in LANES]


def in_lanes(part: list[Piece]) -> dict[str, list[int]]:
    return {lane: [p.of for p in sorted(part, key=lambda p: p.begin) if p.lane == lane] for lane in LANES}


def begins(part: list[Piece]) -> dict[tuple[str, int, int], float]:
    """By lane, unit and how often it came before."""
    found: dict[tuple[str, int, int], float] = {}
    for p in sorted(part, key=lambda p: p.begin):
        found[p.lane, p.of, sum(key[:2] == (p.lane, p.of) for key in found)] = p.begin
    return found


def latest_inversion(ours: dict[tuple[str, int, int], float], theirs: dict[tuple[str, int, int], float]) -> float:
    """Of two pieces that the engine began in the other order: how far apart the walk has them, at the most."""
    pairs = [(a, b) if ours[a] < ours[b] else (b, a) for a, b in combinations(ours, 2)]
    return max((ours[b] - ours[a] for a, b in pairs if theirs[a] >= theirs[b]), default=0.0)


@pytest.mark.parametrize("micro", [1, 2])
def test_the_walk_finds_the_engines_order_and_the_length_of_its_steps(micro: int) -> None:
    """The engine's threads need some time to wake up, about 0.1 ms in each of a step's 30 to 60 hand-overs, and more
    where others keep the processors busy; that is in no piece. So its steps may be longer than the walk's, the
    nearest of five by a quarter, and shorter by what a mean of two copies hides. Half-way through a forward the engine has
    compute wait for the gradients of the micro-batch before, which the walk leaves out: here they are home by then."""
    parts, lengths, units, slots = steps_of_engine(micro)
    ratios, inversions = [], []
    for part, length in zip(parts, lengths):
        seconds, found = walked(*step_of(part, units, slots, micro))
        ratios.append(length / seconds)
        assert in_lanes(found) == in_lanes(part)
        inversions.append(latest_inversion(begins(found), begins(part)))
    assert statistics.median(ratios) > 0.95 and min(ratios) < 1.25, ratios
    # With micro-batches a unit's first and second hand-over take unlike times, of which the walk has the mean.
    assert micro > 1 or statistics.median(inversions) < NEAR_S, inversions


@pytest.mark.parametrize("change, says", [
    ({"forward_s": [1.0]}, "backward_s: 2 elements, 1 are expected"), ({"weights": [1.0, 2.0]}, "float"),
    ({"units": Lists.of([(0,), (2,)])}, "units name unit 2 of 2"), ({"units": Lists.of([(0,)])}, "units: 2 elements"),
    ({"units": 3}, "begin, item"), ({"micro": 0}, "0 micro-batches"), ({"slots": [1, 1]}, "fit none of the 2 slots")])
def test_a_step_that_makes_no_sense_is_refused(change: dict, says: str) -> None:
    with pytest.raises((mt.MegatrainError, TypeError, ValueError), match=says):
        simulate(plain_step(**{"uses": [0, 1], "weights": [10, 20], "slots": [20, 20]} | change))


def test_a_schedule_that_is_none_is_refused() -> None:
    step = plain_step([0, 1], [10, 20], [20, 20])
    for schedule in (b"abc", _core.schedule(step)[:-60], b"\xff" * len(_core.schedule(step))):
        with pytest.raises(mt.MegatrainError, match="schedule"):
            _core.walk(step, schedule, math.inf)
