"""Bytes of a model's units by plane, in both memories and on disk, by where each unit is at home; and what several GPUs
and machines share of it.

The one place that adds them up: plans are made of these sums (search.py), refusals and reports tell them. What a plane
takes is in shapes.py's Unit, as the store lays it out.

Each GPU has a process, a rank, which makes a step of its own tokens. A machine's ranks have one host store: whole
weights, which each of them fetches over its own link. Masters, moments, gradients and sums are cut into as many parts
as there are ranks in all, and each is on its owner's machine alone.
"""
from __future__ import annotations

import dataclasses
import itertools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import _core
from ..base.errors import MegatrainError
from ..base.modes import DELIVERIES, DISKS, HOMES, moved_bytes
from ..base.units import ALIGN, Group
from ..figures.report import Tier
from ..group import between
from ..store import disk
from .cost import OFFLOAD_DEPTH, STAGINGS
from .machine import SHARED_ADAM, Machine
from .shapes import Unit, unit_bytes

THROUGH_BYTES = 3 * 64 << 20    # on the device, of updates that pass through it: engine_store.c
LENT = _core.LENT           # buffers of a size for gradients that are kept nowhere
# Labels of host memory, and the engine's planes whose memory they are.
PLANES_OF = {"weights": ("HI",), "masters": ("LO", "MASTER"), "moments": ("M", "V", "SCALE"), "gradients": ("GRAD",),
             "sums": ("ACC",)}
SETTLED = ("vram", "arrive")  # homes of units whose weights and gradients stay on the device
PAGE = os.sysconf("SC_PAGESIZE")
_Homes = Sequence[str] | np.ndarray
_CODES = {home: code for code, home in enumerate(HOMES)}

ADDED_BYTES = 14                # per parameter in host memory: a further micro-batch's sum
MORE_BYTES = 560 << 20          # of the communicator of more than two GPUs, beyond that of two: four H200
PAIR_BYTES = 200 << 20          # of a communicator of two ranks, one of each direction between machines: 389 MiB with
                                # all channels that NCCL opens, of which it is let have 8
SECOND = 0.7                    # of a first communicator's bytes, what a further one takes, which gathers portions
POOL_BYTES = 512 << 20          # what torch keeps for streams of our own, beside compute's
BUFFERS = 2                     # of a unit's gradients: what is sent, and what is received; the next unit's is packed


@dataclass(frozen=True)
class Fleet:
    """gpus: of each machine. linked: they copy from each other's memory."""

    gpus: int = 1
    machines: int = 1
    linked: bool = dataclasses.field(default=False, compare=False)

    @property
    def count(self) -> int:
        return self.gpus * self.machines

    @property
    def alone(self) -> bool:
        return self.count == 1

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' * (self.gpus > 1)}"
        return f"{self.machines} machines of {gpus}" if self.machines > 1 else gpus

    @property
    def each(self) -> str:
        """In front of what is said of one GPU."""
        return "" if self.alone else f"{self}, each with "

    def tiers(self, machine: Machine, vram: dict[str, int], host: dict[str, int]) -> list[Tier]:
        """(title, bytes by what they hold, bytes there are) of both memories, or of both parts of the only one."""
        device = "host memory as device memory" if machine.one_memory else "device memory"
        each = ("", "") if self.alone else (" of a GPU", " of a machine")
        return [(device + each[0], vram, machine.vram_bytes), ("host memory" + each[1], host, machine.host_bytes)]

    def seen(self, machine: Machine) -> Machine:
        """As one of its GPUs sees it beside the others, which do the same at the same time: copies share the host's
        memory, and what AdamW leaves of it, and what windows keep the drive; each process has Python, torch and the
        driver, and NCCL its communicators on the device. Cores are the host's, and update each element once, so the
        drive's rate is what it is where it reads and writes states, and AdamW's that of all together."""
        if self.alone:
            return machine
        alone, nccl = machine.adam_gparams[-1][1], machine.communicator_bytes + MORE_BYTES * (self.gpus > 2)
        nccl += PAIR_BYTES * 2 * (self.machines - 1)
        shared = min(machine.shared_gparams / alone, 1.0) if machine.shared_gparams else SHARED_ADAM
        host, g = host_rate(machine) / 1e9, self.gpus
        machine = dataclasses.replace(
            machine, adam_gparams=tuple((n, rate * shared) for n, rate in machine.adam_gparams),
            adam8_gparams=tuple((states, rate * shared) for states, rate in machine.adam8_gparams),
            vram_overhead_bytes=machine.vram_overhead_bytes + nccl * (machine.device == "cuda"))
        if g == 1:
            return machine
        if machine.device == "cpu":                     # whose cores compute, too
            machine = dataclasses.replace(
                machine, gemm=tuple((n, width, rate / g) for n, width, rate in machine.gemm),
                attention=tuple((seq, fwd / g, bwd / g) for seq, fwd, bwd in machine.attention),
                hbm_gbps=machine.hbm_gbps / g, device_adam_gparams=machine.device_adam_gparams / g)
        adam = machine.adam_gparams[-1][1] * moved_bytes("fp32")
        busy = min(machine.busy_gbps, host * machine.busy_gbps / (adam + g * machine.busy_gbps))
        one_way = min(host / g, machine.whole_gbps or host)
        return dataclasses.replace(
            machine, h2d_gbps=min(machine.h2d_gbps, one_way), d2h_gbps=min(machine.d2h_gbps, host / g),
            both_gbps=min(machine.both_gbps, host / g / 2), busy_gbps=busy, host_gbps=host,
            disk_read_gbps=machine.disk_read_gbps / g, disk_write_gbps=machine.disk_write_gbps / g,
            host_overhead_bytes=machine.host_overhead_bytes * g)


