"""The C core, as Python sees it. Addresses and stream handles are ints; memory is NumPy arrays of bytes.

Enumerations are ints with the values of the C headers: dtype (`DTYPES[name]`), plane (`PLANES[name]`).
Every failure raises `MegatrainError`; its message names the unit, the value and the limit.
Calls that may wait release the GIL.
"""
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

class MegatrainError(RuntimeError): ...

DTYPES: dict[str, int]          # {"F32": 0, "BF16": 1, ...}
PLANES: dict[str, int]          # {"HI": 0, "GRAD": 1, ...}
STATES: dict[str, int]          # {"fp32": 0, "8bit": 1, ...}
LOW_BYTES: dict[str, int]       # by format of states, of a bf16 parameter beside its weight
GROUP: int                      # elements that share the scales of 8-bit moments
BLOCK_BYTES: int                # of a file, that have a sum
LENT: int                       # buffers of a size for gradients that are kept nowhere
LANES: dict[str, int]           # {"compute": 0, "h2d": 1, ...}: csrc/core/timeline.h
WORKS: dict[str, int]           # {"step": 0, "forward": 1, ...}
__version__: str

def build_info() -> dict[str, Any]:
    """{"cuda": bool, "isa": "avx512", "isas": [...runnable...], "nodes": int}"""

class SlotHooks(Protocol):
    def held(self, slot: int) -> bool: ...
    def renew(self, slot: int) -> int:
        """Fresh memory for the slot: its address."""

