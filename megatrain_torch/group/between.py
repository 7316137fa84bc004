"""What ranks of one machine say in the memory that they share, for those of other machines, and what comes from there.

Each rank tells every other machine what it says, with the bytes that belong to it (csrc/core/relay.h), and one rank of
that machine, who speaks for it there, hears it. As machines have equally many ranks, two that tell each other hear each
other. Transport is a gloo group of all ranks: host memory to host memory. A sender waits for nothing but the network,
and a hearer for nothing else, so neither waits for the other's.
"""
from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from .. import _core
from .ranks import Ranks

_LOOK_MS = 1000              # until a sender that has nothing to tell looks again
_NEVER = timedelta(days=30)  # a rank may have nothing to say for as long as its process lives
_MOST = 32                   # parcels that go at once: Python's threads take turns, which may last longer than the way
_NONE = bytes(255 for _ in range(_core.PARCEL_BYTES))        # no parcel; where none is: you have left, and so do I


class Between:
    """Begins when all ranks have an engine, and goes on until they have closed it."""

    def __init__(self, ranks: Ranks, core: _core.Engine, delay_us: int = 0) -> None:
        """All ranks make it. delay_us: for tests, waits of up to so long before everything."""
        line = Line(core.relay(), ranks.control.carrier("between"), ranks.machines, ranks.hearers(), delay_us)
        self._tells = _begun(line.tell, "mt-tells")
        self._hear = [_begun(lambda rank=rank: line.hear(rank), f"mt-hears-{rank}") for rank in ranks.spoken_for()]

    def finish(self, seconds: float) -> None:
        """The engine is closed: all that this rank said has gone, and no thread of ours comes back to Python, which may
        end, or so much time has gone by."""
        deadline = time.monotonic() + seconds
        for thread in {self._tells, *self._hear} - {threading.current_thread()}:
            thread.join(max(0.0, deadline - time.monotonic()))


class Line:
    """What threads have of it. It has the engine's memory, and not the engine."""

    def __init__(self, relay: Any, group: dist.ProcessGroup, machines: list[str], hearers: dict[str, int],
                 delay_us: int) -> None:
        """machines: by rank. hearers: who hears this rank, by machine."""
        self._relay, self._group, self._machines, self._delay_us = relay, group, machines, delay_us
        self._hearers = dict(hearers)
        self._turn = threading.Lock()        # held while a parcel and its bytes are sent, and for who is told

    def tell(self) -> None:
        last = False
        while not last:
            batch = self._next()
            last = any(ends for *_, ends in batch)
            for machine in list(self._hearers):
                own = [(parcel, data) for parcel, data, to, _ in batch if to < 0 or self._machines[to] == machine]
                if own:
                    self._send(machine, own, last)

    def _next(self) -> list[tuple[bytes, Any, int, bool]]:
        """What was said since, as far as it goes at once."""
        found = _core.relay_next(self._relay, _LOOK_MS)
        batch = [] if found is None else [found]
        while 0 < len(batch) < _MOST and not batch[-1][-1] and (found := _core.relay_next(self._relay, 0)) is not None:
            batch.append(found)
        self._delay()
        return batch

    def _send(self, machine: str, batch: list[tuple[bytes, Any]], last: bool) -> None:
        """Where there is nobody any more, those who wait for him find that out."""
        with self._turn:
            if (rank := self._hearers.get(machine)) is None:
                return
            head = b"".join(parcel for parcel, _ in batch).ljust(_MOST * _core.PARCEL_BYTES, b"\xff")
            sent = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
            sent += [torch.from_numpy(data) for _, data in batch if data is not None]
            try:
                for work in [self._group.send([t], rank, 0) for t in sent]:
                    work.wait(_NEVER)
            except RuntimeError:
                last = True
            if last:
                self._hearers.pop(machine)

    def hear(self, rank: int) -> None:
        try:
            while not self._hear_some(rank):
                pass
        except RuntimeError:
            _core.relay_gone(self._relay, rank)
        self._send(self._machines[rank], [], True)           # unless this one has left, too

    def _hear_some(self, rank: int) -> bool:
        """It was the last."""
        head = torch.empty(_MOST * _core.PARCEL_BYTES, dtype=torch.uint8)
        self._receive(rank, [head])
        every = head.numpy().tobytes()
        parcels = [every[at:at + _core.PARCEL_BYTES] for at in range(0, len(every), _core.PARCEL_BYTES)]
        parcels = parcels[:parcels.index(_NONE)] if _NONE in parcels else parcels
        places = [_core.relay_place(self._relay, rank, parcel) for parcel in parcels]
        self._receive(rank, [torch.from_numpy(place) for place in places if place is not None])
        self._delay()
        ends = [_core.relay_come(self._relay, rank, parcel) for parcel in parcels]
        return not ends or any(ends)

    def _receive(self, rank: int, into: list[torch.Tensor]) -> None:
        for work in [self._group.recv([t], rank, 0) for t in into]:
            work.wait(_NEVER)

    def _delay(self) -> None:
        if self._delay_us:
            time.sleep(random.random() * self._delay_us * 1e-6)


def _begun(target: Any, name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
