"""Accelerate's clip_grad_norm_, and so Trainer's max_grad_norm, where mt.AdamW makes the step: it clips.

torch's own function reads all gradients on the host, multiplies them there, and has the caller wait for both, in
every step; Trainer calls it for the norm alone too. mt.AdamW has the norm from the device, and clips as it updates.
So where the gradients are those of one prepared mt.AdamW, the limit is passed on to its next step, and the norm is a
tensor that waits when it is read. In all other cases Accelerate's own code runs.
"""
from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base import patches


class Late(Tensor):
    """A number that is known when a step's gradients have landed; what is done with it waits until then."""

    def settle(self) -> None:
        """It is known from now on."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for a in (*args, *kwargs.values()):
            for late in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(late, Late):
                    late.settle()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class LateNorm(Late):
    """[] fp32: the norm of a step's gradients."""

    _find: Callable[[], float] | None

    def settle(self) -> None:
        find, self._find = self._find, None
        if find is not None:
            value = find()                   # reads gradients: their guards must be on
            with torch._C.DisableTorchFunctionSubclass():
                self.fill_(value)

    @staticmethod
    def of(find: Callable[[], float]) -> LateNorm:
        out = torch.zeros(()).as_subclass(LateNorm)
        out._find = find
        return out


def fill(norm: weakref.ref[LateNorm] | None) -> None:
    """Its value is there from now on, if somebody has it."""
    alive = None if norm is None else norm()
    if alive is not None:
        alive.settle()


def prepare(kind: type[torch.optim.Optimizer]) -> None:
    """Once accelerate is imported, for as long as a model is streamed. kind: mt.AdamW."""
    cls = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if cls is not None:
        patches.once("Accelerator.clip_grad_norm_", lambda: _patch(cls, kind))


def _patch(cls: Any, kind: type[torch.optim.Optimizer]) -> Callable[[], None]:
    own = cls.clip_grad_norm_

    @functools.wraps(own)
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        opt = _prepared(self, kind) if norm_type == 2 and max_norm > 0 else None
        if opt is None or not opt.clips_alone(parameters):
            return own(self, parameters, max_norm, norm_type)
        return opt.clip_next(float(max_norm))

    return patches.replaced(cls, "clip_grad_norm_", clip_grad_norm_)


def _prepared(accelerator: Any, kind: type[torch.optim.Optimizer]) -> Any:
    """The mt.AdamW that will make the next step, if that is certain."""
    optimizers = [o.optimizer for o in accelerator._optimizers]
    certain = len(optimizers) == 1 and accelerator.sync_gradients and accelerator.scaler is None
    return optimizers[0] if certain and isinstance(optimizers[0], kind) else None
