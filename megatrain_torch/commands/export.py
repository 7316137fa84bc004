"""megatrain export."""
from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from . import folder
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
    made(args.to.parent, "to")
    source = folder.model_of(str(args.run_folder))
    if args.step is not None:
        found = {folder.step_of(p.name): str(p) for p in folder.checkpoints(args.run_folder)}
        if args.step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise MegatrainError(f"step {args.step} has no checkpoint; there are {there}")
        source = found[args.step]
    model = folder.load_model(source, args.dtype or settings.dtype)
    export(model, folder.load_tokenizer(source), args.to)
    say(f"{source} is in {args.to}")


def made(out: Path, name: str = "out") -> Path:
    """A folder into which something can be written.

    Raises:
        MegatrainError: it cannot be made, or not be written; the message begins with `name`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise MegatrainError(f"{name}={out}: the folder cannot be made ({why.strerror}); name another") from None
    try:
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as why:
        raise MegatrainError(f"{name}={out}: nothing can be written there ({why.strerror}); name another") from None
    return out


def export(model: Any, tokenizer: Any, to: Path, beside: Path | None = None,
           whole: Callable[[Path], None] = lambda _: None) -> None:
    """A model, streamed or not, and its tokenizer; the folder has its name when it is whole.

    Args:
        to: a name that is free. beside: where it is until then; None: a folder that is made for it.
        whole: called with that folder, before it has its name.

    Raises:
        MegatrainError: there is no room for it, or something has the name.
    """
    need, free = sum(p.nbytes for p in model.parameters()), shutil.disk_usage(to.parent).free
    if need > free:
        raise MegatrainError(f"{to}: the model takes {show_bytes(need)}, and {show_bytes(free)} are free in "
                             f"{to.parent}: make room, or name a folder on another disk")
    half = beside or Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        model.save_pretrained(half)
        tokenizer.save_pretrained(half)
        half.chmod(0o777 & ~_umask())                # mkdtemp's is for its owner alone
        if os.path.lexists(to):
            raise MegatrainError(f"{to} is there already, and stays as it is; name another")
        whole(half)
        half.rename(to)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def _umask() -> int:
    """Of this process; there is no way to read it but to set it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
