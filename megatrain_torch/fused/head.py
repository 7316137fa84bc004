"""The window of a head: which module makes a model's logits, and whether they may be left unmade."""
from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..base.units import output_embeddings
from .deferred import Defer, Logits
from .head_loss import keep_from_tracing
from .layer import casts
from .runner import Runner

if TYPE_CHECKING:
    from ..graph.window import Window

# fp16 is left out: gradients of a mean over many tokens fall below its smallest number, and the scale of
# a GradScaler is known only in backward. fp64 is nobody's choice for speed.
TYPES = (torch.float32, torch.bfloat16)
LINEAR = nn.Linear.forward


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
    window.head = None if window.unfit else Head(window, module)


class Head(Runner):
    """What the window of a head knows of deferring.

    Attributes:
        declined: why the last call's logits were made after all; "" when they were not.
    """

    def __init__(self, window: Window, module: nn.Linear) -> None:
        super().__init__(window)
        self.by_param = {id(r.param): r for r in window.records}
        self.declined = ""
        self.calls: weakref.WeakSet[Logits] = weakref.WeakSet()
        self.read()

    def read(self) -> None:
        """Is it the plain Linear that was streamed?"""
        m = self.module
        self.changed = unfit(m)
        named = {} if self.changed else dict(m.named_parameters())
        if not self.changed and {id(p) for p in named.values()} != set(self.by_param):
            self.changed = "its parameters are not those that it was streamed with"
        elif not self.changed and getattr(self.window.inner, "__func__", None) is not LINEAR:
            self.changed = "it has a forward of its own put in"
        if not self.changed:
            self.weight = self.by_param[id(named["weight"])]
            self.bias = self.by_param[id(named["bias"])] if "bias" in named else None

    def __call__(self, args: Any, kwargs: Any) -> Tensor | None:
        """Deferred logits, or None where the head's own code has to run."""
        hidden = args[0] if args else kwargs.get("input")
        self.read()
        self.declined = self._why_not(hidden)
        if self.declined:
            return None
        keep_from_tracing()
        for earlier in self.calls:
            earlier.let_go()
        logits = Logits(self, hidden)
        self.calls.add(logits)
        return Defer.apply(logits, hidden, *self.window.params)

    def _why_not(self, hidden: Any) -> str:
        m = self.module
        if self.changed:
            return self.changed
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks \
                or _has_any_global_hook():
            return "there are hooks on it"
        if type(hidden) is not Tensor or hidden.dim() < 2 or hidden.dtype != self.weight.dtype or not hidden.numel():
            return "its input is no [..., H] tensor of the weights' type"
        if casts(hidden.device.type, hidden.dtype):
            return "autocast is on"
        if not (hidden.requires_grad or self.window.trainable):
            return "nothing needs a gradient"
        return ""
