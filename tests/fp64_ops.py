"""megatrain_torch.ops for fp64 tensors, which the kernels do not take: what gradcheck holds templates to.

Finite differences tell a wrong formula from rounding only in fp64. A template's own formulas stay as they are; the
ops under them are reference_ops.py's.
"""
from __future__ import annotations

from typing import Any

import pytest
import reference_ops as reference
import torch
from torch import Tensor

from megatrain_torch import ops


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test is over, templates compute with these."""
    for f in (rms_norm, rms_norm_backward, rope, glu, glu_backward, column_sum, sum_rows, expert_glu, expert_glu_backward):
        monkeypatch.setattr(ops, f.__name__, f)


def rms_norm(x: Tensor, weight: Tensor, eps: float, style: int = 0, add: Tensor | None = None) -> Any:
    s = x if add is None else x + add
    y, rstd = reference.rms_norm(s, weight, eps, style == ops.ONE_PLUS)
    return y, s, rstd


def rms_norm_backward(dy: Tensor, s: Tensor, weight: Tensor, rstd: Tensor, style: int = 0, add: Tensor | None = None,
                      rebuild: bool = False, *, dx: Tensor | None = None) -> Any:
    w, rstd = weight + (style == ops.ONE_PLUS), rstd.unsqueeze(-1)
    hat, g = s * rstd, dy * w
    found = rstd * (g - hat * (g * hat).mean(-1, keepdim=True)) + (0 if add is None else add)
    dweight = (dy * hat).flatten(0, -2).sum(0)               # before dx, which may be dy, is written
    return found if dx is None else dx.copy_(found), dweight, hat * w if rebuild else None


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out_q: Tensor, out_k: Tensor, *, v: Tensor | None = None,
         out_v: Tensor | None = None, interleaved: bool = False, inverse: bool = False) -> None:
    for x, out in ((q, out_q), (k, out_k)):
        out.copy_((reference.rope_inverse if inverse else reference.rope)(x, cos, sin, interleaved))
    if v is not None:
        out_v.copy_(v)


def glu(gate: Tensor, up: Tensor, act: int = 0) -> Tensor:
    return reference.glu(gate, up, act)


def glu_backward(dh: Tensor, gate: Tensor, up: Tensor, act: int = 0, *, dgate: Tensor, dup: Tensor,
                 h: Tensor | None = None) -> None:
    product, grads = glu(gate, up, act), reference.glu_backward(dh, gate, up, act)
    dgate.copy_(grads[0])
    dup.copy_(grads[1])
    if h is not None:
        h.copy_(product)


def column_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.sum(0).to(dtype or x.dtype)


def sum_rows(x: Tensor, place: Tensor, tokens: int, weights: Tensor | None = None, base: Tensor | None = None,
             factor: float = 1.0) -> Tensor:
    picked = x[place] if weights is None else x[place] * weights.unsqueeze(1)
    return factor * picked.view(tokens, -1, x.shape[1]).sum(1) + (0 if base is None else base)


def _halves(gu: Tensor, interleaved: bool, bias: Tensor | None, expert: Tensor | None) -> tuple[Tensor, Tensor]:
    gu = gu if bias is None else gu + bias[expert.long()]
    return (gu[:, 0::2], gu[:, 1::2]) if interleaved else gu.chunk(2, 1)


def expert_glu(gu: Tensor, act: int = 0, interleaved: bool = False, bias: Tensor | None = None,
               expert: Tensor | None = None) -> Tensor:
    return glu(*_halves(gu, interleaved, bias, expert), act)


def expert_glu_backward(dact: Tensor, gu: Tensor, act: int = 0, interleaved: bool = False, bias: Tensor | None = None,
                        expert: Tensor | None = None, weights: Tensor | None = None, order: Tensor | None = None
                        ) -> Tensor | None:
    order = torch.arange(gu.shape[0]) if order is None else order
    by_row = torch.ones(gu.shape[0], 1, dtype=gu.dtype) if weights is None else weights[order].unsqueeze(1)
    h = expert_glu(gu, act, interleaved, bias, expert)
    dweights = None if weights is None else torch.empty_like(weights).index_put_((order,), (dact * h).sum(1))
    gu.copy_(reference.vjp(lambda t: expert_glu(t, act, interleaved, bias, expert), dact * by_row, gu)[0])
    dact.copy_(h * by_row)
    return dweights
