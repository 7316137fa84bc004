#!/usr/bin/env python3
"""mt.from_pretrained: the most host memory it ever takes beside the bytes that stay, and its rate beside the drive's.

    python benchmarks/bench_load.py --path /scratch --width 7b --layers 28
    python benchmarks/bench_load.py --path . --device cpu          # toy sizes, to try the script

A process of its own writes the model's files, as transformers does; another, which has done nothing else, loads them.
"limit": what that process had with its libraries and the device at hand, and the bytes of the store's planes; "peak":
the most it had at any time, by the kernel's account (VmHWM), which counts pages of mapped files too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import GIB, add_device_argument, add_shape_arguments, build_model, emit, host_rss_bytes, raw_disk, table
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megatrain_torch as mt
from megatrain_torch import _core


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    add_shape_arguments(parser, tiny=not cuda)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the drive")
    parser.add_argument("--layers", type=int, default=28 if cuda else 4)
    parser.add_argument("--seq", type=int, default=1024 if cuda else 64)
    return parser.parse_args(), device


def write(args: argparse.Namespace, folder: str) -> None:
    """The model's files, out of the page cache."""
    disable_progress_bar()
    build_model(args, args.layers, args.seq, torch.bfloat16).save_pretrained(folder, max_shard_size="4GB")
    for file in Path(folder).iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(device: str, folder: str, results: Any) -> None:
    """Puts what loading took."""
    disable_progress_bar()
    first = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    mt.unstream(mt.stream(first, device=device))  # the device and its libraries
    before = host_rss_bytes()[0]
    began = time.perf_counter()
    model = mt.from_pretrained(AutoModelForCausalLM, folder, device=device)
    seconds, peak = time.perf_counter() - began, host_rss_bytes()[1]
    core = mt.model.stream.runtime_of(model).core
    kept = sum(core.host_bytes(plane) for plane in _core.PLANES.values())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    results.put({"before": before, "kept": kept, "peak": peak, "seconds": seconds, "weights": weights})


def apart(function: Any, *args: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__}: exit status {process.exitcode}")


def main() -> None:
    args, device = parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        apart(write, args, folder)
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        limits = [raw_disk(args.path, min(nbytes, 8 * GIB))]
        results = multiprocessing.get_context("spawn").SimpleQueue()
        apart(load, str(device), folder, results)
        found = results.get()
        limits.append(raw_disk(args.path, min(nbytes, 8 * GIB)))
    limit, most = found["before"] + found["kept"], statistics.mean(r["read"] for r in limits) / 1e9
    rate = nbytes / found["seconds"] / 1e9
    emit("load", device, case=f"{args.width} {args.layers} layers", unit="GiB", median=found["peak"] / GIB,
         limit=limit / GIB, over=found["peak"] / limit - 1, before_gib=found["before"] / GIB,
         kept_gib=found["kept"] / GIB, weights_gib=found["weights"] / GIB, seconds=found["seconds"], gbps=rate,
         raw_gbps=most)  # fmt: skip
    table([("peak", f"{found['peak'] / GIB:.2f} GiB, x{found['peak'] / limit:.3f} of {limit / GIB:.2f} GiB: "
            f"{found['before'] / GIB:.2f} before, {found['kept'] / GIB:.2f} kept"),
           ("loaded", f"{nbytes / 1e9:.2f} GB in {found['seconds']:.1f} s: {rate:.2f} GB/s of {most:.2f} raw")])


if __name__ == "__main__":
    main()
