"""megatrain plan, eval, generate, export and doctor."""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
from .settings import SIZES, Flags, Settings, add_flags, device_of, given, in_flags, read_table, say

TOGETHER = 8                         # rows of an evaluation: weights are streamed once for all of them
FITS = 0.7                           # of the free device memory, for weights that are put there whole


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="loss and perplexity of a model on data")
    add_flags(parser, "model data column chat_template split seq device dtype vram host nvme".split())
    parser.set_defaults(run=evaluate)

    parser = commands.add_parser("generate", help="let a model write")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="the prompt is a user's message, in the "
                        "chat template; default: as a run was trained, else as it is")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 200, at most what the model takes")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest token")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    add_flags(parser, "model device vram host nvme".split())
    parser.set_defaults(run=generate)

    parser = commands.add_parser("export", help="a run's model as a folder in Hugging Face format")
    parser.add_argument("model", metavar="RUN", help="its model at the end, or its last checkpoint; RUN/checkpoint-N: "
                        "that one")
    parser.add_argument("to", type=Path, metavar="FOLDER", help="to make")
    parser.add_argument("--merged", action="store_true", help="of a run with adapters: the model that it began with, "
                        "its weights of 16 or 32 bits read anew, with the adapters in them")
    parser.set_defaults(run=export)

    parser = commands.add_parser("doctor", help="measure what this machine can do, and keep it for plans")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: $MEGATRAIN_MACHINE, "
                        "or ~/.cache/megatrain/machine.json, where plans look")
    parser.add_argument("--disk", metavar="FOLDER", help="measure the drive too that optimizer states may go to")
    parser.add_argument("--gpus", type=int, metavar="N", help="measure links between so many GPUs; default: all there "
                        "are. On the CPU device as many processes; default: 1, none")
    parser.set_defaults(run=doctor)
    _add_plan(commands)


@torch.no_grad()
def evaluate(args: argparse.Namespace) -> None:
    settings = Settings.of(given(args), "command line")
    run = folder.run_of(settings.model)
    if run is not None:                                          # rows as long as in training
        kind = settings.dtype or (None if run.lora is None else run.dtype)
        settings = settings.with_(seq=settings.seq or run.seq, dtype=kind)
    settings, source = settings.for_machine(), models.source_of(settings.model)
    models.check_packages(source.adapter is not None, source.base)
    tokenizer = models.load_tokenizer(source.words, settings.chat_template)
    config = models.load_config(source.model)
    settings = settings.for_model(config)
    parts = data.mixed(data.sources(settings, settings.data, tokenizer), settings.seed), []
    rows, _ = data.rows_of(settings, tokenizer, parts, config)
    model = models.load(source, settings.dtype).requires_grad_(False)
    model = mt.stream(model, settings.device, vram=settings.vram, host=settings.host, nvme=settings.nvme).eval()
    total, batch = 0.0, data.collate(False)
    for first in range(0, len(rows), TOGETHER):
        some = batch([rows[i] for i in range(first, min(first + TOGETHER, len(rows)))])
        if targets := int((some["labels"][:, 1:] != data.IGNORED).sum()):
            total += model(**{k: v.to(model.device) for k, v in some.items()}, use_cache=False).loss.item() * targets
    loss = total / rows.targets
    say(f"loss {loss:.4f} nats a token, perplexity {math.exp(min(loss, 700)):.4g}; {rows.targets:,} tokens in "
        f"{len(rows)} rows of {settings.seq}")


def generate(args: argparse.Namespace) -> None:
    for name, fits, needed in (
            ("max_new_tokens", args.max_new_tokens is None or args.max_new_tokens >= 1, "at least 1 is needed"),
            ("temperature", args.temperature >= 0, "0 or more is needed; 0: always the likeliest token"),
            ("top_p", 0 < args.top_p <= 1, "a share is needed, more than 0 and at most 1")):
        if not fits:
            raise MegatrainError(f"{name}={getattr(args, name)}: {needed}")
    settings = Settings.of({k: v for k, v in given(args).items() if k != "seed"}, "command line").for_machine()
    source = models.source_of(args.model)
    models.check_packages(source.adapter is not None, source.base)
    tokenizer, config = models.load_tokenizer(source.words), models.load_config(source.model)
    chat = args.chat
    if chat is None:                                 # as a run was trained
        chat = bool(tokenizer.chat_template and folder.Owned(folder.above(args.model)).data.get("chat"))
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


