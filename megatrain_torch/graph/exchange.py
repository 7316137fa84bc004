"""Gradients of several processes: of what each rank's backward made, every rank gets the sum of its own portion.

    held       a unit's gradients, from the hand-over until all that this backward makes of the unit are there
    sent       they are on their way to the owners of their portions (all-to-all); units go in one order on every
               rank, the last unit first, as backward comes to them. Where a rank has not come to a unit, those behind
               it wait there; where it never does, they go when its backward ends
    home       parts of all ranks have come: they are added in the order of ranks, and go to host memory

A rank that has no gradient of a parameter sends zeros. That others have one it hears at the end of backward, and has
one from then on too: so `.grad` is there on every rank or on none.

The first gradients of a step are summed in fp32 here, and host memory gets the sum and (16-bit) what it rounds to;
parts of further micro-batches are added there one by one. So the order of additions is that of one process to which the
ranks' micro-batches come in turns.
"""
from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from .. import _core
from ..group.control import named_errors
from ..group.ranks import Ranks
from ..store.records import Record

SET, ADD, SUM = 0, 1, 2
_ALIGN = 16                              # bytes, at which a parcel begins in a buffer


class Model(Protocol):
    """The streamed model whose gradients these are: runtime.Runtime."""

    core: _core.Engine
    units: list[list[Record]]
    device: torch.device


class Home(Protocol):
    """Takes them to the store: handover.HandOver."""

    def ask_room(self, sums: bool) -> None: ...

    def claim(self, record: Record) -> int: ...

    def would_claim(self, record: Record) -> int: ...

    def put(self, unit: int, items: list[tuple[Any, ...]], sources: list[Tensor]) -> None: ...

    def has_come(self, unit: int, records: list[Record]) -> None: ...


class Parcel(NamedTuple):
    """Elements [first, first + n) of a parameter, `at` so many bytes in the buffer of their owner."""

    record: Record
    first: int
    n: int
    at: int

    def of(self, buffer: Tensor) -> Tensor:
        """[n], where they lie in such a buffer."""
        return buffer[self.at:self.at + self.n * self.record.dtype.itemsize].view(self.record.dtype)


