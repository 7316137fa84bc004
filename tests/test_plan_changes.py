"""What to change where no plan fits: the search, its two languages, and the commands around it."""
from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import FLAT, GIB, small
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_torch as mt
from megatrain_torch.base.limits import parse_bytes, show_size
from megatrain_torch.plans import changes, doctor
from megatrain_torch.plans.machine import MACHINES, described_gpu

TIGHT = {"vram": "2GiB", "host": "3GiB"}        # of small(12): 222 M parameters, 3.1 GB with their states


def refused(config: LlamaConfig | torch.nn.Module, **asked: Any) -> mt.MegatrainError:
    with pytest.raises(mt.MegatrainError, match="does not fit") as why:
        mt.plan(config, **{"tokens": 8192, "seq": 1024, "machine": FLAT} | asked)
    return why.value


@functools.cache
def tight() -> mt.MegatrainError:
    return refused(small(12), **TIGHT)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small(12).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# ---- the search

@pytest.mark.parametrize("asked", [
    {"host": "2GiB"}, {"host": "1700MiB"}, {"host": "2GiB", "grads": "none"},
    {"vram": "1500MiB", "micro": 1}, {"homes": "vram"}, {"vram": "1500MiB", "activations": "saved"}])
def test_each_way_fits_and_is_as_fast_as_it_says(asked: dict) -> None:
    asked = {"vram": "2GiB"} | asked
    why = refused(small(12), **asked)
    rates = [way.tokens_per_second for way in why.ways]
    assert rates and rates == sorted(rates, reverse=True)
    for way in why.ways[:changes.SHOWN]:
        plan = mt.plan(small(12), **{"tokens": 8192, "seq": 1024, "machine": FLAT} | asked | way.changes)
        assert plan.tokens_per_second >= 0.999 * way.tokens_per_second, way
        assert f"{way.tokens_per_second:,.0f} tokens/s" in str(why)


def test_changes_that_fit_only_together_are_found() -> None:
    why = refused(small(12), host="1700MiB", vram="2GiB")
    assert not {"states", "grads"} & set(why.changes), "neither alone"
    assert {"states": "8bit-sr", "grads": "none"} in [way.changes for way in why.ways]
    assert all(len(way.changes) <= changes.TOGETHER for way in why.ways)


def test_a_way_is_told_once() -> None:
    """Gradients that are kept nowhere take the number of micro-batches with them, which is a change by itself too."""
    ways = [way.changes for way in refused(small(12), host="1700MiB", vram="2GiB", micro=2).ways]
    assert {"states": "8bit-sr", "grads": "none", "micro": None} in ways
    assert all(ways.count(way) == 1 for way in ways)


def test_a_harsher_change_is_told_only_where_no_milder_one_fits() -> None:
    """8 bits with a master fit: that 8 bits without one fit too helps nobody."""
    ways = [way.changes for way in tight().ways]
    assert {"states": "8bit"} in ways and {"states": "8bit-sr"} not in ways
    assert not [way for way in ways if len(way) > 1]


def test_fewer_micro_batches_are_told_where_more_do_not_fit() -> None:
    """One has no sums of gradients."""
    why = refused(small(1), tokens=4, seq=1, vram="1407MiB", host="1572MiB", micro=2, states="8bit", nvme={"limit": "1GiB"})
    assert why.changes["micro"] == 1
    assert mt.plan(small(1), tokens=4, seq=1, machine=FLAT, vram="1407MiB", host="1572MiB", micro=1, states="8bit",
                   nvme={"limit": "1GiB"}).micro == 1


def test_of_one_sequence_that_is_too_long_a_shorter_one_is_named() -> None:
    why = refused(small(2), tokens=1 << 20, seq=1 << 20, vram="4GiB", host="3GiB")
    assert 1 < why.changes["seq"] < 1 << 20 and f"seq={why.changes['seq']}, tokens=" in str(why)
    assert mt.plan(small(2), tokens=why.changes["seq"], seq=why.changes["seq"], machine=FLAT, vram="4GiB", host="3GiB")


