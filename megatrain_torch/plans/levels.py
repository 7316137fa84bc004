"""Levels: with the same layers' activations away from the device, ever more is kept on it."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..base.modes import KEEPS, LINKED
from .cost import Cost
from .keeping import EARLY, Keeping

Step = tuple[float, int, str]       # (seconds saved per byte, order, mode)
Change = tuple[tuple[int, str], ...]        # windows that keep more from a level on, and what


class Levels(NamedTuple):
    """What is kept from level to level more. Arrays by level.

    Attributes:
        changes: what differs from the level before, by window; of the first nothing.
        peaks: bytes of activations and work. early: the same while states that arrive are on the
            device.
        backward_s: seconds of a backward. before_s: [level, window] of them, in the windows before;
            with one more, of all.
    """

    changes: list[Change]
    peaks: np.ndarray
    early: np.ndarray
    backward_s: np.ndarray
    before_s: np.ndarray


class Ladder:
    """Makes the levels of a number of micro-batches. costs: [window]."""

    def __init__(self, keeping: Keeping, costs: list[Cost]) -> None:
        self.keeping, self.costs = keeping, costs
        self.hulls: dict[tuple[object, ...], list[Step]] = {}
        self.betweens: dict[tuple[object, ...], list[str]] = {}

    def first(self, modes: Sequence[str]) -> tuple[int, int]:
        """(peak, early) of the level that keeps least, as Levels has them."""
        found = self._levels(modes, [()])
        return int(found.peaks[0]), int(found.early[0])

    def levels(self, modes: Sequence[str], free: bool, fixed: dict[int, str], pairs: dict[int, int]
               ) -> Levels:
        """modes: of the first. free: windows that are not fixed may keep more. pairs: of these,
        those that may be linked."""
        return self._levels(modes, [(), *(self._changes(modes, fixed, pairs) if free else ())])

    def _levels(self, modes: Sequence[str], changes: list[Change]) -> Levels:
        """Of each window and level, the number of the change that it has by then; then its bytes
        and seconds."""
        n = len(modes)
        has = np.zeros((len(changes), n), dtype=np.int64)
        has[0], kinds = range(n), list(zip(self.costs, modes))
        for level, change in enumerate(changes):
            for w, mode in change:
                has[level, w] = len(kinds)
                kinds.append((self.costs[w], mode))
        has = np.maximum.accumulate(has, axis=0)
        kept = np.array([c.kept[m] for c, m in kinds])[has]
        kept *= [w.learns for w in self.keeping.shape.windows]
        work = np.array([c.work[m] for c, m in kinds])[has]     # links of later levels make none
        work += np.array(self.keeping.coming(self.costs, modes)) + np.array(self.keeping.flying)
        seconds = np.array([c.backward_s[m] for c, m in kinds])[has]
        early = kept[:, :EARLY].sum(axis=1) + work[:, :EARLY].max(axis=1)
        before = np.zeros((len(changes), n + 1))
        np.cumsum(seconds, axis=1, out=before[:, 1:])
        return Levels(changes, self._rising((np.cumsum(kept, axis=1) + work).max(axis=1)),
                      self._rising(early), seconds.sum(axis=1), before)

    def _rising(self, totals: np.ndarray) -> np.ndarray:
        """Bytes with what torch's allocator holds beyond them; of a level no less than of those
        before it."""
        return np.maximum.accumulate(np.maximum(self.keeping.with_cache(totals), 0))

    def _changes(self, modes: Sequence[str], fixed: dict[int, str], pairs: dict[int, int]
                 ) -> Iterator[Change]:
        """From keeping least to keeping most, what saves most time per byte first, last windows
        first: they are needed again soonest, so keeping theirs hardly raises the peak. Of a pair,
        the second is linked once the first keeps attention's output."""
        modes, costs = list(modes), self.costs
        spared = {a: costs[b].backward_s["replay"] - costs[b].backward_s[LINKED]
                  for a, b in pairs.items()}
        begins = dict.fromkeys(pairs.values(), LINKED)
        steps = [(-gain, -w, order, mode) for w, c in enumerate(costs) if w not in fixed
                 for gain, order, mode in self._hull(c, begins.get(w), spared.get(w, 0.0))]
        for _, minus_w, _, mode in sorted(steps):
            w = -minus_w
            for step in (*self._between(costs[w], modes[w], mode), mode):
                modes[w], change = step, ((w, step),)
                if w in pairs and modes[pairs[w]] == "replay":
                    modes[pairs[w]], change = LINKED, (*change, (pairs[w], LINKED))
                yield change

    def _hull(self, cost: Cost, *how: object) -> list[Step]:
        """As hull; layers that cost the same share a Cost."""
        key = id(cost), *how
        if key not in self.hulls:
            self.hulls[key] = hull(cost, *how)
        return self.hulls[key]

    def _between(self, cost: Cost, *ends: str) -> list[str]:
        key = id(cost), *ends
        if key not in self.betweens:
            self.betweens[key] = between(cost, *ends)
        return self.betweens[key]


def hull(cost: Cost, begin: str | None = None, spared: float = 0.0) -> list[Step]:
    """Steps from keeping least, or from `begin`, to keeping more, each less rewarding than the one
    before; a mode that another line passes below is left out. spared: seconds of another window, by
    the first step."""
    points = sorted((cost.kept[m], cost.backward_s[m], m) for m in cost.kept if m in KEEPS)
    steps, at = [], points[0]
    if begin is not None:
        at = cost.kept[begin], cost.backward_s[begin], begin
    while later := [p for p in points if p[0] > at[0] and p[1] < at[1]]:
        best = max(later, key=lambda p: ((at[1] - p[1] + spared) / (p[0] - at[0]), p[0]))
        steps.append(((at[1] - best[1] + spared) / (best[0] - at[0]), len(steps), best[2]))
        at, spared = best, 0.0
    return steps


def between(cost: Cost, low: str, high: str) -> list[str]:
    """Modes that a step passes over: for the last bytes that are left."""
    inside = [m for m in cost.kept if m in KEEPS and cost.kept[low] < cost.kept[m] < cost.kept[high]
              and cost.backward_s[m] < cost.backward_s[low]]
    return sorted(inside, key=lambda m: cost.kept[m])
