"""Stock trainers of the ecosystem, with stock arguments: a plain model against the same model streamed.

    python tests/run_dropin.py --device cpu             # fp32: losses, norms and weights bit for bit
    python tests/run_dropin.py --device cuda            # bf16: losses within the noise of rounding
    python tests/run_dropin.py --device cpu --only lora sft

transformers' Trainer, Accelerate, PEFT, TRL's SFTTrainer and Lightning run their own code; nothing of theirs is changed.
A check makes a model, trains it and notes losses, gradient norms and evaluation losses; it runs once plain, once
streamed. Streamed with torch's optimizer the CPU device must give the same bits. Checks whose name ends in "mt.AdamW"
compare that with torch's AdamW, which rounds elsewhere (docs/numerics.md): they have a bound instead.

On CUDA weights are bf16, and there are two questions. Does streaming change anything? Streamed with the model's own code
against a plain model whose norms are limited and whose optimizer steps on the host, as a streamed model's do (torch's
kernels for CUDA round elsewhere): "gap", at most GAP. Do fused layers, the default, lose anything? Plain and fused against
the same training in fp32: "plain" and "fused", the latter at most three times the former, or 2^-7, two units in the last
place of bf16. All are the largest relative difference of some thirty numbers, of a model of a few thousand weights.

One JSON line per check. Libraries that are not installed are left out, and said to be.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import parity
import torch
import transformers as tf
import zoo
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import megatrain_torch as mt

LR, EPS = 1e-2, 1e-4
# The exact change of a weight in a step is at most about LR; where its second moment is small against EPS, the last bits
# of a gradient move it by some 1e-3 of that (test_api.py). Ten steps.
ADAMW_BOUND = 1e-4
GAP = 1e-5           # losses and norms are sums in fp32, in an order that is not always the same
KINDS = {"cpu": ("plain", "streamed"), "cuda": ("plain", "host", "eager", "streamed", "truth")}
Made = tuple[list[float], dict[str, Tensor]]      # what was logged; weights at the end


class Case:
    """Makes the model of one run: one of KINDS."""

    def __init__(self, kind: str, device: str) -> None:
        self.kind, self.device = kind, device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.streamed = kind in ("streamed", "eager")

    def model(self, then: Callable[[nn.Module], nn.Module] = lambda m: m, **config: Any) -> nn.Module:
        parity.seed(7)
        config = {**zoo.DECODER, "attention_dropout": 0.1 if self.device == "cpu" else 0.0, **config}
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**config)).to(self.dtype)
        return self.wrap(then((model.float() if self.kind == "truth" else model).train()))

    def wrap(self, model: nn.Module) -> nn.Module:
        if not self.streamed:
            return model.to(self.device)
        if self.device == "cpu":                       # the smallest ring, poisoned slots
            return parity.stream_for_test(model)
        return mt.stream(model, self.device, compute="eager" if self.kind == "eager" else "auto")


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """Plain torch meanwhile limits norms and steps on the host; models are on the GPU otherwise."""
    places: dict[Tensor, torch.device] = {}

    def place(p: Tensor, device: torch.device) -> None:
        grad, p.grad = p.grad, None
        p.data = p.data.to(device)
        p.grad = None if grad is None else grad.to(device)

    def leave(params: list[Tensor], states: dict[Tensor, Any]) -> None:
        for p in params:
            if p.device.type != "cpu":
                places[p] = p.device
                place(p, torch.device("cpu"))
            for name, state in states.get(p, {}).items():          # what was loaded
                if isinstance(state, Tensor):
                    states[p][name] = state.cpu()

    def come_back() -> None:
        while places:
            place(*places.popitem())

    def clip(parameters: Any, *args: Any, **kw: Any) -> Tensor:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        leave(params, {})
        norm = torchs(params, *args, **kw)
        come_back()
        return norm

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:                                    # Lightning's is the whole training step
            with torch.enable_grad():
                loss = closure()
        leave([p for group in optimizer.param_groups for p in group["params"]], optimizer.state)
        return None if closure is None else (args[:1], {"closure": lambda: loss})

    torchs, nn.utils.clip_grad_norm_ = nn.utils.clip_grad_norm_, clip
    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(lambda *_: come_back())
    try:
        yield
    finally:
        nn.utils.clip_grad_norm_ = torchs
        for hook in hooks:
            hook.remove()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {k: torch.Tensor.detach(v).cpu().clone() for k, v in model.state_dict().items()}


class Rows(torch.utils.data.Dataset):
    """Sequences with prompts of several lengths, which do not count: micro-batches have unequal numbers of tokens."""

    def __init__(self, count: int = 40, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = zoo.tokens(zoo.generator(self.first + i), rows=1)[0]
        labels = ids.clone()
        labels[:i % 7] = -100
        return {"input_ids": ids, "labels": labels}


# ---------------------------------------------------------------- transformers' Trainer

def trainer(model: nn.Module, folder: Path, callbacks: Any = (), optimizers: Any = (None, None), **extra: Any
            ) -> tf.Trainer:
    settings = dict(output_dir=str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=4,
                    gradient_accumulation_steps=2, max_steps=10, learning_rate=LR, weight_decay=0.1, adam_epsilon=EPS,
                    max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=1, eval_strategy="steps",
                    eval_steps=5, save_strategy="no", seed=3, report_to=[], use_cpu=model.device.type == "cpu",
                    disable_tqdm=True, optim="adamw_torch", dataloader_pin_memory=False, bf16=False)
    return quiet(tf.Trainer(model=model, args=tf.TrainingArguments(**{**settings, **extra}), train_dataset=Rows(),
                            eval_dataset=Rows(8, 1000), callbacks=list(callbacks), optimizers=optimizers))


def quiet(t: tf.Trainer) -> tf.Trainer:
    t.remove_callback(tf.PrinterCallback)
    return t


def logged(t: tf.Trainer) -> list[float]:
    names = ["loss", "grad_norm", "learning_rate", "eval_loss", "entropy"]       # the last is TRL's, as is the next
    names += ["mean_token_accuracy"] * (t.args.device.type == "cpu")             # a count, which rounding can change
    return [float(e[k]) for e in t.state.log_history for k in names if k in e]


def train(**extra: Any) -> Callable[[Case, Path], Made]:
    def check(case: Case, folder: Path) -> Made:
        t = trainer(case.model(), folder, **extra)
        t.train()
        return logged(t), values(t.model)
    return check


def early_stopping(case: Case, folder: Path) -> Made:
    """Stops as the evaluation loss rises; the best checkpoint is loaded, and evaluated once more.

    On CUDA the rate is one at which it does not rise: where it stops would hang on the last bits.
    """
    t = trainer(case.model(), folder, [tf.EarlyStoppingCallback(early_stopping_patience=2)], max_steps=40,
                learning_rate=0.1 if case.device == "cpu" else LR, eval_steps=2, save_steps=2, save_strategy="steps", save_total_limit=2,
                load_best_model_at_end=True, metric_for_best_model="eval_loss")
    t.train()
    return [*logged(t), t.state.global_step, t.state.best_metric, t.evaluate()["eval_loss"]], values(t.model)


def resume(case: Case, folder: Path, first: Case | None = None) -> Made:
    """Five steps, and five more by another Trainer with another model, from its checkpoint. first: that is of another case."""
    args = dict(save_strategy="steps", save_steps=5)
    with on_the_host() if first is not None and case.kind == "eager" else contextlib.nullcontext():
        trainer((first or case).model(), folder, **args).train()
    t = trainer(case.model(), folder, **args)
    t.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    return logged(t), values(t.model)


def resume_elsewhere(case: Case, folder: Path) -> Made:
    """A plain run's checkpoint goes on streamed: what is in it is what a plain run would have written."""
    return resume(case, folder, Case("plain" if case.streamed else case.kind, case.device))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As Trainer makes them: no decay for norms and biases."""
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [{"params": [p for n, p in params if "norm" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in params if "norm" in n], "weight_decay": 0.0}]


def own_adamw(case: Case, folder: Path) -> Made:
    """optimizers=(mt.AdamW, None): scheduler and limit are Trainer's own."""
    model = case.model()
    opt = (mt.AdamW if case.streamed else torch.optim.AdamW)(groups(model), lr=LR, eps=EPS)
    t = trainer(model, folder, optimizers=(opt, None))
    t.train()
    return logged(t), values(model)


