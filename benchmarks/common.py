"""What the benchmarks share: a model of any size built quickly, clocks, and the JSON line."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

REQUEST = 4 << 20  # bytes of one transfer
GIB = 2**30


def pick_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Marks on the compute stream, read once at the end: measuring never makes the host wait.

    On the CPU device, where compute runs in the calling thread, a mark is the host's time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds between neighbouring marks; waits for the device."""
        synchronize(self.device)
        pairs = list(itertools.pairwise(self.marks))
        if self.device.type == "cuda":
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in pairs]


def repeat(fn: Callable[[], Any], device: torch.device, reps: int, warmup: int = 2) -> list[float]:
    """Seconds of each of `reps` calls, one after the other on the device."""
    for _ in range(warmup):
        fn()
    synchronize(device)
    clock = Clock(device)
    clock.mark()
    for _ in range(reps):
        fn()
        clock.mark()
    return clock.intervals()


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, 10th and 90th percentile (nearest rank), and how many."""
    ordered = sorted(values)
    n = len(ordered)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[n // 10],
        "p90": ordered[min(n - 1, n * 9 // 10)],
        "n": n,
    }


def rounded(value: Any) -> Any:
    """Floats, also inside dicts, to five significant digits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def git(*words: str) -> str:
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure must be read with: hardware, versions, revision."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine() + " cpu",
        "host": f"{len(os.sched_getaffinity(0))}c/{memory / GIB:.0f}GiB",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "rev": git("rev-parse", "--short", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def emit(bench: str, device: torch.device, **fields: Any) -> None:
    """One measurement: a JSON line on stdout."""
    print(json.dumps({"bench": bench, **rounded(fields), **machine(device)}), flush=True)


def say(text: str = "") -> None:
    """For people: stderr, so that stdout stays JSON."""
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"  {name:<{width}}  {value}")


def raw_disk(path: str, nbytes: int) -> dict[str, Any]:
    """Rates of a file of about so many bytes, moved as a checkpoint is but without sums: _core.disk_measure."""
    from megatrain_torch import _core
    from megatrain_torch.checkpoint.save import WRITERS

    return _core.disk_measure(path, max(nbytes, WRITERS * REQUEST), REQUEST, WRITERS, WRITERS)


def host_rss_bytes() -> tuple[int, int]:
    """Resident memory of this process: (now, highest so far)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def fill_cheaply(shape: Sequence[int], dtype: torch.dtype, std: float, seed: int) -> torch.Tensor:
    """A tensor of pseudo-random normal values at the speed of memory.

    One block of random values is repeated; its length is a prime, so that rows differ.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(1_000_003).normal_(std=std, generator=generator).to(dtype)
    out = torch.empty(*shape, dtype=dtype)
    flat = out.view(-1)
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return out


# hidden, inter, heads, kv, vocab: those of Qwen2.5's models of these sizes, and a toy for machines without a GPU.
SHAPE = ("hidden", "inter", "heads", "kv", "vocab")
WIDTHS = {
    "toy": (64, 192, 4, 2, 512),
    "7b": (3584, 18944, 28, 4, 152064),
    "14b": (5120, 13824, 40, 8, 152064),
    "32b": (5120, 27648, 40, 8, 152064),
    "72b": (8192, 29568, 64, 8, 152064),
}


def early(name: str, **settings: Any) -> Any:
    """An argument that the defaults of others depend on, read before the real parser does."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", **settings)
    return getattr(parser.parse_known_args()[0], name)


def add_device_argument(parser: argparse.ArgumentParser) -> torch.device:
    parser.add_argument("--device", help="default: CUDA if there is one")
    return pick_device(early("device"))


def add_shape_arguments(parser: argparse.ArgumentParser, tiny: bool) -> None:
    """The model's shape, by name or number by number; a toy's where there is no GPU."""
    width = early("width", choices=list(WIDTHS), default="toy" if tiny else "7b")
    parser.add_argument("--width", choices=list(WIDTHS), default=width, help="of Qwen2.5's models")
    for name, value in zip(SHAPE, WIDTHS[width], strict=True):
        parser.add_argument(f"--{name}", type=int, default=value)


def qwen2_config(shape: Sequence[int], layers: int, max_seq: int) -> Any:
    """shape: the numbers that SHAPE names."""
    from transformers import Qwen2Config

    hidden, inter, heads, kv, vocab = shape
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inter,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        num_hidden_layers=layers,
        max_position_embeddings=max_seq,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )


def model_config(args: Any, layers: int, max_seq: int) -> Any:
    return qwen2_config([getattr(args, name) for name in SHAPE], layers, max_seq)


def build_model(args: Any, layers: int, max_seq: int, dtype: torch.dtype) -> torch.nn.Module:
    """A Qwen2ForCausalLM with random weights on the CPU."""
    return build_from(model_config(args, layers, max_seq), dtype)


def build_from(config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """A causal language model of transformers with random weights on the CPU.

    Built on the meta device, then each parameter is filled once: host memory holds the weights
    once, and no time goes into an initialisation that nothing depends on.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)  # its buffers are values, not weights
    for seed, (name, parameter) in enumerate(list(model.named_parameters())):
        owner, _, leaf = name.rpartition(".")
        if parameter.dim() > 1:
            value = fill_cheaply(parameter.shape, dtype, config.initializer_range, seed)
        else:
            value = torch.full(parameter.shape, 1.0 if leaf == "weight" else 0.0, dtype=dtype)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value))
    return model.train()


def parameter_count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
