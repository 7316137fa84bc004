"""Weights of a window whose stacks of experts are on the device a few at a time (graph/stacks.py has the same for the
modules' own code).

What is left of the unit is asked for again behind each piece: meanwhile its slot may have come to hold another.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .parts import Weights


class Piece(Protocol):
    """Some experts of a stack: store/pieces.Piece.

    Attributes:
        expands: its weights are made of codes, in memory of their own.
    """

    experts: range

    @property
    def expands(self) -> bool: ...


class Stacked(Protocol):
    """A stack of experts: store/pieces.Stacked."""

    pieces: list[Piece]

    def piece_of(self, expert: int) -> Piece: ...


class Pieces(Weights):
    """Weights for one forward or backward.

    Of codes the weights of one piece of each stack are kept until the next one's are asked for; what lies over a slot
    is not, since the slot would be held.
    """

    __slots__ = ("_last", "_made", "_rest", "_rest_of", "_stacks")

    def __init__(self, rest: Callable[[], Weights], stacks: dict[str, Stacked], made: Callable[[Piece], Tensor]
                 ) -> None:
        """rest: what is left of the unit, where it is now. made: a piece's weights, fetched if need be."""
        self._rest_of, self._stacks, self._made = rest, stacks, made
        self._rest: Weights | None = None
        self._last: dict[str, tuple[Piece, Tensor]] = {}

    @property
    def rest(self) -> Weights:
        if self._rest is None:
            self._rest = self._rest_of()
        return self._rest

    @property
    def by_name(self) -> dict[str, Tensor]:
        return self.rest.by_name

    def __getitem__(self, name: str) -> Tensor:
        """Of a stack all experts, together."""
        if name not in self._stacks:
            return self.rest[name]
        return torch.cat([self.experts(name, piece.experts) for piece in self._stacks[name].pieces])

    def joint(self, names: tuple[str, ...]) -> Tensor:
        return self[names[0]] if len(names) == 1 else self.rest.joint(names)

    def groups(self, name: str, count: int) -> list[range]:
        return [piece.experts for piece in self._stacks[name].pieces]

    def experts(self, name: str, which: range) -> Tensor:
        piece = self._stacks[name].piece_of(which.start)
        if name in self._last and self._last[name][0] is piece:
            return self._last[name][1]
        self._last.pop(name, None)                       # first: there is one at a time
        self._rest = None
        found = self._made(piece)
        if piece.expands:
            self._last[name] = piece, found
        return found
