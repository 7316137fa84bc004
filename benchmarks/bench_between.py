"""What new weights' way between machines carries: from host memory to host memory, in pieces, as group/between.py sends
them; over a GPU of each process and NCCL, or, on the CPU device, gloo.

    python benchmarks/bench_between.py [--device cpu] [--pairs 1 2] [--mib 448] [--seconds 2]

Two pretended machines of so many processes each: each sends to its counterpart and hears from it at the same time. A
JSON line for each number of pairs and size: GB/s that leave a machine, which plans take as
machine="...,network_gbps=GB/s".
Between two real machines: the same script on each, with --at first:29500 and --machine 0 or 1.
"""
from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed as dist

from megatrain_torch.group.between import Pieces
from megatrain_torch.group.control import Control


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, nargs="+", default=[1], help="processes of each machine")
    parser.add_argument("--mib", type=int, nargs="+", default=[448], help="of a rank's part of a unit")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--at", default="", help="host:port on the first of two machines")
    parser.add_argument("--machine", type=int, choices=(0, 1), default=0)
    args = parser.parse_args()
    if not args.at:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for pairs in args.pairs:
        ranks = range(2 * pairs) if not args.at else range(args.machine * pairs, (args.machine + 1) * pairs)
        mp.spawn(process, args=(ranks.start, pairs, args), nprocs=len(ranks))


def process(number: int, first: int, pairs: int, args: Any) -> None:
    torch.set_num_threads(1)
    rank = first + number
    device = torch.device(args.device, number) if args.device == "cuda" else torch.device("cpu")
    at = f"tcp://{args.at or '127.0.0.1:29511'}"
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=2 * pairs)
    control, other = Control(dist.group.WORLD), (rank + pairs) % (2 * pairs)
    low, high = sorted((rank, other))
    ways = {pair: control.way(*pair, device) for pair in ((low, high), (high, low))}
    for mib in args.mib:
        found = control.gather(rate(ways[rank, other], ways[other, rank], device, mib << 20, args.seconds, control))
        if rank == 0:
            leaving = [round(sum(found[m * pairs:(m + 1) * pairs]), 3) for m in range(2)]
            print(json.dumps({"bench": "between", "device": args.device, "processes": pairs, "mib": mib,
                              "unit": "GB/s that leave a machine", "machines": leaving, "cpus": os.cpu_count(),
                              "torch": torch.__version__}), flush=True)
    dist.destroy_process_group()


def rate(out: Any, into: Any, device: torch.device, nbytes: int, seconds: float, control: Control) -> float:
    """GB/s that this process sends while it hears as much: as many rounds as the first one does in that time."""
    mine, theirs = (torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2))
    took = both(out, into, device, mine, theirs, 1)
    rounds = int(control.gather(max(1, seconds // took))[0])
    return rounds * nbytes / both(out, into, device, mine, theirs, rounds) / 1e9


def both(out: Any, into: Any, device: torch.device, mine: torch.Tensor, theirs: torch.Tensor, rounds: int) -> float:
    """Seconds in which so many go, and come."""
    def send() -> None:
        pieces = Pieces(device)
        for _ in range(rounds):
            pieces.send(mine, [out])
        pieces.land()

    def hear() -> None:
        pieces = Pieces(device)
        for _ in range(rounds):
            pieces.receive(theirs, into)
        pieces.land()

    threads, began = [threading.Thread(target=what) for what in (send, hear)], time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
