"""Doors of the engine that its own tests open: delays in every queue, waits left out, small buffers. Not for training.

    with engine_doors(delay_us=300, seed=3):
        model = mt.stream(model, device="cpu")
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Doors:
    """How an engine is opened; as it is here for users."""

    delay_us: int = 0           # each queue sleeps up to so long before each operation
    seed: int = 0               # what the lengths are drawn from
    lock: int | None = None     # bytes of host memory that may be locked for the device; None: as the system allows
    skip: int = 0               # waits that are left out, bits MT_EDGE_* of csrc/core/context.h
    poison: bool = False        # slots are filled with NaN when they are freed
    sync: bool = False          # each operation is over before the next is asked for
    disk: Mapping[str, int] = field(default_factory=dict)       # sizes of buffers, and threads, of states on disk
    spill: Mapping[str, int] = field(default_factory=dict)      # and of activations, beside the usual


_doors: ContextVar[Doors | None] = ContextVar("megatrain_torch.testing", default=None)


def opened() -> Doors:
    """Those for what is streamed now."""
    return _doors.get() or Doors()


@contextlib.contextmanager
def engine_doors(**doors: Any) -> Iterator[None]:
    """Models that this thread streams inside have these Doors, for as long as they are streamed."""
    before = _doors.set(Doors(**doors))
    try:
        yield
    finally:
        _doors.reset(before)
