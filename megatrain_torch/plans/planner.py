"""mt.plan: what a model's training step will take on a machine, and the choice that takes least.

    print(mt.plan(model, tokens=32768, seq=1024, vram="24GiB"))
    model = mt.stream(model, plan=mt.plan(model, tokens=32768, seq=1024))

Nothing is allocated. shapes.py reads the model, machine.py the rates, cost.py has bytes and seconds by kind of
window, tally.py bytes of units, search.py looks for the best.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import MegatrainError, check_count
from ..base.limits import PLANNED_SHARE, host_limits, parse_bytes, show_bytes, without_margin
from ..base.modes import DISK, DISKS, GRADS, HOMES, LINKED, MODES, check_products, check_states
from ..figures.report import LANES, Shown, Table, Tier, bytes_table, draw_tiers
from ..store.disk import FROZEN, PADDING, SPILLED, Disk
from .changes import refusal
from .machine import Machine, resolve
from .search import OVERHEAD, WORTH, Choice, Problem, Timing, Wishes, solve
from .shapes import Shape, shapes_of
from .tally import LENT, Fleet, check_delivery, check_homes


@dataclass(frozen=True)
class Plan(Shown):
    """A choice for each unit and window, and what it is predicted to take. `mt.stream(model, plan=...)` does it.

    Attributes:
        model, parameters, trained: what is planned.
        machine: the rates and limits that were used; its memory is that of the limits given.
        tokens, seq, micro: of a step; into how many micro-batches the training loop should cut it.
        compute: "fused": templates where they fit; "eager": the model's own code.
        homes: by unit. "vram": weights, gradients and states on the device. "arrive": the same, but states are in
            RAM between their updates. "ram": weights streamed. "through": the same, but updated on the device.
            "disk": streamed too, but states are in a file. "disk+weights": weights too, which each fetch reads.
        activations: by window, a mode of modes.py: "replay", "selective+host" ...
        slots: ring size: slots of a size that streamed units pass through.
        vram, host: bytes by what they hold, at the peak of a step; vram_bytes, host_bytes: their sums.
        seconds, forward_s: of a step, and of its forwards.
        busy: seconds of work by lane. idle: seconds in which compute stands still, by what it waits for. Both by the
            names that mt.last_step has.
        disk: bytes in files by what they hold; what is trained is read and written once in a step, activations once in
            a micro-batch. nvme: where it may be, and disk_room: bytes it may have; None and 0 without.
        grads: "ram", or "none": gradients are kept nowhere. lent: buffers of a size that they pass through then: 3, or
            fewer if nothing fits otherwise. With fewer, a backward waits for the updates of the last units.
        states: how mt.AdamW keeps its states.
        products: of layers, "bf16" or "fp8".
        experts: of a mixture's layer, fetched at a time; 0: all of them.
        own: decoder layers that their own code runs where templates are wanted, and why; activations count what that
            keeps. assumed: it is a configuration's, of which nothing else is known.
        delivery: "whole": each GPU of a machine fetches all weights; "shards": its portion, and the others' from them.
        gpus, machines: GPUs of a machine, and machines, each with a host like `machine`'s. tokens, micro and device
            memory are those of one GPU; host memory is one machine's.
    """

    model: str
    parameters: int
    trained: int
    machine: Machine
    tokens: int
    seq: int
    micro: int
    compute: str
    homes: dict[str, str]
    activations: dict[str, str]
    slots: int
    vram: dict[str, int]
    host: dict[str, int]
    seconds: float
    forward_s: float
    busy: dict[str, float]
    idle: dict[str, float]
    weights: dict[str, int]
    disk: dict[str, int] = dataclasses.field(default_factory=dict)
    nvme: Disk | None = None
    disk_room: int = 0
    grads: str = "ram"
    states: str = "fp32"
    lent: int = LENT
    gpus: int = 1
    machines: int = 1
    products: str = "bf16"
    experts: int = 0
    delivery: str = "whole"
    own: dict[str, str] = dataclasses.field(default_factory=dict)
    assumed: bool = dataclasses.field(default=False, compare=False)

    @property
    def fleet(self) -> Fleet:
        """GPUs and machines."""
        return Fleet(self.gpus, self.machines, self.machine.exchange_gbps > 0)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files: states, what lies between them, and activations."""
        return sum(self.disk.values())

    @property
    def disk_written(self) -> int:
        """Bytes of what is trained in a step, and of activations of each micro-batch."""
        kept = self.disk.get(PADDING, 0) + self.disk.get(FROZEN, 0)
        return self.disk_bytes - kept + (self.micro - 1) * self.disk.get(SPILLED, 0)

    @property
    def vram_bytes(self) -> int:
        """Bytes of device memory at a step's peak."""
        return sum(self.vram.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory at a step's peak."""
        return sum(self.host.values())

    @property
    def besides(self) -> tuple[tuple[str, int], ...]:
        """(what, bytes) of host memory that mt.stream takes beside what is there before it."""
        return tuple((what, n) for what, n in self.host.items() if what != OVERHEAD)

    @property
    def tokens_per_second(self) -> float:
        """The predicted rate of all GPUs together."""
        return self.tokens * self.fleet.count / self.seconds

    @property
    def bound(self) -> str:
        """The lane with most work in a step."""
        return max(self.busy, key=self.busy.__getitem__)

    @property
    def tiers(self) -> list[Tier]:
        """(title, bytes by what they hold, bytes there are) of each kind of memory."""
        found = self.fleet.tiers(self.machine, self.vram, self.host)
        return [*found, ("disk", self.disk, self.disk_room)] if self.disk else found

    def picture(self, path: str | Path) -> None:
        """Draws what lies in which memory; .png, .svg or .pdf.

        Raises:
            MegatrainError: matplotlib is not installed.
        """
        draw_tiers(path, self._head(), self.tiers)

    def _head(self) -> str:
        frozen = "all trained" if self.trained == self.parameters else f"{self.trained:,} trained"
        cut = f"{self.micro} micro-batches of {self.tokens // self.micro:,}" if self.micro > 1 else "one micro-batch"
        cut += f"; {self.states} states" * (self.states != "fp32") + "; products in fp8" * (self.products == "fp8")
        cut += "; weights in shards" * (self.delivery == "shards")
        lines = [f"{self.model}: {self.parameters / 1e9:.3f} B parameters, {frozen}",
                 f"{self.fleet.each}{self.tokens:,} tokens a step in sequences of {self.seq:,}, {cut}; {self.compute} "
                 "layers"]
        if self.own:
            lines.append(f"own code: {own_code(self.own)}")
        if self.assumed and self.compute == "fused" and len(self.own) < len(self.activations):
            lines.append("templates: relies on no hooks inside layers, and on autocast to no other type than the "
                         "weights'")
        lines.append(f"{self.machine.name}: rates {self.machine.source}")
        all_of = "" if self.fleet.alone else " in all"
        lines.append(f"predicted: {self.tokens_per_second:,.0f} tokens/s{all_of}, {self.seconds:.4g} s a step "
                     f"({self.forward_s:.3g} forward); bound by {LANES.get(self.bound, self.bound)}")
        if self.machines > 1:   # so that nothing waits: new weights within a forward, all gradients within a backward
            leaving = sum(self.weights.values()) * self.trained / self.parameters * (self.machines - 1) / self.machines
            forward_s, backward_s = self.forward_s / self.micro, (self.seconds - self.forward_s) / self.micro
            needed = max(leaving / forward_s, self.gpus * leaving / backward_s) / 1e9
            lines.append(f"between machines: {needed:.3g} GB/s from each hide behind compute; "
                         f"{self.machine.network_gbps:.4g} are stated (network_gbps)")
        return "\n".join(lines)

    def _tables(self) -> list[Table]:
        lanes = [("lane", "busy s", "of the step", "compute waits for it"),
                 *((LANES.get(name, name), f"{s:.4g}", f"{s / self.seconds:.0%}",
                    f"{self.idle[name]:.3g} s" if name in self.idle else "")
                   for name, s in self.busy.items() if s or name in self.idle)]
        return [self._placement(), *(bytes_table(*tier) for tier in self.tiers), ("", lanes)]

    def _placement(self) -> Table:
        """Neighbouring windows of which the same is chosen; only layers that differ by a number share a row."""
        modes = dict(self.activations)
        for a, b in itertools.pairwise(self.activations):
            if self.activations[b].startswith(LINKED):         # the same words for both layers of the pair
                modes[a] = modes[b] = f"{self.activations[a]}, {self.activations[b]} in turn"
        alike = {name: (self.homes.get(name, "shared"), mode, re.sub(r"\d+", "*", name))
                 for name, mode in modes.items()}
        rows: list[tuple[str, ...]] = [("window", "weights", "home", "activations")]
        for (home, mode, _), run in itertools.groupby(modes, key=alike.get):
            names = list(run)
            rows.append((_span(names), show_bytes(sum(self.weights[n] for n in names)), home, mode))
        ring = f"ring of {self.slots} slots for what streams"
        ring += f"; experts {self.experts} at a time" * (self.experts > 0)
        ring += f"; {self.lent} buffer{'s' * (self.lent > 1)} for gradients" * (self.lent < LENT)
        return ring if {"ram", "through", *DISKS} & set(self.homes.values()) else "nothing streams", rows


def plan(model: Any, *, tokens: int, seq: int, machine: Machine | str | None = None, vram: int | str | None = None,
         host: int | str | None = None, micro: int | None = None, homes: str | dict[str, str] | None = None,
         activations: str | None = None, slots: int | None = None, grads: str = "ram", states: str = "fp32",
         compute: str = "auto", products: str = "bf16", base: str | None = None, adapter: Any = None,
         dtype: torch.dtype | None = None, units: list[str | nn.Module] | None = None, layers: int | None = None,
         nvme: str | dict[str, Any] | None = None, gpus: int = 1, machines: int = 1, experts: int | None = None,
         delivery: str | None = None, use_cache: bool = True, trainer: type | None = None) -> Plan:
    """Predicts a training step with mt.AdamW and finds the choice of least time within the limits.

    Args:
        model: a module (streamed or not, or on the meta device), or a transformers config. What is frozen it tells.
        tokens, seq: tokens of a whole step, in sequences of `seq`; of several GPUs each has so many.
        machine: a Machine, a name such as "rtx4090" or "h200-128g,vram=24GiB" (`megatrain plan --list-machines` has
            all), the path of a JSON file, or "cpu". None: this machine's GPU, with the rates that `megatrain doctor`
            stored, else with those of the description nearest to it. Without a GPU: its CPU device.
        vram, host: limits in bytes or as "24GiB", everything counted: driver, Python and torch too. They lower
            what the machine has, but say what the host of a card by name has; by default 2 % of it stay free.
        micro: micro-batches of a step; None: the fewest whose time is within 3 % of the best.
        homes: "ram", "vram", "arrive", "through" or, with nvme, "disk" or "disk+weights" for all units. Or a dict by
            name of unit, as in a plan. The rest is chosen for these. activations: "replay", "attention", "linked" (of
            every second layer; of the others "attention"), "selective" or "saved", for all windows that have it. With
            "+host" what is kept waits in host memory, with "+disk" and nvme in a file.
            slots: ring size. None: what is best.
        grads: "ram", or "none": gradients are kept nowhere, as mt.stream's plan has it; one micro-batch.
        states: how mt.AdamW keeps its states, as it takes them; mt.stream(plan=...) tells it.
        compute, products, dtype, units: as for mt.stream. base, adapter: of a config, as for mt.from_pretrained.
        layers: of a config, instead of its own number.
        nvme: directory for states, weights and activations that host memory does not hold, as for mt.stream; for
            another machine {"limit": "2TB"} is enough.
        gpus, machines: GPUs of each machine, and machines, with a process for each GPU, as torchrun starts them. vram
            is one GPU's limit, host and nvme one machine's. Of several machines none has weights on disk.
        experts: of a layer, frozen in one parameter, fetched at a time; 0: all. None: what is best.
        delivery: of weights to several GPUs of a machine, "whole" or "shards"; None: in shards where that is faster.
        use_cache: False where the loop's forwards fill no key-value cache; else it counts as the model's config says.
        trainer: a class of TRL's, whose loss is counted. None: that of mt.stream_trainer, else the model's own loss.

    Raises:
        MegatrainError: an argument makes no sense, or no plan fits. Then the message has the table of the plan that
            needs least, and the fastest changes that make it fit. Each of the exception's `changes` is an argument that
            alone makes it fit. Its `ways` are sets of arguments that do so together, the fastest first.
    """
    disk, fleet = Disk.parse(nvme, somewhere=True), Fleet(gpus, machines)
    _check_words(tokens, seq, micro, slots, gpus, machines, disk is None, compute, homes, activations, grads)
    wishes = Wishes(tokens, seq, compute != "eager", homes, activations, slots, micro,
                    None if disk is None else disk.room(), grads, states=check_states(states), fleet=fleet,
                    delivery=check_delivery(fleet, delivery), caches=use_cache)
    check_homes(fleet, homes.values() if isinstance(homes, dict) else [homes], grads)
    whole, limits = _limits(machine, vram, host, check_products(products, compute))
    shape_with = shapes_of(model, dtype=dtype, units=units, layers=layers, products=products, base=base,
                           adapter=adapter, device=limits.device, trainer=trainer)
    if compute == "auto" and products == "bf16":       # as mt.stream has it
        halves = all(w.itemsize == 2 for w in shape_with(states).windows)
        wishes = dataclasses.replace(wishes, fused=limits.device == "cuda" and halves)
    problem, best, experts = _best(shape_with, limits, wishes, experts)
    if best is None:
        raise refusal(problem, whole, functools.partial(shape_with, experts=experts))
    problem, best = _preferred(problem, *best, delivery)
    return _plan(problem, *best, nvme=disk, disk_room=wishes.nvme or 0, products=products, experts=experts,
                 assumed=not isinstance(model, nn.Module))


def _check_words(tokens: int, seq: int, micro: int | None, slots: int | None, gpus: int, machines: int, memory: bool,
                 compute: str, homes: Any, activations: str | None, grads: str) -> None:
    """Raises MegatrainError where numbers, or words of plan's arguments, are none that it takes. memory: no disk."""
    for name, value, least in (("gpus", gpus, 1), ("machines", machines, 1), ("tokens", tokens, 1), ("seq", seq, 1),
                               ("micro", micro, 1), ("slots", slots, 2)):
        if value is not None or name not in ("micro", "slots"):
            check_count(value, name, least)
    if tokens % seq:
        raise MegatrainError(f"tokens={tokens}, seq={seq}: a step is a whole number of sequences; "
                             f"nearest: tokens={max(1, round(tokens / seq)) * seq}")
    if micro is not None and (tokens // seq) % micro:
        raise MegatrainError(f"micro={micro}: {tokens // seq} sequences cannot be cut into so many equal micro-batches")
    for name, words, known in (("compute", compute, ("auto", "fused", "eager")), ("homes", homes, HOMES),
                               ("activations", activations, MODES), ("grads", grads, GRADS)):
        for value in words.values() if isinstance(words, dict) else (words,):
            if (value is not None or name == "grads") and value not in known:
                raise MegatrainError(f"{name}={value!r}: use {', '.join(map(repr, known))}")
        if memory and words in (*DISKS, *DISK):
            raise MegatrainError(f"{name}={words!r}: give the directory, nvme='/path'")
    if grads == "none" and micro not in (None, 1):
        raise MegatrainError("grads='none': gradients that are kept nowhere are used at once: one micro-batch")


def _limits(machine: Machine | str | None, vram: int | str | None, host: int | str | None, products: str
            ) -> tuple[Machine, Machine]:
    """The machine, and with as much memory as a plan may use."""
    whole = resolve(machine)
    if products == "fp8" and not whole.fp8_gain:
        raise MegatrainError(f"products='fp8': {whole.name} has no products of 8-bit codes; use products='bf16'")
    there = whole.host_bytes
    if machine is None:                                 # this one: what other processes leave
        cuda = torch.cuda.is_available()
        if whole.device == ("cuda" if cuda else "cpu") and (not cuda or torch.cuda.get_device_name() in whole.name):
            there = min(there, host_limits().within)
    most = parse_bytes(host, "host") or without_margin(there, PLANNED_SHARE)
    return whole, whole.with_limits(parse_bytes(vram, "vram"), most)


def _preferred(problem: Problem, choice: Choice, timing: Timing, asked: str | None
               ) -> tuple[Problem, tuple[Choice, Timing]]:
    """In shards, where `asked` leaves that open, and in more micro-batches only where either is faster by WORTH."""
    if asked is None and problem.wishes.fleet.gpus > 1 and not problem.exchange.on_link:
        other = Problem(problem.shape, problem.machine, dataclasses.replace(problem.wishes, delivery="shards"))
        if faster := other.time(choice, timing.seconds / WORTH):
            problem, (choice, timing) = other, other.best(faster.seconds) or (choice, faster)
    for micro in sorted(k for k in problem.micro_counts if k < choice.micro):
        fewer = Problem(problem.shape, problem.machine, dataclasses.replace(problem.wishes, micro=micro))
        if found := fewer.best(timing.seconds * WORTH):
            return problem, found
    return problem, (choice, timing)


WORTH_PIECES = 1.3          # by so much a few experts at a time must be faster: an H200 took 28 % more than the walk
                            # says, which fetches layers as a whole


def _best(shape_with: Callable[..., Shape], limits: Machine, wishes: Wishes, experts: int | None
          ) -> tuple[Problem, tuple[Choice, Timing] | None, int]:
    """With a layer's experts fetched at once, or a few at a time where that takes clearly less time, or alone fits."""
    if experts is not None:
        check_count(experts, "experts", 0)
    shape = shape_with(wishes.states, experts or 0)
    problem = Problem(shape, limits, wishes)
    had = {mode for cost in problem.costs(1).values() for mode in cost.kept}
    if wishes.activations not in {None, *had}:             # it would be left out without a word
        raise MegatrainError(f"activations={wishes.activations!r}: no window of {shape.name} has it with "
                             f"{'fused' if wishes.fused else 'eager'} layers; they have "
                             f"{', '.join(repr(mode) for mode in MODES if mode in had)}")
    problem, best = solve(problem)
    pieces = shape.experts if experts is None else 0
    cut = shape_with(wishes.states, pieces) if pieces else shape
    if pieces and any(u.fetched for u in cut.units):
        other, found = solve(Problem(cut, limits, wishes))
        if best is None or (found is not None and best[1].seconds > found[1].seconds * WORTH_PIECES):
            return other, found, pieces                  # where neither fits, what needs less
    return problem, best, experts or 0


def _plan(problem: Problem, choice: Choice, timing: Timing, **more: Any) -> Plan:
    shape, wishes = problem.shape, problem.wishes
    weights = {w.name: sum(shape.units[u].weights for u in w.units if problem.first[u] == i)
               for i, w in enumerate(shape.windows)}
    return Plan(
        shape.name, shape.parameters, shape.trained, problem.machine, wishes.tokens, wishes.seq, choice.micro,
        "fused" if wishes.fused else "eager", {u.name: home for u, home in zip(shape.units, choice.homes)},
        {w.name: mode for w, mode in zip(shape.windows, choice.modes)}, choice.ring, problem.device_bytes(choice),
        problem.host_bytes(choice), *timing, weights, problem.disk_bytes(choice), grads=wishes.grads,
        states=wishes.states, lent=wishes.lent, gpus=wishes.fleet.gpus, machines=wishes.fleet.machines,
        delivery=wishes.delivery, own={w.name: w.why for w in shape.windows if w.why and wishes.fused}, **more)


def _span(names: list[str]) -> str:
    """"layers.0" to "layers.5" as "layers.0-5"."""
    last = re.findall(r"\d+", names[-1])
    return names[0] if len(names) == 1 else re.sub(r"\d+(?!.*\d)", lambda m: f"{m.group()}-{last[-1]}", names[0])


def own_code(own: dict[str, str]) -> str:
    """Names of layers, and why their own code runs them, as text."""
    at = itertools.count()

    def run(name: str) -> tuple[str, int]:               # the same for layers that follow one another
        return own[name], int((re.findall(r"\d+", name) or ["-2"])[-1]) - next(at)

    runs = [list(names) for _, names in itertools.groupby(own, key=run)]
    told, more = (runs[:3], f"; and {len(runs) - 3} more") if len(runs) > 4 else (runs, "")
    return "; ".join(f"{_span(names)} ({own[names[0]]})" for names in told) + more
