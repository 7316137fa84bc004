"""How long a step takes: its numbers, for the walk of csrc/walk/walk.h, and what the walk says of them."""
from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .. import _core
from ..figures.report import OWN
from ..figures.timeline import LANES, WAITS
from ..store.disk import BAYS
from ..store.planes import AHEAD, STAY
from .cost import OFFLOAD_DEPTH, STAGINGS

NORM_S = 0.0005             # clip factor, and waking the updater
SHOWN_MICRO = 8             # micro-batches walked through; of more, those before the last are taken to be alike
SHARED = ("exchange", "network", "host memory")         # what several GPUs have besides
# As a measured step names them; OWN: Python, launching.
RESOURCES = (*(k for k in LANES if k not in (WAITS, "gather", *SHARED)), OWN)
ROWS = {**_core.LANES, **{row: len(_core.LANES) + i for i, row in enumerate((OWN, *SHARED))}}   # of the walk, by name
# What compute may wait for.
CAUSES = ("host update", "disk", "h2d", "d2h", "host sum", "through", "swap out", "swap back", "swap disk", OWN,
          *SHARED)
# Where a unit is updated, as numbers of rows. On the device: it is at home there, and nothing of it crosses.
HOST, DEVICE, THROUGH, ON_DISK = (ROWS[k] for k in ("host update", "device update", "through", "disk"))


class Lists(NamedTuple):
    """For each window, units: `item[begin[w]:begin[w + 1]]`."""

    begin: array[int]
    item: array[int]

    @staticmethod
    def of(lists: Iterable[Sequence[int]]) -> Lists:
        """From a list for each window."""
        lists = list(lists)
        ends = itertools.accumulate(map(len, lists), initial=0)
        return Lists(array("q", ends), array("q", itertools.chain.from_iterable(lists)))


@dataclass(kw_only=True)
class Step:
    """What a step is made of. By window (w) or by unit (u); seconds and bytes. Sequences become arrays.

    Attributes:
        forward_s, backward_s, forward_host_s, backward_host_s: [w] of one micro-batch; `host` is what Python
            takes to launch it. No backward where backward_s is 0.
        units, again: of windows, units whose weights one binds, in forward and in backward.
        leaving: of windows, units whose gradients are handed over at the end of its backward.
        updated_on: [u] HOST, DEVICE, THROUGH or ON_DISK.
        weights, gradients: [u] bytes that cross; update_s: [u] on the host, or on the device where at home
            there; add_s: [u] to add up a further micro-batch's gradient on the host.
        slots: bytes of each slot. micro: micro-batches.
        h2d, d2h, both, busy: bytes/s; see Machine. stretch: updates on the host take so many times update_s; see Held.
        visiting: [u] bytes of states that arrive, of units at home in VRAM.
        away: [w] bytes of what it keeps in host memory between forward and backward. spilled: [w] 1 where that goes on
            to a file; write, read: its bytes/s.
        disk_s: [u] in which what an update on disk needs is read and written; it is made beside the others.
            read_s: [u] in which a fetch reads weights that are there too; updates from disk stand back meanwhile.
        through_s: [u] of updates that pass through the device, beside the host's.
        lent: bytes of the buffers that gradients pass through where they are kept nowhere, largest first; none where
            they are kept. Updates then follow their gradients, in backward. depth: units whose gradients may be alive
            on the device, beside those that are being computed.
        exchange_s, network_s, lost_s, gather_s, held_s, spread_s, lowered, raised: [u] of one of several GPUs: see
            Exchange.
        parts, peers, on_link, memory, memory_s: see Exchange and Fleet.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    forward_host_s: Sequence[float]
    backward_host_s: Sequence[float]
    units: Lists
    again: Lists
    leaving: Lists
    updated_on: Sequence[int]
    weights: Sequence[int]
    gradients: Sequence[int]
    update_s: Sequence[float]
    add_s: Sequence[float]
    slots: Sequence[int]
    micro: int
    h2d: float
    d2h: float
    both: float
    busy: float
    stretch: float = 1.0
    visiting: Sequence[int] = ()
    away: Sequence[int] = ()
    spilled: Sequence[int] = ()
    disk_s: Sequence[float] = ()
    read_s: Sequence[float] = ()
    through_s: Sequence[float] = ()
    exchange_s: Sequence[float] = ()
    network_s: Sequence[float] = ()
    lost_s: Sequence[float] = ()
    gather_s: Sequence[float] = ()
    held_s: Sequence[float] = ()
    spread_s: Sequence[float] = ()
    lowered: Sequence[int] = ()
    raised: Sequence[int] = ()
    parts: int = 1
    peers: float = 0.0
    on_link: bool = False
    memory: float = 0.0
    memory_s: float = 0.0
    lent: Sequence[int] = ()
    depth: int = OFFLOAD_DEPTH
    write: float = 1.0
    read: float = 1.0
    stagings: ClassVar[int] = STAGINGS
    bays: ClassVar[int] = BAYS
    ahead: ClassVar[int] = AHEAD
    stay: ClassVar[int] = STAY
    rest_s: ClassVar[float] = NORM_S

    def __post_init__(self) -> None:
        windows, units = len(self.forward_s), len(self.weights)
        for names, kind, length in _ARRAYS:
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, array):
                    setattr(self, name, array(kind, value or [0] * (windows if length == "w" else units)))
        for name in ("lent", "slots"):
            setattr(self, name, array("q", getattr(self, name)))

    @property
    def shown(self) -> int:
        """Micro-batches that are walked through."""
        return min(self.micro, SHOWN_MICRO)


_ARRAYS = ((("forward_s", "backward_s", "forward_host_s", "backward_host_s"), "d", "w"),
           (("away", "spilled"), "q", "w"),
           (("update_s", "add_s", "disk_s", "read_s", "through_s", "exchange_s", "network_s", "lost_s",
             "gather_s", "held_s", "spread_s"), "d", "u"),
           (("updated_on", "weights", "gradients", "visiting", "lowered", "raised"), "q", "u"))


@dataclass(frozen=True)
class Timing:
    """Seconds of a step; `busy` by lane, `idle` of compute by what it waited for: as a StepReport has them."""

    seconds: float
    forward_s: float
    busy: dict[str, float]
    idle: dict[str, float]


def simulate(step: Step, schedule: bytes | None = None, than: float = math.inf) -> Timing | None:
    """One step in the steady state; None, which is known sooner, where it takes `than` seconds or more. schedule: the
    engine's of this step, where it is known already; it depends on homes, slots and the number of micro-batches only.
    """
    found = _core.walk(step, schedule or _core.schedule(step), than)
    if found is None:
        return None
    seconds, forward_s, busy, idle, _ = found
    rows = (*RESOURCES, *SHARED) if step.memory else RESOURCES
    return Timing(seconds, forward_s, {name: busy[ROWS[name]] for name in rows},
                  {name: idle[ROWS[name]] for name in CAUSES if idle[ROWS[name]] > 0})