class Engine:
    """One streamed model: device, pool, store, stream, offload and updater, opened in that order.

    Args:
        device: "cpu" or "cuda".
        index: CUDA ordinal.
        threads: host threads for the optimizer and sums; >= 1.
        delay_us, seed: tests: random sleeps in every queue (0: none).
        share: descriptor of memory in which ranks of one machine have the model together; -1: this process is alone.
            All of them add the same units, announce the same hand-overs and submit the same updates, in one order.
        rank, ranks: in a share every unit has so many owners (csrc/core/portion.h), and this is one of them: it has the
            states of its portion alone, is given the gradients of its portion, and updates that.
        speakers: where some of them are on other machines: by rank, the one of this machine that says here what that
            rank says there (csrc/core/relay.h).
    """
    def __init__(self, device: str, index: int = 0, threads: int = 1, delay_us: int = 0, seed: int = 0,
                 share: int = -1, rank: int = 0, ranks: int = 1, speakers: tuple[int, ...] = ()) -> None: ...
    def close(self) -> None: ...

    # store
    def add_unit(self, name: str, dtypes: Sequence[int], numels: Sequence[int], trainable: Sequence[bool]) -> int: ...
    def set_trainable(self, unit: int, param: int, on: bool) -> None: ...
    def hi_bytes(self, unit: int) -> int: ...
    def offset(self, unit: int, param: int) -> int: ...
    def portions(self, unit: int) -> tuple[int, ...]:
        """[ranks + 1] Bytes of the unit's weights, as offset() counts them, at which portions begin and the last ends.
        """
    def owned(self, unit: int, param: int, rank: int = -1) -> tuple[int, int]:
        """(first, number) of the parameter's elements that are this rank's, or another's."""
    def plane(self, unit: int, param: int, plane: int, shared: bool = False) -> np.ndarray:
        """uint8 view of one parameter's bytes in a plane. Maps the plane at first use.

        In a share: what user code gets. It shows what all ranks have, but for pages that this process wrote: those are
        its own until spread(), or, of gradients, until the next hand-over. shared: the plane itself, where what one
        rank writes all have: for who fills, loads and saves. Alone the two are one.

        The memory stays until the last array over it is gone, also after close(); the engine itself
        is not kept alive.
        """
    def gone(self) -> list[tuple[int, int, bool]]:
        """(rank, process, its process ended) of other ranks that have closed their engine, or whose process ended."""
    def relay(self) -> Any:
        """For relay_next and its like; it keeps the memory, also behind close()."""
    def fail(self, text: str) -> None:
        """The engine is of no use any more, and those of other ranks neither: whoever waits in one gets this text."""
    def stay(self, seconds: float) -> None:
        """Of a process that ends: returns when no other rank will ask any more for what is on this one's device, since
        all have come here or are gone, or none has asked for so many seconds. Nothing to do where no unit is there."""
    def spread(self, unit: int, param: int, planes: int) -> None:
        """What user code wrote in place, into plane()'s arrays of the parameter, is what all ranks have from now on: of
        these planes (bits 1 << plane) each gives its own portion. Every rank calls it, for the same in the same order,
        having written the same; one that does not come in 30 s is an error everywhere. HI: as touch(). Alone: nothing.
        """
    def host_bytes(self, plane: int = -1) -> int: ...
    def reserved_bytes(self, unit: int, plane: int) -> int:
        """Host bytes that it takes to bring the plane there: 0 where its memory is there, or it was never asked for."""
    def unlocked(self) -> tuple[int, str]:
        """Host bytes that the driver could not lock, and what it said of the first: copied through a buffer."""
    def lock_limit(self, nbytes: int) -> None: ...      # tests only

    # ledger
    def version(self, unit: int) -> int: ...
    def touch(self, unit: int) -> None: ...
    def updated(self, unit: int) -> None:
        """As wait_updates, but nothing is brought to the host."""
    def wait_updates(self, unit: int, param: int = -1) -> None:
        """Until the unit's weights, or the parameter's, may be read in host memory; they are brought there."""
    def wait_grads(self, unit: int) -> None:
        """The same for its gradients."""
    def wait_fetch(self, unit: int, param: int = -1) -> None:
        """Until its weights may be written in host memory; then comes touch()."""
    def check(self) -> None: ...
    def watchdog(self, seconds: float) -> None: ...

    # stream
    def open_slots(self, slots: Sequence[tuple[int, int]], hooks: SlotHooks) -> None:
        """slots: (address, bytes) of device memory."""
    def cut(self, unit: int, ranges: Sequence[tuple[int, int, int]]) -> int:
        """The number, as of a unit, of a part of a unit's weights that is fetched by itself; acquire, find and schedule
        take and give it. ranges: (from, to, bytes) of its HI plane and of a slot. Between open_slots and the first
        forward; until close_slots. Not of weights on disk."""
    def settle(self, unit: int, slot: int) -> None:
        """The unit lives on the device from now on: its weights in that slot, which serves nobody else, its
        other planes in device memory. After open_slots, before its first forward; then take() moves what the host
        has. A unit that was settled before close_slots gets the slot whose memory it has. Arrays of its host planes are
        copies: see bring and push."""
    def slot_name(self, unit: int) -> bytes:
        """Names a settled unit's slot, for `reach` of this machine's other processes; empty: it is out of reach."""
    def reach(self, unit: int, names: bytes) -> bool:
        """What other ranks have updated of a settled unit is copied from their slots from now on, if all of these
        names, one after the other by rank, are within reach; else, or with fewer names, by way of host memory. Whether
        they are. While nothing of the unit is under way."""
    def settled(self, unit: int) -> bool:
        """Whether the unit lives on the device."""
    def unsettle(self, unit: int, grads: bool) -> None:
        """The unit's planes come to host memory, its gradients if they count; they are at home there again. Between
        close_slots and open_slots, when nothing of it is under way; a guest is dismissed before."""
    def close_slots(self) -> None:
        """No weights are in slots any more: open_slots may open others. When nothing is under way. Of none: nothing."""
    def set_states(self, unit: int, states: int) -> None:
        """How the unit's states are kept from now on: a number of STATES. Before any plane of them is asked for."""
    def pass_gradients(self, unit: int) -> None:
        """The unit has no GRAD plane from now on but from offload() to the end of the next update of it, in one of
        three buffers of a size (a settled unit's on the device); offload() waits for one. Before its GRAD plane is
        asked for, after settle()."""
    def lend_most(self, n: int) -> None:
        """Fewer such buffers, 1 or 2: offload() waits for the last update, or the last but one; with
        1, gradients of one unit alone are on their way, on whichever side. Before any is lent."""
    def through(self, unit: int, on: bool) -> None:
        """The unit's updates pass through the device from now on, or no more: its planes go up in pieces, are
        updated there and come down, while the host's cores update others. At any time; not for settled units."""
    def invite(self, unit: int) -> None:
        """A settled unit's states are at home on the host from now on, and on the device around its updates alone: from
        lift(), which comes before adam(), to leave(). Before take() has moved its planes."""
    def dismiss(self, unit: int) -> None:
        """They come and leave no more. When they are at home."""
    def lift_sizes(self, unit: int) -> tuple[int, ...]:
        """Bytes of each piece of device memory that the unit's states take, as its parameters are trained now."""
    def lift(self, unit: int, addresses: Sequence[int], stream: int) -> bool:
        """The states come to the device, into pieces of lift_sizes() bytes, aligned to 512: memory that is free behind
        what `stream` was given so far, and the unit's until leave() says so. Waits for updates of the unit. False: they
        are there already, and nothing was taken."""
    def leave(self, unit: int, wait: bool) -> bool:
        """Whether the memory that lift() took is the caller's again: no update of the unit is under way, and its
        states are on the host. wait: until they are."""
    def disk(self, path: str, units: Sequence[int], weights: Sequence[int] = (), limit: int = 0, buffers: int = 8,
             buffer_bytes: int = 33554432, threads: int = 16) -> None:
        """States (LO, MASTER, M, V) of these units are in a scratch file in the directory from now on; room for them
        is reserved before this returns. weights: further units, whose weights are there too, zeros until they are
        pushed; states of these are kept in one way from then on (set_states). Before any of them is asked for, once.
        limit: bytes the file may have, 0: no limit. Their host planes are copies: see bring and push."""
    def disk_file(self) -> tuple[str, int, bool] | None:
        """(path, bytes, transfers go past the page cache) of the scratch file."""
    def bring(self, unit: int, planes: int) -> None:
        """Host planes become current. planes: bits 1 << plane, or -1. A settled unit's are copied, but for ACC, which
        has no host copy; waits for updates and gradients under way. What is on disk is read. Of other units
        nothing is to be done."""
    def push(self, unit: int, param: int, planes: int) -> None:
        """The parameter's host planes were written: the device's (HI: as touch), or the file, take their values.
        param -1, of a unit on disk: all parameters'."""
    def take(self, unit: int, stream: int) -> None:
        """Weights of a settled unit that were written on the host are fetched, behind what `stream` was given so far;
        then host memory is given back of all planes that are at home on the device or on disk, but GRAD; who reads them
        brings them again. Waits for updates of the unit. Not while somebody reads."""

    # checkpoints
    def save_begin(self, files: list[tuple[str, int, list[tuple[Any, ...]]]], units: list[tuple[int, int]], spare: int,
                   copiers: int, writers: int, part: int = 0, parts: int = 1) -> None:
        """Writes files of planes as they are now, with threads of its own; one save at a time.

        Drains the engine. Until a unit's bytes are copied, its updates and writes from outside wait.

        Args:
            files: (path, bytes, [(offset in the file, address, bytes > 0, unit or -1), ...]), in order, without gaps. A
                fifth element says in which order memory has them: tensorfiles.Extent.
            units: (unit, planes): what is brought to host memory before it is copied; bits 1 << plane.
            spare: bytes of blocks that may be copied before they are written.
            part, parts: of so many processes that write the same files together this one takes its blocks in turn.
                That of part 0 makes the files: the others begin behind it. save_end() has zeros for others' blocks.
        """
    def save_wait(self, seconds: float) -> tuple[int, bool]:
        """(bytes written, whether all is written and synced)."""
    def save_end(self) -> list[bytes]:
        """Of each file the sums of its blocks, 8 bytes each; what is not over is given up."""
    def wait_saved(self, unit: int) -> None:
        """Until no save has the unit's planes to copy: before they are written from outside."""

    def device_bytes(self) -> int:
        """Device memory of settled units' planes, their slots not counted, and of updates on their way."""
    def begin(self, portions: bool = False, /) -> None:
        """portions: of what is fetched from now on each rank of this machine fetches its own, where all come to it."""
    def acquire(self, unit: int, stream: int) -> int:
        """The slot the unit is in; `stream` (cudaStream_t, 0 on CPU) waits for the copy. ~slot: all ranks of this
        machine have come to it, and each has its own portion there, or will: the others' are to be gathered, and
        `stream` has not waited."""
    def ready(self, slot: int, stream: int) -> None:
        """`stream` waits for the copy into the slot."""
    def gathered(self, number: int, slot: int, beside: int, stream: int) -> None:
        """The collective that fills the slot was put in the stream `beside`; `stream` waits for it."""
    def bounds(self, number: int) -> tuple[int, ...]:
        """[ranks of this machine + 1] Bytes of a slot at which their portions of a unit, or a cut, begin, and the last
        ends."""
    def meeting(self, what: str | None) -> None:
        """This rank comes to a collective of all, and does this there, in words; None: it is over. Steps, collectives,
        spreads and what take() evicts come in one order on all ranks: else all of them fail, and say who did what."""
    def away(self, away: bool) -> None:
        """This rank waits in a collective of all: others that are not there yet do not wait for it to open a window."""
    def met(self) -> None:
        """And that is over: behind it all open windows in step again."""
    def astray(self) -> tuple[int, int, int, int] | None:
        """Of windows that not all ranks of this machine opened: how many, and of the last one a rank that did not, what
        this one opened, and what that one did, -1: nothing. None: there were none."""
    def kick(self, stream: int) -> None: ...
    def find(self, address: int) -> tuple[int, int, int]:
        """(slot, unit, byte offset); slot -1 when no slot holds the address."""
    def schedule(self) -> str: ...
    def stats(self) -> dict[str, int]:
        """Since open: fetches, demand_fetches, rebuilds, gathers (of ranks' portions), h2d_bytes, await_ns, d2h_bytes,
        update_ns (host updates), records_lost (of the timeline), disk_read_bytes, disk_written_bytes, disk_update_ns
        (updates of those), disk_wait_ns (they waited for reads), out_bytes, back_bytes (activations to host memory,
        and back), spill_written_bytes, spill_read_bytes (on to a file, and from there), spill_wait_ns (somebody waited
        for that)."""

    # offload
    def offload(self, unit: int, items: Sequence[tuple[int, ...]], stream: int) -> int:
        """items: (param, address, mode 0 SET / 1 ADD, reread). Returns the ticket. Marks the trace.

        Addresses are of the first element that owned() has.
        """
    def land(self, stream: int) -> None:
        """The stream waits for the copies of all gradients handed over so far; passed() then has them."""
    def passed(self) -> int: ...
    def drain(self) -> None:
        """Host waits for all gradients and all updates."""
    def forget(self, unit: int) -> None: ...

    # activations in host memory, or in a file (csrc/core/swap.h)
    def swap_disk(self, path: str, bytes: int = 0, limit: int = 0, bays: int = 4, threads: int = 16) -> None:
        """Bundles may go to a file in the directory, by way of so many bays of host memory. `bytes` are reserved.
        limit: of the file; 0: none."""
    def swap_file(self) -> tuple[str, int, int] | None:
        """(path, bytes, bytes of bundles that are there now) of the scratch file."""
    def swap_out(self, unit: int, parts: tuple[tuple[int, int], ...], stream: int, to_file: bool = False) -> int:
        """parts: (address, bytes) of dense device memory, until swap_left. The bundle's number, > 0. to_file: waits
        while all bays are on their way there."""
    def swap_left(self, bundle: int, stream: int) -> None:
        """stream waits for the copies out: the sources may be freed in its order."""
    def swap_back(self, bundle: int, parts: tuple[tuple[int, int], ...], stream: int) -> None:
        """As many parts as left; address 0: not wanted. Begins behind what stream was given so far. Waits until a
        bundle in the file was read."""
    def swap_await(self, bundle: int, stream: int) -> None: ...
    def swap_drop(self, bundle: int) -> None: ...
    def swap_bytes(self) -> tuple[int, int]:
        """(mapped, in use): bytes of host memory."""

    # timeline
    def trace(self, on: bool) -> None:
        """Record what each queue does from now on, or no more. Off costs nothing; on, two stamps a record."""
    def timeline(self) -> list[tuple[int, int, int, int, int, int]]:
        """(lane, work, unit or -1, bytes, begin ns, end ns) of work that is over, each once; perf_counter_ns's clock.

        Work that a queue has not done yet comes with a later call. The latest 16,384 are kept.
        """
    def span(self, lane: int, work: int, unit: int, stream: int) -> int | None:
        """Work of a unit begins where the stream is now, on lane "exchange" or "gather"; for `span_end`, once. None:
        nothing is recorded."""
    def span_end(self, span: int | None, nbytes: int, stream: int) -> None:
        """It ends where the stream is now."""
    def step_mark(self, number: int, stream: int) -> None:
        """A step starts at this point of the stream; the record has the number as its unit."""
    def compute_begin(self, unit: int, work: int, stream: int) -> None:
        """What the stream is given from now on is this work (forward, replay, backward) on the unit (-1: none).

        What was open is interrupted, and goes on at compute_end.
        """
    def compute_end(self, stream: int) -> None: ...

    # debug, tests only
    def debug(self, skip: int = 0, poison: bool = False, sync: bool = False) -> None: ...

    # updates
    def adam(self, units: Sequence[tuple[int, Sequence[tuple]]], max_norm: float, stream: int) -> int:
        """Submit one AdamW step; returns its ticket at once.

        units: in forward order, (unit, [(param, lr, beta1, beta2, eps, weight_decay, step, maximize,
        grad_address, grad_dtype, changed, key), ...]). grad_address 0: the GRAD plane, or ACC where a
        16-bit micro-batch sum stands there. Non-zero: host memory kept alive by the caller until the
        unit's update is over. changed: p.grad was written by the user: the GRAD plane (or address)
        counts, not ACC, and its sum of squares is taken anew. max_norm <= 0: no clipping. stream: what
        computes; updates of settled units wait for what it was given so far. key: what stochastic rounding is
        drawn from besides step and element, the parameter's own; 0 where it is left out. Where a unit has several
        owners its portion that is this one's is updated, with the bits that one would give it; grad_address is of the
        whole gradient all the same.
        """
    def norm(self, ticket: int) -> tuple[float, int]:
        """(global norm before clipping, units skipped for non-finite gradients); waits."""

