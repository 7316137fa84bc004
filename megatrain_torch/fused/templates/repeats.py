"""Attention's gradients by cuDNN, with the same bits each time.

torch asks cuDNN for sums of dq in the order in which its blocks of keys come. The kernel here has dS in memory instead,
2 bytes a pair of query and key, and takes as many rows or heads at a time as that has room for. Milliseconds on an
H200, 28 query heads of 128 over 4 key heads, with this kernel and torch's:

    32 rows of 1,024   1.88   1.93        16 rows of 4,096   12.2   10.7        8 rows of 8,192   24.4   20.2

so it is taken for short rows, and where torch.use_deterministic_algorithms asks for it.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops

WORK = 1 << 30           # bytes of dS at a time, at least
SHORT = 1 << 11          # tokens of rows that are taken unasked
ORDERLESS = 128          # keys: two blocks of them at most, and a sum of two has no order
_refused: set[tuple[object, ...]] = set()


def grads(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool,
          scale: float, asked: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv [B, h, S, D] of q [B, hq, S, D], k and v [B, hk, S, D]; bias: [1 or B, 1 or hq, S, S]. None: there is
    no such kernel, or too much of dS; that follows from shapes, device, library and what was asked for."""
    shape = (q.dtype, q.device, q.shape, k.shape, None if bias is None else bias.shape, causal)
    step = _at_once(q, k, asked) if _known(q) and shape not in _refused else None
    if step is None:
        return None
    made = [torch.empty(t.transpose(1, 2).shape, dtype=t.dtype, device=t.device).transpose(1, 2) for t in (q, k, v)]
    near = [t if t.stride(-1) == 1 else t.contiguous() for t in (dout, q, k, v, out)]
    sums = lse.reshape(*q.shape[:3], 1)
    try:
        for row in range(0, q.shape[0], step[0]):
            for head in range(0, k.shape[1], step[1]):
                cut = _Cut(row, head, *step, k.shape[1])
                ops.attention_backward(*map(cut.of, near), cut.of(sums), cut.of_bias(bias), causal, scale,
                                       *map(cut.of, made))
    except RuntimeError as error:
        if "attention: cuDNN" not in str(error):
            raise
        _refused.add(shape)
        return None
    return made[0], made[1], made[2]


class _Cut(NamedTuple):
    """Some rows, and some key heads with their queries."""

    row: int
    head: int
    rows: int
    heads: int
    of_keys: int

    def of(self, t: Tensor) -> Tensor:
        each = t.shape[1] // self.of_keys
        return t[self.row:self.row + self.rows, self.head * each:(self.head + self.heads) * each]

    def of_bias(self, bias: Tensor | None) -> Tensor | None:
        """[1 or B, 1 or hq, ...], which stand for all."""
        if bias is None:
            return None
        bias = bias if bias.shape[0] == 1 else bias[self.row:self.row + self.rows]
        return bias if bias.shape[1] == 1 else self._replace(row=0).of(bias)


def _known(q: Tensor) -> bool:
    """Have device and library such a kernel, as far as was looked? (Ampere's and Blackwell's want other graphs.)"""
    return (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
            and (torch.backends.cudnn.version() or 0) >= 91900)


def _at_once(q: Tensor, k: Tensor, asked: bool) -> tuple[int, int] | None:
    """Rows and key heads at a time. None: torch's kernel is faster and nobody asked, or a key head is too much.

    dS takes no more than torch's kernel would, for sums of dq in fp32 and gradients of keys by query head, or WORK.
    """
    (rows, hq, queries, _), (_, hk, keys, _) = q.shape, k.shape
    if keys <= ORDERLESS and not asked:
        return None
    heads = max(WORK, 8 * q.numel()) // (2 * _padded(queries) * _padded(keys))
    if heads >= hq and (asked or max(queries, keys) <= SHORT):
        return _even(rows, heads // hq), hk
    each = heads // (hq // hk) if asked else 0
    return (1, _even(hk, min(each, hk))) if each else None


def _even(n: int, most: int) -> int:
    """How many of n at a time, in as few and as equal parts as can be."""
    return math.ceil(n / math.ceil(n / most))


def _padded(n: int) -> int:
    return -(-n // 64) * 64
