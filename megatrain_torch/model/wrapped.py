"""DistributedDataParallel around a model that several processes stream: they exchange its gradients themselves.

Accelerate, Trainer and Lightning put it around what they train. It stays, since they look for it and its `module`, as a
shell that passes all through. Around a module of which only a part is streamed it is what it always is, and leaves that
part out.
"""
from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ..base import patches
from ..base.errors import MegatrainError
from ..store.guard import StreamedParameter

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__)


def watch() -> None:
    """For as long as a model is streamed."""
    patches.once("DistributedDataParallel", _patch)


def _patch() -> Callable[[], None]:
    own = DistributedDataParallel.__init__

    @functools.wraps(own)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        streamed = {name: p for name, p in module.named_parameters() if isinstance(p, StreamedParameter)}
        if streamed:
            asked = _ARGUMENTS.bind(self, module, *args, **kwargs)
            asked.apply_defaults()
            _check(streamed, _group_of(asked.arguments))
        if any(p.requires_grad and name not in streamed for name, p in module.named_parameters()) or not streamed:
            if streamed:
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(streamed))
            own(self, module, *args, **kwargs)
        else:
            _shell(self, module, asked.arguments)

    return patches.replaced(DistributedDataParallel, "__init__", init)


def _group_of(asked: dict[str, Any]) -> Any:
    mesh = asked["device_mesh"]
    return asked["process_group"] or (dist.group.WORLD if mesh is None else mesh.get_group(0))


def _check(streamed: dict[str, StreamedParameter], group: Any) -> None:
    """Raises: the processes would each train a model of their own."""
    alone = next((name for name, p in streamed.items() if p._mt.runtime.ranks is None), None)
    many = dist.get_world_size(group)
    if alone is not None and many > 1:
        raise MegatrainError(f"DistributedDataParallel of {many} processes around {alone}, which this process streams "
                             "alone: torch.distributed has to be initialized before mt.stream (init_process_group(); "
                             "TrainingArguments and Accelerator() do it too)")


def _shell(self: DistributedDataParallel, module: nn.Module, asked: dict[str, Any]) -> None:
    """With the attributes that others look at; `no_sync` has nothing to put off."""
    nn.Module.__init__(self)
    Joinable.__init__(self)
    self.module, self.process_group = module, _group_of(asked)
    self.device_ids, self.output_device, self.dim = None, None, 0
    self.require_backward_grad_sync = self.require_forward_param_sync = True
    self.find_unused_parameters = self.static_graph = False
    self.broadcast_buffers, self.parameters_to_ignore = asked["broadcast_buffers"], set()
    self.reducer = _NoReducer()
    self.__dict__.update(forward=functools.partial(_forward, weakref.ref(self)), register_comm_hook=_no_hook,
                         join_hook=_no_join, _get_ddp_logging_data=dict)


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


def _no_hook(*_: Any, **__: Any) -> None:
    raise MegatrainError("a communication hook of DistributedDataParallel: a streamed model's gradients do not pass "
                         "through it, but are exchanged as they leave the device; leave it out")


def _no_join(*_: Any, **__: Any) -> None:
    raise MegatrainError("Join, for ranks with fewer batches than others: a streamed model needs all ranks in each "
                         "backward; give each as many (DistributedSampler and accelerate's even_batches do)")
