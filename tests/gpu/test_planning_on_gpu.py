"""mt.stream plans itself on a GPU: units move there and back with all that they have, and the bits are those of a plan
that was given. Every time a plan is made, another choice of homes takes the place of its own."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import test_planning
import torch
from test_planning import HOMES, STEPS, batch, chosen, model, same

import megatrain_torch as mt
from megatrain_torch.model import planning
from megatrain_torch.model.stream import runtime_of

assert chosen                                # a fixture
TURNS = [list(HOMES), ["all live there", "some come and leave", "some go through", "all live there"]]


@pytest.fixture(autouse=True)
def repeating() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Loop(test_planning.Loop):
    def step(self, *batches: tuple[int, int]) -> list[str]:
        said = []
        for b in batches:
            self.number += 1
            loss = self.model(**{k: v.to("cuda") for k, v in batch(*b, self.number).items()}).loss
            loss.backward()
            said.append(float(loss.detach()).hex())
        self.opt.step()
        self.opt.zero_grad()
        return [*said, self.opt.grad_norm.hex()]


@pytest.mark.parametrize("compute", ["eager", "fused"])
@pytest.mark.parametrize("turns", TURNS, ids=lambda t: t[0])
@pytest.mark.parametrize("states", ["fp32", "8bit-sr"])
def test_units_move_with_all_that_they_have(compute: str, turns: list[str], states: str, chosen: list[dict[str, Any]]
                                            ) -> None:
    plain = Loop(mt.stream(model(), "cuda", compute=compute, states=states, plan={"activations": "saved"}))
    want = [plain.step(*s) for s in STEPS]
    for _ in range(3):
        chosen += [{"homes": HOMES[t], "modes": "saved", "slots": 2 + i % 3} for i, t in enumerate(turns)]
        moved = Loop(mt.stream(model(), "cuda", compute=compute, states=states))
        assert [moved.step(*s) for s in STEPS] == want and same(plain, moved)
        assert moved.planning.made >= min(len(turns), 4)
        chosen.clear()


def test_the_plan_is_the_one_that_would_have_been_given() -> None:
    own = model()
    given = Loop(mt.stream(own, "cuda", plan=mt.plan(own, tokens=512, seq=128, micro=1)))
    found = Loop(mt.stream(model(), "cuda"))
    assert [given.step((4, 128)) for _ in range(3)] == [found.step((4, 128)) for _ in range(3)] and same(given, found)
    assert found.planning.plan.homes == runtime_of(found.model).planning.plan.homes
    assert "planned for 512 tokens a step in sequences of 128" in mt.explain(found.model)


def test_memory_of_the_device_is_given_back_when_units_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for more tokens that has fewer units there."""
    def plan(*args: Any, **kwargs: Any) -> mt.Plan:
        found = mt.plan(*args, **kwargs)
        home = "vram" if kwargs["tokens"] <= 256 else "ram"
        return dataclasses.replace(found, homes=dict.fromkeys(found.homes, home), slots=2)

    monkeypatch.setattr(planning, "plan", plan)
    loop = Loop(mt.stream(model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8), "cuda"))
    for _ in range(2):
        loop.step((2, 128))
    torch.cuda.synchronize()
    before, at_home = torch.cuda.mem_get_info()[0], runtime_of(loop.model).core.device_bytes()
    assert at_home > 1 << 30
    loop.step((4, 128))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert runtime_of(loop.model).core.device_bytes() == 0
    assert torch.cuda.mem_get_info()[0] - before > 0.9 * at_home
