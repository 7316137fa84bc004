"""Doors to a streamed model: its windows, its bytes in each memory, its last step, its fp32 values; and mt.trace, which
records what every queue does while it trains."""
from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import host_limits, show_bytes
from ..base.modes import GRADS, HOMES, MODES, PRODUCTS, SHOWN
from ..figures import report
from ..figures.report import Shown, Slice, StepReport, Table, Tier, as_text
from ..graph.door import UNTRACED
from ..model.runtime import runtime_of
from ..optim.states import master
from ..plans.machine import Machine
from ..plans.tally import PLANES_OF
from ..store.bases import BASES
from ..store.disk import SPILLED, Disk
from ..store.state import enter, in_backward, leave

if TYPE_CHECKING:
    from ..graph.window import Window
    from ..model.runtime import Runtime


def last_step(model: nn.Module) -> StepReport:
    """What bound the last step, inside of `mt.trace(model)`; else bytes and waits since the call before.

    Without a trace, or before a step of it is finished, call it once a step: its seconds are those between the calls.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    finished = rt.trace.steps(1)
    now, stats = time.perf_counter(), rt.core.stats()
    before, old = rt.reported
    rt.reported = (now, stats)
    if finished:
        return finished[0]
    diff = {k: v - old.get(k, 0) for k, v in stats.items()}
    return StepReport(now - before, diff["h2d_bytes"], diff["d2h_bytes"], diff["fetches"], diff["demand_fetches"],
                      diff["await_ns"] * 1e-9, rt.core.host_bytes(),
                      {"host update": diff["update_ns"] * 1e-9, "disk update": diff["disk_update_ns"] * 1e-9},
                      **{k: diff[k] for k in (*report.COUNTED, "disk_read_bytes", "disk_written_bytes")})


def explain(model: nn.Module) -> str:
    """A table of windows: their units, bytes, what is done about activations, and whose code runs them.

    "template": an explicit forward and backward of ours runs the layer (compute="fused"). With products="fp8" the row
    names products that are not in fp8. "its own": the module's own code runs, with the reason if a template was wanted.
    The head is "fused with the loss", or its own code runs. Lines below the table say how AdamW's states are kept, if
    not in fp32, and for which batch mt.stream has planned. With several processes they say which one this is, and how
    weights come to it.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    rows = [("window", "units", "bytes", "activations", "trained", "code")]
    for w in rt.windows:
        nbytes = sum(r.nbytes for r in w.records)
        trained = sum(r.numel for r in w.records if r.was_trainable)
        rows.append((w.name, ", ".join(rt.unit_names[u] for u in w.units), show_bytes(nbytes), w.keeps, f"{trained:,}",
                     w.code))
    lines = [as_text(("", rows), right=())]
    lines += [f"AdamW's states: {rt.states}"] * (rt.states != "fp32")
    lines += [str(rt.ranks), str(rt.delivery)] if rt.ranks is not None else []
    return "\n".join(lines + [str(rt.planning)] * (rt.planning is not None))


@dataclass(frozen=True)
class Storage(Shown):
    """Bytes that the engine holds for a model. In a notebook it shows itself.

    Attributes:
        model: its class.
        homes: how many units are at home where.
        tiers: (title, bytes by what they hold, bytes there are) of each kind of memory.
    """

    model: str
    homes: dict[str, int]
    tiers: list[Tier]

    def _head(self) -> str:
        return f"{self.model}: units at home " + ", ".join(f"in {home} {n}" for home, n in self.homes.items())

    def _tables(self) -> list[Table]:
        return [report.bytes_table(*tier) for tier in self.tiers]


