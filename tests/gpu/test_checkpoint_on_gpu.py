"""Checkpoints on CUDA: a resume has the bits of the run that went on, across homes, dropout's random numbers included.

With deterministic kernels and a layer's own code (parity.exact), where two runs have the same bits.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from torch import Tensor, nn

import megatrain_torch as mt

WIDTH = 768
MIXED = {"layers.0": "vram", "layers.1": "arrive", "layers.2": "through", "layers.3": "disk"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def made(homes: Any, folder: Path, kind: torch.dtype) -> tuple[Any, mt.AdamW]:
    torch.manual_seed(1)
    model = mt.stream(Net().to(kind), device="cuda", nvme=str(folder) if homes == MIXED else None,
                      plan={"homes": homes, "activations": "saved"}, compute="eager")
    return model, mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e-2)


def train(pair: tuple[Any, mt.AdamW], begin: int, end: int) -> list[float]:
    model, opt = pair
    losses = []
    for step in range(begin, end):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).to(model.layers[0][0].weight.dtype)
        loss = model(x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved, loaded", [("ram", MIXED), (MIXED, "ram"), ("vram", MIXED)],
                         ids=["ram-mixed", "mixed-ram", "vram-mixed"])
def test_resume_gives_the_bits_of_the_run_that_went_on(tmp_path: Path, saved: Any, loaded: Any,
                                                       kind: torch.dtype) -> None:
    with parity.exact("cuda"):
        one = made(saved, tmp_path, kind)
        train(one, 0, 3)
        saving = mt.save(*one, tmp_path / "c", extra=3, asynchronous=True, spare=1)
        want = train(one, 3, 6)
        saving.wait()
        other = made(loaded, tmp_path, kind)
        train(other, 7, 8)                   # it had other states
        at = mt.load(*other, tmp_path / "c")
        assert train(other, at, 6) == want
        a, b = mt.masters(one[0]), mt.masters(other[0])
        assert not [name for name in a if not torch.equal(a[name], b[name])]
        for p, q in zip(one[0].parameters(), other[0].parameters()):
            assert all(torch.equal(x, y) for x, y in zip(one[1].moments(p), other[1].moments(q)))
