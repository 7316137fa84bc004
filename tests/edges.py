"""A small transformer trained under random delays, so that a wait between two queues that is missing shows, and with units
at home in different places: the bits must be the same.

Shared by test_overlap.py (CPU device) and gpu/test_on_gpu.py (CUDA). A *run* is one model streamed and
trained by mt.AdamW; everything it noticed comes back as a dictionary, and two runs are compared to the bit.
Where the delays come from: the engine's own queues sleep before each operation (delay_us of its doors); on
CUDA the stream that computes sleeps inside every layer, in forward and in backward (`Dawdle`).
"""
from __future__ import annotations

import dataclasses
import os
import random
import tempfile
from typing import Any

import doors
import parity
import torch
from situations import Block, Tiny, batch, lm_loss, made
from torch import Tensor

CYCLES_PER_US = 2000      # of a GPU at 2 GHz; only the order of magnitude matters
# On CUDA the host needs about a millisecond to launch a layer: compute that naps for less is never behind the host, and a
# copy that naps for less than a layer takes is never behind compute.
COMPUTE_SLOW, COPIES_SLOW = dict(compute_us=4000, delay_us=50), dict(compute_us=0, delay_us=500)


class Pace:
    """How slow the compute stream is. `us`: the longest sleep; 0 and the CPU device: none."""

    def __init__(self) -> None:
        self.us, self.random = 0, random.Random()

    def nap(self, x: Tensor) -> None:
        if self.us and x.is_cuda:
            torch.cuda._sleep(self.random.randrange(self.us * CYCLES_PER_US))


pace = Pace()


class Dawdle(torch.autograd.Function):
    """x, after a nap of the compute stream; its gradient, after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pace.nap(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        pace.nap(grad)
        return grad


class SlowBlock(Block):
    """Sleeps before its weights are read, in forward (`freed`), and before their gradients are made (`grad`)."""

    def forward(self, x: Tensor) -> Tensor:
        return Dawdle.apply(super().forward(Dawdle.apply(x)))


class Walk(Tiny):
    """Layers in an order that somebody else sets: skipped, repeated, backwards."""

    def __init__(self) -> None:
        super().__init__([SlowBlock() for _ in range(4)])
        self.path = [0, 1, 2, 3]

    def order(self) -> list[int]:
        return self.path


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is trained, apart from delays.

    Attributes:
        slots: 2 is the tightest ring; 3 gives units as small as these a slot each.
        accumulate: micro-batches per step.
        wander: every forward takes another path through the layers; the model is evaluated between steps.
    """
    activations: str = "saved"
    slots: int = 2
    accumulate: int = 1
    wander: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 3

    def name(self) -> str:
        parts = [self.activations, f"slots_{self.slots}", str(self.dtype).removeprefix("torch.")]
        return "-".join(parts + ["accumulate"] * (self.accumulate > 1) + ["wander"] * self.wander)