def share() -> int:
    """The descriptor of new memory for an Engine of each rank; os.close() it when all have opened theirs."""
PARCEL_BYTES: int
def relay_next(relay: Any, ms: int, /) -> tuple[bytes, np.ndarray | tuple[int, int] | None, int, bool] | None:
    """The next parcel of what this rank said, its bytes, the rank to whose machine it goes (-1: to all), and whether it
    is the last one. None: nothing was said for so long. Bytes on the device: (address, how many)."""
def relay_place(relay: Any, rank: int, parcel: bytes, /) -> np.ndarray | tuple[int, int] | None:
    """Where bytes of that rank's parcel go; None: it has none."""
def relay_ready(relay: Any, rank: int, parcel: bytes, /) -> bool:
    """Whether its bytes may be written there yet."""
def relay_come(relay: Any, rank: int, parcel: bytes, /) -> None:
    """They are there: this machine hears what the rank said."""
def relay_gone(relay: Any, rank: int, /) -> None:
    """Nothing more will come of that rank."""
def adam_step(tensors: Sequence[tuple], clip: float, threads: int, isa: int) -> None:
    """For tests, benchmarks and parameters that are not streamed: AdamW on host addresses.

    tensors: (dtype, n, hi, lo, master, m, v, grad, grad_dtype, lr, beta1, beta2, eps, weight_decay, step, maximize,
    states, scale, key); the last three may be left out: fp32 states.
    """
