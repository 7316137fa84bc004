"""Several sequences in one row: as the model computes them with its mask, and without one."""
from __future__ import annotations

from typing import Any

import fusing
import parity
import pytest
import torch
import zoo
from torch import Tensor

import megatrain_torch as mt
from megatrain_torch import packed
from megatrain_torch.records import span_of
from megatrain_torch.templates import attention
from megatrain_torch.templates.attention import Attention
from megatrain_torch.wrap import runtime_of

pytestmark = pytest.mark.usefixtures("streaming")

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
    own = packed.Packed.mask
    monkeypatch.setattr(packed.Packed, "mask", lambda self, dtype: (made.append(sum(self.lengths)), own(self, dtype))[1])
    return made


@pytest.mark.parametrize("family, keep", [*((f, "saved") for f in FAMILIES), ("qwen3", "attention+host")])
def test_packed_sequences_train_as_plain_torch_with_its_mask(family: str, keep: str, masks: list[int]) -> None:
    run = fusing.fused(FAMILIES[family], row, keep)
    fusing.all_fused(run.codes)
    fusing.agree(fusing.plain(FAMILIES[family], row), run)
    assert len(masks) == len(run.codes), "real masks were made for the trials alone"


@pytest.mark.parametrize("rows", [2, 3])
def test_several_rows_with_the_same_positions_run_the_models_own_code(rows: int) -> None:
    """Kernels that go by lengths would take the first row alone."""
    def several(step: int) -> dict[str, Tensor]:
        ids = zoo.tokens(zoo.generator(step), rows=rows, length=sum(LENGTHS))
        positions = row(step)["position_ids"]
        return {**row(step), "input_ids": ids, "labels": ids.masked_fill(positions == 0, -100)}

    run = fusing.fused(FAMILIES["llama"], several)
    fusing.none_fused(run.codes, "packed in several rows")
    fusing.agree(fusing.plain(FAMILIES["llama"], several), run)


def test_each_sequence_is_as_if_it_were_alone() -> None:
    model = fusing.stream(FAMILIES["llama"](), "saved")
    batch = row(0)
    together = model(**batch).logits[0].detach()
    for at, n in zip((0, 7, 8, 20), LENGTHS):
        alone = model(input_ids=batch["input_ids"][:, at:at + n]).logits[0].detach()
        assert torch.allclose(together[at:at + n], alone, atol=1e-5)


def test_a_layer_that_runs_its_own_code_is_given_the_mask() -> None:
    def train(streamed: bool) -> list[Tensor]:
        parity.seed()
        model = FAMILIES["llama"]()
        model = fusing.stream(model, "saved") if streamed else model
        for layer in model.model.layers[:1]:             # hooks inside: no template
            layer.mlp.register_forward_hook(lambda *_: None)
        losses = []
        for step in range(2):
            loss = model(**row(step)).loss
            loss.backward()
            losses.append(loss.detach())
        return losses

    for a, b in zip(train(False), train(True)):
        assert torch.allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("change", [
    {"attention_mask": torch.ones(1, 24, dtype=torch.long)}, {"use_cache": True}, {"position_ids": torch.arange(24)[None]}])
