"""mt.stream without a plan: what an ordinary loop does is seen, and planned for.

A forward that records gradients is a pass; passes between two steps of the optimizer are micro-batches (passes.py).
Before a pass that the plan in force does not cover, mt.plan is asked for what the loop does, and its choice is put into
force (moving.py): the first pass of all, so that nothing is computed without a plan; more tokens than before, or
several graphs alive together; a second micro-batch, whose gradients have to be added up, and at the next step as many
as the last one had; an mt.AdamW that was not there before, since without one every unit stays in host memory, where
other optimizers read it. A run that goes on from a checkpoint is planned for before its states come.

The first plan is for exactly what was seen: it is the one that mt.plan gives for that, with the same bits. One that has
become too small is followed by one for twice as much, so that batches of varying length are planned for a few times,
not at every new longest.
"""
from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._core import PLANES
from ..base.errors import MegatrainError
from ..base.modes import DISKS, read
from ..fused.layer import wanted
from ..plans.cost import PLANES_OF
from ..plans.machine import Machine, resolve
from ..plans.planner import Plan, plan
from ..store.disk import Disk
from .moving import move
from .passes import Pass, Seen, batch_of

if TYPE_CHECKING:
    from .runtime import Runtime

AHEAD = (2.0, 1.5, 1.25, 1.0)    # times what was seen, that a plan which follows a smaller one is for, if that fits
OWN = 256 << 20                  # bytes of the user's own on the device that are not noticed: a batch, a metric
SLACK = 1 << 30                  # more of the device that a run that goes on may take to keep what it kept


@dataclass(frozen=True)
class Limits:
    """What the user said beside the model: limits in bytes, and names for mt.plan."""

    vram: int | None
    host: int | None
    disk: Disk | None
    units: list[str | nn.Module] | None


