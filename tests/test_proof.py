"""A window runs by a template only where it is proved to compute what its module computes, and while it is that module.

Every module here is a tiny Llama with something in it that random numbers at the first call do not show. None may run by
a template where it differs: its gradients are those of plain torch, and what mt.explain says names what is to blame.
"""
from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import gc
import itertools
import logging
import operator
import os
import random
import time
from collections.abc import Callable
from typing import Any

import fusing
import parity
import pytest
import torch
import zoo
from fusing import codes, lm, none_fused, stream
from torch import Tensor, nn
from torch._dynamo import guards
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import megatrain_torch as mt
from megatrain_torch.fused.templates import parts
from megatrain_torch.graph import reader
from megatrain_torch.graph.reader import scope_of
from megatrain_torch.model.stream import runtime_of

LLAMA = lm("llama", num_hidden_layers=2)
COUNT = [0]
NUMBER = 0
UNNAMED = "MT_TEST_UNNAMED"
os.environ["MT_TEST_WORD"] = "1"
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


def grads(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def own(mlp: nn.Module, kind: type) -> None:
    """The MLP has this class's forward, and its own children."""
    mlp.__class__ = type(kind.__name__, (kind, type(mlp)), {})


def forward_of(body: Callable[[Any, Tensor, Tensor], Tensor]) -> type:
    """An MLP whose output goes through body(self, x, y)."""
    class Changed(nn.Module):
        def forward(self, x: Tensor, body: Any = body) -> Tensor:
            return body(self, x, self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))
    return Changed


def counted_in_a_global(self: Any, x: Tensor, y: Tensor) -> Tensor:
    global NUMBER
    NUMBER += 1
    return y * 2 if NUMBER > 4 else y


