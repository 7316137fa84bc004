"""DistributedDataParallel around a model that several processes stream: they exchange its gradients themselves.

Accelerate, Trainer and Lightning put it around what they train. It stays, since they look for it and its `module`, as a
shell that passes all through. Around a module of which only a part is streamed it is what it always is, and leaves that
part out.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ..base import patches
from ..store.guard import StreamedParameter


def watch() -> None:
    """For as long as a model is streamed."""
    patches.once("DistributedDataParallel", _patch)


def _patch() -> Callable[[], None]:
    own = DistributedDataParallel.__init__

    @functools.wraps(own)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        exchanged = {name for name, p in module.named_parameters()
                     if isinstance(p, StreamedParameter) and p._mt.runtime.ranks is not None}
        if any(p.requires_grad and name not in exchanged for name, p in module.named_parameters()) or not exchanged:
            if exchanged:
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(exchanged))
            own(self, module, *args, **kwargs)
        else:
            _shell(self, module)

    return patches.replaced(DistributedDataParallel, "__init__", init)


def _shell(self: DistributedDataParallel, module: nn.Module) -> None:
    """With the attributes that others look at; `no_sync` has nothing to put off."""
    nn.Module.__init__(self)
    Joinable.__init__(self)
    self.module = module
    self.device_ids, self.output_device, self.dim = None, None, 0
    self.require_backward_grad_sync = self.require_forward_param_sync = True
    self.find_unused_parameters = self.static_graph = False
    self.__dict__["forward"] = module.__call__
