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

F32, BF16 = DTYPES["F32"], DTYPES["BF16"]
HI, GRAD, LO, M, V = (PLANES[name] for name in ("HI", "GRAD", "LO", "M", "V"))
HYPER = (1e-2, 0.9, 0.999, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight_decay
SET, ADD = 0, 1
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

    def floats(self, slot: int, n: int) -> np.ndarray:
        for memory in self.kept:
            offset = self.addresses[slot] - memory.ctypes.data
            if 0 <= offset < memory.size:
                return memory[offset : offset + 4 * n].view(np.float32)
        raise KeyError(slot)


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


def halves(engine: Engine, unit: int, plane: int, dtype: torch.dtype) -> torch.Tensor:
    """Parameter 0 of a unit in a 16-bit plane."""
    return torch.from_numpy(engine.plane(unit, 0, plane)).view(dtype)


def entry(
    *, step: int = 1, address: int = 0, dtype: int = F32, changed: bool = False, hyper: tuple = HYPER
) -> tuple:
    """What adam() wants for parameter 0."""
    return (0, *hyper, step, False, address, dtype, changed)


def definition(
    dtype: int,
    hi: torch.Tensor,
    grad: torch.Tensor,
    *,
    clip: float = 1.0,
    lo: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """hi and lo after the scalar kernel's first step from zero moments."""
    hi, lo = hi.clone(), None if lo is None else lo.clone()
    m, v = torch.zeros(hi.numel()), torch.zeros(hi.numel())
    grad_dtype = F32 if grad.dtype == torch.float32 else dtype
    planes = (hi.data_ptr(), 0 if lo is None else lo.data_ptr(), 0, m.data_ptr(), v.data_ptr())
    tensor = (dtype, hi.numel(), *planes, grad.data_ptr(), grad_dtype, *HYPER, 1, False)
    _core.adam_step([tensor], clip, 1, 0)
    return hi, lo


# ---- the module ----


def test_build_info_says_what_this_processor_runs() -> None:
    info = _core.build_info()
    assert set(info) == {"cuda", "isa", "isas", "cpus", "nodes"}
    assert info["isas"][0] == "scalar" and info["isa"] == info["isas"][-1]
    assert [_core.isa_runs(i) for i in range(3)].count(True) == len(info["isas"])
    assert info["cpus"] >= 1 and not _core.isa_runs(99)


def test_megatrain_error_is_a_runtime_error() -> None:
    assert issubclass(MegatrainError, RuntimeError)


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


def test_the_watchdog_names_the_queue_that_stalls() -> None:
    """A second before each copy, and a watchdog that waits for a tenth of it; with more patience all is well."""
    engine = Engine("cpu", delay_us=1_000_000)
    unit = unit_of(engine, F32, torch.ones(10))
    grad = torch.full((10,), 2.0)
    engine.watchdog(0.1)
    engine.offload(unit, [(0, grad.data_ptr(), SET, False)], 0)
    with pytest.raises(MegatrainError, match=r"d2h, unit layers\.0 waits for its gradients' copies \(the event LANDED\)"):
        engine.wait_grads(unit)
    engine.watchdog(60)
    engine.drain()
    engine.check()
    assert torch.equal(weights(engine, unit, GRAD), grad)
    engine.close()


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


def test_planes_of_a_unit_start_at_multiples_of_512(engine: Engine) -> None:
    unit = engine.add_unit("layers.0", [F32, BF16, F32], [100, 7, 1], [True] * 3)
    offsets = [engine.offset(unit, i) for i in range(3)]
    starts = [engine.plane(unit, i, HI).ctypes.data for i in range(3)]
    assert offsets == [0, 512, 1024] and engine.hi_bytes(unit) >= 1028
    assert [start - starts[0] for start in starts] == offsets
    assert [engine.plane(unit, i, HI).size for i in range(3)] == [400, 14, 4]


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


# ---- weights in ----


def test_acquire_brings_the_weights_and_find_knows_where(engine: Engine) -> None:
    unit_of(engine, F32, torch.arange(10.0))
    slots = Slots(2)
    engine.open_slots(slots.pairs(), slots)
    engine.begin()
    slot = engine.acquire(0, 0)
    assert slots.floats(slot, 10).tolist() == list(range(10))
    assert engine.find(slots.addresses[slot] + 40) == (slot, 0, 40)
    assert engine.find(1)[0] == -1


def test_a_write_from_outside_is_fetched_after_touch(engine: Engine) -> None:
    unit_of(engine, F32, torch.zeros(10))
    slots = Slots(2)
    engine.open_slots(slots.pairs(), slots)
    engine.begin()
    engine.acquire(0, 0)
    engine.wait_fetch(0)
    version = engine.version(0)
    weights(engine, 0).fill_(7)
    engine.touch(0)
    engine.begin()
    slot = engine.acquire(0, 0)
    assert engine.version(0) > version and slots.floats(slot, 10).tolist() == [7.0] * 10


def test_a_held_slot_is_renewed_and_not_overwritten(engine: Engine) -> None:
    for i in range(2):
        unit_of(engine, F32, torch.full((10,), float(i)), f"layers.{i}")
    slots = Slots(1)
    engine.open_slots(slots.pairs(), slots)
    engine.begin()
    engine.acquire(0, 0)
    old, seen = slots.addresses[0], slots.floats(0, 10)
    slots.held_slots = {0}
    engine.acquire(1, 0)
    assert seen.tolist() == [0.0] * 10 and slots.floats(0, 10).tolist() == [1.0] * 10
    assert engine.find(old)[0] == -1 and engine.find(slots.addresses[0])[:2] == (0, 1)


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


def test_the_schedule_is_readable_text(engine: Engine) -> None:
    unit_of(engine, F32, torch.ones(10))
    slots = Slots(2)
    engine.open_slots(slots.pairs(), slots)
    assert engine.schedule() == ""
    for _ in range(2):
        engine.begin()
        engine.acquire(0, 0)
        put(engine, 0, torch.ones(10))
    assert engine.schedule().split("\n")[:2] == [
        "fetch layers.0     -> slot 0",
        "compute layers.0   in slot 0",
    ]
    assert engine.stats()["fetches"] == 1


# ---- gradients out, updates ----


HOMES = pytest.mark.parametrize("home", ["host", "device", "through"])


def live(engine: Engine, home: str, units: int = 1) -> None:
    """The first so many units live where `home` says; "through": on the host, updated on the device."""
    if home == "device":
        slots = Slots(units + 1, 1 << 15)
        engine.open_slots(slots.pairs(), slots)
    for unit in range(units):
        if home == "device":
            engine.settle(unit, unit)
        elif home == "through":
            engine.through(unit, True)


def finish(engine: Engine, units: int = 1) -> None:
    """All that was asked for is over, and host memory shows it."""
    engine.drain()
    for unit in range(units):
        engine.bring(unit, -1)


def put(engine: Engine, unit: int, grad: torch.Tensor, mode: int = SET, reread: bool = False) -> int:
    """Hands over the gradient of parameter 0."""
    return engine.offload(unit, [(0, grad.data_ptr(), mode, reread)], 0)


@HOMES
def test_one_step_is_the_definition_bit_for_bit(engine: Engine, home: str) -> None:
    p, grad = torch.randn(5000), torch.randn(5000)
    unit_of(engine, F32, p)
    live(engine, home)
    assert put(engine, 0, grad) == 1
    assert engine.norm(engine.adam([(0, [entry()])], 0.0, 0))[1] == 0
    engine.wait_updates(0)
    assert torch.equal(weights(engine, 0), definition(F32, p, grad)[0])
    assert engine.passed() <= 1


@HOMES
def test_clipping_takes_the_norm_of_all_units(engine: Engine, home: str) -> None:
    p, grads = torch.randn(100), [torch.randn(100) * 10, torch.randn(100)]
    for i in range(2):
        unit_of(engine, F32, p, f"layers.{i}")
    live(engine, home, units=2)
    for i in range(2):
        put(engine, i, grads[i])
    norm, skipped = engine.norm(engine.adam([(i, [entry()]) for i in range(2)], 1.0, 0))
    exact = torch.cat(grads).double().norm().item()
    assert abs(norm - exact) <= 1e-12 * exact and skipped == 0  # fp64 sums in another order
    finish(engine, units=2)
    for i in range(2):
        clip = float(np.float32(1.0 / (norm + 1e-6)))
        assert torch.equal(weights(engine, i), definition(F32, p, grads[i], clip=clip)[0])


@HOMES
def test_micro_batches_of_bf16_reach_the_update_as_their_fp32_sum(engine: Engine, home: str) -> None:
    p = torch.randn(500).bfloat16()
    grads = [torch.randn(500).bfloat16() for _ in range(3)]
    engine.add_unit("layers.0", [BF16], [500], [True])
    halves(engine, 0, HI, torch.bfloat16).copy_(p)
    live(engine, home)
    for i, grad in enumerate(grads):
        put(engine, 0, grad, SET if i == 0 else ADD)
    total = (grads[0].float() + grads[1].float()) + grads[2].float()
    engine.adam([(0, [entry(dtype=BF16)])], 0.0, 0)
    engine.forget(0)  # zero_grad() right after step() must not change what step() was given
    finish(engine)
    hi, lo = definition(BF16, p, total, lo=torch.zeros(500, dtype=torch.int16))
    assert not torch.equal(total, total.bfloat16().float()), "the sum must be one that bf16 cannot hold"
    assert torch.equal(halves(engine, 0, HI, torch.bfloat16), hi)
    assert torch.equal(halves(engine, 0, LO, torch.int16), lo)


@HOMES
def test_a_changed_gradient_counts_and_is_summed_anew(engine: Engine, home: str) -> None:
    p = torch.randn(100).bfloat16()
    engine.add_unit("layers.0", [BF16], [100], [True])
    halves(engine, 0, HI, torch.bfloat16).copy_(p)
    live(engine, home)
    grads = [torch.randn(100).bfloat16() for _ in range(2)]
    for mode in (SET, ADD):
        put(engine, 0, grads[mode], mode)
    engine.wait_grads(0)
    mine = torch.randn(100).bfloat16()
    halves(engine, 0, GRAD, torch.bfloat16).copy_(mine)
    norm, _ = engine.norm(engine.adam([(0, [entry(dtype=BF16, changed=True)])], 1e9, 0))
    finish(engine)
    assert norm == pytest.approx(mine.double().norm().item(), rel=1e-12)
    hi, _ = definition(BF16, p, mine, lo=torch.zeros(100, dtype=torch.int16))
    assert torch.equal(halves(engine, 0, HI, torch.bfloat16), hi)


@HOMES
def test_a_gradient_elsewhere_counts_with_its_own_norm(engine: Engine, home: str) -> None:
    p, mine, other = torch.randn(100), torch.randn(100), torch.randn(100) * 1e3
    unit_of(engine, F32, p)
    live(engine, home)
    put(engine, 0, other)
    norm, _ = engine.norm(engine.adam([(0, [entry(address=mine.data_ptr())])], 1e9, 0))
    finish(engine)
    assert norm == pytest.approx(mine.double().norm().item(), rel=1e-12)
    assert torch.equal(weights(engine, 0), definition(F32, p, mine)[0])


@HOMES
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_touches_nothing(engine: Engine, home: str, max_norm: float) -> None:
    p, grad = torch.randn(100), torch.full((100,), float("nan"))
    unit_of(engine, F32, p)
    live(engine, home)
    put(engine, 0, grad)
    assert engine.norm(engine.adam([(0, [entry()])], max_norm, 0))[1] == 1
    finish(engine)
    assert torch.equal(weights(engine, 0), p) and not weights(engine, 0, M).any()


def test_a_refused_step_changes_nothing_and_the_next_one_runs(engine: Engine) -> None:
    p, grad = torch.randn(100), torch.randn(100)
    for i in range(2):
        unit_of(engine, F32, p, f"layers.{i}")
        put(engine, i, grad)
    good, bad = (0, [entry()]), (1, [entry(step=-1)])
    with pytest.raises(MegatrainError, match=r"unit 1 \(layers.1\), parameter 0"):
        engine.adam([good, bad], 0.0, 0)
    engine.drain()
    assert torch.equal(weights(engine, 0), p)
    engine.adam([good], 0.0, 0)
    engine.drain()
    assert not torch.equal(weights(engine, 0), p)


# ---- units that live on the device ----


def test_a_settled_unit_is_fetched_once_and_reads_bring_it_back(engine: Engine) -> None:
    p, grad = torch.randn(1000), torch.randn(1000)
    unit_of(engine, F32, p)
    live(engine, "device")
    for step in range(3):
        engine.begin()
        assert engine.acquire(0, 0) == 0
        put(engine, 0, grad)
        engine.adam([(0, [entry(step=step + 1)])], 1.0, 0)
        engine.forget(0)
    engine.drain()
    assert engine.schedule() == "" and engine.find(engine.device_plane(0, 0, HI)) == (0, 0, 0)
    stats = engine.stats()
    assert stats["fetches"] == 1 and stats["h2d_bytes"] == engine.hi_bytes(0) and stats["d2h_bytes"] == 0
    assert engine.device_bytes() >= 3 * 4000  # GRAD, M, V
    assert not weights(engine, 0).any(), "old since the first update, and given back"
    engine.wait_updates(0)
    assert not torch.equal(weights(engine, 0), p) and engine.stats()["d2h_bytes"] == 4000
    assert not weights(engine, 0, GRAD).any()
    engine.wait_grads(0)
    assert torch.equal(weights(engine, 0, GRAD), grad)


def test_what_the_user_writes_reaches_the_device(engine: Engine) -> None:
    """Weights by touch, moments by push: the next step starts from them."""
    p, grad = torch.randn(100), torch.randn(100)
    unit_of(engine, F32, torch.zeros(100))
    live(engine, "device")
    put(engine, 0, grad)
    engine.adam([(0, [entry()])], 1.0, 0)
    engine.wait_fetch(0)
    weights(engine, 0).copy_(p)
    engine.touch(0)
    weights(engine, 0, M).zero_()
    weights(engine, 0, V).zero_()
    engine.push(0, 0, 1 << M | 1 << V)
    put(engine, 0, grad)
    engine.adam([(0, [entry()])], 1e9, 0)
    engine.wait_updates(0)
    assert torch.equal(weights(engine, 0), definition(F32, p, grad)[0])


def test_a_gradient_made_in_its_plane_stays_there(engine: Engine) -> None:
    p, grad = torch.randn(100), torch.randn(100)
    unit_of(engine, F32, p)
    live(engine, "device")
    there = engine.device_plane(0, 0, GRAD)
    torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * 100).from_address(there))).copy_(grad)
    engine.offload(0, [(0, there, SET, False)], 0)
    engine.adam([(0, [entry()])], 1e9, 0)
    engine.wait_updates(0)
    assert torch.equal(weights(engine, 0), definition(F32, p, grad)[0])


