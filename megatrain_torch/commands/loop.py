"""What Trainer and TRL train: their trainers around a streamed model, and arguments from a run's settings.

Theirs: methods and their losses, accumulation, schedules, the data's order and its place in it, early stopping,
TensorBoard and Weights & Biases. Ours: mt.AdamW, which clips and tells the norm without a pass of its own over the
gradients; checkpoints of mt.save, written while training goes on; a log with what bound each step; evaluation; signals.
Nothing of TRL is replaced: a run's class has ours in front of TRL's. `megatrain train` and `resume` alone import this.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import runpy
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerControl, TrainerState

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from .data import IGNORED, Rows, collate
from .folder import LOG, UNFINISHED, WHOLE, Owned, checkpoints, files_of, sync
from .launch import Team, hearing
from .settings import SEQUENCES, Settings, say, unknown

LONG_S = 5.0                         # a step that takes longer tells how far it is, and each one its loss
ROSE = 0.5                           # nats above the first loss: more than batches differ
EVERY_S = 30.0                       # without a terminal: between two lines with the loss
CLASSES = {"dpo": ("trl", "DPO"), "kto": ("trl", "KTO"), "reward": ("trl", "Reward"),
           "orpo": ("trl.experimental.orpo", "ORPO"), "grpo": ("trl", "GRPO")}
# Of a trainer's arguments, what a run's settings say, or how it trains.
OURS = frozenset("""
    output_dir per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_steps optim seed
    learning_rate lr_scheduler_type max_grad_norm weight_decay logging_steps logging_first_step eval_strategy eval_steps
    save_strategy save_steps save_total_limit use_cpu bf16 fp16 gradient_checkpointing report_to disable_tqdm
    dataloader_pin_memory max_length remove_unused_columns prediction_loss_only push_to_hub model_init_kwargs
    chat_template_path hub_token hub_strategy hub_always_push""".split())
HELD_OUT_ROWS = 200                  # at most, by default: an evaluation is a small part of a run


# ---- the trainer of a run ------------------------------------------------------------------------

@dataclass
class Run:
    """What a command knows of a run. owned: the folder, which the team's first process writes. convert: as in mt.load,
    of what is resumed from. scratch: a folder for the time of the command, the same for all processes."""

    settings: Settings
    team: Team
    owned: Owned
    convert: bool
    scratch: str


class Streamed:
    """In front of a trainer of transformers or TRL whose model is streamed, with mt.AdamW as its optimizer."""

    run: Run
    _logged: tuple[int, float] | None = None         # step, and when; None: before the first of this process
    _saving: mt.Saving | None = None

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's, which leaves out records of which no token of an answer stays within --seq."""
        made, settings = super()._prepare_dataset(dataset, *args, **kwargs), self.run.settings
        if not len(made):
            raise MegatrainError(f"{settings.method}: seq={settings.seq} is too short for all {len(dataset):,} "
                                 "records: no token of an answer is left of any; give a larger --seq")
        if len(made) < len(dataset):
            say(f"{settings.method}: {len(dataset) - len(made):,} of {len(dataset):,} records are left out: --seq "
                f"{settings.seq} has no room for an answer behind their prompts")
        return made

    def run_steps(self, checkpoint: Path | None) -> int:
        """The signal that asked it to stop; 0: it came to the end."""
        team, stopping = self.run.team, self.run.settings.early_stopping
        requests, tracing = Requests(team), mt.trace(self.model) if team.first else contextlib.nullcontext()
        with tracing as trace, hearing(requests.heard):
            self.remove_callback(PrinterCallback)
            for callback in [requests, *([Bar(say, trace)] if team.first else []),
                             *([EarlyStoppingCallback(stopping)] if stopping else [])]:
                self.add_callback(callback)
            try:
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            finally:
                self.finish_saving()
            if skipped := self._optimizer().skipped_steps:
                say(f"{skipped} steps had gradients that are not finite and changed nothing; a lower --lr than "
                    f"{self.run.settings.lr:g} may do")
        return requests.stop

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            step, now = self.state.global_step, time.perf_counter()
            (before, then), self._logged = self._logged, (step, now)
            logs |= {"bound": mt.last_step(self.model).bound,
                     "tokens_per_second": round((step - before) * self.run.settings.tokens / (now - then), 1)}
        super().log(logs, start_time)
        line = self.state.log_history[-1]                # with what the trainer itself adds
        if self.run.team.first and ("loss" in line or "eval_loss" in line):
            with Path(self.args.output_dir, LOG).open("a") as out:
                out.write(json.dumps({"step": self.state.global_step, "gpus": self.run.team.size} | line) + "\n")

    def rose(self) -> str:
        """Words for losses that went up instead of down; "": they did not."""
        first = [line["loss"] for line in self.state.log_history if "loss" in line][:1]
        for name, what in (("eval_loss", "held-out loss"), ("loss", "loss")):
            all_ = [line[name] for line in self.state.log_history if name in line]
            last = all_[-max(1, len(all_) // 10):]
            if first and last and not sum(last) / len(last) <= first[0] + max(ROSE, 0.2 * abs(first[0])):
                return f"the {what} rose from {first[0]:.4g} to {sum(last) / len(last):.4g}"
        return ""

    def _optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)      # accelerate wraps it

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Begins one of mt.save, written while training goes on. It counts with trainer_state.json, its last file."""
        self.finish_saving()
        name, beside = f"checkpoint-{self.state.global_step}", Path(self.args.output_dir, UNFINISHED)
        best = Path(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
        if best.name == name or best.is_dir():
            self.state.best_model_checkpoint = str(best)

        def small() -> None:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            self.processing_class.save_pretrained(beside)
            if self.run.settings.lora is not None:       # what PEFT's from_pretrained reads: the adapters alone
                self.model.save_pretrained(beside, save_embedding_layers=False, selected_adapters=["default"])
            self.state.save_to_json(str(beside / WHOLE))

        self.run.team.first_does(small)
        with self.run.team.as_one():
            self._save_rng_state(str(beside))
        self.run.team.first_does(lambda: self.run.owned.begin(name, files_of(beside)))
        asked = {"lora": self.run.settings.lora, "base": self.run.settings.base}         # what resume compares
        self._saving = mt.save(self.model, self._optimizer(), beside.parent / name, scheduler=self.lr_scheduler,
                               extra=asked, asynchronous=True)

    def finish_saving(self) -> None:
        """Waits for the checkpoint under way, which counts then; older ones may go. Interrupted, it is under way
        still."""
        if (saving := self._saving) is None:
            return
        try:
            saving.wait()
        except MegatrainError:
            self._saving = None
            raise
        if self.run.team.first:
            beside = saving.folder.parent / UNFINISHED
            for path in sorted(beside.iterdir(), key=lambda p: p.name == WHOLE):
                sync(path)
                path.rename(saving.folder / path.name)
            sync(saving.folder)
            beside.rmdir()
            for old in checkpoints(saving.folder.parent)[:-self.args.save_total_limit]:
                if str(old) != self.state.best_model_checkpoint:
                    self.run.owned.remove(old.name)
        self._saving = None

    def training_step(self, *args: Any, **kw: Any) -> Any:
        if self._saving is not None and self._saving.over:
            self.finish_saving()
        self._logged = self._logged or (self.state.global_step, time.perf_counter())
        return super().training_step(*args, **kw)

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """The weights come with the states, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            mt.load(self.model, self._optimizer(), checkpoint, scheduler=self.lr_scheduler, convert=self.run.convert)

    def _load_best_model(self) -> None:
        self.finish_saving()
        say(f"the best was {Path(self.state.best_model_checkpoint).name}, with {self.state.best_metric:.4g}")
        mt.load(self.model, self._optimizer(), self.state.best_model_checkpoint)

    def restore(self, checkpoint: Path) -> None:
        """Of a run whose last step was made, and its model not written: the weights that it ends with."""
        self.state = TrainerState.load_from_json(str(checkpoint / WHOLE))
        if self.run.settings.early_stopping and (best := self.state.best_model_checkpoint):
            checkpoint = checkpoint.with_name(Path(best).name)
        mt.load(self.model, self._optimizer(), checkpoint, convert=self.run.convert)


class OfRows(Streamed):
    """Of rows of tokens: the loss is the model's own, whose head the engine runs; the same rows for any number of
    processes; what is held out is told in nats per target, whatever rows are together."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Without a cache of keys and values: with one, a packed row is taken for one sequence."""
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kw)

    def get_train_dataloader(self) -> Any:
        made = super().get_train_dataloader()
        if self._fills():
            made.set_sampler(made.batch_sampler.batch_sampler.sampler)   # resumed, it hears of epochs from there alone
        return made

    def _fills(self) -> bool:
        """Other models take a mean over each micro-batch: of none it is no number."""
        return self.run.team.size > 1 and self.model_accepts_loss_kwargs

    def _get_train_sampler(self, *args: Any) -> Any:
        if not self._fills():
            return super()._get_train_sampler(*args)
        return Filled(SeedableRandomSampler(self.train_dataset), self._train_batch_size * self.run.team.size)

    def _get_eval_sampler(self, rows: Any) -> Any:
        return Filled(SequentialSampler(rows), self.args.eval_batch_size * self.run.team.size)

    def evaluation_loop(self, *args: Any, **kw: Any) -> Any:
        self._seen = torch.zeros(2, dtype=torch.float64, device=self.args.device)        # sum of losses, targets
        found = super().evaluation_loop(*args, **kw)
        total, targets = self.accelerator.reduce(self._seen, "sum").tolist()
        found.metrics["eval_loss"] = total / targets if targets else math.nan
        return found

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[Any, None, None]:
        inputs = self._prepare_inputs(inputs)
        targets = (inputs["labels"][:, 1:] != IGNORED).sum()
        with torch.no_grad():
            loss = model(**inputs, use_cache=False).loss
        self._seen += torch.where(targets > 0, torch.stack([loss.double() * targets, targets]), 0)   # nothing is read
        return loss, None, None


