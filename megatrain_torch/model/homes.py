"""Moves the units of a streamed model between host memory, the device and a disk. plans/search.py chooses the placement
(a unit's home); model/planning.py calls `move` with it.

`move` runs between two passes, when no graph is alive. All work under way ends first. Then units leave the device,
which makes room for those that come. Gradients, states and sums of micro-batches move with a unit's weights. Results
have the bits that they would have had without the move.

The device has a limit: torch's allocator is held to it beside what the store takes there.
"""
from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..base.limits import device_taken, show_bytes
from ..base.modes import DISKS
from ..group.ranks import Ranks, as_one
from ..plans.planner import Plan
from ..plans.tally import SETTLED, Asked
from ..store import gradient
from ..store.arrivals import Arrivals
from ..store.disk import BAYS, BUFFER_BYTES, BUFFERS, SPILLED, THREADS, Disk, file_bytes
from ..store.records import mask

if TYPE_CHECKING:
    from .ring import Slot
    from .runtime import Runtime

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
JOINED, SEPARATE = "expandable_segments:True", "expandable_segments:False"

_caps: weakref.WeakSet[Cap] = weakref.WeakSet()          # of the process's models


def units_at(asked: Asked, *homes: str) -> list[int]:
    """Numbers of the units that are at home there."""
    return [i for i, home in enumerate(asked.homes) if home in homes]


