"""What a step took on each resource, and which of them bound it."""
from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .timeline import LANES, WAITS, Slice, between, busy_seconds

OWN = "host"                     # what compute waits for when it waits for no copy and no update: the host's own work
UPDATED = ("host update", "through", "disk update")     # lanes that updates of units on the host end on
JITTER_NS = 50_000               # times on two queues are compared to within this
BAR, NAME = 24, 14               # characters, a lane's name at least
COUNTED = ("out_bytes", "back_bytes", "spill_written_bytes", "spill_read_bytes")   # of the engine's counters


@dataclass(frozen=True)
class StepReport:
    """One step, measured; or, without mt.trace, what was counted since the report before.

    A step goes from one step of the optimizer to its next, as compute comes by them; without an optimizer from one
    root forward to the next. So the updates that it runs beside its forward are those of the step before.

    Attributes:
        seconds: wall time.
        h2d_bytes, d2h_bytes: weights streamed in, gradients streamed out.
        fetches, demand_fetches: copies of units; those that were asked for only when needed. With mt.trace, of units
            whose weights are on disk: copies of their pieces.
        await_seconds: time the computing thread waited for a copy to be put in its queue.
        host_bytes: host memory the store holds.
        disk_read_bytes, disk_written_bytes: states of units at home on disk, and weights of those that have them there.
        out_bytes, back_bytes: activations that went to host memory, and came back. spill_written_bytes,
            spill_read_bytes: of those on to a file, and from there.
        busy: seconds that each lane worked: "compute", "h2d", "d2h", "host sum", "host update", "device update",
            "disk" and "disk update" (states and weights of units there, and their updates), "through" (updates that
            pass through the device; states that arrive and leave), "exchange" and
            "gather" (gradients and weights between processes), "swap out", "swap back", "swap disk" (activations:
            to the host, back, and between there and a file). Without mt.trace only "host update" and "disk update".
            Compute is busy from a window's first kernel to its last, also where the host is slow in launching them.
        idle: seconds that compute stood still, by what it waited for: a lane, or "host": Python and the user's code.
        between_steps: of idle, seconds before the step's first window.
        least: seconds the bytes of a lane take at the machine's rate, where mt.trace was given one.
        traced: busy and idle were measured.
    """

    seconds: float
    h2d_bytes: int
    d2h_bytes: int
    fetches: int
    demand_fetches: int
    await_seconds: float
    host_bytes: int
    busy: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    between_steps: float = 0.0
    traced: bool = False
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    out_bytes: int = 0
    back_bytes: int = 0
    spill_written_bytes: int = 0
    spill_read_bytes: int = 0

    @property
    def bound(self) -> str:
        """The lane nearest its limit: busy for the largest part of the step; "host" when compute waited for the host
        longer than that. "" when the step was not traced."""
        spent = {**self.busy, OWN: self.idle.get(OWN, 0.0)}
        return max(spent, key=lambda name: spent[name]) if self.traced else ""

    @property
    def why(self) -> str:
        """One sentence."""
        if not self.bound:
            return f"{self.seconds:.3g} s; mt.trace(model) measures what bounds a step"
        spent = self.busy.get(self.bound, self.idle.get(OWN, 0.0))
        text = f"bound by {_called(self.bound)}: busy {spent:.3g} s of {self.seconds:.3g} s"
        idle = {k: v for k, v in self.idle.items() if v >= 0.01 * self.seconds}
        if self.bound != "compute":
            text += f"; compute was busy {self.busy.get('compute', 0):.3g} s"
        if idle:
            longest = max(idle, key=lambda k: idle[k])
            text += f"; compute stood still {sum(self.idle.values()):.3g} s, {idle[longest]:.3g} s of it for " \
                    f"{_called(longest)}"
        return text

    def __str__(self) -> str:
        lines = [self.why]
        rows = self._rows()
        wide = max([NAME, *(len(lane) + 1 for lane, *_ in rows)])
        if rows:
            lines.append(f"{'':<{wide}}{'busy s':>8}{'':>6}  {'':<{BAR}}{'GB':>9}{'at least s':>12}")
        for lane, busy, share, nbytes, least in rows:
            bar = "█" * round(share * BAR)
            lines.append(f"{lane:<{wide}}{busy:>8.3g}{share:>6.0%}  {bar:<{BAR}}{nbytes:>9}{least:>12}".rstrip())
        if self.idle:
            parts = ", ".join(f"{v:.3g} s for {_called(k)}" for k, v in _largest_first(self.idle))
            lines.append(f"compute idle: {parts}; {self.between_steps:.3g} s of it between steps")
        if self.disk_read_bytes or self.disk_written_bytes:
            lines.append(f"disk: {self.disk_read_bytes / 1e9:.3g} GB read, "
                         f"{self.disk_written_bytes / 1e9:.3g} GB written")
        if self.spill_written_bytes:
            lines.append(f"activations on disk: {self.spill_read_bytes / 1e9:.3g} GB read, "
                         f"{self.spill_written_bytes / 1e9:.3g} GB written")
        lines.append(f"fetches {self.fetches}, on demand {self.demand_fetches}; waited for copies to be queued "
                     f"{self.await_seconds:.3g} s; host store {self.host_bytes / 1e9:.3g} GB")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{lane}</td><td>{busy:.3g} s</td><td>{share:.0%}</td><td><div style='width:{share * 160:.0f}px;"
            f"height:0.8em;background:#4878a8'></div></td><td>{nbytes} GB</td><td>{least}</td></tr>"
            for lane, busy, share, nbytes, least in self._rows())
        head = "<tr><th></th><th>busy</th><th></th><th></th><th>moved</th><th>at least, s</th></tr>"
        return f"<p>{html.escape(self.why)}</p><table>{head}{cells}</table>"

    def _rows(self) -> list[tuple[str, float, float, str, str]]:
        """(lane, busy seconds, share of the step, GB moved, least seconds) of every lane that did something."""
        moved = {"h2d": self.h2d_bytes, "d2h": self.d2h_bytes, "swap out": self.out_bytes, "swap back": self.back_bytes,
                 "disk": self.disk_read_bytes + self.disk_written_bytes,
                 "swap disk": self.spill_read_bytes + self.spill_written_bytes}
        return [(LANES[lane], busy, busy / self.seconds if self.seconds > 0 else 0.0,
                 f"{moved[lane] / 1e9:.3g}" if lane in moved else "",
                 f"{self.least[lane]:.3g}" if lane in self.least else "")
                for lane, busy in self.busy.items() if busy > 0]


