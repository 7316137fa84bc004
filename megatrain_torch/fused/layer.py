"""Windows that a template runs: one node of the graph, explicit backward, no hooks.

A template is used for a window only where it is proved to compute what the module's own code does (proof/), for
this structure, this way of being called and these training flags, and while the module stays the one that was proved;
and after its kernels have given, on random data, the numbers of the module's own code. Calls that it does not cover,
and all calls without gradients, run the module's own code. `mt.explain(model)` says which and why.

The node is coarse: nothing of the layer's inside is in the graph. So it is used only where nothing can
escape: no hooks below the window, arguments the template knows. A key-value cache among them gets its
keys and values, cut off from the graph; a backward through them raises.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map

from ..base.modes import LINKED, Mode
from ..graph import hf_calls
from ..graph.frames import _pop, _push, keep, refuse_create_graph, restored
from ..graph.swap import Bundle, Part
from ..graph.window import Installed
from ..store.records import Use
from ..store.state import graph_stays, in_backward, swap_window
from .proof.case import Case, Refused, Same, numbers_of, structure_of
from .proof.watch import OFTEN, Code, Watch
from .runner import Runner
from .templates import Unfit, Weights, template

if TYPE_CHECKING:
    from ..graph.window import Window
    from .proof.prove import Proof
    from .templates import Template

TRIAL_TOKENS = 64
MAGNITUDES = 1.0, 30.0
WIDE_BYTES = 1 << 31     # a layer of 16 bits is looked at in fp32 where weights, gradients and work are no more
PIECE = 1 << 22          # elements that are compared at a time: malloc keeps as much for the next
LEAST_TOKENS = 4         # of a row: with fewer, attention and rotary embedding hardly show
# Relative error (2-norm) of the template against the module's own code that is noise: some 5 roundings.
NOISE = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3, torch.float32: 1e-5, torch.float64: 1e-5}


class Layer(torch.autograd.Function):
    """x and host parameters in, the layer's output out."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, template: Template, call: Any, mode: Mode, bundle: Bundle | None, x: Tensor,
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
        y, kept = template.forward(x, fused.weights(ctx.names), call, mode.keep)
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
        nodes = [edge[0] for edge in ctx.next_functions[1:]]         # the first is x's
        found: tuple[Tensor | None, ...] = (None,) * len(ctx.records)
        dx = None
        if dy is not None:
            kept = template.nothing_kept(x) if kept is None else _mapped(kept, Part, Part.tensor)
            if ctx.keep == LINKED:
                kept.x = x
            dx, grads = template.backward(dy.contiguous(), kept, fused.weights(ctx.names), ctx.call, ctx.wanted,
                                          ctx.needs_input_grad[5])
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
            return node.template.again(x, out, fused.weights(node.names), node.call, node.keep)


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


def _modes() -> bool:
    """Is there a mode that may give torch's functions another meaning? A default device gives none."""
    functions = range(torch._C._len_torch_function_stack())
    return torch._C._len_torch_dispatch_stack() > 0 or any(
        not isinstance(torch._C._get_function_stack_at(i), DeviceContext) for i in functions)


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


@dataclasses.dataclass
class Judged:
    """What is known of a case: the template that its calls run by, set as its proof found; or why there is none."""

    template: Template | None
    verdict: str = ""


@dataclasses.dataclass
class Known:
    """What a window knows of a structure that its module has or had.

    Attributes:
        template: as it was read: for sizes, and for what all cases have in common. No call runs by it.
        cases: of calls. sets: templates by their settings, which cases share and nobody changes.
    """

    template: Template
    cases: dict[Case, Judged] = dataclasses.field(default_factory=dict)
    sets: dict[Any, Template] = dataclasses.field(default_factory=dict)

    def set_as(self, settings: tuple[Any, ...]) -> Template:
        if settings not in self.sets:
            self.sets[settings] = self.template.set_as(settings)
        return self.sets[settings]


