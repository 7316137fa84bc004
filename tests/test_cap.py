"""torch's allocator under a limit of the device."""
from __future__ import annotations

import pytest
import torch

from megatrain_torch.model import cap
from megatrain_torch.model.cap import Cap

GIB = 1 << 30


@pytest.mark.parametrize("settings, calls", [
    ({}, ["expandable_segments:True", "expandable_segments:False"]),
    ({"PYTORCH_ALLOC_CONF": ""}, ["expandable_segments:True", "expandable_segments:False"]),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, []), ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, [])])
def test_the_allocators_settings_are_left_to_a_user_who_made_some(settings: dict[str, str], calls: list[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in cap._ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)
    held = Cap(torch.device("cuda"))
    held.hold(50 * GIB, 0)
    held.lift()
    assert made == calls


@pytest.mark.parametrize("made", [0, 30 * GIB])
def test_planes_that_the_store_has_already_are_counted_once(made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are missing from the free memory, and are no other process's."""
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB - made, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    Cap(torch.device("cuda")).hold(80 * GIB, 30 * GIB, made)
    assert shares == [pytest.approx(0.4)]
