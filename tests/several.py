"""Several processes that train one model together, and one that does the same work alone.

A `Pool` keeps processes for many tests, since each takes seconds to begin. They make one group, of which a case may use
a part:

    with Pool(4) as pool:
        found = pool.call("several:train", 3, Job("llama"))      # in the first three; by rank
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import faulthandler
import gc
import hashlib
import importlib
import math
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import zoo
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt
from megatrain_torch.group import between

# ---- processes -----------------------------------------------------------------------------------

class Pool:
    """
    Attributes:
        pids: by rank.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        """device: "cpu", or "cuda": a GPU each, with NCCL; where there are fewer, they share them, with gloo."""
        self.size, self._folder = size, tempfile.TemporaryDirectory()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["megatrain_torch", "transformers.models.llama.modeling_llama"])     # once for all
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, f"{self._folder.name}/store", its, device),
                                      daemon=True)
            process.start()
            its.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.pids = [p.pid for p in self._processes]

    def call(self, what: str, size: int, *args: Any, timeout: float = 120.0, **kw: Any) -> list[Any]:
        """What `module:function(rank, group, *args, **kw)` gives in the first `size` processes. Raises: one of them
        failed."""
        self.send(what, size, *args, **kw)
        found = [self.answer(rank, timeout) for rank in range(size)]
        if failed := [(rank, text) for rank, (ok, text) in enumerate(found) if not ok]:
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in failed))
        return [value for _, value in found]

    def send(self, what: str, size: int, *args: Any, **kw: Any) -> None:
        for pipe in self._pipes:
            pipe.send((what, size, args, kw))

    def answer(self, rank: int, timeout: float) -> tuple[bool, Any]:
        """What it gave; False: the traceback of what it raised."""
        if not self._pipes[rank].poll(timeout):
            for pid in self.pids:
                os.kill(pid, signal.SIGUSR1)             # they say where they are
            raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
        return self._pipes[rank].recv()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, pipe: Any, device: str) -> None:
    from torch import distributed as dist
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "ACCELERATE_USE_CPU": "true",
                   "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    backend = "nccl" if device == "cuda" and torch.cuda.device_count() >= size else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        del os.environ["ACCELERATE_USE_CPU"]
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) for n in range(2, size + 1)}
    while (asked := pipe.recv()) is not None:
        what, n, args, kw = asked
        if rank >= n:
            continue
        module, name = what.split(":")
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, groups[n], *args, **kw)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def apart(rank: int, group: Any, machines: int, what: str, *args: Any) -> Any:
    """`module:function` as on so many machines, which are pretended: as under so many launchers. Bytes go in pieces."""
    module, name = what.split(":")
    between.SMALL, between.PIECE = 256, 1 << 16
    os.environ["GROUP_RANK"] = str(rank * machines // torch.distributed.get_world_size(group))
    try:
        return getattr(importlib.import_module(module), name)(rank, group, *args)
    finally:
        del os.environ["GROUP_RANK"]


def found_for_gathers(rank: int, group: Any) -> list[int]:
    """Members of the group in which weights are gathered: they find each other, in however many groups each is."""
    from megatrain_torch.group import control
    own, control._nccl = control._nccl, lambda store, members, place, patience: (store, members, place)
    try:
        found = control.Control(group)               # until all are here: it has their connections
        store, members, place = found.gathers(timedelta(minutes=1))
    finally:
        control._nccl = own
    store.set(f"here {place}", "")
    store.wait([f"here {n}" for n in range(len(members))], timedelta(seconds=20))
    return members


def pieces(rank: int, group: Any, device: str = "cpu", many: int = 2) -> list[bool]:
    """Of bytes that go to each of two ranks from the other, at the same time, whether they are there when that is told.
    many: pieces of the last ones. On CUDA every second one is locked memory, where it comes from and where it goes."""
    from megatrain_torch.group.control import Control
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    control, between.PIECE = Control(group), 1000
    ways = [control.way(*pair, where) for pair in ((0, 1), (1, 0))]
    given = [[torch.randint(256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(10 * r + n))
              for n in (1, 999, 1000, 5001, 2000, many * 1000)] for r in range(2)]
    given = [[t.pin_memory() if device == "cuda" and n % 2 else t for n, t in enumerate(each, r)]
             for r, each in enumerate(given)]
    found = [torch.zeros_like(t, pin_memory=device == "cuda" and n % 2 == 1) for n, t in enumerate(given[1 - rank])]
    come: list[tuple[int, bool]] = []

    def send() -> None:
        sends = between.Pieces(where)
        for t in given[rank]:
            sends.send(t, [ways[rank]])
        sends.leave(0)

    thread = threading.Thread(target=send)
    thread.start()
    hears = between.Pieces(where)
    for n, t in enumerate(found):
        hears.receive(t, ways[1 - rank])
        hears.behind(lambda n=n: come.append((n, torch.equal(found[n], given[1 - rank][n]))))
    hears.leave(0)
    thread.join()
    assert [n for n, _ in come] == list(range(len(found)))
    return [whole for _, whole in come]


# ---- training ------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Job:
    """
    Attributes:
        case: of zoo.py, or "wide". micro: micro-batches a step, of each process. look: gradients are read before each
            step. write: states are written, replaced and swapped behind each. frozen: parts of names. plan: of mt.stream, by hand; with `vram` it plans itself. device: "cuda": this process's own.
    """

    case: str
    dtype: str = "float32"
    reduce: str = "mean"
    micro: int = 1
    steps: int = 3
    states: str = "fp32"
    clip: float | None = 0.5
    look: bool = False
    write: bool = False
    frozen: tuple[str, ...] = ()
    in_backward: bool = False
    plan: tuple[tuple[str, Any], ...] = ()
    vram: str | None = None
    delay_us: int = 0
    device: str = "cpu"
    compute: str = "auto"


def train(rank: int, group: Any, job: Job) -> dict[str, str]:
    """One of several processes: sums of what it saw."""
    from torch import distributed as dist
    return _train(job, dist.get_world_size(group), [rank], group)


def alone(job: Job, size: int) -> dict[str, str]:
    """One process, to which the micro-batches of all come in turns. Where each has several, or gradients are of 16 bits, they
    are added up by hand: over ranks first, and rounded."""
    return _train(job, size, list(range(size)), None)


def _made(job: Job, group: Any, seed: int) -> tuple[Any, nn.Module, Any]:
    from megatrain_torch.base.testing import engine_doors
    case = _case(job.case)
    model = case.build().to(getattr(torch, job.dtype))
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in job.frozen))
    with engine_doors(delay_us=job.delay_us, seed=seed):
        asked = {} if group is None else {"group": group, "reduce": job.reduce}
        model = mt.stream(model, job.device, plan=dict(job.plan) or None, compute=job.compute, vram=job.vram,
                          nvme=tempfile.gettempdir() if "disk" in str(job.plan) else None, **asked)
    opt = mt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, max_grad_norm=job.clip,
                   states=job.states, in_backward=job.in_backward and group is not None)
    return case, model, opt


