"""Records of data: of files, of folders of files, of a data set on the hub.

    .jsonl .ndjson      a line, a record            .csv .tsv     a row, a record, by the names in the first row
    .json               an entry of its list        .parquet      a row
    anything else       the text itself: {"text": ...}, in parts where it is long

A file is never whole in memory but where it is one value (.json).
"""
from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from ..base.errors import MegatrainError
from .folder import near
from .owned import MARKER
from .say import say

TEXT_KINDS = (".txt", ".text", ".md", ".py", ".rst")
LINE_KINDS, TABLE_KINDS = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
RECORD_KINDS = (*LINE_KINDS, ".json", *TABLE_KINDS, ".parquet")
SEPARATORS = (";", "\t", "|")        # that are written into .csv too
READ_BYTES = 1 << 18                 # of a text file, read at once
LONG_BYTES = 1 << 20                 # a text file of more is read in parts
EVERY_S = {True: 0.5, False: 30.0}   # on a terminal, and without one: between two looks at how far it is
Record = dict[str, Any]


class Meter:
    """How far reading and tokenizing is; told on stderr where it takes long."""

    def __init__(self, paths: list[Path]) -> None:
        self._bytes, self._before, self._at = sum(p.stat().st_size for p in paths), 0, 0
        self._told, self._live, self.tokens = monotonic(), sys.stderr.isatty(), 0

    def at(self, position: int) -> None:
        """Of the file that is being read."""
        self._at = position

    def done(self, path: Path) -> None:
        self._before, self._at = self._before + path.stat().st_size, 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        if (now := monotonic()) - self._told < EVERY_S[self._live]:
            return
        self._told = now
        share = f"{min(1.0, (self._before + self._at) / self._bytes):.0%}, " if self._bytes else ""
        sys.stderr.write(f"tokenizing: {share}{self.tokens:,} tokens" + ("\r" if self._live else "\n"))
        sys.stderr.flush()


class TextFile:
    """A long text file: its text, a part at a time."""

    def __init__(self, path: Path, meter: Meter | None = None) -> None:
        self.path, self._meter = path, meter

    def __iter__(self) -> Iterator[str]:
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
        done = 0
        with self.path.open("rb") as file:
            while part := file.read(READ_BYTES):
                yield self._decoded(decoder, part, done, False)
                done += len(part)
                if self._meter is not None:
                    self._meter.at(done)
        yield self._decoded(decoder, b"", done, True)

    def _decoded(self, decoder: Any, part: bytes, done: int, last: bool) -> str:
        try:
            return decoder.decode(part, last)
        except UnicodeDecodeError as why:                # what it decodes begins with the rest of the part before
            raise _no_text(self.path, done + len(part) - len(why.object) + why.start) from None


def records(data: str, split: str = "train", meter: Meter | None = None) -> Iterator[Record]:
    """The records of a file, of all files of a folder in the order of their names, or of a data set on the hub.

    Raises:
        MegatrainError: there is none, or it cannot be read; the message has the file and the line.
    """
    files = files_of(data)
    if files is None:
        yield from _hub(data, split)
        return
    meter = meter or Meter(files)
    for file in files:
        try:
            yield from _file(file, meter)
        except OSError as why:
            raise MegatrainError(f"{file}: cannot be read ({why.strerror})") from None
        meter.done(file)


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


def _file(path: Path, meter: Meter) -> Iterator[Record]:
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _parquet(path)
    if kind in LINE_KINDS:
        return _lines(path, meter)
    if kind in TABLE_KINDS:
        return _table(path, meter)
    if kind == ".json":
        return _array(path, meter)
    if path.stat().st_size > LONG_BYTES:
        return iter([{"text": TextFile(path, meter)}])
    return iter([{"text": _text(path)}])


