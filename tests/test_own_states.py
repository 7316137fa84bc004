"""AdamW's states that are given back to the store that they are a part of, with no copy in between."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import LONG, assert_same
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt

HOMES = ("ram", "vram", "disk", *(pytest.param(home, marks=LONG) for home in ("arrive", "disk+weights")))


def trained(tmp_path: Path, homes: str = "ram", states: str = "fp32", dtype: torch.dtype = torch.bfloat16,
            steps: int = 2) -> tuple[nn.Module, mt.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))).to(dtype)
    model = mt.stream(model, "cpu", plan={"homes": homes}, nvme=tmp_path if homes.startswith("disk") else None)
    opt = mt.AdamW(model.parameters(), lr=1e-2, states=states)
    for number in range(steps):
        step(model, opt, number)
    return model, opt


def step(model: nn.Module, opt: mt.AdamW, number: int) -> None:
    torch.manual_seed(number)
    update(model(torch.randn(4, 24, dtype=model[0].weight.dtype)).float().square().mean(), opt)


def kept(model: nn.Module, opt: mt.AdamW) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()] + [t for p in model.parameters() for t in (
        *opt.moments(p), opt.state[p]["step"].clone())]


@pytest.mark.parametrize("homes, states, dtype", [
    ("ram", "fp32", torch.bfloat16), ("disk", "fp32", torch.bfloat16), ("vram", "fp32", torch.float32),
    ("vram", "8bit-sr", torch.bfloat16), *(pytest.param(*how, marks=LONG) for how in (
        ("vram", "fp32", torch.bfloat16), ("arrive", "fp32", torch.bfloat16), ("disk+weights", "fp32", torch.bfloat16),
        ("ram", "8bit", torch.bfloat16), ("disk", "fp32", torch.float32)))])
def test_an_optimizer_takes_its_own_state(homes: str, states: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, opt = trained(tmp_path, homes, states, dtype)
    plain, other = trained(tmp_path, homes, states, dtype)
    opt.load_state_dict(opt.state_dict())
    assert_same(kept(model, opt), kept(plain, other))
    assert kept(model, opt)[-2].any()
    for one in ((model, opt), (plain, other)):
        step(*one, 7)
    assert_same(kept(model, opt), kept(plain, other))


def detached(state: dict[str, Any]) -> dict[str, Any]:
    return {key: v.detach() if isinstance(v, Tensor) else v for key, v in state.items()}


@pytest.mark.parametrize("homes, dtype", [("ram", torch.bfloat16), ("vram", torch.float32),
                                          pytest.param("disk", torch.float32, marks=LONG)])
@pytest.mark.parametrize("given", [dict, detached])
def test_states_of_one_parameter_are_given_to_another(homes: str, dtype: torch.dtype, given: Callable[..., Any],
                                                      tmp_path: Path) -> None:
    """Each layer takes what the one before it had: what was written first is not what the next one takes."""
    model, opt = trained(tmp_path, homes, dtype=dtype)
    saved = opt.state_dict()
    wanted = [[m.clone() for m in opt.moments(p)] for p in model.parameters()]
    saved["state"] = {(index + 2) % 6: {k: v for k, v in given(state).items() if k != "master"}
                      for index, state in saved["state"].items()}
    opt.load_state_dict(saved)
    for index, p in enumerate(model.parameters()):
        assert_same(list(opt.moments(p)), wanted[(index - 2) % 6])


@pytest.mark.parametrize("homes", HOMES)
def test_states_of_another_store_are_as_they_are(homes: str, tmp_path: Path) -> None:
    """Of fp32 parameters nothing is looked at on the way."""
    model, opt = trained(tmp_path, homes, dtype=torch.float32)
    fresh, after = trained(tmp_path, homes, dtype=torch.float32, steps=0)
    after.load_state_dict(opt.state_dict())
    assert_same(kept(fresh, after)[6:], kept(model, opt)[6:])


def test_another_optimizer_of_the_model_takes_them() -> None:
    model, opt = trained(Path())
    wanted = kept(model, opt)
    after = mt.AdamW(reversed(list(model.parameters())), lr=1e-2)
    saved = opt.state_dict()
    saved["state"] = {5 - index: state for index, state in saved["state"].items()}
    after.load_state_dict(saved)
    assert_same(kept(model, after), wanted)
