"""`megatrain plan`: what a training step takes on a machine, and what to change where it does not fit."""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from . import models
from .settings import AS, KEPT, SIZES, Flags, Settings

PICTURES = (".png", ".svg", ".pdf")
TOKENS, SEQ = 65536, 4096           # of a step, of a sequence, as `megatrain train` has them on CUDA
WAYS = 2                            # that are told
NO_GPU = """\
there is no GPU here to plan for. Say what to plan for:
    --machine h100-80g                 a card; `megatrain plan --list-machines` has them all
    --machine rtx4090 --host 128GiB    a card, in a host with so much memory
    --vram 24GiB --host 64GiB          some card with so much memory, at the rates of a slow one
    --machine FILE                     what `megatrain doctor --out FILE` wrote on the machine itself
    --machine cpu                      this machine's CPU device, for trying things"""


def add(commands: Any) -> None:
    parser = commands.add_parser("plan", help="what a training step takes, without weights or a GPU",
                                 description=__doc__.split(": ", 1)[1], allow_abbrev=False,
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
    add("--nvme-limit", metavar="SIZE", help="the most to take there")
    add("--grads", choices=mt.choices("grads"), help="none: used as they come and kept nowhere, without "
        "clipping")
    add("--homes", choices=mt.choices("homes"), help="of all units; default: each where it is best")
    add("--activations", choices=modes, metavar="MODE",
        help=f"of all layers: {', '.join(modes)}; default: what is best")
    add("--slots", type=int, metavar="N", help="ring size")
    add("--states", metavar="FORMAT", help=f"how AdamW keeps its states: {', '.join(mt.choices('states'))}")
    add("--gpus", metavar="N", help="of a machine, each with so many tokens a step; 1,2,4,8: a table. Default: 1")
    add("--machines", metavar="N", help="with so many GPUs each, and a host like this one's; 1,2,4: a table")
    add("--layers", type=int, metavar="N", help="instead of the config's own number")
    add("--json", action="store_true", help="the plan, or why there is none and what would fit, as JSON, in bytes")
    add("--picture", type=Path, metavar="FILE", help="file to draw what lies in which memory: .png, .svg or .pdf")
    add("--compute", choices=["auto", "fused", "eager"], help="fused layers, or the model's own code; default: fused "
        "where it fits")
    add("--lora", metavar=AS, help="of adapters, beside a model that stays as it is, as `megatrain train` has it")
    add("--base", choices=KEPT, help="with --lora, linear weights as codes; none: as they are")
    add("--products", choices=mt.choices("products"), help="of layers: in 16 bits, or of operands rounded to 8")
    parser.set_defaults(run=run, names=[a.dest for a in parser._actions if a.dest not in ("model", *NOT_PLANS)])


NOT_PLANS = ("help", "list_machines", "json", "run", "verb", "names")


def run(args: argparse.Namespace) -> int:
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
        if found := getattr(why, "refusal", None):
            if as_json:
                sys.stdout.write(_json(_refused(found, shell)))
            sys.stderr.write(f"megatrain: {found.why.splitlines()[0] if as_json else found.text(shell)}\n")
            return 1
        raise MegatrainError(shell.told(why)) from None


def _plan(given: dict[str, Any], as_json: bool) -> int:
    """given: flags; tokens and seq are put in where they are not."""
    picture, nvme = given.get("picture"), given.get("nvme")
    if picture:
        models.may_write(picture, "picture", PICTURES)
    config = models.load_config(models.source_of(given["model"]).model)
    asked = {k: v for k, v in given.items() if k not in ("model", "picture", "nvme_limit", "lora", "base")}
    if "nvme_limit" in given:
        asked["nvme"] = {"limit": given["nvme_limit"]} | ({"path": nvme} if nvme else {})
    with contextlib.suppress(MegatrainError):            # it is no size
        if nvme and "nvme_limit" not in given and not Path(nvme).is_dir() and mt.parse_bytes(nvme, "nvme"):
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

    @functools.cache
    def planned(machines: int, gpus: int) -> mt.Plan | str:
        """Or why there is none."""
        try:
            return mt.plan(config, **asked | {"gpus": gpus, "machines": machines})
        except MegatrainError as why:
            if not hasattr(why, "refusal"):
                raise
            return why.refusal.why.splitlines()[0]

    def of_one() -> mt.Plan | None:
        return None if isinstance(found := planned(1, 1), str) else found

    gpus, machines = (_counts(given.get(name), name) for name in ("gpus", "machines"))
    if len(gpus) * len(machines) > 1:
        if picture:
            raise MegatrainError("picture: of one number of GPUs and of machines")
        plans = {(m, g): planned(m, g) for m in machines for g in gpus}
        sys.stdout.write(_table(plans, of_one()) if not as_json else _json(
            [{"fits": False, "why": p, "gpus": g, "machines": m} if isinstance(p, str) else _planned(p, of_one())
             for (m, g), p in plans.items()]))
        return int(all(isinstance(p, str) for p in plans.values()))
    found = mt.plan(config, **asked | {"gpus": gpus[0], "machines": machines[0]})    # refused with all that would help
    one = found if _alone(found) else of_one()
    share = "" if _alone(found) else "one GPU by itself does not fit\n" if one is None else (
        f"{_share(found, one):.0%} of {found.gpus * found.machines} times one GPU by itself, "
        f"{one.tokens_per_second:,.0f} tokens/s\n")
    sys.stdout.write(_json(_planned(found, one)) if as_json else f"{found}\n{share}")
    if picture:
        found.picture(picture)
    return 0


# ---- several numbers of GPUs and machines --------------------------------------------------------

def _counts(text: str | None, name: str) -> list[int]:
    """Of "1,2,4,8", each once."""
    try:
        found = list(dict.fromkeys(int(part) for part in (text or "1").split(",")))
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise MegatrainError(f"{name}={text!r}: a number such as 8, or several such as 1,2,4,8")
    return found


def _table(plans: dict[tuple[int, int], mt.Plan | str], one: mt.Plan | None) -> str:
    """Of (machines, GPUs of each); one: of one GPU, None: it does not fit."""
    rows = [("machines", "GPUs of each", "tokens/s", "s a step", "of one GPU's", "GPU memory", "a host's memory",
             "bound by", "compute waits for")]
    for (m, g), p in plans.items():
        if isinstance(p, str):
            rows.append((str(m), str(g), "does not fit", *[""] * 6))
            continue
        waits, s = max(p.idle.items(), key=lambda item: item[1], default=("", 0.0))
        rows.append((str(m), str(g), f"{p.tokens_per_second:,.0f}", f"{p.seconds:.4g}",
                     f"{_share(p, one):.0%}" if one else "", mt.show_bytes(p.vram_bytes), mt.show_bytes(p.host_bytes),
                     p.bound, f"{waits}, {s / p.seconds:.0%}" if s >= 0.005 * p.seconds else ""))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(c.rjust(n) if i == 1 else c.ljust(n) for i, (c, n) in enumerate(zip(row, widths))).rstrip()
             for row in rows]
    for p in [p for p in plans.values() if not isinstance(p, str)][:1]:
        lines += [f"{p.model}, {p.tokens:,} tokens a step of each GPU in sequences of {p.seq:,}",
                  f"{p.machine.name}: rates {p.machine.source}"]
    return "\n".join([*lines, *dict.fromkeys(p for p in plans.values() if isinstance(p, str))]) + "\n"


