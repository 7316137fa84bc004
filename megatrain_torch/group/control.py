"""What processes tell each other beside the gradients: small things, on the host, over gloo.

A group of torch's own making (new_group) has to be asked for by all processes there are, or by such as are in equally
many groups. This one asks nobody but its members, and goes with whoever has it.
"""
from __future__ import annotations

import ctypes
import itertools
import json
import pickle
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .. import _core
from ..base.errors import MegatrainError

PATIENCE = timedelta(minutes=30)             # a rank may fill the store while the others wait
_WARN_S = 60.0                               # of a wait, after which a warning tells of it
ASIDE = "mt-save"                            # a thread that waits while its process goes on
_LOOKS = 2.0                                 # seconds, at most, until the shared memory knows who is gone
_CONNECT_S, _EACH_S = 4.0, 0.05              # in which processes that are there reach each other, or one has ended;
                                             # where that one had begun to, gloo waits five times as long
_SOON_S = 0.02               # the others have come, and that is on its way here
_CTAS = 8                                    # of NCCL's for one pair: more of them carry no more, and take more memory
_made: Counter[str] = Counter()              # of these, by the group that they are beside

NOTE_S = 5.0                 # of a wait, after which it is written down
_LOOK_S = 1.0                # between two looks; what is the same in both is taken for true
_STAYS_S = 10.0              # that a note of a wait given up stays, so that the others see why
_numbers = itertools.count()
_calls = threading.local()
_under_way: dict[int, tuple[float, Callable[[str], None], str]] = {}     # waits: when, by whom and what to warn of
_lookout = threading.Thread()                # one for all waits: there are dozens in a backward


