"""Several processes stream one model. They agree on it (`check`), share a machine's memory (`engine`), and give each
other the weights that they fetched (`Delivery`). `watch` ends NCCL's waits when a process has died.
"""
from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import _core
from ..base.errors import MegatrainError
from ..base.units import Group
from ..graph.exchange import Exchange
from ..group.between import Between
from ..group.control import Control
from ..group.ranks import Ranks, as_one, shared, watch_torchrun
from ..plans.tally import check_homes

if TYPE_CHECKING:
    from .choices import Choices, Limits
    from .ring import Slot
    from .runtime import Runtime

LANE, WORK = _core.LANES["gather"], _core.WORKS["fetch"]
REDUCE = ("mean", "sum")
_LOOK_S = 1.0
_LAST_STEP_S = 10.0          # in which nothing moves: they do not go on, and this one does not wait


# ---- as they begin ----

def check(ranks: Ranks, module: nn.Module, groups: list[Group], choices: Choices, limits: Limits, reduce: str) -> None:
    """Raises on every rank: they do not stream the same model in the same way, or what is asked for is for one."""
    homes = choices.options.get("homes", "ram")
    with as_one(ranks):
        if reduce not in REDUCE:
            raise MegatrainError(f"reduce={reduce!r}: use {' or '.join(map(repr, REDUCE))}")
        if ranks.size != limits.fleet.count:
            raise MegatrainError(f"{ranks}: each machine has to have equally many")
        check_homes(limits.fleet, [homes] if isinstance(homes, str) else homes.values(),
                    choices.options.get("grads", "ram"))
    ranks.agree("reduce=", reduce)
    ranks.agree("products=", choices.products)
    ranks.agree("delivery", choices.options.get("delivery"))
    ranks.agree("where units are at home", sorted(homes.items()) if isinstance(homes, dict) else homes)
    ranks.agree("the model", [(unit, [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in params])
                              for unit, params in groups])
    ranks.agree("what buffers the model has",
                [f"{name}: {b.dtype} {list(b.shape)}" for name, b in module.named_buffers()])


def engine(where: torch.device, choices: Choices, ranks: Ranks | None) -> _core.Engine:
    """With nothing in it yet; of several processes on the memory that all of this machine share."""
    threads, doors = choices.options.get("threads") or max(1, _core.build_info()["cpus"] - 1), choices.doors
    device, index = where.type, where.index or 0
    if ranks is None:
        core = _core.Engine(device, index, threads, doors.delay_us, doors.seed)
    else:
        watch_torchrun()
        nodes = ranks.gather(_node(index) if device == "cuda" else -1)
        before = os.sched_getaffinity(0)
        near = processors([nodes[r] for r in ranks.mates], nodes[ranks.rank], before)
        fd = shared(ranks, _core.share() if ranks.rank == ranks.mates[0] else -1)
        try:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, near)        # threads that begin now stay on these
            threads = max(1, threads // len(ranks.mates))
            core = _core.Engine(device, index, threads, doors.delay_us, doors.seed, share=fd, rank=ranks.rank,
                                ranks=ranks.size, speakers=ranks.speakers() if ranks.apart else ())
        finally:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)
            os.close(fd)
    if doors.lock is not None:
        core.lock_limit(doors.lock)
    return core


def processors(nodes: list[int], own: int, allowed: set[int], sysfs: Path = Path("/sys")) -> set[int]:
    """Beside a rank's GPU, for the engine's threads: what they touch first, states of the rank's own portion, lies in
    the memory there (csrc/core/arena.h). All that are allowed, unless each node of the machine has equally many of its
    ranks' GPUs: some nodes would have nothing to do else.

    Args:
        nodes: of the GPUs of this machine's ranks; -1: not known. own: of this one's. allowed: to this process.
    """
    found: dict[int, set[int]] = {}
    for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist"):           # which say "0-3,8"
        ends = [list(map(int, part.split("-"))) for part in path.read_text().strip().split(",") if part]
        there = {n for first, *last in ends for n in range(first, [first, *last][-1] + 1)}
        found[int(path.parent.name[4:])] = there & allowed
    many = Counter(nodes)
    even = many.keys() == {node for node, own in found.items() if own} and len(set(many.values())) == 1
    return found[own] if even else allowed


def _node(index: int) -> int:
    """Of memory, that a GPU is beside; -1: not known."""
    p = torch.cuda.get_device_properties(index)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        name = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        return int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
    return -1


def same_buffers(ranks: Ranks, module: nn.Module) -> None:
    """Buffers are the first rank's from now on, as weights are."""
    own = list(module.buffers())
    there = ranks.control.of_first([b.is_meta for b in own])
    for buffer, meta in zip(own, there):
        if not meta:
            ranks.control.give(buffer)


# ---- as they end ----

def leaves_in_order(core: _core.Engine, ranks: Ranks, machines: Between | None) -> None:
    """The process ends: the others may await its part of the last step, or read what is on its device; but not where it
    failed, as they will then."""
    failed, orderly, alone = getattr(sys, "last_value", None) is not None, True, False
    with contextlib.suppress(Exception):
        if not failed:
            core.watchdog(_LAST_STEP_S)      # raises where mt.unstream has closed it, when all was over
            orderly = False
            core.drain()
            core.stay(_LAST_STEP_S)
            orderly, alone = True, any(died for *_, died in core.gone())         # who ended before it
    with contextlib.suppress(Exception):
        if (failed or not orderly) and core.gone():
            ranks.give_up()
        core.close()                         # else what this rank says has no end
    # What this rank said goes first, to those who still hear it. Where that has no end groups are aborted, so that our
    # threads that look at pieces end: they must not come back to Python later.
    ended = machines is None or machines.finish(_LAST_STEP_S)
    ranks.leave(failed or alone or not (orderly and ended))
    if not ended:
        machines.finish(_LAST_STEP_S)


