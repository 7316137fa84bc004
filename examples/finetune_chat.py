#!/usr/bin/env python3
"""Fine-tune all weights of a chat model on conversations of your own.

    python examples/finetune_chat.py Qwen/Qwen2.5-7B-Instruct talks.jsonl --out runs/chat
    python examples/finetune_chat.py ... --resume            # after a crash: from the last checkpoint
    python examples/finetune_chat.py --tiny                  # a random model, in seconds

A line of the data is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.
What the assistant says is learnt. Conversations lie behind one another in one row, without padding
and without seeing each other: position_ids that start again say where each begins.

`megatrain train` does the same and more; this is what it comes down to.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    get_cosine_schedule_with_warmup,
)

import megatrain_torch as mt

TINY = dict(steps=12, tokens=1024, seq=256, lr=1e-2, save_every=6, out=Path("runs/tiny_chat"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "model", nargs="?", help="folder in Hugging Face format, or name on the hub"
    )
    parser.add_argument("data", nargs="?", type=Path, help=".jsonl with messages")
    parser.add_argument("--out", type=Path, default=Path("runs/chat"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, at most")
    parser.add_argument(
        "--seq", type=int, default=4096, help="of a conversation; longer ones are cut"
    )
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--states", default="fp32", help='"8bit": moments in a quarter of the bytes'
    )
    parser.add_argument("--vram", help='limit of device memory, as "24GiB"')
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.tiny and args.data is None:
        parser.error("a model and data are needed, or --tiny")
    return args


def tokens_of(messages: list[dict[str, str]], tokenizer: Any, seq: int) -> dict[str, list[int]]:
    """Tokens of a conversation, and labels: -100 but for what the assistant says."""
    ids: list[int] = []
    labels: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = (
                tokenizer.apply_chat_template(
                    messages[: i + said], add_generation_prompt=not said, return_dict=False
                )
                for said in (0, 1)
            )
            labels += [-100] * (len(before) - len(ids)) + after[len(before) :]
            ids = after
    return {"input_ids": ids[:seq], "labels": labels[:seq]}


def rows(talks: list[Any], tokens: int, begin: int) -> Iterator[dict[str, torch.Tensor]]:
    """[1, at most `tokens`] rows of whole conversations, for ever, from the begin-th row on."""
    join, number, some = DataCollatorWithFlattening(), 0, []
    for epoch in itertools.count():
        order = torch.randperm(len(talks), generator=torch.Generator().manual_seed(epoch))
        for talk in (talks[i] for i in order.tolist()):
            if some and sum(len(t["input_ids"]) for t in some) + len(talk["input_ids"]) > tokens:
                number += 1
                if number > begin:
                    yield join(some)
                some = []
            some.append(talk)


def train(model: Any, talks: list[Any], micro: int, args: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    opt = mt.AdamW(model.parameters(), lr=args.lr, max_grad_norm=1.0, states=args.states)
    schedule = get_cosine_schedule_with_warmup(opt, max(1, args.steps // 30), args.steps)
    last, begin, losses, saving = args.out / "last", 0, [], None
    if args.resume:
        begin = mt.load(model, opt, last, scheduler=schedule)["step"]
    data = rows(talks, args.tokens // micro, begin * micro)
    for step in range(begin + 1, args.steps + 1):
        began, seen, loss = time.perf_counter(), 0, 0.0
        batches = [next(data) for _ in range(micro)]
        targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        for batch in batches:  # losses are sums over the step's targets: rows have more or fewer
            part = model(**batch, num_items_in_batch=targets, use_cache=False).loss
            part.backward()
            seen, loss = seen + batch["input_ids"].numel(), loss + part.item()
        opt.step()
        schedule.step()
        opt.zero_grad()
        losses.append(loss)
        rate = seen / (time.perf_counter() - began)
        print(f"step {step}  loss {loss:.3f}  norm {opt.grad_norm:.2f}  {rate:,.0f} tokens/s")
        if step % args.save_every == 0:  # written while training goes on
            extra = {"step": step}
            saving = mt.save(model, opt, last, scheduler=schedule, extra=extra, asynchronous=True)
    if saving is not None:
        saving.wait()
    return losses


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: str) -> str:
    batch = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    out = model.eval().generate(**batch, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(out[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        import tiny

        args.model = tiny.model(args.out / "random")
        args.data = tiny.conversations(args.out / "talks.jsonl")
    config, tokenizer = (
        auto.from_pretrained(args.model) for auto in (AutoConfig, AutoTokenizer)
    )
    most = getattr(config, "max_position_embeddings", args.seq)
    if args.seq > most:
        raise SystemExit(f"--seq {args.seq}: the model was made for {most} positions at most")
    talks = [json.loads(line)["messages"] for line in args.data.read_text().splitlines()]
    talks = [tokens_of(messages, tokenizer, args.seq) for messages in talks]
    talks = [talk for talk in talks if any(label != -100 for label in talk["labels"])]
    if not talks:
        raise SystemExit(f"{args.data}: the assistant says nothing in the first {args.seq} tokens")

    plan = mt.plan(
        config, tokens=args.tokens, seq=args.seq, vram=args.vram, states=args.states,
        use_cache=False,
    )  # what fits and takes least time: where each layer lives, what is kept, micro-batches
    print(str(plan).split("\n\n")[0])
    model = mt.from_pretrained(AutoModelForCausalLM, args.model, plan=plan)
    losses = train(model, talks, plan.micro, args)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    if losses:  # none where a run is resumed that was at its end
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; {args.out / 'model'}")
    if not args.tiny:  # a random model learns letters in its few steps, and has no answers
        print("Q: Who are you?\nA:", answer(model, tokenizer, "Who are you?"))


if __name__ == "__main__":
    main()
