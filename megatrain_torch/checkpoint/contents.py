"""What a checkpoint's manifest, its index and training.pt must have in them: checked whole before anything is loaded.

A sum says that a file is as somebody wrote it, and not that it was mt.save. So each name, type and number that
restore.py goes by is looked at here; the message names the file, where in it, and what is needed there.
"""
from __future__ import annotations

import io
import math
import random
import re
import sys
from typing import Any

import torch
from torch import Tensor

from ..base.errors import MegatrainError
from ..base.formats import GROUP, LOW_BYTES
from ..base.strict import field, is_count, is_counts, is_plain_name, is_shape, parsed, shown, table
from ..optim.states import CODES, MOMENTS
from ..store.tensorfiles import DTYPES, Stored

MASTERS = {"LO": "master_low", "MASTER": "master"}
BLOCK_BYTES = 4 << 20                # MT_BLOCK_BYTES of csrc/core/blocks.h: each has a sum of 8 bytes
STEPS = 2**53                        # more than this an fp64 does not count
_HEX = re.compile(r"([0-9a-f]{2})*")
_TENSORS = re.compile(r"(model|weights|frozen|states)(-\d+-of-\d+)?\.safetensors")


# ---- the manifest's body -------------------------------------------------------------------------

def check_body(body: Any, where: str, training: str) -> dict[str, Any]:
    """Raises: MegatrainError: something in it is missing, or is not what it must be. training: a file it must name."""
    table(body, where)
    field(body, "optimizer", lambda v: v is None or isinstance(v, str), "a name or null", where)
    states = field(body, "states", lambda v: v is None or v in tuple(LOW_BYTES), "a format of states or null", where)
    field(body, "low_bytes", lambda v: type(v) is int and v in ((0, 1, 2) if states is None else (LOW_BYTES[states],)),
          "the bytes of these states' masters", where)
    field(body, "skipped_steps", is_count, "a whole number", where)
    files = field(body, "files", lambda v: isinstance(v, dict), "a table of files", where)
    for name, about in files.items():
        _check_file(name, about, where)
    if training not in files:
        raise MegatrainError(f"{where} names no {training}: files has {shown(list(files))}")
    for name, about in field(body, "parameters", lambda v: isinstance(v, dict), "a table", where).items():
        _check_parameter(about, f"{where}: parameter {shown(name)}", body)
    return body


