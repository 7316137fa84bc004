"""Gradients of several processes: of what each rank's backward made, every rank gets the sum of its own portion.

    held       a unit's gradients, from the hand-over until all that this backward makes of the unit are there
    ready      this rank has told the others of which parameters of the unit it has gradients. Units are told in one
               order on every rank, the last unit first. A unit that a backward has passed by is told as one without
               gradients, and so are all that are left when it ends
    sent       every rank has told the same of the unit: its gradients are on their way to the owners of their portions
               (all-to-all). Nothing is sent of a unit of which no rank has any; a rank that lacks one sends zeros
    home       parts of all ranks have come: they are added in the order of ranks, and go to host memory

So `.grad` is there on every rank or on none.

No rank begins an all-to-all that another begins only when its backward is over. So a rank may wait on the host for what
it has begun, wherever that happens: in the driver (cudaHostUnregister and cudaFree wait for running kernels), behind a
kernel in the same hardware queue, or in user code that reads a value. (1) A rank waits for sent units alone, or for
others to tell of a unit that it has told. (2) Telling waits for nobody. (3) The rank that has sent the fewest units
waits for none: all it has sent, all have sent, and of the next one all have told.

Where a rank has a tensor of its own in `.grad`, or over plane GRAD, which all hear as backward begins, every rank gets
the whole sum at its end, and adds it there. A backward that is broken off on one rank is over on the others with an
error: what it owes them it sends when its script goes on.

Parts of 16 bits are summed in fp32, and that sum is rounded once: it is what one process has as a micro-batch's
gradient, and so are further micro-batches added to it. On CUDA all this is put in a stream of its own, beside compute,
which waits there for nothing but memory: at most two units' gradients are held until they are packed.
"""
from __future__ import annotations

import os
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from .. import _core, ops
from ..base.errors import MegatrainError
from ..group.control import most
from ..group.ranks import Ranks
from ..store import gradient
from ..store.records import Record

if TYPE_CHECKING:
    from ..model.runtime import Runtime
    from .handover import HandOver

_ROW = 4096                              # bytes that are summed by a few threads: a buffer has whole rows
_SUMMED = {torch.bfloat16, torch.float16, torch.float32}
_ALIGN = 16                              # bytes, at which a parcel begins in a buffer
LANE, WORK = _core.LANES["exchange"], _core.WORKS["offload"]


class Parcel(NamedTuple):
    """Elements [first, first + n) of a parameter, `at` so many bytes in their owner's buffer."""

    record: Record
    first: int
    n: int
    at: int

    def of(self, buffer: Tensor) -> Tensor:
        """[n], where they lie in such a buffer."""
        return buffer[self.at:self.at + self.n * self.record.dtype.itemsize].view(self.record.dtype)


