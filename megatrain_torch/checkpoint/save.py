"""mt.save: everything a run needs to go on with the same bits, written straight from the store.

    model-00001-of-00003.safetensors ...   weights and persistent buffers, with model.safetensors.index.json and
                                            config.json as transformers has them: `from_pretrained(folder)` reads it
                                            (weights-..., without these, of a transformers model with an adapter)
    frozen-00001-of-00002.safetensors ...  weights that do not train, where they are many, of the checkpoint before too
    states-00001-of-00009.safetensors ...  AdamW's planes as they are, unit by unit
    training.pt                            groups, scheduler, random states, `extra`, another optimizer's state_dict:
                                           torch.load(weights_only=True)
    manifest.json                          sizes, sums, what belongs to which parameter (manifest.py)

No second copy of the model is made: the engine copies blocks of 4 MiB out of the planes and writes them, unit by unit
(csrc/io/shards.h); what a unit has on the device or on disk is in host memory until its bytes are copied. What is saved
is one step's: everything under way ends first, and from then on each unit's next update, and writes from outside, wait
until its bytes are copied. So asynchronously training goes on while the disk writes, as far ahead as `spare` memory
allows: with none, the next step's updates wait for the disk; with as much as the checkpoint is large, for a copy alone.
"""
from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import cpus, host_limits, parse_bytes, show_bytes
from ..group.control import ASIDE, calling
from ..group.ranks import as_one
from ..model.runtime import runtime_of
from ..optim.adamw import AdamW
from ..store import gradient
from ..store.tensorfiles import TensorFile
from . import manifest
from .manifest import random_states
from .parts import Parts, held_by, parts_of, standing_parent

if TYPE_CHECKING:
    from ..model.runtime import Runtime

