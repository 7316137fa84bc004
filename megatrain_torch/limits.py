"""Bytes, as people write them."""
from __future__ import annotations

import re

from .errors import MegatrainError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: int | float | str | None, what: str) -> int | None:
    """`24 * 2**30`, "24GiB", "1.5 TB" -> bytes; None stays None.

    Raises:
        MegatrainError: not a size; the message says what was given for `what`.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return int(value)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise MegatrainError(f"{what}={value!r} is not a size: give bytes, or a string such as '24GiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def show_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"
