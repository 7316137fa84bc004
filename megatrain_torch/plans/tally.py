"""Bytes of a model's units by plane, in both memories, by where each unit is at home.

The one place that adds them up: plans are made of these sums (placement.py), refusals and reports tell them
(asked.py). What a plane takes is in shapes.py's Unit, as the store lays it out.
"""
from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ..base.modes import DISKS
from ..base.slots import plan_slots
from ..store.disk import DISK_BUFFERS, buffer_bytes
from .cost import (
    LENT,
    STAGINGS,
    copied_planes,
    device_planes,
    host_planes,
    lent_buffers,
    visiting_planes,
)
from .shapes import Unit

SETTLED = ("vram", "arrive")  # homes of units whose weights and gradients stay on the device


class Tally:
    """Homes are given by unit: "ram", "through", "vram", "arrive", "disk" or "disk+weights".

    Attributes:
        units: what is added up. keeps: gradients have planes; else they pass through `lent` buffers of a size, in
            either memory. alike: by unit, the first one with the same bytes: sums are taken over few kinds of units.
        shared: several processes have the units: weights are in host memory whatever their homes, and on the devices
            sums of gradients are there from the first micro-batch on.
    """

    def __init__(self, units: Sequence[Unit], keeps: bool = True, lent: int = LENT, shared: bool = False) -> None:
        self.units, self.keeps, self.most_lent, self.shared = units, keeps, lent, shared
        known: dict[Unit, int] = {}
        self.alike = [known.setdefault(dataclasses.replace(unit, name=""), u) for u, unit in enumerate(units)]
        self._planes: dict[tuple[int, str, bool, bool], dict[str, int]] = {}

    def host(self, homes: Sequence[str], micro: int, copied: bool = False) -> dict[str, int]:
        """In host memory by plane, and what the engine has beside planes. copied: units that live on the device have
        copies there, for a state_dict."""
        total: dict[str, int] = {}
        for (u, home), count in self._kinds(homes).items():
            for plane, n in self._on_host(u, home, micro > 1, copied).items():
                total[plane] = total.get(plane, 0) + n * count
        if not self.keeps:
            total["gradients"] = sum(self.lent(homes))
        if on_disk := [home for home in homes if home in DISKS]:
            total[DISK_BUFFERS] = buffer_bytes(on_disk)
        if micro > 1:
            total["staging"] = STAGINGS * max((u.gradients for u in self._streamed(homes)), default=0)
        return total

    def at_home(self, homes: Sequence[str], micro: int) -> dict[str, int]:
        """On the device by plane, of units that live there, all the time; weights too, which are in their slots."""
        total: dict[str, int] = {}
        for (u, home), count in self._kinds(homes).items():
            for plane, n in self._there(u, home, micro > 1).items() if home in SETTLED else ():
                total[plane] = total.get(plane, 0) + n * count
        if not self.keeps and total:
            settled = [u for u, home in zip(self.units, homes) if home in SETTLED]
            total["gradients"] = sum(lent_buffers(settled, self.most_lent))
        return total

    def visiting(self, homes: Sequence[str]) -> int:
        """On the device around updates: states that arrive."""
        return sum(sum(visiting_planes(u).values()) for u, home in zip(self.units, homes) if home == "arrive")

    def slots(self, homes: Sequence[str], ring: int) -> list[int]:
        """Of those that stream."""
        return plan_slots([n for u, home in zip(self.units, homes) if home not in SETTLED
                           for n in (u.slots if home != "disk+weights" else (u.weights,))], ring)

    def lent(self, homes: Sequence[str]) -> list[int]:
        """Buffers in host memory that gradients pass through, where they are kept nowhere."""
        return [] if self.keeps else lent_buffers(self._streamed(homes), self.most_lent)

    def _streamed(self, homes: Sequence[str]) -> list[Unit]:
        return [u for u, home in zip(self.units, homes) if home not in SETTLED]

    def _kinds(self, homes: Sequence[str]) -> Counter[tuple[int, str]]:
        """How many units with the same bytes are at home in the same place."""
        return Counter(zip(self.alike, homes))

    def _on_host(self, u: int, home: str, several: bool, copied: bool) -> dict[str, int]:
        weights = {"weights": self.units[u].weights} if self.shared and home in SETTLED else {}
        if copied and home in SETTLED:
            return copied_planes(self.units[u]) | weights
        key = u, home, several, False
        if key not in self._planes:
            self._planes[key] = host_planes(self.units[u], home, 1 + several) | weights
        return self._planes[key]

    def _there(self, u: int, home: str, several: bool) -> dict[str, int]:
        key = u, home, several, True
        if key not in self._planes:
            self._planes[key] = device_planes(self.units[u], 1 + several, home, self.keeps)
        return self._planes[key]
