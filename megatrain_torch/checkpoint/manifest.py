"""A checkpoint's folder: its manifest, how it takes its name, what a killed save left, and what its files have.

    run/last/                        manifest.json: sizes and sums of all files, written last
    run/last.tmp-<pid>-<number>/     one that is being written; its directory is locked by who writes it
    run/last.old-<pid>-<number>/     the one before, for the instant in which two names change

A folder gets its name when all in it is on the disk, by one rename; where it replaces another, both names change at
once (renameat2), or, on file systems that cannot do that, one after the other: then a reader that comes between, or
after a crash, finds the old one by its other name.

A sum says that a file is as somebody wrote it, and not that it was mt.save. So each name, type and number of the
manifest and training.pt that restore.py goes by is looked at here, before anything is loaded.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .. import _core
from ..base import strict
from ..base.errors import MegatrainError
from ..base.modes import GROUP, LOW_BYTES
from ..base.strict import is_count, shown
from ..optim.states import CODES, MOMENTS, STEPS
from ..store.tensorfiles import DTYPES, READERS, Extent, Stored, listed

NAME = "manifest.json"
BROKEN = "the checkpoint is not whole; nothing was changed; load another one"
FORMAT, VERSION = "megatrain checkpoint", 1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
TENSORS = re.compile(r"(model|weights|frozen|states)(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_number = itertools.count()
TRAINING = "training.pt"
INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
MASTERS = {"LO": "master_low", "MASTER": "master"}
BLOCK = _core.BLOCK_BYTES           # of a file, that have a sum of 8 bytes
_HEX = re.compile(r"([0-9a-f]{2})*")


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- the manifest --------------------------------------------------------------------------------

def dump(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"format": FORMAT, "version": VERSION, "sha256": sha256(text.encode()), "body": body},
                      sort_keys=True, indent=1).encode()


def read(folder: Path) -> dict[str, Any]:
    """The manifest's body. Raises MegatrainError if there is none, of another version, or not as it was written."""
    path = folder / NAME
    try:
        data = inside(folder, NAME).read_bytes()
    except FileNotFoundError:
        if not folder.is_dir():
            raise MegatrainError(f"{folder}: there is no such folder") from None
        way = "; mt.from_pretrained loads a folder in Hugging Face format" if (folder / "config.json").is_file() else ""
        raise MegatrainError(f"{folder} is no checkpoint of mt.save: it has no {NAME}{way}") from None
    except OSError as e:
        raise MegatrainError(f"{path} cannot be read ({e.strerror})") from None
    with adding(BROKEN):
        whole = strict.table(strict.parsed(data, path), str(path))
        for name, kind in (("format", str), ("version", int), ("sha256", str), ("body", dict)):
            strict.field(whole, name, lambda v, kind=kind: type(v) is kind, f"a {kind.__name__}", str(path))
    if whole["format"] != FORMAT or whole["version"] != VERSION:
        raise MegatrainError(f"{path} is of format {whole['format']!r}, version {whole['version']}; this version of "
                             f"megatrain_torch reads {FORMAT!r}, version {VERSION}")
    if sha256(json.dumps(whole["body"], sort_keys=True).encode()) != whole["sha256"]:
        raise MegatrainError(f"{path} is not as it was written (its checksum differs): {BROKEN}")
    return whole["body"]


def inside(folder: Path, name: str) -> Path:
    """A file of a folder. Raises MegatrainError where its name, or a link that has it, leads out of the folder."""
    path = folder / name
    if not strict.is_plain_name(name) or (path.is_symlink() and path.resolve().parent != folder.resolve()):
        raise MegatrainError(f"{path} leads out of its folder: a checkpoint's files lie in it")
    return path


@contextlib.contextmanager
def adding(rest: str) -> Iterator[None]:
    """What it means, behind an error's own words."""
    try:
        yield
    except MegatrainError as e:
        raise MegatrainError(f"{e}: {rest}") from e


