"""What ranks do that not all of them do, or not in one order: each case says what is wrong of it."""
from __future__ import annotations

import copy
import functools
import gc
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from several import Choosy, refusal
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zoo import update

import megatrain_torch as mt


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory, so to say")


class Breakable(Choosy):
    breaks = False

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        x = super().forward(x, which[:2])[:, :1] * 0 + x
        x = Breaks.apply(x) if self.breaks else x
        return super().forward(x, which[2:])


ALL = [0, 1, 2, 3]
plan: dict[str, str] = {}                # of what is streamed


def in_shards(rank: int, group: Any, what: str) -> str:
    """One of the cases below, with weights delivered so."""
    plan["delivery"] = "shards"
    try:
        return globals()[what](rank, group)
    finally:
        plan.clear()


def _x(number: int, rank: int) -> Tensor:
    return torch.randn(3, 128, generator=torch.Generator().manual_seed(10 * number + rank))


def _loss(model: nn.Module, number: int, rank: int, which: list[int]) -> Tensor:
    return model(_x(number, rank), which).square().mean()


def _as_ddp(train: Callable[[int, Any, Any, Any], None], count: int = 1) -> Callable[[int, Any], str]:
    """What `train` makes of streamed models, and of plain ones. "": the same."""
    def case(rank: int, group: Any) -> str:
        plain = [Choosy() for _ in range(count)]
        models = [mt.stream(copy.deepcopy(m), "cpu", group=group, plan=plan) for m in plain]
        ddp = [DistributedDataParallel(m, process_group=group, find_unused_parameters=True) for m in plain]
        opts = [mt.AdamW(m.parameters(), lr=1e-2) for m in models]
        train(rank, models, models, SimpleNamespace(step=lambda: [o.step() for o in opts],
                                                    zero_grad=lambda **how: [o.zero_grad(**how) for o in opts]))
        train(rank, ddp, plain, torch.optim.AdamW([p for m in plain for p in m.parameters()], lr=1e-2))
        pairs = [(a.detach().clone(), b) for m, n in zip(models, plain) for a, b in zip(m.parameters(), n.parameters())]
        for m in models:
            mt.unstream(m)
        return f"by {max((a - b).abs().max().item() for a, b in pairs)}" if any(
            not torch.allclose(a, b, atol=1e-6) for a, b in pairs) else ""
    return case


def _steps(opt: Any, loss: Callable[[int], Tensor], look: Callable[[int], None] = lambda _: None) -> None:
    for number in range(3):
        loss(number).backward()
        look(number)
        opt.step()
        opt.zero_grad()


# ---- hooks, and tensors in `.grad` ----

@_as_ddp
def hooks_on_one(rank: int, models: Any, plain: Any, opt: Any) -> None:
    for p in plain[0].parameters() if rank == 0 else ():
        p.register_hook(lambda grad: None)
    _steps(opt, lambda n: _loss(models[0], n, rank, ALL))


@_as_ddp
def hooks_in_another_order(rank: int, models: Any, plain: Any, opt: Any) -> None:
    for p in plain[0].parameters():
        p.register_hook(lambda grad: None)
    _steps(opt, lambda n: _loss(models[0], n, rank, ALL if rank else [3, 1, 0]))


@_as_ddp
def hooks_that_come_later(rank: int, models: Any, plain: Any, opt: Any) -> None:
    def halve(p: Tensor) -> None:
        p.grad.mul_(0.5)

    def look(number: int) -> None:
        for p in plain[0].parameters():
            p.register_hook(lambda grad: None) if number == 0 else p.register_post_accumulate_grad_hook(halve)
    _steps(opt, lambda n: _loss(models[0], n, rank, ALL), look)


@_as_ddp
def grads_kept_on_one(rank: int, models: Any, plain: Any, opt: Any) -> None:
    kept: list[Any] = []

    def keep(_: int) -> None:
        kept[:] = [p.grad for p in plain[0].parameters()] if rank == 0 else []
    _steps(opt, lambda n: _loss(models[0], n, rank, ALL), keep)


@_as_ddp
def grads_of_ones_own(rank: int, models: Any, plain: Any, opt: Any) -> None:
    for number in range(3):
        for micro in range(2):
            _loss(models[0], 2 * number + micro, rank, ALL if micro else [rank]).backward()
            for p in [p for p in plain[0].parameters() if p.grad is not None]:
                p.grad = p.grad * 0.5
        opt.step()
        opt.zero_grad(set_to_none=False)


@_as_ddp
def penalty_before(rank: int, models: Any, plain: Any, opt: Any) -> None:
    for number in range(2):
        sum(p.square().sum() for p in plain[0].parameters()).backward()
        update(_loss(models[0], number, rank, ALL), opt)


