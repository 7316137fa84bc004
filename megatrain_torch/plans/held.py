"""By how much AdamW on the host is held up by copies beside it: both take the host's memory.

An update waits for nothing that is copied, so what counts is how much crosses while updates run; what passes through
the device to be updated there is some of it. Those begin with the
step, in the order of forward, and what crosses in forward is taken to cross evenly, until it or the updates are over,
whichever is later. Where gradients are kept nowhere, updates run beside backward and the next forward.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base.modes import moved_bytes
from .homes import Ways
from .keeping import Keeping


class Held:
    """Of one model on a machine. Seconds and bytes; numbers, or arrays by choice."""

    def __init__(self, keeping: Keeping, ways: Ways) -> None:
        self.keeping, self.ways, shape = keeping, ways, keeping.shape
        self.byte_s = keeping.machine.held_s(keeping.wishes.fleet.gpus)
        self.forwards: dict[int, float] = {}
        self.ways_crossed = 1
        self.streamed = np.array([u.weights for u in shape.units], dtype=np.float64) / ways.exchange.parts
        wishes = keeping.wishes
        self.lowered = ways.exchange.lowered + (0 if ways.exchange.peers else ways.exchange.raised)
        self.passing = np.array([u.trained for u in shape.units]) * moved_bytes(wishes.states) / wishes.fleet.count
        self.behind = keeping.wishes.grads == "none"
        if self.behind:
            self.ways_crossed = 2
            self.streamed = 2 * self.streamed + ways.exchange.home

    def crossing(self, homes: Sequence[tuple[int, ...]], through: Sequence[frozenset[int]]) -> np.ndarray:
        """Bytes by choice, without what windows keep in host memory. through: units whose updates pass through the
        device."""
        streams = np.array(homes) == 0
        return streams @ self.streamed + ~streams @ self.lowered \
            + [self.ways_crossed * sum(self.ways.visiting(h).values()) for h in homes] \
            + [self.passing[list(units)].sum() for units in through]

    def span_s(self, micro: int, backward_s: float | None = None) -> float:
        """In which that crosses. backward_s: None, the longest that may be."""
        costs = self.keeping.costs(micro)
        if micro not in self.forwards:
            self.forwards[micro] = sum(c.forward_s for c in costs)
        forward = self.forwards[micro]
        if not self.behind:
            return forward
        return forward + (sum(max(c.backward_s.values()) for c in costs) if backward_s is None else backward_s)

    def stretch(self, update_s: Any, crossing: Any, span_s: float) -> Any:
        """Updates on the host, which take update_s alone, take so many times that."""
        longer = np.maximum(update_s, span_s) if isinstance(update_s, np.ndarray) else max(update_s, span_s)
        return 1.0 + self.byte_s * crossing / longer
