"""mt.save: everything a run needs to go on with the same bits, written straight from the store.

    model-00001-of-00003.safetensors ...   weights and persistent buffers, with model.safetensors.index.json and
                                            config.json as transformers has them: `from_pretrained(folder)` reads it
                                            (weights-..., without these, of a transformers model with an adapter)
    states-00001-of-00009.safetensors ...  AdamW's planes as they are, unit by unit
    training.pt                            groups, scheduler, random states, `extra`: torch.load(weights_only=True)
    manifest.json                          sizes, sums, what belongs to which parameter (manifest.py)

No second copy of the model is made: the engine copies blocks of 4 MiB out of the planes and writes them, unit by unit
(csrc/io/shards.h); what a unit has on the device or on disk is in host memory until its bytes are copied. What is
saved is one step's: everything under way ends first, and from then on each unit's next update, and writes from
outside, wait until its bytes are copied. So asynchronously training goes on while the disk writes, as far ahead as
`spare` memory allows: with none, the next step's updates wait for the disk; with as much as the checkpoint is large,
for a copy alone.
"""
from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _core, likeness, manifest
from .contents import MASTERS
from .errors import MegatrainError
from .formats import LOW_BYTES
from .guard import plain
from .limits import host_limits, parse_bytes, show_bytes
from .moments import CODES, MOMENTS
from .optim import AdamW
from .records import Record
from .registry import runtime_of
from .tensorfiles import KINDS, Entry, TensorFile, packed

if TYPE_CHECKING:
    from .runtime import Runtime

