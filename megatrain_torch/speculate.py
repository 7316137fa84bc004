"""Updates that begin during backward, before the norm of all gradients is known (plan={"speculate": True}).

When all gradients of a unit have been handed over, the engine is told what step() will ask for. It makes the
update as if nothing were to be clipped, beside backward, and keeps it when step() asks for just that and the clip
factor is 1; else it takes it back. The bits are the same either way (csrc/core/speculate.h).

Where steps are clipped all this is in vain, and costs memory traffic. So after `WRONG` steps in a row of which
nothing was kept none begins early, but for a try every `AGAIN` steps.
"""
from __future__ import annotations

import weakref
from typing import Any

from .records import Record

WRONG, AGAIN = 2, 8


class Speculation:
    """One optimizer's early updates on one streamed model; it does not keep the optimizer alive."""

    def __init__(self, optimizer: Any, runtime: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._runtime = weakref.ref(runtime)
        self._seen: dict[int, int] = {}          # by unit: gradients handed over since the last step
        self._expected: dict[int, int] = {}      # by unit: as many as there were for the step before
        self._fresh = True                       # no gradient since the last step
        self._wrong = self._paused = 0           # steps in a row: nothing kept; none begun
        self._counted = (0, 0)                   # kept, undone; as of the last look
        self._on = True

    def handed(self, unit: int, records: list[Record]) -> None:
        """Gradients of a unit are on their way home. Runs in autograd's thread."""
        optimizer, rt = self._optimizer(), self._runtime()
        if optimizer is None or unit not in rt.speculated:
            return
        if self._fresh:
            self._fresh = False
            self._look(rt)
        self._seen[unit] = self._seen.get(unit, 0) + len(records)
        if self._on and self._seen[unit] == self._expected.get(unit):
            entries = optimizer._expected(rt.units[unit])
            if entries:
                rt.core.speculate(unit, entries)

    def stepped(self) -> None:
        """The optimizer stepped: what comes now belongs to its next."""
        self._expected, self._seen, self._fresh = self._seen, {}, True

    def _look(self, rt: Any) -> None:
        """What became of the last step: its forward has waited for its updates."""
        stats = rt.core.stats()
        kept, undone = stats["committed"], stats["undone"]
        if kept > self._counted[0]:
            self._wrong = 0
        elif undone > self._counted[1]:
            self._wrong += 1
        self._counted = (kept, undone)
        self._paused = self._paused + 1 if self._wrong >= WRONG and self._paused < AGAIN - 1 else 0
        self._on = self._paused == 0
