"""Several GPUs, several machines: who has what of a unit, and what one of them sees of what they share.

Each GPU has a process, a rank, which makes a step of its own tokens. A machine's ranks have one host store: whole
weights, which each of them fetches over its own link. Masters, moments, gradients and sums are cut into as many parts
as there are ranks in all, and each is on its owner's machine alone.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from ..base.errors import MegatrainError, check_count
from ..base.modes import DELIVERIES, HOMES, moved_bytes
from ..store.disk import DISK_BUFFERS
from .machine import SHARED_ADAM, Machine

# Homes that units may have where there are several ranks: it is said here alone. Weights in files are the portions of
# one machine's ranks.
OFFERED = ("ram", "through", "vram", "arrive", "disk", "disk+weights")
OF_ONE_MACHINE = ("disk+weights",)
CUT = ("masters", "moments", "gradients", "sums")       # planes of which each rank has its part; weights are whole
PER_RANK = ("activations", DISK_BUFFERS)                # of host memory, what each rank has for itself
ADDED_BYTES = 14                # per parameter in host memory: a further micro-batch's sum
PAIR_BYTES = 200 << 20          # of a communicator of two ranks, one of each direction between machines: 389 MiB with
                                # all channels that NCCL opens, of which it is let have 8


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

    def offers(self, *homes: str) -> bool:
        """May units be at home in all of these?"""
        return self.alone or set(homes) <= set(self.homes)

    @property
    def homes(self) -> tuple[str, ...]:
        """That it offers, of several."""
        return tuple(home for home in OFFERED if self.machines == 1 or home not in OF_ONE_MACHINE)

    # ---- bytes ----

    def on_host(self, planes: dict[str, int]) -> dict[str, int]:
        """Of one machine's host memory. planes: bytes of all of a model's, and what one process has besides."""
        planes = dict(planes)
        if "staging" in planes and not self.alone:      # each rank's part of a sum, in fp32
            planes["staging"] = self._part(2 * planes["staging"], self.machines)
        return {what: self._part(n, self.machines) if what in CUT else n * (self.gpus if what in PER_RANK else 1)
                for what, n in planes.items()}

    def on_drive(self, planes: int, padding: int) -> tuple[int, int]:
        """Of one machine's drive, where each of its ranks has a file. planes, padding: bytes of one rank's alone."""
        return self._part(planes, self.machines), padding * self.gpus

    def on_device(self, planes: dict[str, int]) -> dict[str, int]:
        """Of one GPU's memory, of units at home there. planes: bytes of all of a model's."""
        return {what: self._part(n, self.count) if what in CUT else n for what, n in planes.items()}

    def _part(self, n: int, parts: int) -> int:
        return -(-n // parts)

    # ---- rates ----

    @property
    def added(self) -> float:
        """What a machine's host adds for a further micro-batch, by the gradients of a model."""
        return 1 / self.machines

    def seen(self, machine: Machine) -> Machine:
        """As one of its GPUs sees it beside the others, which do the same at the same time: copies share the host's
        memory, and what AdamW leaves of it, and what windows keep the drive; each process has Python, torch and the
        driver, and NCCL its communicators on the device. Cores are the host's, and update each element once, so the
        drive's rate is what it is where it reads and writes states, and AdamW's that of all together. Of the CPU device
        the cores compute, too."""
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
        if machine.device == "cpu":
            machine = _slowed(machine, self.gpus)
        host, g = host_gbps, self.gpus
        adam = machine.adam_gparams[-1][1] * moved_bytes("fp32")
        busy = min(machine.busy_gbps, host * machine.busy_gbps / (adam + g * machine.busy_gbps))
        one_way = min(host / g, machine.whole_gbps or host)
        return dataclasses.replace(
            machine, h2d_gbps=min(machine.h2d_gbps, one_way), d2h_gbps=min(machine.d2h_gbps, host / g),
            both_gbps=min(machine.both_gbps, host / g / 2), busy_gbps=busy, host_gbps=host,
            disk_read_gbps=machine.disk_read_gbps / g, disk_write_gbps=machine.disk_write_gbps / g,
            host_overhead_bytes=machine.host_overhead_bytes * g)

    def memory(self, machine: Machine) -> float:
        """Bytes/s of the host's memory for one GPU's copies; 0: it has enough."""
        return 0.0 if self.alone else host_rate(machine) / self.gpus

    def memory_s(self, machine: Machine, states: str, trained: float, micro: int) -> float:
        """Seconds in which a step's updates and sums have that memory. trained: parameters updated by all hosts."""
        own = trained / self.machines * moved_bytes(states)
        added = (micro - 1) * trained * self.added * ADDED_BYTES
        return 0.0 if self.alone else (own + added) / host_rate(machine)


def _slowed(machine: Machine, by: int) -> Machine:
    """Of all that is computed."""
    gemm = tuple((n, width, rate / by) for n, width, rate in machine.gemm)
    attention = tuple((seq, forward / by, backward / by) for seq, forward, backward in machine.attention)
    return dataclasses.replace(machine, gemm=gemm, attention=attention, hbm_gbps=machine.hbm_gbps / by,
                               device_adam_gparams=machine.device_adam_gparams / by)


def host_rate(machine: Machine) -> float:
    """Bytes/s of the host's memory, read plus written. Where nobody said: what AdamW and copies beside it take of it
    together, or copies both ways. More may be there, and is not known."""
    beside = machine.adam_gparams[-1][1] * moved_bytes("fp32") + machine.busy_gbps
    return (machine.host_gbps or max(beside, 2 * machine.both_gbps)) * 1e9


ALONE = Fleet()


def fleet_of(gpus: int, machines: int) -> Fleet:
    """Raises: they are no counts."""
    check_count(gpus, "gpus")
    check_count(machines, "machines")
    return Fleet(gpus, machines)


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
    asked = [home for home in homes if home is not None]
    if words := [f"homes={home!r}" for home in HOMES if home in asked and not fleet.offers(home)]:
        raise MegatrainError(f"{words[0]}, with {fleet}: units are at home in {', '.join(map(repr, fleet.homes))} "
                             "there; leave it out, or plan one machine")
    if grads == "none" and not fleet.alone:
        raise MegatrainError(f"grads='none', with {fleet}: what several processes' gradients add up to waits in host "
                             "memory for its update; leave it out, or plan one GPU")
