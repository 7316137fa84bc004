"""The store of one model: its units are declared and placed, its weights put in, and given back in the end."""
from __future__ import annotations

import itertools

import torch
from torch import nn

from .. import _core
from ..base.codes import plain_kind
from ..base.units import Group, stored_dtype
from ..group.ranks import Ranks, as_one
from ..plans.room import TRIM_BYTES, give_back, own_bytes
from ..plans.tally import SETTLED, Asked
from ..store import gradient
from ..store.disk import file_bytes
from ..store.guard import StreamedParameter, streamed_kind
from ..store.records import DTYPES, Record
from ..store.tensorfiles import Mapped
from ..store.whole import wholes_of
from .choices import Choices
from .fitting import Fit, units_at
from .origins import Origins
from .runtime import Runtime
from .together import engine_of

_numbers = itertools.count()                 # of parameters, in the process


def engine(where: torch.device, choices: Choices, ranks: Ranks | None) -> _core.Engine:
    """With nothing in it yet."""
    threads, doors = choices.options.get("threads") or max(1, _core.build_info()["cpus"] - 1), choices.doors
    if ranks is None:
        core = _core.Engine(where.type, where.index or 0, threads, doors.delay_us, doors.seed)
    else:
        core = engine_of(ranks, where.type, where.index or 0, threads, doors.delay_us, doors.seed)
    if doors.lock is not None:
        core.lock_limit(doors.lock)
    return core


def declare(rt: Runtime, fit: Fit, choices: Choices) -> None:
    """Units, their slots and homes; nothing is in their planes yet."""
    _add_units(rt, fit.asked)
    rt.cap.hold(choices.vram, fit.asked.at_home())
    rt.homes.open_slots(fit.ring, units_at(fit.asked, *SETTLED), {})
    cut_units(rt, fit.asked)
    _to_disk(rt, fit.asked, choices)
    _place(rt, fit.asked, choices)


def cut_units(rt: Runtime, asked: Asked) -> None:
    """Where experts are fetched a few at a time; slots are open, and there was no forward with them."""
    for unit, home in enumerate(asked.homes) if asked.experts else ():
        rt.ring.cut(unit, asked.experts, rt.wholes[unit], at_once=home in (*SETTLED, "disk+weights"))


def _add_units(rt: Runtime, asked: Asked) -> None:
    for name, params in asked.groups:
        kinds = [DTYPES[stored_dtype(p, asked.dtype)] for _, p in params]
        unit = rt.core.add_unit(name, kinds, [p.numel() for _, p in params], [p.requires_grad for _, p in params])
        rt.units.append([_record(rt, unit, name, i, full, p, asked.dtype) for i, (full, p) in enumerate(params)])
        rt.unit_names.append(name)
        rt.wholes.append(wholes_of(rt.units[-1]))


def _record(rt: Runtime, unit: int, unit_name: str, index: int, full: str, p: nn.Parameter,
            dtype: torch.dtype | None) -> Record:
    r = Record(rt, unit, unit_name, index, next(_numbers), full, p)
    r.dtype = stored_dtype(p, dtype)
    r.nbytes = r.numel * r.dtype.itemsize
    return r


def _to_disk(rt: Runtime, asked: Asked, choices: Choices) -> None:
    """The file, where units have states there. With weights it is laid out at once, for states as they will be kept.
    """
    options, weights = choices.options, units_at(asked, "disk+weights")
    if "states" in options or weights:
        rt.states.choose(options.get("states", "fp32"))
    if choices.disk is not None and asked.on_disk():
        rt.homes.keep_on_disk(choices.disk, units_at(asked, "disk"), weights, choices.doors.disk)


def _place(rt: Runtime, asked: Asked, choices: Choices) -> None:
    """What is at home elsewhere than weights, or goes another way; the units are there, without values."""
    core = rt.core
    rt.homes.invite(units_at(asked, "arrive"))
    for unit in units_at(asked, "through"):
        core.through(unit, True)
    if choices.disk is not None and choices.spills:
        rt.homes.spill_to(choices.disk, choices.spilled, file_bytes(asked), choices.doors.spill)
    if not asked.keeps:
        core.lend_most(asked.lent)
        rt.homes.pass_gradients(range(len(asked.groups)))
    core.debug(choices.doors.skip, choices.doors.poison, choices.doors.sync)       # of all that is there by now


# ---- weights ----

def fill(rt: Runtime, groups: list[Group], origins: Origins, masters: bool) -> None:
    """Weights in their planes; each old tensor is freed as its values are in. What is at home on the device or on disk
    goes there at once: host memory has one such unit at a time."""
    given, files, filed = 0, Mapped(), set(units_at(rt.room.asked, "disk+weights"))
    by_unit = rt.ranks if filed else None        # of what is filled by one rank each puts its portion into its file
    with as_one(rt.ranks):
        for unit, own in enumerate(own_bytes(groups)):
            with as_one(by_unit):
                _take_over(rt, unit, files, origins, masters)
            if unit in rt.homes.settled and rt.ranks is None:
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
        with rt.ranks.as_one():
            for unit in rt.homes.settled:
                rt.homes.take(unit)


def _take_over(rt: Runtime, unit: int, files: Mapped, origins: Origins, masters: bool) -> None:
    records = rt.units[unit]
    if origins.fills(unit):
        _put_in(records, files, origins)
    if masters and (rounded := [r for r in records if _is_rounded(r)]):
        for r, value in zip(rounded, origins.exact(rounded)):
            r.exact = value
    for r in records:
        _adopt(rt, r)
    for whole in rt.wholes[unit]:
        whole.adopted()


def _put_in(records: list[Record], files: Mapped, origins: Origins) -> None:
    with torch.no_grad():
        for hi, value in files.fill([(r.over(r.memory("HI", True), "HI"), origins.of(r)) for r in records]):
            hi.copy_(value)


def _is_rounded(r: Record) -> bool:
    """Its fp32 values are more than the store keeps of them."""
    p = r.param
    return p.dtype == torch.float32 and r.dtype in (torch.bfloat16, torch.float16) and p.requires_grad


def _adopt(rt: Runtime, r: Record) -> None:
    """The HI plane has the parameter's values; it becomes a view of that."""
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
            _restore(r)
        for whole in rt.wholes[unit]:
            whole.given_back()
        if rt.homes.away(unit) and (together or rt.ranks is None):
            rt.homes.take(unit)


def _restore(r: Record) -> None:
    p = r.param
    if p is None:                        # nobody has it any more
        return
    value = r.host.clone()
    gradient.release(r)
    with torch._C.DisableTorchFunctionSubclass():
        grad, p.grad = p.grad, None
    p.__dict__.pop("_mt", None)
    p.__dict__.pop("_mt_runtime", None)
    p.__class__ = nn.Parameter if type(p) is StreamedParameter else plain_kind(p)
    p.data = value
    p.grad = grad
