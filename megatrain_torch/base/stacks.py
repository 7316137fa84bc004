"""Experts of a mixture in one parameter, [experts, ., .]: of which unit's bytes some of them are fetched by themselves.

    cuts = cut(params, 16, kinds, begins)        # of a unit; None: all of it is fetched at once
    cuts[0]                                      # what a window has open: all but the stacks
    cuts[1].experts, cuts[1].stack               # range(0, 16) of the parameter of this name

A stack is frozen. Of one that is codes, a cut has codes and scales of its experts.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .codes import format_of

GROUP_BYTES = 256 << 20              # of 16-bit weights that are made, or multiplied with, at a time
ALIGN = 512                          # bytes, at which a parameter starts, in a slot too
Params = list[tuple[str, nn.Parameter]]


@dataclass
class Cut:
    """A part of a unit's weights that is fetched by itself.

    Attributes:
        stack: the parameter's name; "": it is what is left of the unit. experts: which of its experts.
        ranges: (from, to, bytes), of plane HI and of a slot. offsets: in the slot, by a parameter's number in the unit.
        bytes: of a slot.
    """

    stack: str = ""
    experts: range = range(0)
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    bytes: int = 0

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
    """The name of the parameter of experts that this is, or is a strand of, and how many numbers that stands for; "":
    it is none that is cut."""
    if "expert" not in name or p.requires_grad or p.dim() < 3 or p.shape[0] < 2 \
            or p.stride(0) != p.numel() // p.shape[0] or p.stride(0) != max(p.stride()):
        return "", 0                         # where dimensions of an expert are in another order is its own matter
    stands = getattr(p, "stands", None)      # a strand's, which is of another class once it is streamed
    return stands if stands is not None else (name, p.numel()) if format_of(p) is None else ("", 0)


def cut(params: Params, experts: int, kinds: list[torch.dtype], begins: list[int]) -> list[Cut] | None:
    """What is left of a unit, and its stacks, so many experts at a time. None: it has no stack of more experts than
    that. kinds: types in which parameters are streamed. begins: their bytes in plane HI."""
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


def slots_of(params: Params, experts: int, kinds: list[torch.dtype]) -> tuple[int, ...]:
    """Bytes of a slot for each cut; (): it is fetched at once."""
    return tuple(c.bytes for c in cut(params, experts, kinds, [0] * len(params)) or ())


def usual_experts(params: Params) -> int:
    """Experts that are fetched at a time, where not all are: as many as make GROUP_BYTES of 16-bit weights, a power of
    two. 0: there is no stack that is cut."""
    most = max([stack_of(name, p)[1] // max(1, p.shape[0]) for name, p in params if p.dim() > 2], default=0)
    return 1 << max(0, (GROUP_BYTES // (2 * most)).bit_length() - 1) if most else 0
