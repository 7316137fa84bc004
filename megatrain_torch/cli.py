"""The `megatrain` command.

    megatrain train path/to/model my.txt --out runs/mine
    megatrain resume runs/mine                          from its last checkpoint
    megatrain eval runs/mine other.txt
    megatrain generate runs/mine --prompt "Once"
    megatrain export runs/mine folder                   as transformers has it
    megatrain doctor                                    measure this machine, for plans
    megatrain plan Qwen/Qwen2.5-7B --tokens 65536 --seq 1024 --vram 24GiB
    megatrain plan path/with/config.json --tokens 65536 --seq 1024 --machine rtx4090 --host 128GiB
    megatrain plan --list-machines
"""
from __future__ import annotations

import argparse
import errno
import functools
import signal
import sys
from collections.abc import Sequence

from megatrain_torch import MegatrainError, __version__

from .commands import launch, train, verbs
from .commands.settings import Stopped, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 1 with the reason on stderr, 2 where the command says too little; 128 and a signal's number
    where that stopped it."""
    try:
        if getattr(signal.getsignal(signal.SIGINT), "__module__", "") == __package__:
            signal.signal(signal.SIGINT, signal.default_int_handler)     # all is imported
        launch.watch()
        args = _parse(argv)
        return args.run(args) or 0
    except (MegatrainError, OSError) as why:
        launch.complain(why, _of_system(why) if isinstance(why, OSError) else str(why))
        return 1
    except Stopped as why:
        return 128 + why.args[0]
    except KeyboardInterrupt as why:
        launch.complain(why, "interrupted")
        return 128 + signal.SIGINT


def _of_system(why: OSError) -> str:
    """What the system refused: a file's name and its reason, and what helps where the disk is full."""
    said = f"{why.filename}: {why.strerror}" if why.filename else str(why)
    return said + ("; make room there, or name a folder on another disk"
                   if why.errno in (errno.ENOSPC, errno.EDQUOT) else "")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Leaves with status 2 and the nearest verb's or flag's name where one is not known."""
    parser = argparse.ArgumentParser("megatrain", description="Training models larger than the GPU, on one or several.")
    parser.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = parser.add_subparsers(required=True, dest="verb", metavar="VERB", parser_class=functools.partial(
        argparse.ArgumentParser, allow_abbrev=False))
    for room in (train, verbs):
        room.add(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.error(f"say what to do: {', '.join(commands.choices)}; megatrain VERB --help has each one's flags")
    if not words[0].startswith("-") and words[0] not in commands.choices:
        parser.error(unknown(words[0], commands.choices))
    args, rest = parser.parse_known_args(words)
    if "data" in args and not any(word.startswith("-") for word in rest):        # DATA behind a flag
        args.data, rest = [*args.data, *rest], []
    if args.verb == "train":                                 # TRL's arguments by their own names
        args.more, rest = _pairs(rest)
    if rest:
        flags = [flag for flag in commands.choices[args.verb]._option_string_actions if flag.startswith("--")]
        parser.error(unknown(rest[0].split("=")[0], flags))
    if "words" in args:                  # of a verb that starts processes which run the same
        args.words = words
    return args


def _pairs(rest: list[str]) -> tuple[dict[str, str], list[str]]:
    """(names and values, what is left) of `--name value` and `--name=value`."""
    found: dict[str, str] = {}
    while rest and rest[0].startswith("--"):
        name, given, value = rest[0][2:].partition("=")
        if not given and (len(rest) < 2 or rest[1].startswith("--")):
            break
        found[name.replace("-", "_")] = value if given else rest[1]
        rest = rest[1 if given else 2:]
    return found, rest


if __name__ == "__main__":
    sys.exit(main())
