"""What a loop is seen to do: how many tokens a forward is given, and how many forwards make a step."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..store import gradient

if TYPE_CHECKING:
    from ..plans.planner import Plan
    from .runtime import Runtime


@dataclass(frozen=True)
class Pass:
    """What a forward is given: sequences of `seq` tokens."""

    sequences: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq

    def with_tokens(self, least: int) -> Pass:
        """A pass of at least so many tokens: of more or fewer sequences, where there are several; else of a longer or
        shorter one, in whole 64s."""
        if least == self.tokens:
            return self
        if self.sequences > 1:
            return Pass(-(-least // self.seq), self.seq)
        return Pass(1, -(-least // 64) * 64)


def pass_of(plan: Plan) -> Pass:
    """The pass that a plan is for, of which each of its micro-batches is one."""
    return Pass(plan.tokens // plan.micro // plan.seq, plan.seq)


@dataclass
class Seen:
    """What the loop has done.

    Attributes:
        alone: the longest pass. most: the same, or the most of passes whose graphs were alive together, as two forwards
            before one backward have them. micro: passes since the last step whose gradients stand. last: passes that
            the last step had.
    """

    alone: Pass = Pass(1, 1)
    most: Pass = Pass(1, 1)
    micro: int = 0
    last: int = 1

    def and_then(self, found: Pass, rt: Runtime) -> Seen:
        """What is seen with one pass more. That is a further micro-batch where gradients of the one before wait for it:
        none do after a step that was left out, nor after forwards without a backward."""
        live = self.live(rt)
        together = Pass(found.sequences * (1 + live), found.seq)
        micro = self.micro
        if not live:
            waits = micro and any(gradient.standing(r) is not None for r in rt.records)
            micro = micro + 1 if waits else 1
        return Seen(max(self.alone, found, key=_tokens), max(self.most, together, key=_tokens), micro, self.last)

    @staticmethod
    def live(rt: Runtime) -> int:
        """Graphs whose backward is to come; what they kept is in the way of whatever moves."""
        return min((r.open for r in rt.records if r.open), default=0)

    def stepped(self) -> None:
        self.last, self.micro = self.micro or self.last, 0

    def micro_batches(self) -> int:
        """Of a step, as far as that is known: as many as the last one had; or two as soon as there is a second, whose
        gradients have to be added up."""
        return max(self.last, min(self.micro, 2))


def _tokens(batch: Pass) -> int:
    return batch.tokens


def batch_of(args: Any, kwargs: Any, records: Iterable[Any] = ()) -> Pass | None:
    """What a language model is given: ids or embeddings by their usual names, else the first tensor, if it has the form
    of ids, or of what a matrix of the model takes. An encoder's and a decoder's are as long as the longer. None: it is
    given something else, such as sound, whose layers see other tokens than its labels have."""
    if any(kwargs.get(name) is not None for name in ("input_ids", "inputs_embeds")):
        named = [_form(kwargs.get(name)) for name in ("input_ids", "inputs_embeds", "decoder_input_ids", "labels")]
        return max((b for b in named if b is not None), key=lambda b: b.tokens, default=None)
    first = next((a for a in (*args, *kwargs.values()) if isinstance(a, (Tensor, Mapping))), None)
    if isinstance(first, Mapping):
        return batch_of((), dict(first), records)
    if not isinstance(first, Tensor) or (first.is_floating_point() and not any(
            len(r.shape) == 2 and r.shape[1] == first.shape[-1] for r in records)):
        return None
    return _form(first)


def _form(value: Any) -> Pass | None:
    if not isinstance(value, Tensor) or not value.numel():
        return None
    ids = not value.is_floating_point() and value.dtype != torch.bool
    if ids and value.dim() == 2:
        return Pass(*value.shape)
    if ids and value.dim() == 1:
        return Pass(1, value.shape[0])
    return Pass(*value.shape[:2]) if value.is_floating_point() and value.dim() == 3 else None
