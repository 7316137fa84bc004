"""Wherever units are at home, and however the work overlaps, training gives the same bits."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import placement
import pytest


# Each place in one of the types, in turn; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("name, dtype", [
    (n, d) for i, n in enumerate(n for n in placement.PLACES if placement.first_of(n) != n)
    for j, d in enumerate(placement.DTYPES) if parity.FULL or (i + j) % 2 == 0])
@pytest.mark.filterwarnings("ignore:.*could not be locked")
def test_every_placement_gives_the_same_bits(name: str, dtype: str, right: Callable[..., Any]) -> None:
    found = placement.difference(name, "cpu", placement.DTYPES[dtype], right(placement.first_of(name), dtype))
    assert found is None, found


@pytest.fixture(scope="module")
def right() -> Callable[..., Any]:
    known: dict[tuple[str, str], Any] = {}

    def get(name: str, dtype: str) -> Any:
        if (name, dtype) not in known:
            known[name, dtype] = placement.train(name, "cpu", placement.DTYPES[dtype])[0]
        return known[name, dtype]
    return get
