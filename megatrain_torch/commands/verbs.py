"""megatrain eval, generate, export, report and doctor."""
from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import io
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from . import data, folder, models
from .rows import IGNORED, collate, fitted, rows_of
from .settings import Settings, add_flags, device_of, for_machine, for_model, given, in_flags, say

TOGETHER = 8                         # rows of an evaluation: weights are streamed once for all of them
FITS = 0.7                           # of the free device memory, for weights that are put there whole
MODEL = "a run, a folder in Hugging Face format, or a name on the hub"


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="loss and perplexity of a model on data", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("data", nargs="+", metavar="DATA", help="as for train")
    add_flags(parser, ("column", "chat_template", "split", "seq", "device", "dtype", "vram", "host", "nvme"))
    parser.set_defaults(run=evaluate)

    parser = commands.add_parser("generate", help="let a model write", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="the prompt is a user's message, in the "
                        "chat template; default: as a run was trained, else as it is")
    parser.add_argument("--max-new-tokens", type=int, metavar="N",
                        help="default: 200, and at most what the model takes")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest token")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    add_flags(parser, ("device", "vram", "host", "nvme"))
    parser.set_defaults(run=generate)

    parser = commands.add_parser("export", help="a run's model as a folder in Hugging Face format", allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("to", type=Path, metavar="FOLDER", help="to make")
    parser.add_argument("--step", type=int, metavar="N",
                        help="of a checkpoint; default: the model at the end, or the last one")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: as it was trained")
    parser.add_argument("--merged", action="store_true", help="of a run with adapters: the model that it began with, "
                        "its weights of 16 or 32 bits read anew, with the adapters in them")
    parser.set_defaults(run=export)

    parser = commands.add_parser("report", help="a page about a run: curves, time line, memory", allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run's folder")
    parser.set_defaults(run=report)

    parser = commands.add_parser("doctor", help="measure what this machine can do, and keep it for plans",
                                 allow_abbrev=False)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: $MEGATRAIN_MACHINE, "
                        "or ~/.cache/megatrain/machine.json, where plans look")
    parser.add_argument("--disk", metavar="FOLDER", help="measure the drive too that optimizer states may go to")
    parser.add_argument("--gpus", type=int, metavar="N", help="measure links between so many GPUs; default: all there "
                        "are. On the CPU device as many processes; default: 1, none")
    parser.set_defaults(run=doctor)


# ---- eval ----------------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(args: argparse.Namespace) -> None:
    """megatrain eval."""
    settings = Settings.of(given(args), "command line")
    run = folder.run_of(settings.model)
    if run is not None:                                          # rows as long as in training
        kind = settings.dtype or (None if run.lora is None else run.dtype)
        settings = settings.with_(seq=settings.seq or run.seq, dtype=kind)
    settings, source = for_machine(settings), models.source_of(settings.model)
    models.check_packages(source.adapter is not None, source.base)
    tokenizer = models.load_tokenizer(source.words, settings.chat_template)
    settings = for_model(settings, models.load_config(source.model)).with_(validation=0.0)
    parts = data.mixed(data.sources(settings, settings.data, tokenizer), settings.seed), []
    rows = rows_of(settings, tokenizer, parts)
    model = models.load(source, settings.dtype)
    rows, _ = fitted(model, settings, tokenizer, parts, rows, flat=False)
    model = mt.stream(model.requires_grad_(False), settings.device, vram=settings.vram, host=settings.host,
                      nvme=settings.nvme).eval()
    total, batch = 0.0, collate(False)
    for first in range(0, len(rows), TOGETHER):
        some = batch([rows[i] for i in range(first, min(first + TOGETHER, len(rows)))])
        if targets := int((some["labels"][:, 1:] != IGNORED).sum()):
            total += model(**{k: v.to(model.device) for k, v in some.items()}, use_cache=False).loss.item() * targets
    loss = total / rows.targets
    say(f"loss {loss:.4f} nats a token, perplexity {math.exp(min(loss, 700)):.4g}; {rows.targets:,} tokens in "
        f"{len(rows)} rows of {settings.seq}")


# ---- generate ------------------------------------------------------------------------------------

def generate(args: argparse.Namespace) -> None:
    """megatrain generate."""
    for name, fits, needed in (
            ("max_new_tokens", args.max_new_tokens is None or args.max_new_tokens >= 1, "at least 1 is needed"),
            ("temperature", args.temperature >= 0, "0 or more is needed; 0: always the likeliest token"),
            ("top_p", 0 < args.top_p <= 1, "a share is needed, more than 0 and at most 1")):
        if not fits:
            raise MegatrainError(f"{name}={getattr(args, name)}: {needed}")
    settings = for_machine(Settings.of({k: v for k, v in given(args).items() if k != "seed"}, "command line"))
    source = models.source_of(args.model)
    models.check_packages(source.adapter is not None, source.base)
    tokenizer, config = models.load_tokenizer(source.words), models.load_config(source.model)
    chat = bool(tokenizer.chat_template) and folder.is_chat(args.model) if args.chat is None else args.chat
    if chat and not tokenizer.chat_template:
        raise MegatrainError("--chat: the model's tokenizer has no chat template; without --chat the prompt is taken "
                             "as it is")
    found = tokenizer.apply_chat_template([{"role": "user", "content": args.prompt}], add_generation_prompt=True,
                                          return_tensors="pt", return_dict=True) if chat else tokenizer(
                                              args.prompt, return_tensors="pt")
    inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
    there = inputs["input_ids"].shape[1]
    if there == 0:
        raise MegatrainError("the prompt has no tokens: give it some words")
    most = getattr(config, "max_position_embeddings", None) or there + 200
    new = args.max_new_tokens or min(200, most - there)
    if there + new > most or new < 1:
        raise MegatrainError(f"a prompt of {there} tokens and {max(new, 1)} new ones: the model was made for {most} "
                             "positions at most" + (f"; --max-new-tokens {most - there}" if there < most
                                                    else "; give a shorter prompt"))
    limits = {"vram": settings.vram, "host": settings.host, "nvme": settings.nvme}
    model = models.load(source, source.dtype).eval()
    # Weights that are codes, of a class of their package's or ours, are streamed: there each is expanded as it is used.
    plain = all(type(p).__module__.startswith("torch.") for p in model.parameters())
    whole = plain and not any(limits.values()) and (
        settings.device == "cpu" or sum(p.nbytes for p in model.parameters()) < FITS * torch.cuda.mem_get_info()[0])
    model = model.to(settings.device) if whole else mt.stream(model.requires_grad_(False), settings.device, **limits)
    torch.manual_seed(args.seed)
    sampled = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p} if args.temperature > 0 \
        else {"do_sample": False}
    out = model.generate(**{k: v.to(model.device) for k, v in inputs.items()}, max_new_tokens=new,
                         pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id, **sampled)
    say(tokenizer.decode(out[0][there if chat else 0:], skip_special_tokens=True))


