"""Windows that torch.compile runs: their module's forward as graphs, with weights and inputs as arguments.

Asked for with compute="compile". What is compiled is a function of the module and the call's arguments, one for all
windows of a structure: same forward, parameters of the same names, shapes and types. Weights reach a graph as
arguments: while it runs, the modules' `_parameters` are ordinary dicts of the slots' tensors, so none is a constant
and no address is looked at. That slots move is also why there are no CUDA graphs.

Whatever else a forward reads of its module (a layer's window, a switch) is looked at by dynamo's guards, so windows of
a structure that differ in it get graphs of their own, up to torch's recompile limit. A layer's number is read only to
find its entry in a key-value cache: `Entries` stands in for the cache, and the window fills the real one.

    saved    what a graph saves goes through the window's hooks, as in frames.py
    replay   each graph is run again by itself, from its inputs: GraphFrame. Dynamo is not asked again, so it is the
             same graph whatever has been compiled since; nor is Python's part of the forward repeated.

A window that dynamo cannot take, and all calls without gradients, run the module's own code; mt.explain says why.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..base.errors import MegatrainError
from ..graph import hf_calls
from ..graph.below import Below, restore_buffers, snapshot_buffers
from ..graph.frames import (
    Again,
    SavedFrame,
    Streamed,
    _is_cache,
    _pop,
    _push,
    autocast_state,
    restored,
    set_autocast_state,
)
from ..graph.generators import random_state, set_random_state
from ..graph.window import Window
from ..store.guard import HostTensor
from ..store.views import LazyParameter
from .runner import Runner
from .templates import Unfit

FOREIGN = "it reads weights of other units"
BACKEND = "inductor"                 # tests, which have no C++ compiler to wait for, take another
_numbers = itertools.count()
_here = threading.local()            # .call: the compiled window's call that this thread is in


# ---- graphs ------------------------------------------------------------------------------------

class Call:
    """One call of a compiled window. graphs: so many ran in it."""

    __slots__ = ("graphs", "replays", "window")

    def __init__(self, window: Window, replays: bool) -> None:
        self.window, self.replays, self.graphs = window, replays, 0


def refuse_other_units() -> None:
    """Called where a weight of no open window is read: of a compiled one, dynamo would make a graph of fetching it.

    Raises:
        Unfit: the thread is in a compiled window's forward.
    """
    if getattr(_here, "call", None) is not None:
        raise Unfit(FOREIGN)


class Graph:
    """What a backend made of a part of a forward: flat inputs, weights among them, to flat outputs.

    Attributes:
        repeats: its first run has shown that it leaves its inputs as they were (None: there was none yet).
        draws: it takes random numbers.
        made: graphs so far, of all windows.
    """

    made = 0

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, Graph.made = run, Graph.made + 1
        self.repeats: bool | None = None
        self.draws = True

    def __call__(self, *inputs: Any) -> Any:
        call: Call | None = getattr(_here, "call", None)
        if call is None:                     # an inner frame's graph, met again by a torch.compile of the user's
            return self.run(*inputs)
        if any(isinstance(t, (HostTensor, LazyParameter)) for t in inputs):
            raise Unfit(FOREIGN)
        call.graphs += 1
        if not call.replays or self.repeats is False:
            return self.run(*inputs)
        if self.repeats is None:
            return self._watched(call.window.runtime, inputs)
        frame = GraphFrame(self, call.window, inputs)
        with hooks(frame.pack, frame.unpack):
            return self.run(*inputs)

    def _watched(self, rt: Streamed, inputs: tuple[Any, ...]) -> Any:
        """The first run keeps its activations: only then is it known whether it can be repeated."""
        before = [(t, t.detach().clone()) for t in inputs if isinstance(t, Tensor) and rt.ring.locate(t) is None]
        random = random_state(rt.device)
        out = self.run(*inputs)
        self.draws = not all(map(torch.equal, random, random_state(rt.device)))
        self.repeats = all(torch.equal(t, was) for t, was in before)
        return out


class GraphFrame(Again):
    """Hooks around one run of a graph.

    Holds the graph's inputs, weights as handles, and the random and autocast state from before.
    """

    def __init__(self, graph: Graph, window: Window, inputs: tuple[Any, ...]) -> None:
        super().__init__(window)
        self.graph = graph
        self.inputs = [self._kept(t) for t in inputs]
        self.random = random_state(self.runtime.device) if graph.draws else None
        self.autocast = autocast_state(self.runtime.device.type)

    def _kept(self, t: Any) -> Any:
        return (self.handle(t), t.requires_grad) if isinstance(t, Tensor) else t

    def _again(self, kept: Any) -> Any:
        """The input as it was, without its history; numbers are as they are."""
        if type(kept) is not tuple:
            return kept
        handle, with_grad = kept
        if type(handle) is tuple and handle[0]._version != handle[1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"an input of {self.window.name!r} was changed after its forward; "
                "use plan={'activations': 'saved'} to keep what it needs")
        return restored(handle).detach().requires_grad_(with_grad)

    def replay(self) -> None:
        """Runs the graph again; what it saves is kept until autograd has asked for it."""
        saved: dict[int, Any] = {}
        self.runtime.handover.at_end(self)

        def pack(t: Tensor) -> Any:
            saved[len(saved)] = handle = self.handle(t)
            return handle

        with self.runtime.trace.during(self.window, "replay"), self._as_it_was(), hooks(pack, SavedFrame.unpack):
            self.graph.run(*[self._again(kept) for kept in self.inputs])
        if len(saved) != self.count:
            raise MegatrainError(f"{self.window.name}: run again, its graph saved {len(saved)} tensors where the first "
                                 f"run saved {self.count}; use plan={{'activations': 'saved'}}")
        self.saved = saved

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Random numbers and autocast as the first run met them; put back after."""
        rt = self.runtime
        random, autocast = random_state(rt.device) if self.graph.draws else None, autocast_state(rt.device.type)
        try:
            if self.random is not None:
                set_random_state(rt.device, self.random)
            set_autocast_state(rt.device.type, self.autocast)
            with torch.enable_grad():
                yield
        finally:
            set_autocast_state(rt.device.type, autocast)
            if random is not None:
                set_random_state(rt.device, random)


