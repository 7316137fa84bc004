"""megatrain train, and megatrain resume: what is checked, in which order, before anything is loaded; the data; the run.

Nothing of the run's folder is touched before all that can be refused was: arguments, packages, data, model, memory,
room on the disk. With several processes the first one checks and reads, and what it refuses is refused in all.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from . import data, folder, launch, models
from .folder import Owned
from .launch import Team, team_of
from .settings import Settings, Stopped, add_flags, given, in_flags, need, read_table, say

PLANNED = ("tokens", "seq", "vram", "host", "micro", "states", "nvme", "dtype", "products")


def add(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a model on texts, prompts or conversations")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with the same names; flags come first")
    parser.add_argument("--overwrite", action="store_true", help="remove what the run's folder has of a run before")
    add_flags(parser)
    parser.set_defaults(run=train, words=())
    parser = commands.add_parser("resume", help="go on with a run from its last checkpoint")
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--convert", action="store_true", help="round the checkpoint's states where states: or dtype: "
                        "of its config.yaml were changed to what holds less")
    parser.add_argument("--new-data", action="store_true", help="go on with data, or rows, other than those of the run "
                        "so far")
    parser.add_argument("--gpus", metavar="N", default=argparse.SUPPRESS,
                        help="GPUs of this machine to use; default: as many as the run had")
    parser.set_defaults(run=resume, words=())


def train(args: argparse.Namespace) -> int:
    check_packages()
    settings = Settings.of(given(args), str(args.config) if args.config else "command line")
    for name in ("model", "data"):
        if getattr(settings, name) is None:
            raise MegatrainError(f"which {name}? megatrain train MODEL DATA, or --config with a line `{name}: ...`")
    if settings.report_to != "none" and importlib.util.find_spec(settings.report_to) is None:
        raise MegatrainError(f"report_to={settings.report_to} is not installed: pip install {settings.report_to}")
    out = Path(settings.out or f"runs/{Path(settings.model).resolve().name}")
    if (out / "config.json").exists():
        raise MegatrainError(f"out={out} is a model's folder, and stays as it is; --out names another"
                             + ("" if settings.out else f", such as runs/{Path(settings.data[0]).stem}"))
    owned = Owned(out)

    def check() -> None:
        """What is there may go."""
        if owned.entries and not args.overwrite:
            raise MegatrainError(f"{out} has a run already: megatrain resume {out} goes on with it, --overwrite "
                                 "removes it, --out names another folder")
        owned.check_free()

    return _start(settings.with_(out=str(out)).for_machine(), args.words, owned, check)


def resume(args: argparse.Namespace) -> int:
    check_packages()
    run, owned = args.folder, Owned(args.folder)
    settings = folder.settings_of(run).with_(out=str(run))
    asked = Settings.of(given(args), "command line").gpus if hasattr(args, "gpus") else settings.gpus
    settings = settings.for_gpus(asked).for_machine()

    def check() -> Path:
        """The checkpoint to go on from: whole, with nothing in the run's way, and asked for as it was written."""
        if folder.is_finished(run):
            raise MegatrainError(f"{run} is finished: its model is {run / folder.FINAL}; megatrain "
                                 f"train {run} DATA --out OTHER trains that on")
        checkpoint = folder.last_checkpoint(run)
        try:
            found = mt.inspect_checkpoint(checkpoint)
            _check_state(checkpoint)
            whole = (checkpoint / "config.json").is_file() or not (checkpoint / folder.ADAPTER).is_file()
            dtype = read_table(checkpoint / "config.json").get("dtype") if whole else None
        except (MegatrainError, OSError) as why:
            older = [p for p in folder.checkpoints(run) if p != checkpoint]
            way = (f"remove {checkpoint}, and megatrain resume {run} goes on from {older[-1].name}" if older
                   else f"there is none before it; megatrain train --out {run} --overwrite begins again")
            raise MegatrainError(f"{why}; {way}") from None
        step = folder.step_of(checkpoint.name)
        ahead = [name for name in owned.strangers() if step < folder.step_of(name) <= settings.steps]
        ahead += [folder.FINAL] * os.path.lexists(run / folder.FINAL)
        if ahead:
            raise MegatrainError(f"{run / ahead[0]}: this run did not make it, or not as it is now: move it away")
        then = found.extra if isinstance(found.extra, dict) else {}
        for name, own in (("lora", None), ("base", "none")):
            if (before := then.get(name, own)) != (now := getattr(settings, name)):
                raise MegatrainError(f"{run / folder.CONFIG} says {name}: {now} now, and {checkpoint.name} was written "
                                     f"with {name}: {before}: put that back there")

        def kind(there: torch.dtype) -> torch.dtype:         # a model may have kept some in a type of their own
            return getattr(torch, settings.dtype) if str(there) == f"torch.{dtype}" else there

        if not args.convert and found.rounds(settings.states, kind):
            raise MegatrainError(
                f"{run / folder.CONFIG} says states: {settings.states}, dtype: {settings.dtype} now, and "
                f"{checkpoint.name} was written with states: {found.states}, dtype: {dtype or settings.dtype}, which "
                "holds more: put that back there to go on to the same bits, or megatrain resume "
                f"{run} --convert rounds")
        return checkpoint

    return _start(settings, args.words, owned, check, args.convert, args.new_data)


