#!/usr/bin/env python3
"""What the machine can do, so that every other figure stands beside its limit.

    python benchmarks/limits.py                  # 7B shapes on CUDA, toy shapes without
    python benchmarks/limits.py --tokens 32768

Measures, with random data: the GEMMs of one decoder layer, forward and backward; copies between
pinned host memory and the device, each way and both at once; and a copy within host memory over all
threads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from common import (
    GIB,
    add_shape_arguments,
    emit,
    pick_device,
    repeat,
    say,
    spread,
    synchronize,
    table,
)

COPY_BYTES = 256 * 2**20  # PCIe reaches its rate from 16 MiB on


def layer_gemms(hidden: int, inter: int, heads: int, kv: int) -> list[tuple[int, int]]:
    """(in, out) features of a layer's matrices: q, k, v, o, gate, up, down."""
    kv_width = hidden // heads * kv
    return [
        (hidden, hidden),
        (hidden, kv_width),
        (hidden, kv_width),
        (hidden, hidden),
        (hidden, inter),
        (hidden, inter),
        (inter, hidden),
    ]


def gemm_tflops(args: Any, device: torch.device, tokens: int, reps: int) -> float:
    """TFLOP/s of a layer's products y = xW', dx = dyW, dW = dy'x, weighted as they occur."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def seconds(fan_in: int, fan_out: int) -> float:
        x = torch.randn(tokens, fan_in, device=device, dtype=dtype)
        dy = torch.randn(tokens, fan_out, device=device, dtype=dtype)
        w = torch.randn(fan_out, fan_in, device=device, dtype=dtype) * 0.02

        def products() -> None:
            x @ w.t()
            dy @ w
            dy.t() @ x

        return spread(repeat(products, device, reps))["median"]

    shapes = layer_gemms(args.hidden, args.inter, args.heads, args.kv)
    flops = sum(3 * 2.0 * tokens * fan_in * fan_out for fan_in, fan_out in shapes)
    return flops / sum(seconds(*shape) for shape in shapes) / 1e12


def copy_gbps(device: torch.device, reps: int) -> dict[str, float]:
    """GB/s host to device, device to host, and each way while both run; pinned host memory."""
    cuda = device.type == "cuda"
    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=cuda).random_() for _ in range(2)]
    dev = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_() for _ in range(2)]

    def up() -> None:
        dev[0].copy_(host[0], non_blocking=True)

    def down() -> None:
        host[1].copy_(dev[1], non_blocking=True)

    def rate(fn: Callable[[], None]) -> float:
        return COPY_BYTES / spread(repeat(fn, device, reps))["median"] / 1e9

    out = {"h2d_gbps": rate(up), "d2h_gbps": rate(down)}
    if cuda:
        side = torch.cuda.Stream(device)

        def both() -> None:
            here = torch.cuda.current_stream(device)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                down()
            up()
            here.wait_stream(side)

        out["both_ways_gbps"] = rate(both)
    return out


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


def measure(args: Any, device: torch.device, tokens: int, reps: int = 10) -> dict[str, float]:
    """All limits in one call.

    Args:
        args: Has hidden, inter, heads, kv (see add_shape_arguments).
        tokens: Rows of the GEMMs, as in one micro-batch.

    Returns:
        gemm_tflops, h2d_gbps, d2h_gbps, both_ways_gbps (CUDA; each direction), dram_gbps (read
        plus written), dram_threads.
    """
    threads = len(os.sched_getaffinity(0))
    found = {"gemm_tflops": gemm_tflops(args, device, tokens, reps), **copy_gbps(device, reps)}
    found |= {"dram_gbps": dram_gbps(reps, threads), "dram_threads": threads}
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device")
    known, _ = parser.parse_known_args()
    device = pick_device(known.device)
    add_shape_arguments(parser, tiny=device.type == "cpu")
    parser.add_argument("--tokens", type=int, default=16384 if device.type == "cuda" else 256)
    parser.add_argument("--reps", type=int, default=10)
    args = parser.parse_args()

    found = measure(args, device, args.tokens, args.reps)
    emit(
        "limits",
        device,
        tokens=args.tokens,
        hidden=args.hidden,
        inter=args.inter,
        reps=args.reps,
        **found,
    )
    say(f"limits of this machine ({args.tokens} tokens, hidden {args.hidden}):")
    table([(name, f"{value:,.4g}") for name, value in found.items()])


if __name__ == "__main__":
    main()
