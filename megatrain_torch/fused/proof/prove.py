"""Proves that a module computes what its template stands for, for every input that it can get (docs/design.md).

`prove` runs the module's own forward and backward on fake tensors, reads the Python that ran, puts the template's
meaning together from forms, and compares numbers. What it finds holds for one structure, one way of being called, one
set of training flags: `Case` says which, and is the key under which a verdict is kept.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..templates import Embedding, LoneNorm, Template
from ..templates.moe import SparseMLP
from ..templates.parts import given
from . import forms
from .case import Case, EmptyCache, Given, is_number
from .experts import known_loop, loop_of
from .layer import LayerProof, Parts
from .python import Witness, trusted
from .session import Number, Session, put
from .values import Refused
from .watch import unfollowed


@dataclasses.dataclass
class Proof:
    """A module's code computes what a template so set does.

    Attributes:
        settings: of the template, for its `set_as`.
        globals: by their dictionary and name, what the code read.
        looked: it read the layer's numbers, so that it holds for these alone.
    """

    settings: tuple[Any, ...]
    globals: list[tuple[dict[str, Any], str]]
    looked: bool


class _Call:
    """The arguments of a fake call, and what a reference reads of them.

    Attributes:
        gathered: numbers of what a key-value cache was given.
    """

    def __init__(self, session: Session, case: Case) -> None:
        self.kind, self.session = case.kind, session
        self.gathered: list[int] = []
        self.kwargs = {name: self._value(name, g) for name, g in case.given}
        self.numbers = [v for v in self.kwargs.values() if type(v) is Number]
        self.cos, self.sin = given(self.kwargs, "angles") or (None, None)
        self.mask = given(self.kwargs, "mask")
        self.correction: Tensor | None = None

    def _value(self, name: str, g: Any) -> Any:
        if isinstance(g, Given):
            letters = {"B": self.session.rows, "S": self.session.tokens, "C": 7}
            return self.session.atom(name, [letters.get(n, n) for n in g.sizes], g.dtype)
        if isinstance(g, tuple):
            return tuple(self._value(f"{name}[{i}]", part) for i, part in enumerate(g))
        if g is EmptyCache:
            return EmptyCache(self._gather)
        return Number(3) if isinstance(g, type) else g

    def _gather(self, *tensors: Tensor) -> None:
        self.gathered += map(self.session.values.of, tensors)

    def gathers(self, k: Tensor, v: Tensor) -> None:
        """A form says what a cache is given, where there is one."""
        if any(type(v) is EmptyCache for v in self.kwargs.values()):
            self._gather(k, v)

    def numbers_of(self, run: Any, leaves: list[Tensor]) -> list[int | None]:
        """Of what run() gives, its gradients, and what a cache was given."""
        self.gathered.clear()
        return [*self.session.numbers(run, leaves), *self.gathered]


@contextlib.contextmanager
def _bound_to_fakes(session: Session, module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Buffers of the module are fake tensors meanwhile; by name."""
    found: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for prefix, m in module.named_modules():
            fakes = {}
            for name, b in m._buffers.items():
                if isinstance(b, Tensor):
                    full = f"{prefix}.{name}" if prefix else name
                    fakes[name] = found[full] = session.atom(f"buffer {full}", b.shape, b.dtype)
            stack.enter_context(put(m._buffers, fakes))
        yield found


@contextlib.contextmanager
def _numbered(module: nn.Module, noted: list[Number]) -> Iterator[None]:
    """A layer's numbers note who looks at them meanwhile."""
    with contextlib.ExitStack() as stack:
        for m in module.modules():
            own = {n: Number(v) for n, v in vars(m).items() if is_number(n, v)}
            noted.extend(own.values())
            stack.enter_context(put(vars(m), own))
        yield


def prove(bind: Any, module: nn.Module, run: Any, template: Template, weights: dict[str, Any], device: torch.device,
          dtype: torch.dtype, case: Case) -> Proof:
    """
    Args:
        bind: a context in which the module's code reads these fake weights, by name.
        run: the module's own forward.
        weights: name -> (shape, dtype) of its parameters.
        dtype: of the input.

    Raises:
        Refused: it is not proved; the text says what is to blame.
    """
    _check_torch()
    noted: list[Number] = []
    template = template.set_as(template.settings)        # what is found is put into one of its own
    try:
        session = Session(device, case.one_row, case.one_token)
        fakes = {n: session.atom(n, shape, kind, grad=True) for n, (shape, kind) in weights.items()}
        with session, bind(fakes), _bound_to_fakes(session, module) as buffers, _numbered(module, noted):
            if isinstance(template, Embedding):
                witnesses = _embedding(session, run, template, fakes)
            elif isinstance(template, LoneNorm):
                witnesses = _lone_norm(session, module, run, template, fakes, dtype)
            else:
                witnesses = _decoder(session, module, run, template, fakes, dtype, case, buffers)
        for witness in witnesses:
            if strange := unfollowed(module, *witness.attributes()):
                raise Refused(f"its code reads {strange}")
    except Exception as error:               # whatever cannot be run on fake tensors is not proved
        refused = error if isinstance(error, Refused) else Refused(f"its code cannot be followed: {_brief(error)}")
        refused.looked = any(n.looked for n in noted)
        raise refused from error
    return Proof(template.settings, [pair for w in witnesses for pair in w.used()], any(n.looked for n in noted))