# ---- files and names -----------------------------------------------------------------------------

def sync(path: Path) -> None:
    """What the system holds of a file or directory is on the disk when this returns."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write(path: Path, data: bytes | memoryview) -> None:
    with path.open("xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


class Draft:
    """A folder that is being written, beside the one whose name it will take; `published`: it has that name. Making one
    raises MegatrainError where the parent cannot be written to, or something else than a checkpoint has the name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.published = folder, False
        if folder.exists() and not (folder / NAME).exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise MegatrainError(f"{folder} is there and is no checkpoint of mt.save: name another folder")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder)
            self.path = folder.parent / f"{folder.name}.tmp-{os.getpid()}-{next(_number)}"
            self.path.mkdir()
        except OSError as e:
            raise MegatrainError(f"{folder.parent}: a checkpoint cannot be written there: {e.strerror}") from e
        self._fd = _lock(self.path)

    def publish(self) -> None:
        """Gives the folder its name, on the disk; on an OSError `published` says whether names have changed."""
        if self.folder.exists():
            _carry_others(self.folder, self.path)
        sync(self.path)                      # its files are on the disk already; now their names are
        old = self._take_name()
        self.published = True
        sync(self.folder.parent)             # the rename is; only then the one before may go
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        self._unlock()

    def _take_name(self) -> Path | None:
        """The name that the one before has now; None: there was none."""
        if not self.folder.exists():
            os.rename(self.path, self.folder)
            return None
        if _exchange(self.path, self.folder):
            return self.path
        old = self.folder.parent / self.path.name.replace(f"{self.folder.name}.tmp-", f"{self.folder.name}.old-")
        try:
            os.rename(self.folder, old)
            os.rename(self.path, self.folder)
        except BaseException:
            if not self.folder.exists():
                os.rename(old, self.folder)
            raise
        return old

    def drop(self) -> None:
        """Gives up. What has its name keeps it; the one before is then left to the next sweep."""
        if not self.published:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._fd >= 0:
            _core.close_private(self._fd)
            self._fd = -1


def _carry_others(old: Path, new: Path) -> None:
    """What somebody put beside the old checkpoint's own files (a tokenizer) is in the new one too, and on the disk."""
    try:
        files = read(old).get("files")
        own = {*files, NAME} if isinstance(files, dict) else {NAME}
    except MegatrainError:                   # it cannot be read: those that go by the names of such
        own = {p.name for p in old.iterdir() if TENSORS.fullmatch(p.name)}
    there = own | {p.name for p in new.iterdir()}
    shutil.copytree(old, new, symlinks=True, dirs_exist_ok=True,
                    ignore=lambda folder, names: there & {*names} if Path(folder) == old else ())
    os.utime(new)                            # copytree gave it the old one's time, by which tools keep the newest
    for copy in new.rglob("*"):
        if not copy.is_symlink():            # a link has nothing of its own, and may lead nowhere
            sync(copy)


def _exchange(one: Path, other: Path) -> bool:
    """Two names change places at once. False: this system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other),
                                         _RENAME_EXCHANGE) == 0


def _lock(path: Path) -> int:
    """The directory's descriptor, which holds the lock until it is closed, however the process ends; -1: locked."""
    fd = _core.open_private(str(path), os.O_RDONLY | os.O_CLOEXEC)       # a child's share would outlive us
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        _core.close_private(fd)
        return -1
    return fd


def _left(folder: Path, kind: str) -> list[Path]:
    """By the names that Draft gives, and no others that begin as they do."""
    return sorted(path for path in folder.parent.glob(f"{glob.escape(folder.name)}.{kind}-*")
                  if re.fullmatch(r"\d+-\d+", path.name.removeprefix(f"{folder.name}.{kind}-")))


def sweep(folder: Path) -> None:
    """Removes what killed saves of this checkpoint left; a folder that was replaced and not yet gets its name back."""
    recover(folder)
    for path in _left(folder, "tmp") + _left(folder, "old"):
        fd = _lock(path) if path.is_dir() else -1
        if fd >= 0:
            shutil.rmtree(path, ignore_errors=True)
            _core.close_private(fd)


