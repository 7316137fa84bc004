"""What templates are made of besides weights: a call's arguments, norms, linear layers, the half of a decoder layer."""
from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from ... import ops
from ...base.codes import Coding, coded, format_of
from ...base.errors import MegatrainError
from ...graph import hf_calls
from .attention import NEVER
from .weights import Grads, Weights


class Unfit(Exception):
    """A module, or a call of it, that a template does not cover, or is not proved to; the text says why."""


@dataclass(frozen=True)
class Sizes:
    """What a template keeps and needs, in bytes per token, where nothing else is said. Plans reckon with it."""

    input: int
    kept: tuple[tuple[str, int], ...]           # by mode, beside the input
    work: int                                   # that backward needs at most beside the input
    # Of that, where gate|up is not kept: what only so many rows have at a time, those rows, and bytes of the weight
    # gradients' sums where there are more.
    tiled: tuple[int, int, int] = (0, 0, 0)
    copied: tuple[int, int] = (0, 0)            # besides, where there are more tokens than the second
    # What a single row of so many tokens, the third, spares backward where gate|up is not kept, and bytes besides.
    long: tuple[int, int, int] = (0, 0, NEVER)
    expanded: tuple[int, int] = (0, 0)          # bytes of weights made of codes: of most there are at once, and of all
    # Of a mixture how many there are; and where they are fetched in parts: bytes of weights made of their codes, and
    # bytes per token, that as many have at once.
    experts: tuple[int, int, int] = (0, 0, 0)
    parts: int = 1                              # how often others of them come
    cached: int = 0                             # keys and values, where the configuration has a forward gather them

    def spared(self, tokens: int) -> int:
        """Bytes that tiles spare so many tokens."""
        each, rows, sums = self.tiled
        return max(0, (tokens - rows) * each - sums) if tokens > rows else 0


class Template:
    """What runs all modules of one structure, forward and backward, without autograd and with weights passed in. What
    is said here is that of a single module, whose Decoder says what the functions are.

    Attributes:
        swaps: what it keeps may wait in host memory, and it can make its output again.
        rounds: it is nothing for a GPU, where the package of its codes rounds activations to codes too.
        coded: its products, one at least, may be of 8-bit codes (weights.Coded).
        routes: it has a mixture of experts.
        open: (part, attribute): what a proof finds beside the structure; it differs from case to case.
        config: of the model; a template in other settings has the same.
    """

    swaps, rounds, coded, routes = False, False, False, False
    open: list[tuple[Any, str]] = []
    config: Any = None
    check: Any = staticmethod(lambda: None)

    @property
    def settings(self) -> tuple[Any, ...]:
        return tuple([getattr(part, name) for part, name in self.open])

    def set_as(self, settings: tuple[Any, ...]) -> Any:
        """A template of this structure with these settings."""
        found = copy.deepcopy(self, {id(self.config): self.config})
        for (part, name), value in zip(found.open, settings, strict=True):
            setattr(part, name, value)
        return found

    def check_input(self, x: Any, dtype: torch.dtype) -> None:
        """Raises Unfit where x is not what the template takes: a plain [B, S, H] tensor of this type."""
        if type(x) is not Tensor or x.dim() != 3 or x.dtype != dtype:
            raise Unfit("its input is no [B, S, H] tensor of the weights' type")

    def take(self, module: nn.Module, x: Tensor, kwargs: Any, roles: Any = None) -> tuple[Tensor, Any]:
        if kwargs:
            raise Unfit("called with more than its input")
        return x.contiguous() if x.is_floating_point() and x.stride(-1) != 1 else x, None


# ---- a call ----------------------------------------------------------------------------------------

