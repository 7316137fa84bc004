"""Which unit is at home where, which activations are kept, how many slots: bytes of a choice, and the best one.

The search: every combination of micro-batches, homes of units, slots, and first layers that keep in host memory, or on
disk, what they keep, each with as many activations kept on the device as fit; a lower bound on the time of each, and
the simulation of those whose bound is below the best time found. What may be chosen does not depend on the limits, so
that more memory is never slower.
"""
from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..base.modes import DISK, DISKS, KEEPS, LINKED, read
from ..base.slots import plan_slots
from ..store.arrive import AHEAD, STAY
from ..store.disk import (
    BLOCKS,
    FEED_BYTES,
    FROZEN,
    MEMORY_BYTES,
    PADDING,
    POOL,
    SPILLED,
    spilled_bytes,
    unit_file_bytes,
)
from .cost import (
    CACHE_SHARE,
    LENT,
    OFFLOAD_DEPTH,
    STAGINGS,
    THROUGH_BYTES,
    Cost,
    Home,
    cost_of,
    visiting_planes,
)
from .machine import Machine
from .shapes import Shape, Unit
from .simulate import (
    DEVICE,
    HOST,
    NORM_S,
    ON_DISK,
    SHOWN_MICRO,
    THROUGH,
    Lists,
    Step,
    Timing,
    simulate,
)
from .tally import SETTLED, Tally
from .tracks import Levels, Track, Tracks

RINGS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
OVERHEAD = "Python, torch, driver"          # of host memory: what is there besides planes
PLAIN = tuple(home.plain for home in Home)              # by a Home's number
ARRIVE = Home.ARRIVE.value
MOST_ENDS = 3               # embeddings and heads whose homes are chosen one by one
GUESTS = 2                  # units, first in the forward, whose states may arrive: what it waits for first
EARLY = max(GUESTS + AHEAD + 1, STAY)       # windows whose activations may be alive while those states are there
# Bytes per parameter that a gradient moves into the planes of a unit at home in VRAM: measured and copied; by each
# further micro-batch added to its fp32 sum, rounded and measured. Beside compute, but of the same memory.
GATHERED = (6, 16)
# What first layers may keep in host memory, and how many of them, in parts of all.
ON_HOST = ("replay+host", "attention+split", "attention+host", "selective+host", "saved+host")
PARTS = 8
LONG_SEQ = 1 << 16          # tokens of a sequence from which attention is most of a layer
MOST_SIMULATIONS = 20000    # half a second; a search of a hundred layers takes some hundred


@dataclass(frozen=True)
class Wishes:
    """What is asked for; None: whatever is best.

    Attributes:
        tokens, seq: of a step; tokens is a multiple of seq.
        fused: templates run where they fit, and our own loss behind the head.
        homes: "ram", "vram", "arrive", "through", "disk" or "disk+weights" for all units; or of each by name, as a plan
            says it. activations: a mode for all windows that have it.
        nvme: bytes that states, weights and activations may take on disk; None: there is none.
        grads: "ram", or "none": gradients are kept nowhere. lent: buffers of a size for these, at the most.
        states: how AdamW's are kept.
    """

    tokens: int
    seq: int
    fused: bool = True
    homes: str | dict[str, str] | None = None
    activations: str | None = None
    slots: int | None = None
    micro: int | None = None
    nvme: int | None = None
    grads: str = "ram"
    lent: int = LENT
    states: str = "fp32"


class Choice(NamedTuple):
    """micro-batches; [unit] where it is at home; ring size; [window] activation mode; units at home in RAM whose
    updates pass through the device."""

    micro: int
    homes: tuple[Home, ...]
    ring: int
    modes: tuple[str, ...]
    through: frozenset[int] = frozenset()


@dataclass
class Micro:
    """What follows from the number of micro-batches alone. costs: [window]."""

    costs: list[Cost]
    forward_s: float
    tracks: Tracks


class Homes(NamedTuple):
    """What follows from where units are at home.

    Attributes:
        units: [unit] where it is at home. begin_s: until the first window can run; end_s: from the last to the norm.
        update_s: on the host; last_update: the first window that waits for the last of it.
        add_s: to add up a further micro-batch's gradients there; longest_add_s: those of one unit.
        weights, gradients: bytes that cross; again: of the weights, those that backward needs. visiting: of states
            that arrive.
        slots: (ring, bytes of its slots). through: units whose updates pass through the device; through_s: all of them.
    """

    units: tuple[Home, ...]
    begin_s: float
    end_s: float
    update_s: float
    last_update: int
    weights: int
    again: int
    gradients: int
    add_s: float
    longest_add_s: float
    visiting: int
    slots: list[tuple[int, int]]
    through: frozenset[int]
    through_s: float


