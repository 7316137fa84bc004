"""What stands in `.grad` of a streamed parameter, and who may touch the memory of its gradient.

    late      nobody but hand-overs had the gradient: `.grad` holds a tensor without memory (`LateGrad`), and the values
              are the engine's: on their way, in plane GRAD, or on the device. The engine's sums of them count
    shown     user code asked for it: `.grad` holds a plain tensor over plane GRAD in host memory, which is current.
              No version counter tells what is done to it (`.data`, `.numpy()`, GradScaler), so the values that are
              there at the next hand-over or step count; the engine's fp32 sum of 16-bit ones, where they still are
              that sum, rounded
    foreign   a tensor in memory of its own, which autograd or the user put there

`show` makes the first into the second, whoever asks: Python by the parameter's guard, C++ (AccumulateGrad, which adds
what a graph on the host gives) by the dispatcher, which asks `LateGrad`. `take_back` is the way back, where nobody has
the tensor any more, or a view of it. As long as somebody has, plane GRAD is theirs: further gradients of the parameter
are added to their tensor as they come, or get memory of their own, and updates read a copy.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from .records import Record


SET, ADD = 0, 1                              # modes of Engine.offload
in_backward = torch._C._current_graph_task_id     # -1 outside of backward; for the thread that runs it


class LateGrad(Tensor):
    """[shape], stands in `.grad`; the first operation on it gets the gradient itself."""

    _record: weakref.ref[Record]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, record: Record) -> LateGrad:
        out = Tensor._make_wrapper_subclass(cls, record.shape, strides=record.stride, dtype=record.dtype, device="cpu")
        out._record = weakref.ref(record)        # which holds it
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LateGrad, lambda late: current(late._record()), (args, kwargs or {}))
        return func(*args, **kwargs)


# ---- what stands there ----

def standing(record: Record) -> Tensor | None:
    """`.grad` as it is; nobody gets it by this."""
    with torch._C.DisableTorchFunctionSubclass():
        return record.param.grad


def stand(record: Record, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        record.param.grad = grad


def claim(record: Record) -> tuple[int, int] | None:
    """For a hand-over: `.grad` is late from now on. SET or ADD into plane GRAD, and whether host memory counts, as
    Engine.offload takes them. None: somebody has a tensor over the plane, or `.grad` is one of the user's."""
    param = record._param()
    with torch._C.DisableTorchFunctionSubclass():
        sets = param.grad is None and (record.shown is None or not kept(record))
        if sets:
            if record.late is None:
                record.late = LateGrad(record)
            param.grad = record.late
    if sets:
        record.set_in, record.written, record.summed, record.seen = in_backward(), False, False, None
        return SET, 0
    if not take_back(record):
        return None
    reread, record.written = record.written, False
    record.summed = record.dtype.itemsize == 2
    return ADD, int(reread)


def peek(record: Record) -> Tensor | None:
    """The gradient for reading, and for writing by who then sets `record.written`; waits. It stays late."""
    grad = standing(record)
    if grad is None or grad is not record.late:
        return grad
    record.runtime.core.wait_grads(record.unit)     # the copies from the device have landed
    record.wait_used()         # an update may still read what the caller is about to change
    return record.view("GRAD")


# ---- in the user's hands ----

def current(record: Record) -> Tensor | None:
    """`.grad` for user code."""
    grad = standing(record)
    return show(record) if grad is not None and grad is record.late else grad


def show(record: Record) -> Tensor:
    """A late gradient becomes a shown one; of one used in backward a copy, so that step() sees a late change."""
    grad = peek(record)
    observer = record.runtime.handover.observer
    if observer is not None and (who := observer()) is not None and record.pid in who._done:
        with torch.inference_mode(False):
            grad = record.view("GRAD").clone()
    elif record.numel:
        array = record.memory("GRAD")
        grad, record.shown = _over(record, array), weakref.ref(array)
        if record.summed and (record.unit in record.runtime.homes.settled or record.runtime.apart):
            record.seen = grad.clone()
    stand(record, grad)
    return grad


def _over(record: Record, array: Any) -> Tensor:
    with torch.inference_mode(False):        # whoever looks: a backward may add to it
        return record.over(array, "GRAD")


def kept(record: Record) -> bool:
    """Does anybody have a tensor over plane GRAD, whatever it is by now: a view, NumPy's array, a graph?"""
    return record.shown is not None and record.shown() is not None


def take_back(record: Record) -> bool:
    """Is `.grad` late, or could it be made so: shown, and nobody but `.grad` has it? `record.written` then says whether
    host memory counts."""
    grad = standing(record)
    if grad is record.late:
        return grad is not None
    # Else it has to be what `show` gave, and not a tensor that shares some of its memory.
    if grad is None or not kept(record) or type(grad) is not Tensor or grad.requires_grad \
            or (grad.dtype, grad.shape, grad.stride()) != (record.dtype, record.shape, record.stride) \
            or grad.data_ptr() != record.shown().ctypes.data:
        return False
    again = weakref.ref(grad)
    stand(record, record.late)
    del grad
    if not kept(record):
        if record.summed and not record.written:     # does it differ from the rounded sum of micro-batches?
            with torch.no_grad():
                # A copy is there where not all of that sum is in this machine's memory.
                rounded = record.view("ACC").to(record.dtype) if record.seen is None else record.seen
                record.written = not torch.equal(record.view("GRAD").view(torch.int16), rounded.view(torch.int16))
        else:
            record.written = True
        record.seen = None
        return True
    found = again()                          # else a view of it is kept, and not the tensor
    stand(record, _over(record, record.shown()) if found is None else found)
    return False


# ---- changes of our own ----

def clear(params: Iterable[Tensor], set_to_none: bool) -> None:
    """zero_grad(). With set_to_none it waits for nothing; else what is late stays late, and is zeros."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for p in params:
            if set_to_none or p.grad is None:
                p.grad = None
                continue
            record = getattr(p, "_mt", None)
            late = record is not None and take_back(record)
            grad = p.grad if record is None else peek(record)
            if late:
                record.written = True
            elif grad.grad_fn is not None:
                grad.detach_()
            else:
                grad.requires_grad_(False)
            grad.zero_()


def add(record: Record, grad: Tensor) -> None:
    """Adds one to a `.grad` that is not late, or puts it there in memory of its own. grad: on the compute device."""
    found = standing(record)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if found is None:
            out = torch.empty_strided(record.shape, record.stride, dtype=record.dtype, device="cpu")
            record.param.grad = out.copy_(grad)
        else:
            found.add_(grad.to(found.device))


def release(record: Record) -> None:
    """The store goes: what is late gets memory of its own."""
    if take_back(record):
        stand(record, record.view("GRAD").clone())
