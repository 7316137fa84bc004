"""How long a step takes: the engine's own rules (docs/design.md sections 5 to 7), with seconds for work.

Queues are first in, first out, and each piece of work waits only for pieces that stand before it in the
order in which they are handed over. So one walk through the step in that order, taking the later of what
is waited for, gives every time; there is no clock to advance. A step begins when all gradients of the one
before are home, which nothing of it outlasts; so one step from there to there is the steady state.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from .arrive import AHEAD, STAY
from .cost import OFFLOAD_DEPTH, STAGINGS
from .disk import BLOCKS
from .report import OWN
from .timeline import LANES, WAITS

NORM_S = 0.0005             # clip factor, and waking the updater
SETTLE = 3                  # steps until what updates leave to the next forward hardly changes
SETTLED = 0.9               # of a step, the next takes that at least (0.953, of 5,500 tried)
UPDATERS = ("host update", "disk", "through")       # where units at home in RAM are updated, each beside the others
SHOWN_MICRO = 8             # micro-batches walked through; of more, those before the last are taken to be alike
RESOURCES = (*(k for k in LANES if k != WAITS), OWN)    # as a measured step names them; OWN: Python, launching


@dataclass(kw_only=True)
class Step:
    """What a step is made of. Lists by window (w) or by unit (u); seconds and bytes.

    Attributes:
        forward_s, backward_s, forward_host_s, backward_host_s: [w] of one micro-batch; `host` is what Python
            takes to launch it. No backward where backward_s is 0.
        units, again: [w] units whose weights a window binds, in forward and in backward.
        leaving: [w] units whose gradients are handed over at the end of its backward.
        home: [u] at home in VRAM: nothing of it crosses. visiting: {u: bytes} of such units' states that arrive.
        weights, gradients: [u] bytes that cross; update_s: [u] on the host, or on the device where at home
            there; add_s: [u] to add up a further micro-batch's gradient on the host.
        slots: bytes of each slot. micro: micro-batches.
        h2d, d2h, both, busy: bytes/s; see Machine.
        away: [w] bytes of what it keeps in host memory between forward and backward; none: of no window. spilled:
            windows of those that keep it in a file; write, read: its bytes/s.
        lent: bytes of the buffers that gradients pass through where they are kept nowhere; [] where they are kept.
            Updates then follow their gradients, in backward. depth: units whose gradients may be alive on the device,
            beside those that are being computed.
        through: {u: seconds} of updates that pass through the device, beside the host's. No unit is in both this and
            disk.
        disk: {u: seconds} in which the states of units that have them there are read and written. Those units' updates
            are made beside the others.
        reads: {u: seconds} in which a fetch reads weights that are there too; updates from disk stand back meanwhile.
    """

    forward_s: list[float]
    backward_s: list[float]
    forward_host_s: list[float]
    backward_host_s: list[float]
    units: list[tuple[int, ...]]
    again: list[tuple[int, ...]]
    leaving: list[tuple[int, ...]]
    home: list[bool]
    weights: list[int]
    gradients: list[int]
    update_s: list[float]
    add_s: list[float]
    slots: list[int]
    micro: int
    h2d: float
    d2h: float
    both: float
    busy: float
    visiting: dict[int, int] = field(default_factory=dict)
    away: list[int] = field(default_factory=list)
    disk: dict[int, float] = field(default_factory=dict)
    through: dict[int, float] = field(default_factory=dict)
    lent: list[int] = field(default_factory=list)
    depth: int = OFFLOAD_DEPTH
    spilled: frozenset[int] = frozenset()
    write: float = 1.0
    read: float = 1.0
    reads: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step; `busy` by lane, `idle` of compute by what it waited for: as a StepReport has them."""

    seconds: float
    forward_s: float
    busy: dict[str, float]
    idle: dict[str, float]


# ---- the schedule --------------------------------------------------------------------------------

Fetches = list[list[int]]


