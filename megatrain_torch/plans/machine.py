"""What a machine can do: rates and memory, measured, stored or described.

`megatrain doctor` measures this machine and stores what it found; the planner reads it. For a machine that
is not at hand there are descriptions by name, and "h200-128g,vram=24GiB" is one with a limit changed.

Units: GB is 10**9 bytes, TFLOP/s 10**12 operations (a product and a sum are two), memory is in bytes.
"""
from __future__ import annotations

import bisect
import dataclasses
import difflib
import functools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import MegatrainError
from ..base.formats import moved_bytes, through_up
from ..base.limits import host_limits, parse_bytes, show_bytes
from ..base.strict import parsed, shown, table

GIB = 2**30
TAKEN = 0.5                 # of what is copied beside AdamW, what that takes from it: 0.3 and 0.9 on two H200 machines
PIECEMEAL = 0.7             # of the bus, what updates that pass through the device reach beside AdamW: pieces of 64
                            # MiB and fetches take turns; 0.65 to 0.78 on two H200 machines
MEASURED, SHEETS = "measured by megatrain doctor", "from data sheets, not measured"     # sources
WEIGHT = 2                  # bytes of a bf16 weight, as it is fetched
CODES_A_THREAD = 0.75       # 10**9 parameters/s with moments of 8 bits, where arithmetic binds: a Zen 5 core has 1.0
# Where a drive was not measured: this one at PCIe 4, by its data sheet (6.5 GB/s read, 3.5 written, one drive write a
# day for five years); reads and writes together as if in turn.
DRIVE_NAME, DRIVE = "Samsung PM9A3 of 1.92 TB", (6.5, 3.5, 4.5, 3504.0)
# Between GPUs, of two H200 (NVLink 4, NCCL 2.28): 1 GiB is all-reduced at 321 GB/s, where 450 are on the data sheet.
# An exchange of 0.23 GB holds up products beside it by 0.5 ms, every 13 ms, to 2.1 ms, every 39 ms, whatever number of
# NCCL's blocks; steps of 2k tokens, of which exchanges are most, by 0.9 ms.
NVLINK_REACHED, LOST_GBPS = 0.7, 250.0
FP8_GAIN = 1.85             # of 7B width on an H200, at 16k tokens, forward and both gradients: 17.1 ms for 31.6
NETWORK_GBPS = 50.0         # of a machine: one port of 400 Gb/s, stated
# Of two H100 (torch 2.11, NCCL 2.28): a first communicator takes 866 MiB of each with the library, its first
# all-to-all 446.
COMMUNICATOR_BYTES = 1312 << 20
# AdamW of several processes in the memory that they share, by one process's: pages are small where the kernel makes no
# large ones there. Two H200: 5.7 of 7.05 G parameters/s, when an update read sums in fp32, 28 bytes a parameter for 26;
# two H100: 3.9 beside copies, where one process had 6.3 with fewer.
SHARED_ADAM = 0.8


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
            AdamW runs on the host. beside_gparams: 10**9 parameters/s of AdamW meanwhile; 0: by TAKEN.
        adam_gparams: (threads, 10**9 parameters/s) of AdamW on the host, bf16 weights and fp32 states.
        adam8_gparams: (states, 10**9 parameters/s) with moments of 8 bits, as many threads as adam_gparams ends with;
            what is missing is taken to be in proportion to the bytes that move, see adam_rate.
        add_gparams: 10**9 gradients/s added up on the host for micro-batches.
        device_adam_gparams: AdamW on the device.
        fp8_gain: products of codes of 8 bits are so many times as fast as gemm says, casts not counted; 0: it has none.
        launch_us: host time of one small torch operation.
        disk_read_gbps, disk_write_gbps: of a drive alone, past the page cache; disk_both_gbps: read plus written while
            both run. disk_tbw: 10**12 bytes that the drive is rated to have written to it; 0: not known.
        shared_gparams: 10**9 parameters/s of AdamW by a machine's processes together, in the memory that they share;
            0: SHARED_ADAM of adam_gparams.
        whole_gbps: host to device, of each GPU while all of a machine fetch at once; 0: as alone, as far as the host's
            memory reaches. host_gbps: read plus written by all GPUs' copies and AdamW together; 0: see host_rate.
        exchange_gbps: what leaves each GPU for the others of its machine, all to all; 0: they have no links to each
            other, and take those to the host. lost_gbps: that exchange holds up what is computed beside it by the
            seconds in which what leaves would leave at this rate.
        network_gbps: what leaves a machine for others; benchmarks/bench_between.py measures it.
        communicator_bytes: of the device, what NCCL's communicators take of each of several processes.
        one_memory: the device has none of its own: vram_bytes and host_bytes are parts of one, which a plan takes as
            they are; "gb10,vram=90GiB,host=28GiB" parts it otherwise.
        origins: (field, "measured", "published" or "assumed") of the rates that `origin` could not tell from source.
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
    beside_gparams: float = 0.0
    adam8_gparams: tuple[tuple[str, float], ...] = ()
    shared_gparams: float = 0.0
    whole_gbps: float = 0.0
    host_gbps: float = 0.0
    exchange_gbps: float = 0.0
    lost_gbps: float = LOST_GBPS
    network_gbps: float = NETWORK_GBPS
    communicator_bytes: int = COMMUNICATOR_BYTES
    fp8_gain: float = FP8_GAIN
    source: str = "described"
    one_memory: bool = False
    origins: tuple[tuple[str, str], ...] = ()
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

    def held_s(self, gpus: int = 1) -> float:
        """Seconds by which AdamW on the host is held up by a byte that is copied beside it, while each of so many GPUs
        copies as much."""
        alone, copied = self.adam_gparams[-1][1], 2 * self.busy_gbps
        beside = self._beside() if gpus == 1 else (self.host_gbps - gpus * copied) / moved_bytes("fp32")
        return (1 - min(max(beside, 0.0), alone) / alone) / (copied * 1e9)

    def _beside(self) -> float:
        """10**9 parameters/s of AdamW on the host while copies go both ways."""
        return self.beside_gparams or self.adam_gparams[-1][1] - TAKEN * 2 * self.busy_gbps / moved_bytes("fp32")

    def through_rate(self, states: str = "fp32", alone: bool = False) -> float:
        """Parameters/s of updates that pass through the device, alone or beside AdamW on the host; 0: nothing is left.

        Of the bus each way, what fetches of all that was updated leave. By how much such copies hold AdamW up, held_s
        says.
        """
        if alone:
            memory = max(self.adam_gparams[-1][1] * moved_bytes("fp32"), 2 * self.both_gbps)
            return 1e9 * min(self.both_gbps / (through_up(states) + WEIGHT), memory / (moved_bytes(states) + WEIGHT))
        held = max(self._beside(), 0.0) / self.adam_gparams[-1][1]
        bus = min(self.both_gbps, self.busy_gbps) * 1e9
        left = bus - WEIGHT * held * self.adam_rate(states=states)
        return max(0.0, PIECEMEAL * left / (through_up(states) + WEIGHT))

    def origin(self, field: str) -> str:
        """Where a rate comes from: "measured", "published" (of a data sheet, times what the H200 was measured to reach
        of its own), or "assumed"."""
        return dict(self.origins).get(field, "measured" if self.source == MEASURED else "assumed")

    def with_limits(self, vram: int | None, host: int | None) -> Machine:
        """The same machine with less memory; a limit above what it has changes nothing. A description's host is
        anybody's, unless it is one memory with the device: it has what is said."""
        first, *changes = self.name.split(",")
        anybodys = self.device == "cuda" and not self.one_memory and _described(first) and not any(
            "host=" in c for c in changes)
        return dataclasses.replace(self, vram_bytes=min(self.vram_bytes, vram or self.vram_bytes),
                                   host_bytes=(host or self.host_bytes) if anybodys
                                   else min(self.host_bytes, host or self.host_bytes))

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
            return _from_dict(table(parsed(text.encode(), "JSON"), "JSON"))
        except (MegatrainError, TypeError, ValueError) as why:
            raise MegatrainError(f"not a machine's description: {why}; `megatrain doctor` writes one") from None

    @staticmethod
    def parse(text: str) -> Machine:
        """A name, or the path of a JSON file, and changes: "h200-128g,vram=24GiB,host=64GiB,h2d_gbps=25".

        Raises:
            MegatrainError: no such name, file or field; the message lists the names.
        """
        first, *changes = [part.strip() for part in text.split(",")]
        if name := _described(first):
            machine = MACHINES[name]
        elif Path(first).is_file():
            machine = _of_file(Path(first))
        else:
            raise MegatrainError(f"machine {first!r}: no such description and no such file{_near(first)}; known: "
                                 f"{', '.join(MACHINES)}")
        changed = dict(_change(c) for c in changes)
        return dataclasses.replace(machine, name=text.strip(), **changed) if changed else machine

    @staticmethod
    def known() -> dict[str, Machine]:
        """All descriptions by name."""
        return dict(MACHINES)

    @staticmethod
    def here() -> Machine:
        """The machine that mt.plan takes where none is named: this one."""
        return resolve(None)

    @staticmethod
    def some(vram: int, host: int | None = None) -> Machine:
        """Some card with so many bytes of memory, of the slower ones; host: of its host, None: as here."""
        return card_with(vram, host or host_limit_bytes())

    @staticmethod
    def listing() -> str:
        """A table of all descriptions, with where each rate comes from."""
        return listing()

    def to_dict(self) -> dict[str, Any]:
        """Its fields, and where each rate comes from ("origins")."""
        return dataclasses.asdict(self) | {"origins": {rate: self.origin(rate) for rate in RATES}}


