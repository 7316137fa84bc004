"""Several sequences behind one another in one row, told apart by positions that start again: no mask of [T, T].

transformers finds such rows by their position_ids, and gives every layer a mask in which each sequence sees itself:
at 64k tokens 4 GiB of it. Where layers run by templates that mask need not exist: a stand-in on the meta device is
handed to the model instead (a mask of four dimensions is passed on as it is), which knows the sequences' lengths; a
template's attention goes by these. A layer that runs its own code is given the real mask after all.

Only in training, for a row without padding, with use_cache=False (with a cache transformers takes the row for one
sequence), in models without sliding windows; else the model's mask is made.
"""
from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .runtime import Runtime

MASK = "attention_mask"


@dataclass(frozen=True)
class Packed:
    """lengths: of the sequences. cu: [n + 1] int32, where they begin, and the end; on the compute device."""

    lengths: tuple[int, ...]
    cu: Tensor

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device) -> Packed:
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return Packed(lengths, cu.to(device, non_blocking=True))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def stand_in(self) -> Tensor:
        """A mask that is none. Whatever reads it fails, as it is on no device."""
        tokens = sum(self.lengths)
        return _marked(torch.empty(1, 1, tokens, tokens, dtype=torch.bool, device="meta"), self)

    def mask(self, dtype: torch.dtype | None) -> Tensor:
        """The real one, [1, 1, T, T]: True where a token sees; as a number to add where dtype is given."""
        device = self.cu.device
        number = torch.repeat_interleave(torch.tensor(self.lengths)).to(device)
        seen = (number[:, None] == number).tril()[None, None]
        if dtype is not None:
            seen = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
        return _marked(seen, self)


def _marked(mask: Tensor, packed: Packed) -> Tensor:
    mask.mt_packed = packed
    return mask


def packed_of(mask: Any) -> Packed | None:
    """What a mask of ours says; None: it is the model's."""
    return getattr(mask, "mt_packed", None)


def example(mask: Tensor, tokens: int, dtype: torch.dtype | None) -> Tensor:
    """A mask like it, for so many tokens, in sequences of several lengths."""
    packed = packed_of(mask)
    lengths = tuple(n for n in (1, tokens // 2, tokens - 1 - tokens // 2) if n)
    return Packed.of(lengths, packed.cu.device).mask(dtype)


def dense(kwargs: Any, config: Any, dtype: torch.dtype) -> Any:
    """The arguments of a layer that runs its own code: with the real mask."""
    packed = packed_of(kwargs.get(MASK))
    if packed is None or not kwargs[MASK].is_meta:
        return kwargs
    return {**kwargs, MASK: packed.mask(dtype if adds(config) else None)}


def adds(config: Any) -> bool:
    """Is a mask added to the logits?"""
    return getattr(config, "_attn_implementation", None) == "eager"


def prepare(rt: Runtime, root: nn.Module, kwargs: Any) -> Any:
    """Arguments of a forward, with the stand-in where sequences are packed and layers have templates."""
    if not torch.is_grad_enabled() or kwargs.get(MASK) is not None or kwargs.get("position_ids") is None:
        return kwargs
    if not any(w.fused is not None and w.fused.template.swaps and not w.fused.verdict for w in rt.windows):
        return kwargs
    if _caches(root, kwargs) or not _plain(root) or MASK not in inspect.signature(type(root).forward).parameters:
        return kwargs
    lengths = lengths_of(kwargs["position_ids"])
    return {**kwargs, MASK: Packed.of(lengths, rt.device).stand_in()} if len(lengths) > 1 else kwargs


def _caches(root: nn.Module, kwargs: Any) -> bool:
    """With a key-value cache transformers takes a row for one sequence."""
    asked = kwargs.get("use_cache")
    return kwargs.get("past_key_values") is not None or bool(
        getattr(getattr(root, "config", None), "use_cache", False) if asked is None else asked)


def _plain(root: nn.Module) -> bool:
    """A model whose layers all see what came before in their sequence, and that reads its mask for nothing else."""
    config = getattr(root, "config", None)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    others = ("output_router_logits", "sliding_window", "attention_chunk_size")
    return kinds == {"full_attention"} and not any(getattr(config, name, None) for name in others) \
        and not any(getattr(m, "sliding_window", None) for m in root.modules())


def lengths_of(positions: Tensor) -> tuple[int, ...]:
    """Of the sequences in one row: a new one begins where a position does not follow the one before. () for anything
    else than [1, T] integers. On the device: waits for them."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] != 1 \
            or positions.dtype not in (torch.int64, torch.int32):
        return ()
    row = positions[0]
    starts = (torch.nonzero(row.diff() != 1).flatten() + 1).tolist()
    ends = [0, *starts, row.shape[0]]
    return tuple(b - a for a, b in pairwise(ends))
