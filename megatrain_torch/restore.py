"""mt.load: a checkpoint of mt.save into a streamed model and its optimizer, wherever their bytes are at home.

What is the same in the checkpoint and in the store (types, formats of states, order in memory) is read straight into
the planes; the rest goes by way of fp32, a unit at a time. Everything is compared with its sums first, so that a
checkpoint that is not whole changes nothing.
"""
from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _core, contents, likeness, manifest
from .contents import MASTERS
from .errors import MegatrainError
from .formats import LOW_BYTES
from .mapped import READERS
from .masters import set_master
from .moments import CODES, MOMENTS, decoded, load_moments
from .optim import AdamW
from .parts import INDEX, OURS, TORCHS, TRAINING, buffers_of, kind_of, names_of
from .randomness import set_random_states
from .records import Record
from .registry import runtime_of
from .strict import shown
from .tensorfiles import DTYPES, Extent, Stored, listed

if TYPE_CHECKING:
    from .runtime import Runtime

_SCRIPT = "__main__"


def check(folder: Path) -> None:
    """That the files of a checkpoint are there, as long as they were written. Their contents are not read.

    Raises:
        MegatrainError: one is not, or it is no checkpoint; the message names the file.
    """
    _Checkpoint.open(folder)


def rounds(folder: Path, states: str, kinds: Callable[[torch.dtype], torch.dtype]) -> bool:
    """Would mt.load round any of it for an mt.AdamW with states of this format? Raises: as `check`.

    Args:
        kinds: the type that a parameter has here, by its type there.
    """
    body = _Checkpoint.open(folder).body
    return any(_loses(body, name, kinds(DTYPES[saved["dtype"]]), states) for name, saved in body["parameters"].items())


@dataclass
class _Checkpoint:
    """A folder, its manifest's body, and what its files of tensors have."""

    folder: Path
    body: dict[str, Any]
    tensors: dict[str, Stored] = field(default_factory=dict)
    states: dict[str, Stored] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path) -> _Checkpoint:
        """All that is in it is checked but the tensors' bytes."""
        manifest.recover(folder)
        found, where = _Checkpoint(folder, manifest.read(folder)), str(folder / manifest.NAME)
        with manifest.adding(manifest.BROKEN):
            contents.check_body(found.body, where, TRAINING)
            for name, about in found.body["files"].items():
                found._check_size(name, about["bytes"])
                if name.endswith(".safetensors"):
                    found._list(name)
            contents.check_tensors(found.body, found.tensors, found.states, where)
            if INDEX in found.body["files"]:
                contents.check_index(found.bytes_of(INDEX), str(folder / INDEX), found.tensors)
        return found

    def _list(self, name: str) -> None:
        mine = self.states if name.startswith("states") else self.tensors
        there = listed(self.folder / name)
        if twice := sorted(there.keys() & mine.keys()):
            raise MegatrainError(f"{self.folder / name} has {shown(twice[0])}, which is in {mine[twice[0]].file} too")
        mine.update(there)

    def _check_size(self, name: str, nbytes: int) -> None:
        path = manifest.inside(self.folder, name)
        size = path.stat().st_size if path.is_file() else None
        if size != nbytes:
            raise MegatrainError(f"{path} {'is missing' if size is None else f'has {size} bytes'}, and {nbytes} were "
                                 "written")

    def verify(self) -> None:
        """Reads everything, before anything is changed."""
        with manifest.adding(manifest.BROKEN):
            for name, about in self.body["files"].items():
                if "sums" in about:
                    self.read(name, [])
                else:
                    self.bytes_of(name)

    def read(self, name: str, extents: list[Extent]) -> None:
        about = self.body["files"][name]
        _core.read_file((str(self.folder / name), about["bytes"], extents), bytes.fromhex(about["sums"]), READERS)

    def bytes_of(self, name: str) -> bytes:
        data = (self.folder / name).read_bytes()
        if manifest.sha256(data) != self.body["files"][name]["sha256"]:
            raise MegatrainError(f"{self.folder / name} is not as it was written (its checksum differs)")
        return data


