"""mt.plan for several GPUs and machines: with one of each all is as it was; what is exchanged, shared and counted."""
from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import FLAT, GIB, seven, small
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

import megatrain_torch as mt
from megatrain_torch.model.stream import runtime_of
from megatrain_torch.plans import doctor, tally
from megatrain_torch.plans.machine import MACHINES, SHARED_ADAM
from megatrain_torch.plans.shapes import shapes_of

# ---- one GPU -------------------------------------------------------------------------------------

STORED = Path(__file__).with_name("plans_of_one_gpu.json")
CASES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "7B x 12": (seven(12), dict(tokens=32768, seq=1024, machine=FLAT)),
    "all in RAM": (seven(12), dict(tokens=32768, seq=1024, machine=FLAT, homes="ram")),
    "several micro-batches": (small(8), dict(tokens=65536, seq=1024, machine=FLAT, micro=4, homes="ram")),
    "many of them, eager": (small(8), dict(tokens=65536, seq=1024, machine=FLAT, micro=16, compute="eager")),
    "gradients kept nowhere": (seven(8), dict(tokens=16384, seq=1024, machine=FLAT, grads="none")),
    "moments of 8 bits": (seven(20), dict(tokens=16384, seq=1024, machine=FLAT, states="8bit")),
    "a disk": (small(16), dict(tokens=8192, seq=1024, machine=FLAT, host="5GiB", nvme={"limit": "100GiB"})),
    "through the device": (small(8), dict(tokens=8192, seq=1024, machine=FLAT, homes="through")),
    "states that arrive": (small(8), dict(tokens=8192, seq=1024, machine=FLAT, homes="arrive")),
    "activations in host memory": (small(8), dict(tokens=65536, seq=1024, machine=FLAT, micro=1,
                                                  activations="saved+host")),
}


def planned(name: str, **more: Any) -> mt.Plan:
    model, asked = CASES[name]
    return mt.plan(model, **asked | more)


def told(plan: mt.Plan) -> dict[str, Any]:
    """All that a plan chose and predicts, to the bit."""
    return {"seconds": plan.seconds.hex(), "forward_s": plan.forward_s.hex(), "micro": plan.micro,
            "slots": plan.slots, "vram": plan.vram, "host": plan.host, "disk": plan.disk,
            "homes": Counter(plan.homes.values()), "activations": Counter(plan.activations.values()),
            "busy": {lane: s.hex() for lane, s in plan.busy.items() if s},
            "idle": {lane: s.hex() for lane, s in plan.idle.items()}}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_of_one_gpu_is_the_stored_one(name: str) -> None:
    assert told(planned(name)) == json.loads(STORED.read_text())[name]


def test_one_gpu_of_one_machine_is_no_special_case() -> None:
    assert planned("all in RAM", gpus=1, machines=1) == planned("all in RAM")
    assert "GPUs" not in str(planned("all in RAM"))


# ---- several -------------------------------------------------------------------------------------

LINKED = dataclasses.replace(FLAT, exchange_gbps=100.0, network_gbps=10.0, lost_gbps=50.0, shared_gparams=2.0, communicator_bytes=0)
ASKED = dict(tokens=32768, seq=1024, homes="ram")
WIDE = shapes_of(seven(12))("fp32")


