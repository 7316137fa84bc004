"""Tokens of texts, in memory that does not grow with the text but by the tokens themselves.

What a tokenizer makes of a call takes 200 bytes a character, and one text is one thread's work. So a long text is cut
into passages, at the end of a paragraph where there is one, which are tokenized several at once. Each passage but the
first begins in the one before: where both have the same tokens at the same characters, several in a row, one goes on as
the other. So the tokens are those of one call, for any tokenizer that tells where its tokens are. Where two passages
agree on nothing (the same few characters again and again, 8,000 of them), and with tokenizers in Python, which do not
tell, the text is cut at the passage's end.
"""
from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PASSAGE = 1 << 14                    # characters
LONG = 4 * PASSAGE                   # a text of more is cut
TOGETHER, TEXTS = 1 << 17, 1000      # characters, and texts, that the tokenizer is given at once
OVERLAPS = (1 << 10, 1 << 13)        # characters that a passage has of the one before: first, and where they disagree
AGREED, DISTINCT = 8, 3              # tokens in a row, so many of them different: a run of spaces agrees with itself
BORDERS = ("\n\n", "\n", " ")
Parts = Iterable[str]


def compact(ids: Sequence[int]) -> np.ndarray:
    """[n], in two bytes each where they fit."""
    found = np.asarray(ids, np.uint32)
    return found.astype(np.uint16) if not len(found) or found.max() < 1 << 16 else found


