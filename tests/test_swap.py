"""Kept tensors that wait in host memory: the same bits as on the device, whatever the graph is used for.

The control of each run is the same training with the same amount kept on the device.
"""
from __future__ import annotations

import dataclasses
import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import edges
import fusing
import kept
import parity
import pytest
import torch
from edges import Scenario
from fusing import padded
from kept import LINKS, crossed, grads_of, in_part, on_device, overlap_off, same, tiny, twice, waiting
from situations import batch, lm_loss, made
from test_fused import FAMILIES
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.base.errors import MegatrainError
from megatrain_torch.base.modes import DISK, HOST, MODES, read
from megatrain_torch.model.stream import runtime_of

LEFT = 1 << 17                       # MT_EDGE_LEFT of csrc/core/context.h
FUSED = [("qwen3", mode) for mode in HOST] + [("gemma3", "saved+host")]      # norms of q and k; behind both halves too


# ---------------------------------------------------------------- fused layers

# Every second one, and each on disk; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("family, mode", [
    *(pytest.param(*one, marks=parity.LONG if i % 2 else ()) for i, one in enumerate(FUSED)), *(("qwen3", m) for m in DISK)])
def test_fused_layers_compute_the_same_bits(family: str, mode: str, tmp_path: Path) -> None:
    disk = {"nvme": str(tmp_path), **kept.FEW} if mode in DISK else {}
    found = fusing.fused(FAMILIES[family], padded, mode, {"delay_us": 50 if disk else 100, **disk})
    assert same(on_device(family, read(mode).keep), found)
    assert not os.listdir(tmp_path), "the file goes with the streamed model"


def test_a_mixture_of_experts_does_too() -> None:
    build = fusing.lm("qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    for keep in ("saved", "attention"):
        assert same(fusing.fused(build, padded, keep), fusing.fused(build, padded, f"{keep}+host"))


@pytest.mark.parametrize("keep", ["attention", "selective"])
def test_attentions_output_alone_gives_what_all_that_is_kept_gives(keep: str) -> None:
    """Products are made again by the same code on the same numbers."""
    assert same(on_device("qwen3", "saved"), on_device("qwen3", keep))


def test_a_wait_left_out_is_noticed() -> None:
    """LEFT: the sources are freed, and others write there, while they are copied. On the CPU device COMPUTED and ROOM
    change nothing, since compute is never behind, and without BACK a copy would write into freed memory: those are
    seen in tests/c/test_swap.c and gpu/test_acts_on_gpu.py."""
    right = on_device("qwen3", "saved")
    assert not all(same(right, fusing.fused(FAMILIES["qwen3"], padded, "saved+host", {
        "delay_us": 3000, "seed": seed, "skip": LEFT})) for seed in range(4))


# ---------------------------------------------------------------- the model's own code

@pytest.mark.parametrize("wander", [False, True])
@pytest.mark.parametrize("mode", ["saved+host", "replay+host", "saved+disk", "replay+disk"])
def test_own_code_computes_the_same_bits_in_any_order(mode: str, wander: bool, tmp_path: Path) -> None:
    right = overlap_off(Scenario(read(mode).keep, wander=wander, accumulate=2, steps=2))
    disk = {"nvme": str(tmp_path), **kept.FEW} if mode in DISK else {}
    run = edges.train(Scenario(mode, wander=wander, accumulate=2, steps=2), delay_us=200, **disk)
    assert edges.difference(right, run) is None


def test_a_forward_that_writes_into_its_input_keeps_its_activations_on_the_host() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x.relu_()) * 2

    def train(mode: str) -> tuple[Tensor, str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), *(Writes() for _ in range(3)))
        model = mt.stream(model, "cpu", plan={"activations": mode}, units=["0", "1", "2", "3"])
        for _ in range(2):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
            model(x).square().sum().backward()
        return model[0].weight.grad.clone(), runtime_of(model).windows[1].mode

    (right, _), (other, mode) = train("saved"), train("replay+host")
    assert torch.equal(right, other) and mode == "saved+host"


# ---------------------------------------------------------------- graphs