def _check_state(checkpoint: Path) -> None:
    """That Trainer's own files can be read, and are of this step."""
    from transformers import TrainerState
    from transformers.trainer_pt_utils import safe_globals

    path = checkpoint / folder.WHOLE
    try:
        state = TrainerState.load_from_json(str(path))
        if state.global_step != folder.step_of(checkpoint.name) or not isinstance(state.log_history, list):
            raise ValueError("it is not of this step")
        _ = 1.0 if state.epoch is None else state.epoch + 1.0
        for path in sorted(checkpoint.glob("rng_state*.pth")):       # of each process
            with safe_globals():
                torch.load(path, weights_only=True)
    except Exception as why:                         # of a class that is a stranger, and of a pickle
        raise MegatrainError(f"{path} cannot be read: {str(why)[:60]}") from None


def _start(settings: Settings, words: list[str], owned: Owned, check: Callable[[], Path | None],
           convert: bool = False, new_data: bool = False) -> int:
    """In this process, or in one for each GPU, which run the same command. check: gives the checkpoint to go on from,
    when the folder is locked."""
    models.check_packages(settings.lora is not None, settings.base)
    if settings.gpus > 1 and not launch.joins():
        return launch.launch(words, settings.gpus)
    import datasets

    began = time.perf_counter()
    datasets.disable_progress_bars()
    # Of names that TRL still gives to transformers.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
    with (team_of(settings.device) as team, contextlib.ExitStack() as stack,
          tempfile.TemporaryDirectory(prefix="megatrain-") as own):
        team.first_does(lambda: stack.enter_context(owned.locked()))
        checkpoint, scratch = team.first_does(lambda: (check(), own))
        _run(_prepared(settings, team, owned, checkpoint, convert, new_data, scratch), checkpoint, began)
    return 0


def _run(trainer: Any, checkpoint: Path | None, began: float) -> None:
    """Nobody has the trainer, and so the streamed model, when the team's group ends."""
    team, run = trainer.run.team, trainer.run.owned.run
    # A run that was stopped in its last step has none left to make: Trainer would make one more.
    if checkpoint is None or folder.step_of(checkpoint.name) < trainer.args.max_steps:
        if stopped := trainer.run_steps(checkpoint):
            team.first_does(lambda: None)            # all wait for it, which may be writing still
            say(f"stopped at step {trainer.state.global_step}; megatrain resume {run} goes on")
            raise Stopped(stopped)
    else:
        trainer.restore(checkpoint)
    team.first_does(lambda: _finish(trainer, time.perf_counter() - began))


