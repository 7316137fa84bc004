"""What mt.save takes of host memory while it runs: one unit's planes that are at home elsewhere, and blocks on their way
to the files. Read from the engine's count of planes, and from what the system says of the process."""
from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import doors
import pytest
import torch
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.base.limits import Bound, HostLimits, with_margin
from megatrain_torch.checkpoint import manifest
from megatrain_torch.checkpoint import save as checkpoint
from megatrain_torch.model.stream import runtime_of
from megatrain_torch.plans import room as room_module

UNITS, WIDTH = 8, 1024
WEIGHTS = 4 * WIDTH * WIDTH          # of a unit, in fp32: no master, two moments
# By home, what of a unit is not in host memory.
ELSEWHERE = {"ram": 0, "through": 0, "arrive": WEIGHTS, "vram": 3 * WEIGHTS, "disk": 2 * WEIGHTS,
             "disk+weights": 3 * WEIGHTS}
SLACK = 8 << 20                      # of threads, their stacks, and Python
POLL_S = 0.0005


def streamed(home: str, nvme: Path, units: int = UNITS, width: int = WIDTH) -> tuple[nn.Module, mt.AdamW]:
    torch.manual_seed(0)
    names = [str(i) for i in range(units)]
    small = {"disk": {"buffer_bytes": 1 << 20}} if "disk" in home else {}
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in names))
    model = doors.stream(model, "cpu", units=names, nvme=str(nvme) if small else None, plan={
        "slots": 2, "homes": dict.fromkeys(names, home) if home != "ram" else {}, "debug": small})
    opt = mt.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):                   # behind the second forward no copy of weights is left
        update(model(torch.randn(2, width)).square().mean(), opt)
    runtime_of(model).drain()
    return model, opt


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most that planes and the process took meanwhile, beyond what they did before."""

    def __init__(self, core: Any) -> None:
        self.core, self.over = core, threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def _now(self) -> tuple[int, int]:
        return sum(self.core.host_bytes(p) for p in _core.PLANES.values()), resident()

    def __enter__(self) -> Peak:
        self.before = self.most = self._now()
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()
        self.after = self._now()
        self.planes, self.resident = (a - b for a, b in zip(self.most, self.before))

    def _watch(self) -> None:
        while not self.over.wait(POLL_S):
            self.most = tuple(map(max, self.most, self._now()))


def measure(home: str, asynchronous: bool, folder: Path) -> dict[str, int]:
    model, opt = streamed(home, folder)
    gc.collect()
    with Peak(runtime_of(model).core) as peak:
        mt.save(model, opt, folder / "checkpoint", asynchronous=asynchronous, spare=1).wait()
    same = all(torch.equal(a, b) for a, b in zip(weights_of(folder / "checkpoint"), model.parameters(), strict=True))
    mt.unstream(model)
    return {"planes": peak.planes, "resident": peak.resident, "after": peak.after[0] - peak.before[0], "same": same}


def weights_of(folder: Path) -> list[Tensor]:
    from safetensors.torch import load_file
    found = {n: t for f in folder.glob("model*.safetensors") for n, t in load_file(f).items()}
    return [found[f"{i}.weight"] for i in range(UNITS)]


WAYS = [*((home, False) for home in ELSEWHERE), ("disk+weights", True)]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Of a process of its own, whose memory is nobody else's."""
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("peaks"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("home, asynchronous", WAYS)
def test_one_unit_is_brought_at_a_time(home: str, asynchronous: bool, peaks: dict[str, dict[str, int]]) -> None:
    """Its threads' blocks are 4 MiB each."""
    found = peaks[f"{home} {asynchronous}"]
    assert found["planes"] <= ELSEWHERE[home], f"{found['planes'] / max(ELSEWHERE[home], 1):.1f} units at once"
    assert found["resident"] <= ELSEWHERE[home] + checkpoint.LEAST_BYTES + SLACK
    assert found["after"] == 0 and found["same"]


def test_units_that_share_blocks_and_updates_that_wait_are_one_steps(tmp_path: Path) -> None:
    """Small units, many in a block, in every home; the next step's updates ask for theirs out of turn."""
    torch.manual_seed(0)
    names = [str(i) for i in range(30)]
    homes = {n: (*ELSEWHERE, "ram")[i % 6] for i, n in enumerate(names)}
    model = doors.stream(nn.Sequential(*(nn.Linear(96, 96) for _ in names)), "cpu", units=names, nvme=str(tmp_path),
                         plan={"slots": 2, "homes": homes, "debug": {"delay_us": 50, "disk": {"buffer_bytes": 1 << 20}}})
    opt = mt.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        update(model(torch.ones(2, 96)).square().mean(), opt)

    step()
    right = {n: p.detach().clone() for n, p in model.named_parameters()}
    saving = mt.save(model, opt, tmp_path / "checkpoint", asynchronous=True, spare=1)
    for _ in range(3):
        step()
    saving.wait()
    mt.load(model, opt, tmp_path / "checkpoint")
    assert all(torch.equal(p, right[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("home", ["vram", "disk", "disk+weights"])
def test_another_order_in_memory_needs_no_copies(home: str, tmp_path: Path) -> None:
    """Channels last: the file is row-major, so elements are turned on their way."""
    names = [str(i) for i in range(6)]
    unit = 4 * 256 * 256 * 9 * ELSEWHERE[home] // WEIGHTS
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(256, 256, 3, padding=1, bias=False) for _ in names))
    small = {"disk": {"buffer_bytes": 1 << 20}} if "disk" in home else {}
    model = doors.stream(model.to(memory_format=torch.channels_last), "cpu", units=names, nvme=str(tmp_path), plan={
        "slots": 2, "homes": dict.fromkeys(names, home), "debug": small})
    opt = mt.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        update(model(torch.randn(1, 256, 4, 4)).square().mean(), opt)
    runtime_of(model).drain()
    with Peak(runtime_of(model).core) as peak:
        mt.save(model, opt, tmp_path / "c")
    assert peak.planes <= unit
    from safetensors.torch import load_file
    saved, states = load_file(tmp_path / "c" / "model.safetensors"), load_file(tmp_path / "c" / "states.safetensors")
    for name, p in model.named_parameters():
        assert not p.is_contiguous() and torch.equal(saved[name], p)
        assert torch.equal(states[f"{name}.exp_avg_sq"], opt.state[p]["exp_avg_sq"])


@pytest.mark.parametrize("home", ["vram", "disk"])
def test_a_save_is_refused_where_a_unit_does_not_fit(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written. With the default, an asynchronous one takes what there is."""
    model, opt = streamed(home, tmp_path, 3, 256)
    unit = ELSEWHERE[home] // 16
    mt.save(model, opt, tmp_path / "before")
    nbytes = sum(p.stat().st_size for p in (tmp_path / "before").iterdir() if p.name != manifest.NAME)

    def free(n: int) -> None:
        found = HostLimits((Bound("cgroup box: memory.max", n, n, "raise it"),), files=(3, 1024))
        monkeypatch.setattr(room_module, "host_limits", lambda: found)

    free(with_margin(unit + nbytes) - 1)
    with pytest.raises(mt.MegatrainError, match=r"host memory to save[^$]*copies of a unit[^$]*raise it"):
        mt.save(model, opt, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    free(with_margin(unit + nbytes))
    mt.save(model, opt, tmp_path / "c", asynchronous=True).wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    folders = [where / str(i) for i, _ in enumerate(WAYS)]
    for folder in folders:
        folder.mkdir()
    print(json.dumps({f"{home} {late}": measure(home, late, folder) for (home, late), folder in zip(WAYS, folders)}))
