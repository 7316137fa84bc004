"""What a checkpoint is made of: tensors over the store's planes, and the small files beside them.

A frozen base is most of a run with adapters, and the same in each of its checkpoints. Such weights lie in files of
their own, which are written once: the next checkpoint has them by hard links. Each folder is whole by itself: a copy of
it has all, and none needs another to stay. Where files cannot be linked they are written. Names of these files are
nobody else's, so that what a save_pretrained into one folder writes in place is in no other.
"""
from __future__ import annotations

import ctypes
import io
import json
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .. import _core
from ..base.codes import coded, quantization_of
from ..base.errors import MegatrainError
from ..base.limits import show_bytes
from ..base.modes import LOW_BYTES, MODES, read, repeating
from ..optim.adamw import AdamW
from ..optim.states import follows, moment_planes
from ..store.guard import plain
from ..store.records import KINDS, Record
from ..store.tensorfiles import LENGTH_BYTES, Entry, Stored, TensorFile, packed
from . import manifest
from .manifest import ALONE, INDEX, MASTERS, TRAINING

if TYPE_CHECKING:
    from ..model.runtime import Runtime

OURS, TORCHS = "mt.AdamW", "torch.optim.AdamW"       # as kind_of says
LEAST_BYTES = 64 << 20               # of frozen weights, for files of their own

# Files of the last checkpoint, by their headers: their path; their `form`, which is what the file system said of them
# then; how often each of their weights had been written to, `writes`; what the manifest says `about` them.
Before = dict[bytes, SimpleNamespace]


@dataclass(frozen=True)
class Parts:
    """A checkpoint that is not written yet."""

    files: list[TensorFile]
    small: dict[str, bytes | memoryview]        # by file name
    body: dict[str, Any]        # of the manifest
    still: dict[str, tuple[int, ...]]   # of frozen weights' files, by name: how often each weight had been written to

    def without(self, names: set[str]) -> tuple[list[TensorFile], int]:
        """Files of tensors but for these; bytes of them and of what is small."""
        files = [f for f in self.files if f.name not in names]
        return files, sum(f.nbytes for f in files) + sum(map(len, self.small.values()))

    def unchanged(self, before: Before, folder: Path) -> set[str]:
        """Names of files whose bytes a file of the last checkpoint has, as it was written then, on the file system
        that `folder` will be on."""
        device, found = standing_parent(folder).stat().st_dev, set()
        for f in self.files:
            with suppress(OSError):
                if f.name in self.still and (w := before.get(f.header)) is not None \
                        and w.writes == self.still[f.name] and w.form[0] == device and form_of(w.path) == w.form:
                    found.add(f.name)
        return found

    def link(self, names: set[str], before: Before, folder: Path) -> set[str]:
        """Makes these in the folder; gives the names of those that it could. The others are to be written."""
        made = set()
        for f in self.files:
            with suppress(OSError):
                if f.name in names:
                    os.link(before[f.header].path, folder / f.name)
                    made.add(f.name)
        return made

    def noted(self, folder: Path) -> Before:
        """For the next checkpoint, when this one has its name."""
        with suppress(OSError):
            return {f.header: SimpleNamespace(path=folder / f.name, form=form_of(folder / f.name),
                                              writes=self.still[f.name], about=self.body["files"][f.name])
                    for f in self.files if f.name in self.still}
        return {}


def form_of(path: Path) -> tuple[int, ...]:
    s = path.stat()
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def loaded(folder: Path, body: dict[str, Any], records: dict[str, Record], tensors: dict[str, Stored]) -> Before:
    """As `Parts.noted`, of a checkpoint that was read. records, tensors: of weights, by name."""
    files: dict[str, list[str]] = {}
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].begin):
        files.setdefault(stored.file, []).append(name)
    found = {}
    for file, names in files.items():
        own = [records[name] for name in names if name in records]
        if len(own) == len(names) and all(map(is_still, own)):
            with suppress(OSError), (path := folder / file).open("rb") as f:
                length = f.read(LENGTH_BYTES)
                found[length + f.read(int.from_bytes(length, "little"))] = SimpleNamespace(
                    path=path, form=form_of(path), writes=tuple(r.writes for r in own), about=body["files"][file])
    return found


def is_still(record: Record) -> bool:
    """Frozen, and never stepped with: what changes it is a write, which is counted."""
    return record.optimizer is None and not record.param.requires_grad


def can_link(folder: Path) -> bool:
    """Has the file system of a folder, which may not be there yet, links?"""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=standing_parent(folder)) as there:
        (Path(there) / "file").touch()
        os.link(Path(there) / "file", Path(there) / "link")
        return True
    return False


def standing_parent(folder: Path) -> Path:
    """The folder itself, or the first one around it that is there."""
    return next(p for p in (folder, *folder.parents) if p.exists())


