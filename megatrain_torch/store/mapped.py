"""Weights that are a file's bytes: read straight into the store, by several threads, past the page cache.

transformers maps safetensors files and gives each parameter a view, so nothing of them is in memory yet. The store
then takes the bytes from the file itself, rather than by touching the mapping a page at a time; the most that host
memory holds is one model. A mapping of which a page was written to (copied, then: it is the process's own) is read
as memory, like any other.
"""
from __future__ import annotations

import bisect
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from .. import _core
from .tensorfiles import Extent

READERS = 12             # threads that fill memory from files
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+) +(/.*)$")
_COPIED = ("Anonymous", "Swap")  # of a mapping: pages that are the process's own by now


@dataclass
class _Mapping:
    begin: int
    end: int
    offset: int
    device: str
    inode: int
    path: str
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def as_in_file(self) -> bool:
        """No page was written to; the name is still that file's."""
        if any(self.sizes.get(key) != 0 for key in _COPIED):
            return False
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        return (found.st_ino, device) == (self.inode, self.device)


def _mappings(smaps: str) -> list[_Mapping]:
    found: list[_Mapping] = []
    inside = False
    for line in smaps.splitlines():
        key, _, rest = line.partition(":")
        if key.replace("_", "").isalpha():
            if inside and rest.endswith("kB"):
                found[-1].sizes[key] = int(rest.split()[0])
            continue
        head = _HEAD.match(line)
        inside = head is not None
        if head:
            begin, end, offset = (int(x, 16) for x in head.groups()[:3])
            found.append(_Mapping(begin, end, offset, head[4], int(head[5]), head[6]))
    return found


def _ranges(maps: str) -> list[tuple[int, int]]:
    """(begin, end) of what is mapped from files."""
    lines = (line.split(maxsplit=5) for line in maps.splitlines() if "/" in line)
    found = (line[0].split("-") for line in lines if len(line) == 6)
    return [(int(begin, 16), int(end, 16)) for begin, end in found]


class Mapped:
    """The files that are mapped now, with what is to be read from them.

    The kernel goes through all pages of a process to say what was written to, so it is asked only where a tensor lies
    in a file's mapping.
    """

    def __init__(self) -> None:
        try:
            self._files = _ranges(Path("/proc/self/maps").read_text())
        except OSError:
            self._files = []

    @functools.cached_property
    def _maps(self) -> list[_Mapping]:
        try:
            return [m for m in _mappings(Path("/proc/self/smaps").read_text()) if m.as_in_file]
        except OSError:
            return []

    def _in_file(self, address: int) -> bool:
        at = bisect.bisect_right(self._files, address, key=lambda f: f[0]) - 1
        return at >= 0 and address < self._files[at][1]

    def source(self, t: Tensor) -> tuple[str, int] | None:
        """(path, offset) where the file has just the bytes of a dense, row-major tensor."""
        if t.device.type != "cpu" or not t.is_contiguous() or t.numel() == 0:
            return None
        address = t.data_ptr()
        if not self._in_file(address):
            return None
        at = bisect.bisect_right(self._maps, address, key=lambda m: m.begin) - 1
        m = self._maps[at] if at >= 0 else None
        if m is None or address + t.nbytes > m.end:
            return None
        return m.path, m.offset + address - m.begin

    def fill(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Reads values [shape] into memory [shape] of the same type and order; returns the pairs it has not.

        Raises:
            MegatrainError: a file could not be read; what is in memory then is undefined.
        """
        files: dict[str, list[tuple[Extent, tuple[Tensor, Tensor]]]] = {}
        left = []
        for memory, value in pairs:
            same = memory.dtype == value.dtype and memory.is_contiguous()
            found = self.source(value) if same else None
            if found is None:
                left.append((memory, value))
            else:
                extent = found[1], memory.data_ptr(), value.nbytes, -1
                files.setdefault(found[0], []).append((extent, (memory, value)))
        for path, wanted in files.items():
            extents: list[Extent] = []
            end = 0
            for extent, pair in sorted(wanted, key=lambda item: item[0]):
                if extent[0] < end:          # views of the same bytes: these are read once, and the rest is copied
                    left.append(pair)
                    continue
                extents.append(extent)
                end = extent[0] + extent[2]
            _core.read_file((path, os.stat(path).st_size, extents), None, READERS)
        return left
