"""megatrain report: a run as one HTML file that needs nothing else."""
from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain_torch import MegatrainError

from ..base.strict import is_count
from . import folder
from .say import say

WIDTH, HEIGHT, LEFT, BELOW = 460, 180, 56, 20        # of a curve, in pixels; room for its numbers
LARGEST = 1e100                                      # of a number in a curve
COLOURS = ("#4c72b0", "#c44e52")
CURVES = (("loss", ("loss", "eval_loss")), ("norm of the gradients", ("grad_norm",)),
          ("learning rate", ("learning_rate",)), ("tokens a second", ("tokens_per_second",)))
STYLE = ("body{font:14px sans-serif;margin:2em;max-width:1000px}table{border-collapse:collapse}"
         "td,th{padding:2px 10px;text-align:left}svg{max-width:100%;height:auto}h2{margin-top:1.5em}")
# Whoever wrote the pages and pictures of a run's folder: nothing in them runs, or loads anything.
HEAD = ("<!doctype html><meta charset='utf-8'><meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
        "img-src data:; style-src 'unsafe-inline'\"><title>megatrain</title>")
MOST_BYTES = 20_000_000              # of a page or a picture
Point = tuple[float, float]


def add(commands: Any) -> None:
    parser = commands.add_parser("report", help="a page about a run: curves, time line, memory", allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run's folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    out = args.out or args.run_folder / "report.html"
    text = page(args.run_folder)
    folder.may_write(out, "out")
    if out.exists() and not out.read_bytes().startswith(HEAD.encode()):
        raise MegatrainError(f"out={out} is there, and is no report of megatrain: it stays; name another")
    out.write_text(text)
    say(f"{out}")


def page(run_folder: Path) -> str:
    """Of a run, finished or not.

    Raises:
        MegatrainError: it is no run, or it has logged nothing.
    """
    settings, lines = folder.settings_of(run_folder), folder.lines(run_folder)
    if not lines:
        raise MegatrainError(f"{run_folder} has logged no step yet; come back when one is made")
    parts = [f"<h1>{html.escape(run_folder.resolve().name)}</h1>", _summary(lines, settings), _curves(lines)]
    for title, name in (("The last step, and what bound it", "step.html"), ("The last steps", "timeline.svg"),
                        ("Memory, tier by tier", "storage.html"), ("The plan", "plan.html")):
        if (run_folder / name).is_file():
            parts.append(f"<h2>{title}</h2>{_inlined(run_folder / name)}")
    rows = "".join(f"<tr><td>{name}</td><td>{html.escape(_words(value))}</td></tr>"
                   for name, value in dataclasses.asdict(settings).items() if value is not None)
    parts.append(f"<h2>Settings</h2><table>{rows}</table>")
    return f"{HEAD}<style>{STYLE}</style>{''.join(parts)}"


def _inlined(path: Path) -> str:
    """A picture, or a page in a frame in which scripts do not run; what the head allows holds in it too."""
    if path.stat().st_size > MOST_BYTES:
        return f"<p>{html.escape(path.name)} is too large.</p>"
    if path.suffix == ".svg":
        return f"<img alt='' src='data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}'>"
    return (f"<iframe sandbox style='width:100%;height:32em;border:0' "
            f"srcdoc='{html.escape(path.read_text(errors='replace'))}'></iframe>")


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _numbers(lines: list[dict[str, Any]], name: str) -> list[Point]:
    """(step, value) of all lines that have a finite number there: what else may stand in a log is no point."""
    found = [(line["step"], line.get(name)) for line in lines]
    return [(float(step), float(value)) for step, value in found
            if type(value) in (int, float) and abs(value) < LARGEST and math.isfinite(value)]


def _summary(lines: list[dict[str, Any]], settings: Any) -> str:
    words = f"Step {lines[-1]['step']} of {settings.steps}{_gpus(lines)}"
    if losses := [loss for _, loss in _numbers(lines, "loss")]:
        words += f"; loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last"
    if bounds := [line["bound"] for line in lines if isinstance(line.get("bound"), str) and line["bound"]]:
        most = max(sorted(set(bounds)), key=bounds.count)
        words += f"; {bounds.count(most) / len(bounds):.0%} of the steps were bound by {most}"
    if held := [loss for _, loss in _numbers(lines, "eval_loss")]:
        words += f"; held-out loss {held[-1]:.4g}, at best {min(held):.4g}"
    return f"<p>{html.escape(words)}.</p>"


def _gpus(lines: list[dict[str, Any]]) -> str:
    """How many trained it, and from which step on, where it was ever more than one."""
    parts: list[tuple[int, int]] = []                    # from this step on, so many
    for line in lines:
        many = line["gpus"] if is_count(line.get("gpus")) else 1
        if not parts or parts[-1][1] != many:
            parts.append((line["step"], many))
    if [many for _, many in parts] == [1]:
        return ""
    later = "".join(f", on {many} from step {step} on" for step, many in parts[1:])
    return f" on {parts[0][1]} GPU{'s' * (parts[0][1] > 1)}{later}; loss and tokens are of all of them"


# ---- curves --------------------------------------------------------------------------------------

def _curves(lines: list[dict[str, Any]]) -> str:
    found = []
    for title, names in CURVES:
        series = {name: _numbers(lines, name) for name in names}
        if series := {name: points for name, points in series.items() if points}:
            found.append(curve(title, series))
    return "".join(found)


def curve(title: str, series: dict[str, Sequence[Point]]) -> str:
    """SVG of some lines over the same axes."""
    points = [p for line in series.values() for p in line]
    (left, right), (low, high) = (_span([p[i] for p in points]) for i in (0, 1))

    def place(p: Point) -> str:
        x = LEFT + (p[0] - left) / (right - left) * (WIDTH - LEFT - 8)
        return f"{x:.1f},{HEIGHT - BELOW - (p[1] - low) / (high - low) * (HEIGHT - 2 * BELOW):.1f}"

    drawn = "".join(_line(name, [place(p) for p in line], colour, i)
                    for i, ((name, line), colour) in enumerate(zip(series.items(), COLOURS)))
    frame = (f"<rect x='{LEFT}' y='{BELOW}' width='{WIDTH - LEFT - 8}' height='{HEIGHT - 2 * BELOW}' fill='none' "
             "stroke='#bbb'/>")
    words = (f"<text x='{LEFT}' y='14'>{html.escape(title)}</text><text x='0' y='{BELOW + 10}'>{high:.3g}</text>"
             f"<text x='0' y='{HEIGHT - BELOW}'>{low:.3g}</text><text x='{LEFT}' y='{HEIGHT - 4}'>{left:.0f}</text>"
             f"<text x='{WIDTH - 8}' y='{HEIGHT - 4}' text-anchor='end'>step {right:.0f}</text>")
    return (f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' font-size='11' "
            f"xmlns='http://www.w3.org/2000/svg'>{frame}{drawn}{words}</svg>")


def _line(name: str, places: list[str], colour: str, row: int) -> str:
    word = f"<text x='{WIDTH - 14}' y='{BELOW + 14 + 13 * row}' text-anchor='end' fill='{colour}'>{name}</text>"
    dots = "".join(f"<circle cx='{p.split(',')[0]}' cy='{p.split(',')[1]}' r='2' fill='{colour}'/>"
                   for p in places) if len(places) < 30 else ""
    return f"<polyline points='{' '.join(places)}' fill='none' stroke='{colour}' stroke-width='1.4'/>{dots}{word}"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Least and most, never the same."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))
