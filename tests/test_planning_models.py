"""mt.stream plans itself for models of every kind, as mt.plan plans for them outside of a loop."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from zoo import update

import megatrain_torch as mt
from megatrain_torch.model import planning
from megatrain_torch.model.stream import runtime_of

VRAM = "800MiB"              # with the CPU device's own half a GiB


SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
             vocab_size=64)


def mixture() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, num_local_experts=4))


def dense() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16()


def batch(sequences: int, number: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (sequences, 16), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("compute", ["eager", "fused"])
def test_a_mixture_is_planned_for_at_its_first_pass(compute: str) -> None:
    """Its router's weight is read for a plan, while the forward that asks sees weights on the device."""
    streamed = mt.stream(mixture(), "cpu", compute=compute, vram=VRAM)
    mt.AdamW(streamed.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        streamed(**batch(2, 0)).loss.backward()
    found = runtime_of(streamed).planning.plan
    given = mt.plan(mixture(), tokens=32, seq=16, vram=VRAM, compute=compute, machine="cpu")
    assert (found.homes, found.activations, found.slots) == (given.homes, given.activations, given.slots)


def test_a_plan_is_asked_for_as_outside_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found of a router is kept for later models, so it must not depend on the autocast of a loop."""
    def plan(own: torch.nn.Module, **kwargs: Any) -> mt.Plan:
        weight = own.lm_head.weight
        seen.append((type(weight), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
        return mt.plan(own, **kwargs)

    seen: list[Any] = []
    monkeypatch.setattr(planning, "plan", plan)
    streamed = mt.stream(mixture(), "cpu", vram=VRAM)
    outside = type(streamed.lm_head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        streamed(**batch(2, 0)).loss.backward()
    assert seen == [(outside, torch.float32)] and type(streamed.lm_head.weight) is outside


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("first", ["ram", "vram"])
def test_states_of_parameters_that_are_not_trained_now_move(first: str, states: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that take turns: those that rest have states, and room for them is asked for where they go."""
    def plan(*args: Any, homes: Any, **kwargs: Any) -> mt.Plan:
        if isinstance(homes, dict):
            raise mt.MegatrainError("units are to move")
        found = mt.plan(*args, homes=homes, **kwargs)
        asked.append("ram" if asked and asked[-1] == "vram" else "vram" if asked else first)
        return dataclasses.replace(found, homes=dict.fromkeys(found.homes, asked[-1]))

    def run(**limits: Any) -> list[torch.Tensor]:
        streamed = mt.stream(dense().requires_grad_(False), "cpu", **limits)
        turns = [[getattr(layer.self_attn, name).weight for layer in streamed.model.layers]
                 for name in ("q_proj", "o_proj")]
        opt = mt.AdamW([p for turn in turns for p in turn], lr=1e-2, states=states)
        for number in range(8):
            for turn in (0, 1):
                for p in turns[turn]:
                    p.requires_grad_(turn == number // 2 % 2)
            update(streamed(**batch(2 + number, number)).loss, opt)
        return [p.detach().clone() for p in streamed.parameters()]

    asked: list[str] = []
    monkeypatch.setattr(planning, "plan", plan)
    assert all(torch.equal(a, b) for a, b in zip(run(), run(vram=VRAM))) and len(asked) > 4
