"""fp8_cast and fp8_gemm_: the definition against torch's own float8 casts, bit for bit, and fp64; CUDA against it.

Tolerance of a product of codes: codes and scales are exact in fp64, so what is left is a sum of K products in fp32, off
by at most K * e * sum|a||b| with e = 2^-24 for each addition on the CPU. On CUDA "slow" sums are those of tensor cores,
which cut products of a short stretch off at 2^-13 of the largest, added in fp32: (K/128 * 2^-23 + 2^-13) * sum|a||b|;
"fast" sums are cut off so throughout: K/32 * 2^-13. Then one rounding to c's type, two where a base is added.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import op_cases
import pytest
import torch
from op_cases import TYPES, each_device, each_type
from torch import Tensor

from megatrain_torch import ops

E4M3 = torch.float8_e4m3fn


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Lines of magnitudes over 24 powers of two."""
    g = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=g)
    if len(shape) == 2:
        x = x * torch.exp2(torch.randint(-12, 12, (shape[0], 1), generator=g))
    return x.to(dtype)


def scale_of(x: Tensor) -> Tensor:
    """Of each row, by fp64 and a search: the least power of two that is enough, 2^-126 at least."""
    most = x.double().abs().amax(1)
    found = []
    for m in most.tolist():
        e = -126 if m == 0 else max(-126, math.floor(math.log2(m)) - 10)
        while m > 448 * 2.0**e:
            e += 1
        found.append(2.0**e)
    return torch.tensor(found, dtype=torch.float64)


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes by torch's own cast, and scales."""
    scale = scale_of(x)
    return (x.double() / scale[:, None]).float().to(E4M3), scale.float()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def check_rows(x: Tensor, made: ops.Codes) -> None:
    codes, scale = reference(x.cpu())
    assert torch.equal(made.scale.cpu(), scale)
    assert same(made.values, codes)


