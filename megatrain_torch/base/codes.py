"""Frozen weights that are codes, by format: of which plain tensors one is made, and how its package's own code gets it.

    format = format_of(p)              # None: p is no such weight
    strands = format.strands(p, m)     # {"": codes, "absmax": scales ...}, m: the module that has p
    whole  = format.whole(p, strands)  # the parameter, over any such tensors

A weight's strands are streamed like parameters, each in its own type; in a window they are put together again, so the
module's own code runs over what was fetched. Formats are known by the names of classes: no package is imported here.

One format is ours, `Coded`: codes with scales which stand for 16-bit weights, block-fp8 and MXFP4 as published, and
experts of a mixture in NF4.

    w = Coded(codes, scales, "fp8", torch.bfloat16)      # of the shape and type of the weight that it stands for
    w.expand_codes()                                     # that weight, by our op, to the bits of its package
"""
from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..ops import expand_codes_
from .errors import MegatrainError

Strands = dict[str, Tensor]           # "": what lies in the parameter's own memory, where it has memory
FP8_BLOCK = 128                      # rows, and columns, that share a scale of what is made here
NF4_BLOCK = 64                       # elements that share a scale
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Keeps:
    """An autograd Function that keeps tensors where no hook of saved tensors sees them."""

    module: str                         # where it is
    name: str
    holder: str         # the class, there or in its `functional`, of what it is given and keeps, tensors its attributes
    unused: tuple[tuple[str, Any], ...] = ()    # attributes of ctx for the weight's gradient alone: what to put there
    lent: tuple[str, ...] = ()          # attributes that the holder, which a module has, took from the weight


@dataclass(frozen=True)
class Coding:
    """How codes are made the weight that they stand for: ops.expand_codes_'s words."""

    form: str                           # of ops.CODES
    shape: torch.Size                   # of the weight
    dtype: torch.dtype | None           # of its values; None: that of what it is multiplied with
    strands: tuple[str, ...]            # their names, in the order of the op's arguments
    group: int = 0                      # the op's
    rounds: bool = False                # the package rounds what it multiplies codes with to codes too, on a GPU


class Format:
    """A package's codes: what is done with a parameter `p` of theirs, which the module `m` has. This one is torchao's,
    of tensors made of tensors, which say which; the others say what is different of theirs."""

    name = "torchao 8 bits"             # for people
    linear = ""                         # the package's class of a module that multiplies, where it is not torch's
    keeps: tuple[Keeps, ...] = ()
    expands = False                     # code computes with a 16-bit weight in memory of its own: expand_codes()
    saves = True                        # the package's products make one, and save it for backward

    def strands(self, p: Any, m: Any) -> Strands:
        if getattr(p, "act_quant_kwargs", None) is not None:
            raise MegatrainError("has its activations quantised too, which torchao gives no gradient for; weight-only "
                                 "configs stream (Int8WeightOnlyConfig, Float8WeightOnlyConfig)")
        return {name: getattr(p, name) for name in p.__tensor_flatten__()[0]}

    def whole(self, p: Any, strands: Strands) -> Tensor:
        """The parameter over other strands of these forms; the package's code computes with it, unless it expands."""
        _, said = p.__tensor_flatten__()
        out = plain_kind(p).__tensor_unflatten__(strands, said, p.size(), p.stride())
        out._is_param = True
        return out

    def put(self, p: Any, m: Any, strands: Strands) -> None:
        """Parameter and module have these from now on."""
        for name, strand in strands.items():
            setattr(p, name, strand)

    def shape(self, p: Any) -> torch.Size:
        """Of the weight that the codes stand for."""
        return p.shape

    def label(self, p: Any, name: str, strand: str) -> str:
        """A strand's name in a state_dict, of the parameter's name."""
        return f"{name}.{strand}"

    def beside(self, p: Any, name: str) -> Strands:
        """What a checkpoint has of a parameter besides."""
        return {}

    def reloads(self, p: Any) -> bool:
        """Does from_pretrained find it by these names?"""
        return not self.saves

    def coding(self, p: Any) -> Coding | None:
        """How our own op makes the weight; None: it cannot."""
        return None

    def dense(self, whole: Any, dtype: torch.dtype) -> Tensor:
        """The weight as the package makes it, in a type."""
        return whole


