"""Decoder layers of the Llama family: attention with rotary embeddings, then a gated MLP.

    a = norm1(x)          qkv = a Wqkv        q, k = rope(norm(q), norm(k))
    o = attention Wo      h = x + r * norm1b(o)
    b = norm2(h)          g|u = b Wgu         y = h + r * norm2b((act(g) * u) Wd)

Each norm may be missing: Llama has norm1 and norm2, OLMo 2 the two after, Gemma 2, 3 and GLM 4 all four;
q and k have norms of their own in Qwen 3, Gemma 3 and OLMo 2; Granite has r. One class serves them, as
data, in two halves (self_attention.py, mlp.py), for either of which there is another: attention by way of few numbers
(latent_attention.py), mixtures of experts (moe.py). Which is right for a module is found from its structure and then
proved (proof/).
"""
from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...graph.hf_calls import example, sight_of
from .attention_half import Call, KeptAttention
from .coded import fits
from .latent_attention import LatentAttention
from .linears import codings_of
from .mlp import GatedMLP
from .moe import SparseMLP
from .parts import Grads, Norm, Unfit, Weights, dense, has, hidden_states, role, unflattened
from .rows import LONG, NEVER, ROWS
from .self_attention import SelfAttention


@dataclass
class Kept:
    """What lies between forward and backward; without h: to be made again, from x."""

    x: Tensor | None = None
    attention: KeptAttention = field(default_factory=KeptAttention)
    h: Tensor | None = None              # [T, H] between the halves
    mlp: Any = None                      # the MLP half's own