def _described(name: str) -> str | None:
    """A description's own name, for it or for what begins it and has its number: "rtx4090", "h200"."""
    name = name.lower()
    begins = f"{name}-" if re.search(r"\d", name) else None              # "rtx" are several
    return next((known for known in MACHINES if known == name or (begins and known.startswith(begins))), None)


def _near(name: str) -> str:
    found = difflib.get_close_matches(name.lower(), MACHINES, 1, 0.4)
    return f"; did you mean {found[0]!r}?" if found else ""


_SIZES = {"vram": "vram_bytes", "host": "host_bytes"}
_SCALARS = {f.name for f in dataclasses.fields(Machine) if f.type == "float"}


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if key in _SIZES and equals:
        return _SIZES[key], parse_bytes(value, f"machine: {key}")
    if key in _SCALARS and equals:
        try:
            rate = float(value)
        except ValueError:
            rate = 0.0
        if 0 < rate < math.inf:
            return key, rate
    raise MegatrainError(f"machine: {text!r}: give vram=SIZE, host=SIZE, or a rate: {', '.join(sorted(_SCALARS))}")


def _of_file(path: Path) -> Machine:
    try:
        return Machine.from_json(path.read_text())
    except MegatrainError as why:
        raise MegatrainError(f"{path}: {why}") from None


