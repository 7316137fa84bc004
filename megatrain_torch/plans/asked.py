"""What mt.stream was asked for, as far as memory depends on it, and the bytes of that."""
from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.modes import DISKS
from ..base.units import ALIGN, Group
from ..store.disk import DISK_BUFFERS, buffer_bytes
from .cost import LENT, THROUGH_BYTES
from .fleet import ALONE, Fleet
from .shapes import Unit, unit_bytes
from .tally import SETTLED, Tally

PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Asked:
    """What mt.stream was asked for, as far as memory depends on it.

    Attributes:
        name: of the model. groups, dtype: its units, and the type they are converted to.
        homes: by unit, "ram", "vram", "arrive", "through", "disk" or "disk+weights".
        ring: slots of a size. micro: micro-batches of a step, as far as known.
        on_cpu: the "device" is the CPU, so its memory is the host's.
        besides: what a plan puts in host memory beside planes, by what it is.
        keeps: gradients are kept where their units are at home; else they pass through a few buffers there.
        states: how AdamW's are kept.
        lent: such buffers of a size.
        copied: those that live on the device, and masters there, have copies in host memory, for a state_dict.
        experts: of a mixture's layer, fetched at a time; 0: all of them.
        fleet: the processes that have the units together. In their memory each parameter begins at a page.
        known: units by what their bytes depend on; the same dict in all that is made from this by `replace`.
    """

    name: str
    groups: list[Group]
    dtype: torch.dtype | None
    homes: tuple[str, ...]
    ring: int = 3
    micro: int = 1
    on_cpu: bool = False
    besides: tuple[tuple[str, int], ...] = ()
    keeps: bool = True
    states: str = "fp32"
    lent: int = LENT
    copied: bool = False
    fleet: Fleet = ALONE
    experts: int = 0
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def units(self) -> list[Unit]:
        """As the parameters are now: some may have been frozen since."""
        key, align = self._key(), ALIGN if self.fleet.alone else PAGE
        if key not in self.known:
            self.known[key] = [unit_bytes(name, own, self.dtype, self.states, align, self.experts)
                               for name, own in self.groups]
        return self.known[key]

    def _key(self) -> tuple[Any, ...]:
        return self.dtype, self.states, self.experts, *(p.requires_grad for _, own in self.groups for _, p in own)

    def on_disk(self) -> bool:
        """Some unit's states are."""
        return any(home in DISKS for home in self.homes)

    def tally(self) -> Tally:
        key = "tally", self.keeps, self.lent, *self._key()
        if key not in self.known:
            self.known[key] = Tally(self.units(), self.keeps, self.lent, not self.fleet.alone)
        return self.known[key]

    def slots(self) -> list[int]:
        """Bytes of each slot; those of units at home on the device come last."""
        settled = [u.weights for u, home in zip(self.units(), self.homes) if home in SETTLED]
        return self.tally().slots(self.homes, self.ring) + settled

    def device(self) -> dict[str, int]:
        """Bytes of device memory by what they hold, activations left out."""
        found = {"slots": sum(self.slots())}
        at_home = self.fleet.on_device(self.tally().at_home(self.homes, self.micro))
        found |= {f"at home: {plane}": n for plane, n in at_home.items() if plane != "weights"}
        if "through" in self.homes:
            found["updates through the device"] = THROUGH_BYTES
        visiting = -(-self.tally().visiting(self.homes) // self.fleet.count)
        return found | ({"states that arrive": visiting} if "arrive" in self.homes else {})

    def at_home(self) -> int:
        """Bytes of device memory that the store takes for units at home there, beside their slots."""
        return sum(n for what, n in self.device().items() if what.startswith("at home"))

    def host(self) -> dict[str, int]:
        """Bytes of host memory by plane, AdamW's states counted in; on the CPU device its memory too."""
        found = self.tally().host(self.homes, self.micro, self.copied)
        found |= {what: n for what, n in self.besides if what not in found}
        if DISK_BUFFERS in found:
            found[DISK_BUFFERS] = buffer_bytes(self.homes) * self.fleet.gpus
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
