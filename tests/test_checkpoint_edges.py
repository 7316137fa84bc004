"""mt.save and mt.load where something was put beside a checkpoint, or taken out of a model."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import update

import megatrain_torch as mt


def made(**limits: Any) -> tuple[nn.Module, mt.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = mt.stream(model, "cpu", units=["0", "1", "2"], **limits)
    return model, mt.AdamW(model.parameters(), lr=0.1)


def stepped(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    update(model(torch.ones(2, 4)).square().sum(), opt)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("held", [True, False], ids=["held by somebody", "gone"])
def test_a_model_that_a_layer_was_taken_out_of_is_loaded(held: bool, tmp_path: Path) -> None:
    model, opt = made()
    stepped(model, opt)
    kept = [model[1].weight] if held else []
    if not held:
        opt.param_groups[0]["params"] = [p for i in (0, 2) for p in model[i].parameters()]
        opt.state.clear()
        del opt
    del model[1]
    mt.save(model, None, tmp_path / "a")
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    mt.load(model, None, tmp_path / "a")
    assert all(map(torch.equal, before, model.parameters())) and model(torch.ones(2, 4)).shape == (2, 4)
    del kept


def test_links_beside_a_checkpoint_stay_links(tmp_path: Path) -> None:
    """Wherever they lead: to a file of the checkpoint's own, out of it, or nowhere."""
    model, opt = made()
    stepped(model, opt)
    mt.save(model, opt, tmp_path / "a")
    (tmp_path / "tokens.json").write_text("{}")
    (tmp_path / "a/more").mkdir()
    links = {"best": "model.safetensors", "tokens.json": "../tokens.json", "old": "/no/such/file", "more/gone": "nothing",
             "up": ".."}
    for name, to in links.items():
        os.symlink(to, tmp_path / "a" / name)
    after = stepped(model, opt)
    mt.save(model, opt, tmp_path / "a")
    assert {name: os.readlink(tmp_path / "a" / name) for name in links} == links
    assert (tmp_path / "a/tokens.json").read_text() == "{}"
    other = made()
    mt.load(*other, tmp_path / "a")
    assert all(map(torch.equal, after, other[0].parameters()))


def test_where_states_do_not_fit_the_scheduler_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = made()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    stepped(model, opt)
    scheduler.step()
    mt.save(model, opt, tmp_path / "a", scheduler=scheduler)
    model, opt = made()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    before = scheduler.state_dict()

    def refuse(self: mt.AdamW) -> None:
        raise mt.MegatrainError("no room")

    monkeypatch.setattr(mt.AdamW, "_ask_for_room", refuse)
    with pytest.raises(mt.MegatrainError, match="no room"):
        mt.load(model, opt, tmp_path / "a", scheduler=scheduler)
    assert scheduler.state_dict() == before


@pytest.mark.parametrize("kind", [mt.AdamW, torch.optim.AdamW])
def test_a_layer_that_was_taken_out_of_model_and_optimizer_is_in_no_checkpoint(kind: Any, tmp_path: Path) -> None:
    model, _ = made()
    opt = kind(model.parameters(), lr=0.1)
    stepped(model, opt)
    taken = model[1]
    del model[1]
    opt.param_groups[0]["params"] = list(model.parameters())
    for p in taken.parameters():
        del opt.state[p]
    mt.save(model, opt, tmp_path / "a")
    after = stepped(model, opt)
    mt.load(model, opt, tmp_path / "a")
    assert all(map(torch.equal, after, stepped(model, opt))) and taken.weight.shape == (4, 4)