def test_what_a_settled_unit_refuses(engine: Engine) -> None:
    unit_of(engine, F32, torch.randn(100))
    with pytest.raises(MegatrainError, match="open_slots"):
        engine.settle(0, 0)
    live(engine, "device")
    for call, says in [
        (lambda: engine.settle(0, 1), "not the memory that it has"),
        (lambda: engine.unsettle(0, True), "close_slots"),
        (lambda: engine.settle(7, 1), "unit 7"),
        (lambda: engine.through(0, True), "lives on the device"),
        (lambda: engine.bring(0, 1 << len(PLANES)), f"planes {1 << len(PLANES)}"),
        (lambda: engine.push(0, 1, -1), "parameter 1"),
        (lambda: engine.device_plane(0, 0, LO), "LO"),
    ]:
        with pytest.raises(MegatrainError, match=says):
            call()


def test_units_go_through_the_device_and_no_more(engine: Engine) -> None:
    """Planes that are there already too; bytes are counted both ways, and the traced lane has a name."""
    p, grad = torch.randn(1000), torch.randn(1000)
    unit_of(engine, F32, p)
    weights(engine, 0, M).zero_()
    engine.trace(True)
    for on in (True, False):
        weights(engine, 0).copy_(p)
        for plane in (M, V):
            weights(engine, 0, plane).zero_()
        engine.through(0, on)
        before = engine.stats()
        put(engine, 0, grad)
        engine.adam([(0, [entry()])], 1e9, 0)
        engine.drain()
        assert torch.equal(weights(engine, 0), definition(F32, p, grad)[0])
        moved = {k: engine.stats()[k] - before[k] for k in ("h2d_bytes", "d2h_bytes")}
        assert moved == {"h2d_bytes": 16000 * on, "d2h_bytes": 4000 + 12000 * on}
        assert engine.device_bytes() > 0
    lanes = {record[0] for record in engine.timeline()}
    assert {_core.LANES["through"], _core.LANES["host update"]} <= lanes


