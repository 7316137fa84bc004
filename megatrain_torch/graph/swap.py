"""Kept tensors that wait in host memory, or in a file, from a window's forward to its backward (csrc/core/swap.h).

    bundle = Bundle(swap, window, disk)  # in the window's forward
    part = bundle.add(tensor)            # what stands for it in the graph
    bundle.leave()                       # behind the window's kernels
    ...
    tensor = part.tensor()               # in backward; the whole bundle has come back by then, or comes now

When a window's backward begins, the bundles of the windows before it begin to come back, `Swap.ahead` of them. The
memory that a bundle leaves on the device goes back to torch's allocator when the next window's bundle leaves: compute
waits for the copies then, so no more than two windows' tensors lie there. The last bundle of a forward is
still there when its backward begins, need not come back, and is not waited for.

A bundle for the file waits for host memory where the file is behind, and comes back when it was read: `Swap.ahead` of
the window that needs it, and the engine reads ahead of that.

A graph that is dropped, gone through twice or in another order is right too: a bundle's host memory is its own until
the last of its parts is gone.
"""
from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import MegatrainError
from ..store.disk import BAYS
from ..store.records import span_of
from ..store.state import PLAIN

if TYPE_CHECKING:
    from ..model.runtime import Runtime
    from .window import Window

LEAST_BYTES = 512            # of a tensor that is worth a copy of its own
GIVEN_UP = 2                 # windows behind its own that a bundle's sources stay for, where no other bundle leaves


class Part:
    """A tensor of a bundle."""

    def __init__(self, bundle: Bundle, number: int) -> None:
        self.bundle, self.number = bundle, number
        self._runtime = bundle.swap.runtime.itself()         # for as long as the graph is there

    def tensor(self) -> Tensor:
        return self.bundle.get(self.number)


class Bundle:
    """What one window keeps of one call."""

    def __init__(self, swap: Swap, window: Window, disk: bool = False) -> None:
        self.swap, self.unit, self.disk = swap, window.units[0], disk
        self.core = swap.runtime.core        # a bundle may be the last to go
        # Where the window comes in the order of forwards; and where that one does whose backward asks for it first: its
        # own, or the next, which makes its input again from it.
        self.position = self.needed = swap.position
        self.sources: list[Tensor] = []      # until they have left or were asked for
        self.versions: list[tuple[Tensor, int]] = []
        self.shapes: list[tuple[Any, Any, torch.dtype, int]] = []
        self.known: dict[Any, int] = {}
        self.wanted: list[int] = []          # how often each is still to be asked for, by the backward that comes first
        self.landed: dict[int, Tensor] = {}  # those that came back and were not asked for yet
        self.input = -1                      # the number of the window's input, if it is among them
        self.number = 0                      # the engine's; 0: has not left
        self.met = False                     # asked for
        self.coming: int | None = None       # on its way back, unawaited; the stream whose allocations that memory is

    def add(self, t: Tensor) -> Part:
        """Two parts of one tensor are copied once."""
        key = (t.data_ptr(), t.dtype, t.shape, t.stride(), t._version)
        number = self.known.get(key)
        if number is None:
            number = self.known[key] = len(self.sources)
            t = t.detach()
            self.sources.append(t)
            self.versions.append((hollow(t), t._version))
            self.shapes.append((t.shape, t.stride(), t.dtype, span_of(t) * t.element_size()))
            self.wanted.append(0)
        self.wanted[number] += 1
        return Part(self, number)

    def leave(self) -> None:
        """All of them begin to leave; behind what compute has been given so far."""
        self.known = {}
        if not self.sources:
            return
        swap, rt = self.swap, self.swap.runtime
        swap.sweep()
        parts = tuple((t.data_ptr(), shape[-1]) for t, shape in zip(self.sources, self.shapes))
        rt.room.activations(rt.core, sum(n for _, n in parts), BAYS if self.disk else 1)
        self.number = rt.core.swap_out(self.unit, parts, rt.stream(), self.disk)
        swap.held.append((self, self.sources))
        swap.out = [ref for ref in swap.out if ref() is not None]
        swap.out.append(weakref.ref(self))

    def get(self, number: int) -> Tensor:
        check_unwritten(*self.versions[number], self.shapes[number][0])
        if self.sources:                     # on the device still; Swap.held has them until their copies are over
            self.swap.runtime.handover.at_end(self)
            self.landed, self.sources = dict(enumerate(self.sources)), []
        if number not in self.landed:
            self.come([number] if self.wanted[number] <= 0 else None)
        self._await()
        if not self.met:
            self.met = True
            self.swap.approach(self.needed)
        self.wanted[number] -= 1
        return self.landed.pop(number) if self.wanted[number] <= 0 else self.landed[number]

    def come(self, only: list[int] | None = None) -> None:
        """Begins to come back: all that is still to be asked for, or `only` these."""
        numbers = only or [n for n, times in enumerate(self.wanted) if times > 0 and n not in self.landed]
        rt, parts = self.swap.runtime, [(0, nbytes) for *_, nbytes in self.shapes]
        rt.handover.at_end(self)
        self._await()
        stream = rt.stream()
        with torch.no_grad():
            for n in numbers:
                size, stride, dtype, nbytes = self.shapes[n]
                self.landed[n] = torch.empty_strided(size, stride, dtype=dtype, device=rt.device)
                parts[n] = self.landed[n].data_ptr(), nbytes
        try:
            rt.core.swap_back(self.number, tuple(parts), stream)
        except MegatrainError:               # nothing is under way, and nothing has landed
            for n in numbers:
                del self.landed[n]
            raise
        self.coming = stream

    def _await(self) -> None:
        """The current stream waits for the copies back; so does the one whose allocations the landing memory is, since
        what follows there may be given that memory next."""
        if self.coming is not None:
            streams, self.coming = {self.coming, self.swap.runtime.stream()}, None
            for stream in streams:
                self.core.swap_await(self.number, stream)

    def backward_ended(self) -> None:
        """What came back and was not asked for comes again for the next backward that does."""
        self._await()
        self.landed = {}

    def __del__(self) -> None:
        core = self.core
        with contextlib.suppress(MegatrainError):        # the engine may be closed: then no copy is under way
            if self.coming is not None:                  # its landing memory is freed now, in its stream's order
                core.swap_await(self.number, self.coming)
            core.swap_drop(self.number)


