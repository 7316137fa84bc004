"""Attention with one product for q, k and v: qkv = a Wqkv, attention(rope(norm(q)), rope(norm(k)), v)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .attention import long_tokens
from .attention_half import AttentionHalf, Call, KeptAttention
from .linears import Linears
from .parts import Grads, Norm, Sums, Unfit, Weights, child, has
from .rotary import TURN, rotary_of


class SelfAttention(AttentionHalf):
    """hq query heads, hk key heads of size D; H hidden. norm1 and norm1b may be missing. k.qkv is [T, (hq + 2 hk) D],
    rotated where there are no norms of q and k."""

    def __init__(self, layer: nn.Module, norm1: Norm | None, norm1b: Norm | None, factor: float) -> None:
        """Raises:
            Unfit: it is not of this family.
        """
        attn = child(layer, "self_attn")
        if not hasattr(attn, "head_dim"):
            raise Unfit("its attention has no head_dim")
        super().__init__(layer, norm1, norm1b, factor)
        self._read_projections(layer, attn)
        self._read_heads(attn)
        self._read_norms(layer)
        self.linears = self.first, self.o
        self.names = {*self.first.names, *self.o.names} | ({self.sinks} if self.sinks else set())

    def _read_projections(self, layer: nn.Module, attn: nn.Module) -> None:
        self.head = self.values = int(attn.head_dim)
        names = ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        self.first = Linears(layer, *(f"self_attn.{n}" for n in names))
        self.hq = self.o.inputs // self.head
        self.hk = (sum(self.first.rows) // self.head - self.hq) // 2
        if (self.hq + 2 * self.hk) * self.head != sum(self.first.rows) or self.hk < 1 or self.hq % self.hk:
            raise Unfit(f"its projections have {self.first.rows} rows, which are no q, k and v heads of {self.head}")

    def _read_heads(self, attn: nn.Module) -> None:
        self.rotary, self.turns = rotary_of(attn) if getattr(attn, "use_rope", True) else None, (TURN, self.head)
        self.cap = float(getattr(attn, "attn_logit_softcapping", None) or 0.0)
        self.sinks = "self_attn.sinks" if dict.get(attn._parameters, "sinks") is not None else None
        self.walks = not self.cap and self.causal and self.head <= 128 and self.head % 8 == 0

    def _read_norms(self, layer: nn.Module) -> None:
        self.q_norm, self.k_norm = (Norm(layer, f"self_attn.{n}") if has(layer, f"self_attn.{n}") else None
                                    for n in ("q_norm", "k_norm"))
        if (self.q_norm is None) != (self.k_norm is None):
            raise Unfit("only one of q and k has a norm")
        self.norms = [n for n in (self.norm1, self.norm1b, self.q_norm, self.k_norm) if n]

    def per_head(self, norm: Norm) -> bool:
        return norm in (self.q_norm, self.k_norm) and norm.size == self.head

    @property
    def cached(self) -> int:
        return 2 * self.hk * self.head

    # ---- forward ----

    def _made(self, k: KeptAttention, shape: Any, w: Weights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = self._rotated(k, shape, w, call, in_place=True)
        call.gather(key, v)
        return q, key, v

    def _heads(self, qkv: Tensor, shape: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, hq, D], k and v [B, S, hk, D], as views of [T, (hq + 2 hk) D]."""
        heads = qkv.view(*shape, self.hq + 2 * self.hk, self.head)
        return heads.split((self.hq, self.hk, self.hk), 2)

    def _rotated(self, k: KeptAttention, shape: Any, w: Weights, call: Call, in_place: bool
                 ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as attention takes them. Without norms of q and k they stand rotated in qkv itself (in_place:
        now); with them, qkv keeps what their norms read."""
        q, key, v = self._heads(k.qkv, shape)
        if self.q_norm:
            q, k.inner["q"] = self._normed(self.q_norm, q, w)
            key, k.inner["k"] = self._normed(self.k_norm, key, w)
            in_place = True
        if in_place and call.cos is not None:
            ops.rope(q, key, call.cos, call.sin, q, key, interleaved=self.rotary.interleaved)
        return q, key, v

    def _normed(self, norm: Norm, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        """Over each head, or over all of them together where the weight is that long."""
        y, rstd = norm.forward(x if norm.size == self.head else x.flatten(2), w)
        return y.view(x.shape), rstd

    # ---- backward ----

    def backward(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: KeptAttention, grads: Grads,
                 input_grad: bool) -> Tensor:
        """dx [T, H] from dh [T, H], and may write into it. Uses up what was kept."""
        if call.attention.single_long_row(*self._heads(k.qkv, shape)[:2], self._sinks(w)):
            return self._backward_by_rows(dh, x, shape, w, call, k, grads, input_grad)
        dqkv = self._heads_backward(self._output_backward(dh, w, k, grads), shape, w, call, k, grads)
        return self._input_backward(dqkv, dh, x, w, k, grads, input_grad)

    def _backward_by_rows(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: KeptAttention,
                          grads: Grads, input_grad: bool) -> Tensor:
        """As backward, of one row, whose gradients never exist whole but for dx, which takes dh's place."""
        sums = Sums(grads)
        walk = call.attention.walk_back(*self._rotated(k, shape, w, call, in_place=False), k.out, k.extra)
        for rows in walk.blocks():
            part = k.rows(rows)
            dout = self._output_backward(dh[rows], w, part, sums)
            if self.sinks and sums.wants(self.sinks):
                sums[self.sinks] = call.attention.sinks_grad(dout, part.out, walk.lse[:, :, rows], self._sinks(w))
            cos, sin = (None if t is None else t[:, rows] for t in (call.cos, call.sin))
            dqkv = self._unrotated(walk.of(rows, dout), part.out.shape[:2], w, cos, sin, part, sums)
            del dout
            dh[rows] = self._input_backward(dqkv, dh[rows], x[rows], w, part, sums, input_grad)
        sums.finish()
        k.out = k.extra = None
        return dh

    def _heads_backward(self, dout: Tensor, shape: Any, w: Weights, call: Call, k: KeptAttention, grads: Grads
                        ) -> Tensor:
        """d(qkv) [T, (hq + 2 hk) D]."""
        q, key, v = self._rotated(k, shape, w, call, in_place=False)
        *d, dsinks = call.attention.backward(dout, q, key, v, k.out, k.extra, self._sinks(w))
        if self.sinks and grads.wants(self.sinks):
            grads[self.sinks] = dsinks
        k.out = k.extra = None
        return self._unrotated(d, shape, w, call.cos, call.sin, k, grads)

    def _unrotated(self, d: Sequence[Tensor], shape: Any, w: Weights, cos: Tensor | None, sin: Tensor | None,
                   k: KeptAttention, grads: Grads) -> Tensor:
        """d(qkv) [T, (hq + 2 hk) D] from dq, dk and dv as attention gives them."""
        dqkv = torch.empty_like(k.qkv)
        to_q, to_k, to_v = self._heads(dqkv, shape)
        if cos is not None:
            ops.rope(d[0], d[1], cos, sin, to_q, to_k, v=d[2], out_v=to_v, interleaved=self.rotary.interleaved,
                     inverse=True)
        else:
            for to, part in zip((to_q, to_k, to_v), d):
                to.copy_(part)
        if self.q_norm:
            raw_q, raw_k, _ = self._heads(k.qkv, shape)
            self._normed_backward(self.q_norm, to_q, raw_q, k.inner["q"], w, grads)
            self._normed_backward(self.k_norm, to_k, raw_k, k.inner["k"], w, grads)
        return dqkv

    def _normed_backward(self, norm: Norm, d: Tensor, raw: Tensor, rstd: Tensor, w: Weights, grads: Grads) -> None:
        """In place: d becomes the gradient of what the norm read."""
        if norm.size != self.head:
            d, raw = d.flatten(2), raw.flatten(2)
        norm.backward(d, raw, rstd, w, grads, out=d)

    # ---- sizes ----

    def kept_bytes(self, keep: str, item: int) -> int:
        columns = sum(self.first.rows) + self.o.inputs + self.hidden * bool(self.norm1b)
        rms = bool(self.norm1) + bool(self.norm1b)
        if self.q_norm:
            rms += self.hq if self.q_norm.size == self.head else 1
            rms += self.hk if self.k_norm.size == self.head else 1
        return columns * item + 4 * (self.hq + rms)

    def work_columns(self) -> int:
        return sum(self.first.rows)

    def copied(self, item: int) -> tuple[int, int]:
        q, qkv = self.o.inputs, sum(self.first.rows)
        return (q + qkv) * item, long_tokens(q, qkv)
