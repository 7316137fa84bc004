"""`megatrain doctor`: what this machine can do, measured and kept for plans."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from ..base.strict import parsed
from .export import made
from .flags import Flags
from .unsaid import device_of


def add(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="measure what this machine can do, and keep it for plans",
                                 allow_abbrev=False)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: $MEGATRAIN_MACHINE, "
                        "or ~/.cache/megatrain/machine.json, where plans look")
    parser.add_argument("--disk", metavar="FOLDER", help="measure the drive too that optimizer states may go to")
    parser.add_argument("--gpus", type=int, metavar="N", help="measure links between so many GPUs; default: all there "
                        "are. On the CPU device as many processes; default: 1, none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    try:
        _run(args)
    except MegatrainError as why:
        raise MegatrainError(Flags(("device", "out", "disk", "gpus")).told(why)) from None


def _run(args: argparse.Namespace) -> None:
    import torch

    from ..plans import doctor, links

    device = torch.device(device_of(args.device))
    gpus = _gpus(args.gpus, torch.cuda.device_count() if device.type == "cuda" else None)
    if args.out:
        made(args.out.parent, "out")
        if args.out.exists() and not _is_table(args.out):
            raise MegatrainError(f"out={args.out} is there, and describes no machine: it stays; name another")
    if device.type == "cpu" and not args.device:
        sys.stderr.write("no GPU here: what is measured is the CPU device, for `megatrain plan --machine cpu`\n")
    machine, limits = doctor.measure(device, lambda what: sys.stderr.write(f"measuring: {what}\n"), args.disk)
    if gpus > 1:
        sys.stderr.write(f"measuring: links between {gpus} {'GPUs' if device.type == 'cuda' else 'processes'}\n")
        machine = links.linked(machine, links.measure(device.type, gpus))
    sys.stdout.write(f"{doctor.report(machine, limits)}\n\nwritten to {doctor.store(machine, args.out)}\n")


def _gpus(asked: int | None, there: int | None) -> int:
    """there: GPUs; None: the CPU device, on which there may be as many processes as are asked for."""
    if asked is not None and (asked < 1 or asked > (there or asked)):
        raise MegatrainError(f"gpus={asked}: 1 to {there or 'any number'}")
    return asked or there or 1


def _is_table(path: Path) -> bool:
    """Is it a file such as doctor writes, of this version or another?"""
    try:
        return isinstance(parsed(path.read_bytes(), path), dict)
    except (MegatrainError, OSError):
        return False
