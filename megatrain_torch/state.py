"""Where this thread is: inside which window, how deep in streamed forwards."""
from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

in_backward = torch._C._current_graph_task_id     # -1 outside of backward; for the thread that runs it


class _State(threading.local):
    """window: pid -> slot tensor of the innermost open window. depth: open streamed forwards."""

    window: dict[int, Tensor] | None = None
    depth: int = 0


state = _State()


class BoundParameters(dict):
    """A module's `_parameters`, in which attribute reads see the slot.

    `Module.__getattr__` reads through `[name]`; `named_parameters`, `state_dict` and `_apply` go
    through `.items()` and see the host parameters. Inside a window the slot's tensor is returned,
    inside a container's forward or a backward a lazy copy, elsewhere the host parameter.
    Pickles and copies as a plain dict.
    """

    __slots__ = ("records",)

    def __init__(self, items: dict[str, Any], records: dict[str, Any]) -> None:
        super().__init__(items)
        self.records = records

    def __getitem__(self, name: str) -> Any:
        record = self.records.get(name)
        if record is None:
            return dict.__getitem__(self, name)
        window = state.window
        if window is not None:
            bound = window.get(record.pid)
            if bound is not None:
                return bound
        elif not state.depth and in_backward() == -1:
            return dict.__getitem__(self, name)
        return record.runtime.lazy(record)

    def __setitem__(self, name: str, value: Any) -> None:
        record = self.records.get(name)
        if record is not None and value is not record.param:
            del self.records[name]
        dict.__setitem__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


class HostBuffers(dict):
    """A module's `_buffers`: on the compute device while streamed, copied and pickled as host tensors."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        items = {k: b.cpu() if isinstance(b, Tensor) else b for k, b in self.items()}
        return dict, (), None, None, iter(items.items())
