"""What of a unit's gradients goes to which owner, and what becomes of the parts of all ranks."""
from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..store.records import Record

_ALIGN = 16                              # bytes, at which a parcel begins in a buffer


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
        records: these. parcels: by owner. bytes: of each owner's buffer.
    """

    def __init__(self, bounds: tuple[int, ...], records: list[Record]) -> None:
        """bounds: of the portions, in bytes of plane HI: Engine.portions."""
        self.records = records
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


def pack(parcels: list[Parcel], grads: dict[Record, Tensor], buffer: Tensor) -> None:
    """Into the buffer of their owner; zeros where there is none."""
    for p in parcels:
        grad = grads.get(p.record)
        if grad is None:
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
