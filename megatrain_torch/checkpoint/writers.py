"""Who writes a checkpoint: this process alone, or all that train the model, each every so many blocks of all files.

All of them see all planes of their machine's store, so whoever writes a block needs nothing of the others; that a
unit's update waits until its bytes are copied, the engines see to. The first process makes folder and files, has all
blocks' sums in the end, and gives the folder its name.
"""
from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .. import _core
from ..base.errors import MegatrainError
from ..group.ranks import Ranks, as_one
from . import manifest


class Writers:
    """
    Attributes:
        first: this process makes the folder and names it. part, parts: of so many this one takes its blocks in turn.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = None if ranks is None else ranks.aside()       # a save may end in a thread of its own
        self.part, self.parts = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self.first = self.part == 0

    def as_one(self) -> AbstractContextManager[None]:
        """What fails in one fails in all."""
        return as_one(self._ranks)

    def each(self, own: Any) -> list[Any]:
        """What each has, by rank."""
        return [own] if self._ranks is None else self._ranks.gather(own)

    def draft(self, folder: Path) -> Any:
        if self._ranks is None:
            return manifest.Draft(folder)
        with self.as_one():
            own = manifest.Draft(folder) if self.first else None
        path = self._ranks.control.of_first(None if own is None else own.path)
        with self.as_one():
            if not path.is_dir():
                raise MegatrainError(f"{path}, which the first process has made, is not seen on this machine: folders "
                                     "of checkpoints are on a file system that all machines have")
        return own or _Guest(path)

    def begin(self, core: _core.Engine, *how: Any) -> None:
        """Engine.save_begin, in the first process before the others: it makes the files."""
        for turn in (True, False)[:self.parts]:
            with self.as_one():
                if turn == self.first:
                    core.save_begin(*how, self.part, self.parts)

    def sums(self, own: list[bytes]) -> list[bytes]:
        """Of each file all blocks', where each process has those of its own, and zeros."""
        return [bytes(map(max, *found)) if len(found) > 1 else found[0] for found in zip(*self.each(own))]


class _Guest:
    """A folder that another process has made, and will name or drop."""

    published = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def drop(self) -> None:
        """It is not ours."""
