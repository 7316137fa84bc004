"""A run's folder: what the run made in it, who writes there now, and what is read of it.

    config.yaml               settings, those that were chosen too
    log.jsonl                 a line for each logged step and each evaluation
    checkpoint-200/ ...       all that resume needs, in Hugging Face format
    model/                    the model at the end
    megatrain-run.json        the marker: what makes a folder a run, and each entry that the run made
    .megatrain-run.lock       while a command writes; locked (flock), however that command ends

(1) An entry is listed before it is made, so that whatever a crash leaves is known.
(2) Only what is listed is ever removed or replaced.
(3) Of a listed folder only files go that are as they were written, by size and time of change: what somebody put beside
    them, or changed, stays.
(4) The marker is replaced as a whole, and is on the disk before what it lists.
"""
from __future__ import annotations

import contextlib
import dataclasses
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

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from .settings import Settings, near, read_table, read_yaml, say

MARKER, LOCK = "megatrain-run.json", ".megatrain-run.lock"
PROGRAM, VERSION = "megatrain", 1
CONFIG, LOG, FINAL = "config.yaml", "log.jsonl", "model"
WHOLE = "trainer_state.json"                 # of a checkpoint: written last, removed first
UNFINISHED = ".unfinished"                   # small files of a checkpoint that is being written
HALF = "model.unfinished"                    # the model at the end, until it has its name
PAGES = ("plan.html", "step.html", "storage.html", "timeline.svg")   # that runs had before, for a report
FILE, SCRATCH = "file", "scratch"            # of an entry that is no folder of files; of one that goes as a whole
ADAPTER = "adapter_config.json"              # of PEFT: what makes a folder an adapter
# With names that mt.save gives meanwhile.
_CHECKPOINT = re.compile(r"(checkpoint-(\d{1,18}))(\.(?:tmp|old)-\d+-\d+)?")
_BESIDE = re.compile(rf"\.({re.escape(MARKER)}|{re.escape(CONFIG)}|{re.escape(LOG)})\.\d+\.unfinished")
_WHOLES = dict.fromkeys((CONFIG, LOG, *PAGES), FILE) | dict.fromkeys((UNFINISHED, HALF), SCRATCH)
Entry = str | dict[str, list[int] | None]    # of _WHOLES; or a folder's files: [size, time] of each, None: begun


