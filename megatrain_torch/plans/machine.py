"""A machine's rates and memory: measured, stored or described.

`megatrain doctor` measures this machine and stores what it found; the planner reads it. For a machine that
is not at hand there are descriptions by name, and "h200-128g,vram=24GiB" is one with a limit changed.

Units: GB is 10**9 bytes, TFLOP/s 10**12 operations (a product and a sum are two), memory is in bytes.
"""
from __future__ import annotations

import bisect
import contextlib
import dataclasses
import difflib
import functools
import itertools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from ..base.errors import MegatrainError
from ..base.limits import host_limits, parse_bytes, show_bytes
from ..base.modes import moved_bytes, through_up
from ..base.strict import MOST, parsed, shown, table
from ..figures.report import as_text
from .cards import CALLED, CARDS

TAKEN = 0.5                 # of what is copied beside AdamW, what that takes from it: 0.3 and 0.9 on two H200 machines
PIECEMEAL = 0.7             # of the bus, what updates that pass through the device reach beside AdamW: pieces of 64
                            # MiB and fetches take turns; 0.65 to 0.78 on two H200 machines
WEIGHT = 2                  # bytes of a bf16 weight, as it is fetched
CODES_A_THREAD = 0.75       # 10**9 parameters/s with moments of 8 bits, where arithmetic binds: a Zen 5 core has 1.0
# Where a drive was not measured: this one at PCIe 4, by its data sheet (6.5 GB/s read, 3.5 written); reads and writes
# together as if in turn.
DRIVE_NAME, DRIVE = "Samsung PM9A3 of 1.92 TB", (6.5, 3.5, 4.5)
# Of two H200, an exchange of 0.23 GB holds up products beside it by 0.5 ms, every 13 ms, to 2.1 ms, every 39 ms,
# whatever number of NCCL's blocks; steps of 2k tokens, of which exchanges are most, by 0.9 ms.
LOST_GBPS = 250.0
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
        device: "cuda" or "cpu". vram_bytes: its memory. vram_overhead_bytes: of it, what the driver and libraries take.
        host_bytes: memory this process may use, by its cgroups too. host_overhead_bytes: of it, what Python, torch and
            the driver take.
        gemm: (tokens, width, TFLOP/s) of products [tokens, a] x [a, b] with sqrt(a*b) = width, forward and both of
            backward together. A full grid, widths and tokens ascending.
        attention: (sequence, forward, backward TFLOP/s) of causal attention: operations are a triangle's.
        hbm_gbps: read plus written by elementwise kernels.
        h2d_gbps, d2h_gbps: copies alone; both_gbps: each way while both run; busy_gbps: each way while
            AdamW runs on the host. beside_gparams: 10**9 parameters/s of AdamW meanwhile; 0: by TAKEN.
        adam_gparams: (threads, 10**9 parameters/s) of AdamW on the host, bf16 weights and fp32 states.
        adam8_gparams: (states, 10**9 parameters/s) with moments of 8 bits, on the most threads of adam_gparams. Missing
            rates are taken to be in proportion to the bytes that move: see adam_rate.
        add_gparams: 10**9 gradients/s added up on the host for micro-batches.
        device_adam_gparams: AdamW on the device.
        fp8_gain: products of codes of 8 bits are so many times as fast as gemm says, casts not counted; 0: it has none.
        launch_us: host time of one small torch operation.
        disk_read_gbps, disk_write_gbps: of a drive alone, past the page cache; disk_both_gbps: read plus written while
            both run.
        shared_gparams: 10**9 parameters/s of AdamW by a machine's processes together, in the memory that they share;
            0: SHARED_ADAM of adam_gparams.
        whole_gbps: host to device, of each GPU while all of a machine fetch at once; 0: as alone, as far as the host's
            memory reaches. host_gbps: read plus written by all GPUs' copies and AdamW together; 0: see host_rate.
        exchange_gbps: what leaves each GPU for the others of its machine, all to all. 0: they have no links to each
            other, and use those to the host. lost_gbps: an exchange delays the compute beside it by the seconds that
            its bytes take at this rate.
        network_gbps: what leaves a machine for others; benchmarks/bench_between.py measures it.
        communicator_bytes: of the device, what NCCL's communicators take of each of two processes; plans count more of
            more.
        one_memory: device and host share one memory. vram_bytes and host_bytes are parts of it, which a plan takes as
            they are; "gb10,vram=90GiB,host=28GiB" divides it in another way.
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
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def gemm_flops(self, tokens: float, width: float) -> float:
        """FLOP/s of a product, between the measured points in the logarithms of tokens and width."""
        return _along([(w, _along(row, tokens)) for w, row in _grid(self.gemm)], width) * 1e12

    def attention_flops(self, seq: float, backward: bool) -> float:
        """FLOP/s of causal attention over sequences of this length."""
        return _along([(float(s), b if backward else f) for s, f, b in self.attention], seq) * 1e12

    def adam_rate(self, threads: int | None = None, states: str = "fp32") -> float:
        """Parameters/s of AdamW on the host; None: with all threads measured. states: see base/modes.py."""
        points = [(float(n), rate) for n, rate in self.adam_gparams]
        rate = _along(points, threads or points[-1][0])
        if states == "fp32":
            return rate * 1e9
        by_bytes = points[-1][1] * moved_bytes("fp32") / moved_bytes(states)
        found = dict(self.adam8_gparams).get(states, min(by_bytes, points[-1][0] * CODES_A_THREAD))
        return found * rate / points[-1][1] * 1e9

    def held_s(self, gpus: int = 1) -> float:
        """Seconds by which one copied byte delays AdamW on the host, while each of so many GPUs copies as much."""
        alone, copied = self.adam_gparams[-1][1], 2 * self.busy_gbps
        beside = self._beside() if gpus == 1 else (self.host_gbps - gpus * copied) / moved_bytes("fp32")
        return (1 - min(max(beside, 0.0), alone) / alone) / (copied * 1e9)

    def _beside(self) -> float:
        """10**9 parameters/s of AdamW on the host while copies go both ways."""
        return self.beside_gparams or self.adam_gparams[-1][1] - TAKEN * 2 * self.busy_gbps / moved_bytes("fp32")

    def through_rate(self, states: str = "fp32", alone: bool = False) -> float:
        """Parameters/s of updates that pass through the device, alone or beside AdamW on the host; 0: nothing is left.

        Of the bus each way, what fetches of all that was updated leave. How much such copies hold AdamW up: held_s.
        """
        if alone:
            memory = max(self.adam_gparams[-1][1] * moved_bytes("fp32"), 2 * self.both_gbps)
            return 1e9 * min(self.both_gbps / (through_up(states) + WEIGHT), memory / (moved_bytes(states) + WEIGHT))
        held = max(self._beside(), 0.0) / self.adam_gparams[-1][1]
        bus = min(self.both_gbps, self.busy_gbps) * 1e9
        left = bus - WEIGHT * held * self.adam_rate(states=states)
        return max(0.0, PIECEMEAL * left / (through_up(states) + WEIGHT))

    def with_limits(self, vram: int | None, host: int | None) -> Machine:
        """The same machine with less memory; a limit above what it has changes nothing. A description's host is
        anybody's, unless it is one memory with the device: it has what is said."""
        first, _, changes = self.name.partition(",")
        anybodys = self.device == "cuda" and not self.one_memory and _described(first) and "host=" not in changes
        vram, host = min(self.vram_bytes, vram or self.vram_bytes), host or self.host_bytes
        return dataclasses.replace(self, vram_bytes=vram, host_bytes=host if anybodys else min(self.host_bytes, host))

    # ---- as text ----

    def to_json(self) -> str:
        """A text that from_json takes."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Machine:
        """The machine that a text of to_json describes.

        Raises:
            MegatrainError: not a machine's description; the message names the field.
        """
        kinds = get_type_hints(Machine)
        try:
            fields = table(parsed(text.encode(), "JSON"), "JSON")
            if strange := [name for name in fields if name not in kinds]:
                raise ValueError(f"it has {shown(strange[0])}, which no machine has in this version")
            machine = Machine(**{name: tuple(tuple(v) if isinstance(v, list) else v for v in value)
                                 if isinstance(value, list) else value for name, value in fields.items()})
            for name, kind in kinds.items():
                value = getattr(machine, name)
                good = _fits(kind, value, name in _MAY_BE_ZERO) and (value != () or name == "adam8_gparams")
                if name == "device":
                    good = value in ("cuda", "cpu")
                elif good and name in ("attention", "adam_gparams"):     # read in the order of rows' first numbers
                    good = all(a[0] < b[0] for a, b in itertools.pairwise(value))
                if not good:
                    raise ValueError(f"{name}={shown(value)}")
        except (MegatrainError, TypeError, ValueError) as why:
            raise MegatrainError(f"not a machine's description: {why}; run `megatrain doctor` again") from None
        return machine

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
            near = difflib.get_close_matches(first.lower(), MACHINES, 1, 0.4)
            raise MegatrainError(f"machine {first!r}: no such description and no such file"
                                 + "".join(f"; did you mean {name!r}?" for name in near)
                                 + f"; known: {', '.join(MACHINES)}")
        return dataclasses.replace(machine, name=text.strip(), **dict(map(_change, changes))) if changes else machine

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
        """Some card with so many bytes of memory: of the descriptions with memory nearest to it the slowest. host: of
        its host, None: as here."""
        found = min(_cards(), key=lambda m: (abs(math.log(m.vram_bytes / vram)) // 0.06, max(r for *_, r in m.gemm)))
        return dataclasses.replace(found, name=f"some card of {show_bytes(vram)} (as {found.name})", vram_bytes=vram,
                                   host_bytes=host or host_limits().in_all)

    @staticmethod
    def listing() -> str:
        """A table of all descriptions, a line each."""
        head = ("machine", "GPU memory", "products", "GPU memory's rate", "link", "host memory", "AdamW on it")
        rows = [head, *((m.name, show_bytes(m.vram_bytes), f"{max(r for *_, r in m.gemm):.4g} TFLOP/s",
                         f"{m.hbm_gbps:.4g} GB/s", f"{m.h2d_gbps:.4g} GB/s", show_bytes(m.host_bytes),
                         f"{m.adam_gparams[-1][1]:.4g} G/s")
                        for m in sorted(MACHINES.values(), key=lambda m: m.vram_bytes))]
        return "\n".join([as_text(("", rows), right=range(1, 7)), "", *LEGEND])

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return dataclasses.asdict(self)


def _described(name: str) -> str | None:
    """A description's own name, for it or for what begins it and has its number: "rtx4090", "h200"."""
    name = name.lower()
    begins = f"{name}-" if re.search(r"\d", name) else None              # "rtx" are several
    return next((known for known in MACHINES if known == name or (begins and known.startswith(begins))), None)


