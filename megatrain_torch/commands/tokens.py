"""Tokens of texts, in memory that does not grow with the text but by the tokens themselves.

What a tokenizer makes of a call takes 200 bytes a character, and one text is one thread's work. So a long text is cut
into pieces, at the end of a paragraph where there is one, which are tokenized several at once. Each piece but the first
begins in the one before: where both have the same tokens at the same characters, several in a row, one goes on as the
other. So the tokens are those of one call, for any tokenizer that tells where its tokens are. Where two pieces agree on
nothing (a text without a border for 8,000 characters, in a tokenizer without words), and with tokenizers in Python,
which do not tell, the text is cut at the piece's end.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PIECE = 1 << 14                      # characters
LONG = 4 * PIECE                     # a text of more is cut
TOGETHER, TEXTS = 1 << 17, 1000      # characters, and texts, that the tokenizer is given at once
OVERLAPS = (1 << 10, 1 << 13)        # characters that a piece has of the one before: first, and where they disagree
AGREED = 8                           # tokens in a row
BORDERS = ("\n\n", "\n", " ")
Blocks = Iterable[str]


def compact(ids: Sequence[int]) -> np.ndarray:
    """[n], in two bytes each where they fit."""
    found = np.asarray(ids, np.uint32)
    return found.astype(np.uint16) if not len(found) or found.max() < 1 << 16 else found


def ids_of(text: str | Blocks, tokenizer: Any, special: bool = True, meter: Any = None) -> np.ndarray:
    """Tokens of one text, long or not. special: with those that the tokenizer puts around a text."""
    if isinstance(text, str) and len(text) <= LONG:
        return compact(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    begin, end = _around(tokenizer) if special else ([], [])
    parts = [compact(begin)]
    for part in _pieced(_blocks(text), tokenizer):
        parts.append(compact(part))
        if meter is not None:
            meter.add(len(part))
    return np.concatenate([*parts, compact(end)]) if any(map(len, parts)) or len(end) else compact([])


def _blocks(text: str | Blocks) -> Blocks:
    if not isinstance(text, str):
        return text
    return (text[at:at + TOGETHER] for at in range(0, len(text), TOGETHER))


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    whole, bare = (tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"] for special in (True, False))
    at = next((i for i in range(len(whole) - len(bare) + 1) if whole[i:i + len(bare)] == bare), 0)
    return whole[:at], whole[at + len(bare):]


# ---- pieces --------------------------------------------------------------------------------------

@dataclass
class _Piece:
    """A piece of a text, [begin, end) in characters of it; ids, and where each begins and ends there: [n], [n,2]."""

    text: str
    begin: int
    ids: np.ndarray
    places: np.ndarray

    @property
    def end(self) -> int:
        return self.begin + len(self.text)


def _pieced(blocks: Blocks, tokenizer: Any) -> Iterator[np.ndarray]:
    """Tokens of a text, some after the other."""
    told = bool(getattr(tokenizer, "is_fast", False))
    before: _Piece | None = None
    for some in _batched(_cut(blocks, OVERLAPS[0] if told else 0)):
        for piece in _encoded(some, tokenizer, told):
            if before is not None:
                yield _joined(before, piece, tokenizer) if told else before.ids
            before = piece
    if before is not None:
        yield before.ids


def _cut(blocks: Blocks, overlap: int) -> Iterator[tuple[int, str]]:
    """(where it begins, piece): each but the first begins `overlap` characters before the end of the one before."""
    text, begin, seen = "", 0, 0                     # seen: characters of text that the piece before has
    for block in blocks:
        text += block
        while len(text) - seen > 2 * PIECE:
            end = _border(text, seen + PIECE)
            yield begin, text[:end]
            keep = min(overlap, end)
            text, begin, seen = text[end - keep:], begin + end - keep, keep
    if len(text) > seen or begin == 0:
        yield begin, text


def _border(text: str, near: int) -> int:
    """Where to cut: behind a paragraph, a line or a word that ends in the half piece before."""
    for mark in BORDERS:
        if (at := text.rfind(mark, near - PIECE // 2, near)) >= 0:
            return at + len(mark)
    return near


def _batched(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    some: list[tuple[int, str]] = []
    for piece in pieces:
        some.append(piece)
        if len(some) * PIECE >= TOGETHER:
            yield some
            some = []
    if some:
        yield some


def _encoded(pieces: list[tuple[int, str]], tokenizer: Any, told: bool) -> list[_Piece]:
    found = tokenizer([text for _, text in pieces], add_special_tokens=False, return_offsets_mapping=told,
                      return_attention_mask=False, return_token_type_ids=False, verbose=False)
    made = []
    for i, (begin, text) in enumerate(pieces):
        places = np.asarray(found["offset_mapping"][i] if told else [], np.int64).reshape(-1, 2) + begin
        made.append(_Piece(text, begin, np.asarray(found["input_ids"][i], np.uint32), places))
    return made


def _joined(before: _Piece, piece: _Piece, tokenizer: Any) -> np.ndarray:
    """The tokens of `before` up to where `piece` goes on; those of `piece` are from there on then."""
    found = _agreed(before, piece)
    if found is None:
        longer = min(OVERLAPS[1], len(before.text))
        text = before.text[len(before.text) - longer:] + piece.text[before.end - piece.begin:]
        [again] = _encoded([(before.end - longer, text)], tokenizer, True)
        found = _agreed(before, again)
        if found is None:                                # nowhere: one ends, the other begins
            [again] = _encoded([(before.end, piece.text[before.end - piece.begin:])], tokenizer, True)
            found = len(before.ids), 0
        piece.text, piece.begin, piece.ids, piece.places = again.text, again.begin, again.ids, again.places
    first, second = found
    piece.ids, piece.places = piece.ids[second:], piece.places[second:]
    return before.ids[:first]


def _agreed(before: _Piece, piece: _Piece) -> tuple[int, int] | None:
    """Tokens of both from which on they are the same ones at the same places, from the middle of what they share on."""
    middle = (piece.begin + before.end) // 2
    starts = before.places[:, 0]
    for i in range(int(np.searchsorted(starts, middle)), len(starts) - AGREED + 1):
        for j in range(int(np.searchsorted(piece.places[:, 0], starts[i])), len(piece.ids) - AGREED + 1):
            if piece.places[j, 0] != starts[i]:
                break
            if (np.array_equal(before.ids[i:i + AGREED], piece.ids[j:j + AGREED])
                    and np.array_equal(before.places[i:i + AGREED], piece.places[j:j + AGREED])):
                return i, j
    return None
