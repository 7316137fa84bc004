"""The words that mt.stream, mt.plan and mt.AdamW take: others are refused with those there are, tests' doors too."""
from __future__ import annotations

import re

import pytest
import torch
from test_adamw import plain_dots

import megatrain_torch as mt
from megatrain_torch import cli
from megatrain_torch.base.testing import Doors, engine_doors, opened
from megatrain_torch.commands.settings import Settings
from megatrain_torch.model.stream import runtime_of

KNOWN = "known: ['activations', 'delivery', 'experts', 'grads', 'homes', 'lent', 'slots', 'states', 'threads']"


@pytest.mark.parametrize("word", ["speculate", "debug", "delay_us", "seed", "lock", "sync", "poison"])
def test_a_plan_by_hand_has_no_other_keys(word: str) -> None:
    with pytest.raises(mt.MegatrainError, match=re.escape(f"unknown key {word!r}; {KNOWN}")):
        mt.stream(plain_dots(), device="cpu", plan={word: 1})


@pytest.mark.parametrize("mode", ["whole", "saved+split", "selective+split"])
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
