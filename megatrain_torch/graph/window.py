"""A window: the stretch of a module's forward in which its weights are bound. `Window.once` runs it. A template's
forward and backward are in fused/layer.py; of the module's own code

    forward   fetches the window's units, gives slot tensors to the module through `Bind`, and runs the module's forward
    backward  asks for saved tensors (frames.py); when all weight gradients exist, `Bind.backward` gives them to
              `HandOver.take` (handover.py)

Of a mixture's experts in one tensor some may be on the device at a time. Then a Stack stands where the module reads
such a weight. The module's own code asks it for one expert after the other (transformers' loops), or for products of
rows that are sorted by expert (grouped_mm): what it gets are tensors over slots, or 16-bit weights made of those,
fetched when it asks. So the arithmetic, and the order in which a token's rows are added, are the module's own. Experts
that no row is for are not fetched. Whatever else is done with a Stack is done with all of its experts together.
"""
from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from ..base.errors import MegatrainError
from ..store.records import Record
from ..store.state import Bind, DeviceParameter, in_backward, swap_window
from ..store.whole import Piece, Stacked, Whole
from . import frames, hf_calls
from .door import UNTRACED, method_of
from .frames import ReplayFrame, SavedFrame, flat_weights
from .reader import Reader, Reading, Unreadable, modes_on, read, scope_of, stand_in
from .swap import storage_of

if TYPE_CHECKING:
    from ..fused.head import Head
    from ..fused.layer import Fused
    from ..model.runtime import Runtime


def refuse_functorch(name: str) -> None:
    if torch._C._functorch.maybe_current_level() is not None:
        raise MegatrainError(f"{name}: torch.func's transforms know nothing of streamed weights: give all weights with "
                             "torch.func.functional_call, or mt.unstream(model)")


