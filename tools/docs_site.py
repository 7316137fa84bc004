"""Hooks of mkdocs (mkdocs.yml): pages outside of docs/, links as they are on the site, GitHub's anchors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Page of the site: where it is in the repository; all others are in docs/.
BESIDE = {"index.md": "README.md", "examples.md": "examples/README.md", "contributing.md": "CONTRIBUTING.md",
          "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def anchor(heading: str, separator: str = "-") -> str:
    """As GitHub makes it of a heading; tests/test_pages.py follows links by it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def placed(text: str, page: str) -> str:
    """A page's text with links to pages of the site; what is not on it keeps its words, without a link."""
    folder = Path(BESIDE.get(page, f"docs/{page}")).parent
    pages = {path: name for name, path in BESIDE.items()}

    def link(m: re.Match[str]) -> str:
        picture, words, to = m.groups()
        path, mark, place = to.partition("#")
        if ":" in path or not path:
            return m[0]
        path = os.path.normpath(folder / path)
        name = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        return f"{picture}[{words}]({name}{mark}{place})" if name else words

    return LINK.sub(link, text)


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"] = {"permalink": True, "slugify": anchor}
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, path in BESIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return placed(markdown, page.file.src_uri)
