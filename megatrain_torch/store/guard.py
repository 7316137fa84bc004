"""Host tensors that wait before they are read.

Updates and gradient copies run behind the user's back, so a reference to a parameter that the
user kept must not show half an update. Streamed parameters (and the views taken of them) are
`Tensor` subclasses whose `__torch_function__` waits for the work under way on their unit, runs the
operation on the plain tensor, and tells the ledger when the memory was written.

Tensors in slots stay plain: nothing of this is on the path of a forward or backward.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.codes import Strand
from ..base.errors import MegatrainError
from . import gradient

if TYPE_CHECKING:
    from ..model.runtime import Runtime
    from .records import Record

_T = Tensor
# Attributes that are values, or views of them; others that C defines tell of a form, or of a place in a graph.
_VALUES = {"data", "grad", "_grad", "real", "imag", "T", "H", "mT", "mH"}
_META_METHODS = ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point",
                 "is_complex", "is_contiguous", "is_signed", "storage_offset", "requires_grad_", "get_device",
                 "register_hook", "register_post_accumulate_grad_hook", "is_pinned", "_is_view", "is_inference",
                 "is_same_size", "has_names", "is_conj", "is_neg", "is_set_to", "is_distributed", "__len__", "__hash__")
# Functions that look at a tensor's form and never at its values.
_META = ({d.__get__ for n, d in vars(torch._C.TensorBase).items() if inspect.isgetsetdescriptor(d) and n not in _VALUES}
         | {getattr(_T, n) for n in _META_METHODS if hasattr(_T, n)}
         | {_T.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel,
            torch.is_same_size, torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like, torch.rand_like,
            torch.randn_like})
# Slot wrappers are made anew at each look: compare them with ==, not `is`.
_GRAD_GET = {_T.grad.__get__, _T._grad.__get__}
_GRAD = _GRAD_GET | {_T.grad.__set__, _T.grad.__delete__, _T._grad.__set__}
_DATA_SET = _T.data.__set__
_SETITEM = _T.__setitem__
_READS = {"__int__", "__index__", "__invert__"}
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# In-place by name, but changing no value of the tensor.
_HARMLESS = {"requires_grad_", "retain_grad", "share_memory_"}


def _guarded(args: Any, kwargs: Any) -> list[Any]:
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, HostTensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(b for b in a if isinstance(b, HostTensor))
    return found


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Of the guarded: those that the operation writes. `ema.add_(p)` only reads p."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if in_place and (name.startswith("_fused") or isinstance(func, _OPS)):      # several of its arguments
        return _guarded(args, kwargs)
    found = _guarded((kwargs["out"],), {}) if "out" in kwargs else []
    if in_place or func == _SETITEM or func == _DATA_SET or (name.startswith("__i") and name not in _READS):
        found += _guarded(args[:1], {}) if args else _guarded((), kwargs)
    return found


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class HostTensor(Tensor):
    """A view of a streamed parameter (or of its optimizer state) in host memory."""

    _mt: Record
    _mt_runtime: Runtime                  # held, for as long as somebody has the tensor: records do not

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _META:
            return _call(func, args, kwargs)
        if func in _GRAD:
            return gradient.current(args[0]._mt) if func in _GRAD_GET else _call(func, args, kwargs)
        guarded, written = _guarded(args, kwargs), _written(func, args, kwargs)
        for g in guarded:
            _current(g)                  # what is under way in their units is over, and values are in host memory
        weights = [g._mt for g in written if g._mt.owns(plain(g))]
        states = [g._mt for g in written if not g._mt.owns(plain(g))]        # the optimizer's
        for record in weights:
            record.before_write()
        for record in states:
            record.own_states()
        if func == _DATA_SET:            # the values are copied in: the tensor keeps its place in the store
            record, value = args[0]._mt, args[1]
            if weights and (value.shape, value.dtype) != (record.shape, record.dtype):
                raise MegatrainError(f"{record.name}: .data of shape {list(value.shape)} {value.dtype} does not fit "
                                     f"the streamed parameter of shape {list(record.shape)} {record.dtype}; "
                                     "mt.unstream(model) before changing it")
            if args[0].shape != value.shape:
                raise MegatrainError(f"{record.name}: .data of shape {list(value.shape)} does not fit a state of the "
                                     f"optimizer, of shape {list(args[0].shape)}")
            func, args = _T.copy_, (plain(args[0]), plain(value))
        out = _call(func, args, kwargs)
        for record in weights:
            record.after_write()
        for record in states:
            record.push(*record.moments)
        results = out if isinstance(out, (list, tuple)) else (out,)
        if not written and torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in results):
            for g in guarded:
                g._mt.host_graph = True  # autograd itself adds to .grad on the host: see handover.py
        return _guard_aliases(out, guarded)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _current(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        out = memo[id(self)] = _current(self).clone()
        return out


def _guard_aliases(out: Any, guarded: list[Any]) -> Any:
    """A result that shares the memory of a streamed parameter, or of its state, must wait as that does."""
    if not isinstance(out, Tensor):
        if isinstance(out, (list, tuple)) and out and isinstance(out[0], Tensor):
            return type(out)(_guard_aliases(o, guarded) for o in out) if type(out) in (list, tuple) else out
        return out
    if isinstance(out, HostTensor) or type(out) is not Tensor or out.device.type != "cpu":
        return out
    storage = out.untyped_storage().data_ptr() if out.layout is torch.strided and out.numel() > 0 else None
    for g in guarded:                   # a plane that is not of weights is NumPy's memory, one for each parameter
        if g._mt.owns(out) or (storage is not None and storage == plain(g).untyped_storage().data_ptr()):
            return guard(out, g._mt)
    return out


class Equal(Tensor):
    """What == gives of two tensors that stand for one parameter: true as a whole, so that sets and dicts find it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __bool__(self) -> bool:
        return True