FILE_BYTES = 5 * 10**9               # of a file of tensors, at most
# Threads. A copier sums as it copies: 2.2 to 2.9 GB/s (Zen 4 server of 2 cores). The update that follows an
# asynchronous save waits for it, so there are as many as cores allow; of 16 cores 12 had a step wait 2.0 s for 46 GB, 4
# another 2.3, both in memory that was used for the first time.
COPIERS, WRITERS = max(4, min(16, cpus() * 3 // 4)), 8
LEAST_BYTES = (COPIERS + WRITERS) * (4 << 20)        # of blocks on their way: one for each thread
SPARE_BYTES = 2 << 30                # of an asynchronous save, unless it is said, or there is less
POLL_S = 0.25                        # between two calls of progress; after it an interruption is noticed
AS_BEFORE = ", and what was there before is as it was"


@calling("mt.save")
def save(model: nn.Module, opt: torch.optim.Optimizer | None, folder: str | Path, *, scheduler: Any = None,
         extra: Any = None, asynchronous: bool = False, spare: int | str | None = None,
         progress: Callable[[int, int], None] | None = None) -> Saving:
    """Writes a checkpoint: weights, optimizer states, scheduler, random states. mt.load takes it.

    Call it between steps; where several processes train the model, in all of them, and each writes a part.
    The folder appears, whole and synced, under its name, or replaces the checkpoint that has it; until then that one is
    untouched. Files that somebody put beside a checkpoint's own stay. Frozen weights are written once: the next
    checkpoint on the same file system has their files by hard links, after mt.load too.

    transformers' from_pretrained reads the folder, unless the model wraps transformers' own, as a PeftModel does. It
    does not know the names of such weights, so these are in other files, without config.json.
    `model.save_pretrained(folder)` after each save adds PEFT's files of the adapter alone, for
    `PeftModel.from_pretrained(base, folder)`.

    Args:
        model: the streamed model.
        opt: mt.AdamW, or a torch optimizer over its parameters (whose states are copied); None: weights alone.
        folder: a name that is free, or that of a checkpoint.
        scheduler: whatever has `state_dict()`: a learning rate scheduler, a data loader that knows its position.
        extra: tensors, numbers, strings, and lists, tuples and dicts of these: what else the run must know.
        asynchronous: return while the files are still written. If that fails, the next save, load or forward raises, or
            `wait()` of the object that is returned.
        spare: host memory for blocks that are copied and not yet written (bytes or "8GiB"). None: 2 GiB where
            asynchronous and so much is free, else the least, 4 MiB for each thread. Besides, what a unit has on the
            device or on disk is in host memory while it is copied, one unit at a time.
        progress: called with (bytes written, bytes in all) four times a second, from the thread that writes. Each of
            several processes reports its own bytes times their number.

    Raises:
        MegatrainError: the model is not streamed, or was streamed anew since its mt.AdamW was made. Gradients of an
            unfinished step stand. `extra` or the scheduler's state cannot be loaded back. There is no room on the disk
            or in host memory, or no permission. Writing failed. Nothing is lost then.
    """
    rt = runtime_of(model)
    saving = Saving(rt, Path(folder).absolute(), progress)
    rt.finish_save()
    randoms, when = zip(*saving._each((random_states(), asynchronous)))
    with as_one(saving._ranks):              # what fails in one process fails in all
        if len(set(when)) > 1:
            raise MegatrainError(f"asynchronous={list(when)}, by rank: it has to be the same on all")
        _check(rt, model, opt)
        parts = parts_of(rt, model, opt, scheduler, extra, list(randoms), FILE_BYTES)
        unchanged = parts.unchanged(rt.saved_files, saving.folder)
    linked = set.intersection(*saving._each(unchanged))
    with as_one(saving._ranks):
        left, need = parts.without(linked)
        room = _room(rt, saving.folder, need, held_by(left), parse_bytes(spare, "spare"), asynchronous)
    saving._begin(rt, parts, linked, asynchronous, room)
    if not asynchronous:
        saving.check()
    return saving


# ---- what is refused -----------------------------------------------------------------------------

def _check(rt: Runtime, model: nn.Module, opt: torch.optim.Optimizer | None) -> None:
    if rt.root() is not model:
        raise MegatrainError("save the model that was given to mt.stream, not a part of it")
    if rt.broken:
        raise MegatrainError(rt.broken)
    if not isinstance(opt, AdamW):
        return
    opt._check_served()
    standing = [r.name for r in rt.records if r.param is not None and gradient.standing(r) is not None]
    if rt.handover.unstepped and standing:
        raise MegatrainError(f"gradients of {len(standing)} parameters ({standing[0]} ...) came since the last step, "
                             "and a checkpoint has none: save behind opt.step(), or drop them with opt.zero_grad()")


def _room(rt: Runtime, folder: Path, need: int, held: list[tuple[int, int]], spare: int | None, asynchronous: bool
          ) -> int:
    """Bytes for blocks that are copied and not yet written. Raises MegatrainError where disk or memory lack room."""
    where = standing_parent(folder)
    free = shutil.disk_usage(where).free
    if need > free:
        raise MegatrainError(f"{folder}: the checkpoint takes {show_bytes(need)} and {show_bytes(free)} are free in "
                             f"{where}: free {show_bytes(need - free)}, or name another folder")
    bound = host_limits().short(spare) if spare else None
    if bound is not None:
        raise MegatrainError(f"spare={spare}: there is no host memory for that ({bound}); less makes training wait for "
                             "the disk instead")
    blocks = min(SPARE_BYTES, need)
    if spare is None:
        spare = blocks if asynchronous and rt.room.may_save(rt.core, held, blocks) else 0
    rt.room.saving(rt.core, held, min(max(spare, LEAST_BYTES), need))
    return spare


# ---- a save under way --------------------------------------------------------------------------

class Saving:
    """A save that was begun. `wait()` returns when it is over, and raises what went wrong, each time.

    Attributes:
        folder: the name it takes, or has.
        bytes: of tensors' files that it writes. seconds: from the call until it had its name; 0.0 before.
        held: seconds for which the caller waited: for updates under way, and for what is small to be copied.
    """

    # Of several processes each writes every so many blocks of all files. All of them see all planes of their machine's
    # store, so whoever writes a block needs nothing of the others; that a unit's update waits until its bytes are
    # copied, the engines see to. The first one makes folder and files, has all sums in the end, and gives the name.

    def __init__(self, rt: Runtime, folder: Path, progress: Callable[[int, int], None] | None) -> None:
        self.folder, self.bytes, self.seconds, self.held = folder, 0, 0.0, 0.0
        self._ranks = None if rt.ranks is None else rt.ranks.aside()     # a save may end in a thread of its own
        self._part, self._parts = (0, 1) if rt.ranks is None else (rt.ranks.rank, rt.ranks.size)
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
            MegatrainError: it could not be written, and the checkpoint before is as it was. Or it has its name, but may
                not be on the disk yet.
        """
        if not self.over and os.getpid() != self._process:
            raise MegatrainError(f"{self.folder}: this process was forked from the one that writes it; wait there")
        self._over.wait()
        self._told = True
        if (error := self._error) is None:
            return self
        if not isinstance(error, Exception):                 # an interruption stays one
            raise error
        if self._named:
            raise MegatrainError(f"{self.folder} is whole and has its name, but the disk may not know it yet: "
                                 f"{error}") from error
        raise MegatrainError(f"saving {self.folder} failed{AS_BEFORE}: {error}") from error

    def check(self) -> None:
        """Raises what went wrong, unless somebody was told of it; waits for nothing."""
        if self.over and not self._told:
            self.wait()

    # ---- this process, or all that train the model ----

    def _each(self, own: Any) -> list[Any]:
        """What each has, by rank."""
        return [own] if self._ranks is None else self._ranks.gather(own)

    def _draft(self) -> Any:
        """A folder beside the one that it will be, made by the first."""
        with as_one(self._ranks):
            own = None if self._part else manifest.Draft(self.folder)
        if self._ranks is None:
            return own
        path = self._ranks.gather(None if own is None else own.path)[0]
        with as_one(self._ranks):
            if not path.is_dir():
                raise MegatrainError(f"{path}, which the first process has made, is not seen on this machine: folders "
                                     "of checkpoints are on a file system that all machines have")
        return own or SimpleNamespace(path=path, published=False, drop=lambda: None)     # the first names or drops it

    # ---- the work, on the caller's thread or on its own ----

    def _begin(self, rt: Runtime, parts: Parts, linked: set[str], asynchronous: bool, spare: int) -> None:
        """The work, or its thread; what was begun is given up where that fails."""
        draft, asked_for = self._draft(), False
        try:
            if self._part == 0:
                linked = parts.link(linked, rt.saved_files, draft.path)
            linked = self._each(linked)[0]
            files, _ = parts.without(linked)
            parts.body["files"] |= {f.name: rt.saved_files[f.header].about for f in parts.files if f.name in linked}
            self.bytes = sum(f.nbytes for f in files)
            located = [f.located(draft.path) for f in files]
            asked_for = True
            for first in (True, False)[:self._parts]:        # who makes the files, before the others
                with as_one(self._ranks):
                    if first == (self._part == 0):
                        rt.core.save_begin(located, held_by(files), spare, COPIERS, WRITERS, self._part, self._parts)
            rt.saving = self if asynchronous else None   # before its thread is there: start() may be interrupted
            self._start(asynchronous, rt.core, weakref.ref(rt), draft, parts, files)
        except BaseException as e:
            if self._taken.acquire(blocking=False):          # else its thread goes on with it
                rt.saving = None
                # save_begin raises one where it begins nothing; but it may be another process's.
                if asked_for and (self._parts > 1 or not isinstance(e, MegatrainError)):
                    give_up(rt.core)
                draft.drop()
            if not isinstance(e, Exception):
                raise
            raise MegatrainError(f"saving {self.folder} failed{AS_BEFORE}: {e}") from e

    def _start(self, asynchronous: bool, *work: Any) -> None:
        self.held = time.perf_counter() - self._begun
        if asynchronous:
            with suppress(RuntimeError):     # the system has no thread to give: at once, then
                threading.Thread(target=lambda: self._taken.acquire(blocking=False) and self._run(*work),
                                 name=ASIDE).start()         # no daemon: it ends it
                return
        self._run(*work)
        self.held = self.seconds
        if not isinstance(self._error, Exception):           # an interruption is the caller's, now
            self.check()

    def _run(self, core: _core.Engine, rt: weakref.ref[Runtime], draft: Any, parts: Parts, files: list[TensorFile]
             ) -> None:
        """files: of the parts' those that are to be written."""
        body = parts.body
        try:
            with as_one(self._ranks):
                self._follow(core)
                own = core.save_end()
            # Of each file all blocks' sums: each process has those of its own, and zeros.
            for f, sums in zip(files, zip(*self._each(own))):
                body["files"][f.name] = {"bytes": f.nbytes, "sums": bytes(map(max, zip(*sums))).hex()}
            with as_one(self._ranks):
                if self._part == 0:
                    for name, data in parts.small.items():
                        manifest.write(draft.path / name, data)
                    manifest.write(draft.path / manifest.NAME, manifest.dump(body))      # last: it has the others' sums
                    draft.publish()
            if (model := rt()) is not None:
                model.saved_files = parts.noted(self.folder)
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
                self._progress(self.bytes if over else min(done * self._parts, self.bytes), self.bytes)


def give_up(core: _core.Engine) -> None:
    with suppress(MegatrainError):           # it was over, or the engine is gone
        core.save_end()