class Control:
    """Of the ranks of a group. All make it, and call its functions, in one order.

    Attributes:
        engine: of the memory that the processes share, which knows who is gone, and what failed there; None: not yet.
        patience: until a process that still lives and is not heard of is an error.
    """

    def __init__(self, beside: dist.ProcessGroup, patience: timedelta = PATIENCE,
                 engine: _core.Engine | None = None, among: Sequence[int] | None = None) -> None:
        """among: the ranks that have it; None: all."""
        self.engine = engine
        self.patience = patience
        among = range(dist.get_world_size(beside)) if among is None else among
        members = [dist.get_global_rank(beside, rank) for rank in among]
        name = f"megatrain_torch/{beside.group_name}/{'_'.join(map(str, members))}"
        _made[name] += 1
        self._name, self._waits = f"{name}/{_made[name]}", Waits(members)
        self._store = dist.PrefixStore(self._name, dist.distributed_c10d._get_default_store())
        self._rank, self._size = among.index(dist.get_rank(beside)), len(members)
        # Where all come the first time: the group that this is beside, unless that has NCCL alone.
        gloo = "cpu:gloo" in dist.get_backend_config(beside)
        self._first = beside if engine is None and len(members) == beside.size() and gloo else None
        self._group = self.carrier("own")

    def carrier(self, name: str) -> dist.ProcessGroup:
        """One more group of the same processes, over gloo; made by all. What goes there meets nothing of anybody else.
        First all are there; so one that cannot be reached then has ended."""
        store, what = dist.PrefixStore(name, self._store), "looks for the others"
        with self.named(what):
            if self._first is None:
                come: Any = Arrival(store, self._rank, self._size, self.patience)
            else:                            # it knows who has ended, as no engine does yet
                how = dist.AllreduceOptions()
                how.timeout = self.patience
                come = self._first.allreduce([torch.zeros(1)], how)
            self._until(come, self._first, f"{self._name}/{name}", what)
            self._first = None
            soon = min(timedelta(seconds=_CONNECT_S + _EACH_S * self._size), self.patience)
            group = dist.ProcessGroupGloo(store, self._rank, self._size, soon)
        group._set_default_timeout(self.patience)
        return group

    def way(self, sender: int, hearer: int, device: torch.device) -> Any:
        """A group of these two, the sender first: NCCL's on CUDA, else gloo's. Several are made in order of pairs."""
        store, place = dist.PrefixStore(f"way/{sender}-{hearer}", self._store), (sender, hearer).index(self._rank)
        if device.type != "cuda":
            return dist.ProcessGroupGloo(store, place, 2, self.patience)
        # Of high priority, since streams of one priority share few hardware queues: compute does not wait there behind
        # a receive. CUDA does not promise that.
        group = _nccl(store, [sender, hearer], place, self.patience, is_high_priority_stream=True, max_ctas=_CTAS)
        first = torch.zeros(1, device=device)
        (group.recv([first], 0, 0) if place else group.send([first], 1, 0)).wait()
        return group

    def gathers(self, patience: timedelta) -> Any:
        """NCCL's group of the members. torch's new_group would name it by how many groups a process is in, which is not
        the same number in all of them where a script has made groups of some."""
        return _nccl(dist.PrefixStore("gathers", self._store), self._waits.members, self._rank, patience)

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, by rank."""
        own = torch.frombuffer(bytearray(pickle.dumps((called(), value))), dtype=torch.uint8)
        sizes = [int(n) for n in self.parts(torch.tensor([own.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[:own.numel()] = own
        found = [pickle.loads(part[:n].numpy().tobytes()) for part, n in zip(self.parts(padded), sizes)]
        for rank, (call, _) in enumerate(found):
            if call and called() and call != called():
                raise MegatrainError(f"rank {self._rank} is in {called()}, and rank {rank} in {call}: all processes "
                                     "have to call these in one order")
        return [value for _, value in found]

    def parts(self, own: Tensor) -> list[Tensor]:
        """Each rank's tensor, all of one form and on the host, by rank."""
        found = [torch.empty_like(own) for _ in range(self._size)]
        self._wait(self._group.allgather, [found], [own], what="tells the others about itself")
        return found

    def any_of(self, bits: Tensor) -> Tensor:
        """Of these bits, [n] uint8 on the host, those that any rank has set."""
        self._wait(self._group.allreduce, [bits], most(), what="exchanges gradients in a backward")
        return bits

    def most(self, n: int) -> int:
        """The largest that any rank has. They do not begin turns anew here."""
        numbers = torch.tensor([n])
        self._wait(self._group.allreduce, [numbers], most(), what="gathers weights", away=False)
        return int(numbers)

    def give(self, t: Tensor) -> None:
        """Into t, on every rank, go the first one's values."""
        there = t.detach().to("cpu", copy=True).contiguous()         # options: rank 0 is the root
        self._wait(self._group.broadcast, [there], dist.BroadcastOptions(), what="takes what the first one has")
        t.detach().copy_(there)

    def complete(self, parts: list[Tensor], what: str) -> None:
        """Into each of these, on every rank, go the values of the rank whose it is, by rank. Then ranks go on together:
        others wait for one that is still here."""
        for rank, part in enumerate(parts):
            how = dist.BroadcastOptions()
            how.rootRank = rank
            if part.numel():
                self._wait(self._group.broadcast, [part], how, what=what, away=False)

    @contextmanager
    def _away(self, meeting: str = "") -> Iterator[None]:
        """Others that open windows do not wait for this rank meanwhile. meeting: all meet here, in one order with their
        steps, which the engine sees, and all are in step behind it."""
        if (engine := self.engine) is None:
            yield
            return
        if meeting:
            engine.meeting(meeting)
        engine.away(True)
        try:
            yield
            if meeting:
                engine.met()
        finally:
            engine.away(False)
            if meeting:
                engine.meeting(None)

    def _wait(self, begin: Any, *args: Any, what: str, away: bool = True) -> None:
        with self.named(what):
            work = begin(*args)
            if threading.current_thread().name == ASIDE:
                work.wait()
                return
            with self._away(self._told(what)) if away else nullcontext():
                self._until(work, self._group, f"{self._name}/{begin.__name__}", what)

    def _until(self, work: Any, group: Any, place: str, what: str) -> None:
        try:
            self._waits.until(work, place, self._told(what), self._look)
        except BaseException:
            if group is not None and not work.is_completed():        # its end would wait for the work
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            raise

    def until(self, work: Any, what: str) -> None:
        """A piece of work is over that all begin, in a group of carrier's. Ranks that open windows do not wait for this
        one meanwhile, unless it is about to come."""
        with self.named(what):
            if not done(work, _SOON_S):
                with self._away():
                    self._waits.until(work, f"{self._name}/until", self._told(what), self._look)

    @staticmethod
    def _told(what: str) -> str:
        return f"is in {called()}" if called() else what

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """An error of torch.distributed becomes one that says which process is gone, and what this one was doing; a
        long wait is told."""
        _look_out()
        number = next(_numbers)
        _under_way[number] = time.monotonic() + _WARN_S, self._warn, self._told(what)
        try:
            yield
        except MegatrainError:
            raise
        except RuntimeError as error:
            said = f"{self._who()} while this one {what}: {str(error).splitlines()[0]}"
            self._waits.broke(said)
            raise MegatrainError(said) from error
        finally:
            _under_way.pop(number, None)

    def _warn(self, what: str) -> None:
        warnings.warn(f"rank {self._rank} has waited for other processes for {_WARN_S:.0f} s while it {what} "
                      f"({self._waits.where()}): all of them call mt.stream, mt.save and mt.load, and run equally many "
                      "backwards", RuntimeWarning, stacklevel=1)

    def _look(self) -> str:
        """Who is gone, and so does not come; "": nobody, as far as is known. Raises: what failed there."""
        if self.engine is None:
            return ""
        self.engine.check()
        return ", ".join(f"rank {rank} (process {pid}) ended" for rank, pid, _ in self.engine.gone())

    def _who(self) -> str:
        """Who is gone, as far as that is known soon. Raises: what failed there."""
        deadline = time.monotonic() + _LOOKS
        while self.engine is not None and time.monotonic() < deadline:
            if gone := self._look():
                return gone
            time.sleep(0.05)
        return "another process of the group is gone, or does something else,"


