"""A window: the stretch of a module's forward in which its weights are bound.

    forward   acquire the window's units, hand slot tensors to the module through `Bind`, run its own
              forward, let go.
    backward  autograd asks for saved tensors: frames.py; when all the window's weight gradients
              exist, `Bind.backward` hands them over: handover.py.
"""
from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..base import modes
from ..base.errors import MegatrainError
from ..base.modes import Mode
from ..store.pieces import Piece, Stacked
from ..store.records import Record, Use
from ..store.state import enter, in_backward, leave, swap_window
from ..store.views import DeviceParameter, accumulators, in_sight, takes_no_hooks
from ..store.whole import Whole
from . import hf_calls, masks
from .below import Below, flat_weights
from .door import Door
from .frames import HostFrame, Located, ReplayFrame, SavedFrame, Streamed, _pop, _push
from .handover import Reads
from .installed import method_of
from .reader import Reader, Reading, Unreadable, modes_on, read, scope_of, stand_in
from .stacks import Stack
from .swap import storage_of


class Fused(Protocol):
    """A template that runs a window: fused.Fused.

    Called, it gives the output, or None: the module's own code runs.

    Attributes:
        verdict: why it is not used; "" where it is; None before it has been tried. declined: why not for the last call;
            idle: since nothing of that needs a gradient. own: why not for the next, by the last look.
        products: how they are computed, in words; "": as the module's own code has them.
    """

    template: Any
    verdict: str | None
    declined: str
    idle: bool
    own: str
    dtype: torch.dtype

    def look(self) -> None: ...

    @property
    def products(self) -> str: ...

    def __call__(self, args: Any, kwargs: Any) -> Tensor | None: ...

    def split(self) -> None: ...


class Head(Protocol):
    """What leaves a window's logits unmade, and gives what stands for them, or None: head.Head."""

    declined: str

    def __call__(self, args: Any, kwargs: Any) -> Tensor | None: ...


class Ring(Located, Protocol):
    """Gives a unit's weights on the device, and waits for them: ring.Ring.

    Attributes:
        stacks: of experts, of which some are fetched at a time, by the record that stands for one; no views of these.
    """

    stacks: dict[Record, Stacked]

    def views(self, unit: int) -> list[Tensor | None]: ...

    def parameters(self, unit: int) -> list[Tensor | None]: ...

    def own_outputs(self, out: Any) -> Any: ...


class Keeps(Protocol):
    """Knows what windows do about activations: keeps.Keeps."""

    def mode_of(self, window: Window) -> str: ...

    def of_own_code(self, window: Window) -> Mode: ...

    def forward_ends(self) -> None: ...

    def memory(self) -> AbstractContextManager[None]: ...


class Forwards(Protocol):
    """Begins a forward, in its outermost streamed module: forwards.Forwards."""

    def begin(self, who: Any, args: Any, kwargs: Any) -> tuple[Any, Any]: ...


class Model(Streamed, Protocol):
    """The streamed model that a window is a part of: runtime.Runtime."""

    is_cuda: bool
    units: list[list[Record]]
    door: Door
    planning: Any                        # plans for what a loop shows, where nobody has planned it
    ring: Ring

    @property
    def keeps(self) -> Keeps: ...

    @property
    def forwards(self) -> Forwards: ...

    @property
    def reads(self) -> Reads: ...


