"""Fused layers against plain torch: what test_fused.py and test_moe.py share.

A *run* trains one tiny model for a few steps and keeps what it saw: losses, gradients of the first step, weights at
the end. Fused results differ from the module's own code in the last bits, so runs are compared by norms.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import parity
import torch
import zoo
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.wrap import runtime_of

Build = Callable[[], nn.Module]
Batch = Callable[[int], dict[str, Tensor]]

# Relative 2-norm of a gradient's error. fp32 rounds by 6e-8; the longest way of a gradient here is some 60 roundings
# (three layers, each a sum over 12 to 128 products in another order than torch's), and cancellation in softmax and
# norms makes a few of them count tenfold: up to 1.3e-6 was seen. A wrong formula is off by 1e-2 and more.
TOLERANCE = 5e-6
# What may be nothing but rounding (the gradient of a bias that attention does not see) is measured against the largest
# gradient of the model.
FLOOR = 2e-2
# Losses and weights after three steps. AdamW divides by the root of v, so what is small in a gradient moves its weight
# as far as what is large, its error with it; then the steps amplify each other: a tenfold of 5e-6 was seen (Gemma 3).
# A gradient that is left out in one step moves its weights by 1e-2 of themselves.
TRAINED = 2e-4


@dataclasses.dataclass
class Run:
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    grads: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    codes: dict[str, str] = dataclasses.field(default_factory=dict)


def stream(model: nn.Module, keep: str = "saved", compute: str = "fused", slots: int = 2, **debug: Any) -> nn.Module:
    return mt.stream(model, "cpu", compute=compute,
                     plan={"activations": keep, "slots": slots, "debug": {"poison": True, **debug}})


def codes(model: nn.Module) -> dict[str, str]:
    """Whose code runs each decoder layer."""
    return {w.name: w.code for w in runtime_of(model).windows if "layers." in w.name}


def all_fused(found: dict[str, str]) -> None:
    assert found and set(found.values()) == {"template"}, f"not all layers are fused: {found}"


def none_fused(found: dict[str, str], why: str) -> None:
    assert found, "there are no layers"
    for name, code in found.items():
        assert code.startswith("its own (") and why in code, f"{name}: {code!r} does not say {why!r}"


def train(model: nn.Module, batch: Batch, optimizer: Any, steps: int = 3, accumulate: int = 1,
          loss: Callable[..., Tensor] = zoo.model_loss) -> Run:
    run = Run()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = optimizer(params, lr=1e-2, weight_decay=0.1, eps=1e-4)
    for step in range(steps):
        for micro in range(accumulate):
            value = loss(model, batch(step * accumulate + micro)) / accumulate
            value.backward()
            run.losses.append(value.detach())
        run.grads = run.grads or {n: parity.frozen(p.grad) for n, p in model.named_parameters()}
        opt.step()
        opt.zero_grad()
    run.weights = {n: parity.frozen(p) for n, p in model.named_parameters()}
    return run


def plain(build: Build, batch: Batch, **options: Any) -> Run:
    parity.seed()
    return train(build(), batch, torch.optim.AdamW, **options)


def fused(build: Build, batch: Batch, keep: str = "saved", engine: dict[str, Any] | None = None, **options: Any) -> Run:
    parity.seed()
    model = stream(build(), keep, **(engine or {}))
    run = train(model, batch, mt.AdamW, **options)
    run.codes = codes(model)
    mt.unstream(model)
    return run


def error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """|b - a| / |a|, 2-norms in fp64; |a| counts for floor at least."""
    a, b = a.double(), b.double()
    return float((b - a).norm() / max(float(a.norm()), floor, 1e-30))


def grads_agree(truth: dict[str, Tensor | None], found: dict[str, Tensor | None], limit: float = TOLERANCE) -> None:
    assert set(truth) == set(found)
    largest = max([float(t.double().norm()) for t in truth.values() if t is not None], default=0.0)
    for name, t in truth.items():
        f = found[name]
        assert (t is None) == (f is None), f"{name}: plain {'has no' if t is None else 'has a'} gradient"
        if t is not None:
            off = error(t, f, FLOOR * largest)
            assert off <= limit, f"gradient of {name} is off by {off:.1e}, more than {limit:.0e}"


def agree(truth: Run, found: Run, limit: float = TOLERANCE) -> None:
    """The first step's losses and gradients within `limit`, what comes after within TRAINED."""
    for i, (a, b) in enumerate(zip(truth.losses, found.losses, strict=True)):
        assert error(a, b) <= (TRAINED if i else limit), f"loss {i}: plain {a.item():.9g}, fused {b.item():.9g}"
    grads_agree(truth.grads, found.grads, limit)
    for name, t in truth.weights.items():
        off = error(t, found.weights[name])
        assert off <= TRAINED, f"{name} is off by {off:.1e} after training, more than {TRAINED:.0e}"
