"""Gradients leave a window: from autograd's hands into the store's GRAD planes.

A window's weight gradients arrive together in `HandOver.take`. `Layer.backward` (fused/layer.py) calls it where a
template runs the window, else `Bind.backward` (store/state.py) does. Each parameter is one of

    streamed   the usual case: copied down behind compute; autograd is told None, and `p.grad` is late: gradient.py
    summed     used again in this backward (tied weights): added on the device in torch's order, sent after the last use
    real       autograd wants the tensor itself (autograd.grad, hooks on the parameter, arithmetic on
               the host copy): a finished host tensor is returned
    unwanted   autograd.grad or backward(inputs=...) without this parameter: dropped

What is under way in one graph task is flushed when the task ends, by autograd's own callback.
"""
from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import MegatrainError
from ..store import gradient
from ..store.records import Record, Use
from ..store.state import in_backward
from .frames import refuse_create_graph

if TYPE_CHECKING:
    from ..model.runtime import Runtime


class HandOver:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.unstepped = False               # gradients were sent since mt.AdamW's last step
        self.alive: deque[tuple[int, list[Tensor]]] = deque()   # sources of copies that are still in flight
        self.opened = 0                                         # windows of this pass, while there are such
        self.tasks: dict[int, list[weakref.ref[Any]]] = {}      # graph tasks that have our callback, and whom it tells
        self.summed: dict[int, Record] = {}                     # records with a pending device sum
        self.stream = 0                                         # where the last hand-over happened
        self.copied: dict[int, dict[Record, Tensor]] = {}       # by unit: copies of gradients that an update reads
        self.observer: Any = None                               # an optimizer that updates in backward, weakly
        self.looks = False                                      # the backward under way is a look's

    def take(self, records: list[Record], use: Use | None, nodes: list[Any],
             grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of a window's parameters, in autograd's thread; what autograd is to be given in their place.
        nodes: their AccumulateGrads."""
        refuse_create_graph()
        self.join_task()
        again = use is None or use.handed          # a graph that is gone through twice
        if use is not None:
            use.hand()
        out: list[Tensor | None] = [None] * len(records)
        found: list[tuple[Record, Tensor]] = []
        for i, (record, node, grad) in enumerate(zip(records, nodes, grads)):
            kind = "unwanted" if grad is None and record.pending is None else self._kind(record, node)
            if kind == "real" and grad is not None:
                out[i] = torch.empty_strided(record.shape, record.stride, dtype=grad.dtype).copy_(grad)
            elif kind == "streamed":
                if self.runtime.exchange is not None:
                    self.runtime.exchange.joins()
                if again or record.open > 0 or record.pending is not None:
                    grad = self._sum(record, grad, again or record.open > 0)
                if grad is not None:
                    found.append((record, grad))
        self._send(found)
        self.runtime.trace.handed_over()
        return out

    def _kind(self, record: Record, node: Any) -> str:
        exchange, param = self.runtime.exchange, record._param()
        with torch._C.DisableTorchFunctionSubclass():
            hooks = len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ())
            if not param.requires_grad:          # frozen since the forward: torch drops it too
                return "unwanted"
        hooked = hooks > (0 if exchange is None else exchange.hooks(record))
        if not record.was_trainable:             # frozen in a forward since then, and trained again
            self.runtime.follow_requires_grad()
        try:
            if node is not None and not torch._C._will_engine_execute_node(node):
                return "unwanted"
        except RuntimeError:                     # a leaf under autograd.grad(): torch cannot say, and captures it
            return "real"
        if hooked and exchange is not None:
            exchange.route(record)               # behind them
        return "real" if hooked or record.host_graph else "streamed"

    def _sum(self, record: Record, grad: Tensor | None, more: bool) -> Tensor | None:
        """The gradient to send now, or None while more of this backward are to come. torch adds up what one backward
        gives a parameter, and adds the sum to .grad. Where .grad was empty when it began the order is the same without
        waiting; where it was not, and for tied weights, wait."""
        if record.pending is None:
            stood = gradient.standing(record) is not None and record.set_in != in_backward()
            if not stood and record.uses <= 1:
                return grad
            record.pending = grad
        elif grad is not None:
            record.pending = record.pending + grad
        if more:
            self.summed[record.pid] = record
            return None
        self.summed.pop(record.pid, None)
        total, record.pending = record.pending, None
        return total

    # ---- a graph task, from the first that we see of it to its end ----

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A look's backward, inside a forward: it is no backward of the model's, and its end ends nothing."""
        outer, self.looks = self.looks, True
        try:
            yield
        finally:
            self.looks = outer

    def join_task(self) -> None:
        self.stream = self.runtime.stream()
        self._whom_it_tells()

    def at_end(self, what: Any) -> None:
        """Where a backward is under way, what.backward_ended() is called when it is over, if that lives by then."""
        if in_backward() != -1:
            self._whom_it_tells().append(weakref.ref(what))

    def _whom_it_tells(self) -> list[weakref.ref[Any]]:
        task = in_backward()
        if task not in self.runtime.door.tasks:
            self.runtime.door.task_begins(task)
        if task not in self.tasks:
            self.tasks[task] = []
            self.runtime.backward_seen = True    # the next root forward begins another pass, whichever module it is of
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._task_ended(task))
        return self.tasks[task]

    def _tell(self, task: int) -> None:
        """What backward brought or made and did not use is given back, whoever holds the graph."""
        for ref in self.tasks.pop(task, ()):
            if (what := ref()) is not None:
                what.backward_ended()

    def _task_ended(self, task: int) -> None:
        """Runs in whichever thread ends the task: sends what waited for uses that never came."""
        self._tell(task)
        self.runtime.door.tasks.pop(task, None)
        self.runtime.swap.sweep()
        self._send(self._dropped())
        if self.runtime.exchange is not None and not self.tasks:
            self.runtime.exchange.ends()
        self.runtime.forget_reads()
        self.runtime.trace.handed_over()

    def _dropped(self) -> list[tuple[Record, Tensor]]:
        """Device sums are no longer waited for; gives them."""
        found = [(r, r.pending) for r in self.summed.values() if r.pending is not None]
        for record, _ in found:
            record.pending = None
        self.summed.clear()
        return found

    def broken_off(self) -> None:
        """Was there a backward that raised? The others of several processes are not to wait until the next forward."""
        if self.runtime.exchange is not None and self.runtime.exchange.began and in_backward() == -1:
            self.sweep()

    def sweep(self) -> None:
        """After a backward that raised: its callback never ran."""
        self._dropped()
        for task in list(self.tasks):
            self._tell(task)
        if self.runtime.exchange is not None:
            self.runtime.exchange.sweep()

    # ---- to the store ----

    def _send(self, found: list[tuple[Record, Tensor]]) -> None:
        exchange, arrivals = self.runtime.exchange, self.runtime.homes.arrivals
        by_unit: dict[int, list[tuple[Record, Tensor]]] = {}
        for record, grad in found:
            by_unit.setdefault(record.unit, []).append((record, self.conform(record, grad)))
        for unit, pairs in by_unit.items():
            if arrivals.units:               # of several processes too, whose gradients come home later; and before an
                arrivals.handed(unit)        # update in backward, which ends a stay
            (self._send_unit if exchange is None else exchange.offer)(unit, pairs)

    def _send_unit(self, unit: int, pairs: list[tuple[Record, Tensor]]) -> None:
        """pairs: each gradient of the record's form."""
        items, sources = [], []
        self.ask_room(sums=False)
        if passing := not self.runtime.room.asked.keeps:         # kept nowhere: they must be used at once
            records = [r for r, _ in pairs]
            why = "nobody who updates in backward is there" if self.observer is None else \
                "its optimizer is gone" if (who := self.observer()) is None else who._declines(records)
            if any(gradient.standing(r) is not None for r in records):
                why = "there is a .grad to add to"
            if why:
                raise MegatrainError(f"{records[0].name}: its gradient is kept nowhere (plan={{'grads': 'none'}}), and "
                                     f"{why}; use mt.AdamW(in_backward=True), one backward per step")
        for record, grad in pairs:
            if (found := (gradient.SET, 0) if passing else gradient.claim(record)) is None:
                gradient.add(record, grad)
                self.unstepped = True
            elif record.numel:
                items.append((record.index, grad.data_ptr(), *found))
                sources.append(grad)
        if items:
            self.put(unit, items, sources)
            self.has_come(unit, [r for r, _ in pairs])

    def put(self, unit: int, items: list[tuple[Any, ...]], sources: list[Tensor], stream: int | None = None) -> None:
        """Gradients of one unit: items as Engine.offload takes them, which lie in `sources`. stream: in which they are
        made; None: in compute's."""
        if self.runtime.exchange is None and gradient.ADD in [mode for _, _, mode, *_ in items]:
            self.ask_room(sums=True)
        self.runtime.trace.handed_over()           # before compute is told to wait for copies of earlier gradients
        ticket = self.runtime.core.offload(unit, items, self.stream if stream is None else stream)
        # The copies read these tensors behind our back; they live until compute waits for the copies.
        self.alive.append((ticket, sources))
        self.unstepped = True
        self.let_go()

    def ask_room(self, sums: bool) -> None:
        """Raises: gradients are about to come, or to be added up, for which there is no room."""
        core, room = self.runtime.core, self.runtime.room
        if not room.begun:
            room.gradients(core)
        if sums and room.asked.micro == 1:
            room.sums(core)

    def has_come(self, unit: int, records: list[Record]) -> None:
        """These gradients of a unit have been put."""
        copied = self.copied.get(unit, {})
        for record in records:
            copied.pop(record, None)                   # the unit's updates are over: the hand-over waited for them
        if self.observer is not None and (who := self.observer()) is not None:
            who._update_now(unit, records)

    def let_go(self) -> None:
        """Frees the sources of copies that are over, or that compute waits for."""
        passed = self.runtime.core.passed()
        while self.alive and self.alive[0][0] <= passed:
            self.alive.popleft()

    @staticmethod
    def conform(record: Record, grad: Tensor) -> Tensor:
        """Dense, with the host plane's strides: what one plain copy needs."""
        if grad.layout != torch.strided:
            raise MegatrainError(f"{record.name}: its gradient is {grad.layout}; use dense gradients (sparse=False)")
        if grad.stride() == record.stride and grad.dtype == record.dtype:
            return grad
        with torch.no_grad():
            return torch.empty_strided(record.shape, record.stride, dtype=record.dtype, device=grad.device).copy_(grad)
