"""Weights that lie in their slot as codes, made the weights that they stand for as products need them.

A product's matrix is made for that product, and its memory is the allocator's again behind it: at the rate of memory, a
hundredth of what the product takes. So of a layer one matrix at a time is there. What is asked for by its own name
(experts') stays until the forward, or the backward, is over.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ...base.codes import Coding
from .parts import Weights

STRAND = "#"                 # name#strand: of a weight of codes, where Weights have it


class Expanded(Weights):
    """Weights for one forward or backward."""

    __slots__ = ("_codings", "_dtype", "_whole")

    def __init__(self, w: Weights, codings: dict[str, Coding], dtype: torch.dtype) -> None:
        """dtype: of the layer's weights."""
        self.by_name, self._make, self._joint = w.by_name, w._make, w._joint
        self._codings, self._dtype = codings, dtype
        self._whole: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        coding = self._codings.get(name)
        if coding is None:
            return self.by_name[name]
        if name not in self._whole:
            self._whole[name] = self._into(name, coding, self._empty(name, coding.shape))
        return self._whole[name]

    def joint(self, names: tuple[str, ...]) -> Tensor:
        codings = [self._codings.get(n) for n in names]
        if not any(codings):
            return super().joint(names)
        shapes = [self.by_name[n].shape if c is None else c.shape for n, c in zip(names, codings)]
        out = self._empty(names[0], torch.Size((sum(s[0] for s in shapes), *shapes[0][1:])))
        for name, coding, part in zip(names, codings, out.split([s[0] for s in shapes])):
            part.copy_(self.by_name[name]) if coding is None else self._into(name, coding, part)
        return out

    def _empty(self, name: str, shape: torch.Size) -> Tensor:
        coding = self._codings.get(name)
        like = self.by_name[name if coding is None else f"{name}{STRAND}{coding.strands[0]}"]
        return torch.empty(shape, dtype=self._dtype, device=like.device)

    def _into(self, name: str, coding: Coding, out: Tensor) -> Tensor:
        codes, scales, *rest = (self.by_name[f"{name}{STRAND}{s}"] for s in coding.strands)
        if coding.form in ("nf4", "fp4"):
            codes = codes.view(torch.uint8)              # which may be stored as another type
        scales = scales.float() if scales.is_floating_point() else scales
        ops.expand_codes_(out, coding.form, codes, scales, *rest, group=coding.group)
        return out
