"""Engines that own a portion of every unit each, as processes of one machine do: together they have the bits of one engine.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from owners import (
    ADD,
    PLACES,
    SET,
    TYPES,
    UNITS,
    Party,
    assert_bits_of_one,
    change_gradients,
    gathered,
    seeded,
    together,
    train,
)

from megatrain_torch._core import DTYPES, PLANES, STATES, WORKS, Engine, MegatrainError, share

Make = Callable[..., tuple[Party, list[Party]]]


@pytest.fixture
def parties(tmp_path: Path) -> Iterator[Make]:
    with gathered(tmp_path) as make:
        yield make


# ---- whose is what ----


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_portions_say_in_bytes_what_is_owned(parties: Make, ranks: int) -> None:
    _, owners = parties(ranks)
    for u, params in enumerate(UNITS):
        bounds = owners[0].engine.portions(u)
        assert len(bounds) == ranks + 1 and bounds[0] == 0 and bounds[-1] == owners[0].engine.hi_bytes(u)
        assert list(bounds) == sorted(bounds)
        for k, owner in enumerate(owners):
            assert owner.engine.portions(u) == bounds
            for i, (kind, _) in enumerate(params):
                first, n = owner.engine.owned(u, i)
                begin = owner.engine.offset(u, i) + first * TYPES[kind].itemsize
                assert n == 0 or bounds[k] <= begin <= begin + n * TYPES[kind].itemsize <= bounds[k + 1]
        for i, (_, n) in enumerate(params):
            parts = [owner.engine.owned(u, i) for owner in owners]
            assert sum(n for _, n in parts) == n
            assert all(first == sum(m for _, m in parts[:k]) for k, (first, m) in enumerate(parts) if m)


def test_a_unit_without_elements_has_portions_without_bytes() -> None:
    engine = Engine("cpu", rank=1, ranks=3)
    empty, bare = engine.add_unit("empty", [DTYPES["F32"]], [0], [True]), engine.add_unit("bare", [], [], [])
    assert engine.portions(empty) == engine.portions(bare) == (0, 0, 0, 0)
    assert engine.owned(empty, 0) == (0, 0)
    engine.close()


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0), (0, 1 << 20)])
def test_a_rank_that_cannot_be_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(MegatrainError, match=f"rank {rank} of {ranks}"):
        Engine("cpu", rank=rank, ranks=ranks)


def test_each_has_memory_for_its_own_states_alone(parties: Make) -> None:
    whole, owners = parties(4)
    for party in (whole, *owners):
        for u, params in enumerate(UNITS):
            for i in range(len(params)):
                party.plane(u, i, "M")
    used = [party.engine.host_bytes(PLANES["M"]) for party in (whole, *owners)]
    assert used[0] <= sum(used[1:]) <= used[0] + 16 * 4096


# ---- updates ----


@pytest.mark.parametrize(("ranks", "shared"), [(3, False), *((ranks, True) for ranks in (1, 2, 4, 8))])
@pytest.mark.parametrize("states", STATES)
def test_owners_together_have_the_bits_of_one(parties: Make, ranks: int, states: str, shared: bool) -> None:
    whole, owners = parties(ranks, states=states, shared=shared)
    for step, micros in enumerate((1, 2, 1)):
        train(whole, owners, step, micros)
        for party in (whole, *owners):
            party.step()
        assert_bits_of_one(whole, owners, "GRAD")


@pytest.mark.parametrize("states", ["fp32", "8bit-lo8"])
@pytest.mark.parametrize(("home", "shared"), PLACES[1:])
def test_wherever_units_live(parties: Make, home: str, shared: bool, states: str) -> None:
    whole, owners = parties(3, states=states, home=home, shared=shared)
    for step, micros in enumerate((2, 1)):
        train(whole, owners, step, micros)
        for party in (whole, *owners):
            party.step()
    assert_bits_of_one(whole, owners)


@pytest.mark.parametrize(("home", "shared"), PLACES)
def test_a_gradient_that_the_user_changed(parties: Make, home: str, shared: bool) -> None:
    whole, owners = parties(3, home=home, shared=shared)
    train(whole, owners, 0, 2)
    change_gradients([whole, *owners])
    for party in (whole, *owners):
        party.step(changed=True)
    assert_bits_of_one(whole, owners)
    train(whole, owners, 1)
    assert_bits_of_one(whole, owners, "GRAD")            # the change is gone


@pytest.mark.parametrize(("home", "shared"), PLACES)
def test_what_is_added_to_a_gradient_that_the_user_changed(parties: Make, home: str, shared: bool) -> None:
    whole, owners = parties(3, home=home, shared=shared)
    train(whole, owners, 0, 2)
    change_gradients([whole, *owners])
    for u in range(len(UNITS)):
        more = seeded(55, u)
        for party in (whole, *owners):
            party.hand_over(u, more, ADD, changed=True)
    assert_bits_of_one(whole, owners, "GRAD")
    for party in (whole, *owners):
        party.step()
    assert_bits_of_one(whole, owners)


@pytest.mark.parametrize(("home", "shared"), PLACES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_gradient_in_memory_of_the_users(parties: Make, home: str, shared: bool, wide: bool) -> None:
    """In the weight's type, or in fp32; of the whole parameter, whoever owns what."""
    whole, owners = parties(3, home=home, shared=shared)
    named = [[g.float() if wide else g for g in seeded(9, u)] for u in range(len(UNITS))]
    train(whole, owners, 0)
    for party in (whole, *owners):
        party.step(named=named)
    assert_bits_of_one(whole, owners)


