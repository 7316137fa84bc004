"""docs/plans.md has every word that a plan may say, and no other."""
from __future__ import annotations

import re
from pathlib import Path

from megatrain_torch.base.modes import DISK, GRADS, HOMES, HOST, KEEPS, LINKED
from megatrain_torch.model.choices import PLAN_KEYS

PAGE = (Path(__file__).parents[1] / "docs/plans.md").read_text()


def table(head: str) -> list[str]:
    """What stands in quotes in the first column of the table with this head."""
    rows = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [re.match(r"\| `?\"?([^`|\" ]+)", row)[1] for row in rows]


def test_homes_modes_and_keys_are_those_of_the_code() -> None:
    assert set(table("home")) == set(HOMES)
    assert set(table("kept")) == {*KEEPS, LINKED}
    assert set(table("key")) == PLAN_KEYS


def test_where_what_is_kept_waits_is_told() -> None:
    ways = {"+" + mode.partition("+")[2] for mode in (*HOST, *DISK)}
    assert [way for way in ways if way not in PAGE] == []
    assert [word for word in GRADS if f"`{word}`" not in PAGE] == []