def _change(text: str) -> tuple[str, Any]:
    """(field, value) of a change of a description, "vram=24GiB"."""
    key, equals, value = text.partition("=")
    if key in ("vram", "host") and equals:
        return f"{key}_bytes", parse_bytes(value, f"machine: {key}")
    rates = sorted(f.name for f in dataclasses.fields(Machine) if f.type == "float")
    with contextlib.suppress(ValueError):
        if key in rates and 0 < float(value) < math.inf:
            return key, float(value)
    raise MegatrainError(f"machine: {text!r}: give vram=SIZE, host=SIZE, or a rate: {', '.join(rates)}")


def _of_file(path: Path) -> Machine:
    try:
        return Machine.from_json(path.read_text())
    except MegatrainError as why:
        raise MegatrainError(f"{path}: {why}") from None


_MAY_BE_ZERO = ("beside_gparams", "vram_overhead_bytes", "host_overhead_bytes", "whole_gbps", "host_gbps",
                "exchange_gbps", "fp8_gain", "communicator_bytes", "shared_gparams")


def _fits(kind: Any, value: Any, zero: bool = False) -> bool:
    """Is it of this type? A number has to be finite and more than 0, or 0 where `zero` says so."""
    parts = get_args(kind)
    if kind in (int, float):
        good = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
        return good and (0 < value <= MOST or (zero and value == 0))
    if get_origin(kind) is not tuple:
        return type(value) is (get_origin(kind) or kind)
    if type(value) is not tuple or (parts[-1] is not ... and len(value) != len(parts)):
        return False
    return all(map(_fits, itertools.repeat(parts[0]) if parts[-1] is ... else parts, value))


