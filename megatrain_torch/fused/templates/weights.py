"""Weights of a unit for one forward or backward, by name, and the gradients that go back the same way.

Weights     in a slot, as they are              Expanded    made of codes as products need them
Pieces      experts a few at a time             Coded       whose products are of 8-bit codes
Grads       gradients by name                   Sums        of tiles of rows, added up
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import ops
from ...base.codes import Coding

if TYPE_CHECKING:
    from ...store.whole import Stacked

STRAND = "#"                # name#strand: of a weight of codes, where Weights have it
WHOLE = 16                  # that many codes are loaded at once: sizes of matrices are multiples of it


class Weights:
    """A unit's weights in a slot, by the names of the window's parameters. Linear layers that read the same input lie
    side by side in their unit (matrices come first), so their weights are one matrix, and one product serves them all.
    """

    __slots__ = ("_joint", "_make", "by_name")

    def __init__(self, by_name: dict[str, Tensor], make: Callable[[Callable[[], Any]], Any] | None = None) -> None:
        """make: runs what makes a view that is kept here (a slot counts those)."""
        self.by_name, self._make = by_name, make or (lambda view: view())
        self._joint: dict[tuple[str, ...], Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.joint((name,))

    def joint(self, names: tuple[str, ...]) -> Tensor:
        """The rows of all of them, one below the other; a view where they are neighbours."""
        if len(names) == 1:
            return self.by_name[names[0]]
        if names not in self._joint:
            parts = [self.by_name[n] for n in names]
            here, storage = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
            for p in parts:
                if p.data_ptr() != here or not p.is_contiguous() or p.untyped_storage().data_ptr() != storage:
                    return torch.cat(parts)          # a copy would be out of date with the next fetch
                here += p.nbytes
            rows, strides, at = sum(p.shape[0] for p in parts), parts[0].stride(), parts[0].storage_offset()
            self._joint[names] = self._make(lambda: parts[0].as_strided((rows, *parts[0].shape[1:]), strides, at))
        return self._joint[names]

    # ---- stacks of experts ----

    def groups(self, name: str, count: int) -> list[range]:
        """Which experts of a stack of so many are there together: here all are."""
        return [range(count)]

    def experts(self, name: str, which: range) -> tuple[Tensor, bool]:
        """[experts, ., .]: of one of these groups; and whether it was made for the caller, who may keep it and write
        into it. What lies over a slot nobody keeps, since the slot would be held."""
        return self[name], False

    # ---- products with the joint matrix W [N, K] of `names`: the one way by which linear layers come to theirs ----

    def product(self, names: tuple[str, ...], x: Tensor, biases: tuple[str, ...] = (), base: Tensor | None = None,
                factor: float = 1.0) -> Tensor:
        """x W' + bias, or base + factor * x W' [T, N], from x [T, K]: added inside the product."""
        matrix = self.joint(names).t()
        if base is not None:
            return torch.addmm(base, x, matrix, alpha=factor)
        return torch.addmm(self.joint(biases), x, matrix) if biases else torch.mm(x, matrix)

    def normed(self, names: tuple[str, ...], x: Tensor, weight: Tensor, eps: float, style: int) -> tuple[Any, Tensor]:
        """RMSNorm of x [T, K], as the product with the matrix of names alone takes it, and 1/rms."""
        return ops.rms_norm(x, weight, eps, style)[::2]

    def gated(self, names: tuple[str, ...], gu: Tensor, act: int) -> Any:
        """act(g) * u [T, I], from g|u [T, 2 I], as the product with the matrix of names alone takes it."""
        return ops.glu(*gu.chunk(2, 1), act)

    def gated_grads(self, names: tuple[str, ...], down: tuple[str, ...], dh: Tensor, gu: Tensor, act: int,
                    x: Tensor | None) -> tuple[Any, Any]:
        """Gradient of g|u, and act(g) * u again, as the products with the matrices of names and of down alone take
        them, in the memory of gu and dh where they are tensors; dh: of act(g) * u, which was made of down's dy. x: what
        g|u was made of; None: a norm's."""
        return glu_grads(dh, gu, act)

    def input_grad(self, names: tuple[str, ...], dy: Tensor) -> Tensor:
        """dy W [T, K], from dy [T, N]."""
        return torch.mm(dy, self.joint(names))

    def weight_grad(self, names: tuple[str, ...], dy: Tensor, x: Tensor, total: Tensor | None = None,
                    begun: bool = False) -> Tensor:
        """dy' x [N, K]. total: of fp32 at least, to which it is added (begun), or which it is written to."""
        if total is None:
            return torch.mm(dy.t(), x)
        if total.dtype != torch.float32:
            return torch.addmm(total, dy.t(), x, beta=float(begun), out=total)
        ops.gemm_(total, dy.t(), x, beta=float(begun))
        return total


