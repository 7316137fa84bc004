"""One thread at a time in a model: slots, sums and hand-overs are one thread's, and a second's outputs would be wrong.

A thread is in a model during its forward, and during a backward from the first weight that is asked for to the task's
end. Others that come meanwhile are refused. Turns are anybody's; and autograd's own thread, in which a backward on CUDA
runs, goes with the thread that waits for it.
"""
from __future__ import annotations

import sys
import threading
from types import FrameType

from torch.autograd.graph import _engine_run_backward

from ..base.errors import MegatrainError

_ENGINE = _engine_run_backward.__code__


class Door:
    """
    Attributes:
        thread: who was let in last. tasks: backwards under way, and a thread of each.
        forwards: code whose frames are a forward.
    """

    forwards: frozenset = frozenset()

    def __init__(self, name: str, own_threads: bool) -> None:
        """own_threads: autograd runs a backward in a thread of its own, not in the caller's."""
        self.name, self._own_threads = name, own_threads
        self._lock = threading.RLock()
        self.thread = 0
        self.tasks: dict[int, int] = {}

    def enter(self, task: int) -> bool:
        """A forward begins, or a part of one, in a backward where task is not -1. True: it has to `leave`.

        Raises:
            MegatrainError: another thread is in the model.
        """
        if not self._lock.acquire(blocking=False):
            if task == -1 or not _waits(self.thread):
                self._refuse("calls it" if task == -1 else "runs its backward", self.thread, "forward")
            return False
        if self.tasks and task == -1:
            try:
                self._look_at_tasks()
            except BaseException:
                self._lock.release()
                raise
        self.thread = threading.get_ident()
        return True

    def leave(self) -> None:
        self._lock.release()

    def task_begins(self, task: int) -> None:
        """A backward asks for its first weight, or hands over.

        Raises:
            MegatrainError: another thread is in the model.
        """
        if not self.enter(task):
            self.tasks[task] = threading.get_ident()
            return
        self.leave()
        me = threading.get_ident()
        if self.tasks:
            found = _in_engine(me)
            busy = [t for t in self.tasks.values() if t in found]
            if busy or (self._own_threads and len(found) > 1):
                self._refuse("runs its backward", (busy or found)[0], "backward")
        self.tasks[task] = me

    def task_ends(self, task: int) -> None:
        self.tasks.pop(task, None)

    def _look_at_tasks(self) -> None:
        """Are they under way? Of one that raised nobody was told the end."""
        found = _in_engine(threading.get_ident())
        busy = found if self._own_threads else [t for t in self.tasks.values() if t in found]
        if busy:
            self._refuse("calls it", busy[0], "backward")
        self.tasks.clear()

    def _refuse(self, what: str, other: int, where: str) -> None:
        names = {t.ident: t.name for t in threading.enumerate()}
        raise MegatrainError(f"{self.name}: thread {threading.current_thread().name!r} {what} while thread "
                             f"{names.get(other, str(other))!r} is in its {where}: one thread at a time may use a "
                             "streamed model; let them take turns, with a lock around forward and backward")


def _in_engine(but: int) -> list[int]:
    """Threads that are in a backward."""
    return [t for t, frame in sys._current_frames().items() if t != but and _meets(frame, frozenset()) is _ENGINE]


def _waits(thread: int) -> bool:
    """Does this thread, which is in a forward, wait in it for a backward?"""
    return _meets(sys._current_frames().get(thread), Door.forwards) is _ENGINE


def _meets(frame: FrameType | None, others: frozenset) -> object:
    """The first of autograd's call and `others` that a stack has, from its end."""
    while frame is not None and frame.f_code is not _ENGINE and frame.f_code not in others:
        frame = frame.f_back
    return None if frame is None else frame.f_code