class Swap:
    """All bundles of a streamed model."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ahead = 1                       # windows before the one in backward whose bundles come back
        self.position = 0                    # windows run under autograd so far
        self.held: deque[tuple[Bundle, list[Tensor]]] = deque()      # whose sources may not be freed yet
        self.out: list[weakref.ref[Bundle]] = []         # in the order in which they left

    def may(self, t: Any) -> bool:
        """Is this a tensor on the compute device that is worth a copy, and as dense as its elements?"""
        return (type(t) in PLAIN and t.device == self.runtime.device and t.layout is torch.strided
                and t.numel() <= span_of(t) <= 1.25 * t.numel()
                and t.numel() * t.element_size() >= LEAST_BYTES)

    def entered(self) -> None:
        """A window runs under autograd."""
        self.position += 1
        if self.held:
            self.sweep(self.position - GIVEN_UP)

    def sweep(self, position: float = math.inf) -> None:
        """The sources' memory of windows before this position goes back to torch's allocator, behind the copies out."""
        while self.held and self.held[0][0].position < position:
            bundle = self.held[0][0]
            self.runtime.core.swap_left(bundle.number, self.runtime.stream())
            bundle.sources = []
            self.held.popleft()

    def approach(self, position: int) -> None:
        """The backward of the window at this position begins: those before it are about to be asked for, those behind
        it are done with."""
        if self.held and self.held[0][0].position > position:
            self.sweep()
        for ref in reversed(self.out):
            bundle = ref()
            if bundle is None or bundle.needed >= position:
                continue
            if bundle.needed < position - self.ahead:
                break
            if not bundle.landed and not bundle.sources and any(times > 0 for times in bundle.wanted):
                bundle.come()


def modified(what: str) -> RuntimeError:
    """In the words of autograd's own error."""
    return RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                        f"operation: {what}")


def check_unwritten(t: Tensor, version: int, shape: Any) -> None:
    """Raises: RuntimeError: a tensor that shares the version counter of a saved one was written since."""
    if t._version != version:
        raise modified(f"a tensor of shape {list(shape)} is at version {t._version}; expected version {version} "
                       "instead")


def hollow(t: Tensor) -> Tensor:
    """A tensor without memory that shares t's count of in-place writes."""
    shell = t.detach()
    shell.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return shell


def storage_of(t: Tensor) -> int:
    """Where a plain tensor's storage begins: equal for views of one. 0: it has none."""
    return t.untyped_storage().data_ptr() if type(t) in PLAIN and t.layout is torch.strided else 0
