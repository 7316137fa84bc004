"""What users of transformers, Accelerate, PEFT, TRL and Lightning do in several processes, streamed and plain with
DistributedDataParallel: for Pool.call. Each gives, by name, what it saw."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import several
import torch
import zoo
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import megatrain_torch as mt

STEPS, ROWS = 10, 22
RATE = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}


class Rows(torch.utils.data.Dataset):
    """Of which a different number of tokens is learned; the last batch of two processes has fewer of them than others."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(4, 128, (12,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[: i % 7] = -100
        return {"input_ids": ids, "labels": labels}


def _model(lora: bool = False) -> nn.Module:
    """Made alike in all processes."""
    torch.manual_seed(0)
    made = several._case("wide").build()
    if not lora:
        return made
    from peft import LoraConfig, get_peft_model
    return get_peft_model(made, LoraConfig(r=4, target_modules="all-linear"))


@contextlib.contextmanager
def _given(model: nn.Module, streamed: bool) -> Iterator[nn.Module]:
    yield mt.stream(model, "cpu") if streamed else model
    if streamed:
        mt.unstream(model)


def _adamw(model: nn.Module, ours: bool) -> torch.optim.Optimizer:
    return (mt.AdamW if ours else torch.optim.AdamW)([p for p in model.parameters() if p.requires_grad], **RATE)


def _digest(model: nn.Module) -> list[str]:
    return [several.digest(p) for p in model.parameters()]


def _of_wrapper(wrapped: Any) -> dict[str, bool]:
    """Is it DistributedDataParallel, and does that do its work?"""
    return {"wrapped": isinstance(wrapped, DistributedDataParallel),
            "reduces": isinstance(wrapped.reducer, dist.Reducer)}


# ---- Trainer -------------------------------------------------------------------------------------

def trainer(rank: int, group: Any, streamed: bool, out: Path, *, lora: bool = False, stock: bool = False,
            resume: bool = False, **settings: Any) -> dict[str, Any]:
    """stock: with the optimizer that Trainer makes. resume: from checkpoint-5 in `out`."""
    import transformers
    with _given(_model(lora), streamed) as model:
        args = transformers.TrainingArguments(**{
            "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1,
            "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "save_strategy": "no", "use_cpu": True, "seed": 3,
            "report_to": [], "disable_tqdm": True, "learning_rate": RATE["lr"], "adam_epsilon": RATE["eps"],
            "weight_decay": RATE["weight_decay"], "optim": "adamw_torch", "dataloader_pin_memory": False,
            "lr_scheduler_type": "cosine", "warmup_steps": 2, "eval_steps": 5, "save_steps": 5, **settings})
        made = transformers.Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(),
                                    optimizers=(None if stock else _adamw(model, streamed), None))
        made.remove_callback(transformers.PrinterCallback)
        made.train(resume_from_checkpoint=str(out / "checkpoint-5") if resume else None)
        log = made.state.log_history
        return {"losses": [e["loss"] for e in log if "loss" in e], "norms": [e["grad_norm"] for e in log if "loss" in e],
                "evals": [e["eval_loss"] for e in log if "eval_loss" in e], "weights": _digest(model),
                "best": made.state.best_model_checkpoint, "device": str(model.device), **_of_wrapper(made.model_wrapped)}


def sft(rank: int, group: Any, streamed: bool, out: Path) -> dict[str, Any]:
    import datasets
    import pyarrow
    import trl
    from test_cli import bytes_tokenizer
    rows = [{k: v.tolist() for k, v in Rows()[i].items()} for i in range(ROWS)]
    tokenizer = bytes_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    with _given(_model(), streamed) as model:
        args = trl.SFTConfig(
            output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, max_grad_norm=0.5,
            save_strategy="no", use_cpu=True, bf16=False, seed=3, report_to=[], disable_tqdm=True, max_length=12,
            dataloader_pin_memory=False)
        table = datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="rows")
        made = trl.SFTTrainer(model, args, train_dataset=table, processing_class=tokenizer,
                              optimizers=(_adamw(model, streamed), None))
        made.train()
        log = [e for e in made.state.log_history if "loss" in e]
        return {"losses": [e["loss"] for e in log], "norms": [e["grad_norm"] for e in log], "weights": _digest(model),
                **_of_wrapper(made.model_wrapped)}


# ---- Accelerate ----------------------------------------------------------------------------------

