"""A look at numbers: a template's kernels could be wrong where its computation is right.

Of one template, against the module's own code, on random data in the form of a call: both beside fp32.
"""
from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..base.codes import format_of
from ..base.errors import MegatrainError
from ..graph.frames import SavedFrame
from ..graph.window import Stack
from .proof.experts import loop_of
from .templates import Template
from .templates.parts import Unfit

TRIAL_TOKENS = 64
MAGNITUDES = 1.0, 30.0
ONE_ROUNDING = 2.0**-7    # of bf16, relative
AT_ONCE = 1 << 22          # elements that are compared at a time: malloc keeps as much for the next
# How much further than the module's own code a template may be from fp32: both round as often, in other places, so that
# one is by chance nearer than the other. And what is noise where the module's own code is exact by luck (it may keep in
# fp32 what a template rounds, or the reverse): two to three roundings; in fp32 itself, sums in another order.
FURTHER = 1.5
NOISE = {torch.bfloat16: 1e-2, torch.float16: 1.3e-3, torch.float32: 1e-5, torch.float64: 1e-5}
HALF = torch.bfloat16, torch.float16
Run = tuple[Tensor, dict[str, Tensor]]       # output, and what has gradients: for a gradient of it to be asked for


@contextlib.contextmanager
def put_in(methods: list[tuple[nn.Module, Any]], name: str = "forward") -> Iterator[None]:
    """Inside, modules have these forwards, or other attributes, in the place of what they have."""
    with contextlib.ExitStack() as stack:
        for m, method in methods:
            own = vars(m)
            stack.callback(*((own.__setitem__, name, own[name]) if name in own else (own.pop, name, None)))
            own[name] = method
        yield


def plain_linears(fused: Any, weights: Any) -> list[tuple[nn.Module, Any]]:
    """A package's linear layers, and forwards by which they multiply with these weights, by name, as plain nn.Linear
    do. fused: layer.Fused.

    A package's product is its own kernel's: nothing that can be followed on fake tensors. It is taken to multiply with
    the weights that its codes stand for, where the module runs the package's own code in the layer's type
    (`multiplies`). That those weights are the package's is seen on the module's data (Trial)."""
    def plain(m: nn.Module, weight: Tensor) -> Any:
        return lambda x: F.linear(x, weight, m.bias)

    return [(m, plain(m, weights[f"{name}.weight"])) for name, m in fused.coded_linears.items()
            if format_of(dict.get(m._parameters, "weight")).linear]


class InFp32(TorchDispatchMode):
    """Operations on tensors of 16 bits are those of fp32: each widens what it reads, so that there is no second copy of
    a layer's weights, and of experts one at a time. In a backward casts are autograd's, for weights of 16 bits."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in HALF and not self.backward:
            kwargs = {**kwargs, "dtype": torch.float32}
        arguments = func._schema.arguments
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        if not written and any(a.alias_info is not None for a in arguments):
            return func(*args, **kwargs)                 # a view
        args = [v if a.name in written else _widened(v) for a, v in zip(arguments, args)]
        return func(*args, **{name: v if name in written else _widened(v) for name, v in kwargs.items()})


def _widened(value: Any) -> Any:
    """Floating-point tensors of 16 bits in fp32; masks that are additions hide as before."""
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF and not isinstance(t, Stack) else t, value)


class Adapted:
    """PEFT's sum of a stack and scale * left @ right, of one expert at a time: a loop over experts then has neither the
    sum of all nor its gradient, in fp32."""

    def __init__(self, stack: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        self.stack, self.left, self.right, self.scale = stack, left, right, scale

    def __getitem__(self, expert: Any) -> Tensor:
        return torch.addmm(self.stack[expert], self.left[expert], self.right[expert], alpha=self.scale)


@contextlib.contextmanager
def adapted_one_by_one(wrapper: Any, active: list[str]) -> Iterator[None]:
    """In the place of PEFT's ParamWrapper._activate_lora, of one adapter."""
    module, name = wrapper.get_base_layer(), wrapper.parameter_name
    (adapter,) = (key for key in active if key in wrapper.lora_A)
    with put_in([(module, Adapted(getattr(module, name), *wrapper.get_delta_factors(adapter)))], name):
        yield


