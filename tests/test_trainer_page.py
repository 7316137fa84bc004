"""tools/run_transformers_tests.py: what it says of a test that passes, fails or streams."""
from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


spec = importlib.util.spec_from_file_location("run_transformers_tests", ROOT / "tools/run_transformers_tests.py")
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)

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


def test_a_model_is_streamed_once_and_noted_by_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain_torch.model.stream import find_runtime
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/trainer/test_trainer.py::A::test_b[1 (2)] (call)")
    stream, model = runs._streamer(), torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert stream(stream(model)) is model and find_runtime(model) is not None
    assert (tmp_path / "models").read_text() == "test_trainer.py::A::test_b[1 (2)]\n"
