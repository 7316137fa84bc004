"""What a training run is asked for: flags and YAML make the same Settings.

The same table makes docs/cli.md (tools/cli_page.py).
"""
from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from ..base.limits import parse_bytes
from ..base.modes import FORMATS, PRODUCTS, SHOWN
from ..store.bases import BASES
from .lora import AS, as_words
from .owned import replace

METHODS = ("sft", "dpo", "kto", "orpo", "reward", "grpo")
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt",
             "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")
REPORTS = ("none", "tensorboard", "wandb")
KEPT = ("none", *BASES)                  # how weights beside which adapters train are kept
# Trainer's names for the same, which may be written as well.
SAME = {"learning_rate": "lr", "max_steps": "steps", "num_train_epochs": "epochs", "output_dir": "out",
        "max_length": "seq", "max_grad_norm": "clip", "save_steps": "save_every", "eval_steps": "eval_every",
        "logging_steps": "log_every", "save_total_limit": "keep", "lr_scheduler_type": "schedule",
        "adam_beta2": "beta2", "gradient_accumulation_steps": "micro"}
# What others call a setting, for messages.
ALSO = {"batch_size": "tokens", "per_device_train_batch_size": "tokens", "dataset": "data", "model_name": "model",
        "warmup_ratio": "warmup", "text_column": "column", "val_split": "validation"}


# Of the command line, for those verbs that have it.
DATA = ("text, .jsonl, .json, .csv, .tsv or .parquet, a folder of such, or a name on the hub; of several each may have "
        "a weight: a.jsonl:0.9 b.csv:0.1")


