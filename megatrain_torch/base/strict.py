"""JSON that somebody else may have written: read, or refused with the file's name and what is wrong in it."""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import MegatrainError

MOST = 2**63 - 1                     # of a size: what 64 bits hold
_DIMS = 64                           # of a tensor
SHOWN = 60                           # characters of a wrong value that a message has
_PLAIN = re.compile(r"[^/\\\0]+")


def parsed(data: bytes, where: str | Path) -> Any:
    """The value of a JSON text. Raises MegatrainError where it is none."""
    try:
        return json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as why:      # numbers of thousands of digits; lists in lists by the thousand
        raise MegatrainError(f"{where}: {shown(why)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is there twice")
        found[name] = value
    return found


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except RecursionError:
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# ---- what a value must be ------------------------------------------------------------------------

def is_count(value: Any) -> bool:
    """A whole number, 0 or more; True is none."""
    return type(value) is int and 0 <= value <= MOST


def is_counts(value: Any) -> bool:
    """A list of whole numbers, not too long."""
    return isinstance(value, list) and len(value) <= _DIMS and all(map(is_count, value))


def is_shape(value: Any) -> bool:
    """Sizes whose product, zeros left out, is a number of 64 bits."""
    return is_counts(value) and math.prod(n for n in value if n) <= MOST


def is_plain_name(value: Any) -> bool:
    """The name of a file in a folder: it leads nowhere else."""
    if not isinstance(value, str) or value in (".", "..") or not _PLAIN.fullmatch(value):
        return False
    return len(value.encode("utf-8", "replace")) <= 255 and value == value.encode("utf-8", "replace").decode()


def table(value: Any, where: str) -> dict[str, Any]:
    """Raises: MegatrainError: it is no table."""
    if not isinstance(value, dict):
        raise MegatrainError(f"{where}: a table is needed, not {shown(value)}")
    return value


def field(found: dict[str, Any], name: str, fits: Callable[[Any], bool], what: str, where: str) -> Any:
    """A table's value. Raises MegatrainError, which says what is needed, if there is none, or it does not fit."""
    if name not in found:
        raise MegatrainError(f"{where} has no {name!r}: {what} is needed")
    if not fits(found[name]):
        raise MegatrainError(f"{where}: {name}={shown(found[name])}: {what} is needed")
    return found[name]
