"""Builds megatrain_torch/_core.abi3.so: C with cc, CUDA with nvcc if there is one.

One object serves every Python from 3.11 on (limited API), with torch absent: libtorch is looked
up at run time. torch's own CUDAExtension refuses on a CPU build of torch, so setuptools is taught
here.

Environment:
    MEGATRAIN_CUDA   0: leave the CUDA part out. 1: fail when it cannot be built. Unset: if possible
    MEGATRAIN_CUDA_ARCHES   "90": machine code for these only, which is quicker. "native": for the GPUs that are here;
                     where there is none the CUDA part is left out, unless MEGATRAIN_CUDA=1. `make` says so
    MEGATRAIN_LABEL  1: the version says which build it is, as 0.1.0+cpu or 0.1.0+cuda13 (tools/wheels.py)
    CUDA_HOME, CC, CFLAGS, LDFLAGS   as everywhere
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
LIMITED_API = "0x030B0000"  # Python 3.11; bdist_wheel's cp311 below says the same
C_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-g0", "-fPIC", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wstrict-prototypes", "-Wvla"]
# FMA only where it is written: every instruction set must give the same bits.
EXACT = ["-ffp-contract=off"]
FILE_FLAGS = {
    f"csrc/optim/{name}_{isa}.c": flags
    for name in ("adam", "adam8")
    for isa, flags in {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
    }.items()
}
CUDA_ARCHES = (80, 90, 100, 120)  # machine code, for those that nvcc knows; PTX of 90 besides
PTX_ARCH = 90
INSTALLED = [  # where toolkits lie when nothing says so
    Path("/usr/local/cuda"),
    *sorted(Path("/usr/local").glob("cuda-*"), reverse=True),
    Path("/opt/cuda"),
]
X86_ONLY = set(FILE_FLAGS)
# Products of 64 bits: one a cycle as they are written, half as fast put together from vectors of 32.
SCALAR = {"csrc/io/sum.c": ["-fno-tree-vectorize", "-fno-tree-slp-vectorize"]}


class Toolkit(NamedTuple):
    """A CUDA toolkit that can build the CUDA part."""

    nvcc: str
    include: Path
    cudart: Path  # libcudart_static.a


class NoToolkit(Exception):
    """Why there is none."""


def nvcc_top(nvcc: str) -> Path | None:
    """The root that nvcc itself works from: nvcc on PATH may be a wrapper, or a link."""
    command = [nvcc, "-v", "--dryrun", "-x", "cu", os.devnull]
    shown = subprocess.run(command, capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", shown.stdout + shown.stderr, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else None


def toolkit_roots() -> list[Path]:
    """Folders that may be a toolkit's root, best first."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    roots = [Path(name) for name in named if name]
    if nvcc := shutil.which("nvcc"):
        roots += [top for top in [nvcc_top(nvcc)] if top]
        roots.append(Path(nvcc).resolve().parents[1])
    return roots + INSTALLED


def toolkit_at(root: Path) -> Toolkit | None:
    """A root counts only with the runtime's header; the rest may lie where distributions put it."""
    if not (root / "include" / "cuda_runtime_api.h").is_file():
        return None
    folders = [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]
    archives = [folder / "libcudart_static.a" for folder in folders]
    cudart = next((path for path in archives if path.is_file()), None)
    own = root / "bin" / "nvcc"
    nvcc = str(own) if own.is_file() else shutil.which("nvcc")
    return Toolkit(nvcc, root / "include", cudart) if nvcc and cudart else None


def find_toolkit() -> Toolkit:
    """The toolkit to build with.

    Raises:
        NoToolkit: There is none, or it is not wanted.
    """
    if os.environ.get("MEGATRAIN_CUDA") == "0":
        raise NoToolkit("MEGATRAIN_CUDA=0")
    if not (ROOT / "csrc/dev/dev_cuda.c").is_file():
        raise NoToolkit("csrc/dev/dev_cuda.c is not there")
    if native() and os.environ.get("MEGATRAIN_CUDA") != "1" and not cards():
        raise NoToolkit("no GPU here, and it takes minutes; MEGATRAIN_CUDA=1 builds it")
    for root in toolkit_roots():
        if toolkit := toolkit_at(root):
            return toolkit
    raise NoToolkit(
        "no folder has include/cuda_runtime_api.h, nvcc and libcudart_static.a; set CUDA_HOME"
    )


