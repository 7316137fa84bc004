"""Several sequences in one row: as the model computes them with its mask, and without one."""
from __future__ import annotations

from typing import Any

import fusing
import pytest
import torch
import zoo
from torch import Tensor

from megatrain_torch.base import packed
from megatrain_torch.fused import templates
from megatrain_torch.fused.templates import attention
from megatrain_torch.fused.templates.attention import Attention
from megatrain_torch.fused.trial import MAGNITUDES
from megatrain_torch.graph import hf_calls as masks_of
from megatrain_torch.plans.cost import cost_of
from megatrain_torch.plans.machine import MACHINES
from megatrain_torch.plans.shapes import shapes_of
from megatrain_torch.store.records import span_of

FAMILIES = {"llama": fusing.lm("llama"), "qwen3": fusing.lm("qwen3", head_dim=8),
            "llama_eager": fusing.lm("llama", attn_implementation="eager"),
            "phi3": fusing.lm("phi3"), "qwen3_moe": fusing.lm("qwen3_moe", head_dim=8, num_experts=4,
                                                                num_experts_per_tok=2, moe_intermediate_size=16)}
LENGTHS = (7, 1, 12, 4)


def row(step: int) -> dict[str, Tensor]:
    """As transformers' DataCollatorWithFlattening gives it."""
    ids = zoo.tokens(zoo.generator(step), rows=1, length=sum(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions,
            "use_cache": False}


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each real mask that is made."""
    made: list[int] = []
    own = masks_of.Sight.real.func
    monkeypatch.setattr(masks_of.Sight, "real", property(lambda self: (made.append(self.tokens), own(self))[1]))
    return made


@pytest.mark.parametrize("family, keep", [*((f, "saved") for f in FAMILIES), ("qwen3", "attention+host")])
def test_packed_sequences_train_as_plain_torch_with_its_mask(family: str, keep: str, masks: list[int]) -> None:
    fusing.same_as_plain(FAMILIES[family], row, keep)
    looks = 2 * len(MAGNITUDES)              # at the first tokens and the last, once for all layers of a structure
    assert len(masks) == looks, "real masks were made for the looks at numbers alone"


@pytest.mark.parametrize("rows", [2, 3])
def test_several_rows_with_the_same_positions_have_the_models_mask(rows: int, masks: list[int]) -> None:
    """Kernels that go by lengths would take the first row alone."""
    def several(step: int) -> dict[str, Tensor]:
        ids = zoo.tokens(zoo.generator(step), rows=rows, length=sum(LENGTHS))
        return {**row(step), "input_ids": ids, "labels": ids.masked_fill(row(step)["position_ids"] == 0, -100)}

    fusing.same_as_plain(FAMILIES["llama"], several)
    assert not masks


def test_each_sequence_is_as_if_it_were_alone() -> None:
    model = fusing.stream(FAMILIES["llama"](), "saved")
    batch = row(0)
    together = model(**batch).logits[0].detach()
    for at, n in zip((0, 7, 8, 20), LENGTHS):
        alone = model(input_ids=batch["input_ids"][:, at:at + n]).logits[0].detach()
        assert torch.allclose(together[at:at + n], alone, atol=1e-5)


def test_a_layer_that_runs_its_own_code_is_given_the_mask() -> None:
    for a, b in zip(*fusing.with_a_hook(FAMILIES["llama"], "mlp", row)):
        assert torch.allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("change", [
    {"attention_mask": torch.ones(1, 24, dtype=torch.long)}, {"use_cache": True}, {"position_ids": torch.arange(24)[None]}])
def test_what_transformers_takes_for_one_sequence_is_one(change: dict[str, Any]) -> None:
    batch = lambda step: {**row(step), **change}  # noqa: E731
    fusing.same_as_plain(FAMILIES["llama"], batch)


def test_attention_by_sequences_is_attention_by_mask() -> None:
    q, k, v, dout = (torch.randn(1, 24, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    p = packed.Packed.of(LENGTHS, torch.device("cpu"))
    mask = masks_of.Sight(1, 24, torch.device("cpu"), packed=p).real
    found, wanted = Attention(0.3, True, packed=p), Attention(0.3, False, mask)
    (out, kept), (right, right_kept) = found.forward(q, k, v), wanted.forward(q, k, v)
    assert torch.allclose(out, right)
    for a, b in zip(found.backward(dout, q, k, v, out, kept)[:3], wanted.backward(dout, q, k, v, right, right_kept)[:3]):
        assert torch.allclose(a, b)


def cudnn_takes(monkeypatch: pytest.MonkeyPatch, most: int, span: int) -> list[tuple[int, int]]:
    """Attention as on CUDA, where cuDNN's kernels are given so much at once: (elements of q, its span) of each call."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(attention, "CUDNN_MOST", most)
    monkeypatch.setattr(attention, "CUDNN_SPAN", span)
    monkeypatch.setattr(Attention, "_cudnn", lambda self, q, sinks: True)
    monkeypatch.setattr(attention, "_forward", lambda q, k, v, bias, *rest, scale: (
        seen.append((q.numel(), span_of(q))) or attend(q, k, v, bias, rest[2], scale), torch.zeros(()), *[None] * 7))
    monkeypatch.setattr(attention, "_backward", gradients)
    monkeypatch.setattr(attention, "_sunk", lambda out, lse, sinks: (out if sinks is None else out * times(sinks), lse))
    monkeypatch.setattr(attention, "sinks_grad", lambda dout, out, lse, sinks: (dout * out).sum((0, 2, 3)))
    return seen


def times(sinks: Tensor) -> Tensor:
    return sinks.view(1, -1, 1, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    n = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale)


def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Any, offset: Any,
              bias: Tensor | None, *rest: Any, scale: float) -> tuple[Tensor, ...]:
    assert max(span_of(dout), span_of(out)) <= attention.CUDNN_MOST
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(attend(*leaves, bias, rest[5], scale), leaves, dout)