def saved(rank: int, group: Any, job: Job, folder: str) -> dict[str, str]:
    """What a model has that saves itself behind its back, while it trains on for a step."""
    case, model, opt = _made(job, group, 0)
    for number in range(3):
        update(_loss(job, case, model, number + rank), opt)
        if number == 1:
            noted = _state(model, opt)
            saving = mt.save(model, opt, folder, extra={"number": number}, asynchronous=True)
    saving.wait()
    mt.unstream(model)
    return noted


def loaded(rank: int, group: Any, job: Job, folder: str) -> dict[str, str]:
    """What a model has that was loaded, and has forgotten what it did before."""
    case, model, opt = _made(job, group, 0)
    update(_loss(job, case, model, 77), opt)
    assert mt.load(model, opt, folder) == {"number": 1}
    noted = _state(model, opt)
    _loss(job, case, model, 78).backward()
    opt.step()
    mt.unstream(model)
    return noted


def early(rank: int, group: Any) -> list[int]:
    """Units whose states have been asked for when each backward's last gradients are sent."""
    from megatrain_torch.model.runtime import runtime_of
    case, model, opt = _made(Job("wide", plan=(("homes", {"model.embed_tokens": "arrive"}),)), group, 0)
    rt, found = runtime_of(model), []
    finish = rt.exchange._finish
    rt.exchange._finish = lambda: (found.append(len(rt.homes.arrivals.pieces)), finish())[1]
    for number in range(3):
        _loss(Job("wide"), case, model, number + rank).backward()
        opt.step()
        opt.zero_grad()
    return found


