"""What a forward keeps for its backward is given back when that ends, whoever holds the loss or the outputs: bundles in
host memory and in the file, and the tensors of the CPU device, which are malloc's."""
from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import operator
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fusing
import parity
import pytest
import torch
from kept import waiting
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt
from megatrain_torch.base.errors import MegatrainError
from megatrain_torch.base.modes import DISK, MODES
from megatrain_torch.model.stream import runtime_of

LAYERS, ROWS, T, H = 2, 2, 128, 64
INPUT = ROWS * T * H * 4             # of a layer: the least that one keeps
STEPS = 10
# Of a step's graph, held: some hundred objects for Python and C++ each. A mask of one layer is 4 * ROWS * T * T, its
# input INPUT, both 64 KiB or more.
OBJECTS = 32 << 10
AGAIN = "Trying to backward through the graph a second time"

build = fusing.lm("qwen3", head_dim=16, hidden_size=H, intermediate_size=96, num_hidden_layers=LAYERS)


class Mallinfo(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                                               "uordblks", "fordblks", "keepcost")]


def in_use() -> int:
    """Bytes that malloc has given to whomever: tensors of the CPU device, not the engine's planes."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("this libc has no mallinfo2")
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What only a collector would free counts as kept."""
    gc.disable()
    yield
    gc.enable()


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(90, (ROWS, T), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def tiny(mode: str, compute: str, nvme: Any = None, build: Callable[[], nn.Module] = build) -> nn.Module:
    parity.seed()
    return mt.stream(build(), "cpu", compute=compute, nvme=str(nvme) if mode in DISK else None,
                     plan={"activations": mode, "slots": 2})


of_loss, of_all = operator.attrgetter("loss"), lambda out: out


def growth(model: nn.Module, opt: Any, held: Callable[[Any], Any], finish: Callable[[], None] = lambda: None) -> float:
    """Bytes that a step leaves behind, the middle one of the last, while something of each is held: now and then a table
    of Python's grows, by more than all that."""
    kept, used = [], []
    for step in range(STEPS):
        out = model(**batch(step), output_hidden_states=held is of_all)
        update(out.loss, opt)
        kept.append(held(out))
        del out
        finish()
        used.append(in_use())
    return middle(used)


def middle(used: list[int]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(used[2:]))


@functools.cache
def of_plain(held: Callable[[Any], Any]) -> float:
    parity.seed()
    model = build()
    return growth(model, torch.optim.AdamW(model.parameters()), held)


def left_over(mode: str, compute: str, held: Callable[[Any], Any], nvme: Any) -> float:
    model = tiny(mode, compute, nvme)
    opt = mt.AdamW(model.parameters(), lr=1e-3)

    def finish() -> None:
        runtime_of(model).drain()
        assert waiting(model) == (0, 0), "bytes of bundles in host memory, and in the file, after backward"

    found = growth(model, opt, held, finish)
    mt.unstream(model)
    return found


# ---------------------------------------------------------------- ordinary loops

OWN = [m for m in MODES if m.partition("+")[0] in ("saved", "replay")]       # amounts that a module's own code knows


# Every second mode of a template's, the others with MEGATRAIN_FULL.
@pytest.mark.parametrize("mode, compute", [*((m, "eager") for m in OWN), *(
    pytest.param(m, "fused", marks=parity.LONG if i % 2 else ()) for i, m in enumerate(MODES))])
def test_a_held_loss_keeps_no_activations(mode: str, compute: str, tmp_path: Path) -> None:
    more = left_over(mode, compute, of_loss, tmp_path) - of_plain(of_loss)
    assert more < OBJECTS, f"each step's loss keeps {more / INPUT:.2f} times a layer's input more than plain torch's"


@pytest.mark.parametrize("mode, compute", [("saved", "fused"), ("linked+host", "fused"), ("selective+disk", "fused"),
                                           ("saved+host", "eager"), ("replay", "eager")])
def test_held_outputs_keep_themselves_alone(mode: str, compute: str, tmp_path: Path) -> None:
    """Logits, hidden states and the cache: what plain torch's outputs keep."""
    more = left_over(mode, compute, of_all, tmp_path) - of_plain(of_all)
    assert more < OBJECTS, f"each step's outputs keep {more / INPUT:.2f} times a layer's input more than plain torch's"


def test_logits_that_were_read_keep_nothing_else() -> None:
    """The user's own loss, of made logits: the logits themselves go with the outputs."""
    def own_loss(out: Any) -> Any:
        return (out.logits.double() * 1e-3).square().mean()

    model = tiny("saved", "fused")
    kept, used = [], []
    for step in range(STEPS):
        loss = own_loss(model(input_ids=batch(step)["input_ids"]))
        loss.backward()
        kept.append(loss)
        used.append(in_use())
    assert middle(used) < OBJECTS


def test_a_batch_leaves_nothing_until_the_next_one() -> None:
    """The last window's too: in a model of one window, or one bundle, nobody comes who would ask for the room."""
    parity.seed()
    model = mt.stream(nn.Sequential(nn.Sequential(nn.Linear(H, 4 * H), nn.ReLU(), nn.Linear(4 * H, H))), "cpu", units=["0"], plan={"activations": "saved+host"})
    left = []
    for rows in (8, 8, 4096):
        loss = model(torch.randn(rows, H)).square().mean()
        loss.backward()
        runtime_of(model).drain()
        assert waiting(model) == (0, 0)
        left.append(in_use())
    assert left[2] - left[1] < 4096 * H * 4


# ---------------------------------------------------------------- other ways through a graph

WAYS = [("saved", "eager"), ("saved+host", "eager"), ("replay+host", "eager"), ("replay", "eager"),
        ("selective+host", "fused"), ("linked+host", "fused"), ("saved+disk", "fused"), ("replay", "fused")]


# Every second one of either; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("mode, compute", [
    pytest.param(*way, marks=parity.LONG if i % 2 else ()) for i, way in enumerate(WAYS)])