def parts_of(rt: Runtime, model: nn.Module, opt: torch.optim.Optimizer | None, scheduler: Any, extra: Any,
             randoms: list[Any], most: int) -> Parts:
    """When nothing is under way. randoms: states of random numbers, by rank. most: bytes of a file of tensors."""
    if isinstance(opt, AdamW):
        opt._catch_up()
        opt._take_states()
    names = names_of(model)
    with torch.no_grad():
        for r in rt.records:
            r.notice_write()
        rt.core.drain()
        weights, states = _weights(model, names), _states(opt, names)
    stem, records = "model" if _has_its_names(model) else "weights", {name: p._mt for p, name in names.items()}
    still = {e.name: e for e in weights if e.unit >= 0 and is_still(records[e.name])}
    apart = sum(e.memory.nbytes for e in still.values()) >= LEAST_BYTES
    frozen = packed([*still.values()], "frozen", most, beside=True) if apart else []
    rest = [e for e in weights if e.name not in still] if apart else weights
    files = frozen + (packed(rest, stem, most, beside=apart) if rest or not apart else [])
    files += packed(states, "states", most) if states else []
    small = {TRAINING: _training(opt, names, scheduler, extra, randoms), **_beside(model, files)}
    return Parts(files, small, _body(rt, opt, names, small),
                 {f.name: tuple(records[e.name].writes for e in f.entries) for f in frozen})


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """A name for each parameter: of tied ones the one that transformers saves them under, else the first."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    names: dict[Tensor, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p not in names or (names[p] in tied and name not in tied):
            names[p] = name
    found: dict[Tensor, str] = {}
    for p, name in names.items():            # one that is codes by its strands, as its package names them
        whole = p._mt.whole
        found |= {p: name} if whole is None else {
            r.param: whole.format.label(whole.param, name, key) if key else name
            for r, key in zip(whole.records, whole.names)}
    return found


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers, each under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, m in model.named_modules():
        for name, b in m._buffers.items():
            if isinstance(b, Tensor) and name not in m._non_persistent_buffers_set and id(b) not in seen:
                seen.add(id(b))
                found[f"{prefix}.{name}" if prefix else name] = b
    return found


def _weights(model: nn.Module, names: dict[Tensor, str]) -> list[Entry]:
    records = sorted(((p._mt, name) for p, name in names.items()), key=lambda item: (item[0].unit, item[0].index))
    beside = {k: t for p, name in names.items() if (w := p._mt.whole) is not None
              for k, t in w.format.beside(w.param, name).items()}
    buffers = [Entry(name, b.detach().to("cpu", copy=True).contiguous())
               for name, b in (buffers_of(model) | beside).items()]
    for name, memory in [(name, r.host) for r, name in records] + [(e.name, e.memory) for e in buffers]:
        if memory.dtype not in KINDS:
            raise MegatrainError(f"{name}: safetensors has no {memory.dtype}")
    # Over the planes themselves, whatever order they have (convolutions, channels last).
    return [Entry(name, r.view("HI"), r.unit, "HI") for r, name in records] + buffers


def _states(opt: torch.optim.Optimizer | None, names: dict[Tensor, str]) -> list[Entry]:
    if opt is None:
        return []
    if missing := [p for g in opt.param_groups for p in g["params"] if p not in names]:
        raise MegatrainError(f"the optimizer has a parameter of shape {list(missing[0].shape)} that is not the "
                             "model's: a checkpoint would lack it")
    found = []
    # Those of other optimizers are in training.pt, as their state_dict has them.
    stepped = [p for p, s in opt.state.items() if s] if isinstance(opt, AdamW) else []
    for _, _, p in sorted((p._mt.unit, p._mt.index, p) for p in stepped):
        r, name = p._mt, names[p]
        planes = moment_planes(r) | ({MASTERS[plane]: plane} if (plane := follows(r)) else {})
        found += [Entry(f"{name}.{key}", r.view(plane), r.unit, plane) for key, plane in planes.items()]
    return found


def held_by(files: list[TensorFile]) -> list[tuple[int, int]]:
    """(unit, planes) of all that is in them."""
    planes: dict[int, int] = {}
    for e in (e for f in files for e in f.entries if e.unit >= 0):
        planes[e.unit] = planes.get(e.unit, 0) | 1 << _core.PLANES[e.plane]
    return sorted(planes.items())


def _training(opt: torch.optim.Optimizer | None, names: dict[Tensor, str], scheduler: Any, extra: Any,
              randoms: list[Any]) -> memoryview:
    """The small things, serialised; what could not be read back is refused now."""
    whole: dict[str, Any] = {"random": randoms[0]} | ({"random_by_rank": randoms} if len(randoms) > 1 else {})
    if opt is not None:
        packed_groups = torch.optim.Optimizer.state_dict(opt)["param_groups"]
        whole["groups"] = [{**g, "params": [names[p] for p in own["params"]]}
                           for g, own in zip(packed_groups, opt.param_groups)]
        if not isinstance(opt, AdamW):
            whole["others"] = tree_map_only(Tensor, _alone, opt.state_dict())
    for what, value in (("scheduler", scheduler.state_dict() if scheduler is not None else None), ("extra", extra)):
        whole[what] = value
        _serialised({what: value}, f"{what}: what mt.save is given must be tensors, numbers, strings, and containers "
                                   "of these")
    return _serialised(whole, "the optimizer's groups, or states of another than mt.AdamW")


def _alone(t: Tensor) -> Tensor:
    """Without its guard, and of a larger memory its own part: a pickle has all of a tensor's memory."""
    t = plain(t)
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t


