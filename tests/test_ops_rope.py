"""rope: against fp64 within a stated bound, in every layout, on every device.

Bound. `u` is half a unit of the type. A number comes of two products and a sum, each rounded to fp32, then rounded
once more: u |y| + 2 * 2^-24 (|a cos| + |b sin|). transformers computes q * cos + rotate_half(q) * sin in q's type, a
rounding after each of the three: it is farther from the truth in 16 bits, and ours is not its bits.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import op_cases
import pytest
import reference_ops as reference
import torch
from op_cases import TYPES, each_device, each_type, numbers, shifted, turned, wide_apart
from torch import Tensor

from megatrain_torch import ops

each_way = pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
each_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


class Size(NamedTuple):
    """batch, tokens, heads of q and of k, numbers of a head, those that are turned, cos and sin for each batch."""

    b: int
    s: int
    hq: int
    hk: int
    d: int
    r: int
    own: bool = False


SIZES = [Size(2, 9, 4, 2, 128, 128), Size(1, 33, 7, 1, 64, 64, True), Size(2, 5, 3, 3, 80, 32), Size(3, 4, 2, 1, 96, 96, True),
         Size(1, 3, 28, 4, 128, 128), Size(2, 3, 40, 8, 256, 64), Size(1, 1, 1, 1, 2, 2), Size(2, 3, 2, 1, 7, 4),
         Size(2, 3, 2, 2, 20, 12), Size(1, 2, 3, 1, 600, 600), Size(1, 5, 2, 2, 32, 0), Size(1, 5000, 1, 1, 16, 16)]
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda n: "x".join(map(str, n)))


class Tensors:
    """q, k, v; cos and sin as no angle has them: different in both numbers of a pair, so that none is mistaken."""

    def __init__(self, device: str, dtype: torch.dtype, n: Size, angles: torch.dtype | None = None) -> None:
        self.q, self.k, self.v = (numbers(device, dtype, n.b, n.s, h, n.d, seed=i) for i, h in enumerate((n.hq, n.hk, n.hk)))
        shape = (n.b if n.own else 1, n.s, n.r)
        self.cos, self.sin = (numbers(device, angles or dtype, *shape, seed=i) for i in (3, 4))

    def check(self, x: Tensor, out: Tensor, interleaved: bool = False, inverse: bool = False) -> None:
        """out [B, S, h, D] against x turned in fp64; what is not turned to the bit."""
        cos, sin, r = self.cos.double(), self.sin.double(), self.cos.shape[-1]
        turn = reference.rope_inverse if inverse else reference.rope
        exact, a = turn(x.double(), cos, sin, interleaved)[..., :r], x[..., :r].double().abs()
        c, s = cos.abs().unsqueeze(2), sin.abs().unsqueeze(2)
        terms = a * c + (partner(a * s, interleaved) if inverse else partner(a, interleaved) * s)
        info = torch.finfo(x.dtype)
        bound = TYPES[x.dtype] * exact.abs() + 2 * 2**-24 * terms + info.smallest_normal * info.eps
        assert ((out[..., :r].double() - exact).abs() <= bound).all()
        assert torch.equal(out[..., r:], x[..., r:])


def partner(x: Tensor, interleaved: bool) -> Tensor:
    """Each number's other one."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(x.shape[-1] // 2, -1)


# ---- the formulas ----

