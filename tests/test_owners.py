"""Engines that own a portion of every unit each, as processes of one machine do: together they have the bits of one engine.

tests/c/test_portion.c and test_peers.c have the rest: who owns what, memory, and ranks that do not come."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import owners
import pytest
import torch
from owners import (
    ADD,
    HOMES,
    SET,
    UNITS,
    Party,
    assert_bits_of_one,
    change_gradients,
    seeded,
    together,
    train,
)

from megatrain_torch._core import DTYPES, PLANES, STATES, Engine, MegatrainError, share

Make = Callable[..., tuple[Party, list[Party]]]


@pytest.fixture
def parties(tmp_path: Path) -> Iterator[Make]:
    with owners.gathered(tmp_path) as make:
        yield make


@pytest.mark.parametrize("states, home, ranks", [
    *((states, "ram", ranks) for states in STATES for ranks in (1, 2, 3, 4, 8)),
    *((states, home, 3) for states in ("fp32", "8bit-lo8") for home in HOMES[1:])])
def test_owners_together_have_the_bits_of_one(parties: Make, states: str, home: str, ranks: int) -> None:
    """Whole gradients, micro-batches, and what the user changed, or changed and then added to."""
    whole, others = parties(ranks, states=states, home=home)
    everyone = [whole, *others]
    for step, micros in enumerate((1, 2, 2, 1)):
        train(whole, others, step, micros)
        if step in (1, 2):
            change_gradients(everyone)
        for u in range(len(UNITS)) if step == 2 else ():
            for party in everyone:
                party.hand_over(u, seeded(55, u), ADD, changed=True)
        for party in everyone:
            party.step(changed=step == 1)
        assert_bits_of_one(whole, others, *(["GRAD"] if home == "ram" and step in (0, 3) else []))


@pytest.mark.parametrize("states", STATES)
def test_owners_files_together_are_as_large_as_that_of_one(parties: Make, states: str) -> None:
    """But for planes' beginnings at whole pages; and each owner's updates write its own part alone."""
    whole, others = parties(3, states=states, home="disk")
    everyone, pages = [whole, *others], 3 * len(UNITS) * len(PLANES) * 4096
    for step in range(2):
        train(whole, others, step)
        for party in everyone:
            party.step()
        assert not together(everyone, Party.rest)
    for one, *parts in ([party.engine.disk_file()[1] for party in everyone],
                        [party.engine.stats()["disk_written_bytes"] // 2 for party in everyone]):
        assert one <= sum(parts) <= one + pages < 2 * one, (one, parts)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_gradient_in_memory_of_the_users(parties: Make, home: str, wide: bool) -> None:
    """In the weight's type, or in fp32; of the whole parameter, whoever owns what."""
    whole, others = parties(3, home=home)
    named = [[g.float() if wide else g for g in seeded(9, u)] for u in range(len(UNITS))]
    train(whole, others, 0)
    for party in (whole, *others):
        party.step(named=named)
    assert_bits_of_one(whole, others)


@pytest.mark.parametrize(("home", "ranks"), [("ram", 1), ("ram", 2), ("ram", 8), ("through", 3), ("arrive", 2)])
@pytest.mark.parametrize("of", ["micro-batches", "changed", "named", "infinite"])
def test_the_norm_is_that_of_one(parties: Make, ranks: int, of: str, home: str) -> None:
    """From the sums of chunks of all ranks, whoever made them. One that is not finite skips the step on all."""
    whole, others = parties(ranks, home=home)
    everyone, named = [whole, *others], [seeded(9, u) for u in range(len(UNITS))] if of == "named" else None
    for step in range(2):
        train(whole, others, step, 2 if of == "micro-batches" else 1)
        if of == "changed":
            change_gradients(everyone)
        if of == "infinite":
            bad = seeded(0, 1)
            bad[1][-1] = torch.inf
            for party in everyone:
                party.hand_over(1, bad, SET)
        tickets = [party.step(0.5, of == "changed", named) for party in everyone]
        norms = {party.engine.norm(ticket) for party, ticket in zip(everyone, tickets)}
        assert len(norms) == 1 and norms.pop()[1] == (len(UNITS) if of == "infinite" else 0)
        assert_bits_of_one(whole, others)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_every_script_does_in_place_is_done_once(parties: Make, ranks: int) -> None:
    """p.mul_(0.75) on all ranks, one after the other; then an update goes on from there."""
    whole, others = parties(ranks)
    everyone, both = [whole, *others], 1 << PLANES["HI"] | 1 << PLANES["M"]
    for step in range(2):
        train(whole, others, step)
        for party in everyone:
            party.step()
        for party in everyone:
            party.rest()
        versions = [party.engine.version(0) for party in others]
        for party in everyone:
            party.plane(0, 0, "HI").view(torch.bfloat16).mul_(0.75)
            party.plane(0, 0, "M").view(torch.float32).mul_(0.5)
        assert not owners.together(others, lambda party: party.engine.spread(0, 0, both))
        assert all(party.engine.version(0) > before for party, before in zip(others, versions))
        assert_bits_of_one(whole, others)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0), (0, 1 << 20)])
def test_a_rank_that_cannot_be_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(MegatrainError, match=f"rank {rank} of {ranks}"):
        Engine("cpu", rank=rank, ranks=ranks)
    with pytest.raises(MegatrainError, match="shares nothing has neither ranks"):
        Engine("cpu", rank=1, ranks=2)


def test_a_unit_without_elements_has_portions_without_bytes() -> None:
    fd = share()
    engine = Engine("cpu", share=fd, rank=1, ranks=3)
    os.close(fd)
    empty, bare = engine.add_unit("empty", [DTYPES["F32"]], [0], [True]), engine.add_unit("bare", [], [], [])
    assert engine.portions(empty) == engine.portions(bare) == (0, 0, 0, 0)
    assert engine.owned(empty, 0) == (0, 0)
    engine.close()


@pytest.mark.parametrize(("item", "says"), [((0, 0, ADD, False), "address 0"), ((0, 64, 2, False), "mode 2")])
def test_what_cannot_be_handed_over_is_refused(parties: Make, item: tuple[int, ...], says: str) -> None:
    _, others = parties(1)
    with pytest.raises(MegatrainError, match=says):
        others[0].engine.offload(0, [item], 0)
    others[0].engine.check()


def test_who_writes_alone_is_told(parties: Make) -> None:
    _, others = parties(2)
    others[0].engine.watchdog(0.2)
    with pytest.raises(MegatrainError, match=r"unit layers\.0, parameter 1: rank 1 .* has not come in 0\.2 s"):
        others[0].engine.spread(0, 1, 1)
    with pytest.raises(MegatrainError, match="PLANES has"):
        others[0].engine.spread(0, 1, 1 << 20)


def test_a_share_that_is_none_is_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(MegatrainError, match="is of another file"):
        Engine("cpu", share=fd, ranks=2)
    os.close(fd)
    fd = share()
    first = Engine("cpu", share=fd, rank=1, ranks=2)
    for rank, ranks, says in ((1, 2, "rank 1 is process"), (0, 3, "others 2")):
        with pytest.raises(MegatrainError, match=says):
            Engine("cpu", share=fd, rank=rank, ranks=ranks)
    os.close(fd)
    first.close()
