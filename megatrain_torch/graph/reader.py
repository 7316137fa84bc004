"""Reads Python code: what a call computes, as a graph; what it depends on, as guards; what it writes.

torch._dynamo runs the frame symbolically, so nothing of the module or of the user's is changed while it looks. Whatever
was read becomes a guard, which C checks before each use. What dynamo cannot follow whole is refused (Unreadable).

All of dynamo's internals that the package needs are here, as torch 2.10, 2.11, 2.13 and 2.15 have them: `compile_frame`
gives the graph of a frame and runs nothing, `CheckFunctionManager` makes its guards. Settings hold around a read, for
nobody else.
"""
from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import gc
import itertools
import logging
import operator
import os
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from ..store.records import Record
from . import hf_calls

# Attributes that number a layer. They are symbols for dynamo: who only passes them on is the same code in all layers.
NUMBERED = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
TELLER = logging.getLogger("torch._subclasses.fake_tensor")      # prints what fails on fake tensors, caught or not


class Unreadable(Exception):
    """dynamo cannot follow the code; the text says what is to blame."""


def _call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _call_for_one(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = forward(*args, **kwargs)
    return out if type(out) is Tensor else None


class Reading:
    """What is known of a call, and of others for which it `holds`."""

    def __init__(self) -> None:
        self.writes = ""                     # what the code changes beside its output, in words
        self.holds_tensors = False           # it reads others than weights, buffers and arguments: no guard sees values
        self.found: Any = None               # what the judge found of the graph
        self._guards: Any = None
        self._names: Any = (), ()            # globals that may hide builtins, and the names of these
        self._variables: Any = (), ()        # of the environment, that code looks at, and what they were
        self._environ: dict[Any, Any] | None = None                     # all of them, where it does not say which
        self._methods: Any = (), ()          # classes, tensors' among them, and names of their methods
        self._bodies: list[Any] = []         # which these were
        self.gone = False                    # an object whose identity is guarded no longer lives: nothing holds

    def holds(self, scope: dict[str, Any]) -> bool:
        """Does the call of this scope (`scope_of`) run the same code on the same things?"""
        return (not self.gone and bool(self._guards.check(scope))        # of each call: no frames of Python besides
                and all(map(operator.is_, map(getattr, *self._methods, itertools.repeat(None)), self._bodies))
                and not any(map(operator.contains, *self._names))
                and all(map(operator.eq, map(os.environ._data.get, self._variables[0]), self._variables[1]))
                and (self._environ is None or self._environ == os.environ._data))

    def guard_by(self, manager: Any, graph: Graph | None, code: set[types.CodeType], kinds: set[type]) -> None:
        """manager: dynamo's guards. It guards neither methods of classes nor builtins' names. code: what ran. kinds:
        of which classes things are that have guards."""
        self._guards = manager
        called = {n.target for n in graph.module.graph.nodes if n.op == "call_method"} if graph is not None else set()
        methods = [(Tensor, name) for name in sorted(called)]
        for kind in kinds:                   # names in a class, or in those that it is made of, whose code ran
            methods += {(kind, name) for base in kind.__mro__ for name, value in vars(base).items()
                        if getattr(getattr(value, "fget", getattr(value, "__func__", value)), "__code__", None) in code
                        and getattr(kind, name, None) is getattr(kind, name, None)}
        self._methods = tuple(zip(*methods)) or ((), ())
        self._bodies = [getattr(*method, None) for method in methods]
        if (variables := _variables(code)) is None:
            self._environ = dict(os.environ._data)
        else:
            self._variables = variables, [*map(os.environ._data.get, variables)]
        homes = {getattr(m, "__file__", None): vars(m) for m in list(sys.modules.values())}
        found = {(c.co_filename, name) for c in code for name in c.co_names if hasattr(builtins, name)}
        names = [(homes[file], name) for file, name in found if file in homes and name not in homes[file]]
        self._names = tuple(zip(*names)) or ((), ())


def _variables(code: set[types.CodeType]) -> list[Any] | None:
    """Names of the environment's variables that code looks at; None: they are not all written there. Others change from
    step to step in programs that tell their workers so, and pytest has one for each test."""
    found = []
    for c in code:
        if not {"environ", "getenv"}.intersection(c.co_names):
            continue
        steps = [i for i in dis.get_instructions(c) if i.opname not in ("PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG")]
        for at, step in enumerate(steps):
            if step.argval not in ("environ", "getenv") or step.opname == "LOAD_CONST":
                continue
            first, second = (*steps[at + 1:at + 3], step, step)[:2]
            if step.argval == "environ" and first.argval == "get":
                first = second
            elif step.argval == "environ" and second.opname != "BINARY_SUBSCR" and second.argrepr != "[]":
                return None
            if first.opname != "LOAD_CONST" or not isinstance(first.argval, str):
                return None
            found.append(os.environ.encodekey(first.argval))
    return found


class Graph(NamedTuple):
    """A call's operations, for a judge."""

    module: Any                         # a torch.fx.GraphModule of torch's functions
    inputs: dict[str, tuple[Any, Any]]  # by placeholder, what lies there: the source in dynamo's words, its fake value
    fake: Any                           # the mode of the fake tensors
    real: dict[str, Any]                # by placeholder, the tensor


def scope_of(forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call as guards look at it: stand-ins for key-value caches, and for masks that are not made."""
    if isinstance(forward, types.MethodType):
        forward, args = forward.__func__, (forward.__self__, *args)
    return {"forward": forward, "args": tuple([v if type(v) in _USUAL else _seen(v) for v in args]),
            "kwargs": {k: v if type(v) in _USUAL else _seen(v) for k, v in kwargs.items()}}


_USUAL = frozenset((Tensor, tuple, type(None), bool, int, float))        # neither caches nor masks of ours


def _seen(value: Any) -> Any:
    if isinstance(value, hf_calls.StandIn):
        sight = value.sight
        return torch.empty((), dtype=value.dtype, device=sight.device).expand(value.shape)
    return _cache_like(type(value)) if hf_calls.is_cache(type(value)) else value


# ---- key-value caches ----------------------------------------------------------------------------

@functools.cache
def cached() -> Any:
    """(keys, values) -> the same, in a graph one call: what a cache of which nothing else is asked gathers."""
    @torch.library.custom_op("megatrain_torch::cached", mutates_args=())
    def cached(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.clone(), values.clone()

    @cached.register_fake
    def _(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(keys), torch.empty_like(values)

    return torch.ops.megatrain_torch.cached.default


@functools.cache
def _cache_like(kind: type) -> Any:
    """In the place of a cache of this class, for its `update` alone: dynamo refuses whatever else is asked of it."""
    op = cached()

    def update(self: Any, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return op(key_states, value_states)

    def refuse(*_: Any, **__: Any) -> Any:
        torch._dynamo.graph_break(msg="it asks its key-value cache for more than to be updated")

    kept = {"__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__doc__", "__dict__",
            "__weakref__", "__module__", "__init_subclass__", "__subclasshook__", "__dir__", "__del__"}
    own = {name: property(refuse) if not callable(getattr(kind, name, None)) else refuse
           for name in dir(kind) if name not in kept}
    own |= {"update": update, "__getattr__": refuse, "__bool__": refuse, "__module__": __name__}
    return object.__new__(type(f"Any{kind.__name__}", (kind,), own))


# ---- what is known -------------------------------------------------------------------------------

OFTEN = 16                       # a window that has been read so often is not read again
MOST = 512                       # keys of which readings are kept
# Of all models of the process, by what no guard looks at: the latest, as many as a process needs.
READINGS: dict[tuple[Any, ...], list[Reading]] = {}


class Reader:
    """Of one window."""

    def __init__(self) -> None:
        self.last: Reading | None = None     # what held for its last call
        self._key: Any = None
        self._reads = 0

    def holds(self, key: Any, scope: dict[str, Any]) -> bool:
        """Is this the code of the last call?"""
        return self.last is not None and key == self._key and self.last.holds(scope)

    def of(self, key: Any, scope: dict[str, Any], refused: dict[Any, str], make: Callable[[], Reading]) -> Reading:
        """What is known of a call; Unreadable where dynamo cannot follow it. key: what no guard looks at. refused: why
        calls of this model could not be read. make: reads it."""
        if self.holds(key, scope):
            return self.last
        found = next((r for r in READINGS.get(key, ()) if r.holds(scope)), None)
        if found is None:
            form = key, tuple((n, type(v)) for n, v in scope["kwargs"].items())
            self._reads += form not in refused
            if form in refused or self._reads > OFTEN:
                raise Unreadable(refused.get(form, "it is other code from pass to pass"))
            try:
                found = make()
            except Unreadable as reason:
                refused[form] = str(reason)
                raise
            before = [r for r in READINGS.pop(key, ()) if not r.gone]
            READINGS[key] = [found, *before[:OFTEN]]         # the latest comes last
            if len(READINGS) > MOST:
                del READINGS[next(iter(READINGS))]
        self.last, self._key = found, key
        return found


def modes_on() -> bool:
    """Is there a mode that may give torch's functions another meaning? A default device gives none."""
    return torch._C._len_torch_dispatch_stack() > 0 or not all(
        isinstance(torch._C._get_function_stack_at(i), DeviceContext)
        for i in range(torch._C._len_torch_function_stack()))


# ---- reading -------------------------------------------------------------------------------------

@contextlib.contextmanager
def _settings(symbols: bool) -> Iterator[None]:
    """Numbers are constants of a graph, sizes its symbols, and so are layers' numbers (`symbols`); hooks are guarded;
    and who asks whether it is being compiled is told that it is not."""
    import torch._dynamo.config as config
    from torch._dynamo import guards
    from torch._dynamo.variables.torch import tracing_state_functions
    told = tracing_state_functions()
    compiling = [function for function, answer in told.items() if answer is True]
    told.update(dict.fromkeys(compiling, False))
    numbers = rf".*\.({'|'.join(NUMBERED)})$" if symbols else ""
    # For a log dynamo measures how fast its guards are, with the processor's caches flushed before: 60 ms of each read.
    # Its cache of fake operations takes a fifth of a read and stays: with torch 2.13 Phi 3 is not proved without it.
    measure = guards.profile_guard_manager
    with config.patch(specialize_float=True, specialize_int=True, assume_static_by_default=False,
                      automatic_dynamic_shapes=False, skip_nnmodule_hook_guards=False,
                      capture_scalar_outputs=True, trace_numpy=False, suppress_errors=False, verbose=False), \
            torch.compiler.config.patch(dynamic_sources=numbers):
        try:
            guards.profile_guard_manager = lambda *_: 0.0
            yield
        finally:
            guards.profile_guard_manager = measure
            told.update(dict.fromkeys(compiling, True))


def stand_in(t: Tensor, record: Record) -> nn.Parameter:
    """What dynamo sees for a streamed parameter: over that memory, with the parameter's attributes."""
    found = nn.Parameter(t.detach(), record.was_trainable)
    if record.whole is None and record.param is not None:
        found.__dict__ = record.param.__dict__
    return found


@contextlib.contextmanager
def plain_modules(modules: Sequence[nn.Module]) -> Iterator[None]:
    """`_parameters` are dicts of the open window's tensors, `_buffers` plain ones: what dynamo can look into."""
    before = [(m.__dict__, name, own) for m in modules for name in ("_parameters", "_buffers")
              if type(own := m.__dict__[name]) is not dict]
    try:
        for there, name, own in before:
            there[name] = {n: own[n] for n in own}
        yield
    finally:
        for there, name, own in before:
            there[name] = own


def read(scope: dict[str, Any], modules: Sequence[nn.Module], judge: Callable[[Graph | None, str], Any] | None = None,
         put: Sequence[object] = (), wide: Sequence[Tensor] = ()) -> Reading:
    """What a call does.

    Args:
        modules: those whose weights are bound.
        judge: is given the graph, of one tensor alone (None: it has no operation), and what the code writes.
        put: functions that lie in modules for the read alone: nothing of them is guarded.
        wide: tensors whose last size is a number of what is read, and no symbol.

    Raises:
        Unreadable: dynamo cannot follow it.
    """
    cached()
    collects, why, told = gc.isenabled(), "", TELLER.disabled
    gc.disable()
    for t in wide:
        torch._dynamo.mark_static(t, t.dim() - 1)
    TELLER.disabled = True
    try:
        for symbols in (True, False):
            try:
                return _read(scope, modules, judge, put, symbols)
            except Unreadable as error:      # its traceback holds all that dynamo has made
                why = str(error)
            if _SYMBOL not in why:           # else it is read as the code of this one layer
                break
    finally:
        for t in wide:                       # these are the user's
            for name in ("_dynamo_static_indices", "_has_dynamo_dim_marking"):
                vars(t).pop(name, None)
        TELLER.disabled = told
        gc.collect(0)                        # dynamo's cycles hold the module: all that was made since is young
        if collects:
            gc.enable()
    raise Unreadable(why)


_SYMBOL = "SymNodeVariable"      # dynamo's own error where code compares a number of a layer, its symbol


def _read(scope: dict[str, Any], modules: Sequence[nn.Module], judge: Any, put: Sequence[object], symbols: bool
          ) -> Reading:
    from torch._dynamo import convert_frame
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._guards import CompileContext, compile_context, tracing

    found, graphs = Reading(), []

    def backend(module: Any, examples: Any) -> Any:
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        inputs = {n.target: (n.meta["grapharg"].source, n.meta["example_value"]) for n in placeholders}
        fake = torch._guards.TracingContext.get().fake_mode
        graphs.append(Graph(module, inputs, fake, dict(zip(inputs, examples))))
        found.holds_tensors = any(
            isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and _GIVEN.search(_name(inputs[name][0])) is None
            for name, t in graphs[-1].real.items())
        found.writes = _writes(InstructionTranslator.current_tx().output, graphs[-1])
        return module.forward

    there = {"__builtins__": builtins, "__name__": __name__, "Tensor": Tensor}    # dynamo puts names of its own in here
    code = (_call if judge is None else _call_for_one).__code__
    with _settings(symbols), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach), \
            torch.random.fork_rng(devices=[]), plain_modules(modules), \
            hf_calls.collecting_nothing(), get_metrics_context(), dynamo_timed("megatrain_torch"), \
            compile_context(CompileContext(convert_frame.get_compile_id({}))), warnings.catch_warnings():
        warnings.simplefilter("ignore")      # what dynamo advises is for who asked for a graph
        try:
            made = convert_frame.compile_frame(code, there, dict(scope), vars(builtins), (), backend, True, set())
            output = made.tracer_output.output_graph
            graph, ran = graphs[-1] if graphs else None, list(output.tracing_context.traced_code)
            _refuse_unseen(ran)
            with tracing(output.tracing_context):
                found.found = None if judge is None else judge(graph, found.writes)
            kinds = set(map(type, modules))
            made = _manager()(code, output, gone=found,
                              guard_filter_fn=functools.partial(_kept, put, kinds, found.writes))
            found.guard_by(made.guard_manager, graph, set(ran), kinds)
        except Exception as error:           # dynamo's own, and whatever the user's code raises while it is followed
            raise Unreadable(_first_line(error)) from error
        finally:
            for node in [n for graph in graphs for n in graph.module.graph.nodes]:
                node.meta.clear()            # cycles by way of C that no collector sees
    return found


def _refuse_unseen(code: Iterable[types.CodeType]) -> None:
    """Unreadable: code that is not torch's looks where dynamo guards nothing for what is not there."""
    for c in code:
        if (names := _UNSEEN.intersection(c.co_names)) and not c.co_filename.startswith(_TORCH):
            where = f"{os.path.basename(c.co_filename)}:{c.co_firstlineno}"
            raise Unreadable(f"it reads {', '.join(sorted(names))} ({where})")


_UNSEEN = frozenset(("__dict__", "vars", "globals"))
_TORCH = os.path.dirname(torch.__file__) + os.sep


@functools.cache
def _manager() -> type:
    from torch._dynamo.guards import CheckFunctionManager

    class Manager(CheckFunctionManager):
        def __init__(self, *args: Any, gone: Reading, **kwargs: Any) -> None:
            self._reading = weakref.ref(gone)
            super().__init__(*args, **kwargs)

        def invalidate(self, obj_str: str) -> None:
            """An object of which a guard has the identity is gone, and another may get its address."""
            if (reading := self._reading()) is not None:
                reading.gone = True

    return Manager


def _kept(put: Sequence[object], kinds: set[type], writes: str, entries: Sequence[Any]) -> list[bool]:
    """Which guards are checked: none of weights themselves, whose names, shapes and types their windows know, but those
    of their attributes; and none of what was put in for the read. Adds to `kinds` of which classes guarded things are.
    writes: what the code changes, which is neither run again nor another's, whatever guards do not see. Unreadable: a
    guard does not see a change."""
    names = [_name(entry.orig_guard) for entry in entries]
    without = tuple(n for n, e in zip(names, entries) if e.has_value and any(e.value is f for f in put))
    keep = []
    for name, entry in zip(names, entries):
        if entry.has_value:
            kinds.add(entry.value if isinstance(entry.value, type) else type(entry.value))
        weights = name.endswith(("._parameters", "._buffers")) or _WEIGHT.search(name) is not None
        if name.endswith(".grad") and _WEIGHT.search(name.removesuffix(".grad")):        # where it is, no guard knows
            raise Unreadable(f"it reads {_in_words(name)}")
        if entry.guard_type in ("EQUALS_MATCH", "CONSTANT_MATCH") and entry.has_value and not writes:
            try:
                hash(entry.value)
            except TypeError:                # compared with itself, it is equal whatever happens to it
                raise Unreadable(f"it reads {_in_words(name)}, in which something may change") from None
        keep.append(not (weights and entry.guard_type != "HASATTR") and not name.startswith(without))
    return keep


# Arguments and buffers, in dynamo's words.
_GIVEN = re.compile(r"^L\['args'\]\[[1-9]\d*\]|^L\['kwargs'\]|\._buffers\['[^']*'\]$")
_WEIGHT = re.compile(r"\._parameters\['[^']*'\]$")


def _writes(output: Any, graph: Graph) -> str:
    """What dynamo would do after the graph, in words."""
    side = output.side_effects
    for variable in side.id_to_variable.values():
        mutation = variable.mutation_type
        if mutation is not None and not type(mutation).__name__.endswith("New") and side.is_modified(variable):
            names = ", ".join(side.store_attr_mutations.get(variable, ()))
            return "it changes " + ".".join(filter(None, (_in_words(_name(variable.source)), names)))
    if output.random_calls:
        return "it takes numbers from Python's random"
    if side.tensor_hooks:
        return "it puts hooks on tensors"
    for name, (source, fake) in graph.inputs.items():
        seen = "._buffers" in _name(source) or isinstance(graph.real[name], nn.Parameter)     # windows see these writes
        if isinstance(fake, Tensor) and fake._version and not seen:
            return f"it writes into {_in_words(_name(source))}"
    return ""


def _name(source: Any) -> str:
    """A property since torch 2.11, a method before. "an object": it has no source."""
    name = getattr(source, "name", "an object" if source is None else "")
    return name() if callable(name) else name


def _in_words(name: str) -> str:
    """A source as its owner writes it; "": the module itself."""
    name = re.sub(r"\._(?:modules|buffers|parameters)\['([^']*)'\]", r".\1", name)
    name = re.sub(r"G\['(?:__import_)?([^']*)'\]", r"\1", name)
    return re.sub(r"^L\['args'\]\[0\]\.?|L\['kwargs'\]", "", name).replace("L['args']", "its arguments")


def _first_line(error: BaseException) -> str:
    """What went wrong, without dynamo's advice and stacks."""
    if isinstance(error, Unreadable):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(filter(None, (type(error).__name__, " ".join(lines[:2]))))[:300]
