"""The store of one model: its units are declared and placed, its weights put in, and given back in the end."""
from __future__ import annotations

import itertools
import mmap
import os
import warnings
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ..base.codes import plain_kind
from ..base.limits import show_bytes
from ..base.units import Group, stored_dtype
from ..group.ranks import Ranks, as_one, shared
from ..plans.room import TRIM_BYTES, give_back, own_bytes
from ..plans.tally import SETTLED, Asked
from ..store import gradient
from ..store.guard import StreamedParameter, streamed_kind
from ..store.records import DTYPES, Record
from ..store.tensorfiles import Mapped
from ..store.whole import wholes_of
from .choices import Choices
from .homes import units_at

if TYPE_CHECKING:
    from .runtime import Runtime

Place = tuple[str, int]                      # a file, and where in it a parameter's bytes begin
_ALIGN = 64
_MANY_BYTES = 1 << 30                        # of copies of one model in several processes: is told
_numbers = itertools.count()                 # of parameters, in the process


def declare(rt: Runtime, asked: Asked, choices: Choices) -> None:
    """Units, their slots and homes; nothing is in their planes yet."""
    core, options, disk, doors = rt.core, choices.options, choices.disk, choices.doors
    for name, params in asked.groups:
        kinds = [stored_dtype(p, asked.dtype) for _, p in params]
        unit = core.add_unit(name, [DTYPES[kind] for kind in kinds], [p.numel() for _, p in params],
                             [p.requires_grad for _, p in params])
        records = [Record(rt, unit, name, i, next(_numbers), full, p, kind)
                   for i, ((full, p), kind) in enumerate(zip(params, kinds))]
        rt.units.append(records)
        rt.unit_names.append(name)
        rt.wholes.append(wholes_of(records))
    rt.cap.hold(choices.cap, asked.at_home())
    rt.homes.open_slots(asked, units_at(asked, *SETTLED), {})
    # A file with weights is laid out at once, for states as they will be kept.
    if "states" in options or "disk+weights" in asked.homes:
        rt.choose_states(options.get("states", "fp32"))
    if disk is not None and asked.on_disk():
        rt.homes.keep_on_disk(disk, asked, doors.disk)
    for unit in units_at(asked, "through"):
        core.through(unit, True)
    if disk is not None and choices.spills:
        rt.homes.spill_to(disk, choices.spilled, asked, doors.spill)
    if not asked.keeps:
        core.lend_most(asked.lent)
        for unit in range(len(rt.units)):
            core.pass_gradients(unit)
    core.debug(doors.skip, doors.poison, doors.sync)                 # of all that is there by now


# ---- weights are put in ----

def fill(rt: Runtime, groups: list[Group], origins: Origins | None, masters: bool) -> None:
    """Weights in their planes; each old tensor is freed as its values are in. What is at home on the device or on disk
    goes there at once: host memory has one such unit at a time. origins: of a model that several processes stream."""
    reached = set() if rt.ranks is None else rt.homes.reach(rt.ranks)
    given, files, filed = 0, Mapped(), set(units_at(rt.room.asked, "disk+weights"))
    # Of several on one machine, units whose weights leave host memory (mirror.c), or some; the others' stay there.
    early = {unit for unit, (_, own) in enumerate(groups) if unit in rt.homes.settled and (rt.ranks is None or (
        not rt.ranks.apart and (unit in reached or any(not p.requires_grad for _, p in own))))}
    by_unit = rt.ranks if filed or early else None       # what one rank has filled all put where it is at home
    with as_one(rt.ranks):
        for unit, own in enumerate(own_bytes(groups)):
            with as_one(by_unit):
                _take_over(rt, unit, files, origins, masters)
            if unit in early:
                rt.homes.take(unit)
            if unit in filed:
                with as_one(by_unit):
                    rt.homes.file_weights(unit)
                rt.homes.take(unit)
            given += own
            if given >= TRIM_BYTES:          # malloc would keep it, and we would hold weights twice
                give_back()
                given = 0
    if rt.ranks is not None:             # weights are there, whoever put them in
        if rt.ranks.apart:
            origins.everywhere(rt.units)
        with as_one(rt.ranks):
            for unit in sorted(rt.homes.settled.keys() - early):
                rt.homes.take(unit)


def _take_over(rt: Runtime, unit: int, files: Mapped, origins: Origins | None, masters: bool) -> None:
    records = rt.units[unit]
    if origins is None or origins.fills:
        with torch.no_grad():
            for hi, value in files.fill([(r.over(r.memory("HI", True), "HI"), r.param.detach()) for r in records]):
                hi.copy_(value)
    # Parameters whose fp32 values are more than the store keeps of them.
    if rounded := [r for r in records if masters and (p := r.param).dtype == torch.float32 and p.requires_grad
                   and r.dtype in (torch.bfloat16, torch.float16)]:
        exact = [r.param.detach() for r in rounded] if origins is None else origins.exact(rounded)
        for r, value in zip(rounded, exact):
            r.exact = value
    for r in records:                        # each parameter becomes a view of plane HI, which has its values
        p, hi = r.param, r.view("HI")
        with torch.no_grad():
            grad = None if p.grad is None else p.grad.to("cpu", r.dtype)
            p.grad = None
            p.data = hi
        r.host = p.detach()
        rt.records.append(r)                 # from here on it is given back when something fails
        r.address, r.offset, r.version = hi.data_ptr(), rt.core.offset(r.unit, r.index), r.host._version
        p.grad = grad
        p.__class__ = streamed_kind(type(p))
        p._mt, p._mt_runtime = r, rt
    for whole in rt.wholes[unit]:
        whole.adopted()


# ---- and given back ----

