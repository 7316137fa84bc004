"""States that are on the device around their unit's update alone: plan={"homes": {unit: "arrive"}}.

Such a unit lives on the device as one at home in VRAM does, but for AdamW's states: these are in host memory, come up
in the last windows of backward, and go down during the next forward (csrc/core/arrive.h). That is when few activations
are alive, so the memory for them is torch's, given for the stay: in pieces, which fit where activations have been.

When they are asked for is learned from the step before: `AHEAD` hand-overs before the unit's own last one. Where the
order was another, or memory was short, step() asks. They leave when the copies down are over. Python is ahead of the
device, and would meanwhile have activations take other memory; so where they do not fit beside a step's peak, the
`STAY`th window of the next forward waits.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..model.runtime import Runtime

AHEAD = 5                    # layers, whose backwards take longer than the states of an embedding and a layer: at 7B
#                              width, and 55 GB/s, from some 16k tokens on
STAY = AHEAD + 2             # of a forward, in which they leave: from some 64k tokens on


class Arrivals:
    """The stays of one streamed model's guests; `units` are those whose states come and leave. Made before anything but
    their weights was asked for."""

    def __init__(self, runtime: Runtime, units: Iterable[int]) -> None:
        self._runtime = weakref.ref(runtime)
        self.units = frozenset(units)
        self.pieces: dict[int, list[Tensor]] = {}        # by unit: memory of its stay
        self.over: set[int] = set()                      # units whose step was asked for: they leave when they can
        self._opened = 0                                 # windows since a step was asked for
        self._handed: list[int] = []                     # units in the order of their hand-overs since the last step
        self._due: dict[int, list[int]] = {}             # number of hand-overs: units whose states are asked for then
        for unit in self.units:
            runtime.core.invite(unit)

    def handed(self, unit: int) -> None:
        """Gradients of a unit leave its window. Runs in autograd's thread."""
        self._handed.append(unit)
        with suppress(torch.OutOfMemoryError):           # step() asks again, when activations are gone
            for guest in self._due.get(len(self._handed), ()):
                self._lift(guest)

    def bring(self, units: Iterable[int]) -> None:
        """step() is about to ask for updates of these units. Raises torch.OutOfMemoryError where states do not fit."""
        for unit in units:
            if unit in self.units:
                self._lift(unit)
                self.over.add(unit)
                self._opened = 0

    def stepped(self) -> None:
        """The optimizer stepped: what is handed over now belongs to its next step."""
        last = {unit: at for at, unit in enumerate(self._handed, 1) if unit in self.units}
        self._handed, self._due = [], {}
        for unit, at in last.items():
            self._due.setdefault(max(at - AHEAD, 1), []).append(unit)

    def leave(self) -> None:
        """A window of a forward opens: memory is given back whose states are in host memory again."""
        self._opened += 1
        for unit in list(self.over):
            self._end(unit, self._opened >= STAY and self._short())

    def dismiss(self, unit: int) -> None:
        """Other parameters of the unit are trained from now on: its next stay takes other memory."""
        if unit in self.pieces:
            self._end(unit, True)

    def _end(self, unit: int, wait: bool) -> None:
        if self._runtime().core.leave(unit, wait):
            self.pieces.pop(unit, None)
            self.over.discard(unit)

    def _short(self) -> bool:
        """What stays take may not fit beside the most that torch has had."""
        rt = self._runtime()
        if not rt.is_cuda:
            return True
        free, total = torch.cuda.mem_get_info(rt.device)
        most = min(free + torch.cuda.memory_reserved(rt.device),
                   total * torch.cuda.get_per_process_memory_fraction(rt.device))
        held = sum(p.untyped_storage().nbytes() for pieces in self.pieces.values() for p in pieces)
        return torch.cuda.max_memory_allocated(rt.device) + held > most

    def _lift(self, unit: int) -> None:
        self.over.discard(unit)
        if unit in self.pieces:
            return
        rt = self._runtime()
        with torch.inference_mode(False), torch.no_grad():
            raws = [torch.empty(n + 512, dtype=torch.uint8, device=rt.device) for n in rt.core.lift_sizes(unit)]
            pieces = [raw[-raw.data_ptr() % 512:] for raw in raws]
        if rt.core.lift(unit, [p.data_ptr() for p in pieces], rt.stream()):
            self.pieces[unit] = pieces
