"""What benchmarks conclude from their measurements; the measuring itself is tried by running them at toy sizes."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A benchmark as a module; they find one another by being in one folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def loaded(name: str) -> ModuleType:
        return __import__(name)

    yield loaded
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


RECORD = {
    "bench": "step", "section": "x", "median": 17_000.0, "limit": 20_000.0, "step_s": 1.0, "host_gib": 100.0,
    "over_gemm": 1.18, "vram_used_gib": 31.0, "bounds": {"gemm_s": 0.85},
    "predicted": {"seconds": 0.95, "vram_gib": 32.0, "host_gib": 99.0},
}  # fmt: skip


def line(must4: ModuleType, *aims: Any) -> Any:
    return must4.Line("x", (1, ["a"]), aims)


def test_each_aim_is_judged_by_the_last_measurement(load: Any) -> None:
    must4 = load("must4")
    aims = must4.rate(16_500), must4.rate(17_500), must4.GEMMS, must4.memory(24)
    rows = must4.judge(line(must4, *aims), [{**RECORD, "median": 1.0}, RECORD], "ok")
    assert [row.verdict for row in rows] == ["met", "MISSED", "met", "MISSED"]
    assert rows[0].aim == ">= 16,500" and rows[0].found == "17,000" and "20,000" in rows[0].limit
    assert rows[2].aim == "<= 1.2" and rows[2].limit == "0.85 s"


@pytest.mark.parametrize(
    "changed, verdict",
    [({}, "met"), ({"seconds": 0.89}, "MISSED"), ({"vram_gib": 33.0}, "MISSED"), ({"host_gib": 94.0}, "MISSED")],
    ids=str,
)
def test_a_plan_is_held_against_bytes_and_time(load: Any, changed: dict[str, float], verdict: str) -> None:
    must4 = load("must4")
    (row,) = must4.predictions([{**RECORD, "predicted": RECORD["predicted"] | changed}, {"bench": "loss"}])
    assert row.verdict == verdict


@pytest.mark.parametrize("model", ["gpt-oss-120b", "qwen2.5-72b"])
def test_large_models_have_their_parameters(load: Any, model: str) -> None:
    """Their names say how many, in thousand millions; and toys of them are of the same kind."""
    big = load("bench_big")
    args = argparse.Namespace(model=model, seq=1024, layers=None, tiny=False)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(big.config_of(args))
    assert round(sum(p.numel() for p in whole.parameters()) / 1e9) == {"gpt-oss-120b": 117, "qwen2.5-72b": 73}[model]
    args.tiny, args.layers = True, 2
    toy = big.config_of(args)
    assert type(toy) is type(whole.config) and toy.num_hidden_layers == 2 and toy.hidden_size == 64
