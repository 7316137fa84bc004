"""examples/configs: what each file says of its machine is what `megatrain plan` says, and `megatrain train` takes it."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain_torch as mt
from megatrain_torch.cli import main
from megatrain_torch.commands.settings import Settings, read_yaml

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples/configs").glob("*.yaml"))


def shape(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, words: int, longest: int,
          **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": words,
            "max_position_embeddings": longest, "dtype": "bfloat16"} | more


GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}}
# As their config.json on the hub have it.
MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": shape("llama", 576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B-Instruct": shape("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen/Qwen3-8B": shape("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-14B": shape("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-32B": shape("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 262144, head_dim=128,
                                              moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": shape("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "meta-llama/Llama-3.1-8B-Instruct": shape("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.3-70B-Instruct": shape("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "mistralai/Mistral-Small-24B-Instruct-2501": shape("mistral", 5120, 32768, 40, 32, 8, 131072, 32768, head_dim=128,
                                                       sliding_window=None),
    "microsoft/phi-4": shape("phi3", 5120, 17920, 40, 40, 10, 100352, 16384, pad_token_id=0),
    "openai/gpt-oss-20b": shape("gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, num_local_experts=32, **GPT_OSS),
    "openai/gpt-oss-120b": shape("gpt_oss", 2880, 2880, 36, 64, 8, 201088, 131072, num_local_experts=128, **GPT_OSS),
}


def said(file: Path, name: str) -> str:
    return re.search(rf"^# {name}: (.*)$", file.read_text(), re.MULTILINE)[1]


def figures(line: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"\b\d[\d,.]*", line)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_fits_its_machine_with_the_rate_and_the_memory_it_says(
        file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.of(read_yaml(file), file.name)
    (tmp_path / "config.json").write_text(json.dumps(MODELS[settings.model]))
    asked = {"machine": said(file, "machine"), "tokens": settings.tokens, "seq": settings.seq,
             "states": settings.states, "base": settings.base, "lora": settings.lora}
    # PEFT draws an adapter's first values even where there is no memory for them: half of a 70B's time here.
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, *args, **kwargs: tensor)
    assert main(["plan", str(tmp_path), "--json", *(f"--{k}={v}" for k, v in asked.items() if v is not None)]) == 0
    plan = json.loads(capsys.readouterr().out)
    gpu, host = (mt.show_bytes(plan[name]) for name in ("vram_bytes", "host_bytes"))
    words = f"{plan['tokens_per_second']:,.0f} tokens/s, {gpu} of the GPU's memory, {host} of the host's"
    # Plans that change by less than a reader would notice need no new lines in sixteen files.
    assert figures(words) == pytest.approx(figures(said(file, "predicted")), rel=0.03), f"{file.name}: # predicted: {words}"


def test_the_page_lists_every_configuration_with_its_rate() -> None:
    page = (ROOT / "examples/README.md").read_text()
    rates = dict(re.findall(r"^\| `([^`]+\.yaml)` \|.*\| ([\d,]+) \|$", page, re.MULTILINE))
    assert len(FILES) >= 12 and rates == {file.name: said(file, "predicted").split()[0] for file in FILES}
