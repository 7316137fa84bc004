#!/usr/bin/env python3
"""What a step's matrix products and attention take alone: the least time of its arithmetic.

    python benchmarks/yardstick.py --width 7b --layers 20 --tokens 32768 --seq 1024
    python benchmarks/yardstick.py --device cpu            # toy sizes

Each product of a layer and of the head runs by itself at the step's own shapes, by torch.mm: forward, the
input's gradient and the weight's, once each, so that recomputing counts as loss. Matrices that read the same
input are timed one by one and side by side as one, and the lesser counts. They take turns in passes of some
seconds, so that the rates are those of a device that works without a break. Attention: the kernels that
fused layers call, forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from common import Clock, add_device_argument, add_shape_arguments, emit, say, table
from torch import Tensor

from megatrain_torch.fused.templates.attention import Attention

HEAD_TOKENS = 4096  # of the head's products: logits are made in chunks
MOST_TOKENS = 65536  # of other products: those of a longer micro-batch are as many of these
WARM_PASSES, LEAST_PASSES = 2, 5
LONG_S = 15.0  # passes that have taken so long are enough, behind a first one


class Call(NamedTuple):
    """One product, or attention one way.

    Attributes:
        group: what reads one input ("qkv"), the head or attention. joint: all of it side by side.
        way: forward, dgrad, wgrad or backward. flops: of one call. times: calls in a micro-batch.
    """

    name: str
    group: str
    joint: bool
    way: str
    run: Callable[[], Any]
    flops: float
    times: float


class Memory:
    """Random matrices by shape and use; products of one shape share theirs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.found: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, use: str, *shape: int, scale: float = 1.0) -> Tensor:
        key = (use, *shape)
        if key not in self.found:
            value = torch.randn(*shape, device=self.device, dtype=self.dtype)
            self.found[key] = value.mul_(scale)
        return self.found[key]


def layer_products(args: Any) -> dict[str, dict[str, tuple[int, int]]]:
    """(in, out) features of what reads one input, by the name of all of it side by side."""
    wide_kv = args.hidden // args.heads * args.kv
    return {
        "qkv": {
            "q": (args.hidden, args.hidden),
            "k": (args.hidden, wide_kv),
            "v": (args.hidden, wide_kv),
        },
        "o": {"o": (args.hidden, args.hidden)},
        "gate_up": {"gate": (args.hidden, args.inter), "up": (args.hidden, args.inter)},
        "down": {"down": (args.inter, args.hidden)},
    }


def product(
    new: Memory, group: str, name: str, tokens: int, fan_in: int, fan_out: int, times: float
) -> Iterator[Call]:
    """y = xW', dx = dyW, dW = dy'x. What is read is never written: values stay as random as they were."""
    x, y = new("x", tokens, fan_in), new("y", tokens, fan_out)
    dy, dx = new("dy", tokens, fan_out), new("dx", tokens, fan_in)
    w, dw = new("w", fan_out, fan_in, scale=0.02), new("dw", fan_out, fan_in)
    ways = {
        "forward": lambda: torch.mm(x, w.t(), out=y),
        "dgrad": lambda: torch.mm(dy, w, out=dx),
        "wgrad": lambda: torch.mm(dy.t(), x, out=dw),
    }
    flops = 2.0 * tokens * fan_in * fan_out
    for way, run in ways.items():
        yield Call(f"{name} {way}", group, name == group, way, run, flops, times)


def attention(new: Memory, args: Any, tokens: int, seq: int, times: float) -> Iterator[Call]:
    """Causal attention over sequences of `seq`; half of the square counts as work."""
    wide, batch = args.hidden // args.heads, tokens // seq
    q, dout = (new(use, batch, seq, args.heads, wide) for use in ("q", "dout"))
    k, v = (new(use, batch, seq, args.kv, wide) for use in ("k", "v"))
    kernels = Attention(scale=wide**-0.5, causal=True)
    with torch.no_grad():
        out, kept = kernels.forward(q, k, v)
    ways = {
        "forward": (2.0, lambda: kernels.forward(q, k, v)),
        "backward": (5.0, lambda: kernels.backward(dout, q, k, v, out, kept)),
    }
    for way, (products, run) in ways.items():
        flops = products * tokens * seq * args.hidden
        yield Call(f"attention {way}", "attention", True, way, run, flops, times)


