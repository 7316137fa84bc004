"""Where units may be at home, which updates pass through the device, and what follows from both."""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..base.modes import DISKS
from ..base.slots import plan_slots
from .cost import Home, visiting_planes
from .exchange import Exchange
from .keeping import GUESTS
from .machine import Machine
from .on_disk import PLAIN, Disk, OnDisk, named
from .shapes import Shape
from .tally import SETTLED
from .uses import Uses
from .wishes import Wishes

RINGS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_OF_PIECES = 4         # slots, where experts are fetched a few at a time
MOST_ENDS = 3               # embeddings and heads whose homes are chosen one by one


class Homes(NamedTuple):
    """What follows from where units are at home.

    Attributes:
        units: [unit] where it is at home. through: those whose updates pass through the device.
        weights, gradients: bytes that cross; again: of the weights, those that backward needs.
            visiting: of states that arrive.
        end_s: from the last window to the norm. add_s: to add up a further micro-batch's gradients
            on the host; longest_add_s: those of one unit.
        slots: (ring, bytes of its slots).
        top, low: of windows whose weights cross, the last of a forward, and the first that needs
            them in backward too.
    """

    units: tuple[Home, ...]
    through: frozenset[int]
    weights: int
    again: int
    gradients: int
    visiting: int
    end_s: float
    add_s: float
    longest_add_s: float
    slots: list[tuple[int, int]]
    top: int
    low: int


