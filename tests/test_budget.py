"""What fused windows keep when nobody planned it."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_torch.budget import Budget, share

GIB = 1 << 30
KEPT = {"saved": 10, "selective": 4, "replay": 0}


class Window:
    mode, item = "auto", 2

    def __init__(self, template: Any) -> None:
        self.fused = SimpleNamespace(template=template)


def window() -> Window:
    template = SimpleNamespace(kept_bytes=lambda keep, tokens, item: KEPT[keep] * tokens, tiled=lambda item: (0, 0, 0),
                               input_bytes=lambda tokens, item: 0, work_bytes=lambda tokens, item: 0)
    return Window(template)


@pytest.mark.parametrize("free, expected", [
    (-1, ["replay", "replay", "replay"]), (39, ["replay", "replay", "replay"]),
    (40, ["replay", "replay", "selective"]), (100, ["replay", "replay", "saved"]),
    (140, ["replay", "selective", "saved"]), (300, ["saved", "saved", "saved"]),
])
def test_the_last_windows_keep_most(free: int, expected: list[str]) -> None:
    chosen = share([window() for _ in range(3)], 10, free)
    assert list(chosen.values()) == expected


def test_planes_that_settled_units_will_have_are_not_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made by the first update, behind the forward that chooses what to keep."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def free(store_bytes: int, made: int) -> float:
        runtime = SimpleNamespace(is_cuda=True, device=None, vram=None, units=[], store_bytes=store_bytes,
                                  core=SimpleNamespace(device_bytes=lambda: made))
        return Budget(runtime)._free([window()], 10)

    assert free(0, 0) - free(30 * GIB, 0) == 30 * GIB
    assert free(0, 0) == free(30 * GIB, 30 * GIB), "those that are there are missing from the free memory already"
