"""Windows that a template runs: one node of the graph, explicit backward, no hooks.

A template is used for a call only where it is proved to compute what the module's own code does (proof/), and while all
that this code reads is as it was then: guards look before each call (graph/reader.py). And its kernels have to give, on
random data, the numbers of the module's own code (trial.py). Calls that it does not cover, and all calls without
gradients, run the module's own code. `mt.explain(model)` says which and why.

The node (node.py) is coarse: nothing of the layer's inside is in the graph. So it is used only where nothing can
escape: no hooks below the window, arguments the template knows. A key-value cache among them gets its
keys and values, cut off from the graph; a backward through them raises.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..base.codes import format_of, multiplies
from ..base.modes import LINKED, Mode, inner
from ..graph import hf_calls
from ..graph.frames import _pop, _push, keep, restored
from ..graph.reader import Graph, Reader, Reading, Unreadable, modes_on, read, scope_of, stand_in
from ..graph.swap import Part
from ..store.state import swap_window
from .bases import plain_linears
from .node import Layer, Link
from .proof.experts import known_loop, opaque_loop
from .proof.values import Refused
from .runner import Runner
from .templates import STRAND, Coded, Expanded, Unfit, Weights, codings_of, dtype_of, fits, template
from .templates.parts import arguments, names_of
from .templates.pieces import Pieces
from .trial import Trial

if TYPE_CHECKING:
    from ..graph.window import Window
    from ..store.records import Record
    from .templates import Template

CALM = 8                 # passes by templates alone after which a layer is taken to run by its template again
LEAST_TOKENS = 4         # of a row: with fewer, attention and rotary embedding hardly show


def casts(device: str, dtype: torch.dtype) -> bool:
    """Is autocast on, to another type than the weights'? To their own (Trainer's bf16=True) it changes nothing."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype


def wanted(compute: str, cuda: bool, dtypes: list[torch.dtype]) -> bool:
    """Does this choice of `compute` fuse a module whose weights, matrices first, have these types?"""
    half = bool(dtypes) and dtypes[0] in (torch.bfloat16, torch.float16)
    return compute == "fused" or (compute == "auto" and cuda and half)


class Idle(Unfit):
    """Nothing of a call needs a gradient: the module's own code keeps nothing of it either."""


def runs(module: nn.Module, device: str) -> Template:
    """The template that a module runs by on such a device, as things are now: mt.plan and the run have this answer. Of
    a streamed module, what its calls before the last look have shown counts too.

    Raises:
        Unfit: its own code runs; the text says why.
    """
    window = getattr(vars(module).get("forward"), "_call", None)
    fused, why = getattr(window, "fused", None), getattr(window, "unfit", "")
    if fused is not None:
        why = fused.own
    if why:
        raise Unfit(why)
    if fused is not None:
        return fused.template
    found = _fit(module, device)
    inside = [h for m in module.modules() if m is not module
              for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)]
    dtype = dtype_of(module, codings_of(module)) or next(p.dtype for p in module.parameters())
    _check_now(found, inside, device, dtype)
    return found


def _fit(module: nn.Module, device: str) -> Template:
    """Raises:
        Unfit: no template covers its structure on such a device.
    """
    found = template(module)
    if found.rounds and device == "cuda":
        raise Unfit("the package of its codes rounds activations to 8 bits on a GPU")
    return found


def _check_now(template: Template, hooks: list[dict[int, Any]], device: str, dtype: torch.dtype) -> None:
    """Raises:
        Unfit: something that the user has put into a module, set, or turned on keeps a template from running it. hooks:
            of what is inside the module.
    """
    template.check()
    if modes_on():                           # FlopCounterMode has hooks on all modules too
        raise Unfit("a mode of torch's functions is on")
    if hf_calls.hooked(hooks) or _has_any_global_hook():
        raise Unfit("there are hooks inside it")
    if casts(device, dtype):
        raise Unfit("autocast is on")


