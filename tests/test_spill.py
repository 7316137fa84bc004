"""Kept tensors that wait in a file: in a few bays of host memory, and what is said of a file that is no good. That bits
are those of keeping on the device is test_swap.py's.
"""
from __future__ import annotations

import dataclasses
import os
import resource
from pathlib import Path
from typing import Any

import doors
import fusing
import parity
import pytest
import torch
from fusing import padded
from kept import grads_of, once, tiny, twice
from test_fused import FAMILIES
from torch import nn

import megatrain_torch as mt
from megatrain_torch.base.errors import MegatrainError
from megatrain_torch.base.modes import read
from megatrain_torch.model.stream import runtime_of

FULL = 1 << 22                       # MT_EDGE_FULL of csrc/core/context.h
WAYS = [("selective+disk", "fused"), ("saved+disk", "eager"), ("replay+disk", "eager")]
DEEP = FAMILIES["qwen3"]               # of one layer more than there are bays


def test_a_wait_left_out_is_noticed(tmp_path: Path) -> None:
    """FULL: a bay is written while it is being filled. Other gradients come of it, or the file's sum and its bytes
    are of two moments and reading says so. One of five trainings is asked for, since a pace cannot be promised. The
    other waits are left out in tests/c/test_spill.c, where the file dawdles."""
    right = grads_of(tiny("saved", None), twice)

    def noticed() -> bool:
        try:
            found = grads_of(tiny("saved+disk", str(tmp_path), delay_us=3000, skip=FULL), twice)
        except MegatrainError as error:
            return "are not those that were written" in str(error)
        return not all(parity.same_bits(right[n], found[n]) for n in right)

    assert any(noticed() for _ in range(5)), "five trainings without the wait all equal the one on the device"


# ---------------------------------------------------------------- memory, and what is said about it

