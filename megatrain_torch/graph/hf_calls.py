"""What transformers gives a layer's call besides its inputs: hooks that collect outputs, caches of keys and values."""
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any


def hooked(hooks: list[dict[int, Any]]) -> bool:
    """Is there a hook among these, inside a window, that would do something now?"""
    if not any(hooks):
        return False
    name = _CAPTURING if _collector() is not None else None
    if any(getattr(h, "__module__", "") != name for d in hooks for h in d.values()):
        return True
    return collects()


def collects() -> bool:
    """Does transformers collect more of this thread's call than hidden states, which layers give back?"""
    collector = _collector()
    found = collector.get() if collector is not None else None
    return any(key not in ("hidden_states", "_hidden_states_layers") for key in found or ())


@contextlib.contextmanager
def collecting_nothing() -> Iterator[None]:
    """Where nothing but hidden states is collected: dynamo sees that nothing is, and no guard looks at it. Who uses
    what was read has to ask `collects`."""
    collector = None if collects() else _collector()
    if not hasattr(collector, "context_var"):
        yield
        return
    get, token = type(collector).get, collector.context_var.set(None)    # of this thread alone
    get._dynamo_marked_constant = True
    try:
        yield
    finally:
        del get._dynamo_marked_constant
        collector.context_var.reset(token)


_CAPTURING = "transformers.utils.output_capturing"


def _collector() -> Any:
    return getattr(sys.modules.get(_CAPTURING), "_active_collector", None)


def is_cache(value: Any) -> bool:
    """Key-value caches of transformers, and what is made of them: objects that a layer writes into."""
    return _is_caches(type(value))


@functools.cache
def _is_caches(kind: type) -> bool:
    return any(c.__module__.startswith("transformers") and "Cache" in c.__name__ for c in kind.__mro__)


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
