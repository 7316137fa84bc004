"""megatrain train."""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from ..base.codes import elements
from ..base.limits import show_bytes
from ..base.modes import master_bytes, moment_bytes
from ..checkpoint import again
from ..checkpoint.parts import names_of
from ..store.bases import check_base
from . import folder, launch, lora, methods, mixture
from .data import Document, Rows, collate, held_out, packed, prompts_too_long, why_alone
from .export import export, made
from .flags import Flags
from .owned import Owned
from .say import Stopped, say
from .settings import DATA, Settings, add_flags, given, read_yaml, write_yaml
from .team import Team, team_of
from .unsaid import for_data, for_machine, for_model

HELD_OUT_ROWS = 200                  # at most, by default: an evaluation is a small part of a run
UNKNOWN = 0.02                       # share of the tokens, above which it is said


def add(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a model on texts, prompts or conversations", allow_abbrev=False)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder in Hugging Face format, a run, or a name on "
                       "the hub")
    parser.add_argument("data", nargs="*", metavar="DATA", help=DATA)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with the same names; flags come first")
    parser.add_argument("--overwrite", action="store_true", help="remove what the run's folder has of a run before")
    add_flags(parser)
    parser.set_defaults(run=run, words=())


def run(args: argparse.Namespace) -> int:
    """megatrain train."""
    check_packages()
    values = (read_yaml(args.config) if args.config else {}) | given(args)
    settings = Settings.of(values, str(args.config) if args.config else "command line")
    for name in ("model", "data"):
        if getattr(settings, name) is None:
            raise MegatrainError(f"which {name}? megatrain train MODEL DATA, or --config with a line `{name}: ...`")
    _check_reports(settings)
    lora.check_packages(settings.lora is not None, settings.base)
    out = Path(settings.out or f"runs/{Path(settings.model).resolve().name}")
    if (out / "config.json").exists():
        raise MegatrainError(f"out={out} is a model's folder, and stays as it is; --out names another"
                             + ("" if settings.out else f", such as runs/{Path(settings.data[0]).stem}"))
    settings = for_machine(settings.with_(out=str(out)))
    if settings.gpus > 1 and not launch.joins():
        return launch.launch(args.words, settings.gpus)
    with team_of(settings.device) as team, contextlib.ExitStack() as stack:
        owned = team.first_does(lambda: stack.enter_context(_free(out, args.overwrite)))
        train_run(settings, team, owned)
    return 0


@contextlib.contextmanager
def _free(out: Path, overwrite: bool) -> Iterator[Owned]:
    """The run's folder, locked; what is there may go."""
    with Owned(out).locked() as owned:
        if owned.entries and not overwrite:
            raise MegatrainError(f"{out} has a run already: megatrain resume {out} goes on with it, --overwrite "
                                 "removes it, --out names another folder")
        owned.check_free()
        yield owned


