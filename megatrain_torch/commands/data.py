"""Texts, prompts and conversations become rows of tokens.

    documents -> tokens with a mark on those that are trained -> rows of `seq` tokens

In a row documents stand behind one another, and position_ids start again at each: most models of transformers, given
no mask, let each see itself alone. With a model that does not, each document has rows of its own. Plain text is cut
where a row ends, so that rows are full; what has a beginning that the rest needs (prompts, conversations) stays whole,
put where it fits best. What is left of a row is a sequence of its own without labels.
"""
from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..base.codes import coded, plain_name
from ..base.errors import MegatrainError
from . import forms, tokens
from .forms import ANSWERED
from .forms import KNOWN as FIELDS
from .reading import Meter, TextFile, from_json, records

__all__ = ["Document", "Rows", "collate", "documents", "held_out", "packed", "records", "why_alone"]
IGNORED = -100                       # a label that is no target, torch's own
# ShareGPT's names, {"from": ..., "value": ...}, for those of chat templates.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
PROBE = 8                            # tokens of a document of why_alone
# Of the distance that a leak makes, the share that rounding may make where there is none: 1e-6 and nothing were seen,
# and 0.2 for the least of true leaks (OPT, whose positions do start again).
LEAK, LEAK_FP32 = 0.05, 1e-3
# Kinds that were asked in this project's tests; to ask a large model takes as long as to read its weights once more.
SEPARATE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
                      "gemma3_text", "phi3", "olmo2", "granite", "glm4", "smollm3"})


@dataclass(frozen=True)
class Document:
    """Tokens of one document: ids [n], of two bytes where they fit; trained [n] bool, of a text a view of one True.
    whole: it may not be cut for a row's sake."""

    ids: np.ndarray
    trained: np.ndarray
    whole: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, begin: int, end: int) -> Document:
        return Document(self.ids[begin:end], self.trained[begin:end], self.whole)


# ---- tokens --------------------------------------------------------------------------------------

def documents(found: Iterable[dict[str, Any]], tokenizer: Any, column: str | None = None,
              source: str = "the data", meter: Meter | None = None) -> list[Document]:
    """Tokens of all records that have any.

    A record is a conversation (`messages` or `conversations`, a list of {"role", "content"} or {"from", "value"}; the
    assistant's words are trained), a `prompt` with its `completion` (which is trained), both texts or both lists of
    messages, an `instruction` with its `output`, a `question` with its `answer` (forms.py), or a `text`; `column` names
    the field where it is another. `tools` and `chat_template_kwargs` beside messages are for the chat template.

    Raises:
        MegatrainError: a record has none of them; or there are no tokens. The message begins with `source`.
    """
    made: list[Document] = []
    waiting = _Waiting(tokenizer, meter)
    chat = bool(getattr(tokenizer, "chat_template", None))
    for number, record in enumerate(found, 1):
        where = f"{source}: record {number}"
        if column is None:
            record = forms.read(record, chat, where)
        field = column or next((k for k in FIELDS if k in record), None)
        if field is None or field not in record:
            way = "" if column else ", or call two instruction and output, or question and answer"
            raise MegatrainError(f"{where} has {', '.join(map(repr, record))} and no "
                                 f"{column or 'messages, prompt or text'}; name the field with --column{way}")
        if field == "prompt":
            made.append(_counted(_completion(record, tokenizer, where), meter))
        elif isinstance(record[field], list):
            template = _Template(record, tokenizer, where)
            made.append(_counted(_conversation(_messages(record[field], where), template), meter))
        elif isinstance(record[field], (str, TextFile)) and field not in FIELDS[:2]:
            made += waiting.given(record[field])
        else:
            kind = "null" if record[field] is None else f"a {type(record[field]).__name__}"
            needed = "a list of messages" if field in FIELDS[:2] else "a text, or a list of messages,"
            raise MegatrainError(f"{where}: {field} is {kind}: {needed} is needed")
    made = [d for d in made + waiting.flushed() if d.trained.any()]
    if not made:
        raise MegatrainError(f"{source} has no tokens to train on: it is empty, or its texts are")
    return made


def _counted(document: Document, meter: Meter | None) -> Document:
    if meter is not None:
        meter.add(len(document))
    return document


def _document(ids: Any, trained: Sequence[bool] | None = None) -> Document:
    marks = np.broadcast_to(np.True_, len(ids)) if trained is None else np.asarray(trained, bool)
    ids = ids if isinstance(ids, np.ndarray) else tokens.compact(ids)
    return Document(ids, marks, trained is not None)


