#!/usr/bin/env python3
"""Runs transformers' own tests of its Trainer, and Accelerate's of its Accelerator, plain and with models streamed.

    python tools/run_transformers_tests.py CHECKOUT [-k EXPRESSION] [--files FILE ...] [--known FILE.json] [--page]

CHECKOUT is transformers' or Accelerate's source with its tests; the installed package is what they test, so the nearest
version is best. This file is also the plugin that pytest is given. Under it a Trainer streams the model that it is
handed, or that its `model_init` makes, to the CPU device, and an Accelerator each model that it prepares; nothing else
is changed. A third run gives Trainer `mt.AdamW` wherever it would make torch's AdamW. What is on the Hub has a
stand-in, in all runs: a tokenizer of words, tiny models with random weights and some text, by the names that the tests
ask for. Tests that are marked as needing an accelerator are tried on the CPU too. A Llama whose test leaves its MLP at
the default, 11,008 wide, has one of 64.

`--known` keeps what was found, so that a run can be made in parts; `--page` then writes docs/trainer-tests.md from it.
One JSON line per test that came out otherwise than plain, then a table. Exit status 1 if a test fails, or comes out
otherwise than plain, and `trainer_page.py` has no reason for it.
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples/data/tinyshakespeare.txt"
PAGE = ROOT / "docs/trainer-tests.md"
FILES = {
    "transformers": [f"trainer/test_trainer{part}.py" for part in
                     ("", "_accelerator", "_callback", "_checkpointing", "_data", "_evaluation", "_hyperparameter",
                      "_optimizers", "_seq2seq")] + ["optimization/test_optimization.py",
                                                     "optimization/test_greedy_lr.py"],
    "accelerate": ["test_accelerator.py", "test_grad_sync.py", "test_optimizer.py", "test_scheduler.py",
                   "test_state_checkpointing.py"]}
RUNS = {"plain": "0", "streamed": "1", "mt.AdamW": "2"}           # the name of a run and its STREAMED
SETTINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": ""}
ROWS = {"passed": 0, "failed": 1, "skipped": 2}       # a test's phases: the worst outcome counts

Stream = Callable[[Any], Any]


# ---------------------------------------------------------------- the plugin

def pytest_configure(config: Any) -> None:
    if os.environ["LIBRARY"] == "transformers":
        _stand_in(Path(os.environ["STAND_INS"]))
        _try_on_cpu()
        _narrow_llamas()
    if os.environ["STREAMED"] == "0":
        return
    (_stream_trainers if os.environ["LIBRARY"] == "transformers" else _stream_accelerators)(_streamer())
    if os.environ["STREAMED"] == "2":
        _give_adamw()


def pytest_runtest_logreport(report: Any) -> None:
    _outcomes.setdefault(report.nodeid.split("/")[-1], []).append((report.outcome, _reason(report)))


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        pytest_runtest_logreport(report)


def pytest_unconfigure(config: Any) -> None:
    Path(os.environ["OUTCOMES"]).write_text(json.dumps(_outcomes))


_outcomes: dict[str, list[tuple[str, str]]] = {}


def _reason(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message)[:400] if crash else str(report.longrepr or "")[-400:]     # the error is at its end


def _streamer() -> Stream:
    """What streams a model and notes it, by the test that runs: a line of a file, which children write too."""
    import megatrain_torch as mt
    from megatrain_torch.model.runtime import find_runtime

    def stream(model: Any) -> Any:
        if find_runtime(model) is None:
            mt.stream(model, device="cpu")
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0].split("/")[-1]
            with open(os.environ["MODELS"], "a") as models:
                models.write(f"{test}\n")
        return model

    return stream


def _stream_trainers(stream: Stream) -> None:
    """Trainer's models, and nothing else of it."""
    import transformers
    own, made = transformers.Trainer.__init__, transformers.Trainer.call_model_init

    @functools.wraps(own)
    def init(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        own(self, stream(model) if model is not None else None, *args, **kwargs)

    @functools.wraps(made)
    def call_model_init(self: Any, trial: Any = None) -> Any:
        return stream(made(self, trial))

    transformers.Trainer.__init__, transformers.Trainer.call_model_init = init, call_model_init


def _stream_accelerators(stream: Stream) -> None:
    """What Accelerator.prepare is given as a model; its optimizer may have been made before."""
    import accelerate
    import torch
    own = accelerate.Accelerator.prepare

    @functools.wraps(own)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *(stream(a) if isinstance(a, torch.nn.Module) else a for a in args), **kwargs)

    accelerate.Accelerator.prepare = prepare