WAYS = [("selective+host", "fused"), ("replay+host", "fused"), ("saved+host", "eager"), ("replay+host", "eager")]
FILES = [("selective+disk", "fused"), ("saved+disk", "eager"), ("replay+disk", "eager")]
LINKED = [(mode, "fused") for mode in ("linked", "linked+host", "linked+disk")]
# Of each way to keep each way through, some with MEGATRAIN_FULL alone.
THROUGH = [*((*way, twice) for way in WAYS), (*WAYS[0], crossed), (*WAYS[0], in_part), (*WAYS[2], crossed), (*WAYS[3], in_part),
           (*FILES[0], twice), (*FILES[1], crossed), (*FILES[2], twice), (*FILES[0], in_part),
           *(pytest.param(*way, go, marks=() if (i + j) % 3 == 0 else parity.LONG)
             for i, way in enumerate(LINKED) for j, go in enumerate([twice, crossed, in_part]))]


@functools.cache
def kept_on_device(keep: str, compute: str, build: Callable[[], nn.Module] | None, go: Callable[[nn.Module], None]
                   ) -> dict[str, Tensor]:
    return grads_of(tiny(keep, None, compute, build), go)


@pytest.mark.parametrize("mode, compute, go", THROUGH)
def test_other_ways_through_the_graph(mode: str, compute: str, go: Callable[[nn.Module], None], tmp_path: Path) -> None:
    linked = mode.startswith("linked")
    right = kept_on_device("attention" if linked else read(mode).keep, compute, LINKS if linked else None, go)
    model = tiny(mode, tmp_path, compute, delay_us=50)
    for _ in range(2):
        found = grads_of(model, go)
        assert all(parity.same_bits(right[n], found[n]) for n in right)
    kept.once(model)
    gc.collect()
    assert waiting(model) == (0, 0), "host memory and the file have room again where a graph is through"


@pytest.mark.parametrize("mode, compute", [*WAYS, FILES[0], LINKED[1]])
def test_a_dropped_graph_gives_its_memory_back(mode: str, compute: str, tmp_path: Path) -> None:
    model = tiny(mode, tmp_path, compute, delay_us=100)
    loss = model(**padded(0)).loss
    core, (mapped, busy) = runtime_of(model).core, runtime_of(model).core.swap_bytes()
    assert (core.swap_file()[2] if "disk" in mode else busy) > 0
    del loss
    kept.once(model)
    model(**padded(1)).loss.backward()
    assert waiting(model) == (0, 0) and core.swap_bytes()[0] == mapped, "the next pass takes the same bays"


@pytest.mark.parametrize("mode", ["selective+host", "selective+disk"])
def test_a_graph_may_outlive_the_streamed_model(mode: str, tmp_path: Path) -> None:
    model = tiny(mode, tmp_path, delay_us=100)
    loss = model(**padded(0)).loss
    mt.unstream(model)
    assert not os.listdir(tmp_path)
    del loss
    gc.collect()


@pytest.mark.parametrize("mode", ["saved+host", "linked"])
def test_an_update_between_forward_and_backward_is_noticed(mode: str) -> None:
    model = tiny(mode)
    opt = mt.AdamW(model.parameters(), lr=1e-3)
    kept.once(model)
    late = model(**padded(1)).loss
    opt.step()
    with pytest.raises(RuntimeError, match="call backward\\(\\) before step\\(\\)"):
        late.backward()