def test_device_memory_goes_when_the_engine_closes_and_views_stay(engine: Engine) -> None:
    unit_of(engine, F32, torch.ones(100))
    live(engine, "device")
    grad = torch.ones(100)
    put(engine, 0, grad)
    engine.wait_grads(0)
    kept = weights(engine, 0, GRAD)
    engine.close()
    assert torch.equal(kept, torch.ones(100))


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


def test_split_and_join_give_the_bits_back() -> None:
    p = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    hi, lo = torch.empty(10_000, dtype=torch.bfloat16), torch.empty(10_000, dtype=torch.int16)
    back = torch.empty(10_000)
    _core.split_set(p.data_ptr(), hi.data_ptr(), lo.data_ptr(), 10_000)
    _core.split_join(hi.data_ptr(), lo.data_ptr(), back.data_ptr(), 10_000)
    assert torch.equal(back.view(torch.int32), p.view(torch.int32))


@pytest.mark.parametrize("threads", [1, 2])
def test_sumsq_does_not_depend_on_threads(threads: int) -> None:
    x = torch.randn(600_000)
    total = _core.sumsq(F32, x.data_ptr(), x.numel(), threads)
    assert total == _core.sumsq(F32, x.data_ptr(), x.numel())
    assert total == pytest.approx(x.double().square().sum().item(), rel=1e-12)
