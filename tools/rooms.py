#!/usr/bin/env python3
"""The rooms of megatrain_torch: who may look at whom, and who does.

    python tools/rooms.py            # the graph of rooms, and what breaks the order
    python tools/rooms.py --files    # besides: every file with the files that it looks at

A module looks at the modules that it imports when it runs, whether at its top or inside a function. It may look at its
own room and at those before it. No circle of modules may be there, inside a room neither. Imports for types alone,
below `if TYPE_CHECKING:`, may go any way. Sizes of rooms, of C too, are held against ceilings that only fall
(ceilings.py). `make lint` runs this, tests/test_tools.py too.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import ceilings
from check_rules import Finding

PACKAGE = "megatrain_torch"
C = f"{PACKAGE}._core"  # may be looked at by everybody, looks at nobody

# In the order in which a reader meets them. What lies in no folder is a room of its own: layer ops, which others may
# use, the door of the package, and the command line, whose verbs use the package as everybody does.
ROOMS = ("ops", "base", "group", "store", "graph", "fused", "figures", "plans", "optim", "model", "checkpoint",
         "reports", PACKAGE, "commands", "cli", "__main__")


class Look(NamedTuple):
    """One module imports another."""

    module: str
    line: int
    other: str


def modules(root: Path) -> dict[str, Path]:
    """Files of the package by dotted name; a folder's is that of its __init__.py."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The folder that a module lies in; "": it is in no room."""
    room = ".".join(module.split(".")[1:2]) or PACKAGE
    return room if room in ROOMS else ""


def named(node: ast.AST, module: str, is_folder: bool) -> Iterator[str]:
    """Dotted names that an import statement may mean; of `from a import b` both a.b and a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        up = module.split(".")
        up = up[: len(up) - node.level + is_folder] if node.level else []
        source = ".".join(up + ([node.module] if node.module else []))
        yield from (f"{source}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING:`."""
    yield tree
    types_alone = isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING")
    for child in tree.orelse if types_alone else ast.iter_child_nodes(tree):
        yield from run(child)


def looks(module: str, path: Path, known: Iterable[str]) -> Iterator[Look]:
    """What a module imports of the package when it runs, anywhere in its file."""
    known = {*known, C}
    for node in run(ast.parse(path.read_text(), str(path))):
        for name in named(node, module, path.name == "__init__.py"):
            other = name if name in known else name.rpartition(".")[0]
            if other in known and other != module:
                yield Look(module, node.lineno, other)


def in_order(look: Look) -> str:
    """What is wrong with it; "": nothing."""
    here, there = room_of(look.module), room_of(look.other)
    if look.other == C or not here or not there or here == there:
        return ""
    return "" if ROOMS.index(there) < ROOMS.index(here) else f"{here} comes before {there}, and may not look at it"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that look at each other, directly or through others (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            circle, stack[at:] = stack[at:], []
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in sorted(graph):
        if name not in number:
            visit(name)
    return found


def check(root: Path) -> tuple[list[Finding], list[Look]]:
    """What breaks the order, and all that looks at something."""
    files = modules(root)
    seen = [look for name, path in files.items() for look in looks(name, path, files)]
    findings = []
    for name, path in files.items():
        if not room_of(name):
            text = f"{name} is in no room; put it into a folder of these: {', '.join(ROOMS)}"
            findings.append(Finding(path.relative_to(root).as_posix(), 1, text))
    for look in seen:
        if why := in_order(look):
            text = f"{why}: {short(look.module)} imports {short(look.other)}"
            findings.append(Finding(files[look.module].relative_to(root).as_posix(), look.line, text))
    graph: dict[str, set[str]] = {}
    for look in seen:
        graph.setdefault(look.module, set()).add(look.other)
    for circle in circles(graph):
        text = f"a circle of imports: {', '.join(map(short, circle))}"
        findings.append(Finding(files[circle[0]].relative_to(root).as_posix(), 1, text))
    return findings, seen


def short(module: str) -> str:
    """Without the package's name."""
    return module.removeprefix(f"{PACKAGE}.")


def drawn(root: Path, seen: list[Look]) -> Iterator[str]:
    """A line for each room: how many files and lines it has, and at which rooms it looks, in how many imports."""
    files = modules(root)
    width = max(map(len, ROOMS))
    for room in ROOMS:
        own = [path for name, path in files.items() if room_of(name) == room]
        lines = sum(len(path.read_text().splitlines()) for path in own)
        counts: dict[str, int] = {}
        for look in seen:
            other = room_of(look.other) if look.other != C else ""
            if room_of(look.module) == room and other not in ("", room):
                counts[other] = counts.get(other, 0) + 1
        at = ", ".join(f"{other} {counts[other]}" for other in ROOMS if other in counts)
        yield f"{room:{width}}  {len(own):3} files {lines:6} lines   looks at {at or 'nobody'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="every file with the files that it looks at")
    asked = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    findings, seen = check(root)
    for line in drawn(root, seen):
        print(line)
    if asked.files:
        for name in sorted({look.module for look in seen}):
            print(f"{short(name)}: {' '.join(sorted({short(s.other) for s in seen if s.module == name}))}")
    findings += ceilings.report()
    for finding in findings:
        print(finding)
    print(f"{len(ROOMS)} rooms, each looks only at those above it; {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
