"""Changes that make a plan fit: one search, told as arguments of mt.plan or as flags of a shell.

    changes, each alone: exact, the least that fits (Refusal.alone)
    changes together, by two and three: which are fastest (Refusal.ways)

The second are timed by a search with fewer homes and slots than a plan has, so that a refusal takes seconds: what
mt.plan finds with them is as fast or faster.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..base.limits import show_bytes, show_size
from ..base.modes import FORMATS
from .machine import Machine
from .search import Choice, Problem, Timing, Wishes
from .shapes import Shape
from .tally import LENT

ENDLESS = 1 << 62           # bytes of a disk
GIB = 1 << 30
LARGEST_VRAM = 192 * 10**9  # bytes: of a card that is sold; to ask for more helps nobody
TOGETHER = 3                # changes at a time
SHOWN = 2                   # ways that are told
WORTH = 0.95                # a change more is told where the way without it has less than this share of its speed
STATES = ("8bit", "8bit-sr")
ASKED = ("micro", "homes", "activations", "slots")      # None: what is best
FIRM = ("grads", "seq", "tokens", "micro")              # of which none only ever helps
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


class Python:
    """How changes are written for whoever calls mt.plan; commands have a language of flags with the same methods."""

    @staticmethod
    def knows(changes: dict[str, Any]) -> bool:
        """Can it be said?"""
        return True

    @staticmethod
    def alone(changes: dict[str, Any]) -> str:
        """As a part of a sentence."""
        return ", ".join(f"{name}={typed(name, value)!r}" for name, value in changes.items())

    @staticmethod
    def whole(changes: dict[str, Any]) -> str:
        """As a line to run."""
        return f"mt.plan(..., {Python.alone(changes)})"


def typed(name: str, value: Any) -> Any:
    """An argument as people type it: bytes as a size that is no smaller."""
    if name == "nvme":
        return {"limit": show_size(value["limit"])}
    return show_size(value) if name in ("vram", "host") else value


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan, and what would make one.

    Attributes:
        why: the sentence, and tables of what needs least. vram, host: these tables' bytes, by what they hold.
        sequences: of a step.
        alone: arguments of mt.plan, each of which alone fits (seq with as many sequences). ways: sets of them, the
            fastest first.
        machine: "vram", "host": bytes with which a machine would do, and what this one has.
        frozen: bytes of host memory for weights alone, where that fits: what adapters (LoRA) leave.
    """

    why: str
    vram: dict[str, int]
    host: dict[str, int]
    sequences: int
    alone: dict[str, Any]
    ways: tuple[Way, ...]
    machine: dict[str, tuple[int, int]]
    frozen: int

    def text(self, say: Any = Python) -> str:
        """All of it. say: a language, as Python is one."""
        parts, ways = [self.why], [way for way in self.ways if say.knows(way.changes)][:SHOWN]
        if ways:
            lines = [f"    # {way.tokens_per_second:,.0f} tokens/s\n    {say.whole(way.changes)}" for way in ways]
            parts.append("\n".join(["What would fit, the fastest first, each as fast as this or faster:", *lines]))
        single = ({name: value} | ({"tokens": value * self.sequences} if name == "seq" else {})
                  for name, value in self.alone.items())
        alone = [changes for changes in single if say.knows(changes)]
        told = [set(way.changes) for way in ways]
        words = [say.alone(changes) for changes in alone if set(changes) not in told]
        words += [f"a machine with {show_bytes(need)} of {'device' if name == 'vram' else 'host'} memory, not "
                  f"{show_bytes(has)}" for name, (need, has) in self.machine.items()]
        if words:
            parts.append(("Alone would fit too: " if ways else "What would fit, each alone: ")
                         + "; ".join(words) + ".")
        if self.frozen:
            parts.append("Adapters (LoRA) on frozen weights have next to no states and no gradients: the weights take "
                         f"{show_bytes(self.frozen)} of host memory.")
        if not (ways or words or self.frozen):
            parts.append("What would fit: nothing less than both more device and more host memory, or fewer "
                         "parameters.")
        changed = [item for changes in (*(way.changes for way in ways), *alone) for item in changes.items()]
        meanings = [f"{say.alone(dict([key]))}: {what}" for key, what in MEANINGS.items() if key in changed]
        return "\n\n".join(parts + ["\n".join(meanings)] * bool(meanings))


