"""What plans, traces and reports show people: tables as text and pictures of bars; slices of work on lanes, as a
picture and as a Chrome trace (Perfetto, chrome://tracing); and what each resource did in a step, and which bound it."""
from __future__ import annotations

import bisect
import contextlib
import html
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import show_bytes

Table = tuple[str, list[tuple[str, ...]]]   # a title, "" without; rows, the first of which is the head
Tier = tuple[str, dict[str, int], int]      # of a kind of memory: title, bytes by what they hold, bytes there are


def as_text(table: Table, right: Sequence[int] = (1,)) -> str:
    """The rows in columns of spaces, the title below. right: columns whose figures end below each other."""
    title, rows = table
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(c.rjust(n) if i in right else c.ljust(n) for i, (c, n) in enumerate(zip(r, widths))).rstrip()
             for r in rows]
    return "\n".join([*lines, *([title] if title else [])])


def bytes_table(title: str, parts: dict[str, int], most: int, note: str = "") -> Table:
    """Bytes by what they hold, and all of them beside those there are. note: "" shows their share."""
    total = sum(parts.values())
    return "", [(title, "bytes", ""), *((what, show_bytes(n), "") for what, n in parts.items() if n),
                ("in all", show_bytes(total), f"of {show_bytes(most)}" + (note or f", {total / most:.0%}"))]


class Shown:
    """What prints as lines, its `_head()`, and as tables, its `_tables()`; and shows itself so in a notebook."""

    def __str__(self) -> str:
        return "\n\n".join([self._head(), *map(as_text, self._tables())])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


# ---- kinds of memory -----------------------------------------------------------------------------

_LEAST_SHARE = 0.06                          # of a bar: narrower pieces have no words in them


def draw_tiers(path: str | Path, title: str, tiers: list[Tier]) -> None:
    """A bar for each kind of memory, with what lies there as shares of it. path: .png, .svg or .pdf."""
    names = [f"{name}\n{show_bytes(most)}" for name, _, most in tiers]
    with drawing(path, title, names, (10.0, 1.1 * len(tiers) + 1.2), 150) as (figure, axes):
        from matplotlib import colormaps

        axes.set_prop_cycle(color=colormaps["tab20"].colors)
        left = [0.0] * len(tiers)
        for what in dict.fromkeys(what for _, parts, _ in tiers for what, n in parts.items() if n):
            shares = [parts.get(what, 0) / most for _, parts, most in tiers]
            bars = axes.barh(range(len(tiers)), shares, left=left, height=0.7, edgecolor="white", label=what)
            words = [show_bytes(parts[what]) if share > _LEAST_SHARE else ""
                     for share, (_, parts, _) in zip(shares, tiers)]
            axes.bar_label(bars, words, label_type="center", fontsize="x-small")
            left = [sum(pair) for pair in zip(left, shares)]
        axes.barh(range(len(tiers)), 1, height=0.7, facecolor="none", edgecolor="black", linewidth=0.8)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter("{x:.0%}")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")


@contextlib.contextmanager
def drawing(path: str | Path | BinaryIO, title: str, rows: list[str], inches: tuple[float, float], dpi: int
             ) -> Iterator[tuple[Any, Any]]:
    """(figure, axes) with a named row for each bar, the first at the top; written at the end."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MegatrainError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
    axes = figure.add_subplot()
    yield figure, axes
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title, fontsize="medium", loc="left")
    figure.savefig(path)


# ---- lanes ----------------------------------------------------------------------------------------

LANES = {"compute": "compute", "h2d": "H2D", "d2h": "D2H", "hand-over": "hand-over", "host sum": "host sum",
         "host update": "host update", "device update": "device update", "through": "through the device",
         "exchange": "exchange", "gather": "gather", "disk": "disk", "disk update": "disk update",
         "swap out": "activations out", "swap back": "activations back", "swap disk": "activations on disk"}
WAITS = "hand-over"             # a lane without work, so that nothing says how busy it is
COLOURS = {"forward": "#4878a8", "loss": "#8a6fb0", "replay": "#8fb3d1", "backward": "#2b4a6f", "fetch": "#4f9d69",
           "offload": "#d08a3c", "add": "#b0a14f", "update": "#b5485d", "swap": "#5f9ea0", "read": "#4f9d69",
           "write": "#d08a3c", "wait": "#dddddd"}


class Slice(NamedTuple):
    """A piece of work on a lane. Times are nanoseconds of `time.perf_counter_ns`."""

    lane: str       # of LANES; "hand-over": waits of the thread that hands gradients over and launches windows
    work: str       # "forward", "replay", "backward", "loss", "fetch", "offload", "add", "update", "read", "write" ...
    unit: str       # its name; "" where there is none
    nbytes: int     # copied, added, or read and written by the update
    begin: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) * 1e-9


def by_lane(slices: Sequence[Slice]) -> dict[str, list[Slice]]:
    """The slices of each lane in the order of time; lanes without any are left out."""
    lanes: dict[str, list[Slice]] = {}
    for s in sorted(slices, key=lambda s: (s.begin, s.end)):
        lanes.setdefault(s.lane, []).append(s)
    return {name: lanes[name] for name in LANES if name in lanes}


def between(slices: Sequence[Slice], begin: int, end: int) -> list[Slice]:
    """A lane's slices, in order, that have a part in [begin, end)."""
    first = bisect.bisect_right(slices, begin, key=lambda s: s.end)
    last = bisect.bisect_left(slices, end, key=lambda s: s.begin)
    return list(slices[first:last])