class _Reads:
    """What is to be read, by file: together, so that each file is gone through once for a unit."""

    def __init__(self, source: _Checkpoint) -> None:
        self._source = source
        self._extents: dict[str, list[Extent]] = {}
        self._memory: list[Tensor] = []

    def into(self, stored: Stored, memory: Tensor) -> Tensor:
        if stored.end > stored.begin:
            extent = stored.begin, memory.data_ptr(), stored.end - stored.begin, -1
            self._extents.setdefault(stored.file, []).append(extent)
            self._memory.append(memory)
        return memory

    def fresh(self, stored: Stored) -> Tensor:
        return self.into(stored, torch.empty(stored.shape, dtype=stored.dtype))

    def go(self) -> None:
        for name, extents in self._extents.items():
            self._source.read(name, sorted(extents))


def load(model: nn.Module, opt: torch.optim.Optimizer | None, folder: str | Path, *, scheduler: Any = None,
         verify: bool = True, convert: bool = False, progress: Callable[[int, int], None] | None = None) -> Any:
    """Takes a checkpoint of mt.save; returns the `extra` that it was given.

    Training goes on with the bits of an uninterrupted run, wherever units lived then and live now; on a GPU where its
    kernels give the same bits twice (`torch.use_deterministic_algorithms`). What would change them otherwise, such as
    another device, other versions or other activations kept, is told by a warning.
    Types and formats may differ where the new ones hold all that the old ones did (moments of 8 bits into fp32 ones,
    bf16 weights with their masters into fp32 weights). mt.AdamW takes states of torch.optim.AdamW, and the reverse, as
    their load_state_dict do; torch's keeps moments in the parameter's type, and no master.

    Args:
        model: the streamed model. opt: its optimizer; None: weights and buffers alone, and no random states.
        folder: what mt.save was given.
        scheduler: whatever has `load_state_dict()`, if its state was saved.
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
        opt._check_served()
    rt.finish_save()
    source = _Checkpoint.open(Path(os.path.abspath(folder)))
    names = names_of(model)
    with manifest.adding(manifest.BROKEN):
        training = contents.training_of(source.bytes_of(TRAINING), str(source.folder / TRAINING),
                                        source.body["optimizer"] is not None)
    if opt is not None:
        _match_kind(source, training, opt)
    _match(source, model, names, opt, convert)
    if opt is not None:
        _match_groups(source, training, opt, names)
    if scheduler is not None and training["scheduler"] is None:
        raise MegatrainError(f"{source.folder} has no scheduler's state: mt.save was given none")
    if verify:
        source.verify()
    if scheduler is not None:                        # first: its class is a stranger, and may refuse its state
        _load_scheduler(scheduler, training["scheduler"], source.folder)
    _take(rt, model, opt, source, names, training, progress)
    if opt is not None:
        set_random_states(training["random"])
        _tell_of_other_bits(rt, source)
    return training["extra"]


def _load_scheduler(scheduler: Any, state: Any, folder: Path) -> None:
    try:
        scheduler.load_state_dict(state)
    except Exception as why:
        raise MegatrainError(f"{folder / TRAINING}: {type(scheduler).__name__} does not take the scheduler's state "
                             f"({type(why).__name__}: {shown(why)}); nothing else was changed") from why


def _tell_of_other_bits(rt: Runtime, source: _Checkpoint) -> None:
    if otherwise := likeness.take(rt, source.body["likeness"]) if "likeness" in source.body else []:
        warnings.warn(f"{source.folder}: training goes on, with other bits than it would have had there: "
                      f"{'; '.join(otherwise)}", stacklevel=3)


def _take(rt: Runtime, model: nn.Module, opt: torch.optim.Optimizer | None, source: _Checkpoint,
          names: dict[Tensor, str], training: dict[str, Any], progress: Callable[[int, int], None] | None) -> None:
    rt.core.drain()
    if isinstance(opt, AdamW):
        opt._settle()
    if opt is not None and not isinstance(opt, AdamW):       # first: its class is a stranger, and may refuse them
        _load_other(opt, source, names, training)
    rt.broken = f"the model is half-loaded: loading {source.folder} failed; load a checkpoint that is whole"
    with manifest.adding(rt.broken), torch.no_grad():
        _load_buffers(model, source)
        for done, records in enumerate(rt.units, 1):
            _load_unit(rt, records, source, names, opt)
            if progress is not None:
                progress(done, len(rt.units))
    if isinstance(opt, AdamW):
        _load_ours(opt, source, names, training)
    rt.broken = ""


# ---- does it fit ---------------------------------------------------------------------------------

def _match(source: _Checkpoint, model: nn.Module, names: dict[Tensor, str], opt: torch.optim.Optimizer | None,
           convert: bool) -> None:
    mine = {name: p._mt for p, name in names.items()}
    saved = source.body["parameters"]
    if mine.keys() != saved.keys():
        missing, other = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
        raise MegatrainError(f"{source.folder} is of another model: it lacks {len(missing)} parameters {missing[:3]} "
                             f"and has {len(other)} more {other[:3]}")
    buffers = buffers_of(model)
    if lacking := sorted(buffers.keys() - source.tensors.keys()):
        raise MegatrainError(f"{source.folder} lacks {len(lacking)} buffers {lacking[:3]}")
    for name, b in buffers.items():
        if source.tensors[name].shape != tuple(b.shape):
            raise MegatrainError(f"{source.folder}: buffer {name} is {list(source.tensors[name].shape)} there and "
                                 f"{list(b.shape)} here")
    for name, record in mine.items():
        _match_form(f"{source.folder}: {name}", saved[name], record, opt)
        why = (_loses(source.body, name, record.dtype, record.runtime.states if isinstance(opt, AdamW) else None)
               or _loses_in_torch(saved[name], record, opt))
        if why and not convert:
            raise MegatrainError(f"{source.folder}: {name}: {why}; convert=True allows that")


def _match_form(name: str, saved: dict[str, Any], record: Record, opt: torch.optim.Optimizer | None) -> None:
    if tuple(saved["shape"]) != tuple(record.shape):
        raise MegatrainError(f"{name} is {saved['shape']} there and {list(record.shape)} here")
    if opt is not None and saved.get("strides", list(record.stride)) != list(record.stride):
        raise MegatrainError(f"{name} lies in memory with strides {saved['strides']} there and {list(record.stride)} "
                             "here, and its moments of 8 bits have scales in that order")


def _loses(body: dict[str, Any], name: str, here: torch.dtype, states: str | None) -> str:
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


def _loses_in_torch(saved: dict[str, Any], record: Record, opt: torch.optim.Optimizer | None) -> str:
    """As `_loses`, of states of mt.AdamW that another's takes."""
    if opt is None or isinstance(opt, AdamW) or "step" not in saved or record.dtype == torch.float32:
        return ""
    return f"its moments and master become {record.dtype} in {TORCHS}"


