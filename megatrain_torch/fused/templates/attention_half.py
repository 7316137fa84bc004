"""The half of a decoder layer that mixes tokens, h = x + r * norm_out(attention(q, k, v) Wo): SelfAttention and
LatentAttention, which make q, k and v of a = norm_in(x) in ways of their own, and what they have in common."""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import ops
from ...base.limits import show_bytes
from ...graph import hf_calls
from .attention import Attention, _turned, long_tokens, sinks_grad
from .parts import Half, Kept, Linears, Norm, Unfit, child, cut, has, roles_of
from .weights import Grads, Sums, Weights

LARGE_CACHE = 1 << 28        # bytes
_told: list[bool] = []       # has it been warned of in this process?


@dataclass
class Call:
    """What a layer is called with besides x and weights.

    cos, sin: [1 or B, S, R], or None without rotary embedding. attention: mask and scale.
    cache: called in forward, once, with what a key-value cache gathers, two [B, S, h, D].
    correction: [E] added to a router's scores for the choice alone.
    """

    cos: Tensor | None
    sin: Tensor | None
    attention: Attention
    cache: Any = None
    correction: Tensor | None = None


class Rotary(NamedTuple):
    """How a model's code pairs the numbers of a head for the rotary embedding.

    The angles of one head, [.., R], come to a layer in one of three forms: each pair's angle at both of its places
    (Llama's halves, Cohere's neighbours), or only in the first half (GLM, which repeats it in the layer; GPT-OSS, whose
    cos and sin are R/2 long). DeepSeek's pairs are neighbours in what is turned, and the halves of what its code makes
    of that: such heads are turned where they lie, so that products of queries and keys are the same sums in another
    order.

    A proof finds which it is. interleaved: pairs are neighbours. first: each pair's angle is taken from the first
    half. short: it comes R/2 long. parted: the model's code gives the first of all pairs, then the second of all.
    """

    interleaved: bool = False
    first: bool = False
    short: bool = False
    parted: bool = False

    def angles(self, t: Tensor) -> Tensor:
        """cos or sin as ops.rope takes it: [1 or B, S, R]."""
        if self.short:
            return torch.cat((t, t), -1)
        return t[..., :t.shape[-1] // 2].repeat_interleave(2, -1) if self.first else t


class AttentionHalf(Half):
    """What each kind has besides. `_made` gives q [B, S, hq, D], k [B, S, hk, D] and v [B, S, hk, V] as attention takes
    them, from k.qkv as the first product gave it, and fills the call's cache; again: in backward, from what forward
    left in k.qkv. `backward` gives dx [T, H] from dh [T, H], which it may write into, and uses up what was kept.

    Attributes:
        first: the product with a. o: the one that attention's output goes into.
        hq, hk, head: heads of queries and of keys, and their size. values: of a value's head.
        sinks: the name of attention's sinks, if it has any.
        rotary: how heads are turned; None: they are not. parted: they are, in the way that Rotary has of it, which a
            cache has to be given so. latent: it is LatentAttention.
        walks: gradients of a single long row may be had some rows at a time.
        cached: numbers of a token that a key-value cache gathers. copied: those that attention copies at a time, and
            the tokens beyond which it does.
    """

    sinks: str | None = None
    cap, walks, latent, parted = 0.0, False, False, False

    def __init__(self, layer: nn.Module, norm_in: Norm | None, norm_out: Norm | None, factor: float) -> None:
        super().__init__(norm_in, norm_out, factor)
        attn = child(layer, "self_attn")
        self.config = getattr(attn, "config", None)
        if self.config is None or not hasattr(attn, "scaling"):
            raise Unfit("its attention has no config or scaling")
        if isinstance(attn.scaling, Tensor):             # TimesFM learns one for each channel
            raise Unfit("its attention's scale is learnt")
        self.o = Linears(layer, "self_attn.o_proj" if hasattr(attn, "o_proj") else "self_attn.dense")
        self.hidden, self.scale = self.o.rows[0], float(attn.scaling)
        self.positions = int(getattr(self.config, "max_position_embeddings", 0) or 0)
        self.causal = bool(getattr(attn, "is_causal", True))
        # What a trial on random data may not show.
        if getattr(attn, "attention_dropout", 0.0):
            raise Unfit("its attention drops out")
        if getattr(self.config, "clip_qkv", None) is not None:
            raise Unfit("it clips q, k and v")

    @property
    def kind(self) -> str:
        """Of attention, as transformers names it."""
        return str(getattr(self.config, "_attn_implementation", None))

    def check(self) -> None:
        """Raises Unfit where the configuration, as it is now, asks for another attention than the template covers."""
        if self.kind not in ("sdpa", "eager"):
            raise Unfit(f"attention by {self.kind!r}")
        if self.kind == "sdpa" and self.cap:
            raise Unfit("its attention caps its logits, which torch's kernels cannot")
        if self.kind == "sdpa" and self.sinks:
            raise Unfit("its attention has sinks, which torch's kernels do not know")

    def call(self, layer: Any, kwargs: dict[str, Any], roles: dict[str, str] | None, x: Tensor) -> Call:
        """Arguments of a call by their roles (parts.roles_of), which a proof has found; the rest is not read. Unfit
        where the template does not cover one."""
        roles = roles_of(kwargs) if roles is None else roles
        angles, mask, cache = map(kwargs.get, map(roles.get, ("angles", "mask", "cache")))
        if self.sinks and mask is not None and mask.dtype == torch.bool:
            raise Unfit("its attention has sinks, and a mask that is not added to logits")
        if self.rotary is None:
            angles = None, None
        elif angles is None:
            raise Unfit("called without (cos, sin), each [B, S, R]")
        elif self.rotary.short or self.rotary.first:
            angles = map(self.rotary.angles, angles)
        kind, sight = self.kind, hf_calls.sight_of(mask)
        values = 0 if self.values == self.head else self.values
        if sight is not None and not self.cap:
            attention = Attention(self.scale, True, packed=sight.packed, window=sight.window, values=values)
        else:
            mask = mask if sight is None else sight.real
            causal = self.causal and mask is None and kind == "sdpa"     # of eager attention, the mask says all
            attention = Attention(self.scale, causal, mask, kind == "eager", self.cap, values=values)
        call = Call(*angles, attention)
        if cache is None:
            return call
        index = layer.self_attn.layer_idx
        if not hf_calls.empty_entry(cache, index):
            raise Unfit("its cache is no empty DynamicCache")
        nbytes = self.cached * x.element_size() * x.shape[:2].numel() * getattr(self.config, "num_hidden_layers", 1)
        if nbytes >= LARGE_CACHE and not _told:
            _told.append(True)
            warnings.warn(f"the forward of a training step fills a key-value cache of {show_bytes(nbytes)}, which "
                          "training does not read: call the model with use_cache=False, or set "
                          "model.config.use_cache = False", stacklevel=2)

        @torch.enable_grad()                 # what the cache makes of its entries has to refuse it too
        def fill(k: Tensor, v: Tensor) -> None:
            cache.update(cut(k.transpose(1, 2)), cut(v.transpose(1, 2)), index)

        call.cache = fill
        return call

    def forward(self, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept) -> Tensor:
        """h [T, H] from x [T, H]; shape: (B, S). Writes what backward wants into k, where attention's output may be
        already."""
        k.qkv = self.first.forward(self.normed(x, w, k, self.first), w)
        q, key, v = self._made(k, shape, w, call)
        if k.out is None:
            k.out, k.extra = call.attention.forward(q, key, v, w[self.sinks] if self.sinks else None)
        return self.after(x, w, k)

    def after(self, x: Tensor, w: Weights, k: Kept) -> Tensor:
        """h [T, H] from x [T, H] and attention's output, which is in k."""
        return self.added(x, self.o, k.out.reshape(len(x), -1), w, k)

    def _attention_grad(self, dh: Tensor, k: Kept, grads: Grads) -> Tensor:
        """Of attention's output, [B, S, hq, V]."""
        do = self.output_grad(dh, k, grads)
        self.o.weight_grads(do, k.out.reshape(len(do), -1), grads)
        return self.o.input_grad(do, grads).view(k.out.shape)


# ---- one product for q, k and v --------------------------------------------------------------------

class SelfAttention(AttentionHalf):
    """qkv = a Wqkv, attention(rope(norm(q)), rope(norm(k)), v): hq query heads, hk key heads of size D; H hidden.
    k.qkv is [T, (hq + 2 hk) D], rotated where there are no norms of q and k."""

    def __init__(self, layer: nn.Module, norm_in: Norm | None, norm_out: Norm | None, factor: float) -> None:
        attn = child(layer, "self_attn")
        if not hasattr(attn, "head_dim"):
            raise Unfit("its attention has no head_dim")
        super().__init__(layer, norm_in, norm_out, factor)
        self.head = self.values = int(attn.head_dim)
        names = ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        self.first = Linears(layer, *(f"self_attn.{n}" for n in names))
        self.hq = self.o.inputs // self.head
        self.hk = (sum(self.first.rows) // self.head - self.hq) // 2
        if (self.hq + 2 * self.hk) * self.head != sum(self.first.rows) or self.hk < 1 or self.hq % self.hk:
            raise Unfit(f"its projections have {self.first.rows} rows, which are no q, k and v heads of {self.head}")
        self.cached, self.work = 2 * self.hk * self.head, sum(self.first.rows)
        self.columns = self.work + self.o.inputs
        self.copied = self.o.inputs + self.work, long_tokens(self.o.inputs, self.work)
        self.rotary = Rotary() if getattr(attn, "use_rope", True) else None
        self.cap = float(getattr(attn, "attn_logit_softcapping", None) or 0.0)
        self.sinks = "self_attn.sinks" if dict.get(attn._parameters, "sinks") is not None else None
        self.walks = not self.cap and self.causal and self.head <= 128 and self.head % 8 == 0
        self.q_norm, self.k_norm = (Norm(layer, f"self_attn.{n}") if has(layer, f"self_attn.{n}") else None
                                    for n in ("q_norm", "k_norm"))
        if (self.q_norm is None) != (self.k_norm is None):
            raise Unfit("only one of q and k has a norm")
        self.few = 4 * (self.hq + len(self.norms))       # log-sum-exp, and 1/rms
        if self.q_norm:
            self.norms += self.q_norm, self.k_norm
            norms = (self.q_norm, self.hq), (self.k_norm, self.hk)
            self.few += 4 * sum(heads if norm.size == self.head else 1 for norm, heads in norms)
        self.linears, self.names = (self.first, self.o), [self.sinks] if self.sinks else []

    def _heads(self, qkv: Tensor, shape: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, hq, D], k and v [B, S, hk, D], as views of [T, (hq + 2 hk) D]."""
        return qkv.view(*shape, -1, self.head).split((self.hq, self.hk, self.hk), 2)

    def _made(self, k: Kept, shape: Any, w: Weights, call: Call, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Without norms of q and k they stand rotated in qkv itself; with them, qkv keeps what their norms read."""
        q, key, v = self._heads(k.qkv, shape)
        if self.q_norm:
            (q, k.inner["q"]), (key, k.inner["k"]) = self._normed(self.q_norm, q, w), self._normed(self.k_norm, key, w)
        if (self.q_norm or not again) and call.cos is not None:
            ops.rope(q, key, call.cos, call.sin, q, key, interleaved=self.rotary.interleaved)
        if call.cache is not None:
            call.cache(key, v)
            call.cache = None                # not held until backward
        return q, key, v

    def _normed(self, norm: Norm, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        """Over each head, or over all of them together where the weight is that long."""
        y, rstd = norm.forward(x if norm.size == self.head else x.flatten(2), w)
        return y.view(x.shape), rstd

    def backward(self, dh: Tensor, x: Tensor, shape: Any, call: Call, k: Kept, grads: Grads) -> Tensor:
        w, sinks = grads.w, grads.w[self.sinks] if self.sinks else None
        if shape[0] == 1 and call.attention.single_long_row(*self._heads(k.qkv, shape)[:2], sinks):
            return self._backward_by_rows(dh, x, shape, call, k, grads)
        dout = self._attention_grad(dh, k, grads)
        *d, dsinks = call.attention.backward(dout, *self._made(k, shape, w, call, again=True), k.out, k.extra, sinks)
        if self.sinks in grads.wanted:
            grads[self.sinks] = dsinks
        k.out = k.extra = None
        del dout
        dqkv = self._unrotated(d, shape, call.cos, call.sin, k, grads)
        del d
        return self.input_grad(self.first, dqkv, dh, x, k, grads)

    def _backward_by_rows(self, dh: Tensor, x: Tensor, shape: Any, call: Call, k: Kept, grads: Grads) -> Tensor:
        """As backward, of one row, whose gradients never exist whole but for dx, which takes dh's place."""
        w, sums = grads.w, Sums(grads)
        blocks, gradients = call.attention.walk_back(*self._made(k, shape, w, call, again=True), k.out, k.extra)
        for rows in blocks:
            part = k.part(rows)
            dout = self._attention_grad(dh[rows], part, sums)
            if self.sinks in sums.wanted:
                sums[self.sinks] = sinks_grad(*_turned(dout, part.out), k.extra[0][:, :, rows], w[self.sinks])
            cos, sin = (None if t is None else t[:, rows] for t in (call.cos, call.sin))
            dqkv = self._unrotated(gradients(rows, dout), part.out.shape[:2], cos, sin, part, sums)
            del dout
            dh[rows] = self.input_grad(self.first, dqkv, dh[rows], x[rows], part, sums)
        sums.finish()
        k.out = k.extra = None
        return dh

    def _unrotated(self, d: Sequence[Tensor], shape: Any, cos: Tensor | None, sin: Tensor | None, k: Kept,
                   grads: Grads) -> Tensor:
        """d(qkv) [T, (hq + 2 hk) D] from dq, dk and dv as attention gives them."""
        dqkv = torch.empty_like(k.qkv)
        to_q, to_k, to_v = self._heads(dqkv, shape)
        if cos is not None:
            ops.rope(d[0], d[1], cos, sin, to_q, to_k, v=d[2], out_v=to_v, interleaved=self.rotary.interleaved,
                     inverse=True)
        else:
            for to, part in zip((to_q, to_k, to_v), d):
                to.copy_(part)
        if self.q_norm:                          # in place
            raw_q, raw_k, _ = self._heads(k.qkv, shape)
            for norm, name, to, raw in ((self.q_norm, "q", to_q, raw_q), (self.k_norm, "k", to_k, raw_k)):
                if norm.size != self.head:
                    to, raw = to.flatten(2), raw.flatten(2)
                norm.backward(to, raw, k.inner[name], grads, out=to)
        return dqkv


# ---- latent attention ------------------------------------------------------------------------------

class LatentAttention(AttentionHalf):
    """Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, equations 37 to 47): queries, and keys with values, by way of
    few numbers of a token.

        cq | ckv | kr = a [Wqa; Wkva]        qn | qr = norm(cq) Wqb, or cq itself      kn | v = norm(ckv) Wkvb
        q = qn | rope(qr)                    k = kn | rope(kr), the one kr for all heads

    Letters: N numbers of a head that are not turned, R that are, D = N + R; V of a value's head; C of ckv.

    What Wqb and Wkvb give is many times as wide as what they read: "selective" keeps the latter. Keys lie as
    attention's kernels want them, [B, S, hq, D], only for the time of a forward or a backward.

    Attributes:
        q_up: Wqb; None: the first product gives queries. kv_up: Wkvb. wide: numbers of cq. low, turned, plain: C, R, N.
    """

    latent = True

    def __init__(self, layer: nn.Module, norm_in: Norm | None, norm_out: Norm | None, factor: float) -> None:
        super().__init__(layer, norm_in, norm_out, factor)
        attn = child(layer, "self_attn")
        if getattr(attn, "num_key_value_groups", 1) != 1:
            raise Unfit("its latent attention has fewer heads of keys than of queries")
        low = has(layer, "self_attn.q_a_proj")
        self.first = Linears(layer, f"self_attn.{'q_a_proj' if low else 'q_proj'}", "self_attn.kv_a_proj_with_mqa")
        self.q_up = Linears(layer, "self_attn.q_b_proj") if low else None
        self.q_norm = Norm(layer, "self_attn.q_a_layernorm") if low else None
        self.kv_up, self.kv_norm = Linears(layer, "self_attn.kv_b_proj"), Norm(layer, "self_attn.kv_a_layernorm")
        self.plain, self.turned, self.values = map(int, (attn.qk_nope_head_dim, attn.qk_rope_head_dim, attn.v_head_dim))
        self.head, self.low, self.wide = self.plain + self.turned, self.kv_up.inputs, self.first.rows[0]
        self.cached = self.low + self.turned
        queries = (self.q_up or self.first).rows[0]
        self.hq = self.hk = queries // self.head
        sizes = (queries, self.first.rows[1], sum(self.kv_up.rows), self.o.inputs)
        if sizes != (self.hq * self.head, self.cached, self.hq * (self.plain + self.values), self.hq * self.values) or \
                (self.q_up and self.q_up.inputs != self.wide):
            raise Unfit(f"its latent attention has projections of {sizes} numbers, which are no heads of {self.head}")
        # Keys, their gradient and those of q, v and kv, of out, and of what the first product gave.
        self.work = self.hq * (3 * self.head + 3 * self.values + self.plain) + sum(self.first.rows)
        self.copied = 2 * queries + 2 * self.o.inputs, long_tokens(queries, max(queries, sum(self.kv_up.rows)))
        self.rotary, self.parted = Rotary(), bool(getattr(self.config, "rope_interleave", False))
        self.linears = (self.first, *([self.q_up] if self.q_up else []), self.kv_up, self.o)
        self.norms += [n for n in (self.q_norm, self.kv_norm) if n]
        self.columns, self.few = sum(self.first.rows) + self.o.inputs, 4 * (self.hq + len(self.norms))
        self.made = self.hq * (self.head * low + self.plain + self.values)

    def _queries(self, k: Kept, shape: Any) -> Tensor:
        """[B, S, hq, D], where they lie."""
        return (k.qkv[:, :self.wide] if k.q is None else k.q).view(*shape, self.hq, self.head)

    def _turn(self, t: Tensor, call: Call, inverse: bool = False) -> Tensor:
        """t [B, S, h, R], in place."""
        if call.cos is not None:
            none = t[:, :, :0]
            ops.rope(t, none, call.cos, call.sin, t, none, interleaved=self.rotary.interleaved, inverse=inverse)
        return t

    def _made(self, k: Kept, shape: Any, w: Weights, call: Call, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """What they are made of is made where it is not there."""
        if not self.q_up and not again:      # they stay so in qkv
            self._turn(self._queries(k, shape)[..., self.plain:], call)
        elif self.q_up and k.q is None:
            low, k.inner["q_a"] = self.q_norm.forward(k.qkv[:, :self.wide], w, self.q_up)
            k.q = self.q_up.forward(low, w)
            self._turn(self._queries(k, shape)[..., self.plain:], call)
            del low
        shared = self._turn(k.qkv[:, -self.turned:].view(*shape, 1, self.turned).clone(), call)      # rope(kr)
        if k.kv is None:
            given = k.qkv[:, self.wide:self.wide + self.low]
            low, k.inner["kv_a"] = self.kv_norm.forward(given, w, self.kv_up if call.cache is None else None)
            if call.cache is not None:       # it gathers both, kr as the model's code gives it
                parted = self.rotary is not None and self.rotary.parted
                call.cache(low.view(*shape, 1, self.low),
                           torch.cat((shared[..., ::2], shared[..., 1::2]), -1) if parted else shared)
                call.cache = None
            k.kv = self.kv_up.forward(low, w)
            del low
        plain, v = k.kv.view(*shape, self.hq, -1).split((self.plain, self.values), 3)
        key = torch.empty(*plain.shape[:3], self.head, dtype=plain.dtype, device=plain.device)
        key[..., :self.plain], key[..., self.plain:] = plain, shared
        return self._queries(k, shape), key, v

    def backward(self, dh: Tensor, x: Tensor, shape: Any, call: Call, k: Kept, grads: Grads) -> Tensor:
        dout = self._attention_grad(dh, k, grads)
        dq, dk, dv, _ = call.attention.backward(dout, *self._made(k, shape, grads.w, call, again=True), k.out, k.extra)
        del dout
        k.out = k.extra = k.q = k.kv = None
        dfirst = torch.empty_like(k.qkv)
        to = dfirst[:, :self.wide]               # the gradient of what queries are made of
        dq = dq.contiguous() if self.q_up else to.view(dq.shape).copy_(dq)
        self._turn(dq[..., self.plain:], call, inverse=True)
        if self.q_up:
            self._up_backward(self.q_up, self.q_norm, dq.view(len(to), -1), slice(self.wide), k, "q_a", dfirst, grads)
        del dq
        # kr's gradient is the sum over heads.
        dkr = dfirst[:, -self.turned:].view(*dk.shape[:2], 1, self.turned)
        dkr.copy_(dk[..., self.plain:].sum(2, keepdim=True))
        self._turn(dkr, call, inverse=True)
        dkv = torch.cat((dk[..., :self.plain], dv), 3).view(len(dfirst), -1)
        rows = slice(self.wide, self.wide + self.low)
        self._up_backward(self.kv_up, self.kv_norm, dkv, rows, k, "kv_a", dfirst, grads)
        del dk, dv, dkv
        return self.input_grad(self.first, dfirst, dh, x, k, grads)

    def _up_backward(self, up: Linears, norm: Norm, dy: Tensor, columns: slice, k: Kept, name: str, dfirst: Tensor,
                     grads: Grads) -> None:
        """Of y = up(norm(columns of k.qkv)), name: of that norm's 1/rms. Their gradient goes to those of dfirst."""
        _, low = norm.backward(up.input_grad(dy, grads), k.qkv[:, columns], k.inner[name], grads, rebuild=True,
                               out=dfirst[:, columns])
        up.weight_grads(dy, low, grads)