def host_rate(machine: Machine) -> float:
    """Bytes/s of the host's memory, read plus written; unless stated, what AdamW and copies were seen to take."""
    beside = machine.adam_gparams[-1][1] * moved_bytes("fp32") + machine.busy_gbps
    return (machine.host_gbps or max(beside, 2 * machine.both_gbps)) * 1e9


ALONE = Fleet()


def check_delivery(fleet: Fleet, delivery: str | None) -> str:
    """What is asked for, or, of None, to begin with. Raises: there is no such one, or nobody to give a portion to."""
    if delivery not in (None, *DELIVERIES):
        raise MegatrainError(f"delivery={delivery!r}: use {' or '.join(map(repr, DELIVERIES))}")
    if delivery == "shards" and fleet.gpus == 1:
        raise MegatrainError(f"delivery='shards', with {fleet}: weights are fetched in portions by several GPUs of one "
                             "machine; leave it out")
    return delivery or "whole"


def check_homes(fleet: Fleet, homes: Iterable[str | None], grads: str) -> None:
    """Raises: several ranks, and a home that units cannot have there, or gradients that are kept nowhere."""
    if fleet.machines > 1 and "disk+weights" in homes:      # weights in files are portions of one machine's ranks
        rest = ", ".join(repr(home) for home in HOMES if home != "disk+weights")
        raise MegatrainError(f"homes='disk+weights', with {fleet}: units are at home in {rest} there; leave it out, or "
                             "plan one machine")
    if grads == "none" and not fleet.alone:
        raise MegatrainError(f"grads='none', with {fleet}: what several processes' gradients add up to waits in host "
                             "memory for its update; leave it out, or plan one GPU")


# ---- bytes by plane ------------------------------------------------------------------------------

