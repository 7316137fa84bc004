"""The loss of deferred logits, computed without making them; and what else is met before autograd sees it.

`F.cross_entropy`, where transformers' losses and most others end, is given loss and gradients by
`loss.linear_cross_entropy`, in chunks of tokens. It is met above autograd, so that its gradient goes by way of

    Loss    hidden states and weights in, the loss out; gradients are made in forward

which hands weight gradients over as a window does (handover.py).
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ..base.errors import MegatrainError
from ..store.records import Use
from ..store.state import graph_stays, in_backward, in_sight
from .deferred import DeferredLogits, Logits, exactly, hand_over
from .loss import linear_cross_entropy
from .picks import Curve, Pick, numbers, pick_of, vocabulary_dim


@in_sight
class Loss(torch.autograd.Function):
    """Hidden states and host parameters in, the loss out; its gradients are made here and now."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, curve: Curve, picks: tuple[Pick, ...], labels: Tensor,
                options: dict[str, Any], hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.window, ctx.records = logits.window, logits.window.trainable
        ctx.use = Use(ctx.records) if in_backward() == -1 else None
        wanted = (hidden.requires_grad, logits.weight in ctx.records, logits.bias in ctx.records)
        with exactly(hidden.device):
            loss, *grads = _loss(logits, curve, picks, labels, options, hidden, wanted)
        found = dict(zip((logits.weight, logits.bias), grads[1:]))
        ctx.save_for_backward(grads[0], *(found[r] for r in ctx.records))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = ctx.saved_tensors
        if graph_stays():
            grads = [None if g is None else g * grad for g in grads]
        else:                                           # nobody will ask for them again
            for g in grads:
                if g is not None:
                    g.mul_(grad)
        return None, None, None, None, None, grads[0], *hand_over(ctx, ctx.window, ctx.use, grads[1:])


def _loss(logits: Logits, curve: Curve, picks: tuple[Pick, ...], labels: Tensor, options: dict[str, Any],
          hidden: Tensor, wanted: tuple[bool, bool, bool]
          ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss of the picked rows of hidden [..., H]; the gradient is hidden's whole."""
    weight, bias = logits.weights()
    if curve.shift is not None:
        shift = curve.shift.to(weight.dtype)
        bias = shift if bias is None else bias + shift
    rows = hidden.reshape(-1, hidden.shape[-1])
    index = numbers(picks, rows)
    cap = 0.0 if curve.cap is None else abs(curve.cap)
    loss, dhidden, dweight, dbias = linear_cross_entropy(
        rows if index is None else rows.index_select(0, index), weight, labels, bias, softcap=cap,
        logit_scale=curve.scale * (1.0 if curve.cap is None else curve.cap), wanted=wanted, **options)
    if index is not None and dhidden is not None:
        dhidden = torch.zeros_like(rows).index_copy_(0, index, dhidden)
    return loss, None if dhidden is None else dhidden.view(hidden.shape), dweight, dbias


def cross_entropy(input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
                  reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor | None:
    """`F.cross_entropy` of deferred logits, or None where the real ones are needed."""
    legacy = size_average is not None or reduce is not None
    if weight is not None or legacy or reduction not in ("mean", "sum"):
        return None
    if not isinstance(input, DeferredLogits) or not torch.is_grad_enabled() or not input.requires_grad:
        return None
    logits = input._logits
    if logits.value is not None or logits.watched:      # they are there, or wanted: they are used
        return None
    shape = list(input.shape)
    classes = 0 if len(shape) == 1 else 1
    del shape[classes]
    if type(target) is not Tensor or target.dtype != torch.int64 or list(target.shape) != shape \
            or vocabulary_dim(input._form, input.vocabulary) != classes:
        return None
    logits.check()
    order = [i for i in range(input.dim()) if i != classes]
    picks = input.picked(pick_of(input._form, input.vocabulary, order))
    options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    labels = target.to(input.device, non_blocking=True).reshape(-1).contiguous()
    loss = Loss.apply(logits, input._curve, picks, labels, options, logits.hidden, *logits.window.params)
    logits.fused = True
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


# ---- functions that are met above autograd ----

def _detach(self: DeferredLogits) -> Tensor:
    """For whoever keeps values: they are made now, while the weights are there."""
    return self.kept("detach()").detach()


def _as_real(func: Any) -> Callable[..., Any]:
    """Functions that look at memory."""
    name = f"{func.__name__}()"
    return lambda self, *args, **kwargs: func(self.kept(name), *args, **kwargs)


def _watched(self: Any, *_: Any, **__: Any) -> None:
    """Somebody wants the gradient of logits: losses go by way of them, unless one has been computed without."""
    for d in tree_leaves(self):
        if isinstance(d, DeferredLogits):
            if d._logits.fused:
                raise MegatrainError(f"{d._logits.head.window.name}: the loss was computed without making the logits, "
                                     "so they have no gradient; stream with compute='eager'")
            d._logits.watched = True


_T = Tensor
_MET: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    **dict.fromkeys((_T.detach, torch.detach, _T.data.__get__), _detach),
    **{f: _as_real(f) for f in (_T.numpy, _T.tolist, _T.__array__, _T.__dlpack__, _T.data_ptr, _T.untyped_storage)},
    **dict.fromkeys((_T.register_hook, _T.retain_grad), _watched),
    torch.autograd.grad: lambda outputs, inputs, *_, **__: _watched(inputs),
}


def _above_autograd(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations as Python calls them."""
    meet = _MET.get(func)
    if meet is not None:
        out = meet(*args, **kwargs)
        if out is not None:
            return out
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


DeferredLogits._above = staticmethod(_above_autograd)


def keep_from_tracing() -> None:
    """A loss of the user's may be compiled: what happens in here is not for torch.compile to trace."""
    if DeferredLogits._above is _above_autograd and "torch._dynamo" in sys.modules:
        DeferredLogits._above = staticmethod(torch._dynamo.disable(_above_autograd))
