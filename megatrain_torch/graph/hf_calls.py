"""What transformers gives a layer's call besides its inputs: hooks that collect outputs, caches of keys and values."""
from __future__ import annotations

import sys
from typing import Any


def hooked(hooks: list[dict[int, Any]]) -> bool:
    """Is there a hook among these, inside a window, that would do something now?"""
    if not any(hooks):
        return False
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None or any(getattr(h, "__module__", "") != capturing.__name__ for d in hooks for h in d.values()):
        return True
    return any(key not in ("hidden_states", "_hidden_states_layers") for key in collector.get() or ())


def is_cache(value: Any) -> bool:
    """Key-value caches of transformers, and what is made of them: objects that a layer writes into."""
    return any(c.__module__.startswith("transformers") and "Cache" in c.__name__ for c in type(value).__mro__)


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
