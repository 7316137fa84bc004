"""Loops over experts, which no symbolic run can follow: which expert has how many rows is known by its values alone.

So they are known by their text: LOOPS has the SHA-256 of each, comments, annotations and layout left out. There are
few, since transformers' models share them. All say the same: for each token t and each of its k choices (e, w) a row
w * down_e(gate(gate_up_e(x_t))), summed over the choices. While dynamo looks, two functions without an inside stand for
the products (`opaque_loop`), and the module's own gate between them is read as any code is.
"""
from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph.door import Installed
from ..templates.parts import Unfit
from .values import opaque

# The loops of transformers 5.17 to 5.23, and by what they gate: act_fn(gate) * up, or the module's _apply_gate.
LOOPS = {
    "d52dc7c02b15aa1c": "act_fn", "e7aef0c2abf5f6a2": "act_fn",              # Mixtral's and some fifty others'
    "a6af7e5d875cc55e": "act_fn",                                            # Aria's, whose matrices are transposed
    "3b06a8583a6051e8": "_apply_gate", "62d5d7242b6f2e2e": "_apply_gate",    # DeepSeek V4's
    "925e9438c1902971": "_apply_gate",                                       # GPT-OSS'
}


def loop_of(module: nn.Module) -> Any:
    """The loop over a module's experts; transformers puts a function around it that chooses between ways to run it."""
    kind = type(module)
    own = getattr(kind.forward, "__wrapped__", None)
    return kind.forward if own is None or not _librarys(kind.forward) else own


def _of_package(function: Any, package: str) -> bool:
    code, file = getattr(function, "__code__", None), getattr(sys.modules.get(package), "__file__", None)
    return None not in (code, file) and code.co_filename.startswith(os.path.dirname(file) + os.sep)


def _librarys(function: Any) -> bool:
    """Is it transformers' own, and of no model?"""
    return _of_package(function, "transformers") and not _of_package(function, "transformers.models")


def known_wrapper(module: nn.Module) -> tuple[Any, ...]:
    """All that says that a wrapper around experts adds to their matrices as PEFT's own does, and what is set in it.
    What it adds, templates read from its adapters. Unfit: something of it is not PEFT's."""
    kind, put = type(module), vars(module)
    names = "forward", "get_delta_factors", "get_delta_weight", "get_param"      # PEFT 0.21 has the second
    own = [getattr(kind, name, None) for name in names]
    if (kind is not sys.modules["peft"].tuners.lora.layer.ParamWrapper or not put.keys().isdisjoint(names)
            or type(put.get("_activate_lora")) is not Installed
            or not all(f is None or _of_package(f, "peft") for f in own)):
        raise Unfit(f"the {kind.__name__} around its experts is not PEFT's own")
    return (kind, *own, *module.merged_adapters, module.disable_adapters, *module.active_adapters,
            *module.scaling.items())


def known_loop(module: nn.Module) -> tuple[Any, ...]:
    """By what a module of experts gates, and all that says so: as long as that is the same, so is the loop. Unfit:
    its forward is none of LOOPS, nor one of transformers' own ways to do the same."""
    kind, name = type(module), type(module).__name__
    own = loop_of(module)
    if "forward" in vars(module):
        raise Unfit(f"{name} has a forward of its own put in")
    gated, words = _known(own.__code__)
    if not gated:
        raise Unfit(f"the forward of {name} is none of the known loops over experts")
    for word in words:                                   # which mean what they mean in transformers
        value = own.__globals__.get(word)
        if value is not None and not (isinstance(value, types.ModuleType) and value.__name__.startswith("torch")):
            raise Unfit(f"{word} is none of torch's in the forward of {name}")
    if own is kind.forward:
        return gated, own
    how = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if how in (None, "eager"):
        return gated, own, how
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    if how not in ("grouped_mm", "batched_mm") or not _librarys(ALL_EXPERTS_FUNCTIONS[how]):
        raise Unfit(f"experts by {how!r}")
    return "_apply_gate", own, how, ALL_EXPERTS_FUNCTIONS[how]


@functools.cache
def _known(code: types.CodeType) -> tuple[str, tuple[str, ...]]:
    """By what a loop gates, "" if it is none of them; and the globals that it names."""
    words = tuple({i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")})
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError):
        return "", words
    if not isinstance(found, ast.FunctionDef):
        return "", words
    found.returns, found.decorator_list = None, []
    for a in found.args.args + found.args.kwonlyargs:
        a.annotation = None
    if ast.get_docstring(found) is not None:
        found.body = found.body[1:]
    return LOOPS.get(hashlib.sha256(ast.unparse(found).encode()).hexdigest()[:16], ""), words


# ---- while dynamo looks ----------------------------------------------------------------------------

@opaque
def expert_rows(hidden: Tensor, chosen: Tensor, own: Sequence[Tensor], width: int) -> Tensor:
    """What the first products give, [T, width] for a row of each choice."""
    return hidden.new_empty(hidden.shape[0], width)


@opaque
def experts_down(gated: Tensor, hidden: Tensor, chosen: Tensor, weights: Tensor, own: Sequence[Tensor]) -> Tensor:
    """The second products of gated rows, weighted and summed."""
    return torch.empty_like(hidden)


def opaque_loop(module: nn.Module, width: int, own: Sequence[Tensor]) -> Any:
    """A forward of a module of experts. width: of gate and up. own: its weights, in the order of their names."""
    gated = known_loop(module)[0]

    def forward(hidden_states: Tensor, index: Any = None, weights: Any = None, **named: Any) -> Tensor:
        index = named.get("top_k_index", named.get("router_indices", index))
        weights = named.get("top_k_weights", named.get("routing_weights", weights))
        z = expert_rows(hidden_states, index, own, width)
        if gated == "_apply_gate":
            z = module._apply_gate(z)
        else:
            gate, up = z.chunk(2, dim=-1)
            z = module.act_fn(gate) * up
        return experts_down(z, hidden_states, index, weights, own)

    return forward
