#!/usr/bin/env python3
"""Train a small Llama on Shakespeare, character by character, through the streaming engine.

    python examples/train_shakespeare.py            # CUDA if there is one, else the CPU device

The loop is the ordinary one; `mt.stream` and `mt.AdamW` are all that is new. At the end the
checkpoint is loaded by stock transformers, its logits are compared with the trained model's, and it
writes some text.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import megatrain_torch as mt

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"
HELD_OUT = 0.1  # the last tenth of the text is never trained on
PRINT_EVERY = 25  # steps, when the output is not a terminal


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--hidden", type=int, default=128, help="a multiple of 64 (heads are 32 wide)"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="characters in a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help='"cpu" or "cuda"; default: CUDA if there is one')
    parser.add_argument(
        "--out", type=Path, default=Path("runs/shakespeare"), help="folder of the checkpoint"
    )
    return parser.parse_args()


def character_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token per character that occurs in `text`, in a form that AutoTokenizer loads."""
    vocab = {c: i for i, c in enumerate(sorted(set(text)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def build_model(args: argparse.Namespace, vocab_size: int, dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 5 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=max(1024, args.seq),
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)


def sample_batch(ids: torch.Tensor, batch: int, seq: int, rng: torch.Generator) -> torch.Tensor:
    """[batch, seq] stretches of `ids` from random places."""
    starts = torch.randint(len(ids) - seq, (batch, 1), generator=rng)
    return ids[starts + torch.arange(seq)]


def train(
    model: torch.nn.Module, ids: torch.Tensor, args: argparse.Namespace
) -> Iterator[dict[str, float]]:
    """Train for `args.steps` steps; yields what there is to say about each."""
    opt = mt.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=1.0
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        opt, args.lr, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    rng = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        start = time.perf_counter()
        batch = sample_batch(ids, args.batch, args.seq, rng)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
        copied = mt.last_step(model)
        yield {
            "loss": loss.item(),
            "norm": float(opt.grad_norm),
            "tokens_s": batch.numel() / (time.perf_counter() - start),
            "mib": (copied.h2d_bytes + copied.d2h_bytes) / 2**20,
        }


def show(steps: Iterator[dict[str, float]], total: int, console: Console) -> None:
    """A live line on a terminal, else one line every PRINT_EVERY steps."""
    line = "loss {loss:.3f}  norm {norm:.2f}  {tokens_s:,.0f} tokens/s  {mib:.1f} MiB streamed"
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=12),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for i, step in enumerate(steps, start=1):
            progress.update(task, completed=i, description=line.format(**step))
            if not console.is_terminal and (i == 1 or i % PRINT_EVERY == 0 or i == total):
                print(f"step {i:4d}  " + line.format(**step), flush=True)


@torch.no_grad()
def evaluate(model: torch.nn.Module, ids: torch.Tensor, seq: int, batches: int = 8) -> float:
    """Mean loss in nats per character over random stretches of `ids`, always the same ones."""
    rng = torch.Generator().manual_seed(1)
    model.eval()
    samples = [sample_batch(ids, 32, seq, rng) for _ in range(batches)]
    return sum(model(input_ids=x, labels=x).loss.item() for x in samples) / batches


@torch.no_grad()
def check_and_sample(model: torch.nn.Module, out: Path, prompt: str, characters: int) -> str:
    """Load `out` with stock transformers, compare its logits with `model`'s, and let it write.

    Raises:
        RuntimeError: The logits differ, so the checkpoint is not the model that was trained.
    """
    device = model.device
    stock = AutoModelForCausalLM.from_pretrained(out, dtype="auto").to(device)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    if not torch.equal(stock(input_ids=ids).logits, model(input_ids=ids).logits):
        raise RuntimeError(
            f"the model loaded from {out} gives other logits than the one that was saved"
        )
    text = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=characters,
        do_sample=True,
        temperature=0.8,
        top_p=0.9,
        top_k=0,
    )
    return tokenizer.decode(text[0])


def main() -> None:
    args = parse_args()
    console = Console()
    transformers_logging.disable_progress_bar()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    # Torch's threads spin while they wait for each other: one core is left to the engine's.
    torch.set_num_threads(max(1, min(4, len(os.sched_getaffinity(0)) - 1)))
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    text = TEXT.read_text()
    tokenizer = character_tokenizer(text)
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    split = int(len(ids) * (1 - HELD_OUT))

    model = build_model(
        args, len(tokenizer), torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    model = mt.stream(model, device=device)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.2f} M parameters in host memory, computing on {device}; "
        f"{len(ids):,} characters, {len(tokenizer)} different ones"
    )

    show(train(model, ids[:split], args), args.steps, console)
    print(f"held-out text: {evaluate(model, ids[split:], args.seq):.3f} nats per character")

    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    sample = check_and_sample(model, args.out, prompt="ROMEO:\n", characters=300)
    print(f"checkpoint in {args.out}: stock transformers loads it to the same logits and writes\n")
    print(f"{sample}\n")
    print(f"done in {time.perf_counter() - began:.0f} s; to train it on a text of your own:")
    print(
        f"{Path(sys.executable).parent / 'megatrain'} train {args.out} my.txt --lr 5e-4 --out runs/mine"
    )


if __name__ == "__main__":
    main()