FILED = {"homes": "disk+weights"}        # all ranks have to come to a forward


def habits(rank: int, group: Any, plan: dict[str, Any] | None = None) -> list[str]:
    """What scripts do with a model in several processes, and one rank alone in between: what is wrong of it."""
    wrong = []
    case, model, opt = _made(Job("wide", plan=tuple((plan or {}).items())), group, 0)
    plain = case.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for m in (model, plain):
            next(m.parameters()).mul_(0.5)                       # once, and not once for each rank
            m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})
    if not _same(model, plain):
        wrong.append("changed in place")
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for number in range(2):
        for m, o in zip((model, plain), sgd):
            case.loss(m, case.batch(number)).backward()          # the same on all ranks
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            o.step()
            o.zero_grad()
    if not _same(model, plain):
        wrong.append("an optimizer of torch's")
    if rank == 0 or plan == FILED:                               # and nobody else, if it may
        with torch.no_grad():
            if not torch.equal(model(**case.batch(5)).logits, plain(**case.batch(5)).logits):
                wrong.append("an evaluation on one rank")
    if rank == 0:
        if not torch.equal(model.state_dict()["lm_head.weight"], plain.lm_head.weight):
            wrong.append("a state_dict on one rank")
    for number in range(2):
        case.loss(model, case.batch(number)).backward()
        kept = [p.grad.norm() for p in model.parameters()] if rank == 0 else []
        opt.step()
        opt.zero_grad()
    if rank == 0 and not all(torch.isfinite(n) for n in kept):
        wrong.append("gradients on one rank")
    states = _states(opt) if rank == 1 else []                   # while the other is in a collective
    if rank == 1 and len(opt.state_dict()["state"]) != len(opt.state):
        wrong.append("an optimizer's state_dict on one rank")
    torch.distributed.barrier(group)
    states = states or _states(opt)
    others: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(others, states, group)
    if any(o != states for o in others):
        wrong.append("states on one rank")
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.load_state_dict(opt.state_dict())
    if _states(opt) != states or any(not torch.equal(p.detach().clone(), kept[name]) for name, p in model.named_parameters()):
        wrong.append("states loaded by all")
    mt.unstream(model)
    return wrong


def _states(opt: Any) -> list[str]:
    return [digest(v) for s in opt.state.values() for v in s.values()]


def refused(rank: int, group: Any, what: str) -> str:
    """What mt.stream says where one rank, or all, ask for what cannot be."""
    model = Choosy()
    odd = rank == 1
    if what == "model" and odd:
        model.head = nn.Linear(128, 5)
    if what == "order" and odd:
        model.layers, model.head = model._modules.pop("head"), model._modules.pop("layers")
    if what == "frozen" and odd:
        model.head.requires_grad_(False)
    asked = {"homes": {"plan": {"homes": "disk+weights"}, "nvme": tempfile.gettempdir()}, "grads": {"plan": {"grads": "none"}},
             "host": {"host": "1KiB"} if odd else {}}.get(what, {})
    reduce = "max" if what == "reduce" and odd else "mean"
    return refusal(lambda: mt.stream(model, "cpu", group=group, reduce=reduce, **asked), "")


