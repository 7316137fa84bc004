"""What is read: records of files, of folders of files, of a data set on the hub; what a record asks; and conversations
as the model's own chat template writes them.

    .jsonl .ndjson      a line, a record            .csv .tsv     a row, a record, by the names in the first row
    .json               an entry of its list        .parquet      a row, read by `datasets`
    anything else       the text itself: {"text": ...}

A record that cannot be read is given as the MegatrainError that says why: one bad line does not end a run. That is why
`datasets` reads no lines here: it ends at the first bad one, and fills in what a record has not.
"""
from __future__ import annotations

import codecs
import contextlib
import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from .folder import MARKER
from .settings import from_json, near, need, say

TEXT_KINDS = (".txt", ".text", ".md", ".py", ".rst")
LINE_KINDS, TABLE_KINDS = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
RECORD_KINDS = (*LINE_KINDS, ".json", *TABLE_KINDS, ".parquet")
SEPARATORS = (";", "\t", "|")        # that are written into .csv too
Record = dict[str, Any]
Message = dict[str, Any]


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
                yield from (_lines if kind in LINE_KINDS else _table if kind in TABLE_KINDS else _whole)(file)
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


def _lines(path: Path) -> Iterator[Record | MegatrainError]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _record(line, f"{path}:{number}")


def _whole(path: Path) -> Iterator[Record | MegatrainError]:
    """A text, or JSON's list of records."""
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as why:
        raise MegatrainError(f"{path}: byte {why.start} is not UTF-8, as texts and JSON are; if it has another "
                             f"encoding: iconv -f LATIN1 -t UTF-8 {path}") from None
    first = text.lstrip().split("\n", 1)[0]
    as_lines = first[:1] == "{" and isinstance(_record(first, ""), dict) and (not is_json or "\n" in text.strip())
    if not is_json:
        if as_lines:
            say(f"{path} is trained as it stands, as a text; if its lines are records, name it .jsonl")
        yield {"text": text}
    elif as_lines:                                       # many a file of lines is called .json
        yield from _lines(path)
    else:
        found = from_json(text, str(path))
        for number, record in enumerate(found if isinstance(found, list) else [found], 1):
            yield _record(record, f"{path}, record {number}")


def _record(found: Any, where: str) -> Record | MegatrainError:
    try:
        found = from_json(found, where) if isinstance(found, (str, bytes)) else found
    except MegatrainError as why:
        return why
    return found if isinstance(found, dict) else MegatrainError(
        f"{where}: an object such as {{\"text\": ...}} is needed, not a {type(found).__name__}")


def _table(path: Path) -> Iterator[Record | MegatrainError]:
    csv.field_size_limit(2**31 - 1)                      # of a field; Python's own is 128 KiB
    with path.open("rb") as raw:                         # the first line has names alone
        first = raw.readline(1 << 16).decode("utf-8", "replace")
    usual = TABLE_KINDS[path.suffix.lower()]
    between = next((s for s in (usual, *SEPARATORS) if s in first), usual)
    with path.open(encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, delimiter=between, strict=True)
        try:
            rows.fieldnames = names = [name.strip() for name in rows.fieldnames or ()]
            if not names:
                raise MegatrainError(f"{path}: it is empty; a first row with the fields' names is needed")
            if twice := [name for name in names if names.count(name) > 1]:
                raise MegatrainError(f"{path}:1: two fields are called {twice[0]!r}: give each a name of its own")
            for row in rows:
                yield _row(row, f"{path}:{rows.line_num}")
        except (csv.Error, UnicodeDecodeError) as why:
            said = (f"not a table: {why}" if isinstance(why, csv.Error)
                    else f"it is not UTF-8: iconv -f LATIN1 -t UTF-8 {path}")
            raise MegatrainError(f"{path}:{rows.reader.line_num}: {said}") from None


def _row(row: Record, where: str) -> Record | MegatrainError:
    if None in row or None in row.values():              # as DictReader has too many, and too few
        more, there = row.pop(None, []), [value for value in row.values() if value is not None]
        return MegatrainError(f"{where}: {len(there) + len(more)} fields, and {len(row)} names in the first row; a "
                              "text with commas or line ends stands in \"...\"")
    try:
        return {name: from_json(value, f"{where}: {name}") if name in KNOWN[:2] else value
                for name, value in row.items()}
    except MegatrainError as why:
        return why


def _loaded(name: str, where: str, **kw: Any) -> Iterator[Record]:
    """What `datasets` reads, streamed: nothing of it goes into its cache."""
    need(f"{where}: parquet, and data on the hub, need", "datasets")
    import datasets

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


