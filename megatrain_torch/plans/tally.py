"""Bytes of a model's units by plane, in both memories and on disk, by where each unit is at home.

The one place that adds them up: plans are made of these sums (search.py), refusals and reports tell them. What a plane
takes is in shapes.py's Unit, as the store lays it out.
"""
from __future__ import annotations

import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _core
from ..base.modes import DISKS
from ..base.units import ALIGN, Group
from ..store.disk import BUFFER_BYTES, DISK_BUFFERS, FROZEN, PADDING, PADDING_BYTES, buffer_bytes
from .cost import STAGINGS
from .fleet import ALONE, Fleet
from .shapes import Unit, unit_bytes

THROUGH_BYTES = 3 * 64 << 20    # on the device, of updates that pass through it: engine_store.c
LENT = _core.LENT           # buffers of a size for gradients that are kept nowhere
# Labels of host memory, and the engine's planes whose memory they are.
PLANES_OF = {"weights": ("HI",), "masters": ("LO", "MASTER"), "moments": ("M", "V", "SCALE"), "gradients": ("GRAD",),
             "sums": ("ACC",)}
SETTLED = ("vram", "arrive")  # homes of units whose weights and gradients stay on the device
PAGE = os.sysconf("SC_PAGESIZE")


class Tally:
    """Sums of bytes: of one machine's host memory and drive, and of one GPU's memory. Homes are given by unit, as
    base/modes.py has them. fleet: the processes that have the units; of several, weights are in host memory whatever
    their homes, and sums of gradients are on the devices from the first micro-batch on. keeps: gradients have planes;
    else they pass through `lent` buffers of a size, in either memory."""

    def __init__(self, units: Sequence[Unit], fleet: Fleet = ALONE, keeps: bool = True, lent: int = LENT) -> None:
        self.units, self.fleet, self.keeps, self.most_lent = units, fleet, keeps, lent
        known: dict[Unit, int] = {}             # of units with the same bytes the first: sums are over few kinds
        self.alike = [known.setdefault(dataclasses.replace(unit, name=""), u) for u, unit in enumerate(units)]
        self._known: dict[tuple[int, str, bool, bool], tuple[dict[str, int], dict[str, int]]] = {}
        # By unit: of states that arrive for its update; (planes, at most between them) of a machine's drive, by home.
        self.states = [sum(fleet.on_device(u.visiting).values()) * bool(u.trained) for u in units]
        self.files = {home: [self._file(unit, home == "disk+weights") for unit in units] for home in DISKS}

    def host(self, homes: Sequence[str], micro: int, copied: bool = False) -> dict[str, int]:
        """In host memory, by plane and beside planes. copied: with copies of what lives elsewhere: a machine that
        reads all states has them whole."""
        total = self._sum(homes, micro > 1, copied, 0)
        if not self.keeps:
            total["gradients"] = sum(self.lent(homes))
        if not set(DISKS).isdisjoint(homes):
            total[DISK_BUFFERS] = buffer_bytes(homes)
        if micro > 1:
            total["staging"] = STAGINGS * max(
                [self.units[u].gradients for u, home in set(zip(self.alike, homes)) if home not in SETTLED], default=0)
        return self.fleet.on_host(total) | {what: total[what] for what in ("masters", "moments")
                                            if copied and what in total}

    def _file(self, unit: Unit, weights: bool) -> tuple[int, int]:
        """Planes begin at whole blocks of it."""
        planes = unit.masters + unit.moments + unit.weights * weights
        return self.fleet.on_drive(planes, (unit.count + planes // BUFFER_BYTES + 1) * PADDING_BYTES * bool(planes))

    def disk(self, homes: Sequence[str]) -> dict[str, int]:
        """On disk, by plane, and between them."""
        total: dict[str, int] = {}
        for (u, home), count in Counter((self.alike[u], home) for u, home in enumerate(homes) if home in DISKS).items():
            unit, planes = self.units[u], {}
            if home == "disk+weights":
                planes = {"weights": unit.gradients, FROZEN: unit.weights - unit.gradients}
            planes = {what: self.fleet.on_drive(n, 0)[0] for what, n in (planes | unit.visiting).items()}
            for what, n in (planes | {PADDING: self.files[home][u][1]}).items():
                total[what] = total.get(what, 0) + n * count
        return total

    def device(self, homes: Sequence[str], ring: int, micro: int) -> dict[str, int]:
        """On the device, activations left out; around updates there are `visiting` besides."""
        return {"slots": sum(self.slots(homes, ring)),
                **{f"at home: {plane}": n for plane, n in self.at_home(homes, micro).items()},
                "updates through the device": THROUGH_BYTES * ("through" in homes)}

    def at_home(self, homes: Sequence[str], micro: int) -> dict[str, int]:
        """On the device by plane, of units that live there, all the time; weights too, which are in their slots."""
        total = self._sum(homes, micro > 1, False, 1)
        if not self.keeps and total:
            total["gradients"] = sum(self.lent(homes, settled=True))
        return self.fleet.on_device(total)

    def visiting(self, homes: Sequence[str]) -> int:
        """On the device around updates: states that arrive."""
        return sum(n for n, home in zip(self.states, homes) if home == "arrive")

    def slots(self, homes: Sequence[str], ring: int) -> list[int]:
        """Of those that stream."""
        return _core.plan_slots([n for u, home in zip(self.units, homes) if home not in SETTLED
                           for n in (u.slots if home != "disk+weights" else (u.weights,))], ring)

    def lent(self, homes: Sequence[str], settled: bool = False) -> list[int]:
        """Buffers in host memory that gradients pass through, where they are kept nowhere. settled: on the device."""
        own = [u.gradients for u, home in zip(self.units, homes) if (home in SETTLED) == settled]
        return [] if self.keeps else _core.plan_slots(own, self.most_lent)

    def _sum(self, homes: Sequence[str], several: bool, copied: bool, side: int) -> dict[str, int]:
        """By plane, of units with the same bytes at the same home at once. side: 0, host memory, or 1, the device."""
        total: dict[str, int] = {}
        for (u, home), count in Counter(zip(self.alike, homes)).items():
            key = u, home, several, copied
            if key not in self._known:
                self._known[key] = self._planes(*key)
            for plane, n in self._known[key][side].items():
                total[plane] = total.get(plane, 0) + n * count
        return total

    def _planes(self, u: int, home: str, several: bool, copied: bool) -> tuple[dict[str, int], dict[str, int]]:
        """Of a unit, in host memory and on the device. A copy's master is weight and rest."""
        unit = self.units[u]
        states, weights = unit.visiting, {"weights": unit.weights}
        grads = {"gradients": unit.gradients, "sums": unit.sums * several}
        if home not in SETTLED:
            here = {} if home == "disk+weights" else weights
            return (here | grads if home in DISKS else here | states | grads), {}
        host = (states | (weights if unit.masters else {})) if copied else states if home == "arrive" else {}
        device = weights | (states if home == "vram" else {}) | (grads if self.keeps else {"sums": grads["sums"]})
        return host | ({} if self.fleet.alone else weights), device


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
    # Units by what their bytes depend on; the same dict in all that is made from this by `replace`.
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def units(self) -> list[Unit]:
        """As the parameters are now: some may have been frozen since."""
        key, align = self._key(), ALIGN if self.fleet.alone else PAGE
        if key not in self.known:
            self.known[key] = [unit_bytes(name, own, self.dtype, self.states, align, self.experts)
                               for name, own in self.groups]
        return self.known[key]

    def _key(self) -> tuple[Any, ...]:
        # A form (room.py) stands for a parameter that may have been frozen since, or thawed.
        for p in (p for _, own in self.groups for _, p in own if isinstance(getattr(p, "live", None), weakref.ref)):
            with torch._C.DisableTorchFunctionSubclass():
                p.requires_grad_((live := p.live()) is not None and live.requires_grad)
        return self.dtype, self.states, self.experts, *(p.requires_grad for _, own in self.groups for _, p in own)

    def on_disk(self) -> bool:
        """Some unit's states are."""
        return any(home in DISKS for home in self.homes)

    def tally(self) -> Tally:
        key = "tally", self.keeps, self.lent, *self._key()
        if key not in self.known:
            self.known[key] = Tally(self.units(), self.fleet, self.keeps, self.lent)
        return self.known[key]

    def slots(self) -> list[int]:
        """Bytes of each slot; those of units at home on the device come last."""
        settled = [u.weights for u, home in zip(self.units(), self.homes) if home in SETTLED]
        return self.tally().slots(self.homes, self.ring) + settled

    def device(self) -> dict[str, int]:
        """Bytes of device memory by what they hold, activations left out; all weights are in slots."""
        found = self.tally().device(self.homes, self.ring, self.micro)
        slots = found.pop("slots") + found.pop("at home: weights", 0)
        return {"slots": slots} | {what: n for what, n in found.items() if n or what.startswith("at home")} | (
            {"states that arrive": self.tally().visiting(self.homes)} if "arrive" in self.homes else {})

    def at_home(self) -> int:
        """Bytes of device memory that the store takes for units at home there, beside their slots."""
        return sum(n for what, n in self.device().items() if what.startswith("at home"))

    def host(self) -> dict[str, int]:
        """Bytes of host memory by plane, AdamW's states counted in; on the CPU device its memory too."""
        found = self.tally().host(self.homes, self.micro, self.copied)
        found |= {what: n for what, n in self.besides if what not in found}
        return found | ({f"the device's {what}": n for what, n in self.device().items()} if self.on_cpu else {})

    def planes(self) -> dict[str, int]:
        """Bytes of host memory by plane, the device's left out."""
        return dataclasses.replace(self, on_cpu=False).host()

    def moved(self, before: str, after: str) -> Iterator[Asked]:
        """The same with the last one, two, ... of the units at home in `before` at home in `after`."""
        homes = list(self.homes)
        for i in reversed([i for i, home in enumerate(homes) if home == before]):
            homes[i] = after
            yield dataclasses.replace(self, homes=tuple(homes))

    def named(self) -> dict[str, str]:
        """Homes by name, as a plan has them; units left out are in host memory."""
        return {name: home for (name, _), home in zip(self.groups, self.homes) if home != "ram"}
