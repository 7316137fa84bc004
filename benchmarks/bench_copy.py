#!/usr/bin/env python3
"""Copies as the engine makes them, weights in and gradients out, beside plain pinned copies.

    python benchmarks/bench_copy.py                 # units of a 7B layer's size
    python benchmarks/bench_copy.py --mib 64 --units 12

Weights are fetched from the store's arena (mmap, huge pages, registered with the device) through a
ring of slots by the recorded schedule; gradients go back through the offloader, which also sums
their squares on the device; "both" does one of each per unit. No arithmetic runs beside.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import limits
import torch
from common import add_device_argument, emit, say, spread, synchronize, table

from megatrain_torch import _core

ALIGN = 512  # bytes; of slots
SLOTS = 3


class NoTensors:
    """Slot hooks: nobody keeps a tensor in a slot here."""

    def held(self, slot: int) -> bool:
        return False

    def renew(self, slot: int) -> int:
        raise RuntimeError(f"slot {slot} is not held, so it needs no other memory")


class Ring:
    """An engine with `units` units of one bf16 parameter each, and gradients on the device."""

    def __init__(self, device: torch.device, units: int, unit_bytes: int) -> None:
        self.device = device
        self.core = _core.Engine(device.type, device.index or 0, threads=2)
        self.units = [
            self.core.add_unit(f"unit {i}", [_core.DTYPES["BF16"]], [unit_bytes // 2], [True])
            for i in range(units)
        ]
        for unit in self.units:
            weights = torch.from_numpy(self.core.plane(unit, 0, _core.PLANES["HI"]))
            weights.view(torch.bfloat16).normal_()
        self.slots = [self.memory(self.core.hi_bytes(self.units[0])) for _ in range(SLOTS)]
        self.core.open_slots([(m.data_ptr(), m.numel()) for m in self.slots], NoTensors())
        self.gradient = torch.randn(unit_bytes // 2, device=device).bfloat16()

    def memory(self, size: int) -> torch.Tensor:
        raw = torch.empty(size + ALIGN, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % ALIGN
        return raw[start : start + size]

    def sweep(self, fetch: bool, offload: bool) -> float:
        """Seconds in which every unit is fetched, or its gradient brought home, or both."""
        synchronize(self.device)
        cuda = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if cuda else 0
        began = time.perf_counter()
        if fetch:
            self.core.begin()
        for unit in self.units:
            if fetch:
                self.core.acquire(unit, stream)
            if offload:
                self.core.forget(unit)
                self.core.offload(unit, [(0, self.gradient.data_ptr(), 0, 0)], stream)
        synchronize(self.device)
        if offload:
            self.core.drain()
        return time.perf_counter() - began


def measure(ring: Ring, reps: int, fetch: bool, offload: bool) -> dict[str, Any]:
    """GB/s each way over `reps` sweeps behind three untimed ones."""
    found = []
    for _ in range(3 + reps):
        before = ring.core.stats()
        seconds = ring.sweep(fetch, offload)
        after = ring.core.stats()
        moved = max(after[k] - before[k] for k in ("h2d_bytes", "d2h_bytes"))
        found.append(moved / seconds / 1e9)
    return spread(found[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    parser.add_argument("--mib", type=int, default=444 if cuda else 4, help="of one unit")
    parser.add_argument("--units", type=int, default=12 if cuda else 6)
    parser.add_argument("--reps", type=int, default=10)
    args = parser.parse_args()
    if cuda:
        device = torch.device("cuda", torch.cuda.current_device())

    limit = limits.copy_gbps(device)
    ring = Ring(device, args.units, args.mib * 2**20)
    rows = []
    for name, fetch, offload, against in (
        ("h2d", True, False, "h2d_gbps"),
        ("d2h", False, True, "d2h_gbps"),
        ("both", True, True, "both_ways_gbps" if cuda else "h2d_gbps"),
    ):
        result = measure(ring, args.reps, fetch, offload)
        case = f"{name} {args.units} units of {args.mib} MiB"
        emit(
            "copy",
            device,
            case=case,
            unit="GB/s",
            warmup=3,
            **result,
            limit=limit[against],
            limit_from="pinned torch copies of 256 MiB in this run",
        )
        rows.append((case, f"{result['median']:.2f} GB/s, pinned copy {limit[against]:.2f}"))
    ring.core.close()
    say("engine copies, each way:")
    table(rows)


if __name__ == "__main__":
    main()
