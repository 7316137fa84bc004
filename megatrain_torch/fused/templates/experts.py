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

from ... import ops
from .parts import Grads, Unfit, Weights, child
from .router import Routed, spread_out

CODES = (ops.SILU, ops.GELU_TANH, ops.GELU, ops.CLAMPED)


@dataclass
class Rows:
    """Where the rows are. Sorted row r is choice order[r] of token token[r], of T k choices; choice c is row place[c].

    offsets: [E] int32, the ends of the experts' rows. expert: [R], of each sorted row. experts: whose rows they are;
    of some of the experts `place` is None, and the first row is number `first` of all.
    """

    token: Tensor
    order: Tensor
    place: Tensor | None
    offsets: Tensor
    expert: Tensor
    experts: range
    first: int = 0

    @property
    def span(self) -> slice:
        """Which they are of all rows."""
        return slice(self.first, self.first + len(self.token))

    def of(self, x: Tensor) -> Tensor:
        """x [T, n] by sorted rows: [R, n]."""
        return ops.sum_rows(x, self.token, self.token.shape[0])

    def parts(self, groups: list[range]) -> list[Rows]:
        """The rows of these experts, in order; those that no token chose have none. The host waits for the choice
        where there are several groups."""
        if len(groups) == 1:
            return [self]
        ends, found = [0, *self.offsets.tolist()], []
        for experts in groups:
            first, last = ends[experts.start], ends[experts.stop]
            if last > first:
                found.append(Rows(self.token[first:last], self.order[first:last], None,
                                  self.offsets[experts.start:experts.stop] - first, self.expert[first:last], experts,
                                  first))
        return found

    def put(self, whole: Tensor | None, part: Tensor, rows: int) -> Tensor:
        """part [R, n] in its place among all [rows, n], which are made by the first."""
        if len(part) == rows:
            return part
        if whole is None:
            whole = part.new_empty(rows, *part.shape[1:])
        whole[self.span] = part
        return whole