def _text(path: Path) -> str:
    try:
        found = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as why:
        raise _no_text(path, why.start) from None
    if found.lstrip()[:1] == "{" and _is_object(found.lstrip().partition("\n")[0]):
        say(f"{path} is trained as it stands, as a text; if its lines are records, name it .jsonl")
    return found


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _no_text(path: Path, byte: int) -> MegatrainError:
    return MegatrainError(f"{path}: byte {byte} is not UTF-8: a text file, or one of {', '.join(RECORD_KINDS)}, is "
                          f"needed; a text of another encoding: iconv -f LATIN1 -t UTF-8 {path}")


# ---- JSON ----------------------------------------------------------------------------------------

def _lines(path: Path, meter: Meter) -> Iterator[Record]:
    at = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            at += len(line)
            meter.at(at)
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield _record(from_json(line, f"{path}:{number}"), f"{path}:{number}")


def _array(path: Path, meter: Meter) -> Iterator[Record]:
    text = _read(path)
    try:
        found = from_json(text, str(path))
    except MegatrainError:
        if "\n" in text.strip() and _is_object(text.lstrip().partition("\n")[0]):
            yield from _lines(path, meter)               # many a file of lines is called .json
            return
        raise
    for number, record in enumerate(found if isinstance(found, list) else [found], 1):
        yield _record(record, f"{path}, record {number}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as why:
        raise MegatrainError(f"{path}: byte {why.start} is not UTF-8, as JSON is") from None


def from_json(text: str | bytes, where: str) -> Any:
    """Raises: MegatrainError: it is none; the message begins with `where` and says the line and the column."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as why:
        raise MegatrainError(f"{where}: byte {why.start} is not UTF-8, as JSON is") from None
    except json.JSONDecodeError as why:
        raise MegatrainError(f"{where}: not JSON: {why.msg} at {_place(why)}") from None
    except (RecursionError, ValueError) as why:
        raise MegatrainError(f"{where}: not JSON that can be read: {why}") from None


def _place(why: json.JSONDecodeError) -> str:
    """In a line alone the column; what is missing at its end json tells as at the beginning of the next."""
    text = why.doc.rstrip()
    return f"line {why.lineno}, column {why.colno}" if "\n" in text else f"column {min(why.pos, len(text)) + 1}"


def _record(found: Any, where: str) -> Record:
    if not isinstance(found, dict):
        raise MegatrainError(f"{where}: an object such as {{\"text\": ...}} is needed, not a {type(found).__name__}")
    return found


# ---- tables --------------------------------------------------------------------------------------

def _table(path: Path, meter: Meter) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)                      # of a field; Python's own is 128 KiB
    with path.open("rb") as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        rows = csv.reader(text, delimiter=_separator(path), strict=True)
        try:
            names = _names(next(rows, []), path)
            for row in rows:
                meter.at(raw.tell())
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
        first = _first_line(raw)
    others = [s for s in SEPARATORS if s in first]
    return others[0] if own not in first and others else own


def _first_line(raw: BinaryIO) -> str:
    return raw.readline(1 << 16).decode("utf-8", "replace")


def _names(row: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in row]
    if not names:
        raise MegatrainError(f"{path}: it is empty; a first row with the fields' names is needed")
    if twice := [name for name in names if names.count(name) > 1]:
        raise MegatrainError(f"{path}:1: two fields are called {twice[0]!r}: give each a name of its own")
    return names


def _row(names: list[str], row: list[str], where: str) -> Record:
    if len(row) != len(names):
        raise MegatrainError(f"{where}: {len(row)} fields, and {len(names)} names in the first row; a text with commas "
                             "or line ends stands in \"...\"")
    return {name: from_json(value, f"{where}: {name}") if name in ("messages", "conversations") else value
            for name, value in zip(names, row)}


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MegatrainError(f"{path}: parquet needs pyarrow: pip install pyarrow") from None
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as why:
        raise MegatrainError(f"{path}: not parquet: {why}") from None


def _hub(name: str, split: str) -> Iterator[Record]:
    try:
        import datasets
    except ImportError:
        raise MegatrainError(f"{name!r} is no file or folder here, and a name on the hub needs pip install datasets"
                             f"{near(name)}") from None
    try:
        yield from datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as why:
        raise MegatrainError(f"data set {name!r}, split {split!r}{near(name)}: {why}") from None
