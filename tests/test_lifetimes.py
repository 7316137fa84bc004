"""A streamed model goes when the last name goes, as a plain one does, and what was changed of other packages too."""
from __future__ import annotations

import functools
import gc
import inspect
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from situations import llama, text
from torch import Tensor, nn
from zoo import Chain, update

import megatrain_torch as mt
from megatrain_torch.model.runtime import find_runtime, runtime_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.lin(self.norm(x))))


class Net(nn.Module):
    """With weights that are read outside of windows, and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList([Layer() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x * self.scale, self.embed.weight)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()                              # what is there by now stays: the next collection need not go through it
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tokens() -> Tensor:
    return torch.randint(0, 32, (8,))


def step(model: nn.Module, opt: Any) -> None:
    update(model(tokens()).sum(), opt)


def trained(make: Callable[..., Any] = mt.AdamW, **kw: Any) -> tuple[nn.Module, Any]:
    model = mt.stream(Net(), device="cpu", **kw)
    opt = make(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, opt)
    return model, opt


def watched(model: nn.Module) -> list[Callable[[], Any]]:
    rt = runtime_of(model)
    return [weakref.ref(model), weakref.ref(rt), weakref.ref(model.layers[1].lin.weight), weakref.ref(rt.windows[0])]


def gone(refs: list[Callable[[], Any]]) -> bool:
    return [ref() for ref in refs] == [None] * len(refs)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


WAYS = {"saved": {"plan": {"activations": "saved"}}, "replay": {"plan": {"activations": "replay"}},
        "on the host": {"plan": {"activations": "saved+host"}},
        "inputs on the host": {"plan": {"activations": "replay+host"}}, "fused": {"compute": "fused"},
        "in VRAM": {"plan": {"homes": "vram"}}}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_with_its_last_name(way: str) -> None:
    trained(**WAYS[way])                     # a process's first use of dynamo starts a thread of torch's, and keeps things
    before = threads(), files()
    model, opt = trained(**WAYS[way])
    refs = watched(model)
    del model, opt
    assert gone(refs) and (threads(), files()) == before


def test_with_a_file(tmp_path: Any) -> None:
    before = threads(), files()
    model, opt = trained(plan={"homes": "disk+weights", "activations": "saved+disk"}, nvme=str(tmp_path))
    refs = watched(model)
    del model, opt
    assert gone(refs) and (threads(), files()) == before and not os.listdir(tmp_path)


@pytest.mark.parametrize("compute", ["eager", "fused"])
def test_a_transformers_model_goes_too(compute: str) -> None:
    before = threads()
    model = mt.stream(llama().train(), device="cpu", compute=compute)
    opt = mt.AdamW(model.parameters())
    out = model(**text(0))
    out.loss.backward()
    opt.step()
    with torch.no_grad():
        model.eval().generate(text(0)["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
    refs = [weakref.ref(model), weakref.ref(runtime_of(model)), weakref.ref(model.model.layers[0])]
    del model, opt, out
    assert gone(refs) and threads() == before


@pytest.mark.parametrize("first", ["model", "optimizer", "loss"])
@pytest.mark.parametrize("way", ["saved", "replay"])
def test_in_any_order(way: str, first: str) -> None:
    model, opt = trained(**WAYS[way])
    loss = model(tokens()).sum()
    with torch.no_grad():
        model(tokens())
    refs = watched(model)
    if first == "optimizer":
        del opt, model, loss
    elif first == "model":
        weight, want = model.layers[0].lin.weight, model.layers[0].lin.weight.detach().clone()
        del model, loss
        assert refs[0]() is None and torch.equal(weight, want), "parameters are somebody's still"
        del weight
        opt.step()
        del opt
    else:
        del model
        loss.backward()
        del opt, loss
    assert gone(refs)


def test_a_layer_that_is_left_works() -> None:
    model, _ = trained()
    layer, ref = model.layers[1], weakref.ref(model)
    x = torch.ones(2, 16)
    with torch.no_grad():
        layer.eval()
        want = layer(x)
        del model
        assert ref() is None and torch.equal(layer(x), want)
    layer(x).sum().backward()
    assert layer.lin.weight.grad.abs().sum() > 0


def test_twenty_models_leave_nothing() -> None:
    """Neither threads nor memory: 20 of them would be 100 MiB of planes."""
    def one() -> None:
        model = mt.stream(Chain(*(nn.Linear(300, 300) for _ in range(4))), device="cpu")
        opt = mt.AdamW(model.parameters())
        model(torch.ones(1, 300)).sum().backward()
        opt.step()

    one()
    before, running = resident(), threads()
    for _ in range(20):
        one()
    assert threads() == running and resident() - before < 10 << 20


@pytest.mark.parametrize("where", ["forward", "backward", "stream"])
def test_after_an_exception(where: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no")

    before = threads()
    if where == "stream":
        model = Net()
        with pytest.raises(mt.MegatrainError):
            mt.stream(model, device="cpu", host=1000)
        ref = weakref.ref(model)
        del model
        assert ref() is None and threads() == before
        return
    model, opt = trained()
    refs = watched(model)
    handle = (model.layers[2].register_forward_pre_hook(fail) if where == "forward"
              else model.layers[2].register_full_backward_pre_hook(fail))
    try:
        step(model, opt)
    except ValueError:
        pass
    del model, opt, handle
    assert gone(refs) and threads() == before


def test_after_mt_unstream_a_trace_and_a_save(tmp_path: Any) -> None:
    model, opt = trained()
    refs = watched(model)
    with mt.trace(model) as t:
        step(model, opt)
    mt.save(model, opt, tmp_path / "kept")
    mt.save(model, opt, tmp_path / "later", asynchronous=True).wait()
    assert t.steps() and t.slices()
    mt.unstream(model)
    del opt
    assert gone(refs[1:2])
    del model
    assert gone(refs)


def test_a_users_own_forward_goes_too() -> None:
    model = Net()
    layer, own = model.layers[1], Layer.forward
    layer.forward = functools.partial(lambda ref, x: 2 * own(ref(), x), weakref.ref(layer))
    del layer
    mt.stream(model, device="cpu")
    model(tokens()).sum().backward()
    ref = weakref.ref(model)
    del model
    assert ref() is None


def test_what_is_installed_looks_like_the_method_it_stands_for() -> None:
    model, _ = trained()
    forward = model.layers[0].forward
    assert forward.__self__ is model.layers[0] and forward.__func__ is Layer.forward
    assert forward.__wrapped__ == Layer.forward.__get__(model.layers[0]) and forward.__name__ == "forward"
    assert list(inspect.signature(forward).parameters) == ["x"]


# ---- other packages ------------------------------------------------------------------------------

def patched() -> dict[str, Any]:
    """Everything of torch, transformers and accelerate that a streamed model has changed, as it is."""
    import accelerate
    import transformers
    from torch.nn.modules import module
    from torch.optim import optimizer
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    hooks = {name: dict(value) for name, value in vars(module).items() if name.startswith("_global_") and
             isinstance(value, dict)}
    classes = (nn.Module, nn.Parameter, Tensor, torch.optim.Optimizer, torch.optim.AdamW, accelerate.Accelerator,
               transformers.PreTrainedModel, transformers.Trainer)
    steps = dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)
    return {**hooks, "steps": steps,
            "masks": dict(AttentionMaskInterface._global_mapping), "all masks": dict(ALL_MASK_ATTENTION_FUNCTIONS),
            **{f"{c.__name__}.{n}": v for c in classes for n, v in vars(c).items() if not n.startswith("_abc")}}


def differ(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [n for n in a.keys() | b.keys() if a.get(n) is not b.get(n) and a.get(n) != b.get(n)]


def test_other_packages_are_as_they_were_when_the_last_one_is_gone() -> None:
    """In a process of its own: here another test's model may live still."""
    code = "import conftest, test_lifetimes; test_lifetimes.look_at_other_packages()"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_ends_with_its_process() -> None:
    """Where the last name of a model is that of a script, which goes when modules have gone."""
    code = ("import os, conftest, test_lifetimes, megatrain_torch as mt; from types import SimpleNamespace\n"
            "m = mt.stream(test_lifetimes.llama(), device='cpu'); rt = mt.model.registry.runtime_of(m)\n"
            "write = os.write; rt.exchange = SimpleNamespace(close=lambda: write(1, b'closed')); del rt")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout == "closed", done.stderr


