"""A small transformer trained under random delays, so that a wait between two queues that is missing shows.

Shared by test_overlap.py (CPU device) and gpu/test_on_gpu.py (CUDA). A *run* is one model streamed and
trained by mt.AdamW; everything it noticed comes back as a dictionary, and two runs are compared to the bit.
Where the delays come from: the engine's own queues sleep before each operation (delay_us of its doors); on
CUDA the stream that computes sleeps inside every layer, in forward and in backward (`Dawdle`).
"""
from __future__ import annotations

import dataclasses
import random
from typing import Any

import doors
import parity
import torch
from parity import EDGES
from situations import Block, Tiny, batch, lm_loss, made
from torch import Tensor

__all__ = ["EDGES", "Scenario", "difference", "train"]

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
            ids = batch(step * scenario.accumulate + micro).to(device)
            loss = lm_loss(model, ids) / scenario.accumulate
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
