"""Logits that are not made, because the loss does not need them whole.

While a model trains with compute="fused", its head's window returns `DeferredLogits`: a tensor with shape,
type, device and history, and without memory. It knows the hidden states it would be made from and what
was done to it since: scaling, a soft cap, a cast to fp32, slices and views that leave the vocabulary
alone (picks.py). A loss is computed without making them (head_loss.py). Whatever else is done to the tensor
makes the real logits through the head's window, once; from then on they are used, gradients included.

    Defer   hidden states and weights in, DeferredLogits out; its backward is a linear layer's, for the
            gradients of logits that were made

It hands weight gradients over as a window does (handover.py). Autograd records what is done to DeferredLogits as it
does for any tensor; the operations themselves are met below autograd, in `__torch_dispatch__`.

Letters: `T` tokens, `H` hidden, `V` vocabulary.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ..base.errors import MegatrainError
from ..graph.frames import refuse_again
from ..store.guard import HostTensor
from ..store.records import Record, Use
from ..store.state import accumulators, graph_stays, in_backward, in_sight
from .picks import Curve, Pick, is_all, pick_of, vocabulary_dim

if TYPE_CHECKING:
    from ..graph.window import Window

aten = torch.ops.aten


class Maker(Protocol):
    """The window's part that makes logits: head.Head."""

    window: Window
    weight: Record
    bias: Record | None
    declined: str

    def versions(self) -> Any: ...


# ---- one call of the head ----

class Logits:
    """One call of the head: what its output is made from, if it must be.

    Attributes:
        hidden: [..., H], with its history; None once the weights have moved on, since then nothing can be made of it.
        weight, bias: the head's at the call. The module may be another before its logits are made, or backward.
        value: the output [..., V], once it was made; without history.
        fused: a loss was computed without making it.
        watched: the user asked for gradients of logits, so that losses must go by way of them.
        use: that of the made logits' gradient.
        born: what was derived from the output, weakly.
    """

    def __init__(self, head: Maker, hidden: Tensor) -> None:
        self.head, self.device, self.rows = head, hidden.device, hidden.shape[:-1].numel()
        self.hidden: Tensor | None = hidden
        self.window = head.window            # logits may be read when the model is gone
        self.weight, self.bias = head.weight, head.bias
        self.hidden_version, self.versions = hidden._version, head.versions()
        self.value: Tensor | None = None
        self.fused = self.watched = False
        self.use: Use | None = None
        self.born: list[weakref.ref[DeferredLogits]] = []

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """weight [V, H] and bias [V] in the slots; the unit is fetched if need be."""
        window = self.window
        bound = dict(zip(window.records, window.views(window.records)))
        return bound[self.weight], None if self.bias is None else bound[self.bias]

    def let_go(self) -> None:
        if self.head.versions() != self.versions:
            self.hidden = None

    def check(self) -> None:
        """Hidden states and weights are those of the call."""
        name = self.head.window.name
        if self.head.versions() != self.versions:
            raise MegatrainError(
                f"{name}: these logits were not made when the model ran, and its weights have changed since: "
                "use logits before optimizer.step(), or stream with compute='eager'")
        if self.hidden._version != self.hidden_version:
            raise MegatrainError(f"{name}: its input was changed in place before its logits were made; "
                                 "stream with compute='eager'")

    def made(self, reader: str) -> Tensor:
        """The output's values: [..., V], by what the head's own code was at the call, a plain Linear's."""
        head = self.head
        if torch.is_grad_enabled() and self.use is None and in_backward() == -1:
            self.use = Use(head.window.trainable)        # a gradient may come by way of the values
        if self.value is None:
            self.check()
            if not self.fused:
                head.declined = f"its logits are read by {reader}"
            with torch.no_grad(), exactly(self.device):
                self.value = F.linear(self.hidden.detach(), *self.weights())
        return self.value

    def make_all(self, reader: str) -> None:
        """Values of all that was derived, before one of them is written in place."""
        for ref in self.born:
            derived = ref()
            if derived is not None:
                derived.values(reader)


