"""Windows that a template runs: one node of the graph, explicit backward, no hooks.

A template is used for a call only where it is proved to compute what the module's own code does (proof/), and while all
that this code reads is as it was then: guards look before each call (graph/reader.py). And its kernels have to give, on
random data, the numbers of the module's own code (trial.py). Calls that it does not cover, and all calls without
gradients, run the module's own code. `mt.explain(model)` says which and why.

The node is coarse: nothing of the layer's inside is in the graph. So it is used only where nothing can escape: no hooks
below the window, arguments the template knows. A key-value cache among them gets its keys and values, cut off from the
graph; a backward through them raises.
"""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from operator import eq
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from ..base.codes import format_of, multiplies
from ..base.modes import LINKED, Mode, inner
from ..base.modes import read as mode_of
from ..graph import hf_calls
from ..graph.door import window_of
from ..graph.frames import _pop, _push, check_versions, keep, refuse_create_graph, restored
from ..graph.reader import Graph, Reader, Reading, Unreadable, modes_on, read, scope_of, stand_in
from ..graph.swap import Bundle, Part
from ..store.records import Use
from ..store.state import accumulators, graph_stays, in_backward, in_sight, swap_window
from .proof.experts import known_loop, known_wrapper, opaque_loop
from .templates import Template, template
from .templates.parts import Unfit, arguments, codings_of, dtype_of, names_of, roles_of
from .templates.weights import STRAND, Coded, Expanded, Pieces, Weights, fits
from .trial import Trial, plain_linears, put_in

if TYPE_CHECKING:
    from ..graph.window import Window

CALM = 8                 # passes by templates alone after which a layer is taken to run by its template again
LEAST_TOKENS = 4         # of a row: with fewer, attention and rotary embedding hardly show


