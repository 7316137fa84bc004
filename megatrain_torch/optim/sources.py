"""Where an update finds a gradient, and whether it is still the one that an update in backward has used."""
from __future__ import annotations

import torch

from ..base.errors import MegatrainError
from ..store import gradient
from ..store.guard import plain
from ..store.records import Record


def source_of(record: Record) -> tuple[int, bool]:
    """Where the update finds the gradient, 0: where hand-overs put it; and whether host memory counts. Nobody else
    writes there until the update is over."""
    rt = record.runtime
    if gradient.take_back(record):
        return 0, record.written
    grad = plain(gradient.standing(record))
    rt.core.wait_grads(record.unit)
    rt.planes.wait_used(record)
    if gradient.kept(record):            # plane GRAD is somebody's
        copied = rt.handover.copied.setdefault(record.unit, {})
        own = torch.empty_strided(record.shape, record.stride, dtype=record.dtype, device="cpu")
        copied[record] = own.copy_(grad)
        return copied[record].data_ptr(), True
    rt.planes.own_states(record)
    record.view("GRAD").copy_(grad)
    rt.planes.push(record, "GRAD")
    return 0, True


def check_used(record: Record) -> None:
    """A gradient that an update in backward has used is what it was."""
    grad = gradient.standing(record)
    if grad is None or grad is record.late:
        return
    same = record.unit not in record.runtime.homes.passing
    if same:
        copied = record.runtime.handover.copied.get(record.unit, {}).get(record)
        used = record.view("GRAD") if copied is None else copied
        same = torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (plain(grad), used)))
    if not same:
        raise MegatrainError(f"{record.name}: its .grad came or changed after its update in backward: with "
                             "in_backward=True there is one backward per step, and gradients are not changed "
                             "(GradScaler, clipping, a penalty's own backward)")
