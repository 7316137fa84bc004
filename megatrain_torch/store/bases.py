"""Models whose frozen weights are codes, made or kept while a checkpoint is read: mt.from_pretrained(base=...).

bitsandbytes' NF4 codes are made by an op of ours: of 16 bits a core makes some 1 GB/s of them, of the package 0.05.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base import patches
from ..base.codes import FP8_BLOCK, NF4_BLOCK, Coded, coded, to_fp8
from ..base.errors import MegatrainError
from ..base.units import output_embeddings
from ..ops import nf4_codes

BASES = ("nf4", "int8", "fp8", "mxfp4")


def with_base(cls: Any, path: str | Path, base: str, dtype: torch.dtype | None, **kwargs: Any) -> Any:
    """cls.from_pretrained, on the CPU, with weights of its linear layers as codes, and with "nf4" its experts that lie
    in one tensor. What is 16 bits in the files is mapped, and quantised a tensor at a time. Raises MegatrainError where
    there is no such base; the checkpoint is quantised in another way; or no weight becomes codes."""
    if "quantization_config" in kwargs:
        raise MegatrainError("base= and quantization_config= both say how weights are quantised: give one of the two")
    import transformers as tf
    config = tf.AutoConfig.from_pretrained(path)
    check_base(config, path, base)
    settings = expands(config)
    if base == "nf4":
        settings = {"quantization_config": tf.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype or config.dtype or torch.bfloat16)}
    elif base == "int8":
        settings = {"quantization_config": tf.BitsAndBytesConfig(load_in_8bit=True)}
    how = {"dtype": dtype or "auto", "device_map": "cpu", **kwargs, **settings}
    with _in_pages_of_their_own(), contextlib.ExitStack() as meanwhile:
        for attribute in _makers() if base == "nf4" else _keepers(tf, base) if _method(config) else ():
            meanwhile.callback(patches.replaced(*attribute))
        found = cls.from_pretrained(path, **how)
        model = found[0] if isinstance(found, tuple) else found
        if base == "nf4":
            _to_nf4(model)
        if base == "fp8" and not _method(config):
            _to_fp8(model)
    for p in _codes_of(model, base, path):
        p.requires_grad_(False)
    vars(model).pop("hf_device_map", None)               # where it was made; accelerate would have it trained there
    return found


_MMAP_THRESHOLD, _OWN_BYTES, _USUAL_BYTES = -3, 1 << 20, 32 << 20      # mallopt's name; the last is where glibc ends up


@contextlib.contextmanager
def _in_pages_of_their_own() -> Iterator[None]:
    """Meanwhile malloc has each large tensor so, and they go back when it is freed: small ones that stay would hold the
    memory between them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda name, value: None)        # glibc's
    mallopt(_MMAP_THRESHOLD, _OWN_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL_BYTES)


def _codes_of(model: nn.Module, base: str, path: str | Path) -> list[nn.Parameter]:
    """Raises: MegatrainError: there are none: nothing would be as it was asked for."""
    found = [p for _, _, p, _ in coded(model)]
    if not found:
        raise MegatrainError(f"base={base!r}: no weight of {path} is kept as codes: there is no linear layer that "
                             f"falls into blocks, or transformers {sys.modules['transformers'].__version__} has "
                             "expanded them; leave base out")
    return found


def check_base(config: Any, path: str | Path, base: str) -> str:
    """How a checkpoint is quantised already, "" where it is not. Raises MegatrainError where there is no such base, or
    it is quantised in another way, or not in this one, which is not made."""
    if base not in BASES:
        raise MegatrainError(f"base={base!r}: use {', '.join(map(repr, BASES[:-1]))} or {BASES[-1]!r}")
    there = _method(config)
    if there and there != base:
        known = f"; base={there!r} keeps it as it is" if there in ("fp8", "mxfp4") else "; leave base out"
        raise MegatrainError(f"base={base!r}: {path} is quantised already ({there}){known}")
    if base == "mxfp4" and not there:
        raise MegatrainError(f"base='mxfp4': {path} is not; it is kept where a checkpoint has it (GPT-OSS), not made")
    return there


def expands(config: Any) -> dict[str, Any]:
    """Arguments for from_pretrained with which a checkpoint of codes is read as the 16-bit weights they stand for."""
    there = _method(config)
    if there not in ("fp8", "mxfp4"):
        return {}
    tf = sys.modules["transformers"]
    return {"quantization_config": (tf.FineGrainedFP8Config if there == "fp8" else tf.Mxfp4Config)(dequantize=True)}


def _method(config: Any) -> str:
    """How a checkpoint is quantised; "": it is not."""
    said = getattr(config, "quantization_config", None) or {}
    method = said.get("quant_method", "") if isinstance(said, dict) else getattr(said, "quant_method", "")
    return str(getattr(method, "value", method))


