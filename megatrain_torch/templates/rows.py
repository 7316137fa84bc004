"""Causal attention over a long row, some of its queries at a time.

A kernel that is given the whole row works on queries from all over it, whose keys lie far apart: little of what one
has read is still in the cache for the next, and a card at its power limit pays for the traffic with its clock.
Measured on an H200 at 700 W, 28 query heads of 128 over 4 key heads, 512k tokens, forward: 487 TFLOP/s at 1.28 GHz in
one call; 592 at 1.58 GHz where 32k queries at a time see all keys before them. Backward has nothing of this: 535 and
548, so that it is given the whole row, and what is kept for it is the same.

Queries see the keys before their own block in one call and the keys of their block in another, causal. Two parts of a
softmax are put together by their log-sum-exps (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018, equation 4).
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS, LONG = 1 << 15, 1 << 17        # queries at a time; tokens of a row from which it is done

# (q, k, v, causal) -> output [B, hq, n, D] and log-sum-exp [B, hq, n], or with a last dimension of 1.
Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def by_rows(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Output [B, S, hq, D] of q [B, S, hq, D], k and v [B, S, hk, D], and log-sum-exp as the kernel gives it."""
    out, sums = torch.empty(q.shape, dtype=q.dtype, device=q.device), []
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
