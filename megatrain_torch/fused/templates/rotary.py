"""How a model's code pairs the numbers of a head for the rotary embedding, found by trying it.

The angles of one head, [.., R], come to a layer in one of three forms: each pair's angle at both of its
places (Llama's halves, Cohere's neighbours), or only in the first half (GLM, which repeats it in the layer;
GPT-OSS, whose cos and sin are R/2 long). DeepSeek's pairs are neighbours in what is turned, and the halves of what its
code makes of that: such heads are turned where they lie here, queries and keys alike, so that their products are the
same sums in another order.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .parts import Unfit

D = 8                                        # size of the heads it is tried on
TURN, TURN_PAIRS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"     # as transformers calls it


@dataclass(frozen=True)
class Rotary:
    """interleaved: pairs are neighbours. first: each pair's angle is taken from the first half. short: it comes R/2
    long. parted: the model's code gives the first of all pairs, then the second of all."""

    interleaved: bool = False
    first: bool = False
    short: bool = False
    parted: bool = False

    def angles(self, t: Tensor) -> Tensor:
        """cos or sin as ops.rope takes it: [1 or B, S, R]."""
        if self.short:
            return torch.cat((t, t), -1)
        return t[..., :t.shape[-1] // 2].repeat_interleave(2, -1) if self.first else t

    def as_given(self, t: Tensor) -> Tensor:
        """Heads [..., R] turned where they lie, as the model's code gives them."""
        return torch.cat((t[..., ::2], t[..., 1::2]), -1) if self.parted else t


# By the function's name: what is parted, a cache has to be given so, and only latent attention does.
KINDS = {TURN: (Rotary(), Rotary(interleaved=True), Rotary(interleaved=True, first=True), Rotary(short=True)),
         TURN_PAIRS: (Rotary(interleaved=True, first=True, parted=True),)}


def rotary_of(attn: nn.Module, name: str = TURN) -> Rotary:
    """What the function of this name beside the class of an attention does; halves where there is none.

    Raises:
        Unfit: none of the known ways.
    """
    turn = getattr(sys.modules.get(type(attn).__module__), name, None)
    if turn is None:
        return Rotary()
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, 2, D, generator=rng) for _ in range(2))
    for width in (D, D // 2):
        cos, sin = (torch.randn(1, 3, width, generator=rng) for _ in range(2))
        truth = _theirs(turn, q, k, cos, sin)
        for kind in KINDS[name] if truth is not None else ():
            if kind.short == (width < D) and torch.allclose(truth, _ours(kind, q, k, cos, sin), rtol=1e-5, atol=1e-6):
                return kind
    raise Unfit("its rotary embedding is none of the known ones")


def _theirs(turn: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            turned = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return torch.cat([t.transpose(1, 2) for t in turned])
    except (RuntimeError, TypeError, ValueError):        # cos and sin of this width are not for it
        return None


def _ours(kind: Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(q), torch.empty_like(k)
    ops.rope(q, k, kind.angles(cos), kind.angles(sin), *out, interleaved=kind.interleaved)
    return kind.as_given(torch.cat(out))