# What is replaced while a model is read: (module or class, name, value).
Attributes = Iterator[tuple[Any, str, Any]]
_ARGUMENTS = {"blocksize", "compress_statistics", "quant_type", "quant_storage"}         # of quantize_4bit
_WIDENED = torch.float8_e4m3fn, torch.bfloat16, torch.float32                            # codes that are read


def _makers() -> Attributes:
    """bitsandbytes' quantize_4bit makes codes by our op; experts that transformers has put together become codes before
    it does so with the next."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    put = loading.set_param_for_module

    def set_param_for_module(model: nn.Module, name: str, value: Tensor, *rest: Any, **more: Any) -> Any:
        return put(model, name, value if (made := _nf4(name, value)) is None else made, *rest, **more)

    yield loading, "set_param_for_module", set_param_for_module
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    package: Any = importlib.import_module("bitsandbytes.functional")
    own = package.quantize_4bit

    @functools.wraps(own)
    def quantize_4bit(A: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Any]:
        """As the package's: ([codes, 1], what they are)."""
        kinds = torch.float32, torch.bfloat16, torch.float16
        if (args or A.device.type != "cpu" or A.dtype not in kinds or set(more) - _ARGUMENTS
                or more.get("quant_type") != "nf4" or more.get("quant_storage", torch.uint8) != torch.uint8):
            return own(A, *args, **more)
        blocksize = more.get("blocksize") or 64
        codes, scales = nf4_codes(A.detach().contiguous(), blocksize)
        known = {"shape": A.shape, "dtype": A.dtype, "blocksize": blocksize, "quant_type": "nf4",
                 "code": package.get_4bit_type("nf4", device=A.device)}
        if more.get("compress_statistics", False):       # scales are codes of 8 bits, less their mean
            offset = scales.mean()
            scales, state = package.quantize_blockwise(scales - offset, blocksize=256)
            known |= {"offset": offset, "state2": state}
        return codes.unsqueeze(1), package.QuantState(absmax=scales, **known)

    yield package, "quantize_4bit", quantize_4bit


