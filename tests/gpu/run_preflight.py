"""At the edge of each kind of memory a model trains or is refused before it is allocated; none is killed. No pytest.

    python tests/gpu/run_preflight.py [--device cuda] [--only NAME ...]

Each configuration runs in a process of its own, with as many bytes as it needs or one less (limits of the kernel:
some more or less). It trains two steps, or raises the refusal; one JSON line each. Exit status 1 when one did neither, or
not what it should have. Some run at the same time: their limits are told, or the process's own, and they need a thousandth
of a machine.
"""
from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import doors  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import megatrain_torch as mt  # noqa: E402
from megatrain_torch.base.limits import Bound, HostLimits, host_limits, show_size, with_margin  # noqa: E402
from megatrain_torch.model import stream as wrap  # noqa: E402
from megatrain_torch.plans import room as room_module  # noqa: E402
from megatrain_torch.plans.tally import Asked  # noqa: E402
from megatrain_torch.store.disk import DISK_BUFFERS, file_bytes  # noqa: E402

WIDTH, LAYERS = 256, 6
UNIT = WIDTH * WIDTH
NUMEL = LAYERS * UNIT
LOADED, STEP, SUMS = 2 * NUMEL, 12 * NUMEL, 4 * NUMEL + 2 * 2 * UNIT    # bytes of bf16 weights; of a step; of ADD
MIB = 1 << 20
AT_ONCE = 4             # cases: most of a case's time is imports and the driver's, of one thread
REFUSALS = ("does not fit", "ulimit -n", "there and the limit is")


class Stack(nn.Module):
    """`layers` products of bf16 [width, width]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Linear(width, width, bias=False, device="meta", dtype=torch.bfloat16)
            layer.weight = nn.Parameter(torch.full((width, width), 1e-3, dtype=torch.bfloat16))
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Case(NamedTuple):
    """runs: what should come of it. before: called in the child, with the device, before anything else. early: it is
    mt.stream that refuses, before it allocates. says: the refusal does."""

    runs: bool
    asked: dict[str, Any]
    micro: int = 1
    before: Callable[[str], None] | None = None
    early: bool = False
    says: str = ""


def train(case: Case, device: str) -> None:
    plan = {"homes": "ram"} | case.asked.get("plan", {})    # or the first pass would move states to where there is room
    model = doors.stream(Stack(WIDTH, LAYERS), device=device, **case.asked | {"plan": plan})
    opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        for _ in range(case.micro):
            model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert opt.skipped_steps == 0
    mt.masters(model.layers[-1]) if hasattr(model.layers[-1], "_mt") else mt.unstream(model)


# ---- limits, made in the child ---------------------------------------------------------------------

def said(free: int, files: tuple[int, int] = (3, 1024)) -> Callable[[str], None]:
    """The kernel says that so many bytes are free."""
    def make(_: str) -> None:
        found = HostLimits((Bound("a limit", free, free, "raise it"),), files=files)
        room_module.host_limits = lambda: found
    return make


def slots_on_host(device: str) -> int:
    """On the CPU device slots are host memory: they come when the module's own tensors are gone."""
    return 3 * 2 * UNIT if device == "cpu" else 0


def loading(less: int) -> Callable[[str], None]:
    return lambda device: said(with_margin(max(2 * UNIT, slots_on_host(device))) - less)(device)


def no_engine(*_: Any) -> None:
    raise AssertionError("mt.stream has begun to allocate")


def rlimit(which: int, field: str, more: int) -> Callable[[str], None]:
    """The kernel's own: `more` bytes than the process has now."""
    def make(_: str) -> None:
        now = next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines()
                   if line.startswith(field + ":"))
        resource.setrlimit(which, (now + more, now + more))
    return make


def files(_: str) -> None:
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))


def written(limit: int, used: int) -> Callable[[str], None]:
    """A cgroup, as the kernel's files would say."""
    def make(_: str) -> None:
        root = Path(tempfile.mkdtemp(prefix="mt-preflight-"))
        for name, text in {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 67108864 kB\n",
                           "proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": str(limit),
                           "sys/fs/cgroup/job/memory.current": str(used)}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        room_module.host_limits = lambda: host_limits(root / "proc", root / "sys")
    return make


# ---- configurations --------------------------------------------------------------------------------

def cases(device: str) -> dict[str, Case]:
    """By name; those of the kernel's own limits leave half of the margin to what they cannot know."""
    slots, unit_home = 3 * 2 * UNIT, 2 * UNIT + 12 * UNIT
    whole = LOADED + STEP
    ample, scant = with_margin(STEP) + 512 * MIB, with_margin(STEP) - 8 * MIB
    found = {
        "host=all": Case(True, {"host": whole}),
        "host=all-1": Case(False, {"host": whole - 1}, early=True),
        "host=all,micro": Case(True, {"host": whole + SUMS}, 2),
        "host=all-1,micro": Case(False, {"host": whole + SUMS - 1}, 2),
        "weights": Case(False, {}, before=loading(1), early=True),
        "weights,host=": Case(True, {"host": whole}, before=loading(1)),
        "states": Case(True, {}, before=said(with_margin(STEP))),
        "states-1": Case(False, {}, before=said(with_margin(STEP) - 1)),
        "cgroup_files": Case(True, {}, before=written(with_margin(STEP) + 10**9, 10**9)),
        "cgroup_files-1": Case(False, {}, before=written(with_margin(STEP) + 10**9, 10**9 + 1)),
        "ulimit_-n": Case(False, {}, before=files),
        "unlocked": Case(True, {"plan": {"debug": {"lock": 0}}}),
        "unlocked,some": Case(True, {"plan": {"debug": {"lock": 5 * UNIT}}}, 2),
        "vram=slots": Case(True, {"vram": slots - 2 * UNIT}),                  # two are enough
        "vram=slots-1": Case(False, {"vram": slots - 2 * UNIT - 1}, early=True),
        "vram=homes": Case(True, {"vram": LAYERS * unit_home, "plan": {"homes": "vram"}}),
        "vram=homes-1": Case(False, {"vram": LAYERS * unit_home - 1, "plan": {"homes": "vram"}}, early=True),
    }
    found |= disk_cases()
    if device == "cpu":                     # the CUDA driver reserves addresses by the terabyte
        for flag, which, field in (("-d", resource.RLIMIT_DATA, "VmData"), ("-v", resource.RLIMIT_AS, "VmSize")):
            found[f"ulimit_{flag}"] = Case(True, {}, before=rlimit(which, field, ample))
            found[f"ulimit_{flag},scant"] = Case(False, {}, before=rlimit(which, field, scant))
    else:
        del found["vram=slots"], found["vram=homes"]     # the context alone needs more than these
    return found


