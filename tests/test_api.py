"""The package's own doors: mt.AdamW, mt.masters, mt.explain, mt.last_step, refusals of arguments.

AdamW's arithmetic is not torch's to the bit: fused multiply-adds, in a more accurate order (docs/numerics.md).
"""
from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from typing import Any

import parity
import pytest
import torch
import torch.nn.functional as F
from parity import assert_same, stream_for_test
from situations import Tiny, batch, lm_loss, made, square
from test_adamw import plain_dots
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import cli
from megatrain_torch.base.testing import Doors, engine_doors, opened
from megatrain_torch.commands.settings import Settings
from megatrain_torch.model.choices import check_model
from megatrain_torch.model.stream import runtime_of


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    lm_loss(model, batch(0)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("own, found", [({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1")])
def test_cuda_has_32_hardware_queues_unless_a_script_says_otherwise(own: dict[str, str], found: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"} | own
    code = "import megatrain_torch, os; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip() == found


# ---------------------------------------------------------------- AdamW

def test_adamw_refuses_words_that_torch_does_not_know() -> None:
    with pytest.raises(TypeError, match="momentum"):
        mt.AdamW([nn.Parameter(torch.ones(2))], momentum=0.9)


# ---------------------------------------------------------------- other doors

def test_masters_are_fp32_copies_of_every_parameter() -> None:
    model = stream_for_test(made())
    found = mt.masters(model)
    assert list(found) == [n for n, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], p), name
    found["head.weight"].zero_()
    assert model.head.weight.abs().max() > 0, "masters() must give copies"


def test_explain_names_every_window() -> None:
    text = mt.explain(stream_for_test(made()))
    for name in ("embed", "layers.0", "layers.3", "norm", "head"):
        assert name in text, f"{name} is missing in:\n{text}"


def test_last_step_counts_bytes() -> None:
    model = stream_for_test(made())
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    lm_loss(model, batch(0)).backward()
    mt.last_step(model)
    lm_loss(model, batch(1)).backward()
    model.zero_grad()
    next(model.parameters()).sum()
    report = mt.last_step(model)
    layer = sum(p.numel() * 4 for p in model.layers[0].parameters())
    assert 2 * layer <= report.h2d_bytes <= 2 * nbytes, "two slots: four layers cannot all stay; none crosses more than twice"
    assert report.d2h_bytes == nbytes, "every gradient leaves exactly once"
    assert report.host_bytes >= 2 * nbytes and report.seconds > 0


def test_gather_gives_weights_on_the_compute_device_and_takes_gradients() -> None:
    model = stream_for_test(made())
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with mt.gather(model.head):
        F.linear(x, model.head.weight).square().sum().backward()
    w = made().head.weight
    F.linear(x, w).square().sum().backward()
    assert torch.equal(model.head.weight.grad, w.grad)


@pytest.mark.parametrize("bad, words", [
    (dict(plan={"slots": 1}), "at least 2"), (dict(plan={"activation": "saved"}), "activation"),
    (dict(plan={"activations": "all"}), "activations"), (dict(compute="jit"), "compute"),
    (dict(plan="auto"), "plan='auto': give what mt.plan made, or a dict of"),
    (dict(units=["layers.9"]), "layers.9"), (dict(units=["layers", "layers.1"]), "inside"),
    (dict(host="1kB"), "host"), (dict(vram="1kB"), "vram"), (dict(vram="much"), "much"), (dict(device="xla"), "device"),
    (dict(device="tpu"), "device='tpu'"), (dict(dtype="bf16"), "give a torch.dtype"), (dict(vram="0GiB"), "is nothing"),
    (dict(plan={"slots": "3"}), "slots='3': a whole number"), (dict(plan={"slots": 2.5}), "slots=2.5"),
    (dict(plan={"slots": None}), "slots=None"), (dict(plan={"threads": "many"}), "threads='many'"),
    (dict(plan={"homes": ["ram"]}), r"homes=\['ram'\]"), (dict(nvme="/no/such"), "/no/such: No such file or directory"),
    (dict(plan={"activations": {"layers.9": "saved"}}), "layers.9"),
], ids=str)
def test_stream_refuses_and_changes_nothing(bad: dict[str, Any], words: str) -> None:
    model = made()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(mt.MegatrainError, match=words):
        mt.stream(model, **{"device": "cpu", **bad})
    assert all(type(p) is nn.Parameter for p in model.parameters()), "parameters were changed"
    assert all("forward" not in vars(m) for m in model.modules()), "modules were wrapped"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    lm_loss(model, batch(0)).backward()


def test_a_buffer_of_a_users_class_is_moved_by_that() -> None:
    """On a GPU it would else come to be a plain tensor."""
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    model = nn.Linear(2, 2)
    model.register_buffer("own", torch.zeros(2).as_subclass(Own))
    mt.stream(model, device="cpu")
    assert torch.Tensor.to in seen and type(model.own) is Own


@pytest.mark.parametrize("late, at", [("filling.own_bytes", 1), ("add_unit", 2), ("offset", 5), ("runtime.Runtime.choose_states", 1),
                                      ("homes.Cap.hold", 1), ("open_slots", 1), ("stream.install", 1),
                                      ("stream.move_buffers", 3)])
def test_a_failure_while_memory_is_taken_gives_all_of_it_back(late: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The at-th call of something fails, of the engine or on the way."""
    from megatrain_torch import _core
    engines, calls, open_engine = [], [], _core.Engine

    def failing(right: Any) -> Any:
        def call(*args: Any, **kw: Any) -> Any:
            calls.append(late)
            if len(calls) == at:
                raise MemoryError(late)
            return right(*args, **kw)
        return call

    class Engine:
        def __init__(self, *args: Any) -> None:
            self.real = open_engine(*args)
            engines.append(self.real)

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.real, name)
            return failing(found) if name == late else found

    monkeypatch.setattr(_core, "Engine", Engine)
    if "." in late:
        where, _, name = late.rpartition(".")
        module, *owner = where.split(".")
        holder = importlib.import_module(f"megatrain_torch.model.{module}")
        holder = getattr(holder, *owner) if owner else holder
        monkeypatch.setattr(holder, name, failing(getattr(holder, name)))
    model = made()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(MemoryError, match=late):
        mt.stream(model, device="cpu", plan={"states": "8bit"})
    monkeypatch.undo()
    assert all(type(p) is nn.Parameter and "_mt" not in vars(p) for p in model.parameters()), "parameters were changed"
    assert all("forward" not in vars(m) for m in model.modules()), "modules were wrapped"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert (model.head.weight.grad == 1).all()
    with pytest.raises(mt.MegatrainError, match="closed"):
        engines[0].stats()
    lm_loss(stream_for_test(model), batch(0)).backward()


def test_what_is_no_module_is_refused_with_the_way() -> None:
    with pytest.raises(mt.MegatrainError, match=r"not 'runs/mine'; mt.from_pretrained\(AutoModelForCausalLM, path\)"):
        mt.stream("runs/mine")
    with pytest.raises(mt.MegatrainError, match=r"takes a torch.nn.Module, not \[1\]$"):
        mt.stream([1])


def test_streaming_twice_is_refused() -> None:
    model = stream_for_test(made())
    with pytest.raises(mt.MegatrainError, match="unstream"):
        mt.stream(model, device="cpu")
    with pytest.raises(mt.MegatrainError):
        mt.stream(nn.Sequential(model, nn.Linear(2, 2)), device="cpu")
    lm_loss(model, batch(0)).backward()


def test_data_parallel_wrappers_are_refused() -> None:
    with pytest.raises(mt.MegatrainError, match="DataParallel"):
        mt.stream(nn.DataParallel(made()), device="cpu")
    model = stream_for_test(made())
    with pytest.raises(mt.MegatrainError, match="DataParallel"):
        nn.parallel.replicate(model, [0]) if torch.cuda.is_available() else model._replicate_for_data_parallel()


@pytest.mark.parametrize("call", [lambda m: mt.unstream(m), lambda m: mt.explain(m), lambda m: mt.masters(m),
                                  lambda m: mt.last_step(m)], ids=["unstream", "explain", "masters", "last_step"])
def test_plain_model_where_a_streamed_one_is_needed(call: Any) -> None:
    with pytest.raises(mt.MegatrainError, match="stream"):
        call(made())


def test_lazy_modules_and_parameter_subclasses_are_refused() -> None:
    class Odd(nn.Parameter):
        pass

    odd = made(lambda: nn.Linear(4, 4))
    odd.weight = Odd(torch.ones(4, 4))
    for model in (nn.Sequential(nn.LazyLinear(4)), odd):
        with pytest.raises(mt.MegatrainError, match="weight"):
            mt.stream(model, device="cpu")


def test_meta_parameters_are_refused_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(mt.MegatrainError, match=r"'1.weight' is on the meta device: load its weights first"):
        mt.stream(model, device="cpu")
    assert type(model[0].weight) is nn.Parameter and "forward" not in model[0].__dict__


def test_units_can_be_chosen_by_name() -> None:
    model = made()
    mt.stream(model, device="cpu", units=["layers.0.up", "layers.1", model.head])
    assert_same(grads_of(made()), grads_of(model))
    assert "layers.0.up" in mt.explain(model)


def test_dtype_converts_before_streaming() -> None:
    model = mt.stream(made(), device="cpu", dtype=torch.bfloat16)
    plain = made().bfloat16()
    for m in (plain, model):
        square(m, batch(0)).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert q.dtype == torch.bfloat16 and torch.equal(p, q) and torch.equal(p.grad, q.grad), name


def test_weights_used_twice_in_a_layer_called_twice_differ_by_one_rounding() -> None:
    """The one sum whose order is ours: a window adds its own uses first, (a + b) + (c + d), where torch's engine
    adds four uses one by one. Three additions either way, so each sum is off by at most 3 * 2^-24 of the sum of
    magnitudes; cancellation here stays under a factor of 8."""
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(x)) + self.norm(x * 2)

    class Net(Tiny):
        def order(self) -> list[int]:
            return [0, 1, 0, 1]

    plain, model = (made(lambda: Net([Twice(), Twice()])) for _ in range(2))
    stream_for_test(model)
    for m in (plain, model):
        lm_loss(m, batch(0)).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        bound = 2 * 3 * 8 * 2.0 ** -24 * p.grad.abs().max()
        assert (p.grad - q.grad).abs().max() <= bound, f"{name}: {parity.describe(p.grad, q.grad)}"


@pytest.mark.parametrize("home", ["ram", "vram"])
def test_gradients_that_are_edited_between_micro_batches_are_added_to_as_they_are(home: str) -> None:
    """Sums of 16-bit gradients are kept in fp32 elsewhere, which an edit of `.grad` is not in."""
    model = mt.stream(made().bfloat16(), device="cpu", plan={"homes": home})
    for micro in range(2):
        lm_loss(model, batch(micro)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.zero_()
    lm_loss(model, batch(2)).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    lm_loss(model, batch(2)).backward()
    assert_same(found, {n: p.grad for n, p in model.named_parameters()})


def test_activations_can_differ_by_window() -> None:
    model = made()
    mt.stream(model, device="cpu", plan={"activations": {"layers.0": "replay", "layers.1": "saved"}})
    assert_same(grads_of(made()), grads_of(model))
    line = {row.split()[0]: row for row in mt.explain(model).splitlines()}
    assert "replay" in line["layers.0"] and "saved" in line["layers.1"]


def test_a_weight_kept_by_a_forward_without_grad_keeps_its_values() -> None:
    """The slot's memory is left to whoever holds a tensor in it; the next unit gets fresh memory."""
    model = stream_for_test(made(), slots=2)
    kept: list[Tensor] = []
    inner = model.layers[0].up
    hook = inner.register_forward_hook(lambda m, i, o: kept.append(m.weight))
    for _ in range(3):
        with torch.no_grad():
            model(batch(0))
    hook.remove()
    assert all(torch.equal(k, inner.weight) for k in kept)


class _Reads(nn.Module):
    """One layer of a kind; see the cases below."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: Any, y: Tensor | None = None) -> Any:
        if self.kind == "list":
            x = x[0]
        out = x + torch.tanh(self.a(x))
        if self.kind == "two gradients":
            out = out + self.b(y) * torch.sin(y)
        if self.kind == "grad mode" and torch.is_grad_enabled():
            out = out * 3.0
        return (x, out) if self.kind == "returns its input" else out


@pytest.mark.parametrize("kind", ["list", "two gradients", "grad mode", "returns its input", "hooked later"])
def test_a_layer_that_takes_or_gives_more_than_its_input_equals_plain_torch(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([_Reads(kind) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            x = y = self.first(x)
            for layer in self.layers:
                out = layer([x] if kind == "list" else x, y if kind == "two gradients" else None)
                x = out[0] + out[1] if kind == "returns its input" else out
            return x

    def run(model: nn.Module) -> list[Any]:
        seen: list[Tensor] = []
        notes: list[Any] = []
        for step in range(3):
            if step == 2 and kind == "hooked later":
                model.layers[1].a.register_forward_hook(lambda m, i, o: seen.append(o))
            loss = model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            loss = loss + sum(t.exp().mean() for t in seen)
            loss.backward()
            notes += [loss.detach().clone(), *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]
            model.zero_grad()
        return notes

    plain, other = run(made(Net)), run(stream_for_test(made(Net), activations="replay"))
    assert all(parity.same_bits(a, b) for a, b in zip(plain, other, strict=True))


# ---- codes in buffers, as gptqmodel keeps them (GPTQ, AWQ) ----

class Packed(nn.Module):
    """As gptqmodel has them: 8 codes of 4 bits in 32, scales of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-2**31, 2**31 - 1, (2, 16), dtype=torch.int32))
        self.register_buffer("scales", torch.rand(1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.qweight[:, None] >> torch.arange(0, 32, 4)[None, :, None] & 15
        return x @ ((codes.reshape(16, 16) - 8) * self.scales)


def test_codes_in_buffers_give_the_same_bits_on_the_cpu_and_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    packed, x = Packed(), torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 16), packed, nn.Linear(16, 1))
    wanted = model(x).sum()
    wanted.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    check_model(model, torch.device("cuda"), None, False)               # a class of one's own
    monkeypatch.setattr(Packed, "__module__", "gptqmodel.nn_modules.qlinear.torch")
    with pytest.raises(mt.MegatrainError, match=r"module '1' \(Packed\) keeps its codes in buffers.*base='nf4'"):
        check_model(model, torch.device("cuda"), None, False)
    model = mt.stream(model, "cpu")
    found = model(x).sum()
    found.backward()
    assert torch.equal(found.detach(), wanted.detach())
    assert all(map(torch.equal, [p.grad for p in model.parameters()], grads))


# ---- the words that mt.stream, mt.plan and mt.AdamW take, and tests' doors ----

KNOWN = "known: ['activations', 'delivery', 'experts', 'grads', 'homes', 'lent', 'slots', 'states', 'threads']"


@pytest.mark.parametrize("word", ["speculate", "debug", "delay_us", "seed", "lock", "sync", "poison"])
def test_a_plan_by_hand_has_no_other_keys(word: str) -> None:
    with pytest.raises(mt.MegatrainError, match=re.escape(f"unknown key {word!r}; {KNOWN}")):
        mt.stream(plain_dots(), device="cpu", plan={word: 1})


@pytest.mark.parametrize("mode", ["whole", "saved+split", "attention+split"])
def test_modes_that_are_gone_are_refused(mode: str) -> None:
    with pytest.raises(mt.MegatrainError, match=re.escape(f"activations={mode!r}; use 'auto', 'replay', 'attention', ")):
        mt.stream(plain_dots(), device="cpu", plan={"activations": {"layers.0": mode}})
    with pytest.raises(mt.MegatrainError, match=re.escape(f"activations={mode!r}: use 'replay', 'attention', ")):
        mt.plan(plain_dots(), tokens=8, seq=8, machine="cpu", activations=mode)


@pytest.mark.filterwarnings("ignore:.*could not be locked")
def test_doors_are_of_what_is_streamed_inside() -> None:
    def unlocked() -> int:
        model = mt.stream(plain_dots(torch.float32, [(5000,)]), device="cpu")
        return runtime_of(model).core.unlocked()[0]

    with engine_doors(lock=0, seed=1):
        assert unlocked() > 0
        with engine_doors(seed=3):
            assert opened() == Doors(seed=3)
        assert opened() == Doors(lock=0, seed=1)
    assert opened() == Doors() and unlocked() == 0


def test_a_door_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="window"), engine_doors(window=1):
        pass


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_formats_that_are_shown_are_not_all_that_are_taken(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert "8bit-sr" in shown and "lo8" not in shown
    with pytest.raises(mt.MegatrainError, match=r"states='4bit': use 'fp32', '8bit' or '8bit-sr'$"):
        mt.AdamW(plain_dots().parameters(), states="4bit")
    with pytest.raises(mt.MegatrainError, match=r"use one of fp32, 8bit, 8bit-sr$"):
        Settings.of({"states": "4bit"}, "run.yaml")
    assert Settings.of({"states": "8bit-lo8"}, "run.yaml").states == "8bit-lo8"
    assert mt.plan(plain_dots(), tokens=8, seq=8, machine="cpu", states="8bit-lo8").states == "8bit-lo8"
