"""The head, whose logits are not made, because the loss does not need them whole.

While a model trains with compute="fused", its head's window returns `DeferredLogits`: a tensor with shape, type, device
and history, and without memory. It knows the hidden states it would be made from and what was done to it since:
scaling, a soft cap, a cast to fp32, slices and views that leave the vocabulary alone. A loss is computed without
making them. Whatever else is done to it makes the real logits, once; from then on they are used, gradients included.

    Defer   hidden states and weights in, DeferredLogits out; its backward is a linear layer's, for the
            gradients of logits that were made
    Loss    hidden states and weights in, the loss out; gradients are made in forward, and of each row by itself in
            backward, where it is known what each row counts

All hand weight gradients over as a window does (graph/handover.py). Autograd records what is done to DeferredLogits as
it does for any tensor; the operations themselves are met below autograd, in `__torch_dispatch__`. But F.cross_entropy,
where transformers' losses and most others end, is met above autograd, so that its gradient goes by way of Loss
(loss.linear_cross_entropy, in chunks of tokens). So is `log_softmax(-1).gather(-1, labels)`, with which losses of
preferences begin: log p of each label is the loss of each row, negated.

Letters: `T` tokens, `H` hidden, `V` vocabulary.
"""
from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves, tree_map

from ..base.errors import MegatrainError
from ..base.units import output_embeddings
from ..graph import hf_calls
from ..store.guard import HostTensor
from ..store.records import Use
from ..store.state import accumulators, graph_stays, in_backward, in_sight
from .layer import casts
from .loss import chunk_tokens, linear_cross_entropy

if TYPE_CHECKING:
    from ..graph.window import Window

aten = torch.ops.aten
# fp16 is left out: gradients of a mean over many tokens fall below its smallest number, and the scale of
# a GradScaler is known only in backward. fp64 is nobody's choice for speed.
TYPES = (torch.float32, torch.bfloat16)
LINEAR = nn.Linear.forward


# ---- the window of a head --------------------------------------------------------------------------

def head_of(root: nn.Module, windows: list[tuple[str, nn.Module]]) -> nn.Module | None:
    """The window that makes logits: the named head, else the last Linear as wide as the longest embedding is long."""
    named = output_embeddings(root)
    if named is not None:
        return named if any(m is named for _, m in windows) else None
    vocabulary = max([m.num_embeddings for m in root.modules() if isinstance(m, nn.Embedding)], default=0)
    wide = [m for _, m in windows if type(m) is nn.Linear and m.out_features == vocabulary]
    return wide[-1] if wide else None


def unfit(module: nn.Module) -> str:
    """Why this head can never be fused with a loss; "" when it can."""
    if type(module) is not nn.Linear:
        return f"the head is a {type(module).__name__}, no plain nn.Linear"
    if module.weight.dtype not in TYPES or any(p.dtype != module.weight.dtype for p in module.parameters()):
        return f"the head's weights are {module.weight.dtype}; bf16 and fp32 are fused"
    return ""


def give_head(window: Window, module: nn.Module) -> None:
    """The head's window defers from now on, or says why it cannot."""
    window.unfit = unfit(module) or (f"its weights are codes: {window.wholes[0].format.name}" if window.wholes else "")
    window.head = None if window.unfit else Head()


class Head:
    """What the window of a head knows of deferring. declined: why the last call's logits were made after all; "" when
    they were not."""

    def __init__(self) -> None:
        self.declined = ""
        self.calls: weakref.WeakSet[Logits] = weakref.WeakSet()

    def __call__(self, window: Window, args: Any, kwargs: Any) -> Tensor | None:
        """Deferred logits, or None where the head's own code has to run."""
        hidden = args[0] if args else kwargs.get("input")
        self.declined = _why_not(window, hidden)
        if self.declined:
            return None
        if DeferredLogits.traced and "torch._dynamo" in sys.modules:
            # A loss of the user's may be compiled, and this is not for it to trace.
            DeferredLogits.above = staticmethod(torch._dynamo.disable(DeferredLogits.above))
            DeferredLogits.traced = False
        logits = Logits(self, window, hidden)
        for earlier in self.calls:               # an output that a loop's variable still names, most often
            if earlier.versions != logits.versions:
                earlier.hidden = None
        self.calls.add(logits)
        return Defer.apply(logits, hidden, *window.params)


