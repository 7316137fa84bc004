"""tools/try_models.py: a model that comes out wrong, fails or never ends is said to, and docs/models.md counts it."""
from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from situations import Tiny, made
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent / "tools"))

import tiny_models
import try_models
from tiny_models import Candidate, Source, Tried


class Logits(nn.Module):
    """A model without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = made(Tiny)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": [self.body(x)], "mask": x > 3}


class Wrong(Logits):
    """Another result where its weights are streamed: what only a fault of ours could make."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        streamed = type(next(self.body.parameters())) is not nn.Parameter
        return {"hidden": self.body(x) * (1 + 1e-6 * streamed)}


class Restless(Logits):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.body(x) * time.monotonic()}


class Refused(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Dies(Logits):
    def forward(self, x: Tensor) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class Idle(Logits):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.body(x).detach()}


def tried(build: Callable[[], nn.Module]) -> Tried:
    def candidates() -> Iterator[Candidate]:
        batches = [{"x": torch.randint(0, 8, (2, 6), generator=torch.Generator().manual_seed(i))} for i in range(2)]
        yield Candidate(build.__name__, build, batches)
    return Tried(build.__name__, candidates)


class Fake(Source):
    name = "fake"

    def trials(self, file: str) -> list[Tried]:
        return [tried(globals()[name]) for name in file.split()]


def row(build: Callable[[], nn.Module]) -> dict[str, Any]:
    return try_models.judge(tried(build), lambda stage: None)


def test_a_model_without_a_loss_is_compared_by_its_outputs() -> None:
    found = row(Logits)
    assert (found["saved"], found["replay"], found["loss"]) == ("equal", "equal", False)
    assert found["units"] > 3


@pytest.mark.parametrize("build, field, words", [
    (Wrong, "saved", "differs: step 0, micro-batch 0, loss"), (Refused, "replay", "refused: parameter 'phase' is complex"),
    (Restless, "plain", "two plain runs differ"), (Idle, "plain", "no output has a gradient")])
def test_what_is_not_equal_is_said(build: Callable[[], nn.Module], field: str, words: str) -> None:
    assert row(build)[field].startswith(words) or words in row(build)[field]


def test_a_process_that_dies_takes_no_other_row_with_it() -> None:
    rows = try_models.rows_of(Fake(), "Dies Logits")
    assert "ended with status -9" in rows[0]["plain"]
    assert rows[1]["saved"] == rows[1]["replay"] == "equal"


def test_errors_of_fused_gradients_are_seen() -> None:
    truth = {"a": torch.ones(4), "b": None}
    assert try_models.gradient_error(truth, {"a": torch.ones(4), "b": None}) == 0
    assert try_models.gradient_error(truth, {"a": torch.ones(4) * 1.01, "b": None}) == pytest.approx(0.01, rel=1e-3)
    assert try_models.gradient_error(truth, {"a": torch.ones(4), "b": torch.ones(4)}) == float("inf")
    assert try_models.gradient_error(truth, {"a": torch.full((4,), float("nan")), "b": None}) == float("inf")


def test_outputs_with_a_gradient_are_found_in_containers() -> None:
    x = torch.ones(2, requires_grad=True)
    loss, own = tiny_models.loss_of(lambda: {"a": [x * 2, (x * 3,)], "b": x.detach()}, {})
    g = torch.Generator().manual_seed(0)
    assert not own and torch.equal(loss, sum((x * k * torch.randn(2, generator=g)).mean() for k in (2, 3)))
    assert tiny_models.own_loss(x.sum()) is not None