@contextlib.contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Without autocast: the head was called without, or with one that changes nothing."""
    with torch.autocast(device.type, enabled=False):
        yield


@in_sight
class Defer(torch.autograd.Function):
    """Hidden states and host parameters in, deferred logits out."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.logits, ctx.records = logits, logits.window.trainable
        form = torch.empty(*hidden.shape[:-1], logits.weight.shape[0], dtype=hidden.dtype, device="meta")
        return DeferredLogits(logits, form)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_again(ctx)
        logits = ctx.logits
        logits.check()
        hidden, dhidden, found = logits.hidden.detach(), None, {}
        with exactly(hidden.device):
            rows, grad = hidden.reshape(-1, hidden.shape[-1]), grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[1]:
                dhidden = (grad @ logits.weights()[0]).view(hidden.shape)
            if logits.weight in ctx.records:
                found[logits.weight] = grad.t() @ rows
            if logits.bias in ctx.records:
                found[logits.bias] = grad.sum(0)
        if not graph_stays():
            ctx.logits = None                           # and what was made of them; this object lives as the loss does
        return None, dhidden, *hand_over(ctx, logits.window, logits.use, [found[r] for r in ctx.records])


def hand_over(ctx: Any, window: Window, use: Use | None, grads: Any) -> list[Tensor | None]:
    """Gradients of ctx.records, whose nodes are the last inputs'; what autograd is to be given for them."""
    return window.runtime.handover.take(ctx.records, use, accumulators(ctx), tuple(grads))


# ---- its output, and what is made of that ----

