"""The GPU scripts of this folder as tests; skipped where torch sees no CUDA device."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def lines(script: str, *words: str) -> list[dict[str, object]]:
    """The script's JSON lines."""
    done = subprocess.run([sys.executable, str(HERE / script), *words], capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr[-2000:]
    return found


def test_models_and_situations_equal_plain_torch_on_the_gpu() -> None:
    report = lines("run_parity.py", "--seconds", "600")[-1]
    wrong = [r for r in report["not_ok"] if not str(r["control"]).startswith("plain torch fails")]
    assert not wrong, wrong[:3]


def test_every_left_out_wait_is_seen() -> None:
    assert all(row["as_expected"] for row in lines("run_edges.py"))


def test_trainer_generate_and_lora_agree_with_plain_torch() -> None:
    assert all(row["ok"] for row in lines("run_trainer.py"))