def check_packages() -> None:
    """What the loop imports, all of them at once; and that this command starts its processes."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")       # TRL would tell of each run
    many = os.environ.get("WORLD_SIZE", "1")
    if many != "1" and not launch.joins():
        raise MegatrainError(f"this is one of {many} processes (WORLD_SIZE) that a launcher started: start one, and "
                             f"--gpus {many} starts the others")
    need("megatrain train needs", "transformers", "accelerate", "trl", "datasets", "rich", "yaml")


# ---- the run -------------------------------------------------------------------------------------

def _prepared(settings: Settings, team: Team, owned: Owned, checkpoint: Path | None, convert: bool, new_data: bool,
              scratch: str) -> Any:
    """The trainer of a run that was not refused. scratch: a folder for the time of the command, the same for all."""
    from . import loop

    out, lora = owned.run, settings.lora
    torch.manual_seed(settings.seed)
    with team.as_one():
        loop.given(settings)
        # mt.load takes all that a checkpoint of adapters has, frozen weights too: the model under them is read to have
        # their form. Other methods compare with it. That a run would begin with adapters over a model is refused there.
        whole = checkpoint is not None and lora is None and settings.method == "sft"
        name = str(checkpoint) if whole else models.beneath(settings)
        source = models.source_of(settings.model) if checkpoint is None else models.Source(name, str(checkpoint))
        # A checkpoint's tokenizer has the chat template that the run began with.
        tokenizer = models.load_tokenizer(source.words, settings.chat_template if checkpoint is None else None)
        config = models.load_config(source.model)
        settings = settings.for_model(config)
        if lora is not None:                             # before data and weights are read
            with in_flags("base"):
                models.lora_config(models.empty(config, settings.base), lora)
        reward = loop.rewards(settings) if settings.method == "grpo" else None
    train, held, identity = team.first_does(lambda: _read(
        settings, tokenizer, config, None if new_data or checkpoint is None else owned))
    with team.as_one():
        settings = settings.for_data(len(train))
        # TRL hashes the weights that it asks before the first step, in each process.
        model = models.load_model(source.model, settings.dtype, team.first or settings.method in ("dpo", "kto"),
                                  settings.base, settings.method == "reward")
        if len(tokenizer) > (there := model.get_input_embeddings().num_embeddings):
            raise MegatrainError(f"the tokenizer has {len(tokenizer)} tokens, and the model embeds only {there}")
        if lora is not None:
            model = models.adapted(model, lora, settings.seed)
    made = not out.exists()
    try:
        team.first_does(lambda: models.writable(out))
        with in_flags(*PLANNED, gpus=settings.gpus):
            settings, how = _planned(model, settings, team)
            begin = _first_line(model, settings, train, held)
            run = loop.Run(settings, team, owned, convert, scratch)
            trainer = loop.trainer_of(run, model, tokenizer, train, held, how, reward)
        team.first_does(lambda: _check_disk(trainer.model, settings, 0 if checkpoint is None else len(
            folder.checkpoints(out))))
        team.first_does(lambda: (owned.start if checkpoint is None else owned.go_on)(identity))
    except BaseException:
        if team.first and made:
            with contextlib.suppress(OSError):           # somebody put something there
                out.rmdir()
        raise
    if team.first:
        folder.write_yaml(out / folder.CONFIG, settings)
    say(begin)
    return trainer


def _finish(trainer: Any, seconds: float) -> None:
    """Writes the model, or the adapter, and says what may be done with it."""
    settings, owned = trainer.run.settings, trainer.run.owned
    half, final = owned.run / folder.HALF, owned.run / folder.FINAL
    owned.begin(folder.HALF)
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    models.save(trainer.model, trainer.processing_class, half, owned.run)
    owned.begin(folder.FINAL, folder.files_of(half))
    half.rename(final)
    rose, chat = trainer.rose(), " --chat" if owned.data.get("chat") else ""
    end = "done" if not rose else f"{rose}: the run diverged, and a lower --lr than {settings.lr:g} may not; over"
    say(f"{end} in {seconds:.0f} s; the {'model' if settings.lora is None else 'adapter'} is {final}")
    if settings.method != "reward":
        say(f"try it: megatrain generate {owned.run}{chat} --prompt '...'")
    if settings.push_to_hub is None:
        return
    import huggingface_hub

    try:
        there = huggingface_hub.create_repo(settings.push_to_hub, private=trainer.args.hub_private_repo, exist_ok=True)
        found = huggingface_hub.upload_folder(repo_id=there.repo_id, folder_path=final)
    except Exception as why:                             # of httpx, or of the hub
        raise MegatrainError(f"push_to_hub={settings.push_to_hub}: {why}; the model is {final}") from None
    say(f"{final} is on the hub: {found}")


def _planned(model: Any, settings: Settings, team: Team) -> tuple[Settings, dict[str, Any]]:
    """(with micro-batches and lines of the log, how to stream): on CUDA by the plan of least time for this machine."""
    if settings.device == "cpu":
        return settings.with_(micro=settings.micro or 1, log_every=settings.log_every or 1), {
            "device": "cpu", "plan": {"states": settings.states}, "host": settings.host, "nvme": settings.nvme,
            "products": settings.products}
    from .loop import LONG_S, classes

    plan = team.first_does(lambda: mt.plan(
        model, tokens=settings.tokens // settings.gpus, use_cache=False,
        trainer=None if settings.method == "sft" else classes(settings.method)[0],
        **{name: getattr(settings, name) for name in ("seq", "vram", "host", "micro", "states", "products", "nvme",
                                                      "gpus")}))
    say(str(plan).split("\n\n")[0])
    # While a loss is read the GPU waits: 16 ms of 1.37 s, of LoRA at 7B width with 32k tokens on an H200.
    lines = settings.log_every or (10 if plan.seconds < LONG_S else 1)
    return settings.with_(micro=plan.micro, log_every=lines), {"device": "cuda", "plan": plan}


def _check_disk(model: Any, settings: Settings, there: int) -> None:
    """Before a step is made: that the checkpoints which stay, the one being written and the model at the end fit.
    there: checkpoints of the run."""
    out, show = Path(settings.out), mt.show_bytes
    one, shared = mt.checkpoint_bytes(model, out, settings.states)
    at_end = sum(p.nbytes for p in model.parameters() if settings.lora is None or p.requires_grad)
    more = max(min(settings.keep + 1, math.ceil(settings.steps / settings.save_every)) - there, 1)
    need, free = more * one + shared + at_end, shutil.disk_usage(out).free
    if need > free:
        raise MegatrainError(f"out={out}: {more} more checkpoints of {show(one)}"
                             f"{f', {show(shared)} that they share,' if shared else ''} and the model take "
                             f"{show(need)}, and {show(free)} are free: make room, keep fewer (--keep "
                             f"{settings.keep}), or name a folder on another disk (--out)")


def _first_line(model: Any, settings: Settings, train: Any, held: Any) -> str:
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = f", {own / 1e6:,.1f} M of them in adapters that train" if settings.lora is not None else ""
    kept += f", linear weights in {settings.base}" if settings.base != "none" else ""
    there = (f"{train.targets:,} tokens to learn in {len(train)} rows of {settings.seq}, {held.targets:,} held out"
             if settings.method == "sft" else f"{len(train):,} records, {len(held):,} held out, by {settings.method}")
    return (f"{model.num_parameters() / 1e6:,.1f} M parameters{kept}, streamed, computing on {settings.device}; "
            f"{there}; {settings.steps} steps of {settings.tokens:,} tokens"
            f"{f' on {settings.gpus} GPUs' if settings.gpus > 1 else ''}; run in {settings.out}")


# ---- the data ------------------------------------------------------------------------------------

def _read(settings: Settings, tokenizer: Any, config: Any, like: Owned | None) -> tuple[Any, Any, dict[str, Any]]:
    """(what is trained on, what is held out, what tells them from other data). config: the model's. like: a run that
    had the same data."""
    told = None if like is None else like.data.get("date")
    date = datetime.fromisoformat(told) if isinstance(told, str) else datetime.now().replace(microsecond=0)
    parts, identity = parts_of(settings, tokenizer, date)
    identity |= {"date": date.isoformat()}               # templates may tell the model which day it is
    if settings.method == "sft":
        parts = data.rows_of(settings, tokenizer, parts, config)
        identity |= {"rows": "of one document each" if parts[0].alone else "of several documents"}
    if like is not None and (said := data.difference(like.data, identity)):
        raise MegatrainError(f"{said}. Put it back as it was to go on to the same bits; megatrain resume {like.run} "
                             "--new-data goes on with this")
    return *parts, identity


def parts_of(settings: Settings, tokenizer: Any, date: datetime | None = None
             ) -> tuple[tuple[list[Any], list[Any]], dict[str, Any]]:
    """(to train on, held out), and what tells them from others."""
    found = data.sources(settings, settings.data, tokenizer, date)
    mixed, held = data.mixed(found, settings.seed), []
    if isinstance(settings.validation, str):
        held = data.sources(settings, (settings.validation,), tokenizer, date)
        parts = data.shuffled(mixed, settings.seed), [d for s in held for d in s.documents]
    else:                                                # GRPO would write all its answers anew to be evaluated
        parts = data.held_out(mixed, 0.0 if settings.method == "grpo" else settings.validation, settings.seed)
    return parts, data.identity(settings, found, held)
