"""A checkpoint as it lies in its folder: what its manifest says and its files have, and how they are read."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..base.errors import MegatrainError
from ..base.strict import shown
from ..store.tensorfiles import READERS, Extent, Stored, listed
from . import contents, manifest
from .parts import INDEX, TRAINING


@dataclass
class Checkpoint:
    """A folder, its manifest's body, and what its files of tensors have."""

    folder: Path
    body: dict[str, Any]
    tensors: dict[str, Stored] = field(default_factory=dict)
    states: dict[str, Stored] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """All that is in it is checked but the tensors' bytes."""
        manifest.recover(folder)
        found, where = Checkpoint(folder, manifest.read(folder)), str(folder / manifest.NAME)
        with manifest.adding(manifest.BROKEN):
            contents.check_body(found.body, where, TRAINING)
            for name, about in found.body["files"].items():
                found._check_size(name, about["bytes"])
                if name.endswith(".safetensors"):
                    found._list(name)
            contents.check_tensors(found.body, found.tensors, found.states, where)
            if INDEX in found.body["files"]:
                contents.check_index(found.bytes_of(INDEX), str(folder / INDEX), found.tensors)
        return found

    def _list(self, name: str) -> None:
        mine = self.states if name.startswith("states") else self.tensors
        there = listed(self.folder / name)
        if twice := sorted(there.keys() & mine.keys()):
            raise MegatrainError(f"{self.folder / name} has {shown(twice[0])}, which is in {mine[twice[0]].file} too")
        mine.update(there)

    def _check_size(self, name: str, nbytes: int) -> None:
        path = manifest.inside(self.folder, name)
        size = path.stat().st_size if path.is_file() else None
        if size != nbytes:
            raise MegatrainError(f"{path} {'is missing' if size is None else f'has {size} bytes'}, and {nbytes} were "
                                 "written")

    def verify(self, part: int, parts: int) -> None:
        """Reads everything, before anything is changed; of files of tensors one of so many parts."""
        with manifest.adding(manifest.BROKEN):
            for name, about in self.body["files"].items():
                if "sums" not in about:
                    self.bytes_of(name)
                elif parts == 1:
                    self.read(name, [])
                elif blocks := range(part, -(-about["bytes"] // contents.BLOCK_BYTES), parts):
                    memory = torch.empty(len(blocks), dtype=torch.uint8)         # a byte of each: so it is compared
                    self.read(name, [(b * contents.BLOCK_BYTES, memory.data_ptr() + i, 1, -1)
                                     for i, b in enumerate(blocks)])

    def read(self, name: str, extents: list[Extent]) -> None:
        about = self.body["files"][name]
        _core.read_file((str(self.folder / name), about["bytes"], extents), bytes.fromhex(about["sums"]), READERS)

    def bytes_of(self, name: str) -> bytes:
        data = (self.folder / name).read_bytes()
        if manifest.sha256(data) != self.body["files"][name]["sha256"]:
            raise MegatrainError(f"{self.folder / name} is not as it was written (its checksum differs)")
        return data


class Reads:
    """What is to be read, by file: together, so that each file is gone through once for a unit."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._extents: dict[str, list[Extent]] = {}
        self._memory: list[Tensor] = []

    def into(self, stored: Stored, memory: Tensor) -> Tensor:
        if stored.end > stored.begin:
            extent = stored.begin, memory.data_ptr(), stored.end - stored.begin, -1
            self._extents.setdefault(stored.file, []).append(extent)
            self._memory.append(memory)
        return memory

    def part_into(self, stored: Stored, memory: Tensor, first: int, n: int) -> None:
        """Elements [first, first + n) alone of dense, row-major memory of the file's type."""
        begin, end = (stored.begin + at * stored.dtype.itemsize for at in (first, first + n))
        self.into(Stored(stored.file, stored.dtype, (n,), begin, end), memory.view(-1)[first:first + n])

    def fresh(self, stored: Stored) -> Tensor:
        return self.into(stored, torch.empty(stored.shape, dtype=stored.dtype))

    def go(self) -> None:
        for name, extents in self._extents.items():
            self._source.read(name, sorted(extents))