def check_columns(x: Tensor, made: ops.Codes) -> None:
    codes, scale = reference(x.cpu().t())
    rows = x.shape[0]
    assert made.values.shape == (x.shape[1], -(-rows // 16) * 16)
    assert torch.equal(made.scale.cpu(), scale)
    assert same(made.values[:, :rows].contiguous(), codes)
    assert not made.values[:, rows:].contiguous().view(torch.uint8).any(), "zeros behind the last row"


@each_device
@each_type
@pytest.mark.parametrize("shape", [(1, 16), (16, 16), (5, 64), (33, 129), (130, 72), (257, 520), (3, 7), (1, 1)], ids=str)
def test_codes_are_those_of_torchs_cast_of_the_scaled_lines(device: str, dtype: torch.dtype, shape: tuple) -> None:
    x = numbers(*shape, dtype=dtype).to(device)
    check_rows(x, ops.fp8_cast(x))
    check_columns(x, ops.fp8_cast_t(x))
    rows, columns = ops.fp8_cast_both(x)
    check_rows(x, rows)
    check_columns(x, columns)


@each_device
def test_every_bf16_number_has_the_code_that_torch_gives_it(device: str) -> None:
    """Beside 448, so that the scale is 1: all numbers up to it, denormals and both zeros."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns[patterns.float().abs() <= 448]
    x = torch.cat([x, x.new_full((-len(x) % 16,), 448)])[None].contiguous().to(device)
    made = ops.fp8_cast(x)
    assert float(made.scale) == 1
    assert same(made.values, x.cpu().to(E4M3))
    assert same(ops.fp8_cast_t(x.t().contiguous()).values[:, :x.shape[1]].contiguous(), x.cpu().to(E4M3))


@each_device
@each_type
def test_rows_of_a_wider_matrix_need_lie_nowhere_in_particular(device: str, dtype: torch.dtype) -> None:
    wide = numbers(40, 83, dtype=dtype).to(device)
    for x in (wide[:, 1:65], wide[3:, :80], wide[::2, 2:3]):
        check_rows(x, ops.fp8_cast(x))
        check_columns(x, ops.fp8_cast_t(x))


@each_device
@pytest.mark.parametrize("both", [False, True])
def test_zeros_and_what_is_not_finite(device: str, both: bool) -> None:
    x = torch.randn(32, 48)
    x[3], x[4, 5], x[5, 6], x[6, 7] = 0, float("nan"), float("inf"), -float("inf")
    x[7] = 2.0**-133                                     # a denormal of bf16
    x[8, 0] = torch.finfo(torch.bfloat16).max
    x = x.bfloat16().to(device)
    made, turned = ops.fp8_cast_both(x) if both else (ops.fp8_cast(x), ops.fp8_cast_t(x))
    fine = [i for i in range(32) if i not in (4, 5, 6)]
    check_rows(x[fine], ops.Codes(made.values[fine], made.scale[fine]))
    assert made.scale[[4, 5, 6]].isnan().all() and (made.values[[4, 5, 6]].view(torch.uint8) == 0x7f).all()
    assert float(made.scale[3]) == 2.0**-126
    assert turned.scale.isnan().nonzero().flatten().tolist() == [5, 6, 7]
    assert (turned.values[5:8, :32].contiguous().view(torch.uint8) == 0x7f).all()


@each_device
def test_a_long_row_and_a_long_column(device: str) -> None:
    x = numbers(3, 24_576, dtype=torch.bfloat16).to(device)       # all of a block's shared memory
    check_rows(x, ops.fp8_cast(x))
    x = numbers(3, 40_016, dtype=torch.bfloat16).to(device)       # longer than that
    check_rows(x, ops.fp8_cast(x))
    tall = x.t().contiguous()
    for made in (ops.fp8_cast_t(tall), ops.fp8_cast_both(tall)[1]):
        check_columns(tall, made)


def wide(c: ops.Codes) -> Tensor:
    return c.values.double() * c.scale.double()[:, None]


def check_product(c: Tensor, a: ops.Codes, b: ops.Codes, alpha: float, bias: Tensor | None, base: Tensor | None,
                  fast: bool) -> None:
    x, y, k = wide(a), wide(b), a.values.shape[1]
    product, weight = alpha * (x @ y.t()), abs(alpha) * (x.abs() @ y.abs().t())
    terms = [product] + [t.double().expand_as(product) for t in (bias, base) if t is not None]
    wanted, largest = sum(terms), sum(t.abs() for t in terms)
    at_a_time = -(-k // 32)                              # products of tensor cores: sums keep 13 bits of each
    e = k * 2**-24 if c.device.type == "cpu" else at_a_time * 2**-13 if fast else k / 128 * 2**-23 + 2**-13
    bound = e * weight + 3 * 2**-24 * largest + TYPES[c.dtype] * (wanted.abs() + (len(terms) > 1) * largest)
    off = (c.double() - wanted).abs()
    assert (off <= bound).all(), f"off by {(off / bound).max():.3g} x the bound"


@each_device
@pytest.mark.parametrize("style", [ops.ROUND_FIRST, ops.ONE_PLUS, ops.ROUND_LAST])
@pytest.mark.parametrize("shape", [(1, 16), (33, 48), (130, 272), (21, 1024), (19, 3584), (3, 8192), (7, 40), (2, 40_000)],
                         ids=str)
def test_codes_of_norms_are_those_of_what_rms_norm_writes(device: str, style: int, shape: tuple) -> None:
    x, weight = numbers(*shape, dtype=torch.bfloat16).to(device), numbers(shape[1], dtype=torch.bfloat16).to(device)
    y, _, rstd = ops.rms_norm(x, weight, 1e-6, style)
    made, found = ops.fp8_rms_norm(x, weight, 1e-6, style)
    assert alike(made, ops.fp8_cast(y)) and torch.equal(found, rstd)


@each_device
def test_norms_of_rows_that_lie_apart_and_of_what_is_not_finite(device: str) -> None:
    wide, weight = numbers(24, 96, dtype=torch.bfloat16).to(device), torch.ones(64, device=device).bfloat16()
    wide[3, 40], wide[4, 41], wide[5] = float("nan"), float("inf"), 0
    for x in (wide[:, 16:80], wide[::2, 16:80], wide[:, 17:81]):         # the last: at no multiple of 16 bytes
        made, _ = ops.fp8_rms_norm(x, weight, 1e-6)
        assert alike(made, ops.fp8_cast(ops.rms_norm(x, weight, 1e-6)[0]))
    assert ops.fp8_rms_norm(wide[:, 16:80], weight, 1e-6)[0].scale.isnan().nonzero().flatten().tolist() == [3, 4]


# ---- rows that are balanced ----

def some_shifts(rows: int, device: str) -> Tensor:
    shift = torch.randint(-12, 13, (rows + 1,), generator=torch.Generator().manual_seed(rows), dtype=torch.int8)
    shift[0], shift[-1] = 9, 1
    return shift.to(device)


def shifted(x: Tensor, shift: Tensor, sign: int) -> Tensor:
    """In fp32, where it is exact."""
    return x.float() * torch.exp2(sign * shift[:-1].float())[:, None]


@each_device
@each_type
@pytest.mark.parametrize("shape", [(1, 16), (5, 64), (33, 129), (130, 72), (257, 520), (3, 7)], ids=str)
def test_codes_of_shifted_rows(device: str, dtype: torch.dtype, shape: tuple) -> None:
    for x in (numbers(*shape, dtype=dtype).to(device), numbers(shape[0], 83, dtype=dtype).to(device)[:, 1:66]):
        shift, before = some_shifts(shape[0], device), ops.fp8_cast_t(x)
        for sign in (1, -1):
            made = ops.fp8_cast_t(x)
            ops.fp8_recast_(made, x, shift, sign)
            check_columns(shifted(x, shift, sign), made)
        made, shift[-1] = ops.fp8_cast_t(x), 0
        ops.fp8_recast_(made, x, shift, 1)
        assert alike(made, before), "nothing was to be done"
        rows = torch.empty(shape[0], device=device)
        assert alike(ops.fp8_cast_t(x, rows), before) and torch.equal(rows, ops.fp8_cast(x).scale)
        assert torch.equal(ops.fp8_row_scales(x), rows)


@each_device
def test_shifted_zeros_and_what_is_not_finite(device: str) -> None:
    x = torch.randn(32, 48)
    x[:, 3], x[4, 5], x[5, 6] = 0, float("nan"), float("inf")
    x = x.bfloat16().to(device)
    made = ops.fp8_cast_t(x)
    ops.fp8_recast_(made, x, some_shifts(32, device), 1)
    assert made.scale.isnan().nonzero().flatten().tolist() == [5, 6] and float(made.scale[3]) == 2.0**-126
    assert not made.values[3].view(torch.uint8).bitwise_and(0x7f).any()
    assert (made.values[5:7, :32].contiguous().view(torch.uint8) == 0x7f).all()


@each_device
@pytest.mark.parametrize("rows", [1, 3, 16, 2500])
def test_shifts_are_half_of_what_is_between_two_rows(rows: int, device: str) -> None:
    """By fp8.h's words, in Python: gaps from what more than a quarter of the rows reach."""
    g = torch.Generator().manual_seed(rows)
    scales = [torch.exp2(torch.randint(-9, 9, (rows,), generator=g).float()) for _ in "xd"]
    for i, (x, dy) in enumerate([(20, 0), (0, 20), (21, 1), (20, -126), (-126, 20), (33, 33), (126, -100), (9, 0)]):
        if i < rows // 8:
            scales[0][i * 5], scales[1][i * 5] = 2.0**x, 2.0**dy
    if rows > 16:
        scales[0][7] = float("nan")

    def gaps(scale: Tensor) -> list[float]:
        found = sorted((math.log2(s) for s in scale.tolist() if 2.0**-126 < s < math.inf), reverse=True)
        typical = found[len(found) // 4]
        return [math.nan if s != s else -math.inf if s == 2.0**-126 else math.log2(s) - typical for s in scale.tolist()]

    wanted = []
    for gx, gd in zip(*map(gaps, scales)):
        s = 0 if not (gx > 8 or gd > 8) or gx != gx or gd != gd else \
            gx if gd == -math.inf else -gd if gx == -math.inf else math.ceil((gx - gd) / 2)
        wanted.append(max(-100, min(100, int(s))))
    found = ops.fp8_shift(*(s.to(device) for s in scales)).tolist()
    assert found[:-1] == wanted and found[-1] == any(wanted)
    assert rows < 16 or any(wanted)


# ---- gated activations: the codes of what glu and glu_backward of the same device write, to the bit ----

ACTS = {"silu": ops.SILU, "gelu_tanh": ops.GELU_TANH, "gelu": ops.GELU, "clamped": ops.CLAMPED}


def gates(rows: int, n: int, device: str) -> tuple[Tensor, Tensor]:
    """g|u, and the gradient of their product: rows of magnitudes over 8 powers of two."""
    g = torch.Generator().manual_seed(rows + n)
    gu, dh = (torch.randn(rows, m, generator=g) * torch.exp2(torch.randint(-6, 3, (rows, 1), generator=g))
              for m in (2 * n, n))
    return gu.bfloat16().to(device), dh.bfloat16().to(device)


def gradients(dh: Tensor, gu: Tensor, act: int) -> tuple[Tensor, Tensor]:
    d, h = torch.empty_like(gu), torch.empty_like(dh)
    to_gate, to_up = d.chunk(2, 1)
    ops.glu_backward(dh, *gu.chunk(2, 1), act, dgate=to_gate, dup=to_up, h=h)
    return d, h


def alike(made: ops.Codes, wanted: ops.Codes) -> bool:
    return torch.equal(made.scale.nan_to_num(-1), wanted.scale.nan_to_num(-1)) and same(made.values, wanted.values.cpu())


@each_device
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", [(1, 16), (16, 64), (33, 48), (130, 272), (300, 1040)], ids=str)
def test_codes_of_gated_activations(device: str, act: str, shape: tuple) -> None:
    gu, dh = gates(*shape, device)
    gate, up = gu.chunk(2, 1)
    assert alike(ops.fp8_glu(gate, up, ACTS[act]), ops.fp8_cast(ops.glu(gate, up, ACTS[act])))
    d, h = gradients(dh, gu, ACTS[act])
    before = gu.clone()
    rows, columns, of_h, h_rows = ops.fp8_glu_backward(dh, gate, up, ACTS[act])
    assert alike(rows, ops.fp8_cast(d)) and alike(columns, ops.fp8_cast_t(d)) and alike(of_h, ops.fp8_cast_t(h))
    assert torch.equal(h_rows, ops.fp8_cast(h).scale)
    shift = some_shifts(shape[0], device)
    for made, x, sign in ((columns, d, 1), (of_h, h, -1)):
        ops.fp8_glu_recast_(made, dh, gate, up, ACTS[act], shift, sign)
        assert alike(made, ops.fp8_cast_t(shifted(x, shift, sign)))
    assert torch.equal(gu, before), "only codes are written"


@each_device
def test_gated_rows_that_lie_apart_or_are_long(device: str) -> None:
    wide, dh = gates(24, 96, device)
    gate, up = wide[:, 16:64], wide[:, 104:152]
    assert alike(ops.fp8_glu(gate, up), ops.fp8_cast(ops.glu(gate, up)))
    dh = dh[:, :48].contiguous()
    made = ops.fp8_glu_backward(dh, gate, up)[2]
    assert alike(made, ops.fp8_cast_t(ops.glu(gate, up)))
    ops.fp8_glu_recast_(made, dh, gate, up, ops.SILU, some_shifts(24, device), -1)
    assert alike(made, ops.fp8_cast_t(shifted(ops.glu(gate, up), some_shifts(24, device), -1)))
    for n in (24_576, 30_000):                           # all of a block's shared memory, and more
        gu, _ = gates(3, n, device)
        assert alike(ops.fp8_glu(*gu.chunk(2, 1)), ops.fp8_cast(ops.glu(*gu.chunk(2, 1))))


@each_device
def test_gated_zeros_and_what_is_not_finite(device: str) -> None:
    gu, dh = gates(40, 64, device)
    gu[3], dh[4] = 0, 0
    gu[5, 7], gu[6, 64 + 9], dh[7, 11] = float("nan"), float("inf"), -float("inf")
    made = ops.fp8_glu(*gu.chunk(2, 1))
    assert alike(made, ops.fp8_cast(ops.glu(*gu.chunk(2, 1))))
    assert made.scale.isnan().nonzero().flatten().tolist() == [5, 6] and float(made.scale[3]) == 2.0**-126
    d, h = gradients(dh, gu, ops.SILU)
    found = ops.fp8_glu_backward(dh, *gu.chunk(2, 1))
    assert all(map(alike, found, (ops.fp8_cast(d), ops.fp8_cast_t(d), ops.fp8_cast_t(h))))
    assert found[0].scale.isnan().nonzero().flatten().tolist() == [5, 6, 7]


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (48, 64, 32), (130, 80, 272), (64, 160, 1024)], ids=str)
def test_products_of_codes(device: str, dtype: torch.dtype, shape: tuple) -> None:
    m, n, k = shape
    a, b = (ops.fp8_cast(numbers(rows, k, dtype=torch.bfloat16, seed=i).to(device)) for i, rows in enumerate((m, n)))
    bias, base = numbers(n, dtype=dtype).to(device), numbers(m, n, dtype=dtype).to(device)
    for fast in (False, True):
        for terms in ({}, {"bias": bias}, {"base": base}, {"bias": bias, "base": base}):
            for alpha in (1.0, 0.25):
                c = torch.full((m, n), float("nan"), dtype=dtype, device=device)
                ops.fp8_gemm_(c, a, b, alpha=alpha, fast=fast, **terms)
                check_product(c, a, b, alpha, terms.get("bias"), terms.get("base"), fast)
        c = base.clone()
        ops.fp8_gemm_(c, a, b, base=c, fast=fast)
        check_product(c, a, b, 1.0, None, base, fast)


@each_device
def test_a_products_bits_are_the_same_again(device: str) -> None:
    a, b = (ops.fp8_cast(numbers(96, 512, seed=i).to(device)) for i in (0, 1))
    found = []
    for _ in range(3):
        c = torch.empty(96, 96, dtype=torch.bfloat16, device=device)
        ops.fp8_gemm_(c, a, b)
        found.append(c)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@each_device
def test_what_is_not_finite_reaches_its_row_and_its_column(device: str) -> None:
    x = torch.randn(32, 64)
    x[3, 5] = float("inf")
    a, b = ops.fp8_cast(x.to(device)), ops.fp8_cast(torch.randn(48, 64, device=device))
    c = torch.empty(32, 48, device=device)
    ops.fp8_gemm_(c, a, b)
    assert c[3].isnan().all() and c[[i for i in range(32) if i != 3]].isfinite().all()


@each_device
def test_opcheck(device: str) -> None:
    """Without its look at the schema, which multiplies arguments: torch has no products of these types."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(16, 32, device=device)
    new = ops._codes(x, 16, 32), ops._codes(x, 32, 16)
    torch.library.opcheck(torch.ops.megatrain.fp8_cast, (x, *new[0], *new[1]), test_utils=tests)
    torch.library.opcheck(torch.ops.megatrain.fp8_cast, (x, *new[0], None, None), test_utils=tests)
    scales, shift = new[0][1], some_shifts(16, device)
    torch.library.opcheck(torch.ops.megatrain.fp8_shift, (scales, scales, shift), test_utils=tests)
    torch.library.opcheck(torch.ops.megatrain.fp8_recast_, (x, shift, 1, *new[1]), test_utils=tests)
    a = ops.fp8_cast(x)
    c = torch.zeros(16, 16, device=device)
    torch.library.opcheck(torch.ops.megatrain.fp8_gemm_, (c, *a, *a, None, None, 1.0, False), test_utils=tests)


@each_device
def test_opcheck_of_what_goes_straight_to_codes(device: str) -> None:
    tests = ("test_autograd_registration", "test_faketensor")
    gu, dh = gates(16, 32, device)
    made = ops.fp8_glu_backward(dh, *gu.chunk(2, 1))
    args = (*gu.chunk(2, 1), ops.SILU)
    torch.library.opcheck(torch.ops.megatrain.fp8_glu, (*args, *ops.fp8_glu(*args)), test_utils=tests)
    x, weight = gu[:, :32].contiguous(), gu[0, :32].clone()
    codes, rstd = ops.fp8_rms_norm(x, weight, 1e-6)
    torch.library.opcheck(torch.ops.megatrain.fp8_rms_norm, (x, weight, *codes, rstd, 1e-6, 0), test_utils=tests)
    flat = [t for codes in made[:3] for t in codes] + [made[3]]
    torch.library.opcheck(torch.ops.megatrain.fp8_glu_backward, (dh, *args, *flat), test_utils=tests)


def refusals() -> dict[str, tuple[Callable[[], object], str]]:
    gate, x = torch.zeros(16, 48).bfloat16(), torch.randn(16, 32)
    a, b, c = ops.fp8_cast(x), ops.fp8_cast(torch.randn(16, 48)), torch.zeros(16, 16)
    cast = torch.ops.megatrain.fp8_cast
    return {
        "gate's type": (lambda: ops.fp8_glu(gate.float(), gate), "fp8_glu: gate is F32, not BF16"),
        "gate": (lambda: ops.fp8_glu(gate[:, :24], gate[:, 24:]), "gate has 24 columns, rows 48 elements apart: columns in sixt"),
        "up": (lambda: ops.fp8_glu(gate[:, :32], gate[:, 1:33]), "up has 32 columns, rows 48 elements apart: columns in sixteens, each row"),
        "dh": (lambda: ops.fp8_glu_backward(gate[:, :32].contiguous(), gate, gate), r"dh is \[16, 32\], not \[16, 48\]"),
        "act": (lambda: ops.fp8_glu(gate, gate, 4), "act is 4; 0 to 3"),
        "widths": (lambda: ops.fp8_gemm_(c, a, b), "rows of a have 32 codes and rows of b 48"),
        "c's type": (lambda: ops.fp8_gemm_(c.half(), a, a), "c must be float32 or bfloat16"),
        "x's type": (lambda: cast(x.double(), *a, None, None), "x must be float32, bfloat16 or float16"),
        "bias": (lambda: ops.fp8_gemm_(c, a, a, bias=torch.zeros(15)), "bias must be"),
        "shift": (lambda: ops.fp8_recast_(ops.fp8_cast_t(x), x, torch.zeros(16, dtype=torch.int8), 1), "shift"),
        "scales": (lambda: ops.fp8_shift(torch.ones(16), torch.ones(15)), "dy_scale"),
        "codes alone": (lambda: cast(x, a.values, None, None, None), "codes and their scales go together"),
    }


test_what_does_not_fit_is_refused_by_name = each_device(op_cases.refused(refusals()))