def check_packages() -> None:
    """What the loop imports, all of them at once; and that this command starts its processes."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")       # TRL would tell of each run
    launch.check_alone()
    gone = [name for name in ("transformers", "accelerate", "trl", "datasets", "rich", "yaml")
            if importlib.util.find_spec(name) is None]
    if gone:
        raise MegatrainError(f"megatrain train needs {' and '.join(gone)}: pip install "
                             f"{' '.join(gone).replace('yaml', 'pyyaml')}")


def _check_reports(settings: Settings) -> None:
    if settings.report_to != "none" and importlib.util.find_spec(settings.report_to) is None:
        raise MegatrainError(f"report_to={settings.report_to} is not installed: pip install {settings.report_to}")


# ---- the run -------------------------------------------------------------------------------------

def train_run(settings: Settings, team: Team, owned: Owned | None, checkpoint: Path | None = None,
              convert: bool = False, new_data: bool = False) -> None:
    """Nothing of the folder is touched before all that can be refused was: arguments, data, model, memory, room.
    owned: the folder, where this process has it."""
    import datasets

    from .loop import Run

    datasets.disable_progress_bars()
    # Of names that TRL still gives to transformers.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
    with tempfile.TemporaryDirectory(prefix="megatrain-") as own:
        _train_run(settings, Run(team, owned, 0, {"lora": settings.lora, "base": settings.base}, convert,
                                 team.of_first(own)), checkpoint, new_data)


def _train_run(settings: Settings, run: Any, checkpoint: Path | None, new_data: bool) -> None:
    began, out, team, owned = time.perf_counter(), Path(settings.out), run.team, run.owned
    torch.manual_seed(settings.seed)
    with team.as_one():
        methods.given(settings)
        source = _source(settings, checkpoint)
        tokenizer, config = _tokenizer(source, settings, checkpoint), folder.load_config(source.model)
        settings = for_model(settings, config)
        _check_beside(settings, source.model, config)
        reward = methods.rewards(settings) if settings.method == "grpo" else None
    data = team.first_does(lambda: _Data(settings, tokenizer, None if new_data or checkpoint is None else owned))
    with team.as_one():
        # TRL hashes the weights that it asks before the first step, in each process.
        model = _model(source, settings, tokenizer, team.first or settings.method in ("dpo", "kto"))
    settings, train, held = team.of_first(team.first_does(lambda: data.for_model(model)))
    if settings.lora is not None:
        with team.as_one():
            model = lora.Lora.of(settings.lora).beside(model, settings.seed)
    with contextlib.ExitStack() as refused:
        team.first_does(lambda: refused.enter_context(_made_if_kept(out)))
        run.tokens = settings.tokens
        try:
            settings, how, page = _planned(model, settings, team)
            trainer = _trainer(model, tokenizer, settings, train, held, run, how, reward)
        except MegatrainError as why:
            raise MegatrainError(Flags(PLANNED, settings.gpus).told(why)) from None
        team.first_does(lambda: _check_disk(trainer.model, settings, owned.nbytes if checkpoint is None else 0))
        team.first_does(lambda: _begin(owned, checkpoint, data.identity))
    if team.first:
        _write_begin(out, settings, page)
    _say_begin(trainer.model, settings, train, held)
    # A run that was stopped in its last step has none left to make: Trainer would make one more.
    over = checkpoint is not None and folder.step_of(checkpoint.name) >= settings.steps
    stopped = 0 if over else _loop(trainer, settings, checkpoint)
    if stopped:
        team.meet()                      # the first one may be writing still
        say(f"stopped at step {trainer.state.global_step}; megatrain resume {out} goes on")
        raise Stopped(stopped)
    team.first_does(lambda: _export_final(trainer.model, tokenizer, owned))
    _say_end(settings, trainer.rose(), time.perf_counter() - began)
    if settings.push_to_hub is not None:
        team.first_does(lambda: _push(out / folder.FINAL, settings.push_to_hub))


def _say_end(settings: Settings, rose: str, seconds: float) -> None:
    out = settings.out
    end = "done" if not rose else f"{rose}: the run diverged, and a lower --lr than {settings.lr:g} may not; over"
    say(f"{end} in {seconds:.0f} s; the {'model' if settings.lora is None else 'adapter'} is {out}/{folder.FINAL}")
    chat = " --chat" if folder.is_chat(out) else ""
    tried = "" if settings.method == "reward" else f"try it: megatrain generate {out}{chat} --prompt '...'     "
    say(f"{tried}look: megatrain report {out}")


def _push(model: Path, name: str) -> None:
    import huggingface_hub

    try:
        huggingface_hub.create_repo(name, exist_ok=True)
        found = huggingface_hub.upload_folder(repo_id=name, folder_path=model)
    except Exception as why:                             # of httpx, or of the hub
        raise MegatrainError(f"push_to_hub={name}: {why}; the model is {model}") from None
    say(f"{model} is on the hub: {found}")


def _source(settings: Settings, checkpoint: Path | None) -> folder.Source:
    """What a run begins with, or goes on with. mt.load takes all that a checkpoint of adapters has, frozen weights too:
    the model under them is read to have their form."""
    if checkpoint is None:
        return folder.source_of(settings.model).alone(settings.model)
    if settings.lora is None and settings.method == "sft":
        return folder.Source(str(checkpoint), str(checkpoint))
    return folder.Source(folder.beneath(settings), str(checkpoint))      # which others are compared with, too


def _tokenizer(source: folder.Source, settings: Settings, checkpoint: Path | None) -> Any:
    """A checkpoint's has the chat template that the run began with."""
    return folder.load_tokenizer(source.words, settings.chat_template if checkpoint is None else None)


def _check_beside(settings: Settings, name: str, config: Any) -> None:
    """Before data and weights are read: that the model can be kept so, and has what adapters are asked for."""
    try:
        if settings.base != "none":
            check_base(config, name, settings.base)
    except MegatrainError as why:
        raise MegatrainError(Flags(("base",)).told(why)) from None
    if settings.lora is not None:
        lora.Lora.of(settings.lora).check(folder.empty(config))


def _write_begin(out: Path, settings: Settings, plan: str) -> None:
    if plan:
        (out / "plan.html").write_text(plan)
    write_yaml(out / folder.CONFIG, settings)


