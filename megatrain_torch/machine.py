"""What a machine can do: rates and memory, measured, stored or described.

`megatrain doctor` measures this machine and stores what it found; the planner reads it. For a machine that
is not at hand there are descriptions by name, and "h200-128g,vram=24GiB" is one with a limit changed.

Units: GB is 10**9 bytes, TFLOP/s 10**12 operations (a product and a sum are two), memory is in bytes.
"""
from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MegatrainError
from .formats import moved_bytes, through_up
from .limits import host_limits, parse_bytes, show_bytes

GIB = 2**30
WEIGHT = 2                  # bytes of a bf16 weight, as it is fetched
CODES_A_THREAD = 0.75       # 10**9 parameters/s with moments of 8 bits, where arithmetic binds: a Zen 5 core has 1.0
# Where a drive was not measured: this one at PCIe 4, by its data sheet (6.5 GB/s read, 3.5 written, one drive write a
# day for five years); reads and writes together as if in turn.
DRIVE_NAME, DRIVE = "Samsung PM9A3 of 1.92 TB", (6.5, 3.5, 4.5, 3504.0)


@dataclass(frozen=True)
class Machine:
    """One GPU (or the CPU device) and its host.

    Attributes:
        name, source: what it is; where the figures come from.
        device: "cuda" or "cpu".
        vram_bytes: memory of the device. vram_overhead_bytes: of it, what the driver and libraries take.
        host_bytes: memory this process may use (cgroup limits counted in). host_overhead_bytes: of it, what
            Python, torch and the driver take.
        gemm: (tokens, width, TFLOP/s): products [tokens, a] x [a, b] with sqrt(a*b) = width, forward and
            both backward ones together; a full grid, widths and tokens ascending.
        attention: (sequence, forward, backward TFLOP/s) of causal attention; a causal triangle's
            operations are counted, not a square's.
        hbm_gbps: read plus written by elementwise kernels.
        h2d_gbps, d2h_gbps: copies alone; both_gbps: each way while both run; busy_gbps: each way while
            AdamW runs on the host.
        adam_gparams: (threads, 10**9 parameters/s) of AdamW on the host, bf16 weights and fp32 states.
        adam8_gparams: (states, 10**9 parameters/s) with moments of 8 bits, as many threads as adam_gparams ends with;
            what is missing is taken to be in proportion to the bytes that move, see adam_rate.
        add_gparams: 10**9 gradients/s added up on the host for micro-batches.
        device_adam_gparams: AdamW on the device.
        launch_us: host time of one small torch operation.
        disk_read_gbps, disk_write_gbps: of a drive alone, past the page cache; disk_both_gbps: read plus written while
            both run. disk_tbw: 10**12 bytes that the drive is rated to have written to it; 0: not known.
        versions: of torch, CUDA and this package, where measured.
    """

    name: str
    device: str
    vram_bytes: int
    vram_overhead_bytes: int
    host_bytes: int
    host_overhead_bytes: int
    gemm: tuple[tuple[int, int, float], ...]
    attention: tuple[tuple[int, float, float], ...]
    hbm_gbps: float
    h2d_gbps: float
    d2h_gbps: float
    both_gbps: float
    busy_gbps: float
    adam_gparams: tuple[tuple[int, float], ...]
    add_gparams: float
    device_adam_gparams: float
    launch_us: float
    disk_read_gbps: float = DRIVE[0]
    disk_write_gbps: float = DRIVE[1]
    disk_both_gbps: float = DRIVE[2]
    disk_tbw: float = DRIVE[3]
    adam8_gparams: tuple[tuple[str, float], ...] = ()
    source: str = "described"
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def gemm_flops(self, tokens: float, width: float) -> float:
        """FLOP/s of a product, between the measured points in the logarithms of tokens and width."""
        return _between(_grid(self.gemm), tokens, width) * 1e12

    def attention_flops(self, seq: float, backward: bool) -> float:
        """FLOP/s of causal attention over sequences of this length."""
        points = [(float(s), b if backward else f) for s, f, b in self.attention]
        return _along(points, seq) * 1e12

    def adam_rate(self, threads: int | None = None, states: str = "fp32") -> float:
        """Parameters/s of AdamW on the host; None: with all threads measured. states: see formats.py."""
        points = [(float(n), rate) for n, rate in self.adam_gparams]
        rate = _along(points, threads or points[-1][0])
        if states == "fp32":
            return rate * 1e9
        by_bytes = points[-1][1] * moved_bytes("fp32") / moved_bytes(states)
        found = dict(self.adam8_gparams).get(states, min(by_bytes, points[-1][0] * CODES_A_THREAD))
        return found * rate / points[-1][1] * 1e9

    def through_rate(self, states: str = "fp32", alone: bool = False) -> float:
        """Parameters/s of updates that pass through the device, alone or beside AdamW on the host; 0: nothing is left.

        Of the bus each way, and of the host's memory, what AdamW leaves, and fetches of what both have updated. The
        memory is taken to give what AdamW, or copies both ways, take alone: more may be there, and is not known.
        """
        moved, host = moved_bytes(states), 0.0 if alone else self.adam_rate(states=states)
        bus = (self.both_gbps if alone else min(self.both_gbps, self.busy_gbps)) * 1e9
        memory = max(self.adam_gparams[-1][1] * moved_bytes("fp32"), 2 * self.both_gbps) * 1e9
        return max(0.0, min((bus - WEIGHT * host) / (through_up(states) + WEIGHT),
                            (memory - (moved + WEIGHT) * host) / (moved + WEIGHT)))

    def with_limits(self, vram: int | None, host: int | None) -> Machine:
        """The same machine with less memory; a limit above what it has changes nothing."""
        return dataclasses.replace(self, vram_bytes=min(self.vram_bytes, vram or self.vram_bytes),
                                   host_bytes=min(self.host_bytes, host or self.host_bytes))

    # ---- as text ----

    def to_json(self) -> str:
        """As from_json takes it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Machine:
        """The machine that a text of to_json describes.

        Raises:
            MegatrainError: not a machine's description; the message names the field.
        """
        try:
            return _from_dict(json.loads(text))
        except (TypeError, ValueError) as why:
            raise MegatrainError(f"not a machine's description: {why}; `megatrain doctor` writes one") from None

    @staticmethod
    def parse(text: str) -> Machine:
        """A name, or the path of a JSON file, and changes: "h200-128g,vram=24GiB,host=64GiB,h2d_gbps=25".

        Raises:
            MegatrainError: no such name, file or field; the message lists the names.
        """
        first, *changes = [part.strip() for part in text.split(",")]
        if first in MACHINES:
            machine = MACHINES[first]
        elif Path(first).is_file():
            machine = _of_file(Path(first))
        else:
            raise MegatrainError(f"machine {first!r}: no such description and no such file; "
                                 f"known: {', '.join(MACHINES)}")
        changed = dict(_change(c) for c in changes)
        return dataclasses.replace(machine, name=text.strip(), **changed) if changed else machine


_SIZES = {"vram": "vram_bytes", "host": "host_bytes"}
_SCALARS = {f.name for f in dataclasses.fields(Machine) if f.type == "float"}


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if key in _SIZES and equals:
        return _SIZES[key], parse_bytes(value, key)
    if key in _SCALARS and equals:
        try:
            rate = float(value)
        except ValueError:
            rate = 0.0
        if rate > 0:
            return key, rate
    raise MegatrainError(f"machine: {text!r}: give vram=SIZE, host=SIZE, or a rate: {', '.join(sorted(_SCALARS))}")


def _of_file(path: Path) -> Machine:
    try:
        return Machine.from_json(path.read_text())
    except MegatrainError as why:
        raise MegatrainError(f"{path}: {why}") from None


def _from_dict(fields: dict[str, Any]) -> Machine:
    names = ("gemm", "attention", "adam_gparams", "adam8_gparams")
    tables = {k: tuple(tuple(row) for row in fields[k]) for k in names if k in fields}
    machine = Machine(**{**fields, **tables})
    points = [(n, w) for n, w, _ in machine.gemm]
    if sorted(set(points)) != sorted((n, w) for n in {n for n, _ in points} for w in {w for _, w in points}):
        raise ValueError("gemm is no full grid of tokens and widths")
    return machine


# ---- between measured points ---------------------------------------------------------------------

@functools.lru_cache(8)
def _grid(points: tuple[tuple[int, int, float], ...]) -> list[tuple[float, list[tuple[float, float]]]]:
    """[(width, [(tokens, rate)])], both ascending."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for tokens, width, rate in sorted(points):
        rows.setdefault(width, []).append((float(tokens), rate))
    return sorted((float(w), row) for w, row in rows.items())


