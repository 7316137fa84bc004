"""sum_rows, expert_glu, expert_glu_backward: against fp64 and against glu to the bit, on every device.

Without biases and weights, gates are glu's own formulas in another layout: the same bits. Bounds otherwise, with `u`
half a unit of the type:
    sums of rows   u |out| + (k + 2) 2^-24 * the sum of |terms|      k products and sums in fp32, a factor, a base
    dweights       (I + 2) 2^-24 * the sum of |dact * h|             whatever the order
    biases         what adding them beforehand in fp64 and glu's own bounds give: see test_ops_glu.py
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_cases
import pytest
import reference_ops as reference
import torch
from op_cases import TYPES, each_device, each_type, threads_change_no_bit
from test_ops_glu import ACTS, check_backward, check_forward, numbers
from torch import Tensor

from megatrain_torch import ops

pytestmark = each_device
each_act = pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
each_layout = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
SHAPES = [(1, 64), (5, 8), (3, 7), (33, 129), (2, 2048), (300, 24), (1, 1), (0, 16), (4, 0)]


# ---- sums of rows ----

def exact_sums(x: Tensor, place: Tensor, tokens: int, weights: Tensor | None, base: Tensor | None, factor: float
               ) -> tuple[Tensor, Tensor]:
    """The sums in fp64, and the sums of their terms' sizes."""
    terms = x.double()[place] * (1 if weights is None else weights.double().unsqueeze(1)) * factor
    terms = terms.view(tokens, -1, x.shape[1])
    b = torch.zeros(1, device=x.device) if base is None else base.double()
    return terms.sum(1) + b, terms.abs().sum(1) + b.abs()


@each_type
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("tokens, n", [(1, 8), (6, 64), (7, 13), (40, 1040), (3, 5000)])
def test_sums_of_rows_are_those_of_fp64(device: str, dtype: torch.dtype, tokens: int, n: int, k: int, weighted: bool,
                                        with_base: bool) -> None:
    g = torch.Generator().manual_seed(tokens * k)
    x, base = numbers(device, dtype, tokens * k, n), numbers(device, dtype, tokens, n, seed=1) if with_base else None
    place = torch.randperm(tokens * k, generator=g).to(device)
    weights = torch.rand(tokens * k, generator=g).to(device) if weighted else None
    out = ops.sum_rows(x, place, tokens, weights, base, 0.7)
    exact, size = exact_sums(x, place, tokens, weights, base, 0.7)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= TYPES[dtype] * exact.abs() + (k + 2) * 2**-24 * size + least).all()
    if device == "cuda":
        parts = [None if t is None else t.cpu() for t in (weights, base)]
        assert torch.equal(out.cpu(), ops.sum_rows(x.cpu(), place.cpu(), tokens, *parts, 0.7))


@each_type
def test_one_row_each_is_a_gather(device: str, dtype: torch.dtype) -> None:
    x = numbers(device, dtype, 9, 40)
    place = torch.tensor([3, 3, 0, 8, 1], device=device)
    assert torch.equal(ops.sum_rows(x, place, 5), x[place])


def test_out_of_no_tokens_and_of_no_columns(device: str) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert ops.sum_rows(numbers(device, torch.float32, 0, 8), none, 0).shape == (0, 8)
    assert ops.sum_rows(numbers(device, torch.float32, 4, 0), torch.zeros(4, dtype=torch.int64, device=device), 2
                        ).shape == (2, 0)


def test_more_tokens_than_a_grid_is_high(device: str) -> None:
    x = numbers(device, torch.bfloat16, 140_000, 8)
    place = torch.arange(140_000, device=device).flip(0)
    assert torch.equal(ops.sum_rows(x, place, 70_000), (x[place[0::2]].float() + x[place[1::2]].float()).bfloat16())


# ---- gates ----