class Owned:
    """A run's folder, as its marker has it. entries: by name. data: what tells the run's rows (data.identity)."""

    def __init__(self, run: Path) -> None:
        self.run, self.entries, self.data = run, {}, {}
        self._lock = -1                      # the descriptor, in the process that locked it
        self._read()

    def _read(self) -> None:
        where = self.run / MARKER
        if not where.is_file():
            return
        found = read_table(where)
        if (found.get("program"), found.get("version")) != (PROGRAM, VERSION):
            raise MegatrainError(f"{where}: a table of program {PROGRAM!r}, version {VERSION}, is needed")
        self.data, self.entries = found.get("data"), found.get("entries")
        if not isinstance(self.data, dict) or not isinstance(self.entries, dict):
            raise MegatrainError(f"{where}: data and entries are needed, each a table")
        if wrong := [name for name, entry in self.entries.items() if not _is_entry(name, entry)]:
            raise MegatrainError(f"{where}: entry {wrong[0]!r} is none that a run makes")

    # ---- who writes ----

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """For as long as a command writes. A folder that is not there yet is locked by `start`."""
        try:
            if self.run.is_dir():
                self.lock()
            yield
        finally:
            if self._lock >= 0:
                (self.run / LOCK).unlink(missing_ok=True)    # before the lock goes: nobody removes another's
            self._leave()

    def lock(self) -> None:
        path = self.run / LOCK
        while self._lock < 0:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as why:
                raise MegatrainError(f"out={self.run}: nothing can be written there ({why.strerror})") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as why:
                who = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(fd)
                if why.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise MegatrainError(f"{self.run} is being written by {who}: wait, or use another folder") from None
                path.unlink(missing_ok=True)
                say(f"{self.run}: this file system has no locks ({why.strerror}); no second run may write there")
                break
            # Whoever had the lock before may have removed the file meanwhile. Links are not counted alike by all file
            # systems, so what the name stands for by then is compared.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    self._lock = fd
                    # A forked child, a DataLoader's worker say, must not keep the lock when this process is gone.
                    os.register_at_fork(after_in_child=self._leave)
                    continue
            os.close(fd)                                 # and once more
        self._read()                                     # as whoever had the lock before left it
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            for beside in self.run.iterdir():            # what `replace` of killed commands left goes
                if _BESIDE.fullmatch(beside.name) and not beside.is_dir():
                    beside.unlink()

    def _leave(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    # ---- entries ----

    def strangers(self) -> list[str]:
        """Names in the folder that a run gives, of what this run did not make, or not as it is now."""
        names = sorted(p.name for p in self.run.iterdir()) if self.run.is_dir() else ()
        return [path for name in names if name not in PAGES and (
            name in _WHOLES or name == FINAL or _CHECKPOINT.fullmatch(name)) for path in self.changed(name)]

    def changed(self, name: str) -> list[str]:
        """Of an entry the paths, from the run's folder, that are not as the run left them; of none that is listed its
        name."""
        entry, path = self.entries.get(_entry_of(name)), self.run / name
        if entry is None or path.is_symlink():
            return [name]
        if not isinstance(entry, dict) or name != _entry_of(name):
            return [] if path.is_dir() == (entry != FILE) else [name]
        if not path.is_dir():
            return [name] if path.exists() else []
        if entry and None not in entry.values():
            return [f"{name}/{file}" for file, mark in _marks(path).items() if entry.get(file) != mark]
        try:                                             # begun, and never noted as whole
            own = mt.inspect_checkpoint(path).files
        except (MegatrainError, OSError):
            own = {f for f in _files(path) if f.endswith((".safetensors", ".safetensors.index.json"))}
        return [f"{name}/{file}" for file in _files(path) if file not in entry and file not in own]

    def begin(self, name: str, entry: Entry) -> None:
        """Lists what will be made, before it is."""
        path = self.run / name
        if os.path.lexists(path) and self.changed(name):
            raise MegatrainError(f"{path} is there, and this run did not make it, or not as it is now: move it away")
        self.entries[name] = entry
        self._write()

    def made(self, name: str, at: str = "") -> None:
        """A folder is whole: what is in it is the run's, as it is now. at: its name until it has this one."""
        self.entries[name] = _marks(self.run / (at or name))
        self._write()

    def remove(self, name: str) -> list[str]:
        """An entry goes, with what is listed of it; returns what stays."""
        path, stays, entry = self.run / name, self.changed(name), self.entries[name]
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
        """A new run, in place of the one that the folder has: everything else was checked."""
        known = set(self.entries)
        self.lock()
        if set(self.entries) != known:
            raise MegatrainError(f"{self.run} has another run since this one was asked for: name another folder")
        self.check_free()
        for name in list(self.entries):
            self._remove_drafts(name)
            self.remove(name)
        self.entries, self.data = {name: kind for name, kind in _WHOLES.items() if name not in (HALF, *PAGES)}, data
        self._write()

    def go_on(self, data: dict[str, Any]) -> None:
        """Behind the last checkpoint: what was begun after it, and what the log has of later steps, goes."""
        whole = checkpoints(self.run)
        for name in [name for name in self.entries if step_of(name) >= 0]:
            self._remove_drafts(name)
            if self.run / name not in whole:
                if (self.run / name).exists():
                    say(f"{name} was being written when the run ended: removed")
                self.remove(name)
        forget_after(self.run, step_of(whole[-1].name))
        self.data = data
        self._write()

    def check_free(self) -> None:
        if found := self.strangers():
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise MegatrainError(f"out={self.run} has {', '.join(found[:3])}{more}, which no run of megatrain made, or "
                                 "not as it is now, and a run would put its own there: --out names another folder")

    def _remove_drafts(self, name: str) -> None:
        """What killed saves of a checkpoint left: the lock is this process's, so nobody writes there."""
        for path in self.run.glob(f"{name}.*") if step_of(name) >= 0 else ():
            if _CHECKPOINT.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def _write(self) -> None:
        body = {"program": PROGRAM, "version": VERSION, "entries": self.entries, "data": self.data}
        replace(self.run / MARKER, json.dumps(body, indent=1).encode())


def replace(path: Path, data: bytes) -> None:
    """All or none of a file's contents, on the disk."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    beside.write_bytes(data)
    sync(beside)
    os.replace(beside, path)
    sync(path.parent)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_entry(name: str, entry: Any) -> bool:
    if name in _WHOLES:
        return entry == _WHOLES[name]
    return (name == FINAL or step_of(name) >= 0) and isinstance(entry, dict) and all(
        all(part not in ("", ".", "..") and "\0" not in part and "\\" not in part for part in file.split("/"))
        and (mark is None or (isinstance(mark, list) and len(mark) == 2 and all(map(is_count, mark))))
        for file, mark in entry.items())


def is_count(value: Any) -> bool:
    """A whole number of 64 bits, 0 or more; True is none."""
    return type(value) is int and 0 <= value < 2**63


def _entry_of(name: str) -> str:
    """A checkpoint that is being written, or was one a moment ago, is that checkpoint's."""
    found = _CHECKPOINT.fullmatch(name)
    return found[1] if found else name


def _files(path: Path) -> list[str]:
    """All that is no folder, below one; links are not followed."""
    found = []
    for below, folders, files in os.walk(path):
        links = [name for name in folders if os.path.islink(os.path.join(below, name))]
        found += [os.path.relpath(os.path.join(below, name), path) for name in [*files, *links]]
    return sorted(found)


def _marks(path: Path) -> dict[str, list[int]]:
    found = {file: (path / file).lstat() for file in _files(path)}
    return {file: [s.st_size, s.st_mtime_ns] for file, s in found.items()}


# ---- what is read of a run -----------------------------------------------------------------------

def settings_of(run: Path) -> Settings:
    if not run.exists():
        raise MegatrainError(f"{run}: there is no such folder{near(str(run))}")
    if not (run / MARKER).is_file():
        raise MegatrainError(f"{run} is no run: it has no {MARKER}; megatrain train makes one")
    Owned(run)                                           # a marker that is none is refused
    return Settings.of(read_yaml(run / CONFIG), str(run / CONFIG))


def run_of(name: str) -> Settings | None:
    return settings_of(Path(name)) if (Path(name) / MARKER).is_file() else None


def write_yaml(path: Path, settings: Settings) -> None:
    import yaml

    found = dataclasses.asdict(settings)
    found |= found.pop("more")
    if found["data"] is not None:                        # as it is written by hand
        found["data"] = found["data"][0] if len(found["data"]) == 1 else list(found["data"])
    replace(Path(path), yaml.safe_dump(found, sort_keys=False).encode())


def step_of(name: str) -> int:
    """Of a checkpoint, by its name; -1: it is none."""
    found = _CHECKPOINT.fullmatch(name)
    return int(found[2]) if found and not found[3] else -1


def checkpoints(run: Path) -> list[Path]:
    """The whole ones that the run made, oldest first."""
    found = sorted((step_of(name), run / name) for name in Owned(run).entries if step_of(name) >= 0)
    return [path for _, path in found if (path / WHOLE).is_file()]


def last_checkpoint(run: Path) -> Path:
    if not (found := checkpoints(run)):
        raise MegatrainError(f"{run} has no checkpoint yet; megatrain train --out {run} --overwrite begins again")
    return found[-1]


def is_finished(run: Path) -> bool:
    return FINAL in Owned(run).entries and any((run / FINAL / name).is_file() for name in ("config.json", ADAPTER))


def lines(run: Path) -> list[dict[str, Any]]:
    """Of log.jsonl. What is no line of ours, such as one that a crash cut short, is left out."""
    texts = (run / LOG).read_bytes().splitlines() if (run / LOG).is_file() else ()
    return [line for line in map(_line, texts) if line is not None]


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_count(found.get("step")) else None


def forget_after(run: Path, step: int) -> None:
    """Takes from log.jsonl what comes after a checkpoint, as these steps will be made again, and what is no line."""
    texts = (run / LOG).read_bytes().splitlines() if (run / LOG).is_file() else []
    replace(run / LOG, b"".join(text + b"\n" for text in texts if (line := _line(text)) and line["step"] <= step))
