"""Which models can be streamed."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..base.codes import KNOWN, coded, format_of, strands_of
from ..base.errors import MegatrainError
from ..store.records import DTYPES
from .registry import runtimes


def check_model(module: nn.Module, bare: bool = False) -> None:
    """Raises: it is no module, is streamed already, or has parameters that are not for streaming. bare: another process
    has the values, and parameters may be on the meta device."""
    if not isinstance(module, nn.Module):
        way = ("; mt.from_pretrained(AutoModelForCausalLM, path) loads a model and streams it"
               if isinstance(module, str | Path) else "")
        raise MegatrainError(f"mt.stream takes a torch.nn.Module, not {module!r:.80}{way}")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise MegatrainError(f"{type(module).__name__} is not supported: one streamed model uses one GPU; "
                             "stream the module inside it")
    if any(m in runtimes for m in module.modules()):
        raise MegatrainError("the model, or a part of it, is streamed already; mt.unstream it first")
    for name, p in module.named_parameters():
        problem = _problem(p, bare)
        if problem:
            raise MegatrainError(f"parameter {name!r} {problem}")
    for name, m, p, format in coded(module):
        strands_of(name, p, m, format)
    for name, m in module.named_modules():
        if getattr(m, "sparse", False) is True and isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            raise MegatrainError(f"module {name!r} makes sparse gradients; build it with sparse=False")


def _problem(p: nn.Parameter, bare: bool) -> str:
    if isinstance(p, nn.parameter.UninitializedTensorMixin):
        return "has no shape yet: run one forward first, then mt.stream"
    if format_of(p) is not None:
        return "is quantised, and so it must be frozen: p.requires_grad_(False)" if p.requires_grad else ""
    if type(p) is not nn.Parameter:
        return (f"is of {type(p).__module__}.{type(p).__name__}, a subclass of Parameter that is not known; if the "
                f"model is quantised, these formats stream: {KNOWN}; or load it without that: a frozen bf16 parameter "
                "takes 2 bytes of host memory")
    if p.is_meta and not bare:
        return "is on the meta device: load its weights first"
    if p.is_complex():
        return f"is complex ({p.dtype}); complex parameters are not supported"
    if p.layout != torch.strided:
        return f"has layout {p.layout}; only dense parameters are supported"
    if p.dtype not in DTYPES:
        return f"has type {p.dtype}; supported: {', '.join(str(d) for d in DTYPES)}"
    return ""


def refuse_packed(module: nn.Module, where: torch.device) -> None:
    """Raises: on a GPU, a linear layer of gptqmodel's (GPTQ, AWQ): a load on the CPU gave it a kernel for that, and its
    codes, which are buffers, would lie on the device whatever its limit is."""
    for name, m in module.named_modules() if where.type != "cpu" else ():
        if "qweight" in m._buffers and any(c.__module__.partition(".")[0] == "gptqmodel" for c in type(m).__mro__):
            raise MegatrainError(f"module {name!r} ({type(m).__name__}) keeps its codes in buffers, which are not "
                                 "streamed: all of them would lie on the GPU, and no plan counts them. Take the "
                                 "checkpoint of 16 bits: mt.from_pretrained(..., base='nf4') makes codes that stream")


def refuse_wrapped(module: nn.Module) -> None:
    """Raises: PEFT puts a parameter and its adapter's product together in each forward (`target_parameters`, which
    "all-linear" becomes on mixtures): by parametrizations, which would take the place of the streamed parameter."""
    for name, m in module.named_modules():
        if type(m).__name__ == "ParamWrapper" and type(m).__module__.partition(".")[0] == "peft":
            linear = sorted({n.split(".")[-2] for n, x in module.named_modules()
                             if n.endswith(".base_layer") and isinstance(x, nn.Linear)})
            raise MegatrainError(
                f"module {name!r}: an adapter on parameter {m.parameter_name!r} of a module that is no linear layer "
                "(PEFT's target_parameters, and what target_modules='all-linear' becomes on a mixture) is refused; "
                f"name linear layers: target_modules={linear}, on the command line targets={','.join(linear)}")


def refuse_codes(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Raises: to be converted to a type, a weight is codes, or fp8 with scales beside it."""
    for name, p in module.named_parameters() if dtype is not None else ():
        if format_of(p) is not None or p.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise MegatrainError(f"dtype={dtype}: {name} is quantised, and codes and scales keep their "
                                 "types: leave it out")
