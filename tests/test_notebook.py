"""The notebooks of examples/, cell by cell as a kernel would run them, one a second time in the same session."""
from __future__ import annotations

import ast
import gc
import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_torch.model.stream import find_runtime

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
NOTEBOOK = Path(__file__).parents[1] / "examples/notebook.ipynb"
QUICK_START = NOTEBOOK.with_name("quickstart.ipynb")


def cells(notebook: Path = NOTEBOOK) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]


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
    assert "<pre>" in plan and "predicted" in plan and "device memory" in plan
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


def test_the_quick_start_trains_with_the_bits_of_plain_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own assertions: it learns, five losses and all gradients are plain torch's, a saved run goes on to the bit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    seen = [as_seen(shown(source, names)) for source in cells(QUICK_START)]
    assert "layers.0" in seen[2] and "moments" in seen[3]
    assert "To be," in seen[-1]
