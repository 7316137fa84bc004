"""Texts, prompts and conversations become tokens with a mark on those that are trained; sources become one set of data.

    data: [new.jsonl:0.9, old.jsonl:0.1]     nine tokens in ten are of the first, one of the second
"""
from __future__ import annotations

import bisect
import hashlib
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch

from megatrain_torch import MegatrainError

from . import records
from .records import Chat, Record, Template
from .settings import Settings, say

T = TypeVar("T")
EVERY_S = 10.0                       # between two lines that say how far reading is
TOGETHER = 1000                      # records whose texts the tokenizer is given at once
PASSAGE = 1 << 14                    # characters
# Borders of passages, better ones first.
BORDERS = tuple(map(re.compile, (r"(?<=\w) (?=\w)", r"(?<=\S\n)(?=\S)", r"(?<=\S) (?=\S)")))
AT_ONCE = 4                          # passages: the tokenizer takes them on threads
# The fields that a record of a method other than sft has.
NEEDED = {"dpo": ("chosen", "rejected"), "orpo": ("prompt", "chosen", "rejected"), "reward": ("chosen", "rejected"),
          "kto": ("prompt", "completion", "label"), "grpo": ("prompt",)}
IGNORED = -100                       # a label that is no target, torch's own
# Kinds of models in which documents of one row, told apart by position_ids alone, do not see each other:
# tests/test_cli.py asks them (with transformers 5.17, 5.23 and 5.24). Others get rows of one document each.
SEPARATE = frozenset("""
    apertus arcee bitnet cohere cohere2 cwm deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma
    gemma2 gemma3 gemma3_text gemma4 gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe
    granitemoeshared helium llama llama4_text minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron olmo
    olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm
    starcoder2 vaultgemma""".split())
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class Document:
    """Tokens of one record: ids [n]; trained [n] bool, of a text a view of one True. whole: it may not be cut for a
    row's sake. starts: where the parts of a conversation begin whose answers cannot stand in one text; parts go
    together into what is trained or held out, and have rows of their own. chat: made by the chat template.
    With methods other than sft ids are the bytes of the record's JSON: weights and shares count these."""

    ids: np.ndarray
    trained: np.ndarray
    whole: bool = False
    starts: tuple[int, ...] = (0,)
    chat: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def parts(self) -> list[Document]:
        return [self.cut(a, b) for a, b in pairwise([*self.starts, len(self)])] if len(self.starts) > 1 else [self]

    @property
    def record(self) -> Record:
        return json.loads(self.ids.tobytes())

    def cut(self, begin: int, end: int) -> Document:
        return Document(self.ids[begin:end], self.trained[begin:end], self.whole)


# ---- records -------------------------------------------------------------------------------------

def documents(found: Iterable[Record | MegatrainError], tokenizer: Any, column: str | None = None,
              source: str = "the data", date: datetime | None = None, method: str = "sft") -> list[Document]:
    """Tokens of all records that have any; with other methods the records for TRL. A wrong one is left out, and said;
    all of them wrong, or empty, are refused. date: the run's first day, for templates that tell it."""
    template = Template(tokenizer, date)

    def read(record: Record, where: str) -> Document | str:
        if method == "sft":
            return _document(record, template, column, where)
        return pair(record, method, template, where)

    right, made = _right(found, read, source), []
    while some := list(islice(right, TOGETHER)):
        short = [one for one in some if isinstance(one, str) and 0 < len(one) <= 4 * PASSAGE]
        # verbose=False: a text may well be longer than the model's window, rows are not.
        ids = iter(tokenizer(short, verbose=False)["input_ids"] if short else ())
        for one in some:
            if isinstance(one, str):
                one = _all_trained(ids_of(one, tokenizer) if len(one) > 4 * PASSAGE else
                                   compact(_framed(next(ids), tokenizer) if one else ()))
            made += [one] * bool(one.trained.any())
    if not made:
        raise MegatrainError(f"{source} has no tokens to train on: it is empty, or its texts are")
    if apart := [len(d.starts) for d in made if len(d.starts) > 1]:
        say(f"{source}: the chat template shows earlier answers otherwise than when they were given, so each answer is "
            f"learned behind what came before it: {sum(apart)} rows of {len(apart)} conversations")
    return made


