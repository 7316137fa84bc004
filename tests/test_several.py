"""Several processes on the CPU device: the bits of one process that adds up their micro-batches in a stated order."""
from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import several_load
import torch
from parity import LONG
from run_kill_several import kill
from several import Job, Pool, alone, differences, loaded, memory, saved
from torch import nn

from megatrain_torch import MegatrainError
from megatrain_torch.group import between, control
from megatrain_torch.group.control import Waits, done
from megatrain_torch.group.ranks import Ranks, give_back, shared
from megatrain_torch.model.filling import _give_memory
from megatrain_torch.model.stream import leaves_in_order, processors

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt2", "opt", "mixtral", "gpt_oss", "deepseek_v3", "mamba", "bert", "t5",
                 "vit")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as made:
        yield made


def check(pool: Pool, size: int, job: Job, machines: int = 1, **changed: Any) -> None:
    """Against one process that has all at home in host memory. changed: of the job, for all of them."""
    wanted = alone(dataclasses.replace(job, plan=(), vram=None) if job.plan or job.vram else job, size)
    job = dataclasses.replace(job, **changed)
    assert not differences(pool.call("several:apart", size, machines, "several:train", job) if machines > 1 else
                           pool.call("several:train", size, job), wanted)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_are_as_one(pool: Pool, name: str) -> None:
    check(pool, 2, Job(name))


@pytest.mark.parametrize("dtype, size", [
    ("float32", 3), ("bfloat16", 2), ("bfloat16", 3), ("bfloat16", 4), ("float16", 4),
    *(pytest.param(kind, n, marks=LONG) for kind, n in (("float32", 2), ("float32", 4), ("float16", 2), ("float16", 3)))])
def test_any_number_of_any_type(pool: Pool, size: int, dtype: str) -> None:
    check(pool, size, Job("wide", dtype, reduce="sum" if size == 3 else "mean", delay_us=200))


SITUATIONS = {
    "micro_batches": Job("wide", "bfloat16", micro=3),
    "micro_batches_fp32": Job("llama", micro=3),
    "micro_batches_fp16_of_3": Job("wide", "float16", reduce="sum", micro=2, delay_us=200),
    "micro_batches_of_4": Job("choosy", "bfloat16", micro=2),
    "looked_at": Job("wide", "bfloat16", look=True),
    "looked_at_micro": Job("wide", "bfloat16", look=True, micro=2),
    "states_written": Job("wide", "bfloat16", write=True, micro=2),
    "no_clip": Job("wide", clip=None),
    "frozen": Job("wide", "bfloat16", frozen=("embed", "self_attn", "lm_head")),
    "tied": Job("llama_tied", "bfloat16"),
    "shared_layer": Job("albert"),
    "left_out_and_twice": Job("choosy"),
    "left_out_bf16": Job("choosy", "bfloat16", look=True, micro=2),
    "codes": Job("wide", "bfloat16", states="8bit"),
    "rounded_stochastically": Job("wide", "bfloat16", states="8bit-sr"),
    "in_backward": Job("wide", "bfloat16", clip=None, in_backward=True),
    "host_arithmetic": Job("penalty"),
    "weight_to_a_function": Job("straight"),
    "two_slots": Job("wide", "bfloat16", plan=(("slots", 2), ("activations", "replay"))),
    "saved": Job("wide", "bfloat16", plan=(("activations", "saved"),)),
    "delays": Job("choosy", "float16", delay_us=1500),
}
SIZES = {"left_out_and_twice": 4, "codes": 4, "micro_batches_fp16_of_3": 3, "micro_batches_of_4": 4}


OFTEN = ("micro_batches", "micro_batches_of_4", "looked_at_micro", "states_written", "frozen", "tied",
         "left_out_and_twice", "codes", "in_backward", "host_arithmetic", "weight_to_a_function", "delays")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=LONG) for n in SITUATIONS])
def test_situations(pool: Pool, name: str) -> None:
    check(pool, SIZES.get(name, 2), SITUATIONS[name])


