"""rms_norm, layer_norm and their backwards: against fp64 within stated bounds, in every layout, on every device.

Bounds. `u` is half a unit of the output's type: what one rounding costs, relatively. `F` = 2^-24 is that of fp32,
in which everything else is computed. A sum of n numbers in lanes costs a random walk of at most n/16 roundings,
of which the root counts: 16 F covers n up to 32768 and the dozen roundings around it.
    y        u |y| + 16 F (|y| + |bias| + |mean rstd w|)     and u |y| more where hat is rounded first
    dx       u |dx| + 16 F |terms|                           the terms may cancel, their errors do not
    dweight  u |dw| + 16 F sum |dy hat|                      the same for a sum over rows, blocks of it in order
mean cancels too: its error is 16 F mean|s|, which counts as much as rstd amplifies it.
"""
from __future__ import annotations

from collections.abc import Callable

import op_cases
import pytest
import reference_ops as reference
import torch
from op_cases import TYPES, each_device, each_type, numbers, shifted, turned, wide_apart
from torch import Tensor

from megatrain_torch import ops

F = 16 * 2**-24
EPS = 1e-5
STYLES = {"round_first": ops.ROUND_FIRST, "one_plus": ops.ONE_PLUS, "round_last": ops.ROUND_LAST}
# Rows of a quarter, half and whole warp; of a warp with 2 and 4 vectors a thread; of a block with 2 and 4; too long
# for shared memory; not made of 16-byte vectors. Rows that end in the middle of a block; one row; many.
SHAPES = [(1, 1), (3, 5), (37, 64), (5, 100), (200, 128), (33, 130), (9, 256), (17, 512), (10, 1024), (5, 1032),
          (7, 3584), (3, 8192), (2, 16384), (2, 32768), (1, 4097), (20000, 64)]