def _why_not(window: Window, hidden: Any) -> str:
    """Why the logits of these hidden states are made; "" when they are not."""
    m = window.module
    if why := unfit(m):
        return why
    if {id(p) for p in m.parameters()} != {id(r.param) for r in window.records}:
        return "its parameters are not those that it was streamed with"
    if getattr(window.inner, "__func__", None) is not LINEAR:
        return "it has a forward of its own put in"
    if any(hf_calls.hooks_of([m])) or _has_any_global_hook():
        return "there are hooks on it"
    if type(hidden) is not Tensor or hidden.dim() < 2 or hidden.dtype != m.weight.dtype or not hidden.numel():
        return "its input is no [..., H] tensor of the weights' type"
    if casts(hidden.device.type, hidden.dtype):
        return "autocast is on"
    return "" if hidden.requires_grad or window.trainable else "nothing needs a gradient"


# ---- which rows of the logits a tensor has, and what was done to each number of them ----------------

Pick = tuple[list[int], list[int], int]     # shape, strides and offset, in rows


def vocabulary_dim(form: Tensor, v: int) -> int | None:
    """The dimension along which a row of v logits lies, while `form` is made of whole rows. Operations are followed
    from whole rows to whole rows only, so that everything else is a multiple of v."""
    mine = [d for d in range(form.dim()) if form.shape[d] == v > 1 and form.stride(d) == 1]
    return mine[0] if len(mine) == 1 and form.numel() else None


