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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import megatrain_torch as mt

from ..base.errors import MegatrainError
from ..base.formats import master_bytes, moment_bytes
from ..base.limits import show_bytes
from ..base.strict import field, is_count, parsed, shown, table
from ..checkpoint import manifest
from ..checkpoint.restore import check, rounds
from . import folder, mixture
from .data import (
    Document,
    Rows,
    collate,
    held_out,
    packed,
    prompts_too_long,
    why_alone,
)
from .flags import Flags
from .owned import Owned
from .say import Stopped, say
from .settings import DATA, Settings, add_flags, given, read_yaml, write_yaml

HELD_OUT_ROWS = 200                  # at most, by default: an evaluation is a small part of a run
UNKNOWN = 0.02                       # share of the tokens, above which it is said
STEPS_LEAST = 20                     # times through the data, where `tokens` is not said


def add(commands: Any) -> None:
    train = commands.add_parser("train", help="train a model on texts, prompts or conversations", allow_abbrev=False)
    train.add_argument("model", nargs="?", metavar="MODEL", help="folder in Hugging Face format, a run, or a name on "
                       "the hub")
    train.add_argument("data", nargs="*", metavar="DATA", help=DATA)
    train.add_argument("--config", type=Path, metavar="FILE", help="YAML with the same names; flags come first")
    train.add_argument("--overwrite", action="store_true", help="remove what the run's folder has of a run before")
    add_flags(train)
    train.set_defaults(run=run)
    resume = commands.add_parser("resume", help="go on with a run from its last checkpoint",
                                 allow_abbrev=False)
    resume.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    resume.add_argument("--convert", action="store_true", help="round the checkpoint's states where states: or dtype: "
                        "of its config.yaml were changed to what holds less")
    resume.add_argument("--new-data", action="store_true", help="go on with data, or rows, other than those of the run "
                        "so far")
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
                             + ("" if settings.out else f", such as runs/{Path(settings.data[0]).stem}"))
    with Owned(out).locked() as owned:
        if owned.entries and not args.overwrite:
            raise MegatrainError(f"{out} has a run already: megatrain resume {out} goes on with it, --overwrite "
                                 "removes it, --out names another folder")
        owned.check_free()
        _train(for_machine(settings.with_(out=str(out))), owned)


def again(args: argparse.Namespace) -> None:
    """megatrain resume."""
    _check_packages()
    settings = folder.settings_of(args.folder).with_(out=str(args.folder))
    with Owned.opened(args.folder).locked() as owned:
        if folder.is_finished(args.folder) and not owned.changed(folder.FINAL):
            raise MegatrainError(f"{args.folder} is finished: its model is {args.folder / folder.FINAL}; megatrain "
                                 f"train {args.folder} DATA --out OTHER trains that on")
        checkpoint = folder.last_checkpoint(args.folder)
        _check_whole(args.folder, checkpoint)
        _check_clear(owned, folder.step_of(checkpoint.name), settings.steps)
        settings = for_machine(settings)
        if not args.convert:
            _check_kept(args.folder, checkpoint, settings)
        _train(settings, owned, checkpoint, args.convert, args.new_data)


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

    path, random = checkpoint / folder.WHOLE, checkpoint / "rng_state.pth"
    found = table(parsed(path.read_bytes(), path), str(path))
    step = field(found, "global_step", is_count, "a whole number", str(path))
    if step != folder.step_of(checkpoint.name):
        raise MegatrainError(f"{path}: it is of step {step}")
    field(found, "epoch", lambda v: v is None or type(v) in (int, float), "a number", str(path))
    field(found, "log_history", lambda v: isinstance(v, list), "a list", str(path))
    for what, read in ((path, lambda: TrainerState.load_from_json(str(path))),
                       (random, lambda: torch.load(random, weights_only=True))):
        try:
            with safe_globals():
                read() if what.exists() else None
        except Exception as why:                     # of a class that is a stranger, and of a pickle
            raise MegatrainError(f"{what} cannot be read: {shown(why)}") from None
    folder.dtype_of(checkpoint)


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

