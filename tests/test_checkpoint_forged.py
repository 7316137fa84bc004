"""Checkpoints that somebody else wrote: each is refused by the file's name, before anything is changed.

Sums are made anew after each change, so that what is looked at is the contents.
"""
from __future__ import annotations

import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_adamw import feed, grads_for, plain_dots
from test_states import everything

import megatrain_torch as mt
from megatrain_torch.base import strict
from megatrain_torch.checkpoint import manifest, parts
from megatrain_torch.checkpoint import save as checkpoint
from megatrain_torch.checkpoint.manifest import training_of
from megatrain_torch.model.stream import runtime_of
from megatrain_torch.store import tensorfiles

SHAPES = [(30, 7), (257,), (8,)]
DEEP = b"[" * 100_000
Body = dict[str, Any]


def pair() -> tuple[Any, Any, Any]:
    model = mt.stream(plain_dots(torch.bfloat16, SHAPES), device="cpu")
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 10)
    feed(model, opt, grads_for(model, 0))
    return model, opt, scheduler


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "FILE_BYTES", 500)               # several files, with an index
        model, opt, scheduler = pair()
        mt.save(model, opt, folder / "ours", scheduler=scheduler)
    return folder


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any, Any]:
    return pair()


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "ours", tmp_path / "c"))


def refused(folder: Path, target: tuple[Any, Any, Any], verify: bool = True) -> str:
    """What is said; nothing is changed."""
    model, opt, scheduler = target
    before, rates = everything(model, opt), scheduler.state_dict()
    with pytest.raises(mt.MegatrainError) as why:
        mt.load(model, opt, folder, scheduler=scheduler, verify=verify)
    assert not runtime_of(model).broken
    after = everything(model, opt)
    assert not [k for k, v in before.items() if not torch.equal(v, after[k])] and scheduler.state_dict() == rates
    assert "half-loaded" not in str(why.value) and str(folder) in str(why.value)
    return str(why.value)


def rewrite(folder: Path, change: Callable[[Body], Any]) -> None:
    """The manifest, with a sum of its own."""
    body = manifest.read(folder)
    change(body)
    (folder / manifest.NAME).write_bytes(manifest.dump(body))


def replace(folder: Path, name: str, data: bytes) -> None:
    """A file, as the manifest has it."""
    (folder / name).write_bytes(data)
    if name.endswith(".safetensors"):        # sums of nothing: what a file says of itself is looked at before its bytes
        entry = {"bytes": len(data), "sums": "00" * 8}
    else:
        entry = {"bytes": len(data), "sha256": manifest.sha256(data)}
    rewrite(folder, lambda body: body["files"].update({name: entry}))


# ---- the manifest --------------------------------------------------------------------------------

WHOLE = [b"", b"{", b"null", b"[]", b"3", b'"a"', b"NaN", DEEP, b'{"a":' * 100_000, b"\xff\xfe", b"9" * 10_000,
         b'{"format": "megatrain checkpoint", "format": "b"}', b'{"format": 3}', b'{"body": 1e999}',
         b'{"format": "megatrain checkpoint", "version": true, "sha256": "", "body": {}}',
         b'{"format": "megatrain checkpoint", "version": 1, "sha256": [], "body": {}}']


@pytest.mark.parametrize("data", WHOLE, ids=lambda data: repr(data[:20]))
def test_a_manifest_that_is_none_is_refused(folder: Path, target: Any, data: bytes) -> None:
    (folder / manifest.NAME).write_bytes(data)
    assert manifest.NAME in refused(folder, target)