def own_adamw_resumed(case: Case, folder: Path) -> Made:
    """Interrupted (streamed) against uninterrupted (plain, in the sense of this file): both are streamed with mt.AdamW."""
    made = Case("streamed", case.device)
    for checkpoint in (None, str(folder / "checkpoint-5")) if case.streamed else (None,):
        model = made.model()
        opt = mt.AdamW(groups(model), lr=LR, eps=EPS)
        t = trainer(model, folder, optimizers=(opt, None), save_strategy="steps", save_steps=5)
        t.train(resume_from_checkpoint=checkpoint)
    return logged(t), values(model)


# ---------------------------------------------------------------- Accelerate

def accelerate(case: Case, folder: Path) -> Made:
    """prepare, accumulate, clip_grad_norm_, a scheduler, and save_state and load_state in the middle."""
    from accelerate import Accelerator
    seen: list[float] = []
    accelerator = Accelerator(cpu=case.device == "cpu", gradient_accumulation_steps=2)
    model = case.model()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    data = torch.utils.data.DataLoader(Rows(16), batch_size=2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
    model, opt, data, schedule = accelerator.prepare(model, opt, data, schedule)
    for epoch in range(3):
        if epoch == 1:
            accelerator.save_state(str(folder / "state"))
        if epoch == 2:                                 # the second epoch is forgotten
            accelerator.load_state(str(folder / "state"))
        for inputs in data:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                opt.step()
                schedule.step()
                opt.zero_grad()
            seen.append(loss.item())
    out = values(accelerator.unwrap_model(model))
    accelerator.free_memory()
    return seen, out


# ---------------------------------------------------------------- PEFT

class Int8Linear(nn.Linear):
    """A frozen weight in 8 bits with a scale for each row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        scale = layer.weight.detach().float().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight.detach().float() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * self.scale).to(x.dtype))


def adapter(bits: int = 16, **lora: Any) -> Callable[[nn.Module], nn.Module]:
    def attach(model: nn.Module) -> nn.Module:
        import peft
        for m in [m for m in model.modules() if bits == 8 and hasattr(m, "down_proj")]:
            m.up_proj, m.down_proj = Int8Linear(m.up_proj), Int8Linear(m.down_proj)
        config = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
        return peft.get_peft_model(model, peft.LoraConfig(**{**config, **lora}))
    return attach


def adapted(**lora: Any) -> Callable[[Case, Path], Made]:
    """Ten steps, and the last five again from the checkpoint, in which only the adapter is."""
    attach = adapter(**lora)

    def check(case: Case, folder: Path) -> Made:
        t = trainer(case.model(attach), folder, save_strategy="steps", save_steps=5)
        t.train()
        again = trainer(case.model(attach), folder, save_strategy="steps", save_steps=5)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
        return logged(t) + logged(again), {**values(t.model), **{f"{k} again": v for k, v in values(again.model).items()}}
    return check


# ---------------------------------------------------------------- TRL, Lightning

def sft(lora: bool = False, **extra: Any) -> Callable[[Case, Path], Made]:
    """TRL's SFTTrainer with prompts and completions in text, as its users have them."""
    def check(case: Case, folder: Path) -> Made:
        import datasets
        import tokenizers as tk
        from trl import SFTConfig, SFTTrainer
        datasets.disable_progress_bars()
        words = tk.Tokenizer(tk.models.WordLevel({f"w{i}": i for i in range(zoo.V)}, unk_token="w3"))
        words.pre_tokenizer = tk.pre_tokenizers.Whitespace()
        tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")
        rows = [" ".join(f"w{i}" for i in Rows()[n]["input_ids"].tolist()) for n in range(40)]
        data = datasets.Dataset.from_dict({"prompt": [r[:9] for r in rows], "completion": [r[9:] for r in rows]})
        args = dict(output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6,
                    learning_rate=LR, adam_epsilon=EPS, max_grad_norm=0.5, logging_steps=1, save_strategy="no", seed=3,
                    report_to=[], use_cpu=case.device == "cpu", disable_tqdm=True, optim="adamw_torch", bf16=False,
                    dataloader_pin_memory=False, max_length=24)
        model = case.model(adapter() if lora else lambda m: m, max_position_embeddings=256)
        t = quiet(SFTTrainer(model=model, args=SFTConfig(**{**args, **extra}), train_dataset=data,
                             processing_class=tokenizer))
        t.train()
        return logged(t), values(t.model)
    return check


def lightning(case: Case, folder: Path) -> Made:
    """Lightning's Trainer around a module that holds the streamed model; accumulation, clipping, a checkpoint."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = case.model(), []

        def training_step(self, inputs: dict[str, Tensor], _: int) -> Tensor:
            loss = self.model(**inputs).loss
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters(), lr=LR, eps=EPS)
            return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def trainer(epochs: int) -> pl.Trainer:
        return pl.Trainer(max_epochs=epochs, accelerator="cpu" if case.device == "cpu" else "gpu", devices=1,
                          accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
                          enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(folder))

    data = torch.utils.data.DataLoader(Rows(16), batch_size=2)
    first = trainer(1)
    module = Module()
    first.fit(module, data)
    first.save_checkpoint(folder / "epoch.ckpt")
    again = Module()
    trainer(2).fit(again, data, ckpt_path=folder / "epoch.ckpt", weights_only=False)
    return module.seen + again.seen, values(again.model)


CHECKS: dict[str, Callable[[Case, Path], Made]] = {
    "trainer": train(),
    "trainer, autocast": train(bf16=True),
    "trainer, recomputing": train(gradient_checkpointing=True),
    "trainer, not clipped": train(max_grad_norm=0.0, lr_scheduler_type="linear"),
    "trainer, label smoothing": train(label_smoothing_factor=0.1),
    "trainer, SGD": train(optim="sgd"),
    "trainer, Adafactor": train(optim="adafactor"),
    "trainer, plateau": train(lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="eval_loss",
                              lr_scheduler_kwargs={"patience": 0}, eval_steps=2),
    "trainer, early stopping, best model": early_stopping,
    "trainer, resumed": resume,
    "trainer, plain checkpoint resumed": resume_elsewhere,
    "trainer, mt.AdamW": own_adamw,
    "trainer, resumed mt.AdamW to its own bits": own_adamw_resumed,
    "accelerate": accelerate,
    "lora": adapted(),
    "dora": adapted(use_dora=True),
    "lora, 8 bits below": adapted(bits=8),
    "lora, head trained": adapted(modules_to_save=["lm_head"]),
    "sft": sft(),
    "sft, lora": sft(lora=True),
    "sft, packed": sft(packing=True, packing_strategy="wrapped"),
    "lightning": lightning,
}

CPU_ONLY = {"trainer, plateau"}       # its rates hang on whether a loss has sunk, be it by its last bit


# ---------------------------------------------------------------- comparing

def gap(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / max(abs(x), 1e-6) for x, y in zip(a, b, strict=True))


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a if a[k].numel())


def compare(name: str, device: str) -> dict[str, Any]:
    check, found = CHECKS[name], {}
    for kind in KINDS["cpu" if name.endswith("own bits") else device]:
        with tempfile.TemporaryDirectory() as folder, on_the_host() if kind == "host" else contextlib.nullcontext():
            parity.seed()
            found[kind] = check(Case(kind, device), Path(folder))
    (losses, weights), (others, reached) = (found["host"], found["eager"]) if "host" in found else found.values()
    if list(weights) != list(reached):
        return {"ok": False, "error": f"other names: {sorted(set(weights) ^ set(reached))[:4]}"}
    row = {"logged": len(losses), "first": losses[0], "last": losses[-1], "gap": gap(losses, others),
           "weights": far(weights, reached)}
    if name.endswith(" mt.AdamW"):
        row["ok"] = device != "cpu" or (row["gap"] <= ADAMW_BOUND and row["weights"] <= ADAMW_BOUND)
    elif "host" in found:
        row["ok"] = row["gap"] <= GAP
    else:
        row["ok"] = losses == others and all(torch.equal(weights[k], reached[k]) for k in weights)
    if "truth" in found:
        row["plain"], row["fused"] = (gap(found["truth"][0], found[kind][0]) for kind in ("plain", "streamed"))
        row["ok"] = row["ok"] and row["fused"] <= max(3 * row["plain"], 2 ** -7)
    row["ok"] = row["ok"] and all(map(math.isfinite, others))
    return row


def main() -> int:
    warnings.filterwarnings("ignore")
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ask.add_argument("--only", nargs="*", default=[""], help="checks whose name begins so")
    given = ask.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(given.device != "cpu", warn_only=True)
    rows = []
    left_out = CPU_ONLY if given.device != "cpu" else set()
    for name in [n for n in CHECKS if n.startswith(tuple(given.only)) and n not in left_out]:
        began = time.perf_counter()
        try:
            row = compare(name, given.device)
        except ModuleNotFoundError as e:         # another package that is not there; one of ours is a fault
            row = {"ok": not (e.name or "").startswith("megatrain_torch"), "left_out": str(e)}
        except Exception as e:
            row = {"ok": False, "error": f"{type(e).__name__}: {str(e)[:300]}"}
        rows.append({"check": name, **row, "seconds": round(time.perf_counter() - began, 1)})
        print(json.dumps(rows[-1]), flush=True)
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