def _train(settings: Settings, owned: Owned, checkpoint: Path | None = None, convert: bool = False,
           new_data: bool = False) -> None:
    """Nothing of the folder is touched before all that can be refused was: arguments, data, model, memory, room."""
    began, out = time.perf_counter(), owned.run
    torch.manual_seed(settings.seed)
    source = str(checkpoint or folder.model_of(settings.model))
    tokenizer = folder.load_tokenizer(source)
    settings = for_model(settings, folder.load_config(source))
    parts, identity = _parts(settings, tokenizer)
    if checkpoint is not None and not new_data:
        _check_data(owned, identity)
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
    with _made_if_kept(out):
        model, settings, plan = _streamed(model, settings)
        _check_disk(model, settings, owned.nbytes if checkpoint is None else 0)
        _begin(owned, checkpoint, identity)
    if plan:
        (out / "plan.html").write_text(plan)
    write_yaml(out / folder.CONFIG, settings)
    _say_begin(model, settings, train, held)
    # A run that was stopped in its last step has none left to make: Trainer would make one more.
    over = checkpoint is not None and folder.step_of(checkpoint.name) >= settings.steps
    stopped = None if over else _loop(model, tokenizer, settings, train, held, owned, checkpoint, convert)
    if stopped is not None:
        say(f"stopped at step {stopped[0]}; megatrain resume {out} goes on")
        raise Stopped(stopped[1])
    _export_final(model, tokenizer, owned)
    say(f"done in {time.perf_counter() - began:.0f} s; the model is {out / folder.FINAL}\n"
        f"try it: megatrain generate {out} --prompt '...'     look: megatrain report {out}")


@contextlib.contextmanager
def _made_if_kept(out: Path) -> Iterator[None]:
    """A folder that something can be written into; it goes again if it was not there and the run is refused."""
    there = out.exists()
    made(out)
    try:
        yield
    except BaseException:
        if not there:
            with contextlib.suppress(OSError):           # somebody put something there
                out.rmdir()
        raise


def _begin(owned: Owned, checkpoint: Path | None, identity: dict[str, Any]) -> None:
    """All was checked: the run before goes, or what comes after the checkpoint."""
    if checkpoint is None:
        owned.start(identity)
        return
    for torn in folder.remove_torn(owned):
        say(f"{torn} was being written when the run ended: removed")
    folder.forget_after(owned.run, folder.step_of(checkpoint.name))
    owned.note_data(identity)


def _check_data(owned: Owned, identity: dict[str, Any]) -> None:
    """Raises: MegatrainError: the rows are others than those of the run so far."""
    if said := mixture.difference(owned.data, identity):
        raise MegatrainError(f"{said}. Put it back as it was to go on to the same bits; megatrain resume {owned.run} "
                             "--new-data goes on with this")


def _export_final(model: Any, tokenizer: Any, owned: Owned) -> None:
    to = owned.run / folder.FINAL
    owned.begin(folder.HALF, folder.SCRATCH)
    shutil.rmtree(owned.run / folder.HALF, ignore_errors=True)
    owned.begin(folder.FINAL, {})
    export(model, tokenizer, to, owned.run / folder.HALF, lambda half: owned.made(folder.FINAL, half))


def _parts(settings: Settings, tokenizer: Any) -> tuple[tuple[list[Document], list[Document]], dict[str, Any]]:
    """(to train on, held out), and what tells them from others."""
    found = mixture.sources(settings, settings.data, tokenizer)
    mixed = mixture.mixed(found, settings.seed)
    if isinstance(settings.validation, str):
        apart = mixture.sources(settings, (settings.validation,), tokenizer)
        parts = mixture.shuffled(mixed, settings.seed), [d for s in apart for d in s.documents]
    else:
        apart, parts = [], held_out(mixed, settings.validation, settings.seed)
    _say_unknown([d for s in found for d in s.documents], tokenizer)
    return parts, mixture.identity(settings, found, apart)


