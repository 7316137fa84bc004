"""What ranks of one machine say in the memory that they share, for those of other machines, and what comes from there.

Each rank tells every other machine what it says, with the bytes that belong to it (csrc/core/relay.h), and one rank of
that machine, who speaks for it there, hears it. As machines have equally many ranks, two that tell each other hear each
other. What is said goes over gloo. Weights go from host memory to host memory by the network's own transport, in pieces
through device memory: NCCL's on CUDA, gloo's on the CPU device.

A sender waits for nothing but the network, and a hearer for nothing else, so neither waits for the other's. NCCL runs
what a group is given one after the other, so each direction of a pair has a group of its own. A piece is received as
soon as it is sent, whatever else the two processes do: the hearer was told of it before, and no thread holds the
driver's lock while it waits for a piece (Pieces).
"""
from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .. import _core
from .ranks import Ranks

PIECE = 32 << 20             # bytes that are sent at once; of them each direction has BUFFERS on the device: one is
BUFFERS = 3                  # filled, one sent or received, one emptied
SMALL = 64 << 10             # bytes of a parcel that go over gloo, as notes do
_LOOK_MS = 1000              # until a sender that has nothing to tell looks again
_NAP_S = 50e-6               # between two looks at pieces, each of which takes a millisecond
_GONE_S = 30.0               # in which it is known that a rank is gone of which bytes do not come
_NEVER = timedelta(days=30)  # a rank may have nothing to say for as long as its process lives
_MOST = 32                   # parcels that go at once: Python's threads take turns, which may last longer than the way
_NONE = bytes(255 for _ in range(_core.PARCEL_BYTES))        # no parcel; where none is, nothing more will come


class Between:
    """Begins when all ranks have an engine, and goes on until they have closed it."""

    def __init__(self, ranks: Ranks, core: _core.Engine, device: torch.device, delay_us: int = 0) -> None:
        """All ranks make it. delay_us: for tests, waits of up to so long before everything."""
        line = Line(core.relay(), ranks, device, delay_us)
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

    def __init__(self, relay: Any, ranks: Ranks, device: torch.device, delay_us: int) -> None:
        self._relay, self._machines, self._delay_us = relay, ranks.machines, delay_us
        self._group = ranks.control.carrier("between")
        self._hearers = ranks.hearers()      # of this rank, by machine
        self._turn = threading.Lock()        # held while a parcel and its bytes are sent, and for who is told
        self._out = {hearer: way for (rank, hearer), way in ranks.ways.items() if rank == ranks.rank}
        self._into = {rank: way for (rank, hearer), way in ranks.ways.items() if hearer == ranks.rank}
        self._device = device if ranks.nccl() else torch.device("cpu")

    def tell(self) -> None:
        last, pieces = False, Pieces(self._device)
        while not last:
            batch = self._next()
            last = any(ends for *_, ends in batch)
            for machine in list(self._hearers):
                self._send(machine, [(parcel, data) for parcel, data, to, _ in batch if self._is_for(machine, to)])
            for _, data, to, _ in batch:
                if data is not None and data.nbytes > SMALL:
                    groups = [self._out[r] for m, r in list(self._hearers.items()) if self._is_for(m, to)]
                    with suppress(RuntimeError):     # somebody is gone: who hears him finds that out
                        pieces.send(torch.from_numpy(data), groups)
        for machine in list(self._hearers):
            self._end(machine)
        _finish(pieces, self._out.values())

    def _is_for(self, machine: str, to: int) -> bool:
        return to < 0 or self._machines[to] == machine

    def _next(self) -> list[tuple[bytes, Any, int, bool]]:
        """What was said since, as far as it goes at once."""
        found = _core.relay_next(self._relay, _LOOK_MS)
        batch = [] if found is None else [found]
        while 0 < len(batch) < _MOST and not batch[-1][-1] and (found := _core.relay_next(self._relay, 0)) is not None:
            batch.append(found)
        self._delay()
        return batch

    def _send(self, machine: str, batch: list[tuple[bytes, Any]]) -> None:
        """Parcels, and those bytes of theirs that are few. Where there is nobody any more, those who wait for him find
        that out."""
        with self._turn:
            if not batch or (rank := self._hearers.get(machine)) is None:
                return
            small = [torch.from_numpy(data) for _, data in batch if data is not None and data.nbytes <= SMALL]
            try:
                for work in [self._group.send([t], rank, 0) for t in (_head([p for p, _ in batch]), *small)]:
                    work.wait(_NEVER)
            except RuntimeError:
                self._hearers.pop(machine)

    def _end(self, machine: str) -> None:
        """Nothing more will come; unless that machine's has ended too."""
        with self._turn, suppress(RuntimeError):
            if (rank := self._hearers.pop(machine, None)) is not None:
                self._group.send([_head([])], rank, 0).wait(_NEVER)

    def hear(self, rank: int) -> None:
        """Large bytes are received by another thread: meanwhile the end of the rank's process is still heard."""
        told: SimpleQueue[tuple[bytes, Any] | None] = SimpleQueue()
        gone = threading.Event()
        comes = _begun(lambda: self._come(rank, told, gone), f"mt-comes-{rank}")
        try:
            while parcels := self._parcels(rank):
                places = [_core.relay_place(self._relay, rank, parcel) for parcel in parcels]
                self._receive(rank, [torch.from_numpy(p) for p in places if p is not None and p.nbytes <= SMALL])
                for pair in zip(parcels, places):
                    told.put(pair)
        except RuntimeError:
            gone.set()
            _core.relay_gone(self._relay, rank)      # from that on NCCL's kernels do not wait for it (Ranks.give_up)
        told.put(None)
        comes.join()
        self._end(self._machines[rank])

    def _parcels(self, rank: int) -> list[bytes]:
        """The next that go at once; []: nothing more will come."""
        head = torch.empty(_MOST * _core.PARCEL_BYTES, dtype=torch.uint8)
        self._receive(rank, [head])
        every = head.numpy().tobytes()
        parcels = [every[at:at + _core.PARCEL_BYTES] for at in range(0, len(every), _core.PARCEL_BYTES)]
        return parcels[:parcels.index(_NONE)] if _NONE in parcels else parcels

    def _come(self, rank: int, told: SimpleQueue[Any], gone: threading.Event) -> None:
        pieces, way = Pieces(self._device, gone), self._into[rank]
        try:
            while (pair := _taken(told, pieces)) is not None:
                parcel, place = pair
                if place is not None and place.nbytes > SMALL:
                    pieces.receive(torch.from_numpy(place), way)
                pieces.behind(lambda parcel=parcel: self._has_come(rank, parcel))
            pieces.land()
        except RuntimeError:
            if not gone.wait(_GONE_S):
                raise
        _finish(pieces, [way])

    def _has_come(self, rank: int, parcel: bytes) -> None:
        self._delay()
        _core.relay_come(self._relay, rank, parcel)

    def _receive(self, rank: int, into: list[Tensor]) -> None:
        for work in [self._group.recv([t], rank, 0) for t in into]:
            work.wait(_NEVER)

    def _delay(self) -> None:
        if self._delay_us:
            time.sleep(random.random() * self._delay_us * 1e-6)


