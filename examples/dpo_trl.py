#!/usr/bin/env python3
"""Teach a chat model what is preferred: DPO, through TRL's own trainer.

    python examples/dpo_trl.py Qwen/Qwen2.5-7B-Instruct pairs.jsonl --out runs/dpo
    python examples/dpo_trl.py --tiny                        # a random model, in seconds

A line of the data is {"prompt": "...", "chosen": "...", "rejected": "..."}, texts or messages.
All weights are trained. DPO compares with the model as it was: TRL takes these log-probabilities
before the first step (precompute_ref_log_probs), so that there is one model in memory, not two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import megatrain_torch as mt

TINY = dict(steps=10, pairs=8, micro=2, seq=128, lr=3e-3, beta=0.1, out=Path("runs/tiny_dpo"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "model", nargs="?", help="folder in Hugging Face format, or name on the hub"
    )
    parser.add_argument("data", nargs="?", type=Path, help=".jsonl of prompt, chosen, rejected")
    parser.add_argument("--out", type=Path, default=Path("runs/dpo"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=64, help="of a step")
    parser.add_argument(
        "--micro", type=int, default=4, help="micro-batches that a step is cut into"
    )
    parser.add_argument(
        "--seq", type=int, default=2048, help="tokens of prompt and answer, at most"
    )
    parser.add_argument("--lr", type=float, default=5e-7)
    parser.add_argument(
        "--beta", type=float, default=0.1, help="how near the model stays to itself"
    )
    parser.add_argument("--vram", help='limit of device memory, as "24GiB"')
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.tiny and args.data is None:
        parser.error("a model and data are needed, or --tiny")
    return args


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        import tiny

        args.model = tiny.model(args.out / "random")
        args.data = tiny.preferences(args.out / "pairs.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pairs = load_dataset("json", data_files=str(args.data), split="train")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    config = DPOConfig(
        output_dir=str(args.out),
        per_device_train_batch_size=args.pairs // args.micro,
        gradient_accumulation_steps=args.micro,
        max_steps=args.steps,
        max_length=args.seq,
        beta=args.beta,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 10),
        max_grad_norm=1.0,  # mt.AdamW clips, as it updates
        precompute_ref_log_probs=True,
        gradient_checkpointing=False,  # what is kept for backward is the streamed model's to choose
        bf16=False,  # no autocast: the weights' own type, with fp32 masters
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = mt.stream_trainer(  # the trainer, then its model streamed, then the optimizer
        DPOTrainer,
        model,
        config,
        train_dataset=pairs,
        processing_class=tokenizer,
        optimizer=lambda m: mt.AdamW(m.parameters(), lr=args.lr),
        stream_with={"vram": args.vram},
    )
    trainer.train()
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    log = [line for line in trainer.state.log_history if "rewards/margins" in line]
    for what in ("loss", "rewards/margins"):
        print(f"{what} {log[0][what]:.3f} at first, {log[-1][what]:.3f} at last")


if __name__ == "__main__":
    main()
