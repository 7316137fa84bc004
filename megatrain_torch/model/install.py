"""What mt.stream puts into a model's modules, and takes out again: methods, parameters that see slots, buffers; and
what transformers and DistributedDataParallel need so that their code runs unchanged. What somebody else puts in
afterwards is looked at when the next pass begins: parameters that do not stream are refused.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ..base import patches
from ..base.codes import Coded, coded
from ..base.errors import MegatrainError
from ..base.modes import inner
from ..base.units import Found, wrapped_parameters
from ..fused.head import give_head, head_of
from ..fused.layer import template_of, wanted
from ..graph import hf_calls
from ..graph.door import Installed, method_of
from ..graph.window import Window
from ..optim.adamw import watch_steps
from ..store import gradient
from ..store.guard import HostTensor, StreamedParameter
from ..store.records import Record
from ..store.state import BoundParameters, HostBuffers
from ..store.whole import keep_in_sight
from .runtime import find_runtime, runtimes

if TYPE_CHECKING:
    from .runtime import Runtime

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__)


def install(rt: Runtime, root: nn.Module, found: Found, modes: str | dict[str, str]) -> None:
    """modes: what windows keep: all the same, or by name."""
    patches.hold(rt)
    patches.once("registrations", _count_registrations)
    keep_in_sight(format for _, _, _, format in coded(root))
    watch_steps()
    patches.once("Module.load_state_dict", _refuse_assign)
    patches.once("DistributedDataParallel", _patch_ddp)
    # Records of a parameter: of a weight of codes its strands', else one.
    by_param = {id(r.param): [r] for r in rt.records}
    by_param |= {id(whole.param): whole.records for unit in rt.wholes for whole in unit}
    for m in root.modules():
        _bind(rt, m, {n: by_param[id(p)][0] for n, p in m._parameters.items() if p is not None})
        _put(m, "_apply", functools.partial(_apply, rt, weakref.ref(m)))
    rt.keeps.default, by_name = ("auto", modes) if isinstance(modes, dict) else (modes, {})
    head = head_of(root, found.windows)
    for name, m in found.windows:
        records = sorted((r for p in m.parameters() for r in by_param[id(p)]), key=lambda r: (r.unit, r.index))
        w = Window(rt, name or type(root).__name__, m, records)
        w.keep(by_name.get(name, "auto"))
        w.fused = template_of(rt, w, m)
        if m is head and wanted(rt.compute, rt.is_cuda, [r.dtype for r in records]):
            give_head(w, m)
        rt.all_windows.append(weakref.ref(w))
        _put(m, "forward", w)
    if rt.products == "fp8":
        for w in inner([w for w in rt.windows if w.fused is not None and w.fused.template.coded]):
            w.fused.coded = True
    for _, m in found.containers:
        _put(m, "forward", _container(rt, m, "forward"))
        _put(m, "_call_impl", _container(rt, m, "_call_impl"))       # if another forward is put over ours (TRL)
    for m in wrapped_parameters(root):
        _put(m, "_activate_lora", functools.partial(_with_adapters, weakref.ref(m)))
    _prepare(rt, root)
    who = weakref.ref(root)
    # Torch's reads each `.grad`, and so would wait for its update (Trainer calls it after each step). With
    # set_to_none=True, as by default, this waits for nothing.
    _put(root, "zero_grad", lambda set_to_none=True: gradient.clear(who().parameters(), set_to_none))
    _put(root, "_replicate_for_data_parallel", _refuser("DataParallel over a streamed model is not supported"))
    rt.check_tree, rt.tree_changed = _check_tree, False
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


def _container(rt: Runtime, module: nn.Module, name: str) -> Any:
    own, who = getattr(module, name), weakref.ref(module)                # whose method is not to hold it
    inner = weakref.WeakMethod(own) if method_of(own, module) else lambda: own
    return lambda *args, **kwargs: rt.forward(who(), args, kwargs, lambda args, kwargs: inner()(*args, **kwargs))


@contextlib.contextmanager
def _with_adapters(who: weakref.ref[nn.Module], active: list[str]) -> Iterator[None]:
    """PEFT's ParamWrapper._activate_lora: meanwhile a module's parameter, as a mixture's experts, has its adapters'
    products added, in PEFT's order. PEFT registers a parametrization, which would take the streamed parameter out."""
    wrapper: Any = who()
    adapters = [name for name in active if name in wrapper.lora_A]
    if not adapters:
        yield
        return
    module, name = wrapper.get_base_layer(), wrapper.parameter_name
    weight = getattr(module, name)
    if len(adapters) == 1 and wrapper.num_experts > 1 and hasattr(wrapper, "get_delta_factors"):         # PEFT 0.21
        lhs, rhs, scaling = wrapper.get_delta_factors(adapters[0])
        with torch.autocast(weight.device.type, enabled=False):
            weight = torch.baddbmm(weight, lhs, rhs, alpha=scaling)
    else:
        weight = weight + functools.reduce(torch.add, map(wrapper.get_delta_weight, adapters))
    vars(module)[name] = weight              # is read before what `_parameters` has
    try:
        yield
    finally:
        del vars(module)[name]