def _rows(settings: Settings, tokenizer: Any, parts: tuple[list[Document], list[Document]],
          alone: bool = False) -> tuple[Rows, Rows]:
    filler = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    rows = [packed(part, settings.seq, filler, alone) for part in parts]
    if rows[0].targets == 0:
        if parts[0] and (why := prompts_too_long(parts[0], settings.seq)):
            raise MegatrainError(f"{', '.join(settings.data)}: {why}")
        tokens = sum(len(d) for part in parts for d in part)
        aside = (f"{settings.validation:.0%} of them are held out (--validation), and the rest"
                 if isinstance(settings.validation, float) else "and that")
        raise MegatrainError(f"the data has {tokens} tokens; {aside}, in rows of {settings.seq} (--seq), has none to "
                             "learn")
    return rows[0], rows[1]


def _say_unknown(found: list[Document], tokenizer: Any) -> None:
    """A tokenizer of another language or alphabet makes the same token of all that it does not know."""
    unknown = tokenizer.unk_token_id
    share = sum(int((d.ids == unknown).sum()) for d in found) / sum(map(len, found)) if unknown is not None else 0
    if unknown != tokenizer.eos_token_id and share > UNKNOWN:
        say(f"{share:.0%} of the data's tokens are {tokenizer.unk_token!r}, which stands for what the model's "
            "tokenizer does not know; it will write that too")


def _streamed(model: Any, settings: Settings) -> tuple[Any, Settings, str]:
    """The model, streamed; on CUDA by the plan of least time for this machine, which is also returned as a page."""
    try:
        return _as_planned(model, settings)
    except MegatrainError as why:
        raise MegatrainError(Flags(PLANNED).told(why)) from None


PLANNED = ("tokens", "seq", "vram", "host", "micro", "states", "nvme", "dtype")


def _as_planned(model: Any, settings: Settings) -> tuple[Any, Settings, str]:
    if settings.device == "cpu":
        stream = {"plan": {"states": settings.states}, "host": settings.host, "nvme": settings.nvme}
        return mt.stream(model, "cpu", **stream), settings.with_(micro=settings.micro or 1), ""
    plan = mt.plan(model, tokens=settings.tokens, seq=settings.seq, vram=settings.vram, host=settings.host,
                   micro=settings.micro, states=settings.states, nvme=settings.nvme)
    say(str(plan).split("\n\n")[0])
    return mt.stream(model, "cuda", plan=plan), settings.with_(micro=plan.micro), plan._repr_html_()


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


def _loop(model: Any, tokenizer: Any, settings: Settings, train: Rows, held: Rows, owned: Owned,
          checkpoint: Path | None, convert: bool) -> tuple[int, int] | None:
    """(step, signal) at which it was asked to stop; None: it came to the end."""
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
            held.first(HELD_OUT_ROWS) if len(held) else None, processing_class=tokenizer, optimizers=(opt, None),
            callbacks=[requests, Bar(say, trace)], trace=trace, tokens=settings.tokens, convert=convert, owned=owned)
        trainer.remove_callback(_printer())
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            trainer.finish_saving()
        if opt.skipped_steps:
            say(f"{opt.skipped_steps} steps had gradients that are not finite and changed nothing; a lower --lr than "
                f"{settings.lr:g} may do")
        if requests.stop:
            return trainer.state.global_step, requests.stop
        trainer.write_pages()
    return None


def _check_disk(model: Any, settings: Settings, freed: int) -> None:
    """Before a step is made: that the checkpoints which stay, the one being written and the model at the end fit.
    freed: bytes of a run that this one takes the place of."""
    out, weights = Path(settings.out), sum(p.nbytes for p in model.parameters())
    one = weights + sum(master_bytes(settings.states, p.dtype) * p.numel()
                        + moment_bytes(settings.states, p.dtype, p.numel()) for p in model.parameters())
    there = 0 if freed else len(folder.checkpoints(out))
    more = min(settings.keep + 1, math.ceil(settings.steps / settings.save_every)) - there
    need, free = max(more, 1) * one + weights, shutil.disk_usage(out).free + freed
    if need > free:
        raise MegatrainError(f"out={out}: {max(more, 1)} more checkpoints of {show_bytes(one)} and the model take "
                             f"{show_bytes(need)}, and {show_bytes(free)} are free: make room, keep fewer (--keep "
                             f"{settings.keep}), or name a folder on another disk (--out)")


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