def as_asked(record: Record, method: str, chat: bool, where: str) -> Record:
    """A record of `messages`, of `prompt` and answers, or of `text`, whatever it calls them. chat: the tokenizer has a
    chat template."""
    if not any(name in record for name in (*KNOWN, *ASKED)):         # names of tables may have large letters
        small = {name.strip().lower(): value for name, value in record.items() if isinstance(name, str)}
        record = small if len(small) == len(record) else record      # else it has a name in both
    asked, beside = ([n for n in names if record.get(n) not in (None, "")] for names in (ASKED, BESIDE))
    known = any(name in record for name in KNOWN[:3])
    if method != "sft":
        answers = {n: n for n in ("chosen", "rejected", "completion") if isinstance(record.get(n), str)}
        return _told(record, asked, beside, answers, chat, where) if asked and not known else record
    if {"chosen", "rejected"} <= record.keys():
        raise MegatrainError(f"{where} is a preference (chosen, rejected): --method dpo, orpo or reward trains on such")
    if isinstance(record.get("label"), bool) and {"prompt", "completion"} <= record.keys():
        raise MegatrainError(f"{where} is a completion with a label, good or bad: --method kto trains on such")
    if known:
        lost = [n for n in (*ASKED, *BESIDE, *SYSTEM) if isinstance(record.get(n), str) and record[n]]
        if lost and not any(name in record for name in KNOWN[:2]):
            raise MegatrainError(f"{where} has {lost[0]!r} beside prompt, which would not be learned: put both into "
                                 "prompt, or rename prompt to instruction")
        return record
    if not asked and beside[-1:] == ["input"] and "text" not in record:      # {"input", "output"}
        asked, beside = beside[-1:], beside[:-1]
    answer = next((name for name in (FIRST.get(asked[0] if asked else ""), *ANSWERED) if name in record), None)
    return _told(record, asked, beside, {"completion": answer}, chat, where) if asked and answer else record


def _told(record: Record, asked: list[str], beside: list[str], answers: dict[str, str], chat: bool, where: str
          ) -> Record:
    """With a prompt and answers to it: messages where there is a chat template, else Alpaca's prompt or `Question:`.
    answers: what they are called from now on, and in the record."""
    for name in (*answers.values(), *asked, *beside, *(n for n in SYSTEM if record.get(n) is not None)):
        if not isinstance(value := record[name], str):
            raise MegatrainError(f"{where}: {name} is {kind_of(value)}: a text is needed")
    system, words, about = ("\n\n".join(record[name] for name in names if record.get(name))
                            for names in (SYSTEM, asked, beside))
    if record.get("history"):
        raise MegatrainError(f"{where} has a history, which would not be learned: write all turns as messages")
    if chat:
        said = [*[("system", system)] * bool(system), ("user", "\n\n".join(filter(None, (words, about))))]
        return record | {"prompt": [{"role": role, "content": text} for role, text in said]} | {
            name: [{"role": "assistant", "content": record[own]}] for name, own in answers.items()}
    head, space = f"{system}\n\n" if system else "", ""
    if asked[0] == "question":
        prompt, space = f"{about}\n\n" * bool(about) + f"Question: {words}\nAnswer:", " "
    else:
        prompt = _ALPACA.format(asked=words, input=f"### Input:\n{about}\n\n" * bool(about),
                                beside=", paired with an input that provides further context" * bool(about))
    return record | {"prompt": head + prompt} | {name: space + record[own] for name, own in answers.items()}


def kind_of(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


# ---- conversations -------------------------------------------------------------------------------
# What is trained is what the template renders at inference. An answer begins where the generation prompt ends, behind
# a think block that the prompt opens, and ends with its end token. Where the whole conversation shows each answer as it
# was when it was made, one rendering serves all. Else (a template that takes thoughts out of earlier answers, or moves
# the system's words) each answer has a rendering of its own, with what came before it.

# ShareGPT's names, {"from": ..., "value": ...}, for those of chat templates.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
            "tool": "tool", "observation": "tool"}
_NOW = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_PROBE = "\ue000"                    # stands in no data: a letter of the private area


@dataclass(frozen=True)
class Chat:
    """A text, and [begin, end) of each answer in it."""

    text: str
    answers: list[tuple[int, int]]


