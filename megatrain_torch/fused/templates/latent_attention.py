"""Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, equations 37 to 47): queries, and keys with values, by way of
few numbers of a token.

    cq | ckv | kr = a [Wqa; Wkva]        qn | qr = norm(cq) Wqb, or cq itself      kn | v = norm(ckv) Wkvb
    q = qn | rope(qr)                    k = kn | rope(kr), the one kr for all heads

Letters: N numbers of a head that are not turned, R that are, D = N + R; V of a value's head; C of ckv.

What Wqb and Wkvb give is many times as wide as what they read: "selective" keeps the latter. Keys lie as attention's
kernels want them, [B, S, hq, D], for the time of a forward or a backward: their numbers are kv's and kr's.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .attention import long_tokens
from .attention_half import AttentionHalf, Call, KeptAttention
from .linears import Linears
from .parts import Grads, Norm, Unfit, Weights, child, has
from .rotary import TURN, TURN_PAIRS, rotary_of


class LatentAttention(AttentionHalf):
    """
    Attributes:
        q_up: Wqb; None: the first product gives queries. kv_up: Wkvb.
        wide: numbers of cq. latent, turned: C and R.
    """

    def __init__(self, layer: nn.Module, norm1: Norm | None, norm1b: Norm | None, factor: float) -> None:
        """Raises:
            Unfit: it is not of this family.
        """
        super().__init__(layer, norm1, norm1b, factor)
        attn: Any = child(layer, "self_attn")
        if getattr(attn, "num_key_value_groups", 1) != 1:
            raise Unfit("its latent attention has fewer heads of keys than of queries")
        self._read_projections(layer, attn)
        self.hk = self.hq
        turn = TURN_PAIRS if getattr(self.config, "rope_interleave", False) else TURN
        self.rotary, self.turns = rotary_of(attn, turn), (turn, self.turned)
        self.linears = (self.first, *([self.q_up] if self.q_up else []), self.kv_up, self.o)
        self.names = {name for one in self.linears for name in one.names}
        self.norms = [n for n in (self.norm1, self.norm1b, self.q_norm, self.kv_norm) if n]

    def _read_projections(self, layer: nn.Module, attn: Any) -> None:
        low = has(layer, "self_attn.q_a_proj")
        self.first = Linears(layer, f"self_attn.{'q_a_proj' if low else 'q_proj'}", "self_attn.kv_a_proj_with_mqa")
        self.q_up = Linears(layer, "self_attn.q_b_proj") if low else None
        self.q_norm = Norm(layer, "self_attn.q_a_layernorm") if low else None
        self.kv_up, self.kv_norm = Linears(layer, "self_attn.kv_b_proj"), Norm(layer, "self_attn.kv_a_layernorm")
        self.turned, self.values = int(attn.qk_rope_head_dim), int(attn.v_head_dim)
        self.head, self.latent = int(attn.qk_nope_head_dim) + self.turned, self.kv_up.inputs
        self.wide = self.first.rows[0]
        queries = (self.q_up or self.first).rows[0]
        self.hq = queries // self.head
        sizes = (queries, self.first.rows[1], sum(self.kv_up.rows), self.o.inputs)
        if sizes != (self.hq * self.head, self.latent + self.turned, self.hq * self._both, self.hq * self.values) or \
                (self.q_up and self.q_up.inputs != self.wide):
            raise Unfit(f"its latent attention has projections of {sizes} numbers, which are no heads of {self.head}")

    @property
    def _plain(self) -> int:
        """N."""
        return self.head - self.turned

    @property
    def _both(self) -> int:
        """N + V."""
        return self._plain + self.values

    @property
    def cached(self) -> int:
        return self.latent + self.turned

    # ---- forward ----

    def _made(self, k: KeptAttention, shape: Any, w: Weights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        self._make_q(k, shape, w, call)
        self._make_kv(k, shape, w, call)
        return self._heads(k, shape, call)

    def _make_q(self, k: KeptAttention, shape: Any, w: Weights, call: Call) -> None:
        """Queries, turned: k.q, or where they are in k.qkv."""
        if self.q_up:
            low, k.inner["q_a"] = self.q_norm.before(self.q_up, k.qkv[:, :self.wide], w)
            k.q = self.q_up.forward(low, w)
        self._turn(self._queries(k, shape)[..., self._plain:], call)

    def _make_kv(self, k: KeptAttention, shape: Any, w: Weights, call: Call) -> None:
        """k.kv; a cache gets what it is made of."""
        given = k.qkv[:, self.wide:self.wide + self.latent]
        if call.cache is None:
            low, k.inner["kv_a"] = self.kv_norm.before(self.kv_up, given, w)
        else:
            low, k.inner["kv_a"] = self.kv_norm.forward(given, w)
            shared = self._shared(k.qkv, shape, call)
            call.gather(low.view(*shape, 1, self.latent), self.rotary.as_given(shared) if self.rotary else shared)
        k.kv = self.kv_up.forward(low, w)

    def _queries(self, k: KeptAttention, shape: Any) -> Tensor:
        """[B, S, hq, D], where they lie."""
        return (k.qkv[:, :self.wide] if k.q is None else k.q).view(*shape, self.hq, self.head)

    def _shared(self, qkv: Tensor, shape: Any, call: Call) -> Tensor:
        """rope(kr) [B, S, 1, R], a copy."""
        return self._turn(qkv[:, -self.turned:].view(*shape, 1, self.turned).clone(), call)

    def _turn(self, t: Tensor, call: Call, inverse: bool = False) -> Tensor:
        """t [B, S, h, R], in place."""
        if call.cos is not None:
            none = t[:, :, :0]
            ops.rope(t, none, call.cos, call.sin, t, none, interleaved=self.rotary.interleaved, inverse=inverse)
        return t

    def _heads(self, k: KeptAttention, shape: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        plain, v = k.kv.view(*shape, self.hq, self._both).split((self._plain, self.values), 3)
        key = torch.empty(*plain.shape[:3], self.head, dtype=plain.dtype, device=plain.device)
        key[..., :self._plain] = plain
        key[..., self._plain:] = self._shared(k.qkv, shape, call)
        return self._queries(k, shape), key, v

    def trim(self, k: KeptAttention) -> None:
        k.q = k.kv = None

    # ---- backward ----

    def backward(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: KeptAttention, grads: Grads,
                 input_grad: bool) -> Tensor:
        dout = self._output_backward(dh, w, k, grads)
        if self.q_up and k.q is None:
            self._make_q(k, shape, w, call)
        if k.kv is None:
            self._make_kv(k, shape, w, call)
        dq, dk, dv, _ = call.attention.backward(dout, *self._heads(k, shape, call), k.out, k.extra)
        del dout
        k.out = k.extra = k.q = k.kv = None
        dfirst = torch.empty_like(k.qkv)
        self._q_backward(dq, dfirst, call, k, w, grads)
        del dq
        self._kv_backward(dk, dv, dfirst, call, k, w, grads)
        del dk, dv
        return self._input_backward(dfirst, dh, x, w, k, grads, input_grad)

    def _q_backward(self, dq: Tensor, dfirst: Tensor, call: Call, k: KeptAttention, w: Weights, grads: Grads) -> None:
        """Writes the gradient of what queries are made of into dfirst."""
        to = dfirst[:, :self.wide]
        if not self.q_up:
            to.view(dq.shape).copy_(dq)
            self._turn(to.view(dq.shape)[..., self._plain:], call, inverse=True)
            return
        dq = dq.contiguous()
        self._turn(dq[..., self._plain:], call, inverse=True)
        self._up_backward(self.q_up, self.q_norm, dq.view(len(to), -1), slice(self.wide), to, k.inner["q_a"], k, w,
                          grads)

    def _kv_backward(self, dk: Tensor, dv: Tensor, dfirst: Tensor, call: Call, k: KeptAttention, w: Weights,
                     grads: Grads) -> None:
        """The same of keys and values; kr's is the sum over heads."""
        dkr = dfirst[:, -self.turned:].view(*dk.shape[:2], 1, self.turned)
        dkr.copy_(dk[..., self._plain:].sum(2, keepdim=True))
        self._turn(dkr, call, inverse=True)
        dkv = torch.cat((dk[..., :self._plain], dv), 3).view(len(dfirst), -1)
        rows = slice(self.wide, self.wide + self.latent)
        self._up_backward(self.kv_up, self.kv_norm, dkv, rows, dfirst[:, rows], k.inner["kv_a"], k, w, grads)

    def _up_backward(self, up: Linears, norm: Norm, dy: Tensor, columns: slice, to: Tensor, rstd: Tensor,
                     k: KeptAttention, w: Weights, grads: Grads) -> None:
        """Of y = up(norm(columns of k.qkv)): the columns' gradient goes to `to`."""
        _, low = norm.backward(up.input_grad(dy, w), k.qkv[:, columns], rstd, w, grads, rebuild=True, out=to)
        up.weight_grads(dy, low, w, grads)

    # ---- sizes ----

    @property
    def _made_columns(self) -> int:
        """Numbers of a token that "selective" makes again."""
        return self.hq * (self.head * bool(self.q_up) + self._both)

    def kept_bytes(self, keep: str, item: int) -> int:
        columns = sum(self.first.rows) + self.o.inputs + self.hidden * bool(self.norm1b)
        columns += self._made_columns if keep == "saved" else 0
        return columns * item + 4 * (self.hq + len(self.norms))

    def work_columns(self) -> int:
        """Keys, their gradient and those of q, v and kv, of out, and of what the first product gave."""
        return self.hq * (3 * self.head + 2 * self.values + self._both) + sum(self.first.rows)

    def copied(self, item: int) -> tuple[int, int]:
        q, v = self.hq * self.head, self.o.inputs
        return (2 * q + 2 * v) * item, long_tokens(q, max(q, self.hq * self._both))
