"""mt.stream without a plan: what an ordinary loop does is seen, and planned for.

A forward that records gradients is a pass; passes between two steps of the optimizer are micro-batches. Before a pass
that the plan in force does not cover, mt.plan is asked for what the loop does, and its choice is put into force
(homes.py): the first pass of all, so that nothing is computed without a plan; more tokens than before, or several
graphs alive together; a second micro-batch, whose gradients have to be added up, and at the next step as many as the
last one had; an mt.AdamW that was not there before, since without one every unit stays in host memory, where other
optimizers read it. A run that goes on from a checkpoint is planned for before its states come.

The first plan is for exactly what was seen: it is the one that mt.plan gives for that, with the same bits. Where units
live is chosen for one length, since moving them takes seconds; what layers keep is free to change from pass to pass. So
there is a plan for each length that came, all with the same homes: lengths are rounded up to grades, and a pass runs by
the plan of the shortest grade that covers it. Units move only where that is much faster.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._core import PLANES
from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from ..base.modes import read
from ..fused.layer import wanted
from ..group.control import calling
from ..group.ranks import Ranks, as_one
from ..plans.machine import Machine, resolve
from ..plans.planner import Plan, own_code, plan
from ..plans.tally import PLANES_OF
from ..store import gradient
from ..store.state import in_backward, paused
from .homes import keep, move

if TYPE_CHECKING:
    from .choices import Choices
    from .runtime import Runtime

LOOKS = (8, 64)                  # steps after a plan at which its homes are compared with others, for what came since
GRADES = 4                       # lengths between one and its double: each is a fifth longer than the one before
RECENT = 64                      # passes that are remembered
SHORTER = 0.9                    # of the length that was planned for: passes that are this much shorter on average
WORTH = 1.03                     # units move where what is there is so many times slower
SLACK = 1 << 30                  # more of the device that a run that goes on may take to keep what it kept
UNCOUNTED = 256 << 20            # bytes of the user's own on the device that plans leave out: a batch, a metric


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

    def grade_above(self, base: Pass) -> Pass:
        """The shortest grade that has as many tokens; grades are counted from `base`."""
        at = math.ceil(GRADES * math.log2(self.tokens / base.tokens))
        return self.with_tokens(max(round(base.tokens * 2 ** (at / GRADES)), self.tokens))


def pass_of(plan: Plan) -> Pass:
    """The pass that a plan is for, of which each of its micro-batches is one."""
    return Pass(plan.tokens // plan.micro // plan.seq, plan.seq)


@dataclass
class Seen:
    """What the loop has done."""

    alone: Pass = Pass(1, 1)    # the longest pass
    most: Pass = Pass(1, 1)     # or the most of passes whose graphs were alive together: two forwards before a backward
    micro: int = 0              # passes since the last step whose gradients stand
    last: int = 1               # passes that the last step had

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
    if value.is_floating_point():
        return Pass(*value.shape[:2]) if value.dim() == 3 else None
    return Pass(*(1, *value.shape)[-2:]) if value.dim() in (1, 2) and value.dtype != torch.bool else None


# ---- plans ----

class Refused(MegatrainError):
    """mt.plan refused; nothing was changed."""


class Unreadable(Refused):
    """It cannot read the model."""


# Where units are to be, as mt.plan takes it: homes, slots, experts, delivery.
Where = tuple[dict[str, str] | str, int | None, int | None, str | None]


class Planning:
    def __init__(self, runtime: Runtime, choices: Choices) -> None:
        """choices: their plan is in force from the start, where there is one."""
        self.runtime, self.choices, made = runtime, choices, choices.plan
        self.plan = made                         # the one in force; None: there is none yet, and `why`
        self.made = int(made is not None)        # so many plans have been put into force
        self.why = "no plan yet: mt.stream plans at the first forward that records gradients"
        self.adam = made is not None             # an mt.AdamW updates the model
        self._seen = Seen() if made is None else Seen(pass_of(made), pass_of(made))
        self._for_adam = self.adam               # the plan in force is for an mt.AdamW
        self._agreed = made is not None and runtime.ranks is not None    # with other processes, on homes
        self._stuck = False                      # no other plan can be made or put into force; the user was told
        self._refused = False                    # nothing fitted while no mt.AdamW was there
        self._unknown = False                    # the last pass did not tell its number of tokens
        self._caches = True                      # a pass fills a key-value cache, unless the model's config says no
        self._machine: Machine | None = None     # looked at once: what the device has stays
        self._plans = {} if made is None else {pass_of(made).tokens: made}       # by the tokens of a pass; same homes
        self._came: deque[Pass] = deque(maxlen=RECENT)                   # the last passes
        self._steps = 0                          # of the optimizer, since homes were planned
        self._looks = list(LOOKS) if runtime.ranks is None or self._agreed else []       # of all processes together
        # Of a run that goes on, what windows kept, by a pass's tokens: a plan for as many has them keep it again, where
        # that fits, so that memory which happens to be free then changes no bit.
        self.resumed: dict[int, dict[str, str]] = {}

    @property
    def pending(self) -> bool:
        """Is the first plan still to come?"""
        given_up = self._stuck or self._unknown or (self._refused and not self.adam)
        return self.plan is None and not given_up

    def longest(self) -> int:
        """Tokens of the longest pass that is planned for."""
        return max(self._plans, default=0)

    def stepped(self) -> None:
        self._seen.stepped()
        self._steps += 1
        due = self._looks and self._steps >= self._looks[0]
        if due and not self.runtime.homes.on_disk and in_backward() == -1:       # a hook may step
            with calling("an optimizer's step"):
                self._compare_homes()

    # ---- a run goes on ----

    def planned(self) -> list[int]:
        """For a checkpoint: sequences of a pass, their tokens, micro-batches; []: there is no plan."""
        return [] if self.plan is None else [*dataclasses.astuple(pass_of(self.plan)), self.plan.micro]

    def kept(self) -> dict[int, dict[str, str]]:
        """For a checkpoint: what windows keep, by the tokens of a pass."""
        return {tokens: plan.activations for tokens, plan in self._plans.items()}

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
        else:
            self._put_into_force(found)

    # ---- a pass begins ----

    def pass_begins(self, args: Any, kwargs: Any) -> None:
        """Before anything of it is computed. Raises: no choice fits what the loop does, or what fits could not be put
        into force; the plan before is in force as it was."""
        rt, found = self.runtime, batch_of(args, kwargs, self.runtime.records)
        if found is None:
            if self.plan is None:
                self._unknown = True
                self.why = "no plan: the model's inputs name no tokens ([batch, sequence] of integers, or [batch, " \
                           "sequence, hidden]); say how many with mt.stream(tokens=, seq=)"
            return
        self._unknown, self._caches = False, kwargs.get("use_cache") is not False
        before, self._seen = self._seen, self._seen.and_then(found, rt)
        if self._stuck or (self._refused and not self.adam) or self._seen.live(rt):
            return
        try:
            self._plan_for(found)
        except Unreadable as error:
            self._stuck, self.why = True, f"no plan: {error}"
            warnings.warn(f"{self.why}; layers run again in backward, and all weights stream", stacklevel=2)
        except Refused as error:
            self._refuse(error, before)
        except BaseException:
            self._seen = before                  # this pass does not begin
            raise

    def _plan_for(self, found: Pass) -> None:
        """Puts a plan in force that covers this pass. Raises Refused: nothing fits what was seen; or as `move`."""
        p, seen = self.plan, self._seen
        if p is None or self._for_adam != self.adam or p.micro < self._micro():
            self._put_into_force(self._choose())
        elif self.runtime.keeps.planned_otherwise():
            self._put_into_force(self._near(seen.most)[0])
        elif seen.most.tokens > self.longest():
            # Longer than all that were planned for: units stay where they are, unless a plan from the start is faster.
            plan, here = self._near(seen.most.grade_above(pass_of(p)), seen.most)
            if here:
                move(self.runtime, plan, self._limit())
                self._plans[pass_of(plan).tokens] = plan
            else:
                self._put_into_force(plan)
        seen = self._seen
        needed = seen.most if seen.most != seen.alone else found     # graphs of further passes may come to this one's
        self._came.append(needed)
        plan = self._plan_of(needed)
        if plan is not self.runtime.keeps.plan:
            keep(self.runtime, plan)

    def _plan_of(self, batch: Pass) -> Plan:
        """The plan that a pass runs by, which is not longer than all there are. Another is made where the shortest that
        there is for such passes is for longer ones, and keeps less than it might."""
        tokens = min(t for t in self._plans if t >= batch.tokens)
        plan, grade = self._plans[tokens], batch.grade_above(pass_of(self.plan))
        if grade.tokens >= tokens or set(plan.activations.values()) == {"saved"}:
            return plan
        found = self._may(grade, self._here())
        self._plans[grade.tokens] = found = plan if found is None or found.disk.keys() - plan.disk.keys() else found
        return found

    def _micro(self) -> int:
        """Micro-batches to plan for: as many as the last step had; or two as soon as there is a second, whose gradients
        have to be added up. An optimizer that is not mt.AdamW updates in memory whatever is planned."""
        return max(self._seen.last, min(self._seen.micro, 2)) if self.adam else 1

    def _stays(self) -> bool:
        """Units are where they are for good: on disk, or, of several processes, once they have agreed."""
        return bool(self.runtime.homes.on_disk) or self._agreed

    def _here(self) -> Where:
        return self.plan.homes, self.plan.slots, self.plan.experts, self.plan.delivery

    def _choose(self) -> Plan:
        """Raises Refused: nothing fits what was seen."""
        if self.runtime.ranks is not None and self.adam and not self._agreed:
            return self._agree(self.runtime.ranks)
        return self._first(self._here() if self._stays() else None, self._seen.most)

    def _agree(self, ranks: Ranks) -> Plan:
        """Several processes have units at home in the same places: where the one with the longest pass would have them,
        which leaves least room, if all have room for what they do then; else in host memory. All come here, before
        their first pass with an mt.AdamW: from then on each plans for itself what windows keep."""
        try:
            with as_one(ranks):
                own = self._first(None, self._seen.most)
            asked = (self._seen.most.tokens, own.homes, own.slots, own.experts, own.delivery)
            _, *best = max(ranks.gather(asked), key=lambda asked: asked[0])
            for where in (tuple(best), ("ram", None, None, "whole")):
                plan = self._may(self._seen.most, where)
                if all(ranks.gather(plan is not None)):
                    self._agreed, self._looks, self._steps = True, list(LOOKS), 0
                    return plan
        except Refused:
            raise
        except MegatrainError as error:
            raise Refused(str(error)) from error
        raise Refused("processes have passes of which no plan fits all, with units at home in the same places")

    def _first(self, where: Where | None, *batches: Pass) -> Plan:
        """A plan for the first of these batches that fits; or else for the longest pass alone, since several graphs may
        have been alive only because some were not dropped yet. Raises Refused: none fits."""
        most, alone = self._seen.most, self._seen.alone
        *before, last = batches if most == alone else (*batches, alone)
        for batch in before:
            if (found := self._may(batch, where)) is not None:
                return found
        found = self._ask(last, where)
        self._seen = dataclasses.replace(self._seen, most=alone)
        return found

    def _near(self, *batches: Pass) -> tuple[Plan, bool]:
        """A plan for the first of these that fits; and True: it has units where they are, which is nearly as fast as a
        plan from the start, or they cannot move."""
        try:
            here = self._first(self._here(), *batches)
        except Refused:
            if self._stays():
                raise
            return self._first(None, *batches), False
        free = here if self._stays() else self._ask(pass_of(here))
        return (here, True) if here.tokens_per_second * WORTH >= free.tokens_per_second else (free, False)

    def _refuse(self, refused: Refused, before: Seen) -> None:
        rt, error = self.runtime, str(refused)
        if rt.homes.on_disk or (self.plan is not None and self._agreed):
            self._stuck = True                   # none leaves a disk: windows keep as little as can be
            for w in rt.windows:
                if w.mode != "saved":
                    w.mode = "replay+host" if read(w.mode).host else "replay"
            why = "states are on disk" if rt.homes.on_disk else "states several processes have"
            warnings.warn(f"batches of {self._seen.most.tokens:,} tokens are more than was planned for, and units "
                          f"whose {why} cannot move: layers keep least from now on; give mt.stream the longest batch, "
                          "tokens= and seq=, to plan for it at once", stacklevel=2)
        elif not self.adam:                      # whose states a plan counts; another optimizer has its own
            self._refused, self.why = True, f"no plan, without mt.AdamW: {error.splitlines()[0]}"
        else:
            self._seen = before                  # another batch may fit
            if own := rt.keeps.own():
                error += f"\n\nLayers that no template runs, but their own code, which keeps more: {own_code(own)}"
            raise MegatrainError(f"{error}\n\nWithout a plan: mt.stream(model, plan={{}}), which may run out of "
                                 "memory.") from refused

    # ---- homes are compared with others ----

    def _compare_homes(self) -> None:
        """Shorter passes take less time, in which less can be updated on the host, and leave room on the device: more
        units may live there, and layers keep less of the longest passes. So it is asked what would be fastest for the
        lengths that came. Several processes make as many steps each, so all come here at the end of the same one; units
        move on all or on none. Homes are proposed by the process with the longest pass."""
        ranks, came = self.runtime.ranks, sorted(self._came, key=lambda b: b.tokens)
        own = [came[len(came) * part // 8] for part in (1, 3, 5, 7)] if came else []     # four that stand for them
        rank, gather = (0, lambda own: [own]) if ranks is None else (ranks.rank, ranks.gather)
        # Where graphs are alive on some process (None), the next step looks again; where one never can (False), none.
        ready = False if self._stuck or self.plan is None or not own else \
            None if self._seen.live(self.runtime) else True
        planned = 0 if self.plan is None else pass_of(self.plan).tokens
        found = gather((ready, sum(b.tokens for b in came), len(came), planned, self._seen.most.tokens))
        every = [r for r, *_ in found]
        if None in every and False not in every:
            return
        self._looks.pop(0)
        mean = sum(n for _, n, *_ in found) / max(sum(n for _, _, n, *_ in found), 1)
        if False in every or mean >= SHORTER * max(n for *_, n, _ in found):
            return
        longest = max(range(len(found)), key=lambda rank: found[rank][-1])
        proposed = dict.fromkeys([own[0].with_tokens(max(int(mean), 1)), own[0]]) if rank == longest else ()
        mine = [(batch, (p.homes, p.slots, p.experts, None)) for batch in proposed if (p := self._may(batch))]
        others = [[self._may(b, where) for b in (batch, *own, self._seen.most)]
                  for batch, where in gather(mine)[longest]]
        # Each step waits for the slowest: seconds of the four passes, with units here, and as was proposed.
        times = [sum(p.seconds for p in plans[1:-1]) if all(plans) else math.inf for plans in others]
        here = sum(self._plan_of(b).seconds for b in own)
        slowest = [max(times) for times in zip(*gather([here, *times]))]
        best = min(range(len(slowest)), key=slowest.__getitem__)
        if slowest[best] * WORTH < slowest[0]:
            self._put_into_force(*others[best - 1])

    # ---- mt.plan is asked ----

    def _ask(self, batch: Pass, where: Where | None = None) -> Plan:
        """A plan for steps of passes like this. where: None: units wherever they are best, or in host memory, for an
        optimizer that is not mt.AdamW. mt.plan reads modules and may run a router's copy: as outside of the forward
        that asks, and of its autocast. Raises Refused."""
        rt = self.runtime
        homes, slots, experts, delivery = where or (None if self.adam else "ram", None, None, None)
        if delivery is None:                     # one for all processes, as they have agreed; or they are about to
            delivery = self.plan.delivery if self._agreed and self.plan is not None else None if self.adam else "whole"
        micro = max(self._micro(), 1 if self.plan is None else self.plan.micro)
        fused = wanted(rt.compute, rt.is_cuda, [r.dtype for r in rt.records])
        disk, planes = self.choices.disk, (*PLANES_OF["masters"], *PLANES_OF["moments"])
        if not rt.homes.on_disk and any(rt.core.host_bytes(PLANES[p]) for p in planes):
            disk = None                          # states are in memory already, and cannot go to a file
        try:
            with paused(), torch._C._DisableAutocast():
                found = plan(rt.root(), tokens=batch.tokens * micro, seq=batch.seq, micro=micro,
                             machine=None if rt.is_cuda else "cpu", homes=homes, slots=slots, experts=experts,
                             delivery=delivery, states=rt.states, compute="fused" if fused else "eager",
                             products=rt.products, vram=self._left(), host=self.choices.host,
                             use_cache=self._caches, units=self.choices.units, nvme=disk,
                             gpus=self.choices.fleet.gpus, machines=self.choices.fleet.machines)
        except MegatrainError as error:
            raise Refused(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise Unreadable(f"mt.plan cannot read the model ({type(error).__name__}: {error})") from error
        return self._as_before(found)

    def _may(self, batch: Pass, where: Where | None = None) -> Plan | None:
        """None: it does not fit."""
        with contextlib.suppress(Refused):
            return self._ask(batch, where)
        return None

    def _as_before(self, found: Plan) -> Plan:
        """The plan with what windows kept of the run that goes on, where that fits."""
        tokens = pass_of(found).tokens
        before = self.resumed.get(tokens, {})
        if before.keys() != found.activations.keys() or found.own:       # of which it is not known what they kept
            return found
        more = 0
        for w in self.runtime.windows:
            if w.fused is not None:
                each = dict(w.fused.sizes.kept)
                kept = [0 if read(m).host else tokens * each[read(m).keep]
                        for m in (before[w.name], found.activations[w.name])]
                more += kept[0] - kept[1]
        return dataclasses.replace(found, activations=before) if more <= SLACK else found

    def _limit(self) -> int:
        """Bytes of the device that this process may have."""
        self._machine = self._machine or resolve(None if self.runtime.is_cuda else "cpu")
        most = self._machine.vram_bytes
        return min(self.choices.vram or most, most)

    def _left(self) -> int:
        """Bytes of `_limit()` that are left: other models and tensors of the user's have theirs of it, and other
        processes theirs of the device."""
        rt, limit = self.runtime, self._limit()
        if not rt.is_cuda:
            return limit
        _, others, stores = rt.cap.taken()
        used = torch.cuda.memory_allocated(rt.device) - sum(s.nbytes + 512 for s in rt.ring.slots)
        left = min(limit, self._machine.vram_bytes - others)
        return left - (stores - rt.core.device_bytes()) - (used if used > UNCOUNTED else 0)

    # ---- a plan is put into force ----

    def _put_into_force(self, found: Plan, *beside: Plan) -> None:
        """beside: plans for passes of other lengths, with the same homes."""
        before, own = self.plan, self.runtime.keeps.own()
        move(self.runtime, found, self._limit())
        self.plan, self.made, self._for_adam = found, self.made + 1, self.adam
        self._plans = {pass_of(plan).tokens: plan for plan in (found, *beside)}
        self._came.clear()
        if self.runtime.ranks is None:           # several processes make plans at different times
            self._looks, self._steps = list(LOOKS), 0
        rate, kept = f"{found.tokens_per_second:,.0f} tokens/s", show_bytes(found.vram["activations"])
        if before is not None:
            rate += f" instead of {before.tokens_per_second:,.0f}"
            kept += f" instead of {show_bytes(before.vram['activations'])}"
        self.runtime.keeps.tell(own if found.compute == "fused" else {},
                                f"planned for that: {rate}, {kept} of activations")

    def __str__(self) -> str:
        if self.plan is None:
            return self.why
        p, longest = self.plan, self.longest()
        again = f"; layers keep less of longer passes, up to {longest:,}" if longest > pass_of(p).tokens else ""
        again += f"; plan number {self.made}" if self.made > 1 else ""
        return (f"planned for {p.fleet.each}{p.tokens:,} tokens a step in sequences of {p.seq:,}, {p.micro} micro-batch"
                f"{'es' * (p.micro > 1)}: {p.tokens_per_second:,.0f} tokens/s, bound by {p.bound}{again}")
