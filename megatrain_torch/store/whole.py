"""Weights that are not one plain tensor: codes of other packages, and experts of which some are fetched at a time.

Codes are streamed by their strands (base/codes.py); a `Whole` puts the weight together from these. A `Stacked` is a
mixture's experts in one parameter, cut into `Piece`s (base/units.py).

bitsandbytes' products keep codes, scales and their input as attributes of `ctx`, where no hook of saved tensors sees
them. A weight that lies in a slot would be held there until backward: the slot's memory is left to it, and in the end
the device has all weights. So, while a model with such weights is streamed, what these Functions keep goes through
`save_for_backward` (keep_in_sight); what they compute is theirs.
"""
from __future__ import annotations

import copy
import importlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base import patches
from ..base.codes import Format, Keeps, Strand, format_of, plain_kind
from .guard import StreamedParameter, made_kind, values_of
from .records import Record

if TYPE_CHECKING:
    from ..model.ring import Ring


class Whole:
    """A weight that is codes: records and names of its strands, of which the first stands for the weight."""

    def __init__(self, p: nn.Parameter, m: nn.Module, strands: dict[str, Record]) -> None:
        self._param, self._module, self.format = weakref.ref(p), weakref.ref(m), format_of(p)
        self.records, self.names = [*strands.values()], [*strands]
        self.records[0].whole = self

    @property
    def param(self) -> nn.Parameter:
        return self._param()

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The weight for the package's code, over tensors in the order of the records."""
        with torch.no_grad():
            out = self.format.whole(self.param, dict(zip(self.names, tensors)))
            return out.expand_codes() if self.format.expands else out

    def adopted(self) -> None:
        """Its strands are streamed: the parameter has those."""
        p = self.param
        self.format.put(p, self._module(), {n: r.param for n, r in zip(self.names, self.records)})
        if not isinstance(p, StreamedParameter):         # made of tensors, and without memory of its own
            p.__class__ = made_kind(type(p))
            p._mt, p._mt_runtime = self.records[0], self.records[0].runtime

    def given_back(self) -> None:
        """The strands have memory of their own again; and so the parameter."""
        p = self.param
        if p is None:
            return
        if plain_kind(p) is not type(p):     # made of tensors: those with memory are what they were by now
            p.__class__ = plain_kind(p)
            del p._mt, p._mt_runtime
        self.format.put(p, self._module(), {n: r.param.data for n, r in zip(self.names, self.records)})

    def copy(self) -> nn.Parameter:
        """An ordinary parameter of its package's, with the current values."""
        strands = [values_of(r.param).clone() for r in self.records]
        with torch.no_grad():
            return self.format.whole(self.param, dict(zip(self.names, strands)))


def wholes_of(records: list[Record]) -> list[Whole]:
    """Of a unit's records, whose parameters are not streamed yet."""
    there, found = {id(r.param): r for r in records}, {}
    for r in records:
        if type(r.param) is Strand:
            p, m, name = r.param.of          # a parameter with memory of its own is the first strand
            found.setdefault(id(p), (p, m, {"": there[id(p)]} if id(p) in there else {}))[2][name] = r
            del r.param.of                   # which would be held by its own strand
    return [Whole(*of) for of in found.values()]


# ---- stacks of experts ---------------------------------------------------------------------------

class Stacked:
    """A stack of experts in pieces of so many: records of its strands, and the `whole` if it is codes."""

    def __init__(self, records: list[Record], whole: Whole | None, parts: list[tuple[range, int | None]]) -> None:
        """parts: experts, and the engine's number for the cut that they are; None: their unit is one fetch."""
        self.records, self.whole = records, whole
        self.unit = records[0].unit
        self.pieces = [Piece(self, experts, number) for experts, number in parts]
        r = records[0]                   # like: of the form of the weight
        self.like = torch.empty_strided(r.shape, r.stride, dtype=r.dtype, device="meta") if whole is None else \
            torch.empty(whole.param.shape, dtype=whole.param.dtype, device="meta")

    def piece_of(self, expert: int) -> Piece:
        return self.pieces[expert // len(self.pieces[0].experts)]


class Piece:
    """Some experts of a stack. cut: the engine's number; None: its unit is fetched, or at home, whole. expands: its
    weights are made of codes, in memory of their own."""

    def __init__(self, stacked: Stacked, experts: range, cut: int | None) -> None:
        self.stacked, self.records, self.experts, self.cut = stacked, stacked.records, experts, cut
        self.expands = stacked.whole is not None

    def made(self, ring: Ring) -> Tensor:
        """[experts, ., .] on the device, fetched if need be: over a slot, or 16-bit weights made of the codes there."""
        strands, whole = ring.strands(self), self.stacked.whole
        return strands[0] if whole is None else whole.of(strands)


# ---- Functions of other packages that keep tensors out of sight ----------------------------------

def keep_in_sight(formats: Iterable[Format]) -> None:
    """The Functions of these formats, for as long as there is a streamed model."""
    for keeps in dict.fromkeys(k for format in formats for k in format.keeps):
        module: Any = importlib.import_module(keeps.module)
        holder = getattr(module, keeps.holder, None) or getattr(module.F, keeps.holder)
        patches.once(f"{keeps.module}.{keeps.name}", lambda module=module, keeps=keeps, holder=holder: patches.replaced(
            module, keeps.name, seen(getattr(module, keeps.name), keeps, holder)))


class _Saved(int):
    """In the place of a tensor: the number of the saved one."""


def seen(own: Any, keeps: Keeps, holder: type) -> Any:
    """The Function `own`, whose tensors on `ctx` are saved ones. holder: a class of objects that have some."""

    def forward(ctx: Any, a: Tensor, weight: Tensor, *args: Any) -> Any:
        out = own.forward(ctx, a, weight, *args)
        found: list[Tensor] = []

        def number(t: Tensor) -> _Saved:
            found.append(t.detach().as_subclass(Tensor))
            return _Saved(len(found) - 1)

        if any(ctx.needs_input_grad):
            if not ctx.needs_input_grad[1]:
                vars(ctx).update((name, value) for name, value in keeps.unused if name in vars(ctx))
            vars(ctx).update({name: _replaced(value, Tensor, number, holder) for name, value in vars(ctx).items()})
            ctx.save_for_backward(*found)
        if getattr(weight, "in_a_slot", False):
            for state in (x for x in args if isinstance(x, holder)):
                for name in keeps.lent:      # a module's state outlives the window; the weight is the window's
                    setattr(weight, name, getattr(state, name))
                    setattr(state, name, None)
        return out

    def backward(ctx: Any, *grads: Any) -> Any:
        saved, kept = ctx.saved_tensors, dict(vars(ctx))
        vars(ctx).update({name: _replaced(value, _Saved, saved.__getitem__, holder) for name, value in kept.items()})
        try:
            return own.backward(ctx, *grads)
        finally:
            vars(ctx).update(kept)

    return type(own.__name__, (own,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _replaced(value: Any, kind: type, by: Callable[[Any], Any], holder: type) -> Any:
    """The same with what is of that kind replaced, in tuples, lists and holders too."""
    if isinstance(value, kind):
        return by(value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, kind, by, holder) for v in value)
    if isinstance(value, holder):
        out = copy.copy(value)
        vars(out).update((k, _replaced(v, kind, by, holder)) for k, v in vars(value).items())
        return out
    return value
