"""Limits of host memory, read from made-up /proc and /sys."""
from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from megatrain_torch.base.limits import Bound, HostLimits, cpus, host_limits
from megatrain_torch.model import homes as cap
from megatrain_torch.model.homes import Cap

GIB = 2**30
PLAIN = {
    "proc/meminfo": "MemTotal:  67108864 kB\nMemFree:  1 kB\nMemAvailable:  50331648 kB\nSwapFree:  1048576 kB\n"
                    "CommitLimit:  41943040 kB\nCommitted_AS:  20971520 kB\n",
    "proc/version": "Linux version 6.8.0 (gcc) #1 SMP\n",
    "proc/self/status": "VmSize:\t 2097152 kB\nVmData:\t 1048576 kB\n",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
                        "Max data size             unlimited            unlimited            bytes     \n"
                        "Max open files            512                  4096                 files     \n"
                        "Max locked memory         65536                65536                bytes     \n"
                        "Max address space         unlimited            unlimited            bytes     \n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/self/cgroup": "0::/\n",
}
V2 = {"proc/self/cgroup": "0::/box/job\n", "sys/fs/cgroup/box/job/memory.max": "max\n",
      "sys/fs/cgroup/box/memory.max": str(32 * GIB), "sys/fs/cgroup/box/memory.high": str(30 * GIB),
      "sys/fs/cgroup/box/memory.current": str(20 * GIB),
      "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {3 * GIB}\nactive_file {GIB}\n"}
V1 = {"proc/self/cgroup": "9:memory,hugetlb:/docker/abc\n3:cpu:/docker/abc\n",
      "sys/fs/cgroup/memory/memory.limit_in_bytes": str(16 * GIB),
      "sys/fs/cgroup/memory/memory.usage_in_bytes": str(6 * GIB),
      "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\ncache 7\n"}


def found(root: Path, *changes: dict[str, str]) -> HostLimits:
    files = dict(PLAIN)
    for change in changes:
        files |= change
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return host_limits(root / "proc", root / "sys")


def test_a_plain_machine_has_what_is_available(tmp_path: Path) -> None:
    here = found(tmp_path)
    assert here.tightest() == Bound("the machine", 64 * GIB, 48 * GIB, here.bounds[0].remedy)
    assert (here.in_all, here.swap, here.memlock, here.files[1], here.grows, here.wsl) == \
        (64 * GIB, GIB, 65536, 512, "", False)


