#!/usr/bin/env python3
"""Whole training steps of a Qwen2-architecture model with random weights, beside the limits.

    python benchmarks/bench_step.py --layers 20 --tokens 32768     # 5.75 B parameters, 7B width
    python benchmarks/bench_step.py --layers 20 --plan auto --vram 24GiB
    python benchmarks/bench_step.py --width 32b --layers fit --tokens 32768
    python benchmarks/bench_step.py --layers 20 --trace step.json  # what bound it; step.png beside it
    python benchmarks/bench_step.py --layers 28 --plan auto --seq 524288 --tokens 524288 --warmup 0 --steps 1
    python benchmarks/bench_step.py --layers 12 --engine fsdp2
    python benchmarks/bench_step.py --layers 8 --overhead          # streamed against resident
    python benchmarks/bench_step.py --layers 12 --overhead vram    # all streamed, all in VRAM
    python benchmarks/bench_step.py --layers 12 --overhead arrive  # so, but the first units' states arrive
    python benchmarks/bench_step.py --layers 64 --host-overhead    # Python's time per unit
    python benchmarks/bench_step.py --device cpu                   # toy sizes, to try the script

One JSON line per measurement on stdout, a table on stderr. Tokens/s counts the tokens of a step
over the time from its start to the start of the next; TFLOP/s is 6 x all parameters x tokens / that
time, so that recomputing counts as loss. Nothing is read back within the measured steps; the last
one's update is in `step_s_with_last_update`, a mean over all of them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import limits
import torch
import yardstick
from common import (
    GIB,
    Clock,
    add_device_argument,
    add_shape_arguments,
    build_model,
    emit,
    host_rss_bytes,
    model_config,
    parameter_count,
    rounded,
    say,
    spread,
    synchronize,
    table,
)
from engines import ENGINES, Engine, planned, weight_dtype, with_loss

import megatrain_torch as mt
from megatrain_torch.base.errors import MegatrainError
from megatrain_torch.base.modes import FORMATS, GRADS, MODES, moved_bytes

COUNTED = ("h2d_bytes", "d2h_bytes", "store_bytes", "demand_fetches", "await_s")
TRACED_STEPS = 5
BLOCK_STEPS = 3  # steps of one engine before the other has its turn, in --overhead
ACTIVATIONS = ["auto", *MODES]
ACTIVATIONS_HELP = f"of all layers: {', '.join(ACTIVATIONS)}"
TRACE_HELP = "more steps, traced: a report; with FILE: Chrome JSON, and a .png beside it"
PLAN_HELP = "mt.plan's; ram, vram, through: all units there; arrive: in RAM, but the states of --guests units"
OVERHEAD_HELP = "streamed against plain torch's resident model, or against our own with all in VRAM"
MOST_LAYERS = 256
DOES_NOT_FIT = 3  # exit status


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    add_shape_arguments(parser, tiny=not cuda)
    add = parser.add_argument
    add("--layers", default=20 if cuda else 4, help='a number, or "fit": the most that a plan has')
    add("--seq", type=int, default=1024 if cuda else 64)
    add("--tokens", type=int, default=32768 if cuda else 256, help="in a step")
    add("--micro", type=int, help="micro-batches in a step; default: as planned, or 1")
    add("--steps", type=int, default=6)
    add("--warmup", type=int, default=2)
    add("--engine", choices=list(ENGINES), default="streamed")
    add("--plan", choices=["auto", "ram", "vram", "arrive", "through"], help=PLAN_HELP)
    add("--compute", choices=["auto", "eager", "fused"], default="auto")
    add("--vram", help='the most of the device that may be used, as "32GiB"')
    add("--activations", choices=ACTIVATIONS, default="auto", metavar="MODE", help=ACTIVATIONS_HELP)
    add("--loss", choices=["hf", "chunked"], default="hf", help="hf: the model's own, by labels=")
    add("--no-optimizer", action="store_true", help="forward and backward only")
    add("--clip", type=float, default=1.0, help="0: no clipping")
    add("--lr", type=float, default=1e-5)
    add("--states", choices=FORMATS, default="fp32", help="how mt.AdamW keeps its states")
    add("--host", help='the most of host memory that may be used, as "64GiB"')
    add("--nvme", metavar="DIRECTORY", help="where states go that host memory does not hold")
    add("--grads", choices=GRADS, default="ram", help="none: kept nowhere, used as they come; --clip 0")
    add("--batches", type=int, default=4, help="different batches, taken in turn")
    add("--gpu-alone", action="store_true", help="measure the device's part first, by itself")
    add("--trace", nargs="?", const="", metavar="FILE", help=TRACE_HELP)
    add("--overhead", nargs="?", const="resident", choices=["resident", "vram", "arrive"], help=OVERHEAD_HELP)
    add("--guests", type=int, default=3, help="first units whose states arrive, with arrive")
    add("--host-overhead", action="store_true", help="host time per unit in forward")
    args = parser.parse_args()
    if args.grads == "none" and args.clip:
        parser.error("--grads none: gradients are used before their norm is known; give --clip 0")
    if (args.nvme or args.grads == "none") and args.plan is None:
        parser.error("--nvme, --grads none: with --plan")
    if args.layers == "fit":
        args.plan = args.plan or "auto"
        args.layers = most_layers(args)
    args.layers = int(args.layers)
    if args.trace is not None and args.engine != "streamed":
        parser.error(f"--trace: only the streamed engine can be traced, not {args.engine}")
    if args.tokens % (args.seq * (args.micro or 1)):
        parser.error(f"--tokens {args.tokens}: no multiple of seq {args.seq} x micro {args.micro}")
    return args, device


def fits(args: argparse.Namespace, layers: int) -> bool:
    try:
        planned(model_config(args, layers, args.seq), args, layers)
    except MegatrainError:
        return False
    return True


def most_layers(args: argparse.Namespace) -> int:
    """By bisection; planning needs no weights. 1 when not even that fits: the run then says why not."""
    least, most = 1, MOST_LAYERS
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(args, middle) else (least, middle)
    return least


def make_batches(args: Any, device: torch.device) -> list[torch.Tensor]:
    """Random tokens, `[tokens / seq, seq]` each, on the device."""
    rng = torch.Generator().manual_seed(0)
    shape = (args.tokens // args.seq, args.seq)
    batches = [torch.randint(args.vocab, shape, generator=rng) for _ in range(args.batches)]
    return [batch.to(device) for batch in batches]


def make_model(name: str, args: Any, device: torch.device) -> torch.nn.Module:
    return with_loss(build_model(args, args.layers, args.seq, weight_dtype(name, device)), args)


def make_engine(name: str, args: Any, device: torch.device, optimizer: bool) -> Engine:
    model = make_model(name, args, device)
    if name != "streamed" or args.plan is None:
        return ENGINES[name](model, args, device, optimizer)
    return ENGINES[name](model, args, device, optimizer, plan=planned(model, args))


def changed(args: argparse.Namespace, **settings: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | settings)


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


def bounds(
    args: Any, limit: dict[str, Any], gpu_s: float | None, result: dict[str, Any]
) -> dict[str, float]:
    """Seconds a step takes at least on each resource, at the rates measured in this run.

    gpu_s: forward and backward with everything on the device, where that was measured, else products and
    attention alone; and the updates of what is at home there, the bytes that AdamW moves. Copies: the bytes that
    were counted. host_update_s: the parameters whose gradients went to the host.
    """
    arithmetic = {name: args.micro * limit[name] for name in ("gemm_s", "attention_s")}
    d2h_bytes, itemsize = result.get("d2h_bytes", 0), 2 if limit["weight"] == "BF16" else 4
    on_host = d2h_bytes / itemsize / args.micro
    at_home = 0 if args.no_optimizer else result["parameters"] - on_host
    return {
        **arithmetic,
        "gpu_s": (gpu_s or sum(arithmetic.values()))
        + moved_bytes(args.states) * at_home / limit["device_gbps"] / 1e9,
        "h2d_s": result.get("h2d_bytes", 0) / limit["h2d_gbps"] / 1e9,
        "d2h_s": d2h_bytes / limit["d2h_gbps"] / 1e9,
        "host_update_s": on_host / limit["adam_gparams"] / 1e9,
    }


def least_of(bound: dict[str, float]) -> tuple[str, float]:
    """The resource that needs most, and its seconds."""
    name = max(("gpu_s", "h2d_s", "d2h_s", "host_update_s"), key=lambda name: bound[name])
    return name.removesuffix("_s"), bound[name]


def memory(device: torch.device, parameters: int, rss_before: int) -> dict[str, float]:
    """Host bytes per parameter by resident size, beyond what the process held before; VRAM in GiB.

    `vram_used_gib` is what the driver says of the whole device, the CUDA context included.
    """
    now, peak = host_rss_bytes()
    found = {
        "host_bytes_per_parameter": (now - rss_before) / parameters,
        "host_peak_bytes_per_parameter": (peak - rss_before) / parameters,
        "host_gib": now / GIB,
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
            engine.finish()
            engine.counts(1)  # forget the warm-up's
            began = time.perf_counter()
        losses.append(one_step(engine, batches[i % len(batches)], args, clock))
    engine.finish()
    total_s = time.perf_counter() - began
    times = step_times(clock, args)
    times["step_s"] = times["step_s"] or [total_s]  # of a single step: to the end of its update
    counts = engine.counts(args.steps)
    return {
        **spread([args.tokens / s for s in times["step_s"]]),
        **{name: statistics.median(values) for name, values in times.items()},
        "step_s_with_last_update": total_s / args.steps,
        "warmup": args.warmup,
        **counts,
        "losses": [round(float(x), 4) for x in losses],
    }


def trace_steps(
    engine: Engine, args: Any, device: torch.device, limit: dict[str, Any]
) -> dict[str, Any]:
    """More steps behind the measured ones, so that the stamps are in no figure but these: the last one's."""
    batches, clock = make_batches(args, device), Clock(device)
    with mt.trace(engine.model) as t:
        for i in range(TRACED_STEPS):
            one_step(engine, batches[i % len(batches)], args, clock)
    report = t.steps()[-1]
    if args.trace:
        t.chrome(args.trace)
        t.picture(Path(args.trace).with_suffix(".png"))
    say(str(report))
    return {
        "bound": report.bound,
        "why": report.why,
        "seconds": report.seconds,
        "between_steps_s": report.between_steps,
        "busy_s": dict(report.busy),
        "idle_s": dict(report.idle),
        "least_s": {
            "h2d": report.h2d_bytes / limit["h2d_gbps"] / 1e9,
            "d2h": report.d2h_bytes / limit["d2h_gbps"] / 1e9,
        },
    }


