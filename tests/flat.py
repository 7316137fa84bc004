"""What plans are made of in tests: a machine of round figures, and two models."""
from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen2Config

import megatrain_torch as mt

GIB = 2**30
# So that what is tested does not change when a machine is measured again.
FLAT = mt.Machine(
    name="flat", device="cuda", vram_bytes=16 * GIB, vram_overhead_bytes=GIB, host_bytes=64 * GIB,
    host_overhead_bytes=GIB, gemm=((1, 1, 100.0), (1, 2, 100.0)), attention=((1, 50.0, 40.0),), hbm_gbps=1000.0,
    h2d_gbps=20.0, d2h_gbps=20.0, both_gbps=16.0, busy_gbps=10.0, adam_gparams=((1, 1.0), (4, 2.0)), add_gparams=4.0,
    device_adam_gparams=40.0, launch_us=5.0)


def seven(layers: int, **other: Any) -> Qwen2Config:
    """Qwen2.5-7B's width."""
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
             "vocab_size": 152064, "num_hidden_layers": layers, "tie_word_embeddings": False, "use_cache": False}
    return Qwen2Config(**shape | other)


def small(layers: int = 4, **other: Any) -> LlamaConfig:
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
             "vocab_size": 32000, "num_hidden_layers": layers, "tie_word_embeddings": False, "use_cache": False}
    return LlamaConfig(**shape | other)
