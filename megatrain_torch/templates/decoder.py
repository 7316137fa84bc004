"""Decoder layers of the Llama family: attention with rotary embeddings, then a gated MLP.

    a = norm1(x)          qkv = a Wqkv        q, k = rope(norm(q), norm(k))
    o = attention Wo      h = x + r * norm1b(o)
    b = norm2(h)          g|u = b Wgu         y = h + r * norm2b((act(g) * u) Wd)

Each norm may be missing: Llama has norm1 and norm2, OLMo 2 the two after, Gemma 2 and 3 all four;
q and k have norms of their own in Qwen 3, Gemma 3 and OLMo 2; Granite has r. One class serves them, as
data; which data is right for a module is found from its structure and then tried (fused.py).
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .attention import Attention
from .parts import Grads, Linears, Norm, Unfit, Weights, activation, as_input, cut

KEEPS = ("saved", "selective", "replay")


@dataclass
class Call:
    """What a layer is called with besides x and weights.

    cos, sin: [1 or B, S, R], or None without rotary embedding. attention: mask and scale.
    cache: called in forward with k and v [B, S, hk, D] as attention takes them.
    """

    cos: Tensor | None
    sin: Tensor | None
    attention: Attention
    cache: Any = None


@dataclass
class Kept:
    """What lies between forward and backward; None: to be made again."""

    x: Tensor | None = None
    rstd1: Tensor | None = None
    qkv: Tensor | None = None            # [T, (hq + 2 hk) D], rotated where there are no norms of q and k
    out: Tensor | None = None            # [B, S, hq, D] attention's output
    extra: Any = None                    # attention's own: log-sum-exp
    o: Tensor | None = None              # [T, H], only where norm1b is
    h: Tensor | None = None              # [T, H]
    rstd2: Tensor | None = None
    gu: Tensor | None = None             # [T, 2 I]
    d: Tensor | None = None              # [T, H], only where norm2b is
    inner: dict[str, Tensor] = field(default_factory=dict)       # 1/rms of the other norms


class Decoder:
    """The template of one structure. Shapes: hq query heads, hk key heads of size D; H hidden, I intermediate."""

    differentiable_input = True

    def __init__(self, layer: nn.Module) -> None:
        """Reads the structure of a layer.

        Raises:
            Unfit: it is not of this family.
        """
        attn, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self.config = config = getattr(attn, "config", None)
        if config is None:
            raise Unfit("its attention has no config")
        self._read_attention(layer, attn, config)
        self._read_mlp(layer, mlp)
        self._read_norms(layer)
        self.factor = float(getattr(layer, "residual_multiplier", 1.0))
        self._all_known(layer)

    # ---- structure ----

    def _read_attention(self, layer: nn.Module, attn: nn.Module, config: Any) -> None:
        self.head = int(attn.head_dim)
        joint = hasattr(attn, "qkv_proj")
        names = ("qkv_proj",) if joint else ("q_proj", "k_proj", "v_proj")
        self.qkv = Linears(layer, *(f"self_attn.{n}" for n in names))
        out = "o_proj" if hasattr(attn, "o_proj") else "dense"
        self.o = Linears(layer, f"self_attn.{out}")
        self.hq = self.o.inputs // self.head
        self.hk = (sum(self.qkv.rows) // self.head - self.hq) // 2
        if (self.hq + 2 * self.hk) * self.head != sum(self.qkv.rows) or self.hk < 1 or self.hq % self.hk:
            raise Unfit(f"its projections have {self.qkv.rows} rows, which are no q, k and v heads of {self.head}")
        self.scale = float(attn.scaling)
        self.causal = bool(getattr(attn, "is_causal", True))
        self.rotary = bool(getattr(attn, "use_rope", True))
        self.cap = float(getattr(attn, "attn_logit_softcapping", None) or 0.0)
        if getattr(attn, "sinks", None) is not None:
            raise Unfit("its attention has sinks")

    def _read_mlp(self, layer: nn.Module, mlp: nn.Module) -> None:
        names = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
        self.gu = Linears(layer, *(f"mlp.{n}" for n in names))
        self.down = Linears(layer, "mlp.down_proj")
        if sum(self.gu.rows) != 2 * self.down.inputs:
            raise Unfit(f"its MLP has {self.gu.rows} rows before {self.down.inputs} columns: not gated")
        self.act = activation(getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None)))

    def _read_norms(self, layer: nn.Module) -> None:
        def norm(name: str) -> Norm | None:
            return Norm(layer, name) if _has(layer, name) else None

        sandwich = _has(layer, "pre_feedforward_layernorm")
        after = sandwich or not _has(layer, "input_layernorm")
        self.norm1 = norm("input_layernorm")
        self.norm1b = norm("post_attention_layernorm") if after else None
        self.norm2 = norm("pre_feedforward_layernorm") if sandwich else None if after \
            else norm("post_attention_layernorm")
        self.norm2b = norm("post_feedforward_layernorm")
        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        if (self.q_norm is None) != (self.k_norm is None):
            raise Unfit("only one of q and k has a norm")
        self.norms = [n for n in (self.norm1, self.norm1b, self.norm2, self.norm2b, self.q_norm, self.k_norm) if n]

    def _all_known(self, layer: nn.Module) -> None:
        known = {n for g in (self.qkv, self.o, self.gu, self.down) for n in g.names} | {n.weight for n in self.norms}
        for name, _ in layer.named_parameters():
            if name not in known:
                raise Unfit(f"it has a parameter that the template does not know: {name}")
        for name, m in layer.named_modules():
            if isinstance(m, nn.Dropout) and m.p > 0:
                raise Unfit(f"{name} drops out")
        if getattr(_child(layer, "self_attn"), "attention_dropout", 0.0):
            raise Unfit("its attention drops out")

    def set_style(self, style: int) -> None:
        """How all its norms apply their weights."""
        for n in self.norms:
            n.style = style

    def take(self, layer: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Tensor, Call]:
        """x [B, S, H] and the rest of a call.

        Raises:
            Unfit: there is something in it that the template does not cover.
        """
        if len(args) > 1:
            raise Unfit("called with arguments that have no names")
        rest = dict(kwargs)
        x = as_input(args[0] if args else rest.pop("hidden_states", None), dtype)
        call = self._call(rest)
        cache = rest.get("past_key_values")
        if cache is not None:
            call.cache = lambda k, v: cache.update(cut(k.transpose(1, 2)), cut(v.transpose(1, 2)),
                                                   layer.self_attn.layer_idx)
        return x, call

    def small(self, x: Tensor, rng: torch.Generator, n: int, args: Any, kwargs: Any) -> tuple[Tensor, Any, Any]:
        """A random x [1, n, H], and args and kwargs like the call's own, cut to it."""
        n = min(n, x.shape[1])
        x = torch.randn(1, n, x.shape[2], generator=rng, device=x.device).to(x.dtype)
        rest = {k: v for k, v in kwargs.items() if k not in ("hidden_states", "past_key_values", "use_cache")}
        if rest.get("position_embeddings") is not None:
            rest["position_embeddings"] = tuple(t[:1, :n] for t in rest["position_embeddings"])
        if isinstance(rest.get("attention_mask"), Tensor):
            rest["attention_mask"] = rest["attention_mask"][:1, :, :n, :n]
        for name in ("position_ids", "cache_position"):
            if isinstance(rest.get(name), Tensor):
                rest[name] = rest[name][..., :n][:1]
        return x, (x,), rest

    def _call(self, kwargs: dict[str, Any]) -> Call:
        kind = getattr(self.config, "_attn_implementation", None)
        if kind not in ("sdpa", "eager"):
            raise Unfit(f"attention by {kind!r}")
        if self.cap and kind == "sdpa":
            raise Unfit("its attention caps its logits, which torch's kernels cannot")
        for name, value in kwargs.items():
            if name not in _COVERED and value is not None and value is not False:
                raise Unfit(f"called with {name}")
        cos, sin = kwargs.get("position_embeddings") or (None, None)
        if self.rotary and cos is None:
            raise Unfit("called without position_embeddings")
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4):
            raise Unfit("its attention mask has not four dimensions")
        attention = Attention(self.scale, self.causal and mask is None, mask, kind == "eager", self.cap)
        return Call(*((cos, sin) if self.rotary else (None, None)), attention)

    # ---- forward ----

    def forward(self, x: Tensor, w: Weights, call: Call, keep: str) -> tuple[Tensor, Kept]:
        """y [B, S, H] from x [B, S, H], and what backward wants of it."""
        k = Kept(x=x)
        flat = x.reshape(-1, x.shape[-1])
        self._attend(flat, x.shape[:2], w, call, k)
        b = self._between(flat, w, k)
        k.gu = self.gu.forward(b, w)
        del b
        y = self._finish(w, k)
        if keep != "saved":
            k.gu = None
        if keep == "replay":
            k = Kept(x=x)
        return y.view(x.shape), k

    def _attend(self, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept) -> None:
        """qkv and attention's output."""
        a = x
        if self.norm1:
            a, _, k.rstd1 = self.norm1.forward(x, w)
        k.qkv = self.qkv.forward(a, w)
        q, key, v = self._rotated(k, shape, w, call, in_place=True)
        if call.cache is not None:
            call.cache(key, v)
            call.cache = None                # once, and not held until backward
        k.out, k.extra = call.attention.forward(q, key, v)

    def _heads(self, qkv: Tensor, shape: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, hq, D], k and v [B, S, hk, D], as views of [T, (hq + 2 hk) D]."""
        heads = qkv.view(*shape, self.hq + 2 * self.hk, self.head)
        return heads.split((self.hq, self.hk, self.hk), 2)

    def _rotated(self, k: Kept, shape: Any, w: Weights, call: Call, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as attention takes them. Without norms of q and k they stand rotated in qkv itself (in_place:
        now); with them, qkv keeps what their norms read."""
        q, key, v = self._heads(k.qkv, shape)
        if self.q_norm:
            q, k.inner["q"] = self._normed(self.q_norm, q, w)
            key, k.inner["k"] = self._normed(self.k_norm, key, w)
            in_place = True
        if in_place and call.cos is not None:
            ops.rope(q, key, call.cos, call.sin, q, key)
        return q, key, v

    def _normed(self, norm: Norm, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        """Over each head, or over all of them together where the weight is that long."""
        y, _, rstd = norm.forward(x if norm.size == self.head else x.flatten(2), w)
        return y.view(x.shape), rstd

    def _between(self, x: Tensor, w: Weights, k: Kept) -> Tensor:
        """h, and what the MLP reads."""
        out = k.out.reshape(x.shape[0], -1)
        if self.norm1b:
            k.o = self.o.forward(out, w)
            normed, _, k.inner["o"] = self.norm1b.forward(k.o, w)
            k.h = torch.add(x, normed, alpha=self.factor)
        else:
            k.h = self.o.forward_onto(x, out, w, self.factor)
        if not self.norm2:
            return k.h
        b, _, k.rstd2 = self.norm2.forward(k.h, w)
        return b

    def _finish(self, w: Weights, k: Kept) -> Tensor:
        act = ops.glu(*k.gu.chunk(2, 1), self.act)
        if not self.norm2b:
            return self.down.forward_onto(k.h, act, w, self.factor)
        k.d = self.down.forward(act, w)
        normed, _, k.inner["d"] = self.norm2b.forward(k.d, w)
        return torch.add(k.h, normed, alpha=self.factor)

    # ---- backward ----

    @staticmethod
    def nothing_kept(x: Tensor) -> Kept:
        return Kept(x=x)

    def backward(self, dy: Tensor, k: Kept, w: Weights, call: Call, wanted: Any, input_grad: bool
                 ) -> tuple[Tensor | None, Grads]:
        """dx [B, S, H] (None where it is not wanted) and gradients of the weights in `wanted`, by name.

        Uses up what was kept, and writes into it.
        """
        grads, shape = Grads(wanted), dy.shape
        dy, x = dy.reshape(-1, shape[-1]), k.x.reshape(-1, shape[-1])
        b = self._make_again(x, shape[:2], w, call, k)
        dh = self._mlp_backward(dy, b, w, k, grads)
        dx = self._attention_backward(dh, x, shape[:2], w, call, k, grads, input_grad)
        return (dx.view(shape) if input_grad else None), grads

    def _make_again(self, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept) -> Tensor | None:
        """What was not kept, but for the last projection where nothing needs its output. Yields what the MLP
        reads if it had to be made for that."""
        b = None
        if k.qkv is None:
            self._attend(x, shape, w, call, k)
            b = self._between(x, w, k)
        if k.gu is None:
            b = b if b is not None else self.norm2.again(k.h, w) if self.norm2 else k.h
            k.gu = self.gu.forward(b, w)
            if self.norm2b and k.d is None:
                self._finish(w, k)
        return b

    def _mlp_backward(self, dy: Tensor, b: Tensor | None, w: Weights, k: Kept, grads: Grads) -> Tensor:
        """dh, the gradient of the stream between attention and MLP."""
        dd = dy if self.factor == 1.0 else dy * self.factor
        if self.norm2b:
            dd, _ = self.norm2b.backward(dd, k.d, k.inner["d"], w, grads)
            k.d = None
        act = self.down.input_grad(dd, w)                # d(act(g) * u), then the product itself, in the same memory
        gate, up = k.gu.chunk(2, 1)
        ops.glu_backward(act, gate, up, self.act, dgate=gate, dup=up, h=act)
        self.down.weight_grads(dd, act, grads)
        del act, dd
        db, k.gu, dgu = self.gu.input_grad(k.gu, w), None, k.gu
        if self.norm2:
            dh, again = self.norm2.backward(db, k.h, k.rstd2, w, grads, add=dy, rebuild=b is None)
            b = again if b is None else b
        else:
            dh, b = db.add_(dy), k.h
        self.gu.weight_grads(dgu, b, grads)
        return dh

    def _attention_backward(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: Kept, grads: Grads,
                            input_grad: bool) -> Tensor:
        do = dh if self.factor == 1.0 else dh * self.factor
        if self.norm1b:
            do, _ = self.norm1b.backward(do, k.o, k.inner["o"], w, grads)
            k.o = None
        k.h = None
        dout = self.o.input_grad(do, w).view(k.out.shape)
        self.o.weight_grads(do, k.out.reshape(do.shape[0], -1), grads)
        del do
        dqkv = self._heads_backward(dout, shape, w, call, k, grads)
        da = self.qkv.input_grad(dqkv, w)
        if self.norm1:
            dx, a = self.norm1.backward(da, x, k.rstd1, w, grads, add=dh, rebuild=True)
        else:
            dx, a = da.add_(dh) if input_grad else da, x
        self.qkv.weight_grads(dqkv, a, grads)
        return dx

    def _heads_backward(self, dout: Tensor, shape: Any, w: Weights, call: Call, k: Kept, grads: Grads) -> Tensor:
        """d(qkv) [T, (hq + 2 hk) D]."""
        q, key, v = self._rotated(k, shape, w, call, in_place=False)
        dq, dk, dv = call.attention.backward(dout, q, key, v, k.out, k.extra)
        k.out = k.extra = None
        dqkv = torch.empty_like(k.qkv)
        to_q, to_k, to_v = self._heads(dqkv, shape)
        if call.cos is not None:
            ops.rope(dq, dk, call.cos, call.sin, to_q, to_k, v=dv, out_v=to_v, inverse=True)
        else:
            for to, d in ((to_q, dq), (to_k, dk), (to_v, dv)):
                to.copy_(d)
        if self.q_norm:
            raw_q, raw_k, _ = self._heads(k.qkv, shape)
            self._normed_backward(self.q_norm, to_q, raw_q, k.inner["q"], w, grads)
            self._normed_backward(self.k_norm, to_k, raw_k, k.inner["k"], w, grads)
        return dqkv

    def _normed_backward(self, norm: Norm, d: Tensor, raw: Tensor, rstd: Tensor, w: Weights, grads: Grads) -> None:
        """In place: d becomes the gradient of what the norm read."""
        flat = norm.size != self.head
        dx, _ = norm.backward(d.flatten(2) if flat else d, raw.flatten(2) if flat else raw, rstd, w, grads)
        d.copy_(dx.view(d.shape))

    # ---- sizes ----

    def input_bytes(self, tokens: int, item: int) -> int:
        """Bytes of x, which is kept in any case."""
        return tokens * self.down.rows[0] * item

    def kept_bytes(self, keep: str, tokens: int, item: int) -> int:
        """Bytes that lie between forward and backward, the layer's input left out: it is the last one's output.

        item: bytes of an activation's element.
        """
        if keep == "replay":
            return 0
        hidden, inter = self.down.rows[0], self.down.inputs
        columns = sum(self.qkv.rows) + self.o.inputs + hidden * (1 + bool(self.norm1b) + bool(self.norm2b))
        columns += 2 * inter if keep == "saved" else 0
        return tokens * (columns * item + 4 * (self.hq + len(self.norms)))


    def work_bytes(self, tokens: int, item: int) -> int:
        """Bytes that backward needs at most beside what is kept: a layer made again, its gradients in flight."""
        hidden, inter = self.down.rows[0], self.down.inputs
        return self.kept_bytes("saved", tokens, item) + tokens * (inter + sum(self.qkv.rows) + 4 * hidden) * item


# Arguments of layers that say nothing new to a template, or that it reads.
_COVERED = frozenset(("position_embeddings", "attention_mask", "position_ids", "past_key_values", "use_cache",
                      "cache_position", "num_items_in_batch"))


def _has(layer: nn.Module, name: str) -> bool:
    for part in name.split("."):
        layer = getattr(layer, part, None)
        if layer is None:
            return False
    return isinstance(layer, nn.Module) and not isinstance(layer, nn.Identity)


def _child(layer: nn.Module, name: str) -> nn.Module:
    child = getattr(layer, name, None)
    if not isinstance(child, nn.Module):
        raise Unfit(f"no template covers a {type(layer).__name__}: it has no {name}")
    return child
