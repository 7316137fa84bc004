"""The words that mt.stream, mt.plan and mt.AdamW take, as data: what is kept where, in which format, and how layers
multiply.

activations, what a window keeps between forward and backward
    "replay" its input alone; "attention" attention's output and log-sum-exp besides; "selective" all but the largest
    part; "saved" everything that backward needs. "linked": attention's output and log-sum-exp in place of the input,
    which the layer before makes again from what it keeps, without attention.
    And where, the input too: nothing: on the device. "+host": in host memory. "+disk": in a file, by way of a few bays
    of host memory. So "selective+host", "replay+disk".

states, how AdamW's are kept (what the bytes say: docs/numerics.md)
    "fp32"       moments in fp32, and 16 bits that continue a bf16 weight: an fp32 master, exactly
    "8bit"       moments in a byte each, with scales for every 128 elements; the master as before
    "8bit-lo8"   the same, with 8 bits that continue a bf16 weight, rounded stochastically
    "8bit-sr"    the same, without any: bf16 weights are rounded stochastically

products, of decoder layers
    "bf16"    of the weights' own type, as the model's own code has them
    "fp8"     of operands rounded to E4M3 codes with a scale for each row, in layers that a template runs; all else
              as before: embedding, head, loss, norms, router, experts, attention, and the first and the last layer
"""
from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

import torch

from .. import _core
from .errors import MegatrainError

KEEPS = ("replay", "attention", "selective", "saved")        # least first
LINKED = "linked"
HOST = (*(f"{keep}+host" for keep in KEEPS), "linked+host")
DISK = (*(f"{keep}+disk" for keep in KEEPS), "linked+disk")
MODES = (*KEEPS, LINKED, *HOST, *DISK)
HOMES = ("ram", "vram", "arrive", "through", "disk", "disk+weights")        # of a unit: weights, gradients and states
DISKS = ("disk", "disk+weights")            # of which states are in a file; weights too
DELIVERIES = ("whole", "shards")            # a rank fetches all weights; or its portion, and gathers the others'
GRADS = ("ram", "none")     # where gradients wait for their update: at home with their unit, or nowhere


class Mode(NamedTuple):
    """A mode's word, taken apart."""

    keep: str           # one of KEEPS, or LINKED
    host: bool          # what is kept leaves the device, the window's input too
    disk: bool          # for a file

    @property
    def saved(self) -> Mode:
        """All that backward needs, there."""
        return self._replace(keep="saved")

    def __str__(self) -> str:
        return self.keep + ("+disk" if self.disk else "+host" if self.host else "")


@functools.cache
def read(mode: str) -> Mode:
    keep, _, where = mode.partition("+")
    return Mode(keep, bool(where), where == "disk")


# ---- states ----

GROUP, LOW_BYTES = _core.GROUP, _core.LOW_BYTES
FORMATS = tuple(LOW_BYTES)
SHOWN = ("fp32", "8bit", "8bit-sr")     # that help and refusals name; the others are taken, and loaded, all the same


def check_states(states: str) -> str:
    """Raises: MegatrainError: there is no such format."""
    if states not in FORMATS:
        raise MegatrainError(f"states={states!r}: use {', '.join(map(repr, SHOWN[:-1]))} or {SHOWN[-1]!r}")
    return states


def master_bytes(states: str, kind: torch.dtype) -> int:
    """Per element of a parameter, beside its weight."""
    return {torch.bfloat16: LOW_BYTES[states], torch.float16: 4}.get(kind, 0)


def moment_bytes(states: str, kind: torch.dtype, numel: int) -> int:
    """Of a parameter: both moments, their scales counted in."""
    if kind == torch.float64:
        return 0
    return 8 * numel if states == "fp32" else 2 * numel + 8 * -(-numel // GROUP)


def through_up(states: str) -> float:
    """Of a bf16 parameter and gradient: bytes up for an update on the device; all but the gradient come back."""
    return moved_bytes(states) / 2 + 1


def moved_bytes(states: str) -> float:
    """Of a bf16 parameter with a bf16 gradient, read plus written in one update."""
    kept = 2 + LOW_BYTES[states] + moment_bytes(states, torch.bfloat16, GROUP) / GROUP
    return 2 * kept + 2


# ---- products ----

PRODUCTS = ("bf16", "fp8")
LEAST_CAPABILITY = (8, 9)        # of a CUDA device that multiplies such codes

T = TypeVar("T")


def check_products(products: str, compute: str, device: torch.device | None = None) -> str:
    """Raises: MegatrainError: there is no such word, no template that would go by it, or none such on the device."""
    if products not in PRODUCTS:
        raise MegatrainError(f"products={products!r}: use {' or '.join(map(repr, PRODUCTS))}")
    if products == "fp8" and compute not in ("auto", "fused"):
        raise MegatrainError(f"products='fp8', compute={compute!r}: only templates make such products; use "
                             "compute='fused'")
    if products == "fp8" and device is not None and device.type == "cuda" \
            and (has := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise MegatrainError(f"products='fp8': {torch.cuda.get_device_name(device)} has compute capability "
                             f"{has[0]}.{has[1]}, and products of 8-bit codes come with "
                             f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}; use products='bf16'")
    return products


def inner(layers: Sequence[T]) -> Sequence[T]:
    """Layers whose products are of codes: all but the first and the last, as published recipes have it."""
    return layers[1:-1]


def check_layers(name: str, layers: Collection[object], types: Collection[torch.dtype]) -> None:
    """Raises MegatrainError where a model has no layers whose products would be of codes, or where their matrices are
    of other types than bf16: nothing would be as it was asked for."""
    if not layers:
        raise MegatrainError(f"products='fp8': {name} has no layer for them: they are made in decoder layers that a "
                             "template covers, without codes or LoRA, by linear layers whose sizes are multiples of "
                             "16, but for the first and the last; use products='bf16'")
    if other := sorted(str(t) for t in types if t != torch.bfloat16):
        raise MegatrainError(f"products='fp8': layers of {name} have weights of type {other[0]}, and codes are made of "
                             "bf16: dtype=torch.bfloat16")


def repeating() -> bool:
    """Are kernels asked for that give the same bits each time? With warn_only torch's others are run, and warn."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
