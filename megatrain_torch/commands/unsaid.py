"""Settings of a run that were not said: what the machine, the model and the data have to do with them."""
from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from megatrain_torch import MegatrainError

from .settings import Settings

LEAST = {"kto": 2, "grpo": 8}        # records of a step: KTO compares them, GRPO answers of one prompt
STEPS_LEAST = 20                     # times through the data, where `tokens` is not said


def device_of(asked: str | None) -> str:
    """Raises: MegatrainError: CUDA is asked for, and is not there."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise MegatrainError("device=cuda: torch sees no CUDA device here; use --device cpu")
    return device


def for_machine(settings: Settings) -> Settings:
    device = device_of(settings.device)
    there = torch.cuda.device_count() if device == "cuda" else max(2, len(os.sched_getaffinity(0)))
    if settings.gpus > there:
        what = "CUDA devices" if device == "cuda" else "cores, with a process on each,"
        raise MegatrainError(f"gpus={settings.gpus}: there are {there} {what} here; --gpus {there} or fewer")
    if settings.nvme is not None and not Path(settings.nvme).is_dir():
        raise MegatrainError(f"nvme={settings.nvme}: there is no such directory; make one on the drive that is to hold "
                             "states")
    if device == "cpu":
        # Torch's threads spin while they wait for each other: one core is left to the engine's.
        torch.set_num_threads(max(1, (len(os.sched_getaffinity(0)) - 1) // settings.gpus))
    halves = device == "cuda" or settings.products == "fp8" or settings.base != "none"
    return settings.with_(device=device, dtype=settings.dtype or ("bfloat16" if halves else "float32"),
                          lr=settings.lr or (1e-5 if settings.lora is None else 2e-4))


def for_model(settings: Settings, config: Any) -> Settings:
    most = getattr(config, "max_position_embeddings", None) or settings.seq or 4096
    seq = settings.seq or min(4096 if settings.device == "cuda" else 256, most)
    if seq > most:
        raise MegatrainError(f"seq={seq}: the model was made for {most} positions at most; --seq {most} or less")
    return settings.with_(seq=seq)


def for_data(settings: Settings, there: int, sequences: int = 1) -> Settings:
    """Tokens of a step, how many steps, and what is done how often; there: rows of the data, or records of so many
    sequences each, which count as `seq` tokens."""
    s, seq = settings, settings.seq * sequences
    if s.tokens is None:
        usual = (65536 if s.device == "cuda" else 2048) // seq
        least = LEAST.get(s.method, 1)
        s = s.with_(tokens=max(least, min(usual, there // STEPS_LEAST) // s.gpus) * s.gpus * seq)
    if s.tokens % seq:
        raise MegatrainError(f"tokens={s.tokens}, seq={s.seq}: a step is a whole number of rows; "
                             f"nearest: tokens={max(1, round(s.tokens / seq)) * seq}")
    if s.tokens // seq > there and s.method != "grpo":
        raise MegatrainError(f"tokens={s.tokens}: the data has {there} rows of {seq} tokens; --tokens "
                             f"{there * seq} takes them all in one step, fewer make more steps")
    rows = s.tokens // seq
    if rows % s.gpus:
        raise MegatrainError(f"tokens={s.tokens}: {rows} rows of {s.seq} tokens cannot be divided among {s.gpus} GPUs; "
                             f"nearest: tokens={max(1, round(rows / s.gpus)) * s.gpus * seq}; or as many GPUs as "
                             f"{_divisors(rows)}")
    rows //= s.gpus
    if s.micro and rows % s.micro:
        each = "tokens / seq" if s.gpus == 1 else "tokens / seq / gpus"
        raise MegatrainError(f"micro={s.micro}: {rows} rows ({each}) cannot be cut into so many equal parts; "
                             f"{_divisors(rows)} can")
    steps = s.steps or math.ceil(s.epochs * there / (s.tokens // seq))
    eval_every = s.eval_every or max(1, steps // 10)
    # What is to be taken back has to be saved when it is evaluated.
    return s.with_(steps=steps, eval_every=eval_every, save_every=s.save_every or (
        eval_every if s.early_stopping else max(1, steps // 5)))


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def for_gpus(settings: Settings, gpus: int) -> Settings:
    """Settings of a run that goes on with so many GPUs: with as many micro-batches in all, where they can be had."""
    if gpus == settings.gpus:
        return settings
    micro, rest = divmod((settings.micro or 1) * settings.gpus, gpus)
    return settings.with_(gpus=gpus, micro=micro if micro and not rest else None)
