"""What a step cannot undercut: seconds, of thousands of choices at once, before any is simulated.

The rules are the walk's (csrc/walk/walk.h), each resource by itself; what they leave out only adds.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .cost import OFFLOAD_DEPTH, STAGINGS
from .held import Held
from .homes import Homes, Ways
from .keeping import Keeping
from .simulate import NORM_S
from .tracks import Fitting, Tracks
from .updates import Updates


class Of(NamedTuple):
    """What a bound takes from homes alone. Arrays by choice of homes.

    Attributes:
        first_s: of the first forward. top_s: of a forward, in its last window whose weights come,
            and behind. end_s: from the last window to the norm.
        update_s: of updates where nothing else is to be done. behind_s: of those that a backward
            waits for; settled_s: of those that are part of it.
        weights, again, gradients: bytes. add_s, longest_add_s: as Homes has them.
        host_s: of updates on the host. held_s: by which these take longer for each byte of
            activations that leaves.
        read, read_again: bytes of weights that are on the drive, and of those that backward needs.
    """

    first_s: np.ndarray
    top_s: np.ndarray
    end_s: np.ndarray
    update_s: np.ndarray
    behind_s: np.ndarray
    settled_s: np.ndarray
    weights: np.ndarray
    again: np.ndarray
    gradients: np.ndarray
    add_s: np.ndarray
    longest_add_s: np.ndarray
    host_s: np.ndarray
    held_s: np.ndarray
    read: np.ndarray
    read_again: np.ndarray

    def at(self, index: np.ndarray) -> Of:
        """Of these choices, in this order."""
        return Of(*(column[index] for column in self))


class Kept(NamedTuple):
    """What a bound takes from what windows keep. Arrays, or numbers for all.

    Attributes:
        backward_s, low_s, lowest_s: as Fitting has them. out, spill_s, forward_wait_s,
            backward_wait_s: as Track has them.
    """

    backward_s: np.ndarray | float
    low_s: np.ndarray | float = 0.0
    lowest_s: np.ndarray | float = 0.0
    out: np.ndarray | int = 0
    spill_s: np.ndarray | float = 0.0
    forward_wait_s: np.ndarray | float = 0.0
    backward_wait_s: np.ndarray | float = 0.0

    @staticmethod
    def of(tracks: Tracks, fit: Fitting) -> Kept:
        """Of what fits."""
        spill_s, forward_wait_s, backward_wait_s, _ = tracks.seconds[:, fit.tracks]
        return Kept(fit.backward_s, fit.low_s, fit.lowest_s, tracks.bytes[1, fit.tracks], spill_s,
                    forward_wait_s, backward_wait_s)

    def by_itself(self) -> Kept:
        """The same, if compute waited for nothing that is kept."""
        return Kept(self.backward_s, out=self.out, spill_s=self.spill_s)


class Bounds:
    """Of one model on a machine."""

    def __init__(self, keeping: Keeping, ways: Ways, updates: Updates, held: Held) -> None:
        self.keeping, self.ways, self.updates, self.held = keeping, ways, updates, held
        self.shape, self.machine, self.uses = keeping.shape, keeping.machine, keeping.uses
        self.behind = keeping.wishes.grads == "none"     # updates follow their gradients
        self.buffers = len(ways.lent((0,) * len(keeping.shape.units)))

    def of(self, slots: np.ndarray, micro: int, homes: Of, kept: Kept) -> np.ndarray:
        """Of choices, as arrays: each of their passes by itself, then all of a step. slots: bytes.

        The first forward: see first_forwards. Later ones: compute, standing still for activations
        that leave; weights that no slot can have kept, and compute behind the last of these. A
        backward: compute, and the longer of what it waits for and of the updates that it may make
        meanwhile; weights, then with activations, and compute behind what comes last. From the
        second backward on, the host adds up gradients, and is behind by a few units at the most.
        """
        m = self.machine
        up, both = m.h2d_gbps * 1e9, m.both_gbps * 1e9
        compute_s = sum(c.forward_s for c in self.keeping.costs(micro)) + kept.forward_wait_s
        host_s = homes.host_s + homes.held_s * kept.out
        first = np.maximum(homes.first_s, compute_s)
        if not self.behind:
            first = np.maximum(first, host_s)
        parts = self.ways.exchange.parts
        forward = np.maximum(compute_s, (homes.weights - slots) / parts / up + homes.top_s)
        come = np.maximum(homes.again - slots, 0) / parts
        backward = functools.reduce(np.maximum, (
            kept.backward_s + np.maximum(kept.backward_wait_s, homes.settled_s),
            come / both + kept.low_s, (come + kept.out) / both + kept.lowest_s, homes.behind_s))
        behind = (OFFLOAD_DEPTH + STAGINGS + 1) * homes.longest_add_s
        adding = np.maximum(backward, homes.add_s - behind)
        passes = first + backward + (micro - 1) * (forward + adding) + homes.end_s
        added = first + backward + forward + (micro - 1) * homes.add_s if micro > 1 else 0.0
        again = np.maximum(homes.read_again - slots, 0)
        read = homes.read + again + (micro - 1) * (np.maximum(homes.read - slots, 0) + again)
        read_s = read / self.keeping.wishes.fleet.gpus / (m.disk_read_gbps * 1e9)   # a first finds none in a slot
        return NORM_S + functools.reduce(np.maximum, (
            passes, added, micro * kept.spill_s, homes.update_s, host_s, micro * homes.gradients / both,
            read_s))

    def of_homes(self, ways: Sequence[Homes], micro: int) -> Of:
        units, where = self.shape.units, _Where(self, ways, micro)
        weights = np.array([u.weights for u in units])
        needed = np.array([u in self.uses.needed for u in range(len(units))])
        top_s = np.cumsum([c.forward_s for c in reversed(self.keeping.costs(micro))])[::-1]
        nothing = np.zeros(len(ways))
        return Of(
            where.first_forwards(), top_s[[h.top for h in ways]],
            np.array([h.end_s for h in ways]), where.alone_s() if self.behind else nothing,
            where.behind_s() if self.behind else nothing,
            where.device_s if self.behind else nothing,
            *(np.array([h[i] for h in ways]) for i in map(Homes._fields.index, (
                "weights", "again", "gradients", "add_s", "longest_add_s"))),
            where.host_s.sum(axis=1), where.held_s, where.filed @ weights, where.filed @ (weights * needed))


class _Where:
    """Where the updates of some choices of homes are made. Arrays by choice, and by unit."""

    def __init__(self, bounds: Bounds, ways: Sequence[Homes], micro: int) -> None:
        self.bounds, self.micro, updates = bounds, micro, bounds.updates
        self.settled = np.array([h.units for h in ways]) != 0
        self.through = self._sets(h.through for h in ways)
        on_disk = [bounds.ways.disk.units(h.units, micro) for h in ways]
        self.on_disk = self._sets(d.states for d in on_disk)
        self.filed = self._sets(d.weights for d in on_disk)
        self.on_host = ~(self.settled | self.through | self.on_disk)
        self.drive = np.where(self.filed, updates.drive_weights, updates.drive)
        alone_s, held = self.on_host @ updates.host, bounds.held
        crossing = held.crossing([h.units for h in ways], [h.through for h in ways])
        stretch = held.stretch(alone_s, crossing, held.span_s(micro))
        self.host_s = self.on_host * stretch[:, None] * updates.host
        self.held_s = alone_s * (held.stretch(alone_s, held.ways_crossed, held.span_s(micro)) - 1.0)
        self.device_s = (self.settled * updates.device(micro)).sum(axis=1)

    def _sets(self, sets: Iterable[frozenset[int]]) -> np.ndarray:
        found = np.zeros(self.settled.shape, dtype=bool)
        for row, units in zip(found, sets):
            if units:
                row[list(units)] = True
        return found

    def _lanes(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(units whose updates take turns there, seconds of each), zeros elsewhere."""
        updates = self.bounds.updates
        yield self.on_host, self.host_s
        yield self.through, np.where(self.through, updates.through, 0.0)
        yield self.on_disk, np.where(self.on_disk, np.maximum(updates.pool, self.drive), 0.0)

    def alone_s(self) -> np.ndarray:
        """Seconds of updates that run beside all of a step: of the lane that takes most."""
        updates = self.bounds.updates
        return functools.reduce(np.maximum, (
            np.where(lane, seconds, 0.0).sum(axis=1) for lane, seconds in (
                (self.on_host, self.host_s), (self.through, updates.through),
                (self.on_disk, self.drive))))

    def behind_s(self) -> np.ndarray:
        """Seconds that a backward waits for updates: a unit's gradients need a buffer, which is
        given back when an update is over, so all but as many as there are buffers are."""
        order = [u for units in reversed(self.bounds.uses.leaving) for u in reversed(units)]
        most = np.zeros(len(self.settled))
        for lane, seconds in self._lanes():
            left = np.cumsum(lane[:, order][:, ::-1], axis=1)[:, ::-1]      # on it, from there on
            over = np.where(left > self.bounds.buffers, seconds[:, order], 0.0)
            most = np.maximum(most, over.sum(axis=1))
        return most

    def first_forwards(self) -> np.ndarray:
        """Seconds of the first forward: each fetch behind its unit's update, and behind the fetch
        before it, slower while AdamW has the host's memory; each window behind its weights."""
        done, updated = self._updates()
        h2d = moved = np.zeros(len(done))
        run = np.zeros(len(done)) if self.bounds.behind else self.device_s
        costs, uses = self.bounds.keeping.costs(self.micro), self.bounds.uses
        for w, window in enumerate(self.bounds.shape.windows):
            for u in window.units:
                if uses.first[u] == w:
                    here = ~self.settled[:, u]
                    moved = np.where(here, np.maximum(moved, done[:, u]), moved)
                    start = np.maximum(h2d, moved)
                    read = np.where(self.filed[:, u], start + self.bounds.updates.read[u], 0.0)
                    h2d = np.where(here, np.maximum(self._copied(start, updated, u), read), h2d)
                    moved = np.maximum(moved, read)
                    run = np.where(here, np.maximum(run, h2d), run)
            run = run + costs[w].forward_s
        return run

    def _updates(self) -> tuple[np.ndarray, np.ndarray]:
        """When each unit's update is over, and when all on the host and through the device are.
        At once, where they follow their gradients."""
        done, updated = np.zeros(self.settled.shape), np.zeros(len(self.settled))
        order = list(self.bounds.uses.first)
        for lane, seconds in () if self.bounds.behind else self._lanes():
            over = np.zeros(self.settled.shape)
            over[:, order] = np.cumsum(seconds[:, order], axis=1)
            done = np.where(lane & (seconds > 0), over, done)
            if lane is not self.on_disk:
                updated = np.maximum(updated, over.max(axis=1))
        return done, updated

    def _copied(self, start: np.ndarray, updated: np.ndarray, unit: int) -> np.ndarray:
        """When a unit's weights are on the device."""
        m, n = self.bounds.machine, self.bounds.shape.units[unit].weights / self.bounds.ways.exchange.parts
        rate, slow = m.h2d_gbps * 1e9, min(m.h2d_gbps, m.busy_gbps) * 1e9
        beside = np.minimum(np.maximum(updated - start, 0.0), n / slow)
        return start + beside + np.maximum(n - beside * slow, 0.0) / rate