def _called(lane: str) -> str:
    return {"compute": "compute", "h2d": "copies to the device", "d2h": "copies to the host",
            "host sum": "the host's sums of gradients", "host update": "the host update",
            "device update": "the device update", "through": "updates through the device", "disk": "the disk",
            "disk update": "updates from disk",
            "swap out": "activations on their way out", "swap back": "activations on their way back",
            "swap disk": "activations on disk", "exchange": "gradients between processes",
            "gather": "weights between processes",
            OWN: "the host's own work"}[lane]


def _largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


# ---- from slices -------------------------------------------------------------------------------

def measure(lanes: Mapping[str, Sequence[Slice]], begin: int, end: int, counted: Mapping[str, int], host_bytes: int,
            rates: Mapping[str, float]) -> StepReport:
    """The report of the step in [begin, end), nanoseconds.

    Args:
        lanes: the slices of each lane in order.
        counted: of the engine's counters, what they grew by in the step.
        rates: bytes/s that the machine can do, by lane.
    """
    first = next((s.begin for s in between(lanes.get("compute", ()), begin, end)), end)
    done = {name: [s for s in between(lane, begin, end) if s.end < end] for name, lane in lanes.items()}
    moved = {name: sum(s.nbytes for s in lane) for name, lane in done.items()}
    return StepReport(
        seconds=(end - begin) * 1e-9, h2d_bytes=moved.get("h2d", 0), d2h_bytes=moved.get("d2h", 0),
        fetches=len(done.get("h2d", ())), demand_fetches=counted["demand_fetches"],
        await_seconds=counted["await_ns"] * 1e-9, host_bytes=host_bytes,
        busy={name: busy_seconds(between(lane, begin, end), begin, end) for name, lane in lanes.items()
              if name != WAITS},
        idle=idle_seconds(lanes, begin, end),
        least={name: moved[name] / rate for name, rate in rates.items() if moved.get(name)},
        between_steps=max(0, first - begin) * 1e-9, traced=True,
        disk_read_bytes=sum(s.nbytes for s in done.get("disk", ()) if s.work == "read"),
        disk_written_bytes=sum(s.nbytes for s in done.get("disk", ()) if s.work == "write"),
        **{k: counted.get(k, 0) for k in COUNTED})


def idle_seconds(lanes: Mapping[str, Sequence[Slice]], begin: int, end: int) -> dict[str, float]:
    """What compute waited for, in seconds.

    A gap in front of a window ends when what the window needs is there: its unit's weights, what it kept, or room for
    gradients and activations. Whichever came last is to blame for its own time, and the update that a fetch waited
    for is for the time before. While the thread that launches windows waited for a buffer to hand gradients over in,
    it is the update's that gave one back, or the sums'. What is left is the host's own, as is a gap at the step's end.
    """
    found: dict[str, float] = {}
    at = begin
    for s in [*between(lanes.get("compute", ()), begin, end), None]:
        until = end if s is None else max(s.begin, begin)
        for cause, ns in _blame(lanes, at, until, s):
            found[cause] = found.get(cause, 0.0) + ns * 1e-9
        at = max(at, until if s is None else s.end)
    return found


