"""How many slots of which size: the ring that weights pass through.

Units of similar size share a class: the largest in it is at most twice the smallest, so that a head
five times a layer's size does not make every slot five times too large. A class gets `ring` slots
(two are needed to overlap, three to fetch two ahead), or one per unit where it has fewer. A class
whose units are small altogether gets a slot for each: they stay until they are updated.
"""
from __future__ import annotations

SMALL_CLASS_BYTES = 64 << 20


def plan_slots(unit_bytes: list[int], ring: int) -> list[int]:
    """Bytes of each slot, largest first, for units of these sizes."""
    sizes: list[int] = []
    rest = sorted((b for b in unit_bytes if b > 0), reverse=True)
    while rest:
        top = rest[0]
        members = [b for b in rest if 2 * b >= top]
        if sum(rest) <= SMALL_CLASS_BYTES and ring > 2:
            members = rest
            sizes.extend(rest)
        else:
            sizes.extend([top] * min(len(members), ring))
        rest = rest[len(members):]
    return sizes
