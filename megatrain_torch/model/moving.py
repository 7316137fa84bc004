"""A plan is put into force in a model that streams: units move, slots and activations change.

Between two passes, when no graph is alive. Everything under way ends first; then units leave the device, so that there
is room for those that come. A unit brings what it has: gradients, states and sums of micro-batches move with its
weights, and every result has the bits that it would have had without the move.

    move(rt, plan, limit)

Who calls holds the model's door: no other thread is in it.
"""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..base.modes import DISKS
from ..group.ranks import as_one
from ..plans.planner import Plan
from ..plans.tally import SETTLED, Asked
from ..store import gradient
from ..store.disk import SPILLED, file_bytes
from .choices import units_at
from .filling import cut_units

if TYPE_CHECKING:
    from .runtime import Runtime


def move(rt: Runtime, plan: Plan, limit: int) -> None:
    """limit: bytes of the device that may be used by all who are there, not by the plan alone.

    Raises MegatrainError, torch.OutOfMemoryError: there is no memory, or a worker failed. Every unit then is where it
    was, or in host memory, with all its values, and the model trains as before; or, where not even that can be done, it
    refuses to run."""
    before = rt.room.asked
    homes = tuple(plan.homes.get(name, "ram") for name in rt.unit_names)
    asked = dataclasses.replace(before, homes=homes, ring=plan.slots, micro=plan.micro, besides=plan.besides,
                                experts=plan.experts)
    if (asked.homes, asked.ring, asked.experts) != (before.homes, before.ring, before.experts):
        rt.finish_save()
        rt.drain()
        for unit in rt.homes.arrivals.units:
            rt.homes.arrivals.dismiss(unit)
        _change_homes(rt, asked, plan)
    rt.room.asked, rt.room.summed = asked, asked.micro > 1
    if SPILLED in plan.disk and rt.core.swap_file() is None:
        rt.homes.spill_to(plan.nvme, plan.disk[SPILLED], file_bytes(asked), {})
    rt.cap.hold(limit, asked.at_home())
    rt.delivery.shards = plan.delivery == "shards"
    keep(rt, plan)


def keep(rt: Runtime, plan: Plan) -> None:
    """Windows keep what the plan says, from the next pass on."""
    rt.keeps.plan = plan
    for w in rt.windows:
        w.keep(plan.activations.get(w.name, w.mode))


def _change_homes(rt: Runtime, asked: Asked, plan: Plan) -> None:
    change = _Change(rt, asked, plan)
    ranks = rt.ranks if asked.homes != rt.room.asked.homes else None     # units move on all, or on none
    if ranks is not None:
        ranks.meet()                         # nobody copies of a slot any more, which may be another's then
    rt.ring.close()
    try:
        with as_one(ranks):
            change.make()
    except BaseException as error:
        change.undo()
        if ranks is not None and not rt.broken:          # it went well on some
            rt.broken = f"units were on their way to other homes when that failed on some process: {error}"
        raise
    if ranks is not None:
        rt.homes.reach(ranks)


class _Change:
    """Units on their way to other homes.

    Attributes:
        homes: where each unit is now. have: of those that live on the device, the slots that their weights are in.
            Both are true at every moment, so that what is there can be opened again.
    """

    def __init__(self, rt: Runtime, asked: Asked, plan: Plan) -> None:
        self.rt, self.before, self.asked, self.plan = rt, rt.room.asked, asked, plan
        self.homes = list(self.before.homes)
        self.have = {unit: rt.ring.slots[slot] for unit, slot in rt.homes.settled.items()}
        self.moving = [u for u, (old, new) in enumerate(zip(self.homes, asked.homes)) if old != new]

    def make(self) -> None:
        """Moves all units. The slots are closed before, and open afterwards."""
        rt, asked = self.rt, self.asked
        for unit in self.moving:                         # leaves where it is
            if self.homes[unit] == "through":
                rt.core.through(unit, False)
            elif unit in self.have:
                rt.room.weights(rt.core, unit)
                self._unsettle(unit)
                del self.have[unit]                      # its weights were there until now
            self.homes[unit] = "ram"
        self._open(units_at(asked, *SETTLED), asked)
        for unit in self.moving:                         # comes to where it is to be
            home = asked.homes[unit]
            if home in SETTLED:
                rt.homes.take(unit)
                self.have[unit] = rt.ring.slots[rt.homes.settled[unit]]
            if home not in DISKS:
                self.homes[unit] = home
            if home == "through":
                rt.core.through(unit, True)
        # The file, where units have states there: laid out once, before there are any. Weights that did not get there
        # the last time go now.
        weights = units_at(asked, "disk+weights")
        if not rt.homes.on_disk and asked.on_disk():
            rt.choose_states(rt.states)
            rt.homes.keep_on_disk(self.plan.nvme, units_at(asked, "disk"), weights, {})
        for unit in units_at(asked, *DISKS):
            self.homes[unit] = asked.homes[unit]
        for unit in weights:
            if unit not in rt.homes.filed:
                rt.homes.file_weights(unit)
                rt.homes.take(unit)

    def undo(self) -> None:
        """Opens the slots again after a failure. Units that are on the device yet stay there; the others are in host
        memory, or in the file."""
        rt = self.rt
        slots = rt.ring.slots                        # of those that were to come, and have come: they are read from
        try:
            rt.ring.close()
            self.have = {unit: slot for unit, slot in self.have.items() if rt.core.settled(unit)}
            for unit, home in enumerate(self.homes):
                if unit not in self.have and rt.core.settled(unit):      # it was to come
                    self._unsettle(unit)
                if unit not in self.have and home in SETTLED:
                    self.homes[unit] = "ram"
            del slots
            self._open(sorted(self.have), dataclasses.replace(self.before, homes=tuple(self.homes)))
            rt.cap.hold(rt.cap.limit, rt.room.asked.at_home())
        except BaseException as error:
            rt.ring.slots = list(self.have.values())      # what is in them is nowhere else
            rt.broken = f"units were on their way to other homes when that failed, and again on the way back: {error}"

    def _open(self, there: list[int], asked: Asked) -> None:
        rt = self.rt
        rt.homes.open_slots(asked.tally().slots(asked.homes, asked.ring), there, self.have)
        cut_units(rt, asked)
        rt.room.asked = asked
        rt.homes.invite(unit for unit in there if asked.homes[unit] == "arrive")

    def _unsettle(self, unit: int) -> None:
        self.rt.core.dismiss(unit)
        self.rt.core.unsettle(unit, any(gradient.standing(r) is not None for r in self.rt.units[unit]))