# ---- export --------------------------------------------------------------------------------------

def export(args: argparse.Namespace) -> None:
    """megatrain export."""
    settings = folder.settings_of(args.run_folder)
    if args.to.exists():
        raise MegatrainError(f"{args.to} is there already; name a folder that is not")
    models.writable(args.to.parent, "to")
    found = {folder.step_of(p.name): p for p in folder.checkpoints(args.run_folder)}
    if args.step is not None and args.step not in found:
        raise MegatrainError(f"step {args.step} has no checkpoint; there are {', '.join(map(str, found)) or 'none'}")
    source = models.source_of(str(args.run_folder), found.get(args.step))
    if settings.lora is None and args.merged:
        raise MegatrainError(f"merged: {args.run_folder} has no adapters (lora), its weights themselves were trained; "
                             "leave --merged out")
    models.check_packages(settings.lora is not None, "none")
    tokenizer, dtype = models.load_tokenizer(source.words), args.dtype or settings.dtype
    if settings.lora is None:
        models.export(models.load_model(source.model, dtype), tokenizer, args.to)
    elif args.merged:
        kept = "" if source.base == "none" else (f"; it was trained over {source.base} codes of them, so it computes a "
                                                 "little otherwise there")
        say(f"{source.adapter} goes into the weights of {source.model} in {dtype}, read anew{kept}")
        model = models.load_model(source.model, dtype, base="whole")
        models.export(models.over(model, source.adapter).merge_and_unload(), tokenizer, args.to)
    else:
        if args.dtype is not None:
            raise MegatrainError(f"dtype={args.dtype}: of a whole model; adapters stay as they were trained: leave it "
                                 "out, or --merged")
        with models.appearing(args.to) as half:
            for path in source.adapter.glob("adapter_*"):
                shutil.copyfile(path, half / path.name)
            tokenizer.save_pretrained(half)
        say(f"the adapter of {source.adapter} is in {args.to}; it goes over {source.model}; --merged makes one "
            "model of both")
        return
    say(f"{source.adapter or source.model} is in {args.to}")


