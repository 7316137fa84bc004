"""autograd Functions of other packages that keep tensors where hooks of saved tensors do not see them.

bitsandbytes' products keep codes, scales and their input as attributes of `ctx`. A weight that lies in a slot would be
held there until backward: the slot's memory is left to it, and in the end the device has all weights. So, while a model
with such weights is streamed, what these Functions keep goes through `save_for_backward`; what they compute is theirs.
"""
from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..base import patches
from ..base.codes import Format, Keeps


class _Saved:
    """In the place of a tensor: the number of the saved one."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def keep_in_sight(formats: Iterable[Format]) -> None:
    """The Functions of these formats, for as long as there is a streamed model."""
    for keeps in dict.fromkeys(k for format in formats for k in format.keeps):
        module = importlib.import_module(keeps.module)
        patches.once(f"{keeps.module}.{keeps.name}", functools.partial(_put_in, module, keeps))


def _put_in(module: Any, keeps: Keeps) -> Any:
    holder = getattr(module, keeps.holder, None) or getattr(module.F, keeps.holder)
    return patches.replaced(module, keeps.name, seen(getattr(module, keeps.name), keeps, holder))


def seen(own: Any, keeps: Keeps, holder: type) -> Any:
    """own: the Function."""

    def forward(ctx: Any, a: Tensor, weight: Tensor, *args: Any) -> Any:
        out = own.forward(ctx, a, weight, *args)
        found: list[Tensor] = []
        if any(ctx.needs_input_grad):
            if not ctx.needs_input_grad[1]:
                vars(ctx).update((name, value) for name, value in keeps.unused if name in vars(ctx))
            vars(ctx).update({name: _take(value, found, holder) for name, value in vars(ctx).items()})
            ctx.save_for_backward(*found)
        if getattr(weight, "in_a_slot", False):
            for state in [x for x in args if isinstance(x, holder)]:
                _hand_back(state, weight, keeps.lent)
        return out

    def backward(ctx: Any, *grads: Any) -> Any:
        saved, kept = ctx.saved_tensors, dict(vars(ctx))
        vars(ctx).update({name: _give(value, saved, holder) for name, value in kept.items()})
        try:
            return own.backward(ctx, *grads)
        finally:
            vars(ctx).update(kept)

    return type(own.__name__, (own,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _hand_back(state: Any, weight: Any, names: tuple[str, ...]) -> None:
    """A module's state outlives the window; the weight is the window's."""
    for name in names:
        setattr(weight, name, getattr(state, name))
        setattr(state, name, None)


def _take(value: Any, found: list[Tensor], holder: type) -> Any:
    """The same without its tensors, which are added to `found`."""

    def number(t: Tensor) -> _Saved:
        found.append(t.detach().as_subclass(Tensor))
        return _Saved(len(found) - 1)

    return _replaced(value, Tensor, number, holder)


def _give(value: Any, saved: tuple[Tensor, ...], holder: type) -> Any:
    return _replaced(value, _Saved, lambda s: saved[s.number], holder)


def _replaced(value: Any, kind: type, by: Callable[[Any], Any], holder: type) -> Any:
    """The same with what is of that kind replaced, in tuples, lists and holders too."""
    if isinstance(value, kind):
        return by(value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, kind, by, holder) for v in value)
    if isinstance(value, holder):
        out = copy.copy(value)
        vars(out).update((k, _replaced(v, kind, by, holder)) for k, v in vars(value).items())
        return out
    return value


__all__ = ["keep_in_sight", "seen"]
