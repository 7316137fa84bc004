"""Weights of a frozen base as codes with scales, which stand for 16-bit ones: block-fp8 and MXFP4, as published, and
experts of a mixture in NF4.

    w = Coded(codes, scales, "fp8", torch.bfloat16)      # of the shape and type of the weight that it stands for
    w.expand_codes()                                     # that weight, by its package's own arithmetic

Whatever is done with one is done with the weight that it stands for, made for that operation; but for copies, and for
`stack` and `cat`, by which experts' weights come together. A streamed one is expanded once for each window.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

WIDE_MOST = 1 << 24                  # numbers that are made in fp32 before they are rounded; or one expert's
FP8_BLOCK = 128                      # rows, and columns, that share a scale of what is made here
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4_BLOCK = 64                       # elements that share a scale
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
_ATEN = torch.ops.aten


def _fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes: [..., N, K]. scales: [..., n, k], of blocks of N/n rows and K/k columns. codes * scales in fp32, rounded
    once. Source: Fp8Dequantize of transformers."""
    n, k = scales.shape[-2:]
    rows, columns = codes.shape[-2:]
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    some = max(1, WIDE_MOST // max(1, rows // n * columns))    # rows of blocks
    blocks, made = (t.reshape(-1, rows // n, k, columns // k).split(some) for t in (codes, out))
    for own, to, scale in zip(blocks, made, scales.to(torch.float32).reshape(-1, 1, k, 1).split(some)):
        to.copy_(own.to(torch.float32) * scale)
    return out


def _mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes: [E, N, G, 16], two of a byte, the lower first. scales: [E, N, G], exponents of 2 above 127. Gives
    [E, 32 G, N], exactly. Source: convert_moe_packed_tensors of transformers."""
    pairs = torch.tensor([(low, high) for high in _FP4 for low in _FP4], dtype=dtype, device=codes.device)
    out = torch.empty(_shape(codes, "mxfp4"), dtype=dtype, device=codes.device)
    for expert, own, scale in zip(out, codes, scales):
        numbers = pairs.index_select(0, own.flatten().int()).view(*scale.shape, -1)
        expert.copy_(torch.ldexp(numbers, (scale.to(torch.int32) - 127).unsqueeze(-1)).flatten(-2).t())
    return out


def _nf4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes: [E, N, K/2], two of a byte, the higher first. scales: [E, 1, N K / 64] fp32, of neighbours in an expert's
    memory. Gives [E, N, K]: numbers * scales in fp32, rounded once. Source: dequantize_4bit of bitsandbytes."""
    pairs = torch.tensor([(a, b) for a in _NF4 for b in _NF4], device=codes.device)
    out = torch.empty(_shape(codes, "nf4"), dtype=dtype, device=codes.device)
    for expert, own, scale in zip(out, codes, scales):
        numbers = pairs.index_select(0, own.flatten().int()).view(-1, NF4_BLOCK)
        expert.copy_((numbers * scale.view(-1, 1)).view(expert.shape))
    return out


_EXPANDS = {"fp8": _fp8, "mxfp4": _mxfp4, "nf4": _nf4}


def _shape(codes: Tensor, form: str) -> torch.Size:
    if form == "fp8":
        return codes.shape
    if form == "nf4":
        return torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]))
    experts, rows, groups, nbytes = codes.shape
    return torch.Size((experts, 2 * groups * nbytes, rows))


class Coded(Tensor):
    """[shape], dtype: of the weight that it stands for; frozen.

    Attributes:
        codes, scales: its strands. form: "fp8", "mxfp4" or "nf4".
    """

    codes: Tensor
    scales: Tensor
    form: str

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Coded:
        return Tensor._make_wrapper_subclass(cls, _shape(codes, form), dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.form = codes, scales, form

    __torch_function__ = torch._C._disabled_torch_function_impl

    def expand_codes(self) -> Tensor:
        return _EXPANDS[self.form](self.codes, self.scales, self.dtype)

    def over(self, codes: Tensor, scales: Tensor) -> Coded:
        return type(self)(codes, scales, self.form, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.form, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], said: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scales"], *said)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Coded({self.form}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default):
            return args[0].over(func(args[0].codes), func(args[0].scales))
        if func is _ATEN._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            where = {"device": kwargs.get("device")}
            return args[0].over(args[0].codes.to(**where), args[0].scales.to(**where))
        if func in (_ATEN.stack.default, _ATEN.cat.default) and (joined := _joined(func, *args)) is not None:
            return joined
        return func(*_expanded(args), **_expanded(kwargs))


def _expanded(value: Any) -> Any:
    return tree_map_only(Coded, Coded.expand_codes, value)


def _joined(func: Any, tensors: list[Any], dim: int = 0) -> Coded | None:
    """Blocks of fp8 that come together as whole ones: their codes do, and their scales; None: else."""
    first = tensors[0]
    alike = all(type(t) is type(first) and t.form == "fp8" and t.shape == first.shape
                and t.scales.shape == first.scales.shape for t in tensors)
    if not alike or not isinstance(first, Coded) or (func is _ATEN.stack.default and dim != 0):
        return None
    return first.over(func([t.codes for t in tensors], dim), func([t.scales for t in tensors], dim))


def to_fp8(w: Tensor) -> Coded | None:
    """[N, K] in blocks of 128 by 128, each scaled to its largest; None: it does not fall into such. Source: Fp8Quantize
    of transformers."""
    rows, columns = w.shape
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        return None
    kind = torch.float8_e4m3fn
    limits = torch.finfo(kind)
    blocks = w.to(torch.float32).reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    most = blocks.abs().amax(dim=(-3, -1))
    scales = torch.where(most > 0, limits.max / torch.where(most > 0, most, 1.0), 1.0)
    codes = torch.clamp(blocks * scales.unsqueeze(-1).unsqueeze(-3), limits.min, limits.max).to(kind)
    return Coded(codes.reshape(w.shape), 1.0 / scales, "fp8", w.dtype)


def nf4_strands(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Forms of codes and scales for a stack of experts [E, N, K]; None: it does not fall into blocks."""
    experts, rows, columns = shape
    if columns % 2 or rows * columns % NF4_BLOCK:
        return None
    return (experts, rows, columns // 2), (experts, 1, rows * columns // NF4_BLOCK)


def quantization_of(model: nn.Module) -> dict[str, Any] | None:
    """What a checkpoint's config says of such weights; None: the model has none, or its config says it already."""
    own = {id(m): p.form for m in model.modules() for p in m._parameters.values() if isinstance(p, Coded)
           and p.form != "nf4"}
    if not own:
        return None
    rest = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding)) and id(m) not in own]
    if "mxfp4" in own.values():
        return {"quant_method": "mxfp4", "modules_to_not_convert": rest}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": rest}
