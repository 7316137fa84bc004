"""Which windows use which units, and in which order: what follows from a model alone."""
from __future__ import annotations

from .shapes import Shape


class Uses:
    """Of one model.

    Attributes:
        first, last: by unit, in the forward's order, the windows that use it first and last.
        leaving: by window, units whose gradients are handed over at the end of its backward.
        again: by window, units whose weights its backward binds. needed: units that some backward
            binds.
    """

    def __init__(self, shape: Shape, fused: bool) -> None:
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for w, window in enumerate(shape.windows):
            for u in window.units:
                self.first.setdefault(u, w)
                self.last[u] = w
        self.leaving: list[tuple[int, ...]] = [()] * len(shape.windows)
        for u, w in self.first.items():
            if shape.units[u].trained:
                self.leaving[w] = (*self.leaving[w], u)
        self.again = [() if w.kind == "embedding" or (w.kind == "head" and fused) else w.units
                      for w in shape.windows]
        self.needed = {u for w, units in zip(shape.windows, self.again) if w.learns for u in units}