def plain_kind(p: Tensor) -> type:
    """The class that a parameter had before it was streamed."""
    return getattr(type(p), "_mt_kind", type(p))


def format_of(p: Tensor | None) -> Format | None:
    kind = plain_kind(p)
    return FORMATS.get((kind.__module__.partition(".")[0], kind.__name__))


def coded(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter, Format]]:
    """(name, the module that has it, parameter, format) of each weight of a model that is codes, once."""
    seen: set[int] = set()
    for prefix, m in module.named_modules():
        for name, p in m._parameters.items():
            if p is not None and id(p) not in seen and (format := format_of(p)) is not None:
                seen.add(id(p))
                yield f"{prefix}.{name}" if prefix else name, m, p, format


class Strand(nn.Parameter):
    """A tensor that a weight of codes is made of, beside what lies in the parameter's own memory."""

    of: tuple[nn.Parameter, nn.Module, str]     # the parameter, its module, the strand's name; until it is streamed
    stands: tuple[str, int] = ("", 0)   # name, and for how many numbers, where 16-bit weights are made of it


def owner_of(p: nn.Parameter) -> nn.Parameter:
    """The parameter that a strand is of; others are their own. Over a streamed tensor torch makes no Strand."""
    return p.of[0] if hasattr(p, "of") else p


def multiplies(module: nn.Module, dtype: torch.dtype) -> str:
    """Why a module with weights of codes does not multiply as a plain nn.Linear would; "": it does."""
    kind, weight = type(module), dict.get(module._parameters, "weight")      # no read, which would fetch it
    format = format_of(weight)
    if format is None:
        return "" if kind is nn.Linear else f"it is a {kind.__name__}, not a plain nn.Linear"
    if kind is nn.Linear:
        return f"its weight is {format.name}" if format.linear else ""
    package = plain_kind(weight).__module__.partition(".")[0]
    own = sys.modules.get(kind.__module__)
    if (kind.__module__.partition(".")[0], kind.__name__) != (package, format.linear) or "forward" in vars(module) \
            or own is None or kind.forward.__code__.co_filename != own.__file__:
        return f"it is a {kind.__name__}, not {package}'s {format.linear or 'nn.Linear'} as it came"
    computes = getattr(module, "compute_dtype", None)
    return "" if computes in (None, dtype) else f"it computes in {computes}, not in {dtype}"


def elements(p: nn.Parameter) -> int:
    """Of the weight that a parameter is, or that its codes stand for."""
    return p.numel() if (format := format_of(p)) is None else format.shape(p).numel()


def strands_of(name: str, p: nn.Parameter, m: nn.Module, format: Format) -> tuple[list[Any], list[Any]]:
    """What lies in a parameter's own memory, and the rest, each under its name in a state_dict. Raises MegatrainError,
    with what to do, where it is not as its package leaves it for training."""
    try:
        strands = format.strands(p, m)
    except MegatrainError as why:
        raise MegatrainError(f"parameter {name!r} ({format.name}) {why}") from None
    rest = []
    for key, t in strands.items():
        if key:
            strand = Strand(t.detach(), requires_grad=False)
            strand.of = p, m, key
            if format.expands:
                strand.stands = name, format.shape(p).numel()
            rest.append((format.label(p, name, key), strand))
    return [(name, p)] if "" in strands else [], rest


def dense_bytes(module: nn.Module, experts: int = 0) -> tuple[int, int]:
    """Of 16-bit weights made of codes: bytes at once in a window, and kept until backward. experts: at a time."""
    one = parts = kept = 0
    for name, _, p, format in coded(module):
        shape = format.shape(p)
        nbytes = 2 * shape.numel()
        kept += nbytes * format.saves
        if not format.expands:               # one matrix after the other
            one = max(one, nbytes)
        elif 0 < experts < shape[0] and len(shape) > 2 and "expert" in name:
            parts += nbytes // shape[0] * experts
        else:
            parts += nbytes
    return parts + one, kept


# ---- bitsandbytes: Params4bit, a tensor of two codes a byte with its QuantState; Int8Params with scales SCB ----

_UNMADE = "is not quantised yet: bitsandbytes does that when it is moved to a device; model.to('cpu') is enough"
_BNB = "bitsandbytes.autograd._functions"


