"""The half of a decoder layer that mixes tokens, h = x + r * norm1b(attention(q, k, v) Wo): what SelfAttention and
LatentAttention, which make q, k and v of a = norm1(x) in ways of their own, have in common, and these."""
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
from ...graph.hf_calls import sight_of
from .attention import Attention, long_tokens
from .linears import Linears
from .parts import Kept, Norm, Unfit, child, cut, has, roles_of
from .weights import Grads, Sums, Weights


@dataclass
class Call:
    """What a layer is called with besides x and weights.

    cos, sin: [1 or B, S, R], or None without rotary embedding. attention: mask and scale.
    cache: called in forward with what a key-value cache gathers, two [B, S, h, D].
    correction: [E] added to a router's scores for the choice alone.
    """

    cos: Tensor | None
    sin: Tensor | None
    attention: Attention
    cache: Any = None
    correction: Tensor | None = None

    def gather(self, k: Tensor, v: Tensor) -> None:
        """For the cache, where there is one: once, and not held until backward."""
        if self.cache is not None:
            self.cache(k, v)
            self.cache = None


# ---- rotary embeddings -----------------------------------------------------------------------------

class Rotary(NamedTuple):
    """How a model's code pairs the numbers of a head for the rotary embedding.

    The angles of one head, [.., R], come to a layer in one of three forms: each pair's angle at both of its
    places (Llama's halves, Cohere's neighbours), or only in the first half (GLM, which repeats it in the layer;
    GPT-OSS, whose cos and sin are R/2 long). DeepSeek's pairs are neighbours in what is turned, and the halves of what
    its code makes of that: such heads are turned where they lie here, queries and keys alike, so that their products
    are the same sums in another order.

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

    def as_given(self, t: Tensor) -> Tensor:
        """Heads [..., R] turned where they lie, as the model's code gives them."""
        return torch.cat((t[..., ::2], t[..., 1::2]), -1) if self.parted else t


# ---- what both kinds have in common ----------------------------------------------------------------