def glu_grads(dh: Tensor, gu: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """Gradient of g|u, in its memory, and act(g) * u, in that of its gradient dh."""
    gate, up = gu.chunk(2, 1)
    ops.glu_backward(dh, gate, up, act, dgate=gate, dup=up, h=dh)
    return gu, dh


class Grads(dict[str, Tensor]):
    """Gradients of weights `w` by name; `wanted`: whose are asked for. outer: what layers' functions leave for each
    other (parts.Linears)."""

    def __init__(self, w: Weights, wanted: Iterable[str]) -> None:
        super().__init__()
        self.w, self.wanted = w, frozenset(wanted)
        self.outer: dict[Any, tuple[Tensor, ...]] = {}

    def put(self, names: tuple[str, ...], rows: tuple[int, ...], joint: Tensor) -> None:
        for name, part in zip(names, joint.split(rows)):
            if name in self.wanted:
                self[name] = part

    def product(self, names: tuple[str, ...], rows: tuple[int, ...], dy: Tensor, x: Tensor) -> None:
        """dy' x [sum of rows, K], from dy [T, sum of rows] and x [T, K], in the weights' type."""
        dtype, total = self._dtype(names), None
        if dtype == torch.float32 and dy.dtype.itemsize == 2:
            total = torch.empty(dy.shape[1], x.shape[1], dtype=dtype, device=x.device)
        self.put(names, rows, self.w.weight_grad(names, dy, x, total).to(dtype))

    def _dtype(self, names: tuple[str, ...]) -> torch.dtype:
        return next(self.w[n].dtype for n in names if n in self.wanted)


class Sums(Grads):
    """Weight gradients of tiles of rows, added up in fp32 at least. Of products only the whole sum is rounded; what
    comes by its name (of biases, norms) has been rounded tile by tile. `finish` hands them on."""

    def __init__(self, grads: Grads) -> None:
        super().__init__(grads.w, grads.wanted)
        self._grads = grads
        self._types: dict[str, torch.dtype] = {}
        self._matrices: dict[tuple[str, ...], tuple[tuple[int, ...], Tensor]] = {}

    def __setitem__(self, name: str, part: Tensor) -> None:
        if name in self:
            self[name].add_(part)
        else:
            super().__setitem__(name, part.to(torch.promote_types(part.dtype, torch.float32), copy=True))
        self._types[name] = part.dtype

    def product(self, names: tuple[str, ...], rows: tuple[int, ...], dy: Tensor, x: Tensor) -> None:
        begun = names in self._matrices
        if not begun:
            wide = torch.promote_types(dy.dtype, torch.float32)
            self._matrices[names] = rows, torch.empty(sum(rows), x.shape[1], dtype=wide, device=x.device)
        self.w.weight_grad(names, dy, x, self._matrices[names][1], begun)

    def finish(self) -> None:
        """What was added up, in the gradients' types."""
        for names in list(self._matrices):
            rows, total = self._matrices.pop(names)
            self._grads.put(names, rows, total.to(self._dtype(names)))
        for name, total in self.items():
            self._grads[name] = total.to(self._types[name])


class Expanded(Weights):
    """Weights that lie in their slot as codes, made the weights that they stand for as products need them.

    A product's matrix is made for that product, and its memory is the allocator's again behind it: at the rate of
    memory, a hundredth of what the product takes. So of a layer one matrix at a time is there.
    """

    __slots__ = ("_codings", "_dtype")

    def __init__(self, w: Weights, codings: dict[str, Coding], dtype: torch.dtype) -> None:
        """dtype: of the layer's weights."""
        self.by_name, self._make, self._joint = w.by_name, w._make, w._joint
        self._codings, self._dtype = codings, dtype

    def experts(self, name: str, which: range) -> tuple[Tensor, bool]:
        return self[name], name in self._codings

    def joint(self, names: tuple[str, ...]) -> Tensor:
        codings = [self._codings.get(n) for n in names]
        if not any(codings):
            return super().joint(names)
        shapes = [self.by_name[n].shape if c is None else c.shape for n, c in zip(names, codings)]
        like = next(self.by_name[f"{n}{STRAND}{c.strands[0]}"] for n, c in zip(names, codings) if c is not None)
        out = like.new_empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self._dtype)
        for name, coding, part in zip(names, codings, out.split([s[0] for s in shapes])):
            if coding is None:
                part.copy_(self.by_name[name])
                continue
            codes, scales, *rest = (self.by_name[f"{name}{STRAND}{s}"] for s in coding.strands)
            if coding.form in ("nf4", "fp4"):
                codes = codes.view(torch.uint8)          # which may be stored as another type
            scales = scales.float() if scales.is_floating_point() else scales
            ops.expand_codes_(part, coding.form, codes, scales, *rest, group=coding.group)
        return out


