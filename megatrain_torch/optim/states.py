"""AdamW's states of a streamed parameter, as tensors and dicts: step count, moments, the fp32 master; and its gradient.

What stands in `opt.state` is what an update uses. The states lie in the store, and mt.AdamW's dicts show them; what is
put in their place is copied into the store before the next step; a tensor on a device at once, since Lightning moves
all states that it loads to its own.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..base.errors import MegatrainError
from ..base.modes import GROUP
from ..base.strict import shown
from ..store import gradient
from ..store.guard import StreamedParameter, plain, values_of
from ..store.records import Record

MOMENTS = ("exp_avg", "exp_avg_sq")                           # names in the state, by plane: fp32
CODES = ("exp_avg_codes", "exp_avg_sq_codes", "scales")       # 8 bits
STEPS = 1 << 53                                               # more than this an fp64 does not count


# ---- numbers that are known when a step's gradients have landed ----

class Late(Tensor):
    """[] fp32: what is done with it waits until it is known. Either the norm of a step's gradients, which `find` gives;
    or a count of steps, one of which counts until `find`, which gives nothing, has taken it back where it was skipped.
    """

    find: Callable[[], Any] | None

    @staticmethod
    def of(find: Callable[[], Any]) -> Late:
        out = torch.zeros(()).as_subclass(Late)
        out.find = find
        return out

    def settle(self) -> None:
        if self.find is not None and (value := self.find()) is not None:         # reads gradients by their guards
            self.find = None
            with torch._C.DisableTorchFunctionSubclass():
                self.fill_(value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for a in (*args, *kwargs.values()):
            for late in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(late, Late):
                    late.settle()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle()
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self.settle()
        return plain(self).clone()


def count_of(step: Any, name: str) -> int:
    """state["step"] as a number, whatever somebody wrote there. Raises MegatrainError if it is no number of steps."""
    with torch._C.DisableTorchFunctionSubclass():
        value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(value, (int, float)) or not 0 <= value < STEPS or value != int(value):
        raise MegatrainError(f"{name}: its state has step={shown(value)}: bias correction takes a whole number, 0 or "
                             "more")
    return int(value)


class StoreStates(dict[str, Any]):
    """State of a streamed parameter. As long as `own` stands there, an update reads and writes it."""

    def __init__(self, record: Record, own: dict[str, Tensor]) -> None:
        super().__init__(own)
        self.record, self.own = record, own

    def __setitem__(self, name: str, value: Any) -> None:
        own = self.own.get(name)
        if isinstance(value, Tensor) and not value.is_cpu and own is not None and own.shape == value.shape:
            with torch.no_grad():
                value = own.copy_(value)
        super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


# ---- moments: in fp32, or as codes of 8 bits with their scales ----

def moment_planes(record: Record) -> dict[str, str]:
    """Planes of the moments by their names in the state."""
    return dict(zip(MOMENTS if record.runtime.states == "fp32" else CODES, record.moments))


def load_moments(record: Record, values: dict[str, Any]) -> None:
    """From a state_dict of any format, by way of fp32 where it is another; to 8 bits rounded to nearest."""
    mine = moment_planes(record)
    groups, scales = -(-record.numel // GROUP), values.get(CODES[2])
    if scales is not None and scales.shape != (groups, 2):
        raise MegatrainError(f"{record.name}: scales of shape {list(scales.shape)} in the state to load; its "
                             f"{record.numel} elements have [{groups}, 2]")
    if next(iter(mine)) in values:
        for name, plane in mine.items():
            record.view(plane).copy_(values_of(values[name]))
    elif record.runtime.states != "fp32":
        pair = [torch.empty_strided(record.shape, record.stride, dtype=torch.float32).copy_(values_of(values[name]))
                for name in MOMENTS]
        _core.codes_set(*(t.data_ptr() for t in pair), *addresses(record), record.numel)
    else:
        for plane, value in zip(("M", "V"), decoded(record.shape, record.stride, values)):
            record.view(plane).copy_(value)


def addresses(record: Record) -> list[int]:
    """Where its moments lie; none: it has none yet."""
    return [] if record.optimizer is None else [record.view(plane).data_ptr() for plane in record.moments]


def stand_there(record: Record, values: dict[str, Any]) -> bool:
    """Are these values the parameter's own moments, as a state_dict of this store has them?"""
    if record.optimizer is None:
        return False
    for name, plane in moment_planes(record).items():
        value, own = values.get(name), record.view(plane)
        with torch._C.DisableTorchFunctionSubclass():
            if not (isinstance(value, Tensor) and value.is_cpu and value.data_ptr() == own.data_ptr()
                    and (value.dtype, value.shape, value.stride()) == (own.dtype, own.shape, own.stride())):
                return False
    return True


def apart(record: Record, values: dict[str, Any], kept: set[int]) -> dict[str, Any]:
    """States to load: its own where they are; copies of others that lie in planes about to be written."""
    if stand_there(record, values):
        return values
    with torch._C.DisableTorchFunctionSubclass():
        there = {name for name, v in values.items()
                 if isinstance(v, Tensor) and v.untyped_storage().data_ptr() in kept}
    return {name: values_of(v).clone() if name in there else v for name, v in values.items()}


def check_state(name: str, shape: Any, values: dict[str, Any]) -> dict[str, Any]:
    """What somebody put into `opt.state`; refused if it is no step count and both moments of this shape."""
    keys = CODES if CODES[0] in values else MOMENTS
    for key in ("step", *keys):
        if key not in values:
            raise MegatrainError(f"{name}: the state that was put into the optimizer has no {key!r}, only "
                                 f"{sorted(values)}; to begin anew, leave it empty")
    for key in keys[:2]:
        if not isinstance(values[key], Tensor) or values[key].shape != shape:
            raise MegatrainError(f"{name}: the {key!r} that was put into the optimizer's state is "
                                 f"{list(getattr(values[key], 'shape', ())) or values[key]!r}, and the parameter is "
                                 f"{list(shape)}")
    return values


