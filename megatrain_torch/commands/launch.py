"""A command's processes, one for each GPU: started, told of signals, and ended with.

    launch     in the process that the shell began: starts the others, which run the same command, and waits for them
    joins      is this one of them?
    complain   why a command ends: on stderr; of several processes, to the one that the shell began, which says it once

torchrun would end them 30 seconds after a signal, whether a checkpoint is written or not, and has one status for
whatever happened.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from torch import distributed as dist

from megatrain_torch import MegatrainError

from ..group.ranks import watch_launcher

STORE, LAUNCHER = "MEGATRAIN_STORE", "MEGATRAIN_LAUNCHER"        # port, and process, of who started this one
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 30.0                       # in which the others end by themselves, once one has failed
_TOLD, _MET = "told", "met"


# ---- in each of them -----------------------------------------------------------------------------

def joins() -> bool:
    """Was this process started for one GPU of several?"""
    return STORE in os.environ


def check_alone() -> None:
    """Raises: MegatrainError: another launcher started this process, and others beside it."""
    many = os.environ.get("WORLD_SIZE", "1")
    if many != "1" and not joins():
        raise MegatrainError(f"this is one of {many} processes (WORLD_SIZE) that a launcher started: start one, and "
                             f"--gpus {many} starts the others")


def watch() -> None:
    """This process, where it was started for one GPU of several, is told to stop, and save, when who started it is
    gone."""
    if joins():
        watch_launcher(int(os.environ[LAUNCHER]))


def join(backend: str) -> None:
    """Makes the group of all."""
    dist.init_process_group(backend, store=_group(), rank=_rank(), world_size=int(os.environ["WORLD_SIZE"]))


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


def _group() -> dist.TCPStore:
    """What processes meet by: the first one's, so that it outlives who started them, and a last checkpoint is written.
    """
    if _rank():
        return _store(_store().get(_MET).decode())
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _store().set(_MET, str(own.port))
    return own


# ---- in the one that starts them -----------------------------------------------------------------

def launch(words: Sequence[str], gpus: int) -> int:
    """Runs the command in as many processes; returns the status of the first that failed, or 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = _Processes(words, gpus, store.port)
    with processes.listening():
        processes.wait()
    store.append(_TOLD, "")
    told = [tuple(json.loads(line)) for line in store.get(_TOLD).decode().splitlines()]
    if text := processes.killed() or said_once(told):
        complain(text)
    return processes.status


def said_once(told: list[tuple[int, str]]) -> str:
    """Of what processes said, each (rank, text), in its order: the first, in rank 0's words where it said the same."""
    if not told:
        return ""
    causes = [_cause(rank, text) for rank, text in told]
    rank, text = causes[0]
    return text if rank == 0 or (0, text) in causes else f"rank {rank}: {text}"


def _cause(rank: int, text: str) -> tuple[int, str]:
    """Whose words they are: another's are told with its number."""
    found = re.match(r"rank (\d+): ", text)
    return (int(found[1]), text[found.end():]) if found else (rank, text)


class _Processes:
    """
    Attributes:
        status: of the first that did not end well, as a shell has it.
    """

    def __init__(self, words: Sequence[str], gpus: int, port: int) -> None:
        self.status, self._deadline, self._interrupts = 0, float("inf"), 0
        self._failed = -1
        command = [sys.executable, "-m", __package__.partition(".")[0], *words]
        # In sessions of their own: a terminal's Ctrl-C comes to this process alone, which passes it on once.
        self._all = [subprocess.Popen(command, env=_environment(rank, gpus, port), stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL if rank else None, start_new_session=True)
                     for rank in range(gpus)]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals go to all; whatever ends this, they end too."""
        heard = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self._pass_on) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._kill()

    def _pass_on(self, number: int, _: object) -> None:
        for process in self._all:
            process.send_signal(number)                  # to none that has ended
        self._interrupts += number == signal.SIGINT
        if self._interrupts == 2:                        # they end at once
            self._hurry()

    def wait(self) -> None:
        """Until all have ended; those that do not end by themselves when one has failed are killed."""
        while any([process.poll() is None for process in self._all]):
            if self._failed < 0:
                self._look()
            if time.monotonic() > self._deadline:
                self._kill()
            time.sleep(0.05)
        self._look()

    def _look(self) -> None:
        ended = [(rank, process.returncode) for rank, process in enumerate(self._all) if process.returncode]
        if ended and self._failed < 0:
            self._failed, code = min(ended, key=lambda each: each[1])        # killed ones first: they are the cause
            self.status = code if code > 0 else 128 - code
            self._hurry()

    def _hurry(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def killed(self) -> str:
        """Words for a process that ended by a signal; "": none that began it did."""
        code = self._all[self._failed].returncode if self._failed >= 0 else 0
        if code >= 0:
            return ""
        more = "; there may be no memory left: the kernel's log says so" if code == -signal.SIGKILL else ""
        return (f"rank {self._failed} (process {self._all[self._failed].pid}) was ended by "
                f"{signal.Signals(-code).name}{more}")

    def _kill(self) -> None:
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()


def _environment(rank: int, gpus: int, port: int) -> dict[str, str]:
    """What torchrun sets, for those who look there; modules are looked for where this process finds them."""
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // gpus)
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"} if rank else {}
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **quiet, STORE: str(port), LAUNCHER: str(os.getpid()),
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
