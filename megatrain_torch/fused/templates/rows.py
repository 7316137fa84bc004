"""Causal attention over a long row, some of its queries at a time.

A kernel that is given the whole row works on queries from all over it, whose keys lie far apart: little of what one
has read is still in the cache for the next, and a card at its power limit pays for the traffic with its clock.
Measured on an H200 at 700 W, 28 query heads of 128 over 4 key heads, 512k tokens, forward: 487 TFLOP/s at 1.28 GHz in
one call; 592 at 1.58 GHz where 32k queries at a time see all keys before them; backward 535 and 548.

Queries see the keys before their own block in one call and the keys of their block in another, causal. Two parts of a
softmax are put together by their log-sum-exps (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018, equation 4). What forward keeps is what one call over the row keeps.

Backward goes from the row's end. A key's gradients come from the queries behind it, so that those of a block's own keys
are complete when its queries are done: whoever needs them can go on with these rows, and no gradient of the whole row
need exist.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

ROWS, LONG = 1 << 15, 1 << 17        # queries at a time; tokens of a row from which it is done
NEVER = 1 << 62                      # in place of LONG, where it is not

# (q, k, v, causal) -> output [B, hq, n, D] and log-sum-exp [B, hq, n], or with a last dimension of 1.
Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
# (dout, q, k, v, out, log-sum-exp, causal) -> dq, dk, dv [B, h, n, D].
Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def by_rows(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Output [B, S, hq, V] of q [B, S, hq, D], k [B, S, hk, D] and v [B, S, hk, V], and log-sum-exp as the kernel gives
    it."""
    out, sums = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device), []
    for begin in range(0, q.shape[1], rows):
        block = slice(begin, begin + rows)
        own, lse = kernel(q[:, block], k[:, block], v[:, block], True)
        if begin:
            own, lse = _joined(own, lse, *kernel(q[:, block], k[:, :begin], v[:, :begin], False))
        out[:, block].copy_(own.transpose(1, 2))
        sums.append(lse)
    return out, torch.cat(sums, 2)


def _joined(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, [B, hq, n, D], and its log-sum-exp. In fp32 at least."""
    share = torch.sigmoid(lse_b - lse_a).view(*a.shape[:3], 1)
    wide = torch.promote_types(a.dtype, share.dtype)
    return torch.lerp(a.to(wide), b.to(wide), share.to(wide)), torch.logaddexp(lse_a, lse_b)


class Backward:
    """Gradients of q, k and v of one row, by blocks: `of` for each of `blocks`, in their order.

    Those of keys and values are added up in fp32 at least: [S, 2, hk, D].
    """

    def __init__(self, kernel: Gradients, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: int) -> None:
        self.kernel, self.rows = kernel, rows
        self.q, self.k, self.v, self.out, self.lse = q, k, v, out, lse
        wide = torch.promote_types(k.dtype, torch.float32)
        self.sums = torch.zeros(k.shape[1], 2, *k.shape[2:], dtype=wide, device=k.device)

    def blocks(self) -> Iterator[slice]:
        """From the end."""
        starts = range(0, self.q.shape[1], self.rows)
        return (slice(begin, min(begin + self.rows, self.q.shape[1])) for begin in reversed(starts))

    def of(self, block: slice, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq [1, n, hq, D], dk and dv [1, n, hk, D] of a block's rows, from dout [1, n, hq, D]."""
        dq = self._seen(block, block, dout, True)
        if block.start:
            dq = dq + self._seen(block, slice(0, block.start), dout, False)
        dk, dv = self.sums[block].to(self.k.dtype).unbind(1)
        return dq, dk[None], dv[None]

    def _seen(self, block: slice, keys: slice, dout: Tensor, causal: bool) -> Tensor:
        """The part of dq that is of these keys, whose own gradients are added."""
        q, k, v, out = self.q[:, block], self.k[:, keys], self.v[:, keys], self.out[:, block]
        dq, dk, dv = self.kernel(dout, q, k, v, out, self.lse[:, :, block].contiguous(), causal)
        for i, d in enumerate((dk, dv)):
            self.sums[keys, i].add_(d[0].transpose(0, 1))
        return dq.transpose(1, 2)
