"""Products of linear layers in 8 bits: operands as E4M3 codes with a scale for each row, sums in fp32, results in the
layer's type (csrc/ops/fp8.h).

A product's sums go along its operands' rows, so that a forward wants x and W by rows, dx = dy W wants W by columns, and
dW = dy' x both dy and x by columns: of each operand codes by rows or by columns, or of dy both. They are made from
tensors of 16 bits that are there anyway, weights' once in each forward and backward; but of norms, of gated activations
and of the gradients behind these, by the kernels that compute them (csrc/ops/fp8_glu.h), where nothing else reads them.

Forward products add in the tensor cores' own 14 bits, gradients in fp32 after short stretches: a weight gradient is a
sum over all tokens, of which the former would lose a part that grows with their number.

A token that is far larger than the rest would take their bits in a weight gradient's codes, which go by columns: so its
rows of dy and x are balanced (`fp8_shift`) where both are known, and codes by columns made again where that changes
something. Not of what a norm gives: its rows are alike.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ... import ops
from .parts import Weights

WHOLE = 16                  # that many codes are loaded at once: sizes are multiples of it


class Made:
    """A matrix of which there are codes alone. Each kind is for one product, which takes it."""

    def __init__(self, of: Tensor, rows: ops.Codes | None = None, columns: ops.Codes | None = None,
                 shift: Tensor | None = None) -> None:
        """of: a tensor of its type, and beside it. columns: of rows that may be more, as fp8_cast_t makes them. shift:
        that they were made with, and that the other operand is to be made with."""
        self.shape = torch.Size((of.shape[0], rows.values.shape[1] if rows else columns.values.shape[0]))
        self.dtype, self.device = of.dtype, of.device
        self._rows, self._columns, self.shift = rows, columns, shift

    def rows(self) -> ops.Codes:
        found, self._rows = self._rows, None
        return found

    def columns(self) -> ops.Codes:
        found, self._columns = self._columns, None
        return found


class Coded(Weights):
    """Weights for one forward or backward whose products are of codes, where their sizes allow it (`fits`)."""

    __slots__ = ("_columns", "_gradients", "_rows", "_wanted")

    def __init__(self, w: Weights, wanted: Collection[str] = ()) -> None:
        """wanted: whose gradients a backward wants."""
        self.by_name, self._make, self._joint = w.by_name, w._make, w._joint
        self._wanted = wanted
        self._rows: dict[tuple[str, ...], ops.Codes] = {}
        self._columns: dict[tuple[str, ...], ops.Codes] = {}
        # Of outputs' gradients one product has been made of: the tensor, and the codes that the other one will want,
        # by rows or not; and scales of rows.
        self._gradients: dict[tuple[str, ...], tuple[Tensor, bool, ops.Codes, Tensor]] = {}

    def product(self, names: tuple[str, ...], x: Tensor, biases: tuple[str, ...] = ()) -> Tensor:
        if not self._fits(names, x):
            return super().product(names, x, biases)
        return self._forward(names, x, bias=self.joint(biases) if biases else None)

    def product_onto(self, names: tuple[str, ...], base: Tensor, x: Tensor, factor: float) -> Tensor:
        if not self._fits(names, x):
            return super().product_onto(names, base, x, factor)
        return self._forward(names, x, base=base, alpha=factor)

    def normed(self, names: tuple[str, ...], x: Tensor, weight: Tensor, eps: float, style: int
               ) -> tuple[Tensor | Made, Tensor]:
        if not self._fits(names, x):
            return super().normed(names, x, weight, eps, style)
        codes, rstd = ops.fp8_rms_norm(x, weight, eps, style)
        return Made(x, codes), rstd

    def gated(self, names: tuple[str, ...], gu: Tensor, act: int) -> Tensor | Made:
        if not self._fits(names, gu):
            return super().gated(names, gu, act)
        return Made(gu, ops.fp8_glu(*gu.chunk(2, 1), act))

    def gated_grads(self, names: tuple[str, ...], down: tuple[str, ...], dh: Tensor, gu: Tensor, act: int,
                    x: Tensor | None) -> tuple[Tensor | Made, Tensor | Made]:
        if not all(self._fits(of, gu) and self._wants(of) for of in (names, down)):
            return super().gated_grads(names, down, dh, gu, act, x)
        made = dh, *gu.chunk(2, 1), act
        rows, columns, of_act, act_rows = ops.fp8_glu_backward(*made)
        dd, _, dd_columns, dd_rows = self._gradients[down]           # of which dh was made
        shift = ops.fp8_shift(act_rows, dd_rows)
        ops.fp8_glu_recast_(of_act, *made, shift, -1)
        ops.fp8_recast_(dd_columns, dd, shift, 1)
        shift = None
        if x is not None:
            shift = ops.fp8_shift(ops.fp8_row_scales(x), rows.scale)
            ops.fp8_glu_recast_(columns, *made, shift, 1)
        return Made(gu, rows, columns, shift), Made(gu, columns=of_act)

    def input_grad(self, names: tuple[str, ...], dy: Tensor) -> Tensor:
        if not self._fits(names, dy):
            return super().input_grad(names, dy)
        matrix = self._kept(self._columns, names, ops.fp8_cast_t)
        dx = torch.empty(dy.shape[0], matrix.scale.shape[0], dtype=dy.dtype, device=dy.device)
        ops.fp8_gemm_(dx, self._gradient(names, dy, True)[0], matrix)
        return dx

    def weight_grad(self, names: tuple[str, ...], dy: Tensor, x: Tensor) -> Tensor:
        if not self._fits(names, dy):
            return super().weight_grad(names, dy, x)
        dw = torch.empty(dy.shape[1], x.shape[1], dtype=dy.dtype, device=dy.device)
        ops.fp8_gemm_(dw, *self._balanced(names, dy, x))
        return dw

    def add_weight_grad(self, names: tuple[str, ...], dy: Tensor, x: Tensor, total: Tensor, begun: bool) -> None:
        if self._fits(names, dy):
            ops.fp8_gemm_(total, *self._balanced(names, dy, x), base=total if begun else None)
        else:
            super().add_weight_grad(names, dy, x, total, begun)

    def _fits(self, names: tuple[str, ...], rows: Tensor) -> bool:
        return rows.shape[0] > 0 and fits(self.joint(names).shape, rows.dtype)

    def _forward(self, names: tuple[str, ...], x: Tensor, bias: Tensor | None = None, base: Tensor | None = None,
                 alpha: float = 1.0) -> Tensor:
        matrix = self._kept(self._rows, names, ops.fp8_cast)
        y = torch.empty(x.shape[0], matrix.scale.shape[0], dtype=x.dtype, device=x.device)
        codes = x.rows() if isinstance(x, Made) else ops.fp8_cast(x)
        ops.fp8_gemm_(y, codes, matrix, bias=bias, base=base, alpha=alpha, fast=True)
        return y

    def _kept(self, where: dict[tuple[str, ...], ops.Codes], names: tuple[str, ...], cast: Callable[[Tensor], ops.Codes]
              ) -> ops.Codes:
        if names not in where:
            where[names] = cast(self.joint(names))
        return where[names]

    def _wants(self, names: tuple[str, ...]) -> bool:
        return any(n in self._wanted for n in names)

    def _gradient(self, names: tuple[str, ...], dy: Tensor | Made, by_rows: bool) -> tuple[ops.Codes, Tensor | None]:
        """Codes of dy, and scales of its rows. Where codes are not there yet, those of the other kind are made beside
        them, and kept for the product that wants them."""
        if isinstance(dy, Made):
            return (dy.rows() if by_rows else dy.columns()), None
        of, are_rows, codes, scales = self._gradients.pop(names, (None, False, None, None))
        if of is dy and are_rows == by_rows:
            return codes, scales
        if not self._wants(names):
            codes = ops.fp8_cast(dy)
            return codes, codes.scale
        rows, columns = ops.fp8_cast_both(dy)
        self._gradients[names] = dy, not by_rows, columns if by_rows else rows, rows.scale
        return (rows if by_rows else columns), rows.scale

    def _balanced(self, names: tuple[str, ...], dy: Tensor | Made, x: Tensor | Made) -> tuple[ops.Codes, ops.Codes]:
        """Codes by columns of dy and x, of which rows that are far larger than the rest are balanced."""
        codes, dy_rows = self._gradient(names, dy, False)
        if isinstance(x, Made):                          # gated_grads has balanced both
            return codes, x.columns()
        if isinstance(dy, Made):
            columns = ops.fp8_cast_t(x)
            if dy.shift is not None:
                ops.fp8_recast_(columns, x, dy.shift, -1)
            return codes, columns
        x_rows = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        columns = ops.fp8_cast_t(x, x_rows)
        shift = ops.fp8_shift(x_rows, dy_rows)
        ops.fp8_recast_(codes, dy, shift, 1)
        ops.fp8_recast_(columns, x, shift, -1)
        return codes, columns


def fits(matrix: Sequence[int], dtype: torch.dtype) -> bool:
    """Can products with a matrix [N, K] of such a layer be of codes?"""
    return dtype == torch.bfloat16 and matrix[0] % WHOLE == 0 and matrix[1] % WHOLE == 0