class Curve(NamedTuple):
    """What was done to each logit x: scale * (x + shift), or cap * tanh(scale * (x + shift)). shift: [V], or None for
    zero. cap: None: no soft cap. normal: log_softmax was taken of it since."""

    scale: float = 1.0
    cap: float | None = None
    shift: Tensor | None = None
    normal: bool = False

    def shifted(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The head's bias [V] with the shift."""
        if self.shift is None:
            return bias
        shift = self.shift.to(weight.dtype)
        return shift if bias is None else bias + shift


# ---- one call of the head --------------------------------------------------------------------------

class Logits:
    """One call of the head: what its output is made from, if it must be.

    Attributes:
        hidden: [..., H], with its history; None once the weights have moved on, since then nothing can be made of it.
        weight, bias: records of the plain Linear that the head is at the call. It may be another before its logits are
            made, or backward.
        value: the output [..., V], once it was made; without history.
        fused: a loss was computed without making it.
        watched: the user asked for gradients of logits, so that losses must go by way of them.
        brief: nobody keeps values beyond the step: detach() needs none, and a mean of them is no reason to make them.
        use: that of the made logits' gradient.
        born: what was derived from the output, weakly.
    """

    def __init__(self, head: Head, window: Window, hidden: Tensor) -> None:
        self.head, self.device, self.rows = head, hidden.device, hidden.shape[:-1].numel()
        self.hidden: Tensor | None = hidden
        self.window = window                 # logits may be read when the model is gone
        records = {id(r.param): r for r in window.records}
        named = {name: records[id(p)] for name, p in window.module.named_parameters()}
        self.weight, self.bias = named["weight"], named.get("bias")
        self.hidden_version, self.versions = hidden._version, window.versions()
        self.value: Tensor | None = None
        self.fused = self.watched = self.brief = False
        self.use: Use | None = None
        self.born: list[weakref.ref[DeferredLogits]] = []

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """weight [V, H] and bias [V] in the slots; the unit is fetched if need be."""
        window = self.window
        bound = dict(zip(window.records, window.views(window.records)))
        return bound[self.weight], None if self.bias is None else bound[self.bias]

    def check(self) -> None:
        """Hidden states and weights are those of the call."""
        name = self.window.name
        if self.window.versions() != self.versions:
            raise MegatrainError(
                f"{name}: these logits were not made when the model ran, and its weights have changed since: "
                "use logits before optimizer.step(), or stream with compute='eager'")
        if self.hidden._version != self.hidden_version:
            raise MegatrainError(f"{name}: its input was changed in place before its logits were made; "
                                 "stream with compute='eager'")

    def made(self, reader: str) -> Tensor:
        """The output's values: [..., V], by what the head's own code was at the call, a plain Linear's."""
        if torch.is_grad_enabled() and self.use is None and in_backward() == -1:
            self.use = Use(self.window.trainable)        # a gradient may come by way of the values
        if self.value is None:
            self.check()
            if not self.fused:
                self.head.declined = f"its logits are read by {reader}"
            with torch.no_grad(), _exactly(self.device):
                self.value = F.linear(self.hidden.detach(), *self.weights())
        return self.value


def _exactly(device: torch.device) -> torch.autocast:
    """Without autocast: the head was called without, or with one that changes nothing."""
    return torch.autocast(device.type, enabled=False)


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
        _ = ctx.saved_tensors                # torch's own error for a graph that was given back
        logits = ctx.logits
        logits.check()
        hidden, dhidden, found = logits.hidden.detach(), None, {}
        with _exactly(hidden.device):
            rows, grad = hidden.reshape(-1, hidden.shape[-1]), grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[1]:
                dhidden = (grad @ logits.weights()[0]).view(hidden.shape)
            if logits.weight in ctx.records:
                found[logits.weight] = grad.t() @ rows
            if logits.bias in ctx.records:
                found[logits.bias] = grad.sum(0)
        if not graph_stays():
            ctx.logits = None                           # and what was made of them; this object lives as the loss does
        return None, dhidden, *logits.window.runtime.handover.take(
            ctx.records, logits.use, accumulators(ctx), tuple([found[r] for r in ctx.records]))


# ---- its output, and what is made of that ----------------------------------------------------------

class DeferredLogits(Tensor):
    """Logits [..., V], or something made from them row by row, without memory. Form is free: shape, type, device,
    strides, requires_grad. Values are made when they are asked for. Pickles and copies as the ordinary tensor."""

    _logits: Logits
    _form: Tensor                       # on the meta device: shape, type, strides and offset in its memory
    _rows: tuple[Pick, ...]             # which of the head's rows lie in that memory
    _curve: Curve
    _step: tuple[Any, ...] | None       # (from what, operation, arguments); None: the head's own output
    _values: Tensor | None
    traced = True                       # may torch.compile trace what meets it?

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
        return cls.above(func, args, kwargs or {})

    @staticmethod
    def above(func: Any, args: Any, kwargs: Any) -> Any:
        """Operations as Python calls them, above autograd."""
        meet = _MET.get(func)
        if meet is not None and (out := meet(*args, **kwargs)) is not None:
            return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        follow = _FOLLOWED.get(func)
        if follow is not None and type(args[0]) is cls and args[0]._values is None \
                and (out := follow(args[0], func, args[1:], kwargs)) is not None:
            return out
        # On the real tensors, below autograd, which records it for the deferred ones.
        deferred = [a for a in tree_leaves((args, kwargs)) if isinstance(a, cls)]
        reader = str(func.overloadpacket)
        if func._schema.is_mutable:          # values of all that was derived, before one of them is written in place
            for born in [ref() for d in deferred for ref in d._logits.born]:
                if born is not None:
                    born.values(reader)
        args, kwargs = tree_map(lambda a: a.values(reader) if isinstance(a, cls) else a, (args, kwargs))
        out = func(*args, **kwargs)
        return next((d for d in deferred if out is d._values), out)

    def values(self, reader: str) -> Tensor:
        """The real tensor, without history. reader: for whom, in words."""
        made = self._logits.made(reader)            # in any case: it may be the first reader who differentiates
        if self._step is None:
            self._values = made
        elif self._values is None:
            source, func, args, kwargs = self._step
            self._values = func(source.values(reader), *args, **kwargs)
        return self._values

    def kept(self, reader: str) -> Tensor:
        """The real tensor for somebody who does not differentiate it."""
        with torch.no_grad():
            return self.values(reader)

    def derived(self, form: Tensor, step: tuple[Any, ...], curve: Curve | None = None) -> DeferredLogits | None:
        """What an operation makes of it: a view where `form` has the same memory, else a copy of its rows."""
        dim = vocabulary_dim(form, self.vocabulary)
        if dim is None:
            return None
        rows = self._rows
        if form.untyped_storage()._cdata != self._form.untyped_storage()._cdata:
            rows = self.picked(sorted((d for d in range(form.dim()) if d != dim), key=lambda d: (-form.stride(d), d)))
        return DeferredLogits(self._logits, form, rows, curve or self._curve, step)

    def picked(self, order: list[int]) -> tuple[Pick, ...]:
        """Which of the head's rows it has, in the order of these dimensions."""
        form, v = self._form, self.vocabulary
        shape, strides = [form.shape[d] for d in order], [form.stride(d) // v for d in order]
        before = math.prod(self._rows[-1][0]) if self._rows else self._logits.rows
        dense = torch.empty(shape, device="meta").stride()
        every = math.prod(shape) == before and all(a == b or n == 1 for a, b, n in zip(strides, dense, shape))
        return self._rows if every else (*self._rows, (shape, strides, form.storage_offset() // v))

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


# ---- operations that are followed ----

def _view(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    forms = func(d._form, *args, **kwargs)
    if isinstance(forms, Tensor):
        return d.derived(forms, (d, func, args, kwargs))
    outs = [d.derived(form, (d, lambda *a, i=i, **k: func(*a, **k)[i], args, kwargs)) for i, form in enumerate(forms)]
    return None if any(out is None for out in outs) else outs


def _copy(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """clone, contiguous, float(). Rounding to fewer bits is left to the real logits."""
    dtype, device = kwargs.get("dtype") or d.dtype, kwargs.get("device")
    if dtype not in (d.dtype, torch.float32) or (device is not None and device != d.device):
        return None
    form = func(d._form, *args, **{k: v for k, v in kwargs.items() if k != "device"})
    return d.derived(form, (d, func, args, kwargs))


def _times(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    number = args[0]
    if d._curve.normal or not isinstance(number, (int, float)) or not math.isfinite(number) or number == 0:
        return None
    curve, factor = d._curve, number if func is aten.mul.Tensor else 1 / number
    more = {"scale": curve.scale * factor} if curve.cap is None else {"cap": curve.cap * factor}
    return d.derived(torch.empty_like(d._form), (d, func, args, kwargs), curve._replace(**more))


def _tanh(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    if d._curve.cap is not None or d._curve.normal:
        return None
    return d.derived(torch.empty_like(d._form), (d, func, args, kwargs), d._curve._replace(cap=1.0))


def _add(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """A bias that is added outside of the head (BART's)."""
    t, curve = args[0], d._curve
    if kwargs or curve.scale != 1 or curve.cap is not None or curve.shift is not None or curve.normal \
            or type(t) is not Tensor or t.requires_grad or t.device != d.device:
        return None
    if t.numel() != d.vocabulary or t.dim() > d.dim() or t.shape[-1:] != d.shape[-1:] \
            or torch.result_type(t, d._form) != d.dtype:
        return None
    t = t.clone()                                       # it may be changed before the loss
    return d.derived(torch.empty_like(d._form), (d, func, (t,), kwargs), Curve(shift=t.reshape(-1)))


def _log_softmax(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    dim, wide = args
    if d._curve.normal or vocabulary_dim(d._form, d.vocabulary) != dim % max(d.dim(), 1):
        return None
    return d.derived(torch.empty_like(d._form, dtype=torch.float32 if wide else d.dtype), (d, func, args, kwargs),
                     d._curve._replace(normal=True))


def _mean(d: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Of all numbers, where it is a figure to be shown: rows at a time."""
    logits, classes, (scale, cap, *_) = d._logits, vocabulary_dim(d._form, d.vocabulary), d._curve
    if not logits.brief or kwargs or d._curve.normal or classes is None \
            or (torch.is_grad_enabled() and d.requires_grad):
        return None
    logits.check()
    with torch.no_grad(), _exactly(d.device):
        weight, bias = logits.weights()
        bias, total = d._curve.shifted(weight, bias), torch.zeros((), dtype=torch.float64, device=d.device)
        rows, _ = _picked(logits.hidden.detach(), d.picked([i for i in range(d.dim()) if i != classes]))
        for some in rows.split(chunk_tokens(weight.shape[0], weight.element_size())):
            x = F.linear(some, weight, bias)
            x = x if cap is None else x.mul_(scale).tanh_()          # fp32 copies are more than a loss has
            total += x.sum(dtype=torch.float32) * (scale if cap is None else cap)
            del x                                        # before the next ones are made
        return (total / d.numel()).to(d.dtype)


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
    aten._log_softmax.default: _log_softmax,
    aten.mean.default: _mean,
}


# ---- the loss --------------------------------------------------------------------------------------

def _picked(hidden: Tensor, picks: tuple[Pick, ...]) -> tuple[Tensor, Tensor | None]:
    """Rows [picked, H] of hidden [..., H], and which they are: [picked] int64, None: all, in order."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if not picks:
        return rows, None
    index = torch.arange(rows.shape[0], device=rows.device)
    for shape, strides, offset in picks:
        index = index.as_strided(shape, strides, index.storage_offset() + offset).reshape(-1).contiguous()
    return rows.index_select(0, index), index


def _losses(logits: Logits, curve: Curve, picks: tuple[Pick, ...], labels: Tensor, hidden: Tensor,
            wanted: tuple[bool, bool, bool], **options: Any) -> tuple[Tensor, Tensor | None, dict[Any, Tensor | None]]:
    """Of the picked rows of hidden [..., H]: the loss, the gradient of all of hidden, and the weights', by records."""
    with _exactly(hidden.device):
        weight, bias = logits.weights()
        rows, index = _picked(hidden, picks)
        loss, dhidden, dweight, dbias = linear_cross_entropy(
            rows, weight, labels, curve.shifted(weight, bias),
            softcap=0.0 if curve.cap is None else abs(curve.cap),
            logit_scale=curve.scale * (1.0 if curve.cap is None else curve.cap), wanted=wanted, **options)
        if dhidden is not None and index is not None:
            dhidden = dhidden.new_zeros(hidden.shape[:-1].numel(), hidden.shape[-1]).index_copy_(0, index, dhidden)
    return loss, None if dhidden is None else dhidden.view(hidden.shape), {logits.weight: dweight, logits.bias: dbias}


@in_sight
class Loss(torch.autograd.Function):
    """Hidden states and host parameters in, the loss out; its gradients are made here and now. With reduction="none" it
    is the loss of each picked row, [picked] fp32. Backward then makes logits again, in chunks: only there it is known
    by what each row's gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, curve: Curve, picks: tuple[Pick, ...], labels: Tensor,
                options: dict[str, Any], hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.window, ctx.records = logits.window, logits.window.trainable
        ctx.use = Use(ctx.records) if in_backward() == -1 else None
        later = options["reduction"] == "none"
        wanted = (hidden.requires_grad, logits.weight in ctx.records, logits.bias in ctx.records)
        ctx.again = (logits, curve, picks, wanted, options) if later else None
        loss, dhidden, found = _losses(logits, curve, picks, labels, hidden, (False,) * 3 if later else wanted,
                                       **options)
        ctx.save_for_backward(*([labels] if later else [dhidden, *(found[r] for r in ctx.records)]))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        if ctx.again is not None:
            logits, curve, picks, wanted, options = ctx.again
            logits.check()
            _, dhidden, found = _losses(logits, curve, picks, saved[0], logits.hidden.detach(), wanted,
                                        each=grad.float().contiguous(), **options)
            saved = dhidden, *(found[r] for r in ctx.records)
            if not graph_stays():
                ctx.again = None                        # and the hidden states
        else:                                           # in place where nobody will ask for them again
            times = torch.mul if graph_stays() else Tensor.mul_
            saved = [None if g is None else times(g, grad) for g in saved]
        return None, None, None, None, None, saved[0], *ctx.window.runtime.handover.take(
            ctx.records, ctx.use, accumulators(ctx), tuple(saved[1:]))


def _unread(input: Any, labels: Any, normal: bool) -> bool:
    """Are these logits, or log p where `normal`, that nobody has made yet, or wants to, and that a gradient may go
    through? And are labels integers?"""
    return isinstance(input, DeferredLogits) and torch.is_grad_enabled() and input.requires_grad \
        and input._logits.value is None and not input._logits.watched and input._curve.normal == normal \
        and type(labels) is Tensor and labels.dtype == torch.int64


def _loss(input: DeferredLogits, classes: int, labels: Tensor, **options: Any) -> Tensor:
    logits = input._logits
    logits.check()
    picks = input.picked([i for i in range(input.dim()) if i != classes])
    labels = labels.to(input.device, non_blocking=True).reshape(-1).contiguous()
    loss = Loss.apply(logits, input._curve, picks, labels, options, logits.hidden, *logits.window.params)
    logits.fused = True
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


def cross_entropy(input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
                  reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor | None:
    """`F.cross_entropy` of deferred logits, or None where the real ones are needed."""
    legacy = size_average is not None or reduce is not None
    if weight is not None or legacy or reduction not in ("mean", "sum", "none") or not _unread(input, target, False):
        return None
    shape = list(input.shape)
    classes = 0 if len(shape) == 1 else 1
    del shape[classes]
    if list(target.shape) != shape or vocabulary_dim(input._form, input.vocabulary) != classes:
        return None
    loss = _loss(input, classes, target, ignore_index=ignore_index, reduction=reduction,
                 label_smoothing=label_smoothing)
    return loss.view(shape) if reduction == "none" else loss


NO_LABEL = -2**63                    # is ignored by none: gather, unlike cross_entropy, has no such label


def gather(input: Any, dim: Any, index: Any, **options: Any) -> Tensor | None:
    """`torch.gather` of one label's log p in each row, or None where the real logits are needed."""
    if not _unread(input, index, True) or options or type(dim) is not int:
        return None
    classes, shape = vocabulary_dim(input._form, input.vocabulary), list(input.shape)
    if classes is None or dim not in (classes, classes - len(shape)) or list(index.shape) != [
            1 if d == classes else n for d, n in enumerate(shape)]:
        return None
    loss = _loss(input, classes, index, reduction="none", ignore_index=NO_LABEL)
    return -loss.view(index.shape).to(input.dtype)       # autocast leaves gather alone


# ---- functions that are met above autograd ----

def _detach(self: DeferredLogits) -> Tensor | None:
    """For whoever keeps values: they are made now, while the weights are there."""
    return None if self._logits.brief else self.kept("detach()").detach()


def _as_real(func: Any) -> Callable[..., Any]:
    """Functions that look at memory."""
    name = f"{func.__name__}()"
    return lambda self, *args, **kwargs: func(self.kept(name), *args, **kwargs)


def _watched(self: Any, *_: Any, **__: Any) -> None:
    """Somebody wants the gradient of logits: losses go by way of them, unless one has been computed without."""
    for d in tree_leaves(self):
        if isinstance(d, DeferredLogits):
            if d._logits.fused:
                raise MegatrainError(f"{d._logits.window.name}: the loss was computed without making the logits, "
                                     "so they have no gradient; stream with compute='eager'")
            d._logits.watched = True


_T = Tensor
_MET: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    **dict.fromkeys((_T.gather, torch.gather), gather),
    **dict.fromkeys((_T.detach, torch.detach, _T.data.__get__), _detach),
    **{f: _as_real(f) for f in (_T.numpy, _T.tolist, _T.__array__, _T.__dlpack__, _T.data_ptr, _T.untyped_storage)},
    **dict.fromkeys((_T.register_hook, _T.retain_grad), _watched),
    torch.autograd.grad: lambda outputs, inputs, *_, **__: _watched(inputs),
}
