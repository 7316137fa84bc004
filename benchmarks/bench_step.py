#!/usr/bin/env python3
"""Whole training steps of a Qwen2-architecture model with random weights, beside the limits.

    python benchmarks/bench_step.py --layers 20 --tokens 32768     # 5.75 B parameters, 7B width
    python benchmarks/bench_step.py --layers 12 --engine fsdp2
    python benchmarks/bench_step.py --layers 8 --overhead          # streamed against resident
    python benchmarks/bench_step.py --layers 64 --host-overhead    # Python's time per unit
    python benchmarks/bench_step.py --device cpu                   # toy sizes, to try the script

One JSON line per measurement on stdout, a table on stderr. Tokens/s counts the tokens of a step
over the time from its start to the start of the next; TFLOP/s is 6 x all parameters x tokens / that
time, so that recomputing counts as loss. Nothing is read back within the measured steps; the last
one's update is in `step_s_with_last_update`, a mean over all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import limits
import torch
from common import (
    GIB,
    Clock,
    add_shape_arguments,
    build_model,
    emit,
    host_rss_bytes,
    parameter_count,
    pick_device,
    say,
    spread,
    synchronize,
    table,
)
from engines import ENGINES, Engine, weight_dtype

COUNTED = ("h2d_bytes", "d2h_bytes", "store_bytes", "demand_fetches", "await_s")
BLOCK_STEPS = 3  # steps of one engine before the other has its turn, in --overhead


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device")
    device = pick_device(parser.parse_known_args()[0].device)
    cuda = device.type == "cuda"
    add_shape_arguments(parser, tiny=not cuda)
    add = parser.add_argument
    add("--layers", type=int, default=20 if cuda else 4)
    add("--seq", type=int, default=1024 if cuda else 64)
    add("--tokens", type=int, default=32768 if cuda else 256, help="in a step")
    add("--micro", type=int, default=1, help="micro-batches in a step")
    add("--steps", type=int, default=6)
    add("--warmup", type=int, default=2)
    add("--engine", choices=list(ENGINES), default="streamed")
    add("--activations", choices=["replay", "saved", "whole"], default="replay")
    add("--loss", choices=["hf", "chunked"], help="default: chunked; hf with fsdp2")
    add("--no-optimizer", action="store_true", help="forward and backward only")
    add("--clip", type=float, default=1.0, help="0: no clipping")
    add("--lr", type=float, default=1e-5)
    add("--batches", type=int, default=4, help="different batches, taken in turn")
    add("--overhead", action="store_true", help="streamed / resident, alternating in one process")
    add("--host-overhead", action="store_true", help="host time per unit in forward")
    args = parser.parse_args()
    # FSDP2 would gather the head, and reduce its gradient on the host, once for every chunk.
    args.loss = args.loss or ("hf" if args.engine == "fsdp2" else "chunked")
    if args.tokens % (args.seq * args.micro):
        parser.error(f"--tokens {args.tokens}: no multiple of seq {args.seq} x micro {args.micro}")
    return args, device


def make_batches(args: Any, device: torch.device) -> list[torch.Tensor]:
    """Random tokens, `[tokens / seq, seq]` each, on the device."""
    rng = torch.Generator().manual_seed(0)
    shape = (args.tokens // args.seq, args.seq)
    batches = [torch.randint(args.vocab, shape, generator=rng) for _ in range(args.batches)]
    return [batch.to(device) for batch in batches]


def make_engine(name: str, args: Any, device: torch.device, optimizer: bool) -> Engine:
    model = build_model(args, args.layers, args.seq, weight_dtype(name, device))
    return ENGINES[name](model, args, device, optimizer)


# ---- whole steps


def one_step(engine: Engine, ids: torch.Tensor, args: Any, clock: Clock) -> torch.Tensor:
    """Marks: before and after the forward of each micro-batch, and after the last backward."""
    losses = []
    for part in ids.chunk(args.micro):
        clock.mark()
        losses.append(engine.backward(part, 1 / args.micro, clock.mark))
    clock.mark()
    engine.update()
    return torch.stack(losses).mean()


def step_times(clock: Clock, args: Any) -> dict[str, list[float]]:
    """Seconds of each measured step; step_s is from start to start, so the last has none."""
    gaps = clock.intervals()
    width = 2 * args.micro + 1  # marks in a step
    times: dict[str, list[float]] = {"step_s": [], "forward_s": [], "backward_s": []}
    for first in range(width * args.warmup, len(clock.marks), width):
        work = gaps[first : first + width - 1]
        times["forward_s"].append(sum(work[0::2]))
        times["backward_s"].append(sum(work[1::2]))
        if first + width < len(clock.marks):
            times["step_s"].append(sum(gaps[first : first + width]))
    return times


def bounds(args: Any, limit: dict[str, float], parameters: int) -> dict[str, float]:
    """Seconds a step takes at least on each resource, at the rates measured in this run.

    gemm_s leaves out attention's own products, and the embedding, which is looked up. AdamW reads
    and writes 12 bytes of weight and states per parameter, and reads 2 of gradient.
    """
    products = 8 if args.activations == "replay" else 6
    flops = products * (parameters - args.vocab * args.hidden) * args.tokens
    fetched = 2 * args.micro * 2 * parameters  # bf16 weights, in forward and again in backward
    return {
        "gemm_s": flops / limit["gemm_tflops"] / 1e12,
        "h2d_s": fetched / limit["h2d_gbps"] / 1e9,
        "d2h_s": 2 * parameters / limit["d2h_gbps"] / 1e9,
        "dram_adam_s": 26 * parameters / limit["dram_gbps"] / 1e9,
    }


def memory(device: torch.device, parameters: int, rss_before: int) -> dict[str, float]:
    """Host bytes per parameter by resident size, beyond what the process held before; VRAM in GiB.

    `vram_used_gib` is what the driver says of the whole device, the CUDA context included.
    """
    now, peak = host_rss_bytes()
    found = {
        "host_bytes_per_parameter": (now - rss_before) / parameters,
        "host_peak_bytes_per_parameter": (peak - rss_before) / parameters,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["vram_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        found["vram_reserved_peak_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        found["vram_used_gib"] = (total - free) / GIB
    return found


def run_steps(engine: Engine, args: Any, device: torch.device) -> dict[str, Any]:
    """Warm up, then measure; medians of the step's parts, and the losses of all steps."""
    batches = make_batches(args, device)
    clock, losses = Clock(device), []
    for i in range(args.warmup + args.steps):
        if i == args.warmup:
            engine.settle()
            engine.counts(1)  # forget the warm-up's
            began = time.perf_counter()
        losses.append(one_step(engine, batches[i % len(batches)], args, clock))
    engine.settle()
    total_s = time.perf_counter() - began
    times = step_times(clock, args)
    counts = engine.counts(args.steps)
    return {
        **spread([args.tokens / s for s in times["step_s"]]),
        **{name: statistics.median(values) for name, values in times.items()},
        "step_s_with_last_update": total_s / args.steps,
        "warmup": args.warmup,
        **counts,
        "losses": [round(float(x), 4) for x in losses],
    }