@pytest.mark.parametrize(("home", "ranks"), [("ram", 1), ("ram", 2), ("ram", 8), ("through", 3)])
@pytest.mark.parametrize("of", ["micro-batches", "changed", "named", "infinite"])
def test_the_norm_is_that_of_one(parties: Make, ranks: int, of: str, home: str) -> None:
    """From the sums of chunks of all ranks, whoever made them. One that is not finite skips the step on all."""
    whole, owners = parties(ranks, shared=True, home=home)
    named = [seeded(9, u) for u in range(len(UNITS))] if of == "named" else None
    for step in range(2):
        train(whole, owners, step, 2 if of == "micro-batches" else 1)
        if of == "changed":
            change_gradients([whole, *owners])
        if of == "infinite":
            bad = seeded(0, 1)
            bad[1][-1] = torch.inf
            for party in (whole, *owners):
                party.hand_over(1, bad, SET)
        tickets = [party.step(0.5, of == "changed", named) for party in (whole, *owners)]
        norms = {party.engine.norm(ticket) for party, ticket in zip((whole, *owners), tickets)}
        assert len(norms) == 1 and norms.pop()[1] == (len(UNITS) if of == "infinite" else 0)
        assert_bits_of_one(whole, owners)


def test_a_trace_has_the_bytes_of_the_portion(parties: Make) -> None:
    whole, owners = parties(3, states="8bit")
    train(whole, owners, 0)
    seen = []
    for party in (whole, *owners):
        party.rest()
        party.engine.trace(True)
        party.step()
        party.rest()
        seen.append(sum(r[3] for r in party.engine.timeline() if r[1] == WORKS["update"]))
    assert seen[0] == sum(seen[1:]) and min(seen) > seen[0] // 4


@pytest.mark.parametrize(("item", "says"), [
    ((0, 0, ADD, False), "address 0"),
    ((0, 0, SET, False), "address 0"),
    ((0, 64, 2, False), "mode 2"),
])
def test_what_cannot_be_handed_over_is_refused(parties: Make, item: tuple[int, ...], says: str) -> None:
    _, owners = parties(1)
    with pytest.raises(MegatrainError, match=says):
        owners[0].engine.offload(0, [item], 0)
    owners[0].engine.check()


# ---- writes from outside ----


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_every_script_does_in_place_is_done_once(parties: Make, ranks: int) -> None:
    """p.mul_(0.75) on all ranks, one after the other; then an update goes on from there."""
    whole, owners = parties(ranks, shared=True)
    both = 1 << PLANES["HI"] | 1 << PLANES["M"]
    train(whole, owners, 0)
    for party in (whole, *owners):
        party.step()
    for party in (whole, *owners):
        party.rest()
    versions = [owner.engine.version(0) for owner in owners]
    for party in (whole, *owners):
        party.plane(0, 0, "HI").view(torch.bfloat16).mul_(0.75)
        party.plane(0, 0, "M").view(torch.float32).mul_(0.5)
    assert not together(owners, lambda owner: owner.engine.spread(0, 0, both))
    assert all(owner.engine.version(0) > before for owner, before in zip(owners, versions))
    assert_bits_of_one(whole, owners)
    train(whole, owners, 1)
    for party in (whole, *owners):
        party.step()
    assert_bits_of_one(whole, owners)


