"""What a forward does besides its output: run again, it sees what the first saw, and leaves what plain torch leaves."""
from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import parity
import pytest
import torch
from torch import Tensor, nn
from zoo import Chain

import megatrain_torch as mt

CALLS, LOG = 0, []
TABLE: dict[str, Any] = {"n": 0, "inner": {"seen": []}}


@dataclass
class Meter:
    n: int = 0
    rows: list[Any] = field(default_factory=list)

    def tick(self) -> int:
        self.n += 1
        self.rows.append(self.n)
        return self.n


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


METER, ROW, ARRAY, NUMBERS = Meter(), torch.zeros(1), np.zeros(1), itertools.count(1)


def _counter() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


counted = _counter()


def itself() -> None:
    """Has an attribute."""


class Layer(nn.Module):
    count = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin, self.what = nn.Linear(8, 8), what
        self.calls, self.flag, self.log, self.seen, self.bag = 0, False, [], {}, set()
        self.queue, self.nested = collections.deque(maxlen=3), {"a": [{"n": 0}]}
        self.meter, self.slotted, self.array = Meter(), Slotted(), np.zeros(2)
        self.scale, self.big = torch.ones(1), torch.ones(70_000)
        self.rng, self.generator, self.drawn = random.Random(3), torch.Generator(), np.random.default_rng(3)
        self.generator.manual_seed(4)
        self.counter = _counter()
        if what == "iterator":
            self.numbers = itertools.count(1)

    def factor(self) -> Any:
        """By a name that no code has."""
        return getattr(self, f"do_{self.what}")()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x * self.factor()))

    def do_number(self) -> Any:
        self.calls += 1
        return self.calls

    def do_flag(self) -> Any:
        self.flag = not self.flag
        return 2.0 if self.flag else 0.5

    def do_late(self) -> Any:
        """Changes nothing in its first calls."""
        self.calls += 1
        if self.calls > 1:
            self.flag, self.later = True, [self.calls]
        return 3.0 if self.flag else 1.0

    def do_list(self) -> Any:
        self.log.append(len(self.log))
        return len(self.log)

    def do_dict(self) -> Any:
        self.seen[len(self.seen)] = 1
        return len(self.seen)

    def do_set(self) -> Any:
        self.bag.add(len(self.bag))
        return len(self.bag)

    def do_deque(self) -> Any:
        self.queue.append(len(self.queue) + (self.queue[-1] if self.queue else 0))
        return 1 + self.queue[0]

    def do_nested(self) -> Any:
        self.nested["a"][0]["n"] += 1
        return self.nested["a"][0]["n"]

    def do_object(self) -> Any:
        return self.meter.tick() + len(self.meter.rows)

    def do_slots(self) -> Any:
        self.slotted.n += 1
        return self.slotted.n

    def do_array(self) -> Any:
        self.array += 1
        return float(self.array[0])

    def do_tensor(self) -> Any:
        self.scale += 1
        return self.scale.item()

    def do_big(self) -> Any:
        self.big.add_(1)
        return self.big[0].item()

    def do_new(self) -> Any:
        """A tensor that is another one each time, and is written in place later."""
        self.scale = self.scale.clone()
        self.scale.mul_(1.5)
        return self.scale.item()

    def do_class(self) -> Any:
        Layer.count += 1
        return Layer.count

    def do_fresh(self) -> Any:
        Layer.made = getattr(Layer, "made", 0) + 1
        return Layer.made

    def do_type(self) -> Any:
        type(self).count += 2
        return type(self).count

    def do_global(self) -> Any:
        global CALLS
        CALLS += 1
        return CALLS

    def do_globals(self) -> Any:
        LOG.append(1)
        TABLE["n"] += 1
        TABLE["inner"]["seen"].append(2)
        return len(LOG) + TABLE["n"]

    def do_meter(self) -> Any:
        return METER.tick()

    def do_random(self) -> Any:
        return random.random() + 0.5

    def do_numpy(self) -> Any:
        return float(np.random.rand()) + 0.5

    def do_rng(self) -> Any:
        return self.rng.random() + float(torch.rand((), generator=self.generator)) + float(self.drawn.random())

    def do_iterator(self) -> Any:
        return next(self.numbers)

    def do_default(self, kept: list[int] = []) -> Any:          # noqa: B006
        kept.append(1)
        return len(kept)

    def do_function(self) -> Any:
        itself.calls = getattr(itself, "calls", 0) + 1
        return itself.calls

    def do_held(self) -> Any:
        return self.counter()

    def do_buffer(self) -> Any:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(3))
            return 2.0
        self.table.add_(1)
        return self.table[0].item()

    def do_arrays(self) -> Any:
        ROW.add_(1)
        ARRAY[0] += 1
        return ROW.item() + ARRAY[0].item()

    def do_cell(self) -> Any:
        return counted()