def _serialised(value: Any, what: str) -> memoryview:
    memory = io.BytesIO()
    try:
        torch.save(value, memory)
        memory.seek(0)
        torch.load(memory, weights_only=True, map_location="meta")       # so that no second copy of it all is made
    except Exception as e:
        raise MegatrainError(f"{what}: it cannot be loaded back ({e})") from e
    return memory.getbuffer()


def _beside(model: nn.Module, files: list[TensorFile]) -> dict[str, bytes]:
    """What transformers wants beside the weights: their index where they are not in one file, and configs."""
    found: dict[str, bytes] = {}
    if not _has_its_names(model):
        return found
    own = [f for f in files if not f.name.startswith("states")]
    if [f.name for f in own] != [ALONE]:
        index = {"metadata": {"total_size": sum(e.memory.nbytes for f in own for e in f.entries)},
                 "weight_map": {e.name: f.name for f in own for e in f.entries}}
        found[INDEX] = json.dumps(index, indent=1, sort_keys=True).encode()
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    if hasattr(config, "to_json_string"):
        config.architectures = [type(model).__name__]        # as save_pretrained notes class and type first
        config.dtype = str(model.dtype).split(".")[1]
        text = config.to_json_string(use_diff=True)
        if (said := quantization_of(model)) is not None:
            text = json.dumps(json.loads(text) | {"quantization_config": said}, indent=2, sort_keys=True) + "\n"
        found["config.json"] = text.encode()
    if hasattr(generation, "to_json_string"):
        found["generation_config.json"] = generation.to_json_string(use_diff=True).encode()
    return found


def _has_its_names(model: nn.Module) -> bool:
    """Are transformers' parameters in it under the names that from_pretrained looks for? A wrapper, or an adapter,
    changes them; from what it takes for its files it would make a model of random weights, with a warning."""
    if any(not format.reloads(p) for _, _, p, format in coded(model)):
        return False
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not any(isinstance(m, modeling.PreTrainedModel) for m in model.modules()):
        return True
    return isinstance(model, modeling.PreTrainedModel) and not getattr(model, "_hf_peft_config_loaded", False)


def kind_of(opt: torch.optim.Optimizer | None) -> str | None:
    """Package and class of an optimizer: several packages have an AdamW."""
    kind = type(opt)
    if opt is None:
        return None
    if kind is AdamW:
        return OURS
    package = kind.__module__.partition(".")[0]
    return f"{'torch.optim' if package == 'torch' else package}.{kind.__name__}"


def _body(rt: Runtime, opt: torch.optim.Optimizer | None, names: dict[Tensor, str],
          small: dict[str, bytes | memoryview]) -> dict[str, Any]:
    ours = isinstance(opt, AdamW)
    parameters = {name: {"dtype": KINDS[p._mt.dtype], "shape": list(p._mt.shape)} for p, name in names.items()}
    if ours:
        for p, s in opt.state.items():
            if s:
                parameters[names[p]] |= {"step": int(s["step"]), "master": follows(p._mt)}
                if rt.states != "fp32":      # scales are of elements that are neighbours in memory
                    parameters[names[p]]["strides"] = list(p._mt.stride)
        for p, key in opt._keys.items():
            if p in names:                              # else it was taken out of model and optimizer
                parameters[names[p]]["key"] = key
    return {"written_by": f"megatrain_torch {_core.__version__}", "parameters": parameters,
            "optimizer": kind_of(opt),
            "states": rt.states if ours else None, "low_bytes": LOW_BYTES[rt.states],
            "skipped_steps": opt._skipped if ours else 0, "likeness": likeness(rt),
            "files": {name: {"bytes": len(data), "sha256": manifest.sha256(data)} for name, data in small.items()}}


