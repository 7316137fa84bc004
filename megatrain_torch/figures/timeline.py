"""Slices of work on lanes, and a Chrome trace of them (Perfetto, chrome://tracing)."""
from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LANES = {"compute": "compute", "h2d": "H2D", "d2h": "D2H", "hand-over": "hand-over", "host sum": "host sum",
         "host update": "host update", "device update": "device update", "through": "through the device",
         "exchange": "exchange", "gather": "gather",
         "disk": "disk", "disk update": "disk update", "swap out": "activations out", "swap back": "activations back",
         "swap disk": "activations on disk"}
WAITS = "hand-over"             # a lane without work, so that nothing says how busy it is
COLOURS = {"forward": "#4878a8", "loss": "#8a6fb0", "replay": "#8fb3d1", "backward": "#2b4a6f", "fetch": "#4f9d69",
           "offload": "#d08a3c", "add": "#b0a14f", "update": "#b5485d", "swap": "#5f9ea0",
           "read": "#4f9d69", "write": "#d08a3c", "wait": "#dddddd"}


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


def busy_seconds(slices: Sequence[Slice], begin: int, end: int) -> float:
    """Time within [begin, end) that a lane worked. Its slices do not overlap; waits are no work."""
    return sum(max(0, min(s.end, end) - max(s.begin, begin)) for s in slices if s.work != "wait") * 1e-9


def between(slices: Sequence[Slice], begin: int, end: int) -> list[Slice]:
    """A lane's slices, in order, that have a part in [begin, end)."""
    first = bisect.bisect_right(slices, begin, key=lambda s: s.end)
    last = bisect.bisect_left(slices, end, key=lambda s: s.begin)
    return list(slices[first:last])


def chrome_trace(slices: Sequence[Slice], marks: Sequence[int]) -> dict[str, Any]:
    """Lanes as threads, work as slices, steps above, in Google's Trace Event Format. marks: when steps began."""
    start = min([s.begin for s in slices] + list(marks[:1]), default=0)
    rows = ["step", *LANES]

    def about(kind: str, args: dict[str, Any], **thread: int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": 1, **thread, "args": args}

    def complete(kind: str, name: str, row: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": rows.index(row),      # times in microseconds
                "ts": (begin - start) / 1000, "dur": (end - begin) / 1000, "args": args}

    events = [about("process_name", {"name": "megatrain_torch"})]
    for tid, name in enumerate(rows):
        events += [about("thread_name", {"name": name}, tid=tid),
                   about("thread_sort_index", {"sort_index": tid}, tid=tid)]
    events += [complete("step", f"step {i}", "step", a, b, {}) for i, (a, b) in enumerate(pairwise(marks))]
    for s in slices:
        details: dict[str, Any] = {k: v for k, v in (("unit", s.unit), ("bytes", s.nbytes)) if v}
        if s.nbytes and s.end > s.begin:
            details["GB/s"] = round(s.nbytes / (s.end - s.begin), 3)
        events.append(complete(s.work, f"{s.work} {s.unit}".strip(), s.lane, s.begin, s.end, details))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
