"""Records of data: of files, of folders of files, of a data set on the hub.

    .jsonl .ndjson      a line, a record            .csv .tsv     a row, a record, by the names in the first row
    .json               an entry of its list        .parquet      a row, read by `datasets`
    anything else       the text itself: {"text": ...}

A record that cannot be read is given as the MegatrainError that says why: one bad line does not end a run.
"""
from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from .folder import near
from .owned import MARKER
from .say import say

TEXT_KINDS = (".txt", ".text", ".md", ".py", ".rst")
LINE_KINDS, TABLE_KINDS = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
RECORD_KINDS = (*LINE_KINDS, ".json", *TABLE_KINDS, ".parquet")
SEPARATORS = (";", "\t", "|")        # that are written into .csv too
Record = dict[str, Any]


def records(data: str, split: str = "train") -> Iterator[Record | MegatrainError]:
    """The records of a file, of all files of a folder in the order of their names, or of a data set on the hub.

    Raises:
        MegatrainError: there is none, or a file cannot be read at all.
    """
    files = files_of(data)
    if files is None:
        yield from _loaded(data, f"data set {data!r}, split {split!r}{near(data)}", split=split)
        return
    for file in files:
        try:
            yield from _file(file)
        except OSError as why:
            raise MegatrainError(f"{file}: cannot be read ({why.strerror})") from None


def files_of(data: str) -> list[Path] | None:
    """The files that a name stands for; None: it may be one on the hub.

    Raises:
        MegatrainError: there is no such file, or none in the folder that can be read.
    """
    path, kinds = Path(data), (*TEXT_KINDS, *RECORD_KINDS)
    if path.is_dir():
        runs = {marker.parent for marker in path.rglob(MARKER)} - {path}
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in kinds and p.is_file()
                       and not runs.intersection(p.parents))
        if not files:
            raise MegatrainError(f"{data}: no file in it ends in {', '.join(kinds)}")
        return files
    if path.is_file():
        return [path]
    if path.suffix.lower() in kinds or data.startswith((".", "/", "~")):
        raise MegatrainError(f"{data}: there is no such file{near(data)}")
    return None


def _file(path: Path) -> Iterator[Record | MegatrainError]:
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _loaded("parquet", str(path), data_files=str(path), split="train")
    if kind in LINE_KINDS:
        return _lines(path)
    if kind in TABLE_KINDS:
        return _table(path)
    return _array(path) if kind == ".json" else _whole(path)


def _whole(path: Path) -> Iterator[Record]:
    found = _text(path, f"a text file, or one of {', '.join(RECORD_KINDS)}, is needed; a text of another encoding: "
                        f"iconv -f LATIN1 -t UTF-8 {path}")
    if _begins_as_lines(found):
        say(f"{path} is trained as it stands, as a text; if its lines are records, name it .jsonl")
    yield {"text": found}


def _text(path: Path, needed: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as why:
        raise MegatrainError(f"{path}: byte {why.start} is not UTF-8: {needed}") from None


# ---- JSON ----------------------------------------------------------------------------------------

def _lines(path: Path) -> Iterator[Record | MegatrainError]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield _record(line, f"{path}:{number}")


def _array(path: Path) -> Iterator[Record | MegatrainError]:
    text = _text(path, "JSON is UTF-8")
    try:
        found = from_json(text, str(path))
    except MegatrainError:
        if "\n" in text.strip() and _begins_as_lines(text):
            yield from _lines(path)                      # many a file of lines is called .json
            return
        raise
    for number, record in enumerate(found if isinstance(found, list) else [found], 1):
        yield _record(record, f"{path}, record {number}")


def _begins_as_lines(text: str) -> bool:
    first = text.lstrip().partition("\n")[0]
    return first[:1] == "{" and isinstance(_record(first, ""), dict)


def _record(found: Any, where: str) -> Record | MegatrainError:
    try:
        found = from_json(found, where) if isinstance(found, (str, bytes)) else found
    except MegatrainError as why:
        return why
    if isinstance(found, dict):
        return found
    return MegatrainError(f"{where}: an object such as {{\"text\": ...}} is needed, not a {type(found).__name__}")


def from_json(text: str | bytes, where: str) -> Any:
    """Raises: MegatrainError: it is none; the message begins with `where` and says the line and the column."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as why:
        raise MegatrainError(f"{where}: byte {why.start} is not UTF-8, as JSON is") from None
    except json.JSONDecodeError as why:
        doc = why.doc.rstrip()           # what is missing at a line's end json tells as at the beginning of the next
        place = (f"line {why.lineno}, column {why.colno}" if "\n" in doc
                 else f"column {min(why.pos, len(doc)) + 1}")
        raise MegatrainError(f"{where}: not JSON: {why.msg} at {place}") from None
    except (RecursionError, ValueError) as why:
        raise MegatrainError(f"{where}: not JSON that can be read: {why}") from None


# ---- tables --------------------------------------------------------------------------------------

def _table(path: Path) -> Iterator[Record | MegatrainError]:
    csv.field_size_limit(2**31 - 1)                      # of a field; Python's own is 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(text, delimiter=_separator(path), strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
            if not names:
                raise MegatrainError(f"{path}: it is empty; a first row with the fields' names is needed")
            if twice := [name for name in names if names.count(name) > 1]:
                raise MegatrainError(f"{path}:1: two fields are called {twice[0]!r}: give each a name of its own")
            for row in rows:
                if row:
                    yield _row(names, row, f"{path}:{rows.line_num}")
        except csv.Error as why:
            raise MegatrainError(f"{path}:{rows.line_num}: not a table: {why}") from None
        except UnicodeDecodeError:
            raise MegatrainError(f"{path}: behind line {rows.line_num} it is not UTF-8: iconv -f LATIN1 -t UTF-8 "
                                 f"{path}") from None


def _separator(path: Path) -> str:
    """By the file's name; of a .csv by its first line, which has names alone."""
    own = TABLE_KINDS[path.suffix.lower()]
    with path.open("rb") as raw:
        first = raw.readline(1 << 16).decode("utf-8", "replace")
    others = [s for s in SEPARATORS if s in first]
    return others[0] if own not in first and others else own


def _row(names: list[str], row: list[str], where: str) -> Record | MegatrainError:
    if len(row) != len(names):
        return MegatrainError(f"{where}: {len(row)} fields, and {len(names)} names in the first row; a text with "
                              "commas or line ends stands in \"...\"")
    try:
        return {name: from_json(value, f"{where}: {name}") if name in ("messages", "conversations") else value
                for name, value in zip(names, row)}
    except MegatrainError as why:
        return why


def _loaded(name: str, where: str, **kw: Any) -> Iterator[Record]:
    """What `datasets` reads, streamed: nothing of it goes into its cache."""
    try:
        import datasets
    except ImportError:
        raise MegatrainError(f"{where}: parquet, and data on the hub, need pip install datasets") from None
    try:
        yield from datasets.load_dataset(name, streaming=True, **kw)
    except (OSError, ValueError) as why:
        raise MegatrainError(f"{where}: {why}") from None
