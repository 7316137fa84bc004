"""Who writes a checkpoint: this process alone, or all that train the model, each some of its files.

All of them see all planes of their machine's store, so whoever writes a file needs nothing of the others; that a unit's
update waits until its bytes are copied, the engines see to. The first process makes the folder, has all files' sums in
the end, and gives it its name.
"""
from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..group.ranks import Ranks, as_one
from . import manifest
from .parts import Parts


class Writers:
    """
    Attributes:
        first: this process makes the folder and names it.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = None if ranks is None else ranks.apart()       # a save may end in a thread of its own
        self.first = ranks is None or ranks.rank == 0

    def as_one(self) -> AbstractContextManager[None]:
        """What fails in one fails in all."""
        return as_one(self._ranks)

    def share(self, parts: Parts) -> Parts:
        """What this one writes of it."""
        if self._ranks is None:
            return parts
        own = [f for i, f in enumerate(parts.files) if i % self._ranks.size == self._ranks.rank]
        return dataclasses.replace(parts, files=own, tensors=[e for f in own for e in f.entries])

    def draft(self, folder: Path) -> Any:
        if self._ranks is None:
            return manifest.Draft(folder)
        with self.as_one():
            own = manifest.Draft(folder) if self.first else None
        path = self._ranks.gather(None if own is None else own.path)[0]
        return own or _Guest(path)

    def all_of(self, own: dict[str, Any]) -> dict[str, Any]:
        """What all have said of their files."""
        return {name: about for part in self.each(own) for name, about in part.items()}

    def each(self, own: Any) -> list[Any]:
        """What each has, by rank."""
        return [own] if self._ranks is None else self._ranks.gather(own)


class _Guest:
    """A folder that another process has made, and will name or drop."""

    published = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def drop(self) -> None:
        """It is not ours."""