class Template:
    """The tokenizer's chat template, with what the record at hand has for it beside its messages."""

    def __init__(self, tokenizer: Any, date: datetime | None = None) -> None:
        """date: for templates that tell the model which day it is; a run that goes on has that of its beginning."""
        self.tokenizer, self.where, self._more = tokenizer, "", {}
        # By its text: functions are not passed on to a template.
        text = tokenizer.chat_template
        self._dated = {"chat_template": _NOW.sub(lambda m: repr(date.strftime(m[2])), text)} if date and isinstance(
            text, str) else {}
        self.ends = tuple(tokenizer.get_added_vocab())           # what may end an answer

    def for_record(self, record: Record, where: str) -> Template:
        if not self.tokenizer.chat_template:
            raise MegatrainError(f"{where} is a conversation, and the model's tokenizer has no chat template: take an "
                                 "instruction-tuned model's, --chat-template FILE, or data with prompt and completion")
        tools, more = record.get("tools"), record.get("chat_template_kwargs") or {}
        if isinstance(tools, str) and tools:         # tables keep what differs from row to row as JSON
            tools = from_json(tools, f"{where}: tools")
        if not isinstance(tools or [], list) or not isinstance(more, dict):
            raise MegatrainError(f"{where}: tools must be a list of tools, and chat_template_kwargs an object")
        self.where, self._more = where, {**self._dated, **more, "tools": tools or None}
        return self

    def __call__(self, messages: list[Message], prompt: bool = False) -> str:
        """The text; prompt: as the model is given it to answer."""
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt,
                                                      **self._more)
        except Exception as why:                     # a template is a program, and raises what it likes
            raise MegatrainError(f"{self.where}: the chat template does not take it: {why}") from None

    def end_of(self, text: str) -> str:
        return next((token for token in self.ends if text.endswith(token)), "")


def messages_of(found: list[Any], where: str) -> list[Message]:
    """With `role` and `content`, whichever of the two ways they are written."""
    made = []
    for number, message in enumerate(found, 1):
        if isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys():
            if str(message["from"]) not in SPEAKERS:
                raise MegatrainError(f"{where}: message {number} is from {message['from']!r}, and known are "
                                     f"{', '.join(SPEAKERS)}; rename it, or write messages with `role` and `content`")
            message = {"role": SPEAKERS[message["from"]], "content": message["value"]}
        if not isinstance(message, dict) or not {"role"} < message.keys():
            has = ", ".join(map(repr, message)) if isinstance(message, dict) else repr(message)
            raise MegatrainError(f"{where}: message {number} has {has}; `role` and `content` are needed")
        if not isinstance(message["role"], str):
            raise MegatrainError(f"{where}: message {number}: role is {kind_of(message['role'])}: a word is needed")
        made.append({k: v for k, v in message.items() if v is not None or k == "content"})
    return made


def rendered(messages: list[Message], template: Template, first: int = 0) -> list[Chat]:
    """The texts to train: one, or one for each answer. first: the message from which on answers are learned."""
    said = [i for i, m in enumerate(messages) if i >= first and m["role"] in ("assistant", "model")]
    if not said:
        raise MegatrainError(f"{template.where}: no message is the assistant's, and only its messages are learned")
    shown = [template(messages[:i + 1]) for i in said]
    each, whole = [_answered(messages[:i + 1], text, template) for i, text in zip(said, shown)], shown[-1]
    # What is "" but for its end is a call of tools that the template leaves out.
    each = [chat for chat in each if (text := chat.text[slice(*chat.answers[0])].strip()).removesuffix(
        template.end_of(text)).strip()]
    if not each:
        raise MegatrainError(f"{template.where}: the chat template shows nothing of what the assistant says")
    if not all(whole.startswith(chat.text) for chat in each):
        return each
    places = []
    for chat in each:                                # where the next speaker's name is what ends an answer, that too
        [(begin, end)] = chat.answers
        stops = [t for t in template.ends if whole.startswith(t, end) and not template.end_of(chat.text)]
        places.append((begin, end + len(stops[0] if stops else "")))
    return [Chat(whole[:places[-1][1]], places)]


def _answered(messages: list[Message], text: str, template: Template) -> Chat:
    """Up to the end of the last message, which is learned. text: as the template shows them."""
    def begin_of_content() -> int:
        with contextlib.suppress(MegatrainError):
            return same(template([*before, {**messages[-1], "content": _PROBE}]), text)
        return len(text)

    before = messages[:-1]
    try:
        prompt = template(before, prompt=True)
    except MegatrainError:                           # nobody spoke before, and the template wants somebody
        prompt = text[:begin_of_content()]
    begin = same(prompt, text)
    if begin < len(prompt):                          # the answer is not shown as the prompt asks for it
        content = begin_of_content()
        if before and not text.startswith(template(before)):
            text, begin = prompt + text[content:], len(prompt)   # nor is what came before it
        else:
            begin = min(begin, content)              # letters of the answer may be those of the prompt by chance
    text = bare if template.end_of(bare := text.rstrip()) else text
    return Chat(text, [(begin, len(text))])


def same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many letters, or tokens, both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
