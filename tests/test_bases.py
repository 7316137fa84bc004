"""Frozen bases that are codes of other packages: streamed, they give the bits of the same model run by its package.

bitsandbytes and torchao, each with LoRA beside it. MEGATRAIN_FULL=1: every architecture, way of keeping and home."""
from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import parity
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bnb = pytest.importorskip("bitsandbytes", reason="the extra `test` has it")
torchao = pytest.importorskip("torchao", reason="the extra `test` has it")

import megatrain_torch as mt  # noqa: E402

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=48, head_dim=16, max_position_embeddings=64)
ARCHES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
}


def four_bits(kind: str, **settings: Any) -> Any:
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind,
                                           bnb_4bit_compute_dtype=torch.bfloat16, **settings)


def made(name: str) -> Any:
    import torchao.quantization as q
    return transformers.TorchAoConfig(getattr(q, name)())


FORMATS: dict[str, Callable[[], Any]] = {
    "nf4": lambda: four_bits("nf4"),
    "nf4-double": lambda: four_bits("nf4", bnb_4bit_use_double_quant=True),
    "nf4-in-bf16": lambda: four_bits("nf4", bnb_4bit_quant_storage=torch.bfloat16),
    "fp4": lambda: four_bits("fp4"),
    "fp4-double": lambda: four_bits("fp4", bnb_4bit_use_double_quant=True),
    "int8": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
    "int8-threshold-0": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "torchao-int8": lambda: made("Int8WeightOnlyConfig"),
    "torchao-float8": lambda: made("Float8WeightOnlyConfig"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def of(arch: str) -> Path:
        parity.seed()
        at = tmp_path_factory.mktemp(arch)
        transformers.AutoModelForCausalLM.from_config(ARCHES[arch](), dtype=torch.bfloat16).save_pretrained(at)
        return at
    return of


def base(folder: Path, form: str) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=FORMATS[form](),
                                                             dtype=torch.bfloat16)


def with_adapter(model: nn.Module) -> nn.Module:
    parity.seed()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def trained(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Every loss and every gradient."""
    own = [p for p in model.parameters() if p.requires_grad]
    opt, seen = torch.optim.AdamW(own, lr=1e-2), []
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in own)]
        opt.step()
        opt.zero_grad()
    return seen


def streamed(model: nn.Module, how: str, home: str = "ram", folder: Path | None = None) -> nn.Module:
    return doors.stream(model, "cpu", compute="eager", nvme=str(folder) if "disk" in home else None,
                        plan={"activations": how, "slots": 2, "homes": home,
                              "debug": {"poison": True, "delay_us": 200}})


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for n, (a, b) in enumerate(zip(found, wanted)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), f"{n} of {len(wanted)} differs"


ALL = [(a, f, k, h) for a in ARCHES for f in FORMATS for k in ("replay", "saved")
       for h in ("ram", "vram", "disk", "disk+weights")]
SOME = [("llama", "nf4-double", "replay", "ram"), ("llama", "nf4", "saved", "disk+weights"),
        ("qwen3", "fp4", "replay", "disk+weights"), ("llama", "int8", "replay", "ram"),
        ("qwen3", "int8", "saved", "disk+weights"), ("llama", "torchao-int8", "replay", "disk+weights"),
        ("qwen3", "torchao-float8", "saved", "ram"), ("llama", "nf4-in-bf16", "replay", "vram")]


@pytest.mark.parametrize(("arch", "form", "how", "home"), ALL if parity.FULL else SOME)
def test_a_base_of_codes_trains_to_its_packages_bits(arch: str, form: str, how: str, home: str, tmp_path: Path,
                                                     folder: Callable[[str], Path]) -> None:
    model = with_adapter(base(folder(arch), form))
    wanted = trained(copy.deepcopy(model))
    assert_same(trained(streamed(model, how, home, tmp_path)), wanted)
