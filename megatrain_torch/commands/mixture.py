"""Several sources of data: how much is taken of each, and what tells a run's data from other data.

    data: [new.jsonl:0.9, old.jsonl:0.1]     nine tokens in ten are of the first, one of the second

Weights are shares of the tokens. Nothing is taken twice, so the mixture is as large as the shares allow: the source
that is smallest for its share is used up. Without weights all is taken of all.
"""
from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from .data import Document, documents, pairs
from .methods import Pair
from .reading import files_of, records
from .say import say
from .settings import Settings


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
    """(path or name, weight) of `path:0.3`. A path that is there as it stands is one, colons or not.

    Raises:
        MegatrainError: the weight is not more than 0.
    """
    name, colon, tail = word.rpartition(":")
    if not colon or not name or Path(word).exists():
        return word, None
    try:
        weight = float(tail)
    except ValueError:
        return word, None
    if not (math.isfinite(weight) and weight > 0):
        raise MegatrainError(f"data={word}: a weight is a share of the tokens, more than 0")
    return name, weight


def sources(settings: Settings, words: tuple[str, ...], tokenizer: Any, date: datetime | None = None
            ) -> list[Source]:
    """All of them, read and tokenized.

    Raises:
        MegatrainError: one cannot be read, has nothing to train on, or some have weights and some have none.
    """
    found = [named(word) for word in words]
    without = [name for name, weight in found if weight is None]
    if without and len(without) < len(found):
        raise MegatrainError(f"data: {without[0]} has no weight, and others have: give each one, {without[0]}:0.5")
    if len(found) == 1 and not without:
        raise MegatrainError(f"data={words[0]}: a weight is a share among several sources, and this is one alone; all "
                             f"of it is taken as {found[0][0]}")
    for name, _ in found:
        files_of(name)                       # what is not there is said before hours of tokenizing
    return [Source(name, weight, pairs(records(name, settings.split), settings.method, tokenizer, name)
                   if settings.method != "sft" else
                   documents(records(name, settings.split), tokenizer, settings.column, name, date))
            for name, weight in found]


def shuffled(found: list[Document], seed: int) -> list[Document]:
    return random.Random(seed).sample(found, len(found))


def mixed(found: list[Source], seed: int) -> list[Document]:
    """Documents of all sources, by their weights; which ones of a source, `seed` says."""
    if found[0].weight is None:
        return [d for source in found for d in source.documents]
    whole = sum(source.weight for source in found)
    most = min(source.tokens * whole / source.weight for source in found)
    taken = [_taken(source, round(most * source.weight / whole), seed) for source in found]
    tokens = [sum(map(len, some)) for some in taken]
    for source, own in zip(found, tokens):
        say(f"{source.name}: {own:,} of {source.tokens:,} tokens, {own / max(1, sum(tokens)):.0%} of the data")
    return [d for some in taken for d in some]


def _taken(source: Source, tokens: int, seed: int) -> list[Document]:
    """So many tokens; of a document that stays whole more than half has to be wanted."""
    made: list[Document] = []
    for document in shuffled(source.documents, seed):
        if tokens <= 0:
            break
        if not document.whole:
            document = document.cut(0, min(tokens, len(document)))
        elif 2 * tokens < len(document):
            continue
        made.append(document)
        tokens -= len(document)
    return made


# ---- which data it was ---------------------------------------------------------------------------

SAID = ("seq", "seed", "validation")                     # settings that say which row is the n-th


def identity(settings: Settings, found: list[Source], held: list[Source]) -> dict[str, Any]:
    """What tells the rows from others. held: held out, where that is data of its own."""
    return {"sources": [_about(source) for source in found], "validation sources": [_about(source) for source in held],
            "chat": any(d.chat for source in found for d in source.documents),
            **{name: getattr(settings, name) for name in SAID if name != "validation" or not held}}


def _about(source: Source) -> dict[str, Any]:
    whole = hashlib.sha256()
    for d in source.documents:
        if isinstance(d, Pair):
            whole.update(d.text.encode())
            continue
        whole.update(f"{len(d)} {d.whole} {d.trained.all()} {'' if len(d.starts) == 1 else d.starts}".encode())
        whole.update(d.ids.astype("<u4").tobytes() if len(d) < 1 << 20 else d.ids.data)
        if not d.trained.all():
            whole.update(d.trained.tobytes())
    return {"name": source.name, "weight": source.weight, "tokens": source.tokens, "sha256": whole.hexdigest()}


def difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Words for what differs between two identities, where the rows do; "": they are the same."""
    for kind in ("sources", "validation sources"):
        before, after = then.get(kind) or [], now[kind]
        if not isinstance(before, list) or len(before) != len(after):
            return f"data has {len(after)} sources now, and had others when the run began"
        for a, b in zip(before, after):
            if not isinstance(a, dict) or a.get("sha256") != b["sha256"]:
                had = a.get("tokens") if isinstance(a, dict) else None
                return (f"{b['name']} is not what the run was begun with ({b['tokens']:,} tokens now, and {had:,} then)"
                        if isinstance(had, int) else f"{b['name']} is not what the run was begun with")
            if a.get("weight") != b["weight"]:
                return f"{b['name']} has a weight of {b['weight']} now, and had {a.get('weight')}"
    changed = [name for name in SAID if then.get(name) != now.get(name)]
    return f"{changed[0]} is {now.get(changed[0])} now, and was {then.get(changed[0])}" if changed else ""