def _master_bits(kind: torch.dtype, low_bytes: int, master: str) -> int:
    if kind == torch.bfloat16:
        return 16 + 8 * low_bytes
    return 32 if kind != torch.float16 or master == "MASTER" else 16


def _match_kind(source: _Checkpoint, training: dict[str, Any], opt: torch.optim.Optimizer) -> None:
    """Are these states the optimizer's? Those of one AdamW become the other's."""
    there, here = _kind_in(source.body), kind_of(opt)
    if _is_one(there, here):
        return
    if {there, here} != {OURS, TORCHS}:
        raise MegatrainError(f"{source.folder} has states of {there or 'no optimizer'}, and {here} is to take them; "
                             "mt.load(model, None, folder) takes the weights alone")
    if any(g.get("amsgrad") for g in [*training["groups"], *opt.param_groups]):
        raise MegatrainError(f"{source.folder} has states of {there}, and {here} is to take them, but mt.AdamW has no "
                             "amsgrad=True; mt.load(model, None, folder) takes the weights alone")
    if here == OURS:
        _as_ours(source, training)
    else:
        _as_torchs(source.body, training)


def _kind_in(body: dict[str, Any]) -> str | None:
    """As kind_of says; checkpoints were written that have the class's name alone."""
    name = body["optimizer"]
    if name is None or "." in name:
        return name
    if name == "AdamW" and body["states"] is not None:
        return OURS
    return f"{'torch.optim' if hasattr(torch.optim, name) else _SCRIPT}.{name}"


def _is_one(there: str | None, here: str) -> bool:
    """Of a class in a script no package is known: it may be imported the next time."""
    if there is None or there == here:
        return there == here
    (package, _, name), (own, _, own_name) = there.rpartition("."), here.rpartition(".")
    return name == own_name and _SCRIPT in (package, own) and not {package, own} & {"mt", "torch.optim"}