def gpu_alone(args: Any, device: torch.device) -> float | None:
    """Seconds of forward and backward with everything on the device, no optimizer; None: does not fit."""
    try:
        engine = make_engine("streamed", changed(args, plan="vram"), device, optimizer=False)
    except MegatrainError as why:
        say(f"the device's part alone: {why}")
        return None
    args = changed(args, warmup=2, steps=4)
    step_s = run_steps(engine, args, device)["step_s"]
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return step_s


def measured_limits(args: Any, device: torch.device) -> dict[str, Any]:
    """Of one micro-batch, and of the machine; see yardstick.measure and limits.rates."""
    tokens = args.tokens // args.micro
    found = yardstick.measure(args, device, args.layers, tokens, args.seq) | limits.rates(
        device, states=args.states
    )
    return found | {"weight": "BF16" if device.type == "cuda" else "F32"}


def prediction(plan: Any) -> dict[str, Any]:
    """What a plan says of the step, to be held against what was measured."""
    return {
        "seconds": plan.seconds,
        "vram_gib": plan.vram_bytes / GIB,
        "host_gib": plan.host_bytes / GIB,
        "disk_gib": plan.disk_bytes / GIB,
        "bound": plan.bound,
        "vram_units": sum(home == "vram" for home in plan.homes.values()),
        "units": len(plan.homes),
        "activations": dict(Counter(plan.activations.values())),
        "slots": plan.slots,
    }


