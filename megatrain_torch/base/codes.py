"""Frozen weights that are codes, by format: of which plain tensors one is made, and how its package's own code gets it.

    format = format_of(p)              # None: p is no such weight
    strands = format.strands(p, m)     # {"": codes, "absmax": scales ...}, m: the module that has p
    whole  = format.whole(p, strands)  # what the package's code computes with, over any such tensors

A weight's strands are streamed like parameters, each in its own type; in a window they are put together again, so the
module's own code runs over what was fetched. Formats are known by the names of classes: no package is imported here.

One format is ours, `Coded`: codes with scales which stand for 16-bit weights, block-fp8 and MXFP4 as published, and
experts of a mixture in NF4.

    w = Coded(codes, scales, "fp8", torch.bfloat16)      # of the shape and type of the weight that it stands for
    w.expand_codes()                                     # that weight, by its package's own arithmetic
"""
from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .errors import MegatrainError

Strands = dict[str, Tensor]           # "": what lies in the parameter's own memory, where it has memory
WIDE_MOST = 1 << 24                  # numbers that are made in fp32 before they are rounded; or one expert's
FP8_BLOCK = 128                      # rows, and columns, that share a scale of what is made here
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4_BLOCK = 64                       # elements that share a scale
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
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


@dataclass(frozen=True)
class Format:
    """A package's codes, as functions of a parameter of theirs."""

    name: str                                               # for people
    kinds: tuple[tuple[str, str], ...]                      # (package, class) of its parameters
    strands: Callable[[nn.Parameter, nn.Module], Strands]   # of a parameter of a module
    whole: Callable[[nn.Parameter, Strands], Tensor]        # over other strands of these forms
    put: Callable[[nn.Parameter, nn.Module, Strands], None]     # parameter and module have these from now on
    shape: Callable[[nn.Parameter], torch.Size]             # of the weight that the codes stand for
    label: Callable[[nn.Parameter, str, str], str]          # of parameter, its name, strand: that in a state_dict
    beside: Callable[[nn.Parameter, str], Strands]          # what a checkpoint has of a parameter besides
    keeps: tuple[Keeps, ...] = ()
    reloads: Callable[[nn.Parameter], bool] = lambda p: True        # from_pretrained finds it by these names
    again: Callable[[nn.Parameter, Strands], Tensor] | None = None      # the parameter, where `whole` gives another
    expands: bool = False                                   # `whole` is a 16-bit weight in memory of its own
    saves: bool = False                                     # its package's products make one, and save it for backward
    coding: Callable[[Any], Coding | None] = lambda p: None     # how our own op makes the weight; None: it cannot
    dense: Callable[[Any, torch.dtype], Tensor] = lambda whole, dtype: whole    # as the package makes it, in a type
    linear: str = ""                    # the package's class of a module that multiplies, where it is not torch's


def plain_kind(p: Tensor) -> type:
    """The class that a parameter had before it was streamed."""
    return getattr(type(p), "_mt_kind", type(p))


def plain_name(p: Tensor) -> tuple[str, str]:
    kind = plain_kind(p)
    return kind.__module__.partition(".")[0], kind.__name__


def format_of(p: Tensor | None) -> Format | None:
    return None if p is None else FORMATS.get(plain_name(p))


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


class Stands:
    """A weight of codes, by the form of what it stands for: [shape], 16 bits."""

    requires_grad, dtype = False, torch.bfloat16

    def __init__(self, p: nn.Parameter) -> None:
        self.shape = FORMATS[plain_name(p)].shape(p)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True


def owner_of(p: nn.Parameter) -> nn.Parameter:
    """The parameter that a strand is of; others are their own."""
    return p.of[0] if type(p) is Strand else p


def multiplies(module: nn.Module, dtype: torch.dtype) -> str:
    """Why a module with weights of codes does not multiply as a plain nn.Linear would; "": it does."""
    kind, format = type(module), format_of(dict.get(module._parameters, "weight"))
    if format is None:
        return "" if kind is nn.Linear else f"it is a {kind.__name__}, not a plain nn.Linear"
    if kind is nn.Linear:
        return f"its weight is {format.name}" if format.linear else ""
    package = format.kinds[0][0]
    own = sys.modules.get(kind.__module__)
    if (kind.__module__.partition(".")[0], kind.__name__) != (package, format.linear) or "forward" in vars(module) \
            or own is None or kind.forward.__code__.co_filename != own.__file__:
        return f"it is a {kind.__name__}, not {package}'s {format.linear or 'nn.Linear'} as it came"
    computes = getattr(module, "compute_dtype", None)
    return "" if computes in (None, dtype) else f"it computes in {computes}, not in {dtype}"