@pytest.mark.parametrize(("files", "name", "limit", "free"), [
    (V2, "cgroup box: memory.high", 30 * GIB, 14 * GIB),
    (V1, "cgroup memory: memory.limit_in_bytes", 16 * GIB, 11 * GIB),
    ({"proc/self/limits": PLAIN["proc/self/limits"].replace("space         unlimited", f"space         {8 * GIB}")},
     "RLIMIT_AS", 8 * GIB, 6 * GIB),
    ({"proc/self/limits": PLAIN["proc/self/limits"].replace("size             unlimited", f"size           {8 * GIB}")},
     "RLIMIT_DATA", 8 * GIB, 7 * GIB),
    ({"proc/sys/vm/overcommit_memory": "2\n"}, "vm.overcommit_memory=2", 40 * GIB, 20 * GIB),
], ids=["cgroup-v2", "cgroup-v1", "address-space", "data-size", "overcommit"])
def test_the_tightest_limit_counts(files: dict[str, str], name: str, limit: int, free: int, tmp_path: Path) -> None:
    here = found(tmp_path, files)
    bound = here.tightest()
    assert (bound.what, bound.limit, bound.free) == (name, limit, free)
    assert here.in_all == limit and here.short(free // 2) is None and here.short(free) == bound


def test_a_group_without_a_limit_sets_none(tmp_path: Path) -> None:
    none = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert [b.what for b in found(tmp_path, V1, none).bounds] == ["the machine"]


def test_wsl_is_noticed(tmp_path: Path) -> None:
    here = found(tmp_path, {"proc/version": "Linux version 5.15.90.1-microsoft-standard-WSL2 (gcc)\n"})
    assert here.wsl and any(name == "WSL2" for name, _ in here.rows())


GROWING = [{"proc/version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n"},
           {"sys/bus/virtio/drivers/virtio_mem/virtio3": ""}]
SMALL = {"proc/meminfo": "MemTotal:  2097152 kB\nMemAvailable:  1048576 kB\n"}


@pytest.mark.parametrize("hint", GROWING, ids=["gvisor", "virtio"])
def test_of_a_machine_that_grows_the_cgroups_limit_counts(hint: dict[str, str], tmp_path: Path) -> None:
    here = found(tmp_path, V2, SMALL, hint)
    assert here.grows and here.in_all == 30 * GIB
    assert here.short(13 * GIB) is None and here.short(14 * GIB).what == "cgroup box: memory.high"


@pytest.mark.parametrize("hint", GROWING, ids=["gvisor", "virtio"])
def test_without_a_cgroups_limit_nobody_knows_where_the_memory_ends(hint: dict[str, str], tmp_path: Path) -> None:
    assert found(tmp_path, SMALL, hint).short(8 * GIB).what == "the machine"


@pytest.mark.parametrize("hint", GROWING, ids=["gvisor", "virtio"])
def test_a_machine_that_has_grown_beyond_the_cgroups_limit_may_be_full(hint: dict[str, str], tmp_path: Path) -> None:
    here = found(tmp_path, V2, {"proc/meminfo": f"MemTotal:  {64 << 20} kB\nMemAvailable:  {1 << 20} kB\n"}, hint)
    assert here.in_all == 30 * GIB and here.short(2 * GIB).what == "the machine"


def test_a_cgroups_limit_above_the_memory_promises_none(tmp_path: Path) -> None:
    here = found(tmp_path, V2, SMALL)
    assert here.grows == "" and here.in_all == 2 * GIB and here.short(2 * GIB).what == "the machine"


def test_nothing_needs_nothing() -> None:
    none = dataclasses.replace(host_limits(), bounds=(Bound("the machine", 0, 0, ""),))
    assert none.short(0) is None and none.short(1) is not None


# ---- torch's allocator under a limit of the device ----


@pytest.mark.parametrize("settings, calls", [
    ({}, ["expandable_segments:True", "expandable_segments:False"]),
    ({"PYTORCH_ALLOC_CONF": ""}, ["expandable_segments:True", "expandable_segments:False"]),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, []), ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, [])])
def test_the_allocators_settings_are_left_to_a_user_who_made_some(settings: dict[str, str], calls: list[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in cap._ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)
    held = Cap(torch.device("cuda"), lambda: 0)
    held.hold(50 * GIB, 0)
    held.lift()
    assert made == calls


@pytest.mark.parametrize("others, others_stores, made, limit, room", [
    (0, 0, 0, 80, 80 - 1 - 30), (0, 0, 30, 80, 80 - 1 - 30),          # what the store has already is counted once
    (9, 0, 0, 80, 80 - 1 - 30), (9, 0, 30, 80, 80 - 1 - 30),          # another process's memory is not this one's,
    (40, 0, 0, 80, 60 - 1 - 30),                                      # but it is missing from the device;
    (9, 20, 0, 80, 80 - 1 - 20 - 30)])                                # another model's is this process's
def test_a_limit_is_the_processs(others: int, others_stores: int, made: int, limit: int, room: int,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """GiB of a device of 100: 1 is the context's, and torch has 5."""
    shares: list[float] = []
    free = 100 - 1 - 5 - others - others_stores - made
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    device = torch.device("cuda:0")
    other, own = Cap(device, lambda: others_stores * GIB), Cap(device, lambda: made * GIB)
    own.hold(limit * GIB, 30 * GIB)
    other.close()
    assert shares == [pytest.approx(room / 100)]


@pytest.mark.parametrize(("files", "most"), [
    ({}, None),
    ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, None),
    ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/elsewhere/deep\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    ({"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker\n", "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us": "110000\n",
      "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us": "100000\n"}, 2),
    ({"proc/self/cgroup": "3:cpu:/docker\n", "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us": "100000\n"}, None),
], ids=["none", "max", "parent", "another namespace", "v1", "v1 without"])
def test_processors_are_those_of_the_affinity_and_of_every_quota(
        files: dict[str, str], most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7))
    found(tmp_path, files)
    assert cpus(tmp_path / "proc", tmp_path / "sys") == (most or 7)
