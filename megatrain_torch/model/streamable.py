"""Which models can be streamed."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

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
    for name, m in module.named_modules():
        if getattr(m, "sparse", False) is True and isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            raise MegatrainError(f"module {name!r} makes sparse gradients; build it with sparse=False")


def _problem(p: nn.Parameter, bare: bool) -> str:
    if isinstance(p, nn.parameter.UninitializedTensorMixin):
        return "has no shape yet: run one forward first, then mt.stream"
    if type(p) is not nn.Parameter:
        return (f"is of {type(p).__name__}, a subclass of Parameter, and only plain ones are streamed; if the model is "
                "quantised, load it without that: a frozen bf16 parameter takes 2 bytes of host memory")
    if p.is_meta and not bare:
        return "is on the meta device: load its weights first"
    if p.is_complex():
        return f"is complex ({p.dtype}); complex parameters are not supported"
    if p.layout != torch.strided:
        return f"has layout {p.layout}; only dense parameters are supported"
    if p.dtype not in DTYPES:
        return f"has type {p.dtype}; supported: {', '.join(str(d) for d in DTYPES)}"
    return ""
