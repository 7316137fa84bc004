"""Settings for all tests: one thread (two cores, tiny tensors), no network, quiet transformers."""
from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import parity
import pytest
import torch
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)      # a busy machine is no failure
settings.load_profile("no deadline")
torch.set_num_threads(1)
# pytest listens to loggers that propagate nothing: for this one's sake each graph of torch._dynamo would be written out.
logging.getLogger("torch.__trace").propagate = True

# The longest, in their order: other processes of pytest would wait for them at the end.
FIRST = """versions bases_apart several parity proof fused deferred moe situations cli_methods preflight planning adamw peft
           fp8_products overlap several_hf""".split()
SEEN = [0]                     # so many modules were imported when gc last had to go through them
COMPARED = "parity situations integration peft".split()      # plain against plain says something of these alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if parity.IDENTITY:
        items[:] = [item for item in items if item.path.stem.removeprefix("test_") in COMPARED]
    order = {f"test_{name}": i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_runtest_setup() -> None:
    """What is imported stays until the end: no gc.collect(), of which trainers make many, has to go through it again."""
    if len(sys.modules) > SEEN[0] + 50:
        gc.collect()
        gc.freeze()
        SEEN[0] = len(sys.modules)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., tuple]:
    """Runs `megatrain ...`: (exit status, stdout, stderr). Machines are kept in a folder of the test's own."""
    from megatrain_torch import cli
    monkeypatch.setenv("MEGATRAIN_MACHINE", str(tmp_path / "kept" / "machine.json"))

    def run(*words: Any) -> tuple[int, str, str]:
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as why:
            status = why.code
        return (status, *capsys.readouterr())

    return run