def _bare(p: nn.Parameter, codes: Tensor) -> Any:
    """Of the parameter's own class, over codes, with its attributes."""
    out = codes.as_subclass(plain_kind(p))
    out.__dict__.update((k, v) for k, v in p.__dict__.items() if not k.startswith("_mt"))
    out.in_a_slot = True
    return out


class _FourBits(Format):
    name, linear, saves = "bitsandbytes 4 bits", "Linear4bit", False
    keeps = (Keeps(_BNB, "MatMul4Bit", "QuantState"),)

    def strands(self, p: Any, m: Any) -> Strands:
        state = p.quant_state
        if state is None:
            raise MegatrainError(_UNMADE)
        if getattr(state, "packing_format_for_cpu", False):
            raise MegatrainError("was packed by bitsandbytes for inference on this CPU, when it ran in eval mode "
                                 "without gradients: load it anew, and stream it first")
        found = {"": p.data, "absmax": state.absmax, "quant_map": state.code}
        if state.state2 is not None:
            found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code,
                      "nested_offset": state.offset}
        return found

    def _put(self, state: Any, strands: Strands) -> None:
        state.absmax, state.code = strands["absmax"], strands["quant_map"]
        if state.state2 is not None:
            state.offset, state.state2.absmax = strands["nested_offset"], strands["nested_absmax"]
            state.state2.code = strands["nested_quant_map"]

    def whole(self, p: Any, strands: Strands) -> Tensor:
        out = _bare(p, strands[""])
        out.module, out.quant_state = None, copy.copy(p.quant_state)
        if out.quant_state.state2 is not None:
            out.quant_state.state2 = copy.copy(out.quant_state.state2)
        self._put(out.quant_state, strands)
        return out

    def put(self, p: Any, m: Any, strands: Strands) -> None:
        self._put(p.quant_state, strands)
        p.module = None                      # for its first quantisation; a circle that would keep a dropped model
        if hasattr(m, "quant_state"):
            m.quant_state = p.quant_state

    def shape(self, p: Any) -> torch.Size:
        return p.quant_state.shape

    def beside(self, p: Any, name: str) -> Strands:
        """What the package packs into a tensor of bytes: shape, type, block size."""
        packed = p.quant_state.as_dict(packed=True)
        return {f"{name}.{k}": v for k, v in packed.items() if k.startswith("quant_state.")}

    def coding(self, p: Any) -> Coding | None:
        state = p.quant_state
        if state is None or len(state.shape) != 2 or (state.state2 is not None and state.state2.blocksize != 256):
            return None
        nested = () if state.state2 is None else ("nested_absmax", "nested_quant_map", "nested_offset")
        return Coding(state.quant_type, torch.Size(state.shape), state.dtype, ("", "absmax", *nested), state.blocksize)

    def dense(self, whole: Any, dtype: torch.dtype) -> Tensor:
        return importlib.import_module("bitsandbytes.functional").dequantize_4bit(
            whole.data.as_subclass(Tensor), whole.quant_state)


class _EightBits(Format):
    name, linear, saves = "bitsandbytes LLM.int8", "Linear8bitLt", False
    keeps = (Keeps(_BNB, "MatMul8bitLt", "MatmulLtState", (("tensors", (None, None, None)),), ("CB", "SCB")),
             Keeps(_BNB, "MatMul8bitFp", "MatmulLtState", (("A", None),), ("CB", "SCB")))

    def strands(self, p: Any, m: Any) -> Strands:
        if p.has_fp16_weights:
            raise MegatrainError("is quantised anew in each forward (has_fp16_weights=True); load it with "
                                 "has_fp16_weights=False, which freezes it")
        scales = p.SCB if p.SCB is not None else m.state.SCB         # where the module's first forward puts them
        if scales is None:
            raise MegatrainError(_UNMADE)
        return {"": p.data, "SCB": scales}

    def whole(self, p: Any, strands: Strands) -> Tensor:
        out = _bare(p, strands[""])
        out.CB, out.SCB = strands[""], strands["SCB"]
        return out

    def put(self, p: Any, m: Any, strands: Strands) -> None:
        # While it is streamed p has no codes besides its own: the module finds a window's in what that gives it.
        p.CB, p.SCB = None if strands[""] is p else strands[""], strands["SCB"]
        if hasattr(m, "state"):
            m.state.CB = m.state.SCB = None

    def label(self, p: Any, name: str, strand: str) -> str:
        return f"{name.rpartition('.')[0]}.{strand}".lstrip(".")

    def beside(self, p: Any, name: str) -> Strands:
        return {f"{name}_format": torch.tensor(0, dtype=torch.uint8)}

    def coding(self, p: Any) -> Coding | None:
        return Coding("int8", p.shape, None, ("", "SCB"), rounds=True)

    def dense(self, whole: Any, dtype: torch.dtype) -> Tensor:
        """As MatMul8bitFp makes it."""
        return whole.CB.as_subclass(Tensor).to(dtype).mul_(whole.SCB.unsqueeze(1).mul(1.0 / 127.0))