class Fused(Runner):
    """What a window knows of its template.

    Attributes:
        template: of the module's structure, which is the module's as long as the runtime's watch says so.
        names: of the window's records, as that structure calls them.
        verdict: that of the last call: "" where a template was used, else why not; None before the first.
        declined: why the last call ran the module's own code although its case is proved; "" when it did not.
        unfit: why no call can run by a template until the module changes; "" when they can.
    """

    def __init__(self, window: Window, module: nn.Module) -> None:
        super().__init__(window)
        self.verdict: str | None = None
        self.declined = self.unfit = ""
        self._structures: dict[Any, Known] = {}
        self.read()

    def read(self) -> bool:
        """The module's structure, anew; True: it is one that it has not had before.

        Raises:
            Unfit: no template covers it.
        """
        names = {id(p): n for n, p in self.module.named_parameters()}
        if set(names) != {id(r.param) for r in self.window.records}:
            raise Unfit("its parameters are not those that it was streamed with")
        self.names = tuple(names[id(r.param)] for r in self.window.records)
        inner = self.window.inner
        self.structure = ((*structure_of(self.module, Installed), Same(getattr(inner, "__func__", inner))),
                          numbers_of(self.module))
        new = self.structure not in self._structures
        if new:
            self._structures[self.structure] = Known(template(self.module))
        self._known, self.unfit = self._structures[self.structure], ""
        self.template = self._known.template
        self.split()
        return new

    def forget(self) -> None:
        """What was found of all structures."""
        self._structures.clear()

    def split(self) -> None:
        """Follows requires_grad."""
        by_record = dict(zip(self.window.records, self.names))
        self.trained_names = [by_record[r] for r in self.window.trainable]
        self.wanted = frozenset(self.trained_names)

    def weights(self, names: tuple[str, ...]) -> Weights:
        """names: of the window's records, as a template calls them."""
        rt, window = self.window.runtime, self.window
        if window.alone:
            return rt.ring.weights(window.units[0], names)
        return Weights(dict(zip(names, window.views(window.records))))

    def check_versions(self, versions: list[int]) -> None:
        if versions != self.versions():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"weights of {self.window.name!r} were updated between forward and backward; "
                "call backward() before step()")

    # ---- calls ----

    def __call__(self, args: Any, kwargs: Any) -> Tensor | None:
        """The layer's output, or None when the module's own code has to run."""
        try:
            judged = self._case_of(args, kwargs)
            self.verdict, self.declined = judged.verdict, ""
            if judged.verdict:
                return None
            x, call = self._taken(judged.template, args, kwargs)
        except (Unfit, Refused) as reason:
            self.declined = str(reason)
            return None
        window = self.window
        mode, link = window.runtime.keeps.of_call(window, x.shape[:2].numel()), None
        if mode.keep == LINKED:
            mode, link = self._linked(x, mode)
        if link is not None or (mode.host and self.template.swaps):
            return self._kept_elsewhere(judged.template, x, call, mode, link)
        return Layer.apply(self, judged.template, call, mode, None, x, *window.params)

    def _case_of(self, args: Any, kwargs: Any) -> Judged:
        """What is known of calls like this one, if it may be a single node.

        Raises:
            Unfit, Refused: it may not.
        """
        if self.unfit:
            return Judged(None, self.unfit)
        window = self.window
        if hf_calls.hooked(window.hooks) or _has_any_global_hook():
            raise Unfit("there are hooks inside it")
        if casts(window.runtime.device.type, window.records[0].dtype):
            raise Unfit("autocast is on")
        if _modes():
            raise Unfit("a mode of torch's functions is on")
        x = self.template.input(args, kwargs, window.records[0].dtype)
        if not (x.requires_grad or window.trainable):
            raise Unfit("nothing needs a gradient")
        case = self.template.case(x, kwargs)
        judged = self._known.cases.get(case)
        if judged is None:
            self._taken(self.template, args, kwargs)     # what no template takes need not be proved
            judged = self._known.cases[case] = self._judged(case, x, kwargs)
        return judged

    def _taken(self, template: Template, args: Any, kwargs: Any) -> tuple[Tensor, Any]:
        """x and the rest of the call, as a template takes them."""
        return template.take(self.module, args, kwargs, self.window.records[0].dtype)

    def _kept_elsewhere(self, template: Template, x: Tensor, call: Any, mode: Mode, link: Link | None) -> Tensor:
        """x too is saved by way of the bundle, whose life then is that of the graph, or not at all."""
        bundle = self.window.runtime.swap.bundle(self.window, mode) if mode.host else None

        def pack(t: Tensor) -> Any:
            if link is not None:
                return link
            return keep(t) if bundle is None or bundle.input < 0 else Part(bundle, bundle.input)

        _push(pack, restored)
        try:
            return Layer.apply(self, template, call, mode, bundle, x, *self.window.params)
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
        may = self.template.links and node.template.links and node.keep != LINKED and node.kept is not None
        made_from = node.template.made_from(node.kept) if may else None
        if made_from is None:
            return mode._replace(keep="attention"), None
        return mode, Link(node, made_from, self.window.runtime.swap.position)

    # ---- the proof, and a look at numbers ----

    def _judged(self, case: Case, x: Tensor, kwargs: Any) -> Judged:
        """The verdict of a case. Windows of one structure share proofs, and looks at numbers."""
        proofs, device = self.window.runtime.proofs, self.window.runtime.device.type
        found = proofs.found(self, case, x.dtype if x.is_floating_point() else None)
        if isinstance(found, str):
            return Judged(None, found)
        if x.shape[1:2].numel() < LEAST_TOKENS:
            raise Unfit(f"its first calls have fewer than {LEAST_TOKENS} tokens in a row, too few to look at")
        template, key = self._known.set_as(found.settings), (self.structure[0], case, found.settings, device)
        if key not in proofs.looked:
            proofs.looked[key] = self._look(template, x, kwargs)
        return Judged(template, proofs.looked[key])

    def prove(self, case: Case, dtype: torch.dtype | None) -> Proof:
        """Raises:
            Refused: the module's code is not proved to compute what the template does.
        """
        from .proof.prove import prove  # sympy comes with it, which only fused models wait for
        weights = {n: (tuple(r.shape), r.dtype) for n, r in zip(self.names, self.window.records)}
        return prove(self._bound_to, self.module, self.window.inner, self.template, weights,
                     self.window.runtime.device, dtype, case)

    @contextlib.contextmanager
    def _bound_to(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """The module reads these weights, by name, instead of its own."""
        outer = swap_window({r: tensors[n] for r, n in zip(self.window.records, self.names)})
        try:
            yield
        finally:
            swap_window(outer)

    def _look(self, template: Template, x: Tensor, kwargs: Any) -> str:
        """Compares numbers: kernels could be wrong where the computation is right. "", or how far they are off."""
        try:
            wide = self._wide()
            limit = NOISE.get(wide or self.window.records[0].dtype, 1e-5)
            for magnitude, last in itertools.product(MAGNITUDES, (False, True)):
                with torch.autocast(x.device.type, enabled=False):       # it is to the weights' own type, if at all
                    error = self._off(template, x, kwargs, wide, magnitude, last)
                if not error <= limit:
                    return f"on random data the template is off by {error:.1e} (relative), more than {limit:.0e}"
        except Unfit as reason:
            return str(reason)
        return ""

    def _wide(self) -> torch.dtype | None:
        """fp32, if a layer of 16 bits may be looked at in that: weights and gradients are few, and products exact to
        it; None: its own type."""
        few = 16 * sum(r.numel for r in self.window.records) <= WIDE_BYTES
        exact = not self.window.runtime.is_cuda or torch.get_float32_matmul_precision() == "highest"
        half = self.window.records[0].dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if half and few and exact else None

    def _off(self, template: Template, x: Tensor, kwargs: Any, wide: torch.dtype | None, magnitude: float, last: bool
             ) -> float:
        """The worst relative error of output and gradients, for one random input."""
        rng = torch.Generator(x.device).manual_seed(0)
        x, kwargs = template.small(x, rng, TRIAL_TOKENS, kwargs, last)
        if x.is_floating_point():
            x = x.mul_(magnitude)
        if wide is not None:
            x, kwargs = tree_map(lambda t: _as(t, wide), (x, kwargs))
        with template.observed(self.module):
            truth, dy = self._own(x, kwargs, rng, wide)
            return _error(truth, self._templates(template, x, dy, kwargs, wide))

    def _own(self, x: Tensor, kwargs: Any, rng: torch.Generator, wide: torch.dtype | None
             ) -> tuple[dict[str, Tensor], Tensor]:
        """Output and gradients of the module's own code for a random output gradient, and that."""
        window, into = self.window, self.template.differentiable_input
        bound = window.bind_leaves()
        if wide is not None:
            bound = {r: _as(t.detach(), wide).requires_grad_(t.requires_grad) for r, t in bound.items()}
        with torch.enable_grad():
            x.requires_grad_(into)
            outer = swap_window(bound)
            try:
                y = window.inner(x, **kwargs)
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

    def _templates(self, template: Template, x: Tensor, dy: Tensor, kwargs: Any, wide: torch.dtype | None
                   ) -> dict[str, Tensor]:
        x, call = template.take(self.module, (x,), kwargs, wide or self.window.records[0].dtype)
        with torch.no_grad():
            w = self.weights(self.names)
            w = w if wide is None else Weights({n: _as(t, wide) for n, t in w.by_name.items()})
            try:
                y, kept = template.forward(x, w, call, "saved")
                dx, grads = template.backward(dy, kept, w, call, self.wanted, True)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise Unfit(f"the template fails: {error}") from error
        return {"y": y, **({} if dx is None else {"dx": dx}), **grads}


def _as(t: Any, wide: torch.dtype) -> Any:
    """Floating-point tensors in this type; masks that are additions hide as before."""
    return t.to(wide) if isinstance(t, Tensor) and t.is_floating_point() else t


class Proofs:
    """What has been proved of a model's windows, and the watch over them.

    Attributes:
        looked: what a look at numbers gave, by structure, case and device.
    """

    def __init__(self) -> None:
        self.watch, self.looked = Watch(), {}
        self._changes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def found(self, fused: Fused, case: Case, dtype: torch.dtype | None) -> Proof | str:
        """What was proved, once for all windows alike; or why it cannot be."""
        structure, numbers = fused.structure
        key = structure, case, dtype, fused.window.runtime.device.type
        found = _PROVED.get((*key, None)) or _PROVED.get((*key, numbers)) or self._prove(fused, key, numbers)
        if not isinstance(found, str):
            self.watch.code.add_globals(found.globals)
        return found

    @staticmethod
    def _prove(fused: Fused, key: tuple[Any, ...], numbers: tuple[int, ...]) -> Proof | str:
        code = Code()
        code.add_classes(set(map(type, fused.module.modules())))
        try:
            found: Proof | str = fused.prove(key[1], key[2])
            code.add_globals(found.globals)
            looked = found.looked
        except Refused as reason:
            found, looked = str(reason), reason.looked
        except ImportError as error:
            found, looked = f"this torch has not what a proof needs: {error}", True
        _PROVED.put((*key, numbers if looked else None), found, code)
        return found

    def look(self) -> None:
        """Once a pass: windows that changed are read anew, and proved again at their next call."""
        windows, code = self.watch.look()
        if code:
            self.looked.clear()
        for window in windows:
            window.look()                    # hooks of modules that came
            if window.head is not None:
                window.head.read()
            elif window.fused is not None:
                self._read(window.fused, code)
            self.watch.add(window, window.module)

    def _read(self, fused: Fused, code: bool) -> None:
        """code: what its classes do may have changed."""
        if code:
            fused.forget()
        try:
            new = fused.read()
            times = self._changes[fused.window] = self._changes.get(fused.window, 0) + new
            if times > OFTEN:
                raise Unfit("it changes from pass to pass")
        except Unfit as reason:
            fused.verdict = fused.unfit = str(reason)


class _Proved:
    """What was found, for all models of the process: by structure, case, types, device and, where they were looked at,
    layers' numbers. As many of the latest as a process needs: keys of models that are gone match nothing."""

    MOST = 256

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[Proof | str, Code]] = {}

    def get(self, key: tuple[Any, ...]) -> Proof | str | None:
        """Nothing, where code that it is of has changed since."""
        known = self._found.pop(key, None)
        if known is None or known[1].changed():
            return None
        self._found[key] = known             # the latest comes last
        return known[0]

    def put(self, key: tuple[Any, ...], found: Proof | str, code: Code) -> None:
        self._found[key] = found, code
        if len(self._found) > self.MOST:
            del self._found[next(iter(self._found))]


_PROVED = _Proved()


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
