"""The one exception of this package, and arguments that it refuses by name, before anything is done."""
from __future__ import annotations

from typing import Any

import torch

from .._core import MegatrainError


def check_count(value: Any, what: str, least: int = 1) -> None:
    """Raises: MegatrainError: not a whole number, Python's or numpy's, or less; the message names `what`."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else value.__index__()
    if number is None or number < least:
        raise MegatrainError(f"{what}={value!r}: a whole number, at least {least}, is needed")


def check_dtype(dtype: Any) -> None:
    """Raises: MegatrainError: neither None nor a torch.dtype of floating point."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise MegatrainError(f"dtype={dtype!r}: give a torch.dtype of floating point, such as torch.bfloat16")