def bench_steps(args: Any, device: torch.device) -> None:
    rss_before = host_rss_bytes()[0]
    began = time.perf_counter()
    model, extra = make_model(args.engine, args, device), {}
    if args.plan is not None and args.engine == "streamed":
        extra["plan"] = planned(model, args)
        args.micro = extra["plan"].micro
        say(str(extra["plan"]))
    args.micro = args.micro or 1
    built_s = time.perf_counter() - began
    parameters = parameter_count(model)
    limit = measured_limits(args, device)
    gpu_s = gpu_alone(args, device) if args.gpu_alone else None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    engine = ENGINES[args.engine](model, args, device, not args.no_optimizer, **extra)
    say(f"{args.engine}: {parameters / 1e9:.3f} B parameters built in {built_s:.0f} s")

    result = run_steps(engine, args, device)
    result |= memory(device, parameters, rss_before) | {"parameters": parameters}
    least = bounds(args, limit, gpu_s, result)
    bound, bound_s = least_of(least)
    result |= {
        "built_s": built_s,
        "tflops": 6 * parameters * args.tokens / result["step_s"] / 1e12,
        "limit": args.tokens / least["gemm_s"],
        "limit_from": "GEMMs alone: forward and both gradients once, each timed by itself in this run",
        "bounds": least,
        "bound": bound,
        "over_gemm": result["step_s"] / least["gemm_s"],
        "over_gemm_attention": result["step_s"] / (least["gemm_s"] + least["attention_s"]),
        "over_bound": result["step_s"] / bound_s,
        "limits": limit,
        "vram_cap": args.vram,
        "predicted": prediction(extra["plan"]) if extra else None,
        "trace": trace_steps(engine, args, device, limit) if args.trace is not None else None,
    }
    emit("step", device, case=describe(args), unit="tokens/s", **result)
    show_steps(describe(args), result)