def test_other_rows_keep_the_models_own_mask(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(packed.Packed, "stand_in", lambda self: seen.append(self))
    model = fusing.stream(FAMILIES["llama"](), "saved")
    model(**{**row(0), **change}).loss.backward()
    assert not seen
    sliding = fusing.stream(fusing.lm("mistral", sliding_window=6)(), "saved")
    sliding(**row(0)).loss.backward()
    with torch.no_grad():
        model(**row(0))
    assert not seen


def test_lengths_are_read_from_positions() -> None:
    assert packed.lengths_of(torch.tensor([[0, 1, 2, 0, 0, 1]])) == (3, 1, 2)
    assert packed.lengths_of(torch.tensor([[5, 6, 7]])) == (3,)
    assert packed.lengths_of(torch.zeros(2, 3, dtype=torch.long)) == () == packed.lengths_of(torch.zeros(1, 3))


def test_a_real_mask_is_block_diagonal_and_causal() -> None:
    p = packed.Packed.of((2, 1), torch.device("cpu"))
    assert p.mask(None)[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]
    assert p.mask(torch.float32)[0, 0, 2, 0] == torch.finfo(torch.float32).min and p.cu.tolist() == [0, 2, 3]


def test_attention_by_sequences_is_attention_by_mask() -> None:
    q, k, v, dout = (torch.randn(1, 24, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    p = packed.Packed.of(LENGTHS, torch.device("cpu"))
    found, wanted = Attention(0.3, True, packed=p), Attention(0.3, False, p.mask(None))
    (out, kept), (right, right_kept) = found.forward(q, k, v), wanted.forward(q, k, v)
    assert torch.allclose(out, right)
    for a, b in zip(found.backward(dout, q, k, v, out, kept)[:3], wanted.backward(dout, q, k, v, right, right_kept)[:3]):
        assert torch.allclose(a, b)


def cudnn_takes(monkeypatch: pytest.MonkeyPatch, most: int, span: int) -> list[tuple[int, int]]:
    """As on CUDA where q has more elements than cuDNN's kernels are given: (elements of q, its span) of each call."""
    seen, attend = [], Attention._torch
    monkeypatch.setattr(attention, "CUDNN_MOST", most)
    monkeypatch.setattr(attention, "CUDNN_SPAN", span)
    monkeypatch.setattr(Attention, "_far", lambda self, q, sinks: q.numel() > most or span_of(q) > span)

    def note(self: Attention, q: Tensor, *rest: Any) -> Tensor:
        seen.append((q.numel(), span_of(q)))
        return attend(self, q, *rest)

    monkeypatch.setattr(Attention, "_torch", note)
    return seen


@pytest.mark.parametrize("most, span, parts", [(1 << 20, 1 << 20, 1), (1 << 20, 24 * 64, 1), (24 * 64 - 1, 1 << 20, 2),
                                               (24 * 20, 1 << 20, 4), (24 * 20, 24 * 64, 4)])
def test_rows_that_are_too_long_for_one_kernel_go_some_heads_at_a_time(most: int, span: int, parts: int,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, dout = torch.randn(2, 12, 16, 8, dtype=torch.float64), torch.randn(2, 12, 8, 8, dtype=torch.float64)
    q, k, v = qkv.split((8, 4, 4), 2)
    plain = Attention(0.3, True)
    right, right_kept = plain.forward(q, k, v)
    grads = plain.backward(dout, q, k, v, right, right_kept)
    seen = cudnn_takes(monkeypatch, most, span)
    out, kept = plain.forward(q, k, v)
    assert torch.equal(out, right)
    assert all(torch.equal(a, b) for a, b in zip(plain.backward(dout, q, k, v, out, kept)[:3], grads))
    assert len(seen) == 2 * parts and all(n <= most and far <= span for n, far in seen)


def test_heads_that_are_too_long_one_by_one_go_by_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch as sequences."""
    q, k, v, dout = (torch.randn(2, 12, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    plain = Attention(0.3, True)
    (right, right_kept), seen = plain.forward(q, k, v), []
    cudnn_takes(monkeypatch, 2 * 12 * 2 * 8 - 1, 1 << 20)
    monkeypatch.setattr(Attention, "_packed_forward", lambda self, *a: seen.append(self.packed.lengths) or (right, None))
    monkeypatch.setattr(Attention, "_packed_backward", lambda self, *a: (a[1], a[2], a[3]))
    assert plain.forward(q, k, v)[0] is right and seen == [(12, 12)]
    assert plain.backward(dout, q, k, v, right, right_kept)[3] is None


def test_it_is_streamed_without_a_template_too() -> None:
    model = fusing.stream(FAMILIES["llama"](), "saved", compute="eager")
    parity.seed()
    right = fusing.plain(FAMILIES["llama"], row, steps=1)
    loss = model(**row(0)).loss
    assert runtime_of(model).windows and mt.explain(model)
    assert loss.shape == right.losses[0].shape
