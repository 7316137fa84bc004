"""Weights and gradients that hooks, or a forward, change while a forward or a backward runs: as in plain torch."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several import _case
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt
from megatrain_torch.base.codes import to_fp8
from megatrain_torch.graph import frames
from megatrain_torch.model import ring

CASE = _case("wide")


def in_pre_hook(change: Callable[[nn.Module, nn.Module], Any], at: int = 1) -> Callable[[nn.Module], Any]:
    return lambda m: m.model.layers[at].register_forward_pre_hook(lambda mod, _: change(m, mod))


def in_backward_hook(change: Callable[[nn.Module, nn.Module], Any], at: int) -> Callable[[nn.Module], Any]:
    return lambda m: m.model.layers[at].register_full_backward_hook(lambda mod, *_: change(m, mod))


def halve(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(0.5)


def ones(w: Tensor) -> None:
    with torch.no_grad():
        w.copy_(torch.ones_like(w))


def out(w: Tensor) -> None:
    with torch.no_grad():
        torch.add(w, 1.0, out=w)


def give_grad(w: Tensor) -> None:
    w.grad = torch.ones_like(w)


def zero_grad(w: Tensor) -> None:
    if w.grad is not None:
        w.grad.zero_()


HABITS = {
    "another's weights": in_pre_hook(lambda m, _: halve(m.lm_head.weight)),
    "own weights": in_pre_hook(lambda _, mod: halve(mod.mlp.down_proj.weight)),
    "own weights by .data": in_pre_hook(lambda _, mod: halve(mod.mlp.down_proj.weight.data)),
    "another's by .data": in_pre_hook(lambda m, _: halve(m.lm_head.weight.data)),
    "other values": in_pre_hook(lambda m, _: ones(m.lm_head.weight)),
    "out=": in_pre_hook(lambda m, _: out(m.lm_head.weight)),
    "in backward": in_backward_hook(lambda m, _: halve(m.model.norm.weight), 0),
    "a gradient that is there": in_backward_hook(lambda m, _: give_grad(m.lm_head.weight), -1),
    "a gradient to come": in_backward_hook(lambda m, _: give_grad(m.model.layers[0].mlp.down_proj.weight), -1),
    "an own gradient": in_backward_hook(lambda _, mod: give_grad(mod.self_attn.q_proj.weight), -1),
    "a gradient's values": in_backward_hook(lambda m, _: zero_grad(m.lm_head.weight), 0),
}


def trained(model: nn.Module, habit: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    handle, found = habit(model), {}
    for number in range(2):
        loss = CASE.loss(model, CASE.batch(number))
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    handle.remove()
    for name, p in model.named_parameters():
        found[name], found[f"grad {name}"] = p.detach().clone(), p.grad.clone()
    return found


@pytest.mark.parametrize("name", HABITS)
def test_a_change_while_the_model_runs_is_kept(name: str) -> None:
    plain, streamed = trained(CASE.build(), HABITS[name]), trained(mt.stream(CASE.build(), "cpu"), HABITS[name])
    assert [key for key in plain if not torch.equal(plain[key], streamed[key])] == []


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16, max_norm=1.0)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x))).square().mean()


@pytest.mark.parametrize("homes", ["ram", "vram"])
def test_an_embedding_with_a_largest_norm(homes: str) -> None:
    found = []
    for streamed in (False, True):
        model = Normed()
        if streamed:
            model = mt.stream(model, "cpu", units=["embedding", "body", "head"], plan={"homes": homes})
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        for number in range(3):
            update(model(torch.arange(number, number + 40).view(4, 10)), opt)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


class Shrinks(nn.Module):
    """Changes its weights in its own forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight, self.other = how, nn.Parameter(torch.randn(8, 8) * 0.3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "own":
            self.weight.data.mul_(0.9)
        if self.how == "own, set":
            self.weight.data = self.weight.data * 0.9
        if self.how == "a layer's, in a function":
            clamp(self.other)
        x = x + self.other(nn.functional.linear(x, self.weight))
        if self.how == "afterwards":
            self.weight.data[0].zero_()
        return x + self.weight.data.sum() if self.how == "read" else x


def clamp(layer: nn.Module) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


def shrinking(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Shrinks("" if how == "a hook" else how) for _ in range(2)))
    if how == "a hook":
        model[1].other.register_forward_pre_hook(lambda mod, _: clamp(mod))
    return model


DATA_HABITS = ("own", "own, set", "a layer's, in a function", "afterwards", "a hook", "read")


@pytest.mark.parametrize("how", DATA_HABITS)
def test_what_a_forward_changes_by_data_is_kept(how: str) -> None:
    plain, streamed = shrinking(how), mt.stream(shrinking(how), "cpu")
    with torch.no_grad():
        for number in range(2):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
            assert torch.equal(plain(x), streamed(x))
    assert all(torch.equal(a, b.detach()) for a, b in zip(plain.parameters(), streamed.parameters()))


@pytest.mark.parametrize("mode", ["saved", "replay"])
@pytest.mark.parametrize("how", DATA_HABITS)
def test_where_backward_needs_what_a_forward_changed_it_says_so(how: str, mode: str) -> None:
    streamed = mt.stream(shrinking(how), "cpu", plan={"activations": mode})
    loss = streamed(torch.ones(3, 8)).square().mean()
    if how == "read":
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="leave weights as they are in the forward of a module that trains"):
            loss.backward()


class Reads(nn.Module):
    """Autograd saves its weights themselves, not views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512))
        self.frozen = nn.Parameter(torch.randn(512), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.frozen + self.weight.data.mean()


@pytest.mark.parametrize("mode", ["saved", "saved+host", "replay"])
def test_code_that_reads_data_holds_no_slot(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all that the model has would lie on the device in the end, a slot's memory for each unit."""
    held: list[int] = []
    own = ring.Ring._renew
    monkeypatch.setattr(ring.Ring, "_renew", lambda self, slot: held.append(slot) or own(self, slot))
    torch.manual_seed(0)
    model = nn.Sequential(*(Reads() for _ in range(6)))
    streamed = mt.stream(copy.deepcopy(model), "cpu", units=[*"012345"], plan={"activations": mode, "slots": 2})
    for m in (model, streamed):
        m(torch.ones(4, 512)).square().mean().backward()
    assert not held
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), streamed.parameters()) if a.requires_grad)


def test_code_that_reads_data_keeps_no_weight_made_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[type] = []
    own = frames.keep
    monkeypatch.setattr(frames, "keep", lambda t: kept.append(type(t)) or own(t))
    model = nn.Sequential(*(Reads() for _ in range(2)))
    for m in model:
        m.frozen = nn.Parameter(to_fp8(torch.randn(256, 512)), requires_grad=False)
    mt.stream(model, "cpu", units=["0", "1"], plan={"activations": "saved"})(torch.ones(256, 512)).sum().backward()
    assert set(kept) == {Tensor}             # products alone; not what a weight is meanwhile


def test_data_of_another_shape_is_refused_in_a_forward() -> None:
    class Grows(Shrinks):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = torch.zeros(1, 8)
            return x

    streamed = mt.stream(nn.Sequential(Grows(""), Grows("")), "cpu")
    with pytest.raises(mt.MegatrainError, match="does not fit its streamed weight"):
        streamed(torch.ones(3, 8))
