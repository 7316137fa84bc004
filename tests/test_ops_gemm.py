"""gemm_ and the grouped products against fp64, in every order of memory, and to the same bits again.

Tolerance: a sum of K products in fp32 is off by at most K * e * sum|a||b| with e = 2^-24 for each addition on the
CPU, and 2e where tensor cores cut the smaller summand off instead of rounding it; alpha, beta and their sum are
three more operations. Then one rounding to c's type: 2^-8 of the result for bf16, 2^-11 for fp16 or, where that
is denormal, 2^-25. A left-out product is off by
a K-th of sum|a||b|, TF32 by 2^-11 of it: far outside for the K used here.
"""
from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import op_cases
import pytest
import reference_ops as reference
import torch
from op_cases import DEVICES, each_device
from torch import Tensor

from megatrain_torch import ops

ROOT = Path(__file__).parents[1]
TYPES = [  # of a and b; of c
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]
SHAPES = [(1, 1, 1), (1, 300, 7), (129, 1, 65), (64, 64, 64), (72, 136, 520), (33, 65, 300)]


def matrix(rows: int, cols: int, dtype: torch.dtype, device: str, order: str) -> Tensor:
    """Random normal values; order: rows, columns, or either as a part of something wider."""
    wider = 16 if order.startswith("part") else 0
    if order.endswith("columns"):
        return torch.randn(cols, rows + wider, device=device).to(dtype)[:, :rows].t()
    return torch.randn(rows, cols + wider, device=device).to(dtype)[:, :cols]


def rounding(dtype: torch.dtype, exact: Tensor) -> Tensor:
    """The most by which the nearest number of the type is off."""
    return (op_cases.TYPES[dtype] * exact.abs()).clamp_min(2**-25 if dtype == torch.float16 else 0)