class _Waiting:
    """Texts on their way to the tokenizer: short ones together, a long one alone, in their order."""

    def __init__(self, tokenizer: Any, meter: Meter | None) -> None:
        self._tokenizer, self._meter, self._texts, self._length = tokenizer, meter, [], 0

    def given(self, text: str | TextFile) -> list[Document]:
        """Documents that were made meanwhile."""
        if isinstance(text, TextFile) or len(text) > tokens.LONG:
            before = self.flushed()
            ids = tokens.ids_of(text, self._tokenizer, meter=self._meter, end=self._tokenizer.eos_token_id)
            return [*before, _document(ids)] if len(ids) else before
        self._texts.append(text)
        self._length += len(text)
        return self.flushed() if self._length >= tokens.TOGETHER or len(self._texts) == tokens.TEXTS else []

    def flushed(self) -> list[Document]:
        if not self._texts:
            return []
        # verbose=False: a text may well be longer than the model's window, rows are not.
        found = self._tokenizer(self._texts, verbose=False)["input_ids"]
        self._texts, self._length = [], 0
        end = self._tokenizer.eos_token_id
        return [_counted(_document(tokens.ended(ids, end)), self._meter) for ids in found if ids]


def _completion(record: dict[str, Any], tokenizer: Any, where: str) -> Document:
    prompt, name = record["prompt"], next((n for n in ("completion", *ANSWERED) if n in record), "completion")
    answer = record.get(name)
    if isinstance(prompt, list) and answer is None:
        raise MegatrainError(f"{where}: prompt is a list of messages and needs a completion beside it; if it is the "
                             "whole conversation, rename it to messages")
    if isinstance(prompt, list) and isinstance(answer, list) and answer:
        return _answer(_messages(prompt, where), _messages(answer, where), _Template(record, tokenizer, where))
    if isinstance(prompt, list) or isinstance(answer, list):
        raise MegatrainError(f"{where}: prompt is {_kind(prompt)} and {name} {_kind(answer)}: both must be texts, or "
                             "both lists of messages")
    if not isinstance(answer, str) or not isinstance(prompt, str):
        raise MegatrainError(f"{where} has {', '.join(map(repr, record))}: a prompt needs a completion (or response) "
                             "beside it, both texts or both lists of messages")
    first = tokens.ids_of(prompt, tokenizer)
    if len(first) and first[-1] == tokenizer.eos_token_id:
        first = first[:-1]
    end = tokenizer.eos_token_id
    rest = tokens.ids_of(answer, tokenizer, special=False, end=end)
    rest = rest if len(rest) or end is None else tokens.compact([end])
    return _document(np.concatenate([first, rest]), [False] * len(first) + [True] * len(rest))


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list of messages" if value else "an empty list"
    return "a text" if isinstance(value, str) else f"a {type(value).__name__}"


# ---- conversations -------------------------------------------------------------------------------

def _messages(found: list[Any], where: str) -> list[dict[str, Any]]:
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
            raise MegatrainError(f"{where}: message {number} has {has}; `role` (user, assistant) and `content` are "
                                 "needed")
        made.append(message)
    return made


class _Template:
    """The tokenizer's chat template, with what a record has for it beside its messages.

    Raises:
        MegatrainError: there is none; called: it does not take the messages. The message begins with `where`.
    """

    def __init__(self, record: dict[str, Any], tokenizer: Any, where: str) -> None:
        if not tokenizer.chat_template:
            raise MegatrainError(f"{where} is a conversation, and the model's tokenizer has no chat template: take an "
                                 "instruction-tuned model's tokenizer, or data with prompt and completion")
        tools, more = record.get("tools"), record.get("chat_template_kwargs") or {}
        if isinstance(tools, str) and tools:         # tables keep what differs from row to row as JSON
            tools = from_json(tools, f"{where}: tools")
        if not isinstance(tools or [], list) or not isinstance(more, dict):
            raise MegatrainError(f"{where}: tools must be a list of tools, and chat_template_kwargs an object")
        self._tokenizer, self._more, self.where = tokenizer, {**more, "tools": tools or None}, where

    def __call__(self, messages: list[dict[str, Any]], **kw: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **self._more, **kw)
        except Exception as why:                     # a template is a program, and raises what it likes
            raise MegatrainError(f"{self.where}: the chat template does not take it: {why}") from None

    @property
    def marks(self) -> bool:
        """It marks the assistant's words itself."""
        text = self._tokenizer.chat_template
        return "{% generation" in text or "{%- generation" in text


