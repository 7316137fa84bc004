"""planes.py by itself: what is waited for around a read or a write of host memory, with fakes for engine and homes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.store.planes import Planes, mask

STATES = mask(("LO", "MASTER", "M", "V", "SCALE"))
UNIT = 7


class Engine:
    """Writes down what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


def asked(what: str, *args: Any, saving: object = None, **where: Any) -> list[tuple[Any, ...]]:
    """Calls of the engine for one parameter of unit 7, which is at home as `where` says."""
    engine = Engine()
    room = SimpleNamespace(weights=lambda core, unit: core.calls.append(("room", unit)))
    homes = SimpleNamespace(**{"settled": (), "on_disk": (), "filed": (),
                               "arrivals": SimpleNamespace(units=where.pop("guests", ()))} | where)
    host = torch.zeros(2)
    record = SimpleNamespace(unit=UNIT, index=1, writes=0, host=host, version=host._version, name="w",
                             shape=host.shape, dtype=host.dtype)
    getattr(Planes(engine, homes, SimpleNamespace(saving=saving), room), what)(record, *args)
    return engine.calls


def test_in_ram_a_read_waits_for_the_update_alone() -> None:
    assert asked("wait_updates") == [("wait_updates", UNIT)]
    assert asked("wait_used") == [("updated", UNIT)]
    assert asked("bring_states") == asked("own_states") == asked("push", "HI") == []


@pytest.mark.parametrize("where", ["settled", "filed"])
def test_elsewhere_a_read_of_weights_asks_for_room_first(where: str) -> None:
    assert asked("wait_updates", **{where: {UNIT}}) == [("room", UNIT), ("wait_updates", UNIT)]
    assert asked("before_write", **{where: {UNIT}}) == [("room", UNIT), ("wait_fetch", UNIT)]


@pytest.mark.parametrize("where", ["settled", "on_disk"])
def test_states_that_are_elsewhere_are_brought_when_a_save_has_them(where: str) -> None:
    assert asked("bring_states", **{where: {UNIT}}) == [("bring", UNIT, STATES)]
    assert asked("bring_states", saving=object(), **{where: {UNIT}}) == [("wait_saved", UNIT), ("bring", UNIT, STATES)]
    assert asked("push", "M", "V", **{where: {UNIT}}) == [("push", UNIT, 1, mask(("M", "V")))]


def test_states_of_a_guest_are_brought_before_they_are_written() -> None:
    assert asked("own_states", guests={UNIT}) == [("bring", UNIT, STATES)]
    assert asked("own_states", settled={UNIT}) == []


def test_a_write_to_weights_in_a_file_goes_there_before_they_have_a_new_version() -> None:
    hi = 1 << _core.PLANES["HI"]
    assert asked("after_write", filed={UNIT}, on_disk={UNIT}) == [
        ("bring", UNIT, hi), ("push", UNIT, 1, hi)]
    assert asked("after_write") == [("touch", UNIT)]


def test_data_of_another_form_is_refused_and_nothing_is_asked() -> None:
    record = SimpleNamespace(unit=UNIT, name="w", shape=torch.Size([2]), dtype=torch.float32)
    engine = Engine()
    with pytest.raises(mt.MegatrainError, match=r"w: \.data of shape \[3\] torch.float32"):
        Planes(engine, None, None, None).replace_data(SimpleNamespace(_mt=record), torch.zeros(3))
    assert engine.calls == []
