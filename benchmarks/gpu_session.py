#!/usr/bin/env python3
"""All that is measured on a GPU machine, section by section, each program with a time limit.

    OUT=results python benchmarks/gpu_session.py                    # everything
    OUT=results python benchmarks/gpu_session.py --only step copy   # names that contain one
    OUT=/tmp/out python benchmarks/gpu_session.py --tiny            # toy sizes on the CPU device
    python benchmarks/gpu_session.py --list

JSON lines go to $OUT/results.jsonl as they come, everything else to $OUT/session.log. A program
that fails or runs out of time does not stop the others. A table of all figures ends the output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
TINY_DROPS = {"--layers", "--tokens", "--seq", "--params", "--steps", "--warmup", "--width", "--vram"}


def program(seconds: int, path: str, *words: str | int) -> tuple[int, list[str]]:
    """A script of this repository with its arguments, and the most seconds it may take."""
    return seconds, [path, *map(str, words)]


def step(seconds: int, *words: str | int) -> tuple[int, list[str]]:
    return program(seconds, "benchmarks/bench_step.py", *words)


def own(seconds: int, *words: str | int) -> tuple[int, list[str]]:
    """A step of the model's own code, recomputed, with its loss in chunks."""
    settings = ("--compute", "eager", "--activations", "replay", "--loss", "chunked")
    return step(seconds, *settings, *words)


def overhead(seconds: int, *words: str | int) -> tuple[int, list[str]]:
    return own(seconds, "--overhead", "--layers", 8, "--steps", 4, "--warmup", 1, *words)


# In order of worth: when the time is short, the first sections are the ones that ran.
SECTIONS: dict[str, list[tuple[int, list[str]]]] = {
    "limits": [program(60, "benchmarks/limits.py")],
    "parity": [program(400, "tests/gpu/run_parity.py", "--seconds", 300)],
    "adam": [program(90, "benchmarks/bench_adam.py", "--params", 400_000_000)],
    "copy": [program(90, "benchmarks/bench_copy.py")],
    "ops": [program(120, "benchmarks/bench_ops.py")],
    "layers": [program(180, "benchmarks/bench_layer.py")],
    "host-overhead": [
        own(90, "--host-overhead", "--layers", 64, "--activations", "replay"),
        own(90, "--host-overhead", "--layers", 64, "--activations", "saved"),
    ],
    "overhead": [
        overhead(180, "--tokens", 16384, "--activations", "saved"),
        overhead(180, "--tokens", 32768, "--activations", "saved"),
        overhead(180, "--tokens", 32768, "--activations", "replay"),
    ],
    "step-12": [own(180, "--layers", 12, "--tokens", 32768)],
    "step-20": [
        own(240, "--layers", 20, "--tokens", 32768),
        own(240, "--layers", 20, "--tokens", 16384),
    ],
    "step-28": [own(300, "--layers", 28, "--tokens", 32768)],
    "step-long": [own(240, "--layers", 20, "--tokens", 65536, "--seq", 4096)],
    # 20 steps of the same batches and seeds; the table compares their losses.
    "losses": [
        own(180, "--engine", engine, "--layers", 8, "--tokens", 8192, "--lr", 1e-4, "--steps", 18)
        for engine in ("streamed", "resident")
    ],
    "resident-12": [
        own(120, "--engine", "resident", "--layers", 12, "--tokens", 32768, "--no-optimizer")
    ],
    "fsdp2-12": [step(300, "--engine", "fsdp2", "--layers", 12, "--tokens", 32768, "--steps", 3)],
}


def shrunk(words: list[str]) -> list[str]:
    """The same program on the CPU device with its own toy sizes: flags that set others go, with their values."""
    kept, skip = [], False
    for word in words:
        if not skip and word not in TINY_DROPS:
            kept.append(word)
        skip = word in TINY_DROPS
    if words[0].endswith("bench_adam.py"):
        return [*kept, "--params", "1000000"]
    return kept if words[0] == "-m" else [*kept, "--device", "cpu"]


class Results:
    """results.jsonl, session.log and the screen; what has been measured so far."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lines: IO[str] = open(folder / "results.jsonl", "a")
        self.log: IO[str] = open(folder / "session.log", "a")
        self.records: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self.log, flush=True)

    def take(self, section: str, line: str) -> None:
        """A line that a program printed."""
        try:
            record = {"section": section, **json.loads(line)} if line.startswith("{") else None
        except ValueError:
            record = None
        if record is None:
            self.say(line)
            return
        self.records.append(record)
        print(json.dumps(record), file=self.lines, flush=True)


def run(section: str, words: list[str], limit_s: float, results: Results) -> str:
    """Run one program; "ok", or what became of it."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    late = threading.Event()
    timer = threading.Timer(limit_s, lambda: (late.set(), child.kill()))
    timer.start()
    for line in child.stdout:
        results.take(section, line.rstrip())
    child.wait()
    timer.cancel()
    if late.is_set():
        return f"stopped after {limit_s:.0f} s"
    # A negative status is a signal; -9 without our timer is the kernel, out of host memory.
    return "ok" if child.returncode == 0 else f"exit status {child.returncode}"


def summary(records: list[dict[str, Any]]) -> list[str]:
    """A line for each measurement, and how far the losses of two engines are apart."""
    out = []
    for r in records:
        if "median" in r:
            beside = f"  (limit {r['limit']:.4g})" if "limit" in r else ""
            case = r.get("case", "")
            out.append(f"{r['bench']:<14}{r['median']:>12.5g} {r['unit']:<18}{beside:<18} {case}")
        elif r.get("bench") == "limits":
            found = (f"{k} {v:.4g}" for k, v in r.items() if k.endswith(("_tflops", "_gbps")))
            out.append("limits        " + ", ".join(found))
        elif "ok" in r:
            out.append(f"{r['section']:<14}{r['ok']} of {r['runs']} cases equal")
    return out + loss_distance([r for r in records if r["section"] == "losses"])


def loss_distance(runs: list[dict[str, Any]]) -> list[str]:
    if len(runs) != 2:
        return []
    pairs = list(zip(runs[0]["losses"], runs[1]["losses"], strict=True))
    worst = max(abs(a - b) for a, b in pairs)
    (a0, b0), (a1, b1) = pairs[0], pairs[-1]
    return [
        f"losses        at most {worst:.4f} apart in {len(pairs)} steps; streamed {a0} -> {a1}, "
        f"resident {b0} -> {b1}"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="sections whose name contains one")
    parser.add_argument("--seconds", type=float, default=1800, help="for all sections together")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU device")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = {
        name: programs
        for name, programs in SECTIONS.items()
        if not args.only or any(word in name for word in args.only)
    }
    if args.list:
        for name, programs in chosen.items():
            print(f"{name:<14} at most {sum(seconds for seconds, _ in programs):4d} s")
        return 0

    results = Results(Path(os.environ.get("OUT", "results")))
    began, outcomes = time.monotonic(), []
    for name, programs in chosen.items():
        for seconds, words in programs:
            words = shrunk(words) if args.tiny else words
            left = args.seconds - (time.monotonic() - began)
            results.say(f"== {name}: {' '.join(words)}")
            start = time.monotonic()
            outcome = run(name, words, min(seconds, left), results) if left > 10 else "no time left"
            outcomes.append(outcome)
            results.say(f"== {name}: {outcome}, {time.monotonic() - start:.0f} s")
    results.say("\n" + "\n".join(summary(results.records)))
    results.say(f"{outcomes.count('ok')} of {len(outcomes)} programs ended well")
    return int(any(outcome != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
