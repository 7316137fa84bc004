"""Is a module still the one that was proved? Looked at once a pass, for all windows at once.

What a module is made of are objects: its class and what that has, what lies in its `__dict__` (children, numbers,
flags, functions), its parameters, its configuration, the globals that its code read. A snapshot notes them, and a look
compares identities: in C where there are many (`_core.changed`). An object that is another is a change, even if it is
equal to the one before; then the window is looked into anew. Nothing here keeps a module alive: what can be held weakly
is.
"""
from __future__ import annotations

import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ... import _core
from ...base.codes import holds_codes
from .case import is_config, is_note

OFTEN = 16           # a window that has been so many different structures runs its own code from then on

# Whose it is, the owner's class, by which name it lies in the owner's __dict__ (None: that itself), what was in it.
Part = tuple[Any, type, str | None, tuple[Any, ...]]


def held(value: Any) -> Any:
    """What is compared with the value from now on: for dicts and lists, whose contents are parts of their own, their
    type; else a weak reference, or the value where there is none to such."""
    if isinstance(value, dict | list):
        return dict if isinstance(value, dict) else list
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def is_held(was: Any, value: Any) -> bool:
    """As csrc/bind/window.c."""
    if was is value or (isinstance(was, weakref.ref) and was() is value):
        return value is not None or was is None
    return was in (dict, list) and isinstance(value, was)


def _contents(place: dict[Any, Any] | list[Any]) -> tuple[Any, ...]:
    values = place if isinstance(place, list) else _flat(place)
    return tuple(map(held, values))


def parts_of(module: nn.Module) -> list[Part]:
    """Of all modules in it, and of what configures them, each once."""
    return [part for owner in owners_of(module) for part in _own_parts(owner)]


def owners_of(module: nn.Module) -> list[Any]:
    """All modules in it, and what configures them."""
    found = {id(m): m for m in module.modules()}
    todo = list(found.values())
    while todo:
        for value in vars(todo.pop()).values():
            if is_config(value) and id(value) not in found:
                found[id(value)] = value
                todo.append(value)
    return list(found.values())


def unfollowed(module: nn.Module, names: set[str], any_of_own: bool) -> str:
    """Of the attributes that are read, one whose change would not be seen; "" where there is none.

    names: what attributes are read. any_of_own: of modules and configurations themselves, any.
    """
    for owner in owners_of(module):
        for name, value in vars(owner).items():
            torchs = isinstance(owner, nn.Module) and (name in _TORCHS or is_note(name, owner))
            if not torchs and (any_of_own or name in names) and not _is_followed(value):
                return f"{name}, a {type(value).__name__}"
        for kind in type(owner).__mro__:
            for name in () if _is_library(kind) else names.intersection(vars(kind)):
                if not name.startswith("__") and not _is_followed_of_class(vars(kind)[name]):
                    return f"{name}, a {type(vars(kind)[name]).__name__} of class {kind.__name__}"
    return ""


_LEAVES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module, type,
           types.FunctionType, types.BuiltinFunctionType, types.MethodType, enum.Enum)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_leaf, value))
    return isinstance(value, _LEAVES) or is_config(value)


def _is_followed(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_leaf, value))
    if isinstance(value, dict):
        return all(map(_is_leaf, value.values()))
    if type(value) is functools.partial:
        return all(map(_is_leaf, (value.func, *value.args, *value.keywords.values())))
    return _is_leaf(value) or _is_library(type(value)) or holds_codes(value)


def _is_followed_of_class(value: Any) -> bool:
    if isinstance(value, property):
        return isinstance(value.fget, types.FunctionType)
    return _is_followed(value) or isinstance(value, staticmethod | classmethod)


def _is_library(kind: type) -> bool:
    """torch's own, transformers' but its models, ours; of Python's, what cannot change."""
    home = kind.__module__
    return kind is object or home.startswith(("torch.", __package__.split(".")[0])) or (
        home.startswith("transformers.") and not home.startswith("transformers.models."))


def _own_parts(owner: Any) -> Iterator[Part]:
    """Its attributes, its children, parameters and buffers, and lists and dicts of its own; torch's dicts of hooks are
    asked for at each call."""
    attributes, ref = owner.__dict__, weakref.ref(owner)
    yield ref, type(owner), None, _contents(attributes)
    for name, value in attributes.items():
        own = name in ("_modules", "_parameters", "_buffers") or not (isinstance(owner, nn.Module) and name in _TORCHS)
        if own and isinstance(value, dict | list):
            yield ref, type(owner), name, _contents(value)


_TORCHS = frozenset(vars(nn.Module()))