def casts(device: str, dtype: torch.dtype) -> bool:
    """Is autocast on, to another type than the weights'? To their own (Trainer's bf16=True) it changes nothing."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype


def wanted(compute: str, cuda: bool, dtypes: list[torch.dtype]) -> bool:
    """Does this choice of `compute` fuse a module whose weights, matrices first, have these types?"""
    half = bool(dtypes) and dtypes[0] in (torch.bfloat16, torch.float16)
    return compute == "fused" or (compute == "auto" and cuda and half)


def runs(module: nn.Module, device: str) -> Template:
    """The template that a module runs by on such a device, as things are now: mt.plan and the run have this answer. Of
    a streamed module, what its calls before the last look have shown counts too. Unfit: its own code runs."""
    window = window_of(module)
    fused = getattr(window, "fused", None)
    if why := getattr(window, "unfit", "") if fused is None else fused.own:
        raise Unfit(why)
    if fused is not None:
        return fused.template
    found, inside = template(module, device), hf_calls.hooks_of(m for m in module.modules() if m is not module)
    _check_now(found, inside, device, dtype_of(module, codings_of(module)))
    return found


def _check_now(template: Template, hooks: list[dict[int, Any]], device: str, dtype: torch.dtype) -> None:
    """Raises Unfit where the user has put something into a module (`hooks`: inside it), set, or turned on something
    that keeps a template from running it."""
    template.check()
    if modes_on():                           # FlopCounterMode has hooks on all modules too
        raise Unfit("a mode of torch's functions is on")
    if (any(hooks) and hf_calls.hooked(hooks)) or _has_any_global_hook():
        raise Unfit("there are hooks inside it")
    if casts(device, dtype):
        raise Unfit("autocast is on")


def template_of(rt: Any, window: Window, module: nn.Module) -> Fused | None:
    """The window with a template, where the runtime wants one and there is one; window.unfit says why not."""
    try:
        if wanted(rt.compute, rt.is_cuda, [dtype_of(module, codings_of(module))]):
            return Fused(window)
    except Unfit as reason:
        if wanted(rt.compute, rt.is_cuda, [torch.bfloat16]):
            window.unfit = str(reason)
    return None


def codable(windows: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """Of windows before they stream, those whose products are to be of codes."""
    found = []
    for _, module in windows:
        with contextlib.suppress(Unfit):
            found += [module] * template(module).coded
    return inner(found)


class Fused:
    """What a window knows of its template. Runs the window in place of its module's own code.

    Attributes:
        template: of the module's structure, for what all calls have in common. No call runs by it. sizes: of it.
        names: of the window's records, as that structure calls them; name#strand where they are a weight of codes.
        records: by names of weights; of one of codes, that which stands for it where modules read it.
        codings: of such weights, by their names. dtype: in which it computes. parameters: names of its forward's.
        verdict: what proof and trial say of the last call: "" nothing against it; None before the first.
        declined: why the last call ran the module's own code; "" when it did not.
        idle: that was since nothing of the call needs a gradient: its own code keeps nothing of it either.
        own: why the module's own code runs it, by the last look; "": a template does.
        coded: the template's products are of codes of 8 bits, where it has any and their sizes allow it.
        loops: modules below that loop over experts. wrappers: PEFT's around these, from outside. coded_linears: a
            package's that multiply with codes, by name.
    """

    def __init__(self, window: Window) -> None:
        self._window = weakref.ref(window)   # weakly: the window holds this; a graph that outlives the model holds both
        self.declined, self.own, self.coded, self.idle = "", "", False, False
        self.verdict: str | None = None
        self._calm = 0                       # passes in which it ran by its template alone, since its own code did
        self._lately: str | None = None      # why its own code ran since the last look; "": it did not; None: no call
        self._reader = Reader()
        self.read()

    @property
    def window(self) -> Window:
        return self._window()

    def read(self) -> None:
        """The module's structure, anew; Unfit where no template covers it, or it was streamed with other parameters."""
        window, module = self.window, self.window.module
        self._ready: dict[Reading, Template] = {}
        self._children = [m._modules for m in module.modules()]
        self._before = [{**own} for own in self._children]
        params = {id(p): n for n, p in module.named_parameters()}
        wholes = [(params.get(id(whole.param)), whole) for whole in window.wholes]
        names = {r: params.get(id(r.param)) for r in window.records}
        for name, whole in wholes:
            names.update((r, name and f"{name}{STRAND}{s}") for r, s in zip(whole.records, whole.names))
        plain = [n for n in names.values() if n is not None and STRAND not in n]
        if None in names.values() or {*plain, *(n for n, _ in wholes)} != set(params.values()):
            raise Unfit("its parameters are not those that it was streamed with")
        self.names = tuple(names.values())
        self.records = {n: r for r, n in names.items() if STRAND not in n} | {n: w.records[0] for n, w in wholes}
        self.codings = codings_of(module)
        self.dtype = dtype_of(module, self.codings)
        self.parameters = names_of(window.inner)
        self.template = template(module, window.runtime.device.type)
        self.sizes = self.template.sizes(self.dtype.itemsize)
        self.coded_linears = {n: m for n, m in module.named_modules() if format_of(dict.get(m._parameters, "weight"))}
        inside = [*map(module.get_submodule, self.template.mlp.experts.modules)] if self.template.routes else []
        self.wrappers, self.loops = inside[:-1], inside[-1:]
        self.split()

    def split(self) -> None:
        """Follows requires_grad."""
        window = self.window
        by_record = dict(zip(window.records, self.names))
        self.trained_names = tuple([by_record[r] for r in window.trainable])
        self._reader.last = None
        weights = tuple((n, r.shape, r.dtype) for n, r in self.records.items() if n not in self.codings)
        self._known = weights, tuple(self.codings.items()), self.trained_names, window.runtime.device.type

    def exact(self, names: tuple[str, ...]) -> Weights:
        """The weights by names of the window's records, as a template calls them, and those that codes stand for; of
        experts that are fetched a few at a time so many at once."""
        window = self._window()
        ring = window.runtime.ring

        def rest() -> Weights:
            w = ring.weights(window.units[0], names) if window.alone else \
                Weights(dict(zip(names, window.views(window.records))))
            return Expanded(w, self.codings, self.dtype) if self.codings else w

        own = {names[window.records.index(s.records[0])].partition(STRAND)[0]: s for s in window.stacks
               if s.pieces[0].cut is not None or s.whole is not None}
        return Pieces(rest, own, ring) if own else rest()

    def operands(self, template: Template, names: tuple[str, ...], wanted: tuple[str, ...] = ()) -> Weights:
        """What a forward, or a backward that wants these gradients, multiplies with."""
        w = self.exact(names)
        return Coded(w, wanted) if self.coded and template.coded and not self._window().stacks else w

    @property
    def products(self) -> str:
        """How they are computed, where not as the module's own code has them; and which are as those all the same."""
        if not (self.coded and self.template.coded) or self.window.stacks:
            return ""
        rest = [f"{n} ({sum(one.rows)} x {one.inputs})" for one in self.template.linears
                if not fits((sum(one.rows), one.inputs), self.dtype) for n in one.weights[:1]]
        rest += ["experts"] * self.template.routes
        return f"products in fp8 but for {', '.join(rest)}" if rest else "products in fp8"

    def look(self) -> None:
        """Before a pass: whose code will run it, by what can be seen now, and by the calls since the last look."""
        lately, self._lately = self._lately, None
        window, why = self.window, lately
        try:
            _check_now(self.template, window.hooks, window.runtime.device.type, self.dtype)
        except Unfit as reason:
            why = str(reason)
        self._calm = 0 if why else self._calm + (lately == "")
        if why or self._calm >= CALM:
            self.own = why or ""

    def __call__(self, args: Any, kwargs: Any) -> Tensor | None:
        """The layer's output, or None when the module's own code has to run."""
        window = self._window()
        self.idle = False
        try:
            x, named = arguments(self.parameters, args, kwargs)
            _check_now(self.template, window.hooks, window.runtime.device.type, self.dtype)
            self.template.check_input(x, self.dtype)
            if not (x.requires_grad or window.trainable):
                self.idle = True
                raise Unfit("nothing needs a gradient")
            reading = self._reading(window, x, args, kwargs, named)
            template = self._ready.get(reading) or self._tried(reading, x, named)
            x, call = template.take(window.module, x, named, reading.found[2])
        except Unfit as reason:
            self.declined = str(reason)
            self._lately = self._lately if self.idle else self.declined          # the next look sees it
            return None
        self.verdict = self.declined = ""
        self._lately = self._lately or ""
        keeps = window.runtime.keeps
        keeps.most_tokens = max(keeps.most_tokens, x.shape[:2].numel())
        mode, link = self._linked(x, mode_of(keeps.mode_of(window)))
        if link is None and not (mode.host and self.template.swaps):
            return Layer.apply(self, template, call, mode, None, x, *window.params)
        # x too is saved by way of the bundle, whose life then is that of the graph, or not at all.
        bundle = Bundle(window.runtime.swap, window, mode.disk) if mode.host else None

        def pack(t: Tensor) -> Any:
            if link is not None:
                return link
            return keep(t) if bundle is None or bundle.input < 0 else Part(bundle, bundle.input)

        _push(pack, restored)
        try:
            return Layer.apply(self, template, call, mode, bundle, x, *window.params)
        finally:
            _pop()

    def _tried(self, reading: Reading, x: Tensor, named: dict[str, Any]) -> Template:
        """The template of a call so read, tried on numbers once for all windows of a model for which the reading holds;
        Unfit where proof or trial are against it."""
        settings, self.verdict, _ = reading.found
        looked = self.window.runtime.looked
        if not self.verdict:
            found = self.template.set_as(settings)
            if reading not in looked:
                if x.shape[1:2].numel() < LEAST_TOKENS:
                    raise Unfit(f"its first calls have fewer than {LEAST_TOKENS} tokens in a row, too few to look at")
                looked[reading] = Trial(self, found).verdict(x, named)
            self.verdict = looked[reading]
        if self.verdict:
            raise Unfit(self.verdict)
        return self._ready.setdefault(reading, found)

    # ---- what the module's code is ----

    def _reading(self, window: Window, x: Any, args: Any, kwargs: Any, named: dict[str, Any]) -> Reading:
        """What is known of the module's code, for this call; Unfit where no template covers the module or the call, or
        where the code cannot be followed."""
        inner, reader = window.inner, self._reader
        if not all(map(eq, self._children, self._before)):   # no guard sees children of one class trade places
            self.read()

        def key() -> tuple[Any, ...]:
            """What no guard looks at: weights, packages' products with codes, loops over experts, adapters of these."""
            for name, m in self.coded_linears.items():
                if why := multiplies(m, self.dtype):
                    raise Unfit(f"{name}: {why}")
            return getattr(inner, "__func__", type(inner)), self._known, tuple(map(known_loop, self.loops)), (
                tuple(map(known_wrapper, self.wrappers)),
                tuple(self.template.mlp.experts.adapters.items())) if self.wrappers else ()

        def make() -> Reading:
            self.template.take(window.module, x, named)          # what no template takes need not be proved
            return self._proved(scope)

        scope = scope_of(inner, args, kwargs)
        if reader.holds(key(), scope):
            return reader.last
        self.read()                          # it may be another structure by now
        try:
            return reader.of(key(), scope, window.runtime.looked, make)
        except Unreadable as reason:
            raise Unfit(f"its code cannot be followed: {reason}") from None

    def _proved(self, scope: dict[str, Any]) -> Reading:
        """The call read, its graph compared with the template. The reading's `found` is settings of the template, what
        is against it, and by which name each argument comes that has a role."""
        from .proof.prove import prove  # sympy comes with it, which only fused models wait for
        window, module, template, weights = self.window, self.window.module, self.template, {}
        slots = dict(zip(window.records, window.views(window.records)))
        for name, record in self.records.items():        # where codes stand for a weight, one without memory of its own
            like, t = self.codings.get(name), slots.get(record)
            if like is not None or t is None:
                shape, dtype = (record.shape, record.dtype) if like is None else (like.shape, like.dtype or self.dtype)
                t = torch.empty((), dtype=dtype, device=window.runtime.device).expand(tuple(shape))
            weights[name] = stand_in(t, record)
        x, named = arguments(self.parameters, scope["args"][scope["args"][:1] == (module,):], scope["kwargs"])

        def judge(graph: Graph | None, writes: str) -> tuple[tuple[Any, ...], str, dict[str, str]]:
            if writes:
                return (), f"its code has side effects: {writes}", {}
            try:
                return prove(graph, template, module, weights, x, named), "", roles_of(named)
            except Unfit as reason:
                return (), str(reason), {}

        forwards = plain_linears(self, weights)
        for m in self.loops:
            names = sorted(template.mlp.experts.names)
            loop = opaque_loop(m, 2 * template.mlp.experts.inter, [weights[n] for n in names])
            forwards.append(((*self.wrappers, m)[0], loop))
        wide = [t for t in tree_leaves((x, named)) if isinstance(t, Tensor) and t.dim() == 3 and t.is_floating_point()]
        outer = swap_window({r: weights[n] for n, r in self.records.items()})
        try:
            with put_in(forwards):
                return read(scope, list(module.modules()), judge, [forward for _, forward in forwards], wide)
        finally:
            swap_window(outer)

    def _linked(self, x: Tensor, mode: Mode) -> tuple[Mode, Link | None]:
        """The mode that a window so given its input can have, and of a linked one what stands for that.

        Where x is no window's output as it came, the input is kept alone. Where the window before is no layer, keeps
        no attention's output or is linked itself, the input is kept beside attention's output.
        """
        if mode.keep != LINKED:
            return mode, None
        node: Any = x.grad_fn
        if not isinstance(node, Layer._backward_cls):
            return mode._replace(keep="replay"), None
        may = self.template.swaps and node.template.swaps and node.keep != LINKED and node.kept is not None
        if not may or (made_from := node.kept[0].out) is None:       # attention would have to run again
            return mode._replace(keep="attention"), None
        return mode, Link(node, made_from, self.window.runtime.swap.position)