def _between(grid: list[tuple[float, list[tuple[float, float]]]], tokens: float, width: float) -> float:
    return _along([(w, _along(row, tokens)) for w, row in grid], width)


def _along(points: list[tuple[float, float]], x: float) -> float:
    """Linear in log2(x); below the first point as at it times x over it, above the last as at it."""
    if x <= points[0][0]:
        return points[0][1] * max(x, 1e-9) / points[0][0]
    if x >= points[-1][0]:
        return points[-1][1]
    i = bisect.bisect_right(points, (x, math.inf))
    (a, ya), (b, yb) = points[i - 1], points[i]
    return ya + (yb - ya) * (math.log2(x / a) / math.log2(b / a))


# ---- which machine -------------------------------------------------------------------------------

def store_path() -> Path:
    """Where `megatrain doctor` writes and plans look: $MEGATRAIN_MACHINE, or a file in ~/.cache."""
    named = os.environ.get("MEGATRAIN_MACHINE")
    return Path(named) if named else Path.home() / ".cache" / "megatrain" / "machine.json"


def resolve(machine: Machine | str | None) -> Machine:
    """A Machine as it is; text parsed; None: the stored one, else the description nearest to this machine.

    Raises:
        MegatrainError: see Machine.parse; a stored file that cannot be read.
    """
    if isinstance(machine, Machine):
        return machine
    if machine is not None:
        return Machine.parse(machine)
    if store_path().is_file():
        return _of_file(store_path())
    return _nearest()


