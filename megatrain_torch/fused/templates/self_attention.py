"""The half of a decoder layer that mixes tokens: h = x + r * norm1b(attention(rope(norm1(x) Wqkv)) Wo)."""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...base.limits import show_bytes
from ...graph import hf_calls
from ...graph.masks import sight_of
from .attention import Attention
from .linears import Linears
from .parts import Grads, Norm, Sums, Unfit, Weights, child, cut, has
from .rotary import Rotary, rotary_of


@dataclass
class Call:
    """What a layer is called with besides x and weights.

    cos, sin: [1 or B, S, R], or None without rotary embedding. attention: mask and scale.
    cache: called in forward with k and v [B, S, hk, D] as attention takes them.
    correction: [E] added to a router's scores for the choice alone.
    """

    cos: Tensor | None
    sin: Tensor | None
    attention: Attention
    cache: Any = None
    correction: Tensor | None = None


@dataclass
class KeptAttention:
    """What lies between forward and backward; without qkv: to be made again."""

    rstd1: Tensor | None = None
    qkv: Tensor | None = None            # [T, (hq + 2 hk) D], rotated where there are no norms of q and k
    out: Tensor | None = None            # [B, S, hq, D] attention's output
    extra: Any = None                    # attention's own: log-sum-exp
    o: Tensor | None = None              # [T, H], only where norm1b is
    inner: dict[str, Tensor] = field(default_factory=dict)       # 1/rms of the other norms

    def rows(self, rows: slice) -> KeptAttention:
        """Of these rows of the only row of the batch; without attention's own."""
        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[rows]

        inner = {name: t[:, rows] if name in ("q", "k") else t[rows] for name, t in self.inner.items()}
        return KeptAttention(of(self.rstd1), of(self.qkv), self.out[:, rows], None, of(self.o), inner)


