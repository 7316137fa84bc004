"""What other people's code meets while a model is streamed: Accelerate's clip_grad_norm_ where mt.AdamW makes the step,
and steps of other optimizers over streamed parameters.

torch's clip_grad_norm_ reads all gradients on the host, multiplies them there, and has the caller wait for both, in
every step; Trainer calls it for the norm alone too. mt.AdamW has the norm from the device, and clips as it updates.
So where the gradients are those of one prepared mt.AdamW, the limit is passed on to its next step, and the norm is a
tensor that waits when it is read. In all other cases Accelerate's own code runs.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..base import patches
from ..store.guard import StreamedParameter, take_back


def clips(kind: type[torch.optim.Optimizer]) -> None:
    """Once accelerate is imported, for as long as a model is streamed. kind: mt.AdamW."""
    cls = getattr(sys.modules.get("accelerate"), "Accelerator", None)

    def patch() -> Callable[[], None]:
        own = cls.clip_grad_norm_

        @functools.wraps(own)
        def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            optimizers = [o.optimizer for o in self._optimizers]
            # Is it certain which optimizer makes the next step?
            certain = len(optimizers) == 1 and self.sync_gradients and self.scaler is None
            if norm_type == 2 and max_norm > 0 and certain and isinstance(optimizers[0], kind) \
                    and optimizers[0].clips_alone(parameters):
                return optimizers[0].clip_next(float(max_norm))
            return own(self, parameters, max_norm, norm_type)

        return patches.replaced(cls, "clip_grad_norm_", clip_grad_norm_)

    if cls is not None:
        patches.once("Accelerator.clip_grad_norm_", patch)


def watch(ours: type[torch.optim.Optimizer]) -> None:
    """Steps of all optimizers, for as long as a model is streamed. ours: mt.AdamW."""
    before = _disable_dynamo(functools.partial(_before, ours))       # a step that is compiled traces its hooks too
    patches.once("before optimizers' steps", lambda: register_optimizer_step_pre_hook(before).remove)
    behind = _disable_dynamo(lambda optimizer, *_: take_back([p for g in optimizer.param_groups for p in g["params"]]))
    patches.once("behind optimizers' steps", lambda: register_optimizer_step_post_hook(behind).remove)


def _before(ours: type, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Another's optimizer gets ordinary parameters to write as it likes; not where its closure runs the model."""
    if isinstance(optimizer, ours):
        return
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, StreamedParameter)]
    if type(optimizer).__module__.startswith("torch.optim."):
        # States that were moved to a device come back; other people's optimizers may have theirs there on purpose.
        for states in [found for p in params if (found := optimizer.state.get(p))]:
            for name, value in states.items():
                if isinstance(value, Tensor) and not value.is_cpu:
                    states[name] = value.to("cpu")
    if any(a is not None for a in (*args[1:], *kwargs.values())):
        return
    for p in params:
        if type(p) is StreamedParameter and (grad := p.grad) is not None:       # which is there from now on
            del grad
            p._mt.runtime.planes.before_write(p._mt)
            p.__class__ = torch.nn.Parameter