def memory(rank: int, group: Any, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Bytes of the store that are this process's; and in memory of what is shared, pages by the number who have them.
    """
    gc.collect()                         # models that an exception has held go
    model = mt.stream(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(dtype), "cpu", group=group)
    opt = mt.AdamW(model.parameters())
    update(model(torch.ones(1, 1024, dtype=dtype)).sum(), opt)
    digest(next(model.parameters()))
    found = model[0].weight._mt.runtime.core.host_bytes(), _shared_bytes()
    if group is not None:
        torch.distributed.barrier(group)
    mt.unstream(model)
    return found


def delivered(rank: int, group: Any, job: Job) -> tuple[int, int, Any]:
    """Bytes that one rank fetched in steps, how often it gathered, and where ranks were apart."""
    case, model, opt = _made(job, group, 5 + rank)
    for number in range(job.steps):
        update(_loss(job, case, model, 2 * number + rank), opt)
        if job.look and rank == 0:                               # and nobody else
            with torch.no_grad():
                case.loss(model, case.batch(number))
    core = model.lm_head.weight._mt.runtime.core
    core.drain()
    found = core.stats()["h2d_bytes"], core.stats()["gathers"], core.astray()
    mt.unstream(model)
    return found


def traced(rank: int, group: Any, job: Job) -> list[str]:
    """Lanes on which something was between processes."""
    case, model, opt = _made(job, group, 0)
    with mt.trace(model) as t:
        for number in range(2):
            update(_loss(job, case, model, number), opt)
    found = sorted({s.lane for s in t.slices() if s.lane in ("exchange", "gather") and s.nbytes > 0})
    mt.unstream(model)
    return found


def filed(rank: int, group: Any) -> tuple[int, int, int, int]:
    """Bytes of weights; of what is shared, this process's part, behind a step; what a forward reads of the drive, and how
    often it gathers. Of a model of one unit."""
    torch.manual_seed(0)
    model = mt.stream(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), "cpu", group=group,
                      plan=FILED, nvme=tempfile.gettempdir())
    opt, core = mt.AdamW(model.parameters(), lr=1e-3), model[0].weight._mt.runtime.core
    x = torch.ones(2, 512)
    before = core.stats()
    with torch.no_grad():
        model(x)
    after = core.stats()
    update(model(x).sum(), opt)
    core.drain()
    shared = _shared_bytes()
    nbytes = sum(p.nbytes for p in model.parameters())
    torch.distributed.barrier(group)
    mt.unstream(model)
    return nbytes, shared, *(after[k] - before[k] for k in ("disk_read_bytes", "gathers"))


def looked_at_around_a_load(rank: int, group: Any, folder: str, homes: str) -> list[str]:
    """What reads as it did not when the checkpoint was written. Before it is loaded all was looked at; one rank is slow to
    give back what a load brought, when others read already."""
    torch.manual_seed(0)
    model = mt.stream(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), "cpu", group=group, plan={"homes": homes})
    opt = mt.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        update(model(torch.ones(2, 64)).sum(), opt)

    def look() -> dict[str, Tensor]:
        return {f"{n} {k}": v.detach().clone() for n, p in model.named_parameters() for k, v in
                {"weight": p, **opt.state[p]}.items()}

    step()
    mt.save(model, opt, folder)
    wanted = look()
    step()
    look()
    held = next(model.parameters())._mt.runtime.homes
    take = held.take
    if rank % 2:
        held.take = lambda unit: (time.sleep(0.1), take(unit))
    mt.load(model, opt, folder)
    held.take = take
    found = look()
    mt.unstream(model)
    return [name for name, v in wanted.items() if not torch.equal(found[name], v)]


def memory_of_saves(rank: int, group: Any, folder: str) -> list[int]:
    """Bytes of what is shared, of all processes: before, behind a save, behind one that ended behind the next update, and
    when a state was looked at."""
    found: list[int] = []

    def note(most: float = math.inf) -> None:
        """In time: threads that a busy machine keeps waiting give back late."""
        torch.distributed.barrier(group)
        for _ in range(50):
            if (now := _all_of(_at_rest(), group)) <= most:
                break
        found.append(now)

    gc.collect()                             # models of tests before
    for _ in range(100):
        if _all_of(_shared_bytes(), group) == 0:
            break
        time.sleep(0.2)

    def step() -> None:
        update(model(torch.ones(1, 1024)).sum(), opt)

    model = mt.stream(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), "cpu", group=group)
    opt = mt.AdamW(model.parameters(), max_grad_norm=1.0)
    step()
    model[0].weight._mt.runtime.drain()
    note()
    mt.save(model, opt, folder)
    note(1.04 * found[0])
    step()
    saving = mt.save(model, opt, folder, asynchronous=True)
    step()
    saving.wait()
    note(1.04 * found[0])
    opt.state[model[0].weight]["exp_avg"].norm()
    note()
    mt.unstream(model)
    return found


class Adapted(nn.Module):
    """A frozen matrix, and a trained one of few numbers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(nn.Linear(1024, 4, bias=False), nn.Linear(4, 1024, bias=False))
        self.base = nn.Linear(1024, 1024, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(x)


def out_of_reach(rank: int, group: Any) -> list[str]:
    """Warnings where a plan took slots of other processes to be in reach, which those of the CPU device are not."""
    from megatrain_torch.model.runtime import runtime_of
    layers = [nn.Linear(1024, 512, bias=False), nn.Linear(512, 1024, bias=False)]
    model = mt.stream(nn.Sequential(*layers), "cpu", plan={"homes": "vram"}, group=group, units=layers)
    rt = runtime_of(model)
    rt.room.asked = dataclasses.replace(rt.room.asked, fleet=dataclasses.replace(rt.room.asked.fleet, linked=True))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert rt.homes.reach(rt.ranks) == rt.homes.reach(rt.ranks) == set(), "told once"
    mt.unstream(model)
    return [str(w.message) for w in told]


def frozen_at_home(rank: int, group: Any, folder: str, together: bool) -> dict[str, int]:
    """Bytes of what is shared, of all processes, while frozen weights are at home on all devices; together with trained
    ones in a unit, or each in its own."""
    found: dict[str, int] = {}
    torch.manual_seed(1)
    wanted = [Adapted() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(wanted))
    first = copy.deepcopy(plain[0].base.weight)
    gc.collect()
    torch.distributed.barrier(group)
    before = _all_of(_at_rest(), group)

    def note(what: str) -> None:
        torch.distributed.barrier(group)
        found[what] = _all_of(_at_rest(), group) - before
        torch.distributed.barrier(group)

    def step() -> None:
        update(model(torch.linspace(-1, 1, 1024).expand(2, -1)).square().mean(), opt)

    model = mt.stream(nn.Sequential(*wanted), "cpu", plan={"homes": "vram"}, group=group,
                      units=wanted if together else None)
    opt = mt.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, max_grad_norm=1.0)
    note("streamed")
    step()
    step()
    note("trained")
    adapters = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    note("adapters read")
    mt.save(model, opt, folder)
    note("saved")
    if rank == 1:
        assert torch.equal(model[0].base.weight.detach().clone(), first), "frozen, read by one rank"
    note("one read")
    assert torch.equal(model[0].base.weight.detach().clone(), first), "and by all"
    step()
    mt.load(model, opt, folder)
    assert all(torch.equal(p.detach().clone(), a) for p, a in zip((p for p in model.parameters() if p.requires_grad), adapters))
    with torch.no_grad():
        model[1].base.weight.mul_(2.0)           # by all, in place
        plain[1].base.weight.mul_(2.0)
    mt.save(model, opt, f"{folder}-2")
    mt.load(model, opt, folder)
    mt.load(model, opt, f"{folder}-2")           # where none of it is in host memory, and what comes first is trained
    assert torch.equal(model[1].base.weight.detach().clone(), plain[1].base.weight), "loaded, frozen"
    model[2].base.weight.requires_grad_()        # it is trained from now on
    plain[2].base.weight.requires_grad_()
    for mine, p in zip(adapters, (p for m in plain for p in m.more.parameters())):
        p.data.copy_(mine)
    for m in (model, plain):
        m(torch.linspace(-1, 1, 1024).expand(2, -1)).square().mean().backward()
        torch.optim.SGD([m[2].base.weight], lr=0.5).step()
    assert torch.equal(model[2].base.weight.detach().clone(), plain[2].base.weight)
    mt.unstream(model)
    assert all(torch.equal(model[i].base.weight, plain[i].base.weight) for i in range(4))
    return found


def _all_of(own: int, group: Any) -> int:
    each: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(each, own, group)
    return sum(each)


def _at_rest() -> int:
    """Threads that send and receive give memory back after what they did it for is over."""
    last, found = -1, _shared_bytes()
    while found != last:
        time.sleep(0.2)
        last, found = found, _shared_bytes()
    return found


def _shared_bytes() -> int:
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            mine = "memfd:megatrain" in line
        elif mine and line.startswith("Pss:"):
            found += int(line.split()[1]) << 10
    return found


def _same(mine: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a.detach().clone(), b) for a, b in zip(mine.parameters(), other.parameters()))


