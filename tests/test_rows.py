"""A long row's attention, forward some queries at a time: the same output, log-sum-exp and gradients in fp64."""
from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import zoo
from fusing import TOLERANCE, Build, error, lm
from torch import Tensor

from megatrain_torch.fused.templates import Weights, attention
from megatrain_torch.fused.templates.attention import Attention, by_rows
from megatrain_torch.fused.templates.decoder import Decoder

SCALE = 0.3


def parts(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Logits [B, hq, n, m]."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * SCALE
    return logits.masked_fill(~torch.ones(logits.shape[2:], dtype=torch.bool).tril(), -torch.inf) if causal else logits


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """As cuDNN: of [B, h, n, D], log-sum-exp [B, hq, n, 1]."""
    logits = parts(q, k, causal)
    return logits.softmax(3) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1), logits.logsumexp(3, keepdim=True)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, bias: Any, *rest: Any, scale: float) -> tuple[Any, ...]:
    seen.append((q.shape[2], k.shape[2], rest[2]))
    out, lse = forward(q, k, v, rest[2])
    return out, lse, None, None, q.shape[2], k.shape[2], torch.zeros(1), torch.zeros(1), None


def cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
                   ) -> tuple[Tensor, Tensor, Tensor]:
    """By what was kept, as the kernel does: P from log-sum-exp, its row sums from the output."""
    assert (rest[5], rest[6]) == (q.shape[2], k.shape[2])    # max_q, max_k
    groups = q.shape[1] // k.shape[1]
    p = torch.exp(parts(q, k, rest[8]) - lse)
    ds = p * (dout @ v.repeat_interleave(groups, 1).transpose(2, 3) - (dout * out).sum(3, keepdim=True)) * SCALE
    dk, dv = (t.transpose(2, 3) @ x for t, x in ((ds, q), (p, dout)))
    return ds @ k.repeat_interleave(groups, 1), *(t.unflatten(1, (-1, groups)).sum(2) for t in (dk, dv))


seen: list[tuple[int, int, bool]] = []


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as on CUDA, in blocks of 5 queries from 11 tokens on."""
    seen.clear()
    for name, value in {"_forward": cudnn_forward, "_backward": cudnn_backward, "ROWS": 5, "LONG": 11}.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(Attention, "_cudnn", lambda self, q, sinks: True)


def heads(batch: int, seq: int) -> list[Tensor]:
    """q, k, v: views of one matrix; and dout."""
    g = torch.Generator().manual_seed(0)
    qkv, dout = (torch.randn(batch, seq, h, 8, dtype=torch.float64, generator=g) for h in (16, 8))
    return [*qkv.split((8, 4, 4), 2), dout]


def all_of(one: Attention, sinks: Tensor | None, batch: int, seq: int) -> list[Tensor]:
    q, k, v, dout = heads(batch, seq)
    out, kept = one.forward(q, k, v, sinks)
    return [out, *(d for d in one.backward(dout, q, k, v, out, kept, sinks) if d is not None)]


@pytest.mark.parametrize("seq, rows", [(12, 5), (10, 5), (4, 5), (7, 1)])
def test_blocks_of_queries_are_the_whole(seq: int, rows: int) -> None:
    q, k, v, _ = heads(2, seq)
    kernel = lambda *a: forward(*(t.transpose(1, 2) for t in a[:3]), a[3])  # noqa: E731
    out, lse = by_rows(kernel, q, k, v, rows)
    right, right_lse = kernel(q, k, v, True)
    assert torch.allclose(out, right.transpose(1, 2), rtol=1e-12) and torch.allclose(lse, right_lse, rtol=1e-12)
    flat, flat_lse = by_rows(lambda *a: (lambda o, s: (o, s[..., 0]))(*kernel(*a)), q, k, v, rows)
    assert torch.equal(flat, out) and torch.equal(flat_lse, lse[..., 0])


@pytest.mark.parametrize("most", [1 << 31, 12 * 8 * 8 // 4])     # of q: backward over two heads at a time
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_long_row_goes_by_blocks_and_back_at_once(with_sinks: bool, batch: int, most: int, cudnn: None,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = torch.rand(8, dtype=torch.float64) if with_sinks else None
    monkeypatch.setattr(attention, "LONG", 1 << 40)
    right = all_of(Attention(SCALE, True), sinks, batch, 12)
    seen.clear()
    monkeypatch.setattr(attention, "LONG", 11)
    monkeypatch.setattr(attention, "CUDNN_MOST", most)
    found = all_of(Attention(SCALE, True), sinks, batch, 12)
    assert seen == [(5, 5, True), (5, 5, True), (5, 5, False), (2, 2, True), (2, 10, False)]
    assert len(found) == len(right) and all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, right))


def test_other_rows_go_at_once(cudnn: None) -> None:
    """Short ones, with a mask, or looking ahead."""
    for one, seq in ((Attention(SCALE, True), 10), (Attention(SCALE, False), 12),
                     (Attention(SCALE, False, torch.zeros(1, 1, 12, 12)), 12)):
        seen.clear()
        one.forward(*heads(1, seq)[:3])
        assert [n for n, *_ in seen] == [seq]


def test_no_block_where_backward_is_flashs(cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keeps something of its own."""
    monkeypatch.setattr(attention, "CUDNN_MOST", 12 * 8 - 1)
    monkeypatch.setattr(Attention, "_by_flash", lambda self, *a: ("flash", None))
    assert Attention(SCALE, True).forward(*heads(1, 12)[:3]) == ("flash", None) and not seen


