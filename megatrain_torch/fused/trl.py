"""TRL's losses: how each gets what it needs of the head, and how ORPO's and CPO's do without logits.

Both take cross entropy of a part of the model's logits, log p of labels of all, and means for their log. The first is
head.Loss, the second becomes head.Losses, and the third is computed rows at a time. TRL's other trainers project hidden
states themselves, a tile at a time, by a copy of the head's weight.
"""
from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from torch import Tensor, nn

from ..base import patches
from ..base.errors import MegatrainError
from .head import DeferredLogits

# Of ORPOTrainer and CPOTrainer, and the function that their modules import; seen in TRL 1.16.
FORWARD, LOGPS = "concatenated_forward", "selective_log_softmax"
OWN, ODDS, TILES = "", "odds", "tiles"
# By model, the trainer whose loss plans count (plans/cost.py) while it is there.
trainers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def loss_of(kind: Any) -> str:
    """Of a class of trainers: ODDS, two uses of the model's logits; TILES, a head of TRL's; OWN, the model's loss."""
    if not isinstance(kind, type):
        raise MegatrainError(f"trainer={kind!r}: give the trainer's class, such as ORPOTrainer")
    mro = kind.__mro__
    if any(FORWARD in vars(k) for k in mro):
        return ODDS
    tiled = any(hasattr(sys.modules.get(k.__module__), "add_fused_lm_head") for k in mro)
    return TILES if tiled else OWN


def defer(trainer: type) -> None:
    """Trainers of this class, while a model is streamed: log p of labels needs no logits, nor do means of logits."""
    for kind in trainer.__mro__:
        if (forward := vars(kind).get(FORWARD)) is None:
            continue
        patches.once(f"{kind.__module__}.{kind.__name__}.{FORWARD}",
                     functools.partial(patches.replaced, kind, FORWARD, _brief(forward)))
        module = sys.modules[kind.__module__]
        if (own := getattr(module, LOGPS, None)) is not None:
            patches.once(f"{kind.__module__}.{LOGPS}", functools.partial(patches.replaced, module, LOGPS, _logps(own)))


def _brief(forward: Any) -> Any:
    @functools.wraps(forward)
    def concatenated_forward(*args: Any, **kw: Any) -> Any:
        out = forward(*args, **kw)
        for logits in out:                       # the trainer's next lines detach them for a mean
            if isinstance(logits, DeferredLogits):
                logits._logits.brief = True
        return out

    return concatenated_forward


def _logps(own: Any) -> Any:
    @functools.wraps(own)
    def selective_log_softmax(logits: Tensor, index: Tensor, *args: Any, **kw: Any) -> Tensor:
        """In one look for all sequences; TRL goes through them one by one, or by a kernel that needs memory."""
        if args or kw or not isinstance(logits, DeferredLogits) or index.shape != logits.shape[:-1]:
            return own(logits, index, *args, **kw)
        return logits.float().log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    return selective_log_softmax
