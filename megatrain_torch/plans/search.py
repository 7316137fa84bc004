"""The search for the best plan: what a model's units and windows may do on a machine, and what takes least time.

A choice says where each unit is at home, how many slots weights pass through, how many micro-batches a step has and
what each window keeps. This file says what may be chosen, in bytes and seconds, as arrays; csrc/walk/search.h says what
of it fits and walks what may be fastest. What may be chosen does not depend on the limits, so more memory is never
slower.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..base.modes import DISK, DISKS, HOMES, LINKED, MODES, moved_bytes, read
from ..figures.report import LANES, OWN, WAITS
from ..store.arrivals import AHEAD, STAY
from ..store.disk import BAYS, BUNDLE_PADDING_BYTES, FEED_BYTES, MEMORY_BYTES, POOL, SPILLED
from .cost import CACHE_SHARE, OFFLOAD_DEPTH, STAGINGS, Cost, cost_of
from .machine import Machine
from .shapes import Shape, Window
from .tally import ADDED_BYTES, ALONE, LENT, SETTLED, THROUGH_BYTES, Exchange, Fleet, Tally, coded

MOST_SIMULATIONS = 20000    # a second; a search of a hundred layers takes some hundred
WORTH_THROUGH = 1.01        # README's loop, 7B width, 24 GiB, measured 2.4 % where plans have 1.6 to 2.7
WORTH = 1.03                # so much faster must shards be, where windows wait for all ranks, and more micro-batches:
                            # 7B took 1.307 s in one, 1.337 in four (LoRA, 32k); 3.444 in one, 3.493 in two (64k)
NORM_S = 0.0005             # clip factor, and waking the updater
SHOWN_MICRO = 8             # micro-batches walked through; of more, those before the last are taken to be alike
RINGS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_OF_PIECES = 4         # slots, where experts are fetched a few at a time
MOST_ENDS = 3               # embeddings and heads whose homes are chosen one by one
GUESTS = 2                  # units, first in the forward, whose states may arrive: what it waits for first
EARLY = max(GUESTS + AHEAD + 1, STAY)   # windows whose activations may be alive while those states are on the device
# Bytes per parameter that a gradient moves into the planes of a unit at home in VRAM: measured and copied; by each
# further micro-batch added to its fp32 sum, rounded and measured. Of several ranks the first has a sum in fp32 too.
GATHERED = (6, 16)
LONG_SEQ = 1 << 16          # tokens of a sequence from which attention is most of a layer
OVERHEAD = "Python, torch, driver"          # of host memory: what is there besides planes

SHARED = ("exchange", "network", "host memory")         # what several GPUs have besides
# As a measured step names them; OWN: Python, launching.
RESOURCES = (*(k for k in LANES if k not in (WAITS, "gather", *SHARED)), OWN)
ROWS = {**_core.LANES, **{row: len(_core.LANES) + i for i, row in enumerate((OWN, *SHARED))}}   # of the walk, by name
# What compute may wait for.
CAUSES = ("host update", "disk", "h2d", "d2h", "host sum", "through", "swap out", "swap back", "swap disk", OWN,
          *SHARED)
_MODES = {mode: code for code, mode in enumerate(MODES)}         # as C numbers them


@dataclass(frozen=True)
class Wishes:
    """What is asked for; None: whatever is best."""

    tokens: int                         # of a step, a multiple of seq
    seq: int
    fused: bool = True                  # templates run where they fit, and our own loss behind the head
    homes: str | dict[str, str] | None = None       # one of modes.HOMES for all units; or of each by name
    activations: str | None = None      # a mode for all windows that have it
    slots: int | None = None
    micro: int | None = None
    nvme: int | None = None             # bytes that states, weights and activations may take on disk; None: no disk
    grads: str = "ram"                  # or "none": gradients are kept nowhere
    lent: int = LENT                    # buffers of a size for these, at the most
    states: str = "fp32"                # how AdamW's are kept
    fleet: Fleet = ALONE                # GPUs and machines, each of which makes such a step
    delivery: str = "whole"             # of weights to a machine's GPUs, one of modes.DELIVERIES
    caches: bool = False                # forwards fill key-value caches, where the model's configuration says no other


class Choice(NamedTuple):
    """What a plan chooses."""

    micro: int                  # micro-batches of a step
    homes: tuple[str, ...]      # by unit
    ring: int                   # slots of a size
    modes: tuple[str, ...]      # by window, what it keeps of activations


class Timing(NamedTuple):
    """Seconds of a step; `busy` by lane, `idle` of compute by what it waited for: as a StepReport has them."""

    seconds: float
    forward_s: float
    busy: dict[str, float]
    idle: dict[str, float]

    @staticmethod
    def of(walked: tuple[Any, ...], shared: bool) -> Timing:
        """What _core.walk gives back. shared: by one of several GPUs."""
        seconds, forward_s, busy, idle, _ = walked
        return Timing(seconds, forward_s, {name: busy[ROWS[name]] for name in (*RESOURCES, *SHARED * shared)},
                      {name: idle[ROWS[name]] for name in CAUSES if idle[ROWS[name]] > 0})


class Problem:
    """A model on a machine for given tokens. most: choices that are walked."""

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes, most: int = MOST_SIMULATIONS) -> None:
        self.shape, self.machine, self.wishes, self.most = shape, machine, wishes, most
        self.seen = wishes.fleet.seen(machine)      # as one of its GPUs sees it beside the others
        fleet = dataclasses.replace(wishes.fleet, linked=machine.exchange_gbps > 0)
        self.tally = Tally(shape.units, fleet, wishes.grads == "ram", wishes.lent)
        self.kinds = {kind: i for i, kind in enumerate(dict.fromkeys(w.shape for w in shape.windows))}
        # Bytes of a fetch: pieces of experts come for a forward, its repetition, and gradients; a template has the last
        # two at once.
        own = {u for w in shape.windows if w.template is None for u in w.units}
        self.crossing = [u.weights + (sum(u.fetched[:1]) if wishes.fused and i not in own else sum(u.fetched[1:]) // 2)
                         for i, u in enumerate(shape.units)]
        self.exchange = Exchange(shape.units, self.crossing, self.seen, wishes.fleet, wishes.delivery)
        self.depth = OFFLOAD_DEPTH if wishes.grads == "ram" else min(OFFLOAD_DEPTH, wishes.lent)
        self.host_rate = self.seen.adam_rate(states=wishes.states)
        self.through_rate = self.seen.through_rate(wishes.states, alone=wishes.homes == "through")
        self.first: dict[int, int] = {}             # by unit, in the forward's order, the window that uses it first
        self.last: dict[int, int] = {}
        for w, window in enumerate(shape.windows):
            for u in window.units:
                self.first.setdefault(u, w)
                self.last[u] = w
        self._costs: dict[int, dict[Window, Cost]] = {}

    # ---- what windows cost ----

    def costs(self, micro: int) -> dict[Window, Cost]:
        """Of one of so many micro-batches, by the shape of windows."""
        if micro not in self._costs:
            w, m = self.wishes, self.seen
            if micro > 1:                   # a step in parts brings a card to its power limit as well as one in a whole
                m = dataclasses.replace(m, gemm=tuple((n, width, min(rate, m.gemm_flops(n * micro, width) / 1e12))
                                                      for n, width, rate in m.gemm))
            self._costs[micro] = {kind: cost_of(kind, m, w.tokens // micro, w.seq, w.fused) for kind in self.kinds}
        return self._costs[micro]

    @functools.cached_property
    def micro_counts(self) -> list[int]:
        """Numbers of micro-batches that may be chosen; first those that compute in least time."""
        w, sequences = self.wishes, self.wishes.tokens // self.wishes.seq
        one = w.micro or w.grads == "none"
        found = [w.micro or 1] if one else [k for k in range(1, sequences + 1) if sequences % k == 0]
        costs = {k: [self.costs(k)[window.shape] for window in self.shape.windows] for k in found}
        return sorted(found, key=lambda k: k * sum(c.forward_s + min(c.backward_s.values()) for c in costs[k]))

    def _flying(self, at: int) -> int:
        """Gradients' bytes on the device in a window's backward; a fused head's lie in its fp32 sums' memory."""
        total = 0
        for u, w in self.first.items():
            if w - self.depth <= at <= self.last[u]:
                head = self.wishes.fused and self.shape.windows[w].kind == "head"
                total += self.shape.units[u].gradients * ((2 if at != w else 0) if head else 1)
        return total

    # ---- bytes ----

    def host_bytes(self, choice: Choice) -> dict[str, int]:
        """By plane, and what is there besides."""
        return {OVERHEAD: self.seen.host_overhead_bytes, **self.tally.host(choice.homes, choice.micro),
                "activations": self.memory(choice)[5] * self.wishes.fleet.gpus}

    def disk_bytes(self, choice: Choice) -> dict[str, int]:
        """On disk, by plane, and between them."""
        spilled = self.memory(choice)[6] * self.wishes.fleet.gpus
        return ({SPILLED: spilled} if spilled else {}) | self.tally.disk(choice.homes)

    def device_bytes(self, choice: Choice) -> dict[str, int]:
        """On the device by what they hold, at the peak of a step."""
        kept, work, flying, peak, early, *_ = self.memory(choice)
        table = {"context, libraries": self.seen.vram_overhead_bytes,
                 **self.tally.device(choice.homes, choice.ring, choice.micro),
                 **({"exchange between GPUs": n} if (n := self.exchange.buffers) else {}),
                 "activations": kept, "work": work, "gradients under way": flying,
                 "torch's cache": peak - kept - work - flying,
                 **({"key-value cache": n} if (n := self.cache_bytes(choice.micro)) else {})}
        if visiting := self.tally.visiting(choice.homes):
            table["states that arrive, beyond the peak"] = max(visiting + early - peak, 0)
        return table

    def cache_bytes(self, micro: int) -> int:
        """On the device, of keys and values that a micro-batch's output keeps for as long as it lives."""
        w = self.wishes
        each = sum(window.template.cached for window in self.shape.windows if window.template is not None)
        return w.tokens // micro * each if w.caches and w.fused else 0

    def memory(self, choice: Choice) -> tuple[int, ...]:
        """Of what windows keep: see mt_memory_of in walk/search.h."""
        return _core.search_memory(self.arrays, self.micro_counts.index(choice.micro), _mode_codes(choice.modes))

    # ---- homes that may be chosen ----

    @functools.cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Homes, [choices, units] as Tally takes many, and whether for several micro-batches or for one; in the order
        in which equals are preferred."""
        w, m, units, asked, files = self.wishes, self.seen, self.shape.units, self.wishes.homes, self.tally.files
        base, several = np.stack([*map(coded, self._homes())]), sorted({k > 1 for k in self.micro_counts})
        lack = np.stack([self._host(base, 1 + some) - m.host_bytes for some in several], 1)
        # Updates go through the device where that is faster. Of several GPUs nothing of it was measured.
        faster = asked is None and w.grads == "ram" and self.through_rate > 0 and w.fleet.alone
        fixed = w.nvme is None or asked == "through" or isinstance(asked, dict)
        homes, some = _core.search_homes(SimpleNamespace(
            n_base=len(base), base=base.tobytes(), lack=array("q", lack.ravel().tolist()), several=array("q", several),
            order=array("q", self.first), through=2 if asked == "through" else int(faster),
            to_disk=HOMES.index(asked if asked in DISKS else "ram"), room=-1 if fixed else w.nvme,
            memory=MEMORY_BYTES * w.fleet.gpus, feed=FEED_BYTES * w.fleet.gpus, keeps=w.grads == "ram",
            apart=w.fleet.machines > 1, both=m.both_gbps * 1e9, through_rate=self.through_rate,
            host_rate=self.host_rate, states=array("q", self.tally.states),
            padding=array("q", [between for _, between in files["disk"]]),
            files=array("q", [sum(n) for home in DISKS for n in files[home]]),
            **{name: array("q", [getattr(u, name) for u in units]) for name in ("trained", "weights")}))
        return np.frombuffer(homes, np.uint8).reshape(-1, len(units)), np.frombuffer(some, np.uint8).astype(np.int64)

    def _choice(self, row: int, ring: int, micro: int, modes: Iterable[int]) -> Choice:
        """Of indices, and of modes' numbers."""
        return Choice(self.micro_counts[micro], tuple(HOMES[code] for code in self.rows[0][row]), self.rings[ring],
                      tuple(MODES[i] for i in modes))

    def _host(self, codes: np.ndarray, micro: int | np.ndarray) -> np.ndarray:
        """Bytes in host memory of many homes of all units, activations left out."""
        return np.full(len(codes), self.seen.host_overhead_bytes) + sum(self.tally.host(codes, micro).values())

    def _homes(self) -> Iterator[tuple[str, ...]]:
        """Units at home in VRAM: the embedding, the head, and a beginning of what is between. The first layers gain
        most there: the next forward need not wait for their updates. Of the very first, only the states may be away."""
        n, asked = len(self.shape.units), self.wishes.homes
        if isinstance(asked, dict):
            yield tuple(asked.get(u.name, "ram") for u in self.shape.units)
        elif asked:
            yield ("ram" if asked in (*DISKS, "through") else asked,) * n
        else:
            kinds = {u: self.shape.windows[w].kind for u, w in self.first.items()}
            ends = [u for u in kinds if kinds[u] in ("embedding", "head")][:MOST_ENDS]
            middle = [u for u in kinds if u not in ends]
            for first in range(len(middle) + 1):
                for taken in range(1 << len(ends)):
                    settled = {*middle[:first], *(e for i, e in enumerate(ends) if taken >> i & 1)}
                    homes = ["vram" if u in settled else "ram" for u in range(n)]
                    yield tuple(homes)
                    for u in list(self.first)[:GUESTS]:      # states of one arrive, then of both
                        if homes[u] == "ram" and self.shape.units[u].trained:
                            homes[u] = "arrive"
                            yield tuple(homes)

    @functools.cached_property
    def rings(self) -> list[int]:
        """Slots of a size that may be chosen, fewest first."""
        n, pieces = len(self.shape.units), any(u.fetched for u in self.shape.units) and self.wishes.nvme is None
        if self.wishes.slots:
            return [self.wishes.slots]
        least = LEAST_OF_PIECES if pieces else 2            # with a disk some may come whole
        return [r for r in RINGS if least <= r < n] + [max(least, n)]

    # ---- the search ----

    def best(self, than: float = math.inf) -> tuple[Choice, Timing] | None:
        """The choice of least time, the first of equals; None: nothing fits and takes less than so many seconds."""
        found = _core.search_best(self.arrays, than, self.most)
        return None if found is None else (self._choice(*found[:-1]), Timing.of(found[-1], not self.wishes.fleet.alone))

    def time(self, choice: Choice, than: float = math.inf) -> Timing | None:
        """None where it takes so many seconds or more."""
        homes = coded(choice.homes)
        walked = _core.search_time(self.arrays, self.micro_counts.index(choice.micro), homes.tobytes(),
                                   self._memory_s(homes, choice.micro), choice.ring, _mode_codes(choice.modes), than)
        return None if walked is None else Timing.of(walked, not self.wishes.fleet.alone)

    def fits(self) -> bool:
        """Does anything that may be chosen?"""
        return any(n >= 0 for n in self.needs[0])

    @functools.cached_property
    def needs(self) -> tuple[array[int], int | None, int | None, Choice]:
        """By row and number of micro-batches the fewest bytes of activations on disk with which it fits, -1: with none;
        least VRAM within the host's limit, least host memory within the VRAM's, None: not with any; and the choice that
        lacks the fewest bytes, of those that the device can hold if there are any."""
        spilled, vram, host, row, ring, micro = _core.search_needs(self.arrays)
        windows = len(self.shape.windows)
        modes = self.arrays.modes[self.arrays.tracks[micro] * windows:][:windows]       # of the first track
        return (array("q", spilled), *(n if n >= 0 else None for n in (vram, host)),
                self._choice(row, ring, micro, modes))

    def _memory_s(self, codes: np.ndarray, micro: int) -> np.ndarray:
        """Of the host's memory, which several GPUs share, for what is no copy of one of them."""
        updated, fleet = (self._of_units("trained") * ~np.isin(codes, coded(SETTLED))).sum(-1), self.wishes.fleet
        if fleet.alone:
            return np.zeros_like(updated)
        moved = updated / fleet.machines * moved_bytes(self.wishes.states) \
            + (micro - 1) * updated / fleet.machines * ADDED_BYTES
        return micro * self.exchange.link_bytes / self.exchange.memory_rate + moved / self.exchange.host_rate

    # ---- as arrays ----

    @functools.cached_property
    def arrays(self) -> SimpleNamespace:
        """The fields of mt_search, by their names in csrc/walk/search.h."""
        counts, (codes, several) = self.micro_counts, self.rows
        planes = (codes == HOMES.index("through")).any(-1) * THROUGH_BYTES + self.seen.vram_overhead_bytes \
            + self.exchange.buffers + sum(self.tally.at_home(codes, 1 + several).values())
        room = np.full(len(codes), self.wishes.nvme or 0) - sum(self.tally.disk(codes).values())
        found = SimpleNamespace(
            **self._unit_arrays(), **self._window_arrays(), micro=array("q", counts),
            cached=array("q", map(self.cache_bytes, counts)), rings=array("q", self.rings), homes=codes.tobytes(),
            memory_s=np.stack([self._memory_s(codes, k) for k in counts], 1).ravel(), several=several, planes=planes,
            host=self._host(codes, 1 + several), room=room // self.wishes.fleet.gpus)
        w, asked = self.wishes, _MODES.get(self.wishes.activations, -1)
        made = [_core.search_tracks(found, i, asked, bool(w.nvme), w.seq >= LONG_SEQ) for i in range(len(counts))]
        ends = itertools.accumulate((len(modes) // len(self.shape.windows) for modes, _ in made), initial=0)
        found.tracks, found.modes, found.flags = array("q", ends), *map(b"".join, zip(*made))
        return found

    def _of_units(self, name: str) -> np.ndarray:
        """[units] of a Unit's attribute."""
        return np.array([getattr(u, name) for u in self.shape.units], dtype=float)

    def _unit_arrays(self) -> dict[str, Any]:
        """What no choice changes of units: bytes, and seconds of updates, of which each GPU makes its part."""
        units, m, w, fleet, exchange = self.shape.units, self.seen, self.wishes, self.wishes.fleet, self.exchange
        both, trained, weights = m.disk_both_gbps * 1e9, self._of_units("trained"), self._of_units("weights")
        moved = (self._of_units("masters") + self._of_units("moments")) / fleet.machines
        pool = m.adam_rate(min(POOL * fleet.gpus, m.adam_gparams[-1][0]), w.states)
        own, here, times = trained / fleet.count, trained / fleet.machines, 1 if w.grads == "ram" else 2
        gathered = [GATHERED[not fleet.alone] + (k - 1) * GATHERED[1] for k in self.micro_counts]
        pieces = any(u.fetched for u in units)
        return {"host_s": here / self.host_rate, "pool_s": here / pool,
                "passing_s": own / self.through_rate if self.through_rate else np.full(len(units), math.inf),
                "drive_s": 2 * moved / both,
                "drive_weights_s": 2 * (moved + self._of_units("gradients") / fleet.machines) / both,
                # A rank reads its portion, with its part of the drive's rate. What is gathered takes less time.
                "fetch_s": weights / fleet.gpus / (m.disk_read_gbps * 1e9),
                # Bytes that cross while AdamW runs on the host: of gradients that are kept nowhere, in both passes.
                "streamed": times * weights / exchange.parts + (times - 1) * exchange.home,
                "settled": (exchange.lowered + (0 if exchange.peers else exchange.raised)).astype(float),
                "passing": trained * moved_bytes(w.states) / fleet.count, "add_s": here / (m.add_gparams * 1e9),
                "device_s": np.concatenate([own / (m.device_adam_gparams * 1e9) + own * n / (m.hbm_gbps * 1e9)
                                            for n in gathered]),
                **{name: getattr(exchange, name) for name in (
                    "exchange_s", "network_s", "lost_s", "gather_s", "held_s", "spread_s", "lowered", "raised", "parts",
                    "peers", "on_link")},
                "weights": array("q", self.crossing), "bytes": array("q", [u.weights for u in units]),
                "states": array("q", self.tally.states), "gradients": exchange.home,
                "pieces": _lists(u.fetched for u in units), "whole": pieces,
                "spared": sum(_core.plan_slots(self.crossing, 2)) if pieces else 0,
                "h2d": m.h2d_gbps * 1e9, "d2h": m.d2h_gbps * 1e9, "both": m.both_gbps * 1e9, "busy": m.busy_gbps * 1e9,
                "write": m.disk_write_gbps * 1e9, "read": m.disk_read_gbps * 1e9, "memory": exchange.memory_rate,
                "shown": SHOWN_MICRO, "depth": self.depth, "stagings": STAGINGS, "bays": BAYS, "ahead": AHEAD,
                "stay": STAY, "rest_s": NORM_S, "early": EARLY, "padding": BUNDLE_PADDING_BYTES,
                "lends": w.lent, "keeps": w.grads == "ram", "most_vram": self.machine.vram_bytes,
                "most_host": self.machine.host_bytes, "gpus": fleet.gpus, "byte_s": m.held_s(fleet.gpus),
                "cache": CACHE_SHARE["fused" if w.fused else "eager"], "worth": 1.0 if w.homes else WORTH_THROUGH}

    def _window_arrays(self) -> dict[str, Any]:
        """Costs of windows by what they keep, and what they may keep."""
        windows, counts = self.shape.windows, self.micro_counts
        costs = [cost for k in counts for cost in self.costs(k).values()]
        leaving: list[list[int]] = [[] for _ in windows]
        for u, at in self.first.items():
            if self.shape.units[u].trained:
                leaving[at].append(u)
        again = (() if w.kind == "embedding" or (w.kind == "head" and self.wishes.fused) else w.units for w in windows)
        return {"kind": array("q", [self.kinds[w.shape] for w in windows]), "n_kinds": len(self.kinds),
                "learns": array("q", [w.learns for w in windows]),
                "flying": array("q", map(self._flying, range(len(windows)))),
                "units": _lists(w.units for w in windows), "again": _lists(again), "leaving": _lists(leaving),
                **{name: array("d", [getattr(c, name) for c in costs]) for name in ("forward_s", "forward_host_s")},
                **{name: array("d", [getattr(c, name).get(mode, math.nan) for c in costs for mode in MODES])
                   for name in ("backward_s", "backward_host_s")},
                **{name: array("q", [getattr(c, name).get(mode, 0) for c in costs for mode in MODES])
                   for name in ("kept", "work", "away")},
                "on_disk": array("q", [mode in DISK for mode in MODES]),
                "is_linked": array("q", [read(mode).keep == LINKED for mode in MODES]),
                "tracks": array("q", [0] * (len(counts) + 1)), "modes": b"", "flags": b""}         # to come


def solve(problem: Problem) -> tuple[Problem, tuple[Choice, Timing] | None]:
    """The best with as many buffers for gradients kept nowhere as fit, or fewer where that spares the disk."""
    best: tuple[Problem, tuple[Choice, Timing]] | None = None
    for lent in range(LENT, 0, -1) if problem.wishes.grads == "none" else (LENT,):
        if lent != problem.wishes.lent:
            wishes = dataclasses.replace(problem.wishes, lent=lent)
            problem = Problem(problem.shape, problem.machine, wishes, problem.most)
        if found := problem.best(best[1][1].seconds if best else math.inf):
            best = problem, found
            if not problem.disk_bytes(found[0]):
                break
    return best or (problem, None)


def _mode_codes(modes: Iterable[str]) -> bytes:
    return bytes(map(_MODES.__getitem__, modes))


def _lists(lists: Iterable[Sequence[int]]) -> tuple[array[int], array[int]]:
    """As mt_walk_list: where each begins, and all items."""
    lists = list(lists)
    ends = itertools.accumulate(map(len, lists), initial=0)
    return array("q", ends), array("q", itertools.chain.from_iterable(lists))