# ---- report: one HTML file that needs nothing else -----------------------------------------------

LARGEST = 1e100                                      # of a number in a curve
CURVES = (("loss", ("loss", "eval_loss")), ("norm of the gradients", ("grad_norm",)),
          ("learning rate", ("learning_rate",)), ("tokens a second", ("tokens_per_second",)))
STYLE = ("body{font:14px sans-serif;margin:2em;max-width:1000px}table{border-collapse:collapse}"
         "td,th{padding:2px 10px;text-align:left}svg,img{max-width:100%;height:auto}h2{margin-top:1.5em}")
# Whoever wrote the pages and pictures of a run's folder: nothing in them runs, or loads anything.
HEAD = ("<!doctype html><meta charset='utf-8'><meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
        "img-src data:; style-src 'unsafe-inline'\"><title>megatrain</title>")
MOST_BYTES = 20_000_000              # of a page or a picture


def report(args: argparse.Namespace) -> None:
    """megatrain report."""
    out = args.out or args.run_folder / "report.html"
    text = page(args.run_folder)
    models.may_write(out, "out")
    if out.exists() and not out.read_bytes().startswith(HEAD.encode()):
        raise MegatrainError(f"out={out} is there, and is no report of megatrain: it stays; name another")
    out.write_text(text)
    say(f"{out}")


