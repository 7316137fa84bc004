"""The search for the best plan: all that may be chosen, what fits of it, and what takes least time.

Every combination of micro-batches, homes of units, slots, and first layers that keep in host
memory, or on disk, what they keep, each with as many activations kept on the device as fit; a lower
bound on the time of each, and the simulation of those whose bound is below the best time found.
What may be chosen does not depend on the limits, so that more memory is never slower.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..store.disk import SPILLED, spilled_bytes
from .bounds import Bounds, Kept
from .cost import THROUGH_BYTES, Home
from .exchange import Exchange
from .held import Held
from .homes import Homes, Ways
from .keeping import Keeping, depth_of
from .machine import Machine
from .on_disk import Disk, OnDisk
from .patterns import Patterns
from .shapes import Shape
from .simulate import Timing
from .steps import Steps
from .tally import Tally
from .tracks import Track, Tracks
from .updates import Updates
from .uses import Uses
from .wishes import Choice, Wishes

MOST_SIMULATIONS = 20000    # a second; a search of a hundred layers takes some hundred
WORTH_THROUGH = 1.01        # README's loop, 7B width, 24 GiB, measured 2.4 % where plans have 1.6 to 2.7
ROUNDED = 1 + 1e-9          # the walk adds a bound's numbers up in another order
PROBED = 8                  # choices of least bound, whose time tells which others cannot win


class Combination(NamedTuple):
    """One way to have units and slots.

    Attributes:
        counts: numbers of micro-batches, with any of which the bytes are the same.
        slots, planes, host: bytes of the slots, of what is on the device all the time, and in host
            memory.
    """

    counts: list[int]
    homes: Homes
    ring: int
    slots: int
    planes: int
    host: int


class Candidates(NamedTuple):
    """Choices that fit, as arrays.

    Attributes:
        bound: seconds that it cannot undercut; order: the same, if compute waited for nothing that
            is kept away. spilled, top: bytes of activations on disk, and of all on the device.
        row: of Problem.rows. micro: micro-batches. track, level: of Problem.tracks(micro).
    """

    bound: np.ndarray
    order: np.ndarray
    spilled: np.ndarray
    top: np.ndarray
    row: np.ndarray
    micro: np.ndarray
    track: np.ndarray
    level: np.ndarray

    def in_order(self) -> np.ndarray:
        """Of equal order, what takes least on disk, then in VRAM, comes first."""
        return np.lexsort((self.track, self.micro, self.row, self.top, self.spilled, self.order))


class Table(NamedTuple):
    """Rows of Problem.rows, as arrays.

    Attributes:
        ways: homes, each once; way: of a row, its place there. row: its number.
        slots, fixed: bytes of slots, and of all on the device but activations.
        limits: bytes for activations on the device, in host memory and on disk; bytes of states
            that arrive; the first window whose weights come in backward.
    """

    ways: list[Homes]
    row: np.ndarray
    way: np.ndarray
    slots: np.ndarray
    fixed: np.ndarray
    limits: tuple[np.ndarray, ...]


class Problem:
    """A model on a machine for given tokens. like: see with_lent."""

    ways_of: type[Ways] = Ways
    most = MOST_SIMULATIONS

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes, like: Problem | None = None
                 ) -> None:
        if not wishes.fused and any(u.fetched for u in shape.units):
            shape = shape.without_templates()
        self.shape, self.machine, self.wishes = shape, machine, wishes
        self.uses = Uses(shape, wishes.fused)
        self.tally = Tally(shape.units, wishes.grads == "ram", wishes.lent, not wishes.fleet.alone)
        seen = wishes.fleet.seen(machine)
        self.exchange = Exchange(shape, seen, wishes.fleet, wishes.delivery)
        self.disk = Disk(shape, seen, wishes, self.uses, self.tally)
        self.ways = self.ways_of(shape, seen, wishes, self.uses, self.disk, self.exchange)
        alike = like is not None and like.keeping.depth == depth_of(wishes)
        self.keeping = like.keeping if alike else Keeping(shape, seen, wishes, self.uses)
        self.known: dict[int, Tracks] = like.known if alike else {}
        self.tables: dict[bool, Table] = {}
        updates = Updates(shape, seen, wishes)
        held = Held(self.keeping, self.ways)
        self.steps = Steps(self.keeping, self.ways, updates, held)
        self.bounds = Bounds(self.keeping, self.ways, updates, held)
        if like is not None:
            self.ways.known = like.ways.known

    def with_lent(self, lent: int) -> Problem:
        """The same with another number of buffers for gradients."""
        wishes = dataclasses.replace(self.wishes, lent=lent)
        return type(self)(self.shape, self.machine, wishes, self)

    # ---- bytes ----

    def host_bytes(self, homes: tuple[Home, ...], micro: int, modes: tuple[str, ...] = ()
                   ) -> dict[str, int]:
        """By plane, and what is there besides; modes: with the activations of these."""
        total = self.disk.host_bytes(homes, micro, self.disk.units(homes, micro))
        total["activations"] = 0
        if modes:
            own = self.keeping.on_host(self.keeping.costs(micro), modes)
            total |= self.wishes.fleet.on_host({"activations": own})
        return total

    def disk_bytes(self, homes: tuple[Home, ...], micro: int, modes: tuple[str, ...] = ()
                   ) -> dict[str, int]:
        """On disk, by plane, and between them; modes: with the activations of these."""
        spilled = self.keeping.spills(self.keeping.costs(micro), modes) if modes else {}
        total = {SPILLED: spilled_bytes(spilled.values()) * self.wishes.fleet.gpus} if spilled else {}
        return total | self.disk.bytes(homes, micro)

    def _left(self, host: Any) -> Any:
        """Of host memory for what one GPU keeps there, where so many bytes are taken. A number, or an
        array."""
        return (self.machine.host_bytes - host) // self.wishes.fleet.gpus

    def planes_at_home(self, homes: tuple[Home, ...], micro: int) -> dict[str, int]:
        """Of units at home in VRAM, by plane; what is there all the time."""
        found = self.tally.at_home(self.disk.where(homes, OnDisk()), micro)
        return self.wishes.fleet.on_device(found)

    # ---- what may be chosen ----

    def micro_counts(self) -> list[int]:
        """Divisors of the number of sequences, or the one that is asked for; 1 where no gradient
        waits for another."""
        if self.wishes.grads == "none":
            return [1]
        if self.wishes.micro:
            return [self.wishes.micro]
        return _divisors(self.wishes.tokens // self.wishes.seq)

    def tracks(self, micro: int) -> Tracks:
        """What windows may keep where, in so many micro-batches."""
        if micro not in self.known:
            self.known[micro] = Patterns(self.keeping, self.keeping.costs(micro)).tracks()
        return self.known[micro]

    def combinations(self, fitting: bool = False) -> Iterator[Combination]:
        """fitting: without those that do not fit, whatever windows keep."""
        for units in self.ways.choices:
            sizes = [size for counts in self._alike_counts()
                     if (size := self._sizes(units, counts, fitting))]
            for homes in self.ways.of(units) if sizes else ():
                passing = THROUGH_BYTES * bool(homes.through)
                for counts, planes, host in sizes:
                    if homes.through and self.disk.units(units, counts[0]).states:
                        continue        # a larger ring than the units fill is no other choice
                    rings = {slots: ring for ring, slots in reversed(homes.slots)}
                    for slots, ring in rings.items():
                        yield Combination(counts, homes, ring, slots, planes + passing, host)

    @functools.cached_property
    def rows(self) -> list[Combination]:
        """Those that fit, if windows keep nothing."""
        return list(self.combinations(fitting=True))

    def _alike_counts(self) -> list[list[int]]:
        """Numbers of micro-batches with which planes are the same: one, and several."""
        counts = self.micro_counts()
        alike = [k for k in counts if k == 1], [k for k in counts if k > 1]
        return [some for some in alike if some]

    def _sizes(self, units: tuple[Home, ...], counts: list[int], fitting: bool
               ) -> tuple[list[int], int, int] | None:
        """(counts, bytes at home in VRAM and besides, bytes in host memory); None where they do not
        fit."""
        m = self.machine
        planes = m.vram_overhead_bytes + self.exchange.buffers \
            + sum(self.planes_at_home(units, counts[0]).values())
        if fitting and planes > m.vram_bytes:
            return None
        host = sum(self.host_bytes(units, counts[0]).values())
        return None if fitting and host > m.host_bytes else (counts, planes, host)

    # ---- the best ----

    def best(self, than: float = math.inf) -> tuple[Choice, Timing] | None:
        """The choice of least time; of equal ones the first in order. None: nothing fits, or all
        takes so many seconds or more."""
        best: tuple[Choice, Timing] | None = None
        of = self._candidates(than)
        for i in of.in_order()[:self.most] if of else ():
            if of.order[i] >= than:
                break
            choice = self._choice(of, i) if of.bound[i] < than else None
            if choice and (timing := self.steps.time(choice, than / self._worth(choice))):
                best, than = (choice, timing), timing.seconds * self._worth(choice)
        return best

    def _candidates(self, than: float) -> Candidates | None:
        """All that fits, without what takes `than` seconds or more, or longer than another; None:
        there is none."""
        found: list[Candidates] = []
        for micro in sorted(self.micro_counts(), key=self._pass_s):
            if part := self._bounded(micro, than):
                than = self._probed(part, than)
                found.append(part)
        if not found:
            return None
        every = Candidates(*map(np.concatenate, zip(*found)))
        at = np.flatnonzero(every.bound <= than * ROUNDED)
        return Candidates(*(column[at] for column in every))

    def _pass_s(self, micro: int) -> float:
        """Seconds of compute in a step of so many micro-batches, whatever is kept."""
        return micro * sum(c.forward_s + c.least_s for c in self.keeping.costs(micro))

    def _worth(self, choice: Choice) -> float:
        """By so much it must be faster than another, where homes are not asked for: what passes through the device has
        a bus that others need too."""
        return WORTH_THROUGH if choice.through and not self.wishes.homes else 1.0

    def _probed(self, part: Candidates, than: float) -> float:
        """Seconds that some of these take; `than`: all of those that were tried take more."""
        few = min(PROBED, len(part.bound) - 1)
        for i in np.argpartition(part.bound, few)[:few + 1]:
            choice = self._choice(part, i)
            if part.bound[i] < than and (timing := self.steps.time(choice, than / self._worth(choice))):
                than = timing.seconds * self._worth(choice)
        return than

    def _choice(self, of: Candidates, i: int) -> Choice:
        micro, (_, homes, ring, *_) = int(of.micro[i]), self.rows[of.row[i]]
        modes = self.tracks(micro)[of.track[i]].modes(of.level[i])
        return Choice(micro, homes.units, ring, modes, homes.through)

    def _bounded(self, micro: int, than: float) -> Candidates | None:
        """What fits of so many micro-batches, without most of what takes `than` seconds or more:
        homes that take so long whatever is kept, then layers that do wherever units are."""
        table = self._table(micro > 1)
        if not len(table.row):
            return None
        of = self.bounds.of_homes(table.ways, micro)
        forward_s, backward_s = map(sum, zip(*((c.forward_s, c.least_s)
                                               for c in self.keeping.costs(micro))))
        spare = np.maximum(table.slots, self.ways.spared)
        least = self.bounds.of(spare, micro, of.at(table.way), Kept(backward_s))
        at = np.flatnonzero(least <= than * ROUNDED)
        if not len(at):
            return None
        tracks = self.tracks(micro)
        fit = tracks.fitting(*(column[at] for column in table.limits),
                             than * ROUNDED / micro - forward_s)
        if not len(fit.at):
            return None
        row = at[fit.at]
        slots, of, kept = spare[row], of.at(table.way[row]), Kept.of(tracks, fit)
        bound = self.bounds.of(slots, micro, of, kept)
        return Candidates(bound, self.bounds.of(slots, micro, of, kept.by_itself()),
                          tracks.bytes[2, fit.tracks], table.fixed[row] + fit.tops, table.row[row],
                          np.full(len(bound), micro), fit.tracks, fit.levels)

    def _table(self, several: bool) -> Table:
        """Rows of one micro-batch, or of several."""
        if several not in self.tables:
            self.tables[several] = self._make_table(several)
        return self.tables[several]

    def _make_table(self, several: bool) -> Table:
        numbered = [(i, row) for i, row in enumerate(self.rows) if (row.counts[0] > 1) == several]
        ways = list({id(row.homes): row.homes for _, row in numbered}.values())
        place = {id(homes): n for n, homes in enumerate(ways)}
        row, way, slots, planes, host = np.array(
            [(i, place[id(r.homes)], r.slots, r.planes, r.host) for i, r in numbered],
            dtype=np.int64).reshape(-1, 5).T
        rooms = [self.disk.room(h.units, 1 + several) for h in ways]
        of_ways = np.array([(room, h.visiting, h.low) for room, h in zip(rooms, ways)],
                           dtype=np.int64).reshape(-1, 3)
        limits = self.machine.vram_bytes - slots - planes, self._left(host)
        return Table(ways, row, way, slots, slots + planes, (*limits, *of_ways[way].T))

    # ---- what fits ----

    def fits(self) -> bool:
        """Does anything that may be chosen?"""
        return any(True for _ in self.fitting())

    def fitting(self) -> Iterator[tuple[int, Homes, Track]]:
        """(micro-batches, homes, activations) of all that fits."""
        vram = self.machine.vram_bytes
        for counts, homes, _, slots, planes, on_host in self.combinations(fitting=True):
            for micro in counts:
                tracks, room = self.tracks(micro), self.disk.room(homes.units, micro)
                for i in tracks.that_fit(vram - slots - planes, self._left(on_host), room,
                                         homes.visiting):
                    yield micro, homes, tracks[i]

    def needs(self) -> tuple[int | None, int | None]:
        """(least VRAM within the host's limit, least host memory within the VRAM's); None: not with
        any."""
        vram, host = [], []
        for counts, homes, _, slots, planes, on_host in self.combinations():
            for micro in counts:
                tracks = self.tracks(micro)
                at, away = tracks.within(self.disk.room(homes.units, micro))
                there, here = on_host + away * self.wishes.fleet.gpus, slots + planes + tracks.least(at, homes.visiting)
                vram += here[there <= self.machine.host_bytes].tolist()
                host += there[here <= self.machine.vram_bytes].tolist()
        return min(vram, default=None), min(host, default=None)


@functools.cache
def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
