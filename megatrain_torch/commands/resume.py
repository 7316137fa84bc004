"""megatrain resume: what is checked before anything is loaded."""
from __future__ import annotations

import argparse
import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain_torch import MegatrainError

from ..base.strict import field, is_count, parsed, shown, table
from ..checkpoint import manifest
from ..checkpoint.parts import TRAINING
from ..checkpoint.restore import check, rounds
from . import folder, launch, lora
from .owned import Owned
from .settings import Settings, add_flags, given
from .team import team_of
from .train import check_packages, train_run
from .unsaid import for_gpus, for_machine


def add(commands: Any) -> None:
    resume = commands.add_parser("resume", help="go on with a run from its last checkpoint",
                                 allow_abbrev=False)
    resume.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    resume.add_argument("--convert", action="store_true", help="round the checkpoint's states where states: or dtype: "
                        "of its config.yaml were changed to what holds less")
    resume.add_argument("--new-data", action="store_true", help="go on with data, or rows, other than those of the run "
                        "so far")
    add_flags(resume, ("gpus",))
    resume.set_defaults(run=run, words=())


def run(args: argparse.Namespace) -> int:
    """megatrain resume."""
    check_packages()
    settings = folder.settings_of(args.folder).with_(out=str(args.folder))
    asked = Settings.of(given(args), "command line") if hasattr(args, "gpus") else settings
    settings = for_machine(for_gpus(settings, asked.gpus))
    lora.check_packages(settings.lora is not None, settings.base)
    if settings.gpus > 1 and not launch.joins():
        return launch.launch(args.words, settings.gpus)
    with team_of(settings.device) as team, contextlib.ExitStack() as stack:
        owned = team.first_does(lambda: stack.enter_context(Owned.opened(args.folder).locked()))
        checkpoint = team.of_first(team.first_does(lambda: _checked(owned, settings, args.convert)))
        train_run(settings, team, owned, checkpoint, args.convert, args.new_data)
    return 0


def _checked(owned: Owned, settings: Settings, convert: bool) -> Path:
    """The checkpoint to go on from."""
    run = owned.run
    if folder.is_finished(run) and not owned.changed(folder.FINAL):
        raise MegatrainError(f"{run} is finished: its model is {run / folder.FINAL}; megatrain "
                             f"train {run} DATA --out OTHER trains that on")
    checkpoint = folder.last_checkpoint(run)
    _check_whole(run, checkpoint)
    _check_clear(owned, folder.step_of(checkpoint.name), settings.steps)
    _check_beside(run, checkpoint, settings)
    if not convert:
        _check_kept(run, checkpoint, settings)
    return checkpoint


def _check_clear(owned: Owned, step: int, steps: int) -> None:
    """That what the run would still make, up to its last step, has its name free."""
    ahead = [name for name in owned.strangers() if name.split("/")[0] == folder.FINAL
             or (name not in owned.entries and step < folder.step_of(name) <= steps)]
    if ahead:
        raise MegatrainError(f"{owned.run / ahead[0]} is there, and this run did not make it, or not as it is now: it "
                             "stays; move it away, and resume")


def _check_whole(run: Path, checkpoint: Path) -> None:
    """Before anything is loaded: that no file of a checkpoint is gone or cut short."""
    try:
        check(checkpoint)
        _check_state(checkpoint)
    except (MegatrainError, OSError) as why:
        older = [p for p in folder.checkpoints(run) if p != checkpoint]
        way = (f"remove {checkpoint}, and megatrain resume {run} goes on from {older[-1].name}" if older
               else f"there is none before it; megatrain train --out {run} --overwrite begins again")
        raise MegatrainError(f"{why}; {way}") from None


def _check_state(checkpoint: Path) -> None:
    """That Trainer's own files can be read, and are of this step."""
    from transformers import TrainerState
    from transformers.trainer_pt_utils import safe_globals

    path, randoms = checkpoint / folder.WHOLE, sorted(checkpoint.glob("rng_state*.pth"))     # of each process
    found = table(parsed(path.read_bytes(), path), str(path))
    step = field(found, "global_step", is_count, "a whole number", str(path))
    if step != folder.step_of(checkpoint.name):
        raise MegatrainError(f"{path}: it is of step {step}")
    field(found, "epoch", lambda v: v is None or type(v) in (int, float), "a number", str(path))
    field(found, "log_history", lambda v: isinstance(v, list), "a list", str(path))
    for what, read in ((path, lambda: TrainerState.load_from_json(str(path))),
                       *((random, partial(torch.load, random, weights_only=True)) for random in randoms)):
        try:
            with safe_globals():
                read()
        except Exception as why:                     # of a class that is a stranger, and of a pickle
            raise MegatrainError(f"{what} cannot be read: {shown(why)}") from None
    folder.dtype_of(checkpoint)


def _check_beside(run: Path, checkpoint: Path, settings: Settings) -> None:
    """That adapters, and the model under them, are asked for as they were."""
    try:
        found = torch.load(checkpoint / TRAINING, weights_only=True, map_location="cpu")["extra"]
    except Exception as why:                         # of a pickle, and of what is none
        raise MegatrainError(f"{checkpoint / TRAINING} cannot be read: {shown(why)}") from None
    then = found if isinstance(found, dict) else {}
    for name, own in (("lora", None), ("base", "none")):
        if (before := then.get(name, own)) != (now := getattr(settings, name)):
            raise MegatrainError(f"{run / folder.CONFIG} says {name}: {now} now, and {checkpoint.name} was written "
                                 f"with {name}: {before}: put that back there")


def _check_kept(run: Path, checkpoint: Path, settings: Settings) -> None:
    """Before anything is loaded: that states and dtype of today hold all bits of the checkpoint's."""
    then = {"states": manifest.read(checkpoint)["states"], "dtype": folder.dtype_of(checkpoint)}
    today = {"states": settings.states, "dtype": settings.dtype}

    def kind(there: torch.dtype) -> torch.dtype:         # a model may have kept some in a type of their own
        return getattr(torch, today["dtype"]) if str(there) == f"torch.{then['dtype']}" else there

    if not rounds(checkpoint, settings.states, kind):
        return
    changed = [name for name in today if then[name] not in (None, today[name])]
    before, now = (", ".join(f"{name}: {values[name]}" for name in changed) for values in (then, today))
    raise MegatrainError(f"{run / folder.CONFIG} says {now} now, and {checkpoint.name} was written with {before}, "
                         f"which holds more: put {before} back there to go on to the same bits, or megatrain resume "
                         f"{run} --convert rounds to {now}")
