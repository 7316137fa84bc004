"""Optimizers and their states in other hands: states that somebody writes, replaces, or moves to the GPU, and
optimizers of other people over streamed parameters.

What stands in `opt.state` is what an update uses. mt.AdamW's moments lie in the store, and its dicts show them. What is
put in their place is copied into the store before the next step; a tensor on a device at once, since Lightning moves
all states that it loads to its own. States of torch's optimizers come back before the next step; other people's may
have theirs on the GPU on purpose.
"""
from __future__ import annotations

import functools
import weakref
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
from ..base.errors import MegatrainError
from ..store.guard import StreamedParameter, plain, take_back
from ..store.records import Record
from .clipping import Late


class StepCount(Late):
    """[] fp32: steps taken. A step that is skipped counts until the gradients are home: who reads it waits for them."""

    _find: weakref.WeakMethod[Callable[[], None]]

    @staticmethod
    def of(find: Callable[[], None]) -> StepCount:
        """find: a method that takes back what was skipped; its object is not kept alive."""
        out = torch.zeros(()).as_subclass(StepCount)
        out._find = weakref.WeakMethod(find)
        return out

    def settle(self) -> None:
        find = self._find()
        if find is not None:
            find()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle()
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self.settle()
        return plain(self).clone()


def count_of(step: Any, name: str) -> int:
    """state["step"] as a number, whatever somebody wrote there.

    Raises:
        MegatrainError: it is no number of steps.
    """
    with torch._C.DisableTorchFunctionSubclass():
        value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(value, (int, float)) or not 0 <= value < 1 << 53 or value != int(value):
        raise MegatrainError(f"{name}: its state has step={value!r}: bias correction takes a whole number, 0 or more")
    return int(value)


class StoreStates(dict[str, Any]):
    """State of a streamed parameter. As long as `own` stands there, an update reads and writes it."""

    def __init__(self, record: Record, own: dict[str, Tensor]) -> None:
        super().__init__(own)
        self.record, self.own = record, own

    def reset(self) -> None:
        """The store's own again, of which no step was taken."""
        self.clear()
        self.update(self.own)
        self.own["step"].zero_()

    def are_own(self, record: Record) -> bool:
        return record is self.record and all(self.get(name) is t for name, t in self.own.items())

    def __setitem__(self, name: str, value: Any) -> None:
        own = self.own.get(name)
        if isinstance(value, Tensor) and not value.is_cpu and own is not None and own.shape == value.shape:
            with torch.no_grad():
                value = own.copy_(value)
        super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def watch(ours: type[torch.optim.Optimizer]) -> None:
    """For as long as a model is streamed. ours: mt.AdamW."""
    before = _disable_dynamo(functools.partial(_before, ours))       # a step that is compiled traces its hooks too
    patches.once("before optimizers' steps", lambda: register_optimizer_step_pre_hook(before).remove)
    patches.once("behind optimizers' steps",
                 lambda: register_optimizer_step_post_hook(_disable_dynamo(_behind)).remove)


def _before(ours: type, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Another's optimizer gets ordinary parameters, which it may write as it likes, and give to torch.compile; but for
    a closure's step, in which the model runs."""
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, StreamedParameter)]
    if isinstance(optimizer, ours):
        return
    if type(optimizer).__module__.startswith("torch.optim."):
        _bring_home(optimizer, params)
    if any(a is not None for a in (*args[1:], *kwargs.values())):
        return
    for p in params:
        if type(p) is StreamedParameter and (grad := p.grad) is not None:       # which is there from now on
            del grad
            p._mt.runtime.planes.before_write(p._mt)
            p.__class__ = torch.nn.Parameter


def _behind(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    take_back([p for group in optimizer.param_groups for p in group["params"]])


def _bring_home(optimizer: torch.optim.Optimizer, params: list[StreamedParameter]) -> None:
    for states in [found for p in params if (found := optimizer.state.get(p))]:
        for name, value in states.items():
            if isinstance(value, Tensor) and not value.is_cpu:
                states[name] = value.to("cpu")
