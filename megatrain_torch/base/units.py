"""Which modules are windows, and which parameters make a unit.

A window is a module whose weights are bound while its forward runs; a unit is what is streamed
together. The rules, in order (docs/design.md says what they were tried on):

1. modules whose class some submodule names in `_no_split_modules`; the outermost win;
2. children of every ModuleList or Sequential with two or more children of one class, where rule 1
   found nothing inside or around it; the model itself, where it is a Sequential and these found nothing, is its
   children if two or more are modules with modules and parameters inside;
3. the head that get_output_embeddings() names, where it is a plain Linear;
4. of what is left, the topmost module that has a forward of its own and no window inside;
5. parameters that sit directly on a module with windows inside: units that are fetched when read.

A parameter belongs to the first window that has it; a tied head's window needs the embedding's unit.
"""
from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .codes import coded, format_of, strands_of
from .errors import MegatrainError


@dataclass
class Found:
    """What `find` found, in module order."""

    windows: list[tuple[str, nn.Module]] = field(default_factory=list)
    containers: list[tuple[str, nn.Module]] = field(default_factory=list)       # modules with windows inside
    bare: list[tuple[str, nn.Parameter]] = field(default_factory=list)          # directly on containers


def find(root: nn.Module, units: list[str | nn.Module] | None = None) -> Found:
    """Windows of a model. `units`, in place of rules 1 and 2, are modules or names that do not nest, or are refused."""
    chosen = _usual(root) if units is None else _asked(root, units)
    head = output_embeddings(root)
    if type(head) is nn.Linear:
        chosen.add(id(head))
    around = {id(m) for m in root.modules() if id(m) not in chosen and any(id(c) in chosen for c in m.modules())}
    found, seen = Found(), set()
    to_see = [("", root)]                    # no function that calls itself: its closure would keep the model
    while to_see:
        name, module = to_see.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = "forward" in vars(module) or type(module).forward is not nn.Module.forward
        has_parameters = any(True for _ in module.parameters())
        if id(module) not in around and has_parameters and (own or id(module) in chosen):
            found.windows.append((name, module))
            continue
        if own:
            found.containers.append((name, module))
        dot = name + "." if name else ""
        found.bare.extend((dot + n, p) for n, p in module._parameters.items() if p is not None)
        to_see.extend(reversed([(dot + n, child) for n, child in module.named_children()]))
    return found


def output_embeddings(root: nn.Module) -> nn.Module | None:
    """The head that a transformers model names, also where the model is a part of `root`."""
    for m in root.modules():
        named = getattr(m, "get_output_embeddings", None)
        with contextlib.suppress(NotImplementedError, AttributeError):      # models without one, by their own words
            head = named() if callable(named) else None
            if isinstance(head, nn.Module):
                return head
    return None


def _asked(root: nn.Module, units: list[str | nn.Module]) -> set[int]:
    named = dict(root.named_modules())
    chosen = set()
    for u in units:
        module = named.get(u) if isinstance(u, str) else u
        if module is None or not any(module is m for m in named.values()):
            raise MegatrainError(f"units: {u!r} is not a module of {type(root).__name__}")
        chosen.add(id(module))
    for module in named.values():
        inner = [n for n, m in module.named_modules() if m is not module and id(m) in chosen]
        if id(module) in chosen and inner:
            raise MegatrainError(f"units: {inner[0]!r} lies inside another unit; name one of them")
    return chosen