class _Data:
    """What is trained on, and held out.

    Attributes:
        identity: what tells it from other data.
    """

    def __init__(self, settings: Settings, tokenizer: Any, like: Owned | None) -> None:
        """like: a run that had the same."""
        self._settings, self._tokenizer = settings, tokenizer
        told = None if like is None else like.data.get("date")
        date = datetime.fromisoformat(told) if isinstance(told, str) else datetime.now().replace(microsecond=0)
        self._parts, self.identity = _parts(settings, tokenizer, date)
        self.identity["date"] = date.isoformat()         # templates may tell the model which day it is
        if like is not None:
            _check_data(like, self.identity)
        if settings.method == "sft":                     # what no packing allows is refused before the model is loaded
            self._rows = _rows(settings, tokenizer, self._parts)
            for_data(settings, sum(len(d.parts) if d.whole else math.ceil(len(d) / settings.seq)
                                   for d in self._parts[0]))

    def for_model(self, model: Any) -> tuple[Settings, Any, Any]:
        """With rows of one document each, where the model would see others in them."""
        settings = self._settings
        if settings.method != "sft":
            train, held = self._parts
            return for_data(settings, len(train), methods.SEQUENCES.get(settings.method, 1)), train, held
        flat = settings.device == "cuda"             # rows of a micro-batch are joined then: they share a row anyhow
        train, held = self._rows
        if (flat or train.shared or held.shared) and (why := why_alone(model, settings.seq, flat)):
            packed_rows = len(train)
            train, held = _rows(settings, self._tokenizer, self._parts, alone=True)
            say_alone(why, packed_rows, len(train))
        self._parts = self._rows = None              # they have as many tokens as the rows
        return for_data(settings, len(train)), train, held


def _model(source: folder.Source, settings: Settings, tokenizer: Any, has_values: bool) -> Any:
    model = folder.load_model(source.model, settings.dtype, has_values, settings.base, settings.method == "reward")
    there = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > there:
        raise MegatrainError(f"the tokenizer has {len(tokenizer)} tokens and the model embeds {there}: they are not of "
                             "one model")
    return model


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


def _parts(settings: Settings, tokenizer: Any, date: datetime | None = None
           ) -> tuple[tuple[list[Any], list[Any]], dict[str, Any]]:
    """(to train on, held out), and what tells them from others."""
    found = mixture.sources(settings, settings.data, tokenizer, date)
    mixed = mixture.mixed(found, settings.seed)
    if isinstance(settings.validation, str):
        held = mixture.sources(settings, (settings.validation,), tokenizer, date)
        parts = mixture.shuffled(mixed, settings.seed), [d for s in held for d in s.documents]
    else:
        share = 0.0 if settings.method == "grpo" else settings.validation        # it would write all its answers anew
        held, parts = [], held_out(mixed, share, settings.seed)
    if settings.method == "sft":
        _say_unknown([d for s in found for d in s.documents], tokenizer)
    return parts, mixture.identity(settings, found, held)


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


PLANNED = ("tokens", "seq", "vram", "host", "micro", "states", "nvme", "dtype", "products")


def _planned(model: Any, settings: Settings, team: Team) -> tuple[Settings, dict[str, Any], str]:
    """(with micro-batches, how to stream, the plan's page): on CUDA by the plan of least time for this machine."""
    if settings.device == "cpu":
        return settings.with_(micro=settings.micro or 1), {
            "device": "cpu", "plan": {"states": settings.states}, "host": settings.host, "nvme": settings.nvme,
            "products": settings.products}, ""
    plan = team.of_first(team.first_does(lambda: mt.plan(
        model, tokens=settings.tokens // settings.gpus, seq=settings.seq, vram=settings.vram, host=settings.host,
        micro=settings.micro, states=settings.states, products=settings.products, nvme=settings.nvme,
        gpus=settings.gpus)))
    say(str(plan).split("\n\n")[0])
    return settings.with_(micro=plan.micro), {"device": "cuda", "plan": plan}, plan._repr_html_()


def _say_begin(model: Any, settings: Settings, train: Any, held: Any) -> None:
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = f", {own / 1e6:,.1f} M of them in adapters that train" if settings.lora is not None else ""
    kept += f", linear weights in {settings.base}" if settings.base != "none" else ""
    parameters = sum(map(elements, model.parameters()))
    there = (f"{train.targets:,} tokens to learn in {len(train)} rows of {settings.seq}, {held.targets:,} held out"
             if settings.method == "sft" else f"{len(train):,} records, {len(held):,} held out, by {settings.method}")
    say(f"{parameters / 1e6:,.1f} M parameters{kept}, streamed, computing on {settings.device}; {there}; "
        f"{settings.steps} steps of {settings.tokens:,} tokens"
        f"{f' on {settings.gpus} GPUs' if settings.gpus > 1 else ''}; run in {settings.out}")
    if settings.method == "sft":
        say_cut(train.cut + held.cut, settings.seq)


def say_cut(cut: int, seq: int) -> None:
    if cut:
        say(f"{cut} conversations are longer than {seq} tokens and lost their end; --seq makes room")


def say_alone(why: str, packed_rows: int, rows: int) -> None:
    say(f"{why}; so each has rows of its own, filled up at the end: {rows} rows, not {packed_rows}")