@pytest.mark.parametrize("gpus, machines", [(2, 1), (8, 1), (1, 2), (8, 16)])
def test_a_machine_has_one_store_and_its_part_of_the_states(gpus: int, machines: int) -> None:
    one = mt.plan(seven(12), machine=FLAT, **ASKED).host
    linked = dataclasses.replace(LINKED, host_bytes=10**12, vram_bytes=40 * GIB, communicator_bytes=GIB)
    plan = mt.plan(seven(12), machine=linked, gpus=gpus, machines=machines, **ASKED)
    host, pairs = plan.host, 2 * (machines - 1) * tally.PAIR_BYTES
    nccl = GIB + pairs + (gpus > 2) * tally.MORE_BYTES
    assert plan.vram["context, libraries"] == LINKED.vram_overhead_bytes + nccl
    assert host["weights"] == one["weights"]
    for plane in ("masters", "moments", "gradients"):
        assert host[plane] == -(-one[plane] // machines)
    assert host.get("sums", 0) == (-(-2 * one["gradients"] // machines) if plan.micro > 1 else 0), "in fp32, of several"
    assert host["Python, torch, driver"] == gpus * GIB


def test_further_micro_batches_cost_many_gpus_little() -> None:
    machine = dataclasses.replace(LINKED, host_bytes=10**12, host_gbps=400.0, vram_bytes=80 * GIB)
    seconds = {gpus: [mt.plan(seven(12), machine=machine, gpus=gpus, micro=micro, **ASKED).seconds for micro in (1, 4)]
               for gpus in (2, 8)}
    shares = [one / four for one, four in seconds.values()]
    assert min(shares) > 0.75 and max(shares) - min(shares) < 0.05


def test_what_a_gpu_keeps_in_host_memory_is_there_for_each() -> None:
    host = {g: planned("activations in host memory", gpus=g, machine=dataclasses.replace(LINKED, host_bytes=10**12)).host
            for g in (2, 4)}
    assert host[2]["activations"] > 0 and host[4]["activations"] == 2 * host[2]["activations"]
    fits = planned("activations in host memory", gpus=4, machine=dataclasses.replace(LINKED, host_bytes=100 * GIB))
    assert fits.host_bytes <= 100 * GIB


def test_more_of_what_is_shared_is_never_slower() -> None:
    def seconds(gpus: int, machines: int, **rates: float) -> float:
        machine = dataclasses.replace(LINKED, host_bytes=10**12, **rates)
        return mt.plan(seven(12), machine=machine, gpus=gpus, machines=machines, tokens=8192, seq=1024).seconds

    for rate, low, gpus, machines in (("exchange_gbps", 5.0, 4, 1), ("network_gbps", 1.0, 2, 2), ("lost_gbps", 5.0, 4, 1),
                                      ("host_gbps", 40.0, 4, 1)):
        slow, fast = seconds(gpus, machines, **{rate: low}), seconds(gpus, machines, **{rate: 1000.0})
        assert fast < slow, rate


def test_many_gpus_share_the_hosts_memory() -> None:
    """Each of 8 fetches whole weights twice a step: 16 times their bytes, and more, go through one host's memory."""
    machine = dataclasses.replace(LINKED, host_bytes=10**12, host_gbps=60.0)
    plan = mt.plan(seven(12), machine=machine, gpus=8, delivery="whole", **ASKED | {"tokens": 4096})
    assert plan.busy["host memory"] > 8 * plan.host["weights"] / 60e9
    assert plan.seconds >= plan.busy["host memory"] and plan.bound == "host memory"
    assert "host memory" not in mt.plan(seven(12), machine=machine, **ASKED).busy


def test_without_links_gpus_exchange_over_those_to_the_host() -> None:
    boxes = {links: mt.plan(small(8), machine="rtx4090,host=500GiB" + links, gpus=4, tokens=16384, seq=1024, homes="ram")
             for links in ("", ",exchange_gbps=100")}
    assert boxes[""].seconds > boxes[",exchange_gbps=100"].seconds
    assert boxes[""].busy["exchange"] > 4 * boxes[",exchange_gbps=100"].busy["exchange"]


@pytest.mark.parametrize("asked, says", [
    ({"homes": {"lm_head": "disk+weights"}, "machines": 2}, "homes='disk+weights', with 2 machines of 2 GPUs"),
    ({"grads": "none"}, "grads='none', with 2 GPUs"), ({"gpus": 0}, "gpus"), ({"machines": 2.0}, "machines"),
])
def test_what_several_gpus_cannot_have_yet_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(mt.MegatrainError, match=re.escape(says)):
        mt.plan(small(2), **{"tokens": 4096, "seq": 1024, "machine": LINKED, "gpus": 2} | asked)


def test_units_at_home_on_several_devices_have_their_states_there_in_parts() -> None:
    asked = dict(tokens=16384, seq=1024, machine=dataclasses.replace(LINKED, vram_bytes=40 * GIB), gpus=2)
    found, one = mt.plan(small(8), homes="vram", **asked), mt.plan(small(8), homes="vram", **asked | {"gpus": 1})
    assert found.vram["at home: weights"] == one.vram["at home: weights"]
    assert found.vram["at home: moments"] == -(-one.vram["at home: moments"] // 2)
    assert found.vram.get("at home: sums", 0) == one.vram.get("at home: sums", 0) == 0, "one micro-batch"
    assert not found.host.get("weights") and not one.host.get("weights"), "they come from GPU to GPU"
    assert found.busy["device update"] < one.busy["device update"]


def test_a_refusal_of_several_offers_nothing_they_cannot_have() -> None:
    with pytest.raises(mt.MegatrainError) as found:
        mt.plan(seven(33), tokens=8192, seq=1024, machine=dataclasses.replace(LINKED, vram_bytes=40 * GIB), gpus=2)
    assert "grads" not in found.value.changes and not any("grads" in way.changes for way in found.value.ways)
    for way in (found.value.ways[0], next(way for way in found.value.ways if "nvme" in way.changes)):
        again = mt.plan(seven(33), **{"tokens": 8192, "seq": 1024, "gpus": 2, "machine": dataclasses.replace(
            LINKED, vram_bytes=40 * GIB)} | way.changes)
        assert again.tokens_per_second >= way.tokens_per_second > 0.5 * again.tokens_per_second


@pytest.mark.parametrize("gpus, machines", [(2, 1), (4, 2)])
def test_each_of_several_gpus_has_its_part_of_states_in_a_file(gpus: int, machines: int) -> None:
    asked = dict(tokens=16384, seq=1024, machine=dataclasses.replace(LINKED, disk_both_gbps=1.0), homes="disk",
                 nvme={"limit": "100GiB"})
    one, many = mt.plan(small(8), **asked), mt.plan(small(8), **asked, gpus=gpus, machines=machines)
    for what in ("masters", "moments"):
        assert many.disk[what] == pytest.approx(one.disk[what] / machines, abs=100) and what not in many.host
    assert many.host["buffers of the disk"] == gpus * one.host["buffers of the disk"]
    assert many.busy["disk"] == pytest.approx(one.busy["disk"] / machines), "a machine's drive is all its ranks'"
    half = sum(many.disk.values()) // 2
    less = mt.plan(small(8), **asked | {"nvme": {"limit": half}}, gpus=gpus, machines=machines)
    assert half // 2 < sum(less.disk.values()) <= half
    kept = [mt.plan(small(8), **asked | {"activations": "saved+disk", "homes": "ram", "micro": 1}, gpus=n) for n in (1, 2)]
    assert kept[1].disk["activations"] == 2 * kept[0].disk["activations"] > 0


def test_each_of_several_gpus_has_its_part_of_weights_in_a_file() -> None:
    asked = dict(tokens=16384, seq=1024, machine=dataclasses.replace(LINKED, disk_both_gbps=1.0), homes="disk+weights",
                 nvme={"limit": "100GiB"})
    one, two = mt.plan(small(8), **asked), mt.plan(small(8), **asked, gpus=2)
    assert "weights" not in two.host and two.disk["weights"] == one.disk["weights"]
    assert two.busy["disk"] == pytest.approx(one.busy["disk"], rel=0.01), "a machine's drive is all its ranks'"
    assert two.host["buffers of the disk"] == 2 * one.host["buffers of the disk"]
    short = dataclasses.replace(LINKED, disk_both_gbps=1.0, host_bytes=16 * GIB, vram_bytes=17 * GIB)
    found = mt.plan(seven(12), tokens=16384, seq=1024, machine=short, gpus=2, nvme={"limit": "100GiB"})
    assert "disk+weights" in found.homes.values() and found.host_bytes <= short.host_bytes
    with pytest.raises(mt.MegatrainError):
        mt.plan(seven(12), tokens=16384, seq=1024, machine=short, gpus=2, nvme={"limit": "100GiB"}, homes="disk")


# ---- weights in shards ---------------------------------------------------------------------------

FETCHED = dict(tokens=2048, seq=1024, homes="ram", activations="replay", micro=1, slots=12)      # most of a step is fetches
NARROW = dataclasses.replace(LINKED, vram_bytes=20 * GIB, host_bytes=200 * GIB, host_gbps=400.0,
                             adam_gparams=((1, 50.0),), shared_gparams=50.0)


def test_each_gpu_fetches_its_part_and_is_given_the_others() -> None:
    whole, shards = (mt.plan(seven(12), machine=NARROW, gpus=4, delivery=d, **FETCHED) for d in ("whole", "shards"))
    assert 0.25 <= shards.busy["h2d"] / whole.busy["h2d"] < 0.35, "slower beside the host's updates, and more of it is"
    assert shards.seconds < whole.seconds
    given = sum(u.weights for u in WIDE.units) * 3 / 4 / 100e9           # once: slots keep them for backward
    assert shards.busy["exchange"] - whole.busy["exchange"] == pytest.approx(given)
    assert shards.vram == whole.vram and shards.host == whole.host
    assert "weights in shards" in str(shards) and "shards" not in str(whole)


def test_shards_are_chosen_where_they_are_faster_and_links_are_known() -> None:
    found = mt.plan(seven(12), machine=NARROW, gpus=4, **FETCHED)
    assert found == mt.plan(seven(12), machine=NARROW, gpus=4, delivery="shards", **FETCHED)
    for machine, gpus in ((dataclasses.replace(NARROW, exchange_gbps=0.0), 4), (NARROW, 1),
                          (dataclasses.replace(NARROW, exchange_gbps=5.0), 4)):
        assert mt.plan(seven(12), machine=machine, gpus=gpus, **FETCHED).delivery == "whole"
    many = mt.plan(seven(12), machine=NARROW, gpus=4, **FETCHED | {"tokens": 16384, "micro": None})
    assert many.delivery == "whole", "compute hides whole fetches"


def test_one_gpu_of_a_machine_has_nobody_to_share_with() -> None:
    with pytest.raises(mt.MegatrainError, match="delivery='shards', with 2 machines of 1 GPU"):
        mt.plan(small(2), machine=LINKED, machines=2, delivery="shards", **ASKED)
    with pytest.raises(mt.MegatrainError, match="delivery='shards', with 1 GPU"):
        mt.stream(torch.nn.Linear(2, 2), "cpu", plan={"delivery": "shards"})
    with pytest.raises(mt.MegatrainError, match="delivery='halves': use 'whole' or 'shards'"):
        mt.stream(torch.nn.Linear(2, 2), "cpu", plan={"delivery": "halves"})


# ---- what was measured ---------------------------------------------------------------------------

def test_two_h200_lose_little_to_what_they_exchange() -> None:
    """Measured: products beside an exchange are slower by 1 to 5 %; updates of 5.75 B parameters take 0.8 s of the host of one
    GPU, and 1 s of that of several."""
    plans = {g: mt.plan(seven(20), machine="h200-128g,host=252GiB", gpus=g, **ASKED) for g in (1, 2)}
    assert plans[2].tokens_per_second == pytest.approx(2 * plans[1].tokens_per_second, rel=0.15)
    alone = 5.75e9 / MACHINES["h200-128g"].adam_rate()
    for g, plan in plans.items():            # beside more copies, or fewer
        assert 1.0 < plan.busy["host update"] * (1, SHARED_ADAM)[g > 1] / alone < 1.2
    compute = [plans[g].busy["compute"] for g in (1, 2)]
    assert 1.01 < compute[1] / compute[0] < 1.06
    assert plans[2].busy["h2d"] == pytest.approx(2 * plans[2].host["weights"] / 50e9, rel=0.2)


def test_new_weights_of_units_at_home_on_two_h200_hide_behind_the_forward() -> None:
    """Each copies half of a unit from the other GPU, and none of it to the host."""
    asked = ASKED | {"homes": None, "machine": "h200-128g,host=252GiB", "gpus": 2}
    plan, short = mt.plan(seven(20), **asked), mt.plan(seven(20), **asked | {"tokens": 8192})
    assert plan.tokens_per_second > 36_000 and plan.idle.get("through", 0.0) < 0.015 * plan.seconds
    one = mt.plan(seven(20), **asked | {"tokens": 8192, "gpus": 1})
    assert short.tokens_per_second > 0.88 * 2 * one.tokens_per_second
    assert plan.busy.get("through", 0.0) == 0.0


# ---- as text -------------------------------------------------------------------------------------

def test_a_plan_says_how_many_gpus_it_is_for() -> None:
    plan = mt.plan(small(4), tokens=8192, seq=1024, machine=LINKED, gpus=4, machines=2)
    said = str(plan)
    assert plan.tokens_per_second == 8 * 8192 / plan.seconds
    assert "2 machines of 4 GPUs, each with 8,192 tokens a step" in said and "tokens/s in all" in said
    assert "device memory of a GPU" in said and "host memory of a machine" in said and "\nexchange " in said
    assert "2 machines of 4 GPUs" in plan._repr_html_()


def test_a_plan_says_what_the_network_has_to_carry() -> None:
    def planned_with(gbps: float) -> mt.Plan:
        return mt.plan(small(16), machine=dataclasses.replace(LINKED, network_gbps=gbps), tokens=32768, seq=1024, gpus=2,
                       machines=2)

    needed = float(re.search(r"between machines: ([\d.]+) GB/s from each hide .*; 10 are stated", str(planned_with(10.0)))[1])
    waits = [plan.idle.get("network", 0.0) / plan.seconds for plan in map(planned_with, (needed / 3, 1.5 * needed))]
    assert waits[0] > 0.2 and waits[1] < 0.1, "a third of it, and half as much again"
    assert "between machines" not in str(planned("all in RAM"))


def test_explain_says_how_many_gpus_a_model_was_planned_for() -> None:
    model = mt.stream(LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                                   num_attention_heads=2, vocab_size=64)), "cpu", vram="2GiB")
    mt.AdamW(model.parameters())
    ids = torch.ones(2, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    planning = runtime_of(model).planning
    assert "planned for 16 tokens a step" in mt.explain(model)
    planning.plan = dataclasses.replace(planning.plan, gpus=2)
    assert "planned for 2 GPUs, each with 16 tokens a step" in mt.explain(model)


@pytest.fixture
def command(command: Callable, tmp_path: Path) -> Callable[..., tuple]:
    small(3).save_pretrained(tmp_path / "model")
    return lambda verb, *words: command(verb, *([tmp_path / "model"] if verb == "plan" else []), *words)


PLAN = ("plan", "--tokens", "8192", "--seq", "1024", "--machine", "h200-128g")


def test_the_command_plans_for_several(command: Callable) -> None:
    status, out, _ = command(*PLAN, "--gpus", "2", "--machines", "2")
    plan = mt.plan(small(3), tokens=8192, seq=1024, machine="h200-128g", gpus=2, machines=2)
    assert (status, out) == (0, f"{plan}\n")
    found = json.loads(command(*PLAN, "--gpus", "2", "--json")[1])
    assert (found["gpus"], found["machines"]) == (2, 1)
    status, _, said = command(*PLAN, "--gpus", "2", "--host", "3GiB")
    assert status == 1 and "lacks" in said
    for flag in ("--gpus", "--machines"):
        assert command(*PLAN, flag, "0")[::2] == (1, f"megatrain: {flag} 0: a whole number, at least 1, is needed\n")


# ---- measuring -----------------------------------------------------------------------------------

def test_doctor_measures_what_processes_have_of_each_other(command: Callable, monkeypatch: pytest.MonkeyPatch,
                                                           tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "CPU", doctor.CPU._replace(parameters=100_000, copy_bytes=2**20, least_s=0.001))
    status, out, err = command("doctor", "--device", "cpu", "--gpus", "2")
    kept = mt.Machine.parse(str(tmp_path / "kept" / "machine.json"))
    assert status == 0 and "links between 2 processes" in err and f"{kept.whole_gbps:.4g}" in out
    assert min(kept.whole_gbps, kept.host_gbps, kept.exchange_gbps, kept.lost_gbps, kept.shared_gparams) > 0
    assert kept.communicator_bytes == 0, "the CPU device has no NCCL"
    assert mt.Machine.parse(f"{tmp_path}/kept/machine.json,network_gbps=100").network_gbps == 100
    assert mt.plan(small(1), tokens=256, seq=64, machine="cpu", gpus=2).machine.exchange_gbps == kept.exchange_gbps


def test_a_process_that_fails_ends_the_others_with_what_it_said() -> None:
    began = time.monotonic()
    with pytest.raises(mt.MegatrainError, match=r"one of 2 processes failed; --gpus 1 leaves them out. It said: .*no_such"):
        doctor.measure_links("no_such_device", 2)
    assert time.monotonic() - began < doctor.LIMIT_S / 4


@pytest.mark.parametrize("asked", ["0", "-2"])
def test_a_number_of_gpus_that_is_none_is_refused(command: Callable, asked: str) -> None:
    assert f"--gpus {asked}" in command("doctor", "--device", "cpu", "--gpus", asked)[2]
