"""What runs a window in place of its module's own code: a template, the head's logits left unmade."""
from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..graph.window import Window


class Runner:
    """Knows its window weakly, which has it. A graph that may outlive the model holds the window itself."""

    def __init__(self, window: Window) -> None:
        self._window = weakref.ref(window)

    @property
    def window(self) -> Window:
        return self._window()

    @property
    def module(self) -> Any:
        return self._window().module

    def versions(self) -> list[int]:
        """Of the window's weights: others after an update."""
        core = self.window.runtime.core
        return [core.version(u) for u in self.window.units]
