#!/usr/bin/env python3
"""The same training run with fused layers and with the model's own code: do the losses agree?

    python benchmarks/bench_loss.py                    # 100 steps of a 0.15 B Llama on text, bf16
    python benchmarks/bench_loss.py --device cpu       # toy size

Three runs from the same weights, over the same text: the model's own code, fused layers, and as a
control the model's own code with each step cut into two micro-batches: the same mathematics, rounded in
another order. Fused layers may differ from the own code by about as much as the control does.
One JSON line with all losses on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import add_device_argument, emit, say, table

TEXT = Path(__file__).resolve().parents[1] / "examples/data/tinyshakespeare.txt"


def parse_args() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    cuda = device.type == "cuda"
    add = parser.add_argument
    add("--layers", type=int, default=8 if cuda else 2)
    add("--hidden", type=int, default=1024 if cuda else 64)
    add("--seq", type=int, default=512 if cuda else 32)
    add("--batch", type=int, default=16 if cuda else 4)
    add("--steps", type=int, default=100 if cuda else 5)
    add("--lr", type=float, default=6e-4)
    args = parser.parse_args()
    args.device = device
    return args


def make_model(args: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, args.hidden // 64)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), max_position_embeddings=args.seq,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def batches(args: Any) -> list[torch.Tensor]:
    """Bytes of the text, `[batch, seq]` at random places, the same for every run."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    rng = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - args.seq, (args.steps, args.batch), generator=rng)
    return [torch.stack([text[s : s + args.seq] for s in row]) for row in starts]


def losses_of(args: Any, compute: str, micro: int) -> list[float]:
    import megatrain_torch as mt

    model = mt.stream(make_model(args), args.device, compute=compute)
    opt = mt.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, max_grad_norm=1.0)
    found = []
    for batch in batches(args):
        total = torch.zeros((), device=args.device)
        for part in batch.chunk(micro):
            loss = model(input_ids=part, labels=part).loss / micro
            loss.backward()
            total += loss.detach()
        opt.step()
        opt.zero_grad()
        found.append(total)
    if compute == "fused":
        assert "template" in mt.explain(model), mt.explain(model)
    return [round(float(x), 5) for x in found]


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def main() -> None:
    args = parse_args()
    runs = {
        "own": losses_of(args, "eager", 1),
        "fused": losses_of(args, "fused", 1),
        "control": losses_of(args, "eager", 2),
    }
    fused, control = apart(runs["own"], runs["fused"]), apart(runs["own"], runs["control"])
    case = f"{args.layers} layers hidden={args.hidden} {args.steps} steps bf16"
    emit("loss", args.device, case=case, unit="nats apart at most", median=fused, spread=0.0,
         repetitions=1, limit=control, limit_from="the own code in two micro-batches", losses=runs)  # fmt: skip
    say(case)
    table([(name, f"{x[0]:.4f} -> {x[-1]:.4f}") for name, x in runs.items()])
    say(f"fused is at most {fused:.5f} from the own code, the control {control:.5f}")


if __name__ == "__main__":
    main()
