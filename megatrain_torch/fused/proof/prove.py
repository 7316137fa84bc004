"""Proves that a module computes what its template stands for, for every input that it can get (docs/design.md).

The module's code is read by torch._dynamo (graph/reader.py): its graph, and what that depends on. `prove` runs the
graph on fake tensors of symbolic sizes, forward and backward, puts the template's meaning together from forms, and
compares numbers (values.py). What it finds holds for as long as the reading's guards do.
"""
from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...graph.reader import Graph, cached
from ..templates import Embedding, LoneNorm, Template
from . import forms
from .experts import down, expert_rows, experts_down, rows
from .layer import LayerProof
from .values import Functions, Recorder, Refused, Values, operands


class Session:
    """For one proof: a graph, and forms beside it.

    Attributes:
        known: so many expressions the module's own code makes: those with smaller numbers.
        gathered: numbers of what a key-value cache was given.
    """

    def __init__(self, graph: Graph, named: dict[int, tuple[str, Tensor]]) -> None:
        """named: by id of real tensors, weights, inputs and buffers, what they are called."""
        self.graph, self.values, self.known = graph, Values(), 0
        self.gathered: list[int] = []
        self.recorder = Recorder(self.values)
        self.fake = graph.fake
        self._named, self._atoms = named, {}
        self._fakes = {id(t): graph.inputs[name][1] for name, t in graph.real.items() if isinstance(t, Tensor)}

    def reads(self, real: Tensor) -> bool:
        """Does the module's code read this tensor?"""
        return id(real) in self._fakes

    def atom(self, real: Tensor) -> Tensor:
        """The fake tensor that stands for a weight, an input or a buffer."""
        if id(real) not in self._atoms:
            like, (name, _) = self._fakes.get(id(real), real), self._named.get(id(real), ("a tensor of its own", real))
            with self.fake:
                t = torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
            self.values.atom(name, t)
            wants = real.requires_grad or (name == "input" and t.is_floating_point())
            self._atoms[id(real)] = t.requires_grad_() if wants else t
        return self._atoms[id(real)]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        device = next((t.device.type for t in self._fakes.values()), "cpu")
        with torch.enable_grad(), torch.autocast(device, enabled=False), self.fake, self.recorder, \
                Functions(self.values):
            yield

    def numbers(self, run: Callable[[], Tensor], leaves: Sequence[Tensor]) -> list[int | None]:
        """Of what `run` gives, of the gradient of each leaf for a fixed gradient of that, and of what a cache was
        given."""
        self.gathered.clear()
        with self.recording():
            y = run()
            with torch.no_grad():
                dy = torch.empty_like(y)
            shape = tuple(map(str, y.shape))
            self.values.put(dy, self.values.number(("atom", "dy", str(y.dtype), shape), shape))
            grads: Any = [None] * len(leaves)
            if y.requires_grad:
                grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
            return [self.values.of(y), *(None if g is None else self.values.of(g) for g in grads), *self.gathered]

    def gather(self, *tensors: Tensor) -> None:
        self.gathered += map(self.values.of, tensors)

    def choose(self, what: str, candidates: Iterable[tuple[Any, Callable[[], Any]]]) -> tuple[Any, Any]:
        """The first candidate that gives what the module's own code has too, and that.

        Raises:
            Refused: none does.
        """
        for candidate, run in candidates:
            try:
                out = run()
            except (RuntimeError, IndexError, Refused):      # sizes, or parts, that are not for this form
                continue
            numbers = [self.values.of(t) for t in (out if isinstance(out, tuple) else (out,))]
            if all(n < self.known for n in numbers):
                return candidate, out
        raise Refused(f"{what}: {self.difference()}")

    def difference(self, ours: Sequence[int | None] = (), theirs: Sequence[int | None] | None = None) -> str:
        """What the module computes and no form has made, tried ones among them: the first such expression."""
        every = set(range(self.known)) if theirs is None else self._within(theirs)
        strange = sorted(n for n in every - self.values.made - self._within(ours)
                         if self.values.keys[n][0] not in ("atom", "empty", "new_empty"))
        if strange:
            where = self.values.places.get(strange[0], "")
            return f"no template has its {self.values.told(strange[0])}" + (f" ({where})" if where else "")
        missing = sorted(self._within(ours) - every)
        return f"it lacks the template's {self.values.told(missing[0])}" if missing else "its gradients differ"

    def _within(self, numbers: Sequence[int | None]) -> set[int]:
        found: set[int] = set()
        todo = [n for n in numbers if n is not None]
        while todo:
            n = todo.pop()
            if n not in found:
                found.add(n)
                todo.extend(operands(self.values.keys[n]))
        return found


