"""Whether a model fits, asked before anything is allocated.

    asked = Asked(name, groups, dtype, homes, ring, micro, on_cpu)
    sizes = check_device(asked, free, vram)      # slots; refuses
    check_loading(asked, host)                   # before mt.stream takes memory; refuses
    room = Room(asked, host)
    room.states(core)                            # before mt.AdamW does

A limit that the user gave counts instead of what is measured: `host=` is their word. A refusal has the table of
what is needed and the smallest change that fits; nothing was changed by then.
"""
from __future__ import annotations

import bisect
import ctypes
import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import (
    FILES_LEAST,
    Bound,
    host_limits,
    show_bytes,
    show_size,
    with_margin,
    without_margin,
)
from ..base.modes import DISKS
from ..base.units import Group
from ..store.disk import buffer_bytes, file_bytes
from .cost import (
    LENT,
    PLANES_OF,
    THROUGH_BYTES,
)
from .planner import as_text
from .shapes import Unit, unit_bytes
from .tally import DISK_BUFFERS, SETTLED, Tally

_OWN = "the module's own, given back"
TRIM_BYTES = 64 << 20       # of the module's own tensors, given back before malloc is asked to give back too


@dataclass(frozen=True)
class Asked:
    """What mt.stream was asked for, as far as memory depends on it.

    Attributes:
        name: of the model. groups, dtype: its units, and the type they are converted to.
        homes: by unit, "ram", "vram", "arrive", "through", "disk" or "disk+weights".
        ring: slots of a size. micro: micro-batches of a step, as far as known.
        on_cpu: the "device" is the CPU, so its memory is the host's.
        besides: what a plan puts in host memory beside planes, by what it is.
        keeps: gradients are kept where their units are at home; else they pass through a few buffers there.
        states: how AdamW's are kept.
        lent: such buffers of a size.
        copied: those that live on the device, and masters there, have copies in host memory, for a state_dict.
        known: units by what their bytes depend on; the same dict in all that is made from this by `replace`.
    """

    name: str
    groups: list[Group]
    dtype: torch.dtype | None
    homes: tuple[str, ...]
    ring: int = 3
    micro: int = 1
    on_cpu: bool = False
    besides: tuple[tuple[str, int], ...] = ()
    keeps: bool = True
    states: str = "fp32"
    lent: int = LENT
    copied: bool = False
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def units(self) -> list[Unit]:
        """As the parameters are now: some may have been frozen since."""
        key = self._key()
        if key not in self.known:
            self.known[key] = [unit_bytes(name, own, self.dtype, self.states) for name, own in self.groups]
        return self.known[key]

    def _key(self) -> tuple[Any, ...]:
        return self.dtype, self.states, *(p.requires_grad for _, own in self.groups for _, p in own)

    def on_disk(self) -> bool:
        """Some unit's states are."""
        return any(home in DISKS for home in self.homes)

    def tally(self) -> Tally:
        key = "tally", self.keeps, self.lent, *self._key()
        if key not in self.known:
            self.known[key] = Tally(self.units(), self.keeps, self.lent)
        return self.known[key]

    def slots(self) -> list[int]:
        """Bytes of each slot; those of units at home on the device come last."""
        settled = [u.weights for u, home in zip(self.units(), self.homes) if home in SETTLED]
        return self.tally().slots(self.homes, self.ring) + settled

    def device(self) -> dict[str, int]:
        """Bytes of device memory by what they hold, activations left out."""
        found = {"slots": sum(self.slots())}
        at_home = self.tally().at_home(self.homes, self.micro)
        found |= {f"at home: {plane}": n for plane, n in at_home.items() if plane != "weights"}
        if "through" in self.homes:
            found["updates through the device"] = THROUGH_BYTES
        return found | ({"states that arrive": self.tally().visiting(self.homes)} if "arrive" in self.homes else {})

    def at_home(self) -> int:
        """Bytes of device memory that the store takes for units at home there, beside their slots."""
        return sum(n for what, n in self.device().items() if what.startswith("at home"))

    def host(self) -> dict[str, int]:
        """Bytes of host memory by plane, AdamW's states counted in; on the CPU device its memory too."""
        found = self.tally().host(self.homes, self.micro, self.copied)
        found |= {what: n for what, n in self.besides if what not in found}
        return found | ({f"the device's {what}": n for what, n in self.device().items()} if self.on_cpu else {})


