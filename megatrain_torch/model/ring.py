"""The device memory that units take turns in, and torch's views of it."""
from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from .. import _core
from ..base.units import cut
from ..fused.templates import Weights
from ..graph.hf_calls import mapped
from ..group.control import Control
from ..store.records import Record
from ..store.state import PLAIN, DeviceParameter, in_backward
from ..store.whole import Piece, Stacked, Whole

if TYPE_CHECKING:
    from .runtime import Runtime

_LANE, _WORK = _core.LANES["gather"], _core.WORKS["fetch"]
_use_count = torch._C._storage_Use_Count


class Spot(NamedTuple):
    """Where a parameter, or some experts of a stack, lie in a slot that has a cut of a unit."""

    offset: int
    dtype: torch.dtype
    shape: Any
    stride: Any


Spots = Sequence[Record | Spot | None]       # None: it is not in this slot


class Slot:
    """Device memory for one unit's weights, or a cut of them, and torch's views of it, by the number of either.

    held() is true when someone besides this slot has a tensor in it: a custom Function that keeps a
    weight, an output that aliases one. Then the memory is left to the holder.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self.fill()

    def fill(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            raw = torch.empty(self.nbytes + 512, dtype=torch.uint8, device=self.device)
            skip = -raw.data_ptr() % 512
            self.memory = raw[skip:skip + self.nbytes]
        self.address = self.memory.data_ptr()
        self._made: dict[Any, Any] = {}              # by what it is, and the number of whose it is
        self._apart: list[tuple[Any, int]] = []      # storages of `parameters`, with the uses that this slot has itself
        self._storage = self.memory.untyped_storage()
        del raw
        self._own = _use_count(self._storage._cdata)

    def views(self, number: int, records: Spots) -> list[Tensor | None]:
        return self._once(("views", number), lambda: [
            None if r is None else self.view(r.offset, r.dtype, r.shape, r.stride) for r in records])

    def parameters(self, number: int, records: Spots) -> list[Tensor | None]:
        """The same for modules: each in a storage of its own, as parameters are, so that no offset, no as_strided and
        no size of a storage shows that others lie beside it."""
        def alone(r: Record | Spot) -> Tensor:
            memory = from_dlpack(to_dlpack(self._bytes(r.offset, r.dtype, r.shape, r.stride)))
            return memory.view(r.dtype).as_strided(r.shape, r.stride)

        if (key := ("parameters", number)) not in self._made:
            found = self._once(key, lambda: [None if r is None else alone(r) for r in records])
            storages = [t.untyped_storage() for t in found if t is not None]
            self._apart += [(s, _use_count(s._cdata)) for s in storages]
        return self._made[key]

    def weights(self, number: int, records: Spots, names: tuple[str, ...]) -> Weights:
        """The views by name, for a template; made once, their joint views too. A module may give its parts others."""
        if (key := (names, number)) not in self._made:
            slot, views = weakref.ref(self), self.views(number, records)         # the slot has what is made here
            self._made[key] = Weights(dict(zip(names, views)), lambda make: slot()._counted(make))
        return self._made[key]

    def stretches(self, number: int, bounds: Sequence[int]) -> list[Tensor]:
        """Its bytes from one bound to the next, [n] uint8 each: the same tensors each time."""
        return self._once(("stretches", number), lambda: [self.memory[a:b] for a, b in itertools.pairwise(bounds)])

    def _once(self, key: tuple[str, int], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = self._counted(make)
        return self._made[key]

    def _counted(self, make: Callable[[], Any]) -> Any:
        """Views that the slot itself keeps: it is no holder of its own memory."""
        before = _use_count(self._storage._cdata)
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        self._own += _use_count(self._storage._cdata) - before
        return made

    def view(self, offset: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
        part = self._bytes(offset, dtype, shape, stride)
        return part.view(dtype).as_strided(shape, stride, part.storage_offset() // dtype.itemsize)

    def _bytes(self, offset: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if 0 not in shape else 0
        return self.memory[offset:offset + span * dtype.itemsize]

    def held(self) -> bool:
        return (_use_count(self._storage._cdata) > self._own
                or any(_use_count(s._cdata) > own for s, own in self._apart))


class Ring:
    """Which slot a unit is in when compute gets there, and what of the unit lies where in it."""

    def __init__(self, model: Runtime) -> None:
        self._model, self.core, self._units = model, model.core, model.units
        self._forget()

    def _forget(self) -> None:
        self.stacks: dict[Record, Stacked] = {}      # of experts, some at a time, by the record that stands for one
        self._rests: dict[int, int] = {}             # by unit, the number of what a window has open of it
        self._spots: dict[int, list[Spot | None]] = {}       # by the number of a cut
        self._owners: dict[int, int] = {}
        self.look([])

    def open(self, sizes: list[int], settled: list[int], have: dict[int, Slot]) -> None:
        """Slots of these sizes for what streams, then one for each settled unit: its own of before, if it has one."""
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.empty_cache()         # what was freed, in whose pieces these may not fit
        with nullcontext() if self._model.ranks is None else self._model.cap.reachable():
            own = [have.get(unit) or Slot(self.core.hi_bytes(unit), device) for unit in settled]
        slots = [Slot(n, device) for n in sizes] + own
        self.look(slots)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()     # former owners of this memory are done
        ring = weakref.ref(self)             # the engine must not keep it alive
        self.core.open_slots([(s.address, s.nbytes) for s in slots], SimpleNamespace(
            held=lambda slot: ring().slots[slot].held(), renew=lambda slot: ring()._renew(slot)))

    def _renew(self, slot: int) -> int:
        self.slots[slot].fill()
        self.look(self.slots)
        return self.slots[slot].address

    def close(self) -> None:
        """Others will be opened. Who moves units holds those that have weights until these are elsewhere."""
        self.core.close_slots()
        self._forget()

    def cut(self, unit: int, experts: int, wholes: list[Whole], at_once: bool) -> None:
        """Of this unit's stacks so many experts are there at a time. at_once: they are fetched, or live on the device,
        together, and only what is made of codes is not."""
        records = self._units[unit]
        offsets = [self.core.offset(unit, r.index) for r in records]
        cuts = cut([(r.name, r.param) for r in records], experts, [r.dtype for r in records], offsets)
        parts: dict[str, list[tuple[range, int | None]]] = {}
        for one in cuts or ():
            number = None
            if not at_once:
                number = self.core.cut(unit, one.ranges)
                spots: list[Spot | None] = [None] * len(records)
                for r in [records[i] for i in one.offsets]:
                    shape = (len(one.experts), *r.shape[1:]) if one.stack else r.shape
                    spots[r.index] = Spot(one.offsets[r.index], r.dtype, shape, r.stride)
                self._spots[number], self._owners[number] = spots, unit
            if one.stack:
                parts.setdefault(one.stack, []).append((one.experts, number))
            elif number is not None:
                self._rests[unit] = number
        own = {c.stack: [records[i] for i in c.offsets] for c in cuts or () if c.stack}
        for name, strands in own.items():
            whole = next((w for w in wholes if set(w.records) == set(strands)), None)
            first = strands if whole is None else whole.records
            self.stacks[first[0]] = Stacked(first, whole, parts[name])

    def cuts(self, unit: int) -> bool:
        """Is the unit never in a slot as a whole?"""
        return unit in self._owners.values()

    def unit_of(self, number: int) -> int:
        """The unit of this number, or that is cut to this one."""
        return self._owners.get(number, number)

    def look(self, slots: list[Slot]) -> None:
        """At others, or at one that has other memory: most tensors are told apart from weights by their addresses."""
        self.slots = slots                   # those that are open; all lie between these addresses
        self.lowest = min((s.address for s in slots), default=0)
        self.highest = max((s.address + s.nbytes for s in slots), default=0)

    def acquire(self, number: int) -> Slot:
        """The slot that the unit, or the cut, is in, when compute gets there."""
        slot = self._fetch(number)
        arrivals = self._model.homes.arrivals
        if arrivals.over:
            arrivals.leave()
        return slot

    def _fetch(self, number: int) -> Slot:
        model, task = self._model, in_backward()
        if task != -1 and task not in model.door.tasks and not model.handover.looks:
            model.handover.join_task()           # a backward that asks for a weight is in the model until its end
        slot = self.core.acquire(number, model.stream())
        if slot < 0:                             # only this rank's portion of it is there
            slot = ~slot
            model.delivery.gather(slot, number, self.slots[slot])
        return self.slots[slot]

    def views(self, unit: int) -> list[Tensor | None]:
        """None for stacks."""
        number = self._rests.get(unit, unit)
        return self.acquire(number).views(number, self._spots.get(number) or self._units[number])

    def parameters(self, unit: int) -> list[Tensor | None]:
        """For its modules. None for stacks."""
        number = self._rests.get(unit, unit)
        return self.acquire(number).parameters(number, self._spots.get(number) or self._units[number])

    def weights(self, unit: int, names: tuple[str, ...]) -> Weights:
        """Without stacks."""
        number = self._rests.get(unit, unit)
        return self.acquire(number).weights(number, self._spots.get(number) or self._units[number], names)

    def strands(self, piece: Piece) -> list[Tensor]:
        """Of some experts of a stack, over the slot that they are in when compute gets there."""
        if piece.cut is not None:
            views = self.acquire(piece.cut).views(piece.cut, self._spots[piece.cut])
            return [views[r.index].detach() for r in piece.records]
        views, at = self.views(piece.stacked.unit), piece.experts
        return [views[r.index].detach()[at.start:at.stop] for r in piece.records]

    def view(self, number: int, offset: int, dtype: torch.dtype, size: Any, stride: Any) -> Tensor:
        """Part of a unit's weights, or of a cut's, fetched if need be. offset: bytes from the start in its slot."""
        slot = self._fetch(number)
        with torch.no_grad():
            return slot.view(offset, dtype, size, stride)

    def locate(self, t: Tensor) -> tuple[int, int] | None:
        """(number, byte offset) when t lies in a slot that still holds the unit, or the cut, it was taken from."""
        if type(t) not in PLAIN or t.layout is not torch.strided:
            return None
        try:
            address = t.data_ptr()
        except RuntimeError:                 # a tensor of torch.func's transforms
            return None
        if not self.lowest <= address < self.highest:
            return None
        slot, unit, offset = self.core.find(address)
        return (unit, offset) if slot >= 0 and unit >= 0 else None

    def own_outputs(self, out: Any) -> Any:
        """An output that aliases a slot is copied: the slot moves on, the output stays."""
        def own(t: Tensor) -> Tensor:
            may = type(t) is DeviceParameter or (type(t) is Tensor and t._is_view())
            return t.clone() if may and self.locate(t) is not None else t

        return mapped(out, own)


# ---- weights of which each rank has fetched its portion ----

class Delivery:
    """Each rank gives the portion that it has fetched to the others, from slot to slot.

    The engine asks for that where all ranks of the machine have come to the same window (csrc/core/turn.h), and has the
    weights fetched whole where they have not. So a collective that one rank begins all begin, and in one order.

    On CUDA it goes in a stream of its own, behind the copy into the slot; compute waits for it. Python is ahead of the
    device, so it is under way beside the window before. It stands in no line with gradients: its group is its own. But
    every rank launches its gathers and all-to-alls in one order: before a gather all catch up with the rank that has
    begun most of these. So whatever a kernel stands behind in a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1: there is
    one) was launched before it on every rank, and the first of all collectives that are not over waits for local work
    alone.
    """

    def __init__(self, model: Runtime) -> None:
        self._model, self._told = model, False
        self._mates: Control | None = None
        self.shards = False      # ranks fetch their portions alone, in passes that record gradients; else each all

    # Both are made by the first that is gathered: the machine's ranks come there together.

    @property
    def _control(self) -> Control:
        ranks = self._model.ranks
        if self._mates is None:  # no cached_property: in Python 3.11 others' would wait for this one meanwhile
            self._mates = Control(ranks.data, ranks.control.patience, self._model.core, ranks.mates)
        return self._mates

    @cached_property
    def _beside(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._model.device) if self._model.is_cuda else None

    def gather(self, slot: int, number: int, memory: Slot) -> None:
        """All portions come to be in the slot; kernels that are launched from now on find them there."""
        rt, core, compute, unit = self._model, self._model.core, self._model.stream(), self._name(number)
        try:
            stream = compute if self._beside is None else self._beside.cuda_stream
            with torch.cuda.stream(self._beside) if rt.is_cuda else nullcontext():
                portions = memory.stretches(number, core.bounds(number))
                core.ready(slot, stream)
                span = core.span(_LANE, _WORK, rt.ring.unit_of(number), stream)
                if rt.is_cuda and rt.ranks.nccl():
                    self._exchange(portions, f"gathers weights of unit {unit!r}")
                else:
                    self._control.complete(portions, f"gathers weights of unit {unit!r}")
                core.span_end(span, sum(p.numel() for p in portions), stream)
            core.gathered(number, slot, stream, compute)
        except BaseException as error:               # what is in the slot is not whole, and others wait for this rank
            core.fail(f"weights of unit {unit!r} were not gathered: {error}")
            raise

    def _exchange(self, portions: list[Tensor], what: str) -> None:
        """To each rank goes this one's portion, and each one's comes here."""
        ranks, exchange = self._model.ranks, self._model.exchange
        me, nothing = ranks.mates.index(ranks.rank), portions[0][:0]
        if exchange.began:
            exchange.catch_up(self._control.most(exchange.begun))
        out = [nothing if r == me else portions[me] for r in range(len(portions))]
        into = [nothing if r == me else p for r, p in enumerate(portions)]
        with ranks.control.named(what):
            if (work := ranks.gathers(self._control).alltoall(into, out)) is not None:
                work.wait()

    def look(self) -> None:
        """Tells once that ranks open other windows, since each then waits for the others in vain."""
        found = self._model.core.astray() if self.shards and not self._told else None
        if found is None or found[2] == found[3]:        # one alone had looked at it, and has it whole
            return
        self._told, (times, other, own, its) = True, found
        there = f"rank {other} at unit {self._name(its)!r}" if its >= 0 else f"rank {other} did not come"
        warnings.warn(f"rank {self._model.ranks.rank} was at unit {self._name(own)!r} and {there}: weights that not "
                      f"all ranks come to together are fetched whole by each ({times:,} so far). Where ranks go "
                      "different ways through a model, plan={'delivery': 'whole'} spares them waiting for each other",
                      RuntimeWarning, stacklevel=2)

    def _name(self, number: int) -> str:
        return self._model.unit_names[self._model.ring.unit_of(number)]

    def __str__(self) -> str:
        gathers, astray = self._model.core.stats()["gathers"], self._model.core.astray()
        alone = f", {astray[0]:,} times not, since ranks were elsewhere" if astray else ""
        return (f"delivery: each rank fetches its portion and gathers the others' ({gathers:,} times so far{alone})"
                if self.shards else "delivery: each rank fetches whole weights")
