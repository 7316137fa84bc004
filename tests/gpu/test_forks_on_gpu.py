"""A child of fork() beside a model that is streamed to a GPU: it costs nothing, refuses the model, and ends."""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import test_forks
import torch

from megatrain_torch.model.stream import runtime_of

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
