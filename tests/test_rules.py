"""tools/check_rules.py: the repository keeps its rules, and each rule can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

spec = importlib.util.spec_from_file_location("check_rules", ROOT / "tools/check_rules.py")
rules = importlib.util.module_from_spec(spec)
sys.modules["check_rules"] = rules
spec.loader.exec_module(rules)


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


@pytest.mark.parametrize("path", ["csrc/ops/a.cu", "csrc/core/a.h", "csrc/ops/a.cuh", "tests/c/a.c"])
def test_lines_are_of_100_bytes_in_every_kind_of_c(path: str) -> None:
    assert list(rules.lines_fit(rules.File(path, ["x" * 100]))) == []
    for long in ("x" * 101, "\u2014" + "x" * 98):
        assert [str(f) for f in rules.lines_fit(rules.File(path, ["", long]))] == [
            f"{path}:2: 101 bytes; 100 is the most"
        ]


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