def describe(args: Any) -> str:
    words = [
        f"{args.engine} {args.width} hidden={args.hidden} {args.layers} layers {args.tokens} tokens",
        f"S={args.seq} micro={args.micro} {args.activations} loss={args.loss}",
        "no optimizer" if args.no_optimizer else f"clip={args.clip:g}",
        f"states={args.states}" if args.states != "fp32" else "",
    ]
    if args.engine == "streamed":
        words.append(f"compute={args.compute} plan={args.plan} vram={args.vram}")
        words += [f"host={args.host}"] * bool(args.host) + ["states on disk"] * bool(args.nvme)
        words += ["grads=none"] * (args.grads == "none")
    return " ".join(word for word in words if word)


def show_steps(case: str, r: dict[str, Any]) -> None:
    step = f"{r['step_s']:.4g} s; forward {r['forward_s']:.4g}, backward {r['backward_s']:.4g}"
    over = f"GEMMs x{r['over_gemm']:.3f}, with attention x{r['over_gemm_attention']:.3f}"
    rows = [
        ("tokens/s", f"{r['median']:,.0f}   (GEMMs alone: {r['limit']:,.0f})"),
        ("TFLOP/s", f"{r['tflops']:.4g}   (GEMMs: {r['limits']['gemm_tflops']:.4g})"),
        ("step", f"{step}; with the last update {r['step_s_with_last_update']:.4g}"),
        ("at least", ", ".join(f"{name} {s:.3g}" for name, s in r["bounds"].items())),
        ("step over", f"{over}, {r['bound']} x{r['over_bound']:.3f}"),
        ("host B/parameter", f"{r['host_bytes_per_parameter']:.2f} by resident size"),
        ("counted", ", ".join(f"{name} {r[name]:.4g}" for name in COUNTED if name in r)),
        ("loss", f"{r['losses'][0]} -> {r['losses'][-1]}"),
    ]
    rows += [(name, f"{value:.2f}") for name, value in r.items() if name.endswith("_gib")]
    if plan := r["predicted"]:
        rows.append(("predicted", ", ".join(f"{k} {rounded(v)}" for k, v in plan.items())))
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
    engine.finish()
    return clock.intervals()[0] / BLOCK_STEPS