def accelerate(rank: int, group: Any, streamed: bool, out: Path, stock: bool = False) -> dict[str, Any]:
    """An ordinary loop: accumulate, clip_grad_norm_ whose norm one process reads at once, gather_for_metrics; a state
    that is saved, trained over and loaded."""
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with _given(_model(), streamed) as model:
        loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
        wrapped, opt, loader = accelerator.prepare(model, _adamw(model, streamed and not stock), loader)

        def epoch() -> tuple[list[float], list[float]]:
            losses, norms = [], []
            for batch in loader:
                with accelerator.accumulate(wrapped):
                    loss = wrapped(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
                        if rank == 0:
                            norm.item()
                    opt.step()
                    opt.zero_grad()
                    if accelerator.sync_gradients:
                        norms.append(float(norm))
                losses.append(accelerator.gather_for_metrics(loss.detach()[None]).mean().item())
            return losses, norms

        first = epoch()
        accelerator.save_state(str(out))
        second = epoch()
        accelerator.load_state(str(out))
        again = epoch()
        found = {"losses": first[0] + second[0], "norms": first[1] + second[1], "again": again == second,
                 "weights": _digest(model), "same": accelerator.unwrap_model(wrapped) is model, **_of_wrapper(wrapped)}
    accelerator.free_memory()
    return found


# ---- Lightning -----------------------------------------------------------------------------------

class Module(nn.Module):
    """What a LightningModule is to its strategy: a module around the model, with a training step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


def lightning(rank: int, group: Any, streamed: bool) -> dict[str, Any]:
    """As lightning.pytorch's DDPStrategy drives a module: training_step in the place of its forward, `no_sync` around all
    but the last micro-batch, and the reducer told before a backward (strategies/ddp.py, strategies/strategy.py)."""
    with _given(_model(), streamed) as model:
        module = Module(model)
        wrapped = DistributedDataParallel(module, device_ids=None, process_group=group, find_unused_parameters=True)
        opt = _adamw(model, streamed)
        loader = torch.utils.data.DataLoader(Rows(), batch_size=2, sampler=torch.utils.data.DistributedSampler(
            Rows(), 2, rank, shuffle=False))
        losses = []
        for i, batch in enumerate(loader):
            with contextlib.nullcontext() if i % 2 else wrapped.no_sync():
                wrapped.require_backward_grad_sync = bool(i % 2)
                forward, module.forward = module.forward, module.training_step
                loss = wrapped(batch)
                module.forward = forward
                if i % 2:
                    wrapped.reducer._rebuild_buckets()
                    wrapped.reducer.prepare_for_backward([loss])
                (loss / 2).backward()
            losses.append(loss.item())
            if i % 2:
                opt.step()
                opt.zero_grad()
        assert not wrapped.static_graph and isinstance(wrapped._get_ddp_logging_data(), dict)        # as it ends
        return {"losses": losses, "weights": _digest(model), **_of_wrapper(wrapped)}


# ---- DistributedDataParallel itself --------------------------------------------------------------

def buffers(rank: int, group: Any, streamed: bool) -> dict[str, Any]:
    """Running statistics, which are the first rank's before each forward."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with _given(own, streamed) as model:
        wrapped, losses = DistributedDataParallel(model, process_group=group), []
        opt = _adamw(model, streamed)
        for step in range(4):
            loss = wrapped(torch.randn(5, 6, generator=torch.Generator().manual_seed(2 * step + rank))).square().mean()
            zoo.update(loss, opt)
            losses.append(loss.item())
        with torch.no_grad():
            wrapped.eval()(torch.zeros(1, 6))
        return {"losses": losses, "stats": [b.tolist() for b in model.buffers()], **_of_wrapper(wrapped)}


def streamed_alone(rank: int, group: Any) -> list[str]:
    """In a group of one DistributedDataParallel has nothing to do; in one of two it would."""
    own = dist.new_group([rank], use_local_synchronization=True)
    model, said = mt.stream(_model(), "cpu", group=own), []
    DistributedDataParallel(model, process_group=own)(**torch.utils.data.default_collate([Rows()[1]])).loss.backward()
    try:
        DistributedDataParallel(model, process_group=group)
    except RuntimeError as why:
        said.append(str(why))
    mt.unstream(model)
    return said


def refused(rank: int, group: Any) -> list[str]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.join import Join
    said = []
    with _given(_model(), True) as model:
        wrapped = DistributedDataParallel(model, process_group=group)
        for ask in (lambda: wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook),
                    lambda: Join([wrapped])):
            try:
                ask()
            except RuntimeError as why:
                said.append(str(why))
    return said


# ---- weights in the script's own arithmetic ------------------------------------------------------

def own_arithmetic(rank: int, group: Any, streamed: bool) -> dict[str, Any]:
    """The head multiplied outside of its module, as TRL does it, and weights in a penalty; of one, a view."""
    losses = []
    with _given(_model(), streamed) as model:
        wrapped = DistributedDataParallel(model.model, process_group=group)
        head = model.lm_head.weight
        opt = _adamw(model, streamed)
        for step in range(4):
            row = Rows()[2 * step + rank]
            hidden = wrapped(row["input_ids"][None]).last_hidden_state[0, :-1]
            loss = nn.functional.cross_entropy(hidden @ head.t(), row["input_ids"][1:])
            loss = loss + 0.01 * (1 + rank) * model.model.norm.weight.square().sum()
            loss.backward()
            if not streamed:                             # which DistributedDataParallel does not see
                for p in (head,):
                    dist.all_reduce(p.grad, group=group)
                    p.grad /= 2
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, "weights": _digest(model), **_of_wrapper(wrapped)}
