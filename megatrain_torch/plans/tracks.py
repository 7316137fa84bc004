"""Tracks: layers keep something away from the device, and ever more on it; which of them fit."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .levels import Levels

NONE_AWAY = 1 << 30         # a window behind all others


@dataclass
class Track:
    """The same layers keep the same away from the device; on it, more is kept from level to level.

    Attributes:
        base: modes of the first level.
        away: bytes in host memory. out: those that cross the bus, each way: what leaves last does
            not. begins: the first window that keeps something away.
        spilled: bytes on disk; spill_s: seconds in which they are written and read.
        forward_wait_s, backward_wait_s: in which compute at least stands still for what is away.
        least_s: of a backward where all that may is kept, without these.
        make: the levels; make_first: (peak, early) of the first alone. Each is asked once, where it
            matters.
    """

    base: tuple[str, ...]
    away: int
    out: int
    begins: int
    spilled: int
    spill_s: float
    forward_wait_s: float
    backward_wait_s: float
    least_s: float
    make: Callable[[], Levels]
    make_first: Callable[[], tuple[int, int]]

    @functools.cached_property
    def first(self) -> tuple[int, int]:
        """Bytes of the level that keeps least: at the peak, and while states that arrive are on the
        device."""
        return self.make_first()

    @functools.cached_property
    def levels(self) -> Levels:
        return self.make()

    def modes(self, level: int) -> tuple[str, ...]:
        """Of all windows."""
        found = list(self.base)
        for change in self.levels.changes[:level + 1] if level else ():
            for w, mode in change:
                found[w] = mode
        return tuple(found)

    def most(self, level: int, visiting: int) -> int:
        """Bytes at the peak, with so many of states that arrive."""
        peak, early = self.first
        if level:
            peak, early = int(self.levels.peaks[level]), int(self.levels.early[level])
        return max(peak, visiting and visiting + early)

    def tops(self, level: np.ndarray, visiting: np.ndarray) -> np.ndarray:
        """The same, of several."""
        peaks, early = self.levels.peaks[level], self.levels.early[level]
        return np.where(visiting > 0, np.maximum(peaks, visiting + early), peaks)

    def level(self, room: np.ndarray, visiting: np.ndarray) -> np.ndarray:
        """The last that fits into so many bytes, of which the first is known to. One of each, or as
        many."""
        found = np.searchsorted(self.levels.peaks, room, side="right")
        early = np.searchsorted(self.levels.early, room - visiting, side="right")
        return np.where(visiting > 0, np.minimum(found, early), found) - 1


class Fitting(NamedTuple):
    """What fits, in the order of tracks: for each, the place that was asked about, the track's
    number, and its highest level. tops: bytes on the device. low_s, lowest_s: seconds of backward
    that remain in the place's window, and where something comes back in that one's too."""

    at: np.ndarray
    tracks: np.ndarray
    levels: np.ndarray
    backward_s: np.ndarray
    tops: np.ndarray
    low_s: np.ndarray
    lowest_s: np.ndarray


class Tracks(list[Track]):
    """All of a number of micro-batches: the first with nothing away, unless that is asked for.

    A search asks thousands of times which of some hundred fit: arrays answer.
    """

    @functools.cached_property
    def bytes(self) -> np.ndarray:
        """[away, out, spilled, begins; track]"""
        return np.array([(t.away, t.out, t.spilled, t.begins) for t in self], dtype=np.int64).T

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """[spill_s, forward_wait_s, backward_wait_s, least_s; track]"""
        return np.array([(t.spill_s, t.forward_wait_s, t.backward_wait_s, t.least_s)
                         for t in self]).T

    def least_s(self) -> np.ndarray:
        """By track, seconds of compute in a backward and of what it waits for, in both passes."""
        _, forward_wait_s, backward_wait_s, least_s = self.seconds
        return forward_wait_s + backward_wait_s + least_s

    @functools.cached_property
    def _first(self) -> np.ndarray:
        """[peak, early; track] of first levels; -1 where nobody asked."""
        return np.full((2, len(self)), -1, dtype=np.int64)

    def least(self, at: np.ndarray, visiting: int) -> np.ndarray:
        """Bytes on the device of these tracks' first levels, with so many of states that arrive."""
        for i in at[self._first[0, at] < 0]:
            self._first[:, i] = self[i].first
        peaks, early = self._first[:, at]
        return np.maximum(peaks, visiting + early) if visiting else peaks

    def within(self, room: int, host: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tracks that take no more of the disk, and of host memory; and their bytes there."""
        away, _, spilled, _ = self.bytes
        at = np.flatnonzero(spilled <= room if host is None else (spilled <= room) & (away <= host))
        return at, away[at]

    def that_fit(self, vram: int, host: int, room: int, visiting: int) -> np.ndarray:
        """Which of them do, at their first level, into so many bytes of each memory. room: of the
        disk."""
        if vram < 0 or host < 0:
            return np.arange(0)
        at, _ = self.within(room, host)
        return at[self.least(at, visiting) <= vram]

    def fitting(self, vram: np.ndarray, host: np.ndarray, room: np.ndarray, visiting: np.ndarray,
                low: np.ndarray, than: float) -> Fitting:
        """Those that do, for each of some places; with something away only where that leaves less
        to compute again than all before; none behind one that keeps all on the device. low: the
        first window whose weights come in backward. than: seconds, as least_s has them; what has
        something away and takes more is left out."""
        best, going = np.full(len(vram), math.inf), (vram >= 0) & (host >= 0)
        parts, away = [], self.bytes[0]
        for t in np.flatnonzero((self.least_s() <= than) | (away == 0)).tolist():
            track = self[t]
            at = np.flatnonzero(going & (host >= track.away) & (room >= track.spilled))
            at = at[self._least_of(track, visiting[at]) <= vram[at]] if len(at) else at
            if not len(at):
                continue
            level = track.level(vram[at], visiting[at])
            seconds = track.levels.backward_s[level]
            less = seconds < best[at]
            at, level, seconds = at[less], level[less], seconds[less]
            before, lowest = track.levels.before_s, np.minimum(low[at], track.begins)
            parts.append((at, np.full(len(at), t), level, seconds, track.tops(level, visiting[at]),
                          before[level, low[at] + 1], before[level, lowest + 1]))
            if track.away == 0:
                best[at] = seconds
                going[at[seconds == track.levels.backward_s[-1]]] = False
        return Fitting(*map(np.concatenate, zip(*parts)) if parts else [np.arange(0)] * 7)

    def _least_of(self, track: Track, visiting: np.ndarray) -> np.ndarray:
        """As least(), of one track with different states."""
        peak, early = track.first
        return np.where(visiting > 0, np.maximum(peak, visiting + early), peak)
