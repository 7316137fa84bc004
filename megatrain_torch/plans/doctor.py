"""Measures what this machine can do: the rates that plans are made with.

`megatrain doctor` runs it: about a minute with a GPU. Each rate is a median over repetitions that take a stated time,
on random data, after a warm-up: cards slow down under load, and that is what a step meets.

What GPUs of one machine have together and between each other is measured by a process for each, which runs this file
as a program under torchrun. They talk by NCCL or, on the CPU device, by gloo; each begins when all are ready, and the
slowest counts: a step waits for it.
"""
from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from .. import _core, ops
from ..base.errors import MegatrainError
from ..base.limits import cpus, device_taken, host_limits, resident_bytes
from ..base.modes import FORMATS, LEAST_CAPABILITY, LOW_BYTES, moved_bytes
from ..figures.report import as_text
from ..fused.templates.attention import Attention
from ..group.ranks import Ranks
from ..store.disk import Disk
from .machine import Machine, describe, store_path
from .tally import ADDED_BYTES, MORE_BYTES, host_rate

MIB = 2**20
ISAS = _core.build_info()["isas"]           # by number, as adam_step takes them: each needs those before it
ISA = ISAS.index(_core.build_info()["isa"])
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Sizes(NamedTuple):
    """Shapes to measure: those of layers, or a toy's where there is no GPU."""

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    coded: tuple[int, int]                  # tokens and width of products of codes
    sequences: tuple[int, ...]
    attention_tokens: int
    heads: tuple[int, int, int]             # query heads, key heads, their size
    stream_bytes: int
    copy_bytes: int                         # PCIe reaches its rate from 16 MiB on
    parameters: int
    least_s: float                          # of repetitions of one thing
    disk_bytes: int


CUDA = Sizes((512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), (1024, 3584, 8192, 12288), (16384, 8192),
             (1024, 4096, 16384, 65536), 16384, (28, 4, 128), 512 * MIB, 256 * MIB, 100_000_000, 0.2, 16 << 30)
CPU = Sizes((64, 256), (128, 512), (64, 128), (64, 256), 256, (4, 2, 32), 4 * MIB, 4 * MIB, 1_000_000, 0.02, 16 * MIB)
# A training script's own: transformers, its data, what the driver keeps for registered memory. Six runs on an H200
# had 1.4 GB resident beyond the store, where the doctor alone has 0.6.
TRAINING_BYTES = 750 << 20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(fn: Callable[[], Any], least_s: float) -> float:
    """Median seconds of a call, over rounds of calls that take least_s together; a round ends when CUDA is done."""
    timer = Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=least_s).median


# ---- arithmetic ----------------------------------------------------------------------------------

def product_tflops(tokens: int, fan_in: int, fan_out: int, device: torch.device, least_s: float) -> float:
    """TFLOP/s of y = xW', dx = dyW, dW = dy'x, one after the other; x: [tokens, fan_in]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, fan_in, device=device, dtype=dtype)
    dy = torch.randn(tokens, fan_out, device=device, dtype=dtype)
    w = torch.randn(fan_out, fan_in, device=device, dtype=dtype) * 0.02

    def products() -> None:
        x @ w.t()
        dy @ w
        dy.t() @ x

    return 6.0 * tokens * fan_in * fan_out / timed(products, least_s) / 1e12


def fp8_gain(tokens: int, width: int, device: torch.device, least_s: float) -> float:
    """How many times as fast products of codes are; 0: the device has none. Forward's sums are the fast ones."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return 0.0
    fan_in, fan_out = width // 2, 2 * width
    x, w = (ops.fp8_cast(torch.randn(n, fan_in, device=device).bfloat16()) for n in (tokens, fan_out))
    dy, wt = (ops.fp8_cast(torch.randn(n, fan_out, device=device).bfloat16()) for n in (tokens, fan_in))
    dyt, xt = (ops.fp8_cast(torch.randn(n, tokens, device=device).bfloat16()) for n in (fan_out, fan_in))
    y, dx, dw = (torch.empty(len(a.scale), len(b.scale), dtype=torch.bfloat16, device=device)
                 for a, b in ((x, w), (dy, wt), (dyt, xt)))

    def products() -> None:
        ops.fp8_gemm_(y, x, w, fast=True)
        ops.fp8_gemm_(dx, dy, wt)
        ops.fp8_gemm_(dw, dyt, xt)

    try:
        coded = 6.0 * tokens * fan_in * fan_out / timed(products, least_s) / 1e12
    except RuntimeError:                     # this cublasLt has no such product for this device
        return 0.0
    return coded / product_tflops(tokens, fan_in, fan_out, device, least_s)


