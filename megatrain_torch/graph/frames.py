"""What autograd saves inside a window, and how it comes back.

Two pairs of pack and unpack hooks, chosen per window:

saved    weights are replaced by (unit, offset); everything else is kept, with the in-place check
         that torch drops when hooks are used; "saved+host", "+disk": elsewhere (swap.py);
replay   every saved tensor is replaced by (frame, number); the first unpack runs the window's
         forward again and keeps what it saves, up to the last tensor that the first run saved.
         "replay+host", "+disk": the inputs with a gradient wait elsewhere.

Neither keeps a weight: `unpack` fetches the unit again, wherever it is by then.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..base.errors import MegatrainError
from ..base.modes import Mode
from ..store.state import DeviceParameter, swap_window
from ..store.whole import Piece, Whole
from .hf_calls import is_cache
from .reader import Reading, scope_of
from .swap import Bundle, Part, check_unwritten, hollow, modified, storage_of

if TYPE_CHECKING:
    from ..model.runtime import Runtime
    from .window import Window

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


def check_version(runtime: Runtime, unit: int, version: int) -> None:
    """Raises: the unit's weights are others than a forward saw."""
    if runtime.core.version(unit) != version:
        raise modified(f"weights of unit {runtime.unit_names[unit]!r} were updated between forward and backward; call "
                       "backward() before step(), and leave weights as they are in the forward of a module that trains")


def check_versions(window: Window, versions: list[int]) -> None:
    for unit, version in zip(window.units, versions):
        check_version(window.runtime, unit, version)


class Weight:
    """A saved tensor that lies in a slot, or in a weight made of codes: which version, and which part of it."""

    def __init__(self, runtime: Runtime, place: int | Whole | Piece, offset: int, t: Tensor) -> None:
        """place: the number of the unit, or of a cut of it; or the weight of codes. offset: bytes from the start of a
        slot; elements of a weight of codes."""
        self.runtime, self.place, self.offset = runtime, place, offset
        self.unit = runtime.ring.unit_of(place) if type(place) is int else place.records[0].unit
        self.version = runtime.core.version(self.unit)
        self.dtype, self.size, self.stride = t.dtype, t.shape, t.stride()

    def tensor(self) -> Tensor:
        check_version(self.runtime, self.unit, self.version)
        if type(self.place) is int:
            return self.runtime.ring.view(self.place, self.offset, self.dtype, self.size, self.stride)
        return self.runtime.expansions.of(self.runtime, self.place).as_strided(self.size, self.stride, self.offset)


def packed(window: Window, t: Tensor, pieces_alone: bool = False) -> Any:
    """What stands for a tensor that autograd saves in a window. pieces_alone: other weights of codes are kept."""
    rt = window.runtime
    if (where := rt.ring.locate(t)) is not None:
        return Weight(rt, *where, t)
    made = window.expanded.get(storage_of(t)) if window.expanded else None
    if made is None or (pieces_alone and type(made) is not Piece):
        return keep(t)
    return Weight(rt, made, t.storage_offset(), t)