def _check_torch() -> None:
    """Raises: Refused: a function that forms are written with is another's, so that both sides would be wrong."""
    for name in ("linear", "scaled_dot_product_attention", "silu", "gelu", "softmax", "rms_norm", "embedding"):
        function = getattr(F, name)
        if isinstance(function, types.FunctionType) and not trusted(function.__code__.co_filename):
            raise Refused(f"torch.nn.functional.{name} is not torch's own")


def _brief(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]


def _embedding(session: Session, run: Any, template: Embedding, w: dict[str, Tensor]) -> list[Witness]:
    ids = session.atom("input", (session.rows, session.tokens), torch.int64)
    leaves = [w["weight"]]
    theirs, witness = session.watched(lambda: session.numbers(lambda: run(ids), leaves))
    session.match(theirs, [(None, lambda: session.numbers(
        lambda: F.embedding(ids, w["weight"], template.padding), leaves))])
    return [witness]


def _lone_norm(session: Session, module: nn.Module, run: Any, template: LoneNorm, w: dict[str, Tensor],
               dtype: torch.dtype) -> list[Witness]:
    norm = template.norm
    x = session.atom("input", (session.rows, session.tokens, norm.size), dtype, grad=True)
    leaves = [x, w["weight"]]
    theirs, witness = session.watched(lambda: session.numbers(lambda: run(x), leaves))
    norm.style = session.match(theirs, (
        (style, lambda form=form: session.numbers(lambda: form(x, w["weight"], norm.eps), leaves))
        for style, form in forms.NORMS))
    return [witness]


def _decoder(session: Session, module: nn.Module, run: Any, template: Any, w: dict[str, Tensor], dtype: torch.dtype,
             case: Case, buffers: dict[str, Tensor]) -> list[Witness]:
    proof = LayerProof(session, module, template, w, dtype)
    call = _Call(session, case)
    x = session.atom("hidden_states", (session.rows, session.tokens, template.attention.hidden), dtype, grad=True)
    sparse = isinstance(template.mlp, SparseMLP)
    call.correction = buffers.get(template.mlp.router.correction) if sparse and template.mlp.router.correction else None
    leaves = [x, *w.values()]

    with _opaque_experts(proof, module) if sparse else contextlib.nullcontext():
        theirs, witness = session.watched(lambda: call.numbers_of(lambda: run(x, **call.kwargs), leaves))
    if any(n.looked for n in call.numbers):
        raise Refused("its code looks at a number that the model is called with")
    if sparse:
        loop = loop_of(_experts_of(proof, module))
        witness.library[loop.__code__] = loop.__globals__
    proof.witnesses.append(witness)
    parts = session.match(theirs, (
        (parts, lambda parts=parts: call.numbers_of(lambda: proof.whole(parts, x, call), leaves))
        for parts in _ways(proof, call, sparse)))
    if parts.rotary is None:
        template.attention.rotary = None
    return proof.witnesses


def _ways(proof: LayerProof, call: _Call, sparse: bool) -> Iterator[Parts]:
    """What is left open when the parts are known: orders that mean the same, and whether a layer that is given angles
    turns by them."""
    t = proof.template
    norm = proof.norms()
    router = proof.router(call.correction) if sparse else None
    act = None
    if sparse:
        proof.gate()
        if t.mlp.shared:
            act = proof.activation(_act_of(proof.layer, t.mlp.shared), t.mlp.shared.act)
    else:
        act = proof.activation(_act_of(proof.layer, t.mlp), t.mlp.act)
    rotary = proof.rotary(call.cos, call.sin) if t.attention.rotary is not None and call.cos is not None else None
    orders = (True, False) if any(map(t.attention.per_head, t.norms)) else (True,)
    flats = ((True, False), (False, False), (True, True)) if sparse and t.mlp.shared else ((True, False),)
    sinks = forms.SINKS if t.attention.sinks else forms.SINKS[:1]
    for turned, *rest in itertools.product((rotary, None) if rotary else (None,), orders, flats, sinks):
        before, flat, spelled = rest
        yield Parts(norm, act, turned, router, before, *flat, spelled)


def _act_of(layer: nn.Module, half: Any) -> Any:
    mlp = layer.get_submodule(half.name)
    return next(getattr(mlp, n) for n in ("act_fn", "activation", "activation_fn") if getattr(mlp, n, None) is not None)


def _experts_of(proof: LayerProof, layer: nn.Module) -> nn.Module:
    return layer.get_submodule(proof.mlp.experts.gu.rsplit(".", 1)[0])


@contextlib.contextmanager
def _opaque_experts(proof: LayerProof, layer: nn.Module) -> Iterator[None]:
    """The experts are one function meanwhile, once their loop is known."""
    module = _experts_of(proof, layer)
    known_loop(module)

    def forward(*args: Tensor, **named: Tensor) -> Tensor:
        whole = (*args, *named.values())
        (index,) = [t for t in whole if not t.is_floating_point()]
        hidden, weights = [t for t in whole if t.is_floating_point()]
        return proof.experts(hidden, index, weights)

    with put(vars(module), {"forward": forward}):
        yield


__all__ = ["Proof", "prove"]
