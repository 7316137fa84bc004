"""torch.ops.megatrain.*: registered from C through the stable shim, with the kernels' own bits."""
from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import op_cases
import pytest
import torch
import wide
from test_ops_gemm import compiles

from megatrain_torch import _core
from megatrain_torch.ops import nf4_codes

ROOT = Path(__file__).parents[1]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
FLOATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    _core.register_ops()
    _core.register_ops()  # again: nothing happens


def adamw(hi: torch.Tensor, lo: torch.Tensor | None, *rest: torch.Tensor, **changed: float) -> None:
    """The op with default numbers. rest: m, v, grad."""
    torch.ops.megatrain.adamw_(hi, lo, *rest, **{**HYPER, "step": 1, "clip": 1.0, **changed})


def test_every_prototype_is_pytorchs_own() -> None:
    """tests/torch/abi_check.cc: static_asserts against the headers of the installed torch."""
    compiles("abi_check.cc", "torch/library.h", Path(torch.__file__).parent / "include")


def test_register_ops_asks_for_torch_first() -> None:
    code = (
        "import importlib.machinery as m, importlib.util as u, sys\n"
        f"l = m.ExtensionFileLoader('megatrain_torch._core', {_core.__file__!r})\n"
        "c = u.module_from_spec(u.spec_from_loader(l.name, l))\n"
        "l.exec_module(c)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "try: c.register_ops()\n"
        "except c.MegatrainError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert "import torch before" in done.stdout, done.stderr


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 8193, 1 << 20])
def test_sumsq_has_the_bits_of_the_core(dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n).to(dtype)
    out = torch.ops.megatrain.sumsq(x)
    assert out.shape == () and out.dtype == torch.float64 and out.device == x.device
    assert out.item() == _core.sumsq(_core.DTYPES[FLOATS[dtype]], x.data_ptr(), n)


def test_sumsq_of_a_lazy_clone_leaves_it_lazy() -> None:
    x = torch.randn(100)
    clone = torch._lazy_clone(x)
    torch.ops.megatrain.sumsq(clone)
    assert torch._C._is_cow_tensor(clone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 1000, 1 << 20])
def test_adamw_has_the_bits_of_the_core(dtype: torch.dtype, n: int) -> None:
    hi, grad = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    lo = torch.zeros(n, dtype=torch.int16) if dtype == torch.bfloat16 else None
    planes = [hi, lo, torch.zeros(n), torch.zeros(n), grad]
    copies = [None if t is None else t.clone() for t in planes]
    adamw(*planes, clip=0.5)
    hi2, lo2, m2, v2, grad2 = (0 if t is None else t.data_ptr() for t in copies)
    number = _core.DTYPES[FLOATS[dtype]]
    _core.adam_step([(number, n, hi2, lo2, 0, m2, v2, grad2, number, *HYPER.values(), 1, False)], 0.5, 1, 0)
    for got, wanted in zip(planes, copies):
        assert got is None or torch.equal(got, wanted)


def test_the_schema_says_what_is_written() -> None:
    """opcheck runs the op and compares which arguments changed with what the schema declares."""
    planes = [torch.randn(10), None, torch.zeros(10), torch.zeros(10), torch.randn(10)]
    torch.library.opcheck(torch.ops.megatrain.adamw_, (*planes, *HYPER.values(), 1, 1.0), test_utils="test_schema")
    torch.library.opcheck(torch.ops.megatrain.sumsq, (planes[0],), test_utils="test_schema")
    four = torch.zeros(5, dtype=torch.uint8), torch.zeros(1)
    torch.library.opcheck(torch.ops.megatrain.nf4_codes, (planes[0], 64, *four), test_utils="test_schema")


def test_nf4_codes_of_what_they_cannot_be_made_of_are_refused() -> None:
    for w, group, why in ((torch.zeros(8), 3, "even number"), (torch.zeros(8), 8192, "up to 4096"), (torch.zeros(8), 0, "0 elements"),
                          (torch.zeros(8, dtype=torch.int32), 64, "w")):
        with pytest.raises(RuntimeError, match=why):
            nf4_codes(w, group)


def f(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)


BF16, I16 = torch.bfloat16, torch.int16
REFUSED = {
    "not contiguous": (lambda: torch.ops.megatrain.sumsq(f(10)[::2]), "argument 0 is not contiguous"),
    "integers": (lambda: torch.ops.megatrain.sumsq(f(10, I16)), "x must be float32"),
    "complex": (lambda: torch.ops.megatrain.sumsq(f(10, torch.complex64)), "x must be float32"),
    "lengths": (lambda: adamw(f(4), None, f(4), f(5), f(4)), "v has 5 elements, hi has 4"),
    "lo of fp32": (lambda: adamw(f(4), f(4, I16), f(4), f(4), f(4)), "lo goes with"),
    "no lo": (lambda: adamw(f(4, BF16), None, f(4), f(4), f(4, BF16)), "lo goes with"),
    "fp16": (lambda: adamw(f(4, torch.float16), None, f(4), f(4), f(4)), "float16 needs a master"),
    "m": (lambda: adamw(f(4), None, f(4, BF16), f(4), f(4)), "m has the wrong dtype"),
    "grad": (lambda: adamw(f(4), None, f(4), f(4), f(4, BF16)), "grad has the wrong dtype"),
    "step": (lambda: adamw(f(4), None, f(4), f(4), f(4), step=0), "step"),
}


test_what_an_op_cannot_do_it_refuses = op_cases.each_device(op_cases.refused(REFUSED))


def test_ops_keep_no_tensor() -> None:
    """200 calls of each kind, refused ones too, with 4 MiB each: 800 MiB would be lost by one leak."""

    def once() -> None:
        lo, grad = f(1 << 21, I16), f(1 << 21, BF16)
        torch.ops.megatrain.sumsq(f(1 << 20))
        for hi in (f(1 << 21, BF16), f(1 << 20, BF16)):
            try:
                adamw(hi, lo, f(1 << 21), f(1 << 21), grad)
            except RuntimeError:
                assert hi.numel() == 1 << 20

    once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        once()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 200 * 1024  # KiB


# ---- elements beyond 2^31: wide.py, on the CPU; next to nothing of the gigabytes is ever touched ----

@pytest.mark.parametrize("op", wide.OPS)
def test_elements_beyond_two_to_the_31_are_found(op: str) -> None:
    assert wide.OPS[op]("cpu")