class Tally:
    """Sums of bytes: of one machine's host memory and drive, and of one GPU's memory. fleet: the processes that have
    the units; of several, trained weights are in host memory whatever their homes, and each has its part of all other
    planes. keeps: gradients have planes; else they pass through `lent` buffers of a size, in either memory.

    Homes are given by unit, as base/modes.py has them; or of many choices at once, `coded`, [choices, units]. Then the
    sums are arrays [choices], and micro may be one too."""

    def __init__(self, units: Sequence[Unit], fleet: Fleet = ALONE, keeps: bool = True, lent: int = LENT) -> None:
        self.units, self.fleet, self.keeps, self.most_lent = units, fleet, keeps, lent
        every = {plane: np.array([getattr(u, plane) for u in units], dtype=np.int64) for plane in PLANES_OF}
        weights, states = {"weights": every["weights"]}, {what: every[what] for what in ("masters", "moments")}
        gradients = {what: every[what] for what in ("gradients", "sums")}
        shared = {} if fleet.alone else weights
        # Of what lives on all devices of a machine frozen weights have no memory on the host, nor have trained ones
        # beside which are none, where devices copy from each other (csrc/core/mirror.c).
        self.left = every["weights"] * (not fleet.alone) if fleet.machines > 1 or fleet.alone else \
            every["gradients"] * ((every["gradients"] < every["weights"]) | (not fleet.linked))
        stays = shared and {"weights": self.left}
        copies = {"weights": every["weights"] * (every["masters"] > 0)}         # a copy's master is weight and rest
        self._host = {"ram": every, "through": every, "disk": weights | gradients, "disk+weights": gradients,
                      "arrive": states | stays, "vram": stays}
        self._copied = self._host | dict.fromkeys(SETTLED, states | copies | shared)
        self._device = {"vram": every, "arrive": weights | gradients}
        # By unit: of states that arrive for its update; (planes, at most between them) of a machine's drive, by home.
        # Planes begin at whole blocks of it, and each rank has a file.
        self.states = [sum(-(-n // fleet.count) for n in (u.masters, u.moments)) * bool(u.trained) for u in units]
        self._drive, self.files = {}, {}
        for home in DISKS:
            filed = states if home == "disk" else \
                {"weights": every["gradients"], disk.FROZEN: every["weights"] - every["gradients"]} | states
            whole = sum(filed.values())
            blocks = np.array([u.count for u in units]) + whole // disk.BUFFER_BYTES + 1
            padding = blocks * disk.PADDING_BYTES * (whole > 0) * fleet.gpus
            filed = {what: -(-n // fleet.machines) for what, n in filed.items()}
            self._drive[home] = filed | {disk.PADDING: padding}
            self.files[home] = [*zip(sum(filed.values()).tolist(), padding.tolist())]

    def host(self, homes: _Homes, micro: int | np.ndarray, copied: bool = False) -> dict[str, Any]:
        """In host memory, by plane and beside planes. copied: with copies of what lives elsewhere: a machine that
        reads all states has them whole."""
        codes, several, machines = coded(homes), np.asarray(micro) > 1, self.fleet.machines
        total = _sum(self._copied if copied else self._host, codes)
        total = {what: n if what == "weights" or (copied and what in ("masters", "moments")) else -(-n // machines)
                 for what, n in total.items()}
        if "sums" in total:
            total["sums"] = total["sums"] * several
        if not self.keeps:
            total["gradients"] = self._lent(codes, on_device=False)
        filed, weights = ((codes == _CODES[home]).any(-1) for home in DISKS)
        if np.any(filed | weights):
            buffers = disk.MEMORY_BYTES * (filed | weights) + disk.FEED_BYTES * weights
            total[disk.DISK_BUFFERS] = buffers * self.fleet.gpus
        if several.any():                               # of several ranks each one's part of a sum, in fp32
            largest = (self._host["ram"]["gradients"] * ~np.isin(codes, coded(SETTLED))).max(-1, initial=0)
            staging = STAGINGS * largest if self.fleet.alone else -(-2 * STAGINGS * largest // machines)
            total["staging"] = staging * several
        return _plain(total)

    def disk(self, homes: _Homes) -> dict[str, Any]:
        """On disk, by plane, and between them."""
        return _plain(_sum(self._drive, coded(homes)))

    def device(self, homes: Sequence[str], ring: int, micro: int) -> dict[str, int]:
        """On the device, activations left out; around updates there are `visiting` besides."""
        return {"slots": sum(self.slots(homes, ring)),
                **{f"at home: {plane}": n for plane, n in self.at_home(homes, micro).items()},
                "updates through the device": THROUGH_BYTES * ("through" in homes)}

    def at_home(self, homes: _Homes, micro: int | np.ndarray) -> dict[str, Any]:
        """On the device by plane, of units that live there, all the time; weights too, which are in their slots."""
        codes = coded(homes)
        total = {what: n if what == "weights" else -(-n // self.fleet.count)
                 for what, n in _sum(self._device, codes).items()}
        if "sums" in total:
            total["sums"] = total["sums"] * (np.asarray(micro) > 1)
        if not self.keeps and total:
            total["gradients"] = self._lent(codes, on_device=True)
        return _plain(total)

    def visiting(self, homes: Sequence[str]) -> int:
        """On the device around updates: states that arrive."""
        return sum(n for n, home in zip(self.states, homes) if home == "arrive")

    def slots(self, homes: Sequence[str], ring: int) -> list[int]:
        """Of those that stream."""
        return _core.plan_slots([n for u, home in zip(self.units, homes) if home not in SETTLED
                           for n in (u.slots if home != "disk+weights" else (u.weights,))], ring)

    def _lent(self, codes: np.ndarray, on_device: bool) -> Any:
        """Buffers that gradients pass through where they are kept nowhere, on the device or the host."""
        gradients, chosen = [u.gradients for u in self.units], np.isin(codes, coded(SETTLED)) == on_device
        found = [sum(_core.plan_slots([*itertools.compress(gradients, row)], self.most_lent))
                 for row in np.atleast_2d(chosen)]
        return np.array(found) if codes.ndim > 1 else found[0]


def coded(homes: _Homes) -> np.ndarray:
    """Homes by their numbers in HOMES, which are C's."""
    return homes if isinstance(homes, np.ndarray) else np.array([_CODES[home] for home in homes], dtype=np.uint8)


def _sum(by_home: dict[str, dict[str, np.ndarray]], codes: np.ndarray) -> dict[str, Any]:
    """By plane, of those that some unit has there. by_home: bytes [units] by plane."""
    total: dict[str, Any] = {}
    for home, planes in by_home.items():
        there = codes == _CODES[home]
        if there.any():
            for what, n in planes.items():
                total[what] = total.get(what, 0) + there @ n
    return total


def _plain(total: dict[str, Any]) -> dict[str, Any]:
    """Sums of one choice as Python's numbers."""
    return {what: n if np.ndim(n) else int(n) for what, n in total.items()}


@dataclass(frozen=True)
class Asked:
    """What mt.stream was asked for, as far as memory depends on it."""

    name: str                           # of the model
    groups: list[Group]                 # its units
    dtype: torch.dtype | None           # the type they are converted to
    homes: tuple[str, ...]              # by unit, see base/modes.py
    ring: int = 3                       # slots of a size
    micro: int = 1                      # micro-batches of a step, as far as known
    on_cpu: bool = False                # the "device" is the CPU, so its memory is the host's
    besides: tuple[tuple[str, int], ...] = ()       # what a plan puts in host memory beside planes, by what it is
    keeps: bool = True                  # gradients, where their units are at home; else they pass through a few buffers
    states: str = "fp32"                # how AdamW's are kept
    lent: int = LENT                    # such buffers of a size
    copied: bool = False                # what lives on the device has copies in host memory, for a state_dict
    fleet: Fleet = ALONE                # the processes that have the units; each parameter then begins at a page
    experts: int = 0                    # of a mixture's layer, fetched at a time; 0: all of them
    # Tallies by what bytes depend on; the same dict in all that is made from this by `replace`.
    known: dict[tuple[Any, ...], Tally] = field(default_factory=dict, compare=False, repr=False)

    def on_disk(self) -> bool:
        """Some unit's states are."""
        return any(home in DISKS for home in self.homes)

    def tally(self) -> Tally:
        """Of the parameters as they are now: some may have been frozen since."""
        params = [p for _, own in self.groups for _, p in own]
        # A form (room.py) stands for a parameter that may have been frozen since, or thawed.
        for p in (p for p in params if isinstance(getattr(p, "live", None), weakref.ref)):
            with torch._C.DisableTorchFunctionSubclass():
                p.requires_grad_((live := p.live()) is not None and live.requires_grad)
        key = self.dtype, self.states, self.experts, self.keeps, self.lent, *(p.requires_grad for p in params)
        if key not in self.known:
            align = ALIGN if self.fleet.alone else PAGE
            units = [unit_bytes(name, own, self.dtype, self.states, align, self.experts) for name, own in self.groups]
            self.known[key] = Tally(units, self.fleet, self.keeps, self.lent)
        return self.known[key]

    def device(self) -> dict[str, int]:
        """Bytes of device memory by what they hold, activations left out; all weights are in slots."""
        tally = self.tally()
        found = tally.device(self.homes, self.ring, self.micro)
        return {"slots": found.pop("slots") + found.pop("at home: weights", 0), **found,
                "states that arrive": tally.visiting(self.homes)}

    def at_home(self) -> int:
        """Bytes of device memory that the store takes for units at home there, beside their slots."""
        return sum(n for what, n in self.device().items() if what.startswith("at home"))

    def host(self) -> dict[str, int]:
        """Bytes of host memory by plane, AdamW's states counted in; on the CPU device its memory too."""
        on_device = self.device() if self.on_cpu else {}
        return self.planes() | {f"the device's {what}": n for what, n in on_device.items()}

    def planes(self) -> dict[str, int]:
        """Bytes of host memory by plane, the device's left out."""
        return dict(self.besides) | self.tally().host(self.homes, self.micro, self.copied)

    def moved(self, before: str, after: str) -> Iterator[Asked]:
        """The same with the last one, two, ... of the units at home in `before` at home in `after`."""
        homes = list(self.homes)
        for i in reversed([i for i, home in enumerate(homes) if home == before]):
            homes[i] = after
            yield dataclasses.replace(self, homes=tuple(homes))

    def named(self) -> dict[str, str]:
        """Homes by name, as a plan has them; units left out are in host memory."""
        return {name: home for (name, _), home in zip(self.groups, self.homes) if home != "ram"}


# ---- what ranks exchange -------------------------------------------------------------------------

class Exchange:
    """Bytes and seconds of each unit's gradients on their way to who owns them, and of new weights; of one of several
    ranks. Arrays by unit, zeros of one rank alone.

    A rank's gradients of a unit lie in one buffer. Each part goes to the rank that owns it, which adds what it is given
    in fp32, in the order of ranks. Between machines go the parts of every rank: a machine's sums would be less, and of
    other bits. The owner brings home what its sum is in the weights' type. New weights go from a machine's host memory
    to the others', through the devices.
    """

    def __init__(self, units: Sequence[Unit], fetches: Sequence[int], machine: Machine, fleet: Fleet, delivery: str
                 ) -> None:
        """fetches: bytes of one, by unit."""
        gradients = np.array([u.gradients for u in units], dtype=np.int64)
        updated = np.array([u.weights if u.trained else 0 for u in units], dtype=np.int64)
        g, m, n, apart = fleet.gpus, fleet.machines, fleet.count, not fleet.alone
        self.parts = g if delivery == "shards" else 1       # in so many each unit's weights are fetched
        self.home = -(-gradients // n)                      # bytes of a micro-batch's gradients that cross to the host
        # GPUs have no links to each other, and exchange over those to the host; bytes there of one GPU's micro-batch.
        self.on_link = g > 1 and not machine.exchange_gbps
        links = (machine.exchange_gbps or machine.both_gbps) * 1e9
        leaving = gradients * ((g - 1) / g)
        self.link_bytes = 2 * int(leaving.sum()) * self.on_link
        # Bytes/s of the host's memory, and for one GPU's copies; 0: it has enough.
        self.host_rate = host_rate(machine)
        self.memory_rate = self.host_rate / g * apart
        # Gradients are exchanged within the machine and added; between machines; by which that holds up what is
        # computed beside it.
        added = gradients * (1 + 1 / g) * apart         # read, and written, by the sum
        self.exchange_s = leaving / links + added / (machine.hbm_gbps * 1e9)
        network, crossing = machine.network_gbps * 1e9, gradients * ((m - 1) / m)
        across = g * gradients * ((m - 1) / m)          # of a whole machine
        self.network_s = across / network
        self.lost_s = (leaving + across / g) / (machine.lost_gbps * 1e9)
        # Portions of weights are given to each other; by which that holds up what is computed.
        given = np.array(fetches) * ((self.parts - 1) / self.parts)
        self.gather_s, self.held_s = given / links, given / (machine.lost_gbps * 1e9)
        # New weights go to the other machines. Each GPU's part leaves over it, and each of other machines comes over
        # one: in pieces, of which one crosses the network while others are copied.
        self.spread_s = np.maximum(crossing / network, crossing / g / (machine.both_gbps * 1e9))
        # Bytes of new weights of a unit at home on the devices: from each down to its host, and up to each.
        self.lowered = -(-updated // n) * apart
        self.raised = (updated - self.lowered) * apart
        # Bytes/s at which these come from other devices; 0: by way of the host.
        self.peers = links * (apart and m == 1 and not self.on_link)
        if self.peers:                                      # all of a unit's are in no host memory
            self.lowered *= gradients < [u.weights for u in units]
        sizes = np.pad(gradients, 1)
        packed = BUFFERS * gradients + np.maximum(sizes[:-2], sizes[2:])
        # Bytes on the device: gradients packed, and on their way home; communicators; ways to all other machines, and
        # from each.
        self.buffers = apart * (
            int(packed.max(initial=0)) + OFFLOAD_DEPTH * int(self.home.max(initial=0))
            + int(SECOND * machine.communicator_bytes) * (self.parts > 1 and machine.device == "cuda")
            + POOL_BYTES + m * between.PIECE * (m > 1))     # there lies what goes from or to memory that is not locked
