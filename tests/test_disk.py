"""States and weights in a file: that it changes no bit, who may look, what is refused, and what is left behind.

That training gives the same bits in each placement is test_overlap.py's; the C side is tests/c/test_disk.c and
tests/c/test_file.c.
"""
from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doors
import pytest
import torch
from between import BETWEEN, TYPES, assert_equal, states, train_with, write_a_master, write_a_moment
from test_adamw import HYPER, Dots, fed, feed, grads_for, plain_dots
from test_adamw import SHAPES as USUAL

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch._core import PLANES
from megatrain_torch.store import disk

Pair = tuple[Dots, mt.AdamW]
HOMES = pytest.mark.parametrize("homes", ["arrive", "disk", "disk+weights"])
SHAPES = [*USUAL, (150, 170)]                    # the last one's states take several buffers
LAST = f"layers.{len(USUAL)}"
TIGHT = {"buffers": 2, "buffer_bytes": 65536, "threads": 3}
DELAYS = {"delay_us": 200, "seed": 5}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Pair]:
    def trained(homes: Any = "disk", dtype: torch.dtype = torch.bfloat16, steps: int = 2, clip: float | None = 0.5,
                debug: Any = None, grads: str = "ram", **hyper: Any) -> Pair:
        on_disk = "disk" in str(homes)
        model = doors.stream(plain_dots(dtype, SHAPES), device="cpu", nvme=str(tmp_path) if on_disk else None,
                             plan={"homes": homes, "grads": grads,
                                   "debug": ({"disk": TIGHT} if on_disk else {}) | (debug or {})})
        return fed(model, mt.AdamW(model.parameters(), max_grad_norm=clip, **{**HYPER, **hyper}), range(steps))

    return trained


def core_of(model: Dots) -> _core.Engine:
    return mt.model.stream.runtime_of(model).core


# ---- the same bits ----

@HOMES
@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_nothing_between_backward_and_step_matters(make: Callable[..., Pair], homes: str,
                                                   between: Callable[[Dots, mt.AdamW], None]) -> None:
    dtype = torch.float16 if homes == "arrive" and between in (write_a_master, write_a_moment) else torch.bfloat16
    pairs = make(homes, dtype, debug=DELAYS), make("ram", dtype)
    train_with(between, *pairs)
    assert_equal(*pairs)


@TYPES
@HOMES
@pytest.mark.parametrize("grads", ["ram", "none"])
def test_updates_inside_backward(make: Callable[..., Pair], dtype: torch.dtype, homes: str, grads: str) -> None:
    """"none": their gradients are kept nowhere either."""
    assert_equal(make(homes, dtype, 6, None, DELAYS, grads, in_backward=True),
                 make("ram", dtype, 6, None, in_backward=True))


@HOMES
def test_step_that_is_not_finite_changes_nothing(make: Callable[..., Pair], homes: str) -> None:
    pairs = make(homes), make("ram")
    for model, opt in pairs:
        bad = grads_for(model, 9)
        bad[1][2, 3] = float("inf")
        before = states(model, opt)
        feed(model, opt, bad)
        assert opt.skipped_steps == 1
        assert all(torch.equal(v, before[k]) for k, v in states(model, opt).items())
        rt = mt.model.stream.runtime_of(model)
        rt.drain()
        assert not rt.homes.arrivals.pieces, "a stay goes on"
        feed(model, opt, grads_for(model, 10))
    assert_equal(*pairs)


@HOMES
def test_parameters_that_are_frozen_and_trained_again(make: Callable[..., Pair], homes: str) -> None:
    """One of them is trained for the first time when the file is laid out: its states stay in memory. Each step drops a
    batch: what was brought for it stays."""
    pairs = make(homes, steps=0, debug=DELAYS), make("ram", steps=0)
    for model, opt in pairs:
        late, frozen = model.layers[0].weight, model.layers[4].weight
        late.requires_grad_(False)
        for step, on in ((0, True), (1, True), (2, False), (3, False), (4, True), (5, True)):
            model(grads_for(model, 20 + step)).backward()
            opt.zero_grad()
            frozen.requires_grad_(on)
            late.requires_grad_(step > 1)
            feed(model, opt, grads_for(model, step))
    assert_equal(*pairs)


def test_loaded_states_are_those_that_were_saved(make: Callable[..., Pair]) -> None:
    for source, other in (("disk", "disk+weights"), ("disk+weights", "disk"), ("ram", "disk"), ("ram", "arrive")):
        saved = copy.deepcopy(make(source, steps=3)[1].state_dict())
        pairs = make(other, steps=1), make("ram", steps=1)
        for model, opt in pairs:
            opt.load_state_dict(saved)
            feed(model, opt, grads_for(model, 4))
        assert_equal(*pairs)


