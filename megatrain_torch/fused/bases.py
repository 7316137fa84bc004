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
from .proof.case import Refused, put


@contextlib.contextmanager
def plain_linears(module: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Inside, a package's linear layers multiply with these weights, by name. dtype: in which the layer computes.

    Raises:
        Refused: one is not as its package has it.
    """
    with contextlib.ExitStack() as stack:
        for prefix, m in module.named_modules():
            format = format_of(dict.get(m._parameters, "weight"))
            if format is None:
                continue
            if why := multiplies(m, dtype):
                raise Refused(f"{prefix}: {why}")
            if format.linear:
                stack.enter_context(put(vars(m), {"forward": _linear(m, weights[f"{prefix}.weight"])}))
        yield


def _linear(module: nn.Module, weight: Tensor) -> object:
    def forward(x: Tensor) -> Tensor:
        return F.linear(x, weight, module.bias)

    return forward


__all__ = ["plain_linears"]