class Filled(Sampler[int | None]):
    """Rows in the order that one process takes them in, and then none, up to a whole number of `together`: so each step
    of several processes has the rows of one process's, the last one of an epoch too, and no row is evaluated twice."""

    def __init__(self, rows: Sampler[int], together: int) -> None:
        self._rows, self._more = rows, -len(rows) % together

    def __len__(self) -> int:
        return len(self._rows) + self._more

    def __iter__(self) -> Iterator[int | None]:
        return itertools.chain(self._rows, itertools.repeat(None, self._more))

    def set_epoch(self, epoch: int) -> None:
        """Of the order; accelerate calls it where there is one."""
        if isinstance(self._rows, SeedableRandomSampler):
            self._rows.set_epoch(epoch)


# ---- its arguments -------------------------------------------------------------------------------

def classes(method: str) -> tuple[type, type]:
    """Of a trainer, and of its arguments. With sft the rows are ours, and so nothing is left for TRL's trainer."""
    if method == "sft":
        return Trainer, TrainingArguments
    module, name = CLASSES[method]
    found = importlib.import_module(module)
    return getattr(found, f"{name}Trainer"), getattr(found, f"{name}Config")


def given(settings: Settings) -> dict[str, Any]:
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
             for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value, default=str).strip('"'))]
    found = parser.parse_args(["--output_dir", str(settings.out), *words])
    if found.label_smoothing_factor:                     # Trainer's own loss would read logits, which no plan counts
        raise MegatrainError(f"label_smoothing_factor: the loss of {settings.method} has no such smoothing; omit it")
    return {name: getattr(found, name) for name in settings.more}