# ---- memory, counters, the timeline ----

def test_states_take_no_memory_but_while_somebody_reads_them(make: Callable[..., Pair]) -> None:
    model, opt = make("disk", steps=2)
    core = core_of(model)
    core.drain()
    buffers = (TIGHT["buffers"] + 1) * TIGHT["buffer_bytes"]
    assert [core.host_bytes(PLANES[p]) for p in ("LO", "M", "V")] == [0, 0, 0]
    assert core.host_bytes() == buffers + sum(core.host_bytes(PLANES[p]) for p in ("HI", "GRAD"))
    assert opt.state[model.layers[4].weight]["exp_avg"].abs().sum() > 0
    assert core.host_bytes(PLANES["M"]) >= 4 * 150 * 170
    feed(model, opt, grads_for(model, 3))
    core.drain()
    assert [core.host_bytes(PLANES[p]) for p in ("LO", "M", "V")] == [0, 0, 0]


def test_weights_take_no_memory_but_while_somebody_reads_them(make: Callable[..., Pair]) -> None:
    model, opt = make("disk+weights", steps=0)
    core, last = core_of(model), model.layers[4].weight
    assert core.host_bytes(PLANES["HI"]) == 0
    plain = plain_dots(torch.bfloat16, SHAPES)
    assert torch.equal(mt.model.stream.runtime_of(model).copy(last._mt), plain.layers[4].weight)
    assert core.host_bytes(PLANES["HI"]) == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    for step in range(3):
        model(grads_for(model, step)).backward()                 # gives back what an update has made old
        assert last.grad is not None                             # waits, and brings no weights
        assert (core.host_bytes(PLANES["HI"]) == 0) == (step > 0)
        opt.step()
        opt.zero_grad()
        core.drain()
    assert last.abs().sum() > 0 and core.host_bytes(PLANES["HI"]) == -(-2 * 150 * 170 // 4096) * 4096      # its unit's
    with torch.no_grad():
        last.fill_(2.0)
    feed(model, opt, grads_for(model, 3))
    model(grads_for(model, 4))
    assert core.host_bytes(PLANES["HI"]) == 0 and 1.0 < float(last.detach().float().mean()) < 3.0


def test_masters_are_made_of_one_units_weights_at_a_time(make: Callable[..., Pair]) -> None:
    model, opt = make("disk+weights", torch.float16, steps=0)
    feed(model, opt, grads_for(model, 0))
    assert core_of(model).host_bytes(PLANES["HI"]) == 0


@torch.library.custom_op("disk_test::scale", mutates_args=("p",))
def scale(p: torch.Tensor, by: float) -> None:
    p.mul_(by)


@pytest.mark.parametrize("then", ["forward", "step", "save", "save a frozen one"])
def test_writes_past_the_guard_are_not_lost(make: Callable[..., Pair], tmp_path: Path, then: str) -> None:
    """The operation's name does not say that it writes."""
    pairs = make("disk+weights", steps=1), make("ram", steps=1)
    for model, opt in pairs:
        layer = model.layers[0]
        layer.weight.requires_grad_("frozen" not in then)
        feed(model, opt, grads_for(model, 2))
        if "step" in then:
            model(grads_for(model, 3)).backward()
        with torch.no_grad():
            scale(layer.weight, 1.5)
        if "step" in then:
            opt.step()
            opt.zero_grad()
        if "save" in then:
            mt.save(model, opt, tmp_path / "saved")
        layer.weight.requires_grad_(True)
        feed(model, opt, grads_for(model, 4))
    assert_equal(*pairs)


class Regular(torch.nn.Module):
    """forward(x): its loss holds the square of each bias, taken on the host and used by backward last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def of_both(folder: Path, step: Callable[[Regular, mt.AdamW, int], None], steps: int, frozen: bool = False,
            **hyper: Any) -> bool:
    """Whether steps with weights in files end in the bits of those with weights in memory."""
    torch.manual_seed(4)
    plain, found = Regular(), []
    for homes in ("disk+weights", "ram"):
        disk = {"nvme": str(folder), "plan": {"homes": homes, "debug": {"disk": TIGHT}}} if homes != "ram" else {}
        model = doors.stream(copy.deepcopy(plain), device="cpu", units=["layers.0", "layers.1", "layers.2"], **disk)
        for layer in model.layers:
            layer.bias.requires_grad_(not frozen)
        opt = mt.AdamW(model.parameters(), lr=0.05, **hyper)
        for number in range(steps):
            step(model, opt, number)
            opt.step()
            opt.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    return all(torch.equal(p, q) for p, q in zip(*found))


def test_writes_past_the_guard_are_not_lost_to_an_update_of_the_unit(tmp_path: Path) -> None:
    def step(model: Regular, opt: mt.AdamW, number: int) -> None:
        model(torch.ones(5, 24)).backward()
        with torch.no_grad():
            scale(model.layers[1].bias, 1.5)

    assert of_both(tmp_path, step, 2, frozen=True)


@pytest.mark.parametrize("in_backward", [False, True])
def test_weights_in_a_graph_of_the_hosts_stay_until_it_was_used(tmp_path: Path, in_backward: bool) -> None:
    def step(model: Regular, opt: mt.AdamW, number: int) -> None:
        regular = sum((layer.bias ** 2).sum() for layer in model.layers)
        (model(torch.full((5, 24), 0.1 * number + 0.2)) + 10 * regular).backward()
        core_of(model).drain()

    assert of_both(tmp_path, step, 4, in_backward=in_backward)


def test_saved_weights_are_those_on_disk(make: Callable[..., Pair], tmp_path: Path) -> None:
    pairs = make("disk+weights", steps=3), make("disk+weights", steps=1), make("ram", steps=3)
    folder = tmp_path / "saved"
    mt.save(*pairs[0], folder)
    assert core_of(pairs[0][0]).host_bytes(PLANES["HI"]) == 0
    mt.load(*pairs[1], folder)
    assert core_of(pairs[1][0]).host_bytes(PLANES["HI"]) == 0
    for pair in pairs:
        feed(*pair, grads_for(pair[0], 8))
    assert_equal(pairs[0], pairs[2])
    assert_equal(pairs[1], pairs[2])
    for pair in pairs[1:]:
        feed(*pair, grads_for(pair[0], 9))
        mt.unstream(pair[0])
    assert all(torch.equal(p, q) for p, q in zip(pairs[1][0].parameters(), pairs[2][0].parameters()))


def test_reports_and_traces_have_the_disk(make: Callable[..., Pair]) -> None:
    model, opt = make("disk", steps=1)
    mt.last_step(model)
    feed(model, opt, grads_for(model, 1))
    core_of(model).drain()
    assert mt.last_step(model).disk_read_bytes >= 10 * 150 * 170
    with mt.trace(model) as trace:
        for step in range(3):
            feed(model, opt, grads_for(model, step))
            core_of(model).drain()
    lane = [s for s in trace.slices() if s.lane == "disk"]
    assert {s.work for s in lane} == {"read", "write"} and {s.unit for s in lane} >= {LAST}
    assert all(a.end <= b.begin for a, b in pairwise(sorted(lane, key=lambda s: s.begin)))
    steps = trace.steps()
    assert steps[1].busy["disk"] > 0 < steps[1].busy["disk update"] and "GB written" in str(steps[1])
    # The last step's updates run behind its end, and of the one before all buffers may be written as late.
    held = TIGHT["buffers"] * TIGHT["buffer_bytes"]
    assert sum(s.disk_written_bytes for s in steps) >= (len(steps) - 1) * 10 * 150 * 170 - held


# ---- what is left behind ----

def test_the_file_has_no_name_and_goes_with_the_model(make: Callable[..., Pair], tmp_path: Path) -> None:
    model, _ = make("disk")
    path, nbytes, direct = core_of(model).disk_file()
    assert os.listdir(tmp_path) == [] and Path(path).parent == tmp_path
    assert doors.scratch_file(path).stat().st_size == nbytes and direct in (True, False)
    assert 10 * sum(p.numel() for p in model.parameters()) <= nbytes <= disk.file_bytes(mt.model.stream.runtime_of(model).room.asked)
    mt.unstream(model)
    assert doors.scratch_file(path) is None


TRAINS = """
    import os, signal, sys, torch
    import megatrain_torch as mt
    model = mt.stream(torch.nn.Linear(64, 64), device="cpu", nvme=sys.argv[1], plan={"homes": "disk"})
    opt = mt.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    opt.step()
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("in the middle of a run")
"""


@pytest.mark.parametrize("how, code", [("ends", 1), ("killed", -signal.SIGKILL)])
def test_nothing_is_left_by_a_process_that_ends(how: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(TRAINS), str(tmp_path), how], capture_output=True,
                          text=True)
    assert done.returncode == code and ("in the middle of a run" in done.stderr) == (how == "ends"), done.stderr
    assert os.listdir(tmp_path) == []


# ---- doors ----

def refused(message: str, **how: Any) -> mt.MegatrainError:
    model = plain_dots(torch.bfloat16, SHAPES)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(mt.MegatrainError, match=message) as found:
        mt.stream(model, device="cpu", **how)
    assert [p.data_ptr() for p in model.parameters()] == before and type(model.layers[0].weight) is torch.nn.Parameter
    return found.value


def test_what_makes_no_sense_is_refused_before_anything_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("give mt.stream the directory", plan={"homes": "disk"})
    refused("No such file or directory", plan={"homes": "disk"}, nvme=str(tmp_path / "none"))
    refused("give a directory", plan={"homes": "disk"}, nvme={"where": str(tmp_path)})
    refused("nvme limit='much' is not a size", nvme={"path": str(tmp_path), "limit": "much"})
    refused("the limit is 1.0 KiB: raise it to", plan={"homes": "disk"}, nvme={"path": str(tmp_path), "limit": "1KiB"})
    refused(r"'tape'; use 'ram', 'vram', 'arrive', 'through', 'disk' or 'disk\+weights'", plan={"homes": "tape"})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    refused(r"need .* there and 4.9 KiB are free: free .*, or name another path", plan={"homes": "disk"},
            nvme=str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_what_host_memory_cannot_hold_goes_to_disk_last_units_first(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEMORY_BYTES", 1000)
    def homes(host: int) -> list[str]:
        model = doors.stream(plain_dots(torch.bfloat16, SHAPES), device="cpu", nvme=str(tmp_path), host=host,
                             plan={"debug": {"disk": TIGHT}})
        found = mt.model.stream.runtime_of(model).room.asked.homes
        mt.unstream(model)
        return list(found)

    everything = refused("does not fit", host=1).changes["host"]
    assert homes(everything) == ["ram"] * 5
    assert homes(everything - 1) == homes(everything - 10 * 150 * 170 + 1000) == ["ram"] * 4 + ["disk"]
    assert homes(everything - 10 * 150 * 170 + 999) == ["ram"] * 3 + ["disk"] * 2
    refused("does not fit", nvme=str(tmp_path), host=4 * 150 * 170)


def test_a_plan_with_a_disk_runs(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
                         vocab_size=128, num_hidden_layers=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    plan = mt.plan(model, tokens=64, seq=32, homes="disk", machine="cpu", nvme={"limit": "1GB"})
    with pytest.raises(mt.MegatrainError, match="the directory, nvme="):
        mt.stream(model, device="cpu", plan=plan)
    least = {"path": str(tmp_path), "limit": plan.disk_bytes}            # is enough, and a byte less is not
    less = mt.plan(model, tokens=64, seq=32, homes="disk", machine="cpu", nvme=least | {"limit": plan.disk_bytes - 1})
    assert "ram" in less.homes.values()
    plan = mt.plan(model, tokens=64, seq=32, homes="disk", machine="cpu", nvme=least)
    mt.stream(model, device="cpu", plan=plan)
    rt = mt.model.stream.runtime_of(model)
    assert rt.homes.on_disk == frozenset(range(len(plan.homes)))
    assert plan.disk_written <= rt.core.disk_file()[1] <= disk.file_bytes(rt.room.asked) == plan.disk_bytes
    opt = mt.AdamW(model.parameters())
    ids = torch.arange(64).view(2, 32)
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    for unit in rt.homes.on_disk:
        rt.core.bring(unit, -1)                  # waits for its writes
    assert 0 < rt.core.stats()["disk_written_bytes"] - plan.disk_written < 1 << 20
    mt.unstream(model)


def test_a_plan_puts_weights_on_disk_where_states_are_not_enough() -> None:
    from transformers import LlamaConfig
    config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=8,
                         vocab_size=8192, num_hidden_layers=8, tie_word_embeddings=False)

    def planned(host: int | None = None, vram: int | str = "2GiB", **how: Any) -> mt.plans.planner.Plan:
        return mt.plan(config, tokens=2048, seq=1024, vram=vram, host=host, machine="h200-128g", micro=1, slots=2,
                       nvme={"limit": "8GiB"}, activations="replay", **how)

    states = planned(homes="disk")
    assert set(states.homes.values()) == {"disk"} and "weights" not in states.disk
    everything = planned(homes="disk+weights")
    assert set(everything.homes.values()) == {"disk+weights"} and "weights" not in everything.host
    assert everything.disk["weights"] == states.host["weights"]
    assert everything.disk_written == states.disk_written + everything.disk["weights"]
    assert everything.seconds > states.seconds
    assert sum(states.host.values()) - sum(everything.host.values()) == states.host["weights"] - disk.FEED_BYTES
    host = sum(states.host.values()) - 1
    some = planned(host, sum(everything.vram.values()))
    assert "disk+weights" in some.homes.values() and sum(some.host.values()) <= host


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    rates = _core.disk_measure(str(tmp_path), 1 << 20, each=1 << 16, depth=4, threads=2)
    assert min(rates[way] for way in ("fresh", "write", "read", "both")) > 0 and rates["direct"] in (True, False)
    assert os.listdir(tmp_path) == []
