"""What is changed of torch, transformers and accelerate, for as long as there is a streamed model.

    hold(runtime)                        # until it is `release`d, as it is when it closes
    once("name", lambda: replaced(owner, "attribute", value))

Each change is made once, and undone with the last streamed model. One that somebody else has put theirs over stays
below theirs, which calls it; all of ours do nothing for what is not streamed.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

_holders: set[int] = set()                   # streamed models, by id: a model that is gone has been released
_undo: dict[str, Callable[[], None]] = {}


def hold(runtime: Any) -> None:
    _holders.add(id(runtime))


def release(runtime: Any) -> None:
    _holders.discard(id(runtime))
    while not _holders and _undo:
        _undo.popitem()[1]()                 # the last that was made first


def once(name: str, make: Callable[[], Callable[[], None]]) -> None:
    """make: makes a change, and gives what undoes it. Not called where it was made, or nothing is streamed."""
    if _holders and name not in _undo:
        _undo[name] = make()


def replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """An attribute of a class or module; what puts back what was there, if ours still is."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is value:
            setattr(owner, name, before) if had else delattr(owner, name)

    return undo