def _alone(p: mt.Plan) -> bool:
    return p.gpus * p.machines == 1


def _share(p: mt.Plan, one: mt.Plan) -> float:
    """Of the speed of as many GPUs, each of which trains by itself on a machine of its own."""
    return p.tokens_per_second / (p.gpus * p.machines * one.tokens_per_second)


# ---- as a shell has it, and as JSON --------------------------------------------------------------

def _json(value: Any) -> str:
    """With null for what is no number of JSON."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=1) + "\n"


def _planned(p: mt.Plan, one: mt.Plan | None) -> dict[str, Any]:
    """All fields of a Plan, and what follows from them; of several GPUs the share of as many plans like `one`."""
    found = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    found |= {"machine": p.machine.to_dict(), "nvme": p.nvme and dataclasses.asdict(p.nvme)}
    follows = ("tokens_per_second", "vram_bytes", "host_bytes", "disk_bytes", "disk_written", "disk_years", "bound")
    of_one = {} if _alone(p) else {"share_of_one_gpu": one and _share(p, one)}
    return {"fits": True} | found | {name: getattr(p, name) for name in follows} | of_one


def _refused(found: Any, shell: Flags) -> dict[str, Any]:
    return {"fits": False, "why": found.why.splitlines()[0], "vram": found.vram, "host": found.host,
            "vram_bytes": sum(found.vram.values()), "host_bytes": sum(found.host.values()), "changes": found.alone,
            "ways": [{"changes": way.changes, "tokens_per_second": way.tokens_per_second,
                      "command": shell(way.changes, line=True)} for way in found.ways[:WAYS]],
            "machine": {f"{name}_bytes": need for name, (need, _) in found.machine.items()}}