def sort_rows(index: Tensor, experts: int) -> Rows:
    """index: [T, k] int64."""
    kind = torch.int16 if experts <= 32767 else torch.int64      # a radix sort passes once for every few bits
    expert, order = torch.sort(index.flatten().to(kind), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    numbers = torch.arange(experts, device=index.device, dtype=kind)
    offsets = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    return Rows(order.div(index.shape[1], rounding_mode="floor"), order, place, offsets, expert, range(experts))


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

    def _matrix(self, name: str, rows: Rows, w: Weights) -> Tensor:
        """[E, inputs, outputs], of the experts whose rows they are."""
        found = w.experts(name, rows.experts)
        return found if self.transposed else found.mT

    def _gate_bias(self, rows: Rows, w: Weights) -> tuple[Tensor | None, Tensor | None]:
        return (w[self.biases[0]], rows.expert.int()) if self.biases else (None, None)

    # ---- forward ----

    def forward(self, b: Tensor, weights: Tensor, routed: Routed, rows: Rows, base: Tensor | None, factor: float,
                w: Weights, keeps: bool) -> tuple[Tensor, Tensor | None]:
        """base + factor * y [T, H] from b [T, H] and weights [T, k] fp32, and g|u [R, 2 I] where it is to be kept: in
        the experts' own order of columns and without their biases."""
        out, gu = self._outputs(b, rows, w, keeps)
        if self.biases:                                  # the sum of weights * bias is one product
            spread, bias = spread_out(weights, routed).to(out.dtype), w[self.biases[1]]
            base = factor * torch.mm(spread, bias) if base is None else torch.addmm(base, spread, bias, alpha=factor)
        return ops.sum_rows(out, rows.place, weights.shape[0], weights.flatten(), base, factor), gu

    def _outputs(self, b: Tensor, rows: Rows, w: Weights, keeps: bool) -> tuple[Tensor, Tensor | None]:
        """What the experts give for each row [R, H]; and g|u. Of some experts all is done before the next are there."""
        out = gu = None
        for part in rows.parts(w.groups(self.gu, self.count)):
            up = ops.grouped_gemm(part.of(b), self._matrix(self.gu, part, w), part.offsets)
            act = ops.expert_glu(up, self.act, self.interleaved, *self._gate_bias(part, w))
            gu = part.put(gu, up, len(rows.token)) if keeps else None
            del up
            out = part.put(out, ops.grouped_gemm(act, self._matrix(self.down, part, w), part.offsets), len(rows.token))
            del act
        return out, gu

    # ---- backward ----

    def backward(self, dy: Tensor, b: Tensor, gu: Tensor | None, weights: Tensor, routed: Routed, rows: Rows,
                 base: Tensor | None, w: Weights, grads: Grads) -> tuple[Tensor, Tensor]:
        """base + db [T, H], and dweights [T, k] fp32, from dy [T, H]. Overwrites gu; None: it is made again.

        What an expert gives is not made again: its product with dy is that of dy Wd' with what Wd reads. Rows wait in
        memory as inputs' gradients alone: of some experts all else is done before the next are there.
        """
        count, dx, dweights = len(rows.token), None, None
        by_row = weights.flatten()[rows.order]
        for part in rows.parts(w.groups(self.gu, self.count)):
            up = ops.grouped_gemm(part.of(b), self._matrix(self.gu, part, w), part.offsets) if gu is None \
                else gu[part.span]
            dys = part.of(dy)
            act = ops.grouped_gemm_dgrad(dys, self._matrix(self.down, part, w), part.offsets)   # for a weight of 1
            dweight = ops.expert_glu_backward(act, up, self.act, self.interleaved, *self._gate_bias(part, w),
                                              by_row[part.span])
            dweights = part.put(dweights, dweight, count)
            self._matrix_grads(part, b, up, act, dys, grads)
            del act, dys
            dx = part.put(dx, ops.grouped_gemm_dgrad(up, self._matrix(self.gu, part, w), part.offsets), count)
            del up
        dweights = dweights[rows.place].view(weights.shape)
        if self.biases:
            dweights = dweights + torch.mm(dy, w[self.biases[1]].t()).gather(1, routed.index)
            if grads.wants(self.biases[1]):
                grads[self.biases[1]] = torch.mm(spread_out(weights, routed).to(dy.dtype).t(), dy)
        return ops.sum_rows(dx, rows.place, b.shape[0], None, base), dweights

    def _matrix_grads(self, rows: Rows, b: Tensor, dgu: Tensor, act: Tensor, dys: Tensor, grads: Grads) -> None:
        """Of what is trained: matrices where all experts are there together, and the bias of gate and up."""
        if grads.wants(self.down):
            self._weight_grads(self.down, act, dys, rows, grads)
        if grads.wants(self.gu):
            self._weight_grads(self.gu, rows.of(b), dgu, rows, grads)
        if self.biases and grads.wants(self.biases[0]):  # each expert's sum, as a product with eight (the kernel's
            ones = dgu.new_ones(dgu.shape[0], 8)         # least) rows of ones
            sums = ops.grouped_gemm_wgrad(ones, dgu, rows.offsets)[:, 0]
            if len(rows.experts) < self.count and self.biases[0] not in grads:
                grads[self.biases[0]] = sums.new_zeros(self.count, sums.shape[1])
            if len(rows.experts) < self.count:
                grads[self.biases[0]][rows.experts.start:rows.experts.stop] = sums
            else:
                grads[self.biases[0]] = sums.contiguous()

    def _weight_grads(self, name: str, x: Tensor, dy: Tensor, rows: Rows, grads: Grads) -> None:
        grads[name] = ops.grouped_gemm_wgrad(x, dy, rows.offsets) if self.transposed else \
            ops.grouped_gemm_wgrad(dy, x, rows.offsets)


_BIASES = ("gate_up_proj_bias", "down_proj_bias")


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
            if torch.allclose(truth, ops.expert_glu(z, act, interleaved), rtol=1e-5, atol=1e-5):
                return act, interleaved
    raise Unfit(f"the gate of its experts ({type(module).__name__}) is none of the known ones")


def _gated(module: Any, z: Tensor) -> Tensor:
    own = getattr(module, "_apply_gate", None)
    if own is not None:
        return own(z)
    gate, up = z.chunk(2, -1)
    return module.act_fn(gate) * up
