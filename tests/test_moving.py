"""A plan that cannot be put into force, wherever that fails, leaves a model that trains on, with the same bits."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_planning import HOMES, VRAM, Loop, batch, chosen, model, same

import megatrain_torch as mt
from megatrain_torch.model import ring
from megatrain_torch.model.stream import runtime_of

__all__ = ["chosen"]
CALLS = ("close_slots", "dismiss", "unsettle", "through", "open_slots", "settle", "invite", "take")
STEPS = [[(2, 16)], [(2, 16), (4, 16)], [(2, 16)], [(4, 16), (2, 16)]]


class Failing:
    """An engine whose n-th call of those that move units fails, before or after it has been done."""

    def __init__(self, core: Any, n: int, after: bool, error: type[BaseException]) -> None:
        self.core, self.n, self.after, self.error, self.names = core, n, after, error, []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.core, name)
        return (lambda *args, **kwargs: self._called(name, call, *args, **kwargs)) if name in CALLS else call

    def _called(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        self.names.append(name)
        fails = len(self.names) == self.n
        if not fails or self.after:
            call(*args, **kwargs)
        if fails:
            raise self.error(f"call {self.n}: {name}")


def drives(rt: Any, core: Any) -> None:
    """Whoever moves units asks this engine."""
    rt.core = rt.homes.core = rt.ring.core = core


@pytest.fixture(scope="module")
def plain() -> tuple[Loop, list[list[str]]]:
    loop = Loop(mt.stream(model(), "cpu"))
    return loop, [loop.step(*s) for s in STEPS]


def calls(homes: list[str], then: list[str], chosen: list[dict[str, Any]]) -> int:
    """Of one move between them."""
    chosen += [{"homes": homes}, {"homes": then}]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    loop.step(*STEPS[0])
    rt = runtime_of(loop.model)
    counting = Failing(rt.core, -1, False, mt.MegatrainError)
    drives(rt, counting)
    loop.step(*STEPS[1][:1], *STEPS[1][:1])
    drives(rt, counting.core)
    chosen.clear()
    return len(counting.names)


def fails_at(n: int, after: bool, error: type[BaseException], homes: list[str], then: list[str],
             chosen: list[dict[str, Any]], plain: tuple[Loop, list[list[str]]]) -> None:
    chosen += [{"homes": homes}, {"homes": then}, {"homes": then}]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    assert loop.step(*STEPS[0]) == plain[1][0]
    rt = runtime_of(loop.model)
    whole = rt.core
    loop.model.zero_grad()
    said, first = [], True
    for b in STEPS[1]:
        loop.number += 1
        if not first:                                        # the second micro-batch, and a longer one, moves
            drives(rt, Failing(whole, n, after, error))
            with pytest.raises(error, match=f"call {n}"):
                loop.model(**batch(*b, loop.number))
            drives(rt, whole)
        loss = loop.model(**batch(*b, loop.number)).loss     # by the plan that was, or by another try
        loss.backward()
        said.append(float(loss.detach()).hex())
        first = False
    loop.opt.step()
    loop.opt.zero_grad()
    assert [*said, loop.opt.grad_norm.hex()] == plain[1][1]
    assert [loop.step(*s) for s in STEPS[2:]] == plain[1][2:] and same(loop, plain[0])
    assert not rt.broken and rt.room.asked.homes == tuple(then)


TURNS = [("some come and leave", "some go through"), ("all stream", "all live there"),
         ("all live there", "some come and leave"), ("some go through", "all stream")]


@pytest.mark.parametrize("turn", TURNS, ids=" to ".join)
def test_every_call_of_a_move_may_fail(turn: tuple[str, str], chosen: list[dict[str, Any]],
                                       plain: tuple[Loop, list[list[str]]]) -> None:
    homes, then = (HOMES[t] for t in turn)
    every = 1 if turn == TURNS[0] else 3
    for n in range(2, calls(homes, then, chosen) + 1, every):    # the first, close_slots, changes nothing where it fails
        after, error = bool(n % 2), (mt.MegatrainError, KeyboardInterrupt)[n % 3 == 0]
        fails_at(n, after, error, homes, then, chosen, plain)
        chosen.clear()


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many more slots there is memory for; [] : for all."""
    left: list[int] = []
    whole = ring.Slot

    def slot(*args: Any) -> Any:
        if left and left.pop() == 0:
            raise torch.OutOfMemoryError("a slot")
        return whole(*args)

    monkeypatch.setattr(ring, "Slot", slot)
    yield left


@pytest.mark.parametrize("n", range(8))
def test_slots_that_the_device_has_no_memory_for(n: int, no_memory: list[int], chosen: list[dict[str, Any]],
                                                 plain: tuple[Loop, list[list[str]]]) -> None:
    chosen += [{"homes": HOMES[t]} for t in ("some come and leave", "all live there", "all live there")]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    assert loop.step(*STEPS[0]) == plain[1][0]
    no_memory += [0, *range(1, n + 1)]
    failed = 0
    for number, s in enumerate(STEPS[1:], 1):
        try:
            got = loop.step(*s)
        except torch.OutOfMemoryError:                       # of the second micro-batch
            failed += 1
            loss = loop.model(**batch(*s[1], loop.number)).loss
            loss.backward()
            loop.opt.step()
            loop.opt.zero_grad()
            got = [plain[1][number][0], float(loss.detach()).hex(), loop.opt.grad_norm.hex()]
        assert got == plain[1][number]
    assert failed == (n < 5) and same(loop, plain[0])


def test_where_the_way_back_fails_too_the_model_refuses_to_run(chosen: list[dict[str, Any]],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    chosen += [{"homes": HOMES["all live there"]}, {"homes": HOMES["all stream"]}]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    loop.step(*STEPS[0])
    rt = runtime_of(loop.model)

    def open_slots(*args: Any) -> None:
        raise torch.OutOfMemoryError("no slots")

    monkeypatch.setattr(rt.homes, "open_slots", open_slots)
    with pytest.raises(torch.OutOfMemoryError, match="no slots"):
        loop.step((4, 16))
    for _ in range(2):
        with pytest.raises(mt.MegatrainError, match="on their way"):
            loop.step((2, 16))
