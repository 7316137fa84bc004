"""The half of a decoder layer that works on each token: y = h + r * norm2b((act(g) * u) Wd), g|u = norm2(h) Wgu."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .linears import Linears
from .parts import Grads, Norm, Sums, Unfit, Weights, activation, child, glu_grads

TILE_BYTES = 1 << 30         # of gate|up that is not kept: products of this many rows are as fast as larger ones
LEAST_ROWS = 256             # of a tile, and its rows are a multiple of them


@dataclass
class KeptMLP:
    """What lies between forward and backward; None: to be made again."""

    rstd2: Tensor | None = None
    gu: Tensor | None = None             # [T, 2 I]
    d: Tensor | None = None              # [T, H], only where norm2b is
    rstd2b: Tensor | None = None


def gated_linears(layer: nn.Module, name: str) -> tuple[Linears, Linears, int]:
    """What makes g|u, what reads their product, and the activation.

    Raises:
        Unfit: the module is not gated, or has an unknown activation.
    """
    mlp = child(layer, name)
    names, down = next((n for n in _NAMES if hasattr(mlp, n[0][0])), _NAMES[0])
    gu, down = Linears(layer, *(f"{name}.{n}" for n in names)), Linears(layer, f"{name}.{down}")
    if sum(gu.rows) != 2 * down.inputs:
        raise Unfit(f"{name} has {gu.rows} rows before {down.inputs} columns: not gated")
    return gu, down, activation(getattr(mlp, "act_fn", getattr(mlp, "activation", getattr(mlp, "activation_fn", None))))


_NAMES = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"),
          (("input_linear",), "output_linear"))


class GatedMLP:
    """H hidden, I intermediate. norm2 and norm2b may be missing."""

    settings: tuple[Any, ...] = ()       # Decoder.settings: there is nothing to find

    def __init__(self, layer: nn.Module, name: str, norm2: Norm | None, norm2b: Norm | None, factor: float) -> None:
        """Raises:
            Unfit: it is not gated, or has an unknown activation.
        """
        self.gu, self.down, self.act = gated_linears(layer, name)
        self.name, self.norm2, self.norm2b, self.factor = name, norm2, norm2b, factor
        self.norms = [n for n in (norm2, norm2b) if n]
        self.linears = self.gu, self.down
        self.names = {*self.gu.names, *self.down.names}

    @staticmethod
    def nothing_kept() -> KeptMLP:
        return KeptMLP()

    @staticmethod
    def observed(layer: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def correction_of(layer: nn.Module) -> None:
        return None

    # ---- tiles ----

    def tile(self, item: int) -> int:
        """Rows of which gate|up exists at a time, where it is not kept."""
        rows = TILE_BYTES // (2 * self.down.inputs * item)
        return max(LEAST_ROWS, rows // LEAST_ROWS * LEAST_ROWS)

    def _tiles(self, h: Tensor, k: KeptMLP) -> Iterator[tuple[slice, KeptMLP]]:
        """Rows, and what is kept of them."""
        step = self.tile(h.element_size())
        for first in range(0, h.shape[0], step):
            rows = slice(first, first + step)
            yield rows, KeptMLP(*(None if t is None else t[rows] for t in (k.rstd2, None, k.d, k.rstd2b)))

    def _forward_in_tiles(self, h: Tensor, w: Weights, k: KeptMLP) -> Tensor:
        y, parts = torch.empty_like(h), []
        for rows, part in self._tiles(h, k):
            y[rows] = self._forward(h[rows], w, part)
            part.gu = None
            parts.append(part)
        for name in ("rstd2", "d", "rstd2b"):
            if getattr(parts[0], name) is not None:
                setattr(k, name, torch.cat([getattr(part, name) for part in parts]))
        return y

    def _backward_in_tiles(self, dy: Tensor, h: Tensor, w: Weights, k: KeptMLP, grads: Grads) -> Tensor:
        dh, sums = torch.empty_like(h), Sums(grads)
        for rows, part in self._tiles(h, k):
            dh[rows] = self._backward(dy[rows], h[rows], w, part, sums)
        sums.finish()
        return dh

    # ---- forward ----

    def forward(self, h: Tensor, w: Weights, correction: None, k: KeptMLP, whole: bool = True) -> Tensor:
        """y [T, H] from h [T, H]. Writes what backward wants into k. whole: gate|up is to be kept; else many rows go
        through it in tiles."""
        in_tiles = not whole and h.shape[0] > self.tile(h.element_size())
        return self._forward_in_tiles(h, w, k) if in_tiles else self._forward(h, w, k)

    def _forward(self, h: Tensor, w: Weights, k: KeptMLP) -> Tensor:
        b = h
        if self.norm2:
            b, k.rstd2 = self.norm2.before(self.gu, h, w)
        k.gu = self.gu.forward(b, w)
        del b
        return self._finish(h, w, k)

    def _finish(self, h: Tensor, w: Weights, k: KeptMLP) -> Tensor:
        act = w.gated(self.down.weights, k.gu, self.act) if self.down.alone else ops.glu(*k.gu.chunk(2, 1), self.act)
        if not self.norm2b:
            return self.down.forward_onto(h, act, w, self.factor)
        k.d = self.down.forward(act, w)
        normed, k.rstd2b = self.norm2b.forward(k.d, w)
        return torch.add(h, normed, alpha=self.factor)

    @staticmethod
    def trim(k: KeptMLP) -> None:
        """Down to what "selective" keeps."""
        k.gu = None

    # ---- backward ----

    def backward(self, dy: Tensor, h: Tensor, w: Weights, correction: None, k: KeptMLP, grads: Grads) -> Tensor:
        """dh [T, H] from dy [T, H]. Uses up what was kept, and writes into it."""
        in_tiles = k.gu is None and h.shape[0] > self.tile(h.element_size())
        return (self._backward_in_tiles if in_tiles else self._backward)(dy, h, w, k, grads)

    def _backward(self, dy: Tensor, h: Tensor, w: Weights, k: KeptMLP, grads: Grads) -> Tensor:
        b = self._make_again(h, w, k)
        dd = dy if self.factor == 1.0 else dy * self.factor
        if self.norm2b:
            dd, _ = self.norm2b.backward(dd, k.d, k.rstd2b, w, grads)
            k.d = None
        dgu, act = self._gated_grads(self.down.input_grad(dd, w), k.gu, None if self.norm2 else h, w, grads)
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

    def _gated_grads(self, dact: Tensor, gu: Tensor, x: Tensor | None, w: Weights, grads: Grads) -> tuple[Any, Any]:
        """d(g|u) and act(g) * u, in the memory of gu and dact where they are tensors."""
        alone = self.gu.alone and self.down.alone and not grads.wants(*self.gu.biases)
        if not alone:
            return glu_grads(dact, gu, self.act)
        return w.gated_grads(self.gu.weights, self.down.weights, dact, gu, self.act, x)

    def _make_again(self, h: Tensor, w: Weights, k: KeptMLP) -> Tensor | None:
        """What was not kept, but for the last projection where nothing needs its output. Yields what the
        projections read if it had to be made for that."""
        if k.gu is not None:
            return None
        b = h
        if self.norm2 and k.rstd2 is None:
            b, k.rstd2 = self.norm2.forward(h, w)
        elif self.norm2:
            b = self.norm2.again(h, w)
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
