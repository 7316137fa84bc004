"""Whether a model fits, asked before anything is allocated.

    asked = Asked(name, groups, dtype, homes, ring, micro, on_cpu)
    sizes = check_device(asked, free, vram)      # slots; refuses
    check_loading(asked, host)                   # before mt.stream takes memory; refuses
    room = Room(asked, host)
    room.states(core)                            # before mt.AdamW does

A limit that the user gave counts instead of what is measured. A refusal has the table of
what is needed and the smallest change that fits; nothing was changed by then.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..base.errors import MegatrainError
from ..base.limits import FILES_LEAST, show_bytes
from ..store.disk import DISK_BUFFERS, buffer_bytes
from .host_memory import limits, own_bytes, shortage
from .refusals import changes_of, refusal, short
from .tally import SETTLED, Asked

OWN = "the module's own, given back"


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
    raise refusal(asked, "device memory", need, most, "vram=" if limit == most else "the device", changes,
                   f"name smaller units; the largest is {_largest(asked)}")


def _largest(asked: Asked) -> str:
    unit = max(asked.units(), key=lambda u: u.weights)
    return f"{unit.name!r} with {show_bytes(unit.weights)}"


def _fewer_homes(asked: Asked, most: int) -> dict[str, str] | None:
    """Homes with as many units on the device as fit; None: not even with none."""
    for tried in asked.moved("vram", "ram"):
        if sum(tried.device().values()) <= most:
            return tried.named()
    return None


# ---- the host ------------------------------------------------------------------------------------

def to_disk(asked: Asked, limit: int | None) -> Asked:
    """`asked` with as many units at home on disk, last ones first, as host memory cannot hold in a training step.
    Their updates have most time before the next forward needs them. limit: the user's."""
    own = sum(own_bytes(asked.groups))
    if limit is None and shortage(sum(asked.host().values()) - own) is None:
        return asked
    found = limits()

    def fits(a: Asked) -> bool:
        if limit is not None:
            return sum(a.planes().values()) <= limit
        return found.short(sum(a.host().values()) - own) is None

    tried = asked
    for tried in () if fits(asked) else asked.moved("ram", "disk"):
        if fits(tried):
            break
    return tried


def settled_last(asked: Asked) -> Iterator[Asked]:
    """`asked` with more and more of the units that live in host memory settled on the device, the last one first."""
    return asked.moved("ram", "vram")


def check_weights(asked: Asked, limit: int | None, free_on_device: int | None) -> None:
    """Host memory for the weights alone, until a plan says what else there will be. Raises: as `check_loading`."""
    if limit is None:
        check_loading(asked, None, False, free_on_device)
    elif (need := asked.planes().get("weights", 0)) > limit:
        raise refusal(asked, "host memory", {"weights": need}, limit, "host=", {"host": need})


def loads(asked: Asked, limit: int | None) -> bool:
    """Is there host memory to take over the weights?"""
    if limit is not None:
        return asked.planes().get("weights", 0) <= limit
    return shortage(sum(loading(asked, own_bytes(asked.groups)).values())) is None


def check_loading(asked: Asked, limit: int | None, whole: bool, free_on_device: int | None = None) -> None:
    """Host memory while the weights are taken over, and, `whole`, of a training step. limit: the user's.

    Raises:
        MegatrainError: there is less; or hardly a file can be opened any more.
    """
    found = limits()
    open_files, most_files = found.files
    if most_files - open_files < FILES_LEAST:
        raise MegatrainError(f"{open_files} files are open and {most_files} may be: raise `ulimit -n` to "
                             f"{open_files + FILES_LEAST}, or close some")
    if limit is not None:
        check_limit(asked, limit, free_on_device)
        return
    own = own_bytes(asked.groups)
    steps = [("to take over the weights", lambda a: loading(a, own))]
    if whole:
        steps.append(("for a training step", lambda a: a.host() | {OWN: -sum(own)}))
    for what, need in steps:
        if (bound := shortage(sum(need(asked).values()))) is not None:
            raise short(asked, need, bound, what, free_on_device)


def check_limit(asked: Asked, limit: int, free_on_device: int | None) -> None:
    """Raises: the planes need more than the limit that the user gave."""
    need = asked.planes()
    if sum(need.values()) > limit:
        changes = {"host": sum(need.values())} | changes_of(asked, lambda a: sum(a.planes().values()) <= limit,
                                                          sum(need.values()) - limit, free_on_device)
        raise refusal(asked, "host memory", need, limit, "host=", changes)


def loading(asked: Asked, own: list[int]) -> dict[str, int]:
    """The most that is held at once beyond what is there: buffers of the disk come first; planes are filled unit by
    unit, each giving back the module's own tensors, and its memory where it goes to the device or the disk; then, on
    the CPU device, come the other slots."""
    at = slots = given = 0
    buffers = {DISK_BUFFERS: buffer_bytes(asked.homes) * asked.fleet.gpus}
    steps: list[dict[str, int]] = []
    for unit, home, n in zip(asked.units(), asked.homes, own):
        settled = home in SETTLED
        slots += unit.weights * (settled and asked.on_cpu)
        steps.append(buffers | {"weights": at + unit.weights, "the device's slots": slots, OWN: -given})
        at += unit.weights * ((not settled or not asked.fleet.alone) and home != "disk+weights")
        given += n
    steps.append(buffers | {"weights": at, "the device's slots": sum(asked.slots()) * asked.on_cpu, OWN: -given})
    return max(steps, key=lambda held: sum(held.values()))