class Ways:
    """All ways that may be chosen, of one model on a machine."""

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes, uses: Uses, disk: Disk,
                 exchange: Exchange) -> None:
        self.shape, self.machine, self.wishes = shape, machine, wishes
        self.uses, self.disk, self.exchange = uses, disk, exchange
        self.through_rate = machine.through_rate(wishes.states, alone=wishes.homes == "through")
        self.ring_bytes: dict[frozenset[tuple[int, int]], list[tuple[int, int]]] = {}
        self.known: dict[tuple[Home, ...], list[Homes]] = {}

    @functools.cached_property
    def choices(self) -> list[tuple[Home, ...]]:
        return [homes for homes in self.home_choices() if self._offered(homes)]

    def _offered(self, homes: tuple[Home, ...]) -> bool:
        return self.wishes.fleet.offers(*(PLAIN[home] for home in set(homes)))

    def of(self, units: tuple[Home, ...]) -> list[Homes]:
        """All updates on the host, or some through the device; or all, where that is asked for and
        any are."""
        if units not in self.known:
            through, asked = self.through(units), self.wishes.homes
            fixed = asked == "through" or isinstance(asked, dict)
            self.known[units] = [] if through and fixed else [self.homes(units)]
            if through and self.through_rate:       # else named, for a machine that has no such way
                self.known[units].append(self.homes(units, through))
        return self.known[units]

    def home_choices(self) -> list[tuple[Home, ...]]:
        """Units at home in VRAM: the embedding, the head, and a beginning of what is between. The
        first layers gain most there: the next forward need not wait for their updates. Of the very
        first, only the states may be away."""
        n, asked = len(self.shape.units), self.wishes.homes
        if isinstance(asked, dict):
            settled = {u.name for u in self.shape.units if asked.get(u.name) in SETTLED}
            return [tuple(Home[asked[u.name].upper()].value if u.name in settled else Home.RAM.value
                          for u in self.shape.units)]
        if asked:
            kind = "RAM" if asked in (*DISKS, "through") else asked.upper()
            return [(Home[kind].value,) * n]
        kinds = {u: self.shape.windows[w].kind for u, w in self.uses.first.items()}
        ends = [u for u in kinds if kinds[u] in ("embedding", "head")][:MOST_ENDS]
        middle = [u for u in kinds if u not in ends]
        found = []
        for first in range(len(middle) + 1):
            for taken in range(1 << len(ends)):
                settled = {*middle[:first], *(e for i, e in enumerate(ends) if taken >> i & 1)}
                found += self._with_guests([Home.VRAM.value if u in settled else Home.RAM.value
                                            for u in range(n)])
        return found

    def _with_guests(self, homes: list[Home]) -> Iterator[tuple[Home, ...]]:
        """These, and with the states of the first units arriving: of one, of both."""
        yield tuple(homes)
        for u in list(self.uses.first)[:GUESTS]:
            if homes[u] == Home.RAM and self.shape.units[u].trained:
                homes[u] = Home.ARRIVE.value
                yield tuple(homes)

    def rings(self) -> list[int]:
        """Slots of a size that may be chosen."""
        if self.wishes.slots:
            return [self.wishes.slots]
        n = len(self.shape.units)
        if any(u.fetched for u in self.shape.units) and self.wishes.nvme is None:     # else some may come whole
            return [r for r in RINGS if LEAST_OF_PIECES <= r < n] + [max(LEAST_OF_PIECES, n)]
        return [r for r in RINGS if r < n] + [max(2, n)]

    # ---- updates through the device ----

    def through(self, homes: tuple[Home, ...]) -> frozenset[int]:
        """Units at home in RAM whose updates are over sooner through the device than behind the
        others on the host. None where some are on disk: then the drive is what a step waits for; nor,
        unless they are asked for, with several GPUs, where nothing of it was measured."""
        units, asked = self.shape.units, self.wishes
        if isinstance(asked.homes, dict):
            return named(self.shape, asked, "through")
        away = [u for u in self.uses.first if not homes[u] and units[u].trained]
        if asked.homes == "through":
            return frozenset(away)
        if asked.homes or asked.grads == "none" or not self.through_rate \
                or not asked.fleet.alone or self.disk.units(homes, 1).states:
            return frozenset()
        # States that arrive take the same way, and come first.
        device_s = 2 * sum(self.visiting(homes).values()) / (self.machine.both_gbps * 1e9)
        host_s, found = 0.0, []
        rate = self.machine.adam_rate(states=asked.states)
        for u in away:
            there, here = device_s + self.through_s(u), host_s + units[u].trained / rate
            if there < here:
                device_s = there
                found.append(u)
            else:
                host_s = here
        return frozenset(found)

    def through_s(self, unit: int) -> float:
        """Of an update through the device."""
        return self.shape.units[unit].trained / self.through_rate

    # ---- what follows ----

    def lent(self, homes: tuple[Home, ...]) -> list[int]:
        """Bytes of the buffers that gradients pass through, where they are kept nowhere."""
        if self.disk.tally.keeps:
            return []
        crossing = self.exchange.home.tolist()
        return plan_slots([crossing[u] for u, home in enumerate(homes) if not home], self.disk.tally.most_lent)

    def slots(self, homes: tuple[Home, ...], ring: int) -> list[int]:
        """Bytes of each, of units that stream."""
        if any(u.fetched for u in self.shape.units):
            return plan_slots([n for u, home in enumerate(homes) if not home for n in self._fetched(homes, u)], ring)
        return self.disk.tally.slots(self.disk.where(homes, OnDisk()), ring)

    def walked(self, homes: tuple[Home, ...], ring: int) -> list[int]:
        """The same for the walk, which fetches units as a whole: where experts come a few at a time, what is fetched
        ahead is about a layer."""
        units = self.shape.units
        if not any(u.fetched for u in units):
            return self.slots(homes, ring)
        return plan_slots([u.crossing for u, home in zip(units, homes) if not home], 2)

    @functools.cached_property
    def spared(self) -> int:
        """Bytes that these slots spare a pass at the most, where experts come a few at a time."""
        units = self.shape.units
        return sum(plan_slots([u.crossing for u in units], 2)) if any(u.fetched for u in units) else 0

    def visiting(self, homes: tuple[Home, ...]) -> dict[int, int]:
        """Bytes of states that arrive, by unit."""
        if Home.ARRIVE.value not in homes:
            return {}
        units = self.shape.units
        cut = self.wishes.fleet.on_device
        return {u: sum(cut(visiting_planes(units[u])).values()) for u, home in enumerate(homes)
                if home == Home.ARRIVE and units[u].trained}

    def homes(self, homes: tuple[Home, ...], through: frozenset[int] = frozenset()) -> Homes:
        """through: units whose updates pass through the device."""
        m, units, uses = self.machine, self.shape.units, self.uses
        away = [u for u in uses.first if not homes[u]]
        needed = [u for u in away if u in uses.needed]
        weights, numbers = [units[u].weights for u in away], [units[u].trained for u in away]
        crossing = self.exchange.home.tolist()
        last = sum(crossing[u] for u in uses.leaving[0] if not homes[u])
        adding = m.add_gparams * 1e9 / self.wishes.fleet.added
        return Homes(
            homes, through, sum(weights), sum([units[u].weights for u in needed]),
            sum([crossing[u] for u in away]), sum(self.visiting(homes).values()),
            last / (m.both_gbps * 1e9), sum(numbers) / adding,
            max(numbers, default=0) / adding, self._ring_bytes([n for u in away for n in self._fetched(homes, u)]),
            max([uses.last[u] for u in away], default=0),
            min([uses.first[u] for u in needed], default=0))

    def _fetched(self, homes: tuple[Home, ...], u: int) -> tuple[int, ...]:
        """Bytes of what of a unit is fetched at once: where its weights are on disk, all of them."""
        unit = self.shape.units[u]
        filed = unit.fetched and any(u in self.disk.units(homes, micro).weights for micro in (1, 2))
        return (unit.weights,) if filed else unit.slots

    def _ring_bytes(self, weights: list[int]) -> list[tuple[int, int]]:
        """(ring, bytes of its slots) for units of these sizes."""
        key = frozenset(Counter(weights).items())
        if key not in self.ring_bytes:
            self.ring_bytes[key] = [(ring, sum(plan_slots(weights, ring))) for ring in self.rings()]
        return self.ring_bytes[key]