def _check_file(name: str, about: Any, where: str) -> None:
    if not is_plain_name(name):
        raise MegatrainError(f"{where}: the file name {shown(name)} leads out of the folder")
    here = f"{where}: file {name}"
    size = field(table(about, here), "bytes", is_count, "a whole number", here)
    if _TENSORS.fullmatch(name):
        blocks = -(-size // BLOCK_BYTES)
        field(about, "sums", lambda v: _is_hex(v) and len(v) == 16 * blocks, f"{blocks} sums in hexadecimal", here)
    elif name.endswith(".safetensors"):
        raise MegatrainError(f"{here}: files of tensors are called model, weights or states")
    else:
        field(about, "sha256", lambda v: _is_hex(v) and len(v) == 64, "a SHA-256", here)


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _check_parameter(about: Any, where: str, body: dict[str, Any]) -> None:
    kind = field(table(about, where), "dtype", lambda v: isinstance(v, str) and v in DTYPES, "a type", where)
    shape = field(about, "shape", is_shape, "a list of sizes", where)
    if "step" in about:
        if body["states"] is None:
            raise MegatrainError(f"{where} has a step, and the checkpoint no states of mt.AdamW")
        field(about, "step", lambda v: is_count(v) and v < STEPS, "a whole number", where)
        field(about, "master", lambda v: isinstance(v, str) and v in _masters(kind, body["low_bytes"]),
              f"one of {_masters(kind, body['low_bytes'])} for {kind}", where)
    if "strides" in about:
        field(about, "strides", lambda v: is_counts(v) and len(v) == len(shape), "a stride for each size", where)
    if "key" in about:
        field(about, "key", is_count, "a whole number", where)


def _masters(kind: str, low_bytes: int) -> tuple[str, ...]:
    """Planes that may make the fp32 master of a weight of this type."""
    own = {"BF16": "LO" if low_bytes else "", "F16": "MASTER"}.get(kind, "")
    return tuple(dict.fromkeys(("", own)))


# ---- tensors -------------------------------------------------------------------------------------

def check_tensors(body: dict[str, Any], tensors: dict[str, Stored], states: dict[str, Stored], where: str) -> None:
    """That the files have each parameter and its states, in the type and the shape that the manifest says."""
    for name, about in body["parameters"].items():
        _check_stored(tensors, name, DTYPES[about["dtype"]], tuple(about["shape"]), where)
        if "step" in about:
            check_states(body, name, states, where)


def check_states(body: dict[str, Any], name: str, states: dict[str, Stored], where: str,
                 kind: torch.dtype | None = None) -> None:
    """As check_tensors, of one parameter's. kind: of the moments, where they are another optimizer's."""
    about = body["parameters"][name]
    shape = tuple(about["shape"])
    if body["states"] == "fp32":
        wanted = {key: (kind or torch.float32, shape) for key in MOMENTS}
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


def check_index(data: bytes, where: str, tensors: dict[str, Stored]) -> None:
    """That transformers, which goes by the index, finds each tensor in the file that has it."""
    names = field(table(parsed(data, where), where), "weight_map", lambda v: isinstance(v, dict), "a table", where)
    if names != {name: stored.file for name, stored in tensors.items()}:
        wrong = next((n for n, file in names.items() if n not in tensors or file != tensors[n].file), None)
        said = f"{shown(wrong)} in {shown(names[wrong])}" if wrong is not None else "fewer tensors than the files have"
        raise MegatrainError(f"{where}: weight_map has {said}")


# ---- training.pt ---------------------------------------------------------------------------------

def training_of(data: bytes, where: str, has_optimizer: bool) -> dict[str, Any]:
    """What torch.save wrote there.

    Raises:
        MegatrainError: it cannot be read, or is not what mt.save writes.
    """
    try:
        found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as why:                         # a pickle is a program, and its reader raises what it likes
        raise MegatrainError(f"{where} cannot be read: {shown(why)}") from None
    table(found, where)
    for name in ("scheduler", "extra", "random"):
        field(found, name, lambda _: True, "what mt.save wrote", where)
    _check_random(found["random"], f"{where}: random")
    for rank, states in enumerate(found.get("random_by_rank", ())):
        _check_random(states, f"{where}: random_by_rank, {rank}")
    if has_optimizer:
        _check_groups(field(found, "groups", lambda v: isinstance(v, list), "a list of groups", where), where)
    others = table(found.get("others", {}), f"{where}: others")
    for name, own in others.items():
        if not isinstance(name, str) or not all(isinstance(k, str) for k in table(own, f"{where}: others of {name}")):
            raise MegatrainError(f"{where}: others has {shown(name)}: names are needed")
    return found


def _check_groups(groups: list[Any], where: str) -> None:
    for number, group in enumerate(groups):
        here = f"{where}: group {number}"
        field(table(group, here), "params", lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
              "a list of names", here)
        if odd := [k for k in group if not isinstance(k, str)]:
            raise MegatrainError(f"{here} has {shown(odd[0])}: names are needed")


def step_of(own: dict[str, Any], where: str) -> int:
    """Of a parameter, as torch.optim.AdamW has it."""
    step = field(own, "step", _is_number, "a number", where)
    if not 0 <= float(step) < STEPS:
        raise MegatrainError(f"{where}: step={shown(step)}: a whole number is needed")
    return int(step)


def check_hyper(saved: list[dict[str, Any]], mine: list[dict[str, Any]], where: str) -> None:
    """That what a group is to take is of the kind of what it has."""
    for number, (there, here) in enumerate(zip(saved, mine)):
        for name, value in there.items():
            if name != "params" and name in here and not _alike(value, here[name]):
                raise MegatrainError(f"{where}: group {number}: {name}={shown(value)}, and {shown(here[name])} here")


def _alike(value: Any, mine: Any) -> bool:
    if isinstance(mine, bool) or isinstance(value, bool):
        return isinstance(mine, bool | None) and isinstance(value, bool | None)
    if isinstance(mine, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(mine) and all(map(_alike, value, mine))
    if isinstance(mine, (int, float, Tensor)) or mine is None:
        return mine is None if value is None else mine is None or _is_number(value)
    return isinstance(value, type(mine))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex() and not bool(value.isnan())
    return isinstance(value, (int, float)) and not math.isnan(value)


def _check_random(found: Any, where: str) -> None:
    """Each state is tried on a generator of its own: the run's are set when all else is loaded."""
    table(found, where)
    try:
        version, words, gauss = found["python"]
        random.Random().setstate((version, tuple(words), gauss))
        torch.Generator().set_state(found["torch"])
        if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = found["numpy"]
            numpy.random.RandomState().set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
        if not all(isinstance(t, Tensor) and t.dtype == torch.uint8 for t in found.get("cuda", [])):
            raise TypeError("cuda: states of bytes are needed")
        for state in found.get("cuda", []) if torch.cuda.is_available() else []:
            torch.Generator("cuda").set_state(state)
    except Exception as why:                         # each of the three raises what it likes
        raise MegatrainError(f"{where}: these are no states of random numbers: {shown(why)}") from None