def adam_traffic(tensors: Sequence[tuple], threads: int, isa: int) -> None:
    """The reads and writes of adam_step with next to no arithmetic: what memory allows. Leaves planes unfit for use."""
def sumsq(dtype: int, address: int, n: int, threads: int = 1) -> float: ...
def split_join(hi: int, lo: int, out: int, n: int, low: int = 2, /) -> None:
    """fp32 values of split bf16 weights; low: bytes of lo."""
def split_set(p: int, hi: int, lo: int, n: int, low: int = 2, /) -> None: ...
def codes_get(m: int, v: int, scale: int, out_m: int, out_v: int, n: int, /) -> None:
    """fp32 values of moments of 8 bits; addresses."""
def codes_set(in_m: int, in_v: int, m: int, v: int, scale: int, n: int, /) -> None: ...
def open_private(path: str, flags: int) -> int:
    """As os.open; children of fork() do not have the descriptor, nor a share of its lock."""
def close_private(fd: int) -> None:
    """Of open_private, in the process that opened it; else nothing happens."""
def disk_measure(path: str, bytes: int, each: int = 33554432, depth: int = 8, threads: int = 16) -> dict[str, Any]:
    """{"fresh", "write", "read", "both": bytes/s, "direct": bool} of requests of `each` bytes, `depth` under way, over
    a file of `bytes` that is made and removed; fresh: written where nothing was; both: as much read as written."""
