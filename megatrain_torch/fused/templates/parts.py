"""What templates are made of besides weights: arguments of a call, norms, activations, a module's children."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...base.errors import MegatrainError
from ...graph import hf_calls
from .weights import Grads, Weights


class Unfit(Exception):
    """A module, or a call of it, that a template does not cover; the text says why."""


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
    their names do not decide: the input comes first, or is the first that is [B, S, H].

    names: of the parameters, in order.
    """
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
    if hf_calls.is_cache(value):
        return "cache"
    if isinstance(value, tuple) and len(value) == 2 and all(
            isinstance(v, Tensor) and v.dim() == 3 and v.is_floating_point() for v in value):
        return "angles"
    return "mask" if isinstance(value, Tensor) and value.dim() == 4 and value.dtype in _MASKS else ""


_MASKS = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def roles_of(kwargs: dict[str, Any]) -> dict[str, str]:
    """By role, which argument has it; Unfit where several have the same."""
    found: dict[str, str] = {}
    for name, value in kwargs.items():
        what = role(value)
        if what and found.setdefault(what, name) != name:
            raise Unfit(f"called with more than one {what}: {found[what]}, {name}")
    return found


def hidden_states(x: Any, dtype: torch.dtype) -> Tensor:
    """x, if it is a plain [B, S, H] tensor of this type; else Unfit."""
    if type(x) is not Tensor or x.dim() != 3 or x.dtype != dtype:
        raise Unfit("its input is no [B, S, H] tensor of the weights' type")
    return x


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cut: Tensor) -> Tensor:
        return t.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise MegatrainError("a gradient through the key-value cache of a fused layer: use compute='eager'")


def cut(t: Tensor) -> Tensor:
    """The same values for a cache, with a history that refuses to be gone through, and holds nothing."""
    return _Cut.apply(t.detach(), t.new_empty(0).requires_grad_())


def unflattened(t: Tensor, shape: Any) -> Tensor:
    """t [T, H] as [B, S, H], and no view: autograd lets nobody change a node's output in place if it is one."""
    return torch.ops.aten._unsafe_view(t, shape)


@dataclass
class Kept:
    """What lies between forward and backward of a decoder layer; None: to be made again, from x."""

    x: Tensor | None = None
    rstd1: Tensor | None = None
    qkv: Tensor | None = None            # [T, .] what the first product gives
    q: Tensor | None = None              # of latent attention: [T, hq D] rotated; None: to be made again, from qkv
    kv: Tensor | None = None             # and [T, hq (N + V)]
    out: Tensor | None = None            # [B, S, hq, D] attention's output
    extra: Any = None                    # attention's own: log-sum-exp
    o: Tensor | None = None              # [T, H], only where norm1b is
    inner: dict[str, Tensor] = field(default_factory=dict)       # 1/rms of attention's other norms
    h: Tensor | None = None              # [T, H] between the halves
    rstd2: Tensor | None = None
    routed: Any = None                   # a router's logits and choice
    gu: Tensor | None = None             # [T, 2 I], or [R, 2 I] of the routed rows, sorted by expert
    shared_gu: Tensor | None = None      # [T, 2 Is] of a shared expert
    d: Tensor | None = None              # [T, H], only where norm2b is
    rstd2b: Tensor | None = None


# ---- norms -----------------------------------------------------------------------------------------

class Norm:
    """A module that is an RMSNorm in one of transformers' ways of applying its weight."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        module = child(layer, name)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        own = dict(module.named_parameters())
        if not isinstance(eps, float) or list(own) != ["weight"] or own["weight"].dim() != 1:
            raise Unfit(f"{name or 'it'} ({type(module).__name__}) is no RMSNorm with one weight")
        self.weight = f"{name}.weight" if name else "weight"
        self.eps, self.size = eps, own["weight"].numel()
        self.style = ops.ROUND_FIRST

    def forward(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        """y and 1/rms."""
        weight = w[self.weight]
        if weight.dtype != x.dtype:
            return _wide_norm(x, weight, self.eps, self.style)
        return ops.rms_norm(x, weight, self.eps, self.style)[::2]

    def before(self, linears: Any, x: Tensor, w: Weights) -> tuple[Any, Tensor]:
        """The same, for these linear layers alone: y as their product takes it."""
        weight = w[self.weight]
        if not linears.alone or weight.dtype != x.dtype:
            return self.forward(x, w)
        return w.normed(linears.weights, x, weight, self.eps, self.style)

    def backward(self, dy: Tensor, s: Tensor, rstd: Tensor, w: Weights, grads: Grads, add: Tensor | None = None,
                 rebuild: bool = False, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        weight = w[self.weight]
        backward = _wide_norm_backward if weight.dtype != s.dtype else ops.rms_norm_backward
        dx, dw, y = backward(dy, s, weight, rstd, self.style, add, rebuild, dx=out)
        if grads.wants(self.weight):
            grads[self.weight] = dw
        return dx, y


# Norms with fp32 weights in a 16-bit layer (GPT-OSS as it is loaded): ops.rms_norm's formulas, in torch's passes.

def _wide_norm(x: Tensor, weight: Tensor, eps: float, style: int) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd.unsqueeze(-1) * (weight + (style == ops.ONE_PLUS))).to(x.dtype), rstd


def _wide_norm_backward(dy: Tensor, s: Tensor, weight: Tensor, rstd: Tensor, style: int, add: Tensor | None,
                        rebuild: bool, *, dx: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    weight, hat, dy = weight + (style == ops.ONE_PLUS), s.float() * rstd.unsqueeze(-1), dy.float()
    dw, y = ops.column_sum((dy * hat).flatten(0, -2)), (hat * weight).to(s.dtype) if rebuild else None
    g = dy * weight
    found = rstd.unsqueeze(-1) * (g - hat * (g * hat).mean(-1, keepdim=True))
    found = (found if add is None else found + add).to(s.dtype)
    return found if dx is None else dx.copy_(found), dw, y


# ---- a module's parts ------------------------------------------------------------------------------

def has(layer: nn.Module, name: str) -> bool:
    """Is there a module of this dotted name that does something?"""
    found = _find(layer, name)
    return found is not None and not isinstance(found, nn.Identity)


def child(layer: nn.Module, name: str) -> nn.Module:
    """The module of this dotted name; Unfit where there is none."""
    found = _find(layer, name)
    if found is None:
        raise Unfit(f"no template covers a {type(layer).__name__}: it has no {name}")
    return found


def _find(layer: Any, name: str) -> nn.Module | None:
    for part in name.split(".") if name else ():
        layer = getattr(layer, part, None)
    return layer if isinstance(layer, nn.Module) else None
