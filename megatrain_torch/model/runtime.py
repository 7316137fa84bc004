"""One streamed model: the C engine, the objects that tie it to torch, the forwards that begin in it, and what its
windows do about activations."""
from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import _core
from ..base import patches
from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from ..base.modes import Mode, read
from ..graph import hf_calls
from ..graph.door import UNTRACED, Door
from ..graph.exchange import Exchange
from ..graph.frames import Expansions, check_version
from ..graph.handover import HandOver
from ..graph.swap import Swap
from ..graph.window import Window, refuse_functorch
from ..group.ranks import Ranks
from ..plans.planner import Plan, own_code
from ..plans.room import Room
from ..plans.shapes import attends
from ..store.guard import take_back
from ..store.records import Record
from ..store.state import LazyParameter, enter, in_backward, leave
from ..store.whole import Whole
from .homes import Cap, Homes
from .ring import Delivery, Ring

if TYPE_CHECKING:
    from .planning import Planning

AHEAD = 1 << 28         # elements: states of fewer are made by the first step
MORE = "\n\nmegatrain_torch: "

# Weak on both sides: a runtime knows its modules, so a strong value would keep its own key alive. What
# holds the runtime is what is installed in the modules.
runtimes: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()


def runtime_of(module: nn.Module) -> Runtime:
    """The runtime of a streamed model or of any module inside one. Raises: the module is not streamed."""
    if (rt := find_runtime(module)) is None:
        raise MegatrainError(f"{type(module).__name__} is not streamed: call mt.stream(model) first")
    return rt


def find_runtime(module: nn.Module) -> Runtime | None:
    """The runtime; None: the module is not streamed."""
    ref = runtimes.get(module)
    return ref() if ref is not None else None


def _make_planes(core: _core.Engine, planes: deque[tuple[int, int, int]]) -> None:
    """On a thread, which ends with the main one. Who needs a plane that is being made waits (store.c, `map`)."""
    with contextlib.suppress(IndexError, MegatrainError, MemoryError):
        while threading.main_thread().is_alive():
            core.plane(*planes.popleft())


