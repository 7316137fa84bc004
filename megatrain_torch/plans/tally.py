"""Bytes of a model's units by plane, in both memories and on disk, by where each unit is at home.

The one place that adds them up: plans are made of these sums (search.py), refusals and reports tell them. What a plane
takes is in shapes.py's Unit, as the store lays it out.
"""
from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import _core
from ..base.modes import DISKS, HOMES
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
Homes = Sequence[str] | np.ndarray


_CODES = {home: code for code, home in enumerate(HOMES)}
_Side = dict[str, tuple[np.ndarray, np.ndarray]]        # by plane: bytes [homes, units], and which homes have it at all


class Tally:
    """Sums of bytes: of one machine's host memory and drive, and of one GPU's memory. fleet: the processes that have
    the units; of several, weights are in host memory whatever their homes, and of all other planes each has its part.
    keeps: gradients have planes; else they pass through `lent` buffers of a size, in either memory.

    Homes are given by unit, as base/modes.py has them; or of many choices at once, `coded`, [choices, units]. Then the
    sums are arrays [choices], and micro may be one too."""

    def __init__(self, units: Sequence[Unit], fleet: Fleet = ALONE, keeps: bool = True, lent: int = LENT) -> None:
        self.units, self.fleet, self.keeps, self.most_lent = units, fleet, keeps, lent
        every = {plane: np.array([getattr(u, plane) for u in units], dtype=np.int64) for plane in PLANES_OF}
        weights, states = {"weights": every["weights"]}, {what: every[what] for what in ("masters", "moments")}
        gradients = {what: every[what] for what in ("gradients", "sums")}
        shared = {} if fleet.alone else weights
        copies = {"weights": every["weights"] * (every["masters"] > 0)}         # a copy's master is weight and rest
        kept = {"ram": every, "through": every, "disk": weights | gradients, "disk+weights": gradients}
        self._host = _side(kept | {"arrive": states | shared, "vram": shared})
        self._copied = _side(kept | dict.fromkeys(SETTLED, states | copies | shared))
        self._device = _side({"vram": every, "arrive": weights | gradients})
        # By unit: of states that arrive for its update; (planes, at most between them) of a machine's drive, by home.
        # Planes begin at whole blocks of it, and each rank has a file.
        self.states = [sum(-(-n // fleet.count) for n in (u.masters, u.moments)) * bool(u.trained) for u in units]
        drive, self.files = {}, {}
        for home in DISKS:
            filed = ({"weights": every["gradients"], FROZEN: every["weights"] - every["gradients"]}
                     if home == "disk+weights" else {}) | states
            whole = np.sum([*filed.values()], 0)
            blocks = np.array([u.count for u in units]) + whole // BUFFER_BYTES + 1
            padding = blocks * PADDING_BYTES * (whole > 0) * fleet.gpus
            filed = {what: -(-n // fleet.machines) for what, n in filed.items()}
            drive[home] = filed | {PADDING: padding}
            self.files[home] = [*zip(np.sum([*filed.values()], 0).tolist(), padding.tolist())]
        self._drive = _side(drive)

    def host(self, homes: Homes, micro: Any, copied: bool = False) -> dict[str, Any]:
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
            total[DISK_BUFFERS] = buffer_bytes(filed, weights) * self.fleet.gpus
        if several.any():                               # of several ranks each one's part of a sum, in fp32
            largest = (self._host["gradients"][0][_CODES["ram"]] * ~settled(codes)).max(-1, initial=0)
            staging = STAGINGS * largest if self.fleet.alone else -(-2 * STAGINGS * largest // machines)
            total["staging"] = staging * several
        return _plain(total)

    def disk(self, homes: Homes) -> dict[str, Any]:
        """On disk, by plane, and between them."""
        return _plain(_sum(self._drive, coded(homes)))

    def device(self, homes: Sequence[str], ring: int, micro: int) -> dict[str, int]:
        """On the device, activations left out; around updates there are `visiting` besides."""
        return {"slots": sum(self.slots(homes, ring)),
                **{f"at home: {plane}": n for plane, n in self.at_home(homes, micro).items()},
                "updates through the device": THROUGH_BYTES * ("through" in homes)}

    def at_home(self, homes: Homes, micro: Any) -> dict[str, Any]:
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
        if codes.ndim > 1:
            return np.array([self._lent(row, on_device) for row in codes])
        own = [u.gradients for u, there in zip(self.units, settled(codes)) if there == on_device]
        return sum(_core.plan_slots(own, self.most_lent))


def coded(homes: Homes) -> np.ndarray:
    """Homes by their numbers in HOMES, which are C's."""
    return homes if isinstance(homes, np.ndarray) else np.array([_CODES[home] for home in homes], dtype=np.uint8)


def settled(codes: np.ndarray) -> np.ndarray:
    """Units whose weights stay on the device."""
    return np.isin(codes, [_CODES[home] for home in SETTLED])


def _side(by_home: dict[str, dict[str, np.ndarray]]) -> _Side:
    """A kind of memory. by_home: bytes [units] by plane."""
    planes = {what: n for some in by_home.values() for what, n in some.items()}
    return {what: (np.stack([by_home.get(home, {}).get(what, np.zeros_like(n)) for home in HOMES]),
                   np.array([what in by_home.get(home, {}) for home in HOMES])) for what, n in planes.items()}


def _sum(side: _Side, codes: np.ndarray) -> dict[str, np.ndarray]:
    """By plane, those that some unit has there."""
    units = np.arange(codes.shape[-1])
    return {what: table[codes, units].sum(-1) for what, (table, has) in side.items() if has[codes].any()}


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