def _usual(root: nn.Module) -> set[int]:
    """Rules 1 and 2."""
    names = {n for m in root.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    chosen: set[int] = set()
    to_see = [root]
    for module in to_see:
        for child in module.children():
            if type(child).__name__ in names:
                chosen.add(id(child))
            else:
                to_see.append(child)
    to_see = [root]
    for module in to_see:
        if id(module) in chosen:
            continue
        kinds = Counter(type(c) for c in module.children() if any(True for _ in c.parameters()))
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and any(n >= 2 for n in kinds.values())
        if is_list and module is not root and not any(id(m) in chosen for m in module.modules()):
            chosen.update(id(c) for c in module.children())
        else:
            to_see.extend(module.children())
    if not chosen and isinstance(root, nn.Sequential):
        layers = [c for c in root if any(True for _ in c.children()) and any(True for _ in c.parameters())]
        chosen.update(id(c) for c in root if len(layers) > 1)
    return chosen


ALIGN = 512                          # bytes, at which each parameter starts, in a slot too
ADAPTER = re.compile(r"\.lora_[AB]\.[^.]+\.weight$")           # as PEFT names them
Params = list[tuple[str, nn.Parameter]]
Group = tuple[str, Params]


def wrapped_parameters(root: nn.Module) -> list[Any]:
    """PEFT's wrappers of single parameters (`target_parameters`), as experts' matrices are."""
    return [m for m in root.modules() if type(m).__name__ == "ParamWrapper"
            and type(m).__module__.partition(".")[0] == "peft"]


def group(root: nn.Module, found: Found) -> list[Group]:
    """Units: (name, its parameters by name). A parameter belongs to the first window that has it; one that is codes
    stands for its strands, of which those that are not in its own memory come last."""
    codes = {id(p): (m, format) for _, m, p, format in coded(root)}
    names = {id(p): n for n, p in root.named_parameters()}
    seen: set[int] = set()
    groups: list[Group] = []
    for unit, params in [*((name or type(root).__name__, [*window.parameters()]) for name, window in found.windows),
                         *((name, [p]) for name, p in found.bare)]:
        there = [(names[id(p)], p) for p in params if id(p) not in seen]
        seen.update(map(id, params))
        # Matrices first, adapters' behind the others: layers over one input lie side by side.
        there.sort(key=lambda item: (item[1].dim() < 2, bool(ADAPTER.search(item[0]))))
        own, rest = [], []
        for name, p in there:
            if id(p) in codes:
                first, more = strands_of(name, p, *codes[id(p)])
                own, rest = own + first, rest + more
            else:
                own.append((name, p))
        if own or rest:
            groups.append((unit, own + rest))
    return groups


def stored_dtype(p: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type a parameter is streamed in, when mt.stream was given `dtype`."""
    return dtype if dtype is not None and p.is_floating_point() else p.dtype


def weight_bytes(params: Params, dtype: torch.dtype | None, align: int) -> int:
    """Bytes of a unit's HI plane, and of a slot for it: each parameter starts at a multiple of so many."""
    return sum(-(-p.numel() * stored_dtype(p, dtype).itemsize // align) * align for _, p in params)


# ---- experts of a mixture in one parameter, [experts, ., .]: some of them are fetched by themselves ----
#
#     cuts = cut(params, 16, kinds, begins)        # of a unit; None: all of it is fetched at once
#     cuts[0]                                      # what a window has open: all but the stacks
#     cuts[1].experts, cuts[1].stack               # range(0, 16) of the parameter of this name
#
# A stack is frozen. Of one that is codes, a cut has codes and scales of its experts.

GROUP_BYTES = 256 << 20              # of 16-bit weights that are made, or multiplied with, at a time


@dataclass
class Cut:
    """A part of a unit's weights that is fetched by itself."""

    stack: str = ""                     # the parameter's name; "": it is what is left of the unit
    experts: range = range(0)           # which of its experts
    ranges: list[tuple[int, int, int]] = field(default_factory=list)    # (from, to, bytes), of plane HI and of a slot
    offsets: dict[int, int] = field(default_factory=dict)       # in the slot, by a parameter's number in the unit
    bytes: int = 0                      # of a slot

    def add(self, index: int, begin: int, nbytes: int) -> None:
        """These bytes of the unit's plane HI, of this parameter."""
        at = self.offsets[index] = self.bytes
        if self.ranges and self.ranges[-1][0] - self.ranges[-1][1] == begin - at:        # one copy for both
            first, to, _ = self.ranges.pop()
            self.ranges.append((first, to, begin + nbytes - first))
        elif nbytes:
            self.ranges.append((begin, at, nbytes))
        self.bytes = at + -(-nbytes // ALIGN) * ALIGN


def stack_of(name: str, p: Tensor) -> tuple[str, int]:
    """The parameter of experts that this is, or is a strand of, and its numbers; "": it is not cut."""
    if "expert" not in name or p.requires_grad or p.dim() < 3 or p.shape[0] < 2 \
            or p.stride(0) != p.numel() // p.shape[0] or p.stride(0) != max(p.stride()):
        return "", 0                         # where dimensions of an expert are in another order is its own matter
    stands = getattr(p, "stands", None)      # a strand's, which is of another class once it is streamed
    return stands if stands is not None else (name, p.numel()) if format_of(p) is None else ("", 0)


def cut(params: Params, experts: int, kinds: list[torch.dtype], begins: list[int]) -> list[Cut] | None:
    """What is left of a unit, and its stacks in cuts of some experts; None: it has no larger stack. begins: in HI."""
    sizes = [p.numel() * kind.itemsize for (_, p), kind in zip(params, kinds)]
    stacks: dict[str, list[int]] = {}
    for i, (name, p) in enumerate(params):
        if p.dim() > 2 and 0 < experts < p.shape[0] and (stack := stack_of(name, p)[0]):
            stacks.setdefault(stack, []).append(i)
    if not stacks:
        return None
    rest, within = Cut(), {i for own in stacks.values() for i in own}
    for i, n in enumerate(sizes):
        if i not in within:
            rest.add(i, begins[i], n)
    found = [rest]
    for stack, own in stacks.items():
        count = params[own[0]][1].shape[0]
        for first in range(0, count, experts):
            one = Cut(stack, range(first, min(first + experts, count)))
            for i in own:
                each = sizes[i] // count
                one.add(i, begins[i] + first * each, len(one.experts) * each)
            found.append(one)
    return found


def usual_experts(params: Params) -> int:
    """Experts fetched at a time: as many as make GROUP_BYTES of 16 bits, a power of two; 0: none are cut."""
    most = max([stack_of(name, p)[1] // max(1, p.shape[0]) for name, p in params if p.dim() > 2], default=0)
    return 1 << max(0, (GROUP_BYTES // (2 * most)).bit_length() - 1) if most else 0