def test_long_rows_span_no_more_than_a_kernel_is_given(cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a long row are copied out of the matrix that they lie in."""
    spans: list[int] = []
    monkeypatch.setattr(attention, "_forward", lambda *a, **k: spans.extend(map(attention.span_of, a[:3]))
                        or cudnn_forward(*a, **k))
    monkeypatch.setattr(attention, "CUDNN_SPAN", 12 * 4 * 8)
    Attention(SCALE, True).forward(*heads(1, 12)[:3])
    assert len(seen) == 5 and max(spans) <= 12 * 4 * 8


# ---- a whole layer's backward, from the end of its row ----

FAMILIES = {
    "llama": lm("llama", attention_bias=True), "qwen3": lm("qwen3", head_dim=8), "olmo2": lm("olmo2"),
    "gemma3": lm("gemma3_text", head_dim=8, query_pre_attn_scalar=8), "granite": lm("granite", residual_multiplier=0.5),
    "phi3": lm("phi3"), "gpt_oss": lm("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2)}


def layer_grads(build: Build, keep: str, wanted: str = "") -> dict[str, Tensor]:
    """y, dx and gradients of the first layer's weights whose name holds `wanted`."""
    parity.seed()
    model = build()
    model.set_attn_implementation("eager" if "sinks" in str(model.state_dict().keys()) else "sdpa")
    layer, x = model.model.layers[0], torch.randn(1, 12, zoo.H)
    template, dy = Decoder(layer), torch.randn_like(x)
    angles = tuple(torch.rand(1, 12, 4 if hasattr(layer.self_attn, "sinks") else 8) for _ in range(2))      # as good as any
    _, call = template.take(layer, x, {"position_embeddings": angles})
    call.attention = Attention(SCALE, True)
    w, names = Weights(dict(layer.named_parameters())), [n for n, _ in layer.named_parameters() if wanted in n]
    with torch.no_grad():
        y, kept = template.forward(x, w, call, keep)
        dx, grads = template.backward(dy, x, kept, w, call, names)
    assert sorted(grads) == sorted(names)
    return {"y": y, "dx": dx, **grads}


@pytest.mark.parametrize("keep", ["saved", "replay", "attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layers_gradients_by_blocks_are_the_whole(family: str, keep: str, cudnn: None, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    monkeypatch.setattr(attention, "LONG", 1 << 40)
    right = layer_grads(FAMILIES[family], keep)
    monkeypatch.setattr(attention, "LONG", 11)
    found, calls = layer_grads(FAMILIES[family], keep), []
    assert all(error(t, found[n]) < TOLERANCE for n, t in right.items())
    monkeypatch.setattr(attention, "_backward", lambda *a, **k: calls.append((a[1].shape[2], a[2].shape[2], a[14]))
                        or cudnn_backward(*a, **k))
    some = layer_grads(FAMILIES[family], keep, "self_attn.o_proj")
    assert calls == [(2, 2, True), (2, 10, False), (5, 5, True), (5, 5, False), (5, 5, True)]
    assert all(error(right[n], some[n]) < TOLERANCE for n in some)


def test_several_rows_or_a_window_go_back_at_once(cudnn: None) -> None:
    q, k, _, _ = heads(2, 12)
    for one, rows, takes in ((Attention(SCALE, True), 1, True), (Attention(SCALE, True), 2, False),
                             (Attention(SCALE, True, window=3), 1, False), (Attention(SCALE, False), 1, False)):
        assert one.single_long_row(q[:rows], k[:rows], None) is takes
