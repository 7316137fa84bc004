"""The build: one abi3 object that shows one symbol, with or without CUDA, with or without torch."""
from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatrain_torch import _core

ROOT = Path(__file__).parents[1]

spec = importlib.util.spec_from_file_location("build_of_the_core", ROOT / "setup.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools/wheels.py")
wheels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wheels)


def run(*command: object, **settings: object) -> str:
    """What a command says; its errors are the assertion's message."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- the object that is installed ----

def dynamic_symbols(which: str) -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    return {line.split()[-1] for line in run("nm", "-D", which, _core.__file__).splitlines()}


def test_the_object_shows_one_symbol() -> None:
    assert dynamic_symbols("--defined-only") == {"PyInit__core"}


def test_the_object_needs_no_library_of_torch_python_or_cuda() -> None:
    """Everything that may be absent is looked up at run time."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\.so", run("readelf", "-d", _core.__file__))
    system = {"libc", "libm", "libdl", "librt", "libpthread", "libstdc++", "libgcc_s"}
    assert {name for name in needed if not name.startswith("ld-")} <= system


def test_the_object_carries_no_path_of_this_machine() -> None:
    assert str(ROOT).encode() not in Path(_core.__file__).read_bytes()


@pytest.mark.skipif(not _core.build_info()["cuda"], reason="a build without CUDA")
def test_a_cuda_build_works_without_a_driver() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(_core.MegatrainError, match="cuda:0"):
        _core.Engine("cuda")
    _core.Engine("cpu").close()


# ---- finding a toolkit ----

def toolkit(root: Path, *, header: bool = True, nvcc: bool = True) -> Path:
    """A folder that looks like a CUDA toolkit."""
    for folder in ("include", "bin", "targets/x86_64-linux/lib"):
        (root / folder).mkdir(parents=True)
    (root / "targets/x86_64-linux/lib/libcudart_static.a").touch()
    if header:
        (root / "include/cuda_runtime_api.h").touch()
    if nvcc:
        (root / "bin/nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={root}/bin/..' >&2\n")
        (root / "bin/nvcc").chmod(0o755)
    return root


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No toolkit but what the test makes."""
    monkeypatch.setattr(build, "INSTALLED", [])
    for name in ("CUDA_HOME", "CUDA_PATH", "MEGATRAIN_CUDA", "MEGATRAIN_CUDA_ARCHES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    return tmp_path


def test_a_wrapper_on_path_leads_to_the_real_toolkit(alone: Path) -> None:
    real = toolkit(alone / "cuda-99")
    wrapper = alone / "path/nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {real}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    found = build.find_toolkit()
    assert found.nvcc == str(real / "bin/nvcc") and found.include == real / "include"
    assert found.cudart.is_file()


def test_a_folder_without_the_header_is_no_toolkit(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(alone / "half", header=False)))
    with pytest.raises(build.NoToolkit, match=r"cuda_runtime_api\.h"):
        build.find_toolkit()


def test_cuda_home_comes_before_path(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone / "path/nvcc").symlink_to(toolkit(alone / "other") / "bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(alone / "home")))
    assert build.find_toolkit().include == alone / "home/include"


def test_cuda_can_be_left_out_by_force(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(alone / "home")))
    monkeypatch.setenv("MEGATRAIN_CUDA", "0")
    with pytest.raises(build.NoToolkit, match="MEGATRAIN_CUDA=0"):
        build.find_toolkit()


class Driver:
    """What cards() asks of libcuda: two cards, of compute capabilities 9.0 and 8.6."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: int) -> int:
        value._obj.value = {75: (9, 8), 76: (0, 6)}[attribute][device]
        return 0


def test_a_build_for_this_machine_is_for_its_cards(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(alone / "home")))
    monkeypatch.setenv("MEGATRAIN_CUDA_ARCHES", "native")
    monkeypatch.setattr(build.ctypes, "CDLL", lambda name: Driver())
    assert build.arches() == [86, 90] and build.find_toolkit()
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)  # CUDA_ERROR_NO_DEVICE
    with pytest.raises(build.NoToolkit, match=r"no GPU here.*MEGATRAIN_CUDA=1 builds it"):
        build.find_toolkit()
    monkeypatch.setenv("MEGATRAIN_CUDA", "1")
    assert build.find_toolkit() and build.arches() == list(build.CUDA_ARCHES)
    monkeypatch.setenv("MEGATRAIN_CUDA_ARCHES", "sm_90")
    with pytest.raises(SystemExit, match="MEGATRAIN_CUDA_ARCHES: 'sm_90': numbers such as 90, or native"):
        build.arches()


def test_make_builds_for_this_machine_unless_told_otherwise() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    assert "MEGATRAIN_CUDA_ARCHES = native" in run("make", "-pn", "help", cwd=ROOT, env={"PATH": os.environ["PATH"]})
    assert run("make", "-pn", "help", "CARD=", cwd=ROOT).count("download.pytorch.org/whl/cpu")


