"""Which rows of a head's logits [T, V] a tensor has, and what was done to each number of them.

Letters: `T` tokens, `V` vocabulary.
"""
from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

Pick = tuple[list[int], list[int], int]     # shape, strides and offset, in rows


def vocabulary_dim(form: Tensor, v: int) -> int | None:
    """The dimension along which a row of v logits lies, while `form` is made of whole rows.

    Operations are followed from whole rows to whole rows only, so that everything else is a multiple of v.
    """
    mine = [d for d in range(form.dim()) if form.shape[d] == v > 1 and form.stride(d) == 1]
    return mine[0] if len(mine) == 1 and form.numel() else None


def pick_of(form: Tensor, v: int, order: list[int]) -> Pick:
    """The rows of `form` in the order of these dimensions."""
    return [form.shape[d] for d in order], [form.stride(d) // v for d in order], form.storage_offset() // v


def is_all(pick: Pick, rows: int) -> bool:
    """Is it every one of `rows` rows, in order?"""
    shape, strides, _ = pick
    dense = torch.empty(shape, device="meta").stride()
    return math.prod(shape) == rows and all(a == b or n == 1 for a, b, n in zip(strides, dense, shape))


def numbers(picks: tuple[Pick, ...], rows: Tensor) -> Tensor | None:
    """Numbers of the picked rows, [picked] int64; None: all, in order."""
    index = None
    for shape, strides, offset in picks:
        index = torch.arange(rows.shape[0], device=rows.device) if index is None else index
        index = index.as_strided(shape, strides, index.storage_offset() + offset).reshape(-1).contiguous()
    return index


@dataclasses.dataclass(frozen=True)
class Curve:
    """What was done to each logit x: scale * (x + shift), or cap * tanh(scale * (x + shift)).

    shift: [V], or None for zero. cap: None: no soft cap.
    """

    scale: float = 1.0
    cap: float | None = None
    shift: Tensor | None = None

    def times(self, factor: float) -> Curve:
        if self.cap is None:
            return dataclasses.replace(self, scale=self.scale * factor)
        return dataclasses.replace(self, cap=self.cap * factor)