# What a row of each table has, and whether rows have to come in the order of their first number, all of them others.
_ROWS = {"gemm": ((int, int, float), False), "attention": ((int, float, float), True),
         "adam_gparams": ((int, float), True), "adam8_gparams": ((str, float), False), "origins": ((str, str), False)}
_MAY_BE_EMPTY = ("adam8_gparams", "origins")
_MAY_BE_ZERO = ("beside_gparams", "vram_overhead_bytes", "host_overhead_bytes", "disk_tbw", "whole_gbps", "host_gbps",
                "exchange_gbps", "fp8_gain", "communicator_bytes", "shared_gparams")


def _is(kind: type, value: Any, zero: bool = False) -> bool:
    """Of numbers: finite, and more than 0, or 0."""
    if kind in (str, bool, dict):
        return type(value) is kind
    good = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    return good and (value > 0 or (zero and value == 0))


def _are_rows(name: str, rows: Any) -> bool:
    (kinds, ascending), lists = _ROWS[name], isinstance(rows, (list, tuple)) and (rows or name in _MAY_BE_EMPTY)
    if not lists or not all(isinstance(row, (list, tuple)) and len(row) == len(kinds) for row in rows):
        return False
    first = [row[0] for row in rows]
    return all(_is(kind, v) for row in rows for kind, v in zip(kinds, row)) and (
        not ascending or first == sorted(set(first)))


def _check_field(name: str, kind: str, value: Any) -> None:
    kinds = {"str": str, "int": int, "float": float, "bool": bool}
    good = _are_rows(name, value) if name in _ROWS else _is(kinds.get(kind, dict), value, name in _MAY_BE_ZERO)
    if not good or (name == "device" and value not in ("cuda", "cpu")):
        raise ValueError(f"{name}={shown(value)}")


def _from_dict(fields: dict[str, Any]) -> Machine:
    for f in dataclasses.fields(Machine):
        if f.name in fields:
            _check_field(f.name, f.type, fields[f.name])
    tables = {name: tuple(map(tuple, fields[name])) for name in _ROWS if name in fields}
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
    """A Machine as it is; text parsed; None: this one, with the stored rates, or with those of the description nearest
    to its GPU; without a GPU its CPU device, which "cpu" is too.

    Raises:
        MegatrainError: see Machine.parse; a stored file that cannot be read.
    """
    if isinstance(machine, Machine):
        return machine
    if machine is not None:
        return _cpu_here() if machine.strip() == "cpu" else Machine.parse(machine)
    return _stored() or _nearest() or _cpu_here()


def _stored() -> Machine | None:
    return _of_file(store_path()) if store_path().is_file() else None


def _cpu_here() -> Machine:
    """The CPU device, with the stored rates where they are its own. Its memory is the host's: a plan has half each."""
    stored = _stored()
    if stored and stored.device == "cpu":
        return stored
    half = host_limit_bytes() // 2
    return dataclasses.replace(MACHINES["cpu"], host_bytes=half, vram_bytes=half)


