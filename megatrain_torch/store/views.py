"""What a forward sees as its weights: tensors on the compute device that answer for their parameters.

    DeviceParameter     in a window: over the slot that the weights are in
    LazyParameter       read outside its window (a tied head in a container's forward, CLIP's `logit_scale`, a mere
                        `.dtype`): an output of autograd's node `Fetch`, which knows shape, type and device; the first
                        operation below autograd fetches the weights, into fresh memory

Class, attributes, `.grad`, hooks, and the place in sets and dicts are the parameter's. Only `is` and `id` tell one
from the other. Whatever takes a LazyParameter (an operation, an autograd.Function, a custom op) has its edge to
`Fetch`, which hands the gradient over as a window does.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import MegatrainError
from .guard import OneParameter, with_attributes
from .records import Record, Use
from .state import in_backward


class DeviceParameter(OneParameter, nn.Parameter):
    """[shape] on the compute device. Its `__dict__` is the parameter's: what is set on one is read of the other."""

    _mt: Record
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_leaf = property(lambda self: True)
    grad_fn = property(lambda self: None)

    @property
    def output_nr(self) -> int:
        """torch.autograd.graph.get_gradient_edge asks for it.

        Raises:
            MegatrainError: the edge in this graph is not the parameter's.
        """
        raise MegatrainError(f"{self._mt.name}: the gradient edge of a weight that a forward sees is not its "
                             "parameter's; ask for it outside of forwards (model.get_parameter)")

    @property
    def requires_grad(self) -> bool:
        return Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            raise MegatrainError(f"{self._mt.name}: requires_grad is changed while the model runs, after its graph was "
                                 "begun with the other; change it between passes")

    def requires_grad_(self, requires_grad: bool = True) -> DeviceParameter:
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Any) -> Any:
        return self._once(self._mt.param.register_hook(hook))

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self._once(self._mt.param.register_post_accumulate_grad_hook(hook))

    @staticmethod
    def _once(handle: Any) -> Any:
        """A forward that runs again in backward has registered it the first time."""
        if in_backward() != -1:
            handle.remove()
        return handle

    @property
    def data(self) -> Tensor:
        """Shares the version counter: what is changed of it in place is changed of the weights."""
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise MegatrainError(f"{self._mt.name}: .data of shape {list(value.shape)} {value.dtype} in a forward does "
                                 f"not fit its streamed weight of shape {list(self.shape)} {self.dtype}")
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(nn.Parameter(self.data, self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        out = memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_attributes(nn.Parameter(self.data, self.requires_grad), self).__reduce_ex__(protocol)


PLAIN = (Tensor, DeviceParameter)            # types of tensors that have memory and no behaviour of their own


def _of_parameter(name: str) -> property:
    """What the host's parameter has: a hook that is registered in a forward is the parameter's."""

    def put(self: DeviceParameter, value: Any) -> None:
        setattr(self._mt.param, name, value)

    def get(self: DeviceParameter) -> Any:
        if name == "grad" and torch.compiler.is_compiling():
            return None                      # it is in host memory, which dynamo would take for this tensor's own
        return getattr(self._mt.param, name)

    return property(get, put, lambda self: delattr(self._mt.param, name))


for _name in ("grad", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype", "retain_grad"):
    setattr(DeviceParameter, _name, _of_parameter(_name))


# ---- nodes of graphs that parameters go into ----

_next_functions = torch._C._FunctionBase.next_functions


def accumulators(ctx: Any) -> list[Any]:
    """Of the parameters of ctx.records, which are the last inputs of its Function."""
    edges = _next_functions.__get__(ctx)
    return [node for node, _ in edges[len(edges) - len(ctx.records):]]


def in_sight(function: Any) -> Any:
    """User code may come by its nodes on the way to AccumulateGrad's, where it may put hooks: from then on autograd
    itself adds these parameters' gradients."""
    def walked(node: Any) -> Any:
        for record in node.records:
            record.host_graph = True
        return _next_functions.__get__(node)

    function._backward_cls.next_functions = property(walked)
    return function


def takes_no_hooks(function: Any) -> Any:
    """Its nodes stand where plain torch has AccumulateGrad's."""
    def refuse(node: Any, *_: Any) -> Any:
        raise MegatrainError(f"{node.records[0].name}: a hook on this node would meet gradients of a whole window, on "
                             "the device; put it on the parameter, or on the node that "
                             "p.expand_as(p).grad_fn.next_functions gives outside of forwards")

    function._backward_cls.register_hook = function._backward_cls.register_prehook = refuse
    return function


# ---- outside of its window ----

@in_sight
@takes_no_hooks
class Fetch(torch.autograd.Function):
    """Parameter in, LazyParameter out; its gradient in, to the store."""

    @staticmethod
    def forward(ctx: Any, record: Record, param: Tensor) -> Tensor:
        ctx.records = [record]
        ctx.use = Use([record]) if in_backward() == -1 else None
        return LazyParameter(record)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        handover = ctx.records[0].runtime.handover
        return None, *handover.take(ctx.records, ctx.use, accumulators(ctx), (grad,))


class LazyParameter(DeviceParameter):
    """[shape], without memory until it is used.

    Attributes:
        value: the weights, once they are fetched. unit_version: of the unit when they were read. kept: its own version
            when the store last heard of a write.
    """

    __slots__ = ("kept", "unit_version", "value")

    value: Tensor | None
    unit_version: int
    kept: int

    @staticmethod
    def __new__(cls, record: Record) -> LazyParameter:
        out = Tensor._make_wrapper_subclass(cls, record.shape, strides=record.stride, dtype=record.dtype,
                                            device=record.runtime.device)
        out.value, out.unit_version, out.kept = None, record.runtime.core.version(record.unit), 0
        return out

    @staticmethod
    def of(record: Record) -> LazyParameter:
        with torch.inference_mode(False), torch.enable_grad():
            out = Fetch.apply(record, record.param) if record.trainable else LazyParameter(record)
        out.__dict__ = record.param.__dict__
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*_fetched(args), **{k: _fetched((v,))[0] for k, v in kwargs.items()})
        if func._schema.is_mutable:
            said = func._schema.arguments
            given = [*zip(said, args), *((s, kwargs[s.name]) for s in said if s.name in kwargs)]
            for lazy in _among(v for s, v in given if s.alias_info is not None and s.alias_info.is_write):
                lazy.keep_write()
                lazy.kept += 1               # autograd counts it when this returns
        return out

    def fetch(self) -> Tensor:
        """The weights on the compute device, without history."""
        if self.value is None:
            with torch.inference_mode(False):
                self.value = self._mt.runtime.fetch(self._mt, self.unit_version)
        return self.value

    def keep_write(self) -> None:
        """Its values were changed in place."""
        self.kept = self._version
        self._mt.runtime.planes.keep_write(self._mt, self.fetch())


def _of_value(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.fetch(), name)(*args, **kwargs)


for _name in ("data_ptr", "numpy", "tolist", "untyped_storage", "__array__", "__dlpack__"):
    setattr(LazyParameter, _name, _of_value(_name))      # they look for memory, and ask no dispatcher


def _among(values: Iterable[Any]) -> Iterable[LazyParameter]:
    for v in values:
        if isinstance(v, LazyParameter):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _among(v)


def _fetched(values: Any) -> tuple[Any, ...]:
    out = []
    for v in values:
        if isinstance(v, LazyParameter):
            out.append(v.fetch())
        elif isinstance(v, (list, tuple)) and any(isinstance(x, LazyParameter) for x in v):
            out.append(type(v)(_fetched(v)))
        else:
            out.append(v)
    return tuple(out)
