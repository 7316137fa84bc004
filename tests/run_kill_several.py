"""kill -9 of one of several processes, many times, while they train and save: the others end with its name, and any
number of processes goes on from a whole checkpoint.

    python tests/run_kill_several.py --times 50 [--folder /disk] [--phases]
    for i in 1 2 3 4 5; do python tests/run_kill_several.py --device cuda --times 4 --seed $i & done; wait    # two GPUs

Processes, as of one machine or, in turn, of one each, train a small model on the CPU device, with units at home in one
place and another, delivered whole or in shards, and save every other step, in turn while they wait and behind their back; now and then one alone
reads a moment. After a random time one is killed; all others must say which rank is gone within PATIENCE, and end by
themselves. The interpreter's own end takes a second of a core (it collects torch's modules), and may take a minute of a
machine on which ten others want that core: nine of nine ends of 9 to 36 s that were looked into were there. The next ones, as many, one more or one fewer, resume from what is there. test_several.py runs a few of these.
This prints a table. --phases: one kills itself within each phase of a short run, at a random time of it.
"""
from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo import Residual, update

sys.path.insert(0, str(Path(__file__).parent.parent))

PATIENCE = 30.0
ENDING = 120.0                           # more, for an interpreter that has said it
LAYERS, WIDTH = (12, 1024) if os.environ.get("DEVICE") == "cuda" else (4, 192)
DEVICE = "cpu"
HOMES = ("vram", "disk", "arrive", {"layers.0": "vram", "layers.2": "arrive", "layers.3": "disk"}, "ram", "through",
         "disk+weights")                     # of one machine; of several, "disk"
PHASES = ("fill", "step", "save", "load", "evaluate", "look", "close")
NOTES = re.compile(r"^step (\d+)$", re.MULTILINE)


def net() -> nn.Module:
    return Residual(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(torch.bfloat16)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(torch.bfloat16)).float().square().mean()


