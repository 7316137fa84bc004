"""What the package knows about one streamed parameter."""
from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _core
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


class Record:
    """One parameter of one unit: where it is, and where its gradient stands in this step.

    Attributes:
        host: plain tensor over the HI plane; shares the parameter's version counter.
        version: `host._version` when the ledger last heard of a write.
        late: what `param.grad` holds while its gradient is the engine's: see gradient.py; None: there was none yet.
        shown: weak reference to the memory of the tensor that user code was last given of plane GRAD; None: of none.
        written: the gradient was written in host memory, which counts, and no hand-over came since.
        summed: the engine has an fp32 sum of 16-bit micro-batches, of which plane GRAD is the rounded copy.
        seen: of a unit on the device: that copy, as it was when user code was given it; else None.
        uses: uses opened in the pass under way; more than one: the weights are tied.
        open: uses, of any pass, whose gradient has not been handed over yet.
        set_in: graph task in which the GRAD plane was set, not added to.
        pending: device sum of this backward's gradients so far, while more are to come.
        writes, master_writes: writes from outside so far, and those the fp32 master has followed (-1:
            there is no master yet).
        optimizer: weak reference to the one whose moments the M and V planes hold; None: they are new.
        exact: the fp32 values that a 16-bit parameter was made from, until its master is: [shape]; None: they are its
            own.
        whole: the weight of codes that stands where this is read, whose first strand this is; None: it is no strand.
        host_graph: the parameter took part in arithmetic on the host; autograd adds its gradient.
    """

    __slots__ = ("_runtime", "unit", "unit_name", "index", "pid", "name", "_param", "host", "version", "shape",
                 "stride", "dtype", "offset", "numel", "nbytes", "late", "shown", "written", "summed", "seen", "uses",
                 "open", "set_in", "pending", "host_graph", "address", "was_trainable",
                 "writes", "master_writes", "optimizer", "exact", "whole", "__weakref__")

    def __init__(self, runtime: Runtime, unit: int, unit_name: str, index: int, pid: int, name: str,
                 param: torch.nn.Parameter) -> None:
        self._runtime, self._param = weakref.ref(runtime), weakref.ref(param)
        self.unit, self.unit_name, self.index, self.pid, self.name = unit, unit_name, index, pid, name
        self.shape, self.dtype, self.numel = param.shape, param.dtype, param.numel()
        self.stride = dense_stride(param)
        self.nbytes = self.numel * param.element_size()
        self.offset = self.address = self.version = 0
        self.uses = self.open = 0
        self.set_in = -1
        self.host: Tensor | None = None
        self.late: Tensor | None = None
        self.shown: weakref.ref[Any] | None = None
        self.written = self.summed = False
        self.seen: Tensor | None = None
        self.pending: Tensor | None = None
        self.was_trainable = param.requires_grad
        self.writes, self.master_writes = 0, -1
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.host_graph = False
        self.exact: Tensor | None = None
        self.whole: Whole | None = None

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
        """The parameter's bytes in a plane: NumPy's, which live as long as anything made from them. Where several
        processes stream the model, what is written there is this one's until it is spread; shared: everybody's."""
        return self.runtime.core.plane(self.unit, self.index, _core.PLANES[plane], shared)

    def over(self, memory: Any, plane: str) -> Tensor:
        """As `view`, of that memory."""
        raw = torch.from_numpy(memory)
        if plane == "SCALE":
            return raw.view(torch.float32).view(-1, 2)
        kind = self._kind(plane)
        if self.numel == 0:
            return torch.empty(self.shape, dtype=kind)
        return raw.view(kind).as_strided(self.shape, self.stride)

    def _kind(self, plane: str) -> torch.dtype:
        if plane in ("HI", "GRAD"):
            return self.dtype
        if plane == "LO":
            return torch.int16 if LOW_BYTES[self.runtime.states] == 2 else torch.int8
        codes = {"M": torch.int8, "V": torch.uint8} if self.runtime.states != "fp32" else {}
        return codes.get(plane, torch.float32)

    @property
    def low_bytes(self) -> int:
        """Of plane LO, per element; 0: it has none."""
        return LOW_BYTES[self.runtime.states] if self.dtype == torch.bfloat16 else 0

    @property
    def moments(self) -> tuple[str, ...]:
        """Planes of the moments."""
        return ("M", "V") if self.runtime.states == "fp32" else ("M", "V", "SCALE")

    def owns(self, t: Tensor) -> bool:
        """Does t lie in this parameter's weights?"""
        return self.numel > 0 and self.address <= t.data_ptr() < self.address + self.nbytes

    @property
    def trainable(self) -> bool:
        param = self._param()
        with torch._C.DisableTorchFunctionSubclass():
            return param is not None and param.requires_grad


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


def dense_stride(t: Tensor) -> tuple[int, ...]:
    """The strides t keeps when it is copied: its own where it is dense, else row-major.

    Channels-last convolution weights stay channels-last, so that kernels choose as they did.
    """
    return torch.empty_like(t, device="meta").stride() if not t.is_sparse else t.stride()


def span_of(t: Tensor) -> int:
    """Elements of memory from t's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