def both(one: Attention, sinks: Tensor | None, rows: int) -> list[Tensor]:
    """Output and gradients of 8 query heads and 4 key heads, views of one matrix as a layer's projections are."""
    g = torch.Generator().manual_seed(0)
    qkv, dout = (torch.randn(rows, 12, h, 8, dtype=torch.float64, generator=g) for h in (16, 8))
    q, k, v = qkv.split((8, 4, 4), 2)
    out, kept = one.forward(q, k, v, sinks)
    return [out, *(d for d in one.backward(dout, q, k, v, out, kept, sinks) if d is not None)]


ROW = 12 * 8 * 8        # elements of q


@pytest.mark.parametrize("rows, most, span, calls", [
    (1, ROW, 1 << 20, 1), (1, 1 << 20, ROW, 1), (1, ROW - 1, 1 << 20, 2), (1, ROW // 3, 1 << 20, 4),
    (1, ROW // 3, ROW, 4), (3, ROW, 1 << 20, 3), (3, 2 * ROW, 1 << 20, 2), (3, 1 << 20, 3 * ROW, 2),
    (2, ROW // 2, ROW, 4)])
@pytest.mark.parametrize("kind", ["causal", "mask", "mask of each head", "sinks"])
def test_what_is_too_much_for_one_kernel_goes_in_parts(rows: int, most: int, span: int, calls: int, kind: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.randn(rows if "each" in kind else 1, 8 if "each" in kind else 1, 12, 12, dtype=torch.float64)
    one = Attention(0.3, True) if "mask" not in kind else Attention(0.3, False, mask)
    sinks = torch.rand(8, dtype=torch.float64) if kind == "sinks" else None
    cudnn_takes(monkeypatch, 1 << 40, 1 << 40)
    right = both(one, sinks, rows)
    seen = cudnn_takes(monkeypatch, most, span)
    found = both(one, sinks, rows)
    assert len(found) == (5 if kind == "sinks" else 4)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, right))
    assert len(seen) == calls and all(n <= most and far <= span for n, far in seen)


def test_queries_of_one_key_that_are_too_many_go_by_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row; flash takes neither masks nor sinks."""
    q, k, v, dout = (torch.randn(1, 12, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    plain = Attention(0.3, True)
    (right, right_kept), seen = plain.forward(q, k, v), []
    cudnn_takes(monkeypatch, 12 * 2 * 8 - 1, 1 << 20)
    monkeypatch.setattr(Attention, "_by_flash", lambda self, *a: seen.append(self._flash_options(*a[:2])[0][0].tolist())
                        or (right, None))
    monkeypatch.setattr(Attention, "_flash_grads", lambda self, *a: (a[1], a[2], a[3], None))
    assert plain.forward(q, k, v)[0] is right and seen == [[0, 12]]
    assert plain.backward(dout, q, k, v, right, right_kept)[3] is None
    with pytest.raises(RuntimeError, match="192 elements of queries have the same key head, at most 191"):
        plain.forward(q, k, v, torch.ones(4))


def test_a_plan_counts_what_long_rows_copy() -> None:
    """Tokens of 8 bytes of q and 16 of q, k and v: both are copied from some length on."""
    model = FAMILIES["llama"]()
    found = templates.template(model.model.layers[0])
    q, qkv = found.attention.o.inputs, sum(found.attention.first.rows)
    most = attention.long_tokens(q, qkv)
    assert most == min((1 << 31) // q, (9 << 28) // qkv) and found.sizes(2).copied == (2 * (q + qkv), most)
    layer = shapes_of(model)("fp32").windows[1]
    work = [cost_of(layer, MACHINES["h200-128g"], n, 64, True).work["saved"] for n in (most, most + 1)]
    each = work[0] / most + 4 * (q + qkv)
    assert layer.itemsize == 4 and work[1] == pytest.approx((most + 1) * each, rel=1e-9)
