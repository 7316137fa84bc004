"""Several processes stream one model: what they have to agree on, and the memory that those of a machine share."""
from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from ..base.units import Group
from ..graph.exchange import Exchange
from ..group import launcher
from ..group.between import Between
from ..group.descriptor import shared
from ..group.ranks import Ranks
from ..plans.fleet import Fleet, check_homes
from ..plans.room import shortage
from ..store.records import Record
from .choices import Choices

REDUCE = ("mean", "sum")
_LOOK_S = 1.0
_LAST_STEP_S = 10.0          # in which nothing moves: they do not go on, and this one does not wait


def check(ranks: Ranks, module: nn.Module, groups: list[Group], choices: Choices, reduce: str) -> None:
    """Raises on every rank: they do not stream the same model in the same way, or what is asked for is for one."""
    with ranks.as_one():
        _check_here(ranks, choices, reduce)
    ranks.agree("reduce=", reduce)
    ranks.agree("products=", choices.products)
    ranks.agree("delivery", choices.options.get("delivery"))
    homes = choices.options.get("homes", "ram")
    ranks.agree("where units are at home", sorted(homes.items()) if isinstance(homes, dict) else homes)
    ranks.agree("the model", [(unit, [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in params])
                              for unit, params in groups])
    buffers = [f"{name}: {b.dtype} {list(b.shape)}" for name, b in module.named_buffers()]
    ranks.agree("what buffers the model has", buffers)


def _check_here(ranks: Ranks, choices: Choices, reduce: str) -> None:
    """What one process can tell by itself."""
    fleet = Fleet(*fleet_of(ranks))
    if reduce not in REDUCE:
        raise MegatrainError(f"reduce={reduce!r}: use {' or '.join(map(repr, REDUCE))}")
    if ranks.size != fleet.gpus * fleet.machines:
        raise MegatrainError(f"{ranks}: each machine has to have equally many")
    homes = choices.options.get("homes", "ram")
    check_homes(fleet, [homes] if isinstance(homes, str) else homes.values(),
                choices.options.get("grads", "ram"))


def fleet_of(ranks: Ranks | None) -> tuple[int, int]:
    """Processes of a machine, and machines, as mt.plan takes them."""
    return (1, 1) if ranks is None else (len(ranks.mates), len(set(ranks.machines)))


def engine_of(ranks: Ranks, device: str, index: int, threads: int, delay_us: int, seed: int) -> _core.Engine:
    """An engine on the memory that all processes of this machine share."""
    launcher.watch_torchrun()
    nodes = ranks.gather(_node(index) if device == "cuda" else -1)
    near = processors([nodes[r] for r in ranks.mates], nodes[ranks.rank], os.sched_getaffinity(0))
    fd = shared(ranks, _core.share() if ranks.rank == ranks.mates[0] else -1)
    try:
        with _on(near):
            return _core.Engine(device, index, max(1, threads // len(ranks.mates)), delay_us, seed, share=fd,
                                rank=ranks.rank, ranks=ranks.size, speakers=ranks.speakers() if ranks.apart else ())
    finally:
        os.close(fd)


def processors(nodes: list[int], own: int, allowed: set[int], sysfs: Path = Path("/sys")) -> set[int]:
    """Beside a rank's GPU, for the engine's threads: what they touch first, states of the rank's own portion, lies in
    the memory there (csrc/core/numa.h). All that are allowed, unless each node of the machine has equally many of its
    ranks' GPUs: some nodes would have nothing to do else.

    Args:
        nodes: of the GPUs of this machine's ranks; -1: not known. own: of this one's. allowed: to this process.
    """
    found = {int(path.parent.name[4:]): _listed(path) & allowed
             for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist")}
    many = Counter(nodes)
    even = many.keys() == {node for node, own in found.items() if own} and len(set(many.values())) == 1
    return found[own] if even else allowed


def _listed(path: Path) -> set[int]:
    """"0-3,8" in a file of the kernel's."""
    ends = [list(map(int, part.split("-"))) for part in path.read_text().strip().split(",") if part]
    return {n for first, *last in ends for n in range(first, (last or [first])[0] + 1)}


def _node(index: int) -> int:
    """Of memory, that a GPU is beside; -1: not known."""
    p = torch.cuda.get_device_properties(index)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        name = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        return int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
    return -1


@contextlib.contextmanager
def _on(processors: set[int]) -> Iterator[None]:
    """Threads that begin in here stay on these."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def between(ranks: Ranks, core: _core.Engine, device: torch.device, delay_us: int) -> Between | None:
    """None: all are on one machine."""
    return Between(ranks, core, device, delay_us) if ranks.apart else None


def leaves_in_order(core: _core.Engine, ranks: Ranks, machines: Between | None) -> None:
    """The process ends: the others may await its part of the last step, or read what is on its device; but not where it
    failed, as they will then."""
    with contextlib.suppress(Exception):
        if getattr(sys, "last_value", None) is None:
            core.watchdog(_LAST_STEP_S)
            core.drain()
            core.stay(_LAST_STEP_S)
        elif core.gone():
            ranks.give_up()
        core.close()
    if machines is not None:
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


def check_copies(ranks: Ranks, records: list[Record]) -> None:
    """Raises: there is no host memory for a model of its own in each process of the machine."""
    one, many = sum(r.nbytes for r in records if r.param is not None), len(ranks.mates)
    if (bound := shortage(one * many)) is not None:
        raise MegatrainError(f"mt.unstream gives each of {many} processes weights of its own, {show_bytes(one)}, and "
                             f"{show_bytes(bound.free)} of host memory are free ({bound.what}): let the processes end "
                             "without it; mt.save, and state_dict() on one rank, need no copies")


def same_buffers(ranks: Ranks, module: nn.Module) -> None:
    """Buffers are the first rank's from now on, as weights are."""
    own = list(module.buffers())
    there = ranks.control.of_first([b.is_meta for b in own])
    for buffer, meta in zip(own, there):
        if not meta:
            ranks.control.give(buffer)