# ---- between measured points ---------------------------------------------------------------------

@functools.lru_cache(8)
def _grid(points: tuple[tuple[int, int, float], ...]) -> list[tuple[float, list[tuple[float, float]]]]:
    """[(width, [(tokens, rate)])], both ascending."""
    rows = itertools.groupby(sorted((w, n, rate) for n, w, rate in points), key=lambda point: point[0])
    return [(float(width), [(float(n), rate) for _, n, rate in row]) for width, row in rows]


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
    return Path(os.environ.get("MEGATRAIN_MACHINE") or Path.home() / ".cache/megatrain/machine.json")


def resolve(machine: Machine | str | None) -> Machine:
    """A Machine as it is; text parsed; None: this one, with the stored rates, or with those of the description nearest
    to its GPU; without a GPU its CPU device, which "cpu" is too. Raises MegatrainError as Machine.parse."""
    if isinstance(machine, Machine):
        return machine
    if machine is not None and machine.strip() != "cpu":
        return Machine.parse(machine)
    stored, host = _of_file(store_path()) if store_path().is_file() else None, host_limits().in_all
    if stored and (machine is None or stored.device == "cpu"):
        return stored
    if machine is None and torch.cuda.is_available():
        gpu, vram = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        name = described_gpu(gpu) or min(_cards(), key=lambda m: abs(m.vram_bytes - vram)).name
        parts = 2 if MACHINES[name].one_memory else 1
        return dataclasses.replace(MACHINES[name], name=f"{gpu} (as {name})", vram_bytes=vram // parts,
                                   host_bytes=host // parts)
    return dataclasses.replace(MACHINES["cpu"], host_bytes=host // 2, vram_bytes=host // 2)     # one memory: half each


def _cards() -> list[Machine]:
    """Descriptions of GPUs with memory of their own."""
    return [m for m in MACHINES.values() if m.device == "cuda" and not m.one_memory]


def described_gpu(gpu: str) -> str | None:
    """The description of a GPU that torch calls so."""
    words = gpu.lower().replace("-", " ")
    return next((name for part, name in CALLED if re.search(rf"\b{part}\b", words)), None)


# ---- descriptions --------------------------------------------------------------------------------

MACHINES: dict[str, Machine] = {card["name"]: Machine(**card) for card in CARDS}


def describe(m: Machine) -> list[tuple[str, str]]:
    """(what, figure) of a machine's rates, for a table. What nobody measured says so."""
    threads, adam = m.adam_gparams[-1]
    seq, fwd, bwd = m.attention[-1]
    disk = m.disk_read_gbps, m.disk_write_gbps, m.disk_both_gbps
    guess = "" if "8bit" in dict(m.adam8_gparams) else ", from AdamW's rate"
    return [
        ("host memory as device memory" if m.one_memory else "device memory",
         f"{show_bytes(m.vram_bytes)}, {show_bytes(m.vram_overhead_bytes)} of it taken"),
        ("host memory", f"{show_bytes(m.host_bytes)}, {show_bytes(m.host_overhead_bytes)} of it taken"),
        ("matrix products, best", f"{max(rate for *_, rate in m.gemm):.4g} TFLOP/s"),
        ("products of 8-bit codes", f"{m.fp8_gain:.3g} times as fast" if m.fp8_gain else "none"),
        (f"attention, S={seq}", f"{fwd:.4g} forward, {bwd:.4g} backward TFLOP/s"),
        ("elementwise kernels", f"{m.hbm_gbps:.4g} GB/s"),
        ("host to device, back", f"{m.h2d_gbps:.4g}, {m.d2h_gbps:.4g} GB/s"),
        ("both ways at once", f"{m.both_gbps:.4g} GB/s each way"),
        ("both ways beside AdamW", f"{m.busy_gbps:.4g} GB/s each way"),
        (f"AdamW, {threads} thread" + "s" * (threads > 1), f"{adam:.4g} G parameters/s"),
        *([("AdamW beside copies both ways", f"{m.beside_gparams:.4g} G parameters/s")] if m.beside_gparams else []),
        ("with moments of 8 bits", f"{m.adam_rate(states='8bit') / 1e9:.4g} G parameters/s{guess}"),
        ("a micro-batch's gradients added", f"{m.add_gparams:.4g} G gradients/s, from AdamW's rate"),
        ("AdamW on the device", f"{m.device_adam_gparams:.4g} G parameters/s"),
        ("one torch operation", f"{m.launch_us:.4g} us of host time"),
        ("to each of several GPUs at once", f"{m.whole_gbps:.4g} GB/s" if m.whole_gbps else "as alone: not measured"),
        ("between GPUs", f"{m.exchange_gbps:.4g} GB/s leave each" if m.exchange_gbps
         else "over their links to the host: not measured"),
        ("between machines", f"{m.network_gbps:.4g} GB/s leave each, as machine=\"...,network_gbps=GB/s\" states"),
        *([("NCCL's part of a GPU's memory", show_bytes(m.communicator_bytes))] if m.device == "cuda" else []),
        ("disk: read, write; together", "{:.4g}, {:.4g}; {:.4g} GB/s".format(*disk)
         + f": not measured, a {DRIVE_NAME}'s data sheet" * (disk == DRIVE)),
    ]


LEGEND = (
    "Rates are from data sheets, times the share of its own sheet that an H200 was measured to reach, or less",
    "for cards with a low power limit; of H200 most are measured. AdamW's are a guess, but for the H200's.",
    "Products are bf16 with fp32 sums, without sparsity; of V100 and T4, which have none, fp16.",
    "The host is anybody's: --host 128GiB, or --machine rtx4090,host=128GiB, says what yours has. GB10 and the",
    "CPU device share one memory with the host: shown are the parts that each has in a plan, and",
    "gb10,vram=90GiB,host=28GiB parts it otherwise. A name's first word will do: rtx4090.",
    "`megatrain doctor`, run on the machine itself, measures all of this.",
)
