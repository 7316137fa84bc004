"""Proves that a module computes what its template stands for, for every input that it can get (docs/design.md).

The module's code is read by torch._dynamo (graph/reader.py): its graph, and what that depends on. `prove` runs the
graph on fake tensors, with a prime for each size. It puts the template's meaning together from forms, and compares
numbers (values.py). What it finds holds for as long as the reading's guards do.
"""
from __future__ import annotations

import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn import functional as F

from ... import ops
from ...graph.reader import Graph, cached
from ..templates import Template
from ..templates.attention_half import Rotary
from ..templates.decoder import Embedding, LoneNorm
from ..templates.moe import Facts
from ..templates.parts import Linears, Norm, Unfit, roles_of
from .experts import expert_rows, experts_down
from .values import Values, attention, linear, operands, repeated

# ---- forms, in which models write a part down: definitions in plain torch ------------------------------
# Those of one style or kind have one meaning; they differ in what is rounded when, or in how it is spelled. Which form
# a module has is found by its numbers (values.py), so that a form more costs nothing but its lines, and a way that none
# has is refused. Letters: B rows, S tokens of each, D head size, hq and hk heads, T = B S, E experts, k of them a
# token's.

def _hat(x: Tensor, eps: float, root: Callable[[Tensor], Tensor] = torch.rsqrt) -> Tensor:
    wide = x.float()
    return wide * root(wide.pow(2).mean(-1, keepdim=True) + eps)


# (x [..., n], weight [n], eps) -> [..., n]
NORMS: list[tuple[int, Callable[[Tensor, Tensor, float], Tensor]]] = [
    (ops.ROUND_FIRST, lambda x, w, eps: w * _hat(x, eps).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: (w * _hat(x, eps)).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: (w.float() * _hat(x, eps)).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: (w.float() * _hat(x, eps, lambda t: torch.pow(t, -0.5))).to(x.dtype)),
    (ops.ROUND_LAST, lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps)),
    (ops.ONE_PLUS, lambda x, w, eps: (_hat(x, eps) * (1.0 + w.float())).to(x.dtype)),
    (ops.ONE_PLUS, lambda x, w, eps: (_hat(x, eps) * (1.0 + w)).to(x.dtype)),
]
ACTIVATIONS: list[tuple[int, Callable[[Tensor], Tensor]]] = [
    (ops.SILU, F.silu),
    (ops.GELU_TANH, lambda x: F.gelu(x, approximate="tanh")),
    (ops.GELU_TANH,
     lambda x: 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))),
    (ops.GELU, F.gelu),
    (ops.GELU, lambda x: x * 0.5 * (1.0 + torch.erf(x / 2.0 ** 0.5))),
]


# Rotary embeddings: (q or k [B, h, S, D], cos, sin [B or 1, S, R]) -> as q

