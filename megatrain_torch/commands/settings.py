"""What a command is asked for: flags, YAML and defaults make the same Settings. The table makes the flags, config.yaml
and docs/cli.md (tools/cli_page.py). Flags says messages of mt.plan and mt.stream with flags for keyword arguments."""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import megatrain_torch as mt
from megatrain_torch import MegatrainError

METHODS = ("sft", "dpo", "kto", "orpo", "reward", "grpo")
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt",
             "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")
UNSHOWN = ("8bit-lo8",)                  # of states: taken, and not offered
AS = "r=16,alpha=32,targets=all"
ALL = "all"
# Trainer's names for the same, which may be written as well.
SAME = {"learning_rate": "lr", "max_steps": "steps", "num_train_epochs": "epochs", "output_dir": "out",
        "max_length": "seq", "max_grad_norm": "clip", "save_steps": "save_every", "eval_steps": "eval_every",
        "logging_steps": "log_every", "save_total_limit": "keep", "lr_scheduler_type": "schedule",
        "adam_beta2": "beta2", "gradient_accumulation_steps": "micro", "hub_model_id": "push_to_hub"}
# What others call a setting, for messages.
ALSO = {"batch_size": "tokens", "per_device_train_batch_size": "tokens", "dataset": "data", "model_name": "model",
        "warmup_ratio": "warmup", "text_column": "column", "val_split": "validation", "rank": "r"}
LEAST = {"kto": 2, "grpo": 8}            # records of a step: KTO compares them, GRPO answers of one prompt
SEQUENCES = {"dpo": 2, "orpo": 2, "reward": 2}       # of tokens, that a record has
STEPS_LEAST = 20                         # steps of an epoch, where `tokens` is not given


class Stopped(Exception):
    """A run was asked to stop by the signal of this number, and has written a checkpoint."""


say = functools.partial(print, flush=True)


def need(what: str, *packages: str) -> None:
    """Refuses where one is not installed. what: words before their names, as "adapters need"."""
    if gone := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise MegatrainError(f"{what} {' and '.join(gone)}: pip install {' '.join(gone).replace('yaml', 'pyyaml')}")


def near(name: str) -> str:
    """What a path that is not there may have meant: the nearest name beside it."""
    path = Path(name)
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    found = difflib.get_close_matches(path.name, beside, 1)
    return f"; did you mean {path.parent / found[0]}?" if found else ""


def from_json(text: str | bytes, where: str) -> Any:
    """where: for messages."""
    try:
        return json.loads(text.rstrip())     # what is missing at a line's end is told as there
    except UnicodeDecodeError as why:
        said = f"byte {why.start} is not UTF-8, as JSON is"
    except (RecursionError, ValueError) as why:
        said = f"not JSON: {why}"
    raise MegatrainError(f"{where}: {said}")


def read_table(path: Path) -> dict[str, Any]:
    if not isinstance(found := from_json(path.read_bytes(), str(path)), dict):
        raise MegatrainError(f"{path}: a table is needed")
    return found


# ---- the table -----------------------------------------------------------------------------------