def schedule(uses: list[int], weights: list[int], slots: list[int]) -> Fetches:
    """Which units are fetched when, as schedule.c decides it from the order of use: the unit that is needed
    farthest in the future gives way, if that is later than the newcomer's need.

    Returns:
        [len(uses) + 1] lists of units: before the first use, then behind each use.
    """
    next_use, soon, never = [0] * len(uses), {}, len(uses)
    for k in range(len(uses) - 1, -1, -1):
        next_use[k] = soon.get(uses[k], never)
        soon[uses[k]] = k
    classes: dict[int, list[int]] = {}                  # bytes: slots, each the unit in it, or -1
    for size in slots:
        classes.setdefault(size, []).append(-1)
    sizes = sorted(classes)
    fits = {u: classes[next(s for s in sizes if s >= weights[u])] for u in soon}
    soon[-1] = never
    held: set[int] = set()
    fetches: Fetches = []
    need = 0

    def prefetch() -> list[int]:
        nonlocal need
        found = []
        while True:
            while need < never and uses[need] in held:
                need += 1
            if need == never:
                return found
            unit = uses[need]
            inside = fits[unit]
            farthest = max(range(len(inside)), key=lambda i: soon[inside[i]])
            if soon[inside[farthest]] <= need:
                return found
            held.discard(inside[farthest])
            held.add(unit)
            inside[farthest] = unit
            found.append(unit)

    fetches.append(prefetch())
    for k, unit in enumerate(uses):
        soon[unit] = next_use[k]
        fetches.append(prefetch())
    return fetches


# ---- the walk ------------------------------------------------------------------------------------

