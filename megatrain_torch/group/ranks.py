"""The processes that stream one model together, and how they agree.

torch.distributed carries all: gradients between devices in the group that the user made (NCCL, or gloo on the CPU
device), and what processes tell each other about themselves over gloo, beside it (control.py).
"""
from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from ..base.errors import MegatrainError
from .control import PATIENCE, Control

_LAUNCHER_S = 1.0            # from one look for the launcher to the next
_watching = threading.Lock() # taken for good by the first


class Ranks:
    first_bytes = 16 << 20       # to each rank: of more bytes NCCL opens more channels, which take memory then
    taken = 0                    # bytes of the device that NCCL took for this process, by whichever ranks asked first

    def __init__(self, data: dist.ProcessGroup, patience: timedelta = PATIENCE) -> None:
        """patience: as Control has it."""
        self.data, self.rank, self.size = data, dist.get_rank(data), dist.get_world_size(data)   # gradients go in data
        self.control = Control(data, patience)           # what they tell each other goes there
        # By rank, what names its machine: its boot. Under torchrun two agents on one machine are as two machines.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        self.machines: list[str] = self.gather(f"{boot} {os.environ.get('GROUP_RANK', '')}".strip())
        self.mates = self._on(self.machines[self.rank])  # ranks on this one's machine, in order
        self.apart = len(self.mates) < self.size         # they are on several machines
        # By (sender, hearer), groups in which weights go to other machines, and come from there.
        self.ways: dict[tuple[int, int], Any] = {}
        self.given_up = threading.Event()                # from then on what goes in its groups ends with any bytes
        self._aside: Ranks | None = None
        self._gathers: Any = None

    def connect(self, device: torch.device) -> None:
        """Makes what tensors of the device travel by, and so takes its memory there, before anybody asks how much is
        free. All come here."""
        nccl = device.type == "cuda" and self.nccl()
        if nccl:
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info(device)[0]
            with torch.cuda.device(device), self.control.named("connects to the others' GPUs"):
                each = min(self.first_bytes, (1 << 29) // self.size)         # at most 1 GiB in all
                sent = torch.zeros(self.size * each, dtype=torch.uint8, device=device)
                dist.all_to_all_single(torch.empty_like(sent), sent, group=self.data)
                del sent
        pairs = [*((self.rank, r) for r in self.hearers().values()), *((r, self.rank) for r in self.spoken_for())]
        for pair in sorted(pairs, key=lambda pair: (sorted(pair), pair)):
            self.ways[pair] = self.control.way(*pair, device if nccl else torch.device("cpu"))
        if nccl:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            Ranks.taken += max(before - torch.cuda.mem_get_info(device)[0], 0)

    def aside(self) -> Ranks:
        """The same processes with a control group of its own, for another thread; made at the first call, by all."""
        if self._aside is None:
            self._aside = copy.copy(self)
            self._aside.control = Control(self.data, self.control.patience, self.control.engine)
        return self._aside

    def nccl(self) -> bool:
        """GPUs' tensors go by it."""
        return torch.device("cuda") in self.data._device_types and self._backend().name() == "nccl"

    def gathers(self, control: Control) -> Any:
        """NCCL's group of the ranks of this machine, for weights; as patient as the user's own. All of them make it.
        control: theirs."""
        if self._gathers is None:
            self._gathers = control.gathers(self._backend().options._timeout)
        return self._gathers

    def _backend(self) -> Any:
        return self.data._get_backend(torch.device("cuda"))

    def give_up(self) -> None:
        """Another process is gone, for which NCCL's kernels wait without end: they are ended."""
        self.given_up.set()
        for backend in [self._backend(), *self.ways.values(), self._gathers] if self.nccl() else []:
            if backend is not None:
                _end(backend, failed=True)

    def leave(self, failed: bool) -> None:
        """Gives back the groups that are its own; the ways, by which the last things go, only where that failed. Else
        who uses them does. failed: nobody waits for what is under way there, which may have no end."""
        if failed:
            self.given_up.set()
            for pair in list(self.ways):
                give_back(self.ways, pair, failed)
        if self._gathers is not None:
            _end(self._gathers, failed)
        self._gathers = None

    def _on(self, machine: str) -> list[int]:
        return [r for r, other in enumerate(self.machines) if other == machine]

    def _beside(self, machine: str, rank: int) -> int:
        """The rank of that machine that has to do with this one of another."""
        there = self._on(machine)
        return there[self._on(self.machines[rank]).index(rank) % len(there)]

    def hearers(self) -> dict[str, int]:
        """Who speaks for this rank on other machines, by machine."""
        own = self.machines[self.rank]
        return {machine: self._beside(machine, self.rank) for machine in dict.fromkeys(self.machines) if machine != own}

    def speakers(self) -> tuple[int, ...]:
        """By rank, who speaks for it on this machine."""
        own = self.machines[self.rank]
        return tuple(self._beside(own, rank) if machine != own else rank for rank, machine in enumerate(self.machines))

    def spoken_for(self) -> list[int]:
        """Ranks of other machines for which this one speaks."""
        return [rank for rank, speaker in enumerate(self.speakers()) if speaker == self.rank != rank]

    def __str__(self) -> str:
        machines = len(set(self.machines))
        return f"rank {self.rank} of {self.size} processes on {machines} machine{'s' * (machines > 1)}"

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, by rank."""
        return self.control.gather(value)

    def agree(self, what: str, value: Any) -> None:
        """Raises on every rank: the ranks do not all give the same; which ones differ, and in what."""
        found = self.gather(value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise MegatrainError(f"{what} is not the same in all processes: {_first_difference(found[0], other)} "
                                     f"in rank 0 and rank {rank}; each has to make the same model in the same way")


def give_back(groups: dict[Any, Any], name: Any, failed: bool = False) -> None:
    """Once, whichever thread comes first: NCCL must abort nothing that was shut down."""
    if (group := groups.pop(name, None)) is not None:
        _end(group, failed)


def _end(group: Any, failed: bool) -> None:
    with suppress(Exception):                # gloo has nothing to give back
        (group.abort if failed else group.shutdown)()


def ranks_of(group: Any) -> Ranks | None:
    """group: a ProcessGroup, or None, the default one. None: this process is alone.

    Raises:
        MegatrainError: another thing; or a launcher started several processes, and they have no group.
    """
    if not dist.is_available() or not dist.is_initialized():
        many = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
        if group is not None or many not in ("", "1"):
            why = "group=" if group is not None else f"a launcher started {many} processes (WORLD_SIZE)"
            raise MegatrainError(f"{why}: torch.distributed is not initialized; call torch.distributed."
                                 "init_process_group() before, or each trains a model of its own")
        return None
    data = dist.group.WORLD if group is None else group
    if not isinstance(data, dist.ProcessGroup):
        raise MegatrainError(f"group={group!r}: a ProcessGroup is needed; of a DeviceMesh mesh['dp'].get_group()")
    return Ranks(data) if dist.get_world_size(data) > 1 else None


def _first_difference(mine: Any, other: Any) -> str:
    if not (isinstance(mine, (list, tuple)) and isinstance(other, (list, tuple))):
        return f"{mine!r} and {other!r}"
    differ = next(((a, b) for a, b in zip(mine, other) if a != b), None)
    return _first_difference(*differ) if differ else f"{len(mine)} and {len(other)} of them"


@contextmanager
def as_one(ranks: Ranks | None) -> Iterator[None]:
    """What fails on one rank fails on all, in its words; whatever it is, since the others wait here. None: this process
    is alone."""
    if ranks is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        try:
            ranks.gather(str(error) if isinstance(error, MegatrainError) else f"{type(error).__name__}: {error}")
        finally:
            raise error
    for rank, text in enumerate(ranks.gather(None)):
        if text is not None:
            raise MegatrainError(f"rank {rank}: {text}")


# ---- one file descriptor, for all processes of a machine ----

def shared(ranks: Ranks, own: int) -> int:
    """The descriptor that the machine's first rank gives as `own`; a new one in the others, who close it. Called by all
    ranks of the group.

    Raises:
        MegatrainError: this process may not open another's.
    """
    first = ranks.mates[0]
    pid, fd = ranks.gather((os.getpid(), own))[first]
    with as_one(ranks):                      # the first has its own open until all have theirs
        if ranks.rank == first:
            return own
        try:
            return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MegatrainError(f"memory of process {pid}, the machine's first, cannot be opened ({error.strerror}): "
                                 "processes of one machine have to be one user's, and in one container") from error


# ---- the process that started this one, and others beside it: where it is killed, nobody is left to end them ----

def watch_torchrun() -> None:
    """Where torchrun started this process, it is told to end, by SIGTERM, when that is gone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and _watching.acquire(blocking=False):
        threading.Thread(target=_end_with, args=(os.getppid(),), name="mt-launcher", daemon=True).start()


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LAUNCHER_S)
    print(f"megatrain_torch: the launcher (process {launcher}) ended, and so does rank {os.environ.get('RANK', '?')}",
          file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
