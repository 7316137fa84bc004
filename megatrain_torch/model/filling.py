"""The store of one model: its units are declared and placed, its weights put in, and given back in the end."""
from __future__ import annotations

import itertools
import mmap
import os
import warnings
import zlib
from typing import TYPE_CHECKING

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
        records = [Record(rt, unit, name, i, next(_numbers), full, p) for i, (full, p) in enumerate(params)]
        for r, kind in zip(records, kinds):
            r.dtype, r.nbytes = kind, r.numel * kind.itemsize
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
        rt.homes.passing = frozenset(range(len(rt.units)))
        for unit in rt.homes.passing:
            core.pass_gradients(unit)
    core.debug(doors.skip, doors.poison, doors.sync)                 # of all that is there by now


# ---- weights are put in ----

def fill(rt: Runtime, groups: list[Group], origins: Origins | None, masters: bool) -> None:
    """Weights in their planes; each old tensor is freed as its values are in. What is at home on the device or on disk
    goes there at once: host memory has one such unit at a time. origins: of a model that several processes stream."""
    given, files, filed = 0, Mapped(), set(units_at(rt.room.asked, "disk+weights"))
    # Of several on one machine, units with frozen weights, which leave host memory; the others' stay there anyway.
    early = {unit for unit, (_, own) in enumerate(groups) if unit in rt.homes.settled and (
        rt.ranks is None or (not rt.ranks.apart and any(not p.requires_grad for _, p in own)))}
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
    if origins is None or origins.fills(unit):
        values = [r.param.detach() if origins is None else origins.of(r) for r in records]
        with torch.no_grad():
            for hi, value in files.fill([(r.over(r.memory("HI", True), "HI"), v) for r, v in zip(records, values)]):
                hi.copy_(value)
    # Parameters whose fp32 values are more than the store keeps of them.
    rounded = [r for r in records if masters and (p := r.param).dtype == torch.float32 and p.requires_grad
               and r.dtype in (torch.bfloat16, torch.float16)]
    if rounded:
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
    """Where several processes have the values of a model from that is about to be streamed: the machine's first.

    Where its parameters are a file's bytes, all processes of the machine fill units in turn, each from that file. What
    it has in memory it fills alone. The others need no values: they may have left their parameters on the meta device,
    on which nothing of the model is left when this is made. All ranks make it, when nothing is refused any more.
    """

    def __init__(self, ranks: Ranks, module: nn.Module, groups: list[Group]) -> None:
        self._ranks, self._first = ranks, ranks.mates[0]
        params, files = [p for _, own in groups for _, p in own], Mapped()
        own = [None if p.is_meta else files.source(p.detach()) for p in params]
        every = ranks.gather((own, [p.is_meta for p in params], sum(own_bytes(groups))))
        self._at: dict[int, Place | None] = dict(zip(map(id, params), every[self._first][0]))
        self._mine = {id(p) for p, place in zip(params, own) if place is not None and place == self._at[id(p)]}
        away = {place[0] for key, place in self._at.items() if place is not None and key not in self._mine}
        self._files = {}
        for path in away:                        # at once: who fills a unit looks for them
            with open(path, "rb") as file:
                self._files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._turns: list[int] = []              # who fills which unit
        at, first = 0, every[self._first][0]
        for unit, (_, of) in enumerate(groups):
            span = range(at, at + len(of))
            able = [mate for mate in ranks.mates if all(
                first[i] is not None and (every[mate][1][i] or every[mate][0][i] == first[i]) for i in span)]
            self._turns.append(able[unit % len(able)] if able else self._first)
            at += len(of)
        made = [every[rank][2] for rank in ranks.mates if not any(every[rank][1])]       # bytes, by who has values
        if ranks.rank == self._first and len(made) > 1 and sum(made) - max(made) >= _MANY_BYTES:
            warnings.warn(f"{len(made)} processes of this machine made the model, each in {show_bytes(max(made))} of "
                          "its own memory, which it has given back now: mt.from_pretrained makes it once, or leave it "
                          "on the meta device (with torch.device('meta'): ...) where LOCAL_RANK is not 0",
                          RuntimeWarning, stacklevel=2)
        _give_memory(module, params)

    def fills(self, unit: int) -> bool:
        """Does this process put the unit's values into the store?"""
        return self._turns[unit] == self._ranks.rank

    def of(self, r: Record) -> Tensor:
        """[shape] The values; where another process has them, and this one does not fill the unit, no values."""
        like, place = r.param, self._at[id(r.param)]
        if place is None or id(like) in self._mine:
            return like.detach()
        path, at = place
        return torch.frombuffer(self._files[path], dtype=like.dtype, count=like.numel(), offset=at).view(like.shape)

    def exact(self, records: list[Record]) -> list[Tensor]:
        """Values of a unit's parameters, in each process; all call it, for the same."""
        own = [self.of(r) for r in records]
        return own if all(self._at[id(r.param)] is not None for r in records) else _in_common(self._ranks, own)

    def everywhere(self, units: list[list[Record]]) -> None:
        """Weights are those of the first process of all, on each machine, when this is called by all and they are in
        their planes: what another machine had otherwise is replaced."""
        sums: dict[int, set[int]] = {}
        for found in self._ranks.gather({u: _sum(records) for u, records in enumerate(units) if self.fills(u)}):
            for unit, crc in found.items():
                sums.setdefault(unit, set()).add(crc)
        for unit in sorted(unit for unit, found in sums.items() if len(found) > 1):
            for r in units[unit]:
                self._ranks.control.give(r.over(r.memory("HI", True), "HI"))
            if exact := [r for r in units[unit] if r.exact is not None]:
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
