#!/usr/bin/env python3
"""What fused layers, plans and overlapped updates must reach on one H200 with 128 GiB of host memory.

    OUT=results python benchmarks/must4.py                     # all lines, in order of worth
    OUT=results python benchmarks/must4.py --only 7b-20 small  # lines whose name contains one
    OUT=/tmp/out python benchmarks/must4.py --tiny             # toy sizes on the CPU device
    python benchmarks/must4.py --list

Each line is a program with a time limit. Its JSON lines go to $OUT/results.jsonl, with one more for each
figure: what was found, the aim, and the limit measured in the same run; all else to $OUT/session.log. What
does not fit the machine, fails or runs out of time does not stop the others. A table ends the output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpu_session import Results, program, run, shrunk, step

LANES = {"gpu": "compute", "h2d": "h2d", "d2h": "d2h", "host_update": "host update"}
Record = dict[str, Any]


class Aim(NamedTuple):
    """One figure of a program's record."""

    figure: str
    found: Callable[[Record], float | str]
    aim: float | str
    most: bool  # found may be at most the aim; else at least
    limit: Callable[[Record], str]

    def met(self, record: Record) -> bool:
        found = self.found(record)
        if isinstance(self.aim, str) or isinstance(found, str):
            return found == self.aim
        return found <= self.aim if self.most else found >= self.aim


class Line(NamedTuple):
    name: str
    program: tuple[int, list[str]]  # most seconds, words
    aims: tuple[Aim, ...] = ()


def rate(at_least: float) -> Aim:
    return Aim(
        "tokens/s",
        lambda r: r["median"],
        at_least,
        False,
        lambda r: f"{r['limit']:,.0f}: GEMMs alone",
    )


def over(key: str, at_most: float, *parts: str) -> Aim:
    """Step time over the sum of some of its bounds."""
    seconds = " + ".join(parts)
    return Aim(
        f"step / ({seconds})" if len(parts) > 1 else f"step / {seconds}",
        lambda r: r[key],
        at_most,
        True,
        lambda r: f"{sum(r['bounds'][part] for part in parts):.4g} s",
    )


def memory(at_most: float) -> Aim:
    """The device's memory as the driver counts it; on the CPU device nothing is counted."""
    return Aim("VRAM GiB", lambda r: r.get("vram_used_gib", 0.0), at_most, True, lambda r: "")


def bound() -> tuple[Aim, Aim]:
    """A step hardly longer than what bounds it, and the bound named by mt.last_step."""
    slow = Aim(
        "step / largest bound",
        lambda r: r["over_bound"],
        1.15,
        True,
        lambda r: f"{r['bound']} {r['bounds'][r['bound'] + '_s']:.4g} s",
    )
    named = Aim(
        "last_step names it",
        lambda r: str(r["trace"]["bound"] == LANES[r["bound"]]),
        "True",
        True,
        lambda r: r["trace"]["why"],
    )
    return slow, named


GEMMS = over("over_gemm", 1.2, "gemm_s")
WITH_ATTENTION = over("over_gemm_attention", 1.25, "gemm_s", "attention_s")
IDLE = Aim(
    "GPU idle between steps",
    lambda r: r["trace"]["between_steps_s"] / r["trace"]["seconds"],
    0.02,
    True,
    lambda r: f"of {r['trace']['seconds']:.4g} s; {sum(r['trace']['idle_s'].values()):.3g} s in all",
)
STREAMED = Aim(
    "all streamed / all resident",
    lambda r: r["median"],
    1.02,
    True,
    lambda r: f"resident {r['resident_s']:.4g} s, streamed {r['streamed_s']:.4g} s",
)
LOSSES = Aim(
    "losses apart / control's",
    lambda r: r["median"] / max(r["limit"], 1e-9),
    2.0,
    True,
    lambda r: f"fused {r['median']:.3g}, control {r['limit']:.3g} nats",
)


def planned(seconds: int, *words: str | int) -> tuple[int, list[str]]:
    return step(seconds, "--plan", "auto", *words)


def small(tokens: int, plan: str) -> Line:
    words = ("--layers", 20, "--tokens", tokens, "--plan", plan, "--gpu-alone", "--trace")
    return Line(f"small-{tokens // 1024}k-{plan}", step(150, *words), bound())


