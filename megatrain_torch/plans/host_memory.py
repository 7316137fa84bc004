"""Host memory of this process: what is free, and what parameters give back to it."""
from __future__ import annotations

import bisect
import ctypes
import gc
import math
from pathlib import Path

from ..base.limits import Bound, HostLimits, host_limits
from ..base.units import Group

TRIM_BYTES = 64 << 20       # of the module's own tensors, given back before malloc is asked to give back too


def limits() -> HostLimits:
    """As they are now."""
    return host_limits()


def shortage(need: int) -> Bound | None:
    """What stands against so many bytes more, when models that were dropped are gone: where a cycle of the user's has
    one, Python's collector, which counts objects, not bytes, may not come by for long."""
    bound = limits().short(need)
    if bound is not None and gc.collect():
        give_back()
        bound = limits().short(need)
    return bound


def own_bytes(groups: list[Group]) -> list[int]:
    """Bytes of host memory that each unit's parameters give back when their values are in the store.

    Memory of a file (weights that were mapped, not read) is the page cache's, so it is none. Of a parameter on the meta
    device another process has the values, and looks for their memory.
    """
    storages: dict[int, tuple[int, int]] = {}
    for i, (_, own) in enumerate(groups):
        for _, p in own:
            if p.device.type == "cpu" and not hasattr(p, "_mt"):
                storage = p.untyped_storage()
                storages[storage.data_ptr()] = (i, storage.nbytes())     # gone with the last unit that has it
    files = FileMaps()
    found = [sum(p.nbytes for _, p in own if p.is_meta) for _, own in groups]
    for address, (i, n) in storages.items():
        found[i] += 0 if files.has(address) else n
    return found


class FileMaps:
    """Which addresses of this process are a file's."""

    def __init__(self) -> None:
        self.ranges = []
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            span, _, _, _, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(x, 16) for x in span.split("-"))
            if inode != "0":
                self.ranges.append((begin, end))

    def has(self, address: int) -> bool:
        at = bisect.bisect_right(self.ranges, (address, math.inf)) - 1
        return at >= 0 and address < self.ranges[at][1]


def give_back() -> None:
    """Memory that was freed goes back to the system, also where malloc keeps it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