def names_of(forward: Callable[..., Any]) -> list[str]:
    """Of the parameters that a forward may be given by their places, in order."""
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def arguments(names: list[str], args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The input of a call, and its other arguments by name; Unfit where there are some without names. Which is which
    their names do not decide: the input comes first, or is the first that is [B, S, H]. names: of the parameters."""
    if len(args) == 1:
        return args[0], kwargs
    if args:
        placed = dict(zip(names[1:], args[1:]))
        if len(placed) + 1 < len(args) or placed.keys() & kwargs.keys():
            raise Unfit("called with arguments that have no names, or the same twice")
        return args[0], placed | kwargs
    wide = (n for n, v in kwargs.items() if isinstance(v, Tensor) and v.dim() == 3)
    first = names[0] if names and names[0] in kwargs else next(wide, None)
    return kwargs.get(first), {n: v for n, v in kwargs.items() if n != first}


def role(value: Any) -> str:
    """What an argument of a decoder layer is to a template: "cache", of keys and values; "angles", (cos, sin) of
    [1 or B, S, R]; "mask", [B, h, S, S], of bools or added to logits; "": none of them."""
    if hf_calls.is_cache(type(value)):
        return "cache"
    if isinstance(value, tuple) and len(value) == 2 and all(
            isinstance(v, Tensor) and v.dim() == 3 and v.is_floating_point() for v in value):
        return "angles"
    masks = torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64
    return "mask" if isinstance(value, Tensor) and value.dim() == 4 and value.dtype in masks else ""


def roles_of(kwargs: dict[str, Any]) -> dict[str, str]:
    """By role, which argument has it; Unfit where several have the same."""
    found: dict[str, str] = {}
    for name, value in kwargs.items():
        if (what := role(value)) and found.setdefault(what, name) != name:
            raise Unfit(f"called with more than one {what}: {found[what]}, {name}")
    return found


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cut: Tensor) -> Tensor:
        return t.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise MegatrainError("a gradient through the key-value cache of a fused layer: use compute='eager'")


def cut(t: Tensor) -> Tensor:
    """The same values for a cache, with a history that refuses to be gone through, and holds nothing: a leaf would hold
    t for as long as what the cache makes of it lives."""
    return _Cut.apply(t.detach(), t.new_empty(0).requires_grad_())


# ---- a module's parts ------------------------------------------------------------------------------

def has(layer: nn.Module, name: str) -> bool:
    """Is there a module of this dotted name that does something?"""
    with contextlib.suppress(Unfit):
        return not isinstance(child(layer, name), nn.Identity)
    return False


def child(layer: nn.Module, name: str) -> Any:
    """The module of this dotted name; Unfit where there is none."""
    try:
        return layer.get_submodule(name)
    except AttributeError:
        raise Unfit(f"no template covers a {type(layer).__name__}: it has no {name}") from None


def codings_of(layer: nn.Module) -> dict[str, Coding]:
    """How each weight of codes is made, by its name; Unfit where one cannot be."""
    found = {}
    for name, _, p, format in coded(layer):
        if (coding := format.coding(p)) is None:
            raise Unfit(f"its weights are codes: {format.name}")
        found[name] = coding
    return found


def dtype_of(layer: nn.Module, codings: dict[str, Coding]) -> torch.dtype:
    """The type of the weights that a layer multiplies with. Unfit: those that codes stand for are of several. Of
    parameters those that are numbers count first, of these matrices, adapters' last."""
    types = {c.dtype for c in codings.values() if c.dtype is not None}
    if len(types) > 1:
        raise Unfit(f"its codes stand for weights of several types: {', '.join(sorted(map(str, types)))}")
    own = [(not p.is_floating_point() or p.dtype.itemsize == 1, ".lora_" in name, p.dim() < 2, p.dtype)
           for name, p in layer.named_parameters()]
    return types.pop() if types else min(own, key=lambda item: item[:3])[-1]


class Norm:
    """A module that is an RMSNorm in one of transformers' ways of applying its weight. With fp32 weights in a 16-bit
    layer (GPT-OSS as it is loaded) it is by ops.rms_norm's formulas, in torch's passes."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        module = child(layer, name)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        own = dict(module.named_parameters())
        if not isinstance(eps, float) or list(own) != ["weight"] or own["weight"].dim() != 1:
            raise Unfit(f"{name or 'it'} ({type(module).__name__}) is no RMSNorm with one weight")
        self.weight = f"{name}.weight" if name else "weight"
        self.eps, self.size = eps, own["weight"].numel()
        self.style = ops.ROUND_FIRST

    def forward(self, x: Tensor, w: Weights, linears: Linears | None = None) -> tuple[Any, Tensor]:
        """y and 1/rms. linears: nothing else reads y, which may be as their product takes it."""
        weight = w[self.weight]
        if weight.dtype != x.dtype:
            wide = x.float()
            rstd = torch.rsqrt(wide.square().mean(-1) + self.eps)
            return (wide * rstd.unsqueeze(-1) * (weight + (self.style == ops.ONE_PLUS))).to(x.dtype), rstd
        if linears is not None:
            return w.normed(linears.weights, x, weight, self.eps, self.style)
        return ops.rms_norm(x, weight, self.eps, self.style)[::2]

    def backward(self, dy: Tensor, s: Tensor, rstd: Tensor, grads: Grads, add: Tensor | None = None,
                 rebuild: bool = False, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """dx + add; and y again, where that is asked for (`rebuild`)."""
        weight = grads.w[self.weight]
        if weight.dtype == s.dtype:
            dx, dw, y = ops.rms_norm_backward(dy, s, weight, rstd, self.style, add, rebuild, dx=out)
        else:
            weight, hat, dy = weight + (self.style == ops.ONE_PLUS), s.float() * rstd.unsqueeze(-1), dy.float()
            dw, g = ops.column_sum((dy * hat).flatten(0, -2)), dy * weight
            y = (hat * weight).to(s.dtype) if rebuild else None
            dx = rstd.unsqueeze(-1) * (g - hat * (g * hat).mean(-1, keepdim=True))
            dx = (dx if add is None else dx + add).to(s.dtype)
            dx = dx if out is None else out.copy_(dx)
        if self.weight in grads.wanted:
            grads[self.weight] = dw
        return dx, y


# ---- linear layers: plain, of weights that are codes, with LoRA beside them ----------------------------

class Adapter(NamedTuple):
    """LoRA's of one linear layer, or of a stack of experts, where each has that rank. a, b: names of its matrices.
    rounds: what it adds is rounded before, not after."""

    a: str
    b: str
    rank: int
    scale: float
    rounds: bool

    @property
    def wide(self) -> int:
        """Its rank, filled up: one launch for all experts takes multiples of eight alone."""
        return -(-self.rank // 8) * 8


def unwrapped(layer: nn.Module, name: str, *kinds: str) -> tuple[list[str], list[tuple[Any, Adapter]], list[str]]:
    """Names of PEFT's wrappers of these kinds around a module, and last its own; what their adapters add, each with its
    wrapper; and the names of all parameters that adapters have, those that are not in use among them. Unfit where they
    are no plain LoRA."""
    modules, adapters, names = [name], [], []
    while hasattr(module := child(layer, modules[-1]), "lora_A") and type(module).__name__ in kinds \
            and type(module).__module__.startswith("peft.tuners.lora."):
        name = modules[-1]
        if module.merged:
            raise Unfit(f"{name} has adapters merged into it")
        if getattr(module, "fan_in_fan_out", False) or any(module.lora_variant.values()):
            raise Unfit(f"{name} has another adapter than plain LoRA")
        own = [n for n, _ in module.named_parameters() if not n.startswith("base_layer.")]
        strange = [n for n in own if not n.startswith(("lora_A.", "lora_B.")) or not n.endswith(".weight")]
        if strange:
            raise Unfit(f"{name} has another adapter than plain LoRA: {strange[0]}")
        active = [] if module.disable_adapters else [key for key in module.active_adapters if key in module.lora_A]
        if active and not getattr(module, "cast_input_dtype_enabled", True):
            raise Unfit(f"{name} does not cast its adapter's input")
        adapters += [(module, Adapter(
            f"{name}.lora_A.{key}.weight", f"{name}.lora_B.{key}.weight",
            module.lora_A[key].out_features // getattr(module, "num_experts", 1), float(module.scaling[key]),
            type(module).__name__ != "Linear")) for key in active]
        names += [f"{name}.{n}" for n in own]
        modules.append(f"{name}.base_layer")
    return modules, adapters, names


class Linears:
    """One or more linear layers over the same input: x [T, K] -> [T, sum of rows], with LoRA beside them.

        y = x W' + b + s (x A') B'      t = s x A'        dt = s dy B
        dx = dy W + dt A                dA = dt' x        dB = dy' t

    A [r, K] and B [N, r] are PEFT's, W is frozen or trained like any other. Products of a row's width with r are bound
    by memory: layers over the same input have theirs in one. They are made in the layer's type, of adapters rounded to
    it, as autocast makes them; sums are in fp32, and so are gradients of adapters in fp32.

    Attributes:
        weights, biases: their names. rows: of each; numel: of all. adapters: by the name of a weight. names: of all
            parameters.
        beside: of each adapter its columns of t and dt [T, sum of ranks], its columns of y, and itself. Where there is
            none, only the products with the joint matrix read its input, and, where there are no biases that learn, the
            gradient of its output.
    """

    def __init__(self, layer: nn.Module, *names: str) -> None:
        found = [unwrapped(layer, n, "Linear", "Linear4bit", "Linear8bitLt") for n in names]
        inside = [of[-1] for of, *_ in found]
        modules = [child(layer, n) for n in inside]
        for name, m in zip(names, modules):
            if type(m) is not nn.Linear and format_of(dict.get(m._parameters, "weight")) is None:
                raise Unfit(f"{name} is a {type(m).__name__}, not a plain nn.Linear")
        self.rows = tuple(m.out_features for m in modules)
        self.inputs = modules[0].in_features
        self.numel = sum(self.rows) * self.inputs
        self.weights = tuple(f"{n}.weight" for n in inside)
        self.biases = tuple(f"{n}.bias" for n, m in zip(inside, modules) if m.bias is not None)
        if self.biases and len(self.biases) < len(found):
            raise Unfit(f"only some of {', '.join(names)} have a bias")
        self.adapters = {w: [a for _, a in added] for w, (_, added, _) in zip(self.weights, found)}
        self.names = (*self.weights, *self.biases, *(n for *_, more in found for n in more))
        own = dict(layer.named_parameters(remove_duplicate=False))
        if len({own[n].dtype for adapters in self.adapters.values() for a in adapters for n in (a.a, a.b)}) > 1:
            raise Unfit(f"adapters of {', '.join(names)} are of several types")
        self.beside: list[tuple[slice, slice, Adapter]] = []
        begin = rank = 0
        for adapters, rows in zip(self.adapters.values(), self.rows):
            for a in adapters:
                self.beside.append((slice(rank, rank + a.rank), slice(begin, begin + rows), a))
                rank += a.rank
            begin += rows
        self._scale = self.beside[0][2].scale if len({a.scale for *_, a in self.beside}) == 1 else None
        self._downs, self._ranks = tuple(a.a for *_, a in self.beside), tuple(a.rank for *_, a in self.beside)

    def forward(self, x: Tensor, w: Weights) -> Tensor:
        y = w.product(self.weights, x, self.biases)
        if self.beside:
            t = self._scaled(torch.mm(x, self._down(w, x.dtype).t()))
            for ranks, columns, a in self.beside:
                y[:, columns].addmm_(t[:, ranks], w[a.b].to(x.dtype).t())
        return y

    def forward_onto(self, base: Tensor, x: Tensor, w: Weights, factor: float) -> Tensor:
        """base + factor * forward(x), added inside the product where that is all."""
        if self.biases or self.beside:
            return torch.add(base, self.forward(x, w), alpha=factor)
        return w.product(self.weights, x, (), base, factor)

    def input_grad(self, dy: Tensor, grads: Grads) -> Tensor:
        dx = grads.w.input_grad(self.weights, dy)
        return dx.addmm_(*self._outer(dy, grads)) if self.beside else dx

    def weight_grads(self, dy: Tensor, x: Tensor, grads: Grads) -> None:
        if not grads.wanted.isdisjoint(self.weights):
            grads.product(self.weights, self.rows, dy, x)
        if not grads.wanted.isdisjoint(self.biases):
            grads.put(self.biases, self.rows, ops.column_sum(dy))
        if self._learn(grads):
            dt, down = self._outer(dy, grads)
            if not grads.wanted.isdisjoint(self._downs):
                grads.product(self._downs, self._ranks, dt, x)
            t = self._scaled(torch.mm(x, down.t()))
            for ranks, columns, a in self.beside:
                if a.b in grads.wanted:
                    grads.product((a.b,), (columns.stop - columns.start,), dy[:, columns], t[:, ranks])

    def _learn(self, grads: Grads) -> bool:
        return any(not grads.wanted.isdisjoint((a.a, a.b)) for *_, a in self.beside)

    def _down(self, w: Weights, dtype: torch.dtype) -> Tensor:
        """A [sum of ranks, K] of all adapters."""
        return torch.cat([w[n].to(dtype) for n in self._downs])

    def _outer(self, dy: Tensor, grads: Grads) -> tuple[Tensor, Tensor]:
        """dt, and A. input_grad and weight_grads want them of the same dy: the first leaves them to the other."""
        of, *found = grads.outer.pop(self, (None,))
        if of is dy:
            return tuple(found)
        dt = torch.empty(dy.shape[0], sum(self._ranks), dtype=dy.dtype, device=dy.device)
        for ranks, columns, a in self.beside:
            torch.mm(dy[:, columns], grads.w[a.b].to(dy.dtype), out=dt[:, ranks])
        found = self._scaled(dt), self._down(grads.w, dy.dtype)
        if self._learn(grads):
            grads.outer[self] = dy, *found
        return found

    def _scaled(self, t: Tensor) -> Tensor:
        if self._scale is not None:          # one for all
            return t if self._scale == 1.0 else t.mul_(self._scale)
        for ranks, _, adapter in self.beside:
            t[:, ranks].mul_(adapter.scale)
        return t


_GATED = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"),
          (("input_linear",), "output_linear"))


def gated_linears(layer: nn.Module, name: str) -> tuple[Linears, Linears]:
    """What makes g|u, and what reads act(g) * u; Unfit where the module is not gated."""
    mlp = child(layer, name)
    names, down = next((n for n in _GATED if hasattr(mlp, n[0][0])), _GATED[0])
    gu, down = Linears(layer, *(f"{name}.{n}" for n in names)), Linears(layer, f"{name}.{down}")
    if sum(gu.rows) != 2 * down.inputs:
        raise Unfit(f"{name} has {gu.rows} rows before {down.inputs} columns: not gated")
    return gu, down


# ---- half a decoder layer ------------------------------------------------------------------------------

@dataclass
class Kept:
    """What lies between forward and backward of a half; None: to be made again, from its input."""

    x: Tensor | None = None              # [T, H] the input, where it is not the layer's
    rstd: Tensor | None = None           # 1/rms of norm_in
    last: Tensor | None = None           # [T, H] what norm_out reads
    rstd_out: Tensor | None = None
    # Of attention.
    qkv: Tensor | None = None            # [T, .] what the first product gives
    q: Tensor | None = None              # of latent attention: [T, hq D] turned; None: to be made again, from qkv
    kv: Tensor | None = None             # and [T, hq (N + V)]
    out: Tensor | None = None            # [B, S, hq, D] attention's output
    extra: Any = None                    # attention's own: log-sum-exp
    inner: dict[str, Tensor] = field(default_factory=dict)       # 1/rms of attention's other norms
    # Of what works on each token.
    routed: Any = None                   # a router's logits and choice
    gu: Tensor | None = None             # [T, 2 I], or [R, 2 I] of the routed rows, sorted by expert
    shared_gu: Tensor | None = None      # [T, 2 Is] of a shared expert

    def part(self, rows: slice) -> Kept:
        """Of some tokens of a single row: what is of each token, and attention's output."""
        own = (None if t is None else t[rows] for t in (self.rstd, self.last, self.rstd_out, self.qkv))
        return Kept(None, *own, out=None if self.out is None else self.out[:, rows],
                    inner={name: t[:, rows] for name, t in self.inner.items()})


