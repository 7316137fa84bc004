"""Several sequences behind one another in one row, each of which sees itself."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """lengths: of the sequences. cu: [n + 1] int32, where they begin, and the end; on the compute device."""

    lengths: tuple[int, ...]
    cu: Tensor

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device) -> Packed:
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return Packed(lengths, cu.to(device, non_blocking=True))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def numbers(self) -> Tensor:
        """[T]: which sequence a token belongs to."""
        return torch.repeat_interleave(torch.tensor(self.lengths)).to(self.cu.device)
