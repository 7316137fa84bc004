"""The half of a decoder layer that mixes tokens, h = x + r * norm1b(attention(q, k, v) Wo): what self_attention.py and
latent_attention.py, which make q, k and v of a = norm1(x) in ways of their own, have in common."""
from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...base.limits import show_bytes
from ...graph import hf_calls
from ...graph.hf_calls import sight_of
from .attention import Attention
from .linears import Linears
from .parts import Grads, Norm, Unfit, Weights, child, cut, given
from .rotary import Rotary


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


@dataclass
class KeptAttention:
    """What lies between forward and backward; without qkv: to be made again."""

    rstd1: Tensor | None = None
    qkv: Tensor | None = None            # [T, .] what the first product gives
    q: Tensor | None = None              # of latent attention: [T, hq D] rotated; None: to be made again, from qkv
    kv: Tensor | None = None             # and [T, hq (N + V)]
    out: Tensor | None = None            # [B, S, hq, D] attention's output
    extra: Any = None                    # attention's own: log-sum-exp
    o: Tensor | None = None              # [T, H], only where norm1b is
    inner: dict[str, Tensor] = field(default_factory=dict)       # 1/rms of the other norms

    def rows(self, rows: slice) -> KeptAttention:
        """Of these rows of the only row of the batch; without attention's own."""
        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[rows]

        inner = {name: t[:, rows] if name in ("q", "k") else t[rows] for name, t in self.inner.items()}
        return KeptAttention(of(self.rstd1), of(self.qkv), None, None, self.out[:, rows], None, of(self.o), inner)


