"""Windows that a template runs: one node of the graph, explicit backward, no hooks.

A template is used for a window only where it is proved to compute what the module's own code does (proofs.py), for
this structure, this way of being called and these training flags, and while the module stays the one that was proved;
and after its kernels have given, on random data, the numbers of the module's own code (trial.py). Calls that it does
not cover, and all calls without gradients, run the module's own code. `mt.explain(model)` says which and why.

The node (node.py) is coarse: nothing of the layer's inside is in the graph. So it is used only where nothing can
escape: no hooks below the window, arguments the template knows. A key-value cache among them gets its
keys and values, cut off from the graph; a backward through them raises.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from ..base.modes import LINKED, Mode
from ..base.products import inner
from ..graph import hf_calls
from ..graph.frames import _pop, _push, keep, restored
from ..graph.installed import Installed
from ..graph.swap import Part
from .node import Layer, Link
from .proof.case import Case, Refused, Same, numbers_of, structure_of
from .runner import Runner
from .templates import STRAND, Coded, Expanded, Unfit, Weights, codings_of, dtype_of, fits, template
from .templates.pieces import Pieces
from .trial import Trial

if TYPE_CHECKING:
    from ..graph.window import Window
    from .templates import Template

LEAST_TOKENS = 4         # of a row: with fewer, attention and rotary embedding hardly show


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
        names: of the window's records, as that structure calls them; name#strand where they are a weight of codes.
        records: by names of weights; of one of codes, that which stands for it where modules read it.
        codings: of such weights, by their names. dtype: in which it computes.
        verdict: that of the last call: "" where a template was used, else why not; None before the first.
        declined: why the last call ran the module's own code although its case is proved; "" when it did not.
        unfit: why no call can run by a template until the module changes; "" when they can.
        coded: the template's products are of codes of 8 bits, where it has any and their sizes allow it.
    """

    def __init__(self, window: Window, module: nn.Module) -> None:
        super().__init__(window)
        self.verdict: str | None = None
        self.declined = self.unfit = ""
        self.coded = False
        self._structures: dict[Any, Known] = {}
        self.read()

    def read(self) -> bool:
        """The module's structure, anew; True: it is one that it has not had before.

        Raises:
            Unfit: no template covers it.
        """
        self._name(dict((id(p), n) for n, p in self.module.named_parameters()))
        self.codings = codings_of(self.module)
        self.dtype = dtype_of(self.module, self.codings) or self.window.records[0].dtype
        if self.window.runtime.is_cuda and any(c.rounds for c in self.codings.values()):
            raise Unfit(f"its package rounds activations to 8 bits on a GPU: {self.window.wholes[0].format.name}")
        inner = self.window.inner
        self.structure = ((*structure_of(self.module, Installed), tuple(self.codings.items()),
                           Same(getattr(inner, "__func__", inner))), numbers_of(self.module))
        new = self.structure not in self._structures
        if new:
            self._structures[self.structure] = Known(template(self.module))
        self._known, self.unfit = self._structures[self.structure], ""
        self.template = self._known.template
        self.split()
        return new

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
        return Weights(dict(zip(names, window.neighbours(window.records))))

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
        if casts(window.runtime.device.type, self.dtype):
            raise Unfit("autocast is on")
        if _modes():
            raise Unfit("a mode of torch's functions is on")
        x = self.template.input(args, kwargs, self.dtype)
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
        return template.take(self.module, args, kwargs, self.dtype)

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
            proofs.looked[key] = Trial(self, template).verdict(x, kwargs)
        return Judged(template, proofs.looked[key])