@each_pairing
def test_real_angles_turn_back(interleaved: bool) -> None:
    x, t = numbers("cpu", torch.float64, 2, 5, 3, 16), numbers("cpu", torch.float64, 1, 5, 8)
    angles = t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)
    there = reference.rope(x, angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(reference.rope_inverse(there, angles.cos(), angles.sin(), interleaved), x)


# ---- the op ----

@each_device
@each_type
@each_size
@each_pairing
@each_way
def test_rope(device: str, dtype: torch.dtype, size: Size, interleaved: bool, inverse: bool) -> None:
    t = Tensors(device, dtype, size)
    q, k = torch.empty_like(t.q), torch.empty_like(t.k)
    ops.rope(t.q, t.k, t.cos, t.sin, q, k, interleaved=interleaved, inverse=inverse)
    t.check(t.q, q, interleaved, inverse)
    t.check(t.k, k, interleaved, inverse)


@each_device
@each_type
def test_angles_may_be_fp32(device: str, dtype: torch.dtype) -> None:
    t = Tensors(device, dtype, SIZES[0], torch.float32)
    q, k, v = (torch.empty_like(x) for x in (t.q, t.k, t.v))
    ops.rope(t.q, t.k, t.cos, t.sin, q, k, v=t.v, out_v=v)
    t.check(t.q, q)
    t.check(t.k, k)
    assert torch.equal(v, t.v)


def in_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """As a fused projection leaves them."""
    return torch.cat((q, k, v), 2).split((q.shape[2], k.shape[2], v.shape[2]), 2)


def each(put: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *xs: tuple(map(put, xs))


LAYOUTS = {"in_qkv": in_qkv} | {f.__name__: each(f) for f in (turned, shifted, wide_apart)}


@each_device
@each_type
@pytest.mark.parametrize("layout", LAYOUTS)
@each_way
@pytest.mark.parametrize("r", [128, 32])
def test_layouts_in_place_and_not(device: str, dtype: torch.dtype, layout: str, inverse: bool, r: int) -> None:
    t = Tensors(device, dtype, Size(2, 9, 4, 2, 128, r, True))
    before = LAYOUTS[layout](t.q, t.k, t.v)
    dense = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in before)
    q, k, v = before
    ops.rope(q, k, t.cos, t.sin, *dense[:2], v=v, out_v=dense[2], inverse=inverse)
    t.check(t.q, dense[0], inverse=inverse)
    t.check(t.k, dense[1], inverse=inverse)
    assert all(torch.equal(x, y) for x, y in zip(before, (t.q, t.k, t.v))) and torch.equal(dense[2], t.v)
    into = LAYOUTS[layout](*(torch.zeros_like(x) for x in (t.q, t.k, t.v)))
    ops.rope(t.q, t.k, t.cos, t.sin, *into[:2], v=t.v, out_v=into[2], inverse=inverse)
    ops.rope(q, k, t.cos, t.sin, q, k, v=v, out_v=v, inverse=inverse)
    for x, y, z in zip(before, dense, into):
        assert torch.equal(x, y) and torch.equal(z, y)


@each_device
def test_angles_may_be_expanded_over_the_batch(device: str) -> None:
    t = Tensors(device, torch.bfloat16, SIZES[0])
    q, k, q2, k2 = (torch.empty_like(x) for x in (t.q, t.k, t.q, t.k))
    ops.rope(t.q, t.k, t.cos, t.sin, q, k)
    ops.rope(t.q, t.k, t.cos.expand(2, -1, -1), t.sin.expand(2, -1, -1), q2, k2)
    assert torch.equal(q, q2) and torch.equal(k, k2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_type
@each_size
@each_pairing
@each_way
def test_cuda_has_the_bits_of_the_cpu(dtype: torch.dtype, size: Size, interleaved: bool, inverse: bool) -> None:
    t = Tensors("cpu", dtype, size, torch.float32)
    here, there = (torch.empty_like(t.q), torch.empty_like(t.k)), (t.q.cuda(), t.k.cuda())
    ops.rope(t.q, t.k, t.cos, t.sin, *here, interleaved=interleaved, inverse=inverse)
    ops.rope(*there, t.cos.cuda(), t.sin.cuda(), *there, interleaved=interleaved, inverse=inverse)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there))


@each_device
def test_no_tokens_are_turned(device: str) -> None:
    t = Tensors(device, torch.float32, Size(2, 0, 4, 2, 16, 16))
    ops.rope(t.q, t.k, t.cos, t.sin, t.q, t.k)


