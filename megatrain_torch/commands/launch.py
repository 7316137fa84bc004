"""The processes of a command: this one alone, or one for each GPU; started, told of signals, and ended with.

`launch`, in the process that the shell began, starts the others, which run the same command, and waits for them. In
each `team_of` gives the Team: the first has the run's folder; it checks, reads data, writes. The others wait for it.
Why they end is said once, by the process that the shell began.

torchrun would end them 30 seconds after a signal, whether a checkpoint is written or not, and has one status for
whatever happened.
"""
from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from megatrain_torch import MegatrainError

T = TypeVar("T")
# Who started this one; a file of why processes end; the first one's socket, on which its store listens.
LAUNCHER, TOLD, MEET = "MEGATRAIN_LAUNCHER", "MEGATRAIN_TOLD", "MEGATRAIN_MEET"
PR_SET_PDEATHSIG = 1                 # of linux/prctl.h
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 30.0                       # in which the others end by themselves, once one has failed
PATIENCE = timedelta(days=3)         # the first one may read much data, and write to a slow disk
MEETING = timedelta(minutes=10)      # in which all have come to the store


class Heard(MegatrainError):
    """Another process failed, and says why."""


# ---- in each of them -----------------------------------------------------------------------------

def joins() -> bool:
    return LAUNCHER in os.environ


def watch() -> None:
    """A process that was started for one GPU is told to stop, and save, when who started it is gone."""
    if joins():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[LAUNCHER]):        # gone before that was asked for
            os.kill(os.getpid(), signal.SIGTERM)


def complain(why: BaseException, text: str) -> None:
    """Says why the command ends, or tells who started this process."""
    if isinstance(why, Heard):
        return
    if joins() and os.getppid() == int(os.environ[LAUNCHER]):    # killed, it leaves the file, and nobody reads it
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(os.environ[TOLD], os.O_WRONLY | os.O_APPEND)
            os.write(fd, json.dumps([int(os.environ["RANK"]), text]).encode() + b"\n")
            os.close(fd)
            return
    sys.stderr.write(f"megatrain: {text}\n")


class Team:
    """size: processes. first: this one has the folder. group: gloo's, on which nothing else goes."""

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None) -> None:
        self.size, self.first, self._rank, self._group = size, rank == 0, rank, group

    def _told(self, tell: Callable[..., Any], found: T, *how: Any) -> T:
        try:
            if self.size > 1:
                tell(found, *how, self._group)
        except RuntimeError:                             # of gloo: a connection was closed
            raise MegatrainError("another process is gone") from None     # said, unless it has said why
        return found

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """What fails in one fails in all, whatever it is, since the others wait here; the first that failed says it."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as own:
            error = own
        failed = [error is not None and rank == self._rank for rank in range(self.size)]
        try:
            self._told(dist.all_gather_object, failed, error is not None)
        finally:
            if error is not None and (not isinstance(error, MegatrainError) or failed.index(True) == self._rank):
                raise error
        if any(failed):
            raise Heard(f"rank {failed.index(True)} failed")

    def first_does(self, what: Callable[[], T]) -> T:
        """What the first one's call gives, in all. What it refuses is refused in all."""
        with self.as_one():
            found = [what() if self.first else None]
        return self._told(dist.broadcast_object_list, found, 0)[0]

    def most(self, *numbers: int) -> list[int]:
        """Of each of these the highest that any has."""
        return self._told(dist.all_reduce, torch.tensor(numbers), dist.ReduceOp.MAX).tolist()


@contextlib.contextmanager
def team_of(device: str) -> Iterator[Team]:
    """This process's, for as long as a command runs. device: "cuda" or "cpu"."""
    if not joins():
        yield Team()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet by a store of the first one's, which outlives who started them: so a last checkpoint is written.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, MEETING,
                          master_listen_fd=None if rank else int(os.environ[MEET]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    yield Team(size, rank, dist.new_group(backend="gloo", timeout=PATIENCE))
    dist.destroy_process_group()         # where it failed, another may wait in it for what does not come


@contextlib.contextmanager
def hearing(heard: Callable[[int, Any], None]) -> Iterator[None]:
    """Meanwhile signals come to this function; of a thread other than the main one, which has none, nothing does."""
    numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, heard) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- in the one that starts them -----------------------------------------------------------------

def launch(words: Sequence[str], gpus: int) -> int:
    """Runs the command in as many processes; returns the status of the first that failed, or 0."""
    deadline, told = math.inf, tempfile.NamedTemporaryFile("r")
    failed = (0, 0)                      # code and rank of the first that did not end well
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // gpus)
    meet = socket.create_server(("127.0.0.1", 0))        # the first one inherits it: so its port stays theirs
    # What torchrun sets, for those who look there; modules are looked for where this process finds them.
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, LAUNCHER: str(os.getpid()), TOLD: told.name,
           "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(meet.getsockname()[1]), MEET: str(meet.fileno()), "PYTHONSAFEPATH": "1",
           "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    # In sessions of their own: a terminal's Ctrl-C comes to this process alone, which passes it on once.
    processes = [subprocess.Popen([sys.executable, "-m", __package__.partition(".")[0], *words],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if rank else None,
                                  env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (quiet if rank else {}),
                                  pass_fds=() if rank else (meet.fileno(),), start_new_session=True)
                 for rank in range(gpus)]
    meet.close()

    def pass_on(number: int, _: object) -> None:
        for process in processes:
            process.send_signal(number)                  # to none that has ended

    def kill() -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    try:
        with hearing(pass_on):
            running = True
            while running:
                running = any([process.poll() is None for process in processes])
                ended = [(process.returncode, rank) for rank, process in enumerate(processes) if process.returncode]
                if ended and not failed[0]:
                    failed = min(ended)                  # killed ones first: they are the cause
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                if time.monotonic() > deadline:
                    kill()
                time.sleep(0.05 * running)
    finally:
        kill()                                           # whatever ended this, they end too
    code, rank = failed
    who, text = json.loads(told.readline() or '[0, ""]')                         # the first of what processes said
    text = f"rank {who}: {text}" if who else text
    if code < 0:
        more = "; there may be no memory left: the kernel's log says so" if code == -signal.SIGKILL else ""
        text = f"rank {rank} (process {processes[rank].pid}) was ended by {signal.Signals(-code).name}{more}"
    if text:
        sys.stderr.write(f"megatrain: {text}\n")
    return code if code >= 0 else 128 - code
