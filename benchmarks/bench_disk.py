#!/usr/bin/env python3
"""States on disk: the rate at which updates move them beside the drive's own, and what that costs a step.

    python benchmarks/bench_disk.py --path /scratch
    python benchmarks/bench_disk.py --path /scratch --width 7b --layers 28 --tokens 131072 --on-disk 1
    python benchmarks/bench_disk.py --path . --device cpu          # toy sizes, to try the script

"rate": AdamW over units whose states are in a file, step after step with nothing beside, against the
same file system moved raw: pieces of the same size, as many under way, as much read as written, no sums.
Raw is measured before and after each engine run, since drives slow down when they are written for long.
"step": the same model with all states in RAM and with those of the last layers on disk, in turn. How many
layers: --on-disk, or as many as the drive can move while the layers before them compute: an update begins
when the norm is known and must be over when its layer's forward comes, so that a drive of 6 GB/s hides a
tenth of the layers behind 128k tokens, and none behind few.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from common import (
    GIB,
    Clock,
    add_device_argument,
    add_shape_arguments,
    build_model,
    early,
    emit,
    parameter_count,
    say,
    spread,
    synchronize,
    table,
)

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.base.limits import cpus
from megatrain_torch.model.stream import runtime_of

PIECE, DEPTH, THREADS = 32 << 20, 8, 16  # as mt.stream has them
STATE_BYTES = 10  # of a bf16 parameter: low half, moments
HYPER = (1e-5, 0.9, 0.999, 1e-8, 0.1)
MANY_LAYERS = {"hidden": 2048, "inter": 5632, "heads": 16, "kv": 4, "vocab": 32000}
BLOCK_STEPS = 4  # steps of one model before the other has its turn; the first is not counted
HIDDEN = 0.7  # of the forward before them, that states of the last layers may take when chosen here
PAUSE_S = 1.0  # before each raw run: what a drive still does of the one before


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    add_shape_arguments(parser, tiny=not cuda)
    if cuda and early("width") is None:
        parser.set_defaults(**MANY_LAYERS)
    add = parser.add_argument
    add("--path", default=tempfile.gettempdir(), help="a directory on the drive")
    add("--gib", type=float, default=16.0 if cuda else 0.125, help="of states in the rate's file")
    add("--piece", type=int, default=PIECE if cuda else 1 << 20, help="bytes")
    add("--threads", type=int, default=max(1, cpus() - 1), help="of AdamW")
    add("--reps", type=int, default=5)
    add("--layers", type=int, default=32 if cuda else 4)
    add("--seq", type=int, default=1024 if cuda else 64)
    add("--tokens", type=int, default=131072 if cuda else 2048, help="in a step")
    add("--on-disk", type=int, help="layers whose states are on disk; default: what can hide")
    add("--steps", type=int, default=4, help="turns of each model")
    return parser.parse_args(), device


# ---- rate ----


def raw(args: Any) -> dict[str, float]:
    """GB/s of the drive: write, read, and both together (read plus written)."""
    time.sleep(PAUSE_S)
    found = _core.disk_measure(args.path, int(args.gib * GIB), args.piece, DEPTH, THREADS)
    return {k: found[k] / 1e9 for k in ("write", "read", "both")} | {"direct": found["direct"]}


class States:
    """Units of one bf16 parameter each with their states in a file; gradients are there once and for all."""

    def __init__(self, args: Any) -> None:
        numel = min(int(args.gib * GIB) // STATE_BYTES // 4, 1 << 28)
        self.core = _core.Engine("cpu", threads=args.threads)
        bf16 = _core.DTYPES["BF16"]
        count = max(1, int(args.gib * GIB) // STATE_BYTES // numel)
        self.units = [self.core.add_unit(f"unit {i}", [bf16], [numel], [True]) for i in range(count)]
        for unit in self.units:
            for plane in ("HI", "GRAD"):
                values = torch.from_numpy(self.core.plane(unit, 0, _core.PLANES[plane]))
                values.view(torch.bfloat16).fill_(0.01)
        self.core.disk(args.path, self.units, buffer_bytes=args.piece, buffers=DEPTH, threads=THREADS)
        self.steps = 0

    def step(self) -> float:
        """GB/s, read plus written, of one update of all units."""
        before, began = self.core.stats(), time.perf_counter()
        self.steps += 1
        entry = (0, *HYPER, self.steps, False, 0, _core.DTYPES["BF16"], False)  # nor weighed here
        self.core.adam([(unit, [entry]) for unit in self.units], 0.0, 0)
        self.core.drain()
        after = self.core.stats()
        moved = sum(after[k] - before[k] for k in ("disk_read_bytes", "disk_written_bytes"))
        return moved / (time.perf_counter() - began) / 1e9


def bench_rate(args: Any, device: torch.device) -> None:
    around = [raw(args)]
    states = States(args)
    for _ in range(2):  # the first reads nothing and makes the file's extents
        states.step()
    found = [states.step() for _ in range(args.reps)]
    states.core.close()
    around.append(raw(args))
    limit = {k: statistics.mean(r[k] for r in around) for k in ("write", "read", "both")}
    result = spread(found)
    emit("disk", device, case="rate", unit="GB/s", warmup=2, **result, limit=limit["both"],
         limit_from="the same pieces moved raw, before and after, in this run", raw=limit, raw_runs=around,
         share=result["median"] / limit["both"], direct=around[0]["direct"], gib=args.gib, piece=args.piece,
         depth=DEPTH, io_threads=THREADS, threads=args.threads)  # fmt: skip
    say(f"disk {args.path}, {'past' if around[0]['direct'] else 'through'} the page cache:")
    table([(f"raw {k}", f"{v:.2f} GB/s") for k, v in limit.items()]
          + [("engine", f"{result['median']:.2f} GB/s, {result['median'] / limit['both']:.1%} of both")])  # fmt: skip


# ---- step ----


class Trained:
    """A streamed model with the states of its last `on_disk` layers in a file."""

    def __init__(self, args: Any, device: torch.device, on_disk: int) -> None:
        self.device = device
        model = build_model(args, args.layers, args.seq, torch.bfloat16)
        homes = {f"model.layers.{i}": "disk" for i in range(args.layers - on_disk, args.layers)}
        self.model = mt.stream(model, device=device, plan={"homes": homes},
                               nvme=args.path if on_disk else None)  # fmt: skip
        self.opt = mt.AdamW(self.model.parameters(), lr=1e-5, max_grad_norm=1.0)

    def step(self, ids: torch.Tensor, mark: Any = lambda: None) -> None:
        loss = self.model(input_ids=ids, labels=ids).loss
        mark()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def block(self, ids: torch.Tensor) -> list[float]:
        """Seconds of each step behind another: from the start of its forward to that of the next."""
        clock = Clock(self.device)
        for _ in range(BLOCK_STEPS):
            clock.mark()
            self.step(ids)
        clock.mark()
        found = clock.intervals()[1:]
        runtime_of(self.model).drain()
        return found

    def forward_s(self, ids: torch.Tensor) -> float:
        clock = Clock(self.device)
        self.step(ids)
        runtime_of(self.model).drain()
        clock.mark()
        self.step(ids, clock.mark)
        return clock.intervals()[0]


def can_hide(args: Any, layer: int, forward_s: float, rate: float) -> int:
    """Layers of so many parameters whose states the drive moves while those before them compute."""
    seconds = 2 * STATE_BYTES * layer / rate
    return max(
        (k for k in range(1, args.layers) if k * seconds <= HIDDEN * forward_s * (args.layers - k) / args.layers),
        default=1,
    )  # fmt: skip


def bench_step(args: Any, device: torch.device) -> None:
    ids = torch.randint(args.vocab, (args.tokens // args.seq, args.seq), device=device)
    ram = Trained(args, device, 0)
    layer = parameter_count(ram.model.model.layers[0])
    forward_s, rate = ram.forward_s(ids), raw(args)["both"] * 1e9
    on_disk = args.on_disk or can_hide(args, layer, forward_s, rate)
    pair = ram, Trained(args, device, on_disk)
    turns: list[list[float]] = [[], []]
    for turn in range(1 + args.steps):
        mt.last_step(pair[1].model)
        for times, trained in zip(turns, pair, strict=True):
            block = trained.block(ids)
            times += block if turn else []  # the first turn warms up
    report = mt.last_step(pair[1].model)
    synchronize(device)
    ram_s, disk_s = spread(turns[0]), spread(turns[1])
    written = report.disk_written_bytes / BLOCK_STEPS
    emit("disk", device, case="step", unit="s", **disk_s, limit=ram_s["median"],
         limit_from="all states in RAM, in turn", over=disk_s["median"] / ram_s["median"] - 1,
         layers=args.layers, on_disk=on_disk, tokens=args.tokens, forward_s=forward_s,
         disk_s=2 * written / rate, written_gb=written / 1e9, raw_gbps=rate / 1e9)  # fmt: skip
    say(f"{args.layers} layers, states of {on_disk} on disk; forward {forward_s:.3f} s, the drive's part "
        f"{2 * written / rate:.3f} s")  # fmt: skip
    table([("step, states in RAM", f"{ram_s['median']:.4f} s"),
           ("step, some on disk", f"{disk_s['median']:.4f} s, {disk_s['median'] / ram_s['median'] - 1:+.2%}"),
           ("written a step", f"{written / 1e9:.2f} GB")])  # fmt: skip
    for trained in pair:
        mt.unstream(trained.model)


def main() -> None:
    args, device = parse_args()
    bench_rate(args, device)
    bench_step(args, device)


if __name__ == "__main__":
    main()