@pytest.mark.parametrize("asked, cuda, said", [("1", "1", "+cuda13"), ("1", "0", "+cpu"), ("", "1", "")])
def test_the_version_names_the_build_where_it_is_wanted(
    alone: Path, monkeypatch: pytest.MonkeyPatch, asked: str, cuda: str, said: str
) -> None:
    root = toolkit(alone / "home")
    (root / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  13020\n")
    for name, value in {"CUDA_HOME": str(root), "MEGATRAIN_CUDA": cuda, "MEGATRAIN_LABEL": asked}.items():
        monkeypatch.setenv(name, value)
    assert build.label() == said
    assert build.version().endswith(said)


def test_what_is_released_has_nothing_of_the_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all that setup.py would take from it; but a compiler, and where CUDA is."""
    taken = set(re.findall(r"environ\.get\(\"(\w+)\"", (ROOT / "setup.py").read_text())) - {"CC"}
    assert taken >= {"MEGATRAIN_CUDA_ARCHES", "MEGATRAIN_LABEL", "CFLAGS", "LDFLAGS"}
    for name in taken:
        monkeypatch.setenv(name, "90")
    commands = []
    monkeypatch.setattr(wheels, "tools", lambda: Path(sys.executable))
    monkeypatch.setattr(subprocess, "run", lambda command, check, env: commands.append(env))
    for name, make in (("m.tar.gz", wheels.sdist), ("m.whl", lambda out: wheels.wheel(out, out, MEGATRAIN_CUDA="0"))):
        (tmp_path / name).touch()
        make(tmp_path)
    assert [{name: env[name] for name in taken if name in env} for env in commands] == [{}, {"MEGATRAIN_CUDA": "0"}]
    assert all(env["PATH"] == os.environ["PATH"] for env in commands)


def test_vector_kernels_are_for_x86_only() -> None:
    intel, arm = build.c_sources(False, "x86_64"), build.c_sources(False, "aarch64")
    assert set(intel) - set(arm) == build.X86_ONLY
    assert "csrc/dev/dev_cuda_none.c" in arm and "csrc/dev/dev_cuda.c" not in arm
    assert "csrc/dev/dev_cuda.c" in build.c_sources(True, "x86_64")


# ---- the image ----

def test_the_image_copies_what_is_there() -> None:
    """No test builds it; what it takes from this folder is at least here."""
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copies for name in line.split()}
    assert {"csrc", "megatrain_torch", "setup.py"} <= names
    assert [name for name in names if not (ROOT / name).exists()] == []


# ---- a wheel from a clean copy, without CUDA ----

# As in tests/c/Makefile; what GCC thinks of initialisation depends on how it inlines.
WERROR = "-O1 -Werror -Wno-error=maybe-uninitialized"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git would carry, with this environment's setuptools and NumPy."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("clean") / "project"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    hidden = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("csrc", "megatrain_torch"):
        shutil.copytree(ROOT / name, copy / name, ignore=hidden)
    env = {**os.environ, "MEGATRAIN_CUDA": "0", "MEGATRAIN_LABEL": "1", "CFLAGS": WERROR}
    assert "CUDA part left out (MEGATRAIN_CUDA=0)" in run(sys.executable, "setup.py", "bdist_wheel", cwd=copy, env=env)
    (made,) = (copy / "dist").glob("*.whl")
    return made


def test_the_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert re.fullmatch(r"megatrain_torch-[\d.]+\+cpu-cp311-abi3-linux_\w+\.whl", wheel.name)


def test_the_wheel_holds_the_package_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "megatrain_torch").rglob("*.py")}
    core = {"megatrain_torch/_core.abi3.so", "megatrain_torch/_core.pyi"}
    assert modules | core <= names and any(n.endswith("licenses/LICENSE") for n in names)
    assert not [name for name in names if name.startswith(("tests", "csrc", "build"))]


def test_the_wheel_works_without_cuda_numpy_or_torch(wheel: Path, tmp_path: Path) -> None:
    """Loaded alone, as no package import would: every symbol of the core must be there."""
    zipfile.ZipFile(wheel).extract("megatrain_torch/_core.abi3.so", tmp_path)
    code = (
        "import importlib.machinery as m, importlib.util as u, sys\n"
        f"l = m.ExtensionFileLoader('megatrain_torch._core', {str(tmp_path)!r} + "
        "'/megatrain_torch/_core.abi3.so')\n"
        "c = u.module_from_spec(u.spec_from_loader(l.name, l))\n"
        "l.exec_module(c)\n"
        "e = c.Engine('cpu', threads=2)\n"
        "e.add_unit('a', [0], [10], [True])\n"
        "e.close()\n"
        "try: c.Engine('cuda')\n"
        "except c.MegatrainError as error: print(error)\n"
        "print(c.build_info()['cuda'], sorted({'numpy', 'torch'} & set(sys.modules)))\n"
        "print(c.__version__)\n"
    )
    said = run(sys.executable, "-I", "-c", code).splitlines()
    assert "this build has no CUDA" in said[0] and said[1] == "False []"
    assert said[2] == wheel.name.split("-")[1], "the core and the distribution differ in their version"
