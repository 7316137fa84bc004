"""Does a model fit? Asked before anything of it is allocated, and again before each plane that comes later.

    asked = Asked(name, groups, dtype, homes, ring, micro, on_cpu)
    asked = check_device(asked, free, vram)      # fewer slots of the device where that is short
    check_loading(asked, host, whole)            # before mt.stream takes over the weights
    room = Room(asked, host)
    room.states(core)                            # before mt.AdamW makes its states

A limit that the user gave counts instead of what is measured. A refusal has the table of what is needed and the
smallest changes that fit, each alone; nothing was changed by then.
"""
from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _core
from ..base.errors import MegatrainError
from ..base.limits import Bound, host_limits, show_bytes, show_size, with_margin
from ..base.units import Group
from ..figures.report import as_text, bytes_table
from ..group.ranks import Ranks, as_one
from ..store.disk import DISK_BUFFERS, file_bytes
from ..store.tensorfiles import Mapped
from .tally import PLANES_OF, SETTLED, Asked

FILES_LEAST = 32            # descriptors that must be left: drivers, libraries, pipes
TRIM_BYTES = 64 << 20       # of the module's own tensors, given back before malloc is asked to give back too
OWN = "the module's own, given back"


# ---- memory of this process ----------------------------------------------------------------------

def shortage(need: int) -> Bound | None:
    """The limit under which so many bytes more do not fit, once dropped models are collected; None: they fit."""
    bound = host_limits().short(need)
    if bound is not None and gc.collect():
        give_back()
        bound = host_limits().short(need)
    return bound


def give_back() -> None:
    """Memory that was freed goes back to the system, also where malloc keeps it for later."""
    ctypes.CDLL(None).malloc_trim(0)


def own_bytes(groups: list[Group]) -> list[int]:
    """Bytes of host memory that each unit's parameters give back when their values are in the store. Weights that were
    mapped, not read, give back none: their memory is the page cache's. A parameter on the meta device counts whole:
    another process has its values, and asks for their memory."""
    storages: dict[int, tuple[int, int]] = {}
    for i, (_, own) in enumerate(groups):
        for _, p in own:
            if p.device.type == "cpu" and not hasattr(p, "_mt"):
                storage = p.untyped_storage()
                storages[storage.data_ptr()] = (i, storage.nbytes())     # gone with the last unit that has it
    found = [sum(p.nbytes for _, p in own if p.is_meta) for _, own in groups]
    mapped = Mapped()
    for address, (i, n) in storages.items():
        found[i] += 0 if mapped.holds(address) else n
    return found


# ---- before mt.stream changes anything -----------------------------------------------------------

def check_device(asked: Asked, free: int | None, limit: int | None) -> Asked:
    """The same, with two slots of a size where more do not fit; refuses what the device, or the user's limit, lacks."""
    most = min((n for n in (free, limit) if n is not None), default=None)
    if most is not None and sum(asked.device().values()) > most:
        asked = dataclasses.replace(asked, ring=2)
    need = asked.device()
    if most is None or sum(need.values()) <= most:
        return asked
    changes: dict[str, Any] = {}
    if limit is not None and (free is None or sum(need.values()) <= free):
        changes["vram"] = sum(need.values())
    if fewer := next((a for a in asked.moved("vram", "ram") if sum(a.device().values()) <= most), None):
        changes["homes"] = fewer.named()
    largest = max(asked.tally().units, key=lambda u: u.weights)
    raise _refusal(asked, "device memory", need, most, "vram=" if limit == most else "the device", changes,
                   f"name smaller units; the largest is {largest.name!r} with {show_bytes(largest.weights)}")


def to_disk(asked: Asked, limit: int | None) -> Asked:
    """Moves units to disk, the last used first, until host memory holds a step. limit: the user's."""
    own = sum(own_bytes(asked.groups))
    if limit is None and shortage(sum(asked.host().values()) - own) is None:
        return asked
    limits, tried = host_limits(), [asked, *asked.moved("ram", "disk")]
    return next((a for a in tried if (limits.short(sum(a.host().values()) - own) is None if limit is None
                                      else sum(a.planes().values()) <= limit)), tried[-1])