Need = Callable[[Asked], dict[str, int]]


# ---- the device ----------------------------------------------------------------------------------

def check_device(asked: Asked, free: int | None, limit: int | None) -> list[int]:
    """Slot sizes; two of each, where more do not fit. free: bytes there are, None: not known. limit: the user's.

    Raises:
        MegatrainError: the weights in flight and what is at home there need more.
    """
    most = min((n for n in (free, limit) if n is not None), default=None)
    if most is not None and sum(asked.device().values()) > most:
        asked = dataclasses.replace(asked, ring=2)
    need = asked.device()
    if most is None or sum(need.values()) <= most:
        return asked.slots()
    changes: dict[str, Any] = {}
    if limit is not None and (free is None or sum(need.values()) <= free):
        changes["vram"] = sum(need.values())
    if homes := _fewer_homes(asked, most):
        changes["homes"] = homes
    raise _refusal(asked, "device memory", need, most, "vram=" if limit == most else "the device", changes,
                   f"name smaller units; the largest is {_largest(asked)}")


def _largest(asked: Asked) -> str:
    unit = max(asked.units(), key=lambda u: u.weights)
    return f"{unit.name!r} with {show_bytes(unit.weights)}"


def _fewer_homes(asked: Asked, most: int) -> dict[str, str] | None:
    """Homes with as many units on the device as fit; None: not even with none."""
    for tried in _homes(asked, "vram", "ram"):
        if sum(tried.device().values()) <= most:
            return _named(tried)
    return None


def _homes(asked: Asked, before: str, after: str) -> Iterator[Asked]:
    """The same with the last one, two, ... of the units at home in `before` at home in `after`."""
    homes = list(asked.homes)
    for i in reversed([i for i, home in enumerate(homes) if home == before]):
        homes[i] = after
        yield dataclasses.replace(asked, homes=tuple(homes))


def _named(asked: Asked) -> dict[str, str]:
    return {name: home for (name, _), home in zip(asked.groups, asked.homes) if home != "ram"}


# ---- the host ------------------------------------------------------------------------------------

def to_disk(asked: Asked, limit: int | None) -> Asked:
    """The same with as many units at home on disk, last ones first, as host memory cannot hold in a training step.
    Their updates have most time before the next forward needs them. limit: the user's."""
    own = sum(own_bytes(asked.groups))
    if limit is None and _shortage(sum(asked.host().values()) - own) is None:
        return asked
    found = host_limits()

    def fits(a: Asked) -> bool:
        if limit is not None:
            return sum(_planes(a).values()) <= limit
        return found.short(sum(a.host().values()) - own) is None

    tried = asked
    for tried in () if fits(asked) else _homes(asked, "ram", "disk"):
        if fits(tried):
            break
    return tried


def settled_last(asked: Asked) -> Iterator[Asked]:
    """The same with the last one, two, ... of the units that live in host memory on the device."""
    return _homes(asked, "ram", "vram")


def check_weights(asked: Asked, limit: int | None, free_on_device: int | None) -> None:
    """Host memory for the weights alone, until a plan says what else there will be. Raises: as `check_loading`."""
    if limit is None:
        check_loading(asked, None, False, free_on_device)
    elif (need := _planes(asked).get("weights", 0)) > limit:
        raise _refusal(asked, "host memory", {"weights": need}, limit, "host=", {"host": need})


