"""The half of a decoder layer that works on each token: y = h + r * norm2b((act(g) * u) Wd), g|u = norm2(h) Wgu."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from .parts import Grads, Linears, Norm, Unfit, Weights, activation, child


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

    def __init__(self, layer: nn.Module, name: str, norm2: Norm | None, norm2b: Norm | None, factor: float) -> None:
        """Raises:
            Unfit: it is not gated, or has an unknown activation.
        """
        self.gu, self.down, self.act = gated_linears(layer, name)
        self.norm2, self.norm2b, self.factor = norm2, norm2b, factor
        self.norms = [n for n in (norm2, norm2b) if n]
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

    # ---- forward ----

    def forward(self, h: Tensor, w: Weights, correction: None, k: KeptMLP) -> Tensor:
        """y [T, H] from h [T, H]. Writes what backward wants into k."""
        b = h
        if self.norm2:
            b, k.rstd2 = self.norm2.forward(h, w)
        k.gu = self.gu.forward(b, w)
        del b
        return self._finish(h, w, k)

    def _finish(self, h: Tensor, w: Weights, k: KeptMLP) -> Tensor:
        act = ops.glu(*k.gu.chunk(2, 1), self.act)
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
        b = self._make_again(h, w, k)
        dd = dy if self.factor == 1.0 else dy * self.factor
        if self.norm2b:
            dd, _ = self.norm2b.backward(dd, k.d, k.rstd2b, w, grads)
            k.d = None
        act = self.down.input_grad(dd, w)                # d(act(g) * u), then the product itself, in the same memory
        gate, up = k.gu.chunk(2, 1)
        ops.glu_backward(act, gate, up, self.act, dgate=gate, dup=up, h=act)
        self.down.weight_grads(dd, act, grads)
        del act, dd
        db, k.gu, dgu = self.gu.input_grad(k.gu, w), None, k.gu
        if self.norm2:
            dh, again = self.norm2.backward(db, h, k.rstd2, w, grads, add=dy, rebuild=b is None)
            b = again if b is None else b
        else:
            dh, b = db.add_(dy), h
        self.gu.weight_grads(dgu, b, grads)
        return dh

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