def _nearest() -> Machine:
    """The description of the GPU torch sees, with this machine's memory; without one "cpu", of whose
    memory the "device" gets half."""
    import torch

    host = host_limit_bytes()
    if not torch.cuda.is_available():
        return dataclasses.replace(MACHINES["cpu"], host_bytes=host // 2, vram_bytes=host // 2)
    gpu = torch.cuda.get_device_name().lower()
    name = next((m for key, m in _BY_GPU if key in gpu), "h100-80g")
    return dataclasses.replace(MACHINES[name], name=f"{torch.cuda.get_device_name()}, rates of {name}", host_bytes=host,
                               vram_bytes=torch.cuda.get_device_properties(0).total_memory)


_BY_GPU = (("gh200", "gh200-480g"), ("h200", "h200-128g"), ("h100", "h100-80g"), ("b200", "b200-2t"),
           ("a100", "a100-80g"), ("5090", "rtx5090"), ("4090", "rtx4090-64g"), ("3090", "rtx3090-64g"))


def host_limit_bytes() -> int:
    """Memory this process may use: the machine's, or less where a limit says so (limits.py)."""
    return host_limits().in_all


def host_now(machine: Machine) -> int:
    """Of a machine's host memory what others leave now, where it is this one."""
    import torch

    cuda = torch.cuda.is_available()
    here = machine.device == ("cuda" if cuda else "cpu") and (not cuda or torch.cuda.get_device_name() in machine.name)
    return min(machine.host_bytes, host_limits().within) if here else machine.host_bytes


# ---- descriptions --------------------------------------------------------------------------------

def _scaled(table: tuple[tuple[int, int, float], ...], by: float, top: float) -> tuple[tuple[int, int, float], ...]:
    return tuple((n, w, round(min(rate * by, top), 1)) for n, w, rate in table)


def _attention(table: tuple[tuple[int, float, float], ...], by: float) -> tuple[tuple[int, float, float], ...]:
    return tuple((s, round(f * by, 1), round(b * by, 1)) for s, f, b in table)


# Rates of a layer's products on an H200, sustained, in whole steps' own runs (benchmarks/results): width of
# 7B, 8k tokens 734, 16k 705, 32k 706, 64k 658 (the card slows down under its power limit). Single products
# of that width: 819 to 837 cold; of 14B's 740 to 758, of 32B's 700. Widths of 1024 and tokens below 8192 are
# estimates; `megatrain doctor` measures them.
_H200_GEMM = tuple((n, w, rate) for w, row in {
    1024: (190, 300, 400, 480, 530, 550, 560, 560),
    3584: (300, 480, 600, 690, 730, 710, 705, 655),
    8192: (360, 560, 670, 720, 740, 710, 710, 662),
    12288: (370, 570, 670, 690, 700, 675, 670, 650),
}.items() for n, rate in zip((512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), row))

# cuDNN attention through torch, causal, heads of 128. Measured: S=4096, 40 heads, 616 / 500; 28/4 heads, sustained
# (at the power limit; 683 / 574 cold), S=32k 583 / 522; from 128k, forward some queries at a time (templates/rows.py),
# full blocks of 32k: 592 to 600 / 535. Below 4096: estimates.
_H200_ATTENTION = ((512, 180.0, 140.0), (1024, 300.0, 240.0), (2048, 450.0, 380.0), (4096, 616.0, 500.0),
                   (32768, 583.0, 522.0), (131072, 585.0, 535.0), (524288, 588.0, 535.0))

_H200 = Machine(
    name="h200-128g", device="cuda",
    vram_bytes=int(139.8 * GIB),        # what the driver gives of 141 GB
    vram_overhead_bytes=int(0.87 * GIB),  # measured: used on the device beyond what torch reserved, 0.85 to 0.86
    host_bytes=int(125 * GIB),          # a virtual machine of 128 GiB shows 126
    host_overhead_bytes=2 * GIB,        # resident beyond the store: 0.9 GB, and what torch had before
    gemm=_H200_GEMM, attention=_H200_ATTENTION,
    hbm_gbps=3900.0,                    # 4.8 TB/s by the data sheet; copies reach 4.0 to 4.3
    h2d_gbps=55.5, d2h_gbps=55.4, both_gbps=50.75,      # measured, PCIe 5 x16, pinned
    busy_gbps=38.0,                     # measured both ways: 40.6 beside 8 threads on memory, 37 beside 16
    adam_gparams=((1, 0.70), (8, 5.2), (16, 7.05)),     # measured at 1 and 16 threads
    add_gparams=11.0,                   # 16 bytes a gradient at the 183 GB/s that AdamW reaches there
    device_adam_gparams=140.0,          # 28 bytes a parameter at hbm_gbps
    launch_us=6.0,                      # eager layers: 500 to 630 us for some 90 operations, measured
    source="measured in part, see machine.py")

MACHINES: dict[str, Machine] = {m.name: m for m in (
    _H200,
    # The same GPU in a host of two sockets: 64 vCPUs measured 224 GB/s of memory, 8.0 G parameters/s.
    dataclasses.replace(_H200, name="h200-1.5t", host_bytes=1500 * GIB, adam_gparams=((1, 0.70), (64, 8.0)),
                        source="described"),
    # H100 SXM: the H200's cores with 3.35 TB/s (data sheet) of 80 GB; the host is taken to have 256 GiB.
    dataclasses.replace(_H200, name="h100-80g", vram_bytes=int(79.1 * GIB), host_bytes=250 * GIB,
                        hbm_gbps=2750.0, device_adam_gparams=98.0, source="described",
                        gemm=_scaled(_H200_GEMM, 0.96, 720.0)),
    # Schieffer et al. 2024 (arXiv 2407.07850) measured 375 up, 297 down over NVLink-C2C, 486 GB/s of LPDDR5X
    # and 3.4 TB/s of HBM3. Host memory and link share the LPDDR5X. AdamW: 26 bytes at 80 % of it.
    dataclasses.replace(_H200, name="gh200-480g", vram_bytes=94 * GIB, host_bytes=470 * GIB, hbm_gbps=3100.0,
                        h2d_gbps=375.0, d2h_gbps=297.0, both_gbps=280.0, busy_gbps=100.0,
                        adam_gparams=((1, 0.70), (72, 15.0)), add_gparams=24.0, device_adam_gparams=110.0,
                        source="described", gemm=_scaled(_H200_GEMM, 0.97, 720.0)),
    # RTX 4090: 165 TFLOP/s dense bf16 with fp32 sums, 1,008 GB/s (data sheet), PCIe 4 x16; two channels of
    # DDR5, some 65 GB/s, so 2.4 G parameters/s. Products are taken to reach 90 % of the sheet.
    dataclasses.replace(_H200, name="rtx4090-64g", vram_bytes=int(23.6 * GIB), vram_overhead_bytes=int(0.6 * GIB),
                        host_bytes=62 * GIB, gemm=_scaled(_H200_GEMM, 0.30, 150.0),
                        attention=_attention(_H200_ATTENTION, 0.22), hbm_gbps=900.0, h2d_gbps=25.0, d2h_gbps=25.0,
                        both_gbps=22.0, busy_gbps=16.0, adam_gparams=((1, 1.0), (16, 2.4)), add_gparams=4.0,
                        device_adam_gparams=32.0, launch_us=4.0, source="described"),
    # RTX 5090: 210 TFLOP/s dense bf16 with fp32 sums, 1,792 GB/s, 32 GB (data sheet), PCIe 5 x16; host as above
    # with faster DDR5.
    dataclasses.replace(_H200, name="rtx5090", vram_bytes=int(31.4 * GIB), vram_overhead_bytes=int(0.6 * GIB),
                        host_bytes=62 * GIB, gemm=_scaled(_H200_GEMM, 0.38, 190.0),
                        attention=_attention(_H200_ATTENTION, 0.28), hbm_gbps=1600.0, h2d_gbps=54.0, d2h_gbps=54.0,
                        both_gbps=48.0, busy_gbps=25.0, adam_gparams=((1, 1.1), (16, 2.8)), add_gparams=4.5,
                        device_adam_gparams=57.0, launch_us=4.0, source="described"),
    # RTX 3090: 71 TFLOP/s dense bf16 with fp32 sums, 936 GB/s (data sheet), PCIe 4 x16; host as of the 4090 with DDR4,
    # 50 GB/s. Products as there.
    dataclasses.replace(_H200, name="rtx3090-64g", vram_bytes=int(23.6 * GIB), vram_overhead_bytes=int(0.6 * GIB),
                        host_bytes=62 * GIB, gemm=_scaled(_H200_GEMM, 0.13, 64.0),
                        attention=_attention(_H200_ATTENTION, 0.1), hbm_gbps=840.0, h2d_gbps=25.0, d2h_gbps=25.0,
                        both_gbps=20.0, busy_gbps=13.0, adam_gparams=((1, 0.8), (16, 1.8)), add_gparams=3.0,
                        device_adam_gparams=30.0, launch_us=5.0, source="described"),
    # A100 SXM: 312 TFLOP/s dense bf16, 2,039 GB/s of 80 GB (data sheet), PCIe 4 x16; products are taken to reach 80 %
    # of the sheet, and the host to have 512 GiB and 180 GB/s.
    dataclasses.replace(_H200, name="a100-80g", vram_bytes=int(79.1 * GIB), host_bytes=500 * GIB,
                        gemm=_scaled(_H200_GEMM, 0.35, 250.0), attention=_attention(_H200_ATTENTION, 0.35),
                        hbm_gbps=1700.0, h2d_gbps=25.0, d2h_gbps=25.0, both_gbps=22.0, busy_gbps=20.0,
                        adam_gparams=((1, 0.6), (32, 6.5)), add_gparams=10.0, device_adam_gparams=60.0,
                        source="described"),
    # B200: 2,250 TFLOP/s dense bf16 at 1,000 W, 8 TB/s of 192 GB, of which the driver gives 179 GiB (data sheet), in a
    # host of PCIe 5 with 2 TiB. Products are taken to reach what they reach on the H200, 75 % of its sheet.
    dataclasses.replace(_H200, name="b200-2t", vram_bytes=179 * GIB, host_bytes=2000 * GIB,
                        gemm=_scaled(_H200_GEMM, 2.27, 1690.0), attention=_attention(_H200_ATTENTION, 1.8),
                        hbm_gbps=6500.0, device_adam_gparams=235.0, adam_gparams=((1, 0.70), (64, 9.0)),
                        add_gparams=14.0, source="described"),
    # The CPU device, for trying things: "device" memory is host memory.
    Machine(name="cpu", device="cpu", vram_bytes=8 * GIB, vram_overhead_bytes=0, host_bytes=8 * GIB,
            host_overhead_bytes=GIB // 2,
            gemm=((64, 256, 0.05), (64, 4096, 0.08), (4096, 256, 0.08), (4096, 4096, 0.1)),
            attention=((64, 0.02, 0.02), (4096, 0.05, 0.05)), hbm_gbps=10.0, h2d_gbps=5.0, d2h_gbps=5.0, both_gbps=4.0,
            busy_gbps=3.0, adam_gparams=((1, 0.5), (2, 0.8)), add_gparams=0.5, device_adam_gparams=0.5,
            launch_us=10.0),
)}


def describe(machine: Machine) -> list[tuple[str, str]]:
    """(what, figure) of a machine's rates, for a table."""
    best = max(rate for _, _, rate in machine.gemm)
    threads, adam = machine.adam_gparams[-1]
    seq, fwd, bwd = machine.attention[-1]
    rates = machine.disk_read_gbps, machine.disk_write_gbps, machine.disk_both_gbps
    drive = "{:.4g}, {:.4g}; {:.4g} GB/s".format(*rates) + f" (a {DRIVE_NAME}'s)" * (rates == DRIVE[:3])
    return [
        ("device memory", f"{show_bytes(machine.vram_bytes)}, {show_bytes(machine.vram_overhead_bytes)} of it taken"),
        ("host memory", f"{show_bytes(machine.host_bytes)}, {show_bytes(machine.host_overhead_bytes)} of it taken"),
        ("matrix products, best", f"{best:.4g} TFLOP/s"),
        (f"attention, S={seq}", f"{fwd:.4g} forward, {bwd:.4g} backward TFLOP/s"),
        ("elementwise kernels", f"{machine.hbm_gbps:.4g} GB/s"),
        ("host to device, back", f"{machine.h2d_gbps:.4g}, {machine.d2h_gbps:.4g} GB/s"),
        ("both ways; beside AdamW", f"{machine.both_gbps:.4g}; {machine.busy_gbps:.4g} GB/s each way"),
        (f"AdamW, {threads} threads", f"{adam:.4g} G parameters/s"),
        ("with moments of 8 bits", f"{machine.adam_rate(states='8bit') / 1e9:.4g} G parameters/s"
         + ", not measured" * ("8bit" not in dict(machine.adam8_gparams))),
        ("AdamW on the device", f"{machine.device_adam_gparams:.4g} G parameters/s"),
        ("one torch operation", f"{machine.launch_us:.4g} us of host time"),
        ("disk: read, write; together", drive),
        ("disk: its rating", f"{machine.disk_tbw:,.0f} TB written" if machine.disk_tbw else "not known"),
    ]
