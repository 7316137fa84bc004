"""Units whose states, and weights, are in a file: which, and how many bytes of it."""
from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

from ..base.modes import DISKS
from ..store.disk import FEED_BYTES, FROZEN, MEMORY_BYTES, PADDING, unit_file_bytes
from .cost import Home, visiting_planes
from .machine import Machine
from .shapes import Shape
from .tally import Tally
from .uses import Uses
from .wishes import Wishes

OVERHEAD = "Python, torch, driver"          # of host memory: what is there besides planes
PLAIN = tuple(home.plain for home in Home)              # by a Home's number


class OnDisk(NamedTuple):
    """Units whose states are there; of these, units whose weights are there too."""

    states: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()

    def home_of(self, unit: int, home: Home) -> str:
        """As mt.stream's plan has it; home: where it is if not here."""
        if unit in self.weights:
            return "disk+weights"
        return "disk" if unit in self.states else PLAIN[home]


class Disk:
    """What a plan's drive has of units, for each choice of homes."""

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes, uses: Uses, tally: Tally
                 ) -> None:
        self.shape, self.machine, self.wishes = shape, machine, wishes
        self.uses, self.tally = uses, tally
        self.known: dict[tuple[tuple[Home, ...], bool], OnDisk] = {}
        self.rooms: dict[tuple[tuple[Home, ...], bool], int] = {}
        self.files = {home: [wishes.fleet.on_drive(*unit_file_bytes(unit, home)) for unit in shape.units]
                      for home in DISKS}
        self.memory = MEMORY_BYTES * wishes.fleet.gpus

    def units(self, homes: tuple[Home, ...], micro: int) -> OnDisk:
        """As many as host memory cannot hold: states alone, or weights too where those are too many
        for it as well. None where all updates are to pass through the device: they read states from
        memory."""
        key = homes, micro > 1
        if isinstance(self.wishes.homes, dict):
            return OnDisk(named(self.shape, self.wishes, *DISKS),
                          named(self.shape, self.wishes, "disk+weights"))
        if key not in self.known:
            none = self.wishes.nvme is None or self.wishes.homes == "through"
            self.known[key] = OnDisk() if none else self._units(homes, micro)
        return self.known[key]

    def _units(self, homes: tuple[Home, ...], micro: int) -> OnDisk:
        over, room, found = 1, self.wishes.nvme, []
        forced = self.wishes.homes in DISKS
        if not forced:
            over = sum(self.host_bytes(homes, micro, OnDisk()).values()) - self.machine.host_bytes
            if over <= 0:
                return OnDisk()
        order = self._order(homes)
        for u in order:
            states, padding = self.files["disk"][u]
            if over + self.memory * bool(found) <= 0 or states + padding > room:
                break
            if states:
                found.append(u)
                room -= states + padding
                over -= states * (not forced)
        enough = not forced and over + self.memory * bool(found) <= 0
        if self.wishes.homes == "disk" or enough or not self.wishes.fleet.offers("disk+weights"):
            return OnDisk(frozenset(found))
        over += 0 if forced else (MEMORY_BYTES + FEED_BYTES) * self.wishes.fleet.gpus
        return self._weights(order, found, over, room, forced)

    def _weights(self, order: list[int], found: list[int], over: int, room: int, forced: bool
                 ) -> OnDisk:
        """Weights too, until there is enough host memory, or no more room in the file. over, room:
        bytes of these."""
        filed: list[int] = []
        for u in order:
            unit = self.shape.units[u]
            more = sum(self.files["disk+weights"][u])
            more -= sum(self.files["disk"][u]) if u in found else 0
            if over <= 0 or more > room or (u not in found and unit.trained):
                break
            filed.append(u)
            room -= more
            over -= unit.weights * (not forced)
        return OnDisk(frozenset(found) | frozenset(filed), frozenset(filed))

    def _order(self, homes: tuple[Home, ...]) -> list[int]:
        """Units at home in RAM, those that are used last first: their updates have most time before
        the next forward needs them. Where updates follow gradients that are kept nowhere, any first
        few are spread over the model (van der Corput's sequence): the drive has the time between
        them, and a backward waits for each."""
        order = [u for u in reversed(self.uses.first) if not homes[u]]
        return order if self.wishes.grads == "ram" else [order[at] for at in _spread(len(order))]

    # ---- bytes ----

    def where(self, homes: tuple[Home, ...], on_disk: OnDisk) -> list[str]:
        """By unit, as Tally has it."""
        found = [PLAIN[home] for home in homes]
        for u in on_disk.states:
            found[u] = "disk+weights" if u in on_disk.weights else "disk"
        return found

    def host_bytes(self, homes: tuple[Home, ...], micro: int, on_disk: OnDisk) -> dict[str, int]:
        """By plane, and what is there besides."""
        where, fleet = self.where(homes, on_disk), self.wishes.fleet
        return {OVERHEAD: self.machine.host_overhead_bytes, **fleet.on_host(self.tally.host(where, micro))}

    def bytes(self, homes: tuple[Home, ...], micro: int) -> dict[str, int]:
        """In the file, by plane, and between them."""
        total: dict[str, int] = {}
        on_disk = self.units(homes, micro)
        for (u, filed), count in Counter((self.tally.alike[u], u in on_disk.weights)
                                         for u in on_disk.states).items():
            unit, weights = self.shape.units[u], {}
            if filed:
                weights = {"weights": unit.gradients, FROZEN: unit.weights - unit.gradients}
            padding = self.files["disk+weights" if filed else "disk"][u][1]
            planes, fleet = {**weights, **visiting_planes(unit)}, self.wishes.fleet
            own = {what: fleet.on_drive(n, 0)[0] for what, n in planes.items()}
            for what, n in {**own, PADDING: padding}.items():
                total[what] = total.get(what, 0) + n * count
        return total

    def room(self, homes: tuple[Home, ...], micro: int) -> int:
        """Bytes that units leave, to each of a machine's GPUs."""
        key = homes, micro > 1
        if key not in self.rooms:
            left = (self.wishes.nvme or 0) - sum(self.bytes(homes, micro).values())
            self.rooms[key] = left // self.wishes.fleet.gpus
        return self.rooms[key]


def named(shape: Shape, wishes: Wishes, *homes: str) -> frozenset[int]:
    """Units that wishes name as at home there."""
    return frozenset(i for i, u in enumerate(shape.units) if wishes.homes.get(u.name) in homes)


@functools.cache
def _spread(n: int) -> tuple[int, ...]:
    """Numbers below n in van der Corput's order."""
    bits = n.bit_length()
    return tuple(place for i in range(1 << bits)
                 if (place := int(f"{i:0{bits}b}"[::-1], 2)) < n)
