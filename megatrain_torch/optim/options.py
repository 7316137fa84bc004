"""Arguments of mt.AdamW."""
from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor

from ..base.errors import MegatrainError
from ..base.formats import check_states

REFUSED = ("amsgrad", "differentiable", "capturable")       # of torch's AdamW


def check_group(group: dict[str, Any]) -> None:
    """What a group asks for is done: whether it was made here, written later, or loaded.

    Raises:
        MegatrainError: it is not supported.
    """
    for name in REFUSED:
        if group.get(name):
            raise MegatrainError(f"AdamW: {name}=True is not supported; use torch.optim.AdamW on the host tensors for "
                                 "that")
    if not group.get("decoupled_weight_decay", True) and group["weight_decay"] != 0:
        raise MegatrainError(f"AdamW: weight_decay={group['weight_decay']} with decoupled_weight_decay=False is Adam's "
                             "decay, which is not supported")


def check_limit(max_grad_norm: float | None, in_backward: bool) -> None:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise MegatrainError(f"AdamW: max_grad_norm={max_grad_norm} must be > 0, or None for no clipping")
    if max_grad_norm is not None and in_backward:
        raise MegatrainError("AdamW: in_backward=True cannot clip: the norm is known only when backward ends")


def check_options(lr: float | Tensor, betas: Any, eps: float, weight_decay: float, max_grad_norm: float | None,
           states: str | None, in_backward: bool, nonfinite: str, torch_only: dict[str, Any]) -> None:
    for name in torch_only:
        if name not in (*REFUSED, "foreach", "fused"):
            raise TypeError(f"AdamW() got an unexpected keyword argument {name!r}")
    check_group(torch_only)
    if not isinstance(lr, numbers.Real | Tensor):
        raise MegatrainError(f"AdamW: lr={lr!r} must be a number")
    if not 0.0 <= float(lr) < math.inf:
        raise MegatrainError(f"AdamW: lr={lr} must be >= 0 and finite")
    if not all(0.0 <= b < 1.0 for b in betas) or eps < 0 or weight_decay < 0:
        raise MegatrainError(f"AdamW: betas={betas}, eps={eps}, weight_decay={weight_decay}: "
                             "betas in [0, 1), the others >= 0")
    check_limit(max_grad_norm, in_backward)
    check_states(states or "fp32")
    if nonfinite not in ("skip", "raise"):
        raise MegatrainError(f"AdamW: nonfinite={nonfinite!r}: 'skip' or 'raise'")
