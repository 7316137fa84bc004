"""What the package knows about one streamed parameter; what is waited for before its host memory is read or written,
and who is told after.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _core
from ..base.errors import MegatrainError
from ..base.modes import LOW_BYTES

if TYPE_CHECKING:
    from ..model.runtime import Runtime
    from .whole import Whole

# Types that stream, by safetensors' names for them; and the engine's numbers.
KINDS = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {dtype: _core.DTYPES[name.replace("_", "")] for dtype, name in KINDS.items()}


def mask(planes: Iterable[str]) -> int:
    """Bits of these planes, as the engine takes them."""
    return sum(1 << _core.PLANES[p] for p in planes)


HI, STATE_PLANES = mask(["HI"]), mask(("LO", "MASTER", "M", "V", "SCALE"))


class Record:
    """Where a parameter is, and where its gradient stands in this step."""

    def __init__(self, runtime: Runtime, unit: int, unit_name: str, index: int, pid: int, name: str,
                 param: torch.nn.Parameter, dtype: torch.dtype) -> None:
        """dtype: of the weights in the store, to which the parameter is converted."""
        self._runtime, self._param = weakref.ref(runtime), weakref.ref(param)
        self.unit, self.unit_name, self.index, self.pid, self.name = unit, unit_name, index, pid, name
        self.shape, self.dtype, self.numel = param.shape, dtype, param.numel()
        self.stride = torch.empty_like(param, device="meta").stride()    # dense: channels-last stays, else row-major
        self.nbytes = self.numel * dtype.itemsize
        self.offset = self.address = 0
        self.host: Tensor | None = None     # plain, over plane HI; shares the parameter's version counter
        self.version = 0                    # `host._version` when the ledger last heard of a write
        self.uses = 0                       # opened in the pass under way; more than one: the weights are tied
        self.open = 0                       # of any pass, whose gradient has not been handed over yet
        self.set_in = -1                    # graph task in which plane GRAD was set, not added to
        self.pending: Tensor | None = None  # device sum of this backward's gradients so far, while more are to come
        # Of `.grad`, see gradient.py: what stands there while the gradient is the engine's; the memory of the tensor
        # that user code was last given of plane GRAD; it was written in host memory, and no hand-over came since; the
        # engine has an fp32 sum of 16-bit micro-batches, of which plane GRAD is the rounded copy; of a unit on the
        # device: that copy, as it was when user code was given it.
        self.late: Tensor | None = None
        self.shown: weakref.ref[Any] | None = None
        self.written = self.summed = False
        self.seen: Tensor | None = None
        self.host_graph = False             # it took part in arithmetic on the host; autograd adds its gradient
        self.was_trainable = param.requires_grad
        self.writes = 0                     # from outside so far
        self.master_writes = -1             # those that the fp32 master has followed; -1: there is no master yet
        # Whose moments planes M and V hold; None: they are new.
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.exact: Tensor | None = None    # fp32 values that a 16-bit parameter was made from, until its master is
        self.whole: Whole | None = None     # the weight of codes whose first strand this is

    @property
    def runtime(self) -> Runtime:
        """Weakly, as the parameter: a parameter holds its record and its runtime, and nobody holds it in turn."""
        return self._runtime()

    @property
    def param(self) -> torch.nn.Parameter:
        """None where its module, and everybody else, let go of it."""
        return self._param()

    def view(self, plane: str) -> Tensor:
        """Plain tensor over the parameter's bytes in a plane: [shape], in the plane's type; SCALE: [groups,2]."""
        return self.over(self.memory(plane), plane)

    def memory(self, plane: str, shared: bool = False) -> Any:
        """NumPy's bytes in a plane, alive as long as views. shared: all processes', else this one's until spread."""
        return self.runtime.core.plane(self.unit, self.index, _core.PLANES[plane], shared)

    def over(self, memory: Any, plane: str) -> Tensor:
        """As `view`, of that memory."""
        raw, states = torch.from_numpy(memory), self.runtime.states
        if plane == "SCALE":
            return raw.view(torch.float32).view(-1, 2)
        kinds = {"HI": self.dtype, "GRAD": self.dtype, "LO": torch.int16 if LOW_BYTES[states] == 2 else torch.int8}
        if states != "fp32":
            kinds |= {"M": torch.int8, "V": torch.uint8}
        kind = kinds.get(plane, torch.float32)
        if self.numel == 0:
            return torch.empty(self.shape, dtype=kind)
        return raw.view(kind).as_strided(self.shape, self.stride)

    @property
    def low_bytes(self) -> int:
        """Of plane LO, per element; 0: it has none."""
        return LOW_BYTES[self.runtime.states] if self.dtype == torch.bfloat16 else 0

    @property
    def moments(self) -> tuple[str, ...]:
        """Their planes."""
        return ("M", "V") if self.runtime.states == "fp32" else ("M", "V", "SCALE")

    def owns(self, t: Tensor) -> bool:
        """Does t lie in this parameter's weights?"""
        return self.numel > 0 and self.address <= t.data_ptr() < self.address + self.nbytes

    @property
    def trainable(self) -> bool:
        param = self._param()
        with torch._C.DisableTorchFunctionSubclass():
            return param is not None and param.requires_grad

    # ---- before host memory is read ----

    def wait_updates(self) -> None:
        """The weights may be read in host memory. Raises: a unit at home elsewhere has no room for a copy there."""
        self._want_weights()
        self.runtime.core.wait_updates(self.unit, self.index)

    def _want_weights(self) -> None:
        rt = self.runtime
        if rt.homes.away(self.unit):
            rt.room.weights(rt.core, self.unit)

    def wait_used(self) -> None:
        """No update of the unit is under way; nothing is brought. Of units on the device: ACC has no host copy."""
        rt = self.runtime
        if self.unit in rt.homes.settled:
            rt.core.bring(self.unit, mask(["ACC"]))
        else:
            rt.core.updated(self.unit)

    def bring_states(self) -> None:
        """Host copies of masters and moments become current, where another place has the newer ones."""
        rt = self.runtime
        if rt.apart or self.unit in rt.homes.settled or self.unit in rt.homes.on_disk:
            rt.core.wait_saved(self.unit)        # a save's copies of the unit go with it
            rt.core.bring(self.unit, STATE_PLANES)

    # ---- around a write to it ----

    def own_states(self) -> None:
        """States or gradients are about to be written: no copy is on its way to them, or into a file."""
        rt = self.runtime
        rt.core.wait_saved(self.unit)
        if self.unit in rt.homes.arrivals.units:
            rt.core.bring(self.unit, STATE_PLANES)

    def push(self, *planes: str) -> None:
        """These host planes were written: device, file and other processes take the values that are theirs."""
        rt = self.runtime
        if rt.ranks is not None:
            if planes != ("GRAD",):              # of which each uses what it has written itself
                rt.core.spread(self.unit, self.index, mask(planes))
        elif self.unit in rt.homes.settled or self.unit in rt.homes.on_disk:
            rt.core.push(self.unit, self.index, mask(planes))

    def before_write(self) -> None:
        """No update of the weights is under way, and nothing reads them for the device."""
        self._want_weights()
        self.runtime.core.wait_fetch(self.unit, self.index)

    def notice_write(self) -> None:
        """One past the guard, by an operation that does not say that it writes, is told like the rest."""
        if self.host._version != self.version:
            self.runtime.core.wait_fetch(self.unit, self.index)
            self.after_write()

    def after_write(self) -> None:
        rt = self.runtime
        if self.unit in rt.homes.filed:          # first: who asks for the new version reads it there
            rt.core.bring(self.unit, HI)         # it was: else zeros would go there
            self.push("HI")                      # which is a new version
        elif rt.ranks is not None:
            self.push("HI")
        else:
            rt.core.touch(self.unit)
        self.writes += 1
        if self.host is not None:
            self.version = self.host._version

    def keep_write(self, value: Tensor) -> None:
        """Code changed its copy of the weights in place (max_norm, a clamp): the weights are that, unless several."""
        with torch.no_grad():
            value = value.detach().cpu()
            if torch.equal(self.param, value):   # cuDNN's layers put theirs one behind the other
                return
            if self.runtime.ranks is not None:
                raise MegatrainError(f"{self.name}: changed in place while the model ran; with several processes "
                                     "weights are changed between steps, in all of them alike")
            self.param.copy_(value)


class Use:
    """One binding of parameters into a graph: open until its gradients are handed over or the graph is gone."""

    __slots__ = ("records", "handed")

    def __init__(self, records: list[Record]) -> None:
        self.records, self.handed = records, False
        for r in records:
            r.uses += 1
            r.open += 1

    def hand(self) -> None:
        if not self.handed:
            self.handed = True
            for r in self.records:
                r.open -= 1

    def __del__(self) -> None:
        self.hand()


def span_of(t: Tensor) -> int:
    """Elements of memory from t's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
