"""What layers keep of passes of several lengths, with units where they are.

Where units live is chosen for one length, since moving them takes seconds; what layers keep is free to change from pass
to pass. So there is a plan for each length that came, all with the same homes: lengths are rounded up to grades, and a
pass runs by the plan of the shortest that covers it.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..base.errors import MegatrainError
from ..plans.planner import Plan
from .passes import Pass, pass_of

LOOKS = (8, 64)                  # steps after a plan at which its homes are compared with others, for what came since
GRADES = 4                       # lengths between one and its double: each is a fifth longer than the one before
RECENT = 64                      # passes that are remembered
SHORTER = 0.9                    # of the length that was planned for: passes that are this much shorter on average


class Lengths:
    """Plans for passes of several lengths, and which lengths came.

    Attributes:
        plans: by the tokens of a pass that each is for; all with the same homes. steps: so many the optimizer has made
            since units live by these.
    """

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.steps, self._looks = 0, list(LOOKS)
        self._base = Pass(1, 1)
        self._came: deque[Pass] = deque(maxlen=RECENT)

    def begin(self, plan: Plan) -> None:
        """Units live by this plan from now on."""
        self.plans, self.steps, self._looks, self._base = {}, 0, list(LOOKS), pass_of(plan)
        self._came.clear()
        self.add(plan)

    def add(self, plan: Plan) -> None:
        self.plans[pass_of(plan).tokens] = plan

    def longest(self) -> int:
        return max(self.plans, default=0)

    def came(self, batch: Pass) -> None:
        self._came.append(batch)

    def grade_above(self, batch: Pass) -> Pass:
        """The shortest grade that has as many tokens."""
        base, at = self._base.tokens, 0
        while base * 2 ** (at / GRADES) < batch.tokens:
            at += 1
        while base * 2 ** ((at - 1) / GRADES) >= batch.tokens:
            at -= 1
        return batch.with_tokens(max(round(base * 2 ** (at / GRADES)), batch.tokens))

    def of(self, batch: Pass, ask: Callable[[Pass], Plan]) -> Plan:
        """The plan that a pass runs by, which is not longer than all there are. `ask` makes one where the shortest that
        there is for such passes is for longer ones, and keeps less than it might."""
        tokens = min(t for t in self.plans if t >= batch.tokens)
        plan, grade = self.plans[tokens], self.grade_above(batch)
        if grade.tokens >= tokens or set(plan.activations.values()) == {"saved"}:
            return plan
        try:
            found = ask(grade)
        except MegatrainError:
            found = plan
        self.plans[grade.tokens] = found = plan if found.disk.keys() - plan.disk.keys() else found
        return found

    # ---- what came ----

    def due(self) -> bool:
        """Is it time to compare homes? So it is some steps after the plan, where passes were much shorter on average
        than the one that units live where they are for. Says so once."""
        if not self._looks or self.steps < self._looks[0]:
            return False
        self._looks.pop(0)
        return sum(b.tokens for b in self._came) < SHORTER * self._base.tokens * len(self._came)

    def sample(self) -> list[Pass]:
        """Four passes that stand for those that came; none: none came."""
        found = sorted(self._came, key=lambda b: b.tokens)
        if not found:
            return []
        return [found[len(found) * part // 8] for part in (1, 3, 5, 7)]

    def typical(self) -> list[Pass]:
        """Passes whose plans may suit all that came: one of mean length, and one of the shorter."""
        mean = sum(b.tokens for b in self._came) // len(self._came)
        short = self.sample()[0]
        return [short.with_tokens(max(mean, 1)), short]