def _keepers(tf: Any, base: str) -> Attributes:
    """transformers expands what it reads of fp8 and MXFP4: codes are what it gets, which stand for that. Raises
    MegatrainError where this version of it reads them in another way."""
    from transformers.integrations import finegrained_fp8, mxfp4
    if not (hasattr(finegrained_fp8, "Fp8Dequantize") and hasattr(mxfp4, "dequantize_convertops")):
        raise MegatrainError(f"base={base!r}: transformers {tf.__version__} expands a checkpoint's codes in a way that "
                             "is not known here; that of 5.17 to 5.23 is")
    own = finegrained_fp8.Fp8Dequantize._dequantize_one

    def keep_fp8(self: Any, codes: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        # Some versions of transformers have widened codes by now, which is exact.
        eight = codes.to(torch.float8_e4m3fn) if codes.dtype in _WIDENED else None
        if eight is None or scales.dtype != torch.float32 or scales.dim() != codes.dim() \
                or not torch.equal(eight.to(torch.float32), codes.to(torch.float32)):
            return own(self, codes, scales, output_dtype)
        block = getattr(self.hf_quantizer.quantization_config, "weight_block_size", None) or (1, 1)
        ends = zip(codes.shape[-2:], block, scales.shape[-2:])
        if any(n % size and blocks == n // size + 1 for n, size, blocks in ends):
            # The last rows or columns of blocks reach beyond the matrix. DeepSeek-V3 has one of 576 rows, of which
            # transformers refuses the scales: it is read as the 16-bit weights that its codes stand for.
            for dim, size in zip((-2, -1), block):
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
            return (eight.to(torch.float32) * scales).to(output_dtype or torch.bfloat16)
        return nn.Parameter(Coded(eight, scales, "fp8", output_dtype or torch.bfloat16), requires_grad=False)

    def keep_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
        return nn.Parameter(Coded(blocks, scales, "mxfp4", dtype), requires_grad=False)

    yield finegrained_fp8.Fp8Dequantize, "_dequantize_one", keep_fp8
    yield mxfp4, "dequantize_convertops", keep_mxfp4


def _nf4(name: str, w: Tensor) -> nn.Parameter | None:
    """A stack of experts as codes, each of them as bitsandbytes quantises it; None: it is none, or is that already, or
    does not fall into blocks."""
    if "expert" not in name or not w.is_floating_point() or isinstance(w, Coded) or w.dim() != 3:
        return None
    experts, rows, columns = w.shape
    if columns % 2 or rows * columns % NF4_BLOCK:
        return None
    codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(experts, 1, rows * columns // NF4_BLOCK, dtype=torch.float32, device=w.device)
    for expert, own, scale in () if w.is_meta else zip(w.detach(), codes, scales):
        for to, made in zip((own, scale), nf4_codes(expert.cpu().contiguous(), NF4_BLOCK)):
            to.copy_(made.view(to.shape))
    return nn.Parameter(Coded(codes, scales, "nf4", w.dtype), requires_grad=False)


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Parameters of three dimensions: their modules' names, these, their own."""
    for prefix, m in model.named_modules():
        yield from ((prefix, m, n, p) for n, p in list(m._parameters.items()) if p is not None and p.dim() == 3)


def _to_nf4(model: nn.Module) -> None:
    """Experts that lie in one tensor, and are not codes yet."""
    for prefix, m, name, p in _stacks(model):
        if (made := _nf4(f"{prefix}.{name}", p)) is not None:
            setattr(m, name, made)


# ---- the same without weights, for plans ---------------------------------------------------------

def shape_codes(model: nn.Module, config: Any, base: str, dtype: torch.dtype) -> None:
    """Weights of the linear layers of a model on the meta device become what with_base makes or keeps, or refuses."""
    name = config._name_or_path or type(config).__name__
    there = check_base(config, name, base)
    if base in ("nf4", "int8"):
        _shape_by_bitsandbytes(model, base, dtype)
        if base == "nf4":
            _to_nf4(model)
    elif base == "fp8":
        _to_fp8(model, bool(there))
    for _, m, n, p in _stacks(model) if base == "mxfp4" else ():         # GPT-OSS: 32 of a column in a block
        if n in ("gate_up_proj", "down_proj"):
            form = p.shape[0], p.shape[2], p.shape[1] // 32
            codes, scales = (torch.empty(s, dtype=torch.uint8, device="meta") for s in ((*form, 16), form))
            setattr(m, n, nn.Parameter(Coded(codes, scales, "mxfp4", p.dtype), requires_grad=False))
    _codes_of(model, base, name)


FORMS = "bitsandbytes.forms"         # not a module of the package: formats are known by the names of classes


def _shape_by_bitsandbytes(model: Any, base: str, dtype: torch.dtype) -> None:
    """As transformers' replace_with_bnb_linear and its quantizer leave a model, by classes of the same names that have
    the form alone: the package need not be there."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    def some(n: tuple[int, ...], kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=kind, device="meta")

    sys.modules.setdefault(FORMS, sys.modules[__name__])
    of_linear, of_weight = ("Linear4bit", "Params4bit") if base == "nf4" else ("Linear8bitLt", "Int8Params")
    of_linear = type(of_linear, (_Form,), {"__module__": FORMS, "forward": _Form.forward})
    of_weight = type(of_weight, (nn.Parameter,), {"__module__": FORMS})
    rest = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]
    for name, m in list(model.named_modules()):
        if type(m) not in (nn.Linear, Conv1D) or not should_convert_module(name, rest):
            continue
        rows, columns = m.weight.shape if type(m) is nn.Linear else m.weight.shape[::-1]
        with torch.device("meta"):
            linear = _Form(columns, rows, m.bias is not None).to(dtype)
        if base == "nf4":        # double quantisation: a scale of a byte for 64 weights, an fp32 one for 256 of these
            blocks = -(-rows * columns // 64)
            nested = types.SimpleNamespace(absmax=some((-(-blocks // 256),)), code=some((256,)), blocksize=256)
            state = types.SimpleNamespace(
                absmax=some((blocks,), torch.uint8), shape=torch.Size((rows, columns)), code=some((16,)), blocksize=64,
                quant_type="nf4", dtype=dtype, offset=some(()), state2=nested)
            codes, about = some((-(-rows * columns // 2), 1), torch.uint8), {"quant_state": state}
            linear.compute_dtype = dtype
        else:
            codes, about = some((rows, columns), torch.int8), {"has_fp16_weights": False, "SCB": some((rows,))}
        linear.__class__, linear.weight = of_linear, torch.Tensor._make_subclass(of_weight, codes, False)
        vars(linear.weight).update(about)
        model.set_submodule(name, linear)


class _Form(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _to_fp8(model: nn.Module, experts: bool = False) -> None:
    """Linear layers but the head, where they fall into blocks. experts: on the meta device, those that lie in one
    tensor too."""
    head = output_embeddings(model)
    for _, m, name, p in _stacks(model) if experts else ():
        if not (p.shape[1] | p.shape[2]) % FP8_BLOCK:
            scales = torch.empty(p.shape[0], p.shape[1] // FP8_BLOCK, p.shape[2] // FP8_BLOCK, device=p.device)
            made = Coded(p.detach().to(torch.float8_e4m3fn), scales, "fp8", p.dtype)
            setattr(m, name, nn.Parameter(made, requires_grad=False))
    for m in model.modules():
        if type(m) is nn.Linear and m is not head and (made := to_fp8(m.weight.detach())) is not None:
            m.weight = nn.Parameter(made, requires_grad=False)
