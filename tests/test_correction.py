"""A mixture's correction of its choice, moved between forward and backward: the choice of the forward is what counts."""
from __future__ import annotations

import copy

import fusing
import parity
import pytest
import torch
from fusing import padded
from test_moe import FAMILIES
from torch import Tensor, nn

import megatrain_torch as mt

pytestmark = pytest.mark.filterwarnings("ignore")


def moved(model: nn.Module, way: str) -> None:
    """As an auxiliary-loss-free balance does after each forward; here so far that every choice would be another."""
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values = torch.tensor([5.0, -5.0, 5.0, -5.0])
            if way == "in place":
                b.add_(values)
            else:
                b.data.add_(values)


def grads(model: nn.Module, way: str) -> list[Tensor]:
    model.train()
    loss = model(**padded(0)).loss
    moved(model, way)
    loss.backward()
    return [parity.frozen(p.grad) for p in model.parameters()]


# By .data is the harder way, since no version counts it.
@pytest.mark.parametrize("compute, keep, way", [
    pytest.param(compute, keep, way, marks=() if keep in ("saved", "replay+host") and way == "by .data" else parity.LONG)
    for compute in ("fused", "eager") for keep in ("saved", "attention", "replay", "linked", "replay+host")
    for way in ("in place", "by .data")])
def test_the_choice_of_the_forward_counts(compute: str, keep: str, way: str) -> None:
    if compute == "eager" and keep in ("attention", "linked"):
        pytest.skip("templates alone keep that")
    plain = FAMILIES["glm4_moe"]()
    model = mt.stream(copy.deepcopy(plain), device="cpu", compute=compute, plan={"activations": keep})
    wanted, found = grads(plain, way), grads(model, way)
    codes = {w.name: w.code for w in mt.model.stream.runtime_of(model).windows if "layers." in w.name}
    if compute == "fused":
        fusing.all_fused(codes)
    for (name, _), a, b in zip(plain.named_parameters(), wanted, found):
        assert torch.equal(a, b) if compute == "eager" else fusing.error(a, b) < fusing.TOLERANCE, name
