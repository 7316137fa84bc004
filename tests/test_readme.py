"""The example in README.md runs as it stands there."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


def example() -> str:
    return re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]


def tiny_checkpoint(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                         num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def test_the_example_of_the_readme_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"path": tiny_checkpoint(tmp_path), "loader": [{"input_ids": ids, "labels": ids}] * 12}
    exec(compile(example().replace("lr=1e-5", "lr=1e-3"), str(README), "exec"), names)
    loss_of = torch.nn.functional.cross_entropy
    with torch.no_grad():
        out = names["model"](input_ids=ids).logits
        last = loss_of(out[:, :-1].flatten(0, 1).float().cpu(), ids[:, 1:].flatten())
    assert last < 3.8, f"after 12 steps on one batch the loss is {last:.2f}, from about 4.16"
    assert names["opt"].skipped_steps == 0


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= 9 * 1024


def test_the_models_of_the_readme_are_those_that_fit() -> None:
    """Its table has rows of docs/what-fits.md, which mt.plan wrote."""
    known = (README.parent / "docs/what-fits.md").read_text().splitlines()
    rows = re.findall(r"^\| [^|]+, \d+ GB \|.*", README.read_text(), re.MULTILINE)
    assert len(rows) >= 5
    assert [row for row in rows if row not in known] == []


def test_the_files_of_the_map_are_there() -> None:
    root = README.parent
    for row in re.findall(r"^\| `[^|]*\|", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            folder = name.rstrip("/").rpartition("/")[0] or folder
            assert any((root / place / name).exists() for place in ("", folder)), f"CONTRIBUTING names {name}"