each_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def row_numbers(device: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Rows of sizes from 2^-6 to 2^6, so that one number cannot stand for another row's."""
    x = numbers("cpu", torch.float32, *shape, seed=seed)
    x *= 2.0 ** (torch.arange(x[..., 0].numel()) % 13 - 6).view(*shape[:-1], 1)
    return (x + 0.25).to(device, dtype)


def weights(device: str, dtype: torch.dtype, n: int, seed: int = 0) -> Tensor:
    return numbers(device, dtype, n, seed=seed + 7) * 0.5 + 1


def within(got: Tensor, exact: Tensor, terms: Tensor, roundings: int = 1) -> None:
    """got rounds `roundings` times to its type; fp32 errors are F of the terms. Underflow hides one more unit."""
    info = torch.finfo(got.dtype)
    bound = roundings * TYPES[got.dtype] * exact.abs() + F * terms.abs() + info.smallest_normal * info.eps
    error = (got.double() - exact).abs()
    assert got.shape == exact.shape
    assert (error <= bound).all(), f"{(error / bound).max().item():.2f} times the bound"


# ---- the formulas ----

def wide(*shape: int, seed: int = 0) -> Tensor:
    return numbers("cpu", torch.float64, *shape, seed=seed)


def test_the_references_are_torchs() -> None:
    s, w, b = wide(7, 24), wide(24, seed=1), wide(24, seed=2)
    torch.testing.assert_close(reference.layer_norm(s, w, b, EPS)[0],
                               torch.nn.functional.layer_norm(s, (24,), w, b, EPS), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reference.rms_norm(s, w, EPS)[0],
                               torch.nn.functional.rms_norm(s, (24,), w, EPS), rtol=1e-12, atol=1e-12)


# ---- RMS norm ----

def check_rms(x: Tensor, w: Tensor, style: int, add: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Forward against fp64; s to the bit."""
    y, s, rstd = ops.rms_norm(x, w, EPS, style, add)
    assert s is x if add is None else torch.equal(s, x + add) and s.is_contiguous()
    exact, exact_rstd = reference.rms_norm(s.double(), w.double(), EPS, style == ops.ONE_PLUS)
    within(rstd, exact_rstd, exact_rstd)
    within(y, exact, exact, 2 if style == ops.ROUND_FIRST else 1)
    assert y.is_contiguous()
    return y, s, rstd


def check_rms_back(dy: Tensor, s: Tensor, w: Tensor, rstd: Tensor, style: int, add: Tensor | None = None,
                   y: Tensor | None = None) -> None:
    """Backward against fp64; y to the bit."""
    dx, dw, again = ops.rms_norm_backward(dy, s, w, rstd, style, add, rebuild=y is not None)
    plus = float(style == ops.ONE_PLUS)
    exact, exact_dw = reference.rms_norm_backward(dy.double(), s.double(), w.double(), EPS, plus)
    r, g = rstd.double().unsqueeze(-1), dy.double() * (w.double() + plus)
    hat = s.double() * r
    terms = r * (g.abs() + hat.abs() * (g * hat).abs().mean(-1, keepdim=True))
    if add is not None:
        exact, terms = exact + add.double(), terms + add.double().abs()
    within(dx, exact, terms)
    within(dw, exact_dw, (dy.double() * hat).abs().flatten(0, -2).sum(0))
    assert again is None if y is None else torch.equal(again, y)


@each_device
@each_type
@each_style
@each_shape
def test_rms_norm(device: str, dtype: torch.dtype, style: int, shape: tuple[int, int]) -> None:
    x, dy = row_numbers(device, dtype, shape), numbers(device, dtype, *shape, seed=1)
    w = weights(device, dtype, shape[-1])
    y, s, rstd = check_rms(x, w, style)
    check_rms_back(dy, s, w, rstd, style, None, y if style == ops.ONE_PLUS else None)


@each_device
@each_type
@pytest.mark.parametrize("shape", [(5, 100), (200, 128), (17, 512), (10, 1024), (7, 3584), (3, 8192), (2, 32768)], ids=str)
def test_rms_norm_with_the_residual(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, add, dy, more = (row_numbers(device, dtype, shape, seed) for seed in range(4))
    w = weights(device, dtype, shape[-1])
    y, s, rstd = check_rms(x, w, ops.ROUND_FIRST, add)
    check_rms_back(dy, s, w, rstd, ops.ROUND_FIRST, more, y)


def in_a_row(x: Tensor) -> Tensor:
    """Heads inside [B, S, more heads, D]."""
    b, s, h, d = x.shape
    big = torch.full((b, s, h + 3, d), float("nan"), dtype=x.dtype, device=x.device)
    big[:, :, 1:h + 1] = x
    return big[:, :, 1:h + 1]


LAYOUTS = {f.__name__: f for f in (in_a_row, turned, shifted, wide_apart)}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_device
@each_type
@each_layout
@pytest.mark.parametrize("head", [64, 80, 256])
def test_norms_of_heads_inside_other_tensors(device: str, dtype: torch.dtype, layout: str, head: int) -> None:
    shape, put = (2, 9, 5, head), LAYOUTS[layout]
    x, dy = (put(row_numbers(device, dtype, shape, seed)) for seed in range(2))
    w, b = weights(device, dtype, head), numbers(device, dtype, head)
    y, s, rstd = check_rms(x, w, ops.ROUND_FIRST)
    check_rms_back(dy, s, w, rstd, ops.ROUND_FIRST, None, y)
    y, s, mean, rstd = check_layer(x, w, b)
    check_layer_back(dy, s, w, b, mean, rstd, None, y)


@each_device
@each_layout
def test_dx_may_be_dy_itself(device: str, layout: str) -> None:
    shape = (2, 9, 5, 128)
    dy, s = (LAYOUTS[layout](row_numbers(device, torch.bfloat16, shape, seed)) for seed in range(2))
    w = weights(device, torch.bfloat16, 128)
    _, _, rstd = ops.rms_norm(s, w, EPS)
    apart, dw, _ = ops.rms_norm_backward(dy, s, w, rstd)
    into = LAYOUTS[layout](torch.zeros_like(apart))
    for dx in (into, dy):
        got, got_dw, _ = ops.rms_norm_backward(dy, s, w, rstd, dx=dx)
        assert got is dx and torch.equal(dx, apart) and torch.equal(got_dw, dw)


# ---- layer norm ----

def check_layer(x: Tensor, w: Tensor | None, b: Tensor | None, add: Tensor | None = None) -> tuple[Tensor, ...]:
    y, s, mean, rstd = ops.layer_norm(x, w, b, EPS, add)
    assert s is x if add is None else torch.equal(s, x + add) and s.is_contiguous()
    exact, exact_mean, exact_rstd = reference.layer_norm(s.double(), *map(doubled, (w, b)), EPS)
    size = s.double().abs().mean(-1)
    within(mean, exact_mean, size)
    # rstd's relative error by mean's, squared and on average: what cancels in s - mean
    within(rstd, exact_rstd, exact_rstd * (1 + size * exact_rstd))
    scale = torch.ones_like(exact) if w is None else w.double().abs().expand_as(exact)
    terms = scale * ((s.double().abs() + size.unsqueeze(-1)) * exact_rstd.unsqueeze(-1))
    terms = terms * (1 + size * exact_rstd).unsqueeze(-1)
    within(y, exact, terms if b is None else terms + b.double().abs())
    return y, s, mean, rstd


def check_layer_back(dy: Tensor, s: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, rstd: Tensor,
                     add: Tensor | None = None, y: Tensor | None = None) -> None:
    dx, dw, db, again = ops.layer_norm_backward(dy, s, w, mean, rstd, add, b, rebuild=y is not None)
    exact, exact_dw, exact_db = reference.layer_norm_backward(dy.double(), s.double(), doubled(w), EPS)
    r, g = rstd.double().unsqueeze(-1), dy.double() if w is None else dy.double() * w.double()
    # hat, with what of it cancels in s - mean
    hat = (s.double().abs() + s.double().abs().mean(-1, keepdim=True)) * r
    hat = hat * (1 + s.double().abs().mean(-1, keepdim=True) * r)
    terms = r * (g.abs() + g.abs().mean(-1, keepdim=True) + hat * (g.abs() * hat).mean(-1, keepdim=True))
    if add is not None:
        exact, terms = exact + add.double(), terms + add.double().abs()
    within(dx, exact, terms)
    for got, want, size in ((dw, exact_dw, dy.double().abs() * hat), (db, exact_db, dy.double().abs())):
        if got is not None:
            within(got, want, size.flatten(0, -2).sum(0))
    assert (dw is None, db is None) == (w is None, b is None)
    assert again is None if y is None else torch.equal(again, y)


def doubled(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


@each_device
@each_type
@each_shape
def test_layer_norm(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, dy = row_numbers(device, dtype, shape), numbers(device, dtype, *shape, seed=1)
    w, b = weights(device, dtype, shape[-1]), numbers(device, dtype, shape[-1])
    y, s, mean, rstd = check_layer(x, w, b)
    check_layer_back(dy, s, w, b, mean, rstd, None, y)


@each_device
@pytest.mark.parametrize("shape", [(5, 100), (200, 128), (10, 1024), (7, 3584), (3, 8192)], ids=str)
@pytest.mark.parametrize("has", ["nothing", "weight", "bias", "both"])
def test_layer_norm_with_the_residual(device: str, shape: tuple[int, int], has: str) -> None:
    x, add, dy, more = (row_numbers(device, torch.bfloat16, shape, seed) for seed in range(4))
    w = weights(device, torch.bfloat16, shape[-1]) if has in ("weight", "both") else None
    b = numbers(device, torch.bfloat16, shape[-1]) if has in ("bias", "both") else None
    y, s, mean, rstd = check_layer(x, w, b, add)
    check_layer_back(dy, s, w, b, mean, rstd, more, y)


# ---- the rest ----

def the_same(call: Callable[[], tuple[Tensor | None, ...]]) -> None:
    """Two calls, the same bits."""
    for a, b in zip(call(), call()):
        assert (a is None and b is None) or torch.equal(a, b)


@each_device
@pytest.mark.parametrize("shape", [(4000, 128), (1000, 1024), (600, 3584), (50, 8200), (700, 65)], ids=str)
def test_two_runs_give_the_same_bits(device: str, shape: tuple[int, int]) -> None:
    x, dy = row_numbers(device, torch.bfloat16, shape), row_numbers(device, torch.bfloat16, shape, seed=1)
    w = weights(device, torch.bfloat16, shape[-1])
    _, _, mean, rstd = ops.layer_norm(x, w, w, EPS)
    the_same(lambda: ops.rms_norm_backward(dy, x, w, rstd, rebuild=True))
    the_same(lambda: ops.layer_norm_backward(dy, x, w, mean, rstd, None, w, rebuild=True))


@each_device
def test_no_rows_have_no_gradient(device: str) -> None:
    x, w = torch.empty(0, 3, 64, device=device), torch.ones(64, device=device)
    y, _, mean, rstd = ops.layer_norm(x, w, w, EPS)
    assert y.shape == x.shape and rstd.shape == (0, 3)
    dx, dw, db, _ = ops.layer_norm_backward(x, x, w, mean, rstd, None, w)
    assert dx.shape == x.shape and not dw.any() and not db.any()
    assert not ops.rms_norm_backward(x, x, w, rstd)[1].any()


@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_that_of_a_family_in_transformers(style: str) -> None:
    """Bit for bit but where the mean, summed in another order, moves hat across a rounding: less than 1 in 100."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    family = {"round_first": LlamaRMSNorm, "one_plus": GemmaRMSNorm, "round_last": Olmo2RMSNorm}[style]
    module = family(512, eps=1e-6).to(torch.bfloat16)
    w, x = weights("cpu", torch.bfloat16, 512), row_numbers("cpu", torch.bfloat16, (300, 512))
    module.weight.data.copy_(w)
    y, _, _ = ops.rms_norm(x, w, 1e-6, STYLES[style])
    assert (y != module(x).detach()).float().mean() < 0.01


@each_device
def test_torch_knows_what_the_ops_write(device: str) -> None:
    x, w = numbers(device, torch.bfloat16, 6, 64), weights(device, torch.bfloat16, 64)
    more, row = torch.empty_like(x), torch.ones(6, device=device)
    lib = torch.ops.megatrain
    check = torch.library.opcheck
    check(lib.rms_norm, (x, w, x, more, x.clone(), row, EPS, 0))
    check(lib.rms_norm_backward, (x, x, w, row, None, more, w.clone(), None, 1))
    check(lib.layer_norm, (x, w, None, None, more, None, row, row.clone(), EPS))
    check(lib.layer_norm_backward, (x, x, w, w, row, row, x, more, w.clone(), None, x.clone()))


def refused(**changed: object) -> Callable[[], object]:
    """rms_norm_backward with one argument that does not fit."""
    def call() -> object:
        x, w = torch.ones(4, 8), torch.ones(8)
        return ops.rms_norm_backward(**{"dy": x, "s": x, "weight": w, "rstd": torch.ones(4), **changed})
    return call


REFUSED = {
    "weight's length": (refused(weight=torch.ones(9)), r"rms_norm_backward: weight must be \[8\]"),
    "weight's type": (refused(weight=torch.ones(8).half()), "weight is F16, not F32"),
    "integers": (lambda: ops.rms_norm(torch.ones(4, 8).int(), torch.ones(8), EPS), "rms_norm: x must be float32"),
    "s's shape": (refused(s=torch.ones(8, 4)), "s has 2 dimensions and 32 elements"),
    "s's type": (refused(s=torch.ones(4, 8).half()), "s is F16, not F32"),
    "rstd's length": (refused(rstd=torch.ones(5)), "rstd has 5 elements for 4 rows"),
    "rstd's type": (refused(rstd=torch.ones(4).half()), "rstd is F16, not F32"),
    "columns": (refused(dy=torch.ones(8, 4).t()), "dy has a stride of 4 in its last dimension"),
    "add not dense": (refused(add=torch.ones(4, 16)[:, :8]), "not contiguous"),
    "style": (refused(style=3), "style is 3; 0 to 2"),
    "eps": (lambda: ops.rms_norm(torch.ones(4, 8), torch.ones(8), -1.0), "eps is -1; 0 is the least"),
    "empty rows": (lambda: ops.rms_norm(torch.ones(4, 0), torch.ones(0), EPS), "the last of 1 to"),
    "a number": (lambda: ops.layer_norm(torch.ones(()), None, None, EPS), "1 to 6 dimensions"),
    "four strides": (lambda: ops.layer_norm(torch.ones(5, 4, 3, 2, 8).permute(3, 2, 1, 0, 4), None, None, EPS),
                     "rows of x need more than 3 strides"),
    "s alone": (lambda: torch.ops.megatrain.rms_norm(torch.ones(4, 8), torch.ones(8), None, torch.ones(4, 8),
                                                     torch.ones(4, 8), torch.ones(4), EPS, 0), "s goes with add"),
}


test_what_a_norm_cannot_do_it_refuses = each_device(op_cases.refused(REFUSED))


def test_dx_over_dy_with_other_strides_is_refused() -> None:
    memory, w = torch.ones(64), torch.ones(8)
    dy, dx = memory[:32].view(4, 8), memory.as_strided((4, 8), (16, 1))
    with pytest.raises(RuntimeError, match="dx begins where dy does"):
        ops.rms_norm_backward(dy, dy, w, torch.ones(4), dx=dx)
