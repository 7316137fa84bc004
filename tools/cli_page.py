#!/usr/bin/env python3
"""docs/cli.md's table of settings, from the class that has them.

    python tools/cli_page.py          # writes it into docs/cli.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/cli.md"
MARKS = ("<!-- settings -->", "<!-- end of settings -->")


def renewed(text: str, table: str) -> str:
    """The page with the table between its marks."""
    begin, end = map(re.escape, MARKS)
    return re.sub(f"{begin}.*{end}", lambda _: f"{MARKS[0]}\n{table}\n{MARKS[1]}", text, flags=re.S)


def page() -> str:
    """The table."""
    sys.path.insert(0, str(ROOT))
    from megatrain_torch.commands.settings import SHOWN

    lines = ["| setting | default | what |", "|---|---|---|"]
    for f in SHOWN.values():
        flag = f"`{f.name}`" if f.name in ("model", "data") else f"`--{f.name.replace('_', '-')}`"
        text = f.metadata["text"] + (f": {', '.join(f.metadata['choices'])}" if f.metadata["choices"] else "")
        lines.append(f"| {flag} | {'' if f.default is None else f'`{f.default}`'} | {text} |")
    return "\n".join(lines)


def main() -> None:
    PAGE.write_text(renewed(PAGE.read_text(), page()))


if __name__ == "__main__":
    main()
