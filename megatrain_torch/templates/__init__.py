"""Templates: explicit forward and backward of a layer, with its weights passed in.

A template reads a module's structure once (`of`), and from then on runs any unit of that structure
without autograd. It says what it keeps between forward and backward, in three amounts:

saved       everything that backward needs and that costs a product to make again
selective   all but the MLP's gate|up, two thirds of the bytes for a sixth of the arithmetic
replay      the layer's input alone
"""
from __future__ import annotations

from .decoder import Decoder
from .parts import Unfit, Weights

__all__ = ["Decoder", "Unfit", "Weights"]
