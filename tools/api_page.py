#!/usr/bin/env python3
"""docs/api.md: what `import megatrain_torch as mt` gives, and `megatrain_torch.ops`, from their docstrings.

    python tools/api_page.py          # writes it; tests/test_tools.py says when it is old

No generator of documentation: what is public is a few dozen names, one page of Markdown that reads in the repository
is enough, and the tests need nothing installed for it. A public name without a docstring is an error.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/api.md"
LONGEST = 100  # of a signature's line

HEAD = """# API

Written by `make api` from the docstrings; `help(mt.stream)` says the same.

"""
# In this order; what mt.__all__ has and this has not is an error, and so is the reverse.
PARTS = {
    "Streaming": "stream unstream from_pretrained read_pretrained from_config AdamW stream_trainer masters gather",
    "Plans": "plan Plan Machine measure_machine",
    "Checkpoints": "save load Saving inspect_checkpoint CheckpointInfo checkpoint_bytes",
    "What is going on": "explain storage Storage last_step StepReport trace Trace",
    "Words and errors": "choices parse_bytes show_bytes MegatrainError",
}
# Made by users; the others are what functions return.
MADE = {"AdamW", "Machine"}
# Public in Python for the engine's sake alone.
ENGINES = {
    "AdamW": {"clips_alone", "clip_next"},
    "Trace": {"optimizer_steps", "pass_begins", "during", "forward", "handed_over", "finish", "stop"},
}
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Source):(?: (.*))?$")
TITLES = {"Args": "Arguments"}
KEY = re.compile(r'"[\w+]+": ')
# A name or several ("tokens, seq"), an exception, or a key of a dict ('"homes"'), then what it is.
ENTRY = re.compile(r'("[\w+]+"|[A-Za-z_]\w*(?:, [a-z_]\w*)*): (.*)', re.DOTALL)


# ---- text ----


def escaped(text: str) -> str:
    """Prose in which Markdown finds nothing to do outside of backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*<\[\]])", r"\\\1", p) for p in parts)


def depth(line: str) -> int:
    """Spaces before a line."""
    return len(line) - len(line.lstrip())


def entries(lines: list[str]) -> Iterator[str]:
    """A section's entries as list items: what is deeper goes on.

    A quoted key in it begins an item below, where what goes on behind it is deeper still; else it is prose.
    """
    for line, following in zip(lines, [*lines[1:], ""]):
        level, text = (depth(line) - 4) // 4, line.strip()
        key = KEY.match(text) and (KEY.match(following.strip()) or depth(following) != depth(line))
        if level <= 0 or key:
            found = ENTRY.match(text)
            shown = f"`{found[1]}`: {escaped(found[2])}" if found else escaped(text)
            yield f"{'  ' * (level if key else 0)}- {shown}"
        else:
            yield f"{'  ' * level}{escaped(text)}"


def section(name: str, inline: str | None, lines: list[str]) -> str:
    """**Arguments** and a list; what is not a list of names stays a paragraph."""
    title = TITLES.get(name, name)
    if name in ("Args", "Attributes", "Raises"):
        return f"**{title}**\n\n" + "\n".join(entries([line for line in lines if line.strip()]))
    text = " ".join([inline or "", *(line.strip() for line in lines)]).strip()
    return f"**{title}:** {escaped(text)}"


def blocks(doc: str) -> Iterator[tuple[str, str | None, list[str]]]:
    """(section's name or "", what follows on its line, its lines) of a docstring in Google form."""
    name, inline, lines = "", None, []
    for line in doc.splitlines():
        if head := SECTION.match(line):
            yield name, inline, lines
            name, inline, lines = head[1], head[2], []
        else:
            lines.append(line)
    yield name, inline, lines


def prose(lines: list[str]) -> str:
    """Paragraphs; formulas, one a line, and what is indented by four are code."""
    shown = []
    for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
        formulas = paragraph.splitlines()
        if len(formulas) > 1 and all(re.match(r"\w+ = ", line) for line in formulas):
            shown.append(f"```\n{paragraph}\n```")
        else:
            shown.append(paragraph if paragraph.startswith("    ") else escaped(paragraph))
    return "\n\n".join(shown)


def markdown(doc: str) -> str:
    """A docstring as Markdown."""
    shown = [section(*b) if b[0] else prose(b[2]) for b in blocks(doc)]
    return "\n\n".join(text for text in shown if text)


