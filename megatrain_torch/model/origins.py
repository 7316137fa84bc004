"""Where the values of a model that is about to be streamed come from: of several processes, the machine's first.

Where its parameters are a file's bytes, all processes of the machine fill units in turn, each from that file. What it
has in memory it fills alone. The others need no values: they may have left their parameters on the meta device.
"""
from __future__ import annotations

import mmap
import os
import warnings
import zlib
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..base.limits import show_bytes
from ..base.units import Group
from ..group.descriptor import shared
from ..group.ranks import Ranks
from ..plans.room import own_bytes
from ..store.mapped import Mapped
from ..store.records import Record

Place = tuple[str, int]                  # a file, and where in it a parameter's bytes begin
_ALIGN = 64
_MANY_BYTES = 1 << 30                    # of copies of one model in several processes: is told


class Origins:
    """Of a process that is alone: its own tensors."""

    def fills(self, unit: int) -> bool:
        """Does this process put the unit's values into the store?"""
        return True

    def of(self, r: Record) -> Tensor:
        """[shape] The values; where another process has them, and this one does not fill the unit, no values."""
        return r.param.detach()

    def exact(self, records: list[Record]) -> list[Tensor]:
        """As `of`, of a unit's parameters, with values in each process; all call it, for the same."""
        return [self.of(r) for r in records]

    def everywhere(self, units: list[list[Record]]) -> None:
        """They are."""


class SharedOrigins(Origins):
    """All ranks make it, when nothing is refused any more. On the meta device nothing of the model is left."""

    def __init__(self, ranks: Ranks, module: nn.Module, groups: list[Group]) -> None:
        self._ranks, self._first = ranks, ranks.mates[0]
        self._params = [p for _, own in groups for _, p in own]
        own = _places(self._params)
        without = [p.is_meta for p in self._params]
        every = ranks.gather((own, without, sum(own_bytes(groups))))
        self._at = dict(zip(map(id, self._params), every[self._first][0]))
        self._mine = {id(p) for p, place in zip(self._params, own) if place is not None and place == self._at[id(p)]}
        away = {place[0] for key, place in self._at.items() if place is not None and key not in self._mine}
        self._files = {path: _mapped(path) for path in away}         # at once: who fills a unit looks for them
        self._turns = self._turns_of([every[rank][:2] for rank in ranks.mates], groups)
        if ranks.rank == self._first:
            _tell_of_copies([every[rank][2] for rank in ranks.mates if not any(every[rank][1])])
        _give_memory(module, self._params)

    def _turns_of(self, found: list[tuple[list[Place | None], list[bool]]], groups: list[Group]) -> list[int]:
        """Who fills which unit. found: by mate, what is a file's, and what is on the meta device."""
        turns, at, first = [], 0, found[0][0]
        for unit, (_, own) in enumerate(groups):
            span = range(at, at + len(own))
            able = [mate for mate, (places, without) in zip(self._ranks.mates, found)
                    if all(first[i] is not None and (without[i] or places[i] == first[i]) for i in span)]
            turns.append(able[unit % len(able)] if able else self._first)
            at += len(own)
        return turns

    def fills(self, unit: int) -> bool:
        return self._turns[unit] == self._ranks.rank

    def of(self, r: Record) -> Tensor:
        place = self._at[id(r.param)]
        if place is None or id(r.param) in self._mine:
            return r.param.detach()
        path, at = place
        like = r.param
        return torch.frombuffer(self._files[path], dtype=like.dtype, count=like.numel(), offset=at).view(like.shape)

    def exact(self, records: list[Record]) -> list[Tensor]:
        if all(self._at[id(r.param)] is not None for r in records):
            return [self.of(r) for r in records]
        return _in_common(self._ranks, [self.of(r) for r in records])


    def everywhere(self, units: list[list[Record]]) -> None:
        """Weights are those of the first process of all, on each machine, when this is called by all and they are in
        their planes: what another machine had otherwise is replaced."""
        own = {unit: _sum(records) for unit, records in enumerate(units) if self.fills(unit)}
        sums: dict[int, set[int]] = {}
        for found in self._ranks.gather(own):
            for unit, crc in found.items():
                sums.setdefault(unit, set()).add(crc)
        for unit in sorted(unit for unit, found in sums.items() if len(found) > 1):
            for r in units[unit]:
                self._ranks.control.give(r.over(r.memory("HI", True), "HI"))
            if exact := [r for r in units[unit] if r.exact is not None]:
                values = [r.exact.clone(memory_format=torch.contiguous_format) for r in exact]
                for value in values:
                    self._ranks.control.give(value)
                for r, value in zip(exact, _in_common(self._ranks, values)):
                    r.exact = value


def _sum(records: list[Record]) -> int:
    """Of a unit's weights in the store, and of what they were rounded from."""
    crc = 0
    for r in records:
        for t in [r.over(r.memory("HI", True), "HI")] + ([] if r.exact is None else [r.exact]):
            crc = zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy(), crc) if t.numel() else crc
    return crc


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)


def origins(ranks: Ranks | None, module: nn.Module, groups: list[Group]) -> Origins:
    return Origins() if ranks is None else SharedOrigins(ranks, module, groups)


def _places(params: list[nn.Parameter]) -> list[Place | None]:
    files = Mapped()
    return [None if p.is_meta else files.source(p.detach()) for p in params]


def _give_memory(module: nn.Module, params: list[nn.Parameter]) -> None:
    """Parameters stay the same objects. No page of their memory is touched, so it takes none."""
    for p in params:
        if p.is_meta:
            kept, made = dict(p.__dict__), nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
            torch.utils.swap_tensors(p, made)
            p.__dict__.update(kept)
    for m in module.modules():
        for name, b in m._buffers.items():
            if isinstance(b, Tensor) and b.is_meta:
                m._buffers[name] = torch.empty_like(b, device="cpu")


def _in_common(ranks: Ranks, own: list[Tensor]) -> list[Tensor]:
    """The first one's values, in memory that all processes of the machine have once."""
    ends = list(accumulate(-(-t.nbytes // _ALIGN) * _ALIGN for t in own))
    first, fd = ranks.rank == ranks.mates[0], -1
    with ranks.as_one():
        if first:
            fd = os.memfd_create("megatrain values")
            os.ftruncate(fd, ends[-1])
            for found, t in zip(_over(fd, own, ends), own):
                found.copy_(t)
    fd = shared(ranks, fd)
    try:
        return _over(fd, own, ends)
    finally:
        os.close(fd)


def _over(fd: int, like: list[Tensor], ends: list[int]) -> list[Tensor]:
    memory = mmap.mmap(fd, ends[-1])
    return [torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=at).view(t.shape)
            for t, at in zip(like, [0, *ends])]


def _tell_of_copies(own: list[int]) -> None:
    """own: bytes of each process that has its model in memory."""
    if len(own) > 1 and sum(own) - max(own) >= _MANY_BYTES:
        warnings.warn(f"{len(own)} processes of this machine made the model, each in {show_bytes(max(own))} of its own "
                      "memory, which it has given back now: mt.from_pretrained makes it once, or leave it on the meta "
                      "device (with torch.device('meta'): ...) where LOCAL_RANK is not 0", RuntimeWarning, stacklevel=2)
