#!/usr/bin/env python3
"""Train a language model on with texts of a new kind, and see what it forgets of the old.

    python examples/continue_pretraining.py Qwen/Qwen2.5-7B law/ --old wiki/ --out runs/law
    python examples/continue_pretraining.py ... --products fp8            # on a GPU of Ada, Hopper or later
    python examples/continue_pretraining.py ... --resume     # after a crash: from the last checkpoint
    python examples/continue_pretraining.py --tiny           # a random model, in seconds

The data is a text file or a folder of them; documents lie behind one another in rows of --seq
tokens. A share of the rows is of the old kind, so that less of it is forgotten; the rate rises,
stays, and falls in the last fifth, so that a run that was stopped before can be made longer: --resume
with more --steps. Loss on held-out text of both kinds is told before and after.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_wsd_schedule

import megatrain_torch as mt

TINY = dict(steps=20, tokens=1024, seq=128, lr=5e-3, save_every=10, out=Path("runs/tiny_on"))
HELD_OUT = 32  # rows, at most a tenth


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "model", nargs="?", help="folder in Hugging Face format, or name on the hub"
    )
    parser.add_argument("data", nargs="?", type=Path, help="a text file, or a folder of .txt")
    parser.add_argument("--old", type=Path, help="the same, of what must not be forgotten")
    parser.add_argument("--old-share", type=float, default=0.1, help="of the rows")
    parser.add_argument("--out", type=Path, default=Path("runs/on"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=262144, help="of a step")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--states", default="fp32", help='"8bit": moments in a quarter of the bytes'
    )
    parser.add_argument(
        "--products", default="bf16", help='"fp8": of layers, with operands rounded to 8 bits'
    )
    parser.add_argument("--vram", help='limit of device memory, as "24GiB"')
    parser.add_argument("--nvme", help="directory for what host memory does not hold")
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.tiny and args.data is None:
        parser.error("a model and data are needed, or --tiny")
    return args


def rows_of(path: Path, tokenizer: Any, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, seq] to train on, and [some, seq] that are held out."""
    ids: list[int] = []
    for file in sorted(path.rglob("*.txt")) if path.is_dir() else [path]:
        ids += [*tokenizer(file.read_text()).input_ids, tokenizer.eos_token_id]
    rows = torch.tensor(ids[: len(ids) // seq * seq]).view(-1, seq)
    held = min(HELD_OUT, len(rows) // 10)
    if not held:
        raise SystemExit(f"{path}: {len(rows)} rows of {seq} tokens; at least 10 are needed")
    return rows[: len(rows) - held], rows[len(rows) - held :]


def batch_of(step: int, new: torch.Tensor, old: torch.Tensor | None, args: Any) -> torch.Tensor:
    """[rows, seq] of a step: the same ones after a resume."""
    rng = torch.Generator().manual_seed(step)
    many = args.tokens // args.seq
    of_old = int((torch.rand(many, generator=rng) < args.old_share).sum()) if old is not None else 0
    picked = [new[torch.randint(len(new), (many - of_old,), generator=rng)]]
    if of_old:
        picked.append(old[torch.randint(len(old), (of_old,), generator=rng)])
    return torch.cat(picked)[torch.randperm(many, generator=rng)]  # alike in all micro-batches


@torch.no_grad()
def loss_on(model: Any, rows: torch.Tensor) -> float:
    """Nats per token."""
    model.eval()
    losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    model.train()
    return sum(losses) / len(losses)


def train(model: Any, new: torch.Tensor, old: torch.Tensor | None, micro: int, args: Any) -> None:
    opt = mt.AdamW(
        model.parameters(),
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        max_grad_norm=1.0,
        states=args.states,
    )
    warm, fall = max(1, args.steps // 50), max(1, args.steps // 5)
    schedule = get_wsd_schedule(opt, warm, fall, num_training_steps=args.steps)
    last, begin, saving = args.out / "last", 0, None
    if args.resume:
        begin = mt.load(model, opt, last, scheduler=schedule)["step"]
    for step in range(begin + 1, args.steps + 1):
        began, loss = time.perf_counter(), 0.0
        for part in batch_of(step, new, old, args).chunk(micro):
            value = model(input_ids=part, labels=part, use_cache=False).loss / micro
            value.backward()
            loss += value.item()
        opt.step()
        schedule.step()
        opt.zero_grad()
        rate = args.tokens / (time.perf_counter() - began)
        print(f"step {step}  loss {loss:.3f}  norm {opt.grad_norm:.2f}  {rate:,.0f} tokens/s")
        if step % args.save_every == 0:  # written while training goes on
            extra = {"step": step}
            saving = mt.save(model, opt, last, scheduler=schedule, extra=extra, asynchronous=True)
    if saving is not None:
        saving.wait()


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        import tiny

        args.model = tiny.model(args.out / "random")
        args.data = tiny.text(args.out / "new.txt")
        args.old = tiny.text(args.out / "old.txt", begin=500_000)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    new, held_new = rows_of(args.data, tokenizer, args.seq)
    old, held_old = rows_of(args.old, tokenizer, args.seq) if args.old else (None, None)

    config = AutoConfig.from_pretrained(args.model)
    kind = torch.bfloat16 if args.products == "fp8" else None  # codes are made of such weights
    plan = mt.plan(
        config,
        tokens=args.tokens,
        seq=args.seq,
        vram=args.vram,
        use_cache=False,  # as the loop calls the model
        states=args.states,
        nvme=args.nvme,
        products=args.products,
        dtype=kind,
    )  # what fits and takes least time: where each layer lives, what is kept, micro-batches
    print(str(plan).split("\n\n")[0])
    model = mt.from_pretrained(AutoModelForCausalLM, args.model, plan=plan, dtype=kind)
    held = {"new": held_new, "old": held_old} if args.old else {"new": held_new}
    before = {kind: loss_on(model, rows) for kind, rows in held.items()}
    train(model, new, old, plan.micro, args)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    for kind, rows in held.items():
        after = loss_on(model, rows)
        print(f"{kind} text, held out: loss {before[kind]:.3f} at first, {after:.3f} at last")


if __name__ == "__main__":
    main()