FILE_BYTES = 5 * 10**9               # of a file of tensors, at most
# Threads. A copier sums as it copies: 2.2 to 2.9 GB/s (Zen 4 server of 2 cores). The update that follows an
# asynchronous save waits for it, so there are as many as cores allow; of 16 cores 12 had a step wait 2.0 s for 46 GB, 4
# another 2.3, both in memory that was used for the first time.
COPIERS, WRITERS = max(4, min(16, _core.build_info()["cpus"] * 3 // 4)), 8
LEAST_BYTES = (COPIERS + WRITERS) * (4 << 20)        # of blocks on their way: one for each thread
SPARE_BYTES = 2 << 30                # of an asynchronous save, unless it is said, or there is less
POLL_S = 0.25                        # between two calls of progress
TRIAL_BYTES, TRIAL_PIECE = 256 << 20, 4 << 20        # that a dry run writes, to tell the disk's rate: at most, at least
TRAINING = "training.pt"
INDEX = "model.safetensors.index.json"
OWN_FILES = ("config.json", "generation_config.json")
OURS, TORCHS = "mt.AdamW", "torch.optim.AdamW"       # as kind_of says
_AS_BEFORE = ", and what was there before is as it was"


@dataclass(frozen=True)
class SavePlan:
    """What a dry run found.

    Attributes:
        bytes, files: of the checkpoint.
        free: bytes of the file system. rate: bytes/s written there.
    """

    bytes: int
    files: tuple[str, ...]
    free: int
    rate: float

    @property
    def seconds(self) -> float:
        """That writing it takes at that rate."""
        return self.bytes / self.rate

    def __str__(self) -> str:
        return (f"{show_bytes(self.bytes)} in {len(self.files)} files, about {self.seconds:.1f} s at "
                f"{self.rate / 1e9:.2f} GB/s; {show_bytes(self.free)} are free")


class Saving:
    """A save that was begun. `wait()` returns when it is over, and raises what went wrong, each time.

    Attributes:
        folder: the name it takes, or has.
        bytes: of its tensors' files. seconds: from the call until it had its name; 0.0 before.
        held: seconds for which the caller waited: for updates under way, and for what is small to be copied.
    """

    def __init__(self, folder: Path, nbytes: int, progress: Callable[[int, int], None] | None) -> None:
        self.folder, self.bytes = folder, nbytes
        self.seconds = self.held = 0.0
        self._progress, self._begun = progress, time.perf_counter()
        self._over = threading.Event()       # not the thread's own: a join that is interrupted takes it for dead
        self._process = os.getpid()          # whose thread it is
        self._error: BaseException | None = None
        self._named = False                  # it has its name: what failed came after
        self._told = False                   # its end was noticed: no later call needs to tell of it
        self._taken = threading.Lock()       # whoever has it ends the save: its thread or the caller's; never let go

    @property
    def over(self) -> bool:
        """Nothing is being written any more, whether it succeeded or failed."""
        return self._over.is_set()

    def wait(self) -> Saving:
        """Returns itself when the checkpoint has its name and is on the disk.

        Raises:
            MegatrainError: it could not be written, and the one before is as it was; or it has its name, and whether
                that is on the disk is not known.
        """
        self._wait()
        self._told = True
        self._raise()
        return self

    def check(self) -> None:
        """Raises what went wrong, unless somebody was told of it; waits for nothing."""
        if self.over and not self._told:
            self._told = True
            self._raise()

    def _finish(self) -> None:
        """As `check()`, when it is over."""
        self._wait()
        self.check()

    def _wait(self) -> None:
        if not self.over and os.getpid() != self._process:
            raise MegatrainError(f"{self.folder}: this process was forked from the one that writes it; wait there")
        self._over.wait()

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if not isinstance(error, Exception):                 # an interruption stays one
            raise error
        if self._named:
            raise MegatrainError(f"{self.folder} is whole and has its name, but the disk may not know it yet: "
                                 f"{error}") from error
        raise MegatrainError(f"saving {self.folder} failed{_AS_BEFORE}: {error}") from error

    # ---- the work, on the caller's thread or on its own ----

    def _run(self, core: _core.Engine, draft: manifest.Draft, small: dict[str, bytes], body: dict[str, Any],
             files: list[TensorFile], _memory: Any) -> None:
        try:
            self._follow(core)
            for f, sums in zip(files, core.save_end()):
                body["files"][f.name] = {"bytes": f.nbytes, "sums": sums.hex()}
            for name, data in small.items():
                manifest.write(draft.path / name, data)
            manifest.write(draft.path / manifest.NAME, manifest.dump(body))
            draft.publish()
        except BaseException as e:
            self._error, self._named = e, draft.published
            _give_up(core)
            draft.drop()
        finally:
            self.seconds = time.perf_counter() - self._begun
            self._over.set()

    def _follow(self, core: _core.Engine) -> None:
        over = False
        while not over:
            done, over = core.save_wait(POLL_S)
            if self._progress is not None:
                self._progress(done, self.bytes)

    def _run_if_left(self, *work: Any) -> None:
        if self._taken.acquire(blocking=False):
            self._run(*work)

    def _start(self, asynchronous: bool, *work: Any) -> None:
        self.held = time.perf_counter() - self._begun
        if asynchronous:
            try:
                threading.Thread(target=self._run_if_left, args=work, name="mt-save").start()    # no daemon: it ends it
                return
            except RuntimeError:             # the system has no thread to give: at once, then
                pass
        self._run(*work)
        self.held = self.seconds
        if not isinstance(self._error, Exception):           # an interruption is the caller's, now
            self.check()


def _give_up(core: _core.Engine) -> None:
    try:
        core.save_end()
    except MegatrainError:                   # it was over, or the engine is gone
        return


def save(model: nn.Module, opt: torch.optim.Optimizer | None, folder: str | Path, *, scheduler: Any = None,
         extra: Any = None, asynchronous: bool = False, spare: int | str | None = None, dry_run: bool = False,
         progress: Callable[[int, int], None] | None = None) -> Saving | SavePlan:
    """Writes a checkpoint: weights, optimizer states, scheduler, random states. mt.load takes it.

    Call it between steps. The folder appears, whole and synced, under its name, or replaces the checkpoint that has
    it; until then that one is untouched. Files that somebody put beside a checkpoint's own stay.

    transformers' from_pretrained reads the folder, but for a PeftModel, or another model around transformers' own,
    whose weights it does not know by their names: then they are in files that it does not take, without config.json.
    `model.save_pretrained(folder)` after each save adds PEFT's files of the adapter alone, for
    `PeftModel.from_pretrained(base, folder)`.

    Args:
        model: the streamed model.
        opt: mt.AdamW, or a torch optimizer over its parameters (whose states are copied); None: weights alone.
        folder: a name that is free, or that of a checkpoint.
        scheduler: whatever has `state_dict()`: a learning rate scheduler, a data loader that knows its position.
        extra: tensors, numbers, strings, and lists, tuples and dicts of these: what else the run must know.
        asynchronous: return as soon as what is to be saved is held; the next save, load, forward or `wait()` of what is
            returned tells of a failure.
        spare: host memory for blocks that are copied and not yet written (bytes or "8GiB"). None: 2 GiB where
            asynchronous and so much is free, else the least, 4 MiB for each thread. Besides, what a unit has on the
            device or on disk is in host memory while it is copied, one unit at a time.
        dry_run: write nothing but a trial of the disk: check that the folder can be made, that there is room, that all
            can be serialised; return a SavePlan.
        progress: called with (bytes written, bytes in all) four times a second, from the thread that writes.

    Raises:
        MegatrainError: the model is not streamed, or was streamed anew since its mt.AdamW was made; gradients of an
            unfinished step stand; `extra` or the scheduler's state cannot be loaded back; there is no room on the disk
            or in host memory, or no permission; or writing failed. Nothing is lost then.
    """
    rt = runtime_of(model)
    _check(rt, model, opt)
    rt.finish_save()
    folder = Path(folder).absolute()
    begun = time.perf_counter()
    parts = _parts(rt, model, opt, scheduler, extra)
    room, held = parse_bytes(spare, "spare"), _held(rt, parts.tensors)
    _check_room(folder, parts.nbytes, room or 0)
    blocks = min(SPARE_BYTES, parts.nbytes)
    if room is None:
        room = blocks if asynchronous and rt.room.may_save(rt.core, held, blocks) else 0
    rt.room.saving(rt.core, held, min(max(room, LEAST_BYTES), parts.nbytes))
    if dry_run:
        return _trial(folder, parts.nbytes, [f.name for f in parts.files] + [*parts.small, manifest.NAME])
    saving = Saving(folder, sum(f.nbytes for f in parts.files), progress)
    saving._begun = begun
    _begin(rt, saving, parts, held, asynchronous, room)
    if not asynchronous:
        saving.check()
    return saving


# ---- what it is made of, and its beginning -------------------------------------------------------

@dataclass(frozen=True)
class _Parts:
    """A checkpoint that is not written yet.

    Attributes:
        tensors: all of them, as their files have them. small: {file name: its bytes}. body: of the manifest.
    """

    files: list[TensorFile]
    tensors: list[Entry]
    small: dict[str, bytes]
    body: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files) + sum(len(data) for data in self.small.values())


def _parts(rt: Runtime, model: nn.Module, opt: torch.optim.Optimizer | None, scheduler: Any, extra: Any) -> _Parts:
    """When nothing is under way."""
    if isinstance(opt, AdamW):
        opt._settle()
    names = names_of(model)
    with torch.no_grad():
        rt.notice_writes(rt.records)
        rt.core.drain()
        weights, states = _weights(model, names), _states(opt, names)
    stem = "model" if _has_its_names(model) else "weights"
    files = packed(weights, stem, FILE_BYTES) + (packed(states, "states", FILE_BYTES) if states else [])
    small = {TRAINING: _training(opt, names, scheduler, extra), **_beside(model, files)}
    return _Parts(files, weights + states, small, _body(rt, opt, names, small))


def _begin(rt: Runtime, saving: Saving, parts: _Parts, held: list[tuple[int, int]], asynchronous: bool, spare: int
           ) -> None:
    """A folder beside the one that it will be, and the work; what was begun is given up where that fails."""
    draft, asked_for = manifest.Draft(saving.folder), False
    try:
        located = [f.located(draft.path) for f in parts.files]
        asked_for = True
        rt.core.save_begin([where for where, _ in located], held, spare, COPIERS, WRITERS)
        rt.saving = saving if asynchronous else None         # before its thread is there: start() may be interrupted
        saving._start(asynchronous, rt.core, draft, parts.small, parts.body, parts.files, (located, parts.tensors))
    except BaseException as e:
        if saving._taken.acquire(blocking=False):            # else its thread goes on with it
            rt.saving = None
            if asked_for and not isinstance(e, MegatrainError):      # which save_begin raises where it begins nothing
                _give_up(rt.core)
            draft.drop()
        if not isinstance(e, Exception):
            raise
        raise MegatrainError(f"saving {saving.folder} failed{_AS_BEFORE}: {e}") from e


# ---- what is refused -----------------------------------------------------------------------------

def _check(rt: Runtime, model: nn.Module, opt: torch.optim.Optimizer | None) -> None:
    if rt.root() is not model:
        raise MegatrainError("save the model that was given to mt.stream, not a part of it")
    if rt.broken:
        raise MegatrainError(rt.broken)
    if isinstance(opt, AdamW):
        opt._check_served()
    with torch._C.DisableTorchFunctionSubclass():
        standing = [r.name for r in rt.records if r.param is not None and r.param.grad is not None]
    if isinstance(opt, AdamW) and rt.handover.unstepped and standing:
        raise MegatrainError(f"gradients of {len(standing)} parameters ({standing[0]} ...) came since the last step, "
                             "and a checkpoint has none: save behind opt.step(), or drop them with opt.zero_grad()")


def _check_room(folder: Path, need: int, spare: int) -> None:
    where = folder
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    if need > free:
        raise MegatrainError(f"{folder}: the checkpoint takes {show_bytes(need)} and {show_bytes(free)} are free in "
                             f"{where}: free {show_bytes(need - free)}, or name another folder")
    bound = host_limits().short(spare) if spare else None
    if bound is not None:
        raise MegatrainError(f"spare={spare}: there is no host memory for that ({bound}); less makes training wait for "
                             "the disk instead")


def _trial(folder: Path, need: int, files: list[str]) -> SavePlan:
    draft = manifest.Draft(folder)
    try:
        nbytes = max(min(need, TRIAL_BYTES), TRIAL_PIECE)
        rate = _core.disk_measure(str(draft.path), nbytes, TRIAL_PIECE, WRITERS, WRITERS)
        return SavePlan(need, tuple(files), shutil.disk_usage(draft.path).free, rate["fresh"])
    finally:
        draft.drop()


# ---- what is written -----------------------------------------------------------------------------

def names_of(model: nn.Module) -> dict[Tensor, str]:
    """A name for each parameter: of tied ones the one that transformers saves them under, else the first."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    names: dict[Tensor, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p not in names or (names[p] in tied and name not in tied):
            names[p] = name
    return names


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


def state_planes(record: Record) -> dict[str, str]:
    """Names in a checkpoint of the planes that hold a parameter's states, by plane; without the master's."""
    return dict(zip(("M", "V", "SCALE"), MOMENTS if record.runtime.states == "fp32" else CODES))


def master_plane(record: Record) -> str:
    """The plane that makes an fp32 master of the weight; "": there is none, or it does not follow the weight."""
    if record.master_writes != record.writes or record.master_writes < 0:
        return ""
    return "LO" if record.low_bytes else "MASTER" if record.dtype == torch.float16 else ""


def _entry(record: Record, plane: str, name: str) -> Entry:
    """Over the plane itself, whatever order it has (convolutions, channels last)."""
    return Entry(name, record.view(plane), record.unit, plane)


def _weights(model: nn.Module, names: dict[Tensor, str]) -> list[Entry]:
    records = sorted(((p._mt, name) for p, name in names.items()), key=lambda item: (item[0].unit, item[0].index))
    buffers = [Entry(name, b.detach().to("cpu", copy=True).contiguous()) for name, b in buffers_of(model).items()]
    for name, memory in [(name, r.host) for r, name in records] + [(e.name, e.memory) for e in buffers]:
        if memory.dtype not in KINDS:
            raise MegatrainError(f"{name}: safetensors has no {memory.dtype}")
    return [_entry(r, "HI", name) for r, name in records] + buffers


def _states(opt: torch.optim.Optimizer | None, names: dict[Tensor, str]) -> list[Entry]:
    if opt is None:
        return []
    if missing := [p for g in opt.param_groups for p in g["params"] if p not in names]:
        raise MegatrainError(f"the optimizer has a parameter of shape {list(missing[0].shape)} that is not the "
                             "model's: a checkpoint would lack it")
    if isinstance(opt, AdamW):
        stepped = sorted((p._mt.unit, p._mt.index, p) for p, s in opt.state.items() if s)
        return [e for _, _, p in stepped for e in _planes(p._mt, names[p])]
    return [Entry(f"{names[p]}.{key}", plain(t).to("cpu", copy=True).contiguous())
            for p, s in opt.state.items() for key, t in s.items() if isinstance(t, Tensor) and t.dim() > 0]


def _planes(record: Record, name: str) -> list[Entry]:
    found = [_entry(record, plane, f"{name}.{key}") for plane, key in state_planes(record).items()]
    if plane := master_plane(record):
        found.append(_entry(record, plane, f"{name}.{MASTERS[plane]}"))
    return found


def _held(rt: Runtime, entries: list[Entry]) -> list[tuple[int, int]]:
    """(unit, planes) of all that is in files."""
    planes: dict[int, int] = {}
    for e in entries:
        if e.unit >= 0:
            planes[e.unit] = planes.get(e.unit, 0) | 1 << _core.PLANES[e.plane]
    return sorted(planes.items())


def _training(opt: torch.optim.Optimizer | None, names: dict[Tensor, str], scheduler: Any, extra: Any) -> bytes:
    """The small things, serialised; what could not be read back is refused now."""
    whole: dict[str, Any] = {"random": random_states()}
    if opt is not None:
        packed_groups = torch.optim.Optimizer.state_dict(opt)["param_groups"]
        whole["groups"] = [{**g, "params": [names[p] for p in own["params"]]}
                           for g, own in zip(packed_groups, opt.param_groups)]
        if not isinstance(opt, AdamW):
            whole["others"] = {names[p]: {k: v for k, v in s.items() if not isinstance(v, Tensor) or v.dim() == 0}
                               for p, s in opt.state.items()}
    for what, value in (("scheduler", scheduler.state_dict() if scheduler is not None else None), ("extra", extra)):
        whole[what] = value
        _serialised({what: value}, f"{what}: what mt.save is given must be tensors, numbers, strings, and containers "
                                   "of these")
    return _serialised(whole, "the optimizer's groups")


def _serialised(value: Any, what: str) -> bytes:
    memory = io.BytesIO()
    try:
        torch.save(value, memory)
        memory.seek(0)
        torch.load(memory, weights_only=True, map_location="cpu")
    except Exception as e:
        raise MegatrainError(f"{what}: it cannot be loaded back ({e})") from e
    return memory.getvalue()


def random_states() -> dict[str, Any]:
    """Of Python, NumPy, torch on the CPU, and on each CUDA device that was used."""
    numpy = sys.modules.get("numpy")
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        name, keys, *rest = states["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        for index, state in enumerate(states["cuda"][:torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)


def _beside(model: nn.Module, files: list[TensorFile]) -> dict[str, bytes]:
    """What transformers wants beside the weights: their index where they are in several files, and configs."""
    found = {}
    own = [f for f in files if f.name.startswith("model")]
    if len(own) > 1:
        index = {"metadata": {"total_size": sum(e.nbytes for f in own for e in f.entries)},
                 "weight_map": {e.name: f.name for f in own for e in f.entries}}
        found[INDEX] = json.dumps(index, indent=1, sort_keys=True).encode()
    if _has_its_names(model):
        for name, config in zip(OWN_FILES, (getattr(model, "config", None), getattr(model, "generation_config", None))):
            if hasattr(config, "to_json_string"):
                found[name] = _config(model, config).encode()
    return found


def _has_its_names(model: nn.Module) -> bool:
    """Are transformers' parameters in it under the names that from_pretrained looks for? A wrapper, or an adapter,
    changes them; from what it takes for its files it would make a model of random weights, with a warning."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not any(isinstance(m, modeling.PreTrainedModel) for m in model.modules()):
        return True
    return isinstance(model, modeling.PreTrainedModel) and not getattr(model, "_hf_peft_config_loaded", False)


def _config(model: nn.Module, config: Any) -> str:
    """As save_pretrained writes it, which notes the class and the type first."""
    if config is getattr(model, "config", None):
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).split(".")[1]
    return config.to_json_string(use_diff=True)