SHARDS = ("delivery", "shards")
VRAM, ARRIVE = (("homes", "vram"),), (("homes", "arrive"),)
MIXED = (("homes", {"model.embed_tokens": "vram", "model.layers.1": "arrive", "lm_head": "vram"}),)
DISK, THROUGH = (("homes", "disk"),), (("homes", "through"),)
FILED = (("homes", "disk+weights"),)
AT_HOME = {                                                # units at home elsewhere than in host memory, of so many
    "bf16_of_4": (4, Job("wide", "bfloat16", plan=VRAM)),
    "mixed": (2, Job("wide", "bfloat16", plan=MIXED, micro=2, look=True)),
    "arrive": (2, Job("choosy", "float16", plan=ARRIVE, delay_us=300)),
    "fp32_of_3": (3, Job("wide", reduce="sum", plan=VRAM, look=True)),
    "fp16_delays": (4, Job("choosy", "float16", plan=VRAM, delay_us=1500)),
    "looked_at_of_4": (4, Job("wide", "bfloat16", plan=VRAM, look=True, delay_us=300)),
    "micro": (2, Job("wide", "bfloat16", plan=VRAM, look=True, micro=3)),
    "no_clip": (2, Job("wide", plan=VRAM, clip=None)),
    "frozen": (2, Job("wide", "bfloat16", frozen=("embed", "self_attn", "lm_head"), plan=VRAM)),
    "tied": (2, Job("llama_tied", "bfloat16", plan=VRAM)),
    "shared_layer": (2, Job("albert", plan=VRAM)),
    "left_out": (4, Job("choosy", "bfloat16", look=True, micro=2, plan=VRAM)),
    "codes": (4, Job("wide", "bfloat16", states="8bit", plan=VRAM)),
    "stochastic": (3, Job("wide", "bfloat16", states="8bit-sr", reduce="sum", plan=VRAM, look=True)),
    "in_backward": (2, Job("wide", "bfloat16", clip=None, in_backward=True, plan=VRAM)),
    "host_arithmetic": (2, Job("penalty", plan=VRAM)),
    "to_a_function": (2, Job("straight", plan=VRAM)),
    "arrive_of_3": (3, Job("wide", "bfloat16", reduce="sum", plan=ARRIVE, look=True)),
    "arrive_codes": (4, Job("wide", "bfloat16", states="8bit", plan=ARRIVE, delay_us=300)),
    "arrive_micro": (2, Job("wide", "bfloat16", plan=ARRIVE, look=True, micro=2)),
    "arrive_frozen": (2, Job("wide", "bfloat16", frozen=("embed", "self_attn"), plan=ARRIVE)),
    "mixed_two_slots": (3, Job("wide", "bfloat16", reduce="sum", plan=(*MIXED, ("slots", 2)), delay_us=300)),
    "disk": (4, Job("wide", "bfloat16", plan=DISK, look=True)),
    "disk_micro": (2, Job("wide", "bfloat16", plan=DISK, look=True, micro=2)),
    "disk_no_clip": (3, Job("wide", plan=DISK, clip=None, reduce="sum")),
    "disk_frozen": (2, Job("wide", "bfloat16", frozen=("embed", "self_attn"), plan=DISK)),
    "disk_tied": (2, Job("llama_tied", "bfloat16", plan=DISK)),
    "disk_left_out": (4, Job("choosy", "float16", plan=DISK, look=True, micro=2, delay_us=1500)),
    "disk_codes": (4, Job("wide", "bfloat16", states="8bit", plan=DISK, delay_us=300)),
    "disk_stochastic": (3, Job("wide", "bfloat16", states="8bit-sr", reduce="sum", plan=DISK, look=True)),
    "disk_in_backward": (2, Job("wide", "bfloat16", clip=None, in_backward=True, plan=DISK)),
    "disk_host_arithmetic": (2, Job("penalty", plan=DISK)),
    "disk_mixed": (2, Job("wide", "bfloat16", micro=2, plan=(("homes", {
        "model.embed_tokens": "vram", "model.layers.0": "disk", "model.layers.1": "arrive", "lm_head": "through"}),))),
    "through": (2, Job("choosy", "bfloat16", plan=THROUGH)),
    "through_micro": (3, Job("wide", "bfloat16", reduce="sum", plan=THROUGH, look=True, micro=2)),
    "through_left_out": (4, Job("choosy", "float16", plan=THROUGH, look=True, delay_us=1500)),
    "through_frozen": (2, Job("wide", "bfloat16", frozen=("embed", "self_attn"), plan=THROUGH)),
    "through_codes": (4, Job("wide", "bfloat16", states="8bit", plan=THROUGH)),
    "through_in_backward": (2, Job("wide", "bfloat16", clip=None, in_backward=True, plan=THROUGH)),
    "through_host_arithmetic": (2, Job("penalty", plan=THROUGH)),
    "planned": (2, Job("wide", "bfloat16", vram="2GiB")),
    "planned_micro": (2, Job("wide", "bfloat16", vram="2GiB", micro=2, look=True)),
}


IN_CI = ("bf16_of_4", "mixed", "arrive", "planned", "disk", "through")


@pytest.mark.parametrize("name", [n if n in IN_CI else pytest.param(n, marks=LONG) for n in AT_HOME])
def test_units_at_home_elsewhere(pool: Pool, name: str) -> None:
    check(pool, *AT_HOME[name])


IN_FILES = {                                               # weights too; all ranks come to each window
    "of_4": (4, Job("wide", "bfloat16", plan=FILED, micro=2, look=True, delay_us=300)),
    "two_slots": (3, Job("wide", "bfloat16", reduce="sum", plan=(*FILED, ("slots", 2), ("activations", "replay")))),
    "mixed": (2, Job("wide", "bfloat16", micro=2, look=True, plan=(SHARDS, ("homes", {
        "model.embed_tokens": "vram", "model.layers.0": "disk+weights", "model.layers.1": "arrive",
        "lm_head": "disk+weights"})))),
    "frozen": (2, Job("wide", "bfloat16", frozen=("embed", "self_attn", "lm_head"), plan=FILED)),
    "tied": (2, Job("llama_tied", "bfloat16", plan=FILED)),
    "fp16": (2, Job("wide", "float16", plan=FILED, delay_us=1500)),
    "states_of_8_bits": (3, Job("wide", "bfloat16", reduce="sum", states="8bit", plan=(*FILED, ("states", "8bit")))),
    "in_backward": (2, Job("wide", "bfloat16", clip=None, in_backward=True, plan=FILED)),
    "host_arithmetic": (2, Job("penalty", plan=FILED)),
    "to_a_function": (2, Job("straight", plan=FILED)),
    "experts": (2, Job("mixtral", frozen=("experts",), plan=(*FILED, ("experts", 2)))),
    "shared_layer": (2, Job("albert", plan=FILED)),
}