def loads(asked: Asked, limit: int | None) -> bool:
    """Is there host memory to take over the weights?"""
    if limit is not None:
        return _planes(asked).get("weights", 0) <= limit
    return _shortage(sum(_loading(asked, own_bytes(asked.groups)).values())) is None


def check_loading(asked: Asked, limit: int | None, whole: bool, free_on_device: int | None = None) -> None:
    """Host memory while the weights are taken over, and, `whole`, of a training step. limit: the user's.

    Raises:
        MegatrainError: there is less; or hardly a file can be opened any more.
    """
    found = host_limits()
    open_files, most_files = found.files
    if most_files - open_files < FILES_LEAST:
        raise MegatrainError(f"{open_files} files are open and {most_files} may be: raise `ulimit -n` to "
                             f"{open_files + FILES_LEAST}, or close some")
    if limit is not None:
        _check_word(asked, limit, free_on_device)
        return
    own = own_bytes(asked.groups)
    steps = [("to take over the weights", lambda a: _loading(a, own))]
    if whole:
        steps.append(("for a training step", lambda a: a.host() | {_OWN: -sum(own)}))
    for what, need in steps:
        if (bound := _shortage(sum(need(asked).values()))) is not None:
            raise _short(asked, need, bound, what, free_on_device)


def _check_word(asked: Asked, limit: int, free_on_device: int | None) -> None:
    """The limit that the user gave, against all planes."""
    need = _planes(asked)
    if sum(need.values()) > limit:
        changes = {"host": sum(need.values())} | _changes(asked, lambda a: sum(_planes(a).values()) <= limit,
                                                          sum(need.values()) - limit, free_on_device)
        raise _refusal(asked, "host memory", need, limit, "host=", changes)


def _planes(asked: Asked) -> dict[str, int]:
    return dataclasses.replace(asked, on_cpu=False).host()


def _loading(asked: Asked, own: list[int]) -> dict[str, int]:
    """The most that is held at once beyond what is there: buffers of the disk come first; planes are filled unit by
    unit, each giving back the module's own tensors, and its memory where it goes to the device or the disk; then, on
    the CPU device, come the other slots."""
    at = slots = given = 0
    buffers = {DISK_BUFFERS: buffer_bytes(asked.homes)}
    steps: list[dict[str, int]] = []
    for unit, home, n in zip(asked.units(), asked.homes, own):
        settled = home in SETTLED
        slots += unit.weights * (settled and asked.on_cpu)
        steps.append(buffers | {"weights": at + unit.weights, "the device's slots": slots, _OWN: -given})
        at += unit.weights * (not settled and home != "disk+weights")
        given += n
    steps.append(buffers | {"weights": at, "the device's slots": sum(asked.slots()) * asked.on_cpu, _OWN: -given})
    return max(steps, key=lambda held: sum(held.values()))


def own_bytes(groups: list[Group]) -> list[int]:
    """Bytes of host memory that each unit's parameters give back when their values are in the store.

    Memory of a file (weights that were mapped, not read) is the page cache's, so it is none.
    """
    storages: dict[int, tuple[int, int]] = {}
    for i, (_, own) in enumerate(groups):
        for _, p in own:
            if p.device.type == "cpu" and not hasattr(p, "_mt"):
                storage = p.untyped_storage()
                storages[storage.data_ptr()] = (i, storage.nbytes())     # gone with the last unit that has it
    files = _FileMaps()
    found = [0] * len(groups)
    for address, (i, n) in storages.items():
        found[i] += 0 if files.has(address) else n
    return found


class _FileMaps:
    """Which addresses of this process are a file's."""

    def __init__(self) -> None:
        self.ranges = []
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            span, _, _, _, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(x, 16) for x in span.split("-"))
            if inode != "0":
                self.ranges.append((begin, end))

    def has(self, address: int) -> bool:
        at = bisect.bisect_right(self.ranges, (address, math.inf)) - 1
        return at >= 0 and address < self.ranges[at][1]


