"""AdamW's moments of a streamed parameter, as tensors: in fp32, or as codes of 8 bits with their scales."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..base.errors import MegatrainError
from ..base.formats import GROUP
from ..store.guard import values_of
from ..store.records import Record

MOMENTS = ("exp_avg", "exp_avg_sq")                           # names in the state, by plane: fp32
CODES = ("exp_avg_codes", "exp_avg_sq_codes", "scales")       # 8 bits


def moments_of(record: Record) -> tuple[Tensor, Tensor]:
    """Both moments in fp32: [shape], copies. Their planes are current."""
    m, v = (torch.empty_strided(record.shape, record.stride, dtype=torch.float32) for _ in range(2))
    if record.runtime.states == "fp32":
        return m.copy_(record.view("M")), v.copy_(record.view("V"))
    codes = [record.view(plane).data_ptr() for plane in record.moments]
    _core.codes_get(*codes, m.data_ptr(), v.data_ptr(), record.numel)
    return m, v


def load_moments(record: Record, values: dict[str, Any]) -> None:
    """From a state_dict of the same format as they are, else by way of fp32; to 8 bits rounded to nearest.

    Raises:
        MegatrainError: scales are not [groups,2] of this parameter's groups.
    """
    mine = MOMENTS if record.runtime.states == "fp32" else CODES
    check_scales(record.name, record.numel, values)
    if mine[0] in values:
        for name, plane in zip(mine, record.moments):
            record.view(plane).copy_(values_of(values[name]))
        return
    if mine is CODES:
        m, v = (torch.empty_strided(record.shape, record.stride, dtype=torch.float32) for _ in range(2))
        m.copy_(values_of(values["exp_avg"]))
        v.copy_(values_of(values["exp_avg_sq"]))
        codes = [record.view(plane).data_ptr() for plane in record.moments]
        _core.codes_set(m.data_ptr(), v.data_ptr(), *codes, record.numel)
        return
    for plane, value in zip(("M", "V"), decoded(record.shape, record.stride, values)):
        record.view(plane).copy_(value)


def addresses(record: Record) -> list[int]:
    """Where its moments lie; none: it has none yet."""
    return [record.view(plane).data_ptr() for plane in record.moments] if record.optimizer is not None else []


def memory_of(t: Tensor) -> int:
    """Where the memory begins that a tensor is a part of."""
    with torch._C.DisableTorchFunctionSubclass():
        return t.untyped_storage().data_ptr()


def stand_there(record: Record, values: dict[str, Any]) -> bool:
    """Are these values the parameter's own moments, as a state_dict of this store has them?"""
    if record.optimizer is None:
        return False
    names = MOMENTS if record.runtime.states == "fp32" else CODES
    return all(_is_same(values.get(name), record.view(plane)) for name, plane in zip(names, record.moments))


def _is_same(value: Any, own: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return (isinstance(value, Tensor) and value.is_cpu and value.data_ptr() == own.data_ptr()
                and (value.dtype, value.shape, value.stride()) == (own.dtype, own.shape, own.stride()))


def check_state(name: str, shape: Any, values: dict[str, Any]) -> dict[str, Any]:
    """These, which somebody put into `opt.state`, when they are a step count and both moments of this shape.

    Raises:
        MegatrainError: they are not.
    """
    of = CODES[:2] if CODES[0] in values else MOMENTS
    for key in ("step", *of, *(CODES[2:] if of != MOMENTS else ())):
        if key not in values:
            raise MegatrainError(f"{name}: the state that was put into the optimizer has no {key!r}, only "
                                 f"{sorted(values)}; to begin anew, leave it empty")
    for key in of:
        if not isinstance(values[key], Tensor) or values[key].shape != shape:
            raise MegatrainError(f"{name}: the {key!r} that was put into the optimizer's state is "
                                 f"{list(getattr(values[key], 'shape', ())) or values[key]!r}, and the parameter is "
                                 f"{list(shape)}")
    return values


def check_scales(name: str, numel: int, values: dict[str, Any]) -> None:
    groups = -(-numel // GROUP)
    if CODES[2] in values and values[CODES[2]].shape != (groups, 2):
        raise MegatrainError(f"{name}: scales of shape {list(values[CODES[2]].shape)} in the state to load; its "
                             f"{numel} elements have [{groups}, 2]")


def decoded(shape: Any, stride: Any, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Both moments in fp32, [shape], from a parameter's codes and scales; these are in the order of its memory."""
    m, v = (torch.empty_strided(shape, stride, dtype=torch.float32) for _ in range(2))
    codes = [torch.empty_strided(shape, stride, dtype=kind).copy_(values_of(values[name]))
             for kind, name in zip((torch.int8, torch.uint8), CODES)]
    scales = values_of(values[CODES[2]])
    codes.append(torch.empty(scales.shape, dtype=torch.float32).copy_(scales))       # on the host, as C reads them
    _core.codes_get(*(c.data_ptr() for c in codes), m.data_ptr(), v.data_ptr(), m.numel())
    return m, v
