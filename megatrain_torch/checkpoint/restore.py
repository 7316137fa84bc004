"""mt.load: a checkpoint of mt.save into a streamed model and its optimizer, wherever their bytes are at home.

What is the same in the checkpoint and in the store (types, formats of states, order in memory) is read straight into
the planes; the rest goes by way of fp32, a unit at a time. Everything is compared with its sums first, so that a
checkpoint that is not whole changes nothing.
"""
from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import _core
from ..base.errors import MegatrainError
from ..base.modes import GROUP, LOW_BYTES, master_bytes, moment_bytes
from ..base.strict import shown
from ..group.control import calling
from ..group.ranks import as_one
from ..model.runtime import runtime_of
from ..optim.adamw import AdamW
from ..optim.states import CODES, MOMENTS, load_moments, master_plane, set_master
from ..store.records import Record
from ..store.tensorfiles import DTYPES, Stored
from . import manifest, parts
from .manifest import MASTERS, Checkpoint, Reads, set_random_states
from .parts import OURS, TORCHS, buffers_of, kind_of, names_of

if TYPE_CHECKING:
    from ..model.runtime import Runtime


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of mt.save whose files are there, each as long as it was written.

    Attributes:
        states: how mt.AdamW kept its states. extra: what mt.save was given as that. files: names of its files.
    """

    states: str
    extra: Any
    files: frozenset[str]
    _body: dict[str, Any] = field(repr=False)

    def rounds(self, states: str, kinds: Callable[[torch.dtype], torch.dtype] = lambda kind: kind) -> bool:
        """Would mt.load have to round any of it, for an mt.AdamW that keeps its states as `states` says?

        Args:
            kinds: the type that a parameter has in the model, by its type in the checkpoint.
        """
        return any(loses(self._body, name, kinds(DTYPES[saved["dtype"]]), states)
                   for name, saved in self._body["parameters"].items())


def inspect_checkpoint(folder: str | Path) -> CheckpointInfo:
    """Reads what a checkpoint says of itself, without a model; weights, and states as tensors, are not read.

    Raises:
        MegatrainError: a file is missing or cut short, or it is no checkpoint; the message names the file.
    """
    source = Checkpoint(Path(os.path.abspath(folder)))
    return CheckpointInfo(source.body["states"], source.training["extra"],
                          frozenset({*source.body["files"], manifest.NAME}), source.body)


def checkpoint_bytes(model: nn.Module, folder: str | Path, states: str = "fp32") -> tuple[int, int]:
    """Bytes that checkpoints of a streamed model will take: (each, all together besides).

    Frozen weights are written once if the file system of `folder` has hard links: all checkpoints of a run share them.
    The folder need not be there.

    Args:
        states: how mt.AdamW keeps its states.
    """
    records = [p._mt for p in names_of(model)]
    shared = sum(r.nbytes for r in records if parts.is_still(r))
    shared = shared if shared >= parts.LEAST_BYTES and parts.can_link(Path(folder)) else 0
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(r.nbytes for r in records) - shared + sum(master_bytes(states, p.dtype) * p.numel()
                                     + moment_bytes(states, p.dtype, p.numel()) for p in trained), shared


@calling("mt.load")
def load(model: nn.Module, opt: torch.optim.Optimizer | None, folder: str | Path, *, scheduler: Any = None,
         verify: bool = True, convert: bool = False, progress: Callable[[int, int], None] | None = None) -> Any:
    """Takes a checkpoint of mt.save; returns the `extra` that it was given.

    Training goes on with the bits of an uninterrupted run, wherever units lived then and live now. On a GPU that needs
    kernels that give the same bits twice (`torch.use_deterministic_algorithms`). A warning tells what else changes the
    bits: another device, other versions, other activations kept.
    Types and formats may differ if the new ones hold all that the old ones did. Moments of 8 bits may become fp32 ones;
    bf16 weights and their masters may become fp32 weights.

    Args:
        model: the streamed model. opt: its optimizer; None: weights and buffers alone, and no random states.
        folder: what mt.save was given.
        scheduler: whatever has `state_dict()` and `load_state_dict()`, if its state was saved.
        verify: read and compare everything before anything is changed. False: compare while reading; a checkpoint that
            is found broken then leaves a model that refuses to run until one is loaded.
        convert: allow types and formats that hold less, by rounding.
        progress: called with (units loaded, units in all).

    Raises:
        MegatrainError: there is no whole checkpoint, or it is not this model's; or a format that would lose bits.
            Nothing was changed, unless verify=False and it says so.
    """
    rt = runtime_of(model)
    if rt.root() is not model:
        raise MegatrainError("load into the model that was given to mt.stream, not into a part of it")
    if isinstance(opt, AdamW):
        opt._adopt()
    rt.finish_save()
    with as_one(rt.ranks):
        found = _Loading(rt, model, opt, Path(os.path.abspath(folder)))
        found.check(scheduler, verify, convert)
    source, training = found.source, found.source.training
    like = {} if opt is None else parts.known(rt, source.body.get("likeness"))
    if isinstance(opt, AdamW):
        parts.go_on(rt, like)
        opt._ask_for_room()
    with ExitStack() as undo:                        # classes of others are strangers, and may refuse what they gave
        if scheduler is not None:
            before = deepcopy(scheduler.state_dict())
            try:
                scheduler.load_state_dict(training["scheduler"])
            except Exception as why:
                raise MegatrainError(f"{source.where}: {type(scheduler).__name__} does not take the scheduler's state "
                                     f"({type(why).__name__}: {shown(why)}); nothing else was changed") from why
            undo.callback(scheduler.load_state_dict, before)
        found.take(progress)
        undo.pop_all()
    rt.saved_files = parts.loaded(source.folder, source.body, {name: p._mt for p, name in found.names.items()},
                                  source.tensors)
    if opt is not None:
        otherwise = parts.differences(rt, like) + found.set_random_states()
        if otherwise:
            warnings.warn(f"{source.folder}: training goes on, with other bits than it would have had there: "
                          f"{'; '.join(otherwise)}", stacklevel=3)
    return training["extra"]


class _Loading:
    """One checkpoint on its way into a model and its optimizer. ours: that is mt.AdamW."""

    def __init__(self, rt: Runtime, model: nn.Module, opt: torch.optim.Optimizer | None, folder: Path) -> None:
        """Reads what is small of the checkpoint, which is whole."""
        self.rt, self.model, self.opt, self.ours = rt, model, opt, isinstance(opt, AdamW)
        self.source, self.names = Checkpoint(folder), names_of(model)
        self.body, self.saved = self.source.body, self.source.body["parameters"]
        self.training, self.where = self.source.training, self.source.where

    def check(self, scheduler: Any, verify: bool, convert: bool) -> None:
        """Is it this model's, and this optimizer's, and would nothing be lost? Nothing is changed."""
        if self.opt is not None:
            self._match_kind()
        self._match(convert)
        if self.opt is not None:
            self._match_groups()
        if scheduler is not None and self.training["scheduler"] is None:
            raise MegatrainError(f"{self.source.folder} has no scheduler's state: mt.save was given none")
        if verify:
            self.source.verify(*(0, 1) if self.rt.ranks is None else (self.rt.ranks.rank, self.rt.ranks.size))

    def take(self, progress: Callable[[int, int], None] | None) -> None:
        rt, opt, source = self.rt, self.opt, self.source
        rt.core.drain()
        if self.ours:
            opt._catch_up()
        elif opt is not None:                # first: it may refuse them
            opt.load_state_dict(deepcopy(self.training["others"]))      # it keeps them, and they are the file's
        rt.broken = f"the model is half-loaded: loading {source.folder} failed; load a checkpoint that is whole"
        # As one: what a unit brought to the host is given back, whoever asked for it; nobody reads before all have.
        with manifest.adding(rt.broken), torch.no_grad(), as_one(rt.ranks):
            try:
                reads = Reads(source)
                pairs = [(b, reads.fresh(source.tensors[name])) for name, b in buffers_of(self.model).items()]
                reads.go()
                for buffer, value in pairs:
                    buffer.copy_(value)
                for done, records in enumerate(rt.units, 1):
                    if own := [r for r in records if r.param in self.names]:     # some may be gone from the model
                        self.unit(own)
                    if progress is not None:
                        progress(done, len(rt.units))
            except BaseException as why:     # of one of several ranks, for which all wait: then all fail at once
                if rt.ranks is not None:
                    with suppress(MegatrainError):       # the engine may be closed
                        rt.core.fail(f"mt.load: {type(why).__name__}: {shown(why)}")
                raise
        if self.ours:
            for group, saved in zip(opt.param_groups, self.training["groups"]):
                group.update({k: v for k, v in saved.items() if k != "params"})
            opt._skipped = self.body["skipped_steps"]
            opt._keys.update({p: self.saved[name]["key"] for p, name in self.names.items() if p in opt._keys})
        rt.broken = ""

    def set_random_states(self) -> list[str]:
        """Each process has those of the one that it was; of more or fewer only the first goes on, which is said."""
        by_rank = self.training.get("random_by_rank", [self.training["random"]])
        rank, size = (0, 1) if self.rt.ranks is None else (self.rt.ranks.rank, self.rt.ranks.size)
        if len(by_rank) == size:
            set_random_states(by_rank[rank])
            return []
        if rank == 0:
            set_random_states(self.training["random"])
        return [f"random numbers of {len(by_rank)} processes there and of {size} here"]

    # ---- is it this model's, and this optimizer's ----

    def _match(self, convert: bool) -> None:
        folder, tensors = self.source.folder, self.source.tensors
        mine, buffers = {name: p._mt for p, name in self.names.items()}, buffers_of(self.model)
        if mine.keys() != self.saved.keys():
            missing, other = sorted(mine.keys() - self.saved.keys()), sorted(self.saved.keys() - mine.keys())
            raise MegatrainError(f"{folder} is of another model: it lacks {len(missing)} parameters {missing[:3]} and "
                                 f"has {len(other)} more {other[:3]}")
        if lacking := sorted(buffers.keys() - tensors.keys()):
            raise MegatrainError(f"{folder} lacks {len(lacking)} buffers {lacking[:3]}")
        for name, b in buffers.items():
            if tensors[name].shape != tuple(b.shape):
                raise MegatrainError(f"{folder}: buffer {name} is {list(tensors[name].shape)} there and "
                                     f"{list(b.shape)} here")
        for name, record in mine.items():
            about, where = self.saved[name], f"{folder}: {name}"
            if tuple(about["shape"]) != tuple(record.shape):
                raise MegatrainError(f"{where} is {about['shape']} there and {list(record.shape)} here")
            if self.opt is not None and about.get("strides", list(record.stride)) != list(record.stride):
                raise MegatrainError(f"{where} lies in memory with strides {about['strides']} there and "
                                     f"{list(record.stride)} here, and its moments of 8 bits have scales in that order")
            why = loses(self.body, name, record.dtype, record.runtime.states if self.ours else None)
            if why and not convert:
                raise MegatrainError(f"{where}: {why}; convert=True allows that")

    def _match_kind(self) -> None:
        """Are these states the optimizer's?"""
        there, here = self.body["optimizer"] or "", kind_of(self.opt)
        (package, _, name), (own, _, own_name) = there.rpartition("."), here.rpartition(".")
        # Of a class in a script no package is known: it may be imported the next time.
        in_script = name == own_name and "__main__" in (package, own) and not {package, own} & {"mt", "torch.optim"}
        if there == here or in_script:
            return
        way = f"; load them into {there} and give its state_dict() to {here}" if {there, here} == {OURS, TORCHS} else ""
        raise MegatrainError(f"{self.source.folder} has states of {there or 'no optimizer'}, and {here} is to take "
                             f"them{way}; mt.load(model, None, folder) takes the weights alone")

    def _match_groups(self) -> None:
        folder, training, where = self.source.folder, self.training, self.where
        mine = [[self.names.get(p) for p in g["params"]] for g in self.opt.param_groups]
        saved = [g["params"] for g in training["groups"]]
        if mine != saved:
            raise MegatrainError(f"{folder}: the optimizer's groups have {[len(g) for g in mine]} parameters here and "
                                 f"{[len(g) for g in saved]} in the checkpoint, or others, or in another order: make "
                                 "the optimizer as it was made then")
        if self.ours and (lacking := [n for g in saved for n in g if "key" not in self.saved[n]]):
            raise MegatrainError(f"{folder / manifest.NAME}: parameter {lacking[0]} has no key: {manifest.BROKEN}")
        if not self.ours and "param_groups" not in training.get("others", {}):
            raise MegatrainError(f"{where} has no state_dict of {kind_of(self.opt)}: an earlier version had its states "
                                 "otherwise; nothing was changed; mt.load(model, None, folder) takes the weights alone")

    # ---- a unit at a time ----

    def unit(self, records: list[Record]) -> None:
        opt, reads = self.opt, Reads(self.source)
        records[0].before_write()
        records[0].own_states()
        readers: list[Iterator[None]] = []
        for r in records:
            name = self.names[r.param]
            saved = self.saved[name]
            stepped = self.ours and "step" in saved
            readers.append(self._weights(r, name, reads, saved["master"] if stepped else ""))
            if stepped:
                opt._begin_state(r.param, r)
                opt.state[r.param]["step"].fill_(float(saved["step"]))
                readers.append(self._moments(r, name, reads))
            elif self.ours:
                opt.state.pop(r.param, None)
        for reader in readers:               # up to its yield it says what is to be read
            next(reader)
        reads.go()
        for reader in readers:
            next(reader, None)
        self.rt.homes.take(records[0].unit)

    def _moments(self, record: Record, name: str, reads: Reads) -> Iterator[None]:
        keys, values = MOMENTS if self.body["states"] == "fp32" else CODES, {}
        stored = [self.source.states[f"{name}.{key}"] for key in keys]
        planes = [record.view(plane) for plane in record.moments]
        if self.body["states"] == self.rt.states and all(map(_fits, planes, stored)):
            for plane, s in zip(planes, stored):
                self._read_own(record, s, plane, reads)
        else:
            values = dict(zip(keys, map(reads.fresh, stored)))
        yield
        if values:
            load_moments(record, values)
        record.push(*record.moments)

    def _read_own(self, record: Record, stored: Stored, memory: Tensor, reads: Reads, others: Sequence[int] = ()
                  ) -> None:
        """Of several processes each reads its portion, and those of `others`; the rest it would not keep."""
        if self.rt.ranks is None:
            reads.into(stored, memory)
            return
        each, of = (1, 1) if memory.shape == record.shape else (GROUP, 2)          # moments' scales, else
        for rank in sorted([self.rt.ranks.rank, *others]):
            first, n = self.rt.core.owned(record.unit, record.index, rank)
            begin, end = first // each * of, -(-(first + n) // each) * of    # elements, as they lie in memory and file
            part = Stored(stored.file, stored.dtype, (end - begin,),
                          *(stored.begin + at * stored.dtype.itemsize for at in (begin, end)))
            reads.into(part, memory.view(-1)[begin:end])

    def _weights(self, record: Record, name: str, reads: Reads, master: str) -> Iterator[None]:
        """master: the plane that it was saved from; "": the weight is its own."""
        stored, ranks = self.source.tensors[name], self.rt.ranks
        extra = self.source.states[f"{name}.{MASTERS[master]}"] if master else None
        low = self.body["low_bytes"] if master == "LO" else 0
        if _fits(record.host, stored) and low in (0, record.low_bytes):      # and so its master is as the plane
            # Weights are there on each machine.
            self._read_own(record, stored, record.host, reads, () if ranks is None else ranks.spoken_for())
            if master:
                self._read_own(record, extra, record.view(master), reads)
            yield
            record.after_write()
            if master:
                record.push(master)
                record.master_writes = record.writes
            return
        # From other types, or another order in memory: by way of fp32, which all of them fit into.
        weight, rest = reads.fresh(stored), reads.fresh(extra) if master else None
        yield
        if not weight.is_floating_point() or not (master or master_plane(record)):
            record.host.copy_(weight)
            record.after_write()
            return
        value = rest if master == "MASTER" else weight.to(torch.float32)
        if master == "LO":
            value = torch.empty(weight.shape)
            _core.split_join(weight.data_ptr(), rest.data_ptr(), value.data_ptr(), weight.numel(), low)
        set_master(record.param, value)


def _fits(memory: Tensor, stored: Stored) -> bool:
    """May the file's bytes be those of this memory?"""
    return memory.is_contiguous() and memory.dtype == stored.dtype and tuple(memory.shape) == stored.shape


def loses(body: dict[str, Any], name: str, here: torch.dtype, states: str | None) -> str:
    """What of a parameter would be rounded; "": nothing. states: of mt.AdamW's, None: it is another's."""
    saved = body["parameters"][name]
    there = DTYPES[saved["dtype"]]
    if states is not None and "step" in saved:
        if body["states"] == "fp32" and states != "fp32":
            return f"its moments are fp32 there and {states!r} here"
        before = _master_bits(there, body["low_bytes"] if saved["master"] == "LO" else 0, saved["master"])
        if before > _master_bits(here, LOW_BYTES[states], "MASTER"):
            return f"its master has {before} bits there and fewer here"
        return ""
    narrow = there != here and torch.promote_types(there, here) != here
    return f"its weights are {there} there and {here} here" if narrow else ""


def _master_bits(kind: torch.dtype, low_bytes: int, master: str) -> int:
    if kind == torch.bfloat16:
        return 16 + 8 * low_bytes
    return 32 if kind != torch.float16 or master == "MASTER" else 16
