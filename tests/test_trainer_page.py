"""tools/run_transformers_tests.py and the page that tools/trainer_page.py makes of what it found."""
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page, runs = tool("trainer_page"), tool("run_transformers_tests")
PASSED, STREAMED = ["passed", "", 0], ["passed", "", 2]


def same(outcome: str, reason: str, models: int = 0, adamw: bool = True) -> dict[str, list[Any]]:
    """The row of a test that comes out alike in all runs."""
    row = {"plain": [outcome, reason, 0], "streamed": [outcome, reason, models]}
    return row | ({"mt.AdamW": [outcome, reason, models]} if adamw else {})


KNOWN = {
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "sources": {"accelerate": "1.15.0"},
    "transformers": {
        "trainer/test_trainer.py": {
            "test_trainer.py::A::test_learns": same("passed", "", 2),
            "test_trainer.py::A::test_full_eval": {
                "plain": PASSED, "streamed": ["failed", "E: a streamed model's types are fixed", 1],
                "mt.AdamW": ["failed", "E: a streamed model's types are fixed", 1]},
            "test_trainer.py::A::test_odd": {
                "plain": PASSED, "streamed": STREAMED, "mt.AdamW": ["failed", "a | b\n  at /x/y/z.py", 2]},
            "test_trainer.py::A::test_bf16_full_eval": same("failed", "no such memory"),
            "test_trainer.py::test_slow": same("skipped", "Skipped: test is slow"),
            "test_trainer.py::test_long": same("skipped", "Skipped: test is slow")},
        "trainer/test_trainer_data.py": {"test_trainer_data.py": same("failed", "feature extractor gone")}},
    "accelerate": {"test_optimizer.py": {"test_optimizer.py::test_pickles": same("passed", "", 1, adamw=False)}}}


# ---- the page ------------------------------------------------------------------------------------

def test_totals_count_by_file_and_by_library() -> None:
    lines = page.totals(KNOWN).splitlines()
    assert lines[2:] == [
        "| transformers: trainer/test_trainer | 6 | 3 of 4 | 2 of 4 | 3 | 1 of 4 | 2 |",
        "| transformers: trainer/test_trainer_data | 1 | 0 of 1 | 0 of 1 | 0 | 0 of 1 | 0 |",
        "| accelerate: test_optimizer | 1 | 1 of 1 | 1 of 1 | 1 |  | 0 |",
        "| all of transformers | 7 | 3 of 5 | 2 of 5 | 3 | 1 of 5 | 2 |",
        "| all of accelerate | 1 | 1 of 1 | 1 of 1 | 1 |  | 0 |"]


def test_a_failure_that_nobody_has_explained_is_named() -> None:
    assert page.unexplained(KNOWN) == ["transformers: trainer/test_trainer::A::test_odd"]
    gone = {"accelerate": {"a.py": {"a.py::test": {"plain": PASSED, "streamed": ["missing", "", 0]}}}}
    assert page.unexplained(gone) == ["accelerate: a::test"], "one that only ran plain"
    assert page.unexplained({"accelerate": {"a.py": {"a.py::test": same("failed", "nobody knows")}}})
    assert page.unexplained({"accelerate": {"a.py": {"a.py::test": same("skipped", "nobody knows")}}}) == []


def test_the_page_has_losses_failures_and_skips_with_their_reasons() -> None:
    text = page.page(KNOWN)
    assert "Versions: torch 2.13.0, transformers 5.23.0; tests of accelerate 1.15.0." in text
    head, lost, failed, skipped = text.split("\n## ")
    assert page.totals(KNOWN) in head
    assert lost.splitlines()[4:] == [
        "| `A::test_full_eval` | streamed, streamed, `mt.AdamW` | Sets `fp16_full_eval`, which would convert the model: "
        "refused. Right so. |",
        "| `A::test_odd` | streamed, `mt.AdamW` | **not explained**: a \\| b at z.py |"]
    assert failed.splitlines()[4:] == [
        "| `A::test_bf16_full_eval` | plain, streamed, streamed, `mt.AdamW` | Reads the memory of a GPU. |",
        "| `test_trainer_data` | plain, streamed, streamed, `mt.AdamW` | Needs a feature extractor from the Hub, which has "
        "no stand-in. |"]
    assert skipped.splitlines()[-1] == ("| Marked slow: models and data from the Hub, or GPUs. | 2: `test_slow`, "
                                        "`test_long` |")


