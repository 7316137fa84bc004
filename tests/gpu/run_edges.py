"""Every wait between two queues, left out: is it noticed? Without pytest; one JSON line per edge.

    python tests/gpu/run_edges.py [--device cuda] [--seeds 10] [--only EDGE ...]

Trains a small transformer with random delays (tests/edges.py) and compares losses, norms, weights and
masters to the bit with the same training in which nothing overlaps. fp32, TF32 off, deterministic kernels.
The line "none" is the control: no wait is left out, and no run may differ. Every other line says in how
many runs the missing wait changed something; on the CPU device `freed` and `grad` cannot (test_overlap.py
says why). Exit status 1 when the control differs or a wait that should be noticed never is.
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import edges  # noqa: E402
import torch  # noqa: E402
from edges import EDGES, Scenario  # noqa: E402

# Longest naps, us. The host needs about a millisecond to launch a layer: compute that naps for less is
# never behind the host, and a copy that naps for less than a layer takes is never behind compute.
COMPUTE_SLOW = dict(compute_us=4000, delay_us=50)
COPIES_SLOW = dict(compute_us=0, delay_us=500)
BOTH_SLOW = dict(compute_us=1000, delay_us=300)
PACES = {"none": [COMPUTE_SLOW, COPIES_SLOW, BOTH_SLOW],
         "ready": [COPIES_SLOW], "landed": [COPIES_SLOW], "updated": [COPIES_SLOW],
         "freed": [COMPUTE_SLOW], "grad": [COMPUTE_SLOW]}
SCENARIOS = [Scenario("saved"), Scenario("replay"), Scenario("saved", accumulate=2), Scenario("replay", wander=True)]


@functools.cache
def overlap_off(scenario: Scenario, device: str) -> dict[str, torch.Tensor]:
    return edges.train(scenario, device, sync=True)


def examine(edge: str, device: str, seeds: int) -> dict[str, Any]:
    """Runs without one edge, scenario after scenario; a run that raises counts as noticed."""
    began, seen = time.perf_counter(), []
    runs = [(SCENARIOS[seed % len(SCENARIOS)], pace, seed) for pace in PACES[edge] for seed in range(seeds)]
    for scenario, pace, seed in runs:
        right = overlap_off(scenario, device)
        try:
            other = edges.train(scenario, device, seed=seed, skip=EDGES.get(edge, 0), **pace)
            what = edges.difference(right, other)
        except RuntimeError as e:
            what = f"{type(e).__name__}: {e}"
        if what is not None:
            seen.append(f"{scenario.name()}, seed {seed}, {pace}: {what[:300]}")
    return {"test": "edges", "without": edge, "runs": len(runs), "differ": len(seen), "first": seen[:1],
            "seconds": round(time.perf_counter() - began, 1)}


def as_expected(row: dict[str, Any], device: str) -> bool:
    hidden = {"freed", "grad"} if device == "cpu" else set()
    return (row["differ"] == 0) == (row["without"] in {"none"} | hidden)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--seeds", type=int, default=10)
    ask.add_argument("--only", nargs="*", default=list(PACES), choices=list(PACES))
    args = ask.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    good = True
    for edge in args.only:
        row = examine(edge, args.device, args.seeds)
        good &= as_expected(row, args.device)
        print(json.dumps(row | {"device": name, "torch": torch.__version__, "as_expected": as_expected(row, args.device)}),
              flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
