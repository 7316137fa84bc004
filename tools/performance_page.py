#!/usr/bin/env python3
"""Writes the figures of docs/performance.md anew: its tables from JSON lines, its picture from a traced run.

    python benchmarks/bench_step.py --layers 20 --trace step.json >> results.jsonl     # and step.png
    python tools/performance_page.py results.jsonl --picture step.png
    make performance-page RESULTS=results.jsonl PICTURE=step.png

What stands between `<!-- figures: NAME -->` and `<!-- end -->` is replaced; the text around it is written by
hand and stays. A NAME of which the results say nothing keeps what it has, and is named on stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PICTURE = "step.png"  # beside the page
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Line = dict[str, Any]


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; "" without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines]) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    """To so many significant digits, thousands whole; "" for none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def of_bench(lines: list[Line], name: str) -> list[Line]:
    return [line for line in lines if line.get("bench") == name]


def setting(line: Line, pattern: str, default: str = "") -> str:
    """What a line's `case` says, by a pattern with one group."""
    found = re.search(pattern, line.get("case", ""))
    return found[1] if found else default


def steps(lines: list[Line]) -> str:
    """Whole training steps, beside the time of their products and of the resource that needs most."""
    heads = "model, tokens, sequence | placement | tokens/s | TFLOP/s | step s | x GEMMs | x attention too"
    heads += " | x bound | GPU GiB | host B/param"
    latest = {line["case"]: line for line in of_bench(lines, "step")}
    return table(heads.split(" | "), [step_row(line) for line in sorted(latest.values(), key=size)])


def size(line: Line) -> tuple[int, int, int]:
    """Width, layers and tokens: what rows are sorted by."""
    return tuple(int(setting(line, p, "0")) for p in (r"hidden=(\d+)", r"(\d+) layers", r"(\d+) tokens"))  # type: ignore[return-value]


def step_row(line: Line) -> list[str]:
    layers, tokens = setting(line, r"(\d+) layers"), setting(line, r"(\d+) tokens")
    width, engine = setting(line, r"^\w+ (\w+) hidden"), setting(line, r"^(\w+) ")
    width = width or "hidden " + setting(line, r"hidden=(\d+)")
    plan = setting(line, r"plan=(\w+)", "None")
    place = engine if plan == "None" else f"plan {plan}"
    limits = [setting(line, p, "None") for p in (r"states=(\S+)", r"vram=(\S+)", r"( host=\S+)")]
    place += "".join(f", {limit.strip()}" for limit in limits if limit != "None")
    over = [number(line.get(name)) for name in ("over_gemm", "over_gemm_attention")]
    bound = f"{number(line['over_bound'])} ({line['bound']})" if "over_bound" in line else ""
    return [
        f"{width}, {layers} layers, {int(tokens):,}, " + setting(line, r"S=(\d+)"),
        place,
        f"**{number(line['median'])}**",
        number(line.get("tflops")),
        number(line["step_s"]),
        over[0] or number(line["step_s"] / line["bounds"]["gemm_s"]),
        over[1],
        bound,
        number(line.get("vram_used_gib")),
        number(line.get("host_bytes_per_parameter")),
    ]


def trace(lines: list[Line]) -> str:
    """The longest traced step: what each resource was busy with, and what compute waited for."""
    traced = [line for line in of_bench(lines, "step") if line.get("trace")]
    if not traced:
        return ""
    longest = max(traced, key=lambda line: line["step_s"])
    t = longest["trace"]
    step_s = t["seconds"]
    rows = [
        [name, number(s), f"{s / step_s:.0%}", number(t["least_s"].get(name))]
        for name, s in t["busy_s"].items()
    ]
    waits = ", ".join(f"{number(s)} s for {name}" for name, s in t["idle_s"].items())
    text = f"`{longest['case']}`\n\n{t['why'][:1].upper()}{t['why'][1:]}.\n\n"
    text += table(["resource", "busy, s", "of the step", "at least, s"], rows)
    between = f"{number(t['between_steps_s'])} s, {t['between_steps_s'] / step_s:.1%} of the step"
    return text + f"\nCompute stood still: {waits}. Between two steps: {between}.\n"


