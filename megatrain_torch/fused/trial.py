"""A look at numbers: a template's kernels could be wrong where its computation is right."""
from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..graph.stacks import Stack
from ..store.state import swap_window
from .bases import plain_linears
from .node import Runs
from .templates import Unfit, Weights

if TYPE_CHECKING:
    from .templates import Template

TRIAL_TOKENS = 64
MAGNITUDES = 1.0, 30.0
ONE_ROUNDING = 2.0**-7    # of bf16, relative
WIDE_BYTES = 1 << 31     # a layer of 16 bits is looked at in fp32 where weights, gradients and work are no more
AT_ONCE = 1 << 22          # elements that are compared at a time: malloc keeps as much for the next
# Relative error (2-norm) of the template against the module's own code that is noise: some 5 roundings.
NOISE = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3, torch.float32: 1e-5, torch.float64: 1e-5}


class Trial:
    """Of one template, against the module's own code, on random data in the form of a call.

    Attributes:
        wide: the type it is looked at in, where that is not the weights'.
    """

    def __init__(self, runs: Runs, template: Template) -> None:
        self.runs, self.window, self.template = runs, runs.window, template
        self.wide = self._wide()

    def verdict(self, x: Tensor, kwargs: Any) -> str:
        """How far they are off; "": they agree."""
        limit = NOISE.get(self.wide or self.runs.dtype, 1e-5)
        try:
            self._look_at_codes()
            for magnitude, last in itertools.product(MAGNITUDES, (False, True)):
                with torch.autocast(x.device.type, enabled=False):       # it is to the weights' own type, if at all
                    error = self._off(x, kwargs, magnitude, last)
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
        half = self.runs.dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if half and few and exact and not self.window.stacks else None

    def _weights(self) -> Weights:
        """Of 16 bits in that type, those that codes stand for too."""
        w = self.runs.exact(self.runs.names)
        return w if self.wide is None else Weights({n: self._widened(w[n]) for n in self.runs.records})

    def _look_at_codes(self) -> None:
        """Do we make the weights that their package makes? To a rounding: a GPU's kernels may fuse what others do not.

        Raises:
            Unfit: we do not.
        """
        bound, w = self.window.bind_leaves(), self.runs.exact(self.runs.names)
        for whole in self.window.wholes:
            name = next(n for n, r in self.runs.records.items() if r is whole.records[0])
            theirs = bound.pop(whole.records[0])
            if isinstance(theirs, Stack):
                ring = self.window.runtime.ring
                same = all(_to_a_rounding(w.experts(name, p.experts), p.theirs(ring)) for p in theirs.stacked.pieces)
            else:
                same = _to_a_rounding(w.joint((name,)), whole.format.dense(theirs, self.runs.dtype))
            if not same:
                raise Unfit(f"the codes of {name} stand for other numbers than {whole.format.name}'s own code makes")

    def _widened(self, t: Any) -> Any:
        """Floating-point tensors in that type; masks that are additions hide as before."""
        wide = self.wide is not None and isinstance(t, Tensor) and t.is_floating_point()
        return t.to(self.wide) if wide else t

    def _off(self, x: Tensor, kwargs: Any, magnitude: float, last: bool) -> float:
        """The worst relative error of output and gradients, for one random input."""
        rng = torch.Generator(x.device).manual_seed(0)
        x, kwargs = self.template.small(x, rng, TRIAL_TOKENS, kwargs, last)
        if x.is_floating_point():
            x = x.mul_(magnitude)
        if self.wide is not None:
            x, kwargs = tree_map(self._widened, (x, kwargs))
        with self.template.observed(self.window.module):
            truth, dy = self._own(x, kwargs, rng)
            return _error(truth, self._templates(x, dy, kwargs))

    def _own(self, x: Tensor, kwargs: Any, rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Output and gradients of the module's own code for a random output gradient, and that."""
        window, into = self.window, self.template.differentiable_input
        bound = window.bind_leaves()
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            if self.wide is not None:
                bound = {r: self._widened(t.detach()).requires_grad_(t.requires_grad) for r, t in bound.items()}
                weights = self._weights().by_name
                bound |= {self.runs.records[n]: weights[n] for n in self.runs.codings}
                stack.enter_context(plain_linears(window.module, weights, self.runs.dtype))
            y = self._run(bound, x.requires_grad_(into), kwargs)
            dy = torch.randn(y.shape, generator=rng, device=y.device).to(y.dtype)
            leaves = [bound[r] for r in window.trainable] + [x] * into
            grads = list(torch.autograd.grad(y, leaves, dy, allow_unused=True))
        found = {"y": y.detach()} | ({"dx": grads.pop()} if into else {})
        x.requires_grad_(False)
        return found | {n: g for n, g in zip(self.runs.trained_names, grads) if g is not None}, dy

    def _run(self, bound: Any, x: Tensor, kwargs: Any) -> Tensor:
        outer = swap_window(bound)
        try:
            y = self.window.inner(x, **kwargs)
        finally:
            swap_window(outer)
        if not isinstance(y, Tensor):
            raise Unfit("its forward gives something else than one tensor")
        return y

    def _templates(self, x: Tensor, dy: Tensor, kwargs: Any) -> dict[str, Tensor]:
        runs, template = self.runs, self.template
        x, call = template.take(self.window.module, x, kwargs, self.wide or runs.dtype)
        with torch.no_grad():
            w = self._weights()
            try:
                y, kept = template.forward(x, w, call, "saved")
                dx, grads = template.backward(dy, kept, w, call, runs.wanted, True)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise Unfit(f"the template fails: {error}") from error
        return {"y": y, **({} if dx is None else {"dx": dx}), **grads}


def _to_a_rounding(ours: Tensor, theirs: Tensor) -> bool:
    """Some rows, or experts, at a time: there is hardly room for a third of these."""
    some = max(1, 16 * AT_ONCE * len(theirs) // theirs.numel())
    return all(bool(((a - b).abs_() <= b.abs() * ONE_ROUNDING).all())
               for a, b in zip(ours.split(some), theirs.split(some), strict=True))


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
    """Root of the mean square of t, or of other - t, to a few digits: a part at a time, as experts' gradients are
    large, and as wide as fp32."""
    parts = t.flatten().split(AT_ONCE)
    others = parts if other is None else other.flatten().split(AT_ONCE)
    wide = torch.promote_types(t.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(a.to(wide) if other is None else b.to(wide) - a.to(wide))
             for a, b in zip(parts, others)]
    return float(torch.linalg.vector_norm(torch.stack(norms).double())) / t.numel() ** 0.5
