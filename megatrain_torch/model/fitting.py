"""Does a model fit, as it was chosen to be streamed? Asked before anything of it is changed."""
from __future__ import annotations

import dataclasses
import gc
from typing import NamedTuple

import torch

from ..base.errors import MegatrainError
from ..base.stacks import usual_experts
from ..plans.room import Room, check_device, check_loading, check_weights, loads, to_disk
from ..plans.tally import SETTLED, Asked
from ..store.disk import check_room
from .choices import Choices


class Fit(NamedTuple):
    """
    Attributes:
        asked: with homes for all units. ring: bytes of the slots that units take turns in. room: refuses planes that
            come later.
    """

    asked: Asked
    ring: list[int]
    room: Room


def fitted(asked: Asked, where: torch.device, choices: Choices, host: int | None) -> Fit:
    """Homes, where they are left open. host: limit of host memory.

    Raises:
        MegatrainError: it does not fit; the message says what of it, and what would.
    """
    free = _free(where)
    most = min((n for n in (free, choices.vram) if n is not None), default=None)
    if choices.itself and not choices.whole:
        asked = _provisional(asked, host, most)
    elif choices.disk is not None and "homes" not in choices.options:
        asked = to_disk(asked, host)
    if "experts" not in choices.options:
        asked = _in_pieces(asked, most)
    sizes = check_device(asked, free, choices.vram)
    check_room(asked, choices.disk, choices.spills, choices.spilled)
    if not choices.itself or choices.whole:
        check_loading(asked, host, choices.whole, most)
    return Fit(asked, sizes[:len(sizes) - len(units_at(asked, *SETTLED))], Room(asked, host))


def _in_pieces(asked: Asked, most: int | None) -> Asked:
    """With experts fetched a few at a time, where slots for all of a layer's do not fit, and would else be refused."""
    least = dataclasses.replace(asked, ring=2)
    experts = max([usual_experts(own) for _, own in asked.groups], default=0)
    if most is None or not experts or sum(least.device().values()) <= most:
        return asked
    return dataclasses.replace(asked, experts=experts)


def _provisional(asked: Asked, host: int | None, most: int | None) -> Asked:
    """Until the first plan: weights in host memory; last units' on the device where they are too many. Raises: they fit
    neither way."""
    try:
        check_weights(asked, host, most)
    except MegatrainError:
        for tried in asked.moved("ram", "vram"):     # the last one first
            if most is None or sum(tried.device().values()) > most:
                break
            if loads(tried, host):
                return tried
        raise
    return asked


def _free(where: torch.device) -> int | None:
    """Bytes of the device that may still be taken; None on the CPU device, whose memory is the host's."""
    if where.type != "cuda":
        return None
    gc.collect()                             # models that were dropped, and their slots
    return torch.cuda.mem_get_info(where)[0] + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)


def units_at(asked: Asked, *homes: str) -> list[int]:
    """Numbers of the units that are at home there."""
    return [i for i, home in enumerate(asked.homes) if home in homes]
