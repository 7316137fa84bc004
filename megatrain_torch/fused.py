"""Windows that a template runs: one node of the graph, explicit backward, no hooks.

A template is used for a window only after it has done on random data what the module's own code does,
forward and backward, within the noise of the weights' type. Calls that it does not cover, and all
calls without gradients, run the module's own code. `mt.explain(model)` says which and why.

The node is coarse: nothing of the layer's inside is in the graph. So it is used only where nothing can
escape: no hooks below the window, arguments the template knows. A key-value cache among them gets its
keys and values, cut off from the graph; a backward through them raises.
"""
from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from . import hf
from .frames import _pop, _push, keep, refuse_create_graph, restored
from .modes import LINKED, Mode
from .records import Use
from .state import in_backward, swap_window
from .swap import Bundle, Part
from .templates import Unfit, Weights, template

if TYPE_CHECKING:
    from .window import Window

TRIAL_TOKENS = 64
PIECE = 1 << 22          # elements that are compared at a time: malloc keeps as much for the next
LEAST_TOKENS = 4         # of a row: with fewer, attention and rotary embedding hardly show
# Relative error (2-norm) of the template against the module's own code that is noise: some 5 roundings.
NOISE = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3, torch.float32: 1e-5, torch.float64: 1e-5}


class Layer(torch.autograd.Function):
    """x and host parameters in, the layer's output out."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, call: Any, mode: Mode, bundle: Bundle | None, x: Tensor, *params: Tensor
                ) -> Tensor:
        window = fused.window
        ctx.window = window                  # which the graph may outlive its module with
        ctx.fused, ctx.call, ctx.records, ctx.keep, ctx.bundle = fused, call, window.trainable, mode.keep, bundle
        ctx.names, ctx.wanted = fused.trained_names, fused.wanted        # requires_grad may change meanwhile
        ctx.use = Use(window.trainable) if in_backward() == -1 else None
        ctx.set_materialize_grads(False)
        ctx.position = window.runtime.swap.position
        y, kept = fused.template.forward(x, fused.weights(), call, mode.keep)
        ctx.kept = kept if bundle is None else _away(kept, bundle, x, mode.input and mode.keep != LINKED)
        ctx.versions = fused.versions()
        ctx.save_for_backward(x)             # torch's own checks: in-place writes, a second backward
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        refuse_create_graph()
        fused, (x,) = ctx.fused, ctx.saved_tensors         # x of a linked window is made again here
        fused.window.runtime.swap.approach(ctx.position)
        fused.check_versions(ctx.versions)
        nodes = [edge[0] for edge in ctx.next_functions[1:]]         # the first is x's
        found: tuple[Tensor | None, ...] = (None,) * len(ctx.records)
        dx = None
        if dy is not None:
            kept, ctx.kept = ctx.kept, None      # used up; a second time all is made again
            kept = fused.template.nothing_kept(x) if kept is None else _mapped(kept, Part, Part.tensor)
            if ctx.keep == LINKED:
                kept.x = x
            dx, grads = fused.template.backward(dy.contiguous(), kept, fused.weights(), ctx.call, ctx.wanted,
                                                ctx.needs_input_grad[4])
            found = tuple(grads.get(n) for n in ctx.names)
        taken = fused.window.runtime.handover.take(ctx.records, ctx.use, nodes, found)
        return None, None, None, None, dx, *taken


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
        with fused.window.runtime.during(fused.window, "replay"), torch.no_grad():
            out = _mapped(self.made_from, Part, Part.tensor)
            return fused.template.again(x, out, fused.weights(), node.call, node.keep)


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


def casts(device: str, dtype: torch.dtype) -> bool:
    """Is autocast on, to another type than the weights'? To their own (Trainer's bf16=True) it changes nothing."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype


def wanted(compute: str, cuda: bool, dtypes: list[torch.dtype]) -> bool:
    """Does this choice of `compute` fuse a module whose weights, matrices first, have these types?"""
    half = bool(dtypes) and dtypes[0] in (torch.bfloat16, torch.float16)
    return compute == "fused" or (compute == "auto" and cuda and half)


