"""Is a module still the one that was proved? Looked at once a pass, for all windows at once.

What a module is made of are objects: its class and what that has, what lies in its `__dict__` (children, numbers,
flags, functions), its parameters, its configuration, the globals that its code read. A snapshot holds on to them, and a
look compares identities: in C where there are many (`_core.changed`). An object that is another is a change, even if it
is equal to the one before; then the window is looked into anew.
"""
from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from .. import _core

OFTEN = 16           # a window that changes in so many passes runs its own code from then on
# Of a module's __dict__, what torch keeps there and a template does not depend on; hooks are looked at at each call.
_TORCHS = frozenset(("_buffers", "_non_persistent_buffers_set", "_state_dict_hooks", "_load_state_dict_pre_hooks"))

Place = dict[Any, Any] | list[Any]


class Snapshot:
    """The places of one window: dicts and lists, and what was in them."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.types = [type(m) for m in self.modules]
        self.places: list[Place] = list(_places(self.modules))
        self.before = [_contents(p) for p in self.places]


def _places(modules: list[nn.Module]) -> Iterator[Place]:
    """Each once."""
    seen: set[int] = set()
    for m in modules:
        for place in (m.__dict__, m._modules, m._parameters, *_inner(m.__dict__)):
            if id(place) not in seen:
                seen.add(id(place))
                yield place


def _inner(attributes: dict[str, Any]) -> Iterator[Place]:
    """Lists and dicts of a module's own, and what a configuration has."""
    for name, value in attributes.items():
        if type(value) in (list, dict) and name not in _TORCHS:
            yield value
        elif name == "config" and hasattr(value, "__dict__"):
            yield value.__dict__
            yield from (v for v in value.__dict__.values() if type(v) in (list, dict))


def _contents(place: Place) -> tuple[Any, ...]:
    if isinstance(place, list):
        return tuple(place)
    return tuple(v for pair in dict.items(place) for v in pair)


class Watch:
    """All windows of a model that have templates."""

    def __init__(self) -> None:
        self.snapshots: dict[Any, Snapshot] = {}
        self.code = Code()
        self._gathered = False

    def add(self, window: Any, module: nn.Module) -> None:
        """From now on, as it is now."""
        self.snapshots[window] = Snapshot(module)
        self.code.add_classes(set(self.snapshots[window].types))
        self._gathered = False

    def _gather(self) -> None:
        """What is compared, of all windows in one list each."""
        self._modules, self._types, self._places, self._before, self._owner = [], [], [], [], []
        for window, s in self.snapshots.items():
            self._modules += s.modules
            self._types += s.types
            self._places += s.places
            self._before += s.before
            self._owner += [window] * len(s.places)
        self._gathered = True

    def look(self) -> tuple[list[Any], bool]:
        """Windows that are not what they were; and whether code changed that they share, in which case it is all."""
        if self.code.changed():
            self.code = Code()
            return list(self.snapshots), True
        if not self._gathered:
            self._gather()
        found = {}
        if list(map(type, self._modules)) != self._types:
            found = dict.fromkeys(w for w, s in self.snapshots.items() if list(map(type, s.modules)) != s.types)
        at = _core.changed(self._places, self._before, 0)
        while at >= 0:
            found[self._owner[at]] = None
            at = _core.changed(self._places, self._before, at + 1)
        return list(found), False


class Code:
    """Functions that run for many modules: of their classes, and globals that they read."""

    def __init__(self) -> None:
        self._classes: dict[type, tuple[Any, ...]] = {}
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._functions: dict[int, tuple[Any, Any, Any, Any]] = {}
        self._registries: list[Place] = []
        self._registered: list[tuple[Any, ...]] = []

    def add_classes(self, kinds: set[type]) -> None:
        for kind in kinds:
            for c in kind.__mro__:
                if c in (object, nn.Module) or c in self._classes:
                    continue
                self._classes[c] = tuple(vars(c).values())
                for value in vars(c).values():
                    self._add_function(value)
        if not self._registries:
            self._registries = list(_registries())
            self._registered = [_contents(p) for p in self._registries]

    def add_globals(self, names: Iterable[tuple[dict[str, Any], str]]) -> None:
        for names_, name in names:
            if name in names_:
                value = self._globals.setdefault((id(names_), name), (names_, names_[name]))[1]
                self._add_function(value)
                if isinstance(value, type) and not value.__module__.startswith(("torch", "builtins", "typing")):
                    self.add_classes({value})

    def _add_function(self, value: Any) -> None:
        while isinstance(value, types.FunctionType) and id(value) not in self._functions:
            self._functions[id(value)] = value, value.__code__, value.__defaults__, value.__kwdefaults__
            value = getattr(value, "__wrapped__", None)

    def changed(self) -> bool:
        if not all(_alike(tuple(vars(c).values()), values) for c, values in self._classes.items()):
            return True
        if any(names.get(name) is not value for (_, name), (names, value) in self._globals.items()):
            return True
        if any(f.__code__ is not code or f.__defaults__ is not defaults or f.__kwdefaults__ is not named
               for f, code, defaults, named in self._functions.values()):
            return True
        return _core.changed(self._registries, self._registered, 0) >= 0


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _registries() -> Iterator[Place]:
    """Where transformers keeps which function is meant by "sdpa" and the like."""
    modeling = sys.modules.get("transformers.modeling_utils")
    for interface in (getattr(modeling, "AttentionInterface", None),
                      getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)):
        mapping = getattr(interface, "_global_mapping", None)
        if isinstance(mapping, dict):
            yield mapping
    local = getattr(getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None), "_local_mapping", None)
    if isinstance(local, dict):
        yield local


__all__ = ["OFTEN", "Code", "Snapshot", "Watch"]
