"""Whose code runs a layer: mt.plan and the run have one answer, and a layer that declines keeps what a plan counts."""
from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fusing
import pytest
import torch
from test_planning import VRAM, batch, model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaMLP

import megatrain_torch as mt
from megatrain_torch.base.codes import multiplies
from megatrain_torch.base.modes import read
from megatrain_torch.fused.layer import CALM
from megatrain_torch.fused.templates.decoder import Decoder
from megatrain_torch.graph import window
from megatrain_torch.model.homes import move
from megatrain_torch.model.runtime import runtime_of

LAYERS = [f"model.layers.{i}" for i in range(4)]


def hook(m: nn.Module, number: int | None = None) -> list[Any]:
    layers = m.model.layers if number is None else [m.model.layers[number]]
    return [layer.mlp.register_forward_hook(lambda *_: None) for layer in layers]


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if "their own code" in str(w.message)]


def attention(m: nn.Module, kind: str) -> None:
    m.config._attn_implementation = kind


class Other(LlamaMLP):
    """Of which a proof says at the first call that it computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x)


def otherwise(m: nn.Module) -> None:
    for layer in m.model.layers:
        layer.mlp.__class__ = Other


def run(m: nn.Module, number: int = 0, **more: Any) -> torch.Tensor:
    return m(**batch(2, 16, number), **more).loss


def modes(m: nn.Module) -> set[str]:
    """What a plan says that layers keep."""
    return {runtime_of(m).planning.plan.activations[name] for name in LAYERS}


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of layers that ran their own code, how: all kept, or to run again."""
    found: list[str] = []
    for name in ("ReplayFrame", "SavedFrame"):
        kind = getattr(window, name)

        def made(at: Any, *args: Any, kind: Any = kind) -> Any:
            if at.name in LAYERS:
                found.append(kind.__name__)
            return kind(at, *args)

        monkeypatch.setattr(window, name, made)
    return found


KNOWN: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a hook": (hook, "there are hooks inside it"),
    "flex attention": (lambda m: attention(m, "flex_attention"), "attention by 'flex_attention'"),
    "FlashAttention 2": (lambda m: attention(m, "flash_attention_2"), "attention by 'flash_attention_2'"),
}


@pytest.mark.parametrize("what", KNOWN)
def test_a_plan_counts_what_is_known_before(what: str) -> None:
    change, why = KNOWN[what]
    m = model()
    free = mt.plan(m, tokens=32, seq=16, machine="cpu", vram=VRAM, compute="fused")
    change(m)
    found = mt.plan(m, tokens=32, seq=16, machine="cpu", vram=VRAM, compute="fused")
    assert not free.own and found.own == dict.fromkeys(LAYERS, why)
    assert f"own code: model.layers.0-3 ({why})" in str(found) and "own code" not in str(free)
    assert found.vram["activations"] > free.vram["activations"]


@pytest.mark.parametrize("mode, why", [
    (FlopCounterMode(display=False), "a mode of torch's functions is on"),
    (torch.autocast("cpu", torch.float16), "autocast is on")])
def test_modes_that_are_on_count(mode: Any, why: str) -> None:
    with mode:
        found = mt.plan(model(), tokens=32, seq=16, machine="cpu", vram=VRAM, compute="fused")
    assert set(found.own.values()) == {why}
    assert not mt.plan(model(), tokens=32, seq=16, machine="cpu", vram=VRAM, compute="eager").own


def test_a_plan_from_a_configuration_says_on_what_it_relies() -> None:
    found = mt.plan(model().config, tokens=32, seq=16, machine="cpu", vram=VRAM, compute="fused")
    assert "relies on no hooks inside layers" in str(found)
    assert "relies on" not in str(mt.plan(model(), tokens=32, seq=16, machine="cpu", vram=VRAM, compute="fused"))


def test_a_hook_from_the_start_is_planned_for_and_told_once() -> None:
    m = model()
    hook(m)
    mt.stream(m, "cpu", compute="fused", vram=VRAM)
    with told() as found:
        for number in range(3):
            run(m, number).backward()
    assert runtime_of(m).planning.plan.own.keys() == set(LAYERS) and runtime_of(m).planning.made == 1
    assert len(found) == 1 and "model.layers.0-3 (there are hooks inside it); planned for that" in found[0]


def test_a_hook_in_mid_run_is_planned_for_before_the_pass() -> None:
    m = mt.stream(model(), "cpu", compute="fused", vram=VRAM)
    with told() as found:
        run(m).backward()
        (handle,) = hook(m, 2)
        for number in range(2):
            run(m, number).backward()
            assert runtime_of(m).planning.plan.own == {"model.layers.2": "there are hooks inside it"}
        handle.remove()
        for _ in range(CALM + 2):
            run(m).backward()
        assert not runtime_of(m).planning.plan.own
        hook(m, 2)
        run(m).backward()
    assert len(found) == 1 and "model.layers.2 (there are hooks inside it)" in found[0]
    assert "instead of" in found[0] and "tokens/s" in found[0]


def grads(m: nn.Module, **more: Any) -> dict[str, torch.Tensor]:
    m.zero_grad()
    run(m, **more).backward()
    return {n: p.grad.clone() for n, p in m.named_parameters()}


def test_what_a_proof_refuses_at_the_first_call_runs_again_in_that_pass_and_is_planned_for_then(frames: list[str]) -> None:
    plain, m = model(), model()
    otherwise(plain)
    otherwise(m)
    mt.stream(m, "cpu", compute="fused", vram=VRAM)
    seen = []
    with told() as found:
        for _ in range(3):
            frames.clear()
            seen.append((grads(m), modes(m), set(runtime_of(m).planning.plan.own), set(frames)))
    assert [own for _, _, own, _ in seen] == [set(), set(LAYERS), set(LAYERS)] and len(found) == 1
    assert [how for *_, how in seen] == [{"ReplayFrame"}, {"SavedFrame"}, {"SavedFrame"}]
    assert all(kept == {"saved"} for _, kept, _, _ in seen)
    for got, *_ in seen:
        fusing.grads_agree(grads(plain), got, fusing.ROUNDED)


