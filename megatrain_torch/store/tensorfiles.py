"""safetensors files: what is where in them, so that the engine writes and reads their bytes straight from planes.

A file is 8 bytes (the header's length, little-endian), a header in JSON, and the tensors' bytes in its order, without
gaps. Source: https://github.com/huggingface/safetensors, "Format".

transformers maps such files and gives each parameter a view, so nothing of them is in memory yet. The store then takes
the bytes from the file itself (Mapped), by several threads and past the page cache, rather than by touching the mapping
a page at a time; the most that host memory holds is one model. A mapping of which a page was written to (copied, then:
it is the process's own) is read as memory, like any other.
"""
from __future__ import annotations

import bisect
import functools
import json
import math
import os
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .. import _core
from ..base import strict
from ..base.errors import MegatrainError
from ..base.limits import text_of
from .records import KINDS

# Offset in a file, address, bytes, unit or -1; and, where memory has another order than the file, bytes of an element,
# and (elements, bytes between two) of each dimension.
Extent = tuple[int, int, int, int] | tuple[int, int, int, int, tuple[Any, ...]]
File = tuple[str, int, list[Extent]]        # path, bytes, extents: what the engine takes
LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000                  # what other readers take at most
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written. memory: [shape], dense, over a unit's plane or (unit -1) its own."""

    name: str
    memory: Tensor
    unit: int = -1
    plane: str = ""


class TensorFile:
    """One file to be written: its name, its tensors in order, and its header."""

    def __init__(self, name: str, entries: list[Entry]) -> None:
        # Larger elements first, so that each tensor begins at a multiple of its own: readers view a mapped file.
        self.name, self.entries = name, sorted(entries, key=lambda e: -e.memory.element_size())
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for e in self.entries:
            table[e.name] = {"dtype": KINDS[e.memory.dtype], "shape": list(e.memory.shape),
                             "data_offsets": [at, at + e.memory.nbytes]}
            at += e.memory.nbytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + LENGTH_BYTES) % 8)
        self.header, self.nbytes = struct.pack("<Q", len(text)) + text, LENGTH_BYTES + len(text) + at

    def located(self, folder: Path) -> File:
        """What the engine writes; this object has the header's memory, and is to be kept until it has."""
        head = numpy.frombuffer(self.header, numpy.uint8).ctypes.data
        extents: list[Extent] = [(0, head, len(self.header), -1)]
        at = len(self.header)
        for e in self.entries:
            t, item = e.memory, e.memory.element_size()
            order = () if t.is_contiguous() else ((item, *((n, s * item) for n, s in zip(t.shape, t.stride()))),)
            if t.nbytes:
                extents.append((at, t.data_ptr(), t.nbytes, e.unit, *order))
                at += t.nbytes
        return str(folder / self.name), self.nbytes, extents


