"""mt.stream without a plan: what an ordinary loop does is seen, and planned for.

A forward that records gradients is a pass; passes between two steps of the optimizer are micro-batches (passes.py).
Before a pass that the plan in force does not cover, mt.plan is asked for what the loop does, and its choice is put into
force (homes.py): the first pass of all, so that nothing is computed without a plan; more tokens than before, or
several graphs alive together; a second micro-batch, whose gradients have to be added up, and at the next step as many
as the last one had; an mt.AdamW that was not there before, since without one every unit stays in host memory, where
other optimizers read it. A run that goes on from a checkpoint is planned for before its states come.

The first plan is for exactly what was seen: it is the one that mt.plan gives for that, with the same bits. Passes of
other lengths run with units where they are, and layers keep of each length what fits; units move only where that is
much faster.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._core import PLANES
from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from ..base.modes import read
from ..fused.layer import wanted
from ..group.waits import calling
from ..plans.machine import Machine, resolve
from ..plans.planner import Plan, own_code, plan
from ..plans.tally import PLANES_OF
from ..store.state import in_backward, paused
from .choices import Limits
from .homes import keep, move
from .passes import SHORTER, WORTH, Lengths, Looks, Pass, Seen, batch_of, pass_of, seconds_of

if TYPE_CHECKING:
    from ..group.ranks import Ranks
    from .runtime import Runtime

SLACK = 1 << 30                  # more of the device that a run that goes on may take to keep what it kept
UNCOUNTED = 256 << 20            # bytes of the user's own on the device that plans leave out: a batch, a metric


class Refused(MegatrainError):
    """mt.plan refused; nothing was changed."""


class Unreadable(Refused):
    """The model is one that plans cannot read."""


class Planning:
    """Plans for one streamed model.

    Attributes:
        plan: the one in force; None: there is none yet, and `why`. made: so many plans have been put into force.
        adam: an mt.AdamW updates the model. limits: what plans have to stay within.
        resumed: of a run that goes on, what windows kept, by a pass's tokens: a plan for as many has them keep it
            again, where that fits, so that memory which happens to be free then changes no bit.
    """

    def __init__(self, runtime: Runtime, limits: Limits, made: Plan | None = None) -> None:
        """made: a plan that is in force from the start."""
        self.runtime, self.limits, self.plan = runtime, limits, made
        self.made = int(made is not None)
        self.why = "no plan yet: mt.stream plans at the first forward that records gradients"
        self.adam = made is not None
        self._seen = Seen() if made is None else Seen(pass_of(made), pass_of(made))
        self._for_adam = self.adam               # the plan in force is for an mt.AdamW
        self._agreed = made is not None and runtime.ranks is not None    # with other processes, on homes
        self._stuck = False                      # no other plan can be made or put into force; the user was told
        self._refused = False                    # nothing fitted while no mt.AdamW was there
        self._unknown = False                    # the last pass did not tell its number of tokens
        self._caches = True                      # a pass fills a key-value cache, unless the model's config says no
        self._machine: Machine | None = None     # looked at once: what the device has stays
        self._lengths = Lengths()
        self._looks = Looks(runtime.ranks is None or self._agreed)       # of all processes together
        self._keeps: Plan | None = made          # windows keep what this one says
        self.resumed: dict[int, dict[str, str]] = {}
        if made is not None:
            self._lengths.begin(made)

    @property
    def pending(self) -> bool:
        """Is the first plan still to come?"""
        given_up = self._stuck or self._unknown or (self._refused and not self.adam)
        return self.plan is None and not given_up

    def stepped(self) -> None:
        self._seen.stepped()
        self._looks.steps += 1
        if self._looks.due() and not self.runtime.homes.on_disk and in_backward() == -1:     # a hook may step
            with calling("an optimizer's step"):
                self._compare_homes()

    # ---- a run goes on ----

    def planned(self) -> list[int]:
        """For a checkpoint: sequences of a pass, their tokens, micro-batches; []: there is no plan."""
        if self.plan is None:
            return []
        own = pass_of(self.plan)
        return [own.sequences, own.seq, self.plan.micro]

    def kept(self) -> dict[int, dict[str, str]]:
        """For a checkpoint: what windows keep, by the tokens of a pass."""
        return {tokens: plan.activations for tokens, plan in self._lengths.plans.items()}

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
            self._put_into_force(self._near([seen.most])[0])
        elif seen.most.tokens > self._lengths.longest():
            # Longer than all that were planned for: units stay where they are, unless a plan from the start is faster.
            plan, here = self._near([self._lengths.grade_above(seen.most), seen.most])
            if here:
                self._move(plan)
                self._lengths.add(plan)
            else:
                self._put_into_force(plan)
        seen = self._seen
        needed = seen.most if seen.most != seen.alone else found     # graphs of further passes may come to this one's
        self._lengths.came.append(needed)
        plan = self._lengths.of(needed, self._ask_here)
        if plan is not self._keeps:
            self._keeps = plan
            keep(self.runtime, plan)

    def _micro(self) -> int:
        """Micro-batches to plan for. An optimizer that is not mt.AdamW updates in memory whatever is planned."""
        return self._seen.micro_batches() if self.adam else 1

    def _stays(self) -> bool:
        """Units are where they are for good: on disk, or, of several processes, once they have agreed."""
        return bool(self.runtime.homes.on_disk) or self._agreed

    def _choose(self) -> Plan:
        """Raises Refused: nothing fits what was seen."""
        if self.runtime.ranks is not None and self.adam and not self._agreed:
            return self._agree(self.runtime.ranks)
        return self._first([self._seen.most], self._ask_here if self._stays() else self._ask)

    def _agree(self, ranks: Ranks) -> Plan:
        """Several processes have units at home in the same places: where the one with the longest pass would have them,
        which leaves least room, if all have room for what they do then; else in host memory. All come here, before
        their first pass with an mt.AdamW: from then on each plans for itself what windows keep."""
        try:
            with ranks.as_one():
                own = self._first([self._seen.most], self._ask)
            asked = (self._seen.most.tokens, own.homes, own.slots, own.experts, own.delivery)
            _, *best = max(ranks.gather(asked), key=lambda asked: asked[0])
            for where in (best, ("ram", None, None, "whole")):
                plan = self._may(self._seen.most, *where)
                if all(ranks.gather(plan is not None)):
                    self._agreed, self._looks = True, Looks()
                    return plan
        except Refused:
            raise
        except MegatrainError as error:
            raise Refused(str(error)) from error
        raise Refused("processes have passes of which no plan fits all, with units at home in the same places")

    def _first(self, batches: list[Pass], ask: Callable[[Pass], Plan]) -> Plan:
        """A plan for the first of these batches that fits; or else for the longest pass alone, since several graphs may
        have been alive only because some were not dropped yet. Raises Refused: none fits."""
        alone = [self._seen.alone] * (self._seen.most != self._seen.alone)
        for batch in (wanted := [*batches, *alone]):
            try:
                found = ask(batch)
            except Unreadable:
                raise
            except Refused:
                if batch is wanted[-1]:
                    raise
                continue
            if batch is self._seen.alone and alone:
                self._seen = dataclasses.replace(self._seen, most=batch)
            return found
        raise AssertionError("the last batch's plan was neither made nor refused")

    def _near(self, batches: list[Pass]) -> tuple[Plan, bool]:
        """A plan for the first of these that fits; and True: it has units where they are, which is nearly as fast as a
        plan from the start, or they cannot move."""
        try:
            here = self._first(batches, self._ask_here)
        except Unreadable:
            raise
        except Refused:
            if self._stays():
                raise
            return self._first(batches, self._ask), False
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
                error = f"{error}\n\nLayers that no template runs, but their own code, which keeps more: " \
                        f"{own_code(own)}"
            raise MegatrainError(f"{error}\n\nWithout a plan: mt.stream(model, plan={{}}), which may run out of "
                                 "memory.") from refused

    # ---- homes are compared with others ----

    def _compare_homes(self) -> None:
        """Shorter passes take less time, in which less can be updated on the host, and leave room on the device: more
        units may live there, and layers keep less of the longest passes. So it is asked what would be fastest for the
        lengths that came. Several processes make as many steps each, so all come here at the end of the same one; units
        move on all or on none. Homes are proposed by the process with the longest pass."""
        ranks, own = self.runtime.ranks, self._lengths.sample()
        rank, gather = (0, lambda own: [own]) if ranks is None else (ranks.rank, ranks.gather)
        # Where graphs are alive on some process (None), the next step looks again; where one never can (False), none.
        ready = False if self._stuck or self.plan is None or not own else \
            None if self._seen.live(self.runtime) else True
        planned = 0 if self.plan is None else pass_of(self.plan).tokens
        tokens = [b.tokens for b in self._lengths.came]
        found = gather((ready, sum(tokens), len(tokens), planned, self._seen.most.tokens))
        every = [r for r, *_ in found]
        if None in every and False not in every:
            return
        self._looks.left.pop(0)
        mean = sum(n for _, n, *_ in found) / max(sum(n for _, _, n, *_ in found), 1)
        if False in every or mean >= SHORTER * max(n for *_, n, _ in found):
            return
        longest = max(range(len(found)), key=lambda rank: found[rank][-1])
        proposed = dict.fromkeys([own[0].with_tokens(max(int(mean), 1)), own[0]]) if rank == longest else ()
        mine = [(batch, p.homes, p.slots, p.experts) for batch in proposed if (p := self._may(batch)) is not None]
        others = [[self._may(b, *homes) for b in (batch, *own, self._seen.most)]
                  for batch, *homes in gather(mine)[longest]]
        now = [self._lengths.of(b, self._ask_here) for b in own]
        times = [seconds_of(plans[1:-1]) if all(plans) else math.inf for plans in others]
        # Each step waits for the slowest.
        slowest = [max(times) for times in zip(*gather([seconds_of(now), *times]))]
        best = min(range(len(slowest)), key=slowest.__getitem__)
        if slowest[best] * WORTH < slowest[0]:
            self._put_into_force(*others[best - 1])

    # ---- mt.plan is asked ----

    def _ask(self, batch: Pass, *where: Any) -> Plan:
        """A plan for steps of passes like this. where: homes, slots, experts and delivery, as mt.plan takes them; left
        out: units wherever they are best, or in host memory, for an optimizer that is not mt.AdamW. mt.plan reads
        modules and may run a router's copy: as outside of the forward that asks, and of its autocast. Raises Refused:
        nothing fits."""
        rt = self.runtime
        homes, slots, experts, delivery = (*where, *(None if self.adam else "ram", None, None, None)[len(where):])
        if delivery is None:                     # one for all processes, as they have agreed; or they are about to
            delivery = self.plan.delivery if self._agreed and self.plan is not None else None if self.adam else "whole"
        micro = max(self._micro(), 1 if self.plan is None else self.plan.micro)
        fused = wanted(rt.compute, rt.is_cuda, [r.dtype for r in rt.records])
        try:
            with paused(), torch._C._DisableAutocast():
                found = plan(rt.root(), tokens=batch.tokens * micro, seq=batch.seq, micro=micro,
                             machine=None if rt.is_cuda else "cpu", homes=homes, slots=slots, experts=experts,
                             delivery=delivery, states=rt.states, compute="fused" if fused else "eager",
                             products=rt.products, vram=self._left(), host=self.limits.host,
                             use_cache=self._caches, units=self.limits.units, nvme=self._drive(), gpus=self.limits.gpus,
                             machines=self.limits.machines)
        except MegatrainError as error:
            raise Refused(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise Unreadable(f"mt.plan cannot read the model ({type(error).__name__}: {error})") from error
        return self._as_before(found)

    def _ask_here(self, batch: Pass, plan: Plan | None = None) -> Plan:
        """A plan with units where they are, or where `plan` has them."""
        plan = plan or self.plan
        return self._ask(batch, plan.homes, plan.slots, plan.experts, plan.delivery)

    def _may(self, batch: Pass, *where: Any) -> Plan | None:
        """None: it does not fit."""
        with contextlib.suppress(Refused):
            return self._ask(batch, *where)
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
                kept = [0 if read(m).host else w.fused.template.kept_bytes(read(m).keep, tokens, w.item)
                        for m in (before[w.name], found.activations[w.name])]
                more += kept[0] - kept[1]
        return dataclasses.replace(found, activations=before) if more <= SLACK else found

    def _drive(self) -> dict[str, Any] | None:
        """The user's directory. None: there is none, or states are in memory already, and cannot go to a file."""
        rt, disk = self.runtime, self.limits.disk
        planes = (*PLANES_OF["masters"], *PLANES_OF["moments"])
        made = not rt.homes.on_disk and any(rt.core.host_bytes(PLANES[p]) for p in planes)
        return None if disk is None or made else disk.as_given()

    def _limit(self) -> int:
        """Bytes of the device that this process may have."""
        self._machine = self._machine or resolve(None if self.runtime.is_cuda else "cpu")
        most = self._machine.vram_bytes
        return min(self.limits.vram or most, most)

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
        self._move(found)
        self.plan, self.made, self._for_adam = found, self.made + 1, self.adam
        self._lengths.begin(found)
        if self.runtime.ranks is None:           # several processes make plans at different times
            self._looks = Looks()
        rate, kept = f"{found.tokens_per_second:,.0f} tokens/s", show_bytes(found.vram["activations"])
        if before is not None:
            rate += f" instead of {before.tokens_per_second:,.0f}"
            kept += f" instead of {show_bytes(before.vram['activations'])}"
        self.runtime.keeps.tell(own if found.compute == "fused" else {},
                                f"planned for that: {rate}, {kept} of activations")
        for other in beside:
            self._lengths.add(other)

    def _move(self, found: Plan) -> None:
        move(self.runtime, found, self._limit())
        self._keeps = found

    def __str__(self) -> str:
        if self.plan is None:
            return self.why
        p, longest = self.plan, self._lengths.longest()
        again = f"; layers keep less of longer passes, up to {longest:,}" if longest > pass_of(p).tokens else ""
        again += f"; plan number {self.made}" if self.made > 1 else ""
        return (f"planned for {p.fleet.each}{p.tokens:,} tokens a step in sequences of {p.seq:,}, {p.micro} micro-batch"
                f"{'es' * (p.micro > 1)}: {p.tokens_per_second:,.0f} tokens/s, bound by {p.bound}{again}")
