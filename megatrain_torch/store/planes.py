"""What host memory has of a parameter, and states that are on the device around their unit's update alone.

`Planes` knows what is waited for before host memory is read or written, and who is told after.

`Arrivals` is for units of plan={"homes": {unit: "arrive"}}. Such a unit lives on the device as one at home in VRAM
does, but for AdamW's states: these are in host memory, come up in the last windows of backward, and go down during the
next forward (csrc/core/arrive.h). That is when few activations are alive, so the memory for them is torch's, given for
the stay: in pieces, which fit where activations have been.

When they are asked for is learned from the step before: `AHEAD` hand-overs before the unit's own last one. Where the
order was another, or memory was short, step() asks. They leave when the copies down are over. Python is ahead of the
device, and would meanwhile have activations take other memory; so where they do not fit beside a step's peak, the
`STAY`th window of the next forward waits.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _core
from ..base.errors import MegatrainError
from .guard import plain
from .records import Record

if TYPE_CHECKING:
    from ..model.homes import Homes
    from ..model.runtime import Runtime
    from ..plans.room import Room

AHEAD = 5                    # layers, whose backwards take longer than the states of an embedding and a layer: at 7B
#                              width, and 55 GB/s, from some 16k tokens on
STAY = AHEAD + 2             # of a forward, in which they leave: from some 64k tokens on


def mask(planes: Iterable[str]) -> int:
    """Bits of these planes, as the engine takes them."""
    return sum(1 << _core.PLANES[p] for p in planes)


HI, STATE_PLANES = mask(["HI"]), mask(("LO", "MASTER", "M", "V", "SCALE"))


class Planes:
    """The planes of one streamed model in host memory; the guard of its parameters asks here."""

    def __init__(self, core: _core.Engine, homes: Homes, room: Room, several: bool = False, apart: bool = False
                 ) -> None:
        """several: processes stream the model together. apart: on several machines, each of which has a part."""
        self.core, self._homes, self._room, self._several, self.apart = core, homes, room, several, apart

    # ---- before host memory is read ----

    def wait_updates(self, record: Record) -> None:
        """The weights may be read in host memory. Raises: a unit at home elsewhere has no room for a copy there."""
        self._want_weights(record.unit)
        self.core.wait_updates(record.unit)

    def _want_weights(self, unit: int) -> None:
        if unit in self._homes.settled or unit in self._homes.filed:
            self._room.weights(self.core, unit)

    def wait_used(self, record: Record) -> None:
        """No update of the unit is under way; nothing is brought. Of units on the device: ACC has no host copy."""
        if record.unit in self._homes.settled:
            self.core.bring(record.unit, mask(["ACC"]))
        else:
            self.core.updated(record.unit)

    def bring_states(self, record: Record) -> None:
        """Host copies of masters and moments become current, where another place has the newer ones."""
        homes = self._homes
        if self.apart or record.unit in homes.settled or record.unit in homes.on_disk:
            self.core.wait_saved(record.unit)        # whose copies of the unit go with it
            self.core.bring(record.unit, STATE_PLANES)

    # ---- around a write to it ----

    def own_states(self, record: Record) -> None:
        """States or gradients are about to be written: no copy is on its way to them, or into a file."""
        self.core.wait_saved(record.unit)
        if record.unit in self._homes.arrivals.units:
            self.core.bring(record.unit, STATE_PLANES)

    def push(self, record: Record, *planes: str) -> None:
        """These host planes were written: device, file and other processes take the values that are theirs."""
        if self._several:
            if planes != ("GRAD",):              # of which each uses what it has written itself
                self.core.spread(record.unit, record.index, mask(planes))
        elif record.unit in self._homes.settled or record.unit in self._homes.on_disk:
            self.core.push(record.unit, record.index, mask(planes))

    def before_write(self, record: Record) -> None:
        """No update of the weights is under way, and nothing reads them for the device."""
        self._want_weights(record.unit)
        self.core.wait_fetch(record.unit)

    def notice_writes(self, records: Iterable[Record]) -> None:
        """What was written past the guard, by an operation that does not say that it writes, is told like the rest."""
        for r in records:
            if r.host._version != r.version:
                self.core.wait_fetch(r.unit)
                self.after_write(r)

    def after_write(self, record: Record) -> None:
        if record.unit in self._homes.filed:         # first: who asks for the new version reads it there
            self.core.bring(record.unit, HI)             # it was: else zeros would go there
            self.push(record, "HI")                      # which is a new version
        elif self._several:
            self.push(record, "HI")
        else:
            self.core.touch(record.unit)
        record.writes += 1
        if record.host is not None:
            record.version = record.host._version

    def keep_write(self, record: Record, value: Tensor) -> None:
        """Code changed its copy of the weights in place (max_norm, a clamp): the weights are that, unless several."""
        with torch.no_grad():
            value = value.detach().cpu()
            if torch.equal(record.param, value):     # cuDNN's layers put theirs one behind the other
                return
            if self._several:
                raise MegatrainError(f"{record.name}: changed in place while the model ran; with several processes "
                                     "weights are changed between steps, in all of them alike")
            record.param.copy_(value)

    def replace_data(self, p: Tensor, value: Tensor) -> None:
        """`p.data = x`: the values are copied in; the parameter keeps its place in the store."""
        record = p._mt
        if value.shape != record.shape or value.dtype != record.dtype:
            raise MegatrainError(
                f"{record.name}: .data of shape {list(value.shape)} {value.dtype} does not fit the streamed parameter "
                f"of shape {list(record.shape)} {record.dtype}; mt.unstream(model) before changing it")
        with torch.no_grad():
            record.host.copy_(plain(value))
        self.after_write(record)


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
        for guest in self._due.get(len(self._handed), ()):
            try:
                self._lift(guest)
            except torch.OutOfMemoryError:               # step() asks again, when activations are gone
                return

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