class Planning:
    """Of one streamed model.

    Attributes:
        plan: the one in force; None: there is none yet, and `why`. made: so many have been put into force.
        adam: an mt.AdamW updates the model.
    """

    def __init__(self, runtime: Runtime, limits: Limits, made: Plan | None = None) -> None:
        """made: a plan that is in force from the start."""
        self.runtime, self.limits, self.plan = runtime, limits, made
        self.made = int(made is not None)
        self.why = "no plan yet: mt.stream plans at the first forward that records gradients"
        self.adam = made is not None
        self._seen = Seen() if made is None else Seen(_pass_of(made), _pass_of(made))
        self._for_adam = self.adam               # the plan in force is for an mt.AdamW
        self._stuck = False                      # nothing larger fits, or may be done: said once
        self._refused = False                    # without an mt.AdamW
        self._unknown = False                    # there was a pass, and no telling of how many tokens
        self._before: tuple[int, dict[str, str]] = (0, {})
        self._here: Machine | None = None

    @property
    def pending(self) -> bool:
        """A plan is to come."""
        given_up = self._stuck or self._unknown or (self._refused and not self.adam)
        return self.plan is None and not given_up

    def optimizer_came(self) -> None:
        self.adam = True

    def stepped(self) -> None:
        self._seen.stepped()

    # ---- a run goes on ----

    def planned(self) -> list[int]:
        """For a checkpoint: sequences of a pass, their tokens, micro-batches; []: there is no plan."""
        if self.plan is None:
            return []
        own = _pass_of(self.plan)
        return [own.sequences, own.seq, self.plan.micro]

    def goes_on(self, tokens: int, kept: dict[str, str]) -> None:
        """A run goes on whose windows kept this of passes of so many tokens: a plan for as many has them keep it again,
        where that fits, so that memory which happens to be free then changes no bit."""
        self._before = tokens, kept

    def resumes(self, sequences: int, seq: int, micro: int) -> None:
        """States come next of a run that was planned for this: so is this one, at once, while no unit has states that
        would keep it in memory. Where it does not fit, the first pass tells what does."""
        if not self.pending or self._seen.live(self.runtime):
            return
        before, self._seen = self._seen, Seen(Pass(sequences, seq), Pass(sequences, seq), last=micro)
        try:
            found = self._choose()
        except MegatrainError:
            self._seen = before
            return
        self._put_into_force(found)

    # ---- a pass begins ----

    def pass_begins(self, args: Any, kwargs: Any) -> None:
        """Before anything of it is computed.

        Raises:
            MegatrainError: no choice fits what the loop does, or what fits could not be put into force; the plan before
                is in force as it was.
        """
        rt, found = self.runtime, batch_of(args, kwargs, self.runtime.records)
        if found is None:
            if self.plan is None:
                self._unknown = True
                self.why = "no plan: the model's inputs name no tokens ([batch, sequence] of integers, or [batch, " \
                           "sequence, hidden]); say how many with mt.stream(tokens=, seq=)"
            return
        self._unknown = False
        before, self._seen = self._seen, self._seen.and_then(found, rt)
        if self._covered() or self._stuck or (self._refused and not self.adam) or self._seen.live(rt):
            return
        try:
            chosen = self._choose()
        except MegatrainError as error:
            self._refuse(error, before)
            return
        if rt.homes.on_disk and not self._keeps_disk(chosen):
            return
        try:
            self._put_into_force(chosen)
        except BaseException:
            self._seen = before                  # this pass does not begin
            raise

    def _covered(self) -> bool:
        p = self.plan
        return p is not None and p.tokens // p.micro >= self._seen.most.tokens and self._for_adam == self.adam and \
            p.micro >= self._micro()

    def _micro(self) -> int:
        """Micro-batches to plan for. An optimizer that is not mt.AdamW updates in memory whatever is planned."""
        return self._seen.micro_batches() if self.adam else 1

    def _choose(self) -> Plan:
        """Raises: nothing fits what was seen."""
        p, seen = self.plan, self._seen
        grown = p is not None and seen.most.tokens > p.tokens // p.micro
        wanted = [seen.most.times(factor) for factor in (AHEAD if grown else (1.0,))]
        if seen.most != seen.alone:              # graphs of several forwards may be of some that are dropped
            wanted.append(seen.alone)
        for batch in wanted:
            try:
                found = self._ask(batch)
            except MegatrainError:
                if batch is wanted[-1] or self._stuck:
                    raise
                continue
            if batch is seen.alone:
                self._seen = dataclasses.replace(seen, most=batch)
            return found
        raise AssertionError("the last batch's plan was neither made nor refused")

    def _refuse(self, error: MegatrainError, before: Seen) -> None:
        if self._stuck:
            return
        if not self.adam:                        # whose states a plan counts; another optimizer has its own
            self._refused, self.why = True, f"no plan, without mt.AdamW: {str(error).splitlines()[0]}"
            return
        self._seen = before                      # another batch may fit
        raise MegatrainError(f"{error}\n\nWithout a plan: mt.stream(model, plan={{}}), which may run out of "
                             "memory.") from error

    def _put_into_force(self, found: Plan) -> None:
        move(self.runtime, found, self._modes(found), self._limit())
        self.plan, self.made, self._for_adam = found, self.made + 1, self.adam

    def _ask(self, batch: Pass) -> Plan:
        try:
            return self._plan_for(batch)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            self._stuck, self.why = True, f"no plan: mt.plan cannot read the model ({type(error).__name__}: {error})"
            warnings.warn(f"{self.why}; layers run again in backward, and all weights stream", stacklevel=2)
            raise MegatrainError(self.why) from error

    def _plan_for(self, batch: Pass) -> Plan:
        rt, p = self.runtime, self.plan
        micro = max(self._micro(), 1 if p is None else p.micro)
        fused = wanted(rt.compute, rt.is_cuda, [r.dtype for r in rt.records])
        return plan(rt.root(), tokens=batch.tokens * micro, seq=batch.seq, micro=micro, machine=self._machine(),
                    homes=None if self.adam else "ram", states=rt.states.format, compute="fused" if fused else "eager",
                    vram=self._left(), host=self.limits.host, units=self.limits.units, nvme=self._drive())

    def _drive(self) -> dict[str, Any] | None:
        """Where states that are in memory already cannot go to."""
        rt, disk = self.runtime, self.limits.disk
        planes = (*PLANES_OF["masters"], *PLANES_OF["moments"])
        made = not rt.homes.on_disk and any(rt.core.host_bytes(PLANES[p]) for p in planes)
        return None if disk is None or made else disk.as_given()

    def _machine(self) -> str | None:
        return None if self.runtime.is_cuda else "cpu"

    def _resolved(self) -> Machine:
        """Asked once: what the device has stays."""
        if self._here is None:
            self._here = resolve(self._machine())
        return self._here

    def _limit(self) -> int:
        """Of the device, whoever has it."""
        most = self._resolved().vram_bytes
        return min(self.limits.vram or most, most)

    def _left(self) -> int:
        """Of that limit what others leave: processes, models, tensors of the user's."""
        rt, limit = self.runtime, self._limit()
        if not rt.is_cuda:
            return limit
        free, total = torch.cuda.mem_get_info(rt.device)
        reserved, used = torch.cuda.memory_reserved(rt.device), torch.cuda.memory_allocated(rt.device)
        overhead = self._resolved().vram_overhead_bytes
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
        warnings.warn(f"batches of {self._seen.most.tokens:,} tokens are more than was planned for, and units whose "
                      "states are on disk cannot move: layers keep least from now on; give mt.stream the longest "
                      "batch, tokens= and seq=, to plan for it at once", stacklevel=2)
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


def _pass_of(made: Plan) -> Pass:
    return Pass(made.tokens // made.micro // made.seq, made.seq)
