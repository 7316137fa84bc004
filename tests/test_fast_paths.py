"""torch's own fast paths for inference: taken where plain torch takes them, to the same bits."""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import doors
import pytest
import torch
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt

pytestmark = pytest.mark.filterwarnings("ignore")

LAYER: dict[str, Any] = dict(d_model=16, nhead=4, dim_feedforward=32, dropout=0.1, batch_first=True)


def encoder(layers: int = 3, norm: bool = True, **kw: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER | kw), layers, norm=nn.LayerNorm(16) if norm else None)


class Wrapped(nn.Module):
    """An encoder inside of a model, whose weights it reads in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attend, self.out = encoder(), nn.ModuleList([Read(), Read()]), nn.Linear(16, 4)

    def forward(self, x: Tensor, **kw: Any) -> Tensor:
        x = self.inner(x, **kw)
        for layer in self.attend:
            x = layer(x)
        return self.out(x)


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
        self.rnn = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return x + self.rnn(x)[0]


class Bare(nn.Module):
    """Attention by weights that are read outside of their windows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.attend = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)]), nn.MultiheadAttention(
            16, 4, batch_first=True)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        a = self.attend
        for layer in self.layers:
            x = layer(x)
        return torch._native_multi_head_attention(x, x, x, 16, 4, a.in_proj_weight, a.in_proj_bias, a.out_proj.weight,
                                                  a.out_proj.bias)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": encoder, "one layer": lambda: encoder(1), "no norm": lambda: encoder(norm=False),
    "norm first": lambda: encoder(norm_first=True), "gelu": lambda: encoder(activation="gelu"),
    "odd heads": lambda: encoder(nhead=1), "no bias": lambda: encoder(bias=False),
    "in a model": Wrapped, "bare": Bare, "layer": lambda: nn.TransformerEncoderLayer(**LAYER),
    "in a list": lambda: nn.Sequential(encoder(2), nn.Linear(16, 16))}


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 4:], padding[1, 6:] = True, True
    return torch.randn(3, 7, 16, generator=g), padding


def outputs(model: nn.Module, name: str, mode: str) -> list[Tensor]:
    x, padding = inputs()
    calls: list[dict[str, Any]] = [{}]
    if name not in ("in a list", "bare"):
        calls += [{"src_key_padding_mask": padding}]
        if name != "in a model":
            calls += [{("mask" if isinstance(model, nn.TransformerEncoder) else "src_mask"):
                       nn.Transformer.generate_square_subsequent_mask(7)}]
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": contextlib.nullcontext,
             "autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
    with modes["no_grad" if mode in ("frozen", "train") else mode](), contextlib.ExitStack() as stack:
        if mode == "frozen":
            stack.enter_context(torch.enable_grad())
        return [model(x, **kw).detach() for kw in calls]


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad", "frozen", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_as_plain_torch(name: str, mode: str) -> None:
    if name == "bare" and mode in ("grad", "autocast"):
        pytest.skip("torch has no gradient of that function, and no autocast")
    torch.manual_seed(0)
    plain = MODELS[name]().eval()
    if mode == "frozen":
        plain.requires_grad_(False)
    model = mt.stream(copy.deepcopy(plain), device="cpu")
    want = outputs(plain, name, mode)
    for _ in range(2):
        assert all(map(torch.equal, want, outputs(model, name, mode)))
    model.load_state_dict({n: t.clone() for n, t in plain.state_dict().items()})
    assert all(map(torch.equal, want, outputs(model, name, mode)))
    if "encoder" in name and mode in ("no_grad", "inference", "frozen"):
        assert not want[1][0, 5].sub(plain.norm(torch.zeros(16))).any(), "zeros at padding"


def test_a_frozen_weight_read_outside_of_windows_has_no_gradient_and_passes_one_on() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 16)
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
            self.embed.requires_grad_(False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.linear(x, self.embed.weight) @ self.embed.weight

    torch.manual_seed(0)
    plain = Tied()
    model = mt.stream(copy.deepcopy(plain), device="cpu")
    for m in (plain, model):
        m(torch.arange(8)).square().sum().backward()
    assert model.embed.weight.grad is None
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.layers.parameters(), model.layers.parameters()))


def cudnn_like(self: nn.RNNBase) -> None:
    """What flatten_parameters does on CUDA: the tensors' memory becomes that of one buffer."""
    with torch.no_grad():
        sizes = [w.numel() for w in self._flat_weights]
        for w, part in zip(self._flat_weights, torch.cat([w.flatten() for w in self._flat_weights]).split(sizes)):
            w.set_(part.view(w.shape))


@pytest.mark.parametrize("activations", ["saved", "replay"])
def test_a_recurrent_layer_that_flattens_its_weights_reads_new_ones(activations: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = Wrapped().eval()
    model = doors.stream(copy.deepcopy(plain), device="cpu", plan={"activations": activations, "debug": {"poison": True}})
    other = {n: p + 0.1 for n, p in plain.state_dict().items()}
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", cudnn_like)
    x, _ = inputs()
    for step in range(3):
        with torch.no_grad():
            assert torch.equal(plain(x), model(x)), step
        for m, opt in zip((plain, model), opts):
            update(m(x).square().mean(), opt)
    for m in (plain, model):
        m.load_state_dict(other)
    with torch.no_grad():
        assert torch.equal(plain(x), model(x)), "after load_state_dict"