def test_where_nothing_fits_it_is_said() -> None:
    why = refused(small(12), vram="1250MiB", host="1250MiB")
    assert why.ways == () and list(why.changes) == ["vram"] and "What would fit, each alone: vram=" in str(why)


def test_where_nothing_but_shorter_sequences_beside_a_change_fits_it_is_said() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(small(12, hidden_size=4096, intermediate_size=16384, num_attention_heads=32)).bfloat16()
    model.model.embed_tokens.requires_grad_(False)
    why = refused(model, tokens=1 << 23, seq=1 << 23, vram="8GiB", host="12GiB")
    assert why.ways == () and why.changes == {} and "or shorter sequences beside another change" in str(why)
    assert mt.plan(model, tokens=4096, seq=4096, machine=FLAT, vram="8GiB", host="12GiB", nvme={"limit": "1TB"})


# ---- words

def test_a_refusal_has_sizes_for_people_and_bytes_in_its_changes() -> None:
    why = tight()
    assert isinstance(why.changes["host"], int) and why.changes["host"] > 3 * GIB
    assert not re.search(r"\d{7,}", str(why)), "no bytes"
    typed = re.search(r"host='(.+?)'", str(why))[1]
    assert why.changes["host"] <= parse_bytes(typed, "host") < why.changes["host"] * 1.01
    for n in (1, 2**20, 2**30 - 1, 2**30, 3 * 2**30 + 1, 766208718765):
        assert n <= parse_bytes(show_size(n), "") < n + max(2**20, n / 100)


def test_what_needs_least_is_what_the_device_can_hold() -> None:
    """A 70B on an 80 GB card was told of 714 GiB of device memory."""
    why = refused(small(12), host="2GiB", vram="3GiB")
    assert sum(why.refusal.vram.values()) <= 3 * GIB < 2 * GIB + sum(why.refusal.host.values())
    assert "it lacks" in str(why) and "of host memory." in str(why).splitlines()[0]


def test_the_least_memory_of_a_small_model_is_exact() -> None:
    """Two slots of the largest unit take more than one slot for each, which larger rings have."""
    wide = [torch.nn.Linear(1000, n, bias=False, dtype=torch.bfloat16, device="meta") for n in (1000, 520)]
    model = torch.nn.Sequential(*wide, torch.nn.Linear(520, 8, bias=False, dtype=torch.bfloat16, device="meta"))
    asked = {"tokens": 4, "seq": 4, "machine": FLAT, "homes": "ram", "units": ["0", "1", "2"]}
    why = refused(model, vram=GIB + 2**20, **asked)
    assert mt.plan(model, vram=why.changes["vram"], **asked).slots == 3
    refused(model, vram=why.changes["vram"] - 1, **asked)
    assert sum(why.refusal.vram.values()) == why.changes["vram"]


def test_a_large_model_on_a_card_of_80_gb_is_told_the_commands(command: Callable, tmp_path: Path) -> None:
    """As the 70B with 256 GiB: two changes together, as a line to paste, in a few seconds."""
    small(80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
          vocab_size=128256).save_pretrained(tmp_path)
    status, out, err = command("plan", tmp_path, "--tokens", "16384", "--seq", "1024", "--machine", "h100-80g")
    found = re.search(r"# ([\d,]+) tokens/s\n +(megatrain .*--states 8bit-sr --grads none)$", err, re.M)
    assert status == 1 and out == "" and "714" not in err and not re.search(r"\w+='", err)
    assert float(found[1].replace(",", "")) > 1000
    status, out, _ = command(*shlex.split(found[2])[1:])
    assert status == 0 and "8bit-sr states" in out


