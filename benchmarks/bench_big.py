#!/usr/bin/env python3
"""A model that nothing else on the machine can train: a few steps over the same batch, and its plan's bytes beside.

    python benchmarks/bench_big.py --model qwen2.5-72b --tokens 16384 --states 8bit-sr --grads none --nvme /scratch
    python benchmarks/bench_big.py --model gpt-oss-120b --layers 24 --states 8bit-sr --grads none
    python benchmarks/bench_big.py --model folder/of/config.json --tokens 524288 --seq 524288 --steps 1
    python benchmarks/bench_big.py --model gpt-oss-120b --tiny --device cpu      # a small model of that kind

Random weights in bf16. One JSON line on stdout; plan, progress and a table on stderr. "seconds": a step from its start
to the start of the next, the last one's to the end of its update, the median without the first. In the first,
kernels are chosen, layers are tried and memory is first touched: --warm takes it over fewer tokens, before. Status 3
when there is no plan that fits: nothing has been allocated by then, and the plan says what would.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_step import DOES_NOT_FIT, make_batches, memory, prediction
from common import (
    WIDTHS,
    add_device_argument,
    build_from,
    emit,
    host_rss_bytes,
    parameter_count,
    qwen2_config,
    say,
    table,
)
from engines import ENGINES, planned
from transformers import AutoConfig, GptOssConfig

import megatrain_torch as mt
from megatrain_torch.base.errors import MegatrainError
from megatrain_torch.base.modes import FORMATS, GRADS

# Layers of Qwen2.5's models; of OpenAI's gpt-oss, transformers' defaults are those of the larger one.
LAYERS = {"7b": 28, "14b": 48, "32b": 64, "72b": 80}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": 256}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    add = parser.add_argument
    names = [f"qwen2.5-{name}" for name in LAYERS] + ["gpt-oss-120b"]
    add("--model", required=True, help=f"{', '.join(names)}, or a config.json's folder")
    add("--layers", type=int, help="fewer than it has")
    add("--tiny", action="store_true", help="with toy sizes")
    add("--seq", type=int, default=1024)
    add("--tokens", type=int, default=16384, help="in a step")
    add("--steps", type=int, default=5)
    add("--warm", type=int, default=0, metavar="TOKENS", help="of a step before, which is not counted; 0: none")
    add("--lr", type=float, default=1e-5)
    add("--clip", type=float, default=1.0, help="0, and --grads none: no clipping")
    add("--states", choices=FORMATS, default="8bit-sr", help="how mt.AdamW keeps its states")
    add("--grads", choices=GRADS, default="ram", help="none: kept nowhere, used as they come, not clipped")
    add("--activations", default="auto", help="of all layers, as in mt.plan")
    add("--vram", help='the most of the device that may be used, as "32GiB"')
    add("--host", help='the most of host memory that may be used, as "64GiB"')
    add("--nvme", metavar="DIRECTORY", help="where goes what host memory does not hold")
    args = parser.parse_args()
    if args.warm % min(args.seq, args.warm or 1):
        parser.error(f"--warm {args.warm}: no multiple of --seq {args.seq}")
    if args.tokens % args.seq:
        parser.error(f"--tokens {args.tokens}: no multiple of --seq {args.seq}")
    fixed = {"plan": "auto", "micro": None, "compute": "auto", "batches": 1}
    args.clip = args.clip if args.grads == "ram" else 0.0
    return argparse.Namespace(**vars(args) | fixed), device


def config_of(args: argparse.Namespace) -> Any:
    """The model's configuration, cut down as asked."""
    family, _, size = args.model.rpartition("-")
    if args.model == "gpt-oss-120b":
        config = GptOssConfig(max_position_embeddings=max(args.seq, 131072))
    elif family == "qwen2.5" and size in LAYERS:
        config = qwen2_config(WIDTHS[size], LAYERS[size], args.seq)
    else:
        config = AutoConfig.from_pretrained(args.model)
    changes = TINY if args.tiny else {}
    changes = changes | ({"num_hidden_layers": args.layers} if args.layers else {})
    settings = config.to_dict() | changes
    settings["layer_types"] = (settings.get("layer_types") or [])[: settings["num_hidden_layers"]] or None
    return type(config)(**settings | {"use_cache": False})


