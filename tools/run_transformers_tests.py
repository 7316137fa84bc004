#!/usr/bin/env python3
"""Runs transformers' own tests of its Trainer, plain and with every model streamed, and compares what became of each.

    python tools/run_transformers_tests.py CHECKOUT [-k EXPRESSION] [--files test_trainer.py ...]

CHECKOUT is transformers' source with its tests; the installed package is what they test, so the nearest version is
best. This file is also the plugin that pytest is given: under it `Trainer` streams the model that it is handed, or that
its `model_init` makes, to the CPU device, and does nothing else. What is on the Hub has a stand-in, in both runs: a
tokenizer of words, tiny models with random weights and some text, by the names that the tests ask for.

One JSON line per run and per test that came out otherwise, then a table. Exit status 1 if a test that passes plain does
not pass streamed.
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples/data/tinyshakespeare.txt"
FILES = ["test_trainer.py", "test_trainer_optimizers.py", "test_trainer_checkpointing.py", "test_trainer_evaluation.py",
         "test_trainer_data.py", "test_trainer_seq2seq.py"]
SETTINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": ""}
ROWS = {"passed": 0, "failed": 1, "skipped": 2}       # a test's phases: the worst outcome counts


# ---------------------------------------------------------------- the plugin

def pytest_configure(config: Any) -> None:
    config.streamed = {"models": 0, "windows": 0}
    _stand_in(Path(os.environ["STAND_INS"]))
    if os.environ["STREAMED"] == "1":
        _stream_all(config.streamed)


def pytest_runtest_logreport(report: Any) -> None:
    _outcomes.setdefault(report.nodeid.split("/")[-1], []).append((report.outcome, _reason(report)))


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        pytest_runtest_logreport(report)


def pytest_unconfigure(config: Any) -> None:
    Path(os.environ["OUTCOMES"]).write_text(json.dumps({"tests": _outcomes, "streamed": config.streamed}))


_outcomes: dict[str, list[tuple[str, str]]] = {}


def _reason(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr or "")[:400]


def _stream_all(count: dict[str, int]) -> None:
    """Trainer's models, and nothing else of it."""
    import transformers

    import megatrain_torch as mt
    from megatrain_torch.wrap import find_runtime

    def stream(model: Any) -> Any:
        if find_runtime(model) is None:
            mt.stream(model, device="cpu")
            count["models"] += 1
            count["windows"] += len(find_runtime(model).windows)
        return model

    own, made = transformers.Trainer.__init__, transformers.Trainer.call_model_init

    @functools.wraps(own)
    def init(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        own(self, stream(model) if model is not None else None, *args, **kwargs)

    @functools.wraps(made)
    def call_model_init(self: Any, trial: Any = None) -> Any:
        return stream(made(self, trial))

    transformers.Trainer.__init__, transformers.Trainer.call_model_init = init, call_model_init


# ---------------------------------------------------------------- what is on the Hub

def make_stand_ins(folder: Path) -> None:
    """A tokenizer of the text's words and one tiny model of each kind that is asked for, in `folder`."""
    import tokenizers as tk
    import torch
    import transformers as tf
    words = tk.Tokenizer(tk.models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    words.train([str(TEXT)], tk.trainers.WordLevelTrainer(vocab_size=500, special_tokens=special))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>",
                                           bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>")
    tokenizer.save_pretrained(folder / "tokenizer")
    small = dict(vocab_size=500, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 bos_token_id=2, eos_token_id=3, pad_token_id=1)
    torch.manual_seed(0)
    tf.LlamaForCausalLM(tf.LlamaConfig(**small, num_key_value_heads=2)).save_pretrained(folder / "llama")
    tf.Qwen2ForCausalLM(tf.Qwen2Config(**small, num_key_value_heads=2)).save_pretrained(folder / "qwen2")
    tf.BertForSequenceClassification(tf.BertConfig(**small)).save_pretrained(folder / "bert")


def _stand_in(folder: Path) -> None:
    """from_pretrained and load_dataset answer by name where a test would ask the Hub."""
    import datasets
    import transformers as tf
    for gone in ("GlueDataset", "GlueDataTrainingArguments"):       # of older versions, for a test that needs the Hub
        setattr(type(tf), gone, object)            # the tests make the module anew

    def named(name: str, auto: str) -> str:
        if os.path.exists(name):
            return name
        if auto == "AutoTokenizer":
            return str(folder / "tokenizer")
        return str(folder / next((kind for kind in ("qwen2", "bert") if kind in name.lower()), "llama"))

    for auto in ("AutoTokenizer", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        cls = getattr(tf, auto)
        own = cls.from_pretrained

        def from_pretrained(name: Any, *args: Any, _own: Any = own, _auto: str = auto, **kwargs: Any) -> Any:
            return _own(named(str(name), _auto), *args, **kwargs)

        cls.from_pretrained = staticmethod(from_pretrained)
    speeches = [" ".join(speech.split()) for speech in TEXT.read_text().split("\n\n")]
    rows = [s for s in speeches if s.count(" ") > 20][:200]
    load = datasets.load_dataset

    def load_dataset(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("text", "csv", "json"):            # files of the checkout
            return load(name, *args, **kwargs)
        return datasets.Dataset.from_dict({"text": rows})

    datasets.load_dataset = load_dataset


# ---------------------------------------------------------------- the two runs

def run(ask: argparse.Namespace, stand_ins: Path, streamed: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "outcomes.json"
        env = os.environ | SETTINGS | {"STREAMED": str(int(streamed)), "STAND_INS": str(stand_ins),
                                       "OUTCOMES": str(out)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tools"), str(ROOT), env.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider",
                   "--timeout", str(ask.timeout), "-W", "ignore", "--tb=short",
                   "--continue-on-collection-errors", *(["-k", ask.k] if ask.k else [])]
        done = subprocess.run(command + [f"tests/trainer/{f}" for f in ask.files], cwd=ask.checkout, env=env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if ask.log:
            (Path(ask.log) / f"{'streamed' if streamed else 'plain'}.log").write_text(done.stdout)
        if not out.exists():
            raise SystemExit(done.stdout[-4000:])
        found = json.loads(out.read_text())
    worst = {test: max(phases, key=lambda p: ROWS[p[0]]) for test, phases in found["tests"].items()}
    return {"tests": worst, "streamed": found["streamed"]}


def count(run: dict[str, Any]) -> dict[str, int]:
    outcomes = [outcome for outcome, _ in run["tests"].values()]
    return {kind: outcomes.count(kind) for kind in ROWS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("-k", default="", help="pytest's expression")
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("--log", help="folder for pytest's own output")
    ask = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_stand_ins(Path(folder))
        plain, streamed = (run(ask, Path(folder), s) for s in (False, True))
    for name, found in (("plain", plain), ("streamed", streamed)):
        print(json.dumps({"run": name, **count(found), **found["streamed"]}))
    lost = 0
    for test, (outcome, reason) in streamed["tests"].items():
        before, why = plain["tests"].get(test, ("missing", ""))
        lost += before == "passed" and outcome != "passed"
        if outcome == "failed" or outcome != before:
            print(json.dumps({"test": test, "plain": before, "streamed": outcome, "reason": reason or why}))
    print(f"\n{'':12}{'passed':>8}{'failed':>8}{'skipped':>9}")
    for name, found in (("plain", plain), ("streamed", streamed)):
        n = count(found)
        print(f"{name:12}{n['passed']:8}{n['failed']:8}{n['skipped']:9}")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
