"""Weights read outside their window: a tensor that costs nothing until it is used.

`F.linear(x, embedding.weight)` in a container's forward, CLIP's `logit_scale`, or a mere
`.dtype`: the read gives a wrapper that knows shape, dtype and device, and that the first operation
replaces by a copy on the compute device, in fresh memory (one operation may need weights of two
units). The copy's gradient is handed over as a window's is.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .guard import _META
from .records import Record, Use
from .state import in_backward


class Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: Record, param: Tensor) -> Tensor:
        ctx.record = record
        ctx.use = Use([record]) if in_backward() == -1 else None
        return record.runtime.reads.copy(record)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        record = ctx.record
        return None, *record.runtime.handover.take([record], ctx.use, [ctx.next_functions[-1][0]], (grad,))


class Lazy(Tensor):
    """A streamed parameter read outside its window: [shape] on the compute device, fetched on first use."""

    _record: Record
    _value: Tensor | None

    @staticmethod
    def __new__(cls, record: Record) -> Lazy:
        wanted = record.trainable and torch.is_grad_enabled()
        out = Tensor._make_wrapper_subclass(
            Lazy if wanted else Quiet, record.shape, strides=record.stride, dtype=record.dtype,
            device=record.runtime.device, requires_grad=wanted)
        out._record, out._value = record, None
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _META:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        read = [(lazy, lazy.fetch()) for lazy in _among((*args, *kwargs.values()))]
        versions = [value._version for _, value in read]
        out = _on_values(func, args, kwargs)
        _keep(lazy for (lazy, value), version in zip(read, versions) if value._version != version)
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = _on_values(func, args, kwargs)
        if func._schema.is_mutable:          # versions are counted above
            said = func._schema.arguments
            given = [*zip(said, args), *((s, kwargs[s.name]) for s in said if s.name in kwargs)]
            _keep(_among(v for s, v in given if s.alias_info is not None and s.alias_info.is_write))
        return out

    @property
    def grad(self) -> Tensor | None:
        """The parameter's: a hook reads and sets it in the middle of a backward."""
        return self._record.param.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._record.param.grad = value

    @grad.deleter
    def grad(self) -> None:
        self._record.param.grad = None

    @property
    def data(self) -> Tensor:
        """The same without gradients: what is changed of it in place is changed of the weights."""
        with torch.no_grad():
            return self._record.runtime.reads.lazy(self._record)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._record.param.data = value

    def fetch(self) -> Tensor:
        """The weights on the compute device; tied to the parameter where autograd records."""
        if self._value is None:
            record = self._record
            if torch.is_grad_enabled() and record.trainable:
                self._value = Fetch.apply(record, record.param)
            else:
                self._value = record.runtime.reads.copy(record).requires_grad_(record.trainable)
        return self._value


class Quiet(Lazy):
    """One that needs no gradient: its first use is met below autograd, so that torch.overrides.has_torch_function says
    of it what it says of a parameter. torch's modules ask that before they take a fast path."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*_fetched(args), **{k: _fetched((v,))[0] for k, v in kwargs.items()})


def _keep(changed: Iterable[Lazy]) -> None:
    """An operation changed their values in place."""
    for lazy in changed:
        lazy._record.runtime.planes.keep_write(lazy._record, lazy.fetch())


def _among(values: Any) -> Iterator[Lazy]:
    for v in values:
        if isinstance(v, Lazy):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _among(v)


def _fetched(values: Any) -> tuple[Any, ...]:
    out = []
    for v in values:
        if isinstance(v, Lazy):
            out.append(v.fetch())
        elif isinstance(v, (list, tuple)) and any(isinstance(x, Lazy) for x in v):
            out.append(type(v)(_fetched(v)))
        else:
            out.append(v)
    return tuple(out)