# Who keeps it elsewhere puts other things in the places of its tensors.
register_pytree_node(Kept, lambda k: (list(vars(k).values()), None), lambda values, _: Kept(*values))


class Half:
    """y = x + r * norm_out(f(norm_in(x))), where norms may be missing.

    Attributes:
        factor: r. norms, linears: all there are. names: of parameters besides.
        hidden: width of x. Of a token, between forward and backward: `columns` numbers in any case, `made` more that
            "selective" makes again, and so many bytes of others, `few`. work: numbers that backward has beside what
            "saved" keeps, and its own of [T, H].
    """

    names: Collection[str] = ()
    hidden = columns = made = few = work = 0

    def __init__(self, norm_in: Norm | None, norm_out: Norm | None, factor: float) -> None:
        self.norm_in, self.norm_out, self.factor = norm_in, norm_out, factor
        self.norms = [n for n in (norm_in, norm_out) if n]

    def kept_bytes(self, keep: str, item: int) -> int:
        """Of a token, between forward and backward."""
        columns = self.columns + self.hidden * bool(self.norm_out) + self.made * (keep == "saved")
        return columns * item + self.few

    def normed(self, x: Tensor, w: Weights, k: Kept, linears: Linears | None = None) -> Any:
        """norm_in(x). linears: that alone read it, and may have it as their product takes it."""
        if self.norm_in is None:
            return x
        a, rstd = self.norm_in.forward(x, w, linears)
        k.rstd = rstd if k.rstd is None else k.rstd
        return a

    def added(self, x: Tensor, last: Linears, read: Any, w: Weights, k: Kept) -> Tensor:
        """y, where the last product of f is that of `read`."""
        if self.norm_out is None:
            return last.forward_onto(x, read, w, self.factor)
        return self.added_normed(x, last.forward(read, w), w, k)

    def added_normed(self, x: Tensor, f: Tensor, w: Weights, k: Kept) -> Tensor:
        k.last = f
        normed, k.rstd_out = self.norm_out.forward(f, w)
        return torch.add(x, normed, alpha=self.factor)

    def output_grad(self, dy: Tensor, k: Kept, grads: Grads) -> Tensor:
        """That of f."""
        d = dy if self.factor == 1.0 else dy * self.factor
        if self.norm_out is not None:
            d, _ = self.norm_out.backward(d, k.last, k.rstd_out, grads)
            k.last = None
        return d

    def input_grad(self, first: Linears, d: Tensor, dy: Tensor, x: Tensor, k: Kept, grads: Grads,
                   a: Tensor | None = None) -> Tensor:
        """dx from d, the gradient of what the first products give, and dy, the residual's own. a: norm_in(x), where it
        is there; else it is made again."""
        da = first.input_grad(d, grads)
        if self.norm_in is None:
            dx, a = da.add_(dy), x
        else:
            dx, again = self.norm_in.backward(da, x, k.rstd, grads, add=dy, rebuild=a is None)
            a = again if a is None else a
        first.weight_grads(d, a, grads)
        return dx