def read_file(file: tuple[str, int, list[tuple[int, int, int, int]]], sums: bytes | None, threads: int, /) -> None:
    """Fills the memory of a file's extents; blocks that are read are compared with their sums. Without extents: all."""
def schedule(step: Any, /) -> bytes:
    """The engine's schedule of a step, an object with mt_walk's fields: of each entry kind (FETCH 0, COMPUTE 1,
    RELEASE 2), unit, slot."""

_Walked = tuple[float, float, tuple[float, ...], tuple[float, ...], list[tuple[int, int, float, float]] | None]

def walk(step: Any, schedule: bytes, than: float, events: bool = False, /) -> _Walked | None:
    """A step's (seconds, seconds of its forwards, busy and idle seconds by row, events); None: `than` seconds or more.
    Rows are LANES, and behind them Python. events: (row, unit, or window where windows do it, begin, end)."""
def search_best(search: Any, than: float, most: int, /) -> tuple[int, int, int, bytes, _Walked] | None:
    """Of an object with mt_search's fields (csrc/walk/search.h): row, ring, number of micro-batches, modes and walk of
    the choice of least time below `than`; so many are tried."""
def search_time(search: Any, micro: int, homes: bytes, memory_s: float, ring: int, modes: bytes, than: float, /
                ) -> _Walked | None: ...
