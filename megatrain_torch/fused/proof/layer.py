"""A decoder layer's meaning, put together from forms; which forms a module's parts have is found part by part."""
from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import ops
from ..templates.decoder import Decoder
from ..templates.latent_attention import LatentAttention
from ..templates.linears import Adapter, Linears
from ..templates.moe import SparseMLP
from ..templates.parts import Norm
from ..templates.rotary import KINDS, Rotary
from . import forms
from .experts import gated_by
from .session import Session
from .values import Refused, opaque

Weights = dict[str, Tensor]


@dataclasses.dataclass
class Parts:
    """The forms of a layer's parts. before: norms of q and k run before heads are transposed. flat: a shared expert
    runs on [T, H]. wide: what it gives is added to the experts' in fp32."""

    norm: dict[str, Callable[..., Tensor]]
    act: Callable[[Tensor], Tensor] | None
    rotary: Callable[..., Tensor] | None
    router: Callable[..., Any] | None
    before: bool = True
    flat: bool = True
    wide: bool = False
    sinks: Callable[..., Tensor] = forms.with_sinks


class LayerProof:
    """Finds the parts of one layer, and has the whole compared."""

    def __init__(self, session: Session, layer: nn.Module, template: Decoder, weights: Weights, dtype: torch.dtype
                 ) -> None:
        self.session, self.layer, self.template, self.w, self.dtype = session, layer, template, weights, dtype
        self.a, self.mlp = template.attention, template.mlp
        self.witnesses: list[Any] = []
        self._style: tuple[int, Callable[..., Tensor]] | None = None     # a norm had it: the next has it too, mostly

    # ---- the parts ----

    def _match(self, what: str, theirs: Callable[[], Any], candidates: Iterator[tuple[Any, Callable[[], Any]]]) -> Any:
        """The first candidate with the part's numbers.

        Raises:
            Refused: none has them.
        """
        found, witness = self.session.watched(lambda: self.session.parts(theirs))
        self.witnesses.append(witness)
        try:
            return self.session.match(found, ((name, lambda form=form: self.session.parts(form))
                                              for name, form in candidates))
        except Refused as reason:
            raise Refused(f"{what}: {reason}") from None

    def _norm(self, norm: Norm, shape: tuple[Any, ...]) -> tuple[int, Callable[..., Tensor]]:
        module = self.layer.get_submodule(norm.weight.removesuffix("weight").rstrip("."))
        x = self.session.atom(f"input of {norm.weight}", (*shape, norm.size), self.dtype)
        w = self.w[norm.weight]
        return self._match(f"{norm.weight.removesuffix('.weight')} ({type(module).__name__})", lambda: module(x), (
            ((style, form), lambda form=form: form(x, w, norm.eps))
            for style, form in sorted(forms.NORMS, key=lambda form: form != self._style)))

    def norms(self) -> dict[str, Callable[..., Tensor]]:
        """By the names of their weights; says to the template how they apply these."""
        found, b, s = {}, self.session.rows, self.session.tokens
        for norm in self.template.norms:
            shape = (b, s, 3) if self.a.per_head(norm) else (b, s)
            self._style = norm.style, found[norm.weight] = self._norm(norm, shape)
        return found

    def activation(self, fn: Any, code: int) -> Callable[[Tensor], Tensor]:
        x = self.session.atom("input of the activation", (self.session.tokens, 7), self.dtype)
        return self._match(f"its activation ({type(fn).__name__})", lambda: fn(x), (
            (form, lambda form=form: form(x)) for c, form in forms.ACTIVATIONS if c == code))

    def rotary(self, cos: Tensor, sin: Tensor) -> Callable[..., Tensor]:
        """The form of the function that turns heads, beside the attention's class; says to the template which kind it
        is."""
        attn, (name, d) = self.layer.self_attn, self.a.turns
        turn = getattr(sys.modules.get(type(attn).__module__), name, None)
        if turn is None:
            raise Refused(f"there is no {name} beside its attention's class")
        b, s = self.session.rows, self.session.tokens
        q, k = (self.session.atom(f"heads of {n}", (b, h, s, d), self.dtype) for n, h in (("q", 5), ("k", 2)))
        kind, form = self._match("its rotary embedding", lambda: turn(q, k, cos, sin), (
            ((kind, form), lambda form=form: (form(q, cos, sin), form(k, cos, sin)))
            for kind, form in forms.ROTARIES if Rotary(*kind) in KINDS[name]))
        self.a.rotary = Rotary(*kind)
        return form

    def router(self, correction: Tensor | None) -> Callable[..., Any]:
        r = self.mlp.router
        module = self.layer.get_submodule(r.name)
        b = self.session.atom("input of the router", (self.session.tokens, self.mlp.hidden), self.dtype)
        weight, bias = self.w[r.weight], self.w[r.bias] if r.bias else None
        own = correction is None or any(True for _ in module.buffers())
        near = [v for v in (1.0, *_numbers(module)) if abs(v - r.factor) <= 1e-5 * abs(v)]
        (r.normalised, r.factor, r.least), form = self._router_of(module, own, b, weight, bias, correction, near)
        return form

    def _router_of(self, module: nn.Module, own: bool, b: Tensor, weight: Tensor, bias: Tensor | None,
                   correction: Tensor | None, near: list[float]) -> Any:
        r = self.mlp.router
        # Where every expert is chosen, trying it does not tell whether weights are normalised.
        candidates = (((normalised, *numbers), form) for normalised in (r.normalised, not r.normalised)
                      for numbers, form in forms.routers(r.top_k, r.experts, r.sigmoid, normalised, r.wide,
                                                         near or [r.factor], (r.groups, r.best)))
        return self._match(f"its router ({type(module).__name__})",
                           lambda: module(b) if own else module(b, correction),
                           (((numbers, form), lambda form=form: form(b, weight, bias, correction))
                            for numbers, form in candidates))

    def gate(self) -> None:
        """The gate of the experts is the one that the template has."""
        e = self.mlp.experts
        module = self.layer.get_submodule(e.gu.rsplit(".", 1)[0])
        own = gated_by(module)
        z = self.session.atom("input of the gate", (self.session.tokens, 2 * e.inter), self.dtype)
        if e.act == ops.CLAMPED:
            candidates = iter([(None, lambda: forms.clamped_gate(z, e.interleaved))])
        else:
            candidates = ((None, lambda act=act: forms.gate(z, act, e.interleaved))
                          for code, act in forms.ACTIVATIONS if code == e.act)
        self._match(f"the gate of its experts ({type(module).__name__})", lambda: own(z), candidates)

    # ---- the whole ----

    def whole(self, p: Parts, x: Tensor, call: Any) -> Tensor:
        """y [B, S, H]."""
        a = self.a
        out = self._attention(p, self._normed(p, a.norm1, x), call)
        out = self._normed(p, a.norm1b, self._linear(a.o, out))
        h = x + out * a.factor
        b = self._normed(p, self.mlp.norm2, h)
        m = self._sparse(p, b, call) if isinstance(self.mlp, SparseMLP) else self._dense(p, b, self.mlp)
        return h + self._normed(p, self.mlp.norm2b, m) * self.mlp.factor

    def _normed(self, p: Parts, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else p.norm[norm.weight](x, self.w[norm.weight], norm.eps)

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

    def _attention(self, p: Parts, x: Tensor, call: Any) -> Tensor:
        a = self.a
        q, k, v = (self._latent_heads if isinstance(a, LatentAttention) else self._own_heads)(p, x, call)
        if call.kind == "sdpa":
            out = forms.sdpa(q, k, v, call.mask, a.scale, a.causal and call.mask is None)
        elif a.sinks:
            out = p.sinks(q, k, v, call.mask, a.scale, self.w[a.sinks])
        else:
            out = forms.spelled(q, k, v, call.mask, a.scale, a.cap)
        return out.transpose(1, 2).reshape(*x.shape[:-1], a.o.inputs)

    def _own_heads(self, p: Parts, x: Tensor, call: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, h, S, D]. What a cache gathers is k, turned, and v."""
        a = self.a
        q, k, v = self._each(a.first, x, (a.hq * a.head, a.hk * a.head, a.hk * a.head))
        q, k = (self._heads(p, t, norm) for t, norm in ((q, a.q_norm), (k, a.k_norm)))
        v = self._heads(p, v, None)
        q, k = self._turned(p, call, q, k)
        call.gathers(k, v)
        return q, k, v

    @staticmethod
    def _turned(p: Parts, call: Any, *heads: Tensor) -> tuple[Tensor, ...]:
        return heads if p.rotary is None else tuple(p.rotary(t, call.cos, call.sin) for t in heads)

    def _latent_heads(self, p: Parts, x: Tensor, call: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The same by way of few numbers, which are what a cache gathers: normed, and turned."""
        a, (b, s) = self.a, x.shape[:2]
        q, low = self._linear(a.first, x, 0), self._linear(a.first, x, 1)
        if a.q_up is not None:
            q = self._linear(a.q_up, self._normed(p, a.q_norm, q))
        plain = a.head - a.turned
        q = q.view(b, s, -1, a.head).transpose(1, 2)
        low, shared = low.split((a.latent, a.turned), -1)
        low = self._normed(p, a.kv_norm, low).view(b, 1, s, a.latent)
        turned, shared = self._turned(p, call, q[..., plain:], shared.view(b, 1, s, a.turned))
        call.gathers(low, shared)
        kv = self._linear(a.kv_up, low).view(b, s, -1, plain + a.values).transpose(1, 2)
        k, v = kv.split((plain, a.values), -1)
        k = torch.cat((k, shared.expand(-1, a.hq, -1, -1)), -1)
        return torch.cat((q[..., :plain], turned), -1), k, v

    def _heads(self, p: Parts, t: Tensor, norm: Norm | None) -> Tensor:
        """[B, h, S, D] of [B, S, h D], with its norm."""
        shape = (*t.shape[:-1], -1, self.a.head)
        if norm is None:
            return t.view(shape).transpose(1, 2)
        if norm.size != self.a.head:
            return self._normed(p, norm, t).view(shape).transpose(1, 2)
        if p.before:
            return self._normed(p, norm, t.view(shape)).transpose(1, 2)
        return self._normed(p, norm, t.view(shape).transpose(1, 2))

    def _dense(self, p: Parts, b: Tensor, mlp: Any) -> Tensor:
        """A gated MLP, or a shared expert."""
        gate, up = self._each(mlp.gu, b, (mlp.down.inputs,) * 2)
        return self._linear(mlp.down, p.act(gate) * up)

    def _sparse(self, p: Parts, b: Tensor, call: Any) -> Tensor:
        m, flat = self.mlp, b.reshape(-1, self.mlp.hidden)
        r = m.router
        _, weights, chosen = p.router(flat, self.w[r.weight], self.w[r.bias] if r.bias else None, call.correction)
        y = self.experts(flat, chosen, weights)
        if m.shared is None:
            return y.view(b.shape)
        other = self._dense(p, flat if p.flat else b, m.shared)
        if m.shared.gate:
            other = torch.sigmoid(self._linear(m.shared.gate, flat if p.flat else b)) * other
        if p.wide:
            return (y.float() + other.float()).to(b.dtype).view(b.shape)
        return (y + other).view(b.shape) if p.flat else y.view(b.shape) + other

    def experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """All experts as one function, of the layer's type: known_loop says what it is."""
        own = [self.w[n] for n in sorted(self.mlp.experts.names)]
        return opaque(self.session.values, ("experts",), hidden.shape, hidden, hidden, chosen, weights, *own)


def _numbers(module: nn.Module) -> list[float]:
    return [float(v) for v in vars(module).values() if isinstance(v, int | float)]


__all__ = ["LayerProof", "Parts"]
