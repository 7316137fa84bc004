"""mt.stream without a plan: what an ordinary loop does is seen, and planned for.

A forward that records gradients is a pass; passes between two steps of the optimizer are micro-batches. Before a pass
that the plan in force does not cover, mt.plan is asked for what the loop does, and its choice is put into force
(moving.py): the first pass of all, so that nothing is computed without a plan; more tokens than before; a second
micro-batch, whose gradients have to be added up; an mt.AdamW that was not there before, since without one every unit
stays in host memory, where other optimizers read it.

The first plan is for exactly what was seen: it is the one that mt.plan gives for that, with the same bits. One that has
become too small is followed by one for twice as much, so that batches of varying length are planned for a few times,
not at every new longest.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.errors import MegatrainError
from ..base.modes import DISKS, read
from ..fused.layer import wanted
from ..plans.machine import resolve
from ..plans.planner import Plan, plan
from ..store.disk import Disk
from .moving import move

if TYPE_CHECKING:
    from .runtime import Runtime

AHEAD = (2.0, 1.5, 1.25, 1.0)    # times what was seen, that a plan which follows a smaller one is for, if that fits
OWN = 256 << 20                  # bytes of the user's own on the device that are not noticed: a batch, a metric
SLACK = 1 << 30                  # more of the device that a run that goes on may take to keep what it kept


@dataclass(frozen=True)
class Asked:
    """What the user said beside the model: limits in bytes, and names for mt.plan."""

    vram: int | None
    host: int | None
    disk: Disk | None
    units: list[str | nn.Module] | None


@dataclass(frozen=True)
class Pass:
    """sequences of `seq` tokens."""

    sequences: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq

    def times(self, factor: float) -> Pass:
        """More sequences, where there are several; else a longer one, in whole 64s."""
        if factor == 1.0:
            return self
        if self.sequences > 1:
            return Pass(math.ceil(self.sequences * factor), self.seq)
        return Pass(1, math.ceil(self.seq * factor / 64) * 64)


class Planning:
    """Of one streamed model.

    Attributes:
        plan: the one in force; None: there is none yet, and `why`. made: so many have been put into force.
        adam: an mt.AdamW updates the model.
    """

    def __init__(self, runtime: Runtime, asked: Asked, made: Plan | None = None) -> None:
        """made: a plan that is in force from the start."""
        self.runtime, self.asked, self.plan = runtime, asked, made
        self.made = int(made is not None)
        self.why = "no plan yet: mt.stream plans at the first forward that records gradients"
        self.adam = made is not None
        self._most = Pass(1, 1) if made is None else Pass(made.tokens // made.micro // made.seq, made.seq)
        self._micro = 0                          # passes since the last step
        self._for_adam = self.adam               # the plan in force is for an mt.AdamW
        self._stuck = False                      # nothing larger fits, or may be done: said once
        self._refused = False                    # without an mt.AdamW
        self._before: tuple[int, dict[str, str]] = (0, {})

    def goes_on(self, tokens: int, kept: dict[str, str]) -> None:
        """A run goes on whose windows kept this of passes of so many tokens: a plan for as many has them keep it again,
        where that fits, so that memory which happens to be free then changes no bit."""
        self._before = tokens, kept

    def optimizer_came(self) -> None:
        self.adam = True

    def stepped(self) -> None:
        self._micro = 0

    # ---- a pass begins ----

    def pass_begins(self, args: Any, kwargs: Any) -> None:
        """Before anything of it is computed.

        Raises:
            MegatrainError: no choice fits what the loop does; nothing was changed.
        """
        found = batch_of(args, kwargs, self.runtime.records)
        if found is None:
            if self.plan is None:
                self.why = "no plan: the model's inputs name no tokens ([batch, sequence] of integers, or [batch, " \
                           "sequence, hidden]); say how many with mt.stream(tokens=, seq=)"
            return
        self._micro += 1
        before, self._most = self._most, max(self._most, found, key=lambda p: p.tokens)
        if self._covered() or self._stuck or (self._refused and not self.adam) or self._graph():
            return
        try:
            self._plan()
        except MegatrainError as error:
            if self._stuck:
                return
            if not self.adam:                    # whose states a plan counts; another optimizer has its own
                self._refused, self.why = True, f"no plan, without mt.AdamW: {str(error).splitlines()[0]}"
                return
            self._most, self._micro = before, self._micro - 1        # another batch may fit
            raise MegatrainError(f"{error}\n\nWithout a plan: mt.stream(model, plan={{}}), which may run out of "
                                 "memory.") from error

    def _covered(self) -> bool:
        p = self.plan
        return p is not None and p.tokens // p.micro >= self._most.tokens and self._for_adam == self.adam and \
            (p.micro > 1 or self._micro <= 1 or not self.adam)

    def _graph(self) -> bool:
        """Is there a graph whose backward is to come? What it kept is in the way."""
        return any(r.open for r in self.runtime.records)

    def _plan(self) -> None:
        grown = self.plan is not None and self._most.tokens > self.plan.tokens // self.plan.micro
        for factor in AHEAD if grown else (1.0,):
            try:
                found = self._ask(self._most.times(factor))
                break
            except MegatrainError:
                if factor == 1.0:
                    raise
        if self.runtime.homes.on_disk and not self._keeps_disk(found):
            return
        move(self.runtime, found, self._modes(found), self._limit())
        self.plan, self.made, self._for_adam = found, self.made + 1, self.adam

    def _ask(self, batch: Pass) -> Plan:
        try:
            return self._asked(batch)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            self._stuck, self.why = True, f"no plan: mt.plan cannot read the model ({type(error).__name__}: {error})"
            warnings.warn(f"{self.why}; layers run again in backward, and all weights stream", stacklevel=2)
            raise MegatrainError(self.why) from error

    def _asked(self, batch: Pass) -> Plan:
        rt, micro = self.runtime, max(self._micro, 1) if self.adam else 1
        micro = max(micro, self.plan.micro) if self.plan is not None else micro
        fused = wanted(rt.compute, rt.is_cuda, [r.dtype for r in rt.records])
        disk = self.asked.disk
        return plan(rt.root(), tokens=batch.tokens * micro, seq=batch.seq, micro=micro, machine=self._machine(),
                    homes=None if self.adam else "ram", states=rt.states.format, compute="fused" if fused else "eager",
                    vram=self._left(), host=self.asked.host, units=self.asked.units,
                    nvme=None if disk is None else disk.as_given())

    def _machine(self) -> str | None:
        return None if self.runtime.is_cuda else "cpu"

    def _limit(self) -> int:
        """Of the device, whoever has it."""
        most = resolve(self._machine()).vram_bytes
        return min(self.asked.vram or most, most)

    def _left(self) -> int:
        """Of that limit what others leave: processes, models, tensors of the user's."""
        rt, limit = self.runtime, self._limit()
        if not rt.is_cuda:
            return limit
        free, total = torch.cuda.mem_get_info(rt.device)
        reserved, used = torch.cuda.memory_reserved(rt.device), torch.cuda.memory_allocated(rt.device)
        overhead = resolve(self._machine()).vram_overhead_bytes
        others = total - free - reserved - rt.core.device_bytes() - overhead
        own = used - sum(s.nbytes + 512 for s in rt.ring.slots)
        return limit - max(others, 0) - (own if own > OWN else 0)

    def _keeps_disk(self, found: Plan) -> bool:
        """Units on disk stay there: a plan that has others there cannot be put into force. Then the one before stays,
        and its windows keep what takes least of the device."""
        rt = self.runtime
        there = {rt.unit_names[u] for u in rt.homes.on_disk}
        if there == {name for name, home in found.homes.items() if home in DISKS}:
            return True
        self._stuck = True
        least = {w.name: "replay+host" if read(w.mode).host else "replay" for w in rt.windows if w.mode != "saved"}
        for w in rt.windows:
            w.mode = least.get(w.name, w.mode)
        warnings.warn(f"batches of {self._most.tokens:,} tokens are more than was planned for, and units whose states "
                      "are on disk cannot move: layers keep least from now on; give mt.stream the longest batch, "
                      "tokens= and seq=, to plan for it at once", stacklevel=2)
        return False

    # ---- what windows keep ----

    def _modes(self, found: Plan) -> dict[str, str]:
        tokens, before = self._before
        if tokens != found.tokens // found.micro or before.keys() != found.activations.keys():
            return found.activations
        rt, more = self.runtime, 0
        for w in rt.windows:
            if w.fused is not None:
                kept = [0 if read(m).host else w.fused.template.kept_bytes(read(m).keep, tokens, w.item)
                        for m in (before[w.name], found.activations[w.name])]
                more += kept[0] - kept[1]
        return before if more <= SLACK else found.activations

    def __str__(self) -> str:
        if self.plan is None:
            return self.why
        p = self.plan
        again = f"; plan number {self.made}" if self.made > 1 else ""
        return (f"planned for {p.tokens:,} tokens a step in sequences of {p.seq:,}, {p.micro} micro-batch"
                f"{'es' * (p.micro > 1)}: {p.tokens_per_second:,.0f} tokens/s, bound by {p.bound}{again}")


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
