"""What TRL trains: a class of trainer and of arguments for each method, and how a run's settings are written for it.

    sft      texts, prompts with completions, conversations: rows of tokens, which rows.py makes
    dpo, orpo, reward    {"prompt", "chosen", "rejected"}          kto    {"prompt", "completion", "label"}
    grpo     {"prompt", ...}: what is written is rewarded by a function of one's own, or a reward model

Only `megatrain train` and `resume` import TRL. Nothing of it is replaced: a run's class has our checkpoints, log and
evaluation in front of TRL's own.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from .rows import collate
from .settings import Settings, unknown

CLASSES = {"sft": ("trl", "SFT"), "dpo": ("trl", "DPO"), "kto": ("trl", "KTO"), "reward": ("trl", "Reward"),
           "orpo": ("trl.experimental.orpo", "ORPO"), "grpo": ("trl", "GRPO")}
# Of TRL's arguments, what a run's settings say, or how it trains.
OURS = frozenset(("output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "logging_first_step",
                  "gradient_accumulation_steps", "max_steps", "learning_rate", "lr_scheduler_type", "max_grad_norm",
                  "seed", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
                  "save_total_limit", "use_cpu", "bf16", "fp16", "gradient_checkpointing", "report_to",
                  "disable_tqdm", "dataloader_pin_memory", "max_length", "packing", "dataset_kwargs",
                  "remove_unused_columns", "prediction_loss_only",
                  "weight_decay", "optim", "push_to_hub", "model_init_kwargs", "chat_template_path"))
SEQUENCES = {"dpo": 2, "orpo": 2, "reward": 2}           # of tokens, that a record has
HELD_OUT_ROWS = 200                  # at most, by default: an evaluation is a small part of a run


def classes(method: str) -> tuple[type, type]:
    """TRL's trainer and its arguments."""
    module, name = CLASSES[method]
    found = importlib.import_module(module)
    return getattr(found, f"{name}Trainer"), getattr(found, f"{name}Config")


def given(settings: Settings) -> dict[str, Any]:
    """TRL's arguments that were given by their own names. Raises: MegatrainError: there is no such name, a run says it
    itself, or the value is not of its kind."""
    from transformers import HfArgumentParser

    kind = classes(settings.method)[1]
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    for name in settings.more:
        if name not in names:
            own = [f.name for f in dataclasses.fields(Settings) if f.name != "more"]
            raise MegatrainError(unknown(name, [*own, *names]))
        if name in OURS:
            raise MegatrainError(f"{name}: megatrain says that itself; docs/cli.md has what says it")
    parser = HfArgumentParser(kind, allow_abbrev=False)

    def refuse(message: str) -> None:
        raise MegatrainError(message)

    parser.error = refuse
    words = [word for name, value in settings.more.items()
             for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))]
    found = parser.parse_args(["--output_dir", str(settings.out), *words])
    return {name: getattr(found, name) for name in settings.more}


def rewards(settings: Settings) -> Callable[..., Any] | str:
    """Of --reward: a function in a file of Python, or a reward model's name. Raises: MegatrainError: there is no such
    file, or no such function in it."""
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
    found = getattr(module, name, None)
    if not callable(found):
        raise MegatrainError(f"reward={settings.reward}: {path} has no function {name}")
    return found


