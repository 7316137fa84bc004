"""Bytes, as people write them; and how many of them this process may have.

Host memory has many limits, and none of them is told by an allocation: memory is there when it is first written, and
a process that writes too much is ended by signal 9. So what is known is read before, from files of the kernel.
"""
from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import _core
from .errors import MegatrainError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
CONTEXT_MOST = 1 << 30           # 0.87 GiB measured on an H200, with cuBLAS's and our kernels loaded


def parse_bytes(value: int | float | str | None, what: str) -> int | None:
    """`24 * 2**30`, "24GiB", "1.5 TB" -> bytes; None stays None.

    Raises:
        MegatrainError: not a size; the message says what was given for `what`.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return int(value)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise MegatrainError(f"{what}={value!r} is not a size: give bytes, or a string such as '24GiB'")
    if not match[2] and float(match[1]) < 2**20:     # as a word of a command line
        raise MegatrainError(f"{what}={value!r} is {match[1]} bytes: give a unit, such as '{match[1]}GiB'")
    if (found := int(float(match[1]) * _UNITS[match[2].lower()])) < 1:
        raise MegatrainError(f"{what}={value!r} is nothing: give at least a byte")
    return found


def show_bytes(n: float) -> str:
    """Bytes as people read them: "24.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def show_size(n: int) -> str:
    """As people type it for parse_bytes: no smaller than it is."""
    return f"{-(-n // 2**20)}MiB" if n < 2**30 else f"{math.ceil(100 * n / 2**30) / 100:.10g}GiB"


# ---- what this process may have ------------------------------------------------------------------

# What an allocation takes beside its own bytes: page tables, what the driver notes of registered memory (two runs with
# 80 GB of planes on an H200 had 1.5 GB), buffers of a pass.
MARGIN_SHARE, MARGIN_BYTES = 0.02, 64 << 20
# A plan leaves more than is asked for when a step's memory is about to be taken: by then Python and the driver have
# theirs, which is known to half a GiB (on an H200 a plan to the last byte was refused for 30 MiB of 120 GiB).
PLANNED_SHARE = 0.025
# What gVisor's /proc/version says. Its MemTotal begins at 2 GiB and grows with what is touched (pkg/sentry/usage).
_GVISOR = ("4.4.0", "Jan 10 15:06:54 PST 2016")


@dataclass(frozen=True)
class Bound:
    """One limit of host memory."""

    what: str                   # who sets it
    limit: int                  # bytes in all
    free: int                   # what may still be taken under it
    remedy: str                 # how to raise it


@dataclass(frozen=True)
class HostLimits:
    """What was found of a process's limits on host memory, files and pinning."""

    bounds: tuple[Bound, ...]           # limits of memory, each by itself
    grows: str = ""                     # why MemTotal is less than the machine has; "": it is what there is
    swap: int = 0                       # free bytes of it; never counted, since a step touches all of its memory
    memlock: int | None = None          # RLIMIT_MEMLOCK, under which CUDA's own locking does not count; None: no limit
    wsl: bool = False                   # the driver locks part of the memory only: how much is known when it refuses
    files: tuple[int, int] = (0, 1024)  # descriptors open, and how many may be
    nodes: int = 1                      # of memory with processors (NUMA)

    def tightest(self) -> Bound:
        """The bound with least left."""
        return min(self.bounds, key=lambda b: b.free)

    @property
    def in_all(self) -> int:
        """Bytes this process may use, those that it uses counted."""
        return min(b.limit for b in self.bounds)

    @property
    def within(self) -> int:
        """Bytes this process may use while others use what they do now."""
        return self.tightest().free + resident_bytes()

    def short(self, need: int) -> Bound | None:
        """The bound under which `need` more bytes do not fit, with what they take besides; None: they fit."""
        bound = self.tightest()
        return bound if with_margin(need) > bound.free else None

    def rows(self) -> list[tuple[str, str]]:
        """(what, figure), for a table."""
        found = [(b.what, f"{show_bytes(b.free)} free of {show_bytes(b.limit)}") for b in self.bounds]
        found += [("swap, not counted", show_bytes(self.swap)),
                  ("RLIMIT_MEMLOCK, not CUDA's", "none" if self.memlock is None else show_bytes(self.memlock)),
                  ("open files", f"{self.files[0]} of {self.files[1]}"),
                  ("NUMA nodes", f"{self.nodes}" + ("; arenas interleaved" if self.nodes > 1 else ""))]
        if self.wsl:
            found.append(("WSL2", "the driver locks a part of the memory only; the rest is copied through a buffer"))
        if self.grows:
            found.append(("memory grows", self.grows))
        return found


def device_taken(taken: int, communicators: int = 0) -> tuple[int, int]:
    """(bytes of this process's context and libraries on a GPU, bytes of other processes). taken: what neither torch's
    allocator nor a store of this process has. A driver does not tell whose memory is, so a context is CONTEXT_MOST at
    most, beside what NCCL is known to have, and the rest is another process's."""
    own = min(taken, CONTEXT_MOST + communicators)
    return own, taken - own


