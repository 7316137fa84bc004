"""Changes that make a plan fit: one search, told as arguments of mt.plan or as flags of a shell.

    changes, each alone: exact, the least that fits (Refusal.alone)
    changes together, by two and three: which are fastest (Refusal.ways)

The second are timed by a search that walks few choices, so that a refusal takes seconds: what mt.plan finds with them
is as fast or faster.
"""
from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import MegatrainError
from ..base.limits import show_bytes, show_size
from ..base.modes import FORMATS
from ..figures.report import as_text, bytes_table
from .machine import Machine
from .search import WORTH, Problem, solve
from .shapes import Shape

ENDLESS = 1 << 62           # bytes of a disk
GIB = 1 << 30
LARGEST_VRAM = 192 * 10**9  # bytes: of a card that is sold; to ask for more helps nobody
TOGETHER = 3                # changes at a time
SHOWN = 2                   # ways that are told
STATES = ("8bit", "8bit-sr")
ASKED = ("micro", "homes", "activations", "slots")      # None: what is best
SIMULATED = 48              # choices of a way that are timed
MEANINGS = {
    ("states", "8bit"): "AdamW's moments take 8 bits; fp32 masters stay.",
    ("states", "8bit-sr"): "AdamW's moments take 8 bits, and there are no masters: weights are rounded stochastically.",
    ("grads", "none"): "gradients are used as they come and kept nowhere, by mt.AdamW(in_backward=True): one "
                       "micro-batch, no clipping.",
}


class Way(NamedTuple):
    """Arguments of mt.plan that fit together. nvme is {"limit": bytes}, whole GiB. tokens_per_second: at least."""

    changes: dict[str, Any]
    tokens_per_second: float