def elements(p: nn.Parameter) -> int:
    """Of the weight that a parameter is, or that its codes stand for."""
    return p.numel() if (format := format_of(p)) is None else format.shape(p).numel()


Named = list[tuple[str, nn.Parameter]]


def strands_of(name: str, p: nn.Parameter, m: nn.Module, format: Format) -> tuple[Named, Named]:
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
    found = [(2 * format.shape(p).numel(), format) for _, _, p, format in coded(module)]
    one = max([n for n, f in found if not f.expands], default=0)
    parts = 0
    for name, _, p, format in coded(module):
        shape = format.shape(p)
        some = 0 < experts < shape[0] and len(shape) > 2 and "expert" in name        # else it is made at once
        parts += 2 * (shape.numel() * experts // shape[0] if some else shape.numel()) * format.expands
    return parts + one, sum(n for n, format in found if format.saves)


# ---- bitsandbytes: Params4bit, a tensor of two codes a byte with its QuantState; Int8Params with scales SCB ----

_UNMADE = "is not quantised yet: bitsandbytes does that when it is moved to a device; model.to('cpu') is enough"


def _four_strands(p: Any, m: nn.Module) -> Strands:
    state = p.quant_state
    if state is None:
        raise MegatrainError(_UNMADE)
    if getattr(state, "packing_format_for_cpu", False):
        raise MegatrainError("was packed by bitsandbytes for inference on this CPU, when it ran in eval mode without "
                             "gradients: load it anew, and stream it first")
    found = {"": p.data, "absmax": state.absmax, "quant_map": state.code}
    if state.state2 is not None:
        found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code,
                  "nested_offset": state.offset}
    return found


def _put_state(state: Any, strands: Strands) -> None:
    state.absmax, state.code = strands["absmax"], strands["quant_map"]
    if state.state2 is not None:
        state.offset, state.state2.absmax = strands["nested_offset"], strands["nested_absmax"]
        state.state2.code = strands["nested_quant_map"]


def _bare(p: nn.Parameter, codes: Tensor) -> Any:
    """Of the parameter's own class, over codes, with its attributes."""
    out = codes.as_subclass(plain_kind(p))
    out.__dict__.update((k, v) for k, v in p.__dict__.items() if not k.startswith("_mt"))
    out.in_a_slot = True
    return out


def _four_whole(p: Any, strands: Strands) -> Tensor:
    out = _bare(p, strands[""])
    out.module, out.quant_state = None, copy.copy(p.quant_state)
    if out.quant_state.state2 is not None:
        out.quant_state.state2 = copy.copy(out.quant_state.state2)
    _put_state(out.quant_state, strands)
    return out


def _four_put(p: Any, m: nn.Module, strands: Strands) -> None:
    _put_state(p.quant_state, strands)
    p.module = None                      # for its first quantisation; a circle that would keep a dropped model
    if hasattr(m, "quant_state"):
        m.quant_state = p.quant_state


def _four_coding(p: Any) -> Coding | None:
    state = p.quant_state
    if state is None or len(state.shape) != 2 or (state.state2 is not None and state.state2.blocksize != 256):
        return None
    strands = ("", "absmax")
    if state.state2 is not None:
        strands += "nested_absmax", "nested_quant_map", "nested_offset"
    return Coding(state.quant_type, torch.Size(state.shape), state.dtype, strands, state.blocksize)


def _four_dense(whole: Any, dtype: torch.dtype) -> Tensor:
    return importlib.import_module("bitsandbytes.functional").dequantize_4bit(
        whole.data.as_subclass(Tensor), whole.quant_state)


def _four_beside(p: Any, name: str) -> Strands:
    """What the package packs into a tensor of bytes: shape, type, block size."""
    return {f"{name}.{k}": v for k, v in p.quant_state.as_dict(packed=True).items() if k.startswith("quant_state.")}


def _eight_strands(p: Any, m: Any) -> Strands:
    if p.has_fp16_weights:
        raise MegatrainError("is quantised anew in each forward (has_fp16_weights=True); load it with "
                             "has_fp16_weights=False, which freezes it")
    scales = p.SCB if p.SCB is not None else m.state.SCB         # where the module's first forward puts them
    if scales is None:
        raise MegatrainError(_UNMADE)
    return {"": p.data, "SCB": scales}


def _eight_whole(p: Any, strands: Strands) -> Tensor:
    out = _bare(p, strands[""])
    out.CB, out.SCB = strands[""], strands["SCB"]
    return out


