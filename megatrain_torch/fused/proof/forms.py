"""What templates stand for, in plain torch: the definitions that a module's own code is compared with.

A form is a way in which models write a part down. Forms of one style or kind have one meaning; they differ in what is
rounded when, or in how it is spelled. Which form a module has is found by its numbers (values.py), so that a form more
costs nothing but its lines, and a way that none has is refused.

Letters: B rows, S tokens of each, H hidden, D head size, hq and hk heads, T = B S, E experts, k of them a token's.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import ops
from ..templates.attention_half import Rotary
from .values import repeated

# ---- norms: (x [..., n], weight [n], eps) -> [..., n] ------------------------------------------------

def _hat_float(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _hat_power(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)


NORMS: list[tuple[int, Callable[[Tensor, Tensor, float], Tensor]]] = [
    (ops.ROUND_FIRST, lambda x, w, eps: w * _hat_float(x, eps).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: (w * _hat_float(x, eps)).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: (w.float() * _hat_float(x, eps)).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: (w.float() * _hat_power(x, eps)).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps)),
    (ops.ONE_PLUS, lambda x, w, eps: (_hat_float(x, eps) * (1.0 + w.float())).to(x.dtype)),
    (ops.ONE_PLUS, lambda x, w, eps: (_hat_float(x, eps) * (1.0 + w)).to(x.dtype)),
]

# ---- activations -------------------------------------------------------------------------------------

def _tanh_spelled(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: list[tuple[int, Callable[[Tensor], Tensor]]] = [
    (ops.SILU, F.silu),
    (ops.GELU_TANH, lambda x: F.gelu(x, approximate="tanh")),
    (ops.GELU_TANH, _tanh_spelled),
    (ops.GELU, F.gelu),
    (ops.GELU, lambda x: x * 0.5 * (1.0 + torch.erf(x / 2.0 ** 0.5))),
]

# ---- rotary embeddings: (q or k [B, h, S, D], cos, sin [B or 1, S, R]) -> as q ------------------------

def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _pair_turned(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, turn: Callable[[Tensor], Tensor], part: bool | None = None) -> Tensor:
    """part: only the first R of D numbers are rotated, the rest is passed; None: where R is not D."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    r = cos.shape[-1]
    part = r != x.shape[-1] if part is None else part
    first = x[..., :r] if part else x
    y = (first * cos + turn(first) * sin).to(x.dtype)
    return torch.cat((y, x[..., r:]), -1) if part else y


def _first_half(t: Tensor) -> Tensor:
    return t[..., :t.shape[-1] // 2]


def _repeated(cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
    """The angles of the first half, each at both places of its pair: [B or 1, 1, S, R]."""
    return (_first_half(t.unsqueeze(1)).repeat_interleave(2, dim=-1) for t in (cos, sin))


def _first_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = _repeated(cos, sin)
    first, rest = x[..., :cos.shape[-1]], x[..., cos.shape[-1]:]
    return torch.cat((first * cos + _pair_turned(first) * sin, rest), -1)


def _first_pairs_wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = _repeated(cos, sin)
    return (x.float() * cos + _pair_turned(x).float() * sin).to(x.dtype)


def _apart(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of the first and the second of all pairs, angles once for each: the first of all, then the second of all."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


_HALVES, _PAIRS, _FIRST = Rotary(), Rotary(interleaved=True), Rotary(interleaved=True, first=True)
ROTARIES: list[tuple[Rotary, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
    (_HALVES, lambda x, cos, sin: _turned(x, cos, sin, _half_turned)),
    (_HALVES, lambda x, cos, sin: _turned(x, cos, sin, _half_turned, True)),
    (_HALVES, lambda x, cos, sin: _turned(x.float(), cos.float(), sin.float(), _half_turned).to(x.dtype)),
    (_PAIRS, lambda x, cos, sin: _turned(x, cos, sin, _pair_turned)),
    (_PAIRS, lambda x, cos, sin: _turned(x.float(), cos, sin, _pair_turned, False).to(x.dtype)),
    (_FIRST, _first_pairs),
    (_FIRST, _first_pairs_wide),
    (Rotary(short=True), lambda x, cos, sin: _apart(*torch.chunk(x, 2, dim=-1), cos, sin)),
    (_FIRST._replace(parted=True),
     lambda x, cos, sin: _apart(x[..., 0::2], x[..., 1::2], _first_half(cos), _first_half(sin))),
]

# ---- attention: q [B, hq, S, D], k, v [B, hk, S, D], mask [B, 1, S, S] -> [B, hq, S, D] --------------

def _logits(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    """Capped where cap > 0."""
    w = torch.matmul(q, repeated(k, q.shape[1] // k.shape[1]).transpose(2, 3)) * scale
    if cap:
        w = torch.tanh(w / cap) * cap
    return w if mask is None else w + mask


def spelled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    w = F.softmax(_logits(q, k, mask, scale, cap), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(w, repeated(v, q.shape[1] // v.shape[1]))


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    w = _logits(q, k, mask, scale)
    w = torch.cat((w, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)), -1)
    w = w - w.max(dim=-1, keepdim=True).values
    w = F.softmax(w, dim=-1, dtype=w.dtype)[..., :-1].to(v.dtype)
    return torch.matmul(w, repeated(v, q.shape[1] // v.shape[1]))


def with_sinks_behind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    """The same by the share of a row that its sink leaves: sigmoid(lse - sink)."""
    share = (torch.logsumexp(_logits(q, k, mask, scale), dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = spelled(q, k, v, mask, scale)
    return out * share.unsqueeze(-1).to(out.dtype)


SINKS = with_sinks, with_sinks_behind

# ---- routers: (choice [T, E], ...) -> as choice --------------------------------------------------------

def of_groups(choice: Tensor, experts: int, groups: int, best: int) -> Tensor:
    """A mask that hides experts of all but the best groups: nothing, where there is one group."""
    of_group = choice.view(-1, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(of_group)
    mask.scatter_(1, torch.topk(of_group, k=best, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
    return choice.masked_fill(~mask.bool(), float("-inf"))


# ---- gates of experts: z [R, 2 I] -> [R, I] ------------------------------------------------------------

def gate(act: Callable[[Tensor], Tensor], z: Tensor, interleaved: bool) -> Tensor:
    a, u = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, dim=-1)
    return act(a) * u


def clamped_gate(z: Tensor, interleaved: bool) -> Tensor:
    """GPT-OSS' own: csrc/ops/glu.h has the numbers."""
    a, u = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, dim=-1)
    a, u = a.clamp(min=None, max=7.0), u.clamp(min=-7.0, max=7.0)
    return (u + 1) * (a * torch.sigmoid(a * 1.702))