class Pieces(Weights):
    """Weights of a window whose stacks of experts are on the device a few at a time (graph/window.py has the same for
    the modules' own code).

    What is left of the unit is asked for again behind each piece: meanwhile its slot may have come to hold another.
    """

    __slots__ = ("_rest", "_rest_of", "_ring", "_stacks")

    def __init__(self, rest: Callable[[], Weights], stacks: dict[str, Stacked], ring: Any) -> None:
        """rest: what is left of the unit, where it is now. ring: model/ring.py's, which pieces are fetched into."""
        self._rest_of, self._stacks, self._ring = rest, stacks, ring
        self._rest: Weights | None = None

    def joint(self, names: tuple[str, ...]) -> Tensor:
        """Of a stack, which has no neighbours, all experts together."""
        if names[0] in self._stacks:
            return torch.cat([self.experts(names[0], piece.experts)[0] for piece in self._stacks[names[0]].pieces])
        self._rest = self._rest or self._rest_of()
        return self._rest.joint(names)

    def groups(self, name: str, count: int) -> list[range]:
        return [piece.experts for piece in self._stacks[name].pieces]

    def experts(self, name: str, which: range) -> tuple[Tensor, bool]:
        self._rest = None
        piece = self._stacks[name].piece_of(which.start)
        return piece.made(self._ring), piece.expands


# ---- products of codes -----------------------------------------------------------------------------

class Made:
    """A matrix of which there are codes alone. Each kind is for one product, which takes it: "rows" or "columns"."""

    def __init__(self, of: Tensor, rows: ops.Codes | None = None, columns: ops.Codes | None = None,
                 shift: Tensor | None = None) -> None:
        """of: a tensor of its type, and beside it. columns: of rows that may be more, as fp8_cast_t makes them. shift:
        that they were made with, and that the other operand is to be made with."""
        self.shape = torch.Size((of.shape[0], rows.values.shape[1] if rows else columns.values.shape[0]))
        self.dtype, self.device, self.shift = of.dtype, of.device, shift
        self.take = {"rows": rows, "columns": columns}.pop


