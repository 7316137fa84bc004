"""Streamed equals plain torch, bit for bit, over tiny models of many architectures.

Losses, every gradient after every backward, norms, final weights and buffers, and the next random
number. Each case runs with activations kept and replayed; slots, accumulation, clipping, optimizer
and delays rotate over the cases (parity.ROTATION). MEGATRAIN_FULL=1 runs the whole product.
"""
from __future__ import annotations

import functools

import parity
import pytest
import situations
import torch
import zoo
from torch import nn

RUNS = [pytest.param(name, o, id=f"{name}-{o.name()}")
        for i, name in enumerate(zoo.CASES) for o in parity.options_for(i, steps=2)]


@functools.cache
def script_of(name: str) -> parity.Script:
    return zoo.CASES[name].script       # one object per case: parity keeps plain runs by script


@pytest.mark.parametrize("name, options", RUNS)
def test_streamed_equals_plain_bitwise(name: str, options: parity.Options) -> None:
    parity.check(script_of(name), options)


@pytest.mark.parametrize("name", zoo.CASES if parity.FULL else ["gpt2", "qwen3_moe", "t5", "resnet"])
def test_plain_equals_plain_bitwise(name: str) -> None:
    """The control: a case whose plain runs differ could prove nothing."""
    first, second = (parity.run_one(script_of(name), parity.Options(), streamed=False) for _ in range(2))
    assert parity.first_difference(first, second) is None


def test_cases_are_many_and_learn() -> None:
    assert len(zoo.CASES) >= 60, "architectures were lost"
    plain = parity.run_one(script_of("llama"), parity.Options(steps=1), streamed=False)
    grads = [v for label, v in plain.notes if "gradient" in label]
    assert grads and all(g is not None and g.abs().max() > 0 for g in grads), "a gradient is missing or zero"


@pytest.mark.parametrize("edge", ["ready", "landed"])
def test_a_wait_left_out_is_noticed(edge: str) -> None:
    """Delays and poison make the harness see a missing wait. `freed` and `grad` order compute against copies;
    on the CPU device compute is the calling thread and never behind, so those two are shown on CUDA
    (tests/gpu/run_parity.py --skip) and in tests/c; `updated` matters to mt.AdamW alone: test_overlap.py."""
    options = parity.Options(slots=2, delay_us=300, skip=parity.EDGES[edge])

    def run() -> str | None:
        try:
            return parity.run(situations.plain_transformer, options)
        except parity.error() as error:
            if "does not repeat itself" not in str(error):
                raise
            return str(error)                # a replay that is not its forward

    seen = [run() for _ in range(3)]
    assert any(seen), f"three runs without the wait {edge!r} all equal plain torch"


# ---------------------------------------------------------------- the harness itself

def spoiled(spoil: parity.Script) -> str | None:
    """What the harness says when the second run does something else."""
    plain = parity.run_one(situations.plain_transformer, parity.Options(), streamed=False)
    return parity.first_difference(plain, parity.run_one(spoil, parity.Options(), streamed=False))


def next_float(model: nn.Module) -> None:
    w = model.layers[2].up.weight.data
    w[3, 4] = torch.nextafter(w[3, 4], torch.tensor(9.0))


def test_harness_reports_a_weight_that_is_one_bit_off() -> None:
    def script(t: parity.Trial) -> None:
        t.train(t.stream(situations.made()), situations.batch, situations.lm_loss,
                between=lambda step: next_float(t.model) if step == 2 else None)

    def with_model(t: parity.Trial) -> None:
        stream = t.stream
        t.stream = lambda m: setattr(t, "model", stream(m)) or t.model
        script(t)

    assert "at the end, layers.2.up.weight: 1 of 2048 elements differ" in (spoiled(with_model) or "")


def test_harness_reports_a_missing_gradient() -> None:
    def script(t: parity.Trial) -> None:
        model = t.stream(situations.made())
        model.layers[1].down.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        t.train(model, situations.batch, situations.lm_loss)

    assert (spoiled(script) or "").startswith("step 0, micro-batch 0, gradient of layers.1.down.bias: plain has a tensor")


def test_harness_reports_random_numbers_drawn() -> None:
    def script(t: parity.Trial) -> None:
        t.train(t.stream(situations.made()), situations.batch, situations.lm_loss,
                between=lambda step: torch.rand(1) if step == 2 else None)

    assert (spoiled(script) or "").startswith("next random number")


def test_harness_tells_nan_from_numbers() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert parity.same_bits(nan, nan.clone()) and not parity.same_bits(nan, one)
    assert not parity.same_bits(one, one.double()) and not parity.same_bits(one, None)