def _all_trained(ids: np.ndarray, **more: Any) -> Document:
    return Document(ids, np.broadcast_to(np.True_, len(ids)), **more)


def _right(found: Iterable[Record | MegatrainError], read: Callable[[Record, str], T], source: str) -> Iterator[T]:
    """What is read of each record that is right; if none is, the first one's error."""
    wrong: list[MegatrainError] = []
    told, number = monotonic(), 0
    for number, record in enumerate(found, 1):
        try:
            if isinstance(record, MegatrainError):
                raise record
            yield read(record, f"{source}: record {number}")
        except MegatrainError as why:
            wrong.append(why)
        except UnicodeEncodeError as why:                # JSON may have half of a pair of surrogates
            wrong.append(MegatrainError(f"{source}: record {number}: no text: {why}"))
        if monotonic() - told > EVERY_S:
            told = monotonic()
            sys.stderr.write(f"reading: {number:,} records of {source}\n")
    if wrong and len(wrong) == number:
        raise wrong[0]
    if wrong:
        say(f"{source}: {len(wrong)} of {number} records are left out; the first: {wrong[0]}")


def _document(record: Record, template: Template, column: str | None, where: str) -> Document | str:
    """A text stays one here: many are tokenized together."""
    if column is None:
        record = records.as_asked(record, "sft", bool(template.tokenizer.chat_template), where)
    field = column or next((k for k in records.KNOWN if k in record), None)
    if field is None or field not in record:
        way = "" if column else ", or call two instruction and output, or question and answer"
        raise MegatrainError(f"{where} has {', '.join(map(repr, record))} and no "
                             f"{column or 'messages, prompt or text'}; name the field with --column{way}")
    value, of_messages = record[field], field in records.KNOWN[:2]
    if field == "prompt":
        return _completion(record, template, where)
    if isinstance(value, list):
        messages = records.messages_of(value, where)
        return _talk(records.rendered(messages, template.for_record(record, where)), template)
    if isinstance(value, str) and not of_messages:
        value.encode()
        return value
    needed = "a list of messages" if of_messages else "a text, or a list of messages,"
    raise MegatrainError(f"{where}: {field} is {records.kind_of(value)}: {needed} is needed")


def _completion(record: Record, template: Template, where: str) -> Document:
    tokenizer, prompt = template.tokenizer, record["prompt"]
    name = next((n for n in ("completion", *records.ANSWERED) if n in record), "completion")
    answer = record.get(name)
    if isinstance(prompt, list) and isinstance(answer, list) and answer:
        messages = records.messages_of(prompt, where) + records.messages_of(answer, where)
        return _talk(records.rendered(messages, template.for_record(record, where), len(prompt)), template)
    if isinstance(prompt, list) and answer is None:
        raise MegatrainError(f"{where}: prompt is a list of messages and needs a completion; or rename it to messages")
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise MegatrainError(f"{where} has {', '.join(map(repr, record))}: a prompt needs a completion (or response) "
                             f"beside it; prompt and {name} must be texts, or lists of messages with words in both")
    ids, trained = _marked(Chat(prompt + answer, [(len(prompt), len(prompt + answer))]), tokenizer, special=True)
    twice = next((i for i in range(len(ids) - 1) if not ids[i] == ids[i + 1] == tokenizer.bos_token_id), 0)
    whole = _framed(ids, tokenizer) or [tokenizer.eos_token_id]
    trained = [*trained[twice:], True][:len(whole)]
    trained[-1] = True                               # the end is learned, where the data has it too
    return Document(compact(whole), np.asarray(trained, bool), True)


def _talk(chats: list[Chat], template: Template) -> Document:
    ids, trained, starts = [], [], []
    for chat in chats:
        own, learned = _marked(chat, template.tokenizer)
        starts.append(len(ids))
        ids, trained = ids + own, trained + learned
        if not template.end_of(chat.text) and template.tokenizer.eos_token_id is not None:
            ids.append(template.tokenizer.eos_token_id)      # the template has none: without it nobody learns to stop
            trained.append(True)
    return Document(compact(ids), np.asarray(trained, bool), True, tuple(starts), chat=True)


