"""linear_cross_entropy against fp64 autograd, F.cross_entropy, and itself in other chunks.

Tolerances follow from four numbers: `u`, half a unit of the type (logits and their gradients are rounded to it
once); `e = 2^-24` for each fp32 addition of a sum; `delta`, the most by which a logit can be off,
u*|logit| + H*e*sum|h||w|; `shift`, its mean under p, by which lse moves. A gradient of the logits, p - onehot, is
then off by (delta + shift + u + 16e) * (p + onehot), whatever cancels in it: 16e is what ops.cross_entropy_
claims. A soft cap's slope moves by as much again.
"""
from __future__ import annotations

import pytest
import reference_ops as reference
import torch
from op_cases import TYPES, each_device, each_type
from torch import Tensor
from torch.nn import functional as F

from megatrain_torch.fused import loss as loss_module
from megatrain_torch.fused.loss import FIRST_ROUNDED, linear_cross_entropy, rounded_in_place

E = 2**-24
OPTIONS = {
    "plain": {}, "sum": {"reduction": "sum"}, "cap": {"softcap": 5.0}, "smooth": {"label_smoothing": 0.1},
    "scale": {"logit_scale": 0.3},
    "all": {"softcap": 4.0, "label_smoothing": 0.2, "logit_scale": 1.7, "reduction": "sum"},
}

pytestmark = each_device


