#!/usr/bin/env python3
"""docs/what-fits.md: the largest model that a GPU and its host's memory train, and how fast, by mt.plan.

    python tools/what_fits.py          # writes the page; some minutes

Rates are those of `megatrain plan --list-machines`; nothing here needs a GPU, weights or a network.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/what-fits.md"
TOKENS, SEQ, RANK = 32768, 2048, 16
SHARE = 0.97  # of a host's memory, that the system leaves

# Qwen2.5's models: hidden, inter, heads, kv, layers, tied; vocabulary 151,936, or of the larger ones 152,064.
MODELS = {
    "72B": (8192, 29568, 64, 8, 80, False),
    "32B": (5120, 27648, 40, 8, 64, False),
    "14B": (5120, 13824, 40, 8, 48, False),
    "7B": (3584, 18944, 28, 4, 28, False),
    "3B": (2048, 11008, 16, 2, 36, True),
    "1.5B": (1536, 8960, 12, 2, 28, True),
    "0.5B": (896, 4864, 14, 2, 24, True),
}
# GPU, its memory as it is sold, description, and GiB of host memory that such machines have.
MACHINES = (
    ("RTX 3060", 12, "rtx3060-12g", (32, 64)),
    ("RTX 4080", 16, "rtx4080", (32, 64, 128)),
    ("RTX 3090", 24, "rtx3090-64g", (64, 128)),
    ("RTX 4090", 24, "rtx4090-64g", (32, 64, 128, 256)),
    ("RTX A6000", 48, "a6000", (128, 256)),
    ("L40S", 48, "l40s", (256, 512)),
    ("A100", 80, "a100-80g", (256, 512)),
    ("H100", 80, "h100-80g", (128, 256, 512)),
    ("H200", 141, "h200-128g", (128, 256, 512)),
    ("B200", 192, "b200-2t", (256, 512)),
)


class Way(NamedTuple):
    """A column: how a model is trained."""

    title: str
    asked: dict[str, str]
    lora: bool = False


WAYS = (
    Way("all of it, fp32 states", {}),
    Way("all of it, smallest states", {"states": "8bit-sr", "grads": "none"}),
    Way("LoRA", {}, lora=True),
)
HEAD = f"""# What fits

The table has the largest of Qwen2.5's models that a GPU and its host's memory train, and its tokens/s. The models are
0.5B, 1.5B, 3B, 7B, 14B, 32B and 72B. `mt.plan` predicts both; `make what-fits` writes this page. For any model and
machine ask `megatrain plan MODEL --machine rtx4090 --host 128GiB`. Rates of the H200 are measured. Those of the other
cards are from data sheets, so their tokens/s are estimates (`megatrain plan --list-machines`).

A step has {TOKENS:,} tokens in sequences of {SEQ:,}; weights are bf16. *fp32 states*: fp32 masters and moments,
gradients kept and clipped. *Smallest states*: `--states 8bit-sr --grads none`. Moments have 8 bits, weights are rounded
stochastically, gradients are used as they come, without clipping. *LoRA*: PEFT's adapters of rank
{RANK} on all matrices of the layers. With `--nvme` larger models fit, at the drive's rate.

"""


@functools.cache
def model(size: str, lora: bool) -> Any:
    """On the meta device."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, inter, heads, kv, layers, tied = MODELS[size]
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inter, num_attention_heads=heads, num_key_value_heads=kv,
        num_hidden_layers=layers, tie_word_embeddings=tied, vocab_size=151936 if tied else 152064,
        max_position_embeddings=32768, use_cache=False, dtype=torch.bfloat16)
    with torch.device("meta"):
        found = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
        if lora:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            found = get_peft_model(found, adapters, autocast_adapter_dtype=False)
    return found


@functools.cache
def shape(size: str, lora: bool, states: str) -> Any:
    from megatrain_torch.plans.shapes import shapes_of

    return shapes_of(model(size, lora))(states)


def cell(name: str, ram: int, way: Way) -> str:
    """The largest model that fits, and its tokens/s."""
    import megatrain_torch as mt
    from megatrain_torch.plans.machine import Machine
    from megatrain_torch.plans.search import Problem, Wishes

    machine = Machine.parse(f"{name},host={ram * SHARE:.2f}GiB")
    for size in MODELS:
        planned = Problem(shape(size, way.lora, way.asked.get("states", "fp32")), machine,
                          Wishes(TOKENS, SEQ, **{"lent": 1} | way.asked))
        if planned.fits():
            plan = mt.plan(model(size, way.lora), tokens=TOKENS, seq=SEQ, machine=machine, host=machine.host_bytes,
                           **way.asked)
            return f"{size}, {plan.tokens_per_second:,.0f}"
    return "none"


def row(gpu: str, vram: int, name: str, ram: int) -> str:
    """A line of the table."""
    return f"| {gpu}, {vram} GB | {ram} GiB | " + " | ".join(cell(name, ram, way) for way in WAYS) + " |"


def main() -> None:
    heads = ["GPU", "host memory", *(way.title for way in WAYS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for gpu, vram, name, rams in MACHINES:
        for ram in rams:
            lines.append(row(gpu, vram, name, ram))
            print(lines[-1], flush=True)
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