def native() -> bool:
    """Whether the build is for this machine alone."""
    return os.environ.get("MEGATRAIN_CUDA_ARCHES") == "native"


def cards() -> list[int]:
    """Compute capabilities of the GPUs here, 90 for 9.0, as the driver says; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, value, found = ctypes.c_int(), ctypes.c_int(), set()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for device in range(count.value):
        number = 0
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                return []
            number = 10 * number + value.value
        found.add(number)
    return sorted(found)


def arches() -> list[int]:
    """What machine code is wanted for."""
    if native():
        return cards() or list(CUDA_ARCHES)
    asked = os.environ.get("MEGATRAIN_CUDA_ARCHES", "").replace(",", " ").split()
    if bad := [word for word in asked if not word.isdigit()]:
        raise SystemExit(f"megatrain_torch: MEGATRAIN_CUDA_ARCHES: {bad[0]!r}: numbers such as 90, or native")
    return [int(n) for n in asked] or list(CUDA_ARCHES)


def gencode(nvcc: str) -> list[str]:
    """-gencode flags for the architectures that this nvcc knows."""
    command = [nvcc, "--list-gpu-arch"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    known = {int(n) for n in re.findall(r"compute_(\d+)", listed)}
    flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in arches() if n in known]
    return [*flags, f"-gencode=arch=compute_{PTX_ARCH},code=compute_{PTX_ARCH}"]


def c_sources(cuda: bool, machine: str) -> list[str]:
    """Paths of the C files, relative to the root, sorted."""
    found = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").glob("*/*.c")}
    found.discard("csrc/dev/dev_cuda_none.c" if cuda else "csrc/dev/dev_cuda.c")
    return sorted(found if machine in ("x86_64", "AMD64") else found - X86_ONLY)


def label() -> str:
    """What follows the version where it is wanted (PEP 440, local version).

    "cuda13" sorts above "cpu": pip takes the build with CUDA, which runs without a GPU too, unless told otherwise.
    """
    if os.environ.get("MEGATRAIN_LABEL") != "1":
        return ""
    try:
        header = find_toolkit().include / "cuda_runtime_api.h"
    except NoToolkit:
        return "+cpu"
    number = re.search(r"^#define CUDART_VERSION\s+(\d+)", header.read_text(), re.MULTILINE)
    return f"+cuda{int(number[1]) // 1000}"


class Labelled(egg_info):
    """egg_info, with which every distribution gets its version."""

    def finalize_options(self) -> None:
        """A source distribution's setup.cfg says that there is no label, so this comes later."""
        self.tag_build = label()
        super().finalize_options()


