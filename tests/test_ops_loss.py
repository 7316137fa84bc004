"""cross_entropy_ against fp64 within stated bounds, on every device.

`e = 2^-24`. With d = l - m, an exponential is off by (4 + 2|d|)e of itself in 16-bit types (special function units)
and less in fp32; a sum of V of them by D e more, D = 24 + V/256 additions in a row at the most on either device. So
    lse    ((4 + D) e + mean of 2|d| e under p) + e (|m| + |lse|)
    loss   that, times 1 + 2|z lse|, and e times what is added and taken away
    dx     (12 + D + 2|d| + 2 mean |d|) e (p + smoothing/V + onehot) scale, and half a unit for rounding
A cap's tanh and quotient are off by 8e of l: `delta = 8e|l|` moves d, lse and the picked logit.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_cases
import pytest
import reference_ops as reference
import torch
from op_cases import TYPES, each_device, each_type, threads_change_no_bit
from torch import Tensor
from torch.nn import functional as F

from megatrain_torch import ops

E = 2**-24
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "cap": {"softcap": 10.0}, "smooth": {"label_smoothing": 0.1}, "all smooth": {"label_smoothing": 1.0},
    "z": {"z_loss": 1e-2},
    "all": {"softcap": 30.0, "label_smoothing": 0.2, "z_loss": 1e-3},
}
SHAPES = [(1, 1), (3, 2), (5, 8), (4, 17), (7, 100), (2, 1000), (3, 4096), (2, 32_003), (0, 8)]

pytestmark = each_device
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def problem(device: str, dtype: torch.dtype, rows: int, n: int, size: float = 4.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows + n)
    logits = (torch.randn(rows, n, generator=g) * size).to(device, dtype)
    return logits, torch.randint(0, n, (rows,), generator=g).to(device)


def bounds(logits: Tensor, labels: Tensor, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0
           ) -> tuple[Tensor, Tensor, Tensor]:
    """What the head says, for loss [R], lse [R] and the gradient [R, V] of scale 1 before it is rounded."""
    x = reference.softcapped(logits.double(), softcap)
    lse = torch.logsumexp(x, -1, keepdim=True)
    m, p = x.amax(-1, keepdim=True), torch.exp(x - lse)
    d, depth = (x - m).abs(), 24 + x.shape[-1] / 256
    delta = 8 * E * x.abs() * (softcap > 0)
    picked = x.gather(-1, labels.unsqueeze(-1))
    shift = (p * (2 * d * E + delta)).sum(-1, keepdim=True) + (4 + depth) * E
    off_lse = shift + E * (m.abs() + lse.abs())
    terms = 4 * ((m - picked).abs() + (lse - m).abs() + label_smoothing * (picked.abs() + x.abs().mean(-1, keepdim=True)))
    off = (shift + E * (m.abs() + terms + depth * label_smoothing * x.abs().mean(-1, keepdim=True))
           + delta.amax(-1, keepdim=True))
    loss = off * (1 + 2 * z_loss * lse.abs()) + 4 * E * z_loss * lse.square()
    wanted = F.one_hot(labels, x.shape[-1])
    size = p * (1 + 2 * z_loss * lse).abs() + label_smoothing / x.shape[-1] + (1 - label_smoothing) * wanted
    grad = ((12 + depth + 2 * d) * E + 2 * (delta + shift) + 8 * E * z_loss * lse.abs()) * size
    return loss.squeeze(-1), off_lse.squeeze(-1), grad


def check(logits: Tensor, labels: Tensor, scale: float, options: dict[str, Any]) -> None:
    """Loss, lse and gradient of rows that are not ignored."""
    exact, exact_lse = reference.cross_entropy(logits.double(), labels, **options)
    gradient = scale * reference.cross_entropy_gradient(logits.double(), labels, **options)
    off_loss, off_lse, off_gradient = bounds(logits, labels, **options)
    alone, _ = ops.cross_entropy_(logits.clone(), labels, None, **options)
    got = logits.clone()
    loss, lse = ops.cross_entropy_(got, labels, torch.tensor(scale, device=logits.device), **options)
    assert loss.dtype == lse.dtype == torch.float32 and torch.equal(loss, alone)
    assert ((loss.double() - exact).abs() <= off_loss).all()
    assert ((lse.double() - exact_lse).abs() <= off_lse).all()
    info = torch.finfo(logits.dtype)
    least = info.smallest_normal * info.eps + 2**-126 * scale
    bound = scale * off_gradient + TYPES[logits.dtype] * gradient.abs() + least
    assert ((got.double() - gradient).abs() <= bound).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_the_reference_is_torchs(device: str, label_smoothing: float) -> None:
    logits, labels = problem(device, torch.float64, 9, 50)
    labels[2] = -100
    loss, _ = reference.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    theirs = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    assert torch.allclose(loss, theirs, rtol=1e-10, atol=1e-12)


@each_option
@each_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient_are_those_of_fp64(device: str, dtype: torch.dtype, shape: tuple[int, int],
                                             options: dict[str, Any]) -> None:
    logits, labels = problem(device, dtype, *shape)
    check(logits, labels, 1.0, options)
    check(logits, labels, 1 / 64, options)


@each_type
@pytest.mark.parametrize("n", [152_064, 262_144])
def test_whole_vocabularies(device: str, dtype: torch.dtype, n: int) -> None:
    """Rows longer than shared memory; 2^18 columns."""
    logits, labels = problem(device, dtype, 2, n, size=2.0)
    check(logits, labels, 1.0, {})


@each_type
@pytest.mark.parametrize("first", [0, 1, 3, 8])
def test_rows_that_begin_anywhere(device: str, dtype: torch.dtype, first: int) -> None:
    """Strided and crooked logits; what lies between the rows is left alone."""
    for n in (30, 1001):
        logits, labels = problem(device, dtype, 6, n)
        wide = torch.full((6, n + 16), 5.0, device=device, dtype=dtype)
        wide[:, first:first + n] = logits
        scale = torch.tensor(0.5, device=device)
        losses = [ops.cross_entropy_(x, labels, scale)[0] for x in (wide[:, first:first + n], logits)]
        off_loss, _, off_gradient = bounds(logits, labels)
        assert ((losses[0] - losses[1]).abs() <= 2 * off_loss).all()
        away = 2 * off_gradient + TYPES[dtype]
        assert ((wide[:, first:first + n].double() - logits.double()).abs() <= away).all()
        assert (wide[:, :first] == 5).all() and (wide[:, first + n:] == 5).all()


@each_type
def test_an_ignored_row_is_zero_and_not_read(device: str, dtype: torch.dtype) -> None:
    logits, labels = problem(device, dtype, 6, 301)
    whole = logits.clone()
    labels[1] = labels[4] = -100
    logits[1] = torch.nan
    loss, lse = ops.cross_entropy_(logits, labels, torch.tensor(1.0, device=device))
    assert not loss[[1, 4]].any() and not lse[[1, 4]].any() and not logits[[1, 4]].any()
    others = [0, 2, 3, 5]
    again, _ = ops.cross_entropy_(whole, torch.where(labels == -100, 0, labels), torch.tensor(1.0, device=device))
    assert torch.equal(loss[others], again[others]) and torch.equal(logits[others], whole[others])


def test_an_infinite_scale_leaves_ignored_rows_alone(device: str) -> None:
    """1 / count where no label counts."""
    logits, labels = problem(device, torch.float32, 3, 20)
    labels[:] = -100
    ops.cross_entropy_(logits, labels, torch.tensor(torch.inf, device=device))
    assert not logits.any()


def test_another_ignore_index(device: str) -> None:
    logits, labels = problem(device, torch.float32, 5, 20)
    labels[:] = torch.tensor([3, 7, 0, 7, 19])
    loss, _ = ops.cross_entropy_(logits, labels, None, ignore_index=7)
    assert (loss == 0).tolist() == [False, True, False, True, False]


@each_type
def test_without_a_scale_logits_are_left_alone(device: str, dtype: torch.dtype) -> None:
    logits, labels = problem(device, dtype, 4, 999)
    labels[2] = -100
    before = logits.clone()
    ops.cross_entropy_(logits, labels, None)
    assert torch.equal(logits, before)


@each_type
def test_large_logits_and_masked_ones(device: str, dtype: torch.dtype) -> None:
    """exp of the logits themselves would overflow; -inf is a token that cannot be."""
    logits, labels = problem(device, dtype, 4, 520, size=1.0)
    logits += torch.tensor([[3e4], [-3e4], [500.0], [0.0]], device=device, dtype=dtype)
    logits[:, ::3] = -torch.inf
    labels[:] = torch.tensor([1, 2, 4, 5])
    finite = torch.where(logits.isinf(), -6e4, logits.float()).to(dtype)
    scale = torch.tensor(1.0, device=device)
    loss, lse = ops.cross_entropy_(logits, labels, scale)
    again, lse_again = ops.cross_entropy_(finite, labels, scale)
    assert loss.isfinite().all() and torch.equal(loss[:1], again[:1]) and torch.equal(lse[2:], lse_again[2:])
    assert logits.isfinite().all() and not logits[:, ::3].any()


@each_type
def test_nan_and_infinity_show(device: str, dtype: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf):
        logits, labels = problem(device, dtype, 2, 64)
        logits[1, 5] = bad
        loss, _ = ops.cross_entropy_(logits, labels, torch.tensor(1.0, device=device))
        assert loss.isnan().tolist() == [False, True] and logits[1].isnan().any() and logits[0].isfinite().all()


@pytest.mark.parametrize("bad", [-1, 20])
@each_type
def test_a_label_outside_of_the_vocabulary(device: str, dtype: torch.dtype, bad: int) -> None:
    """Refused on the CPU before anything is written; on CUDA its row turns NaN: looking would make the host wait."""
    logits, labels = problem(device, dtype, 3, 20)
    labels[1], before = bad, logits.clone()
    scale = torch.tensor(1.0, device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=f"the label of row 1 is {bad}; it must be below 20"):
            ops.cross_entropy_(logits, labels, scale)
        assert torch.equal(logits, before)
    else:
        loss, _ = ops.cross_entropy_(logits, labels, scale)
        assert loss.isnan().tolist() == [False, True, False]
        assert logits[1].isnan().all() and logits[[0, 2]].isfinite().all()


def test_threads_and_repetitions_change_no_bit(device: str) -> None:
    logits, labels = problem(device, torch.bfloat16, 70, 8000)

    def run() -> list[Tensor]:
        into = logits.clone()
        return [ops.cross_entropy_(into, labels, torch.tensor(1.0, device=device))[0], into]

    threads_change_no_bit(run)


def test_opcheck(device: str) -> None:
    logits, labels = problem(device, torch.float32, 3, 20)
    for scale in (None, torch.tensor(1.0, device=device)):
        outs = torch.empty(3, device=device), torch.empty(3, device=device)
        torch.library.opcheck(torch.ops.megatrain.cross_entropy_, (logits, labels, scale, *outs, -100, 0.0, 0.1, 0.0))


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "type": (lambda x, y: ops.cross_entropy_(x.double(), y, None), "cross_entropy_: logits must be float32"),
    "dimensions": (lambda x, y: ops.cross_entropy_(x[0], y, None), "logits has 1 dimensions, not 2"),
    "columns": (lambda x, y: ops.cross_entropy_(x.t(), y, None), "logits has a stride of 6 in its last dimension"),
    "overlap": (lambda x, y: ops.cross_entropy_(x[:1].expand(4, 6), y, None), "rows of logits are 0 elements apart"),
    "labels' type": (lambda x, y: ops.cross_entropy_(x, y.int(), None), "labels is I32, not I64"),
    "labels": (lambda x, y: ops.cross_entropy_(x, y[:3], None), r"labels must be \[4\]"),
    "scale's type": (lambda x, y: ops.cross_entropy_(x, y, x[0, 0].double()), "scale is F64, not F32"),
    "scale": (lambda x, y: ops.cross_entropy_(x, y, x[0, :2]), "scale has 2 elements, not 1"),
    "cap": (lambda x, y: ops.cross_entropy_(x, y, None, softcap=-1.0), "softcap is -1"),
    "smoothing": (lambda x, y: ops.cross_entropy_(x, y, None, label_smoothing=1.5), "label_smoothing is 1.5"),
}


test_what_does_not_fit_is_refused = op_cases.refused(REFUSED, (4, 6), (4,))
