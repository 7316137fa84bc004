"""Experts: many small gated MLPs, each for the rows that a router sends it.

    g|u = x Wgu[e] + bgu[e]        out = (act(g) * u) Wd[e] + bd[e]        y[t] = sum over j of weight[t, j] * out

Rows are sorted by expert, so that one product serves all, and a token's k rows are added in the order of its
choice: no atomics, the same bits each time. Letters: T tokens, k experts of each, R = T k rows, E experts,
H hidden, I an expert's intermediate size.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .parts import Grads, Unfit, Weights, child

CODES = (ops.SILU, ops.GELU_TANH, ops.GELU, ops.CLAMPED)


@dataclass
class Rows:
    """Where the rows are. Sorted row r is choice order[r] of token token[r], of T k choices; choice c is row place[c].

    offsets: [E] int32, the ends of the experts' rows. expert: [R], of each sorted row.
    """

    token: Tensor
    order: Tensor
    place: Tensor
    offsets: Tensor
    expert: Tensor


def sort_rows(index: Tensor, experts: int) -> Rows:
    """index: [T, k] int64."""
    kind = torch.int16 if experts <= 32767 else torch.int64      # half the passes of a radix sort for each half of bits
    expert, order = torch.sort(index.flatten().to(kind), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    numbers = torch.arange(experts, device=index.device, dtype=kind)
    offsets = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    return Rows(order.div(index.shape[1], rounding_mode="floor"), order, place, offsets, expert)


class Experts:
    def __init__(self, layer: nn.Module, name: str, hidden: int) -> None:
        """Raises:
            Unfit: they are no gated MLPs in two stacks of matrices.
        """
        module = child(layer, name)
        own = {n: tuple(p.shape) for n, p in module.named_parameters()}
        gu, down = own.get("gate_up_proj", ()), own.get("down_proj", ())
        if len(gu) != 3 or len(down) != 3 or set(own) - {"gate_up_proj", "down_proj", *_BIASES}:
            raise Unfit(f"{name} has no gate_up_proj and down_proj of three dimensions, or more than these")
        self.transposed = bool(getattr(module, "is_transposed", gu[2] != hidden))
        self.count, self.inter = down[0], down[1] if self.transposed else down[2]
        wanted = ((hidden, 2 * self.inter), (self.inter, hidden))
        if (gu[1:], down[1:]) != (wanted if self.transposed else tuple(s[::-1] for s in wanted)) or gu[0] != down[0]:
            raise Unfit(f"{name} has matrices of {gu} and {down}: not gated")
        if getattr(module, "_is_expert_parallel", False) or getattr(module, "has_post_expert_norm", False):
            raise Unfit(f"{name} are spread over devices, or have norms of their own")
        self.gu, self.down = f"{name}.gate_up_proj", f"{name}.down_proj"
        self.biases = tuple(f"{name}.{n}" for n in _BIASES if n in own)
        if len(self.biases) == 1:
            raise Unfit(f"{name} has a bias in one place only")
        self.names = {self.gu, self.down, *self.biases}
        self.act, self.interleaved = _gate_of(module)

    # ---- forward ----

    def gate_up(self, b: Tensor, rows: Rows, w: Weights) -> Tensor:
        """g|u [R, 2 I] from b [T, H]."""
        gu = ops.grouped_gemm(b.index_select(0, rows.token), self._matrix(self.gu, w), rows.offsets)
        if self.biases:
            gu += w[self.biases[0]].index_select(0, rows.expert.long())
        return _apart(gu) if self.interleaved else gu

    def finish(self, gu: Tensor, weights: Tensor, rows: Rows, base: Tensor | None, factor: float, w: Weights) -> Tensor:
        """base + factor * y [T, H], from weights [T, k] fp32."""
        act = ops.glu(*gu.chunk(2, 1), self.act)
        out = ops.grouped_gemm(act, self._matrix(self.down, w), rows.offsets)
        if self.biases:
            out += w[self.biases[1]].index_select(0, rows.expert.long())
        return combined(out, rows.place, weights, base, factor)

    def _matrix(self, name: str, w: Weights) -> Tensor:
        """[E, inputs, outputs]."""
        return w[name] if self.transposed else w[name].mT

    # ---- backward ----

    def backward(self, dy: Tensor, b: Tensor, gu: Tensor, weights: Tensor, rows: Rows, base: Tensor, w: Weights,
                 grads: Grads) -> tuple[Tensor, Tensor]:
        """base + db [T, H], and dweights [T, k] fp32, from dy [T, H]. Overwrites gu.

        What an expert gives is not made again: its product with dy is that of dy Wd' with what Wd reads.
        """
        dys = dy.index_select(0, rows.token)
        dact = ops.grouped_gemm_dgrad(dys, self._matrix(self.down, w), rows.offsets)     # of a weight of 1
        gate, up = gu.chunk(2, 1)
        act = torch.empty_like(dact)
        ops.glu_backward(dact, gate, up, self.act, dgate=gate, dup=up, h=act)
        dweights = _dots(dact, act)
        by_row = weights.flatten().index_select(0, rows.order).unsqueeze(1)
        gu *= by_row
        act *= by_row
        self._weight_grads(self.down, act, dys, rows, grads)
        if self.biases:
            dweights = dweights + _dots(dys, w[self.biases[1]].index_select(0, rows.expert.long()))
            self._bias_grads(self.biases[1], by_row, dys, rows, grads)
        del dys, act, dact
        dgu = _together(gu) if self.interleaved else gu
        self._weight_grads(self.gu, b.index_select(0, rows.token), dgu, rows, grads)
        if self.biases:
            self._bias_grads(self.biases[0], torch.ones_like(by_row), dgu, rows, grads)
        dx = ops.grouped_gemm_dgrad(dgu, self._matrix(self.gu, w), rows.offsets)
        db = combined(dx, rows.place, None, base, 1.0)
        return db, dweights.index_select(0, rows.place).view(weights.shape)

    def _weight_grads(self, name: str, x: Tensor, dy: Tensor, rows: Rows, grads: Grads) -> None:
        if grads.wants(name):
            grads[name] = ops.grouped_gemm_wgrad(x, dy, rows.offsets) if self.transposed else \
                ops.grouped_gemm_wgrad(dy, x, rows.offsets)

    def _bias_grads(self, name: str, by_row: Tensor, dy: Tensor, rows: Rows, grads: Grads) -> None:
        """Sums of the experts' rows, each times its number, as products of one row of eight (what the kernel takes)."""
        if grads.wants(name):
            x = nn.functional.pad(by_row.to(dy.dtype), (0, 7))
            grads[name] = ops.grouped_gemm_wgrad(x, dy, rows.offsets)[:, 0].contiguous()