def test_host_memory_holds_a_few_bays_whatever_the_number_of_windows(tmp_path: Path) -> None:
    model = tiny("saved+disk", str(tmp_path))
    loss = model(**padded(0)).loss
    rt = runtime_of(model)
    bundles = [ref() for ref in rt.swap.out]
    sizes = [sum(-(-nbytes // 512) * 512 for *_, nbytes in b.shapes) for b in bundles]
    assert len(bundles) > 2
    bay = -(-max(sizes) // 4096) * 4096
    assert rt.core.swap_bytes() == (2 * bay, 0) and rt.core.swap_file()[2] == len(bundles) * bay
    assert mt.storage(model).tiers[-1][1] == {"activations": rt.core.swap_file()[1]}
    del bundles
    loss.backward()
    assert rt.core.swap_bytes() == (2 * bay, 0)


def test_reports_and_traces_show_it(tmp_path: Path) -> None:
    model = tiny("saved+disk", str(tmp_path))
    mt.last_step(model)
    once(model)
    report = mt.last_step(model)
    assert report.spill_written_bytes >= report.spill_read_bytes > 0 and "activations on disk" in str(report)
    assert "saved+disk" in mt.explain(model)
    with mt.trace(model) as t:
        for step in range(2):
            model(**padded(step)).loss.backward()
    lane = [s for s in t.slices() if s.lane == "swap disk"]
    assert {s.work for s in lane} == {"read", "write"} and t.steps()[-1].busy["swap disk"] > 0
    reads = [s.unit for s in lane if s.work == "read"]
    layers = [n for n in runtime_of(model).unit_names if "layers" in n]
    assert all(unit in layers for unit in reads)


# ---------------------------------------------------------------- plans

def test_a_plan_is_what_happens(tmp_path: Path) -> None:
    from flat import FLAT
    model = fusing.lm("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=5)()
    asked = {"tokens": 256, "seq": 64, "machine": dataclasses.replace(FLAT, device="cpu"), "compute": "fused",
             "activations": "selective+disk", "micro": 1}
    with pytest.raises(MegatrainError, match=r"activations='selective\+disk': give the directory"):
        mt.plan(model, **asked)
    plan = mt.plan(model, **asked, nvme=str(tmp_path))
    assert set(plan.activations.values()) == {"saved", "selective+disk"}
    model = mt.stream(model, "cpu", plan=plan)
    core = runtime_of(model).core
    assert core.swap_file()[1] == plan.disk["activations"] == plan.disk_written
    ids = torch.randint(90, (4, 64))
    loss = model(input_ids=ids, labels=ids).loss
    assert core.swap_bytes()[0] == pytest.approx(plan.host["activations"], rel=0.03)
    assert core.swap_file()[2] == pytest.approx(plan.disk["activations"] - 5 * 65536, rel=0.03)
    loss.backward()
    assert core.swap_file()[1] == plan.disk["activations"], "the room that was reserved was enough"


def test_a_million_tokens_go_to_device_host_and_disk() -> None:
    from flat import seven
    asked = {"tokens": 1 << 20, "seq": 1 << 20, "machine": "h200-128g,host=120GiB", "states": "8bit-sr", "grads": "none"}
    with pytest.raises(MegatrainError) as refused:
        mt.plan(seven(28), **asked)
    least = refused.value.changes["nvme"]["limit"]
    plan = mt.plan(seven(28), **asked, nvme={"limit": "64GiB"})
    kinds = {m.partition("+")[2] for m in plan.activations.values()}
    assert kinds == {"", "host", "disk"} and least <= plan.disk_bytes <= 64 << 30
    assert plan.disk_written == plan.disk["activations"]
    assert plan.vram_bytes <= plan.machine.vram_bytes and plan.host_bytes <= plan.machine.host_bytes


# ---------------------------------------------------------------- the file is no good

def test_without_a_directory_nothing_is_begun() -> None:
    model = DEEP()
    before = {n: p for n, p in model.named_parameters()}
    for activations in ("saved+disk", {"model.layers.1": "replay+disk"}):
        with pytest.raises(MegatrainError, match=r"windows with '\+disk': give mt.stream the directory"):
            mt.stream(model, "cpu", plan={"activations": activations})
    assert all(type(p) is nn.Parameter and p is before[n] for n, p in model.named_parameters())


@pytest.mark.parametrize("plan", [{"homes": "disk"}, {"activations": "saved+disk", "debug": {"spill": {"bays": 0}}}])
def test_a_file_that_is_refused_leaves_the_model_as_it_was(plan: dict[str, Any], tmp_path: Path) -> None:
    """Room is there, but the process may not write files of any size: known when the file is made, no sooner."""
    model = DEEP().float()
    before = {n: (p, p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(MegatrainError):
            doors.stream(model, "cpu", dtype=torch.bfloat16, nvme=str(tmp_path), plan=plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    after = dict(model.named_parameters())
    assert all(type(p) is nn.Parameter and p is after[n] and p.dtype == torch.float32 and p.data_ptr() == address
               and torch.equal(p, values) for n, (p, address, values) in before.items())
    assert not os.listdir(tmp_path)


def test_a_limit_that_is_reached_is_an_error_in_the_step(tmp_path: Path) -> None:
    model = tiny("saved+disk", {"path": str(tmp_path), "limit": 1 << 16})
    with pytest.raises(MegatrainError, match="the limit is 65536"):
        model(**padded(0))
    model(**{k: v[:, :4] for k, v in padded(0).items()}).loss.backward()


def works(model: nn.Module, right: dict[str, Any]) -> None:
    found = grads_of(model, once)
    assert all(parity.same_bits(right[n], found[n]) for n in right)


@pytest.mark.parametrize("mode, compute", WAYS)
def test_a_read_that_fails_is_an_error_in_the_step_and_the_next_one_works(mode: str, compute: str, tmp_path: Path) -> None:
    right = grads_of(tiny(read(mode).keep, None, compute), once)
    model = tiny(mode, str(tmp_path), compute, sync=True)       # all is written when a window's forward is over
    loss = model(**padded(0)).loss
    path = runtime_of(model).core.swap_file()[0]
    os.truncate(doors.scratch_file(path), 0)
    with pytest.raises(MegatrainError, match=r"unit model.layers.\d: .* could not be read from the file: " + path):
        loss.backward()
    del loss
    works(model, right)


@pytest.mark.parametrize("mode, compute", WAYS[:2])
def test_a_write_that_fails_is_an_error_in_the_step_and_the_next_one_works(mode: str, compute: str, tmp_path: Path) -> None:
    right = grads_of(tiny(read(mode).keep, None, compute), once)
    model = tiny(mode, str(tmp_path), compute, sync=True)
    works(model, right)                                          # the file has its room
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(MegatrainError, match=r"unit model.layers.0: .* written to the file: .* File too large"):
            model(**padded(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    works(model, right)
