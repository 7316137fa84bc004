#!/usr/bin/env python3
"""Checkpoints: the rate of saving and loading beside the drive's own, and what a save behind training costs it.

    python benchmarks/bench_save.py --path /scratch --width 7b --layers 12
    python benchmarks/bench_save.py --path . --device cpu          # toy sizes, to try the script

"save": mt.save of weights and states while nothing else is done, synced and named, against the same file system
written raw: 4 MiB requests, 8 under way, no sums, where nothing was written before, as a checkpoint's files are;
"again": against raw writes over that. "load": mt.load of it, read twice (verify) and once.
"behind": steps from the call of an asynchronous save until it is over, against steps without, twice with all the
spare memory that the checkpoint takes (or --spare) and once with the least: a virtual machine may have to find that
memory, the first time. The first step waits until units are copied, which is at the rate of memory in the one case
and of the drive in the other, so the mean over all steps of a save is what counts; the slowest is told too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    GIB,
    add_device_argument,
    add_shape_arguments,
    build_model,
    emit,
    parameter_count,
    raw_disk,
    say,
    spread,
    synchronize,
    table,
)

import megatrain_torch as mt
from megatrain_torch.base.modes import FORMATS

PARTS = ["save", "behind", "load"]
PAUSE_S = 1.0  # before each run: what a drive still does of the one before


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    add_shape_arguments(parser, tiny=not cuda)
    add = parser.add_argument
    add("--path", default=tempfile.gettempdir(), help="a directory on the drive")
    add("--layers", type=int, default=8 if cuda else 2)
    add("--seq", type=int, default=1024 if cuda else 64)
    add("--tokens", type=int, default=32768 if cuda else 512, help="in a step")
    add("--raw-gib", type=float, default=16.0 if cuda else 0.0625, help="of the raw file")
    add("--reps", type=int, default=3)
    add("--steps", type=int, default=6, help="without a save, to compare with")
    add("--states", choices=FORMATS, default="fp32", help="how mt.AdamW keeps its states")
    add("--spare", help="of the save behind training; default: as much as it has bytes, and the least")
    add("--only", nargs="*", choices=PARTS, default=PARTS)
    return parser.parse_args(), device


def raw(args: Any) -> dict[str, Any]:
    time.sleep(PAUSE_S)
    return raw_disk(args.path, int(args.raw_gib * GIB))


class Run:
    """A streamed model that trains on one batch."""

    def __init__(self, args: Any, device: torch.device) -> None:
        self.device = device
        self.ids = torch.randint(args.vocab, (args.tokens // args.seq, args.seq), device=device)
        self.model = mt.stream(build_model(args, args.layers, args.seq, torch.bfloat16), device=device)
        self.opt = mt.AdamW(self.model.parameters(), lr=1e-5, max_grad_norm=1.0, states=args.states)

    def step(self) -> float:
        """Seconds, from an idle device to the next: updates run on, behind the next step."""
        began = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        synchronize(self.device)
        return time.perf_counter() - began


def against_raw(bench: str, device: torch.device, args: Any, rates: list[float], limits: list[dict[str, Any]], way: str,
                **fields: Any) -> None:  # fmt: skip
    limit = statistics.mean(r[way] for r in limits) / 1e9
    found = spread(rates)
    emit("save", device, case=bench, unit="GB/s", **found, limit=limit, share=found["median"] / limit,
         states=args.states, limit_from="the same file system moved raw, before and after, in this run",
         layers=args.layers, direct=limits[0]["direct"], **fields)  # fmt: skip
    table([(bench, f"{found['median']:.2f} GB/s, {found['median'] / limit:.1%} of {limit:.2f} raw, {way}")])


def bench_saves(run: Run, args: Any, folder: Path) -> None:
    limits, saves = [raw(args)], []
    for _ in range(args.reps):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(PAUSE_S)
        saving = mt.save(run.model, run.opt, folder)
        saves.append(saving.bytes / saving.seconds / 1e9)
    limits.append(raw(args))
    for name, way in (("save", "fresh"), ("save, again", "write")):
        against_raw(name, run.device, args, saves, limits, way, gb=saving.bytes / 1e9)


def bench_loads(run: Run, args: Any, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    nbytes = mt.save(run.model, run.opt, folder).bytes
    limits, loads, verified = [raw(args)], [], []
    for _ in range(args.reps):
        for times, verify in ((loads, False), (verified, True)):
            began = time.perf_counter()
            mt.load(run.model, run.opt, folder, verify=verify)
            times.append(nbytes / (time.perf_counter() - began) / 1e9)
    limits.append(raw(args))
    against_raw("load", run.device, args, loads, limits, "read", gb=nbytes / 1e9)
    against_raw("load, verified first", run.device, args, verified, limits, "read", gb=nbytes / 1e9)


def bench_behind(run: Run, args: Any, folder: Path, spare: int | str, plain: dict[str, Any],
                 nth: int) -> None:  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    run.step()
    saving = mt.save(run.model, run.opt, folder, asynchronous=True, spare=spare)
    times = []
    while not saving.over:
        times.append(run.step())
    saving.wait()
    mean = (sum(times) + saving.held) / len(times)  # what the call held up is the first step's
    emit("save", run.device, case="behind", nth=nth, unit="s", median=mean, n=len(times), slowest=max(times),
         held_s=saving.held, limit=plain["median"], limit_from="steps without a save, in this run",
         over=mean / plain["median"] - 1,
         states=args.states, spare=str(spare), save_s=saving.seconds, gbps=saving.bytes / saving.seconds / 1e9,
         layers=args.layers, tokens=args.tokens)  # fmt: skip
    table([(f"steps beside save {nth}, spare {spare}", f"{mean:.3f} s, {mean / plain['median'] - 1:+.1%}; the slowest "
            f"{max(times):.3f} s; the call {saving.held:.3f} s; {len(times)} steps")])  # fmt: skip


def main() -> None:
    args, device = parse_args()
    run = Run(args, device)
    say(f"{parameter_count(run.model) / 1e9:.2f} B parameters, {args.path}")
    for _ in range(2):
        run.step()
    with tempfile.TemporaryDirectory(dir=args.path) as name:
        folder = Path(name) / "checkpoint"
        nbytes = sum(mt.checkpoint_bytes(run.model, folder, args.states))
        if "save" in args.only:
            bench_saves(run, args, folder)
        if "behind" in args.only:
            run.step()
            plain = spread([run.step() for _ in range(args.steps)])
            table([("step", f"{plain['median']:.3f} s")])
            for nth, spare in enumerate((args.spare or nbytes,) * 2 + (() if args.spare else (1,)), 1):
                bench_behind(run, args, folder, spare, plain, nth)
        if "load" in args.only:
            bench_loads(run, args, folder)


if __name__ == "__main__":
    main()