class Trial:
    def __init__(self, fused: Any, template: Template) -> None:
        """fused: layer.Fused."""
        self.fused, self.window, self.template = fused, fused.window, template

    def verdict(self, x: Tensor, kwargs: Any) -> str:
        """How far they are off; "": no further than rounding takes them."""
        try:
            self._compare_codes()
            for magnitude, last in itertools.product(MAGNITUDES, (False, True)):
                with torch.autocast(x.device.type, enabled=False):       # it is to the weights' own type, if at all
                    self._compare(x, kwargs, magnitude, last)
        except Unfit as reason:
            return str(reason)
        return ""

    def _compare_codes(self) -> None:
        """Unfit where we do not make the weights that their package makes. To a rounding: a GPU's kernels may fuse what
        others do not."""
        fused = self.fused
        bound, w = self.window.bind_leaves(), fused.exact(fused.names)
        for whole in self.window.wholes:
            name = next(n for n, r in fused.records.items() if r is whole.records[0])
            theirs = bound.pop(whole.records[0])
            if isinstance(theirs, Stack):
                of = self.window.runtime.ring.strands
                same = all(_to_a_rounding(w.experts(name, p.experts)[0], whole.of(of(p)))
                           for p in theirs.stacked.pieces)
            else:
                same = _to_a_rounding(w.joint((name,)), whole.format.dense(theirs, fused.dtype))
            if not same:
                raise Unfit(f"the codes of {name} stand for other numbers than {whole.format.name}'s own code makes")

    def _compare(self, x: Tensor, kwargs: Any, magnitude: float, last: bool) -> None:
        """For one random input. Unfit: the template is further off."""
        rng, dtype = torch.Generator(x.device).manual_seed(0), self.fused.dtype
        x, kwargs = self.template.small(x, rng, TRIAL_TOKENS, kwargs, last)
        if x.is_floating_point():
            x = x.mul_(magnitude)
        with self._noting_choices() as chosen:
            own = truth = self._run(self.window.bind_leaves(), x, kwargs)
            if dtype in HALF:
                truth = self._in_fp32(x, kwargs)
            dy = torch.randn(own[0].shape, generator=rng, device=x.device).to(own[0].dtype)
            if chosen:           # a choice that rounding decides is another computation: let it be
                dy[0, (chosen[0].sort(-1).values != chosen[-1].sort(-1).values).any(-1)] = 0
                self.template.mlp.router.forced = chosen[0]
            exact = self._found(truth, dy, nullcontext() if truth is own else InFp32(backward=True))
            theirs = _errors(exact, exact if truth is own else self._found(own, dy, nullcontext()))
            ours = _errors(exact, self._templates(x, dy, kwargs))
        for name, error in ours.items():
            if not error <= FURTHER * theirs[name] + NOISE.get(dtype, 1e-5):
                raise Unfit(f"on random data the template's {name} is off from fp32 by {error:.1e} (relative), "
                            f"the module's own code by {theirs[name]:.1e}")

    @contextlib.contextmanager
    def _noting_choices(self) -> Iterator[list[Tensor]]:
        """Inside, [T, k] experts that the module's own router chooses, run by run; a template may have to follow."""
        chosen: list[Tensor] = []
        if not self.template.routes:
            yield chosen
            return
        router = self.template.mlp.router
        handle = self.window.module.get_submodule(router.name).register_forward_hook(
            # Logits and weights come in an order that transformers has changed; numbers of experts are integers.
            lambda module, args, out: chosen.extend(t.detach() for t in out if not t.is_floating_point()))
        try:
            yield chosen
        finally:
            handle.remove()
            router.forced = None

    def _in_fp32(self, x: Tensor, kwargs: Any) -> Run:
        """The module's own code in fp32; of a package's products, and of loops over experts, in plain torch. (Before
        0.21 PEFT adds up whole stacks.)"""
        fused, bound = self.fused, self.window.bind_leaves()
        plain = plain_linears(fused, fused.exact(fused.names))
        loops = [(m, types.MethodType(loop_of(m), m)) for m in fused.loops]
        adds = [(m, types.MethodType(adapted_one_by_one, m)) for m in fused.wrappers if hasattr(m, "get_delta_factors")]
        with put_in([*plain, *loops]), put_in(adds, "_activate_lora"), InFp32():
            return self._run(bound, *_widened((x, kwargs)))

    def _run(self, bound: Any, x: Tensor, kwargs: Any) -> Run:
        x = x.detach().requires_grad_(x.is_floating_point())
        try:
            with torch.enable_grad():        # no graph of a look holds a slot
                y = self.window.run((x,), kwargs, bound, SavedFrame(self.window))
        except MegatrainError:
            raise                            # of a drive, say: none of the module's
        except Exception as error:
            raise Unfit(f"its code fails on random data of {x.dtype}: {error!r:.300}") from error
        if not isinstance(y, Tensor) or not y.requires_grad:
            raise Unfit("its forward gives something else than one tensor with a gradient")
        return y, {**({"dx": x} if x.requires_grad else {}),
                   **{n: bound[r] for n, r in zip(self.fused.trained_names, self.window.trainable)}}

    def _found(self, run: Run, dy: Tensor, mode: AbstractContextManager[Any]) -> dict[str, Tensor]:
        """Of the output the rows that have a gradient, and the gradients."""
        y, leaves = run
        apart = self.window.runtime.handover.apart()
        with mode, apart, torch.autograd.set_multithreading_enabled(False):      # for CUDA's: a mode is of this thread
            grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype), allow_unused=True)
        return {"y": y.detach()[dy.any(-1)], **{n: g for n, g in zip(leaves, grads) if g is not None}}

    def _templates(self, x: Tensor, dy: Tensor, kwargs: Any) -> dict[str, Tensor]:
        fused, template = self.fused, self.template
        x, call = template.take(self.window.module, x, kwargs)
        with torch.no_grad():
            w = fused.exact(fused.names)
            try:
                y, kept = template.forward(x, w, call, "saved")
                dx, grads = template.backward(dy.clone(), x, kept, w, call, fused.trained_names)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise Unfit(f"the template fails: {error}") from error
        return {"y": y[dy.any(-1)], **({} if dx is None else {"dx": dx}), **grads}


