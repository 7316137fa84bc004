"""Steps for the walk of csrc/walk, written out by hand, and the tracks of a search."""
from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from megatrain_torch import _core
from megatrain_torch.base.modes import MODES
from megatrain_torch.plans import search
from megatrain_torch.plans.search import ROWS, Problem, Timing

HOST, DEVICE = ROWS["host update"], ROWS["device update"]
BY_WINDOW = {"d": ("forward_s", "backward_s", "forward_host_s", "backward_host_s"), "q": ("away", "spilled")}
BY_UNIT = {"d": ("update_s", "add_s", "disk_s", "read_s", "through_s", "exchange_s", "network_s", "lost_s", "gather_s",
                 "held_s", "spread_s"),
           "q": ("updated_on", "weights", "gradients", "visiting", "lowered", "raised")}
NUMBERS = {"stretch": 1.0, "parts": 1, "peers": 0.0, "on_link": False, "memory": 0.0, "memory_s": 0.0, "write": 1.0,
           "read": 1.0, "stagings": search.STAGINGS, "bays": search.BAYS, "ahead": search.AHEAD, "stay": search.STAY,
           "rest_s": search.NORM_S, "depth": search.OFFLOAD_DEPTH}


class Step(SimpleNamespace):
    """mt_walk's fields; what is left out is nothing."""

    def __init__(self, **asked: Any) -> None:
        found = NUMBERS | {"lent": ()} | asked
        for names, length in ((BY_WINDOW, len(asked["forward_s"])), (BY_UNIT, len(asked["weights"]))):
            for kind in names:
                found |= {name: array(kind, asked.get(name) or [0] * length) for name in names[kind]}
        for name in ("lent", "slots"):
            found[name] = array("q", found[name])
        super().__init__(**found)

    @property
    def shown(self) -> int:
        return min(self.micro, search.SHOWN_MICRO)


class Lists(NamedTuple):
    """For each window, units: `item[begin[w]:begin[w + 1]]`."""

    begin: array[int]
    item: array[int]

    @staticmethod
    def of(lists: Iterable[Sequence[int]]) -> Lists:
        lists = list(lists)
        ends = itertools.accumulate(map(len, lists), initial=0)
        return Lists(array("q", ends), array("q", itertools.chain.from_iterable(lists)))


def simulate(step: Step) -> Timing:
    return Timing.of(_core.walk(step, _core.schedule(step), math.inf), bool(step.memory))


class Track(NamedTuple):
    """A track's levels. Arrays by level."""

    away: int
    spilled: int
    least_s: float
    peaks: np.ndarray
    early: np.ndarray
    backward_s: np.ndarray
    coded: np.ndarray

    def modes(self, level: int) -> tuple[str, ...]:
        return tuple(MODES[i] for i in self.coded[level])

    def most(self, level: int, states: int) -> int:
        """Bytes at the peak, with so many of states that arrive."""
        return max(int(self.peaks[level]), states and states + int(self.early[level]))


def track_of(p: Problem, micro: int, track: int) -> Track:
    away, spilled, least_s, levels, modes = _core.search_track(p.arrays, p.micro_counts.index(micro), track)
    found = np.frombuffer(levels, [("peak", "q"), ("early", "q"), ("backward_s", "d")])
    return Track(away, spilled, least_s, found["peak"], found["early"], found["backward_s"],
                 np.frombuffer(modes, np.uint8).reshape(len(found), -1))


def tracks_of(p: Problem, micro: int) -> list[Track]:
    begin = p.micro_counts.index(micro)
    return [track_of(p, micro, track) for track in range(p.arrays.tracks[begin + 1] - p.arrays.tracks[begin])]