class _Walk:
    """Times at which each queue is through with what it was given so far; 0 is when the norm is known."""

    def __init__(self, step: Step, fetches: Fetches, launch: float, left: dict[int, float]) -> None:
        self.step, self.fetches, self.behind = step, fetches, 0
        self.left = left                        # by unit, of updates that follow their gradients: when the last is over
        self.lanes = dict.fromkeys(UPDATERS, 0.0)
        for u, s in left.items():
            self.lanes[self._updater(u)] = max(self.lanes[self._updater(u)], s)
        # By bytes of a buffer: when each of the latest is given back, and what it waits for.
        self.lent: dict[int, list[tuple[float, str]]] = {}
        self.held = OWN                         # what Python last waited for
        self.run = self.h2d = self.mover = self.d2h = self.adder = 0.0
        self.launch = launch
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self.idle = dict.fromkeys(("host update", "disk", "h2d", "d2h", "host sum", "through", "swap out", "swap back",
                                   "swap disk", OWN), 0.0)
        self.opened = 0                         # windows of the forward under way
        self.guests = 0.0                       # when the last copies of states that arrive are over
        self.ready: dict[int, float] = {}       # by unit: when its copy is over, and when it is in the queue
        self.queued: dict[int, float] = {}
        self.late: dict[int, str] = {}          # what held the copy up
        self.swap_out = 0.0                     # that queue; its copies back share the bus with fetches: h2d
        self.away: list[int] = []               # windows whose bundles are out, latest last
        self.back: dict[int, float] = {}        # by window: when its bundle is on the device again
        self.out_for = "swap out"               # what held the last copy out up
        self.back_for: dict[int, str] = {}      # by window: what held its copy back up, where it was not that queue
        self.spills: list[int] = []             # windows whose bundles are in the file, latest last
        self.written: dict[int, float] = {}     # by window: when
        self.drive = 0.0                        # when the file is through; states on disk come first
        self.landed: list[float] = []
        self.added: list[float] = []
        if step.lent:
            self._rest_of_updates()
        else:
            self._updates()

    def _updater(self, unit: int) -> str:
        return "disk" if unit in self.step.disk else "through" if unit in self.step.through else "host update"

    def _rest_of_updates(self) -> None:
        """Those of the backward before that are not over."""
        step = self.step
        self.done = {u: self.left.get(u, 0.0) for units in step.units for u in units}
        self.updated = max(self.lanes["host update"], self.lanes["through"])
        host = [u for u, home in enumerate(step.home) if not home]
        self.updates = {"host update": sum(step.update_s[u] for u in host if self._updater(u) == "host update"),
                        "device update": sum(step.update_s) - sum(step.update_s[u] for u in host),
                        "disk": sum(step.disk.values()), "disk update": sum(step.update_s[u] for u in step.disk)}
        self.drive = self.lanes["disk"]
        self._guests_leave(sum(step.through.values()))

    def _updates(self) -> None:
        """Of units at home in VRAM on the device, at once; of the others on the host, in the forward's order."""
        step, now, drive, passed = self.step, 0.0, 0.0, 0.0
        self.done: dict[int, float] = {}
        for units in step.units:
            for u in units:
                if u in self.done:
                    continue
                self.done[u] = 0.0                  # frozen: nothing to wait for
                if step.home[u]:
                    self.run += step.update_s[u]
                elif u in step.disk:
                    drive += max(step.update_s[u], step.disk[u])
                    self.done[u] = drive
                elif u in step.through:
                    passed += step.through[u]
                    self.done[u] = passed
                elif step.update_s[u]:
                    now += step.update_s[u]
                    self.done[u] = now
        self.drive = drive
        self.updated, self.updates = max(now, passed), {"host update": now, "device update": self.run,
                                           "disk": sum(step.disk.values()),
                                           "disk update": sum(step.update_s[u] for u in step.disk)}
        self._guests_leave(passed)

    def _guests_leave(self, passed: float) -> None:
        """States that arrived go down behind their updates, beside the forward. passed: seconds of updates
        that pass through the device."""
        step = self.step
        for nbytes in step.visiting.values():
            self.guests = self._copied(max(self.guests, self.run), nbytes, step.d2h)
        self.updates["through"] = passed + (self.guests - self.run if step.visiting else 0.0)
        self.d2h = self.guests

    def _copied(self, start: float, nbytes: float, rate: float) -> float:
        """When a copy ends: slower while AdamW has the host's memory."""
        if start < self.updated:
            slow = min(rate, self.step.busy)
            if nbytes <= (self.updated - start) * slow:
                return start + nbytes / slow
            nbytes -= (self.updated - start) * slow
            start = self.updated
        return start + nbytes / rate

    def fetch(self, rate: float) -> None:
        """Hands over the copies that stand behind the latest use. Each waits for its unit's update, then, on the
        device, for all that was launched so far (FREED)."""
        handed, freed = self.launch, self.run
        for u in self.fetches[self.behind]:
            self.mover = max(self.mover, handed, self.done[u])
            start = max(self.h2d, self.mover, freed if self.behind else 0.0)
            self.late[u] = self._updater(u) if start == self.done[u] else "h2d"
            self.h2d = self._copied(start, self.step.weights[u], rate)
            self.busy["h2d"] += self.h2d - start
            if u in self.step.reads:
                self._read_weights(u, start)
            self.queued[u], self.ready[u] = self.mover, self.h2d
        self.behind += 1

    def _read_weights(self, unit: int, start: float) -> None:
        """Weights come from the drive, a piece read while another is copied; the mover is at it until the last is read.
        What the drive has to do for updates waits so long."""
        took = self.step.reads[unit]
        if start + took > self.h2d:
            self.h2d, self.late[unit] = start + took, "disk"
        self.mover = max(self.mover, start + took)
        self.busy["disk"] += took
        for u in self.step.disk:
            if self.done.get(u, 0.0) > start:
                self.done[u] += took
        if self.lanes["disk"] > start:
            self.lanes["disk"] += took

    def window(self, units: tuple[int, ...], seconds: float, host_s: float, rate: float) -> None:
        """A window's kernels: launched once its copies are in their queue, run once they are over."""
        begin, cause = self.run, ""
        self.opened += 1
        if self.opened == STAY:
            self.launch = max(self.launch, self.guests)
        for u in units:
            if self.step.home[u]:
                continue
            self.fetch(rate)
            if self.queued[u] > self.launch:
                self.launch = self.queued[u]
            if self.ready[u] > begin:
                begin, cause = self.ready[u], self.late[u]
        if self.launch > begin:
            begin, cause = self.launch, self.held
        self.held = OWN
        if cause:
            self.idle[cause] += begin - self.run
        self.launch += host_s
        self.busy["compute"] += seconds
        self.busy[OWN] += host_s
        self.run = begin + seconds
        if self.launch > self.run:
            self.idle[OWN] += self.launch - self.run
            self.run = self.launch

    def offload(self, unit: int, adding: bool) -> None:
        """Gradients leave behind compute; LANDED bounds how many units' are alive. At home in VRAM they take the
        same queue, and next to no time."""
        self.d2h = max(self.d2h, self.run)
        if self.step.lent and self.step.home[unit]:
            self.run += self.step.update_s[unit]
        if not self.step.home[unit]:
            buffers = self._borrow(unit) if self.step.lent else []
            self._send(unit, adding)
            if self.step.lent:
                self._follow(unit, buffers)
        self.landed.append(self.d2h)
        if len(self.landed) > self.step.depth:
            self.wait(self.landed[-1 - self.step.depth], "d2h")

    def _borrow(self, unit: int) -> list[tuple[float, str]]:
        """A buffer for its gradients; Python waits for the one that was lent first."""
        nbytes = min(n for n in self.step.lent if n >= self.step.gradients[unit])
        taken = self.lent.setdefault(nbytes, [])
        if len(taken) == self.step.lent.count(nbytes):
            free, cause = taken.pop(0)
            if free > self.launch:
                self.launch, self.held = free, cause
            self.d2h = max(self.d2h, free)
        return taken

    def _follow(self, unit: int, buffers: list[tuple[float, str]]) -> None:
        """The unit's update begins when its gradients are home, behind those before it in the same place."""
        step, place = self.step, self._updater(unit)
        took = step.through[unit] if place == "through" else max(step.update_s[unit], step.disk.get(unit, 0.0))
        self.lanes[place] = self.done[unit] = max(self.lanes[place], self.d2h) + took
        if place != "disk":
            self.updated = max(self.updated, self.done[unit])
        buffers.append((self.done[unit], place))

    def lift(self, unit: int) -> None:
        """A unit's states are asked for: up behind compute so far, beside what else crosses."""
        start = max(self.guests, self.run)
        self.guests = start + self.step.visiting[unit] / self.step.both
        self.updates["through"] += self.guests - start

    def _send(self, unit: int, adding: bool) -> None:
        step, start = self.step, self.d2h
        if adding and len(self.added) >= STAGINGS:      # no staging buffer is free
            start = max(start, self.added[-STAGINGS])
        self.d2h = self._copied(start, step.gradients[unit], step.both)
        self.busy["d2h"] += self.d2h - start
        if adding:
            self.adder = max(self.adder, self.d2h) + step.add_s[unit]
            self.busy["host sum"] += step.add_s[unit]
            self.added.append(self.adder)

    def leave(self, w: int) -> None:
        """A window's bundle leaves behind its forward; compute waits for the one before it, whose memory is needed."""
        before, held = self.swap_out, self.out_for
        start, self.out_for = max(before, self.run), "swap out"
        if w in self.step.spilled:
            start = self._block(start)
        self.swap_out = self._copied(start, self.step.away[w], self.step.both)
        self.busy["swap out"] += self.swap_out - start
        if w in self.step.spilled:
            self._write(w)
        if self.away:
            self.wait(before, held)
        self.away.append(w)

    def _block(self, start: float) -> float:
        """Python waits for a block that is written; none is free of the bundles that left last."""
        if len(self.spills) >= BLOCKS and (free := self.written[self.spills[-BLOCKS]]) > self.launch:
            self.launch, self.held = free, "swap disk"
            if free > start:
                start, self.out_for = free, "swap disk"
        return start

    def _write(self, w: int) -> None:
        took = self.step.away[w] / self.step.write
        self.drive = self.written[w] = max(self.drive, self.swap_out) + took
        self.busy["swap disk"] += took
        self.spills.append(w)

    def _read(self, w: int) -> float:
        """When a bundle is in host memory: the latest are still; each that came back leaves its block to one more."""
        at = self.spills.index(w)
        if at + BLOCKS >= len(self.spills):
            return 0.0
        took = self.step.away[w] / self.step.read
        self.drive = max(self.drive, self.back.get(self.spills[at + BLOCKS], 0.0)) + took
        self.busy["swap disk"] += took
        if self.drive > self.launch:
            self.launch, self.held = self.drive, "swap disk"
        return self.drive

    def come(self, w: int) -> None:
        """A bundle begins to come back, unless it is the last that left: that is on the device still."""
        if w in self.back or w not in self.away[:-1]:
            return
        start = max(self.h2d, self.run)
        if w in self.step.spilled and (there := self._read(w)) > start:
            start, self.back_for[w] = there, "swap disk"
        self.h2d = self.back[w] = self._copied(start, self.step.away[w], self.step.both)
        self.busy["swap back"] += self.h2d - start

    def bundles(self, w: int) -> None:
        """In front of a window's backward: its own bundle, and the one of the window before it."""
        self.come(w)
        if w in self.back:
            self.wait(self.back[w], self.back_for.get(w, "swap back"))
        if w < self.away[-1]:
            self.wait(self.swap_out, "swap out")
        if w > 0:
            self.come(w - 1)

    def forget(self) -> None:
        """A backward is through."""
        self.away, self.back, self.back_for = [], {}, {}
        self.spills, self.written = [], {}

    def end(self) -> None:
        """All gradients are home."""
        self.wait(self.d2h, "d2h")
        self.wait(self.adder, "host sum")
        self.wait(self.guests, "through")

    def wait(self, until: float, cause: str) -> None:
        if until > self.run:
            self.idle[cause] += until - self.run
            self.run = until


