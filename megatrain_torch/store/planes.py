"""What host memory has of a parameter: what is waited for before it is read or written, and who is told after."""
from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _core
from ..base.errors import MegatrainError
from .arrive import Arrivals
from .guard import plain
from .records import Record


def mask(planes: Iterable[str]) -> int:
    """Bits of these planes, as the engine takes them."""
    return sum(1 << _core.PLANES[p] for p in planes)


STATE_PLANES = mask(("LO", "MASTER", "M", "V", "SCALE"))


class Room(Protocol):
    """Refuses what does not fit in host memory: room.Room."""

    def weights(self, core: _core.Engine, unit: int) -> None: ...


class Homes(Protocol):
    """Where the units of a streamed model are at home: homes.Homes.

    Attributes:
        settled: units that live on the device. on_disk: those whose states are in a file. filed: whose weights are too.
        arrivals: of settled ones whose states come and leave.
    """

    @property
    def settled(self) -> Container[int]: ...

    @property
    def on_disk(self) -> Container[int]: ...

    @property
    def filed(self) -> Container[int]: ...

    @property
    def arrivals(self) -> Arrivals: ...


class Saves(Protocol):
    """Knows of a save that may be under way: saves.Saves."""

    running: Any


class Planes:
    """The planes of one streamed model in host memory; the guard of its parameters asks here."""

    def __init__(self, core: _core.Engine, homes: Homes, saves: Saves, room: Room, several: bool = False,
                 apart: bool = False) -> None:
        """several: processes stream the model together. apart: on several machines, each of which has a part."""
        self.core, self._homes, self._saves, self._room = core, homes, saves, room
        self._several, self.apart = several, apart

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
            self.core.bring(record.unit, mask(("ACC",)))
        else:
            self.core.updated(record.unit)

    def wait_grads(self, record: Record) -> None:
        self.core.wait_grads(record.unit)

    def bring_states(self, record: Record) -> None:
        """Host copies of masters and moments are current; only units on the device, those whose states are on disk, and
        those of which other machines have a part have anything to do."""
        homes = self._homes
        if self.apart or record.unit in homes.settled or record.unit in homes.on_disk:
            if self._saves.saving is not None:       # whose copies of the unit go when it has them
                self.core.wait_saved(record.unit)
            self.core.bring(record.unit, STATE_PLANES)

    def own_states(self, record: Record) -> None:
        """Masters, moments or gradients are about to be written as a whole: no copy is on its way to them, or into a
        checkpoint."""
        if self._saves.saving is not None:
            self.core.wait_saved(record.unit)
        if record.unit in self._homes.arrivals.units:
            self.core.bring(record.unit, STATE_PLANES)

    def push(self, record: Record, *planes: str) -> None:
        """These host planes were written: the device takes their values, or the file, where the unit has them there;
        other processes take what each has written of its own portion."""
        if self._several:
            if planes != ("GRAD",):              # of which each uses what it has written itself
                self.core.spread(record.unit, record.index, mask(planes))
        elif record.unit in self._homes.settled or record.unit in self._homes.on_disk:
            self.core.push(record.unit, record.index, mask(planes))

    def before_write(self, record: Record) -> None:
        """As `wait_updates`, and nothing reads them for the device."""
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
            self.core.bring(record.unit, mask(("HI",)))     # it was: else zeros would go there
            self.push(record, "HI")                      # which is a new version
        elif self._several:
            self.push(record, "HI")
        else:
            self.core.touch(record.unit)
        record.writes += 1
        if record.host is not None:
            record.version = record.host._version

    def keep_write(self, record: Record, value: Tensor) -> None:
        """A forward or a backward changed its copy of the weights in place (nn.Embedding's max_norm, a clamp in a
        hook): they are what it has now.

        Raises:
            MegatrainError: in several processes, each of which would have others.
        """
        with torch.no_grad():
            value = value.detach().cpu()
            if torch.equal(record.param, value):     # cuDNN's layers put theirs one behind the other
                return
        if self._several:
            raise MegatrainError(f"{record.name}: changed in place while the model ran; with several processes weights "
                                 "are changed between steps, in all of them alike")
        with torch.no_grad():
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