class Expansions:
    """16-bit weights made of codes for a backward: one at a time, of which several saved tensors may be parts; and one
    piece of each stack of experts, since a loop over experts takes them from several stacks in turn."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Whole | Piece, int, Tensor]] = {}

    def of(self, runtime: Runtime, whole: Whole | Piece) -> Tensor:
        unit, place = whole.records[0].unit, whole.stacked if isinstance(whole, Piece) else None
        version = runtime.core.version(unit)
        last = self._last = {k: v for k, v in self._last.items() if v[0].records[0].unit == unit}
        if place not in last or last[place][:2] != (whole, version):
            last.pop(place, None)                        # first: there is one at a time
            if isinstance(whole, Piece):
                made = whole.made(runtime.ring)
            else:
                views = runtime.ring.views(unit)
                made = whole.of([views[r.index].detach() for r in whole.records])
            last[place] = whole, version, made
            runtime.handover.at_end(self)
        return last[place][2]

    def backward_ended(self) -> None:
        self._last = {}


def keep(t: Tensor) -> tuple[Tensor, int]:
    """A saved tensor that is no weight, with its version when it was saved. With its history it would hold the node
    that saves it: a cycle in C++ that no collector sees."""
    return t.detach() if t.requires_grad else t, t._version


def restored(handle: Any) -> Tensor:
    """The tensor behind what `packed` or a bundle made."""
    if type(handle) is not tuple:
        return handle.tensor()
    value, version = handle
    check_unwritten(value, version, value.shape)
    return value


def refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise MegatrainError("backward(create_graph=True) through a streamed model is not supported: "
                             "mt.unstream(model) first, or use a model that fits")


class SavedFrame:
    """Hooks of a window that keeps its activations: there, or by its mode in host memory or a file. What came from
    outside without a gradient (angles, masks) is other windows' too, and stays where it is."""

    def __init__(self, window: Window, args: Any = (), kwargs: Any = None, mode: Mode | None = None) -> None:
        self.window = window
        self.bundle: Bundle | None = None
        if mode is not None and mode.host:
            self.bundle = Bundle(window.runtime.swap, window, mode.disk)
            fork = Fork()
            fork.call(args, kwargs)
            self.shared = {storage_of(t) for t, _ in fork.watched} - {storage_of(t) for t in fork.with_grad}
            self.shared |= {storage_of(b) for m in window.modules for b in m._buffers.values() if b is not None}

    def pack(self, t: Tensor) -> Any:
        handle, bundle = packed(self.window, t), self.bundle
        if bundle is None or type(handle) is Weight or not bundle.swap.may(t) or storage_of(t) in self.shared:
            return handle
        return bundle.add(t)

    @staticmethod
    def unpack(handle: Any) -> Tensor:
        refuse_create_graph()
        return restored(handle)

    def forward_ended(self, out: Any, mode: Mode) -> None:
        if self.bundle is not None:
            self.bundle.leave()


class _StopReplay(BaseException):
    """All that the first run saved is there again."""


