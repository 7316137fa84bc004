"""Records of data: of files, of folders of files, of a data set on the hub; and what a record asks.

    .jsonl .ndjson      a line, a record            .csv .tsv     a row, a record, by the names in the first row
    .json               an entry of its list        .parquet      a row, read by `datasets`
    anything else       the text itself: {"text": ...}

A record that cannot be read is given as the MegatrainError that says why: one bad line does not end a run. That is why
`datasets` reads no lines here: it ends at the first bad one, and fills in what a record has not.
"""
from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from .folder import MARKER
from .settings import from_json, near, say

TEXT_KINDS = (".txt", ".text", ".md", ".py", ".rst")
LINE_KINDS, TABLE_KINDS = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
RECORD_KINDS = (*LINE_KINDS, ".json", *TABLE_KINDS, ".parquet")
SEPARATORS = (";", "\t", "|")        # that are written into .csv too
Record = dict[str, Any]


def records(data: str, split: str = "train") -> Iterator[Record | MegatrainError]:
    """The records of a file, of all files of a folder in the order of their names, or of a data set on the hub."""
    files = files_of(data)
    if files is None:
        yield from _loaded(data, f"data set {data!r}, split {split!r}{near(data)}", split=split)
    for file in files or ():
        kind = file.suffix.lower()
        try:
            if kind == ".parquet":
                yield from _loaded("parquet", str(file), data_files=str(file), split="train")
            else:
                yield from (_lines if kind in LINE_KINDS else _table if kind in TABLE_KINDS else
                            _array if kind == ".json" else _whole)(file)
        except OSError as why:
            raise MegatrainError(f"{file}: cannot be read ({why.strerror})") from None


def files_of(data: str) -> list[Path] | None:
    """The files that a name stands for; None: it may be one on the hub."""
    path, kinds = Path(data), (*TEXT_KINDS, *RECORD_KINDS)
    if path.is_file():
        return [path]
    if path.is_dir():
        runs = {marker.parent for marker in path.rglob(MARKER)} - {path}
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in kinds and p.is_file()
                       and not runs.intersection(p.parents))
        if not files:
            raise MegatrainError(f"{data}: no file in it ends in {', '.join(kinds)}")
        return files
    if path.suffix.lower() in kinds or data.startswith((".", "/", "~")):
        raise MegatrainError(f"{data}: there is no such file{near(data)}")
    return None