class OneParameter:
    """A tensor that stands for a parameter: it, or what a forward sees of it. In sets and dicts they are one key."""

    _mt: Record

    def __hash__(self) -> int:
        return id(self._mt._param())

    def __eq__(self, other: Any) -> Any:
        if other is not self and isinstance(other, OneParameter) and other._mt is self._mt:
            there = other if isinstance(self, HostTensor) else self      # on the device
            return torch.eq(there, there).as_subclass(Equal)
        return Tensor.__eq__(self, other)


class StreamedParameter(OneParameter, HostTensor, torch.nn.Parameter):
    """A `torch.nn.Parameter` whose memory is the store's HI plane. Attribute reads inside a module's own forward see
    the copy on the compute device instead; everywhere else this is an ordinary host parameter that waits for its
    pending update. Pickles and deep-copies as an ordinary `Parameter`."""

    __hash__ = Tensor.__hash__           # by its id, as OneParameter's of all that stand for it

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_attributes(as_parameter(self), self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        out = memo[id(self)] = as_parameter(self)
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"StreamedParameter({list(self.shape)}, {self.dtype}, unit={self._mt.unit_name!r})"


def _copied(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(as_parameter(self), name)(*args, **kwargs)


@functools.cache
def streamed_kind(kind: type) -> type:
    """The class of a streamed parameter that was of this one, and is still; moved to a device it is a copy."""
    if kind in (torch.nn.Parameter, Strand):
        return StreamedParameter
    own = {name: _copied(name) for name in ("to", "cpu", "cuda", "xpu")} | {"_mt_kind": kind}
    return type(kind.__name__, (StreamedParameter, kind), own)


@functools.cache
def made_kind(kind: type) -> type:
    """The class of a parameter that is made of tensors, which are streamed: copies are ordinary ones."""
    own = {"__reduce_ex__": _copied("__reduce_ex__"), "__deepcopy__": StreamedParameter.__deepcopy__,
           "_mt_kind": kind, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def take_back(params: Iterable[Tensor]) -> None:
    """Those that an optimizer was given as ordinary ones are streamed again, and were written."""
    for p in params:
        if type(p) is torch.nn.Parameter and "_mt" in p.__dict__:
            p.__class__ = StreamedParameter
            p._mt.after_write()


def guard(t: Tensor, record: Record) -> HostTensor:
    """A tensor that was just made, as one that waits. This is no operation: it leaves no node in a graph."""
    t.__class__ = HostTensor
    t._mt, t._mt_runtime = record, record.runtime
    return t


def plain(t: Tensor) -> Tensor:
    """The tensor without its guard: same memory, same version counter, waits for nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach().as_subclass(Tensor) if type(t) is not Tensor else t.detach()


def _current(t: HostTensor) -> Tensor:
    """The plain tensor, once the update is over and its values are in host memory."""
    record, out = t._mt, plain(t)
    if record.owns(out) or not record.numel:
        record.wait_updates()
    else:
        record.wait_used()
        record.bring_states()
    return out


def values_of(t: Tensor) -> Tensor:
    """As `plain`, of what is there when all that is on its way to host memory has come."""
    return _current(t) if isinstance(t, HostTensor) else plain(t)


def as_parameter(p: Tensor) -> torch.nn.Parameter:
    """An ordinary, independent Parameter with the streamed parameter's current value."""
    if p._mt.whole is not None:
        return p._mt.whole.copy()
    p._mt.wait_updates()
    with torch._C.DisableTorchFunctionSubclass():
        return torch.nn.Parameter(plain(p).clone(), requires_grad=p.requires_grad)


def with_attributes(out: torch.nn.Parameter, p: Tensor) -> torch.nn.Parameter:
    """A copy with what the user has set on the parameter: pickles of a Parameter have it, deep copies have not."""
    out.__dict__.update((name, value) for name, value in p.__dict__.items() if not name.startswith("_mt"))
    return out
