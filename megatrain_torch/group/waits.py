"""Finds processes that wait for each other in different places, and so in vain. csrc/core/peers.c finds dead ones.

A process that waits for longer than a few seconds writes where, and for whom, into torch.distributed's store. It then
reads what the others have written. One that has written nothing may yet come, and is waited for. One that waits
elsewhere comes only if those come whom it waits for in turn; where these are in the same case, all of them give up.
"""
from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from ..base.errors import MegatrainError

LATE_S = 5.0                 # of a wait, after which it is written down
_LOOK_S = 1.0                # between two looks; what is the same in both is taken for true
_STAYS_S = 10.0              # that a note of a wait given up stays, so that the others see why
_numbers = itertools.count()
_calls = threading.local()


@contextmanager
def calling(what: str) -> Iterator[None]:
    """In here this thread is in that call of the user's, as messages have it."""
    before, _calls.what = called(), what
    try:
        yield
    finally:
        _calls.what = before


def called() -> str:
    return getattr(_calls, "what", "")


class Waits:
    """Of a group of processes, by their numbers in all of torch.distributed's."""

    def __init__(self, members: list[int]) -> None:
        self.members, self._me = members, dist.get_rank()
        self._store = dist.PrefixStore("megatrain_torch/waits", dist.distributed_c10d._get_default_store())

    def until(self, work: Any, place: str, what: str, look: Callable[[], str] = str) -> None:
        """The work is done. place: names it, the same in all members. look: who is gone, in words; "": nobody.

        Raises:
            MegatrainError: it will never be. RuntimeError: torch.distributed's.
        """
        if done(work, LATE_S):
            return
        note = {"at": place, "what": what, "of": self.members, "n": next(_numbers)}
        self._write(note)
        before: dict[int, Any] = {}
        ended = ""
        try:
            while not done(work, _LOOK_S):
                if ended:
                    raise MegatrainError(f"{ended} while rank {self._me} {what}")
                broken = (f"rank {rank}: {n['what']}," for rank, n in self._others() if n and n.get("broke"))
                ended = look() or next(broken, "")
                found = self.stuck()
                if self._me in found and found == before:
                    elsewhere = ", ".join(f"rank {rank} {n['what']}" for rank, n in sorted(found.items())
                                          if n["at"] != place)
                    raise MegatrainError(
                        f"rank {self._me} {what}, and waits for others that do not come there, but wait elsewhere: "
                        f"{elsewhere}; all processes have to call mt.stream, mt.save and mt.load, and run backwards, "
                        "in one order")
                before = found
        except BaseException:
            timer = threading.Timer(_STAYS_S, self._clear, (note,))
            timer.daemon = True
            timer.start()
            raise
        self._write(None)

    def broke(self, why: str) -> None:
        """What this one waited for will never be: who waits for it elsewhere reads so."""
        self._write({"at": "", "what": why, "of": [], "n": next(_numbers), "broke": True})

    def _others(self) -> list[tuple[int, Any]]:
        return [(rank, self._read(rank)) for rank in self.members if rank != self._me]

    def stuck(self) -> dict[int, Any]:
        """Notes of processes that wait in vain, as far as this one has to do with them."""
        notes, unread = {}, list(self.members)
        while unread:
            if (rank := unread.pop()) not in notes:
                notes[rank] = self._read(rank)
                unread += notes[rank]["of"] if notes[rank] else []
        left = {rank: note for rank, note in notes.items() if note}
        while coming := [rank for rank, note in left.items()
                         if not any(m in left and left[m]["at"] != note["at"] for m in note["of"])]:
            for rank in coming:
                del left[rank]
        return left

    def where(self) -> str:
        """Of each other member where it waits, as far as is known."""
        return ", ".join(f"rank {rank} {n['what'] if n else 'waits for nobody'}" for rank, n in self._others())

    def _write(self, note: dict[str, Any] | None) -> None:
        with suppress(RuntimeError):                     # the store's process is gone: they find that out elsewhere
            self._store.set(str(self._me), json.dumps(note))

    def _read(self, rank: int) -> Any:
        with suppress(RuntimeError):
            if self._store.check([str(rank)]):
                return json.loads(self._store.get(str(rank)))
        return None

    def _clear(self, note: dict[str, Any]) -> None:
        if self._read(self._me) == note:
            self._write(None)


class Arrival:
    """All members have come to a place: as a piece of work of torch.distributed's. This one has, as it makes it."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience: timedelta) -> None:
        self._store, self._keys = store, [f"here/{r}" for r in range(size)]
        self._deadline = time.monotonic() + patience.total_seconds()
        store.set(self._keys[rank], "")

    def is_completed(self) -> bool:
        return time.monotonic() > self._deadline or self._store.check(self._keys)

    def wait(self, within: timedelta) -> None:
        self._store.wait(self._keys, within)


def done(work: Any, seconds: float) -> bool:
    """Within so many seconds."""
    within = timedelta(seconds=seconds)
    try:
        work.wait(within)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(within)                    # it may have ended since; else why it failed
    return True