def test_who_writes_alone_is_told(parties: Make) -> None:
    _, owners = parties(2, shared=True)
    owners[0].engine.watchdog(0.2)
    with pytest.raises(MegatrainError, match=r"unit layers\.0, parameter 1: rank 1 .* has not come in 0\.2 s"):
        owners[0].engine.spread(0, 1, 1)
    with pytest.raises(MegatrainError, match="PLANES has"):
        owners[0].engine.spread(0, 1, 1 << 20)


def test_alone_there_is_nobody_to_spread_to(parties: Make) -> None:
    whole, _ = parties(1)
    whole.plane(0, 0, "HI").fill_(3)
    whole.engine.spread(0, 0, 1)
    assert whole.plane(0, 0, "HI", True)[5] == 3


# ---- saves ----


def written(paths: list[Path], party: Party, part: int, parts: int) -> list[tuple[str, int, list[tuple[int, ...]]]]:
    """A file for each parameter's weights, and one for its first moments: a block each. Begins to write them."""
    planes = [party.plane(u, i, name, True) for u, params in enumerate(UNITS) for i in range(len(params))
              for name in ("HI", "M")]
    units = [u for u, params in enumerate(UNITS) for _ in params for _ in range(2)]
    files = [(str(path), p.numel(), [(0, p.data_ptr(), p.numel(), u)]) for path, p, u in zip(paths, planes, units)]
    both = 1 << PLANES["HI"] | 1 << PLANES["M"]
    party.engine.save_begin(files, [(u, both) for u in range(len(UNITS))], 0, 1, 1, part=part, parts=parts)
    return files


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_write_the_same_files_together(parties: Make, tmp_path: Path, ranks: int) -> None:
    """The files and the sums are one process's; updates that are asked for meanwhile come behind the copies."""
    whole, owners = parties(ranks, shared=True)
    found = []
    train(whole, owners, 0)
    for party in (whole, *owners):
        party.step()
    for name, group in (("whole", [whole]), ("owners", owners)):
        paths = [tmp_path / f"{name}.{i}" for i in range(2 * sum(len(params) for params in UNITS))]
        for k, party in enumerate(group):
            written(paths, party, k, len(group))
        for party in group:
            for u in range(len(UNITS)):
                party.hand_over(u, seeded(1, u), SET)
        for party in group:
            party.step()
        sums = []
        for party in group:
            while not party.engine.save_wait(1.0)[1]:
                pass
            sums.append(party.engine.save_end())
        made = [[s for s in each if any(s)] for each in zip(*sums)]
        assert all(len(each) == 1 for each in made)                  # one rank has each block
        found.append([(path.read_bytes(), each[0]) for path, each in zip(paths, made)])
    assert found[0] == found[1]
    assert_bits_of_one(whole, owners)


# ---- ranks that do not come ----


def test_who_closes_does_not_wait_for_a_step_that_others_never_ask_for(parties: Make) -> None:
    """They are told; so is who waits for a rank that has closed."""
    _, owners = parties(2, shared=True)
    for owner in owners:
        for u in range(len(UNITS)):
            owner.hand_over(u, seeded(0, u), SET)
    owners[0].step()
    owners[0].engine.watchdog(0.3)
    owners[0].engine.close()
    with pytest.raises(MegatrainError, match=r"rank 0 \(process \d+\)"):
        owners[1].step()
        owners[1].engine.drain()


def test_who_ends_behind_all_that_was_asked_for_is_missed_by_nobody(parties: Make) -> None:
    whole, owners = parties(2, shared=True)
    train(whole, owners, 0)
    for party in (whole, *owners):
        party.step()
    owners[0].rest()
    owners[0].engine.close()
    assert torch.equal(owners[1].plane(0, 0, "HI", True), owners[1].plane(0, 0, "HI"))
    owners[1].rest()
    owners[1].engine.check()


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
