#!/usr/bin/env python3
"""LoRA beside frozen weights of 4 or 8 bits: QLoRA of 70 B in 24 GiB, or GPT-OSS as published.

    python examples/lora_over_codes.py meta-llama/Llama-3.1-70B my.txt --vram 24GiB --host 48GiB
    python examples/lora_over_codes.py openai/gpt-oss-120b my.txt --base mxfp4 --targets attention \\
        --vram 24GiB --host 80GiB
    python examples/lora_over_codes.py MODEL --plan-only --machine rtx4090 --host 64GiB
    python examples/lora_over_codes.py --tiny [--base mxfp4]       # a random model, in seconds

nf4 (bitsandbytes, with double quantisation: 0.52 bytes a weight), int8 and fp8 are made while the
files are read, a tensor at a time; fp8 and mxfp4 (0.53) are kept where a checkpoint has them. The
same on the command line: megatrain train MODEL my.txt --lora r=16 --base nf4. Merge into the
16-bit model: PeftModel.from_pretrained(base, out / "adapter").merge_and_unload().
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain_torch as mt
from megatrain_torch import cli

TARGETS = {"all": "all-linear", "attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}
TINY = dict(
    base="fp8", steps=10, tokens=1024, seq=128, rank=4, lr=2e-2, out=Path("runs/tiny_codes")
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder or name on the hub")
    parser.add_argument("data", nargs="?", type=Path, help="text to learn")
    parser.add_argument("--base", default="nf4", choices=["nf4", "int8", "fp8", "mxfp4"])
    parser.add_argument("--targets", default="all", choices=TARGETS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("runs/codes"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--vram", help='limit of device memory, as "24GiB"')
    parser.add_argument("--host", help='limit of host memory, as "48GiB"')
    parser.add_argument("--nvme", help="directory for what host memory does not hold")
    parser.add_argument("--plan-only", action="store_true", help="say what a step would take; stop")
    parser.add_argument("--machine", help="plan for this one, as rtx4090")
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.tiny and (args.model is None or (args.data is None and not args.plan_only)):
        parser.error("a model and data are needed, or --tiny")
    return args


def say_plan(args: argparse.Namespace) -> int:
    """What a step takes, of a model without weights."""
    targets = "all" if args.targets == "all" else ",".join(TARGETS["attention"])
    words = ["plan", args.model, "--lora", f"r={args.rank},targets={targets}", "--base", args.base]
    for name in ("tokens", "seq", "machine", "vram", "host", "nvme"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name}", str(value)]
    return cli.main(words)


def rows_of(args: argparse.Namespace) -> torch.Tensor:
    """[rows, seq] tokens."""
    ids = AutoTokenizer.from_pretrained(args.model)(args.data.read_text()).input_ids
    return torch.tensor(ids[: len(ids) // args.seq * args.seq]).view(-1, args.seq)


def train(model: Any, rows: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    opt = mt.AdamW(adapters, lr=args.lr, weight_decay=0.0, max_grad_norm=1.0)
    losses = []
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        batch = rows[torch.randint(len(rows), (args.tokens // args.seq,))]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        rate = args.tokens / (time.perf_counter() - began)
        print(f"step {step}  loss {losses[-1]:.3f}  norm {opt.grad_norm:.3f}  {rate:,.0f} tokens/s")
    return losses


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    if args.tiny:
        import tiny

        args.out.mkdir(parents=True, exist_ok=True)
        blocks = dict(hidden_size=128, intermediate_size=256, num_key_value_heads=4)
        folder = args.out / "random"
        args.model = tiny.gpt_oss(folder) if args.base == "mxfp4" else tiny.model(folder, **blocks)
        args.data = tiny.text(args.out / "new.txt")
    if args.plan_only:
        raise SystemExit(say_plan(args))
    model = mt.from_pretrained(
        AutoModelForCausalLM,
        args.model,
        base=args.base,
        adapter=LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, target_modules=TARGETS[args.targets]
        ),
        vram=args.vram,
        host=args.host,
        nvme=args.nvme,
    ).train()
    losses = train(model, rows_of(args), args)
    model.save_pretrained(args.out / "adapter")  # the adapters alone: PeftModel.from_pretrained
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; {args.out / 'adapter'}")


if __name__ == "__main__":
    main()
