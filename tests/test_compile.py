"""compute="compile": windows as torch.compile's graphs, against plain torch with the same modules compiled.

Everything is tiny, on the CPU device, in fp32 where not said. The backend is aot_eager: all of torch.compile but the
last step, which would wait for a C++ compiler. Both sides run the same graphs, so they are compared bit for bit.
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import doors
import parity
import pytest
import torch
import zoo
from fusing import Build, lm
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.base.errors import MegatrainError
from megatrain_torch.base.units import find
from megatrain_torch.fused import compiled
from megatrain_torch.model import ring
from megatrain_torch.model.stream import runtime_of

pytestmark = [pytest.mark.usefixtures("streaming"), pytest.mark.filterwarnings("ignore")]

ONE, TWO = dict(num_hidden_layers=1), dict(num_hidden_layers=2)
FAMILIES = {
    "llama": lm("llama", **TWO),
    "dropout": lm("starcoder2", **ONE, residual_dropout=0.2, attention_dropout=0.1, use_cache=False),
    "experts": lm("qwen3_moe", **ONE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    "two_kinds_of_layers": lm("qwen2", **TWO, use_sliding_window=True, sliding_window=6, max_window_layers=1),
}


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counts:
    """graphs: made so far. replays: of graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = self.replays = 0
        made, replay = compiled.Graph.__init__, compiled.GraphFrame.replay

        def init(graph: Any, run: Any) -> None:
            self.graphs += 1
            made(graph, run)

        def again(frame: Any) -> None:
            self.replays += 1
            replay(frame)

        monkeypatch.setattr(compiled.Graph, "__init__", init)
        monkeypatch.setattr(compiled.GraphFrame, "replay", again)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


# ---------------------------------------------------------------- plain and streamed

def stream(model: nn.Module, keep: str = "replay", slots: int = 2) -> nn.Module:
    return doors.stream(model, "cpu", compute="compile",
                        plan={"activations": keep, "slots": slots, "debug": {"poison": True}})


def plain(model: nn.Module) -> nn.Module:
    """The windows' modules compiled where they are."""
    for _, m in find(model).windows:
        if any(True for _ in m.children()):
            m.forward = torch.compile(m.forward, backend="aot_eager")
    return model


def codes(model: nn.Module, part: str = "layers.") -> list[str]:
    return [w.code for w in runtime_of(model).windows if part in w.name]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: parity.frozen(p.grad) for n, p in model.named_parameters()}


def train(model: nn.Module, batch: Callable[[int], Any], loss: Callable[..., Tensor], steps: int = 3) -> list[Any]:
    """Losses and gradients of each step, and the weights and buffers at the end."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    seen: list[Any] = []
    for step in range(steps):
        parity.seed(step)
        value = loss(model, batch(step))
        value.backward()
        seen.append([parity.frozen(value), gradients(model)])
        opt.step()
        opt.zero_grad()
    return [*seen, parity.frozen(dict(model.state_dict())), torch.rand(1)]


def same(a: list[Any], b: list[Any]) -> None:
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        assert parity.same_bits(x, y), f"step {step} differs"


# ---------------------------------------------------------------- models of transformers

@pytest.mark.parametrize("family, keep, graphs", [
    ("llama", "replay", 2), ("dropout", "replay", 1), pytest.param("experts", "saved", None, marks=parity.LONG),
    pytest.param("two_kinds_of_layers", "replay", None, marks=parity.LONG)])
def test_a_compiled_family_has_the_bits_of_plain_torch_compiled(family: str, keep: str, graphs: int | None,
                                                                counts: Counts) -> None:
    build: Build = FAMILIES[family]
    truth = train(plain(build()), zoo.text_unpadded, zoo.model_loss)
    torch._dynamo.reset()
    counts.graphs = 0
    model = stream(build(), keep)
    same(truth, train(model, zoo.text_unpadded, zoo.model_loss))
    assert all(c.startswith("compiled") for c in codes(model)), codes(model)
    assert bool(counts.replays) == (keep == "replay")
    if graphs is not None:                   # one for all layers, one for the norm
        assert counts.graphs == graphs


@parity.LONG
def test_a_cache_is_filled_as_by_the_models_own_code() -> None:
    batch = zoo.text_unpadded(0)
    own = FAMILIES["llama"]()
    model = stream(FAMILIES["llama"]())
    a, b = own(**batch, use_cache=True).past_key_values, model(**batch, use_cache=True).past_key_values
    assert codes(model) == ["compiled"] * 2
    for mine, other in zip(a.layers, b.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys)
        torch.testing.assert_close(mine.values, other.values)
    sum(layer.keys.sum() for layer in b.layers).backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None
    model(**batch, past_key_values=b)        # a graph takes an empty one
    assert "not an empty DynamicCache" in codes(model)[0]


# ---------------------------------------------------------------- toys

WIDTH = 16


class Layer(nn.Module):
    def __init__(self, number: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(kind: Callable[..., nn.Module] = Layer, n: int = 3, **more: Any) -> nn.Module:
    torch.manual_seed(7)
    return Stack([kind(i, **more) for i in range(n)])


def rows(step: int, n: int = 4) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(step))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def agrees(make: Callable[[], nn.Module], batch: Callable[[int], Tensor] = rows, keep: str = "replay") -> nn.Module:
    """The same training as plain torch's own code, which for these toys has the same bits; the streamed model."""
    truth = train(make(), batch, square)
    model = stream(make(), keep)
    same(truth, train(model, batch, square))
    return model