def recover(folder: Path) -> None:
    """After a crash between two renames the old checkpoint, which is whole, takes its name again."""
    if not folder.exists() and (left := _left(folder, "old")):
        with contextlib.suppress(OSError):
            os.rename(left[-1], folder)


# ---- what its files have --------------------------------------------------------------------------

class Checkpoint:
    """A folder, its manifest's body, what its files of tensors have, and what training.pt has, which lies `where`. All
    that is in it is checked but the tensors' bytes."""

    def __init__(self, folder: Path) -> None:
        recover(folder)
        self.folder, self.body, self.where = folder, read(folder), str(folder / TRAINING)
        self.tensors: dict[str, Stored] = {}
        self.states: dict[str, Stored] = {}
        where = str(folder / NAME)
        with adding(BROKEN):
            _check_body(self.body, where)
            for name, about in self.body["files"].items():
                path = inside(folder, name)
                size = path.stat().st_size if path.is_file() else None
                if size != about["bytes"]:
                    raise MegatrainError(f"{path} {'is missing' if size is None else f'has {size} bytes'}, and "
                                         f"{about['bytes']} were written")
                if name.endswith(".safetensors"):
                    mine, there = self.states if name.startswith("states") else self.tensors, listed(path)
                    if twice := sorted(there.keys() & mine.keys()):
                        raise MegatrainError(f"{path} has {shown(twice[0])}, which is in {mine[twice[0]].file} too")
                    mine.update(there)
            for name, about in self.body["parameters"].items():
                _check_stored(self.tensors, name, DTYPES[about["dtype"]], tuple(about["shape"]), where)
                if "step" in about:
                    _check_states(self.body, name, self.states, where)
            self.compare(TRAINING)
            self.training = training_of(self.where, self.body["optimizer"] is not None)

    def verify(self, part: int, parts: int) -> None:
        """Reads everything, before anything is changed; of files of tensors one of so many parts."""
        with adding(BROKEN):
            for name, about in self.body["files"].items():
                if name == TRAINING:                 # when it was opened
                    continue
                if "sums" not in about:
                    self.compare(name)
                elif blocks := range(part, -(-about["bytes"] // BLOCK), parts):
                    memory = torch.empty(len(blocks), dtype=torch.uint8)         # a byte of each: so it is compared
                    self.read(name, [(b * BLOCK, memory.data_ptr() + i, 1, -1) for i, b in enumerate(blocks)])

    def read(self, name: str, extents: list[Extent]) -> None:
        about = self.body["files"][name]
        _core.read_file((str(self.folder / name), about["bytes"], extents), bytes.fromhex(about["sums"]), READERS)

    def compare(self, name: str) -> None:
        with (self.folder / name).open("rb") as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != self.body["files"][name]["sha256"]:
                raise MegatrainError(f"{self.folder / name} is not as it was written (its checksum differs)")


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

@contextlib.contextmanager
def _as_saved(where: str) -> Iterator[None]:
    """A table that lacks something, or has it of another type, is refused by name."""
    try:
        yield
    except MegatrainError:
        raise
    except Exception as why:                         # tensors of a pickle have errors of their own
        lacks = "it lacks " * isinstance(why, KeyError)
        raise MegatrainError(f"{where} is not as mt.save writes it: {lacks}{shown(why)}") from None


def _need(where: str, found: dict[str, Any], **good: Any) -> None:
    if wrong := [name for name, fits in good.items() if not fits]:
        has = f"{wrong[0]}={shown(found[wrong[0]])}" if wrong[0] in found else f"it lacks {wrong[0]!r}"
        raise MegatrainError(f"{where} is not as mt.save writes it: {has}")


def _check_body(body: Any, where: str) -> None:
    """Raises: MegatrainError: something in it is missing, or is not what it must be."""
    with _as_saved(where):
        states, low = body["states"], body["low_bytes"]
        lows = (0, 1, 2) if states is None else (LOW_BYTES.get(states),)
        _need(where, body, optimizer=isinstance(body["optimizer"], str | None), states=None not in lows,
              low_bytes=type(low) is int and low in lows, skipped_steps=is_count(body["skipped_steps"]),
              files=TRAINING in body["files"])
        for name, about in body["files"].items():
            with _as_saved(here := f"{where}: file {shown(name)}"):
                tensors = name.endswith(".safetensors")
                plain = strict.is_plain_name(name) and (not tensors or TENSORS.fullmatch(name))
                digits, kind = (-(-about["bytes"] // BLOCK) * 16, "sums") if tensors else (64, "sha256")
                _need(here, about | {"name": name}, name=plain, bytes=is_count(about["bytes"]),
                      **{kind: len(about[kind]) == digits and _HEX.fullmatch(about[kind])})
        for name, about in body["parameters"].items():
            with _as_saved(here := f"{where}: parameter {shown(name)}"):
                _check_parameter(about, here, body)


def _check_parameter(about: dict[str, Any], where: str, body: dict[str, Any]) -> None:
    kind, shape = about["dtype"], about["shape"]
    _need(where, about, dtype=kind in DTYPES, shape=strict.is_shape(shape), key=is_count(about.get("key", 0)))
    if "step" in about:
        # Planes that may make the fp32 master of a weight of this type.
        own = {"BF16": "LO" if body["low_bytes"] else "", "F16": "MASTER"}.get(kind, "")
        _need(where, about, step=body["states"] is not None and is_count(about["step"]) and about["step"] < STEPS,
              master=about["master"] in ("", own))
    if "strides" in about:
        _need(where, about, strides=strict.is_counts(about["strides"]) and len(about["strides"]) == len(shape))


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

def training_of(where: str, has_optimizer: bool) -> dict[str, Any]:
    """What torch.save wrote there; of "others", which may be large, tensors are the file's, mapped. Raises
    MegatrainError if it cannot be read, or is not what mt.save writes."""
    try:
        mapped = torch.load(where, weights_only=True, map_location="cpu", mmap=True)
    except Exception as why:                         # a pickle is a program, and its reader raises what it likes
        raise MegatrainError(f"{where} cannot be read: {shown(why)}") from None
    strict.table(mapped, where)
    large = {"others": strict.table(mapped["others"], f"{where}: others")} if "others" in mapped else {}
    found = deepcopy({name: value for name, value in mapped.items() if name not in large}) | large
    with _as_saved(where):
        groups = found["groups"] if has_optimizer else ()
        _need(where, found, scheduler="scheduler" in found, extra="extra" in found,
              groups=all(isinstance(name, str) for group in groups for name in (*group, *group["params"])))
        for states in (found["random"], *found.get("random_by_rank", ())):
            try:                                     # the run's are set when all else is loaded
                set_random_states(states, trial=True)
            except Exception as why:
                raise ValueError(f"these are no states of random numbers: {why}") from None
    return found


# ---- random numbers: states of all generators that a run uses -------------------------------------

def random_states() -> dict[str, Any]:
    """Of Python, NumPy, torch on the CPU, and on each CUDA device that was used."""
    version, words, gauss = random.getstate()
    name, keys, *rest = numpy.random.get_state()
    found: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state(),
                             "numpy": [name, keys.tolist(), *rest]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_states(states: dict[str, Any], trial: bool = False) -> None:
    """trial: on generators of their own, each of which raises what it likes for what is no state."""
    python, torchs, numpys = (random.Random(), torch.Generator(), numpy.random.RandomState()) if trial else \
        (random, torch.default_generator, numpy.random)
    version, words, gauss = states["python"]
    python.setstate((version, tuple(words), gauss))
    torchs.set_state(states["torch"])
    name, keys, *rest = states["numpy"]
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
