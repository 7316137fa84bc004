"""Tokens of texts. A long text is tokenized in passages, several at once: one call takes 200 bytes a character.

Each passage is read with some of the text before and behind it, and has the tokens that begin in it. So the tokens are
those of one call, where two passages have the same tokens around their border. Where they have not (the same few
characters again and again), and with tokenizers in Python, which do not tell places, the text is cut there.
"""
from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

PASSAGE = 1 << 14                    # characters
AROUND = 1 << 11                     # characters before and behind a passage that are read with it
SAME = 128                   # characters around a border within which both sides must have the same tokens
BORDERS = ("\n\n", "\n", " ")


def compact(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """[n], in two bytes each where they fit."""
    found = np.asarray(ids, np.uint32)
    return found.astype(np.uint16) if not len(found) or found.max() < 1 << 16 else found


def ids_of(text: str, tokenizer: Any) -> np.ndarray:
    """[n] tokens of a text, with its own beginning and end; none, if it is empty."""
    if len(text) <= 4 * PASSAGE:
        return compact(framed(tokenizer(text, verbose=False)["input_ids"], tokenizer))
    first, last = around(tokenizer)
    parts = [compact(first), *_passages(text, tokenizer), compact(last)]
    return framed(compact(np.concatenate(parts)), tokenizer)


def framed(ids: Any, tokenizer: Any) -> Any:
    """With one beginning-of-text token at most, though the text itself may begin with another, and one of its end."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if not len(ids):
        return ids
    while len(ids) > 1 and ids[0] == ids[1] == begin:
        ids = ids[1:]
    while len(ids) > 1 and ids[-1] == ids[-2] == end:
        ids = ids[:-1]
    if end is None or ids[-1] == end:
        return ids
    return compact(np.append(ids, end)) if isinstance(ids, np.ndarray) else [*ids, end]


@functools.lru_cache(4)
def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    whole, bare = (tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"] for special in (True, False))
    at = next((i for i in range(len(whole) - len(bare) + 1) if whole[i:i + len(bare)] == bare), 0)
    return whole[:at], whole[at + len(bare):]


def _passages(text: str, tokenizer: Any) -> list[np.ndarray]:
    borders = [0]
    while len(text) - borders[-1] > 2 * PASSAGE:
        borders.append(_border(text, borders[-1] + PASSAGE))
    borders.append(len(text))
    hard = set(borders) if not tokenizer.is_fast else {0, len(text)}      # where nothing is read beyond
    found = list(_encoded(text, tokenizer, list(pairwise(borders)), hard))
    apart = {b for b, left, right in zip(borders[1:], found, found[1:])
             if b not in hard and not all(map(np.array_equal, left.behind, right.before))}
    again = [i for i, (a, b) in enumerate(pairwise(borders)) if apart & {a, b}]
    places = [(borders[i], borders[i + 1]) for i in again]
    for i, passage in zip(again, _encoded(text, tokenizer, places, hard | apart)):
        found[i] = passage
    return [passage.ids for passage in found]


def _border(text: str, near: int) -> int:
    """Where to cut: behind a paragraph, a line or a word that ends in the half passage before."""
    for mark in BORDERS:
        if (at := text.rfind(mark, near - PASSAGE // 2, near)) >= 0:
            return at + len(mark)
    return near


class _Passage(NamedTuple):
    """Tokens that begin in it; and those around its beginning and its end, with the character that each begins at."""

    ids: np.ndarray
    before: tuple[np.ndarray, np.ndarray]
    behind: tuple[np.ndarray, np.ndarray]


def _encoded(text: str, tokenizer: Any, places: list[tuple[int, int]], hard: set[int]) -> Iterator[_Passage]:
    for some in (places[i:i + 4] for i in range(0, len(places), 4)):
        begins = [a if a in hard else max(0, a - AROUND) for a, _ in some]
        ends = [b if b in hard else b + AROUND for _, b in some]
        made = tokenizer([text[a:b] for a, b in zip(begins, ends)], add_special_tokens=False, verbose=False,
                         return_attention_mask=False)
        for i, (a, b) in enumerate(some):
            ids = compact(made["input_ids"][i])
            if not tokenizer.is_fast:
                yield _Passage(ids, (ids, ids), (ids, ids))
                continue

            def start(token: int, encoding: Any = made.encodings[i], begin: int = begins[i]) -> int:
                return begin + encoding.token_to_chars(token)[0]

            def at(character: int, n: int = len(ids), start: Callable[[int], int] = start) -> int:
                return bisect.bisect_left(range(n), character, key=start)

            near = [range(at(border - SAME), at(border + SAME)) for border in (a, b)]
            around = [(ids[tokens.start:tokens.stop], np.array(list(map(start, tokens)))) for tokens in near]
            yield _Passage(ids[at(a):at(b)], *around)
