"""What a forward changes besides its output, so that running it again starts from what the first run met.

    before = Snapshot(places)     # in front of the first run
    ...
    now = Snapshot(places)        # in backward
    before.restore()
    ...                           # the run that repeats it
    now.restore()

Kept are attributes and classes of a window's modules, and what these hold: numbers, containers and objects of the
user's, however deep; classes' own attributes, globals and closures that the code of a forward, or of a hook below,
names; Python's and NumPy's random states where it names these. Containers stay the objects that they are. What cannot
be put back (an iterator) is said in `why`: then the window keeps its activations.
"""
from __future__ import annotations

import collections
import dis
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

MOST = 20_000                # objects that are looked at for one call
_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range,
          type(Ellipsis), types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, nn.Parameter}
_LISTS = list, collections.deque, bytearray
_INSIDE = set(vars(nn.Module())) | {"forward", "_apply", "load_state_dict", "share_memory", "zero_grad"}
_FOREIGN = set(sys.stdlib_module_names) | {"torch", "megatrain_torch", "numpy"}      # whose objects are let be
_CALM = {"transformers", "peft", "accelerate", "trl"}       # whose code keeps nothing in classes and globals
SMALL = 1 << 16              # elements of a tensor that is copied each time, whether it has been written or not
_GLOBAL = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_GONE = object()


# ---- what code names -----------------------------------------------------------------------------

@cache
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of globals, attributes and imports in a function and those inside of it; globals that it sets."""
    names, stored = set(code.co_names), {i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = _names(const)
            names, stored = names | inner[0], stored | inner[1]
    return frozenset(names), frozenset(stored)


def _function(call: Any) -> types.FunctionType | None:
    while isinstance(call, partial):
        call = call.func
    call = getattr(call, "__func__", call)
    return call if isinstance(call, types.FunctionType) else None


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _ours(module: str | None) -> bool:
    return _package(module) not in _FOREIGN


def _loose(module: str | None) -> bool:
    return _ours(module) and _package(module) not in _CALM


def functions_of(kind: type) -> list[types.FunctionType]:
    """Of a class, torch's own left out."""
    held = [getattr(v, "fget", v) for cls in kind.__mro__ if _ours(cls.__module__) for v in vars(cls).values()]
    return [fn for v in held if (fn := _function(v)) is not None]


def function_of(call: Any) -> types.FunctionType | None:
    """What runs when it is called."""
    return _function(call) or _function(type(call).__call__)


def named_by(fn: types.FunctionType) -> set[str]:
    """Names in a function, and in those that it names among its globals, torch's and Python's own left out."""
    names: set[str] = set()
    to_see: list[types.FunctionType | None] = [fn]
    seen: set[types.FunctionType | None] = {None}
    while to_see:
        if (fn := to_see.pop()) not in seen:
            seen.add(fn)
            own = _names(fn.__code__)[0] if _ours(fn.__module__) else frozenset[str]()
            names |= own
            to_see += [_function(fn.__globals__.get(name)) for name in own]
    return names