def _nearest() -> Machine | None:
    """The description of the GPU torch sees, with this machine's memory: by its name, or else the one with memory
    nearest to its. None: it sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    gpu, vram = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    name = described_gpu(gpu) or min((m for m in MACHINES.values() if m.device == "cuda" and not m.one_memory),
                                     key=lambda m: abs(m.vram_bytes - vram)).name
    found, host = MACHINES[name], host_limit_bytes()
    part = (vram // 2, host // 2) if found.one_memory else (vram, host)
    return dataclasses.replace(found, name=f"{gpu} (as {name})", vram_bytes=part[0], host_bytes=part[1])


def card_with(vram: int, host: int) -> Machine:
    """Some card with so many bytes: of the descriptions with memory nearest to it the slowest."""
    cards = [m for m in MACHINES.values() if m.device == "cuda" and not m.one_memory]
    found = min(cards, key=lambda m: (abs(math.log(m.vram_bytes / vram)) // 0.06, max(rate for *_, rate in m.gemm)))
    return dataclasses.replace(found, name=f"some card of {show_bytes(vram)} (as {found.name})", vram_bytes=vram,
                               host_bytes=host)


def described_gpu(gpu: str) -> str | None:
    """The description of a GPU that torch calls so."""
    words = gpu.lower().replace("-", " ")
    return next((name for part, name in _BY_GPU if re.search(rf"\b{part}\b", words)), None)


# What is looked for first comes first: an "A100" of 40 GB before any A100.
_BY_GPU = (("gh200", "gh200-480g"), ("gb10", "gb10"), ("h200", "h200-128g"), ("h100 pcie", "h100-pcie"),
           ("h100", "h100-80g"), ("b200", "b200-2t"), ("a100 .*40gb", "a100-40g"), ("a100", "a100-80g"),
           ("rtx pro 6000", "rtx-pro-6000"), ("rtx 6000 ada", "rtx6000-ada"), ("a6000", "a6000"), ("l40s", "l40s"),
           ("l4", "l4"), ("a10g?", "a10"), ("t4", "t4"), ("v100 .*32gb", "v100-32g"), ("v100", "v100-16g"),
           ("5090", "rtx5090"), ("4090", "rtx4090-64g"), ("4080", "rtx4080"), ("3090", "rtx3090-64g"),
           ("3060", "rtx3060-12g"))


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


RATES = ("gemm", "attention", "hbm_gbps", "h2d_gbps", "d2h_gbps", "both_gbps", "busy_gbps", "adam_gparams",
         "add_gparams", "device_adam_gparams", "launch_us", "fp8_gain", "disk_read_gbps", "disk_write_gbps",
         "disk_both_gbps", "disk_tbw", "whole_gbps", "host_gbps", "exchange_gbps", "lost_gbps", "network_gbps")
ON_SHEETS = ("gemm", "attention", "hbm_gbps", "h2d_gbps", "d2h_gbps", "both_gbps", "device_adam_gparams",
             "disk_read_gbps", "disk_write_gbps", "disk_both_gbps", "disk_tbw", "exchange_gbps")


# Of a machine that was measured: what follows from AdamW's rate; a drive that no --disk named; what several GPUs have.
SUM_ORIGIN = ("add_gparams", "assumed")
DRIVE_ORIGINS = tuple((rate, "published") for rate in RATES if rate.startswith("disk_"))
LINK_ORIGINS = tuple((rate, "assumed") for rate in RATES[-5:])      # until several GPUs are measured; the network stays


def _origins(measured: tuple[str, ...] = (), assumed: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...]:
    """Of a description: what data sheets have is published, all else assumed, but for what is named."""
    return tuple((rate, "measured" if rate in measured else "assumed" if rate in assumed or rate not in ON_SHEETS
                  else "published") for rate in RATES)


def _nvlink(sheet: float) -> float:
    """GB/s that leave a GPU, of links that have so many one way by the data sheet."""
    return round(NVLINK_REACHED * sheet, 1)


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
    whole_gbps=50.4,                    # two GPUs at once
    exchange_gbps=_nvlink(450.0),
    source="measured in part", origins=_origins(measured=(
        "gemm", "attention", "hbm_gbps", "h2d_gbps", "d2h_gbps", "both_gbps", "busy_gbps", "adam_gparams", "launch_us",
        "fp8_gain", "whole_gbps", "exchange_gbps", "lost_gbps")))


NO_LINKS = {"exchange_gbps": 0.0, "whole_gbps": 0.0}    # between GPUs of a machine; and nobody measured several


class Card(NamedTuple):
    """Published figures of a GPU, by the vendor's data sheet.

    Attributes:
        vram: GiB that the driver gives. taken: of them, by the driver and libraries.
        tflops: 10**12 operations/s of dense bf16 products with fp32 sums, without sparsity (V100, T4: fp16).
        gbps: of its memory. link: GB/s one way of its link to the host.
        host: key of HOSTS. share: of tflops that products are taken to reach; less where the power limit is low.
    """

    name: str
    vram: float
    taken: float
    tflops: float
    gbps: float
    link: float
    host: str
    share: float


class Host(NamedTuple):
    """What a host is taken to be: GiB; threads and 10**9 parameters/s of AdamW on one and on all; adam beside copies
    leaves `busy` of the link."""

    gib: int
    adam: tuple[tuple[int, float], ...]
    busy: float


HOSTS = {"desk-ddr4": Host(62, ((1, 0.8), (16, 1.8)), 0.5), "desk": Host(62, ((1, 1.0), (16, 2.4)), 0.6),
         "cloud": Host(62, ((1, 0.6), (8, 3.0)), 0.7), "server": Host(250, ((1, 0.6), (32, 6.5)), 0.75),
         "arm": Host(59, ((1, 0.3), (20, 3.0)), 0.4)}
REACHED = 0.8               # of a PCIe link's rate, by copies one way: 25 of 31.5 GB/s, 55 of 63
PCIE = {3: 15.8, 4: 31.5, 5: 63.0}      # GB/s one way of 16 lanes

# Tensor cores of compute capability 8.9 and above multiply codes of 8 bits; these cards have older ones.
NO_CODES = {"rtx3060-12g", "t4", "a10", "v100-16g", "v100-32g", "a6000", "a100-40g"}

CARDS = (
    Card("rtx3060-12g", 11.6, 0.6, 25.5, 360.0, PCIE[4], "desk-ddr4", 0.9),
    Card("rtx4080", 15.6, 0.6, 97.5, 716.8, PCIE[4], "desk", 0.9),
    Card("t4", 14.6, 0.4, 65.0, 320.0, PCIE[3], "cloud", 0.5),             # 70 W
    Card("l4", 22.0, 0.5, 121.0, 300.0, PCIE[4], "cloud", 0.5),            # 72 W
    Card("a10", 22.0, 0.5, 125.0, 600.0, PCIE[4], "cloud", 0.6),           # 150 W
    Card("v100-16g", 15.7, 0.5, 125.0, 900.0, PCIE[3], "server", 0.75),
    Card("v100-32g", 31.7, 0.5, 125.0, 900.0, PCIE[3], "server", 0.75),
    Card("a6000", 47.4, 0.6, 154.8, 768.0, PCIE[4], "desk", 0.8),
    Card("rtx6000-ada", 47.4, 0.6, 364.2, 960.0, PCIE[4], "desk", 0.75),
    Card("rtx-pro-6000", 94.9, 0.7, 503.8, 1792.0, PCIE[5], "desk", 0.75),
    Card("l40s", 44.4, 0.6, 362.05, 864.0, PCIE[4], "server", 0.7),
    Card("a100-40g", 39.4, 0.6, 312.0, 1555.0, PCIE[4], "server", 0.8),
    Card("h100-pcie", 79.1, 0.7, 756.0, 2000.0, PCIE[5], "server", 0.7),
)
H200_TFLOPS = 989.0         # of its data sheet, where the table above was measured


def _card(c: Card) -> Machine:
    """A card by its published figures, in a host as such cards have. Small products reach more of a small card's peak
    than of the H200's, which launches cost more: twice its curve, up to `share` of the peak."""
    host, of_h200, link = HOSTS[c.host], c.tflops / H200_TFLOPS, c.link * REACHED
    hbm = c.gbps * (0.82 if c.gbps > 1500 and "rtx" not in c.name else 0.89)
    return dataclasses.replace(
        _H200, name=c.name, vram_bytes=int(c.vram * GIB), vram_overhead_bytes=int(c.taken * GIB),
        host_bytes=host.gib * GIB, gemm=_scaled(_H200_GEMM, 2 * c.share * of_h200, c.share * c.tflops),
        attention=_attention(_H200_ATTENTION, 1.4 * c.share * of_h200), hbm_gbps=round(hbm, 1),
        h2d_gbps=round(link, 1), d2h_gbps=round(link, 1), both_gbps=round(0.87 * link, 1),
        busy_gbps=round(host.busy * link, 1), adam_gparams=host.adam, add_gparams=round(1.6 * host.adam[-1][1], 1),
        **NO_LINKS, fp8_gain=0.0 if c.name in NO_CODES else FP8_GAIN,
        device_adam_gparams=round(hbm / 28, 1), launch_us=5.0, source=SHEETS, origins=_origins())