def _as_ours(source: _Checkpoint, training: dict[str, Any]) -> None:
    """torch.optim.AdamW's states, as mt.AdamW would have saved them: with moments in fp32, and no master."""
    body, where = source.body, str(source.folder / TRAINING)
    parameters = body["parameters"]
    body |= {"states": "fp32", "skipped_steps": 0}
    for number, name in enumerate(name for g in training["groups"] for name in g["params"]):
        contents.table(parameters.get(name), f"{where}: parameter {shown(name)}")["key"] = number
    for name, own in contents.field(training, "others", lambda _: True, "torch.optim.AdamW's steps", where).items():
        if own:
            about = contents.table(parameters.get(name), f"{where}: others: {shown(name)}")
            about |= {"step": contents.step_of(own, f"{where}: others of {name}"), "master": ""}
            contents.check_states(body, name, source.states, where, DTYPES[about["dtype"]])


def _as_torchs(body: dict[str, Any], training: dict[str, Any]) -> None:
    """mt.AdamW's states, as far as torch.optim.AdamW has them beside tensors."""
    training["others"] = {name: {"step": torch.tensor(float(saved["step"]))}
                          for name, saved in body["parameters"].items() if "step" in saved}


def _match_groups(source: _Checkpoint, training: dict[str, Any], opt: torch.optim.Optimizer,
                  names: dict[Tensor, str]) -> None:
    mine = [[names.get(p) for p in g["params"]] for g in opt.param_groups]
    saved = [g["params"] for g in training["groups"]]
    if mine != saved:
        raise MegatrainError(f"{source.folder}: the optimizer's groups have {[len(g) for g in mine]} parameters here "
                             f"and {[len(g) for g in saved]} in the checkpoint, or others, or in another order: make "
                             "the optimizer as it was made then")
    where = str(source.folder / TRAINING)
    contents.check_hyper(training["groups"], opt.param_groups, where)
    parameters = source.body["parameters"]
    if isinstance(opt, AdamW) and (lacking := [n for g in saved for n in g if "key" not in parameters[n]]):
        raise MegatrainError(f"{source.folder / manifest.NAME}: parameter {lacking[0]} has no key: {manifest.BROKEN}")
    if not isinstance(opt, AdamW) and "others" not in training:
        raise MegatrainError(f"{where} has no 'others': {manifest.BROKEN}")
    if kind_of(opt) == TORCHS and source.body["states"] is None:
        _match_torchs(source, training["others"], where)


def _match_torchs(source: _Checkpoint, others: dict[str, Any], where: str) -> None:
    """What torch.optim.AdamW would find missing, or of another form, when it has taken it, or in its next step."""
    for name, own in others.items():
        about = contents.table(source.body["parameters"].get(name), f"{where}: others: {shown(name)}")
        if own:
            contents.step_of(own, f"{where}: others of {name}")
            for key in MOMENTS:
                found = source.states.get(f"{name}.{key}")
                if found is None or found.shape != tuple(about["shape"]):
                    raise MegatrainError(f"{source.folder} has no {name}.{key} of shape {about['shape']}: "
                                         f"{manifest.BROKEN}")


# ---- units ---------------------------------------------------------------------------------------

def _load_buffers(model: nn.Module, source: _Checkpoint) -> None:
    reads = _Reads(source)
    pairs = [(b, reads.fresh(source.tensors[name])) for name, b in buffers_of(model).items()]
    reads.go()
    for buffer, value in pairs:
        buffer.copy_(value)


def _load_unit(rt: Runtime, records: list[Record], source: _Checkpoint, names: dict[Tensor, str],
               opt: torch.optim.Optimizer | None) -> None:
    rt.planes.before_write(records[0])
    rt.planes.own_states(records[0])
    reads = _Reads(source)
    finish = [_load_record(r, names[r.param], source, reads, opt) for r in records]
    reads.go()
    for done in finish:
        done()
    rt.take(records[0].unit)


