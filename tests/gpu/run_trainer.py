"""Stock HF Trainer, generate and LoRA on CUDA: a plain model on the GPU against the same model streamed to it.

    python tests/gpu/run_trainer.py [--device cuda]

fp32 weights, TF32 off, deterministic algorithms; one JSON line per check. Trainer's optimizer runs on
the host for the streamed model and on the GPU for the plain one, which rounds in other places (fused
multiply-add), so losses of later steps are compared within 1e-4 relative; the first within 1e-6.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import parity  # noqa: E402
import torch  # noqa: E402
import transformers as tf  # noqa: E402
from situations import llama, text  # noqa: E402
from torch import nn  # noqa: E402

import megatrain_torch as mt  # noqa: E402


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = text(i)["input_ids"][0]
        return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, device: str, folder: str, **extra: Any) -> Any:
    settings = dict(output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=10,
                    learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=1,
                    logging_steps=1, save_steps=5, seed=3, report_to=[], use_cpu=device == "cpu", disable_tqdm=True,
                    optim="adamw_torch", dataloader_pin_memory=False)
    t = tf.Trainer(model=model, args=tf.TrainingArguments(**{**settings, **extra}), train_dataset=Rows(),
                   eval_dataset=Rows())
    t.train()
    return t


def losses(t: Any) -> list[float]:
    return [e["loss"] for e in t.state.log_history if "loss" in e] + [t.evaluate()["eval_loss"]]


def close(a: list[float], b: list[float]) -> dict[str, Any]:
    worst = max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
    ok = abs(a[0] - b[0]) <= 1e-6 * abs(a[0]) and worst <= 1e-4
    return {"ok": ok, "first": [a[0], b[0]], "last": [a[-1], b[-1]], "worst_relative": worst}


def trainer(device: str, **kw: Any) -> dict[str, Any]:
    found = []
    for wrap in (lambda m: m.to(device), lambda m: mt.stream(m, device)):
        parity.seed()
        with tempfile.TemporaryDirectory() as folder:
            found.append(losses(train(wrap(llama(attention_dropout=0.1)), device, folder, **kw)))
    return close(*found)


def resumed(device: str) -> dict[str, Any]:
    """A run resumed from its checkpoint ends with the bits of the uninterrupted one."""
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        for resume in (None, f"{folder}/checkpoint-5"):
            parity.seed()
            model = mt.stream(llama(), device)
            args = dict(output_dir=folder, per_device_train_batch_size=2, max_steps=10, learning_rate=1e-3, save_steps=5,
                        logging_steps=1, seed=3, report_to=[], use_cpu=device == "cpu", disable_tqdm=True,
                        optim="adamw_torch", dataloader_pin_memory=False)
            t = tf.Trainer(model=model, args=tf.TrainingArguments(**args), train_dataset=Rows())
            t.train(resume_from_checkpoint=resume)
            ends.append([p.detach().clone() for p in model.parameters()])
    return {"ok": all(torch.equal(a, b) for a, b in zip(*ends, strict=True))}


def generated(device: str) -> dict[str, Any]:
    found = []
    for wrap in (lambda m: m.to(device), lambda m: mt.stream(m, device)):
        parity.seed()
        model = wrap(llama()).eval()
        ids = text(0)["input_ids"].to(model.device)
        plain = model.generate(ids, max_new_tokens=8, do_sample=False)
        torch.manual_seed(5)
        found.append((plain.cpu(), model.generate(ids, max_new_tokens=8, do_sample=True).cpu(),
                      model.generate(ids, max_new_tokens=6, num_beams=3).cpu(), str(model.device)))
    (a, b, c, d), (e, f, g, h) = found
    return {"ok": torch.equal(a, e) and torch.equal(b, f) and torch.equal(c, g) and d == h, "device": h}


def lora(device: str) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    found = []
    for wrap in (lambda m: m.to(device), lambda m: mt.stream(m, device)):
        parity.seed()
        model = wrap(get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])))
        with tempfile.TemporaryDirectory() as folder:
            found.append(losses(train(model, device, folder)))
    return close(*found)


def main() -> int:
    warnings.filterwarnings("ignore")
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = ask.parse_args().device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "trainer": lambda: trainer(device),
        "trainer, gradient checkpointing": lambda: trainer(device, gradient_checkpointing=True),
        "resume": lambda: resumed(device),
        "generate": lambda: generated(device),
        "lora": lambda: lora(device),
    }
    bad = 0
    for name, check in checks.items():
        began = time.perf_counter()
        try:
            row = check()
        except Exception as e:
            row = {"ok": False, "error": f"{type(e).__name__}: {str(e)[:300]}"}
        bad += not row["ok"]
        print(json.dumps({"check": name, **row, "seconds": round(time.perf_counter() - began, 1)}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
