"""What has been proved of windows' modules: for all models of the process, and of one model while it is watched."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..store.state import swap_window
from .bases import plain_linears
from .layer import Fused
from .proof.case import Case, Refused
from .proof.watch import OFTEN, Code, Watch
from .templates import Unfit

if TYPE_CHECKING:
    from .proof.prove import Proof


class Proofs:
    """What has been proved of a model's windows, and the watch over them.

    Attributes:
        looked: what a look at numbers gave, by structure, case and device.
    """

    def __init__(self) -> None:
        self.watch, self.looked = Watch(), {}
        self._changes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def found(self, fused: Fused, case: Case, dtype: torch.dtype | None) -> Proof | str:
        """What was proved, once for all windows alike; or why it cannot be."""
        structure, numbers = fused.structure
        key = structure, case, dtype, fused.window.runtime.device.type
        found = _PROVED.get((*key, None)) or _PROVED.get((*key, numbers)) or self._prove(fused, key, numbers)
        if not isinstance(found, str):
            self.watch.code.add_globals(found.globals)
        return found

    @staticmethod
    def _prove(fused: Fused, key: tuple[Any, ...], numbers: tuple[int, ...]) -> Proof | str:
        code = Code()
        code.add_classes(set(map(type, fused.module.modules())))
        try:
            found: Proof | str = _prove(fused, key[1], key[2])
            code.add_globals(found.globals)
            looked = found.looked
        except Refused as reason:
            found, looked = str(reason), reason.looked
        except ImportError as error:
            found, looked = f"this torch has not what a proof needs: {error}", True
        _PROVED.put((*key, numbers if looked else None), found, code)
        return found

    def look(self) -> None:
        """Once a pass: windows that changed are read anew, and proved again at their next call."""
        windows, code = self.watch.look()
        if code:
            self.looked.clear()
        for window in windows:
            window.look()                    # hooks of modules that came
            if window.head is not None:
                window.head.read()
            elif window.fused is not None:
                self._read(window.fused, code)
            self.watch.add(window, window.module)

    def _read(self, fused: Fused, code: bool) -> None:
        """code: what its classes do may have changed."""
        if code:
            fused.forget()
        try:
            new = fused.read()
            times = self._changes[fused.window] = self._changes.get(fused.window, 0) + new
            if times > OFTEN:
                raise Unfit("it changes from pass to pass")
        except Unfit as reason:
            fused.verdict = fused.unfit = str(reason)


class _Proved:
    """What was found, for all models of the process: by structure, case, types, device and, where they were looked at,
    layers' numbers. As many of the latest as a process needs: keys of models that are gone match nothing."""

    MOST = 256

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[Proof | str, Code]] = {}

    def get(self, key: tuple[Any, ...]) -> Proof | str | None:
        """Nothing, where code that it is of has changed since."""
        known = self._found.pop(key, None)
        if known is None or known[1].changed():
            return None
        self._found[key] = known             # the latest comes last
        return known[0]

    def put(self, key: tuple[Any, ...], found: Proof | str, code: Code) -> None:
        self._found[key] = found, code
        if len(self._found) > self.MOST:
            del self._found[next(iter(self._found))]


_PROVED = _Proved()


def _prove(fused: Fused, case: Case, dtype: torch.dtype | None) -> Proof:
    """Raises:
        Refused: the module's code is not proved to compute what the template does.
    """
    from .proof.prove import prove  # sympy comes with it, which only fused models wait for
    window = fused.window
    weights = {n: (tuple(r.shape), r.dtype) for n, r in fused.records.items() if n not in fused.codings}
    weights |= {n: (tuple(c.shape), c.dtype or fused.dtype) for n, c in fused.codings.items()}
    return prove(lambda tensors: _bound_to(fused, tensors), fused.module, window.inner, fused.template, weights,
                 window.runtime.device, dtype, case)


@contextlib.contextmanager
def _bound_to(fused: Fused, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The module reads these weights, by name, instead of its own."""
    outer = swap_window({r: tensors[n] for n, r in fused.records.items()})
    try:
        with plain_linears(fused.module, tensors, fused.dtype):
            yield
    finally:
        swap_window(outer)
