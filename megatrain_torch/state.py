"""What this thread sees when it reads a weight: inside which window, inside which forward."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._core import WindowDict, enter, inside, leave, swap_window

in_backward = torch._C._current_graph_task_id     # -1 outside of backward; for the thread that runs it
graph_stays = torch._C._autograd._get_current_graph_task_keep_graph      # retain_graph, of the backward under way


class BoundParameters(WindowDict):
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

    def outside(self, record: Any, parameter: Any) -> Any:
        """A read that no open window answers."""
        if inside() or in_backward() != -1:
            return record.runtime.lazy(record)
        return parameter

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


__all__ = ["BoundParameters", "HostBuffers", "enter", "graph_stays", "in_backward", "inside", "leave", "swap_window"]
