"""What a room needs of a later one is a Protocol: each names the class that it stands for, which has all that it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatrain_torch"


def defined() -> Iterator[tuple[str, ast.ClassDef]]:
    """(file, class) of all classes at the top of a module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(PACKAGE).as_posix(), node


def bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def stands_for(node: ast.ClassDef) -> str:
    """The class that ends a Protocol's first sentence, as ": ring.Ring."; "": none, anybody may be one."""
    first = (ast.get_docstring(node) or "").partition("\n\n")[0]
    named = re.search(r": \w+\.(\w+)\.$", first)
    return named[1] if named else ""


CLASSES = list(defined())
PROTOCOLS = {f"{path}:{node.name}": node for path, node in CLASSES if "Protocol" in bases(node) and stands_for(node)}


def said(node: ast.ClassDef) -> set[str]:
    """Names in a class's body."""
    found = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    return found | {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def has(name: str) -> set[str]:
    """Names in the body of each class of this name, of its bases, and what its methods set."""
    found: set[str] = set()
    for _, node in CLASSES:
        if node.name == name and "Protocol" not in bases(node):
            found |= said(node)
            found |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                      and isinstance(n.value, ast.Name) and n.value.id == "self"}
            for base in bases(node):
                found |= has(base)
    return found


@pytest.mark.parametrize("where", PROTOCOLS)
def test_a_protocol_stands_for_a_class_that_has_all_that_it_says(where: str) -> None:
    node = PROTOCOLS[where]
    there = has(stands_for(node))
    assert there, f"{where}: there is no class {stands_for(node)}"
    assert said(node) - there == set(), f"{stands_for(node)} has none of these"