def rewards(settings: Settings) -> Callable[..., Any] | str:
    """Of --reward: a function in a file of Python, or a reward model's name."""
    if settings.reward is None:
        raise MegatrainError("--method grpo needs --reward FILE.py:FUNCTION (of completions and the record's fields; "
                             "it returns a number for each), or a reward model")
    path, _, name = settings.reward.rpartition(":")
    if not path.endswith(".py"):
        return settings.reward
    found = runpy.run_path(path).get(name) if Path(path).is_file() else None
    if not callable(found):
        raise MegatrainError(f"reward={settings.reward}: there is no file {path} with a function {name}")
    return found


def arguments(settings: Settings, held: bool) -> Any:
    """TRL's, of a run; held: something is held out."""
    s = settings
    micro_rows = s.tokens // (s.seq * SEQUENCES.get(s.method, 1)) // s.gpus // s.micro
    # Of a reference model, and a reward model: TRL would put them on the GPU, whole.
    beside = {"model_init_kwargs": {"device_map": None, "dtype": s.dtype}}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    ours = dict(                                         # no autocast; what is kept for backward, the plan says
        output_dir=s.out, per_device_train_batch_size=micro_rows, per_device_eval_batch_size=micro_rows, seed=s.seed,
        gradient_accumulation_steps=s.micro, max_steps=s.steps, learning_rate=s.lr, lr_scheduler_type=s.schedule,
        max_grad_norm=s.clip, gradient_checkpointing=False, bf16=False, logging_steps=s.log_every, disable_tqdm=True,
        logging_first_step=True, report_to=[] if s.report_to == "none" else [s.report_to], use_cpu=s.device == "cpu",
        eval_strategy="steps" if held else "no", eval_steps=s.eval_every, dataloader_pin_memory=s.device == "cuda",
        save_strategy="steps", save_steps=s.save_every, save_total_limit=s.keep)
    usual = dict(warmup_steps=int(s.warmup * s.steps), log_level_replica="error", logging_nan_inf_filter=False,
                 accelerator_config={"non_blocking": s.device == "cuda"}, **best if s.early_stopping else {})
    if s.method == "sft":
        ours |= dict(prediction_loss_only=True, remove_unused_columns=False)
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
        usual |= dict(router_aux_loss_coef=0.0)
    return kind(**ours, **usual | given(s))