def train(engine: Any, args: argparse.Namespace, device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds and losses of the steps. Reading the loss waits for compute, not for the update."""
    ids, losses, begins = make_batches(args, device)[0], [], []
    if args.warm:
        engine.backward(ids.flatten()[: args.warm].view(-1, min(args.seq, args.warm)), 1.0)
        engine.update()
        engine.finish()
    for step in range(args.steps):
        begins.append(time.perf_counter())
        loss = sum(float(engine.backward(part, 1 / args.micro)) for part in ids.chunk(args.micro)) / args.micro
        engine.update()
        losses.append(round(loss, 4))
        say(f"step {step + 1} of {args.steps}: loss {loss:.4f}, {time.perf_counter() - begins[-1]:.1f} s")
    engine.finish()
    begins.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(begins)], losses


@contextlib.contextmanager
def telling(trace: mt.Trace, every_s: float = 60.0) -> Iterator[None]:
    """A line a minute on stderr: how far a step is."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(every_s):
            say(f"  {trace.progress()}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    plan = found["predicted"]

    def beside(name: str, unit: str = "GiB") -> str:
        have, said = found.get(name), plan[name]
        return "" if have is None else f"{have:.2f} {unit}, planned {said:.2f} ({100 * (have / said - 1):+.1f} %)"

    rows = [
        ("tokens/s", f"{found['median']:,.0f}"),
        ("step", beside("seconds", "s") + f"; bound by {plan['bound']}"),
        ("device", beside("vram_gib") or f"planned {plan['vram_gib']:.2f} GiB"),
        ("host", beside("host_gib") + f"; at most {found['host_peak_gib']:.2f}, building the model included"),
        ("disk", f"{plan['disk_gib']:.2f} GiB planned"),
        ("loss", " -> ".join(map(str, found["losses"]))),
    ]
    table(rows)


def main() -> int:
    args, device = parse_args()
    config = config_of(args)
    try:
        plan = planned(config, args, config.num_hidden_layers)
    except MegatrainError as why:
        say(str(why))
        return DOES_NOT_FIT
    say(str(plan))
    began, before = time.perf_counter(), host_rss_bytes()[0]
    model = build_from(config, torch.bfloat16)
    parameters, args.micro, args.vocab = parameter_count(model), plan.micro, config.vocab_size
    engine = ENGINES["streamed"](model, args, device, True, plan=planned(model, args))
    del model
    built_s = time.perf_counter() - began
    say(f"{parameters / 1e9:.2f} B parameters built in {built_s:.0f} s")
    with mt.trace(engine.model) as trace, telling(trace):
        seconds, losses = train(engine, args, device)
    last = trace.steps()[-1]
    say(str(last))
    used = memory(device, parameters, before)
    found = {
        "seconds": statistics.median(seconds[not args.warm :] or seconds),
        "each_s": seconds,
        "losses": losses,
        "parameters": parameters,
        "built_s": built_s,
        "host_gib": used["host_gib"],
        "host_peak_gib": host_rss_bytes()[1] / 2**30,
        "vram_gib": used.get("vram_used_gib"),
        "vram_allocated_gib": used.get("vram_peak_gib"),
        "busy_s": dict(last.busy),
        "idle_s": dict(last.idle),
        "predicted": prediction(plan),
    }
    found["median"] = args.tokens / found["seconds"]
    case = f"{Path(args.model).name} {config.num_hidden_layers} layers, {args.tokens} tokens, S={args.seq}"
    case += f" states={args.states} grads={args.grads} vram={args.vram} host={args.host} nvme={bool(args.nvme)}"
    emit("big", device, case=case, unit="tokens/s", **found)
    show(args, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
