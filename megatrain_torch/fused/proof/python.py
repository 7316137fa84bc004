"""Is the Python that a forward runs a function of its tensors? What numbers (values.py) do not show.

Counters, clocks, the environment, globals that change: none of them is an operation on a tensor. So the code that ran
is collected while it runs, and read: it may not store into anything that outlives the call, call anything but tensors'
functions and a few of Python's own, or read a global that is not plain. What it did read that may change later
(globals, functions) is noted, and belongs to what is watched from then on (watch.py).

torch's, transformers' and PEFT's own libraries are trusted, the models of the second are not.
"""
from __future__ import annotations

import builtins
import dis
import functools
import gc
import numbers
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import mpmath
import sympy
import torch
import typing_extensions
from torch import nn

from .case import Refused, is_config

Frame = types.FrameType
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# torch, and what it is made with: sizes are sympy's.
_TORCH = (*(os.path.dirname(m.__file__ or "?") + os.sep for m in (torch, sympy, mpmath)), typing_extensions.__file__)
_STDLIB = os.path.dirname(os.__file__) + os.sep

# Of Python's functions, those that are functions of their arguments. print is not: a template would print nothing.
_PURE = frozenset((
    "abs all any bool callable complex dict divmod enumerate filter float format frozenset getattr hasattr int "
    "isinstance issubclass len list map max min pow range repr reversed round set slice sorted str sum super tuple "
    "zip ValueError TypeError RuntimeError KeyError AttributeError NotImplementedError AssertionError IndexError "
    "Exception NotImplemented Ellipsis True False None property staticmethod classmethod").split())
_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "DELETE_GLOBAL",
           "IMPORT_NAME", "YIELD_VALUE", "GEN_START", "SEND")
# Attributes by which Python looks at itself, or tensors at their memory.
_INSIDE = frozenset(("__class__", "__dict__", "__globals__", "__code__", "__closure__", "f_back", "f_locals",
                     "_getframe", "data_ptr", "_version", "grad_fn", "is_leaf", "_base", "storage_offset",
                     "untyped_storage", "needs_input_grad"))
_CHANGES = frozenset(("append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "popitem", "add",
                      "discard", "appendleft", "popleft", "sort", "reverse", "__setitem__", "__delitem__", "send"))
# Modules of the standard library, and of torch, whose Python functions are functions of their arguments.
_LIBRARY = ("contextlib", "functools", "collections", "typing", "enum", "abc", "operator", "types", "_collections_abc",
            "dataclasses", "copy", "math", "numbers", "inspect", "re")
_TENSORS = ("torch.nn.", "torch._tensor", "torch._subclasses.fake_tensor", "torch.fx.experimental.sym_node",
            "torch.fx.experimental.recording", "torch.functional", "torch.overrides",
            "torch.autograd.", "torch.amp.",
            "torch.utils._contextlib", "torch._jit_internal", "torch._VF", "torch.utils._device", "torch.special")
_MODULES = ("torch", "transformers", "math", "functools", "typing", "collections", "einops", "operator", "contextlib")
_STATES = ("is_grad_enabled", "is_tracing", "_get_tracing_state", "is_scripting", "is_compiling", "finfo", "iinfo",
           "set_autocast_enabled",
           "set_autocast_dtype", "autocast_increment_nesting", "autocast_decrement_nesting", "_set_grad_enabled",
           "clear_autocast_cache", "set_grad_enabled")


def trusted(filename: str) -> bool:
    """Is this torch's, transformers' or PEFT's library, or ours?"""
    return _trusted(filename, _file("transformers"), _file("peft"))


@functools.lru_cache(4096)                   # asked of every function that runs
def _trusted(filename: str, transformers: str, peft: str) -> bool:
    """transformers, peft: the packages' own files, "" before they are imported."""
    if filename.startswith((*_TORCH, _OURS)):
        return True
    home = _home(transformers)
    if home and filename.startswith(home) and not filename.startswith(home + "models" + os.sep):
        return True
    home = _home(peft)
    return bool(home) and filename.startswith(home)


