"""Texts, prompts and conversations become rows of tokens.

    documents -> tokens with a mark on those that are trained -> rows of `seq` tokens

In a row documents stand behind one another, and position_ids start again at each: most models of transformers, given
no mask, let each see itself alone. With a model that does not, each document has rows of its own. Plain text is cut
where a row ends, so that rows are full; what has a beginning that the rest needs (prompts, conversations) stays whole,
put where it fits best. What is left of a row is a sequence of its own without labels.
"""
from __future__ import annotations

import bisect
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch

from megatrain_torch import MegatrainError

from . import forms, tokens
from .chats import Chat, Template, messages_of, rendered
from .forms import ANSWERED
from .forms import KNOWN as FIELDS
from .methods import Pair, pair
from .reading import records
from .say import say

__all__ = ["Document", "Rows", "collate", "documents", "held_out", "packed", "pairs", "records", "why_alone"]
T = TypeVar("T")
IGNORED = -100                       # a label that is no target, torch's own
PROBE = 8                            # tokens of a document of why_alone
SAMPLE_BYTES = 8 << 30               # of a model that is made to be asked
LEAK = 1e-4                          # of the logits: more than rounding in fp32; 1e-6 was seen, and 0.05 of leaks
# Kinds that were asked in this project's tests.
SEPARATE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
                      "gemma3_text", "phi3", "olmo2", "granite", "glm4", "smollm3"})
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}     # layer_types that look at tokens by a mask
EVERY_S = {True: 0.5, False: 30.0}   # on a terminal, and without one: between two lines that say how far tokenizing is
TOGETHER = 1000                      # records whose texts the tokenizer is given at once


@dataclass(frozen=True)
class Document:
    """Tokens of one record: ids [n], of two bytes where they fit; trained [n] bool, of a text a view of one True.
    whole: it may not be cut for a row's sake. starts: of a conversation whose answers cannot stand in one text, where
    each one's begins; they go together into what is trained or held out, and have rows of their own. chat: by the chat
    template."""

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

    def cut(self, begin: int, end: int) -> Document:
        return Document(self.ids[begin:end], self.trained[begin:end], self.whole)


# ---- tokens --------------------------------------------------------------------------------------

def documents(found: Iterable[dict[str, Any] | MegatrainError], tokenizer: Any, column: str | None = None,
              source: str = "the data", date: datetime | None = None) -> list[Document]:
    """Tokens of all records that have any; a record that is wrong is left out, and said.

    A record is a conversation (`messages` or `conversations`, a list of {"role", "content"} or {"from", "value"}; the
    assistant's words are trained), a `prompt` with its `completion` (which is trained), both texts or both lists of
    messages, an `instruction` with its `output`, a `question` with its `answer` (forms.py), or a `text`; `column` names
    the field where it is another. `tools` and `chat_template_kwargs` beside messages are for the chat template.

    Raises:
        MegatrainError: no record is right; or there are no tokens. The message begins with `source`.
    """
    made: list[Document | str] = []
    template, waiting = Template(tokenizer, date), 0

    def read(record: dict[str, Any], where: str) -> Document | str:
        return _document(record, template, tokenizer, column, where)

    for one in _right(found, read, source):
        made.append(one)
        if len(made) - waiting >= TOGETHER:
            waiting = _tokenize(made, waiting, tokenizer)
    _tokenize(made, waiting, tokenizer)
    made = [d for d in made if d.trained.any()]
    if not made:
        raise MegatrainError(f"{source} has no tokens to train on: it is empty, or its texts are")
    if apart := [len(d.starts) for d in made if len(d.starts) > 1]:
        say(f"{source}: the chat template shows earlier answers otherwise than when they were given, so each answer is "
            f"learned behind what came before it: {sum(apart)} rows of {len(apart)} conversations")
    return made


