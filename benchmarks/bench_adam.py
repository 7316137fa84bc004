#!/usr/bin/env python3
"""AdamW on the host: parameters per second, beside a loop with the same reads and writes, and torch.

    python benchmarks/bench_adam.py --params 400000000 --threads 16

One JSON line per measurement on stdout, a table on stderr:

    adam_step     our update of split bf16 weights (or of fp32 or fp16 ones), in any format of states
    adam_traffic  the same planes read and written with next to no arithmetic: the limit
    torch_adamw   torch.optim.AdamW(fused=True) on fp32 weights, for scale; no bf16 copy is written

The two of ours take turns, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from common import emit, say, spread, table

from megatrain_torch import _core
from megatrain_torch.plans.doctor import ISAS, TORCH, Planes

CPU = torch.device("cpu")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--params", type=int, default=100_000_000)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--dtype", choices=list(TORCH), default="BF16", help="of the weights")
    add("--grad-dtype", choices=list(TORCH), help="default: as the weights; F32: a micro-batch sum")
    add("--states", choices=list(_core.STATES), default="fp32")
    add("--isa", choices=ISAS, default=_core.build_info()["isa"])
    add("--reps", type=int, default=15)
    add("--no-torch", action="store_true")
    return parser.parse_args()


def seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def ours(args: argparse.Namespace) -> tuple[float, list[float], list[float]]:
    """Bytes per parameter; seconds of each update, and of each pass of the traffic loop.

    The loop has planes of its own: what it leaves in them is not fit for an update.
    """
    grad = args.grad_dtype or args.dtype
    update, loop = (Planes(args.params, args.dtype, grad, args.states) for _ in range(2))
    isa, step_s, loop_s = ISAS.index(args.isa), [], []
    for i in range(-2, args.reps):  # two to warm up
        step = update.tensors(i + 3)
        a = seconds(lambda step=step: _core.adam_step(step, 0.9, args.threads, isa))
        b = seconds(lambda: _core.adam_traffic(loop.tensors(1), args.threads, isa))
        if i >= 0:
            step_s.append(a)
            loop_s.append(b)
    sizes = [0 if p is None else p.nbytes for p in update.planes]
    moved = (2 * sum(sizes) - sizes[5]) / update.n  # all but the gradient are written too
    return moved, step_s, loop_s


def torchs(args: argparse.Namespace) -> list[float]:
    torch.set_num_threads(args.threads)
    p = torch.nn.Parameter(torch.empty(args.params).uniform_(-0.05, 0.05))
    p.grad = torch.empty(args.params).uniform_(-1e-3, 1e-3)
    optimizer = torch.optim.AdamW([p], lr=1e-5, weight_decay=0.1, fused=True)
    return [seconds(optimizer.step) for _ in range(-2, args.reps)][2:]


def main() -> None:
    args = parse_args()
    each, step_s, loop_s = ours(args)
    rates = {
        "adam_step": (each, [args.params / s / 1e9 for s in step_s]),
        "adam_traffic": (each, [args.params / s / 1e9 for s in loop_s]),
    }
    if not args.no_torch:
        # fp32: weight, m, v read and written, gradient read
        rates["torch_adamw"] = (28, [args.params / s / 1e9 for s in torchs(args)])

    case = f"{args.dtype} weights, {args.grad_dtype or args.dtype} gradient, {args.states} states, {args.isa}"
    limit = spread(rates["adam_traffic"][1])["median"]
    rows = []
    for name, (bytes_each, rate) in rates.items():
        found = spread(rate)
        mine = name != "torch_adamw"
        emit(
            name,
            CPU,
            case=case if mine else "fp32, torch.optim.AdamW(fused=True)",
            params=args.params,
            threads=args.threads,
            unit="Gparam/s",
            **found,
            gbps=found["median"] * bytes_each,
            **({"limit": limit, "limit_from": "adam_traffic"} if name == "adam_step" else {}),
        )
        rows.append(
            (name, f"{found['median']:6.2f} Gparam/s  {found['median'] * bytes_each:6.1f} GB/s")
        )
    share = spread([a / b for a, b in zip(loop_s, step_s)])["median"]
    rows.append(("step / traffic", f"{share:6.1%}  (median of pairs)"))
    say(f"{case}, {args.params / 1e6:.0f} M parameters, {args.threads} threads")
    table(rows)


if __name__ == "__main__":
    main()