def bench_steps(args: Any, device: torch.device) -> None:
    limit = limits.measure(args, device, args.tokens // args.micro, reps=5)
    rss_before = host_rss_bytes()[0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    engine = make_engine(args.engine, args, device, optimizer=not args.no_optimizer)
    built_s = time.perf_counter() - began
    parameters = parameter_count(engine.model)
    say(f"{args.engine}: {parameters / 1e9:.3f} B parameters built in {built_s:.0f} s")

    result = run_steps(engine, args, device)
    result |= memory(device, parameters, rss_before)
    least = bounds(args, limit, parameters)
    result |= {
        "parameters": parameters,
        "built_s": built_s,
        "tflops": 6 * parameters * args.tokens / result["step_s"] / 1e12,
        "limit": args.tokens / least["gemm_s"],
        "limit_from": "GEMMs alone, at the rate measured in this run",
        "bounds": least,
        "limits": limit,
    }
    emit("step", device, case=describe(args), unit="tokens/s", **result)
    show_steps(describe(args), result)


def describe(args: Any) -> str:
    optimizer = "no optimizer" if args.no_optimizer else f"clip={args.clip:g}"
    return (
        f"{args.engine} hidden={args.hidden} {args.layers} layers {args.tokens} tokens "
        f"S={args.seq} micro={args.micro} {args.activations} loss={args.loss} {optimizer}"
    )


def show_steps(case: str, r: dict[str, Any]) -> None:
    step = f"{r['step_s']:.4g} s; forward {r['forward_s']:.4g}, backward {r['backward_s']:.4g}"
    rows = [
        ("tokens/s", f"{r['median']:,.0f}   (GEMMs alone: {r['limit']:,.0f})"),
        ("TFLOP/s", f"{r['tflops']:.4g}   (GEMM: {r['limits']['gemm_tflops']:.4g})"),
        ("step", f"{step}; with the last update {r['step_s_with_last_update']:.4g}"),
        ("at least", ", ".join(f"{name} {s:.3g}" for name, s in r["bounds"].items())),
        ("host B/parameter", f"{r['host_bytes_per_parameter']:.2f} by resident size"),
        ("counted", ", ".join(f"{name} {r[name]:.4g}" for name in COUNTED if name in r)),
        ("loss", f"{r['losses'][0]} -> {r['losses'][-1]}"),
    ]
    rows += [(name, f"{value:.2f}") for name, value in r.items() if name.startswith("vram")]
    say(case)
    table(rows)


# ---- streamed against resident


def timed_block(engine: Engine, batches: list[torch.Tensor], device: torch.device) -> float:
    """Seconds per step of BLOCK_STEPS steps behind an untimed one.

    The untimed step's update runs beside the first timed forward; the last one's is outside.
    """
    clock = Clock(device)
    for i in range(BLOCK_STEPS + 1):
        if i == 1:
            clock.mark()
        engine.backward(batches[i % len(batches)])
        if i == BLOCK_STEPS:
            clock.mark()
        engine.update()
    engine.settle()
    return clock.intervals()[0] / BLOCK_STEPS


def bench_overhead(args: Any, device: torch.device) -> None:
    """Forward and backward of the same layers, in turn; then again with AdamW beside."""
    batches = make_batches(args, device)
    resident = make_engine("resident", args, device, optimizer=False)
    streamed = make_engine("streamed", args, device, optimizer=False)
    for optimizer in ("no optimizer", "AdamW beside"):
        if optimizer == "AdamW beside":
            streamed.attach_optimizer(args)
        turns = [
            [timed_block(engine, batches, device) for engine in (resident, streamed)]
            for _ in range(args.warmup + args.steps)
        ]
        show_overhead(args, device, optimizer, turns[args.warmup :])


def show_overhead(
    args: Any, device: torch.device, optimizer: str, turns: list[list[float]]
) -> None:
    resident_s, streamed_s = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = spread([streamed / resident for resident, streamed in turns])
    case = (
        f"{args.layers} layers {args.tokens} tokens S={args.seq} {args.activations} "
        f"loss={args.loss} {optimizer}"
    )
    both = {"resident_s": resident_s, "streamed_s": streamed_s, "warmup": args.warmup}
    emit("overhead", device, case=case, unit="streamed/resident", **ratio, **both)
    say(f"{case}: {resident_s:.4f} s, streamed {streamed_s:.4f} s, x{ratio['median']:.4f}")


# ---- the host's time


def forward_host_seconds(engine: Engine, ids: torch.Tensor, reps: int = 20) -> float:
    """Median time the calling thread spends in a forward; it does not wait for the device."""
    found = []
    for _ in range(3 + reps):
        synchronize(engine.device)
        began = time.perf_counter()
        loss = engine.model(ids)
        found.append(time.perf_counter() - began)
        loss.backward()
        engine.update()
        engine.settle()
    return statistics.median(found[3:])


def bench_host_overhead(args: Any, device: torch.device) -> None:
    """Host time per unit in forward beyond the model's own; layers so small that nothing waits."""
    args.hidden, args.inter, args.heads, args.kv, args.vocab = 64, 192, 4, 2, 512
    args.loss, args.seq, args.tokens = "hf", 16, 16
    ids = make_batches(args, device)[0]
    plain = argparse.Namespace(**vars(args) | {"activations": "saved"})
    resident = make_engine("resident", plain, device, optimizer=False)
    streamed = make_engine("streamed", args, device, optimizer=False)
    engines = (resident, streamed)
    turns = [[forward_host_seconds(engine, ids) for engine in engines] for _ in range(5)]

    units = args.layers + 2  # the embedding and the head
    host_us = [statistics.median(column) / units * 1e6 for column in zip(*turns, strict=True)]
    extra = spread([(streamed - plain) / units * 1e6 for plain, streamed in turns])
    both = {"plain_us": host_us[0], "streamed_us": host_us[1], "warmup": 3}
    case = f"{units} units, {args.activations}"
    emit("host_overhead", device, case=case, unit="us/unit", **extra, **both)
    say(f"host time per unit and forward: {host_us[0]:.1f} us, streamed +{extra['median']:.1f} us")


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
