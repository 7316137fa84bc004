"""Engines that own a portion of every unit each, as processes of one machine do, and the one that owns all.

All of them are in this process, with a share, and take turns: all begin something before one waits. A `Party` is such an
engine: it is told of whole gradients, and hands over what is its own of them. Shared by test_owners.py (CPU device) and
gpu/test_on_gpu.py.
"""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatrain_torch._core import DTYPES, PLANES, STATES, Engine, MegatrainError, share

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HYPER = (1e-2, 0.9, 0.95, 1e-8, 0.1)     # lr, beta1, beta2, eps, weight_decay
SET, ADD = 0, 1
UNITS = (                                # name of the type, elements: cuts inside of parameters and between them
    (("BF16", 30000), ("F32", 64), ("F16", 20011), ("F32", 9000), ("BF16", 1)),
    (("F16", 8192), ("BF16", 24577)),
)
HOMES = ("ram", "through", "vram", "arrive", "disk")


def seeded(seed: int, unit: int, scale: float = 1.0) -> list[Tensor]:
    """A tensor for each parameter of a unit."""
    made = torch.Generator().manual_seed(1000 * seed + unit)
    return [(torch.randn(n, generator=made) * scale).to(TYPES[kind]) for kind, n in UNITS[unit]]


class Party:
    """One engine: rank `rank` of `ranks`.

    Attributes:
        kept: memory of the device. stays: of it what a unit's states come to. sources: of gradients on their way.
    """

    def __init__(self, rank: int, ranks: int, states: str = "fp32", home: str = "ram", share: int = -1,
                 device: str = "cpu") -> None:
        self.engine = Engine(device, threads=2, rank=rank, ranks=ranks, share=share)
        self.engine.watchdog(60)
        self.device, self.home, self.step_number = device, home, 0
        self.kept: list[Tensor] = []
        self.stays: dict[int, list[int]] = {}
        self.sources: list[object] = []
        for u, params in enumerate(UNITS):
            unit = self.engine.add_unit(f"layers.{u}", [DTYPES[k] for k, _ in params], [n for _, n in params],
                                        [True] * len(params))
            self.engine.set_states(unit, STATES[states])
            for i, weight in enumerate(seeded(7, u)):
                self.plane(u, i, "HI", True).copy_(weight.view(torch.uint8))

    def go(self, path: Path | None) -> None:
        units = range(len(UNITS))
        if self.home in ("vram", "arrive"):
            sizes = [self.engine.hi_bytes(u) for u in units]
            self.engine.open_slots([(self.memory(n), n) for n in sizes], self)
        for u in units:
            if self.home in ("vram", "arrive"):
                self.engine.settle(u, u)
            if self.home == "arrive":
                self.engine.invite(u)
            if self.home in ("vram", "arrive"):
                self.engine.take(u, self.stream())
            if self.home == "through":
                self.engine.through(u, True)
        if self.home == "disk":
            self.engine.disk(str(path), list(units), buffers=2, buffer_bytes=1 << 20, threads=2)

    def memory(self, nbytes: int) -> int:
        """An address on the device, of as many bytes."""
        self.kept.append(torch.zeros(nbytes + 512, dtype=torch.uint8, device=self.device))
        return -(-self.kept[-1].data_ptr() // 512) * 512

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0

    def held(self, slot: int) -> bool:
        return False

    def renew(self, slot: int) -> int:
        raise AssertionError("nothing is held")

    def plane(self, unit: int, param: int, name: str, shared: bool = False) -> Tensor:
        """Its bytes in host memory: the user's view of them, or what all have."""
        return torch.from_numpy(self.engine.plane(unit, param, PLANES[name], shared=shared))

    def hand_over(self, unit: int, grads: list[Tensor], mode: int, changed: bool = False) -> None:
        """grads: whole ones. changed: by the user, what they are added to."""
        items = []
        grads = [grad.to(self.device) for grad in grads]
        for i, grad in enumerate(grads):
            first, n = self.engine.owned(unit, i)
            items.append((i, grad.data_ptr() + first * grad.itemsize if n else 0, mode, changed))
        self.sources.append(grads)
        self.engine.offload(unit, items, self.stream())

    def step(self, max_norm: float = 0.0, changed: bool = False, named: list[list[Tensor]] | None = None) -> int:
        """One AdamW step of all, begun; named: gradients in memory that is not the store's."""
        self.step_number += 1
        if self.home == "arrive":
            for u in range(len(UNITS)):
                if u not in self.stays:
                    self.stays[u] = [self.memory(n) for n in self.engine.lift_sizes(u)]
                self.engine.lift(u, self.stays[u], self.stream())
        units = []
        for u, params in enumerate(UNITS):
            given = [(named[u][i].data_ptr(), DTYPES["F32"] if named[u][i].dtype == torch.float32 else DTYPES[kind])
                     if named else (0, 0) for i, (kind, _) in enumerate(params)]
            units.append((u, [(i, *HYPER, self.step_number, False, *given[i], changed, 77 * u + i)
                              for i in range(len(params))]))
        self.sources.append(named)
        ticket = self.engine.adam(units, max_norm, self.stream())
        for u in range(len(UNITS)):
            self.engine.forget(u)
        return ticket

    def rest(self) -> None:
        """Waits until nothing is under way; host memory is current."""
        self.engine.drain()
        self.sources.clear()
        for u in range(len(UNITS)):
            self.engine.wait_updates(u)
            self.engine.bring(u, -1)
            if u in self.stays:
                assert self.engine.leave(u, True)


@contextlib.contextmanager
def gathered(path: Path) -> Iterator[Callable[..., tuple[Party, list[Party]]]]:
    """make(ranks, ...): the one that owns all, and as many as own a portion."""
    made: list[Party] = []

    def make(ranks: int, **how: str) -> tuple[Party, list[Party]]:
        made.append(Party(0, 1, **how))
        fd = share()
        made.extend(Party(rank, ranks, share=fd, **how) for rank in range(ranks))
        os.close(fd)
        assert not together(made[-ranks - 1:], lambda party: party.go(path))
        return made[-ranks - 1], made[-ranks:]

    try:
        yield make
    finally:
        for party in made:
            party.engine.close()


def states_of(whole: Party, unit: int, param: int) -> list[str]:
    """Planes that the parameter has, but for gradients."""
    found = []
    for name in ("HI", "LO", "MASTER", "M", "V", "SCALE"):
        try:
            whole.plane(unit, param, name)
            found.append(name)
        except MegatrainError:
            pass
    return found


def assert_bits_of_one(whole: Party, owners: list[Party], *gradients: str) -> None:
    assert not together([whole, *owners], Party.rest)
    for u, params in enumerate(UNITS):
        for i, (kind, n) in enumerate(params):
            for name in (*states_of(whole, u, i), *(g for g in gradients if g != "ACC" or kind != "F32")):
                want = whole.plane(u, i, name)
                for owner in owners:
                    assert torch.equal(want, owner.plane(u, i, name)), f"unit {u}, {kind} {n}: plane {name}, as seen"
                    assert torch.equal(want, owner.plane(u, i, name, True)), f"unit {u}, {kind} {n}: plane {name}"


def train(whole: Party, owners: list[Party], step: int, micros: int = 1) -> None:
    """Gradients of some micro-batches come."""
    for u in range(len(UNITS)):
        for m in range(micros):
            for party in (whole, *owners):
                party.hand_over(u, seeded(100 * step + m, u, 2.0 ** -m), ADD if m else SET)


def change_gradients(parties: list[Party]) -> None:
    """As a script does on every rank: it sees whole gradients, and others' changes nowhere."""
    assert not together(parties, Party.rest)
    for party in parties:
        for u, params in enumerate(UNITS):
            for i, (kind, _) in enumerate(params):
                party.plane(u, i, "GRAD").view(TYPES[kind]).mul_(0.75)


def together(owners: list[Party], call: Callable[[Party], object]) -> list[BaseException]:
    """As ranks do: nobody waits for another's return. What was raised."""
    raised: list[BaseException] = []

    def one(owner: Party) -> None:
        try:
            call(owner)
        except MegatrainError as e:
            raised.append(e)

    threads = [threading.Thread(target=one, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
