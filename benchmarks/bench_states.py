#!/usr/bin/env python3
"""What moments of 8 bits do to training: the same run on Shakespeare's text in every format of states.

    python benchmarks/bench_states.py --steps 1000 --picture states.png

The same small Llama of bf16 weights, the same batches in the same order; only mt.AdamW(states=...) differs. One JSON
line per format and seed on stdout, with the loss of every tenth of the run and the held-out loss at the end; a table
on stderr; a picture where matplotlib is installed. Two runs in fp32 states that differ in their last bits only (one
with its micro-batch cut in two) show how much of a difference is chance.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import emit, pick_device, say
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_torch as mt
from megatrain_torch.base.modes import FORMATS

TEXT = Path(__file__).parents[1] / "examples" / "data" / "tinyshakespeare.txt"
HELD_OUT = 0.1
AGAIN = "fp32, two micro-batches"  # chance alone
AVERAGED = 50  # steps whose losses are one point of a curve
LAST = 100  # steps whose mean loss is the final one


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--hidden", type=int, default=128, help="a multiple of 64 (heads are 32 wide)")
    add("--layers", type=int, default=4)
    add("--seq", type=int, default=128, help="characters in a sequence")
    add("--batch", type=int, default=16, help="sequences in a step; even")
    add("--lr", type=float, default=2e-3)
    add("--seeds", type=int, default=1, help="runs of each format, with other weights and batches")
    add("--first-seed", type=int, default=0)
    add("--states", nargs="+", choices=[*FORMATS, AGAIN], default=[*FORMATS, AGAIN])
    add("--device", help='"cpu" or "cuda"; default: CUDA if there is one')
    add("--picture", type=Path, help="file for the curves: .png, .svg or .pdf")
    return parser.parse_args()


def build(args: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 5 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.seq,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).bfloat16()


def sample(ids: torch.Tensor, args: argparse.Namespace, rng: torch.Generator, n: int) -> torch.Tensor:
    """[n, seq] stretches of `ids` from random places."""
    starts = torch.randint(len(ids) - args.seq, (n, 1), generator=rng)
    return ids[starts + torch.arange(args.seq)]


@torch.no_grad()
def held_out(model: torch.nn.Module, ids: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean loss in nats per character over the same random stretches in every run."""
    rng = torch.Generator().manual_seed(1)
    model.eval()
    samples = [sample(ids, args, rng, 32) for _ in range(16)]
    return statistics.mean(model(input_ids=x, labels=x).loss.item() for x in samples)


def run(args: argparse.Namespace, name: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Losses of all steps, and the held-out one at the end."""
    text = TEXT.read_text()
    place = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([place[c] for c in text])
    cut = int(len(ids) * (1 - HELD_OUT))
    torch.manual_seed(seed)
    model = mt.stream(build(args, len(place)), device=device)
    opt = mt.AdamW(
        model.parameters(),
        lr=args.lr,
        weight_decay=0.1,
        max_grad_norm=1.0,
        states="fp32" if name == AGAIN else name,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        opt, args.lr, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    rng = torch.Generator().manual_seed(seed)
    losses, start = [], time.perf_counter()
    for _ in range(args.steps):
        parts = sample(ids[:cut], args, rng, args.batch).chunk(2 if name == AGAIN else 1)
        loss = 0.0
        for part in parts:
            one = model(input_ids=part, labels=part).loss / len(parts)
            one.backward()
            loss += one.item()
        opt.step()
        schedule.step()
        opt.zero_grad()
        losses.append(loss)
    seconds = time.perf_counter() - start
    found = {"losses": losses, "held_out": held_out(model, ids[cut:], args), "seconds": seconds}
    mt.unstream(model)
    return found


def curve(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[i : i + AVERAGED]) for i in range(0, len(losses), AVERAGED)]


def final(found: dict[str, Any]) -> float:
    return statistics.mean(found["losses"][-LAST:])


def picture(path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Curves of the first seed, and how far each is from the one of fp32 states."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    base = curve(runs["fp32"][0]["losses"])
    for name, found in runs.items():
        mine = curve(found[0]["losses"])
        at = [AVERAGED * (i + 1) for i in range(len(mine))]
        style = ":" if name == AGAIN else "-"
        above.plot(at, mine, style, label=name, linewidth=1)
        below.plot(at, [100 * (a / b - 1) for a, b in zip(mine, base)], style, linewidth=1)
    above.set_ylabel(f"loss, nats a character, mean of {AVERAGED} steps")
    above.legend()
    below.set_ylabel("% above fp32 states")
    below.set_xlabel("step")
    below.axhline(0, color="grey", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def change(pairs: list[tuple[float, float]]) -> str:
    """By how much the first of each pair is above the second, in percent: mean, and its standard error."""
    each = [100 * (a / b - 1) for a, b in pairs]
    error = f" +- {statistics.stdev(each) / len(each) ** 0.5:.2f}" if len(each) > 1 else ""
    return f"{statistics.mean(each):+.2f}{error} %"


def main() -> None:
    args = parse_args()
    device = pick_device(args.device)
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in args.states:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            found = run(args, name, seed, device)
            runs.setdefault(name, []).append(found)
            emit(
                "states",
                device,
                states=name,
                case=f"Llama of {args.hidden} x {args.layers}, S={args.seq}, {args.batch} sequences",
                seed=seed,
                steps=args.steps,
                lr=args.lr,
                unit="nats a character",
                final=final(found),
                held_out=found["held_out"],
                curve=curve(found["losses"]),
                seconds=found["seconds"],
            )
    say(f"{args.steps} steps, {args.seeds} seed(s); mean of the last {LAST} steps, and of text never seen")
    for name, found in runs.items():
        last = statistics.mean(final(f) for f in found)
        kept = statistics.mean(f["held_out"] for f in found)
        against = ""
        if "fp32" in runs and name != "fp32":
            pairs = list(zip(found, runs["fp32"]))
            against = change([(final(a), final(b)) for a, b in pairs])
            against += ", " + change([(a["held_out"], b["held_out"]) for a, b in pairs])
        say(f"  {name:24} {last:.4f}  {kept:.4f}  {against}")
    if args.picture and "fp32" in runs:
        picture(args.picture, runs)


if __name__ == "__main__":
    main()
