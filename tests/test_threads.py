"""Two threads in one model: one waits for the other, a while, and is refused by name; what is right stays right."""
from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import Chain

import megatrain_torch as mt
from megatrain_torch.graph import door
from megatrain_torch.model.stream import runtime_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATIENCE_S", 0.1)


class Slow(nn.Linear):
    """Stops in the middle of its forward, or of its backward, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.there, self.go, self.stops = threading.Event(), threading.Event(), ""

    def stop(self, where: str) -> None:
        if self.stops == where:
            self.stops = ""
            self.there.set()
            assert self.go.wait(20)

    def forward(self, x: Tensor) -> Tensor:
        self.stop("forward")
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.stop("backward"))
        return out


def made(plan: Any = "saved") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    models = [Chain(nn.Linear(8, 8), *(Slow() for _ in range(4)), nn.Linear(8, 8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models[0], mt.stream(models[1], device="cpu", plan={"activations": plan, "slots": 2})


def in_thread(call: Callable[[], Any], name: str = "other") -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(30)
    return found[0]


def while_stopped(model: nn.Module, where: str, work: Callable[[], Any], meanwhile: Callable[[], Any]) -> tuple[Any, Any]:
    """What `work` gives in a thread that is stopped in the third layer, and what `meanwhile` gives then, in this one."""
    layer, found = model.layers[3], []
    layer.stops = where
    layer.there.clear()
    layer.go.clear()
    thread = threading.Thread(target=lambda: found.append(in_thread(work, "first")))
    thread.start()
    assert layer.there.wait(20)
    try:
        other = in_thread(meanwhile, "second")
    finally:
        layer.go.set()
        thread.join(30)
    return found[0], other


def forward(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.ones(2, 8))


def grads(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("second", [forward, lambda m: m(torch.ones(2, 8)).sum().backward()], ids=["a forward", "a step"])
def test_a_second_thread_is_refused_and_the_first_is_right(where: str, second: Callable) -> None:
    plain, model = made()
    mine, other = while_stopped(model, where, lambda: grads(model), lambda: second(model))
    assert isinstance(other, mt.MegatrainError)
    assert all(word in str(other) for word in ("Chain", "'first'", "'second'", where))
    assert all(map(torch.equal, mine, grads(plain)))
    assert all(map(torch.equal, in_thread(lambda: grads(model)), grads(plain))), "and then it is free"


def test_a_backward_is_refused_beside_a_forward() -> None:
    plain, model = made()
    loss = model(torch.ones(2, 8)).sum()
    mine, other = while_stopped(model, "forward", lambda: forward(model), loss.backward)
    assert isinstance(other, mt.MegatrainError) and "'second' runs its backward" in str(other)
    assert torch.equal(mine, forward(plain))


def test_a_part_of_the_model_counts_as_the_model() -> None:
    plain, model = made()
    mine, other = while_stopped(model, "forward", lambda: forward(model), lambda: model.layers[0](torch.ones(2, 8)))
    assert isinstance(other, mt.MegatrainError)
    assert torch.equal(mine, forward(plain))


@pytest.mark.parametrize("plan", ["saved", "replay"])
def test_a_thread_that_evaluates_waits_for_one_that_trains_and_sees_weights_of_one_step(
        plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATIENCE_S", 20.0)
    model = made(plan)[1]
    found: list[Any] = []
    over = threading.Event()

    def evaluate() -> None:
        while not over.is_set():
            found.append(forward(model))

    def train(model: nn.Module, opt: Any) -> list[Tensor]:
        seen = [forward(model)]
        for _ in range(20):
            model(torch.ones(2, 8)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            seen.append(forward(model))
        return seen

    other = threading.Thread(target=evaluate)
    other.start()
    try:
        mine = train(model, mt.AdamW(model.parameters(), lr=0.1))
    finally:
        over.set()
        other.join(30)
    assert found and all(any(map(out.equal, mine)) for out in found), "of one step's weights"
    assert all(map(torch.equal, mine, train(*(lambda m: (m, mt.AdamW(m.parameters(), lr=0.1)))(made(plan)[1]))))


@pytest.mark.parametrize("plan", ["saved", "replay"])
def test_threads_take_turns(plan: str) -> None:
    plain, model = made(plan)
    lock = threading.Lock()

    def turn() -> bool:
        with lock:
            return torch.equal(forward(model), forward(plain)) and all(map(torch.equal, grads(model), grads(plain)))

    threads = []
    found: list[bool] = []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: found.extend(turn() for _ in range(3))))
        threads[-1].start()
    for t in threads:
        t.join(30)
    assert found == [True] * 12


def test_a_forward_here_and_its_backward_in_another_thread() -> None:
    plain, model = made()
    loss = model(torch.ones(2, 8)).sum()
    in_thread(loss.backward)
    assert all(map(torch.equal, [p.grad for p in model.parameters()], grads(plain)))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_thread_that_failed_is_gone(where: str) -> None:
    plain, model = made()

    def fail(*_: Any) -> None:
        raise ValueError("no")

    if where == "forward":
        handle = model.layers[3].register_forward_pre_hook(fail)
    else:
        handle = model.layers[2].register_full_backward_pre_hook(fail)
    assert isinstance(in_thread(lambda: grads(model)), ValueError)
    handle.remove()
    assert all(map(torch.equal, in_thread(lambda: grads(model)), grads(plain)))
    assert not runtime_of(model).door.tasks


def test_models_in_two_threads_each_their_own() -> None:
    (plain, one), (_, two) = made(), made()
    mine, other = while_stopped(one, "backward", lambda: grads(one), lambda: grads(two))
    assert all(map(torch.equal, mine, grads(plain))) and all(map(torch.equal, other, grads(plain)))


def test_a_gradient_inside_of_a_forward_by_autograds_own_thread() -> None:
    """As on CUDA: the thread in the forward waits, and another one runs the backward."""
    _, model = made()
    way_in = runtime_of(model).door
    assert way_in.enter(-1)
    assert isinstance(in_thread(lambda: way_in.enter(7)), mt.MegatrainError), "this thread does not wait"

    seen: list[Any] = []
    out = torch.ones(1, requires_grad=True).clone()
    out.register_hook(lambda _: seen.append(in_thread(lambda: way_in.enter(7))))
    out.backward()
    assert seen == [False], "it waits for the other, which goes in with it"
    way_in.leave()


def test_a_step_in_autograds_own_thread_goes_with_the_thread_that_waits_for_it() -> None:
    """As in a callback at the end of a backward on CUDA, which is told of no backward."""
    way_in, over = runtime_of(made()[1]).door, threading.Event()

    def step() -> None:
        with way_in.held(-1):
            over.set()

    assert way_in.enter(-1)
    _thread.start_new_thread(step, ())                   # not of Python's threading, as autograd's
    assert over.wait(10)
    way_in.leave()
