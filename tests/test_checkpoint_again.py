"""Files of frozen weights are written once, and each checkpoint has them: by hard links, as long as they are the same."""
from __future__ import annotations

import os
import shutil
from pathlib import Path

import parity
import pytest
import torch
from torch import nn

import megatrain_torch as mt
from megatrain_torch.checkpoint import manifest, parts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.own = nn.Linear(16, 16), nn.Linear(16, 16)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.own(torch.relu(self.base(x)))


class Run:
    def __init__(self) -> None:
        parity.seed()
        self.model = mt.stream(nn.Sequential(Layer(), Layer()), "cpu")
        self.opt = mt.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)

    def step(self) -> None:
        self.model(torch.ones(2, 16)).sum().backward()
        self.opt.step()
        self.opt.zero_grad()

    def save(self, folder: Path, **how: bool) -> set[str]:
        """Names of files that other checkpoints have too."""
        mt.save(self.model, self.opt, folder, **how).wait()
        return {p.name for p in folder.iterdir() if p.stat().st_nlink > 1}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)
    own = Run()
    own.step()
    return own


def same_as(folder: Path, run: Run) -> bool:
    """Does the checkpoint, checked and read into another model, give this one?"""
    other = Run()
    mt.load(other.model, None, folder)
    return all(torch.equal(a, b) for a, b in zip(other.model.state_dict().values(), run.model.state_dict().values()))


BASE = "frozen-00001-of-00001.safetensors"


def test_frozen_weights_are_written_once_and_each_checkpoint_is_whole(run: Run, tmp_path: Path) -> None:
    first = mt.save(run.model, run.opt, tmp_path / "1")
    run.step()
    assert run.save(tmp_path / "2", asynchronous=True) == {BASE}
    each, shared = mt.checkpoint_bytes(run.model, tmp_path / "2")
    assert 0 < first.bytes - each - shared < 20_000              # headers
    run.step()
    assert run.save(tmp_path / "2") == {BASE}                    # in its own place
    shutil.rmtree(tmp_path / "1")
    run.step()
    assert run.save(tmp_path / "3") == {BASE}
    shutil.rmtree(tmp_path / "2")
    assert same_as(tmp_path / "3", run)


def test_after_a_load_the_next_checkpoint_has_the_files_that_were_read(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "1")
    other = Run()
    mt.load(other.model, other.opt, tmp_path / "1")
    other.step()
    assert other.save(tmp_path / "2") == {BASE} and same_as(tmp_path / "2", other)


def written_to(run: Run) -> None:
    with torch.no_grad():
        run.model[1].base.bias.mul_(2)


def trained(run: Run) -> None:
    run.model[0].base.requires_grad_(True)
    run.opt.add_param_group({"params": list(run.model[0].base.parameters())})
    run.step()
    run.model[0].base.requires_grad_(False)


def loaded(run: Run) -> None:
    run.model.load_state_dict({k: v + 1 for k, v in run.model.state_dict().items()})


@pytest.mark.parametrize("change", [written_to, trained, loaded])
def test_weights_that_changed_are_written(change: object, run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "1")
    change(run)
    assert run.save(tmp_path / "2") == set() and same_as(tmp_path / "2", run)


def gone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.unlink()


def edited(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def replaced(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(file, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


def without_links(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(there: Path, here: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("change", [gone, edited, replaced, without_links])
def test_files_that_are_not_as_they_were_written_are_written_again(change: object, run: Run, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(tmp_path / "1")
    change(tmp_path / "1" / BASE, monkeypatch)
    assert run.save(tmp_path / "2") == set() and same_as(tmp_path / "2", run)


def test_a_save_that_fails_leaves_the_files_of_the_one_before_to_the_next(run: Run, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(tmp_path / "1")
    def write(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m, pytest.raises(mt.MegatrainError, match="No space"):
        m.setattr(manifest, "write", write)
        run.save(tmp_path / "2")
    assert not (tmp_path / "2").exists()
    assert run.save(tmp_path / "3") == {BASE} and same_as(tmp_path / "3", run)


def test_few_frozen_weights_stay_with_the_others(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1 << 20)
    run.save(tmp_path / "1")
    assert (tmp_path / "1" / "model.safetensors").is_file() and run.save(tmp_path / "2") == set()


@pytest.mark.parametrize("frozen", ["some", "all"])
def test_transformers_reads_it_and_writes_into_no_other_checkpoint(frozen: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)
    parity.seed()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2))
    (model if frozen == "all" else model.model.layers).requires_grad_(False)
    mt.stream(model, "cpu")
    for name in ("1", "2"):
        mt.save(model, None, tmp_path / name)
    was = {p.name: p.read_bytes() for p in (tmp_path / "1").iterdir()}
    found, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "2", output_loading_info=True)
    assert not told["missing_keys"] and all(torch.equal(t, found.state_dict()[n]) for n, t in model.state_dict().items())
    assert not {p.name for p in (tmp_path / "2").iterdir() if p.stat().st_nlink > 1} & {
        "model.safetensors", "model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors"}
    found.save_pretrained(tmp_path / "2")
    assert was == {p.name: p.read_bytes() for p in (tmp_path / "1").iterdir()}
