"""TRL's losses: how each gets what it needs of the head, and how ORPO's and CPO's do without logits.

Both take cross entropy of a part of the model's logits, log p of labels of all, and means for their log. The first is
head.Loss, so does the second, of each row, and the third is computed rows at a time. TRL's other trainers project
hidden states themselves, a tile at a time, by a copy of the head's weight.
"""
from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from torch import Tensor, nn

from ..base.errors import MegatrainError
from .head import DeferredLogits

_LOGPS = "get_batch_logps"           # of ORPOTrainer and CPOTrainer; seen in TRL 1.16
OWN, ODDS, TILES = "", "odds", "tiles"
# By model, the trainer whose loss plans count (plans/cost.py) while it is there.
trainers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def loss_of(kind: Any) -> str:
    """Of a class of trainers: ODDS, two uses of the model's logits; TILES, a head of TRL's; OWN, the model's loss."""
    if not isinstance(kind, type):
        raise MegatrainError(f"trainer={kind!r}: give the trainer's class, such as ORPOTrainer")
    if hasattr(kind, _LOGPS):
        return ODDS
    tiled = any(hasattr(sys.modules.get(k.__module__), "add_fused_lm_head") for k in kind.__mro__)
    return TILES if tiled else OWN


def defer(trainer: Any) -> None:
    """Log p of labels needs no logits in this trainer of a streamed model, nor do means of logits. TRL's own function,
    which is as it was, gives a kernel all logits on CUDA."""
    own = getattr(trainer, _LOGPS, None)
    if getattr(own, "__module__", "").startswith("trl."):
        trainer.get_batch_logps = functools.partial(_logps, own)


def _logps(own: Any, logits: Tensor, labels: Tensor, average_log_prob: bool = False, is_encoder_decoder: bool = False
           ) -> Tensor:
    """[B] Sum, or mean, of log p of the labels [B, S] that are not -100, of logits [B, S, V]."""
    if not isinstance(logits, DeferredLogits) or logits.shape[:-1] != labels.shape:
        return own(logits, labels, average_log_prob, is_encoder_decoder)
    logits._logits.brief = True              # the trainer detaches them after this for a mean, and for nothing else
    if not is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    learned = labels != -100
    logps = logits.float().log_softmax(-1).gather(-1, labels.where(learned, 0).unsqueeze(-1)).squeeze(-1)
    total = (logps * learned).sum(-1)
    return total / learned.sum(-1) if average_log_prob else total