class Homes:
    def __init__(self, model: Runtime) -> None:
        self._model, self.core = model, model.core
        # Processes of this machine, each with files of its own in the same directory.
        self._mates = 1 if model.ranks is None else len(model.ranks.mates)
        self.settled: dict[int, int] = {}                # units that live on the device, and their slots
        self.arrivals = Arrivals(model.itself(), ())     # of those the ones whose states come and leave
        self.on_disk: frozenset[int] = frozenset()       # units whose states are in a file
        self.filed: set[int] = set()                     # of these the ones whose weights are there too by now

    def away(self, unit: int) -> bool:
        """The unit's weights are at home on the device or on disk: those in host memory are copies."""
        return unit in self.settled or unit in self.filed

    def take(self, unit: int) -> None:
        """What of the unit is at home elsewhere goes there, and its memory on the host is given back; of several
        processes when all have come here."""
        self.core.take(unit, self._model.stream())

    def open_slots(self, asked: Asked, there: list[int], have: dict[int, Slot]) -> None:
        """Slots for what streams, and one for each of the units that live on the device (`there`): their own of before,
        where they have one. States of guests among these come and leave from now on."""
        model, sizes = self._model, asked.tally().slots(asked.homes, asked.ring)
        model.ring.open(sizes, there, have)
        self.settled = {unit: slot for slot, unit in enumerate(there, len(sizes))}
        for unit, slot in self.settled.items():
            self.core.settle(unit, slot)
        for unit, home in enumerate(asked.homes) if asked.experts else ():
            model.ring.cut(unit, asked.experts, model.wholes[unit], at_once=home in (*SETTLED, "disk+weights"))
        model.room.asked = asked
        self.arrivals = Arrivals(model.itself(), [unit for unit in there if asked.homes[unit] == "arrive"])

    def reach(self, ranks: Ranks) -> set[int]:
        """Each process of one machine copies what others have updated from their slots, if all reach all: these units.
        Between machines it is sent from slot to slot. Called by all, with the same units there."""
        units, sent = sorted(self.settled), not self._model.is_cuda or ranks.nccl()
        names = ranks.gather([self.core.slot_name(unit) if sent or not ranks.apart else b"" for unit in units])
        within = [self.core.reach(unit, b"".join(of)) for unit, of in zip(units, zip(*names))]
        reached = {unit for unit, *found in zip(units, *ranks.gather(within)) if all(found)}
        for unit in (lost := {*units} - reached):
            self.core.reach(unit, b"")
        asked, own = self._model.room.asked, [self._model.units[unit] for unit in lost]
        if lost and asked.fleet.linked and not ranks.apart:      # as the plan had it
            self._model.room.asked = dataclasses.replace(asked, fleet=dataclasses.replace(asked.fleet, linked=False))
            kept = sum(r.nbytes for records in own if all(r.was_trainable for r in records) for r in records)
            warnings.warn(f"GPUs cannot read each other's memory (CUDA IPC), which the plan took for granted: trained "
                          f"weights of layers on the GPUs stay in host memory, {show_bytes(kept)} more", stacklevel=2)
        return reached

    # Files have no names, and go with the process at the latest. sizes: tests' own.

    def keep_on_disk(self, disk: Disk, asked: Asked, sizes: Mapping[str, int]) -> None:
        """States of the units that are at home on disk go to a file, and some of their weights."""
        units, weights = units_at(asked, "disk"), units_at(asked, "disk+weights")
        limit = 0 if disk.limit is None else max(disk.limit // self._mates, 1)
        usual = {"buffers": BUFFERS, "buffer_bytes": BUFFER_BYTES, "threads": THREADS}
        self.core.disk(disk.path, units, weights, limit=limit, **{**usual, **sizes})
        self.on_disk = frozenset(units) | frozenset(weights)

    def file_weights(self, unit: int) -> None:
        """Weights that were put into the unit's plane go to the file; `take` gives their memory back."""
        self.core.push(unit, -1, mask(("HI",)))
        self.filed.add(unit)

    def spill_to(self, disk: Disk, nbytes: int, asked: Asked, sizes: Mapping[str, int]) -> None:
        """What windows keep may go to a file, in which so many bytes are reserved, of all processes of the machine."""
        limit = 0 if disk.limit is None else max((disk.limit - file_bytes(asked)) // self._mates, 1)
        nbytes = -(-nbytes // self._mates)
        self.core.swap_disk(disk.path, nbytes, limit, **{"bays": BAYS, "threads": THREADS, **sizes})


# ---- a plan is put into force; who calls holds the model's door: no other thread is in it ----

def move(rt: Runtime, plan: Plan, limit: int) -> None:
    """limit: bytes of the device that may be used by all who are there, not by the plan alone.

    Raises MegatrainError, torch.OutOfMemoryError: there is no memory, or a worker failed. Every unit then is where it
    was, or in host memory, with all its values, and the model trains as before; or, where not even that can be done, it
    refuses to run."""
    before = rt.room.asked
    homes = tuple(plan.homes.get(name, "ram") for name in rt.unit_names)
    asked = dataclasses.replace(before, homes=homes, ring=plan.slots, micro=plan.micro, besides=plan.besides,
                                experts=plan.experts, fleet=plan.fleet)
    if (asked.homes, asked.ring, asked.experts) != (before.homes, before.ring, before.experts):
        rt.finish_save()
        rt.drain()
        for unit in rt.homes.arrivals.units:
            rt.homes.arrivals.dismiss(unit)
        _change(rt, asked, plan)
    rt.room.asked = asked
    if SPILLED in plan.disk and rt.core.swap_file() is None:
        rt.homes.spill_to(plan.nvme, plan.disk[SPILLED], asked, {})
    rt.cap.hold(limit, asked.at_home())
    rt.delivery.shards = plan.delivery == "shards"
    keep(rt, plan)


def keep(rt: Runtime, plan: Plan) -> None:
    """Windows keep what the plan says, from the next pass on."""
    rt.keeps.plan = plan
    for w in rt.windows:
        w.keep(plan.activations.get(w.name, w.mode))


def _change(rt: Runtime, asked: Asked, plan: Plan) -> None:
    """Units come to other homes, or stay where they were."""
    before, ranks = rt.room.asked, rt.ranks if asked.homes != rt.room.asked.homes else None
    # Where each unit is now; of those on the device, the slots that their weights are in. Both are true at every
    # moment, so that what is there can be opened again.
    homes, have = list(before.homes), {unit: rt.ring.slots[slot] for unit, slot in rt.homes.settled.items()}
    if ranks is not None:                        # units move on all, or on none
        ranks.gather(None)                       # all are here: nobody copies of a slot, which may be another's then
    rt.ring.close()
    try:
        with as_one(ranks):
            _move_units(rt, asked, plan, homes, have)
    except BaseException as error:
        _undo(rt, before, homes, have)
        if ranks is not None and not rt.broken:              # it went well on some
            rt.broken = f"units were on their way to other homes when that failed on some process: {error}"
        raise
    if ranks is not None:
        for unit in sorted(rt.homes.reach(ranks)):           # trained weights leave host memory too, in reach now
            if before.homes[unit] != asked.homes[unit]:
                rt.homes.take(unit)


def _move_units(rt: Runtime, asked: Asked, plan: Plan, homes: list[str], have: dict[int, Slot]) -> None:
    moving = [u for u, (old, new) in enumerate(zip(homes, asked.homes)) if old != new]
    for unit in moving:                                  # leaves where it is
        if homes[unit] == "through":
            rt.core.through(unit, False)
        elif unit in have:
            rt.room.weights(rt.core, unit)
            _unsettle(rt, unit)
            del have[unit]                               # its weights were there until now
        homes[unit] = "ram"
    rt.homes.open_slots(asked, units_at(asked, *SETTLED), have)
    for unit in moving:                                  # comes to where it is to be
        home = asked.homes[unit]
        if home in SETTLED:
            rt.homes.take(unit)
            have[unit] = rt.ring.slots[rt.homes.settled[unit]]
        if home not in DISKS:
            homes[unit] = home
        if home == "through":
            rt.core.through(unit, True)
    # The file, where units have states there: laid out once, before there are any. Weights that did not get there the
    # last time go now.
    if not rt.homes.on_disk and asked.on_disk():
        rt.choose_states(rt.states)
        rt.homes.keep_on_disk(plan.nvme, asked, {})
    for unit in units_at(asked, *DISKS):
        homes[unit] = asked.homes[unit]
    for unit in units_at(asked, "disk+weights"):
        if unit not in rt.homes.filed:
            rt.homes.file_weights(unit)
            rt.homes.take(unit)


def _undo(rt: Runtime, before: Asked, homes: list[str], have: dict[int, Slot]) -> None:
    """Opens the slots again after a failure. Units that are on the device yet stay there; the others are in host
    memory, or in the file."""
    slots = rt.ring.slots                        # of those that were to come, and have come: they are read from
    try:
        rt.ring.close()
        for unit in [unit for unit in have if not rt.core.settled(unit)]:
            del have[unit]
        for unit, home in enumerate(homes):
            if unit not in have and rt.core.settled(unit):       # it was to come
                _unsettle(rt, unit)
            if unit not in have and home in SETTLED:
                homes[unit] = "ram"
        del slots
        was = dataclasses.replace(before, homes=tuple(homes))
        rt.homes.open_slots(was, sorted(have), have)
        rt.cap.hold(rt.cap.limit, was.at_home())
    except BaseException as error:
        rt.ring.slots = list(have.values())      # what is in them is nowhere else
        rt.broken = f"units were on their way to other homes when that failed, and again on the way back: {error}"


def _unsettle(rt: Runtime, unit: int) -> None:
    rt.core.dismiss(unit)
    rt.core.unsettle(unit, any(gradient.standing(r) is not None for r in rt.units[unit]))


# ---- the device's limit ----

class Cap:
    """Holds torch's allocator to the process's limit of the device, while a streamed model has one.

    torch keeps freed memory, in fragments; without a limit it takes fresh memory before it tidies up. The limit is the
    process's: its context and other models in it have their part of it; other processes share the rest of the device.
    `lift` puts back what was before.
    """

    def __init__(self, device: torch.device, stored: Callable[[], int]) -> None:
        """stored: tells the bytes that the model's store has of the device now, beside torch's allocator."""
        self.device, self.stored, self.before, self.joined = device, stored, None, False
        self.limit: int | None = None            # bytes of the device that the process may have in all
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
            torch._C._accelerator_setAllocatorSettings(JOINED)

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
                torch._C._accelerator_setAllocatorSettings(SEPARATE)
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Memory that is asked for in here other processes can reach: not in segments that are joined."""
        given = next((os.environ[name] for name in _ALLOCATOR if os.environ.get(name)), "")
        now = JOINED if self.joined and self.before is not None else given
        joined = self.device.type == "cuda" and JOINED in now.replace(" ", "")
        if joined:
            torch._C._accelerator_setAllocatorSettings(SEPARATE)
        try:
            yield
        finally:
            if joined:
                torch._C._accelerator_setAllocatorSettings(now)

    def close(self) -> None:
        """The store is about to end."""
        self.lift()
        _caps.discard(self)
