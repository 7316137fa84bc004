"""What mt.plan is asked for a model that streams: within what the user allows, and what others leave."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._core import PLANES
from ..base.errors import MegatrainError
from ..fused.layer import wanted
from ..plans.machine import Machine, resolve
from ..plans.planner import Plan, plan
from ..plans.tally import PLANES_OF
from ..store.disk import Disk
from ..store.state import paused
from .passes import Pass

if TYPE_CHECKING:
    from .runtime import Runtime

UNCOUNTED = 256 << 20            # bytes of the user's own on the device that plans leave out: a batch, a metric


@dataclass(frozen=True)
class Limits:
    """What the user said beside the model: limits in bytes, and names for mt.plan; and how many processes there are.

    Attributes:
        gpus, machines: as for mt.plan.
    """

    vram: int | None
    host: int | None
    disk: Disk | None
    units: list[str | nn.Module] | None
    gpus: int = 1
    machines: int = 1


class Refused(MegatrainError):
    """mt.plan refused; nothing was changed."""


class Unreadable(Refused):
    """The model is one that plans cannot read."""


class Asking:
    """Asks mt.plan for one streamed model.

    Attributes:
        caches: a forward fills a key-value cache, where the model's configuration does not say otherwise.
    """

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        self.runtime, self.limits = runtime, limits
        self._here: Machine | None = None
        self.caches = True

    def plan(self, batch: Pass, micro: int, homes: str | dict[str, str] | None, slots: int | None = None,
             experts: int | None = None, delivery: str | None = None) -> Plan:
        """A plan for steps of `micro` passes like this. homes and what follows: as mt.plan takes them. That reads
        modules and may run a router's copy: as outside of the forward that asks, and of its autocast. Raises Refused:
        nothing fits."""
        rt = self.runtime
        fused = wanted(rt.compute, rt.is_cuda, [r.dtype for r in rt.records])
        try:
            with paused(), torch._C._DisableAutocast():
                return plan(rt.root(), tokens=batch.tokens * micro, seq=batch.seq, micro=micro, machine=self._machine(),
                            homes=homes, slots=slots, experts=experts, delivery=delivery, states=rt.states.format,
                            compute="fused" if fused else "eager", products=rt.products,
                            vram=self._left(), host=self.limits.host, use_cache=self.caches,
                            units=self.limits.units, nvme=self._drive(),
                            gpus=self.limits.gpus, machines=self.limits.machines)
        except MegatrainError as error:
            raise Refused(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise Unreadable(f"mt.plan cannot read the model ({type(error).__name__}: {error})") from error

    def limit(self) -> int:
        """Bytes of the device that this process may have."""
        most = self._resolved().vram_bytes
        return min(self.limits.vram or most, most)

    def _drive(self) -> dict[str, Any] | None:
        """The user's directory. None: there is none, or states are in memory already, and cannot go to a file."""
        rt, disk = self.runtime, self.limits.disk
        planes = (*PLANES_OF["masters"], *PLANES_OF["moments"])
        made = not rt.homes.on_disk and any(rt.core.host_bytes(PLANES[p]) for p in planes)
        return None if disk is None or made else disk.as_given()

    def _machine(self) -> str | None:
        return None if self.runtime.is_cuda else "cpu"

    def _resolved(self) -> Machine:
        """The machine, looked at once: what the device has stays."""
        if self._here is None:
            self._here = resolve(self._machine())
        return self._here

    def _left(self) -> int:
        """Bytes of `limit()` that are left: other models and tensors of the user's have theirs of it, and other
        processes theirs of the device."""
        rt, limit = self.runtime, self.limit()
        if not rt.is_cuda:
            return limit
        _, others, stores = rt.cap.taken()
        used = torch.cuda.memory_allocated(rt.device) - sum(s.nbytes + 512 for s in rt.ring.slots)
        left = min(limit, self._resolved().vram_bytes - others)
        return left - (stores - rt.core.device_bytes()) - (used if used > UNCOUNTED else 0)
