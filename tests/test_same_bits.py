"""The same run gives the same bits: what torch.use_deterministic_algorithms asks for is obeyed.

On the CPU device, with cuDNN's and flash's kernels put into words; tests/gpu/test_same_bits_on_gpu.py has the real ones.
"""
from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fusing
import pytest
import test_rows
import torch
import zoo
from test_ops_gemm import compiles, nvidia_headers
from test_rows import SCALE, all_of, cudnn, heads  # noqa: F401
from torch import Tensor

import megatrain_torch as mt
from megatrain_torch import ops
from megatrain_torch.checkpoint import manifest, parts
from megatrain_torch.fused.templates import attention
from megatrain_torch.fused.templates.attention import Attention
from megatrain_torch.fused.templates.decoder import GatedMLP
from megatrain_torch.model.stream import runtime_of


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


# ---- cuDNN's own other form ----

class Spelled:
    """ops.attention_backward in words, and what it was called with."""

    def __init__(self) -> None:
        self.heads: list[int] = []

    def __call__(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
                 causal: bool, scale: float, *to: Tensor) -> None:
        self.heads.append(q.shape[0] * q.shape[1])
        each = [t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)]
        logits = q @ each[0].transpose(2, 3) * scale + (0 if bias is None else bias)
        unseen = torch.ones(logits.shape[2:]).tril().logical_not() & torch.tensor(causal)
        p = (logits - lse).masked_fill(unseen, -torch.inf).exp()
        ds = scale * p * (dout @ each[1].transpose(2, 3) - (dout * out).sum(3, keepdim=True))
        found = (ds @ each[0], ds.transpose(2, 3) @ q, p.transpose(2, 3) @ dout)
        for t, d in zip(to, found):
            t.copy_(d.unflatten(1, (t.shape[1], -1)).sum(2))


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch) -> Spelled:
    one = Spelled()
    for name, value in {"_known": lambda q: True, "ORDERLESS": 4, "_refused": set()}.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(ops, "attention_backward", one)
    return one


@pytest.mark.parametrize("work, calls", [(1 << 30, [24]), (16 << 13, [16, 8]), (8 << 13, [8] * 3), (2 << 13, [2] * 12)])
@pytest.mark.parametrize("biased", [None, (1, 1), (3, 1), (1, 8), (3, 8)])
def test_the_kernel_with_one_order_is_given_what_its_memory_holds(
        work: int, calls: list[int], biased: tuple[int, int] | None, spelled: Spelled, monkeypatch: pytest.MonkeyPatch
        ) -> None:
    g = torch.Generator().manual_seed(1)
    monkeypatch.setattr(attention, "WORK", work)
    monkeypatch.setattr(attention, "_padded", lambda n: 64)
    q, k, v, dout = (t.transpose(1, 2).requires_grad_() for t in heads(3, 9))
    bias = None if biased is None else torch.randn(*biased, 9, 9, dtype=torch.float64, generator=g)
    logits = test_rows.parts(q, k, bias is None) + (0 if bias is None else bias)
    out = logits.softmax(3) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    right = torch.autograd.grad(out, (q, k, v), dout)
    lse = logits.logsumexp(3)
    with torch.no_grad():
        monkeypatch.setattr(Tensor, "numel", lambda t: 0)
        found = attention.repeating_grads(dout, q, k, v, out, lse, bias, bias is None, SCALE, True)
        monkeypatch.undo()
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, right))
    assert spelled.heads == calls


def shapes(rows: int, queries: int, hq: int, hk: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(rows, h, queries, 128, device="meta") for h in (hq, hk))


@pytest.mark.parametrize("rows, seq, hq, hk, unasked, asked", [
    (32, 1024, 28, 4, (16, 4), (16, 4)), (16, 2048, 28, 4, (4, 4), (4, 4)), (16, 4096, 28, 4, None, (2, 4)), (1, 128, 28, 4, None, (1, 4)),
    (8, 8192, 28, 4, None, (1, 2)), (2, 4096, 40, 8, None, (1, 4)), (1, 16384, 28, 4, None, None),
    (1, 8192, 8, 8, None, (1, 8))])
def test_it_is_for_short_rows_unless_it_is_asked_for(rows: int, seq: int, hq: int, hk: int, unasked: Any, asked: Any) -> None:
    q, k = shapes(rows, seq, hq, hk)
    assert (attention._at_once(q, k, False), attention._at_once(q, k, True)) == (unasked, asked)


