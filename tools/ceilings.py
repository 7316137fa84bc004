#!/usr/bin/env python3
"""How large each room is, against ceilings that only fall.

    python tools/ceilings.py            # the table, and what is over its ceiling
    python tools/ceilings.py --lower    # ceilings.json follows what has become smaller

A room is a folder of csrc or of the package. Counted are its lines, files, public names (C: functions of its headers;
Python: functions, classes and constants of modules, without a leading underscore), nouns (C: types that its headers
define; Python: classes), Protocols, and functions that are named in one place besides their definition. A change that
needs more in one room lowers another's ceiling, so that the sum in "all" holds. `tools/rooms.py` runs this.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path

from check_rules import Finding

ROOT = Path(__file__).resolve().parents[1]
TABLE = "tools/ceilings.json"
COLUMNS = ("lines", "files", "names", "nouns", "protocols", "single")
WORD = re.compile(r"[A-Za-z_]\w*")
NO_FUNCTION = r"^(?!typedef|struct|enum|union|return|else|extern)"
C_FUNCTION = re.compile(NO_FUNCTION + r"[A-Za-z_][\w \*]*?\b(\w+)\([^;{}]*\)\n\{", re.M)
C_DECLARED = re.compile(r"^(?!typedef|#|static|return)[A-Za-z_][\w \*]*?\b(mt_\w+)\([^{}]*?\);", re.M)
C_NOUN = re.compile(r"\btypedef\b[^;{]*(?:\{.*?^\}|[^;{]*)\s*\*?\(?\*?(\w+)\)?[^;]*;", re.M | re.S)

Counts = dict[str, int]


def python_counts(trees: dict[Path, ast.Module], words: Counter[str]) -> Counts:
    """words: how often each name is used, in all of the package."""
    found = Counter(dict.fromkeys(COLUMNS, 0))
    for path, tree in trees.items():
        found["files"] += 1
        found["lines"] += len(path.read_text().splitlines())
        for node in tree.body:
            targets = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else [
                t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
            found["names"] += sum(not name.startswith("_") for name in targets)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found["nouns"] += 1
                found["protocols"] += any(ast.unparse(base).startswith("Protocol") for base in node.bases)
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                found["single"] += words[node.name] == 1
    return dict(found)


def python_words(trees: dict[Path, ast.Module]) -> Counter[str]:
    """Uses of names and attributes, definitions left out."""
    words: Counter[str] = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                words[node.id] += 1
            elif isinstance(node, ast.Attribute):
                words[node.attr] += 1
    return words


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def c_counts(files: list[Path], words: Counter[str]) -> Counts:
    """words: how often each word stands in all of csrc, comments left out."""
    found = Counter(dict.fromkeys(COLUMNS, 0))
    for path in files:
        text = without_comments(path.read_text())
        found["files"] += 1
        found["lines"] += len(path.read_text().splitlines())
        declared = set(C_DECLARED.findall(text)) if path.suffix == ".h" else set()
        found["names"] += len(declared)
        found["nouns"] += len(set(C_NOUN.findall(text))) if path.suffix == ".h" else 0
        for name in C_FUNCTION.findall(text):        # its definition and one use; a header's line is a third
            found["single"] += words[name] == 2
    return dict(found)


def measured(root: Path = ROOT) -> dict[str, Counts]:
    """By room; "all" is their sum."""
    trees = {p: ast.parse(p.read_text()) for p in sorted((root / "megatrain_torch").rglob("*.py"))}
    words = python_words(trees)
    rooms: dict[str, Counts] = {}
    package = root / "megatrain_torch"
    for folder in sorted({package / p.relative_to(package).parts[0] for p in trees if p.parent != package} | {package}):
        own = {p: t for p, t in trees.items() if p.parent == folder or (folder in p.parents and folder != package)}
        rooms[folder.relative_to(root).as_posix()] = python_counts(own, words)
    sources = [p for p in sorted((root / "csrc").rglob("*")) if p.suffix in (".c", ".h", ".cu", ".cuh", ".cc")]
    c_words = Counter(w for p in sources for w in WORD.findall(without_comments(p.read_text())))
    for folder in sorted({p.parent for p in sources}):
        rooms[folder.relative_to(root).as_posix()] = c_counts([p for p in sources if p.parent == folder], c_words)
    tests = [p for p in (root / "tests").rglob("*") if p.suffix in (".py", ".c", ".h")]
    rooms["tests"] = {"lines": sum(len(p.read_text().splitlines()) for p in tests), "files": len(tests)}
    rooms["all"] = {c: sum(r.get(c, 0) for r in rooms.values()) for c in COLUMNS}
    return rooms


def over(found: dict[str, Counts], table: dict[str, Counts]) -> list[Finding]:
    """What is larger than its ceiling."""
    findings = []
    for room, counts in found.items():
        for column, n in counts.items():
            most = table.get(room, {}).get(column, 0)
            if n > most:
                text = (f"{room} has {n:,} {column}, and its ceiling is {most:,}: make it smaller, or lower another "
                        "room's ceiling by as much as this one needs")
                findings.append(Finding(TABLE, 1, text))
    return findings


def lowered(found: dict[str, Counts], table: dict[str, Counts]) -> dict[str, Counts]:
    """The table, with what has become smaller; rooms that are new get what they have."""
    return {room: {c: min(n, table.get(room, counts).get(c, n)) for c, n in counts.items()}
            for room, counts in found.items()}


def report() -> list[Finding]:
    """Prints each room's counts beside their ceilings; what is over."""
    found, table = measured(), json.loads((ROOT / TABLE).read_text())
    width = max(map(len, found))
    print(f"{'':{width}} " + " ".join(f"{c:>15}" for c in COLUMNS))
    for room, counts in found.items():
        print(f"{room:{width}} " + " ".join(
            f"{counts[c]:>7,}/{table.get(room, {}).get(c, 0):>7,}" if c in counts else " " * 15 for c in COLUMNS))
    return over(found, table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write the table anew where rooms have become smaller")
    if parser.parse_args().lower:
        path = ROOT / TABLE
        table = lowered(measured(), json.loads(path.read_text()) if path.exists() else {})
        path.write_text("{\n" + ",\n".join(f"  {json.dumps(r)}: {json.dumps(c)}" for r, c in table.items()) + "\n}\n")
    findings = report()
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
