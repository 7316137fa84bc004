"""torch's allocator, held to a limit of the device while a streamed model has one."""
from __future__ import annotations

import os

import torch

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Cap:
    """Holds torch's allocator to a limit of the whole device, while a streamed model has one.

    torch keeps freed memory, in fragments; without a limit it takes fresh memory before it tidies up. The limit is the
    process's: other models in it share the rest. `lift` puts back what was before.

    Attributes:
        limit: bytes of the device in all; None: there is no limit.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.before, self.joined = device, None, False
        self.limit: int | None = None

    def hold(self, limit: int | None, store_bytes: int, made: int = 0) -> None:
        """From now on to this limit. store_bytes: device memory that the store will have beside torch; made: of that,
        what it has."""
        self.lift()
        self.limit, device = limit, self.device
        if device.type != "cuda" or limit is None:
            return
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device) - made     # driver, libraries, other processes
        self.before = torch.cuda.get_per_process_memory_fraction(device)
        room = (min(limit, total) - others - store_bytes) / total
        torch.cuda.set_per_process_memory_fraction(min(self.before, max(room, 0.0)), device)
        self.joined = not any(os.environ.get(name) for name in _ALLOCATOR)
        self._join("True")

    def lift(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            self._join("False")
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def _join(self, on: str) -> None:
        """Fragments of freed memory can be joined again: under a limit little is lost. Settings are taken as a whole,
        so none are made where the user made some."""
        if self.joined:
            settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)      # from torch 2.10 on
            (settings or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{on}")
