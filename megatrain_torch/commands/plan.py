"""`megatrain plan`: what a training step takes on a machine, and what to change where it does not fit."""
from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from ..base.limits import is_size, parse_bytes
from ..base.modes import GRADS, HOMES, MODES, PRODUCTS, SHOWN
from ..plans.changes import SHOWN as WAYS
from ..plans.changes import Refusal, typed
from ..plans.machine import MACHINES, RATES, Machine, card_with, host_limit_bytes, listing, resolve
from ..plans.planner import Plan, plan
from ..plans.shapes import shaped
from . import beside, folder, lora
from .flags import Flags
from .lora import AS
from .settings import KEPT, Settings

PICTURES = (".png", ".svg", ".pdf")
TOKENS, SEQ = 65536, 4096           # of a step, of a sequence, as `megatrain train` has them on CUDA
NO_GPU = """\
there is no GPU here to plan for. Say what to plan for:
    --machine h100-80g                 a card; `megatrain plan --list-machines` has them all
    --machine rtx4090 --host 128GiB    a card, in a host with so much memory
    --vram 24GiB --host 64GiB          some card with so much memory, at the rates of a slow one
    --machine FILE                     what `megatrain doctor --out FILE` wrote on the machine itself
    --machine cpu                      this machine's CPU device, for trying things"""


def add(commands: Any) -> None:
    parser = commands.add_parser("plan", help="what a training step takes, without weights or a GPU",
                                 description=__doc__.split(": ", 1)[1], allow_abbrev=False)
    add = parser.add_argument
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
    add("--nvme-limit", metavar="SIZE", help="the most to take there")
    add("--grads", choices=GRADS, default="ram", help="none: used as they come and kept nowhere, without clipping")
    add("--homes", choices=HOMES, help="of all units; default: each where it is best")
    add("--activations", choices=MODES, metavar="MODE",
        help=f"of all layers: {', '.join(MODES)}; default: what is best")
    add("--slots", type=int, metavar="N", help="ring size")
    add("--states", default="fp32", metavar="FORMAT", help=f"how AdamW keeps its states: {', '.join(SHOWN)}")
    add("--gpus", metavar="N", help="of a machine, each with so many tokens a step; 1,2,4,8: a table. Default: 1")
    add("--machines", metavar="N", help="with so many GPUs each, and a host like this one's; 1,2,4: a table")
    add("--layers", type=int, metavar="N", help="instead of the config's own number")
    add("--json", action="store_true", help="the plan, or why there is none and what would fit, as JSON, in bytes")
    add("--picture", type=Path, metavar="FILE", help="file to draw what lies in which memory: .png, .svg or .pdf")
    add("--compute", choices=["auto", "fused", "eager"], default="auto", help="fused layers, or the model's own code; "
        "default: fused where it fits")
    add("--lora", metavar=AS, help="of adapters, beside a model that stays as it is, as `megatrain train` has it")
    add("--base", choices=KEPT, default="none", help="with --lora, linear weights as codes; none: as they are")
    add("--products", choices=PRODUCTS, default="bf16", help="of layers: in 16 bits, or of operands rounded to 8")
    parser.set_defaults(run=run, defaults=vars(parser.parse_args([])))


NOT_PLANS = ("run", "verb", "defaults", "model", "picture", "nvme_limit", "list_machines", "json")


def run(args: argparse.Namespace) -> int:
    """0; 1 where nothing fits; 2 where too little is said."""
    if args.list_machines:
        sys.stdout.write(_json([_machine(m) for m in MACHINES.values()]) if args.json else f"{listing()}\n")
        return 0
    if args.model is None:
        sys.stderr.write("megatrain: MODEL is missing: a folder with a config.json, or a name on the hub\n")
        return 2
    shell = Shell(args)
    try:
        return _plan(args, shell)
    except MegatrainError as why:
        if found := getattr(why, "refusal", None):
            if args.json:
                sys.stdout.write(_json(_refused(found, shell)))
            sys.stderr.write(f"megatrain: {found.why.splitlines()[0] if args.json else found.text(shell)}\n")
            return 1
        raise MegatrainError(shell.told(why)) from None


