"""`weight.data` in a module's own forward.

A weight's tensor in a slot is a plain one, and no version counter tells what is done to its `.data` in place. So where
code of a window names it, the window's tensors are of a class whose `.data` shares their counter: what a forward
changes so is kept, or refused in backward, as any other change of its weights.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..base.errors import MegatrainError
from .effects import function_of, functions_of, named_by

_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()      # functions that name it


class Bound(Tensor):
    """A weight in a slot."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise MegatrainError(f".data of shape {list(value.shape)} {value.dtype} in a module's own forward does not "
                                 f"fit its streamed weight of shape {list(self.shape)} {self.dtype}")
        with torch.no_grad():
            self.copy_(value)


PLAIN = (Tensor, Bound)                      # types of tensors that have memory and no behaviour of their own


def shown(tensors: Iterable[Any]) -> list[Tensor]:
    """Of weights in slots those that are plain tensors: they are of that class until they are hidden."""
    found = [t for t in tensors if type(t) is Tensor]
    for t in found:
        t.__class__ = Bound
    return found


def hide(tensors: Iterable[Tensor]) -> None:
    for t in tensors:
        t.__class__ = Tensor


def is_named(kinds: Iterable[type], calls: Iterable[Callable[..., Any]]) -> bool:
    """Does code of these classes, or of these functions, name `data`? What it calls by name is looked into."""
    return any(map(_class_names, kinds)) or any(map(_names, calls))


def _names(call: Any) -> bool:
    fn = function_of(call)
    if fn is not None and fn not in _known:
        _known[fn] = "data" in named_by(fn)
    return fn is not None and _known[fn]


@cache
def _class_names(kind: type) -> bool:
    return any(map(_names, functions_of(kind)))