def _words(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not found or not all(isinstance(word, str) and word for word in found):
        raise ValueError
    return found


def _share(value: Any) -> float | str:
    """A number, or the name of a file."""
    try:
        return float(value)
    except ValueError:
        if not value:
            raise
        return str(value)


KINDS = {int: ("a whole number", "N"), float: ("a number", "X"), str: ("a word", "WORD"),
         _words: ("a word, or a list of words", "DATA"), _share: ("a number, or a file", "SHARE|DATA"),
         as_words: (f"words such as {AS}", AS)}


def _setting(default: Any, kind: Any, text: str, choices: Iterable[str] = (), shown: str = "",
             taken: Iterable[str] = ()) -> Any:
    """taken: of words, where more are taken than the choices that are shown."""
    choices = tuple(choices)
    return field(default=default, metadata={"kind": kind, "text": text, "choices": choices,
                                            "taken": tuple(taken) or choices, "shown": shown or KINDS[kind][1]})


@dataclass(frozen=True)
class Settings:
    """Of a run. None: chosen when model, data and machine are known; config.yaml of the run has what was chosen.
    more: by names of TRL's arguments, for TRL."""

    model: str = _setting(None, str, "folder of a model in Hugging Face format, or its name on the hub", shown="MODEL")
    data: tuple[str, ...] = _setting(None, _words, DATA)
    out: str = _setting(None, str, "the run's folder; default: runs/ and the model's name", shown="FOLDER")

    method: str = _setting("sft", str, "of training: on texts and answers; on preferences; on rewards (docs/cli.md has "
                           "the records of each)", METHODS)
    reward: str = _setting(None, str, "with grpo: FILE.py:FUNCTION, or a reward model", shown="WHAT")
    lora: str = _setting(None, as_words, "train adapters of rank r, and nothing else; alpha: twice r; targets: all, or "
                         "names of linear layers; dropout=X")
    base: str = _setting("none", str, "with lora, the model's linear weights as codes of 4 or 8 bits, made or kept "
                         "while they are read", KEPT)

    column: str = _setting(None, str, "of records, the field to train on; default: by what they have: messages, prompt "
                           "with completion, instruction with output, question with answer, or text", shown="FIELD")
    chat_template: str = _setting(None, str, "a file with a template for conversations, in the place of the "
                                  "tokenizer's", shown="FILE")
    split: str = _setting("train", str, "of a data set on the hub", shown="NAME")
    validation: float | str = _setting(0.02, _share, "share of the tokens that is held out, from the end; or data of "
                                       "its own, read as the data is")
    seq: int = _setting(None, int, "tokens of a row; default: 4096, on the CPU 256, and at most what the model takes")

    tokens: int = _setting(None, int, "of a step; default: 65536, on the CPU 2048, and at most a twentieth of the data")
    micro: int = _setting(None, int, "micro-batches that a step is cut into; default: the plan's, on the CPU 1")
    epochs: float = _setting(1.0, float, "times through the data")
    steps: int = _setting(None, int, "instead of epochs")
    lr: float = _setting(None, float, "highest learning rate; default: 1e-5, with lora 2e-4")
    schedule: str = _setting("cosine", str, "of the learning rate", SCHEDULES)
    warmup: float = _setting(0.03, float, "share of the steps in which the learning rate rises")
    weight_decay: float = _setting(0.0, float, "of AdamW")
    beta2: float = _setting(0.95, float, "of AdamW")
    clip: float = _setting(1.0, float, "highest norm of a step's gradients; 0: any")
    seed: int = _setting(0, int, "of the order of the data and of dropout")

    device: str = _setting(None, str, "cuda or cpu; default: cuda if there is one", ("cuda", "cpu"))
    dtype: str = _setting(None, str, "of the weights; default: bfloat16, on the CPU float32, but "
                          "bfloat16 with products=fp8 or a base of codes",
                          ("bfloat16", "float32"))
    states: str = _setting("fp32", str, "how AdamW keeps its states", SHOWN, taken=FORMATS)
    products: str = _setting("bf16", str, "of layers; fp8: of operands rounded to 8 bits, which a GPU must have",
                             PRODUCTS)
    gpus: int = _setting(1, int, "of this machine, with a process for each; all share one copy of the model")
    vram: str = _setting(None, str, "limit of device memory, of each GPU, e.g. 24GiB", shown="SIZE")
    host: str = _setting(None, str, "limit of host memory, of all processes together", shown="SIZE")
    nvme: str = _setting(None, str, "folder for states, weights and activations that host memory does not hold",
                         shown="FOLDER")

    log_every: int = _setting(1, int, "steps between two lines of log.jsonl")
    eval_every: int = _setting(None, int, "steps between two looks at what is held out; default: a tenth of the run")
    save_every: int = _setting(None, int, "steps between two checkpoints; default: a fifth of the run")
    early_stopping: int = _setting(None, int, "end after so many evaluations in a row that are no better than the "
                                   "best, and take the best one's weights")
    keep: int = _setting(2, int, "checkpoints that stay; older ones are removed")
    report_to: str = _setting("none", str, "who else is told", REPORTS)
    push_to_hub: str = _setting(None, str, "at the end, put the model on the hub by this name", shown="NAME")
    more: dict[str, Any] = field(default_factory=dict, metadata={"kind": dict})

    @staticmethod
    def of(values: Mapping[str, Any], where: str) -> Settings:
        """Settings from names and values, checked. where: for messages.

        Raises:
            MegatrainError: a name is not known, or a value is not of its kind or out of its range.
        """
        known, values, more = {f.name: f for f in _shown()}, dict(values), {}
        for name in list(values):
            if (own := SAME.get(name)) and own not in values:
                values[own] = values.pop(name)
            elif name in ALSO or name in SAME:
                raise MegatrainError(f"{where}: {unknown(name, known)}")
            elif name not in known:
                more[name] = values.pop(name)
        found = {name: _of_kind(known[name], value, where) for name, value in values.items()}
        return _ranges(Settings(**found, more=more))

    def with_(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)


def _shown() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(Settings) if f.name != "more"]


def unknown(name: str, known: Iterable[str]) -> str:
    """Words for a setting or a flag that is none, with the nearest that is one."""
    names = {n.strip("-").replace("-", "_"): n for n in known}
    others = {other: names[own] for other, own in (ALSO | SAME).items() if own in names}
    near = difflib.get_close_matches(name.strip("-").replace("-", "_"), [*names, *others], 1, 0.5)
    return f"there is no {name!r}" + (f"; did you mean {(names | others)[near[0]]!r}?" if near
                                      else f"; known: {', '.join(known)}")


