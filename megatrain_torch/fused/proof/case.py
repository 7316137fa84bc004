"""What a proof holds for: the structure of a module, and how it is called. Two of a kind need one proof."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...base.codes import holds_codes
from ...graph import hf_calls

NUMBERED = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")    # attributes that number a layer
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (int, float, complex, str, bool, type(None), torch.dtype)


class Refused(Exception):
    """A computation that cannot be proved; the text says what is to blame. looked: the layer's number was read."""

    looked = False


@contextlib.contextmanager
def put(dictionary: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Entries of a dictionary, for a while."""
    missing = object()
    before = {k: dictionary.get(k, missing) for k in values}
    dictionary.update(values)
    try:
        yield
    finally:
        for k, v in before.items():
            if v is missing:
                dictionary.pop(k, None)
            else:
                dictionary[k] = v


# ---- structure -------------------------------------------------------------------------------------

def structure_of(module: nn.Module, without: type) -> tuple[Any, ...]:
    """What a module is made of, layers' numbers left out: classes, flags, numbers, functions, sizes, configuration.

    without: the type of attributes that streaming put in.
    """
    return tuple(_part(name, m, without) for name, m in module.named_modules())


def _part(name: str, m: nn.Module, without: type) -> tuple[Any, ...]:
    own = tuple((k, _value(v, m)) for k, v in m.__dict__.items()
                if k not in _TORCHS and not is_number(k, v) and not isinstance(v, without) and not is_note(k, m))
    tensors = tuple((k, None if t is None else (tuple(t.shape), t.dtype))
                    for d in (m._parameters, m._buffers) for k, t in dict.items(d))
    return name, Same(type(m)), own, tensors


def is_note(name: str, m: nn.Module) -> bool:
    """PEFT's, of how a layer's adapter was made, its full name among it: no forward reads it."""
    return name == "kwargs" and type(m).__module__.startswith("peft.tuners.")


def _value(v: Any, m: nn.Module) -> Any:
    """A value of module m as a part of a key: equal keys have equal meanings. Other objects are themselves."""
    if isinstance(v, _PLAIN):
        return type(v), v
    if isinstance(v, list | tuple):
        return type(v), tuple(_value(x, m) for x in v)
    if isinstance(v, dict):
        return type(v), tuple((_value(k, m), _value(x, m)) for k, x in v.items())
    if type(v) is functools.partial:
        return type(v), _value(v.func, m), _value(v.args, m), _value(v.keywords, m)
    if isinstance(v, types.MethodType) and v.__self__ is m:
        return type(v), Same(v.__func__)
    if holds_codes(v):                                   # nothing of it is read by a template; a layer's own
        return type(v),
    if is_config(v):                                     # of which each model has its own
        return type(v), tuple((k, _value(x, m)) for k, x in vars(v).items() if not k.startswith("_commit"))
    return Same(v)


def is_config(v: Any) -> bool:
    """A configuration, as transformers has them?"""
    return not isinstance(v, type | nn.Module | Tensor) and hasattr(v, "to_dict") and hasattr(v, "model_type")


class Same:
    """An object by its identity, held weakly if it can be: a key keeps nobody's model alive."""

    __slots__ = ("_number", "_ref", "_strong")

    def __init__(self, it: Any) -> None:
        self._number, self._strong, self._ref = id(it), None, None
        try:
            self._ref = weakref.ref(it)
        except TypeError:
            self._strong = it

    def it(self) -> Any:
        return self._strong if self._ref is None else self._ref()

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it() is not None and other.it() is self.it()


def is_number(name: str, value: Any) -> bool:
    """Is this attribute of a module the number of its layer?"""
    return name in NUMBERED and type(value) is int


def numbers_of(module: nn.Module) -> tuple[int, ...]:
    """The numbers of a layer, in the order of its modules."""
    return tuple(v for m in module.modules() for k, v in m.__dict__.items() if is_number(k, v))


# ---- calls -----------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Given:
    """A tensor that a call is given. sizes: numbers, or "B" and "S" for rows and tokens, "C" for any count."""

    sizes: tuple[Any, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Case:
    """How a module is called.

    given: by name, a Given, a tuple of them, a flag or a word, or the type of a number or a cache. kind: which
    attention. one_row, one_token: B, or S, is 1: a size of one is no size like others.
    """

    one_row: bool
    one_token: bool
    kind: str
    given: tuple[tuple[str, Any], ...]


class EmptyCache:
    """Stands for a key-value cache that has nothing yet: it gives what it is given, and tells nothing of itself."""

    def __init__(self, note: Callable[[Tensor, Tensor], None]) -> None:
        """note: is told what it is given."""
        self._note = note

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: Any, *_: Any, **__: Any
               ) -> tuple[Tensor, Tensor]:
        self._note(key_states, value_states)
        return key_states, value_states

    def __getattr__(self, name: str) -> Any:
        raise Refused(f"its code asks its key-value cache for {name}")


def case_of(x: Tensor, kwargs: dict[str, Any], kind: str) -> Case:
    """x: [B, S, ...].

    Raises:
        Refused: there is an argument that says more than a Case can.
    """
    b, s = x.shape[:2]
    return Case(b == 1, s == 1, kind, tuple((n, _given(n, v, b, s)) for n, v in sorted(kwargs.items())))


def _given(name: str, value: Any, b: int, s: int) -> Any:
    if hf_calls.is_cache(value):
        return EmptyCache                    # no other is taken
    if isinstance(value, Tensor):
        return Given(tuple(_letters(value, b, s)), value.dtype)
    if isinstance(value, tuple) and value and all(isinstance(v, Tensor) for v in value):
        return tuple(_given(name, v, b, s) for v in value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return type(value)                   # a number of tokens, say: not for a layer to look at
    raise Refused(f"called with {name}, a {type(value).__name__}")


def _letters(t: Tensor, b: int, s: int) -> Iterator[Any]:
    for d, n in enumerate(t.shape):
        if d == 0 and t.dim() > 1 and n in (1, b):
            yield "B" if n == b else 1
        elif n == s and (d < 2 or t.dim() == 4):
            yield "S"
        elif t.dim() == 1 and not t.is_floating_point():
            yield "C"
        else:
            yield n


__all__ = ["Case", "EmptyCache", "Given", "Refused", "Same", "case_of", "is_config", "is_note", "is_number",
           "numbers_of", "put", "structure_of"]
