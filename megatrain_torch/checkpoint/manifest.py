"""A checkpoint's folder: what belongs to it, how it takes its name, and what a killed save left.

    run/last/                        manifest.json: sizes and sums of all files, written last
    run/last.tmp-<pid>-<number>/     one that is being written; its directory is locked by who writes it
    run/last.old-<pid>-<number>/     the one before, for the instant in which two names change

A folder gets its name when all in it is on the disk, by one rename; where it replaces another, both names change at
once (renameat2), or, on file systems that cannot do that, one after the other: then a reader that comes between, or
after a crash, finds the old one by its other name.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _core
from ..base import strict
from ..base.errors import MegatrainError

NAME = "manifest.json"
BROKEN = "the checkpoint is not whole; nothing was changed; load another one"
FORMAT, VERSION = "megatrain checkpoint", 1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
TENSORS = re.compile(r"(model|weights|frozen|states)(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_number = itertools.count()


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
    for path in old.iterdir():
        if path.name in own or os.path.lexists(new / path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True)
        else:
            shutil.copy2(path, new / path.name, follow_symlinks=False)
        for copy in (new / path.name, *(new / path.name).rglob("*")):
            if not copy.is_symlink():        # a link has nothing of its own, and may lead nowhere
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