@parity.LONG
def test_dropout_falls_the_same_way_when_a_graph_is_run_again(counts: Counts) -> None:
    model = agrees(lambda: stack(dropout=0.5))
    # One graph for an input without a gradient, one for the others; each has been run once before it is repeated.
    assert codes(model) == ["compiled"] * 3 and counts.graphs == 2 and counts.replays == 9 - 2


@parity.LONG
def test_a_graph_made_in_between_is_not_taken_for_a_replay(counts: Counts) -> None:
    """A second length makes a second graph, for any length, before the first pass' backward."""
    def both(model: nn.Module) -> list[Any]:
        square(model, rows(0, 4)).backward()             # all graphs have been run once
        model.zero_grad()
        parity.seed(1)
        first, second = square(model, rows(1, 4)), square(model, rows(2, 6))
        square(model, rows(3, 6)).backward()
        second.backward()
        first.backward()
        return [gradients(model)]

    make = lambda: stack(dropout=0.5)                    # noqa: E731
    truth = both(make())
    parity.seed(0)
    model = stream(make())
    same(truth, both(model))
    assert counts.graphs == 4 and counts.replays == 12 - 4


class Numbered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


@parity.LONG
def test_layers_that_use_their_number_get_graphs_up_to_the_limit(counts: Counts) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        model = agrees(lambda: stack(Numbered, 4))
    assert codes(model)[:2] == ["compiled"] * 2 and counts.graphs == 2
    assert all("stops after" in code for code in codes(model)[2:])


class Broken(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.sin(self.up(x)))
        torch._dynamo.graph_break()
        return self.down(self.dropout(torch.cos(x)))


@parity.LONG
def test_a_forward_in_two_pieces_is_two_graphs() -> None:
    assert codes(agrees(lambda: stack(Broken, dropout=0.5))) == ["compiled, in 2 graphs"] * 3


class Normed(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


@parity.LONG
def test_a_graph_that_writes_into_its_inputs_is_not_run_again(counts: Counts) -> None:
    build = lambda: stack(Normed)                        # noqa: E731
    truth = train(plain(build()), rows, square)
    torch._dynamo.reset()
    model = stream(build())
    same(truth, train(model, rows, square))
    assert codes(model) == ["compiled"] * 3 and counts.replays == 0


@parity.LONG
def test_hooks_and_calls_without_gradients_run_the_own_code(counts: Counts) -> None:
    model, seen = stream(stack()), []
    with torch.no_grad():
        model(rows(0))
    assert counts.graphs == 0 and "once it has been called" in codes(model)[0]
    hook = model.layers[1].up.register_forward_hook(lambda *_: seen.append(1))
    square(model, rows(0)).backward()
    assert seen and codes(model) == ["compiled", "its own (there are hooks inside it)", "compiled"]
    hook.remove()
    square(model, rows(0)).backward()
    assert codes(model) == ["compiled"] * 3


def test_what_cannot_be_compiled_runs_its_own_code_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        """At the second piece: the first has drawn its dropout by then."""
        if any("cos" in str(node.target) for node in graph.graph.nodes):
            raise NotImplementedError("no such luck")
        return graph.forward

    compiled.backend_of.cache_clear()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: fails)
    try:
        model = agrees(lambda: stack(Broken, dropout=0.5))
        assert all("torch.compile" in code and "no such luck" in code for code in codes(model))
    finally:
        compiled.backend_of.cache_clear()