def _refuse_assign() -> Callable[[], None]:
    own = nn.Module.load_state_dict

    @functools.wraps(own)
    def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign and self in runtimes:
            raise MegatrainError("load_state_dict(assign=True) would put tensors in the place of streamed parameters; "
                                 "leave assign out: values are copied into the store")
        return own(self, state_dict, strict=strict, assign=assign)

    return patches.replaced(nn.Module, "load_state_dict", load_state_dict)


def _refuser(text: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MegatrainError(text)
    return refuse


def _apply(rt: Runtime, who: weakref.ref[nn.Module], fn: Any, recurse: bool = True) -> nn.Module:
    """`.to`, `.cuda`, `.half`, ...: a change of type is refused before anything changed, a change of device
    changes nothing: parameters stay in the store, buffers on the compute device."""
    module = who()
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


def move_buffers(rt: Runtime, m: nn.Module) -> None:
    """To the device. One of a user's class stays of that class: its own torch function moves it."""
    buffers = {k: b.to(rt.device) if isinstance(b, Tensor) and not b.is_meta else b for k, b in m._buffers.items()}
    m.__dict__["_buffers"] = HostBuffers(buffers) if rt.is_cuda else buffers


# ---- what is put in after mt.stream ----

def _count_registrations() -> Callable[[], None]:
    """From now on, until what this returns is called."""
    def count(module: nn.Module, *_: Any) -> None:
        # A plain model's graph would else be guarded against the lives of others.
        if not torch.compiler.is_compiling() and (rt := find_runtime(module)) is not None:
            rt.tree_changed = True

    handles = [nn.modules.module.register_module_parameter_registration_hook(count),
               nn.modules.module.register_module_module_registration_hook(count)]
    return lambda: [handle.remove() for handle in handles]


def _check_tree(rt: Runtime) -> None:
    """A pass begins. What was put in since and does not train, such as TRL's adapter `ref`, stays a plain parameter on
    the device, beside the plan. Raises: another parameter was put in, or the model into DistributedDataParallel."""
    if rt.ranks is None and DistributedDataParallel._active_ddp_module is not None:
        raise MegatrainError("DistributedDataParallel over a streamed model is not supported: its reducer would "
                             "see no gradients; run one process with one streamed model")
    if (root := rt.root()) is None:              # a part of it is all that is left
        return

    def refused() -> list[str]:
        return [name for name, p, never in rt.put_later if never or (p.requires_grad and torch.is_grad_enabled())]

    if rt.tree_changed or refused():             # what was put in may have been taken out again
        rt.put_later = list(_put_later(rt, root))
    if names := refused():
        raise MegatrainError(f"parameter {names[0]!r} was put into the model after mt.stream: change the model first "
                             "(get_peft_model, load_adapter, new heads), then stream it; SFTTrainer(peft_config=...) "
                             "changes it too late: make the trainer first there (mt.stream_trainer)")
    if not rt.tree_changed:
        return
    for _, p, _ in rt.put_later:
        p.data = p.data.to(rt.device)
    for m in root.modules():     # parameters that moved into new modules (parametrizations), or changed names
        _bind(rt, m, {n: p._mt for n, p in m._parameters.items() if hasattr(p, "_mt")})
    for window in rt.windows:
        window.look()
    rt.tree_changed = False


def _put_later(rt: Runtime, root: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Parameters that were not there when the model was streamed: name, and whether it may never be there, in the place
    of a streamed one or as another model's."""
    for prefix, m in root.named_modules():
        records = m._parameters.records if isinstance(m._parameters, BoundParameters) else {}
        for name, p in m._parameters.items():
            # What functional_call has put in the places of parameters is no parameter of the model's.
            if p is None or (records.get(name, p) is None and not isinstance(p, nn.Parameter)):
                continue
            if (other := getattr(p, "_mt", None)) is None or other.runtime is not rt:
                yield f"{prefix}.{name}".lstrip("."), p, name in records or other is not None


# ---- transformers: PreTrainedModel.device says where to put inputs (generate, Trainer): the compute device ----

def _prepare(rt: Runtime, root: nn.Module) -> None:
    transformers = sys.modules.get("transformers")
    rt.checkpointing = [weakref.ref(m) for m in root.modules()
                        if isinstance(getattr(m, "gradient_checkpointing", None), bool)]
    if (base := getattr(getattr(transformers, "modeling_utils", None), "PreTrainedModel", None)) is None:
        return
    patches.once("PreTrainedModel.device", lambda: _report_compute_device(base))
    hf_calls.install()
    # torchao's save_pretrained takes plain tensors and its own, and nothing else.
    quantizer = sys.modules.get("transformers.quantizers.quantizer_torchao")
    if (own := getattr(quantizer, "flatten_tensor_state_dict", None)) is not None:
        patches.once("flatten_tensor_state_dict", lambda: patches.replaced(
            quantizer, "flatten_tensor_state_dict",
            lambda tensors: own({k: t.clone() if type(t) is HostTensor else t for k, t in tensors.items()})))
    stands = any(whole.format.expands for own in rt.wholes for whole in own)     # codes, for 16-bit weights
    for m in root.modules():
        if isinstance(m, base):
            _put(m, "resize_token_embeddings", _refuser("resize_token_embeddings() after mt.stream: resize first, then "
                                                       "stream"))
            if stands and any(isinstance(p, Coded) for p in m.parameters()):
                _put(m, "save_pretrained", _refuser(
                    "save_pretrained() knows no codes that stand for 16-bit weights: mt.save(model, None, folder) "
                    "writes them as they are published; a PeftModel's saves its adapter"))


def _report_compute_device(base: Any) -> Callable[[], None]:
    own = base.device

    def device(self: Any) -> torch.device:
        # First at itself alone: torch.compile guards all that this looks at.
        rt = find_runtime(self) if "_apply" in self.__dict__ else None
        return own.fget(self) if rt is None else rt.device

    return patches.replaced(base, "device", property(device, doc=own.__doc__))


# ---- DistributedDataParallel: several processes that stream a model exchange its gradients themselves ----

def _patch_ddp() -> Callable[[], None]:
    """Accelerate, Trainer and Lightning put it around what they train. It stays, since they look for it and its
    `module`, as a shell that passes all through. Around a module of which only a part is streamed it is what it always
    is, and leaves that part out."""
    own = DistributedDataParallel.__init__

    @functools.wraps(own)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        streamed = {name: p for name, p in module.named_parameters() if isinstance(p, StreamedParameter)}
        if not streamed:
            own(self, module, *args, **kwargs)
            return
        asked = _ARGUMENTS.bind(self, module, *args, **kwargs)
        asked.apply_defaults()
        mesh = asked.arguments["device_mesh"]
        group = asked.arguments["process_group"] or (dist.group.WORLD if mesh is None else mesh.get_group(0))
        alone = next((name for name, p in streamed.items() if p._mt.runtime.ranks is None), None)
        many = dist.get_world_size(group)
        if alone is not None and many > 1:       # the processes would each train a model of their own
            raise MegatrainError(f"DistributedDataParallel of {many} processes around {alone}, which this process "
                                 "streams alone: torch.distributed has to be initialized before mt.stream "
                                 "(init_process_group(); TrainingArguments and Accelerator() do it too)")
        if any(p.requires_grad and name not in streamed for name, p in module.named_parameters()):
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(streamed))
            own(self, module, *args, **kwargs)
        else:
            _shell(self, module, group, asked.arguments["broadcast_buffers"])

    return patches.replaced(DistributedDataParallel, "__init__", init)


def _shell(self: DistributedDataParallel, module: nn.Module, group: Any, broadcast_buffers: bool) -> None:
    """With the attributes that others look at; `no_sync` has nothing to put off."""
    nn.Module.__init__(self)
    Joinable.__init__(self)
    self.module, self.process_group = module, group
    self.device_ids, self.output_device, self.dim = None, None, 0
    self.require_backward_grad_sync = self.require_forward_param_sync = True
    self.find_unused_parameters = self.static_graph = False
    self.broadcast_buffers, self.parameters_to_ignore = broadcast_buffers, set()
    # Lightning calls these, before a backward of its manual optimization.
    self.reducer = SimpleNamespace(_rebuild_buckets=lambda: False, prepare_for_backward=lambda outputs: None)
    hook = ("a communication hook of DistributedDataParallel: a streamed model's gradients do not pass through it, but "
            "are exchanged as they leave the device; leave it out")
    join = ("Join, for ranks with fewer batches than others: a streamed model needs all ranks in each backward; give "
            "each as many (DistributedSampler and accelerate's even_batches do)")
    self.__dict__.update(forward=functools.partial(_forward, weakref.ref(self)), register_comm_hook=_refuser(hook),
                         join_hook=_refuser(join), _get_ddp_logging_data=dict)


def _forward(shell: weakref.ref[DistributedDataParallel], *args: Any, **kwargs: Any) -> Any:
    """With the first rank's buffers, as there: running statistics, say. Those that a model makes itself, which are not
    persistent, are alike anyhow."""
    self = shell()
    if self.broadcast_buffers and self.require_forward_param_sync:
        for owner in self.module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and name not in owner._non_persistent_buffers_set:
                    dist.broadcast(buffer.detach(), group_src=0, group=self.process_group)
    return self.module(*args, **kwargs)
