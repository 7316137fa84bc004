"""Gradients of several processes: of what each rank's backward made, every rank gets the sum of its own portion.

    held       a unit's gradients, from the hand-over until all that this backward makes of the unit are there
    sent       they are on their way to the owners of their portions (all-to-all); units go in one order on every
               rank, the last unit first, as backward comes to them. Where a rank has not come to a unit, those behind
               it wait there; where it never does, they go when its backward ends
    home       parts of all ranks have come: they are added in the order of ranks, and go to host memory

A rank that has no gradient of a parameter sends zeros. That others have one it hears at the end of backward, and has
one from then on too: so `.grad` is there on every rank or on none.

Parts of 16 bits are summed in fp32. Of a step's first micro-batch host memory gets that sum, and what it rounds to; the
sums of further ones are added there as they are, in the order of micro-batches.

On CUDA all this is put in a stream of its own, beside compute, which waits there for nothing but memory: at most two
units' gradients are held until they are packed.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from .. import _core
from ..group.ranks import Ranks
from ..store import gradient
from ..store.records import Record
from .parcels import Layout, Parcel, pack, total

ADD, SUM = 1, 2


class Room(Protocol):
    """Refuses what does not fit in host memory: room.Room."""

    def gradients(self, core: _core.Engine) -> None: ...

    def sums(self, core: _core.Engine) -> None: ...


class Model(Protocol):
    """The streamed model whose gradients these are: runtime.Runtime."""

    core: _core.Engine
    units: list[list[Record]]
    device: torch.device

    @property
    def room(self) -> Room: ...


class Home(Protocol):
    """Takes them to the store: handover.HandOver."""

    def join_task(self) -> None: ...

    def conform(self, record: Record, grad: Tensor) -> Tensor: ...

    def claim(self, record: Record) -> int: ...

    def would_claim(self, record: Record) -> int | None: ...

    def put(self, unit: int, items: list[tuple[Any, ...]], sources: list[Tensor], stream: int | None) -> None: ...

    def has_come(self, unit: int, records: list[Record]) -> None: ...


class Sent(NamedTuple):
    """A unit's gradients on their way. own: the parameters of which this rank has some."""

    unit: int
    layout: Layout
    own: set[Record]
    work: Any
    buffers: tuple[Tensor, Tensor]


