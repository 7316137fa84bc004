"""megatrain train, megatrain resume."""
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import megatrain_torch as mt

from .. import manifest
from ..errors import MegatrainError
from ..formats import master_bytes, moment_bytes
from ..limits import show_bytes
from ..restore import check, rounds
from . import folder
from .data import (
    Document,
    Rows,
    collate,
    documents,
    held_out,
    packed,
    prompts_too_long,
    records,
    why_alone,
)
from .say import say
from .settings import Settings, add_flags, given, read_yaml, write_yaml

HELD_OUT_ROWS = 200                  # at most, by default: an evaluation is a small part of a run
UNKNOWN = 0.02                       # share of the tokens, above which it is said
STEPS_LEAST = 20                     # times through the data, where `tokens` is not said


def add(commands: Any) -> None:
    train = commands.add_parser("train", help="train a model on texts, prompts or conversations", allow_abbrev=False)
    train.add_argument("model", nargs="?", help="folder in Hugging Face format, a run, or a name on the hub")
    train.add_argument("data", nargs="?", help="text, .jsonl, .json or .parquet, a folder, or a name on the hub")
    train.add_argument("--config", type=Path, metavar="FILE", help="YAML with the same names; flags come first")
    train.add_argument("--overwrite", action="store_true", help="remove what the run's folder has of a run before")
    add_flags(train)
    train.set_defaults(run=run)
    resume = commands.add_parser("resume", help="go on with a run from its last checkpoint",
                                 allow_abbrev=False)
    resume.add_argument("folder", type=Path, help="the run's folder")
    resume.add_argument("--convert", action="store_true", help="round the checkpoint's states where states: or dtype: "
                        "of its config.yaml were changed to what holds less")
    resume.set_defaults(run=again)


def run(args: argparse.Namespace) -> None:
    """megatrain train."""
    _check_packages()
    values = (read_yaml(args.config) if args.config else {}) | given(args)
    settings = Settings.of(values, str(args.config) if args.config else "command line")
    for name in ("model", "data"):
        if getattr(settings, name) is None:
            raise MegatrainError(f"which {name}? megatrain train MODEL DATA, or --config with a line `{name}: ...`")
    _check_reports(settings)
    out = Path(settings.out or f"runs/{Path(settings.model).resolve().name}")
    if (out / "config.json").exists():
        raise MegatrainError(f"out={out} is a model's folder, and stays as it is; --out names another"
                             + ("" if settings.out else f", such as runs/{Path(settings.data).stem}"))
    if (out / folder.CONFIG).exists():
        if not args.overwrite:
            raise MegatrainError(f"{out} has a run already: megatrain resume {out} goes on with it, --overwrite "
                                 "removes it, --out names another folder")
        _clear(out)
    _train(for_machine(settings.with_(out=str(out))), None)


def again(args: argparse.Namespace) -> None:
    """megatrain resume."""
    _check_packages()
    settings = folder.settings_of(args.folder).with_(out=str(args.folder))
    if (args.folder / folder.FINAL / "config.json").is_file():
        raise MegatrainError(f"{args.folder} is finished: its model is {args.folder / folder.FINAL}; megatrain train "
                             f"{args.folder} DATA --out OTHER trains that on")
    checkpoint = folder.last_checkpoint(args.folder)
    _check_whole(args.folder, checkpoint)
    settings = for_machine(settings)
    if not args.convert:
        _check_kept(args.folder, checkpoint, settings)
    for torn in folder.remove_torn(args.folder):
        say(f"{torn} was being written when the run ended: removed")
    folder.forget_after(args.folder, int(checkpoint.name.removeprefix("checkpoint-")))
    _train(settings, checkpoint, args.convert)


def _check_whole(run: Path, checkpoint: Path) -> None:
    """Before anything is loaded: that no file of a checkpoint is gone or cut short."""
    try:
        check(checkpoint)
    except MegatrainError as why:
        older = [p for p in folder.checkpoints(run) if p != checkpoint]
        way = (f"remove {checkpoint}, and megatrain resume {run} goes on from {older[-1].name}" if older
               else f"there is none before it; megatrain train --out {run} --overwrite begins again")
        raise MegatrainError(f"{why}; {way}") from None


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


