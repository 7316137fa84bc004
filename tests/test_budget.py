"""What fused windows keep when nobody planned it."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_torch import budget
from megatrain_torch.budget import Budget, Cap, copies_hide, share, with_host
from megatrain_torch.machine import MACHINES

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
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def free(store_bytes: int, made: int) -> float:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB - made, 100 * GIB))
        runtime = SimpleNamespace(is_cuda=True, device=None, vram=None, units=[], store_bytes=store_bytes,
                                  core=SimpleNamespace(device_bytes=lambda: made))
        return Budget(runtime)._free([window()], 10)

    assert free(0, 0) - free(30 * GIB, 0) == 30 * GIB
    assert free(30 * GIB, 0) == free(30 * GIB, 30 * GIB), "those that are there are missing from the free memory already"


@pytest.mark.parametrize("settings, calls", [
    ({}, ["expandable_segments:True", "expandable_segments:False"]),
    ({"PYTORCH_ALLOC_CONF": ""}, ["expandable_segments:True", "expandable_segments:False"]),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, []), ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, [])])
def test_the_allocators_settings_are_left_to_a_user_who_made_some(settings: dict[str, str], calls: list[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in budget._ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)
    Cap(torch.device("cuda"), 50 * GIB, 0).lift()
    assert made == calls


def swapping(n: int) -> list[Window]:
    """Windows whose input is 5 bytes a token, whose copies take as many seconds as they have bytes."""
    made = [window() for _ in range(n)]
    for w in made:
        w.fused.template.input_bytes, w.fused.template.swaps = (lambda tokens, item: 5 * tokens), True
    return made


def hidden(window: Any, nbytes: int) -> bool:
    return True


@pytest.mark.parametrize("free, host, hide, expected", [
    (300, 1000, hidden, ["saved", "saved", "saved"]),
    (140, 1000, hidden, ["replay", "selective", "saved"]),                # what is in flight would take more
    (110, 1000, hidden, ["selective+host"] * 3),
    (100, 100, hidden, ["replay", "replay", "saved"]),                    # one bundle of 90 in host memory
    (110, 1000, lambda w, n: False, ["replay", "replay", "saved"]),       # the bus has no time
    (-20, 1000, lambda w, n: False, ["replay+host"] * 3),
    (-500, 1000, lambda w, n: False, ["replay", "replay", "replay"]),     # nothing helps
])
def test_first_windows_keep_in_host_memory_what_the_device_cannot(free: int, host: int, hide: Any, expected: list[str]
                                                                 ) -> None:
    windows = swapping(3)
    chosen = with_host(windows, 10, free, host, hide)
    assert [chosen[w] for w in windows] == expected


def test_what_the_room_has_to_spare_is_spent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that bundles have already are in it."""
    asked: list[float] = []
    monkeypatch.setattr(budget, "with_host", lambda windows, tokens, free, host, hide: asked.append(host) or {})
    monkeypatch.setattr(Budget, "_free", lambda self, windows, tokens: 100)
    core = SimpleNamespace(swap_bytes=lambda: (500, 500))
    Budget(SimpleNamespace(core=core, room=SimpleNamespace(spare=lambda core: 1000)))._choose(swapping(3), 10)
    assert asked == [1000]


def test_copies_hide_where_arithmetic_is_longer() -> None:
    template = SimpleNamespace(flops=lambda tokens: 1e9 * tokens, attention=SimpleNamespace(hidden=4096))
    machine = MACHINES["h200-128g"]
    least = 1e9 * 65536 / machine.gemm_flops(65536, 4096) * machine.both_gbps * 1e9
    assert copies_hide(machine, template, 65536, int(least)) and not copies_hide(machine, template, 65536, int(least) + 2)