def laid(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((gate, up), -1).flatten(1) if interleaved else torch.cat((gate, up), 1)


@each_act
@each_type
@each_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_without_biases_and_weights_are_glu_to_the_bit(device: str, dtype: torch.dtype, act: int,
                                                             interleaved: bool, shape: tuple[int, int]) -> None:
    gate, up, dact = (numbers(device, dtype, *shape, seed=s) for s in range(3))
    gu = laid(gate, up, interleaved)
    assert torch.equal(ops.expert_glu(gu, act, interleaved), ops.glu(gate, up, act))
    wanted = [torch.empty_like(gate) for _ in range(3)]
    ops.glu_backward(dact, gate, up, act, dgate=wanted[0], dup=wanted[1], h=wanted[2])
    assert ops.expert_glu_backward(dact, gu, act, interleaved) is None
    assert torch.equal(gu, laid(wanted[0], wanted[1], interleaved)) and torch.equal(dact, wanted[2])


@each_act
@each_type
@each_layout
@pytest.mark.parametrize("shape", [(12, 64), (7, 13), (40, 1040)], ids=str)
def test_weights_scale_gradients_and_get_their_own(device: str, dtype: torch.dtype, act: int, interleaved: bool,
                                                   shape: tuple[int, int]) -> None:
    gate, up, dact = (numbers(device, dtype, *shape, seed=s) for s in range(3))
    g = torch.Generator().manual_seed(0)
    weights, order = torch.rand(shape[0], generator=g).to(device), torch.randperm(shape[0], generator=g).to(device)
    gu, h = laid(gate, up, interleaved), ops.glu(gate, up, act)
    product, work = dact.double() * h.double(), dact.clone()
    dweights = ops.expert_glu_backward(work, gu, act, interleaved, weights=weights, order=order)
    assert ((dweights[order].double() - product.sum(1)).abs() <= (shape[1] + 2) * 2**-24 * product.abs().sum(1)).all()
    by_row = weights[order].unsqueeze(1)
    assert torch.equal(work, (by_row * h.float()).to(dtype))
    dgate, dup = (gu[:, 0::2], gu[:, 1::2]) if interleaved else gu.chunk(2, 1)
    check_backward(dgate, dup, dact.double() * by_row.double(), gate, up, act)


@each_act
@each_type
@each_layout
def test_biases_are_those_of_each_rows_expert(device: str, dtype: torch.dtype, act: int, interleaved: bool) -> None:
    rows, n = 30, 40
    gate, up, dact = (numbers(device, dtype, rows, n, seed=s) for s in range(3))
    bias_g, bias_u = (numbers(device, dtype, 4, n, seed=s) for s in (3, 4))
    expert = torch.arange(rows, device=device, dtype=torch.int32) * 4 // rows
    gu, bias = laid(gate, up, interleaved), laid(bias_g, bias_u, interleaved)
    moved = [t.float() + b[expert.long()].float() for t, b in ((gate, bias_g), (up, bias_u))]     # as the op adds them
    check_forward(ops.expert_glu(gu, act, interleaved, bias, expert), *moved, act)
    ops.expert_glu_backward(dact2 := dact.clone(), gu, act, interleaved, bias, expert)
    dgate, dup = (gu[:, 0::2], gu[:, 1::2]) if interleaved else gu.chunk(2, 1)
    check_backward(dgate, dup, dact.double(), *moved, act)
    check_forward(dact2, *moved, act)


def test_the_weights_gradient_is_autograds(device: str) -> None:
    """The trick of experts.h: of a weighted sum of what experts give, without what they give."""
    rows, n, hidden = 6, 10, 8
    gate, up, down, dy = (numbers(device, torch.float64, *s, seed=i)
                          for i, s in enumerate([(rows, n), (rows, n), (n, hidden), (rows, hidden)]))
    weights = torch.rand(rows, 1, dtype=torch.float64).to(device).requires_grad_()
    wanted, = torch.autograd.grad(weights * (reference.glu(gate, up, ops.SILU) @ down), weights, dy)
    dact = (dy @ down.t()).float()
    got = ops.expert_glu_backward(dact, laid(gate, up, False).float(), weights=weights.detach().float().flatten())
    assert torch.allclose(got.double(), wanted.flatten(), rtol=1e-5, atol=1e-5)


@each_type
def test_the_same_bits_again_and_with_more_threads(device: str, dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        gu, dact = numbers(device, dtype, 300, 2 * 520), numbers(device, dtype, 300, 520, seed=1)
        place = torch.arange(300, device=device).flip(0)
        weights = torch.rand(300, generator=torch.Generator().manual_seed(0)).to(device)
        h = ops.expert_glu(gu)
        dweights = ops.expert_glu_backward(dact, gu, weights=weights, order=place)
        return [h, gu, dact, dweights, ops.sum_rows(h, place, 100, weights)]

    threads_change_no_bit(run)


# ---- as torch ops ----

def test_opcheck(device: str) -> None:
    gu, bias, dact = (torch.randn(s, device=device) for s in ((4, 16), (2, 16), (4, 8)))
    expert = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=device)
    order, weights = torch.tensor([2, 0, 3, 1], device=device), torch.rand(4, device=device)
    mt = torch.ops.megatrain
    torch.library.opcheck(mt.sum_rows, (gu, order, weights, None, 1.0, torch.empty(2, 16, device=device)))
    torch.library.opcheck(mt.expert_glu, (gu, bias, expert, 0, True, torch.empty_like(dact)))
    torch.library.opcheck(mt.expert_glu_backward, (dact, gu, bias, expert, 0, True, weights, order, torch.empty_like(gu),
                                                   torch.empty_like(dact), torch.empty_like(weights)))


def zeros(*shape: int, dtype: torch.dtype = torch.float32, like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=like.device)


I32, I64 = torch.int32, torch.int64
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "type": (lambda x: ops.sum_rows(x.double(), zeros(4, dtype=I64, like=x), 4), "sum_rows: x must be float32"),
    "places' type": (lambda x: ops.sum_rows(x, zeros(4, dtype=I32, like=x), 4), "sum_rows: place is I32, not I64"),
    "places": (lambda x: ops.sum_rows(x, zeros(5, dtype=I64, like=x), 4), "5 places for 4 rows of out"),
    "weights": (lambda x: ops.sum_rows(x, zeros(4, dtype=I64, like=x), 4, zeros(3, like=x)), r"weights must be \[4\]"),
    "weights' type": (lambda x: ops.sum_rows(x, zeros(4, dtype=I64, like=x), 4, zeros(4, dtype=I64, like=x)),
                      "weights is I64, not F32"),
    "base": (lambda x: ops.sum_rows(x, zeros(4, dtype=I64, like=x), 4, None, zeros(4, 6, like=x)),
             r"base is \[4, 6\], not \[4, 12\]"),
    "odd": (lambda x: ops.expert_glu(zeros(4, 11, like=x)), "gu has 11 columns, which are no pairs"),
    "act": (lambda x: ops.expert_glu(x, 4), "expert_glu: act is 4; 0 to 3 are known"),
    "bias alone": (lambda x: ops.expert_glu(x, bias=x), "bias and expert go together"),
    "bias": (lambda x: ops.expert_glu(x, bias=zeros(2, 6, like=x), expert=zeros(4, dtype=I32, like=x)),
             r"bias is \[2, 6\], not \[2, 12\]"),
    "experts' type": (lambda x: ops.expert_glu(x, bias=x, expert=zeros(4, dtype=I64, like=x)), "expert is I64, not I32"),
    "dact": (lambda x: ops.expert_glu_backward(zeros(4, 5, like=x), x), r"dact is \[4, 5\], not \[4, 6\]"),
    "order": (lambda x: ops.expert_glu_backward(zeros(4, 6, like=x), x, weights=zeros(4, like=x),
                                                order=zeros(3, dtype=I64, like=x)), r"order must be \[4\]"),
}
ON_THE_CPU: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "place": (lambda x: ops.sum_rows(x, zeros(4, dtype=I64, like=x) + 4, 4), r"place\[0\] is 4; there are 4 rows"),
    "order": (lambda x: ops.expert_glu_backward(zeros(4, 6, like=x), x, weights=zeros(4, like=x),
                                                order=zeros(4, dtype=I64, like=x) - 1), r"order\[0\] is -1"),
    "expert": (lambda x: ops.expert_glu(x, bias=x[:2].contiguous(), expert=zeros(4, dtype=I32, like=x) + 2),
               r"expert\[0\] is 2; bias has 2 rows"),
}


test_what_does_not_fit_is_refused = op_cases.refused(REFUSED, (4, 12))


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_numbers_out_of_range_are_refused_on_the_cpu(device: str, name: str) -> None:
    if device != "cpu":
        pytest.skip("the device's numbers are not looked at")
    call, says = ON_THE_CPU[name]
    with pytest.raises(RuntimeError, match=says):
        call(torch.zeros(4, 12))