def test_the_command_line_is_told_flags(command: Callable, model: Path) -> None:
    asked = ("plan", model, "--tokens", "8192", "--seq", "1024", "--machine", "rtx4090", "--ram", "4GiB", "--vram", "2GiB")
    status, out, err = command(*asked, "--nvme", "1MiB")
    lines = [line.strip() for line in err.splitlines() if line.startswith("    megatrain plan ")]
    assert (status, out) == (1, "") and len(lines) == 2
    assert all(f"{model} --tokens 8192 --seq 1024 --machine rtx4090 --vram 2GiB --host 4GiB" in line for line in lines)
    for line in lines:
        assert command(*shlex.split(line)[1:])[0] == 0, line
    assert "mt.plan(" not in err and "states=" not in err


@pytest.mark.parametrize("words, says", [
    (("--tokens", "1000", "--seq", "512"), "--tokens 1000, --seq 512: a step is a whole number of sequences; nearest: "
     "--tokens 1024"),
    (("--micro", "3"), "--micro 3: 8 sequences"), (("--vram", "24"), "--vram 24 is 24 bytes"),
    (("--tokens", "0"), "--tokens 0"), (("--seq", "0"), "--seq 0"),
    (("--homes", "disk"), "--homes disk: give the directory, --nvme /path"),
    (("--layers", "0"), "--layers 0"),
    (("--grads", "none", "--micro", "2"), "--grads none: gradients"),
    (("--machine", "rtx9090"), "--machine 'rtx9090': no such description"),
    (("--machine", "rtx4090,vram=2"), "--machine vram='2' is 2 bytes"),
    (("--activations", "linked", "--compute", "eager"), "--activations linked: no window")])
def test_wrong_flags_are_named_as_flags(command: Callable, model: Path, words: tuple, says: str) -> None:
    asked = ["plan", model, "--tokens", "8192", "--seq", "1024", *([] if "--machine" in words else ["--machine", "l4"])]
    status, out, err = command(*asked, *words)
    assert (status, out) == (1, "") and f"megatrain: {says}" in err


def test_plans_and_refusals_as_json(command: Callable, model: Path) -> None:
    asked = ("plan", model, "--tokens", "8192", "--seq", "1024", "--machine", "rtx4090", "--json")
    status, out, err = command(*asked)
    found = json.loads(out, parse_constant=pytest.fail)
    assert (status, err) == (0, "") and found["fits"]
    assert found["tokens_per_second"] == pytest.approx(8192 / found["seconds"])
    assert found["vram_bytes"] == sum(found["vram"].values())
    assert found["machine"]["source"] == "from data sheets, not measured"
    status, out, err = command(*asked, "--host", "4GiB", "--vram", "2GiB")
    found = json.loads(out, parse_constant=pytest.fail)
    assert status == 1 and not found["fits"] and err.startswith(f"megatrain: {found['why']}\n")
    assert found["changes"]["host"] > 4 * GIB


def test_train_speaks_of_its_own_flags() -> None:
    from megatrain_torch.commands.settings import Flags
    from megatrain_torch.commands.train import PLANNED

    text = Flags(PLANNED).told(tight())
    assert "--states 8bit" in text and "grads" not in text and not re.search(r"\w='", text)


# ---- machines

