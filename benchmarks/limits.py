#!/usr/bin/env python3
"""What the machine can do, so that every other figure stands beside its limit.

    python benchmarks/limits.py                  # 7B shapes on CUDA, toy shapes without
    python benchmarks/limits.py --tokens 32768

Measures, with random data: the products and attention of one decoder layer and the head
(yardstick.py); copies between pinned host memory and the device, each way and both at once; a copy
within the device's memory and one within the host's; and AdamW on the host, over all threads.
"""

from __future__ import annotations

import argparse
import os

import torch
import yardstick
from bench_adam import seconds
from common import GIB, add_device_argument, add_shape_arguments, emit, repeat, say, spread, synchronize, table

from megatrain_torch import _core
from megatrain_torch.plans.doctor import ISAS, Planes, copy_rates

COPY_BYTES = 256 * 2**20  # PCIe reaches its rate from 16 MiB on
COPY_S = 0.1  # that repetitions of one copy take together


def copy_gbps(device: torch.device) -> dict[str, float]:
    """GB/s host to device, device to host, and each way while both run; pinned host memory."""
    found = copy_rates(device, COPY_BYTES, COPY_S)
    both = found.pop("both_gbps")
    return found | ({"both_ways_gbps": both} if device.type == "cuda" else {})


def dram_gbps(reps: int, threads: int) -> float:
    """GB/s (read plus written) of a copy within host memory, spread over `threads`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size = (
        2 * GIB if threads > 4 else GIB // 4
    )  # far beyond the caches of a machine with that many cores
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    seconds = spread(repeat(lambda: target.copy_(source), torch.device("cpu"), reps))["median"]
    torch.set_num_threads(before)
    return 2 * size / seconds / 1e9


def adam_gparams(reps: int, threads: int, weight: str, states: str) -> float:
    """G parameters/s of AdamW on the host, with gradients in the weight's type."""
    planes = Planes(200_000_000 if threads > 4 else 4_000_000, weight, weight, states)
    isa = ISAS.index(_core.build_info()["isa"])
    step_s = [
        seconds(lambda i=i: _core.adam_step(planes.tensors(i + 1), 0.9, threads, isa))
        for i in range(2 + reps)
    ]
    return planes.n / spread(step_s[2:])["median"] / 1e9


def device_gbps(device: torch.device, reps: int) -> float:
    """GB/s (read plus written) of a copy within the device's memory."""
    size = GIB if device.type == "cuda" else GIB // 64
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(2))
    return 2 * size / spread(repeat(lambda: target.copy_(source), device, reps))["median"] / 1e9


def rates(device: torch.device, reps: int = 5, states: str = "fp32") -> dict[str, float]:
    """What the machine does besides arithmetic on the device; AdamW in this format of states.

    Returns:
        h2d_gbps, d2h_gbps, both_ways_gbps (CUDA; each direction), device_gbps and dram_gbps (read plus
        written), adam_gparams, threads.
    """
    threads = len(os.sched_getaffinity(0))
    weight = "BF16" if device.type == "cuda" else "F32"
    found = copy_gbps(device) | {
        "device_gbps": device_gbps(device, reps),
        "dram_gbps": dram_gbps(reps, threads),
        "adam_gparams": adam_gparams(reps, threads, weight, states),
        "threads": threads,
    }
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    add_shape_arguments(parser, tiny=device.type == "cpu")
    parser.add_argument("--tokens", type=int, default=16384 if device.type == "cuda" else 256)
    parser.add_argument("--seq", type=int, default=1024 if device.type == "cuda" else 64)
    parser.add_argument("--reps", type=int, default=10)
    args = parser.parse_args()

    found = yardstick.measure(args, device, 1, args.tokens, args.seq) | rates(device, args.reps)
    shape = {name: getattr(args, name) for name in ("tokens", "seq", "hidden", "inter", "reps")}
    emit("limits", device, **shape, **found)
    say(f"limits of this machine ({args.tokens} tokens, hidden {args.hidden}):")
    table([(name, f"{value:,.4g}") for name, value in found.items() if name != "each_ms"])


if __name__ == "__main__":
    main()
