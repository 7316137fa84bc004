"""Plans for several numbers of GPUs and machines, beside each other and beside one GPU."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatrain_torch import MegatrainError

from ..base.limits import show_bytes
from ..figures.timeline import LANES
from ..plans.planner import Plan, as_text


class Refused(NamedTuple):
    """Nothing fits."""

    why: str


def counts(text: str | None, name: str) -> list[int]:
    """Of "1,2,4,8", each once."""
    try:
        found = list(dict.fromkeys(int(part) for part in (text or "1").split(",")))
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise MegatrainError(f"{name}={text!r}: a number such as 8, or several such as 1,2,4,8")
    return found


def alone(ask: Callable[..., Plan], found: Plan) -> Plan | None:
    """The plan of one GPU of one machine; None: it does not fit. ask: takes gpus and machines."""
    if found.fleet.alone:
        return found
    one = _asked(ask, 1, 1)
    return one if isinstance(one, Plan) else None


def _asked(ask: Callable[..., Plan], gpus: int, machines: int) -> Plan | Refused:
    try:
        return ask(gpus=gpus, machines=machines)
    except MegatrainError as why:
        if not hasattr(why, "refusal"):
            raise
        return Refused(why.refusal.why.splitlines()[0])


def share_of(p: Plan, one: Plan) -> float:
    """Of the speed of as many GPUs, each of which trains by itself on a machine of its own."""
    return p.tokens_per_second / (p.fleet.count * one.tokens_per_second)


def share(p: Plan, one: Plan | None) -> str:
    """The same as a line; nothing of one GPU."""
    if p.fleet.alone:
        return ""
    if one is None:
        return "one GPU by itself does not fit\n"
    return f"{share_of(p, one):.0%} of {p.fleet.count} times one GPU by itself, {one.tokens_per_second:,.0f} tokens/s\n"


@dataclass
class Plans:
    """ask: takes gpus and machines. Both: numbers of them."""

    ask: Callable[..., Plan]
    gpus: list[int]
    machines: list[int]

    def __post_init__(self) -> None:
        pairs = [(m, g) for m, g in itertools.product(self.machines, self.gpus)]
        self.found = {pair: _asked(self.ask, pair[1], pair[0]) for pair in dict.fromkeys([(1, 1), *pairs])}
        first = self.found[1, 1]
        self.one = first if isinstance(first, Plan) else None
        self.pairs = pairs

    def __iter__(self) -> Iterator[tuple[dict[str, int], Plan | Refused]]:
        for m, g in self.pairs:
            yield {"gpus": g, "machines": m}, self.found[m, g]

    def __str__(self) -> str:
        head = ("machines", "GPUs of each", "tokens/s", "s a step", "of one GPU's", "GPU memory", "a host's memory",
                "bound by", "compute waits for")
        rows = [self._row(m, g) for m, g in self.pairs]
        fits = next((p for _, p in self if isinstance(p, Plan)), None)
        title = "" if fits is None else (
            f"{fits.model}, {fits.tokens:,} tokens a step of each GPU in sequences of {fits.seq:,}\n"
            f"{fits.machine.name}: rates {fits.machine.source}")
        whys = dict.fromkeys(p.why for _, p in self if isinstance(p, Refused))
        return "\n".join([as_text((title, [head, *rows])), *whys])

    def _row(self, m: int, g: int) -> tuple[str, ...]:
        p = self.found[m, g]
        if isinstance(p, Refused):
            return (str(m), str(g), "does not fit", *[""] * 6)
        waits, s = max(p.idle.items(), key=lambda item: item[1], default=("", 0.0))
        share = f"{share_of(p, self.one):.0%}" if self.one else ""
        return (str(m), str(g), f"{p.tokens_per_second:,.0f}", f"{p.seconds:.4g}", share, show_bytes(p.vram_bytes),
                show_bytes(p.host_bytes), LANES.get(p.bound, p.bound),
                f"{LANES.get(waits, waits)}, {s / p.seconds:.0%}" if s >= 0.005 * p.seconds else "")
