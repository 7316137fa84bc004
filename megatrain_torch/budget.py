"""What fused windows keep between forward and backward, when nobody has planned it: as much as fits.

Decided at the first training pass of a given size, when tokens per pass are known: memory that is free
on the device by then, less what a pass needs at least, is spent on kept activations, where it saves
recomputing. Windows at the end keep most: what they keep lives shortest. Where that leaves windows that run
again, the first of them keep what they can in host memory, if the bus has time. mt.plan decides better and
beforehand; this is for those who did not ask.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from .machine import Machine, resolve
from .modes import read
from .templates import spared
from .window import Window

LOGITS_BYTES = 3 << 29        # a chunk of logits, its gradient in place, and the head's gradient in fp32 beside
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MARGIN = 0.06                 # of what may be used: fragmentation, cuBLAS and cuDNN workspaces
# What the driver and libraries are taken to have, at least: a little more than was seen (0.86 GiB), so that equal runs
# find the same left. And how much less may be left where a run goes on with what it kept.
BESIDE, SLACK = 1 << 30, 1 << 30


class Cap:
    """Holds torch's allocator to a limit of the whole device, while a streamed model has one.

    torch keeps freed memory, in pieces; without a limit it takes fresh memory before it tidies up. The limit is the
    process's: other models in it share the rest. `lift` puts back what was before.
    """

    def __init__(self, device: torch.device, limit: int | None, store_bytes: int) -> None:
        """limit: bytes of the device in all. store_bytes: device memory that the store will take beside torch."""
        self.device, self.before = device, None
        if device.type != "cuda" or limit is None:
            return
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)        # driver, libraries, other processes
        self.before = torch.cuda.get_per_process_memory_fraction(device)
        room = (min(limit, total) - others - store_bytes) / total
        torch.cuda.set_per_process_memory_fraction(min(self.before, max(room, 0.0)), device)
        self.joined = not any(os.environ.get(name) for name in _ALLOCATOR)
        self._join("True")

    def lift(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            self._join("False")
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def _join(self, on: str) -> None:
        """Pieces of freed memory that can be joined again: under a limit little is lost. Settings are taken as a whole,
        so none are made where the user made some."""
        if self.joined:
            settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)      # from torch 2.10 on
            (settings or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{on}")


class Budget:
    """keep(window, tokens): how much a window with a template keeps of this pass.

    Attributes:
        tokens: the most in a pass so far. chosen: what windows keep of such a pass.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.tokens = 0
        self.chosen: dict[str, str] = {}         # by the window's name
        self._before: dict[str, str] = {}        # likewise: what a run kept that goes on

    def adopt(self, tokens: int, kept: dict[str, str]) -> None:
        """A run goes on whose windows kept this of passes of so many tokens: memory that happens to be free then
        changes no bit of it."""
        self.tokens, self.chosen, self._before = tokens, {}, kept

    def keep(self, window: Window, tokens: int) -> str:
        if tokens > self.tokens or window.name not in self.chosen:
            if tokens > self.tokens:
                self.tokens, self._before = tokens, {}
            windows = [w for w in self.runtime.windows if w.fused is not None and w.mode == "auto"]
            chosen = self._as_before(windows) or self._choose(windows, self.tokens)
            self.chosen = {w.name: mode for w, mode in chosen.items()}
        return self.chosen.get(window.name, "replay")

    def kept(self) -> dict[str, str]:
        """By name of the window: what was chosen, or will be again."""
        return self.chosen or self._before

    def _as_before(self, windows: list[Window]) -> dict[Window, str]:
        """Nothing, where the run kept nothing of the kind, or it does not fit."""
        if any(w.name not in self._before for w in windows):
            return {}
        chosen = {w: self._before[w.name] for w in windows}
        need = sum(w.fused.template.kept_bytes(mode, self.tokens, w.item) for w, mode in chosen.items()
                   if not read(mode).host)
        return chosen if need <= max(self._free(windows, self.tokens), 0) + SLACK else {}

    def _choose(self, windows: list[Window], tokens: int) -> dict[Window, str]:
        free = self._free(windows, tokens)
        chosen = share(windows, tokens, free)
        if free == float("inf") or "replay" not in chosen.values():
            return chosen
        machine = resolve(None)
        spare = self.runtime.room.spare(self.runtime.core)
        return with_host(windows, tokens, free, spare, lambda w, n: copies_hide(machine, w.fused.template, tokens, n))

    def _free(self, windows: list[Window], tokens: int) -> float:
        """Bytes that may be spent on keeping; below zero when even a bare pass is tight."""
        rt = self.runtime
        if not rt.is_cuda:
            return float("inf")
        free, total = torch.cuda.mem_get_info(rt.device)
        made = rt.core.device_bytes()
        beside = max(total - free - torch.cuda.memory_reserved(rt.device), BESIDE + made)
        total = min(total, rt.vram or total)
        free = total - beside - torch.cuda.memory_allocated(rt.device)
        coming = max(rt.store_bytes - made, 0)                       # planes are made by the updates that need them
        units = sorted((sum(r.nbytes for r in unit) for unit in rt.units), reverse=True)
        inputs = sum(w.fused.template.input_bytes(tokens, w.item) for w in windows)
        work = max(w.fused.template.work_bytes(tokens, w.item) - spared(w.fused.template.tiled(w.item), tokens)
                   for w in windows)
        return free - coming - MARGIN * total - inputs - work - 2 * sum(units[:2]) - LOGITS_BYTES