MACHINES: dict[str, Machine] = {m.name: m for m in (
    _H200,
    # The same GPU in a host of two sockets: 64 vCPUs measured 224 GB/s of memory, 8.0 G parameters/s.
    dataclasses.replace(_H200, name="h200-1.5t", host_bytes=1500 * GIB, adam_gparams=((1, 0.70), (64, 8.0)),
                        source="measured in part"),
    # H100 SXM: the H200's cores with 3.35 TB/s (data sheet) of 80 GB; the host is taken to have 256 GiB.
    dataclasses.replace(_H200, name="h100-80g", vram_bytes=int(79.1 * GIB), host_bytes=250 * GIB,
                        hbm_gbps=2750.0, device_adam_gparams=98.0, source=SHEETS, origins=_origins(),
                        gemm=_scaled(_H200_GEMM, 0.96, 720.0)),
    # Schieffer et al. 2024 (arXiv 2407.07850) measured 375 up, 297 down over NVLink-C2C, 486 GB/s of LPDDR5X
    # and 3.4 TB/s of HBM3. Host memory and link share the LPDDR5X. AdamW: 26 bytes at 80 % of it.
    dataclasses.replace(_H200, name="gh200-480g", vram_bytes=94 * GIB, host_bytes=470 * GIB, hbm_gbps=3100.0,
                        h2d_gbps=375.0, d2h_gbps=297.0, both_gbps=280.0, busy_gbps=100.0,
                        adam_gparams=((1, 0.70), (72, 15.0)), add_gparams=24.0, device_adam_gparams=110.0, **NO_LINKS,
                        source=SHEETS, origins=_origins(), gemm=_scaled(_H200_GEMM, 0.97, 720.0)),
    # RTX 4090: 165 TFLOP/s dense bf16 with fp32 sums, 1,008 GB/s (data sheet), PCIe 4 x16; two channels of
    # DDR5, some 65 GB/s, so 2.4 G parameters/s. Products are taken to reach 90 % of the sheet.
    dataclasses.replace(_H200, name="rtx4090-64g", vram_bytes=int(23.6 * GIB), vram_overhead_bytes=int(0.6 * GIB),
                        host_bytes=62 * GIB, gemm=_scaled(_H200_GEMM, 0.30, 150.0),
                        attention=_attention(_H200_ATTENTION, 0.22), hbm_gbps=900.0, h2d_gbps=25.0, d2h_gbps=25.0,
                        both_gbps=22.0, busy_gbps=16.0, adam_gparams=((1, 1.0), (16, 2.4)), add_gparams=4.0,
                        **NO_LINKS, device_adam_gparams=32.0, launch_us=4.0, source=SHEETS, origins=_origins()),
    # RTX 5090: 210 TFLOP/s dense bf16 with fp32 sums, 1,792 GB/s, 32 GB (data sheet), PCIe 5 x16; host as above
    # with faster DDR5.
    dataclasses.replace(_H200, name="rtx5090", vram_bytes=int(31.4 * GIB), vram_overhead_bytes=int(0.6 * GIB),
                        host_bytes=62 * GIB, gemm=_scaled(_H200_GEMM, 0.38, 190.0),
                        attention=_attention(_H200_ATTENTION, 0.28), hbm_gbps=1600.0, h2d_gbps=54.0, d2h_gbps=54.0,
                        both_gbps=48.0, busy_gbps=25.0, adam_gparams=((1, 1.1), (16, 2.8)), add_gparams=4.5,
                        **NO_LINKS, device_adam_gparams=57.0, launch_us=4.0, source=SHEETS, origins=_origins()),
    # RTX 3090: 71 TFLOP/s dense bf16 with fp32 sums, 936 GB/s (data sheet), PCIe 4 x16; host as of the 4090 with DDR4,
    # 50 GB/s. Products as there.
    dataclasses.replace(_H200, name="rtx3090-64g", vram_bytes=int(23.6 * GIB), vram_overhead_bytes=int(0.6 * GIB),
                        host_bytes=62 * GIB, gemm=_scaled(_H200_GEMM, 0.13, 64.0),
                        attention=_attention(_H200_ATTENTION, 0.1), hbm_gbps=840.0, h2d_gbps=25.0, d2h_gbps=25.0,
                        both_gbps=20.0, busy_gbps=13.0, adam_gparams=((1, 0.8), (16, 1.8)), add_gparams=3.0,
                        **NO_LINKS, device_adam_gparams=30.0, launch_us=5.0, source=SHEETS, origins=_origins(),
                        fp8_gain=0.0),
    # A100 SXM: 312 TFLOP/s dense bf16, 2,039 GB/s of 80 GB (data sheet), PCIe 4 x16; products are taken to reach 80 %
    # of the sheet, and the host to have 512 GiB and 180 GB/s.
    dataclasses.replace(_H200, name="a100-80g", vram_bytes=int(79.1 * GIB), host_bytes=500 * GIB,
                        gemm=_scaled(_H200_GEMM, 0.35, 250.0), attention=_attention(_H200_ATTENTION, 0.35),
                        hbm_gbps=1700.0, h2d_gbps=25.0, d2h_gbps=25.0, both_gbps=22.0, busy_gbps=20.0,
                        adam_gparams=((1, 0.6), (32, 6.5)), add_gparams=10.0, device_adam_gparams=60.0,
                        whole_gbps=0.0, exchange_gbps=_nvlink(300.0), fp8_gain=0.0,
                        source=SHEETS, origins=_origins()),
    # B200: 2,250 TFLOP/s dense bf16 at 1,000 W, 8 TB/s of 192 GB, of which the driver gives 179 GiB (data sheet), in a
    # host of PCIe 5 with 2 TiB. Products are taken to reach what they reach on the H200, 75 % of its sheet.
    dataclasses.replace(_H200, name="b200-2t", vram_bytes=179 * GIB, host_bytes=2000 * GIB,
                        gemm=_scaled(_H200_GEMM, 2.27, 1690.0), attention=_attention(_H200_ATTENTION, 1.8),
                        hbm_gbps=6500.0, device_adam_gparams=235.0, adam_gparams=((1, 0.70), (64, 9.0)),
                        add_gparams=14.0, whole_gbps=0.0, exchange_gbps=_nvlink(900.0), source=SHEETS,
                        origins=_origins()),
    *map(_card, CARDS),
    # GB10 (DGX Spark): a Blackwell GPU and 20 Arm cores on one memory of 128 GB, 273 GB/s (data sheet), of which the
    # system shows 119 GiB. It is parted into two, and copies between the parts read and write the same memory. 31
    # TFLOP/s of fp32 are published; of bf16 twice that with fp32 sums is taken, as GeForce cards of its kind have.
    dataclasses.replace(_card(Card("gb10", 59.0, 0.5, 62.0, 273.0, 0.0, "arm", 0.9)), host_bytes=59 * GIB,
                        h2d_gbps=100.0, d2h_gbps=100.0, both_gbps=50.0, busy_gbps=40.0, one_memory=True,
                        origins=_origins(assumed=("gemm", "attention", "h2d_gbps", "d2h_gbps", "both_gbps"))),
    # The CPU device, for trying things: "device" memory is host memory.
    Machine(name="cpu", device="cpu", vram_bytes=8 * GIB, vram_overhead_bytes=0, host_bytes=8 * GIB,
            host_overhead_bytes=GIB // 2,
            gemm=((64, 256, 0.05), (64, 4096, 0.08), (4096, 256, 0.08), (4096, 4096, 0.1)),
            attention=((64, 0.02, 0.02), (4096, 0.05, 0.05)), hbm_gbps=10.0, h2d_gbps=5.0, d2h_gbps=5.0, both_gbps=4.0,
            busy_gbps=3.0, adam_gparams=((1, 0.5), (2, 0.8)), add_gparams=0.5, device_adam_gparams=0.5,
            launch_us=10.0, fp8_gain=1.0, one_memory=True),
)}


