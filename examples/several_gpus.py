#!/usr/bin/env python3
"""Train one model with several processes, a GPU each, that share one copy of it in host memory.

    torchrun --nproc-per-node 2 examples/several_gpus.py Qwen/Qwen2.5-7B law/ --out runs/law
    torchrun --nproc-per-node 4 examples/several_gpus.py ... --resume    # on more of them
    torchrun --nproc-per-node 2 examples/several_gpus.py --tiny          # without a GPU too

The loop is one GPU's. Each process trains on rows of its own; gradients are averaged, so that a
step is one on all of them. mt.save and mt.load are called by all.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain_torch as mt

TINY = dict(steps=20, tokens=512, seq=128, lr=5e-3, save_every=10, out=Path("runs/tiny_several"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder in Hugging Face format, or a hub's name")
    parser.add_argument("data", nargs="?", type=Path, help="a text file, or a folder of .txt")
    parser.add_argument("--out", type=Path, default=Path("runs/several"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32768, help="of a step, in each process")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.tiny and args.data is None:
        parser.error("a model and data are needed, or --tiny")
    return args


def make_tiny(args: argparse.Namespace) -> None:
    import tiny

    folder = Path(tempfile.mkdtemp())
    args.model, args.data = tiny.model(folder / "model"), tiny.text(folder / "text.txt")


def rows_of(path: Path, tokenizer: AutoTokenizer, seq: int) -> torch.Tensor:
    """[rows, seq]"""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    ids = [i for f in files for i in [*tokenizer(f.read_text()).input_ids, tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // seq * seq]).view(-1, seq)


def main() -> None:
    args = parse_args()
    if args.tiny:
        make_tiny(args)
    # The launcher's lines: who we are, and which GPU is ours.
    dist.init_process_group()
    rank, many = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    model = mt.from_pretrained(AutoModelForCausalLM, args.model, dtype=torch.bfloat16)
    opt = mt.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, max_grad_norm=1.0)
    rows = rows_of(args.data, AutoTokenizer.from_pretrained(args.model), args.seq)
    checkpoint, begin = args.out / "last", 0
    if args.resume:
        begin = mt.load(model, opt, checkpoint)["step"]

    each = args.tokens // args.seq
    for step in range(begin, args.steps):
        clock = time.perf_counter()
        # All draw the same rows for a step, and each takes its own of them.
        rng = torch.Generator().manual_seed(step)
        picked = torch.randint(len(rows), (many, each), generator=rng)[rank]
        batch = rows[picked].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            speed = many * batch.numel() / (time.perf_counter() - clock)
            print(
                f"step {step}  loss {loss.item():.4f}  norm {opt.grad_norm:.3f}  "
                f"{speed:,.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0:
            mt.save(model, opt, checkpoint, extra={"step": step + 1}, asynchronous=True)
    if rank == 0:
        print(mt.explain(model).splitlines()[0])
    mt.save(model, opt, checkpoint, extra={"step": args.steps}).wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