# ---- ours: codes that stand for 16-bit weights, which a window has ----

class _Ours(Format):
    name, saves, expands = "block-fp8, MXFP4 and experts in NF4", False, True
    # Ends of names, as they are published, or as the package of other weights in NF4 has them.
    _ends = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales"), "nf4": ("", ".absmax")}

    def label(self, p: Any, name: str, strand: str) -> str:
        return name + self._ends[p.form][strand == "scales"]

    def coding(self, p: Any) -> Coding | None:
        return Coding(p.form, p.shape, p.dtype, ("codes", "scales"), NF4_BLOCK if p.form == "nf4" else 0)

    def reloads(self, p: Any) -> bool:
        return p.form == "mxfp4" or (p.form == "fp8" and p.dim() == 2)


FORMATS: dict[tuple[str, str], Format] = {      # by package and class of the parameter
    ("bitsandbytes", "Params4bit"): _FourBits(), ("bitsandbytes", "Int8Params"): _EightBits(),
    **dict.fromkeys((("torchao", "Int8Tensor"), ("torchao", "Float8Tensor")), Format()),
    ("megatrain_torch", "Coded"): _Ours()}
KNOWN = "; ".join(format.name for format in dict.fromkeys(FORMATS.values()))


class Coded(Tensor):
    """[shape], dtype: of the weight that it stands for; frozen. Whatever is done with one is done with that weight,
    made for the operation; but for copies, and for `stack` and `cat`, by which experts' weights come together. A
    streamed one is expanded once for each window."""

    codes: Tensor
    scales: Tensor
    form: str               # "fp8", "mxfp4" or "nf4"

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Coded:
        shape = codes.shape
        if form == "nf4":
            shape = *shape[:-1], 2 * shape[-1]
        elif form == "mxfp4":                # as published: experts, rows, groups, bytes
            shape = shape[0], 2 * shape[2] * shape[3], shape[1]
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.form = codes, scales, form

    __torch_function__ = torch._C._disabled_torch_function_impl

    def expand_codes(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        scales = self.scales.to(torch.float32) if self.form == "fp8" else self.scales
        expand_codes_(out, self.form, self.codes.contiguous(), scales.contiguous(), group=NF4_BLOCK)
        return out

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
            where = kwargs.get("device")
            return args[0].over(args[0].codes.to(device=where), args[0].scales.to(device=where))
        if func in (_ATEN.stack.default, _ATEN.cat.default) and (joined := _joined(func, *args)) is not None:
            return joined
        return func(*tree_map_only(Coded, Coded.expand_codes, args), **tree_map_only(Coded, Coded.expand_codes, kwargs))


def _joined(func: Any, tensors: list[Any], dim: int = 0) -> Coded | None:
    """Blocks of fp8 that come together as whole ones: their codes do, and their scales; None: else."""
    first = tensors[0]
    if not isinstance(first, Coded) or (func is _ATEN.stack.default and dim != 0) or any(
            type(t) is not type(first) or (t.form, t.shape, t.scales.shape) != ("fp8", first.shape, first.scales.shape)
            for t in tensors):
        return None
    return first.over(func([t.codes for t in tensors], dim), func([t.scales for t in tensors], dim))


def to_fp8(w: Tensor) -> Coded | None:
    """[N, K] in scaled blocks of 128 by 128, as transformers' Fp8Quantize; None: it does not fall into such."""
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