def _kept_by_arguments(make: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A method's results, for as long as its problem lives."""
    @functools.wraps(make)
    def known(self: Problem, *asked: Any) -> dict[str, Any]:
        found = self.parts.get((make, *asked))
        if found is None:
            found = self.parts[(make, *asked)] = make(self, *asked)
        return found

    return known


class Problem:
    """A model on a machine for given tokens. like: the same with another number of buffers for gradients."""

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes, like: Problem | None = None) -> None:
        self.shape, self.machine, self.wishes = shape, machine, wishes
        n = len(shape.windows)
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for w, window in enumerate(shape.windows):
            for u in window.units:
                self.first.setdefault(u, w)
                self.last[u] = w
        self.leaving = [tuple(u for u, w in self.first.items() if w == at and shape.units[u].trained)
                        for at in range(n)]
        self.depth = min(OFFLOAD_DEPTH, wishes.lent) if wishes.grads == "none" else OFFLOAD_DEPTH
        self.flying = [sum(self._leaving_bytes(u, at) for u in self.first
                           if self.first[u] - self.depth <= at <= self.last[u]) for at in range(n)]
        self.again = [() if w.kind in ("embedding",) or (w.kind == "head" and wishes.fused) else w.units
                      for w in shape.windows]
        self.needed_again = {u for w, units in enumerate(self.again) for u in units if shape.windows[w].learns}
        self.tally = Tally(shape.units, wishes.grads == "ram", wishes.lent)
        self.ring_bytes: dict[frozenset[tuple[int, int]], list[tuple[int, int]]] = {}
        if like is not None:
            self.ways = like.ways
        self.hulls: dict[tuple[int, str | None, float], list[tuple[float, int, str]]] = {}
        self.betweens: dict[tuple[int, str, str], list[str]] = {}
        self.micros: dict[int, Micro] = like.micros if like is not None and like.depth == self.depth else {}
        self.parts: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.slot_bytes: dict[tuple[tuple[Home, ...], int], array[int]] = {}
        self.schedules: dict[tuple[tuple[Home, ...], int, int], bytes] = {}
        self.disks: dict[tuple[tuple[Home, ...], bool], tuple[frozenset[int], frozenset[int]]] = {}
        self.rooms: dict[tuple[tuple[Home, ...], bool], int] = {}
        self.through_rate = machine.through_rate(wishes.states, alone=wishes.homes == "through")
        self.simulations = 0

    # ---- bytes ----

    def on_disk(self, homes: tuple[Home, ...], micro: int) -> frozenset[int]:
        """Units whose states are there: as many as host memory cannot hold. None where all updates are to pass through
        the device: they read states from memory."""
        return self._disks(homes, micro)[0]

    def filed(self, homes: tuple[Home, ...], micro: int) -> frozenset[int]:
        """Of these, units whose weights are there too: where host memory cannot hold those either."""
        return self._disks(homes, micro)[1]

    def _disks(self, homes: tuple[Home, ...], micro: int) -> tuple[frozenset[int], frozenset[int]]:
        key = homes, micro > 1
        if key not in self.disks and isinstance(self.wishes.homes, dict):
            self.disks[key] = self._named(*DISKS), self._named("disk+weights")
        if key not in self.disks:
            none = self.wishes.nvme is None or self.wishes.homes == "through"
            self.disks[key] = (frozenset(), frozenset()) if none else self._on_disk(homes, micro)
        return self.disks[key]

    def _named(self, *homes: str) -> frozenset[int]:
        """Units that wishes name as at home there."""
        return frozenset(i for i, u in enumerate(self.shape.units) if self.wishes.homes.get(u.name) in homes)

    def _on_disk(self, homes: tuple[Home, ...], micro: int) -> tuple[frozenset[int], frozenset[int]]:
        over, room, found = 1, self.wishes.nvme, []
        forced, order = self.wishes.homes in DISKS, self._disk_order(homes)
        if not forced:
            over = sum(self._host_bytes(homes, micro, frozenset(), frozenset()).values()) - self.machine.host_bytes
        for u in order:
            states, padding = unit_file_bytes(self.shape.units[u])
            if over + MEMORY_BYTES * bool(found) <= 0 or states + padding > room:
                break
            if states:
                found.append(u)
                room -= states + padding
                over -= states * (not forced)
        if self.wishes.homes == "disk" or (not forced and over + MEMORY_BYTES * bool(found) <= 0):
            return frozenset(found), frozenset()
        return self._file(order, found, over + (0 if forced else MEMORY_BYTES + FEED_BYTES), room, forced)

    def _file(self, order: list[int], found: list[int], over: int, room: int, forced: bool
              ) -> tuple[frozenset[int], frozenset[int]]:
        """Weights too, until there is enough host memory, or no more room in the file. over, room: bytes of these."""
        filed: list[int] = []
        for u in order:
            unit = self.shape.units[u]
            more = sum(unit_file_bytes(unit, "disk+weights")) - (sum(unit_file_bytes(unit)) if u in found else 0)
            if over <= 0 or more > room or (u not in found and unit.trained):
                break
            filed.append(u)
            room -= more
            over -= unit.weights * (not forced)
        return frozenset(found) | frozenset(filed), frozenset(filed)

    def _disk_order(self, homes: tuple[Home, ...]) -> list[int]:
        """Units at home in RAM, those that are used last first: their updates have most time before the next forward
        needs them. Where updates follow gradients that are kept nowhere, any first few are spread over the model (van
        der Corput's sequence): the drive has the time between them, and a backward waits for each."""
        order = [u for u in reversed(self.first) if not homes[u]]
        return order if self.wishes.grads == "ram" else [order[place] for place in _spread(len(order))]

    def states(self, unit: int) -> int:
        """Bytes of a unit's masters and moments."""
        return sum(visiting_planes(self.shape.units[unit]).values())

    def disk_bytes(self, homes: tuple[Home, ...], micro: int, modes: tuple[str, ...] = ()) -> dict[str, int]:
        """On disk, by plane, and between them; modes: with the activations of these."""
        spilled = self.spills(self.micro(micro).costs, modes) if modes else {}
        total: dict[str, int] = {SPILLED: spilled_bytes(spilled.values())} if spilled else {}
        on_disk, filed = self._disks(homes, micro)
        for (u, home), count in Counter((self.tally.alike[u], "disk+weights" if u in filed else "disk")
                                        for u in on_disk).items():
            unit = self.shape.units[u]
            weights = {"weights": unit.gradients, FROZEN: unit.weights - unit.gradients} if home != "disk" else {}
            for what, n in {**weights, **visiting_planes(unit), PADDING: unit_file_bytes(unit, home)[1]}.items():
                total[what] = total.get(what, 0) + n * count
        return total

    def _disk_home(self, unit: int, homes: tuple[Home, ...], micro: int) -> str:
        return "disk+weights" if unit in self.filed(homes, micro) else "disk"

    def home_of(self, unit: int, homes: tuple[Home, ...], micro: int) -> str:
        """As mt.stream's plan has it, updates that pass through the device left out."""
        on_disk = unit in self.on_disk(homes, micro)
        return self._disk_home(unit, homes, micro) if on_disk else Home(homes[unit]).plain

    def _leaving_bytes(self, unit: int, at: int) -> int:
        """Of a unit's gradients at window `at`, until they have left. A fused head's lie in the memory of their fp32
        sums, which are part of its own window's work."""
        own = self.first[unit]
        share = (2 if at != own else 0) if self.wishes.fused and self.shape.windows[own].kind == "head" else 1
        return self.shape.units[unit].gradients * share

    def slots(self, homes: tuple[Home, ...], ring: int) -> list[int]:
        return self.tally.slots(self._where(homes), ring)

    def host_bytes(self, homes: tuple[Home, ...], micro: int, modes: tuple[str, ...] = ()) -> dict[str, int]:
        """By plane, and what is there besides; modes: with the activations of these."""
        return self._host_bytes(homes, micro, *self._disks(homes, micro), modes)

    def _host_bytes(self, homes: tuple[Home, ...], micro: int, on_disk: frozenset[int], filed: frozenset[int],
                    modes: tuple[str, ...] = ()) -> dict[str, int]:
        total = {OVERHEAD: self.machine.host_overhead_bytes,
                 **self.tally.host(self._where(homes, on_disk, filed), micro)}
        total["activations"] = self.kept_there(self.micro(micro).costs, modes) if modes else 0
        return total

    def away(self, micro: int, modes: tuple[str, ...]) -> list[int]:
        """By window, bytes that wait in host memory, or on disk, from its forward to its backward."""
        return self._away(self.micro(micro).costs, modes)

    def _away(self, costs: list[Cost], modes: Sequence[str]) -> list[int]:
        return [c.away.get(mode, 0) * w.learns for c, mode, w in zip(costs, modes, self.shape.windows)]

    def kept_there(self, costs: list[Cost], modes: Sequence[str]) -> int:
        """Bytes of activations in host memory, with the blocks that carry those that are on disk."""
        return _kept_there(self._away(costs, modes), self.spills(costs, modes))

    def spills(self, costs: list[Cost], modes: Sequence[str]) -> dict[int, int]:
        """By window that keeps something on disk, its bytes."""
        return _spills(self._away(costs, modes), modes)

    def spill_s(self, spilled: dict[int, int]) -> float:
        """Seconds of the drive; what is in host memory still is not read."""
        sizes = list(spilled.values())
        return sum(sizes) / (self.machine.disk_write_gbps * 1e9) \
            + sum(sizes[:-BLOCKS]) / (self.machine.disk_read_gbps * 1e9)

    def planes_at_home(self, homes: tuple[Home, ...], micro: int) -> dict[str, int]:
        """Of units at home in VRAM, by plane; what is there all the time."""
        return self.tally.at_home(self._where(homes), micro)

    @staticmethod
    def _where(homes: tuple[Home, ...], on_disk: frozenset[int] = frozenset(), filed: frozenset[int] = frozenset()
               ) -> list[str]:
        where = [PLAIN[home] for home in homes]
        for u in on_disk:
            where[u] = "disk+weights" if u in filed else "disk"
        return where

    def peak(self, costs: list[Cost], modes: tuple[str, ...]) -> tuple[int, int, int]:
        """(activations, work, gradients under way) in bytes where their sum is largest in a backward."""
        kept, best = 0, (0, 0, 0)
        for cost, mode, coming, window, flying in zip(costs, modes, self.coming(costs, modes), self.shape.windows,
                                                      self.flying):
            kept += cost.kept[mode] * window.learns
            here = (kept, cost.work[mode] + coming, flying)
            if sum(here) > sum(best):
                best = here
        return best

    def coming(self, costs: list[Cost], modes: Sequence[str]) -> list[int]:
        """By window, bytes beside its work, for links: a linked window's own input is made from what the layer before
        keeps, which has come back with its own; both come while the window behind it runs."""
        found, away = [0] * len(costs), self._away(costs, modes)
        for w, mode in enumerate(modes):
            if read(mode).keep == LINKED:
                found[w] += away[w - 1]
                if w + 1 < len(costs):
                    found[w + 1] += away[w]
        return found

    def visiting(self, homes: tuple[Home, ...]) -> dict[int, int]:
        """Bytes of states that arrive, by unit."""
        if ARRIVE not in homes:
            return {}
        return {u: self.states(u) for u, home in enumerate(homes) if home == ARRIVE and self.shape.units[u].trained}

    def early_bytes(self, costs: list[Cost], modes: tuple[str, ...]) -> int:
        """Of activations, work and gradients while those states are on the device, at the most."""
        first = list(zip(costs, modes, self.shape.windows))[:EARLY]
        kept = sum(cost.kept[mode] * window.learns for cost, mode, window in first)
        beside = zip(first, self.flying, self.coming(costs, modes))
        return self._with_cache(kept + max(cost.work[mode] + flying + coming
                                           for (cost, mode, _), flying, coming in beside))

    def passing_bytes(self, costs: list[Cost], modes: tuple[str, ...]) -> int:
        """The peak with what torch's allocator holds beyond it."""
        return self._with_cache(sum(self.peak(costs, modes)))

    def _with_cache(self, total: Any) -> Any:
        """Of a number, or of an array."""
        beyond = total * CACHE_SHARE["fused" if self.wishes.fused else "eager"]
        return total + (int(beyond) if isinstance(total, int) else beyond.astype(np.int64))

    # ---- activations ----

    def micro(self, k: int) -> Micro:
        if k not in self.micros:
            self.micros[k] = self._micro(k)
        return self.micros[k]

    def _micro(self, k: int) -> Micro:
        known: dict[object, Cost] = {}
        costs = []
        for w in self.shape.windows:
            if w.shape not in known:
                known[w.shape] = cost_of(w, self.machine, self.wishes.tokens // k, self.wishes.seq, self.wishes.fused)
            costs.append(known[w.shape])
        return Micro(costs, sum(c.forward_s for c in costs), Tracks(self._tracks(costs)))

    def _tracks(self, costs: list[Cost]) -> list[Track]:
        """Nothing in host memory; then the first layers, which wait longest, in each way and in growing number."""
        asked = self.wishes.activations
        least = [min((m for m in c.kept if m in KEEPS), key=KEEPS.index) if asked not in c.kept else asked
                 for c in costs]
        if asked is not None and read(asked).keep == LINKED:
            mode = read(asked)
            followers = set(self._pairs(costs).values())
            least = [str(mode._replace(keep="attention")) if one == asked and w not in followers else one
                     for w, one in enumerate(least)]
        tracks = [self._track(costs, least, asked is None, {})]
        for mode in ON_HOST if asked is None else ():
            able = [w for w, c in enumerate(costs) if mode in c.away and self.shape.windows[w].learns]
            counts = sorted({-(-len(able) * part // PARTS) for part in range(1, PARTS + 1)} - {0})
            tracks += [self._track(costs, least, True, dict.fromkeys(able[:n], mode)) for n in counts]
        if asked is None and self.wishes.seq >= LONG_SEQ:
            tracks += self._long_tracks(costs, least) + self._linked_tracks(costs, least)
        return tracks + (self._disk_tracks(costs, least) if asked is None and self.wishes.nvme else [])

    def _long_tracks(self, costs: list[Cost], least: list[str]) -> list[Track]:
        """Of long sequences an attention's output spares more time than all else: some layers keep it in host memory,
        with their input, and those before them the input alone, in what is left there."""
        able = [w for w, c in enumerate(costs) if "attention+host" in c.away and self.shape.windows[w].learns]
        counts = sorted({-(-len(able) * part // PARTS) for part in range(1, PARTS + 1)} - {0})
        return [self._track(costs, least, True, dict.fromkeys(able[:both], "attention+host")
                            | dict.fromkeys(able[:inputs], "replay+host"))
                for inputs, both in itertools.combinations(counts, 2)]

    def _pairs(self, costs: list[Cost]) -> dict[int, int]:
        """Layers that may be linked, by the layers before them, each of which is in one pair."""
        found: dict[int, int] = {}
        learns = [w.learns for w in self.shape.windows]
        for w in range(len(costs) - 1):
            if all(LINKED in costs[i].kept and learns[i] for i in (w, w + 1)) and w not in found.values():
                found[w] = w + 1
        return found

    def _linked_tracks(self, costs: list[Cost], least: list[str]) -> list[Track]:
        """Pairs of layers of which the first keeps its input and the outputs of attention are kept of both: the first
        of them on disk, those behind in host memory, or there the inputs alone, and the others on the device. Or inputs
        alone on disk."""
        pairs = {a: b for a, b in self._pairs(costs).items()
                 if costs[b].backward_s[LINKED] < costs[b].backward_s["replay"]}
        counts, found = sorted({-(-len(pairs) * part // PARTS) for part in range(PARTS + 1)}), []
        order = list(pairs.items())
        ways = (("attention", LINKED, "+host"), ("replay", "replay", "+host"))
        on_disk = (("attention", LINKED, "+disk"), ("replay", "replay", "+disk")) if self.wishes.nvme else ()
        for first in (None, *on_disk) if pairs else ():
            for ends in itertools.combinations_with_replacement(counts, 3):
                if (first is None) != (ends[0] == 0):
                    continue
                parts = zip((first, *ways), (order[:ends[0]], order[ends[0]:ends[1]], order[ends[1]:ends[2]]))
                fixed = {w: keep + way[2] for way, of in parts for pair in of for w, keep in zip(pair, way)}
                found.append(self._track(costs, least, True, fixed, dict(order[ends[2]:])))
        return found

    def _disk_tracks(self, costs: list[Cost], least: list[str]) -> list[Track]:
        """The first layers keep on disk what some behind them keep in host memory."""
        found = []
        for keep in KEEPS:
            able = [w for w, c in enumerate(costs) if f"{keep}+disk" in c.away and self.shape.windows[w].learns]
            counts = sorted({-(-len(able) * part // PARTS) for part in range(1, PARTS + 1)} - {0})
            for on_disk, away in itertools.combinations_with_replacement(counts, 2):
                modes = dict.fromkeys(able[:away], f"{keep}+host") | dict.fromkeys(able[:on_disk], f"{keep}+disk")
                found.append(self._track(costs, least, True, modes))
        return found

    def _track(self, costs: list[Cost], least: list[str], free: bool, fixed: dict[int, str],
               pairs: dict[int, int] | None = None) -> Track:
        """free: windows that are not fixed may keep more than the least. pairs: of these, those that may be linked."""
        modes = [fixed.get(w, mode) for w, mode in enumerate(least)]
        away = self._away(costs, modes)
        spilled = _spills(away, modes)

        def make(first_alone: bool) -> Levels:
            return self._made(costs, self._levels(costs, modes, free and not first_alone, fixed, pairs or {}))

        return Track(_kept_there(away, spilled), sum(away) - next((n for n in reversed(away) if n), 0),
                     spilled_bytes(spilled.values()), self.spill_s(spilled), make)

    def _made(self, costs: list[Cost], levels: Iterator[tuple[tuple[str, ...], tuple[int, ...]]]) -> Levels:
        """Bytes and seconds of each, from the one before it."""
        found = list(levels)
        first, learns = found[0][0], np.array([w.learns for w in self.shape.windows])
        kept, work, seconds = (np.repeat(np.array([of(c)[m] for c, m in zip(costs, first)])[None], len(found), axis=0)
                               for of in (lambda c: c.kept, lambda c: c.work, lambda c: c.backward_s))
        for at, (modes, changed) in enumerate(found):
            for w in changed:
                cost, mode = costs[w], modes[w]
                kept[at:, w], work[at:, w], seconds[at:, w] = cost.kept[mode], cost.work[mode], cost.backward_s[mode]
        kept *= learns
        work += np.array(self.coming(costs, first)) + np.array(self.flying)      # links of later levels make none
        return Levels([modes for modes, _ in found], self._rising((np.cumsum(kept, axis=1) + work).max(axis=1)),
                      seconds.sum(axis=1), self._rising(kept[:, :EARLY].sum(axis=1) + work[:, :EARLY].max(axis=1)))

    def _rising(self, totals: np.ndarray) -> np.ndarray:
        """Bytes with what torch's allocator holds beyond them; of a level no less than of those before it."""
        return np.maximum.accumulate(np.maximum(self._with_cache(totals), 0))

    def _levels(self, costs: list[Cost], modes: list[str], free: bool, fixed: dict[int, str], pairs: dict[int, int]
                ) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
        """From keeping least to keeping most, what saves most time per byte first, last windows first: they are
        needed again soonest, so keeping theirs hardly raises the peak. Modes, and the windows that changed. Of a pair,
        the second is linked once the first keeps attention's output."""
        modes = list(modes)
        yield tuple(modes), ()
        if not free:
            return
        spared = {a: costs[b].backward_s["replay"] - costs[b].backward_s[LINKED] for a, b in pairs.items()}
        begins = dict.fromkeys(pairs.values(), LINKED)
        steps = [(-gain, -w, order, mode) for w, c in enumerate(costs) if w not in fixed
                 for gain, order, mode in self._hull(c, begins.get(w), spared.get(w, 0.0))]
        for _, minus_w, _, mode in sorted(steps):
            w = -minus_w
            for step in (*self._between(costs[w], modes[w], mode), mode):
                modes[w], changed = step, (w,)
                if w in pairs and modes[pairs[w]] == "replay":
                    modes[pairs[w]], changed = LINKED, (w, pairs[w])
                yield tuple(modes), changed

    def _hull(self, cost: Cost, *how: Any) -> list[tuple[float, int, str]]:
        """As _hull; layers that cost the same share a Cost."""
        key = id(cost), *how
        if key not in self.hulls:
            self.hulls[key] = _hull(cost, *how)
        return self.hulls[key]

    def _between(self, cost: Cost, *ends: str) -> list[str]:
        key = id(cost), *ends
        if key not in self.betweens:
            self.betweens[key] = _between(cost, *ends)
        return self.betweens[key]

    # ---- time ----

    def step(self, choice: Choice) -> Step:
        micro, key = choice.micro, (choice.homes, choice.ring)
        if key not in self.slot_bytes:
            self.slot_bytes[key] = array("q", self.slots(*key))
        return Step(**self._fixed, **self._timed(micro), **self._placed(choice.homes, micro, choice.through),
                    **self._kept(micro, choice.modes), slots=self.slot_bytes[key], micro=micro)

    @functools.cached_property
    def _fixed(self) -> dict[str, Any]:
        """Of a step, what no choice changes."""
        units, m = self.shape.units, self.machine
        return {"units": Lists.of(w.units for w in self.shape.windows), "again": Lists.of(self.again),
                "leaving": Lists.of(self.leaving), "weights": array("q", [u.weights for u in units]),
                "gradients": array("q", [u.gradients for u in units]),
                "add_s": array("d", [u.trained / (m.add_gparams * 1e9) for u in units]), "depth": self.depth,
                "h2d": m.h2d_gbps * 1e9, "d2h": m.d2h_gbps * 1e9, "both": m.both_gbps * 1e9, "busy": m.busy_gbps * 1e9,
                "write": m.disk_write_gbps * 1e9, "read": m.disk_read_gbps * 1e9}

    @_kept_by_arguments
    def _timed(self, micro: int) -> dict[str, Any]:
        costs = self.micro(micro).costs
        return {"forward_s": array("d", [c.forward_s for c in costs]),
                "forward_host_s": array("d", [c.forward_host_s for c in costs])}

    @_kept_by_arguments
    def _placed(self, homes: tuple[Home, ...], micro: int, through: frozenset[int]) -> dict[str, Any]:
        units, m, every = self.shape.units, self.machine, range(len(homes))
        host, device = m.adam_rate(states=self.wishes.states), m.device_adam_gparams * 1e9
        few, (on_disk, filed), visiting = m.adam_rate(POOL, self.wishes.states), self._disks(homes, micro), \
            self.visiting(homes)
        return {"updated_on": array("q", [DEVICE if homes[u] else ON_DISK if u in on_disk else THROUGH if u in through
                                          else HOST for u in every]),
                "update_s": array("d", [units[u].trained / device + self.gathering_s(units[u], micro) if homes[u]
                                        else units[u].trained / (few if u in on_disk else host) for u in every]),
                "visiting": array("q", [visiting.get(u, 0) for u in every]),
                "disk_s": array("d", [self.drive_s(u, u in filed) if u in on_disk else 0.0 for u in every]),
                "through_s": array("d", [self.through_s(u) if u in through else 0.0 for u in every]),
                "read_s": array("d", [self.read_s(u) if u in filed else 0.0 for u in every]),
                "lent": self.lent(homes)}

    @_kept_by_arguments
    def _kept(self, micro: int, modes: tuple[str, ...]) -> dict[str, Any]:
        costs, away = self.micro(micro).costs, self.away(micro, modes)
        return {"backward_s": array("d", [c.backward_s[mode] for c, mode in zip(costs, modes)]),
                "backward_host_s": array("d", [c.backward_host_s[mode] for c, mode in zip(costs, modes)]),
                "away": array("q", away), "spilled": array("q", [mode in DISK for mode in modes])}

    def drive_s(self, unit: int, filed: bool) -> float:
        """Of an update's reads and writes. filed: of its weights too."""
        weights = self.shape.units[unit].gradients * filed
        return 2 * (self.states(unit) + weights) / (self.machine.disk_both_gbps * 1e9)

    def read_s(self, unit: int) -> float:
        """Of a unit's weights from the disk, for a fetch."""
        return self.shape.units[unit].weights / (self.machine.disk_read_gbps * 1e9)

    def lent(self, homes: tuple[Home, ...]) -> list[int]:
        """Bytes of the buffers that gradients pass through, where they are kept nowhere."""
        return self.tally.lent(self._where(homes))

    def through_s(self, unit: int) -> float:
        """Of an update through the device."""
        return self.shape.units[unit].trained / self.through_rate

    def gathering_s(self, unit: Unit, micro: int) -> float:
        """A step's gradients into the planes of a unit at home in VRAM: measured and copied, then added up."""
        moved = GATHERED[0] + (micro - 1) * GATHERED[1]
        return unit.trained * moved / (self.machine.hbm_gbps * 1e9)

    def time(self, choice: Choice, than: float = math.inf) -> Timing | None:
        """None where it takes so many seconds or more."""
        step = self.step(choice)
        key = (choice.homes, choice.ring, min(choice.micro, SHOWN_MICRO))
        if key not in self.schedules:
            self.schedules[key] = _core.schedule(step)
        self.simulations += 1
        return simulate(step, self.schedules[key], than)

    def bound(self, homes: Homes, slots: int, micro: int, backward_s: Any, out: Any = 0, spill_s: Any = 0.0) -> Any:
        """Seconds that a step cannot undercut, each of its passes by itself. backward_s: of one; out: bytes of
        activations that cross; spill_s: of the drive, which moves them one way at a time. Numbers, or arrays of these.

        The first forward: compute behind the first weights; updates, and compute behind the last of them; all
        weights across the bus, beside the updates; activations out. Later passes: compute; the weights that no slot
        can have kept; activations. From the second backward on, the host adds up gradients, and is behind by a few
        units at the most.
        """
        return self._bound(np.array(self._of_homes(homes, micro)), slots, micro, backward_s, out, spill_s)

    def _bound(self, of: np.ndarray, slots: Any, micro: int, backward_s: Any, out: Any, spill_s: Any) -> Any:
        """of: what _of_homes gives, for one choice of homes or, as columns, for several."""
        m, made = self.machine, self.micro(micro)
        first, end_s, alone, weights, needed, gradients, add_s, longest_add_s, once, again = of
        up, both = m.h2d_gbps * 1e9, m.both_gbps * 1e9
        first = np.maximum(first, out / both)
        forward = np.maximum(np.maximum(made.forward_s, (weights - slots) / up), out / both)
        backward = np.maximum(backward_s, (needed - slots + out) / both)
        adding = np.maximum(backward, add_s - (OFFLOAD_DEPTH + STAGINGS + 1) * longest_add_s)
        passes = first + backward + (micro - 1) * (forward + adding) + end_s
        added = first + backward + forward + (micro - 1) * add_s if micro > 1 else 0.0
        read = once + np.maximum(again - slots, 0) + (micro - 1) * (np.maximum(once - slots, 0)
                                                                    + np.maximum(again - slots, 0))
        reading = read / (m.disk_read_gbps * 1e9)    # a first forward finds none in a slot
        least = np.maximum(np.maximum(alone, micro * gradients / both), reading)
        return NORM_S + functools.reduce(np.maximum, (passes, added, micro * spill_s, least))

    def _of_homes(self, homes: Homes, micro: int) -> tuple[float, ...]:
        """What a bound takes from homes alone: seconds of the first forward, from the last window to the norm, and of
        updates where nothing else is to be done; bytes of weights, of those that backward needs again, and of
        gradients; seconds to add up gradients, and one unit's; bytes of weights that are on the drive, and of those
        that backward needs again."""
        filed = self.filed(homes.units, micro)
        return (self._first_forward(homes, micro), homes.end_s,
                self._updates_alone(homes, micro) if self.wishes.grads == "none" else 0.0,
                homes.weights, homes.again, homes.gradients, homes.add_s, homes.longest_add_s,
                sum(self.shape.units[u].weights for u in filed),
                sum(self.shape.units[u].weights for u in filed if u in self.needed_again))

    def _updates_alone(self, homes: Homes, micro: int) -> float:
        """Seconds of them, which a step takes at least where they run beside all of it."""
        on_disk, filed = self._disks(homes.units, micro)
        elsewhere = on_disk | homes.through
        host = sum(unit.trained for u, unit in enumerate(self.shape.units) if not homes.units[u] and u not in elsewhere)
        return max(host / self.machine.adam_rate(states=self.wishes.states), homes.through_s,
                   sum(self.drive_s(u, u in filed) for u in on_disk))

    def _first_forward(self, homes: Homes, micro: int) -> float:
        m, made = self.machine, self.micro(micro)
        busy = min(m.h2d_gbps, m.busy_gbps) * 1e9
        if self.wishes.grads == "none":         # updates began in the backward before
            return max(made.forward_s, homes.weights / (m.h2d_gbps * 1e9))
        trained = [self.shape.units[u].trained for u in self.first if not homes.units[u] and u not in homes.through]
        from_disk = sum(self.shape.units[u].trained for u in self.on_disk(homes.units, micro))   # beside the others
        update_s = homes.update_s * (1 - from_disk / max(sum(trained), 1))
        beside = min(homes.weights, update_s * busy)
        behind = sum(c.forward_s for c in made.costs[homes.last_update:]) if homes.update_s else 0.0
        return max(homes.begin_s + made.forward_s, update_s + behind, homes.through_s,
                   beside / busy + (homes.weights - beside) / (m.h2d_gbps * 1e9))

    def through(self, homes: tuple[Home, ...]) -> frozenset[int]:
        """Units at home in RAM whose updates are over sooner through the device than behind the others on the host.
        None where some are on disk: then the drive is what a step waits for."""
        if isinstance(self.wishes.homes, dict):
            return self._named("through")
        if self.wishes.homes == "through":
            return frozenset(u for u in self.first if self.shape.units[u].trained and not homes[u])
        if self.wishes.homes or self.wishes.grads == "none" or not self.through_rate or self.on_disk(homes, 1):
            return frozenset()
        host_s, device_s, found = 0.0, 0.0, []
        rate = self.machine.adam_rate(states=self.wishes.states)
        for u in self.first:
            if not homes[u] and (trained := self.shape.units[u].trained):
                there, here = device_s + self.through_s(u), host_s + trained / rate
                if there < here:
                    device_s = there
                    found.append(u)
                else:
                    host_s = here
        return frozenset(found)

    def _homes(self, homes: tuple[Home, ...], through: frozenset[int] = frozenset()) -> Homes:
        m, units = self.machine, self.shape.units
        away = [u for u in self.first if not homes[u]]
        at_once = [u for u in away if self.first[u] == 0]
        added = [u for u in away if units[u].trained]
        trained = [u for u in added if u not in through] if through else added
        rate = m.adam_rate(states=self.wishes.states)
        begin = sum([units[u].trained for u in self.first if homes[u]]) / (m.device_adam_gparams * 1e9)
        if at_once:
            update = self.through_s(at_once[0]) if at_once[0] in through else units[at_once[0]].trained / rate
            begin = max(begin, update + units[at_once[0]].weights / (m.h2d_gbps * 1e9))
        numbers, weights = [units[u].trained for u in added], [units[u].weights for u in away]
        here = numbers if trained is added else [units[u].trained for u in trained]
        return Homes(
            homes, begin, sum(units[u].gradients for u in self.leaving[0] if not homes[u]) / (m.both_gbps * 1e9),
            sum(here) / rate, self.first[trained[-1]] if trained else 0,
            sum(weights), sum([units[u].weights for u in away if u in self.needed_again]),
            sum([units[u].gradients for u in away]), sum(numbers) / (m.add_gparams * 1e9),
            max(numbers, default=0) / (m.add_gparams * 1e9), sum(self.visiting(homes).values()),
            self._ring_bytes(weights), through, sum(self.through_s(u) for u in through))

    def _ring_bytes(self, weights: list[int]) -> list[tuple[int, int]]:
        """(ring, bytes of its slots) for units of these sizes."""
        key = frozenset(Counter(weights).items())
        if key not in self.ring_bytes:
            self.ring_bytes[key] = [(ring, sum(plan_slots(weights, ring))) for ring in self.rings()]
        return self.ring_bytes[key]

    # ---- what may be chosen ----

    def micro_counts(self) -> list[int]:
        """Divisors of the number of sequences, or the one that is asked for; 1 where no gradient waits for another."""
        if self.wishes.grads == "none":
            return [1]
        sequences = self.wishes.tokens // self.wishes.seq
        return [self.wishes.micro] if self.wishes.micro else [k for k in range(1, sequences + 1) if sequences % k == 0]

    def home_choices(self) -> list[tuple[Home, ...]]:
        """Units at home in VRAM: the embedding, the head, and a beginning of what is between. The first layers
        gain most there: the next forward need not wait for their updates. Of the very first, only the states may be
        away."""
        n = len(self.shape.units)
        if isinstance(self.wishes.homes, dict):
            names = [self.wishes.homes.get(u.name, "ram") for u in self.shape.units]
            return [tuple(Home[h.upper()].value if h in SETTLED else Home.RAM.value for h in names)]
        if self.wishes.homes in (*DISKS, "through"):
            return [(Home.RAM.value,) * n]
        if self.wishes.homes:
            return [(Home[self.wishes.homes.upper()].value,) * n]
        kinds = {u: self.shape.windows[w].kind for u, w in self.first.items()}
        ends = [u for u in self.first if kinds[u] in ("embedding", "head")][:MOST_ENDS]
        middle = [u for u in self.first if u not in ends]
        found = []
        for first in range(len(middle) + 1):
            for taken in range(1 << len(ends)):
                homes = [Home.RAM.value] * n
                for u in middle[:first] + [e for i, e in enumerate(ends) if taken >> i & 1]:
                    homes[u] = Home.VRAM.value
                found.append(tuple(homes))
                for u in list(self.first)[:GUESTS]:
                    if homes[u] == Home.RAM and self.shape.units[u].trained:
                        homes[u] = Home.ARRIVE.value
                        found.append(tuple(homes))
        return found

    def rings(self) -> list[int]:
        if self.wishes.slots:
            return [self.wishes.slots]
        n = len(self.shape.units)
        return [r for r in RINGS if r < n] + [max(2, n)]

    def combinations(self) -> Iterator[tuple[int, Homes, int, int, int, int]]:
        """(micro, homes, ring, bytes of its slots, bytes at home in VRAM, bytes in host memory)."""
        for homes in self.ways:
            choice, overhead = homes.units, self.machine.vram_overhead_bytes + THROUGH_BYTES * bool(homes.through)
            for several in (False, True):
                counts = [k for k in self.micro_counts() if (k > 1) == several]
                if not counts or (homes.through and self.on_disk(choice, counts[0])):
                    continue
                host = sum(self.host_bytes(choice, counts[0]).values())
                planes = overhead + sum(self.planes_at_home(choice, counts[0]).values())
                for slots, ring in {slots: ring for ring, slots in reversed(homes.slots)}.items():
                    for micro in counts:                # a larger ring than the units fill is no other choice
                        yield micro, homes, ring, slots, planes, host

    @functools.cached_property
    def ways(self) -> list[Homes]:
        """Of each choice of homes: all updates on the host, or some through the device; or all, where that is asked for
        and any are."""
        found = []
        for choice in self.home_choices():
            through = self.through(choice)
            if through and not self.through_rate:            # named, for a machine that has no such way
                continue
            whole = self.wishes.homes == "through" or isinstance(self.wishes.homes, dict)
            found += [self._homes(choice)] if not whole or not through else []
            found += [self._homes(choice, through)] if through else []
        return found

    # ---- the best ----

    def best(self, than: float = math.inf) -> tuple[Choice, Timing] | None:
        """The choice of least time; of equal ones that with the least on disk, then in VRAM. None: nothing fits, or all
        takes so many seconds or more."""
        best: tuple[Choice, Timing] | None = None
        for bound, choice in itertools.islice(self._by_bound(), MOST_SIMULATIONS):
            if bound >= than:
                break
            if timing := self.time(choice, than):
                best, than = (choice, timing), timing.seconds
        return best

    def _by_bound(self) -> Iterator[tuple[float, Choice]]:
        """All that fits, the least bound first; of equal ones what takes least on disk, then in VRAM."""
        rows = [row for row in self.combinations()
                if row[3] + row[4] <= self.machine.vram_bytes and row[5] <= self.machine.host_bytes]
        found = [part for micro in self.micro_counts() if (part := self._bounds(rows, micro)) is not None]
        if not found:
            return
        bounds, spilled, tops, row, track, level = (np.concatenate(column) for column in zip(*found))
        for i in np.lexsort((track, row, tops, spilled, bounds)):
            micro, homes, ring, *_ = rows[row[i]]
            modes = self.micro(micro).tracks[track[i]].levels.modes[level[i]]
            yield float(bounds[i]), Choice(micro, homes.units, ring, modes, homes.through)

    def _bounds(self, rows: list[tuple[int, Homes, int, int, int, int]], micro: int) -> tuple[np.ndarray, ...] | None:
        """(bounds, bytes on disk, bytes on the device, row, track, level) of what fits of so many micro-batches."""
        at = [i for i, row in enumerate(rows) if row[0] == micro]
        if not at:
            return None
        homes = [rows[i][1] for i in at]
        slots, planes, on_host = (np.array([rows[i][k] for i in at], dtype=np.int64) for k in (3, 4, 5))
        fixed, tracks = planes + slots, self.micro(micro).tracks
        fit = tracks.fitting(self.machine.vram_bytes - fixed, self.machine.host_bytes - on_host,
                             np.array([self._room(h.units, micro) for h in homes], dtype=np.int64),
                             np.array([h.visiting for h in homes], dtype=np.int64))
        if not len(fit.at):
            return None
        own = [id(h) for h in homes]
        each = {own[i]: homes[i] for i in np.unique(fit.at).tolist()}
        place = {key: n for n, key in enumerate(each)}
        of = np.array([self._of_homes(h, micro) for h in each.values()]).T
        bounds = self._bound(of[:, np.array([place.get(key, 0) for key in own])[fit.at]], slots[fit.at], micro,
                             fit.backward_s, fit.out, fit.spill_s)
        return bounds, fit.spilled, fixed[fit.at] + fit.tops, np.array(at)[fit.at], fit.tracks, fit.levels

    def _room(self, homes: tuple[Home, ...], micro: int) -> int:
        """Bytes that states leave on disk."""
        key = homes, micro > 1
        if key not in self.rooms:
            self.rooms[key] = (self.wishes.nvme or 0) - sum(self.disk_bytes(homes, micro).values())
        return self.rooms[key]

    def fits(self) -> bool:
        """Does anything that may be chosen?"""
        return any(True for _ in self.fitting())

    def fitting(self) -> Iterator[tuple[int, Homes, Track]]:
        """(micro-batches, homes, activations) of all that fits."""
        vram, host = self.machine.vram_bytes, self.machine.host_bytes
        for micro, homes, _, slots, planes, on_host in self.combinations():
            tracks, room = self.micro(micro).tracks, self._room(homes.units, micro)
            for i in tracks.that_fit(vram - slots - planes, host - on_host, room, homes.visiting):
                yield micro, homes, tracks[i]

    def needs(self) -> tuple[int | None, int | None]:
        """(least VRAM within the host's limit, least host memory within the VRAM's); None: not with any."""
        vram, host = [], []
        for micro, homes, _, slots, planes, on_host in self.combinations():
            tracks = self.micro(micro).tracks
            at, away = tracks.within(self._room(homes.units, micro))
            there, here = on_host + away, slots + planes + tracks.least(at, homes.visiting)
            vram += here[there <= self.machine.host_bytes].tolist()
            host += there[here <= self.machine.vram_bytes].tolist()
        return min(vram, default=None), min(host, default=None)


def _spills(away: list[int], modes: Sequence[str]) -> dict[int, int]:
    """Of windows that keep something on disk, their bytes."""
    return {w: n for w, (n, mode) in enumerate(zip(away, modes)) if n and mode in DISK}


def _kept_there(away: list[int], spilled: dict[int, int]) -> int:
    """Bytes in host memory, with the blocks that carry those that are on disk."""
    return sum(away) - sum(spilled.values()) + min(BLOCKS, len(spilled)) * max(spilled.values(), default=0)


@functools.cache
def _spread(n: int) -> tuple[int, ...]:
    """Numbers below n in van der Corput's order."""
    bits = n.bit_length()
    return tuple(place for i in range(1 << bits) if (place := int(f"{i:0{bits}b}"[::-1], 2)) < n)


def _hull(cost: Cost, begin: str | None = None, spared: float = 0.0) -> list[tuple[float, int, str]]:
    """(seconds saved per byte, order, mode): steps from keeping least, or from `begin`, to keeping more, each less
    rewarding than the one before; a mode that another line passes below is left out. spared: seconds of another window,
    by the first step."""
    points = sorted((cost.kept[m], cost.backward_s[m], m) for m in cost.kept if m in KEEPS)
    steps, at = [], points[0] if begin is None else (cost.kept[begin], cost.backward_s[begin], begin)
    while later := [p for p in points if p[0] > at[0] and p[1] < at[1]]:
        best = max(later, key=lambda p: ((at[1] - p[1] + spared) / (p[0] - at[0]), p[0]))
        steps.append(((at[1] - best[1] + spared) / (best[0] - at[0]), len(steps), best[2]))
        at, spared = best, 0.0
    return steps


def _between(cost: Cost, low: str, high: str) -> list[str]:
    """Modes that a step passes over: for the last bytes that are left."""
    inside = [m for m in cost.kept if m in KEEPS and cost.kept[low] < cost.kept[m] < cost.kept[high]
              and cost.backward_s[m] < cost.backward_s[low]]
    return sorted(inside, key=lambda m: cost.kept[m])