def trainer_of(run: Run, model: Any, tokenizer: Any, train: Any, held: Any, how: dict[str, Any], reward: Any) -> Any:
    """TRL's, with its model streamed. how: as mt.stream takes it. reward: with grpo."""
    import datasets

    settings = run.settings
    more, rows, (kind, _) = {}, settings.method == "sft", classes(settings.method)
    if rows:
        if hasattr(words := model.config.get_text_config(), "output_router_logits"):
            words.output_router_logits = False           # a mixture's loss is that of its words
        # Rows that documents share are one sequence, for flash's kernels; others [B, S], for cuDNN's, which are faster.
        shared = any(part.begins[:, 1:].any() for part in (train, held))
        more = {"data_collator": collate(settings.device == "cuda" and shared), "train_dataset": train,
                "eval_dataset": Rows(*(part[:HELD_OUT_ROWS] for part in (held.ids, held.learned, held.begins)))
                if len(held) else None}
    else:
        # What TRL makes of records it keeps beside them, in a folder that all processes see and no other run: the cache
        # of `datasets` knows nothing of this package's version.
        for name, part in {"train_dataset": train, "eval_dataset": held}.items():
            where = f"{run.scratch}/{name}"
            if part:
                run.team.first_does(lambda part=part, to=where: _as_table([p.record for p in part]).save_to_disk(to))
                more[name] = datasets.load_from_disk(where)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def adamw(model: Any) -> mt.AdamW:
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if p.ndim >= 2]},
                  {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
        return mt.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(args.adam_beta1, settings.beta2),
                        eps=args.adam_epsilon, weight_decay=settings.weight_decay, states=settings.states)

    more |= {} if reward is None else {"reward_funcs": reward}
    try:
        args = arguments(settings, bool(len(held)))
        with _left_alone(model):
            return mt.stream_trainer(
                type(kind.__name__, (OfRows if rows else Streamed, kind), {"run": run}), model, args, optimizer=adamw,
                stream_with=how, processing_class=tokenizer, **more)
    except ValueError as why:                            # of TRL, about arguments that do not go together
        raise MegatrainError(f"{settings.method}: {why}") from None