class Counting(Layer):
    def do_count(self) -> Any:
        return next(NUMBERS)


# What dynamo cannot follow: these run again, and give another output.
UNFOLLOWED = {"array", "arrays", "function", "numpy", "random", "rng"}
WHAT = [n[3:] for n in (*vars(Layer), "do_count") if n.startswith("do_")]


def net(what: str) -> nn.Module:
    return Chain(*((Counting if what == "count" else Layer)(what) for _ in range(3)))


def reset() -> None:
    global CALLS, counted, NUMBERS
    NUMBERS = itertools.count(1)
    ROW.zero_()
    ARRAY[:] = 0
    itself.calls = 0
    Layer.do_default.__defaults__[0].clear()
    CALLS, counted = 0, _counter()
    LOG.clear()
    TABLE.update(n=0, inner={"seen": []})
    METER.n, METER.rows = 0, []
    Layer.count = 0
    if "made" in vars(Layer):
        del Layer.made
    parity.seed(1)


def left(model: nn.Module) -> Any:
    """All that a step leaves behind."""
    kinds = bool, int, float, list, dict, set, collections.deque, Meter
    found: list[Any] = [ROW.item(), ARRAY.tolist(), str(NUMBERS), itself.calls, CALLS, LOG, TABLE, METER,
                        Layer.count, Layer.do_default.__defaults__, hash(random.getstate()), np.random.get_state()[2:],
                        counted.__closure__[0].cell_contents]
    for layer in model.layers:
        found += [{k: v for k, v in vars(layer).items() if not k.startswith("_") and type(v) in kinds}]
        found += [layer.slotted.n, hash(layer.rng.getstate()), layer.drawn.bit_generator.state, layer.array.tolist(),
                  hash(layer.generator.get_state().numpy().tobytes()), layer.scale.item(), layer.big[0].item(),
                  str(getattr(layer, "numbers", 0)), layer.counter.__closure__[0].cell_contents,
                  [b.tolist() for b in layer.buffers()]]
    return copy.deepcopy(found)


def run(model: nn.Module, steps: int = 2) -> tuple[list[Any], list[Tensor]]:
    found, grads = [], []
    for i in range(steps):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(i))
        model.zero_grad()
        model(x).square().sum().backward()
        grads += [p.grad.clone() for p in model.parameters()]
        found.append(left(model))
    return found, grads


@functools.cache
def wanted(what: str) -> Any:
    """Of plain torch."""
    torch.manual_seed(0)
    plain = net(what)
    reset()
    return run(plain)


@pytest.mark.parametrize("what", WHAT)
def test_gradients_and_what_is_left_are_plain_torchs(what: str) -> None:
    want, grads = wanted(what)
    torch.manual_seed(0)
    model = mt.stream(net(what), device="cpu", plan={"activations": "replay"})
    reset()
    if what in UNFOLLOWED:
        with pytest.raises(mt.MegatrainError, match=r"^layers\..*does not repeat itself.*'saved'"):
            run(model)
        return
    with pytest.warns(UserWarning, match="keeps its activations"):
        found, mine = run(model)
    assert all(map(torch.equal, grads, mine)), "gradients"
    assert found == want, "what is left"
    for window in mt.model.stream.runtime_of(model).windows:
        assert window.writes and window.writes in mt.explain(model)
        assert window.keeps == ("replay" if what == "buffer" else "saved"), "but what it did at its first call alone"


