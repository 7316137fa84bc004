"""The way into a streamed model: calls in the place of modules' methods, one thread at a time, and a trace of them.

Slots, sums and hand-overs are one thread's, and a second's outputs would be wrong. A thread is in a model during its
forward, an optimizer's step, and a backward from the first weight that is asked for to the task's end. Others that come
meanwhile wait, and are refused after PATIENCE_S, as a second backward is at once. Autograd's own thread, in which a
backward on CUDA runs, goes with the thread that waits for it.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.autograd.graph import _engine_run_backward

from ..base.errors import MegatrainError

if TYPE_CHECKING:
    from .window import Window

_ENGINE = _engine_run_backward.__code__
PATIENCE_S = 60.0                            # a thread's, for another one to leave


class Door:
    forward: CodeType | None = None              # whose frames are a forward

    def __init__(self, name: str, own_threads: bool) -> None:
        """own_threads: autograd runs a backward in a thread of its own, not in the caller's."""
        self.name, self._own_threads = name, own_threads
        self._lock, self._turn = threading.RLock(), threading.Lock()
        self.thread = self._depth = 0            # who was let in last, and how often
        self.tasks: dict[int, int] = {}          # backwards under way, and a thread of each

    def enter(self, task: int) -> bool:
        """A forward begins, or a part of one, in a backward where task is not -1. True: it has to `leave`. Raises:
        another thread is in the model, and was for PATIENCE_S."""
        inside = task != -1 or (self._depth and self.thread == threading.get_ident())
        with nullcontext() if inside else self._turn:    # who waits holds it, and comes before who comes once more
            end = 0.0
            while not isinstance(found := self._try(task), bool):
                end = end or time.monotonic() + PATIENCE_S
                if time.monotonic() > end:
                    self._refuse(*found)
                time.sleep(0.001)
            return found

    def _try(self, task: int) -> bool | tuple[str, int, str]:
        """As `enter`; or for `_refuse`, why not now."""
        if not self._lock.acquire(blocking=False):
            # Autograd's thread may come: the one that is in a forward waits in it for a backward.
            waits = _first_of(sys._current_frames().get(self.thread), self.forward) is _ENGINE
            if task == -1 or not waits:
                return "calls it" if task == -1 else "runs its backward", self.thread, "forward"
            return False
        if self.tasks and task == -1:        # are they under way? Of one that raised nobody was told the end
            found = _in_engine()
            busy = found if self._own_threads else [t for t in self.tasks.values() if t in found]
            if busy:
                self._lock.release()
                return "calls it", busy[0], "backward"
            self.tasks.clear()
        self.thread = threading.get_ident()
        self._depth += 1
        return True

    def leave(self) -> None:
        self._depth -= 1
        self._lock.release()

    @contextlib.contextmanager
    def held(self, task: int) -> Iterator[None]:
        """No other thread's forward begins meanwhile. task: of the backward that this is in, -1: none. A thread that
        Python did not start is autograd's, at the end of a backward: it goes with the one that waits for it."""
        takes = not isinstance(threading.current_thread(), threading._DummyThread) and self.enter(task)
        try:
            yield
        finally:
            if takes:
                self.leave()

    def task_begins(self, task: int) -> None:
        """A backward asks for its first weight, or hands over. Raises: another thread is in the model."""
        if self.enter(task):
            self.leave()
            found = _in_engine() if self.tasks else []
            busy = [t for t in self.tasks.values() if t in found]
            if busy or (self._own_threads and len(found) > 1):
                self._refuse("runs its backward", (busy or found)[0], "backward")
        self.tasks[task] = threading.get_ident()

    def _refuse(self, what: str, other: int, where: str) -> None:
        names = {t.ident: t.name for t in threading.enumerate()}
        raise MegatrainError(f"{self.name}: thread {threading.current_thread().name!r} {what} while thread "
                             f"{names.get(other, str(other))!r} is in its {where}: one thread at a time may use a "
                             "streamed model; let them take turns, with a lock around forward and backward")


def _in_engine() -> list[int]:
    """Other threads that are in a backward."""
    me = threading.get_ident()
    return [t for t, frame in sys._current_frames().items() if t != me and _first_of(frame) is _ENGINE]


def _first_of(frame: FrameType | None, other: CodeType | None = None) -> object:
    """The first of autograd's call and `other` that a stack has, from its end."""
    while frame is not None and frame.f_code not in (_ENGINE, other):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def method_of(call: Any, module: nn.Module) -> bool:
    return isinstance(call, types.MethodType) and call.__self__ is module


def window_of(module: nn.Module) -> Window | None:
    """What runs this module's forward, where that is a window. Dynamo wraps it, if it was there first."""
    call = getattr(vars(module).get("forward"), "_call", None)
    call = getattr(call, "__wrapped__", call)
    return call if hasattr(call, "records") else None


class Installed:
    """A callable put in a module's `__dict__` in place of a method of its class.

    Looks like the method it stands for (`__wrapped__`, `__name__`, `__func__`, `__self__`); deepcopy
    and pickle of the module give the class's own method back, hence an ordinary model.
    """

    def __init__(self, module: nn.Module, name: str, call: Any) -> None:
        self._own, self._module = module.__dict__.get(name), weakref.ref(module)
        original = getattr(module, name)
        self._is_method = method_of(original, module)
        self.__func__ = getattr(original, "__func__", original)
        for said in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(original, said):
                setattr(self, said, getattr(original, said))
        self.__dict__.update({k: v for k, v in getattr(original, "__dict__", {}).items() if k != "__wrapped__"})
        self.__name__ = name
        self._call = call

    @property
    def __self__(self) -> nn.Module:
        """Weakly: the module has this."""
        return self._module()

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__, self._module()) if self._is_method else self.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return getattr(copy.deepcopy(self.__self__, memo), self.__name__)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__name__)

    def remove(self) -> None:
        if self._own is not None:
            self.__self__.__dict__[self.__name__] = self._own
        else:
            self.__self__.__dict__.pop(self.__name__, None)


class Untraced:
    """In a trace's place while mt.trace is not on: who tells a trace something need not ask whether it is on."""

    def pass_begins(self) -> None: ...

    handed_over = finish = stop = pass_begins

    def during(self, window: Window, work: str) -> AbstractContextManager[Any]:
        """What compute is given inside is this work of the window."""
        return nullcontext()

    def steps(self, count: int) -> list[Any]:
        return []


UNTRACED = Untraced()