def describe(machine: Machine) -> list[tuple[str, str, str]]:
    """(what, figure, where it comes from) of a machine's rates, for a table."""
    best = max(rate for _, _, rate in machine.gemm)
    threads, adam = machine.adam_gparams[-1]
    seq, fwd, bwd = machine.attention[-1]
    rates = machine.disk_read_gbps, machine.disk_write_gbps, machine.disk_both_gbps
    drive = f"not measured: a {DRIVE_NAME}'s data sheet" if rates == DRIVE[:3] else machine.origin("disk_read_gbps")
    device = "host memory as device memory" if machine.one_memory else "device memory"
    eight = "8bit" in dict(machine.adam8_gparams)
    return [
        (device, f"{show_bytes(machine.vram_bytes)}, {show_bytes(machine.vram_overhead_bytes)} of it taken", ""),
        ("host memory", f"{show_bytes(machine.host_bytes)}, {show_bytes(machine.host_overhead_bytes)} of it taken", ""),
        ("matrix products, best", f"{best:.4g} TFLOP/s", machine.origin("gemm")),
        ("products of 8-bit codes", f"{machine.fp8_gain:.3g} times as fast" if machine.fp8_gain else "none",
         machine.origin("fp8_gain")),
        (f"attention, S={seq}", f"{fwd:.4g} forward, {bwd:.4g} backward TFLOP/s", machine.origin("attention")),
        ("elementwise kernels", f"{machine.hbm_gbps:.4g} GB/s", machine.origin("hbm_gbps")),
        ("host to device, back", f"{machine.h2d_gbps:.4g}, {machine.d2h_gbps:.4g} GB/s", machine.origin("h2d_gbps")),
        ("both ways at once", f"{machine.both_gbps:.4g} GB/s each way", machine.origin("both_gbps")),
        ("both ways beside AdamW", f"{machine.busy_gbps:.4g} GB/s each way", machine.origin("busy_gbps")),
        (f"AdamW, {threads} thread" + "s" * (threads > 1), f"{adam:.4g} G parameters/s",
         machine.origin("adam_gparams")),
        *([("AdamW beside copies both ways", f"{machine.beside_gparams:.4g} G parameters/s", "measured")]
          if machine.beside_gparams else []),
        ("with moments of 8 bits", f"{machine.adam_rate(states='8bit') / 1e9:.4g} G parameters/s",
         machine.origin("adam8_gparams") if eight else "not measured: from AdamW's rate"),
        ("a micro-batch's gradients added", f"{machine.add_gparams:.4g} G gradients/s",
         "not measured: from AdamW's rate" if machine.source == MEASURED else machine.origin("add_gparams")),
        ("AdamW on the device", f"{machine.device_adam_gparams:.4g} G parameters/s",
         machine.origin("device_adam_gparams")),
        ("one torch operation", f"{machine.launch_us:.4g} us of host time", machine.origin("launch_us")),
        *_links(machine),
        ("disk: read, write; together", "{:.4g}, {:.4g}; {:.4g} GB/s".format(*rates), drive),
        ("disk: its rating", f"{machine.disk_tbw:,.0f} TB written" if machine.disk_tbw else "not known",
         drive if machine.disk_tbw == DRIVE[3] else ""),
    ]