FIRST = "layers.0.weight"
BODIES: dict[str, Callable[[Body], Any]] = {
    **{f"no {name}": lambda b, name=name: b.pop(name)
       for name in ("parameters", "files", "optimizer", "states", "low_bytes", "skipped_steps")},
    **{f"{name}={value!r}": lambda b, name=name, value=value: b.update({name: value})
       for name, value in [("parameters", []), ("parameters", {FIRST: 3}), ("files", []), ("files", {"a": None}),
                           ("optimizer", 3), ("states", 3), ("states", []), ("states", "8bit"), ("states", "4bit"),
                           ("low_bytes", 7), ("low_bytes", 1), ("low_bytes", True), ("low_bytes", "2"),
                           ("skipped_steps", -1), ("skipped_steps", "a"), ("skipped_steps", 1.5), ("states", None)]},
    **{f"parameter {name}={value!r}": lambda b, name=name, value=value: b["parameters"][FIRST].update({name: value})
       for name, value in [("dtype", 3), ("dtype", "F3"), ("dtype", []), ("dtype", "F32"), ("shape", 3),
                           ("shape", [30, 8]), ("shape", [-30, -7]), ("shape", [2.0, 105]), ("shape", [True, 210]),
                           ("shape", [2**62, 2**62]), ("shape", None), ("shape", [210]), ("step", "a"), ("step", -1),
                           ("step", 1.5), ("step", True), ("step", None), ("step", 2**60), ("master", "HI"),
                           ("master", 3), ("master", []), ("master", "MASTER"), ("strides", 3), ("strides", [1]),
                           ("key", "a"), ("key", -1)]},
    **{f"no parameter's {name}": lambda b, name=name: b["parameters"][FIRST].pop(name)
       for name in ("dtype", "shape", "master", "key")},
    "no parameter": lambda b: b["parameters"].pop(FIRST),
    "another parameter": lambda b: b["parameters"].update({"more": b["parameters"][FIRST]}),
    **{f"file {name!r}": lambda b, name=name: b["files"].update({name: {"bytes": 0, "sha256": "0" * 64}})
       for name in ("../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "\ud800", "a" * 300, "more.safetensors",
                    "gone.json")},
    **{f"file's {name}={value!r}": lambda b, name=name, value=value: b["files"]["states-00001-of-00007.safetensors"]
       .update({name: value}) for name, value in [("bytes", "a"), ("bytes", -1), ("bytes", 2**70), ("bytes", 1.0),
                                                  ("sums", 3), ("sums", "xy"), ("sums", "0"), ("sums", "00")]},
    **{f"no {name}": lambda b, name=name: b["files"].pop(name)
       for name in (parts.TRAINING, "states-00001-of-00007.safetensors", "model-00002-of-00003.safetensors")},
}


@pytest.mark.parametrize("change", BODIES.values(), ids=[k[:40] for k in BODIES])
def test_a_body_with_something_else_in_it_is_refused(folder: Path, target: Any, change: Callable[[Body], Any]) -> None:
    rewrite(folder, change)
    refused(folder, target)


@pytest.mark.parametrize("change, words", [
    (lambda b: b["parameters"][FIRST].pop("dtype"), f"parameter '{FIRST}' is not as mt.save writes it: it lacks 'dtype'"),
    (lambda b: b["parameters"][FIRST].update(step=True), f"parameter '{FIRST}' is not as mt.save writes it: step=True"),
    (lambda b: b["files"][parts.TRAINING].update(bytes=1.5), "file 'training.pt' is not as mt.save writes it: bytes=1.5"),
    (lambda b: b["files"][parts.TRAINING].pop("sha256"), "file 'training.pt' is not as mt.save writes it: it lacks 'sha256'"),
    (lambda b: b.update(states="4bit"), "manifest.json is not as mt.save writes it: states='4bit'"),
    (lambda b: b.pop("skipped_steps"), "manifest.json is not as mt.save writes it: it lacks 'skipped_steps'"),
    (lambda b: b.update(low_bytes=float("nan")), "manifest.json is not as mt.save writes it: low_bytes=nan")])
def test_what_is_wrong_is_named_with_its_value(folder: Path, target: Any, change: Callable[[Body], Any],
                                               words: str) -> None:
    rewrite(folder, change)
    assert words in refused(folder, target)


def test_files_that_links_lead_out_of_the_folder_to_are_refused(folder: Path, target: Any, tmp_path: Path) -> None:
    for name in (manifest.NAME, parts.TRAINING, "states-00001-of-00007.safetensors"):
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        assert "leads out of its folder" in refused(folder, target)
        (folder / name).unlink()
        (tmp_path / "elsewhere").rename(folder / name)
    (tmp_path / "link").symlink_to(folder)
    mt.load(target[0], None, tmp_path / "link")                      # the folder itself may be elsewhere


# ---- headers -------------------------------------------------------------------------------------

def header_of(path: Path) -> tuple[Body, bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + length]), data[8 + length:]