def update_in_a_hook(rank: int, group: Any) -> str:
    model = mt.stream(Choosy(), "cpu", group=group, plan=plan)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    said = refusal(lambda: _loss(model, 0, rank, ALL).backward())
    mt.unstream(model)
    return "" if "in_backward=True" in said else said


# ---- two models ----

@functools.partial(_as_ddp, count=2)
def two_models(rank: int, models: Any, plain: Any, opt: Any) -> None:
    """In one backward; of the one that is seen first a rank has not all."""
    _steps(opt, lambda n: _loss(models[0], n, rank, ALL) + _loss(models[1], n, rank, [0, 3] if rank else ALL))


# ---- failures ----

def backward_breaks_on_one(rank: int, group: Any) -> str:
    return _broken(group, lambda number: rank == 1 and number == 1)


def backward_breaks_on_all(rank: int, group: Any) -> str:
    return _broken(group, lambda number: number in (1, 2))


def backward_reaches_nothing_on_one(rank: int, group: Any) -> str:
    """Nobody can know of it; the next one's is another step's."""
    model = mt.stream(Choosy(), "cpu", group=group, plan=plan)
    opt = mt.AdamW(model.parameters(), lr=1e-2)

    def three_steps() -> None:
        for number in range(3):
            update((torch.ones(1, requires_grad=True) if number == rank == 1 else _loss(model, number, rank, ALL)).sum(), opt)

    said = refusal(three_steps)
    mt.unstream(model)
    return "" if f"rank {rank}: this backward comes after {1 + rank} steps" in said else said


def _broken(group: Any, when: Callable[[int], bool]) -> str:
    """Scripts that catch what is raised, and go on."""
    rank, said = dist.get_rank(group), []
    model = mt.stream(Breakable(), "cpu", group=group, plan=plan)
    opt = mt.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for number in range(4):
        model.breaks = when(number)
        try:
            _loss(model, number, rank, ALL).backward()
            opt.step()
        except RuntimeError as error:
            said.append(str(error))
        opt.zero_grad()
    same = _same_on_all(group, model)
    mt.unstream(model)
    wanted = ["out of memory, so to say" if when(n) else "rank 1: its backward was broken off"
              for n in range(4) if when(n) or n == 1]
    return "" if said == wanted and same else f"{said}, not {wanted}; {same}"


def grad_taken_in_backward(rank: int, group: Any) -> str:
    """Of the first layer, by rank 1, before the second micro-batch's comes; of its own, or of the other rank alone."""
    return _taken(rank, group, ALL) + _taken(rank, group, [1, 2, 3] if rank == 1 else ALL)


def _taken(rank: int, group: Any, which: list[int]) -> str:
    model, kept = mt.stream(Choosy(), "cpu", group=group, plan=plan), []
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    first = model.layers[0][0].weight
    _loss(model, 0, rank, ALL).backward()
    hook = model.layers[3].register_full_backward_hook(lambda *_: kept.append(first.grad) if rank == 1 else None)
    said = refusal(lambda: _loss(model, 1, rank, which).backward())
    hook.remove()
    opt.zero_grad()
    kept.clear()
    _loss(model, 2, rank, ALL).backward()
    opt.step()
    same = _same_on_all(group, model)
    mt.unstream(model)
    return "" if "layers.0.0.weight: somebody took its .grad" in said and same else f"{said}; {same}"


class Sometimes(nn.Linear):
    """Whose bias is not always used."""

    shifts = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias if self.shifts else None))


def grad_taken_of_what_is_not_used(rank: int, group: Any) -> str:
    """By rank 1, which has the rest of the unit home before it hears that rank 0 has a gradient of it: as with NCCL."""
    model, kept = nn.Sequential(*(Sometimes(64, 64) for _ in range(4))), []
    mt.stream(model, "cpu", units=list(model), group=group, plan=plan)
    opt, bias = mt.AdamW(model.parameters(), lr=1e-2), model[0].bias
    bias._mt.runtime.exchange._by_streams = True
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    model[0].shifts = rank == 0
    hook = model[1].register_full_backward_hook(lambda *_: kept.append(bias.grad) if rank == 1 else None)
    said = refusal(lambda: model(x).square().mean().backward())
    hook.remove()
    opt.zero_grad()
    kept.clear()
    mt.unstream(model)
    return "" if "0.bias: somebody took its .grad" in said else f"rank {rank} was told {said!r}"


