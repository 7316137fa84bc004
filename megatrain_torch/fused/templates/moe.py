"""The half of a decoder layer that is a mixture of experts.

    b = norm2(h)        y = h + r * norm2b(experts(b) + sigmoid(b ws') * shared(b))

A shared expert, and the gate on it, are there in some families; so are the norms. What is kept between forward
and backward: the router's logits and choice, g|u of the routed rows and of the shared expert.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...base.codes import Coding
from .experts import Experts, Rows, sort_rows
from .linears import Linears
from .mlp import gated_linears
from .parts import Grads, Norm, Unfit, Weights, child, has
from .router import Routed, Router


@dataclass
class KeptExperts:
    """What lies between forward and backward; None: to be made again."""

    rstd2: Tensor | None = None
    routed: Routed | None = None
    gu: Tensor | None = None             # [R, 2 I] of the routed rows, sorted by expert
    shared_gu: Tensor | None = None      # [T, 2 Is]
    d: Tensor | None = None              # [T, H], only where norm2b is
    rstd2b: Tensor | None = None


class Shared:
    """An expert that all tokens go to, with or without a gate of one number for each token."""

    def __init__(self, layer: nn.Module, name: str, gate: str) -> None:
        self.gu, self.down, self.act = gated_linears(layer, name)
        self.name, self.gate = name, Linears(layer, gate) if has(layer, gate) else None
        if self.down.biases or (self.gate and self.gate.biases):
            raise Unfit("its shared expert has biases")
        self.linears = (self.gu, self.down, self.gate) if self.gate else (self.gu, self.down)
        self.names = {*self.gu.names, *self.down.names, *(self.gate.names if self.gate else ())}

    def gate_of(self, b: Tensor, w: Weights) -> Tensor:
        """[T, 1], the layer's type."""
        return torch.sigmoid(self.gate.forward(b, w))

    def forward_onto(self, base: Tensor | None, b: Tensor, gu: Tensor, factor: float, w: Weights) -> Tensor:
        """base + factor * gate * expert(b) [T, H]; gu as gu.forward(b) gave it."""
        act = ops.glu(*gu.chunk(2, 1), self.act)
        if self.gate:
            act *= self.gate_of(b, w)
        return self.down.forward(act, w) if base is None else self.down.forward_onto(base, act, w, factor)

    def backward(self, dy: Tensor, b: Tensor, gu: Tensor, w: Weights, grads: Grads) -> Tensor:
        """db [T, H] from dy [T, H]. Overwrites gu."""
        act = self.down.input_grad(dy, w)
        s = self.gate_of(b, w) if self.gate else None
        ds = ops.expert_glu_backward(act, gu, self.act, weights=_numbers(s))
        self.down.weight_grads(dy, act, w, grads)
        del act
        self.gu.weight_grads(gu, b, w, grads)
        db = self.gu.input_grad(gu, w)
        if s is None:
            return db
        dlogit = (ds.unsqueeze(1) * s * (1 - s)).to(b.dtype)
        self.gate.weight_grads(dlogit, b, w, grads)
        if self.gate.adapters:
            return db.add_(self.gate.input_grad(dlogit, w))
        return db.addmm_(dlogit, w.joint(self.gate.weights))


def _numbers(s: Tensor | None) -> Tensor | None:
    """[T, 1] as the op takes it: [T] fp32, or fp64 of fp64."""
    return None if s is None else s.flatten().to(torch.promote_types(s.dtype, torch.float32))


