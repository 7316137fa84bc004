"""glu, glu_backward, column_sum: against fp64 within stated bounds, in every layout, on every device.

Bounds. `u` is half a unit of the type: what one rounding costs, relatively. An activation is x * s(v) in fp32;
a relative error of v's exponential is 8 units of 2^-24 (special function units, a division) and 4 more for each 1 of
|v| (the argument's own rounding; its product with log2(e)): `F = 2^-24 * (8 + 4|v|)`. For GELU, erfc's relative slope
makes that v = x^2.
    h      (2u + F) |h|                                     two roundings: a to the type, and the product
    dup    (u + F) |dup|
    dgate  u |dgate| + F |dh u(up)| (|term| + |term|)       the two terms of a'(x) may cancel, their errors do not
besides what underflow hides: exponentials below 2^-126 may be 0.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import op_cases
import pytest
import reference_ops as reference
import torch
from op_cases import TYPES, each_device, each_type, threads_change_no_bit
from torch import Tensor
from torch.nn import functional as F

from megatrain_torch import ops

ACTS = {"silu": ops.SILU, "gelu_tanh": ops.GELU_TANH, "gelu": ops.GELU, "clamped": ops.CLAMPED}
SHAPES = [(1, 64), (5, 8), (3, 7), (33, 129), (2, 2048), (300, 24), (1, 1), (0, 16), (4, 0)]

pytestmark = each_device
each_act = pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())


numbers = functools.partial(op_cases.numbers, size=3.0)


def together(device: str, dtype: torch.dtype, rows: int, n: int) -> tuple[Tensor, Tensor]:
    """gate and up as halves of one matrix, as a fused projection leaves them."""
    both = numbers(device, dtype, rows, 2 * n)
    return both[:, :n], both[:, n:]


def apart(device: str, dtype: torch.dtype, rows: int, n: int) -> tuple[Tensor, Tensor]:
    return numbers(device, dtype, rows, n), numbers(device, dtype, rows, n, seed=1)


def crooked(device: str, dtype: torch.dtype, rows: int, n: int) -> tuple[Tensor, Tensor]:
    """Rows that begin nowhere in particular: no loads of 16 bytes."""
    gate, up = numbers(device, dtype, rows, n + 3), numbers(device, dtype, rows, n + 5)
    return gate[:, 1:n + 1], up[:, 2:n + 2]


LAYOUTS = {"together": together, "apart": apart, "crooked": crooked}


def relative(gate: Tensor, act: int) -> Tensor:
    """F."""
    x = gate.double()
    v = x * x if act == reference.GELU else reference.logit_of(x, act)[0]
    return 2**-24 * (8 + 4 * v.abs())


def hidden_below(dtype: torch.dtype, *factors: Tensor) -> Tensor:
    """What underflow costs: an exponential of 2^-126 or a smallest number, times what multiplies it."""
    info = torch.finfo(dtype)
    return torch.stack([f.double().abs() + 1 for f in factors]).prod(0) * (2**-126 + info.smallest_normal * info.eps)


def check_forward(h: Tensor, gate: Tensor, up: Tensor, act: int) -> None:
    exact = reference.glu(gate.double(), up.double(), act)
    bound = (2 * TYPES[h.dtype] + relative(gate, act)) * exact.abs() + hidden_below(h.dtype, gate, up)
    assert h.shape == gate.shape and h.is_contiguous()
    assert ((h.double() - exact).abs() <= bound).all()


def check_backward(dgate: Tensor, dup: Tensor, dh: Tensor, gate: Tensor, up: Tensor, act: int) -> None:
    u, d, x = TYPES[dgate.dtype], dh.double(), gate.double()
    exact_gate, exact_up = reference.glu_backward(d, x, up.double(), act)
    terms = sum(t.abs() for t in reference.slope_terms(x, act))
    hidden = hidden_below(dgate.dtype, dh, gate, up)
    size = relative(gate, act) * (d * reference.factor(up.double(), act)).abs() * terms
    assert ((dgate.double() - exact_gate).abs() <= u * exact_gate.abs() + size + hidden).all()
    assert ((dup.double() - exact_up).abs() <= (u + relative(gate, act)) * exact_up.abs() + hidden).all()


# ---- the formulas ----

@each_act
def test_the_references_are_torchs_own_activations(device: str, act: int) -> None:
    x, up = (torch.linspace(-12, 12, 4001, device=device, dtype=torch.float64) for _ in range(2))
    gate, clamped = x.clamp(max=7), up.clamp(-7, 7)
    wanted = {ops.SILU: F.silu(x) * up, ops.GELU_TANH: F.gelu(x, approximate="tanh") * up, ops.GELU: F.gelu(x) * up,
              ops.CLAMPED: (clamped + 1) * (gate * torch.sigmoid(gate * 1.702))}
    assert torch.allclose(reference.glu(x, up, act), wanted[act], rtol=1e-10, atol=1e-14)


# ---- the kernels ----

@each_act
@each_type
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward_are_those_of_fp64(device: str, dtype: torch.dtype, act: int, layout: str,
                                                shape: tuple[int, int]) -> None:
    gate, up = LAYOUTS[layout](device, dtype, *shape)
    dh = numbers(device, dtype, *shape, seed=2)
    check_forward(ops.glu(gate, up, act), gate, up, act)
    dgate, dup, h = torch.empty_like(dh), torch.empty_like(dh), torch.empty_like(dh)
    ops.glu_backward(dh, gate, up, act, dgate=dgate, dup=dup, h=h)
    check_backward(dgate, dup, dh, gate, up, act)
    assert torch.equal(h, ops.glu(gate, up, act))


@each_act
@each_type
def test_far_and_near_gates(device: str, dtype: torch.dtype, act: int) -> None:
    """Where exponentials over- or underflow, where GELU's tail cancels, and around zero."""
    near = torch.logspace(-30, 0, 200)
    gate = torch.cat([torch.linspace(-120, 120, 4001), near, -near, torch.tensor([0.0, -0.0, 7.0])])[None]
    if dtype != torch.float16:
        gate[:, :4] = torch.tensor([1e20, -1e20, 1e8, -1e8])    # the square of the first overflows
    gate = gate.to(device, dtype)
    up, dh = numbers(device, dtype, *gate.shape, seed=1), numbers(device, dtype, *gate.shape, seed=2)
    check_forward(ops.glu(gate, up, act), gate, up, act)
    dgate, dup = torch.empty_like(dh), torch.empty_like(dh)
    ops.glu_backward(dh, gate, up, act, dgate=dgate, dup=dup)
    check_backward(dgate, dup, dh, gate, up, act)


