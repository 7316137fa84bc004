"""Engines that own a portion of every unit each, as processes of one machine do: together they have the bits of one engine.

All of them are in this process, each with memory of its own or with a share, and take turns: all begin something before
one waits. A `Party` is such an engine, or the one that owns all: it is told of whole gradients, and hands over what is
its own of them.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain_torch._core import DTYPES, PLANES, STATES, WORKS, Engine, MegatrainError, share

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HYPER = (1e-2, 0.9, 0.95, 1e-8, 0.1)     # lr, beta1, beta2, eps, weight_decay
SET, ADD, SUM = 0, 1, 2
GROUP = 128                              # elements that share a scale: csrc/core/states.h
UNITS = (                                # name of the type, elements: cuts inside of parameters and between them
    (("BF16", 30000), ("F32", 64), ("F16", 20011), ("F32", 9000), ("BF16", 1)),
    (("F16", 8192), ("BF16", 24577)),
)
# Where units live, and whether in a share.
PLACES = [("ram", True), *((home, False) for home in ("ram", "vram", "arrive", "disk")), ("through", True)]


def seeded(seed: int, unit: int, scale: float = 1.0) -> list[Tensor]:
    """A tensor for each parameter of a unit."""
    made = torch.Generator().manual_seed(1000 * seed + unit)
    return [(torch.randn(n, generator=made) * scale).to(TYPES[kind]) for kind, n in UNITS[unit]]


def aligned(nbytes: int, kept: list[np.ndarray]) -> int:
    kept.append(np.zeros(nbytes + 512, np.uint8))
    return -(-kept[-1].ctypes.data // 512) * 512


class Party:
    """One engine: rank `rank` of `ranks`.

    Attributes:
        kept: memory of the device, and sources of gradients.
    """

    def __init__(self, rank: int, ranks: int, states: str = "fp32", home: str = "ram", path: Path | None = None,
                 share: int = -1) -> None:
        self.engine = Engine("cpu", threads=2, rank=rank, ranks=ranks, share=share)
        self.engine.watchdog(60)
        self.home, self.kept, self.stays, self.step_number = home, [], {}, 0
        self.sources: list[object] = []
        self.shares = share >= 0
        for u, params in enumerate(UNITS):
            unit = self.engine.add_unit(f"layers.{u}", [DTYPES[k] for k, _ in params], [n for _, n in params],
                                        [True] * len(params))
            self.engine.set_states(unit, STATES[states])
            for i, weight in enumerate(seeded(7, u)):
                self.plane(u, i, "HI", True).copy_(weight.view(torch.uint8))
        self.go(path)

    def go(self, path: Path | None) -> None:
        units = range(len(UNITS))
        if self.home in ("vram", "arrive"):
            sizes = [self.engine.hi_bytes(u) for u in units]
            self.engine.open_slots([(aligned(n, self.kept), n) for n in sizes], self)
        for u in units:
            if self.home in ("vram", "arrive"):
                self.engine.settle(u, u)
            if self.home == "arrive":
                self.engine.invite(u)
            if self.home in ("vram", "arrive"):
                self.engine.take(u, 0)
            if self.home == "through":
                self.engine.through(u, True)
        if self.home == "disk":
            self.engine.disk(str(path), list(units), buffers=2, buffer_bytes=1 << 20, threads=2)

    def held(self, slot: int) -> bool:
        return False

    def renew(self, slot: int) -> int:
        raise AssertionError("nothing is held")

    def plane(self, unit: int, param: int, name: str, shared: bool = False) -> Tensor:
        """Its bytes in host memory: the user's view of them, or what all have."""
        return torch.from_numpy(self.engine.plane(unit, param, PLANES[name], shared=shared))

    def own(self, unit: int, param: int, name: str) -> Tensor:
        """Of these bytes those of its own elements."""
        (first, n), whole = self.engine.owned(unit, param), self.plane(unit, param, name)
        each = 8 if name == "SCALE" else whole.numel() // UNITS[unit][param][1]
        if name == "SCALE":
            first, n = first // GROUP, -(-n // GROUP)
        return whole[first * each:(first + n) * each]

    def hand_over(self, unit: int, grads: list[Tensor], mode: int, sums: list[Tensor] | None = None,
                  changed: bool = False) -> None:
        """grads: whole ones. mode SUM: they are roundings of sums, but for fp32 parameters' own. changed: by the user,
        what they are added to."""
        items = []
        for i, grad in enumerate(grads):
            first, n = self.engine.owned(unit, i)
            at = grad.data_ptr() + first * grad.itemsize if n else 0
            if mode == SUM and grad.dtype != torch.float32:
                items.append((i, at, SUM, False, sums[i].data_ptr() + 4 * first if n else 0))
            else:
                items.append((i, at, SET if mode == SUM else mode, changed))
        self.sources.append((grads, sums))
        self.engine.offload(unit, items, 0)

    def step(self, max_norm: float = 0.0, changed: bool = False, named: list[list[Tensor]] | None = None) -> int:
        """One AdamW step of all, begun; named: gradients in memory that is not the store's."""
        self.step_number += 1
        if self.home == "arrive":
            for u in range(len(UNITS)):
                if u not in self.stays:
                    self.stays[u] = [aligned(n, self.kept) for n in self.engine.lift_sizes(u)]
                self.engine.lift(u, self.stays[u], 0)
        units = []
        for u, params in enumerate(UNITS):
            given = [(named[u][i].data_ptr(), DTYPES["F32"] if named[u][i].dtype == torch.float32 else DTYPES[kind])
                     if named else (0, 0) for i, (kind, _) in enumerate(params)]
            units.append((u, [(i, *HYPER, self.step_number, False, *given[i], changed, 77 * u + i)
                              for i in range(len(params))]))
        self.sources.append(named)
        ticket = self.engine.adam(units, max_norm, 0)
        for u in range(len(UNITS)):
            self.engine.forget(u)
        return ticket

    def rest(self) -> None:
        """Waits until nothing is under way; host memory is current."""
        self.engine.drain()
        self.sources.clear()
        for u in range(len(UNITS)):
            self.engine.wait_updates(u)
            self.engine.bring(u, -1)
            if u in self.stays:
                assert self.engine.leave(u, True)