class Exchange:
    def __init__(self, model: Model, home: Home, ranks: Ranks, mean: bool) -> None:
        self._model, self._home, self._ranks = model, home, ranks
        self._scale = 1 / ranks.size if mean else 1.0
        self._held: dict[int, dict[Record, Tensor]] = {}
        self._sent: deque[Sent] = deque()
        self._turn = -1                      # the unit that is sent next; -1: all were
        self._own: set[Record] = set()       # this backward's so far
        self._layouts: dict[int, tuple[list[Record], Layout]] = {}
        self._beside = Beside(model.device) if model.device.type == "cuda" else None
        self._routed: dict[Record, list[RemovableHandle]] = {}       # parameters whose gradients autograd adds up
        self._stood: dict[Record, Tensor | None] = {}        # their `.grad`, while autograd has a new one
        self._routes: list[tuple[Record, Tensor]] = []       # what autograd has added up in this backward
        self._asked = False                  # for room
        self.began = False                   # some gradient of the backward under way is to be exchanged

    # ---- in backward ----

    def offer(self, unit: int, pairs: list[tuple[Record, Tensor]]) -> None:
        """Gradients that a window handed over, each of the record's form and on the compute device."""
        held = self._held.setdefault(unit, {})
        for record, grad in pairs:
            held[record] = held[record] + grad if record in held else grad
        while self._turn >= 0 and (not self._trained(self._turn) or self._is_whole(self._turn)):
            self._send_next()
        while self._sent and (self._beside is not None or self._sent[0].work.is_completed()):
            self._bring_home(self._sent.popleft())

    def _is_whole(self, unit: int) -> bool:
        """Nothing more of the unit is to come, as far as can be known."""
        return unit in self._held and not any(r.open for r in self._trained(unit))

    def route(self, record: Record) -> None:
        """Where autograd itself adds a gradient to this parameter's `.grad` (the parameter took part in arithmetic on
        the host, was given to a Function as it is, or has hooks), what that comes to on this rank is exchanged as
        others are, and `.grad` gets the sum alone."""
        if record not in self._routed and record.trainable:
            p = record.param
            self._routed[record] = [p.register_hook(lambda grad: self._stand_aside(record, grad)),
                                    p.register_post_accumulate_grad_hook(lambda _: self._take_over(record))]

    def hooks(self, record: Record) -> int:
        """That a parameter has from here."""
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
        self._routes.append((record, gradient.standing(record)))
        gradient.stand(record, self._stood.pop(record))
        self._home.join_task()

    def joins(self) -> None:
        """A gradient of this backward is to be exchanged, here or on another rank."""
        if not self.began:
            self._ask_room()
            self.began, self._turn = True, len(self._model.units) - 1

    def _ask_room(self) -> None:
        """Once, and whatever plans say that each rank makes for itself: all ask here, in one order."""
        if not self._asked:
            self._asked = True
            self._model.room.gradients(self._model.core)
            self._model.room.sums(self._model.core)

    def ends(self) -> None:
        """The backward is over: what was not sent goes, and all is brought home."""
        if self._routes:
            self.joins()
        for record, grad in self._routes:
            self._held.setdefault(record.unit, {})[record] = self._home.conform(record, grad.to(self._model.device))
        self._routes.clear()
        if not self.began:
            return
        more = True
        while more:
            some, more = self._any_rank()
            while self._turn >= 0:
                if any(r in some for r in self._trained(self._turn)):
                    self._send_next()
                else:
                    self._turn -= 1
            while self._sent:
                self._bring_home(self._sent.popleft())
            for record in sorted(some - self._own, key=lambda r: r.pid):
                self._home.claim(record)
            self._tell(some)
            self._own.clear()
            self._turn = len(self._model.units) - 1
        self.sweep()

    def _any_rank(self) -> tuple[set[Record], bool]:
        """Of which parameters any rank has a gradient; and whether one has some of units that were sent without."""
        records = [r for unit in self._model.units for r in unit]
        own = set(self._own)
        for unit, held in self._held.items():
            if unit <= self._turn:
                own.update(held)
        late = any(unit > self._turn for unit in self._held)
        bits = torch.tensor([*(r in own for r in records), late], dtype=torch.uint8)
        found = self._ranks.control.any_of(bits).tolist()
        return {r for r, bit in zip(records, found) if bit}, bool(found[-1])

    def _tell(self, some: set[Record]) -> None:
        units: dict[int, list[Record]] = {}
        for r in some:
            units.setdefault(r.unit, []).append(r)
        for unit in sorted(units, reverse=True):
            self._home.has_come(unit, sorted(units[unit], key=lambda r: r.index))

    def sweep(self) -> None:
        """Nothing is under way: at the end, or after a backward that raised."""
        for record, stood in self._stood.items():
            gradient.stand(record, stood)
        for what in (self._held, self._sent, self._own, self._stood, self._routes):
            what.clear()
        self.began, self._turn = False, -1

    # ---- a unit's way ----

    def _trained(self, unit: int) -> list[Record]:
        return [r for r in self._model.units[unit] if r.was_trainable and r.numel]

    def _layout(self, unit: int) -> Layout:
        records = self._trained(unit)
        known = self._layouts.get(unit)
        if known is None or known[0] != records:
            known = self._layouts[unit] = records, Layout(self._model.core.portions(unit), records)
        return known[1]

    @torch.no_grad()
    def _send_next(self) -> None:
        unit, self._turn = self._turn, self._turn - 1
        if not self._trained(unit):
            return
        layout, grads = self._layout(unit), self._held.pop(unit, {})
        self._own.update(grads)
        with nullcontext() if self._beside is None else self._beside.packing(grads.values()):
            self._sent.append(self._send(unit, layout, grads))

    def _send(self, unit: int, layout: Layout, grads: dict[Record, Tensor]) -> Sent:
        device, own, size = self._model.device, layout.bytes[self._ranks.rank], self._ranks.size
        outward = torch.empty(sum(layout.bytes), dtype=torch.uint8, device=device)
        inward = torch.empty(size * own, dtype=torch.uint8, device=device)
        for parcels, buffer in zip(layout.parcels, torch.split(outward, layout.bytes)):
            pack(parcels, grads, buffer)
        with self._ranks.control.named(f"exchanges gradients of unit {unit}"):
            work = dist.all_to_all_single(inward, outward, [own] * size, layout.bytes, group=self._ranks.data,
                                          async_op=True)
        return Sent(unit, layout, set(grads), work, (inward, outward))

    @torch.no_grad()
    def _bring_home(self, sent: Sent) -> None:
        with nullcontext() if self._beside is None else self._beside.entered():
            self._bring(sent)

    def _bring(self, sent: Sent) -> None:
        with self._ranks.control.named(f"exchanges gradients of unit {sent.unit}"):
            sent.work.wait()
        modes = {r: self._home.claim(r) if r in sent.own else self._home.would_claim(r)
                 for r in self._trained(sent.unit)}
        parts = tuple(sent.buffers[0].view(self._ranks.size, -1))
        own = sent.layout.parcels[self._ranks.rank]
        items, sources = self._items(own, parts, modes)
        self._home.put(sent.unit, items, sources, None if self._beside is None else self._beside.stream.cuda_stream)

    def _items(self, own: list[Parcel], parts: tuple[Tensor, ...], modes: dict[Record, int | None]
               ) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
        """What is put, and the memory that it lies in. A parameter of which nothing is this rank's is put too: the
        engine knows then that it has come."""
        items: list[tuple[Any, ...]] = []
        sources: list[Tensor] = []
        mine = {p.record: p for p in own}
        for r, mode in modes.items():
            if mode is None:
                continue
            whole = total([mine[r].of(part) for part in parts], self._scale) if r in mine else None
            rounded = None if whole is None or mode == ADD else whole.to(r.dtype)
            sources += [t for t in (whole, rounded) if t is not None]
            items.append(_item(r, mode, _address(whole), _address(rounded)))
        return items, sources


class Beside:
    """A stream beside compute. Memory that is asked for in it is used there alone."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._packed: deque[torch.cuda.Event] = deque()

    def entered(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self.stream)

    @contextmanager
    def packing(self, grads: Iterable[Tensor]) -> Iterator[None]:
        """What compute was given up to now comes before; it waits for the packing two units ago."""
        compute = torch.cuda.current_stream()
        self.stream.wait_stream(compute)
        with self.entered():
            yield
            self._packed.append(self.stream.record_event())
        for grad in grads:
            grad.record_stream(self.stream)
        if len(self._packed) > 2:
            compute.wait_event(self._packed.popleft())


def _item(r: Record, mode: int, whole: int, rounded: int) -> tuple[Any, ...]:
    """For Engine.offload. whole, rounded: addresses of the sum, and of what it rounds to."""
    reread, half = 0, r.dtype.itemsize == 2
    if mode == ADD:
        reread, r.written = int(r.written), False
    elif half:
        mode = SUM
    return (r.index, rounded, mode, reread, whole) if half else (r.index, whole, mode, reread)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
