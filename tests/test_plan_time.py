"""mt.plan asks for so little time that a first pass does not notice it."""
from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import megatrain_torch as mt

DISK = {"limit": "4TB"}
MOST_S = 1.0                # of one core: 0.25 to 0.5 where nothing else runs, 1.0 to 2.1 before


@pytest.fixture(scope="module")
def model() -> Any:
    """72B, on the meta device."""
    config = Qwen2Config(hidden_size=8192, intermediate_size=29568, num_attention_heads=64, num_key_value_heads=8,
                         num_hidden_layers=80, vocab_size=152064, dtype=torch.bfloat16)
    with torch.device("meta"):
        return Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("tokens, seq", [(4096, 1024), (131072, 2048), (131072, 131072)])
def test_eighty_layers_with_a_disk_plan_in_half_a_second(model: Any, tokens: int, seq: int) -> None:
    """With little that memory forbids: then most is open."""
    took = []
    while len(took) < 3 and min(took, default=MOST_S) >= MOST_S:
        began = time.process_time()
        plan = mt.plan(model, tokens=tokens, seq=seq, machine="h200-128g,host=1500GiB", nvme=DISK, states="8bit-sr")
        took.append(time.process_time() - began)
        assert plan.seconds > 1.0
    assert min(took) < MOST_S
