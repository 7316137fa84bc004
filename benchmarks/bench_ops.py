#!/usr/bin/env python3
"""The layer ops: time and rate of each, beside the machine's limit and torch's own way.

    python benchmarks/bench_ops.py                      # 7B widths on CUDA, toy sizes without
    python benchmarks/bench_ops.py --only rms rope      # names that contain one

One JSON line per measurement on stdout, a table on stderr. `bytes` is what must be read and written once;
`torch_ms` is what eager torch takes for the same result. The limit of an op bound by memory is a copy on the
device in the same run, read and written bytes counted; that of a product of matrices is torch.mm of its shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from common import add_shape_arguments, emit, pick_device, repeat, say, spread, table
from torch import Tensor

import megatrain_torch.ops  # noqa: F401  registers torch.ops.megatrain

Call = Callable[[], Any]
COPY_BYTES = 2**30


class Case(NamedTuple):
    """One op at one shape. Bound by memory (nbytes), or by arithmetic (flops, and mm: the same as torch.mm)."""

    name: str
    shape: str
    call: Call
    torch: Call | None
    nbytes: int = 0
    flops: float = 0
    mm: Call | None = None


class Maker:
    """Random tensors of the run's device and type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# ---- the ops: each room yields its cases, with memory that lives until the next one ----


def sumsq(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    g = new(args.inter, args.hidden)
    shape = f"[{args.inter}, {args.hidden}]"
    yield Case(
        "sumsq",
        shape,
        lambda: torch.ops.megatrain.sumsq(g),
        lambda: torch.linalg.vector_norm(g, dtype=torch.float32),
        nbytes(g),
    )


ROOMS = (sumsq,)


# ---- measuring ----


def copy_gbps(device: torch.device, reps: int, size: int) -> float:
    """GB/s of a copy on the device, read and written bytes counted."""
    a = torch.empty(size, dtype=torch.uint8, device=device).random_()
    b = torch.empty_like(a)
    return 2 * size / spread(repeat(lambda: b.copy_(a), device, reps))["median"] / 1e9


def measure(case: Case, device: torch.device, reps: int, copy: float) -> tuple[str, str]:
    """Emit the case's line; its row of the table."""
    seconds = repeat(case.call, device, reps)
    beside = spread(repeat(case.torch, device, reps))["median"] if case.torch else None
    amount, unit, scale = (case.flops, "TFLOP/s", 1e12) if case.flops else (case.nbytes, "GB/s", 1e9)
    limit, limit_from = copy, "device copy"
    if case.mm is not None:
        limit = case.flops / spread(repeat(case.mm, device, reps))["median"] / 1e12
        limit_from = "torch.mm"
    rate = spread([amount / s / scale for s in seconds])
    ms = spread(seconds)["median"] * 1e3
    emit(
        "op",
        device,
        op=case.name,
        case=case.shape,
        unit=unit,
        **rate,
        ms=ms,
        bytes=case.nbytes or None,
        flops=case.flops or None,
        limit=limit,
        limit_from=limit_from,
        torch_ms=beside * 1e3 if beside else None,
    )
    share = f"{rate['median']:8.1f} {unit} ({rate['median'] / limit:4.0%})"
    torch_says = f"   torch {beside * 1e3:8.3f} ms" if beside else ""
    return f"{case.name} {case.shape}", f"{ms:8.3f} ms {share}{torch_says}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--only", nargs="*", default=[], help="names that contain one of these")
    parser.add_argument("--reps", type=int, default=20)
    tiny = not torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=256 if tiny else 32768)
    parser.add_argument("--head", type=int, default=16 if tiny else 128, help="numbers in a head")
    add_shape_arguments(parser, tiny)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device(args.device)
    new = Maker(device, getattr(torch, args.dtype))
    copy = copy_gbps(device, args.reps, COPY_BYTES if device.type == "cuda" else 2**22)
    rows = [("device copy", f"{copy:8.1f} GB/s")]
    for room in ROOMS:
        rows += [
            measure(case, device, args.reps, copy)
            for case in room(args, new)
            if not args.only or any(word in case.name for word in args.only)
        ]
    say(f"{args.dtype}, {args.tokens} tokens")
    table(rows)


if __name__ == "__main__":
    main()
