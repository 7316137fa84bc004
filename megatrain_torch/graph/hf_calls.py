"""What transformers gives a layer's call besides its inputs: masks, caches of keys and values, hooks that collect.

For sliding windows, packed rows and "eager" attention transformers makes a mask of all pairs of tokens: at 64k tokens
4 GiB of it, twice that where it is added to logits. Where layers run by templates none need exist: in a forward that
wants gradients, transformers' mask functions give a stand-in (StandIn) for a mask that is causal, whole or within a
window, of one sequence or of packed ones. A template's attention goes by what it says (Sight). Whatever else uses it
as a tensor uses the real mask, which is made then.

Which mask is wanted is read from the functions that transformers composes for it; one that is not known (padding,
chunks, images' tokens) is made by transformers as ever.
"""
from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import patches
from ..base.packed import Packed

if TYPE_CHECKING:
    from .window import Window

KINDS = "sdpa", "eager"


@dataclass(frozen=True, eq=False)
class Sight:
    """A causal mask [rows, 1, tokens, tokens]: a token sees its sequence as far as itself.

    window: only so many tokens of it, itself the last; 0: all. packed: sequences of the one row; None: each row is one.
    added: the mask's type where it is added to logits; None: it is True where a token sees.
    """

    rows: int
    tokens: int
    device: torch.device
    window: int = 0
    packed: Packed | None = None
    added: torch.dtype | None = None

    @functools.cached_property
    def real(self) -> Tensor:
        """The mask itself, kept as long as this is: layers share it."""
        at = torch.arange(self.tokens, device=self.device)
        seen = at[:, None] >= at
        if self.window:
            seen &= at > at[:, None] - self.window
        if self.packed is not None:
            number = self.packed.numbers().to(self.device)
            seen &= number[:, None] == number
        seen = seen.expand(self.rows, 1, -1, -1)
        if self.added is None:
            return seen
        return torch.where(seen, torch.zeros((), device=self.device, dtype=self.added), torch.finfo(self.added).min)


class StandIn(Tensor):
    """Has a mask's shape, type and device, and no storage; the first operation on it makes the real mask."""

    sight: Sight
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, sight: Sight) -> StandIn:
        out = Tensor._make_wrapper_subclass(cls, (sight.rows, 1, sight.tokens, sight.tokens),
                                            dtype=sight.added or torch.bool, device=sight.device)
        out.sight = sight
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*dense(args), **dense(kwargs or {}))


