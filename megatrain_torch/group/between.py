"""What ranks of one machine say in the memory that they share, for those of other machines, and what comes from there.

Each rank tells every other machine what it says, with the bytes that belong to it (csrc/core/relay.h), and one rank of
that machine, who speaks for it there, hears it. As machines have equally many ranks, two that tell each other hear each
other. What is said goes over gloo. Weights go by the network's own transport, NCCL's on CUDA and gloo's on the CPU
device: of units at home on the devices from slot to slot, of others from host memory to host memory.

A sender waits for nothing but the network, and a hearer for nothing else, so neither waits for the other's. NCCL runs
what a group is given one after the other, so each direction of a pair has a group of its own. A receive is queued when
the send that it waits for is on its way already: it is told of behind that. So whatever the two processes do meanwhile,
the device never waits for something that a host has yet to queue.
"""
from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import _core
from .ranks import Ranks, give_back

PIECE = 64 << 20             # bytes that are sent at once
SMALL = 1 << 20              # bytes of a parcel that go over gloo, as notes do
_LOOK_MS = 1000              # until a sender that has nothing to tell looks again
_NAP_S = 200e-6              # between two looks at pieces
_GONE_S = 30.0               # in which it is known that a rank is gone of which bytes do not come
_NEVER = timedelta(days=30)  # a rank may have nothing to say for as long as its process lives
_MOST = 32                   # parcels that go at once: Python's threads take turns, which may last longer than the way
_AT_ONCE = 1 << 30           # bytes of theirs
_BUSY = 64                   # pieces on their way, behind which more are queued: the driver lets a caller in with a few
                             # hundred, and then keeps it waiting
_NONE = bytes(255 for _ in range(_core.PARCEL_BYTES))        # no parcel; where none is, nothing more will come


