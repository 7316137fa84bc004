"""A weight that is codes, put together from the records of its strands."""
from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..base.codes import Format, Strand, format_of
from .guard import StreamedParameter, made_kind, plain
from .records import Record


class Whole:
    """
    Attributes:
        records: of its strands, whose parameters it holds, as its package has them; the first stands for the weight
            where modules read it. names: of the strands.
    """

    def __init__(self, p: nn.Parameter, m: nn.Module, format: Format, records: list[Record], names: list[str]) -> None:
        self._param, self._module, self.format = weakref.ref(p), weakref.ref(m), format
        self.records, self.names = records, names
        self._own_kind: type | None = None
        records[0].whole = self

    @property
    def param(self) -> nn.Parameter:
        return self._param()

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """What the package's code computes with, over tensors in the order of the records."""
        with torch.no_grad():
            return self.format.whole(self.param, dict(zip(self.names, tensors)))

    def adopted(self) -> None:
        """Its strands are streamed: the parameter has those."""
        p = self.param
        self.format.put(p, self._module(), {n: r.param for n, r in zip(self.names, self.records)})
        if not isinstance(p, StreamedParameter):         # made of tensors, and without memory of its own
            self._own_kind, p.__class__ = type(p), made_kind(type(p))
            p._mt, p._mt_runtime = self.records[0], self.records[0].runtime

    def given_back(self) -> None:
        """The strands have memory of their own again; and so the parameter."""
        p = self.param
        if p is None:
            return
        if self._own_kind is not None:
            p.__class__ = self._own_kind
            del p._mt, p._mt_runtime
        self.format.put(p, self._module(), {n: r.param.data for n, r in zip(self.names, self.records)})

    def copy(self) -> nn.Parameter:
        """An ordinary parameter of its package's, with the current values."""
        self.records[0].runtime.planes.wait_updates(self.records[0])
        strands = [plain(r.param).clone() for r in self.records]
        if self.format.again is None:
            return self.of(strands)
        return self.format.again(self.param, dict(zip(self.names, strands)))


def wholes_of(records: list[Record]) -> list[Whole]:
    """Of a unit's records, whose parameters are not streamed yet."""
    found: dict[int, tuple[nn.Parameter, nn.Module, list[Record], list[str]]] = {}
    for r in records:
        if type(r.param) is Strand:
            p, m, name = r.param.of
            found.setdefault(id(p), (p, m, [], []))[2].append(r)
            found[id(p)][3].append(name)
            del r.param.of                   # which would be held by its own strand
    for r in records:
        if id(r.param) in found:
            found[id(r.param)][2].insert(0, r)
            found[id(r.param)][3].insert(0, "")
    return [Whole(p, m, format_of(p), own, names) for p, m, own, names in found.values()]
