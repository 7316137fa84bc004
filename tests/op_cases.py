"""What tests of ops share: devices, types with half a unit of each, numbers, and ways to lie in memory."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TYPES = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
each_device = pytest.mark.parametrize("device", DEVICES)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def numbers(device: str, dtype: torch.dtype, *shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * size).to(device, dtype)


def threads_change_no_bit(run: Callable[[], Sequence[Tensor]]) -> None:
    once = run()
    torch.set_num_threads(2)
    try:
        assert all(map(torch.equal, once, run()))
    finally:
        torch.set_num_threads(1)


def refused(table: dict[str, tuple[Callable[..., object], str]], *shapes: tuple[int, ...]) -> Callable[..., None]:
    """A test: each call of the table, given zeros of these shapes, is refused with its words. Of whole numbers: of one
    dimension."""
    @pytest.mark.parametrize("name", table)
    def test(device: str, name: str) -> None:
        call, says = table[name]
        given = (torch.zeros(n, device=device, dtype=torch.int64 if len(n) == 1 else None) for n in shapes)
        with pytest.raises(RuntimeError, match=says):
            call(*given)
    return test


def shifted(x: Tensor) -> Tensor:
    """At an address that 16 bytes do not divide."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


def turned(x: Tensor) -> Tensor:
    """[B, S, h, D] over memory of [B, h, S, D], as attention leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wide_apart(x: Tensor) -> Tensor:
    """Every number of rows that begin anywhere."""
    return torch.nn.functional.pad(x, (1, 2), value=float("nan"))[..., 1:-2]