def _train(job: Job, size: int, ranks: list[int], group: Any) -> dict[str, str]:
    noted: dict[str, str] = {}
    case, model, opt = _made(job, group, 5 + ranks[0])
    scale = 1 / (size * job.micro) if group is None or job.reduce == "sum" else 1 / job.micro
    by_hand = group is None and (job.micro > 1 or job.dtype != "float32")
    sums = Sums(job, case, model, size) if by_hand else None
    for step in range(job.steps):
        for micro in range(job.micro):
            numbers = [(step * job.micro + micro) * size + rank for rank in ranks]
            for number in numbers:
                loss = _loss(job, case, model, number)
                noted[f"loss {number}"] = digest(loss)
                (loss * scale).backward()
            if sums is not None:
                sums.add(model, numbers)
        if sums is not None:
            sums.replace(model)
        if job.look:
            noted.update((f"{step} grad {name}", digest(p.grad)) for name, p in model.named_parameters())
        opt.step()
        opt.zero_grad()
        if job.write:
            _write(opt)
        if not job.in_backward:                      # else units are weighed one by one
            noted[f"{step} norm"] = repr(opt.grad_norm)
    noted.update(_state(model, opt))
    mt.unstream(model)
    return noted


def _write(opt: Any) -> None:
    first, second, *rest = opt.state.values()
    first["step"].fill_(0)
    first["exp_avg"].data.mul_(0.5)
    second["exp_avg_sq"] = torch.full_like(second["exp_avg_sq"], 0.25)
    a, b = next((a, b) for i, a in enumerate(rest) for b in rest[:i] if a["exp_avg"].shape == b["exp_avg"].shape)
    a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]
    a["exp_avg"][0].zero_()
    opt.param_groups[0]["lr"] *= 0.5


