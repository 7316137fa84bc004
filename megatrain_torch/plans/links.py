"""Rates that GPUs of one machine have together and between each other, measured by a process for each.

    rates = links.measure("cuda", 8)            # by names of Machine's attributes

The processes talk by torch.distributed, NCCL's or, on the CPU device, gloo's. Each begins when all are ready, and the
slowest counts: a step waits for it.
"""
from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import _core
from ..base.errors import MegatrainError
from .doctor import Copies, Planes, synchronize
from .fleet import host_rate
from .machine import Machine

LIMIT_S = 180               # in which all of it is over, or the processes are ended
MOST_GBPS = 1e4             # of what could not be seen to hold anything up
LAST_WORDS = 400            # characters of the error by which a process failed


class Sizes(NamedTuple):
    """nbytes: of a copy, and of a unit's gradients. tokens, width: of products beside. rounds: of each. parameters:
    of an update."""

    nbytes: int
    tokens: int
    width: int
    products: int
    rounds: int
    parameters: int


SIZES = {"cuda": Sizes(448 << 20, 16384, 8192, 12, 20, 100_000_000), "cpu": Sizes(1 << 20, 128, 256, 4, 3, 100_000)}


def measure(device: str, gpus: int) -> dict[str, float]:
    """GB/s of several GPUs, or of as many processes that compute on the CPU; see Machine. Raises MegatrainError where a
    process failed, with what it said last; or time was up."""
    with tempfile.TemporaryDirectory(prefix="megatrain-links-") as name:
        folder, env = Path(name), os.environ | ({"GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else {})
        command = [sys.executable, "-m", __name__, device, str(gpus), name]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(gpus):
                with (folder / f"{rank}.said").open("wb") as said:
                    children.append(subprocess.Popen([*command, str(rank)], env=env, stdout=said, stderr=said))
            until = time.monotonic() + LIMIT_S
            while any(found := [child.poll() for child in children]) or None in found:
                if failed := [rank for rank, status in enumerate(found) if status]:     # the others wait for it
                    said = (folder / f"{failed[0]}.said").read_text(errors="replace").strip()
                    error = re.split(r"^(?=\S*(?:Error|Exception)\b)", said, flags=re.MULTILINE)[-1]
                    raise MegatrainError(f"links between GPUs: process {failed[0]} of {gpus} failed; --gpus 1 leaves "
                                         f"them out. It said: {error[:LAST_WORDS]}")
                if time.monotonic() > until:
                    raise MegatrainError(f"links between GPUs: not measured within {LIMIT_S} s; --gpus 1 leaves them "
                                         "out")
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return json.loads((folder / "rates.json").read_text())


def linked(machine: Machine, rates: dict[str, float]) -> Machine:
    """The machine with what measure() found. Its host's memory reaches what was seen, at least."""
    rates = rates | {"host_gbps": max(rates["host_gbps"], host_rate(machine) / 1e9)}
    origins = tuple((name, where) for name, where in machine.origins if name not in rates)
    found = {k: int(rate) if k.endswith("_bytes") else float(f"{rate:.4g}") for k, rate in rates.items()}
    return dataclasses.replace(machine, **found, origins=origins)


# ---- one of the processes ------------------------------------------------------------------------

def main(device_type: str, gpus: int, folder: Path, rank: int) -> None:
    """One of the processes; the first writes what was found."""
    cuda, sizes = device_type == "cuda", SIZES[device_type]
    device = torch.device(device_type, rank) if cuda else torch.device(device_type)
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // gpus))
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=gpus, timeout=timedelta(seconds=LIMIT_S))

    def together() -> None:
        synchronize(device)
        dist.all_reduce(torch.zeros(1, device=device))
        synchronize(device)

    def seconds(fn: Callable[[], Any]) -> float:
        """Seconds of a call, the mean of several, in the slowest process while all make them."""
        fn()
        together()
        began = time.perf_counter()
        for _ in range(sizes.rounds):
            fn()
        synchronize(device)
        took = torch.tensor([(time.perf_counter() - began) / sizes.rounds], device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    nccl, leaving = _communicators(device, gpus, together), sizes.nbytes * (gpus - 1) / gpus
    copies = Copies(device, sizes.nbytes)
    whole, both = (sizes.nbytes / seconds(fn) / 1e9 for fn in (copies.up, copies.both))
    del copies
    sent, got = (torch.zeros(sizes.nbytes // 4 // gpus * gpus, device=device) for _ in range(2))
    exchange = seconds(lambda: dist.all_to_all_single(got, sent))
    lost = _lost(device, sizes, seconds, lambda: dist.all_to_all_single(got, sent, async_op=True))
    planes, threads = Planes(sizes.parameters, "BF16", "BF16", shared=True), max(1, _core.build_info()["cpus"] // gpus)
    update = seconds(lambda: planes.update(threads))
    if rank == 0:
        (folder / "rates.json").write_text(json.dumps({
            "communicator_bytes": nccl, "shared_gparams": gpus * sizes.parameters / update / 1e9, "whole_gbps": whole,
            "host_gbps": 2 * both * gpus, "exchange_gbps": leaving / exchange / 1e9,
            "lost_gbps": min(leaving / max(lost, 1e-12) / 1e9, MOST_GBPS)}))
    dist.destroy_process_group()


def _communicators(device: torch.device, gpus: int, together: Callable[[], None]) -> int:
    """Bytes of the device that the first collectives take."""
    if device.type != "cuda":
        together()
        return 0
    before, x = torch.cuda.mem_get_info(device)[0], torch.zeros(gpus, device=device)
    together()
    dist.all_to_all_single(torch.empty_like(x), x)
    torch.cuda.synchronize(device)
    return max(before - torch.cuda.mem_get_info(device)[0], 0)


def _lost(device: torch.device, sizes: Sizes, seconds: Callable[[Callable[[], Any]], float],
          exchange: Callable[[], Any]) -> float:
    """Seconds by which products take longer beside an exchange."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w = (torch.randn(rows, sizes.width, device=device, dtype=dtype) for rows in (sizes.tokens, sizes.width))

    def products() -> None:
        for _ in range(sizes.products):
            x @ w

    def beside() -> None:
        going = exchange()
        products()
        going.wait()

    # In turn: a card that grows warm slows down.
    return statistics.median(seconds(beside) - seconds(products) for _ in range(3))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