LINES = (
    Line("machine", program(120, "-m", "megatrain_torch.cli", "doctor")),
    Line("7b-20-32k", planned(150, "--layers", 20, "--tokens", 32768), (rate(16_500), GEMMS)),
    Line(
        "7b-20-64k",
        planned(180, "--layers", 20, "--tokens", 65536, "--trace"),
        (rate(17_500), GEMMS, IDLE),
    ),
    Line(
        "7b-12-32k-32GiB",
        planned(150, "--layers", 12, "--tokens", 32768, "--vram", "32GiB"),
        (rate(22_000), memory(32)),
    ),
    Line(
        "7b-20-32k-24GiB",
        planned(150, "--layers", 20, "--tokens", 32768, "--vram", "24GiB"),
        (rate(11_000), memory(24)),
    ),
    Line(
        "homes-12-64k",
        step(
            240, "--layers", 12, "--tokens", 65536, "--overhead", "vram",
            "--activations", "selective", "--steps", 4, "--warmup", 1,
        ),
        (STREAMED,),
    ),
    Line(
        "arrive-12-64k",
        step(
            240, "--layers", 12, "--tokens", 65536, "--overhead", "arrive",
            "--activations", "selective", "--steps", 4, "--warmup", 1,
        ),
        (STREAMED,),
    ),
    Line(
        "14b-16-96k",
        planned(210, "--width", "14b", "--layers", 16, "--tokens", 98304, "--steps", 4),
        (rate(15_500), GEMMS),
    ),
    Line(
        "32b-64k",
        planned(300, "--width", "32b", "--layers", "fit", "--tokens", 65536, "--steps", 3),
        (GEMMS,),
    ),
    Line(
        "7b-20-4096",
        planned(180, "--layers", 20, "--tokens", 65536, "--seq", 4096),
        (WITH_ATTENTION,),
    ),
    Line(
        "7b-20-8192",
        planned(180, "--layers", 20, "--tokens", 65536, "--seq", 8192),
        (WITH_ATTENTION,),
    ),
    small(2048, "ram"),
    small(4096, "ram"),
    small(8192, "ram"),
    small(2048, "auto"),
    small(4096, "auto"),
    small(8192, "auto"),
    Line("losses", program(240, "benchmarks/bench_loss.py"), (LOSSES,)),
)  # fmt: skip


class Row(NamedTuple):
    line: str
    figure: str
    found: str
    aim: str
    limit: str
    verdict: str


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def judge(line: Line, records: list[Record], outcome: str) -> list[Row]:
    """A row for each aim; one that says why where there is no record."""
    measured = [r for r in records if r["bench"] in ("step", "overhead", "loss")]
    refused = [r for r in records if r["bench"] == "refused"]
    if not measured:
        why = refused[-1]["why"].splitlines()[0] if refused else ""
        verdict = "does not fit" if refused else outcome
        return [Row(line.name, aim.figure, "", "", why, verdict) for aim in line.aims[:1]]
    rows = []
    for aim in line.aims:
        sign = "" if isinstance(aim.aim, str) else "<= " if aim.most else ">= "
        found, wanted = shown(aim.found(measured[-1])), sign + shown(aim.aim)
        verdict = "met" if aim.met(measured[-1]) else "MISSED"
        rows.append(Row(line.name, aim.figure, found, wanted, aim.limit(measured[-1]), verdict))
    return rows


def off(found: float, predicted: float) -> float:
    return abs(predicted / found - 1) if found else 0.0


def predictions(records: list[Record]) -> list[Row]:
    """mt.plan against what was measured, over all steps that were planned."""
    rows = []
    for r in (r for r in records if r.get("predicted")):
        p, host_gib = r["predicted"], r["host_gib"]
        nbytes = max(off(r.get("vram_used_gib", 0), p["vram_gib"]), off(host_gib, p["host_gib"]))
        seconds = off(r["step_s"], p["seconds"])
        rows.append(
            Row(
                r["section"],
                "plan off: bytes, time",
                f"{nbytes:.1%}, {seconds:.1%}",
                "<= 5%, 10%",
                f"VRAM {r.get('vram_used_gib', 0):.4g} GiB, said {p['vram_gib']:.4g}; host {host_gib:.4g}, "
                f"said {p['host_gib']:.4g}; {r['step_s']:.4g} s, said {p['seconds']:.4g}",
                "met" if nbytes <= 0.05 and seconds <= 0.1 else "MISSED",
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    rows = [Row("line", "figure", "found", "aim", "limit, beside it", ""), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for row in rows:
        left = "  ".join(f"{text:<{width}}" for text, width in zip(row[:4], widths, strict=True))
        lines.append(f"{row.verdict:<12}  {left}  {row.limit}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="lines whose name contains one")
    parser.add_argument("--seconds", type=float, default=1800, help="for all lines together")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU device")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [x for x in LINES if not args.only or any(word in x.name for word in args.only)]
    if args.list:
        for line in chosen:
            print(f"{line.name:<18} at most {line.program[0]:4d} s  {' '.join(line.program[1][1:])}")
        return 0

    folder = Path(os.environ.get("OUT", "results"))
    os.environ.setdefault("MEGATRAIN_MACHINE", str(folder / "machine.json"))  # doctor's, for plans
    results, rows, began = Results(folder), [], time.monotonic()
    for line in chosen:
        seconds, words = line.program
        words = shrunk(words) if args.tiny else words
        left = args.seconds - (time.monotonic() - began)
        before = len(results.records)
        results.say(f"== {line.name}: {' '.join(words)}")
        outcome = "no time left"
        if left > 10:
            outcome = run(line.name, words, min(seconds, left), results)
        results.say(f"== {line.name}: {outcome}, {time.monotonic() - began:.0f} s since the start")
        rows += judge(line, results.records[before:], outcome)
    rows += predictions(results.records)
    for row in rows:
        print(json.dumps({"bench": "must", **row._asdict()}), file=results.lines, flush=True)
    results.say("\n" + table(rows))
    return int(any(row.verdict != "met" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
