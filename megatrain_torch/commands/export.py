"""megatrain export."""
from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from ..base.limits import show_bytes
from . import folder, lora
from .say import say


def add(commands: Any) -> None:
    parser = commands.add_parser("export", help="a run's model as a folder in Hugging Face format", allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("to", type=Path, metavar="FOLDER", help="to make")
    parser.add_argument("--step", type=int, metavar="N",
                        help="of a checkpoint; default: the model at the end, or the last one")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: as it was trained")
    parser.add_argument("--merged", action="store_true", help="of a run with adapters: the model that it began with, "
                        "its weights of 16 or 32 bits read anew, with the adapters in them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    settings = folder.settings_of(args.run_folder)
    if args.to.exists():
        raise MegatrainError(f"{args.to} is there already; name a folder that is not")
    made(args.to.parent, "to")
    source = folder.source_of(str(args.run_folder), _step(args))
    if settings.lora is None and args.merged:
        raise MegatrainError(f"merged: {args.run_folder} has no adapters (lora), its weights themselves were trained; "
                             "leave --merged out")
    lora.check_packages(settings.lora is not None, "none")
    tokenizer = folder.load_tokenizer(source.words)
    if settings.lora is None:
        export(folder.load_model(source.model, args.dtype or settings.dtype), tokenizer, args.to)
    elif args.merged:
        export(_merged(source, args.dtype or settings.dtype), tokenizer, args.to)
    else:
        _adapter(source, tokenizer, args)
        return
    say(f"{source.adapter or source.model} is in {args.to}")


def _step(args: argparse.Namespace) -> Path | None:
    """The checkpoint that is asked for."""
    if args.step is None:
        return None
    found = {folder.step_of(p.name): p for p in folder.checkpoints(args.run_folder)}
    if args.step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise MegatrainError(f"step {args.step} has no checkpoint; there are {there}")
    return found[args.step]


def _merged(source: folder.Source, dtype: str) -> Any:
    """The model under an adapter, read anew, with the adapter in its weights."""
    kept = "" if source.base == "none" else (f"; it was trained over {source.base} codes of them, so it computes a "
                                             "little otherwise there")
    say(f"{source.adapter} goes into the weights of {source.model} in {dtype}, read anew{kept}")
    model = folder.load_model(source.model, dtype, base="whole")
    return lora.over(model, source.adapter).merge_and_unload()


def _adapter(source: folder.Source, tokenizer: Any, args: argparse.Namespace) -> None:
    if args.dtype is not None:
        raise MegatrainError(f"dtype={args.dtype}: of a whole model; adapters stay as they were trained: leave it out, "
                             "or --merged")
    half = Path(tempfile.mkdtemp(prefix=f".{args.to.name}.", dir=args.to.parent))
    with _whole(half, args.to):
        for path in source.adapter.glob("adapter_*"):
            shutil.copyfile(path, half / path.name)
        tokenizer.save_pretrained(half)
    say(f"the adapter of {source.adapter} is in {args.to}; it goes over {source.model}; --merged makes one "
        "model of both")


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
    adapter = isinstance(getattr(model, "peft_config", None), dict)
    need = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapter)
    free = shutil.disk_usage(to.parent).free
    if need > free:
        raise MegatrainError(f"{to}: the model takes {show_bytes(need)}, and {show_bytes(free)} are free in "
                             f"{to.parent}: make room, or name a folder on another disk")
    half = beside or Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    with _whole(half, to, whole):
        model.save_pretrained(half, **({"save_embedding_layers": False} if adapter else {}))
        tokenizer.save_pretrained(half)


@contextlib.contextmanager
def _whole(half: Path, to: Path, whole: Callable[[Path], None] = lambda _: None) -> Iterator[None]:
    """What is written into `half` meanwhile is `to` then, or nothing."""
    try:
        yield
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