def packed(entries: list[Entry], stem: str, limit: int, beside: bool = False) -> list[TensorFile]:
    """Files of at most `limit` bytes, or one tensor, named as transformers does. beside: with numbers always."""
    parts: list[list[Entry]] = [[]]
    filled = 0
    for e in entries:
        if parts[-1] and filled + e.memory.nbytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(e)
        filled += e.memory.nbytes
    if len(parts) == 1 and not beside:
        return [TensorFile(f"{stem}.safetensors", parts[0])]
    return [TensorFile(f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors", part) for i, part in enumerate(parts, 1)]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where its bytes begin and end there."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def listed(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name. Raises MegatrainError if it is no safetensors file, or its header has something
    else than tensors that follow one another without a gap, from its end to the file's."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = struct.unpack("<Q", f.read(LENGTH_BYTES).ljust(LENGTH_BYTES, b"\0"))[0]
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, HEADER_LIMIT):
            raise MegatrainError(f"{path} has {size} bytes and is no safetensors file: its header would take {length}")
        text = f.read(length)
    head = f"{path}: its header"
    table = strict.table(strict.parsed(text, head), head)
    about = table.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
        raise MegatrainError(f"{head}: __metadata__={strict.shown(about)}: a table of words is needed")
    found, begins = {}, LENGTH_BYTES + length
    for name, about in table.items():
        where = f"{head}: {strict.shown(name)}"
        strict.table(about, where)
        kind = strict.field(about, "dtype", lambda v: isinstance(v, str) and v in DTYPES,
                            f"one of {', '.join(DTYPES)}", where)
        shape = strict.field(about, "shape", strict.is_shape, "a list of sizes", where)
        first, end = strict.field(about, "data_offsets", lambda v: strict.is_counts(v) and len(v) == 2,
                                  "two whole numbers", where)
        if about.keys() - {"dtype", "shape", "data_offsets"}:
            raise MegatrainError(f"{where} has more than dtype, shape and data_offsets: {strict.shown(list(about))}")
        if end - first != (need := math.prod(shape) * DTYPES[kind].itemsize):
            raise MegatrainError(f"{where} has bytes {first} to {end}, and {need} make {shape} {kind}")
        found[name] = Stored(path.name, DTYPES[kind], tuple(shape), begins + first, begins + end)
    at = begins                              # two tensors may not share bytes, and no byte is nobody's
    for name, s in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if s.begin != at:
            raise MegatrainError(f"{head}: {strict.shown(name)} begins at byte {s.begin}, and the one before ends at "
                                 f"{at}")
        at = s.end
    if at != size:
        raise MegatrainError(f"{path} has {size} bytes, and {at} by its header")
    return found


# ---- files that are mapped -----------------------------------------------------------------------

READERS = 12             # threads that fill memory from files
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+) +(/.*)$", re.MULTILINE)


def _mappings(smaps: str) -> list[tuple[int, int, int, str]]:
    """(begin, end, offset, path) of mappings to which no page was written, and whose file has its name still."""
    found = []
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        head, *lines = part.splitlines()
        about = _HEAD.match(head)
        if about is None or not {"Anonymous: 0 kB", "Swap: 0 kB"} <= {" ".join(line.split()) for line in lines}:
            continue                         # those pages are the process's own by now
        with suppress(OSError):
            s = os.stat(about[6])
            if (f"{os.major(s.st_dev):02x}:{os.minor(s.st_dev):02x}", str(s.st_ino)) == (about[4], about[5]):
                found.append((int(about[1], 16), int(about[2], 16), int(about[3], 16), about[6]))
    return found


class Mapped:
    """Files mapped now. The kernel is asked for pages only where a tensor lies."""

    def __init__(self) -> None:
        self._files = [(int(m[1], 16), int(m[2], 16)) for m in _HEAD.finditer(text_of(Path("/proc/self/maps")))]

    @functools.cached_property
    def _maps(self) -> list[tuple[int, int, int, str]]:
        return _mappings(text) if (text := text_of(Path("/proc/self/smaps"))) else []

    def holds(self, address: int) -> bool:
        """Is it a file's?"""
        at = bisect.bisect_right(self._files, address, key=lambda f: f[0]) - 1
        return at >= 0 and address < self._files[at][1]

    def source(self, t: Tensor) -> tuple[str, int] | None:
        """(path, offset) where the file has just the bytes of a dense, row-major tensor."""
        address = t.data_ptr() if t.device.type == "cpu" and t.is_contiguous() and t.numel() else -1
        if not self.holds(address):
            return None
        at = bisect.bisect_right(self._maps, address, key=lambda m: m[0]) - 1
        if at < 0 or address + t.nbytes > self._maps[at][1]:
            return None
        begin, _, offset, path = self._maps[at]
        return path, offset + address - begin

    def fill(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Reads values [shape] into memory of the same type and order; returns the pairs it has not."""
        files: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        left = []
        for memory, value in pairs:
            same = memory.dtype == value.dtype and memory.is_contiguous()
            if (found := self.source(value) if same else None) is None:
                left.append((memory, value))
            else:
                files.setdefault(found[0], []).append((found[1], memory, value))
        for path, wanted in files.items():
            extents, end = [], 0
            for at, memory, value in sorted(wanted, key=lambda item: item[0]):
                if at < end:                 # views of the same bytes: these are read once, and the rest is copied
                    left.append((memory, value))
                else:
                    extents.append((at, memory.data_ptr(), value.nbytes, -1))
                    end = at + value.nbytes
            _core.read_file((path, os.stat(path).st_size, extents), None, READERS)
        return left
