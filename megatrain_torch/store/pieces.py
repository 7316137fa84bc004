"""Experts of a mixture in one parameter, of which some are fetched by themselves: base/stacks.py."""
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .. import ops
from .records import Record
from .whole import Whole


class Located(Protocol):
    """Knows where on the device a piece is: ring.Ring."""

    def strands(self, piece: Piece) -> list[Tensor]: ...


class Stacked:
    """A stack of experts.

    Attributes:
        records: of its strands; the first stands for the weight. whole: it is codes; None: it is not.
        pieces: of so many experts each, but for the last one.
    """

    def __init__(self, records: list[Record], whole: Whole | None, parts: list[tuple[range, int | None]]) -> None:
        """parts: experts, and the engine's number for the cut that they are; None: their unit is one fetch."""
        self.records, self.whole = records, whole
        self.pieces = [Piece(self, experts, number) for experts, number in parts]

    @property
    def unit(self) -> int:
        return self.records[0].unit

    @property
    def like(self) -> Tensor:
        """On the meta device, of the form of the weight."""
        if self.whole is not None:
            return torch.empty(self.whole.param.shape, dtype=self.whole.param.dtype, device="meta")
        r = self.records[0]
        return torch.empty_strided(r.shape, r.stride, dtype=r.dtype, device="meta")

    def piece_of(self, expert: int) -> Piece:
        return self.pieces[expert // len(self.pieces[0].experts)]


class Piece:
    """Some experts of a stack.

    Attributes:
        cut: the engine's number for it; None: its unit is fetched, or lives on the device, as a whole.
    """

    __slots__ = ("cut", "experts", "stacked")

    def __init__(self, stacked: Stacked, experts: range, cut: int | None) -> None:
        self.stacked, self.experts, self.cut = stacked, experts, cut

    @property
    def records(self) -> list[Record]:
        return self.stacked.records

    @property
    def expands(self) -> bool:
        """Its weights are made of codes, in memory of their own."""
        return self.stacked.whole is not None

    def made(self, ring: Located) -> Tensor:
        """[experts, ., .] on the device, fetched if need be: over a slot, or 16-bit weights made of that."""
        strands, whole = ring.strands(self), self.stacked.whole
        if whole is None:
            return strands[0]
        coding = whole.format.coding(whole.param)
        shape = (len(self.experts), *coding.shape[1:])
        out = torch.empty(shape, dtype=coding.dtype, device=strands[0].device)
        by_name = dict(zip(whole.names, strands))
        ops.expand_codes_(out, coding.form, *(by_name[name] for name in coding.strands), group=coding.group)
        return out

    def theirs(self, ring: Located) -> Tensor:
        """Of codes: the same, as the package's code makes it."""
        whole = self.stacked.whole
        with torch.no_grad():
            return whole.format.whole(whole.param, dict(zip(whole.names, ring.strands(self))))
