"""examples/notebook.ipynb, cell by cell as a kernel would run it, and a second time in the same session."""
from __future__ import annotations

import ast
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from megatrain_torch.model.stream import find_runtime

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
NOTEBOOK = Path(__file__).parents[1] / "examples/notebook.ipynb"


def cells() -> list[str]:
    return ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def shown(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def as_seen(value: Any) -> Any:
    """What a notebook shows of it."""
    for kind in ("_repr_png_", "_repr_html_"):
        if hasattr(value, kind):
            return getattr(value, kind)()
    return repr(value)


def test_the_notebook_runs_and_shows_tables_and_pictures() -> None:
    names: dict[str, Any] = {}
    seen = [as_seen(shown(source, names)) for source in cells()]
    plan, before, report, picture, after = seen[1:6]
    assert "<table>" in plan and "predicted" in plan and "device memory" in plan
    assert "weights" in before and "moments" not in before and "moments" in after
    assert "bound by" in report and picture.startswith(b"\x89PNG")
    losses = names["losses"]
    assert len(losses) == 6 and losses[5] < losses[0] - 0.5, f"it learns, interrupted or not: {losses}"


def test_cells_that_are_run_again_leave_nothing_of_the_model_before() -> None:
    names: dict[str, Any] = {}
    sources = cells()
    shown(sources[0], names)
    gone = []
    for _ in range(3):
        for source in (sources[2], sources[3], sources[6]):          # stream, train, interrupt
            shown(source, names)
        gone.append(weakref.ref(find_runtime(names["model"])))
    gc.collect()
    # The trace is the third run's too, so nothing but the last model is left.
    assert [ref() is None for ref in gone] == [True, True, False]