def _text(path: Path, needed: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as why:
        raise MegatrainError(f"{path}: byte {why.start} is not UTF-8: {needed}") from None


def _whole(path: Path) -> Iterator[Record]:
    found = _text(path, f"a text file, or one of {', '.join(RECORD_KINDS)}, is needed; a text of another encoding: "
                        f"iconv -f LATIN1 -t UTF-8 {path}")
    if _begins_as_lines(found):
        say(f"{path} is trained as it stands, as a text; if its lines are records, name it .jsonl")
    yield {"text": found}


def _lines(path: Path) -> Iterator[Record | MegatrainError]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _record(line, f"{path}:{number}")


def _array(path: Path) -> Iterator[Record | MegatrainError]:
    text = _text(path, "JSON is UTF-8")
    try:
        found = from_json(text, str(path))
    except MegatrainError:
        if "\n" not in text.strip() or not _begins_as_lines(text):
            raise
        yield from _lines(path)                          # many a file of lines is called .json
        return
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
    return found if isinstance(found, dict) else MegatrainError(
        f"{where}: an object such as {{\"text\": ...}} is needed, not a {type(found).__name__}")


def _table(path: Path) -> Iterator[Record | MegatrainError]:
    csv.field_size_limit(2**31 - 1)                      # of a field; Python's own is 128 KiB
    between = TABLE_KINDS[path.suffix.lower()]
    with path.open("rb") as raw:                         # the first line has names alone
        first = raw.readline(1 << 16).decode("utf-8", "replace")
    between = between if between in first else next((s for s in SEPARATORS if s in first), between)
    with path.open(encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(text, delimiter=between, strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
            if not names:
                raise MegatrainError(f"{path}: it is empty; a first row with the fields' names is needed")
            if twice := [name for name in names if names.count(name) > 1]:
                raise MegatrainError(f"{path}:1: two fields are called {twice[0]!r}: give each a name of its own")
            for row in filter(None, rows):
                yield _row(names, row, f"{path}:{rows.line_num}")
        except csv.Error as why:
            raise MegatrainError(f"{path}:{rows.line_num}: not a table: {why}") from None
        except UnicodeDecodeError:
            raise MegatrainError(f"{path}: behind line {rows.line_num} it is not UTF-8: iconv -f LATIN1 -t UTF-8 "
                                 f"{path}") from None


def _row(names: list[str], row: list[str], where: str) -> Record | MegatrainError:
    if len(row) != len(names):
        return MegatrainError(f"{where}: {len(row)} fields, and {len(names)} names in the first row; a text with "
                              "commas or line ends stands in \"...\"")
    try:
        return {name: from_json(value, f"{where}: {name}") if name in KNOWN[:2] else value
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
    except (ImportError, OSError, ValueError) as why:    # the first: of what a set's own files need
        raise MegatrainError(f"{where}: {why}") from None


# ---- what a record asks --------------------------------------------------------------------------

KNOWN = ("messages", "conversations", "prompt", "text")      # fields that data.py reads, first come first
ASKED = ("instruction", "question", "query")
BESIDE = ("context", "input")                # what an instruction or a question is about
ANSWERED = ("output", "answer", "response", "completion")
SYSTEM = ("system", "system_prompt")
FIRST = {"instruction": "output", "question": "answer"}      # the answer that belongs to it, where there are several
_ALPACA = ("Below is an instruction that describes a task{beside}. Write a response that appropriately completes the "
           "request.\n\n### Instruction:\n{asked}\n\n{input}### Response:\n")


def as_asked(record: Record, chat: bool, where: str) -> Record:
    """A record with `messages`, `prompt` and `completion`, or `text`, in the place of other names for them. chat: the
    tokenizer has a chat template."""
    record, asked, beside = _asking(record)
    if {"chosen", "rejected"} <= record.keys():
        raise MegatrainError(f"{where} is a preference (chosen, rejected): --method dpo, orpo or reward trains on such")
    if isinstance(record.get("label"), bool) and {"prompt", "completion"} <= record.keys():
        raise MegatrainError(f"{where} is a completion with a label, good or bad: --method kto trains on such")
    if any(name in record for name in KNOWN[:3]):
        lost = [n for n in (*ASKED, *BESIDE, *SYSTEM) if isinstance(record.get(n), str) and record[n]]
        if lost and not any(name in record for name in KNOWN[:2]):
            raise MegatrainError(f"{where} has {lost[0]!r} beside prompt, which would not be learned: put both into "
                                 "prompt, or rename prompt to instruction")
        return record
    if not asked and beside[-1:] == ["input"] and "text" not in record:      # {"input", "output"}
        asked, beside = beside[-1:], beside[:-1]
    answer = next((name for name in (FIRST.get(asked[0] if asked else ""), *ANSWERED) if name in record), None)
    if not asked or answer is None:
        return record
    _check_text(record, answer, where)
    return _told(record, asked, beside, record[answer], chat, where)


def with_prompt(record: Record, chat: bool, where: str) -> Record:
    """A record of preferences, or of what is to be answered, with what it asks as its `prompt`."""
    record, asked, beside = _asking(record)
    if not asked or any(name in record for name in KNOWN[:3]):
        return record
    made = dict(record)
    for name in [n for n in ("chosen", "rejected", "completion") if isinstance(record.get(n), str)] or [""]:
        found = _told(record, asked, beside, record.get(name, ""), chat, where)
        made |= {"prompt": found["prompt"]} | ({name: found["completion"]} if name else {})
    return made


def _asking(record: Record) -> tuple[Record, list[str], list[str]]:
    """(the record, its names of what asks, and of what that is about). Names of tables may have large letters."""
    if not any(name in record for name in (*KNOWN, *ASKED)):
        small = {name.strip().lower(): value for name, value in record.items() if isinstance(name, str)}
        record = small if len(small) == len(record) else record      # else it has a name in both
    return record, *([n for n in names if record.get(n) not in (None, "")] for names in (ASKED, BESIDE))


def _check_text(record: Record, name: str, where: str) -> None:
    if not isinstance(value := record[name], str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise MegatrainError(f"{where}: {name} is {kind}: a text is needed")


def _told(record: Record, asked: list[str], beside: list[str], answer: str, chat: bool, where: str) -> Record:
    """Prompt and completion: messages where there is a chat template, else Alpaca's prompt or `Question: ...`."""
    for name in (*asked, *beside, *(n for n in SYSTEM if record.get(n) is not None)):
        _check_text(record, name, where)
    system, words, about = ("\n\n".join(record[name] for name in names if record.get(name))
                            for names in (SYSTEM, asked, beside))
    turns = record.get("history") or []                  # before: pairs of what was asked and answered, oldest first
    if not isinstance(turns, list) or not all(isinstance(turn, (list, tuple)) and len(turn) == 2 and all(
            isinstance(part, str) for part in turn) for turn in turns):
        raise MegatrainError(f"{where}: history must be a list of pairs: what was asked, and what was answered")
    if chat:
        said = [("system", system)] * bool(system)
        said += [pair for turn in turns for pair in zip(("user", "assistant"), turn)]
        said.append(("user", "\n\n".join(filter(None, (words, about)))))
        more = {name: record[name] for name in ("tools", "chat_template_kwargs") if name in record}
        return {"prompt": [{"role": role, "content": text} for role, text in said],
                "completion": [{"role": "assistant", "content": answer}], **more}
    if turns:
        raise MegatrainError(f"{where} has a history, and the model's tokenizer has no chat template: take an "
                             "instruction-tuned model's tokenizer")
    head = f"{system}\n\n" if system else ""
    if asked[0] == "question":
        head += f"{about}\n\n" if about else ""
        return {"prompt": f"{head}Question: {words}\nAnswer:", "completion": f" {answer}"}
    return {"prompt": head + _ALPACA.format(
        asked=words, input=f"### Input:\n{about}\n\n" if about else "",
        beside=", paired with an input that provides further context" if about else ""), "completion": answer}
