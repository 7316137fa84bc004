"""One streamed model: the C engine, and the objects that tie it to torch, each with one idea."""
from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

import torch
from torch import nn

from .. import _core
from ..graph.door import UNTRACED, Door
from ..graph.exchange import Exchange
from ..graph.frames import Expansions
from ..graph.handover import HandOver
from ..graph.swap import Swap
from ..graph.window import Window
from ..group.ranks import Ranks
from ..plans.room import Room
from ..store.planes import Planes
from ..store.records import Record
from ..store.whole import Whole
from .cap import Cap
from .delivery import Delivery
from .forwards import Forwards
from .homes import Homes
from .keeps import Keeps
from .reads import Reads
from .ring import Ring
from .saves import Saves
from .states import States
from .trained import Trained


class Runtime:
    """
    Attributes:
        room: refuses planes that come later and will not fit. compute, products: as given to mt.stream.
        planning: planning.Planning, of an ordinary loop that nobody has planned; None: somebody has.
        trace: mt.trace's, while it is on; else UNTRACED.
        looked: what looks at numbers gave, by reading, and why code could not be followed, by window and call.
        broken: why it is not to be run: a load or a move that failed half-way; "": it is.
        given: places of parameters that have something else (functional_call).
        checkpointing: modules whose own checkpointing windows do (hf.py).
        reported: the last report without a trace.
        ranks: the processes that stream it together; None: this one is alone. exchange: of gradients between them.
        delivery: of weights to them. leave: called once, when this is given up or the process ends: the others may
            still await something of it.
    """

    def __init__(self, root: nn.Module, device: torch.device, core: _core.Engine, room: Room, compute: str,
                 ranks: Ranks | None = None, reduce: str = "mean", products: str = "bf16") -> None:
        self.root, self.device, self.core, self.room, self.compute = weakref.ref(root), device, core, room, compute
        self.products = products
        self.is_cuda = device.type == "cuda"
        self.records: list[Record] = []
        self.units: list[list[Record]] = []
        self.unit_names: list[str] = []
        self.wholes: list[list[Whole]] = []
        self._windows: list[weakref.ref[Window]] = []        # modules have them, and they have this
        own = weakref.proxy(self)            # for what only this has
        self.door = Door(type(root).__name__, self.is_cuda)
        self.cap = Cap(device, core.device_bytes)
        self.ranks = ranks
        self.leave: weakref.finalize[Any, Runtime] | None = None
        if ranks is not None:
            ranks.control.engine = core
        self.handover = HandOver(own)
        self.exchange = None if ranks is None else Exchange(own, self.handover, ranks, reduce == "mean")
        self.swap, self.expansions, self.delivery = Swap(own), Expansions(), Delivery(own)
        self.ring = Ring(own)
        self.homes = Homes(own, core, self.ring, 1 if ranks is None else len(ranks.mates))
        self.saves = Saves()
        self.planes = Planes(core, self.homes, self.saves, room, ranks is not None,
                             ranks is not None and ranks.apart)
        self.states = States(core, room)
        self.reads = Reads(own)
        self.trained = Trained(own)
        self.keeps = Keeps(own)
        self.forwards = Forwards(own)
        self.looked: dict[Any, str] = {}
        self.planning: Any = None
        self.trace: Any = UNTRACED
        self.broken = ""
        self.given = 0
        self.checkpointing: list[weakref.ref[nn.Module]] = []
        self.reported: tuple[float, dict[str, int]] = (time.perf_counter(), {})

    def __del__(self) -> None:
        """The last who had it let go: the device's limit is lifted, and the engine ends before slots are freed."""
        with contextlib.suppress(Exception):         # it was never whole; or torch is gone already
            if self.leave is not None:
                self.leave()
            self.close()

    def close(self) -> None:
        """Gives everything back: files lose their names while there is an engine that knows them."""
        self.cap.close()
        self.homes.unname_files()
        if self.exchange is not None:
            self.exchange.close()
        self.core.close()

    def itself(self) -> Runtime:
        """For those who know it by a proxy."""
        return self

    @property
    def windows(self) -> list[Window]:
        """Those whose modules are still there."""
        return [w for w in [ref() for ref in self._windows] if w is not None]

    @property
    def window_count(self) -> int:
        return len(self._windows)

    def add_window(self, window: Window) -> None:
        self._windows.append(weakref.ref(window))

    def stream(self) -> int:
        """Handle of the stream torch computes on now."""
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.is_cuda else 0

    def unit_of(self, number: int) -> int:
        """The unit of this number, or that is cut to this one."""
        return self.ring.unit_of(number)

    def drain(self) -> None:
        """Everything under way is over: gradients landed, updates done."""
        self.core.drain()
        self.handover.release()
        self.homes.arrivals.leave()