def _give_adamw() -> None:
    """mt.AdamW where Trainer would make torch's for a streamed model, with the same arguments."""
    import torch
    import transformers

    import megatrain_torch as mt
    own = transformers.Trainer.get_optimizer_cls_and_kwargs

    @functools.wraps(own)
    def choose(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        cls, kwargs = own(args, model)
        if cls is torch.optim.AdamW:
            return mt.AdamW, {k: v for k, v in kwargs.items() if k != "fused"}
        return cls, kwargs

    transformers.Trainer.get_optimizer_cls_and_kwargs = staticmethod(choose)


# ---------------------------------------------------------------- what is on the Hub, and what needs a GPU

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


def _try_on_cpu() -> None:
    """Most tests marked so train a tiny model with some optimizer; what the CPU cannot do fails plain too."""
    from transformers import testing_utils

    def as_it_is(test: Any) -> Any:
        return test

    testing_utils.require_torch_accelerator = as_it_is


def _narrow_llamas() -> None:
    """Tests that say a tiny Llama's hidden size and layers leave its MLP at 7B's: most of the time would go there."""
    import transformers
    own = transformers.LlamaConfig.__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **({"intermediate_size": 64} | kwargs))

    transformers.LlamaConfig.__init__ = init


# ---------------------------------------------------------------- the runs

def run(ask: argparse.Namespace, library: str, files: list[str], stand_ins: Path, name: str) -> dict[str, Any]:
    """The files' tests, in one process: outcome, reason and number of streamed models by test."""
    with tempfile.TemporaryDirectory() as scratch:
        out, models = Path(scratch) / "outcomes.json", Path(scratch) / "models"
        models.touch()
        env = os.environ | SETTINGS | {"STREAMED": RUNS[name], "LIBRARY": library, "STAND_INS": str(stand_ins),
                                       "OUTCOMES": str(out), "MODELS": str(models)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tools"), str(ROOT), env.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider",
                   "--timeout", str(ask.timeout), "-W", "ignore", "--tb=short",
                   "--continue-on-collection-errors", *(["-k", ask.k] if ask.k else []),
                   *(f"tests/{file}" for file in files)]
        done = subprocess.run(command, cwd=ask.checkout, env=env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if ask.log:
            (Path(ask.log) / f"{Path(files[0]).stem}-{name}.log").write_text(done.stdout)
        if not out.exists():
            raise SystemExit(done.stdout[-4000:])
        streamed = models.read_text().splitlines()
        worst = {test: max(phases, key=lambda p: ROWS[p[0]]) for test, phases in json.loads(out.read_text()).items()}
    return {test: [outcome, reason, streamed.count(test)] for test, (outcome, reason) in worst.items()}


def run_all(ask: argparse.Namespace, known: dict[str, Any]) -> None:
    """All files of a checkout, plain, then streamed; what is found goes into `known`."""
    library = next((kind for kind in FILES if (ask.checkout / f"tests/{FILES[kind][0]}").exists()), None)
    if library is None:
        raise SystemExit(f"{ask.checkout}/tests has neither {' nor '.join(FILES[kind][0] for kind in FILES)}: "
                         "give a checkout of transformers or of accelerate")
    if ask.version:
        known.setdefault("sources", {})[library] = ask.version
    names = [name for name in RUNS if library == "transformers" or name != "mt.AdamW"]
    with tempfile.TemporaryDirectory() as folder:
        if library == "transformers":
            make_stand_ins(Path(folder))
        files = ask.files or FILES[library]
        found = {name: run(ask, library, files, Path(folder), name) for name in names}
    for test in dict.fromkeys(t for name in names for t in found[name]):
        row = {name: found[name].get(test, ["missing", "", 0]) for name in names}
        file = next(file for file in files if Path(file).name == test.split("::")[0])
        known.setdefault(library, {}).setdefault(file, {})[test] = row
        if any(row[name][0] != row["plain"][0] for name in names):
            print(json.dumps({"test": test, **row}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="without one, only --page")
    parser.add_argument("-k", default="", help="pytest's expression")
    parser.add_argument("--files", nargs="*", help="in the checkout's tests/; default: those that concern training")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("--log", help="folder for pytest's own output")
    parser.add_argument("--known", type=Path, help="JSON file of what was found; added to")
    parser.add_argument("--version", help="of the checkout, for the page")
    parser.add_argument("--page", action="store_true", help="write docs/trainer-tests.md")
    ask = parser.parse_args()
    known = json.loads(ask.known.read_text()) if ask.known and ask.known.exists() else {}
    if ask.checkout:
        run_all(ask, known)
        known["versions"] = trainer_page.versions()
    if ask.known:
        ask.known.write_text(json.dumps(known, indent=1))
    if ask.page:
        PAGE.write_text(trainer_page.page(known))
    print(trainer_page.totals(known))
    return 1 if trainer_page.unexplained(known) else 0


if __name__ == "__main__":
    import trainer_page
    raise SystemExit(main())
