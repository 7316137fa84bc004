"""How mt.AdamW keeps its states of one streamed model."""
from __future__ import annotations

import dataclasses

from .. import _core
from ..base.errors import MegatrainError
from ..plans.room import Room


class States:
    """
    Attributes:
        format: one of formats.py, of the whole model. chosen: by somebody, not by default.
    """

    def __init__(self, core: _core.Engine, room: Room) -> None:
        self.core, self._room = core, room
        self.format, self.chosen = "fp32", False

    def choose(self, asked: str) -> None:
        """From before there are any.

        Raises:
            MegatrainError: they are kept in another way already.
        """
        if self.chosen and asked != self.format:
            raise MegatrainError(f"AdamW: states={asked!r}, and this model keeps {self.format!r} ones, as its plan or "
                                 f"another optimizer said: ask for these, or mt.unstream and mt.stream it with "
                                 f"plan={{'states': {asked!r}}}")
        for unit in range(len(self._room.asked.groups)):
            self.core.set_states(unit, _core.STATES[asked])
        self.format, self.chosen = asked, True
        self._room.asked = dataclasses.replace(self._room.asked, states=asked)
