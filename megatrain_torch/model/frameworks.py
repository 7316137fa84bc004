"""What transformers, and whoever puts DistributedDataParallel around a model, need so that their code runs unchanged.

transformers: `PreTrainedModel.device` says where to put inputs (generate, Trainer): the compute device. Its own
checkpointing, which would run a layer a third time, is switched off as a pass begins (runtime.py).

DistributedDataParallel: several processes that stream a model exchange its gradients themselves. Accelerate, Trainer
and Lightning put it around what they train. It stays, since they look for it and its `module`, as a shell that passes
all through. Around a module of which only a part is streamed it is what it always is, and leaves that part out.
"""
from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ..base import patches
from ..base.coded import Coded
from ..base.errors import MegatrainError
from ..graph import masks
from ..store.guard import HostTensor, StreamedParameter

if TYPE_CHECKING:
    from .runtime import Runtime

_devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = weakref.WeakKeyDictionary()     # where they compute
_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__)


def refuser(text: str) -> Callable[..., Any]:
    """What stands in the place of a method that would do harm."""
    def refuse(*_: Any, **__: Any) -> Any:
        raise MegatrainError(text)
    return refuse


# ---- transformers ----

def prepare(rt: Runtime, root: nn.Module, put: Callable[[nn.Module, str, Any], None]) -> None:
    """put: puts a call in the place of a module's method."""
    transformers = sys.modules.get("transformers")
    rt.checkpointing = [weakref.ref(m) for m in root.modules()
                        if isinstance(getattr(m, "gradient_checkpointing", None), bool)]
    base = getattr(getattr(transformers, "modeling_utils", None), "PreTrainedModel", None)
    if base is None:
        return
    patches.once("PreTrainedModel.device", lambda: _report_compute_device(base))
    masks.install()
    # torchao's save_pretrained takes plain tensors and its own, and nothing else.
    quantizer = sys.modules.get("transformers.quantizers.quantizer_torchao")
    own = getattr(quantizer, "flatten_tensor_state_dict", None)
    if own is not None:
        patches.once("flatten_tensor_state_dict", lambda: patches.replaced(
            quantizer, "flatten_tensor_state_dict",
            lambda tensors: own({k: t.clone() if type(t) is HostTensor else t for k, t in tensors.items()})))
    stands = any(whole.format.expands for own in rt.wholes for whole in own)     # codes, for 16-bit weights
    for m in root.modules():
        if isinstance(m, base):
            _devices[m] = rt.device
            put(m, "resize_token_embeddings", refuser("resize_token_embeddings() after mt.stream: resize first, then "
                                                      "stream"))
            if stands and any(isinstance(p, Coded) for p in m.parameters()):
                put(m, "save_pretrained", refuser(
                    "save_pretrained() knows no codes that stand for 16-bit weights: mt.save(model, None, folder) "
                    "writes them as they are published; a PeftModel's saves its adapter"))


def _report_compute_device(base: Any) -> Callable[[], None]:
    own = base.device

    def device(self: Any) -> torch.device:
        streamed = "_apply" in self.__dict__     # of itself alone: torch.compile guards all that this looks at
        return _devices[self] if streamed and self in _devices else own.fget(self)

    return patches.replaced(base, "device", property(device, doc=own.__doc__))


# ---- DistributedDataParallel ----

def watch_ddp() -> None:
    """For as long as a model is streamed."""
    patches.once("DistributedDataParallel", _patch)


def _patch() -> Callable[[], None]:
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
    self.reducer = _NoReducer()
    hook = ("a communication hook of DistributedDataParallel: a streamed model's gradients do not pass through it, but "
            "are exchanged as they leave the device; leave it out")
    join = ("Join, for ranks with fewer batches than others: a streamed model needs all ranks in each backward; give "
            "each as many (DistributedSampler and accelerate's even_batches do)")
    self.__dict__.update(forward=functools.partial(_forward, weakref.ref(self)), register_comm_hook=refuser(hook),
                         join_hook=refuser(join), _get_ddp_logging_data=dict)


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


class _NoReducer:
    """Lightning calls it, before a backward of its manual optimization."""

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: list[Any]) -> None:
        """Whatever is used takes part."""
