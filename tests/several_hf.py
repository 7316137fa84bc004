"""transformers' Trainer and Accelerate in several processes, streamed and with DistributedDataParallel: for Pool.call."""
from __future__ import annotations

import tempfile
from typing import Any

import several
import torch
from torch import Tensor, nn

STEPS, ROWS = 10, 48


class Rows(torch.utils.data.Dataset):
    """Of different lengths, the labels of which differ in number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(4, 128, (12,), generator=g)
        labels = ids.clone()
        labels[: i % 7] = -100
        return {"input_ids": ids, "labels": labels}


def _model() -> nn.Module:
    return several._case("wide").build()


def trainer(rank: int, group: Any, streamed: bool, accumulate: int = 1) -> dict[str, Any]:
    """Losses and norms that Trainer logs, and those of an evaluation."""
    import transformers

    import megatrain_torch as mt
    model = mt.stream(_model(), "cpu") if streamed else _model()
    with tempfile.TemporaryDirectory() as out:
        args = transformers.TrainingArguments(
            out, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, use_cpu=True,
            gradient_accumulation_steps=accumulate, max_grad_norm=0.5, lr_scheduler_type="constant", save_steps=5,
            save_strategy="steps", report_to=[], disable_tqdm=True, weight_decay=0.01, seed=3, eval_strategy="no")
        kind = mt.AdamW if streamed else torch.optim.AdamW
        opt = kind(model.parameters(), lr=1e-2, weight_decay=0.01)
        made = transformers.Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(), optimizers=(opt, None))
        made.train()
        log = [entry for entry in made.state.log_history if "loss" in entry]
        found = {"losses": [e["loss"] for e in log], "norms": [e["grad_norm"] for e in log],
                 "eval": made.evaluate()["eval_loss"], "weights": _digest(model)}
    if streamed:
        mt.unstream(model)
    return found


def accelerate(rank: int, group: Any, streamed: bool) -> dict[str, Any]:
    """An ordinary loop with accelerator.prepare, accumulate and clip_grad_norm_."""
    from accelerate import Accelerator

    import megatrain_torch as mt
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mt.stream(_model(), "cpu") if streamed else _model()
    opt = (mt.AdamW if streamed else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
    wrapped, opt, loader = accelerator.prepare(model, opt, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    found = {"losses": losses, "weights": _digest(accelerator.unwrap_model(wrapped)),
             "same": accelerator.unwrap_model(wrapped) is model}
    if streamed:
        mt.unstream(model)
    return found


def _digest(model: nn.Module) -> list[str]:
    return [several.digest(p) for p in model.parameters()]
