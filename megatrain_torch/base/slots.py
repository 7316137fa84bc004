"""How many slots of which size: the ring that weights pass through.

Units of similar size share a class: the largest in it is at most twice the smallest, so that a head
five times a layer's size does not make every slot five times too large. A class gets `ring` slots
(two are needed to overlap, three to fetch two ahead), or one per unit where it has fewer. A class
whose units are small altogether gets a slot for each: they stay until they are updated.
"""
from __future__ import annotations

from collections import Counter

SMALL_CLASS_BYTES = 64 << 20


def plan_slots(unit_bytes: list[int], ring: int) -> list[int]:
    """Bytes of each slot, largest first, for units of these sizes."""
    sizes: list[int] = []
    rest = sorted(((b, n) for b, n in Counter(unit_bytes).items() if b > 0), reverse=True)
    while rest:
        if sum(b * n for b, n in rest) <= SMALL_CLASS_BYTES and ring > 2:
            return sizes + [b for b, n in rest for _ in range(n)]
        top = rest[0][0]
        members = [n for b, n in rest if 2 * b >= top]
        sizes.extend([top] * min(sum(members), ring))
        rest = rest[len(members):]
    return sizes