@each_act
@each_type
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_in_place_has_the_same_bits(device: str, dtype: torch.dtype, act: int, layout: str) -> None:
    for rows, n in ((9, 136), (70, 40)):
        gate, up = LAYOUTS[layout](device, dtype, rows, n)
        dh = numbers(device, dtype, rows, n, seed=2)
        dgate, dup, h = torch.empty_like(dh), torch.empty_like(dh), torch.empty_like(dh)
        ops.glu_backward(dh, gate, up, act, dgate=dgate, dup=dup, h=h)
        ops.glu_backward(dh, gate, up, act, dgate=gate, dup=up, h=dh)
        assert torch.equal(gate, dgate) and torch.equal(up, dup) and torch.equal(dh, h)


def test_only_the_views_are_written(device: str) -> None:
    rows, n = 6, 24
    both = numbers(device, torch.bfloat16, rows, 3 * n)
    before = both.clone()
    dh = numbers(device, torch.bfloat16, rows, n)
    ops.glu_backward(dh, both[:, :n], both[:, n:2 * n], dgate=both[:, :n], dup=both[:, n:2 * n])
    assert torch.equal(both[:, 2 * n:], before[:, 2 * n:])
    assert not torch.equal(both[:, :n], before[:, :n])


@each_act
@pytest.mark.parametrize("where", [0, 1])
def test_nan_stays_nan(device: str, act: int, where: int) -> None:
    both = [torch.ones(1, 8, device=device) for _ in range(2)]
    both[where][0, 3] = torch.nan
    h = ops.glu(*both, act)
    assert h[0, 3].isnan() and h.isnan().sum() == 1


def test_a_clamp_passes_gradients_up_to_its_border(device: str) -> None:
    gate = torch.tensor([[6.9, 7.0, 7.1, 1.0, 1.0, 1.0]], device=device)
    up = torch.tensor([[1.0, 1.0, 1.0, 7.0, 7.1, -7.1]], device=device)
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    ops.glu_backward(torch.ones_like(gate), gate, up, ops.CLAMPED, dgate=dgate, dup=dup)
    assert (dgate != 0).tolist() == [[True, True, False, True, True, True]]
    assert (dup != 0).tolist() == [[True, True, True, True, False, False]]


def test_many_rows_and_wide_ones(device: str) -> None:
    """More rows than a grid is high, and rows of 2I = 32k numbers; every row is done."""
    for shape in ((140_000, 8), (3, 16384)):
        gate, up = together(device, torch.bfloat16, *shape)
        check_forward(ops.glu(gate, up), gate, up, ops.SILU)


