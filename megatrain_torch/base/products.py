"""How the products of decoder layers are computed, as data: mt.stream(products=...).

    "bf16"    of the weights' own type, as the model's own code has them
    "fp8"     of operands rounded to E4M3 codes with a scale for each row, in layers that a template runs; all else
              as before: embedding, head, loss, norms, router, experts, attention, and the first and the last layer
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import torch

from .errors import MegatrainError

PRODUCTS = ("bf16", "fp8")
LEAST_CAPABILITY = (8, 9)        # of a CUDA device that multiplies such codes

T = TypeVar("T")


def check_products(products: str, compute: str) -> str:
    """Raises: MegatrainError: there is no such word, or no template that would go by it."""
    if products not in PRODUCTS:
        raise MegatrainError(f"products={products!r}: use {' or '.join(map(repr, PRODUCTS))}")
    if products == "fp8" and compute not in ("auto", "fused"):
        raise MegatrainError(f"products='fp8', compute={compute!r}: only templates make such products; use "
                             "compute='fused'")
    return products


def check_device(products: str, device: torch.device) -> None:
    """Raises: MegatrainError: the device has no such products."""
    if products == "bf16" or device.type != "cuda":
        return
    has = torch.cuda.get_device_capability(device)
    if has < LEAST_CAPABILITY:
        raise MegatrainError(f"products='fp8': {torch.cuda.get_device_name(device)} has compute capability "
                             f"{has[0]}.{has[1]}, and products of 8-bit codes come with "
                             f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}; use products='bf16'")


def inner(layers: Sequence[T]) -> Sequence[T]:
    """Those of a model's decoder layers, in their order, whose products are of codes: all but the first and the last,
    which published recipes leave as they are."""
    return layers[1:-1]


def check_layers(name: str, layers: Collection[object], types: Collection[torch.dtype]) -> None:
    """layers: those of a model whose products would be of codes. types: of their matrices.

    Raises:
        MegatrainError: there are none, or theirs are not bf16: nothing would be as it was asked for.
    """
    if not layers:
        raise MegatrainError(f"products='fp8': {name} has no layer for them: they are made in decoder layers that a "
                             "template covers, without codes or LoRA, by linear layers whose sizes are multiples of "
                             "16, but for the first and the last; use products='bf16'")
    if other := sorted(str(t) for t in types if t != torch.bfloat16):
        raise MegatrainError(f"products='fp8': layers of {name} have weights of type {other[0]}, and codes are made of "
                             "bf16: dtype=torch.bfloat16")