@pytest.mark.parametrize("name", [n if n == "mixed" else pytest.param(n, marks=LONG) for n in IN_FILES])
def test_weights_in_files_give_the_same_bits(pool: Pool, name: str) -> None:
    check(pool, *IN_FILES[name])


def test_weights_in_files_are_read_once_a_machine_and_not_kept(pool: Pool) -> None:
    found = pool.call("several:filed", 2)
    assert all(gathers == 1 for *_, gathers in found)
    weights = found[0][0]
    assert weights * 0.99 < sum(read for _, _, read, _ in found) < weights * 1.1
    assert sum(shared for _, shared, _, _ in found) < 1.2 * weights, "gradients alone"


def test_states_that_arrive_come_during_backward(pool: Pool) -> None:
    assert pool.call("several:early", 2) == [[0, 1, 1]] * 2      # the first step learns the order


MACHINES = {                                               # in CI: so many, of how many ranks
    "left_out_bf16": (2, 2), "arrive": (2, 4),
    "micro": (2, 2), "fp16_delays": (4, 4)}                # from slot to slot
ANYWHERE = {**{name: (SIZES.get(name, 2), job) for name, job in SITUATIONS.items()}, **AT_HOME}


@pytest.mark.parametrize("name, machines, size", [
    *((name, *how) for name, how in MACHINES.items()),
    *(pytest.param(name, n, 4, marks=LONG) for name in ANYWHERE for n in (2, 4) if (n, 4) != MACHINES.get(name))])
def test_several_machines_are_as_one(pool: Pool, name: str, machines: int, size: int) -> None:
    check(pool, size, ANYWHERE[name][1], machines)


SHARDED = {                                                # of so many ranks, on so many machines
    "delays": (3, 1, Job("wide", "bfloat16", reduce="sum", micro=2, plan=(("slots", 2),), delay_us=500)),
    "left_out_and_twice": (4, 1, SITUATIONS["left_out_and_twice"]),
    "replay_of_tied": (2, 1, Job("llama_tied", "bfloat16", plan=(("activations", "replay"),))),
    "mixed": (2, 1, AT_HOME["mixed"][1]),
    "machines": (4, 2, SITUATIONS["micro_batches"]),
    "experts": (2, 1, Job("mixtral", frozen=("experts",), plan=(("experts", 2),))),
    **{f"{name}_of_{m}_machines": (max(n, 2 * m), m, job) for m in (1, 2) for table in (
        AT_HOME, {name: (SIZES.get(name, 2), job) for name, job in SITUATIONS.items()})
       for name, (n, job) in table.items() if max(n, 2 * m) % m == 0 and (n == max(n, 2 * m) or job.reduce == "mean")}}


@pytest.mark.parametrize("name", [n if n in ("delays", "left_out_and_twice", "mixed") else pytest.param(n, marks=LONG)
                                  for n in SHARDED])
def test_weights_in_shards_give_the_same_bits(pool: Pool, name: str) -> None:
    size, machines, job = SHARDED[name]
    check(pool, size, job, machines, plan=(*job.plan, SHARDS), vram=None)


def test_each_rank_fetches_its_portion_where_all_come_to_it(pool: Pool) -> None:
    """Units of up to 200 KiB, cut at 16 KiB."""
    job = Job("wide", "bfloat16", plan=(("slots", 2), ("activations", "replay")), delay_us=200)
    (whole, none, _), *_ = pool.call("several:delivered", 2, job)
    for _ in range(3):                           # a machine under load may keep a rank from coming for 5 s
        found = pool.call("several:delivered", 2, dataclasses.replace(job, plan=(*job.plan, SHARDS)))
        if all(astray is None for *_, astray in found):
            break
    assert none == 0 and all(gathers > 20 and astray is None for _, gathers, astray in found), found
    assert sum(nbytes for nbytes, *_ in found) == whole


def test_what_one_rank_does_alone_is_fetched_whole(pool: Pool) -> None:
    """It evaluates between steps, with what was fetched for the next one in the slots."""
    job = Job("wide", look=True, plan=(("slots", 2), SHARDS))
    found = pool.call("several:delivered", 2, job)
    assert all(gathers > 10 for _, gathers, _ in found) and found[0][0] > found[1][0]
    assert all(astray is None or astray[2] == astray[3] for *_, astray in found), "nobody waited for one that did not come"


@pytest.mark.parametrize("job, machines", [
    (Job("choosy", "bfloat16", plan=ARRIVE), 2), *(pytest.param(job, n, marks=LONG) for n in (2, 4) for job in (
        Job("wide", "bfloat16"), Job("choosy", "float16", states="8bit"), Job("wide", "bfloat16", plan=VRAM),
        Job("wide", "bfloat16", plan=DISK), Job("choosy", "float16", states="8bit", plan=THROUGH),
        Job("wide", "bfloat16", states="8bit", plan=MIXED)))], ids=lambda v: str(dict(v.plan)) if isinstance(v, Job) else v)
