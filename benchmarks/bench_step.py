#!/usr/bin/env python3
"""Whole training steps of a Qwen2-architecture model with random weights, beside the limits of the machine.

    python benchmarks/bench_step.py --layers 20 --tokens 32768                    # 5.75 B parameters of 7B width
    python benchmarks/bench_step.py --layers 12 --engine fsdp2
    python benchmarks/bench_step.py --overhead                                    # streamed against resident
    python benchmarks/bench_step.py --host-overhead                               # Python's time per unit
    python benchmarks/bench_step.py --device cpu                                  # toy sizes, to try the script

One JSON line per measurement on stdout, a table on stderr. Tokens/s counts all tokens of a step over the median time
from one step's start to the next; TFLOP/s is 6 x all parameters x tokens / time, so recomputing counts as loss.
Reading the losses does not make the host wait within a step; the last update is inside the total, not the median.
"""
from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import limits
from common import (GIB, Clock, add_shape_arguments, build_model, emit, host_rss_bytes, parameter_count, pick_device,
                    say, spread, synchronize, table)
from engines import ENGINES, Engine, weight_dtype


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device")
    device = pick_device(parser.parse_known_args()[0].device)
    cuda = device.type == "cuda"
    add_shape_arguments(parser, tiny=not cuda)
    parser.add_argument("--layers", type=int, default=20 if cuda else 4)
    parser.add_argument("--seq", type=int, default=1024 if cuda else 64)
    parser.add_argument("--tokens", type=int, default=32768 if cuda else 256, help="in a step")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--engine", choices=list(ENGINES), default="streamed")
    parser.add_argument("--activations", choices=["replay", "saved"], default="replay")
    parser.add_argument("--loss", choices=["hf", "chunked"],
                        help="default: chunked; hf with fsdp2, which would fetch the head for every chunk")
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward only")
    parser.add_argument("--clip", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--batches", type=int, default=4, help="different batches, taken in turn")
    parser.add_argument("--overhead", action="store_true", help="streamed / resident, alternating in one process")
    parser.add_argument("--host-overhead", action="store_true", help="host time per unit in forward")
    args = parser.parse_args()
    args.loss = args.loss or ("hf" if args.engine == "fsdp2" else "chunked")
    if args.tokens % (args.seq * args.micro):
        parser.error(f"--tokens {args.tokens} is no multiple of --seq {args.seq} x --micro {args.micro}")
    return args, device


def make_batches(args: Any, device: torch.device) -> list[torch.Tensor]:
    """Random tokens, `[tokens / seq, seq]` each, on the device."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.tokens // args.seq, args.seq)
    return [torch.randint(args.vocab, shape, generator=generator).to(device) for _ in range(args.batches)]


def make_engine(name: str, args: Any, device: torch.device, optimizer: bool) -> Engine:
    model = build_model(args, args.layers, args.seq, weight_dtype(name, device))
    return ENGINES[name](model, args, device, optimizer)


def one_step(engine: Engine, ids: torch.Tensor, args: Any, clock: Clock) -> torch.Tensor:
    """Marks: before forward and between forward and backward, of each micro-batch; then after the last backward."""
    losses = []
    for part in ids.chunk(args.micro):
        clock.mark()
        losses.append(engine.backward(part, 1 / args.micro, clock.mark))
    clock.mark()
    engine.update()
    return torch.stack(losses).mean()


def step_times(clock: Clock, args: Any) -> dict[str, list[float]]:
    """Seconds per measured step: forward, backward, and from start to start (one fewer, the last has no next)."""
    gaps = clock.intervals()
    width = 2 * args.micro + 1  # marks in a step
    found: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "step_s": []}
    for first in range(width * args.warmup, len(clock.marks), width):
        found["forward_s"].append(sum(gaps[first:first + width - 1:2]))
        found["backward_s"].append(sum(gaps[first + 1:first + width - 1:2]))
        if first + width < len(clock.marks):
            found["step_s"].append(sum(gaps[first:first + width]))
    return found


def bounds(args: Any, limit: dict[str, float], parameters: int) -> dict[str, float]:
    """Seconds a step takes at least on each resource, at the rates measured in this run."""
    products = 8 if args.activations == "replay" else 6  # forward again costs 2
    crossings = 2 * args.micro * 2 * parameters  # bytes of bf16 weights: in forward and in backward
    return {
        "gemm_s": products * parameters * args.tokens / limit["gemm_tflops"] / 1e12,
        "h2d_s": crossings / limit["h2d_gbps"] / 1e9,
        "d2h_s": 2 * parameters / limit["d2h_gbps"] / 1e9,
        "dram_adam_s": 28 * parameters / limit["dram_gbps"] / 1e9,
    }


def bench_steps(args: Any, device: torch.device) -> None:
    limit = limits.measure(args, device, args.tokens // args.micro, reps=5)
    rss_before = host_rss_bytes()[0]
    began = time.perf_counter()
    engine = make_engine(args.engine, args, device, optimizer=not args.no_optimizer)
    parameters = parameter_count(engine.model)
    built_s = time.perf_counter() - began
    say(f"{args.engine}: {parameters / 1e9:.3f} B parameters built in {built_s:.0f} s")

    batches = make_batches(args, device)
    clock, losses = Clock(device), []
    for i in range(args.warmup + args.steps):
        if i == args.warmup:
            synchronize(device)
            began = time.perf_counter()
        losses.append(one_step(engine, batches[i % len(batches)], args, clock))
    times = step_times(clock, args)
    rss_now, rss_peak = host_rss_bytes()
    copied = {k: getattr(engine.last_step(engine.model), k) for k in ("h2d_bytes", "d2h_bytes")} \
        if args.engine == "streamed" else {}
    engine.settle()
    total_s = time.perf_counter() - began

    step_s = spread(times["step_s"])["median"]
    result = {
        "case": f"{args.engine} {args.layers} layers {args.tokens} tokens S={args.seq} micro={args.micro} "
                f"{args.activations} loss={args.loss} clip={args.clip}",
        "unit": "tokens/s",
        **spread([args.tokens / s for s in times["step_s"]]),
        "parameters": parameters,
        "tflops": 6 * parameters * args.tokens / step_s / 1e12,
        "limit": args.tokens / bounds(args, limit, parameters)["gemm_s"],
        "limit_from": "the layers' GEMMs at the rate measured in this run",
        **{k: statistics.median(v) for k, v in times.items()},
        "total_s": total_s,
        "step_s_with_last_update": total_s / args.steps,
        "warmup": args.warmup,
        "built_s": built_s,
        **memory(device, parameters, rss_before, rss_now, rss_peak),
        **copied,
        "losses": [round(float(x), 4) for x in losses],
        "bounds": bounds(args, limit, parameters),
        "limits": limit,
    }
    emit("step", device, optimizer=not args.no_optimizer, **rounded(result))
    show_steps(result)


def memory(device: torch.device, parameters: int, rss_before: int, rss_now: int, rss_peak: int) -> dict[str, float]:
    found = {
        "host_bytes_per_parameter": (rss_now - rss_before) / parameters,
        "host_peak_bytes_per_parameter": (rss_peak - rss_before) / parameters,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "vram_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "vram_reserved_peak_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "vram_used_gib": (total - free) / GIB,
        }
    return found


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def show_steps(r: dict[str, Any]) -> None:
    say(r["case"])
    rows = [
        ("tokens/s", f"{r['median']:,.0f}   (GEMMs alone: {r['limit']:,.0f})"),
        ("TFLOP/s", f"{r['tflops']:.4g}   (GEMM: {r['limits']['gemm_tflops']:.4g})"),
        ("step", f"{r['step_s']:.4g} s   forward {r['forward_s']:.4g}, backward {r['backward_s']:.4g}; "
                 f"with the last update {r['step_s_with_last_update']:.4g}"),
        ("at least", ", ".join(f"{k} {v:.3g}" for k, v in r["bounds"].items())),
        ("host bytes/parameter", f"{r['host_bytes_per_parameter']:.2f}   "
                                 f"(peak {r['host_peak_bytes_per_parameter']:.2f})"),
        ("loss", f"{r['losses'][0]} -> {r['losses'][-1]}"),
    ]
    if "vram_peak_gib" in r:
        rows.append(("VRAM peak", f"{r['vram_peak_gib']:.1f} GiB allocated, {r['vram_reserved_peak_gib']:.1f} "
                                  f"reserved, {r['vram_used_gib']:.1f} of the device in use"))
    table(rows)


def timed_block(engine: Engine, batches: list[torch.Tensor], steps: int, device: torch.device) -> float:
    """Seconds per step of `steps` steps behind an untimed one, whose update runs beside the first timed forward."""
    clock = Clock(device)
    for i in range(steps + 1):
        if i == 1:
            clock.mark()
        engine.backward(batches[i % len(batches)])
        if i == steps:
            clock.mark()  # the last update is outside, as the first step's is inside
        engine.update()
    engine.settle()
    return clock.intervals()[0] / steps


def bench_overhead(args: Any, device: torch.device) -> None:
    """Forward and backward of the same layers, resident and streamed, in turn; then again with AdamW beside."""
    batches = make_batches(args, device)
    resident = make_engine("resident", args, device, optimizer=False)
    streamed = make_engine("streamed", args, device, optimizer=False)
    for optimizer in (False, True):
        if optimizer:
            streamed.attach_optimizer(args)
        turns = [[timed_block(engine, batches, 3, device) for engine in (resident, streamed)]
                 for _ in range(args.warmup + args.steps)][args.warmup:]
        resident_s, streamed_s = (statistics.median(column) for column in zip(*turns))
        ratios = spread([s / r for r, s in turns])
        emit("overhead", device, case=f"{args.layers} layers {args.tokens} tokens S={args.seq} {args.activations} "
             f"loss={args.loss} optimizer={optimizer}", unit="streamed/resident", warmup=args.warmup,
             **rounded({**ratios, "streamed_s": streamed_s, "resident_s": resident_s}))
        say(f"{args.layers} layers, {args.tokens} tokens, {'AdamW beside' if optimizer else 'no optimizer'}: "
            f"resident {resident_s:.4f} s, streamed {streamed_s:.4f} s, x{ratios['median']:.4f}")


def forward_host_seconds(engine: Engine, ids: torch.Tensor, reps: int, device: torch.device) -> float:
    """Median time the calling thread spends in one forward; on CUDA it does not wait for the device."""
    found = []
    for _ in range(reps + 3):
        synchronize(device)
        began = time.perf_counter()
        loss = engine.model(ids)
        found.append(time.perf_counter() - began)
        loss.backward()
        engine.update()
        engine.settle()
    return statistics.median(found[3:])


def bench_host_overhead(args: Any, device: torch.device) -> None:
    """Host time per unit in forward beyond the model's own: tiny layers, so that nothing waits for arithmetic."""
    args.hidden, args.inter, args.heads, args.kv, args.vocab = 64, 192, 4, 2, 512
    args.loss, args.seq, args.tokens = "hf", 16, 16
    ids = make_batches(args, device)[0]
    resident = make_engine("resident", argparse.Namespace(**vars(args) | {"activations": "saved"}), device, False)
    streamed = make_engine("streamed", args, device, optimizer=False)
    turns = [[forward_host_seconds(e, ids, 20, device) for e in (resident, streamed)] for _ in range(5)]
    units = args.layers + 2  # the embedding and the head
    plain, ours = (statistics.median(column) / units * 1e6 for column in zip(*turns))
    extra = spread([(s - r) / units * 1e6 for r, s in turns])
    emit("host_overhead", device, case=f"{units} units, {args.activations}", unit="us/unit", warmup=3,
         **rounded({**extra, "plain_us": plain, "streamed_us": ours}))
    say(f"host time per unit in forward: plain {plain:.1f} us, streaming adds {extra['median']:.1f} us")


def main() -> None:
    args, device = parse_args()
    torch.manual_seed(0)
    if args.overhead:
        bench_overhead(args, device)
    elif args.host_overhead:
        bench_host_overhead(args, device)
    else:
        bench_steps(args, device)


if __name__ == "__main__":
    main()
