"""The `megatrain` command.

    megatrain train path/to/model my.txt --out runs/mine
    megatrain resume runs/mine                          from its last checkpoint
    megatrain eval runs/mine other.txt
    megatrain generate runs/mine --prompt "Once"
    megatrain export runs/mine folder                   as transformers has it
    megatrain report runs/mine                          a page with curves, time line and memory
    megatrain doctor                                    measure this machine, for plans
    megatrain plan Qwen/Qwen2.5-7B --tokens 65536 --seq 1024 --vram 24GiB
    megatrain plan path/with/config.json --tokens 65536 --seq 1024 --machine rtx4090-64g
"""
from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ._core import __version__
from .commands import evaluate, export, folder, generate, report, train
from .commands.say import Stopped
from .commands.settings import unknown
from .commands.train import device_of, made
from .errors import MegatrainError
from .formats import SHOWN
from .limits import is_size
from .machine import MACHINES
from .modes import GRADS, HOMES, MODES
from .strict import parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 1 with the reason on stderr; 128 and a signal's number where that stopped it."""
    args = _parse(argv)
    try:
        args.run(args)
    except (MegatrainError, OSError) as why:
        sys.stderr.write(f"megatrain: {_of_system(why) if isinstance(why, OSError) else why}\n")
        return 1
    except Stopped as why:
        return 128 + why.signal
    except KeyboardInterrupt:
        sys.stderr.write("megatrain: interrupted\n")
        return 128 + signal.SIGINT
    return 0


def _of_system(why: OSError) -> str:
    """What the system refused: a file's name and its reason, and what helps where the disk is full."""
    said = f"{why.filename}: {why.strerror}" if why.filename else str(why)
    return said + ("; make room there, or name a folder on another disk"
                   if why.errno in (errno.ENOSPC, errno.EDQUOT) else "")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Leaves with status 2 and the nearest verb's or flag's name where one is not known."""
    parser = _parser()
    verbs = next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.error(f"say what to do: {', '.join(verbs)}; megatrain VERB --help has each one's flags")
    if not words[0].startswith("-") and words[0] not in verbs:
        parser.error(unknown(words[0], verbs))
    args, rest = parser.parse_known_args(words)
    if rest:
        flags = [flag for flag in verbs[args.verb]._option_string_actions if flag.startswith("--")]
        parser.error(unknown(rest[0].split("=")[0], flags))
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("megatrain", description="Training models larger than the GPU, on one GPU.")
    parser.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = parser.add_subparsers(required=True, dest="verb", metavar="VERB")
    for verb in (train, evaluate, export, generate, report):
        verb.add(commands)

    doctor = commands.add_parser("doctor", help="measure what this machine can do, and keep it for plans")
    doctor.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    doctor.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: $MEGATRAIN_MACHINE, "
                        "or ~/.cache/megatrain/machine.json, where plans look")
    doctor.add_argument("--disk", metavar="FOLDER", help="measure the drive too that optimizer states may go to")
    doctor.set_defaults(run=_doctor)

    plan = commands.add_parser("plan", help="what a training step takes, without weights or a GPU")
    add = plan.add_argument
    add("model", metavar="MODEL", help="folder with a config.json, or a name on the Hugging Face hub")
    add("--tokens", type=int, metavar="N", required=True, help="of a step")
    add("--seq", type=int, metavar="N", required=True, help="tokens of a sequence")
    add("--machine", metavar="FILE|NAME",
        help=f"measured JSON, or one of {', '.join(MACHINES)}; with changes: h200-128g,vram=24GiB")
    add("--vram", metavar="SIZE", help="limit of device memory, e.g. 24GiB")
    add("--host", "--ram", metavar="SIZE", help="limit of host memory")
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
    add("--layers", type=int, metavar="N", help="instead of the config's own number")
    add("--picture", type=Path, metavar="FILE", help="file to draw what lies in which memory: .png, .svg or .pdf")
    add("--compute", choices=["auto", "fused", "eager"], default="auto")
    plan.set_defaults(run=_plan)
    return parser


PICTURES = (".png", ".svg", ".pdf")


def _doctor(args: argparse.Namespace) -> None:
    import torch

    from . import doctor

    device = torch.device(device_of(args.device))
    if args.out:
        made(args.out.parent, "out")
        if args.out.exists() and not _is_table(args.out):
            raise MegatrainError(f"out={args.out} is there, and describes no machine: it stays; name another")
    machine, limits = doctor.measure(device, lambda what: sys.stderr.write(f"measuring: {what}\n"), args.disk)
    sys.stdout.write(f"{doctor.report(machine, limits)}\n\nwritten to {doctor.store(machine, args.out)}\n")


def _is_table(path: Path) -> bool:
    """Is it a file such as doctor writes, of this version or another?"""
    try:
        return isinstance(parsed(path.read_bytes(), path), dict)
    except (MegatrainError, OSError):
        return False


def _plan(args: argparse.Namespace) -> None:
    from .planner import plan

    if args.picture:
        folder.may_write(args.picture, "picture", PICTURES)
    asked = {k: v for k, v in vars(args).items() if k not in ("run", "verb", "model", "picture", "nvme_limit")}
    if args.nvme_limit:
        asked["nvme"] = {"limit": args.nvme_limit} | ({"path": args.nvme} if args.nvme else {})
    elif args.nvme and is_size(args.nvme) and not Path(args.nvme).is_dir():
        asked["nvme"] = {"limit": args.nvme}
    found = plan(folder.load_config(folder.model_of(args.model)), **asked)
    sys.stdout.write(f"{found}\n")
    if args.picture:
        found.picture(args.picture)


if __name__ == "__main__":
    sys.exit(main())
