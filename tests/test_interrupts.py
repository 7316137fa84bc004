"""Ctrl-C while the engine waits: seen at once, and the engine goes on as if it had not been."""
from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_core import SET, Slots, entry, unit_of
from test_forks import batch, streamed, train

import megatrain_torch as mt
from megatrain_torch._core import DTYPES, Engine
from megatrain_torch.model.stream import runtime_of

NAP_US, SLOW_SEED = 2_200_000, 28             # gradients of the engine below take a second to be home
PRESSED_S, AT_ONCE_S = 0.1, 1.0


@contextlib.contextmanager
def pressed(after: float = PRESSED_S, again: bool = False) -> Iterator[None]:
    """Ctrl-C so many seconds from now. again: and each second from then on, as a user does whose first was lost: Python
    drops what is raised in a weak reference's callback or in __del__."""
    begun, over = threading.Event(), threading.Event()

    def press() -> None:
        begun.wait()
        while (again or not presses) and not over.wait(1.0 if presses else after):
            presses.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    presses: list[int] = []
    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        begun.set()                          # pressed while the thread still starts, nobody would end it
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(autouse=True)
def python_handles_it() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Slow:
    """An engine. Gradients of its unit are on their way, which takes a while; so is the update that waits for them."""

    def __init__(self) -> None:
        self.engine = Engine("cpu", delay_us=NAP_US, seed=SLOW_SEED)
        self.slots, self.gradient = Slots(2), torch.ones(1000)
        unit_of(self.engine, DTYPES["F32"], torch.ones(1000))
        self.engine.open_slots(self.slots.pairs(), self.slots)
        self.engine.begin()
        self.put()
        self.ticket = self.engine.adam([(0, [entry()])], 1.0, 0)

    def put(self) -> int:
        return self.engine.offload(0, [(0, self.gradient.data_ptr(), SET, False)], 0)


WAITS: dict[str, Callable[[Slow], Any]] = {
    "wait_updates": lambda s: s.engine.wait_updates(0),
    "norm": lambda s: s.engine.norm(s.ticket),
    "acquire": lambda s: s.engine.acquire(0, 0), "offload": lambda s: s.put(),
    "save_begin": lambda s: s.engine.save_begin([], [(0, 1)], 0, 1, 1)}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_ends_by_ctrl_c_and_can_be_made_again(name: str) -> None:
    slow = Slow()
    begun = time.monotonic()
    with pressed(), pytest.raises(KeyboardInterrupt):
        WAITS[name](slow)
    assert PRESSED_S / 2 < time.monotonic() - begun < AT_ONCE_S
    WAITS[name](slow)
    slow.engine.drain()
    slow.engine.check()
    slow.engine.close()


def test_what_does_not_raise_goes_on_waiting_and_may_use_the_engine() -> None:
    slow, seen = Slow(), []
    signal.signal(signal.SIGINT, lambda *_: seen.append((time.monotonic(), slow.engine.stats(), slow.engine.version(0))))
    begun = time.monotonic()
    with pressed():
        norm, skipped = slow.engine.norm(slow.ticket)
    assert len(seen) == 1 and seen[0][0] - begun < AT_ONCE_S
    assert (round(norm, 3), skipped) == (31.623, 0)
    slow.engine.close()


def test_who_waits_in_another_thread_is_not_disturbed() -> None:
    slow, ended = Slow(), []
    thread = threading.Thread(target=lambda: ended.append(slow.engine.norm(slow.ticket)))
    thread.start()
    with pressed(0.05), pytest.raises(KeyboardInterrupt):
        time.sleep(5)
    until = time.monotonic() + 10
    while not ended and time.monotonic() < until:            # an interrupted join would take it for dead
        time.sleep(0.01)
    assert len(ended) == 1
    slow.engine.close()


def test_what_a_step_came_to_is_known_after_its_norm_was_interrupted(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = streamed("ram", tmp_path)
    model(batch()).sum().mul(float("inf")).backward()
    opt.step()
    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setattr(opt, "_handed", [(opt._handed[0][0], lambda: signal.raise_signal(signal.SIGINT))])
        print(opt.grad_norm)
    assert opt.skipped_steps == 1 and not opt.grad_norm < float("inf")


@pytest.mark.parametrize("home", ["vram", "disk+weights"])
def test_training_goes_on_from_a_checkpoint_after_ctrl_c_at_any_time(home: str, tmp_path: Path) -> None:
    model, opt = streamed(home, tmp_path)
    train(model, opt, 1)
    mt.save(model, opt, tmp_path / "run")
    expected = train(model, opt, 3)
    for i in range(5):
        with contextlib.suppress(KeyboardInterrupt), pressed(0.005 * i + 0.001, again=True):
            while True:
                train(model, opt, 3)
        opt.zero_grad()
        mt.load(model, opt, tmp_path / "run")
        assert train(model, opt, 3) == expected


# ---- who waits for whom: a save, a reader of weights on the host, counters ----

def penalty(model: torch.nn.Module) -> torch.Tensor:
    """On the host: the graph keeps the weights themselves."""
    return sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("home", ["vram", "disk+weights"])
def test_weights_in_a_graph_on_the_host_outlive_a_save(home: str, tmp_path: Path) -> None:
    model, opt = streamed(home, tmp_path)
    train(model, opt, 2)
    loss = penalty(model)
    mt.save(model, opt, tmp_path / "run", asynchronous=True).wait()
    mt.save(model, opt, tmp_path / "run").wait()
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, 2 * p.detach()), name
        assert p.grad.abs().sum() > 0


def test_memory_of_weights_that_were_only_saved_is_given_back(tmp_path: Path) -> None:
    model, opt = streamed("disk+weights", tmp_path, width=256)
    train(model, opt, 2)
    core = runtime_of(model).core
    before = core.host_bytes(0)
    mt.save(model, opt, tmp_path / "run").wait()
    assert core.host_bytes(0) == before == 0


def test_counters_are_read_while_a_step_waits(tmp_path: Path) -> None:
    model, opt = streamed("disk", tmp_path, width=64)
    core, stop, looks = runtime_of(model).core, threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            looks.append((core.stats()["disk_read_bytes"], core.disk_file()[1], core.swap_bytes(), core.host_bytes()))

    thread = threading.Thread(target=look)
    thread.start()
    train(model, opt, 4)
    stop.set()
    thread.join()
    assert [n for n, *_ in looks] == sorted(n for n, *_ in looks)
    with torch.no_grad():
        assert torch.isfinite(model(batch())).all()
