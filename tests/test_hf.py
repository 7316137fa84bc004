"""hf.py by itself: where a transformers model says that it computes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from megatrain_torch.model import hf


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
    monkeypatch.setattr(hf.masks, "install", lambda: None)
    own = Base.device
    streamed, other = Base(), Base()
    rt = SimpleNamespace(device=torch.device("meta"), checkpointing=[])
    hf.prepare(rt, streamed, lambda module, name, call: module.__dict__.update({name: call}))
    assert streamed.device == other.device == torch.device("cpu"), "it is not streamed yet"
    streamed.__dict__["_apply"] = None                   # as mt.stream leaves it
    assert streamed.device == torch.device("meta") and other.device == torch.device("cpu")
    del streamed.__dict__["_apply"]                      # as mt.unstream does
    assert streamed.device == torch.device("cpu")
    undo[0]()
    assert Base.device is own