def _clear(out: Path) -> None:
    """Removes what a run makes, and nothing else."""
    for path in [*out.glob("checkpoint-*"), out / folder.FINAL]:
        shutil.rmtree(path, ignore_errors=True)
    for name in (folder.LOG, folder.CONFIG, "plan.html", "step.html", "storage.html", "timeline.svg"):
        (out / name).unlink(missing_ok=True)


def _check_packages() -> None:
    """What the loop imports, all of them at once."""
    gone = [name for name in ("transformers", "accelerate", "rich", "yaml") if importlib.util.find_spec(name) is None]
    if gone:
        raise MegatrainError(f"megatrain train needs {' and '.join(gone)}: pip install "
                             f"{' '.join(gone).replace('yaml', 'pyyaml')}")


def _check_reports(settings: Settings) -> None:
    if settings.report_to != "none" and importlib.util.find_spec(settings.report_to) is None:
        raise MegatrainError(f"report_to={settings.report_to} is not installed: pip install {settings.report_to}")


# ---- what is not said ----------------------------------------------------------------------------

def device_of(asked: str | None) -> str:
    """Raises: MegatrainError: CUDA is asked for, and is not there."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise MegatrainError("device=cuda: torch sees no CUDA device here; use --device cpu")
    return device


def for_machine(settings: Settings) -> Settings:
    device = device_of(settings.device)
    if settings.nvme is not None and not Path(settings.nvme).is_dir():
        raise MegatrainError(f"nvme={settings.nvme}: there is no such directory; make one on the drive that is to hold "
                             "states")
    if device == "cpu":
        # Torch's threads spin while they wait for each other: one core is left to the engine's.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    return settings.with_(device=device, dtype=settings.dtype or ("bfloat16" if device == "cuda" else "float32"))


def for_model(settings: Settings, config: Any) -> Settings:
    most = getattr(config, "max_position_embeddings", None) or settings.seq or 4096
    seq = settings.seq or min(4096 if settings.device == "cuda" else 256, most)
    if seq > most:
        raise MegatrainError(f"seq={seq}: the model was made for {most} positions at most; --seq {most} or less")
    return settings.with_(seq=seq)


def _for_data(settings: Settings, there: int) -> Settings:
    """Tokens of a step, how many steps, and what is done how often; there: rows of the data."""
    s = settings
    if s.tokens is None:
        usual = (65536 if s.device == "cuda" else 2048) // s.seq
        s = s.with_(tokens=max(1, min(usual, there // STEPS_LEAST)) * s.seq)
    if s.tokens % s.seq:
        raise MegatrainError(f"tokens={s.tokens}, seq={s.seq}: a step is a whole number of rows; "
                             f"nearest: tokens={max(1, round(s.tokens / s.seq)) * s.seq}")
    if s.tokens // s.seq > there:
        raise MegatrainError(f"tokens={s.tokens}: the data has {there} rows of {s.seq} tokens; --tokens "
                             f"{there * s.seq} takes them all in one step, fewer make more steps")
    if s.micro and (s.tokens // s.seq) % s.micro:
        rows = s.tokens // s.seq
        fit = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise MegatrainError(f"micro={s.micro}: {rows} rows (tokens / seq) cannot be cut into so many equal parts; "
                             f"{fit} can")
    steps = s.steps or math.ceil(s.epochs * there / (s.tokens // s.seq))
    return s.with_(steps=steps, eval_every=s.eval_every or max(1, steps // 10),
                   save_every=s.save_every or max(1, steps // 5))


# ---- the run -------------------------------------------------------------------------------------

def _train(settings: Settings, checkpoint: Path | None, convert: bool = False) -> None:
    began = time.perf_counter()
    torch.manual_seed(settings.seed)
    source = str(checkpoint or folder.model_of(settings.model))
    tokenizer = folder.load_tokenizer(source)
    settings = for_model(settings, folder.load_config(source))
    parts = _parts(settings, tokenizer)
    train, held = _rows(settings, tokenizer, parts)
    # What no packing would allow is refused before the model is loaded.
    _for_data(settings, sum(1 if d.whole else math.ceil(len(d) / settings.seq) for d in parts[0]))
    model = folder.load_model(source, settings.dtype)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise MegatrainError(f"the tokenizer has {len(tokenizer)} tokens and the model embeds "
                             f"{model.get_input_embeddings().num_embeddings}: they are not of one model")
    flat = settings.device == "cuda"                 # rows of a micro-batch are joined then: they share a row anyhow
    if (flat or train.shared or held.shared) and (why := why_alone(model, settings.seq, flat)):
        packed_rows = len(train)
        train, held = _rows(settings, tokenizer, parts, alone=True)
        say_alone(why, packed_rows, len(train))
    settings = _for_data(settings, len(train))
    out = made(Path(settings.out))
    model, settings = _streamed(model, settings, out)
    _check_disk(model, settings)
    write_yaml(out / folder.CONFIG, settings)
    _say_begin(model, settings, train, held)
    stopped = _loop(model, tokenizer, settings, train, held, checkpoint, convert)
    if stopped is not None:
        say(f"stopped at step {stopped}; megatrain resume {out} goes on")
        return
    export(model, tokenizer, out / folder.FINAL)
    say(f"done in {time.perf_counter() - began:.0f} s; the model is {out / folder.FINAL}\n"
        f"try it: megatrain generate {out} --prompt '...'     look: megatrain report {out}")


def _parts(settings: Settings, tokenizer: Any) -> tuple[list[Document], list[Document]]:
    """To train on, and held out."""
    found = documents(records(settings.data, settings.split), tokenizer, settings.column, settings.data)
    _say_unknown(found, tokenizer)
    return held_out(found, settings.validation, settings.seed)


def _rows(settings: Settings, tokenizer: Any, parts: tuple[list[Document], list[Document]],
          alone: bool = False) -> tuple[Rows, Rows]:
    filler = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    rows = [packed(part, settings.seq, filler, alone) for part in parts]
    if rows[0].targets == 0:
        if parts[0] and (why := prompts_too_long(parts[0], settings.seq)):
            raise MegatrainError(f"{settings.data}: {why}")
        tokens = sum(len(d) for part in parts for d in part)
        raise MegatrainError(f"the data has {tokens} tokens; {settings.validation:.0%} of them are held "
                             f"out (--validation), and the rest, in rows of {settings.seq} (--seq), has none to learn")
    return rows[0], rows[1]


def _say_unknown(found: list[Document], tokenizer: Any) -> None:
    """A tokenizer of another language or alphabet makes the same token of all that it does not know."""
    unknown = tokenizer.unk_token_id
    share = sum(int((d.ids == unknown).sum()) for d in found) / sum(map(len, found)) if unknown is not None else 0
    if unknown != tokenizer.eos_token_id and share > UNKNOWN:
        say(f"{share:.0%} of the data's tokens are {tokenizer.unk_token!r}, which stands for what the model's "
            "tokenizer does not know; it will write that too")


def _streamed(model: Any, settings: Settings, out: Path) -> tuple[Any, Settings]:
    """The model, streamed; on CUDA by the plan of least time for this machine."""
    if settings.device == "cpu":
        stream = {"plan": {"states": settings.states}, "host": settings.host, "nvme": settings.nvme}
        return mt.stream(model, "cpu", **stream), settings.with_(micro=settings.micro or 1)
    plan = mt.plan(model, tokens=settings.tokens, seq=settings.seq, vram=settings.vram, host=settings.host,
                   micro=settings.micro, states=settings.states, nvme=settings.nvme)
    (out / "plan.html").write_text(plan._repr_html_())
    say(str(plan).split("\n\n")[0])
    return mt.stream(model, "cuda", plan=plan), settings.with_(micro=plan.micro)


def _say_begin(model: Any, settings: Settings, train: Rows, held: Rows) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{parameters / 1e6:,.1f} M parameters, streamed, computing on {settings.device}; "
        f"{train.targets:,} tokens to learn in {len(train)} rows of {settings.seq}, {held.targets:,} held out; "
        f"{settings.steps} steps of {settings.tokens:,} tokens; run in {settings.out}")
    say_cut(train.cut + held.cut, settings.seq)


def say_cut(cut: int, seq: int) -> None:
    if cut:
        say(f"{cut} conversations are longer than {seq} tokens and lost their end; --seq makes room")


def say_alone(why: str, packed_rows: int, rows: int) -> None:
    say(f"{why}; so each has rows of its own, filled up at the end: {rows} rows, not {packed_rows}")


def _loop(model: Any, tokenizer: Any, settings: Settings, train: Rows, held: Rows,
          checkpoint: Path | None, convert: bool) -> int | None:
    """The step at which it was asked to stop; None: it came to the end."""
    from .loop import Bar, Requests, StreamedTrainer

    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2]},
              {"params": no_decay, "weight_decay": 0.0}]
    opt = mt.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(0.9, settings.beta2),
                   weight_decay=settings.weight_decay, states=settings.states)
    requests, flat = Requests(), settings.device == "cuda" and not train.alone
    with mt.trace(model) as trace, requests.listening():
        trainer = StreamedTrainer(
            model, _arguments(settings, bool(len(held))), collate(flat), train,
            _some(held, HELD_OUT_ROWS) if len(held) else None, processing_class=tokenizer, optimizers=(opt, None),
            callbacks=[requests, Bar(say, trace)], trace=trace, tokens=settings.tokens, convert=convert)
        trainer.remove_callback(_printer())
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            trainer.finish_saving()
        if opt.skipped_steps:
            say(f"{opt.skipped_steps} steps had gradients that are not finite and changed nothing; a lower --lr than "
                f"{settings.lr:g} may do")
        if requests.stop and trainer.state.global_step < settings.steps:
            return trainer.state.global_step
        trainer.write_pages()
    return None


def _check_disk(model: Any, settings: Settings) -> None:
    """Before a step is made: that the checkpoints which stay, the one being written and the model at the end fit."""
    out, weights = Path(settings.out), sum(p.nbytes for p in model.parameters())
    one = weights + sum(master_bytes(settings.states, p.dtype) * p.numel()
                        + moment_bytes(settings.states, p.dtype, p.numel()) for p in model.parameters())
    more = min(settings.keep + 1, math.ceil(settings.steps / settings.save_every)) - len(folder.checkpoints(out))
    need, free = max(more, 1) * one + weights, shutil.disk_usage(out).free
    if need > free:
        raise MegatrainError(f"out={out}: {max(more, 1)} more checkpoints of {show_bytes(one)} and the model take "
                             f"{show_bytes(need)}, and {show_bytes(free)} are free: make room, keep fewer (--keep "
                             f"{settings.keep}), or name a folder on another disk (--out)")


def _some(rows: Rows, most: int) -> Rows:
    return Rows(rows.ids[:most], rows.positions[:most], rows.labels[:most])


def _printer() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


def _arguments(settings: Settings, held: bool) -> Any:
    from transformers import TrainingArguments

    s, micro_rows = settings, settings.tokens // settings.seq // settings.micro
    return TrainingArguments(
        output_dir=s.out, per_device_train_batch_size=micro_rows, gradient_accumulation_steps=s.micro,
        per_device_eval_batch_size=micro_rows, max_steps=s.steps, learning_rate=s.lr, lr_scheduler_type=s.schedule,
        warmup_steps=int(s.warmup * s.steps), max_grad_norm=s.clip, seed=s.seed, logging_steps=s.log_every,
        logging_first_step=True, eval_strategy="steps" if held else "no", eval_steps=s.eval_every,
        save_strategy="steps", save_steps=s.save_every, save_total_limit=s.keep, prediction_loss_only=True,
        report_to=[] if s.report_to == "none" else [s.report_to], use_cpu=s.device == "cpu", disable_tqdm=True,
        dataloader_pin_memory=False, remove_unused_columns=False)


def export(model: Any, tokenizer: Any, to: Path) -> None:
    """A model, streamed or not, and its tokenizer; the folder has its name when it is whole.

    Raises:
        MegatrainError: there is no room for it.
    """
    need, free = sum(p.nbytes for p in model.parameters()), shutil.disk_usage(to.parent).free
    if need > free:
        raise MegatrainError(f"{to}: the model takes {show_bytes(need)}, and {show_bytes(free)} are free in "
                             f"{to.parent}: make room, or name a folder on another disk")
    beside = to.with_name(to.name + ".unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(to)
    beside.rename(to)