def template_of(rt: Any, window: Window, module: nn.Module) -> Fused | None:
    """The window with a template, where the runtime wants one and there is one; window.unfit says why not."""
    if not wanted(rt.compute, rt.is_cuda, [r.dtype for r in window.records]):
        return None
    try:
        return Fused(window, module)
    except Unfit as reason:
        window.unfit = str(reason)
        return None


class Fused:
    """What a window knows of its template.

    Attributes:
        verdict: None before the trial; "" when the template is used; else why it is not.
        declined: why the last call ran the module's own code although the trial went well; "" when it did not.
    """

    def __init__(self, window: Window, module: nn.Module) -> None:
        self._window, self.template = weakref.ref(window), template(module)      # the window has this
        names = {id(p): n for n, p in module.named_parameters()}
        self.names = [names[id(r.param)] for r in window.records]
        self.verdict: str | None = None
        self.declined = ""
        self.split()

    @property
    def window(self) -> Window:
        return self._window()

    @property
    def module(self) -> nn.Module:
        return self._window().module

    def split(self) -> None:
        """Follows requires_grad."""
        by_record = dict(zip(self.window.records, self.names))
        self.trained_names = [by_record[r] for r in self.window.trainable]
        self.wanted = frozenset(self.trained_names)

    def weights(self) -> Weights:
        rt, window = self.window.runtime, self.window
        if window.alone:
            return rt.acquire_weights(window.units[0], self.names)
        return Weights(dict(zip(self.names, window.views(window.records))))

    def versions(self) -> list[int]:
        core = self.window.runtime.core
        return [core.version(u) for u in self.window.units]

    def check_versions(self, versions: list[int]) -> None:
        if versions != self.versions():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"weights of {self.window.name!r} were updated between forward and backward; "
                "call backward() before step()")

    # ---- calls ----

    def __call__(self, args: Any, kwargs: Any) -> Tensor | None:
        """The layer's output, or None when the module's own code has to run."""
        if self.verdict:
            return None
        try:
            x, call = self._taken(args, kwargs)
            if self.verdict is None:
                if x.shape[1:2].numel() < LEAST_TOKENS:
                    raise Unfit(f"its first calls have fewer than {LEAST_TOKENS} tokens in a row, too few to try it on")
                if not self._try(x, args, kwargs):
                    return None
                x, call = self._taken(args, kwargs)      # as the variant that won takes it
        except Unfit as reason:
            self.declined = str(reason)
            return None
        self.declined = ""
        window = self.window
        window.runtime.bindings += 1
        mode, link = window.runtime.keep_of(window, x.shape[:2].numel()), None
        if mode.keep == LINKED:
            mode, link = self._linked(x, mode)
        if link is not None or (mode.host and self.template.swaps):
            return self._kept_elsewhere(x, call, mode, link)
        return Layer.apply(self, call, mode, None, x, *window.params)

    def _kept_elsewhere(self, x: Tensor, call: Any, mode: Mode, link: Link | None) -> Tensor:
        """x too is saved by way of the bundle, whose life then is that of the graph, or not at all."""
        bundle = self.window.runtime.swap.bundle(self.window, mode) if mode.host else None

        def pack(t: Tensor) -> Any:
            if link is not None:
                return link
            return keep(t) if bundle is None or bundle.input < 0 else Part(bundle, bundle.input)

        _push(pack, restored)
        try:
            return Layer.apply(self, call, mode, bundle, x, *self.window.params)
        finally:
            _pop()

    def _linked(self, x: Tensor, mode: Mode) -> tuple[Mode, Link | None]:
        """The mode that a linked window so given its input can have, and what stands for that.

        Where x is no window's output as it came, the input is kept alone. Where the window before is no layer, keeps
        no attention's output or is linked itself, the input is kept beside attention's output.
        """
        node: Any = x.grad_fn
        if not isinstance(node, Layer._backward_cls):
            return mode._replace(keep="replay"), None
        may = self.template.links and node.fused.template.links and node.keep != LINKED and node.kept is not None
        made_from = node.fused.template.made_from(node.kept) if may else None
        if made_from is None:
            return mode._replace(keep="attention"), None
        return mode, Link(node, made_from, self.window.runtime.swap.position)

    def _taken(self, args: Any, kwargs: Any) -> tuple[Tensor, Any]:
        """x and the rest of the call, as a template takes them, if it may be a single node."""
        window = self.window
        if hf.hooked(window.hooks) or _has_any_global_hook():
            raise Unfit("there are hooks inside it")
        if casts(window.runtime.device.type, window.records[0].dtype):
            raise Unfit("autocast is on")
        x, call = self.template.take(self.module, args, kwargs, window.records[0].dtype)
        if not (x.requires_grad or window.trainable):
            raise Unfit("nothing needs a gradient")
        return x, call

    # ---- the trial ----

    def _try(self, x: Tensor, args: Any, kwargs: Any) -> bool:
        dtype = self.window.records[0].dtype
        limit = NOISE.get(dtype, 1e-5)
        try:
            error = self._best_variant(x, args, kwargs, limit)
        except Unfit as reason:
            self.verdict = str(reason)
        else:
            self.verdict = "" if error <= limit else (
                f"on random data the template is off by {error:.1e} (relative), more than {limit:.0e}")
        return not self.verdict

    def _best_variant(self, x: Tensor, args: Any, kwargs: Any, limit: float) -> float:
        """Tries what the structure leaves open; leaves the best in force and yields its error."""
        rng = torch.Generator(x.device).manual_seed(0)
        x, args, kwargs = self.template.small(x, rng, TRIAL_TOKENS, args, kwargs)
        with self.template.observed(self.module):
            truth, dy = self._own(x, args, kwargs, rng)
            found = []
            for likely in self.template.variants():
                for variant in likely:
                    self.template.use(variant)
                    found.append((_error(truth, self._templates(dy, args, kwargs)), variant))
                error, variant = min(found, key=lambda pair: pair[0])
                if error <= limit:
                    break
        self.template.use(variant)
        return error

    def _own(self, x: Tensor, args: Any, kwargs: Any, rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Output and gradients of the module's own code for a random output gradient, and that."""
        window, into = self.window, self.template.differentiable_input
        bound = window.bind_leaves()
        with torch.enable_grad():
            x.requires_grad_(into)
            outer = swap_window(bound)
            try:
                y = window.inner(*args, **kwargs)
            finally:
                swap_window(outer)
            if not isinstance(y, Tensor):
                raise Unfit("its forward gives something else than one tensor")
            dy = torch.randn(y.shape, generator=rng, device=y.device).to(y.dtype)
            leaves = [bound[r] for r in window.trainable] + [x] * into
            grads = list(torch.autograd.grad(y, leaves, dy, allow_unused=True))
        found = {"y": y.detach()} | ({"dx": grads.pop()} if into else {})
        x.requires_grad_(False)
        return found | {n: g for n, g in zip(self.trained_names, grads) if g is not None}, dy

    def _templates(self, dy: Tensor, args: Any, kwargs: Any) -> dict[str, Tensor]:
        x, call = self.template.take(self.module, args, kwargs, self.window.records[0].dtype)
        with torch.no_grad():
            w = self.weights()
            try:
                y, kept = self.template.forward(x, w, call, "saved")
                dx, grads = self.template.backward(dy, kept, w, call, self.wanted, True)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise Unfit(f"the template fails: {error}") from error
        return {"y": y, **({} if dx is None else {"dx": dx}), **grads}


def _error(truth: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The worst relative error. A vector's gradient may be zero but for noise (a key's bias is), so vectors are
    measured against half of the largest among them as well."""
    if set(truth) != set(found):
        missing = sorted(set(truth) ^ set(found))
        raise Unfit(f"template and module differ in what has a gradient: {', '.join(missing)}")

    vectors = max([_rms(t) for t in truth.values() if t.dim() == 1], default=0.0)
    worst = 0.0
    for name, t in truth.items():
        scale = max(_rms(t), 0.5 * vectors if t.dim() == 1 else 0.0, 1e-30)
        error = _rms(t, found[name]) / scale
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _rms(t: Tensor, other: Tensor | None = None) -> float:
    """Root of the mean square of t, or of other - t, to a few digits: in pieces, as experts' gradients are large, and
    as wide as fp32."""
    parts = t.flatten().split(PIECE)
    others = parts if other is None else other.flatten().split(PIECE)
    wide = torch.promote_types(t.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(a.to(wide) if other is None else b.to(wide) - a.to(wide))
             for a, b in zip(parts, others)]
    return float(torch.linalg.vector_norm(torch.stack(norms).double())) / t.numel() ** 0.5
