"""docs/models.md from what tools/try_models.py found."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
MODES = ("saved", "replay")

HEAD = """# Models

Tiny models of the architectures that {libraries} have, each streamed on the
CPU device and compared with plain torch, bit for bit. `make models` writes this page; `tools/try_models.py` says how,
`tools/tiny_models.py` where the models come from.

**How.** A tiny configuration and inputs are those of the library's own tests (timm: its `test_*` models, and small
shapes of others); weights are random and fp32, dropout and the like stay as configured. Each model takes two steps of
torch's AdamW on two batches: twice in plain torch, which must agree with itself, then streamed through two slots that
are filled with NaN when they are given up. *saved* and *replay* are the two ways with activations. Compared are both
losses, every gradient, every weight and buffer at the end, and the next random number. *own* loss: the one that the
model returns; else all its outputs, times fixed random numbers. *fused*: `compute="fused"`, where a template
covers something; such results differ in the last bits, and given is the largest relative error of a gradient of the
first step (limit {tolerance}; `tests/fusing.py` has the reason) and how many windows ran a template.

Versions: {versions}.
"""

ODD = """## Refused, or not equal

*last bits*: losses are equal, and gradients of the first step to one part in a million: sums in another order. The one
known cause is a weight used more than once inside a window that is itself called more than once (docs/design.md,
known limits).

"""


def page(known: dict[str, Any], tolerance: str) -> str:
    """The whole page.

    Args:
        known: rows by "source/file"; "versions" and "installed" architectures by source.
        tolerance: limit of a fused gradient's error, for people.
    """
    rows = all_rows(known)
    sources = sorted({r["source"] for r in rows}, key=["transformers", "diffusers", "timm"].index)
    versions = known.get("versions", {})
    parts = [HEAD.format(libraries=" and ".join(", ".join(sources).rsplit(", ", 1)), tolerance=tolerance,
                         versions="; ".join(versions[k] for k in ["torch", *sources])), totals(rows, sources)]
    odd = [r for r in rows if trained(r) and not equal(r)]
    if odd:
        parts.append(ODD + table(odd, ("architecture", "class", "what"), oddity))
    for source in sources:
        mine = [r for r in rows if r["source"] == source and trained(r)]
        heads = ("architecture", "class", "loss", "units", *MODES, "fused")
        parts.append(f"## {source}\n\n" + table(mine, heads, cells))
    parts.append("## Not compared\n\nPlain torch, on the same machine, fails, is not over in time or does not repeat "
                 "itself; nothing was streamed.\n\n"
                 + table([r for r in rows if not trained(r)], ("architecture", "class or test", "why"), why))
    tried = {r["architecture"] for r in rows}
    untried = {name: sorted(set(known["installed"].get(name, ())) - tried) for name in sources}
    parts += [f"Without a row ({name}; those tests have none, or it is yet to come): {', '.join(names)}.\n"
              for name, names in untried.items() if names]
    return "\n".join(parts)


def all_rows(known: dict[str, Any]) -> list[Row]:
    rows = []
    for key in sorted(k for k in known if "/" in k):
        source, file = key.split("/", 1)
        rows += [r | {"source": source, "architecture": architecture(source, file)} for r in known[key]]
    return rows


def architecture(source: str, file: str) -> str:
    if source == "transformers":
        return file.split("/")[-2]
    return file.split("/")[-1].removesuffix(".py").removeprefix("test_models_").removeprefix("transformer_")


def trained(row: Row) -> bool:
    return row["plain"] == "trained"


def equal(row: Row) -> bool:
    return all(row.get(m) == "equal" for m in MODES)


def totals(rows: list[Row], sources: list[str]) -> str:
    """One line per source and one for all: architectures, classes, and what became of them."""
    lines = ["| | architectures | classes | plain torch trains | equal, saved | equal, replay | refused | last bits |"
             " wrong or failing | fused | within the limit |", "|---" * 11 + "|"]
    for name in [*sources, "all"]:
        mine = [r for r in rows if name in (r["source"], "all")]
        lines.append("| " + " | ".join([name, *map(str, counts(mine))]) + " |")
    return "\n".join(lines) + "\n"


def counts(rows: list[Row]) -> list[int]:
    ours = [r for r in rows if trained(r)]
    templates = [r["fused"] for r in ours if r.get("fused")]
    worst = [verdict(r) for r in ours]
    return [len({(r["source"], r["architecture"]) for r in rows}), len(rows), len(ours),
            *(sum(r.get(m) == "equal" for r in ours) for m in MODES),
            *(worst.count(v) for v in ("refused", "last bits", "wrong")), len(templates),
            sum(f.startswith("within") for f in templates)]


def verdict(row: Row) -> str:
    """The worse of the two modes: "equal", "refused", "last bits" or "wrong", which is all that is none of them."""
    order = ["equal", "refused", "last bits"]
    found = [next((v for v in order if str(row.get(m)).startswith(v)), "wrong") for m in MODES]
    return max(found, key=[*order, "wrong"].index)


def table(rows: list[Row], heads: tuple[str, ...], of: Callable[[Row], list[str]]) -> str:
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in of(r)) + " |" for r in rows]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *body]) + "\n"


def cells(row: Row) -> list[str]:
    fused = row.get("fused", "")
    return [row["architecture"], row["class"], "own" if row.get("loss") else "", str(row.get("units", "")),
            *(brief(row.get(m, "")) for m in MODES), fused.removeprefix("within ")]


def brief(text: str) -> str:
    return text.split(":")[0].split(" (")[0]


def oddity(row: Row) -> list[str]:
    return [row["architecture"], row["class"], "; ".join(f"{m}: {row.get(m)}" for m in MODES if row.get(m) != "equal")]


def why(row: Row) -> list[str]:
    return [row["architecture"], row["class"] or row["test"], re.sub(r" ?\(?/[^ ]*/[^ ]*", "", row["plain"])[:160]]