class Coded(Weights):
    """Weights for one forward or backward whose products are in 8 bits, where sizes allow it (`fits`): operands as E4M3
    codes with a scale for each row, sums in fp32, results in the layer's type (csrc/ops/fp8.h).

    A product's sums go along its operands' rows, so that a forward wants x and W by rows, dx = dy W wants W by columns,
    and dW = dy' x both dy and x by columns. Codes are made from tensors of 16 bits that are there anyway, weights' once
    in each forward and backward; but of norms, of gated activations and of the gradients behind these, by the kernels
    that compute them (csrc/ops/fp8_glu.h), where nothing else reads them.

    Forward products add in the tensor cores' own 14 bits, gradients in fp32 after short stretches: a weight gradient is
    a sum over all tokens, of which the former would lose a part that grows with their number.

    A token that is far larger than the rest would take their bits in a weight gradient's codes, which go by columns: so
    its rows of dy and x are balanced (`fp8_shift`) where both are known, and codes by columns made again where that
    changes something. Not of what a norm gives: its rows are alike.
    """

    __slots__ = ("_columns", "_gradients", "_rows", "_wanted")

    def __init__(self, w: Weights, wanted: Collection[str] = ()) -> None:
        """wanted: whose gradients a backward wants."""
        self.by_name, self._make, self._joint = w.by_name, w._make, w._joint
        self._wanted = frozenset(wanted)
        self._rows: dict[tuple[str, ...], ops.Codes] = {}
        self._columns: dict[tuple[str, ...], ops.Codes] = {}
        # Of outputs' gradients one product has been made of: the tensor, and the codes that the other one will want,
        # by rows or not; and scales of rows.
        self._gradients: dict[tuple[str, ...], tuple[Tensor, bool, ops.Codes, Tensor]] = {}

    def product(self, names: tuple[str, ...], x: Tensor, biases: tuple[str, ...] = (), base: Tensor | None = None,
                factor: float = 1.0) -> Tensor:
        if not self._fits(names, x):
            return super().product(names, x, biases, base, factor)
        if names not in self._rows:
            self._rows[names] = ops.fp8_cast(self.joint(names))
        matrix = self._rows[names]
        y = torch.empty(x.shape[0], matrix.scale.shape[0], dtype=x.dtype, device=x.device)
        codes = x.take("rows") if isinstance(x, Made) else ops.fp8_cast(x)
        ops.fp8_gemm_(y, codes, matrix, bias=self.joint(biases) if biases else None, base=base, alpha=factor, fast=True)
        return y

    def normed(self, names: tuple[str, ...], x: Tensor, weight: Tensor, eps: float, style: int) -> tuple[Any, Tensor]:
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
        if not all(self._fits(of, gu) and not self._wanted.isdisjoint(of) for of in (names, down)):
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
        if names not in self._columns:
            self._columns[names] = ops.fp8_cast_t(self.joint(names))
        matrix = self._columns[names]
        dx = torch.empty(dy.shape[0], matrix.scale.shape[0], dtype=dy.dtype, device=dy.device)
        ops.fp8_gemm_(dx, self._gradient(names, dy, True)[0], matrix)
        return dx

    def weight_grad(self, names: tuple[str, ...], dy: Tensor, x: Tensor, total: Tensor | None = None,
                    begun: bool = False) -> Tensor:
        if not self._fits(names, dy):
            return super().weight_grad(names, dy, x, total, begun)
        dw = torch.empty(dy.shape[1], x.shape[1], dtype=dy.dtype, device=dy.device) if total is None else total
        ops.fp8_gemm_(dw, *self._balanced(names, dy, x), base=total if begun else None)
        return dw

    def _fits(self, names: tuple[str, ...], rows: Tensor) -> bool:
        return rows.shape[0] > 0 and fits(self.joint(names).shape, rows.dtype)

    def _gradient(self, names: tuple[str, ...], dy: Tensor | Made, by_rows: bool) -> tuple[ops.Codes, Tensor | None]:
        """Codes of dy, and scales of its rows. Where codes are not there yet, those of the other kind are made beside
        them, and kept for the product that wants them."""
        if isinstance(dy, Made):
            return dy.take("rows" if by_rows else "columns"), None
        of, are_rows, codes, scales = self._gradients.pop(names, (None, False, None, None))
        if of is dy and are_rows == by_rows:
            return codes, scales
        if self._wanted.isdisjoint(names):
            codes = ops.fp8_cast(dy)
            return codes, codes.scale
        rows, columns = ops.fp8_cast_both(dy)
        self._gradients[names] = dy, not by_rows, columns if by_rows else rows, rows.scale
        return (rows if by_rows else columns), rows.scale

    def _balanced(self, names: tuple[str, ...], dy: Tensor | Made, x: Tensor | Made) -> tuple[ops.Codes, ops.Codes]:
        """Codes by columns of dy and x, of which rows that are far larger than the rest are balanced."""
        codes, dy_rows = self._gradient(names, dy, False)
        if isinstance(x, Made):                          # gated_grads has balanced both
            return codes, x.take("columns")
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