_BIASES = ("gate_up_proj_bias", "down_proj_bias")


def combined(rows: Tensor, place: Tensor, weights: Tensor | None, base: Tensor | None, factor: float) -> Tensor:
    """base + factor * the sum over j of weights[t, j] * rows[place[t k + j]]: [T, H], from rows [R, H]."""
    k = weights.shape[1] if weights is not None else place.numel() // base.shape[0]
    chosen = rows.index_select(0, place).view(-1, k, rows.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    if weights is None:
        weights = torch.ones(chosen.shape[:2], dtype=wide, device=rows.device)
    found = (chosen.to(wide) * (weights * factor).unsqueeze(-1)).sum(1)
    return (found if base is None else found + base.to(wide)).to(rows.dtype)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """[R] fp32: the product of each row with its like."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten().to(torch.promote_types(a.dtype, torch.float32))


def _apart(t: Tensor) -> Tensor:
    """Columns 0, 2, 4 ... then 1, 3, 5 ...: [R, 2 I] dense."""
    return t.view(t.shape[0], -1, 2).mT.reshape(t.shape)


def _together(t: Tensor) -> Tensor:
    """The inverse of _apart."""
    return t.view(t.shape[0], 2, -1).mT.reshape(t.shape)


def _gate_of(module: nn.Module) -> tuple[int, bool]:
    """Which of ops' activations experts use, and whether gate and up are interleaved: found by trying it, in a range
    that shows clamping.

    Raises:
        Unfit: none.
    """
    z = torch.empty(64, 16).uniform_(-12, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        truth = _gated(module, z)
        for act, interleaved in product(CODES, (False, True)):
            gate, up = (_apart(z) if interleaved else z).chunk(2, 1)
            if torch.allclose(truth, ops.glu(gate, up, act), rtol=1e-5, atol=1e-5):
                return act, interleaved
    raise Unfit(f"the gate of its experts ({type(module).__name__}) is none of the known ones")


def _gated(module: Any, z: Tensor) -> Tensor:
    own = getattr(module, "_apply_gate", None)
    if own is not None:
        return own(z)
    gate, up = z.chunk(2, -1)
    return module.act_fn(gate) * up
