"""The numbers of a choice's step, for the walk; what several choices share is made once."""
from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable
from typing import Any

from .. import _core
from ..base.modes import DISK
from .cost import Home
from .held import Held
from .homes import Ways
from .keeping import Keeping
from .simulate import (
    DEVICE,
    HOST,
    ON_DISK,
    SHOWN_MICRO,
    THROUGH,
    Lists,
    Step,
    Timing,
    simulate,
)
from .updates import Updates
from .wishes import Choice


def _kept_by_arguments(make: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A method's results, for as long as its object lives."""
    @functools.wraps(make)
    def known(self: Steps, *asked: Any) -> dict[str, Any]:
        found = self.parts.get((make, *asked))
        if found is None:
            found = self.parts[(make, *asked)] = make(self, *asked)
        return found

    return known


class Steps:
    """Of one model on a machine."""

    def __init__(self, keeping: Keeping, ways: Ways, updates: Updates, held: Held) -> None:
        self.keeping, self.ways, self.updates, self.held = keeping, ways, updates, held
        self.shape, self.machine = keeping.shape, keeping.machine
        self.parts: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.slot_bytes: dict[tuple[tuple[Home, ...], int], array[int]] = {}
        self.streamed: dict[tuple[Any, ...], tuple[float, float]] = {}
        self.schedules: dict[tuple[tuple[Home, ...], int, int], bytes] = {}

    def time(self, choice: Choice, than: float = math.inf) -> Timing | None:
        """None where it takes so many seconds or more."""
        step = self.step(choice)
        key = (choice.homes, choice.ring, min(choice.micro, SHOWN_MICRO))
        if key not in self.schedules:
            self.schedules[key] = _core.schedule(step)
        return simulate(step, self.schedules[key], than)

    def step(self, choice: Choice) -> Step:
        micro, key = choice.micro, (choice.homes, choice.ring)
        if key not in self.slot_bytes:
            self.slot_bytes[key] = array("q", self.ways.walked(*key))
        placed, kept = self._placed(choice.homes, micro, choice.through), self._kept(micro, choice.modes)
        return Step(**self._fixed, **self._timed(micro), **placed, **kept, slots=self.slot_bytes[key],
                    micro=micro, stretch=self._stretch(choice, placed, kept))

    def _stretch(self, choice: Choice, placed: dict[str, Any], kept: dict[str, Any]) -> float:
        held, key = self.held, (choice.homes, choice.through, choice.micro)
        if key not in self.streamed:
            on_host = [s for s, lane in zip(placed["update_s"], placed["updated_on"]) if lane == HOST]
            self.streamed[key] = sum(on_host), float(held.crossing([choice.homes], [choice.through])[0])
        alone_s, crossing = self.streamed[key]
        return held.stretch(alone_s, crossing + held.ways_crossed * sum(kept["away"]),
                            held.span_s(choice.micro, sum(kept["backward_s"])))

    @functools.cached_property
    def _fixed(self) -> dict[str, Any]:
        """What no choice changes."""
        units, m, uses = self.shape.units, self.machine, self.keeping.uses
        exchange, fleet = self.ways.exchange, self.keeping.wishes.fleet
        return {"units": Lists.of(w.units for w in self.shape.windows),
                "again": Lists.of(uses.again), "leaving": Lists.of(uses.leaving),
                "weights": array("q", [u.crossing for u in units]),
                "gradients": array("q", exchange.home.tolist()),
                **{name: array("d", getattr(exchange, name)) for name in
                   ("exchange_s", "network_s", "lost_s", "gather_s", "held_s", "spread_s")},
                "lowered": array("q", exchange.lowered.tolist()),
                "raised": array("q", exchange.raised.tolist()),
                "parts": exchange.parts, "peers": exchange.peers, "on_link": exchange.on_link,
                "memory": fleet.memory(m),
                "add_s": array("d", self.updates.add), "depth": self.keeping.depth,
                "h2d": m.h2d_gbps * 1e9, "d2h": m.d2h_gbps * 1e9, "both": m.both_gbps * 1e9,
                "busy": m.busy_gbps * 1e9, "write": m.disk_write_gbps * 1e9,
                "read": m.disk_read_gbps * 1e9}

    @_kept_by_arguments
    def _timed(self, micro: int) -> dict[str, Any]:
        costs = self.keeping.costs(micro)
        return {"forward_s": array("d", [c.forward_s for c in costs]),
                "forward_host_s": array("d", [c.forward_host_s for c in costs])}

    @_kept_by_arguments
    def _placed(self, homes: tuple[Home, ...], micro: int, through: frozenset[int]
                ) -> dict[str, Any]:
        on_disk, visiting = self.ways.disk.units(homes, micro), self.ways.visiting(homes)
        updates, every = self.updates, range(len(homes))
        device, pool, host = (x.tolist() for x in (updates.device(micro), updates.pool,
                                                   updates.host))
        there, filed, passing = on_disk.states, on_disk.weights, through
        drive = [(updates.drive_weights if u in filed else updates.drive)[u] if u in there else 0.0
                 for u in every]
        return {"updated_on": array("q", [DEVICE if homes[u] else ON_DISK if u in there
                                          else THROUGH if u in passing else HOST for u in every]),
                "update_s": array("d", [device[u] if homes[u] else pool[u] if u in there
                                        else host[u] for u in every]),
                "visiting": array("q", [visiting.get(u, 0) for u in every]),
                "disk_s": array("d", drive),
                "through_s": array("d", [updates.through[u] if u in passing else 0.0
                                         for u in every]),
                "read_s": array("d", [updates.read[u] if u in filed else 0.0 for u in every]),
                "lent": self.ways.lent(homes), "memory_s": self._memory_s(homes, micro)}

    def _memory_s(self, homes: tuple[Home, ...], micro: int) -> float:
        """Of the host's memory, which several GPUs share, for what is no copy of one of them."""
        fleet = self.keeping.wishes.fleet
        if fleet.alone:
            return 0.0
        trained = sum(n for n, home in zip(self.updates.trained.tolist(), homes) if not home)
        through = micro * self.ways.exchange.link_bytes / fleet.memory(self.machine)
        return through + fleet.memory_s(self.machine, self.keeping.wishes.states, trained, micro)

    @_kept_by_arguments
    def _kept(self, micro: int, modes: tuple[str, ...]) -> dict[str, Any]:
        costs = self.keeping.costs(micro)
        return {"backward_s": array("d", [c.backward_s[m] for c, m in zip(costs, modes)]),
                "backward_host_s": array("d", [c.backward_host_s[m] for c, m in zip(costs, modes)]),
                "away": array("q", self.keeping.away(costs, modes)),
                "spilled": array("q", [mode in DISK for mode in modes])}