def test_a_checkpoint_of_several_machines(pool: Pool, job: Job, machines: int, tmp_path: Path) -> None:
    one, four = str(tmp_path / "one"), str(tmp_path / "four")
    wanted = saved(0, None, job, one)
    assert not differences(pool.call("several:apart", 4, machines, "several:loaded", job, one), wanted)
    wanted, *others = pool.call("several:apart", 4, machines, "several:saved", job, four)
    assert not differences(others, wanted)
    assert not differences(pool.call("several:apart", 4, 2, "several:loaded", job, four), wanted)
    assert not differences([loaded(0, None, job, four)], wanted)


@pytest.mark.parametrize("homes", ["vram", *(pytest.param(home, marks=LONG) for home in ("ram", "disk", "through"))])
def test_what_scripts_do_on_several_machines(pool: Pool, homes: str) -> None:
    assert pool.call("several:apart", 2, 2, "several:habits", {"homes": homes}) == [[], []]


@pytest.mark.parametrize("machines, homes", [(2, "vram"), pytest.param(1, "vram", marks=LONG),
                                             pytest.param(2, "ram", marks=LONG)])
def test_what_was_looked_at_before_a_load_is_what_was_loaded(pool: Pool, machines: int, homes: str, tmp_path: Path
                                                             ) -> None:
    found = pool.call("several:apart", 4, machines, "several:looked_at_around_a_load", str(tmp_path / "c"), homes)
    assert found == [[]] * 4


def test_what_a_save_brings_of_other_machines_is_given_back(pool: Pool, tmp_path: Path) -> None:
    """Each has 16 MiB of weights, and half of gradients and moments."""
    before, *behind, looked = pool.call("several:apart", 2, 2, "several:memory_of_saves", str(tmp_path / "c"))[0]
    assert before == pytest.approx(2 * 40 << 20, rel=0.05) and behind == pytest.approx([before, before], rel=0.05)
    assert looked > before + (8 << 20)


@pytest.mark.parametrize("nodes, own, allowed, found", [
    ([0, 1], 0, range(8), {0, 1, 2, 7}), ([0, 1], 1, range(8), {3, 4, 5, 6}), ([1, 0, 0, 1], 1, range(6), {3, 4, 5}),
    ([0, 0], 0, range(8), set(range(8))), ([0, 1, 1], 1, range(8), set(range(8))), ([-1, -1], -1, range(8), set(range(8))),
    ([0, 1], 0, range(3, 7), {3, 4, 5, 6}), ([1, 1], 1, range(3, 7), {3, 4, 5, 6})])
def test_threads_are_beside_their_gpu_where_nodes_have_equally_many(
        nodes: list[int], own: int, allowed: range, found: set[int], tmp_path: Path) -> None:
    for node, cpus in ((0, (0, 1, 2, 7)), (1, range(3, 7)), (2, ())):        # the last has memory alone
        for name in ("list", *cpus):
            (tmp_path / f"devices/system/node/node{node}/cpu{name}").mkdir(parents=True)
    assert processors(nodes, own, set(allowed), tmp_path) == found


def test_ranks_gather_weights_in_however_many_groups_each_is(pool: Pool) -> None:
    assert pool.call("several:found_for_gathers", 4) == [[0, 1, 2, 3]] * 4


def test_bytes_that_go_in_pieces_are_whole_where_they_come(pool: Pool) -> None:
    assert pool.call("several:pieces", 2) == [[True] * 6] * 2


class EndsAsTheWaitDoes:
    """Work of torch.distributed's that is over between the end of a wait and the next look."""

    def __init__(self, *said: str) -> None:
        self.said = list(said)

    def wait(self, within: object = None) -> None:
        if self.said and (text := self.said.pop(0)):
            raise RuntimeError(text)

    def is_completed(self) -> bool:
        return True


class Fails:
    """A group whose first work is refused, and whose second fails."""

    def __init__(self) -> None:
        self.asked = 0

    def send(self, *_: object) -> EndsAsTheWaitDoes:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("refused")
        return EndsAsTheWaitDoes(*["Connection closed"] * (self.asked == 2))

    def recv(self, *_: object) -> EndsAsTheWaitDoes:
        return EndsAsTheWaitDoes("Connection closed")


def test_whoever_sends_goes_on_behind_what_did_not_go() -> None:
    pieces, group = between.Pieces(torch.device("cpu")), Fails()
    for said in ("refused", "Connection closed"):
        with pytest.raises(RuntimeError, match=said):
            pieces.send(torch.zeros(8, dtype=torch.uint8), [group])
            pieces.leave(0)
    pieces.send(torch.zeros(8, dtype=torch.uint8), [group])
    pieces.leave(0)


def test_bytes_that_did_not_come_are_never_told_of() -> None:
    """Work of NCCL's that failed is completed too. Nor are any told of from when groups are given up."""
    told, pieces = [], between.Pieces(torch.device("cpu"))
    pieces.receive(torch.zeros(8, dtype=torch.uint8), Fails())
    pieces.behind(lambda: told.append(1))
    pieces._stream, pieces._entered = object(), nullcontext              # as on CUDA: who looks does not wait
    with pytest.raises(RuntimeError, match="Connection closed"):
        pieces.leave(0)
    given_up = Event()
    pieces = between.Pieces(torch.device("cpu"), Event(), given_up)
    pieces.behind(lambda: told.append(2))
    given_up.set()
    with pytest.raises(RuntimeError, match="nothing more"):
        pieces.leave(0)
    assert not told


