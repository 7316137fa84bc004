"""States, weights and activations on disk: which directory, and how many bytes of it.

`mt.stream(model, nvme="/scratch")` keeps masters and moments of units at home on "disk" in one scratch file there, and
weights of those at home on "disk+weights" (csrc/core/disk.h), and what windows with "+disk" keep in another
(csrc/core/swap.h); the files have no names, and go with the model, or with the process.
"""
from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import MegatrainError
from ..base.limits import parse_bytes, show_bytes, show_size
from ..base.modes import DISKS

if TYPE_CHECKING:
    from ..plans.tally import Asked

BUFFERS, BUFFER_BYTES, THREADS = 8, 32 << 20, 16       # of the engine; a drive's queue is full with 64 MiB under way
BAYS = 4                                               # of host memory that carry activations: engine_swap.c
POOL = 4                                               # threads of their updates: csrc/bind/engine_disk.c
MEMORY_BYTES = (BUFFERS + 1) * BUFFER_BYTES            # one more to bring and push
FEED_BYTES = BUFFERS * BUFFER_BYTES                    # of those that weights pass through, besides
PADDING_BYTES = 16384                                  # of a parameter in the file, and of a buffer: at most
BUNDLE_PADDING_BYTES = 65536                           # of a bundle: at most
FROZEN = "weights that are not trained"                # read, and never written
PADDING = "between, at most"                           # these bytes in a plan's table
DISK_BUFFERS = "buffers of the disk"                   # MEMORY_BYTES and FEED_BYTES there
SPILLED = "activations"                                # there too: of windows that keep what they keep on disk


@dataclass(frozen=True)
class Disk:
    """Where states may go."""

    path: str                   # an existing directory; "": of a machine that is not at hand
    limit: int | None = None    # bytes that may be used there; None: what is free

    @staticmethod
    def parse(nvme: str | Path | dict[str, Any] | Disk | None, somewhere: bool = False) -> Disk | None:
        """`"/scratch"` or `{"path": ..., "limit": "200GiB"}`; None stays None. somewhere: a limit is enough."""
        if nvme is None or isinstance(nvme, Disk):
            return nvme
        given = {"path": nvme} if isinstance(nvme, (str, Path)) else nvme
        known = {"path", "limit"}
        if not isinstance(given, dict) or set(given) - known or not ("path" in given or (somewhere and given)):
            raise MegatrainError(f"nvme={nvme!r}: give a directory, or {{'path': directory, 'limit': '200GiB'}}")
        return Disk(str(given.get("path", "")), parse_bytes(given.get("limit"), "nvme limit"))

    def room(self) -> int:
        """Bytes that may be taken now; without a path the limit."""
        if not self.path:
            return self.limit or 0
        try:
            free = shutil.disk_usage(f"{self.path}/.").free         # which only a directory has
        except OSError as error:
            raise MegatrainError(f"nvme: {self.path}: {error.strerror}; name a directory that is there and may be "
                                 "written") from None
        return free if self.limit is None else min(free, self.limit)


def file_bytes(asked: Asked) -> int:
    """What is at home on disk takes there, at most; of a machine's drive, all that its processes have."""
    return sum(asked.tally().disk(asked.homes).values())


def check_room(asked: Asked, disk: Disk | None, spills: bool = False, spilled: int = 0) -> None:
    """Refuses what has no directory, or too little room there. spilled: bytes of windows, as far as known."""
    units = sum(home in DISKS for home in asked.homes)
    if not units and not spills:
        return
    if disk is None or not disk.path:
        what = "homes has units on 'disk'" if units else "activations has windows with '+disk'"
        raise MegatrainError(f"plan: {what}: give mt.stream the directory, nvme='/path'")
    need, free = file_bytes(asked) + spilled, Disk(disk.path).room()
    words = [f"AdamW's states of {units} units" + " and weights" * ("disk+weights" in asked.homes)] * bool(units) \
        + ["what windows keep"] * bool(spilled)
    what = f"nvme={disk.path!r}: {' and '.join(words)} need {show_bytes(need)} there and"
    if need > free:
        raise MegatrainError(f"{what} {show_bytes(free)} are free: free {show_bytes(need - free)}, or name another "
                             "path")
    if disk.limit is not None and need > disk.limit:
        raise MegatrainError(f"{what} the limit is {show_bytes(disk.limit)}: raise it to {show_size(need)}, or "
                             "leave fewer units in homes")