def pairs(found: Iterable[dict[str, Any] | MegatrainError], method: str, tokenizer: Any, source: str) -> list[Pair]:
    """Records for TRL's other methods; what is wrong is left out, and said.

    Raises:
        MegatrainError: no record is right.
    """
    chat = bool(tokenizer.chat_template)
    made = list(_right(found, lambda record, where: pair(record, method, chat, where), source))
    if not made:
        raise MegatrainError(f"{source} is empty")
    return made


def _right(found: Iterable[dict[str, Any] | MegatrainError], read: Callable[[dict[str, Any], str], T], source: str
           ) -> Iterator[T]:
    """What is read of each record that is right. Raises: MegatrainError: none is."""
    wrong: list[MegatrainError] = []
    told, number, right = monotonic(), 0, 0
    for number, record in enumerate(found, 1):
        try:
            if isinstance(record, MegatrainError):
                raise record
            one = read(record, f"{source}: record {number}")
        except MegatrainError as why:
            wrong.append(why)
            continue
        right += 1
        yield one
        if monotonic() - told > EVERY_S[live := sys.stderr.isatty()]:
            told = monotonic()
            sys.stderr.write(f"reading: {number:,} records of {source}" + ("\r" if live else "\n"))
    if wrong and not right:
        raise wrong[0]
    if wrong:
        say(f"{source}: {len(wrong)} of {number} records are left out; the first: {wrong[0]}")


def _document(record: dict[str, Any], template: Template, tokenizer: Any, column: str | None, where: str
              ) -> Document | str:
    """A text as it is: many are tokenized together."""
    if column is None:
        record = forms.read(record, bool(tokenizer.chat_template), where)
    field = column or next((k for k in FIELDS if k in record), None)
    if field is None or field not in record:
        way = "" if column else ", or call two instruction and output, or question and answer"
        raise MegatrainError(f"{where} has {', '.join(map(repr, record))} and no "
                             f"{column or 'messages, prompt or text'}; name the field with --column{way}")
    value = record[field]
    if field == "prompt":
        return _completion(record, template, tokenizer, where)
    if isinstance(value, list):
        return _talk(rendered(messages_of(value, where), template.for_record(record, where)), template, tokenizer)
    if isinstance(value, str) and field not in FIELDS[:2]:
        return value
    kind = "null" if value is None else f"a {type(value).__name__}"
    needed = "a list of messages" if field in FIELDS[:2] else "a text, or a list of messages,"
    raise MegatrainError(f"{where}: {field} is {kind}: {needed} is needed")


def _tokenize(made: list[Document | str], begin: int, tokenizer: Any) -> int:
    """Puts documents in the place of texts, from `begin` on; returns how many there are."""
    texts = [i for i in range(begin, len(made)) if isinstance(made[i], str)]
    short = [i for i in texts if 0 < len(made[i]) <= 4 * tokens.PASSAGE]
    # verbose=False: a text may well be longer than the model's window, rows are not.
    ids = tokenizer([made[i] for i in short], verbose=False)["input_ids"] if short else []
    found = dict(zip(short, (tokens.compact(tokens.framed(some, tokenizer)) for some in ids)))
    for i in texts:
        own = found[i] if i in found else tokens.ids_of(made[i], tokenizer) if made[i] else np.zeros(0, np.uint16)
        made[i] = Document(own, np.broadcast_to(np.True_, len(own)))
    return len(made)


