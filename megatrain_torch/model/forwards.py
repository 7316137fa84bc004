"""Forwards of one streamed model, from its outermost streamed module on: what is looked at before, what begins."""
from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from ..graph import hf_calls
from ..graph.door import Door, Untraced
from ..graph.handover import HandOver
from ..graph.swap import Swap
from ..graph.window import Window
from ..store.guard import take_back
from ..store.planes import Planes
from ..store.records import Record
from ..store.state import enter, in_backward, leave
from . import hf
from .delivery import Delivery
from .keeps import Keeps
from .reads import Reads
from .saves import Saves
from .trained import Trained


class Model(hf.Streamed, Protocol):
    """The streamed model that is run: runtime.Runtime."""

    core: _core.Engine
    is_cuda: bool
    door: Door
    records: list[Record]
    handover: HandOver
    swap: Swap
    planes: Planes
    delivery: Delivery
    reads: Reads
    saves: Saves
    trained: Trained
    keeps: Keeps
    broken: str
    trace: Untraced

    @property
    def windows(self) -> list[Window]: ...

    def itself(self) -> Any: ...


class Forwards:
    """
    Attributes:
        check_tree: looks at what was put into the model since the last pass, and refuses parameters that do not stream.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.check_tree: Callable[[Any], None] = lambda model: None
        self._root: weakref.ref[Any] | None = None       # the module that began the pass under way
        self._backward_seen = False
        self._told_unlocked = False                      # the user knows that host memory could not be locked

    @contextlib.contextmanager
    def entered(self, who: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Around a container's forward; the outermost streamed forward begins a pass."""
        model = self._model
        takes = model.door.enter(in_backward())
        begins = enter() and in_backward() == -1
        try:
            if begins:
                with hf_calls.spared(model.windows), model.keeps.memory():
                    yield self.begin(who, args, kwargs)
            else:
                yield args, kwargs
        finally:
            leave()
            if begins:
                model.reads.forget()
                model.keeps.forward_ends()
            if takes:
                model.door.leave()

    def begin(self, who: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A root forward starts; its inputs come to the compute device."""
        self._look()
        if self._backward_seen or self._root is None or self._root() in (who, None):
            self._root, self._backward_seen = weakref.ref(who), False
            self._start(args, kwargs)
        model = self._model
        return (to_device(args, model.device), to_device(kwargs, model.device)) if model.is_cuda else (args, kwargs)

    def backward_began(self) -> None:
        """The next root forward begins another pass, whichever module it is of."""
        self._backward_seen = True

    def _look(self) -> None:
        """What went wrong, and what the user changed, since the last root forward."""
        model = self._model
        model.core.check()
        if model.broken:
            raise MegatrainError(model.broken)
        model.saves.look()
        self.warn_unlocked()
        hf.before_pass(model)
        self.check_tree(model.itself())
        self.notice()
        if torch.is_grad_enabled():
            model.keeps.look()

    def notice(self) -> None:
        """What the user changed on parameters: values, and requires_grad."""
        take_back(r.param for r in self._model.records if r.param is not None)      # of a step that broke off
        self._model.planes.notice_writes(self._model.records)
        self._model.trained.look()

    def _start(self, args: Any, kwargs: Any) -> None:
        """What the pass before has left is let go."""
        model = self._model
        model.handover.sweep()
        model.door.tasks.clear()
        model.handover.let_go()
        model.handover.opened = 0
        model.swap.sweep()
        for r in model.records:
            r.uses = 0
        model.reads.forget()
        if model.planning is not None and torch.is_grad_enabled():
            model.planning.pass_begins(args, kwargs)
        model.trace.pass_begins()
        model.delivery.look()
        model.core.begin(model.delivery.begins())

    def warn_unlocked(self) -> None:
        """Says once that the driver cannot lock all host memory, as soon as that is known."""
        if self._told_unlocked:
            return
        nbytes, why = self._model.core.unlocked()
        if nbytes:
            self._told_unlocked = True
            warnings.warn(
                f"{show_bytes(nbytes)} of host memory, and what comes after, could not be locked for the GPU ({why}). "
                "Copies of it go through a small buffer: the same results, slower. To lock more: a larger `ulimit -l` "
                "or memory limit of the container; under WSL2, more memory for Windows, which allows about half of "
                "its own; or less to lock: fewer parameters, or units at home in VRAM", stacklevel=4)


def to_device(value: Any, device: torch.device) -> Any:
    """Inputs of a forward, with their tensors on the device; the same object where nothing had to move."""
    if isinstance(value, Tensor):
        return value if value.device == device or value.is_meta else value.to(device, non_blocking=True)
    if isinstance(value, dict):
        moved = {k: to_device(v, device) for k, v in value.items()}
        same = all(moved[k] is v for k, v in value.items())
        if same or type(value) is not dict:
            for k, v in moved.items():
                value[k] = v
            return value
        return moved
    if type(value) in (list, tuple):
        return type(value)(to_device(v, device) for v in value)
    return value
