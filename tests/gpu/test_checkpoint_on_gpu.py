"""Checkpoints on CUDA: a resume has the bits of the run that went on, across homes, dropout's random numbers included.

With deterministic kernels and a layer's own code (parity.exact), where two runs have the same bits.
"""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import parity
import pytest
import test_forks
import torch
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.model.stream import runtime_of

WIDTH = 768
MIXED = {"layers.0": "vram", "layers.1": "arrive", "layers.2": "through", "layers.3": "disk"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def made(homes: Any, folder: Path, kind: torch.dtype) -> tuple[Any, mt.AdamW]:
    torch.manual_seed(1)
    model = mt.stream(Net().to(kind), device="cuda", nvme=str(folder) if homes == MIXED else None,
                      plan={"homes": homes, "activations": "saved"}, compute="eager")
    return model, mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e-2)


def train(pair: tuple[Any, mt.AdamW], begin: int, end: int) -> list[float]:
    model, opt = pair
    losses = []
    for step in range(begin, end):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).to(model.layers[0][0].weight.dtype)
        loss = model(x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved, loaded", [("ram", MIXED), (MIXED, "ram"), ("vram", MIXED)],
                         ids=["ram-mixed", "mixed-ram", "vram-mixed"])
def test_resume_gives_the_bits_of_the_run_that_went_on(tmp_path: Path, saved: Any, loaded: Any,
                                                       kind: torch.dtype) -> None:
    with parity.exact("cuda"):
        one = made(saved, tmp_path, kind)
        train(one, 0, 3)
        saving = mt.save(*one, tmp_path / "c", extra=3, asynchronous=True, spare=1)
        want = train(one, 3, 6)
        saving.wait()
        other = made(loaded, tmp_path, kind)
        train(other, 7, 8)                   # it had other states
        at = mt.load(*other, tmp_path / "c")
        assert train(other, at, 6) == want
        a, b = mt.masters(one[0]), mt.masters(other[0])
        assert not [name for name in a if not torch.equal(a[name], b[name])]
        for p, q in zip(one[0].parameters(), other[0].parameters()):
            assert all(torch.equal(x, y) for x, y in zip(one[1].moments(p), other[1].moments(q)))


# ---- a child of fork() beside a streamed model: it costs nothing, refuses the model, and ends ----

FORK_S = 0.05                                # what a fork may take; to copy a GiB that is locked takes half a second


@pytest.mark.parametrize("home", ["ram", "vram", "arrive", "through", "disk+weights"])
def test_a_child_refuses_the_model_by_name(home: str, tmp_path: Path) -> None:
    model, opt = test_forks.streamed(home, tmp_path, device="cuda")
    test_forks.train(model, opt, 2)
    calls = test_forks.touches(model, opt, tmp_path, model(test_forks.batch()).square().mean())
    del calls["backward"]                    # torch itself refuses that
    save = {"save": calls.pop("save")}
    assert test_forks.in_child(lambda: test_forks.accepted(save)) == []
    model(test_forks.batch()).square().mean().backward()     # gradients stand from here on, with which none would be saved
    assert test_forks.in_child(lambda: test_forks.accepted(calls)) == []
    calls.clear()
    test_forks.train(model, opt, 1)
    opt.zero_grad()
    torch.cuda.synchronize()


def test_locked_memory_is_not_copied_by_a_fork(tmp_path: Path) -> None:
    model, opt = test_forks.streamed("ram", tmp_path, width=8192, device="cuda")
    test_forks.train(model, opt, 2)
    assert runtime_of(model).core.host_bytes() > 2 << 30
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        taken.append(time.perf_counter() - begun)
        assert test_forks.ended(pid) == 0
    assert min(taken) < FORK_S, taken


def test_a_child_ends_by_sys_exit(tmp_path: Path) -> None:
    code = (f"import os, sys; sys.path.insert(0, {str(Path(test_forks.__file__).parent)!r})\n"
            "import test_forks\n"
            "model, opt = test_forks.streamed('ram', None, device='cuda')\n"
            "test_forks.train(model, opt, 2)\n"
            "pid = os.fork()\n"
            "if pid == 0:\n    sys.exit(5)\n"
            "sys.exit(test_forks.ended(pid))\n")
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