class Runtime:
    def __init__(self, root: nn.Module, device: torch.device, core: _core.Engine, room: Room, compute: str,
                 ranks: Ranks | None = None, reduce: str = "mean", products: str = "bf16") -> None:
        self.root, self.device, self.core, self.room, self.compute = weakref.ref(root), device, core, room, compute
        self.products, self.is_cuda = products, device.type == "cuda"
        self.ranks = ranks                                   # that stream it together; None: this process is alone
        self.apart = ranks is not None and ranks.apart       # on several machines, each of which has a part
        self.records: list[Record] = []                      # of all parameters
        self.units: list[list[Record]] = []
        self.unit_names: list[str] = []
        self.wholes: list[list[Whole]] = []                  # by unit: weights of codes
        self.all_windows: list[weakref.ref[Window]] = []     # modules have them, and they have this
        self.served: set[Record] = set()                     # by an mt.AdamW, and no pass has begun since
        self._ahead: deque[tuple[int, int, int]] = deque()   # planes that `_maker` is still to make
        self._maker: threading.Thread | None = None
        self.states, self.states_chosen = "fp32", False      # format of AdamW's, and whether somebody chose it
        self.saving: Any = None                              # a checkpoint that is written while the model trains on
        self.saved_files: dict[bytes, Any] = {}              # of the last checkpoint, which the next may have again
        self.planning: Planning | None = None                # of a loop that nobody has planned
        self.trace: Any = UNTRACED                           # mt.trace's, while it is on
        self.broken = ""                                     # why it is not to be run: a load or a move failed half-way
        self.given = 0                                       # places of parameters with something else: functional_call
        # What trials of templates gave, by reading, and why code could not be followed, by window and call.
        self.looked: dict[Any, str] = {}
        self.checkpointing: list[weakref.ref[nn.Module]] = []        # modules whose own checkpointing windows do
        self.reported: tuple[float, dict[str, int]] = (time.perf_counter(), {})      # the last report without a trace
        # Called once, when this is given up or the process ends: the others may still await something of it.
        self.leave: weakref.finalize[Any, Runtime] | None = None
        self.check_tree: Callable[[Runtime], None] = lambda rt: None         # install.py's
        self.tree_changed = False                            # something was put into the model since the last pass
        self.put_later: list[Any] = []
        self._read: dict[Record, Tensor] = {}                # weights read outside of windows, in this forward
        self._begun_by: weakref.ref[Any] | None = None       # the module that began the pass under way
        self.backward_seen = self._told_unlocked = False
        self._windows_know = False                           # of which parameters there are gradients
        # What only this has knows it by a proxy: no circle keeps a dropped model's memory.
        own = weakref.proxy(self)
        self.door = Door(type(root).__name__, self.is_cuda)
        self.cap = Cap(device, core.device_bytes)
        if ranks is not None:
            ranks.control.engine = core
        self.handover = HandOver(own)
        self.exchange = None if ranks is None else Exchange(own, self.handover, ranks, reduce == "mean")
        self.swap, self.expansions, self.delivery = Swap(own), Expansions(), Delivery(own)
        self.ring, self.homes, self.keeps = Ring(own), Homes(own), Keeps(own)

    def __del__(self) -> None:
        """The last who had it let go: the device's limit is lifted, and the engine ends before slots are freed."""
        try:
            if self.leave is not None:
                self.leave()
            self.close()
        except Exception:        # it was never whole; or the interpreter ends, and modules are gone already
            pass

    def close(self) -> None:
        """Gives everything back."""
        try:
            self.make_no_more()
            self.cap.close()
            if self.exchange is not None:
                self.exchange.close()
            self.core.close()
        finally:                 # last: when the interpreter ends nothing may be left of that module
            patches.release(self)

    def itself(self) -> Runtime:
        """For those who know it by a proxy."""
        return self

    @property
    def windows(self) -> list[Window]:
        """Those whose modules are still there."""
        return [w for ref in self.all_windows if (w := ref()) is not None]

    def stream(self) -> int:
        """Handle of the stream torch computes on now."""
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.is_cuda else 0

    def drain(self) -> None:
        """Everything under way is over: gradients landed, updates done. Of moments the next step makes the rest."""
        self.make_no_more()
        self.core.drain()
        self.handover.alive.clear()          # compute has waited for every copy
        self.homes.arrivals.leave()

    def _make_states(self, served: set[Record]) -> None:
        """AdamW's moments are made on a thread, as far as that goes, where the first step would wait long for their
        pages. A moment that is not there by then is made by that step, which tells what is wrong."""
        trained = [r for r in self.records if r in served and r.trainable and r.numel]
        if sum(r.numel for r in trained) < AHEAD or (self.planning and self.planning.choices.disk is not None):
            return                           # they are small, or may go to a file yet
        self.make_no_more()                  # another optimizer was there before
        with contextlib.suppress(MegatrainError):
            self.room.states(self.core, together=False)
            self.states_chosen = True
            self._ahead.extend((r.unit, r.index, _core.PLANES[plane]) for r in trained for plane in r.moments)
            self._maker = threading.Thread(target=_make_planes, args=(self.core, self._ahead), name="mt-states")
            self._maker.start()

    def make_no_more(self) -> None:
        """Waits for the plane that `_make_states` is at."""
        self._ahead.clear()
        if self._maker not in (None, threading.current_thread()):        # which may collect what has no owner
            self._maker.join()

    def choose_states(self, asked: str) -> None:
        """From before there are any. Raises: they are kept in another way already."""
        if self.states_chosen and asked != self.states:
            raise MegatrainError(f"AdamW: states={asked!r}, and this model keeps {self.states!r} ones, as its plan or "
                                 f"another optimizer said: ask for these, or mt.unstream and mt.stream it with "
                                 f"plan={{'states': {asked!r}}}")
        for unit in range(len(self.units)):
            self.core.set_states(unit, _core.STATES[asked])
        self.states, self.states_chosen = asked, True
        self.room.asked = dataclasses.replace(self.room.asked, states=asked)

    def finish_save(self) -> None:
        """Waits for a save under way, and tells what went wrong unless its wait() did. Interrupted, it still is."""
        if self.saving is not None:
            try:
                if not self.saving._told:
                    self.saving.wait()
            finally:
                if self.saving._told:
                    self.saving = None

    # ---- forwards, from the outermost streamed module on ----

    def forward(self, who: Any, args: Any, kwargs: Any, run: Callable[[Any, Any], Any]) -> Any:
        """A container's or a window's forward, which `run` goes on with; the outermost streamed one begins a pass."""
        task = in_backward()
        takes = self.door.enter(task)
        outermost = enter()
        begins = outermost and task == -1
        try:
            if not outermost:
                return run(args, kwargs)
            with self.keeps.memory(), hf_calls.spared(self.windows if begins else ()):
                return run(*self.begin_pass(who, args, kwargs)) if begins else run(args, kwargs)
        finally:
            leave()
            if begins:
                self.forget_reads()
                self.keeps.forward_ends()
            if takes:
                self.door.leave()

    def begin_pass(self, who: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A root forward starts: what went wrong, or was changed, is looked at; inputs come to the compute device."""
        self.core.check()
        if self.broken:
            raise MegatrainError(self.broken)
        if self.saving is not None and self.saving.over:
            self.finish_save()               # raises where it failed
        self.warn_unlocked()
        # gradient_checkpointing_enable() means "recompute". Windows do that; the model's own checkpointing would run a
        # layer a third time. A plan's word on activations counts; windows of which none says anything replay.
        for ref in self.checkpointing:
            if (m := ref()) is not None and m.gradient_checkpointing:
                m.gradient_checkpointing = False
                if self.planning is None and self.keeps.default == "auto":
                    self.keeps.default = "replay"
        self.check_tree(self)
        self.notice_changes()
        if torch.is_grad_enabled():
            self.keeps.look()
        # A part of a model called inside a pass that another module began joins that pass.
        if self.backward_seen or self._begun_by is None or self._begun_by() in (who, None):
            self._begun_by, self.backward_seen = weakref.ref(who), False
            self._start_pass(args, kwargs)
        if not self.is_cuda:
            return args, kwargs
        return hf_calls.mapped((args, kwargs), lambda t: t if t.device == self.device or t.is_meta else
                               t.to(self.device, non_blocking=True))

    def _start_pass(self, args: Any, kwargs: Any) -> None:
        """What the pass before has left is let go."""
        self.handover.sweep()
        self.door.tasks.clear()
        self.handover.let_go()
        self.handover.opened = 0
        self.swap.sweep()
        for r in self.records:
            r.uses = 0
        self.forget_reads()
        if torch.is_grad_enabled():
            if self.planning is not None:
                self.planning.pass_begins(args, kwargs)
            if self.served and (self.planning is None or not self.planning.pending):
                served, self.served = self.served, set()
                self._make_states(served)
        self.trace.pass_begins()
        self.delivery.look()
        self.core.begin(self.delivery.shards and torch.is_grad_enabled())

    def notice_changes(self) -> None:
        """What the user changed on parameters: values, and requires_grad."""
        take_back([p for r in self.records if (p := r.param) is not None])       # of a step that broke off
        for r in self.records:
            r.notice_write()
        # A pass that records nothing need not know what is trained: adapters are switched for it, and back before the
        # backward of another.
        if not self._windows_know or torch.is_grad_enabled():
            self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """There are gradients of the parameters that say so now."""
        with torch._C.DisableTorchFunctionSubclass():
            trains = [(p := r._param()) is not None and p.requires_grad for r in self.records]
        for r, on in zip(self.records, trains):
            if on != r.was_trainable:
                r.was_trainable = on
                self.homes.arrivals.dismiss(r.unit)
                self.core.set_trainable(r.unit, r.index, on)
                self._windows_know = False
        if not self._windows_know:
            for w in self.windows:
                w.split()
            for r in self.records if self.exchange is not None else ():
                if not self.exchange.hooks(r):
                    self.exchange.route(r)
            self._windows_know = True

    def warn_unlocked(self) -> None:
        """Says once that the driver cannot lock all host memory, as soon as that is known."""
        nbytes, why = self.core.unlocked()
        if nbytes and not self._told_unlocked:
            self._told_unlocked = True
            warnings.warn(f"{show_bytes(nbytes)} of host memory, and what comes after, could not be locked for the GPU "
                          f"({why}). Copies of it go through a small buffer: the same results, slower. To lock more: a "
                          "larger `ulimit -l` or memory limit of the container; under WSL2, more memory for Windows, "
                          "which allows about half of its own; or less to lock: fewer parameters, or units at home in "
                          "VRAM", stacklevel=4)

    # ---- weights that are read outside of their window, in a forward or a backward ----

    def read(self, record: Record) -> Tensor:
        """What a read gives, the same each time: the weights are fetched when something is done with it."""
        if (found := self._read.get(record)) is None:
            if record.trainable:
                refuse_functorch(record.name)
            whole = record.whole
            found = LazyParameter.of(record) if whole is None else whole.of([self.copy(r) for r in whole.records])
            self._read[record] = found
        return found

    def keep_writes(self) -> None:
        """What was changed in place of weights that were read, by views of them and by `.data` too, is changed of the
        parameters: before a window sees those, and when a forward or a backward is over."""
        for t in self._read.values():
            if isinstance(t, LazyParameter) and t._version != t.kept:
                t.keep_write()

    def forget_reads(self) -> None:
        """A forward or a backward is over. What was read in it has a history, which holds the parameters, which hold
        the model: a cycle that no collector sees."""
        if self._read:
            self.keep_writes()
            self._read.clear()

    def fetch(self, record: Record, version: int) -> Tensor:
        """`copy`, of a weight that a forward read when its unit was of this version. Raises RuntimeError: a backward
        asks for it first, and the unit was updated since."""
        if in_backward() != -1:
            check_version(self, record.unit, version)
        return self.copy(record)

    def copy(self, record: Record) -> Tensor:
        """The parameter's current weights in fresh memory on the compute device."""
        if not self.ring.cuts(record.unit):      # the unit comes like a window's: the host need not wait for it
            return self.ring.view(record.unit, record.offset, record.dtype, record.shape, record.stride).clone()
        self.core.wait_updates(record.unit)
        with torch.no_grad():
            return record.host.to(self.device, copy=True)


Door.forward = Runtime.forward.__code__


class Keeps:
    def __init__(self, model: Runtime) -> None:
        self._model = model
        self.default = "auto"                # what windows do whose own mode is "auto"; "auto": no plan says it
        self.plan: Plan | None = None        # the one in force; None: modes are by hand
        self.most_tokens = 0                 # that a fused window was given at once
        self._told: set[str] = set()
        self._first = True
        self._again: list[Window] = []       # of this forward, those that run again in place of a plan's mode

    def _counts(self, window: str) -> bool:
        """Does the plan in force count this layer's own code?"""
        return self.plan is not None and window in self.plan.own

    def mode_of(self, window: Window) -> str:
        mode = window.mode if window.mode != "auto" else self.default
        return mode if mode != "auto" else "replay" if self._model.is_cuda else "saved"

    def of_own_code(self, window: Window) -> Mode:
        """What a window's own code keeps. That of a layer keeps several times what its template does: where the mode
        was chosen for a template, it runs again in backward."""
        mode, fused = read(self.mode_of(window)), window.fused
        chosen = window.mode != "auto" or self.default != "auto"
        if mode.keep != "saved" or not chosen or fused is None or not fused.template.swaps or fused.idle \
                or self._counts(window.name):
            return mode
        self._again.append(window)
        return mode._replace(keep="replay")

    def fused(self) -> dict[str, str]:
        """What windows with templates keep."""
        return {w.name: self.mode_of(w) for w in self._model.windows if w.fused is not None}

    def look(self) -> None:
        """Before a pass that records gradients."""
        for w in self._model.windows:
            if w.fused is not None:
                w.fused.look()

    def planned_otherwise(self) -> bool:
        """Do layers run their own code that the plan in force has templates for, or the other way round? Or has it
        shown that their own code cannot run again, as the plan has it?"""
        layers = [w for w in self._model.windows if w.fused is not None and w.fused.template.swaps]
        planned = {} if self.plan is None else self.plan.activations
        return any(bool(w.fused.own) is not self._counts(w.name) for w in layers) or any(
            w.writes and (w.fused is None or w.fused.own) and read(planned[w.name]).keep != "saved"
            for w in self._model.windows if w.name in planned)

    def own(self) -> dict[str, str]:
        """Layers that their own code runs where templates are wanted, and why."""
        found = ((w, w.unfit if w.fused is None else w.fused.own) for w in self._model.windows)
        return {w.name: why for w, why in found if why and attends(w.module)}

    def forward_ends(self) -> None:
        """The user is told of layers that run their own code, once, and where they do not keep what a plan says. Of
        those that a plan of ours did not count, the next tells."""
        planning, again, self._again = self._model.planning, self._again, []
        if not (again or (self._first and torch.is_grad_enabled())):
            return
        own, self._first = self.own(), False
        self.tell({name: why for name, why in own.items() if self._counts(name)}, "the plan counts what they keep")
        if planning is None or planning.plan is None:
            own |= {w.name: w.fused.declined or w.fused.verdict for w in again}
            instead = "; instead of keeping all of it they run again in backward" if again else ""
            self.tell(own, "no plan counts what they keep" + instead)

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Around what may find no memory on the device: then the error says what was planned, and who is not in it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if MORE in str(error):
                raise
            self.look()
            rt, plan, own = self._model, self.plan, self.own()
            told = "" if not own else \
                f"layers that no template runs, but their own code, which keeps more: {own_code(own)}\n"
            if plan is not None:
                parts = ", ".join(f"{what} {show_bytes(n)}" for what, n in plan.vram.items() if n)
                told += f"the plan in force counts {show_bytes(plan.vram_bytes)} of the device: {parts}\n"
            told += f"used are {show_bytes(rt.core.device_bytes())} by units at home there"
            if rt.is_cuda:
                told += f", and {show_bytes(torch.cuda.max_memory_allocated(rt.device))} by torch at the most"
            raise torch.OutOfMemoryError(f"{error}{MORE}{told}") from error

    def tell(self, own: dict[str, str], then: str) -> None:
        """Warns once of each layer."""
        if new := {name: why for name, why in own.items() if name not in self._told}:
            self._told |= new.keys()
            warnings.warn(f"layers that no template runs, but their own code: {own_code(new)}; {then}", stacklevel=2)
