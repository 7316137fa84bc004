"""Linear layers of a decoder layer as a template meets them: plain, of weights that are codes, with LoRA beside them.

    y = x W' + b + s (x A') B'      t = s x A'        dt = s dy B
    dx = dy W + dt A                dA = dt' x        dB = dy' t

A [r, K] and B [N, r] are PEFT's, W is frozen or trained like any other. Products of a row's width with r are bound by
memory: layers over the same input have theirs in one. They are made in the layer's type, of adapters rounded to it, as
autocast makes them; sums are in fp32, and so are gradients of adapters in fp32.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import ops
from ...base.codes import Coding, coded, format_of
from .parts import Unfit, child
from .weights import Grads, Weights

WRAPPERS = ("Linear", "Linear4bit", "Linear8bitLt")          # of peft.tuners.lora


class Adapter(NamedTuple):
    """LoRA's of one linear layer. a, b: names of its matrices. rounds: what it adds is rounded before, not after."""

    a: str
    b: str
    rank: int
    scale: float
    rounds: bool


def unwrapped(layer: nn.Module, name: str) -> tuple[str, nn.Module, list[Adapter], list[str]]:
    """The linear layer of this name, by the name it has inside of a wrapper; what adapters add to it, and the names of
    all parameters that adapters have, those that are not in use among them. Unfit where they are no plain LoRA."""
    module: Any = child(layer, name)
    kind = type(module)
    if not (kind.__module__.startswith("peft.tuners.lora.") and kind.__name__ in WRAPPERS
            and hasattr(module, "lora_A")):
        return name, module, [], []
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
    found = [Adapter(f"{name}.lora_A.{key}.weight", f"{name}.lora_B.{key}.weight", module.lora_A[key].out_features,
                     float(module.scaling[key]), kind.__name__ != "Linear") for key in active]
    return f"{name}.base_layer", child(layer, f"{name}.base_layer"), found, [f"{name}.{n}" for n in own]


def codings_of(layer: nn.Module) -> dict[str, Coding]:
    """How each weight of codes is made, by its name; Unfit where one cannot be."""
    found = {}
    for name, _, p, format in coded(layer):
        coding = format.coding(p)
        if coding is None:
            raise Unfit(f"its weights are codes: {format.name}")
        found[name] = coding
    return found


def dtype_of(layer: nn.Module, codings: dict[str, Coding]) -> torch.dtype | None:
    """The type of the weights that a layer multiplies with; None: it has no matrix. Unfit: those that codes stand for
    are of several. Of parameters that are numbers matrices count first, adapters' last."""
    types = {c.dtype for c in codings.values() if c.dtype is not None}
    if len(types) > 1:
        raise Unfit(f"its codes stand for weights of several types: {', '.join(sorted(map(str, types)))}")
    own = [(".lora_" in name, p.dim() < 2, p.dtype) for name, p in layer.named_parameters()
           if p.is_floating_point() and p.dtype.itemsize > 1]
    plain = sorted(own, key=lambda item: item[:2])
    return next(iter(types), None) or (plain[0][2] if plain else None)


class Beside:
    """The adapters of layers that stand side by side: t and dt [T, sum of ranks], each at its own rows of y."""

    def __init__(self, of: list[tuple[slice, Adapter]]) -> None:
        ends = torch.tensor([0, *(a.rank for _, a in of)]).cumsum(0).tolist()
        self.each = [(slice(*ends[i:i + 2]), rows, a) for i, (rows, a) in enumerate(of)]
        self.downs, self.sizes = tuple(a.a for _, a in of), tuple(a.rank for _, a in of)

    def _down(self, w: Weights, dtype: torch.dtype) -> Tensor:
        """A [sum of ranks, K]."""
        return torch.cat([w[n].to(dtype) for n in self.downs])

    def _scaled(self, t: Tensor) -> Tensor:
        for ranks, _, adapter in self.each:
            if adapter.scale != 1.0:
                t[:, ranks].mul_(adapter.scale)
        return t

    def _inner(self, x: Tensor, w: Weights) -> Tensor:
        return self._scaled(torch.mm(x, self._down(w, x.dtype).t()))

    def _outer(self, dy: Tensor, w: Weights) -> Tensor:
        dt = torch.empty(dy.shape[0], sum(self.sizes), dtype=dy.dtype, device=dy.device)
        for ranks, rows, adapter in self.each:
            torch.mm(dy[:, rows], w[adapter.b].to(dy.dtype), out=dt[:, ranks])
        return self._scaled(dt)

    def add(self, y: Tensor, x: Tensor, w: Weights) -> None:
        """y += t B'."""
        t = self._inner(x, w)
        for ranks, rows, adapter in self.each:
            y[:, rows].addmm_(t[:, ranks], w[adapter.b].to(x.dtype).t())

    def add_grad(self, dx: Tensor, dy: Tensor, w: Weights) -> None:
        """dx += dt A."""
        dx.addmm_(self._outer(dy, w), self._down(w, dy.dtype))

    def grads(self, dy: Tensor, x: Tensor, w: Weights, grads: Grads) -> None:
        if grads.wants(*self.downs):
            grads.product(self.downs, self.sizes, self._outer(dy, w), x, w, w[self.downs[0]].dtype)
        ups = [(ranks, rows, a.b) for ranks, rows, a in self.each if grads.wants(a.b)]
        t = self._inner(x, w) if ups else x
        for ranks, rows, b in ups:
            grads.product((b,), (w[b].shape[0],), dy[:, rows], t[:, ranks], w, w[b].dtype)