class AttentionHalf:
    """
    Attributes:
        first: the product with a. o: the one that attention's output goes into. linears: all of them.
        hq, hk, head: heads of queries and of keys, and their size. values: of a value's head.
        sinks: the name of attention's sinks, if it has any.
        rotary: how heads are turned; None: they are not. parted: they are, in the way that Rotary has of it, which a
            cache has to be given so. latent: it is LatentAttention.
        norms: all norms, the layer's two among them.
        walks: gradients of a single long row may be had some rows at a time.
        cached: numbers of a token that a key-value cache gathers.
    """

    sinks: str | None = None
    cap, walks, latent, parted = 0.0, False, False, False

    def __init__(self, layer: nn.Module, norm1: Norm | None, norm1b: Norm | None, factor: float) -> None:
        attn = child(layer, "self_attn")
        self.config = getattr(attn, "config", None)
        if self.config is None or not hasattr(attn, "scaling"):
            raise Unfit("its attention has no config or scaling")
        if isinstance(attn.scaling, Tensor):             # TimesFM learns one for each channel
            raise Unfit("its attention's scale is learnt")
        self.norm1, self.norm1b, self.factor = norm1, norm1b, factor
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
        kind = self.kind
        if kind not in ("sdpa", "eager"):
            raise Unfit(f"attention by {kind!r}")
        if kind == "sdpa" and self.cap:
            raise Unfit("its attention caps its logits, which torch's kernels cannot")
        if kind == "sdpa" and self.sinks:
            raise Unfit("its attention has sinks, which torch's kernels do not know")

    def call(self, layer: Any, kwargs: dict[str, Any], roles: dict[str, str] | None, x: Tensor) -> Call:
        """Arguments of a call by their roles (parts.roles_of), which a proof has found; the rest is not read. Unfit
        where the template does not cover one."""
        if roles is None:
            roles = roles_of(kwargs)
        angles, mask, cache = map(kwargs.get, map(roles.get, ("angles", "mask", "cache")))
        if self.sinks and mask is not None and mask.dtype == torch.bool:
            raise Unfit("its attention has sinks, and a mask that is not added to logits")
        if self.rotary is None:
            angles = None, None
        elif angles is None:
            raise Unfit("called without (cos, sin), each [B, S, R]")
        else:
            angles = map(self.rotary.angles, angles)
        call = Call(*angles, self._attention(mask))
        if cache is not None:
            index = layer.self_attn.layer_idx
            if not hf_calls.empty_entry(cache, index):
                raise Unfit("its cache is no empty DynamicCache")
            layers = getattr(self.config, "num_hidden_layers", 1)
            nbytes = self.cached * x.element_size() * x.shape[:2].numel() * layers
            if nbytes >= LARGE_CACHE and not _told:
                _told.append(True)
                warnings.warn(f"the forward of a training step fills a key-value cache of {show_bytes(nbytes)}, which "
                              "training does not read: call the model with use_cache=False, or set "
                              "model.config.use_cache = False", stacklevel=2)
            call.cache = lambda k, v: _fill(cache, k, v, index)
        return call

    def _attention(self, mask: Tensor | None) -> Attention:
        kind, sight, values = self.kind, sight_of(mask), 0 if self.values == self.head else self.values
        if sight is not None and not self.cap:
            return Attention(self.scale, True, packed=sight.packed, window=sight.window, values=values)
        mask = mask if sight is None else sight.real
        causal = self.causal and mask is None and kind == "sdpa"     # of eager attention, the mask says all
        return Attention(self.scale, causal, mask, kind == "eager", self.cap, values=values)

    def forward(self, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept) -> Tensor:
        """h [T, H] from x [T, H]; shape: (B, S). Writes what backward wants into k, where attention's output may be
        already."""
        a = x
        if self.norm1:
            a, k.rstd1 = self.norm1.before(self.first, x, w)
        k.qkv = self.first.forward(a, w)
        del a
        q, key, v = self._made(k, shape, w, call)
        if k.out is None:
            k.out, k.extra = call.attention.forward(q, key, v, self._sinks(w))
        return self.after(x, w, k)

    def _made(self, k: Kept, shape: Any, w: Weights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, hq, D], k [B, S, hk, D] and v [B, S, hk, V] as attention takes them, from k.qkv as the first product
        gave it. Fills the call's cache."""
        raise NotImplementedError

    def _sinks(self, w: Weights) -> Tensor | None:
        return w[self.sinks] if self.sinks else None

    def after(self, x: Tensor, w: Weights, k: Kept) -> Tensor:
        """h [T, H] from x [T, H] and attention's output, which is in k."""
        out = k.out.reshape(x.shape[0], -1)
        if not self.norm1b:
            return self.o.forward_onto(x, out, w, self.factor)
        k.o = self.o.forward(out, w)
        normed, k.inner["o"] = self.norm1b.forward(k.o, w)
        return torch.add(x, normed, alpha=self.factor)

    def backward(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept, grads: Grads,
                 input_grad: bool) -> Tensor:
        """dx [T, H] from dh [T, H], and may write into it. Uses up what was kept."""
        raise NotImplementedError

    def _output_backward(self, dh: Tensor, w: Weights, k: Kept, grads: Grads) -> Tensor:
        """Gradient of attention's output, [B, S, hq, V]."""
        do = dh if self.factor == 1.0 else dh * self.factor
        if self.norm1b:
            do, _ = self.norm1b.backward(do, k.o, k.inner["o"], w, grads)
            k.o = None
        self.o.weight_grads(do, k.out.reshape(do.shape[0], -1), w, grads)
        return self.o.input_grad(do, w).view(k.out.shape)

    def _input_backward(self, dfirst: Tensor, dh: Tensor, x: Tensor, w: Weights, k: Kept, grads: Grads,
                        input_grad: bool) -> Tensor:
        """dx [T, H] from the gradient of what the first product gave, the residual's own added."""
        da = self.first.input_grad(dfirst, w)
        if self.norm1:
            dx, a = self.norm1.backward(da, x, k.rstd1, w, grads, add=dh, rebuild=True)
        else:
            dx, a = da.add_(dh) if input_grad else da, x
        self.first.weight_grads(dfirst, a, w, grads)
        return dx

    def weights_used(self) -> int:
        """Elements of the matrices that a token meets."""
        return sum(sum(one.rows) * one.inputs for one in self.linears)


