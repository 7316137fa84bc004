"""How AdamW's states may be kept, as data: the formats of mt.AdamW(states=...). What the bytes say: docs/numerics.md.

    "fp32"       moments in fp32, and 16 bits that continue a bf16 weight: an fp32 master, exactly
    "8bit"       moments in a byte each, with scales for every 128 elements; the master as before
    "8bit-lo8"   the same, with 8 bits that continue a bf16 weight, rounded stochastically
    "8bit-sr"    the same, without any: bf16 weights are rounded stochastically
"""
from __future__ import annotations

import torch

from .errors import MegatrainError

GROUP = 128                 # elements that share the scales of 8-bit moments: csrc/core/states.h
LOW_BYTES = {"fp32": 2, "8bit": 2, "8bit-lo8": 1, "8bit-sr": 0}     # of a bf16 parameter, beside its weight
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
    """Of a bf16 parameter with a bf16 gradient: bytes to the device for an update there. All but the gradient come
    back."""
    return moved_bytes(states) / 2 + 1


def moved_bytes(states: str) -> float:
    """Of a bf16 parameter with a bf16 gradient, read plus written in one update."""
    kept = 2 + LOW_BYTES[states] + moment_bytes(states, torch.bfloat16, GROUP) / GROUP
    return 2 * kept + 2
