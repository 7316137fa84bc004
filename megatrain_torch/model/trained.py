"""Of which parameters there are gradients: the user says so by requires_grad, at any time."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .. import _core
from ..graph.exchange import Exchange
from ..graph.window import Window
from ..store.records import Record
from .homes import Homes


class Model(Protocol):
    """The streamed model whose parameters these are: runtime.Runtime."""

    core: _core.Engine
    records: list[Record]
    homes: Homes
    exchange: Exchange | None

    @property
    def windows(self) -> Sequence[Window]: ...


class Trained:
    def __init__(self, model: Model) -> None:
        self._model, self._told = model, False       # windows go by what the records say

    def look(self) -> None:
        """A pass begins. One that records nothing need not know: adapters are switched for it, and back before the
        backward of another."""
        if not self._told or torch.is_grad_enabled():
            self.follow()

    def follow(self) -> None:
        """Of which parameters there are gradients is as they say now."""
        model = self._model
        with torch._C.DisableTorchFunctionSubclass():
            trains = [(p := r.param) is not None and p.requires_grad for r in model.records]
        for r, on in zip(model.records, trains):
            if on != r.was_trainable:
                r.was_trainable = on
                model.homes.arrivals.dismiss(r.unit)
                model.core.set_trainable(r.unit, r.index, on)
                self._told = False
        if not self._told:
            for w in model.windows:
                w.split()
            for r in model.records if model.exchange is not None else ():
                if not model.exchange.hooks(r):
                    model.exchange.route(r)
            self._told = True