def _conversation(messages: list[dict[str, Any]], template: _Template) -> Document:
    if template.marks:
        found = template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return _document(found["input_ids"], found["assistant_masks"])
    return _by_prefixes(messages, template)


def _by_prefixes(messages: list[dict[str, Any]], template: _Template) -> Document:
    """A template that does not mark the assistant's words: they are what each of its messages adds."""
    def ids(most: int, prompt: bool = False) -> list[int]:
        return template(messages[:most], add_generation_prompt=prompt, return_dict=False)

    whole = ids(len(messages))
    trained = np.zeros(len(whole), bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = ids(i, True), ids(i + 1)
            if whole[:len(before)] != before or whole[:len(after)] != after:
                raise MegatrainError(f"{template.where}: the chat template changes earlier messages when later ones "
                                     "come, so what the assistant said cannot be told; keep its last answer alone, as "
                                     "prompt and completion")
            trained[len(before):len(after)] = True
    return _document(whole, trained)


def _answer(prompt: list[dict[str, Any]], completion: list[dict[str, Any]], template: _Template) -> Document:
    """All that the completion adds to the prompt is trained, and nothing of the prompt."""
    first = template(prompt, add_generation_prompt=completion[0]["role"] == "assistant", return_dict=False)
    whole = template(prompt + completion, return_dict=False)
    if whole[:len(first)] != first:
        raise MegatrainError(f"{template.where}: the chat template changes the prompt when the completion comes, so "
                             "what is to be trained cannot be told; write both as texts")
    return _document(whole, [False] * len(first) + [True] * (len(whole) - len(first)))


# ---- rows ----------------------------------------------------------------------------------------

def held_out(found: list[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """(documents to train on, documents held out): in an order drawn once, the last `share` of the tokens. A text on
    the border is cut there; a document that stays whole is held out."""
    order = random.Random(seed).sample(found, len(found))
    left = sum(map(len, found)) - int(share * sum(map(len, found)))
    for i, document in enumerate(order):
        if left < len(document):
            parts = [document.cut(0, left), document.cut(left, len(document))]
            if document.whole:
                parts = [document.cut(0, 0), document] if i else [document, document.cut(0, 0)]
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
    """Why each document needs rows of its own with this model, or None: they may share rows. It is the model that is
    asked, before it is streamed: one forward pass of 48 tokens, which reads the weights once. SEPARATE need not be."""
    name = type(model).__name__
    if model.config.model_type in SEPARATE:
        return None
    try:
        leak, scale = _leak(model, max(1, min(PROBE, seq // 2)), flat)
    except Exception as why:                         # a model is a program; without an answer, what is always right
        return f"whether documents in one row of {name} see each other could not be asked ({why})"
    share = LEAK_FP32 if model.dtype == torch.float32 else LEAK
    if leak <= share * scale:                        # not so of NaN, which is no answer either
        return None
    return f"documents in one row of {name} see each other, whatever position_ids say"


@torch.no_grad()
def _leak(model: Any, length: int, flat: bool) -> tuple[float, float]:
    """Logits of one document [length], by how far they move (root of the mean square) when another comes before it:
    with positions that start again, and with positions that go on, as if both were one. Rows are in the form that
    training gives them; the first has the document at its very beginning, where nothing can be seen before it.

    The second distance is the scale: how much a leak is depends on the weights, 1e-3 to 0.2 of the logits' range.
    """
    one, other = torch.randint(model.get_input_embeddings().num_embeddings, (2, length),
                               generator=torch.Generator().manual_seed(0))
    again = torch.arange(length).repeat(2)
    model.eval()
    for _, m, p, _ in coded(model):
        m.training = plain_name(p)[0] == "bitsandbytes"      # in eval mode it packs 4-bit weights anew, for good
    rows = [(torch.cat([one, other]), again), (torch.cat([other, one]), again),
            (torch.cat([other, one]), torch.arange(2 * length))]
    batch = collate(flat)([{"input_ids": ids, "position_ids": positions} for ids, positions in rows])
    logits = model(**batch, use_cache=False).logits.float().view(3, 2, length, -1)
    return tuple((logits[row, 1] - logits[0, 0]).square().mean().sqrt().item() for row in (1, 2))
