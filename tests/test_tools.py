"""tools/: the repository keeps its rules, rooms their order and pages their words; and what breaks them is found."""
from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import megatrain_torch as mt
from megatrain_torch import ops
from megatrain_torch.base.modes import DISK, GRADS, HOMES, HOST, KEEPS, LINKED
from megatrain_torch.model.choices import PLAN_KEYS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
api, ceilings, rooms, rules = map(importlib.import_module, ("api_page", "ceilings", "rooms", "check_rules"))


# ---- rules ----

def test_the_repository_keeps_its_rules() -> None:
    assert [str(finding) for finding in rules.check(ROOT)] == []


LONG_PYTHON = "def f():\n" + "    pass\n" * 60
LONG_FUNCTION = "void f(void)\n{\n" + "    ;\n" * 81 + "}\n"

# rule: a file that breaks it, one that looks alike and does not
PLANTED = {
    "no_guests_in_core": (
        ("csrc/core/pool.c", '#include "pool.h"\n#include <Python.h>\n'),
        ("csrc/dev/dev_cuda.c", "#include <cuda_runtime_api.h>\n"),
    ),
    "guests_in_their_file": (
        ("csrc/bind/engine.c", "#include <numpy/arrayobject.h>\n"),
        ("csrc/bind/arrays.c", "#include <numpy/arrayobject.h>\n"),
    ),
    "rooms_in_order": (
        ("csrc/ops/sumsq.c", '#include "../optim/adam.h"\n'),
        ("csrc/optim/adam.c", '#include "../ops/sumsq.h"\n'),
    ),
    "core_headers_in_order": (
        ("csrc/core/store.h", '#include "stream.h"\n'),
        ("csrc/core/stream.h", '#include "store.h"\n'),
    ),
    "own_header_first": (
        ("csrc/core/pool.c", '#include <stdio.h>\n#include "pool.h"\n'),
        ("csrc/core/pool.c", '#include "pool.h"\n#include <stdio.h>\n'),
    ),
    "no_machine_paths": (
        ("docs/a.md", "see /ro" "ot/x/y\n"),
        ("docs/a.md", "see https://example.org/work/x\n"),
    ),
    "nothing_left_over": (("a.py", "# TO" "DO: all\n"), ("a.py", "# methodology\n")),
    "locks_have_ranks": (
        ("csrc/io/file.c", "    pthread_mutex_lock(&f->mu);\n"),
        ("csrc/io/file.c", "    mt_lock(&f->mu);\n    pthread_cond_broadcast(&f->more);\n"),
    ),
    "lines_fit": (("csrc/core/a.c", "x" * 101 + "\n"), ("csrc/core/a.c", "x" * 100 + "\n")),
    "functions_fit": (
        ("csrc/core/a.c", LONG_FUNCTION),
        ("csrc/core/a.c", LONG_FUNCTION.replace("    ;\n", "", 1)),
    ),
    "python_functions_fit": (("a.py", LONG_PYTHON), ("a.py", LONG_PYTHON.replace("    pass\n", "", 1))),
}


def test_every_rule_is_tried() -> None:
    assert set(PLANTED) == {rule.__name__ for rule in rules.RULES}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    for (path, text), faults in zip(PLANTED[name], (1, 0)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        found = rules.check(tmp_path)
        assert len(found) == faults, (path, found)
        (tmp_path / path).unlink()


# ---- rooms ----

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


def test_what_is_over_its_ceiling_is_found_by_name() -> None:
    table = {"csrc/core": {"lines": 10, "nouns": 2}}
    assert ceilings.over({"csrc/core": {"lines": 10, "nouns": 2}}, table) == []
    (finding,) = ceilings.over({"csrc/core": {"lines": 11, "nouns": 2}}, table)
    assert "csrc/core has 11 lines, and its ceiling is 10" in str(finding)


def test_ceilings_only_fall() -> None:
    table = {"csrc/core": {"lines": 10, "nouns": 2}}
    assert ceilings.lowered({"csrc/core": {"lines": 12, "nouns": 1}}, table) == {"csrc/core": {"lines": 10, "nouns": 1}}


# ---- pages ----

def test_the_page_is_up_to_date() -> None:
    assert api.PAGE.read_text() == api.page(), "docs/api.md is old: make api"


def test_it_has_every_public_name() -> None:
    found = set(re.findall(r"^### (\S+)$", api.PAGE.read_text(), re.MULTILINE))
    public = {f"mt.{name}" for name in mt.__all__ if name != "__version__"}
    assert found == public | {f"ops.{name}" for name in api.own(ops)}


def test_a_public_name_without_a_docstring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mt.Trace, "more", lambda self: None, raising=False)
    with pytest.raises(SystemExit, match=r"Trace\.more is public and has no docstring"):
        api.page()


PLANS = (ROOT / "docs/plans.md").read_text()


def table(head: str) -> list[str]:
    """What stands in quotes in the first column of the table with this head."""
    rows = PLANS.split(f"| {head} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [re.match(r"\| `?\"?([^`|\" ]+)", row)[1] for row in rows]


def test_homes_modes_and_keys_are_those_of_the_code() -> None:
    assert set(table("home")) == set(HOMES)
    assert set(table("kept")) == {*KEEPS, LINKED}
    assert set(table("key")) == PLAN_KEYS


def test_where_what_is_kept_waits_is_told() -> None:
    ways = {"+" + mode.partition("+")[2] for mode in (*HOST, *DISK)}
    assert [way for way in ways if way not in PLANS] == []
    assert [word for word in GRADS if f"`{word}`" not in PLANS] == []
