"""Which modules are streamed, and by which runtime."""
from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from ..base.errors import MegatrainError

if TYPE_CHECKING:
    from .runtime import Runtime

# Weak on both sides: a runtime knows its modules, so a strong value would keep its own key alive. What
# holds the runtime is what is installed in the modules.
runtimes: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()


def note(module: nn.Module, rt: Runtime) -> None:
    """The module is part of this runtime's model."""
    runtimes[module] = weakref.ref(rt)


def runtime_of(module: nn.Module) -> Runtime:
    """The runtime of a streamed model or of any module inside one.

    Raises:
        MegatrainError: the module is not streamed.
    """
    rt = find_runtime(module)
    if rt is None:
        raise MegatrainError(f"{type(module).__name__} is not streamed: call mt.stream(model) first")
    return rt


def find_runtime(module: nn.Module) -> Runtime | None:
    """The runtime; None: the module is not streamed."""
    ref = runtimes.get(module)
    return ref() if ref is not None else None
