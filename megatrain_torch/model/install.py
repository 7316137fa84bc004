"""What mt.stream puts into a model's modules, and takes out again: methods, parameters that see slots, buffers."""
from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..base import patches
from ..base.codes import coded
from ..base.errors import MegatrainError
from ..fused.head import give_head, head_of
from ..fused.layer import give_codes, template_of, wanted
from ..graph.door import Door, Installed, method_of
from ..graph.window import Window
from ..optim import astray
from ..optim.adamw import AdamW
from ..store import gradient
from ..store.records import Record
from ..store.state import BoundParameters, HostBuffers
from ..store.whole import keep_in_sight
from . import hf, wrapped
from .registry import note, runtimes
from .runtime import Runtime
from .tree import Tree, count_registrations


def install(rt: Runtime, root: nn.Module, found: Any, modes: str | dict[str, str]) -> None:
    """found: windows and containers, of units.find. modes: what windows keep: all the same, or by name."""
    patches.hold(rt)
    patches.once("registrations", count_registrations)
    keep_in_sight(format for _, _, _, format in coded(root))
    astray.watch(AdamW)
    wrapped.watch()
    by_param = _by_param(rt)
    for m in root.modules():
        _bind(rt, m, by_param)
    rt.keeps.default, by_name = ("auto", modes) if isinstance(modes, dict) else (modes, {})
    head = head_of(root, found.windows)
    for name, m in found.windows:
        _add_window(rt, name or type(root).__name__, m, by_param, m is head, by_name.get(name, "auto"))
    if rt.products == "fp8":
        give_codes(rt.windows)
    for _, m in found.containers:
        _put(m, "forward", _container(rt, m, "forward"))
        _put(m, "_call_impl", _container(rt, m, "_call_impl"))       # if another forward is put over ours (TRL)
    hf.prepare(rt, root, _put)
    _put(root, "zero_grad", _zero_grad(root))
    _put(root, "_replicate_for_data_parallel", _refuser("DataParallel over a streamed model is not supported"))
    rt.forwards.check_tree = Tree(root).look
    for m in root.modules():
        _move_buffers(rt, m)
    rt.forwards.notice()


def _by_param(rt: Runtime) -> dict[int, list[Record]]:
    """Records of a parameter: of a weight of codes its strands', else one."""
    found = {id(r.param): [r] for r in rt.records}
    return found | {id(whole.param): whole.records for unit in rt.wholes for whole in unit}


def _bind(rt: Runtime, m: nn.Module, by_param: dict[int, list[Record]]) -> None:
    records = {n: by_param[id(p)][0] for n, p in m._parameters.items() if p is not None}
    if records:
        m.__dict__["_parameters"] = BoundParameters(m._parameters, records)
    note(m, rt)
    _put(m, "_apply", _applier(rt, m))
    _put(m, "load_state_dict", _loader(m))
    _put(m, "share_memory", _refuser("share_memory() would copy the store; mt.unstream(model) first"))


def _add_window(rt: Runtime, name: str, m: nn.Module, by_param: dict[int, list[Record]], is_head: bool,
                mode: str) -> None:
    records = sorted((r for p in m.parameters() for r in by_param[id(p)]), key=lambda r: (r.unit, r.index))
    w = Window(rt, name, m, records)
    w.keep(mode)
    w.fused = template_of(rt, w, m)
    if is_head and wanted(rt.compute, rt.is_cuda, [r.dtype for r in records]):
        give_head(w, m)
    rt.add_window(w)
    _put(m, "forward", w)


def remove(root: nn.Module) -> None:
    """Modules are as they were, but for their parameters' values; buffers are on the CPU."""
    for m in root.modules():
        for value in [v for v in m.__dict__.values() if isinstance(v, Installed)]:
            value.remove()
        if isinstance(m._parameters, BoundParameters):
            m.__dict__["_parameters"] = dict(m._parameters)
        m.__dict__["_buffers"] = {k: b.cpu() if isinstance(b, Tensor) else b for k, b in m._buffers.items()}
        runtimes.pop(m, None)


# ---- methods ----

def _put(module: nn.Module, name: str, call: Any) -> None:
    """In the place of a method. The module has it, so `call` holds no module."""
    if name in ("forward", "_call_impl") and "torch._dynamo" in sys.modules:
        call = torch._dynamo.disable(call)          # torch.compile(model): our own code is not for tracing
    module.__dict__[name] = Installed(module, name, call)


def _method(module: nn.Module, name: str) -> Callable[[], Any]:
    """Gives the module's method, without holding the module."""
    own = getattr(module, name)
    return weakref.WeakMethod(own) if method_of(own, module) else lambda: own


def _container(rt: Runtime, module: nn.Module, name: str) -> Any:
    inner, who = _method(module, name), weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with rt.forwards.entered(who(), args, kwargs) as (args, kwargs):
            return inner()(*args, **kwargs)

    Door.forwards |= {forward.__code__}
    return forward


def _loader(module: nn.Module) -> Any:
    own = _method(module, "load_state_dict")

    def load_state_dict(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise MegatrainError("load_state_dict(assign=True) would put tensors in the place of streamed parameters; "
                                 "leave assign out: values are copied into the store")
        return own()(state_dict, strict=strict)

    return load_state_dict


def _applier(rt: Runtime, module: nn.Module) -> Any:
    who = weakref.ref(module)
    return lambda fn, recurse=True: _apply(rt, who(), fn)


def _zero_grad(module: nn.Module) -> Any:
    """As torch's, which reads each `.grad`, and so would wait for its update (Trainer calls it after each step). With
    set_to_none=True, as by default, this waits for nothing."""
    who = weakref.ref(module)

    def zero_grad(set_to_none: bool = True) -> None:
        gradient.clear(who().parameters(), set_to_none)

    return zero_grad


def _refuser(text: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MegatrainError(text)
    return refuse


def _move_buffers(rt: Runtime, m: nn.Module) -> None:
    buffers = {k: b.to(rt.device) if isinstance(b, Tensor) and not b.is_meta else b for k, b in m._buffers.items()}
    m.__dict__["_buffers"] = HostBuffers(buffers) if rt.is_cuda else buffers


def _apply(rt: Runtime, module: nn.Module, fn: Any) -> nn.Module:
    """`.to`, `.cuda`, `.half`, ...: a change of type is refused before anything changed, a change of device
    changes nothing: parameters stay in the store, buffers on the compute device."""
    tensors = [(n, t) for n, t in module.named_parameters()] + [(n, t) for n, t in module.named_buffers()]
    for name, t in tensors:
        probe = torch.empty(0, dtype=t.dtype)
        out = fn(probe)
        if out.dtype != t.dtype and hasattr(t, "_mt"):
            raise MegatrainError(f"{name}: {t.dtype} to {out.dtype}: a streamed model's types are fixed; "
                                 "convert it before mt.stream, or give mt.stream(dtype=...); bf16_full_eval and "
                                 "fp16_full_eval of TrainingArguments ask for this: leave them out")
    for m in module.modules():
        for k, b in m._buffers.items():
            if isinstance(b, Tensor):
                wanted = fn(torch.empty(0, dtype=b.dtype)).dtype
                m._buffers[k] = b.to(rt.device, wanted)
    return module
