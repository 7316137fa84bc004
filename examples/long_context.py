#!/usr/bin/env python3
"""Train on sequences of half a million tokens, one to a step.

    python examples/long_context.py Qwen/Qwen2.5-7B books/ --seq 524288 --plan-only
    python examples/long_context.py Qwen/Qwen2.5-7B books/ --seq 524288 --out runs/long
    python examples/long_context.py --tiny       # a random model, in seconds

One sequence cannot be cut into micro-batches, so its activations must fit: the plan keeps what the
device holds, sends what it does not to host memory behind compute ("attention+host"), and runs the
rest again; every second layer may keep attention's output in place of its input ("linked"). Logits
never exist whole, nor do a layer's gate and up. Positions beyond those that the model was made for
are reached by YaRN.
What the context is worth is told at the end: the loss of the last tokens with all that comes before
them, and with a little of it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import megatrain_torch as mt

TINY = dict(steps=12, seq=1024, lr=1e-2, last=64, out=Path("runs/tiny_long"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "model", nargs="?", help="folder in Hugging Face format, or name on the hub"
    )
    parser.add_argument("data", nargs="?", type=Path, help="a long text, or a folder of .txt")
    parser.add_argument("--out", type=Path, default=Path("runs/long"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--seq", type=int, default=131072, help="tokens of a sequence, and of a step"
    )
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--last", type=int, default=1024, help="tokens whose loss is told at the end"
    )
    parser.add_argument("--machine", help="plan for this one, as h200-128g; default: what is here")
    parser.add_argument("--vram", help='limit of device memory, as "80GiB"')
    parser.add_argument("--plan-only", action="store_true", help="say what a step would take; stop")
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.tiny and args.data is None:
        parser.error("a model and data are needed, or --tiny")
    return args


def stretched(config: Any, seq: int) -> Any:
    """The config for so many positions, by YaRN: Peng et al. 2023 (arXiv 2309.00071)."""
    most = config.max_position_embeddings
    if seq > most:
        yarn = {"rope_type": "yarn", "factor": seq / most, "original_max_position_embeddings": most}
        config.rope_parameters = {**config.rope_parameters, **yarn}
        config.max_position_embeddings = seq
    return config


def tokens_of(path: Path, tokenizer: Any) -> torch.Tensor:
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return torch.tensor([i for f in files for i in tokenizer(f.read_text()).input_ids])


@torch.no_grad()
def loss_of_last(model: Any, ids: torch.Tensor, last: int) -> float:
    """Nats per token of the last ones of ids [n]; no other logits are made."""
    ids = ids.to(model.device)
    model.eval()
    logits = model(input_ids=ids[None, :-1], logits_to_keep=last, use_cache=False).logits[0]
    model.train()
    return F.cross_entropy(logits.float(), ids[-last:]).item()


def train(model: Any, ids: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    opt = mt.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), max_grad_norm=1.0)
    losses = []
    for step in range(1, args.steps + 1):
        began, at = time.perf_counter(), int(torch.randint(len(ids) - args.seq + 1, ()))
        row = ids[None, at : at + args.seq]
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        rate = args.seq / (time.perf_counter() - began)
        print(f"step {step}  loss {losses[-1]:.3f}  norm {opt.grad_norm:.2f}  {rate:,.0f} tokens/s")
    return losses


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    if args.tiny:
        import tiny

        args.out.mkdir(parents=True, exist_ok=True)
        args.model = tiny.model(args.out / "random")
        args.data = tiny.text(args.out / "long.txt")
    config = stretched(AutoConfig.from_pretrained(args.model), args.seq)
    plan = mt.plan(
        config, tokens=args.seq, seq=args.seq, machine=args.machine, vram=args.vram, micro=1,
        use_cache=False,
    )
    print(plan)
    if args.plan_only:
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokens_of(args.data, tokenizer)
    if len(ids) < 2 * args.seq:  # as much is held out as a step takes
        raise SystemExit(f"{args.data}: {len(ids):,} tokens; at least {2 * args.seq:,} are needed")
    held, ids = ids[-args.seq :], ids[: -args.seq]
    model = mt.from_pretrained(AutoModelForCausalLM, args.model, config=config, plan=plan)
    losses = train(model, ids, args)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; {args.out / 'model'}")
    for n in (2 * args.last, args.seq):
        loss = loss_of_last(model, held[-n:], args.last)
        print(f"the last {args.last} of {n:,} tokens, held out: loss {loss:.3f}")


if __name__ == "__main__":
    main()
