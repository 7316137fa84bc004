"""The processes of a command: this one alone, or one for each GPU; started, told of signals, and ended with.

    launch     in the process that the shell began: starts the others, which run the same command, and waits for them
    team_of    in each of them: who they are. The first has the run's folder: it checks, reads data, writes; the others
               wait for it, and say nothing
    complain   why a command ends: on stderr; of several processes, to the one that the shell began, which says it once

torchrun would end them 30 seconds after a signal, whether a checkpoint is written or not, and has one status for
whatever happened.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from megatrain_torch import MegatrainError

T = TypeVar("T")
STORE, LAUNCHER = "MEGATRAIN_STORE", "MEGATRAIN_LAUNCHER"        # port, and process, of who started this one
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 30.0                       # in which the others end by themselves, once one has failed
PATIENCE = timedelta(days=3)         # the first one may read much data, and write to a slow disk
_TOLD, _MET = "told", "met"


# ---- in each of them -----------------------------------------------------------------------------

def joins() -> bool:
    """Was this process started for one GPU of several?"""
    return STORE in os.environ


def watch() -> None:
    """A process that was started for one GPU is told to stop, and save, when who started it is gone."""
    launcher = int(os.environ.get(LAUNCHER, 0))

    def look() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        sys.stderr.write(f"megatrain: the launcher (process {launcher}) ended, and so does rank {_rank()}\n")
        os.kill(os.getpid(), signal.SIGTERM)

    if launcher:
        threading.Thread(target=look, daemon=True).start()


def complain(text: str) -> None:
    """Says why the command ends."""
    if joins():
        with contextlib.suppress(RuntimeError):          # who would say it is gone
            _store().append(_TOLD, json.dumps([_rank(), text]) + "\n")
            return
    sys.stderr.write(f"megatrain: {text}\n")


def _rank() -> int:
    return int(os.environ["RANK"])


def _store(port: str | None = None) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", int(port or os.environ[STORE]), is_master=False)


def _own_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Team:
    """size: processes. first: this one has the folder."""

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None) -> None:
        """group: gloo's, on which nothing else goes."""
        self.size, self.first, self._group = size, rank == 0, group

    def _told(self, tell: Callable[..., Any], found: T, *how: Any) -> T:
        try:
            if self.size > 1:
                tell(found, *how, self._group)
        except RuntimeError:                             # of gloo: a connection was closed
            raise MegatrainError("another process is gone") from None
        return found

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """What fails in one fails in all, in its words; whatever it is, since the others wait here."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as own:
            error = own
        kind = "" if isinstance(error, MegatrainError) else f"{type(error).__name__}: "
        try:
            told = self._told(dist.all_gather_object, [None] * self.size, None if error is None else f"{kind}{error}")
        finally:
            if error is not None:
                raise error
        if (rank := next((r for r, text in enumerate(told) if text is not None), None)) is not None:
            raise MegatrainError(f"rank {rank}: {told[rank]}")

    def first_does(self, what: Callable[[], T]) -> T | None:
        """What the first one's call gives, there; None in the others. What it refuses is refused in all."""
        with self.as_one():
            return what() if self.first else None

    def of_first(self, value: T) -> T:
        """The first one's, in all."""
        return self._told(dist.broadcast_object_list, [value], 0)[0]

    def most(self, *numbers: int) -> list[int]:
        """Of each of these the highest that any has."""
        return self._told(dist.all_reduce, torch.tensor(numbers), dist.ReduceOp.MAX).tolist()

    def meet(self) -> None:
        """All have come here."""
        self.of_first(None)


@contextlib.contextmanager
def team_of(device: str) -> Iterator[Team]:
    """This process's, for as long as a command runs. device: "cuda" or "cpu"."""
    if not joins():
        yield Team()
        return
    rank, size = _rank(), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # They meet by a store of the first one's, which outlives who started them: so a last checkpoint is written.
    if rank == 0:
        store = _own_store()
        _store().set(_MET, str(store.port))
    else:
        store = _store(_store().get(_MET).decode())
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
    store, deadline, interrupts = _own_store(), math.inf, 0
    failed = (0, 0)                      # code and rank of the first that did not end well
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // gpus)
    # What torchrun sets, for those who look there; modules are looked for where this process finds them.
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, STORE: str(store.port), LAUNCHER: str(os.getpid()),
           "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(store.port), "PYTHONSAFEPATH": "1",
           "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    # In sessions of their own: a terminal's Ctrl-C comes to this process alone, which passes it on once.
    processes = [subprocess.Popen([sys.executable, "-m", __package__.partition(".")[0], *words],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if rank else None,
                                  env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (quiet if rank else {}),
                                  start_new_session=True) for rank in range(gpus)]

    def pass_on(number: int, _: object) -> None:
        nonlocal deadline, interrupts
        for process in processes:
            process.send_signal(number)                  # to none that has ended
        interrupts += number == signal.SIGINT
        if interrupts == 2:                              # they end at once
            deadline = min(deadline, time.monotonic() + GRACE_S)

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
    store.append(_TOLD, "")
    told = [tuple(json.loads(line)) for line in store.get(_TOLD).decode().splitlines()]
    code, rank = failed
    if text := _killed(code, rank, processes[rank].pid) or said_once(told):
        complain(text)
    return code if code >= 0 else 128 - code


def _killed(code: int, rank: int, pid: int) -> str:
    """Words for a process that ended by a signal; "": it did not."""
    if code >= 0:
        return ""
    more = "; there may be no memory left: the kernel's log says so" if code == -signal.SIGKILL else ""
    return f"rank {rank} (process {pid}) was ended by {signal.Signals(-code).name}{more}"


def said_once(told: list[tuple[int, str]]) -> str:
    """Of what processes said, each (rank, text), in its order: the first, in rank 0's words where it said the same."""
    causes = []
    for rank, text in told:
        found = re.match(r"rank (\d+): ", text)          # another's words are told with its number
        causes.append((int(found[1]), text[found.end():]) if found else (rank, text))
    if not causes:
        return ""
    rank, text = causes[0]
    return text if rank == 0 or (0, text) in causes else f"rank {rank}: {text}"