class Between:
    """Begins when all ranks have an engine, and goes on until they have closed it: it has the engine's memory, and not
    the engine."""

    def __init__(self, ranks: Ranks, core: _core.Engine, device: torch.device, delay_us: int = 0) -> None:
        """All ranks make it. delay_us: for tests, waits of up to so long before everything."""
        self._relay, self._machines, self._delay_us = core.relay(), ranks.machines, delay_us
        self._group = ranks.control.carrier("between")
        self._hearers = ranks.hearers()      # of this rank, by machine
        self._turn = threading.Lock()        # held while a parcel and its bytes are sent, and for who is told
        self._rank, self._ways, self._given_up = ranks.rank, ranks.ways, ranks.given_up
        self._out = {hearer: way for (rank, hearer), way in ranks.ways.items() if rank == ranks.rank}
        self._into = {rank: way for (rank, hearer), way in ranks.ways.items() if hearer == ranks.rank}
        self._device = device if ranks.nccl() else torch.device("cpu")
        self._threads = [_begun(self.tell, "mt-tells"), *(
            _begun(lambda rank=rank: self.hear(rank), f"mt-hears-{rank}") for rank in ranks.spoken_for())]

    def finish(self, seconds: float) -> bool:
        """The engine is closed: all that this rank said has gone, and no thread of ours comes back to Python, which may
        end. False: so much time has gone by."""
        deadline = time.monotonic() + seconds
        threads = set(self._threads) - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def tell(self) -> None:
        last, pieces = False, Pieces(self._device, self._given_up)
        while not last:
            with suppress(RuntimeError):
                pieces.leave(_BUSY)
            batch = self._next()
            last = any(ends for *_, ends in batch)
            large = [(self._tensor(data), [self._out[r] for m, r in list(self._hearers.items()) if self._is_for(m, to)])
                     for _, data, to, _ in batch if _is_large(data)]
            before = all(pieces.is_direct(data) for data, _ in large)
            if before:
                self._send_large(pieces, large)
            for machine in list(self._hearers):
                self._send(machine, [(parcel, data) for parcel, data, to, _ in batch if self._is_for(machine, to)])
            if not before:
                self._send_large(pieces, large)
        for machine in list(self._hearers):
            self._end(machine)
        with suppress(RuntimeError):
            pieces.leave(0)
        for hearer in self._out:
            give_back(self._ways, (self._rank, hearer))

    @staticmethod
    def _send_large(pieces: Pieces, large: list[tuple[Tensor, list[Any]]]) -> None:
        for data, groups in large:
            with suppress(RuntimeError):     # somebody is gone: who hears him finds that out
                pieces.send(data, groups)

    def _is_for(self, machine: str, to: int) -> bool:
        return to < 0 or self._machines[to] == machine

    def _next(self) -> list[tuple[bytes, Any, int, bool]]:
        """What was said since, as far as it goes at once."""
        batch: list[tuple[bytes, Any, int, bool]] = []
        while (found := _core.relay_next(self._relay, 0 if batch else _LOOK_MS)) is not None:
            batch.append(found)
            if found[-1] or len(batch) == _MOST or sum(_nbytes(data) for _, data, *_ in batch) >= _AT_ONCE:
                break
        self._delay()
        return batch

    def _send(self, machine: str, batch: list[tuple[bytes, Any]]) -> None:
        """Parcels, and those bytes of theirs that are few. Where there is nobody any more, those who wait for him find
        that out."""
        with self._turn:
            if not batch or (rank := self._hearers.get(machine)) is None:
                return
            small = [torch.from_numpy(data) for _, data in batch if data is not None and not _is_large(data)]
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
                self._receive(rank, [torch.from_numpy(p) for p in places if p is not None and not _is_large(p)])
                for pair in zip(parcels, places):
                    told.put(pair)
        except RuntimeError:
            gone.set()
            _core.relay_gone(self._relay, rank)      # from that on NCCL's kernels do not wait for it (Ranks.give_up)
        told.put(None)
        comes.join()
        self._end(self._machines[rank])
        give_back(self._ways, (rank, self._rank), failed=gone.is_set())

    def _parcels(self, rank: int) -> list[bytes]:
        """The next that go at once; []: nothing more will come."""
        head = torch.empty(_MOST * _core.PARCEL_BYTES, dtype=torch.uint8)
        self._receive(rank, [head])
        every = head.numpy().tobytes()
        parcels = [every[at:at + _core.PARCEL_BYTES] for at in range(0, len(every), _core.PARCEL_BYTES)]
        return parcels[:parcels.index(_NONE)] if _NONE in parcels else parcels

    def _come(self, rank: int, told: SimpleQueue[Any], gone: threading.Event) -> None:
        try:
            pieces, way = Pieces(self._device, gone, self._given_up), self._into[rank]
            while (pair := _taken(told, pieces)) is not None:
                parcel, place = pair
                if _is_large(place):
                    while not _core.relay_ready(self._relay, rank, parcel):
                        pieces.step()        # what came before may be what this waits for
                        pieces.nap()
                    pieces.receive(self._tensor(place), way)
                pieces.behind(lambda parcel=parcel: self._has_come(rank, parcel))
            pieces.leave(0)
        except RuntimeError:
            if not (self._given_up.is_set() or gone.wait(_GONE_S)):
                _core.relay_gone(self._relay, rank)      # his process lives, and yet nothing more will come
                raise

    def _tensor(self, data: Any) -> Tensor:
        """data: an array of host memory, or an address on the device and how many bytes."""
        if not isinstance(data, tuple):
            return torch.from_numpy(data)
        if self._device.type == "cuda":
            return on_device(*data, self._device)
        return torch.frombuffer((ctypes.c_uint8 * data[1]).from_address(data[0]), dtype=torch.uint8)

    def _has_come(self, rank: int, parcel: bytes) -> None:
        self._delay()
        _core.relay_come(self._relay, rank, parcel)

    def _receive(self, rank: int, into: list[Tensor]) -> None:
        for work in [self._group.recv([t], rank, 0) for t in into]:
            work.wait(_NEVER)

    def _delay(self) -> None:
        if self._delay_us:
            time.sleep(random.random() * self._delay_us * 1e-6)


def on_device(address: int, nbytes: int, device: torch.device) -> Tensor:
    """[nbytes] uint8, over memory that kernels reach: of the device, or locked memory of the host, at its address."""
    there = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=there), device=device)