class Window:
    """One module that is run with its weights bound. records: parameters of the subtree, each once, in module order."""

    def __init__(self, runtime: Runtime, name: str, module: nn.Module, records: list[Record]) -> None:
        self.runtime, self.name, self.records = runtime, name, records
        self.units = list(dict.fromkeys(r.unit for r in records))    # acquired one after another when it opens
        self._module, own = weakref.ref(module), module.forward      # which has this window
        self._is_method = method_of(own, module)
        self._own = own.__func__ if self._is_method else own
        self._is_class = self._is_method and "forward" not in vars(module)
        self.alone = False                   # its records are all of one unit's, in order: set when units are known
        self.mode = "auto"                   # one of modes.py, or "auto" until the first training step decides
        self.proved = False                  # a first replayed run has shown that inputs are not written in place
        self.fused: Fused | None = None      # what runs it, where a template does; else why not
        self.unfit = ""
        self.writes = ""                     # what its code changes beside its output, where that is known
        self.reader = Reader()
        self.head: Head | None = None        # of the window that makes logits, where they may be left unmade
        self.trainable: list[Record] = []
        self.frozen: list[Record] = []
        self.params: list[nn.Parameter] = []
        self.wholes = [r.whole for r in records if r.whole is not None]          # weights that are codes
        # Those, and pieces of stacks, that are 16-bit weights in the run under way, by their memory.
        self.expanded: dict[int, Whole | Piece] = {}
        # Records that are no codes' strands, with the attributes that user code sets on their parameters.
        strands = {r for whole in self.wholes for r in whole.records}
        self.answering = [(r, vars(r.param)) for r in records if r not in strands]
        self.look()

    def look(self) -> None:
        """At the modules there are. The window's own has the window, and so is not kept."""
        self._inside = tuple(self._module().modules())[1:]
        self.hooks = hf_calls.hooks_of(self._inside)

    @property
    def module(self) -> nn.Module:
        return self._module()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._module(), *self._inside

    @property
    def recurrent(self) -> list[nn.Module]:
        return [m for m in self.modules if isinstance(m, nn.RNNBase)]

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
        fused = self.fused
        if fused is not None and fused.verdict is None and not fused.declined:
            return "template, once it has been tried"
        why = (self.unfit, self.writes) if fused is None else (fused.verdict or fused.declined,)
        if fused is not None and not any(why):
            return ", ".join(filter(None, ("template", fused.products, pieces)))
        said = "; ".join(filter(None, (*why, pieces)))
        return f"its own ({said})" if said else "its own"

    @property
    def keeps(self) -> str:
        """What is done about activations; "auto" before the first pass has decided."""
        rt = self.runtime
        return self.mode if rt.planning is not None and rt.planning.pending else rt.keeps.mode_of(self)

    def views(self, records: list[Record]) -> list[Any]:
        """Fresh tensors over the slots for these records, None for a stack's. Acquires their units."""
        out: dict[Record, Any] = {}
        for unit in self.units:              # detached before the next is acquired, which else might get this slot
            views = self.runtime.ring.parameters(unit)
            out.update((r, None if (t := views[r.index]) is None else t.detach()) for r in records if r.unit == unit)
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

    def bind(self, trainable: list[Record], frozen: list[Record]) -> dict[Record, Tensor]:
        """Slot tensors, of which those of `trainable` are tied to the host parameters."""
        params = self.params if trainable is self.trainable else [r.param for r in trainable]
        bound = dict(zip(trainable, Bind.apply(trainable, self.views, *params))) if trainable else {}
        if frozen:
            with torch.no_grad():
                bound.update(zip(frozen, self.views(frozen)))
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runtime.forward(self, args, kwargs, self._opened)

    def _opened(self, args: Any, kwargs: Any) -> Any:
        rt, home = self.runtime, self.runtime.handover
        if in_backward() == -1:
            if home.alive:
                home.opened += 1
                # Half-way through a forward compute waits for the last gradients of the backward before: they have
                # landed by then, and need not stay on the device beside this pass's activations.
                if home.opened == max(1, len(rt.all_windows) // 2):
                    rt.core.land(rt.stream())
                    home.let_go()
            rt.keep_writes()
        return self.once(args, kwargs) if rt.trace is UNTRACED else rt.trace.forward(self, args, kwargs)

    def versions(self) -> list[int]:
        """Of its weights, by unit: others after an update."""
        return list(map(self.runtime.core.version, self.units))

    def once(self, args: Any, kwargs: Any) -> Any:
        """One forward: by a template, with logits left unmade, or in the window's way with activations."""
        rt = self.runtime
        if not torch.is_grad_enabled():
            return self.run(args, kwargs, self.bind_leaves())
        if rt.given and (left := self._left()) is not None:
            # Running again would be too late for what is in the places of parameters: activations are kept.
            if left:
                refuse_functorch(self.name)
            bound = self.bind([r for r in left if r.was_trainable], [r for r in left if not r.was_trainable])
            return self.run(*hf_calls.dense((args, kwargs)), bound, SavedFrame(self) if left else None, given=True)
        refuse_functorch(self.name)
        rt.swap.entered()
        if self.head is not None and (out := self.head(self, args, kwargs)) is not None:
            return out
        if self.fused is not None and (out := self.fused(args, kwargs)) is not None:
            return out
        args, kwargs = hf_calls.dense((args, kwargs))
        mode, reading = rt.keeps.of_own_code(self), None
        if mode.keep != "saved":
            reading = self._reading(args, kwargs)
            if reading is not None and reading.writes:       # what it writes beside its output it would write again
                if self.writes:                              # from its second call on, this is the window's
                    self.mode = str(mode.saved)
                else:
                    warnings.warn(f"{self.name}: {reading.writes}, so it is not run again in backward but keeps its "
                                  f"activations: a plan says {str(mode)!r}. A module that leaves itself as it was can "
                                  "be run again", stacklevel=2)
                self.writes, mode = reading.writes, mode.saved
        frame = SavedFrame(self, args, kwargs, mode) if mode.keep == "saved" else \
            ReplayFrame(self, args, kwargs, reading)
        bound = self.bind(self.trainable, self.frozen)
        out = self.run(args, kwargs, bound, frame)
        frame.forward_ended(out, mode)
        return out

    def _left(self) -> list[Record] | None:
        """Records of the parameters that are in their places; None: all are."""
        found = [r for m in self.modules for r in getattr(m._parameters, "records", {}).values()]
        if all(type(r) is Record for r in found):
            return None
        return list(dict.fromkeys(r for r in found if type(r) is Record))

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

    def run(self, args: Any, kwargs: Any, bound: dict[Record, Tensor], frame: Any = None, given: bool = False) -> Any:
        """The module's own forward with these weights bound; `frame` packs what autograd saves. given: tensors that are
        no parameters' are in some places, of which autocast may keep casts."""
        inner = self.inner
        cached_casts = torch.is_autocast_cache_enabled()
        versions = [t._version for t in bound.values()]
        hooks = nullcontext() if frame is None else saved_tensors_hooks(frame.pack, frame.unpack)
        outer = swap_window(bound)
        try:
            torch.set_autocast_cache_enabled(cached_casts and given)     # it would keep casts of weights that move on
            with hooks, flat_weights(self.recurrent):
                out = inner(*args, **kwargs)
        finally:
            swap_window(outer)
            self.expanded.clear()
            torch.set_autocast_cache_enabled(cached_casts)
        for (r, t), version in zip(bound.items(), versions):
            if t._version != version:                    # the forward changed its weights in place
                r.keep_write(t)
                self.runtime.forget_reads()              # they are read anew
        return self.runtime.ring.own_outputs(out)

    def keep(self, mode: str) -> None:
        """What is done about its activations from now on. cuDNN's recurrent dropout has a random state of its own, so a
        window with it keeps them: running again would give other masks."""
        unseen = self.runtime.is_cuda and any(m.dropout > 0 for m in self.recurrent)
        self.mode = "saved" if unseen else mode


# ---- experts of a mixture, some at a time ----

_PRODUCTS = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback"}       # torch's, and transformers' in its place


class Stack(Tensor):
    """In the place of a stack of experts [E, ., .], which is frozen."""

    stacked: Stacked            # where they are
    window: Window              # which runs
    like: Tensor                # on the meta device, of its form
    flipped: bool               # the last two dimensions have changed places
    _last: tuple[Piece, Tensor] | None = None

    @staticmethod
    def __new__(cls, stacked: Stacked, window: Window, like: Tensor, flipped: bool = False) -> Stack:
        out = Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=like.dtype,
                                            device=window.runtime.device)
        out.stacked, out.window, out.like, out.flipped = stacked, window, like, flipped
        return out

    def piece(self, piece: Piece) -> Tensor:
        """[experts, ., .], as the module's code multiplies with it. Of codes one piece's weights are kept for its next
        expert; what lies over a slot is not, since the slot would be held."""
        last, found = self._last or (None, None)
        if last is not piece:
            if found is not None:            # first: there is one at a time, whose memory will be others'
                self.window.expanded.pop(storage_of(found), None)
                self._last = found = None
            found = piece.made(self.window.runtime.ring)
            if piece.expands:
                self._last = piece, found
                self.window.expanded[storage_of(found)] = piece
        return found.mT if self.flipped else found

    def together(self) -> Tensor:
        """All experts at once."""
        with torch.no_grad():
            return torch.cat([self.piece(p) for p in self.stacked.pieces])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _grouped if getattr(func, "__name__", "") in _PRODUCTS else _OWN.get(func)
        if own is not None and (out := own(func, *args, **(kwargs or {}))) is not None:
            return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Stack, Stack.together, (args, kwargs or {}))
        return func(*args, **kwargs)