def arguments(settings: Settings, held: bool) -> Any:
    """TRL's, of a run; held: something is held out."""
    s = settings
    micro_rows = s.tokens // (s.seq * SEQUENCES.get(s.method, 1)) // s.gpus // s.micro
    # Of a reference model, and a reward model: TRL would put them on the GPU, whole.
    beside = {"model_init_kwargs": {"device_map": None, "dtype": s.dtype}}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    ours = dict(
        output_dir=s.out, per_device_train_batch_size=micro_rows, gradient_accumulation_steps=s.micro,
        per_device_eval_batch_size=micro_rows, max_steps=s.steps, learning_rate=s.lr, lr_scheduler_type=s.schedule,
        max_grad_norm=s.clip, seed=s.seed, logging_steps=s.log_every,
        logging_first_step=True, eval_strategy="steps" if held else "no", eval_steps=s.eval_every,
        save_strategy="steps", save_steps=s.save_every, save_total_limit=s.keep, use_cpu=s.device == "cpu",
        bf16=False, gradient_checkpointing=False,        # no autocast; what is kept for backward, the plan says
        report_to=[] if s.report_to == "none" else [s.report_to], disable_tqdm=True, dataloader_pin_memory=False)
    usual = dict(warmup_steps=int(s.warmup * s.steps), log_level_replica="error", **best if s.early_stopping else {})
    if s.method == "sft":
        ours |= dict(prediction_loss_only=True, remove_unused_columns=False, max_length=None, packing=False,
                     dataset_kwargs={"skip_prepare_dataset": True})
    elif s.method == "grpo":
        usual |= dict(max_completion_length=max(1, s.seq // 2), num_generations=min(8, micro_rows * s.micro * s.gpus),
                      **beside if "beta" in s.more or ".py:" not in s.reward else {})
    else:
        ours |= dict(max_length=s.seq)
        if s.method in ("dpo", "kto"):                   # one model in memory: it is asked before its first step
            usual |= dict(precompute_ref_log_probs=s.lora is None,
                          **beside if "precompute_ref_log_probs" in s.more else {})
    kind = classes(s.method)[1]
    if "router_aux_loss_coef" in {f.name for f in dataclasses.fields(kind)}:
        usual |= dict(router_aux_loss_coef=0.0)          # a mixture's loss is that of its words, as transformers has it
    return kind(**ours, **usual | given(s))


def trainer_of(model: Any, tokenizer: Any, settings: Settings, train: Any, held: Any, run: Any, how: dict[str, Any],
               reward: Any) -> Any:
    """TRL's, with its model streamed. run: as loop.Streamed has it. how: as mt.stream takes it. reward: with grpo."""
    import datasets

    from .loop import OfRows, Streamed

    rows, (kind, _) = settings.method == "sft", classes(settings.method)
    # TRL looks at data sets of its own kind when a trainer is made; rows take their place behind that. What it makes of
    # records it keeps beside them, in a folder that all processes see and no other run: the cache of `datasets` knows
    # nothing of this package's version.
    parts = {name: part for name, part in (("train", train), ("held", held)) if len(part)}

    def write() -> None:
        for name, part in parts.items():
            found = [{"input_ids": [0], "labels": [0]}] if rows else [p.record for p in part]
            datasets.Dataset.from_list(found).save_to_disk(f"{run.scratch}/{name}")

    run.team.first_does(write)
    data = [datasets.load_from_disk(f"{run.scratch}/{name}") if name in parts else None for name in ("train", "held")]
    if not rows and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    more = {"data_collator": collate(settings.device == "cuda" and not train.alone)} if rows else {}
    more |= {} if reward is None else {"reward_funcs": reward}
    try:
        with _left_alone(model):
            trainer = mt.stream_trainer(
                type(kind.__name__, (OfRows if rows else Streamed, kind), {"run": run}), model,
                arguments(settings, bool(len(held))), optimizer=lambda m: _adamw(m, settings), stream_with=how,
                processing_class=tokenizer, train_dataset=data[0], eval_dataset=data[1], **more)
    except ValueError as why:                            # of TRL, about arguments that do not go together
        raise MegatrainError(f"{settings.method}: {why}") from None
    if rows:
        trainer.train_dataset, trainer.eval_dataset = train, held.first(HELD_OUT_ROWS) if len(held) else None
    return trainer


@contextlib.contextmanager
def _left_alone(model: Any) -> Iterator[None]:
    """TRL makes a trainer: adapters over codes would become bfloat16, and what it uses would be written into the
    config, which is saved with the model."""
    told, config = ("is_loaded_in_4bit", "is_loaded_in_8bit"), model.config.get_text_config()
    before = {name: vars(model)[name] for name in told if name in vars(model)}
    kept = {name: getattr(config, name) for name in ("router_aux_loss_coef",) if hasattr(config, name)}
    vars(model).update(dict.fromkeys(told, False))
    try:
        yield
    finally:
        for name in told:
            vars(model).pop(name, None)
        vars(model).update(before)
        for name, value in kept.items():
            setattr(config, name, value)


def _adamw(model: Any, settings: Settings) -> mt.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2]},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    return mt.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(0.9, settings.beta2),
                    weight_decay=settings.weight_decay, states=settings.states)