def _uses(step: Step, shown: int) -> list[int]:
    """Units that are not at home in VRAM, in the order in which windows ask for them."""
    home, n = step.home, len(step.units)
    forward = [u for units in step.units for u in units if not home[u]]
    backward = [u for w in range(n - 1, -1, -1) if step.backward_s[w] for u in step.again[w] if not home[u]]
    return (forward + backward) * shown


def _due(step: Step) -> dict[int, list[int]]:
    """Behind how many hand-overs of the last backward which units' states are asked for."""
    order = [u for w in range(len(step.units) - 1, -1, -1) for u in step.leaving[w]]
    due: dict[int, list[int]] = {}
    for at, u in enumerate(order, 1):
        if u in step.visiting:
            due.setdefault(max(at - AHEAD, 1), []).append(u)
    return due


def _walk(step: Step, fetches: Fetches, shown: int, launch: float,
          left: dict[int, float] | None = None) -> tuple[_Walk, float, list[float]]:
    """The walk, the seconds of its forwards, and `run` at the end of each micro-batch."""
    t = _Walk(step, fetches, launch, left or {})
    n, forwards, ends, due, handed = len(step.units), 0.0, [], _due(step), 0
    for micro in range(shown):
        began = t.run if micro else 0.0
        for w in range(n):
            t.window(step.units[w], step.forward_s[w], step.forward_host_s[w], step.h2d)
            if step.away and step.away[w]:
                t.leave(w)
        forwards += t.run - began
        for w in range(n - 1, -1, -1):
            if t.away:
                t.bundles(w)
            if step.backward_s[w]:
                t.window(step.again[w], step.backward_s[w], step.backward_host_s[w], step.both)
            for u in step.leaving[w]:
                t.offload(u, micro > 0)
                handed += micro == shown - 1
                for guest in due.get(handed, ()) if micro == shown - 1 else ():
                    t.lift(guest)
        t.forget()
        ends.append(t.run)
    t.end()
    return t, forwards, ends