def train(scenario: Scenario, device: str = "cpu", compute_us: int = 0, nvme: str | None = None,
          **debug: Any) -> dict[str, Tensor]:
    """Losses, gradient norms, weights and fp32 masters of a short training.

    Args:
        compute_us: longest sleep of the compute stream (CUDA). nvme: directory for what goes to disk.
        debug: switches of the engine: delay_us, seed, sync, skip.
    """
    import megatrain_torch as mt
    with parity.exact(device):
        parity.seed()
        pace.us, pace.random = compute_us, random.Random(debug.get("seed", 0))
        model = doors.stream(made(Walk).to(scenario.dtype), device=device, nvme=nvme, plan={
            "activations": scenario.activations, "slots": scenario.slots, "debug": {"poison": True, **debug}})
        opt = mt.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1, max_grad_norm=1.0)
        seen = loop(scenario, model, opt, device)
        seen |= {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
        seen |= {f"master {n}": m for n, m in mt.masters(model).items()}
        mt.unstream(model)
        return seen


def loop(scenario: Scenario, model: Walk, opt: Any, device: str) -> dict[str, Tensor]:
    """Nothing here waits before it must: losses and norms are read when all is done, as far as they are kept."""
    way = random.Random(5)
    losses, norms = {}, {}
    for step in range(scenario.steps):
        for micro in range(scenario.accumulate):
            if scenario.wander:
                model.path = way.choices(range(4), k=way.randrange(2, 6))
            loss = lm_loss(model, batch(step * scenario.accumulate + micro).to(device)) / scenario.accumulate
            loss.backward()
            losses[f"loss {step}.{micro}"] = loss.detach()
        opt.step()
        opt.zero_grad()
        if scenario.wander:
            model.eval()
            with torch.no_grad():
                losses[f"evaluation {step}"] = lm_loss(model, batch(step).to(device))
            model.train()
        if step + 1 == scenario.steps or scenario.wander:
            norms[f"norm {step}"] = torch.tensor(opt.grad_norm)
    return {k: v.cpu() for k, v in losses.items()} | norms


def noticed(right: dict[str, Tensor], scenario: Scenario, **kw: Any) -> str | None:
    """How a training that leaves a wait out differs: by its numbers, or by a replay that is not its forward."""
    from megatrain_torch import MegatrainError
    try:
        return difference(right, train(scenario, **kw))
    except MegatrainError as error:
        if "does not repeat itself" not in str(error):
            raise
        return str(error)


def difference(right: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
    """The first thing that is not the same to the bit; NaN equals NaN."""
    for name, value in right.items():
        if not parity.same_bits(value, other[name]):
            return f"{name}: {parity.describe(value, other[name])}"
    return None


# ---- the same training with units at home in different places -------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIGHT = {"buffers": 2, "buffer_bytes": 65536, "threads": 3}      # of states on disk: some units need several
# By name: the plan, and micro-batches of a step. Of one number of micro-batches the first is what the rest must equal.
PLACES: dict[str, tuple[dict[str, Any], int]] = {
    "ram": ({}, 1),
    "ram-2_slots": ({"slots": 2}, 1),
    "ram-6_slots": ({"slots": 6}, 1),
    "ram-delays": ({"debug": {"delay_us": 300, "seed": 3}}, 1),
    "unlocked-delays": ({"homes": {"layers.0": "through", "layers.2": "vram"},
                         "debug": {"delay_us": 300, "seed": 9, "lock": 0}}, 1),
    "vram": ({"homes": "vram"}, 1),
    "some_in_vram": ({"homes": {"layers.0": "vram", "layers.2": "vram"}}, 1),
    "through": ({"homes": "through"}, 1),
    "some_through-delays": ({"homes": {"layers.0": "through", "layers.2": "vram"},
                             "debug": {"delay_us": 300, "seed": 6}}, 1),
    "arrive": ({"homes": "arrive"}, 1),
    "some_arrive-delays": ({"homes": {"layers.0": "arrive", "layers.1": "vram"},
                            "debug": {"delay_us": 300, "seed": 7}}, 1),
    "disk": ({"homes": "disk", "debug": {"disk": TIGHT}}, 1),
    "some_on_disk-delays": ({"homes": {"layers.0": "disk", "layers.1": "vram", "layers.2": "disk"},
                             "debug": {"delay_us": 300, "seed": 7, "disk": TIGHT}}, 1),
    "weights_on_disk": ({"homes": "disk+weights", "slots": 2, "debug": {"disk": TIGHT}}, 1),
    "some_weights_on_disk-delays": ({"homes": {"layers.0": "disk+weights", "layers.1": "vram", "layers.2": "disk"},
                                     "debug": {"delay_us": 300, "seed": 8, "disk": TIGHT}}, 1),
    "ram-micro": ({}, 3),
    "unlocked-micro": ({"debug": {"lock": 0}}, 3),
    "vram-micro": ({"homes": "vram"}, 3),
    "through-micro": ({"homes": "through"}, 3),
    "arrive-micro": ({"homes": "arrive"}, 3),
    "disk-micro": ({"homes": "disk", "debug": {"disk": TIGHT}}, 3),
    "weights_on_disk-micro": ({"homes": "disk+weights", "debug": {"disk": TIGHT}}, 3),
}


def first_of(name: str) -> str:
    """What `name` must equal."""
    return next(k for k, (_, micro) in PLACES.items() if micro == PLACES[name][1])


def placed(name: str, device: str, dtype: torch.dtype, states: str = "fp32") -> tuple[dict[str, Tensor], dict[str, int]]:
    """Losses, norms, weights, masters and moments after the steps, of which some are clipped; and what was counted."""
    import megatrain_torch as mt
    plan, micro = PLACES[name]
    with parity.exact(device), tempfile.TemporaryDirectory() as scratch:
        parity.seed()
        model = doors.stream(made(Walk).to(dtype), device=device, plan={"states": states} | plan, compute="eager",
                             nvme=scratch if "disk" in name else None)
        opt = mt.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1, states=states)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 7, 0.5)
        losses, seen = [], {}
        for step in range(20 if parity.FULL or device == "cuda" else 12):        # twelve clip in each way, at both rates
            opt.max_grad_norm = 0.05 if step % 5 > 2 else None if step % 2 else 1e9
            for m in range(micro):
                loss = lm_loss(model, batch(step * micro + m).to(device)) / micro
                loss.backward()
                losses.append(loss.detach())
            opt.step()
            schedule.step()
            opt.zero_grad()
            if step % 6 == 5:
                seen[f"norm {step}"] = torch.tensor(opt.grad_norm)
        core = mt.model.stream.runtime_of(model).core
        counted = core.stats() | {"unlocked": core.unlocked()[0]}
        seen |= {f"loss {i}": x.cpu() for i, x in enumerate(losses)}
        seen |= {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
        seen |= {f"master {n}": m for n, m in mt.masters(model).items()}
        seen |= {f"{k} {n}": v.clone() for n, p in model.named_parameters() for k, v in opt.state[p].items()}
        mt.unstream(model)
        assert not os.listdir(scratch), "the scratch file and its manifest are gone"
    return seen, counted


def misplaced(name: str, device: str, dtype: torch.dtype, right: dict[str, Tensor], states: str = "fp32") -> str | None:
    """What is not the same to the bit; also when a placement was none."""
    other, counted = placed(name, device, dtype, states)
    if ("unlocked" in name) != (counted["unlocked"] > 0):
        return f"{counted['unlocked']} bytes were not locked"
    if "disk" in name and not (counted["disk_read_bytes"] and counted["disk_written_bytes"]):
        return "nothing was read from the disk, or written there"
    return difference(right, other)
