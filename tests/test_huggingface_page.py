"""The examples in docs/huggingface.md run as they stand there, TRL's where it is installed."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from run_dropin import Rows
from situations import DECODER, llama

PAGE = Path(__file__).parents[1] / "docs/huggingface.md"
EXAMPLES = dict(re.findall(r"^## (\w+)$(?:(?!^## |```).)*```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
pytestmark = pytest.mark.filterwarnings("ignore")


def run(name: str, **names: Any) -> dict[str, Any]:
    exec(compile(EXAMPLES[name], f"{PAGE} {name}", "exec"), names)
    return names


def test_trainer_trains_and_loads_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    made = run("Trainer", path=tmp_path / "model", folder=tmp_path / "out", rows=Rows())
    state = made["trainer"].state
    assert state.global_step == 8 and state.best_model_checkpoint is not None
    assert made["opt"].skipped_steps == 0


def test_accelerate_and_peft_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8)
    made = run("Accelerate", model=llama(), loader=loader, folder=str(tmp_path / "state"))
    assert made["norm"] > 0 and (tmp_path / "state/model.safetensors").exists()
    trained = run("PEFT", model=llama())["opt"].param_groups[0]["params"]
    assert 0 < sum(p.numel() for p in trained) < llama().num_parameters()


def test_trl_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    import datasets
    import tokenizers as tk
    import transformers as tf
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = tk.Tokenizer(tk.models.WordLevel({f"w{i}": i for i in range(DECODER["vocab_size"])}, unk_token="w3"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    tokenized = datasets.Dataset.from_dict({"input_ids": [Rows()[i]["input_ids"].tolist() for i in range(16)]})
    made = run("TRL", model=llama(), folder=tmp_path, tokenized=tokenized, tokenizer=tokenizer)
    assert made["trainer"].state.global_step == 2
