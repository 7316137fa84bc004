"""What GPUs of one machine have of it together, and of each other: measured by a process for each, as in training.

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
from .doctor import Copies, Planes, isa_here, synchronize
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
    """GB/s of several GPUs, or of as many processes that compute on the CPU; see Machine.

    Raises:
        MegatrainError: a process failed; with what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="megatrain-links-") as folder:
        command = [sys.executable, "-m", __name__, device, str(gpus), folder]
        env = os.environ | ({"GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else {})
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(gpus):
                with (Path(folder) / f"{rank}.said").open("wb") as said:
                    children.append(subprocess.Popen([*command, str(rank)], env=env, stdout=said, stderr=said))
            _wait(children, Path(folder))
        finally:
            for child in children:
                child.kill()
                child.wait()
        return json.loads((Path(folder) / "rates.json").read_text())


def _wait(children: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Raises: one failed, or time is up: the others would wait for it."""
    until = time.monotonic() + LIMIT_S
    while any(found := [child.poll() for child in children]) or None in found:
        if failed := [rank for rank, status in enumerate(found) if status]:
            said = (folder / f"{failed[0]}.said").read_text(errors="replace").strip()
            error = re.split(r"^(?=\S*(?:Error|Exception)\b)", said, flags=re.MULTILINE)[-1]
            raise MegatrainError(f"links between GPUs: process {failed[0]} of {len(children)} failed; --gpus 1 leaves "
                                 f"them out. It said: {error[:LAST_WORDS]}")
        if time.monotonic() > until:
            raise MegatrainError(f"links between GPUs: not measured within {LIMIT_S} s; --gpus 1 leaves them out")
        time.sleep(0.05)


def linked(machine: Machine, rates: dict[str, float]) -> Machine:
    """The machine with what measure() found. Its host's memory reaches what was seen, at least."""
    rates = rates | {"host_gbps": max(rates["host_gbps"], host_rate(machine) / 1e9)}
    origins = tuple((name, where) for name, where in machine.origins if name not in rates)
    found = {k: int(rate) if k.endswith("_bytes") else float(f"{rate:.4g}") for k, rate in rates.items()}
    return dataclasses.replace(machine, **found, origins=origins)


# ---- one of the processes ------------------------------------------------------------------------

class Rank:
    """One process, which computes on `device`."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes, self.count = device, sizes, dist.get_world_size()

    def together(self) -> None:
        synchronize(self.device)
        dist.all_reduce(torch.zeros(1, device=self.device))
        synchronize(self.device)

    def seconds(self, fn: Callable[[], Any]) -> float:
        """Of one of several calls, of the slowest process, while all make them."""
        fn()
        self.together()
        began = time.perf_counter()
        for _ in range(self.sizes.rounds):
            fn()
        synchronize(self.device)
        took = torch.tensor([(time.perf_counter() - began) / self.sizes.rounds], device=self.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    def rates(self) -> dict[str, float]:
        """By names of Machine's attributes."""
        nccl = self.communicators()
        nbytes, copies = self.sizes.nbytes, Copies(self.device, self.sizes.nbytes)
        whole, both = (nbytes / self.seconds(fn) / 1e9 for fn in (copies.up, copies.both))
        del copies
        leaving = nbytes * (self.count - 1) / self.count
        sent, got = (torch.zeros(nbytes // 4 // self.count * self.count, device=self.device) for _ in range(2))
        exchange = self.seconds(lambda: dist.all_to_all_single(got, sent))
        lost = self.lost(lambda: dist.all_to_all_single(got, sent, async_op=True))
        n, threads = self.sizes.parameters, max(1, _core.build_info()["cpus"] // self.count)
        planes, isa = Planes(n, "BF16", "BF16", shared=True), isa_here()
        update = self.seconds(lambda: _core.adam_step(planes.tensors(1), 1.0, threads, isa))
        return {"communicator_bytes": nccl, "shared_gparams": self.count * n / update / 1e9, "whole_gbps": whole,
                "host_gbps": 2 * both * self.count, "exchange_gbps": leaving / exchange / 1e9,
                "lost_gbps": min(leaving / max(lost, 1e-12) / 1e9, MOST_GBPS)}

    def communicators(self) -> int:
        """Bytes of the device that the first collectives take."""
        if self.device.type != "cuda":
            self.together()
            return 0
        before, x = torch.cuda.mem_get_info(self.device)[0], torch.zeros(self.count, device=self.device)
        self.together()
        dist.all_to_all_single(torch.empty_like(x), x)
        torch.cuda.synchronize(self.device)
        return max(before - torch.cuda.mem_get_info(self.device)[0], 0)

    def lost(self, exchange: Callable[[], Any]) -> float:
        """Seconds by which products take longer beside an exchange."""
        n, width = self.sizes.tokens, self.sizes.width
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        x, w = (torch.randn(rows, width, device=self.device, dtype=dtype) for rows in (n, width))

        def products() -> None:
            for _ in range(self.sizes.products):
                x @ w

        def beside() -> None:
            going = exchange()
            products()
            going.wait()
        # In turn: a card that grows warm slows down.
        return statistics.median(self.seconds(beside) - self.seconds(products) for _ in range(3))


def main(device: str, gpus: int, folder: Path, rank: int) -> None:
    """Of process `rank`; the first writes what was found."""
    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // gpus))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=gpus, timeout=timedelta(seconds=LIMIT_S))
    found = Rank(own, SIZES[device]).rates()
    if rank == 0:
        (folder / "rates.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
