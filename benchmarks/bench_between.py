"""What gloo carries between machines, as new weights go there: from host memory to host memory, in Python's threads.

    python benchmarks/bench_between.py [--pairs 1 2] [--mib 1 64 448] [--seconds 2]

Two pretended machines of so many processes each, over the loopback device. Each process sends to its counterpart and
hears from it at the same time, as group/between.py does. A JSON line for each number and size: GB/s that leave a
machine.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2], help="processes of each machine")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 64, 448], help="of what goes at once")
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
    at = f"tcp://{args.at or '127.0.0.1:29511'}"
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=2 * pairs)
    for mib in args.mib:
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(2 * pairs)]
        dist.all_gather(found, torch.tensor([rate((rank + pairs) % (2 * pairs), mib << 20, args.seconds)],
                                            dtype=torch.float64))
        if rank == 0:
            leaving = [round(sum(t.item() for t in found[m * pairs:(m + 1) * pairs]), 3) for m in range(2)]
            print(json.dumps({"bench": "between", "processes": pairs, "mib": mib, "unit": "GB/s that leave a machine",
                              "machines": leaving, "cpus": os.cpu_count(), "torch": torch.__version__}), flush=True)
    dist.destroy_process_group()


def rate(other: int, nbytes: int, seconds: float) -> float:
    """GB/s that this process sends while it hears as much; each says first whether more comes."""
    mine, theirs = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    hears = threading.Thread(target=hear, args=(other, theirs))
    dist.barrier()
    hears.start()
    begun, sent, more = time.perf_counter(), 0, True
    while more:
        more = time.perf_counter() - begun < seconds
        dist.send(torch.tensor([more]), other)
        dist.send(mine, other)
        sent += nbytes
    took = time.perf_counter() - begun
    hears.join()
    return sent / took / 1e9


def hear(other: int, theirs: torch.Tensor) -> None:
    more = torch.tensor([True])
    while more:
        dist.recv(more, other)
        dist.recv(theirs, other)


if __name__ == "__main__":
    main()
