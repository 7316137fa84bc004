"""A window as one node of the graph: run without recording, and again as a whole in backward.

Asked for with plan={"activations": "whole"}. Where a layer takes the device less time than Python needs
to record it (few tokens, small layers), the host is what bounds the step, and one node instead of
dozens with hooks costs it less than even plain torch. The price: the window's last operation runs
again too, which the hooks of frames.py avoid, and where an input of the window is used outside of it
as well, the sum of its gradients is made in another order than torch's (the last bits differ).

A window goes as a whole only when its first replayed run has proved that nothing escapes it: no tensor
with history outlives it but its outputs, no hooks below it, nothing but tensors and numbers among its
arguments, at most one of which takes a gradient, and the same bits without recording. Else it replays.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode

from .errors import MegatrainError
from .frames import ReplayFrame, refuse_again, refuse_create_graph
from .records import Record, Use
from .state import graph_stays, in_backward

Window = Any                 # window.Window, which imports this

class Whole(torch.autograd.Function):
    """Inputs and host parameters in, the window's outputs out."""

    @staticmethod
    def forward(ctx: Any, window: Window, frame: ReplayFrame, records: list[Record], args: Any, kwargs: Any,
                n_inputs: int, *tensors: Tensor) -> Any:
        ctx.window, ctx.frame, ctx.records, ctx.n_inputs = window, frame, records, n_inputs
        ctx.use = Use(records) if in_backward() == -1 else None
        ctx.set_materialize_grads(False)
        return window.run(args, kwargs, grad=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_create_graph()
        refuse_again(ctx)
        window, frame = ctx.window, ctx.frame
        nodes = [edge[0] for edge in ctx.next_functions[ctx.n_inputs:]]
        before = window.runtime.bindings
        with frame.as_it_was() as (args, kwargs):
            leaves = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
            weights = [frame.bound[r] for r in ctx.records]
            out = window.inner(*args, **kwargs)
            pairs = [(o, g) for o, g in zip(tensors_of(out), _of_tensors(grads, ctx))
                     if g is not None and o.requires_grad]
            found = torch.autograd.grad([o for o, _ in pairs], leaves + weights, [g for _, g in pairs],
                                        allow_unused=True)
        del out, pairs
        if not graph_stays():
            ctx.frame = None                 # this object lives as long as the loss
        if window.runtime.bindings != before:
            raise MegatrainError(f"{window.name}: run again, its forward read weights of other units, which it had not "
                                 "done before; use plan={'activations': 'replay'}")
        taken = window.runtime.handover.take(ctx.records, ctx.use, nodes, found[len(leaves):])
        return (None,) * 6 + found[:len(leaves)] + tuple(taken)


def _of_tensors(grads: tuple[Any, ...], ctx: Any) -> list[Any]:
    """Gradients of the outputs that are tensors, in order."""
    return [g for g, is_tensor in zip(grads, ctx.window.tensor_outputs) if is_tensor]


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_of(v)
    elif isinstance(value, tuple):
        for v in value:
            yield from tensors_of(v)


# ---- who may -----------------------------------------------------------------------------------

def call(window: Window, frame: ReplayFrame, args: Any, kwargs: Any) -> Any:
    """The window's outputs by way of one node."""
    inputs = frame.with_grad
    return Whole.apply(window, frame, window.trainable, args, kwargs, len(inputs), *inputs, *window.params)


def may(window: Window, frame: ReplayFrame) -> bool:
    """Is this call of a closed window one that can go as a whole?"""
    if not frame.plain_inputs or len(frame.with_grad) > 1 or not window.trainable:
        return False
    return not any(window.hooks) and not _has_any_global_hook()


class Watch(TorchFunctionMode):
    """Remembers, weakly, every result of an operation that has a history; counts weights that were
    bound or read and are not the window's own."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.runtime, self.before = window.runtime, window.runtime.bindings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.requires_grad:
                self.made.append(weakref.ref(t))
        return out

    @property
    def strangers(self) -> int:
        return self.runtime.bindings - self.before - 1       # its own binding is one


def closed(window: Window, frame: ReplayFrame, watch: Watch, inputs: Any, out: Any) -> bool:
    """After a first replayed run under `watch`: does nothing escape it?"""
    own = {id(t) for t in tensors_of((inputs, out))}
    escaped = any(t is not None and id(t) not in own for t in [ref() for ref in watch.made])
    outputs = out if isinstance(out, tuple) else (out,)
    window.tensor_outputs = [isinstance(o, Tensor) for o in outputs]
    views = any(o._is_view() for o in tensors_of(out))       # in-place changes of them would not be allowed
    simple = all(o is None or isinstance(o, (Tensor, bool, int, float)) for o in outputs)
    stateless = not frame.changes and not any(m._buffers for m in window.buffered) and not window.recurrent
    return (simple and stateless and not escaped and not views and watch.strangers == 0
            and _same_bits(window, frame, out))


def _same_bits(window: Window, frame: ReplayFrame, out: Any) -> bool:
    """Does the window give the same without recording? Kernels may be chosen by whether a gradient is wanted."""
    with frame.as_it_was() as (args, kwargs), torch.no_grad():
        again = window.inner(*args, **kwargs)
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tensors_of(out), tensors_of(again)))
