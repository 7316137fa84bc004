"""Experts of a mixture in one tensor, of which some are on the device at a time.

While a window runs, a Stack stands where its module reads such a weight. The module's own code asks it for one expert
after the other (transformers' loops), or for products of rows that are sorted by expert (grouped_mm): what it gets are
tensors over slots, or 16-bit weights made of those, fetched when it asks. So the arithmetic, and the order in which a
token's rows are added, are the module's own. Experts that no row is for are not fetched. Whatever else is done with a
Stack is done with all of its experts together, which then are there at once.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..store.whole import Piece, Stacked
from .frames import check_version, refuse_create_graph
from .swap import storage_of

if TYPE_CHECKING:
    from .window import Window

_PRODUCTS = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback"}       # torch's, and transformers' in its place


class Stack(Tensor):
    """In the place of a stack of experts [E, ., .], which is frozen."""

    stacked: Stacked            # where they are
    window: Window              # which runs
    like: Tensor
    flipped: bool               # the last two dimensions have changed places

    @staticmethod
    def __new__(cls, stacked: Stacked, window: Window, like: Tensor, flipped: bool = False) -> Stack:
        """like: on the meta device, of its form."""
        return Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=like.dtype,
                                             device=window.runtime.device)

    def __init__(self, stacked: Stacked, window: Window, like: Tensor, flipped: bool = False) -> None:
        self.stacked, self.window, self.like, self.flipped = stacked, window, like, flipped
        self._last: tuple[Piece, Tensor] | None = None

    def piece(self, piece: Piece) -> Tensor:
        """[experts, ., .], as the module's code multiplies with it. Of codes one piece's weights are kept for its next
        expert; what lies over a slot is not, since the slot would be held."""
        if self._last is not None and self._last[0] is piece:
            found = self._last[1]
        else:
            self._forget()                               # first: there is one at a time
            found = piece.made(self.window.runtime.ring)
            if piece.expands:
                self._last = piece, found
                self.window.expanded[storage_of(found)] = piece
        return found.mT if self.flipped else found

    def _forget(self) -> None:
        """The piece's memory will be others', who are not to be taken for it."""
        if self._last is not None:
            self.window.expanded.pop(storage_of(self._last[1]), None)
            self._last = None

    def together(self) -> Tensor:
        """All experts at once."""
        with torch.no_grad():
            return torch.cat([self.piece(p) for p in self.stacked.pieces])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _grouped if getattr(func, "__name__", "") in _PRODUCTS else _OWN.get(func)
        if own is not None and (out := own(func, *args, **(kwargs or {}))) is not None:
            return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_whole(args), **_whole(kwargs or {}))


def _whole(value: Any) -> Any:
    return tree_map_only(Stack, Stack.together, value)


def _item(func: Any, stack: Stack, index: Any) -> Tensor | None:
    """One expert."""
    if isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool:
        index = int(index)
    if type(index) is not int:
        return None
    at = range(stack.like.shape[0])[index]
    piece = stack.stacked.piece_of(at)
    return stack.piece(piece)[at - piece.experts.start]


def _transpose(func: Any, stack: Stack, dim0: int, dim1: int) -> Tensor | None:
    """With the last two dimensions in each other's places."""
    if {dim0, dim1} not in ({1, 2}, {-2, -1}, {1, -1}, {-2, 2}):
        return None
    return Stack(stack.stacked, stack.window, stack.like.mT, not stack.flipped)


_OWN: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.__getitem__: _item, Tensor.transpose: _transpose, torch.transpose: _transpose,
    Tensor.mT.__get__: lambda func, stack, *_: _transpose(func, stack, 1, 2)}


# ---- products of rows that are sorted by expert --------------------------------------------------

def _grouped(func: Any, x: Any, stack: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor | None:
    """x [R, K] times the stack [E, K, N], row r by the expert of which offs [E], the ends of their rows, says so."""
    usual = type(stack) is Stack and isinstance(x, Tensor) and x.dim() == 2 and offs is not None
    if not usual or type(x) is Stack or bias is not None or out_dtype is not None:
        return None
    return _Product.apply(x, (func, stack, offs))


class _Product(torch.autograd.Function):
    """One product for each piece, as the module's own function makes it of those rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: tuple[Any, Stack, Tensor]) -> Tensor:
        ctx.func, stack, offs = of
        ctx.runtime, ctx.stacked, ctx.flipped = stack.window.runtime, stack.stacked, stack.flipped
        ctx.version, ctx.columns = ctx.runtime.core.version(ctx.stacked.unit), x.shape[1]
        ends, ctx.rows = [0, *offs.tolist()], []
        for piece in ctx.stacked.pieces:     # those that have rows, in order; where their experts' rows end
            first, last = ends[piece.experts.start], ends[piece.experts.stop]
            if last > first:
                ctx.rows.append((piece, first, last, offs[piece.experts.start:piece.experts.stop] - first))
        return _by_piece(ctx, x, stack.like.shape[2], ctx.rows, ctx.flipped)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        refuse_create_graph()
        check_version(ctx.runtime, ctx.stacked.unit, ctx.version)
        return _by_piece(ctx, dy, ctx.columns, ctx.rows[::-1], not ctx.flipped), None


def _by_piece(ctx: Any, x: Tensor, columns: int, rows: list[tuple[Piece, int, int, Tensor]], flipped: bool) -> Tensor:
    """x [R, K] times each row's expert: [R, columns]. Of codes one piece's weights are there at a time. Rows of no
    expert, which are behind all others, give zeros."""
    out, made = x.new_empty(x.shape[0], columns), None
    for piece, first, last, ends in rows:
        del made                             # first: there is one at a time
        made = piece.made(ctx.runtime.ring)
        out[first:last] = ctx.func(x[first:last], made.mT if flipped else made, offs=ends)
    out[max([last for _, _, last, _ in rows], default=0):] = 0
    return out