def _plan(args: argparse.Namespace, shell: Shell) -> int:
    if args.picture:
        folder.may_write(args.picture, "picture", PICTURES)
    asked = {k: v for k, v in vars(args).items() if k not in NOT_PLANS} | {"nvme": _nvme(args)}
    source = folder.source_of(args.model)
    config = folder.load_config(source.model)
    if args.machine is None and resolve(None).device == "cpu":
        if not args.vram:
            sys.stderr.write(f"megatrain: {NO_GPU}\n")
            return 2
        asked["machine"] = card_with(parse_bytes(args.vram, "vram"),
                                     parse_bytes(args.host, "host") or host_limit_bytes())
    if args.seq is None:
        args.seq = min(SEQ, getattr(config, "max_position_embeddings", None) or SEQ, max(args.tokens or SEQ, 1))
    if args.tokens is None:
        args.tokens = max(TOKENS // max(args.seq, 1), 1) * max(args.seq, 1)
    asked |= {"tokens": args.tokens, "seq": args.seq}
    model = config
    if asked.pop("lora") is not None or args.base != "none":
        model = _beside_base(config, args, asked.pop("layers"))
    del asked["base"]
    several = beside.counts(args.gpus, "gpus"), beside.counts(args.machines, "machines")
    if len(several[0]) * len(several[1]) > 1:
        return _beside(beside.Plans(lambda **fleet: plan(model, **asked | fleet), *several), args)
    found = plan(model, **asked | {"gpus": several[0][0], "machines": several[1][0]})
    one = beside.alone(lambda **fleet: plan(model, **asked | fleet), found)
    sys.stdout.write(_json(_planned(found, one)) if args.json else f"{found}\n{beside.share(found, one)}")
    if args.picture:
        found.picture(args.picture)
    return 0


def _beside_base(config: Any, args: argparse.Namespace, layers: int | None) -> Any:
    """The model that trains, without weights."""
    settings = Settings.of({"lora": args.lora, "base": args.base}, "command line")
    lora.check_packages(True, settings.base)
    model = shaped(config, None if settings.base == "none" else settings.base, layers)
    return lora.Lora.of(settings.lora).beside(model, settings.seed)


def _beside(plans: beside.Plans, args: argparse.Namespace) -> int:
    """1 where none fits."""
    if args.picture:
        raise MegatrainError("picture: of one number of GPUs and of machines")
    if args.json:
        sys.stdout.write(_json([_planned(p, plans.one) if isinstance(p, Plan) else
                                {"fits": False, "why": p.why} | fleet for fleet, p in plans]))
    else:
        sys.stdout.write(f"{plans}\n")
    return int(not any(isinstance(p, Plan) for _, p in plans))


def _nvme(args: argparse.Namespace) -> str | dict[str, str] | None:
    if args.nvme_limit:
        return {"limit": args.nvme_limit} | ({"path": args.nvme} if args.nvme else {})
    if args.nvme and is_size(args.nvme) and not Path(args.nvme).is_dir():
        return {"limit": args.nvme}
    return args.nvme


# ---- as a shell has it ---------------------------------------------------------------------------

class Shell(Flags):
    """The verb's flags, and the command that was typed with others of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__([*(name for name in args.defaults if name not in NOT_PLANS), "nvme_limit", "picture"])
        self.args = args

    def whole(self, changes: dict[str, Any]) -> str:
        given = {k: v for k, v in vars(self.args).items()
                 if k in self.names and k != "picture" and v != self.args.defaults[k]}
        if "nvme" in changes:
            given.pop("nvme_limit", None)
        flags = [w for name, value in (given | changes).items() if value for w in self.flag(name, value)]
        return shlex.join(["megatrain", "plan", self.args.model, *flags])

    def flag(self, name: str, value: Any) -> list[str]:
        if isinstance(value, dict):
            value = typed("host", value["limit"])
        elif not isinstance(value, str):
            value = typed(name, value)
        return [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]


# ---- as JSON -------------------------------------------------------------------------------------

def _json(value: Any) -> str:
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """With null for what is no number of JSON."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _planned(p: Plan, one: Plan | None) -> dict[str, Any]:
    """All fields of a Plan, and what follows from them; of several GPUs the share of as many plans like `one`."""
    found = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    found |= {"machine": _machine(p.machine), "nvme": p.nvme and dataclasses.asdict(p.nvme)}
    follows = ("tokens_per_second", "vram_bytes", "host_bytes", "disk_bytes", "disk_written", "disk_years", "bound")
    of_one = {} if p.fleet.alone else {"share_of_one_gpu": one and beside.share_of(p, one)}
    return {"fits": True} | found | {name: getattr(p, name) for name in follows} | of_one


def _refused(found: Refusal, shell: Shell) -> dict[str, Any]:
    return {"fits": False, "why": found.why.splitlines()[0], "vram": found.vram, "host": found.host,
            "vram_bytes": sum(found.vram.values()), "host_bytes": sum(found.host.values()), "changes": found.alone,
            "ways": [{"changes": way.changes, "tokens_per_second": way.tokens_per_second,
                      "command": shell.whole(way.changes)} for way in found.ways[:WAYS]],
            "machine": {f"{name}_bytes": need for name, (need, _) in found.machine.items()}}


def _machine(m: Machine) -> dict[str, Any]:
    """Its fields, and where each rate comes from."""
    return dataclasses.asdict(m) | {"origins": {rate: m.origin(rate) for rate in RATES}}
