"""Whether a run asks for kernels that give the same bits each time."""
from __future__ import annotations

import torch


def repeating() -> bool:
    """Are kernels asked for that give the same bits each time? With warn_only torch's others are run, and warn."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
