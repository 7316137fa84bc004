#!/usr/bin/env python3
"""What mt.plan says of a step beside what the step took: seconds, bytes of the device, bytes of the host.

    MEGATRAIN_MACHINE=machine.json python benchmarks/bench_plan.py           # doctor's rates of this machine
    python benchmarks/bench_plan.py --only 14b                               # cases whose name contains it
    python benchmarks/bench_plan.py --device cpu                             # toy sizes, to try the script

Every case is a process of its own, so that no memory is left over from another. One JSON line each on
stdout, a table on stderr. Bytes are the driver's for the device and the resident size for the host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch
from bench_step import make_batches, one_step, prediction, step_times
from common import GIB, SHAPE, WIDTHS, Clock, build_model, emit, host_rss_bytes, pick_device, say
from engines import ENGINES, planned

from megatrain_torch.base.errors import MegatrainError
from megatrain_torch.model.stream import runtime_of

WARMUP, STEPS = 1, 4
# name: width, layers, tokens, seq, plan, the device's limit, micro-batches, activations
CASES: dict[str, tuple[str, int, int, int, str, str | None, int | None, str]] = {
    "7b-4-8k-ram": ("7b", 4, 8192, 1024, "ram", None, None, "auto"),
    "7b-8-32k": ("7b", 8, 32768, 1024, "auto", None, None, "auto"),
    "7b-8-32k-20GiB": ("7b", 8, 32768, 1024, "auto", "20GiB", None, "auto"),
    "7b-12-32k-32GiB": ("7b", 12, 32768, 1024, "auto", "32GiB", None, "auto"),
    "7b-12-16k-24GiB": ("7b", 12, 16384, 1024, "auto", "24GiB", None, "auto"),
    "7b-20-32k": ("7b", 20, 32768, 1024, "auto", None, None, "auto"),
    "7b-20-2k": ("7b", 20, 2048, 1024, "auto", None, None, "auto"),
    "7b-8-64k-4096-micro2": ("7b", 8, 65536, 4096, "auto", None, 2, "auto"),
    "7b-12-64k-replay-micro4": ("7b", 12, 65536, 1024, "ram", "40GiB", 4, "replay"),
    "14b-8-32k": ("14b", 8, 32768, 1024, "auto", None, None, "auto"),
    "14b-8-64k-60GiB": ("14b", 8, 65536, 1024, "auto", "60GiB", None, "auto"),
    "14b-12-8k-ram": ("14b", 12, 8192, 1024, "ram", None, None, "auto"),
    "32b-5-32k": ("32b", 5, 32768, 1024, "auto", None, None, "auto"),
    "32b-5-16k-40GiB": ("32b", 5, 16384, 1024, "auto", "40GiB", None, "auto"),
}
MOST_SECONDS = 120


def arguments(name: str, toy: bool) -> argparse.Namespace:
    width, layers, tokens, seq, plan, vram, micro, activations = CASES[name]
    if toy:
        width, layers, tokens, seq, vram = "toy", 2, 64 * (micro or 1), 32, None
    shape = dict(zip(SHAPE, WIDTHS[width], strict=True))
    return argparse.Namespace(
        **shape, layers=layers, tokens=tokens, seq=seq, plan=plan, vram=vram, micro=micro, activations=activations,
        compute="auto", loss="hf", clip=1.0, lr=1e-5, states="fp32", batches=2, warmup=WARMUP, steps=STEPS,
        host=None, nvme=None, grads="ram",
    )  # fmt: skip


def run_case(name: str, device: torch.device) -> None:
    args = arguments(name, toy=device.type == "cpu")
    torch.manual_seed(0)
    model = build_model(args, args.layers, args.seq, torch.bfloat16)
    plan = planned(model, args)
    args.micro = plan.micro
    engine = ENGINES["streamed"](model, args, device, True, plan=plan)
    del model
    batches, clock = make_batches(args, device), Clock(device)
    for i in range(WARMUP + STEPS):
        one_step(engine, batches[i % len(batches)], args, clock)
    engine.finish()
    peaks: dict[str, float] = {}
    seconds = sorted(step_times(clock, args)["step_s"])
    found = {"seconds": seconds[len(seconds) // 2], "host_gib": host_rss_bytes()[0] / GIB}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["vram_gib"] = (total - free) / GIB
        peaks = {
            "torch_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "torch_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "store_gib": runtime_of(engine.model).core.device_bytes() / GIB,
        }
    said = prediction(plan)
    off = {key: said[key] / value - 1 for key, value in found.items()}
    tables = {"vram": plan.vram, "host": plan.host}
    emit(
        "plan", device, case=name, unit="s", median=found["seconds"], found=found, predicted=said, off=off,
        of_vram=peaks, tables=tables,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one")
    parser.add_argument("--case", choices=list(CASES), help="this one, in this process")
    args = parser.parse_args()
    device = pick_device(args.device)
    if args.case:
        try:
            run_case(args.case, device)
        except MegatrainError as why:
            emit("refused", device, case=args.case, why=str(why))
        return 0
    bad, began = 0, time.monotonic()
    for name in (n for n in CASES if not args.only or any(word in n for word in args.only)):
        words = [sys.executable, __file__, "--case", name, "--device", str(device)]
        try:
            done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"{name:26s} over {MOST_SECONDS} s")
            bad += 1
            continue
        print(done.stdout, end="", flush=True)
        record = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
        if "off" not in record:
            say(f"{name:26s} {record.get('why', f'exit status {done.returncode}')}")
            bad += 1
            continue
        off = record["off"]
        good = abs(off["seconds"]) <= 0.10 and all(abs(off[k]) <= 0.05 for k in off if k != "seconds")
        bad += not good
        columns = (f"{k} {record['found'][k]:.4g} said {record['predicted'][k]:.4g} ({off[k]:+.1%})" for k in off)
        say(f"{name:26s} {'met   ' if good else 'MISSED'} {'  '.join(columns)}  {time.monotonic() - began:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