class Decoder:
    """The template of one structure: an attention half and an MLP half."""

    differentiable_input = True
    swaps, links = True, True            # what it keeps may wait in host memory; it can make its output again

    def __init__(self, layer: nn.Module) -> None:
        """Reads the structure of a layer.

        Raises:
            Unfit: it is not of this family.
        """
        norms = _norms_of(layer)
        factor = float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))
        mixes = LatentAttention if has(layer, "self_attn.kv_b_proj") else SelfAttention
        self.attention = mixes(layer, norms["1"], norms["1b"], factor)
        block = next((n for n in ("mlp", "block_sparse_moe") if has(layer, n)), "mlp")
        half = SparseMLP if has(layer, f"{block}.experts") else GatedMLP
        self.mlp = half(layer, block, norms["2"], norms["2b"], factor)
        self.norms = self.attention.norms + self.mlp.norms
        self.linears, self.routes = (*self.attention.linears, *self.mlp.linears), half is SparseMLP
        self.codings = codings_of(layer)
        self._all_known(layer)

    @property
    def coded(self) -> bool:
        """May its products, one at least, be of 8-bit codes (codes.py)?"""
        return (not self.codings and not any(one.adapters for one in self.linears)
                and any(fits((sum(one.rows), one.inputs), torch.bfloat16) for one in self.linears))

    def _all_known(self, layer: nn.Module) -> None:
        known = self.attention.names | self.mlp.names | {n.weight for n in self.norms}
        for name, _ in layer.named_parameters():
            if name not in known:
                raise Unfit(f"it has a parameter that the template does not know: {name}")
        for name, m in layer.named_modules():
            if isinstance(m, nn.Dropout) and m.p > 0:
                raise Unfit(f"{name} drops out")

    @property
    def settings(self) -> tuple[Any, ...]:
        """What a proof finds beside the structure: it differs from case to case, and with it the template."""
        return tuple(n.style for n in self.norms), self.attention.rotary, self.mlp.settings

    def set_as(self, settings: tuple[Any, ...]) -> Decoder:
        """A template of this structure with these settings."""
        config = self.attention.config
        found = copy.deepcopy(self, {id(config): config})
        styles, found.attention.rotary, found.mlp.settings = settings
        for norm, style in zip(found.norms, styles):
            norm.style = style
        return found

    def check(self) -> None:
        """Raises:
            Unfit: the module's configuration, as it is now, asks for what the template does not cover.
        """
        self.attention.check()

    def input(self, x: Any, dtype: torch.dtype) -> Tensor:
        """Raises:
            Unfit: x is none that the template covers.
        """
        return hidden_states(x, dtype)

    def take(self, layer: nn.Module, x: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Call]:
        """x [B, S, H] and the rest of a call.

        Raises:
            Unfit: there is something in it that the template does not cover.
        """
        x = dense(self.input(x, dtype))
        call = self.attention.call(layer, kwargs)
        self.attention.tell_of_cache(call, x)
        call.correction = self.mlp.correction_of(layer)
        return x, call

    def observed(self, layer: nn.Module) -> AbstractContextManager[None]:
        """Around a trial: where the template follows choices that the module's own code makes."""
        return self.mlp.observed(layer)

    def small(self, x: Tensor, rng: torch.Generator, n: int, kwargs: Any, last: bool) -> tuple[Tensor, Any]:
        """A random x [1, n, H], and what else the call has, cut to its first tokens or its last. The latter are said to
        be at the last positions that the model can have."""
        tokens = x.shape[1]
        n = min(n, tokens)
        cut = slice(tokens - n, None) if last else slice(n)
        x = torch.randn(1, n, x.shape[2], generator=rng, device=x.device).to(x.dtype)
        rest = {}
        for name, value in kwargs.items():
            what, sight = role(value), sight_of(value)
            if what == "angles":
                rest[name] = tuple(t[:1, cut] for t in value)
            elif what == "mask":
                rest[name] = sighted(value[:1, :, cut, cut]) if sight is None else example(sight, n)
            elif isinstance(value, Tensor) and value.dim() in (1, 2) and value.shape[-1] == tokens:      # positions
                rest[name] = value[..., cut][:1 if value.dim() == 2 else None]
                if last and not value.is_floating_point():
                    rest[name] = rest[name] + (self.attention.positions - 1 - rest[name].max()).clamp(min=0)
            else:
                rest[name] = None if what == "cache" else value
        return x, rest

    # ---- forward ----

    def forward(self, x: Tensor, w: Weights, call: Call, keep: str) -> tuple[Tensor, Kept]:
        """y [B, S, H] from x [B, S, H], and what backward wants of it."""
        k = Kept(x=x, mlp=self.mlp.nothing_kept())
        k.h = self.attention.forward(x.reshape(-1, x.shape[-1]), x.shape[:2], w, call, k.attention)
        y = self.mlp.forward(k.h, w, call.correction, k.mlp, keep == "saved")
        if keep == "selective":
            self.attention.trim(k.attention)
            self.mlp.trim(k.mlp)
        elif keep in ("attention", "linked"):
            output = KeptAttention(out=k.attention.out, extra=k.attention.extra)
            k = Kept(x=x if keep == "attention" else None, attention=output)
        return unflattened(y, x.shape), (Kept(x=x) if keep == "replay" else k)

    @staticmethod
    def made_from(k: Kept) -> Any:
        """What `again` wants of what was kept, the input left out; None: attention would have to run again."""
        return k.attention.out

    def again(self, x: Tensor, out: Tensor, w: Weights, call: Call, keep: str) -> Tensor:
        """y [B, S, H] to the bits of forward, from x [B, S, H] and attention's output."""
        h = self.attention.after(x.reshape(-1, x.shape[-1]), w, KeptAttention(out=out))
        return unflattened(self.mlp.forward(h, w, call.correction, self.mlp.nothing_kept(), keep == "saved"), x.shape)

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
        if k.h is None:
            k.h = self.attention.forward(x, shape[:2], w, call, k.attention)
        dh = self.mlp.backward(dy, k.h, w, call.correction, k.mlp or self.mlp.nothing_kept(), grads)
        k.h = k.mlp = None
        dx = self.attention.backward(dh, x, shape[:2], w, call, k.attention, grads, input_grad)
        return (unflattened(dx, shape) if input_grad else None), grads

    # ---- sizes ----

    def input_bytes(self, tokens: int, item: int) -> int:
        """Bytes of x, which is kept in any case."""
        return tokens * self.attention.hidden * item

    def kept_bytes(self, keep: str, tokens: int, item: int) -> int:
        """Bytes that lie between forward and backward, the layer's input left out: it is the last one's output.

        item: bytes of an activation's element.
        """
        if keep == "replay":
            return 0
        if keep in ("attention", "linked"):
            return tokens * self.attention.output_bytes(item)
        between = self.attention.hidden * item
        return tokens * (self.attention.kept_bytes(keep, item) + between + self.mlp.kept_bytes(keep, item))

    def work_bytes(self, tokens: int, item: int) -> int:
        """Bytes that backward needs at most beside what is kept: a layer made again, its gradients in flight."""
        columns = self.mlp.work_columns() + self.attention.work_columns() + 4 * self.attention.hidden
        each, most = self.copied(item)
        return self.kept_bytes("saved", tokens, item) + tokens * (columns * item + each * (tokens > most))

    def expanded(self, item: int) -> tuple[int, int]:
        """Bytes of weights that codes stand for: of most that are there at once, and of all."""
        joint = [sum(one.rows) * one.inputs * item for one in self.linears
                 if any(n in self.codings for n in one.weights)]
        kept = [c.shape.numel() * item for n, c in self.codings.items()
                if not any(n in one.weights for one in self.linears)]
        return max(joint, default=0) + sum(kept), sum(joint) + sum(kept)

    def experts(self, item: int) -> tuple[int, int, int]:
        """How many a mixture has; and what a part of them alone has at a time, where they are fetched in parts: bytes
        of weights made of codes, and bytes of a token."""
        return self.mlp.experts_of(item, self.codings) if isinstance(self.mlp, SparseMLP) else (0, 0, 0)

    @property
    def rounds(self) -> bool:
        """Is it nothing for a GPU, where the package of its codes rounds activations to codes too?"""
        return any(c.rounds for c in self.codings.values())

    @property
    def cached(self) -> int:
        """Numbers of a token that a key-value cache gathers in a forward, where the configuration has it."""
        return self.attention.cached if getattr(self.attention.config, "use_cache", False) else 0

    def copied(self, item: int) -> tuple[int, int]:
        """Bytes of a token that attention copies at a time where there are more than so many, and how many."""
        return self.attention.copied(item)

    def long(self, item: int) -> tuple[int, int, int]:
        """Bytes of a token that backward is spared in a single row (rows.py), bytes besides, and from how many tokens.

        Spared: the gradients of qkv, of attention's output and of what qkv is made from; dx has dh's place. There
        instead: keys and values copied, their gradients of a block, and sums; h is gone by then, and a tile's gate|up.
        """
        a, h, tiled = self.attention, self.attention.hidden, self.mlp.tiled(item)
        if not tiled[0] or item != 2 or not a.walks:
            return 0, 0, NEVER
        q, qkv = a.o.inputs, sum(a.first.rows)
        instead = (qkv - q) * (2 * item + 4) + (q + (qkv - q) // 2) * item * bool(a.q_norm)
        besides = ROWS * (3 * qkv + 6 * h) * item + 4 * a.weights_used() - (tiled[0] * tiled[1] + tiled[2])
        return (qkv + 3 * h) * item - max(0, instead - h * item), max(0, besides), LONG

    def flops(self, tokens: int) -> float:
        """Of a forward's products; attention's not counted."""
        return 2.0 * tokens * (self.attention.weights_used() + self.mlp.weights_used())

    def tiled(self, item: int) -> tuple[int, int, int]:
        """Of those, where gate|up is not kept: bytes of a token that only so many rows have at a time, those rows, and
        bytes besides where there are more."""
        return self.mlp.tiled(item)


def sighted(mask: Tensor) -> Tensor:
    """[1, h, n, n]: rows that see nothing see themselves: what a kernel gives for none is no measure."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    blind = ~seen.any(-1, keepdim=True) & torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    return mask | blind if mask.dtype == torch.bool else mask.masked_fill(blind, 0)


def _norms_of(layer: nn.Module) -> dict[str, Norm | None]:
    """The four places of a norm: before and after each half. What a name means depends on its neighbours."""
    def norm(*names: str) -> Norm | None:
        return next((Norm(layer, n) for n in names if has(layer, n)), None)

    if has(layer, "pre_feedforward_layernorm"):          # Gemma 2
        places = ("post_attention_layernorm",), ("pre_feedforward_layernorm",)
    elif has(layer, "post_self_attn_layernorm"):         # GLM 4
        places = ("post_self_attn_layernorm",), ("post_attention_layernorm",)
    elif has(layer, "input_layernorm"):
        places = (), ("post_attention_layernorm",)
    else:                                                # OLMo 2
        places = ("post_attention_layernorm",), ()
    return {"1": norm("input_layernorm"), "1b": norm(*places[0]), "2": norm(*places[1]),
            "2b": norm("post_feedforward_layernorm", "post_mlp_layernorm")}
