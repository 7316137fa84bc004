"""Pages and pictures of a run's folder, inside its report: whoever wrote them, nothing in them runs or loads anything.

Of HTML stay text, and the tags and styles that this package's own pages have. A picture is data of an <img>, in which
scripts do not run and nothing is fetched.
"""
from __future__ import annotations

import base64
import html
import re
from html.parser import HTMLParser
from pathlib import Path

MOST_BYTES = 20_000_000
TAGS = ("p", "table", "tr", "td", "th", "div", "caption")
_STYLE = re.compile(r"[\w\s:;.%#,-]*")                   # no brackets: no url(...), no expression(...)


def file(path: Path) -> str:
    if path.stat().st_size > MOST_BYTES:
        return f"<p>{html.escape(path.name)} is too large.</p>"
    data = path.read_bytes()
    if path.suffix == ".svg":
        return f"<img alt='' src='data:image/svg+xml;base64,{base64.b64encode(data).decode()}'>"
    return page(data.decode("utf-8", "replace"))


def page(text: str) -> str:
    """HTML of known tags alone."""
    kept = _Kept()
    kept.feed(text)
    kept.close()
    return "".join(kept.parts) + "".join(f"</{tag}>" for tag in reversed(kept.open))


class _Kept(HTMLParser):
    """What stays, in parts; open: tags that wait for their end."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[str] = []
        self._code = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.CDATA_CONTENT_ELEMENTS:             # a script, a style: until its end there is no text
            self._code = tag
        if tag not in TAGS:
            return
        known = {name: value for name, value in attrs if value is not None
                 and (name == "title" or (name == "style" and _STYLE.fullmatch(value)))}
        self.open.append(tag)
        self.parts.append(f"<{tag}{''.join(f' {k}={chr(39)}{html.escape(v)}{chr(39)}' for k, v in known.items())}>")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._code:
            self._code = ""
        if tag in self.open:
            while True:
                last = self.open.pop()
                self.parts.append(f"</{last}>")
                if last == tag:
                    break

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.parts.append(html.escape(data))