@dataclasses.dataclass
class Piece:
    """On its way. What is put behind others has neither bytes nor works."""

    buffer: Tensor | None
    works: list[Any]
    place: Tensor | None = None              # where bytes that are received go
    landed: torch.cuda.Event | None = None   # behind the copy into place
    act: Callable[[], None] | None = None

    def is_over(self) -> bool:
        return not self.works and (self.landed is None or self.landed.query())


class Pieces:
    """Bytes of host memory that go to other ranks, or come from one, by way of a few buffers on the device.

    A command that follows a send or a receive is queued when that is over: the host looks. Streams share hardware
    queues of some thousand commands. Where those behind a receive fill one, whoever queues another command waits inside
    the driver, with its lock, for a process that may wait for this one in the same way.
    """

    def __init__(self, device: torch.device, gone: threading.Event | None = None) -> None:
        """In the thread that uses it. gone: nothing more will come, so who waits gets a RuntimeError."""
        self._device, self._gone, self._stream = device, gone, None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device, priority=-1)    # NCCL's streams have that too (Control.way)
        self._spare = [torch.empty(PIECE, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._busy: deque[Piece] = deque()

    def send(self, host: Tensor, groups: Sequence[Any]) -> None:
        """Returns when the last pieces are on their way."""
        for piece in host.split(PIECE):
            buffer = self._buffer()
            with self._entered():
                part = buffer[:len(piece)].copy_(piece, non_blocking=True)
                self._busy.append(Piece(buffer, [group.send([part], 1, 0) for group in groups]))

    def receive(self, place: Tensor, group: Any) -> None:
        """Returns when the last pieces are on their way."""
        for piece in place.split(PIECE):
            buffer = self._buffer()
            with self._entered():
                self._busy.append(Piece(buffer, [group.recv([buffer[:len(piece)]], 0, 0)], piece))

    def behind(self, act: Callable[[], None]) -> None:
        """act is called when all that was put before is over."""
        self._busy.append(Piece(None, [], act=act))

    def land(self) -> None:
        """Waits: all is over."""
        while self.step():
            self.nap()

    def step(self) -> bool:
        """Takes each piece as far as it can go by now. False: nothing is on its way."""
        for piece in self._busy:
            if piece.works and all(map(self._has_ended, piece.works)):
                piece.works = []
                if piece.place is not None and piece.buffer is not None:
                    with self._entered():
                        piece.place.copy_(piece.buffer[:len(piece.place)], non_blocking=True)
                        piece.landed = None if self._stream is None else self._stream.record_event()
        while self._busy and self._busy[0].is_over():
            piece = self._busy.popleft()
            if piece.buffer is not None:
                self._spare.append(piece.buffer)
            self._go_on()                # behind the look at works: those of who is gone end with any bytes
            if piece.act is not None:
                piece.act()
        return bool(self._busy)

    def _has_ended(self, work: Any) -> bool:
        if self._stream is not None:
            return work.is_completed()
        work.wait()                          # gloo's is not seen to end but by who waits
        return True

    def _buffer(self) -> Tensor:
        self.step()
        while not self._spare:
            self.nap()
            self.step()
        return self._spare.pop()

    def _go_on(self) -> None:
        if self._gone is not None and self._gone.is_set():
            raise RuntimeError("nothing more will come")

    def nap(self) -> None:
        self._go_on()
        time.sleep(_NAP_S)

    def _entered(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _taken(told: SimpleQueue[Any], pieces: Pieces) -> Any:
    """The next that was told; until then pieces go on."""
    while pieces.step():
        with suppress(Empty):
            return told.get_nowait()
        pieces.nap()
    return told.get()


def _finish(pieces: Pieces, groups: Iterable[Any]) -> None:
    """All is over, and the groups are given back; unless somebody is gone."""
    with suppress(RuntimeError):
        pieces.land()
    for group in groups:
        with suppress(RuntimeError):                 # gloo has nothing to give back
            group.shutdown()


def _head(parcels: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(parcels).ljust(_MOST * _core.PARCEL_BYTES, b"\xff")), dtype=torch.uint8)


def _begun(target: Any, name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