def _file(package: str) -> str:
    return getattr(sys.modules.get(package), "__file__", None) or ""


def _home(file: str) -> str:
    """The folder that a package's code lies in."""
    return os.path.dirname(file) + os.sep if file else ""


def _skipped(frame: Frame) -> bool:
    """Is its code trusted, or the standard library's? Code that was made at run time counts as its module's."""
    name = frame.f_code.co_filename
    if name.startswith("<"):
        if frame.f_globals.get("__name__", "").startswith("namedtuple_"):        # what collections made
            return True
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        name = getattr(module, "__file__", None) or ("" if module is not None and name.startswith("<frozen") else "?")
        if not name:
            return True
    return trusted(name) or _standard(name)


def _importing(frame: Frame | None) -> bool:
    """Does it run because a module is being imported? torch imports some of its own late; a module's code may not."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _standard(filename: str) -> bool:
    return filename.startswith(_STDLIB) and "-packages" not in filename


def outsider(depth: int) -> str:
    """file:line of the frame so many calls up, unless it is trusted or the standard library's."""
    frame = sys._getframe(depth)
    while frame.f_globals.get("__name__") in ("torch._tensor", "torch.overrides") and frame.f_back is not None:
        frame = frame.f_back
    return "" if _skipped(frame) else _at(frame.f_code, frame.f_lineno)


