"""megatrain eval."""
from __future__ import annotations

import argparse
import math
from typing import Any

import torch

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from . import folder, lora, mixture
from .data import IGNORED, collate, packed, prompts_too_long, why_alone
from .say import say
from .settings import Settings, add_flags, given
from .train import say_alone, say_cut
from .unsaid import for_machine, for_model

TOGETHER = 8                         # rows: weights are streamed once for all of them


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="loss and perplexity of a model on data", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a run, a folder in Hugging Face format, or a name on the hub")
    parser.add_argument("data", nargs="+", metavar="DATA", help="as for train")
    add_flags(parser, ("column", "chat_template", "split", "seq", "device", "dtype", "vram", "host", "nvme"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    settings = Settings.of(given(args), "command line")
    run = folder.run_of(settings.model)
    if run is not None:                                          # rows as long as in training
        kind = settings.dtype or (None if run.lora is None else run.dtype)
        settings = settings.with_(seq=settings.seq or run.seq, dtype=kind)
    settings, source = for_machine(settings), folder.source_of(settings.model)
    lora.check_packages(source.adapter is not None, source.base)
    tokenizer = folder.load_tokenizer(source.words, settings.chat_template)
    settings = for_model(settings, folder.load_config(source.model))
    found = mixture.mixed(mixture.sources(settings, settings.data, tokenizer), settings.seed)
    said = ", ".join(settings.data)
    rows = packed(found, settings.seq, 0)
    if rows.targets == 0:
        if why := prompts_too_long(found, settings.seq):
            raise MegatrainError(f"{said}: {why}")
        raise MegatrainError(f"{said}: rows of {settings.seq} tokens have none to predict; --seq makes room")
    say_cut(rows.cut, settings.seq)
    model = folder.load(source, settings.dtype)
    if rows.shared and (why := why_alone(model, settings.seq, False)):
        packed_rows, rows = len(rows), packed(found, settings.seq, 0, alone=True)
        say_alone(why, packed_rows, len(rows))
    model = mt.stream(model.requires_grad_(False), settings.device, vram=settings.vram, host=settings.host,
                      nvme=settings.nvme)
    loss = mean_loss(model, rows)
    say(f"loss {loss:.4f} nats a token, perplexity {math.exp(min(loss, 700)):.4g}; {rows.targets:,} tokens in "
        f"{len(rows)} rows of {settings.seq}")


@torch.no_grad()
def mean_loss(model: Any, rows: Any) -> float:
    """Nats per predicted token."""
    model.eval()
    total = 0.0
    for first in range(0, len(rows), TOGETHER):
        some = [rows[i] for i in range(first, min(first + TOGETHER, len(rows)))]
        batch = {k: v.to(model.device) for k, v in collate(False)(some).items()}
        targets = int((batch["labels"][:, 1:] != IGNORED).sum())
        if targets:
            total += model(**batch, use_cache=False).loss.item() * targets
    return total / rows.targets
