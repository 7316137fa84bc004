"""Whether a checkpoint is this model's and this optimizer's, and what it would lose here. Nothing is changed."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import MegatrainError
from ..base.formats import LOW_BYTES
from ..base.strict import shown
from ..optim.adamw import AdamW
from ..optim.states import MOMENTS
from ..store.records import Record
from ..store.tensorfiles import DTYPES
from . import contents, manifest
from .parts import OURS, TORCHS, TRAINING, buffers_of, kind_of
from .source import Checkpoint

_SCRIPT = "__main__"


def match(source: Checkpoint, model: nn.Module, names: dict[Tensor, str], opt: torch.optim.Optimizer | None,
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
        why = (loses(source.body, name, record.dtype, record.runtime.states if isinstance(opt, AdamW) else None)
               or _loses_in_torch(saved[name], record, opt))
        if why and not convert:
            raise MegatrainError(f"{source.folder}: {name}: {why}; convert=True allows that")


def _match_form(name: str, saved: dict[str, Any], record: Record, opt: torch.optim.Optimizer | None) -> None:
    if tuple(saved["shape"]) != tuple(record.shape):
        raise MegatrainError(f"{name} is {saved['shape']} there and {list(record.shape)} here")
    if opt is not None and saved.get("strides", list(record.stride)) != list(record.stride):
        raise MegatrainError(f"{name} lies in memory with strides {saved['strides']} there and {list(record.stride)} "
                             "here, and its moments of 8 bits have scales in that order")


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


def _loses_in_torch(saved: dict[str, Any], record: Record, opt: torch.optim.Optimizer | None) -> str:
    """As `loses`, of states of mt.AdamW that another's takes."""
    if opt is None or isinstance(opt, AdamW) or "step" not in saved or record.dtype == torch.float32:
        return ""
    return f"its moments and master become {record.dtype} in {TORCHS}"


def _master_bits(kind: torch.dtype, low_bytes: int, master: str) -> int:
    if kind == torch.bfloat16:
        return 16 + 8 * low_bytes
    return 32 if kind != torch.float16 or master == "MASTER" else 16


def match_kind(source: Checkpoint, training: dict[str, Any], opt: torch.optim.Optimizer) -> None:
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


def _as_ours(source: Checkpoint, training: dict[str, Any]) -> None:
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


def match_groups(source: Checkpoint, training: dict[str, Any], opt: torch.optim.Optimizer,
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


def _match_torchs(source: Checkpoint, others: dict[str, Any], where: str) -> None:
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
