"""The cases of the parity tests on CUDA, without pytest: one JSON at the end.

    python tests/gpu/run_parity.py [--device cuda] [--only NAME ...] [--seconds 500] [--out FILE] [--skip EDGE ...]

Plain torch on the GPU against the model streamed to the same GPU, fp32, TF32 off, deterministic
algorithms; slots poisoned with NaN, two slots, random delays on every other case. A case that
differs is run plain against plain as well: `control` says whether torch agrees with itself there.
Exit status 1 when a case fails whose control agrees. With --skip the waits named are left out and the
status is 1 when no case notices.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import parity  # noqa: E402
import situations  # noqa: E402
import torch  # noqa: E402
import zoo  # noqa: E402


def scripts() -> dict[str, parity.Script]:
    found = {f"model/{n}": c.script for n, c in zoo.CASES.items()}
    return found | {f"situation/{n}": s for n, s in situations.SITUATIONS.items()}


def outcome(script: parity.Script, options: parity.Options) -> tuple[str, str]:
    """("ok" | "differs" | "error", what was seen)."""
    try:
        difference = parity.run(script, options)
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        return "error", f"{type(e).__name__}: {str(e)[:400]} (at {Path(last.filename).name}:{last.lineno})"
    return ("ok", "") if difference is None else ("differs", difference[:600])


def control(script: parity.Script, options: parity.Options) -> str:
    """Does plain torch agree with itself here?"""
    try:
        runs = [parity.run_one(script, options, streamed=False) for _ in range(2)]
    except Exception as e:
        return f"plain torch fails: {type(e).__name__}: {str(e)[:200]}"
    return parity.first_difference(*runs) or "plain equals plain"


def examine(name: str, script: parity.Script, options: parity.Options) -> dict[str, Any]:
    began = time.perf_counter()
    status, what = outcome(script, options)
    row: dict[str, Any] = {"case": name, "options": options.name(), "status": status}
    if status != "ok":
        row |= {"seen": what, "control": control(script, options)}
    row["seconds"] = round(time.perf_counter() - began, 3)
    return row


def machine(device: str) -> dict[str, str]:
    import transformers
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {"device": gpu, "torch": torch.__version__, "transformers": transformers.__version__,
            "cuda": str(torch.version.cuda), "python": platform.python_version()}


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--only", nargs="*", default=[], help="run cases whose name contains one of these")
    ask.add_argument("--seconds", type=float, default=500.0, help="start no case after this long")
    ask.add_argument("--skip", nargs="*", default=[], choices=list(parity.EDGES),
                     help="leave these waits out: every case should now fail, or the comparison proves little")
    ask.add_argument("--out", default="", help="also write the JSON here")
    args = ask.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began, rows, left = time.perf_counter(), [], []
    for i, (name, script) in enumerate(scripts().items()):
        if args.only and not any(o in name for o in args.only):
            continue
        for options in parity.options_for(i, args.device):
            if time.perf_counter() - began > args.seconds:
                left.append(f"{name} {options.name()}")
                continue
            skip = sum(parity.EDGES[e] for e in args.skip)
            rows.append(row := examine(name, script, dataclasses.replace(options, skip=skip)))
            if row["status"] != "ok" and not skip:
                print(json.dumps(row), file=sys.stderr, flush=True)
    bad = [r for r in rows if r["status"] != "ok"]
    report = {"machine": machine(args.device), "runs": len(rows), "ok": len(rows) - len(bad), "not_ok": bad,
              "not_started": left, "seconds": round(time.perf_counter() - began, 1),
              "identity": parity.IDENTITY}
    text = json.dumps(report)
    if args.out:
        Path(args.out).write_text(text + "\n")
    print(text)
    if args.skip:
        return int(not bad)         # nothing noticed
    return int(any(r["control"] == "plain equals plain" for r in bad) or bool(left))


if __name__ == "__main__":
    sys.exit(main())