def pair(record: Record, method: str, template: Template, where: str) -> Document:
    """A record as TRL has it, which would end at one that the template does not take."""
    made = dict(records.as_asked(record, method, bool(template.tokenizer.chat_template), where))
    needed = NEEDED[method]
    for name in ("prompt", "chosen", "rejected", "completion"):
        if isinstance(made.get(name), list):
            made[name] = records.messages_of(made[name], f"{where}: {name}")
    if missing := [name for name in needed if made.get(name) in (None, "", [])]:
        raise MegatrainError(f"{where} has {', '.join(map(repr, record))} and no {missing[0]}: --method {method} "
                             f"trains on records of {', '.join(needed)}")
    if len({isinstance(made[name], list) for name in (*needed, "prompt") if name in made and name != "label"}) > 1:
        raise MegatrainError(f"{where}: {', '.join(n for n in needed if n != 'label')} must all be texts, or all lists "
                             "of messages")
    if "label" in needed and (label := LABELS.get(str(made["label"]).lower())) is None:
        raise MegatrainError(f"{where}: label is {made['label']!r}: true or false is needed")
    made |= {"label": label} if "label" in needed else {}
    if not made.get("tools"):                        # a table has "" where there are none
        made.pop("tools", None)
    shown = [name for name in ("prompt", *needed) if isinstance(made.get(name), list)]
    for name in dict.fromkeys(shown):
        asked = [] if name == "prompt" else made.get("prompt", [])
        _ = template.for_record(made, where)([*asked, *made[name]], prompt=name == "prompt")
    more = (*made,) if method == "grpo" else (*needed, "prompt", "tools", "chat_template_kwargs")

    def refuse(value: Any) -> None:
        raise MegatrainError(f"{where}: it has {records.kind_of(value)} of Python, which JSON has not: make it a text")

    # Keys stay in their order: a template shows tools as they are written.
    text = json.dumps({name: made[name] for name in made if name in more}, ensure_ascii=False, default=refuse)
    return _all_trained(np.frombuffer(text.encode(), np.uint8), whole=True, chat=bool(shown))


# ---- tokens --------------------------------------------------------------------------------------

def compact(ids: Any) -> np.ndarray:
    """[n], in two bytes each where they fit."""
    found = np.asarray(ids, np.uint32)
    return found.astype(np.uint16) if not len(found) or found.max() < 1 << 16 else found


def _framed(ids: Any, tokenizer: Any) -> Any:
    """With one beginning-of-text token at most, though the text itself may begin with another, and one of its end."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    while len(ids) > 1 and ids[0] == ids[1] == begin:
        ids = ids[1:]
    while len(ids) > 1 and ids[-1] == ids[-2] == end:
        ids = ids[:-1]
    if not len(ids) or end is None or ids[-1] == end:
        return ids
    return compact(np.append(ids, end)) if isinstance(ids, np.ndarray) else [*ids, end]


def _marked(chat: Chat, tokenizer: Any, special: bool = False) -> tuple[list[int], list[bool]]:
    """Tokens of a text, and which are learned: those that have a character of an answer. One that has characters of
    both sides is the answer's: the prompt before it is as it was. special: with what the tokenizer puts around it."""
    def of(text: str, **kw: Any) -> Any:
        return tokenizer(text, add_special_tokens=special, verbose=False, **kw)

    chat.text.encode()
    made = of(chat.text, **{"return_offsets_mapping": True} if tokenizer.is_fast else {})
    ids, places = list(made["input_ids"]), made.get("offset_mapping", [])
    if not tokenizer.is_fast:    # a tokenizer in Python tells no places: a token is where the text up to there has it
        for a, b in pairwise(sorted({0, len(chat.text), *(at for place in chat.answers for at in place)})):
            own = ids if b == len(chat.text) else of(chat.text[:b])["input_ids"]
            places += [(a, b)] * (records.same(own, ids) - len(places))
    first, last = np.asarray(places, np.int64).reshape(-1, 2).T
    marks = np.zeros(len(ids), bool)
    for begin, end in chat.answers:
        marks |= (last > begin) & (first < end) & (last > first)
    return ids, marks.tolist()