def test_what_it_refuses_is_not_tried_again(spelled: Spelled, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refused(*_: Any) -> None:
        tried.append(1)
        raise RuntimeError("attention: cuDNN, a part of the graph: CUDNN_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(ops, "attention_backward", refused)
    q, k, v, dout = (t.transpose(1, 2) for t in heads(3, 9))
    args = (dout, q, k, v, dout, torch.zeros(3, 8, 9, dtype=torch.float64), None, True, SCALE, False)
    assert attention.repeating_grads(*args) is attention.repeating_grads(*args) is None and tried == [1]

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    attention._refused.clear()
    monkeypatch.setattr(ops, "attention_backward", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        attention.repeating_grads(*args)


def test_short_rows_go_by_it_unasked(spelled: Spelled, cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:    # noqa: F811
    right = all_of(Attention(SCALE, True), None, 2, 10)
    assert spelled.heads and len(right) == 4
    monkeypatch.setattr(attention, "_backward", never)
    assert all(torch.equal(a, b) for a, b in zip(right, all_of(Attention(SCALE, True), None, 2, 10)))


def test_there_is_none_on_the_cpu() -> None:
    q, k, v, dout = (t.transpose(1, 2) for t in heads(3, 9))
    assert attention.repeating_grads(dout, q, k, v, dout, torch.zeros(3, 8, 9), None, True, SCALE, True) is None
    with pytest.raises(RuntimeError, match="on CUDA alone"):
        ops.attention_backward(dout, q, k, v, dout, torch.zeros(3, 8, 9, 1), None, True, SCALE, q, k, v)


def test_every_number_and_prototype_of_cudnn_is_nvidias() -> None:
    """tests/torch/cudnn_check.cc: static_asserts against the header, where there is one."""
    compiles("cudnn_check.cc", "cudnn.h", *nvidia_headers())


# ---- runs that go on ----

class Pair:
    """A fused model, its optimizer, and a step."""

    def __init__(self, **plan: Any) -> None:
        torch.manual_seed(3)
        self.model = mt.stream(fusing.lm("llama")(), "cpu", compute="fused", plan=plan or None)
        self.opt = mt.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> str:
        loss = zoo.update(self.model(**fusing.padded(number)).loss, self.opt)
        return f"{float(loss).hex()} {self.opt.grad_norm.hex()}"

    @property
    def kept(self) -> dict[str, str]:
        return runtime_of(self.model).keeps.fused()


@pytest.mark.parametrize("change, said", [
    (lambda note: note["versions"].update(torch="2.0"), "torch 2.0 there and "),
    (lambda note: note["versions"].update(threads="77"), "threads 77 there and "),
    (lambda note: note.update(compute="eager"), "compute eager there and fused here"),
    (lambda note: note.update(repeating=True), "use_deterministic_algorithms True there and False here"),
    (lambda note: note["kept"].update(dict.fromkeys(note["kept"], "replay+host")), "layers keep other activations"),
    (lambda note: note.update(tokens=8, kept=dict.fromkeys(note["kept"], "replay")), ""),    # a tile: nothing is summed
    (lambda note: note.clear(), ""),
    (lambda note: note.update(kept={"a": 3}), ""),
    (lambda note: note.update(memory="much"), ""),
    (None, ""),                                                        # an older one has none
])
def test_what_a_run_does_otherwise_is_told(change: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedMLP, "tile", lambda self, item: 8)
    first = Pair(activations="saved")
    first.step(0)
    mt.save(first.model, first.opt, tmp_path / "c")
    body = manifest.read(tmp_path / "c")
    change(body["likeness"]) if change else body.pop("likeness")
    (tmp_path / "c" / manifest.NAME).write_bytes(manifest.dump(body))
    again = Pair(activations="saved")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mt.load(again.model, again.opt, tmp_path / "c")
    words = " ".join(str(w.message) for w in told)
    assert said in words if said else not words
    if said:
        assert words.startswith(f"{tmp_path / 'c'}: training goes on, with other bits")


def test_a_checkpoint_says_what_its_bits_are_of(tmp_path: Path) -> None:
    pair = Pair(activations={"model.layers.0": "replay"})
    pair.step(0)
    note = json.loads(json.dumps(parts.likeness(runtime_of(pair.model))))
    assert note["kept"]["model.layers.0"] == "replay" and note["kept"]["model.layers.1"] == "saved" and not note["chosen"]
    assert note["versions"]["torch"] == torch.__version__ and note["tokens"] > 0 and note["memory"] == [0, 0]