def export(args: argparse.Namespace) -> None:
    if args.to.exists():
        raise MegatrainError(f"{args.to} is there already; name a folder that is not")
    models.writable(args.to.parent, "to")
    source = models.source_of(args.model)
    if (whole := source.adapter is None) and args.merged:
        raise MegatrainError(f"merged: {args.model} has no adapters (lora), its weights themselves were trained; leave "
                             "--merged out")
    models.check_packages(not whole, "none")
    tokenizer = models.load_tokenizer(source.words)
    end = f"{source.adapter or source.model} is in {args.to}"
    with models.appearing(args.to) as half:
        if whole:
            models.save(models.load_model(source.model, source.dtype), tokenizer, half, args.to.parent)
        elif args.merged:
            kept = f"; it was trained over {source.base} codes of them, so it computes a little otherwise there"
            model = models.over(models.load_model(source.model, source.dtype, base="whole"), source.adapter)
            dtype = str(model.dtype).removeprefix("torch.")
            say(f"{source.adapter} goes into the weights of {source.model} in {dtype}, read anew"
                f"{kept if source.base != 'none' else ''}")
            models.save(model.merge_and_unload(), tokenizer, half, args.to.parent)
        else:
            for path in source.adapter.glob("adapter_*"):
                shutil.copyfile(path, half / path.name)
            tokenizer.save_pretrained(half)
            end = f"the adapter of {end}; it goes over {source.model}; --merged makes one model of both"
    say(end)


@in_flags("device", "out", "disk", "gpus")
def doctor(args: argparse.Namespace) -> None:
    device = device_of(args.device)
    there = torch.cuda.device_count() if device == "cuda" else None      # of the CPU device as many as are asked for
    if args.gpus is not None and not 1 <= args.gpus <= (there or args.gpus):
        raise MegatrainError(f"gpus={args.gpus}: 1 to {there or 'any number'}")
    if args.out:
        models.writable(args.out.parent, "out")
        try:                                             # a file such as doctor writes, of this version or another
            _ = args.out.exists() and read_table(args.out)
        except (MegatrainError, OSError):
            raise MegatrainError(f"out={args.out} is there, and describes no machine: it stays; name another") from None
    if device == "cpu" and not args.device:
        sys.stderr.write("no GPU here: what is measured is the CPU device, for `megatrain plan --machine cpu`\n")
    _, text, path = mt.measure_machine(device, gpus=args.gpus or there or 1, disk=args.disk, out=args.out,
                                       say=lambda what: sys.stderr.write(f"measuring: {what}\n") and None)
    sys.stdout.write(f"{text}\n\nwritten to {path}\n")


NOT_PLANS = ("help", "list_machines", "json", "run", "verb", "names")
TOKENS, SEQ = 65536, 4096           # of a step, of a sequence, as `megatrain train` has them on CUDA
NO_GPU = ("there is no GPU here to plan for. Name a card, --machine h100-80g (--list-machines has all), a file that "
          "`megatrain doctor` wrote, or --machine cpu; or sizes alone, --vram 24GiB --host 64GiB")


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", description="What a training step takes on a machine, and "
                                 "what to change where it does not fit.", help="what a training step takes",
                                 argument_default=argparse.SUPPRESS)         # what is not given mt.plan knows
    add, modes = parser.add_argument, mt.choices("activations")
    add("model", metavar="MODEL", nargs="?", help="folder with a config.json, or a name on the Hugging Face hub")
    add("--tokens", type=int, metavar="N", help=f"of a step; default: {TOKENS}")
    add("--seq", type=int, metavar="N", help=f"tokens of a sequence; default: {SEQ}, and at most what the model takes")
    add("--machine", metavar="NAME|FILE", help="a card, as rtx4090 or h200-128g,vram=24GiB; a file that `megatrain "
        "doctor` wrote; or cpu, this machine's CPU device; default: this machine's GPU")
    add("--list-machines", action="store_true", help="all cards that are described, and where their rates come from")
    add("--vram", metavar="SIZE", help="limit of device memory, e.g. 24GiB")
    add("--host", "--ram", metavar="SIZE", help="limit of host memory; of a card by name, what its host has")
    add("--micro", type=int, metavar="N", help="micro-batches; default: as many as are best")
    add("--nvme", metavar="FOLDER|SIZE", help="where states and weights may go that host memory does not hold; or a "
        "size, as 500GB, of a disk that is not at hand")
    add("--grads", choices=mt.choices("grads"), help="none: used as they come and kept nowhere, without "
        "clipping")
    add("--homes", choices=mt.choices("homes"), help="of all units; default: each where it is best")
    add("--activations", choices=modes, metavar="MODE",
        help=f"of all layers: {', '.join(modes)}; default: what is best")
    add("--gpus", type=int, metavar="N", help="of a machine, each with so many tokens a step; default: 1")
    add("--machines", type=int, metavar="N", help="with so many GPUs each, and a host like this one's")
    add("--layers", type=int, metavar="N", help="instead of the config's own number")
    add("--json", action="store_true", help="the plan, or why there is none, as JSON, in bytes")
    add("--compute", choices=["auto", "fused", "eager"], help="fused layers, or the model's own code; default: fused "
        "where it fits")
    add_flags(parser, ("states", "lora", "base", "products"))
    parser.set_defaults(run=plan, names=[a.dest for a in parser._actions if a.dest not in ("model", *NOT_PLANS)])


