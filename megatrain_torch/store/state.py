"""What a forward sees as its weights: inside which window, and tensors that answer for their parameters.

    DeviceParameter     in a window: over the slot that the weights are in
    LazyParameter       read outside its window (a tied head in a container's forward, CLIP's `logit_scale`, a mere
                        `.dtype`): an output of autograd's node `Bind`, which knows shape, type and device; the first
                        operation below autograd fetches the weights, into fresh memory

Class, attributes, `.grad`, hooks, and the place in sets and dicts are the parameter's. Only `is` and `id` tell one from
the other. Whatever takes a LazyParameter (an operation, an autograd.Function, a custom op) has its edge to `Bind`,
which hands the gradient over as a window does.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .._core import WindowDict, enter, inside, leave, swap_window
from ..base.errors import MegatrainError
from .gradient import in_backward
from .guard import OneParameter, with_attributes
from .records import Record, Use

graph_stays = torch._C._autograd._get_current_graph_task_keep_graph      # retain_graph, of the backward under way


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Meanwhile the outermost forward, no window of which is open, has not begun: modules give their parameters."""
    within = inside()
    if within:
        leave()
    try:
        yield
    finally:
        if within:
            enter()


class BoundParameters(WindowDict):
    """A module's `_parameters`, in which attribute reads see the slot.

    `Module.__getattr__` reads through `[name]`; `named_parameters`, `state_dict` and `_apply` go through `.items()` and
    see the host parameters. Inside a window the slot's tensor is returned, inside a container's forward or a backward
    a lazy copy, elsewhere the host parameter. Pickles and copies as a plain dict.

    Something else in the place of a streamed parameter (torch.func.functional_call) is what reads see then, on the
    compute device in a forward; the parameter that comes back is streamed as before. `own` has what belongs there, by
    name; `records` the same, or None where something else is there."""

    __slots__ = ("own", "records")

    def __init__(self, items: dict[str, Any], records: dict[str, Record]) -> None:
        super().__init__(items)
        self.records: dict[str, Record | None] = dict(records)
        self.own = records

    def outside(self, record: Record | None, parameter: Any) -> Any:
        """A read that no open window answers."""
        if not inside() and in_backward() == -1:
            return parameter
        if record is not None:
            return record.runtime.read(record)
        there = next(iter(self.own.values())).runtime.device
        return parameter if parameter.device == there else parameter.to(there)

    def __setitem__(self, name: str, value: Any) -> None:
        own = self.own.get(name)
        if own is not None:
            self._leave(name)
            if value is own.param or _stands_for(own, value):
                self.records[name], value = own, own.param
            else:
                self.records[name] = None
                own.runtime.given += 1
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)
        self._leave(name)

    def _leave(self, name: str) -> None:
        if name in self.records and self.records.pop(name) is None:
            self.own[name].runtime.given -= 1

    def bind(self, records: dict[str, Record]) -> None:
        """Further streamed parameters were put into it."""
        for name, record in records.items():
            if name not in self.own:
                self.own[name] = self.records[name] = record

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


def _stands_for(record: Any, value: Any) -> bool:
    """Is it what a read in a forward gave for this parameter? Or, of codes, a tensor of their package over the same
    memory (PEFT's DoRA puts `weight.to(weight.device)` there)?"""
    if isinstance(value, OneParameter):
        return value._mt is record
    window = swap_window(None)
    swap_window(window)
    bound = window and window.get(record)
    return bound is not None and type(value) is type(bound) and value.data_ptr() == bound.data_ptr()


class HostBuffers(dict):
    """A module's `_buffers`: on the compute device while streamed, copied and pickled as host tensors."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        items = {k: b.cpu() if isinstance(b, Tensor) else b for k, b in self.items()}
        return dict, (), None, None, iter(items.items())


class DeviceParameter(OneParameter, nn.Parameter):
    """[shape] on the compute device. Its `__dict__` is the parameter's: what is set on one is read of the other."""

    _mt: Record
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_leaf = property(lambda self: True)
    grad_fn = property(lambda self: None)

    @property
    def output_nr(self) -> int:
        """torch.autograd.graph.get_gradient_edge asks for it, of an edge that in this graph is not the parameter's."""
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
    """Once user code comes by its nodes, where it may put hooks, autograd itself adds these gradients."""
    def walked(node: Any) -> Any:
        for record in node.records:
            record.host_graph = True
        return _next_functions.__get__(node)

    function._backward_cls.next_functions = property(walked)
    return function


@in_sight
class Bind(torch.autograd.Function):
    """Host parameters in, what stands for them on the device out; gradients in, to the store."""

    @staticmethod
    def forward(ctx: Any, records: list[Record], make: Callable[[list[Record]], Iterable[Tensor]],
                *params: Tensor) -> tuple[Tensor, ...]:
        ctx.records = records
        ctx.use = Use(records) if in_backward() == -1 else None
        ctx.set_materialize_grads(False)
        return tuple(make(records))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        handover = ctx.records[0].runtime.handover
        return None, None, *handover.take(ctx.records, ctx.use, accumulators(ctx), grads)


def _refuse_hook(node: Any, *_: Any) -> Any:
    raise MegatrainError(f"{node.records[0].name}: a hook on this node would meet gradients of a whole window, on the "
                         "device; put it on the parameter, or on the node that "
                         "p.expand_as(p).grad_fn.next_functions gives outside of forwards")


Bind._backward_cls.register_hook = Bind._backward_cls.register_prehook = _refuse_hook


# ---- outside of its window ----

class LazyParameter(DeviceParameter):
    """[shape], without memory until it is used."""

    __slots__ = ("kept", "unit_version", "value")
    value: Tensor | None        # the weights, once they are fetched
    unit_version: int           # of the unit when they were read
    kept: int                   # its own version when the store last heard of a write

    @staticmethod
    def __new__(cls, record: Record) -> LazyParameter:
        out = Tensor._make_wrapper_subclass(cls, record.shape, strides=record.stride, dtype=record.dtype,
                                            device=record.runtime.device)
        out.value, out.unit_version, out.kept = None, record.runtime.core.version(record.unit), 0
        return out

    @staticmethod
    def of(record: Record) -> LazyParameter:
        with torch.inference_mode(False), torch.enable_grad():
            out = LazyParameter(record) if not record.trainable else \
                Bind.apply([record], lambda own: map(LazyParameter, own), record.param)[0]
        out.__dict__ = record.param.__dict__
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fetched, named = tree_map_only(LazyParameter, LazyParameter.fetch, (args, kwargs))
        out = func(*fetched, **named)
        if func._schema.is_mutable:
            said = func._schema.arguments
            given = [*zip(said, args), *((s, kwargs[s.name]) for s in said if s.name in kwargs)]
            written = tree_leaves([v for s, v in given if s.alias_info is not None and s.alias_info.is_write])
            for lazy in (t for t in written if isinstance(t, LazyParameter)):
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
        self._mt.keep_write(self.fetch())


for _name in ("data_ptr", "numpy", "tolist", "untyped_storage", "__array__", "__dlpack__"):
    # They look for memory, and ask no dispatcher.
    setattr(LazyParameter, _name, lambda self, *args, _name=_name, **more: getattr(self.fetch(), _name)(*args, **more))