class BuildCore(build_ext):
    """build_ext for one extension of C and CUDA files, compiled in parallel."""

    def build_extension(self, ext: Extension) -> None:
        """Compile what changed, link, and say whether the CUDA part is in."""
        try:
            toolkit = find_toolkit()
        except NoToolkit as why:
            if os.environ.get("MEGATRAIN_CUDA") == "1":
                raise SystemExit(f"megatrain_torch: MEGATRAIN_CUDA=1, but: {why}") from None
            toolkit, note = None, f"left out ({why})"
        else:
            note = f"built with {toolkit.nvcc}"
        objects = self.compile_all(toolkit)
        self.link(objects, toolkit, Path(self.get_ext_fullpath(ext.name)))
        print(f"megatrain_torch: CUDA part {note}", flush=True)

    def compile_all(self, toolkit: Toolkit | None) -> list[Path]:
        """The objects, in the order of their sources."""
        sources = c_sources(bool(toolkit), platform.machine())
        commands = [self.c_command(source, toolkit) for source in sources]
        if toolkit:
            targets = gencode(toolkit.nvcc)
            cu = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").glob("*/*.cu"))
            commands += [self.cu_command(source, toolkit, targets) for source in cu]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(self.compile, commands))

    def object_of(self, source: str) -> Path:
        """Where a source's object goes: one place, so that pip's builds and ours share them."""
        return ROOT / "build/core" / (source + ".o")

    def c_command(self, source: str, toolkit: Toolkit | None) -> list[str]:
        """cc for one C file."""
        flags = [*C_FLAGS, *WARNINGS]
        if source.startswith(("csrc/optim/", "csrc/ops/")):
            flags += EXACT
        flags += FILE_FLAGS.get(source, []) + SCALAR.get(source, [])
        if source.startswith("csrc/bind/"):
            flags += self.bind_flags()
            # C++ exceptions of libtorch pass through the frames of ops.
            flags += ["-fexceptions"] if "ops" in Path(source).stem else []
        if toolkit:
            flags += ["-DMT_WITH_CUDA", "-isystem", str(toolkit.include)]
        flags += shlex.split(os.environ.get("CFLAGS", ""))
        return [*cc(), *flags, *self.in_and_out(source)]

    def in_and_out(self, source: str) -> list[str]:
        """The end of a compiler's command line; .d lists what the object was made from."""
        out = self.object_of(source)
        return ["-MMD", "-MF", f"{out}.d", "-c", source, "-o", str(out)]

    def bind_flags(self) -> list[str]:
        """Headers of Python and NumPy: the only files that see them are those of csrc/bind."""
        import numpy

        headers = [folder for folder in self.include_dirs if Path(folder).is_dir()]
        flags = [f"-DPy_LIMITED_API={LIMITED_API}", f'-DMT_VERSION="{version()}"']
        return [*flags, *(f"-isystem{folder}" for folder in [*headers, numpy.get_include()])]

    def cu_command(self, source: str, toolkit: Toolkit, targets: list[str]) -> list[str]:
        """nvcc for one kernel file."""
        flags = ["-O3", "-std=c++17", "--fmad=false", "-DMT_WITH_CUDA"]
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
        return [toolkit.nvcc, *flags, *targets, *host, *self.in_and_out(source)]

    def compile(self, command: list[str]) -> Path:
        """Run a compiler, unless the object is newer than all it was made from."""
        out = Path(command[-1])
        said = Path(f"{out}.cmd")
        line = shlex.join(command)
        if fresh(out) and said.is_file() and said.read_text() == line:
            return out
        out.parent.mkdir(parents=True, exist_ok=True)
        run(command)
        said.write_text(line)
        return out

    def link(self, objects: list[Path], toolkit: Toolkit | None, out: Path) -> None:
        """One shared object that shows one symbol; cudart inside it, the driver outside."""
        out = out.resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-shared", "-s", "-Wl,--version-script=csrc/bind/exports.map,-z,now,--as-needed"]
        cuda = [str(toolkit.cudart), "-lstdc++", "-lrt"] if toolkit else []
        libraries = [*cuda, "-ldl", "-lm", "-lpthread", *shlex.split(os.environ.get("LDFLAGS", ""))]
        run([*cc(), *flags, *map(str, objects), *libraries, "-o", str(out)])


def cc() -> list[str]:
    """The C compiler."""
    return shlex.split(os.environ.get("CC", "cc"))


def version() -> str:
    """As pyproject.toml says, with its label."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["version"] + label()


def fresh(out: Path) -> bool:
    """Whether the object is newer than every file its .d names."""
    dependencies = Path(f"{out}.d")
    if not (out.is_file() and dependencies.is_file()):
        return False
    names = dependencies.read_text().split(":", 1)[1].replace("\\\n", " ").split()
    made = out.stat().st_mtime_ns
    paths = [ROOT / name for name in names]
    return all(path.is_file() and path.stat().st_mtime_ns < made for path in paths)


def run(command: list[str]) -> None:
    """Run a compiler from the root: what it says then carries no machine's paths."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.stdout or done.stderr:
        print(done.stdout + done.stderr, file=sys.stderr)
    if done.returncode != 0:
        raise SystemExit(f"megatrain_torch: this failed:\n  {shlex.join(command)}")


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("megatrain_torch._core", sources=[], py_limited_api=True)],
        cmdclass={"build_ext": BuildCore, "egg_info": Labelled},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