class _Run(torch.fx.Interpreter):
    """The module's graph on the session's tensors."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.graph.module, garbage_collect_values=False)
        self.session = session
        values = session.values
        self.opaque = {cached(): self._cached, rows(): partial(expert_rows, values),
                       down(): partial(experts_down, values)}

    def placeholder(self, target: str, args: Any, kwargs: Any) -> Any:
        graph = self.session.graph
        real = graph.real[target]
        return self.session.atom(real) if isinstance(real, Tensor) else graph.inputs[target][1]

    def run_node(self, node: Any) -> Any:
        self.session.recorder.place = _place(node)
        return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        run = self.opaque.get(target)
        return super().call_function(target, args, kwargs) if run is None else run(*args, **kwargs)

    def _cached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.session.gather(keys, values)
        return keys, values


def _place(node: Any) -> str:
    """file:line of the module's code that made it."""
    lines = re.findall(r'File "(?:[^"]*[/\\\\])?([^"]*)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(lines[-1]) if lines else ""


def prove(graph: Graph | None, template: Template, weights: dict[str, Tensor], x: Tensor, kwargs: dict[str, Any],
          buffers: dict[str, Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
    """The settings of the template by which it is what the graph computes.

    Args:
        weights: by name, as the module read them. x, kwargs: what it was called with. buffers: by name.
        numbers: that the module's attributes are; a router's factor is one of them.

    Raises:
        Refused: it is not proved; the text says what is to blame.
    """
    _check_torch()
    template = template.set_as(template.settings)        # what is found is put into one of its own
    named = {id(t): (n, t) for n, t in weights.items()}
    named |= {id(t): (f"buffer {n}", t) for n, t in buffers.items()}
    for name, value in kwargs.items():
        for i, t in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if isinstance(t, Tensor):
                named[id(t)] = (f"{name}[{i}]" if isinstance(value, tuple | list) else name), t
    named[id(x)] = "input", x
    if graph is None:
        raise Refused("it gives something else than one tensor that it made")
    session = Session(graph, named)
    try:
        run = _Run(session)
        leaves = [a for t in (x, *weights.values()) if (a := session.atom(t)).requires_grad]
        theirs = session.numbers(lambda: _only(run.run(*graph.real.values())), leaves)
        session.known, session.values.made = len(session.values.keys), set()
        ours = session.numbers(lambda: _meaning(session, template, weights, x, kwargs, buffers, numbers), leaves)
        if ours != theirs:
            raise Refused(session.difference(ours, theirs))
    except Refused:
        raise
    except Exception as error:               # whatever cannot be run on fake tensors is not proved
        raise Refused(f"its code cannot be followed: {_brief(error)}") from error
    finally:
        session.values.forget()
    return template.settings


def _only(out: Any) -> Tensor:
    """Raises: Refused: it is more than one tensor, or none."""
    if not isinstance(out, tuple | list) or len(out) != 1 or not isinstance(out[0], Tensor):
        raise Refused("its forward gives something else than one tensor")
    return out[0]


def _meaning(session: Session, template: Any, weights: dict[str, Tensor], x: Tensor, kwargs: dict[str, Any],
             buffers: dict[str, Tensor], numbers: Sequence[float]) -> Tensor:
    w = {n: session.atom(t) for n, t in weights.items()}
    if isinstance(template, Embedding):
        return F.embedding(session.atom(x), w["weight"], template.padding)
    if isinstance(template, LoneNorm):
        norm = template.norm
        norm.style, y = session.choose(norm.weight, (
            (style, lambda form=form: form(session.atom(x), w["weight"], norm.eps)) for style, form in forms.NORMS))
        return y
    return LayerProof(session, template, w, kwargs, buffers, numbers).whole(session.atom(x))


def _check_torch() -> None:
    """Raises: Refused: a function that forms are written with is another's, so that both sides would be wrong."""
    for name in ("linear", "scaled_dot_product_attention", "silu", "gelu", "softmax", "rms_norm", "embedding"):
        function = getattr(F, name)
        if isinstance(function, types.FunctionType) and function.__globals__ is not vars(F):
            raise Refused(f"torch.nn.functional.{name} is not torch's own")


def _brief(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]


__all__ = ["prove"]