def _loss(job: Job, case: Any, model: nn.Module, number: int) -> Tensor:
    torch.manual_seed(number)
    return case.loss(model, {k: v.to(job.device) if isinstance(v, Tensor) else v for k, v in case.batch(number).items()})


class Sums:
    """Of a step's gradients in plain torch, or by the same templates: a micro-batch's over ranks, in fp32 and in the order
    of ranks, then rounded and handed over as one micro-batch after the other."""

    def __init__(self, job: Job, case: Any, model: nn.Module, size: int) -> None:
        self.job, self.case, self.plain = job, case, case.build().to(getattr(torch, job.dtype))
        for p, streamed in zip(self.plain.parameters(), model.parameters()):
            p.requires_grad_(streamed.requires_grad)
        if job.compute == "eager" or (job.compute == "auto" and job.device == "cpu"):
            self.plain.to(job.device)
        else:                                # templates have bits of their own
            mt.stream(self.plain, job.device, compute=job.compute, plan={})
        mean = job.reduce == "mean"
        self.before, self.behind = 1 / (job.micro if mean else job.micro * size), 1 / size if mean else 1.0
        self.sums: list[dict[str, Tensor]] = []              # by micro-batch

    def add(self, model: nn.Module, numbers: list[int]) -> None:
        """Gradients of these micro-batches, a rank's each, with the model's weights."""
        self.plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        over_ranks: dict[str, Tensor] = {}
        for number in numbers:
            self.plain.zero_grad()
            (_loss(self.job, self.case, self.plain, number) * self.before).backward()
            for name, p in self.plain.named_parameters():
                if p.grad is not None:
                    own = p.grad.to(self.job.device, torch.float32)
                    over_ranks[name] = over_ranks[name] + own if name in over_ranks else own
        self.sums.append({name: total * self.behind for name, total in over_ranks.items()})

    def replace(self, model: nn.Module) -> None:
        """What a streamed model has for gradients."""
        from megatrain_torch.model.stream import runtime_of
        from megatrain_torch.store.gradient import ADD, SET
        core, names = runtime_of(model).core, {p: name for name, p in model.named_parameters()}
        set_already: set[str] = set()
        for sums in self.sums:
            for r in [r for unit in runtime_of(model).units for r in unit if names[r.param] in sums]:
                rounded, mode = sums[names[r.param]].to(r.dtype), ADD if names[r.param] in set_already else SET
                set_already.add(names[r.param])
                core.offload(r.unit, [(r.index, rounded.data_ptr(), mode, 0)], 0)
                core.drain()
        self.sums.clear()