class Watch:
    """All windows of a model that have templates."""

    def __init__(self) -> None:
        self.code = Code()
        self._parts: weakref.WeakKeyDictionary[Any, list[Part]] = weakref.WeakKeyDictionary()
        self._all: list[Part] | None = None          # of all windows, and whose each is
        self._owners: list[weakref.ref[Any]] = []

    def add(self, window: Any, module: nn.Module) -> None:
        """From now on, as it is now."""
        self._parts[window] = parts_of(module)
        self.code.add_classes({kind for _, kind, _, _ in self._parts[window]})
        self.code.add_values(module)
        self._all = None

    def _gather(self) -> list[Part]:
        if self._all is None:
            self._all, self._owners = [], []
            for window, parts in self._parts.items():
                self._all += parts
                self._owners += [weakref.ref(window)] * len(parts)
        return self._all

    def look(self) -> tuple[list[Any], bool]:
        """Windows that are not what they were; and whether code changed that they share, in which case it is all."""
        if self.code.changed():
            self.code = Code()
            return list(self._parts), True
        parts, found = self._gather(), {}
        at = _core.changed(parts, 0)
        while at >= 0:
            window = self._owners[at]()
            if window is not None:
                found[window] = None
            at = _core.changed(parts, at + 1)
        return list(found), False


class Code:
    """Functions that run for many modules: of their classes, and globals that they read."""

    def __init__(self) -> None:
        self._classes: weakref.WeakKeyDictionary[type, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._functions: dict[int, tuple[Any, Any, Any, Any]] = {}
        self._partials: dict[int, tuple[Any, Any]] = {}
        self._registries = [(r, _contents(r)) for r in _registries()]

    def add_classes(self, kinds: set[type]) -> None:
        for kind in kinds:
            for c in kind.__mro__:
                if c is object or c in self._classes:
                    continue
                self._classes[c] = _of_class(c)
                for value in vars(c).values():
                    self._add_function(value.fget if isinstance(value, property) else value)

    def add_values(self, module: nn.Module) -> None:
        """Functions that lie in modules, and what partial ones were given."""
        for m in module.modules():
            for value in vars(m).values():
                self._add_function(getattr(value, "__func__", value) if isinstance(value, types.MethodType) else value)
                if type(value) is functools.partial:
                    self._partials[id(value)] = weakref.ref(value), _said(value)

    def add_globals(self, names: Iterable[tuple[Any, str]]) -> None:
        """names: a module's dict, or a class', and a name in it, or one that is not yet there."""
        for names_, name in names:
            if (id(names_), name) not in self._globals:
                value = names_.get(name)
                self._globals[id(names_), name] = names_, held(value)
                self._add_function(value)
                if isinstance(value, type) and not value.__module__.startswith(("torch", "builtins", "typing")):
                    self.add_classes({value})

    def _add_function(self, value: Any) -> None:
        while isinstance(value, types.FunctionType) and id(value) not in self._functions:
            said = value.__code__, value.__defaults__, value.__kwdefaults__
            self._functions[id(value)] = weakref.ref(value), *said
            value = getattr(value, "__wrapped__", None)

    def changed(self) -> bool:
        return not (all(_alike(was, c) for c, was in self._classes.items())
                    and all(p() is None or _said(p()) == was for p, was in self._partials.values())
                    and all(is_held(was, names.get(name)) for (_, name), (names, was) in self._globals.items())
                    and all(map(_as_it_was, self._functions.values()))
                    and all(_contents(r) == was for r, was in self._registries))


def _of_class(c: type) -> tuple[Any, ...]:
    """What is in it, and in its lists and dicts."""
    values = vars(c).values()
    return (*map(held, values), *(_contents(v) for v in values if type(v) in (list, dict)))


def _alike(was: tuple[Any, ...], c: type) -> bool:
    values = vars(c).values()
    inner = [v for v in values if type(v) in (list, dict)]
    if len(was) != len(values) + len(inner) or not all(map(is_held, was, values)):
        return False
    return all(len(w) == len(_contents(v)) and all(map(is_held, w, v if type(v) is list else _flat(v)))
               for w, v in zip(was[len(values):], inner))


def _flat(d: dict[Any, Any]) -> Iterator[Any]:
    return (v for pair in dict.items(d) for v in pair)


def _said(p: functools.partial[Any]) -> tuple[Any, ...]:
    return p.func, p.args, *p.keywords.items()


def _as_it_was(said: tuple[Any, Any, Any, Any]) -> bool:
    ref, *before = said
    f = ref()
    return f is not None and all(map(operator.is_, before, (f.__code__, f.__defaults__, f.__kwdefaults__)))


def _registries() -> Iterator[dict[str, Any]]:
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


__all__ = ["OFTEN", "Code", "Watch"]