def watch(exchange: weakref.ref[Exchange], core: _core.Engine, ranks: Ranks) -> None:
    """In a thread of its own. NCCL's kernels that wait for a process that is gone are ended, and so all ends that waits
    behind them on the device: this process comes to where it is told."""
    waits = False
    while (alive := exchange()) is not None:
        try:
            gone = core.gone()
        except MegatrainError:                   # the engine is closed
            return
        before, waits = waits, any(died or alive.began for _, _, died in gone)
        if before and waits:                     # else this one may be about to leave its last backward
            ranks.give_up()
            return
        del alive
        time.sleep(_LOOK_S)


# ---- weights of which each rank has fetched its portion ----

class Delivery:
    """Each rank gives the portion that it has fetched to the others, from slot to slot.

    The engine asks for that where all ranks of the machine have come to the same window (csrc/core/turn.h), and has the
    weights fetched whole where they have not. So a collective that one rank begins all begin, and in one order.

    On CUDA it goes in a stream of its own, behind the copy into the slot; compute waits for it. Python is ahead of the
    device, so it is under way beside the window before. It stands in no line with gradients: its group is its own. But
    every rank launches its gathers and all-to-alls in one order: before a gather all catch up with the rank that has
    begun most of these. So whatever a kernel stands behind in a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1: there is
    one) was launched before it on every rank, and the first of all collectives that are not over waits for local work
    alone.
    """

    def __init__(self, model: Runtime) -> None:
        self._model, self._told = model, False
        self.shards = False      # ranks fetch their portions alone, in passes that record gradients; else each all
        # Made by the first that is gathered: the machine's ranks come there together.
        self._mates: Control | None = None
        self._beside: torch.cuda.Stream | None = None

    def gather(self, slot: int, number: int, memory: Slot) -> None:
        """All portions come to be in the slot; kernels that are launched from now on find them there."""
        rt, compute = self._model, self._model.stream()
        try:
            if rt.is_cuda and self._beside is None:
                self._beside = torch.cuda.Stream(rt.device)
            stream = compute if self._beside is None else self._beside.cuda_stream
            with torch.cuda.stream(self._beside) if rt.is_cuda else contextlib.nullcontext():
                self._gather(slot, number, memory.stretches(number, rt.core.bounds(number)), stream)
            rt.core.gathered(number, slot, stream, compute)
        except BaseException as error:               # what is in the slot is not whole, and others wait for this rank
            rt.core.fail(f"weights of unit {self._name(number)!r} were not gathered: {error}")
            raise

    def _gather(self, slot: int, number: int, portions: list[Tensor], stream: int) -> None:
        core, ranks, exchange = self._model.core, self._model.ranks, self._model.exchange
        what = f"gathers weights of unit {self._name(number)!r}"
        core.ready(slot, stream)
        span = core.span(LANE, WORK, self._model.ring.unit_of(number), stream)
        if not self._model.is_cuda or not ranks.nccl():
            self._control().complete(portions, what)
        else:                                        # to each rank goes this one's portion, and each one's comes here
            me, nothing = ranks.mates.index(ranks.rank), portions[0][:0]
            if exchange is not None and exchange.began:
                exchange.catch_up(self._control().most(exchange.begun))
            out = [nothing if r == me else portions[me] for r in range(len(portions))]
            into = [nothing if r == me else p for r, p in enumerate(portions)]
            with ranks.control.named(what):
                work = ranks.gathers(self._control()).alltoall(into, out)
                if work is not None:
                    work.wait()
        core.span_end(span, sum(p.numel() for p in portions), stream)

    def _control(self) -> Control:
        if self._mates is None:
            ranks = self._model.ranks
            self._mates = Control(ranks.data, ranks.control.patience, self._model.core, ranks.mates)
        return self._mates

    def look(self) -> None:
        """Tells once that ranks open other windows, since each then waits for the others in vain."""
        found = self._model.core.astray() if self.shards and not self._told else None
        if found is None or found[2] == found[3]:        # one alone had looked at it, and has it whole
            return
        self._told, (times, other, own, its) = True, found
        there = f"rank {other} at unit {self._name(its)!r}" if its >= 0 else f"rank {other} did not come"
        warnings.warn(f"rank {self._model.ranks.rank} was at unit {self._name(own)!r} and {there}: weights that not "
                      f"all ranks come to together are fetched whole by each ({times:,} so far). Where ranks go "
                      "different ways through a model, plan={'delivery': 'whole'} spares them waiting for each other",
                      RuntimeWarning, stacklevel=2)

    def _name(self, number: int) -> str:
        return self._model.unit_names[self._model.ring.unit_of(number)]

    def __str__(self) -> str:
        gathers, astray = self._model.core.stats()["gathers"], self._model.core.astray()
        alone = f", {astray[0]:,} times not, since ranks were elsewhere" if astray else ""
        return (f"delivery: each rank fetches its portion and gathers the others' ({gathers:,} times so far{alone})"
                if self.shards else "delivery: each rank fetches whole weights")
