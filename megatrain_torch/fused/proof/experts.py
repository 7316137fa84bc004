"""Loops over experts, which no symbolic run can follow: which expert has how many rows is known by its values alone.

So they are known by their text: LOOPS has the SHA-256 of each, comments, annotations and layout left out. There are
few, since transformers' models share them. All say the same: for each token t and each of its k choices (e, w) a row
w * down_e(gate(gate_up_e(x_t))), summed over the choices. The gate is compared as any part is.
"""
from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .python import globals_of, trusted
from .values import Refused

# The loops of transformers 5.17 to 5.23, and by what they gate: act_fn(gate) * up, or the module's _apply_gate.
LOOPS = {
    "d52dc7c02b15aa1c": "act_fn", "e7aef0c2abf5f6a2": "act_fn",              # Mixtral's and some fifty others'
    "a6af7e5d875cc55e": "act_fn",                                            # Aria's, whose matrices are transposed
    "3b06a8583a6051e8": "_apply_gate", "62d5d7242b6f2e2e": "_apply_gate",    # DeepSeek V4's
    "925e9438c1902971": "_apply_gate",                                       # GPT-OSS'
}


@functools.cache
def text_of(code: types.CodeType) -> str:
    """A function's text without comments, annotations, decorators and documentation; "" where there is none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ""
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        return ""
    found.returns, found.decorator_list = None, []
    for a in found.args.args + found.args.kwonlyargs:
        a.annotation = None
    if ast.get_docstring(found) is not None:
        found.body = found.body[1:]
    return ast.unparse(found)


def sum_of(function: Any) -> str:
    """The first 16 digits of the SHA-256 of its text."""
    code = getattr(function, "__code__", None)           # its own: what it says it wraps is another's
    return "" if code is None else hashlib.sha256(text_of(code).encode()).hexdigest()[:16]


def loop_of(module: nn.Module) -> Any:
    """The loop over a module's experts."""
    kind = type(module)
    own = getattr(kind.forward, "__wrapped__", None)
    return kind.forward if own is None or not trusted(kind.forward.__code__.co_filename) else own


def known_loop(module: nn.Module) -> str:
    """By what a module of experts gates.

    Raises:
        Refused: its forward is none of LOOPS, nor one of transformers' own ways to do the same.
    """
    kind, name = type(module), type(module).__name__
    own = loop_of(module)
    if "forward" in vars(module):
        raise Refused(f"{name} has a forward of its own put in")
    gated = LOOPS.get(sum_of(own), "")
    if not gated:
        raise Refused(f"the forward of {name} is none of the known loops over experts")
    for word in globals_of(own.__code__):                # which mean what they mean in transformers
        value = own.__globals__.get(word)
        if value is not None and not (isinstance(value, types.ModuleType) and value.__name__.startswith("torch")):
            raise Refused(f"{word} is none of torch's in the forward of {name}")
    how = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if own is kind.forward or how in (None, "eager"):
        return gated
    if how not in ("grouped_mm", "batched_mm") or not _librarys(how):
        raise Refused(f"experts by {how!r}")
    return "_apply_gate"


def _librarys(how: str) -> bool:
    """Is the function of this name transformers' own?"""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    code = getattr(ALL_EXPERTS_FUNCTIONS[how], "__code__", None)
    return code is not None and trusted(code.co_filename)


def gated_by(module: Any) -> Callable[[Tensor], Tensor]:
    """[R, 2 I] -> [R, I], as the module's own code does it."""
    if known_loop(module) == "_apply_gate":
        return module._apply_gate

    def spelled(z: Tensor) -> Tensor:
        gate, up = z.chunk(2, dim=-1)
        return module.act_fn(gate) * up

    return spelled
