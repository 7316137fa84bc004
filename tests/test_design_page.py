"""docs/design.md and docs/numerics.md: each file that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("csrc", "megatrain_torch", "tests", "tools", "benchmarks", "docs")


@pytest.mark.parametrize("page", ["design", "numerics"])
def test_every_file_it_names_is_there(page: str) -> None:
    there = {f"/{p.relative_to(ROOT).as_posix()}" for folder in CODE for p in (ROOT / folder).rglob("*.*")}
    named = re.findall(r"`([\w/]+\.(?:c|h|cu|py|md))\b", (ROOT / f"docs/{page}.md").read_text())
    assert named and [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []
