"""No op counts elements in 32 bits: wide.py, on the CPU. Next to nothing of the gigabytes is ever touched."""
from __future__ import annotations

import pytest
import wide


@pytest.mark.parametrize("op", wide.OPS)
def test_elements_beyond_two_to_the_31_are_found(op: str) -> None:
    assert wide.OPS[op]("cpu")
