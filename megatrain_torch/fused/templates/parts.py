"""What templates are made of: weights by name, linear layers that stand side by side, norms, activations."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...base.errors import MegatrainError
from ...graph import hf_calls


class Unfit(Exception):
    """A module, or a call of it, that a template does not cover; the text says why."""


def names_of(forward: Callable[..., Any]) -> list[str]:
    """Of the parameters that a forward may be given by their places, in order."""
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def arguments(names: list[str], args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The input of a call, and its other arguments by name. Which is which their names do not decide: the input comes
    first, or is the first that is [B, S, H].

    names: of the parameters, in order.

    Raises:
        Unfit: there are arguments without names.
    """
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
    if isinstance(value, tuple) and len(value) == 2 and all(_floats(v, 3) for v in value):
        return "angles"
    return "mask" if isinstance(value, Tensor) and value.dim() == 4 and value.dtype in _MASKS else ""


_MASKS = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _floats(value: Any, dims: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == dims and value.is_floating_point()


def given(kwargs: dict[str, Any], what: str) -> Any:
    """The argument that is this to a template; None: there is none.

    Raises:
        Unfit: there are several.
    """
    found = {n: v for n, v in kwargs.items() if role(v) == what}
    if len(found) > 1:
        raise Unfit(f"called with more than one {what}: {', '.join(found)}")
    return next(iter(found.values()), None)


def hidden_states(x: Any, dtype: torch.dtype) -> Tensor:
    """x, if it is a plain [B, S, H] tensor of this type.

    Raises:
        Unfit: it is not.
    """
    if type(x) is not Tensor or x.dim() != 3 or x.dtype != dtype:
        raise Unfit("its input is no [B, S, H] tensor of the weights' type")
    return x


def dense(x: Tensor) -> Tensor:
    """Patches of images come transposed: x is to be dense in H."""
    return x if x.stride(2) == 1 else x.contiguous()


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


class Weights:
    """A unit's weights in a slot, by the names of the window's parameters.

    Linear layers that read the same input lie side by side in their unit (units are laid out matrices
    first), so their weights are one matrix, and one product serves them all.
    """

    __slots__ = ("_joint", "_make", "by_name")

    def __init__(self, by_name: dict[str, Tensor], make: Callable[[Callable[[], Tensor]], Tensor] | None = None
                 ) -> None:
        """make: runs what makes a view that is kept here (a slot counts those)."""
        self.by_name, self._make = by_name, make or (lambda view: view())
        self._joint: dict[tuple[str, ...], Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.by_name[name]

    def joint(self, names: tuple[str, ...]) -> Tensor:
        """The rows of all of them, one below the other; a view where they are neighbours."""
        if len(names) == 1:
            return self.by_name[names[0]]
        found = self._joint.get(names)
        if found is None:
            parts = [self.by_name[n] for n in names]
            if not _neighbours(parts):
                return torch.cat(parts)              # a copy would be out of date with the next fetch
            found = self._joint[names] = self._make(lambda: _over(parts))
        return found

    # ---- stacks of experts ----

    def groups(self, name: str, count: int) -> list[range]:
        """Which experts of a stack of so many are there together: here all are (pieces.py)."""
        return [range(count)]

    def experts(self, name: str, which: range) -> Tensor:
        """[experts, ., .]: of one of these groups."""
        return self[name]

    # ---- products with the joint matrix W [N, K] of `names`: the one way by which linear layers come to theirs ----

    def product(self, names: tuple[str, ...], x: Tensor, biases: tuple[str, ...] = ()) -> Tensor:
        """x W' + bias [T, N], from x [T, K]."""
        matrix = self.joint(names).t()
        return torch.addmm(self.joint(biases), x, matrix) if biases else torch.mm(x, matrix)

    def product_onto(self, names: tuple[str, ...], base: Tensor, x: Tensor, factor: float) -> Tensor:
        """base + factor * x W' [T, N], added inside the product."""
        return torch.addmm(base, x, self.joint(names).t(), alpha=factor)

    def normed(self, names: tuple[str, ...], x: Tensor, weight: Tensor, eps: float, style: int) -> tuple[Any, Tensor]:
        """RMSNorm of x [T, K], as the product with the matrix of names alone takes it, and 1/rms."""
        y, _, rstd = ops.rms_norm(x, weight, eps, style)
        return y, rstd

    def gated(self, names: tuple[str, ...], gu: Tensor, act: int) -> Any:
        """act(g) * u [T, I], from g|u [T, 2 I], as the product with the matrix of names alone takes it."""
        return ops.glu(*gu.chunk(2, 1), act)

    def gated_grads(self, names: tuple[str, ...], down: tuple[str, ...], dh: Tensor, gu: Tensor, act: int,
                    x: Tensor | None) -> tuple[Any, Any]:
        """Gradient of g|u, and act(g) * u again, as the products with the matrices of names and of down alone take
        them; dh: of act(g) * u, which was made of down's dy. x: what g|u was made of; None: a norm's. gu and dh are
        used up."""
        return glu_grads(dh, gu, act)

    def input_grad(self, names: tuple[str, ...], dy: Tensor) -> Tensor:
        """dy W [T, K], from dy [T, N]."""
        return torch.mm(dy, self.joint(names))

    def weight_grad(self, names: tuple[str, ...], dy: Tensor, x: Tensor) -> Tensor:
        """dy' x [N, K]."""
        return torch.mm(dy.t(), x)

    def add_weight_grad(self, names: tuple[str, ...], dy: Tensor, x: Tensor, total: Tensor, begun: bool) -> None:
        """total = dy' x, or what it was and that; fp32 at least."""
        if total.dtype != torch.float32:
            torch.addmm(total, dy.t(), x, beta=float(begun), out=total)
        else:
            ops.gemm_(total, dy.t(), x, beta=float(begun))


def glu_grads(dh: Tensor, gu: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """Gradient of g|u, in its memory, and act(g) * u, in that of its gradient dh."""
    gate, up = gu.chunk(2, 1)
    ops.glu_backward(dh, gate, up, act, dgate=gate, dup=up, h=dh)
    return gu, dh


def _neighbours(parts: list[Tensor]) -> bool:
    here, storage = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for p in parts:
        if p.data_ptr() != here or not p.is_contiguous() or p.untyped_storage().data_ptr() != storage:
            return False
        here += p.numel() * p.element_size()
    return True


def _over(parts: list[Tensor]) -> Tensor:
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


class Grads(dict[str, Tensor]):
    """Weight gradients by name; `wants` tells whose are asked for."""

    def __init__(self, wanted: Iterable[str]) -> None:
        super().__init__()
        self._wanted = frozenset(wanted)

    def wants(self, *names: str) -> bool:
        return any(n in self._wanted for n in names)

    def put(self, names: tuple[str, ...], rows: tuple[int, ...], joint: Tensor) -> None:
        for name, part in zip(names, joint.split(rows)):
            if name in self._wanted:
                self[name] = part

    def product(self, names: tuple[str, ...], rows: tuple[int, ...], dy: Tensor, x: Tensor, w: Weights,
                dtype: torch.dtype | None = None) -> None:
        """dy' x [sum of rows, K], from dy [T, sum of rows] and x [T, K]; dtype: of the weights, if it is another."""
        if dtype != torch.float32 or dy.dtype not in (torch.bfloat16, torch.float16):
            self.put(names, rows, w.weight_grad(names, dy, x).to(dtype or dy.dtype))
            return
        total = torch.empty(dy.shape[1], x.shape[1], dtype=dtype, device=x.device)
        w.add_weight_grad(names, dy, x, total, False)
        self.put(names, rows, total)


class Sums(Grads):
    """Weight gradients of tiles of rows, added up in fp32 at least. Of products only the whole sum is rounded; what
    comes by its name (of biases, norms) has been rounded tile by tile. `finish` hands them on."""

    def __init__(self, grads: Grads) -> None:
        super().__init__(grads._wanted)
        self._grads = grads
        self._types: dict[str, torch.dtype] = {}
        self._matrices: dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype, Tensor]] = {}

    def __setitem__(self, name: str, part: Tensor) -> None:
        if name in self:
            self[name].add_(part)
        else:
            super().__setitem__(name, part.to(torch.promote_types(part.dtype, torch.float32), copy=True))
        self._types[name] = part.dtype

    def product(self, names: tuple[str, ...], rows: tuple[int, ...], dy: Tensor, x: Tensor, w: Weights,
                dtype: torch.dtype | None = None) -> None:
        begun = names in self._matrices
        if not begun:
            wide = torch.promote_types(dy.dtype, torch.float32)
            total = torch.empty(sum(rows), x.shape[1], dtype=wide, device=x.device)
            self._matrices[names] = rows, dtype or dy.dtype, total
        w.add_weight_grad(names, dy, x, self._matrices[names][2], begun)

    def finish(self) -> None:
        """What was added up, in the gradients' types."""
        for names in list(self._matrices):
            rows, dtype, total = self._matrices.pop(names)
            self._grads.put(names, rows, total.to(dtype))
        for name, total in self.items():
            self._grads[name] = total.to(self._types[name])


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
        if w[self.weight].dtype != x.dtype:
            return _wide_norm(x, w[self.weight], self.eps, self.style)
        y, _, rstd = ops.rms_norm(x, w[self.weight], self.eps, self.style)
        return y, rstd

    def before(self, linears: Any, x: Tensor, w: Weights) -> tuple[Any, Tensor]:
        """The same, for these linear layers alone: y as their product takes it."""
        if not linears.alone or w[self.weight].dtype != x.dtype:
            return self.forward(x, w)
        return w.normed(linears.weights, x, w[self.weight], self.eps, self.style)

    def again(self, s: Tensor, w: Weights) -> Tensor:
        return self.forward(s, w)[0]

    def backward(self, dy: Tensor, s: Tensor, rstd: Tensor, w: Weights, grads: Grads, add: Tensor | None = None,
                 rebuild: bool = False, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        backward = _wide_norm_backward if w[self.weight].dtype != s.dtype else ops.rms_norm_backward
        dx, dw, y = backward(dy, s, w[self.weight], rstd, self.style, add, rebuild, dx=out)
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


def has(layer: nn.Module, name: str) -> bool:
    """Is there a module of this dotted name that does something?"""
    found = _find(layer, name)
    return found is not None and not isinstance(found, nn.Identity)


def child(layer: nn.Module, name: str) -> nn.Module:
    """The module of this dotted name.

    Raises:
        Unfit: there is none.
    """
    found = _find(layer, name)
    if found is None:
        raise Unfit(f"no template covers a {type(layer).__name__}: it has no {name}")
    return found


def _find(layer: Any, name: str) -> nn.Module | None:
    for part in name.split(".") if name else ():
        layer = getattr(layer, part, None)
    return layer if isinstance(layer, nn.Module) else None


def activation(fn: Any) -> int:
    """Which of ops' activations a module or function computes, found by trying it.

    Raises:
        Unfit: none of them.
    """
    if not callable(fn):
        raise Unfit("it names no activation")
    x = torch.linspace(-6, 6, 97)
    with torch.no_grad():
        y = fn(x)
    for code in (ops.SILU, ops.GELU_TANH, ops.GELU):
        if torch.allclose(y, ops.glu(x[None], torch.ones_like(x)[None], code)[0], rtol=1e-5, atol=1e-6):
            return code
    raise Unfit(f"its activation ({type(fn).__name__}) is none of SiLU, GELU and tanh-GELU")
