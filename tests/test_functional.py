"""torch.func.functional_call and its kin over a streamed model: the weights that are given are used, and afterwards the
model is streamed as before."""
from __future__ import annotations

import copy
from typing import Any

import fusing
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import megatrain_torch as mt
from megatrain_torch.store.state import BoundParameters

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
    return [p.grad.clone() for p in model.parameters()]


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("names", ["", "layers.1", "norm", "embed", "rnn", "scale"])
def test_given_weights_are_used_and_the_model_is_streamed_afterwards(mode: str, names: str) -> None:
    found = []
    for model in pair(mode):
        grads(model)
        model.zero_grad()
        given = others(model, names)
        out = functional_call(model, given, (tokens(),))
        out.square().sum().backward()
        own = [p.grad for p in model.parameters()]
        found.append(([out], [g.grad for g in given.values()], [g.clone() for g in own if g is not None],
                      [g is None for g in own], grads(model)))
    assert same(found[0][0], found[1][0]) and same(found[0][1], found[1][1]) and same(found[0][2], found[1][2])
    assert found[0][3] == found[1][3]
    assert same(found[0][4], found[1][4]), "streamed as before"
    assert all(type(r).__name__ == "Record" for m in model.modules() if isinstance(m._parameters, BoundParameters)
               for r in m._parameters.records.values())


@pytest.mark.parametrize("mode", MODES)
def test_own_parameters_given_are_the_models(mode: str) -> None:
    plain, model = pair(mode)
    for m in (plain, model):
        functional_call(m, dict(m.named_parameters()), (tokens(),)).square().sum().backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    with torch.no_grad():
        assert torch.equal(functional_call(model, others(model), (tokens(),)),
                           functional_call(plain, others(plain), (tokens(),)))
        kept = {n: p.detach() for n, p in model.named_parameters()}
        assert torch.equal(functional_call(model, kept, (tokens(),)), plain(tokens()))


@pytest.mark.parametrize("mode", MODES)
def test_after_an_exception_and_in_a_part_of_the_model(mode: str) -> None:
    plain, model = pair(mode)
    with pytest.raises((TypeError, RuntimeError)):
        functional_call(model, others(model), (tokens(), 1, 2))
    for m in (plain, model):
        functional_call(m.layers[1], {"a.weight": torch.eye(8)}, (torch.ones(2, 8),)).sum().backward()
    assert same([p.grad for p in plain.layers[1].parameters() if p.grad is not None],
                [p.grad for p in model.layers[1].parameters() if p.grad is not None])
    assert same(grads(plain), grads(model))


class Inner(Net):
    """Calls one of its layers with other weights in its own forward: what is put back is what a read gave."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) + functional_call(layer, {"a.weight": torch.eye(8), "b.bias": self.scale}, (x,))
        return self.head(x)


@pytest.mark.parametrize("mode", MODES)
def test_inside_of_a_forward(mode: str) -> None:
    torch.manual_seed(0)
    plain = Inner()
    model = mt.stream(copy.deepcopy(plain), device="cpu", plan={"activations": mode})
    for _ in range(2):
        a: list[Tensor] = []
        b: list[Tensor] = []
        for m, into in ((plain, a), (model, b)):
            m.zero_grad()
            m(tokens()).square().sum().backward()
            into += [p.grad.clone() for p in m.parameters() if p.grad is not None]
        assert same(a, b)


def test_torch_func_grad_vmap_and_jvp_with_all_weights_given() -> None:
    found = []
    for model in pair():
        given = {n: p.detach() for n, p in others(model).items()}

        def loss(params: dict[str, Tensor], ids: Tensor, model: nn.Module = model) -> Tensor:
            return functional_call(model, params, (ids,)).square().mean()

        found.append(list(torch.func.grad(loss)(given, tokens()).values()))
        layer = {n.removeprefix("layers.1."): p for n, p in given.items() if n.startswith("layers.1.")}

        def out(params: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            return functional_call(model.layers[1], params, (torch.ones(3, 8),))

        found.append(list(torch.func.jvp(out, (layer,), (layer,))))
        found.append([torch.func.vmap(out)({n: torch.stack([p, 2 * p]) for n, p in layer.items()})])
    assert all(same(a, b) for a, b in zip(found[:len(found) // 2], found[len(found) // 2:]))


def test_transforms_of_streamed_weights_are_refused_by_name() -> None:
    _, model = pair()
    x = torch.ones(2, 8)
    with pytest.raises(mt.MegatrainError, match="functional_call"):
        torch.func.grad(lambda x: model.layers[0](x).sum())(x)
    with pytest.raises(mt.MegatrainError, match="functional_call"):
        torch.func.grad(lambda w: functional_call(model.layers[0], {"a.weight": w}, (x,)).sum())(torch.eye(8))
    assert same(grads(model), grads(pair()[0]))


def test_running_again_under_other_weights_is_refused() -> None:
    from torch.nn.utils.stateless import _reparametrize_module
    plain, model = pair("replay")
    grads(model)
    loss = model(tokens()).sum()
    with _reparametrize_module(model, others(model)), pytest.raises(mt.MegatrainError, match="run again"):
        loss.backward()
    assert same(grads(plain), grads(model))


@pytest.mark.parametrize("keep", ["saved", "replay"])
def test_templates_and_a_fused_head_leave_it_to_the_models_own_code(keep: str) -> None:
    from situations import llama, text
    plain = llama().train()
    model = mt.stream(copy.deepcopy(plain), device="cpu", plan={"activations": keep}, compute="fused")
    model(**text(0)).loss.backward()
    fusing.all_fused({w.name: w.code for w in mt.model.stream.runtime_of(model).windows if "layers." in w.name})
    given = others(plain)
    one, two = (functional_call(m, given, kwargs=text(0), tie_weights=True).loss for m in (plain, model))
    assert torch.equal(one, two)
    head = {n: p for n, p in given.items() if "lm_head" in n or "layers.0.mlp" in n}
    one, two = (functional_call(m, head, kwargs=text(0)).loss for m in (plain, model))
    assert torch.allclose(one, two, rtol=1e-5) and not torch.allclose(one, plain(**text(0)).loss, rtol=1e-2)
    two.backward()
    one.backward()


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
