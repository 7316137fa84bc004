"""megatrain export."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..base.errors import MegatrainError
from . import folder, train
from .say import say


def add(commands: Any) -> None:
    parser = commands.add_parser("export", help="a run's model as a folder in Hugging Face format", allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("to", type=Path, metavar="FOLDER", help="to make")
    parser.add_argument("--step", type=int, metavar="N",
                        help="of a checkpoint; default: the model at the end, or the last one")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: as it was trained")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    settings = folder.settings_of(args.run_folder)
    if args.to.exists():
        raise MegatrainError(f"{args.to} is there already; name a folder that is not")
    train.made(args.to.parent, "to")
    source = folder.model_of(str(args.run_folder))
    if args.step is not None:
        found = {folder.step_of(p.name): str(p) for p in folder.checkpoints(args.run_folder)}
        if args.step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise MegatrainError(f"step {args.step} has no checkpoint; there are {there}")
        source = found[args.step]
    model = folder.load_model(source, args.dtype or settings.dtype)
    train.export(model, folder.load_tokenizer(source), args.to)
    say(f"{source} is in {args.to}")