def disk_cases() -> dict[str, Case]:
    """Directories with room for what is at home there of all units, and with a byte less; then host memory, with and
    without a byte of what is left to it: gradients, and the disk's buffers, which come before the first unit's weights.
    """
    found: dict[str, Case] = {}
    for name, home in (("disk", "disk"), ("weights_on_disk", "disk+weights")):
        need = file_bytes(at_home(home))
        found[name] = Case(True, on_disk(home, need))
        found[f"{name}-1"] = Case(False, on_disk(home, need - 1), early=True, says=f"raise it to {show_size(need)},")
    host, begin = sum(at_home(home).host().values()), with_margin(at_home(home).host().get(DISK_BUFFERS, 0) + 2 * UNIT)
    return found | {
        "weights_on_disk,host=all": Case(True, on_disk(home) | {"host": host}),
        "weights_on_disk,host=all-1": Case(False, on_disk(home) | {"host": host - 1}, early=True, says=f"host={show_size(host)!r}"),
        "weights_on_disk,free": Case(True, on_disk(home), before=said(begin)),
        "weights_on_disk,free-1": Case(False, on_disk(home), before=said(begin - 1), early=True,
                                       says="1 B more under the limit"),
    }


def at_home(home: str) -> Asked:
    groups = [(name, [(name, p)]) for name, p in Stack(WIDTH, LAYERS).named_parameters()]
    return Asked("Stack", groups, None, (home,) * LAYERS)


def on_disk(home: str, limit: int | None = None) -> dict[str, Any]:
    """Of mt.stream's arguments those with a directory of its own, and so many bytes of it."""
    return {"nvme": {"path": tempfile.mkdtemp(prefix="mt-preflight-"), "limit": limit}, "plan": {"homes": home}}


# ---- running ---------------------------------------------------------------------------------------

def child(case: Case, device: str, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.empty(1, device=device)       # the context is there before limits are read
    try:
        if case.before is not None:
            case.before(device)
        if case.early:
            wrap.engine = no_engine
        train(case, device)
        pipe.send(("ran", ""))
    except mt.MegatrainError as why:
        pipe.send(("refused" if any(word in str(why) for word in REFUSALS) else "failed", str(why)))


class Running(NamedTuple):
    name: str
    case: Case
    process: Any
    began: float


def run(wanted: list[tuple[str, Case]], device: str) -> Iterator[tuple[Running, str, str]]:
    """(which, "ran" | "refused" | "failed" | "killed ...", the message) as they end."""
    left, under_way = iter(wanted), {}
    while True:
        for name, case in itertools.islice(left, AT_ONCE - len(under_way)):
            pipe, process = begin(case, device)
            under_way[pipe] = Running(name, case, process, time.perf_counter())
        if not under_way:
            return
        for pipe in multiprocessing.connection.wait(list(under_way)):
            one = under_way.pop(pipe)
            yield one, *ended(pipe, one.process)


def begin(case: Case, device: str) -> tuple[Any, Any]:
    """(the end of a pipe that reads, the process)."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(case, device, theirs))
    process.start()
    theirs.close()                          # before the next one is begun, or that would hold this pipe open
    return ours, process


def ended(pipe: Any, process: Any) -> tuple[str, str]:
    try:
        found = pipe.recv()
    except EOFError:
        found = ("", "")
    process.join()
    return found if process.exitcode == 0 and found[0] else (f"killed, status {process.exitcode}", found[1])


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    ask.add_argument("--only", nargs="*")
    args = ask.parse_args()
    with tempfile.TemporaryDirectory(prefix="mt-preflight-") as tempfile.tempdir:
        return run_all(args)


def run_all(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if args.device == "cpu":
        importlib.import_module("torch._dynamo")         # what the first optimizer imports, once for all children
    chosen = [(name, case) for name, case in cases(args.device).items() if not args.only or name in args.only]
    good = True
    for one, outcome, why in run(chosen, args.device):
        ok = outcome == ("ran" if one.case.runs else "refused") and one.case.says in why
        good &= ok
        print(json.dumps({"test": "preflight", "case": one.name, "outcome": outcome, "ok": ok, "device": args.device,
                          "why": why if not ok else why.partition("\n")[0], "torch": torch.__version__,
                          "seconds": round(time.perf_counter() - one.began, 1)}), flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
