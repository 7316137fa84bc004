"""tools/: the repository keeps its rules, rooms their order and pages their words; and what breaks them is found."""
from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import megatrain_torch as mt
from megatrain_torch import ops
from megatrain_torch.base.modes import HOMES, KEEPS
from megatrain_torch.model.choices import PLAN_KEYS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
api, rooms, rules = map(importlib.import_module, ("api_page", "rooms", "check_rules"))


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

def test_the_package_keeps_the_order() -> None:
    findings, seen = rooms.check(ROOT)
    assert [str(finding) for finding in findings] == []
    assert len(seen) > 300, "the rule sees the package's imports"


# An import of store.a, and whether it is out of order: graph comes after store, and store.c imports a.
IMPORTS = {
    "from ..graph.b import c": True, "import megatrain_torch.graph.b": True, "from .. import graph": True,
    "import importlib; importlib.import_module('megatrain_torch.graph.b')": True, "import megatrain_torch as mt": True,
    "def f():\n    from ..graph.b import c": True, "from .c import d": True,
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..graph.b import c": False, "from ..base.a import b": False,
    "from .. import _core": False, "import graph.b\nfrom torch import nn": False}


@pytest.mark.parametrize("text", IMPORTS)
def test_a_look_at_a_later_room_and_a_circle_are_found(text: str, tmp_path: Path) -> None:
    files = {"base/__init__": "", "store/__init__": "", "graph/__init__": "", "store/a": text, "store/c": "from .a import x\n",
             "base/a": "b = 1\n", "graph/b": "c = 1\n", "__init__": ""}
    for name, words in files.items():
        path = tmp_path / rooms.PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    wrong = [str(finding) for finding in rooms.check(tmp_path)[0]]
    assert len(wrong) == IMPORTS[text] and all("store comes before" in w or "a circle" in w for w in wrong), wrong


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


def test_homes_modes_and_keys_are_those_of_the_code() -> None:
    text = (ROOT / "docs/plans.md").read_text()
    for head, known in {"home": set(HOMES), "kept": set(KEEPS), "key": PLAN_KEYS}.items():
        rows = text.split(f"| {head} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
        assert {re.match(r"\| `?\"?([^`|\" ]+)", row)[1] for row in rows} == known