class Code:
    """Functions that may run in a forward, and what they name.

    Attributes:
        globals: (a function's globals, a name in them that it sets, or that is a container). cells: closures' cells.
        classes: whose own attributes count. holding: by class, how many these are, and which hold others.
        objects: functions' own attributes and defaults. randoms: modules with a random state.
    """

    def __init__(self, calls: Iterable[Any], owners: Iterable[type]) -> None:
        self.classes: list[type] = []
        self.holding: dict[type, tuple[int, list[str]]] = {}
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.cells: dict[int, Any] = {}
        self.objects: list[Any] = []
        self.randoms: set[str] = set()
        self._seen: set[Any] = set()
        self._to_see = [f for f in map(_function, calls) if f is not None]
        for owner in owners:
            self._class(owner)
        while self._to_see:
            self._look(self._to_see.pop())

    def _class(self, owner: type) -> None:
        """With all its methods: names may be made while it runs."""
        for cls in owner.__mro__:
            if _loose(cls.__module__) and cls not in self.classes:
                self.classes.append(cls)
                self.holding[cls] = len(vars(cls)), [n for n, v in vars(cls).items() if _container(v)]
                for value in vars(cls).values():
                    self._follow(getattr(value, "fget", value))

    def _look(self, fn: types.FunctionType) -> None:
        if fn in self._seen:
            return
        self._seen.add(fn)
        self._follow(getattr(fn, "__wrapped__", None))
        for cell in fn.__closure__ or ():
            self._follow(_contents(cell))
            if _loose(fn.__module__):
                self.cells[id(cell)] = cell
        if not _ours(fn.__module__):
            return
        if _loose(fn.__module__):
            self.objects += [fn.__dict__, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        names, stored = _names(fn.__code__)
        for name in names:
            self._name(fn.__globals__, name, name in stored, names)

    def _follow(self, call: Any) -> None:
        if (fn := _function(call)) is not None:
            self._to_see.append(fn)

    def _name(self, there: dict[str, Any], name: str, stored: bool, names: frozenset[str]) -> None:
        value = there.get(name, sys.modules.get(name) if name in ("random", "numpy") else _GONE)
        drawn = getattr(value, "__self__", None)             # of `from random import random`
        if isinstance(value, types.ModuleType):
            self._module(value, names)
        elif isinstance(drawn, random.Random) or type(drawn).__name__ == "RandomState":
            self.randoms.add("random" if isinstance(drawn, random.Random) else "numpy")
        elif _function(value) is not None:
            self._follow(value)
        elif isinstance(value, type):
            self._class(value)
        elif _loose(there.get("__name__")) and (stored or _container(value)):
            self.globals[id(there), name] = there, name
            self._class(type(value))

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        name = module.__name__.partition(".")[0]
        if name in ("random", "numpy") and (name == "random" or "random" in names or "random" in module.__name__):
            self.randoms.add(name)
        for n in names & vars(module).keys() if _loose(module.__name__) else ():
            self._follow(vars(module)[n])
            if _container(vars(module)[n]) or type(vars(module)[n]) in (bool, int, float):
                self.globals[id(vars(module)), n] = vars(module), n


def _container(value: Any) -> bool:
    """A global that code may change without setting it."""
    if isinstance(value, (list, dict, set, collections.deque, bytearray, Tensor, Iterator)) or type(value) in _STATES:
        return True
    if hasattr(value, "__array__") or hasattr(value, "bit_generator"):
        return not isinstance(value, type)
    return not isinstance(value, (type, types.ModuleType)) and _loose(type(value).__module__) and (
        hasattr(value, "__dict__") or hasattr(value, "__slots__"))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


# ---- where a window's forward may write ----------------------------------------------------------

Attributes = tuple[list[str], list[int], list[Any]]      # names and values of all owners, and how many each has


class Places:
    """Of one window; looked for anew where its modules or hooks are others.

    Attributes:
        modules: all. theirs: those whose classes are not torch's.
        objects: what hooks bring with them. writes: ids of tensors that a run has written in place.
        first: none has run yet.
    """

    def __init__(self, modules: Iterable[nn.Module], theirs: Iterable[nn.Module], calls: list[Any]) -> None:
        """calls: hooks inside. The window has this, and the top of `modules` has the window: they are so given that
        this does not hold it."""
        self.modules, self.theirs = modules, theirs
        forwards = [vars(m).get("forward", type(m).forward) for m in modules]
        held = [v for m in theirs for k, v in vars(m).items() if k not in _INSIDE]
        own = [v for v in held if isinstance(v, (types.FunctionType, types.MethodType, partial))]
        self.code = Code([*forwards, *calls, *own], dict.fromkeys(map(type, [*theirs, *held])))
        self.objects = [o for c in calls if (o := getattr(c, "__self__", None)) is not None
                        and not isinstance(o, (types.ModuleType, nn.Module))]
        self.objects += [a for c in calls if isinstance(c, partial) for a in (*c.args, *c.keywords.values())]
        self.writes: set[int] = set()
        self.first = True
        self._names: tuple[list[str], list[int]] = [], []

    def classes(self) -> list[type]:
        """Of the modules."""
        return list(map(type, self.modules))

    def owners(self) -> list[Any]:
        """Who has attributes: dicts, and classes."""
        found: list[Any] = []
        for m in self.modules:
            found.append(m.__dict__)
            if m._modules:
                found.append(m._modules)
        found += [m._buffers for m in self.theirs]           # one may be new; their values are the window's to keep
        return found + self.code.classes

    def attributes(self) -> Attributes:
        """Of all owners. Names are the same lists for as long as they are the same: they are compared by identity."""
        names: list[str] = []
        values: list[Any] = []
        sizes: list[int] = []
        for owner in self.owners():
            there = vars(owner) if isinstance(owner, type) else owner
            names.extend(there)
            values.extend(there.values())
            sizes.append(len(there))
        if names != self._names[0] or sizes != self._names[1]:
            self._names = names, sizes
        return *self._names, values


class Snapshot:
    """What is at the places now.

    Attributes:
        why: what of it cannot be put back.
    """

    def __init__(self, places: Places, objects: Sequence[Any] = ()) -> None:
        """objects: further ones, to be looked into."""
        self.places, self.why = places, ""
        self._attributes = places.attributes()
        self._classes = places.classes()
        self._rows: dict[int, tuple[Any, Any]] = {}          # containers, and what was in them
        self._tensors: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        self._seen: set[int] = set()
        self._values: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []     # how to read, and to put one
        self._states: list[Callable[[], Any]] = []           # what puts back a state
        self._deep([*places.objects, *places.code.objects, *objects])

    def _deep(self, to_see: list[Any]) -> None:
        for m in self.places.theirs:
            to_see.extend(v for k, v in vars(m).items() if type(v) not in _ATOMS and k not in _INSIDE)
        to_see.extend(self._named(self.places.code))
        while to_see and not self.why:
            value = to_see.pop()
            if type(value) not in _ATOMS and id(value) not in self._seen:
                self._seen.add(id(value))
                to_see.extend(self._take(value))
                if len(self._rows) > MOST or len(to_see) > MOST:
                    self.why = f"it reaches more than {MOST} objects"

    def _named(self, code: Code) -> Iterator[Any]:
        """What code names; it is kept."""
        for cls in code.classes:
            held, (size, names) = vars(cls), code.holding[cls]
            yield from list(held.values()) if len(held) != size else [held[n] for n in names]
        for there, name in code.globals.values():
            self._values.append((partial(there.get, name, _GONE), partial(_set_item, there, name),
                                 there.get(name, _GONE)))
            yield there.get(name)
        for cell in code.cells.values():
            if (value := _contents(cell)) is not _GONE:
                self._values.append((partial(_contents, cell), partial(setattr, cell, "cell_contents"), value))
                yield value
        if "random" in code.randoms:
            self._states.append(partial(random.setstate, random.getstate()))
        if "numpy" in code.randoms:
            import numpy
            self._states.append(partial(numpy.random.set_state, numpy.random.get_state()))

    def _take(self, value: Any) -> Iterable[Any]:
        """Keeps what is in it; what is to be looked at for that."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, (*_LISTS, dict, set)):
            self._rows[id(value)] = value, value.copy() if type(value) in (list, dict, set) else _copied(value)
            inner = () if isinstance(value, bytearray) else value.values() if isinstance(value, dict) else value
            return [*inner, *vars(value).values()] if hasattr(value, "__dict__") else list(inner)
        elif isinstance(value, (tuple, frozenset)):
            return list(value)
        elif type(value) in _STATES:
            get, put = _STATES[type(value)]
            self._states.append(partial(put, value, get(value)))
        elif _package(type(value).__module__) == "numpy":
            self._numpy(value)
        elif isinstance(value, Iterator):
            self.why = f"it has {type(value).__name__}, which cannot be set back"
        elif isinstance(value, types.MethodType):
            return [value.__self__]
        elif isinstance(value, partial):
            return [*value.args, *value.keywords.values()]
        elif (not isinstance(value, type) and _ours(type(value).__module__)) or isinstance(value, nn.Module):
            return self._object(value)
        return ()

    def _object(self, value: Any) -> Iterable[Any]:
        found = []
        if hasattr(value, "__dict__"):
            self._rows[id(value.__dict__)] = value.__dict__, value.__dict__.copy()
            found = [v for k, v in value.__dict__.items() if k not in _INSIDE or not isinstance(value, nn.Module)]
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                held = getattr(value, name, _GONE)
                if held is not _GONE and name not in ("__dict__", "__weakref__"):
                    self._values.append((partial(getattr, value, name, _GONE),
                                         partial(object.__setattr__, value, name), held))
                    found.append(held)
        return found

    def _tensor(self, t: Tensor) -> None:
        if type(t) is Tensor and t.layout is torch.strided:
            places = self.places
            clone = places.first or t.numel() <= SMALL or id(t) in places.writes
            with torch.no_grad():
                self._tensors[id(t)] = t, t._version, t.detach().clone() if clone else None

    def _numpy(self, value: Any) -> None:
        if hasattr(value, "bit_generator"):
            self._states.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif hasattr(value, "set_state"):
            self._states.append(partial(value.set_state, value.get_state()))
        elif hasattr(value, "__array__") and value.shape and value.flags.writeable:
            self._states.append(partial(value.__setitem__, Ellipsis, value.copy()))

    def ran(self) -> str:
        """After the first run: which tensors it writes is known. Why it cannot be run again; "": it can."""
        places, why = self.places, ""
        for key, (t, version, values) in self._tensors.items():
            if t._version != version:
                places.writes.add(key)
                why = why or ("it changed a tensor in place, which it had not done before" if values is None else "")
        places.first = False
        self._tensors = {k: v if k in places.writes or v[0].numel() <= SMALL else (*v[:2], None)
                         for k, v in self._tensors.items()}
        return why

    def _attributes_differ(self, now: Snapshot | None = None) -> bool:
        names, _, values = self.places.attributes() if now is None else now._attributes
        return names is not self._attributes[0] or not all(map(is_, values, self._attributes[2]))

    def _restore_classes(self) -> None:
        for m, cls in zip(self.places.modules, self._classes):
            if type(m) is not cls:
                object.__setattr__(m, "__class__", cls)

    def _restore_attributes(self) -> None:
        names, sizes, values = self._attributes
        at = 0
        for owner, size in zip(self.places.owners(), sizes):
            before = dict(zip(names[at:at + size], values[at:at + size]))
            at += size
            if _differs(vars(owner) if isinstance(owner, type) else owner, before):
                (_put_back_class if isinstance(owner, type) else _put_back)(owner, before)

    def overwritten(self) -> bool:
        """Was a tensor that is not kept by value written in place since the first run?"""
        return any(values is None and t._version != version for t, version, values in self._tensors.values())

    def restore(self, now: Snapshot | None = None) -> None:
        """now: taken just before."""
        if self._classes != (self.places.classes() if now is None else now._classes):
            self._restore_classes()
        if self._attributes_differ(now):
            self._restore_attributes()
        for value, before in self._rows.values():
            if _differs(value, before):
                _put_back(value, before)
        for get, put, value in self._values:
            if get() is not value:
                put(value)
        for put_back in self._states:
            put_back()
        with torch.no_grad():
            for t, _, values in self._tensors.values():
                if values is not None:
                    with torch.autograd._unsafe_preserve_version_counter(t):
                        t.copy_(values)


_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state)}


def _copied(value: Any) -> Any:
    """As a plain container: its own `copy` may be the user's."""
    return dict(value.items()) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _differs(value: Any, before: Any) -> bool:
    if len(value) != len(before):
        return True
    if isinstance(before, dict):
        return not all(map(is_, value.values(), before.values())) or value.keys() != before.keys()
    if isinstance(value, set):
        return value != before
    return not all(map(is_, value, before))


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, dict):
        dict.clear(value)
        dict.update(value, before)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, before)
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(before)
    else:
        value[:] = before


def _put_back_class(cls: type, held: dict[str, Any]) -> None:
    for name in vars(cls).keys() - held.keys():
        delattr(cls, name)
    for name, value in held.items():
        if vars(cls).get(name, _GONE) is not value:
            setattr(cls, name, value)


def _set_item(there: dict[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        there.pop(name, None)
    else:
        there[name] = value
