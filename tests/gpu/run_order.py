"""Two GPUs: ranks that go different ways, many steps, in whatever order the driver runs what it was given.

    python tests/gpu/run_order.py [--steps 200]
    CUDA_DEVICE_MAX_CONNECTIONS=1 python tests/gpu/run_order.py         # one hardware queue for all streams
    TORCH_NCCL_BLOCKING_WAIT=1 python tests/gpu/run_order.py            # a rank's host waits for each collective

Layers that are left out by some ranks, used twice or in another order; experts that some ranks' tokens do not need;
weights delivered whole and in shards; micro-batches; units at home in each place. A run that stops is an error after two
minutes, with where each rank is; so is one whose ranks end with different weights.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from several import Job, Pool

SHARDS = ("delivery", "shards")
PLANS = ((), (SHARDS,), (("homes", "vram"),), (("homes", "through"), SHARDS))
JOBS = [Job(case, plan=plan, micro=micro, compute="eager")
        for case in ("choosy", "qwen2_moe") for micro, plan in zip((2, 1, 1, 2), PLANS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    with Pool(2, device=args.device) as pool:
        for job in JOBS:
            begun = time.monotonic()
            job = Job(**{**vars(job), "steps": args.steps, "device": args.device})
            first, second = pool.call("several:train", 2, job)
            ends = [{k: v for k, v in found.items() if k.startswith("weight")} for found in (first, second)]
            if ends[0] != ends[1]:
                raise AssertionError(f"{job}: ranks have different weights")
            print(f"{job.case}, micro {job.micro}, {dict(job.plan)}: {args.steps} steps in "
                  f"{time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
