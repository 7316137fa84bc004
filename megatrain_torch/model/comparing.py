"""Several processes compare homes after some steps, all together: units move on all or on none.

Which lengths came differs from process to process, and the step waits for the slowest. All make as many steps, so they
come to this at the end of the same one.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..plans.planner import Plan
from .lengths import LOOKS, SHORTER
from .passes import Pass

WORTH = 1.03                     # units move where what is there is so many times slower


class Together:
    """When it is time. The same in all processes, so that it is for all or for none.

    Attributes:
        steps: since they have agreed on homes.
    """

    def __init__(self, agreed: bool) -> None:
        self.steps, self._looks = 0, list(LOOKS) if agreed else []

    def due(self) -> bool:
        return bool(self._looks) and self.steps >= self._looks[0]

    def goes_on(self, ready: Sequence[bool | None], samples: Sequence[Sequence[Pass]], planned: int) -> bool:
        """Is it worth while to ask for plans? ready: of each process; False: it never will; None: graphs are alive
        there, and the next step is looked at. samples: passes that came to each. planned: tokens of a pass that homes
        are for."""
        if None in ready and False not in ready:
            return False
        self._looks.pop(0)
        return False not in ready and mean(samples) < SHORTER * planned


def mean(samples: Sequence[Sequence[Pass]]) -> float:
    """Tokens of a pass."""
    return sum(b.tokens for s in samples for b in s) / max(sum(map(len, samples)), 1)


def seconds_of(plans: Sequence[Plan | None]) -> float:
    """Of all of them, infinite where one does not fit."""
    return sum(math.inf if p is None else p.seconds for p in plans)


def fastest(found: Sequence[Sequence[float]]) -> int:
    """found: of each process, seconds with homes as they are, and with others. Which is so much faster for the slowest;
    0: as they are."""
    slowest = [max(times) for times in zip(*found)]
    best = min(range(len(slowest)), key=slowest.__getitem__)
    return best if slowest[best] * WORTH < slowest[0] else 0


def proposed(samples: Sequence[Sequence[Pass]], own: Sequence[Pass], ask: Callable[[Pass], Plan | None]
             ) -> list[tuple[Pass, dict[str, str], int, int]]:
    """Passes whose plans may suit all that came, one of mean length and one of the shorter, and where these have units:
    (pass, homes, slots, experts)."""
    batches = dict.fromkeys([own[0].with_tokens(max(int(mean(samples)), 1)), own[0]])
    plans = [(batch, ask(batch)) for batch in batches]
    return [(batch, p.homes, p.slots, p.experts) for batch, p in plans if p is not None]