def test_weights_of_another_unit_are_not_taken_from_the_host() -> None:
    class Borrowing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + nn.functional.linear(x, self.other[0].up.weight[:WIDTH])

    def make() -> nn.Module:
        model = stack(Borrowing)
        for i in range(3):
            model.layers[i].other = [model.layers[(i + 1) % 3]]      # in a list: no submodule
        return model

    assert codes(agrees(make)) == ["its own (it reads weights of other units)"] * 3


@parity.LONG
def test_autocast_is_part_of_a_graph(counts: Counts) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    def half_inside(model: nn.Module) -> list[Any]:
        value = square(model, rows(0))
        with torch.autocast("cpu", torch.bfloat16):
            value.backward()
        return [gradients(model)]

    own = plain(stack())
    truth = train(own, rows, loss)
    truth_outside = half_inside(own)
    torch._dynamo.reset()
    model = stream(stack())
    same(truth, train(model, rows, loss))
    assert codes(model) == ["compiled"] * 3 and counts.replays == 9 - 2
    half_inside(model)                       # each graph once
    model.zero_grad()
    same(truth_outside, half_inside(model))


@parity.LONG
def test_frozen_weights_and_a_second_backward(counts: Counts) -> None:
    def twice(model: nn.Module) -> list[Any]:
        model.layers[0].requires_grad_(False)
        model.layers[1].up.weight.requires_grad_(False)
        square(model, rows(0)).backward()
        value = square(model, rows(1))
        value.backward(retain_graph=True)
        value.backward()
        return [gradients(model)]

    with torch._functorch.config.patch(donated_buffer=False):        # torch.compile's condition for a second one
        same(twice(stack()), twice(stream(stack())))
    assert counts.replays


@parity.LONG
def test_refusals_are_those_of_other_windows() -> None:
    model = stream(stack())
    square(model, rows(0)).backward()
    value = square(model, rows(0))
    with torch.no_grad():
        model.layers[2].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"layers\.2.*call backward"):
        value.backward()
    x = rows(1)
    value = square(model, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"input of .layers\.\d. was changed"):
        value.backward()
    with pytest.raises(MegatrainError, match="create_graph"):
        square(model, rows(1)).backward(create_graph=True)


@parity.LONG
def test_slots_go_on_and_the_model_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[int] = []
    own = ring.SlotHooks.renew
    monkeypatch.setattr(ring.SlotHooks, "renew", lambda self, slot: (renewed.append(slot), own(self, slot))[1])
    model = agrees(lambda: stack(n=5))
    assert not renewed, "a graph holds weights in slots that move on"
    ref = weakref.ref(model.layers[0])
    mt.unstream(model)
    del model
    gc.collect()
    assert ref() is None


@parity.LONG
def test_a_compiled_whole_around_it_is_no_matter() -> None:
    truth = train(stack(), rows, square)
    model = stream(stack())
    outer = torch.compile(model, backend="eager")
    same(truth, train(model, rows, lambda _, x: square(outer, x)))
    assert codes(model) == ["compiled"] * 3


class Tripled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


@pytest.mark.parametrize("keep", [pytest.param("saved", marks=parity.LONG), "replay"])
def test_a_layer_that_is_given_another_class_runs_its_forward(keep: str) -> None:
    plain = stack()
    model = stream(stack(), keep)
    for kind in (Layer, Tripled, Layer):
        found = []
        for m in (plain, model):
            m.layers[1].__class__ = kind
            m.zero_grad()
            loss = square(m, rows(0))
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in m.parameters())])
        assert all(map(torch.equal, *found)) and codes(model) == ["compiled"] * 3, kind