@dataclasses.dataclass
class Carries:
    """A group, as NCCL's: bytes go when a receive meets its send."""

    log: list[str]
    bytes: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def send(self, parts: list[torch.Tensor], *_: int) -> EndsAsTheWaitDoes:
        self.bytes.append(parts[0].clone())
        self.log.append(f"send {len(parts[0])}")
        return EndsAsTheWaitDoes()

    def recv(self, parts: list[torch.Tensor], *_: int) -> EndsAsTheWaitDoes:
        parts[0].copy_(self.bytes.pop(0))
        self.log.append(f"recv {len(parts[0])}")
        return EndsAsTheWaitDoes()


def test_memory_that_the_device_cannot_reach_goes_through_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA with memory that is not locked: the buffer holds one piece at a time, on both sides. Copies are in a
    stream of their own: in compute's they might stand behind what waits for the other process."""
    monkeypatch.setattr(between, "PIECE", 4)
    copy, inside, beside = torch.Tensor.copy_, [], []

    @contextmanager
    def entered() -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    def copied(to: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        if len(to) < 10:
            beside.append(bool(inside))
        return copy(to, of)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    ends, group = [between.Pieces(torch.device("cpu")) for _ in range(2)], Carries([])
    for pieces in ends:
        pieces._stream, pieces._entered, pieces._buffer = object(), entered, torch.zeros(4, dtype=torch.uint8)
    given, found = torch.arange(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    assert not ends[0].is_direct(given)
    ends[0].send(given, [group])
    ends[1].receive(found, group)
    assert torch.equal(found, given)
    assert all(beside) and len(beside) == 9
    assert group.log == [f"{way} {n}" for way in ("send", "recv") for n in (4, 4, 2)]
    assert not any(pieces._busy for pieces in ends)


def test_a_long_wait_is_told_once_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which two others may begin at once: the second comes where the first has made its own and not started it."""
    def trace(frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and ".start()" in source[frame.f_lineno - first]:
            sys.settrace(None)
            control._look_out()
        return trace if frame.f_code is control._look_out.__code__ else None

    (source, first), told, way = inspect.getsourcelines(control._look_out), [], object.__new__(control.Control)
    monkeypatch.setattr(control, "_lookout", threading.Thread())
    monkeypatch.setattr(control, "_WARN_S", -1.0)
    monkeypatch.setattr(control, "_warn_late", (over := Event()).wait)
    way._warn = told.append
    sys.settrace(trace)
    with way.named("waits"):
        control._tell_late()
        control._tell_late()
    assert told == ["waits"] and control._lookout.is_alive()
    over.set()


def test_bytes_are_on_their_way_before_they_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the device of who is told might wait for what this host has yet to queue. Where a send waits for its
    receive, it is told of before."""
    for direct, order in ((True, ["send 6", "told"]), (False, ["told", "send 6"])):
        log: list[str] = []
        line = object.__new__(between.Between)
        line._device, line._given_up, line._rank, line._ways = torch.device("cpu"), Event(), 0, {}
        line._hearers, line._out, line._machines = {"there": 1}, {1: Carries(log)}, ["here", "there"]
        line._next = lambda: [(b"", torch.zeros(6, dtype=torch.uint8).numpy(), -1, True)]
        line._send, line._end = lambda *_, log=log: log.append("told"), lambda _: None
        monkeypatch.setattr(between, "SMALL", 5)
        monkeypatch.setattr(between.Pieces, "is_direct", lambda *_, direct=direct: direct)
        line.tell()
        assert log == order


class Ends:
    """An engine, and groups of its ranks, as a process ends. drained: what that raises."""

    def __init__(self, drained: Exception | None = None, died: bool = False, closed: bool = False) -> None:
        self.done, self._drained, self._died, self._closed = [], drained, died, closed

    def watchdog(self, _: float) -> None:
        if self._closed:
            raise MegatrainError("the engine is closed")

    def drain(self) -> None:
        if self._drained is not None:
            raise self._drained

    def gone(self) -> list[tuple[int, int, bool]]:
        return [(1, 1, True)] * self._died

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.done.append(name)


@pytest.mark.parametrize("ends, how, given", [
    (Ends(), "shutdown", 0), (Ends(closed=True), "shutdown", 0), (Ends(died=True), "abort", 0),
    (Ends(MegatrainError("rank 1 ended"), died=True), "abort", 1)], ids=["in order", "unstreamed", "the last", "one died"])
def test_groups_that_may_never_end_are_aborted(ends: Ends, how: str, given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a script has caught the error, and exits: shutdown() would wait for who is gone."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    ranks, group = Ranks.__new__(Ranks), Ends()
    ranks.ways, ranks.given_up, ranks._gathers = {}, Event(), group
    given_up = []
    monkeypatch.setattr(Ranks, "give_up", lambda self: given_up.append(self))    # which ends the user's group too
    leaves_in_order(ends, ranks, None)
    assert (set(group.done), ends.done[-1:], len(given_up)) == ({how}, ["close"], given)


def test_a_way_is_given_back_once() -> None:
    ranks, group = Ranks.__new__(Ranks), Ends()
    ranks.ways, ranks.given_up, ranks._gathers = {(0, 1): group}, Event(), None
    give_back(ranks.ways, (0, 1))
    ranks.leave(failed=True)
    assert group.done == ["shutdown"]


def test_each_machine_has_the_first_ones_model(pool: Pool) -> None:
    wanted = several_load.made_by_the_script(0, None, "of_other_values")
    found = pool.call("several:apart", 2, 2, "several_load:made_by_the_script", "of_other_values")
    assert not differences(found, wanted)


@pytest.mark.parametrize("job", [
    Job("wide", "bfloat16"), *(pytest.param(job, marks=LONG) for job in (
        Job("choosy", "float16", states="8bit"), Job("wide", "bfloat16", plan=VRAM), Job("choosy", "float16", plan=ARRIVE),
        Job("wide", "bfloat16", plan=DISK), Job("choosy", "float16", states="8bit", plan=DISK),
        Job("wide", "bfloat16", plan=FILED), Job("wide", "bfloat16", states="8bit", plan=MIXED)))], ids=lambda j: f"{j.dtype}-{dict(j.plan).get('homes', 'ram')}")
def test_a_checkpoint_is_that_of_any_number(pool: Pool, job: Job, tmp_path: Path) -> None:
    wanted = saved(0, None, job, str(tmp_path / "one"))
    assert not differences(pool.call("several:loaded", 3, job, str(tmp_path / "one")), wanted)
    wanted, *others = pool.call("several:saved", 3, job, str(tmp_path / "three"))
    assert not differences(others, wanted)
    for size in (2, 3, 4):
        assert not differences(pool.call("several:loaded", size, job, str(tmp_path / "three")), wanted)
    assert not differences([loaded(0, None, job, str(tmp_path / "three"))], wanted)


@pytest.mark.parametrize("kind, dtype", [("llama", torch.bfloat16), ("moe", torch.float32),
                                         pytest.param("tied", torch.float32, marks=LONG)])
def test_a_model_of_files_is_loaded_once(pool: Pool, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Experts are put together by transformers, in memory: on the first rank alone."""
    pytest.importorskip("transformers")
    several_load.built(kind, dtype).save_pretrained(tmp_path)
    wanted, found = several_load.from_files(0, None, str(tmp_path)), pool.call("several_load:from_files", 3, str(tmp_path))
    read, made = ([notes.pop(what) for notes in found] for what in ("read", "made"))
    assert not differences(found, wanted)
    assert made == [wanted["made"], 0, 0] and read == [wanted["read"], 0, 0]


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_each_rank_reads_its_portion_of_a_checkpoint(pool: Pool, states: str, tmp_path: Path) -> None:
    nbytes = several_load.saved_by_one(str(tmp_path / "c"), states)
    found = pool.call("several_load:read_from_a_checkpoint", 3, str(tmp_path / "c"), states, "")
    assert 0.98 * nbytes < sum(read for read, _, _ in found) <= nbytes and all(said == "" for *_, said in found)
    assert all(read > 0.2 * nbytes for read, _, _ in found) and sum(blocks for _, blocks, _ in found) == 2


def test_a_checkpoint_that_one_rank_finds_broken_is_loaded_by_none(pool: Pool, tmp_path: Path) -> None:
    several_load.saved_by_one(str(tmp_path / "c"), "fp32")
    found = pool.call("several_load:read_from_a_checkpoint", 2, str(tmp_path / "c"), "fp32", "states")
    assert all("a block is another" in said for *_, said in found), found


def test_frozen_weights_are_written_once_by_all(pool: Pool, tmp_path: Path) -> None:
    assert pool.call("several_load:saved_twice", 3, str(tmp_path)) == [([1, 2], True)] * 3


@pytest.mark.parametrize("how", ["meta", "of_other_values"])
def test_a_model_that_each_rank_makes_is_the_first_ones(pool: Pool, how: str) -> None:
    wanted = several_load.made_by_the_script(0, None, how)
    assert not differences(pool.call("several_load:made_by_the_script", 3, how), wanted)


@pytest.mark.parametrize("plan", [{"delivery": "shards"}, *(pytest.param(
    {"homes": home}, marks=LONG) for home in ("ram", "vram", "arrive", "disk", "through", "disk+weights"))], ids=str)
def test_what_scripts_do(pool: Pool, plan: dict[str, str]) -> None:
    assert pool.call("several:habits", 2, plan) == [[], []]


ODD = ("backward_breaks_on_one", "two_models", "hooks_on_one", "hooks_in_another_order", "grads_kept_on_one",
       "grads_of_ones_own", "penalty_before", "update_in_a_hook", "backward_breaks_on_all", "refused_on_one",
       "backward_reaches_nothing_on_one", "grad_taken_in_backward")
LAST = pytest.param("grad_taken_of_what_is_not_used", marks=LONG)


@pytest.mark.parametrize("what", [*ODD, "hooks_that_come_later", "waits_for_what_it_sent", LAST])
def test_what_not_all_ranks_do(pool: Pool, what: str) -> None:
    assert pool.call(f"several_odd:{what}", 2, timeout=60.0) == ["", ""]


@pytest.mark.parametrize("delivery, lanes", [("whole", ["exchange"]), ("shards", ["exchange", "gather"])])
def test_a_trace_has_what_goes_between_processes(pool: Pool, delivery: str, lanes: list[str]) -> None:
    assert pool.call("several:traced", 2, Job("llama", plan=(("delivery", delivery),))) == [lanes, lanes]


@pytest.mark.parametrize("what", [ODD[0], *(pytest.param(name, marks=LONG) for name in ODD[1:]), LAST])
def test_what_not_all_ranks_do_with_weights_in_shards(pool: Pool, what: str) -> None:
    assert pool.call("several_odd:in_shards", 2, what, timeout=60.0) == ["", ""]


@pytest.mark.parametrize("what, machines", [
    ("one_is_slow_to_file_weights", 1), ("another_way_to_weights_in_files", 1), ("unfrozen_on_disk", 2),
    ("load_fails_on_one", 1), ("save_fails_on_one", 1),
    *(pytest.param(what, 1, marks=LONG) for what in ("unfrozen_on_disk", "weights_do_not_leave_memory"))])
def test_what_not_all_ranks_do_with_files(pool: Pool, what: str, machines: int, tmp_path: Path) -> None:
    assert pool.call("several:apart", 2, machines, f"several_odd:{what}", str(tmp_path), timeout=60.0) == ["", ""]


@pytest.mark.parametrize("size, first, later, graphs", [
    (2, 16, 4, False), *(pytest.param(*how, marks=LONG) for how in ((2, 30, 2, False), (2, 16, 4, True), (4, 16, 4, False)))])
def test_units_move_again_for_lengths_that_come(pool: Pool, size: int, first: int, later: int, graphs: bool) -> None:
    """Four ranks are on two machines."""
    found = pool.call("several:apart", size, size // 2, "several_odd:moves_again", first, later, graphs, timeout=90.0)
    assert found == [""] * size


@pytest.mark.parametrize("when", [pytest.param("stream", marks=LONG), "step"])
def test_a_disk_that_is_full_on_one(when: str, tmp_path: Path) -> None:
    with Pool(2) as two:                         # whose own store, a file too, has not grown yet
        assert two.call("several_odd:disk_full_on_one", 2, str(tmp_path), when, timeout=60.0) == ["", ""]


@pytest.mark.parametrize("what, said", [
    ("model", "the model is not the same in all processes: 4 and 5 in rank 0 and rank 1"), ("order", "not the same"),
    ("frozen", "True and False in rank 0 and rank 1"), ("homes", "homes='disk+weights', with 3 machines of 1 GPU"),
    ("grads", "grads='none', with 3 GPUs"),
    ("reduce", "use 'mean' or 'sum'"), ("host", "1.0 KiB"), ("machines", "each machine has to have equally many")])
def test_refused_on_all(pool: Pool, what: str, said: str) -> None:
    machines = {"machines": 2, "homes": 3}.get(what, 1)
    texts = pool.call("several:apart", 3, machines, "several:refused", what)
    assert all(said in text for text in texts), texts


@pytest.mark.parametrize("dtype, each", [(torch.float32, 16), (torch.bfloat16, 14)])
def test_one_model_in_memory(pool: Pool, dtype: torch.dtype, each: int) -> None:
    """Of what the store has; beside it a process has its slots, and gradients on their way. each: bytes."""
    one = memory(0, None, dtype)[0]
    assert one > each * 8 << 20
    assert one * 0.99 < sum(pss for _, pss in pool.call("several:memory", 4, dtype)) < one * 1.05


def test_a_plan_that_took_gpus_to_be_linked_says_what_host_memory_that_costs(pool: Pool) -> None:
    for told in pool.call("several:out_of_reach", 2):
        assert [text.rpartition(", ")[2] for text in told] == ["4.0 MiB more"] and "CUDA IPC" in told[0]


@pytest.mark.parametrize("together", [False, True])
def test_frozen_weights_at_home_on_all_gpus_take_no_host_memory(pool: Pool, tmp_path: Path, together: bool) -> None:
    """Four matrices of 4 MiB. A reader has one unit's; a save's go when it is over."""
    for found in pool.call("several:frozen_at_home", 2, str(tmp_path / "c"), together):
        mib = {what: n / 2**20 for what, n in found.items()}
        assert all(mib[what] < 2 for what in ("streamed", "trained", "adapters read", "saved")), mib
        assert 4 <= mib["one read"] < 6, mib


@pytest.mark.parametrize("what, said", [
    *((name, f"these differ: {name};") for name in ("lr", "states")),
    *(pytest.param(name, f"these differ: {name};", marks=LONG) for name in ("betas", "eps", "weight_decay", "maximize")),
    ("buffers", "'table: torch.float32 [3]' and 'table: torch.float32 [4]'"), ("step", "these differ: step number;"),
    ("grad written", "these differ: gradients that were written"), ("grad replaced", "these differ: gradients that were"),
    ("grad read", ""), ("grad written by all", ""), ("frozen", "requires_grad is not the same in all processes: of 0.weight"),
    ("written", "has written in place to unit Sequential"), ("skips", "has made step 2, which rank 1 has not, and rank 1 exchanges")])
def test_what_one_rank_does_otherwise_is_named_on_all(pool: Pool, what: str, said: str) -> None:
    began = time.monotonic()
    texts = pool.call("several_odd:otherwise", 2, what)
    assert all(said in text if said else text == "" for text in texts), texts
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("how", ["before", "between"])
def test_a_rank_that_ends_before_it_streams_ends_the_others(how: str) -> None:
    began = time.monotonic()
    with Pool(3) as three:
        three.send("several_odd:ends_before", 3, how)
        texts = [three.answer(rank, 30.0)[1] for rank in (0, 2)]
    assert all("another process of the group is gone" in text for text in texts), texts
    assert time.monotonic() - began < 30


def test_who_drops_a_model_first_gives_the_others_its_states(pool: Pool) -> None:
    assert pool.call("several_odd:drops_first", 2) == [90000, 90000]


def test_weights_that_another_rank_still_takes_are_not_given_back(pool: Pool) -> None:
    assert pool.call("several_odd:unstreams_slowly", 2) == [0, 0]


def test_a_launcher_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatrain_torch as mt
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mt.MegatrainError, match=r"started 2 processes .* call torch\.distributed\.init_process_group"):
        mt.stream(torch.nn.Linear(2, 2), "cpu")


@pytest.mark.parametrize("what, said", [
    ("save", ("rank 0 is in mt.save", "rank 1 exchanges gradients in a backward")),
    *(pytest.param(what, said, marks=LONG) for what, said in (
        ("load", ("rank 0 is in mt.load", "rank 1 exchanges gradients in a backward")),
        ("stream", ("rank 0 is in mt.stream", "rank 1 ")), ("asynchronous", ("asynchronous=[True, False]",)),
        ("late", ())))])
def test_ranks_that_wait_in_vain_say_where(what: str, said: tuple[str, ...], tmp_path: Path) -> None:
    with Pool(2) as two:                         # its groups are of no use afterwards
        found = two.call("several_odd:said", 2, what, str(tmp_path), timeout=60.0)
    assert all(part in text for text, _ in found for part in said) and all(s < 30 for _, s in found), found
    assert said or [text for text, _ in found] == ["", ""]


@pytest.mark.parametrize("notes, stuck", [
    ({0: ("save", [0, 1])}, []), ({0: ("save", [0, 1]), 1: ("save", [0, 1])}, []),
    ({0: ("save", [0, 1]), 1: ("backward", [0, 1])}, [0, 1]),
    ({0: ("save", [0, 1]), 1: ("other", [1, 2])}, []),                       # 2 may come yet, and then 1
    ({0: ("save", [0, 1]), 1: ("other", [1, 2]), 2: ("third", [0, 2])}, [0, 1, 2]),
    ({0: ("save", [0, 1, 2]), 1: ("save", [0, 1, 2]), 2: ("backward", [0, 1, 2])}, [0, 1, 2])])
def test_who_waits_in_vain(notes: dict[int, tuple[str, list[int]]], stuck: list[int],
                           monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits.__new__(Waits)
    waits.members, waits._me = notes[0][1], 0
    monkeypatch.setattr(waits, "_read", lambda r: {"at": notes[r][0], "of": notes[r][1]} if r in notes else None)
    assert sorted(waits.stuck()) == stuck


def test_memory_that_another_process_does_not_open_is_refused_by_name() -> None:
    ranks: Any = SimpleNamespace(rank=1, mates=[0, 1], gather=lambda own: [(1 << 30, 5), own])
    with pytest.raises(MegatrainError, match=r"memory of process 1073741824.*No such file.*in one container"):
        shared(ranks, -1)


def test_work_that_ends_as_the_wait_does_is_over() -> None:
    assert done(EndsAsTheWaitDoes("Operation timed out!"), 0.01)
    with pytest.raises(RuntimeError, match="Connection closed"):
        done(EndsAsTheWaitDoes("Operation timed out!", "Connection closed"), 0.01)


def test_a_rank_is_killed(tmp_path: Path) -> None:
    """run_kill_several.py does it many times."""
    assert len(list(kill(tmp_path, 1, 1))) == 1


TORCHRUN = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            "2", "script.py"]
LAUNCHED = """
import torch, time, sys
import megatrain_torch as mt
torch.distributed.init_process_group("gloo")
model = mt.stream(torch.nn.Linear(4, 4), "cpu")
print("begun", flush=True)
time.sleep(100)
"""


@LONG
def test_the_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAUNCHED)
    with (tmp_path / "out").open("w") as out, subprocess.Popen(TORCHRUN, cwd=tmp_path, stdout=out, stderr=out) as launcher:
        said = (tmp_path / "out").read_text
        wait_until(lambda: said().count("begun") == 2)
        launcher.kill()
        wait_until(lambda: all(f"and so does rank {r}" in said() for r in range(2)))


ENDS = """
import torch, time
import megatrain_torch as mt
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = mt.stream(torch.nn.Linear(300, 300), "cpu", plan={"homes": "vram"})
opt = mt.AdamW(model.parameters())
model(torch.ones(2, 300)).sum().backward()
opt.step()
if rank == 0:
    time.sleep(2)
    print("found", opt.state_dict()["state"][0]["exp_avg"].count_nonzero().item(), flush=True)
"""


@LONG
def test_a_rank_that_ends_first_gives_the_other_its_states(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS)
    began = time.monotonic()
    found = subprocess.run(TORCHRUN, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0 and "found 90000" in found.stdout, found.stderr
    assert time.monotonic() - began < 40


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_codes_on_the_meta_device_are_codes_when_they_have_memory() -> None:
    """In a process whose values another one has."""
    class Params4bit(nn.Parameter):
        pass

    layer = nn.Linear(4, 4, bias=False, device="meta")
    layer.weight = codes = Params4bit(torch.empty(8, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
    codes.quant_state = "its own"
    _give_memory(layer, [codes])
    assert layer.weight is codes and type(codes) is Params4bit and codes.device.type == "cpu"
    assert codes.quant_state == "its own" and codes.dtype == torch.uint8
