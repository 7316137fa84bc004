"""mt.trace: records what every queue does while a streamed model trains."""
from __future__ import annotations

import contextlib
import io
import json
import threading
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .. import _core
from ..base.errors import MegatrainError
from ..figures.report import Slice, StepReport, by_lane, chrome_trace, draw_lanes, measure
from ..graph.door import UNTRACED
from ..model.runtime import runtime_of
from ..store.state import in_backward

if TYPE_CHECKING:
    from ..graph.window import Window
    from ..model.runtime import Runtime

KEPT = 100_000          # slices; some hundred steps of a large model
TAKEN_EVERY = 4         # steps: the engine keeps some 16,000 records
SHOWN = 3               # steps in a picture
SEAM_NS = 5_000         # pieces of one window nearer than this are one slice
_LANES = {number: name for name, number in _core.LANES.items()}
_WORKS = {number: name for name, number in _core.WORKS.items()}


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Inside, every queue's work on a streamed model is recorded; the yielded Trace shows it.

        with mt.trace(model) as t:
            train(model)
        print(t.steps()[-1])
        t.chrome("steps.json")
        t.picture("steps.png")

    Costs two time stamps for each copy, window and update, a few hundred microseconds a step. The end waits for all
    work under way. `mt.last_step(model)` is the last finished step while a trace is on.

    Raises:
        MegatrainError: the model is not streamed, or is traced already.
    """
    rt = runtime_of(model)
    if rt.trace is not UNTRACED:
        raise MegatrainError("the model is traced already; leave that `with` first")
    t = Trace(rt)
    try:
        yield t
        t.finish()
    finally:
        t.stop()


class Progress(NamedTuple):
    """How far compute is in a forward and its backward: windows with parameters that are behind it, of how many."""

    forward: int
    backward: int
    windows: int

    def __str__(self) -> str:
        return f"backward {self.backward}/{self.windows}" if self.backward else f"forward {self.forward}/{self.windows}"


class Trace:
    """The work of a streamed model's queues, and its steps.

    A step ends where an optimizer's step begins, and the next begins there: its updates run in the next step. Without
    an optimizer it ends at the next root forward. Passes without gradients are steps of their own.
    """

    def __init__(self, rt: Runtime) -> None:
        self._rt: Runtime | None = rt                    # None: it was stopped
        self._slices: deque[Slice] = deque(maxlen=KEPT)
        self._marks: dict[int, int] = {}                 # number of a mark: when compute came by, ns
        self._ends: list[bool] = []                      # by number: a step ends there for certain
        self._counted: list[dict[str, int]] = []         # by number: the engine's counters then
        self._lost, self._whole_from = rt.core.stats()["records_lost"], 0      # before it records are missing, ns
        self._host_bytes = 0
        self._stepped, self._graded, self._passes = False, True, 0
        self._open: Window | None = None                 # whose backward runs
        self._lock = threading.Lock()                    # of slices and marks: progress() is anybody's to ask
        self._windows = len({w.units[0] for w in rt.windows if w.units})
        rt.core.timeline()                               # what an earlier trace left
        rt.core.trace(True)
        self._hook = register_optimizer_step_pre_hook(self.optimizer_steps)
        rt.trace = self

    # ---- called by the runtime, windows and hand-over ----

    def optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to submit its updates: a step ends, if the model is its."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        if any(getattr(getattr(p, "_mt", None), "runtime", None) is self._rt for p in params):
            self._stepped = True
            self._mark(True)

    def pass_begins(self) -> None:
        graded, self._graded = self._graded, torch.is_grad_enabled()
        self._open = None
        self._mark(not (graded and self._graded))
        self._passes += 1

    def _mark(self, ends: bool) -> None:
        """A point on compute. ends: a step ends here for certain; without an optimizer one ends at each pass."""
        if self._passes == 0 and self._ends:
            return                                       # nothing has run since the last one
        number = len(self._ends)
        self._ends.append(ends or number == 0)
        self._counted.append(self._rt.core.stats())
        self._rt.core.step_mark(number, self._rt.stream())
        self._passes = 0
        if number % TAKEN_EVERY == 0:
            self._collect()

    @contextlib.contextmanager
    def during(self, window: Window, work: str) -> Iterator[None]:
        """A context. Compute is given this work of the window inside."""
        self._begin(window, work)
        try:
            yield
        finally:
            self._rt.core.compute_end(self._rt.stream())

    def _begin(self, window: Window, work: str) -> None:
        self._rt.core.compute_begin(window.units[0] if window.units else -1, _core.WORKS[work], self._rt.stream())

    def forward(self, window: Window, args: Any, kwargs: Any) -> Any:
        """The window's forward, or its repetition by a checkpoint in backward; its backward will be seen to begin."""
        with self.during(window, "forward" if in_backward() == -1 else "replay"):
            out = window.once(args, kwargs)
        if torch.is_grad_enabled():
            for node in {t.grad_fn for t in tree_leaves(out) if isinstance(t, Tensor)} - {None}:
                node.register_prehook(lambda _: self._backward_begins(window))
        return out

    def _backward_begins(self, window: Window) -> None:
        if self._rt is not None and self._rt.trace is self and self._open is not window:
            self.handed_over()
            self._open = window
            self._begin(window, "backward")

    def handed_over(self) -> None:
        """The open backward has launched all it has: its gradients leave, or the backward is over."""
        if self._open is not None:
            self._open = None
            self._rt.core.compute_end(self._rt.stream())

    def finish(self) -> None:
        """Ends the last step here, and waits until all that was asked for so far is over."""
        if self._rt is None or self._rt.trace is not self:
            return
        self._mark(True)
        self._rt.drain()
        if self._rt.is_cuda:
            torch.cuda.current_stream(self._rt.device).synchronize()
        self._collect()

    def stop(self) -> None:
        """Records no more."""
        with self._lock:
            rt, self._rt, self._open = self._rt, None, None      # what was recorded keeps no model alive
        if rt is None:
            return
        self._hook.remove()
        if rt.trace is self:
            rt.trace = UNTRACED
            rt.core.trace(False)

    # ---- what there is ----

    def _collect(self) -> None:
        """Takes the records that are over by now."""
        with self._lock:
            rt = self._rt
            if rt is None or rt.trace is not self:
                return
            self._host_bytes, records, lost = rt.core.host_bytes(), rt.core.timeline(), rt.core.stats()["records_lost"]
            if lost > self._lost or len(self._slices) + len(records) > KEPT:
                self._lost, self._whole_from = lost, min((r[4] for r in records), default=0)
            for lane, work, unit, nbytes, begin, end in records:
                if _WORKS[work] == "step":
                    self._marks[unit] = begin
                else:
                    name = rt.unit_names[unit] if unit >= 0 else ""
                    self._slices.append(Slice(_LANES[lane], _WORKS[work], name, nbytes, begin, end))

    def _lanes(self, since: int = 0) -> dict[str, list[Slice]]:
        with self._lock:
            lanes = by_lane([s for s in self._slices if s.end > since])
        if "compute" in lanes:
            lanes["compute"] = _joined(lanes["compute"], sorted(self._marks.values()))
        return lanes

    def slices(self) -> list[Slice]:
        """All that is over so far, by lane and in order; the stretch between forward and backward is "loss"."""
        self._collect()
        return [s for lane in self._lanes().values() for s in lane]

    def progress(self) -> Progress:
        """How far the device is in the pass under way, for steps that take minutes. `forward` and `backward` count the
        windows that are over, of `windows` in all; as text "backward 7/31". Any thread may ask, such as a progress
        bar's."""
        self._collect()
        with self._lock:
            begun, over = max(self._marks.values(), default=0), {"forward": set[str](), "backward": set[str]()}
            for s in reversed(self._slices):
                if s.lane == "compute" and s.work in over:
                    if s.end <= begun:
                        break
                    over[s.work].add(s.unit)
        return Progress(len(over["forward"]), len(over["backward"]), self._windows)

    def steps(self, last: int = KEPT) -> list[StepReport]:
        """Reports of the last finished steps, oldest first."""
        self._collect()
        marks = [mark for mark in self._between_steps().items() if mark[1] >= self._whole_from][-(last + 1):]
        lanes = self._lanes(marks[0][1]) if marks else {}
        return [measure(lanes, begin, end, {k: v - self._counted[a][k] for k, v in self._counted[b].items()},
                        self._host_bytes) for (a, begin), (b, end) in pairwise(marks)]

    def _between_steps(self) -> dict[int, int]:
        """The marks that steps lie between, by number, and when compute came by them."""
        return {n: ns for n, ns in sorted(self._marks.items()) if self._ends[n] or not self._stepped}

    def chrome(self, path: str | Path) -> None:
        """Writes all slices as a Chrome trace, JSON, for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(chrome_trace(self.slices(), [*self._between_steps().values()])))

    def picture(self, path: str | Path | BinaryIO, steps: int = SHOWN) -> None:
        """Draws the last finished steps, lanes against time; .png, .svg or .pdf; PNG into an open file.

        Raises:
            MegatrainError: no step is finished, or matplotlib is not installed.
        """
        slices = self.slices()
        marks = [*self._between_steps().values()][-(steps + 1):]
        if len(marks) < 2:
            raise MegatrainError("no step is finished yet: leave the `with` first, or train another step")
        draw_lanes(path, slices, marks, self.steps(1)[0].why)

    def _repr_png_(self) -> bytes | None:
        """The picture, for notebooks; None where there is none to draw."""
        drawn = io.BytesIO()
        try:
            self.picture(drawn)
        except MegatrainError:
            return None
        return drawn.getvalue()


def _joined(compute: list[Slice], marks: list[int]) -> list[Slice]:
    """One window's pieces as one; and, as "loss", the time between the last forward and the first backward."""
    out: list[Slice] = []
    for s in compute:
        last = out[-1] if out else None
        if last is not None and (last.work, last.unit) == (s.work, s.unit) and s.begin - last.end < SEAM_NS:
            out[-1] = last._replace(end=s.end)
            continue
        if last is not None and last.work == "forward" and s.work in ("backward", "replay") \
                and not any(last.end < m <= s.begin for m in marks):
            out.append(Slice("compute", "loss", "", 0, last.end, s.begin))
        out.append(s)
    return out