def resident_bytes() -> int:
    """Memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def with_margin(need: int) -> int:
    """Bytes to be free for `need` bytes of planes; 0 for 0."""
    return need + int(need * MARGIN_SHARE) + MARGIN_BYTES if need > 0 else 0


def without_margin(limit: int, share: float = MARGIN_SHARE) -> int:
    """The most bytes whose with_margin is within the limit. share: another than with_margin's."""
    return max(int((limit - MARGIN_BYTES) / (1 + share)), 0)


def host_limits(proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> HostLimits:
    """Reads every limit there is. proc, sysfs: where those file systems are; tests bring their own."""
    memory, status, version = _sizes(proc / "meminfo"), _sizes(proc / "self/status"), text_of(proc / "version")
    total = memory.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups, grows = _cgroups(proc, sysfs), _grows(version, sysfs)
    machine = Bound("the machine", total, memory.get("MemAvailable", total), "end other processes, or take a machine "
                    "with more")
    more = grows and min((g.limit for g in groups), default=0) > total       # then the group alone says how much
    bounds = groups if more else [machine, *groups]
    soft = re.finditer(r"^Max (.+?)\s{2,}(\S+)\s", text_of(proc / "self/limits"), re.MULTILINE)
    limits = {m[1]: int(m[2]) if m[2].isdigit() else None for m in soft}         # None: no limit
    for name, what, used, flag in (("address space", "RLIMIT_AS", "VmSize", "-v"),
                                   ("data size", "RLIMIT_DATA", "VmData", "-d")):
        if (most := limits.get(name)) is not None:
            bounds.append(Bound(what, most, max(most - status.get(used, 0), 0), f"raise `ulimit {flag}`"))
    if text_of(proc / "sys/vm/overcommit_memory").strip() == "2" and "CommitLimit" in memory:
        left = max(memory["CommitLimit"] - memory.get("Committed_AS", 0), 0)
        bounds.append(Bound("vm.overcommit_memory=2", memory["CommitLimit"], left, "raise vm.overcommit_ratio"))
    files = len([*(proc / "self/fd").glob("*")])
    return HostLimits(tuple(bounds), grows, memory.get("SwapFree", 0), limits.get("locked memory"),
                      "microsoft" in version.lower(), (files, limits.get("open files") or 1024),
                      _core.build_info()["nodes"])


def text_of(path: Path) -> str:
    """What a file has; "": it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _sizes(path: Path) -> dict[str, int]:
    """"Name:   123 kB" lines, in bytes."""
    return {m[1]: int(m[2]) << 10 for m in re.finditer(r"^(\w+):\s+(\d+) kB$", text_of(path), re.MULTILINE)}


def _grows(version: str, sysfs: Path) -> str:
    """Why this machine surely has more memory than MemTotal; "": nothing says so. A cgroup's limit above it is no
    promise: a run of 124 GiB was ended on a machine whose MemTotal was 125.9 GiB, and its cgroup's limit 128."""
    if all(mark in version for mark in _GVISOR):
        return "gVisor's MemTotal grows with what is touched"
    if any((sysfs / "bus/virtio/drivers/virtio_mem").glob("virtio*")):
        return "it has a virtio-mem device"
    return ""


# ---- cgroups -------------------------------------------------------------------------------------

def _cgroups(proc: Path, sysfs: Path) -> list[Bound]:
    """Limits of this process's memory cgroups and of those around them. Of its path a container may have only the part
    below its group mounted: what is not there is passed over."""
    found = []
    for v2, folder in _groups("memory", proc, sysfs):
        names, current, prefix = (("memory.max", "memory.high"), "memory.current", "") if v2 else \
            (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
        # A group's page cache makes room for us, so it does not count as used.
        stat = dict(re.findall(r"^(\S+) +(\S+)", text_of(folder / "memory.stat"), re.MULTILINE))
        cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        known = {name: int(text) for name in (current, *names) if (text := text_of(folder / name).strip()).isdigit()}
        used = max(known.get(current, 0) - cache, 0)
        for name in names:
            limit = known.get(name, 1 << 60)
            if limit < 1 << 60:          # v1 says 2**63 less a page where there is none
                found.append(Bound(f"cgroup {folder.name or '/'}: {name}", limit, max(limit - used, 0),
                                   f"raise {name} of the cgroup"))
    return found


def _groups(controller: str, proc: Path, sysfs: Path) -> Iterator[tuple[bool, Path]]:
    """Folders of this process's group and of those around it, and whether they are of cgroups v2."""
    for line in text_of(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = sysfs / "fs/cgroup" / (controller if controllers else "")
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            yield not controllers, folder
            if folder == root:
                break


def cpus(proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> int:
    """Processors that this process may use, by its affinity and its cgroups' quotas; a started one counts."""
    found = [len(os.sched_getaffinity(0))]
    for v2, folder in _groups("cpu", proc, sysfs):
        texts = text_of(folder / "cpu.max").split() if v2 else \
            [text_of(folder / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period")]
        quota, period = [int(text) if text.isdigit() else 0 for text in texts] if len(texts) == 2 else (0, 0)
        found += [-(-quota // period)] if quota and period else []       # no limit is "max", or -1
    return min(found)
