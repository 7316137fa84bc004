"""What transformers' models need so that their own code runs unchanged.

- `PreTrainedModel.device` says where to put inputs (generate, Trainer): the compute device.
- Hooks that collect outputs (attentions, router logits) stay installed once they were asked for: they are
  told from others, and do not count while nothing is collected.
- `gradient_checkpointing_enable()` means "recompute": windows do that themselves, so the model's own
  checkpointing, which would run the layer a third time, is switched off. What a plan says of activations counts
  (mt.stream's own, mt.plan's, a dict given by hand); windows of which none says anything replay.
"""
from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..base import patches
from ..base.coded import Coded
from ..base.errors import MegatrainError
from ..graph import hf_calls
from ..store.guard import HostTensor
from .keeps import Keeps

_devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = weakref.WeakKeyDictionary()     # where they compute


class Streamed(Protocol):
    """A streamed model, as far as transformers has to do with it: runtime.Runtime."""

    device: torch.device
    keeps: Keeps
    planning: Any
    checkpointing: list[weakref.ref[nn.Module]]


def prepare(rt: Streamed, root: nn.Module, put: Any) -> None:
    transformers = sys.modules.get("transformers")
    rt.checkpointing = [weakref.ref(m) for m in root.modules()
                        if isinstance(getattr(m, "gradient_checkpointing", None), bool)]
    base = getattr(getattr(transformers, "modeling_utils", None), "PreTrainedModel", None)
    if base is None:
        return
    patches.once("PreTrainedModel.device", lambda: _report_compute_device(base))
    hf_calls.install()
    _save_torchaos()
    for m in root.modules():
        if isinstance(m, base):
            _devices[m] = rt.device
            put(m, "resize_token_embeddings", _refuse_resize)
            if any(isinstance(p, Coded) for p in m.parameters()):
                put(m, "save_pretrained", _refuse_saving)


def _save_torchaos() -> None:
    """torchao's save_pretrained takes plain tensors and its own, and nothing else."""
    quantizer = sys.modules.get("transformers.quantizers.quantizer_torchao")
    own = getattr(quantizer, "flatten_tensor_state_dict", None)
    if own is not None:
        patches.once("flatten_tensor_state_dict", lambda: patches.replaced(
            quantizer, "flatten_tensor_state_dict",
            lambda tensors: own({k: t.clone() if type(t) is HostTensor else t for k, t in tensors.items()})))


def _refuse_saving(*_: Any, **__: Any) -> Any:
    raise MegatrainError("save_pretrained() knows no codes that stand for 16-bit weights: mt.save(model, None, folder) "
                         "writes them as they are published; a PeftModel's saves its adapter")


def _refuse_resize(*_: Any, **__: Any) -> Any:
    raise MegatrainError("resize_token_embeddings() after mt.stream: resize first, then stream")


def _report_compute_device(base: Any) -> Callable[[], None]:
    own = base.device

    def device(self: Any) -> torch.device:
        streamed = "_apply" in self.__dict__     # of itself alone: torch.compile guards all that this looks at
        return _devices[self] if streamed and self in _devices else own.fget(self)

    return patches.replaced(base, "device", property(device, doc=own.__doc__))


def before_pass(rt: Streamed) -> None:
    """Called as a root forward begins."""
    for ref in rt.checkpointing:
        m = ref()
        if m is not None and m.gradient_checkpointing:
            m.gradient_checkpointing = False
            if rt.planning is None and rt.keeps.default == "auto":     # else a plan says what is run again
                rt.keeps.default = "replay"