def storage(model: nn.Module) -> Storage:
    """What the engine holds for a streamed model: weights, masters, moments and gradients, tier by tier.

    Planes are made when they are first needed: before a step of mt.AdamW there are weights alone.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    host = {what: sum(rt.core.host_bytes(_core.PLANES[p]) for p in planes) for what, planes in PLANES_OF.items()}
    host["activations"] = rt.core.swap_bytes()[0]
    device = {"slots": sum(s.nbytes for s in rt.ring.slots), "at home": rt.core.device_bytes()}
    there = torch.cuda.mem_get_info(rt.device)[1] if rt.is_cuda else host_limits().in_all
    tiers = [("device memory" if rt.is_cuda else "host memory, as the device's", device, there),
             ("host memory", host, host_limits().in_all)]
    files = {what: file for what, file in (("states", rt.core.disk_file()), (SPILLED, rt.core.swap_file())) if file}
    if files:
        parts = {what: file[1] for what, file in files.items()}
        path = str(Path(next(iter(files.values()))[0]).parent)
        tiers.append(("disk", parts, sum(parts.values()) + Disk(path).room()))
    held = [(title, {what: n for what, n in parts.items() if n}, most) for title, parts, most in tiers]
    return Storage(type(rt.root()).__name__, dict(Counter(rt.room.asked.homes)), held)


def masters(model: nn.Module) -> dict[str, Tensor]:
    """fp32 values of all parameters by name: masters where training made them, else the weights widened.

    Each is a copy: [shape] fp32 on the CPU. Waits for the pending updates.

    Raises:
        MegatrainError: the model is not streamed.
    """
    runtime_of(model)
    return {name: master(p) for name, p in model.named_parameters()}


@contextlib.contextmanager
def gather(module: nn.Module) -> Iterator[nn.Module]:
    """Inside, reading a parameter of a streamed module gives a copy on the compute device.

    For weights used outside of any forward: `with mt.gather(model.lm_head): F.linear(h, model.lm_head.weight)`.
    Gradients flow back to the parameter.

    Args:
        module: a streamed model, or any module inside one.

    Raises:
        MegatrainError: the module is not streamed.
    """
    rt = runtime_of(module)
    takes = rt.door.enter(in_backward())
    enter()
    try:
        yield module
    finally:
        leave()
        rt.forget_reads()
        if takes:
            rt.door.leave()


def measure_machine(device: str | None = None, *, gpus: int = 1, disk: str | None = None, out: str | Path | None = None,
                    say: Callable[[str], None] = lambda _: None) -> tuple[Machine, str, Path]:
    """Measures what this machine can do, and keeps it for plans, as `megatrain doctor` does.

    Args:
        device: "cuda" or "cpu"; None: the GPU, where there is one. gpus: between so many links are measured; on the
            CPU device, between as many processes.
        disk: a directory on the drive that states may go to; None: the drive is described, not measured.
        out: the file to write; None: where plans look for it.
        say: is told what is measured next.

    Returns:
        The machine, a table of what was found, and the file's path.
    """
    # Not at the top: processes that measure links run `python -m` of that module, which nobody may have imported then.
    from ..plans import doctor

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = doctor.measure(torch.device(device), say, disk)
    if gpus > 1:
        say(f"links between {gpus} {'GPUs' if device == 'cuda' else 'processes'}")
        machine = doctor.linked(machine, doctor.measure_links(device, gpus))
    return machine, doctor.report(machine), doctor.store(machine, None if out is None else Path(out))


def choices(argument: str) -> tuple[str, ...]:
    """The words that an argument of mt.plan or mt.stream takes, for programs that offer them to people.

    Args:
        argument: "states", "products", "base", "grads", "homes" or "activations".
    """
    return {"states": SHOWN, "products": PRODUCTS, "base": BASES, "grads": GRADS, "homes": HOMES,
            "activations": MODES}[argument]


# ---- traces ---------------------------------------------------------------------------------------

KEPT = 100_000          # slices; some hundred steps of a large model
TAKEN_EVERY = 4         # steps: the engine keeps some 16,000 records
PICTURED = 3            # steps in a picture
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
        if self._rt is not None and self._open is not window:
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
        if self._rt is None:
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
        rt.trace = UNTRACED
        rt.core.trace(False)

    # ---- what there is ----

    def _collect(self) -> None:
        """Takes the records that are over by now."""
        with self._lock:
            rt = self._rt
            if rt is None:
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
            lanes = report.by_lane([s for s in self._slices if s.end > since])
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
            begun, last = max(self._marks.values(), default=0), reversed(self._slices)
            since = takewhile(lambda s: s.end > begun, (s for s in last if s.lane == "compute"))
            over = Counter(work for work, _ in {(s.work, s.unit) for s in since})
        return Progress(over["forward"], over["backward"], self._windows)

    def steps(self, last: int = KEPT) -> list[StepReport]:
        """Reports of the last finished steps, oldest first."""
        self._collect()
        marks = [mark for mark in self._between_steps().items() if mark[1] >= self._whole_from][-(last + 1):]
        lanes = self._lanes(marks[0][1]) if marks else {}
        return [report.measure(lanes, begin, end, {k: v - self._counted[a][k] for k, v in self._counted[b].items()},
                               self._host_bytes) for (a, begin), (b, end) in pairwise(marks)]

    def _between_steps(self) -> dict[int, int]:
        """The marks that steps lie between, by number, and when compute came by them."""
        return {n: ns for n, ns in sorted(self._marks.items()) if self._ends[n] or not self._stepped}

    def chrome(self, path: str | Path) -> None:
        """Writes all slices as a Chrome trace, JSON, for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(report.chrome_trace(self.slices(), [*self._between_steps().values()])))

    def picture(self, path: str | Path | BinaryIO, steps: int = PICTURED) -> None:
        """Draws the last finished steps, lanes against time; .png, .svg or .pdf; PNG into an open file.

        Raises:
            MegatrainError: no step is finished, or matplotlib is not installed.
        """
        slices = self.slices()
        marks = [*self._between_steps().values()][-(steps + 1):]
        if len(marks) < 2:
            raise MegatrainError("no step is finished yet: leave the `with` first, or train another step")
        report.draw_lanes(path, slices, marks, self.steps(1)[0].why)

    def _repr_png_(self) -> bytes | None:
        """The picture, for notebooks; None where there is none to draw."""
        drawn = io.BytesIO()
        with contextlib.suppress(MegatrainError):
            self.picture(drawn)
        return drawn.getvalue() or None


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
