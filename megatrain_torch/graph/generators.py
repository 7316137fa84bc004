"""Random numbers that a window's forward draws: torch's generators on the CPU and on the compute device."""
from __future__ import annotations

from typing import Any

import torch


def random_state(device: torch.device) -> tuple[Any, ...]:
    """Where the generators stand."""
    return tuple([g.get_state() for g in _generators(device)])


def set_random_state(device: torch.device, s: tuple[Any, ...]) -> None:
    """They go on from there."""
    for g, state in zip(_generators(device), s):
        g.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    cpu = torch.default_generator
    return [cpu, torch.cuda.default_generators[device.index]] if device.type == "cuda" else [cpu]
