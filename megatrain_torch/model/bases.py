"""Models whose frozen weights are codes, made or kept while a checkpoint is read: mt.from_pretrained(base=...)."""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.coded import Coded, to_fp8
from ..base.codes import coded
from ..base.errors import MegatrainError
from ..base.units import output_embeddings
from ..plans.host_memory import kept_apart

BASES = ("nf4", "int8", "fp8", "mxfp4")


def with_base(cls: Any, path: str | Path, base: str, dtype: torch.dtype | None, **kwargs: Any) -> Any:
    """cls.from_pretrained, on the CPU, with weights of its linear layers as codes. What is 16 bits in the files is
    mapped, and quantised a tensor at a time.

    Raises:
        MegatrainError: no such base; or the checkpoint is quantised in another way.
    """
    if base not in BASES:
        raise MegatrainError(f"base={base!r}: use {', '.join(map(repr, BASES[:-1]))} or {BASES[-1]!r}")
    if "quantization_config" in kwargs:
        raise MegatrainError("base= and quantization_config= both say how weights are quantised: give one of the two")
    tf = sys.modules.get("transformers") or __import__("transformers")
    config = tf.AutoConfig.from_pretrained(path)
    there = _method(config)
    if there and there != base:
        known = f"; base={there!r} keeps it as it is" if there in ("fp8", "mxfp4") else "; leave base out"
        raise MegatrainError(f"base={base!r}: {path} is quantised already ({there}){known}")
    if base == "mxfp4" and not there:
        raise MegatrainError(f"base='mxfp4': {path} is not; it is kept where a checkpoint has it (GPT-OSS), not made")
    how = {"dtype": dtype or "auto", "device_map": "cpu", **kwargs}
    with _kept(), kept_apart():
        found = cls.from_pretrained(path, **how, **_settings(tf, base, bool(there), dtype or config.dtype))
        model = found[0] if isinstance(found, tuple) else found
        if base == "fp8" and not there:
            _to_fp8(model)
    kept = [p for _, _, p, _ in coded(model)]
    if not kept:
        raise MegatrainError(f"base={base!r}: no weight of {path} is kept as codes: there is no linear layer that falls "
                             f"into blocks, or transformers {tf.__version__} has expanded them; leave base out")
    for p in kept:
        p.requires_grad_(False)
    return found


def _method(config: Any) -> str:
    """How a checkpoint is quantised; "": it is not."""
    said = getattr(config, "quantization_config", None) or {}
    method = said.get("quant_method", "") if isinstance(said, dict) else getattr(said, "quant_method", "")
    return str(getattr(method, "value", method))


def _settings(tf: Any, base: str, there: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """Arguments for from_pretrained."""
    if base == "nf4":
        return {"quantization_config": tf.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype or torch.bfloat16)}
    if base == "int8":
        return {"quantization_config": tf.BitsAndBytesConfig(load_in_8bit=True)}
    kind = tf.FineGrainedFP8Config if base == "fp8" else tf.Mxfp4Config
    return {"quantization_config": kind(dequantize=True)} if there else {}


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """transformers expands what it reads of fp8 and MXFP4: meanwhile codes are what it gets, which stand for that."""
    from transformers.integrations import finegrained_fp8, mxfp4
    fp8, four = finegrained_fp8.Fp8Dequantize._dequantize_one, mxfp4.dequantize_convertops

    def keep_fp8(self: Any, codes: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        eight = _eight_bits(codes)
        if eight is None or scales.dtype != torch.float32 or scales.dim() != codes.dim():
            return fp8(self, codes, scales, output_dtype)
        return nn.Parameter(Coded(eight, scales, "fp8", output_dtype or torch.bfloat16), requires_grad=False)

    def keep_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
        return nn.Parameter(Coded(blocks, scales, "mxfp4", dtype), requires_grad=False)

    finegrained_fp8.Fp8Dequantize._dequantize_one, mxfp4.dequantize_convertops = keep_fp8, keep_mxfp4
    try:
        yield
    finally:
        finegrained_fp8.Fp8Dequantize._dequantize_one, mxfp4.dequantize_convertops = fp8, four


def _eight_bits(codes: Tensor) -> Tensor | None:
    """In E4M3; None: they are not. Some versions of transformers have widened them by then, which is exact."""
    if codes.dtype not in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        return None
    eight = codes.to(torch.float8_e4m3fn)
    return eight if torch.equal(eight.to(torch.float32), codes.to(torch.float32)) else None


def _to_fp8(model: nn.Module) -> None:
    """Linear layers but the head, where they fall into blocks."""
    head = output_embeddings(model)
    for m in model.modules():
        if type(m) is nn.Linear and m is not head and (made := to_fp8(m.weight.detach())) is not None:
            m.weight = nn.Parameter(made, requires_grad=False)