def check_weights(asked: Asked, limit: int | None, free_on_device: int | None) -> None:
    """Refuses weights that host memory does not hold; a plan says later what else there will be."""
    if limit is None:
        check_loading(asked, None, False, free_on_device)
    elif (need := asked.planes().get("weights", 0)) > limit:
        raise _refusal(asked, "host memory", {"weights": need}, limit, "host=", {"host": need})


def loads(asked: Asked, limit: int | None) -> bool:
    """Is there host memory to take over the weights?"""
    if limit is not None:
        return asked.planes().get("weights", 0) <= limit
    return shortage(sum(loading(asked, own_bytes(asked.groups)).values())) is None


def check_loading(asked: Asked, limit: int | None, whole: bool, free_on_device: int | None = None) -> None:
    """Refuses weights that memory lacks while they are taken over, or, `whole`, a step; and too many open files."""
    open_files, most_files = host_limits().files
    if most_files - open_files < FILES_LEAST:
        raise MegatrainError(f"{open_files} files are open and {most_files} may be: raise `ulimit -n` to "
                             f"{open_files + FILES_LEAST}, or close some")
    own = own_bytes(asked.groups)
    _check(asked, lambda a: loading(a, own), "to take over the weights", free_on_device, limit)
    if whole and limit is None:
        _check(asked, lambda a: a.host() | {OWN: -sum(own)}, "for a training step", free_on_device)


def loading(asked: Asked, own: list[int]) -> dict[str, int]:
    """The most bytes that are held at once beyond those that are there now. own: see own_bytes. Buffers of the disk
    come first. Planes are filled unit by unit, each giving back the module's own tensors, and its own memory where it
    goes to the device or the disk. On the CPU device the other slots come last."""
    at = slots = given = 0
    buffers = {DISK_BUFFERS: asked.planes().get(DISK_BUFFERS, 0)}
    steps: list[dict[str, int]] = []
    tally = asked.tally()
    for unit, home, n, left in zip(tally.units, asked.homes, own, tally.left.tolist()):
        settled = home in SETTLED
        slots += unit.weights * (settled and asked.on_cpu)
        steps.append(buffers | {"weights": at + unit.weights, "the device's slots": slots, OWN: -given})
        at += left if settled else unit.weights * (home != "disk+weights")
        given += n
    steps.append(buffers | {"weights": at, "the device's slots": asked.device()["slots"] * asked.on_cpu, OWN: -given})
    return max(steps, key=lambda held: sum(held.values()))


# ---- before each plane that comes later ----------------------------------------------------------

