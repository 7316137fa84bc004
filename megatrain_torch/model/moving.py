"""A plan is put into force in a model that streams: units move, slots and activations change.

Between two passes, when no graph is alive. Everything under way ends first; then units leave the device, so that there
is room for those that come. A unit brings what it has: gradients, states and sums of micro-batches move with its
weights, and every result has the bits that it would have had without the move.

    move(rt, plan, modes, limit)

Who calls holds the model's door: no other thread is in it.
"""
from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from ..base.limits import show_bytes
from ..base.slots import plan_slots
from ..plans.planner import Plan
from ..plans.preflight import SETTLED, Asked
from ..store import gradient
from ..store.disk import SPILLED, file_bytes

if TYPE_CHECKING:
    from .runtime import Runtime

SAID = 4 << 30               # bytes on their way to other homes that a terminal is told of


def move(rt: Runtime, plan: Plan, modes: dict[str, str], limit: int) -> None:
    """modes: what windows keep, by name, in the place of the plan's own. limit: bytes of the device that may be used by
    all who are there, not by the plan alone."""
    asked = _asked(rt, plan)
    if asked.homes != rt.room.asked.homes or asked.ring != rt.room.asked.ring:
        rt.saves.finish()
        rt.drain()
        for unit in rt.homes.arrivals.units:
            rt.homes.arrivals.dismiss(unit)
        _to_disk(rt, asked, plan)
        _change_homes(rt, asked)
    rt.room.asked, rt.room.summed = asked, asked.micro > 1
    _spill(rt, asked, plan)
    rt.cap.hold(limit, asked.at_home(), rt.core.device_bytes())
    for w in rt.windows:
        w.mode = "saved" if w.draws_unseen else modes.get(w.name, w.mode)


def _asked(rt: Runtime, plan: Plan) -> Asked:
    homes = tuple(plan.homes.get(name, "ram") for name in rt.unit_names)
    return dataclasses.replace(rt.room.asked, homes=homes, ring=plan.slots, micro=plan.micro,
                               besides=plan.besides)


def _to_disk(rt: Runtime, asked: Asked, plan: Plan) -> None:
    """The file, where units have states there: laid out once, before there are any."""
    if rt.homes.on_disk or not asked.on_disk():
        return
    states = [u for u, home in enumerate(asked.homes) if home == "disk"]
    weights = [u for u, home in enumerate(asked.homes) if home == "disk+weights"]
    rt.states.choose(rt.states.format)
    rt.homes.keep_on_disk(plan.nvme, states, weights, {})
    for unit in weights:
        rt.homes.file_weights(unit)


def _spill(rt: Runtime, asked: Asked, plan: Plan) -> None:
    if SPILLED in plan.disk and rt.core.swap_file() is None:
        rt.homes.spill_to(plan.nvme, plan.disk[SPILLED], file_bytes(asked), {})


def _change_homes(rt: Runtime, asked: Asked) -> None:
    before = rt.room.asked.homes
    stay = {u for u, (old, new) in enumerate(zip(before, asked.homes)) if old == new}
    there = [u for u, home in enumerate(asked.homes) if home in SETTLED]
    go = [u for u in rt.homes.settled if u not in stay]
    come = [u for u in there if u not in stay]
    tell = _Progress(sum(rt.core.hi_bytes(u) for u in (*go, *come)))
    old = {u: rt.ring.slots[slot] for u, slot in rt.homes.settled.items()}
    rt.ring.close()
    for unit in go:
        rt.core.dismiss(unit)
        rt.core.unsettle(unit, any(gradient.standing(r) is not None for r in rt.units[unit]))
        del old[unit]                        # its weights were there until now
        tell.add(rt.core.hi_bytes(unit))
    for unit, home in enumerate(before):
        if home == "through" and asked.homes[unit] != "through":
            rt.core.through(unit, False)
    streamed = [u.weights for u, home in zip(asked.units(), asked.homes) if home not in SETTLED]
    rt.homes.open_slots(plan_slots(streamed, asked.ring), there, old)
    rt.homes.invite(u for u in there if asked.homes[u] == "arrive")
    for unit in come:
        rt.homes.take(unit)
        tell.add(rt.core.hi_bytes(unit))
    for unit, home in enumerate(asked.homes):
        if home == "through" and before[unit] != "through":
            rt.core.through(unit, True)
    tell.over()


class _Progress:
    """A line in a terminal, while tens of gigabytes move."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.done = nbytes, 0
        self.shown = nbytes >= SAID and sys.stderr.isatty()

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.shown:
            print(f"\rweights on their way to where they are planned to live: {show_bytes(self.done)} of "
                  f"{show_bytes(self.nbytes)}", end="", file=sys.stderr, flush=True)

    def over(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
