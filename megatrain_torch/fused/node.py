"""The node of the graph that a layer run by a template is: what it keeps, and where, and its explicit backward."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..base.codes import Coding
from ..base.modes import LINKED, Mode
from ..graph.frames import refuse_create_graph
from ..graph.swap import Bundle, Part
from ..store.records import Record, Use
from ..store.state import accumulators, graph_stays, in_backward, in_sight
from .templates import Weights

if TYPE_CHECKING:
    from ..graph.window import Window
    from .templates import Template


class Runs(Protocol):
    """What runs a window by templates: layer.Fused."""

    names: tuple[str, ...]
    records: dict[str, Record]
    codings: dict[str, Coding]
    dtype: torch.dtype
    trained_names: list[str]
    wanted: frozenset[str]
    loops: list[nn.Module]

    @property
    def window(self) -> Window: ...

    def exact(self, names: tuple[str, ...]) -> Weights: ...

    def operands(self, names: tuple[str, ...], wanted: frozenset[str] = ...) -> Weights: ...

    def versions(self) -> list[int]: ...

    def check_versions(self, versions: list[int]) -> None: ...


@in_sight
class Layer(torch.autograd.Function):
    """x and host parameters in, the layer's output out."""

    @staticmethod
    def forward(ctx: Any, fused: Runs, template: Template, call: Any, mode: Mode, bundle: Bundle | None, x: Tensor,
                *params: Tensor) -> Tensor:
        window = fused.window
        ctx.window = window                  # which the graph may outlive its module with
        ctx.fused, ctx.call, ctx.records, ctx.keep, ctx.bundle = fused, call, window.trainable, mode.keep, bundle
        # The module, and what of it is trained, may change before backward, which is that of this forward.
        ctx.template, ctx.names = template, fused.names
        ctx.trained_names, ctx.wanted = fused.trained_names, fused.wanted
        ctx.use = Use(window.trainable) if in_backward() == -1 else None
        ctx.set_materialize_grads(False)
        ctx.position = window.runtime.swap.position
        y, kept = template.forward(x, fused.operands(ctx.names), call, mode.keep)
        ctx.kept = kept if bundle is None else _away(kept, bundle, x, mode.input and mode.keep != LINKED)
        ctx.versions = fused.versions()
        ctx.save_for_backward(x)             # torch's own checks: in-place writes, a second backward
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        refuse_create_graph()
        fused, template, (x,) = ctx.fused, ctx.template, ctx.saved_tensors     # x of a linked window is made again here
        kept = ctx.kept
        # This object lives as long as the loss, what it keeps not: a second time all is made again from x. What that
        # needs of a bundle, x as it was saved holds.
        ctx.kept = ctx.bundle = None
        fused.window.runtime.swap.approach(ctx.position)
        fused.check_versions(ctx.versions)
        nodes = accumulators(ctx)
        found: tuple[Tensor | None, ...] = (None,) * len(ctx.records)
        dx = None
        if dy is not None:
            kept = template.nothing_kept(x) if kept is None else _mapped(kept, Part, Part.tensor)
            if ctx.keep == LINKED:
                kept.x = x
            with fused.window.runtime.keeps.memory():
                dx, grads = template.backward(dy.contiguous(), kept, fused.operands(ctx.names, ctx.wanted), ctx.call,
                                              ctx.wanted, ctx.needs_input_grad[5])
            found = tuple(grads.get(n) for n in ctx.trained_names)
        taken = fused.window.runtime.handover.take(ctx.records, ctx.use, nodes, found)
        if not graph_stays():
            ctx.call = None
        return None, None, None, None, None, dx, *taken


class Link:
    """Stands for a linked window's input, which is the output of the layer before: `node`, its part of the graph, which
    makes it again from what it keeps.

    What that layer keeps elsewhere comes back in time for this one, which comes first in backward, and is asked for
    once more than by its own backward.
    """

    __slots__ = ("node", "made_from")

    def __init__(self, node: Any, made_from: Any, position: int) -> None:
        """made_from: what that layer keeps for it. position: of the linked window, in the order of forwards."""
        self.node, self.made_from = node, made_from
        bundle = node.bundle
        if bundle is not None:
            bundle.needed = position
            numbers = [made_from.number] * (type(made_from) is Part) + [bundle.input] * (bundle.input >= 0)
            for n in numbers:
                bundle.wanted[n] += 1

    def tensor(self) -> Tensor:
        node, fused = self.node, self.node.fused
        (x,) = node.saved_tensors
        fused.check_versions(node.versions)
        with fused.window.runtime.trace.during(fused.window, "replay"), torch.no_grad():
            out = _mapped(self.made_from, Part, Part.tensor)
            return node.template.again(x, out, fused.operands(node.names), node.call, node.keep)


def _mapped(kept: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """What a template keeps, with fn(v) for each v of this type in it; containers are made anew."""
    if type(kept) is kind:
        return fn(kept)
    if type(kept) is tuple:
        return tuple([_mapped(v, kind, fn) for v in kept])
    if type(kept) is dict:
        return {k: _mapped(v, kind, fn) for k, v in kept.items()}
    if dataclasses.is_dataclass(kept):
        return dataclasses.replace(kept, **{k: _mapped(v, kind, fn) for k, v in vars(kept).items()})
    return kept


def _away(kept: Any, bundle: Bundle, x: Tensor, with_input: bool) -> Any:
    """What is kept, on its way off the device; small tensors stay, and x stays where it is not asked for."""
    def put(t: Tensor) -> Any:
        goes = bundle.swap.may(t) and (with_input or t.data_ptr() != x.data_ptr())
        return bundle.add(t) if goes else t

    found = _mapped(kept, Tensor, put)
    if with_input and bundle.swap.may(x):
        bundle.input = bundle.add(x).number
    bundle.leave()
    return found
