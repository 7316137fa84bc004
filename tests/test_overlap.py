"""Overlap on equals overlap off, bit for bit, whatever the queues' pace and wherever units are at home; and every wait is
needed.

Each with 10 seeds of delays, in CI with 4. The control is the same training in the engine's debug mode `sync`, in which nothing
is fetched ahead and every hand-over and update is over before the call returns.
"""
from __future__ import annotations

import functools

import edges
import parity
import pytest
import torch
from edges import Scenario
from parity import EDGES
from torch import Tensor

SEEDS = 10 if parity.FULL else 4
DELAY_US = 200          # a layer of the model computes for about as long

SCENARIOS = [
    Scenario("saved", slots=2),
    Scenario("saved", slots=3),
    Scenario("replay", slots=2),
    Scenario("replay", slots=3),
    Scenario("saved", slots=2, accumulate=3),
    Scenario("replay", slots=2, accumulate=2, dtype=torch.bfloat16),
    Scenario("saved", slots=2, dtype=torch.bfloat16),
    Scenario("saved", slots=2, wander=True),
    Scenario("replay", slots=3, wander=True),
    Scenario("replay", slots=2, wander=True, accumulate=2),
]


@functools.cache
def overlap_off(scenario: Scenario) -> dict[str, Tensor]:
    return edges.train(scenario, sync=True)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=Scenario.name)
def test_overlap_on_equals_overlap_off_bitwise(scenario: Scenario) -> None:
    right = overlap_off(scenario)
    for seed in range(SEEDS):
        seen = edges.difference(right, edges.train(scenario, delay_us=DELAY_US, seed=seed))
        assert seen is None, f"seed {seed} (plain: overlap off; streamed: overlap on): {seen}"


@pytest.mark.parametrize("scenario", SCENARIOS[:3], ids=Scenario.name)
def test_what_is_compared_moves(scenario: Scenario) -> None:
    """A training that stands still would agree with anything."""
    longer = overlap_off(Scenario(scenario.activations, scenario.slots, steps=scenario.steps + 1))
    right = overlap_off(scenario)
    assert all(torch.isfinite(v).all() for v in right.values())
    still = [k for k in right if k.startswith("master") and parity.same_bits(right[k], longer[k])]
    assert not still, f"these did not move in a step: {still}"


@pytest.mark.parametrize("edge", ["ready", "landed", "updated"])
@pytest.mark.parametrize("scenario", [SCENARIOS[0], SCENARIOS[3]], ids=Scenario.name)
def test_a_wait_left_out_is_noticed(scenario: Scenario, edge: str) -> None:
    """Any of ten seeds notices on a quiet machine; one is asked for, since a pace cannot be promised."""
    right = overlap_off(scenario)
    assert any(edges.noticed(right, scenario, delay_us=DELAY_US, seed=seed, skip=EDGES[edge])
               for seed in range(10)), f"ten trainings without the wait {edge!r} all equal overlap off"


@pytest.mark.parametrize("edge", ["freed", "grad"])
def test_compute_on_the_cpu_device_is_never_behind(edge: str) -> None:
    """FREED and GRAD make a copy wait for compute. On the CPU device compute is the thread that asks for the copy:
    what it was given is done when it asks, so these waits end as they begin, and leaving them out changes nothing
    here. They are seen where compute is a queue: tests/c/test_engine.c and gpu/test_on_gpu.py."""
    for seed in range(3):
        seen = edges.difference(overlap_off(SCENARIOS[0]), edges.train(
            SCENARIOS[0], delay_us=DELAY_US, seed=seed, skip=EDGES[edge]))
        assert seen is None, f"{edge!r} matters on the CPU device after all, so the tests above should leave it out: {seen}"


# ---------------------------------------------------------------- wherever units are at home

@functools.cache
def placed_first(name: str, dtype: str) -> dict[str, Tensor]:
    return edges.placed(name, "cpu", edges.DTYPES[dtype])[0]


# Each place in one of the types, in turn; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("name, dtype", [
    (n, d) for i, n in enumerate(n for n in edges.PLACES if edges.first_of(n) != n)
    for j, d in enumerate(edges.DTYPES) if parity.FULL or (i + j) % 2 == 0])
@pytest.mark.filterwarnings("ignore:.*could not be locked")
def test_every_placement_gives_the_same_bits(name: str, dtype: str) -> None:
    found = edges.misplaced(name, "cpu", edges.DTYPES[dtype], placed_first(edges.first_of(name), dtype))
    assert found is None, found