class Layout:
    """What of these parameters each owner gets."""

    def __init__(self, bounds: tuple[int, ...], records: list[Record]) -> None:
        """bounds: of the portions, in bytes of plane HI: Engine.portions."""
        self.records = records
        self.parcels: list[list[Parcel]] = []        # by owner
        self.bytes: list[int] = []                   # of each owner's buffer
        for begin, end in pairwise(bounds):
            at, own = 0, []
            for r in records:
                first, last = (min(max(b - r.offset, 0), r.nbytes) // r.dtype.itemsize for b in (begin, end))
                if last > first:
                    own.append(Parcel(r, first, last - first, at))
                    at += -(-(last - first) * r.dtype.itemsize // _ALIGN) * _ALIGN
            self.parcels.append(own)
            self.bytes.append(-(-at // _ROW) * _ROW)
        kinds = {r.dtype for r in records}
        self.kind = kinds.pop() if len(kinds) == 1 and kinds <= _SUMMED else None        # of all; None: of each its own

    def total(self, rank: int, parts: Tensor, scale: float) -> dict[Record, Tensor]:
        """What is this rank's of each: `total` of all ranks' parts. parts: [bytes], one rank's behind another's."""
        own = self.parcels[rank]
        if self.kind is None:
            each = parts.view(len(self.bytes), -1).unbind()
            return {p.record: total([p.of(part) for part in each], scale).to(p.record.dtype) for p in own}
        rows = parts.view(self.kind).view(-1, _ROW // self.kind.itemsize)
        place = torch.arange(len(rows), device=rows.device).view(len(self.bytes), -1).t().flatten()
        found = ops.sum_rows(rows, place, self.bytes[rank] // _ROW, factor=scale).view(-1).view(torch.uint8)
        return {p.record: p.of(found) for p in own}


def pack(parcels: list[Parcel], grads: dict[Record, Tensor], buffer: Tensor) -> None:
    """Into the buffer of their owner; zeros where there is none."""
    for p in parcels:
        if (grad := grads.get(p.record)) is None:
            p.of(buffer).zero_()
        else:
            p.of(buffer).copy_(grad.as_strided((p.n,), (1,), grad.storage_offset() + p.first))


def total(parts: list[Tensor], scale: float) -> Tensor:
    """Their sum in the order of ranks, in fp32 (fp64 of such): of their form."""
    kind = torch.float32 if parts[0].dtype.itemsize == 2 else parts[0].dtype
    total = parts[0].to(kind, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total if scale == 1.0 else total.mul_(scale)


class Sent(NamedTuple):
    """A unit's gradients on their way."""

    unit: int
    layout: Layout
    records: list[Record]                # those of which some rank has one
    work: Any
    buffers: tuple[Tensor, Tensor]
    span: int | None                     # of a trace


class Exchange:
    def __init__(self, model: Runtime, home: HandOver, ranks: Ranks, mean: bool) -> None:
        self._model, self._home, self._ranks = model, home, ranks
        # Two models' units would meet in one group where a rank has not all of them: its order is another then.
        self._group = ranks.data if model.is_cuda else ranks.control.carrier("gradients")
        self._scale = 1 / ranks.size if mean else 1.0
        self._telling = ranks.control.carrier("units")
        self._held: dict[int, dict[Record, Tensor]] = {}
        # Units of which this rank has told: layout; its gradients, None if there are none; by parameter, whether any
        # rank has one, when the work that comes last is over.
        self._ready: deque[tuple[int, Layout, Tensor | None, Tensor, Any]] = deque()
        self._sent: deque[Sent] = deque()
        self._turn = -1                      # the unit that is told next; -1: all were
        self.begun = 0                       # all-to-alls of this backward
        self._came: dict[int, set[Record]] = {}      # by unit, what has come home and was not told
        self._layouts: dict[int, Layout] = {}
        # Memory that is asked for in it is used there alone.
        self._beside = torch.cuda.Stream(model.device) if model.is_cuda else None
        self._packed: deque[torch.cuda.Event] = deque()      # of the last two units
        # NCCL's waits are the stream's, unless told to block. gloo's are the host's, for which ranks may wait in turn.
        self._by_streams = self._beside is not None and ranks.nccl() and not any(
            os.environ.get(name, "0") != "0" for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))
        self._routed: dict[Record, list[RemovableHandle]] = {}       # parameters whose gradients autograd adds up
        self._stood: dict[Record, Tensor | None] = {}        # their `.grad`, while autograd has a new one
        self._routes: list[tuple[Record, Tensor]] = []       # what autograd has added up in this backward
        self._entire: dict[Record, Tensor | None] = {}       # of which every rank gets the whole sum; what this one has
        self._error = ""                     # why this backward fails on all ranks
        self._added = False                  # room for sums of gradients was asked for
        self._steps = 0                      # by which ranks see that a backward of one meets another's next one
        self.began = False                   # some gradient of the backward under way is to be exchanged

    # ---- in backward ----

    def offer(self, unit: int, pairs: list[tuple[Record, Tensor]]) -> None:
        """Gradients that a window handed over, each of the record's form and on the compute device."""
        for record, grad in pairs:
            self._hold(record, grad)
        self._send_ready()                   # so that no more than one unit is packed and not sent
        # Told is a unit of which nothing more is to come, as far as can be known: it was handed over, or passed by.
        while self._turn >= 0 and not any(r.open for r in self._trained(self._turn)) and any(
                held <= self._turn for held in self._held):
            self._tell_next()

    def _hold(self, record: Record, grad: Tensor) -> None:
        held = self._entire if record in self._entire else self._held.setdefault(record.unit, {})
        held[record] = grad if (before := held.get(record)) is None else before + grad

    def route(self, record: Record) -> None:
        """Where autograd itself adds a gradient to this parameter's `.grad` (the parameter took part in arithmetic on
        the host, was given to a Function as it is, or has hooks), what that comes to on this rank is exchanged as
        others are, and `.grad` gets the sum alone."""
        p, handles = record.param, self._routed.pop(record, [])
        for handle in handles:               # hooks came since, and are to see the gradient before it is taken
            handle.remove()
        if record.trainable:
            self._routed[record] = [p.register_hook(lambda grad: self._stand_aside(record, grad)),
                                    p.register_post_accumulate_grad_hook(lambda _: self._take_over(record))]

    def hooks(self, record: Record) -> int:
        return len(self._routed.get(record, ()))

    def close(self) -> None:
        """Parameters are ordinary ones again."""
        for handles in self._routed.values():
            for handle in handles:
                handle.remove()
        self._routed.clear()

    def _stand_aside(self, record: Record, grad: Tensor | None) -> None:
        if grad is not None:                 # else it was streamed
            self._stood[record] = gradient.standing(record)
            gradient.stand(record, None)

    def _take_over(self, record: Record) -> None:
        """In whichever thread autograd has for the host."""
        if record not in self._stood:
            return
        own = gradient.standing(record)
        gradient.stand(record, self._stood.pop(record))
        if own is None:
            self._error = (f"{record.name}: its gradient was gone before that of all ranks was known; a hook may "
                           "change it in place, but an update in backward is mt.AdamW(in_backward=True)")
        else:
            self._routes.append((record, own))
        self._home.join_task()

    def joins(self) -> None:
        """A gradient of this backward is to be exchanged, here or on another rank."""
        if not self.began:
            records, step = [r for unit in self._model.units for r in unit], self._steps % 256
            trained, n = [r.was_trainable for r in records], len(records)
            there = [r for r in records if r not in self._stood and r.was_trainable and r.numel
                     and (gradient.standing(r) is not None or gradient.kept(r))]
            adds_to = {r for r in there if gradient.take_back(r)}
            foreign = set(there) - adds_to
            said = [*(r in foreign for r in records), *trained, *(not t for t in trained), bool(adds_to), step,
                    255 - step]
            *found, adds, most, least = self._ranks.control.any_of(torch.tensor(said, dtype=torch.uint8)).tolist()
            kept, on, off = found[:n], found[n:2 * n], found[2 * n:]
            if differ := [r.name for r, some, others in zip(records, on, off) if some and others]:
                raise MegatrainError(f"requires_grad is not the same in all processes: of {', '.join(differ[:3])} "
                                     f"({len(differ)} in all) some train it and others do not")
            if most != 255 - least:
                raise MegatrainError(f"rank {self._ranks.rank}: this backward comes after {self._steps} steps, and on "
                                     "another rank after another number: a backward has reached no trained parameter "
                                     "on one rank, and on all it has to reach some, or on none")
            self._home.ask_room(sums=False)
            if adds:
                self._ask_for_sums()
            self._entire = {r: None for r, bit in zip(records, kept) if bit}
            self.began, self._turn = True, len(self._model.units) - 1

    def stepped(self) -> None:
        """An optimizer of the model's has made a step."""
        self._steps += 1

    def _ask_for_sums(self) -> None:
        """Room, once, and whatever plans say that each rank makes for itself: all ask here, in one order."""
        if not self._added:
            self._added = True
            self._model.room.sums(self._model.core)

    def ends(self) -> None:
        """The backward is over: what was not sent goes, and all is brought home. Raises: on every rank, where it failed
        on one."""
        if self._routes or self._error:
            self.joins()
        for record, grad in self._routes:
            self._hold(record, self._home.conform(record, grad.detach().to(self._model.device)))
        self._routes.clear()
        if self.began and (why := self._finish()):
            raise MegatrainError(why)

    def sweep(self) -> None:
        """Nothing is under way, unless a backward raised: then the others hear of it."""
        for record, stood in self._stood.items():
            gradient.stand(record, stood)
        if self.began:
            self._error = "its backward was broken off"
            self._finish()
        self._forget()

    def _forget(self) -> None:
        for what in (self._held, self._ready, self._sent, self._came, self._stood, self._routes):
            what.clear()
        self._entire = {}
        self.began, self._turn, self.begun, self._error = False, -1, 0, ""

    def _finish(self) -> str:
        """What was not sent goes, what came is told, until no rank has more. Why it failed, here or on another rank;
        "": it did not."""
        more = True
        try:
            while more:
                while self._turn >= 0:
                    self._tell_next()
                self._send_ready()
                while self._sent:
                    self._bring_home(self._sent.popleft())
                # Has any rank a gradient of one that is whole everywhere, or of units that were told; does one fail?
                own = [grad is not None for grad in self._entire.values()]
                bits = torch.tensor([*own, bool(self._held), bool(self._error)], dtype=torch.uint8)
                *some, more, failed = self._ranks.control.any_of(bits).tolist()
                for record in [r for r, bit in zip(self._entire, some) if bit]:
                    self._add_entire(record)
                if not failed:
                    for unit in sorted(self._came, reverse=True):
                        self._home.has_come(unit, sorted(self._came[unit], key=lambda r: r.index))
                if more:                             # of units that have gradients by now
                    self._ask_for_sums()
                self._came.clear()
                self._turn = len(self._model.units) - 1
            texts = self._ranks.gather(self._error) if failed else []
            return self._error or next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")
        finally:
            self._forget()

    @torch.no_grad()
    def _add_entire(self, record: Record) -> None:
        own, self._entire[record] = self._entire[record], None
        sent = torch.empty_strided(record.shape, record.stride, dtype=record.dtype)
        whole = total(self._ranks.control.parts(sent.zero_() if own is None else sent.copy_(own)), self._scale)
        gradient.current(record)                  # a late one becomes a tensor
        gradient.add(record, whole.to(record.dtype))

    # ---- a unit's way ----

    def _trained(self, unit: int) -> list[Record]:
        return [r for r in self._model.units[unit] if r.was_trainable and r.numel and r not in self._entire]

    @torch.no_grad()
    def _tell_next(self) -> None:
        unit, self._turn = self._turn, self._turn - 1
        records, layout, grads = self._trained(unit), self._layouts.get(unit), self._held.pop(unit, {})
        if not records:
            return
        if layout is None or layout.records != records:
            layout = self._layouts[unit] = Layout(self._model.core.portions(unit), records)
        found = torch.tensor([r in grads for r in records], dtype=torch.uint8)
        told, packed = self._telling.allreduce([found], most()), None
        if grads:
            if self._beside is not None:             # what compute was given up to now comes before
                self._beside.wait_stream(torch.cuda.current_stream())
            with self._entered():
                packed = torch.empty(sum(layout.bytes), dtype=torch.uint8, device=self._model.device)
                for parcels, buffer in zip(layout.parcels, torch.split(packed, layout.bytes)):
                    pack(parcels, grads, buffer)
            if self._beside is not None:
                self._packed.append(self._beside.record_event())
                for grad in grads.values():
                    grad.record_stream(self._beside)
                if len(self._packed) > 2:
                    torch.cuda.current_stream().wait_event(self._packed.popleft())
        self._ready.append((unit, layout, packed, found, told))

    def _send_ready(self) -> None:
        """What was told goes, when the others have told of it too."""
        while self._ready:
            self._send_next()
        while self._sent and self._sent[0].work.is_completed():
            self._bring_home(self._sent.popleft())

    def catch_up(self, begun: int) -> None:
        """Another rank has begun so many."""
        while self.begun < begun:
            self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        (unit, layout, packed, found, told), device = self._ready.popleft(), self._model.device
        self._ranks.control.until(told, f"waits for others to come to gradients of unit {unit}")
        records = [r for r, bit in zip(layout.records, found.tolist()) if bit]
        if not records:
            return
        self.begun += 1
        sizes, own, how = layout.bytes, layout.bytes[self._ranks.rank], dist.AllToAllOptions()
        how.asyncOp = True
        with self._entered():
            outward = torch.zeros(sum(sizes), dtype=torch.uint8, device=device) if packed is None else packed
            inward = torch.empty(self._ranks.size * own, dtype=torch.uint8, device=device)
            with self._ranks.control.named(f"exchanges gradients of unit {unit}"):
                span = self._model.core.span(LANE, WORK, unit, self._stream())
                work = self._group.alltoall_base(inward, outward, [own] * self._ranks.size, sizes, how)
        sent = Sent(unit, layout, records, work, (inward, outward), span)
        if self._by_streams:
            self._bring_home(sent)
        else:
            self._sent.append(sent)

    def _stream(self) -> int:
        return 0 if self._beside is None else self._beside.cuda_stream

    def _entered(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)

    @torch.no_grad()
    def _bring_home(self, sent: Sent) -> None:
        with self._entered():
            with self._ranks.control.named(f"exchanges gradients of unit {sent.unit}"):
                sent.work.wait()
            self._model.core.span_end(sent.span, sent.buffers[1].numel(), self._stream())
            mine = sent.layout.total(self._ranks.rank, sent.buffers[0], self._scale)
            items: list[tuple[Any, ...]] = []
            sources: list[Tensor] = []
            for r in sent.records:
                if (found := gradient.claim(r)) is None:
                    self._error = self._error or (f"{r.name}: somebody took its .grad while backward ran, and further "
                                                  "gradients of several processes cannot be added to that")
                    continue
                # One of which nothing is this rank's is put too: the engine knows then that it has come.
                grad = mine.get(r)
                sources += [] if grad is None else [grad]
                items.append((r.index, 0 if grad is None else grad.data_ptr(), *found))
                self._came.setdefault(sent.unit, set()).add(r)
            if items:
                self._home.put(sent.unit, items, sources, self._stream() or None)
