"""Checkpoints of one streamed model: the save that is under way, the load that failed."""
from __future__ import annotations

from typing import Any

from ..base.errors import MegatrainError


class Saves:
    """
    Attributes:
        running: saving.Saving, until its end has been noticed; None: there is none.
        broken: why the weights are not to be used: a load that failed half-way; "": they are.
    """

    def __init__(self) -> None:
        self.running: Any = None
        self.broken = ""

    def finish(self) -> None:
        """Waits for a save that is under way, and tells what went wrong with it, unless its own wait() did.
        Interrupted, it is under way still."""
        if self.running is None:
            return
        try:
            self.running._finish()
        finally:
            if self.running._told:
                self.running = None

    def look(self) -> None:
        """A pass begins.

        Raises:
            MegatrainError: the weights are not to be used; or a save is over, and failed.
        """
        if self.broken:
            raise MegatrainError(self.broken)
        if self.running is not None and self.running.over:
            self.finish()