def packed(header: bytes, rest: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + rest


def one(**changes: Any) -> Callable[[Body], Any]:
    """Changes the first tensor's entry."""
    return lambda h: h[next(k for k in h if k != "__metadata__")].update(changes)


def without(name: str) -> Callable[[Body], Any]:
    return lambda h: h[next(k for k in h if k != "__metadata__")].pop(name)


HEADERS: dict[str, Callable[[Body], Any] | bytes] = {
    **{repr(raw[:24]): raw for raw in (b"", b"{", b"[]", b"null", b"3", DEEP, b'{"a":' * 100_000, b"\xff", b'{"a": NaN}',
                                       b'{"a": 1e999}', b'{"a": {}, "a": {}}', b'{"a": ' + b"9" * 5000 + b"}",
                                       b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}')},
    **{f"{k}={v!r}": one(**{k: v}) for k, v in [
        ("dtype", 3), ("dtype", "F3"), ("dtype", []), ("dtype", "F64"), ("shape", 3), ("shape", "30"), ("shape", [-1]),
        ("shape", [2.0]), ("shape", [True]), ("shape", [2**62, 2**62]), ("shape", [0, 2**63]), ("shape", []),
        ("shape", [1] * 100_000), ("data_offsets", 3), ("data_offsets", [0]), ("data_offsets", [0, 1, 2]),
        ("data_offsets", ["0", "1"]), ("data_offsets", [0.0, 1.0]), ("data_offsets", [-8, 8]),
        ("data_offsets", [1 << 60, 1 << 61]), ("data_offsets", None), ("more", 1)]},
    **{f"no {k}": without(k) for k in ("dtype", "shape", "data_offsets")},
    "metadata": lambda h: h.update(__metadata__=3), "metadata of numbers": lambda h: h.update(__metadata__={"a": 3}),
    "a number": lambda h: h.update(more=3), "a list": lambda h: h.update(more=[]),
    "an overlap": lambda h: h.update(more={"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}),
    "one more of no bytes, elsewhere": lambda h: h.update(more={"dtype": "I8", "shape": [0], "data_offsets": [1, 1]}),
    "none": lambda h: h.clear(),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=[k[:40] for k in HEADERS])
@pytest.mark.parametrize("stem", ["model", "states"])
def test_a_header_with_something_else_in_it_is_refused(folder: Path, target: Any, stem: str,
                                                       change: Callable[[Body], Any] | bytes) -> None:
    name = sorted(p.name for p in folder.glob(f"{stem}-*"))[-1]
    header, rest = header_of(folder / name)
    if isinstance(change, bytes):
        data = packed(change, rest)
    else:
        change(header)
        data = packed(json.dumps(header).encode(), rest)
    replace(folder, name, data)
    assert name in refused(folder, target)


@pytest.mark.parametrize("change", ["a gap", "a byte more", "no length", "a length too long"])
def test_bytes_that_are_no_tensors_are_refused(folder: Path, target: Any, change: str) -> None:
    name = "model-00001-of-00003.safetensors"
    header, rest = header_of(folder / name)
    text = json.dumps(header).encode()
    first = next(k for k in header if k != "__metadata__")
    header[first]["data_offsets"] = [n + 8 for n in header[first]["data_offsets"]]
    data = {"a gap": packed(json.dumps(header).encode(), b"\0" * 8 + rest), "a byte more": packed(text, rest + b"\0"),
            "no length": b"\0\0", "a length too long": struct.pack("<Q", 2**63) + text}[change]
    replace(folder, name, data)
    assert name in refused(folder, target)


def test_a_state_of_another_form_than_its_parameter_is_refused_without_a_look_at_the_sums(folder: Path,
                                                                                          target: Any) -> None:
    """Types and shapes that make the same bytes."""
    found = 0
    for path in sorted(folder.glob("*.safetensors")):
        whole, (header, rest) = path.read_bytes(), header_of(path)
        for name, about in list(header.items()):
            if name == "__metadata__":
                continue
            was = dict(about)
            numbers = about["shape"]
            for changed in ({"shape": [1, *numbers]}, {"dtype": {"F32": "I32", "BF16": "F16", "I16": "F16"}[was["dtype"]]}):
                header[name] = was | changed
                replace(folder, path.name, packed(json.dumps(header).encode(), rest))
                said = refused(folder, target, verify=False)
                assert name in said and path.name in said
                found += 1
            header[name] = was
        replace(folder, path.name, whole)
    assert found >= 2 * 4 * len(SHAPES) - 2


def test_a_tensor_that_two_files_have_is_refused(folder: Path, target: Any) -> None:
    replace(folder, "model-00009-of-00003.safetensors", (folder / "model-00001-of-00003.safetensors").read_bytes())
    assert "which is in model-00001-of-00003.safetensors too" in refused(folder, target)


# ---- training.pt -----------------------------------------------------------------------------------

def pickled(value: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


def changed(folder: Path, **changes: Any) -> bytes:
    whole = training_of(str(folder / parts.TRAINING), True)
    return pickled({k: v for k, v in (whole | changes).items() if v is not ...})


class Strange:
    pass


TRAININGS: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda _: b"", "text": lambda _: b"abc", "cut": lambda f: (f / parts.TRAINING).read_bytes()[:-99],
    "a class": lambda _: pickled(Strange()), "a list": lambda _: pickled([]), "a number": lambda _: pickled(3),
    "a tensor": lambda _: pickled(torch.zeros(3)),
    "no zip": lambda _: b"\x80\x02." + b"a" * 40,
    **{f"no {name}": lambda f, name=name: changed(f, **{name: ...}) for name in ("random", "scheduler", "extra", "groups")},
    **{f"{name}={value!r}": lambda f, name=name, value=value: changed(f, **{name: value}) for name, value in [
        ("random", 3), ("random", {}), ("random", {"python": 3, "torch": 3}), ("groups", 3), ("groups", [3]),
        ("groups", [{}]), ("groups", [{"params": 3}]), ("groups", [{"params": [3]}]), ("groups", []), ("scheduler", 3),
        ("scheduler", [1]), ("scheduler", "a"), ("groups", [torch.zeros(3)]), ("random_by_rank", torch.zeros(3)),
        ("others", None), ("others", torch.zeros(3))]},
}


@pytest.mark.parametrize("make", TRAININGS.values(), ids=[k[:60] for k in TRAININGS])
def test_a_training_pt_with_something_else_in_it_is_refused(folder: Path, target: Any,
                                                            make: Callable[[Path], bytes]) -> None:
    replace(folder, parts.TRAINING, make(folder))
    assert parts.TRAINING in refused(folder, target) or "groups have" in refused(folder, target)


# ---- the reader itself ---------------------------------------------------------------------------

def test_files_of_more_than_4_GB_have_offsets_that_are_taken(tmp_path: Path) -> None:
    n = 6_000_000_000
    table = {"a": {"dtype": "I8", "shape": [n], "data_offsets": [0, n]},
             "b": {"dtype": "I8", "shape": [n], "data_offsets": [n, 2 * n]}}
    path = tmp_path / "a.safetensors"
    path.write_bytes(packed(json.dumps(table).encode(), b""))
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size + 2 * n)                      # a hole
    assert tensorfiles.listed(path)["b"].end == path.stat().st_size


def test_entries_may_come_in_any_order(tmp_path: Path) -> None:
    table = {"b": {"dtype": "I8", "shape": [2], "data_offsets": [1, 3]}, "a": {"dtype": "I8", "shape": [], "data_offsets": [0, 1]}}
    (tmp_path / "a.safetensors").write_bytes(packed(json.dumps(table).encode(), b"abc"))
    assert set(tensorfiles.listed(tmp_path / "a.safetensors")) == {"a", "b"}


@pytest.mark.parametrize("text, words", [
    (b"[,]", "line 1 column 2"), (b"\xc3", "utf-8"), (b"9" * 10_000, "digits"), (b'{"a": 1, "a": 1}', "'a' is there twice"),
    (DEEP, "recursion")], ids=lambda v: repr(v[:20]))
def test_what_is_no_json_is_named(text: bytes, words: str) -> None:
    with pytest.raises(mt.MegatrainError, match=f"here: .*{words}"):
        strict.parsed(text, "here")


def test_left_overs_of_other_names_stay(tmp_path: Path) -> None:
    for name in ("c.tmp-backup", "c.old-2024", "c.tmp-1-2-mine", "c.tmp-1-2"):
        (tmp_path / name).mkdir()
    manifest.sweep(tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.old-2024", "c.tmp-1-2-mine", "c.tmp-backup"]