def _to_a_rounding(ours: Tensor, theirs: Tensor) -> bool:
    """Some rows, or experts, at a time: there is hardly room for a third of these."""
    some = max(1, 16 * AT_ONCE * len(theirs) // theirs.numel())
    return all(bool(((a - b).abs_() <= b.abs() * ONE_ROUNDING).all())
               for a, b in zip(ours.split(some), theirs.split(some), strict=True))


def _errors(truth: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors. A vector's gradient may be zero but for noise (a key's bias is), so vectors are measured against
    half of the largest among them as well."""
    if missing := sorted(set(truth) ^ set(found)):
        raise Unfit(f"template and module differ in what has a gradient: {', '.join(missing)}")
    vectors = max([_rms(t) for t in truth.values() if t.dim() == 1], default=0.0)
    off: dict[str, float] = {}
    for name, t in truth.items():
        scale = max(_rms(t), 0.5 * vectors if t.dim() == 1 else 0.0, 1e-30)
        error = _rms(t, found[name]) / scale
        off[name] = error if error == error else float("inf")
    return off


def _rms(t: Tensor, other: Tensor | None = None) -> float:
    """Root of the mean square of t, or of other - t, to a few digits: a part at a time, as experts' gradients are
    large, and as wide as fp32."""
    parts = t.flatten().split(AT_ONCE)
    others = parts if other is None else other.flatten().split(AT_ONCE)
    wide = torch.promote_types(t.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(a.to(wide) if other is None else b.to(wide) - a.to(wide))
             for a, b in zip(parts, others)]
    return float(torch.linalg.vector_norm(torch.stack(norms).double())) / t.numel() ** 0.5
