"""The texts of refusals: the table of what is needed, and the smallest changes that fit."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ..base.errors import MegatrainError
from ..base.limits import Bound, show_bytes, show_size, with_margin
from ..store.disk import file_bytes
from .planner import as_text
from .tally import Asked

Need = Callable[[Asked], dict[str, int]]


def short(asked: Asked, need: Need, bound: Bound, what: str, free_on_device: int | None) -> MegatrainError:
    """need: bytes beyond what is there now, `what` for."""
    total = sum(need(asked).values())
    over = with_margin(total) - bound.free
    changes = changes_of(asked, lambda a: with_margin(sum(need(a).values())) <= bound.free, over, free_on_device)
    words = f"{show_bytes(over)} more under the limit of {bound.what} ({bound.remedy})"
    return refusal(asked, f"host memory {what}", need(asked) | {"margin": with_margin(total) - total}, bound.free,
                    f"free: {bound.what}", changes | {"host": sum(asked.planes().values())}, words)


def changes_of(asked: Asked, fits: Callable[[Asked], bool], over: int, free_on_device: int | None) -> dict[str, Any]:
    """Arguments of mt.stream, each of which alone makes it fit."""
    found: dict[str, Any] = {}
    if asked.micro > 1 and fits(dataclasses.replace(asked, micro=1)):
        found["micro"] = 1
    wide = any(p.dtype in (torch.float32, torch.float64) for _, own in asked.groups for _, p in own)
    if wide and asked.dtype is None and fits(dataclasses.replace(asked, dtype=torch.bfloat16)):
        found["dtype"] = torch.bfloat16
    for tried in asked.moved("ram", "vram") if free_on_device is not None else ():
        if sum(tried.device().values()) > free_on_device:
            break
        if fits(tried):
            found["homes"] = tried.named()
            break
    if asked.states == "fp32" and fits(dataclasses.replace(asked, states="8bit")):
        found["states"] = "8bit"
    for tried in asked.moved("ram", "disk"):
        if fits(tried):
            found["nvme"] = file_bytes(tried)
            break
    trained = sum(u.trained for u in asked.units())
    states = sum(asked.planes().values()) - sum(u.weights for u in asked.units())
    frozen = [(name, [(n, _Frozen(p)) for n, p in own]) for name, own in asked.groups]
    if trained and over < states and fits(dataclasses.replace(asked, groups=frozen)):
        found["frozen"] = math.ceil(over * trained / states)
    return found


class _Frozen:
    """A parameter as unit_bytes sees it, if it were not trained."""

    requires_grad = False

    def __init__(self, p: Any) -> None:
        self.dtype, self.numel, self.is_floating_point = p.dtype, p.numel, p.is_floating_point

    @staticmethod
    def dim() -> int:
        """It is none of experts: bytes in host memory do not depend on that."""
        return 1


def refusal(asked: Asked, title: str, need: dict[str, int], most: int, whose: str, changes: dict[str, Any],
             *words: str) -> MegatrainError:
    """The table and what would fit."""
    rows: list[tuple[str, ...]] = [(title, "bytes", "")]
    rows += [(plane, show_bytes(n), "") for plane, n in need.items() if n]
    total = sum(need.values())
    rows.append(("in all", show_bytes(total), f"of {show_bytes(most)} ({whose})"))
    said = [*(_in_words(k, v) for k, v in changes.items()), *words]
    error = MegatrainError("\n".join([f"{asked.name} does not fit; nothing was changed:", "", as_text(("", rows)), "",
                                      "What would fit, each alone: " + "; ".join(said) + "."]))
    error.changes = changes
    return error


def _in_words(name: str, value: Any) -> str:
    if name in ("vram", "host"):
        return f"{name}={show_size(value)!r}, if so much is there"
    if name == "states":
        return f"states={value!r}, of mt.AdamW or, where host= is given, in mt.stream's plan"
    if name == "nvme":
        return f"nvme= a directory with {show_size(value)} free"
    if name == "frozen":
        return f"{value:,} parameters less to train (freeze some, or LoRA)"
    if name == "homes":
        at = sum(home == "vram" for home in value.values())
        return f"{at} units at home in VRAM: plan={{'homes': ...}} as in this exception's `changes`"
    if name == "dtype":
        return f"dtype={value}"
    return f"{name}={value}"
