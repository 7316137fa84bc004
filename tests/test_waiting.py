"""Who waits for whom: a save, a reader of weights on the host, the end of a process."""
from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from test_forks import batch, streamed, train

import megatrain_torch as mt
from megatrain_torch.model.stream import runtime_of


def penalty(model: torch.nn.Module) -> torch.Tensor:
    """On the host: the graph keeps the weights themselves."""
    return sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("home", ["vram", "disk+weights"])
def test_weights_in_a_graph_on_the_host_outlive_a_save(home: str, tmp_path: Path) -> None:
    model, opt = streamed(home, tmp_path)
    train(model, opt, 2)
    loss = penalty(model)
    mt.save(model, opt, tmp_path / "run", asynchronous=True).wait()
    mt.save(model, opt, tmp_path / "run").wait()
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, 2 * p.detach()), name
        assert p.grad.abs().sum() > 0


def test_memory_of_weights_that_were_only_saved_is_given_back(tmp_path: Path) -> None:
    model, opt = streamed("disk+weights", tmp_path, width=256)
    train(model, opt, 2)
    core = runtime_of(model).core
    before = core.host_bytes(0)
    mt.save(model, opt, tmp_path / "run").wait()
    assert core.host_bytes(0) == before == 0


def test_counters_are_read_while_a_step_waits(tmp_path: Path) -> None:
    model, opt = streamed("disk", tmp_path, width=64)
    core, stop, looks = runtime_of(model).core, threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            looks.append((core.stats()["disk_read_bytes"], core.disk_file()[1], core.swap_bytes(), core.host_bytes()))

    thread = threading.Thread(target=look)
    thread.start()
    train(model, opt, 4)
    stop.set()
    thread.join()
    assert [n for n, *_ in looks] == sorted(n for n, *_ in looks)
    with torch.no_grad():
        assert torch.isfinite(model(batch())).all()