@pytest.fixture
def parties(tmp_path: Path) -> Iterator[object]:
    """make(ranks, ...): the one that owns all, and as many as own a portion."""
    made: list[Party] = []

    def make(ranks: int, shared: bool = False, **how: str) -> tuple[Party, list[Party]]:
        made.append(Party(0, 1, path=tmp_path, **how))
        fd = share() if shared else -1
        made.extend(Party(rank, ranks, path=tmp_path, share=fd, **how) for rank in range(ranks))
        if shared:
            os.close(fd)
        return made[-ranks - 1], made[-ranks:]

    yield make
    for party in made:
        party.engine.close()


def states_of(whole: Party, unit: int, param: int) -> list[str]:
    """Planes that the parameter has, but for gradients."""
    found = []
    for name in ("HI", "LO", "MASTER", "M", "V", "SCALE"):
        try:
            whole.plane(unit, param, name)
            found.append(name)
        except MegatrainError:
            pass
    return found


def assert_bits_of_one(whole: Party, owners: list[Party], *gradients: str) -> None:
    for party in (whole, *owners):
        party.rest()
    for u, params in enumerate(UNITS):
        for i, (kind, n) in enumerate(params):
            for name in (*states_of(whole, u, i), *(g for g in gradients if g != "ACC" or kind != "F32")):
                want, got = whole.plane(u, i, name), torch.cat([o.own(u, i, name) for o in owners])
                assert torch.equal(want, got), f"unit {u}, {kind} {n}: plane {name}"
                for owner in owners if owners[0].shares else ():
                    assert torch.equal(want, owner.plane(u, i, name)), f"unit {u}, {kind} {n}: plane {name}, as seen"
                    assert torch.equal(want, owner.plane(u, i, name, True)), f"unit {u}, {kind} {n}: plane {name}"