# ---- names ----


def doc_of(thing: Any, name: str) -> str:
    """Its docstring.

    Raises:
        SystemExit: it has none.
    """
    text = inspect.getdoc(thing)
    if not text:
        raise SystemExit(f"{name} is public and has no docstring")
    return text


def parameter(p: inspect.Parameter) -> str:
    """As it stands in the source, annotations being strings there."""
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    text = f"{stars}{p.name}" + ("" if p.annotation is p.empty else f": {p.annotation}")
    if p.default is p.empty:
        return text
    default = "..." if repr(p.default).startswith("<") else repr(p.default)
    return f"{text} = {default}"


def parameters(signature: inspect.Signature) -> Iterator[str]:
    """With the mark before those that go by name alone."""
    marked = False
    for p in signature.parameters.values():
        marked |= p.kind == p.VAR_POSITIONAL
        if p.kind == p.KEYWORD_ONLY and not marked:
            yield "*"
            marked = True
        if p.name not in ("self", "cls") or p.kind == p.KEYWORD_ONLY or p.annotation is not p.empty:
            yield parameter(p)


def filled(words: Iterator[str]) -> str:
    """As many to a line as fit; none is broken."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > LONGEST - 4:
            lines.append("")
        lines[-1] += f"{word}, "
    return "\n".join(f"    {line.rstrip()}" for line in lines)


def signature(thing: Callable[..., Any], name: str, returns: bool = True) -> str:
    """In a code block, wrapped where it is long."""
    found = inspect.signature(thing)
    end = f" -> {found.return_annotation}" if returns and found.return_annotation is not found.empty else ""
    line = f"{name}({', '.join(parameters(found))}){end}"
    if len(line) > LONGEST:
        line = f"{name}(\n{filled(parameters(found))}\n){end}"
    return f"```python\n{line}\n```"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of the class itself, in its order."""
    hidden = ENGINES.get(cls.__name__, set())
    if unknown := hidden - set(vars(cls)):
        raise SystemExit(f"{cls.__name__} has no {', '.join(sorted(unknown))}: see ENGINES")
    for name, thing in vars(cls).items():
        kinds = (property, staticmethod, classmethod)
        if not name.startswith("_") and name not in hidden and (inspect.isfunction(thing) or isinstance(thing, kinds)):
            yield name, thing


def member(owner: str, name: str, thing: Any) -> str:
    """One method or property of a class."""
    if isinstance(thing, property):
        kind = inspect.signature(thing.fget).return_annotation
        head = f"#### {owner}.{name}\n\n```python\n{name}: {kind}\n```"
    else:
        head = f"#### {owner}.{name}\n\n{signature(getattr(thing, '__func__', thing), name)}"
    return f"{head}\n\n{markdown(doc_of(thing, f'{owner}.{name}'))}"


def entry(prefix: str, name: str, thing: Any) -> str:
    """A function or a class with its members."""
    title = f"### {prefix}.{name}"
    if not inspect.isclass(thing):
        return f"{title}\n\n{signature(thing, f'{prefix}.{name}')}\n\n{markdown(doc_of(thing, name))}"
    made = [signature(thing, f"{prefix}.{name}", returns=False)] if name in MADE else []
    parts = [title, *made, markdown(doc_of(thing, name))]
    return "\n\n".join(parts + [member(name, n, m) for n, m in members(thing)])


def own(module: Any) -> dict[str, Any]:
    """Public functions that a module defines itself, in its order."""
    mine = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    return {name: f for name, f in mine.items() if not name.startswith("_")}


def page() -> str:
    """All of it."""
    import megatrain_torch as mt
    from megatrain_torch import ops

    placed = {name for names in PARTS.values() for name in names.split()}
    if odd := placed ^ (set(mt.__all__) - {"__version__"}):
        raise SystemExit(f"PARTS and mt.__all__ differ in {', '.join(sorted(odd))}")
    shown = []
    for title, names in PARTS.items():
        shown += [f"## {title}", *(entry("mt", name, getattr(mt, name)) for name in names.split())]
    shown += ["## Layer ops", prose(doc_of(ops, "ops").splitlines())]
    shown += [entry("ops", name, f) for name, f in own(ops).items()]
    return HEAD + "\n\n".join(shown) + "\n"


def main() -> None:
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
