"""What TRL trains: a class of trainer and of arguments for each method, and the records that it takes.

    sft      texts, prompts with completions, conversations: rows of tokens, which data.py makes
    dpo, orpo, reward    {"prompt", "chosen", "rejected"}          kto    {"prompt", "completion", "label"}
    grpo     {"prompt", ...}: what is written is rewarded by a function of one's own, or a reward model

Only `megatrain train` and `resume` import TRL. Nothing of it is replaced: a run's class has our checkpoints, log and
evaluation in front of TRL's own.
"""
from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from . import forms
from .chats import messages_of
from .settings import Settings, unknown

CLASSES = {"sft": ("trl", "SFT"), "dpo": ("trl", "DPO"), "kto": ("trl", "KTO"), "reward": ("trl", "Reward"),
           "orpo": ("trl.experimental.orpo", "ORPO"), "grpo": ("trl", "GRPO")}
NEEDED = {"dpo": ("chosen", "rejected"), "orpo": ("prompt", "chosen", "rejected"), "reward": ("chosen", "rejected"),
          "kto": ("prompt", "completion", "label"), "grpo": ("prompt",)}
# Of TRL's arguments, what a run's settings say, or how it trains.
OURS = frozenset(("output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "logging_first_step",
                  "gradient_accumulation_steps", "max_steps", "learning_rate", "lr_scheduler_type", "max_grad_norm",
                  "seed", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
                  "save_total_limit", "use_cpu", "bf16", "fp16", "gradient_checkpointing", "report_to",
                  "disable_tqdm", "dataloader_pin_memory", "max_length", "packing", "dataset_kwargs",
                  "remove_unused_columns", "prediction_loss_only",
                  "weight_decay", "optim", "push_to_hub", "model_init_kwargs", "chat_template_path"))
SEQUENCES = {"dpo": 2, "orpo": 2, "reward": 2}           # of tokens, that a record has


def classes(method: str) -> tuple[type, type]:
    """TRL's trainer and its arguments."""
    module, name = CLASSES[method]
    found = importlib.import_module(module)
    return getattr(found, f"{name}Trainer"), getattr(found, f"{name}Config")


def given(settings: Settings) -> dict[str, Any]:
    """TRL's arguments that were given by their own names.

    Raises:
        MegatrainError: there is no such name, a run says it itself, or the value is not of its kind.
    """
    from transformers import HfArgumentParser

    kind = classes(settings.method)[1]
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    for name in settings.more:
        if name not in names:
            own = [f.name for f in dataclasses.fields(Settings) if f.name != "more"]
            raise MegatrainError(f"{unknown(name, [*own, *names])}")
        if name in OURS:
            raise MegatrainError(f"{name}: megatrain says that itself; docs/cli.md has what says it")
    parser = HfArgumentParser(kind, allow_abbrev=False)
    parser.error = _refuse
    words = [word for name, value in settings.more.items()
             for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))]
    found = parser.parse_args(["--output_dir", str(settings.out), *words])
    return {name: getattr(found, name) for name in settings.more}


def _refuse(message: str) -> None:
    raise MegatrainError(message)


# ---- records ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Pair:
    """A record as TRL has it. Its length is that of its JSON: weights and shares count characters."""

    record: dict[str, Any]
    whole: bool = True

    @property
    def chat(self) -> bool:
        return any(isinstance(self.record.get(name), list) for name in ("prompt", "chosen", "completion"))

    def __len__(self) -> int:
        return len(self.text)

    @property
    def text(self) -> str:
        return json.dumps(self.record, sort_keys=True)


def pair(record: dict[str, Any], method: str, chat: bool, where: str) -> Pair:
    """Raises: MegatrainError: it is none that the method takes."""
    made = dict(forms.asked(record, chat, where))
    for name in ("prompt", "chosen", "rejected", "completion"):
        if isinstance(made.get(name), list):
            made[name] = messages_of(made[name], f"{where}: {name}")
    needed = NEEDED[method]
    if missing := [name for name in needed if made.get(name) in (None, "", [])]:
        raise MegatrainError(f"{where} has {', '.join(map(repr, record))} and no {missing[0]}: --method {method} "
                             f"trains on records of {', '.join(needed)}")
    said = {isinstance(made[name], list) for name in (*needed, "prompt") if name in made and name != "label"}
    if len(said) > 1:
        raise MegatrainError(f"{where}: {', '.join(n for n in needed if n != 'label')} must all be texts, or all lists "
                             "of messages")
    if "label" in needed:
        if made["label"] not in (True, False, 0, 1, "True", "False", "true", "false", "0", "1"):
            raise MegatrainError(f"{where}: label is {made['label']!r}: true or false is needed")
        made["label"] = str(made["label"]).lower() in ("true", "1")
    more = (*made,) if method == "grpo" else (*needed, "prompt", "tools", "chat_template_kwargs")
    return Pair({name: made[name] for name in made if name in more})


def rewards(settings: Settings) -> Any:
    """Of --reward: a function in a file of Python, or a reward model.

    Raises:
        MegatrainError: there is no such file, or no such function in it.
    """
    if settings.reward is None:
        raise MegatrainError("--method grpo needs --reward FILE.py:FUNCTION (of completions and the record's fields; "
                             "it returns a number for each), or a reward model")
    path, _, name = settings.reward.rpartition(":")
    if not path.endswith(".py"):
        return settings.reward
    if not Path(path).is_file():
        raise MegatrainError(f"reward={settings.reward}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        raise MegatrainError(f"reward={settings.reward}: {path} has no function {name}")
    return found
