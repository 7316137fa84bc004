#!/usr/bin/env python3
"""Attention at the power limit: sustained rates over whole rows, over blocks of them, and as layers run it.

    python benchmarks/bench_attention.py                          # rows of 32k to 512k tokens, 28/4 heads of 128
    python benchmarks/bench_attention.py --rows 131072 --heads 40 --kv 8
    python benchmarks/bench_attention.py --device cpu             # toy sizes

"whole": one call over a causal row. "all": 32k queries that see all keys of the row. "layers": what a template's
attention does, which goes some queries at a time where a row is long (by_rows). Each
forward and each backward is run again and again for --seconds, of which the second half counts: a card that has just
been idle is faster than one at its limit. TFLOP/s of the operations that are wanted: 4 per pair of tokens that see
each other and element of a query, half as many pairs in a causal row; backward 2.5 times as many. JSON lines on
stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import add_device_argument, emit, say, synchronize, table

from megatrain_torch.fused.templates import attention
from megatrain_torch.fused.templates.attention import NEVER, Attention


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    add = parser.add_argument
    rows = [1 << 15, 1 << 17, 1 << 19] if cuda else [64, 128]
    add("--rows", type=int, nargs="+", default=rows, help="tokens of a row")
    add("--block", type=int, default=attention.ROWS if cuda else 32, help="queries at a time")
    add("--heads", type=int, default=28 if cuda else 4)
    add("--kv", type=int, default=4 if cuda else 2)
    add("--head", type=int, default=128 if cuda else 8, help="size of a head")
    add("--seconds", type=float, default=3.0 if cuda else 0.05)
    return parser.parse_args(), device


def sustained(fn: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Seconds of a call, in the second half of so many."""
    fn()
    synchronize(device)
    began, each = time.perf_counter(), []
    while not each or time.perf_counter() - began < seconds:
        before = time.perf_counter()
        fn()
        synchronize(device)
        each.append(time.perf_counter() - before)
    return statistics.mean(each[len(each) // 2 :])


class Case:
    """Queries [1, n, heads, head] on keys and values of a row."""

    def __init__(self, args: argparse.Namespace, device: torch.device, queries: int, keys: int, causal: bool) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = {"dtype": dtype, "device": device}
        self.q, self.dout = (torch.randn(1, queries, args.heads, args.head, **shape) for _ in range(2))
        self.k, self.v = (torch.randn(1, keys, args.kv, args.head, **shape) for _ in range(2))
        self.attention = Attention(args.head**-0.5, causal)
        self.flops = 4.0 * queries * keys * args.heads * args.head / (1 + causal)

    def measure(self, device: torch.device, seconds: float) -> dict[str, float]:
        """TFLOP/s each way."""
        q, k, v, one = self.q, self.k, self.v, self.attention
        out, kept = one.forward(q, k, v)
        forward = sustained(lambda: one.forward(q, k, v), device, seconds)
        backward = sustained(lambda: self._backward(out, kept), device, 1.5 * seconds)
        return {"forward": self.flops / forward / 1e12, "backward": 2.5 * self.flops / backward / 1e12}

    def _backward(self, out: torch.Tensor, kept: Any) -> None:
        if not self.attention.single_long_row(self.q, self.k, None):
            self.attention.backward(self.dout, self.q, self.k, self.v, out, kept)
            return
        blocks, gradients = self.attention.walk_back(self.q, self.k, self.v, out, kept)
        for block in blocks:
            gradients(block, self.dout[:, block])


def main() -> None:
    args, device = parse_args()
    lines = []
    for row in args.rows:
        block = min(args.block, row)
        for name, long, sizes in (("whole", NEVER, (row, row, True)), ("all", NEVER, (block, row, False)),
                                  ("layers", attention.LONG, (row, row, True))):  # fmt: skip
            attention.LONG, before = long, attention.LONG
            found = Case(args, device, *sizes).measure(device, args.seconds)
            attention.LONG = before
            case = f"{name}: {sizes[0]} queries, {row} keys, {args.heads}/{args.kv} heads of {args.head}"
            emit("attention", device, case=case, unit="TFLOP/s", **found)
            lines.append((case, f"forward {found['forward']:.0f}, backward {found['backward']:.0f} TFLOP/s"))
    say("attention, sustained:")
    table(lines)


if __name__ == "__main__":
    main()
