"""Ranks that do not come where the others wait for them: what each of them says, and after how long."""
from __future__ import annotations

import time
from typing import Any

import torch
from several import Choosy
from torch import nn

ALL = [0, 1, 2, 3]


def _backward(model: nn.Module, which: list[int]) -> None:
    model(torch.ones(3, 128), which).square().mean().backward()


def said(rank: int, group: Any, what: str, folder: str) -> tuple[str, float]:
    import megatrain_torch as mt
    from megatrain_torch.group import waits
    waits.LATE_S, waits._LOOK_S = 1.0, 0.4
    first, begun = rank == 0, time.monotonic()
    try:
        if what == "stream":
            _stream_alone(first, group)
            return "", time.monotonic() - begun
        model = mt.stream(Choosy(), "cpu", group=group)
        opt = mt.AdamW(model.parameters(), lr=1e-3)
        _backward(model, ALL)
        opt.step()
        opt.zero_grad()
        mt.save(model, opt, folder + "/a")
        begun = time.monotonic()
        WAYS[what](first, model, opt, folder)
        _backward(model, ALL)
        opt.step()
        opt.zero_grad()
        mt.unstream(model)
    except mt.MegatrainError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


def _stream_alone(first: bool, group: Any) -> None:
    import megatrain_torch as mt
    model = mt.stream(Choosy(), "cpu", group=group)
    if first:
        mt.stream(nn.Linear(4, 4), "cpu", group=group)
    for _ in range(2):
        _backward(model, ALL)


def _save_alone(first: bool, model: nn.Module, opt: Any, folder: str) -> None:
    import megatrain_torch as mt
    if first:
        mt.save(model, opt, folder + "/b")


def _load_alone(first: bool, model: nn.Module, opt: Any, folder: str) -> None:
    import megatrain_torch as mt
    if first:
        mt.load(model, opt, folder + "/a")


def _save_asynchronously(first: bool, model: nn.Module, opt: Any, folder: str) -> None:
    import megatrain_torch as mt
    mt.save(model, opt, folder + "/b", asynchronous=first)


def _late(first: bool, model: nn.Module, opt: Any, folder: str) -> None:
    """Something else for so long, as an evaluation: no error."""
    import megatrain_torch as mt
    if first:
        time.sleep(4)
    mt.save(model, opt, folder + "/b")


WAYS = {"save": _save_alone, "load": _load_alone, "asynchronous": _save_asynchronously, "late": _late}