class ReplayFrame:
    """Hooks of a window whose forward runs again in backward: every saved tensor becomes (frame, number), and the first
    that is asked for makes all.

    Holds the inputs (detached, containers copied), the scene from before the first run, and a sum of the bits of each
    row that it gave. Where the code cannot be followed, or reads something that has changed since, the forward runs
    again to its end, and has to give these.
    """

    def __init__(self, window: Window, args: Any, kwargs: Any, reading: Reading | None) -> None:
        """reading: what is known of the code; None: nothing."""
        self.window, self.runtime, self.reading = window, window.runtime, reading
        self.shapes: list[Any] = []                      # of tensors saved by the first run
        self.saved: dict[int, Any] = {}                  # what a replay saved and nobody has taken yet
        self.module = window.module                      # the graph may outlive the model
        fork = Fork()
        self.inputs = fork.call(args, kwargs)
        self.watched = fork.watched                      # inputs and their versions
        self.trainable = window.trainable                # requires_grad may change, and change back, meanwhile
        self.attributes = [dict(own) for _, own in window.answering]
        self.clones = None if window.proved else Fork(clone=True).call(args, kwargs)
        self.scene = Scene(window)
        self.versions = window.versions()

    def pack(self, t: Tensor) -> Any:
        self.shapes.append(t.shape)
        return self, len(self.shapes) - 1

    @staticmethod
    def unpack(handle: Any) -> Tensor:
        refuse_create_graph()
        frame, number = handle
        if number not in frame.saved:
            frame.replay()
        return restored(frame.saved.pop(number))

    def forward_ended(self, out: Any, mode: Mode) -> None:
        """In-place writes to the inputs: the clones stand in, and the window keeps its activations from now on.
        mode: what it says of the input goes for the inputs with a gradient."""
        self.bits, self.window.proved = _bits(out), True
        clones, self.clones = self.clones, None
        if any(t._version != v for t, v in self.watched):
            if clones is None:
                raise MegatrainError(f"{self.window.name}: its forward changed an input in place, which it had not "
                                     "done before, so it cannot be run again; use plan={'activations': 'saved'}")
            self.inputs, self.watched, self.window.mode = clones, [], str(mode.saved)
        elif mode.host:                     # the inputs with a gradient wait elsewhere
            away = Fork(away=Bundle(self.runtime.swap, self.window, mode.disk))
            self.inputs = away.call(*self.inputs)
            gone = {storage_of(t) for t in away.with_grad}
            self.watched = [(hollow(t) if storage_of(t) in gone else t, v) for t, v in self.watched]
            away.away.leave()

    def backward_ended(self) -> None:
        self.saved = {}                      # what nobody has asked for the next backward that does makes again

    def replay(self) -> None:
        """Runs the forward again until all that the first run saved is there, or to its end where that is to be
        compared."""
        self.saved = {}
        self.runtime.handover.at_end(self)
        try:
            with self.runtime.keeps.memory(), self.runtime.trace.during(self.window, "replay"), \
                    self.as_it_was() as (args, kwargs):
                inner, reading = self.window.inner, self.reading
                known = reading is not None and not reading.holds_tensors and reading.holds(
                    scope_of(inner, args, kwargs))
                with saved_tensors_hooks(self._collector(stops=known), SavedFrame.unpack):
                    out = inner(*args, **kwargs)
                bits = [] if known else _bits(out)
                if not known and not (len(bits) == len(self.bits) and all(map(torch.equal, bits, self.bits))):
                    raise self._other("gave another output")
        except _StopReplay:
            pass
        if len(self.saved) < len(self.shapes):
            raise self._other(f"saved {len(self.saved)} tensors where the first run saved {len(self.shapes)}")

    def _other(self, what: str) -> MegatrainError:
        return MegatrainError(f"{self.window.name}: run again, its forward {what}; it does not repeat itself: "
                              "use plan={'activations': 'saved'}")

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[tuple[Any, Any]]:
        """Inputs, weights and all else as the first run met them; put back after."""
        window = self.window
        if self.runtime.given and window._left() is not None:
            raise MegatrainError(f"{window.name}: it has to run again with its own weights, and others are in their "
                                 "places: call backward() outside of functional_call, or use "
                                 "plan={'activations': 'saved'}")
        check_versions(window, self.versions)
        if any(t._version != v for t, v in self.watched):
            raise modified(f"an input of {window.name!r} was changed after its forward; use "
                           "plan={'activations': 'saved'} to keep what it needs")
        now = Scene(window)
        with contextlib.ExitStack() as after:
            after.callback(now.put)
            after.callback(window.expanded.clear)
            self.scene.put()
            torch.set_autocast_cache_enabled(False)      # it would keep casts of weights that move on
            after.enter_context(torch.enable_grad())
            inputs = Fork(as_results=True).call(*self.inputs)
            bound = window.bind_leaves(self.trainable)
            for (r, _), attributes in zip(window.answering, self.attributes):
                if type(t := bound.get(r)) is DeviceParameter:       # as they were: what a run sets again stays
                    t.__dict__ = dict(attributes)
            after.callback(swap_window, swap_window(bound))
            after.enter_context(flat_weights(window.recurrent))
            yield inputs

    def _collector(self, stops: bool) -> Any:
        """A hook that keeps what the first run saved. stops: behind the last of that."""
        saved, shapes, window, numbers = self.saved, self.shapes, self.window, itertools.count()

        def pack(t: Tensor) -> Any:
            if (number := next(numbers)) >= len(shapes):
                return keep(t)               # the rest of a run to the end: nobody asks for it
            if shapes[number] != t.shape:
                raise self._other(f"saved a tensor of {list(t.shape)} where the first run saved {list(shapes[number])}")
            saved[number] = handle = packed(window, t, pieces_alone=True)
            if stops and number == len(shapes) - 1:
                raise _StopReplay
            return handle

        return pack


class Scene:
    """What a window's forward meets beside its inputs and weights: classes, hooks and buffers of its modules, random
    numbers, autocast.

    Hooks may be there for one call of the model: PEFT's of activated LoRA hand each layer the call's offsets, and are
    gone when a layer runs again. BatchNorm writes its buffers without a trace in `_version`: so their values are kept.
    """

    def __init__(self, window: Window) -> None:
        self._window, device = window, window.runtime.device
        self._classes = [(m, type(m)) for m in window.modules]
        self._hooks = self._hooks_now()
        with torch.no_grad():
            self._buffers = [(m, k, b, b.clone() if isinstance(b, Tensor) else None)
                             for m in window.modules for k, b in m._buffers.items()]
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._random = [g.get_state() for g in self._generators]
        self._caches = torch.is_autocast_cache_enabled()
        self._casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                       for kind in {device.type, "cpu"}]

    def _hooks_now(self) -> list[tuple[dict[int, Any], dict[int, Any]]]:
        """Tables of the modules inside that are not empty, and copies of them. The window's own run around it."""
        if not any(self._window.hooks):
            return []
        return [(table, dict(table)) for m in self._window.modules[1:]
                for table in (m._forward_hooks, m._forward_hooks_with_kwargs, m._forward_hooks_always_called,
                              m._forward_pre_hooks, m._forward_pre_hooks_with_kwargs) if table]

    def put(self) -> None:
        """All is as it was when this was made."""
        for m, kind in self._classes:
            if type(m) is not kind:
                object.__setattr__(m, "__class__", kind)
        if (there := self._hooks_now()) != self._hooks:
            for table, _ in there:
                table.clear()
            for table, hooks in self._hooks:
                table.update(hooks)
        with torch.no_grad():
            for m, k, b, values in self._buffers:
                m._buffers[k] = b
                if isinstance(b, Tensor):
                    with torch.autograd._unsafe_preserve_version_counter(b):
                        b.copy_(values)
        for g, state in zip(self._generators, self._random):
            g.set_state(state)
        torch.set_autocast_cache_enabled(self._caches)
        for kind, enabled, dtype in self._casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def _bits(out: Any) -> list[Tensor]:
    """Of each tensor in a forward's output: the sum of each row's bits, as integers."""
    found = []
    for t in tree_leaves(out):
        if isinstance(t, Tensor) and t.layout == torch.strided:
            t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
            if t.is_floating_point():
                t = t.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])
            found.append(t.sum(-1, dtype=torch.int64))
    return found