class Pieces:
    """Bytes on their way to other ranks, or from one.

    NCCL's kernels read and write locked host memory where it lies. Other memory goes by way of a buffer on the device,
    piece by piece: the driver copies to it in the caller's thread, and holds its lock meanwhile. Behind a receive whose
    bytes are yet to come, that kept all threads of the process from queuing a send, and in the other process too (seen
    on H100 and H200). So such a copy is queued when the receive is over.
    """

    def __init__(self, device: torch.device, *gone: threading.Event) -> None:
        """In the thread that uses it. gone: nothing more will come, or go, so who waits gets a RuntimeError."""
        self._device, self._gone, self._stream = device, gone, None
        self._busy: deque[tuple[list[Any], Callable[[], None] | None]] = deque()     # works, and what follows them
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device, priority=-1)    # NCCL's streams have that too (Control.way)
            with self._entered():            # else who had this memory before may be at it still
                self._buffer = torch.empty(PIECE, dtype=torch.uint8, device=device)

    def is_direct(self, host: Tensor) -> bool:
        """All of it is on its way when send returns, whether or not it is received."""
        return self._stream is None or host.is_cuda or (host[:1].is_pinned() and host[-1:].is_pinned())

    def send(self, host: Tensor, groups: Sequence[Any]) -> None:
        """Not direct: returns when the bytes have gone."""
        direct = self.is_direct(host)
        for piece in host.split(PIECE):
            part = self._part(piece, direct)
            works = self._asks()
            with self._entered():
                if not direct:
                    part.copy_(piece)        # not in compute's stream, which may wait for another process
                for group in groups:
                    works.append(group.send([part], 1, 0))
            if not direct:
                self.leave(0)

    def receive(self, place: Tensor, group: Any) -> None:
        """Not direct: returns when the bytes have come."""
        direct = self.is_direct(place)
        for piece in place.split(PIECE):
            self.leave(_BUSY)
            part = self._part(piece, direct)
            works = self._asks()
            with self._entered():
                works.append(group.recv([part], 0, 0))
            if not direct:
                self.leave(0)
                with self._entered():
                    piece.copy_(part)

    def behind(self, act: Callable[[], None]) -> None:
        """act is called when all that was put before is over."""
        self._busy.append(([], act))

    def leave(self, most: int) -> None:
        """Waits: no more than so many are on their way."""
        while self.step() and len(self._busy) > most:
            self.nap()

    def step(self) -> bool:
        """Looks, and goes on behind what is over by now. False: nothing is on its way. Raises: a piece did not come, or
        go; of those behind it the next call knows."""
        while self._busy:
            works, act = self._busy[0]
            # gloo's works are not seen to end but by who waits.
            if self._stream is not None and not all(work.is_completed() for work in works):
                return True
            self._busy.popleft()
            with self._entered():
                for work in works:
                    work.wait()              # NCCL's too, which are over where they failed: this raises then
            self._go_on()                    # behind the look at works: where somebody is gone they end with any bytes
            if act is not None:
                act()
        return False

    def _part(self, piece: Tensor, direct: bool) -> Tensor:
        """What works are given for it."""
        if self._stream is None or piece.is_cuda:
            return piece
        return on_device(piece.data_ptr(), len(piece), self._device) if direct else self._buffer[:len(piece)]

    def _asks(self) -> list[Any]:
        """Where works go. It is there before a group is asked, which may refuse: those before it are waited for."""
        works: list[Any] = []
        self._busy.append((works, None))
        return works

    def _go_on(self) -> None:
        if any(event.is_set() for event in self._gone):
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


def _nbytes(data: Any) -> int:
    return 0 if data is None else int(data[1] if isinstance(data, tuple) else data.nbytes)


def _is_large(data: Any) -> bool:
    """Does it go by the way of its pair, and not over gloo as notes do?"""
    return isinstance(data, tuple) or _nbytes(data) > SMALL


def _head(parcels: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(parcels).ljust(_MOST * _core.PARCEL_BYTES, b"\xff")), dtype=torch.uint8)


def _begun(target: Any, name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
