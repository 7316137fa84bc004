"""States of all generators of random numbers that a run uses."""
from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Of Python, NumPy, torch on the CPU, and on each CUDA device that was used."""
    numpy = sys.modules.get("numpy")
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        name, keys, *rest = states["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        for index, state in enumerate(states["cuda"][:torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
