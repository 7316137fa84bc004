"""Settings for all tests: one thread (two cores, tiny tensors), no network, quiet transformers."""
from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

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


# Of minutes each, for which the other processes of pytest would wait at the end.
FIRST = "bases_apart versions cli_methods several peft proof_cases latent placement correction several_hf lifetimes".split()
COMPARED = "parity situations integration peft models".split()      # plain against plain says something of these alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if parity.IDENTITY:
        items[:] = [item for item in items if item.path.stem.removeprefix("test_") in COMPARED]
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in FIRST)


def pytest_collection_finish() -> None:
    """What was imported for all the tests stays until the end: no gc.collect() has to go through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