def overhead(lines: list[Line]) -> str:
    """The same layers streamed and resident, taking turns."""
    rows = [
        [
            line["case"],
            number(line["resident_s"], 4),
            number(line["streamed_s"], 4),
            f"{line['median']:.3f} ({line['p10']:.3f} to {line['p90']:.3f})",
        ]
        for line in of_bench(lines, "overhead")
    ]
    return table(["case", "resident, s", "streamed, s", "ratio, median (p10 to p90)"], rows)


def host_overhead(lines: list[Line]) -> str:
    """Python's time for each unit of a forward."""
    rows = [
        [line["case"], number(line["plain_us"]), number(line["median"])]
        for line in of_bench(lines, "host_overhead")
    ]
    return table(["case", "the model's own, us/unit", "streamed adds, us/unit"], rows)


def adam(lines: list[Line]) -> str:
    """AdamW on the host, beside a loop with the same reads and writes."""
    loops = {(line["case"], line.get("states")): line["median"] for line in of_bench(lines, "adam_traffic")}
    rows = [
        [name, line["case"], line.get("states", "fp32"), number(line["median"]), number(limit)]
        for name in ("adam_step", "torch_adamw")
        for line in of_bench(lines, name)
        for limit in [line.get("limit") or loops.get((line["case"], line.get("states")))]
    ]
    return table(["what", "case", "states", "G parameters/s", "the loop alone"], rows)


def plans(lines: list[Line]) -> str:
    """What mt.plan said of a step and what the step took."""
    rows = []
    for line in of_bench(lines, "plan"):
        said = line["predicted"]
        cells = [f"{number(found, 4)}, {said[k] / found - 1:+.1%}" for k, found in line["found"].items()]
        rows.append([line["case"], *cells])
    return table(["case", "step s, said", "host GiB, said", "GPU GiB, said"], rows)


def large(lines: list[Line]) -> str:
    """Models of which nothing else on the machine can hold the states, beside what mt.plan said of them."""
    heads = "model, tokens, sequence | states, gradients | limits | tokens/s | step s, said | host GiB, said"
    rows = []
    for line in {line["case"]: line for line in of_bench(lines, "big")}.values():
        said = line["predicted"]
        pairs = [(line["seconds"], said["seconds"]), (line["host_gib"], said["host_gib"])]
        pairs.append((line["vram_gib"], said["vram_gib"]))
        limits = [f"{k} {v}" for k in ("vram", "host") if (v := setting(line, rf"{k}=(\d\S*)"))]
        name, sequence = setting(line, r"^(\S+ \d+ layers)"), int(setting(line, r"S=(\d+)"))
        tokens, states = int(setting(line, r"(\d+) tokens")), setting(line, r"states=(\S+)")
        rows.append([
            f"{name}, {tokens:,}, {sequence:,}",
            f"{states}, {setting(line, 'grads=(.*?) ')}",
            ", ".join(limits),
            f"**{number(line['median'])}**",
            *(f"{number(found, 4)}, {guess / found - 1:+.1%}" for found, guess in pairs),
            number(said["disk_gib"]) if said["disk_gib"] else "",
        ])  # fmt: skip
    return table([*heads.split(" | "), "GPU GiB, said", "disk GiB"], rows)


FIGURES: dict[str, Callable[[list[Line]], str]] = {
    "steps": steps,
    "trace": trace,
    "overhead": overhead,
    "host-overhead": host_overhead,
    "adam": adam,
    "plans": plans,
    "large": large,
}


def rewritten(page: str, lines: list[Line], picture: bool) -> tuple[str, list[str]]:
    """The page with new figures, and the names of those that kept their old ones.

    Raises:
        KeyError: The page names a figure that nobody makes.
    """
    kept = []

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name == "picture":
            text = f"![Queues against time]({PICTURE})\n" if picture else ""
        else:
            text = FIGURES[name](lines)
        if not text:
            kept.append(name)
            return match[0]
        return match[1] + text + match[4]

    return BLOCK.sub(block, page), kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines of benchmarks")
    parser.add_argument("--picture", type=Path, help="a .png of bench_step.py --trace")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    lines = [json.loads(line) for path in args.results for line in path.read_text().splitlines()]
    text, kept = rewritten(args.page.read_text(), lines, args.picture is not None)
    args.page.write_text(text)
    if args.picture is not None:
        shutil.copyfile(args.picture, args.page.parent / PICTURE)
    for name in kept:
        print(f"{args.page.name}: {name}: nothing in the results; kept as it was", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
