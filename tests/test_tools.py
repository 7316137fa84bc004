"""tools/: the repository keeps its rules, rooms their order and pages their words."""
from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import megatrain_torch as mt
from megatrain_torch import ops
from megatrain_torch.base.modes import HOMES, KEEPS, LINKED
from megatrain_torch.model.choices import PLAN_KEYS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
api, rooms, rules = map(importlib.import_module, ("api_page", "rooms", "check_rules"))


# ---- rules ----

def test_the_repository_keeps_its_rules() -> None:
    assert [str(finding) for finding in rules.check(ROOT)] == []


# ---- rooms ----

def test_the_package_keeps_the_order() -> None:
    findings, seen = rooms.check(ROOT)
    assert [str(finding) for finding in findings] == []
    assert len(seen) > 300, "the rule sees the package's imports"


# ---- pages ----

def test_the_page_is_up_to_date() -> None:
    assert api.PAGE.read_text() == api.page(), "docs/api.md is old: make api"


def test_it_has_every_public_name() -> None:
    found = set(re.findall(r"^### (\S+)$", api.PAGE.read_text(), re.MULTILINE))
    public = {f"mt.{name}" for name in mt.__all__ if name != "__version__"}
    assert found == public | {f"ops.{name}" for name in api.own(ops)}


def test_a_public_name_without_a_docstring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mt.Trace, "more", lambda self: None, raising=False)
    with pytest.raises(SystemExit, match=r"Trace\.more is public and has no docstring"):
        api.page()


def test_homes_modes_and_keys_are_those_of_the_code() -> None:
    text = (ROOT / "docs/plans.md").read_text()
    for head, known in {"home": set(HOMES), "kept": {*KEEPS, LINKED}, "key": PLAN_KEYS}.items():
        rows = text.split(f"| {head} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
        assert {re.match(r"\| `?\"?([^`|\" ]+)", row)[1] for row in rows} == known