def chrome_trace(slices: Sequence[Slice], marks: Sequence[int]) -> dict[str, Any]:
    """Lanes as threads, work as slices, steps above, in Google's Trace Event Format. marks: when steps began."""
    start = min([s.begin for s in slices] + list(marks[:1]), default=0)
    rows = ["step", *LANES]
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "megatrain_torch"}}]
    for tid, name in enumerate(rows):
        events += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}},
                   {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": {"sort_index": tid}}]
    steps = [Slice("step", "step", str(i), 0, a, b) for i, (a, b) in enumerate(pairwise(marks))]
    for s in (*steps, *slices):
        args: dict[str, Any] = {k: v for k, v in (("unit", s.unit), ("bytes", s.nbytes)) if v}
        if s.nbytes and s.end > s.begin:
            args["GB/s"] = round(s.nbytes / (s.end - s.begin), 3)
        events.append({"ph": "X", "cat": s.work, "name": f"{s.work} {s.unit}".strip(), "pid": 1,
                       "tid": rows.index(s.lane), "ts": (s.begin - start) / 1000, "dur": (s.end - s.begin) / 1000,
                       "args": args})          # times in microseconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw_lanes(path: str | Path | BinaryIO, slices: Sequence[Slice], marks: Sequence[int], title: str = "") -> None:
    """Lanes against time from the first mark to the last; how busy each was stands at its right. path: .png, .svg or
    .pdf; or an open file, for PNG. marks: at least two: when each step shown began, and when the last ended;
    nanoseconds. Raises MegatrainError without matplotlib."""
    begin, end = marks[0], marks[-1]
    lanes = {name: part for name, all_ in by_lane(slices).items() if (part := between(all_, begin, end))}
    with drawing(path, title, [LANES[name] for name in lanes], (12.0, 4.0), 100) as (figure, axes):
        from matplotlib.patches import Patch

        beside = axes.get_yaxis_transform()
        for row, part in enumerate(lanes.values()):
            spans: dict[tuple[str, bool], list[tuple[float, float]]] = {}
            odd, unit = False, None
            for s in part:          # neighbours differ a little in shade, so that units can be told apart
                odd, unit = odd ^ (s.unit != unit), s.unit
                spans.setdefault((s.work, odd), []).append(((s.begin - begin) * 1e-6, (s.end - s.begin) * 1e-6))
            for (work, odd), some in spans.items():
                axes.broken_barh(some, (row - 0.38, 0.76), facecolor=COLOURS[work], alpha=0.78 if odd else 1.0,
                                 linewidth=0)
            share = sum(min(s.end, end) - max(s.begin, begin) for s in part if s.work != "wait") / (end - begin)
            axes.text(1.01, row, f"{share:.0%}", transform=beside, va="center")
        axes.text(1.01, -0.5, "busy", transform=beside, va="bottom", fontsize="small")
        for mark in marks:
            axes.axvline((mark - begin) * 1e-6, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlim(0, (end - begin) * 1e-6)
        axes.set_xlabel("ms")
        shown = {s.work for part in lanes.values() for s in part}
        patches = [Patch(color=colour, label=work) for work, colour in COLOURS.items() if work in shown]
        figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize="small")


# ---- steps -----------------------------------------------------------------------------------------

OWN = "host"                     # what compute waits for when it waits for no copy and no update: the host's own work
COUNTED = ("out_bytes", "back_bytes", "spill_written_bytes", "spill_read_bytes")   # of the engine's counters
_CALLED = {"compute": "compute", "h2d": "copies to the device", "d2h": "copies to the host",
          "host sum": "the host's sums of gradients", "host update": "the host update",
          "device update": "the device update", "through": "updates through the device", "disk": "the disk",
          "disk update": "updates from disk", "swap out": "activations on their way out",
          "swap back": "activations on their way back", "swap disk": "activations on disk",
          "exchange": "gradients between processes", "gather": "weights between processes",
          OWN: "the host's own work"}       # in a sentence


@dataclass(frozen=True)
class StepReport(Shown):
    """One step, measured; or, without mt.trace, what was counted since the report before.

    A step goes from one `step()` of the optimizer to the next, at the times when compute reaches them. Without an
    optimizer it goes from one forward of the model to the next. Updates beside its forward are the previous step's.

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
        busy: seconds that each lane worked: "compute", "h2d", "d2h", "host sum", "host update", "device update". "disk"
            and "disk update" are of states and weights of units there, and their updates. "through": updates that
            pass through the device, and states that arrive and leave. "exchange" and
            "gather": gradients and weights between processes. "swap out", "swap back", "swap disk": activations to
            the host, back, and between there and a file. Without mt.trace only "host update" and "disk update".
            Compute is busy from a window's first kernel to its last, also where the host is slow in launching them.
        idle: seconds that compute stood still, by what it waited for: a lane, or "host": Python and the user's code.
        between_steps: of idle, seconds before the step's first window.
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
        return max(spent, key=spent.__getitem__) if self.traced else ""

    @property
    def why(self) -> str:
        """One sentence."""
        if not self.bound:
            return f"{self.seconds:.3g} s; mt.trace(model) measures what bounds a step"
        spent = self.busy.get(self.bound, self.idle.get(OWN, 0.0))
        text = f"bound by {_CALLED[self.bound]}: busy {spent:.3g} s of {self.seconds:.3g} s"
        if self.bound != "compute":
            text += f"; compute was busy {self.busy.get('compute', 0):.3g} s"
        longest, s = max(self.idle.items(), key=lambda item: item[1], default=(OWN, 0.0))
        if s and s >= 0.01 * self.seconds:
            text += f"; compute stood still {sum(self.idle.values()):.3g} s, {s:.3g} s of it for {_CALLED[longest]}"
        return text

    def _head(self) -> str:
        lines = [self.why]
        if self.idle:
            idle = sorted(self.idle.items(), key=lambda item: -item[1])
            lines.append(f"compute idle: {', '.join(f'{v:.3g} s for {_CALLED[k]}' for k, v in idle)}; "
                         f"{self.between_steps:.3g} s of it between steps")
        for what, read, written in (("disk", self.disk_read_bytes, self.disk_written_bytes),
                                    ("activations on disk", self.spill_read_bytes, self.spill_written_bytes)):
            if read or written:
                lines.append(f"{what}: {read / 1e9:.3g} GB read, {written / 1e9:.3g} GB written")
        lines.append(f"fetches {self.fetches}, on demand {self.demand_fetches}; waited for copies to be queued "
                     f"{self.await_seconds:.3g} s; host store {self.host_bytes / 1e9:.3g} GB")
        return "\n".join(lines)

    def _tables(self) -> list[Table]:
        """Every lane that did something: busy seconds, share of the step, GB moved."""
        moved = {"h2d": self.h2d_bytes, "d2h": self.d2h_bytes, "swap out": self.out_bytes, "swap back": self.back_bytes,
                 "disk": self.disk_read_bytes + self.disk_written_bytes,
                 "swap disk": self.spill_read_bytes + self.spill_written_bytes}
        rows = [("lane", "busy s", "of the step", "GB"),
                *((LANES[lane], f"{busy:.3g}", f"{busy / self.seconds:.0%}" if self.seconds > 0 else "",
                   f"{moved[lane] / 1e9:.3g}" if lane in moved else "")
                  for lane, busy in self.busy.items() if busy > 0)]
        return [("", rows)] if len(rows) > 1 else []


def measure(lanes: Mapping[str, Sequence[Slice]], begin: int, end: int, counted: Mapping[str, int], host_bytes: int
            ) -> StepReport:
    """The report of the step in [begin, end) ns. counted: growth of the engine's counters."""
    within = {name: between(lane, begin, end) for name, lane in lanes.items()}
    first = next((s.begin for s in within.get("compute", ())), end)
    done = {name: [s for s in lane if s.end < end] for name, lane in within.items()}
    moved = {name: sum(s.nbytes for s in lane) for name, lane in done.items()}
    # What a wait was for may have begun before the step; a millisecond is more than times on two queues differ.
    since, units = min([begin, *(s.begin for s in within.get(WAITS, ()))]), {"": -1}
    rows = ((_core.LANES[name], _core.WORKS.get(s.work, -1), units.setdefault(s.unit, len(units)), s.begin, s.end)
            for name in _core.LANES for s in between(lanes.get(name, ()), since, end + 1_000_000))
    busy, idle = _core.gaps(array("q", chain.from_iterable(rows)), begin, end)
    return StepReport(
        seconds=(end - begin) * 1e-9, h2d_bytes=moved.get("h2d", 0), d2h_bytes=moved.get("d2h", 0),
        fetches=len(done.get("h2d", ())), demand_fetches=counted["demand_fetches"],
        await_seconds=counted["await_ns"] * 1e-9, host_bytes=host_bytes,
        busy={name: ns * 1e-9 for name, ns in zip(_core.LANES, busy) if name in lanes and name != WAITS},
        idle={name: ns * 1e-9 for name, ns in zip((*_core.LANES, OWN), idle) if ns},
        between_steps=max(0, first - begin) * 1e-9, traced=True,
        disk_read_bytes=sum(s.nbytes for s in done.get("disk", ()) if s.work == "read"),
        disk_written_bytes=sum(s.nbytes for s in done.get("disk", ()) if s.work == "write"),
        **{k: counted.get(k, 0) for k in COUNTED})
