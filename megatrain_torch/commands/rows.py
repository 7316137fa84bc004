"""Tokens become rows of `seq`, and rows become micro-batches.

In a row documents stand behind one another, and position_ids start again at each: most models of transformers, given
no mask, let each see itself alone. With a model that does not, each document has rows of its own. Plain text is cut
where a row ends, so that rows are full; what has a beginning that the rest needs (prompts, conversations) stays whole,
put where it fits best. What is left of a row is a sequence of its own without labels.
"""
from __future__ import annotations

import bisect
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatrain_torch import MegatrainError

from .data import Document
from .settings import Settings, say

IGNORED = -100                       # a label that is no target, torch's own
PROBE = 8                            # tokens of a document of why_alone
SAMPLE_BYTES = 8 << 30               # of a model that is made to be asked
LEAK = 1e-4                          # of the logits: more than rounding in fp32; 1e-6 was seen, and 0.05 of leaks
# Kinds that were asked in this project's tests.
SEPARATE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
                      "gemma3_text", "phi3", "olmo2", "granite", "glm4", "smollm3"})
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}     # layer_types that look at tokens by a mask


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
            train, held = [*order[:i], document.cut(0, left)], [document.cut(left, len(document)), *order[i + 1:]]
            return [d for d in train if len(d)], [d for d in held if len(d)]
        left -= len(document)
    return order, []


class _NoRow(dict):
    """In the place of a row where other processes have more of them: nothing is learned of it."""


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

    def first(self, most: int) -> Rows:
        return Rows(self.ids[:most], self.learned[:most], self.begins[:most])


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
            at += len(part)
        if at < seq:
            begins[row, at] = True
    cut, shared = sum(d.whole and len(d) > seq for d in found), sum(len(parts) > 1 for parts in plan)
    return Rows(ids, learned, begins, cut, shared, alone)


def rows_of(settings: Settings, tokenizer: Any, parts: tuple[list[Document], list[Document]], alone: bool = False
            ) -> tuple[Rows, Rows]:
    """Of what is trained, and of what is held out. Raises: MegatrainError: nothing is to be learned."""
    seq, filler = settings.seq, next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    train, held = (packed(part, seq, filler, alone) for part in parts)
    if train.targets:
        return train, held
    found = [part for d in parts[0] for part in d.parts]
    if found and all(d.whole and not d.trained[1:seq].any() for d in found):
        raise MegatrainError(f"{', '.join(settings.data)}: every prompt is longer than a row of {seq} (--seq), or as "
                             f"long, and nothing is left of what is to be learned; the longest, with its completion, "
                             f"has {max(map(len, found))} tokens")
    aside = (f"{settings.validation:.0%} of them are held out (--validation), and the rest"
             if parts[1] and isinstance(settings.validation, float) else "and that")
    tokens = sum(len(d) for part in parts for d in part)
    raise MegatrainError(f"the data has {tokens} tokens; {aside}, in rows of {seq} (--seq), has none to learn")


def fitted(model: Any, settings: Settings, tokenizer: Any, parts: tuple[list[Document], list[Document]],
           rows: tuple[Rows, Rows], flat: bool) -> tuple[Rows, Rows]:
    """Rows, as rows_of packs them, or, where the model would see other documents in them, of one document each."""
    if (flat or any(some.shared for some in rows)) and (why := why_alone(model, settings.seq, flat)):
        many, rows = len(rows[0]), rows_of(settings, tokenizer, parts, alone=True)
        say(f"{why}; so each has rows of its own, filled up at the end: {len(rows[0])} rows, not {many}")
    if cut := sum(some.cut for some in rows):
        say(f"{cut} conversations are longer than {settings.seq} tokens and lost their end; --seq makes room")
    return rows


def collate(flat: bool) -> Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Rows to a micro-batch: [B, seq], or, flat, [1, B * seq]: positions start again at each row anyhow."""
    def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = [r for r in rows if not isinstance(r, _NoRow)] or rows[:1]
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
    rows = [{"input_ids": torch.cat([other, one]), "position_ids": again} for other in (*others, one)]
    logits = model(**collate(flat)(rows), use_cache=False).logits.view(3, 2, length, -1)
    first = logits[2, 0]                             # nothing is before it
    return max((logits[row, 1] - first).square().mean().sqrt().item() for row in range(3)), first.std().item()