def _of_kind(f: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """YAML reads 1e-5 as a word: numbers may come as words."""
    kind, choices = f.metadata["kind"], f.metadata["choices"]
    if value is None and f.default is None:
        return None
    try:
        if isinstance(value, bool) or (kind is str and not isinstance(value, str)):
            raise ValueError
        if kind is float and not math.isfinite(float(value)):
            raise ValueError
        found = kind(value)
        if kind is int and float(value) != found:
            raise ValueError
    except (TypeError, ValueError):
        raise MegatrainError(f"{where}: {f.name}={value!r}: {KINDS[kind][0]} is needed") from None
    except MegatrainError as why:
        raise MegatrainError(f"{where}: {why}") from None
    if choices and found not in f.metadata["taken"]:
        raise MegatrainError(f"{where}: {f.name}={found!r}: use one of {', '.join(choices)}")
    return found


def _ranges(s: Settings) -> Settings:
    for name in ("seq", "tokens", "micro", "steps", "log_every", "eval_every", "save_every", "keep", "gpus",
                 "early_stopping"):
        if getattr(s, name) is not None and getattr(s, name) < 1:
            raise MegatrainError(f"{name}={getattr(s, name)}: at least 1 is needed")
    for name, least, most in (("validation", 0, 0.5), ("warmup", 0, 1), ("beta2", 0, 0.99999),
                              ("clip", 0, float("inf")), ("weight_decay", 0, 1), ("seed", 0, 2**32 - 1)):
        if not isinstance(getattr(s, name), str) and not least <= getattr(s, name) <= most:
            span = f"a number from {least} to {most}" if most < float("inf") else "0 or more"
            raise MegatrainError(f"{name}={getattr(s, name)}: {span} is needed")
    for name in ("epochs", "lr"):
        if getattr(s, name) is not None and not getattr(s, name) > 0:
            raise MegatrainError(f"{name}={getattr(s, name)}: more than 0 is needed")
    for name in ("vram", "host"):
        parse_bytes(getattr(s, name), name)
    if (s.products, s.dtype) == ("fp8", "float32"):
        raise MegatrainError("products=fp8, dtype=float32: codes of 8 bits are made of bfloat16 weights; leave one of "
                             "the two out")
    if s.early_stopping and s.validation == 0:
        raise MegatrainError(f"early_stopping={s.early_stopping}, validation=0: nothing is held out to be evaluated")
    if s.base != "none" and s.lora is None:
        raise MegatrainError(f"base={s.base}: codes are frozen; say what trains beside them, as lora={AS}")
    if s.seq and s.tokens and s.tokens % s.seq:
        raise MegatrainError(f"tokens={s.tokens}, seq={s.seq}: a step is a whole number of rows; "
                             f"nearest: tokens={max(1, round(s.tokens / s.seq)) * s.seq}")
    return s


# ---- flags and YAML ------------------------------------------------------------------------------

def add_flags(parser: argparse.ArgumentParser, names: Iterable[str] | None = None) -> None:
    """A flag for each setting, model and data left out; what is not given is not in the namespace."""
    for f in _shown():
        if f.name in ("model", "data") or (names is not None and f.name not in names):
            continue
        choices = f.metadata["choices"]
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=argparse.SUPPRESS, type=str, dest=f.name,
                            metavar="|".join(choices) or f.metadata["shown"],
                            help=f.metadata["text"] + ("" if f.default is None else f"; default: {f.default}"))


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line has."""
    names = {f.name for f in _shown()}
    return getattr(args, "more", {}) | {k: v for k, v in vars(args).items() if k in names and v not in (None, [])}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Names and values in a YAML file.

    Raises:
        MegatrainError: there is no such file, or it is not a table of names and values.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())
    except OSError as why:
        raise MegatrainError(f"{path}: {why.strerror}") from None
    except UnicodeDecodeError:
        raise MegatrainError(f"{path}: not UTF-8: lines of `name: value` are needed") from None
    except yaml.YAMLError as why:
        mark, problem = getattr(why, "problem_mark", None), getattr(why, "problem", None) or why
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise MegatrainError(f"{where}: not YAML: {problem}; lines of `name: value` are needed") from None
    if not isinstance(found, dict):
        raise MegatrainError(f"{path}: lines of `name: value` are needed")
    return found


def write_yaml(path: str | Path, settings: Settings) -> None:
    import yaml

    found = dataclasses.asdict(settings)
    found |= found.pop("more")
    if found["data"] is not None:                    # as it is written by hand
        found["data"] = found["data"][0] if len(found["data"]) == 1 else list(found["data"])
    replace(Path(path), yaml.safe_dump(found, sort_keys=False).encode())


def page() -> str:
    """The table of docs/cli.md."""
    lines = ["| setting | default | what |", "|---|---|---|"]
    for f in _shown():
        flag = f"`{f.name}`" if f.name in ("model", "data") else f"`--{f.name.replace('_', '-')}`"
        text = f.metadata["text"] + (f": {', '.join(f.metadata['choices'])}" if f.metadata["choices"] else "")
        lines.append(f"| {flag} | {'' if f.default is None else f'`{f.default}`'} | {text} |")
    return "\n".join(lines)
