"""Engines that own a portion of every unit each, on one GPU: together they have the bits of one (tests/test_owners.py)."""
from __future__ import annotations

from pathlib import Path

import pytest
from owners import HOMES, assert_bits_of_one, change_gradients, gathered, train

from megatrain_torch._core import STATES


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_owners_together_have_the_bits_of_one(tmp_path: Path, ranks: int, home: str, states: str) -> None:
    """Whole gradients, micro-batches and what the user changed; clipped."""
    with gathered(tmp_path) as make:
        whole, owners = make(ranks, home=home, states=states, device="cuda")
        for step, micros in enumerate((1, 2, 3)):
            train(whole, owners, step, micros)
            if step == 1:
                change_gradients([whole, *owners])
            tickets = [party.step(0.5, changed=step == 1) for party in (whole, *owners)]
            assert len({p.engine.norm(ticket) for p, ticket in zip((whole, *owners), tickets)}) == 1
            assert_bits_of_one(whole, owners)
