"""expand_codes_: the definition against each package's own arithmetic, bit for bit; CUDA against the definition, likewise.

bitsandbytes' own code is compared in test_bases.py; here its formulas stand, in torch."""
from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from op_cases import each_device, each_type
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain_torch import ops
from megatrain_torch.base.codes import Coded
from megatrain_torch.fused.trial import InFp32

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4 = [s * v + 0.0 for s in (1, -1) for v in (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
                                        0.1666666716337204, 0.25)]
E2M1 = [s * v for s in (1, -1) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]



def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expanded(device: str, shape: tuple[int, ...], dtype: torch.dtype, form: str, *strands: Tensor | None, group: int = 0,
             skip: int = 0) -> Tensor:
    """skip: elements before out's first, so that it is not where packs may begin."""
    out = torch.full((torch.Size(shape).numel() + skip,), 7.0, dtype=dtype, device=device)[skip:].view(shape)
    ops.expand_codes_(out, form, *(s if s is None else s.to(device) for s in strands), group=group)
    return out.cpu()


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    kind = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    assert torch.equal(found.contiguous().view(kind), wanted.contiguous().view(kind))


def four_bits(n: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of n elements as bytes, one of each, and scales of many magnitudes."""
    codes = torch.randint(0, 16, (n,), generator=rng(seed))
    padded = torch.cat([codes, codes.new_zeros(n % 2)])
    scales = torch.exp2(torch.randint(-20, 3, (-(-n // group),), generator=rng(seed))) * torch.rand(-(-n // group),
                                                                                                   generator=rng(seed))
    return (padded[::2] << 4 | padded[1::2]).to(torch.uint8)[:, None], codes, scales


@each_device
@each_type
@pytest.mark.parametrize(("form", "table"), [("nf4", NF4), ("fp4", FP4)])
@pytest.mark.parametrize(("shape", "group"), [((16, 64), 64), ((5, 7), 4), ((3, 1024), 512), ((1, 1), 64), ((33, 96), 32),
                                              ((40, 130), 4096)], ids=str)
def test_four_bits_are_bitsandbytes(device: str, dtype: torch.dtype, form: str, table: list[float],
                                    shape: tuple[int, int], group: int) -> None:
    n = shape[0] * shape[1]
    packed, codes, scales = four_bits(n, group)
    wanted = (torch.tensor(table)[codes] * scales.repeat_interleave(group)[:n]).to(dtype).view(shape)
    same(expanded(device, shape, dtype, form, packed, scales, group=group), wanted)
    same(expanded(device, shape, dtype, form, packed, scales, group=group, skip=1), wanted)


@each_device
@each_type
def test_scales_that_are_codes_are_made_first(device: str, dtype: torch.dtype) -> None:
    shape, group = (96, 192), 32
    n = shape[0] * shape[1]
    packed, codes, _ = four_bits(n, group)
    blocks = n // group
    small, wide = torch.randint(0, 256, (blocks,), generator=rng(1), dtype=torch.uint8), torch.rand(-(-blocks // 256))
    table, offset = torch.randn(256, generator=rng(2)), torch.tensor(0.37)
    scales = table[small.long()] * wide.repeat_interleave(256)[:blocks] + offset
    wanted = (torch.tensor(NF4)[codes] * scales.repeat_interleave(group)).to(dtype).view(shape)
    same(expanded(device, shape, dtype, "nf4", packed, small, wide, table, offset, group=group), wanted)


@each_device
@each_type
@pytest.mark.parametrize("shape", [(16, 64), (5, 7), (1, 8), (3, 1), (130, 264)], ids=str)
def test_int8_is_llm_int8(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    codes = torch.randint(-127, 128, shape, generator=rng(), dtype=torch.int8)
    scales = torch.rand(shape[0], generator=rng(1)) * 3
    wanted = codes.to(dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
    same(expanded(device, shape, dtype, "int8", codes, scales), wanted)


@each_device
@each_type
@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (3, 256, 128), (64, 24), (2, 5, 7)], ids=str)
def test_block_fp8_is_transformers(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    blocks = [n // 128 if n % 128 == 0 else 1 for n in shape[-2:]]
    codes = (torch.randn(shape, generator=rng()) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], *blocks, generator=rng(1)) * 1e-3
    n, k = (whole // some for whole, some in zip(shape[-2:], blocks))
    wide = scales.repeat_interleave(n, -2).repeat_interleave(k, -1)        # Fp8Dequantize
    wanted = (codes.float() * wide).to(dtype)
    same(Coded(codes, scales, "fp8", dtype).expand_codes(), wanted)
    same(expanded(device, shape, dtype, "fp8", codes, scales), wanted)


@each_device
@each_type
@pytest.mark.parametrize("shape", [(2, 64, 2), (1, 3, 1), (3, 72, 5), (1, 1, 1)], ids=str)
def test_mxfp4_is_transformers(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    e, n, groups = shape
    codes = torch.randint(0, 256, (e, n, groups, 16), generator=rng(), dtype=torch.uint8)
    scales = torch.randint(1, 252, (e, n, groups), generator=rng(1), dtype=torch.uint8)
    numbers = torch.tensor(E2M1, dtype=dtype)[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)
    wanted = torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).mT     # convert_moe_packed_tensors
    same(Coded(codes, scales, "mxfp4", dtype).expand_codes(), wanted)
    same(expanded(device, (e, 32 * groups, n), dtype, "mxfp4", codes, scales), wanted)
    if n % 8 == 0:
        same(expanded(device, (e, 32 * groups, n), dtype, "mxfp4", codes, scales, skip=1), wanted)


@each_device
def test_every_scale_of_mxfp4(device: str) -> None:
    """0 and 255 too, which are 2^-127 and an infinity."""
    codes = torch.full((1, 1, 256, 16), 0x2C, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    found = expanded(device, (1, 8192, 1), torch.float32, "mxfp4", codes, scales).view(256, 32)
    power = torch.tensor([2.0 ** (e - 127) for e in range(256)], dtype=torch.float64)
    assert torch.equal(found[:, 0], (-2 * power).float()), "the low bits come first"
    assert torch.equal(found[:, 1], power.float())


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is computed inside."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = any(r.alias_info is not None for r in func._schema.returns)        # a view, or in place
        if isinstance(out, Tensor) and not aliases and func is not torch.ops.aten.empty.memory_format:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def test_beside_a_weight_that_codes_stand_for_nothing_as_large_is_made() -> None:
    """A plan counts the 16-bit weight: a mixture's layer has some GiB of them."""
    u8 = functools.partial(torch.randint, 256, dtype=torch.uint8)
    for form, codes, scales in (("mxfp4", u8((16, 64, 8, 16)), u8((16, 64, 8))),
                                ("nf4", u8((16, 64, 128)), torch.rand(16, 1, 256)),
                                ("fp8", u8((4, 1024, 256)).view(torch.float8_e4m3fn), torch.rand(4, 8, 2).bfloat16())):
        with Largest() as found:
            Coded(codes, scales, form, torch.bfloat16).expand_codes()
        assert found.nbytes <= 2 * scales.nbytes


@pytest.mark.parametrize("backward", [False, True])
def test_a_look_in_fp32_has_the_same_weights(backward: bool) -> None:
    """The trial of a template: what an op writes is no copy of what it was given."""
    codes, scales = torch.randn(64, 128).to(torch.float8_e4m3fn), torch.rand(1, 1)
    wanted = Coded(codes, scales, "fp8", torch.bfloat16).expand_codes()
    with InFp32(backward):
        found = Coded(codes, scales, "fp8", torch.bfloat16).expand_codes()
        torch.mul(wanted, wanted, out=(squares := torch.zeros_like(wanted)))
    assert found.dtype == (torch.bfloat16 if backward else torch.float32) and torch.equal(found.bfloat16(), wanted)
    assert torch.equal(squares.bfloat16(), wanted * wanted)


@each_device
def test_numbers_that_are_none_stay_so(device: str) -> None:
    codes = torch.tensor([[0x7F, 0xFF, 0x00, 0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = expanded(device, (1, 4), torch.bfloat16, "fp8", codes, torch.ones(1, 1))
    assert found.isnan().tolist() == [[True, True, False, False]] and found[0, 3].signbit()


@pytest.mark.parametrize(("form", "shape", "strands", "group", "says"), [
    ("nf4", (4, 4), (torch.zeros(7, dtype=torch.uint8), torch.ones(1)), 64, "codes has 7 elements, not 8"),
    ("nf4", (4, 4), (torch.zeros(8, dtype=torch.uint8), torch.ones(2)), 64, "scales has 2 elements, not 1"),
    ("nf4", (4, 4), (torch.zeros(8, dtype=torch.uint8), torch.ones(1)), 48, "use a power of two"),
    ("fp4", (4, 4), (torch.zeros(8, dtype=torch.int8), torch.ones(1)), 64, "codes is I8, not U8"),
    ("fp4", (4, 4), (torch.zeros(8, dtype=torch.uint8), torch.ones(1), torch.ones(1)), 64, "go together"),
    ("nf4", (4, 4), (torch.zeros(8, dtype=torch.uint8), torch.ones(1), None, torch.ones(256)), 64, "go together"),
    ("fp8", (4, 4), (torch.zeros(4, 4, dtype=torch.float8_e4m3fn), torch.ones(1, 1, dtype=torch.uint8), torch.ones(1),
                     torch.ones(256), torch.ones(1)), 0, "scales of FP8 are no codes"),
    ("int8", (4, 4), (torch.zeros(4, 4, dtype=torch.int8), torch.ones(3)), 0, "scales has 3 elements, not 4"),
    ("int8", (4, 5), (torch.zeros(4, 4, dtype=torch.int8), torch.ones(4)), 0, "out has 20 elements, not 16"),
    ("fp8", (4, 4), (torch.zeros(4, 4, dtype=torch.float8_e4m3fn), torch.ones(3, 1)), 0, "4 codes in 3 blocks"),
    ("mxfp4", (1, 32, 4), (torch.zeros(1, 4, 1, 8, dtype=torch.uint8), torch.ones(1, 4, 1, dtype=torch.uint8)), 0,
     r"\[E, N, G, 16\]"),
], ids=str)
def test_what_does_not_go_together_is_refused(form: str, shape: tuple[int, ...], strands: tuple[Tensor | None, ...],
                                              group: int, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        ops.expand_codes_(torch.empty(shape), form, *strands, group=group)


@each_device
def test_opcheck(device: str) -> None:
    tests = ("test_schema", "test_faketensor")
    packed, _, scales = four_bits(64, 32)
    args = [t.to(device) for t in (packed, scales)]
    torch.library.opcheck(torch.ops.megatrain.expand_codes, (*args, None, None, None, 0, 32,
                                                             torch.empty(8, 8, device=device)), test_utils=tests)
    codes = torch.ones(8, 8, dtype=torch.int8, device=device)
    torch.library.opcheck(torch.ops.megatrain.expand_codes, (codes, torch.ones(8, device=device), None, None, None, 2, 0,
                                                             torch.empty(8, 8, device=device)), test_utils=tests)