def train(whole: Party, owners: list[Party], step: int, micros: int = 1, summed: bool = False) -> None:
    """Gradients of some micro-batches come; summed: to owners as one sum of all."""
    for u in range(len(UNITS)):
        grads = [seeded(100 * step + m, u, 2.0 ** -m) for m in range(micros)]
        for m, grad in enumerate(grads):
            whole.hand_over(u, grad, ADD if m else SET)
            for owner in () if summed else owners:
                owner.hand_over(u, grad, ADD if m else SET)
        if summed:
            sums = [g.to(torch.float32, copy=True) for g in grads[0]]
            for grad in grads[1:]:
                for total, g in zip(sums, grad):
                    total += g.to(torch.float32)
            rounded = [total.to(g.dtype) for total, g in zip(sums, grads[0])]
            for owner in owners:
                owner.hand_over(u, rounded, SUM, sums)


# ---- whose is what ----


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_portions_say_in_bytes_what_is_owned(parties: object, ranks: int) -> None:
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


def test_each_has_memory_for_its_own_states_alone(parties: object) -> None:
    whole, owners = parties(4)
    for party in (whole, *owners):
        for u, params in enumerate(UNITS):
            for i in range(len(params)):
                party.plane(u, i, "M")
    used = [party.engine.host_bytes(PLANES["M"]) for party in (whole, *owners)]
    assert used[0] <= sum(used[1:]) <= used[0] + 16 * 4096


# ---- updates ----


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_owners_together_have_the_bits_of_one(parties: object, ranks: int, states: str, shared: bool) -> None:
    whole, owners = parties(ranks, states=states, shared=shared)
    for step, micros in enumerate((1, 2, 1)):
        train(whole, owners, step, micros)
        for party in (whole, *owners):
            party.step()
        assert_bits_of_one(whole, owners, "GRAD")


@pytest.mark.parametrize("states", ["fp32", "8bit-lo8"])
@pytest.mark.parametrize(("home", "shared"), PLACES[1:])
def test_wherever_units_live(parties: object, home: str, shared: bool, states: str) -> None:
    whole, owners = parties(3, states=states, home=home, shared=shared)
    for step, micros in enumerate((2, 1)):
        train(whole, owners, step, micros)
        for party in (whole, *owners):
            party.step()
    assert_bits_of_one(whole, owners)


@pytest.mark.parametrize(("home", "shared"), PLACES)
def test_a_sum_counts_as_its_micro_batches_do(parties: object, home: str, shared: bool) -> None:
    """SUM, and ADD after it."""
    whole, owners = parties(2, home=home, shared=shared)
    train(whole, owners, 0, 3, summed=True)
    if home == "ram":
        assert_bits_of_one(whole, owners, "GRAD", "ACC")
    for u in range(len(UNITS)):
        more = seeded(55, u)
        for party in (whole, *owners):
            party.hand_over(u, more, ADD)
    for party in (whole, *owners):
        party.step()
    assert_bits_of_one(whole, owners)


def test_a_sum_alone_is_what_the_update_takes(parties: object) -> None:
    """Not its rounding."""
    whole, owners = parties(3)
    train(whole, owners, 0, 2, summed=True)
    for party in (whole, *owners):
        party.step()
    assert_bits_of_one(whole, owners, "GRAD", "ACC")


def change_gradients(parties: list[Party]) -> None:
    """As a script does on every rank: it sees whole gradients where there is a share, and others' changes nowhere."""
    for party in parties:
        party.rest()
    for party in parties:
        for u, params in enumerate(UNITS):
            for i, (kind, _) in enumerate(params):
                grad = party.plane(u, i, "GRAD") if party.shares else party.own(u, i, "GRAD")
                grad.view(TYPES[kind]).mul_(0.75)