def empty(rt: Runtime, together: bool = True) -> None:
    """Parameters get memory of their own again, with their weights; what has no values yet stays as it is. together:
    all processes do so, and give memory of weights that are in files back unit by unit."""
    for unit, group in itertools.groupby(rt.records, lambda r: r.unit):
        records = list(group)
        if rt.homes.away(unit):          # it comes home, through host memory that is one unit's at a time
            rt.core.wait_updates(unit)
            if any(gradient.standing(r) is not None for r in records if r.param is not None):
                rt.core.wait_grads(unit)
        for r in records:
            if r.param is not None:      # else nobody has it any more
                _restore(r)
        for whole in rt.wholes[unit]:
            whole.given_back()
        if rt.homes.away(unit) and (together or rt.ranks is None):
            rt.homes.take(unit)


def _restore(r: Record) -> None:
    p, value = r.param, r.host.clone()
    gradient.release(r)
    with torch._C.DisableTorchFunctionSubclass():
        grad, p.grad = p.grad, None
    p.__dict__.pop("_mt", None)
    p.__dict__.pop("_mt_runtime", None)
    p.__class__ = nn.Parameter if type(p) is StreamedParameter else plain_kind(p)
    p.data, p.grad = value, grad


class Origins:
    """Where several processes have the values of a model from that is about to be streamed: the machine's first, which
    fills all units.

    The others need no values: they may have left their parameters on the meta device, on which nothing of the model is
    left when this is made. All ranks make it, when nothing is refused any more.
    """

    def __init__(self, ranks: Ranks, module: nn.Module, groups: list[Group]) -> None:
        self._ranks, self.fills = ranks, ranks.rank == ranks.mates[0]
        params, files = [p for _, own in groups for _, p in own], Mapped()
        places = [files.source(p.detach()) for p in params] if self.fills else []
        every = ranks.gather((places, any(p.is_meta for p in params), sum(own_bytes(groups))))
        self._at: dict[int, Place | None] = dict(zip(map(id, params), every[ranks.mates[0]][0]))
        made = [every[rank][2] for rank in ranks.mates if not every[rank][1]]        # bytes, by who has values
        if self.fills and len(made) > 1 and sum(made) - max(made) >= _MANY_BYTES:
            warnings.warn(f"{len(made)} processes of this machine made the model, each in {show_bytes(max(made))} of "
                          "its own memory, which it has given back now: mt.from_pretrained makes it once, or leave it "
                          "on the meta device (with torch.device('meta'): ...) where LOCAL_RANK is not 0",
                          RuntimeWarning, stacklevel=2)
        _give_memory(module, params)

    def exact(self, records: list[Record]) -> list[Tensor]:
        """Values of a unit's parameters, in each process; all call it, for the same. Those of files stay there."""
        places = [self._at[id(r.param)] for r in records]
        if self.fills or None in places:
            own = [r.param.detach() for r in records]
            return _in_common(self._ranks, own) if None in places else own
        found = [torch.from_numpy(np.memmap(path, mode="c", offset=at, shape=(r.param.nbytes,)))
                 for r, (path, at) in zip(records, places)]
        return [t.view(r.param.dtype).view(r.param.shape) for r, t in zip(records, found)]

    def everywhere(self, units: list[list[Record]]) -> None:
        """Weights are those of the first process of all, on each machine, when this is called by all and they are in
        their planes: what another machine had otherwise is replaced."""
        found = self._ranks.gather([_sum(records) for records in units] if self.fills else None)
        for records, sums in zip(units, zip(*(own for own in found if own is not None))):
            if len(set(sums)) == 1:
                continue
            for r in records:
                self._ranks.control.give(r.over(r.memory("HI", True), "HI"))
            if exact := [r for r in records if r.exact is not None]:
                values = [r.exact.clone(memory_format=torch.contiguous_format) for r in exact]
                for value in values:
                    self._ranks.control.give(value)
                for r, value in zip(exact, _in_common(self._ranks, values)):
                    r.exact = value


def _sum(records: list[Record]) -> int:
    """Of a unit's weights in the store, and of what they were rounded from."""
    crc = 0
    for r in records:
        for t in [r.over(r.memory("HI", True), "HI")] + ([] if r.exact is None else [r.exact]):
            crc = zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy(), crc) if t.numel() else crc
    return crc


def _give_memory(module: nn.Module, params: list[nn.Parameter]) -> None:
    """Parameters on the meta device stay the same objects. No page of their memory is touched, so it takes none."""
    for p in params:
        if p.is_meta:
            kind, kept = type(p), dict(p.__dict__)
            torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad))
            if type(p) is not kind:              # codes, or a strand of theirs
                p.__class__ = kind
            p.__dict__.update(kept)
    for m in module.modules():
        for name, b in m._buffers.items():
            if isinstance(b, Tensor) and b.is_meta:
                m._buffers[name] = torch.empty_like(b, device="cpu")


def _in_common(ranks: Ranks, own: list[Tensor]) -> list[Tensor]:
    """The first one's values, in memory that all processes of the machine have once."""
    ends = list(itertools.accumulate(-(-t.nbytes // _ALIGN) * _ALIGN for t in own))
    first, fd = ranks.rank == ranks.mates[0], -1
    with as_one(ranks):
        if first:
            fd = os.memfd_create("megatrain values")
            os.ftruncate(fd, ends[-1])
            for found, t in zip(_over(fd, own, ends), own):
                found.copy_(t)
    fd = shared(ranks, fd)
    try:
        return _over(fd, own, ends)
    finally:
        os.close(fd)


def _over(fd: int, like: list[Tensor], ends: list[int]) -> list[Tensor]:
    memory = mmap.mmap(fd, ends[-1])
    return [torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=at).view(t.shape)
            for t, at in zip(like, [0, *ends])]
