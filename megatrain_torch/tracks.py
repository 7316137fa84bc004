"""Tracks: layers keep something in host memory or on disk, and ever more on the device; which of them fit."""
from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Levels(NamedTuple):
    """Modes of all windows, each keeping more than the one before; bytes of activations and work at the peak of each,
    and seconds of backward. early: as peaks, while states that arrive are on the device."""

    modes: list[tuple[str, ...]]
    peaks: list[int]
    backward_s: list[float]
    early: list[int]


@dataclass
class Track:
    """The same layers keep the same in host memory; on the device, more is kept from level to level.

    Attributes:
        away: bytes in host memory. out: those that cross the bus, each way: what leaves last does not. spilled: bytes
            on disk; spill_s: seconds in which they are written and read.
        make: the levels, or, with True, the first alone; each is asked once, where it matters.
    """

    away: int
    out: int
    spilled: int
    spill_s: float
    make: Callable[[bool], Levels]

    @functools.cached_property
    def first(self) -> Levels:
        """The one that keeps least."""
        return self.make(True)

    @functools.cached_property
    def levels(self) -> Levels:
        return self.make(False)

    def most(self, level: int, visiting: int) -> int:
        """Bytes at the peak, with so many of states that arrive."""
        of = self.levels if level else self.first
        return max(of.peaks[level], visiting and visiting + of.early[level])

    def level(self, room: int, visiting: int) -> int:
        """The last that fits into so many bytes, of which the first is known to."""
        fits = bisect.bisect_right(self.levels.peaks, room)
        return (min(fits, bisect.bisect_right(self.levels.early, room - visiting)) if visiting else fits) - 1


class Fitting(NamedTuple):
    """Tracks that fit, each at its highest level; the arrays have an element for each. tops: bytes on the device."""

    tracks: list[Track]
    levels: list[int]
    backward_s: np.ndarray
    tops: np.ndarray
    out: np.ndarray
    spilled: np.ndarray
    spill_s: np.ndarray


class Tracks(list[Track]):
    """All of a number of micro-batches: the first with nothing in host memory, unless that is asked for.

    A search asks thousands of times which of some hundred fit: arrays answer.
    """

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        """[away, out, spilled; track]"""
        return np.array([(t.away, t.out, t.spilled) for t in self], dtype=np.int64).T

    @functools.cached_property
    def _spill_s(self) -> np.ndarray:
        return np.array([t.spill_s for t in self])

    @functools.cached_property
    def _first(self) -> np.ndarray:
        """[peak, early; track] of first levels; -1 where nobody asked."""
        return np.full((2, len(self)), -1, dtype=np.int64)

    def least(self, at: np.ndarray, visiting: int) -> np.ndarray:
        """Bytes on the device of these tracks' first levels, with so many of states that arrive."""
        for i in at[self._first[0, at] < 0]:
            self._first[:, i] = self[i].first.peaks[0], self[i].first.early[0]
        peaks, early = self._first[:, at]
        return np.maximum(peaks, visiting + early) if visiting else peaks

    def within(self, room: int, host: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tracks that take no more of the disk, and of host memory; and their bytes there."""
        away, _, spilled = self._bytes
        at = np.flatnonzero(spilled <= room if host is None else (spilled <= room) & (away <= host))
        return at, away[at]

    def that_fit(self, vram: int, host: int, room: int, visiting: int) -> np.ndarray:
        """Which of them do, at their first level, into so many bytes of each memory. room: of the disk."""
        if vram < 0 or host < 0:
            return np.arange(0)
        at, _ = self.within(room, host)
        return at[self.least(at, visiting) <= vram]

    def fitting(self, vram: int, host: int, room: int, visiting: int) -> Fitting:
        """Those that do, in their order; with something in host memory, or on disk, only where that leaves less to
        compute again than all before; none behind one that keeps all on the device."""
        at, levels, times, tops, best = [], [], [], [], math.inf
        for i in self.that_fit(vram, host, room, visiting).tolist():
            track = self[i]
            level = track.level(vram, visiting)
            seconds = track.levels.backward_s[level]
            if seconds >= best:
                continue
            at.append(i)
            levels.append(level)
            times.append(seconds)
            tops.append(track.most(level, visiting) if visiting else track.levels.peaks[level])
            if track.away == 0:
                best = seconds
                if best == track.levels.backward_s[-1]:
                    break
        _, out, spilled = self._bytes[:, at]
        return Fitting([self[i] for i in at], levels, np.array(times), np.array(tops), out, spilled, self._spill_s[at])