# ---- inputs ------------------------------------------------------------------------------------

class _Result(torch.autograd.Function):
    """The same tensor as the result of an operation: an input that forward may write into."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


_ATOMS = {type(None), bool, int, float, str, torch.dtype, torch.device}


class Fork:
    """A copy of the arguments whose containers and caches may be changed; tensors are shared, detached."""

    def __init__(self, clone: bool = False, as_results: bool = False, away: Bundle | None = None) -> None:
        """clone: floating tensors are copied too. as_results: tensors that require a gradient come as results of an
        operation, as they did first. away: where those are put instead, of which parts stand for them."""
        self.clone, self.as_results, self.away = clone, as_results, away
        self.watched: list[tuple[Tensor, int]] = []      # each tensor met, with its version
        self.with_grad: list[Tensor] = []                # those that require a gradient, and were copied
        self.met: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is Part:
            return self._tensor(value.tensor().requires_grad_())
        if kind is tuple:
            return tuple([self(v) for v in value])
        if id(value) in self.met:
            return self.met[id(value)]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return kind(*map(self, value)) if hasattr(value, "_fields") else kind(map(self, value))
        if isinstance(value, type) or not (
                isinstance(value, (dict, list)) or dataclasses.is_dataclass(value) or is_cache(kind)):
            return value
        out = self.met[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            for k, v in value.items():
                dict.__setitem__(out, k, self(v))
        elif isinstance(value, list):
            out[:] = [self(v) for v in value]
        for k, v in getattr(value, "__dict__", {}).items():
            object.__setattr__(out, k, self(v))
        return out

    def call(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self(args), {k: self(v) for k, v in kwargs.items()}

    def _tensor(self, t: Tensor) -> Any:
        if self.away is not None:
            if not t.requires_grad or not self.away.swap.may(t):
                return t
            self.with_grad.append(t)
            return self.away.add(t)
        self.watched.append((t.detach() if t.requires_grad else t, t._version))
        out = self.watched[-1][0]
        if self.clone and t.is_floating_point():
            out = out.clone()
        if not t.requires_grad:
            return out
        self.with_grad.append(t)
        out = (out if self.clone else out.detach()).requires_grad_()
        return _Result.apply(out) if self.as_results else out


# ---- recurrent modules --------------------------------------------------------------------------

@contextlib.contextmanager
def flat_weights(recurrent: list[nn.Module]) -> Iterator[None]:
    """nn.LSTM and its kin read a list made when the module was built: made again from the slots. Where it is not of the
    weights that they read, they put those into one buffer for cuDNN, in place. Without gradients these are the slot's
    own tensors, which would be of that buffer from then on, whatever comes into the slot: so others, of the same
    memory, are put there."""
    before = [(m, m._flat_weights, m._flat_weight_refs) for m in recurrent]
    for m, *_ in before:
        weights = m._flat_weights = [getattr(m, n) for n in m._flat_weights_names]
        if not torch.is_grad_enabled():
            m._flat_weight_refs = [weakref.ref(w) for w in weights]
            m._flat_weights = [w.detach() for w in weights]
            m.flatten_parameters()
    try:
        yield
    finally:
        for m, weights, refs in before:
            m._flat_weights, m._flat_weight_refs = weights, refs