def _item(func: Any, stack: Stack, index: Any) -> Tensor | None:
    """One expert."""
    if isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool:
        index = int(index)
    if type(index) is not int:
        return None
    at = range(stack.like.shape[0])[index]
    piece = stack.stacked.piece_of(at)
    return stack.piece(piece)[at - piece.experts.start]


def _transpose(func: Any, stack: Stack, dim0: int, dim1: int) -> Tensor | None:
    """With the last two dimensions in each other's places."""
    if {dim0, dim1} not in ({1, 2}, {-2, -1}, {1, -1}, {-2, 2}):
        return None
    return Stack(stack.stacked, stack.window, stack.like.mT, not stack.flipped)


_OWN: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.__getitem__: _item, Tensor.transpose: _transpose, torch.transpose: _transpose,
    Tensor.mT.__get__: lambda func, stack, *_: _transpose(func, stack, 1, 2)}


def _grouped(func: Any, x: Any, stack: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor | None:
    """x [R, K] times the stack [E, K, N], row r by the expert of which offs [E], the ends of their rows, says so."""
    usual = type(stack) is Stack and isinstance(x, Tensor) and x.dim() == 2 and offs is not None
    if not usual or type(x) is Stack or bias is not None or out_dtype is not None:
        return None
    return _Product.apply(x, (func, stack, offs))


class _Product(torch.autograd.Function):
    """One product for each piece, as the module's own function makes it of those rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: tuple[Any, Stack, Tensor]) -> Tensor:
        ctx.func, stack, offs = of
        ctx.runtime, ctx.stacked, ctx.flipped = stack.window.runtime, stack.stacked, stack.flipped
        ctx.version, ctx.columns = ctx.runtime.core.version(ctx.stacked.unit), x.shape[1]
        ends, ctx.rows = [0, *offs.tolist()], []
        for piece in ctx.stacked.pieces:     # those that have rows, in order; where their experts' rows end
            first, last = ends[piece.experts.start], ends[piece.experts.stop]
            if last > first:
                ctx.rows.append((piece, first, last, offs[piece.experts.start:piece.experts.stop] - first))
        return _by_piece(ctx, x, stack.like.shape[2], ctx.rows, ctx.flipped)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        frames.refuse_create_graph()
        frames.check_version(ctx.runtime, ctx.stacked.unit, ctx.version)
        return _by_piece(ctx, dy, ctx.columns, ctx.rows[::-1], not ctx.flipped), None


def _by_piece(ctx: Any, x: Tensor, columns: int, rows: list[tuple[Piece, int, int, Tensor]], flipped: bool) -> Tensor:
    """x [R, K] times each row's expert: [R, columns]. Of codes one piece's weights are there at a time. Rows of no
    expert, which are behind all others, give zeros."""
    out, made = x.new_empty(x.shape[0], columns), None
    for piece, first, last, ends in rows:
        del made                             # first: there is one at a time
        made = piece.made(ctx.runtime.ring)
        out[first:last] = ctx.func(x[first:last], made.mT if flipped else made, offs=ends)
    out[max([last for _, _, last, _ in rows], default=0):] = 0
    return out