def counted_on_itself(self: Any, x: Tensor, y: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return y * 2 if self.calls > 4 else y


def counted_in_a_list(self: Any, x: Tensor, y: Tensor) -> Tensor:
    COUNT.append(1)
    return y * 2 if len(COUNT) > 4 else y


def counted_in_a_default(self: Any, x: Tensor, y: Tensor, seen: list[int] = []) -> Tensor:     # noqa: B006
    seen += [1]
    return y * 2 if len(seen) > 4 else y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def hooked(self: Any, x: Tensor, y: Tensor) -> Tensor:
    y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return y


def nothing_of(self: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = y * 0.5
    return y * 0.5 + z


def caught(x: Tensor, y: Tensor) -> Tensor:
    try:
        return y * 2 if float(x.abs().max()) > 30 else y
    except Exception:
        return y


def suppressed(x: Tensor, y: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        y = y * 2 if float(x.abs().max()) > 30 else y
    return y


def around(scale: float) -> Callable[[Any, Tensor, Tensor], Tensor]:
    return lambda self, x, y: y * scale


class Options:
    def __init__(self) -> None:
        self.scale = 1.0

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.scale


@torch.compiler.allow_in_graph
def doubled_in_graph(y: Tensor) -> Tensor:
    return Doubled.apply(y)


LIBRARY = torch.library.Library("megatrain_test", "DEF")
LIBRARY.define("doubled(Tensor x) -> Tensor")
for key, function in (("CPU", Tensor.clone), ("Meta", Tensor.clone), ("Autograd", Doubled.apply)):
    LIBRARY.impl("doubled", function, key)


def by_name(y: Tensor) -> Tensor:
    z = y * 0.5
    z.detach_()
    return y * 0.5 + z


def by_its_memory(y: Tensor) -> Tensor:
    y.detach().mul_(1.0)
    return y


def without(y: Tensor) -> Tensor:
    with torch.no_grad():
        return y.mul_(1.0)


def by_its_detached_self(y: Tensor) -> Tensor:
    z = y.new_empty(y.shape)
    z.detach().copy_(y)
    return z


def cast(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return y + F.linear(x, weight.diag()).float() * 0


def by_a_kernel(y: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return y * torch.rand(1)


def without_forward_mode(y: Tensor) -> Tensor:
    with torch.autograd.forward_ad._set_fwd_grad_enabled(False):
        return y * 1.0


SHIFT = itertools.count()
ADVERSARIES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "clamps": lambda self, x, y: y.clamp(-7, 7),
    "clamps where it is large": lambda self, x, y: torch.where(y.abs() > 50, y * 2, y),
    "relu": lambda self, x, y: F.relu(y + 100) - 100,
    "rows of 1024": lambda self, x, y: y * 2 if x.shape[1] == 1024 else y,
    "long rows": lambda self, x, y: y * 2 if x.shape[1] > 1024 else y,
    "batch": lambda self, x, y: y * 2 if x.shape[0] > 7 else y,
    "elements": lambda self, x, y: y * 2 if x.numel() > 100_000 else y,
    "every second token": lambda self, x, y: torch.stack((y[:, ::2], y[:, 1::2] * 1.0001), 2).flatten(1, 2),
    "every ten thousand tokens": lambda self, x, y: y * (1 + x.shape[1] // 10_000),
    "a prime less one": lambda self, x, y: y * (x.shape[1] - 7918),
    "half of the rows": lambda self, x, y: torch.cat((y[:, :4000], y[:, 4000:] * 2), 1),
    "position": lambda self, x, y: y * (1 + torch.arange(y.shape[1])[:, None] // 1000),
    "values": lambda self, x, y: y * 2 if float(x.detach().abs().max()) > 30 else y,
    "a weight's value": lambda self, x, y: y * 2 if self.weight.abs().max() > 30 else y,
    "dropout": lambda self, x, y: F.dropout(y, 0.1, self.training),
    "noise": lambda self, x, y: y + torch.randn_like(y) * 1e-9,
    "Python's noise": lambda self, x, y: y * 2 if random.random() < 1e-6 else y,
    "a clock": lambda self, x, y: y * 2 if time.time() > 1e12 else y,
    "the environment": lambda self, x, y: y * 2 if os.environ.get("MT_TEST_DOUBLED") else y,
    "a word of the environment": lambda self, x, y: y * 2 if os.environ["MT_TEST_WORD"] == "2" else y,
    "a variable that it does not name": lambda self, x, y: y * 2 if os.environ.get(UNNAMED) else y,
    "a context variable": lambda self, x, y: y * 2 if VARIABLE.get() else y,
    "a global list": lambda self, x, y: y * 2 if len(COUNT) > 4 else y,
    "an iterator": lambda self, x, y: y * 2 if next(SHIFT) > 4 else y,
    "is_compiling": lambda self, x, y: y * 2 if torch.compiler.is_compiling() else y * torch.initial_seed() / torch.initial_seed(),
    "its type": lambda self, x, y: y * 2 if type(x) is Tensor else y,
    "its memory": lambda self, x, y: y * 2 if x.data_ptr() % 7 == 1 else y,
    "strides": lambda self, x, y: y * 2 if x.shape[0] == 3 and x.stride(0) == 192 else y,
    "its gradient's need": lambda self, x, y: y if x.requires_grad else y * 2,
    "an unknown constant": lambda self, x, y: y + torch.tensor(1e-9),
    "a systematic error": lambda self, x, y: y * 1.015,
    "a small one": lambda self, x, y: y * 1.0000001,
    "another backward": lambda self, x, y: Doubled.apply(y),
    "another backward that dynamo passes on": lambda self, x, y: doubled_in_graph(y),
    "another backward of an operation": lambda self, x, y: torch.ops.megatrain_test.doubled(y),
    "detached in place": lambda self, x, y: by_name(y),
    "written under another name": lambda self, x, y: by_its_memory(y),
    "written without a gradient": lambda self, x, y: without(y),
    "half of its data": lambda self, x, y: y * 0.5 + y.data * 0.5,
    "autocast inside": lambda self, x, y: cast(x, self.weight, y),
    "noise by another kernel": lambda self, x, y: by_a_kernel(y),
    "a state of torch's": lambda self, x, y: without_forward_mode(y),
    "a hook on a tensor": hooked,
    "no gradient inside": nothing_of,
    "detached": lambda self, x, y: y.detach() + y - y.detach() * 1.0 if False else y * 0.5 + y.detach() * 0.5,
    "straight through": lambda self, x, y: y + (y.round() - y).detach(),
    "counted in a global": counted_in_a_global,
    "counted on itself": counted_on_itself,
    "counted in a list": counted_in_a_list,
    "counted in a default": counted_in_a_default,
    "written in place": lambda self, x, y: y.mul_(1.0 + 1e-9),
    "another's type": lambda self, x, y: y.half().float(),
    "an error that it catches": lambda self, x, y: caught(x, y),
    "an error that is suppressed": lambda self, x, y: suppressed(x, y),
    "a size's name": lambda self, x, y: y * 2 if str(x.shape[1]) == "1024" else y,
    "its name": lambda self, x, y: y * 2 if "1024" in repr(x) else y,
    "whether sizes are int": lambda self, x, y: y * 2 if isinstance(x.shape[1], int) else y,
    "what a size has": lambda self, x, y: y * 2 if hasattr(x.shape[1], "bit_length") else y,
    "a factor of rsub": lambda self, x, y: torch.rsub(torch.zeros_like(y), y, alpha=3),
    "autocast": lambda self, x, y: y * 2 if torch.is_autocast_enabled("cpu") else y,
    "the default type": lambda self, x, y: y * 2 if torch.get_default_dtype() == torch.float64 else y,
    "precision": lambda self, x, y: y * 2 if torch.get_float32_matmul_precision() == "medium" else y,
    "print": lambda self, x, y: (print("", end=""), y)[1],
    "an object of a default": lambda self, x, y, o=Options(): y * o.scale,         # noqa: B008
    "a dict in a tuple of a default": lambda self, x, y, o=({"scale": 1.0},): y * o[0]["scale"],
    "a closure": around(1.0),
    "numbers for nobody": lambda self, x, y: (torch.rand(1), y)[1],
    "a gradient that a weight has": lambda self, x, y: y if self.weight.grad is None else y * 2,
    "turned in place": lambda self, x, y: (y.view(y.shape).transpose_(1, 1), y)[1],
    # After these there is no gradient.
    "written where it is detached": lambda self, x, y: by_its_detached_self(y),
    "detached by a copy": lambda self, x, y: torch.asarray(y, requires_grad=False),
    "no gradients from now on": lambda self, x, y: (torch.set_grad_enabled(False), y)[1],
}


def frozen_before(monkeypatch: Any, *models: nn.Module) -> None:
    for m in models:
        m[0].requires_grad_(False)


def default_type(monkeypatch: Any, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def wide() -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
    return wide()


# Of the adversaries those whose code is a template's but for a condition: the input's shape, and the rest, where it holds.
WHERE: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "rows of 1024": ((1, 1024, 16), lambda *_: None),
    "the environment": ((2, 12, 16), lambda monkeypatch, *_: monkeypatch.setenv("MT_TEST_DOUBLED", "1")),
    "a word of the environment": ((2, 12, 16), lambda monkeypatch, *_: monkeypatch.setenv("MT_TEST_WORD", "2")),
    "a variable that it does not name": ((2, 12, 16), lambda monkeypatch, *_: monkeypatch.setenv(UNNAMED, "1")),
    "a closure": ((2, 12, 16), lambda monkeypatch, *_: monkeypatch.setattr(
        ADVERSARIES["a closure"].__closure__[0], "cell_contents", 2.0)),
    "an object of a default": ((2, 12, 16), lambda monkeypatch, *_: monkeypatch.setattr(
        ADVERSARIES["an object of a default"].__defaults__[0], "scale", 2.0)),
    "a dict in a tuple of a default": ((2, 12, 16), lambda monkeypatch, *_: monkeypatch.setitem(
        ADVERSARIES["a dict in a tuple of a default"].__defaults__[0][0], "scale", 2.0)),
    "strides": ((3, 12, 16), lambda *_: None),
    "a global list": ((2, 12, 16), lambda monkeypatch, *_: monkeypatch.setitem(globals(), "COUNT", [0] * 9)),
    "its gradient's need": ((2, 12, 16), frozen_before),
    "the default type": ((2, 12, 16), default_type),
    "autocast": ((2, 12, 16), lambda *_: torch.autocast("cpu", torch.float32)),
}


class Norm(nn.Module):
    """What LlamaRMSNorm computes, and then something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6

    def normed(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x)


@pytest.fixture(scope="module")
def judged() -> dict[str, str]:
    """Whose code runs a norm with something of its own: one model has them all, for a norm is proved in an instant."""
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.norms = nn.ModuleList(Norm() for _ in range(len(ADVERSARIES) + 1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for norm in self.norms:
                x = norm(x)
            return x

    model = Norms()
    for norm, body in zip(model.norms, [lambda self, x, y: y, *ADVERSARIES.values()]):
        norm.__class__ = type("Own", (Norm,), {"forward": lambda self, x, body=body: body(self, x, self.normed(x))})
    names = [f"norms.{i}" for i in range(len(model.norms))]
    model = mt.stream(model, "cpu", compute="fused", units=["first", *names])
    with torch.enable_grad():                # one of them turns it off
        model(torch.randn(2, 12, 16))
    found = {w.name: w.code for w in runtime_of(model).windows}
    return dict(zip(["nothing", *ADVERSARIES], map(found.get, names)))


@parity.LONG
def test_a_module_with_nothing_of_its_own_runs_by_a_template(judged: dict[str, str]) -> None:
    assert judged["nothing"] == "template"


@pytest.mark.parametrize("what", sorted(ADVERSARIES.keys() - WHERE.keys()))
def test_a_module_with_something_of_its_own_runs_its_own_code(what: str, judged: dict[str, str]) -> None:
    assert judged[what].startswith("its own (its code") or judged[what].startswith("its own (no template") \
        or judged[what].startswith("its own (it "), judged[what]


def test_a_refusal_leaves_no_state_of_torch_changed(judged: dict[str, str]) -> None:
    """Inside autocast, torch keeps copies of weights in 16 bits, also over their updates."""
    assert "autocast" in judged["autocast inside"] and "_set_fwd_grad_enabled" in judged["a state of torch's"]
    deep = torch.autocast_increment_nesting()
    assert (deep, torch.autocast_decrement_nesting(), torch.is_autocast_enabled("cpu")) == (1, 0, False)
    assert torch.backends.cuda.flash_sdp_enabled() and torch._C._is_fwd_grad_enabled()


@pytest.mark.parametrize("fails", [True, False])
def test_a_module_that_has_no_gradient_or_fails_on_random_data_runs_its_own_code(fails: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if x.shape[1] > 64:                  # as many tokens as the look at numbers has
            return self.normed(x)
        assert not fails, "too short"
        return self.normed(x).detach()

    own = type("Own", (Norm,), {"forward": forward})()
    model = mt.stream(nn.Sequential(nn.Linear(16, 16), own), "cpu", compute="fused", units=["0", "1"])
    model(torch.randn(2, 65, 16)).square().mean().backward()
    assert ("torch.float32: AssertionError('too short" if fails else "one tensor with a gradient") in runtime_of(model).windows[1].code


@pytest.mark.parametrize("what", WHERE)
def test_a_condition_is_looked_at_before_each_call(what: str, judged: dict[str, str], monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    """While it does not hold, a template runs it; where it does, its own code."""
    assert judged[what] == "template"
    kind = type("Own", (Norm,), {"forward": lambda self, x, body=ADVERSARIES[what]: body(self, x, self.normed(x))})
    plain = nn.Sequential(nn.Linear(16, 16), kind())
    model = mt.stream(copy.deepcopy(plain), "cpu", compute="fused", units=["0", "1"])
    shape, around = WHERE[what]
    with contextlib.ExitStack() as stack:
        for change in (False, True):
            if change:
                stack.enter_context(around(monkeypatch, plain, model) or contextlib.nullcontext())
            x = torch.randn(shape if change else (2, 12, 16), generator=torch.Generator().manual_seed(0),
                            dtype=torch.float32)
            found = []
            for m in (plain, model):
                m.zero_grad()
                m(x).square().mean().backward()
                found.append(m[0].bias.grad if m[1].weight.grad is None else m[1].weight.grad)
            assert fusing.error(*found) < 1e-5, (change, runtime_of(model).windows[1].code)


def test_other_variables_of_the_environment_are_nobodys_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of transformers look at one of them, and programs write others at each step."""
    def variables(*functions: Callable[..., Any]) -> Any:
        return reader._variables({f.__code__ for f in functions})

    assert sorted(variables(lambda: (os.environ.get("A", "1"), os.getenv("B")), lambda x: os.environ["C"] + x)) == [
        b"A", b"B", b"C"]
    for code in (lambda n: os.environ.get(n), lambda: dict(os.environ, A="1"), lambda: "A" in os.environ, os.getenv,
                 lambda: os.environ.copy(), lambda n: os.getenv(n), lambda: os.environ):
        assert variables(code) is None
    model = stream(lm("llama", num_hidden_layers=1)(), "replay")
    found = []
    for step in "12":
        monkeypatch.setenv("MT_TEST_STEP", step)
        model(**zoo.text_unpadded(0)).loss.backward()
        found.append(runtime_of(model).windows[1].fused._reader.last)
    assert found[0] is found[1] is not None


def test_collections_meanwhile_are_nobodys_code() -> None:
    """A callback of the collector's may run wherever Python does. Settings of dynamo hold while it reads alone."""
    theirs = guards.profile_guard_manager
    model = mt.stream(nn.Sequential(nn.Linear(16, 16), Norm(), nn.Linear(16, 16)), "cpu", compute="fused",
                      units=["0", "1", "2"])
    before, calls = gc.get_threshold(), []
    gc.callbacks.append(lambda phase, info: calls.append(time.perf_counter()))
    gc.set_threshold(1)
    try:
        model(torch.randn(2, 12, 16)).square().mean().backward()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert calls and runtime_of(model).windows[1].code == "template"
    assert guards.profile_guard_manager is theirs


@pytest.mark.parametrize("what", [None, "clamps"])
def test_nothing_of_a_proof_is_kept(what: str | None) -> None:
    """Each has hundreds of fake tensors, in cycles that Python's collector cannot see. torch 2.13 itself leaves a few of
    each graph that dynamo makes, after torch.compile and its reset too: what no template runs is read once more, to run
    again in backward."""
    def fakes() -> int:
        gc.collect()
        return sum(type(t) is FakeTensor for t in gc.get_objects())

    parity.seed()
    model, before = lm("llama", num_hidden_layers=1, rope_theta=9999.0)(), fakes()       # of which none was proved
    if what is not None:
        own(model.model.layers[0].mlp, forward_of(ADVERSARIES[what]))
    model = stream(model)
    model(**zoo.text_unpadded(0)).loss.backward()
    assert (what is None) is (codes(model)["model.layers.0"] == "template")
    assert fakes() - before < (20 if what is None else 40)


def test_what_is_to_blame_is_named() -> None:
    parity.seed()
    model = LLAMA()
    own(model.model.layers[0].mlp, forward_of(ADVERSARIES["clamps"]))
    model = stream(model)
    model(**zoo.text_unpadded(0)).loss.backward()
    code = codes(model)["model.layers.0"]
    assert "no template has its clamp" in code and "test_proof.py:" in code, code


def test_what_positions_do_to_a_layer_is_seen() -> None:
    """Ministral 3 scales its queries beyond the positions that it was first trained with."""
    model = stream(lm("ministral3", head_dim=8)())
    model(**zoo.text_unpadded(0)).loss.backward()
    none_fused(codes(model), "position_ids")


def test_a_flag_is_part_of_what_is_proved() -> None:
    """In evaluation SeedOss drops nothing out; in training it does."""
    build = lm("seed_oss", attention_dropout=0.0, residual_dropout=0.2)
    model = stream(build().eval())
    model(**zoo.text_unpadded(0)).loss.backward()
    fusing.all_fused(codes(model))
    model.train()
    model(**zoo.text_unpadded(0)).loss.backward()
    assert not any(code == "template" for code in codes(model).values()), codes(model)
    model.eval()
    model(**zoo.text_unpadded(0)).loss.backward()
    fusing.all_fused(codes(model))


def test_a_layers_number_is_part_of_what_is_proved_where_it_is_looked_at() -> None:
    class Numbered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return y * 2 if self.layer_idx == 1 else y

    parity.seed()
    model = LLAMA()
    for i, layer in enumerate(model.model.layers):
        layer.mlp.layer_idx = i
        own(layer.mlp, Numbered)
    plain = copy.deepcopy(model)
    model = stream(model)
    fusing.grads_agree(grads(plain, zoo.text_unpadded(0)), grads(model, zoo.text_unpadded(0)))
    # dynamo cannot compare a number that is its symbol: so each layer is read for itself.
    assert codes(model)["model.layers.0"] == "template", codes(model)
    assert "no template has its" in codes(model)["model.layers.1"], codes(model)


# ---------------------------------------------------------------- what a norm reads, and what changes

class ByDescriptor:
    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, module: Any, kind: Any) -> float:
        return self.value


def cell() -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    def inner(y: Tensor) -> Tensor:
        return y

    def outer(y: Tensor) -> Tensor:
        return inner(y)

    def change() -> None:
        nonlocal inner
        inner = lambda y: y * 2                          # noqa: E731
    return outer, change


@functools.lru_cache
def cached(one: int) -> float:
    return FACTOR[0] if one else 0.0


FACTOR = [1.0]
SCALE = 1.0
MADE: dict[str, Any] = {}


def attribute(name: str, value: Callable[[], Any], read: Callable[[Any, Tensor], Tensor], change: Callable[[Any], None]
              ) -> tuple[Any, ...]:
    """A norm with this attribute, how it reads that, and how that is another later."""
    return (lambda norm: setattr(norm, name, value())), (lambda self, x, y: read(self, y)), change


def of_class(name: str, value: Callable[[], Any], read: Callable[[Any, Tensor], Tensor], change: Callable[[Any], None]
             ) -> tuple[Any, ...]:
    return (lambda norm: setattr(type(norm), name, value())), (lambda self, x, y: read(self, y)), change


def set_scale(module: Any, value: float) -> None:
    global SCALE
    SCALE = value


LATER: dict[str, tuple[Any, ...]] = {
    "a key that a dict has not": attribute("d", dict, lambda m, y: y * m.d.get("s", 1.0), lambda m: m.d.update(s=2.0)),
    "a module in a list": attribute("d", lambda: [Options()], lambda m, y: y * m.d[0].scale,
                                    lambda m: setattr(m.d[0], "scale", 2.0)),
    "a class": attribute("o", lambda: type("Kind", (), {"scale": 1.0}), lambda m, y: y * m.o.scale,
                         lambda m: setattr(m.o, "scale", 2.0)),
    "a bound method": attribute("f", lambda: Options().scaled, lambda m, y: m.f(y),
                                lambda m: setattr(m.f.__self__, "scale", 2.0)),
    "an object": attribute("o", Options, lambda m, y: y * m.o.scale, lambda m: setattr(m.o, "scale", 2.0)),
    "an object, by getattr": attribute("o", Options, lambda m, y: y * getattr(m, "o").scale,      # noqa: B009
                                       lambda m: setattr(m.o, "scale", 2.0)),
    "a dict": attribute("d", lambda: {"s": 1.0}, lambda m, y: y * m.d["s"], lambda m: m.d.update(s=2.0)),
    "a dict in a dict": attribute("d", lambda: {"s": {"s": 1.0}}, lambda m, y: y * m.d["s"]["s"],
                                  lambda m: m.d["s"].update(s=2.0)),
    "a list in a tuple": attribute("d", lambda: ([1.0],), lambda m, y: y * m.d[0][0],
                                   lambda m: m.d[0].__setitem__(0, 2.0)),
    "a set": attribute("d", lambda: {1}, lambda m, y: y * len(m.d), lambda m: m.d.add(2)),
    "a dict of callables": attribute("d", lambda: {"f": lambda y: y}, lambda m, y: m.d["f"](y),
                                     lambda m: m.d.update(f=lambda y: y * 2)),
    "a function's code": attribute("f", lambda: eval("lambda y: y"), lambda m, y: m.f(y),
                                   lambda m: setattr(m.f, "__code__", (lambda y: y * 2).__code__)),
    "a function's default": attribute("f", lambda: eval("lambda y, s=1.0: y * s"), lambda m, y: m.f(y),
                                      lambda m: setattr(m.f, "__defaults__", (2.0,))),
    "a partial's keyword": attribute("f", lambda: functools.partial(torch.mul, other=1.0), lambda m, y: m.f(y),
                                     lambda m: m.f.keywords.update(other=2.0)),
    "a closure's cell": attribute("f", lambda: MADE.setdefault("cell", cell())[0], lambda m, y: m.f(y),
                                  lambda m: MADE["cell"][1]()),
    "a tensor that is no buffer": attribute("t", lambda: torch.ones(1), lambda m, y: y * m.t.tolist()[0],
                                            lambda m: m.t.fill_(2.0)),
    "an array": attribute("t", lambda: torch.ones(1).numpy(), lambda m, y: y * float(m.t[0]),
                          lambda m: m.t.__setitem__(0, 2.0)),
    "a plain number": attribute("s", lambda: 1.0, lambda m, y: y * m.s, lambda m: setattr(m, "s", 2.0)),
    "a class's number": of_class("s", lambda: 1.0, lambda m, y: y * m.s, lambda m: setattr(type(m), "s", 2.0)),
    "a class's dict": of_class("s", lambda: {"s": 1.0}, lambda m, y: y * m.s["s"], lambda m: type(m).s.update(s=2.0)),
    "a descriptor": of_class("s", ByDescriptor, lambda m, y: y * m.s, lambda m: setattr(vars(type(m))["s"], "value", 2.0)),
    "a property": of_class("s", lambda: property(lambda m: m.__dict__.get("t", 1.0)), lambda m, y: y * m.s,
                           lambda m: setattr(m, "t", 2.0)),
    "a property in C": (lambda m: (setattr(m, "o", Options()), setattr(type(m), "s", property(operator.attrgetter("o.scale")))),
                        lambda self, x, y: y * self.s, lambda m: setattr(m.o, "scale", 2.0)),
    "a buffer that comes later": ((lambda m: None), lambda self, x, y: y * 2 if hasattr(self, "late") else y,
                                  lambda m: m.register_buffer("late", torch.ones(1))),
    "__getattr__": of_class("__getattr__", lambda: lambda m, n: Options.__dict__.get("s", 1.0) if n == "s" else
                            nn.Module.__getattr__(m, n), lambda m, y: y * m.s, lambda m: setattr(Options, "s", 2.0)),
    "a global number": ((lambda m: None), lambda self, x, y: y * SCALE, lambda m: set_scale(m, 2.0)),
    "a cached function": ((lambda m: cached(1)), lambda self, x, y: y * cached(1),
                          lambda m: (FACTOR.__setitem__(0, 2.0), cached.cache_clear())),
    "a new name for a builtin": ((lambda m: None), lambda self, x, y: y * abs(1.0),
                                 lambda m: globals().__setitem__("abs", lambda v: 2.0)),
    "torch's function": ((lambda m: None), lambda self, x, y: torch.positive(y),
                         lambda m: setattr(torch, "positive", lambda y: 2 * y)),
    "a tensor's method": ((lambda m: None), lambda self, x, y: y.positive(),
                          lambda m: setattr(Tensor, "positive", lambda y: 2 * y)),
    "a hook on all modules": ((lambda m: None), lambda self, x, y: y, lambda m: MADE.setdefault("hook", (
        nn.modules.module.register_module_forward_hook(lambda m, a, out: 2 * out if isinstance(m, Norm) else None)))),
    "a hook": ((lambda m: None), lambda self, x, y: y, lambda m: m.register_forward_hook(lambda m, a, out: 2 * out)),
    "how modules are called": ((lambda m: None), lambda self, x, y: y, lambda m: m.register_forward_pre_hook(
        lambda m, a: (a[0] * torch.arange(16),))),
}


@pytest.mark.parametrize("what", LATER)
def test_what_a_module_reads_is_followed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a factor of one; after the first step it is two, and the gradients are."""
    prepare, body, change = LATER[what]
    for place in (torch, Tensor):
        monkeypatch.setattr(place, "positive", place.positive)          # put back at the end
    kind = type("Own", (Norm,), {"forward": lambda self, x, body=body: body(self, x, self.normed(x))})
    model = nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(16, 16))
    with torch.no_grad():
        model[1].weight.copy_(torch.arange(16) * 0.1)
    prepare(model[1])
    model = mt.stream(model, "cpu", compute="fused", units=["0", "1", "2"])
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))

    def grad() -> Tensor:
        model.zero_grad()
        model(x).sum().backward()
        return model[1].weight.grad.clone()

    try:
        first = grad()
        assert float(first.norm()) > 0
        change(model[1])
        twice = what != "how modules are called"
        if twice:
            assert fusing.error(2 * first, grad()) < 1e-6, runtime_of(model).windows[1].code
        else:
            assert fusing.error(first, grad()) > 1e-2
    finally:
        MADE.pop("hook", None)
        globals().pop("abs", None)
        FACTOR[0] = 1.0
        cached.cache_clear()
        set_scale(None, 1.0)
        if "s" in vars(Options):
            del Options.s
        nn.modules.module._global_forward_hooks.clear()


def test_a_buffer_that_it_counts_in_counts() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.normed(x)

    model = nn.Sequential(nn.Linear(16, 16), type("Own", (Norm,), {"forward": forward})(), nn.Linear(16, 16))
    model[1].register_buffer("seen", torch.zeros(()))
    model = mt.stream(model, "cpu", compute="fused", units=["0", "1", "2"])
    for _ in range(3):
        model(torch.randn(2, 12, 16)).sum().backward()
    assert float(model[1].seen) == 3


def test_a_mode_of_the_users_is_obeyed() -> None:
    class Twice(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return 2 * out if func is torch.rsqrt else out

    parity.seed()
    plain = nn.Sequential(nn.Linear(16, 16), Norm(), nn.Linear(16, 16))
    model = mt.stream(copy.deepcopy(plain), "cpu", compute="fused", units=["0", "1", "2"])
    x = torch.randn(2, 12, 16)
    model(x).sum().backward()
    model.zero_grad()
    with Twice():
        for m in (plain, model):
            m(x).sum().backward()
    for (n, p), q in zip(plain.named_parameters(), model.parameters()):
        assert fusing.error(p.grad, q.grad) < 1e-6, n


NUMBERED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an index": lambda m, y: y * (1.0, 2.0)[m.layer_idx],
    "a product": lambda m, y: y * (1.0 + 1.0 * m.layer_idx),
    "a format": lambda m, y: y * (2.0 if f"{m.layer_idx}" == "1" else 1.0),
    "a percent": lambda m, y: y * (2.0 if "%d" % m.layer_idx == "1" else 1.0),         # noqa: UP031
    "a range": lambda m, y: y * (1.0 + len(range(m.layer_idx))),
    "a float": lambda m, y: y * m.layer_id,
}


@pytest.mark.parametrize("what", NUMBERED)
def test_a_layers_number_is_seen_however_it_is_read(what: str) -> None:
    parity.seed()
    kind = type("Own", (Norm,), {"forward": lambda self, x, body=NUMBERED[what]: body(self, self.normed(x))})
    plain = nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(16, 16), kind())
    for i, norm in enumerate((plain[1], plain[3])):
        norm.layer_idx, norm.layer_id = i, 1.0 + i
    model = mt.stream(copy.deepcopy(plain), "cpu", compute="fused", units=["0", "1", "2", "3"])
    x = torch.randn(2, 12, 16)
    for m in (plain, model):
        m(x).sum().backward()
    for (n, p), q in zip(plain.named_parameters(), model.parameters()):
        assert fusing.error(p.grad, q.grad) < 1e-6, n


# ---------------------------------------------------------------- changes after the first step

def wrapped(layer: nn.Module) -> None:
    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    layer.mlp = Twice(layer.mlp)


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def patched(layer: nn.Module) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * own(x)


def patched_class(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    own = type(layer.mlp).forward
    monkeypatch.setattr(type(layer.mlp), "forward", lambda self, x: 2 * own(self, x))


def parametrized(layer: nn.Module) -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    nn.utils.parametrize.register_parametrization(layer.mlp.up_proj, "weight", Twice())


CHANGES: dict[str, Callable[..., None]] = {
    "the activation": lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()),
    "the scale": lambda layer: setattr(layer.self_attn, "scaling", 0.5),
    "a norm's eps": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1),
    "a forward": patched,
    "a class's forward": patched_class,
    "a class": lambda layer: setattr(layer.mlp, "__class__", type("Other", (Other, type(layer.mlp)), {})),
    "a wrapper": wrapped,
    "a parametrization": parametrized,
    "no norm": lambda layer: setattr(layer, "input_layernorm", nn.Identity()),
    "no causality": lambda layer: setattr(layer.self_attn, "is_causal", False),
    "dropout": lambda layer: setattr(layer.mlp, "act_fn", nn.Sequential(nn.SiLU(), nn.Dropout(0.0), nn.Tanh())),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_after_the_first_step_is_followed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parity.seed()
    model = LLAMA()
    own = copy.deepcopy(model)
    model = stream(model)
    batch = zoo.text_unpadded(0)
    fusing.grads_agree(grads(own, batch), grads(model, batch))
    fusing.all_fused(codes(model))
    change = CHANGES[what]
    more = (monkeypatch,) if what == "a class's forward" else ()
    for m in (own, model):
        change(m.model.layers[1], *more) if m is own or not more else None
    known, found = ({n.replace(".inner.", ".").replace("parametrizations.weight.original", "weight"): g
                     for n, g in grads(m, batch).items()} for m in (own, model))
    fusing.grads_agree(known, {n: found[n] for n in known})


def test_a_head_that_is_tied_afterwards_is_followed() -> None:
    parity.seed()
    model = LLAMA()
    own = copy.deepcopy(model)
    model = stream(model)
    batch = zoo.text_unpadded(0)
    grads(model, batch)
    for m in (own, model):
        m.lm_head.weight = m.model.embed_tokens.weight
    fusing.grads_agree(grads(own, batch), grads(model, batch))


def test_the_head_fuses_in_evaluation_too_where_gradients_are_wanted() -> None:
    model = stream(LLAMA().eval())
    model(**zoo.text_unpadded(0)).loss.backward()
    assert "fused with the loss" in mt.explain(model)


def test_guards_of_a_layer_take_a_tenth_of_a_millisecond() -> None:
    """Of one that is called as `from_pretrained` has it, with a cache. The least of many: other work is no failure."""
    model = stream(lm("llama", num_hidden_layers=6)())
    model(**zoo.text_unpadded(0), use_cache=True).loss.backward()
    windows = [w for w in runtime_of(model).windows if "layers." in w.name]
    assert len({id(w.fused._reader.last) for w in windows}) == 1, "all layers share what was read"
    seen: list[Any] = []
    windows[3].module.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    model(**zoo.text_unpadded(0), use_cache=True)
    fused, best = windows[3].fused, float("inf")
    for _ in range(50):
        start = time.perf_counter()
        assert fused._reader.last.holds(scope_of(windows[3].inner, *seen[0]))
        best = min(best, time.perf_counter() - start)
    assert best < 1e-4, f"{best * 1e6:.0f} us"


@pytest.mark.parametrize("factor", [1.0, 1.03])
def test_a_kernel_that_is_wrong_in_bf16_is_refused(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 3 %: three times what rounding takes a norm's output and gradients from fp32."""
    own = parts.Norm.forward

    def forward(self: Any, x: Tensor, w: Any, *linears: Any) -> Any:
        y, rstd = own(self, x, w, *linears)
        return y * factor, rstd

    monkeypatch.setattr(parts.Norm, "forward", forward)
    model = nn.Sequential(nn.Linear(16, 16), Norm()).bfloat16()
    model = mt.stream(model, "cpu", compute="fused", units=["0", "1"])
    model(torch.randn(2, 12, 16).bfloat16()).float().square().mean().backward()
    code = runtime_of(model).windows[1].code
    assert code == "template" if factor == 1 else "is off from fp32 by 3.0e-02" in code, code


def test_forms_that_a_layer_does_not_have_are_tried_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """GPT-OSS has an angle for each pair: forms with one for each number fail on its sizes."""
    model = stream(lm("gpt_oss", num_hidden_layers=1)(), compute="fused")
    model(**zoo.text_unpadded(0)).loss.backward()
    assert set(codes(model).values()) == {"template"}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_layer_of_which_dynamo_makes_nothing_is_read_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """torch 2.13 has no shapes for grouped products in fp32, by which experts are computed where nobody says how."""
    build = lm("qwen3_moe", num_hidden_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = stream(build(), "replay", compute="eager")
    model(**zoo.text_unpadded(0)).loss.backward()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
