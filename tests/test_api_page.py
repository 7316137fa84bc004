"""docs/api.md is what tools/api_page.py writes today, and says all that docstrings say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatrain_torch as mt
from megatrain_torch import ops

ROOT = Path(__file__).parents[1]

spec = importlib.util.spec_from_file_location("api_page", ROOT / "tools/api_page.py")
api = importlib.util.module_from_spec(spec)
sys.modules["api_page"] = api
spec.loader.exec_module(api)


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


def test_a_new_public_name_wants_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mt, "__all__", [*mt.__all__, "ops"])
    with pytest.raises(SystemExit, match=r"differ in ops"):
        api.page()


DOC = """Sum of a * b * c over [T, H].

    a = 1
    b = 2

Args:
    x, y: [T, H]; what goes on
        below. A dict of
        "key": its value, which
            goes on deeper.
        "other": one line.
    z: "this": prose, and
        "that": prose too,
        that goes on.

Returns:
    Two
    lines.

Source: A 2020, eq. 1.
"""
SHOWN = r"""Sum of a \* b \* c over \[T, H\].

    a = 1
    b = 2

**Arguments**

- `x, y`: \[T, H\]; what goes on
  below. A dict of
  - `"key"`: its value, which
    goes on deeper.
  - `"other"`: one line.
- `z`: "this": prose, and
  "that": prose too,
  that goes on.

**Returns:** Two lines.

**Source:** A 2020, eq. 1."""


def test_a_docstring_becomes_lists_and_code() -> None:
    assert api.markdown(DOC) == SHOWN


def test_signatures_break_between_parameters() -> None:
    def wide(self: SimpleNamespace, first: int, *, second: dict[str, int] | None = None, third: str = "x" * 60) -> None:
        pass

    shown = api.signature(wide, "wide")
    assert "    self: SimpleNamespace, first: int, *, second: dict[str, int] | None = None," in shown.splitlines()
    assert max(map(len, shown.splitlines())) <= api.LONGEST