def _links(m: Machine) -> list[tuple[str, str, str]]:
    """Of several GPUs."""
    whole = f"{m.whole_gbps:.4g} GB/s" if m.whole_gbps else "as alone"
    between = f"{m.exchange_gbps:.4g} GB/s leave each" if m.exchange_gbps else "over their links to the host"
    return [("to each of several GPUs at once", whole, m.origin("whole_gbps") if m.whole_gbps else "not measured"),
            ("between GPUs", between, m.origin("exchange_gbps") if m.exchange_gbps else "not measured"),
            ("between machines", f"{m.network_gbps:.4g} GB/s leave each", "stated: machine=\"...,network_gbps=GB/s\""),
            *([("NCCL's part of a GPU's memory", show_bytes(m.communicator_bytes), "")] if m.device == "cuda" else [])]


def listing() -> str:
    """All descriptions, a line each, with a letter at each rate that says where it comes from."""
    rows: list[tuple[str, ...]] = [("machine", "GPU memory", "products", "GPU memory's rate", "link", "host memory",
                                    "AdamW on it")]
    for m in sorted(MACHINES.values(), key=lambda m: m.vram_bytes):
        def mark(figure: str, rate: str, m: Machine = m) -> str:
            return f"{figure} {m.origin(rate)[0]}"
        rows.append((m.name, show_bytes(m.vram_bytes), mark(f"{max(r for *_, r in m.gemm):.4g} TFLOP/s", "gemm"),
                     mark(f"{m.hbm_gbps:.4g} GB/s", "hbm_gbps"), mark(f"{m.h2d_gbps:.4g} GB/s", "h2d_gbps"),
                     show_bytes(m.host_bytes), mark(f"{m.adam_gparams[-1][1]:.4g} G/s", "adam_gparams")))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([r[0].ljust(widths[0]), *(c.rjust(n) for c, n in zip(r[1:], widths[1:]))]) for r in rows]
    return "\n".join([*lines, "", *LEGEND])


LEGEND = (
    "m: measured.  a: assumed.  p: published on the vendor's data sheet, times the share of its own sheet",
    "that an H200 was measured to reach, or less for cards with a low power limit.",
    "Products are bf16 with fp32 sums, without sparsity; of V100 and T4, which have none, fp16.",
    "The host is anybody's: --host 128GiB, or --machine rtx4090,host=128GiB, says what yours has. GB10 and the",
    "CPU device share one memory with the host: shown are the parts that each has in a plan, and",
    "gb10,vram=90GiB,host=28GiB parts it otherwise. A name's first word will do: rtx4090.",
    "`megatrain doctor`, run on the machine itself, measures all of this.",
)