class Counting(LlamaMLP):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_plan_counts_that_what_writes_does_not_run_again() -> None:
    def asked(m: nn.Module, vram: str) -> set[str]:
        found = mt.plan(m, tokens=8192, seq=128, micro=1, machine="cpu", vram=vram, compute="eager").activations
        return {read(found[name]).keep for name in LAYERS}

    m = model()
    for layer in m.model.layers:
        layer.mlp.__class__ = Counting
    assert "replay" in asked(m, "65MiB")
    mt.stream(m, "cpu", compute="eager", plan={"activations": "replay"})
    with pytest.warns(UserWarning, match="keeps its activations"):
        run(m).backward()
    assert asked(m, "100MiB") == {"saved"}
    with pytest.raises(mt.MegatrainError, match="does not fit"):
        asked(m, "65MiB")


def test_a_layer_that_turns_out_to_write_is_planned_for_before_the_next_pass() -> None:
    m = model()
    for layer in m.model.layers:
        layer.mlp.__class__ = Counting
    mt.stream(m, "cpu", compute="eager", vram=VRAM)
    run(m).backward()
    planning = runtime_of(m).planning
    keeps = {name: "replay" if name in LAYERS else mode for name, mode in planning.plan.activations.items()}
    planning._plans = {32: dataclasses.replace(planning.plan, activations=keeps)}
    move(planning.runtime, planning._plans[32], planning._limit())          # as for longer passes
    with pytest.warns(UserWarning, match="keeps its activations"):
        run(m).backward()
    assert planning.made == 1 and {w.keeps for w in runtime_of(m).windows if w.name in LAYERS} == {"replay"}
    run(m).backward()
    assert planning.made == 2 and modes(m) == {"saved"}


def test_another_call_than_was_planned_for_runs_again_in_backward(frames: list[str]) -> None:
    """With a cache that has entries, which no template takes."""
    m = mt.stream(model(), "cpu", compute="fused", vram=VRAM)
    run(m).backward()
    with torch.no_grad():
        cache = m(input_ids=batch(2, 4, 1)["input_ids"], use_cache=True).past_key_values
    assert not frames
    run(m, past_key_values=cache).backward()
    assert frames == ["ReplayFrame"] * 4
    run(m).backward()                    # is planned for what came last
    assert runtime_of(m).planning.plan.own.keys() == set(LAYERS)
    for _ in range(CALM + 1):
        run(m).backward()
    assert not runtime_of(m).planning.plan.own and frames == ["ReplayFrame"] * 4


@pytest.mark.parametrize("mode", ["saved", "saved+host"])
def test_a_plan_that_the_user_gave_replays_too_and_says_so_once(mode: str, frames: list[str]) -> None:
    plain, m = model(), model()
    hook(m)
    mt.stream(m, "cpu", compute="fused", plan={"activations": mode})
    with told() as found:
        for _ in range(2):
            fusing.grads_agree(grads(plain), grads(m), fusing.ROUNDED)
    assert len(found) == 1 and "model.layers.0-3 (there are hooks inside it)" in found[0] and "run again" in found[0]
    assert frames == ["ReplayFrame"] * 8


def test_a_plan_of_ours_with_own_code_in_it_keeps_what_it_says(frames: list[str]) -> None:
    m = model()
    hook(m)
    plan = mt.plan(m, tokens=32, seq=16, machine="cpu", vram=VRAM, compute="fused")
    mt.stream(m, "cpu", plan=plan)
    with told() as found:
        run(m).backward()
    assert len(found) == 1 and "the plan counts" in found[0] and frames == ["SavedFrame"] * 4


def test_what_does_not_fit_by_own_code_names_the_layers() -> None:
    m = model()
    hook(m)
    mt.stream(m, "cpu", compute="fused", vram="100MiB")
    mt.AdamW(m.parameters())
    with pytest.raises(mt.MegatrainError, match=r"their own code, which keeps more: model.layers.0-3 \(there are hooks"):
        m(**batch(64, 1024, 0)).loss.backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_names_layers_and_what_was_planned(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    hook(m, 1)
    mt.stream(m, "cpu", compute="fused", vram=VRAM)
    run(m).backward()

    def gone(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Decoder, where, gone)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as error:
        run(m).backward()
    said = str(error.value)
    assert "model.layers.1 (there are hooks inside it)" in said and "the plan in force counts" in said
    assert said.count("megatrain_torch:") == 1 and "used are" in said


def test_layers_that_no_template_knows_are_told_of_once_where_one_was_wanted() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=64)
    ids = batch(2, 16, 0)
    for compute, many in (("fused", 1), ("eager", 0)):
        m = mt.stream(GPT2LMHeadModel(config), "cpu", compute=compute)
        with told() as found:
            for _ in range(2):
                m(**ids).loss.backward()
        assert len(found) == many and all("transformer.h.0-1 (" in text for text in found)


def test_whose_code_multiplies_codes_is_seen_without_a_read_of_them() -> None:
    """A streamed module's dict answers reads in a forward: it would copy a layer's codes to the device in each pass."""
    class Answering(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise AssertionError(f"{name} was read")

    kind = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    layer = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.none"})(4, 4)
    layer._parameters = Answering(weight=kind(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False))
    assert "not bitsandbytes's Linear4bit as it came" in multiplies(layer, torch.bfloat16)