def simulate(step: Step, fetches: Fetches | None = None, than: float = math.inf) -> Timing | None:
    """One step in the steady state; None, which is known sooner, where it takes `than` seconds or more. fetches: what
    `plan_fetches` gives, where it is known already."""
    shown = min(step.micro, SHOWN_MICRO)
    fetches = plan_fetches(step) if fetches is None else fetches
    ahead = -sum(step.backward_s) / 2                   # Python is ahead of the device by about this
    t, forwards, ends = _walk(step, fetches, shown, ahead)
    if t.launch - t.run > ahead:
        ahead = min(0.0, t.launch - t.run)
        t, forwards, ends = _walk(step, fetches, shown, ahead)
    for _ in range(SETTLE if step.lent else 0):
        if t.run * SETTLED >= than:
            return None
        left = {u: s - t.run for u, s in t.done.items() if s > t.run}
        t, forwards, ends = _walk(step, fetches, shown, ahead, left=left)
    more = step.micro - shown
    share = step.micro / shown
    passed = sum(step.through.values())
    least = max(t.updates["host update"], t.updates["disk"], passed) if step.lent else 0.0      # step after step
    if step.reads:
        least = max(least, t.updates["disk"] + t.busy["disk"] * share)
    seconds = max(t.run + (more * (ends[-2] - ends[-3]) if more else 0.0), least) + NORM_S
    if seconds >= than:
        return None
    busy = {name: s * share + t.updates.get(name, 0.0) for name, s in t.busy.items()}
    idle = {name: s * (1.0 if name in ("host update", "through") else share) for name, s in t.idle.items() if s > 0}
    return Timing(seconds, forwards * share, busy, idle)


def plan_fetches(step: Step) -> Fetches:
    """The schedule of a step; it depends on homes, slots and the number of micro-batches only."""
    return schedule(_uses(step, min(step.micro, SHOWN_MICRO)), step.weights, step.slots)
