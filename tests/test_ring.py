"""ring.py by itself: where a unit is on the device, with a fake engine; and which memory is nobody's any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_torch.model.ring import Ring, Slot, SlotHooks

CPU = torch.device("cpu")


class Engine:
    """Unit u is in slot u."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots, self.acquired = slots, []

    def acquire(self, unit: int, stream: int) -> int:
        self.acquired.append(unit)
        return unit

    def find(self, address: int) -> tuple[int, int, int]:
        for unit, slot in enumerate(self.slots):
            if slot.address <= address < slot.address + slot.nbytes:
                return unit, unit, address - slot.address
        return -1, -1, 0


def record(offset: int, *shape: int, trained: bool = True) -> Any:
    t = torch.empty(shape, device="meta")
    return SimpleNamespace(offset=offset, dtype=torch.float32, shape=t.shape, stride=t.stride(), was_trainable=trained)


@pytest.fixture
def ring() -> Ring:
    slots = [Slot(1024, CPU), Slot(512, CPU)]
    for slot in slots:
        slot.memory.zero_()                  # it may be NaN, which equals nothing
    units = [[record(0, 2, 3), record(512, 4, trained=False)], [record(0, 5)]]
    homes = SimpleNamespace(arrivals=SimpleNamespace(over=()))
    model = SimpleNamespace(core=Engine(slots), units=units, homes=homes, door=None, handover=None, delivery=None, stream=lambda: 0)
    ring = Ring(model)
    ring.look(slots)
    return ring


def test_views_lie_where_the_unit_is(ring: Ring) -> None:
    first, second = ring.views(0)
    assert first.data_ptr() == ring.slots[0].address and second.data_ptr() == ring.slots[0].address + 512
    assert first.shape == (2, 3) and second.shape == (4,) and ring.core.acquired == [0]
    assert ring.views(0)[0] is first, "they are made once"


def test_a_weight_is_known_by_its_address_and_others_are_not(ring: Ring) -> None:
    assert ring.locate(ring.views(0)[1]) == (0, 512)
    assert ring.locate(ring.views(0)[0][1]) == (0, 12)
    assert ring.locate(torch.zeros(3)) is None
    weight = ring.views(1)[0]
    ring.look([])
    assert ring.locate(weight) is None, "the slots are closed"


def test_an_output_that_aliases_a_slot_is_copied_and_others_stay(ring: Ring) -> None:
    weight, other = ring.views(1)[0], torch.zeros(2)
    out = ring.own_outputs({"a": weight.view(5, 1), "b": [other]})
    assert ring.locate(out["a"]) is None and torch.equal(out["a"], weight.view(5, 1)) and out["b"][0] is other


def test_a_slot_is_held_by_a_view_that_somebody_kept_and_not_by_its_own(ring: Ring) -> None:
    slot = ring.slots[0]
    ring.views(0)
    ring.weights(0, ("a", "b"))
    assert not slot.held()
    kept = ring.views(0)[0].detach()
    assert slot.held()
    del kept
    assert not slot.held()


def test_a_slot_that_was_left_to_its_holder_gets_other_memory(ring: Ring) -> None:
    hooks, kept = SlotHooks(ring), ring.views(0)[0].detach()
    assert hooks.held(0)
    before = ring.slots[0].address
    assert hooks.renew(0) == ring.slots[0].address != before
    assert ring.locate(ring.views(0)[1]) == (0, 512), "the ring looked at it anew"
    assert kept.data_ptr() == before and not hooks.held(0)
