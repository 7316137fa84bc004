"""What the windows of one streamed model do about activations, and whose code runs them."""
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..base.limits import show_bytes
from ..base.modes import Mode, read
from ..graph.window import Window
from ..plans.planner import Plan, own_code
from ..plans.shapes import attends

if TYPE_CHECKING:
    from .runtime import Runtime

MORE = "\n\nmegatrain_torch: "


class Keeps:
    def __init__(self, model: Runtime) -> None:
        self._model = model
        self.default = "auto"                # what windows do whose own mode is "auto"; "auto": no plan says it
        self.plan: Plan | None = None        # the one in force; None: modes are by hand
        self.most_tokens = 0                 # that a fused window was given at once
        self._told: set[str] = set()
        self._first = True
        self._again: list[Window] = []       # of this forward, those that run again in place of a plan's mode

    def _counts(self, window: str) -> bool:
        """Does the plan in force count this layer's own code?"""
        return self.plan is not None and window in self.plan.own

    def mode_of(self, window: Window) -> str:
        """What is done about a window's activations."""
        mode = window.mode if window.mode != "auto" else self.default
        if mode == "auto":
            return "replay" if self._model.is_cuda else "saved"
        return mode

    def of_own_code(self, window: Window) -> Mode:
        """What a window's own code keeps. That of a layer keeps several times what its template does: where the mode
        was chosen for a template, it runs again in backward."""
        mode, fused = read(self.mode_of(window)), window.fused
        chosen = window.mode != "auto" or self.default != "auto"
        if mode.keep != "saved" or not chosen or fused is None or not fused.template.swaps or fused.idle \
                or self._counts(window.name):
            return mode
        self._again.append(window)
        return mode._replace(keep="replay")

    def fused(self) -> dict[str, str]:
        """What fused windows keep, by name."""
        return {w.name: self.mode_of(w) for w in self._model.windows if w.fused is not None}

    def look(self) -> None:
        """Before a pass that records gradients."""
        for w in self._model.windows:
            if w.fused is not None:
                w.fused.look()

    def planned_otherwise(self) -> bool:
        """Do layers run their own code that the plan in force has templates for, or the other way round? Or has it
        shown that their own code cannot run again, as the plan has it?"""
        layers = [w for w in self._model.windows if w.fused is not None and w.fused.template.swaps]
        planned = {} if self.plan is None else self.plan.activations
        return any(bool(w.fused.own) is not self._counts(w.name) for w in layers) or any(
            w.writes and (w.fused is None or w.fused.own) and read(planned[w.name]).keep != "saved"
            for w in self._model.windows if w.name in planned)

    def own(self) -> dict[str, str]:
        """Layers that their own code runs where templates are wanted, and why."""
        found = ((w, w.unfit if w.fused is None else w.fused.own) for w in self._model.windows)
        return {w.name: why for w, why in found if why and attends(w.module)}

    def forward_ends(self) -> None:
        """The user is told of layers that run their own code, once, and where they do not keep what a plan says. Of
        those that a plan of ours did not count, the next tells."""
        planning, again = self._model.planning, [*self._again]
        self._again.clear()
        if not (again or (self._first and torch.is_grad_enabled())):
            return
        own, self._first = self.own(), False
        self.tell({name: why for name, why in own.items() if self._counts(name)}, "the plan counts what they keep")
        if planning is None or planning.plan is None:
            own |= {w.name: w.fused.declined or w.fused.verdict for w in again}
            instead = "; instead of keeping all of it they run again in backward" if again else ""
            self.tell(own, "no plan counts what they keep" + instead)

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Around what may find no memory on the device: then the error says what was planned, and who is not in it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if MORE in str(error):
                raise
            self.look()
            rt, plan, own = self._model, self.plan, self.own()
            lines = [f"layers that no template runs, but their own code, which keeps more: {own_code(own)}"] * bool(own)
            if plan is not None:
                parts = ", ".join(f"{what} {show_bytes(n)}" for what, n in plan.vram.items() if n)
                lines.append(f"the plan in force counts {show_bytes(plan.vram_bytes)} of the device: {parts}")
            used = f"used are {show_bytes(rt.core.device_bytes())} by units at home there"
            if rt.is_cuda:
                used += f", and {show_bytes(torch.cuda.max_memory_allocated(rt.device))} by torch at the most"
            told = "\n".join([*lines, used])
            raise torch.OutOfMemoryError(f"{error}{MORE}{told}") from error

    def tell(self, own: dict[str, str], then: str) -> None:
        """Warns once of each layer."""
        new = {name: why for name, why in own.items() if name not in self._told}
        if new:
            self._told |= new.keys()
            warnings.warn(f"layers that no template runs, but their own code: {own_code(new)}; {then}", stacklevel=2)