def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _pair_turned(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _first_half(t: Tensor) -> Tensor:
    return t[..., :t.shape[-1] // 2]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, turn: Callable[[Tensor], Tensor], first: bool = False) -> Tensor:
    """The first R of D numbers are rotated, the rest, if there is any, is passed. first: angles are those of the first
    half, each at both places of its pair."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if first:
        cos, sin = (_first_half(t).repeat_interleave(2, dim=-1) for t in (cos, sin))
    turning, rest = x[..., :cos.shape[-1]], x[..., cos.shape[-1]:]
    return torch.cat(((turning * cos + turn(turning) * sin).to(x.dtype), rest), -1)


def _apart(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of the first and the second of all pairs, angles once for each: the first of all, then the second of all."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


_HALVES, _PAIRS, _FIRST = Rotary(), Rotary(interleaved=True), Rotary(interleaved=True, first=True)
ROTARIES: list[tuple[Rotary, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
    (_HALVES, lambda x, cos, sin: _turned(x, cos, sin, _half_turned)),
    (_HALVES, lambda x, cos, sin: _turned(x.float(), cos.float(), sin.float(), _half_turned).to(x.dtype)),
    (_PAIRS, lambda x, cos, sin: _turned(x, cos, sin, _pair_turned)),
    (_PAIRS, lambda x, cos, sin: _turned(x.float(), cos, sin, _pair_turned).to(x.dtype)),
    (_FIRST, lambda x, cos, sin: _turned(x, cos, sin, _pair_turned, True)),
    (_FIRST, lambda x, cos, sin: _turned(x.float(), cos, sin, lambda _: _pair_turned(x).float(), True).to(x.dtype)),
    (Rotary(short=True), lambda x, cos, sin: _apart(*torch.chunk(x, 2, dim=-1), cos, sin)),
    (_FIRST._replace(parted=True),
     lambda x, cos, sin: _apart(x[..., 0::2], x[..., 1::2], _first_half(cos), _first_half(sin))),
]


# Attention: q [B, hq, S, D], k, v [B, hk, S, D], mask [B, 1, S, S] -> [B, hq, S, D]

def _logits(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    """Capped where cap > 0."""
    w = torch.matmul(q, repeated(k, q.shape[1] // k.shape[1]).transpose(2, 3)) * scale
    if cap:
        w = torch.tanh(w / cap) * cap
    return w if mask is None else w + mask


def spelled(logits: Tensor, v: Tensor) -> Tensor:
    w = F.softmax(logits, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(w, repeated(v, w.shape[1] // v.shape[1]))


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    w = _logits(q, k, mask, scale)
    w = torch.cat((w, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)), -1)
    w = w - w.max(dim=-1, keepdim=True).values
    w = F.softmax(w, dim=-1, dtype=w.dtype)[..., :-1].to(v.dtype)
    return torch.matmul(w, repeated(v, q.shape[1] // v.shape[1]))


def with_sinks_behind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    """The same by the share of a row that its sink leaves: sigmoid(lse - sink)."""
    logits = _logits(q, k, mask, scale)
    share = (torch.logsumexp(logits, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = spelled(logits, v)
    return out * share.unsqueeze(-1).to(out.dtype)


def of_groups(choice: Tensor, experts: int, groups: int, best: int) -> Tensor:
    """A router's scores [T, E]; those of all but the best groups are hidden: none, where there is one group."""
    of_group = choice.view(-1, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(of_group)
    mask.scatter_(1, torch.topk(of_group, k=best, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
    return choice.masked_fill(~mask.bool(), float("-inf"))


def clamped(a: Tensor, u: Tensor) -> Tensor:
    """GPT-OSS' own gate: csrc/ops/glu.h has the numbers."""
    a, u = a.clamp(min=None, max=7.0), u.clamp(min=-7.0, max=7.0)
    return (u + 1) * (a * torch.sigmoid(a * 1.702))


# ---- the proof -----------------------------------------------------------------------------------------


class Proof(torch.fx.Interpreter):
    """Runs a graph, and beside it the meaning of a template in the forms that the module's own code has: of several,
    the first whose expression is among its own. What is found so is told to the template.

    Attributes:
        read: the graph. known: so many expressions the module's own code makes: those with smaller numbers.
        gathered: numbers of what a key-value cache was given. w: weights by name.
    """

    def __init__(self, graph: Graph, named: dict[int, str]) -> None:
        """named: by id of real tensors, weights, inputs and buffers, what they are called."""
        super().__init__(graph.module, garbage_collect_values=False)
        self.extra_traceback = False         # else Unfit would say the node as well
        self.read, self.values, self.known = graph, Values(), 0
        self.gathered: list[int] = []
        self._named, self._atoms = named, {}
        self._fakes = {id(t): graph.inputs[name][1] for name, t in graph.real.items() if isinstance(t, Tensor)}
        self._sizes = _sizes(graph)
        self.values.symbols = {str(n): str(s) for s, n in self._sizes.items()}

    def size(self, n: Any) -> Any:
        """A number that the graph is given, with a prime for each of its symbols."""
        return int(n.node.expr.xreplace(self._sizes)) if isinstance(n, torch.SymInt) else n

    def atom(self, real: Tensor) -> Tensor:
        """The fake tensor that stands for a weight, an input or a buffer."""
        if id(real) not in self._atoms:
            like, name = self._fakes.get(id(real), real), self._named.get(id(real), "a tensor of its own")
            with self.read.fake:
                t = torch.empty(tuple(map(self.size, like.shape)), dtype=like.dtype, device=like.device)
            learns = real.requires_grad or (name == "input" and t.is_floating_point())
            self._atoms[id(real)] = self.values.atom(name, t, learns)
        return self._atoms[id(real)]

    def numbers(self, run: Callable[[], Tensor]) -> list[int]:
        """Of what `run` gives, and of what a cache was given."""
        self.gathered.clear()
        device = next((t.device.type for t in self._fakes.values()), "cpu")
        with torch.enable_grad(), torch.autocast(device, enabled=False), self.read.fake, self.values:
            return [self.values.of(run()), *self.gathered]

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.gathered += map(self.values.of, tensors)
        return tensors

    def choose(self, what: str, candidates: Iterable[Any], run: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The first candidate of which `run` gives what the module's own code has too, and that; else Unfit."""
        for candidate in candidates:
            try:
                out = run(candidate)
            except (RuntimeError, IndexError, Unfit):        # sizes, or parts, that are not for this form
                continue
            if all(self.values.of(t) < self.known for t in (out if isinstance(out, tuple) else (out,))):
                return candidate, out
        raise Unfit(f"{what}: {self.difference()}")

    def difference(self, ours: Sequence[int] = (), theirs: Sequence[int] | None = None) -> str:
        """What the module computes and no form has made, tried ones among them: the first such expression."""
        every = set(range(self.known)) if theirs is None else self._within(theirs)
        strange = sorted(n for n in every - self.values.made - self._within(ours)
                         if self.values.keys[n][0] not in ("atom", "empty", "new_empty"))
        if strange:
            where = self.values.places[strange[0]]
            return f"no template has its {self.values.told(strange[0])}" + (f" ({where})" if where else "")
        missing = sorted(self._within(ours) - every)
        return f"it lacks the template's {self.values.told(missing[0])}" if missing else "its gradients differ"

    def _within(self, numbers: Sequence[int]) -> set[int]:
        found: set[int] = set()
        todo = list(numbers)
        while todo:
            n = todo.pop()
            if n not in found:
                found.add(n)
                todo.extend(operands(self.values.keys[n]))
        return found

    # ---- the module's graph ----

    def placeholder(self, target: str, args: Any, kwargs: Any) -> Any:
        real = self.read.real[target]
        return self.atom(real) if isinstance(real, Tensor) else self.size(self.read.inputs[target][1])

    def run_node(self, node: Any) -> Any:
        """Says in which line of the module's code it stands, file:line."""
        lines = re.findall(r'File "(?:[^"]*[/\\\\])?([^"]*)", line (\d+)', node.meta.get("stack_trace") or "")
        self.values.place = ":".join(lines[-1]) if lines else ""
        # What neither reads nor gives a tensor sets a state of torch's, in which a proof that fails would leave it.
        read = [n.meta.get("example_value") for n in node.all_input_nodes]
        if node.op == "call_function" and node.target is not torch._C._set_grad_enabled \
                and "example_value" not in node.meta and not any(isinstance(v, Tensor) for v in read):
            home = node.target.__module__
            if home != "torch.nn.attention" and (home != "torch.amp.autocast_mode" or node.args[2:3] == (True,)):
                raise Unfit(f"it calls {node.target.__name__}, which sets a state of torch's")
            return None                      # which kernels attention may run by, and autocast off: the same here
        return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is cached():
            return self.gather(*args)
        if (opaque := _OPAQUE.get(target)) is not None:
            return opaque(*args, **kwargs)
        if not _shows_its_gradient(target):
            raise Unfit(f"it calls {getattr(target, '__name__', target)}, whose gradient may be anything")
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        raise Unfit(f"it calls {target}, into which dynamo did not look")

    # ---- what a template means ----

    def meaning(self, template: Any, module: nn.Module, weights: dict[str, Tensor], x: Tensor, kwargs: dict[str, Any]
                ) -> Tensor:
        self.w, self._style, x = {n: self.atom(t) for n, t in weights.items()}, None, self.atom(x)
        if isinstance(template, Embedding):
            return F.embedding(x, self.w["weight"], template.padding)
        if isinstance(template, LoneNorm):
            return self._normed(template.norm, x)
        self.a, self.mlp = a, m = template.attention, template.mlp
        roles = roles_of(kwargs)
        angles, mask, self.cache = map(kwargs.get, map(roles.get, ("angles", "mask", "cache")))
        # A layer that is given angles need not turn by them. What it does not read has no size of the run's.
        turns = angles is not None and all(id(t) in self._fakes for t in angles)
        self.cos, self.sin = map(self.atom, angles) if turns else (None, None)
        self.mask = None if mask is None else self.atom(mask)
        if template.routes:
            self.correction = self.atom(module.get_buffer(m.router.correction)) if m.router.correction else None
            # Numbers that the router's weights may be multiplied with.
            router = module.get_submodule(m.router.name)
            own, config = vars(router).values(), vars(getattr(router, "config", router)).values()
            numbers = [v for v in own if type(v) in (int, float)] + [v for v in config if type(v) is float]
            self.factors = [*dict.fromkeys(float(v) for v in numbers if v not in (0, 1)), 1.0]
        h = x + self._normed(a.norm_out, self._linear(a.o, self._attention(self._normed(a.norm_in, x)))) * a.factor
        b = self._normed(m.norm_in, h)
        return h + self._normed(m.norm_out, self._sparse(b) if template.routes else self._dense(b, m)) * m.factor

    def _normed(self, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        w = self.w[norm.weight]
        self._style, y = self.choose(            # a norm that had it: the next has it too, mostly
            norm.weight.removesuffix(".weight"), sorted(NORMS, key=lambda one: one != self._style),
            lambda one: one[1](x, w, norm.eps))
        norm.style = self._style[0]
        return y

    def _linear(self, linears: Linears, x: Tensor, number: int = 0) -> Tensor:
        """One of those that stand side by side, with what its adapters add."""
        weight, biases = linears.weights[number], linears.biases
        y = linear(x, self.w[weight], self.w[biases[number]] if biases else None)
        dtype = y.dtype
        for adapter in linears.adapters[weight]:
            a, b = self.w[adapter.a], self.w[adapter.b]
            more = linear(linear(x.to(a.dtype), a), b) * adapter.scale
            y = y + (more.to(y.dtype) if adapter.rounds else more)
        return y.to(dtype)

    def _each(self, linears: Linears, x: Tensor, parts: tuple[int, ...]) -> list[Tensor]:
        """What stands side by side, one by one: of one matrix, cut to these widths."""
        if len(linears.weights) > 1:
            return [self._linear(linears, x, n) for n in range(len(linears.weights))]
        return list(self._linear(linears, x).split(parts, -1))

    def _attention(self, x: Tensor) -> Tensor:
        a, mask = self.a, self.mask
        q, k, v = (self._latent_heads if a.latent else self._own_heads)(x)
        if a.kind == "sdpa":
            out = attention(q, k, v, mask, 0.0, a.causal and mask is None, a.scale, enable_gqa=True)
        elif a.sinks:
            out = self.choose("attention with sinks", (with_sinks, with_sinks_behind),
                              lambda form: form(q, k, v, mask, a.scale, self.w[a.sinks]))[1]
        else:
            out = spelled(_logits(q, k, mask, a.scale, a.cap), v)
        return out.transpose(1, 2).reshape(*x.shape[:-1], a.o.inputs)

    def _own_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, h, S, D]. What a cache gathers is k, turned, and v."""
        a = self.a
        q, k, v = self._each(a.first, x, (a.hq * a.head, a.hk * a.head, a.hk * a.head))
        q, k, v = (self._heads(t, norm) for t, norm in ((q, a.q_norm), (k, a.k_norm), (v, None)))
        q, k = self._turned(q, k)
        if self.cache is not None:
            self.gather(k, v)
        return q, k, v

    def _turned(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Heads, turned by angles. Says to the template which way it is."""
        a = self.a
        if a.rotary is None or self.cos is None:
            a.rotary = None
            return heads
        kinds = [one for one in ROTARIES if one[0].parted == a.parted]
        (a.rotary, form), first = self.choose("its rotary embedding", kinds,
                                              lambda one: one[1](heads[0], self.cos, self.sin))
        return first, *(form(t, self.cos, self.sin) for t in heads[1:])

    def _latent_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same by way of few numbers, which are what a cache gathers: normed, and turned."""
        a, (b, s) = self.a, x.shape[:2]
        q, low = self._linear(a.first, x, 0), self._linear(a.first, x, 1)
        if a.q_up is not None:
            q = self._linear(a.q_up, self._normed(a.q_norm, q))
        q = q.view(b, s, -1, a.head).transpose(1, 2)
        low, shared = low.split((a.low, a.turned), -1)
        low = self._normed(a.kv_norm, low).view(b, 1, s, a.low)
        turned, shared = self._turned(q[..., a.plain:], shared.view(b, 1, s, a.turned))
        if self.cache is not None:
            self.gather(low, shared)
        kv = self._linear(a.kv_up, low).view(b, s, -1, a.plain + a.values).transpose(1, 2)
        k, v = kv.split((a.plain, a.values), -1)
        k = torch.cat((k, shared.expand(-1, a.hq, -1, -1)), -1)
        return torch.cat((q[..., :a.plain], turned), -1), k, v

    def _heads(self, t: Tensor, norm: Norm | None) -> Tensor:
        """[B, h, S, D] of [B, S, h D], with its norm, which may run before heads are transposed or after."""
        shape = (*t.shape[:-1], -1, self.a.head)
        if norm is None or norm.size != self.a.head:
            return self._normed(norm, t).view(shape).transpose(1, 2)
        try:
            return self._normed(norm, t.view(shape)).transpose(1, 2)
        except Unfit:
            return self._normed(norm, t.view(shape).transpose(1, 2))

    def _dense(self, b: Tensor, mlp: Any) -> Tensor:
        """A gated MLP, or a shared expert."""
        gate, up = self._each(mlp.gu, b, (mlp.down.inputs,) * 2)
        (mlp.act, _), activated = self.choose("its activation", ACTIVATIONS, lambda one: one[1](gate))
        return self._linear(mlp.down, activated * up)

    def _sparse(self, b: Tensor) -> Tensor:
        m, flat = self.mlp, b.reshape(-1, self.mlp.hidden)
        weights, chosen = self._routed(flat)
        y = self._experts(flat, chosen, weights)
        if m.shared is None:
            return y.view(b.shape)

        def with_shared(way: tuple[bool, bool]) -> Tensor:
            (runs_flat, wide), z = way, flat if way[0] else b
            other = self._dense(z, m.shared)
            if m.shared.gate:
                other = torch.sigmoid(self._linear(m.shared.gate, z)) * other
            if wide:
                return (y.float() + other.float()).to(b.dtype).view(b.shape)
            return (y + other).view(b.shape) if runs_flat else y.view(b.shape) + other

        return self.choose("its shared expert", ((True, False), (False, False), (True, True)), with_shared)[1]

    def _routed(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """weights, chosen [T, k]. Step by step, what is more first: what is normalised, scaled or rounded is there
        before it is, too."""
        r, choose = self.mlp.router, partial(self.choose, "its router")
        read = [b, self.w[r.weight], *([self.w[r.bias]] if r.bias else [])]
        # In fp32, which a router's fp32 weights make of a 16-bit layer's input too, as some families have them.
        wide, logits = choose((True, False), lambda wide: linear(*(t.float() if wide else t for t in read)))
        (kind, _), found = choose((
            ("sigmoid", lambda: logits.float().sigmoid()),
            ("softmax", lambda: F.softmax(logits.float(), dim=-1)),
            ("softmax", lambda: F.softmax(logits, dim=-1, dtype=torch.float)),
            ("of the largest", lambda: torch.topk(logits, r.top_k, dim=-1)),
            ("of the largest", lambda: torch.topk(logits.float(), r.top_k, dim=-1))), lambda one: one[1]())
        if kind == "softmax":
            w, chosen = torch.topk(found, r.top_k, dim=-1)
        elif kind == "sigmoid":              # a single group may be masked, or not
            scores = found if self.correction is None else found + self.correction
            _, chosen = self.choose(
                "its router's choice", (True, False) if r.groups == 1 else (True,), lambda masked: torch.topk(
                    of_groups(scores, r.experts, r.groups, r.best) if masked else scores, r.top_k, dim=-1,
                    sorted=False)[1])
            w = found.gather(1, chosen)
        else:
            top, chosen = found
            w = choose((torch.float, top.dtype), lambda dtype: F.softmax(top, dim=-1, dtype=dtype))[1]
        total = w.sum(dim=-1, keepdim=True)
        least, w = choose((0.0, 1e-20, 1e-6, 1e-12, None) if kind == "sigmoid" else (0.0, None),     # None: it does not
                          lambda n: w if n is None else w / (total + n if n else total))
        factor, w = choose(self.factors, lambda n: w * n)
        rounds, w = choose((True, False), lambda rounds: w.to(b.dtype) if rounds else w)
        normalised = least is not None or kind == "of the largest"
        r.facts = Facts(kind == "sigmoid", normalised, wide, rounds, factor, least or 0.0)
        return w, chosen

    def _experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """All experts' products are functions without an inside, of the layer's type: known_loop says what they are.
        The gate between is as any part."""
        e, own = self.mlp.experts, [self.w[n] for n in sorted(self.mlp.experts.names)]
        z = expert_rows(hidden, chosen, own, 2 * e.inter)
        ways = itertools.product((*ACTIVATIONS, (ops.CLAMPED, None)), (False, True))

        def gate(way: tuple[tuple[int, Any], bool]) -> Tensor:
            (_, act), interleaved = way
            a, u = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, dim=-1)
            return act(a) * u if act else clamped(a, u)

        ((e.act, _), e.interleaved), gated = self.choose("the gate of its experts", ways, gate)
        return experts_down(gated, hidden, chosen, weights, own)


def _sizes(graph: Graph) -> dict[Any, Any]:
    """A prime for each symbol of the graph's sizes, in the order of the sizes that were read; Unfit: none will do.

    Large primes tell sizes apart in products and sums as symbols do, and a run on them takes a sixth of the time. What
    dynamo found to hold of the symbols has to hold of the primes, so that no size takes another way than was read. Code
    that computes with sizes in other ways is refused: S // 10^6 is 0 for a prime, and one less than it is a number.
    """
    env, code = graph.fake.shape_env, graph.module.code
    read = [n.node for _, value in graph.inputs.values()
            for n in (value.shape if isinstance(value, Tensor) else (value,)) if isinstance(n, torch.SymInt)]
    symbols = {n.expr: n.hint for n in read if n.expr.is_Symbol}     # asks for no guard, as int(n) would
    for node in graph.module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and value.node.expr.free_symbols \
                and node.op not in ("placeholder", "output") and node.target not in _EXACT:
            raise Unfit(f"it computes with its sizes: {node.target}")
    fixed = {n for _, v in graph.inputs.values() if isinstance(v, Tensor) for n in v.shape if type(n) is int}
    free = (p for p in _PRIMES if str(p) not in code and p not in fixed)
    primes = dict(zip(sorted(symbols, key=lambda s: (symbols[s], str(s))), free))
    if not all(n.expr.free_symbols <= primes.keys() for n in read) \
            or not all(p in env.var_to_range[s] for s, p in primes.items()) \
            or not all(env.replace(guard.expr).xreplace(primes) == sympy.true for guard in env.guards):
        raise Unfit("it asks more of its sizes than primes have")
    return primes


def _shows_its_gradient(target: Any) -> bool:
    """Is it a function of torch's or Python's that has the gradient of the operations that it runs? Others may have a
    backward of their own: torch.autograd.Function (dynamo's trampoline, or a higher-order operator), a library's."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target).startswith("aten.")
    home = getattr(target, "__module__", None) or "torch"
    return (home.partition(".")[0] in ("torch", "_operator", "builtins", "math")
            and target not in (setattr, torch.asarray)       # which detaches only what has a gradient: here nothing has
            and not isinstance(target, HigherOrderOperator) and not home.startswith("torch._dynamo")
            and "autograd" not in home)


_OPAQUE = {F.linear: linear, F.scaled_dot_product_attention: attention, expert_rows: expert_rows,
           experts_down: experts_down}
_EXACT = ("size", "numel", getattr, operator.getitem, operator.mul)
_PRIMES = tuple(map(sympy.Integer, (7907, 7919, 7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017)))


def prove(graph: Graph | None, template: Template, module: nn.Module, weights: dict[str, Tensor], x: Tensor,
          kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The settings of the template by which it is what the graph computes; Unfit where that is not proved. weights:
    by name, as the module read them. x, kwargs: what it was called with."""
    for name in ("linear", "scaled_dot_product_attention", "silu", "gelu", "softmax", "rms_norm", "embedding"):
        function = getattr(F, name)          # that forms are written with: else both sides would be wrong
        if isinstance(function, types.FunctionType) and function.__globals__ is not vars(F):
            raise Unfit(f"torch.nn.functional.{name} is not torch's own")
    if graph is None:
        raise Unfit("it gives something else than one tensor that it made")
    template = template.set_as(template.settings)        # what is found is put into one of its own
    named = {id(t): n for n, t in weights.items()} | {id(t): f"buffer {n}" for n, t in module.named_buffers()}
    for name, value in kwargs.items():
        several = isinstance(value, tuple | list)
        for i, t in enumerate(value if several else (value,)):
            if isinstance(t, Tensor):
                named[id(t)] = f"{name}[{i}]" if several else name
                if t.requires_grad:
                    raise Unfit(f"its argument {named[id(t)]} needs a gradient, which no template gives")
    proof = Proof(graph, named | {id(x): "input"})

    def theirs() -> Tensor:
        out = proof.run(*graph.real.values())
        if not isinstance(out, tuple | list) or len(out) != 1 or not isinstance(out[0], Tensor):
            raise Unfit("its forward gives something else than one tensor")
        if not torch.is_grad_enabled():
            raise Unfit("it leaves gradients off for what comes after it")
        return out[0]

    try:
        right = proof.numbers(theirs)
        proof.known, proof.values.made = len(proof.values.keys), set()
        ours = proof.numbers(lambda: proof.meaning(template, module, weights, x, kwargs))
        if ours != right:
            raise Unfit(proof.difference(ours, right))
    except Unfit:
        raise
    except Exception as error:               # whatever cannot be run on fake tensors is not proved
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise Unfit(f"its code cannot be followed: {text[:300]}") from error
    return template.settings
