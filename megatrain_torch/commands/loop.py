"""Trainers of TRL around a streamed model.

They do what they do well: methods and their losses, accumulation, schedules, the data's order and its place in it,
early stopping, TensorBoard and Weights & Biases. What they are given here: mt.AdamW, whose exact clipping and norm
need no pass of their own over the gradients; checkpoints of mt.save, written while training goes on; a log with what
bound each step; signals that save and stop.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import math
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
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from .folder import LOG, UNFINISHED, WHOLE, Owned, checkpoints, sync
from .launch import Team
from .rows import IGNORED
from .settings import say

LONG_S = 5.0                         # a step that takes longer tells how far it is
ROSE = 0.5                           # nats above the first loss: more than batches differ
EVERY_S = 30.0                       # without a terminal: between two lines with the loss


@dataclass
class Run:
    """What a command knows of a run. owned: the folder; None where another process of the team has it. tokens: of a
    step. asked: what a checkpoint notes of the settings. convert: as in mt.load, of what is resumed from. scratch: a
    folder for the time of the command, the same for all processes."""

    team: Team
    owned: Owned | None
    tokens: int
    asked: dict[str, Any]
    convert: bool
    scratch: str


class Streamed:
    """In front of a trainer of transformers or TRL whose model is streamed, with mt.AdamW as its optimizer.

    Attributes:
        run: what a command knows of the run. trace: of the model, None where another process has the folder.
    """

    run: Run
    trace: mt.Trace | None = None
    _logged: tuple[int, float] | None = None         # step, and when; None: before the first of this process
    _saving: mt.Saving | None = None

    # ---- log.jsonl ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            step, now = self.state.global_step, time.perf_counter()
            before, then = self._logged
            self._logged = (step, now)
            logs |= {"bound": mt.last_step(self.model).bound,
                     "tokens_per_second": round((step - before) * self.run.tokens / (now - then), 1)}
        super().log(logs, start_time)
        line = self.state.log_history[-1]                # with what the trainer itself adds
        if self.run.team.first and ("loss" in line or "eval_loss" in line):
            several = {"gpus": self.run.team.size} if self.run.team.size > 1 else {}
            with Path(self.args.output_dir, LOG).open("a") as out:
                out.write(json.dumps({"step": self.state.global_step} | line | several) + "\n")

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

    # ---- checkpoints: mt.save's, with Trainer's small files beside, trainer_state.json last ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Begins one: training goes on while the disk writes. It counts when it has its trainer_state.json."""
        self.finish_saving()
        name = f"checkpoint-{self.state.global_step}"
        beside = Path(self.args.output_dir, UNFINISHED)
        best = Path(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
        if best.name == name or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        self.run.team.first_does(lambda: self._make(beside))
        with self.run.team.as_one():
            self._save_rng_state(str(beside))
        self.run.team.first_does(lambda: self.run.owned.begin(name, {path.name: None for path in beside.iterdir()}))
        self._saving = mt.save(self.model, self._optimizer(), beside.parent / name, scheduler=self.lr_scheduler,
                               extra=self.run.asked, asynchronous=True)
        self.write_pages()

    def _make(self, beside: Path) -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        self.processing_class.save_pretrained(beside)
        if self.run.asked["lora"] is not None:           # what PEFT's from_pretrained reads: the adapters alone
            self.model.save_pretrained(beside, save_embedding_layers=False, selected_adapters=["default"])
        self.state.save_to_json(str(beside / WHOLE))

    def finish_saving(self) -> None:
        """Waits for the checkpoint under way; then older ones may go. Interrupted, it is under way still."""
        saving = self._saving
        if saving is None:
            return
        try:
            saving.wait()
        except MegatrainError:
            self._saving = None
            raise
        if self.run.team.first:
            self._name(saving)
        self._saving = None

    def _name(self, saving: mt.Saving) -> None:
        """A checkpoint that is written counts from now on."""
        beside = saving.folder.parent / UNFINISHED
        for path in sorted(beside.iterdir(), key=lambda p: p.name == WHOLE):
            sync(path)
            path.rename(saving.folder / path.name)
        sync(saving.folder)
        beside.rmdir()
        self.run.owned.made(saving.folder.name)
        kept = checkpoints(saving.folder.parent)
        for old in kept[:-self.args.save_total_limit]:
            if str(old) != self.state.best_model_checkpoint and (stays := self.run.owned.remove(old.name)):
                say(f"{old} is old, but {stays[0]} is not as this run wrote it: that stays")

    def training_step(self, *args: Any, **kw: Any) -> Any:
        if self._saving is not None and self._saving.over:
            self.finish_saving()
        if self._logged is None:
            self._logged = (self.state.global_step, time.perf_counter())
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

    def write_pages(self) -> None:
        """What `megatrain report` shows of the last steps."""
        if self.trace is None:
            return
        run = Path(self.args.output_dir)
        (run / "storage.html").write_text(mt.storage(self.model)._repr_html_())
        if steps := self.trace.steps(1):
            (run / "step.html").write_text(steps[-1]._repr_html_())
            with contextlib.suppress(MegatrainError):        # matplotlib is not needed for training
                self.trace.picture(run / "timeline.svg")


class OfRows(Streamed):
    """Of rows of tokens: the loss is the model's own, whose head the engine runs; the same rows for any number of
    processes; what is held out is told in nats per target, whatever rows are together."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Without a cache of keys and values: with one, a packed row is taken for one sequence."""
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, *args, **kw)

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
        if self.run.team.size == 1:
            return super()._get_eval_sampler(rows)
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
        self._seen += torch.stack([loss.double() * targets, targets]) if targets else 0
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


