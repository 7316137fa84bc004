"""A window whose module is given another class after mt.stream runs that one's forward, as plain torch does."""
from __future__ import annotations

import copy
from typing import Any

import parity
import pytest
import torch
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.base.units import find

WAYS = ["saved", "replay", "replay+host"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Doubled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + torch.sin(self.lin(x))


def built() -> tuple[nn.Module, nn.Module, Any]:
    parity.seed()
    plain = nn.Sequential(Layer(), Layer(), Layer())
    return plain, copy.deepcopy(plain), torch.randn(4, 8)


def grads(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def swap(model: nn.Module, kind: type) -> None:
    model[1].__class__ = kind


@pytest.mark.parametrize("way", WAYS)
def test_a_windows_own_class_may_be_another_after_it_was_streamed(way: str) -> None:
    plain, model, x = built()
    model = mt.stream(model, "cpu", units=["0", "1", "2"], plan={"activations": way}, compute="eager")
    for kind in (Layer, Doubled, Doubled, Layer):
        for m in (plain, model):
            swap(m, kind)
        losses = [m(x).square().mean() for m in (plain, model)]
        assert torch.equal(*losses), kind
        assert all(map(torch.equal, grads(plain, losses[0]), grads(model, losses[1]))), kind


@pytest.mark.parametrize("way", WAYS)
def test_backward_is_that_of_the_class_that_ran(way: str) -> None:
    """The class changes between a forward and its backward."""
    plain, model, x = built()
    model = mt.stream(model, "cpu", units=["0", "1", "2"], plan={"activations": way}, compute="eager")
    for before, after in ((Layer, Doubled), (Doubled, Layer)):
        found = []
        for m in (plain, model):
            swap(m, before)
            loss = m(x).square().mean()
            swap(m, after)
            found.append(grads(m, loss))
        assert all(map(torch.equal, *found)), before

class Gated(Layer):
    pass


@pytest.mark.parametrize("children, windows", [
    ((Layer, Layer, lambda: nn.Linear(8, 8)), ["0", "1", "2"]), ((Layer, Gated), ["0", "1"]),
    ((lambda: nn.Linear(8, 8),) * 3, [""]), ((Layer, lambda: nn.Linear(8, 8)), [""]),
    ((Layer, lambda: nn.Sequential(Layer(), Layer())), ["0", "1.0", "1.1"])])
def test_windows_of_a_sequential_are_its_layers(children: Any, windows: list[str]) -> None:
    """Leaves alone, such as an MLP's, are one window; so are layers that lists inside have already."""
    assert [name for name, _ in find(nn.Sequential(*[make() for make in children])).windows] == windows


@pytest.mark.parametrize("way", WAYS)
def test_backward_is_that_of_the_inner_class_that_ran(way: str) -> None:
    """As above, of a module inside of a window."""
    parity.seed()
    plain = nn.Sequential(nn.Sequential(Layer(), nn.Linear(8, 8)), nn.Linear(8, 8))
    model, x, found = copy.deepcopy(plain), torch.randn(4, 8), []
    model = mt.stream(model, "cpu", units=["0", "1"], plan={"activations": way}, compute="eager")
    for m in (plain, model):
        loss = m(x).square().mean()
        m[0][0].__class__ = Doubled
        found.append(grads(m, loss))
        assert type(m[0][0]) is Doubled, "a run that repeats another leaves what it found"
        found.append(grads(m, m(x).square().mean()))
    assert all(map(torch.equal, *found[::2])) and all(map(torch.equal, *found[1::2]))


CALLS = [0]


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return CALLS[0] * super().forward(x)


def counting(module: nn.Module) -> None:
    module.__class__ = Counting


def patched(module: nn.Module) -> None:
    own = module.forward

    def forward(x: Tensor) -> Tensor:
        CALLS[0] += 1
        return CALLS[0] * own(x)

    module.forward = forward


@pytest.mark.parametrize("change", [counting, patched])
def test_what_another_forward_counts_is_counted_once(change: Any) -> None:
    """A module inside of a window counts in a list of its file's, which the code that was streamed does not name."""
    parity.seed()
    plain = nn.Sequential(nn.Sequential(Layer(), nn.Linear(8, 8)), nn.Linear(8, 8))
    model, x, found = copy.deepcopy(plain), torch.randn(4, 8), []
    model = mt.stream(model, "cpu", units=["0", "1"], plan={"activations": "replay"}, compute="eager")
    for m in (plain, model):
        CALLS[0] = 0
        grads(m, m(x).square().mean())
        change(m[0][0])
        found.append([*grads(m, m(x).square().mean()), *grads(m, m(x).square().mean()), torch.tensor(CALLS)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("way", ["replay", "replay+host"])
def test_a_windows_own_hooks_stay_where_hooks_inside_it_were_there_for_one_forward(way: str) -> None:
    _, model, x = built()
    model, seen = mt.stream(model, "cpu", units=["0", "1", "2"], plan={"activations": way}, compute="eager"), []
    model[1].register_forward_hook(lambda *_: seen.append("its own"))
    inside = model[1].lin.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    loss = model(x).square().mean()
    inside.remove()
    loss.backward()                          # the window runs again, with the hook inside it
    model(x)
    assert seen == ["its own", "its own"] and not model[1].lin._forward_pre_hooks