def plan(args: argparse.Namespace) -> int:
    """0; 1 where nothing fits; 2 where too little is said."""
    given, as_json = {k: v for k, v in vars(args).items() if k not in NOT_PLANS}, hasattr(args, "json")
    if hasattr(args, "list_machines"):
        machines = [m.to_dict() for m in mt.Machine.known().values()]
        sys.stdout.write(_json(machines) if as_json else f"{mt.Machine.listing()}\n")
        return 0
    if "model" not in given:
        sys.stderr.write("megatrain: MODEL is missing: a folder with a config.json, or a name on the hub\n")
        return 2
    shell = Flags(args.names, typed=given)
    try:
        return _plan(given, as_json)
    except MegatrainError as why:
        if (found := getattr(why, "refusal", None)) is None:
            raise MegatrainError(shell.told(why)) from None
        if as_json:
            sys.stdout.write(_json({"fits": False, "why": found.why.splitlines()[0], "changes": found.alone}))
        sys.stderr.write(f"megatrain: {found.text(shell)}\n")
        return 1


def _plan(given: dict[str, Any], as_json: bool) -> int:
    """given: flags; tokens and seq are put in where they are not."""
    config = models.load_config(models.source_of(given["model"]).model)
    asked = {k: v for k, v in given.items() if k not in ("model", "lora", "base")}
    with contextlib.suppress(MegatrainError):            # it is no size
        if (nvme := given.get("nvme")) and not Path(nvme).is_dir() and mt.parse_bytes(nvme, "nvme"):
            asked["nvme"] = {"limit": nvme}
    if "machine" not in given and mt.Machine.here().device == "cpu":
        if "vram" not in given:
            sys.stderr.write(f"megatrain: {NO_GPU}\n")
            return 2
        sizes = (mt.parse_bytes(given.get(name), name) for name in SIZES)
        asked["machine"] = mt.Machine.some(*sizes)
    seq = given.setdefault("seq", min(SEQ, getattr(config, "max_position_embeddings", None) or SEQ,
                                      max(given.get("tokens", SEQ), 1)))
    given.setdefault("tokens", max(TOKENS // max(seq, 1), 1) * max(seq, 1))
    asked |= {"tokens": given["tokens"], "seq": seq, "use_cache": False}       # as `megatrain train` calls the model
    if (base := given.get("base", "none")) != "none" or "lora" in given:
        words = Settings.of({"lora": given.get("lora"), "base": base}, "command line").lora
        models.check_packages(True, "none")              # a plan needs no codes, only their form
        model = models.empty(config, layers=given.get("layers"))
        asked |= {"base": None if base == "none" else base, "adapter": models.lora_config(model, words)}

    p = mt.plan(config, **asked)
    if as_json:
        found = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
        found |= {"fits": True, "machine": p.machine.to_dict(), "nvme": p.nvme and dataclasses.asdict(p.nvme)}
        follows = ("tokens_per_second", "vram_bytes", "host_bytes", "disk_bytes", "disk_written", "bound")
        sys.stdout.write(_json(found | {name: getattr(p, name) for name in follows}))
    else:
        sys.stdout.write(f"{p}\n")
    return 0


def _json(value: Any) -> str:
    """With null for what is no number of JSON."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=1) + "\n"