def test_without_a_gpu_one_has_to_be_named(command: Callable, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ("plan", model, "--tokens", "8192", "--seq", "1024")
    status, out, err = command(*asked)
    assert (status, out) == (2, "") and all(f"--{word}" in err for word in ("machine cpu", "vram ", "list-machines"))
    status, out, _ = command(*asked, "--vram", "24GiB", "--host", "32GiB")
    assert status == 0 and "some card of 24.0 GiB (as rtx3090-64g): rates from data sheets, not measured" in out
    status, out, _ = command("plan", model, "--tokens", "64", "--seq", "64", "--layers", "1", "--machine", "cpu")
    assert status == 0 and re.search(r"^host memory as device memory", out, re.M) and "\ndevice memory" not in out


def test_the_host_of_a_card_is_anybodys_but_for_one_memory() -> None:
    gib = 2**30
    for name, found in (("rtx4080", 200 * gib), ("gb10", 59 * gib), ("gb10,host=28GiB", 28 * gib)):
        assert mt.Machine.parse(name).with_limits(None, 200 * gib).host_bytes == found


def test_a_cpu_that_was_measured_is_no_gpu(command: Callable, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "machine.json").write_text(dataclasses.replace(MACHINES["cpu"], name="here").to_json())
    assert command("plan", model, "--tokens", "64", "--seq", "64")[0] == 2
    for machine in (None, "cpu"):           # in Python as mt.stream does: the CPU device
        assert mt.plan(small(1), tokens=64, seq=64, machine=machine).machine.name == "here"


def test_the_cards_that_people_have_are_listed(command: Callable) -> None:
    status, out, _ = command("plan", "--list-machines")
    named = ["rtx3060", "rtx3090", "rtx4080", "rtx4090", "rtx5090", "a10", "a6000", "l4", "l40s", "t4", "v100", "a100-40g",
             "a100-80g", "h100", "h200", "b200", "gb10", "gh200", "rtx6000-ada", "rtx-pro-6000"]
    assert status == 0 and all(re.search(rf"^{name}\b.* G/s$", out, re.M) for name in named)
    assert [mt.Machine.parse(name).name.startswith(name) for name in named] == [True] * len(named)
    found = {m["name"]: m["source"] for m in json.loads(command("plan", "--list-machines", "--json")[1])}
    assert set(found) == set(MACHINES)
    assert found["h200-128g"] == "measured in part" and found["l40s"] == "from data sheets, not measured"


@pytest.mark.parametrize("name, card", [
    ("NVIDIA GeForce RTX 3060", "rtx3060-12g"), ("NVIDIA A10G", "a10"), ("NVIDIA A10", "a10"), ("NVIDIA L4", "l4"),
    ("NVIDIA L40S", "l40s"), ("Tesla T4", "t4"), ("Tesla V100-SXM2-16GB", "v100-16g"),
    ("Tesla V100-SXM2-32GB", "v100-32g"), ("NVIDIA A100-SXM4-40GB", "a100-40g"), ("NVIDIA A100 80GB PCIe", "a100-80g"),
    ("NVIDIA RTX A6000", "a6000"), ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"), ("NVIDIA H200", "h200-128g"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"), ("NVIDIA GH200 480GB", "gh200-480g"),
    ("NVIDIA GB10", "gb10"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 80GB HBM3", "h100-80g"),
    ("NVIDIA B200", "b200-2t"), ("NVIDIA GeForce RTX 4080 SUPER", "rtx4080"), ("NVIDIA GeForce GTX 1080", None)])
def test_a_card_is_known_by_what_torch_calls_it(name: str, card: str | None) -> None:
    assert described_gpu(name) == card


def test_a_described_cards_host_has_what_is_said() -> None:
    asked = {"tokens": 4096, "seq": 1024, "homes": "ram"}
    roomy = mt.plan(small(2), **asked, machine="rtx4090", host="128GiB")
    assert roomy.machine.host_bytes == 128 * GIB and roomy.machine.vram_bytes == MACHINES["rtx4090-64g"].vram_bytes
    assert mt.plan(small(2), **asked, machine="rtx4090,vram=8GiB", host="128GiB").machine.host_bytes == 128 * GIB
    assert mt.plan(small(2), **asked, machine="rtx4090,host=32GiB", host="128GiB").machine.host_bytes == 32 * GIB
    assert mt.plan(small(2), **asked, machine=FLAT, host="128GiB").machine.host_bytes == 64 * GIB


def test_doctor_marks_what_it_did_not_measure() -> None:
    lines = {line.split("  ")[0]: line for line in doctor.report(FLAT).splitlines() if "  " in line}
    assert "not measured, a Samsung PM9A3 of 1.92 TB's data sheet" in lines["disk: read, write; together"]
    guessed = "with moments of 8 bits", "a micro-batch's gradients added"
    assert all("from AdamW's rate" in lines[what] for what in guessed) and "not measured" in lines["between GPUs"]
    assert re.search(r"^disk: read.* GB/s$", doctor.report(dataclasses.replace(FLAT, disk_read_gbps=2.0)), re.M)
