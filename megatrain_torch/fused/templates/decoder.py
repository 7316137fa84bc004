"""Templates: decoder layers of the Llama family, attention with rotary embeddings, then a gated MLP; and of single
modules an embedding and a norm that stands alone.

    a = norm1(x)          qkv = a Wqkv        q, k = rope(norm(q), norm(k))
    o = attention Wo      h = x + r * norm1b(o)
    b = norm2(h)          g|u = b Wgu         y = h + r * norm2b((act(g) * u) Wd)

Each norm may be missing: Llama has norm1 and norm2, OLMo 2 the two after, Gemma 2, 3 and GLM 4 all four; q and k have
norms of their own in Qwen 3, Gemma 3 and OLMo 2; Granite has r. One class serves them, as data, in two halves
(attention_half.py, GatedMLP), for either of which there is another: attention by way of few numbers, mixtures of
experts (moe.py). Which is right for a module is found from its structure and then proved (proof/).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...base.modes import KEEPS, LINKED
from ...graph.hf_calls import example, sight_of
from .attention import LONG, NEVER, ROWS
from .attention_half import Call, LatentAttention, SelfAttention
from .moe import SparseMLP
from .parts import Half, Kept, Norm, Sizes, Template, Unfit, codings_of, gated_linears, has, role
from .weights import Grads, Sums, Weights, fits, glu_grads

TILE_BYTES = 1 << 30         # of gate|up that is not kept: products of this many rows are as fast as larger ones
LEAST_ROWS = 256             # of a tile, and its rows are a multiple of them
# t [T, H] as [B, S, H], and no view: autograd lets nobody change a node's output in place if it is one.
unflattened = torch.ops.aten._unsafe_view


class Decoder(Template):
    """The template of one structure: an attention half and an MLP half."""

    swaps = True

    def __init__(self, layer: nn.Module) -> None:
        # The four places of a norm: before and after each half. What a name means depends on its neighbours.
        if has(layer, "pre_feedforward_layernorm"):          # Gemma 2
            places = ["post_attention_layernorm"], ["pre_feedforward_layernorm"]
        elif has(layer, "post_self_attn_layernorm"):         # GLM 4
            places = ["post_self_attn_layernorm"], ["post_attention_layernorm"]
        elif has(layer, "input_layernorm"):
            places = [], ["post_attention_layernorm"]
        else:                                                # OLMo 2
            places = ["post_attention_layernorm"], []
        before, after, before_mlp, after_mlp = (
            next((Norm(layer, n) for n in names if has(layer, n)), None)
            for names in (["input_layernorm"], *places, ["post_feedforward_layernorm", "post_mlp_layernorm"]))
        factor = float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))
        mixes = LatentAttention if has(layer, "self_attn.kv_b_proj") else SelfAttention
        self.attention = mixes(layer, before, after, factor)
        block = next((n for n in ("mlp", "block_sparse_moe") if has(layer, n)), "mlp")
        self.routes = has(layer, f"{block}.experts")
        self.mlp = (SparseMLP if self.routes else GatedMLP)(layer, block, before_mlp, after_mlp, factor)
        self.norms = self.attention.norms + self.mlp.norms
        self.linears = *self.attention.linears, *self.mlp.linears
        self.open = [(self.attention, "rotary"), *self.mlp.open, *((n, "style") for n in self.norms)]
        self.codings, self.config = codings_of(layer), self.attention.config
        self.rounds = any(c.rounds for c in self.codings.values())
        self.coded = (not self.codings and not any(one.beside for one in self.linears)
                      and any(fits((sum(one.rows), one.inputs), torch.bfloat16) for one in self.linears))
        known = {*self.attention.names, *self.mlp.names, *(n.weight for n in self.norms),
                 *(n for one in self.linears for n in one.names)}
        first: dict[int, str] = {}
        for name, p in layer.named_parameters(remove_duplicate=False):
            if name not in known:
                raise Unfit(f"it has a parameter that the template does not know: {name}")
            if first.setdefault(id(p), name) != name:
                raise Unfit(f"{first[id(p)]} and {name} are one parameter")
        for name, m in layer.named_modules():
            if isinstance(m, nn.Dropout) and m.p > 0:
                raise Unfit(f"{name} drops out")
        self.check = self.attention.check

    def take(self, layer: nn.Module, x: Tensor, kwargs: Any, roles: Any = None) -> tuple[Tensor, Call]:
        """x [B, S, H], dense in H, and the rest of a call; Unfit where that has something that the template does not
        cover. roles: by role, which argument has it, where that is known."""
        x = x if x.stride(2) == 1 else x.contiguous()        # patches of images come transposed
        call = self.attention.call(layer, kwargs, roles, x)
        if self.routes and (name := self.mlp.router.correction):
            call.correction = layer.get_buffer(name).clone()     # it moves before backward, which may choose again
        return x, call

    def small(self, x: Tensor, rng: torch.Generator, n: int, kwargs: Any, last: bool) -> tuple[Tensor, Any]:
        """A random x [1, n, H], and what else the call has, cut to its first tokens or its last. The latter are said to
        be at the last positions that the model can have."""
        n = min(n, tokens := x.shape[1])
        cut = slice(tokens - n, None) if last else slice(n)
        x = torch.randn(1, n, x.shape[2], generator=rng, device=x.device).to(x.dtype)
        rest = {}
        for name, value in kwargs.items():
            what, sight = role(value), sight_of(value)
            if what == "angles":
                value = tuple(t[:1, cut] for t in value)
            elif what == "mask":
                value = sighted(value[:1, :, cut, cut]) if sight is None else example(sight, n)
            elif isinstance(value, Tensor) and value.dim() in (1, 2) and value.shape[-1] == tokens:      # positions
                value = value[..., cut][:1 if value.dim() == 2 else None]
                if last and not value.is_floating_point():
                    value = value + (self.attention.positions - 1 - value.max()).clamp(min=0)
            rest[name] = None if what == "cache" else value
        return x, rest

    def forward(self, x: Tensor, w: Weights, call: Call, keep: str) -> tuple[Tensor, Any]:
        """y [B, S, H] from x [B, S, H], and what backward wants of it beside x: attention's and the MLP's, or None."""
        a = Kept()
        m = Kept(self.attention.forward(x.reshape(-1, x.shape[-1]), x.shape[:2], w, call, a))
        y = unflattened(self.mlp.forward(m.x, w, call.correction, m, keep == "saved"), x.shape)
        if keep == "selective":
            a.q = a.kv = m.gu = m.shared_gu = None
        elif keep in ("attention", LINKED):
            a, m = Kept(out=a.out, extra=a.extra), Kept()
        return y, None if keep == "replay" else (a, m)

    def again(self, x: Tensor, out: Tensor, w: Weights, call: Call, keep: str) -> Tensor:
        """y [B, S, H] to the bits of forward, from x [B, S, H] and attention's output."""
        h = self.attention.after(x.reshape(-1, x.shape[-1]), w, Kept(out=out))
        return unflattened(self.mlp.forward(h, w, call.correction, Kept(), keep == "saved"), x.shape)

    def backward(self, dy: Tensor, x: Tensor, kept: Any, w: Weights, call: Call, wanted: Any) -> tuple[Tensor, Grads]:
        """dx [B, S, H], and gradients of the weights in `wanted`. Uses up what was kept, and writes into it."""
        grads, shape = Grads(w, wanted), dy.shape
        dy, x = dy.reshape(-1, shape[-1]), x.reshape(-1, shape[-1])
        a, m = kept or (Kept(), Kept())
        if m.x is None:
            m.x = self.attention.forward(x, shape[:2], w, call, a)
        dh = self.mlp.backward(dy, m.x, call.correction, m, grads)
        # What the MLP kept makes room before attention makes its own.
        m.x = m.rstd = m.last = m.rstd_out = m.routed = m.gu = m.shared_gu = None
        return unflattened(self.attention.backward(dh, x, shape[:2], call, a, grads), shape), grads

    def sizes(self, item: int) -> Sizes:
        """item: bytes of an activation's element."""
        a, m, h = self.attention, self.mlp, self.attention.hidden
        few = a.o.inputs * item + 4 * a.hq               # attention's output and log-sum-exp
        most, saved = (a.kept_bytes(k, item) + h * item + m.kept_bytes(k, item) for k in ("selective", "saved"))
        kept = ("replay", 0), ("attention", few), ("selective", most), ("saved", saved), ("linked", few)
        joint = [one.numel * item for one in self.linears if any(n in self.codings for n in one.weights)]
        tiled, experts, long, made, expanded = (0, 0, 0), (0, 0, 0), (0, 0, NEVER), 0, 0
        if self.routes:                      # of all rows only inputs' gradients are there at once, [R, H]
            e = m.experts
            stacks = {n: e.count * fan_in * fan_out * item for n, (fan_in, fan_out) in e.widths.items()}
            # What is made of codes or with adapters is there together, and so are adapters in the layer's type, those
            # of all experts. To add one's product to a matrix reads and writes that twice.
            made = sum(size for n, size in stacks.items() if n in self.codings or n in e.adapters)
            experts = e.count, made, m.router.top_k * (4 * e.inter + h) * item
            made += sum(e.count * adapter.wide * sum(e.widths[n]) * item for n, adapter in e.adapters.items())
            expanded = sum(size * (3 if n in e.adapters else n in self.codings) for n, size in stacks.items())
        else:
            tiled = 3 * m.down.inputs * item, m.tile(item), 4 * (m.gu.numel + m.down.numel)
        if tiled[0] and item == 2 and a.walks:
            # A single row (attention.by_rows) is spared the gradients of qkv, of attention's output and of what qkv is
            # made from; dx has dh's place. There instead: keys and values copied, their gradients of a block, and sums;
            # h is gone by then, and a tile's gate|up.
            q, qkv, used = a.o.inputs, sum(a.first.rows), a.first.numel + a.o.numel
            instead = (qkv - q) * (2 * item + 4) + (q + (qkv - q) // 2) * item * bool(a.q_norm)
            besides = ROWS * (3 * qkv + 6 * h) * item + 4 * used - (tiled[0] * tiled[1] + tiled[2])
            long = (qkv + 3 * h) * item - max(0, instead - h * item), max(0, besides), LONG
        # Backward needs a layer made again, and its gradients in flight.
        return Sizes(h * item, kept, saved + (m.work + a.work + 4 * h) * item, tiled,
                     (a.copied[0] * item, a.copied[1]), long, (max(joint, default=0) + made, sum(joint) + expanded),
                     experts, cached=a.cached * item if getattr(self.config, "use_cache", False) else 0)


def sighted(mask: Tensor) -> Tensor:
    """[1, h, n, n]: rows that see nothing see themselves: what a kernel gives for none is no measure."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    blind = ~seen.any(-1, keepdim=True) & torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    return mask | blind if mask.dtype == torch.bool else mask.masked_fill(blind, 0)


class GatedMLP(Half):
    """The half that works on each token. H hidden, I intermediate."""

    def __init__(self, layer: nn.Module, name: str, norm_in: Norm | None, norm_out: Norm | None, factor: float) -> None:
        super().__init__(norm_in, norm_out, factor)
        self.gu, self.down = self.linears = gated_linears(layer, name)
        self.act = ops.SILU                  # until a proof finds it
        self.open = [(self, "act")]
        self.hidden, self.work = self.down.rows[0], self.down.inputs
        self.made, self.few = 2 * self.down.inputs, 4 * len(self.norms)

    def tile(self, item: int) -> int:
        """Rows of which gate|up exists at a time, where it is not kept."""
        return max(1, TILE_BYTES // (2 * self.down.inputs * item * LEAST_ROWS)) * LEAST_ROWS

    def _tiles(self, h: Tensor, k: Kept) -> Iterator[tuple[slice, Kept]]:
        step = self.tile(h.element_size())
        for first in range(0, len(h), step):
            yield (rows := slice(first, first + step)), k.part(rows)

    def forward(self, h: Tensor, w: Weights, correction: None, k: Kept, whole: bool = True) -> Tensor:
        """y [T, H] from h [T, H]. Writes what backward wants into k. whole: gate|up is to be kept; else many rows go
        through it in tiles."""
        if whole or len(h) <= self.tile(h.element_size()):
            return self._forward(h, w, k)
        y, parts = torch.empty_like(h), []
        for rows, part in self._tiles(h, k):
            y[rows] = self._forward(h[rows], w, part)
            part.gu = None
            parts.append(part)
        for name in ("rstd", "last", "rstd_out"):
            if getattr(parts[0], name) is not None:
                setattr(k, name, torch.cat([getattr(part, name) for part in parts]))
        return y

    def _forward(self, h: Tensor, w: Weights, k: Kept) -> Tensor:
        k.gu = self.gu.forward(self.normed(h, w, k, self.gu), w)
        return self.added(h, self.down, w.gated(self.down.weights, k.gu, self.act), w, k)

    def backward(self, dy: Tensor, h: Tensor, correction: None, k: Kept, grads: Grads) -> Tensor:
        """dh [T, H] from dy [T, H]. Uses up what was kept, and writes into it."""
        if k.gu is not None or len(h) <= self.tile(h.element_size()):
            return self._backward(dy, h, k, grads)
        dh, sums = torch.empty_like(h), Sums(grads)
        for rows, part in self._tiles(h, k):
            dh[rows] = self._backward(dy[rows], h[rows], part, sums)
        sums.finish()
        return dh

    def _backward(self, dy: Tensor, h: Tensor, k: Kept, grads: Grads) -> Tensor:
        w, b = grads.w, None
        if k.gu is None:                     # made again, but for the last product where nothing needs its output
            b = self.normed(h, w, k)
            k.gu = self.gu.forward(b, w)
            if self.norm_out and k.last is None:
                self.added(h, self.down, w.gated(self.down.weights, k.gu, self.act), w, k)
        dd = self.output_grad(dy, k, grads)
        dact = self.down.input_grad(dd, grads)
        if grads.wanted.isdisjoint(self.gu.biases):      # nothing but the products reads these: codes alone will do
            dgu, act = w.gated_grads(self.gu.weights, self.down.weights, dact, k.gu, self.act,
                                     None if self.norm_in else h)
        else:
            dgu, act = glu_grads(dact, k.gu, self.act)
        del dact
        k.gu = None
        self.down.weight_grads(dd, act, grads)
        del act, dd
        return self.input_grad(self.gu, dgu, dy, h, k, grads, b)


# ---- single modules: what they keep never leaves the device ----------------------------------------------

class Embedding(Template):
    """Rows of a table by number: ids [...] int64 -> [..., H]."""

    def __init__(self, module: nn.Module) -> None:
        if type(module) is not nn.Embedding:
            raise Unfit(f"it is a {type(module).__name__}, no plain nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise Unfit("its embedding has max_norm, scale_grad_by_freq or sparse gradients")
        self.rows, self.padding, self.width = module.num_embeddings, module.padding_idx, module.embedding_dim

    def check_input(self, ids: Any, dtype: torch.dtype) -> None:
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            raise Unfit("called with something else than int64 numbers")

    def small(self, x: Tensor, rng: torch.Generator, n: int, kwargs: Any, last: bool) -> tuple[Tensor, Any]:
        return torch.randint(self.rows, (1, n), generator=rng, device=x.device), {}

    def forward(self, ids: Tensor, w: Weights, call: None, keep: str) -> tuple[Tensor, None]:
        return torch.nn.functional.embedding(ids, w["weight"]), None

    def backward(self, dy: Tensor, ids: Tensor, kept: None, w: Weights, call: None, wanted: Any) -> tuple[None, Grads]:
        grads, padding = Grads(w, wanted), -1 if self.padding is None else self.padding
        grads["weight"] = ops.embedding_backward(dy.reshape(-1, self.width), ids.reshape(-1), self.rows, padding)
        return None, grads

    def sizes(self, item: int) -> Sizes:
        return Sizes(8, tuple([(keep, 0) for keep in (*KEEPS, LINKED)]), 0)


class LoneNorm(Template):
    """The last RMSNorm of a model: x [..., H] -> [..., H]."""

    def __init__(self, module: nn.Module) -> None:
        self.norm = Norm(module, "")
        self.open = [(self.norm, "style")]

    def small(self, x: Tensor, rng: torch.Generator, n: int, kwargs: Any, last: bool) -> tuple[Tensor, Any]:
        return torch.randn(1, n, x.shape[-1], generator=rng, device=x.device).to(x.dtype), {}

    def forward(self, x: Tensor, w: Weights, call: None, keep: str) -> tuple[Tensor, Tensor]:
        return self.norm.forward(x, w)

    def backward(self, dy: Tensor, x: Tensor, kept: Any, w: Weights, call: None, wanted: Any) -> tuple[Tensor, Grads]:
        grads, rstd = Grads(w, wanted), self.norm.forward(x, w)[1] if kept is None else kept
        return self.norm.backward(dy, x, rstd, grads)[0], grads

    def sizes(self, item: int) -> Sizes:
        row = self.norm.size * item
        return Sizes(row, tuple([(keep, 4) for keep in (*KEEPS, LINKED)]), 2 * row)
