"""Optimizer states that somebody moves to the GPU: they belong where their parameter is.

Lightning moves all states that it loads to its device, as if every parameter were there. mt.AdamW's are the store's:
what is put in their place is copied into it. Those of torch's optimizers come back before the next step; other people's
may have theirs on the GPU on purpose.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..base import patches
from ..store.guard import StreamedParameter


class StoreStates(dict[str, Any]):
    """State of a parameter whose tensors are views of the store: `states[name] = tensor` copies into the view."""

    def __setitem__(self, name: str, value: Any) -> None:
        own = self.get(name)
        if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
            with torch.no_grad():
                own.copy_(value)
        else:
            super().__setitem__(name, value)


def watch() -> None:
    """For as long as a model is streamed."""
    patches.once("optimizers' steps", lambda: register_optimizer_step_pre_hook(_bring_home).remove)


def _bring_home(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if isinstance(p, StreamedParameter):
            states = optimizer.state.get(p)
            if states:
                for name, value in states.items():
                    if isinstance(value, Tensor) and not value.is_cpu:
                        states[name] = value.to("cpu")