def decoded(shape: Any, stride: Any, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Both moments in fp32, [shape], from a parameter's codes and scales; these are in the order of its memory."""
    m, v = (torch.empty_strided(shape, stride, dtype=torch.float32) for _ in MOMENTS)
    codes = [torch.empty_strided(shape, stride, dtype=kind).copy_(values_of(values[name]))
             for kind, name in zip((torch.int8, torch.uint8), CODES)]
    scales = values_of(values[CODES[2]])
    codes.append(torch.empty(scales.shape, dtype=torch.float32).copy_(scales))       # on the host, as C reads them
    _core.codes_get(*(c.data_ptr() for c in codes), m.data_ptr(), v.data_ptr(), m.numel())
    return m, v


# ---- fp32 masters: a bf16 weight and the bits that continue it, or an fp16 weight's plane ----

def master_plane(record: Record) -> str:
    """The plane that makes an fp32 master of the weight; "": its type has none."""
    return "LO" if record.low_bytes else "MASTER" if record.dtype == torch.float16 else ""


def follows(record: Record) -> str:
    """That plane, where the master follows the weight; else ""."""
    return master_plane(record) if record.master_writes == record.writes else ""


def lacks_master(record: Record) -> bool:
    """The weight was set, and its fp32 master does not follow. A new plane LO is zero, and no memory yet."""
    if record.dtype == torch.float32 or record.master_writes == record.writes:
        return False
    if record.exact is not None and record.writes == 0:
        return True
    return record.dtype == torch.float16 or bool(record.low_bytes and record.master_writes >= 0)


def follow_weight(record: Record) -> None:
    """The master of a weight that was set follows it; of a unit on device or disk all do, one unit at a time."""
    if not lacks_master(record):
        return
    rt, unit = record.runtime, record.unit
    for r in rt.units[unit] if rt.homes.away(unit) else [record]:
        if r is not record and not (r.was_trainable and r.optimizer in (None, record.optimizer) and lacks_master(r)):
            continue
        r.wait_updates()
        r.own_states()
        exact, r.exact = r.exact, None
        if exact is not None and r.writes == 0:
            set_master(r.param, exact)       # what lies just between two bf16 values may become the other one
        else:
            plane = master_plane(r)
            if plane == "MASTER":
                r.view(plane).copy_(r.host)
            else:
                r.view(plane).zero_()
            r.push(plane)
        r.master_writes = r.writes
    if rt.homes.away(unit):
        for r in rt.units[unit]:
            r.notice_write()                         # whose copies go now
        rt.homes.take(unit)


def master(p: StreamedParameter) -> Tensor:
    """The fp32 value of a streamed parameter: [shape] fp32, a copy. Waits for its update."""
    record: Record = p._mt
    record.wait_updates()
    record.bring_states()
    plane = follows(record)
    if plane == "LO":
        out = torch.empty_strided(record.shape, record.stride, dtype=torch.float32)
        _core.split_join(record.host.data_ptr(), record.view("LO").data_ptr(), out.data_ptr(), record.numel,
                         record.low_bytes)
        return out
    if plane == "MASTER":
        return record.view("MASTER").clone()
    if record.exact is not None and record.writes == 0:
        return record.exact.clone()
    return record.host.to(torch.float32, copy=True)


def set_master(p: StreamedParameter, value: Tensor) -> None:
    """Sets weight and master from fp32 values. value: [shape]."""
    record: Record = p._mt
    rest = master_plane(record)
    value = torch.empty_strided(record.shape, record.stride, dtype=torch.float32).copy_(values_of(value))
    record.wait_updates()
    record.before_write()
    record.own_states()
    with torch.no_grad():
        if rest == "LO":
            _core.split_set(value.data_ptr(), record.host.data_ptr(), record.view("LO").data_ptr(), record.numel,
                            record.low_bytes)
        else:
            record.host.copy_(value)
            if rest:
                record.view(rest).copy_(value)
    record.after_write()
    if rest:
        record.push(rest)
    record.master_writes = record.writes


# ---- gradients ----

def source_of(record: Record) -> tuple[int, bool]:
    """The gradient's address for the update, 0: its plane; and whether host memory counts. Nobody writes there."""
    rt = record.runtime
    if gradient.take_back(record):
        return 0, record.written
    grad = plain(gradient.standing(record))
    rt.core.wait_grads(record.unit)
    record.wait_used()
    if gradient.kept(record):            # plane GRAD is somebody's
        copied = rt.handover.copied.setdefault(record.unit, {})
        own = torch.empty_strided(record.shape, record.stride, dtype=record.dtype, device="cpu")
        copied[record] = own.copy_(grad)
        return copied[record].data_ptr(), True
    record.own_states()
    record.view("GRAD").copy_(grad)
    record.push("GRAD")
    return 0, True


def check_used(record: Record) -> None:
    """Raises: a gradient that an update in backward has used is not what it was."""
    grad = gradient.standing(record)
    if grad is None or grad is record.late:
        return
    same = record.runtime.room.asked.keeps
    if same:
        copied = record.runtime.handover.copied.get(record.unit, {}).get(record)
        used = record.view("GRAD") if copied is None else copied
        same = torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (plain(grad), used)))
    if not same:
        raise MegatrainError(f"{record.name}: its .grad came or changed after its update in backward: with "
                             "in_backward=True there is one backward per step, and gradients are not changed "
                             "(GradScaler, clipping, a penalty's own backward)")
