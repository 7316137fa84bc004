"""A decoder layer's meaning, put together from forms; which forms a module's parts have is found part by part."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import ops
from ..templates.decoder import Decoder
from ..templates.latent_attention import LatentAttention
from ..templates.linears import Adapter, Linears
from ..templates.moe import SparseMLP
from ..templates.parts import Norm, given
from ..templates.rotary import KINDS, Rotary
from . import forms
from .experts import expert_rows, experts_down
from .values import Refused

Weights = dict[str, Tensor]


class LayerProof:
    """The meaning of one layer, in the forms that the module's own code has: of several, the first whose expression is
    among its own. What is found so is told to the template; that the whole is equal is another's to compare."""

    def __init__(self, session: Any, template: Decoder, weights: Weights, kwargs: dict[str, Any],
                 buffers: dict[str, Tensor], numbers: Sequence[float]) -> None:
        """session: prove.Session. numbers: those of the module's attributes."""
        self.session, self.w, self.numbers = session, weights, numbers
        self.a, self.mlp = template.attention, template.mlp
        angles, mask, self.cache = (given(kwargs, what) for what in ("angles", "mask", "cache"))
        # A layer that is given angles need not turn by them. What it does not read has no symbolic sizes either.
        turns = angles is not None and all(map(session.reads, angles))
        self.cos, self.sin = map(session.atom, angles) if turns else (None, None)
        self.mask = None if mask is None else session.atom(mask)
        self.correction = None
        if isinstance(self.mlp, SparseMLP) and self.mlp.router.correction:
            self.correction = session.atom(buffers[self.mlp.router.correction])
        self._style: Any = None              # a norm had it: the next has it too, mostly

    # ---- the whole ----

    def whole(self, x: Tensor) -> Tensor:
        """y [B, S, H]."""
        a = self.a
        out = self._attention(self._normed(a.norm1, x))
        out = self._normed(a.norm1b, self._linear(a.o, out))
        h = x + out * a.factor
        b = self._normed(self.mlp.norm2, h)
        m = self._sparse(b) if isinstance(self.mlp, SparseMLP) else self._dense(b, self.mlp)
        return h + self._normed(self.mlp.norm2b, m) * self.mlp.factor

    def _normed(self, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        w = self.w[norm.weight]
        self._style, y = self.session.choose(norm.weight.removesuffix(".weight"), (
            ((style, form), lambda form=form: form(x, w, norm.eps))
            for style, form in sorted(forms.NORMS, key=lambda form: form != self._style)))
        norm.style = self._style[0]
        return y

    def _activated(self, x: Tensor, code: int) -> Tensor:
        return self.session.choose("its activation", (
            (None, lambda form=form: form(x)) for c, form in forms.ACTIVATIONS if c == code))[1]

    def _linear(self, linears: Linears, x: Tensor, number: int = 0) -> Tensor:
        """One of those that stand side by side, with what its adapters add."""
        weight, biases = linears.weights[number], linears.biases
        y = F.linear(x, self.w[weight], self.w[biases[number]] if biases else None)
        dtype = y.dtype
        for adapter in linears.adapters.get(weight, ()):
            y = self._adapted(adapter, x, y)
        return y.to(dtype)

    def _adapted(self, adapter: Adapter, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.w[adapter.a], self.w[adapter.b]
        more = F.linear(F.linear(x.to(a.dtype), a), b) * adapter.scale
        return y + (more.to(y.dtype) if adapter.rounds else more)

    def _each(self, linears: Linears, x: Tensor, parts: tuple[int, ...]) -> list[Tensor]:
        """What stands side by side, one by one: of one matrix, cut to these widths."""
        if len(linears.weights) == 1 and len(parts) == 2:
            return list(self._linear(linears, x).chunk(2, dim=-1))
        if len(linears.weights) == 1:
            whole, ends = self._linear(linears, x), list(itertools.accumulate(parts))
            return [whole[..., end - n:end] for n, end in zip(parts, ends)]
        return [self._linear(linears, x, n) for n in range(len(linears.weights))]

    # ---- attention ----

    def _attention(self, x: Tensor) -> Tensor:
        a, mask = self.a, self.mask
        q, k, v = (self._latent_heads if isinstance(a, LatentAttention) else self._own_heads)(x)
        if a.kind == "sdpa":
            out = forms.sdpa(q, k, v, mask, a.scale, a.causal and mask is None)
        elif a.sinks:
            out = self.session.choose("attention with sinks", (
                (None, lambda form=form: form(q, k, v, mask, a.scale, self.w[a.sinks])) for form in forms.SINKS))[1]
        else:
            out = forms.spelled(q, k, v, mask, a.scale, a.cap)
        return out.transpose(1, 2).reshape(*x.shape[:-1], a.o.inputs)

    def _own_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, h, S, D]. What a cache gathers is k, turned, and v."""
        a = self.a
        q, k, v = self._each(a.first, x, (a.hq * a.head, a.hk * a.head, a.hk * a.head))
        q, k = (self._heads(t, norm) for t, norm in ((q, a.q_norm), (k, a.k_norm)))
        v = self._heads(v, None)
        q, k = self._turned(q, k)
        self._gathers(k, v)
        return q, k, v

    def _gathers(self, k: Tensor, v: Tensor) -> None:
        if self.cache is not None:
            self.session.gather(k, v)

    def _turned(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Heads, turned by angles. Says to the template which way it is."""
        a = self.a
        if a.rotary is None or self.cos is None:
            a.rotary = None
            return heads
        kind, found = self.session.choose("its rotary embedding", (
            (kind, lambda form=form: tuple(form(t, self.cos, self.sin) for t in heads))
            for kind, form in forms.ROTARIES if Rotary(*kind) in KINDS[a.turns[0]]))
        a.rotary = Rotary(*kind)
        return found

    def _latent_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same by way of few numbers, which are what a cache gathers: normed, and turned."""
        a, (b, s) = self.a, x.shape[:2]
        q, low = self._linear(a.first, x, 0), self._linear(a.first, x, 1)
        if a.q_up is not None:
            q = self._linear(a.q_up, self._normed(a.q_norm, q))
        plain = a.head - a.turned
        q = q.view(b, s, -1, a.head).transpose(1, 2)
        low, shared = low.split((a.latent, a.turned), -1)
        low = self._normed(a.kv_norm, low).view(b, 1, s, a.latent)
        turned, shared = self._turned(q[..., plain:], shared.view(b, 1, s, a.turned))
        self._gathers(low, shared)
        kv = self._linear(a.kv_up, low).view(b, s, -1, plain + a.values).transpose(1, 2)
        k, v = kv.split((plain, a.values), -1)
        k = torch.cat((k, shared.expand(-1, a.hq, -1, -1)), -1)
        return torch.cat((q[..., :plain], turned), -1), k, v

    def _heads(self, t: Tensor, norm: Norm | None) -> Tensor:
        """[B, h, S, D] of [B, S, h D], with its norm, which may run before heads are transposed or after."""
        shape = (*t.shape[:-1], -1, self.a.head)
        if norm is None:
            return t.view(shape).transpose(1, 2)
        if norm.size != self.a.head:
            return self._normed(norm, t).view(shape).transpose(1, 2)
        try:
            return self._normed(norm, t.view(shape)).transpose(1, 2)
        except Refused:
            return self._normed(norm, t.view(shape).transpose(1, 2))

    # ---- MLPs ----

    def _dense(self, b: Tensor, mlp: Any) -> Tensor:
        """A gated MLP, or a shared expert."""
        gate, up = self._each(mlp.gu, b, (mlp.down.inputs,) * 2)
        return self._linear(mlp.down, self._activated(gate, mlp.act) * up)

    def _sparse(self, b: Tensor) -> Tensor:
        m, flat = self.mlp, b.reshape(-1, self.mlp.hidden)
        weights, chosen = self._routed(flat)
        y = self._experts(flat, chosen, weights)
        if m.shared is None:
            return y.view(b.shape)

        def with_shared(runs_flat: bool, wide: bool) -> Tensor:
            z = flat if runs_flat else b
            other = self._dense(z, m.shared)
            if m.shared.gate:
                other = torch.sigmoid(self._linear(m.shared.gate, z)) * other
            if wide:
                return (y.float() + other.float()).to(b.dtype).view(b.shape)
            return (y + other).view(b.shape) if runs_flat else y.view(b.shape) + other

        return self.session.choose("its shared expert", (
            (None, lambda flat=flat, wide=wide: with_shared(flat, wide))
            for flat, wide in ((True, False), (False, False), (True, True))))[1]

    def _routed(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """weights, chosen [T, k]. Where every expert is chosen, trying it does not tell whether weights are
        normalised."""
        r = self.mlp.router
        weight, bias = self.w[r.weight], self.w[r.bias] if r.bias else None
        near = [v for v in (1.0, *self.numbers) if abs(v - r.factor) <= 1e-5 * abs(v)]
        candidates = (((normalised, *numbers), form) for normalised in (r.normalised, not r.normalised)
                      for numbers, form in forms.routers(r.top_k, r.experts, r.sigmoid, normalised, r.wide,
                                                         near or [r.factor], (r.groups, r.best)))
        (r.normalised, r.factor, r.least), (weights, chosen) = self.session.choose("its router", (
            (numbers, lambda form=form: form(b, weight, bias, self.correction)[1:]) for numbers, form in candidates))
        return weights, chosen

    def _experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """All experts' products are functions without an inside, of the layer's type: known_loop says what they are.
        The gate between is as any part."""
        e, own = self.mlp.experts, [self.w[n] for n in sorted(self.mlp.experts.names)]
        z = expert_rows(self.session.values, hidden, chosen, own, 2 * e.inter)
        if e.act == ops.CLAMPED:
            candidates = [forms.clamped_gate]
        else:
            candidates = [partial(forms.gate, act) for code, act in forms.ACTIVATIONS if code == e.act]
        gated = self.session.choose("the gate of its experts", (
            (None, lambda form=form: form(z, e.interleaved)) for form in candidates))[1]
        return experts_down(self.session.values, gated, hidden, chosen, weights, own)


__all__ = ["LayerProof"]