class SparseMLP:
    def __init__(self, layer: nn.Module, name: str, norm2: Norm | None, norm2b: Norm | None, factor: float) -> None:
        """Raises:
            Unfit: it is no mixture of experts of this kind.
        """
        block = child(layer, name)
        self.router = Router(layer, name, "gate" if has(block, "gate") else "router")
        hidden = dict(layer.named_parameters())[self.router.weight].shape[1]
        self.experts = Experts(layer, f"{name}.experts", hidden)
        if self.experts.count != self.router.experts:
            raise Unfit(f"its router knows {self.router.experts} experts of {self.experts.count}")
        if any("jitter" in n and v for m in block.modules() for n, v in vars(m).items()):
            raise Unfit("its router draws random numbers")
        self.shared = _shared_of(layer, name)
        self.norm2, self.norm2b, self.factor, self.hidden = norm2, norm2b, factor, hidden
        self.norms = [n for n in (norm2, norm2b) if n]
        self.linears = self.shared.linears if self.shared else ()
        self.names = self.router.names | self.experts.names | (self.shared.names if self.shared else set())

    @property
    def settings(self) -> tuple[Any, ...]:
        """Decoder.settings: the router's."""
        return self.router.normalised, self.router.factor, self.router.least

    @settings.setter
    def settings(self, found: tuple[Any, ...]) -> None:
        self.router.normalised, self.router.factor, self.router.least = found

    @staticmethod
    def nothing_kept() -> KeptExperts:
        return KeptExperts()

    @contextmanager
    def observed(self, layer: nn.Module) -> Iterator[None]:
        """Inside, the choice that the module's own router made last is the template's too."""
        def note(module: nn.Module, args: Any, out: tuple[Tensor, ...]) -> None:
            self.router.forced = out[2].detach()

        handle = child(layer, self.router.name).register_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()
            self.router.forced = None

    def correction_of(self, layer: nn.Module) -> Tensor | None:
        return self.router.correction_of(layer)

    # ---- forward ----

    def forward(self, h: Tensor, w: Weights, correction: Tensor | None, k: KeptExperts, whole: bool = True) -> Tensor:
        """y [T, H] from h [T, H]. Writes what backward wants into k. Experts' rows go at once, whole or not."""
        b = h
        if self.norm2:
            b, k.rstd2 = self.norm2.forward(h, w)
        k.routed = self.router.forward(b, w, correction)
        return self._finish(h, b, sort_rows(k.routed.index, self.experts.count), w, k, whole)

    def _finish(self, h: Tensor, b: Tensor, rows: Rows, w: Weights, k: KeptExperts, keeps: bool) -> Tensor:
        """keeps: g|u of the routed rows; that of the shared expert is kept in any case."""
        base, factor = (None, 1.0) if self.norm2b else (h, self.factor)
        if self.shared:
            k.shared_gu = self.shared.gu.forward(b, w)
            base = self.shared.forward_onto(base, b, k.shared_gu, factor, w)
        weights = self.router.weights(k.routed, h.dtype)
        y, k.gu = self.experts.forward(b, weights, k.routed, rows, base, factor, w, keeps)
        if not self.norm2b:
            return y
        k.d = y
        normed, k.rstd2b = self.norm2b.forward(y, w)
        return torch.add(h, normed, alpha=self.factor)

    @staticmethod
    def trim(k: KeptExperts) -> None:
        """Down to what "selective" keeps."""
        k.gu = k.shared_gu = None

    # ---- backward ----

    def backward(self, dy: Tensor, h: Tensor, w: Weights, correction: Tensor | None, k: KeptExperts, grads: Grads
                 ) -> Tensor:
        """dh [T, H] from dy [T, H]. Uses up what was kept, and writes into it."""
        b, rows = self._make_again(h, w, correction, k)
        dd = dy if self.factor == 1.0 else dy * self.factor
        if self.norm2b:
            dd, _ = self.norm2b.backward(dd, k.d, k.rstd2b, w, grads)
            k.d = None
        base = None
        if self.shared:
            base = self.shared.backward(dd, b, k.shared_gu, w, grads)
            k.shared_gu = None
        weights = self.router.weights(k.routed, h.dtype)
        db, dweights = self.experts.backward(dd, b, k.gu, weights, k.routed, rows, base, w, grads)
        k.gu = None
        db += self.router.backward(dweights, k.routed, b, w, grads)
        if not self.norm2:
            return db.add_(dy)
        return self.norm2.backward(db, h, k.rstd2, w, grads, add=dy)[0]

    def _make_again(self, h: Tensor, w: Weights, correction: Tensor | None, k: KeptExperts) -> tuple[Tensor, Rows]:
        """What the experts read, and what was not kept; not their outputs, unless norm2b reads them. Their g|u is made
        where it is used."""
        b = h
        if self.norm2 and k.rstd2 is None:
            b, k.rstd2 = self.norm2.forward(h, w)
        elif self.norm2:
            b = self.norm2.again(h, w)
        if k.routed is None:
            k.routed = self.router.forward(b, w, correction)
        rows = sort_rows(k.routed.index, self.experts.count)
        if self.norm2b and k.d is None:
            self._finish(h, b, rows, w, k, keeps=True)
        elif self.shared and k.shared_gu is None:
            k.shared_gu = self.shared.gu.forward(b, w)
        return b, rows

    # ---- sizes ----

    def kept_bytes(self, keep: str, item: int) -> int:
        """Bytes that a token takes between forward and backward."""
        shared = 2 * self.shared.down.inputs if self.shared else 0
        columns = self.hidden * bool(self.norm2b)
        columns += 2 * self.experts.inter * self.router.top_k + shared if keep == "saved" else 0
        routed = self.experts.count * (4 if self.router.wide else item) + 8 * self.router.top_k
        return columns * item + routed + 4 * len(self.norms)

    def work_columns(self) -> int:
        """Numbers of a token that backward has beside what "saved" keeps."""
        return self.router.top_k * (2 * self.experts.inter + 2 * self.hidden)

    def experts_of(self, item: int, codings: dict[str, Coding]) -> tuple[int, int, int]:
        """Decoder.experts. Of all rows only inputs' gradients are there at a time, [R, H]: not g|u and its gradient,
        nor outputs' gradients."""
        made = sum(codings[n].shape.numel() * item for n in (self.experts.gu, self.experts.down) if n in codings)
        return self.experts.count, made, self.router.top_k * (4 * self.experts.inter + self.hidden) * item

    def weights_used(self) -> int:
        """Elements of the matrices that a token meets, but for the router's and the shared expert's."""
        return self.router.top_k * 3 * self.experts.inter * self.hidden

    @staticmethod
    def tiled(item: int) -> tuple[int, int, int]:
        """Nothing is: as GatedMLP's."""
        return 0, 0, 0


def _shared_of(layer: nn.Module, name: str) -> Shared | None:
    for expert in (f"{name}.shared_expert", f"{name}.shared_experts", "shared_mlp"):
        if has(layer, expert):
            return Shared(layer, expert, f"{name}.shared_expert_gate")
    return None
