"""Tables as text, and pictures of bars: what plans, traces and reports show people."""
from __future__ import annotations

import contextlib
import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..base.errors import MegatrainError
from ..base.limits import show_bytes

Table = tuple[str, list[tuple[str, ...]]]   # a title, "" without; rows, the first of which is the head
Tier = tuple[str, dict[str, int], int]      # of a kind of memory: title, bytes by what they hold, bytes there are


def as_text(table: Table, right: Sequence[int] = (1,)) -> str:
    """The rows in columns of spaces, the title below. right: columns whose figures end below each other."""
    title, rows = table
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(c.rjust(n) if i in right else c.ljust(n) for i, (c, n) in enumerate(zip(r, widths))).rstrip()
             for r in rows]
    return "\n".join([*lines, *([title] if title else [])])


def bytes_table(title: str, parts: dict[str, int], most: int, note: str = "") -> Table:
    """Bytes by what they hold, and all of them beside those there are. note: "" shows their share."""
    total = sum(parts.values())
    return "", [(title, "bytes", ""), *((what, show_bytes(n), "") for what, n in parts.items() if n),
                ("in all", show_bytes(total), f"of {show_bytes(most)}" + (note or f", {total / most:.0%}"))]


class Shown:
    """What prints as lines, its `_head()`, and as tables, its `_tables()`; and shows itself so in a notebook."""

    def __str__(self) -> str:
        return "\n\n".join([self._head(), *map(as_text, self._tables())])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


# ---- kinds of memory -----------------------------------------------------------------------------

_LEAST_SHARE = 0.06                          # of a bar: narrower pieces have no words in them


def draw_tiers(path: str | Path, title: str, tiers: list[Tier]) -> None:
    """A bar for each kind of memory, with what lies there as shares of it. path: .png, .svg or .pdf."""
    names = [f"{name}\n{show_bytes(most)}" for name, _, most in tiers]
    with drawing(path, title, names, (10.0, 1.1 * len(tiers) + 1.2), 150) as (figure, axes):
        from matplotlib import colormaps

        axes.set_prop_cycle(color=colormaps["tab20"].colors)
        left = [0.0] * len(tiers)
        for what in dict.fromkeys(what for _, parts, _ in tiers for what, n in parts.items() if n):
            shares = [parts.get(what, 0) / most for _, parts, most in tiers]
            bars = axes.barh(range(len(tiers)), shares, left=left, height=0.7, edgecolor="white", label=what)
            words = [show_bytes(parts[what]) if share > _LEAST_SHARE else ""
                     for share, (_, parts, _) in zip(shares, tiers)]
            axes.bar_label(bars, words, label_type="center", fontsize="x-small")
            left = [sum(pair) for pair in zip(left, shares)]
        axes.barh(range(len(tiers)), 1, height=0.7, facecolor="none", edgecolor="black", linewidth=0.8)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter("{x:.0%}")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")


@contextlib.contextmanager
def drawing(path: str | Path | BinaryIO, title: str, rows: list[str], inches: tuple[float, float], dpi: int
             ) -> Iterator[tuple[Any, Any]]:
    """(figure, axes) with a named row for each bar, the first at the top; written at the end."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MegatrainError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    yield figure, axes
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title, fontsize="medium", loc="left")
    figure.savefig(path)