def bench_overhead(args: Any, device: torch.device) -> None:
    """Forward and backward of the same layers, in turn; then again with AdamW beside."""
    batches = make_batches(args, device)
    resident = make_engine("resident", args, device, optimizer=False)
    streamed = make_engine("streamed", args, device, optimizer=False)
    for optimizer in ("no optimizer", "AdamW beside"):
        if optimizer == "AdamW beside":
            streamed.attach_optimizer(args)
        turns = take_turns((resident, streamed), batches, args, device)
        show_overhead(args, device, optimizer, turns)


def bench_homes(args: Any, device: torch.device) -> None:
    """Whole steps with all weights and states on the device, and with all of them streamed, in turn."""
    batches = make_batches(args, device)
    resident, streamed = (
        make_engine("streamed", changed(args, plan=home), device, optimizer=True)
        for home in ("vram", "arrive" if args.overhead == "arrive" else "ram")
    )
    turns = take_turns((resident, streamed), batches, args, device)
    arrive = args.overhead == "arrive"
    states = f"those of the first {args.guests} arrive" if arrive else "all states on the host"
    show_overhead(args, device, f"AdamW on both, {states}", turns)


def take_turns(
    engines: tuple[Engine, Engine], batches: list[torch.Tensor], args: Any, device: torch.device
) -> list[list[float]]:
    """Seconds per step, a pair for each turn."""
    turns = [
        [timed_block(engine, batches, device) for engine in engines]
        for _ in range(args.warmup + args.steps)
    ]
    return turns[args.warmup :]


def show_overhead(
    args: Any, device: torch.device, optimizer: str, turns: list[list[float]]
) -> None:
    resident_s, streamed_s = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = spread([streamed / resident for resident, streamed in turns])
    case = (
        f"{args.width} {args.layers} layers {args.tokens} tokens S={args.seq} {args.activations} "
        f"compute={args.compute} loss={args.loss} {optimizer}"
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
        loss = engine.loss_of(ids)
        found.append(time.perf_counter() - began)
        loss.backward()
        engine.update()
        engine.finish()
    return statistics.median(found[3:])


def bench_host_overhead(args: Any, device: torch.device) -> None:
    """Host time per unit in forward beyond the model's own; layers so small that nothing waits."""
    args.hidden, args.inter, args.heads, args.kv, args.vocab = 64, 192, 4, 2, 512
    args.loss, args.seq, args.tokens = "hf", 16, 16
    args.plan = None
    ids = make_batches(args, device)[0]
    resident = make_engine("resident", changed(args, activations="saved"), device, optimizer=False)
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


def run(args: Any, device: torch.device) -> None:
    torch.manual_seed(0)
    if args.host_overhead:
        bench_host_overhead(args, device)
    elif args.overhead:
        args.micro = 1
        (bench_overhead if args.overhead == "resident" else bench_homes)(args, device)
    else:
        bench_steps(args, device)


def main() -> int:
    args, device = parse_args()
    try:
        run(args, device)
    except MegatrainError as why:
        emit("refused", device, case=describe(args), why=str(why))
        say(f"{describe(args)}: {why}")
        return DOES_NOT_FIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
