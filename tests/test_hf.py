"""install.py, of transformers: where a transformers model says that it computes, and what its gradient_checkpointing does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megatrain_torch as mt
from megatrain_torch.model import install as hf
from megatrain_torch.model.stream import runtime_of


class Base(nn.Module):
    """Stands for PreTrainedModel."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def test_a_streamed_model_says_where_it_computes_and_others_where_they_are(monkeypatch) -> None:
    fakes = {"transformers": SimpleNamespace(modeling_utils=SimpleNamespace(PreTrainedModel=Base))}
    monkeypatch.setattr(hf, "sys", SimpleNamespace(modules=fakes))
    undo: list = []
    monkeypatch.setattr(hf.patches, "once", lambda name, patch: undo.append(patch()))
    monkeypatch.setattr(hf.hf_calls, "install", lambda: None)
    own = Base.device
    streamed, other = Base(), Base()
    rt = SimpleNamespace(device=torch.device("meta"), checkpointing=[], wholes=[])
    hf.prepare(rt, streamed, lambda module, name, call: module.__dict__.update({name: call}))
    assert streamed.device == other.device == torch.device("cpu"), "it is not streamed yet"
    streamed.__dict__["_apply"] = None                   # as mt.stream leaves it
    assert streamed.device == torch.device("meta") and other.device == torch.device("cpu")
    del streamed.__dict__["_apply"]                      # as mt.unstream does
    assert streamed.device == torch.device("cpu")
    undo[0]()
    assert Base.device is own


NAMES = ["layers.0", "layers.1"]


class Checkpointed(nn.Module):
    """Has transformers' flag."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in NAMES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        """As modules have that are lists of something: it is false, and there all the same."""
        return 0


@pytest.mark.parametrize("plan, then", [
    ({}, "replay"), ({"activations": "auto"}, "replay"), ({"activations": "saved"}, "saved"),
    ({"activations": {"layers.0": "saved"}}, "saved replay"), ({"activations": dict.fromkeys(NAMES, "saved")}, "saved")])
def test_gradient_checkpointing_is_for_what_no_plan_says(plan: dict, then: str) -> None:
    """The model's own is switched off in any case."""
    model = Checkpointed()
    mt.stream(model, "cpu", units=NAMES, plan=plan)
    model.gradient_checkpointing = True
    model(torch.zeros(1, 4)).sum().backward()
    keeps = [w.keeps for w in runtime_of(model).windows]
    assert keeps == (then.split() * 2)[:2] and not model.gradient_checkpointing