@pytest.mark.parametrize(("home", "shared"), PLACES)
def test_a_gradient_that_the_user_changed(parties: object, home: str, shared: bool) -> None:
    whole, owners = parties(3, home=home, shared=shared)
    train(whole, owners, 0, 2)
    change_gradients([whole, *owners])
    for party in (whole, *owners):
        party.step(changed=True)
    assert_bits_of_one(whole, owners)
    train(whole, owners, 1)
    assert_bits_of_one(whole, owners, "GRAD")            # the change is gone


@pytest.mark.parametrize(("home", "shared"), PLACES)
def test_what_is_added_to_a_gradient_that_the_user_changed(parties: object, home: str, shared: bool) -> None:
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
def test_a_gradient_in_memory_of_the_users(parties: object, home: str, shared: bool, wide: bool) -> None:
    """In the weight's type, or in fp32; of the whole parameter, whoever owns what."""
    whole, owners = parties(3, home=home, shared=shared)
    named = [[g.float() if wide else g for g in seeded(9, u)] for u in range(len(UNITS))]
    train(whole, owners, 0)
    for party in (whole, *owners):
        party.step(named=named)
    assert_bits_of_one(whole, owners)


@pytest.mark.parametrize(("home", "ranks"), [("ram", 1), ("ram", 2), ("ram", 4), ("through", 3)])
@pytest.mark.parametrize("of", ["micro-batches", "sums", "changed", "named", "infinite"])
def test_the_norm_is_that_of_one(parties: object, ranks: int, of: str, home: str) -> None:
    """From the sums of chunks of all ranks, whoever made them. One that is not finite skips the step on all."""
    whole, owners = parties(ranks, shared=True, home=home)
    named = [seeded(9, u) for u in range(len(UNITS))] if of == "named" else None
    for step in range(2):
        train(whole, owners, step, 2 if of == "micro-batches" else 1, summed=of == "sums")
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


def test_a_trace_has_the_bytes_of_the_portion(parties: object) -> None:
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
    ((1, 64, SUM, False, 64), "parameter 1 is F32"),
    ((0, 64, SUM, False), "the sum of parameter 0 is at no address"),
    ((0, 0, SET, False), "address 0"),
    ((0, 64, 3, False), "mode 3"),
])
def test_what_cannot_be_handed_over_is_refused(parties: object, item: tuple[int, ...], says: str) -> None:
    _, owners = parties(1)
    with pytest.raises(MegatrainError, match=says):
        owners[0].engine.offload(0, [item], 0)
    owners[0].engine.check()


# ---- writes from outside ----


def together(owners: list[Party], call: Callable[[Party], object]) -> list[BaseException]:
    """As ranks do: nobody waits for another's return. What was raised."""
    raised: list[BaseException] = []

    def one(owner: Party) -> None:
        try:
            call(owner)
        except MegatrainError as e:
            raised.append(e)

    threads = [threading.Thread(target=one, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_every_script_does_in_place_is_done_once(parties: object, ranks: int) -> None:
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


def test_who_writes_alone_is_told(parties: object) -> None:
    _, owners = parties(2, shared=True)
    owners[0].engine.watchdog(0.2)
    with pytest.raises(MegatrainError, match=r"unit layers\.0, parameter 1: rank 1 .* has not come in 0\.2 s"):
        owners[0].engine.spread(0, 1, 1)
    with pytest.raises(MegatrainError, match="PLANES has"):
        owners[0].engine.spread(0, 1, 1 << 20)


def test_alone_there_is_nobody_to_spread_to(parties: object) -> None:
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
def test_ranks_write_the_same_files_together(parties: object, tmp_path: Path, ranks: int) -> None:
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


def test_who_closes_does_not_wait_for_a_step_that_others_never_ask_for(parties: object) -> None:
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
