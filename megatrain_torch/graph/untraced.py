"""What is in a trace's place while mt.trace is not on: whoever tells it something need not ask whether it is."""
from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any


class Untraced:
    """Has what is told to a tracing.Trace by others than its user."""

    def pass_begins(self) -> None:
        """Nothing."""

    def forward(self, window: Any, args: Any, kwargs: Any) -> Any:
        """The window's forward."""
        return window.once(args, kwargs)

    def during(self, window: Any, work: str) -> AbstractContextManager[Any]:
        """A context: what compute is given inside is this work of the window."""
        return contextlib.nullcontext()

    def handed_over(self) -> None:
        """A window's backward has launched all it has: nothing."""

    def steps(self, count: int) -> list[Any]:
        """No step was recorded."""
        return []

    def finish(self) -> None:
        """Nothing is open."""

    def stop(self) -> None:
        """Nothing is recorded."""


UNTRACED = Untraced()
