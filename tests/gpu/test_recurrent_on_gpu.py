"""Recurrent layers on CUDA, where they put their weights into one buffer for cuDNN, in place."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import megatrain_torch as mt


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(64, 32), nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.attend, self.out = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rnn(self.embed(ids))[0]
        return self.out(x + self.attend(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("activations", ["saved", "replay"])
def test_weights_that_change_between_evaluations_are_read(activations: str) -> None:
    torch.manual_seed(0)
    plain = Reader()
    model = mt.stream(copy.deepcopy(plain), device="cuda", plan={"activations": activations})
    plain = plain.cuda()
    ids = torch.randint(0, 64, (4, 16), device="cuda")
    opts = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    for _ in range(3):
        with torch.no_grad():
            want, found = plain.eval()(ids), model.eval()(ids)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)      # bits, but for the order of a sum
        for m, opt in zip((plain, model), opts):
            m.train()(ids).square().mean().backward()
            opt.step()
            opt.zero_grad()
    for m in (plain, model):
        m.load_state_dict({n: t + 0.1 for n, t in plain.state_dict().items()} if m is plain else plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids), plain.eval()(ids), rtol=1e-5, atol=1e-5)
