"""What a run made in its folder, and who writes there now.

    megatrain-run.json        the marker: what makes a folder a run, and each entry that the run made
    .megatrain-run.lock       while a command writes; locked (flock), however that command ends

An entry is listed before it is made, so that whatever a crash leaves is known. Only what is listed is ever removed or
replaced, and of a listed folder only the files that are as they were written: by size and time of change. What somebody
put beside them, or changed, stays.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from .. import _core
from ..base.strict import field, is_count, is_plain_name, parsed, table
from ..checkpoint import manifest
from .say import say

MARKER, LOCK = "megatrain-run.json", ".megatrain-run.lock"
PROGRAM, VERSION = "megatrain", 1
CONFIG, LOG, FINAL = "config.yaml", "log.jsonl", "model"
WHOLE = "trainer_state.json"                 # of a checkpoint: written last, removed first
UNFINISHED = ".unfinished"                   # small files of a checkpoint that is being written
HALF = "model.unfinished"                    # the model at the end, until it has its name
PAGES = ("plan.html", "step.html", "storage.html", "timeline.svg")
NAMES = (CONFIG, LOG, FINAL, UNFINISHED, HALF, MARKER, LOCK, *PAGES)
FILE, SCRATCH = "file", "scratch"            # of an entry that is no folder of files; of one that goes as a whole
_CHECKPOINT = re.compile(r"(checkpoint-\d+)(\.(tmp|old)-\d+-\d+)?")
Entry = str | dict[str, list[int] | None]    # FILE, SCRATCH; or a folder's files: [size, time] of each, None: begun


class Owned:
    """A run's folder, as its marker has it.

    Attributes:
        entries: by name. data: what the run's rows were made of (identity.py).

    Raises:
        MegatrainError: the marker is not as this program writes it.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.entries, self.data = run, {}, {}
        self._lock = self._locker = -1       # the descriptor, and the process that has it
        if (run / MARKER).is_file():
            self._read()

    @staticmethod
    def opened(run: Path) -> Owned:
        """Raises: MegatrainError: the folder has no marker."""
        if not (run / MARKER).is_file():
            raise MegatrainError(f"{run} is no run: it has no {MARKER}; megatrain train makes one")
        return Owned(run)

    def _read(self) -> None:
        where = str(self.run / MARKER)
        found = table(parsed((self.run / MARKER).read_bytes(), where), where)
        field(found, "program", lambda v: v == PROGRAM, repr(PROGRAM), where)
        field(found, "version", lambda v: v == VERSION, f"{VERSION}, which this version of megatrain reads", where)
        self.data = field(found, "data", lambda v: isinstance(v, dict), "a table", where)
        self.entries = field(found, "entries", lambda v: isinstance(v, dict), "a table", where)
        for name, entry in self.entries.items():
            if not _is_entry(name, entry):
                raise MegatrainError(f"{where}: entry {name!r} is none that a run makes")

    # ---- who writes ----

    @contextlib.contextmanager
    def locked(self) -> Iterator[Owned]:
        """For as long as a command writes. A folder that is not there yet is locked by `start`.

        Raises:
            MegatrainError: another process writes there.
        """
        try:
            if self.run.is_dir():
                self.lock()
            yield self
        finally:
            self._unlock()

    def lock(self) -> None:
        """Raises: MegatrainError: another process has it."""
        path = self.run / LOCK
        while self._lock < 0:
            try:
                # A forked child, a DataLoader's worker say, must not keep the lock when this process is gone.
                fd = _core.open_private(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as why:
                raise MegatrainError(f"out={self.run}: nothing can be written there ({why.strerror}); name "
                                     "another") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as why:
                who = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
                _core.close_private(fd)
                if why.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    path.unlink(missing_ok=True)
                    say(f"{self.run}: this file system has no locks ({why.strerror}); no second run may write there")
                    break
                raise MegatrainError(f"{self.run} is being written by {who}: wait for it, or name another "
                                     "folder") from None
            if _is_at(fd, path):                         # else whoever had it before removed it meanwhile
                self._lock, self._locker = fd, os.getpid()
            else:
                _core.close_private(fd)
        if (self.run / MARKER).is_file():                # as whoever had the lock before left it
            self._read()
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _unlock(self) -> None:
        if self._lock >= 0 and self._locker == os.getpid():
            (self.run / LOCK).unlink(missing_ok=True)    # by its owner alone, before the lock goes
            _core.close_private(self._lock)
        self._lock = -1

    # ---- entries ----

    def strangers(self) -> list[str]:
        """Names in the folder that a run gives, of what this run did not make, or not as it is now."""
        if not self.run.is_dir():
            return []
        found = []
        for name in sorted(p.name for p in self.run.iterdir() if _is_ours(p.name) and p.name not in (MARKER, LOCK)):
            if _entry_of(name) not in self.entries:
                found.append(name)
            else:
                found += self.changed(name)
        return found

    def changed(self, name: str) -> list[str]:
        """Of a listed entry the paths, from the run's folder, that are not as the run left them."""
        entry, path = self.entries.get(_entry_of(name)), self.run / name
        if path.is_symlink():
            return [name]
        if not isinstance(entry, dict) or name != _entry_of(name):
            return [] if path.is_dir() == (entry != FILE) else [name]
        if not path.is_dir():
            return [name] if path.exists() else []
        return [f"{name}/{file}" for file in _files(path) if not self._as_made(path, file, entry)]

    def _as_made(self, path: Path, file: str, entry: dict[str, list[int] | None]) -> bool:
        if None in entry.values() or not entry:          # begun: mt.save knows its own files
            return file in entry or file in manifest.own_names(path)
        return entry.get(file) == _mark(path / file)

    def begin(self, name: str, entry: Entry) -> None:
        """Lists what will be made, before it is.

        Raises:
            MegatrainError: something else has the name, or what was made was changed since.
        """
        path = self.run / name
        if os.path.lexists(path) and (name not in self.entries or self.changed(name)):
            raise MegatrainError(f"{path} is there, and this run did not make it, or not as it is now: it stays; move "
                                 "it away, and resume")
        self.entries[name] = entry
        self._write()

    def made(self, name: str, at: Path | None = None) -> None:
        """A folder is whole: what is in it is the run's, as it is now. at: where it is until it has its name."""
        path = at or self.run / name
        self.entries[name] = {file: _mark(path / file) for file in _files(path)}
        self._write()

    def remove(self, name: str) -> list[str]:
        """An entry goes, with what is listed of it; returns what stays."""
        path, stays = self.run / name, self.changed(name)
        entry = self.entries[name]
        if entry == FILE and not stays:
            path.unlink(missing_ok=True)
        elif entry == SCRATCH and not stays:
            shutil.rmtree(path, ignore_errors=True)
        elif not path.is_symlink() and path.is_dir():
            for file in sorted(_files(path), key=lambda f: f != WHOLE):
                if f"{name}/{file}" not in stays:
                    (path / file).unlink()
            for below, _, _ in os.walk(path, topdown=False):
                with contextlib.suppress(OSError):       # it is not empty
                    os.rmdir(below)
        del self.entries[name]
        self._write()
        return stays

    # ---- begin and end of a run ----

    def start(self, data: dict[str, Any]) -> None:
        """A new run, in place of the one that the folder has: everything else was checked.

        Raises:
            MegatrainError: the folder has what no run made, or another process writes there.
        """
        known = set(self.entries)
        self.lock()
        if set(self.entries) != known:
            raise MegatrainError(f"{self.run} has another run since this one was asked for: name another folder")
        self.check_free()
        for name in list(self.entries):
            if _CHECKPOINT.fullmatch(name):
                manifest.sweep(self.run / name)
            self.remove(name)
        self.entries = dict.fromkeys((CONFIG, LOG, *PAGES), FILE) | {UNFINISHED: SCRATCH}
        self.data = data
        self._write()

    def check_free(self) -> None:
        """Raises: MegatrainError: a run's names are taken by what it did not make."""
        if found := self.strangers():
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise MegatrainError(f"out={self.run} has {', '.join(found[:3])}{more}, which no run of megatrain made, or "
                                 "not as it is now, and a run would put its own there: --out names another folder")

    def note_data(self, data: dict[str, Any]) -> None:
        self.data = data
        self._write()

    @property
    def nbytes(self) -> int:
        """Of all that is listed."""
        paths = [self.run / name for name in self.entries]
        files = [f for p in paths if not p.is_symlink() for f in ([p] if p.is_file() else map(p.joinpath, _files(p)))]
        return sum(f.lstat().st_size for f in files)

    def _write(self) -> None:
        body = {"program": PROGRAM, "version": VERSION, "entries": self.entries, "data": self.data}
        replace(self.run / MARKER, json.dumps(body, indent=1).encode())


def replace(path: Path, data: bytes) -> None:
    """A file's contents, all or none of it, on the disk."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    manifest.write(beside, data)
    os.replace(beside, path)
    manifest.sync(path.parent)


def _is_ours(name: str) -> bool:
    """May a run give this name to something in its folder?"""
    return name in NAMES or _CHECKPOINT.fullmatch(name) is not None


def _is_entry(name: str, entry: Any) -> bool:
    """May a marker list this?"""
    if name in (UNFINISHED, HALF):
        return entry == SCRATCH
    if name in (CONFIG, LOG, *PAGES):
        return entry == FILE
    found = _CHECKPOINT.fullmatch(name)
    return (name == FINAL or (found is not None and found[1] == name)) and _is_files(entry)


def _entry_of(name: str) -> str:
    """A checkpoint that is being written, or was one a moment ago, is that checkpoint's."""
    found = _CHECKPOINT.fullmatch(name)
    return found[1] if found else name


def _is_files(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        all(map(is_plain_name, file.split("/"))) and (mark is None or (
            isinstance(mark, list) and len(mark) == 2 and all(map(is_count, mark)))) for file, mark in entry.items())


def _files(path: Path) -> list[str]:
    """All that is no folder, below one; links are not followed."""
    found = []
    for below, folders, files in os.walk(path):
        links = [name for name in folders if os.path.islink(os.path.join(below, name))]
        found += [os.path.relpath(os.path.join(below, name), path) for name in [*files, *links]]
    return sorted(found)


def _mark(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_size, found.st_mtime_ns]


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)