def give_back() -> None:
    """Memory that was freed goes back to the system, also where malloc keeps it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Room:
    """Whether what a streamed model takes later is there: planes are made when they are first needed."""

    def __init__(self, asked: Asked, limit: int | None) -> None:
        self.asked, self.limit = asked, limit
        self.begun = False                       # room for gradients was asked for, at least
        self.summed = asked.micro > 1

    def let_go(self) -> None:
        """Knows parameters by their form from now on: what is asked later must not keep them alive."""
        forms = [(name, [(n, _Form(p)) for n, p in own]) for name, own in self.asked.groups]
        self.asked = dataclasses.replace(self.asked, groups=forms)

    def states(self, core: _core.Engine) -> None:
        """Of AdamW and the gradients, before they are made.

        Raises:
            MegatrainError: there is less; what was allocated is as before.
        """
        self._check(core, self.asked, "for gradients and AdamW's states")
        self.begun = True

    def gradients(self, core: _core.Engine) -> None:
        """Of gradients, where no mt.AdamW has asked; once. Raises: as `states`."""
        self._check(core, self.asked, "for gradients", "gradients")
        self.begun = True

    def sums(self, core: _core.Engine) -> None:
        """Of a second micro-batch; once. Raises: as `states`."""
        asked = dataclasses.replace(self.asked, micro=2)
        self._check(core, asked, "to add up micro-batches", "sums", "staging")
        self.asked, self.summed = asked, True

    def copies(self, core: _core.Engine) -> None:
        """States that live on the device are about to be copied to the host. Raises: as `states`."""
        if any(home in SETTLED for home in self.asked.homes):
            asked = dataclasses.replace(self.asked, copied=True)
            self._check(core, asked, "for copies of states at home on the device", "weights", "masters", "moments")

    def weights(self, core: _core.Engine, unit: int) -> None:
        """Of a unit that lives on the device or on disk, before they are read on the host. Raises: as `states`."""
        need = core.reserved_bytes(unit, _core.PLANES["HI"])
        if not need:
            return
        if (bound := self._bound(core, need)) is not None:
            table = {"weights": need} | ({} if self.limit else {"margin": with_margin(need) - need})
            raise _refusal(self.asked, f"host memory to read {self.asked.groups[unit][0]}", table, bound.free,
                           f"free: {bound.what}", {}, "mt.save, which brings units one by one",
                           "an optimizer step and a forward after what was read so far, which give its memory back",
                           f"{show_bytes(sum(table.values()) - bound.free)} more ({bound.remedy})")

    def may_save(self, core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> bool:
        """Is there room for mt.save with so many bytes of blocks that are not yet written? held: as `saving`."""
        return self.limit is not None or _shortage(sum(_saved(core, held, blocks).values())) is None

    def saving(self, core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> None:
        """What mt.save takes while it runs. held: (unit, planes that are saved, a bit each). Raises: as `states`."""
        need = _saved(core, held, blocks)
        if self.limit is None and (bound := _shortage(sum(need.values()))) is not None:
            margin = with_margin(sum(need.values())) - sum(need.values())
            over = sum(need.values()) + margin - bound.free
            raise _refusal(self.asked, "host memory to save", need | {"margin": margin}, bound.free,
                           f"free: {bound.what}", {}, f"{show_bytes(over)} more ({bound.remedy})",
                           "a smaller spare=, if one was given", "smaller units")

    def _bound(self, core: _core.Engine, need: int) -> Bound | None:
        """What stands against so many bytes of copies of weights beside those that were read, and all planes."""
        if self.limit is None:
            return _shortage(need)
        planes = _planes(self.asked)
        free = self.limit - sum(planes.values()) + planes.get("weights", 0) - core.host_bytes(_core.PLANES["HI"])
        return Bound("host=", self.limit, max(free, 0), "a larger host=") if need > free else None

    def activations(self, core: _core.Engine, nbytes: int, blocks: int = 1) -> None:
        """So many bytes of one window are about to wait in host memory; or to pass through so many blocks of it.
        Raises: as `states`."""
        kept, used = core.swap_bytes()
        nbytes = blocks * nbytes
        if self.limit is not None or used + nbytes <= kept:
            return
        nbytes = min(nbytes, used + nbytes - kept) if blocks > 1 else nbytes
        if (bound := _shortage(nbytes)) is not None:
            need = {"kept from one window": nbytes, "margin": with_margin(nbytes) - nbytes}
            raise _refusal(self.asked, "host memory for activations", need, bound.free, f"free: {bound.what}", {},
                           "activations that stay on the device, or are run again", "fewer tokens a micro-batch",
                           f"{show_bytes(with_margin(nbytes) - bound.free)} more ({bound.remedy})")

    def spare(self, core: _core.Engine) -> int:
        """Bytes of host memory that no plane will take, now or later: free, or in blocks for activations already."""
        if self.limit is not None:
            return self.limit - sum(self.asked.host().values())
        coming = sum(self._coming(core, self.asked, PLANES_OF).values())
        return without_margin(host_limits().tightest().free) - coming + core.swap_bytes()[0]

    def _check(self, core: _core.Engine, asked: Asked, what: str, *planes: str) -> None:
        """planes: those that come now; none named: all."""
        if self.limit is not None:
            _check_word(asked, self.limit, None)
            return

        def need(a: Asked) -> dict[str, int]:
            return self._coming(core, a, planes or a.host())

        if (bound := _shortage(sum(need(asked).values()))) is not None:
            raise _short(asked, need, bound, what, None)

    def _coming(self, core: _core.Engine, asked: Asked, planes: Iterable[str]) -> dict[str, int]:
        """Bytes of these that are not there yet. Weights and slots are, and the buffers of a disk that there is;
        staging comes with the first sums."""
        there = {plane: sum(core.host_bytes(_core.PLANES[p]) for p in own) for plane, own in PLANES_OF.items()}
        there["activations"] = core.swap_bytes()[0]
        need = asked.host()
        made = {"weights": not asked.copied, DISK_BUFFERS: DISK_BUFFERS in self.asked.host(),
                "staging": there["sums"] > 0}
        there |= {what: n for what, n in need.items() if made.get(what) or what.endswith("slots")}
        return {what: max(n - there.get(what, 0), 0) for what, n in need.items() if what in planes}


def _saved(core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> dict[str, int]:
    """Bytes of host memory beside the planes that are there: units at home elsewhere are brought one by one."""
    brought = [sum(core.reserved_bytes(unit, p) for p in _core.PLANES.values() if planes >> p & 1)
               for unit, planes in held]
    return {"copies of a unit": max(brought, default=0), "blocks to be written": blocks}


def _shortage(need: int) -> Bound | None:
    """What stands against so many bytes more, when models that were dropped are gone: where a cycle of the user's has
    one, Python's collector, which counts objects, not bytes, may not come by for long."""
    bound = host_limits().short(need)
    if bound is not None and gc.collect():
        give_back()
        bound = host_limits().short(need)
    return bound


