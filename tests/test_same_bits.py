"""The same run gives the same bits: what torch.use_deterministic_algorithms asks for is obeyed.

On the CPU device, with cuDNN's and flash's kernels put into words; tests/gpu/test_same_bits_on_gpu.py has the real ones.
"""
from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import test_rows
import torch
from test_rows import SCALE, all_of, cudnn, heads  # noqa: F401
from torch import Tensor

from megatrain_torch.templates import attention
from megatrain_torch.templates.attention import Attention


@pytest.fixture
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---- attention's backward ----

def flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
                   most_q: int, most_k: int, dropout: float, causal: bool, rng: Tensor, unused: Tensor, *, scale: float
                   ) -> tuple[Tensor, ...]:
    """[T, h, D], sequence by sequence, as cuDNN's of test_rows does it; lse: [hq, T]."""
    assert (lse.shape, lse.is_contiguous()) == ((q.shape[1], q.shape[0]), True) and cu_q.dtype == cu_k.dtype == torch.int32
    assert (most_q, most_k, scale) == (int(cu_q.diff().max()), int(cu_k.diff().max()), SCALE)
    found = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist())):
        one = [t[i:j].transpose(0, 1)[None] for t, i, j in ((dout, a, b), (q, a, b), (k, c, d), (v, c, d), (out, a, b))]
        found.append(test_rows.cudnn_backward(*one, lse[None, :, a:b, None], None, None, None, None, None, b - a, d - c,
                                              0.0, causal, scale=scale))
    return tuple(torch.cat([g[0].transpose(0, 1) for g in parts]) for parts in zip(*found))


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("cuDNN's backward does not repeat itself")


@pytest.mark.parametrize("most", [1 << 31, 300])                     # at once, and in parts
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("causal, batch, seq", [(True, 1, 10), (True, 3, 10), (False, 2, 7), (True, 1, 12), (True, 2, 14)])
def test_where_the_same_bits_are_asked_for_backward_is_flashs(
        causal: bool, batch: int, seq: int, with_sinks: bool, most: int, cudnn: None, strict: None,    # noqa: F811
        monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = torch.rand(8, dtype=torch.float64) if with_sinks else None
    monkeypatch.setattr(attention, "CUDNN_MOST", most)
    monkeypatch.setattr(attention, "repeating", lambda: False)
    right = all_of(Attention(SCALE, causal), sinks, batch, seq)
    monkeypatch.undo()
    for name, value in {"_forward": test_rows.cudnn_forward, "_backward": never, "_flash_backward": flash_backward,
                        "ROWS": 5, "LONG": 11, "CUDNN_MOST": most}.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(Attention, "_cudnn", lambda self, q, sinks: True)
    found = all_of(Attention(SCALE, causal), sinks, batch, seq)
    assert len(found) == len(right) == 4 + with_sinks
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, right))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
def test_with_a_mask_it_is_torchs_choice(boolean: bool, with_sinks: bool, strict: None, monkeypatch: pytest.MonkeyPatch
                                         ) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = heads(2, 9)
    sinks = torch.rand(8, dtype=torch.float64, generator=g) if with_sinks else None
    mask = torch.rand(2, 1, 9, 9, generator=g) < 0.6
    mask[0, 0, 3] = False                                            # a row that sees nothing
    if not boolean:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, torch.finfo(torch.float64).min)
    one = Attention(SCALE, False, mask)

    def masked_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *_: Any, scale: float) -> tuple[Any, ...]:
        logits = test_rows.parts(q, k, False) + bias
        return (logits.softmax(3) @ v.repeat_interleave(2, 1), logits.logsumexp(3, keepdim=True), None, None, 9, 9,
                torch.zeros(1), torch.zeros(1), None)

    def truth() -> list[Tensor]:
        bias, blind = one._seen(q.transpose(1, 2))
        leaves = [t.detach().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
        logits = test_rows.parts(*(t.transpose(1, 2) for t in leaves[:2]), False) + bias
        if sinks is not None:
            logits = torch.cat((logits, leaves[3].view(1, -1, 1, 1).expand(2, 8, 9, 1)), 3)
        out = logits.softmax(3)[..., :9] @ leaves[2].transpose(1, 2).repeat_interleave(2, 1)
        out = out.masked_fill(blind, 0).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    monkeypatch.setattr(attention, "_forward", masked_forward)
    monkeypatch.setattr(attention, "_backward", never)
    monkeypatch.setattr(Attention, "_cudnn", lambda self, q, sinks: True)
    out, kept = one.forward(q, k, v, sinks)
    found = [out, *(d for d in one.backward(dout, q, k, v, out, kept, sinks) if d is not None)]
    right = truth()
    assert len(found) == len(right) == 4 + with_sinks
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), found, right):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name


def test_with_warn_only_cudnns_kernels_stay_and_warn_themselves(cudnn: None, monkeypatch: pytest.MonkeyPatch    # noqa: F811
                                                                ) -> None:
    monkeypatch.setattr(attention, "_flash_backward", never)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not attention.repeating() and len(all_of(Attention(SCALE, True), None, 2, 10)) == 4
    finally:
        torch.use_deterministic_algorithms(False)
