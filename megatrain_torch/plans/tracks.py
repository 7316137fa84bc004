"""Tracks: layers keep something in host memory or on disk, and ever more on the device; which of them fit."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Levels(NamedTuple):
    """Modes of all windows, each keeping more than the one before; bytes of activations and work at the peak of each,
    and seconds of backward. early: as peaks, while states that arrive are on the device. Arrays but for the modes."""

    modes: list[tuple[str, ...]]
    peaks: np.ndarray
    backward_s: np.ndarray
    early: np.ndarray


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
        return int(max(of.peaks[level], visiting and visiting + of.early[level]))

    def tops(self, level: np.ndarray, visiting: np.ndarray) -> np.ndarray:
        """The same, of several."""
        peaks, early = self.levels.peaks[level], self.levels.early[level]
        return np.where(visiting > 0, np.maximum(peaks, visiting + early), peaks)

    def level(self, room: np.ndarray, visiting: np.ndarray) -> np.ndarray:
        """The last that fits into so many bytes, of which the first is known to. One of each, or as many."""
        found = np.searchsorted(self.levels.peaks, room, side="right")
        early = np.searchsorted(self.levels.early, room - visiting, side="right")
        return np.where(visiting > 0, np.minimum(found, early), found) - 1


class Fitting(NamedTuple):
    """What fits, in the order of tracks: for each, the place that was asked about, the track's number, and its highest
    level. tops: bytes on the device."""

    at: np.ndarray
    tracks: np.ndarray
    levels: np.ndarray
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

    def fitting(self, vram: np.ndarray, host: np.ndarray, room: np.ndarray, visiting: np.ndarray) -> Fitting:
        """Those that do, for each of some places; with something in host memory, or on disk, only where that leaves
        less to compute again than all before; none behind one that keeps all on the device."""
        best, going = np.full(len(vram), math.inf), (vram >= 0) & (host >= 0)
        parts = []
        for t, track in enumerate(self):
            at = np.flatnonzero(going & (host >= track.away) & (room >= track.spilled))
            at = at[self._least_of(t, visiting[at]) <= vram[at]] if len(at) else at
            if not len(at):
                continue
            level = track.level(vram[at], visiting[at])
            seconds = track.levels.backward_s[level]
            less = seconds < best[at]
            at, level, seconds = at[less], level[less], seconds[less]
            parts.append((at, np.full(len(at), t), level, seconds, track.tops(level, visiting[at])))
            if track.away == 0:
                best[at] = seconds
                going[at[seconds == track.levels.backward_s[-1]]] = False
        at, tracks, levels, seconds, tops = map(np.concatenate, zip(*parts)) if parts else [np.arange(0)] * 5
        _, out, spilled = self._bytes[:, tracks]
        return Fitting(at, tracks, levels, seconds, tops, out, spilled, self._spill_s[tracks])

    def _least_of(self, track: int, visiting: np.ndarray) -> np.ndarray:
        """As least(), of one track with different states."""
        self.least(np.array([track]), 0)
        peak, early = self._first[:, track]
        return np.where(visiting > 0, np.maximum(peak, visiting + early), peak)
