"""What the tests of kept tensors on the host and on disk share: the controls, which keep the same on the device; ways
through the graph; and a plain step of the simulation."""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import edges
import fusing
import parity
from edges import Scenario
from fusing import padded
from steps import HOST, Lists, Step
from test_fused import FAMILIES
from torch import Tensor, nn

from megatrain_torch.model.stream import runtime_of

FEW = {"spill": {"bays": 2, "threads": 3}}
LINKS = fusing.lm("qwen3", head_dim=8, num_hidden_layers=5)


def tiny(mode: Any, nvme: Any = None, compute: str = "fused", build: Callable[[], nn.Module] | None = None, **debug: Any
         ) -> nn.Module:
    """A file of few bays where a mode has one."""
    parity.seed()
    build = build or (LINKS if "linked" in str(mode) else FAMILIES["qwen3"])
    disk = {"nvme": nvme if isinstance(nvme, dict) else str(nvme), **FEW} if "+disk" in str(mode) else {}
    return fusing.stream(build(), mode, compute, **disk | debug)


def waiting(model: nn.Module) -> tuple[int, int]:
    """Bytes of bundles in host memory, and in the file: one that was dropped while it was written counts until that is
    over."""
    core = runtime_of(model).core
    for _ in range(2000):
        if core.swap_file() is None or core.swap_file()[2] == 0:
            break
        time.sleep(0.001)
    return core.swap_bytes()[1], (core.swap_file() or ("", 0, 0))[2]


@functools.cache
def on_device(family: str, keep: str) -> fusing.Run:
    return fusing.fused(FAMILIES[family], padded, keep)


def same(a: fusing.Run, b: fusing.Run) -> bool:
    fusing.all_fused(b.codes)
    return all(parity.same_bits(x, y) for x, y in zip(a.losses, b.losses)) and all(
        parity.same_bits(a.weights[n], b.weights[n]) for n in a.weights)


@functools.cache
def overlap_off(scenario: Scenario) -> dict[str, Tensor]:
    return edges.train(scenario, sync=True)


def grads_of(model: nn.Module, go: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    model.zero_grad()
    go(model)
    return {n: parity.frozen(p.grad) for n, p in model.named_parameters()}


def once(model: nn.Module) -> None:
    model(**padded(0)).loss.backward()


def twice(model: nn.Module) -> None:
    loss = model(**padded(0)).loss
    loss.backward(retain_graph=True)
    loss.backward()


def crossed(model: nn.Module) -> None:
    first, second = model(**padded(0)).loss, model(**padded(1)).loss
    first.backward()
    second.backward()


def in_part(model: nn.Module) -> None:
    """A backward that begins in the middle, of a graph that is gone through as a whole later."""
    out = model(**padded(0), output_hidden_states=True)
    out.hidden_states[1].sum().backward(retain_graph=True)
    out.loss.backward()


def plain_step(uses: list[int], weights: list[int], slots: list[int], **changes: Any) -> Step:
    """Windows of 1 s without a backward, each of one unit that is at home in RAM."""
    windows, units, nothing = [0.0] * len(uses), [0.0] * len(weights), Lists.of(() for _ in uses)
    asked = {"forward_s": [1.0] * len(uses), "backward_s": windows, "forward_host_s": windows,
             "backward_host_s": windows, "units": Lists.of((u,) for u in uses), "again": nothing, "leaving": nothing,
             "updated_on": [HOST] * len(weights), "weights": weights, "gradients": weights, "update_s": units,
             "add_s": units, "slots": slots, "micro": 1, "h2d": 1e9, "d2h": 1e9, "both": 1e9, "busy": 1e9}
    return Step(**asked | changes)
