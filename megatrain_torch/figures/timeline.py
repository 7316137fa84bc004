"""What queues did, as pictures: a Chrome trace (Perfetto, chrome://tracing) and a plot of lanes against time."""
from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..base.errors import MegatrainError

LANES = {"compute": "compute", "h2d": "H2D", "d2h": "D2H", "hand-over": "hand-over", "host sum": "host sum",
         "host update": "host update", "device update": "device update", "through": "through the device",
         "exchange": "exchange", "gather": "gather",
         "disk": "disk", "disk update": "disk update", "swap out": "activations out", "swap back": "activations back",
         "swap disk": "activations on disk"}
WAITS = "hand-over"             # a lane without work, so that nothing says how busy it is
COLOURS = {"forward": "#4878a8", "loss": "#8a6fb0", "replay": "#8fb3d1", "backward": "#2b4a6f", "fetch": "#4f9d69",
           "offload": "#d08a3c", "add": "#b0a14f", "update": "#b5485d", "swap": "#5f9ea0",
           "read": "#4f9d69", "write": "#d08a3c", "wait": "#dddddd"}
WIDTH, HEIGHT, DPI = 12.0, 4.0, 100            # inches, inches, dots per inch


class Slice(NamedTuple):
    """A piece of work on a lane. Times are nanoseconds of `time.perf_counter_ns`.

    Attributes:
        lane: "compute", "h2d", "d2h", "hand-over" (waits of the thread that hands gradients over and launches
            windows), "host sum", "host update", "device update", "through" (updates of units on the host that pass
            through the device), "exchange" and "gather" (gradients and weights between processes), "disk", "disk
            update", "swap out", "swap back" or "swap disk" (activations).
        work: "forward", "replay", "backward", "loss", "fetch", "offload", "add", "update", "read", "write", "swap" or
            "wait".
        unit: the unit's name; "" where there is none.
        nbytes: copied, added, or read and written by the update.
    """

    lane: str
    work: str
    unit: str
    nbytes: int
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


def busy_seconds(slices: Sequence[Slice], begin: int, end: int) -> float:
    """Time within [begin, end) that a lane worked. Its slices do not overlap; waits are no work."""
    return sum(max(0, min(s.end, end) - max(s.begin, begin)) for s in slices if s.work != "wait") * 1e-9


def between(slices: Sequence[Slice], begin: int, end: int) -> list[Slice]:
    """A lane's slices, in order, that have a part in [begin, end)."""
    first = bisect.bisect_right(slices, begin, key=lambda s: s.end)
    last = bisect.bisect_left(slices, end, key=lambda s: s.begin)
    return list(slices[first:last])


# ---- Chrome trace ------------------------------------------------------------------------------

def chrome_trace(slices: Sequence[Slice], marks: Sequence[int]) -> dict[str, Any]:
    """Trace Event Format: lanes as threads, work as slices, steps as a row above.

    Args:
        marks: when each step began, in nanoseconds, ascending.

    Source: "Trace Event Format", Google, the format that Perfetto and chrome://tracing read.
    """
    start = min([s.begin for s in slices] + list(marks[:1]), default=0)
    events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "megatrain_torch"}}]
    rows = ["step", *LANES]
    for tid, name in enumerate(rows):
        args: list[tuple[str, dict[str, Any]]] = [("thread_name", {"name": name}),
                                                  ("thread_sort_index", {"sort_index": tid})]
        events += [{"ph": "M", "name": kind, "pid": 1, "tid": tid, "args": a} for kind, a in args]
    events += [_event("step", f"step {i}", 0, a - start, b - a, {})
               for i, (a, b) in enumerate(pairwise(marks))]
    events += [_event(s.work, f"{s.work} {s.unit}".strip(), rows.index(s.lane), s.begin - start, s.end - s.begin,
                      _details(s)) for s in slices]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(kind: str, name: str, tid: int, begin: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    """A complete event; the format counts microseconds."""
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": begin / 1000, "dur": length / 1000,
            "args": args}


def _details(s: Slice) -> dict[str, Any]:
    details: dict[str, Any] = {"unit": s.unit} if s.unit else {}
    if s.nbytes:
        details["bytes"] = s.nbytes
        if s.end > s.begin:
            details["GB/s"] = round(s.nbytes / (s.end - s.begin), 3)
    return details


def write_chrome(path: str | Path, slices: Sequence[Slice], marks: Sequence[int]) -> None:
    Path(path).write_text(json.dumps(chrome_trace(slices, marks)))


# ---- picture -----------------------------------------------------------------------------------

def write_picture(path: str | Path | BinaryIO, slices: Sequence[Slice], marks: Sequence[int], title: str = "") -> None:
    """Lanes against time from the first mark to the last; how busy each was stands at its right.

    Args:
        path: .png, .svg or .pdf; or an open file, for PNG.
        marks: at least two: when each step shown began, and when the last ended; nanoseconds.

    Raises:
        MegatrainError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MegatrainError("a picture of the timeline needs matplotlib: pip install matplotlib") from None
    begin, end = marks[0], marks[-1]
    lanes = {name: part for name, all_ in by_lane(slices).items() if (part := between(all_, begin, end))}
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, part in enumerate(lanes.values()):
        _draw_lane(axes, row, part, begin)
        share = busy_seconds(part, begin, end) / ((end - begin) * 1e-9)
        axes.text(1.01, row, f"{share:.0%}", transform=axes.get_yaxis_transform(), va="center")
    axes.text(1.01, -0.5, "busy", transform=axes.get_yaxis_transform(), va="bottom", fontsize="small")
    for mark in marks:
        axes.axvline((mark - begin) * 1e-6, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, (end - begin) * 1e-6)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [LANES[name] for name in lanes])
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize="medium", loc="left")
    _legend(figure, {s.work for part in lanes.values() for s in part})
    figure.savefig(path)


def _draw_lane(axes: Any, row: int, part: Sequence[Slice], start: int) -> None:
    """One bar for each slice; neighbours differ a little in shade, so that units can be told apart."""
    for work in dict.fromkeys(s.work for s in part):
        mine = [(s, shade) for s, shade in _shaded(part) if s.work == work]
        for odd in (False, True):
            spans = [((s.begin - start) * 1e-6, (s.end - s.begin) * 1e-6) for s, o in mine if o == odd]
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolor=COLOURS[work], alpha=0.78 if odd else 1.0,
                             linewidth=0)


def _shaded(part: Sequence[Slice]) -> Iterator[tuple[Slice, bool]]:
    odd, unit = False, None
    for s in part:
        odd, unit = odd ^ (s.unit != unit), s.unit
        yield s, odd


def _legend(figure: Any, works: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=work) for work, colour in COLOURS.items() if work in works]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize="small")