def template_of(rt: Any, window: Window, module: nn.Module) -> Fused | None:
    """The window with a template, where the runtime wants one and there is one; window.unfit says why not."""
    try:
        dtype = dtype_of(module, codings_of(module))
        if wanted(rt.compute, rt.is_cuda, [r.dtype for r in window.records] if dtype is None else [dtype]):
            return Fused(window, module)
    except Unfit as reason:
        if wanted(rt.compute, rt.is_cuda, [torch.bfloat16]):
            window.unfit = str(reason)
    return None


def give_codes(windows: list[Window]) -> None:
    """Products of codes to the layers of a model that are to have them."""
    for window in inner([w for w in windows if w.fused is not None and w.fused.template.coded]):
        window.fused.coded = True


def codable(windows: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """Of windows before they stream, those that `give_codes` would choose."""
    return inner([m for _, m in windows if _is_codable(m)])


def _is_codable(module: nn.Module) -> bool:
    try:
        return template(module).coded
    except Unfit:
        return False


class Fused(Runner):
    """What a window knows of its template.

    Attributes:
        template: of the module's structure, for sizes and for what all calls have in common. No call runs by it.
        names: of the window's records, as that structure calls them; name#strand where they are a weight of codes.
        records: by names of weights; of one of codes, that which stands for it where modules read it.
        codings: of such weights, by their names. dtype: in which it computes. parameters: names of its forward's.
        verdict: that of the last call: "" where a template was used, else why not; None before the first.
        declined: why the last call ran the module's own code although its code is proved; "" when it did not.
        idle: that was since nothing of the call needs a gradient.
        own: why the module's own code runs it, by the last look; "": a template does.
        coded: the template's products are of codes of 8 bits, where it has any and their sizes allow it.
        loops: modules below that loop over experts.
    """

    def __init__(self, window: Window, module: nn.Module) -> None:
        super().__init__(window)
        self.verdict: str | None = None
        self.declined = self.own = ""
        self._calm = 0                       # passes in which it ran by its template alone, since its own code did
        self._lately: str | None = None      # why its own code ran since the last look; "": it did not; None: no call
        self.coded = self.idle = False
        self._reader = Reader()
        self.read()

    def read(self) -> None:
        """The module's structure, anew.

        Raises:
            Unfit: no template covers it.
        """
        self._sets: dict[Any, Template] = {}
        self._parts = [(m._modules, {**m._modules}) for m in self.module.modules()]
        self._name(dict((id(p), n) for n, p in self.module.named_parameters()))
        self.codings = codings_of(self.module)
        self.dtype = dtype_of(self.module, self.codings) or self.window.records[0].dtype
        self.parameters = names_of(self.window.inner)
        self.template = _fit(self.module, self.window.runtime.device.type)
        self._coded_linears = {n: m for n, m in self.module.named_modules()
                               if format_of(dict.get(m._parameters, "weight"))}
        mixture = [self.template.mlp.experts.gu] if self.template.routes else []
        self.loops = [self.module.get_submodule(n.rpartition(".")[0]) for n in mixture]
        self.split()

    def _name(self, params: dict[int, str]) -> None:
        """params: the module's parameters, by what they are.

        Raises:
            Unfit: they are not those that it was streamed with.
        """
        wholes = [(params.get(id(whole.param)), whole) for whole in self.window.wholes]
        names = {r: params.get(id(r.param)) for r in self.window.records}
        for name, whole in wholes:
            names.update((r, name and f"{name}{STRAND}{s}") for r, s in zip(whole.records, whole.names))
        plain = [n for n in names.values() if n is not None and STRAND not in n]
        if None in names.values() or {*plain, *(n for n, _ in wholes)} != set(params.values()):
            raise Unfit("its parameters are not those that it was streamed with")
        self.names = tuple(names.values())
        self.records = {n: r for r, n in names.items() if STRAND not in n} | {n: w.records[0] for n, w in wholes}

    def split(self) -> None:
        """Follows requires_grad."""
        by_record = dict(zip(self.window.records, self.names))
        self.trained_names = [by_record[r] for r in self.window.trainable]
        self.wanted, self._reader.last = frozenset(self.trained_names), None

    def weights(self, names: tuple[str, ...]) -> Weights:
        """names: of the window's records, as a template calls them."""
        rt, window = self.window.runtime, self.window
        if window.alone:
            return rt.ring.weights(window.units[0], names)
        return Weights(dict(zip(names, window.views(window.records))))

    def operands(self, names: tuple[str, ...], wanted: frozenset[str] = frozenset()) -> Weights:
        """What a forward, or a backward that wants these gradients, multiplies with."""
        w = self.exact(names)
        return Coded(w, wanted) if self.codes_products else w

    @property
    def codes_products(self) -> bool:
        return self.coded and self.template.coded and not self.window.stacks

    def exact(self, names: tuple[str, ...]) -> Weights:
        """The weights, those that codes stand for too; of experts that are fetched a few at a time so many at once."""
        stacks = [s for s in self.window.stacks if s.pieces[0].cut is not None or s.whole is not None]
        if stacks:
            by_record, ring = dict(zip(self.window.records, names)), self.window.runtime.ring
            own = {by_record[s.records[0]].partition(STRAND)[0]: s for s in stacks}
            return Pieces(lambda: self._whole(names), own, lambda piece: piece.made(ring))
        return self._whole(names)

    def _whole(self, names: tuple[str, ...]) -> Weights:
        w = self.weights(names)
        return Expanded(w, self.codings, self.dtype) if self.codings else w

    @property
    def products(self) -> str:
        """How they are computed, where not as the module's own code has them; and which are as those all the same."""
        if not self.codes_products:
            return ""
        dtype = self.dtype
        rest = [f"{n} ({sum(one.rows)} x {one.inputs})" for one in self.template.linears
                if not fits((sum(one.rows), one.inputs), dtype) for n in one.weights[:1]]
        rest += ["experts"] * self.template.routes
        return f"products in fp8 but for {', '.join(rest)}" if rest else "products in fp8"

    def check_versions(self, versions: list[int]) -> None:
        if versions != self.versions():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"weights of {self.window.name!r} were updated between forward and backward; "
                "call backward() before step()")

    # ---- calls ----

    def look(self) -> None:
        """Before a pass: whose code will run it, by what can be seen now, and by the calls since the last look."""
        lately, self._lately = self._lately, None
        try:
            _check_now(self.template, self.window.hooks, self.window.runtime.device.type, self.dtype)
            why = lately
        except Unfit as reason:
            why = str(reason)
        self._calm = 0 if why else self._calm + (lately == "")
        if why or self._calm >= CALM:
            self.own = why or ""

    def _leave(self, why: str, idle: bool = False) -> None:
        """The module's own code runs, which the next look sees."""
        self.idle = idle
        if not idle:
            self._lately = why

    def __call__(self, args: Any, kwargs: Any) -> Tensor | None:
        """The layer's output, or None when the module's own code has to run."""
        try:
            x, named = arguments(self.parameters, args, kwargs)
            self._may(x)
            reading = self._reading(x, args, kwargs, named)
            settings, self.verdict = reading.found
            if not self.verdict:
                self.verdict = self._looked(reading, settings, x, named)
            self.declined = ""
            if self.verdict:
                return self._leave(self.verdict)
            template = self._set_as(settings)
            x, call = template.take(self.module, x, named, self.dtype)
        except (Unfit, Refused) as reason:
            self.declined = str(reason)
            return self._leave(self.declined, isinstance(reason, Idle))
        self._lately = self._lately or ""
        window = self.window
        mode, link = window.runtime.keeps.of_call(window, x.shape[:2].numel()), None
        if mode.keep == LINKED:
            mode, link = self._linked(x, mode)
        if link is not None or (mode.host and self.template.swaps):
            return self._kept_elsewhere(template, x, call, mode, link)
        return Layer.apply(self, template, call, mode, None, x, *window.params)

    def _may(self, x: Any) -> None:
        """Raises:
            Unfit: what goes on around the call is nothing for a single node.
        """
        window = self.window
        _check_now(self.template, window.hooks, window.runtime.device.type, self.dtype)
        x = self.template.input(x, self.dtype)
        if not (x.requires_grad or window.trainable):
            raise Idle("nothing needs a gradient")

    def _set_as(self, settings: tuple[Any, ...]) -> Template:
        if settings not in self._sets:
            self._sets[settings] = self.template.set_as(settings)
        return self._sets[settings]

    # ---- what the module's code is ----

    def _key(self) -> tuple[Any, ...]:
        """What guards do not look at: weights, package's products with codes, loops over experts.

        Raises:
            Unfit, Refused: the last two are not known.
        """
        for name, m in self._coded_linears.items():
            if why := multiplies(m, self.dtype):
                raise Unfit(f"{name}: {why}")
        weights = tuple((n, r.shape, r.dtype) for n, r in self.records.items() if n not in self.codings)
        inner, loops = self.window.inner, tuple(map(known_loop, self.loops))
        return (getattr(inner, "__func__", type(inner)), weights, tuple(self.codings.items()), self.wanted, loops,
                self.window.runtime.device.type)

    def _reading(self, x: Any, args: Any, kwargs: Any, named: dict[str, Any]) -> Reading:
        """What is known of the module's code, for this call.

        Raises:
            Unfit, Refused: the template does not cover the module, or the call, or the code cannot be followed.
        """
        scope, reader = scope_of(self.window.inner, args, kwargs), self._reader
        moved = any(now != then for now, then in self._parts)  # no guard sees children of one class trade places
        if moved or (reader.last is not None and not reader.last.holds(scope)):
            self.read()                      # it may be another structure by now

        def make() -> Reading:
            self.template.take(self.module, x, named, self.dtype)        # what no template takes need not be proved
            return self._proved(scope)

        try:
            return reader.of(self._key(), scope, self.window.runtime.looked, make)
        except Unreadable as reason:
            raise Unfit(f"its code cannot be followed: {reason}") from None

    def _proved(self, scope: dict[str, Any]) -> Reading:
        """The call read, its graph compared with the template."""
        from .proof.prove import prove  # sympy comes with it, which only fused models wait for
        module, weights = self.module, self._stand_ins()
        x, named = arguments(self.parameters, scope["args"][scope["args"][:1] == (module,):], scope["kwargs"])

        def judge(graph: Graph | None, writes: str) -> tuple[tuple[Any, ...], str]:
            if writes:
                return (), f"its code has side effects: {writes}"
            router = vars(module.get_submodule(self.template.mlp.router.name)) if self.template.routes else {}
            numbers = [float(v) for v in router.values() if isinstance(v, int | float)]
            try:
                return prove(graph, self.template, weights, x, named, dict(module.named_buffers()), numbers), ""
            except Refused as reason:
                return (), str(reason)

        outer = swap_window({r: weights[n] for n, r in self.records.items()})
        try:
            with contextlib.ExitStack() as stack:
                put = stack.enter_context(plain_linears(module, weights, self.dtype))
                for m in self.loops:
                    e = self.template.mlp.experts
                    put.append(stack.enter_context(opaque_loop(m, 2 * e.inter, [weights[n] for n in sorted(e.names)])))
                return read(scope, list(module.modules()), judge, put)
        finally:
            swap_window(outer)

    def _stand_ins(self) -> dict[str, Tensor]:
        """Parameters by name: the slots', and where codes stand for a weight one without memory of its own."""
        window, device = self.window, self.window.runtime.device
        found = dict(zip(window.records, window.views(window.records)))

        def made(name: str, record: Record) -> Tensor:
            like, t = self.codings.get(name), found.get(record)
            if like is not None or t is None:
                shape, dtype = (record.shape, record.dtype) if like is None else (like.shape, like.dtype or self.dtype)
                t = torch.empty((), dtype=dtype, device=device).expand(tuple(shape))
            return stand_in(t, record)

        return {n: made(n, r) for n, r in self.records.items()}

    def _looked(self, reading: Reading, settings: tuple[Any, ...], x: Tensor, named: dict[str, Any]) -> str:
        """What a look at numbers gave, once for all windows of a model for which the reading holds."""
        looked = self.window.runtime.looked
        if reading not in looked:
            if x.shape[1:2].numel() < LEAST_TOKENS:
                raise Unfit(f"its first calls have fewer than {LEAST_TOKENS} tokens in a row, too few to look at")
            looked[reading] = Trial(self, self._set_as(settings)).verdict(x, named)
        return looked[reading]

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