def ids_of(text: str | Parts, tokenizer: Any, special: bool = True, meter: Any = None,
           end: int | None = None) -> np.ndarray:
    """Tokens of one text, long or not: [n]; none, if it is empty.

    Args:
        special: with those that the tokenizer puts around a text. end: a token that is to be the last.
    """
    if isinstance(text, str) and len(text) <= LONG:
        return compact(ended(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"], end))
    first, last = _around(tokenizer) if special else ([], [])
    made = _Gathered()
    for part in _passages(_parts(text), tokenizer):
        made.add(first if not len(made) else [])
        made.add(part)
        if meter is not None:
            meter.add(len(part))
    made.add(last)
    if len(made) and end is not None and made[-1] != end:
        made.add([end])
    return made.ids()


def ended(ids: list[int], end: int | None) -> list[int]:
    return ids if end is None or not ids or ids[-1] == end else [*ids, end]


class _Gathered:
    """Tokens, some after the other, in two bytes each until one does not fit; nothing is copied at the end."""

    def __init__(self) -> None:
        self._ids = array.array("H")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> int:
        return self._ids[i]

    def add(self, ids: Sequence[int]) -> None:
        if self._ids.typecode == "H" and len(ids) and max(ids) >= 1 << 16:
            self._ids = array.array("I", self._ids)
        self._ids.extend(array.array(self._ids.typecode, ids))

    def ids(self) -> np.ndarray:
        return np.frombuffer(self._ids, np.uint16 if self._ids.typecode == "H" else np.uint32)


def _parts(text: str | Parts) -> Parts:
    if not isinstance(text, str):
        return text
    return (text[at:at + TOGETHER] for at in range(0, len(text), TOGETHER))


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    whole, bare = (tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"] for special in (True, False))
    at = next((i for i in range(len(whole) - len(bare) + 1) if whole[i:i + len(bare)] == bare), 0)
    return whole[:at], whole[at + len(bare):]


# ---- passages --------------------------------------------------------------------------------------

@dataclass
class _Passage:
    """A passage of a text, which begins at a character of it. ids: of its tokens; encoding: says where each is; skip:
    tokens at its beginning that are in the passage before."""

    text: str
    begin: int
    ids: list[int]
    encoding: Any
    skip: int = 0

    @property
    def end(self) -> int:
        return self.begin + len(self.text)

    def place(self, token: int) -> tuple[int, int]:
        """[begin, end) of a token in the whole text."""
        first, last = self.encoding.token_to_chars(token) or (0, 0)
        return self.begin + first, self.begin + last

    def beyond(self, character: int) -> int:
        """The first token, from the end on, that begins there or later."""
        at = len(self.ids)
        while at > self.skip and self.place(at - 1)[0] >= character:
            at -= 1
        return at


def _passages(parts: Parts, tokenizer: Any) -> Iterator[list[int]]:
    """Tokens of a text, some after the other."""
    told = bool(getattr(tokenizer, "is_fast", False))
    before: _Passage | None = None
    for some in _batched(_cut(parts, OVERLAPS[0] if told else 0)):
        for passage in _encoded(some, tokenizer):
            if before is not None:
                yield _joined(before, passage, tokenizer) if told else before.ids
            before = passage
    if before is not None:
        yield before.ids[before.skip:]


def _cut(parts: Parts, overlap: int) -> Iterator[tuple[int, str]]:
    """(where it begins, passage): each but the first begins `overlap` characters before the end of the one before."""
    text, begin, seen = "", 0, 0                     # seen: characters of text that the passage before has
    for part in parts:
        text += part
        while len(text) - seen > 2 * PASSAGE:
            end = _border(text, seen + PASSAGE)
            yield begin, text[:end]
            keep = min(overlap, end)
            text, begin, seen = text[end - keep:], begin + end - keep, keep
    if len(text) > seen or begin == 0:
        yield begin, text


def _border(text: str, near: int) -> int:
    """Where to cut: behind a paragraph, a line or a word that ends in the half passage before."""
    for mark in BORDERS:
        if (at := text.rfind(mark, near - PASSAGE // 2, near)) >= 0:
            return at + len(mark)
    return near


def _batched(passages: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    some: list[tuple[int, str]] = []
    for passage in passages:
        some.append(passage)
        if len(some) * PASSAGE >= TOGETHER:
            yield some
            some = []
    if some:
        yield some


def _encoded(passages: list[tuple[int, str]], tokenizer: Any) -> list[_Passage]:
    found = tokenizer([text for _, text in passages], add_special_tokens=False, return_attention_mask=False,
                      return_token_type_ids=False, verbose=False)
    encodings = found.encodings or [None] * len(passages)
    return [_Passage(text, begin, ids, encoding)
            for (begin, text), ids, encoding in zip(passages, found["input_ids"], encodings)]


def _joined(before: _Passage, passage: _Passage, tokenizer: Any) -> list[int]:
    """The tokens of `before` up to where `passage` goes on; those of `passage` are from there on then."""
    found = _agreed(before, passage)
    if found is None:
        longer = min(OVERLAPS[1], len(before.text))
        new = passage.text[before.end - passage.begin:]
        [again] = _encoded([(before.end - longer, before.text[len(before.text) - longer:] + new)], tokenizer)
        found = _agreed(before, again)
        if found is None:                                # nowhere: one ends, the other begins
            [again] = _encoded([(before.end, new)], tokenizer)
            found = len(before.ids), 0
        passage.text, passage.begin, passage.ids, passage.encoding = again.text, again.begin, again.ids, again.encoding
    first, passage.skip = found
    return before.ids[before.skip:first]


def _agreed(before: _Passage, passage: _Passage) -> tuple[int, int] | None:
    """Tokens of both from which on they are the same ones at the same places, in the second half of what they share."""
    first = before.beyond((passage.begin + before.end) // 2)
    if first + AGREED > len(before.ids):
        return None
    places = [before.place(i) for i in range(first, len(before.ids))]
    j = 0
    for i in range(first, len(before.ids) - AGREED + 1):
        if len(set(before.ids[i:i + AGREED])) < DISTINCT:
            continue
        while j < len(passage.ids) and passage.place(j)[0] < places[i - first][0]:
            j += 1
        for k in range(j, len(passage.ids) - AGREED + 1):
            if passage.place(k)[0] != places[i - first][0]:
                break
            if (before.ids[i:i + AGREED] == passage.ids[k:k + AGREED]
                    and [passage.place(k + n) for n in range(AGREED)] == places[i - first:i - first + AGREED]):
                return i, k
    return None
