"""Where a module and the forms of a template are run beside each other, on fake tensors of symbolic sizes."""
from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .case import put
from .python import Witness, innermost, outsider
from .values import Functions, Recorder, Refused, Values, operands

# Sizes that stand for B and S where one is asked for: primes, that no module has as sizes of its own.
ROWS, TOKENS = 1009, 1013


class Session:
    """For one proof: what it made is gone when it is left.

    Attributes:
        rows, tokens: B and S, symbols; B is 1 where rows are: a size of one is no size like others.
    """

    def __init__(self, device: torch.device, one_row: bool, one_token: bool) -> None:
        self.device, self.values = device, Values()
        self.env = ShapeEnv()
        self.fake = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=False)
        self.fake.cache_enabled = False      # of symbols' sizes it takes longer than it saves
        both = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
        shape = self.fake.from_tensor(torch.empty(ROWS, TOKENS, dtype=torch.int8), symbolic_context=both).shape
        self.rows: Any = 1 if one_row else shape[0]
        self.tokens: Any = 1 if one_token else shape[1]
        self.recorder = Recorder(self.values)
        self.recorder.where = innermost

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.values.forget()

    def atom(self, name: str, shape: Sequence[Any], dtype: torch.dtype, grad: bool = False) -> Tensor:
        with self.fake:
            t = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.values.atom(name, t)
        return t.requires_grad_() if grad else t

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks on saved tensors are the user's, and not for fake ones."""
        torch._C._autograd._push_saved_tensors_default_hooks(_itself, _itself)
        try:
            with torch.enable_grad(), torch.autocast(self.device.type, enabled=False), self.fake, self.recorder, \
                    Functions(self.values, outsider):
                yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def numbers(self, run: Callable[[], Tensor], leaves: Sequence[Tensor]) -> list[int | None]:
        """Of what `run` gives, and of the gradient of each leaf for a fixed gradient of that."""
        with self.recording():
            y = run()
            if not isinstance(y, Tensor):
                raise Refused("its forward gives something else than one tensor")
            dy = self._of_output(y)
            grads = _backward(y, list(leaves), dy)
            return [self.values.of(y), *(None if g is None else self.values.of(g) for g in grads)]

    def parts(self, run: Callable[[], Any]) -> list[int | None]:
        """Of all that `run` gives, without gradients."""
        with self.recording(), torch.no_grad():
            return [self.values.of(t) if isinstance(t, Tensor) else None for t in _each(run())]

    def _of_output(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            dy = torch.empty_like(y)
        self.values.put(dy, self.values.number(("atom", "dy", str(y.dtype), tuple(map(str, y.shape))),
                                               tuple(map(str, y.shape))))
        return dy

    def watched(self, run: Callable[[], Any]) -> tuple[Any, Witness]:
        """What run() gives, of a module's own code, if that is a function of its tensors.

        Raises:
            Refused: it is not; or it looks at sizes.
        """
        witness, before = Witness(), len(self.env.guards)
        self.values.wrong = None
        with unspoken(self.values), witness:
            found = run()
        witness.check()
        if self.values.wrong is not None:
            raise self.values.wrong                      # and the module's own code went on
        for guard in self.env.guards[before:]:
            raise Refused(f"it looks at sizes: {guard.expr}")
        return found, witness

    def match(self, theirs: list[int | None], candidates: Iterable[tuple[Any, Callable[[], list[int | None]]]]) -> Any:
        """The first candidate that gives these numbers.

        Raises:
            Refused: none does.
        """
        tried = []
        for candidate, numbers_of in candidates:
            try:
                numbers = numbers_of()
            except (RuntimeError, IndexError):           # sizes that are not for this form
                continue
            if numbers == theirs:
                return candidate
            tried.append(numbers)
        raise Refused(self.difference(theirs, tried))

    def difference(self, theirs: list[int | None], ours: list[list[int | None]]) -> str:
        """What the module computes, and no form does: the first such expression."""
        known = set().union(*(self._within(numbers) for numbers in ours)) if ours else set()
        strange = sorted(self._within(theirs) - known, key=lambda n: (self.values.keys[n][0] == "atom", n))
        if strange:
            where = self.values.places.get(strange[0], "")
            return f"no template has its {self.values.told(strange[0])}" + (f" ({where})" if where else "")
        missing = sorted(self._within(ours[0]) - self._within(theirs)) if ours else []
        return f"it lacks the template's {self.values.told(missing[0])}" if missing else "its gradients differ"

    def _within(self, numbers: list[int | None]) -> set[int]:
        found: set[int] = set()
        todo = [n for n in numbers if n is not None]
        while todo:
            n = todo.pop()
            if n not in found:
                found.add(n)
                todo.extend(operands(self.values.keys[n]))
        return found


def _backward(y: Tensor, leaves: list[Tensor], dy: Tensor) -> Any:
    """In this thread, where a witness sees it: for CUDA's tensors autograd would take one of its own."""
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(y, leaves, dy, allow_unused=True)


def _itself(t: Tensor) -> Tensor:
    return t


def _each(out: Any) -> list[Any]:
    return list(out) if isinstance(out, tuple | list) else [out]


class Number:
    """Stands for a number, and notes whether somebody looks at it. It is no int: C reads those without asking."""

    def __init__(self, value: int) -> None:
        self.value, self.looked = value, False

    @property
    def __class__(self) -> type:
        self.looked = self.looked or bool(outsider(2))
        return int

    def __getattr__(self, name: str) -> Any:
        self.looked = True
        return getattr(self.value, name)


def _noting(name: str) -> Callable[..., Any]:
    def method(self: Number, *args: Any) -> Any:
        self.looked = True
        args = tuple(a.value if type(a) is Number else a for a in args)
        if name.startswith("r") and hasattr(operator, name[1:]) and args:
            return getattr(operator, name[1:])(*args, self.value)
        found = getattr(self.value, f"__{name}__")(*args)
        return found if found is not NotImplemented or len(args) != 1 or not hasattr(operator, name) \
            else getattr(operator, name)(self.value, *args)
    return method


for _name in ("eq ne lt le gt ge hash bool index int float add radd sub rsub mul rmul floordiv rfloordiv mod rmod "
              "truediv rtruediv and rand or ror xor rxor neg abs divmod rdivmod pow rpow str repr format").split():
    setattr(Number, f"__{_name}__", _noting(_name))


@contextlib.contextmanager
def unspoken(values: Values) -> Iterator[None]:
    """A size has no name, nor a place in a dict, that a module's own code may ask for."""
    own = {name: getattr(torch.SymInt, name) for name in ("__str__", "__repr__", "__format__", "__hash__")}

    def told(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            if where := outsider(2):
                values.wrong = values.wrong or Refused(f"it looks at sizes ({where})")
            return own[name](self, *args)
        return method

    missing = [name for name in own if name not in vars(torch.SymInt)]
    for name in own:
        setattr(torch.SymInt, name, told(name))
    try:
        yield
    finally:
        for name in own:
            delattr(torch.SymInt, name) if name in missing else setattr(torch.SymInt, name, own[name])


__all__ = ["Number", "Session", "put"]
