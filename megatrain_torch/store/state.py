"""What this thread sees when it reads a weight: inside which window, inside which forward."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._core import WindowDict, enter, inside, leave, swap_window
from .guard import OneParameter

in_backward = torch._C._current_graph_task_id     # -1 outside of backward; for the thread that runs it
graph_stays = torch._C._autograd._get_current_graph_task_keep_graph      # retain_graph, of the backward under way


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Meanwhile the outermost forward, no window of which is open, has not begun: modules give their parameters."""
    within = inside()
    if within:
        leave()
    try:
        yield
    finally:
        if within:
            enter()


class BoundParameters(WindowDict):
    """A module's `_parameters`, in which attribute reads see the slot.

    `Module.__getattr__` reads through `[name]`; `named_parameters`, `state_dict` and `_apply` go
    through `.items()` and see the host parameters. Inside a window the slot's tensor is returned,
    inside a container's forward or a backward a lazy copy, elsewhere the host parameter.
    Pickles and copies as a plain dict.

    Something else in the place of a streamed parameter (torch.func.functional_call) is what reads see then, on the
    compute device in a forward; the parameter that comes back is streamed as before.

    Attributes:
        records: by name; Given where something else is there. own: what belongs there.
    """

    __slots__ = ("own", "records")

    def __init__(self, items: dict[str, Any], records: dict[str, Any]) -> None:
        super().__init__(items)
        self.records, self.own = dict(records), records

    def outside(self, record: Any, parameter: Any) -> Any:
        """A read that no open window answers."""
        if not inside() and in_backward() == -1:
            return parameter
        if type(record) is not Given:
            return record.runtime.read(record)
        there = record.own.runtime.device
        return parameter if parameter.device == there else parameter.to(there)

    def __setitem__(self, name: str, value: Any) -> None:
        own = self.own.get(name)
        if own is not None:
            self._leave(name)
            if value is own.param or _stands_for(own, value):
                self.records[name], value = own, own.param
            else:
                self.records[name] = Given(own)
                own.runtime.given += 1
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)
        self._leave(name)

    def _leave(self, name: str) -> None:
        before = self.records.pop(name, None)
        if type(before) is Given:
            before.own.runtime.given -= 1

    def bind(self, records: dict[str, Any]) -> None:
        """Further streamed parameters were put into it."""
        for name, record in records.items():
            if name not in self.own:
                self.own[name] = self.records[name] = record

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


class Given:
    """In the place of a record: the parameter's place has something else."""

    __slots__ = ("own",)

    def __init__(self, own: Any) -> None:
        self.own = own


def _stands_for(record: Any, value: Any) -> bool:
    """Is it what a read in a forward gave for this parameter? Or, of codes, a tensor of their package over the same
    memory (PEFT's DoRA puts `weight.to(weight.device)` there)?"""
    if isinstance(value, OneParameter):
        return value._mt is record
    window = swap_window(None)
    swap_window(window)
    bound = window and window.get(record)
    return bound is not None and type(value) is type(bound) and value.data_ptr() == bound.data_ptr()


class HostBuffers(dict):
    """A module's `_buffers`: on the compute device while streamed, copied and pickled as host tensors."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        items = {k: b.cpu() if isinstance(b, Tensor) else b for k, b in self.items()}
        return dict, (), None, None, iter(items.items())


__all__ = ["BoundParameters", "Given", "HostBuffers", "enter", "graph_stays", "in_backward", "inside", "leave",
           "paused", "swap_window"]