class Layout:
    """What of these parameters each owner gets.

    Attributes:
        parcels: by owner. bytes: of each owner's buffer.
    """

    def __init__(self, bounds: tuple[int, ...], records: list[Record]) -> None:
        """bounds: of the portions, in bytes of plane HI: Engine.portions."""
        self.parcels: list[list[Parcel]] = []
        self.bytes: list[int] = []
        for begin, end in pairwise(bounds):
            at, own = 0, []
            for r in records:
                first, last = (min(max(b - r.offset, 0), r.nbytes) // r.dtype.itemsize for b in (begin, end))
                if last > first:
                    own.append(Parcel(r, first, last - first, at))
                    at += -(-(last - first) * r.dtype.itemsize // _ALIGN) * _ALIGN
            self.parcels.append(own)
            self.bytes.append(at)


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
        self.began = False                   # some gradient of the backward under way is to be exchanged

    # ---- in backward ----

    def offer(self, unit: int, pairs: list[tuple[Record, Tensor]]) -> None:
        """Gradients that a window handed over, each of the record's form and on the compute device."""
        held = self._held.setdefault(unit, {})
        for record, grad in pairs:
            held[record] = held[record] + grad if record in held else grad
        while self._turn >= 0 and (not self._trained(self._turn) or self._is_whole(self._turn)):
            self._send_next()
        while self._sent and self._sent[0].work.is_completed():
            self._bring_home(self._sent.popleft())

    def _is_whole(self, unit: int) -> bool:
        """Nothing more of the unit is to come, as far as can be known."""
        return unit in self._held and not any(r.open for r in self._trained(unit))

    def joins(self) -> None:
        """A gradient of this backward is to be exchanged, here or on another rank."""
        if not self.began:
            self._home.ask_room(sums=True)           # here, where all ranks come in one order
            self.began, self._turn = True, len(self._model.units) - 1

    def ends(self) -> None:
        """The backward is over: what was not sent goes, and all is brought home."""
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
        self._held.clear()
        self._sent.clear()
        self._own.clear()
        self.began, self._turn = False, -1

    def whole(self, grad: Tensor) -> Tensor:
        """The sum of a gradient that autograd wants itself, on the host: of its form and type."""
        return _total(self._ranks.control.parts(grad), self._scale).to(grad.dtype)

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
        device, size = self._model.device, self._ranks.size
        outward = torch.empty(sum(layout.bytes), dtype=torch.uint8, device=device)
        inward = torch.empty(size * layout.bytes[self._ranks.rank], dtype=torch.uint8, device=device)
        for parcels, buffer in zip(layout.parcels, torch.split(outward, layout.bytes)):
            _pack(parcels, grads, buffer)
        with named_errors(f"exchanges gradients of unit {unit}"):
            work = dist.all_to_all_single(inward, outward, [layout.bytes[self._ranks.rank]] * size, layout.bytes,
                                          group=self._ranks.data, async_op=True)
        self._sent.append(Sent(unit, layout, set(grads), work, (inward, outward)))

    @torch.no_grad()
    def _bring_home(self, sent: Sent) -> None:
        with named_errors(f"exchanges gradients of unit {sent.unit}"):
            sent.work.wait()
        modes = {r: self._home.claim(r) if r in sent.own else self._home.would_claim(r)
                 for r in self._trained(sent.unit)}
        parts = tuple(sent.buffers[0].view(self._ranks.size, -1))
        own = sent.layout.parcels[self._ranks.rank]
        first, later, sources = self._items(own, parts, modes)
        self._home.put(sent.unit, first, sources)
        for items in later:
            self._home.put(sent.unit, items, list(parts))

    def _items(self, own: list[Parcel], parts: tuple[Tensor, ...], modes: dict[Record, int]
               ) -> tuple[list[tuple[Any, ...]], list[list[tuple[Any, ...]]], list[Tensor]]:
        """What is put first, and one after the other behind it; and the memory that these lie in. A parameter of
        which nothing is this rank's is put too: the engine knows then that it has come."""
        first: list[tuple[Any, ...]] = []
        later: list[list[tuple[Any, ...]]] = [[] for _ in range(self._ranks.size - 1)]
        sources: list[Tensor] = list(parts)
        mine = {p.record: p for p in own}
        for r, mode in modes.items():
            found = [mine[r].of(part) for part in parts] if r in mine else []
            if mode == ADD:
                reread, r.written = int(r.written), False
                at = [_address(part if self._scale == 1.0 else part.mul_(self._scale)) for part in found]
                at = at or [0] * self._ranks.size
                first.append((r.index, at[0], ADD, reread))
                for items, address in zip(later, at[1:]):
                    items.append((r.index, address, ADD, 0))
                continue
            total = _total(found, self._scale) if found else None
            rounded = None if total is None else total.to(r.dtype)
            sources += [t for t in (total, rounded) if t is not None]
            half = r.dtype.itemsize == 2
            first.append((r.index, _address(rounded), SUM, 0, _address(total)) if half else
                         (r.index, _address(total), SET, 0))
        return first, [items for items in later if items], sources


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _pack(parcels: list[Parcel], grads: dict[Record, Tensor], buffer: Tensor) -> None:
    for p in parcels:
        grad = grads.get(p.record)
        if grad is None:
            p.of(buffer).zero_()
        else:
            p.of(buffer).copy_(grad.as_strided((p.n,), (1,), grad.storage_offset() + p.first))


def _total(parts: list[Tensor], scale: float) -> Tensor:
    """Their sum in the order of ranks, in fp32 (fp64 of such): of their form."""
    kind = torch.float32 if parts[0].dtype.itemsize == 2 else parts[0].dtype
    total = parts[0].to(kind, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total if scale == 1.0 else total.mul_(scale)