def _eight_coding(p: Any) -> Coding | None:
    return Coding("int8", p.shape, None, ("", "SCB"), rounds=True)


def _eight_dense(whole: Any, dtype: torch.dtype) -> Tensor:
    """As MatMul8bitFp makes it."""
    return whole.CB.as_subclass(Tensor).to(dtype).mul_(whole.SCB.unsqueeze(1).mul(1.0 / 127.0))


def _eight_put(p: Any, m: Any, strands: Strands) -> None:
    """While it is streamed p has no codes besides its own: the module finds a window's in what that gives it."""
    p.CB, p.SCB = None if strands[""] is p else strands[""], strands["SCB"]
    if hasattr(m, "state"):
        m.state.CB = m.state.SCB = None


# ---- torchao: tensors made of tensors, which say which ----

def _made_strands(p: Any, m: nn.Module) -> Strands:
    if getattr(p, "act_quant_kwargs", None) is not None:
        raise MegatrainError("has its activations quantised too, which torchao gives no gradient for; weight-only "
                             "configs stream (Int8WeightOnlyConfig, Float8WeightOnlyConfig)")
    return {name: getattr(p, name) for name in p.__tensor_flatten__()[0]}


def _made_whole(p: Any, strands: Strands) -> Tensor:
    _, said = p.__tensor_flatten__()
    out = plain_kind(p).__tensor_unflatten__(strands, said, p.size(), p.stride())
    out._is_param = True
    return out


def _made_put(p: Any, m: nn.Module, strands: Strands) -> None:
    for name, strand in strands.items():
        setattr(p, name, strand)


# ---- ours: codes that stand for 16-bit weights, which a window has ----

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
    """[shape], dtype: of the weight that it stands for; frozen. Whatever is done with one is done with that weight,
    made for the operation; but for copies, and for `stack` and `cat`, by which experts' weights come together. A
    streamed one is expanded once for each window."""

    codes: Tensor
    scales: Tensor
    form: str               # "fp8", "mxfp4" or "nf4"

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


# Ends of names, as they are published, or as the package of other weights in NF4 has them.
_ENDS = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales"), "nf4": ("", ".absmax")}


def _coded_label(p: Any, name: str, strand: str) -> str:
    return name + _ENDS[p.form][strand == "scales"]


def _coded_coding(p: Any) -> Coding | None:
    return Coding(p.form, p.shape, p.dtype, ("codes", "scales"), NF4_BLOCK if p.form == "nf4" else 0)


_BNB = "bitsandbytes.autograd._functions"
_ALL = (
    Format("bitsandbytes 4 bits", (("bitsandbytes", "Params4bit"),), _four_strands, _four_whole, _four_put,
           lambda p: p.quant_state.shape, lambda p, name, strand: f"{name}.{strand}", _four_beside,
           (Keeps(_BNB, "MatMul4Bit", "QuantState"),), coding=_four_coding, dense=_four_dense, linear="Linear4bit"),
    Format("bitsandbytes LLM.int8", (("bitsandbytes", "Int8Params"),), _eight_strands, _eight_whole, _eight_put,
           lambda p: p.shape, lambda p, name, strand: f"{name.rpartition('.')[0]}.{strand}".lstrip("."),
           lambda p, name: {f"{name}_format": torch.tensor(0, dtype=torch.uint8)},
           (Keeps(_BNB, "MatMul8bitLt", "MatmulLtState", (("tensors", (None, None, None)),), ("CB", "SCB")),
            Keeps(_BNB, "MatMul8bitFp", "MatmulLtState", (("A", None),), ("CB", "SCB"))),
           coding=_eight_coding, dense=_eight_dense, linear="Linear8bitLt"),
    Format("torchao 8 bits", (("torchao", "Int8Tensor"), ("torchao", "Float8Tensor")), _made_strands, _made_whole,
           _made_put, lambda p: p.shape, lambda p, name, strand: f"{name}.{strand}", lambda p, name: {},
           reloads=lambda p: False, saves=True),
    Format("block-fp8, MXFP4 and experts in NF4", (("megatrain_torch", "Coded"),), _made_strands,
           lambda p, strands: p.over(*strands.values()).expand_codes(), _made_put, lambda p: p.shape, _coded_label,
           lambda p, name: {}, again=_made_whole, expands=True, coding=_coded_coding,
           reloads=lambda p: p.form == "mxfp4" or (p.form == "fp8" and p.dim() == 2)),
)
FORMATS = {kind: format for format in _ALL for kind in format.kinds}
KNOWN = "; ".join(format.name for format in _ALL)
