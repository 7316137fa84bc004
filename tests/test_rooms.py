"""tools/rooms.py: the package keeps the order of its rooms, and whatever breaks it is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
import ceilings  # noqa: E402
import rooms  # noqa: E402


def found(root: Path, **files: str) -> list[str]:
    """What is wrong with a package of these files; a name's __ is a folder's slash."""
    files = {"base____init__": "", "store____init__": "", "graph____init__": "", **files}
    for name, text in files.items():
        path = root / rooms.PACKAGE / (name.replace("__", "/", 1) + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / rooms.PACKAGE / "__init__.py").write_text("")
    return [str(finding) for finding in rooms.check(root)[0]]


def test_the_package_keeps_the_order() -> None:
    findings, seen = rooms.check(ROOT)
    assert [str(finding) for finding in findings] == []
    assert len(seen) > 300, "the rule sees the package's imports"


WRONG = {
    "at the top": "from ..graph.b import c\n",
    "the module itself": "from ..graph import b\n",
    "by its whole name": "import megatrain_torch.graph.b\n",
    "absolutely": "from megatrain_torch.graph.b import c\n",
    "the room": "from .. import graph\n",
    "inside a function": "def f():\n    from ..graph.b import c\n",
    "by a call": "import importlib\nimportlib.import_module('megatrain_torch.graph.b')\n",
    "the whole package": "import megatrain_torch as mt\n",
}
RIGHT = {
    "its own room": "from .c import d\n",
    "for types alone": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..graph.b import c\n",
    "a room before": "from ..base.a import b\n",
    "the C module": "from .. import _core\n",
    "others' packages": "import graph.b\nfrom torch import nn\n",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_look_at_a_later_room_is_found(how: str, tmp_path: Path) -> None:
    text = found(tmp_path, store__a=WRONG[how], graph__b="c = 1\n")
    assert len(text) == 1 and "store comes before" in text[0], text
    assert text[0].startswith(f"megatrain_torch/store/a.py:{WRONG[how].count(chr(10))}:")


@pytest.mark.parametrize("how", RIGHT)
def test_what_is_in_order_is_left_alone(how: str, tmp_path: Path) -> None:
    assert found(tmp_path, store__a=RIGHT[how], store__c="d = 1\n", base__a="b = 1\n") == []


def test_a_circle_inside_a_room_is_found_whole(tmp_path: Path) -> None:
    files = {"store__a": "from .b import x\n", "store__b": "def f():\n    from .c import x\n",
             "store__c": "from . import a\n", "store__d": "from .a import x\n"}
    (text,) = found(tmp_path, **files)
    assert text.endswith("a circle of imports: store.a, store.b, store.c")


def test_a_module_without_a_room_is_found(tmp_path: Path) -> None:
    (text,) = found(tmp_path, stray="")
    assert "megatrain_torch.stray is in no room" in text


def test_the_graph_says_who_looks_at_whom(tmp_path: Path) -> None:
    found(tmp_path, store__a="from ..base.a import b\nfrom .. import _core\n", base__a="b = 1\n")
    lines = [line.split() for line in rooms.drawn(tmp_path, rooms.check(tmp_path)[1])]
    assert [line[0] for line in lines] == list(rooms.ROOMS)
    drawn = {line[0]: " ".join(line[1:]) for line in lines}
    assert drawn["base"] == "2 files 1 lines looks at nobody"
    assert drawn["store"] == "2 files 2 lines looks at base 1"


def test_what_is_over_its_ceiling_is_found_by_name() -> None:
    table = {"csrc/core": {"lines": 10, "nouns": 2}}
    assert ceilings.over({"csrc/core": {"lines": 10, "nouns": 2}}, table) == []
    (finding,) = ceilings.over({"csrc/core": {"lines": 11, "nouns": 2}}, table)
    assert "csrc/core has 11 lines, and its ceiling is 10" in str(finding)


def test_ceilings_only_fall() -> None:
    table = {"csrc/core": {"lines": 10, "nouns": 2}}
    assert ceilings.lowered({"csrc/core": {"lines": 12, "nouns": 1}}, table) == {"csrc/core": {"lines": 10, "nouns": 1}}


def test_rooms_are_counted(tmp_path: Path) -> None:
    package, core = tmp_path / "megatrain_torch" / "store", tmp_path / "csrc" / "core"
    package.mkdir(parents=True)
    core.mkdir(parents=True)
    (package / "a.py").write_text("class Box(Protocol): ...\n\n\ndef once(): ...\n\n\ndef _twice(): once()\n\n\n_twice(), _twice()\n")
    (core / "a.h").write_text("typedef struct mt_box {\n    int n;\n} mt_box;\n\nint mt_open(mt_box *b);\n")
    (core / "a.c").write_text("static int own(void)\n{\n    return 0;\n}\n\nint mt_open(mt_box *b)\n{\n    return own();\n}\n")
    found = ceilings.measured(tmp_path)
    assert found["megatrain_torch/store"] == {"lines": 10, "files": 1, "names": 2, "nouns": 1, "protocols": 1, "single": 1}
    assert {c: found["csrc/core"][c] for c in ("files", "names", "nouns")} == {"files": 2, "names": 1, "nouns": 1}