@contextlib.contextmanager
def hooks(pack: Any, unpack: Any) -> Iterator[None]:
    _push(pack, unpack)
    try:
        yield
    finally:
        _pop()


@functools.cache
def backend_of(name: str) -> Callable[..., Any]:
    """The backend that dynamo is given; the same object for all structures, since inner frames share their graphs.

    A graph's backward is compiled with its forward: what cannot be compiled shows while the module's own code can
    still run.
    """
    import torch._functorch.config as functorch
    compiler = torch._dynamo.lookup_backend(name)
    more = {"config_patches": {"triton.cudagraphs": False}} if name == "inductor" else {}

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        with functorch.patch(force_non_lazy_backward_lowering=True):
            made = Graph(compiler(graph, inputs, **more))
        return lambda *flat: made(*flat)

    return backend


# ---- structures --------------------------------------------------------------------------------

def _forward(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)


class Structure:
    """Windows that share what is compiled.

    Attributes:
        reason: why torch.compile could not take them; "" when it could.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.reason = forward, ""
        # dynamo keeps what it compiled, and what it knows of changing sizes, by the code object and its name.
        name = f"{forward.__qualname__.replace('.', '_')}_{next(_numbers)}"
        code = _forward.__code__.replace(co_name=name, co_qualname=name)
        self.run = torch.compile(types.FunctionType(code, globals(), name), backend=backend_of(BACKEND))


class Compiles(Protocol):
    """The streamed model whose windows are compiled, where `compute` says so: runtime.Runtime."""

    compute: str
    structures: dict[Any, Structure]


def structure_of(rt: Compiles, window: Window, module: nn.Module) -> Structure:
    """The structure of a window: one for all that have the same forward and parameters.

    Raises:
        Unfit: its forward is not the module's own.
    """
    inner = window.inner
    if not isinstance(inner, types.MethodType) or inner.__self__ is not module:
        raise Unfit("its forward was replaced by something that is no method of it")
    if window.recurrent:
        raise Unfit("recurrent layers keep lists of their weights")
    of = {id(r.param): r for r in window.records}
    shapes = tuple((n, of[id(p)].shape, of[id(p)].dtype) for n, p in module.named_parameters(remove_duplicate=False))
    key = inner.__func__, shapes
    found = rt.structures.get(key)
    if found is None:
        found = rt.structures[key] = Structure(inner.__func__)
    return found


def compiled_of(rt: Compiles, window: Window, module: nn.Module) -> Compiled | None:
    """What runs the window where compute="compile"; window.unfit says why nothing does."""
    if rt.compute != "compile":
        return None
    if module.__module__.startswith("torch.nn.") and not any(True for _ in module.children()):
        window.unfit = "a single operation"
        return None
    if window.wholes:
        window.unfit = f"its weights are codes: {window.wholes[0].format.name}"
        return None
    try:
        return Compiled(window, module, structure_of(rt, window, module))
    except Unfit as reason:
        window.unfit = str(reason)
        return None


# ---- windows -----------------------------------------------------------------------------------

class Entries:
    """Stands for an empty key-value cache in a compiled forward: one layer's keys and values pass, and are kept.

    It asks for no number of a layer, so no graph depends on one.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        if self.keys is not None:
            raise Unfit("it fills its key-value cache twice")
        self.keys, self.values = key_states.contiguous(), value_states.contiguous()      # as a cache's `cat` has them
        return self.keys, self.values

    def __getattr__(self, name: str) -> Any:
        raise Unfit(f"it asks its key-value cache for {name}")