class Room:
    """Whether what comes after streaming fits: each method raises MegatrainError, with all as before, where not."""

    def __init__(self, asked: Asked, limit: int | None, ranks: Ranks | None = None) -> None:
        self.asked = asked                      # what the model was streamed with
        self.limit = limit                      # of host memory, the user's; None: what is measured counts
        self.ranks = ranks                      # the processes that have these planes together; None: this one is alone
        self.begun = False                      # room for gradients was asked for, at least

    def let_go(self) -> None:
        """Knows parameters by their form from now on: what is asked later must not keep them alive."""
        forms = [(name, [(n, _form(p, weakref.ref(p))) for n, p in own]) for name, own in self.asked.groups]
        self.asked = dataclasses.replace(self.asked, groups=forms)

    def states(self, core: _core.Engine, together: bool = True) -> None:
        """Asks for AdamW's states and the gradients, before they are made."""
        self._check(core, self.asked, "for gradients and AdamW's states", together=together)
        self.begun = True

    def gradients(self, core: _core.Engine) -> None:
        """Asks for gradients, once, where no mt.AdamW has."""
        self._check(core, self.asked, "for gradients", "gradients")
        self.begun = True

    def sums(self, core: _core.Engine) -> None:
        """Asks for sums of micro-batches, once, when a second one comes."""
        asked = dataclasses.replace(self.asked, micro=2)
        self._check(core, asked, "to add up micro-batches", "sums", "staging")
        self.asked = asked

    def _check(self, core: _core.Engine, asked: Asked, what: str, *planes: str, together: bool = True) -> None:
        """planes: those that come now; none named: all. together: all processes ask, before any makes its part."""
        with as_one(self.ranks if together else None):
            _check(asked, lambda a: self._coming(core, a, planes or a.host()), what, None, self.limit)

    def copies(self, core: _core.Engine) -> None:
        """Asks for copies of states that live on the device; maybe in one process alone, which reads them."""
        if any(home in SETTLED for home in self.asked.homes):
            asked = dataclasses.replace(self.asked, copied=True)
            self._check(core, asked, "for copies of states at home on the device", "weights", "masters", "moments",
                        together=False)

    def weights(self, core: _core.Engine, unit: int) -> None:
        """Asks for a copy of a unit's weights that live on the device or on disk, before the host reads them."""
        if not (need := core.reserved_bytes(unit, _core.PLANES["HI"])):
            return
        free = None
        if self.limit is not None:       # for copies of weights beside those that were read, and all planes
            planes = self.asked.planes()
            free = self.limit - sum(planes.values()) + planes.get("weights", 0) - core.host_bytes(_core.PLANES["HI"])
        self._ask(f"to read {self.asked.groups[unit][0]}", {"weights": need}, "mt.save, which brings units one by one",
                  "an optimizer step and a forward after what was read so far, which give its memory back", free=free)

    def may_save(self, core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> bool:
        """Is there room for mt.save, with `blocks` bytes that are not yet written? held: as for `saving`."""
        return self.limit is not None or shortage(sum(_saved(core, held, blocks).values())) is None

    def saving(self, core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> None:
        """Asks for what mt.save takes while it runs. held: (unit, planes that are saved, a bit each)."""
        self._ask("to save", _saved(core, held, blocks), "a smaller spare=, if one was given", "smaller units")

    def activations(self, core: _core.Engine, nbytes: int, bays: int = 1) -> None:
        """Asks for a window's activations, which are about to wait in host memory, or to pass through bays of it."""
        kept, used = core.swap_bytes()
        nbytes = bays * nbytes
        if used + nbytes > kept:
            nbytes = min(nbytes, used + nbytes - kept) if bays > 1 else nbytes
            self._ask("for activations", {"kept from one window": nbytes},
                      "activations that stay on the device, or are run again", "fewer tokens a micro-batch")

    def _ask(self, what: str, need: dict[str, int], *words: str, free: int | None = None) -> None:
        """Of what comes and goes. free: of a user's limit; None: the limit does not count it."""
        total = sum(need.values())
        bound = shortage(total) if self.limit is None else None
        if free is not None and total > free:
            bound = Bound("host=", self.limit, max(free, 0), "a larger host=")
        if bound is not None:
            raise _short(self.asked, what, need, bound, {}, *words, margin=free is None)

    def _coming(self, core: _core.Engine, asked: Asked, planes: Iterable[str]) -> dict[str, int]:
        """Bytes of these planes that are not made yet. Weights, slots, disk buffers are; staging comes with sums."""
        there = {plane: sum(core.host_bytes(_core.PLANES[p]) for p in own) for plane, own in PLANES_OF.items()}
        there["activations"] = core.swap_bytes()[0]
        need = asked.host()
        made = {"weights": not asked.copied, DISK_BUFFERS: DISK_BUFFERS in self.asked.host(),
                "staging": there["sums"] > 0}
        there |= {what: n for what, n in need.items() if made.get(what) or what.endswith("slots")}
        return {what: max(n - there.get(what, 0), 0) for what, n in need.items() if what in planes}


def _saved(core: _core.Engine, held: list[tuple[int, int]], blocks: int) -> dict[str, int]:
    """Bytes that mt.save takes beside the planes: it brings units at home elsewhere one by one."""
    brought = [sum(core.reserved_bytes(unit, p) for p in _core.PLANES.values() if planes >> p & 1)
               for unit, planes in held]
    return {"copies of a unit": max(brought, default=0), "blocks to be written": blocks}


def _form(p: torch.Tensor, live: weakref.ref[torch.Tensor] | None = None) -> Any:
    """A parameter's form, for unit_bytes. live: the parameter, which may be frozen later; None: it is frozen."""
    with torch.inference_mode(False):        # its requires_grad follows the parameter's, see Asked
        form: Any = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
    form.stands, form.live = getattr(p, "stands", None), live
    return form


# ---- refusing ------------------------------------------------------------------------------------

Need = Callable[[Asked], dict[str, int]]    # bytes beyond what is there now, by what they hold


def _check(asked: Asked, need: Need, what: str, free_on_device: int | None, limit: int | None = None) -> None:
    """Refuses what the machine does not have; with the user's limit, planes that need more than that. free_on_device:
    bytes, where units could be at home there instead."""
    if limit is None:
        if (bound := shortage(sum(need(asked).values()))) is not None:
            raise short(asked, need, bound, what, free_on_device)
    elif (over := sum(asked.planes().values()) - limit) > 0:
        changes = {"host": limit + over} | _changes(asked, lambda a: sum(a.planes().values()) <= limit, over,
                                                    free_on_device)
        raise _refusal(asked, "host memory", asked.planes(), limit, "host=", changes)


def short(asked: Asked, need: Need, bound: Bound, what: str, free_on_device: int | None) -> MegatrainError:
    """The refusal of `need`, which is beyond a bound, with the changes that would fit under it."""
    over = with_margin(sum(need(asked).values())) - bound.free
    changes = _changes(asked, lambda a: with_margin(sum(need(a).values())) <= bound.free, over, free_on_device)
    return _short(asked, what, need(asked), bound, changes | {"host": sum(asked.planes().values())})


def _short(asked: Asked, what: str, need: dict[str, int], bound: Bound, changes: dict[str, Any], *words: str,
           margin: bool = True) -> MegatrainError:
    total = sum(need.values())
    whole = with_margin(total) if margin else total
    return _refusal(asked, f"host memory {what}", need | {"margin": whole - total}, bound.free, f"free: {bound.what}",
                    changes, *words,
                    f"{show_bytes(whole - bound.free)} more under the limit of {bound.what} ({bound.remedy})")


def _changes(asked: Asked, fits: Callable[[Asked], bool], over: int, free_on_device: int | None) -> dict[str, Any]:
    """Arguments of mt.stream, each of which alone makes it fit. over: bytes that are missing."""
    found: dict[str, Any] = {}
    if asked.micro > 1 and fits(dataclasses.replace(asked, micro=1)):
        found["micro"] = 1
    wide = any(p.dtype in (torch.float32, torch.float64) for _, own in asked.groups for _, p in own)
    if wide and asked.dtype is None and fits(dataclasses.replace(asked, dtype=torch.bfloat16)):
        found["dtype"] = torch.bfloat16
    for tried in asked.moved("ram", "vram") if free_on_device is not None else ():
        if sum(tried.device().values()) > free_on_device:
            break
        if fits(tried):
            found["homes"] = tried.named()
            break
    if asked.states == "fp32" and fits(dataclasses.replace(asked, states="8bit")):
        found["states"] = "8bit"
    if filed := next(filter(fits, asked.moved("ram", "disk")), None):
        found["nvme"] = file_bytes(filed)
    units = asked.tally().units
    trained, states = sum(u.trained for u in units), sum(asked.planes().values()) - sum(u.weights for u in units)
    frozen = [(name, [(n, _form(p)) for n, p in own]) for name, own in asked.groups]
    if trained and over < states and fits(dataclasses.replace(asked, groups=frozen)):
        found["frozen"] = math.ceil(over * trained / states)
    return found


def _refusal(asked: Asked, title: str, need: dict[str, int], most: int, whose: str, changes: dict[str, Any],
             *words: str) -> MegatrainError:
    """The exception, with a table of what is needed and what would fit."""
    said = "; ".join([*(_in_words(k, v) for k, v in changes.items()), *words])
    error = MegatrainError(f"{asked.name} does not fit; nothing was changed:\n\n"
                           f"{as_text(bytes_table(title, need, most, f' ({whose})'))}\n\n"
                           f"What would fit, each alone: {said}.")
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
    return f"{name}={value}"
