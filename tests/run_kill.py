"""kill -9 at random moments of training and of saving, many times: each time the checkpoint loads, to the right bits.

    python tests/run_kill.py --times 100 [--folder /disk] [--device cuda]

A child trains a small model (some of it at home on the device, some with states on disk), saves every other step, in
turn while it waits and behind its back, and is killed after a random time. The next child resumes from what is there,
and notes which step it found and a hash of all weights, masters and states. At the end one uninterrupted run must
have had the same hash at each of these steps. Not part of the test suite, which must be short; prints a table.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zoo import Residual

sys.path.insert(0, str(Path(__file__).parent.parent))
import megatrain_torch as mt

LAYERS, WIDTH, BATCH = 6, 192, 8
PLANS: list[dict[str, Any]] = [
    {"homes": {"layers.0": "vram", "layers.1": "arrive", "layers.5": "disk"}}, {"homes": "ram"}]


def net() -> nn.Module:
    return Residual(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(LAYERS)))


def made(folder: Path, device: str, number: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = mt.stream(net().to(torch.bfloat16), device=device, nvme=str(folder), plan=PLANS[number % len(PLANS)])
    opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e-3)
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 1000)


def step(model: nn.Module, opt: Any, scheduler: Any, number: int) -> None:
    torch.manual_seed(number)                # dropout's masks too
    model(torch.randn(BATCH, WIDTH).to(torch.bfloat16)).float().square().mean().backward()
    opt.step()
    scheduler.step()
    opt.zero_grad()


def digest(model: nn.Module, opt: Any, scheduler: Any) -> str:
    h = hashlib.sha256(repr(scheduler.get_last_lr()).encode())
    for p, master in zip(model.parameters(), mt.masters(model).values()):
        for t in (p, master, *(opt.moments(p) if opt.state.get(p) else ())):
            h.update(t.detach().clone().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def train(folder: Path, device: str, number: int) -> None:
    """Resumes, notes what it found, and trains until it is killed."""
    whole = made(folder, device, number)
    at = mt.load(whole[0], whole[1], folder / "last", scheduler=whole[2]) if number else 0
    if number:
        with (folder / "found.jsonl").open("a") as f:
            f.write(json.dumps({"trial": number, "step": at, "hash": digest(*whole)}) + "\n")
            f.flush()
    else:
        mt.save(whole[0], whole[1], folder / "last", scheduler=whole[2], extra=0)
    (folder / "ready").touch()
    while True:
        step(*whole, at)
        at += 1
        if at % 2:
            mt.save(whole[0], whole[1], folder / "last", scheduler=whole[2], extra=at, asynchronous=at % 4 == 1, spare=1)


def reference(folder: Path, device: str, found: dict[int, str]) -> None:
    """Uninterrupted, and all at home in host memory: prints the steps at which its hash is another."""
    torch.manual_seed(0)
    model = mt.stream(net().to(torch.bfloat16), device=device)
    opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e-3)
    whole = model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 1000)
    wrong = []
    for at in range(max(found) + 1):
        if at in found and at > 0 and digest(*whole) != found[at]:
            wrong.append(at)
        step(*whole, at)
    (folder / "wrong.json").write_text(json.dumps(wrong))


def child(work: Callable[..., None], *args: Any) -> int:
    pid = os.fork()                          # of a process without threads, in which torch is imported
    if pid:
        return pid
    torch.set_num_threads(1)
    try:
        work(*args)
    except BaseException as e:
        sys.stderr.write(f"{type(e).__name__}: {e}\n")
    finally:
        os._exit(1 if work is train else 0)


def kill_one(folder: Path, device: str, number: int, most_s: float) -> str:
    """What it was at."""
    (folder / "ready").unlink(missing_ok=True)
    pid = child(train, folder, device, number)
    while not (folder / "ready").exists():
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise SystemExit(f"trial {number}: it ended by itself")
        time.sleep(0.005)
    time.sleep(random.uniform(0, most_s))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    drafts = list(folder.glob("last.tmp-*"))
    if not drafts:
        return "training"
    return "naming" if any((d / "manifest.json").exists() for d in drafts) else "saving"


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--times", type=int, default=100)
    args.add_argument("--most", type=float, default=0.5, help="seconds until a child is killed, at most")
    args.add_argument("--folder", type=Path, default=None)
    args.add_argument("--device", default="cpu")
    args.add_argument("--seed", type=int, default=1)
    given = args.parse_args()
    random.seed(given.seed)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        hit = Counter(kill_one(folder, given.device, i, given.most) for i in range(given.times))
        (folder / "ready").unlink()
        last = child(train, folder, given.device, given.times)
        while not _noted(folder, given.times):
            time.sleep(0.01)
        os.kill(last, signal.SIGKILL)
        os.waitpid(last, 0)
        lines = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
        os.waitpid(child(reference, folder, given.device, {f["step"]: f["hash"] for f in lines}), 0)
        wrong = json.loads((folder / "wrong.json").read_text())
        left = sorted(p.name for p in folder.iterdir() if p.name.startswith("last"))
    rows = [("killed", given.times), *sorted(hit.items()), ("resumed", len(lines)), ("steps in all", lines[-1]["step"]),
            ("resumed to other bits", len(wrong)), ("folders left", ", ".join(left))]
    sys.stdout.writelines(f"{what:24} {value}\n" for what, value in rows)
    sys.exit(1 if wrong or len(lines) != given.times else 0)


def _noted(folder: Path, number: int) -> bool:
    path = folder / "found.jsonl"
    return path.exists() and any(json.loads(line)["trial"] == number for line in path.read_text().splitlines())


if __name__ == "__main__":
    main()
