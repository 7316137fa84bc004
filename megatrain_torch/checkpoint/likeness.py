"""Whose kernels a run's bits are of: what a checkpoint says of it, and what differs where the run goes on.

The same operands give the same bits where device, libraries and what was asked for are the same, and where layers keep
the same activations: one whose gate|up is not kept goes through it in tiles, and its weight gradients are summed in
another order. What layers keep by a plan that mt.stream made itself follows from memory, so a run that goes on is
given what it had.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from ..base.limits import show_bytes
from ..base.modes import MODES, read, repeating

if TYPE_CHECKING:
    from ..model.runtime import Runtime


def note(rt: Runtime) -> dict[str, Any]:
    """For a checkpoint: plain numbers and text."""
    versions = {"megatrain_torch": _core.__version__, "torch": torch.__version__}
    if rt.is_cuda:
        versions |= {"device": torch.cuda.get_device_name(rt.device), "cuBLASLt": "",
                     "cuDNN": str(torch.backends.cudnn.version())}
        for name in ("libcublasLt.so.13", "libcublasLt.so.12"):          # the one that torch has loaded
            with contextlib.suppress(OSError, AttributeError):
                version = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).cublasLtGetVersion
                version.restype = ctypes.c_size_t
                versions["cuBLASLt"] = versions["cuBLASLt"] or str(version())
    else:
        versions |= {"processor": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}
    # By the tokens of a pass what windows keep by plans that mt.stream made itself.
    chosen = {} if rt.planning is None else {str(tokens): modes for tokens, modes in rt.planning.kept().items()}
    return {"versions": versions, "repeating": repeating(), "compute": rt.compute, "products": rt.products,
            "memory": _memory(rt), "tokens": rt.keeps.most_tokens, "kept": rt.keeps.fused(), "chosen": chosen,
            "planned": [] if rt.planning is None else rt.planning.planned()}


def go_on(rt: Runtime, saved: dict[str, Any]) -> None:
    """Before states come: what the saved run was planned for is planned for here, at once, and what its layers chose to
    keep, this one's keep. saved: as `known` gives it."""
    if not saved or rt.planning is None:
        return
    if saved["memory"] == _memory(rt) and saved["chosen"]:
        rt.planning.resumed = {int(tokens): modes for tokens, modes in saved["chosen"].items()}
    if len(saved["planned"]) == 3 and all(type(n) is int and n > 0 for n in saved["planned"]):
        rt.planning.resumes(*saved["planned"])


def differences(rt: Runtime, saved: dict[str, Any]) -> list[str]:
    """What this run does otherwise than the one that goes on here, in words. saved: as for `go_on`."""
    if not saved:
        return []
    here = note(rt)
    if saved["memory"] == here["memory"] and saved["chosen"] and rt.planning is not None:
        here["kept"] = saved["kept"]             # of passes of the same length
    there = saved["versions"]
    found = [f"{what} {there.get(what, 'none')} there and {mine} here" for what, mine in here["versions"].items()
             if there.get(what) != mine]
    found += [f"{what} {saved[what]!r} there and {here[what]!r} here" for what in ("compute", "products")
              if saved[what] != here[what]]
    if saved["repeating"] != here["repeating"]:
        words = ("on there and off here", "off there and on here")[here["repeating"]]
        found.append(f"torch.use_deterministic_algorithms is {words}")
    # Layers with many tokens that go through gate|up in tiles now and did not, or the reverse.
    many = [w for w in rt.windows if w.fused is not None and w.name in saved["kept"]
            and 0 < w.fused.sizes.tiled[1] < saved["tokens"]]
    differ = [w for w in many if w.name in here["kept"]
              and len({read(kept[w.name]).keep == "saved" for kept in (saved["kept"], here["kept"])}) == 2]
    if differ:
        found.append(f"{len(differ)} layers keep other activations ({differ[0].name}: {saved['kept'][differ[0].name]} "
                     f"there and {here['kept'][differ[0].name]} here)")
    elif saved["memory"] != here["memory"] and any(w.name not in here["kept"] for w in many):
        sizes = " and ".join(f"{show_bytes(m[1] or m[0])} {where}" for m, where in
                             ((saved["memory"], "there"), (here["memory"], "here")))
        found.append(f"device memory {sizes}, for which layers choose what they keep")
    return found


def known(rt: Runtime, saved: Any) -> dict[str, Any]:
    """What `note`, of this version or an older one, has put into a checkpoint; {}: anything else is there."""
    here = note(rt)
    found = {"planned": [], "products": "bf16"} | saved if isinstance(saved, dict) else {}
    good = (all(type(found.get(k)) is type(v) for k, v in here.items())
            and all(tokens.isdecimal() and isinstance(modes, dict) for tokens, modes in found["chosen"].items())
            and all(mode in MODES for modes in (found["kept"], *found["chosen"].values()) for mode in modes.values())
            and [type(n) for n in found["memory"]] == [int, int])
    return found if good else {}


def _memory(rt: Runtime) -> list[int]:
    """Of the device, and the limit of what may be used; 0: there is none."""
    total = torch.cuda.get_device_properties(rt.device).total_memory if rt.is_cuda else 0
    limit = rt.cap.limit if rt.planning is None else rt.planning.choices.vram
    return [total, limit or 0]
