"""What a plan is asked for, and what it chooses."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .cost import LENT, Home
from .fleet import ALONE, Fleet


@dataclass(frozen=True)
class Wishes:
    """What is asked for; None: whatever is best.

    Attributes:
        tokens, seq: of a step; tokens is a multiple of seq.
        fused: templates run where they fit, and our own loss behind the head.
        homes: "ram", "vram", "arrive", "through", "disk" or "disk+weights" for all units; or of
            each by name, as a plan says it.
        activations: a mode for all windows that have it.
        nvme: bytes that states, weights and activations may take on disk; None: there is none.
        grads: "ram", or "none": gradients are kept nowhere. lent: buffers of a size for these, at
            the most.
        states: how AdamW's are kept.
        fleet: GPUs and machines, each of which makes such a step.
        delivery: of weights to a machine's GPUs, one of modes.DELIVERIES.
    """

    tokens: int
    seq: int
    fused: bool = True
    homes: str | dict[str, str] | None = None
    activations: str | None = None
    slots: int | None = None
    micro: int | None = None
    nvme: int | None = None
    grads: str = "ram"
    lent: int = LENT
    states: str = "fp32"
    fleet: Fleet = ALONE
    delivery: str = "whole"


class Choice(NamedTuple):
    """micro-batches; [unit] where it is at home; ring size; [window] activation mode; units at home
    in RAM whose updates pass through the device."""

    micro: int
    homes: tuple[Home, ...]
    ring: int
    modes: tuple[str, ...]
    through: frozenset[int] = frozenset()