def _as_table(records: list[dict[str, Any]]) -> Any:
    """For TRL, with the fields of all records: `datasets` takes those of the first, and gives each object of a column
    the keys of all others, which a template would show."""
    from datasets import Dataset, Features, Json, Value
    from trl import extract_prompt

    columns = {name: {type(r[name]) for r in records if r.get(name) is not None} for name in
               dict.fromkeys(name for r in records for name in r)}
    if "prompt" in columns:
        records = [r if "prompt" in r else extract_prompt(r) for r in records]
    kinds = {name: Value("string") if found == {str} else Value("bool") if found == {bool} else Json()
             for name, found in columns.items()}
    none = {"chat_template_kwargs": {}}
    return Dataset.from_list([{name: none.get(name) if r.get(name) is None else r[name] for name in columns}
                              for r in records], features=Features(kinds))


@contextlib.contextmanager
def _left_alone(model: Any) -> Iterator[None]:
    """TRL makes a trainer: adapters over codes would become bfloat16, and what it uses would be written into the
    config, which is saved with the model."""
    there = [(vars(model), "is_loaded_in_4bit"), (vars(model), "is_loaded_in_8bit"),
             (vars(model.config.get_text_config()), "router_aux_loss_coef")]
    before = [(own, name, own.get(name, there)) for own, name in there]        # `there` itself: it has none
    vars(model).update(is_loaded_in_4bit=False, is_loaded_in_8bit=False)
    try:
        yield
    finally:
        for own, name, value in before:
            own.pop(name, None)
            own |= {} if value is there else {name: value}


class Requests(TrainerCallback):
    """SIGINT and SIGTERM: a checkpoint after this step, and the end; a second SIGINT interrupts at once. SIGUSR1: a
    checkpoint. Python runs a handler between two instructions of the main thread; it only leaves a note. What one
    process of a team was told all do, behind the same step. stop: the signal that asked for the end, 0: none."""

    def __init__(self, team: Team) -> None:
        self._team, self.save, self.stop = team, False, 0
        self._told = 0                   # this process, to stop

    def heard(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self._told:
            raise KeyboardInterrupt
        self.save = True
        if number != signal.SIGUSR1 and not self._told:
            self._told = number

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        save, self.save = self.save, False               # told from now on, it is for the next step
        save, self.stop = self._team.most(save, self._told)
        control.should_save |= save > 0
        control.should_log |= control.should_save or control.should_evaluate         # the last step saves
        control.should_training_stop |= self.stop > 0


class Bar(TrainerCallback):
    """A live line on a terminal; else a line with the loss every EVERY_S seconds, the first step's and the last one's
    too, and one for each evaluation and each checkpoint."""

    def __init__(self, say: Callable[[str], None], trace: mt.Trace) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TimeRemainingColumn

        self._say, self._trace, self._task, self._begun = say, trace, None, monotonic()
        self._told = -math.inf                       # when a line with the loss was written
        console = Console()                          # while it is drawn, rich writes other lines above it
        self._bar = Progress("step {task.completed}/{task.total}", BarColumn(bar_width=12),
                             "{task.fields[within]}{task.description}", TimeRemainingColumn(),
                             console=console, disable=not console.is_terminal, refresh_per_second=1)

    def __str__(self) -> str:
        """How far a step is that takes long: the bar's own thread asks when it draws."""
        return f"{self._trace.progress()}  " if monotonic() - self._begun >= LONG_S else ""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, within=self)
        self._bar.start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._bar.stop()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs and self._task is not None:
            text = (f"loss {logs['loss']:.4g}  norm {logs.get('grad_norm', math.nan):.3g}  "
                    f"{logs['tokens_per_second']:,.0f} tokens/s")
            self._bar.update(self._task, description=text)
            late = monotonic() - self._told >= EVERY_S or state.global_step == state.max_steps
            if late and not self._bar.console.is_terminal:
                self._say(f"step {state.global_step}/{state.max_steps}: {text}")
                self._told = monotonic()
        if "eval_loss" in logs:
            self._say(f"step {state.global_step}: held-out loss {logs['eval_loss']:.4f}")

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._say(f"step {state.global_step}: checkpoint-{state.global_step}")