@pytest.mark.parametrize("name", ["llama", "cohere"])
def test_ours_is_that_of_transformers_and_closer_to_the_truth(name: str) -> None:
    """The same numbers within three roundings of bf16; and a smaller error on average."""
    from importlib import import_module

    theirs = import_module(f"transformers.models.{name}.modeling_{name}").apply_rotary_pos_emb
    interleaved = name == "cohere"
    t = Tensors("cpu", torch.bfloat16, Size(2, 33, 4, 2, 64, 64, True))
    angle = numbers("cpu", torch.float32, 2, 33, 32)
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    t.cos, t.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    q, k = torch.empty_like(t.q), torch.empty_like(t.k)
    ops.rope(t.q, t.k, t.cos, t.sin, q, k, interleaved=interleaved)
    for x, ours, other in zip((t.q, t.k), (q, k), theirs(t.q.transpose(1, 2), t.k.transpose(1, 2), t.cos, t.sin)):
        exact = reference.rope(x.double(), t.cos.double(), t.sin.double(), interleaved)
        other = other.transpose(1, 2)
        size = x.double().abs() + partner(x.double().abs(), interleaved)
        assert ((other.double() - exact).abs() <= 3 * 2**-8 * size).all()
        assert (ours.double() - exact).norm() <= (other.double() - exact).norm()


@each_device
def test_torch_knows_what_rope_writes(device: str) -> None:
    t = Tensors(device, torch.bfloat16, SIZES[0])
    into = [torch.empty_like(x) for x in (t.q, t.k, t.v)]
    op = torch.ops.megatrain.rope
    torch.library.opcheck(op, (t.q, t.k, t.cos, t.sin, *into[:2], t.v, into[2], False, False))
    torch.library.opcheck(op, (t.q, t.k, t.cos, t.sin, *into[:2], None, None, True, True))


def refused(**changed: object) -> Callable[[], None]:
    """rope with one argument that does not fit."""
    def call() -> None:
        q, k, angles = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 2, 8), torch.ones(1, 3, 8)
        args = {"q": q, "k": k, "cos": angles, "sin": angles, "out_q": torch.empty_like(q),
                "out_k": torch.empty_like(k), **changed}
        ops.rope(**args)
    return call


memory = torch.ones(2, 3, 8, 8)
REFUSED = {
    "integers": (refused(q=torch.ones(2, 3, 4, 8).int()), "rope: q must be float32"),
    "three dimensions": (refused(q=torch.ones(6, 4, 8)), "q has 3 dimensions and cos 3, not 4 and 3"),
    "k's tokens": (refused(k=torch.ones(2, 4, 2, 8)), r"k has 4 dimensions and 128 elements; \[2, 3, any, 8\]"),
    "k's type": (refused(k=torch.ones(2, 3, 2, 8).half()), "k is F16, not F32"),
    "out_q's heads": (refused(out_q=torch.ones(2, 3, 5, 8)), r"out_q has .* \[2, 3, its input's heads, 8\]"),
    "columns": (refused(q=torch.ones(2, 3, 8, 4).mT), "q has a stride of 4 in its last dimension"),
    "too many angles": (refused(cos=torch.ones(1, 3, 10)), "cos has 10 numbers for heads of 8"),
    "an odd number": (refused(cos=torch.ones(1, 3, 7)), "cos has 7 numbers"),
    "angles' type": (refused(cos=torch.ones(1, 3, 8).half()), r"cos is F16, neither q's type \(F32\) nor F32"),
    "sin's type": (refused(sin=torch.ones(1, 3, 8).half()), "sin is F16, not F32"),
    "sin's tokens": (refused(sin=torch.ones(1, 4, 8)), r"sin has 3 dimensions and 32 elements; \[1 or 2, 3, 8\]"),
    "v alone": (refused(v=torch.ones(2, 3, 2, 8)), "out_v goes with v"),
    "v's heads": (refused(v=torch.ones(2, 3, 4, 8), out_v=torch.ones(2, 3, 4, 8)), "v has 4 dimensions and 192"),
    "shifted": (refused(q=memory[:, :, :4], out_q=memory.view(-1)[:192].view(2, 3, 4, 8)), "out_q begins where q does"),
    "written twice": (refused(out_q=torch.ones(1, 3, 4, 8).expand(2, -1, -1, -1)), "stride of 0 in dimension 0"),
}


test_what_rope_cannot_do_it_refuses = each_device(op_cases.refused(REFUSED))