def all_calls(new: Memory, args: Any, layers: int, tokens: int, seq: int) -> Iterator[Call]:
    """Of one micro-batch, each once, with how often it occurs."""
    rows = min(tokens, MOST_TOKENS)
    times = layers * tokens / rows
    for group, parts in layer_products(args).items():
        for name, (fan_in, fan_out) in parts.items():
            yield from product(new, group, name, rows, fan_in, fan_out, times)
        if len(parts) > 1:
            fan_out = sum(out for _, out in parts.values())
            yield from product(new, group, group, rows, args.hidden, fan_out, times)
    rows = min(tokens, HEAD_TOKENS)
    yield from product(new, "head", "head", rows, args.hidden, args.vocab, tokens / rows)
    yield from attention(new, args, tokens, seq, layers)


@torch.no_grad()
def medians(calls: list[Call], device: torch.device, least_s: float) -> dict[str, float]:
    """Seconds of each call, in passes over all of them for at least `least_s` seconds."""
    passes: list[list[float]] = []
    began = time.perf_counter()

    def enough() -> bool:
        gone = time.perf_counter() - began
        long = len(passes) > 1 and gone >= LONG_S
        return long or (len(passes) >= WARM_PASSES + LEAST_PASSES and gone >= least_s)

    while not enough():
        clock = Clock(device)
        clock.mark()
        for call in calls:
            call.run()
            clock.mark()
        passes.append(clock.intervals())
    columns = zip(*passes[min(WARM_PASSES, len(passes) - 1) :], strict=True)
    return {c.name: statistics.median(column) for c, column in zip(calls, columns, strict=True)}


def that_count(calls: list[Call], each_s: dict[str, float]) -> list[Call]:
    """Of matrices with one input, those one by one or all in one, as is faster."""
    out = []
    for group, way in dict.fromkeys((c.group, c.way) for c in calls):
        ours = [c for c in calls if (c.group, c.way) == (group, way)]
        choices = [[c for c in ours if c.joint == joint] for joint in (True, False)]
        seconds = [(sum(each_s[c.name] for c in chosen), chosen) for chosen in choices if chosen]
        out += min(seconds, key=lambda pair: pair[0])[1]
    return out


def measure(
    args: Any, device: torch.device, layers: int, tokens: int, seq: int, least_s: float = 2.0
) -> dict[str, Any]:
    """One micro-batch of `tokens` tokens.

    Args:
        args: Has hidden, inter, heads, kv, vocab (see add_shape_arguments).

    Returns:
        gemm_s, attention_s: seconds of a micro-batch; gemm_tflops, attention_tflops; each_ms: milliseconds of
        one call, by name.
    """
    calls = list(all_calls(Memory(device), args, layers, tokens, seq))
    each_s = medians(calls, device, least_s)
    total_s, flops = {"gemm": 0.0, "attention": 0.0}, {"gemm": 0.0, "attention": 0.0}
    for c in that_count(calls, each_s):
        kind = "attention" if c.group == "attention" else "gemm"
        total_s[kind] += c.times * each_s[c.name]
        flops[kind] += c.times * c.flops
    found: dict[str, Any] = {"each_ms": {name: s * 1e3 for name, s in each_s.items()}}
    for kind, seconds in total_s.items():
        found |= {f"{kind}_s": seconds, f"{kind}_tflops": flops[kind] / seconds / 1e12}
    calls.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    add_shape_arguments(parser, tiny=not cuda)
    parser.add_argument("--layers", type=int, default=20 if cuda else 4)
    parser.add_argument("--tokens", type=int, default=32768 if cuda else 256, help="a micro-batch's")
    parser.add_argument("--seq", type=int, default=1024 if cuda else 64)
    args = parser.parse_args()
    found = measure(args, device, args.layers, args.tokens, args.seq)
    shape = {name: getattr(args, name) for name in ("width", "layers", "tokens", "seq")}
    emit("yardstick", device, unit="s", **shape, **found)
    rows = [(name, f"{found[name]:,.4g}") for name in found if name != "each_ms"]
    table(rows + [(name, f"{ms:,.4g} ms") for name, ms in found["each_ms"].items()])
    say(f"{args.layers} layers of {args.width} width, {args.tokens} tokens")


if __name__ == "__main__":
    main()