def _look_out() -> None:
    global _lookout
    if not _lookout.is_alive():              # nor after a fork
        own = _lookout = threading.Thread(target=_warn_late, name="mt-late", daemon=True)
        own.start()                          # not another thread's, which may be here too


def _warn_late() -> None:
    while True:
        time.sleep(1.0)
        _tell_late()                         # of its own: a frame that lasts would hold the model of the last wait


def _tell_late() -> None:
    for number, (due, warn, what) in list(_under_way.items()):
        if time.monotonic() > due and _under_way.pop(number, None):
            warn(what)


def most() -> dist.AllreduceOptions:
    """Of what ranks have, the largest."""
    how = dist.AllreduceOptions()
    how.reduceOp = dist.ReduceOp.MAX
    return how


def _nccl(store: Any, members: list[int], place: int, patience: timedelta, is_high_priority_stream: bool = False,
          max_ctas: int | None = None) -> Any:
    """members: ranks of the default group."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_high_priority_stream)
    options._timeout, options.global_ranks_in_group = patience, members
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return dist.ProcessGroupNCCL(store, place, len(members), options)


# ---- processes that wait in different places ----

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
    """Finds processes that wait for each other in different places, and so in vain (csrc/core/peers.c finds dead ones).

    A process that waits for longer than a few seconds writes where, and for whom, into torch.distributed's store. It
    then reads what the others have written. One that has written nothing may yet come, and is waited for. One that
    waits elsewhere comes only if those come whom it waits for in turn; where these are in the same case, all give up.
    """

    def __init__(self, members: list[int]) -> None:
        """members: by their numbers in all of torch.distributed's."""
        self.members, self._me = members, dist.get_rank()
        self._store = dist.PrefixStore("megatrain_torch/waits", dist.distributed_c10d._get_default_store())

    def until(self, work: Any, place: str, what: str, look: Callable[[], str] = str) -> None:
        """The work is done. place: names it, the same in all members. look: who is gone, in words; "": nobody.

        Raises:
            MegatrainError: it will never be. RuntimeError: torch.distributed's.
        """
        if done(work, NOTE_S):
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