def in_python(changes: dict[str, Any], line: bool = False) -> str:
    """Changes as whoever calls mt.plan writes them, bytes as sizes that are no smaller; as a part of a sentence or as a
    line to run. Commands have flags for them, and None for what a verb has no flag for."""
    sizes = {name: show_size(changes[name]) for name in ("vram", "host") if name in changes}
    sizes |= {"nvme": {"limit": show_size(changes["nvme"]["limit"])}} if "nvme" in changes else {}
    said = ", ".join(f"{name}={value!r}" for name, value in (changes | sizes).items())
    return f"mt.plan(..., {said})" if line else said


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan, and what would make one."""

    why: str                            # the sentence, and tables of what needs least
    vram: dict[str, int]                # these tables' bytes, by what they hold
    host: dict[str, int]
    sequences: int                      # of a step
    alone: dict[str, Any]               # arguments of mt.plan, each of which alone fits; seq with as many sequences
    ways: tuple[Way, ...]               # sets of arguments, the fastest first
    machine: dict[str, tuple[int, int]]         # "vram", "host": bytes with which a machine would do, and this one's
    frozen: int                         # bytes of host memory for weights alone, where adapters (LoRA) would fit

    def text(self, say: Callable[..., str | None] = in_python) -> str:
        """All of it. say: how changes are written."""
        parts, ways = [self.why], [way for way in self.ways if say(way.changes) is not None][:SHOWN]
        if ways:
            lines = [f"    # {way.tokens_per_second:,.0f} tokens/s\n    {say(way.changes, line=True)}" for way in ways]
            parts.append("\n".join(["What would fit, the fastest first, each as fast as this or faster:", *lines]))
        single = ({name: value} | ({"tokens": value * self.sequences} if name == "seq" else {})
                  for name, value in self.alone.items())
        alone = [changes for changes in single if say(changes) is not None]
        told = [set(way.changes) for way in ways]
        words = [say(changes) for changes in alone if set(changes) not in told]
        words += [f"a machine with {show_bytes(need)} of {'device' if name == 'vram' else 'host'} memory, not "
                  f"{show_bytes(has)}" for name, (need, has) in self.machine.items()]
        if words:
            parts.append(("Alone would fit too: " if ways else "What would fit, each alone: ") + "; ".join(words) + ".")
        if self.frozen:
            parts.append("Adapters (LoRA) on frozen weights have next to no states and no gradients: the weights take "
                         f"{show_bytes(self.frozen)} of host memory.")
        if not (ways or words or self.frozen):
            parts.append("What would fit: nothing less than both more device and more host memory, fewer parameters, "
                         "or shorter sequences beside another change.")
        changed = [item for changes in (*(way.changes for way in ways), *alone) for item in changes.items()]
        meanings = [f"{say(dict([key]))}: {what}" for key, what in MEANINGS.items() if key in changed]
        return "\n\n".join(parts + ["\n".join(meanings)] * bool(meanings))


def refusal(problem: Problem, whole: Machine, shape_with: Callable[[str], Shape]) -> MegatrainError:
    """The exception that says what needs least, and what would fit; `refusal`, `changes` and `ways` of it say the same.
    whole: the machine without limits that were asked for. shape_with: the same model with other states of AdamW."""
    search, wishes, limits, shape = _Search(problem, shape_with), problem.wishes, problem.machine, problem.shape
    if isinstance(wishes.homes, dict):
        return MegatrainError(f"{wishes.tokens:,} tokens of {shape.name} in sequences of {wishes.seq:,} fit in no way "
                              "with units at these homes")
    choice = problem.needs[3]
    vram, host = problem.device_bytes(choice), problem.host_bytes(choice)
    shown = "\n\n".join(as_text(bytes_table(*tier)) for tier in wishes.fleet.tiers(limits, vram, host))
    alone, machine = search.alone(), {}
    for name, has, most in (("vram", whole.vram_bytes, LARGEST_VRAM),
                            ("host", max(whole.host_bytes, limits.host_bytes), ENDLESS)):
        if alone.get(name, 0) > has and (need := alone.pop(name)) <= most:
            machine[name] = need, has
    lacking = [f"{show_bytes(need - has)} of {what} memory" for what, need, has in (
        ("device", sum(vram.values()), limits.vram_bytes), ("host", sum(host.values()), limits.host_bytes))
        if need > has]
    lacks = f": it lacks {' and '.join(lacking)}" if lacking else ""
    frozen = sum(u.weights for u in shape.units) + limits.host_overhead_bytes
    adapters = sum(host.values()) > limits.host_bytes > frozen and shape.trained == shape.parameters
    found = Refusal(f"{shape.name} with {wishes.tokens:,} tokens a step does not fit {limits.name}{lacks}.\nWhat needs "
                    f"least:\n\n{shown}", vram, host, wishes.tokens // wishes.seq, alone, tuple(search.ways()),
                    machine, frozen if adapters else 0)
    error = MegatrainError(found.text())
    error.refusal, error.changes, error.ways = found, found.alone, found.ways
    return error


class _Search:
    """Which changes of a problem's wishes make it fit, and how fast it is then."""

    def __init__(self, problem: Problem, shape_with: Callable[[str], Shape]) -> None:
        self.problem, self.wishes = problem, problem.wishes
        self.shape = functools.cache(lambda states: problem.shape if states == problem.wishes.states
                                     else shape_with(states))

    def tried(self, changes: dict[str, Any], **most: int) -> Problem:
        wishes = dataclasses.replace(self.wishes, **changes)
        return Problem(self.shape(wishes.states), self.problem.machine, wishes, **most)

    def fits(self, changes: dict[str, Any]) -> bool:
        """Exactly. Of gradients that are kept nowhere, with the fewest buffers."""
        w, m, fleet = dataclasses.replace(self.wishes, **changes), self.problem.machine, self.wishes.fleet
        # Planes alone that take more than both memories are known at once, where a search takes part of a second.
        planes = sum(u.weights + u.masters + u.moments + u.gradients * (w.grads == "ram")
                     for u in self.shape(w.states).units)
        there = fleet.machines * (m.host_bytes - m.host_overhead_bytes) \
            + fleet.count * (m.vram_bytes - m.vram_overhead_bytes)
        lent = {"lent": 1} if w.grads == "none" else {}
        return (w.nvme is not None or planes <= there) and self.tried(changes | lent).fits()

    def alone(self) -> dict[str, Any]:
        """Arguments of plan(), each of which alone fits, "vram" and "host" beyond the machine's too."""
        found = {name: need for name, need in zip(("vram", "host"), self.problem.needs[1:3]) if need is not None}
        wishes = self.wishes
        for changes in self.sets(most=1):
            if len(changes) == 1 and "nvme" not in changes and not found.keys() & changes.keys() and self.fits(changes):
                found |= changes
        if found.get("micro", 0) is None:       # more than are asked for, the fewest first; fewer may need no sums
            counts = self.tried({"micro": None}).micro_counts
            found["micro"] = next(k for k in sorted(counts, key=lambda k: (k <= wishes.micro, abs(k - wishes.micro)))
                                  if self.fits({"micro": k}))
        sequences = wishes.tokens // wishes.seq

        def short(seq: int) -> bool:
            return not self.fits({"seq": seq, "tokens": seq * sequences})

        if wishes.seq > 1 and not short(1):     # mostly it is not the tokens
            found["seq"] = 1 + bisect.bisect_left(range(2, wishes.seq), True, key=short)
        # The least of a disk, over what may be chosen with one that has no end.
        tried = self.tried({"nvme": ENDLESS})
        spilled = np.array(tried.needs[0]).reshape(-1, len(tried.micro_counts))
        filed = sum(tried.tally.disk(tried.rows[0]).values())
        disk = np.reshape(filed, (-1, 1)) + spilled * wishes.fleet.gpus
        if least := min(disk[spilled >= 0], default=0):
            found["nvme"] = {"limit": int(least)}
        return found

    def ways(self) -> list[Way]:
        """Sets that fit and have no milder part that does, the fastest first."""
        fitting: list[dict[str, Any]] = []
        for changes in self.sets():
            if not any(_part(part, changes) for part in fitting) and self.fits(changes):
                fitting.append(changes)
        return sorted(filter(None, map(self.timed, fitting)), key=lambda way: -way.tokens_per_second)

    def sets(self, most: int = TOGETHER) -> Iterator[dict[str, Any]]:
        """Sets of one change, of two, of three: states, gradients, a disk, and what was asked for but need not be."""
        w = self.wishes
        grads = {"grads": "none"} | ({"micro": None} if w.micro not in (None, 1) else {})
        groups = [[{"states": s} for s in STATES if FORMATS.index(s) > FORMATS.index(w.states)],
                  [grads] * (w.grads == "ram" and w.fleet.alone), [{"nvme": ENDLESS}],
                  *([{name: None}] for name in ASKED if getattr(w, name) is not None)]
        found: list[dict[str, Any]] = []
        for some in itertools.chain.from_iterable(itertools.combinations(groups, n) for n in range(1, most + 1)):
            for parts in itertools.product(*some):
                changes = {name: value for part in parts for name, value in part.items()}
                if changes not in found:                     # gradients have micro=None with them
                    found.append(changes)
                    yield changes

    def timed(self, changes: dict[str, Any]) -> Way | None:
        """The speed with these changes, and how large a disk they take. None: nothing fits."""
        problem, best = solve(self.tried(changes, most=SIMULATED))
        if best is None:
            return None
        disk = sum(problem.disk_bytes(best[0]).values())
        on_disk = {"nvme": {"limit": -(-disk // GIB) * GIB}} if "nvme" in changes else {}
        least = best[1].seconds * (WORTH if best[0].micro > 1 else 1.0)     # a plan may prefer fewer micro-batches
        return Way(changes | on_disk, problem.wishes.tokens * problem.wishes.fleet.count / least)


def _part(part: dict[str, Any], changes: dict[str, Any]) -> bool:
    """Is `part` some of the changes, or are they smaller ones of the kind?"""
    return part != changes and all(name in changes and (changes[name] == value or (
        name == "states" and FORMATS.index(value) < FORMATS.index(changes[name]))) for name, value in part.items())
