"""What ranks of one machine say in the memory that they share, for those of other machines, and what comes from there.

Each rank tells every other machine what it says, with the bytes that belong to it (csrc/core/relay.h), and one rank of
that machine, who speaks for it there, hears it. As machines have equally many ranks, two that tell each other hear each
other. What is said goes over gloo. Weights go from host memory to host memory by the network's own transport, in pieces
through device memory: NCCL's on CUDA, gloo's on the CPU device.

A sender waits for nothing but the network, and a hearer for nothing else, so neither waits for the other's. NCCL runs
what a group is given one after the other, so each direction of a pair has a group of its own. A piece is received as
soon as it is sent, whatever else the two processes do: the hearer was told of it before.
"""
from __future__ import annotations

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


class Pieces:
    """Bytes of host memory that go to other ranks, or come from one, by way of a few buffers on the device.

    No more is queued on the device than what the buffers hold, and the host waits for the oldest. Streams share
    hardware queues of some thousand commands. Where those behind a receive fill one, whoever queues another command
    waits inside the driver, with its lock, for a process that may wait for this one in the same way.
    """

    def __init__(self, device: torch.device, gone: threading.Event | None = None) -> None:
        """In the thread that uses it. gone: nothing more will come, so who waits gets a RuntimeError."""
        self._gone = gone or threading.Event()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Copies between host memory and buffers, and what goes over the network, which is beside the next copy.
        self._copies, self._network = _Queue(device), _Queue(device)
        self._spare = [torch.empty(PIECE, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._busy: deque[tuple[Tensor | None, Any, Any]] = deque()      # a buffer and the event behind it, or an act

    def send(self, host: Tensor, groups: Sequence[Any]) -> None:
        """Returns when the last pieces are on their way."""
        for piece in host.split(PIECE):
            buffer = self._buffer()
            part = buffer[:len(piece)]
            with self._copies.entered():
                part.copy_(piece, non_blocking=True)
            with self._network.entered(behind=self._copies):
                for work in [group.send([part], 1, 0) for group in groups]:
                    work.wait()              # on CUDA the stream does
            self._busy.append((buffer, self._network.event(), None))

    def receive(self, place: Tensor, group: Any) -> None:
        """Returns when the last pieces are on their way."""
        for piece in place.split(PIECE):
            buffer = self._buffer()
            part = buffer[:len(piece)]
            with self._network.entered():
                group.recv([part], 0, 0).wait()
            with self._copies.entered(behind=self._network):
                piece.copy_(part, non_blocking=True)
            self._busy.append((buffer, self._copies.event(), None))

    def behind(self, act: Callable[[], None]) -> None:
        """act is called when all that was put before is over."""
        self._busy.append((None, None, act))

    def next(self) -> bool:
        """Waits for what was put first. False: nothing is on its way."""
        if not self._busy:
            return False
        buffer, event, act = self._busy.popleft()
        if event is not None:
            event.synchronize()
        if self._gone.is_set():              # works of who is gone end with any bytes
            raise RuntimeError("nothing more will come")
        if buffer is not None:
            self._spare.append(buffer)
        if act is not None:
            act()
        return True

    def land(self) -> None:
        """Waits: all is over."""
        while self.next():
            pass

    def _buffer(self) -> Tensor:
        while not self._spare:
            self.next()
        return self._spare.pop()


class _Queue:
    """A stream of high priority, as NCCL's are (Control.way); on the CPU device nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def entered(self, behind: _Queue | None = None) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        if behind is not None:
            self._stream.wait_stream(behind._stream)
        return torch.cuda.stream(self._stream)

    def event(self) -> torch.cuda.Event | None:
        """Behind what was put so far. Who waits for it leaves the core to others."""
        return None if self._stream is None else self._stream.record_event(torch.cuda.Event(blocking=True))


def _taken(told: SimpleQueue[Any], pieces: Pieces) -> Any:
    """The next that was told; until then pieces go on."""
    while True:
        with suppress(Empty):
            return told.get_nowait()
        if not pieces.next():
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