# ---- long texts ----------------------------------------------------------------------------------
# One call of a tokenizer takes 200 bytes a character: a long text is tokenized in passages, several at once. Each ends
# before a space between words, else behind a line, else before another space: no token has characters of both sides.
# Each is read with the character before it, whose tokens are left out: the first word of a text may get a space that is
# not in the data.

def ids_of(text: str, tokenizer: Any) -> np.ndarray:
    """[n] tokens of a long text, with its own beginning and end."""
    whole, bare = (tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"] for special in (True, False))
    at = next((i for i in range(len(whole) - len(bare) + 1) if whole[i:i + len(bare)] == bare), 0)
    borders = [0]
    while len(text) - borders[-1] > 2 * PASSAGE:
        end = borders[-1] + PASSAGE
        near = ([m.start() for m in border.finditer(text, end - PASSAGE // 2, end)] for border in BORDERS)
        borders.append(next(filter(None, near), [end])[-1])

    def of(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]

    places, found = list(pairwise([*borders, len(text)])), [compact(whole[:at])]     # what stands before each text
    for some in (places[i:i + AT_ONCE] for i in range(0, len(places), AT_ONCE)):
        for (begin, end), ids in zip(some, of([text[max(0, begin - 1):end] for begin, end in some])):
            [before] = of([text[begin - 1:begin]]) if begin else [[]]
            if ids[:len(before)] == before:
                ids = ids[len(before):]
            else:                                        # a token of both sides, where no word ended
                [ids] = of([text[begin:end]])
            found.append(compact(ids))
    return _framed(np.concatenate([*found, compact(whole[at + len(bare):])]), tokenizer)


# ---- several sources -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Source:
    """One of the data's sources. weight: its share of the tokens, in parts of the sum; None: all of it is taken."""

    name: str
    weight: float | None
    documents: list[Document]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


def named(word: str) -> tuple[str, float | None]:
    """(path or name, weight) of `path:0.3`. A path that is there as it stands is one, colons or not."""
    name, _, tail = word.rpartition(":")
    if not name or Path(word).exists():
        return word, None
    try:
        weight = float(tail)
    except ValueError:
        return word, None
    if not (math.isfinite(weight) and weight > 0):
        raise MegatrainError(f"data={word}: a weight is a share of the tokens, more than 0")
    return name, weight


def sources(settings: Settings, words: tuple[str, ...], tokenizer: Any, date: datetime | None = None) -> list[Source]:
    """All of them, read and tokenized."""
    found = [named(word) for word in words]
    without = [name for name, weight in found if weight is None]
    if without and len(without) < len(found):
        raise MegatrainError(f"data: {without[0]} has no weight, and others have: give each one, {without[0]}:0.5")
    if len(found) == 1 and not without:
        raise MegatrainError(f"data={words[0]}: a weight is a share among several sources, and this is one alone; all "
                             f"of it is taken as {found[0][0]}")
    for name, _ in found:
        records.files_of(name)                       # what is not there is said before hours of tokenizing
    split, column, method = settings.split, settings.column, settings.method
    return [Source(name, weight, documents(records.records(name, split), tokenizer, column, name, date, method))
            for name, weight in found]


def shuffled(found: list[Document], seed: int) -> list[Document]:
    return random.Random(seed).sample(found, len(found))


def mixed(found: list[Source], seed: int) -> list[Document]:
    """Documents of all sources, by their weights; which ones of a source, `seed` says. Nothing is taken twice: the
    source that is smallest for its share is used up. Without weights all is taken of all."""
    if found[0].weight is None:
        return [d for source in found for d in source.documents]
    whole = sum(source.weight for source in found)
    most = min(source.tokens * whole / source.weight for source in found)
    taken = []
    for source in found:
        some, left = [], round(most * source.weight / whole)
        for document in shuffled(source.documents, seed):
            if left > 0 and (not document.whole or 2 * left >= len(document)):   # more than half of it is wanted
                some.append(document if document.whole else document.cut(0, left))
                left -= len(some[-1])
        taken.append(some)
    tokens = [sum(map(len, some)) for some in taken]
    for source, own in zip(found, tokens):
        say(f"{source.name}: {own:,} of {source.tokens:,} tokens, {own / max(1, sum(tokens)):.0%} of the data")
    return [d for some in taken for d in some]


def identity(settings: Settings, found: list[Source], held: list[Source]) -> dict[str, Any]:
    """What tells the rows from others, whatever sources are called. held: of a validation file."""
    sources = {f"source {i} of data": _about(source) for i, source in enumerate(found, 1)}
    apart = {f"source {i} of validation": _about(source) for i, source in enumerate(held, 1)}
    return sources | (apart or {"validation": settings.validation}) | {
        "seq": settings.seq, "seed": settings.seed, "chat": any(d.chat for s in found for d in s.documents)}


def _about(source: Source) -> str:
    whole = hashlib.sha256()
    for d in source.documents:
        whole.update(f"{len(d)} {d.whole} {d.trained.all()} {'' if len(d.starts) == 1 else d.starts}".encode())
        whole.update(d.ids.astype("<u4").tobytes() if len(d) < 1 << 20 else d.ids.data)
        if not d.trained.all():
            whole.update(d.trained.tobytes())
    return f"{source.tokens:,} tokens of weight {source.weight} with the hash {whole.hexdigest()}"


def difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Words for what differs between two identities; "": they are the same."""
    return next((f"{name} is {now.get(name)} now, and was {then.get(name)}" for name in {**now, **then}
                 if then.get(name) != now.get(name)), "")


# ---- rows ----------------------------------------------------------------------------------------
# In a row documents stand behind one another, and position_ids start again at each: most models of transformers, given
# no mask, let each see itself alone. With a model that does not, each document has rows of its own. Plain text is cut
# where a row ends, so that rows are full. What has a beginning that the rest needs (prompts, conversations) stays
# whole, put where it fits best. What is left of a row goes on behind it, without labels.

def held_out(found: list[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """(documents to train on, documents held out): in an order drawn once, the last `share` of the tokens. A text on
    the border is cut there; a document that stays whole is held out, unless it is the first."""
    order = shuffled(found, seed)
    left = sum(map(len, found)) - int(share * sum(map(len, found)))
    for i, document in enumerate(order):
        if left < len(document):
            if document.whole:
                i += not i                               # one there is, to be trained
                return order[:i], order[i:]
            train, held = [*order[:i], document.cut(0, left)], [document.cut(left, len(document)), *order[i + 1:]]
            return [d for d in train if len(d)], [d for d in held if len(d)]
        left -= len(document)
    return order, []


class _NoRow(dict):
    """In the place of a row where other processes have more of them: nothing is learned of it."""


@dataclass(frozen=True, eq=False)
class Rows(torch.utils.data.Dataset):
    """ids: [rows, seq], of two bytes where they fit; learned, begins: [rows, seq] bool: what is a target, where a
    document's positions start again. cut: documents that lost their end, being longer than a row. alone: no row has
    several documents."""

    ids: np.ndarray
    learned: np.ndarray
    begins: np.ndarray
    cut: int = 0
    alone: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int | None) -> dict[str, torch.Tensor]:
        at = np.arange(self.ids.shape[1])
        if i is None:
            return _NoRow(input_ids=torch.zeros(len(at), dtype=torch.int64), position_ids=torch.from_numpy(at),
                          labels=torch.full((len(at),), IGNORED))
        ids = self.ids[i].astype(np.int64)
        positions = at - np.maximum.accumulate(np.where(self.begins[i], at, 0))      # 0 wherever a document begins
        return {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(positions),
                "labels": torch.from_numpy(np.where(self.learned[i], ids, IGNORED))}

    @property
    def targets(self) -> int:
        """Tokens that are predicted."""
        return int(self.learned.sum())


def packed(found: Sequence[Document], seq: int, filler: int, alone: bool = False) -> Rows:
    """Documents in rows of `seq` tokens; filler: a token for what is left of a row; alone: no two in one row."""
    found = [part for d in found for part in d.parts]
    plan: list[list[Document]] = []                      # of each row
    if alone:
        plan = [[d.cut(at, at + seq)] for d in found for at in range(0, seq if d.whole else len(d), seq)]
    else:
        room = 0
        for d in (d for d in found if not d.whole):      # a text goes on in the next row
            at = 0
            while at < len(d):
                if room == 0:
                    plan.append([])
                    room = seq
                plan[-1].append(d.cut(at, at + room))
                at, room = at + len(plan[-1][-1]), room - len(plan[-1][-1])
        rooms: list[tuple[int, int]] = []                # (room, row), ascending: best fit, longest document first
        for d in sorted((d.cut(0, seq) for d in found if d.whole), key=len, reverse=True):
            i = bisect.bisect_left(rooms, (len(d), -1))
            room, row = rooms.pop(i) if i < len(rooms) else (seq, len(plan))
            if row == len(plan):
                plan.append([])
            plan[row].append(d)
            bisect.insort(rooms, (room - len(d), row))
    kind = np.result_type(np.uint16 if filler < 1 << 16 else np.uint32, *{d.ids.dtype for d in found})
    ids = np.full((len(plan), seq), filler, kind)
    learned, begins = np.zeros((len(plan), seq), bool), np.zeros((len(plan), seq), bool)
    for row, parts in enumerate(plan):
        at = 0
        for part in parts:
            here = slice(at, at + len(part))
            ids[row, here] = part.ids
            begins[row, at] = True
            # The first token follows nothing: its place is the last of the document before, which must not learn it.
            learned[row, here][1:] = part.trained[1:]
            at += len(part)              # what fills the row goes on behind it, where nothing that is learned sees it
    return Rows(ids, learned, begins, sum(d.whole and len(d) > seq for d in found), alone)


def separate(config: Any) -> bool:
    """Whether documents in one row do not see each other: of a kind that was asked, by transformers' own code, with
    attention that was asked too. Where a token sees those behind it, position_ids do not count."""
    return (config.model_type in SEPARATE and type(config).__module__.startswith("transformers.")
            and getattr(config, "_attn_implementation", None) in (None, "eager", "sdpa")
            and getattr(config.get_text_config(), "is_causal", True))


def rows_of(settings: Settings, tokenizer: Any, parts: tuple[list[Document], list[Document]], config: Any
            ) -> tuple[Rows, Rows]:
    """Of what is trained, and of what is held out; refused where nothing is to be learned. config: the model's."""
    seq, filler = settings.seq, next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    train, held = (packed(part, seq, filler, not separate(config)) for part in parts)
    if train.targets:
        if train.alone:
            say(f"documents in one row of a model of kind {config.model_type} may see each other, so each has rows of "
                f"its own, filled up at the end: {len(train)} rows")
        if cut := train.cut + held.cut:
            say(f"{cut} conversations are longer than {seq} tokens and lost their end; --seq makes room")
        return train, held
    tokens, aside = (sum(map(len, part)) for part in parts)
    longest = max((len(part) for d in parts[0] for part in d.parts if d.whole), default=0)
    said = f"; the longest prompt with its completion has {longest}" * (longest > seq)
    raise MegatrainError(f"of {tokens} tokens, in rows of {seq} (--seq), none is to be learned{said}; {aside} more are "
                         "held out (--validation)")


def collate(flat: bool) -> Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Rows to a micro-batch: [B, seq], or, flat, [1, B * seq]: positions start again at each row anyhow."""
    def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = [r for r in rows if not isinstance(r, _NoRow)] or rows[:1]
        stacked = {name: torch.stack([r[name] for r in rows]) for name in rows[0]}
        return {name: t.reshape(1, -1) for name, t in stacked.items()} if flat else stacked

    return batch