class Compiled(Runner):
    """What a window knows of being compiled.

    Attributes:
        declined: why the last call ran the module's own code; "" when it did not.
        given_up: why every call does, from now on.
        graphs: so many the last compiled call went through.
    """

    def __init__(self, window: Window, module: nn.Module, structure: Structure) -> None:
        super().__init__(window)
        self.structure = structure
        self.holders = Below(module, [m for m in window.modules if m._parameters])
        self.buffered = Below(module, [m for m in window.modules if m._buffers])
        self.numbers = {m.__dict__["layer_idx"] for m in window.modules if "layer_idx" in m.__dict__}
        self.declined = self.given_up = ""
        self.graphs = 0

    @property
    def why_not(self) -> str:
        return self.structure.reason or self.given_up or self.declined

    @property
    def code(self) -> str:
        """For mt.explain."""
        if self.why_not:
            return f"its own ({self.why_not})"
        if not self.graphs:
            return "compiled, once it has been called"
        return "compiled" if self.graphs == 1 else f"compiled, in {self.graphs} graphs"

    def __call__(self, args: Any, kwargs: Any, replays: bool) -> tuple[Any] | None:
        """(the window's output,), or None where the module's own code has to run."""
        window, rt = self.window, self.window.runtime
        if getattr(window.inner, "__func__", None) is not self.structure.forward:
            self._take_another()
        if self.structure.reason or self.given_up:
            return None
        try:
            if hf_calls.hooked(window.hooks) or _has_any_global_hook():
                raise Unfit("there are hooks inside it")
            args, kwargs, fill = self._without_cache(args, kwargs)
        except Unfit as reason:
            self.declined = str(reason)
            return None
        random, buffers = random_state(rt.device), snapshot_buffers(window.buffered)
        state = window.state() if not self.graphs else None          # it may fail where it has not worked before
        try:
            out = self._run(args, kwargs, replays)
        except Unfit as reason:
            self.given_up = str(reason)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.structure.reason = f"torch.compile: {_first_line(error)}"
        else:
            fill()
            self.declined = ""
            return (out,)
        set_random_state(rt.device, random)          # graphs before the one that failed may have run
        if state is not None:
            state.restore()
        restore_buffers(window.buffered, buffers)
        return None

    def _take_another(self) -> None:
        """The module's class is another than it was."""
        self.structure = structure_of(self.window.runtime, self.window, self.module)
        self.given_up, self.graphs = "", 0

    def _run(self, args: Any, kwargs: Any, replays: bool) -> Any:
        window = self.window
        outer, call, compiled = getattr(_here, "call", None), Call(window, replays), Graph.made
        _here.call = call
        try:
            out = window.run(args, kwargs, True, SavedFrame(window), self._forward)
        finally:
            _here.call = outer
        self.graphs = call.graphs
        if Graph.made != compiled:
            gc.collect()                     # what dynamo leaves of its work is in cycles that hold the layer
        if not call.graphs:
            self.given_up = ("torch.compile made no graph of it; it stops after "
                             f"{torch._dynamo.config.recompile_limit} for a structure")
        return out

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._plain_modules():
            return self.structure.run(self.structure.forward, self.module, args, kwargs)

    @contextlib.contextmanager
    def _plain_modules(self) -> Iterator[None]:
        """`_parameters` are dicts of the open window's tensors, `_buffers` plain ones: what dynamo can look into."""
        parameters = [(m, m._parameters) for m in self.holders]
        buffers = [(m, m._buffers) for m in self.buffered]
        try:
            for m, bound in parameters:
                m.__dict__["_parameters"] = {name: bound[name] for name in bound}
            for m, own in buffers:
                m.__dict__["_buffers"] = dict(own)
            yield
        finally:
            for m, own in buffers:
                own.update(m._buffers)       # a forward may put new ones in their place
                m.__dict__["_buffers"] = own
            for m, bound in parameters:
                m.__dict__["_parameters"] = bound

    def _without_cache(self, args: Any, kwargs: Any) -> tuple[Any, Any, Callable[[], None]]:
        """The call with `Entries` for an empty cache, and what puts these into the cache afterwards.

        Raises:
            Unfit: there is a cache, and another one than a dynamic one that is empty.
        """
        caches = {id(v): v for v in (*args, *kwargs.values()) if _is_cache(v)}
        if not caches:
            return args, kwargs, lambda: None
        cache, entries = next(iter(caches.values())), Entries()
        number = next(iter(self.numbers), None)
        if len(caches) > 1 or len(self.numbers) != 1 or not hf_calls.empty_entry(cache, number):
            raise Unfit("its key-value cache is not an empty DynamicCache")

        def swapped(v: Any) -> Any:
            return entries if v is cache else v

        def fill() -> None:
            if entries.keys is not None:
                cache.update(entries.keys, entries.values, number)

        return tuple(map(swapped, args)), {k: swapped(v) for k, v in kwargs.items()}, fill


def _first_line(error: Exception) -> str:
    """What went wrong, without dynamo's advice and stacks."""
    error = getattr(error, "inner_exception", error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