def _completion(record: dict[str, Any], template: Template, tokenizer: Any, where: str) -> Document:
    prompt, name = record["prompt"], next((n for n in ("completion", *ANSWERED) if n in record), "completion")
    answer = record.get(name)
    if isinstance(prompt, list) and answer is None:
        raise MegatrainError(f"{where}: prompt is a list of messages and needs a completion beside it; if it is the "
                             "whole conversation, rename it to messages")
    if isinstance(prompt, list) and isinstance(answer, list) and answer:
        messages = messages_of(prompt, where) + messages_of(answer, where)
        return _talk(rendered(messages, template.for_record(record, where), len(prompt)), template,
                     tokenizer)
    if isinstance(prompt, list) or isinstance(answer, list):
        raise MegatrainError(f"{where}: prompt is {_kind(prompt)} and {name} {_kind(answer)}: both must be texts, or "
                             "both lists of messages")
    if not isinstance(answer, str) or not isinstance(prompt, str):
        raise MegatrainError(f"{where} has {', '.join(map(repr, record))}: a prompt needs a completion (or response) "
                             "beside it, both texts or both lists of messages")
    first, last = tokens.around(tokenizer)
    ids, trained = _marked(Chat(prompt + answer, [(len(prompt), len(prompt + answer))]), tokenizer)
    ids, marks = [*first, *ids, *last], [False] * len(first) + trained + [True] * len(last)
    twice = next((i for i in range(len(ids) - 1) if not ids[i] == ids[i + 1] == tokenizer.bos_token_id), 0)
    framed = tokens.framed(ids, tokenizer) or [tokenizer.eos_token_id]
    marks = [*marks[twice:], True][:len(framed)]
    marks[-1] = True                                 # the end is learned, where the data has it too
    return Document(tokens.compact(framed), np.asarray(marks, bool), True)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list of messages" if value else "an empty list"
    return "a text" if isinstance(value, str) else f"a {type(value).__name__}"


def _talk(chats: list[Chat], template: Template, tokenizer: Any) -> Document:
    found = [_marked(chat, tokenizer) for chat in chats]
    for chat, (ids, trained) in zip(chats, found):
        if not chat.text.endswith(template.ends) and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)       # the template has none: without it nobody learns to stop
            trained.append(True)
    sizes = np.cumsum([0, *(len(ids) for ids, _ in found)])
    return Document(tokens.compact(np.concatenate([ids for ids, _ in found])),
                    np.concatenate([np.asarray(trained, bool) for _, trained in found]), True,
                    tuple(map(int, sizes[:-1])), chat=True)


