"""Trainers of transformers and TRL around streamed models: what has to be done in which order."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .stream import stream


def stream_trainer(kind: Callable[..., Any], model: nn.Module, args: Any, *,
                   optimizer: Callable[[nn.Module], Optimizer] | None = None, stream_with: dict[str, Any] | None = None,
                   **kw: Any) -> Any:
    """A trainer whose model is streamed: `kind(model, args=args, **kw)`, ready for `trainer.train()`.

    The trainer comes first, since trainers of TRL put a head of their own on the model, or adapters; it does not move
    the plain model to the GPU. Then its model is streamed, and its reference model where it has one. The optimizer
    comes last, as it needs streamed parameters.

    Args:
        kind: transformers.Trainer, or a trainer of TRL.
        model: with its adapters, and not streamed.
        args: the trainer's arguments.
        optimizer: is given the streamed model; None: the trainer makes its own when it trains.
        stream_with: keyword arguments for `mt.stream`.
        kw: for the trainer, as `train_dataset`, `processing_class`, `peft_config`.

    Example:
        trainer = mt.stream_trainer(DPOTrainer, model, DPOConfig(folder, bf16=False), train_dataset=pairs,
                                    optimizer=lambda m: mt.AdamW(m.parameters(), lr=5e-7))
        trainer.train()
    """
    own = type(args)
    # A property of the class, which Trainer asks once: does the trainer move the model?
    args.__class__ = type(own.__name__, (own,), {"place_model_on_device": False})
    try:
        trainer = kind(model, args=args, **kw)
    finally:
        args.__class__ = own                         # a class that a checkpoint's pickle can name
    stream_with = {"device": args.device} | (stream_with or {})
    stream(trainer.model, **stream_with)
    if isinstance(reference := getattr(trainer, "ref_model", None), nn.Module):
        limits = {k: v for k, v in stream_with.items() if k in ("device", "vram", "host")}
        stream(reference.requires_grad_(False), **limits)
    if optimizer is not None:
        trainer.optimizer = optimizer(trainer.model)
    return trainer
