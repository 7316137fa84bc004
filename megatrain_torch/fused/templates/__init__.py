"""Templates: explicit forward and backward of a layer, with its weights passed in.

A template reads a module's structure once, and from then on runs any unit of that structure without autograd. It says
what it keeps between forward and backward, in five amounts:

saved       everything that backward needs and that costs a product to make again
selective   all but the MLP's gate|up, two thirds of the bytes for a sixth of the arithmetic
attention   the layer's input, and attention's output and log-sum-exp
replay      the layer's input alone
linked      attention's output and log-sum-exp without the input; a decoder layer makes its output again from its own
            (`again`), which is the input of the next
"""
from __future__ import annotations

import contextlib

from torch import nn

from .decoder import Decoder, Embedding, LoneNorm
from .parts import Sizes, Template, Unfit
from .weights import Coded, Weights


def template(module: nn.Module, device: str = "") -> Template:
    """The template that covers a module on such a device; else Unfit, whose text says why it is no decoder layer."""
    for kind in (Embedding, LoneNorm):
        with contextlib.suppress(Unfit):
            return kind(module)
    found = Decoder(module)
    if found.rounds and device == "cuda":
        raise Unfit("the package of its codes rounds activations to 8 bits on a GPU")
    return found


__all__ = ["Coded", "Sizes", "Template", "Unfit", "Weights", "template"]
