"""The C core as Python sees it: the Engine's life, its memory, one step, and who may wait."""
from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain_torch import _core
from megatrain_torch._core import DTYPES, PLANES, Engine, MegatrainError

F32 = DTYPES["F32"]
HI, GRAD, LO = (PLANES[name] for name in ("HI", "GRAD", "LO"))
HYPER = (1e-2, 0.9, 0.999, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight_decay
SET = 0
SLOT_BYTES = 8192


class Slots:
    """Device memory on the CPU device, and the hooks that an engine asks."""

    def __init__(self, n: int, nbytes: int = SLOT_BYTES) -> None:
        self.kept = []
        self.nbytes = nbytes
        self.addresses = [self.fresh() for _ in range(n)]
        self.held_slots: set[int] = set()

    def fresh(self) -> int:
        memory = np.zeros(self.nbytes + 512, np.uint8)
        self.kept.append(memory)
        return -(-memory.ctypes.data // 512) * 512

    def pairs(self) -> list[tuple[int, int]]:
        return [(address, self.nbytes) for address in self.addresses]

    def held(self, slot: int) -> bool:
        return slot in self.held_slots

    def renew(self, slot: int) -> int:
        self.addresses[slot] = self.fresh()
        return self.addresses[slot]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine("cpu", threads=2)
    made.watchdog(60)
    yield made
    made.close()


def unit_of(engine: Engine, dtype: int, values: torch.Tensor, name: str = "layers.0") -> int:
    """A unit of one trainable parameter that holds values."""
    unit = engine.add_unit(name, [dtype], [values.numel()], [True])
    weights(engine, unit).copy_(values)
    return unit


def weights(engine: Engine, unit: int, plane: int = HI) -> torch.Tensor:
    """Parameter 0 of a unit in a plane, in the type that plane has for float32 weights."""
    return torch.from_numpy(engine.plane(unit, 0, plane)).view(torch.float32)


def entry(step: int = 1, hyper: tuple = HYPER) -> tuple:
    """What adam() wants for parameter 0."""
    return (0, *hyper, step, False, 0, F32, False)


# ---- the module ----

def test_build_info_says_what_this_processor_runs() -> None:
    info = _core.build_info()
    assert set(info) == {"cuda", "isa", "isas", "nodes"}
    assert info["isas"][0] == "scalar" and info["isa"] == info["isas"][-1]


REFUSALS: dict[str, tuple[Callable[[Engine], object], str]] = {
    "device": (lambda e: Engine("tpu"), 'unknown device "tpu"'),
    "threads": (lambda e: Engine("cpu", threads=0), "0"),
    "unit": (lambda e: e.plane(5, 0, HI), "unit 5: the store has units 0 to 0"),
    "negative-unit": (lambda e: e.hi_bytes(-1), "unit -1"),
    "param": (lambda e: e.offset(0, 3), "parameter 3: it has parameters 0 to 0"),
    "plane": (lambda e: e.plane(0, 0, 12), "plane 12"),
    "no-such-plane-for-f32": (lambda e: e.plane(0, 0, LO), "LO"),
    "dtype": (lambda e: e.add_unit("x", [77], [1], [True]), "dtype 77"),
    "numel": (lambda e: e.add_unit("x", [F32], [-1], [True]), "-1 elements"),
    "lengths": (lambda e: e.add_unit("x", [F32], [1, 2], [True]), "2 numels"),
    "no-slots": (lambda e: e.acquire(0, 0), "open_slots"),
    "offload-mode": (lambda e: e.offload(0, [(0, 64, 7, False)], 0), "mode 7"),
    "offload-null": (lambda e: e.offload(0, [(0, 0, SET, False)], 0), "address 0"),
    "stream-on-cpu": (lambda e: e.offload(0, [], 1234), ""),
    "betas": (lambda e: e.adam([(0, [entry(hyper=(1e-3, 2.0, 0.9, 0.0, 0.0))])], 0, 0), "betas"),
    "step": (lambda e: e.adam([(0, [entry(step=0)])], 0, 0), "layers.0"),
    "ticket": (lambda e: e.norm(99), "99"),
    "watchdog": (lambda e: e.watchdog(0.0), "seconds"),
    "isa": (lambda e: _core.adam_step([], 1.0, 1, 9), "isa 9"),
    "sumsq-dtype": (lambda e: _core.sumsq(DTYPES["I64"], 64, 1), "I64"),
    "split-null": (lambda e: _core.split_join(0, 0, 0, 4), "split_join"),
    "split-low": (lambda e: _core.split_join(64, 64, 64, 0, 0), "split_join: 0 bytes below the weight"),
    "split-set-low": (lambda e: _core.split_set(64, 64, 64, 0, 4), "split_set: 4 bytes below the weight"),
    "codes-null": (lambda e: _core.codes_set(64, 64, 64, 64, 0, 1), "codes_set"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_argument_is_refused_by_name(engine: Engine, name: str) -> None:
    call, says = REFUSALS[name]
    unit_of(engine, F32, torch.ones(10))
    with pytest.raises(MegatrainError) as caught:
        call(engine)
    assert says in str(caught.value)
    engine.check()  # a refusal is no fault: the engine goes on


SLOW_DRIVE = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <sys/types.h>
    #include <time.h>
    typedef ssize_t call(int, const void *, size_t, off_t);
    static ssize_t slowly(const char *name, int fd, const void *p, size_t n, off_t at)
    {
        nanosleep(&(struct timespec){ 0, 50000000 }, NULL);
        return ((call *)dlsym(RTLD_NEXT, name))(fd, p, n, at);
    }
    ssize_t pwrite(int fd, const void *p, size_t n, off_t at) { return slowly("pwrite", fd, p, n, at); }
    int fsync(int fd)
    {
        nanosleep(&(struct timespec){ 0, 700000000 }, NULL);
        return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
    }
    ssize_t pwrite64(int fd, const void *p, size_t n, off_t at) { return slowly("pwrite64", fd, p, n, at); }
"""
SAVES = """
    import importlib.util, sys, time
    spec = importlib.util.spec_from_file_location("_core", sys.argv[1])
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    engine = core.Engine("cpu")
    unit = engine.add_unit("layers.0", [core.DTYPES["F32"]], [12 << 20], [True])
    plane = engine.plane(unit, 0, core.PLANES["HI"])
    engine.watchdog(0.3)
    begun = time.monotonic()
    late = engine.add_unit("layers.1", [core.DTYPES["F32"]], [4 << 20], [True])
    last = engine.plane(late, 0, core.PLANES["HI"])
    engine.save_begin([(sys.argv[2], plane.nbytes, [(0, plane.ctypes.data, plane.nbytes, unit)]),
                       (sys.argv[2] + ".1", last.nbytes, [(0, last.ctypes.data, last.nbytes, late)])],
                      [(unit, 1), (late, 1)], 0, 1, 1)
    engine.wait_saved(unit)
    engine.wait_saved(late)
    print(time.monotonic() - begun)
    engine.close()
"""


def test_a_long_save_is_waited_for_however_patient_the_watchdog_is(tmp_path: Path) -> None:
    """12 blocks, a twentieth of a second each: twice the watchdog's time, and never a tenth without a block. And a sync of
    their file that is longer than that, while the one thread that writes has blocks of another file to come."""
    (tmp_path / "slow.c").write_text(textwrap.dedent(SLOW_DRIVE))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "slow.so", "slow.c", "-ldl"], cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SAVES), _core.__file__, str(tmp_path / "saved")],
                          env=os.environ | {"LD_PRELOAD": str(tmp_path / "slow.so")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.4


def test_the_watchdog_warns_from_any_thread(tmp_path: Path) -> None:
    """The CPU device computes in the calling thread, so that it never has work there: the channel by itself. Where
    warnings are errors, the hook for what nobody can catch has it."""
    csrc = Path(__file__).resolve().parents[1] / "csrc"
    subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-DPy_LIMITED_API=0x030b0000", "-shared", "-fPIC", "-I",
                    sysconfig.get_paths()["include"], "-o", "warn.so", csrc / "bind/errors.c", csrc / "core/status.c"],
                   cwd=tmp_path, check=True)
    told: list[str] = []
    warn = ctypes.CDLL(str(tmp_path / "warn.so")).mt_warn
    before = sys.unraisablehook
    try:
        sys.unraisablehook = lambda caught: told.append(f"error: {caught.exc_value}")
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, kind, *_: told.append(f"{kind.__name__}: {message}")
            for action in ("always", "error"):
                warnings.simplefilter(action)
                warn("compute, unit lägers.3".encode()[:-1] + b"\xc3")
                deadline = time.monotonic() + 20
                while not told or (action == "error" and len(told) < 2):
                    assert time.monotonic() < deadline, told
                    time.sleep(0.001)
    finally:
        sys.unraisablehook = before
    assert told == ["RuntimeWarning: compute, unit lägers.\ufffd", "error: compute, unit lägers.\ufffd"]


WRONG_TYPES: dict[str, Callable[[Engine], object]] = {
    "unit": lambda e: e.plane("a", 0, HI),
    "stream": lambda e: e.acquire(0, None),
    "count": lambda e: e.acquire(0),
    "items": lambda e: e.offload(0, 5, 0),
    "item": lambda e: e.offload(0, [(0, 64)], 0),
    "entry": lambda e: e.adam([(0, [(0, 1e-3)])], 0.0, 0),
    "dtypes": lambda e: e.add_unit("x", ["F32"], [1], [True]),
    "slots": lambda e: e.open_slots([5], Slots(1)),
    "tensor": lambda e: _core.adam_step([(1, 2)], 1.0, 1, 0),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_is_a_type_error(engine: Engine, name: str) -> None:
    unit_of(engine, F32, torch.ones(10))
    if name in ("stream", "count"):
        slots = Slots(1)
        engine.open_slots(slots.pairs(), slots)
    with pytest.raises(TypeError):
        WRONG_TYPES[name](engine)


def test_hooks_without_renew_are_refused(engine: Engine) -> None:
    unit_of(engine, F32, torch.ones(10))
    with pytest.raises(AttributeError, match="held"):
        engine.open_slots(Slots(1).pairs(), object())
    slots = Slots(1)
    engine.open_slots(slots.pairs(), slots)  # the refusal left nothing behind


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0), (0, 1 << 20)])
def test_a_rank_that_cannot_be_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(MegatrainError, match=f"rank {rank} of {ranks}"):
        Engine("cpu", rank=rank, ranks=ranks)
    with pytest.raises(MegatrainError, match="shares nothing has neither ranks"):
        Engine("cpu", rank=1, ranks=2)


def test_a_share_that_is_none_and_what_no_rank_may_do_in_one_is_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(MegatrainError, match="is of another file"):
        Engine("cpu", share=fd, ranks=2)
    os.close(fd)
    fd = _core.share()
    first = Engine("cpu", share=fd, rank=1, ranks=2)
    for rank, ranks, says in ((1, 2, "rank 1 is process"), (0, 3, "others 2")):
        with pytest.raises(MegatrainError, match=says):
            Engine("cpu", share=fd, rank=rank, ranks=ranks)
    os.close(fd)
    first.add_unit("empty", [F32], [0], [True])
    assert first.portions(0) == (0, 0, 0) and first.owned(0, 0) == (0, 0)
    with pytest.raises(MegatrainError, match="PLANES has"):
        first.spread(0, 0, 1 << 20)
    first.close()


# ---- life and memory ----

def test_close_is_idempotent_and_later_calls_say_so(engine: Engine) -> None:
    unit_of(engine, F32, torch.ones(10))
    engine.close()
    engine.close()
    for call in (engine.begin, engine.stats, engine.drain, lambda: engine.plane(0, 0, HI)):
        with pytest.raises(MegatrainError, match="closed"):
            call()


def test_an_engine_never_opened_can_go() -> None:
    made = Engine.__new__(Engine)
    with pytest.raises(MegatrainError, match="closed"):
        made.check()
    made.close()
    del made


def test_arrays_outlive_close_and_the_engine() -> None:
    engine = Engine("cpu")
    unit_of(engine, F32, torch.arange(1000.0))
    array, tensor = engine.plane(0, 0, HI), weights(engine, 0)
    assert array.dtype == np.uint8 and array.shape == (4000,) and array.flags.writeable
    engine.close()
    del engine
    gc.collect()
    tensor += 1
    assert array.view(np.float32).tolist() == list(range(1, 1001))


def test_an_engine_in_a_cycle_with_its_hooks_and_arrays_is_collected() -> None:
    """As a model is: the engine's hooks hold the model, its parameters show the engine's memory."""

    class Hooks(Slots):
        engine: Engine
        parameter: torch.Tensor

    hooks = Hooks(1)
    hooks.engine = Engine("cpu")
    unit_of(hooks.engine, F32, torch.ones(4))
    hooks.parameter = weights(hooks.engine, 0)
    hooks.engine.open_slots(hooks.pairs(), hooks)
    gone = threading.Event()
    hooks.kept.append(type("Tell", (), {"__del__": lambda self: gone.set()})())
    del hooks
    gc.collect()
    assert gone.is_set()


@pytest.mark.parametrize("hook", ["held", "renew"])
def test_a_hook_that_raises_gives_its_own_exception(engine: Engine, hook: str) -> None:
    def raises(slot: int) -> int:
        raise KeyError(f"{hook} of {slot}")

    for i in range(2):
        unit_of(engine, F32, torch.ones(10), f"layers.{i}")
    slots = Slots(1)
    slots.held_slots = {0}
    setattr(slots, hook, raises)
    engine.open_slots(slots.pairs(), slots)
    with pytest.raises(KeyError, match=f"{hook} of 0"):
        engine.acquire(0, 0)
    engine.check()


def put(engine: Engine, unit: int, grad: torch.Tensor) -> int:
    """Hands over the gradient of parameter 0."""
    return engine.offload(unit, [(0, grad.data_ptr(), SET, False)], 0)


# ---- waiting ----

def slow_engine() -> Engine:
    """Every copy out sleeps up to 0.1 s."""
    engine = Engine("cpu", delay_us=100_000, seed=1)
    for i in range(4):
        unit_of(engine, F32, torch.ones(10), f"layers.{i}")
    return engine


def test_other_threads_run_while_one_waits() -> None:
    engine, grad, stop, longest = slow_engine(), torch.ones(10), threading.Event(), [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    for i in range(4):
        put(engine, i, grad)
    thread = threading.Thread(target=tick)
    thread.start()
    begun = time.perf_counter()
    engine.drain()
    waited = time.perf_counter() - begun
    stop.set()
    thread.join()
    engine.close()
    assert waited > 0.02 and longest[0] < waited / 2, "drain holds the GIL"


def test_close_is_refused_while_another_thread_waits_inside() -> None:
    engine, grad = slow_engine(), torch.ones(10)
    for i in range(4):
        put(engine, i, grad)
    thread = threading.Thread(target=engine.drain)
    thread.start()
    time.sleep(0.01)
    try:
        with pytest.raises(MegatrainError, match="still waiting in it"):
            engine.close()
    finally:
        thread.join()
    engine.check()
    engine.close()


def test_the_hot_path_is_short(engine: Engine) -> None:
    """acquire of a unit that is there: some tenths of a microsecond; the bound allows a slow day."""
    unit_of(engine, F32, torch.ones(10))
    slots = Slots(2)
    engine.open_slots(slots.pairs(), slots)
    engine.begin()
    engine.acquire(0, 0)
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(1000):
            engine.acquire(0, 0)
        best = min(best, (time.perf_counter() - begun) / 1000)
    assert best < 5e-6


# ---- kernels on plain memory ----
