"""JSON that somebody else may have written: read whole, or refused with the file's name and what is wrong in it.

Python's own reader takes more than JSON is (NaN, a key twice) and raises what it likes: RecursionError where lists lie
in lists by the thousand, ValueError for numbers of five thousand digits. What is read here holds null, true, false,
finite numbers of at most 64 bits, words, lists and tables.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .errors import MegatrainError

MOST = 2**63 - 1
DIGITS = 20                          # of a whole number: more is no 64 bits
DIMS = 64                            # of a tensor
SHOWN = 60                           # characters of a wrong value that a message has
_PLAIN = re.compile(r"[^/\\\0]+")


def parsed(data: bytes, where: str | Path) -> Any:
    """The value of a JSON text. Raises MegatrainError where it is none, or has what no file of ours has."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_table, parse_constant=_constant, parse_int=_whole,
                          parse_float=_real)
    except RecursionError:
        raise MegatrainError(f"{where}: lists or tables lie in one another too deep") from None
    except (ValueError, MemoryError) as why:
        raise MegatrainError(f"{where}: {shown(why)}") from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(n for n in names if names.count(n) > 1))} is there twice")
    return found


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _whole(digits: str) -> int:
    if len(digits) > DIGITS or not -MOST - 1 <= int(digits) <= MOST:
        raise ValueError(f"{shown(digits)} does not fit 64 bits")
    return int(digits)


def _real(digits: str) -> float:
    if not math.isfinite(found := float(digits)):
        raise ValueError(f"{shown(digits)} is beyond what a number holds")
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
    return isinstance(value, list) and len(value) <= DIMS and all(map(is_count, value))


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