def _blame(lanes: Mapping[str, Sequence[Slice]], a: int, b: int, window: Slice | None) -> list[tuple[str, int]]:
    """(cause, nanoseconds) of the gap [a, b) in front of a window; None: at the step's end. The window was launched
    after the last wait of a hand-over that ended in the gap; one that ended later was behind it."""
    parts, at = [], a
    for wait in (s for s in between(lanes.get(WAITS, ()), a, b) if s.end <= b + JITTER_NS):
        at = min(wait.end, b)
        parts += _before_launch(lanes, max(wait.begin, a), at, wait)
    parts += _before_window(lanes, at, b, window)
    rest = b - a - sum(ns for _, ns in parts)
    return [(cause, ns) for cause, ns in [*parts, (OWN, rest)] if ns > 0]


def _before_launch(lanes: Mapping[str, Sequence[Slice]], a: int, b: int, wait: Slice) -> list[tuple[str, int]]:
    """What [a, b) of a hand-over's wait went to, all of it: the update of the unit it names, or with none the sums of
    earlier gradients. An update on the device is over for the host when it is put, behind those that the updater has
    to make; its gradients wait for those on the device."""
    lane = next((k for k in UPDATED if _over_in(lanes, k, wait.begin, wait.end, wait.unit)), "")
    if lane:
        parts = _updates(lanes, lane, a, b)
    else:
        parts = _shares(lanes, a, b, ("host update", "d2h", "device update") if wait.unit else ("host sum", "d2h"))
    longest = max(parts, key=lambda part: part[1])[0]
    return [*parts, (longest, b - a - sum(ns for _, ns in parts))]


def _before_window(lanes: Mapping[str, Sequence[Slice]], a: int, b: int, window: Slice | None) -> list[tuple[str, int]]:
    """What [a, b) went to that is not the host's own, where it launched the window at a or later."""
    ended = {} if window is None else {
        "h2d": _over_in(lanes, "h2d", a, b, window.unit),
        "device update": _over_in(lanes, "device update", a, b, window.unit),      # of a unit that lives there
        "d2h": _over_in(lanes, "d2h", a, b) if window.work == "backward" else None,
        "swap out": _over_in(lanes, "swap out", a, b) if window.work == "forward" else None,
        "swap back": _over_in(lanes, "swap back", a, b, window.unit),
        "swap disk": _over_in(lanes, "swap disk", a, b)}        # the computing thread waits for it, window by window
    lane, last = max(((k, s) for k, s in ended.items() if s is not None), key=lambda found: found[1].end,
                     default=(OWN, None))
    if last is None:
        return []
    if lane == "device update":
        return _updates(lanes, lane, a, min(last.end, b))
    return [(lane, min(last.end, b) - max(a, last.begin)), *(_before_fetch(lanes, a, last) if lane == "h2d" else [])]


def _before_fetch(lanes: Mapping[str, Sequence[Slice]], a: int, fetch: Slice) -> list[tuple[str, int]]:
    """What the time [a, fetch.begin) went to, where a fetch was waited for: its unit's update and those in front of
    it; else the copies in front of it in line, and the disk where its weights were read there."""
    for lane in UPDATED:
        own = _over_in(lanes, lane, a, fetch.begin, fetch.unit)
        if own is not None:
            return _updates(lanes, lane, a, min(own.end, fetch.begin))
    copies = _busy(lanes, "h2d", a, fetch.begin)
    read = _over_in(lanes, "disk", a, fetch.begin, fetch.unit)
    reading = _busy(lanes, "disk", a, fetch.begin) if read is not None and read.work == "read" else 0
    return [("h2d", copies), ("disk", min(reading, max(fetch.begin - a - copies, 0)))]


def _updates(lanes: Mapping[str, Sequence[Slice]], lane: str, a: int, b: int) -> list[tuple[str, int]]:
    """[a, b), at whose end an update was over: the lane's work or that of the one its states come by, whichever was
    at it longer, as they go on beside each other; for the rest the gradients it waited for, and the other lane."""
    source = {"disk update": "disk", "device update": "through"}.get(lane, "")      # through: of states that arrive
    longer, other = sorted((lane, source), key=lambda k: -_busy(lanes, k, a, b))
    return _shares(lanes, a, b, (longer, "d2h", other))


def _shares(lanes: Mapping[str, Sequence[Slice]], a: int, b: int, causes: Sequence[str]) -> list[tuple[str, int]]:
    """Of [a, b) what each lane worked, as far as those before it have left any."""
    parts, rest = [], b - a
    for cause in causes:
        parts.append((cause, min(_busy(lanes, cause, a, b), rest)))
        rest -= parts[-1][1]
    return parts


def _busy(lanes: Mapping[str, Sequence[Slice]], lane: str, a: int, b: int) -> int:
    return round(busy_seconds(between(lanes.get(lane, ()), a, b), a, b) * 1e9) if b > a else 0


def _over_in(lanes: Mapping[str, Sequence[Slice]], lane: str, a: int, b: int, unit: str | None = None) -> Slice | None:
    """The lane's last slice of work on the unit (None: on any) that ended in the gap (a, b]."""
    for s in reversed(between(lanes.get(lane, ()), a, b + JITTER_NS)):
        if s.work != "wait" and a < s.end <= b + JITTER_NS and unit in (None, s.unit):
            return s
    return None