def waits_for_what_it_sent(rank: int, group: Any) -> str:
    """On the host and in backward, as a driver does that waits for running kernels; of layers that one rank leaves out."""
    model = mt.stream(Choosy(), "cpu", group=group, plan=plan)
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    model.head.weight._mt.runtime.exchange._by_streams = True
    for which in ([0, 1, 2, 3], [1, 3]), ([0, 0, 2], [3, 2]), ([1], [2]):
        update(_loss(model, 1, rank, which[rank]), opt)
    same = _same_on_all(group, model)
    mt.unstream(model)
    return "" if same else "ranks have different weights"


def _same_on_all(group: Any, model: nn.Module) -> bool:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, [p.detach().sum().item() for p in model.parameters()], group=group)
    return all(f == found[0] for f in found)


def refused_on_one(rank: int, group: Any) -> str:
    """Before anything is compared; and then all do it right."""
    said = refusal(lambda: mt.stream(Choosy(), "nonsense" if rank == 1 else "cpu", group=group))
    mt.unstream(mt.stream(Choosy(), "cpu", group=group, plan=plan))
    return "" if "device='nonsense'" in said else said


def save_fails_on_one(rank: int, group: Any, folder: str) -> str:
    """While it writes; and then all save."""
    model, follow = mt.stream(Choosy(), "cpu", group=group, plan=plan), mt.Saving._follow

    def fail(*_: Any) -> None:
        raise ValueError("mine")
    if rank == 1:
        mt.Saving._follow = fail
    said = refusal(lambda: mt.save(model, None, folder + "/c"))
    mt.Saving._follow = follow
    mt.save(model, None, folder + "/c")
    mt.load(model, None, folder + "/c")
    mt.unstream(model)
    return "" if "mine" in said else said


def disk_full_on_one(rank: int, group: Any, folder: str, when: str) -> str:
    """No file of rank 1 may have more than 128 KiB (torch.distributed's store has less): before mt.stream, or before a
    step. All are told, and nothing is left there."""
    def fill() -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, resource.RLIM_INFINITY))

    said, begun, model = "it was not refused", time.monotonic(), Choosy()
    for p in model.parameters():
        p.requires_grad_(p.ndim > 1)
    try:
        if when == "stream":
            fill()
        model = mt.stream(model, "cpu", group=group, nvme=folder, plan={"homes": "disk"})
        opt = mt.AdamW(model.parameters())
        for number in range(4):
            _loss(model, number, rank, ALL).backward()
            if number == 2 and when == "step":
                fill()
            opt.step()
            opt.zero_grad()
        opt.state_dict()
    except mt.MegatrainError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    told = ("rank 1" in said or rank == 1) and "File too large" in said
    left = [str(p) for p in Path(folder).iterdir()]
    return "" if told and not left and time.monotonic() - begun < 30 else f"{said} {left} {time.monotonic() - begun}"


def unfrozen_on_disk(rank: int, group: Any, folder: str) -> str:
    """A parameter that trains from the second step on, whose unit's states are in a file by then; and looks at them."""
    found = []
    for homes in ("ram", "disk"):
        model = mt.stream(Choosy(), "cpu", group=group, plan={"homes": homes}, nvme=folder)
        late = [model.layers[1][0].weight, model.layers[2][0].bias]
        opt = mt.AdamW(model.parameters(), max_grad_norm=0.5)
        for number in range(5):
            for p in late:
                p.requires_grad_(number > 0)
            update(_loss(model, number, rank, ALL), opt)
            if number == 2 and rank == 1:
                [m.norm() for p in model.parameters() for m in opt.moments(p)]
        found.append([p.detach().clone() for p in model.parameters()])
        found[-1] += [m for p in model.parameters() for m in opt.moments(p)]
        mt.unstream(model)
    return "" if all(torch.equal(a, b) for a, b in zip(*found)) else "other values"


def moves_again(rank: int, group: Any, first: int, later: int, graphs: bool = False) -> str:
    """The first pass has so many rows, those behind it about so many, others on each rank: after some steps units are where
    they are best for these, with all that they have. graphs: rank 1 has one that is alive, for two steps."""
    from test_planning import VRAM, Costly, Loop, model

    from megatrain_torch.model import planning
    from megatrain_torch.model.stream import runtime_of
    wrong, alive = [], []
    with mock.patch.object(planning, "plan", Costly()):
        loop = Loop(mt.stream(model(torch.bfloat16), "cpu", vram=VRAM, group=group))
        plain = Loop(mt.stream(model(torch.bfloat16), "cpu", plan={"homes": "ram"}, group=group))
        homes = [[]]
        for number in range(13):
            rows = first if number == 0 else later + (number + rank) % 3
            if loop.step((rows, 16)) != plain.step((rows, 16)):
                wrong.append(f"step {number}")
            if number == 5 and graphs and rank == 1:
                alive.append([one.model(input_ids=torch.ones(1, 16, dtype=torch.long)).logits for one in (loop, plain)])
            if number == 9:
                alive.clear()
            if homes[-1] != (now := sorted(runtime_of(loop.model).room.asked.homes)):
                homes.append(now)
        for one in (loop, plain):
            one.states = [m for p in one.model.parameters() for m in one.opt.moments(p)]
        if any(not torch.equal(a, b) for a, b in zip([*loop.weights(), *loop.states], [*plain.weights(), *plain.states])):
            wrong.append("weights or states")
        wrong += [] if len(homes) == 3 and loop.planning.made == 2 else [f"{homes}, {loop.planning.made}"]
        for one in (loop, plain):
            mt.unstream(one.model)
    return " ".join(wrong)


