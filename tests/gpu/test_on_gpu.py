"""The GPU scripts of this folder as tests; skipped where torch sees no CUDA device."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatrain_torch import _core

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 1000, (1 << 20) + 3])
def test_adamw_op_gives_the_bits_of_the_host(dtype: torch.dtype, n: int) -> None:
    """Twenty steps; hi begins at an odd address in half of them."""
    _core.register_ops()
    torch.manual_seed(n)
    start = torch.randn(n + 1).to(dtype)
    lo = torch.zeros(n, dtype=torch.int16) if dtype == torch.bfloat16 else None
    for skew in (0, 1):
        host = [start.clone()[skew:skew + n], None if lo is None else lo.clone(), torch.zeros(n), torch.zeros(n)]
        there = [None if t is None else t.cuda() for t in host]
        there[0] = start.cuda()[skew:skew + n]
        for step in range(1, 21):
            grad = torch.randn(n).to(dtype)
            for planes, g in ((host, grad), (there, grad.cuda())):
                torch.ops.megatrain.adamw_(*planes, g, 1e-2, 0.9, 0.999, 1e-8, 0.1, step, 0.5)
        assert all(a is None or torch.equal(a, b.cpu()) for a, b in zip(host, there))
