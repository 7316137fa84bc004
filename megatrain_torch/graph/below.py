"""The modules of a window, and what they have besides parameters: buffers, and lists that recurrent layers read."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Below:
    """Some modules of a window, in order; the window's own, which comes first, weakly: it has the window.

    Attributes:
        inside: the others.
    """

    __slots__ = ("_top", "inside")

    def __init__(self, top: nn.Module, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self.inside = tuple(m for m in modules if m is not top)
        self._top = weakref.ref(top) if len(self.inside) < len(modules) else None

    def __iter__(self) -> Iterator[nn.Module]:
        if self._top is not None:
            yield self._top()
        yield from self.inside

    def __bool__(self) -> bool:
        return self._top is not None or bool(self.inside)


def snapshot_buffers(modules: Below) -> list[tuple[nn.Module, str, Any, Any]]:
    """(module, name, tensor, copy of its values): BatchNorm writes without leaving a trace in `_version`."""
    if not modules:
        return []
    with torch.no_grad():
        return [(m, k, b, b.clone() if isinstance(b, Tensor) else None)
                for m in modules for k, b in m._buffers.items()]


def restore_buffers(modules: Below, snapshot: list[tuple[nn.Module, str, Any, Any]]) -> list[Any]:
    """Puts values back that have changed; returns what was there."""
    if not snapshot:
        return []
    now = snapshot_buffers(modules)
    with torch.no_grad():
        for m, k, b, values in snapshot:
            m._buffers[k] = b
            if isinstance(b, Tensor):
                with torch.autograd._unsafe_preserve_version_counter(b):
                    b.copy_(values)
    return now


@contextlib.contextmanager
def flat_weights(recurrent: Below) -> Iterator[None]:
    """nn.LSTM and its kin read a list made when the module was built: made again from the slots.

    Where the list is not of the weights that they read, they put those into one buffer for cuDNN, in place. Without
    gradients these are the slot's own tensors, which would be of that buffer from then on, whatever comes into the
    slot: so others, of the same memory, are put there.
    """
    before = [(m, m._flat_weights, m._flat_weight_refs) for m in recurrent]
    for m, *_ in before:
        weights = m._flat_weights = [getattr(m, n) for n in m._flat_weights_names]
        if not torch.is_grad_enabled():
            m._flat_weight_refs = [weakref.ref(w) for w in weights]
            m._flat_weights = [w.detach() for w in weights]
            m.flatten_parameters()
    try:
        yield
    finally:
        for m, weights, refs in before:
            m._flat_weights, m._flat_weight_refs = weights, refs
