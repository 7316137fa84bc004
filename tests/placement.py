"""The same training with units at home in different places: the bits must be the same.

Shared by test_placement.py (CPU device) and gpu/test_on_gpu.py (CUDA).
"""
from __future__ import annotations

import os
import tempfile
from typing import Any

import doors
import edges
import parity
import torch
from situations import batch, lm_loss, made
from torch import Tensor

STEPS = 20
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


def train(name: str, device: str, dtype: torch.dtype, states: str = "fp32") -> tuple[dict[str, Tensor], dict[str, int]]:
    """Losses, norms, weights, masters and moments after 20 steps, of which some are clipped; and what was counted."""
    import megatrain_torch as mt
    plan, micro = PLACES[name]
    with parity.exact(device), tempfile.TemporaryDirectory() as scratch:
        parity.seed()
        model = doors.stream(made(edges.Walk).to(dtype), device=device, plan={"states": states} | plan, compute="eager",
                             nvme=scratch if "disk" in name else None)
        opt = mt.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1, states=states)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 7, 0.5)
        losses, seen = [], {}
        for step in range(STEPS):
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


def difference(name: str, device: str, dtype: torch.dtype, right: dict[str, Tensor],
               states: str = "fp32") -> str | None:
    """What is not the same to the bit; also when a placement was none."""
    other, counted = train(name, device, dtype, states)
    if ("unlocked" in name) != (counted["unlocked"] > 0):
        return f"{counted['unlocked']} bytes were not locked"
    if "disk" in name and not (counted["disk_read_bytes"] and counted["disk_written_bytes"]):
        return "nothing was read from the disk, or written there"
    return edges.difference(right, other)
