"""Settings for all tests: one thread (two cores, tiny tensors), no network, quiet transformers."""
from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def streaming() -> None:
    """Skips where the package is not built; tests that stream ask for it."""
    import parity
    if not parity.have_stream():
        pytest.skip("megatrain_torch.stream is not importable: build the package first")
