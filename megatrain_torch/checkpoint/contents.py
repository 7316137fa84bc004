"""A checkpoint as it lies in its folder: what its manifest says, what its files have, and how they are read.

A sum says that a file is as somebody wrote it, and not that it was mt.save. So each name, type and number of the
manifest, the index and training.pt that restore.py goes by is looked at here, before anything is loaded; the message
names the file, where in it, and what is needed there.
"""
from __future__ import annotations

import io
import math
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..base import strict
from ..base.errors import MegatrainError
from ..base.modes import GROUP, LOW_BYTES
from ..base.strict import is_count, shown, table
from ..optim.states import CODES, MOMENTS, STEPS
from ..store.tensorfiles import DTYPES, READERS, Extent, Stored, listed
from . import manifest

TRAINING = "training.pt"
INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
MASTERS = {"LO": "master_low", "MASTER": "master"}
BLOCK = _core.BLOCK_BYTES           # of a file, that have a sum of 8 bytes
_HEX = re.compile(r"([0-9a-f]{2})*")


@dataclass
class Checkpoint:
    """A folder, its manifest's body, what its files of tensors have, and what training.pt has, which lies `where`."""

    folder: Path
    body: dict[str, Any]
    where: str
    training: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    states: dict[str, Stored] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """All that is in it is checked but the tensors' bytes."""
        manifest.recover(folder)
        where = str(folder / manifest.NAME)
        found = Checkpoint(folder, manifest.read(folder), str(folder / TRAINING))
        with manifest.adding(manifest.BROKEN):
            _check_body(found.body, where)
            for name, about in found.body["files"].items():
                path = manifest.inside(folder, name)
                size = path.stat().st_size if path.is_file() else None
                if size != about["bytes"]:
                    raise MegatrainError(f"{path} {'is missing' if size is None else f'has {size} bytes'}, and "
                                         f"{about['bytes']} were written")
                if name.endswith(".safetensors"):
                    mine, there = found.states if name.startswith("states") else found.tensors, listed(path)
                    if twice := sorted(there.keys() & mine.keys()):
                        raise MegatrainError(f"{path} has {shown(twice[0])}, which is in {mine[twice[0]].file} too")
                    mine.update(there)
            for name, about in found.body["parameters"].items():
                _check_stored(found.tensors, name, DTYPES[about["dtype"]], tuple(about["shape"]), where)
                if "step" in about:
                    _check_states(found.body, name, found.states, where)
            found.training = training_of(found.bytes_of(TRAINING), found.where, found.body["optimizer"] is not None)
        return found

    def verify(self, part: int, parts: int) -> None:
        """Reads everything, before anything is changed; of files of tensors one of so many parts."""
        with manifest.adding(manifest.BROKEN):
            for name, about in self.body["files"].items():
                if "sums" not in about:
                    self.bytes_of(name)
                elif parts == 1:
                    self.read(name, [])
                elif blocks := range(part, -(-about["bytes"] // BLOCK), parts):
                    memory = torch.empty(len(blocks), dtype=torch.uint8)         # a byte of each: so it is compared
                    self.read(name, [(b * BLOCK, memory.data_ptr() + i, 1, -1) for i, b in enumerate(blocks)])

    def read(self, name: str, extents: list[Extent]) -> None:
        about = self.body["files"][name]
        _core.read_file((str(self.folder / name), about["bytes"], extents), bytes.fromhex(about["sums"]), READERS)

    def bytes_of(self, name: str) -> bytes:
        data = (self.folder / name).read_bytes()
        if manifest.sha256(data) != self.body["files"][name]["sha256"]:
            raise MegatrainError(f"{self.folder / name} is not as it was written (its checksum differs)")
        return data


class Reads:
    """What is to be read, by file: together, so that each file is gone through once for a unit."""

    def __init__(self, source: Checkpoint) -> None:
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


# ---- the manifest's body -------------------------------------------------------------------------

def _check_body(body: Any, where: str) -> None:
    """Raises: MegatrainError: something in it is missing, or is not what it must be."""
    def wanted(name: str, fits: Any, what: str) -> Any:
        return strict.field(body, name, fits, what, where)

    table(body, where)
    wanted("optimizer", lambda v: v is None or isinstance(v, str), "a name or null")
    states = wanted("states", lambda v: v is None or v in tuple(LOW_BYTES), "a format of states or null")
    wanted("low_bytes", lambda v: type(v) is int and v in ((0, 1, 2) if states is None else (LOW_BYTES[states],)),
           "the bytes of these states' masters")
    wanted("skipped_steps", is_count, "a whole number")
    files = wanted("files", lambda v: isinstance(v, dict), "a table of files")
    for name, about in files.items():
        if not strict.is_plain_name(name):
            raise MegatrainError(f"{where}: the file name {shown(name)} leads out of the folder")
        here = f"{where}: file {name}"
        size = strict.field(table(about, here), "bytes", is_count, "a whole number", here)
        if not name.endswith(".safetensors"):
            strict.field(about, "sha256", lambda v: _is_hex(v, 64), "a SHA-256", here)
            continue
        if not manifest.TENSORS.fullmatch(name):
            raise MegatrainError(f"{here}: files of tensors are called model, weights or states")
        blocks = -(-size // BLOCK)
        strict.field(about, "sums", lambda v, n=16 * blocks: _is_hex(v, n), f"{blocks} sums in hexadecimal", here)
    if TRAINING not in files:
        raise MegatrainError(f"{where} names no {TRAINING}: files has {shown(list(files))}")
    for name, about in wanted("parameters", lambda v: isinstance(v, dict), "a table").items():
        _check_parameter(about, f"{where}: parameter {shown(name)}", body)


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None and len(value) == digits


def _check_parameter(about: Any, where: str, body: dict[str, Any]) -> None:
    kind = strict.field(table(about, where), "dtype", lambda v: isinstance(v, str) and v in DTYPES, "a type", where)
    shape = strict.field(about, "shape", strict.is_shape, "a list of sizes", where)
    if "step" in about:
        if body["states"] is None:
            raise MegatrainError(f"{where} has a step, and the checkpoint no states of mt.AdamW")
        # Planes that may make the fp32 master of a weight of this type.
        own = {"BF16": "LO" if body["low_bytes"] else "", "F16": "MASTER"}.get(kind, "")
        masters = tuple(dict.fromkeys(("", own)))
        strict.field(about, "step", lambda v: is_count(v) and v < STEPS, "a whole number", where)
        strict.field(about, "master", lambda v: isinstance(v, str) and v in masters, f"one of {masters} for {kind}",
                     where)
    if "strides" in about:
        strict.field(about, "strides", lambda v: strict.is_counts(v) and len(v) == len(shape),
                     "a stride for each size", where)
    if "key" in about:
        strict.field(about, "key", is_count, "a whole number", where)


# ---- tensors -------------------------------------------------------------------------------------

def _check_states(body: dict[str, Any], name: str, states: dict[str, Stored], where: str) -> None:
    """The files have a parameter's states as the manifest says."""
    about = body["parameters"][name]
    shape = tuple(about["shape"])
    if body["states"] == "fp32":
        wanted = {key: (torch.float32, shape) for key in MOMENTS}
    else:
        forms = ((torch.int8, shape), (torch.uint8, shape), (torch.float32, (-(-math.prod(shape) // GROUP), 2)))
        wanted = dict(zip(CODES, forms))
    if plane := about["master"]:
        low = torch.int16 if body["low_bytes"] == 2 else torch.int8
        wanted[MASTERS[plane]] = low if plane == "LO" else torch.float32, shape
    for key, (dtype, form) in wanted.items():
        _check_stored(states, f"{name}.{key}", dtype, form, where)


def _check_stored(found: dict[str, Stored], name: str, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> None:
    stored = found.get(name)
    if stored is None:
        raise MegatrainError(f"{where} has a tensor {shown(name)}, and its files have none of this name")
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise MegatrainError(f"{where}: {shown(name)} is {list(shape)} {dtype}, and in {stored.file} "
                             f"{list(stored.shape)} {stored.dtype}")


# ---- training.pt ---------------------------------------------------------------------------------

def training_of(data: bytes, where: str, has_optimizer: bool) -> dict[str, Any]:
    """What torch.save wrote there. Raises MegatrainError if it cannot be read, or is not what mt.save writes."""
    try:
        found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as why:                         # a pickle is a program, and its reader raises what it likes
        raise MegatrainError(f"{where} cannot be read: {shown(why)}") from None
    table(found, where)
    for name in ("scheduler", "extra", "random"):
        strict.field(found, name, lambda _: True, "what mt.save wrote", where)
    _check_random(found["random"], f"{where}: random")
    for rank, states in enumerate(found.get("random_by_rank", ())):
        _check_random(states, f"{where}: random_by_rank, {rank}")
    groups = strict.field(found, "groups", lambda v: isinstance(v, list), "a list of groups", where) \
        if has_optimizer else ()
    for number, group in enumerate(groups):
        here = f"{where}: group {number}"
        strict.field(table(group, here), "params",
                     lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v), "a list of names", here)
        if odd := [k for k in group if not isinstance(k, str)]:
            raise MegatrainError(f"{here} has {shown(odd[0])}: names are needed")
    others = table(found.get("others", {}), f"{where}: others")
    for name, own in others.items():
        if not isinstance(name, str) or not all(isinstance(k, str) for k in table(own, f"{where}: others of {name}")):
            raise MegatrainError(f"{where}: others has {shown(name)}: names are needed")
    return found


# ---- random numbers: states of all generators that a run uses -------------------------------------

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


def set_random_states(states: dict[str, Any], trial: bool = False) -> None:
    """trial: on generators of their own, each of which raises what it likes for what is no state."""
    python, torchs = (random.Random(), torch.Generator()) if trial else (random, torch.default_generator)
    numpy = sys.modules.get("numpy")
    version, words, gauss = states["python"]
    python.setstate((version, tuple(words), gauss))
    torchs.set_state(states["torch"])
    if "numpy" in states and numpy is not None:
        name, keys, *rest = states["numpy"]
        numpys = numpy.random.RandomState() if trial else numpy.random
        numpys.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    cuda = states.get("cuda", [])
    if not all(isinstance(t, Tensor) and t.dtype == torch.uint8 for t in cuda):
        raise TypeError("cuda: states of bytes are needed")
    if torch.cuda.is_available():
        for index, state in enumerate(cuda if trial else cuda[:torch.cuda.device_count()]):
            if trial:
                torch.Generator("cuda").set_state(state)
            else:
                torch.cuda.set_rng_state(state, index)


def _check_random(found: Any, where: str) -> None:
    """Each state is tried: the run's are set when all else is loaded."""
    table(found, where)
    try:
        set_random_states(found, trial=True)
    except Exception as why:
        raise MegatrainError(f"{where}: these are no states of random numbers: {shown(why)}") from None