def _load_record(record: Record, name: str, source: _Checkpoint, reads: _Reads,
                 opt: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Says what is to be read; what is returned is called when it has been."""
    saved = source.body["parameters"][name]
    stepped = isinstance(opt, AdamW) and "step" in saved
    if isinstance(opt, AdamW) and not stepped and opt.state.pop(record.param, None):
        opt._counts.pop(record.param, None)
    if stepped:
        opt._begin_state(record.param, record)
        opt.state[record.param]["step"].fill_(float(saved["step"]))
        opt._counts[record.param] = saved["step"]
    moments = _read_moments(record, name, source, reads) if stepped else lambda: None
    mastered = stepped or (opt is not None and "step" in saved and record.dtype == torch.float32)
    weights = _read_weights(record, name, source, reads, saved["master"] if mastered else "")
    return lambda: (weights(), moments())


def _read_moments(record: Record, name: str, source: _Checkpoint, reads: _Reads) -> Callable[[], None]:
    rt = record.runtime
    keys = MOMENTS if source.body["states"] == "fp32" else CODES
    stored = [source.states[f"{name}.{key}"] for key in keys]
    planes = [record.view(plane) for plane in record.moments]
    if source.body["states"] == rt.states and all(map(_fits, planes, stored)):
        for plane, s in zip(planes, stored):
            reads.into(s, plane)
        return lambda: rt.planes.push(record, *record.moments)
    values = dict(zip(keys, map(reads.fresh, stored)))

    def convert() -> None:
        load_moments(record, values)
        rt.planes.push(record, *record.moments)

    return convert


def _fits(memory: Tensor, stored: Stored) -> bool:
    """May the file's bytes be those of this memory?"""
    return memory.is_contiguous() and memory.dtype == stored.dtype and tuple(memory.shape) == stored.shape


def _read_weights(record: Record, name: str, source: _Checkpoint, reads: _Reads, master: str) -> Callable[[], None]:
    """master: the plane that it was saved from; "": the weight is its own."""
    stored = source.tensors[name]
    extra = source.states[f"{name}.{MASTERS[master]}"] if master else None
    low = source.body["low_bytes"] if master == "LO" else 0
    plane = record.view(master) if master and low in (0, record.low_bytes) and record.dtype == stored.dtype else None
    if _fits(record.host, stored) and (not master or (plane is not None and _fits(plane, extra))):
        reads.into(stored, record.host)
        if master:
            reads.into(extra, plane)
        return lambda: _written(record, master)
    weight, rest = reads.fresh(stored), reads.fresh(extra) if master else None
    return lambda: _widen(record, weight, rest, master, low)


def _written(record: Record, master: str) -> None:
    record.runtime.planes.after_write(record)
    if master:
        record.runtime.planes.push(record, master)
        record.master_writes = record.writes


def _widen(record: Record, weight: Tensor, rest: Tensor | None, master: str, low: int) -> None:
    """From other types, or another order in memory: by way of fp32, which all of them fit into."""
    if not weight.is_floating_point() or not (master or record.low_bytes or record.dtype == torch.float16):
        record.host.copy_(weight)
        record.runtime.planes.after_write(record)
        return
    value = weight.to(torch.float32)
    if master == "LO":
        value = torch.empty(weight.shape)
        _core.split_join(weight.data_ptr(), rest.data_ptr(), value.data_ptr(), weight.numel(), low)
    elif master == "MASTER":
        value = rest
    set_master(record.param, value)


def _load_ours(opt: AdamW, source: _Checkpoint, names: dict[Tensor, str], training: dict[str, Any]) -> None:
    for group, saved in zip(opt.param_groups, training["groups"]):
        group.update({k: v for k, v in saved.items() if k != "params"})
    opt._skipped = source.body["skipped_steps"]
    opt._keys.update({p: source.body["parameters"][name]["key"] for p, name in names.items() if p in opt._keys})


def _load_other(opt: torch.optim.Optimizer, source: _Checkpoint, names: dict[Tensor, str],
                training: dict[str, Any]) -> None:
    """Raises: what its load_state_dict does."""
    reads, found = _Reads(source), {}
    flat = [p for g in opt.param_groups for p in g["params"]]
    tensors: dict[str, dict[str, Tensor]] = {names[p]: {} for p in flat}
    ours = source.body["states"] is not None
    for path, stored in source.states.items():
        name, _, key = path.rpartition(".")
        if name in tensors and not (ours and key in MASTERS.values()):
            tensors[name][key] = reads.fresh(stored)
    with manifest.adding(manifest.BROKEN):
        reads.go()
    for index, p in enumerate(flat):
        own = tensors[names[p]]
        if ours and CODES[0] in own:
            own = dict(zip(MOMENTS, decoded(p.shape, p._mt.stride, own)))
        if names[p] in training["others"]:
            found[index] = training["others"][names[p]] | own
    groups = [{**mine, **g, "params": mine["params"]} for g, mine in
              zip(training["groups"], torch.optim.Optimizer.state_dict(opt)["param_groups"])]
    opt.load_state_dict({"state": found, "param_groups": groups})
