"""Weights that are read outside of their window, while a forward or a backward is under way."""
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .. import _core
from ..graph.frames import check_version
from ..graph.window import refuse_functorch
from ..store.records import Record
from ..store.state import LazyParameter, in_backward
from .homes import Homes
from .ring import Ring


class Model(Protocol):
    """The streamed model whose weights these are: runtime.Runtime."""

    core: _core.Engine
    device: torch.device
    homes: Homes
    ring: Ring
    unit_names: list[str]


class Reads:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._read: dict[Record, Tensor] = {}

    def lazy(self, record: Record) -> Tensor:
        """What a read gives, the same each time: the weights are fetched when something is done with it."""
        found = self._read.get(record)
        if found is None:
            if record.trainable:
                refuse_functorch(record.name)
            whole = record.whole
            found = LazyParameter.of(record) if whole is None else whole.of([self.copy(r) for r in whole.records])
            self._read[record] = found
        return found

    def keep_writes(self) -> None:
        """What was changed in place of weights that were read, by views of them and by `.data` too, is changed of the
        parameters: before a window sees those, and when a forward or a backward is over."""
        for t in self._read.values():
            if isinstance(t, LazyParameter) and t._version != t.kept:
                t.keep_write()

    def forget(self) -> None:
        """A forward or a backward is over. What was read in it has a history, which holds the parameters, which hold
        the model: a cycle that no collector sees."""
        if self._read:
            self.keep_writes()
            self._read.clear()

    def fetch(self, record: Record, version: int) -> Tensor:
        """As `copy`, for a weight that a forward read when its unit was of this version.

        Raises:
            RuntimeError: a backward asks for it first, and the unit was updated since.
        """
        if in_backward() != -1:
            check_version(self._model, record.unit, version)
        return self.copy(record)

    def copy(self, record: Record) -> Tensor:
        """The parameter's current weights in fresh memory on the compute device."""
        model = self._model
        if model.homes.away(record.unit):
            return model.ring.view(record.unit, record.offset, record.dtype, record.shape, record.stride).clone()
        model.core.wait_updates(record.unit)
        with torch.no_grad():
            return record.host.to(model.device, copy=True)
