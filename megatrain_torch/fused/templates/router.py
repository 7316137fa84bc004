"""Routers of mixture-of-experts layers: which k experts a token goes to, and with which weights.

    l = b Wr' + c       s = softmax(l) or sigmoid(l)       chosen: the k largest s + correction
    weight = f * s[chosen], divided by their sum where the router normalises

Experts may stand in groups, of which the best few alone are chosen from (DeepSeek-V3): a group counts for the sum of
its two largest. Which of these a module does is found by trying a copy of it with random weights. Letters: T tokens,
E experts.
"""
from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .parts import Grads, Unfit, Weights, child

TOKENS = 64              # that a copy is tried on


@dataclass
class Routed:
    """logits: [T, E] fp32, or the layer's type. index: [T, k] int64."""

    logits: Tensor
    index: Tensor


class Router:
    """
    Attributes:
        forced: [T, k] experts to take instead of the router's choice. Set during a trial: two ways to the same
            logits differ by rounding, and one token in ten or so has a choice that rounding decides.
        groups, best: groups of experts, and from how many of them are chosen.
    """

    def __init__(self, layer: nn.Module, block: str, name: str) -> None:
        """block: the module that holds the router; name: the router in it.

        Raises:
            Unfit: it routes in another way.
        """
        router = child(layer, f"{block}.{name}")
        self.name, self.forced = f"{block}.{name}", None
        self.least = 0.0                     # added to the sum that normalises; a proof finds it
        own = {n: p.shape for n, p in router.named_parameters()}
        self.top_k, self.experts = int(getattr(router, "top_k", 0)), int(getattr(router, "num_experts", 0))
        if "weight" not in own or own.get("bias", (self.experts,)) != (self.experts,) or not self.top_k or \
                own["weight"][0] != self.experts or set(own) - {"weight", "bias"} or self.top_k > self.experts:
            raise Unfit(f"{self.name} is no router with one row of weights for each expert")
        self.groups, self.best = _groups_of(router, self.experts)
        self.weight, self.bias = f"{self.name}.weight", f"{self.name}.bias" if "bias" in own else None
        self.names = {self.weight} | ({self.bias} if self.bias else set())
        self.correction = next((f"{block}.{n}" for n, b in child(layer, block).named_buffers()
                                if b.shape == (self.experts,)), None)
        self._find(router)

    def _find(self, router: nn.Module) -> None:
        """Of routers alike, one is tried."""
        key = _alike(router, self.top_k, self.correction is not None)
        if key not in _KNOWN:
            self._try(router)
            if key is not None:
                _KNOWN[key] = self.wide, self.rounds, self.sigmoid, self.normalised, self.factor
            return
        self.wide, self.rounds, self.sigmoid, self.normalised, self.factor = _KNOWN[key]

    def _try(self, router: nn.Module) -> None:
        twin = _Twin(router, self.top_k, self.correction is not None)
        self.wide, self.rounds = twin.wide, twin.rounds
        for self.sigmoid, self.normalised in product((False, True), (True, False)):
            self.factor = 1.0
            ours = self._weights(twin.logits, twin.index)
            self.factor = float((twin.weights / ours).median())
            if torch.allclose(ours * self.factor, twin.weights, rtol=1e-4, atol=1e-6) and \
                    torch.equal(self._choice(twin.logits, twin.correction).sort()[0], twin.index.sort()[0]):
                return
        raise Unfit(f"{self.name} ({type(router).__name__}) is none of the known routers")

    def correction_of(self, layer: nn.Module) -> Tensor | None:
        """[E] added to scores for the choice alone: a copy, since it is moved between forward and backward, which may
        choose again."""
        return layer.get_buffer(self.correction).clone() if self.correction else None

    # ---- forward ----

    def forward(self, b: Tensor, w: Weights, correction: Tensor | None) -> Routed:
        """b: [T, H]."""
        bias = w[self.bias] if self.bias else None
        kind = self._type(b)
        logits = nn.functional.linear(b.to(kind), w[self.weight].to(kind), None if bias is None else bias.to(kind))
        index = self.forced if self.forced is not None else self._choice(logits, correction)
        return Routed(logits, index)

    def _type(self, b: Tensor) -> torch.dtype:
        """That logits are computed in."""
        return torch.promote_types(b.dtype, torch.float32) if self.wide else b.dtype

    def _choice(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        if self.best < self.groups:
            scores = of_best_groups(self._corrected(logits, correction), self.groups, self.best)
        else:
            scores = logits if correction is None else self._corrected(logits, correction)
        return torch.topk(scores, self.top_k, -1).indices

    def _corrected(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        scores = self._scores(logits)
        return scores if correction is None else scores + correction

    def _scores(self, logits: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.sigmoid(wide) if self.sigmoid else torch.softmax(wide, -1)

    def weights(self, r: Routed, dtype: torch.dtype) -> Tensor:
        """[T, k] fp32, of numbers of the layer's type where the router rounds to that."""
        found = self._weights(r.logits, r.index)
        return found.to(dtype).to(found.dtype) if self.rounds else found

    def _weights(self, logits: Tensor, index: Tensor) -> Tensor:
        if self.normalised and not self.sigmoid:         # the sum over all experts cancels
            chosen = logits.gather(1, index)
            return torch.softmax(chosen, -1, torch.promote_types(chosen.dtype, torch.float32)) * self.factor
        chosen = self._scores(logits).gather(1, index)
        return self.factor * (chosen / (chosen.sum(-1, keepdim=True) + self.least) if self.normalised else chosen)

    # ---- backward ----

    def backward(self, dweights: Tensor, r: Routed, b: Tensor, w: Weights, grads: Grads) -> Tensor:
        """db [T, H] from dweights [T, k] fp32; the choice has no gradient."""
        dlogits = self._logits_grad(dweights * self.factor, r)
        kind = self._type(b)
        dlogits, wide = dlogits.to(kind), b.to(kind)
        if grads.wants(self.weight):
            grads[self.weight] = torch.mm(dlogits.t(), wide).to(w[self.weight].dtype)
        if self.bias and grads.wants(self.bias):
            grads[self.bias] = dlogits.sum(0).to(w[self.bias].dtype)
        return torch.mm(dlogits, w[self.weight].to(kind)).to(b.dtype)

    def _logits_grad(self, d: Tensor, r: Routed) -> Tensor:
        """[T, E] from the gradient of the weights before their factor, [T, k]."""
        if self.normalised and not self.sigmoid:
            p = torch.softmax(r.logits.gather(1, r.index), -1, d.dtype)
            return spread_out(p * (d - (p * d).sum(-1, keepdim=True)), r)
        scores = self._scores(r.logits)
        chosen = scores.gather(1, r.index)
        if self.normalised:
            total = chosen.sum(-1, keepdim=True) + self.least
            d = (d - (chosen * d).sum(-1, keepdim=True) / total) / total
        if self.sigmoid:
            return spread_out(d * chosen * (1 - chosen), r)
        return spread_out(d * chosen, r) - scores * (d * chosen).sum(-1, keepdim=True)


def of_best_groups(scores: Tensor, groups: int, best: int) -> Tensor:
    """[T, E]: -inf for experts of other groups."""
    each = scores.unflatten(1, (groups, -1))
    of_group = each.topk(2, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, of_group.topk(best, dim=-1).indices, True)
    return each.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)


def _groups_of(router: nn.Module, experts: int) -> tuple[int, int]:
    """As the module names them: how many groups, of which so many are chosen from."""
    groups, best = (int(getattr(router, name, None) or 1) for name in ("num_group", "topk_group"))
    return (groups, best) if experts % groups == 0 and experts >= 2 * groups else (1, 1)


def spread_out(d: Tensor, r: Routed) -> Tensor:
    """[T, k] to where they came from in [T, E]: no two to one place."""
    return torch.zeros(r.logits.shape, dtype=d.dtype, device=d.device).scatter_(1, r.index, d)


def _without_values(router: nn.Module) -> nn.Module:
    """A copy with parameters on the meta device: to read one would bring all of its layer to the host."""
    empty = {id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in router.parameters()}
    return copy.deepcopy(router, empty)


_KNOWN: dict[tuple[Any, ...], tuple[bool, bool, bool, bool, float]] = {}
_PLAIN = (int, float, str, type(None))
_INSIDE = set(vars(nn.Module()))             # torch's own attributes of any module


def _alike(router: nn.Module, top_k: int, corrected: bool) -> tuple[Any, ...] | None:
    """What is equal of routers that do the same; None where more than plain numbers may tell them apart."""
    own = {name: value for name, value in vars(router).items() if name not in _INSIDE}
    fresh = vars(nn.Module())
    changed = any(vars(router).get(name) != fresh[name] for name in _INSIDE - {"training", "_parameters", "_buffers"})
    if changed or not all(isinstance(value, _PLAIN) for value in own.values()):
        return None
    shapes = [(name, tuple(t.shape)) for name, t in (*router.named_parameters(), *router.named_buffers())]
    return type(router), type(router).forward, router.training, top_k, corrected, *shapes, *sorted(own.items())


class _Twin:
    """What a copy of a router gives for random numbers.

    Attributes:
        logits, weights, index: [T, E], [T, k], [T, k] in fp32. correction: [E].
        wide: logits are computed in fp32 of a 16-bit input. rounds: weights have the input's type.
    """

    def __init__(self, router: nn.Module, top_k: int, corrected: bool) -> None:
        rng = torch.Generator().manual_seed(0)
        twin = _without_values(router).to_empty(device="cpu").float()
        experts, hidden = twin.weight.shape
        if any(b.shape != (experts,) for b in twin.buffers()):
            raise Unfit(f"its router ({type(router).__name__}) has buffers that are no correction of scores")
        with torch.no_grad():
            for p in twin.parameters():
                p.copy_(torch.randn(p.shape, generator=rng) * hidden ** -0.5 * 2)
            self.correction = torch.randn(experts, generator=rng) * 0.1 if corrected else None
            for b in twin.buffers():
                b.copy_(self.correction)
            x = torch.randn(TOKENS, hidden, generator=rng)
            self.logits, self.weights, self.index = self._run(twin, x, top_k)
            logits, weights, _ = self._run(twin.bfloat16(), x.bfloat16(), top_k)
        self.wide = logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())
        self.rounds = weights.dtype == torch.bfloat16

    def _run(self, twin: nn.Module, x: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        try:
            out = twin(x) if self.correction is None or len(list(twin.buffers())) else twin(x, self.correction)
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unfit(f"its router ({type(twin).__name__}) takes something else than hidden states") from error
        if not isinstance(out, tuple) or len(out) != 3 or out[1].shape != (x.shape[0], top_k) \
                or out[2].shape != out[1].shape:
            raise Unfit(f"its router ({type(twin).__name__}) gives something else than logits, weights and experts")
        return out
