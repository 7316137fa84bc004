"""Streamed equals plain torch, bit for bit, in whatever else people do: see situations.py."""
from __future__ import annotations

import parity
import pytest
from situations import SITUATIONS

RUNS = [pytest.param(name, o, id=f"{name}-{o.name()}")
        for i, name in enumerate(SITUATIONS) for o in parity.options_for(i)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, options", RUNS)
def test_situation_equals_plain_bitwise(name: str, options: parity.Options) -> None:
    parity.check(SITUATIONS[name], options)
