"""tests/test_bases.py, and the command line over such bases, in a process that has bitsandbytes and torchao, which `make
test` puts into a folder of their own."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "bases"
COMMANDS = [f"{Path(__file__).with_name('test_cli_lora.py')}::{name}[{base}]" for base in ("nf4", "int8") for name in
            ("test_over_every_base_too", "test_a_model_without_weights_has_the_shape_of_what_is_read")]


@pytest.mark.timeout(900)                    # a whole file of tests, on a machine that may be busy
@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="test_bases.py runs itself")
@pytest.mark.skipif(not (FOLDER / "torchao").is_dir(), reason="`make test` installs bitsandbytes and torchao")
def test_frozen_bases_of_codes() -> None:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(FOLDER)]))
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short",
             str(Path(__file__).with_name("test_bases.py")), *COMMANDS]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]
