"""Modules of packages that multiply with weights of codes, as the plain nn.Linear that they stand for.

A package's product is its own kernel's, of its own arguments: nothing that can be followed on fake tensors. What it
computes is taken from it: a linear layer's product with the weights that its codes stand for, where the module is of
the package's own class, runs that class's own code and computes in the layer's type. That those weights are the
package's, and the numbers its own, is seen on the module's data (trial.py).
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base.codes import format_of, multiplies
from .templates import Unfit


@contextlib.contextmanager
def plain_linears(module: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> Iterator[list[object]]:
    """Inside, a package's linear layers multiply with these weights, by name. Gives what is put in for that.

    Args:
        dtype: in which the layer computes.

    Raises:
        Unfit: one is not as its package has it.
    """
    put: list[tuple[nn.Module, object]] = []
    try:
        for prefix, m in module.named_modules():
            format = format_of(dict.get(m._parameters, "weight"))
            if format is None:
                continue
            if why := multiplies(m, dtype):
                raise Unfit(f"{prefix}: {why}")
            if format.linear:
                put.append((m, _linear(m, weights[f"{prefix}.weight"])))
                vars(m)["forward"] = put[-1][1]
        yield [forward for _, forward in put]
    finally:
        for m, _ in put:
            del vars(m)["forward"]


def _linear(module: nn.Module, weight: Tensor) -> object:
    def forward(x: Tensor) -> Tensor:
        return F.linear(x, weight, module.bias)

    return forward


__all__ = ["plain_linears"]