def _trainer(model: Any, tokenizer: Any, settings: Settings, train: Any, held: Any, run: Any, how: dict[str, Any],
             reward: Any) -> Any:
    """TRL's, with its model streamed."""
    import datasets

    from .loop import OfRows, Streamed

    rows, (kind, _) = settings.method == "sft", methods.classes(settings.method)
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
    config = model.config.get_text_config()
    kept = {name: getattr(config, name) for name in ("router_aux_loss_coef",) if hasattr(config, name)}
    told = {"is_loaded_in_4bit": False, "is_loaded_in_8bit": False}      # else TRL makes adapters over codes bfloat16
    before = {name: vars(model)[name] for name in told if name in vars(model)}
    vars(model).update(told)
    try:
        trainer = mt.stream_trainer(
            type(kind.__name__, (OfRows if rows else Streamed, kind), {"run": run}), model,
            _arguments(settings, bool(len(held))), optimizer=lambda m: _adamw(m, settings), stream_with=how,
            processing_class=tokenizer, train_dataset=data[0], eval_dataset=data[1], **more)
    except ValueError as why:                            # of TRL, about arguments that do not go together
        raise MegatrainError(f"{settings.method}: {why}") from None
    finally:
        for name in told:
            vars(model).pop(name, None)
        vars(model).update(before)
    for name, value in kept.items():                     # TRL writes what it uses into what is saved with the model
        setattr(config, name, value)
    if rows:
        trainer.train_dataset, trainer.eval_dataset = train, held.first(HELD_OUT_ROWS) if len(held) else None
    return trainer


def _adamw(model: Any, settings: Settings) -> mt.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2]},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    return mt.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(0.9, settings.beta2),
                    weight_decay=settings.weight_decay, states=settings.states)


def _loop(trainer: Any, settings: Settings, checkpoint: Path | None) -> int:
    """The signal that asked it to stop; 0: it came to the end."""
    from transformers import EarlyStoppingCallback
    from transformers.trainer_callback import PrinterCallback

    from .loop import Bar, Requests

    team = trainer.run.team
    requests, opt = Requests(team), trainer.optimizer
    with (mt.trace(trainer.model) if team.first else contextlib.nullcontext()) as trainer.trace, requests.listening():
        trainer.remove_callback(PrinterCallback)
        for callback in [requests, *([Bar(say, trainer.trace)] if team.first else []),
                         *([EarlyStoppingCallback(settings.early_stopping)] if settings.early_stopping else [])]:
            trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            trainer.finish_saving()
        if opt.skipped_steps:
            say(f"{opt.skipped_steps} steps had gradients that are not finite and changed nothing; a lower --lr than "
                f"{settings.lr:g} may do")
        if not requests.stop:
            trainer.write_pages()
    return requests.stop


def _check_disk(model: Any, settings: Settings, freed: int) -> None:
    """Before a step is made: that the checkpoints which stay, the one being written and the model at the end fit.
    freed: bytes of a run that this one takes the place of."""
    out, trained = Path(settings.out), [p for p in model.parameters() if p.requires_grad]
    sizes = {p: math.prod(p._mt.shape) * p._mt.dtype.itemsize for p in names_of(model)}
    weights, still = sum(sizes.values()), sum(n for p, n in sizes.items() if again.is_still(p._mt))
    once = still if still >= again.LEAST_BYTES and again.can_link(out) else 0          # of all checkpoints together
    one = weights - once + sum(master_bytes(settings.states, p.dtype) * p.numel()
                        + moment_bytes(settings.states, p.dtype, p.numel()) for p in trained)
    at_end = weights if settings.lora is None else sum(p.nbytes for p in trained)
    there = 0 if freed else len(folder.checkpoints(out))
    more = min(settings.keep + 1, math.ceil(settings.steps / settings.save_every)) - there
    need, free = max(more, 1) * one + once + at_end, shutil.disk_usage(out).free + freed
    if need > free:
        raise MegatrainError(f"out={out}: {max(more, 1)} more checkpoints of {show_bytes(one)}"
                             f"{f', {show_bytes(once)} that they share,' if once else ''} and the model take "
                             f"{show_bytes(need)}, and {show_bytes(free)} are free: make room, keep fewer (--keep "
                             f"{settings.keep}), or name a folder on another disk (--out)")


def _arguments(settings: Settings, held: bool) -> Any:
    s, sequences = settings, methods.SEQUENCES.get(settings.method, 1)
    micro_rows = s.tokens // (s.seq * sequences) // s.gpus // s.micro
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
    kind = methods.classes(s.method)[1]
    if "router_aux_loss_coef" in {f.name for f in dataclasses.fields(kind)}:
        usual |= dict(router_aux_loss_coef=0.0)          # a mixture's loss is that of its words, as transformers has it
    return kind(**ours, **usual | methods.given(s))