@pytest.mark.parametrize("change", ["eval", "number", "module", "tensor", "class"])
def test_what_is_changed_between_forward_and_backward_is_an_error_by_name(change: str) -> None:
    class Drops(nn.Module):
        power = 2

        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop, self.act, self.gain = nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), 2.0
            self.table = {"gain": torch.full((8,), 2.0)}

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.drop(self.lin(x)) * self.gain * self.table["gain"]) ** self.power

    changes: dict[str, Callable[[Any], Any]] = {
        "eval": lambda layer: layer.eval(), "number": lambda layer: setattr(layer, "gain", 7.0),
        "module": lambda layer: setattr(layer, "act", nn.ReLU()), "class": lambda layer: setattr(Drops, "power", 3),
        "tensor": lambda layer: layer.table.update(gain=torch.full((8,), 5.0))}
    model = mt.stream(Chain(Drops(), Drops()), device="cpu", plan={"activations": "replay"})
    loss = model(torch.ones(2, 8)).sum()
    changes[change](model.layers[0])
    with pytest.raises(mt.MegatrainError, match=r"layers\.[01]: run again, its forward.*does not repeat itself"):
        loss.backward()


@pytest.mark.parametrize("kind", ["closure", "method", "partial", "global"])
def test_hooks_inside_of_a_layer_leave_what_they_leave_in_plain_torch(kind: str) -> None:
    class Seen:
        def __init__(self) -> None:
            self.n, self.rows = 0, []

        def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.n += 1
            self.rows.append(out.detach().sum().item())

    def note(rows: list[Any], module: nn.Module, args: Any, out: Tensor) -> None:
        rows.append(out.detach().sum().item())

    def closure(rows: list[Any]) -> Any:
        return lambda module, args, out: rows.append(out.detach().sum().item())

    def globally(module: nn.Module, args: Any, out: Tensor) -> None:
        LOG.append(out.detach().sum().item())

    torch.manual_seed(0)
    plain = net("number")
    model = mt.stream(copy.deepcopy(plain), device="cpu", plan={"activations": "replay"})
    found = []
    for m in (plain, model):
        reset()
        rows: list[Any] = []
        seen = Seen()
        run(m, 1)
        m.layers[1].lin.register_forward_hook({"closure": closure(rows), "method": seen.hook, "global": globally,
                                               "partial": functools.partial(note, rows)}[kind])
        run(m, 2)
        found.append((list(rows), seen.n, list(seen.rows), list(LOG)))
    assert found[0] == found[1] and any(found[0])


def test_a_tensor_of_its_own_that_is_overwritten_later_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.big = nn.Linear(8, 8), torch.ones(300_000)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.lin(x) * self.big[:8])

    model = mt.stream(Chain(Reads(), Reads()), device="cpu", plan={"activations": "replay"})
    loss = model(torch.ones(2, 8)).sum()
    model.layers[1].big.zero_()
    with pytest.raises(mt.MegatrainError, match=r"layers\.1: .*does not repeat itself"):
        loss.backward()


def test_an_object_among_the_arguments() -> None:
    class Stats:
        def __init__(self) -> None:
            self.n, self.rows = 0, []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, stats: Any, table: Any) -> Tensor:
            stats.n += 1
            stats.rows.append(stats.n)
            table["all"][0].n += 1
            return torch.tanh(self.lin(x) * (stats.n + len(stats.rows) + table["all"][0].n))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Counts(), Counts()])

        def forward(self, x: Tensor, stats: Any, table: Any) -> Tensor:
            for layer in self.layers:
                x = layer(x, stats, table)
            return x

    torch.manual_seed(0)
    plain = Two()
    model = mt.stream(copy.deepcopy(plain), device="cpu", plan={"activations": "replay"})
    found = []
    for m in (plain, model):
        stats, table = Stats(), {"all": [Stats()]}
        for _ in range(2):
            m(torch.ones(2, 8), stats, table).sum().backward()
        found.append(([p.grad for p in m.parameters()], (stats.n, stats.rows, table["all"][0].n)))
    assert found[0][1] == found[1][1] and all(map(torch.equal, found[0][0], found[1][0]))


def test_what_a_layer_has_and_its_code_leaves_alone_does_not_matter() -> None:
    class Has(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.table = nn.Linear(8, 8), dict.fromkeys(map(str, range(20_001)), 0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.lin(x))

    model = mt.stream(nn.Sequential(Has(), Has()), device="cpu", plan={"activations": "replay"})
    model(torch.ones(2, 8)).sum().backward()
    assert {(w.keeps, w.writes) for w in mt.model.stream.runtime_of(model).windows} == {("replay", "")}