def problem(device: str, dtype: torch.dtype = torch.float32, tokens: int = 37, hidden: int = 24, vocab: int = 101
            ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels (some ignored), bias; small enough numbers for fp16's gradients."""
    g = torch.Generator().manual_seed(tokens + hidden + vocab)
    made = [torch.randn(*shape, generator=g).to(device, dtype) for shape in ((tokens, hidden), (vocab, hidden), (vocab,))]
    labels = torch.randint(0, vocab, (tokens,), generator=g)
    labels[::5] = -100
    return made[0], made[1] * 0.3, labels.to(device), made[2]


def truth(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *, reduction: str = "mean",
          logit_scale: float = 1.0, **options: float) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients in fp64, by autograd."""
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    b = None if bias is None else bias.detach().double().requires_grad_()
    rows, _ = reference.cross_entropy(logit_scale * F.linear(h, w, b), labels, **options)
    out = rows.sum() if reduction == "sum" else rows.sum() / (labels != -100).sum()
    out.backward()
    return out.detach(), [h.grad, w.grad, None if b is None else b.grad]


def bounds(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, u: float, *, reduction: str = "mean",
           logit_scale: float = 1.0, softcap: float = 0.0, **_: float) -> tuple[Tensor, list[Tensor]]:
    """What the head of this file says, for the loss and each gradient before it is rounded to its own type."""
    h, w = hidden.double(), weight.double()
    b = torch.zeros(w.shape[0], dtype=torch.float64, device=h.device) if bias is None else bias.double()
    x = logit_scale * F.linear(h, w, b)
    lse = torch.logsumexp(reference.softcapped(x, softcap), -1, keepdim=True)
    keep = (labels != -100).unsqueeze(-1)
    delta = u * x.abs() + h.shape[1] * E * logit_scale * F.linear(h.abs(), w.abs(), b.abs())
    p = torch.exp(reference.softcapped(x, softcap) - lse)
    shift = (p * delta).sum(-1, keepdim=True)               # of lse
    rows = shift + delta.amax(-1, keepdim=True) + 16 * E
    size = keep * (p + 1 / w.shape[0] + F.one_hot(labels.clamp_min(0), w.shape[0])) * logit_scale
    total = 1 if reduction == "sum" else keep.sum()
    off = ((delta + shift) * (2 if softcap > 0 else 1) + u + 16 * E) * size / total
    parts = [off + n * E * size / total for n in (w.shape[0], h.shape[0], h.shape[0])]
    return (rows * keep).sum() / total, [parts[0] @ w.abs(), parts[1].t() @ h.abs(), parts[2].sum(0)]


@pytest.mark.parametrize("name", OPTIONS)
@each_type
@pytest.mark.parametrize("chunk", [None, 8, 37, 1], ids=lambda c: f"chunk {c}")
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_loss_and_gradients_are_those_of_fp64(device: str, dtype: torch.dtype, chunk: int | None, name: str,
                                              with_bias: bool) -> None:
    hidden, weight, labels, bias = problem(device, dtype)
    bias = bias if with_bias else None
    u = TYPES[dtype]
    got, *grads = linear_cross_entropy(hidden, weight, labels, bias, chunk=chunk, **OPTIONS[name])
    wanted, wanted_grads = truth(hidden, weight, labels, bias, **OPTIONS[name])
    loss_bound, grad_bounds = bounds(hidden, weight, labels, bias, u, **OPTIONS[name])
    assert got.dtype == torch.float32 and got.shape == ()
    assert (got.double() - wanted).abs() <= loss_bound
    for grad, argument, exact, bound in zip(grads, (hidden, weight, bias), wanted_grads, grad_bounds):
        if argument is None:
            assert grad is None
            continue
        assert grad.dtype == argument.dtype and grad.shape == argument.shape
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # fp16's gradients are that small
        assert ((grad.double() - exact).abs() <= bound + u * exact.abs() + 64 * least).all()


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
def test_loss_and_gradients_are_those_of_torch(device: str, options: dict) -> None:
    """fp32: both sums are in fp32, in different orders: within twice what one may be off."""
    hidden, weight, labels, bias = problem(device)
    got, *grads = linear_cross_entropy(hidden, weight, labels, bias, chunk=10, **options)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    wanted = F.cross_entropy(F.linear(*leaves), labels, **options)
    wanted.backward()
    loss_bound, grad_bounds = bounds(hidden, weight, labels, bias, E, **options)
    assert (got - wanted).abs() <= 2 * loss_bound
    for grad, leaf, bound in zip(grads, leaves, grad_bounds):
        assert ((grad - leaf.grad).abs() <= 2 * bound).all()


def test_all_labels_ignored_give_nan_and_no_gradient_as_torch(device: str) -> None:
    hidden, weight, labels, bias = problem(device)
    got, *grads = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias, chunk=8)
    assert got.isnan() and all(not g.any() for g in grads)
    total, *_ = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), reduction="sum")
    assert total == 0


def test_another_ignore_index(device: str) -> None:
    hidden, weight, labels, _ = problem(device)
    other = torch.where(labels == -100, 7, labels)
    got = linear_cross_entropy(hidden, weight, other, ignore_index=7)
    assert (got[0] - F.cross_entropy(F.linear(hidden, weight), other, ignore_index=7)).abs() < 1e-5
    assert not got[1][other == 7].any()


def test_only_what_is_wanted_is_made(device: str) -> None:
    hidden, weight, labels, bias = problem(device)
    full = linear_cross_entropy(hidden, weight, labels, bias, chunk=16)
    for wanted in [(False, False, False), (True, False, False), (False, True, False), (True, False, True)]:
        found = linear_cross_entropy(hidden, weight, labels, bias, chunk=16, wanted=wanted)
        assert torch.equal(found[0], full[0])
        for grad, whole, want in zip(found[1:], full[1:], wanted):
            assert torch.equal(grad, whole) if want else grad is None


def test_one_chunk_needs_no_fp32_sum(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module.ops, "gemm_", None)
    hidden, weight, labels, _ = problem(device)
    assert linear_cross_entropy(hidden, weight, labels, chunk=37)[2].shape == weight.shape


def test_chunks_are_summed_in_fp32(device: str) -> None:
    """512 chunks of one token each: bf16 sums would stop growing at 256 times an addend."""
    hidden = torch.ones(512, 8, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(16, 8, dtype=torch.bfloat16, device=device)
    labels = torch.zeros(512, dtype=torch.int64, device=device)
    _, _, dweight, _ = linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk=1)
    assert (dweight[0] == -480).all() and (dweight[1:] == 32).all()


def test_no_tokens_at_all(device: str) -> None:
    _, weight, _, bias = problem(device)
    none = torch.zeros(0, 24, device=device), weight, torch.zeros(0, dtype=torch.int64, device=device), bias
    got, dhidden, dweight, dbias = linear_cross_entropy(*none)
    assert got.isnan() and dhidden.shape == (0, 24) and not dweight.any() and not dbias.any()
    assert linear_cross_entropy(*none, reduction="sum")[0] == 0


def test_strided_hidden_states_need_no_copy(device: str) -> None:
    hidden, weight, labels, _ = problem(device)
    wide = torch.randn(37, 60, device=device)
    wide[:, 8:32] = hidden
    for got, wanted in zip(linear_cross_entropy(wide[:, 8:32], weight, labels, chunk=16)[:3],
                           linear_cross_entropy(hidden, weight, labels, chunk=16)[:3]):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_default_chunks_hold_512_mib_of_logits(device: str) -> None:
    def tokens(vocab: int, dtype: torch.dtype) -> int:
        return loss_module.chunk_tokens(vocab, dtype.itemsize)
    assert tokens(152064, torch.bfloat16) == 1536      # 1765, in whole tiles
    assert tokens(262144, torch.bfloat16) == 1024
    assert tokens(262144, torch.float32) == 1024       # no fewer
    assert tokens(32000, torch.bfloat16) == 8192


@pytest.mark.parametrize("n", [0, 1, FIRST_ROUNDED - 1, FIRST_ROUNDED, 3 * FIRST_ROUNDED + 5, 5 * FIRST_ROUNDED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_rounded_in_their_own_memory(device: str, n: int, dtype: torch.dtype) -> None:
    sums = torch.randn(1, n, generator=torch.Generator().manual_seed(n)).to(device)
    wanted, where = sums.to(dtype, copy=True), sums.data_ptr()
    found = rounded_in_place(sums, dtype)
    assert torch.equal(found, wanted)
    assert found.data_ptr() == where and found.is_contiguous()
