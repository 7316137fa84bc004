"""Several GPUs, several machines: who has what of a unit, and what one of them sees of what they share.

Each GPU has a process, a rank, which makes a step of its own tokens. A machine's ranks have one host store: whole
weights, which each of them fetches over its own link. Masters, moments, gradients and sums are cut into as many parts
as there are ranks in all, and each is on its owner's machine alone.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..base.errors import MegatrainError
from ..base.modes import DELIVERIES, HOMES, moved_bytes
from ..figures.tables import Tier
from ..group import between
from .cost import OFFLOAD_DEPTH
from .machine import SHARED_ADAM, Machine
from .shapes import Unit

ADDED_BYTES = 14                # per parameter in host memory: a further micro-batch's sum
PAIR_BYTES = 200 << 20          # of a communicator of two ranks, one of each direction between machines: 389 MiB with
                                # all channels that NCCL opens, of which it is let have 8
WAY_BYTES = between.BUFFERS * between.PIECE
SECOND = 0.7                    # of a first communicator's bytes, what a further one takes, which gathers portions
POOL_BYTES = 512 << 20          # what torch keeps for streams of our own, beside compute's
BUFFERS = 2                     # of a unit's gradients: what is sent, and what is received; the next unit's is packed

@dataclass(frozen=True)
class Fleet:
    """gpus: of each machine."""

    gpus: int = 1
    machines: int = 1

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
        alone, nccl = machine.adam_gparams[-1][1], machine.communicator_bytes + PAIR_BYTES * 2 * (self.machines - 1)
        shared = min(machine.shared_gparams / alone, 1.0) if machine.shared_gparams else SHARED_ADAM
        host_gbps = host_rate(machine) / 1e9
        machine = dataclasses.replace(
            machine, adam_gparams=tuple((n, rate * shared) for n, rate in machine.adam_gparams),
            adam8_gparams=tuple((states, rate * shared) for states, rate in machine.adam8_gparams),
            vram_overhead_bytes=machine.vram_overhead_bytes + nccl * (machine.device == "cuda"))
        if self.gpus == 1:
            return machine
        host, g = host_gbps, self.gpus
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


# ---- what ranks exchange --------------------------------------------------------------------------

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
        # Gradients are exchanged within the machine and added; between machines; by which that holds up what is
        # computed beside it.
        wide = np.maximum(gradients, [u.sums for u in units])      # a sum in fp32; of fp32 weights the gradient itself
        added = (gradients + wide / g) * apart          # read, and written, by the sum
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
        sizes = np.pad(gradients, 1)
        packed = BUFFERS * gradients + np.maximum(sizes[:-2], sizes[2:])
        # Bytes on the device: gradients packed, and on their way home; a sum, before it is rounded; communicators; ways
        # to all other machines, and from each.
        self.buffers = apart * (
            int(packed.max(initial=0)) + OFFLOAD_DEPTH * int(self.home.max(initial=0)) - int(-wide.max(initial=0) // n)
            + int(SECOND * machine.communicator_bytes) * (self.parts > 1 and machine.device == "cuda")
            + POOL_BYTES + m * WAY_BYTES * (m > 1))
