"""What the windows of one streamed model do about activations."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..base.modes import Mode, read
from ..graph.window import Window


class Model(Protocol):
    """The streamed model whose windows these are: runtime.Runtime."""

    is_cuda: bool

    @property
    def windows(self) -> Sequence[Window]: ...


class Keeps:
    """
    Attributes:
        default: what windows do whose own mode is "auto"; "auto": no plan says it.
        most_tokens: that a fused window was given at once.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.default = "auto"
        self.most_tokens = 0

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

    def fused(self) -> dict[str, str]:
        """What fused windows keep, by name."""
        return {w.name: self.mode_of(w) for w in self._model.windows if w.fused is not None}