# ---- the sum over tokens ----

@each_type
@pytest.mark.parametrize("shape", [(1, 8), (7, 5), (256, 64), (257, 33), (3000, 130), (20_000, 3), (0, 9), (5, 0)], ids=str)
@pytest.mark.parametrize("out", [None, *TYPES], ids=str)
def test_column_sums_have_the_stated_order_to_the_bit(device: str, dtype: torch.dtype, shape: tuple[int, int],
                                                      out: torch.dtype | None) -> None:
    x = numbers(device, dtype, *shape)
    wanted = reference.column_sum(x)
    assert torch.equal(ops.column_sum(x, out), wanted.to(out or dtype))
    # Each addition is off by at most 2^-24 of a partial sum, and none is followed by more than these.
    depth = 32 + 3 + shape[0] // 2048 + 1 + 3
    assert ((wanted.double() - x.double().sum(0)).abs() <= depth * 2**-24 * x.double().abs().sum(0)).all()


@each_type
@pytest.mark.parametrize("first", [0, 1, 16])
def test_column_sums_of_a_slice(device: str, dtype: torch.dtype, first: int) -> None:
    part = numbers(device, dtype, 600, 96)[:, first:first + 64]
    assert torch.equal(ops.column_sum(part), ops.column_sum(part.contiguous()))


def test_column_sums_do_not_depend_on_threads(device: str) -> None:
    x = numbers(device, torch.float32, 4000, 200)
    threads_change_no_bit(lambda: [ops.column_sum(x)])


def test_large_glu_does_not_depend_on_threads(device: str) -> None:
    gate, up = together(device, torch.bfloat16, 400, 1000)
    threads_change_no_bit(lambda: [ops.glu(gate, up)])


# ---- as torch ops ----

def test_opcheck(device: str) -> None:
    gate, up = together(device, torch.float32, 4, 16)
    dh, x = torch.randn(4, 16, device=device), torch.randn(5, 6, device=device)
    new = torch.empty_like(dh), torch.empty_like(dh), torch.empty_like(dh)
    torch.library.opcheck(torch.ops.megatrain.glu, (gate, up, 0, new[0]))
    torch.library.opcheck(torch.ops.megatrain.glu_backward, (dh, gate, up, 0, *new))
    torch.library.opcheck(torch.ops.megatrain.glu_backward, (dh, gate, up, 0, *new[:2], None))
    torch.library.opcheck(torch.ops.megatrain.column_sum, (x, torch.empty(6, device=device)))


def backward(dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    ops.glu_backward(dh, gate, up, dgate=dgate, dup=dup)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "type": (lambda x: ops.glu(x.double(), x.double()), "glu: gate must be float32, bfloat16 or float16"),
    "types": (lambda x: ops.glu(x, x.bfloat16()), "glu: up is BF16, not F32"),
    "shapes": (lambda x: ops.glu(x, x[:2]), r"glu: up is \[2, 12\], not \[4, 12\]"),
    "dimensions": (lambda x: ops.glu(x[0], x[0]), "glu: gate has 1 dimensions, not 2"),
    "columns": (lambda x: ops.glu(x[:, ::2], x[:, 1::2]), "gate has a stride of 2 in its last dimension"),
    "act": (lambda x: ops.glu(x, x, 4), "glu: act is 4; 0 to 3 are known"),
    "dh": (lambda x: backward(x[:, :6], x[:, :6], x[:, :6], x[:, :6], x[:, :6]), "argument 0 is not contiguous"),
    "overlap": (lambda x: backward(x, x, x, x[:1].expand(4, 12), x), "rows of dgate are 0 elements apart and 12 long"),
    "shifted": (lambda x: backward(x.clone(), x[:, :6], x[:, 6:], x[:, :6], x.view(8, 6)[:4]), r"dh is \[4, 12\]"),
    "in place": (lambda x: backward(x[:, :6].clone(), x[:, :6], x[:, 6:], x.view(8, 6)[:4], x[:, 6:]),
                 "dgate begins where an input does, but its rows are 6 elements apart, not 12"),
    "sum's type": (lambda x: ops.column_sum(x.int()), "column_sum: x must be float32"),
    "sum's shape": (lambda x: torch.ops.megatrain.column_sum(x, x[0, :5]), r"out must be \[12\]"),
    "sum's columns": (lambda x: ops.column_sum(x.t()), "x has a stride of 12 in its last dimension"),
}


test_what_does_not_fit_is_refused = op_cases.refused(REFUSED, (4, 12))