LARGE_CACHE = 1 << 28        # bytes
_told: list[bool] = []       # has it been warned of in this process?


@torch.enable_grad()
def _fill(cache: Any, k: Tensor, v: Tensor, index: int) -> None:
    """What a cache makes of its entries has to refuse a backward too, so its own operations are recorded."""
    cache.update(cut(k.transpose(1, 2)), cut(v.transpose(1, 2)), index)


# ---- one product for q, k and v --------------------------------------------------------------------

class SelfAttention(AttentionHalf):
    """qkv = a Wqkv, attention(rope(norm(q)), rope(norm(k)), v): hq query heads, hk key heads of size D; H hidden. norm1
    and norm1b may be missing. k.qkv is [T, (hq + 2 hk) D], rotated where there are no norms of q and k."""

    def __init__(self, layer: nn.Module, norm1: Norm | None, norm1b: Norm | None, factor: float) -> None:
        attn = child(layer, "self_attn")
        if not hasattr(attn, "head_dim"):
            raise Unfit("its attention has no head_dim")
        super().__init__(layer, norm1, norm1b, factor)
        self.head = self.values = int(attn.head_dim)
        names = ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        self.first = Linears(layer, *(f"self_attn.{n}" for n in names))
        self.hq = self.o.inputs // self.head
        self.hk = (sum(self.first.rows) // self.head - self.hq) // 2
        if (self.hq + 2 * self.hk) * self.head != sum(self.first.rows) or self.hk < 1 or self.hq % self.hk:
            raise Unfit(f"its projections have {self.first.rows} rows, which are no q, k and v heads of {self.head}")
        self.cached = 2 * self.hk * self.head
        self.rotary = Rotary() if getattr(attn, "use_rope", True) else None
        self.cap = float(getattr(attn, "attn_logit_softcapping", None) or 0.0)
        self.sinks = "self_attn.sinks" if dict.get(attn._parameters, "sinks") is not None else None
        self.walks = not self.cap and self.causal and self.head <= 128 and self.head % 8 == 0
        self.q_norm, self.k_norm = (Norm(layer, f"self_attn.{n}") if has(layer, f"self_attn.{n}") else None
                                    for n in ("q_norm", "k_norm"))
        if (self.q_norm is None) != (self.k_norm is None):
            raise Unfit("only one of q and k has a norm")
        self.norms = [n for n in (norm1, norm1b, self.q_norm, self.k_norm) if n]
        self.linears = self.first, self.o
        self.names = {*self.first.names, *self.o.names} | ({self.sinks} if self.sinks else set())

    def _made(self, k: Kept, shape: Any, w: Weights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = self._rotated(k, shape, w, call, in_place=True)
        call.gather(key, v)
        return q, key, v

    def _heads(self, qkv: Tensor, shape: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, hq, D], k and v [B, S, hk, D], as views of [T, (hq + 2 hk) D]."""
        heads = qkv.view(*shape, self.hq + 2 * self.hk, self.head)
        return heads.split((self.hq, self.hk, self.hk), 2)

    def _rotated(self, k: Kept, shape: Any, w: Weights, call: Call, in_place: bool
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

    def backward(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept, grads: Grads,
                 input_grad: bool) -> Tensor:
        sinks = self._sinks(w)
        if shape[0] == 1 and call.attention.single_long_row(*self._heads(k.qkv, shape)[:2], sinks):
            return self._backward_by_rows(dh, x, shape, w, call, k, grads, input_grad)
        dout = self._output_backward(dh, w, k, grads)
        *d, dsinks = call.attention.backward(dout, *self._rotated(k, shape, w, call, in_place=False), k.out, k.extra,
                                             sinks)
        if self.sinks and grads.wants(self.sinks):
            grads[self.sinks] = dsinks
        k.out = k.extra = None
        del dout
        dqkv = self._unrotated(d, shape, w, call.cos, call.sin, k, grads)
        del d
        return self._input_backward(dqkv, dh, x, w, k, grads, input_grad)

    def _backward_by_rows(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept,
                          grads: Grads, input_grad: bool) -> Tensor:
        """As backward, of one row, whose gradients never exist whole but for dx, which takes dh's place."""
        sums = Sums(grads)
        walk = call.attention.walk_back(*self._rotated(k, shape, w, call, in_place=False), k.out, k.extra)
        for rows in walk.blocks():
            part = Kept(*(None if t is None else t[rows] for t in (None, k.rstd1, k.qkv)), out=k.out[:, rows],
                        o=None if k.o is None else k.o[rows],
                        inner={n: t[:, rows] if n in ("q", "k") else t[rows] for n, t in k.inner.items()})
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

    def _unrotated(self, d: Sequence[Tensor], shape: Any, w: Weights, cos: Tensor | None, sin: Tensor | None,
                   k: Kept, grads: Grads) -> Tensor:
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
                norm.backward(to, raw, k.inner[name], w, grads, out=to)
        return dqkv

    def kept_bytes(self, keep: str, item: int) -> int:
        """Bytes that a token takes between forward and backward."""
        columns = sum(self.first.rows) + self.o.inputs + self.hidden * bool(self.norm1b)
        rms = bool(self.norm1) + bool(self.norm1b)
        if self.q_norm:
            rms += self.hq if self.q_norm.size == self.head else 1
            rms += self.hk if self.k_norm.size == self.head else 1
        return columns * item + 4 * (self.hq + rms)

    def work_columns(self) -> int:
        """Numbers of a token that backward has beside what "saved" keeps, and its own of [T, H]."""
        return sum(self.first.rows)

    def copied(self, item: int) -> tuple[int, int]:
        """Bytes of a token that attention copies at a time where there are more than so many, and how many."""
        q, qkv = self.o.inputs, sum(self.first.rows)
        return (q + qkv) * item, long_tokens(q, qkv)


# ---- latent attention ------------------------------------------------------------------------------

class LatentAttention(AttentionHalf):
    """Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, equations 37 to 47): queries, and keys with values, by way of
    few numbers of a token.

        cq | ckv | kr = a [Wqa; Wkva]        qn | qr = norm(cq) Wqb, or cq itself      kn | v = norm(ckv) Wkvb
        q = qn | rope(qr)                    k = kn | rope(kr), the one kr for all heads

    Letters: N numbers of a head that are not turned, R that are, D = N + R; V of a value's head; C of ckv.

    What Wqb and Wkvb give is many times as wide as what they read: "selective" keeps the latter. Keys lie as
    attention's kernels want them, [B, S, hq, D], for the time of a forward or a backward: their numbers are kv's and
    kr's.

    Attributes:
        q_up: Wqb; None: the first product gives queries. kv_up: Wkvb.
        wide: numbers of cq. low, turned, plain: C, R and N.
    """

    latent = True

    def __init__(self, layer: nn.Module, norm1: Norm | None, norm1b: Norm | None, factor: float) -> None:
        super().__init__(layer, norm1, norm1b, factor)
        attn: Any = child(layer, "self_attn")
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
        self.rotary, self.parted = Rotary(), bool(getattr(self.config, "rope_interleave", False))
        self.linears = (self.first, *([self.q_up] if self.q_up else []), self.kv_up, self.o)
        self.names = {name for one in self.linears for name in one.names}
        self.norms = [n for n in (norm1, norm1b, self.q_norm, self.kv_norm) if n]

    def _made(self, k: Kept, shape: Any, w: Weights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        self._make_q(k, shape, w, call)
        self._make_kv(k, shape, w, call)
        return self._heads(k, shape, call)

    def _make_q(self, k: Kept, shape: Any, w: Weights, call: Call) -> None:
        """Queries, turned: k.q, or where they are in k.qkv."""
        if self.q_up:
            low, k.inner["q_a"] = self.q_norm.before(self.q_up, k.qkv[:, :self.wide], w)
            k.q = self.q_up.forward(low, w)
        self._turn(self._queries(k, shape)[..., self.plain:], call)

    def _make_kv(self, k: Kept, shape: Any, w: Weights, call: Call) -> None:
        """k.kv; a cache gets what it is made of."""
        given = k.qkv[:, self.wide:self.wide + self.low]
        if call.cache is None:
            low, k.inner["kv_a"] = self.kv_norm.before(self.kv_up, given, w)
        else:
            low, k.inner["kv_a"] = self.kv_norm.forward(given, w)
            shared = self._shared(k.qkv, shape, call)
            call.gather(low.view(*shape, 1, self.low), self.rotary.as_given(shared) if self.rotary else shared)
        k.kv = self.kv_up.forward(low, w)

    def _queries(self, k: Kept, shape: Any) -> Tensor:
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

    def _heads(self, k: Kept, shape: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        plain, v = k.kv.view(*shape, self.hq, -1).split((self.plain, self.values), 3)
        key = torch.empty(*plain.shape[:3], self.head, dtype=plain.dtype, device=plain.device)
        key[..., :self.plain] = plain
        key[..., self.plain:] = self._shared(k.qkv, shape, call)
        return self._queries(k, shape), key, v

    def backward(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept, grads: Grads,
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
        to = dfirst[:, :self.wide]               # the gradient of what queries are made of
        if self.q_up:
            dq = dq.contiguous()
            self._turn(dq[..., self.plain:], call, inverse=True)
            self._up_backward(self.q_up, self.q_norm, dq.view(len(to), -1), slice(self.wide), to, k.inner["q_a"], k, w,
                              grads)
        else:
            to.view(dq.shape).copy_(dq)
            self._turn(to.view(dq.shape)[..., self.plain:], call, inverse=True)
        del dq
        # kr's gradient is the sum over heads.
        dkr = dfirst[:, -self.turned:].view(*dk.shape[:2], 1, self.turned)
        dkr.copy_(dk[..., self.plain:].sum(2, keepdim=True))
        self._turn(dkr, call, inverse=True)
        dkv = torch.cat((dk[..., :self.plain], dv), 3).view(len(dfirst), -1)
        rows = slice(self.wide, self.wide + self.low)
        self._up_backward(self.kv_up, self.kv_norm, dkv, rows, dfirst[:, rows], k.inner["kv_a"], k, w, grads)
        del dk, dv, dkv
        return self._input_backward(dfirst, dh, x, w, k, grads, input_grad)

    def _up_backward(self, up: Linears, norm: Norm, dy: Tensor, columns: slice, to: Tensor, rstd: Tensor,
                     k: Kept, w: Weights, grads: Grads) -> None:
        """Of y = up(norm(columns of k.qkv)): the columns' gradient goes to `to`."""
        _, low = norm.backward(up.input_grad(dy, w), k.qkv[:, columns], rstd, w, grads, rebuild=True, out=to)
        up.weight_grads(dy, low, w, grads)

    def kept_bytes(self, keep: str, item: int) -> int:
        """Bytes that a token takes between forward and backward; "selective" makes queries, keys and values again."""
        columns = sum(self.first.rows) + self.o.inputs + self.hidden * bool(self.norm1b)
        if keep == "saved":
            columns += self.hq * (self.head * bool(self.q_up) + self.plain + self.values)
        return columns * item + 4 * (self.hq + len(self.norms))

    def work_columns(self) -> int:
        """Keys, their gradient and those of q, v and kv, of out, and of what the first product gave."""
        return self.hq * (3 * self.head + 3 * self.values + self.plain) + sum(self.first.rows)

    def copied(self, item: int) -> tuple[int, int]:
        q, v = self.hq * self.head, self.o.inputs
        return (2 * q + 2 * v) * item, long_tokens(q, max(q, self.hq * (self.plain + self.values)))
