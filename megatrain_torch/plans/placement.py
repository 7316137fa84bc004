"""The search for the best plan: all that may be chosen, what fits of it, and what takes least time.

Every combination of micro-batches, homes of units, slots, and first layers that keep in host memory,
or on disk, what they keep, each with as many activations kept on the device as fit; a lower bound on
the time of each, and the simulation of those whose bound is below the best time found. What may be
chosen does not depend on the limits, so that more memory is never slower.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..store.disk import SPILLED, spilled_bytes
from .bounds import Bounds
from .cost import THROUGH_BYTES, Home
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

MOST_SIMULATIONS = 20000    # half a second; a search of a hundred layers takes some hundred
ROUNDED = 1 + 1e-9          # the walk adds a bound's numbers up in another order
PROBED = 8                  # choices of least bound, of which one is to tell which others are worth a look


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


class Problem:
    """A model on a machine for given tokens. like: the same with another number of buffers for
    gradients."""

    ways_of: type[Ways] = Ways
    most = MOST_SIMULATIONS

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes, like: Problem | None = None) -> None:
        self.shape, self.machine, self.wishes = shape, machine, wishes
        self.uses = Uses(shape, wishes.fused)
        self.tally = Tally(shape.units, wishes.grads == "ram", wishes.lent)
        self.disk = Disk(shape, machine, wishes, self.uses, self.tally)
        self.ways = self.ways_of(shape, machine, wishes, self.uses, self.disk)
        alike = like is not None and like.keeping.depth == depth_of(wishes)
        self.keeping = like.keeping if alike else Keeping(shape, machine, wishes, self.uses)
        self.known: dict[int, Tracks] = like.known if alike else {}
        updates = Updates(shape, machine, wishes)
        self.steps = Steps(self.keeping, self.ways, updates)
        self.bounds = Bounds(self.keeping, self.ways, updates)
        if like is not None:
            self.ways.known = like.ways.known

    # ---- bytes ----

    def host_bytes(self, homes: tuple[Home, ...], micro: int, modes: tuple[str, ...] = ()) -> dict[str, int]:
        """By plane, and what is there besides; modes: with the activations of these."""
        total = self.disk.host_bytes(homes, micro, self.disk.units(homes, micro))
        total["activations"] = self.keeping.on_host(self.keeping.costs(micro), modes) if modes else 0
        return total

    def disk_bytes(self, homes: tuple[Home, ...], micro: int, modes: tuple[str, ...] = ()) -> dict[str, int]:
        """On disk, by plane, and between them; modes: with the activations of these."""
        spilled = self.keeping.spills(self.keeping.costs(micro), modes) if modes else {}
        total = {SPILLED: spilled_bytes(spilled.values())} if spilled else {}
        return total | self.disk.bytes(homes, micro)

    def planes_at_home(self, homes: tuple[Home, ...], micro: int) -> dict[str, int]:
        """Of units at home in VRAM, by plane; what is there all the time."""
        return self.tally.at_home(self.disk.where(homes, OnDisk()), micro)

    # ---- what may be chosen ----

    def micro_counts(self) -> list[int]:
        """Divisors of the number of sequences, or the one that is asked for; 1 where no gradient
        waits for another."""
        if self.wishes.grads == "none":
            return [1]
        if self.wishes.micro:
            return [self.wishes.micro]
        sequences = self.wishes.tokens // self.wishes.seq
        return [k for k in range(1, sequences + 1) if sequences % k == 0]

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

    def _alike_counts(self) -> list[list[int]]:
        """Numbers of micro-batches with which planes are the same: one, and several."""
        counts = self.micro_counts()
        return [some for some in ([k for k in counts if k == 1], [k for k in counts if k > 1]) if some]

    def _sizes(self, units: tuple[Home, ...], counts: list[int], fitting: bool
               ) -> tuple[list[int], int, int] | None:
        """(counts, bytes at home in VRAM and besides, bytes in host memory); None where they do not
        fit."""
        m = self.machine
        planes = m.vram_overhead_bytes + sum(self.planes_at_home(units, counts[0]).values())
        if fitting and planes > m.vram_bytes:
            return None
        host = sum(self.host_bytes(units, counts[0]).values())
        return None if fitting and host > m.host_bytes else (counts, planes, host)

    # ---- the best ----

    def best(self, than: float = math.inf) -> tuple[Choice, Timing] | None:
        """The choice of least time; of equal ones that with the least on disk, then in VRAM. None:
        nothing fits, or all takes so many seconds or more."""
        best: tuple[Choice, Timing] | None = None
        for bound, choice in itertools.islice(self._by_bound(than), self.most):
            if bound >= than:
                break
            if timing := self.steps.time(choice, than):
                best, than = (choice, timing), timing.seconds
        return best

    def _by_bound(self, than: float) -> Iterator[tuple[float, Choice]]:
        """All that fits, the least bound first; of equal ones what takes least on disk, then in
        VRAM. Without what can be told at once to take `than` seconds or more, or longer than
        another."""
        rows = list(self.combinations(fitting=True))
        found = [part for micro in self.micro_counts() if (part := self._bounds(rows, micro))]
        if not found:
            return
        columns = tuple(np.concatenate(column) for column in zip(*found))
        bounds, _, _, row, micros, track, level = columns

        def choice(i: int) -> Choice:
            micro, (_, homes, ring, *_) = int(micros[i]), rows[row[i]]
            modes = self.tracks(micro)[track[i]].modes(level[i])
            return Choice(micro, homes.units, ring, modes, homes.through)

        for i in np.argpartition(bounds, PROBED)[:PROBED] if len(bounds) > PROBED else ():
            if timing := self.steps.time(choice(i), than):
                than = timing.seconds
        at = np.flatnonzero(bounds <= than * ROUNDED)
        bounds, spilled, tops, row, micros, track, level = columns
        for i in at[np.lexsort([key[at] for key in (track, micros, row, tops, spilled, bounds)])]:
            yield float(bounds[i]), choice(i)

    def _bounds(self, rows: list[Combination], micro: int) -> tuple[np.ndarray, ...] | None:
        """(bounds, bytes on disk, bytes on the device, row, micro-batches, track, level) of what
        fits of so many micro-batches."""
        at = [i for i, row in enumerate(rows) if micro in row.counts]
        if not at:
            return None
        ways = list({id(rows[i].homes): rows[i].homes for i in at}.values())
        place = {id(homes): n for n, homes in enumerate(ways)}
        way = np.array([place[id(rows[i].homes)] for i in at])
        slots, planes, on_host = (np.array([rows[i][k] for i in at], dtype=np.int64) for k in (3, 4, 5))
        room, visiting, low = (np.array(column, dtype=np.int64)[way] for column in (
            [self.disk.room(h.units, micro) for h in ways], [h.visiting for h in ways],
            [h.low for h in ways]))
        fixed, tracks = planes + slots, self.tracks(micro)
        fit = tracks.fitting(self.machine.vram_bytes - fixed, self.machine.host_bytes - on_host, room,
                             visiting, low)
        if not len(fit.at):
            return None
        of = self.bounds.of_homes(ways, micro).at(way[fit.at])
        bounds = self.bounds.of(slots[fit.at], micro, of, tracks, fit)
        return (bounds, tracks.bytes[2, fit.tracks], fixed[fit.at] + fit.tops, np.array(at)[fit.at],
                np.full(len(bounds), micro), fit.tracks, fit.levels)

    # ---- what fits ----

    def fits(self) -> bool:
        """Does anything that may be chosen?"""
        return any(True for _ in self.fitting())

    def fitting(self) -> Iterator[tuple[int, Homes, Track]]:
        """(micro-batches, homes, activations) of all that fits."""
        vram, host = self.machine.vram_bytes, self.machine.host_bytes
        for counts, homes, _, slots, planes, on_host in self.combinations(fitting=True):
            for micro in counts:
                tracks, room = self.tracks(micro), self.disk.room(homes.units, micro)
                for i in tracks.that_fit(vram - slots - planes, host - on_host, room, homes.visiting):
                    yield micro, homes, tracks[i]

    def needs(self) -> tuple[int | None, int | None]:
        """(least VRAM within the host's limit, least host memory within the VRAM's); None: not with
        any."""
        vram, host = [], []
        for counts, homes, _, slots, planes, on_host in self.combinations():
            for micro in counts:
                tracks = self.tracks(micro)
                at, away = tracks.within(self.disk.room(homes.units, micro))
                there, here = on_host + away, slots + planes + tracks.least(at, homes.visiting)
                vram += here[there <= self.machine.host_bytes].tolist()
                host += there[here <= self.machine.vram_bytes].tolist()
        return min(vram, default=None), min(host, default=None)
