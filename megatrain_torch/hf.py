"""What transformers' models need so that their own code runs unchanged.

- `PreTrainedModel.device` says where to put inputs (generate, Trainer): the compute device.
- Hooks that collect outputs (attentions, router logits) stay installed once they were asked for: they are
  told from others, and do not count while nothing is collected.
- `gradient_checkpointing_enable()` means "recompute": windows do that themselves, so the model's own
  checkpointing, which would run the layer a third time, is switched off and windows replay.
"""
from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import masks, patches
from .errors import MegatrainError

if TYPE_CHECKING:
    from .runtime import Runtime


def prepare(rt: Runtime, root: nn.Module, put: Any) -> None:
    transformers = sys.modules.get("transformers")
    rt.checkpointing = [weakref.ref(m) for m in root.modules()
                        if isinstance(getattr(m, "gradient_checkpointing", None), bool)]
    base = getattr(getattr(transformers, "modeling_utils", None), "PreTrainedModel", None)
    if base is None:
        return
    patches.once("PreTrainedModel.device", lambda: _report_compute_device(base))
    masks.install()
    for m in root.modules():
        if isinstance(m, base):
            put(m, "resize_token_embeddings", _refuse_resize)


def _refuse_resize(*_: Any, **__: Any) -> Any:
    raise MegatrainError("resize_token_embeddings() after mt.stream: resize first, then stream")


def _report_compute_device(base: Any) -> Callable[[], None]:
    own = base.device

    def device(self: Any) -> torch.device:
        from .wrap import find_runtime
        streamed = "_apply" in self.__dict__     # of itself alone: torch.compile guards all that this looks at
        rt = find_runtime(self) if streamed else None
        return rt.device if rt is not None else own.fget(self)

    return patches.replaced(base, "device", property(device, doc=own.__doc__))


def hooked(hooks: list[dict[int, Any]]) -> bool:
    """Is there a hook among these, inside a window, that would do something now?"""
    if not any(hooks):
        return False
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None or any(getattr(h, "__module__", "") != capturing.__name__ for d in hooks for h in d.values()):
        return True
    return any(key not in ("hidden_states", "_hidden_states_layers") for key in collector.get() or ())


def empty_entry(cache: Any, layer: int) -> bool:
    """Is this a cache that only gathers keys and values, with none yet for this layer?"""
    module = sys.modules.get("transformers.cache_utils")
    if module is None or type(cache) is not module.DynamicCache or cache.offloading:
        return False
    if layer >= len(cache.layers):           # they are made as they are filled
        return cache.layer_class_to_replicate is module.DynamicLayer
    entry = cache.layers[layer]
    return (type(entry) in (module.DynamicLayer, module.DynamicSlidingWindowLayer) and not entry.is_initialized
            and not getattr(entry, "record_past", False))


def before_pass(rt: Runtime) -> None:
    """Called as a root forward begins."""
    for ref in rt.checkpointing:
        m = ref()
        if m is not None and m.gradient_checkpointing:
            m.gradient_checkpointing = False
            if rt.planning is not None:      # which says what is run again
                continue
            rt.activations = "replay"
            for w in rt.windows:
                w.mode = "saved" if w.draws_unseen else "replay"
