"""Tables of states: what a header of csrc/core prints is what its code allows."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

CORE = Path(__file__).parents[1] / "csrc/core"

Table = dict[str, set[str]]


def in_code(file: str, array: str, word: str) -> Table:
    """State to the states that may follow, of an array of masks; word: what a state looks like there."""
    body = re.search(rf"{array}\[\w*\] = \{{(.*?)\}};", (CORE / file).read_text(), re.DOTALL)
    assert body, f"{file} has no array {array}"
    rows = re.findall(r"\[(?:MT_BUFFER_)?([A-Z]+)\] = ([^,]+),", body[1])
    return {state: set(re.findall(word, mask)) for state, mask in rows}


def in_header(file: str, noun: str) -> Table:
    """Of a noun in a header's comment: lines of state, meaning, and the states that may follow."""
    text = (CORE / file).read_text()
    begin = text.index(f" *   {noun} ")
    rows = re.findall(r"^ \* {14}([A-Z]+)(.*)$", re.split(r"\n \*   \w", text[begin + 5 :])[0], re.MULTILINE)
    columns = {state: re.split(r" {2,}", meaning.strip()) for state, meaning in rows}
    return {state: set(re.findall(r"\b[A-Z]{3,}\b", cells[-1])) & set(columns) for state, cells in columns.items()}


def test_spill_prints_its_stages() -> None:
    printed = in_header("swap.h", "stage")
    assert len(printed) == 7
    assert printed.pop("LOST") == set()  # nothing follows, so the code has no row
    assert printed == in_code("swap.c", "next_stages", r"1 << (\w+)")


def test_spill_prints_its_waits() -> None:
    printed = in_header("swap.h", "waits")
    assert len(printed) == 4
    assert printed == in_code("swap.c", "next_waits", r"1 << (\w+)")


def test_ring_prints_the_ways_of_a_buffer() -> None:
    text = (CORE / "disk.h").read_text()
    ways = [re.findall(r"[A-Z]{2,}", way) for way in re.findall(r"^ \* {3}([A-Z]+ -> [A-Z> -]*)", text, re.MULTILINE)]
    allowed = in_code("disk.c", "follows", r"IS\((\w+)\)")
    assert len(ways) == 4
    assert "TAKEN and READY may go FREE. READING -> DROPPED -> FREE" in text
    printed: Table = {state: set() for state in allowed}
    for way in [*ways, ["TAKEN", "FREE"], ["READY", "FREE"], ["READING", "DROPPED", "FREE"]]:
        for state, after in itertools.pairwise(way):
            printed[state].add(after)
    assert printed == allowed
