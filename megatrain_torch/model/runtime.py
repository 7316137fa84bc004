"""One streamed model: the C engine, the slots' memory, and what ties both to torch."""
from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from ..base.modes import Mode, read
from ..fused.compiled import Structure, refuse_other_units
from ..fused.layer import Proofs
from ..graph import masks
from ..graph.door import Door
from ..graph.handover import HandOver
from ..graph.swap import Swap
from ..graph.window import Window
from ..plans.planner import Plan
from ..store.arrive import Arrivals
from ..store.disk import BLOCKS, BUFFER_BYTES, BUFFERS, THREADS, Disk
from ..store.lazy import Lazy
from ..store.planes import Planes, mask
from ..store.records import Record
from ..store.state import enter, in_backward, leave
from . import hf
from .cap import Cap
from .ring import Ring, Slot, SlotHooks


class PlansItself(Protocol):
    """Plans for the batches that a loop shows: planning.Planning."""

    plan: Plan | None
    pending: bool

    def pass_begins(self, args: Any, kwargs: Any) -> None: ...


class Runtime:
    def __init__(self, root: nn.Module, device: torch.device, core: _core.Engine) -> None:
        self.root, self.device, self.core = weakref.ref(root), device, core
        self.is_cuda = device.type == "cuda"
        self.states, self.states_chosen = "fp32", False      # how AdamW's are kept; chosen: by somebody, not by default
        self.settled: dict[int, int] = {}                    # units that live on the device: their slots
        self.on_disk: frozenset[int] = frozenset()           # units whose states are in a file
        self.filed: set[int] = set()                         # of which weights are too, as soon as they are there
        self.arrivals = Arrivals(self, ())                   # of settled units: whose states come and leave
        self.passing: frozenset[int] = frozenset()           # units whose gradients are kept nowhere
        self._windows: list[weakref.ref[Window]] = []        # modules have them, and they have this
        self.records: list[Record] = []
        self.units: list[list[Record]] = []
        self.unit_names: list[str] = []
        self.slots: list[Slot] = []
        own = weakref.proxy(self)            # for what only this has
        self.handover = HandOver(own)
        self.ring = Ring(own)
        self.planes = Planes(core, own)
        self.door = Door(type(root).__name__, self.is_cuda)
        self.activations, self.compute = "auto", "auto"
        self.structures: dict[Any, Structure] = {}           # of windows that torch.compile runs
        self.vram: int | None = None         # limit of what may be used of the device, bytes
        self.planning: PlansItself | None = None             # of an ordinary loop, where nobody has planned it
        self.proofs = Proofs()               # that templates are what windows' modules are
        self.most_tokens = 0                 # that a fused window was given at once
        self.swap = Swap(own)                # what windows keep in host memory
        self.cap = Cap(device, None, 0)      # of torch's allocator, where there is a limit
        self.room: Any = None                # preflight.Room: whether planes that come later will fit
        self.store_bytes = 0                 # device memory that settled units' planes will take, slots left out
        self._lazy: dict[tuple[int, bool], Lazy] = {}
        self._first_root: weakref.ref[Any] | None = None
        self._backward_seen = False
        self.check_tree: Any = None
        self._files: list[weakref.finalize] = []             # what takes their names, with the process at the latest
        self.given = 0                       # places of parameters that have something else: functional_call
        self.checkpointing: list[weakref.ref[nn.Module]] = []
        self.opened = time.perf_counter()
        self.reported: tuple[float, dict[str, int]] = (self.opened, {})    # the last report without a trace
        self.trace: Any = None               # mt.trace's, while it is on
        self.saving: Any = None              # checkpoint.Saving, until its end has been noticed
        self.broken = ""                     # why the weights are not to be used: a load that failed half-way
        self.told_unlocked = False           # the user knows that host memory could not be locked
        self._split: Any = None

    def __del__(self) -> None:
        """The last who had it let go: the device's limit is lifted, and the engine ends before slots are freed."""
        with contextlib.suppress(Exception):         # it was never whole; or torch is gone already
            self.close()

    def close(self) -> None:
        """Gives everything back: files lose their names while there is an engine that knows them."""
        self.cap.lift()
        for unname in self._files:
            unname()
        self.core.close()

    def itself(self) -> Runtime:
        """For those who know it by a proxy."""
        return self

    @property
    def windows(self) -> list[Window]:
        """Those whose modules are still there."""
        return [w for w in [ref() for ref in self._windows] if w is not None]

    @property
    def window_count(self) -> int:
        return len(self._windows)

    def add_window(self, window: Window) -> None:
        self._windows.append(weakref.ref(window))

    def choose_states(self, states: str) -> None:
        """How AdamW's states are kept, of the whole model, from before there are any.

        Raises:
            MegatrainError: they are kept in another way already.
        """
        if self.states_chosen and states != self.states:
            raise MegatrainError(f"AdamW: states={states!r}, and this model keeps {self.states!r} ones, as its plan or "
                                 f"another optimizer said: ask for these, or mt.unstream and mt.stream it with "
                                 f"plan={{'states': {states!r}}}")
        for unit in range(len(self.units)):
            self.core.set_states(unit, _core.STATES[states])
        self.states, self.states_chosen = states, True
        if self.room is not None:
            self.room.asked = dataclasses.replace(self.room.asked, states=states)

    # ---- units and slots ----

    def open_slots(self, ring: list[int], settled: list[int], have: dict[int, Slot]) -> None:
        """Slots of these sizes for what streams, and one for each of the units that live on the device: their own of
        before, where they have one."""
        if self.is_cuda:
            torch.cuda.empty_cache()         # what was freed, in whose pieces these may not fit
        own = [have.get(unit) or Slot(self.core.hi_bytes(unit), self.device) for unit in settled]
        self.slots = [Slot(n, self.device) for n in ring] + own
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()   # former owners of this memory are done
        self.note_bounds()
        self.core.open_slots([(s.address, s.nbytes) for s in self.slots], SlotHooks(self))
        self.settled = {unit: slot for slot, unit in enumerate(settled, len(ring))}
        for unit, slot in self.settled.items():
            self.core.settle(unit, slot)

    def close_slots(self) -> None:
        """Others will be opened. Who moves units holds those that have weights until these are elsewhere."""
        self.core.close_slots()
        self.slots = []
        self.note_bounds()

    def limit_device(self, limit: int | None, store_bytes: int) -> None:
        """Bytes of the device that may be used in all, and those that the store will have there for its planes."""
        self.vram, self.store_bytes = limit, store_bytes
        self.cap.lift()
        self.cap = Cap(self.device, limit, store_bytes, self.core.device_bytes())

    def invite(self, guests: Iterable[int]) -> None:
        """States of these units, which live on the device, come and leave."""
        self.arrivals = Arrivals(self, guests)
        self.arrivals.invite()

    def take(self, unit: int) -> None:
        """What of the unit is at home elsewhere goes there, and its memory on the host is given back."""
        self.core.take(unit, self.stream())

    def away(self, unit: int) -> bool:
        """The unit's weights are at home on the device or on disk: those in host memory are copies."""
        return unit in self.settled or unit in self.filed

    def keep_on_disk(self, disk: Disk, units: list[int], weights: list[int], sizes: Mapping[str, int]) -> None:
        """The units' states go to a file, which loses its name with the process at the latest. weights: of further
        units, whose weights go there too. sizes: tests' own."""
        usual = {"buffers": BUFFERS, "buffer_bytes": BUFFER_BYTES, "threads": THREADS}
        self.core.disk(disk.path, units, weights, limit=disk.limit or 0, **{**usual, **sizes})
        self.on_disk = frozenset(units) | frozenset(weights)
        self._files.append(weakref.finalize(self, self.core.disk_unname))

    def file_weights(self, unit: int) -> None:
        """Weights that were put into the unit's plane go to the file; their memory is given back."""
        self.core.push(unit, -1, mask(("HI",)))
        self.filed.add(unit)
        self.take(unit)

    def spill_to(self, disk: Disk, nbytes: int, taken: int, sizes: Mapping[str, int]) -> None:
        """What windows keep may go to a file, in which so many bytes are reserved. taken: of the limit, by states."""
        limit = 0 if disk.limit is None else max(disk.limit - taken, 1)
        self.core.swap_disk(disk.path, nbytes, limit, **{"blocks": BLOCKS, "threads": THREADS, **sizes})
        self._files.append(weakref.finalize(self, self.core.disk_unname))

    def note_bounds(self) -> None:
        """The slots are others, or their memory is."""
        self.ring.look(self.slots)

    def stream(self) -> int:
        """Handle of the stream torch computes on now."""
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.is_cuda else 0

    # ---- reading outside of windows ----

    def lazy(self, record: Record) -> Tensor:
        refuse_other_units()
        key = (record.pid, torch.is_grad_enabled())
        found = self._lazy.get(key)
        if found is None:
            found = self._lazy[key] = Lazy(record)
        return found

    def forget_lazy(self) -> None:
        """A forward or a backward is over. What was read in it has a history, which holds the parameters, which hold
        this: a cycle that no collector sees."""
        if self._lazy:
            self._lazy.clear()

    def device_copy(self, record: Record) -> Tensor:
        """The parameter's current weights in fresh memory on the compute device."""
        if self.away(record.unit):
            return self.ring.view(record.unit, record.offset, record.dtype, record.shape, record.stride).clone()
        self.core.wait_updates(record.unit)
        with torch.no_grad():
            return record.host.to(self.device, copy=True)

    # ---- saves ----

    def finish_save(self) -> None:
        """Waits for a save that is under way, and tells what went wrong with it, unless its own wait() did.
        Interrupted, it is under way still."""
        if self.saving is None:
            return
        try:
            self.saving._finish()
        finally:
            if self.saving._told:
                self.saving = None

    def _look_at_save(self) -> None:
        if self.broken:
            raise MegatrainError(self.broken)
        if self.saving is not None and self.saving.over:
            self.finish_save()

    # ---- a root forward ----

    @contextlib.contextmanager
    def entered(self, who: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Around a container's forward; the outermost streamed forward begins a pass."""
        takes = self.door.enter(in_backward())
        begins = enter() and in_backward() == -1
        try:
            with masks.spared(self.windows) if begins else contextlib.nullcontext():
                yield self.begin(who, args, kwargs) if begins else (args, kwargs)
        finally:
            leave()
            if begins:
                self.forget_lazy()
            if takes:
                self.door.leave()

    def begin(self, who: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A root forward starts; its inputs come to the compute device."""
        self._begin(who, args, kwargs)
        return self._to_device(args), self._to_device(kwargs)

    def _begin(self, who: Any, args: Any, kwargs: Any) -> None:
        self.core.check()
        self._look_at_save()
        self.warn_unlocked()
        hf.before_pass(self)
        if self.check_tree is not None:
            self.check_tree(self)
        self._refresh()
        if torch.is_grad_enabled():
            self.proofs.look()
        if self._backward_seen or self._first_root is None or self._first_root() in (who, None):
            self._first_root, self._backward_seen = weakref.ref(who), False
            self.handover.sweep()
            self.door.tasks.clear()
            self.handover.let_go()
            self.handover.opened = 0
            self.swap.sweep()
            for r in self.records:
                r.uses = 0
            self._lazy.clear()
            if self.planning is not None and torch.is_grad_enabled():
                self.planning.pass_begins(args, kwargs)
            if self.trace is not None:
                self.trace.pass_begins()
            self.core.begin()

    def warn_unlocked(self) -> None:
        """Says once that the driver cannot lock all host memory, as soon as that is known."""
        if self.told_unlocked:
            return
        nbytes, why = self.core.unlocked()
        if nbytes:
            self.told_unlocked = True
            warnings.warn(
                f"{show_bytes(nbytes)} of host memory, and what comes after, could not be locked for the GPU ({why}). "
                "Copies of it go through a small buffer: the same results, slower. To lock more: a larger `ulimit -l` "
                "or memory limit of the container; under WSL2, more memory for Windows, which allows about half of "
                "its own; or less to lock: fewer parameters, or units at home in VRAM", stacklevel=4)

    def _refresh(self) -> None:
        """Notices what the user changed on parameters since the last pass: values; and requires_grad, which a pass that
        records nothing need not know: adapters are switched for one, and back before the backward of another."""
        self.planes.notice_writes(self.records)
        if self._split is None or torch.is_grad_enabled():
            self.follow()

    def follow(self) -> None:
        """Of which parameters there are gradients is as they say now."""
        with torch._C.DisableTorchFunctionSubclass():
            trains = [(p := r.param) is not None and p.requires_grad for r in self.records]
        for r, on in zip(self.records, trains):
            if on != r.was_trainable:
                r.was_trainable = on
                self.arrivals.dismiss(r.unit)
                self.core.set_trainable(r.unit, r.index, on)
                self._split = None
        if self._split is None:
            self._split = True
            for w in self.windows:
                w.split()
            for s in self.slots:
                s.follow(self.units)

    def _to_device(self, value: Any) -> Any:
        if not self.is_cuda:
            return value
        if isinstance(value, Tensor):
            return value if value.device == self.device or value.is_meta else value.to(self.device, non_blocking=True)
        if isinstance(value, dict):
            moved = {k: self._to_device(v) for k, v in value.items()}
            same = all(moved[k] is v for k, v in value.items())
            if same or type(value) is not dict:
                for k, v in moved.items():
                    value[k] = v
                return value
            return moved
        if type(value) in (list, tuple):
            return type(value)(self._to_device(v) for v in value)
        return value

    def backward_began(self) -> None:
        self._backward_seen = True

    def during(self, window: Window, work: str) -> Any:
        """A context: what compute is given inside is this work of the window, where a trace is on."""
        return contextlib.nullcontext() if self.trace is None else self.trace.during(window, work)

    def handed_over(self) -> None:
        """A window's backward has launched all it has."""
        if self.trace is not None:
            self.trace.handed_over()

    # ---- activations ----

    def mode_of(self, window: Window) -> str:
        """What is done about a window's activations; "auto": no plan says it."""
        mode = window.mode if window.mode != "auto" else self.activations
        if mode == "auto":
            return "replay" if self.is_cuda else "saved"
        return mode

    def keep_of(self, window: Window, tokens: int) -> Mode:
        """What a fused window keeps of a call with so many tokens, and where."""
        self.most_tokens = max(self.most_tokens, tokens)
        return read(self.mode_of(window))

    def kept(self) -> dict[str, str]:
        """What fused windows keep, by name."""
        return {w.name: self.mode_of(w) for w in self.windows if w.fused is not None}

    def drain(self) -> None:
        """Everything under way is over: gradients home, updates done."""
        self.core.drain()
        self.handover.release()
        self.arrivals.leave()
