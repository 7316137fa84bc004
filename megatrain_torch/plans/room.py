"""Whether what a streamed model takes later is there: planes are made when they are first needed."""
from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from .. import _core
from ..base.limits import Bound, show_bytes, with_margin, without_margin
from ..group.ranks import Ranks, as_one
from ..store.disk import DISK_BUFFERS
from .host_memory import limits, shortage
from .preflight import check_limit
from .refusals import refusal, short
from .tally import PLANES_OF, SETTLED, Asked


class Room:
    """Whether what a streamed model takes later is there: planes are made when they are first needed.

    Attributes:
        ranks: the processes that have these planes together; None: this one is alone.
    """

    def __init__(self, asked: Asked, limit: int | None) -> None:
        self.asked, self.limit = asked, limit
        self.ranks: Ranks | None = None
        self.begun = False                       # room for gradients was asked for, at least
        self.summed = asked.micro > 1

    def let_go(self) -> None:
        """Knows parameters by their form from now on: what is asked later must not keep them alive."""
        forms = [(name, [(n, _Form(p)) for n, p in own]) for name, own in self.asked.groups]
        self.asked = dataclasses.replace(self.asked, groups=forms)

    def states(self, core: _core.Engine) -> None:
        """Of AdamW and the gradients, before they are made.

        Raises:
            MegatrainError: there is less; what was allocated is as before.
        """
        self._check(core, self.asked, "for gradients and AdamW's states")
        self.begun = True

    def gradients(self, core: _core.Engine) -> None:
        """Of gradients, where no mt.AdamW has asked; once. Raises: as `states`."""
        self._check(core, self.asked, "for gradients", "gradients")
        self.begun = True

    def sums(self, core: _core.Engine) -> None:
        """Of a second micro-batch; once. Raises: as `states`."""
        asked = dataclasses.replace(self.asked, micro=2)
        self._check(core, asked, "to add up micro-batches", "sums", "staging")
        self.asked, self.summed = asked, True

    def copies(self, core: _core.Engine) -> None:
        """States that live on the device are about to be copied to the host, maybe for one process alone. Raises: as
        `states`."""
        if any(home in SETTLED for home in self.asked.homes):
            asked = dataclasses.replace(self.asked, copied=True)
            self._check_here(core, asked, "for copies of states at home on the device", "weights", "masters", "moments")

    def weights(self, core: _core.Engine, unit: int) -> None:
        """Of a unit that lives on the device or on disk, before they are read on the host. Raises: as `states`."""
        need = core.reserved_bytes(unit, _core.PLANES["HI"])
        if not need:
            return
        if (bound := self._bound(core, need)) is not None:
            table = {"weights": need} | ({} if self.limit else {"margin": with_margin(need) - need})
            raise refusal(self.asked, f"host memory to read {self.asked.groups[unit][0]}", table, bound.free,
                           f"free: {bound.what}", {}, "mt.save, which brings units one by one",
                           "an optimizer step and a forward after what was read so far, which give its memory back",
                           f"{show_bytes(sum(table.values()) - bound.free)} more ({bound.remedy})")

    def may_save(self, core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> bool:
        """Is there room for mt.save with so many bytes of blocks that are not yet written? held: as `saving`."""
        return self.limit is not None or shortage(sum(_saved(core, held, blocks).values())) is None

    def saving(self, core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> None:
        """What mt.save takes while it runs. held: (unit, planes that are saved, a bit each). Raises: as `states`."""
        need = _saved(core, held, blocks)
        if self.limit is None and (bound := shortage(sum(need.values()))) is not None:
            margin = with_margin(sum(need.values())) - sum(need.values())
            over = sum(need.values()) + margin - bound.free
            raise refusal(self.asked, "host memory to save", need | {"margin": margin}, bound.free,
                           f"free: {bound.what}", {}, f"{show_bytes(over)} more ({bound.remedy})",
                           "a smaller spare=, if one was given", "smaller units")

    def _bound(self, core: _core.Engine, need: int) -> Bound | None:
        """What stands against so many bytes of copies of weights beside those that were read, and all planes."""
        if self.limit is None:
            return shortage(need)
        planes = self.asked.planes()
        free = self.limit - sum(planes.values()) + planes.get("weights", 0) - core.host_bytes(_core.PLANES["HI"])
        return Bound("host=", self.limit, max(free, 0), "a larger host=") if need > free else None

    def activations(self, core: _core.Engine, nbytes: int, bays: int = 1) -> None:
        """So many bytes of one window are about to wait in host memory; or to pass through so many bays of it.
        Raises: as `states`."""
        kept, used = core.swap_bytes()
        nbytes = bays * nbytes
        if self.limit is not None or used + nbytes <= kept:
            return
        nbytes = min(nbytes, used + nbytes - kept) if bays > 1 else nbytes
        if (bound := shortage(nbytes)) is not None:
            need = {"kept from one window": nbytes, "margin": with_margin(nbytes) - nbytes}
            raise refusal(self.asked, "host memory for activations", need, bound.free, f"free: {bound.what}", {},
                           "activations that stay on the device, or are run again", "fewer tokens a micro-batch",
                           f"{show_bytes(with_margin(nbytes) - bound.free)} more ({bound.remedy})")

    def spare(self, core: _core.Engine) -> int:
        """Bytes of host memory that no plane will take, now or later: free, or in bays for activations already."""
        if self.limit is not None:
            return self.limit - sum(self.asked.host().values())
        coming = sum(self._coming(core, self.asked, PLANES_OF).values())
        return without_margin(limits().tightest().free) - coming + core.swap_bytes()[0]

    def _check(self, core: _core.Engine, asked: Asked, what: str, *planes: str) -> None:
        """planes: those that come now; none named: all. Several processes ask together, before any makes its part."""
        with as_one(self.ranks):
            self._check_here(core, asked, what, *planes)

    def _check_here(self, core: _core.Engine, asked: Asked, what: str, *planes: str) -> None:
        if self.limit is not None:
            check_limit(asked, self.limit, None)
            return

        def need(a: Asked) -> dict[str, int]:
            return self._coming(core, a, planes or a.host())

        if (bound := shortage(sum(need(asked).values()))) is not None:
            raise short(asked, need, bound, what, None)

    def _coming(self, core: _core.Engine, asked: Asked, planes: Iterable[str]) -> dict[str, int]:
        """Bytes of these that are not there yet. Weights and slots are, and the buffers of a disk that there is;
        staging comes with the first sums."""
        there = {plane: sum(core.host_bytes(_core.PLANES[p]) for p in own) for plane, own in PLANES_OF.items()}
        there["activations"] = core.swap_bytes()[0]
        need = asked.host()
        made = {"weights": not asked.copied, DISK_BUFFERS: DISK_BUFFERS in self.asked.host(),
                "staging": there["sums"] > 0}
        there |= {what: n for what, n in need.items() if made.get(what) or what.endswith("slots")}
        return {what: max(n - there.get(what, 0), 0) for what, n in need.items() if what in planes}


class _Form:
    """A parameter as unit_bytes sees it, known weakly: whether it is trained may change."""

    def __init__(self, p: torch.Tensor) -> None:
        self.dtype, self._numel, self._floating, self._param = (
            p.dtype, p.numel(), p.is_floating_point(), weakref.ref(p))
        self.shape, self._stride, self.stands = p.shape, p.stride(), getattr(p, "stands", None)

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        return self._stride if dim is None else self._stride[dim]

    def numel(self) -> int:
        return self._numel

    def is_floating_point(self) -> bool:
        return self._floating

    @property
    def requires_grad(self) -> bool:
        param = self._param()
        with torch._C.DisableTorchFunctionSubclass():
            return param is not None and param.requires_grad


def _saved(core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> dict[str, int]:
    """Bytes of host memory beside the planes that are there: units at home elsewhere are brought one by one."""
    brought = [sum(core.reserved_bytes(unit, p) for p in _core.PLANES.values() if planes >> p & 1)
               for unit, planes in held]
    return {"copies of a unit": max(brought, default=0), "blocks to be written": blocks}
