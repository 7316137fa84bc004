"""A child of fork() beside a streamed model: it costs nothing, refuses the model by name, ends, and leaves files alone."""
from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from zoo import update

import megatrain_torch as mt
from megatrain_torch.checkpoint import manifest

HOMES = ["ram", "arrive", "disk+weights"]
REFUSED = "this process was forked from the one that streams the model"
PATIENCE_S = 30


class Layers(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def streamed(home: str, folder: Path, width: int = 32, device: str = "cpu") -> tuple[nn.Module, mt.AdamW]:
    torch.manual_seed(0)
    disk = {"nvme": str(folder)} if "disk" in home else {}
    model = mt.stream(Layers(width), device=device, plan={"homes": home}, **disk)
    return model, mt.AdamW(model.parameters(), lr=1e-2)


def batch(step: int = 0) -> Tensor:
    return torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, opt: mt.AdamW, steps: int, first: int = 0) -> float:
    for step in range(first, steps):
        loss = update(model(batch(step)).square().mean(), opt)
    return loss.item()


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process, which then goes; or it is named what became of it."""
    out, back = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = pickle.dumps(work())
        except BaseException:
            answer = pickle.dumps(traceback.format_exc())
        os.write(back, answer)
        os._exit(0)
    os.close(back)
    status = ended(pid)
    with os.fdopen(out, "rb") as f:
        answer = f.read()
    assert status == 0, f"the child ended with {status}"
    return pickle.loads(answer)


def ended(pid: int) -> int:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child hung for {PATIENCE_S} s")


def touches(model: nn.Module, opt: mt.AdamW, folder: Path, loss: Tensor) -> dict[str, Callable[[], Any]]:
    p = model.layers[1].weight
    kept, view = p.detach(), p[0]
    states = [t for s in opt.state.values() for k, t in s.items() if k != "step"]

    def unwatched() -> Tensor:
        with torch.no_grad():
            return model(batch())

    return {"forward": lambda: model(batch()), "without gradients": unwatched, "backward": loss.backward,
            "read": lambda: p + 1, "item": lambda: p[0, 0].item(), "numpy": lambda: p.detach().numpy(),
            "data": lambda: p.data + 1, "write": lambda: p.data.zero_(), "replace": lambda: setattr(p, "data", kept),
            "a reference": lambda: kept.sum(), "a view": lambda: view.sum(), "print": lambda: repr(kept),
            "storage": p.untyped_storage, "foreach": lambda: torch._foreach_norm(list(model.parameters())),
            ".grad": lambda: model.layers[0].weight.grad, "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "zero": lambda: model.zero_grad(set_to_none=False), "a state": lambda: states[0] + 1,
            "state_dict": model.state_dict, "load": lambda: model.load_state_dict(Layers().state_dict()),
            "step": opt.step, "optimizer": opt.state_dict, "save": lambda: mt.save(model, opt, folder / "child"),
            "pickle": lambda: pickle.dumps(model), "deepcopy": lambda: copy.deepcopy(model),
            "torch.save": lambda: torch.save(p, io.BytesIO()), "unstream": lambda: mt.unstream(model)}


def accepted(calls: dict[str, Callable[[], Any]]) -> list[str]:
    found = []
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as e:             # torch wraps what load_state_dict meets in one
            if REFUSED not in str(e):
                found.append(f"{name}: {e}")
        else:
            found.append(name)
    return found


@pytest.mark.parametrize("home", HOMES)
def test_a_child_refuses_the_model_by_name_and_its_parent_goes_on(home: str, tmp_path: Path) -> None:
    model, opt = streamed(home, tmp_path)
    train(model, opt, 1)
    expected = train(*streamed(home, tmp_path), 3)
    calls = touches(model, opt, tmp_path, model(batch()).square().mean())
    save = {"save": calls.pop("save")}
    assert in_child(lambda: accepted(save)) == []
    model(batch()).square().mean().backward()            # gradients stand from here on, with which none would be saved
    assert in_child(lambda: accepted(calls)) == []
    assert in_child(lambda: (repr(model), sum(p.numel() for p in model.parameters()), opt.zero_grad())[1]) > 0
    calls.clear()
    opt.zero_grad()
    assert train(model, opt, 3, first=1) == expected


def test_what_goes_in_a_child_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    """Engines, models and views that a child lets go of: no join, no unlink, no unlock."""
    model, opt = streamed("disk+weights", tmp_path)
    train(model, opt, 2)

    def let_go() -> bool:
        nonlocal model, opt
        mt.model.stream.runtime_of(model).core.close()
        model = opt = None
        return bool(gc.collect() + 1)

    assert in_child(let_go)
    train(model, opt, 1)


def test_a_child_has_neither_the_memory_nor_the_files(tmp_path: Path) -> None:
    model, opt = streamed("disk", tmp_path, width=1024)
    train(model, opt, 1)
    held = mt.model.stream.runtime_of(model).core.host_bytes()
    page = os.sysconf("SC_PAGESIZE")

    def look() -> tuple[int, list[str]]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                 if os.path.lexists(f"/proc/self/fd/{fd}")]
        return resident, [name for name in links if str(tmp_path) in name]

    before = int(Path("/proc/self/statm").read_text().split()[1]) * page
    resident, files = in_child(look)
    assert held > 16 << 20 and resident < before - 0.9 * held, f"{resident >> 20} of {before >> 20} MiB"
    assert files == []


def test_a_child_streams_a_model_of_its_own(tmp_path: Path) -> None:
    model, opt = streamed("disk", tmp_path)
    expected = train(model, opt, 2)
    assert in_child(lambda: in_child(lambda: train(*streamed("disk", tmp_path), 2))) == expected


class Tokens(Dataset):
    """As a dataset is that was made in a trainer: it has a tokenizer, and the model, which it leaves alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.tokenizer = model, {chr(97 + i): i for i in range(26)}

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Tensor:
        assert not self.model.head.weight.is_cuda and self.model.training
        return torch.tensor([self.tokenizer[c] for c in "abcdefgh"]) + i % 8