# ---- stopping and saving on request --------------------------------------------------------------

class Requests(TrainerCallback):
    """SIGINT and SIGTERM: a checkpoint after this step, and the end; a second SIGINT interrupts at once. SIGUSR1: a
    checkpoint. Python runs a handler between two instructions of the main thread; it only leaves a note. What one
    process of a team was told all do, behind the same step.

    Attributes:
        stop: the signal that asked for the end, 0: none.
    """

    def __init__(self, team: Team) -> None:
        self._team, self.save, self.stop = team, False, 0
        self._told = 0                   # this process, to stop

    def heard(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self._told:
            raise KeyboardInterrupt
        self.save = True
        if number != signal.SIGUSR1 and not self._told:
            self._told = number

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        save, self.save = self.save, False               # told from now on, it is for the next step
        save, self.stop = self._team.most(save, self._told)
        control.should_save |= save > 0
        control.should_training_stop |= self.stop > 0


# ---- what a person sees --------------------------------------------------------------------------

class Within:
    """As text: how far a step is that has taken LONG_S; of others "". The bar's own thread asks, ten times a second."""

    def __init__(self, trace: mt.Trace) -> None:
        self._trace, self._text, self._asked = trace, "", 0.0
        self.begin()

    def begin(self) -> None:
        self._begun = monotonic()

    def __str__(self) -> str:
        now = monotonic()
        if now - self._begun < LONG_S:
            return ""
        if now - self._asked >= 1:
            self._asked, self._text = now, f"{self._trace.progress()}  "
        return self._text


class Bar(TrainerCallback):
    """A live line on a terminal; else a line with the loss every EVERY_S seconds, the first step's and the last one's
    too, and one for each evaluation and each checkpoint. In a step that takes long the live line says how far it is."""

    def __init__(self, say: Callable[[str], None], trace: mt.Trace) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._say, self._within = say, Within(trace)
        self._told: float | None = None              # when a line with the loss was written, and what came since
        self._untold = ""
        console = Console()
        self._bar = Progress(TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=12),
                             TextColumn("{task.fields[within]}{task.description}"), TimeRemainingColumn(),
                             console=console, disable=not console.is_terminal)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, within=self._within)
        self._bar.start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._within.begin()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._bar.stop()
        if self._untold and not self._bar.console.is_terminal:
            self._tell(self._untold)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "loss" in logs and hasattr(self, "_task"):
            norm = logs.get("grad_norm", math.nan)
            text = f"loss {logs['loss']:.4g}  norm {norm:.3g}  {logs['tokens_per_second']:,.0f} tokens/s"
            self._bar.update(self._task, description=text)
            self._untold = f"step {state.global_step}/{state.max_steps}: {text}"
            if not self._bar.console.is_terminal and (self._told is None or monotonic() - self._told >= EVERY_S):
                self._tell(self._untold)
        if "eval_loss" in logs:
            self._line(f"step {state.global_step}: held-out loss {logs['eval_loss']:.4f}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._line(f"step {state.global_step}: checkpoint-{state.global_step}")

    def _tell(self, text: str) -> None:
        self._told, self._untold = monotonic(), ""
        self._say(text)

    def _line(self, text: str) -> None:
        if self._bar.live.is_started:
            self._bar.console.print(text, highlight=False)
        else:
            self._say(text)
