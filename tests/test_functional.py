"""What is put in the place of a streamed parameter: its own, by functional_call or a parametrization, and nothing else."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import megatrain_torch as mt

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Net(nn.Module):
    """Tied, with a weight that is read outside of windows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList([Layer() for _ in range(3)])
        self.rnn, self.head, self.scale = nn.LSTM(8, 8), nn.Linear(8, 16), nn.Parameter(torch.ones(8))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.rnn(x)[0] * self.scale)


MODES = ["saved", "replay"]


def pair(mode: str = "saved", **kw: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net()
    return plain, mt.stream(copy.deepcopy(plain), device="cpu", plan={"activations": mode}, **kw)


def tokens() -> Tensor:
    return torch.randint(0, 16, (2, 6), generator=torch.Generator().manual_seed(1))


def others(model: nn.Module, names: str = "") -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(2)
    return {n: torch.randn(p.shape, generator=rng).requires_grad_() for n, p in model.named_parameters() if names in n}


def grads(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(tokens()).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("mode", MODES)
def test_other_weights_are_refused_and_the_model_is_streamed_as_before(mode: str) -> None:
    plain, model = pair(mode)
    for names in ("", "layers.1", "norm", "embed", "rnn", "scale"):
        with pytest.raises(mt.MegatrainError, match="a streamed parameter cannot be replaced"):
            functional_call(model, others(model, names), (tokens(),))
        assert same(grads(plain), grads(model))
    model.layers[2].register_forward_hook(
        lambda *_: functional_call(model.layers[1], {"a.weight": torch.eye(8)}, (torch.ones(2, 8),)))
    for name, value in (("weight", nn.Parameter(torch.eye(8))), ("bias", None)):
        with pytest.raises(mt.MegatrainError, match=f"layers.0.a.{name}: a streamed parameter cannot be replaced"):
            setattr(model.layers[0].a, name, value)
        with pytest.raises(mt.MegatrainError, match=r"layers.1.a.weight: a streamed parameter cannot be replaced"):
            model(tokens())
    model.layers[2]._forward_hooks.clear()
    assert same(grads(plain), grads(model))


@pytest.mark.parametrize("mode", MODES)
def test_own_parameters_given_are_the_models(mode: str) -> None:
    plain, model = pair(mode)
    for m in (plain, model):
        functional_call(m, dict(m.named_parameters()), (tokens(),)).square().sum().backward()
        m.layers[0].a.weight = m.layers[0].a.weight
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert same(grads(plain), grads(model))


class Inner(Net):
    """Puts a weight back that a read in its own forward gave."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) + functional_call(layer, {"a.weight": layer.a.weight}, (x,))
        return self.head(x)


@pytest.mark.parametrize("mode", MODES)
def test_inside_of_a_forward(mode: str) -> None:
    torch.manual_seed(0)
    plain = Inner()
    model = mt.stream(copy.deepcopy(plain), device="cpu", plan={"activations": mode})
    for _ in range(2):
        assert same(grads(plain), grads(model))


def test_transforms_of_streamed_weights_are_refused_by_name() -> None:
    _, model = pair()
    x = torch.ones(2, 8)
    with pytest.raises(mt.MegatrainError, match=r"torch\.func"):
        torch.func.grad(lambda x: model.layers[0](x).sum())(x)
    with pytest.raises(mt.MegatrainError, match=r"torch\.func"):
        torch.func.grad(lambda w: functional_call(model.layers[0], {"a.weight": w}, (x,)).sum())(torch.eye(8))
    assert same(grads(model), grads(pair()[0]))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w + w.t()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["before", "after", "spectral", "pruned", "removed"])
def test_parametrizations(mode: str, what: str) -> None:
    from torch.nn.utils import parametrizations, parametrize, prune

    def change(layer: nn.Module) -> None:
        if what == "spectral":
            torch.manual_seed(3)
            parametrizations.spectral_norm(layer.a)
        elif what == "pruned":
            torch.manual_seed(3)
            prune.random_unstructured(layer.a, "weight", 0.5)
        else:
            parametrize.register_parametrization(layer.a, "weight", Symmetric())

    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    change(plain.layers[1])
    if what == "before":
        change(model.layers[1])
    mt.stream(model, device="cpu", plan={"activations": mode})
    if what != "before":
        grads(model)
        change(model.layers[1])
    for _ in range(3):
        assert same(grads(plain), grads(model))
    if what == "removed":
        for m in (plain, model):
            parametrize.remove_parametrizations(m.layers[1].a, "weight", leave_parametrized=False)
        assert same(grads(plain), grads(model))
