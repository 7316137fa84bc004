"""A save under way: its thread, its end, and what went wrong."""
from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..base.errors import MegatrainError
from ..group.control import ASIDE
from ..store.tensorfiles import TensorFile
from . import again, manifest
from .parts import Parts
from .writers import Writers

if TYPE_CHECKING:
    from ..model.runtime import Runtime

POLL_S = 0.25                        # between two calls of progress
AS_BEFORE = ", and what was there before is as it was"


class Saving:
    """A save that was begun. `wait()` returns when it is over, and raises what went wrong, each time.

    Attributes:
        folder: the name it takes, or has.
        bytes: of tensors' files that it writes. seconds: from the call until it had its name; 0.0 before.
        held: seconds for which the caller waited: for updates under way, and for what is small to be copied.
    """

    def __init__(self, folder: Path, progress: Callable[[int, int], None] | None, writers: Writers) -> None:
        self.folder, self.bytes, self._writers = folder, 0, writers
        self.seconds = self.held = 0.0
        self._progress, self._begun = progress, time.perf_counter()
        self._over = threading.Event()       # not the thread's own: a join that is interrupted takes it for dead
        self._process = os.getpid()          # whose thread it is
        self._error: BaseException | None = None
        self._named = False                  # it has its name: what failed came after
        self._told = False                   # its end was noticed: no later call needs to tell of it
        self._taken = threading.Lock()       # whoever has it ends the save: its thread or the caller's; never let go

    @property
    def over(self) -> bool:
        """Nothing is being written any more, whether it succeeded or failed."""
        return self._over.is_set()

    def wait(self) -> Saving:
        """Returns itself when the checkpoint has its name and is on the disk.

        Raises:
            MegatrainError: it could not be written, and the one before is as it was; or it has its name, and whether
                that is on the disk is not known.
        """
        self._wait()
        self._told = True
        self._raise()
        return self

    def check(self) -> None:
        """Raises what went wrong, unless somebody was told of it; waits for nothing."""
        if self.over and not self._told:
            self._told = True
            self._raise()

    def _finish(self) -> None:
        """As `check()`, when it is over."""
        self._wait()
        self.check()

    def _wait(self) -> None:
        if not self.over and os.getpid() != self._process:
            raise MegatrainError(f"{self.folder}: this process was forked from the one that writes it; wait there")
        self._over.wait()

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if not isinstance(error, Exception):                 # an interruption stays one
            raise error
        if self._named:
            raise MegatrainError(f"{self.folder} is whole and has its name, but the disk may not know it yet: "
                                 f"{error}") from error
        raise MegatrainError(f"saving {self.folder} failed{AS_BEFORE}: {error}") from error

    # ---- the work, on the caller's thread or on its own ----

    def _run(self, core: _core.Engine, rt: weakref.ref[Runtime], draft: manifest.Draft, parts: Parts,
             files: list[TensorFile], _memory: Any) -> None:
        """files: of the parts' those that are to be written."""
        body = parts.body
        try:
            with self._writers.as_one():
                self._follow(core)
                own = core.save_end()
            for f, sums in zip(files, self._writers.sums(own)):
                body["files"][f.name] = {"bytes": f.nbytes, "sums": sums.hex()}
            with self._writers.as_one():
                if self._writers.first:
                    for name, data in parts.small.items():
                        manifest.write(draft.path / name, data)
                    manifest.write(draft.path / manifest.NAME, manifest.dump(body))
                    draft.publish()
            if (model := rt()) is not None:
                model.saved_files = again.noted(parts.files, parts.still, self.folder, body)
                del model
        except BaseException as e:
            self._error, self._named = e, draft.published
            give_up(core)
            draft.drop()
        finally:
            self.seconds = time.perf_counter() - self._begun
            self._over.set()

    def _follow(self, core: _core.Engine) -> None:
        over = False
        while not over:
            done, over = core.save_wait(POLL_S)
            if self._progress is not None:
                self._progress(self.bytes if over else min(done * self._writers.parts, self.bytes), self.bytes)

    def _run_if_left(self, *work: Any) -> None:
        if self._taken.acquire(blocking=False):
            self._run(*work)

    def _start(self, asynchronous: bool, *work: Any) -> None:
        self.held = time.perf_counter() - self._begun
        if asynchronous:
            try:
                threading.Thread(target=self._run_if_left, args=work, name=ASIDE).start()    # no daemon: it ends it
                return
            except RuntimeError:             # the system has no thread to give: at once, then
                pass
        self._run(*work)
        self.held = self.seconds
        if not isinstance(self._error, Exception):           # an interruption is the caller's, now
            self.check()


def give_up(core: _core.Engine) -> None:
    try:
        core.save_end()
    except MegatrainError:                   # it was over, or the engine is gone
        return
