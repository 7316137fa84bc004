"""docs/design.md: what it names is there, and its map has every file of the core."""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/design.md").read_text()
CODE = ("csrc", "megatrain_torch", "tests", "tools", "benchmarks")
NAMES = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))


@functools.cache
def sources() -> dict[str, str]:
    """Paths from the root, and what is in them."""
    files = [p for folder in CODE for p in (ROOT / folder).rglob("*") if p.suffix in (".c", ".h", ".cu", ".py", ".pyi")]
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in files if p.name != Path(__file__).name}


@functools.cache
def words() -> frozenset[str]:
    return frozenset(w for text in sources().values() for w in re.findall(r"\w+", text))


def is_there(path: str) -> bool:
    return any(f"/{known}".endswith(f"/{path}") for known in sources()) or (ROOT / path).exists()


def test_every_file_it_names_is_there() -> None:
    files = {name for name in NAMES if re.fullmatch(r"[\w/]+\.(c|h|cu|py|md)", name)}
    assert len(files) > 60
    assert sorted(name for name in files if not is_there(name)) == []


def test_every_folder_it_names_is_there() -> None:
    folders = {name for name in NAMES if re.fullmatch(r"[\w/]+/", name)}
    assert sorted(name for name in folders if not any(f"/{name}" in f"/{known}" for known in sources())) == []


def test_every_name_of_code_is_in_the_code() -> None:
    """Functions, classes, attributes and settings: words with an underscore, an inner capital or a call's brackets."""
    said = {part for name in NAMES if re.fullmatch(r"[\w.]+(\(\))?", name) and not re.search(r"\.(c|h|cu|py|md)$", name)
            for part in name.removesuffix("()").split(".") if re.search(r"_|[a-z][A-Z]", part) or name.endswith("()")} - {""}
    assert len(said) > 40
    assert sorted(said - words()) == []


def core_map() -> list[str]:
    """Names in the first column of the map of csrc/core."""
    body = PAGE[PAGE.index("csrc/core/ "):PAGE.index("csrc/walk/ ")]
    columns = re.findall(r"^  (\w[\w., ]*?) {2,}", body, re.MULTILINE)
    return [name.removesuffix(".h") for column in columns for name in column.split(", ")]


def test_the_map_has_every_file_of_the_core() -> None:
    files = {p.name.removesuffix("_impl.h").rsplit(".")[0] for p in (ROOT / "csrc/core").iterdir()}
    assert sorted(core_map()) == sorted(files)
