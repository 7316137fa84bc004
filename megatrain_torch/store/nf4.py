"""bitsandbytes' NF4 codes, made by an op of ours: of 16 bits a core makes some 1 GB/s of them, of the package 0.05."""
from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops import nf4_codes

_KNOWN = {"blocksize", "compress_statistics", "quant_type", "quant_storage"}         # of quantize_4bit's arguments


@contextlib.contextmanager
def made_here() -> Iterator[None]:
    """Meanwhile the package's quantize_4bit makes codes so, where it is there."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield
        return
    package: Any = importlib.import_module("bitsandbytes.functional")
    own = package.quantize_4bit

    @functools.wraps(own)
    def quantize_4bit(A: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Any]:
        if args or not _is_ours(A, more):
            return own(A, *args, **more)
        return _quantized(package, A, more.get("blocksize") or 64, more.get("compress_statistics", False))

    package.quantize_4bit = quantize_4bit
    try:
        yield
    finally:
        package.quantize_4bit = own


def _is_ours(A: Tensor, more: dict[str, Any]) -> bool:
    return (A.device.type == "cpu" and A.dtype in (torch.float32, torch.bfloat16, torch.float16) and set(more) <= _KNOWN
            and more.get("quant_type") == "nf4" and more.get("quant_storage", torch.uint8) == torch.uint8)


def _quantized(package: Any, A: Tensor, blocksize: int, twice: bool) -> tuple[Tensor, Any]:
    """As quantize_4bit: ([codes, 1], what they are). twice: scales are codes of 8 bits, less their mean."""
    codes, scales = nf4_codes(A.detach().contiguous(), blocksize)
    known = {"shape": A.shape, "dtype": A.dtype, "blocksize": blocksize, "quant_type": "nf4",
             "code": package.get_4bit_type("nf4", device=A.device)}
    if twice:
        offset = scales.mean()
        scales, state = package.quantize_blockwise(scales - offset, blocksize=256)
        known |= {"offset": offset, "state2": state}
    return codes.unsqueeze(1), package.QuantState(absmax=scales, **known)