def one_is_slow_to_file_weights(rank: int, group: Any, folder: str) -> str:
    """The other has given its memory of them back by then: of its own portion alone."""
    from megatrain_torch.model.homes import Homes
    own, model = Homes.file_weights, Choosy()
    wanted = [p.detach().clone() for p in model.parameters()]
    with mock.patch.object(Homes, "file_weights", lambda homes, unit: (time.sleep(0.1 * rank), own(homes, unit))):
        model = mt.stream(model, "cpu", group=group, plan={"homes": "disk+weights"}, nvme=folder)
    found = [p.detach().clone() for p in model.parameters()]
    mt.unstream(model)
    return "" if all(torch.equal(a, b) for a, b in zip(found, wanted)) else "other values"


def weights_do_not_leave_memory(rank: int, group: Any, folder: str) -> str:
    """A plan that is made at the first pass would have them in files."""
    from test_planning import VRAM, Loop, model

    from megatrain_torch.model import planning
    in_files = functools.partial(planning.plan, homes="disk+weights")
    with mock.patch.object(planning, "plan", lambda *args, homes=None, **asked: in_files(*args, **asked)):
        said = refusal(lambda: Loop(mt.stream(model(torch.bfloat16), "cpu", vram=VRAM, nvme=folder, group=group)).step((2, 16)))
    return "" if "has its plane HI in memory already" in said else said


def another_way_to_weights_in_files(rank: int, group: Any, folder: str) -> str:
    model = mt.stream(Choosy(), "cpu", group=group, plan={"homes": "disk+weights"}, nvme=folder)
    opt = mt.AdamW(model.parameters())

    def two_passes() -> None:
        _loss(model, 0, rank, ALL).backward()
        opt.step()
        _loss(model, 1, rank, ALL if rank else [0, 2]).backward()

    said = refusal(two_passes)
    parts = ("come to it together", f"rank {1 - rank} is at unit layers.", f"rank {1 - rank} (process", "does not")
    return "" if any(part in said for part in parts) else said


def load_fails_on_one(rank: int, group: Any, folder: str) -> str:
    """Behind the check, while the others load."""
    from megatrain_torch.checkpoint import restore
    model = mt.stream(Choosy(), "cpu", group=group, plan=plan)
    mt.save(model, None, folder + "/c")
    own, begun = restore._Loading.unit, time.monotonic()

    def breaks(self: Any, records: Any) -> None:
        if rank == 1 and records[0].unit == 2:
            raise OSError("a disk is gone")
        own(self, records)

    with mock.patch.object(restore._Loading, "unit", breaks):
        said = refusal(lambda: mt.load(model, None, folder + "/c"))
    return "" if "a disk is gone" in said and time.monotonic() - begun < 10 else f"{said} {time.monotonic() - begun}"


# ---- ranks that do not come where the others wait for them ----------------------------------------

def _of_ones(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 128), range(4)).square().mean()


def said(rank: int, group: Any, what: str, folder: str) -> tuple[str, float]:
    """What each of them says, and after how long."""
    from megatrain_torch.group import control
    control.NOTE_S, control._LOOK_S = 1.0, 0.4
    first, begun = rank == 0, time.monotonic()
    try:
        model = mt.stream(Choosy(), "cpu", group=group)
        if what == "stream":
            if first:
                mt.stream(nn.Linear(4, 4), "cpu", group=group)
            for _ in range(2):
                _of_ones(model).backward()
            return "", time.monotonic() - begun
        opt = mt.AdamW(model.parameters(), lr=1e-3)
        update(_of_ones(model), opt)
        mt.save(model, opt, folder + "/a")
        begun = time.monotonic()
        WAYS[what](first, model, opt, folder=folder)
        update(_of_ones(model), opt)
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
    return refusal(lambda: mt.stream(nn.Linear(8, 8), "cpu", group=group), "")


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
