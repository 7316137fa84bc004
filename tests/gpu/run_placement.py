"""Where units live changes no bit. Without pytest; one JSON line per placement.

    python tests/gpu/run_placement.py [--device cuda] [--only PLACE ...] [--states FORMAT ...]

Trains a small transformer (tests/placement.py) for 20 steps in fp32 and in bf16 with units at home in RAM, in
VRAM, in both, with 2, 3 and 6 slots, in one micro-batch and in three, with and without random delays; compares losses, norms, weights, masters and moments. In bf16 with moments of 8 bits
too. Exit status 1 when any differ.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import placement  # noqa: E402
import torch  # noqa: E402
from placement import DTYPES, PLACES  # noqa: E402

from megatrain_torch.base.modes import FORMATS  # noqa: E402


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--only", nargs="*", default=list(PLACES), choices=list(PLACES))
    ask.add_argument("--states", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    args = ask.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    right: dict[tuple[str, str, str], dict[str, torch.Tensor]] = {}
    good = True
    kinds = [(kind, states) for states in args.states for kind in (DTYPES if states == "fp32" else ["bf16"])]
    for kind, states, name in [(*k, n) for k in kinds for n in args.only]:
        began, first = time.perf_counter(), placement.first_of(name)
        if (kind, states, first) not in right:
            right[kind, states, first] = placement.train(first, args.device, DTYPES[kind], states)[0]
        found = placement.difference(name, args.device, DTYPES[kind], right[kind, states, first], states)
        good &= found is None
        print(json.dumps({"test": "placement", "place": name, "dtype": kind, "states": states, "equals": first,
                          "ok": found is None, "difference": found, "device": machine, "torch": torch.__version__,
                          "seconds": round(time.perf_counter() - began, 1)}), flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