def test_workers_of_a_data_loader_live_beside_training(tmp_path: Path) -> None:
    results = []
    for workers in (0, 4):
        model, opt = streamed("disk", tmp_path)
        how = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
        loader = DataLoader(Tokens(model), batch_size=4, num_workers=workers, **how)
        for _ in range(2):
            for x in loader:
                loss = update(model(x).square().mean(), opt)
        results.append(float(loss))
        del loader
    assert results[0] == results[1]


def test_forks_beside_updates_and_a_save_change_nothing(tmp_path: Path) -> None:
    model, opt = streamed("disk", tmp_path, width=64)
    expected = [train(model, opt, 6), *[float(p.sum()) for p in model.parameters()]]
    model, opt = streamed("disk", tmp_path, width=64)
    children: list[int] = []
    saving = None

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            with torch._C.DisableTorchFunctionSubclass():
                os._exit(0)
        children.append(pid)

    for step in range(6):
        loss = model(batch(step)).square().mean()
        fork()
        loss.backward()
        fork()
        opt.step()
        fork()
        if step == 3:
            saving = mt.save(model, opt, tmp_path / "run", asynchronous=True)
        fork()
        opt.zero_grad()
    assert [ended(pid) for pid in children] == [0] * len(children)
    saving.wait()
    assert [float(loss), *[float(p.sum()) for p in model.parameters()]] == expected


def test_a_child_that_is_asked_to_wait_for_a_save_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = streamed("ram", tmp_path)
    train(model, opt, 1)
    follow = mt.Saving._follow
    monkeypatch.setattr(mt.Saving, "_follow", lambda *own: (time.sleep(0.5), follow(*own)))
    saving = mt.save(model, opt, tmp_path / "run", asynchronous=True)

    def wait() -> str:
        try:
            saving.wait()
        except mt.MegatrainError as e:
            return str(e)
        return ""

    if not saving.over:
        assert "forked from the one that writes it" in in_child(wait)
    saving.wait()


def test_a_childs_share_of_a_folders_lock_goes_with_the_fork(tmp_path: Path) -> None:
    draft = manifest.Draft(tmp_path / "run")
    path = draft.path

    def shares() -> bool:
        draft._unlock()                      # of its owner, whose it stays
        return any(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))

    assert not in_child(shares)
    assert manifest._lock(path) == -1
    draft.drop()


SCRIPT = """
import multiprocessing, os, sys, time, torch
sys.path.insert(0, {tests!r})
from test_forks import streamed, train, PATIENCE_S, ended
from pathlib import Path
folder = Path({folder!r})
model, opt = streamed("disk", folder)
train(model, opt, 2)

def raises():
    raise ValueError("in the child")

def child(work):
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")
        work()
        sys.exit(0)
    return ended(pid)

assert child(lambda: sys.exit(7)) == 7
assert child(raises) == 1
fork = multiprocessing.get_context("fork")
for work, code in ((raises, 1), (lambda: sys.exit(3), 3)):
    p = fork.Process(target=work)
    p.start()
    p.join(PATIENCE_S)
    assert p.exitcode == code, p.exitcode
train(model, opt, 1)
if os.fork() == 0:
    print("ready", os.getpid(), flush=True)      # by the child: it has let go of the file by then
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def left_alone(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that streams, and the number of its child, which outlives it."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    words = process.stdout.readline().split()
    child = int(words[1]) if words[:1] == ["ready"] else 0
    try:
        yield process, child
    finally:
        process.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        process.communicate()


def test_children_end_in_every_way_and_outlive_a_killed_parent_without_its_file(
        left_alone: tuple[subprocess.Popen[str], int], tmp_path: Path) -> None:
    process, child = left_alone
    if not child:
        raise AssertionError(process.communicate()[1])
    def has_file(pid: int) -> bool:
        return any(os.readlink(fd).startswith(str(tmp_path)) for fd in Path(f"/proc/{pid}/fd").iterdir())

    assert has_file(process.pid) and not has_file(child)
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(child, 0)                        # it lives
    assert os.listdir(tmp_path) == []
