"""torch's allocator under a limit of the device."""
from __future__ import annotations

import pytest
import torch

from megatrain_torch.model import homes as cap
from megatrain_torch.model.homes import Cap

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
    held = Cap(torch.device("cuda"), lambda: 0)
    held.hold(50 * GIB, 0)
    held.lift()
    assert made == calls


@pytest.mark.parametrize("others, others_stores, made, limit, room", [
    (0, 0, 0, 80, 80 - 1 - 30), (0, 0, 30, 80, 80 - 1 - 30),          # what the store has already is counted once
    (9, 0, 0, 80, 80 - 1 - 30), (9, 0, 30, 80, 80 - 1 - 30),          # another process's memory is not this one's,
    (40, 0, 0, 80, 60 - 1 - 30),                                      # but it is missing from the device;
    (9, 20, 0, 80, 80 - 1 - 20 - 30)])                                # another model's is this process's
def test_a_limit_is_the_processs(others: int, others_stores: int, made: int, limit: int, room: int,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """GiB of a device of 100: 1 is the context's, and torch has 5."""
    shares: list[float] = []
    free = 100 - 1 - 5 - others - others_stores - made
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    device = torch.device("cuda:0")
    other, own = Cap(device, lambda: others_stores * GIB), Cap(device, lambda: made * GIB)
    own.hold(limit * GIB, 30 * GIB)
    other.close()
    assert shares == [pytest.approx(room / 100)]
