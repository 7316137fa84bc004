"""Linear layers that keep codes in buffers, as gptqmodel's do (GPTQ, AWQ)."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain_torch as mt
from megatrain_torch.model.choices import refuse_packed


class Packed(nn.Module):
    """As gptqmodel has them: 8 codes of 4 bits in 32, scales of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-2**31, 2**31 - 1, (2, 16), dtype=torch.int32))
        self.register_buffer("scales", torch.rand(1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.qweight[:, None] >> torch.arange(0, 32, 4)[None, :, None] & 15
        return x @ ((codes.reshape(16, 16) - 8) * self.scales)


def test_codes_in_buffers_give_the_same_bits_on_the_cpu_and_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    packed, x = Packed(), torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 16), packed, nn.Linear(16, 1))
    wanted = model(x).sum()
    wanted.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    refuse_packed(model, torch.device("cuda"))               # a class of one's own
    monkeypatch.setattr(Packed, "__module__", "gptqmodel.nn_modules.qlinear.torch")
    with pytest.raises(mt.MegatrainError, match=r"module '1' \(Packed\) keeps its codes in buffers.*base='nf4'"):
        refuse_packed(model, torch.device("cuda"))
    model = mt.stream(model, "cpu")
    found = model(x).sum()
    found.backward()
    assert torch.equal(found.detach(), wanted.detach())
    assert all(map(torch.equal, [p.grad for p in model.parameters()], grads))