@in_sight
class Layer(torch.autograd.Function):
    """x and host parameters in, the layer's output out."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, template: Template, call: Any, mode: Mode, bundle: Bundle | None, x: Tensor,
                *params: Tensor) -> Tensor:
        ctx.window = window = fused._window()            # which the graph may outlive its module with
        ctx.fused, ctx.call, ctx.records, ctx.keep, ctx.bundle = fused, call, window.trainable, mode.keep, bundle
        # The module, and what of it is trained, may change before backward, which is that of this forward.
        ctx.template, ctx.names, ctx.trained_names = template, fused.names, fused.trained_names
        ctx.use = Use(window.trainable) if in_backward() == -1 else None
        ctx.set_materialize_grads(False)
        ctx.position = window.runtime.swap.position
        y, kept = template.forward(x, fused.operands(template, ctx.names), call, mode.keep)
        if bundle is not None:               # on its way off the device, but for what is small
            may = bundle.swap.may
            kept = tree_map_only(Tensor, lambda t: bundle.add(t) if may(t) else t, kept)
            if mode.keep != LINKED and may(x):
                bundle.input = bundle.add(x).number
            bundle.leave()
        ctx.kept = kept
        ctx.versions = window.versions()
        ctx.save_for_backward(x)             # torch's own checks: in-place writes, a second backward
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        refuse_create_graph()
        fused, template, (x,) = ctx.fused, ctx.template, ctx.saved_tensors     # x of a linked window is made again here
        rt, kept, bundle, dx = ctx.window.runtime, ctx.kept, ctx.bundle, None
        # This object lives as long as the loss, what it keeps not: a second time all is made again from x. What that
        # needs of a bundle, x as it was saved holds.
        ctx.kept = ctx.bundle = None
        rt.swap.approach(ctx.position)
        check_versions(ctx.window, ctx.versions)
        nodes = accumulators(ctx)
        found: list[Tensor | None] = [None] * len(ctx.records)
        if dy is not None:
            if bundle is not None:
                kept = tree_map_only(Part, Part.tensor, kept)
            del bundle
            with rt.keeps.memory():
                w = fused.operands(template, ctx.names, ctx.trained_names)
                dx, grads = template.backward(dy.contiguous(), x, kept, w, ctx.call, ctx.trained_names)
            found = list(map(grads.get, ctx.trained_names))
            del w, grads                     # which have the weights: views that hold a slot, or what was made of codes
        taken = rt.handover.take(ctx.records, ctx.use, nodes, tuple(found))
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
        if (bundle := node.bundle) is not None:
            bundle.needed = position
            for n in [made_from.number] * (type(made_from) is Part) + [bundle.input] * (bundle.input >= 0):
                bundle.wanted[n] += 1

    def tensor(self) -> Tensor:
        node, fused = self.node, self.node.fused
        (x,) = node.saved_tensors
        check_versions(node.window, node.versions)
        with node.window.runtime.trace.during(node.window, "replay"), torch.no_grad():
            out = self.made_from.tensor() if type(self.made_from) is Part else self.made_from
            return node.template.again(x, out, fused.operands(node.template, node.names), node.call, node.keep)