class DeferredLogits(Tensor):
    """Logits [..., V], or something made from them row by row, without memory.

    Form is free: shape, type, device, strides, requires_grad. Values are made when they are asked for.
    Pickles and copies as the ordinary tensor.
    """

    _logits: Logits
    _form: Tensor                       # on the meta device: shape, type, strides and offset in its memory
    _rows: tuple[Pick, ...]             # which of the head's rows lie in that memory
    _curve: Curve
    _step: tuple[Any, ...] | None       # (from what, operation, arguments); None: the head's own output
    _values: Tensor | None
    _above: Callable[..., Any]          # operations as Python calls them: head_loss.py

    @staticmethod
    def __new__(cls, logits: Logits, form: Tensor, rows: tuple[Pick, ...] = (), curve: Curve | None = None,
                step: tuple[Any, ...] | None = None) -> DeferredLogits:
        out = Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), storage_offset=form.storage_offset(), dtype=form.dtype,
            device=logits.device)
        out._logits, out._form, out._rows, out._step, out._values = logits, form, rows, step, None
        out._curve = curve or Curve()
        logits.born.append(weakref.ref(out))
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, HostTensor) for t in types):
            return NotImplemented                   # they wait, and come again
        return cls._above(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        follow = _FOLLOWED.get(func)
        if follow is not None and type(args[0]) is cls and args[0]._values is None:
            out = follow(args[0], func, args[1:], kwargs)
            if out is not None:
                return out
        return _on_values(func, args, kwargs)

    def values(self, reader: str) -> Tensor:
        """The real tensor, without history. reader: for whom, in words."""
        if self._values is None:
            if self._step is None:
                self._values = self._logits.made(reader)
            else:
                source, func, args, kwargs = self._step
                self._values = func(source.values(reader), *args, **kwargs)
        else:
            self._logits.made(reader)                   # it may be the first reader who differentiates
        return self._values

    def kept(self, reader: str) -> Tensor:
        """The real tensor for somebody who does not differentiate it."""
        with torch.no_grad():
            return self.values(reader)

    def derived(self, form: Tensor, step: tuple[Any, ...], curve: Curve | None = None) -> DeferredLogits | None:
        """What an operation makes of it: a view where `form` has the same memory, else a copy of its rows."""
        v = self.vocabulary
        dim = vocabulary_dim(form, v)
        if dim is None:
            return None
        rows = self._rows
        if form.untyped_storage()._cdata != self._form.untyped_storage()._cdata:
            order = sorted((d for d in range(form.dim()) if d != dim), key=lambda d: (-form.stride(d), d))
            rows = self.picked(pick_of(self._form, v, order))
        return DeferredLogits(self._logits, form, rows, curve or self._curve, step)

    def picked(self, pick: Pick) -> tuple[Pick, ...]:
        before = math.prod(self._rows[-1][0]) if self._rows else self._logits.rows
        return self._rows if is_all(pick, before) else (*self._rows, pick)

    @property
    def vocabulary(self) -> int:
        return self._logits.weight.shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        try:
            return repr(self.kept("repr()"))
        except MegatrainError:
            return f"DeferredLogits({list(self.shape)}, {self.dtype}, never made)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.kept("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        out = memo[id(self)] = self.kept("deepcopy()").clone()
        return out


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the real tensors. Runs below autograd, which records it for the deferred ones."""
    deferred = [a for a in tree_leaves((args, kwargs)) if isinstance(a, DeferredLogits)]
    reader = str(func.overloadpacket)
    if func._schema.is_mutable:
        for d in deferred:
            d._logits.make_all(reader)

    def real(a: Any) -> Any:
        return a.values(reader) if isinstance(a, DeferredLogits) else a

    args, kwargs = tree_map(real, (args, kwargs))
    out = func(*args, **kwargs)
    return next((d for d in deferred if out is d._values), out)


# ---- operations that are followed ----

def _view(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    forms = func(d._form, *args, **kwargs)
    if isinstance(forms, Tensor):
        return d.derived(forms, (d, func, args, kwargs))
    outs = [d.derived(form, (d, _item(func, i), args, kwargs)) for i, form in enumerate(forms)]
    return None if any(out is None for out in outs) else outs


def _item(func: Any, i: int) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: func(*args, **kwargs)[i]


def _copy(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """clone, contiguous, float(). Rounding to fewer bits is left to the real logits."""
    dtype, device = kwargs.get("dtype") or d.dtype, kwargs.get("device")
    if dtype not in (d.dtype, torch.float32) or (device is not None and device != d.device):
        return None
    form = func(d._form, *args, **{k: v for k, v in kwargs.items() if k != "device"})
    return d.derived(form, (d, func, args, kwargs))


def _times(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    number = args[0]
    if not isinstance(number, (int, float)) or not math.isfinite(number) or number == 0:
        return None
    curve = d._curve.times(number if func is aten.mul.Tensor else 1 / number)
    return d.derived(torch.empty_like(d._form), (d, func, args, kwargs), curve)


def _tanh(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    if d._curve.cap is not None:
        return None
    return d.derived(torch.empty_like(d._form), (d, func, args, kwargs), dataclasses.replace(d._curve, cap=1.0))


def _add(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """A bias that is added outside of the head (BART's)."""
    t = args[0]
    curve = d._curve
    if kwargs or curve.scale != 1 or curve.cap is not None or curve.shift is not None:
        return None
    if type(t) is not Tensor or t.requires_grad or t.device != d.device:
        return None
    if t.numel() != d.vocabulary or t.dim() > d.dim() or t.shape[-1:] != d.shape[-1:] \
            or torch.result_type(t, d._form) != d.dtype:
        return None
    t = t.clone()                                       # it may be changed before the loss
    return d.derived(torch.empty_like(d._form), (d, func, (t,), kwargs), Curve(shift=t.reshape(-1)))


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((
        aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.t.default,
        aten.permute.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.alias.default,
        aten.detach.default), _view),
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), _copy),
    **dict.fromkeys((aten.mul.Tensor, aten.div.Tensor), _times),
    aten.tanh.default: _tanh,
    aten.add.Tensor: _add,
}