def test_a_page_without_losses_says_so() -> None:
    known = {"versions": {"torch": "1"}, "accelerate": {"a.py": {"a.py::test": same("passed", "", 1)}}}
    assert "## Pass plain, not streamed\n\nNone.\n" in page.page(known)


# ---- the runs ------------------------------------------------------------------------------------

TESTS = '''
import os, pytest

@pytest.fixture
def torn():
    yield
    raise OSError("torn down")

def test_streams():
    for _ in range(2):
        with open(os.environ["MODELS"], "a") as models:
            models.write("test_accelerator.py::test_streams\\n")

def test_streams_not():
    pass

def test_ends_badly(torn):
    pass

def test_fails():
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_accelerator.py").write_text(TESTS)
    (tmp_path / "tests/test_optimizer.py").write_text("import no_such_package\n")
    return tmp_path


def asked(checkout: Path, **values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"checkout": checkout, "k": "", "files": None, "timeout": 60, "log": None,
                                 "version": None} | values)


def test_a_run_keeps_the_worst_phase_its_reason_and_the_models(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout")
    found = runs.run(asked(checkout, log=str(tmp_path)), "accelerate", ["test_accelerator.py", "test_optimizer.py"],
                     tmp_path, "plain")
    at = "test_accelerator.py::test_"
    assert found[at + "streams"] == ["passed", "", 2] and found[at + "streams_not"] == ["passed", "", 0]
    assert found[at + "ends_badly"] == ["failed", "OSError: torn down", 0]
    assert found[at + "fails"][0] == "failed" and "one is not two" in found[at + "fails"][1]
    assert found[at + "skipped"] == ["skipped", "Skipped: not today", 0]
    outcome, reason, models = found["test_optimizer.py"]
    assert (outcome, models) == ("failed", 0) and "no_such_package" in reason, "a file that cannot be imported"
    assert len(found) == 6 and "1 passed" not in (tmp_path / "test_accelerator-plain.log").read_text()


def test_what_is_found_is_added_by_file_and_differences_are_said(
        checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"plain": {"test_optimizer.py::one": PASSED, "test_grad_sync.py::two": PASSED},
             "streamed": {"test_optimizer.py::one": STREAMED}}
    monkeypatch.setattr(runs, "run", lambda ask, library, files, stand_ins, name: found[name])
    known = {"accelerate": {"test_optimizer.py": {"before": {}}}}
    runs.run_all(asked(checkout, version="1.15"), known)
    assert known == {"sources": {"accelerate": "1.15"}, "accelerate": {
        "test_optimizer.py": {"before": {}, "test_optimizer.py::one": {"plain": PASSED, "streamed": STREAMED}},
        "test_grad_sync.py": {"test_grad_sync.py::two": {"plain": PASSED, "streamed": ["missing", "", 0]}}}}
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["test"] for line in said] == ["test_grad_sync.py::two"], "those that came out otherwise than plain"
    with pytest.raises(SystemExit, match="give a checkout of transformers or of accelerate"):
        runs.run_all(asked(checkout / "tests"), {})


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """main() with a page of its own, and without runs."""
    monkeypatch.setattr(runs, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(runs, "trainer_page", page, raising=False)
    return tmp_path


@pytest.mark.parametrize("reason, status", [("nobody knows", 1), ("test is slow", 0)])
def test_the_page_is_made_of_what_was_kept_and_the_status_says_whether_all_is_explained(
        parts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str,
        status: int) -> None:
    known = {"versions": {"torch": "1"}, "accelerate": {"a.py": {"a.py::test": same("failed", reason)}}}
    (parts / "known.json").write_text(json.dumps(known))
    monkeypatch.setattr(sys, "argv", ["x", "--known", str(parts / "known.json"), "--page"])
    assert runs.main() == status
    assert (parts / "page.md").read_text() == page.page(known)
    assert json.loads((parts / "known.json").read_text()) == known
    assert page.totals(known) in capsys.readouterr().out


# ---- the plugin ----------------------------------------------------------------------------------

def test_a_model_is_streamed_once_and_noted_by_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        streaming: None) -> None:
    from megatrain_torch.model.stream import find_runtime
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/trainer/test_trainer.py::A::test_b[1 (2)] (call)")
    stream, model = runs._streamer(), torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert stream(stream(model)) is model and find_runtime(model) is not None
    assert (tmp_path / "models").read_text() == "test_trainer.py::A::test_b[1 (2)]\n"


def test_every_run_has_a_name_on_the_page() -> None:
    assert list(page.NAMES) == list(runs.RUNS)