# ---- refusing ------------------------------------------------------------------------------------

def _short(asked: Asked, need: Need, bound: Bound, what: str, free_on_device: int | None) -> MegatrainError:
    """need: bytes beyond what is there now, `what` for."""
    total = sum(need(asked).values())
    over = with_margin(total) - bound.free
    changes = _changes(asked, lambda a: with_margin(sum(need(a).values())) <= bound.free, over, free_on_device)
    words = f"{show_bytes(over)} more under the limit of {bound.what} ({bound.remedy})"
    return _refusal(asked, f"host memory {what}", need(asked) | {"margin": with_margin(total) - total}, bound.free,
                    f"free: {bound.what}", changes | {"host": sum(_planes(asked).values())}, words)


def _changes(asked: Asked, fits: Callable[[Asked], bool], over: int, free_on_device: int | None) -> dict[str, Any]:
    """Arguments of mt.stream, each of which alone makes it fit."""
    found: dict[str, Any] = {}
    if asked.micro > 1 and fits(dataclasses.replace(asked, micro=1)):
        found["micro"] = 1
    wide = any(p.dtype in (torch.float32, torch.float64) for _, own in asked.groups for _, p in own)
    if wide and asked.dtype is None and fits(dataclasses.replace(asked, dtype=torch.bfloat16)):
        found["dtype"] = torch.bfloat16
    for tried in _homes(asked, "ram", "vram") if free_on_device is not None else ():
        if sum(tried.device().values()) > free_on_device:
            break
        if fits(tried):
            found["homes"] = _named(tried)
            break
    if asked.states == "fp32" and fits(dataclasses.replace(asked, states="8bit")):
        found["states"] = "8bit"
    for tried in _homes(asked, "ram", "disk"):
        if fits(tried):
            found["nvme"] = file_bytes(tried)
            break
    trained = sum(u.trained for u in asked.units())
    states = sum(_planes(asked).values()) - sum(u.weights for u in asked.units())
    frozen = [(name, [(n, _Frozen(p)) for n, p in own]) for name, own in asked.groups]
    if trained and over < states and fits(dataclasses.replace(asked, groups=frozen)):
        found["frozen"] = math.ceil(over * trained / states)
    return found