def check(c: Tensor, before: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    """c against the reference in fp64, within what the file's head says."""
    before, wide_a, wide_b = before.double(), a.double(), b.double()
    wanted = reference.gemm(before, wide_a, wide_b, alpha, beta)
    weight = reference.gemm(before.abs(), wide_a.abs(), wide_b.abs(), abs(alpha), abs(beta))
    e = 2**-24 if c.device.type == "cpu" else 2**-23
    bound = (a.shape[1] + 3) * e * weight + rounding(c.dtype, wanted)
    if c.device.type == "cuda" and c.dtype != torch.float32 and beta:
        # cublasLt's kernels round the product to c's type before they add c (seen on an H200).
        bound += rounding(c.dtype, wanted - beta * before)
    off = (c.double() - wanted).abs()
    assert (off <= bound).all(), f"off by {(off / bound).nan_to_num().max():.3g} x the bound"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---- gemm_ ----

@each_device
@pytest.mark.parametrize("types", TYPES, ids=lambda t: "-".join(str(x).removeprefix("torch.") for x in t))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm_is_the_product_in_every_order_of_memory(device: str, types: tuple, shape: tuple) -> None:
    m, n, k = shape
    ab, c_type = types
    for order_a in ("rows", "columns", "part of rows", "part of columns"):
        for order_b in ("rows", "columns", "part of rows", "part of columns"):
            a, b = matrix(m, k, ab, device, order_a), matrix(k, n, ab, device, order_b)
            c = matrix(m, n, c_type, device, "rows" if order_a == order_b else "part of rows")
            before = c.clone()
            ops.gemm_(c, a, b)
            check(c, before, a, b, 1.0, 1.0)


@each_device
@pytest.mark.parametrize("alpha, beta", [(1.0, 0.0), (0.3, 0.0), (0.3, 0.7), (0.0, 2.0)])
def test_gemm_scales_by_alpha_and_beta(device: str, alpha: float, beta: float) -> None:
    for ab, c_type in TYPES:
        a, b = matrix(40, 80, ab, device, "rows"), matrix(80, 24, ab, device, "columns")
        c = matrix(40, 24, c_type, device, "rows")
        before = c.clone()
        ops.gemm_(c, a, b, alpha=alpha, beta=beta)
        check(c, before, a, b, alpha, beta)


@each_device
def test_gemm_with_beta_zero_does_not_read_c(device: str) -> None:
    a, b = matrix(8, 16, torch.bfloat16, device, "rows"), matrix(16, 8, torch.bfloat16, device, "rows")
    c = torch.full((8, 8), torch.nan, device=device)
    ops.gemm_(c, a, b, beta=0.0)
    check(c, torch.zeros_like(c), a, b, 1.0, 0.0)


@each_device
def test_gemm_writes_nothing_beside_c(device: str) -> None:
    wide = torch.full((40, 48), 7.0, device=device)
    a, b = matrix(40, 16, torch.bfloat16, device, "rows"), matrix(16, 24, torch.bfloat16, device, "rows")
    ops.gemm_(wide[:, 8:32], a, b)
    assert (wide[:, :8] == 7).all() and (wide[:, 32:] == 7).all()


@each_device
def test_gemm_of_no_columns_scales_c(device: str) -> None:
    a, b = torch.empty(3, 0, device=device), torch.empty(0, 5, device=device)
    c = torch.ones(3, 5, device=device)
    ops.gemm_(c, a, b, beta=0.5)
    assert (c == 0.5).all()
    c.fill_(torch.nan)
    ops.gemm_(c, a, b, beta=0.0)
    assert (c == 0).all()


@each_device
def test_gemm_of_no_rows_does_nothing(device: str) -> None:
    ops.gemm_(torch.empty(0, 5, device=device), torch.empty(0, 4, device=device), torch.ones(4, 5, device=device))


@each_device
def test_gemm_adds_micro_batches_up_in_fp32(device: str) -> None:
    """256 equal summands: bf16 sums, rounded each time, stop growing at 256 units; fp32 ones are exact."""
    x, dy = torch.ones(16, 8, device=device).bfloat16(), torch.ones(16, 24, device=device).bfloat16()
    dw = torch.zeros(24, 8, device=device)
    for _ in range(256):
        ops.gemm_(dw, dy.t(), x)
    assert (dw == 16 * 256).all()


@each_device
def test_gemm_over_many_tokens(device: str) -> None:
    """A weight gradient: K is the tokens. The CPU's share is small enough for a test."""
    tokens, width = (32768, 512) if device == "cuda" else (4096, 40)
    x, dy = (matrix(tokens, width, torch.bfloat16, device, "rows") for _ in range(2))
    dw = torch.zeros(width, width, device=device)
    ops.gemm_(dw, dy.t(), x)
    check(dw, torch.zeros_like(dw), dy.t(), x, 1.0, 1.0)


@each_device
@pytest.mark.parametrize("types", TYPES, ids=lambda t: "-".join(str(x).removeprefix("torch.") for x in t))
def test_gemm_gives_the_same_bits_wherever_the_operands_lie(device: str, types: tuple) -> None:
    """The second run's tensors begin 16 bytes into their memory, the least that torch's allocators keep to."""
    m, n, k = (256, 512, 4096) if device == "cuda" else (24, 72, 300)
    a, b = matrix(m, k, types[0], device, "rows"), matrix(k, n, types[0], device, "rows")
    c = matrix(m, n, types[1], device, "rows")

    def moved(x: Tensor) -> Tensor:
        room = x.new_empty(x.numel() + 64)
        skip = (16 - room.data_ptr() % 16) % 16 // x.element_size() + 16 // x.element_size()
        return room[skip : skip + x.numel()].view_as(x).copy_(x)

    outs = []
    for place in (torch.clone, moved, torch.clone):
        out = place(c)
        ops.gemm_(out, place(a), place(b))
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.skipif("cuda" not in DEVICES, reason="TF32 is a GPU's")
def test_gemm_uses_tf32_only_where_torch_does() -> None:
    a, b = matrix(64, 512, torch.float32, "cuda", "rows"), matrix(512, 64, torch.float32, "cuda", "rows")
    plain, fast = torch.zeros(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    ops.gemm_(plain, a, b)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        ops.gemm_(fast, a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    check(plain, torch.zeros_like(plain), a, b, 1.0, 1.0)
    off = (fast.double() - a.double() @ b.double()).abs() / (a.double().abs() @ b.double().abs())
    assert 2**-20 < off.max() < 2**-9


@each_device
def test_gemm_says_in_its_schema_what_it_writes(device: str) -> None:
    args = (torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5))
    torch.library.opcheck(torch.ops.megatrain.gemm_, (*(x.to(device) for x in args), 0.5, 2.0, False))


def f(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*size, dtype=dtype)


BF16 = torch.bfloat16
F64, I32 = torch.float64, torch.int32
REFUSED = {
    "integers": (lambda: (f(2, 2), f(2, 2, dtype=I32), f(2, 2, dtype=I32)), "a must be float32, bf"),
    "fp64": (lambda: (f(2, 2, dtype=F64), f(2, 2, dtype=F64), f(2, 2, dtype=F64)), "a must be float32, bf"),
    "a and b": (lambda: (f(2, 2), f(2, 2), f(2, 2, dtype=BF16)), r"b must have a's dtype \(F32\)"),
    "c": (lambda: (f(2, 2, dtype=BF16), f(2, 2), f(2, 2)), r"c must be float32 or have a's dtype \(F32\)"),
    "vector": (lambda: (f(2), f(2, 2), f(2, 2)), "c has 1 dimensions, not 2"),
    "k": (lambda: (f(2, 3), f(2, 4), f(5, 3)), r"c \[2, 3\] is not a \[2, 4\] @ b \[5, 3\]"),
    "m": (lambda: (f(3, 3), f(2, 4), f(4, 3)), r"c \[3, 3\] is not a"),
    "strides": (lambda: (f(2, 2), f(2, 8)[:, ::2], f(4, 2)), r"a \[2, 4\] has strides \(8, 2\): neither"),
    "expanded": (lambda: (f(2, 2), f(2, 4), f(1, 2).expand(4, 2)), r"b \[4, 2\] has strides \(0, 1\)"),
    "c by columns": (lambda: (f(3, 2).t(), f(2, 4), f(4, 3)), "c's rows must be dense"),
}


@each_device
@pytest.mark.parametrize("name", REFUSED)
def test_gemm_refuses_what_it_cannot_do(device: str, name: str) -> None:
    made, says = REFUSED[name]
    with torch.device(device), pytest.raises(RuntimeError, match=says):
        ops.gemm_(*made())


def test_gemm_of_no_columns_is_refused_below_the_wrapper() -> None:
    with pytest.raises(RuntimeError, match="a has no columns"):
        torch.ops.megatrain.gemm_(f(2, 2), f(2, 0), f(0, 2), 1.0, 1.0, False)


def nvidia_headers() -> list[Path]:
    """Folders that may hold cublasLt.h and what it includes: pip's packages, then a toolkit."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    roots = [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    found = [*packages.glob("*/include"), *(root / "include" for root in roots)]
    return [folder for folder in found if folder.is_dir()]


def compiles(name: str, header: str, *folders: Path) -> None:
    if shutil.which("g++") is None or not any((f / header).is_file() for f in folders):
        pytest.skip(f"needs g++ and {header}")
    command = ["g++", "-std=c++20", "-fsyntax-only", *(f"-isystem{f}" for f in folders)]
    done = subprocess.run([*command, ROOT / "tests/torch" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_number_and_prototype_of_cublaslt_is_nvidias() -> None:
    """tests/torch/cublaslt_check.cc: static_asserts against the header, where there is one."""
    compiles("cublaslt_check.cc", "cublasLt.h", *nvidia_headers())


# ---- grouped products ----

SIZES = {"even": [16, 16, 16], "odd": [3, 21, 0, 8, 1], "empty first": [0, 0, 40], "empty last": [40, 0], "one": [33],
         "all empty": [0, 0]}


def ends_of(sizes: list[int], device: str) -> tuple[Tensor, list[int]]:
    ends = torch.tensor(sizes).cumsum(0).int()
    return ends.to(device), ends.tolist()


def grouped_cases(device: str) -> Iterator[tuple[torch.dtype, int, int]]:
    """Types and widths: those of torch's kernel, then those that go group by group."""
    yield torch.bfloat16, 64, 128
    yield torch.bfloat16, 20, 36
    yield torch.float16, 64, 128
    yield torch.float32, 24, 40


def close(got: Tensor, wanted: Tensor, weight: Tensor, k: int) -> None:
    """As check(); torch's own products, whose order of sums is not ours to know: twice the bound."""
    assert got.is_contiguous()
    assert ((got.double() - wanted).abs() <= 2 * (k + 3) * 2**-23 * weight + rounding(got.dtype, wanted)).all()


@each_device
@pytest.mark.parametrize("name", SIZES)
def test_grouped_gemm_and_its_gradients_are_products_of_each_group(device: str, name: str) -> None:
    offsets, ends = ends_of(SIZES[name], device)
    for dtype, wide_in, wide_out in grouped_cases(device):
        x = torch.randn(ends[-1], wide_in, device=device).to(dtype)
        dy = torch.randn(ends[-1], wide_out, device=device).to(dtype)
        w = torch.randn(len(ends), wide_in, wide_out, device=device).to(dtype)
        dx, ddy, dw = x.double(), dy.double(), w.double()
        for by in (w, w.mT.contiguous().mT):
            close(ops.grouped_gemm(x, by, offsets), reference.grouped_gemm(dx, dw, ends),
                  reference.grouped_gemm(dx.abs(), dw.abs(), ends), wide_in)
            close(ops.grouped_gemm_dgrad(dy, by, offsets), reference.grouped_gemm(ddy, dw.mT, ends),
                  reference.grouped_gemm(ddy.abs(), dw.mT.abs(), ends), wide_out)
        close(ops.grouped_gemm_wgrad(x, dy, offsets), reference.grouped_gemm_wgrad(dx, ddy, ends),
              reference.grouped_gemm_wgrad(dx.abs(), ddy.abs(), ends), ends[-1])
        close(ops.grouped_gemm_wgrad(dy, x, offsets), reference.grouped_gemm_wgrad(ddy, dx, ends),
              reference.grouped_gemm_wgrad(ddy.abs(), dx.abs(), ends), ends[-1])


@each_device
def test_grouped_gemm_gives_the_same_bits_again(device: str) -> None:
    offsets, ends = ends_of(SIZES["odd"], device)
    x, dy = (torch.randn(ends[-1], n, device=device).bfloat16() for n in (64, 128))
    w = torch.randn(len(ends), 64, 128, device=device).bfloat16()
    first, again = ((ops.grouped_gemm(x, w, offsets), ops.grouped_gemm_dgrad(dy, w, offsets),
                     ops.grouped_gemm_wgrad(x, dy, offsets)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("ends", [[3, 2, 8], [4, 7], [4, 9], [-1, 8]], ids=str)
def test_offsets_that_do_not_ascend_to_the_rows_are_refused(ends: list[int]) -> None:
    with pytest.raises(RuntimeError, match="must ascend to the number of rows, 8"):
        ops.grouped_gemm(f(8, 3), f(len(ends), 3, 4), torch.tensor(ends, dtype=torch.int32))
