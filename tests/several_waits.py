"""Ranks that do not come where the others wait for them: what each of them says, and after how long."""
from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
from typing import Any
from unittest import mock

import torch
from several import Choosy
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 128), range(4)).square().mean()


def said(rank: int, group: Any, what: str, folder: str) -> tuple[str, float]:
    from megatrain_torch.group import waits
    waits.LATE_S, waits._LOOK_S = 1.0, 0.4
    first, begun = rank == 0, time.monotonic()
    try:
        model = mt.stream(Choosy(), "cpu", group=group)
        if what == "stream":
            if first:
                mt.stream(nn.Linear(4, 4), "cpu", group=group)
            for _ in range(2):
                _loss(model).backward()
            return "", time.monotonic() - begun
        opt = mt.AdamW(model.parameters(), lr=1e-3)
        update(_loss(model), opt)
        mt.save(model, opt, folder + "/a")
        begun = time.monotonic()
        WAYS[what](first, model, opt, folder=folder)
        update(_loss(model), opt)
        mt.unstream(model)
    except mt.MegatrainError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


WAYS = {"save": lambda first, *whole, folder: first and mt.save(*whole, folder + "/b"),
        "load": lambda first, *whole, folder: first and mt.load(*whole, folder + "/a"),
        "asynchronous": lambda first, *whole, folder: mt.save(*whole, folder + "/b", asynchronous=first),
        # Something else for so long, as an evaluation: no error.
        "late": lambda first, *whole, folder: (first and time.sleep(4), mt.save(*whole, folder + "/b"))}


# ---- what one rank does otherwise ----------------------------------------------------------------

def otherwise(rank: int, group: Any, what: str) -> str:
    """What each rank is told where the second one does something else; "": nothing."""
    odd = rank == 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)).to(torch.bfloat16)
    if what == "buffers":
        model.register_buffer("table", torch.zeros(3 + odd))
    asked = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
    changed = {"lr": 1e-2, "betas": (0.9, 0.9), "eps": 1e-6, "weight_decay": 0.1, "maximize": True, "states": "8bit"}
    try:
        model = mt.stream(model, "cpu", group=group)
        opt = mt.AdamW(model.parameters(), **asked | ({what: changed[what]} if odd and what in changed else {}))
        for number in range(3):
            model(torch.ones(3, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            if number == 1:
                _once(what, odd, model, opt)
            if not (odd and what == "skips" and number == 1):
                opt.step()
            opt.zero_grad()
        assert opt.grad_norm is not None
        mt.unstream(model)
    except mt.MegatrainError as error:
        return str(error)
    return ""


def _once(what: str, odd: bool, model: nn.Module, opt: Any) -> None:
    """After the second backward."""
    weight = model[0].weight
    if what == "grad written" and odd:
        weight.grad[63, 63] = 7.0                        # of what the other rank updates, or this one
        weight.grad[0, 0] = 7.0
    if what == "grad replaced" and odd:
        weight.grad = torch.ones(64, 64, dtype=torch.bfloat16)
    if what == "grad read" and odd:
        weight.grad.norm()
    if what == "grad written by all":
        weight.grad.mul_(0.5)
    if what == "step" and odd:
        opt.state[weight]["step"] += 1
    if what == "frozen" and odd:
        weight.requires_grad_(False)
    if what == "written" and odd:
        with torch.no_grad():
            weight.mul_(0.5)


def ends_before(rank: int, group: Any, how: str) -> str:
    """A rank is gone before the others come to mt.stream, or to another one. What these are told."""
    if how == "between":
        mt.unstream(mt.stream(nn.Linear(8, 8), "cpu", group=group))
        torch.distributed.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mt.stream(nn.Linear(8, 8), "cpu", group=group)
    except mt.MegatrainError as error:
        return str(error)
    return ""


def drops_first(rank: int, group: Any) -> int:
    """One rank lets go of a model whose states are on its device; the other reads them, then."""
    model = mt.stream(nn.Linear(300, 300), "cpu", group=group, plan={"homes": "vram"})
    opt = mt.AdamW(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    opt.step()
    if rank == 0:
        del model, opt
        gc.collect()
        return 90000
    time.sleep(1.0)
    return int(opt.state_dict()["state"][0]["exp_avg"].count_nonzero())


def unstreams_slowly(rank: int, group: Any) -> int:
    """Weights that are not as they were, where one rank is slower to take its copies."""
    from megatrain_torch.store import gradient
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    want = [p.detach().clone() for p in plain.parameters()]
    model = mt.stream(plain, "cpu", group=group, plan={"homes": "disk+weights"}, nvme=tempfile.gettempdir())
    release = gradient.release
    with mock.patch.object(gradient, "release", lambda record: (time.sleep(0.05 * (rank == 0)), release(record))):
        mt.unstream(model)
    return sum(int((p != w).sum()) for p, w in zip(model.parameters(), want))
