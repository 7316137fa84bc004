"""Where the units of one streamed model live: in host memory, on the device, on a disk; and how they get there.

The device has a limit: torch's allocator is held to it beside what the store takes there.
"""
from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .. import _core
from ..base.limits import device_taken
from ..group.ranks import Ranks
from ..store.disk import BAYS, BUFFER_BYTES, BUFFERS, THREADS, Disk
from ..store.planes import Arrivals, mask

if TYPE_CHECKING:
    from .ring import Ring, Slot
    from .runtime import Runtime

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
JOINED, SEPARATE = "expandable_segments:True", "expandable_segments:False"

_caps: weakref.WeakSet[Cap] = weakref.WeakSet()          # of the process's models


class Homes:
    """
    Attributes:
        settled: units that live on the device, and their slots. arrivals: those of them whose states come and leave.
        on_disk: units whose states are in a file. filed: of these, those whose weights are there too by now.
        passing: units whose gradients are kept nowhere. within: of those on the device, units that all processes copy
            from each other's slots. files: what takes names of files, with the process at the latest.
    """

    def __init__(self, model: Runtime, core: _core.Engine, ring: Ring, mates: int = 1) -> None:
        """mates: processes of this machine that stream the model, each with files of its own in the same directory."""
        self._model, self.core, self._ring, self._mates = model, core, ring, mates
        self.settled: dict[int, int] = {}
        self.arrivals = Arrivals(model.itself(), ())
        self.on_disk: frozenset[int] = frozenset()
        self.filed: set[int] = set()
        self.passing: frozenset[int] = frozenset()
        self.within: set[int] = set()
        self.files: list[weakref.finalize] = []

    def away(self, unit: int) -> bool:
        """The unit's weights are at home on the device or on disk: those in host memory are copies."""
        return unit in self.settled or unit in self.filed

    def take(self, unit: int) -> None:
        """What of the unit is at home elsewhere goes there, and its memory on the host is given back; of several
        processes when all have come here."""
        self.core.take(unit, self._model.stream())

    def open_slots(self, sizes: list[int], settled: list[int], have: dict[int, Slot]) -> None:
        """Slots of these sizes for what streams, and one for each of the units that live on the device: their own of
        before, where they have one."""
        self._ring.open(sizes, settled, have)
        self.settled = {unit: slot for slot, unit in enumerate(settled, len(sizes))}
        for unit, slot in self.settled.items():
            self.core.settle(unit, slot)

    def reach(self, ranks: Ranks) -> None:
        """Each process of one machine copies what others have updated from their slots, if all reach all; called by
        all, with the same units there."""
        units = sorted(self.settled)
        names = ranks.gather([b"" if ranks.apart else self.core.slot_name(unit) for unit in units])
        within = [self.core.reach(unit, b"".join(of)) for unit, of in zip(units, zip(*names))]
        self.within = {unit for unit, *found in zip(units, *ranks.gather(within)) if all(found)}
        for unit in self.settled.keys() - self.within:
            self.core.reach(unit, b"")

    def invite(self, guests: Iterable[int]) -> None:
        """States of these units, which live on the device, come and leave."""
        self.arrivals = Arrivals(self._model.itself(), guests)

    def keep_on_disk(self, disk: Disk, units: list[int], weights: list[int], sizes: Mapping[str, int]) -> None:
        """The units' states go to a file, which loses its name with the process at the latest. weights: of further
        units, whose weights go there too. sizes: tests' own."""
        usual = {"buffers": BUFFERS, "buffer_bytes": BUFFER_BYTES, "threads": THREADS}
        limit = 0 if disk.limit is None else max(disk.limit // self._mates, 1)
        self.core.disk(disk.path, units, weights, limit=limit, **{**usual, **sizes})
        self.on_disk = frozenset(units) | frozenset(weights)
        self.files.append(weakref.finalize(self, self.core.disk_unname))

    def file_weights(self, unit: int) -> None:
        """Weights that were put into the unit's plane go to the file; `take` gives their memory back."""
        self.core.push(unit, -1, mask(("HI",)))
        self.filed.add(unit)

    def spill_to(self, disk: Disk, nbytes: int, taken: int, sizes: Mapping[str, int]) -> None:
        """What windows keep may go to a file, in which so many bytes are reserved. taken: of the limit, by states. All
        of this machine's processes together."""
        limit = 0 if disk.limit is None else max((disk.limit - taken) // self._mates, 1)
        nbytes = -(-nbytes // self._mates)
        self.core.swap_disk(disk.path, nbytes, limit, **{"bays": BAYS, "threads": THREADS, **sizes})
        self.files.append(weakref.finalize(self, self.core.disk_unname))


class Cap:
    """Holds torch's allocator to the process's limit of the device, while a streamed model has one.

    torch keeps freed memory, in fragments; without a limit it takes fresh memory before it tidies up. The limit is the
    process's: its context and other models in it have their part of it; other processes share the rest of the device.
    `lift` puts back what was before.

    Attributes:
        limit: bytes of the device that the process may have in all; None: there is no limit.
    """

    def __init__(self, device: torch.device, stored: Callable[[], int]) -> None:
        """stored: tells the bytes that the model's store has of the device now, beside torch's allocator."""
        self.device, self.stored, self.before, self.joined = device, stored, None, False
        self.limit: int | None = None
        _caps.add(self)

    def hold(self, limit: int | None, store_bytes: int) -> None:
        """From now on to this limit. store_bytes: device memory that the model's store will have."""
        self.lift()
        self.limit, device = limit, self.device
        if device.type != "cuda" or limit is None:
            return
        context, others, stores = self.taken()
        total = torch.cuda.mem_get_info(device)[1]
        room = min(limit, total - others) - context - (stores - self.stored()) - store_bytes
        self.before = torch.cuda.get_per_process_memory_fraction(device)
        torch.cuda.set_per_process_memory_fraction(min(self.before, max(room / total, 0.0)), device)
        # Fragments of freed memory can be joined again: under a limit little is lost. Settings are taken as a whole,
        # so none are made where the user made some.
        self.joined = not any(os.environ.get(name) for name in _ALLOCATOR)
        if self.joined:
            _set(JOINED)

    def taken(self) -> tuple[int, int, int]:
        """Bytes of the device that torch's allocator does not have: (this process's context and libraries, other
        processes', stores of this process's models)."""
        free, total = torch.cuda.mem_get_info(self.device)
        stores = sum(cap.stored() for cap in _caps if cap.device == self.device)
        taken = max(total - free - torch.cuda.memory_reserved(self.device) - stores, 0)
        return *device_taken(taken, Ranks.taken), stores

    def lift(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            if self.joined:
                _set(SEPARATE)
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Memory that is asked for in here other processes can reach: not in segments that are joined."""
        given = next((os.environ[name] for name in _ALLOCATOR if os.environ.get(name)), "")
        now = JOINED if self.joined and self.before is not None else given
        joined = self.device.type == "cuda" and JOINED in now.replace(" ", "")
        if joined:
            _set(SEPARATE)
        try:
            yield
        finally:
            if joined:
                _set(now)

    def close(self) -> None:
        """The store is about to end."""
        self.lift()
        _caps.discard(self)


def _set(settings: str) -> None:
    found = getattr(torch._C, "_accelerator_setAllocatorSettings", None)      # from torch 2.10 on
    (found or torch.cuda.memory._set_allocator_settings)(settings)