def _state(model: nn.Module, opt: Any) -> dict[str, str]:
    noted = {f"weight {name}": digest(p) for name, p in model.named_parameters()}
    named = {p: name for name, p in model.named_parameters()}
    for p, state in opt.state.items():
        noted.update((f"{key} {named[p]}", digest(value)) for key, value in state.items() if isinstance(value, Tensor))
    return noted


def refusal(call: Callable[[], Any], otherwise: str = "it was not refused") -> str:
    """What a call is refused with."""
    try:
        call()
    except (mt.MegatrainError, OSError) as error:
        return str(error)
    return otherwise


def digest(t: Tensor | None) -> str:
    """Of its values; zeros have no sign in it."""
    if t is None:
        return "None"
    plain = (t.detach().clone() + 0).contiguous().view(-1).cpu()
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# ---- models --------------------------------------------------------------------------------------

class Choosy(nn.Module):
    """Goes through the layers that it is told to, each as often: a micro-batch may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(128, 4)

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        for i in which:
            x = self.layers[i](x)
        return self.head(x)


WHICH = ([0, 1, 2, 3], [1, 3], [0, 0, 2], [3, 2])          # by micro-batch


def _choosy_batch(number: int) -> dict[str, Any]:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(number))
    return {"x": x, "which": WHICH[number % len(WHICH)]}


def _choosy_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"].to(next(model.parameters()).dtype), batch["which"]).float().square().mean()


def _penalty_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """A part of it is made of the weights on the host."""
    return model(**batch).loss + batch["input_ids"].float().mean() * sum(
        p.float().square().sum() for p in model.parameters() if p.ndim == 1)


class _Straight(torch.autograd.Function):
    """Takes a weight as it is: nothing of it is seen by Python's tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.home = weight.device
        return x @ weight.detach().clone().to(x.device).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, (grad.flatten(0, -2).t() @ ctx.saved_tensors[0].flatten(0, -2)).to(ctx.home)


def _straight_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """As TRL's: the head's weight is given to a Function, outside of the model."""
    hidden = model.model(batch["input_ids"]).last_hidden_state
    return _Straight.apply(hidden.detach(), model.lm_head.weight).square().mean() + hidden.square().mean()


def _case(name: str) -> Any:
    if name == "straight":
        return zoo.Case(name, zoo.CASES["llama"].build, zoo.text, _straight_loss)
    if name == "choosy":
        return zoo.Case(name, Choosy, _choosy_batch, _choosy_loss)
    if name == "penalty":
        return zoo.Case(name, zoo.CASES["llama"].build, zoo.text, _penalty_loss)
    if name == "wide":
        config = {**zoo.DECODER, "hidden_size": 160, "intermediate_size": 320}
        return zoo.Case(name, zoo.from_config("CausalLM", "llama", **config), zoo.text)
    return zoo.CASES[name]


def differences(found: list[dict[str, str]], wanted: dict[str, str]) -> list[str]:
    """Notes of each rank that are not what one process has."""
    return [f"rank {rank}: {key}: {value}, not {wanted.get(key)}"
            for rank, notes in enumerate(found) for key, value in notes.items() if wanted.get(key) != value]