# ---- whose kernels a run's bits are of -----------------------------------------------------------
#
# The same operands give the same bits where device, libraries and what was asked for are the same, and where layers
# keep the same activations: one whose gate|up is not kept goes through it in tiles, and its weight gradients are summed
# in another order. What layers keep by a plan that mt.stream made itself follows from memory, so a run that goes on is
# given what it had.

def likeness(rt: Runtime) -> dict[str, Any]:
    """For a checkpoint: plain numbers and text."""
    versions = {"megatrain_torch": _core.__version__, "torch": torch.__version__}
    if rt.is_cuda:
        versions |= {"device": torch.cuda.get_device_name(rt.device), "cuBLASLt": "",
                     "cuDNN": str(torch.backends.cudnn.version())}
        for name in ("libcublasLt.so.13", "libcublasLt.so.12"):          # the one that torch has loaded
            with suppress(OSError, AttributeError):
                version = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).cublasLtGetVersion
                version.restype = ctypes.c_size_t
                versions["cuBLASLt"] = versions["cuBLASLt"] or str(version())
    else:
        versions |= {"processor": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}
    # By the tokens of a pass what windows keep by plans that mt.stream made itself.
    chosen = {} if rt.planning is None else {str(tokens): modes for tokens, modes in rt.planning.kept().items()}
    return {"versions": versions, "repeating": repeating(), "compute": rt.compute, "products": rt.products,
            "memory": _memory(rt), "tokens": rt.keeps.most_tokens, "kept": rt.keeps.fused(), "chosen": chosen,
            "planned": [] if rt.planning is None else rt.planning.planned()}


def go_on(rt: Runtime, saved: dict[str, Any]) -> None:
    """Before states come: what the saved run was planned for is planned for here, at once, and what its layers chose to
    keep, this one's keep. saved: as `known` gives it."""
    if not saved or rt.planning is None:
        return
    if saved["memory"] == _memory(rt) and saved["chosen"]:
        rt.planning.resumed = {int(tokens): modes for tokens, modes in saved["chosen"].items()}
    if len(saved["planned"]) == 3 and all(type(n) is int and n > 0 for n in saved["planned"]):
        rt.planning.resumes(*saved["planned"])


def differences(rt: Runtime, saved: dict[str, Any]) -> list[str]:
    """What this run does otherwise than the one that goes on here, in words. saved: as for `go_on`."""
    if not saved:
        return []
    here = likeness(rt)
    if saved["memory"] == here["memory"] and saved["chosen"] and rt.planning is not None:
        here["kept"] = saved["kept"]             # of passes of the same length
    there, mine = (n["versions"] | {"compute": n["compute"], "products": n["products"],
                                    "torch.use_deterministic_algorithms": n["repeating"]} for n in (saved, here))
    found = [f"{what} {there.get(what, 'none')} there and {value} here" for what, value in mine.items()
             if there.get(what) != value]
    # Layers with many tokens that go through gate|up in tiles now and did not, or the reverse.
    many = [w for w in rt.windows if w.fused is not None and w.name in saved["kept"]
            and 0 < w.fused.sizes.tiled[1] < saved["tokens"]]
    differ = [w for w in many if w.name in here["kept"]
              and len({read(kept[w.name]).keep == "saved" for kept in (saved["kept"], here["kept"])}) == 2]
    if differ:
        found.append(f"{len(differ)} layers keep other activations ({differ[0].name}: {saved['kept'][differ[0].name]} "
                     f"there and {here['kept'][differ[0].name]} here)")
    elif saved["memory"] != here["memory"] and any(w.name not in here["kept"] for w in many):
        sizes = " and ".join(f"{show_bytes(m[1] or m[0])} {where}" for m, where in
                             ((saved["memory"], "there"), (here["memory"], "here")))
        found.append(f"device memory {sizes}, for which layers choose what they keep")
    return found


def known(rt: Runtime, saved: Any) -> dict[str, Any]:
    """What `likeness`, of this version or an older one, has put into a checkpoint; {}: anything else is there."""
    here = likeness(rt)
    found = {"planned": [], "products": "bf16"} | saved if isinstance(saved, dict) else {}
    good = (all(type(found.get(k)) is type(v) for k, v in here.items())
            and all(tokens.isdecimal() and isinstance(modes, dict) for tokens, modes in found["chosen"].items())
            and all(mode in MODES for modes in (found["kept"], *found["chosen"].values()) for mode in modes.values())
            and [type(n) for n in found["memory"]] == [int, int])
    return found if good else {}


def _memory(rt: Runtime) -> list[int]:
    """Of the device, and the limit of what may be used; 0: there is none."""
    total = torch.cuda.get_device_properties(rt.device).total_memory if rt.is_cuda else 0
    limit = rt.cap.limit if rt.planning is None else rt.planning.choices.vram
    return [total, limit or 0]
