"""What the windows of one streamed model do about activations, and whose code runs them."""
from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ..base.modes import Mode, read
from ..graph.window import Window
from ..plans.planner import own_code
from ..plans.shapes import attends


class Model(Protocol):
    """The streamed model whose windows these are: runtime.Runtime."""

    is_cuda: bool
    planning: Any

    @property
    def windows(self) -> Sequence[Window]: ...


class Keeps:
    """
    Attributes:
        default: what windows do whose own mode is "auto"; "auto": no plan says it.
        counted: layers of which the plan in force counts what their own code keeps.
        most_tokens: that a fused window was given at once.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.default = "auto"
        self.counted: Collection[str] = frozenset()
        self.most_tokens = 0
        self._told: set[str] = set()
        self._again: list[Window] = []       # of this forward, those that run again in place of a plan's mode

    def mode_of(self, window: Window) -> str:
        """What is done about a window's activations."""
        mode = window.mode if window.mode != "auto" else self.default
        if mode == "auto":
            return "replay" if self._model.is_cuda else "saved"
        return mode

    def of_call(self, window: Window, tokens: int) -> Mode:
        """What a fused window keeps of a call with so many tokens, and where."""
        self.most_tokens = max(self.most_tokens, tokens)
        return read(self.mode_of(window))

    def of_own_code(self, window: Window) -> Mode:
        """What a window's own code keeps. That of a layer keeps several times what its template does: where the mode
        was chosen for a template, it runs again in backward."""
        mode, fused = read(self.mode_of(window)), window.fused
        chosen = window.mode != "auto" or self.default != "auto"
        if mode.keep != "saved" or not chosen or fused is None or not fused.template.swaps or fused.idle \
                or window.name in self.counted:
            return mode
        self._again.append(window)
        return mode._replace(keep="replay")

    def fused(self) -> dict[str, str]:
        """What fused windows keep, by name."""
        return {w.name: self.mode_of(w) for w in self._model.windows if w.fused is not None}

    # ---- whose code ----

    def look(self) -> None:
        """Before a pass that records gradients."""
        for w in self._model.windows:
            if w.fused is not None:
                w.fused.look()

    def planned_otherwise(self) -> bool:
        """Do layers run their own code that the plan in force has templates for, or the other way round?"""
        layers = [w for w in self._model.windows if w.fused is not None and w.fused.template.swaps]
        return any(bool(w.fused.own) is not (w.name in self.counted) for w in layers)

    def own(self) -> dict[str, str]:
        """Layers that their own code runs where templates are wanted, and why."""
        found = ((w, w.unfit if w.fused is None else w.fused.own) for w in self._model.windows)
        return {w.name: why for w, why in found if why and attends(w.module)}

    def forward_ends(self) -> None:
        """Where nobody plans for what a loop does, the user is told at once what became of a plan's modes."""
        if self._again and self._model.planning is None:
            self.tell({w.name: w.fused.declined or w.fused.verdict for w in self._again},
                      "no plan counts what that keeps, so they run again in backward")
        self._again.clear()

    def tell(self, own: dict[str, str], then: str) -> None:
        """Warns once of each layer."""
        new = {name: why for name, why in own.items() if name not in self._told}
        if new:
            self._told |= new.keys()
            warnings.warn(f"layers that no template runs, but their own code: {own_code(new)}; {then}", stacklevel=2)
