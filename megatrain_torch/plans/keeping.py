"""What windows keep between forward and backward: where its bytes wait, the peak they make."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ..base.modes import DISK, LINKED, read
from ..store.disk import BAYS
from ..store.planes import AHEAD, STAY
from .cost import CACHE_SHARE, OFFLOAD_DEPTH, Cost, cost_of
from .machine import Machine
from .shapes import Shape
from .uses import Uses
from .wishes import Wishes

# Units, first in the forward, whose states may arrive: what it waits for first.
GUESTS = 2
# Windows whose activations may be alive while those states are on the device.
EARLY = max(GUESTS + AHEAD + 1, STAY)

Bytes = TypeVar("Bytes", int, np.ndarray)


class Keeping:
    """Of one model on a machine.

    Attributes:
        depth: units whose gradients may be on their way from the device. flying: by window, bytes
            of gradients that are on the device while its backward runs.
    """

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes, uses: Uses) -> None:
        self.shape, self.machine, self.wishes, self.uses = shape, machine, wishes, uses
        self.depth = depth_of(wishes)
        self.flying = [sum(self._leaving_bytes(u, at) for u, w in uses.first.items()
                           if w - self.depth <= at <= uses.last[u])
                       for at in range(len(shape.windows))]
        self.known: dict[int, list[Cost]] = {}

    def _leaving_bytes(self, unit: int, at: int) -> int:
        """Of a unit's gradients at window `at`, until they have left. A fused head's lie in the
        memory of their fp32 sums, which are part of its own window's work."""
        own, share = self.uses.first[unit], 1
        if self.wishes.fused and self.shape.windows[own].kind == "head":
            share = 2 if at != own else 0
        return self.shape.units[unit].gradients * share

    def costs(self, micro: int) -> list[Cost]:
        """[window] of one of so many micro-batches; windows of equal shape share a Cost."""
        if micro not in self.known:
            tokens, seq, fused = self.wishes.tokens // micro, self.wishes.seq, self.wishes.fused
            alike = {w.shape: cost_of(w, self.machine, tokens, seq, fused)
                     for w in {w.shape: w for w in self.shape.windows}.values()}
            self.known[micro] = [alike[w.shape] for w in self.shape.windows]
        return self.known[micro]

    # ---- away from the device ----

    def away(self, costs: list[Cost], modes: Sequence[str]) -> list[int]:
        """By window, bytes that wait in host memory, or on disk, between forward and backward."""
        return [c.away.get(mode, 0) * w.learns
                for c, mode, w in zip(costs, modes, self.shape.windows)]

    def spills(self, costs: list[Cost], modes: Sequence[str]) -> dict[int, int]:
        """By window that keeps something on disk, its bytes."""
        return spills(self.away(costs, modes), modes)

    def on_host(self, costs: list[Cost], modes: Sequence[str]) -> int:
        """Bytes of activations in host memory, with the bays that carry those on disk."""
        away = self.away(costs, modes)
        return on_host(away, spills(away, modes))

    # ---- on the device ----

    def peak(self, costs: list[Cost], modes: Sequence[str]) -> tuple[int, int, int]:
        """(activations, work, gradients under way) in bytes where their sum is largest in a
        backward."""
        kept, best = 0, (0, 0, 0)
        for cost, mode, coming, window, flying in zip(
                costs, modes, self.coming(costs, modes), self.shape.windows, self.flying):
            kept += cost.kept[mode] * window.learns
            here = (kept, cost.work[mode] + coming, flying)
            if sum(here) > sum(best):
                best = here
        return best

    def coming(self, costs: list[Cost], modes: Sequence[str]) -> list[int]:
        """By window, bytes beside its work, for links: a linked window's own input is made from
        what the layer before keeps, which has come back with its own; both come while the window
        behind it runs."""
        found, away = [0] * len(costs), self.away(costs, modes)
        for w, mode in enumerate(modes):
            if read(mode).keep == LINKED:
                found[w] += away[w - 1]
                if w + 1 < len(costs):
                    found[w + 1] += away[w]
        return found

    def early_bytes(self, costs: list[Cost], modes: Sequence[str]) -> int:
        """Of activations, work and gradients while states that arrive are on the device, at the
        most."""
        first = list(zip(costs, modes, self.shape.windows))[:EARLY]
        kept = sum(cost.kept[mode] * window.learns for cost, mode, window in first)
        beside = zip(first, self.flying, self.coming(costs, modes))
        return self.with_cache(kept + max(cost.work[mode] + flying + coming
                                          for (cost, mode, _), flying, coming in beside))

    def passing_bytes(self, costs: list[Cost], modes: Sequence[str]) -> int:
        """The peak with what torch's allocator holds beyond it."""
        return self.with_cache(sum(self.peak(costs, modes)))

    def with_cache(self, total: Bytes) -> Bytes:
        """Of a number, or of an array."""
        beyond = total * CACHE_SHARE["fused" if self.wishes.fused else "eager"]
        return total + (int(beyond) if isinstance(total, int) else beyond.astype(np.int64))


def depth_of(wishes: Wishes) -> int:
    """Units whose gradients may be on their way from the device."""
    return min(OFFLOAD_DEPTH, wishes.lent) if wishes.grads == "none" else OFFLOAD_DEPTH


def spills(away: list[int], modes: Sequence[str]) -> dict[int, int]:
    """Of windows that keep something on disk, their bytes. away: as Keeping.away."""
    return {w: n for w, (n, mode) in enumerate(zip(away, modes)) if n and mode in DISK}


def on_host(away: list[int], spilled: dict[int, int]) -> int:
    """Bytes in host memory, with the bays that carry those that are on disk."""
    bays = min(BAYS, len(spilled)) * max(spilled.values(), default=0)
    return sum(away) - sum(spilled.values()) + bays
