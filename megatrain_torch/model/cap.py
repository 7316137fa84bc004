"""torch's allocator, held to a limit of the device while a streamed model has one."""
from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..base.limits import device_taken
from ..group.ranks import Ranks

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
JOINED, SEPARATE = "expandable_segments:True", "expandable_segments:False"

_caps: weakref.WeakSet[Cap] = weakref.WeakSet()          # of the process's models


class Cap:
    """Holds torch's allocator to the process's limit of the device, while a streamed model has one.

    torch keeps freed memory, in fragments; without a limit it takes fresh memory before it tidies up. The limit is the
    process's: its context and other models in it have their part of it; other processes share the rest of the device.
    `lift` puts back what was before.

    Attributes:
        limit: bytes of the device that the process may have in all; None: there is no limit.
    """

    def __init__(self, device: torch.device, stored: Callable[[], int]) -> None:
        """stored: tells the bytes that the model's store has of the device now, beside torch's allocator."""
        self.device, self.stored, self.before, self.joined = device, stored, None, False
        self.limit: int | None = None
        _caps.add(self)

    def hold(self, limit: int | None, store_bytes: int) -> None:
        """From now on to this limit. store_bytes: device memory that the model's store will have."""
        self.lift()
        self.limit, device = limit, self.device
        if device.type != "cuda" or limit is None:
            return
        context, others, stores = self.taken()
        total = torch.cuda.mem_get_info(device)[1]
        room = min(limit, total - others) - context - (stores - self.stored()) - store_bytes
        self.before = torch.cuda.get_per_process_memory_fraction(device)
        torch.cuda.set_per_process_memory_fraction(min(self.before, max(room / total, 0.0)), device)
        self.joined = not any(os.environ.get(name) for name in _ALLOCATOR)
        self._join(JOINED)

    def taken(self) -> tuple[int, int, int]:
        """Bytes of the device that torch's allocator does not have: (this process's context and libraries, other
        processes', stores of this process's models)."""
        free, total = torch.cuda.mem_get_info(self.device)
        stores = sum(cap.stored() for cap in _caps if cap.device == self.device)
        taken = max(total - free - torch.cuda.memory_reserved(self.device) - stores, 0)
        return *device_taken(taken, Ranks.taken), stores

    def lift(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            self._join(SEPARATE)
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Memory that is asked for in here other processes can reach: not in segments that are joined."""
        given = next((os.environ[name] for name in _ALLOCATOR if os.environ.get(name)), "")
        now = JOINED if self.joined and self.before is not None else given
        joined = self.device.type == "cuda" and JOINED in now.replace(" ", "")
        if joined:
            _set(SEPARATE)
        try:
            yield
        finally:
            if joined:
                _set(now)

    def close(self) -> None:
        """The store is about to end."""
        self.lift()
        _caps.discard(self)

    def _join(self, on: str) -> None:
        """Fragments of freed memory can be joined again: under a limit little is lost. Settings are taken as a whole,
        so none are made where the user made some."""
        if self.joined:
            _set(on)


def _set(settings: str) -> None:
    found = getattr(torch._C, "_accelerator_setAllocatorSettings", None)      # from torch 2.10 on
    (found or torch.cuda.memory._set_allocator_settings)(settings)
