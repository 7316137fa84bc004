"""mt.storage: what a streamed model has in which memory, now."""
from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .. import _core
from ..base.limits import host_limits, show_bytes
from ..figures.tiers import Tier, bars, write_tiers
from ..model.runtime import runtime_of
from ..plans.cost import PLANES_OF
from ..plans.planner import as_text
from ..store.disk import SPILLED


@dataclass(frozen=True)
class Storage:
    """Bytes that the engine holds for a model. In a notebook it shows itself.

    Attributes:
        model: its class.
        homes: how many units are at home where.
        tiers: (title, bytes by what they hold, bytes there are) of each kind of memory.
    """

    model: str
    homes: dict[str, int]
    tiers: list[Tier]

    def picture(self, path: str | Path) -> None:
        """Draws what lies in which memory; .png, .svg or .pdf.

        Raises:
            MegatrainError: matplotlib is not installed.
        """
        write_tiers(path, self._head(), self.tiers)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for title, parts, most in self.tiers:
            rows += [(title, "", ""), *((f"  {what}", show_bytes(n), "") for what, n in parts.items())]
            rows.append(("  in all", show_bytes(sum(parts.values())), f"of {show_bytes(most)}"))
        return f"{self._head()}\n{as_text(('', rows))}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._head())}</p>{bars(self.tiers)}"

    def _head(self) -> str:
        return f"{self.model}: units at home " + ", ".join(f"in {home} {n}" for home, n in self.homes.items())


def storage(model: nn.Module) -> Storage:
    """What the engine holds for a streamed model: weights, masters, moments and gradients, tier by tier.

    Planes are made when they are first needed: before a step of mt.AdamW there are weights alone.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    host = {what: sum(rt.core.host_bytes(_core.PLANES[p]) for p in planes) for what, planes in PLANES_OF.items()}
    host["activations"] = rt.core.swap_bytes()[0]
    device = {"slots": sum(s.nbytes for s in rt.ring.slots), "at home": rt.core.device_bytes()}
    there = torch.cuda.mem_get_info(rt.device)[1] if rt.is_cuda else host_limits().in_all
    title = "device memory" if rt.is_cuda else "host memory, as the device's"
    tiers: list[Tier] = [(title, _some(device), there), ("host memory", _some(host), host_limits().in_all)]
    files = {what: file for what, file in (("states", rt.core.disk_file()), (SPILLED, rt.core.swap_file())) if file}
    if files:
        parts = {what: file[1] for what, file in files.items()}
        path = str(Path(next(iter(files.values()))[0]).parent)
        tiers.append(("disk", _some(parts), sum(parts.values()) + _core.disk_room(path)))
    return Storage(type(rt.root()).__name__, dict(Counter(rt.room.asked.homes)), tiers)


def _some(parts: dict[str, int]) -> dict[str, int]:
    return {what: n for what, n in parts.items() if n}