def innermost() -> str:
    """file:line of the innermost frame that is not trusted."""
    frame: Frame | None = sys._getframe(2)
    while frame is not None:
        if not _skipped(frame):
            return _at(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _at(code: types.CodeType, line: int | None) -> str:
    return f"{os.path.basename(code.co_filename)}:{line or code.co_firstlineno}"


class _Eye:
    """A witness's function, told from others' profilers."""

    witness = True

    def __init__(self, see: Any) -> None:
        self.see = see

    def __call__(self, frame: Frame, event: str, arg: Any) -> None:
        self.see(frame, event, arg)


class Witness:
    """Around a run of a module's code: collects what ran.

    Attributes:
        globals: by code that ran, the globals that it saw.
        library: of torch's modules, the same: their code is trusted, but others may put theirs in its place.
        held: containers that were changed or handed over, to see whether they outlive the call.
    """

    def __init__(self) -> None:
        self.globals: dict[types.CodeType, dict[str, Any]] = {}
        self.library: dict[types.CodeType, dict[str, Any]] = {}
        self.held: list[tuple[Any, str, str]] = []
        self.wrong = ""
        self._before: Any = None

    def __enter__(self) -> Witness:
        """A profiler of the user's waits meanwhile, and so do collections, whose callbacks are nobody's forward."""
        self._collects = gc.isenabled()
        gc.disable()
        self._before = sys.getprofile()
        if hasattr(self._before, "disable"):             # cProfile's, which is no function
            self._before.disable()
        sys.setprofile(_Eye(self._see))
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self._collects:
            gc.enable()
        if hasattr(self._before, "enable"):
            self._before.enable()
        else:
            sys.setprofile(self._before)

    def _see(self, frame: Frame, event: str, arg: Any) -> None:
        if event == "call":
            self._called(frame)
        elif event == "c_call" and not self.wrong and not _skipped(frame) and not _importing(frame):
            self._called_c(frame, arg)

    def _called(self, frame: Frame) -> None:
        code, name = frame.f_code, frame.f_code.co_filename
        if trusted(name):
            self._called_trusted(frame)
            return
        if _skipped(frame):
            caller = frame.f_back
            module = frame.f_globals.get("__name__", "")
            if caller is not None and not _skipped(caller) and module.split(".")[0] not in _LIBRARY:
                self._blame(caller, f"calls {module}.{code.co_name}")
            return
        if _importing(frame):
            return
        self.globals.setdefault(code, frame.f_globals)
        for n, value in frame.f_locals.items():
            if type(value) in (list, dict, set):
                self.held.append((value, "is given a container that outlives the call", _at(code, None)))
            if n in code.co_freevars and n != "__class__":
                self._blame(frame, f"reads {n}, of the function around it")
            elif n != ".0" and not _is_given(value):
                self._blame(frame, f"is given {n}, a {type(value).__name__}")

    def _called_trusted(self, frame: Frame) -> None:
        caller = frame.f_back
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.nn.modules."):
            self.library.setdefault(frame.f_code, frame.f_globals)
        if caller is None or _skipped(caller) or not module.startswith("torch"):
            return
        name = frame.f_code.co_name                      # torch's own __bool__ is a size's, and leaves a guard
        if not module.startswith(_TENSORS) and name not in _STATES and (module, name[:2]) != ("torch", "__"):
            self._blame(caller, f"calls {module}.{frame.f_code.co_name}")

    def _called_c(self, frame: Frame, function: Any) -> None:
        name, owner = getattr(function, "__name__", "?"), getattr(function, "__self__", None)
        if (name in _CHANGES and type(owner) in (list, dict, set)) or type(owner).__name__ in ("deque", "OrderedDict"):
            self.held.append((owner, f"changes a {type(owner).__name__} that outlives the call", _at(
                frame.f_code, frame.f_lineno)))
            return
        module = getattr(function, "__module__", None) or type(owner).__module__
        if module == "builtins" or (isinstance(owner, types.ModuleType) and owner is builtins):
            if owner is builtins and name not in _PURE and name not in ("__build_class__",):
                self._blame(frame, f"calls {name}()")
            elif owner is not builtins and type(owner).__module__ != "builtins" and not isinstance(owner, type):
                self._blame(frame, f"calls {type(owner).__name__}.{name}()")
            return
        if module in ("math", "_operator", "operator", "_functools", "functools", "itertools", "torch._C._nn"):
            return
        if module.startswith("torch"):
            self._called_torch(frame, function, name, owner)
        elif isinstance(owner, torch.Tensor | torch.Size | torch.SymInt):
            pass
        else:
            self._blame(frame, f"calls {module}.{name}()")

    def _called_torch(self, frame: Frame, function: Any, name: str, owner: Any) -> None:
        """Tensors' functions are expressions; of torch's state few things may be asked."""
        if isinstance(owner, torch.Tensor) or owner is None or name in _STATES:
            return
        if getattr(owner, "__name__", "") in ("_VariableFunctionsClass", "_VariableFunctions", "torch._C._nn",
                                              "torch._C._special", "torch._C._linalg", "torch._C._fft"):
            return
        if type(owner).__name__ in ("_VariableFunctionsClass", "FunctionMeta") or isinstance(owner, type):
            return
        self._blame(frame, f"calls torch's {name}()")

    def _blame(self, frame: Frame, what: str) -> None:
        self.wrong = self.wrong or f"{what} ({_at(frame.f_code, frame.f_lineno)})"

    # ---- after the run ----

    def check(self) -> None:
        """Raises:
            Refused: what ran is no function of its tensors.
        """
        if self.wrong:
            raise Refused(f"its code {self.wrong}")
        for code, names in self.globals.items():
            _read(code, names)
        held, self.held = self.held, []
        while held:
            container, what, where = held.pop()
            ours = 2 + sum(other is container for other, _, _ in held)      # this name, and the count's own
            if sys.getrefcount(container) > ours:
                raise Refused(f"its code {what} ({where})")

    def used(self) -> Iterator[tuple[Any, str]]:
        """What the code read by name of modules, its own and others, and of tensors' methods: where, and the name."""
        for code, names in (*self.globals.items(), *self.library.items()):
            for name in globals_of(code):
                yield names, name
                yield from _of_module(names.get(name), code.co_names)
            for name in code.co_names:
                if hasattr(torch.Tensor, name):
                    yield from ((kind, name) for kind in _METHODS)

    def attributes(self) -> tuple[set[str], bool]:
        """Names of which the code that ran may have read attributes; True: of any, since it may put names together."""
        found: set[str] = set()
        for code in self.globals:
            found.update(code.co_names, *(c.split(".") for c in code.co_consts if isinstance(c, str)))
        return found, "getattr" in found


def _of_module(module: Any, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """Of a module that code reads, what may be meant by these names."""
    if isinstance(module, types.ModuleType):
        for name in names:
            if name in vars(module):
                yield vars(module), name
                if name in ("nn", "functional"):
                    yield from _of_module(vars(module)[name], names)


_METHODS = vars(torch.Tensor), vars(torch._C.TensorBase)
# What a function may be given: what is a part of a structure or a call, or cannot change.
_GIVEN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor, torch.Size,
          torch.SymInt, torch.SymFloat, torch.SymBool, nn.Module, type, types.FunctionType, types.BuiltinFunctionType,
          types.MethodType, range, slice, types.EllipsisType)


def _is_given(value: Any) -> bool:
    """A container may be given if it does not outlive the call (Witness.check); not so in another."""
    if isinstance(value, list | set):
        return all(map(_is_fixed, value))
    if isinstance(value, dict):
        return all(map(_is_fixed, value.values()))
    return _is_fixed(value)


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    return (type(value).__module__ or "").startswith(("torch.", "transformers.", __package__)) \
        or isinstance(value, _GIVEN) or is_config(value)


def globals_of(code: types.CodeType) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _read(code: types.CodeType, names: dict[str, Any]) -> None:
    kinds = [names.get(n, vars(builtins).get(n)) for n in globals_of(code)]
    if isinstance in kinds and any(isinstance(k, type) and issubclass(k, int | float | numbers.Number) for k in kinds):
        raise Refused(f"its code asks whether something is a number ({_at(code, None)})")
    for i in dis.get_instructions(code):
        line = i.positions.lineno if i.positions else None
        if i.opname in _STORES or (i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars):
            raise Refused(f"its code stores into something ({_at(code, line)}: {i.argval or 'a subscript'})")
        if i.opname in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"):
            raise Refused(f"its code catches exceptions ({_at(code, line)})")
        if i.opname in ("LOAD_ATTR", "LOAD_METHOD") and i.argval in _INSIDE:
            raise Refused(f"its code looks at {i.argval} ({_at(code, line)})")
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            _plain_global(code, line, i.argval, names)


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, types.FunctionType,
          types.BuiltinFunctionType, types.ModuleType)


def _plain_global(code: types.CodeType, line: int | None, name: str, names: dict[str, Any]) -> None:
    if name not in names:
        if name not in _PURE and hasattr(builtins, name):
            raise Refused(f"its code uses {name}() ({_at(code, line)})")
        return
    value = names[name]
    if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] not in _MODULES:
        raise Refused(f"its code uses the module {value.__name__} ({_at(code, line)})")
    if isinstance(value, type):
        home = value.__module__
        if home.startswith(("torch._subclasses", "torch.fx", "torch.utils._python_dispatch")):
            raise Refused(f"its code looks at {name} ({_at(code, line)})")
        return
    home = type(value).__module__
    if isinstance(value, tuple):
        fine = all(isinstance(v, _PLAIN) for v in value)
    else:
        fine = isinstance(value, _PLAIN) or home.startswith(("transformers.", "typing", "logging")) \
            or (isinstance(value, nn.Module) is False and home.startswith("torch."))
    if not fine:
        raise Refused(f"its code reads the global {name}, a {type(value).__name__} ({_at(code, line)})")


__all__ = ["Witness", "globals_of", "innermost", "outsider", "trusted"]