class Linears:
    """One or more linear layers over the same input: x [T, K] -> [T, sum of rows].

    Attributes:
        weights, biases: their names. rows: of each. adapters: by the name of a weight. names: of all parameters.
        alone: only the products with the joint matrix read its input, and, where there are no biases that learn, the
            gradient of its output.
    """

    def __init__(self, layer: nn.Module, *names: str) -> None:
        found = [unwrapped(layer, n) for n in names]
        modules: list[Any] = [m for _, m, _, _ in found]
        for name, m in zip(names, modules):
            if type(m) is not nn.Linear and format_of(dict.get(m._parameters, "weight")) is None:
                raise Unfit(f"{name} is a {type(m).__name__}, not a plain nn.Linear")
        self.rows = tuple(m.out_features for m in modules)
        self.inputs = modules[0].in_features
        self.weights = tuple(f"{n}.weight" for n, _, _, _ in found)
        biased = [m.bias is not None for m in modules]
        if any(biased) and not all(biased):
            raise Unfit(f"only some of {', '.join(names)} have a bias")
        self.biases = tuple(f"{n}.bias" for n, _, _, _ in found) if biased[0] else ()
        self.adapters = {w: own for w, (_, _, own, _) in zip(self.weights, found) if own}
        self.names = (*self.weights, *self.biases, *(n for *_, more in found for n in more))
        own = dict(layer.named_parameters())
        if len({own[n].dtype for adapters in self.adapters.values() for a in adapters for n in (a.a, a.b)}) > 1:
            raise Unfit(f"adapters of {', '.join(names)} are of several types")
        beside, begin = [], 0
        for weight, rows in zip(self.weights, self.rows):
            beside += [(slice(begin, begin + rows), a) for a in self.adapters.get(weight, ())]
            begin += rows
        self._beside = Beside(beside) if beside else None
        self.alone = not beside

    def forward(self, x: Tensor, w: Weights) -> Tensor:
        y = w.product(self.weights, x, self.biases)
        if self._beside is not None:
            self._beside.add(y, x, w)
        return y

    def forward_onto(self, base: Tensor, x: Tensor, w: Weights, factor: float) -> Tensor:
        """base + factor * forward(x), added inside the product where that is all."""
        if self.biases or self._beside is not None:
            return torch.add(base, self.forward(x, w), alpha=factor)
        return w.product_onto(self.weights, base, x, factor)

    def input_grad(self, dy: Tensor, w: Weights) -> Tensor:
        dx = w.input_grad(self.weights, dy)
        if self._beside is not None:
            self._beside.add_grad(dx, dy, w)
        return dx

    def weight_grads(self, dy: Tensor, x: Tensor, w: Weights, grads: Grads) -> None:
        if grads.wants(*self.weights):
            grads.product(self.weights, self.rows, dy, x, w)
        if self.biases and grads.wants(*self.biases):
            grads.put(self.biases, self.rows, ops.column_sum(dy))
        if self._beside is not None:
            self._beside.grads(dy, x, w, grads)


_NAMES = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"),
          (("input_linear",), "output_linear"))


def gated_linears(layer: nn.Module, name: str) -> tuple[Linears, Linears]:
    """What makes g|u, and what reads act(g) * u; Unfit where the module is not gated."""
    mlp = child(layer, name)
    names, down = next((n for n in _NAMES if hasattr(mlp, n[0][0])), _NAMES[0])
    gu, down = Linears(layer, *(f"{name}.{n}" for n in names)), Linears(layer, f"{name}.{down}")
    if sum(gu.rows) != 2 * down.inputs:
        raise Unfit(f"{name} has {gu.rows} rows before {down.inputs} columns: not gated")
    return gu, down
