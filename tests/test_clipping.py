"""Accelerate's clip_grad_norm_ and Trainer's max_grad_norm where mt.AdamW steps: the limit goes with the step."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from parity import assert_same
from parity import stream_for_test as streamed
from run_dropin import trainer, values
from situations import llama, text
from torch import nn

import megatrain_torch as mt

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def accelerator() -> Any:
    from accelerate import Accelerator
    out = Accelerator(cpu=True)
    yield out
    out.free_memory()


@pytest.fixture
def no_host_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own clipping, which reads and writes all gradients on the host, is not called."""
    import accelerate

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("gradients were clipped on the host")
    monkeypatch.setattr(accelerate.Accelerator, "_clip_grad_norm_dtensor_aware", refuse)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", refuse)


def backward(model: nn.Module, step: int = 0) -> None:
    model(**text(step)).loss.backward()


def norm_of(model: nn.Module) -> float:
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


def prepared(accelerator: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
    model = streamed(llama())
    return model, accelerator.prepare(mt.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **kwargs))


@pytest.mark.parametrize("limit", [0.5, 0.0], ids=["clipped", "norm alone"])
def test_trainers_limit_is_the_optimizers(tmp_path: Path, no_host_norm: None, limit: float) -> None:
    runs = []
    for of_trainer, of_optimizer in ((limit, None), (0.0, limit or None)):
        parity.seed()
        model = streamed(llama())
        opt = mt.AdamW(model.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=of_optimizer)
        t = trainer(model, tmp_path, max_steps=4, max_grad_norm=of_trainer, optimizers=(opt, None))
        t.train()
        runs.append(([(e["loss"], e["grad_norm"]) for e in t.state.log_history if "loss" in e], values(model)))
    assert len(runs[0][0]) == 4 and runs[0][0] == runs[1][0], "losses and norms"
    assert runs[0][0][0][1] > 0.5, "nothing would be clipped"
    assert_same(runs[0][1], runs[1][1])


def test_a_limit_counts_for_one_step_and_the_lower_one_for_that(accelerator: Any, no_host_norm: None) -> None:
    ends = []
    for limits, own in (((0.1, None), 0.7), ((0.1, 0.7), None), ((0.1, 0.9), 0.7)):
        model, opt = prepared(accelerator, max_grad_norm=own)
        for step, limit in enumerate(limits):
            backward(model, step)
            if limit is not None:
                accelerator.clip_grad_norm_(model.parameters(), limit)
            opt.step()
            opt.zero_grad()
        ends.append(values(model))
        accelerator.free_memory()
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["before", "after", "long after"])
def test_a_norm_is_of_its_own_step_whenever_it_is_read(accelerator: Any, steps: int) -> None:
    model, opt = prepared(accelerator)
    backward(model)
    expected = norm_of(model)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    for step in range(steps):
        opt.step()
        backward(model, step + 1)            # adds to the gradients
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    assert type(norm + 0) is torch.Tensor and norm.shape == () and norm.dtype == torch.float32


@pytest.mark.parametrize("read", [
    lambda norm: torch.add(input=norm, other=0), lambda norm: torch.stack(tensors=[norm])[0],
    lambda norm: torch.zeros(()).add(other=norm), lambda norm: torch.where(torch.tensor(True), input=norm, other=norm)],
    ids=["input", "tensors", "other", "where"])
def test_a_norm_that_is_given_by_name_is_known_too(accelerator: Any, read: Any) -> None:
    model, _ = prepared(accelerator)
    backward(model)
    expected = norm_of(model)
    assert read(accelerator.clip_grad_norm_(model.parameters(), 1e-3)).item() == pytest.approx(expected, rel=1e-5)


def test_a_dropped_batch_takes_its_limit_along(accelerator: Any, no_host_norm: None) -> None:
    ends = []
    for dropped in (False, True):
        model, opt = prepared(accelerator)
        if dropped:
            backward(model, 5)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e-6)
            opt.zero_grad()
        backward(model)
        opt.step()
        ends.append(values(model))
        accelerator.free_memory()
    assert norm > 0.5
    assert_same(*ends)


def test_clipped_twice_before_a_step(accelerator: Any) -> None:
    model, _ = prepared(accelerator)
    backward(model)
    first, second = (accelerator.clip_grad_norm_(model.parameters(), limit).item() for limit in (0.5, 0.1))
    assert first == pytest.approx(second, rel=1e-5), "gradients stay as they are until the step"
    assert norm_of(model) == pytest.approx(0.1, rel=1e-3)


def test_updates_in_backward_give_the_norm_and_refuse_a_limit(accelerator: Any, no_host_norm: None) -> None:
    model, _ = prepared(accelerator, in_backward=True)
    backward(model)
    expected = norm_of(model)
    assert accelerator.clip_grad_norm_(model.parameters(), float("inf")).item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(mt.MegatrainError, match=r"max_grad_norm=0"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("case", ["some parameters", "two optimizers", "torch's optimizer", "another norm"])
def test_what_the_optimizer_cannot_do_is_done_on_the_host(accelerator: Any, case: str) -> None:
    model = streamed(llama())
    params = list(model.parameters())
    kind = torch.optim.AdamW if case == "torch's optimizer" else mt.AdamW
    parts = [params[:4], params[4:]] if case == "two optimizers" else [params]
    _ = [accelerator.prepare(kind(part, lr=1e-2)) for part in parts]
    backward(model)
    given = params[1:] if case == "some parameters" else params
    norm = accelerator.clip_grad_norm_(given, 1e-3, **({"norm_type": 1} if case == "another norm" else {}))
    left = torch.stack([p.grad.abs().sum() if case == "another norm" else p.grad.norm() for p in given])
    assert type(norm) is torch.Tensor
    assert (left.sum() if case == "another norm" else left.norm()).item() == pytest.approx(1e-3, rel=1e-3)