def share(windows: list[Any], tokens: int, free: float) -> dict[Any, str]:
    """"saved" for as many windows as `free` bytes allow, last ones first; then "selective"; else "replay"."""
    chosen = dict.fromkeys(windows, "replay")
    for window in reversed(windows):
        kept = {k: window.fused.template.kept_bytes(k, tokens, window.item) for k in ("saved", "selective")}
        for keep in ("saved", "selective"):
            if kept[keep] <= free:
                chosen[window] = keep
                free -= kept[keep]
                break
    return chosen


def copies_hide(machine: Machine, template: Any, tokens: int, nbytes: int) -> bool:
    """Does compute take longer for a window's forward than so many bytes take on the bus?"""
    flops = template.flops(tokens)
    rate = machine.gemm_flops(tokens, template.attention.hidden)
    return nbytes / (machine.both_gbps * 1e9) <= flops / rate


AGAIN = {"saved": 0.0, "selective": 0.5, "replay": 1.0}      # of a forward, about, that backward runs again


def with_host(windows: list[Any], tokens: int, free: float, host: float, hide: Callable[[Any, int], bool]
              ) -> dict[Any, str]:
    """As `share`, or, where that leaves less to run again, first windows keep all but the largest in `host` bytes of
    host memory, if its copies hide behind compute. Where not even a bare pass fits, their inputs at least."""
    best, least = share(windows, tokens, free), float("inf")
    if free >= 0:
        least = sum(AGAIN[mode] for mode in best.values())
    for mode, may in (("selective", hide), ("replay", lambda w, n: free < 0)):
        away: dict[Any, int] = {}
        for w in windows:
            template, item = w.fused.template, w.item
            nbytes = template.input_bytes(tokens, item) + template.kept_bytes(mode, tokens, item)
            if not template.swaps:
                continue
            if sum(away.values()) + nbytes > host or not may(w, nbytes):
                break
            away[w] = nbytes
            inputs = sum(a.fused.template.input_bytes(tokens, a.item) for a in away)
            left = free + inputs - 2 * max(away.values())    # one leaves while one is made; one comes while one is used
            rest = share([r for r in windows if r not in away], tokens, left)
            again = sum(AGAIN[m] for m in rest.values()) + len(away) * AGAIN[mode]
            if left >= 0 and again < least:
                best, least = rest | dict.fromkeys(away, f"{mode}+host"), again
    return best