def search_memory(search: Any, micro: int, modes: bytes, /) -> tuple[int, ...]:
    """The fields of mt_memory_of."""
def search_needs(search: Any, /) -> tuple[bytes, int, int, int, int, int]:
    """Fewest bytes in a file by row and micro, -1: fits with none; least vram, least host; the row and micro that lack
    the fewest bytes."""
def search_homes(placing: Any, /) -> tuple[bytes, bytes]:
    """Of an object with mt_placing's fields (csrc/walk/search.h): homes by row, and 1 for rows of several
    micro-batches."""
def search_tracks(search: Any, micro: int, asked: int, files: bool, is_long: bool, /) -> tuple[bytes, bytes]:
    """Modes and flags of all tracks, by window."""
def search_track(search: Any, micro: int, track: int, /) -> tuple[int, int, float, bytes, bytes]:
    """Bytes away and in a file, least seconds, levels (mt_level) and their modes."""
def search_bound(search: Any, row: int, ring: int, micro: int, track: int, level: int, /) -> float: ...
def gaps(slices: Any, begin: int, end: int, /) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nanoseconds by lane, of int64s as mt_slice has them (csrc/walk/gaps.h): busy; and compute's idle, the host's own
    last."""
def plan_slots(sizes: list[int], ring: int, /) -> list[int]:
    """Bytes of each slot, largest first, for units of these sizes."""
def register_ops() -> None:
    """Registers torch.ops.megatrain.* through libtorch's stable C shim. torch must be imported."""

def swap_window(window: dict[Any, Any] | None, /) -> dict[Any, Any] | None:
    """This thread's open window, {record: slot tensor}, from now on; returns the one before."""

def enter() -> bool:
    """A streamed forward starts in this thread; True when no other is open."""
def leave() -> None: ...
def inside() -> bool: ...

class WindowDict(dict[str, Any]):
    """`[name]` is the open window's tensor for `self.records[name]`, else `self.outside(record, item)`."""