def kind_of(opt: torch.optim.Optimizer | None) -> str | None:
    """Package and class of an optimizer: several packages have an AdamW."""
    kind = type(opt)
    if opt is None or kind is AdamW:
        return None if opt is None else OURS
    package = kind.__module__.partition(".")[0]
    return f"{'torch.optim' if package == 'torch' else package}.{kind.__name__}"


def _body(rt: Runtime, opt: torch.optim.Optimizer | None, names: dict[Tensor, str],
          small: dict[str, bytes]) -> dict[str, Any]:
    ours = isinstance(opt, AdamW)
    parameters = {name: {"dtype": KINDS[p._mt.dtype], "shape": list(p._mt.shape)} for p, name in names.items()}
    if ours:
        for p, s in opt.state.items():
            if s:
                parameters[names[p]] |= {"step": opt._counts[p], "master": master_plane(p._mt)}
                if rt.states != "fp32":      # scales are of elements that are neighbours in memory
                    parameters[names[p]]["strides"] = list(p._mt.stride)
        for p, key in opt._keys.items():
            parameters[names[p]]["key"] = key
    return {"written_by": f"megatrain_torch {_core.__version__}", "parameters": parameters,
            "optimizer": kind_of(opt),
            "states": rt.states if ours else None, "low_bytes": LOW_BYTES[rt.states],
            "skipped_steps": opt._skipped if ours else 0, "likeness": likeness.note(rt),
            "files": {name: {"bytes": len(data), "sha256": manifest.sha256(data)} for name, data in small.items()}}


__all__ = ["SavePlan", "Saving", "save"]
