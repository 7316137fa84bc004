"""A run's folder: what the run made in it, who writes there now, and what is read of it.

    config.yaml               settings, those that were chosen too
    log.jsonl                 a line for each logged step and each evaluation
    checkpoint-200/ ...       all that resume needs, in Hugging Face format
    model/                    the model at the end
    megatrain-run.json        the marker: what makes a folder a run, and what the run made, a folder's files by name
    .megatrain-run.lock       locked (flock) while a command writes, however that command ends

(1) A name is listed before it is made, so that whatever a crash leaves is known.
(2) Only what is listed is ever removed or replaced: a file that somebody put into a listed folder stays.
(3) The marker is replaced as a whole, and is on the disk before what it lists.
"""
from __future__ import annotations

import contextlib
import dataclasses
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
PROGRAM, VERSION = "megatrain", 2
CONFIG, LOG, FINAL = "config.yaml", "log.jsonl", "model"
WHOLE = "trainer_state.json"                 # of a checkpoint: written last, removed first
UNFINISHED = ".unfinished"                   # small files of a checkpoint that is being written
HALF = "model.unfinished"                    # the model at the end, until it has its name
ADAPTER = "adapter_config.json"              # of PEFT: what makes a folder an adapter
_DRAFT = r"(\.(?:tmp|old)-\d+-\d+)"         # of a checkpoint: with what mt.save puts behind its name meanwhile
_CHECKPOINT = re.compile(rf"checkpoint-(\d{{1,18}}){_DRAFT}?")


class Owned:
    """A run's folder, as its marker has it. entries: by name the files of a folder, None: all that is there. data: what
    tells the run's rows (data.identity)."""

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
        if wrong := [name for name, files in self.entries.items() if not _is_entry(name, files)]:
            raise MegatrainError(f"{where}: entry {wrong[0]!r} is none that a run makes")

    def _write(self) -> None:
        body = {"program": PROGRAM, "version": VERSION, "entries": self.entries, "data": self.data}
        replace(self.run / MARKER, json.dumps(body, indent=1).encode())

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
        if self._lock >= 0:
            return
        path = self.run / LOCK
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as why:
            raise MegatrainError(f"out={self.run}: nothing can be written there ({why.strerror})") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had the lock before may have removed the file meanwhile, and another process made a new one.
            if not os.path.samestat(os.fstat(fd), os.stat(path)):
                raise BlockingIOError
        except (BlockingIOError, PermissionError, FileNotFoundError):
            who = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise MegatrainError(f"{self.run} is being written by {who}: wait, or use another folder") from None
        except OSError as why:
            say(f"{self.run}: this file system has no locks ({why.strerror}); no second run may write there")
        self._lock = fd
        # A forked child, a DataLoader's worker say, must not keep the lock when this process is gone.
        os.register_at_fork(after_in_child=self._leave)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._read()                                     # as whoever had the lock before left it

    def _leave(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def strangers(self) -> list[str]:
        """Paths in the folder that a run gives, of what this run did not make. mt.save's drafts are a checkpoint's."""
        found = []
        for name in sorted(p.name for p in self.run.iterdir() if _is_runs(p.name)) if self.run.is_dir() else ():
            listed = re.sub(_DRAFT + "$", "", name) in self.entries and not (self.run / name).is_symlink()
            found += [f"{name}/{file}" for file in self.others(name)] if listed else [name]
        return found

    def others(self, name: str) -> list[str]:
        """Files in a folder that this run did not put there."""
        path, own = self.run / name, self.entries.get(name)
        if own is None or not path.is_dir():
            return []
        with contextlib.suppress(MegatrainError, OSError):
            own = {*own, *mt.inspect_checkpoint(path).files}
        return [file for file in files_of(path) if file not in own]

    def begin(self, name: str, files: list[str] | None = None) -> None:
        """Lists what will be made, before it is. files: that a folder will have; of a checkpoint those that mt.save
        does not make."""
        path = self.run / name
        if os.path.lexists(path) and (name not in self.entries or self.others(name)):
            raise MegatrainError(f"{path} is there, and this run did not make it, or not all of it: move it away")
        self.entries[name] = files
        self._write()

    def remove(self, name: str) -> None:
        path, others = self.run / name, self.others(name)
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif others:
            say(f"{path} goes, but for {others[0]}, which this run did not make")
            for file in sorted({*files_of(path)} - {*others}, key=lambda file: file != WHOLE):
                (path / file).unlink()
        else:
            (path / WHOLE).unlink(missing_ok=True)
            shutil.rmtree(path)
        del self.entries[name]
        self._write()

    def start(self, data: dict[str, Any]) -> None:
        """A new run, in place of the one that the folder has: everything else was checked."""
        known = dict(self.entries)
        self.lock()
        if self.entries != known:
            raise MegatrainError(f"{self.run} has another run since this one was asked for: name another folder")
        self.check_free()
        for name in known:
            self._remove_drafts(name)
            self.remove(name)
        self.entries, self.data = dict.fromkeys((CONFIG, LOG, UNFINISHED)), data
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
        kept, step = [], step_of(whole[-1].name)         # later steps will be made again
        for text in (self.run / LOG).read_bytes().splitlines() if (self.run / LOG).is_file() else ():
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):   # of what a crash cut short
                kept += [text + b"\n"] * (json.loads(text)["step"] <= step)
        replace(self.run / LOG, b"".join(kept))
        self.data = data
        self._write()

    def check_free(self) -> None:
        if found := self.strangers():
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise MegatrainError(f"out={self.run} has {', '.join(found[:3])}{more}, which no run of megatrain made, "
                                 "and a run would put its own there: --out names another folder")

    def _remove_drafts(self, name: str) -> None:
        """What killed saves of a checkpoint left: the lock is this process's, so nobody writes there."""
        for path in self.run.glob(f"{name}.*") if step_of(name) >= 0 else ():
            if _CHECKPOINT.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def replace(path: Path, data: bytes) -> None:
    """All or none of a file's contents, on the disk. One process writes a run's folder, so one name does for all."""
    beside = path.with_name(f".{path.name}.unfinished")
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


def _is_runs(name: str) -> bool:
    return name in (CONFIG, LOG, UNFINISHED, HALF, FINAL) or _CHECKPOINT.fullmatch(name) is not None


def _is_entry(name: str, files: Any) -> bool:
    return _is_runs(name) and (files is None or (isinstance(files, list) and all(
        isinstance(file, str) and not {"", ".", ".."} & {*file.split("/")} and "\0" not in file for file in files)))


def files_of(path: Path) -> list[str]:
    """All that is no folder, below one; links are not followed."""
    return sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_symlink() or not found.is_dir())


def settings_of(run: Path) -> Settings:
    if not run.exists():
        raise MegatrainError(f"{run}: there is no such folder{near(str(run))}")
    if not (run / MARKER).is_file():
        raise MegatrainError(f"{run} is no run: it has no {MARKER}; megatrain train makes one")
    Owned(run)                                           # a marker that is none is refused
    return Settings.of(read_yaml(run / CONFIG), str(run / CONFIG))


def above(name: str) -> Path:
    """RUN, of RUN and of RUN/checkpoint-N."""
    path = Path(name)
    return path.parent if step_of(path.name) >= 0 else path


def run_of(name: str) -> Settings | None:
    run = above(name)
    return settings_of(run) if (run / MARKER).is_file() else None


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
    return int(found[1]) if found and not found[2] else -1


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