def look_at_other_packages() -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])             # torch patches its own class, once
    plain = llama()
    before = patched()
    first, second = (mt.stream(llama(), device="cpu") for _ in range(2))
    opt = mt.AdamW(first.parameters())
    changed = differ(before, patched())
    assert {n.split(".")[-1] for n in changed} == {
        "_global_parameter_registration_hooks", "_global_module_registration_hooks", "steps", "masks", "all masks",
        "device", "clip_grad_norm_", "load_state_dict"}
    assert plain.device == torch.device("cpu")
    mt.unstream(first)
    assert differ(before, patched()) == changed, "there is another"
    del second, opt
    assert not differ(before, patched())
    mt.stream(first, device="cpu")
    assert differ(before, patched())
    del first
    assert not differ(before, patched())


def test_a_plain_optimizer_changes_nothing() -> None:
    before = patched()
    mt.AdamW([nn.Parameter(torch.ones(3))])
    assert not differ(before, patched())


def test_what_others_put_over_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    model = mt.stream(llama(), device="cpu")
    ours = vars(transformers.PreTrainedModel).get("device")
    theirs = property(lambda self: ours.fget(self))
    monkeypatch.setattr(transformers.PreTrainedModel, "device", theirs)
    mt.unstream(model)
    assert vars(transformers.PreTrainedModel)["device"] is theirs and model.device == torch.device("cpu")
    assert find_runtime(model) is None
