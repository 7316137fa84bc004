#!/usr/bin/env python3
"""The project's rules that no compiler checks: who may include what, and what may not be in a file.

    python tools/check_rules.py            # the repository this file is in
    python tools/check_rules.py --list     # the rules

`make lint` runs it, tests/test_tools.py too. One line per finding: path:line: what, and what to do.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Each room may include from itself and from those before it (docs/design.md).
ROOMS = ["core", "walk", "dev", "ops", "optim", "io", "bind"]
# Headers of core, in the order a reader meets them: none includes one further down.
CORE_HEADERS = ("status clock lock forks dtype pool dev context watch worker blocks timeline share ledger portion "
                "store pieces home mirror resident through layout disk schedule stream offload update").split()
GUESTS = re.compile(r"^(Python\.h|structmember\.h|numpy/|torch/|ATen/|c10/|cuda|cublas|cudnn)")
PLAIN_LOCK = re.compile(r"\bpthread_(mutex_\w+|cond_(timed)?wait|rwlock_\w+|spin_\w+)|\bPTHREAD_MUTEX\w+")
LONGEST_LINE = 100
LONGEST_FUNCTION = 80
LONGEST_IN_PYTHON = 60        # of a function, with its docstring
DATA = ("examples/data/", "LICENSE")

INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]')
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home/\w+|Users/\w+|mnt/\w+)/")
LEFT_OVER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")


class File(NamedTuple):
    """One text file of the repository."""

    path: str  # from the root, with slashes
    lines: list[str]


class Finding(NamedTuple):
    """One place where a rule, or the order of rooms, is broken."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


Rule = Callable[[File], Iterator[Finding]]


def room_of(path: str) -> str | None:
    """The room a file of csrc is in."""
    parts = path.split("/")
    return parts[1] if parts[0] == "csrc" and len(parts) > 2 else None


def includes(file: File) -> Iterator[tuple[int, str]]:
    """Line numbers and names of what a C file includes."""
    if not file.path.endswith((".c", ".h", ".cu", ".cuh", ".cc")):
        return
    for number, line in enumerate(file.lines, 1):
        if found := INCLUDE.match(line):
            yield number, found[1]


def no_guests_in_core(file: File) -> Iterator[Finding]:
    """core, ops/*.c, optim and the CPU device include no Python, NumPy, torch or CUDA header."""
    room = room_of(file.path)
    name = file.path.rsplit("/", 1)[-1]
    kernels = file.path.endswith((".cu", ".cuh"))
    if room in (None, "bind") or kernels or name == "dev_cuda.c":
        return
    for number, header in includes(file):
        if GUESTS.match(header):
            yield Finding(file.path, number, f"csrc/{room} may not include <{header}>")


def guests_in_their_file(file: File) -> Iterator[Finding]:
    """NumPy is included by arrays.c alone; torch's headers by nothing in csrc."""
    if room_of(file.path) != "bind":
        return
    for number, header in includes(file):
        numpy = header.startswith("numpy/") and not file.path.endswith("/arrays.c")
        if numpy or header.startswith(("torch/", "ATen/", "c10/", "cuda")):
            yield Finding(file.path, number, f"<{header}> does not belong in this file")


def rooms_in_order(file: File) -> Iterator[Finding]:
    """A file includes only its own room and those before it; by relative path."""
    room = room_of(file.path)
    if room is None:
        return
    if room not in ROOMS:
        yield Finding(file.path, 1, f"unknown room {room}; add it to ROOMS in tools/check_rules.py")
        return
    for number, header in includes(file):
        other = header.split("/")[1] if header.startswith("../") else None
        if other is not None and other not in ROOMS[: ROOMS.index(room)]:
            yield Finding(file.path, number, f"csrc/{room} may not look into csrc/{other}")


def core_headers_in_order(file: File) -> Iterator[Finding]:
    """No public header of core includes one from further down the list."""
    stem = Path(file.path).stem
    if Path(file.path).parent.as_posix() != "csrc/core" or stem not in CORE_HEADERS:
        return
    if not file.path.endswith(".h"):
        return
    for number, header in includes(file):
        other = header.removesuffix(".h")
        if other in CORE_HEADERS and CORE_HEADERS.index(other) >= CORE_HEADERS.index(stem):
            yield Finding(file.path, number, f"{stem}.h comes before {header} in core")