class AttentionHalf:
    """
    Attributes:
        first: the product with a. o: the one that attention's output goes into. linears: all of them.
        hq, hk, head: heads of queries and of keys, and their size. values: of a value's head.
        sinks: the name of attention's sinks, if it has any.
        rotary: how heads are turned; turns: the name of the function that turns them, and of how many numbers.
        norms: all norms, the layer's two among them.
        walks: gradients of a single long row may be had some rows at a time.
    """

    first: Linears
    linears: tuple[Linears, ...]
    names: set[str]
    norms: list[Norm]
    hq: int
    hk: int
    head: int
    values: int
    rotary: Rotary | None
    turns: tuple[str, int]
    sinks: str | None = None
    cap = 0.0
    walks = False

    def __init__(self, layer: nn.Module, norm1: Norm | None, norm1b: Norm | None, factor: float) -> None:
        """Raises:
            Unfit: it is not of this family.
        """
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
        self._refuse(attn)

    def _refuse(self, attn: nn.Module) -> None:
        """What a trial on random data may not show."""
        if getattr(attn, "attention_dropout", 0.0):
            raise Unfit("its attention drops out")
        if getattr(self.config, "clip_qkv", None) is not None:
            raise Unfit("it clips q, k and v")

    def per_head(self, norm: Norm) -> bool:
        """Does this norm run over each head?"""
        return False

    # ---- a call ----

    @property
    def kind(self) -> str:
        """Of attention, as transformers names it."""
        return str(getattr(self.config, "_attn_implementation", None))

    def check(self) -> None:
        """Raises:
            Unfit: the configuration, as it is now, asks for an attention that the template does not cover.
        """
        kind = self.kind
        if kind not in ("sdpa", "eager"):
            raise Unfit(f"attention by {kind!r}")
        if kind == "sdpa" and self.cap:
            raise Unfit("its attention caps its logits, which torch's kernels cannot")
        if kind == "sdpa" and self.sinks:
            raise Unfit("its attention has sinks, which torch's kernels do not know")

    def call(self, layer: nn.Module, kwargs: dict[str, Any]) -> Call:
        """Raises:
            Unfit: there is an argument that the template does not cover.
        """
        self.check()
        mask, cache = given(kwargs, "mask"), given(kwargs, "cache")      # the rest is not read, by a proof
        if self.sinks and mask is not None and mask.dtype == torch.bool:
            raise Unfit("its attention has sinks, and a mask that is not added to logits")
        attention = self._attention(self.kind, mask)
        call = Call(*self._angles(given(kwargs, "angles")), attention)
        if cache is not None and not hf_calls.empty_entry(cache, layer.self_attn.layer_idx):
            raise Unfit("its cache is no empty DynamicCache")
        if cache is not None:
            call.cache = lambda k, v: _fill(cache, k, v, layer.self_attn.layer_idx)
        return call

    def _attention(self, kind: str, mask: Tensor | None) -> Attention:
        sight, values = sight_of(mask), 0 if self.values == self.head else self.values
        if sight is not None and not self.cap:
            return Attention(self.scale, True, packed=sight.packed, window=sight.window, values=values)
        mask = mask if sight is None else sight.real
        causal = self.causal and mask is None and kind == "sdpa"     # of eager attention, the mask says all
        return Attention(self.scale, causal, mask, kind == "eager", self.cap, values=values)

    def _angles(self, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
        if self.rotary is None:
            return None, None
        if angles is None:
            raise Unfit("called without (cos, sin), each [B, S, R]")
        return self.rotary.angles(angles[0]), self.rotary.angles(angles[1])

    def tell_of_cache(self, call: Call, x: Tensor) -> None:
        """Warns, once, of keys and values of all layers that a training forward gathers on the device."""
        layers = getattr(self.config, "num_hidden_layers", 1)
        found = self.cached * x.element_size() * x.shape[:2].numel() * layers
        if call.cache is None or found < LARGE_CACHE or _told:
            return
        _told.append(True)
        warnings.warn(f"the forward of a training step fills a key-value cache of {show_bytes(found)}, which training "
                      "does not read and mt.plan does not count: call the model with use_cache=False, or set "
                      "model.config.use_cache = False", stacklevel=2)

    @property
    def cached(self) -> int:
        """Numbers of a token that a key-value cache gathers."""
        raise NotImplementedError

    # ---- forward ----

    def forward(self, x: Tensor, shape: Any, w: Weights, call: Call, k: KeptAttention) -> Tensor:
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

    def _made(self, k: KeptAttention, shape: Any, w: Weights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, hq, D], k [B, S, hk, D] and v [B, S, hk, V] as attention takes them, from k.qkv as the first product
        gave it. Fills the call's cache."""
        raise NotImplementedError

    def _sinks(self, w: Weights) -> Tensor | None:
        return w[self.sinks] if self.sinks else None

    def after(self, x: Tensor, w: Weights, k: KeptAttention) -> Tensor:
        """h [T, H] from x [T, H] and attention's output, which is in k."""
        out = k.out.reshape(x.shape[0], -1)
        if not self.norm1b:
            return self.o.forward_onto(x, out, w, self.factor)
        k.o = self.o.forward(out, w)
        normed, k.inner["o"] = self.norm1b.forward(k.o, w)
        return torch.add(x, normed, alpha=self.factor)

    def trim(self, k: KeptAttention) -> None:
        """Down to what "selective" keeps."""

    # ---- backward ----

    def backward(self, dh: Tensor, x: Tensor, shape: Any, w: Weights, call: Call, k: KeptAttention, grads: Grads,
                 input_grad: bool) -> Tensor:
        """dx [T, H] from dh [T, H], and may write into it. Uses up what was kept."""
        raise NotImplementedError

    def _output_backward(self, dh: Tensor, w: Weights, k: KeptAttention, grads: Grads) -> Tensor:
        """Gradient of attention's output, [B, S, hq, V]."""
        do = dh if self.factor == 1.0 else dh * self.factor
        if self.norm1b:
            do, _ = self.norm1b.backward(do, k.o, k.inner["o"], w, grads)
            k.o = None
        self.o.weight_grads(do, k.out.reshape(do.shape[0], -1), w, grads)
        return self.o.input_grad(do, w).view(k.out.shape)

    def _input_backward(self, dfirst: Tensor, dh: Tensor, x: Tensor, w: Weights, k: KeptAttention, grads: Grads,
                        input_grad: bool) -> Tensor:
        """dx [T, H] from the gradient of what the first product gave, the residual's own added."""
        da = self.first.input_grad(dfirst, w)
        if self.norm1:
            dx, a = self.norm1.backward(da, x, k.rstd1, w, grads, add=dh, rebuild=True)
        else:
            dx, a = da.add_(dh) if input_grad else da, x
        self.first.weight_grads(dfirst, a, w, grads)
        return dx

    # ---- sizes ----

    def output_bytes(self, item: int) -> int:
        """Of a token's attention output and log-sum-exp."""
        return self.o.inputs * item + 4 * self.hq

    def kept_bytes(self, keep: str, item: int) -> int:
        """Bytes that a token takes between forward and backward."""
        raise NotImplementedError

    def work_columns(self) -> int:
        """Numbers of a token that backward has beside what "saved" keeps, and its own of [T, H]."""
        raise NotImplementedError

    def copied(self, item: int) -> tuple[int, int]:
        """Decoder.copied."""
        raise NotImplementedError

    def weights_used(self) -> int:
        """Elements of the matrices that a token meets."""
        return sum(sum(one.rows) * one.inputs for one in self.linears)


LARGE_CACHE = 1 << 28        # bytes
_told: list[bool] = []       # has it been warned of in this process?


@torch.enable_grad()
def _fill(cache: Any, k: Tensor, v: Tensor, index: int) -> None:
    """What a cache makes of its entries has to refuse a backward too, so its own operations are recorded."""
    cache.update(cut(k.transpose(1, 2)), cut(v.transpose(1, 2)), index)
