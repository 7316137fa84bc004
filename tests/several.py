"""Several processes that train one model together on the CPU device, and one that does the same work alone.

A `Pool` keeps processes for many tests, since each takes seconds to begin. They make one group, of which a case may use
a part:

    with Pool(4) as pool:
        found = pool.call("several:train", 3, Job("llama"))      # in the first three; by rank
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import os
import tempfile
import traceback
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

# ---- processes -----------------------------------------------------------------------------------

class Pool:
    """
    Attributes:
        pids: by rank.
    """

    def __init__(self, size: int) -> None:
        self.size, self._folder = size, tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, f"{self._folder.name}/store", its), daemon=True)
            process.start()
            its.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.pids = [p.pid for p in self._processes]

    def call(self, what: str, size: int, *args: Any, timeout: float = 120.0, **kw: Any) -> list[Any]:
        """What `module:function(rank, group, *args, **kw)` gives in the first `size` processes. Raises: one of them
        failed."""
        for pipe in self._pipes:
            pipe.send((what, size, args, kw))
        found = []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer {what}{args} within {timeout} s")
            found.append(pipe.recv())
        if failed := [(rank, text) for rank, (ok, text) in enumerate(found) if not ok]:
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in failed))
        return [value for _, value in found]

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


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    from torch import distributed as dist
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "ACCELERATE_USE_CPU": "true",
                   "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
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


# ---- training ------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Job:
    """
    Attributes:
        case: of zoo.py, or "wide". micro: micro-batches a step, of each process. look: gradients are read before each
            step. frozen: parts of names. plan: of mt.stream, by hand.
    """

    case: str
    dtype: str = "float32"
    reduce: str = "mean"
    micro: int = 1
    steps: int = 3
    states: str = "fp32"
    clip: float | None = 0.5
    look: bool = False
    frozen: tuple[str, ...] = ()
    in_backward: bool = False
    plan: tuple[tuple[str, Any], ...] = ()
    delay_us: int = 0


def train(rank: int, group: Any, job: Job) -> dict[str, str]:
    """One of several processes: sums of what it saw."""
    from torch import distributed as dist
    return _train(job, dist.get_world_size(group), [rank], group)


def alone(job: Job, size: int) -> dict[str, str]:
    """One process, to which the micro-batches of all come in turns."""
    return _train(job, size, list(range(size)), None)


def _train(job: Job, size: int, ranks: list[int], group: Any) -> dict[str, str]:
    import megatrain_torch as mt
    from megatrain_torch.base.testing import engine_doors
    case, noted = _case(job.case), {}
    model = case.build().to(getattr(torch, job.dtype))
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in job.frozen))
    with engine_doors(delay_us=job.delay_us, seed=5 + ranks[0]):
        asked = {} if group is None else {"group": group, "reduce": job.reduce}
        model = mt.stream(model, "cpu", plan=dict(job.plan) or None, **asked)
    opt = mt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, max_grad_norm=job.clip,
                   states=job.states, in_backward=job.in_backward)
    scale = 1 / (size * job.micro) if group is None or job.reduce == "sum" else 1 / job.micro
    for step in range(job.steps):
        for micro in range(job.micro):
            for rank in ranks:
                number = (step * job.micro + micro) * size + rank
                torch.manual_seed(number)
                loss = case.loss(model, case.batch(number))
                noted[f"loss {number}"] = digest(loss)
                (loss * scale).backward()
        if job.look:
            noted.update((f"{step} grad {name}", digest(p.grad)) for name, p in model.named_parameters())
        opt.step()
        opt.zero_grad()
        noted[f"{step} norm"] = repr(opt.grad_norm)
    noted.update(_state(model, opt))
    mt.unstream(model)
    return noted


def _state(model: nn.Module, opt: Any) -> dict[str, str]:
    noted = {f"weight {name}": digest(p) for name, p in model.named_parameters()}
    named = {p: name for name, p in model.named_parameters()}
    for p, state in opt.state.items():
        noted.update((f"{key} {named[p]}", digest(value)) for key, value in state.items() if isinstance(value, Tensor))
    return noted


def digest(t: Tensor | None) -> str:
    """Of its values; zeros have no sign in it."""
    if t is None:
        return "None"
    plain = (t.detach().clone() + 0).contiguous().view(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# ---- models --------------------------------------------------------------------------------------

def _case(name: str) -> Any:
    import zoo
    if name == "wide":
        config = {**zoo.DECODER, "hidden_size": 160, "intermediate_size": 320}
        return zoo.Case(name, zoo.from_config("CausalLM", "llama", **config), zoo.text)
    return zoo.CASES[name]


def differences(found: list[dict[str, str]], wanted: dict[str, str]) -> list[str]:
    """Notes of each rank that are not what one process has."""
    return [f"rank {rank}: {key}: {value}, not {wanted.get(key)}"
            for rank, notes in enumerate(found) for key, value in notes.items() if wanted.get(key) != value]
