"""The half of a decoder layer that works on each token: y = h + r * norm2b((act(g) * u) Wd), g|u = norm2(h) Wgu."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .linears import Linears
from .parts import Kept, Norm, Unfit, activation, child
from .weights import Grads, Sums, Weights, glu_grads

TILE_BYTES = 1 << 30         # of gate|up that is not kept: products of this many rows are as fast as larger ones
LEAST_ROWS = 256             # of a tile, and its rows are a multiple of them
_BY_ROWS = ("rstd2", "d", "rstd2b")          # what of Kept a tile has its rows of


_NAMES = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"),
          (("input_linear",), "output_linear"))


def gated_linears(layer: nn.Module, name: str) -> tuple[Linears, Linears, int]:
    """What makes g|u, what reads their product, and the activation; Unfit where the module is not gated."""
    mlp = child(layer, name)
    names, down = next((n for n in _NAMES if hasattr(mlp, n[0][0])), _NAMES[0])
    gu, down = Linears(layer, *(f"{name}.{n}" for n in names)), Linears(layer, f"{name}.{down}")
    if sum(gu.rows) != 2 * down.inputs:
        raise Unfit(f"{name} has {gu.rows} rows before {down.inputs} columns: not gated")
    return gu, down, activation(getattr(mlp, "act_fn", getattr(mlp, "activation", getattr(mlp, "activation_fn", None))))


class GatedMLP:
    """H hidden, I intermediate. norm2 and norm2b may be missing."""

    settings: tuple[Any, ...] = ()       # Decoder.settings: there is nothing to find

    def __init__(self, layer: nn.Module, name: str, norm2: Norm | None, norm2b: Norm | None, factor: float) -> None:
        self.gu, self.down, self.act = gated_linears(layer, name)
        self.name, self.norm2, self.norm2b, self.factor = name, norm2, norm2b, factor
        self.norms = [n for n in (norm2, norm2b) if n]
        self.linears = self.gu, self.down
        self.names = {*self.gu.names, *self.down.names}

    # ---- tiles ----

    def tile(self, item: int) -> int:
        """Rows of which gate|up exists at a time, where it is not kept."""
        rows = TILE_BYTES // (2 * self.down.inputs * item)
        return max(LEAST_ROWS, rows // LEAST_ROWS * LEAST_ROWS)

    def _tiles(self, h: Tensor, k: Kept) -> Iterator[tuple[slice, Kept]]:
        """Rows, and what is kept of them."""
        step = self.tile(h.element_size())
        for first in range(0, h.shape[0], step):
            rows = slice(first, first + step)
            own = {name: t[rows] for name in _BY_ROWS if (t := getattr(k, name)) is not None}
            yield rows, Kept(**own)

    # ---- forward ----

    def forward(self, h: Tensor, w: Weights, correction: None, k: Kept, whole: bool = True) -> Tensor:
        """y [T, H] from h [T, H]. Writes what backward wants into k. whole: gate|up is to be kept; else many rows go
        through it in tiles."""
        if whole or h.shape[0] <= self.tile(h.element_size()):
            return self._forward(h, w, k)
        y, parts = torch.empty_like(h), []
        for rows, part in self._tiles(h, k):
            y[rows] = self._forward(h[rows], w, part)
            part.gu = None
            parts.append(part)
        for name in _BY_ROWS:
            if getattr(parts[0], name) is not None:
                setattr(k, name, torch.cat([getattr(part, name) for part in parts]))
        return y

    def _forward(self, h: Tensor, w: Weights, k: Kept) -> Tensor:
        b = h
        if self.norm2:
            b, k.rstd2 = self.norm2.before(self.gu, h, w)
        k.gu = self.gu.forward(b, w)
        del b
        return self._finish(h, w, k)

    def _finish(self, h: Tensor, w: Weights, k: Kept) -> Tensor:
        act = w.gated(self.down.weights, k.gu, self.act) if self.down.alone else ops.glu(*k.gu.chunk(2, 1), self.act)
        if not self.norm2b:
            return self.down.forward_onto(h, act, w, self.factor)
        k.d = self.down.forward(act, w)
        normed, k.rstd2b = self.norm2b.forward(k.d, w)
        return torch.add(h, normed, alpha=self.factor)

    # ---- backward ----

    def backward(self, dy: Tensor, h: Tensor, w: Weights, correction: None, k: Kept, grads: Grads) -> Tensor:
        """dh [T, H] from dy [T, H]. Uses up what was kept, and writes into it."""
        if k.gu is not None or h.shape[0] <= self.tile(h.element_size()):
            return self._backward(dy, h, w, k, grads)
        dh, sums = torch.empty_like(h), Sums(grads)
        for rows, part in self._tiles(h, k):
            dh[rows] = self._backward(dy[rows], h[rows], w, part, sums)
        sums.finish()
        return dh

    def _backward(self, dy: Tensor, h: Tensor, w: Weights, k: Kept, grads: Grads) -> Tensor:
        b = self._make_again(h, w, k) if k.gu is None else None
        dd = dy if self.factor == 1.0 else dy * self.factor
        if self.norm2b:
            dd, _ = self.norm2b.backward(dd, k.d, k.rstd2b, w, grads)
            k.d = None
        # Codes of these alone will do where nothing but the products reads them.
        alone = self.gu.alone and self.down.alone and not (self.gu.biases and grads.wants(*self.gu.biases))
        dact = self.down.input_grad(dd, w)
        if alone:
            dgu, act = w.gated_grads(self.gu.weights, self.down.weights, dact, k.gu, self.act,
                                     None if self.norm2 else h)
        else:
            dgu, act = glu_grads(dact, k.gu, self.act)
        del dact
        k.gu = None
        self.down.weight_grads(dd, act, w, grads)
        del act, dd
        db = self.gu.input_grad(dgu, w)
        if self.norm2:
            dh, again = self.norm2.backward(db, h, k.rstd2, w, grads, add=dy, rebuild=b is None)
            b = again if b is None else b
        else:
            dh, b = db.add_(dy), h
        self.gu.weight_grads(dgu, b, w, grads)
        return dh

    def _make_again(self, h: Tensor, w: Weights, k: Kept) -> Tensor:
        """What was not kept, but for the last projection where nothing needs its output. Gives what the projections
        read, which had to be made for that."""
        b = h
        if self.norm2:
            b, rstd = self.norm2.forward(h, w)
            k.rstd2 = rstd if k.rstd2 is None else k.rstd2
        k.gu = self.gu.forward(b, w)
        if self.norm2b and k.d is None:
            self._finish(h, w, k)
        return b

    # ---- sizes ----

    def kept_bytes(self, keep: str, item: int) -> int:
        """Bytes that a token takes between forward and backward."""
        columns = self.down.rows[0] * bool(self.norm2b) + (2 * self.down.inputs if keep == "saved" else 0)
        return columns * item + 4 * len(self.norms)

    def work_columns(self) -> int:
        """Numbers of a token that backward has beside what "saved" keeps."""
        return self.down.inputs

    def weights_used(self) -> int:
        """Elements of the matrices that a token meets."""
        return sum(self.gu.rows) * self.gu.inputs + self.down.rows[0] * self.down.inputs

    def tiled(self, item: int) -> tuple[int, int, int]:
        """Where gate|up is not kept: bytes of a token that only so many rows have at a time, those rows, and bytes of
        the weight gradients' sums where there are more."""
        return 3 * self.down.inputs * item, self.tile(item), 4 * self.weights_used()