def own_header_first(file: File) -> Iterator[Finding]:
    """x.c includes x.h, or x's private header, before anything else: headers stand alone."""
    path = Path(file.path)
    if room_of(file.path) is None or path.suffix != ".c":
        return
    own = {f"{path.stem}.h", f"{path.stem}_impl.h", f"{path.stem}_kernel.h"}
    names = [(number, header.rsplit("/", 1)[-1]) for number, header in includes(file)]
    late = [number for number, name in names[1:] if name == f"{path.stem}.h"]
    if late and names[0][1] not in own:
        yield Finding(file.path, late[0], f"{path.stem}.h is to be included first")


def no_machine_paths(file: File) -> Iterator[Finding]:
    """No file knows a folder of the machine it was written on."""
    for number, line in enumerate(file.lines, 1):
        if found := MACHINE_PATH.search(line):
            yield Finding(file.path, number, f"a machine's path: {found[0]}")


def nothing_left_over(file: File) -> Iterator[Finding]:
    """What is to be done is an issue, not a comment."""
    for number, line in enumerate(file.lines, 1):
        if found := LEFT_OVER.search(line):
            yield Finding(file.path, number, f"{found[0]}: do it, or make it an issue")


def lines_fit(file: File) -> Iterator[Finding]:
    """C: 100 bytes at the most, no tabs, no space at the end."""
    if not file.path.endswith((".c", ".h", ".cu", ".cuh", ".cc")):
        return
    for number, line in enumerate(file.lines, 1):
        if (n := len(line.encode())) > LONGEST_LINE:
            yield Finding(file.path, number, f"{n} bytes; {LONGEST_LINE} is the most")
        if "\t" in line or line != line.rstrip():
            yield Finding(file.path, number, "a tab, or space at the end")


def locks_have_ranks(file: File) -> Iterator[Finding]:
    """csrc: a lock is core/lock.h's, which knows its place in the order; pthread's own are used there alone."""
    if room_of(file.path) is None or file.path == "csrc/core/lock.h":
        return
    for number, line in enumerate(file.lines, 1):
        if found := PLAIN_LOCK.search(line):
            yield Finding(file.path, number, f"{found[0]}: locks have ranks; take core/lock.h's")


def python_functions_fit(file: File) -> Iterator[Finding]:
    """Python: a function has 60 lines at the most, its docstring among them."""
    if not file.path.endswith(".py"):
        return
    for node in ast.walk(ast.parse("\n".join(file.lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n = (node.end_lineno or node.lineno) - node.lineno + 1
            if n > LONGEST_IN_PYTHON:
                yield Finding(file.path, node.lineno, f"{node.name} has {n} lines; {LONGEST_IN_PYTHON} is the most")


def functions_fit(file: File) -> Iterator[Finding]:
    """C: a function of more than 80 lines is two."""
    if not file.path.endswith((".c", ".cu", ".cuh")):
        return
    begun = None
    for number, line in enumerate(file.lines, 1):
        if line == "{":
            begun = number
        elif line == "}" and begun is not None:
            if number - begun - 1 > LONGEST_FUNCTION:
                yield Finding(file.path, begun, f"a function of {number - begun - 1} lines")
            begun = None


RULES: list[Rule] = [
    no_guests_in_core,
    guests_in_their_file,
    rooms_in_order,
    core_headers_in_order,
    own_header_first,
    no_machine_paths,
    nothing_left_over,
    locks_have_ranks,
    lines_fit,
    functions_fit,
    python_functions_fit,
]


def read(root: Path, path: str) -> File | None:
    """The file, or None where it is no text or is data."""
    if path.startswith(DATA):
        return None
    try:
        return File(path, (root / path).read_text().splitlines())
    except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
        return None


def paths(root: Path) -> list[str]:
    """What git tracks or would, else (an unpacked sdist) what is there."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        return sorted(set(listed.stdout.splitlines()))
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def check(root: Path) -> list[Finding]:
    """All findings in the repository at root."""
    files = [file for path in paths(root) if (file := read(root, path)) is not None]
    return [finding for file in files for rule in RULES for finding in rule(file)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="say what the rules are")
    if parser.parse_args().list:
        for rule in RULES:
            print(f"{rule.__name__}: {rule.__doc__}")
        return 0
    findings = check(Path(__file__).resolve().parents[1])
    for finding in findings:
        print(finding)
    print(f"{len(RULES)} rules, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
