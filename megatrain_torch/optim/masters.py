"""fp32 masters of streamed parameters: a bf16 weight and the bits that continue it, or an fp16 weight's plane."""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _core
from ..store.guard import StreamedParameter, values_of
from ..store.records import Record


def lacks_master(record: Record) -> bool:
    """The weight was set from outside, and what makes it an fp32 master does not follow. A new plane LO is zero, and no
    memory yet."""
    if record.dtype == torch.float32 or record.master_writes == record.writes:
        return False
    if record.exact is not None and record.writes == 0:
        return True
    return record.dtype == torch.float16 or bool(record.low_bytes and record.master_writes >= 0)


def make_master(record: Record) -> None:
    """Of a parameter that lacks one: its own values are it."""
    rt = record.runtime
    rt.planes.wait_updates(record)
    rt.planes.own_states(record)
    exact, record.exact = record.exact, None
    if exact is not None and record.writes == 0:
        set_master(record.param, exact)      # what lies just between two bf16 values may become the other one
    elif record.dtype == torch.float16:
        record.view("MASTER").copy_(record.host)
        rt.planes.push(record, "MASTER")
    else:
        record.view("LO").zero_()
        rt.planes.push(record, "LO")


def master(p: StreamedParameter) -> Tensor:
    """The fp32 value of a streamed parameter: [shape] fp32, a copy. Waits for its update."""
    record: Record = p._mt
    record.runtime.planes.wait_updates(record)
    record.runtime.planes.bring_states(record)
    if record.low_bytes and record.master_writes == record.writes and record.master_writes >= 0:
        out = torch.empty_strided(record.shape, record.stride, dtype=torch.float32)
        _core.split_join(record.host.data_ptr(), record.view("LO").data_ptr(), out.data_ptr(), record.numel,
                         record.low_bytes)
        return out
    if record.dtype == torch.float16 and record.master_writes == record.writes:
        return record.view("MASTER").clone()
    if record.exact is not None and record.writes == 0:
        return record.exact.clone()
    return record.host.to(torch.float32, copy=True)


def set_master(p: StreamedParameter, value: Tensor) -> None:
    """Sets weight and master from fp32 values. value: [shape]."""
    record: Record = p._mt
    value = torch.empty_strided(record.shape, record.stride, dtype=torch.float32).copy_(values_of(value))
    record.runtime.core.wait_updates(record.unit)
    record.runtime.planes.before_write(record)
    record.runtime.planes.own_states(record)
    with torch.no_grad():
        if record.low_bytes:
            _core.split_set(value.data_ptr(), record.host.data_ptr(), record.view("LO").data_ptr(), record.numel,
                            record.low_bytes)
        else:
            record.host.copy_(value)
            if record.dtype == torch.float16:
                record.view("MASTER").copy_(value)
    record.runtime.planes.after_write(record)
    if rest := "LO" if record.low_bytes else "MASTER" if record.dtype == torch.float16 else "":
        record.runtime.planes.push(record, rest)
    record.master_writes = record.writes
