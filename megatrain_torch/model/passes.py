"""What a loop is seen to do: how many tokens a forward is given, how many forwards make a step, and which lengths came.

Where units live is chosen for one length, since moving them takes seconds; what layers keep is free to change from pass
to pass. So there is a plan for each length that came, all with the same homes: lengths are rounded up to grades, and a
pass runs by the plan of the shortest grade that covers it.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import MegatrainError
from ..plans.planner import Plan
from ..store import gradient

if TYPE_CHECKING:
    from .runtime import Runtime

LOOKS = (8, 64)                  # steps after a plan at which its homes are compared with others, for what came since
GRADES = 4                       # lengths between one and its double: each is a fifth longer than the one before
RECENT = 64                      # passes that are remembered
SHORTER = 0.9                    # of the length that was planned for: passes that are this much shorter on average
WORTH = 1.03                     # units move where what is there is so many times slower


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
        return Pass(-(-least // self.seq), self.seq) if self.sequences > 1 else Pass(1, -(-least // 64) * 64)


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
        live, micro = self.live(rt), self.micro
        together = Pass(found.sequences * (1 + live), found.seq)
        if not live:
            waits = micro and any(gradient.standing(r) is not None for r in rt.records)
            micro = micro + 1 if waits else 1
        return Seen(max(self.alone, found, key=lambda b: b.tokens), max(self.most, together, key=lambda b: b.tokens),
                    micro, self.last)

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


# ---- passes of several lengths ----

class Looks:
    """When homes are compared with others: some steps after a plan. steps: that the optimizer has made since."""

    def __init__(self, wanted: bool = True) -> None:
        self.steps, self.left = 0, list(LOOKS) if wanted else []

    def due(self) -> bool:
        return bool(self.left) and self.steps >= self.left[0]


class Lengths:
    """Plans for passes of several lengths, and which lengths came.

    Attributes:
        plans: by the tokens of a pass that each is for; all with the same homes. came: the last passes.
    """

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self._base = Pass(1, 1)
        self.came: deque[Pass] = deque(maxlen=RECENT)

    def begin(self, plan: Plan) -> None:
        """Units live by this plan from now on."""
        self.plans, self._base = {}, pass_of(plan)
        self.came.clear()
        self.add(plan)

    def add(self, plan: Plan) -> None:
        self.plans[pass_of(plan).tokens] = plan

    def longest(self) -> int:
        return max(self.plans, default=0)

    def grade_above(self, batch: Pass) -> Pass:
        """The shortest grade that has as many tokens."""
        base, at = self._base.tokens, 0
        while base * 2 ** (at / GRADES) < batch.tokens:
            at += 1
        while base * 2 ** ((at - 1) / GRADES) >= batch.tokens:
            at -= 1
        return batch.with_tokens(max(round(base * 2 ** (at / GRADES)), batch.tokens))

    def of(self, batch: Pass, ask: Callable[[Pass], Plan]) -> Plan:
        """The plan that a pass runs by, which is not longer than all there are. `ask` makes one where the shortest that
        there is for such passes is for longer ones, and keeps less than it might."""
        tokens = min(t for t in self.plans if t >= batch.tokens)
        plan, grade = self.plans[tokens], self.grade_above(batch)
        if grade.tokens >= tokens or set(plan.activations.values()) == {"saved"}:
            return plan
        try:
            found = ask(grade)
        except MegatrainError:
            found = plan
        self.plans[grade.tokens] = found = plan if found.disk.keys() - plan.disk.keys() else found
        return found

    def sample(self) -> list[Pass]:
        """Four passes that stand for those that came; none: none came."""
        found = sorted(self.came, key=lambda b: b.tokens)
        return [found[len(found) * part // 8] for part in (1, 3, 5, 7)] if found else []


def seconds_of(plans: Sequence[Plan | None]) -> float:
    """Of all of them, infinite where one does not fit."""
    return sum(math.inf if p is None else p.seconds for p in plans)