@in_sight
@takes_no_hooks
class Bind(torch.autograd.Function):
    """Host parameters in, slot tensors out; weight gradients in, to the store."""

    @staticmethod
    def forward(ctx: Any, window: Window, records: list[Record], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.window, ctx.records = window, records
        ctx.use = Use(records) if in_backward() == -1 else None
        ctx.set_materialize_grads(False)
        return tuple(window.views(records))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        handover = ctx.window.runtime.handover
        return None, None, *handover.take(ctx.records, ctx.use, accumulators(ctx), grads)


def _detached(views: list[Any], records: list[Record]) -> list[Any]:
    return [None if (t := views[r.index]) is None else t.detach() for r in records]


def refuse_functorch(name: str) -> None:
    if torch._C._functorch.maybe_current_level() is not None:
        raise MegatrainError(f"{name}: torch.func's transforms know nothing of streamed weights: give all weights with "
                             "torch.func.functional_call, or mt.unstream(model)")


class Window:
    """One module that is run with its weights bound.

    Attributes:
        records: parameters of the subtree, each once, in module order.
        units: units they lie in; acquired one after another when the window opens.
        mode: one of modes.py, or "auto" until the first training step decides.
        proved: a first replayed run has shown that inputs are not written in place.
        answering: records that are no codes' strands, with the attributes that user code sets on their parameters.
        wholes: weights that are codes. expanded: those that are 16-bit weights in the run under way, by their memory,
            and pieces of stacks that are.
    """

    def __init__(self, runtime: Model, name: str, module: nn.Module, records: list[Record]) -> None:
        self.runtime, self.name, self.records = runtime, name, records
        self.units = list(dict.fromkeys(r.unit for r in records))
        self._module, own = weakref.ref(module), module.forward      # which has this window
        self._own = own.__func__ if method_of(own, module) else own
        self._is_method = method_of(own, module)
        self._is_class = self._is_method and "forward" not in vars(module)
        self.alone = False                   # its records are all of one unit's, in order: set when units are known
        self.mode = "auto"
        self.proved = False
        self.fused: Fused | None = None      # what runs it, where a template does; else why not
        self.unfit = ""
        self.writes = ""                     # what its code changes beside its output, where that is known
        self.reader = Reader()
        self.head: Head | None = None        # of the window that makes logits, where they may be left unmade
        self.trainable: list[Record] = []
        self.frozen: list[Record] = []
        self.params: list[nn.Parameter] = []
        self.expanded: dict[int, Whole | Piece] = {}
        self.wholes = [r.whole for r in records if r.whole is not None]
        strands = {r for whole in self.wholes for r in whole.records}
        self.answering = [(r, vars(r.param)) for r in records if r not in strands]
        self.look()

    def look(self) -> None:
        """At the modules there are."""
        module = self._module()
        self.modules = Below(module, module.modules())
        theirs = [m for m in module.modules() if not type(m).__module__.startswith("torch.nn.")]
        self.theirs = Below(module, theirs)
        self.buffered = Below(module, [m for m in module.modules() if m._buffers or m in theirs])    # or may be, later
        self.recurrent = Below(module, [m for m in module.modules() if isinstance(m, nn.RNNBase)])
        self.hooks = [d for m in self.modules.inside for d in (m._forward_hooks, m._forward_pre_hooks,
                                                               m._backward_hooks, m._backward_pre_hooks)]

    @property
    def module(self) -> nn.Module:
        return self._module()

    @property
    def inner(self) -> Any:
        """The module's own forward; where that is its class's, of the class that it has now."""
        module = self._module()
        if self._is_class:
            return types.MethodType(type(module).forward, module)
        return types.MethodType(self._own, module) if self._is_method else self._own

    @property
    def code(self) -> str:
        """Whose code runs it, and why not another's."""
        if self.head is not None:
            return f"its own ({self.head.declined})" if self.head.declined else "fused with the loss"
        stacks = self.stacks
        pieces = f"experts are fetched {len(stacks[0].pieces[0].experts)} at a time" if stacks else ""
        if self.fused is None:
            why = "; ".join(filter(None, (self.unfit, self.writes, pieces)))
            return f"its own ({why})" if why else "its own"
        if self.fused.verdict is None and not self.fused.declined:
            return "template, once it has been tried"
        why = self.fused.verdict or self.fused.declined
        if why:
            return "its own (" + "; ".join(filter(None, (why, pieces))) + ")"
        return ", ".join(filter(None, ("template", self.fused.products, pieces)))

    @property
    def spares_masks(self) -> bool:
        """A template runs it, or is about to be tried, that goes by what a stand-in for a mask says."""
        return self.fused is not None and self.fused.template.swaps and not self.fused.verdict

    @property
    def item(self) -> int:
        """Bytes of an activation's element, of a window that a template runs."""
        return self.fused.dtype.itemsize

    @property
    def keeps(self) -> str:
        """What is done about activations; "auto" before the first pass has decided."""
        rt = self.runtime
        return self.mode if rt.planning is not None and rt.planning.pending else rt.keeps.mode_of(self)

    # ---- slot tensors ----

    def views(self, records: list[Record]) -> list[Any]:
        """Fresh tensors over the slots for these records, None for a stack's. Acquires their units."""
        return self._fresh(self.runtime.ring.parameters, records)

    def neighbours(self, records: list[Record]) -> list[Any]:
        """The same for templates, which join those that lie beside each other."""
        return self._fresh(self.runtime.ring.views, records)

    def _fresh(self, of: Callable[[int], list[Tensor | None]], records: list[Record]) -> list[Any]:
        if len(self.units) == 1:
            return _detached(of(self.units[0]), records)
        out = {}
        for unit in self.units:
            own = [r for r in records if r.unit == unit]
            out.update(zip(own, _detached(of(unit), own)))
        return [out[r] for r in records]

    @property
    def stacks(self) -> list[Stacked]:
        """Of experts, of which some are fetched at a time."""
        stacks = self.runtime.ring.stacks
        return [stacks[r] for r in self.records if r in stacks] if stacks else []

    def bind_leaves(self, trainable: list[Record] | None = None) -> dict[Record, Tensor]:
        """Slot tensors with the parameters' own requires_grad, outside of any graph. trainable: as it was."""
        with torch.no_grad():
            bound = dict(zip(self.records, self.views(self.records)))
        for r in self.trainable if trainable is None else trainable:
            bound[r].requires_grad_()
        return self._together(bound)

    def _together(self, bound: dict[Record, Tensor]) -> dict[Record, Tensor]:
        """Weights of codes are what their packages' code computes with, over the slots' tensors; others answer for
        their parameters, whose attributes they have."""
        for r, attributes in self.answering:
            if (t := bound.get(r)) is not None:
                t.__class__, t.__dict__ = DeviceParameter, attributes
        self.expanded.clear()
        for stacked in self.stacks:
            if stacked.records[0] in bound:
                for r in stacked.records:
                    bound.pop(r, None)
                bound[stacked.records[0]] = Stack(stacked, self, stacked.like)
        for whole in self.wholes:
            if whole.records[0] in bound and type(bound[whole.records[0]]) is not Stack:
                made = bound[whole.records[0]] = whole.of([bound[r] for r in whole.records])
                if whole.format.expands:
                    self.expanded[storage_of(made)] = whole
        return bound

    def bind(self, grad: bool) -> dict[Record, Tensor]:
        """Slot tensors, tied to the host parameters where autograd records."""
        if not grad or not self.trainable:
            return self.bind_leaves()
        bound = dict(zip(self.trainable, Bind.apply(self, self.trainable, *self.params)))
        if self.frozen:
            with torch.no_grad():
                bound.update(zip(self.frozen, self.views(self.frozen)))
        return self._together(bound)

    def split(self) -> None:
        """Follows requires_grad: which records take part in the graph."""
        self.trainable = [r for r in self.records if r.was_trainable]
        self.frozen = [r for r in self.records if not r.was_trainable]
        self.params = [r.param for r in self.trainable]
        self.alone = len(self.units) == 1 and self.records == self.runtime.units[self.units[0]]
        for stacked in self.stacks:
            if stacked.records[0].was_trainable:
                raise MegatrainError(f"{stacked.records[0].name}: its experts are fetched a few at a time, which takes "
                                     "frozen ones; unfreeze it before mt.stream, or stream with plan={'experts': 0}")
        trained = {id(p) for p in self.params}
        self._named = tuple((n, p.shape, p.dtype, id(p) in trained) for n, p in self.module.named_parameters())
        if self.fused is not None:
            self.fused.split()

    # ---- running ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rt, task = self.runtime, in_backward()
        takes = rt.door.enter(task)
        outermost = enter()
        try:
            if task == -1:
                if outermost:
                    args, kwargs = rt.begin_pass(self, args, kwargs)
                if rt.handover.alive:
                    rt.handover.window_opens()
                rt.keep_writes()
            with rt.keeps.memory():
                return rt.trace.forward(self, args, kwargs)
        finally:
            leave()
            if outermost and task == -1:
                rt.forget_reads()
                rt.keeps.forward_ends()
            if takes:
                rt.door.leave()

    def once(self, args: Any, kwargs: Any) -> Any:
        """One forward: by a template, with logits left unmade, or in the window's way with activations."""
        if not torch.is_grad_enabled():
            return self.run(args, kwargs, False)
        if self.runtime.given and (left := self._left()) is not None:
            return self._run_given(left, *masks.dense(args, kwargs))
        refuse_functorch(self.name)
        self.runtime.swap.entered()
        if self.head is not None:
            out = self.head(args, kwargs)
            if out is not None:
                return out
        if self.fused is not None:
            out = self.fused(args, kwargs)
            if out is not None:
                return out
        args, kwargs = masks.dense(args, kwargs)
        mode = self.runtime.keeps.of_own_code(self)
        return self._run_saved(args, kwargs, mode) if mode.keep == "saved" else self._run_again(args, kwargs, mode)

    def _left(self) -> list[Record] | None:
        """Records of the parameters that are in their places; None: all are."""
        found = [r for m in self.modules for r in getattr(m._parameters, "records", {}).values()]
        if all(type(r) is Record for r in found):
            return None
        return list(dict.fromkeys(r for r in found if type(r) is Record))

    def _run_given(self, left: list[Record], args: Any, kwargs: Any) -> Any:
        """With other tensors in the places of parameters (torch.func.functional_call): the module's own code. Running
        again would be too late for them, so activations are kept."""
        if left:
            refuse_functorch(self.name)
        bound, frame = self._bind_some(left), SavedFrame(self)
        outer = swap_window(bound)
        if left:
            _push(frame.pack, frame.unpack)
        try:
            with flat_weights(self.recurrent):
                return self.runtime.ring.own_outputs(self.inner(*args, **kwargs))
        finally:
            if left:
                _pop()
            swap_window(outer)

    def _bind_some(self, records: list[Record]) -> dict[Record, Tensor]:
        trainable = [r for r in records if r.was_trainable]
        bound = dict(zip(trainable, Bind.apply(self, trainable, *(r.param for r in trainable)))) if trainable else {}
        frozen = [r for r in records if not r.was_trainable]
        with torch.no_grad():
            bound.update(zip(frozen, self.views(frozen) if frozen else ()))
        return self._together(bound)

    def _run_saved(self, args: Any, kwargs: Any, mode: Mode) -> Any:
        if not mode.host:
            return self.run(args, kwargs, True, SavedFrame(self))
        frame = HostFrame(self, args, kwargs, mode)
        out = self.run(args, kwargs, True, frame)
        frame.bundle.leave()
        return out

    def _run_again(self, args: Any, kwargs: Any, mode: Mode) -> Any:
        """What its code writes beside its output it would write again, so then it keeps its activations."""
        reading = self._reading(args, kwargs)
        if reading is not None and reading.writes:
            self._tell_of_writes(reading.writes, mode)
            return self._run_saved(args, kwargs, modes.read(str(mode.saved)))
        frame = ReplayFrame(self, args, kwargs, reading)
        out = self.run(args, kwargs, True, frame)
        frame.forward_ended(out, mode)
        return out

    def _reading(self, args: Any, kwargs: Any) -> Reading | None:
        """What is known of the call's code; None: it cannot be followed, or nobody can know."""
        if modes_on() or self.wholes or self.stacks:
            return None
        module, inner = self.module, self.inner
        key = getattr(inner, "__func__", type(inner)), self._named, self.runtime.device.type, hf_calls.collects()

        def make() -> Reading:
            with torch.no_grad():
                views = zip(self.records, self.views(self.records))
            outer = swap_window({r: stand_in(t, r) for r, t in views})
            try:
                return read(scope, list(module.modules()))
            finally:
                swap_window(outer)

        scope = scope_of(inner, args, kwargs)
        try:
            return self.reader.of(key, scope, self.runtime.looked, make)
        except Unreadable:
            return None

    def _tell_of_writes(self, what: str, mode: Mode) -> None:
        if not self.writes:
            warnings.warn(f"{self.name}: {what}, so it is not run again in backward but keeps its activations: a plan "
                          f"says {str(mode)!r}. A module that leaves itself as it was can be run again", stacklevel=2)
        else:
            self.mode = str(mode.saved)      # not at its first call alone
        self.writes = what

    def run(self, args: Any, kwargs: Any, grad: bool, frame: Any = None, inner: Any = None) -> Any:
        """The module's own forward, or `inner`, with its weights bound; `frame` packs what autograd saves."""
        inner = inner or self.inner
        cached_casts = torch.is_autocast_cache_enabled()
        bound = self.bind(grad)
        versions = [t._version for t in bound.values()]
        if frame is not None:
            _push(frame.pack, frame.unpack)
        outer = swap_window(bound)
        try:
            torch.set_autocast_cache_enabled(False)      # it would keep casts of weights that move on
            if self.recurrent:
                with flat_weights(self.recurrent):
                    out = inner(*args, **kwargs)
            else:
                out = inner(*args, **kwargs)
        finally:
            swap_window(outer)
            self.expanded.clear()
            if frame is not None:
                _pop()
            torch.set_autocast_cache_enabled(cached_casts)
        self._keep_writes(bound, versions)
        return self.runtime.ring.own_outputs(out)

    def _keep_writes(self, bound: dict[Record, Tensor], versions: list[int]) -> None:
        """What the forward changed in place of its weights."""
        for (r, t), version in zip(bound.items(), versions):
            if t._version != version:
                r.runtime.planes.keep_write(r, t)
                self.runtime.forget_reads()          # they are read anew

    def keep(self, mode: str) -> None:
        """What is done about its activations from now on. cuDNN's recurrent dropout has a random state of its own, so a
        window with it keeps them: running again would give other masks."""
        unseen = self.runtime.is_cuda and any(m.dropout > 0 for m in self.recurrent)
        self.mode = "saved" if unseen else mode


Door.forwards = frozenset({Window.__call__.__code__})
