"""What is put into a streamed model after mt.stream: parameters that do not stream are refused at the next pass."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..base.errors import MegatrainError
from ..store.state import BoundParameters, Given
from .registry import note, runtimes
from .runtime import Runtime

_registrations = 0


def _count_registration(module: nn.Module, *_: Any) -> None:
    """Something was put into a module: of a streamed model, the next pass looks what."""
    global _registrations
    if torch.compiler.is_compiling():        # a plain model's graph would be guarded against the lives of others
        return
    if module in runtimes:
        _registrations += 1


def count_registrations() -> Callable[[], None]:
    """From now on, until what this returns is called."""
    handles = [nn.modules.module.register_module_parameter_registration_hook(_count_registration),
               nn.modules.module.register_module_module_registration_hook(_count_registration)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class Tree:
    """The modules of one streamed model."""

    def __init__(self, root: nn.Module) -> None:
        self._root, self._seen = weakref.ref(root), _registrations

    def look(self, rt: Runtime) -> None:
        """A pass begins.

        Raises:
            MegatrainError: a parameter was put in, or the model into DistributedDataParallel.
        """
        if rt.ranks is None and nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise MegatrainError("DistributedDataParallel over a streamed model is not supported: its reducer would "
                                 "see no gradients; run one process with one streamed model")
        root = self._root()
        if self._seen == _registrations or root is None:     # None: a part of it is all that is left
            return
        for name, p in _in_their_places(root):
            if getattr(p, "_mt", None) is None or p._mt.runtime is not rt:
                raise MegatrainError(f"parameter {name!r} was put into the model after mt.stream: "
                                     "change the model first (get_peft_model, load_adapter, new heads), then stream "
                                     "it; SFTTrainer(peft_config=...) changes it too late, and DPOTrainer adds an "
                                     "adapter of its own to LoRA: make the trainer first there")
        _bind_anew(rt, root)
        self._seen = _registrations


def _in_their_places(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by name, without what functional_call has put there."""
    given = {id(m._parameters[n]) for m in root.modules() if isinstance(m._parameters, BoundParameters)
             for n, r in m._parameters.records.items() if type(r) is Given}
    for name, p in root.named_parameters():
        if id(p) not in given or isinstance(p, nn.Parameter):
            yield name, p


def _bind_anew(rt: Runtime, root: nn.Module) -> None:
    """Modules were put in: parameters that moved into them (parametrizations), or changed names, are streamed there."""
    for m in root.modules():
        note(m, rt)
        records = {n: p._mt for n, p in m._parameters.items() if hasattr(p, "_mt")}
        if isinstance(m._parameters, BoundParameters):
            m._parameters.bind(records)
        elif records:
            m.__dict__["_parameters"] = BoundParameters(m._parameters, records)
    for window in rt.windows:
        window.look()
