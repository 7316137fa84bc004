"""Arguments of mt.AdamW."""
from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor

from ..base.errors import MegatrainError
from ..base.formats import check_states


def check_options(lr: float | Tensor, betas: Any, eps: float, weight_decay: float, max_grad_norm: float | None,
           states: str | None, in_backward: bool, nonfinite: str, torch_only: dict[str, Any]) -> None:
    refused = {"amsgrad", "differentiable", "capturable"}
    for name, value in torch_only.items():
        if name not in refused | {"foreach", "fused"}:
            raise TypeError(f"AdamW() got an unexpected keyword argument {name!r}")
        if value and name in refused:
            raise MegatrainError(f"AdamW({name}=True) is not supported; "
                                 "use torch.optim.AdamW on the host tensors for that")
    if not isinstance(lr, numbers.Real | Tensor):
        raise MegatrainError(f"AdamW: lr={lr!r} must be a number")
    if not 0.0 <= float(lr) < math.inf:
        raise MegatrainError(f"AdamW: lr={lr} must be >= 0 and finite")
    if not all(0.0 <= b < 1.0 for b in betas) or eps < 0 or weight_decay < 0:
        raise MegatrainError(f"AdamW: betas={betas}, eps={eps}, weight_decay={weight_decay}: "
                             "betas in [0, 1), the others >= 0")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise MegatrainError(f"AdamW: max_grad_norm={max_grad_norm} must be > 0, or None for no clipping")
    check_states(states or "fp32")
    if in_backward and max_grad_norm is not None:
        raise MegatrainError("AdamW: in_backward=True cannot clip: the norm is known only when backward ends")
    if nonfinite not in ("skip", "raise"):
        raise MegatrainError(f"AdamW: nonfinite={nonfinite!r}: 'skip' or 'raise'")