def _words(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not found or not all(isinstance(word, str) and word for word in found):
        raise ValueError
    return found


def _targets(value: Any) -> tuple[str, ...]:
    found = _words(list(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value)
    if ALL in found and len(found) > 1:
        raise MegatrainError(f"targets={','.join(found)}: {ALL} has the others in it; leave them out, or it")
    return found


def _yes(value: Any) -> bool:
    if (word := str(value).lower()) not in ("true", "false"):
        raise ValueError
    return word == "true"


def _share(value: Any) -> float | str:
    """A number, or the name of a file."""
    try:
        return float(value)
    except ValueError:
        return _words(str(value))[0]


def _setting(default: Any, kind: Any, text: str = "", choices: Iterable[str] = (), shown: str = "",
             span: tuple[float, float] | None = None) -> Any:
    """shown: the value's name in help. span: the least and the greatest value; by default that of its kind."""
    return field(default=default, metadata={
        "kind": kind, "text": text, "choices": tuple(choices), "shown": shown or KINDS[kind][1],
        "span": span or {int: COUNT, float: POSITIVE}.get(kind)})


def as_words(value: Any) -> str:
    """Of --lora: the same for all ways to write the same."""
    return str(Lora.of(value))


COUNT, POSITIVE = (1, math.inf), (math.ulp(0.0), math.inf)
KINDS = {int: ("a whole number", "N"), float: ("a number", "X"), str: ("a word", "WORD"),
         _words: ("a word, or a list of words", "DATA"), _share: ("a number, or a file", "SHARE|DATA"),
         as_words: (f"words such as {AS}", AS), _targets: (f"{ALL}, or names of linear layers,", ""),
         _yes: ("true or false", "")}


@dataclass(frozen=True)
class Lora:
    """--lora: adapters of rank r. targets: names of modules or the ends of such names; ("all",): all linear layers but
    the head. dora, rslora: PEFT's use_dora and use_rslora."""

    r: int = _setting(None, int)
    alpha: float = _setting(None, float)
    targets: tuple[str, ...] = _setting((ALL,), _targets)
    dropout: float = _setting(0.0, float, span=(0, 0.999))
    dora: bool = _setting(False, _yes)
    rslora: bool = _setting(False, _yes)

    @staticmethod
    def of(value: Any) -> Lora:
        """From a flag's words, or a table in YAML. A word without `=` goes on with the list before it."""
        if isinstance(value, Mapping):
            given = {str(k): v for k, v in value.items()}
        else:
            first, *words = re.split(r"(?:^|,)\s*(\w+)=", value.strip(" ,")) if isinstance(value, str) else "?"
            given = dict(zip(words[::2], map(str.strip, words[1::2])))
            if first:
                raise MegatrainError(f"lora={value!r}: words such as {AS} are needed")
        known = {f.name: f for f in dataclasses.fields(Lora)}
        if strange := [name for name in given if name not in known]:
            raise MegatrainError(f"lora: {unknown(strange[0], known, 0.4)}")
        if given.get("r") is None:
            raise MegatrainError(f"lora={value!r}: r is needed, the adapters' rank, as in lora={AS}")
        found = {name: _of_kind(known[name], v, "lora") for name, v in given.items()}
        return Lora(**{"alpha": 2.0 * found["r"]} | found)

    def __str__(self) -> str:
        """As a flag has it, with defaults too, and all digits."""
        alpha, dropout = (repr(n).removesuffix(".0") for n in (self.alpha, self.dropout))
        more = f",dropout={dropout}" * bool(self.dropout) + ",dora=true" * self.dora + ",rslora=true" * self.rslora
        return f"r={self.r},alpha={alpha},targets={','.join(self.targets)}{more}"


@dataclass(frozen=True)
class Settings:
    """Of a run. None: chosen when model, data and machine are known; config.yaml of the run has what was chosen.
    more: arguments of TRL by their own names."""

    model: str = _setting(None, str, "a run, a folder in Hugging Face format, or a name on the hub", shown="MODEL")
    data: tuple[str, ...] = _setting(
        None, _words, "text, .jsonl, .json, .csv, .tsv or .parquet, a folder of such, or a name on the hub; several "
        "may have weights: a.jsonl:0.9 b.csv:0.1")
    out: str = _setting(None, str, "folder of the run; default: runs/ and the model's name", shown="FOLDER")

    method: str = _setting("sft", str, "training method; docs/cli.md has the records that each takes", METHODS)
    reward: str = _setting(None, str, "with grpo: FILE.py:FUNCTION, or a reward model", shown="WHAT")
    lora: str = _setting(None, as_words, "train adapters of rank r only; default: alpha twice r, targets=all")
    base: str = _setting("none", str, "with lora, keep frozen weights in 4 or 8 bits", ("none", *mt.choices("base")))

    column: str = _setting(None, str, "field of the records to train on; default: messages, prompt, instruction, "
                           "question or text, whichever is there", shown="FIELD")
    chat_template: str = _setting(None, str, "file with a chat template, for the tokenizer's own", shown="FILE")
    split: str = _setting("train", str, "split of a data set on the hub", shown="NAME")
    validation: float | str = _setting(0.02, _share, "share of the tokens to hold out, or a file with held-out data",
                                       span=(0, 0.5))
    seq: int = _setting(None, int, "tokens in a row; default: 4096, on the CPU 256, at most what the model takes")

    tokens: int = _setting(None, int, "tokens in a step; default: 65536, on the CPU 2048, at most a 20th of the data")
    micro: int = _setting(None, int, "micro-batches in a step; default: the plan's, on the CPU 1")
    epochs: float = _setting(1.0, float, "passes through the data")
    steps: int = _setting(None, int, "number of steps, instead of epochs")
    lr: float = _setting(None, float, "highest learning rate; default: 1e-5, with lora 2e-4")
    schedule: str = _setting("cosine", str, "learning rate schedule", SCHEDULES)
    warmup: float = _setting(0.03, float, "share of the steps in which the learning rate rises", span=(0, 1))
    weight_decay: float = _setting(0.0, float, "AdamW's weight decay", span=(0, 1))
    beta2: float = _setting(0.95, float, "AdamW's beta2", span=(0, 0.99999))
    clip: float = _setting(1.0, float, "highest gradient norm of a step; 0: no limit", span=(0, math.inf))
    seed: int = _setting(0, int, "seed for the order of the data and for dropout", span=(0, 2**32 - 1))

    device: str = _setting(None, str, "device to compute on; default: cuda if there is one", ("cuda", "cpu"))
    dtype: str = _setting(None, str, "type of the weights; default: bfloat16, on the CPU float32, but bfloat16 with "
                          "products=fp8 or a base of codes", ("bfloat16", "float32"))
    states: str = _setting("fp32", str, "format of AdamW's states", mt.choices("states"))
    products: str = _setting("bf16", str, "precision of the layers' products; fp8 needs a GPU that has it",
                             mt.choices("products"))
    gpus: int = _setting(1, int, "GPUs of this machine to use, with a process for each")
    vram: str = _setting(None, str, "limit of each GPU's memory, e.g. 24GiB", shown="SIZE")
    host: str = _setting(None, str, "limit of host memory for all processes together", shown="SIZE")
    nvme: str = _setting(None, str, "folder for states, weights and activations that host memory does not hold",
                         shown="FOLDER")

    log_every: int = _setting(None, int, "steps between two lines of log.jsonl; default: 1, or 10 on a GPU if the plan "
                              "predicts steps under 5 s")
    eval_every: int = _setting(None, int, "steps between two evaluations; default: a tenth of the run")
    save_every: int = _setting(None, int, "steps between two checkpoints; default: a fifth of the run")
    early_stopping: int = _setting(None, int, "stop after so many evaluations in a row without improvement, and "
                                   "keep the best weights")
    keep: int = _setting(2, int, "checkpoints to keep; older ones are removed")
    report_to: str = _setting("none", str, "where else to send the log: tensorboard, wandb, or another that Trainer "
                              "knows", shown="NAME")
    push_to_hub: str = _setting(None, str, "name on the hub to upload the final model to", shown="NAME")
    more: dict[str, Any] = field(default_factory=dict, metadata={"kind": dict})

    @staticmethod
    def of(values: Mapping[str, Any], where: str) -> Settings:
        """Checked settings from names and values. where: for messages."""
        values, more = {str(name): value for name, value in values.items()}, {}
        if (pushed := str(values.get("push_to_hub")).lower()) in ("true", "false"):      # as Trainer has it
            out = values.get("out", values.get("output_dir")) or values.get("model") or ""
            values["push_to_hub"] = None if pushed == "false" else values.pop("hub_model_id", Path(str(out)).name)
        for name in list(values):
            if (own := SAME.get(name)) and own not in values:
                values[own] = values.pop(name)
            elif name in ALSO or name in SAME:
                raise MegatrainError(f"{where}: {unknown(name, SHOWN)}")
            elif name not in SHOWN:
                more[name] = values.pop(name)
        s = Settings(**{name: _of_kind(SHOWN[name], value, where) for name, value in values.items()}, more=more)
        for name in ("vram", "host"):
            mt.parse_bytes(getattr(s, name), name)
        if (s.products, s.dtype) == ("fp8", "float32"):
            raise MegatrainError("products=fp8, dtype=float32: codes are made of bfloat16 weights; leave one out")
        if s.early_stopping and s.validation == 0:
            raise MegatrainError(f"early_stopping={s.early_stopping}, validation=0: nothing is held out to evaluate")
        if s.base != "none" and s.lora is None:
            raise MegatrainError(f"base={s.base}: codes are frozen; say what trains beside them, as lora={AS}")
        _check_rows(s, s.seq)
        return s

    def with_(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)

    def for_machine(self) -> Settings:
        device, cores = device_of(self.device), len(os.sched_getaffinity(0))
        there = torch.cuda.device_count() if device == "cuda" else max(2, cores)
        if self.gpus > there:
            what = "CUDA devices" if device == "cuda" else "cores, with a process on each,"
            raise MegatrainError(f"gpus={self.gpus}: there are {there} {what} here; --gpus {there} or fewer")
        if self.nvme is not None and not Path(self.nvme).is_dir():
            raise MegatrainError(f"nvme={self.nvme}: there is no such directory; make one on that drive")
        if device == "cpu":
            # Torch's threads spin while they wait for each other: one core is left to the engine's.
            torch.set_num_threads(max(1, (cores - 1) // self.gpus))
        halves = device == "cuda" or self.products == "fp8" or self.base != "none"
        return self.with_(device=device, dtype=self.dtype or ("bfloat16" if halves else "float32"),
                          lr=self.lr or (1e-5 if self.lora is None else 2e-4))

    def for_gpus(self, gpus: int) -> Settings:
        """Of a run that goes on with so many GPUs: with as many micro-batches in all, where they can be had."""
        if gpus == self.gpus:
            return self
        micro, rest = divmod((self.micro or 1) * self.gpus, gpus)
        return self.with_(gpus=gpus, micro=micro if micro and not rest else None)

    def for_model(self, config: Any) -> Settings:
        most = getattr(config, "max_position_embeddings", None) or self.seq or 4096
        seq = self.seq or min(4096 if self.device == "cuda" else 256, most)
        if seq > most:
            raise MegatrainError(f"seq={seq}: the model was made for {most} positions at most; --seq {most} or less")
        return self.with_(seq=seq)

    def for_data(self, there: int) -> Settings:
        """Tokens of a step, how many steps, and what is done how often. there: rows, or records, of the data."""
        seq, tokens, gpus, micro = self.seq * SEQUENCES.get(self.method, 1), self.tokens, self.gpus, self.micro
        if tokens is None:
            usual = (65536 if self.device == "cuda" else 2048) // seq
            tokens = max(LEAST.get(self.method, 1), min(usual, there // STEPS_LEAST) // gpus) * gpus * seq
        _check_rows(self.with_(tokens=tokens), seq)
        rows = tokens // seq
        if rows > there and self.method != "grpo":
            raise MegatrainError(f"tokens={tokens}: the data has {there} rows of {seq} tokens; --tokens "
                                 f"{there * seq} takes them all in one step, fewer make more steps")
        if rows % gpus:
            raise MegatrainError(f"tokens={tokens}: {rows} rows of {self.seq} tokens cannot be divided among {gpus} "
                                 f"GPUs; nearest: tokens={max(1, round(rows / gpus)) * gpus * seq}; or as many GPUs as "
                                 f"{_divisors(rows)}")
        if micro and rows // gpus % micro:
            each = "tokens / seq" if gpus == 1 else "tokens / seq / gpus"
            raise MegatrainError(f"micro={micro}: {rows // gpus} rows ({each}) cannot be cut into so many equal parts; "
                                 f"{_divisors(rows // gpus)} can")
        steps = self.steps or math.ceil(self.epochs * there / rows)
        eval_every = self.eval_every or max(1, steps // 10)
        # Weights that are to be taken back have to be saved when they are evaluated.
        save_every = self.save_every or (eval_every if self.early_stopping else max(1, steps // 5))
        return self.with_(tokens=tokens, steps=steps, eval_every=eval_every, save_every=save_every)


SHOWN = {f.name: f for f in dataclasses.fields(Settings) if f.name != "more"}        # flags, and lines of config.yaml


def unknown(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Words for a setting or a flag that is none, with the nearest that is one."""
    names = {n.strip("-").replace("-", "_"): n for n in known}
    names |= {other: names[own] for other, own in (ALSO | SAME).items() if own in names}
    found = difflib.get_close_matches(name.strip("-").replace("-", "_"), list(names), 1, cutoff)
    return f"there is no {name!r}" + (f"; did you mean {names[found[0]]!r}?" if found
                                      else f"; known: {', '.join(known)}")


def _of_kind(f: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """YAML reads 1e-5 as a word: numbers may come as words."""
    kind, choices, span = (f.metadata[name] for name in ("kind", "choices", "span"))
    if value is None and f.default is None:
        return None
    try:
        found = kind(value)
        if (isinstance(value, bool) and kind is not _yes) or (kind is str and not isinstance(value, str)) or (
                kind is float and not math.isfinite(found)) or (kind is int and float(value) != found):
            raise ValueError
    except (TypeError, ValueError, OverflowError):       # the last: of int(inf)
        raise MegatrainError(f"{where}: {f.name}={value!r}: {KINDS[kind][0]} is needed") from None
    except MegatrainError as why:
        raise MegatrainError(f"{where}: {why}") from None
    if choices and found not in (*choices, *UNSHOWN * (f.name == "states")):
        raise MegatrainError(f"{where}: {f.name}={found!r}: use one of {', '.join(choices)}")
    if span and not isinstance(found, str) and not span[0] <= found <= span[1]:
        needed = {COUNT: "at least 1", POSITIVE: "more than 0", (0, math.inf): "0 or more"}.get(
            span, f"a number from {span[0]} to {span[1]}")
        raise MegatrainError(f"{where}: {f.name}={found}: {needed} is needed")
    return found


def _check_rows(s: Settings, seq: int | None) -> None:
    if seq and s.tokens and s.tokens % seq:
        raise MegatrainError(f"tokens={s.tokens}, seq={s.seq}: a step is a whole number of rows; "
                             f"nearest: tokens={max(1, round(s.tokens / seq)) * seq}")


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def device_of(asked: str | None) -> str:
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise MegatrainError("device=cuda: torch sees no CUDA device here; use --device cpu")
    return device


# ---- flags and YAML ------------------------------------------------------------------------------

def add_flags(parser: argparse.ArgumentParser, names: Iterable[str] = ()) -> None:
    """A flag for each of these settings, by default all; model and data are words. What is not given is not set."""
    nargs = {"model": None, "data": "+"} if names else {"model": "?", "data": "*"}       # --config may have them
    for f in [f for f in SHOWN.values() if f.name in names or not names]:
        text, shown = f.metadata["text"], "|".join(f.metadata["choices"]) or f.metadata["shown"]
        if f.name in nargs:
            parser.add_argument(f.name, nargs=nargs[f.name], metavar=shown, help=text)
        else:
            parser.add_argument(f"--{f.name.replace('_', '-')}", default=argparse.SUPPRESS, dest=f.name, metavar=shown,
                                help=text + ("" if f.default is None else f"; default: {f.default}"))


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the command line, and of its --config."""
    found = (read_yaml(args.config) if getattr(args, "config", None) else {}) | getattr(args, "more", {})
    return found | {k: v for k, v in vars(args).items() if k in SHOWN and v not in (None, [])}


def read_yaml(path: str | Path) -> dict[str, Any]:
    import yaml

    try:
        if isinstance(found := yaml.safe_load(Path(path).read_text()), dict):
            return found
        said = "lines of `name: value` are needed"
    except (UnicodeDecodeError, yaml.YAMLError) as why:
        said = f"not YAML: {' '.join(str(why).split())}"
    raise MegatrainError(f"{path}: {said}")


# ---- messages in a shell -------------------------------------------------------------------------

class Flags:
    """How a verb's flags say a plan's settings, and a refusal's changes of them (Refusal.text).

    names: of the verb's flags. gpus: a plan's tokens are one GPU's, a verb's are those of all GPUs. typed: of `plan`,
    the model and the flags as they were typed: a change is told as that command with the change in it."""

    def __init__(self, names: Iterable[str], gpus: int = 1, typed: Mapping[str, Any] | None = None) -> None:
        self.names, self._gpus, self._typed = tuple(names), gpus, typed

    def __call__(self, changes: dict[str, Any], line: bool = False) -> str | None:
        """As a part of a sentence, or as a line. None: the verb has no flag for it."""
        if not set(changes) <= set(self.names):
            return None
        if line and self._typed is not None:
            typed = {name: self._typed[name] for name in self.names if name in self._typed}
            return shlex.join(["megatrain", "plan", self._typed["model"], *self._words(typed | changes)])
        words, gone = self._words(changes), ", ".join(f"--{name}" for name, value in changes.items() if not value)
        room = f"     (a folder with {as_size(changes['nvme']['limit'])} free)" if line and "nvme" in changes else ""
        return " ".join([shlex.join(words)] * bool(words) + [f"without {gone}"] * bool(gone)) + room

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        found = []
        for name, value in values.items():
            if name == "nvme" and self._typed is None:
                value = value and "FOLDER"
            elif isinstance(value, dict):
                value = as_size(value["limit"])
            elif name in SIZES and isinstance(value, int):
                value = as_size(value)
            elif name == "tokens" and value:
                value *= self._gpus
            found += [f"--{name.replace('_', '-')}", str(value)] if value else []
        return found

    def told(self, why: MegatrainError) -> str:
        """An exception's message: tokens=1000 becomes --tokens 1000. A machine's name has a grammar of its own."""
        if found := getattr(why, "refusal", None):
            return found.text(self)
        if (text := str(why)).startswith(("machine ", "machine:")):
            return re.sub("^machine:? ", "--machine ", text)

        def flag(m: re.Match[str]) -> str:
            value = m[2].strip("'\"")
            value = str(int(value) * self._gpus) if m[1] == "tokens" and value.isdigit() else value
            return f"--{m[1].replace('_', '-')} {value}"

        return re.sub(rf"(?<![\w.,'\"-])({'|'.join(self.names)})=('[^']*'|\"[^\"]*\"|[^\s,;:)]*[^\s,;:.)])", flag,
                      text.replace("nvme limit=", "nvme="))


@contextlib.contextmanager
def in_flags(*names: str, gpus: int = 1) -> Iterator[None]:
    """What is refused meanwhile is said with these flags of a verb."""
    try:
        yield
    except MegatrainError as why:
        raise type(why)(Flags(names, gpus).told(why)) from None      # of a failure elsewhere it stays one


SIZES = ("vram", "host")


def as_size(n: int) -> str:
    """As people type it: no smaller than it is."""
    return f"{-(-n // 2**20)}MiB" if n < 2**30 else f"{math.ceil(100 * n / 2**30) / 100:.10g}GiB"
