"""mt.plan for several GPUs and machines: with one of each all is as it was; what is exchanged, shared and counted."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

import megatrain_torch as mt

GIB = 2**30
FLAT = mt.Machine(
    name="flat", device="cuda", vram_bytes=16 * GIB, vram_overhead_bytes=GIB, host_bytes=64 * GIB,
    host_overhead_bytes=GIB, gemm=((1, 1, 100.0), (1, 2, 100.0)), attention=((1, 50.0, 40.0),), hbm_gbps=1000.0,
    h2d_gbps=20.0, d2h_gbps=20.0, both_gbps=16.0, busy_gbps=10.0, adam_gparams=((1, 1.0), (4, 2.0)), add_gparams=4.0,
    device_adam_gparams=40.0, launch_us=5.0)


def seven(layers: int) -> PretrainedConfig:
    """Qwen2.5-7B's width."""
    return Qwen2Config(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
                       vocab_size=152064, num_hidden_layers=layers, tie_word_embeddings=False)


def small(layers: int = 4) -> PretrainedConfig:
    return LlamaConfig(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
                       vocab_size=32000, num_hidden_layers=layers, tie_word_embeddings=False)


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