def _attention_at(seq: int, sizes: Sizes, device: torch.device) -> tuple[int, float, float]:
    """(seq, forward, backward TFLOP/s) of templates' attention, not counting a forward that runs again."""
    hq, hk, d = sizes.heads
    batch = max(1, sizes.attention_tokens // seq)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, dout = (torch.randn(batch, seq, h, d, device=device, dtype=dtype) for h in (hq, hk, hk, hq))
    attention = Attention(d ** -0.5, True)
    out, kept = attention.forward(q, k, v)
    forward = timed(lambda: attention.forward(q, k, v), sizes.least_s)
    backward = timed(lambda: attention.backward(dout, q, k, v, out, kept), sizes.least_s)
    backward = max(backward - (forward if kept is None else 0.0), forward / 10)
    flops = 2.0 * seq * hq * d * batch * seq
    return seq, flops / forward / 1e12, 2.5 * flops / backward / 1e12


def _stream_gbps(sizes: Sizes, device: torch.device) -> float:
    """GB/s of an elementwise kernel, read plus written."""
    a = torch.randn(sizes.stream_bytes // 4, device=device)
    b = torch.empty_like(a)
    return 2 * sizes.stream_bytes / timed(lambda: torch.mul(a, 0.5, out=b), sizes.least_s) / 1e9


# ---- copies and AdamW ----------------------------------------------------------------------------

class Copies:
    """Pinned host memory and device memory of the same size, and copies between them."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        pin = device.type == "cuda"
        self.host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin).random_() for _ in range(2)]
        self.dev = [torch.empty(nbytes, dtype=torch.uint8, device=device).random_() for _ in range(2)]
        self.side = torch.cuda.Stream(device) if pin else None

    def up(self) -> None:
        self.dev[0].copy_(self.host[0], non_blocking=True)

    def down(self) -> None:
        self.host[1].copy_(self.dev[1], non_blocking=True)

    def both(self) -> None:
        if self.side is None:
            self.up()
            self.down()
            return
        here = torch.cuda.current_stream(self.device)
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            self.down()
        self.up()
        here.wait_stream(self.side)

    def gbps(self, copy: Callable[[], None], least_s: float) -> float:
        return self.nbytes / timed(copy, least_s) / 1e9


def copy_rates(device: torch.device, nbytes: int, least_s: float) -> dict[str, float]:
    """GB/s host to device, device to host, and each way while both run; pinned host memory."""
    c = Copies(device, nbytes)
    found = {f"{way}_gbps": c.gbps(copy, least_s) for way, copy in (("h2d", c.up), ("d2h", c.down), ("both", c.both))}
    del c
    if device.type == "cuda":                # torch keeps pinned memory for the next one who wants as much
        torch.cuda.synchronize(device)
        torch._C._host_emptyCache()
    return found


class Planes:
    """One tensor's planes in a store's arenas, with their huge pages."""

    def __init__(self, n: int, weight: str, grad: str, states: str = "fp32", shared: bool = False) -> None:
        """shared: in memory as several processes have it together."""
        self.n, self.types, self.states = n, (_core.DTYPES[weight], _core.DTYPES[grad]), _core.STATES[states]
        fd = _core.share() if shared else -1
        engine = _core.Engine("cpu", threads=cpus(), share=fd)
        if shared:
            os.close(fd)
        engine.add_unit("doctor", [self.types[0]], [n], [True])
        engine.set_states(0, self.states)
        there = {"HI": True, "LO": weight == "BF16" and LOW_BYTES[states] > 0, "MASTER": weight == "F16", "M": True,
                 "V": True, "GRAD" if grad == weight else "ACC": True, "SCALE": states != "fp32"}
        self.planes = [torch.from_numpy(engine.plane(0, 0, _core.PLANES[name])) if on else None
                       for name, on in there.items()]        # in the order of adam_step's addresses
        hi, _, master, _, _, gradient, _ = self.planes
        hi.view(TORCH[weight]).uniform_(-0.05, 0.05)
        gradient.view(TORCH[grad]).uniform_(-1e-3, 1e-3)
        if master is not None:
            master.view(torch.float32).copy_(hi.view(TORCH[weight]))

    def update(self, threads: int) -> None:
        """AdamW on the host, by its best instruction set."""
        _core.adam_step(self.tensors(1), 1.0, threads, ISA)

    def tensors(self, step: int) -> list[tuple]:
        """The tuple that `_core.adam_step` takes."""
        *addresses, scale = (0 if p is None else p.data_ptr() for p in self.planes)
        weight, grad = self.types
        return [(weight, self.n, *addresses, grad, 1e-5, 0.9, 0.999, 1e-8, 0.1, step, 0, self.states, scale, 0)]


def _beside(sizes: Sizes, device: torch.device, threads: int) -> tuple[float, float]:
    """GB/s each way while AdamW runs on the host, and its 10**9 parameters/s meanwhile."""
    copies, planes, stop = Copies(device, sizes.copy_bytes), Planes(sizes.parameters, "BF16", "BF16"), threading.Event()
    ends = [time.perf_counter()]

    def updates() -> None:
        while not stop.is_set():
            planes.update(threads)
            ends.append(time.perf_counter())

    worker = threading.Thread(target=updates)
    worker.start()
    try:
        gbps = copies.gbps(copies.both, 2 * sizes.least_s)
    finally:
        stop.set()
        worker.join()
    return gbps, planes.n / statistics.median(b - a for a, b in itertools.pairwise(ends)) / 1e9


def _device_adam(sizes: Sizes, device: torch.device) -> float:
    """G parameters/s of AdamW on the device."""
    n = sizes.parameters
    hi, grad = (torch.randn(n, device=device).bfloat16() for _ in range(2))
    lo = torch.zeros(n, dtype=torch.int16, device=device)
    m, v = (torch.zeros(n, device=device) for _ in range(2))
    return n / 1e9 / timed(lambda: torch.ops.megatrain.adamw_(hi, lo, m, v, grad, 1e-5, 0.9, 0.999, 1e-8, 0.1, 1, 1.0),
                           sizes.least_s)


# ---- the whole -----------------------------------------------------------------------------------

def measure(device: torch.device, say: Callable[[str], None] = lambda _: None, disk: str | None = None) -> Machine:
    """This machine. Of the CPU device with toy sizes, in a second or two. say: is told what is measured next. disk: a
    directory on the drive that states may go to; None: a drive is described, not measured."""
    cuda = device.type == "cuda"
    sizes, here, host = CUDA if cuda else CPU, cpus(), host_limits().in_all
    if cuda:
        synchronize(device)
        torch.cuda.empty_cache()
    say("matrix products")
    rates: dict[str, Any] = {"gemm": tuple((n, w, product_tflops(n, w // 2, 2 * w, device, sizes.least_s))
                                           for w in sizes.widths for n in sizes.tokens),
                             "fp8_gain": fp8_gain(*sizes.coded, device, sizes.least_s)}
    say("attention, elementwise kernels, launches")
    small = torch.zeros(16, device=device)
    rates |= {"attention": tuple(_attention_at(seq, sizes, device) for seq in sizes.sequences),
              "hbm_gbps": _stream_gbps(sizes, device),
              "launch_us": timed(lambda: torch.add(small, small, out=small), sizes.least_s) * 1e6}    # of the host
    # By now the libraries of products and attention are loaded.
    rss = resident_bytes() + (TRAINING_BYTES if cuda else 0)
    say("copies")
    rates |= copy_rates(device, sizes.copy_bytes, sizes.least_s)
    say("AdamW")
    counts = sorted({1, max(1, here // 2), max(1, here - 1)})

    def gparams(states: str, counts: list[int]) -> list[float]:
        planes = Planes(sizes.parameters, "BF16", "BF16", states)
        return [planes.n / 1e9 / timed(lambda n=n: planes.update(n), sizes.least_s) for n in counts]

    adam = tuple(zip(counts, gparams("fp32", counts)))
    adam8 = tuple((states, *gparams(states, counts[-1:])) for states in FORMATS[1:])
    busy, beside = _beside(sizes, device, counts[-1])
    rates |= {"adam_gparams": adam, "adam8_gparams": adam8, "busy_gbps": min(busy, rates["both_gbps"]),
              "beside_gparams": min(beside, adam[-1][1]),
              "add_gparams": adam[-1][1] * moved_bytes("fp32") / ADDED_BYTES,
              "device_adam_gparams": _device_adam(sizes, device)}
    vram, taken, one = host, 0, True                     # of the CPU device: the host's memory
    if cuda:
        free, vram = torch.cuda.mem_get_info(device)
        taken = device_taken(vram - free - torch.cuda.memory_reserved(device))[0]
        one = bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", 0))
    if disk is not None:
        say("disk")
        nbytes = min(sizes.disk_bytes, Disk(disk).room() // 4)
        found = _core.disk_measure(disk, nbytes, each=min(32 << 20, nbytes // 16 // 4096 * 4096))
        rates |= {f"disk_{way}_gbps": found[way] / 1e9 for way in ("read", "write", "both")}
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "megatrain_torch": _core.__version__}
    return Machine(torch.cuda.get_device_name(device) if cuda else "cpu", device.type, vram // 2 if one else vram,
                   taken, host // 2 if one else host, rss, **rates, source="measured by megatrain doctor",
                   one_memory=one, versions=versions)


def report(machine: Machine) -> str:
    """Tables of rates, of products, and of memory and files this process may have."""
    widths, counts = sorted({w for _, w, _ in machine.gemm}), sorted({n for n, _, _ in machine.gemm})
    rates = {(n, w): f"{rate:.4g}" for n, w, rate in machine.gemm}
    products = [("TFLOP/s, tokens x width", *(f"{w:8}" for w in widths)),
                *((str(n), *(rates[n, w] for w in widths)) for n in counts)]
    return "\n\n".join([f"{machine.name}\n{as_text(('', describe(machine)), right=())}",
                        as_text(("", products), right=range(len(widths) + 1)),
                        as_text(("", [("this process", ""), *host_limits().rows()]), right=())])


def store(machine: Machine, path: Path | None = None) -> Path:
    """Writes the machine where plans look for it, or to `path`; whole or not at all. Returns where."""
    path = path or store_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(machine.to_json() + "\n")
    beside.replace(path)
    return path


# ---- several GPUs --------------------------------------------------------------------------------

LIMIT_S = 180               # in which all of it is over, or the processes are ended
MOST_GBPS = 1e4             # of what could not be seen to hold anything up
LAST_WORDS = 400            # characters of the error by which a process failed


# Bytes of a copy, and of a unit's gradients; tokens, width and number of products beside; rounds of each; parameters of
# an update.
TOGETHER = {"cuda": (448 << 20, 16384, 8192, 12, 20, 100_000_000), "cpu": (1 << 20, 128, 256, 4, 3, 100_000)}


def measure_links(device: str, gpus: int) -> dict[str, float]:
    """Rates of several GPUs, or processes on the CPU, as Machine names them; refuses where one fails or hangs."""
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // gpus))}       # torchrun's own would be one
    with tempfile.TemporaryDirectory(prefix="megatrain-links-") as folder:
        rates = Path(folder, "rates.json")
        with subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m",
                 __name__, device, str(rates)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=os.environ | threads | ({"GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else {})) as run:
            try:
                said, _ = run.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                raise MegatrainError(f"links between GPUs: not measured within {LIMIT_S} s; --gpus 1 leaves them "
                                     "out") from None
            finally:
                run.terminate()              # torchrun ends its processes
        if run.returncode:
            error = re.search(r"^(\[rank\d+\]: )?\S*(Error|Exception)\b.*", said, re.MULTILINE)
            raise MegatrainError(f"links between GPUs: one of {gpus} processes failed; --gpus 1 leaves them out. It "
                                 f"said: {(error[0] if error else said)[:LAST_WORDS]}")
        return json.loads(rates.read_text())


def linked(machine: Machine, rates: dict[str, float]) -> Machine:
    """The machine with what measure_links() found. Its host's memory reaches what was seen, at least."""
    rates = rates | {"host_gbps": max(rates["host_gbps"], host_rate(machine) / 1e9)}
    found = {k: int(rate) if k.endswith("_bytes") else float(f"{rate:.4g}") for k, rate in rates.items()}
    return dataclasses.replace(machine, **found)


def _communicators(device: torch.device, gpus: int, together: Callable[[], None]) -> int:
    """Bytes of the device that the first collectives take, less what plans add for more than two GPUs."""
    if device.type != "cuda":
        together()
        return 0
    before = torch.cuda.mem_get_info(device)[0]
    together()
    x = torch.zeros(gpus * Ranks.first_bytes, dtype=torch.uint8, device=device)
    dist.all_to_all_single(torch.empty_like(x), x)
    del x
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return max(before - torch.cuda.mem_get_info(device)[0] - MORE_BYTES * (gpus > 2), 0)


def main(device_type: str, rates: Path) -> None:
    """One of the processes; the first writes what was found."""
    cuda, (nbytes, tokens, width, count, rounds, parameters) = device_type == "cuda", TOGETHER[device_type]
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=LIMIT_S))
    rank, gpus = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type, rank) if cuda else torch.device(device_type)
    if cuda:
        torch.cuda.set_device(device)

    def together() -> None:
        synchronize(device)
        dist.all_reduce(torch.zeros(1, device=device))
        synchronize(device)

    def seconds(fn: Callable[[], Any]) -> float:
        """Seconds of a call, the mean of several, in the slowest process while all make them."""
        fn()
        together()
        began = time.perf_counter()
        for _ in range(rounds):
            fn()
        synchronize(device)
        took = torch.tensor([(time.perf_counter() - began) / rounds], device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    nccl = _communicators(device, gpus, together)
    copies, leaving = Copies(device, nbytes), nbytes * (gpus - 1) / gpus
    whole, both = (nbytes / seconds(fn) / 1e9 for fn in (copies.up, copies.both))
    del copies
    sent, got = (torch.zeros(nbytes // 4 // gpus * gpus, device=device) for _ in range(2))
    exchange = seconds(lambda: dist.all_to_all_single(got, sent))
    dtype = torch.bfloat16 if cuda else torch.float32
    x, w = (torch.randn(rows, width, device=device, dtype=dtype) for rows in (tokens, width))

    def products() -> None:
        for _ in range(count):
            x @ w

    def beside() -> None:
        going = dist.all_to_all_single(got, sent, async_op=True)
        products()
        going.wait()

    # By how much products take longer beside an exchange, in turn: a card that grows warm slows down.
    lost = statistics.median(seconds(beside) - seconds(products) for _ in range(3))
    planes, threads = Planes(parameters, "BF16", "BF16", shared=True), max(1, cpus() // gpus)
    update = seconds(lambda: planes.update(threads))
    if rank == 0:
        rates.write_text(json.dumps({
            "communicator_bytes": nccl, "shared_gparams": gpus * parameters / update / 1e9, "whole_gbps": whole,
            "host_gbps": 2 * both * gpus, "exchange_gbps": leaving / exchange / 1e9,
            "lost_gbps": min(leaving / max(lost, 1e-12) / 1e9, MOST_GBPS)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
