"""Messages of mt.plan and mt.stream in a shell: flags in the place of keyword arguments."""
from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

from megatrain_torch import MegatrainError

from ..plans.changes import typed


class Flags:
    """A verb's flags, and how changes of a plan are written with them."""

    def __init__(self, names: Iterable[str], gpus: int = 1) -> None:
        """gpus: a plan's tokens are one GPU's, a verb's are those of so many."""
        self.names, self._gpus = tuple(names), gpus

    def knows(self, changes: dict[str, Any]) -> bool:
        """Has the verb a flag for each?"""
        return set(changes) <= set(self.names)

    def alone(self, changes: dict[str, Any]) -> str:
        gone = [f"--{name}" for name, value in changes.items() if not value]
        here = shlex.join(w for name, value in changes.items() if value for w in self.flag(name, value))
        return " ".join([here] * bool(here) + [f"without {', '.join(gone)}"] * bool(gone))

    def whole(self, changes: dict[str, Any]) -> str:
        room = f"     (a folder with {typed('host', changes['nvme']['limit'])} free)" if "nvme" in changes else ""
        return f"{self.alone(changes)}{room}"

    def flag(self, name: str, value: Any) -> list[str]:
        if name == "tokens":
            value *= self._gpus
        return [f"--{name}", "FOLDER" if name == "nvme" else str(typed(name, value))]

    def told(self, why: MegatrainError) -> str:
        """What an exception says, in the shell's words."""
        found = getattr(why, "refusal", None)
        return found.text(self) if found else self.words(str(why))

    def words(self, text: str) -> str:
        """tokens=1000 is --tokens 1000. What says a machine has a grammar of its own."""
        if text.startswith("machine"):
            return re.sub("^machine:? ", "--machine ", text)
        text = text.replace("nvme limit=", "nvme_limit=")
        return re.sub(rf"(?<![\w.,'\"-])({'|'.join(self.names)})=('[^']*'|\"[^\"]*\"|[^\s,;:)]*[^\s,;:.)])",
                      lambda m: f"--{m[1].replace('_', '-')} {self._all(m[1], m[2].strip(chr(39) + chr(34)))}", text)

    def _all(self, name: str, value: str) -> str:
        return str(int(value) * self._gpus) if name == "tokens" and value.isdigit() else value
