"""What mt.stream puts into a model's modules, and takes out again: methods, parameters that see slots, buffers. What
somebody else puts in afterwards is looked at when the next pass begins: parameters that do not stream are refused.
"""
from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base import patches
from ..base.codes import coded
from ..base.errors import MegatrainError
from ..base.units import Found
from ..fused.head import give_head, head_of
from ..fused.layer import give_codes, template_of, wanted
from ..graph.door import Door
from ..graph.installed import Installed, method_of
from ..graph.sight import keep_in_sight
from ..graph.window import Window
from ..optim import hooks
from ..optim.adamw import AdamW
from ..store import gradient
from ..store.records import Record
from ..store.state import BoundParameters, Given, HostBuffers
from . import frameworks
from .frameworks import refuser
from .runtime import runtimes

if TYPE_CHECKING:
    from .runtime import Runtime

_registrations = 0               # of parameters and modules, in modules of streamed models


def install(rt: Runtime, root: nn.Module, found: Found, modes: str | dict[str, str]) -> None:
    """modes: what windows keep: all the same, or by name."""
    patches.hold(rt)
    patches.once("registrations", _count_registrations)
    keep_in_sight(format for _, _, _, format in coded(root))
    hooks.watch(AdamW)
    frameworks.watch_ddp()
    # Records of a parameter: of a weight of codes its strands', else one.
    by_param = {id(r.param): [r] for r in rt.records}
    by_param |= {id(whole.param): whole.records for unit in rt.wholes for whole in unit}
    for m in root.modules():
        _bind(rt, m, {n: by_param[id(p)][0] for n, p in m._parameters.items() if p is not None})
        _put(m, "_apply", _applier(rt, m))
        _put(m, "load_state_dict", _loader(m))
    rt.keeps.default, by_name = ("auto", modes) if isinstance(modes, dict) else (modes, {})
    head = head_of(root, found.windows)
    for name, m in found.windows:
        records = sorted((r for p in m.parameters() for r in by_param[id(p)]), key=lambda r: (r.unit, r.index))
        w = Window(rt, name or type(root).__name__, m, records)
        w.keep(by_name.get(name, "auto"))
        w.fused = template_of(rt, w, m)
        if m is head and wanted(rt.compute, rt.is_cuda, [r.dtype for r in records]):
            give_head(w, m)
        rt.add_window(w)
        _put(m, "forward", w)
    if rt.products == "fp8":
        give_codes(rt.windows)
    for _, m in found.containers:
        _put(m, "forward", _container(rt, m, "forward"))
        _put(m, "_call_impl", _container(rt, m, "_call_impl"))       # if another forward is put over ours (TRL)
    frameworks.prepare(rt, root, _put)
    _put(root, "zero_grad", _zero_grad(root))
    _put(root, "_replicate_for_data_parallel", refuser("DataParallel over a streamed model is not supported"))
    rt.check_tree, rt.registered = _check_tree, _registrations
    for m in root.modules():
        _move_buffers(rt, m)
    rt.notice_changes()


def _bind(rt: Runtime, m: nn.Module, records: dict[str, Record]) -> None:
    """The module is part of this runtime's model. records: by the names of its parameters."""
    runtimes[m] = weakref.ref(rt)
    if isinstance(m._parameters, BoundParameters):
        m._parameters.bind(records)
    elif records:
        m.__dict__["_parameters"] = BoundParameters(m._parameters, records)


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
        with rt.entered(who(), args, kwargs) as (args, kwargs):
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


def _zero_grad(module: nn.Module) -> Any:
    """As torch's, which reads each `.grad`, and so would wait for its update (Trainer calls it after each step). With
    set_to_none=True, as by default, this waits for nothing."""
    who = weakref.ref(module)

    def zero_grad(set_to_none: bool = True) -> None:
        gradient.clear(who().parameters(), set_to_none)

    return zero_grad


def _applier(rt: Runtime, module: nn.Module) -> Any:
    who = weakref.ref(module)
    return lambda fn, recurse=True: _apply(rt, who(), fn)


def _apply(rt: Runtime, module: nn.Module, fn: Any) -> nn.Module:
    """`.to`, `.cuda`, `.half`, ...: a change of type is refused before anything changed, a change of device
    changes nothing: parameters stay in the store, buffers on the compute device."""
    for name, p in module.named_parameters():
        out = fn(torch.empty(0, dtype=p.dtype))
        if out.is_cpu and out.is_shared():
            raise MegatrainError("share_memory() would copy the store; mt.unstream(model) first")
        if out.dtype != p.dtype and hasattr(p, "_mt"):
            raise MegatrainError(f"{name}: {p.dtype} to {out.dtype}: a streamed model's types are fixed; "
                                 "convert it before mt.stream, or give mt.stream(dtype=...); bf16_full_eval and "
                                 "fp16_full_eval of TrainingArguments ask for this: leave them out")
    for m in module.modules():
        for k, b in m._buffers.items():
            if isinstance(b, Tensor):
                m._buffers[k] = b.to(rt.device, fn(torch.empty(0, dtype=b.dtype)).dtype)
    return module


def _move_buffers(rt: Runtime, m: nn.Module) -> None:
    buffers = {k: b.to(rt.device) if isinstance(b, Tensor) and not b.is_meta else b for k, b in m._buffers.items()}
    m.__dict__["_buffers"] = HostBuffers(buffers) if rt.is_cuda else buffers


# ---- what is put in after mt.stream ----

def _count_registrations() -> Callable[[], None]:
    """From now on, until what this returns is called."""
    def count(module: nn.Module, *_: Any) -> None:
        global _registrations
        if torch.compiler.is_compiling():        # a plain model's graph would be guarded against the lives of others
            return
        if module in runtimes:
            _registrations += 1

    handles = [nn.modules.module.register_module_parameter_registration_hook(count),
               nn.modules.module.register_module_module_registration_hook(count)]
    return lambda: [handle.remove() for handle in handles]


def _check_tree(rt: Runtime) -> None:
    """A pass begins.

    Raises:
        MegatrainError: a parameter was put in, or the model into DistributedDataParallel.
    """
    if rt.ranks is None and nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise MegatrainError("DistributedDataParallel over a streamed model is not supported: its reducer would "
                             "see no gradients; run one process with one streamed model")
    root = rt.root()
    if rt.registered == _registrations or root is None:      # None: a part of it is all that is left
        return
    # What functional_call has put in the places of parameters is no parameter of the model's.
    given = {id(m._parameters[n]) for m in root.modules() if isinstance(m._parameters, BoundParameters)
             for n, r in m._parameters.records.items() if type(r) is Given}
    for name, p in root.named_parameters():
        if id(p) in given and not isinstance(p, nn.Parameter):
            continue
        if getattr(p, "_mt", None) is None or p._mt.runtime is not rt:
            raise MegatrainError(f"parameter {name!r} was put into the model after mt.stream: "
                                 "change the model first (get_peft_model, load_adapter, new heads), then stream "
                                 "it; SFTTrainer(peft_config=...) changes it too late, and DPOTrainer adds an "
                                 "adapter of its own to LoRA: make the trainer first there")
    for m in root.modules():     # parameters that moved into new modules (parametrizations), or changed names
        _bind(rt, m, {n: p._mt for n, p in m._parameters.items() if hasattr(p, "_mt")})
    for window in rt.windows:
        window.look()
    rt.registered = _registrations
