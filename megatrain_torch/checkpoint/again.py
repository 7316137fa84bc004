"""Files of weights that have not changed since the checkpoint before: the next one has them again, by hard links.

A frozen base is most of a run with adapters, and the same in each of its checkpoints. Such weights lie in files of
their own, which are written once and take room once. Each folder is whole by itself: a copy of it has all, and none
needs another to stay. Where files cannot be linked they are written. Names of these files are nobody else's, so that
what a save_pretrained into one folder writes in place is in no other.
"""
from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..store.records import Record
from ..store.tensorfiles import LENGTH_BYTES, Stored, TensorFile

LEAST_BYTES = 64 << 20               # of frozen weights, for files of their own
STEM = "frozen"                      # of their names

Still = dict[str, tuple[int, ...]]   # by a file's name how often each of its weights had been written to
# Files of the last checkpoint, by their headers: their path; their `form`, which is what the file system said of them
# then; how often each of their weights had been written to, `writes`; what the manifest says `about` them.
Before = dict[bytes, SimpleNamespace]


def _form_of(path: Path) -> tuple[int, ...]:
    s = path.stat()
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def is_still(record: Record) -> bool:
    """Frozen, and never stepped with: what changes it is a write, which is counted."""
    return record.optimizer is None and not record.param.requires_grad


def known(files: list[TensorFile], still: Still, before: Before) -> set[str]:
    """Names of files whose bytes a file of the last checkpoint has."""
    return {f.name for f in files if f.name in still and (w := before.get(f.header)) is not None
            and w.writes == still[f.name]}


def near(files: list[TensorFile], names: set[str], before: Before, folder: Path) -> set[str]:
    """Of these the ones that are as they were, on the file system that `folder` will be on."""
    device, found = standing_parent(folder).stat().st_dev, set()
    for f in files:
        with suppress(OSError):
            if f.name in names and (w := before[f.header]).form[0] == device and _form_of(w.path) == w.form:
                found.add(f.name)
    return found


def can_link(folder: Path) -> bool:
    """Has the file system of a folder, which may not be there yet, links?"""
    try:
        with tempfile.TemporaryDirectory(dir=standing_parent(folder)) as there:
            (Path(there) / "file").touch()
            os.link(Path(there) / "file", Path(there) / "link")
            return True
    except OSError:
        return False


def standing_parent(folder: Path) -> Path:
    """The folder itself, or the first one around it that is there."""
    return next(p for p in (folder, *folder.parents) if p.exists())


def link(files: list[TensorFile], names: set[str], before: Before, folder: Path) -> set[str]:
    """Makes these in the folder; gives the names of those that it could. The others are to be written."""
    made = set()
    for f in files:
        if f.name in names:
            with suppress(OSError):
                os.link(before[f.header].path, folder / f.name)
                made.add(f.name)
    return made


def noted(files: list[TensorFile], still: Still, folder: Path, body: dict[str, Any]) -> Before:
    """For the next checkpoint, of one that has its name."""
    with suppress(OSError):
        return {f.header: SimpleNamespace(path=folder / f.name, form=_form_of(folder / f.name), writes=still[f.name],
                                          about=body["files"][f.name]) for f in files if f.name in still}
    return {}


def loaded(folder: Path, body: dict[str, Any], records: dict[str, Record], tensors: dict[str, Stored]) -> Before:
    """As `noted`, of a checkpoint that was read. records, tensors: of weights, by name."""
    files: dict[str, list[str]] = {}
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].begin):
        files.setdefault(stored.file, []).append(name)
    found = {}
    for file, names in files.items():
        own = [records[name] for name in names if name in records]
        if len(own) == len(names) and all(map(is_still, own)):
            with suppress(OSError):
                with (folder / file).open("rb") as f:
                    length = f.read(LENGTH_BYTES)
                    header = length + f.read(int.from_bytes(length, "little"))
                found[header] = SimpleNamespace(path=folder / file, form=_form_of(folder / file),
                                                writes=tuple(r.writes for r in own), about=body["files"][file])
    return found
