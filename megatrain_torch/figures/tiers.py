"""A picture of tiers: what lies in device memory, in host memory, on disk, plane by plane."""
from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from ..base.errors import MegatrainError
from ..base.limits import show_bytes

Tier = tuple[str, dict[str, int], int]      # title, bytes by what they hold, bytes there are
WIDTH, HEIGHT, DPI = 10.0, 1.1, 150         # inches; HEIGHT of a tier
# By what a label begins with; a plane has one colour in every tier.
COLOURS = {"weights": "#4c72b0", "slots": "#8fa8cf", "gradients": "#c44e52", "masters": "#55a868", "moments": "#8dc891",
           "sums": "#dd8452", "activations": "#8172b3", "work": "#b3a8d1", "staging": "#937860"}
OTHER = "#9a9a9a"
BAR_PIXELS = 420                            # of a bar in HTML
LEAST_SHARE = 0.06                          # of a bar: narrower pieces have no words in them


def write_tiers(path: str | Path, title: str, tiers: list[Tier]) -> None:
    """A bar for each tier, as long as what it has; what a plan puts there is in it, as a share of that.

    Args:
        path: .png, .svg or .pdf.

    Raises:
        MegatrainError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MegatrainError("a picture of a plan needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(WIDTH, HEIGHT * len(tiers) + 1.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, tier in enumerate(tiers):
        _draw(axes, row, tier)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(tiers) - 0.5, -0.5)
    axes.set_yticks(range(len(tiers)), [f"{name}\n{show_bytes(most)}" for name, _, most in tiers])
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_title(title, fontsize="medium", loc="left")
    _legend(figure, dict.fromkeys(_colour(what)[0] for _, parts, _ in tiers for what, n in parts.items() if n))
    figure.savefig(path)


def _draw(axes: Any, row: int, tier: Tier) -> None:
    _, parts, most = tier
    at = 0.0
    for what, n in parts.items():
        share = n / most
        axes.barh(row, share, left=at, height=0.7, color=_colour(what)[1], edgecolor="white", linewidth=0.6)
        if share > LEAST_SHARE:
            axes.text(at + share / 2, row, show_bytes(n), ha="center", va="center", fontsize="x-small")
        at += share
    axes.barh(row, 1, height=0.7, facecolor="none", edgecolor="black", linewidth=0.8)


def bars(tiers: list[Tier]) -> str:
    """HTML: a row for each tier, its contents beside one another as shares of them all. Pointing at one shows what it
    is."""
    line = "style='white-space:nowrap'"
    rows = "".join(f"<tr><td>{html.escape(title)}</td><td>{show_bytes(sum(parts.values()))}</td>"
                   f"<td {line}>of {show_bytes(most)}</td><td {line}>{_bar(parts)}</td></tr>"
                   for title, parts, most in tiers)
    return f"<table>{rows}</table>"


def _bar(parts: dict[str, int]) -> str:
    total = sum(parts.values()) or 1
    style = "display:inline-block;overflow:hidden;vertical-align:top;color:white"
    return "".join(f"<div title='{html.escape(what)}: {show_bytes(n)}' style='{style};background:{_colour(what)[1]};"
                   f"width:{BAR_PIXELS * n / total:.0f}px'>{html.escape(what)}</div>"
                   for what, n in parts.items() if n)


def _colour(what: str) -> tuple[str, str]:
    """(plane, colour) of a label such as "at home: moments"."""
    plane = what.removeprefix("at home: ")
    return next(((name, c) for name, c in COLOURS.items() if plane.startswith(name)), ("other", OTHER))


def _legend(figure: Any, planes: dict[str, None]) -> None:
    from matplotlib.patches import Patch

    shown = [(name, colour) for name, colour in (*COLOURS.items(), ("other", OTHER)) if name in planes]
    figure.legend(handles=[Patch(color=c, label=name) for name, c in shown], loc="outside lower center",
                  ncols=len(shown), frameon=False, fontsize="small")
