"""The half of a decoder layer that is a mixture of experts: routers, experts, and what is around them.

    b = norm2(h)        y = h + r * norm2b(experts(b) + sigmoid(b ws') * shared(b))

A shared expert, the gate on it and the norms are there in some families. Kept between forward and backward are the
router's logits and choice, g|u of the routed rows and of the shared expert.

Letters: T tokens, k experts of each, R = T k rows, E experts, H hidden, I an expert's intermediate size.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import ops
from .parts import Half, Kept, Linears, Norm, Unfit, child, gated_linears, has, unwrapped
from .weights import Grads, Weights


class Routed(NamedTuple):
    """logits: [T, E] fp32, or the layer's type. index: [T, k] int64."""

    logits: Tensor
    index: Tensor


class Facts(NamedTuple):
    """What a proof finds of a router. wide: logits are computed in fp32. rounds: weights have the layer's type. factor:
    of weights. least: added to the sum that normalises."""

    sigmoid: bool = False
    normalised: bool = True
    wide: bool = True
    rounds: bool = False
    factor: float = 1.0
    least: float = 0.0


class Router:
    """Which k experts a token goes to, and with which weights.

        l = b Wr' + c       s = softmax(l) or sigmoid(l)       chosen: the k largest s + correction
        weight = f * s[chosen], divided by their sum where the router normalises

    Experts may stand in groups, of which the best few alone are chosen from (DeepSeek-V3): a group counts for the sum
    of its two largest. Which of these a module does, a proof finds.

    Attributes:
        forced: [T, k] experts to take instead of the router's choice. Set during a trial: two ways to the same
            logits differ by rounding, and one token in ten or so has a choice that rounding decides.
        groups, best: groups of experts, and from how many of them are chosen.
    """

    def __init__(self, layer: nn.Module, block: str, name: str) -> None:
        """block: the module that holds the router; name: the router in it."""
        router = child(layer, f"{block}.{name}")
        self.name, self.forced = f"{block}.{name}", None
        own = {n: p.shape for n, p in router.named_parameters()}
        self.top_k, self.experts = int(getattr(router, "top_k", 0)), int(getattr(router, "num_experts", 0))
        if "weight" not in own or own.get("bias", (self.experts,)) != (self.experts,) or not self.top_k or \
                own["weight"][0] != self.experts or set(own) - {"weight", "bias"} or self.top_k > self.experts:
            raise Unfit(f"{self.name} is no router with one row of weights for each expert")
        groups, best = (int(getattr(router, name, None) or 1) for name in ("num_group", "topk_group"))
        grouped = self.experts % groups == 0 and self.experts >= 2 * groups
        self.groups, self.best = (groups, best) if grouped else (1, 1)
        self.weight, self.bias = f"{self.name}.weight", f"{self.name}.bias" if "bias" in own else None
        self.names = {f"{self.name}.{n}" for n in own}
        self.correction = next((f"{block}.{n}" for n, b in child(layer, block).named_buffers()
                                if b.shape == (self.experts,)), None)
        self.facts = Facts()                 # until a proof finds them

    def forward(self, b: Tensor, w: Weights, correction: Tensor | None) -> Routed:
        """b: [T, H]."""
        bias, kind = w[self.bias] if self.bias else None, self._type(b)
        logits = nn.functional.linear(b.to(kind), w[self.weight].to(kind), None if bias is None else bias.to(kind))
        return Routed(logits, self.forced if self.forced is not None else self._choice(logits, correction))

    def _type(self, b: Tensor) -> torch.dtype:
        """That logits are computed in."""
        return torch.promote_types(b.dtype, torch.float32) if self.facts.wide else b.dtype

    def _choice(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        if not self.facts.sigmoid:               # the largest, whatever buffer or groups the module has for others
            return torch.topk(logits, self.top_k, -1).indices
        scores, grouped = logits, self.best < self.groups
        if correction is not None or grouped:
            scores = self._scores(logits) if correction is None else self._scores(logits) + correction
        if grouped:                              # experts of other groups have -inf
            each = scores.unflatten(1, (self.groups, -1))
            best = each.topk(2, dim=-1).values.sum(-1).topk(self.best, dim=-1).indices
            chosen = torch.zeros(each.shape[:2], dtype=torch.bool, device=each.device).scatter_(1, best, True)
            scores = each.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
        return torch.topk(scores, self.top_k, -1).indices

    def _scores(self, logits: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.sigmoid(wide) if self.facts.sigmoid else torch.softmax(wide, -1)

    def weights(self, r: Routed, dtype: torch.dtype) -> Tensor:
        """[T, k] fp32, of numbers of the layer's type where the router rounds to that."""
        w = self._weights(r.logits, r.index)
        return w.to(dtype).to(w.dtype) if self.facts.rounds else w

    @staticmethod
    def _softmax(logits: Tensor, index: Tensor) -> Tensor:
        return torch.softmax(logits.gather(1, index), -1, torch.promote_types(logits.dtype, torch.float32))

    def _weights(self, logits: Tensor, index: Tensor) -> Tensor:
        facts = self.facts
        if facts.normalised and not facts.sigmoid:           # the sum over all experts cancels
            return self._softmax(logits, index) * facts.factor
        chosen = self._scores(logits).gather(1, index)
        return facts.factor * (chosen / (chosen.sum(-1, keepdim=True) + facts.least) if facts.normalised else chosen)

    def backward(self, dweights: Tensor, r: Routed, b: Tensor, grads: Grads) -> Tensor:
        """db [T, H] from dweights [T, k] fp32; the choice has no gradient."""
        w, kind = grads.w, self._type(b)
        if self.facts.normalised and not self.facts.sigmoid:     # autograd's own steps, in a fifth of its host time
            chosen = self._softmax(r.logits, r.index)
            dchosen = torch._softmax_backward_data(dweights * self.facts.factor, chosen, -1, chosen.dtype)
            dlogits = spread_out(dchosen, r)
        else:
            logits = r.logits.detach().requires_grad_()
            with torch.enable_grad():
                (dlogits,) = torch.autograd.grad(self._weights(logits, r.index), logits, dweights)
        dlogits, wide = dlogits.to(kind), b.to(kind)
        if self.weight in grads.wanted:
            grads[self.weight] = torch.mm(dlogits.t(), wide).to(w[self.weight].dtype)
        if self.bias in grads.wanted:
            grads[self.bias] = dlogits.sum(0).to(w[self.bias].dtype)
        return torch.mm(dlogits, w[self.weight].to(kind)).to(b.dtype)


def spread_out(d: Tensor, r: Routed) -> Tensor:
    """[T, k] to where they came from in [T, E]: no two to one place."""
    return torch.zeros(r.logits.shape, dtype=d.dtype, device=d.device).scatter_(1, r.index, d)


class Rows(NamedTuple):
    """Where the rows are. Sorted row r is choice order[r] of token token[r], of T k choices; choice c is row place[c].

    offsets: [E] int32, the ends of the experts' rows. expert: [R], of each sorted row. experts: whose rows they are; of
    some of the experts `place` is None, and `span` says which of all rows they are.
    """

    token: Tensor
    order: Tensor
    place: Tensor | None
    offsets: Tensor
    expert: Tensor
    experts: range
    span: slice = slice(None)

    def of(self, x: Tensor) -> Tensor:
        """x [T, n] by sorted rows: [R, n]."""
        return ops.sum_rows(x, self.token, self.token.shape[0])

    def parts(self, groups: list[range]) -> list[Rows]:
        """The rows of these experts, in order; those that no token chose have none. The host waits for the choice
        where there are several groups."""
        if len(groups) == 1:
            return [self]
        ends, found = [0, *self.offsets.tolist()], []
        for experts in groups:
            first, last = ends[experts.start], ends[experts.stop]
            if last > first:
                span, offsets = slice(first, last), self.offsets[experts.start:experts.stop] - first
                found.append(Rows(self.token[span], self.order[span], None, offsets, self.expert[span], experts, span))
        return found

    def put(self, whole: Tensor | None, part: Tensor, rows: int) -> Tensor:
        """part [R, n] in its place among all [rows, n], which are made by the first."""
        if len(part) == rows:
            return part
        whole = part.new_empty(rows, *part.shape[1:]) if whole is None else whole
        whole[self.span] = part
        return whole


def sort_rows(index: Tensor, experts: int) -> Rows:
    """index: [T, k] int64."""
    kind = torch.int16 if experts <= 32767 else torch.int64      # a radix sort passes once for every few bits
    expert, order = torch.sort(index.flatten().to(kind), stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    numbers = torch.arange(experts, device=index.device, dtype=kind)
    offsets = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    return Rows(order.div(index.shape[1], rounding_mode="floor"), order, place, offsets, expert, range(experts))


class Matrices:
    """The experts' matrices for one forward or backward, with what adapters add to them. Such a sum, and what was made
    of codes, is there until that of other experts of its stack is asked for.

    Attributes:
        factors: by the name of a stack A [E, r, K] and B [E, N, r], in the layer's type and in memory of their own,
            since what lies in a slot may move on. Zeros fill the rank up (Adapter.wide).
    """

    def __init__(self, experts: Experts, w: Weights, dtype: torch.dtype) -> None:
        self._of, self._w = experts, w
        self._made: dict[str, tuple[range, Tensor]] = {}
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, adapter in experts.adapters.items():
            count, r, wide = experts.count, adapter.rank, adapter.wide
            a, b = w[adapter.a].view(count, r, -1), w[adapter.b].view(-1, r, count).permute(2, 0, 1)
            of_a = a.new_zeros(count, wide, a.shape[2], dtype=dtype)
            of_b = b.new_zeros(count, b.shape[1], wide, dtype=dtype)
            of_a[:, :r], of_b[..., :r] = a, b
            self.factors[name] = of_a, of_b

    def of(self, name: str, experts: range) -> tuple[Tensor, Tensor]:
        """Factors of these experts."""
        a, b = self.factors[name]
        return a[experts.start:experts.stop], b[experts.start:experts.stop]

    def __call__(self, name: str, experts: range) -> Tensor:
        """[experts, K, N], of some that are there together."""
        e = self._of
        if name in self._made and self._made[name][0] == experts:
            found = self._made[name][1]
        else:
            self._made.pop(name, None)       # first: its memory is the next one's
            found, own = self._w.experts(name, experts)
            if name in self.factors:
                a, b = self.of(name, experts)
                left, right = (a.mT, b.mT) if e.transposed else (b, a)
                found = torch.baddbmm(found, left, right, alpha=e.adapters[name].scale, out=found if own else None)
            if own or name in self.factors:
                self._made[name] = experts, found
        return found if e.transposed else found.mT


class Experts:
    """Many small gated MLPs, each for the rows that a router sends it.

        g|u = x Wgu[e] + bgu[e]        out = (act(g) * u) Wd[e] + bd[e]        y[t] = sum over j of weight[t, j] * out

    Rows are sorted by expert, so that one product serves all, and a token's k rows are added in the order of its
    choice: no atomics, the same bits each time.

    LoRA of a stack, PEFT's `target_parameters`, adds to an expert's matrix W [N, K], of rows x [R, K] and y [R, N]:

        W + s B A        t = s x A'        u = s dy B        dA = u' x        dB = dy' t

    A [r, K] and B [N, r] are the expert's; PEFT has those of all in A [E r, K] and B [N, r E], an expert's columns r
    apart. The sum is made for products with it (`Matrices`), since its bytes are fewer than those of all rows of x, y
    and t. Its gradient, as large, is never made: products of each expert's rows with r give those of A and B.

    Attributes:
        modules: names of PEFT's modules around the one of the experts, from outside, and of that. adapters: by name of
            their stack. widths: K and N of each stack.
    """

    def __init__(self, layer: nn.Module, name: str, hidden: int) -> None:
        self.modules, added, more = unwrapped(layer, name, "ParamWrapper")      # one for each parameter with adapters
        self.adapters, outside, name = {}, name, self.modules[-1]
        for wrapper, adapter in added:       # of several PEFT adds the sum
            if self.adapters.setdefault(f"{name}.{wrapper.parameter_name}", adapter) is not adapter:
                raise Unfit(f"{outside} has several active adapters of {wrapper.parameter_name}")
        module = child(layer, name)
        own, biases = {n: tuple(p.shape) for n, p in module.named_parameters()}, ("gate_up_proj_bias", "down_proj_bias")
        gu, down = own.get("gate_up_proj", ()), own.get("down_proj", ())
        if len(gu) != 3 or len(down) != 3 or set(own) - {"gate_up_proj", "down_proj", *biases}:
            raise Unfit(f"{name} has no gate_up_proj and down_proj of three dimensions, or more than these")
        self.transposed = bool(getattr(module, "is_transposed", gu[2] != hidden))
        self.count, self.inter = down[0], down[1] if self.transposed else down[2]
        wanted = ((hidden, 2 * self.inter), (self.inter, hidden))
        if (gu[1:], down[1:]) != (wanted if self.transposed else tuple(s[::-1] for s in wanted)) or gu[0] != down[0]:
            raise Unfit(f"{name} has matrices of {gu} and {down}: not gated")
        if getattr(module, "_is_expert_parallel", False) or getattr(module, "has_post_expert_norm", False):
            raise Unfit(f"{name} are spread over devices, or have norms of their own")
        self.gu, self.down = f"{name}.gate_up_proj", f"{name}.down_proj"
        self.biases = tuple(f"{name}.{n}" for n in biases if n in own)
        if len(self.biases) == 1:
            raise Unfit(f"{name} has a bias in one place only")
        self.names = {self.gu, self.down, *self.biases, *more}
        self.widths = {self.gu: (hidden, 2 * self.inter), self.down: (self.inter, hidden)}
        sizes = {n: tuple(p.shape) for n, p in layer.named_parameters(remove_duplicate=False)}
        for stack, adapter in self.adapters.items():
            (fan_in, fan_out), ranks = self.widths.get(stack, (0, 0)), self.count * adapter.rank
            if (sizes[adapter.a], sizes[adapter.b]) != ((ranks, fan_in), (fan_out, ranks)):
                raise Unfit(f"{stack} has an adapter of {sizes[adapter.a]} and {sizes[adapter.b]}, not of each expert")
        self.act, self.interleaved = ops.SILU, False     # until a proof finds them

    def _gate_bias(self, rows: Rows, w: Weights) -> tuple[Tensor | None, Tensor | None]:
        return (w[self.biases[0]], rows.expert.int()) if self.biases else (None, None)

    def forward(self, b: Tensor, weights: Tensor, routed: Routed, rows: Rows, base: Tensor | None, factor: float,
                w: Weights, keeps: bool) -> tuple[Tensor, Tensor | None]:
        """base + factor * y [T, H] from b [T, H] and weights [T, k] fp32, and g|u [R, 2 I] where it is to be kept: in
        the experts' own order of columns and without their biases. Of some experts all is done before the next are
        there."""
        out, gu, matrix = None, None, Matrices(self, w, b.dtype)
        for part in rows.parts(w.groups(self.gu, self.count)):
            up = ops.grouped_gemm(part.of(b), matrix(self.gu, part.experts), part.offsets)
            act = ops.expert_glu(up, self.act, self.interleaved, *self._gate_bias(part, w))
            gu = part.put(gu, up, len(rows.token)) if keeps else None
            del up
            out = part.put(out, ops.grouped_gemm(act, matrix(self.down, part.experts), part.offsets), len(rows.token))
            del act
        del matrix
        if self.biases:                                  # the sum of weights * bias is one product
            spread, bias = spread_out(weights, routed).to(out.dtype), w[self.biases[1]]
            base = factor * torch.mm(spread, bias) if base is None else torch.addmm(base, spread, bias, alpha=factor)
        return ops.sum_rows(out, rows.place, weights.shape[0], weights.flatten(), base, factor), gu

    def backward(self, dy: Tensor, b: Tensor, gu: Tensor | None, weights: Tensor, routed: Routed, rows: Rows,
                 base: Tensor | None, grads: Grads) -> tuple[Tensor, Tensor]:
        """base + db [T, H], and dweights [T, k] fp32, from dy [T, H]. Overwrites gu; None: it is made again.

        What an expert gives is not made again: its product with dy is that of dy Wd' with what Wd reads. Rows wait in
        memory as inputs' gradients alone: of some experts all else is done before the next are there.
        """
        w, count, dx, dweights = grads.w, len(rows.token), None, None
        matrix, by_row = Matrices(self, w, b.dtype), weights.flatten()[rows.order]
        for part in rows.parts(w.groups(self.gu, self.count)):
            x = part.of(b) if gu is None else None
            up = gu[part.span] if x is None else ops.grouped_gemm(x, matrix(self.gu, part.experts), part.offsets)
            if len(part.token) < count or not self._learns(self.gu, grads):
                x = None                     # of some, rows are gathered again below, where fewer others are there
            dys = part.of(dy)
            act = ops.grouped_gemm_dgrad(dys, matrix(self.down, part.experts), part.offsets)    # for a weight of 1
            bias = self._gate_bias(part, w)
            dweight = ops.expert_glu_backward(act, up, self.act, self.interleaved, *bias, by_row[part.span])
            dweights = part.put(dweights, dweight, count)
            if self._learns(self.down, grads):
                self._stack_grads(self.down, part, act, dys, matrix, grads)
            del act, dys
            if self._learns(self.gu, grads):
                self._stack_grads(self.gu, part, part.of(b) if x is None else x, up, matrix, grads)
            if self.biases and self.biases[0] in grads.wanted:  # each expert's sum, as a product with eight (the
                ones = up.new_ones(up.shape[0], 8)       # kernel's least) rows of ones
                sums = ops.grouped_gemm_wgrad(ones, up, part.offsets)[:, 0]
                _all(self.biases[0], grads)[part.experts.start:part.experts.stop] = sums
            del x
            dx = part.put(dx, ops.grouped_gemm_dgrad(up, matrix(self.gu, part.experts), part.offsets), count)
            del up
        del matrix
        dweights = dweights[rows.place].view(weights.shape)
        if self.biases:
            dweights = dweights + torch.mm(dy, w[self.biases[1]].t()).gather(1, routed.index)
            if self.biases[1] in grads.wanted:
                grads[self.biases[1]] = torch.mm(spread_out(weights, routed).to(dy.dtype).t(), dy)
        return ops.sum_rows(dx, rows.place, b.shape[0], None, base), dweights

    def _learns(self, name: str, grads: Grads) -> bool:
        return not grads.wanted.isdisjoint((name, *self.adapters.get(name, ())[:2]))

    def _stack_grads(self, name: str, rows: Rows, x: Tensor, dy: Tensor, matrix: Matrices, grads: Grads) -> None:
        """Of a stack, where all experts are there together, and of its adapter's A and B, from what its products read,
        x [R, K], and their gradient, dy [R, N]."""
        if name in grads.wanted:
            grads[name] = ops.grouped_gemm_wgrad(*((x, dy) if self.transposed else (dy, x)), rows.offsets)
        if (adapter := self.adapters.get(name)) is None:
            return
        (a, b), r, of = matrix.of(name, rows.experts), adapter.rank, slice(rows.experts.start, rows.experts.stop)
        if adapter.b in grads.wanted:
            t = ops.grouped_gemm(x, a.mT, rows.offsets).mul_(adapter.scale)
            into = _all(adapter.b, grads).view(-1, r, self.count)[..., of]
            into.copy_(ops.grouped_gemm_wgrad(dy, t, rows.offsets)[..., :r].permute(1, 2, 0))
        if adapter.a in grads.wanted:
            u = ops.grouped_gemm(dy, b, rows.offsets).mul_(adapter.scale)
            into = _all(adapter.a, grads).view(self.count, r, -1)[of]
            into.copy_(ops.grouped_gemm_wgrad(u, x, rows.offsets)[:, :r])


def _all(name: str, grads: Grads) -> Tensor:
    """The gradient of all experts' own in one tensor: zeros where nobody has written."""
    if name not in grads:
        grads[name] = grads.w[name].new_zeros(grads.w[name].shape)
    return grads[name]


# ---- the half --------------------------------------------------------------------------------------

class Shared:
    """An expert that all tokens go to, with or without a gate of one number for each token."""

    def __init__(self, layer: nn.Module, name: str, gate: str) -> None:
        self.gu, self.down = gated_linears(layer, name)
        self.act = ops.SILU                  # until a proof finds it
        self.gate = Linears(layer, gate) if has(layer, gate) else None
        if self.down.biases or (self.gate and self.gate.biases):
            raise Unfit("its shared expert has biases")
        self.linears = (self.gu, self.down, self.gate) if self.gate else (self.gu, self.down)

    def forward_onto(self, base: Tensor | None, b: Tensor, gu: Tensor, factor: float, w: Weights) -> Tensor:
        """base + factor * gate * expert(b) [T, H]; gu as gu.forward(b) gave it."""
        act = ops.glu(*gu.chunk(2, 1), self.act)
        if self.gate:
            act *= torch.sigmoid(self.gate.forward(b, w))
        return self.down.forward(act, w) if base is None else self.down.forward_onto(base, act, w, factor)

    def backward(self, dy: Tensor, b: Tensor, gu: Tensor, grads: Grads) -> Tensor:
        """db [T, H] from dy [T, H]. Overwrites gu."""
        act = self.down.input_grad(dy, grads)
        s = torch.sigmoid(self.gate.forward(b, grads.w)) if self.gate else None          # [T, 1], the layer's type
        # The op takes [T] fp32, or fp64 of fp64.
        numbers = None if s is None else s.flatten().to(torch.promote_types(s.dtype, torch.float32))
        ds = ops.expert_glu_backward(act, gu, self.act, weights=numbers)
        self.down.weight_grads(dy, act, grads)
        del act
        self.gu.weight_grads(gu, b, grads)
        db = self.gu.input_grad(gu, grads)
        if s is None:
            return db
        dlogit = (ds.unsqueeze(1) * s * (1 - s)).to(b.dtype)
        self.gate.weight_grads(dlogit, b, grads)
        if self.gate.beside:
            return db.add_(self.gate.input_grad(dlogit, grads))
        return db.addmm_(dlogit, grads.w.joint(self.gate.weights))


class SparseMLP(Half):
    """A mixture of experts, with the norms around it; `decoder.GatedMLP` has the same functions."""

    def __init__(self, layer: nn.Module, name: str, norm_in: Norm | None, norm_out: Norm | None, factor: float) -> None:
        super().__init__(norm_in, norm_out, factor)
        block = child(layer, name)
        self.router = Router(layer, name, "gate" if has(block, "gate") else "router")
        self.hidden = dict(layer.named_parameters())[self.router.weight].shape[1]
        self.experts = Experts(layer, f"{name}.experts", self.hidden)
        if self.experts.count != self.router.experts:
            raise Unfit(f"its router knows {self.router.experts} experts of {self.experts.count}")
        if any("jitter" in n and v for m in block.modules() for n, v in vars(m).items()):
            raise Unfit("its router draws random numbers")
        shared = (f"{name}.shared_expert", f"{name}.shared_experts", "shared_mlp")
        self.shared = next((Shared(layer, n, f"{name}.shared_expert_gate") for n in shared if has(layer, n)), None)
        self.linears = self.shared.linears if self.shared else ()
        self.names = self.router.names | self.experts.names
        self.made = 2 * self.experts.inter * self.router.top_k + (2 * self.shared.down.inputs if self.shared else 0)
        self.few = 4 * (self.experts.count + len(self.norms)) + 8 * self.router.top_k    # the router's, and 1/rms
        self.work = self.router.top_k * (2 * self.experts.inter + 2 * self.hidden)
        self.open = [(self.router, "facts"), (self.experts, "act"), (self.experts, "interleaved"),
                     *([(self.shared, "act")] if self.shared else [])]

    def forward(self, h: Tensor, w: Weights, correction: Tensor | None, k: Kept, whole: bool = True) -> Tensor:
        """y [T, H] from h [T, H]. Writes what backward wants into k. Experts' rows go at once, whole or not."""
        b = self.normed(h, w, k)
        k.routed = self.router.forward(b, w, correction)
        return self._finish(h, b, sort_rows(k.routed.index, self.experts.count), w, k, whole)

    def _finish(self, h: Tensor, b: Tensor, rows: Rows, w: Weights, k: Kept, keeps: bool) -> Tensor:
        """keeps: g|u of the routed rows; that of the shared expert is kept in any case."""
        base, factor = (None, 1.0) if self.norm_out else (h, self.factor)
        if self.shared:
            k.shared_gu = self.shared.gu.forward(b, w)
            base = self.shared.forward_onto(base, b, k.shared_gu, factor, w)
        weights = self.router.weights(k.routed, h.dtype)
        y, k.gu = self.experts.forward(b, weights, k.routed, rows, base, factor, w, keeps)
        return self.added_normed(h, y, w, k) if self.norm_out else y

    def backward(self, dy: Tensor, h: Tensor, correction: Tensor | None, k: Kept, grads: Grads) -> Tensor:
        """dh [T, H] from dy [T, H]. Uses up what was kept, and writes into it."""
        # Made again: what the experts read, and what was not kept, their outputs only where norm_out reads them. Their
        # g|u is made where it is used.
        w, b = grads.w, self.normed(h, grads.w, k)
        if k.routed is None:
            k.routed = self.router.forward(b, w, correction)
        rows = sort_rows(k.routed.index, self.experts.count)
        if self.norm_out and k.last is None:
            self._finish(h, b, rows, w, k, keeps=True)
        elif self.shared and k.shared_gu is None:
            k.shared_gu = self.shared.gu.forward(b, w)
        dd = self.output_grad(dy, k, grads)
        base = self.shared.backward(dd, b, k.shared_gu, grads) if self.shared else None
        k.shared_gu = None
        weights = self.router.weights(k.routed, h.dtype)
        db, dweights = self.experts.backward(dd, b, k.gu, weights, k.routed, rows, base, grads)
        k.gu = None
        db += self.router.backward(dweights, k.routed, b, grads)
        if self.norm_in is None:
            return db.add_(dy)
        return self.norm_in.backward(db, h, k.rstd, grads, add=dy)[0]