def page(run_folder: Path) -> str:
    """Of a run, finished or not."""
    settings, lines = folder.settings_of(run_folder), folder.lines(run_folder)
    if not lines:
        raise MegatrainError(f"{run_folder} has logged no step yet; come back when one is made")
    parts = [f"<h1>{html.escape(run_folder.resolve().name)}</h1>", summary(lines, settings), _curves(lines)]
    for title, name in (("The last step, and what bound it", "step.html"), ("The last steps", "timeline.svg"),
                        ("Memory, tier by tier", "storage.html"), ("The plan", "plan.html")):
        if not (path := run_folder / name).is_file():
            continue
        if path.stat().st_size > MOST_BYTES:
            shown = f"<p>{name} is too large.</p>"
        elif path.suffix == ".svg":
            shown = _picture(path.read_bytes(), "")
        else:                                            # a frame in which scripts do not run; the head holds in it too
            shown = (f"<iframe sandbox style='width:100%;height:32em;border:0' "
                     f"srcdoc='{html.escape(path.read_text(errors='replace'))}'></iframe>")
        parts.append(f"<h2>{title}</h2>{shown}")
    said = {name: ", ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in dataclasses.asdict(settings).items() if value is not None}
    rows = "".join(f"<tr><td>{name}</td><td>{html.escape(value)}</td></tr>" for name, value in said.items())
    return f"{HEAD}<style>{STYLE}</style>{''.join(parts)}<h2>Settings</h2><table>{rows}</table>"


def _picture(svg: bytes, text: str) -> str:
    return f"<img alt='{html.escape(text)}' src='data:image/svg+xml;base64,{base64.b64encode(svg).decode()}'>"


def _numbers(lines: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) of all lines that have a finite number there: what else may stand in a log is no point."""
    found = [(line["step"], line.get(name)) for line in lines]
    return [(float(step), float(value)) for step, value in found
            if type(value) in (int, float) and abs(value) < LARGEST and math.isfinite(value)]


def summary(lines: list[dict[str, Any]], settings: Any) -> str:
    """In a sentence, with how many GPUs trained it, and from which step on, where it was ever more than one."""
    words = f"Step {lines[-1]['step']} of {settings.steps}"
    parts = [(next(some)["step"], many) for many, some in itertools.groupby(
        lines, lambda line: line["gpus"] if folder.is_count(line.get("gpus")) else 1)]
    if [many for _, many in parts] != [1]:
        later = "".join(f", on {many} from step {step} on" for step, many in parts[1:])
        words += f" on {parts[0][1]} GPU{'s' * (parts[0][1] > 1)}{later}; loss and tokens are of all of them"
    if losses := [loss for _, loss in _numbers(lines, "loss")]:
        words += f"; loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last"
    if bounds := [line["bound"] for line in lines if isinstance(line.get("bound"), str) and line["bound"]]:
        most = max(sorted(set(bounds)), key=bounds.count)
        words += f"; {bounds.count(most) / len(bounds):.0%} of the steps were bound by {most}"
    if held := [loss for _, loss in _numbers(lines, "eval_loss")]:
        words += f"; held-out loss {held[-1]:.4g}, at best {min(held):.4g}"
    return f"<p>{html.escape(words)}.</p>"


def _curves(lines: list[dict[str, Any]]) -> str:
    """One picture; its text says what is drawn."""
    found = [(title, {name: points for name in names if (points := _numbers(lines, name))}) for title, names in CURVES]
    found = [(title, series) for title, series in found if series]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>pip install matplotlib draws curves here.</p>"
    figure = Figure(figsize=(10, 2.8 * math.ceil(len(found) / 2)), layout="constrained")
    for i, (title, series) in enumerate(found, 1):
        axes = figure.add_subplot(math.ceil(len(found) / 2), 2, i, title=title, xlabel="step")
        for name, points in series.items():
            axes.plot(*zip(*points), "." if len(points) == 1 else "-", label=name)
        axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    return _picture(drawn.getvalue(), "; ".join(f"{title}: {', '.join(series)}" for title, series in found))


# ---- doctor --------------------------------------------------------------------------------------

@in_flags("device", "out", "disk", "gpus")
def doctor(args: argparse.Namespace) -> None:
    """megatrain doctor."""
    device = device_of(args.device)
    there = torch.cuda.device_count() if device == "cuda" else None      # of the CPU device as many as are asked for
    if args.gpus is not None and not 1 <= args.gpus <= (there or args.gpus):
        raise MegatrainError(f"gpus={args.gpus}: 1 to {there or 'any number'}")
    if args.out:
        models.writable(args.out.parent, "out")
        try:                                             # a file such as doctor writes, of this version or another
            mine = not args.out.exists() or isinstance(json.loads(args.out.read_bytes()), dict)
        except (ValueError, RecursionError, OSError):
            mine = False
        if not mine:
            raise MegatrainError(f"out={args.out} is there, and describes no machine: it stays; name another")
    if device == "cpu" and not args.device:
        sys.stderr.write("no GPU here: what is measured is the CPU device, for `megatrain plan --machine cpu`\n")
    _, text, path = mt.measure_machine(device, gpus=args.gpus or there or 1, disk=args.disk, out=args.out,
                                       say=lambda what: sys.stderr.write(f"measuring: {what}\n") and None)
    sys.stdout.write(f"{text}\n\nwritten to {path}\n")