Tables = Callable[[Problem, Choice], tuple[dict[str, int], dict[str, int], str]]


def refusal(problem: Problem, whole: Machine, shape_with: Callable[[str], Shape], tables: Tables) -> Refusal:
    """whole: the machine without limits that were asked for. shape_with: the same model with other states of AdamW.
    tables: bytes of a choice on the device and in host memory, and both as text."""
    search, wishes, limits = _Search(problem, shape_with), problem.wishes, problem.machine
    vram, host, shown = tables(problem, problem.needs[3])
    alone, machine = search.alone(), {}
    for name, has in (("vram", whole.vram_bytes), ("host", max(whole.host_bytes, limits.host_bytes))):
        if alone.get(name, 0) > has:
            machine[name] = (alone.pop(name), has)
    if "vram" in machine and machine["vram"][0] > LARGEST_VRAM:
        del machine["vram"]
    lacking = [f"{show_bytes(need - has)} of {what} memory" for what, need, has in (
        ("device", sum(vram.values()), limits.vram_bytes), ("host", sum(host.values()), limits.host_bytes))
        if need > has]
    lacks = f": it lacks {' and '.join(lacking)}" if lacking else ""
    shape = problem.shape
    frozen = sum(u.weights for u in shape.units) + limits.host_overhead_bytes
    adapters = sum(host.values()) > limits.host_bytes > frozen and shape.trained == shape.parameters
    return Refusal(f"{shape.name} with {wishes.tokens:,} tokens a step does not fit {limits.name}{lacks}.\nWhat needs "
                   f"least:\n\n{shown}", vram, host, wishes.tokens // wishes.seq, alone, tuple(search.ways()), machine,
                   frozen if adapters else 0)


# A plan's search with fewer homes and rings, which finds plans some percent slower in a tenth of the time; then all
# that a plan may choose, for what fits by a hair. Both with few simulations.
QUICK, FEW = {"few": True, "most": SIMULATED}, {"most": SIMULATED}


