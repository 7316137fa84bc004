"""The processes that run one command together: one alone, or one for each GPU.

The first has the run's folder: it checks, reads data, writes; the others wait for it, and say nothing.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed as dist

from ..group.ranks import Ranks, as_one
from . import launch

T = TypeVar("T")
_PATIENCE = timedelta(days=3)            # the first one may read much data, and write to a slow disk


class Team:
    """
    Attributes:
        size: processes. first: this one has the folder.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self.size = 1 if ranks is None else ranks.size
        self.first = ranks is None or ranks.rank == 0

    def as_one(self) -> AbstractContextManager[None]:
        """What is refused in one is refused in all."""
        return as_one(self._ranks)

    def first_does(self, what: Callable[[], T]) -> T | None:
        """What the first one's call gives, there; None in the others. What it refuses is refused in all."""
        with self.as_one():
            return what() if self.first else None

    def of_first(self, value: T) -> T:
        """The first one's, in all."""
        return value if self._ranks is None else self._ranks.control.of_first(value)

    def most(self, *numbers: int) -> list[int]:
        """Of each of these, 0 to 255, the highest that any has."""
        if self._ranks is None:
            return list(numbers)
        return self._ranks.control.any_of(torch.tensor(numbers, dtype=torch.uint8)).tolist()

    def meet(self) -> None:
        """All have come here."""
        if self._ranks is not None:
            self._ranks.meet()


@contextlib.contextmanager
def team_of(device: str) -> Iterator[Team]:
    """This process's, for as long as a command runs. device: "cuda" or "cpu"."""
    if not launch.joins():
        yield Team()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    launch.join("nccl" if device == "cuda" else "gloo")
    yield Team(Ranks(dist.group.WORLD, _PATIENCE))
    dist.destroy_process_group()         # where it failed, another may wait in it for what does not come
