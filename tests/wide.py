"""Tensors of more than 2^31 elements, of which next to none is touched: rows that lie 4 GiB apart.

Each function runs an op on such a tensor and on a small copy of what it touches, and says whether both give the same
bits. An index of 32 bits anywhere in the op reads or writes somewhere else. Shared by test_ops.py and
gpu/test_acts_on_gpu.py.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatrain_torch import ops

APART = (1 << 31) + 64           # elements from one row to the next: bf16, so 4 GiB
N = 64


def rows(device: str, n: int = N, seed: int = 0) -> Tensor:
    """[2, n] random bf16 whose rows are APART."""
    memory = torch.empty(APART + n, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((2, n), (APART, 1))
    x.copy_(random(seed, 2, n))
    return x


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same(*pairs: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def glu(device: str) -> bool:
    gate, up = rows(device), random(1, 2, N).to(device)
    small = gate.clone(memory_format=torch.contiguous_format)
    good = same((ops.glu(gate, up), ops.glu(small, up)))
    dh, wide, near = random(2, 2, N).to(device), gate, torch.empty_like(small)
    dup, dup_near = torch.empty_like(up), torch.empty_like(up)
    ops.glu_backward(dh, small, up, dgate=near, dup=dup_near)
    ops.glu_backward(dh, wide, up, dgate=wide, dup=dup)
    return good and same((wide, near), (dup, dup_near))


def rms_norm(device: str) -> bool:
    x, weight = rows(device), random(1, N).to(device)
    small = x.clone(memory_format=torch.contiguous_format)
    (y, _, rstd), (near, _, near_rstd) = (ops.rms_norm(t, weight, 1e-6) for t in (x, small))
    dy = random(2, 2, N).to(device)
    dx, dw, _ = ops.rms_norm_backward(dy, small, weight, rstd)
    other, other_dw, _ = ops.rms_norm_backward(dy, x, weight, rstd, dx=x)
    return same((y, near), (rstd, near_rstd), (dx, other), (dx, x), (dw, other_dw))


def rope(device: str) -> bool:
    memory = rows(device, 4 * 32)
    q, k = (memory[:, at:at + n].view(1, 2, n // 32, 32) for at, n in ((0, 64), (64, 64)))
    small_q, small_k = q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
    cos, sin = random(3, 1, 2, 32).to(device), random(4, 1, 2, 32).to(device)
    ops.rope(small_q, small_k, cos, sin, small_q, small_k)
    ops.rope(q, k, cos, sin, q, k)
    return same((q, small_q), (k, small_k))


def column_sum(device: str) -> bool:
    x = rows(device)
    return same((ops.column_sum(x, torch.float32), ops.column_sum(x.contiguous(), torch.float32)))


def embedding_backward(device: str) -> bool:
    dy, ids = rows(device), torch.tensor([1, 0], device=device)
    return same((ops.embedding_backward(dy, ids, 3), ops.embedding_backward(dy.contiguous(), ids, 3)))


def sum_rows(device: str) -> bool:
    """The last of so many dense rows."""
    count = APART // 4096 + 2
    x, row = torch.empty(count, 4096, dtype=torch.bfloat16, device=device), random(5, 1, 4096).to(device)
    x[count - 1:] = row
    return same((ops.sum_rows(x, torch.tensor([count - 1], device=device), 1), row))


def gemm(device: str) -> bool:
    """A column of weights' sums from two rows that far apart; on CUDA from so many dense rows, of which the first and the
    last are not zero: cublasLt refuses rows beyond 2^31 from each other.
    """
    x, other = rows(device), random(6, 2, 8).to(device)
    near, wide = (torch.zeros(8, N, device=device) for _ in range(2))
    ops.gemm_(near, other.t(), x.contiguous())
    if device == "cuda":
        dense = torch.zeros(APART // N + 2, N, dtype=torch.bfloat16, device=device)
        several = torch.zeros(len(dense), 8, dtype=torch.bfloat16, device=device)
        dense[::len(dense) - 1], several[::len(dense) - 1] = x, other
        x, other = dense, several
    ops.gemm_(wide, other.t(), x)
    # tensor cores cut off what they align: two products added in one instruction or in two differ in the last bits
    return same((near, wide)) if device == "cpu" else torch.allclose(near, wide, rtol=1e-5, atol=1e-5)


OPS: dict[str, Callable[[str], bool]] = {f.__name__: f for f in (
    glu, rms_norm, rope, column_sum, embedding_backward, sum_rows, gemm)}