class SelfAttention:
    """hq query heads, hk key heads of size D; H hidden. norm1 and norm1b may be missing."""

    def __init__(self, layer: nn.Module, norm1: Norm | None, norm1b: Norm | None, factor: float) -> None:
        """Raises:
            Unfit: it is not of this family.
        """
        attn = child(layer, "self_attn")
        self.config = getattr(attn, "config", None)
        if self.config is None or not hasattr(attn, "head_dim") or not hasattr(attn, "scaling"):
            raise Unfit("its attention has no config, head_dim or scaling")
        self.norm1, self.norm1b, self.factor = norm1, norm1b, factor
        self._read_projections(layer, attn)
        self._read_heads(attn)
        self._read_norms(layer)
        self._refuse(attn)
        self.linears = self.qkv, self.o
        self.names = {*self.qkv.names, *self.o.names} | ({self.sinks} if self.sinks else set())

    def _read_projections(self, layer: nn.Module, attn: nn.Module) -> None:
        self.head = int(attn.head_dim)
        names = ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        self.qkv = Linears(layer, *(f"self_attn.{n}" for n in names))
        self.o = Linears(layer, "self_attn.o_proj" if hasattr(attn, "o_proj") else "self_attn.dense")
        self.hidden, self.hq = self.o.rows[0], self.o.inputs // self.head
        self.hk = (sum(self.qkv.rows) // self.head - self.hq) // 2
        if (self.hq + 2 * self.hk) * self.head != sum(self.qkv.rows) or self.hk < 1 or self.hq % self.hk:
            raise Unfit(f"its projections have {self.qkv.rows} rows, which are no q, k and v heads of {self.head}")

    def _read_heads(self, attn: nn.Module) -> None:
        if isinstance(attn.scaling, Tensor):             # TimesFM learns one for each channel
            raise Unfit("its attention's scale is learnt")
        self.scale = float(attn.scaling)
        self.positions = int(getattr(self.config, "max_position_embeddings", 0) or 0)
        self.causal = bool(getattr(attn, "is_causal", True))
        self.rotary: Rotary | None = rotary_of(attn) if getattr(attn, "use_rope", True) else None
        self.cap = float(getattr(attn, "attn_logit_softcapping", None) or 0.0)
        self.sinks = "self_attn.sinks" if dict.get(attn._parameters, "sinks") is not None else None

    def _read_norms(self, layer: nn.Module) -> None:
        self.q_norm, self.k_norm = (Norm(layer, f"self_attn.{n}") if has(layer, f"self_attn.{n}") else None
                                    for n in ("q_norm", "k_norm"))
        if (self.q_norm is None) != (self.k_norm is None):
            raise Unfit("only one of q and k has a norm")
        self.norms = [n for n in (self.norm1, self.norm1b, self.q_norm, self.k_norm) if n]

    def _refuse(self, attn: nn.Module) -> None:
        """What a trial on random data may not show."""
        if getattr(attn, "attention_dropout", 0.0):
            raise Unfit("its attention drops out")
        if getattr(self.config, "clip_qkv", None) is not None:
            raise Unfit("it clips q, k and v")

    # ---- a call ----

    @property
    def kind(self) -> str:
        """Of attention, as transformers names it."""
        return str(getattr(self.config, "_attn_implementation", None))

    def call(self, layer: nn.Module, kwargs: dict[str, Any]) -> Call:
        """Raises:
            Unfit: there is an argument that the template does not cover.
        """
        kind = self.kind
        if kind not in ("sdpa", "eager"):
            raise Unfit(f"attention by {kind!r}")
        if self.cap and kind == "sdpa":
            raise Unfit("its attention caps its logits, which torch's kernels cannot")
        for name, value in kwargs.items():
            if name not in _COVERED and value is not None and value is not False:
                raise Unfit(f"called with {name}")
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4):
            raise Unfit("its attention mask has not four dimensions")
        if self.sinks and (kind == "sdpa" or (mask is not None and mask.dtype == torch.bool)):
            raise Unfit("its attention has sinks, which torch's kernels do not know")
        attention = self._attention(kind, mask)
        call, cache = Call(*self._angles(kwargs.get("position_embeddings")), attention), kwargs.get("past_key_values")
        if cache is not None and not hf_calls.empty_entry(cache, layer.self_attn.layer_idx):
            raise Unfit("its cache is no empty DynamicCache")
        if cache is not None:
            call.cache = lambda k, v: _fill(cache, k, v, layer.self_attn.layer_idx)
        return call

    def _attention(self, kind: str, mask: Tensor | None) -> Attention:
        sight = sight_of(mask)
        if sight is not None and not self.cap:
            return Attention(self.scale, True, packed=sight.packed, window=sight.window)
        mask = mask if sight is None else sight.real
        causal = self.causal and mask is None and kind == "sdpa"     # of eager attention, the mask says all
        return Attention(self.scale, causal, mask, kind == "eager", self.cap)

    def _angles(self, given: Any) -> tuple[Tensor | None, Tensor | None]:
        if self.rotary is None:
            return None, None
        if not isinstance(given, tuple) or len(given) != 2 or given[0].dim() != 3:
            raise Unfit("called without position_embeddings, or with more than cos and sin [B, S, R]")
        return self.rotary.angles(given[0]), self.rotary.angles(given[1])

    def tell_of_cache(self, call: Call, x: Tensor) -> None:
        """Warns, once, of keys and values of all layers that a training forward gathers on the device."""
        layers = getattr(self.config, "num_hidden_layers", 1)
        found = 2 * self.hk * self.head * x.element_size() * x.shape[:2].numel() * layers
        if call.cache is None or found < LARGE_CACHE or _told:
            return
        _told.append(True)
        warnings.warn(f"the forward of a training step fills a key-value cache of {show_bytes(found)}, which training "
                      "does not read and no plan counts: call the model with use_cache=False, or set "
                      "model.config.use_cache = False", stacklevel=2)

    # ---- forward ----

    def forward(self, x: Tensor, shape: Any, w: Weights, call: Call, k: KeptAttention) -> Tensor:
        """h [T, H] from x [T, H]; shape: (B, S). Writes what backward wants into k, where attention's output may be
        already."""
        a = x
        if self.norm1:
            a, k.rstd1 = self.norm1.before(self.qkv, x, w)
        k.qkv = self.qkv.forward(a, w)
        del a
        q, key, v = self._rotated(k, shape, w, call, in_place=True)
        if call.cache is not None:
            call.cache(key, v)
            call.cache = None                # once, and not held until backward
        if k.out is None:
            k.out, k.extra = call.attention.forward(q, key, v, self._sinks(w))
        return self.after(x, w, k)

    def _sinks(self, w: Weights) -> Tensor | None:
        return w[self.sinks] if self.sinks else None

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

    def after(self, x: Tensor, w: Weights, k: KeptAttention) -> Tensor:
        """h [T, H] from x [T, H] and attention's output, which is in k."""
        out = k.out.reshape(x.shape[0], -1)
        if not self.norm1b:
            return self.o.forward_onto(x, out, w, self.factor)
        k.o = self.o.forward(out, w)
        normed, k.inner["o"] = self.norm1b.forward(k.o, w)
        return torch.add(x, normed, alpha=self.factor)

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

    def _output_backward(self, dh: Tensor, w: Weights, k: KeptAttention, grads: Grads) -> Tensor:
        """Gradient of attention's output, [B, S, hq, D]."""
        do = dh if self.factor == 1.0 else dh * self.factor
        if self.norm1b:
            do, _ = self.norm1b.backward(do, k.o, k.inner["o"], w, grads)
            k.o = None
        self.o.weight_grads(do, k.out.reshape(do.shape[0], -1), w, grads)
        return self.o.input_grad(do, w).view(k.out.shape)

    def _input_backward(self, dqkv: Tensor, dh: Tensor, x: Tensor, w: Weights, k: KeptAttention, grads: Grads,
                        input_grad: bool) -> Tensor:
        """dx [T, H] from d(qkv), the residual's own gradient added."""
        da = self.qkv.input_grad(dqkv, w)
        if self.norm1:
            dx, a = self.norm1.backward(da, x, k.rstd1, w, grads, add=dh, rebuild=True)
        else:
            dx, a = da.add_(dh) if input_grad else da, x
        self.qkv.weight_grads(dqkv, a, w, grads)
        return dx

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

    def output_bytes(self, item: int) -> int:
        """Of a token's attention output and log-sum-exp."""
        return self.o.inputs * item + 4 * self.hq

    def kept_bytes(self, item: int) -> int:
        """Bytes that a token takes between forward and backward."""
        columns = sum(self.qkv.rows) + self.o.inputs + self.hidden * bool(self.norm1b)
        rms = bool(self.norm1) + bool(self.norm1b)
        if self.q_norm:
            rms += self.hq if self.q_norm.size == self.head else 1
            rms += self.hk if self.k_norm.size == self.head else 1
        return columns * item + 4 * (self.hq + rms)


LARGE_CACHE = 1 << 28        # bytes
_told: list[bool] = []       # has it been warned of in this process?


@torch.enable_grad()
def _fill(cache: Any, k: Tensor, v: Tensor, index: int) -> None:
    """What a cache makes of its entries has to refuse a backward too, so its own operations are recorded."""
    cache.update(cut(k.transpose(1, 2)), cut(v.transpose(1, 2)), index)


# Arguments of layers that say nothing new to a template, or that it reads.
_COVERED = frozenset(("position_embeddings", "attention_mask", "position_ids", "past_key_values", "use_cache",
                      "cache_position", "num_items_in_batch", "output_hidden_states",
                      # For attention in flash's interface, which sdpa's does not read.
                      "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