def test_a_second_backward_says_what_torch_says(mode: str, compute: str, tmp_path: Path) -> None:
    model = tiny(mode, compute, tmp_path)
    for _ in range(2):
        loss = model(**batch(0)).loss
        loss.backward()
        with pytest.raises(RuntimeError, match=AGAIN):
            loss.backward()


@pytest.mark.parametrize("mode, compute", [
    pytest.param(*way, marks=() if i % 2 else parity.LONG) for i, way in enumerate(WAYS)])
def test_several_losses_of_one_graph(mode: str, compute: str, tmp_path: Path) -> None:
    """Two of a retained graph give what they give on the device; then the graph gives back what it has."""
    def train(model: nn.Module) -> list[Tensor]:
        found = []
        for step in range(2):
            out = model(**batch(step), output_hidden_states=True)
            for loss, last in ((out.hidden_states[1].square().mean(), False), (out.loss, False), (out.loss, True)):
                loss.backward(retain_graph=not last)
            found += [parity.frozen(p.grad) for p in model.parameters()]
            kept.append((loss, out))
        return found

    kept: list[Any] = []
    right = train(tiny("saved", compute))
    model = tiny(mode, compute, tmp_path)
    assert all(parity.same_bits(a, b) for a, b in zip(right, train(model), strict=True))
    assert waiting(model) == (0, 0)


@pytest.mark.parametrize("mode, compute", [("replay", "eager"), ("replay+host", "eager"), ("saved+host", "eager"),
                                           ("saved+host", "fused"), ("linked+disk", "fused")])
def test_what_came_back_for_nothing_goes_when_backward_ends(mode: str, compute: str, tmp_path: Path) -> None:
    """A retained graph, and one that was gone through in part, are on the device no longer than the backward."""
    model = tiny(mode, compute, tmp_path)
    weight = model.model.layers[LAYERS - 1].mlp.down_proj.weight
    for go in (lambda loss: loss.backward(inputs=[weight]), lambda loss: loss.backward(retain_graph=True)):
        loss = None
        for step in range(3):
            loss = model(**batch(step)).loss
            before = in_use()
            go(loss)
            model.zero_grad()
            runtime_of(model).drain()
        assert in_use() - before < OBJECTS
        landed = [b for ref in runtime_of(model).swap.out if (b := ref()) is not None and (b.landed or b.sources)]
        assert not landed and not runtime_of(model).swap.held


@pytest.mark.parametrize("mode, compute", [
    pytest.param(*way, marks=parity.LONG if i % 2 else ()) for i, way in enumerate(WAYS[1::2])])
def test_a_backward_that_fails_leaves_nothing(mode: str, compute: str, tmp_path: Path) -> None:
    """Of the graph: when it goes, and the next one comes. Then all is as it was."""
    def grads(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        model(**batch(0)).loss.backward()
        return [parity.frozen(p.grad) for p in model.parameters()]

    def fail(grad: Tensor) -> None:
        raise MegatrainError("a hook of the user's")

    model = tiny(mode, compute, tmp_path)
    right, used = grads(model), []
    for _ in range(3):
        out = model(**batch(1), output_hidden_states=True)
        out.hidden_states[1].register_hook(fail)
        with pytest.raises(MegatrainError, match="a hook of the user's"):
            out.loss.backward()
        del out
        gc.collect()                         # the exception knows its frames, which know the exception
        assert all(parity.same_bits(a, b) for a, b in zip(right, grads(model)))
        runtime_of(model).drain()
        assert waiting(model) == (0, 0)
        used.append(in_use())
    assert used[-1] - used[1] < OBJECTS


@pytest.mark.parametrize("mode", ["saved", "selective+host"])
def test_a_node_that_failed_may_be_asked_again(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own: only what is through is given back."""
    model = tiny(mode, "fused")
    model(**batch(0)).loss.backward()
    model.zero_grad()
    weight = model.model.layers[0].mlp.up_proj.weight
    take, grads = runtime_of(model).handover.take, []
    for failures in (0, 1):
        def fail(*args: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures == 0:
                raise MegatrainError("no memory")
            return take(*args)

        loss = model(**batch(1), output_hidden_states=True).hidden_states[1].sum()
        monkeypatch.setattr(runtime_of(model).handover, "take", fail)
        if failures:
            with pytest.raises(MegatrainError, match="no memory"):
                loss.backward()
        loss.backward()
        grads.append(weight.grad.clone())
        model.zero_grad()
    assert torch.equal(*grads)