def mapped(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """With fn(t) for each tensor t in tuples, lists and dicts. What has nothing new in it stays the object that it is:
    a layer may append to a list. A dict of a class of its own is changed in place."""
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind in (tuple, list):
        found = [mapped(v, fn) for v in value]
        return value if all(map(operator.is_, found, value)) else kind(found)
    if isinstance(value, dict):
        items = {k: mapped(v, fn) for k, v in value.items()}
        changed = {k: v for k, v in items.items() if v is not value[k]}
        if changed and kind is dict:
            return items
        for k, v in changed.items():
            value[k] = v
    return value


def dense(value: Any) -> Any:
    """With real masks: for a layer that runs its own code."""
    return mapped(value, lambda t: t.sight.real if isinstance(t, StandIn) else t)


def sight_of(mask: Any) -> Sight | None:
    """What a mask of ours says; None: it is the model's."""
    return getattr(mask, "sight", None) if isinstance(mask, Tensor) else None


def example(sight: Sight, tokens: int) -> Tensor:
    """A real mask like it for one row of so many tokens, which says what it is: in sequences of several lengths, with
    a window that shows."""
    lengths = tuple(n for n in (1, tokens // 2, tokens - 1 - tokens // 2) if n)
    packed = sight.packed and Packed.of(lengths, sight.device)
    like = Sight(1, tokens, sight.device, sight.window and min(sight.window, max(1, tokens // 4)), packed, sight.added)
    mask = like.real.clone()
    mask.sight = like
    return mask


# ---- transformers' mask functions ----------------------------------------------------------------

_now = threading.local()             # .spared: is a pass on whose masks may be stand-ins?


@contextlib.contextmanager
def spared(windows: Iterable[Window]) -> Iterator[None]:
    """Around a forward: its masks may be stand-ins, if layers have templates and gradients are wanted."""
    outer = getattr(_now, "spared", False)
    _now.spared = outer or (torch.is_grad_enabled() and any(
        w.fused is not None and w.fused.template.swaps and not w.fused.verdict for w in windows))
    try:
        yield
    finally:
        _now.spared = outer


def install() -> None:
    """transformers' functions for "sdpa" and "eager" ask here first; what others have put in their place, too."""
    interface = getattr(sys.modules.get("transformers.masking_utils"), "AttentionMaskInterface", None)
    for kind in KINDS if interface is not None else ():
        patches.once(f"{kind} masks", functools.partial(_patch, interface, kind))


def _patch(interface: Any, kind: str) -> Callable[[], None]:
    own, adds = interface()[kind], kind == "eager"

    @functools.wraps(own)
    def mask(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args or not getattr(_now, "spared", False):
            return own(*args, **kwargs)
        sight = _wanted(kwargs, adds)
        skipped = sight is not None and not (adds or sight.window or sight.packed)       # none is made of it
        return own(**kwargs) if sight is None or skipped else StandIn(sight)

    def undo() -> None:
        if interface()[kind] is mask:
            interface.register(kind, own)

    interface.register(kind, mask)
    return undo


def _wanted(asked: dict[str, Any], adds: bool) -> Sight | None:
    """The mask that a call asks for; None: it is not known."""
    tokens, given = asked.get("q_length"), asked.get("attention_mask")
    later = any(asked.get(k) for k in ("q_offset", "kv_offset", "use_vmap"))
    if later or tokens is None or tokens != asked.get("kv_length"):
        return None
    parts = list(_parts(asked.get("mask_function")))
    names, found = [name for name, _ in parts], dict(parts)
    if _CAUSAL not in found or found.keys() - _KNOWN or names.count(_WINDOW) > 1 or names.count(_PACKED) > 1:
        return None
    if _MOVED in found and _PACKED not in found:
        return None
    if given is not None and not (given.dim() == 2 and given.shape[1] == tokens and bool(given.all())):
        return None
    rows, device = asked["batch_size"], torch.device(asked["device"])
    packed = None
    if _PACKED in found:
        if found[_PACKED].shape[0] != 1 or rows != 1:
            return None
        packed = Packed.of(tuple(found[_PACKED][0].unique_consecutive(return_counts=True)[1].tolist()), device)
    window = found.get(_WINDOW, 0)
    return Sight(rows, tokens, device, 0 if window >= tokens else window, packed, asked["dtype"] if adds else None)


_CAUSAL = "causal_mask_function"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_MOVED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_KNOWN = {_CAUSAL: None, _MOVED: None, _WINDOW: "sliding_window", _PACKED: "packed_sequence_mask"}  # what each holds
_ALL = "and_masks.<locals>.and_mask"


def _parts(fn: Any) -> Iterator[tuple[str, Any]]:
    """(name, what it holds) of the functions whose conditions a mask's function joins."""
    name = getattr(fn, "__qualname__", "") if getattr(fn, "__module__", "") == "transformers.masking_utils" else ""
    held = dict(zip(fn.__code__.co_freevars, (c.cell_contents for c in fn.__closure__ or ()))) if name else {}
    # Within packed sequences (_MOVED) a window reaches as far as in the row.
    for part in held["mask_functions"] if name == _ALL else [held["mask_function"]] if name == _MOVED else []:
        yield from _parts(part)
    if name != _ALL:
        yield name, held.get(_KNOWN.get(name))


# ---- hooks that collect outputs, and caches ------------------------------------------------------

def hooks_of(modules: Iterable[torch.nn.Module]) -> list[dict[int, Any]]:
    return [d for m in modules
            for d in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)]


def hooked(hooks: list[dict[int, Any]]) -> bool:
    """Would a hook among these, which are there inside a window, do something now?"""
    name = _CAPTURING if _collector() is not None else None
    return any(getattr(h, "__module__", "") != name for d in hooks for h in d.values()) or collects()


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


@functools.cache
def is_cache(kind: type) -> bool:
    """Key-value caches of transformers, and what is made of them: objects that a layer writes into."""
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