@pytest.mark.parametrize("mode, compute", WAYS)
def test_an_in_place_write_to_what_waits_is_noticed(mode: str, compute: str) -> None:
    model = tiny(mode, compute=compute)
    seen: list[Tensor] = []
    model.model.layers[1].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    loss = model(**padded(0)).loss
    with torch.no_grad():
        seen[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


# ---------------------------------------------------------------- memory

@pytest.mark.parametrize("mode, compute", WAYS)
def test_the_device_gives_up_all_but_the_last_bundle(mode: str, compute: str) -> None:
    model = tiny(mode, compute=compute)
    loss = model(**padded(0)).loss
    swap = runtime_of(model).swap
    bundles = [ref() for ref in swap.out]
    assert len(bundles) >= 2
    assert [bool(b.sources) for b in bundles] == [False] * (len(bundles) - 1) + [True]
    assert not any(b.landed for b in bundles)
    stats = runtime_of(model).core.stats()
    last = sum(nbytes for *_, nbytes in bundles[-1].shapes)
    del bundles
    loss.backward()
    after = runtime_of(model).core.stats()
    assert stats["back_bytes"] == 0 and after["back_bytes"] == stats["out_bytes"] - last, "the last one never left"


def test_bundles_come_back_one_window_ahead_and_on_time() -> None:
    model = tiny("saved+host", delay_us=50)
    with mt.trace(model) as t:
        for step in range(3):
            model(**padded(step)).loss.backward()
    lanes: dict[str, list[Any]] = {}
    for s in t.slices():
        lanes.setdefault(s.lane, []).append(s)
    layers = [n for n in runtime_of(model).unit_names if "layers" in n]
    assert [s.unit for s in lanes["swap out"]] == layers * 3
    assert [s.unit for s in lanes["swap back"]] == layers[-2::-1] * 3
    assert all(s.work == "swap" and s.nbytes > 0 for s in lanes["swap out"] + lanes["swap back"])
    backwards = {}
    for s in lanes["compute"]:
        if s.work == "backward":
            backwards.setdefault(s.unit, []).append(s)
    for s in lanes["swap back"]:
        after = layers[layers.index(s.unit) + 1]
        assert any(b.begin < s.begin for b in backwards[after]), f"{s.unit} comes back when {after}'s backward begins"
        assert any(s.end <= b.end for b in backwards[s.unit]), f"{s.unit}'s backward has it"


def test_what_is_shared_by_windows_stays_on_the_device() -> None:
    """Angles are given to each layer: they would be copied once for each, and freed by none."""
    model = tiny("saved+host", compute="eager")
    loss = model(**padded(0)).loss
    angles = padded(0)["input_ids"].shape[1] * model.config.head_dim
    layers = [b for ref in runtime_of(model).swap.out if "layers" in runtime_of(model).unit_names[(b := ref()).unit]]
    assert layers and not any(shape.numel() == angles for b in layers for shape, *_ in b.shapes)
    loss.backward()


# ---------------------------------------------------------------- what is said about it

def test_explain_and_last_step_show_it() -> None:
    model = tiny("selective+host")
    mt.last_step(model)
    model(**padded(0)).loss.backward()
    assert "selective+host" in mt.explain(model)
    report = mt.last_step(model)
    assert report.out_bytes > report.back_bytes > 0
    with mt.trace(model) as t:
        for step in range(2):
            model(**padded(step)).loss.backward()
    assert "activations out" in str(t.steps()[-1]) and t.steps()[-1].busy["swap back"] > 0


def test_names_that_no_window_has_are_refused() -> None:
    with pytest.raises(MegatrainError, match=r"'model\.layer\.1', and there is no such window; windows: .*model\.layers\.1"):
        tiny({"model.layers.0": "replay+host", "model.layer.1": "replay+host"})
    with pytest.raises(MegatrainError, match=r"'model\.layer\.1', and there is no such unit; units: .*model\.layers\.1"):
        mt.stream(FAMILIES["llama"](), device="cpu", plan={"homes": {"model.layer.1": "vram"}})


def test_modes_are_read_as_they_are_written() -> None:
    assert all(str(read(m)) == m for m in MODES)


def test_layers_and_their_order_need_not_be_alike() -> None:
    """Some windows on the host, others not; tests of own code have what a template has not."""
    model = made()
    names = [n for n, m in model.named_modules() if n.startswith("layers.") and n.count(".") == 1]
    modes = dict(zip(names, ["saved+host", "replay", "replay+host", "saved", "saved+host"]))

    def train(activations: Any) -> dict[str, Tensor]:
        parity.seed()
        m = doors.stream(made(), "cpu", plan={"activations": activations, "slots": 2, "debug": {"delay_us": 100}})
        for step in range(2):
            lm_loss(m, batch(step)).backward()
        return {n: parity.frozen(p.grad) for n, p in m.named_parameters()}

    right, found = train("saved"), train(modes)
    assert all(parity.same_bits(right[n], found[n]) for n in right)


# ---------------------------------------------------------------- plans

def test_a_plan_counts_what_waits_in_host_memory() -> None:
    from flat import FLAT
    model = fusing.lm("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4)()
    plan = mt.plan(model, tokens=512, seq=64, machine=dataclasses.replace(FLAT, device="cpu"), compute="fused",
                   activations="selective+host", micro=1)
    assert set(plan.activations.values()) == {"saved", "selective+host"} and "activations" in str(plan)
    model = mt.stream(model, "cpu", plan=plan)
    ids = torch.randint(90, (8, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    assert runtime_of(model).core.swap_bytes()[0] == pytest.approx(plan.host["activations"], rel=0.03)


def test_a_long_context_is_planned_with_its_boundaries_on_the_device() -> None:
    from flat import seven
    plan = mt.plan(seven(28), tokens=1 << 18, seq=1 << 18, machine="h200-128g,host=200GiB")
    assert any(m in ("attention+host", "selective+host") for m in plan.activations.values())
