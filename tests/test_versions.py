"""With the oldest transformers and torch that pyproject.toml allows, and the newest that the index has, a few families of
decoder layers train by templates as plain torch trains them. The versions between are the installed ones, which all
other tests have.

Wheels are fetched once, into build/versions. To allow a newer version: TRIED here, and the bound in pyproject.toml.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import parity
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
OLDEST = {"transformers": "5.17.0", "torch": "2.10.0"}
TRIED = {"transformers": "5.24.0", "torch": "2.15.0"}        # the newest that these tests have passed with
CPU = ("--index-url", "https://download.pytorch.org/whl/cpu")
EVERY = ("llama", "qwen3", "phi3", "mixtral", "gpt_oss")
FAMILIES = {"transformers": ("llama", "phi3", "gpt_oss"), "torch": ("llama", "mixtral")}

pytestmark = pytest.mark.timeout(900)        # wheels are fetched

TRAINS = """
import copy, sys, warnings
import torch
torch.set_num_threads(1)
import fusing, zoo
import megatrain_torch as mt
for family in sys.argv[1:]:
    torch.manual_seed(0)
    plain = fusing.lm(family, num_hidden_layers=2)()
    found = {}
    for compute in ("plain", "eager", "fused"):
        model = copy.deepcopy(plain)
        if compute != "plain":
            mt.stream(model, "cpu", compute=compute)
        opt = (torch.optim.AdamW if compute == "plain" else mt.AdamW)(model.parameters(), lr=1e-3)
        found[compute] = []
        for step in range(2):
            loss = model(**zoo.text_unpadded(step)).loss         # the key-value cache as the configuration has it
            loss.backward()
            opt.step()
            opt.zero_grad()
            found[compute].append(float(loss.detach()))
    fusing.all_fused(fusing.codes(model))
    assert found["plain"][0] == found["eager"][0], (family, found)
    assert all(abs(a - b) < 1e-5 * a for a, b in zip(found["plain"], found["fused"])), (family, found)
    print(family, found)
"""


def pip(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", *words],
                          capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return done.stdout


@functools.cache
def newest(package: str) -> str:
    """Of the index, prereleases left out."""
    return re.search(r"Available versions: ([\w.+]+)", pip("index", "versions", package, "--timeout", "15"))[1]


def missing(folder: Path) -> Iterator[str]:
    """What the packages in a folder need, and neither has it nor the environment: as pip takes it."""
    own = {d.name.lower().replace("_", "-"): d for d in importlib.metadata.distributions(path=[str(folder)])}
    for word in [w for d in own.values() for w in d.requires or ()]:
        need = Requirement(word)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            name = need.name.lower().replace("_", "-")
            have = own[name].version if name in own else importlib.metadata.version(need.name)
            if need.specifier.contains(have, prereleases=True):
                continue
        yield f"{need.name}{need.specifier}"


def fetched(package: str, version: str) -> Path:
    """A folder with this version, and what it needs otherwise than it is installed."""
    folder = FOLDER / f"{package}-{version}"
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=FOLDER))
        try:
            wanted = [f"{package}=={version}"]
            while wanted:
                more = CPU if package == "torch" and wanted[0].startswith("torch=") else ()
                pip("install", "-q", "--no-compile", "--no-deps", "--target", str(made), *more, *wanted)
                again, wanted = wanted, sorted(set(missing(made)))
                if again == wanted:
                    raise OSError(f"nothing satisfies {wanted}")
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def trains(package: str, version: str) -> str:
    """What went wrong; "": nothing did."""
    try:
        folder = fetched(package, version)
    except (OSError, subprocess.TimeoutExpired) as why:
        pytest.skip(f"{package} {version} cannot be had: {why}"[:300])
    path = [str(folder), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    families = EVERY if parity.FULL else FAMILIES[package]
    done = subprocess.run([sys.executable, "-c", TRAINS, *families], env=env, capture_output=True, text=True)
    return (done.stdout + done.stderr)[-3000:] if done.returncode else ""


@pytest.mark.parametrize("package", OLDEST)
def test_the_oldest_that_is_allowed(package: str) -> None:
    assert not (wrong := trains(package, OLDEST[package])), wrong


@pytest.mark.parametrize("package", OLDEST)
def test_the_newest_that_the_index_has(package: str) -> None:
    """One newer than any that was tried fails nobody's change, but CI's summary has it."""
    try:
        version = newest(package)
    except (OSError, subprocess.TimeoutExpired) as why:
        pytest.skip(f"the index cannot be asked: {why}"[:300])
    if version == importlib.metadata.version(package).partition("+")[0]:
        pytest.skip(f"{package} {version} is what is installed")
    wrong = trains(package, version)
    if Version(version) > Version(TRIED[package]):
        told = f"which fails:\n{wrong}" if wrong else "which passes: move TRIED, and the bound in pyproject.toml"
        warnings.warn(f"the index has {package} {version}, newer than {TRIED[package]}, {told}", stacklevel=1)
        return
    assert not wrong, wrong


def test_pyproject_allows_what_was_tried() -> None:
    """Of transformers from the oldest to the last that was tried, and its fixes; of torch from the oldest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = Version(TRIED["transformers"])
    bounds = f">={'.'.join(OLDEST['transformers'].split('.')[:2])},<{last.major}.{last.minor + 1}"
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "test"}
    assert {w for words in extras.values() for w in words if w.startswith("transformers")} == {f"transformers{bounds}"}
    assert f"torch>={'.'.join(OLDEST['torch'].split('.')[:2])}" in project["dependencies"]