def _marked(chat: Chat, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens of a text, and which are learned: those that have a character of an answer. One that has characters of
    both sides is the answer's: the prompt before it is as it was."""
    if tokenizer.is_fast:
        made = tokenizer(chat.text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        ids, places = made["input_ids"], made["offset_mapping"]
    else:                                            # in Python, without places: as many tokens as agree
        ids = tokenizer(chat.text, add_special_tokens=False, verbose=False)["input_ids"]
        places = _places(chat, ids, tokenizer)
    marks = np.zeros(len(ids), bool)
    first, last = (np.asarray([place[i] for place in places], np.int64) for i in (0, 1))
    for begin, end in chat.answers:
        marks |= (last > begin) & (first < end) & (last > first)
    return list(ids), marks.tolist()


def _places(chat: Chat, ids: list[int], tokenizer: Any) -> list[tuple[int, int]]:
    """Characters of each token, as far as answers' borders tell: a token is where the text up to there has it."""
    borders = sorted({0, len(chat.text), *(at for place in chat.answers for at in place)})
    places, begin = [], 0
    for a, b in pairwise(borders):
        own = tokenizer(chat.text[:b], add_special_tokens=False, verbose=False)["input_ids"]
        end = len(ids) if b == len(chat.text) else next(
            (i for i, (x, y) in enumerate(zip(own, ids)) if x != y), len(own))
        places += [(a, b)] * (end - begin)
        begin = max(begin, end)
    return places


# ---- rows ----------------------------------------------------------------------------------------

def held_out(found: list[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """(documents to train on, documents held out): in an order drawn once, the last `share` of the tokens. A text on
    the border is cut there; a document that stays whole is held out."""
    order = random.Random(seed).sample(found, len(found))
    left = sum(map(len, found)) - int(share * sum(map(len, found)))
    for i, document in enumerate(order):
        if left < len(document):
            if document.whole:
                i += not i                               # one there is, to be trained
                return order[:i], order[i:]
            parts = [document.cut(0, left), document.cut(left, len(document))]
            return [d for d in [*order[:i], parts[0]] if len(d)], [d for d in [parts[1], *order[i + 1:]] if len(d)]
        left -= len(document)
    return order, []


class NoRow(dict):
    """In the place of a row where others have more of them."""

    @staticmethod
    def of(seq: int) -> NoRow:
        """Nothing is learned of it."""
        return NoRow(input_ids=torch.zeros(seq, dtype=torch.int64), position_ids=torch.arange(seq),
                     labels=torch.full((seq,), IGNORED))


@dataclass(frozen=True, eq=False)
class Rows(torch.utils.data.Dataset):
    """ids: [rows, seq], of two bytes where they fit; learned, begins: [rows, seq] bool: what is a target, where a
    document's positions start again. cut: documents that lost their end, being longer than a row; shared: rows with
    several documents; alone: there were to be none."""

    ids: np.ndarray
    learned: np.ndarray
    begins: np.ndarray
    cut: int = 0
    shared: int = 0
    alone: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int | None) -> dict[str, torch.Tensor]:
        """None: no row."""
        if i is None:
            return NoRow.of(self.ids.shape[1])
        ids = self.ids[i].astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(_positions(self.begins[i])),
                "labels": torch.from_numpy(np.where(self.learned[i], ids, IGNORED))}

    @property
    def positions(self) -> np.ndarray:
        """[rows, seq], all of them."""
        return np.stack([_positions(row) for row in self.begins]) if len(self) else np.zeros(self.ids.shape, np.int64)

    @property
    def labels(self) -> np.ndarray:
        """[rows, seq], all of them."""
        return np.where(self.learned, self.ids.astype(np.int64), IGNORED)

    @property
    def targets(self) -> int:
        """Tokens that are predicted."""
        return int(self.learned.sum())

    def first(self, most: int) -> Rows:
        return Rows(self.ids[:most], self.learned[:most], self.begins[:most])


def _positions(begins: np.ndarray) -> np.ndarray:
    """[seq], which start again at 0 wherever a document begins."""
    at = np.arange(len(begins))
    return at - np.maximum.accumulate(np.where(begins, at, 0))


def packed(found: Sequence[Document], seq: int, filler: int, alone: bool = False) -> Rows:
    """Documents in rows of `seq` tokens; filler: a token for what is left of a row; alone: no two in one row."""
    found = [part for d in found for part in d.parts]
    if alone:
        plan = [[d.cut(at, at + seq)] for d in found for at in range(0, seq if d.whole else len(d), seq)]
    else:
        plan = _streamed([d for d in found if not d.whole], seq) + _fitted([d for d in found if d.whole], seq)
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
            at += len(part)
        if at < seq:
            begins[row, at] = True
    cut, shared = sum(d.whole and len(d) > seq for d in found), sum(len(parts) > 1 for parts in plan)
    return Rows(ids, learned, begins, cut, shared, alone)


def prompts_too_long(found: Sequence[Document], seq: int) -> str | None:
    """Words for it, if all that is to be trained comes behind what a row holds."""
    found = [part for d in found for part in d.parts]
    if not all(d.whole and not d.trained[1:seq].any() for d in found):
        return None
    return (f"every prompt is longer than a row of {seq} (--seq), or as long, and nothing is left of what is to be "
            f"learned; the longest, with its completion, has {max(map(len, found))} tokens")


def _streamed(found: Sequence[Document], seq: int) -> list[list[Document]]:
    """Rows that are full but for the last: a text goes on in the next row."""
    rows: list[list[Document]] = []
    room = 0
    for document in found:
        at = 0
        while at < len(document):
            if room == 0:
                rows.append([])
                room = seq
            part = document.cut(at, at + room)
            rows[-1].append(part)
            at, room = at + len(part), room - len(part)
    return rows


def _fitted(found: Sequence[Document], seq: int) -> list[list[Document]]:
    """Best fit, longest first: each where least room is left over. Longer than a row: its beginning."""
    rows: list[list[Document]] = []
    rooms: list[tuple[int, int]] = []                # (room, row), ascending
    for document in sorted((d.cut(0, seq) for d in found), key=len, reverse=True):
        i = bisect.bisect_left(rooms, (len(document), -1))
        room, row = rooms.pop(i) if i < len(rooms) else (seq, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        bisect.insort(rooms, (room - len(document), row))
    return rows


def collate(flat: bool) -> Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Rows to a micro-batch: [B, seq], or, flat, [1, B * seq]: positions start again at each row anyhow."""
    def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = [r for r in rows if not isinstance(r, NoRow)] or rows[:1]
        stacked = {name: torch.stack([r[name] for r in rows]) for name in rows[0]}
        return {name: t.reshape(1, -1) for name, t in stacked.items()} if flat else stacked

    return batch


# ---- whether documents may share a row -----------------------------------------------------------

def why_alone(model: Any, seq: int, flat: bool) -> str | None:
    """Why each document needs rows of its own with this model, or None: they may share rows.

    Kinds of SEPARATE were asked. One with layers that carry a state from token to token is not: a mask does not reach
    it, and what it carries may be small today. Of any other a small one is made, of this class and configuration.
    """
    name, config = type(model).__name__, model.config
    if config.model_type in SEPARATE:
        return None
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - ATTENTION or any(isinstance(m, torch.nn.Conv1d) for m in model.modules()):
        return f"{name} has layers that carry a state from token to token, from one document into the next"
    try:
        leak, scale = _leak(_sample(model), max(1, min(PROBE, seq // 2)), flat)
    except Exception as why:                         # a model is a program; without an answer, what is always right
        return f"whether documents in one row of {name} see each other could not be asked ({why})"
    if leak <= LEAK * scale:                         # not so of NaN, which is no answer either
        return None
    return f"documents in one row of {name} see each other, whatever position_ids say"


def _sample(model: Any) -> Any:
    """A model of the same class in fp32, with the first layers of each kind and a small vocabulary, whose weights are
    so large that what one token has of another is seen."""
    config = copy.deepcopy(model.config)
    kinds = getattr(config, "layer_types", None) or [""] * 2
    most = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)), getattr(config, "first_k_dense_replace", 0) + 1)
    config.num_hidden_layers = min(most, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = kinds[:config.num_hidden_layers]
    for name, most in (("vocab_size", 64), ("intermediate_size", 256), ("moe_intermediate_size", 64)):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in type(model)(config).parameters())
    if size > SAMPLE_BYTES:
        raise MegatrainError(f"a small one has {size / 2**30:.0f} GiB")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = type(model)(config).float().eval()
        for p in made.parameters():
            if p.dim() > 1:
                p.data.normal_(0, p[0].numel() ** -0.5)
    return made


@torch.no_grad()
def _leak(model: Any, length: int, flat: bool) -> tuple[float, float]:
    """(how far logits of one document [length] move with what another before it says, how far apart they are by
    themselves): the root of the mean square. Rows are in the form that training gives them."""
    one, *others = torch.randint(model.get_input_embeddings().num_embeddings, (3, length),
                                 generator=torch.Generator().manual_seed(0))
    again = torch.arange(length).repeat(2)
    rows = [{"input_ids": torch.cat([other, one]), "position_ids": again} for other in others]
    alone = {"input_ids": torch.cat([one, one]), "position_ids": again}
    logits = model(**collate(flat)([*rows, alone]), use_cache=False).logits.view(3, 2, length, -1)
    first = logits[2, 0]                             # nothing is before it
    return max((logits[row, 1] - first).square().mean().sqrt().item() for row in range(3)), first.std().item()