class _Form:
    """A parameter as unit_bytes sees it, known weakly: whether it is trained may change."""

    def __init__(self, p: torch.Tensor) -> None:
        self.dtype, self._numel, self._floating, self._param = (
            p.dtype, p.numel(), p.is_floating_point(), weakref.ref(p))

    def numel(self) -> int:
        return self._numel

    def is_floating_point(self) -> bool:
        return self._floating

    @property
    def requires_grad(self) -> bool:
        param = self._param()
        with torch._C.DisableTorchFunctionSubclass():
            return param is not None and param.requires_grad


class _Frozen:
    """A parameter as unit_bytes sees it, if it were not trained."""

    requires_grad = False

    def __init__(self, p: Any) -> None:
        self.dtype, self.numel, self.is_floating_point = p.dtype, p.numel, p.is_floating_point


def _refusal(asked: Asked, title: str, need: dict[str, int], most: int, whose: str, changes: dict[str, Any],
             *words: str) -> MegatrainError:
    """The table and what would fit."""
    rows: list[tuple[str, ...]] = [(title, "bytes", "")]
    rows += [(plane, show_bytes(n), "") for plane, n in need.items() if n]
    total = sum(need.values())
    rows.append(("in all", show_bytes(total), f"of {show_bytes(most)} ({whose})"))
    said = [*(_in_words(k, v) for k, v in changes.items()), *words]
    error = MegatrainError("\n".join([f"{asked.name} does not fit; nothing was changed:", "", as_text(("", rows)), "",
                                      "What would fit, each alone: " + "; ".join(said) + "."]))
    error.changes = changes
    return error


def _in_words(name: str, value: Any) -> str:
    if name in ("vram", "host"):
        return f"{name}={show_size(value)!r}, if so much is there"
    if name == "states":
        return f"states={value!r}, of mt.AdamW or, where host= is given, in mt.stream's plan"
    if name == "nvme":
        return f"nvme= a directory with {show_size(value)} free"
    if name == "frozen":
        return f"{value:,} parameters less to train (freeze some, or LoRA)"
    if name == "homes":
        at = sum(home == "vram" for home in value.values())
        return f"{at} units at home in VRAM: plan={{'homes': ...}} as in this exception's `changes`"
    if name == "dtype":
        return f"dtype={value}"
    return f"{name}={value}"
