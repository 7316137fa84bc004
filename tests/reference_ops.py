"""What the layer ops compute, in plain torch, in the type that is given: the tests give float64.

Backwards are autograd's of these forwards. Nothing here rounds in between.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor


def vjp(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        return torch.autograd.grad(function(*leaves), leaves, dy)


# ---- gated activations ----

SILU, GELU_TANH, GELU, CLAMPED = range(4)
CLAMP, CLAMP_SLOPE = 7.0, 1.702


def logit_of(x: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """v and dv/dx, where the activation is x * sigmoid(v); not for GELU."""
    if act == SILU:
        return x, torch.ones_like(x)
    if act == CLAMPED:
        return CLAMP_SLOPE * x, torch.full_like(x, CLAMP_SLOPE)
    c = 2 * math.sqrt(2 / math.pi)
    return c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x**2)


def activation(x: Tensor, act: int) -> Tensor:
    """a(x)."""
    if act == GELU:
        return x * 0.5 * torch.erfc(-x / math.sqrt(2))
    x = x.clamp(max=CLAMP) if act == CLAMPED else x
    return x * torch.sigmoid(logit_of(x, act)[0])


def slope_terms(x: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """The two terms whose sum is a'(x) (inside of the clamp)."""
    if act == GELU:
        return 0.5 * torch.erfc(-x / math.sqrt(2)), x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    x = x.clamp(max=CLAMP) if act == CLAMPED else x
    v, dv = logit_of(x, act)
    return torch.sigmoid(v), x * torch.sigmoid(v) * torch.sigmoid(-v) * dv


def factor(up: Tensor, act: int) -> Tensor:
    """u(up)."""
    return up.clamp(-CLAMP, CLAMP) + 1 if act == CLAMPED else up


def glu(gate: Tensor, up: Tensor, act: int) -> Tensor:
    return activation(gate, act) * factor(up, act)


def glu_backward(dh: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, ...]:
    """dgate, dup."""
    return vjp(lambda g, u: glu(g, u, act), dh, gate, up)


def column_sum(x: Tensor) -> Tensor:
    """[n] fp32 from [T, n], in the order that csrc/ops/glu.h states: to the bit."""
    segments = [_lanes(segment) for segment in x.float().split(256)]
    if len(segments) == 1:
        return segments[0]
    return _lanes(torch.stack(segments)) if segments else x.new_zeros(x.shape[1], dtype=torch.float32)


def _lanes(rows: Tensor) -> Tensor:
    """Eight lanes, each adding its rows in order, then folded by halves."""
    lane = torch.zeros(8, rows.shape[1], device=rows.device)
    for some in rows.split(8):
        lane[:some.shape[0]] += some
    for half in (4, 2, 1):
        lane = lane[:half] + lane[half:]
    return lane[0]

# ---- embedding ----

def embedding_backward(dy: Tensor, ids: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    """[rows, H] fp32, in the order that csrc/ops/embedding.h states: to the bit."""
    out = torch.zeros(rows, dy.shape[1], device=dy.device)
    for v in set(ids.tolist()) - {padding_idx}:
        pieces = [_in_order(piece) for piece in dy[ids == v].float().split(256)]
        out[v] = _in_order(torch.stack(pieces))
    return out


def _in_order(rows: Tensor) -> Tensor:
    """The sum of rows, one after the other."""
    return functools.reduce(torch.add, rows.unbind())


# ---- cross entropy ----

def softcapped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), or x without a cap."""
    return cap * torch.tanh(x / cap) if cap > 0 else x


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, softcap: float = 0.0,
                  label_smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Loss and lse of each row [R], both 0 where ignored; logits: [R, V]."""
    x, keep = softcapped(logits, softcap), labels != ignore_index
    lse = torch.logsumexp(x, -1)
    picked = x.gather(-1, torch.where(keep, labels, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * x.mean(-1) + z_loss * lse.square()
    return torch.where(keep, loss, 0), torch.where(keep, lse, 0)


def cross_entropy_gradient(logits: Tensor, labels: Tensor, **options: float) -> Tensor:
    """[R, V]: gradient of the sum of losses by the logits."""
    return vjp(lambda x: cross_entropy(x, labels, **options)[0].sum(), logits.new_ones(()), logits)[0]


# ---- products ----

def gemm(c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha * a @ b + beta * c; c counts for nothing when beta is 0, whatever it holds."""
    return alpha * (a @ b) + (beta * c if beta else 0)


def grouped_gemm(x: Tensor, w: Tensor, ends: list[int]) -> Tensor:
    """[T, N]: rows of x [T, K] times the w [E, K, N] of their group."""
    group = torch.bucketize(torch.arange(len(x), device=x.device), torch.tensor(ends, device=x.device), right=True)
    return torch.einsum("tk,tkn->tn", x, w[group])


def grouped_gemm_wgrad(x: Tensor, dy: Tensor, ends: list[int]) -> Tensor:
    """[E, K, N]: gradient of grouped_gemm by w."""
    return vjp(lambda w: grouped_gemm(x, w, ends), dy, x.new_zeros(len(ends), x.shape[1], dy.shape[1]))[0]


# ---- norms ----

def rms_norm(s: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> tuple[Tensor, Tensor]:
    """y and rstd [...] from s [..., n]."""
    rstd = torch.rsqrt(s.square().mean(-1) + eps)
    return s * rstd.unsqueeze(-1) * (weight + plus), rstd


def rms_norm_backward(dy: Tensor, s: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> tuple[Tensor, ...]:
    """dx [..., n] and dweight [n]."""
    return vjp(lambda s, w: rms_norm(s, w, eps, plus)[0], dy, s, weight)


def layer_norm(s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean [...] and rstd [...] from s [..., n]."""
    mean = s.mean(-1, keepdim=True)
    rstd = torch.rsqrt((s - mean).square().mean(-1, keepdim=True) + eps)
    y = (s - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_backward(dy: Tensor, s: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """dx [..., n], dweight [n], dbias [n]."""
    weight = s.new_ones(s.shape[-1]) if weight is None else weight
    return vjp(lambda s, w, b: layer_norm(s, w, b, eps)[0], dy, s, weight, torch.zeros_like(weight))


# ---- rotary embedding ----

def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [B, S, h, D] with its first R numbers turned; cos, sin: [1 or B, S, R]."""
    r = cos.shape[-1]
    a, rest = x[..., :r], x[..., r:]
    if interleaved:
        across = torch.stack((-a[..., 1::2], a[..., 0::2]), -1).flatten(-2)
    else:
        across = torch.cat((-a[..., r // 2:], a[..., :r // 2]), -1)
    return torch.cat((a * cos.unsqueeze(2) + across * sin.unsqueeze(2), rest), -1)


def rope_inverse(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The transposed matrix, applied to x."""
    return vjp(lambda t: rope(t, cos, sin, interleaved), x, x)[0]
