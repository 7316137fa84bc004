"""A call in the place of a module's method, which copies and pickles of the module do not have."""
from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from torch import nn


def method_of(call: Any, module: nn.Module) -> bool:
    return isinstance(call, types.MethodType) and call.__self__ is module


class Installed:
    """A callable put in a module's `__dict__` in place of a method of its class.

    Looks like the method it stands for (`__wrapped__`, `__name__`, `__func__`, `__self__`); deepcopy
    and pickle of the module give the class's own method back, hence an ordinary model.
    """

    def __init__(self, module: nn.Module, name: str, call: Any) -> None:
        self._own, self._module = module.__dict__.get(name), weakref.ref(module)
        original = getattr(module, name)
        self._is_method = method_of(original, module)
        self.__func__ = getattr(original, "__func__", original)
        for said in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(original, said):
                setattr(self, said, getattr(original, said))
        self.__dict__.update({k: v for k, v in getattr(original, "__dict__", {}).items() if k != "__wrapped__"})
        self.__name__ = name
        self._call = call

    @property
    def __self__(self) -> nn.Module:
        """Weakly: the module has this."""
        return self._module()

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__, self._module()) if self._is_method else self.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy
        module = copy.deepcopy(self.__self__, memo)
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return types.MethodType(getattr(type(module), self.__name__), module)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__name__)

    def remove(self) -> None:
        if self._own is not None:
            self.__self__.__dict__[self.__name__] = self._own
        else:
            self.__self__.__dict__.pop(self.__name__, None)
