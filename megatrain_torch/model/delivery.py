"""Weights of which each rank of a machine has fetched its own portion: each gives it to the others, from slot to slot.

The engine asks for that where all of them have come to the same window (csrc/core/turn.h), and has the weights fetched
whole where they have not. So a collective that one rank begins all begin, and in one order.

On CUDA it goes in a stream of its own, behind the copy into the slot; compute waits for it. Python is ahead of the
device, so it is under way beside the window before. It stands in no line with gradients: its group is its own. But
every rank launches its gathers and all-to-alls in one order: before a gather all catch up with the rank that has begun
most of these. So whatever a kernel stands behind in a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1: there is one) was
launched before it on every rank, and the first of all collectives that are not over waits for local work alone.
"""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .. import _core
from ..graph.exchange import Exchange
from ..group.control import Control
from ..group.ranks import Ranks

LANE, WORK = _core.LANES["gather"], _core.WORKS["fetch"]


class Slot(Protocol):
    """Device memory that has weights: ring.Slot."""

    def stretches(self, number: int, bounds: Sequence[int]) -> list[Tensor]: ...


class Model(Protocol):
    """The streamed model whose weights these are: runtime.Runtime."""

    core: _core.Engine
    device: torch.device
    unit_names: list[str]
    ranks: Ranks | None
    exchange: Exchange | None

    def unit_of(self, number: int) -> int: ...

    def stream(self) -> int: ...


class Delivery:
    """
    Attributes:
        shards: ranks fetch their portions alone, in passes that record gradients; else each fetches all.
    """

    def __init__(self, model: Model) -> None:
        self._model, self.shards = model, False
        self._bounds: dict[int, tuple[int, ...]] = {}
        self._told = False
        # Made by the first that is gathered: the machine's ranks come there together.
        self._mates: Control | None = None
        self._beside: torch.cuda.Stream | None = None

    def begins(self) -> bool:
        """A forward begins: are portions fetched?"""
        return self.shards and torch.is_grad_enabled()

    def forget(self) -> None:
        """Other slots will be opened, and other cuts."""
        self._bounds.clear()

    def gather(self, slot: int, number: int, memory: Slot) -> None:
        """All portions come to be in the slot; kernels that are launched from now on find them there."""
        try:
            if number not in self._bounds:
                self._bounds[number] = self._model.core.bounds(number)
            self._gather(slot, number, memory.stretches(number, self._bounds[number]))
        except BaseException as error:               # what is in the slot is not whole, and others wait for this rank
            self._model.core.fail(f"weights of unit {self._name(number)!r} were not gathered: {error}")
            raise

    def _gather(self, slot: int, number: int, portions: list[Tensor]) -> None:
        core, what, compute = self._model.core, f"gathers weights of unit {self._name(number)!r}", self._model.stream()
        unit, nbytes = self._model.unit_of(number), sum(p.numel() for p in portions)
        if self._model.device.type != "cuda":
            core.ready(slot, compute)
            span = core.span(LANE, WORK, unit, compute)
            self._control().complete(portions, what)
            core.span_end(span, nbytes, compute)
            core.gathered(number, slot, compute, compute)
            return
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._model.device)
        beside = self._beside.cuda_stream
        with torch.cuda.stream(self._beside):
            core.ready(slot, beside)
            span = core.span(LANE, WORK, unit, beside)
            if self._ranks().nccl():
                self._send_all(portions, what)
            else:
                self._control().complete(portions, what)
            core.span_end(span, nbytes, beside)
        core.gathered(number, slot, beside, compute)

    def _send_all(self, portions: list[Tensor], what: str) -> None:
        """To each rank goes this one's portion, and each one's comes here: in place."""
        ranks = self._ranks()
        exchange, me, nothing = self._model.exchange, ranks.mates.index(ranks.rank), portions[0][:0]
        if exchange is not None and exchange.began:
            exchange.catch_up(self._control().most(exchange.begun()))
        out = [nothing if r == me else portions[me] for r in range(len(portions))]
        into = [nothing if r == me else p for r, p in enumerate(portions)]
        with ranks.control.named(what):
            work = ranks.gathers().alltoall(into, out)
            if work is not None:
                work.wait()

    def _ranks(self) -> Ranks:
        assert self._model.ranks is not None
        return self._model.ranks

    def _control(self) -> Control:
        if self._mates is None:
            ranks = self._ranks()
            self._mates = Control(ranks.data, ranks.control.patience, self._model.core, ranks.mates)
        return self._mates

    # ---- ranks that go different ways ----

    def look(self) -> None:
        """Tells once that ranks open other windows, since each then waits for the others in vain."""
        found = self._model.core.astray() if self.shards and not self._told else None
        if found is None or found[2] == found[3]:        # one alone had looked at it, and has it whole
            return
        self._told, (times, other, own, its) = True, found
        there = f"rank {other} at unit {self._name(its)!r}" if its >= 0 else f"rank {other} did not come"
        warnings.warn(f"rank {self._ranks().rank} was at unit {self._name(own)!r} and {there}: weights that not all "
                      f"ranks come to together are fetched whole by each ({times:,} so far). Where ranks go different "
                      "ways through a model, plan={'delivery': 'whole'} spares them waiting for each other",
                      RuntimeWarning, stacklevel=2)

    def _name(self, number: int) -> str:
        return self._model.unit_names[self._model.unit_of(number)]

    def __str__(self) -> str:
        gathers, astray = self._model.core.stats()["gathers"], self._model.core.astray()
        alone = f", {astray[0]:,} times not, since ranks were elsewhere" if astray else ""
        return (f"delivery: each rank fetches its portion and gathers the others' ({gathers:,} times so far{alone})"
                if self.shards else "delivery: each rank fetches whole weights")