def rank_main(folder: Path) -> None:
    """One of the processes: trains until it is killed, or another is."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)      # where it is, should it not end
    from torch import distributed as dist

    import megatrain_torch as mt
    torch.set_num_threads(1)
    os.environ["GROUP_RANK"] = os.environ["RANK"] if os.environ["MACHINES"] != "1" else "0"
    device = os.environ["DEVICE"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder / os.environ['STORE']}",
                            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    homes = HOMES[int(os.environ["HOMES"])]
    homes = "disk" if homes == "disk+weights" and os.environ["MACHINES"] != "1" else homes
    plan = {"homes": homes, **({"delivery": "shards"} if os.environ["SHARDS"] == "1" else {})}
    if os.environ["PHASE"]:
        short(folder, plan)
        return
    model = mt.stream(net(), device, plan=plan, nvme=folder / "nvme")
    opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e-3)
    last, step = folder / "last", 0
    if last.exists():
        step = mt.load(model, opt, last)["step"]
        print(f"resumed at {step}", flush=True)
    while True:
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        loss_of(model, torch.randn(8, WIDTH).to(device)).backward()
        if step % 3 == dist.get_rank():
            next(model.parameters()).grad.norm()
        opt.step()
        opt.zero_grad()
        if step % 2 == dist.get_rank():
            opt.state[next(model.parameters())]["exp_avg"].norm()
        step += 1
        if step % 2 == 0:
            mt.save(model, opt, last, extra={"step": step}, asynchronous=step % 4 == 0)
        print(f"step {step}", flush=True)


def short(folder: Path, plan: dict[str, Any]) -> None:
    """A run of all phases, in one of which a rank kills itself."""
    import megatrain_torch as mt
    room = importlib.import_module("megatrain_torch.model.stream")
    own = room.engine

    def engine(*args: Any) -> Any:
        made = own(*args)
        _enter("fill")                               # before, who died is known to torchrun alone
        return made

    room.engine = engine
    model = mt.stream(net(), "cpu", plan=plan, nvme=folder / "nvme")
    opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e-3)
    x = torch.randn(8, WIDTH)
    for phase in PHASES[1:]:
        for _ in range(2):
            loss_of(model, x).backward()
            if phase == "look":
                _enter(phase)
                [p.grad.norm() for p in model.parameters()]
            opt.step()
            opt.zero_grad()
        if phase != "look":
            _enter(phase)
        for _ in range(3):
            if phase == "step":
                update(loss_of(model, x), opt)
            if phase == "save":
                mt.save(model, opt, folder / "short")
            if phase == "load":
                mt.load(model, opt, folder / "short")
            if phase == "evaluate":
                with torch.no_grad():
                    loss_of(model, x)
            if phase == "look":
                [s["exp_avg"].norm() for s in opt.state.values()]
    mt.unstream(model)


def _enter(phase: str) -> None:
    """The victim has so many milliseconds left, where this is the phase."""
    if phase == os.environ["PHASE"] and os.environ["RANK"] == os.environ["VICTIM"]:
        print(f"step 0 in {phase}", flush=True)
        killer = threading.Timer(float(os.environ["AFTER"]), os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()


def one_phase(folder: Path, number: int, rng: random.Random) -> str:
    phase, size = PHASES[number % len(PHASES)], rng.choice((2, 3, 4))
    victim, after = rng.randrange(size), rng.random() ** 2 * 0.2
    begun = _begin(folder, size, number, MACHINES=str(number // len(PHASES) % 2 + 1), PHASE=phase, VICTIM=str(victim),
                   AFTER=str(after))
    try:
        code = begun[victim].wait(120)
        if code != -signal.SIGKILL:
            return f"{phase}: over before rank {victim} was killed ({code})"
        return f"{phase}, {after:.3f} s, {_check_ends(folder, begun, victim, time.monotonic(), True)}"
    finally:
        _end(begun)


def _begin(folder: Path, size: int, number: int, **env: str) -> list[subprocess.Popen[str]]:
    (folder / "nvme").mkdir(exist_ok=True)
    shards = str(int(env["MACHINES"] == "1" and number // len(HOMES) % 2 == 0))
    return [subprocess.Popen([sys.executable, __file__, "--rank", "--folder", str(folder)], text=True,
                             stdout=(folder / f"out{r}").open("w"), stderr=(folder / f"err{r}").open("w"),
                             env=os.environ | {"RANK": str(r), "WORLD_SIZE": str(size), "STORE": f"store{number}",
                                                "HOMES": str(number % len(HOMES)), "PHASE": "", "DEVICE": DEVICE, **env, "SHARDS": shards})
            for r in range(size)]


def _end(begun: list[subprocess.Popen[str]]) -> None:
    for p in begun:
        p.kill()
        p.wait()


def one_kill(folder: Path, size: int, number: int, rng: random.Random, machines: int) -> str:
    """Raises: something was not as it must be. What happened."""
    begun = _begin(folder, size, number, MACHINES=str(machines))
    try:
        found = _kill_one(folder, begun, rng)
        if left := list((folder / "nvme").iterdir()):
            raise AssertionError(f"left behind: {left}")
        return found
    finally:
        _end(begun)


def _kill_one(folder: Path, begun: list[subprocess.Popen[str]], rng: random.Random) -> str:
    deadline = time.monotonic() + 120
    while not NOTES.search((folder / "out0").read_text()):
        if time.monotonic() > deadline or any(p.poll() is not None for p in begun):
            raise AssertionError("it did not begin:\n" + _said(folder, len(begun)))
        time.sleep(0.05)
    time.sleep(rng.random() * 1.5)
    victim, clock = rng.randrange(len(begun)), time.monotonic()
    os.kill(begun[victim].pid, signal.SIGKILL)
    return _check_ends(folder, begun, victim, clock)


def _check_ends(folder: Path, begun: list[subprocess.Popen[str]], victim: int, clock: float, over: bool = False) -> str:
    """over: the others may have been through."""
    others = [r for r in range(len(begun)) if r != victim]
    for r in others:
        text = (folder / f"err{r}").read_text
        while begun[r].poll() is None and not _names(text(), victim):
            if time.monotonic() > clock + PATIENCE:
                os.kill(begun[r].pid, signal.SIGUSR1)
                time.sleep(2)
                raise AssertionError(f"rank {r} says nothing after rank {victim} was killed:\n" + _said(folder, len(begun)))
            time.sleep(0.05)
        code = begun[r].wait(ENDING)
        if code == 0 and over:
            continue
        if code != 1 or not _names(text(), victim):
            raise AssertionError(f"rank {r} ended with {code} and does not name rank {victim}:\n{text()[-2000:]}")
    took = time.monotonic() - clock
    steps = NOTES.findall((folder / "out0").read_text())
    return f"{len(begun)} processes, rank {victim} killed at step {steps[-1] if steps else '?'}, the others ended after {took:.1f} s"


def _names(text: str, victim: int) -> bool:
    return f"rank {victim}" in text or "is gone" in text


def _said(folder: Path, size: int) -> str:
    return "\n".join(f"-- rank {r}\n{(folder / f'err{r}').read_text()[-8000:]}" for r in range(size))


def kill_in_phases(folder: Path, times: int, seed: int) -> Iterator[str]:
    """What happened each time."""
    rng = random.Random(seed)
    for number in range(times):
        yield one_phase(folder, number, rng)


def kill(folder: Path, times: int, seed: int) -> Iterator[str]:
    """What happened each time."""
    rng, size = random.Random(seed), 2
    for number in range(times):
        saved = (folder / "last").exists()
        found = one_kill(folder, size, number + seed, rng, 1 if DEVICE == "cuda" else 1 + number % 2)
        resumed = re.search(r"resumed at (\d+)", (folder / "out0").read_text())
        if saved and not resumed:
            raise AssertionError("it did not resume")
        found += f"; it had resumed at {resumed[1]}" if resumed else ""
        if left := [p.name for p in folder.iterdir() if p.name.startswith("last.old")]:
            raise AssertionError(f"left behind: {left}")
        yield found
        size = 2 if DEVICE == "cuda" else max(2, min(4, size + rng.choice((-1, 0, 1))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device", default="cpu", help="cuda: a GPU each, two processes")
    parser.add_argument("--rank", action="store_true", help="one of the processes")
    args = parser.parse_args()
    if args.rank:
        rank_main(args.folder)
        return
    global DEVICE
    DEVICE = args.device
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for line in (kill_in_phases if args.phases else kill)(Path(folder), args.times, args.seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
