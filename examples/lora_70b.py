#!/usr/bin/env python3
"""LoRA on a model of 70 B parameters: its weights stay in host memory, in bf16, and stream.

    python examples/lora_70b.py --plan-only --machine h200-1.5t     # anywhere, without weights
    python examples/lora_70b.py meta-llama/Llama-3.1-70B my.txt --out runs/lora
    python examples/lora_70b.py                  # the same shape with random weights: try a machine
    python examples/lora_70b.py --tiny           # a random model, in seconds

Frozen weights take 2 bytes a parameter, wherever they are; only adapters have masters, moments and
gradients: 137 GiB of host memory in all. What the device has room for stays there beside it.
lora_over_codes.py has them in 4 or 8 bits.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import megatrain_torch as mt

SHAPE = dict(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
)
TINY = dict(steps=10, tokens=1024, seq=128, rank=4, lr=2e-2, out=Path("runs/tiny_lora"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "model", nargs="?", help="folder or name on the hub; default: random weights"
    )
    parser.add_argument("data", nargs="?", type=Path, help="text to learn; default: random tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--machine", help="plan for this one, as h200-1.5t; default: what is here")
    parser.add_argument("--vram", help='limit of device memory, as "80GiB"')
    parser.add_argument("--plan-only", action="store_true", help="say what a step would take; stop")
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args()


def with_adapters(model: Any, rank: int) -> Any:
    """LoRA beside every linear layer but the head; all else is frozen."""
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    )


def planned(config: Any, args: argparse.Namespace) -> mt.Plan:
    """What fits and takes least time, of a model without memory: before 132 GiB are read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = with_adapters(model, args.rank)
    return mt.plan(
        model, tokens=args.tokens, seq=args.seq, machine=args.machine, vram=args.vram,
        use_cache=False,
    )


def rows_of(args: argparse.Namespace, config: Any) -> torch.Tensor:
    """[rows, seq] tokens."""
    if args.data is None:
        return torch.randint(config.vocab_size, (64, args.seq))
    ids = AutoTokenizer.from_pretrained(args.model)(args.data.read_text()).input_ids
    return torch.tensor(ids[: len(ids) // args.seq * args.seq]).view(-1, args.seq)


def train(model: Any, rows: torch.Tensor, micro: int, args: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    opt = mt.AdamW(adapters, lr=args.lr, weight_decay=0.0, max_grad_norm=1.0)
    losses = []
    for step in range(1, args.steps + 1):
        began, loss = time.perf_counter(), 0.0
        for part in rows[torch.randint(len(rows), (args.tokens // args.seq,))].chunk(micro):
            value = model(input_ids=part, labels=part, use_cache=False).loss / micro
            value.backward()
            loss += value.item()
        opt.step()
        opt.zero_grad()
        losses.append(loss)
        rate = args.tokens / (time.perf_counter() - began)
        print(f"step {step}  loss {loss:.3f}  norm {opt.grad_norm:.3f}  {rate:,.0f} tokens/s")
    return losses


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    if args.tiny:
        import tiny

        args.out.mkdir(parents=True, exist_ok=True)
        args.model = tiny.model(args.out / "random")
        args.data = tiny.text(args.out / "new.txt")
    config = AutoConfig.from_pretrained(args.model) if args.model else LlamaConfig(**SHAPE)
    plan = planned(config, args)
    print(plan)
    if args.plan_only:
        return
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)  # mapped
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = mt.stream(with_adapters(model, args.rank), plan=plan)
    losses = train(model, rows_of(args, config), plan.micro, args)
    model.save_pretrained(args.out / "adapter")  # the adapters alone: PeftModel.from_pretrained
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; {args.out / 'adapter'}")


if __name__ == "__main__":
    main()
