"""Which layers keep what away from the device: the tracks that a search goes through."""
from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..base.modes import DISK, KEEPS, LINKED, read
from ..store.disk import BAYS, spilled_bytes
from .cost import Cost
from .keeping import Keeping, on_host
from .levels import Ladder, Levels
from .tracks import NONE_AWAY, Track, Tracks

# What first layers may keep in host memory, and how many of them, in parts of all.
ON_HOST = ("replay+host", "attention+split", "attention+host", "selective+host", "saved+host")
PARTS = 8
LONG_SEQ = 1 << 16          # tokens of a sequence from which attention is most of a layer
HOST_FOR = {mode: mode.replace("+disk", "+host") for mode in DISK}


class Patterns:
    """Of one number of micro-batches.

    What bytes and seconds depend on is what leaves the device, not whether host memory or the disk
    has it: tracks that differ in this alone share their levels.
    """

    def __init__(self, keeping: Keeping, costs: list[Cost]) -> None:
        self.keeping, self.costs, self.wishes = keeping, costs, keeping.wishes
        self.windows = keeping.shape.windows
        self.ladder = Ladder(keeping, costs)
        self.made: dict[object, Levels] = {}
        self.firsts: dict[object, tuple[int, int]] = {}
        self.least = self._least()
        self.forward_s = list(itertools.accumulate((c.forward_s for c in costs), initial=0.0))
        self.kept_s = [c.least_s for c in costs]
        self.most_kept_s = sum(self.kept_s)

    def _least(self) -> list[str]:
        """By window, what it keeps at least: what is asked for, where it has that."""
        asked = self.wishes.activations
        least = [asked if asked in c.kept else next(m for m in KEEPS if m in c.kept)
                 for c in self.costs]
        if asked is not None and read(asked).keep == LINKED:
            mode, followers = read(asked), set(self._pairs().values())
            least = [str(mode._replace(keep="attention")) if one == asked and w not in followers
                     else one for w, one in enumerate(least)]
        return least

    def tracks(self) -> Tracks:
        """Nothing away; then the first layers, which wait longest, in each way and in growing
        number."""
        if self.wishes.activations is not None:
            return Tracks([self._track(False, {})])
        found = [self._track(True, {})]
        for mode in ON_HOST:
            able = self._able(mode)
            found += [self._track(True, dict.fromkeys(able[:n], mode)) for n in _counts(able)]
        if self.wishes.seq >= LONG_SEQ:
            found += self._long_tracks() + self._linked_tracks()
        return Tracks(found + (self._disk_tracks() if self.wishes.nvme else []))

    def _able(self, mode: str) -> list[int]:
        """Windows that may keep this away from the device."""
        return [w for w, c in enumerate(self.costs) if mode in c.away and self.windows[w].learns]

    def _long_tracks(self) -> list[Track]:
        """Of long sequences an attention's output spares more time than all else: some layers keep
        it in host memory, with their input, and those before them the input alone, in what is left
        there."""
        able = self._able("attention+host")
        return [self._track(True, dict.fromkeys(able[:both], "attention+host")
                            | dict.fromkeys(able[:inputs], "replay+host"))
                for inputs, both in itertools.combinations(_counts(able), 2)]

    def _pairs(self) -> dict[int, int]:
        """Layers that may be linked, by the layers before them, each of which is in one pair."""
        found: dict[int, int] = {}
        able = [LINKED in c.kept and w.learns for c, w in zip(self.costs, self.windows)]
        for w in range(len(able) - 1):
            if able[w] and able[w + 1] and w not in found.values():
                found[w] = w + 1
        return found

    def _linked_tracks(self) -> list[Track]:
        """Pairs of layers of which the first keeps its input and the outputs of attention are kept
        of both: the first of them on disk, those behind in host memory, or there the inputs alone,
        and the others on the device. Or inputs alone on disk."""
        costs = self.costs
        order = [(a, b) for a, b in self._pairs().items()
                 if costs[b].backward_s[LINKED] < costs[b].backward_s["replay"]]
        counts, found = [0, *_counts(order)], []
        ways = (("attention", LINKED, "+host"), ("replay", "replay", "+host"))
        on_disk = (("attention", LINKED, "+disk"), ("replay", "replay", "+disk"))
        for first in (None, *(on_disk if self.wishes.nvme else ())) if order else ():
            for ends in itertools.combinations_with_replacement(counts, 3):
                if (first is None) != (ends[0] == 0):
                    continue
                parts = zip((first, *ways), map(slice, (0, *ends), ends))
                fixed = {w: keep + way[2] for way, of in parts for pair in order[of]
                         for w, keep in zip(pair, way)}
                found.append(self._track(True, fixed, dict(order[ends[2]:])))
        return found

    def _disk_tracks(self) -> list[Track]:
        """The first layers keep on disk what some behind them keep in host memory."""
        found = []
        for keep in KEEPS:
            able = self._able(f"{keep}+disk")
            for on_disk, away in itertools.combinations_with_replacement(_counts(able), 2):
                modes = dict.fromkeys(able[:away], f"{keep}+host")
                modes |= dict.fromkeys(able[:on_disk], f"{keep}+disk")
                found.append(self._track(True, modes))
        return found

    # ---- one of them ----

    def _track(self, free: bool, fixed: dict[int, str], pairs: dict[int, int] | None = None
               ) -> Track:
        """free: windows that are not fixed may keep more than the least. pairs: of these, those
        that may be linked."""
        modes, pairs = list(self.least), pairs or {}
        for w, mode in fixed.items():
            modes[w] = mode
        away = {w: n for w, n in enumerate(self.keeping.away(self.costs, modes)) if n}
        spilled, machine = {w: n for w, n in away.items() if modes[w] in DISK}, self.keeping.machine
        sizes, every = list(spilled.values()), list(away.values())
        spill_s = 0.0
        if len(sizes) > BAYS:         # the last are never read, and nobody waits for fewer
            spill_s = sum(sizes) / (machine.disk_write_gbps * 1e9) \
                + sum(sizes[:-BAYS]) / (machine.disk_read_gbps * 1e9)
        alike = tuple(fixed), *(HOST_FOR.get(mode, mode) for mode in modes), *pairs

        def make() -> Levels:
            if alike not in self.made:
                self.made[alike] = self.ladder.levels(modes, free, fixed, pairs)
            return self.made[alike]

        def make_first() -> tuple[int, int]:
            if alike not in self.firsts:
                self.firsts[alike] = self.ladder.first(modes)
            return self.firsts[alike]

        forward_s, backward_s = self._waits(modes, away, spilled)
        return Track(tuple(modes), on_host(every, spilled), sum(every[:-1]),
                     next(iter(away), NONE_AWAY), spilled_bytes(sizes), spill_s, forward_s,
                     backward_s, self._least_s(modes, free, fixed), make, make_first)

    def _least_s(self, modes: Sequence[str], free: bool, fixed: dict[int, str]) -> float:
        """Of a backward where all that is free keeps most."""
        if not free:
            return sum(c.backward_s[mode] for c, mode in zip(self.costs, modes))
        return self.most_kept_s + sum(self.costs[w].backward_s[mode] - self.kept_s[w]
                                      for w, mode in fixed.items())

    def _waits(self, modes: Sequence[str], away: dict[int, int], spilled: dict[int, int]
               ) -> tuple[float, float]:
        """Seconds of a forward and of a backward in which compute at least stands still: for
        bundles that cross the bus, and for those that pass through bays.

        A forward is behind the first of them when it begins to leave, and compute may run on when
        all but the last have left, or but the last BAYS are written. In backward the last comes
        back when the window behind it runs, and compute is in front of the first bundle's window
        when that is back. Between these, compute may run.
        """
        m, costs, found = self.keeping.machine, self.costs, [(0.0, 0.0)]
        for bundles, left, unread, out, back in (
                (away, 1, 1, m.both_gbps, m.both_gbps),
                (spilled, BAYS, BAYS + 1, m.disk_write_gbps, m.disk_read_gbps)):
            if len(bundles) > max(left, 1):
                at, sizes = list(bundles), list(bundles.values())
                beside = sum(costs[w].backward_s[modes[w]] for w in range(at[0] + 1, at[-2] + 2))
                found.append((
                    sum(sizes[:-left]) / (out * 1e9)
                    - (self.forward_s[at[-1] + 1] - self.forward_s[at[0] + 1]),
                    sum(sizes[:-unread]) / (back * 1e9) - beside))
        return max(f for f, _ in found), max(b for _, b in found)


def _counts(able: Sequence[object]) -> list[int]:
    """Of so many layers the first eighth, two, ..., all."""
    return sorted({-(-len(able) * part // PARTS) for part in range(1, PARTS + 1)} - {0})
