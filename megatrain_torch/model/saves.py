"""The checkpoint of one streamed model that is being written while it trains on."""
from __future__ import annotations

from typing import Any


class Saves:
    """
    Attributes:
        running: saving.Saving, until its end has been noticed; None: there is none.
        before: files of the last checkpoint, written or read, that the next may have again, by header: again.Written.
    """

    def __init__(self) -> None:
        self.running: Any = None
        self.before: dict[bytes, Any] = {}

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
        """A forward begins. Raises: a save is over, and failed."""
        if self.running is not None and self.running.over:
            self.finish()