class _Search:
    """Which changes of a problem's wishes make it fit, and how fast it is then."""

    def __init__(self, problem: Problem, shape_with: Callable[[str], Shape]) -> None:
        self.problem, self.shape_with = problem, shape_with
        self.machine, self.wishes = problem.machine, problem.wishes
        self.shapes = {self.wishes.states: problem.shape}
        self.known: list[tuple[dict[str, Any], bool]] = [({}, False)]
        # All that only ever helps: where this does not fit, no part of it does.
        self.helps = {"nvme": ENDLESS, "states": max(STATES[-1], self.wishes.states, key=FORMATS.index)} | \
            {name: None for name in ASKED if name != "micro" and getattr(self.wishes, name) is not None}
        self.smaller = [s for s in STATES if FORMATS.index(s) > FORMATS.index(self.wishes.states)]
        self.keeps = self.wishes.grads == "ram" and self.wishes.fleet.alone    # gradients, and need not

    # ---- alone ----

    def alone(self) -> dict[str, Any]:
        """Arguments of plan(), each of which alone makes the problem fit; "vram" and "host" even where the machine has
        not so much. seq: with as many sequences."""
        found = {name: need for name, need in zip(("vram", "host"), self.problem.needs[1:3]) if need is not None}
        wishes = self.wishes
        for name in ASKED:
            if getattr(wishes, name) is not None and self.fits({name: None}):
                found[name] = None
        if found.get("micro", 0) is None:       # more than are asked for, the fewest first; fewer may need no sums
            free = Problem(self.problem.shape, self.machine, dataclasses.replace(wishes, micro=None))
            counts = sorted(free.micro_counts, key=lambda k: (k <= wishes.micro, abs(k - wishes.micro)))
            found["micro"] = next(k for k in counts if self.fits({"micro": k}))
        if self.keeps and wishes.micro in (None, 1) and self.fits({"grads": "none"}):
            found["grads"] = "none"
        if states := next((s for s in self.smaller if self.fits({"states": s})), None):
            found["states"] = states
        sequences = wishes.tokens // wishes.seq

        def fits(seq: int) -> bool:
            return self.fits({"seq": seq, "tokens": seq * sequences})

        if wishes.seq > 1 and fits(1):          # mostly it is not the tokens
            found["seq"] = _last(fits, wishes.seq)
        if nvme := self.least_disk():
            found["nvme"] = {"limit": nvme}
        return found

    def least_disk(self) -> int:
        """Bytes of a disk with which it fits; 0: with none."""
        tried = self.tried({"nvme": ENDLESS})
        spilled, counts = iter(tried.needs[0]), tried.micro_counts
        return min((sum(tried.disk_bytes(row.homes, k).values()) + n * tried.wishes.fleet.gpus
                    for row in tried.rows for k in counts if (n := next(spilled)) >= 0), default=0)

    # ---- together ----

    def ways(self) -> list[Way]:
        """The fastest, but those of which a milder part does nearly as well; with shorter sequences where there is no
        other."""
        fitting = list(self.that_fit()) or [c | less for c in ({}, *self.sets()) if (less := self.shorter(c))]
        found = [(changes, way) for changes in fitting if (way := self.timed(changes))]
        worth = [way for changes, way in found if not any(
            _part(part, changes) and less.tokens_per_second >= WORTH * way.tokens_per_second for part, less in found)]
        return sorted(worth, key=lambda way: -way.tokens_per_second)

    def that_fit(self) -> Iterator[dict[str, Any]]:
        """Each set of changes that does, and would not without its disk, or with all tokens."""
        for changes in ({}, *self.sets()):
            without = {k: v for k, v in changes.items() if k != "nvme"}
            if "nvme" in changes and without and self.fits(without):
                continue
            if self.fits(changes):
                yield changes
            elif len(changes) < TOGETHER and (fewer := self.fewer(changes)):
                yield changes | fewer

    def sets(self) -> Iterator[dict[str, Any]]:
        """Sets of one change, of two, of three: states, gradients, a disk, and what was asked for but need not be."""
        w = self.wishes
        grads = {"grads": "none"} | ({"micro": None} if w.micro not in (None, 1) else {})
        groups = [[{"states": s} for s in self.smaller], [grads] * self.keeps, [{"nvme": ENDLESS}],
                  *([{name: None}] for name in ASKED if getattr(w, name) is not None)]
        for n in range(1, TOGETHER + 1):
            for some in itertools.combinations(groups, n):
                for parts in itertools.product(*some):
                    yield {name: value for part in parts for name, value in part.items()}

    def fewer(self, changes: dict[str, Any]) -> dict[str, Any] | None:
        """The most tokens of a step that fit besides, where not all of its sequences can be micro-batches."""
        w = dataclasses.replace(self.wishes, **changes)

        def fits(n: int) -> bool:
            return self.fits(changes | {"tokens": n * w.seq})
        sequences = w.tokens // w.seq
        if w.micro is not None or max(self.tried(changes, **QUICK).micro_counts) == sequences or not fits(1):
            return None
        return {"tokens": _last(fits, sequences) * w.seq}

    def shorter(self, changes: dict[str, Any]) -> dict[str, Any] | None:
        """The longest sequences that fit besides, of halves of what is asked for; as many of them."""
        seq, sequences = self.wishes.seq, self.wishes.tokens // self.wishes.seq
        if len(changes) < TOGETHER and self.fits(changes | {"seq": 1, "tokens": sequences}):
            while seq := seq // 2:
                if self.fits(changes | {"seq": seq, "tokens": seq * sequences}):
                    return {"seq": seq, "tokens": seq * sequences}
        return None

    def timed(self, changes: dict[str, Any]) -> Way | None:
        """The speed with these changes, and how large a disk they take. None: nothing fits."""
        best = self.solved(changes, QUICK) or self.solved(changes, FEW)
        if best is None:
            return None
        problem, choice, timing = best
        disk = sum(problem.disk_bytes(choice.homes, choice.micro, choice.modes).values())
        on_disk = {"nvme": {"limit": -(-disk // GIB) * GIB}} if "nvme" in changes else {}
        return Way(changes | on_disk, problem.wishes.tokens * problem.wishes.fleet.count / timing.seconds)

    def solved(self, changes: dict[str, Any], kind: dict[str, Any]) -> tuple[Problem, Choice, Timing] | None:
        """The best plan; with fewer buffers for gradients where memory then holds what a disk would, as mt.plan has."""
        best: tuple[Problem, Choice, Timing] | None = None
        for lent in range(LENT, 0, -1) if changes.get("grads", self.wishes.grads) == "none" else (LENT,):
            problem = self.tried(changes | {"lent": lent}, **kind)
            if found := problem.best(best[2].seconds if best else math.inf):
                best = problem, *found
                if not problem.disk_bytes(found[0].homes, found[0].micro, found[0].modes):
                    break
        return best

    # ---- whether it fits ----

    def fits(self, changes: dict[str, Any]) -> bool:
        """Exactly. Of gradients that are kept nowhere, with the fewest buffers."""
        for other, fits in self.known:
            if other == changes or (fits and _milder(other, changes)) or (not fits and _milder(changes, other)):
                return fits
        lent = {"lent": 1} if changes.get("grads", self.wishes.grads) == "none" else {}
        most = changes | self.helps
        fits = not self.hopeless(dataclasses.replace(self.wishes, **changes)) and \
            (self.tried(changes | lent, **QUICK).fits() or
             ((most == changes or self.fits(most)) and self.tried(changes | lent).fits()))
        self.known.append((changes, fits))
        return fits

    def hopeless(self, wishes: Wishes) -> bool:
        """Do planes alone take more than both memories? Known at once, where a search takes a second."""
        m, fleet = self.machine, self.wishes.fleet
        planes = sum(u.weights + u.masters + u.moments + u.gradients * (wishes.grads == "ram")
                     for u in self.shape(wishes.states).units)
        return wishes.nvme is None and \
            planes > fleet.machines * (m.host_bytes - m.host_overhead_bytes) \
            + fleet.count * (m.vram_bytes - m.vram_overhead_bytes)

    def shape(self, states: str) -> Shape:
        if states not in self.shapes:
            self.shapes[states] = self.shape_with(states)
        return self.shapes[states]

    def tried(self, changes: dict[str, Any], **kind: Any) -> Problem:
        wishes = dataclasses.replace(self.wishes, **changes)
        return Problem(self.shape(wishes.states), self.machine, wishes, **kind)


def _part(part: dict[str, Any], changes: dict[str, Any]) -> bool:
    """Is `part` some of the changes, or are they smaller ones of the kind?"""
    return part != changes and all(name in changes and (changes[name] == value or (
        name == "states" and FORMATS.index(value) < FORMATS.index(changes[name]))) for name, value in part.items())


def _milder(part: dict[str, Any], changes: dict[str, Any]) -> bool:
    """Is it a part with which nothing fits that does not fit with all the changes?"""
    return _part(part, changes) and all(name in part for name in FIRM if name in changes)


def _last(fits: Callable[[int], bool], fails: int) -> int:
    """The largest number that does, where 1 does and `fails` does not."""
    found = 1
    while fails - found > 1:
        middle = (found + fails) // 2
        found, fails = (middle, fails) if fits(middle) else (found, middle)
    return found
