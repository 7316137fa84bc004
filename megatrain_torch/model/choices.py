"""What was chosen for a model: arguments of mt.stream by hand, or a plan of mt.plan, in one form, and checked."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _core
from ..base.arguments import check_count
from ..base.errors import MegatrainError
from ..base.formats import check_states
from ..base.limits import parse_bytes
from ..base.modes import DISK, HOMES, MODES
from ..base.products import check_device, check_products
from ..base.testing import Doors, opened
from ..base.units import Group
from ..plans import planner
from ..plans.fleet import Fleet, check_delivery
from ..plans.planner import Plan
from ..plans.tally import LENT, Asked
from ..store.disk import SPILLED, Disk
from .asking import Limits

PLAN_KEYS = {"activations", "states", "homes", "slots", "grads", "lent", "threads", "experts", "delivery"}


@dataclass
class Choices:
    """
    Attributes:
        options: a plan's dict. vram: bytes. micro, besides: as in asked.Asked. spilled: bytes of activations on
            disk, as far as known.
        plan: the one that options are from; None: they were given by hand, or not at all.
        itself: mt.stream plans, or has planned, and will again where the loop outgrows that.
        doors: of the engine, for tests.
    """

    options: dict[str, Any]
    compute: str
    vram: int | None
    disk: Disk | None
    plan: Plan | None = None
    micro: int = 1
    besides: tuple[tuple[str, int], ...] = ()
    spilled: int = 0
    itself: bool = False
    products: str = "bf16"
    doors: Doors = field(default_factory=opened)

    @property
    def whole(self) -> bool:
        """Is it known what a training step takes, not its weights alone?"""
        return self.plan is not None

    @property
    def activations(self) -> str | dict[str, str]:
        """What windows keep: all the same, or by name."""
        return self.options.get("activations") or "auto"

    @property
    def spills(self) -> bool:
        """Does any window keep what it keeps on disk?"""
        modes = self.activations
        return any(mode in DISK for mode in (modes.values() if isinstance(modes, dict) else (modes,)))

    def check_windows(self, names: list[str]) -> None:
        """Raises: a window is named that is not there."""
        for name in self.activations if isinstance(self.activations, dict) else ():
            if name not in names:
                raise MegatrainError(f"plan: activations names {name!r}, and there is no such window; "
                                     f"windows: {', '.join(names)}")

    def asked(self, name: str, groups: list[Group], dtype: torch.dtype | None, where: torch.device, fleet: Fleet
              ) -> Asked:
        """For a model of this name and these units, as preflight takes it. fleet: the processes that stream it."""
        options = self.options
        return Asked(name, groups, dtype, _homes(options.get("homes", "ram"), groups), options.get("slots", 3),
                     self.micro, where.type == "cpu", self.besides, options.get("grads", "ram") == "ram",
                     options.get("states", "fp32"), options.get("lent", LENT), fleet=fleet,
                     experts=options.get("experts", 0))


def choose(module: nn.Module, where: torch.device, limits: Limits, tokens: int | None, seq: int | None,
           states: str | None, dtype: torch.dtype | None, compute: str, plan: Plan | dict[str, Any] | None,
           products: str | None) -> Choices:
    """Arguments of mt.stream, and what is planned for tokens and seq, where these are given.

    Raises:
        MegatrainError: some do not go together, or mean nothing; or no plan fits.
    """
    given = plan
    products, compute = _products(products, compute, plan)
    check_device(products, where)
    if tokens is not None or seq is not None:
        given = _planned(module, where, tokens, seq, limits, states, dtype, compute, plan, products)
    if limits.disk is not None:
        limits.disk.room()                   # refuses a directory that is not there
    made = _from_plan(given, limits, compute, states) if isinstance(given, Plan) else \
        _by_hand(given, limits, compute, states)
    made.products = products
    made.itself = plan is None and (where.type == "cuda" or limits.vram is not None)
    return made


def _products(products: str | None, compute: str, plan: Plan | dict[str, Any] | None) -> tuple[str, str]:
    """Of layers, and by whose code; what is given counts instead of a plan's."""
    if products is None:
        products = plan.products if isinstance(plan, Plan) else "bf16"
    check_products(products, compute)
    return products, "fused" if products == "fp8" else compute


def _planned(module: nn.Module, where: torch.device, tokens: int | None, seq: int | None, limits: Limits,
             states: str | None, dtype: torch.dtype | None, compute: str, plan: Plan | dict[str, Any] | None,
             products: str) -> Plan:
    """The plan to begin with."""
    if plan is not None:
        raise MegatrainError("tokens=, seq= and plan=: a plan knows its tokens; give one of the two")
    if tokens is None or seq is None:
        raise MegatrainError("tokens= and seq= go together: tokens of a training step, in sequences of seq")
    disk = limits.disk
    return planner.plan(module, machine=None if where.type == "cuda" else "cpu", tokens=tokens, seq=seq,
                        vram=limits.vram, host=limits.host, states=states or "fp32",
                        compute=compute, products=products, dtype=dtype, units=limits.units,
                        nvme=None if disk is None else disk.as_given(),
                        gpus=limits.gpus, machines=limits.machines)


def _by_hand(plan: dict[str, Any] | None, limits: Limits, compute: str, states: str | None) -> Choices:
    options = _options(plan, compute)
    if states is not None and options.setdefault("states", check_states(states)) != states:
        raise MegatrainError(f"states={states!r}, and the plan's are {options['states']!r}: give one of the two")
    check_delivery(Fleet(limits.gpus, limits.machines), options.get("delivery"))
    return Choices(options, compute, limits.vram, limits.disk)


def _from_plan(plan: Plan, limits: Limits, compute: str, states: str | None) -> Choices:
    """What is given beside a plan counts instead of the plan's."""
    if (plan.gpus, plan.machines) != (limits.gpus, limits.machines):
        raise MegatrainError(f"plan= is for {plan.fleet}, and here are {Fleet(limits.gpus, limits.machines)}: "
                             "mt.plan(gpus=, machines=) says how many")
    if states is not None and states != plan.states:
        raise MegatrainError(f"states={states!r}, and the plan is for {plan.states!r} ones: give them to mt.plan")
    options = {"activations": plan.activations, "homes": plan.homes, "slots": plan.slots, "grads": plan.grads,
               "states": plan.states, "lent": plan.lent, "experts": plan.experts, "delivery": plan.delivery}
    compute = plan.compute if compute == "auto" else compute
    vram = parse_bytes(plan.machine.vram_bytes, "vram") if limits.vram is None else limits.vram
    return Choices(_options(options, compute), compute, vram, limits.disk or plan.nvme, plan, plan.micro, plan.besides,
                   plan.disk.get(SPILLED, 0))


def _options(plan: dict[str, Any] | None, compute: str) -> dict[str, Any]:
    if compute not in ("auto", "eager", "fused"):
        raise MegatrainError(f"compute={compute!r}: use 'auto', 'eager' or 'fused'")
    if not isinstance(plan, dict | None):
        raise MegatrainError(f"plan={plan!r}: give what mt.plan made, or a dict of {sorted(PLAN_KEYS)}")
    options = dict(plan or {})
    unknown = set(options) - PLAN_KEYS
    if unknown:
        raise MegatrainError(f"plan: unknown key {sorted(unknown)[0]!r}; known: {sorted(PLAN_KEYS)}")
    modes = options.get("activations", "auto")
    for mode in modes.values() if isinstance(modes, dict) else (modes,):
        if mode not in ("auto", *MODES):
            raise MegatrainError(f"plan: activations={mode!r}; use 'auto', {', '.join(map(repr, MODES))}")
    if options.get("grads", "ram") not in ("ram", "none"):
        raise MegatrainError(f"plan: grads={options['grads']!r}; use 'ram' or 'none'")
    if options.get("lent", LENT) not in range(1, LENT + 1):
        raise MegatrainError(f"plan: lent={options['lent']!r}: 1 to {LENT} buffers for gradients that are kept nowhere")
    check_states(options.get("states", "fp32"))
    check_count(options.get("slots", 3), "plan: slots", least=2)
    check_count(options.get("threads") or 1, "plan: threads")
    check_count(options.get("experts", 0), "plan: experts", least=0)
    return options


def _homes(homes: str | dict[str, str], groups: list[Group]) -> tuple[str, ...]:
    """By unit."""
    names = [name for name, _ in groups]
    if not isinstance(homes, str | dict):
        raise MegatrainError(f"plan: homes={homes!r}; use {', '.join(map(repr, HOMES))}, or {{unit name: a home}}")
    asked = dict.fromkeys(names, homes) if isinstance(homes, str) else homes
    for name, home in asked.items():
        if name not in names:
            raise MegatrainError(f"plan: homes names {name!r}, and there is no such unit; units: {', '.join(names)}")
        if home not in HOMES:
            raise MegatrainError(f"plan: homes[{name!r}]={home!r}; use {', '.join(map(repr, HOMES[:-1]))} "
                                 f"or {HOMES[-1]!r}")
    return tuple(asked.get(name, "ram") for name in names)


def compute_device(device: str | torch.device | None) -> torch.device:
    """Raises: there is no such device, or no CUDA part in this build."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise MegatrainError(f"device={device!r}: 'cuda' or 'cpu'") from None
    if where.type not in ("cpu", "cuda"):
        raise MegatrainError(f"device={str(where)!r}: 'cuda' or 'cpu'")
    if where.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MegatrainError("device='cuda': torch sees no CUDA device here; use device='cpu'")
    if not _core.build_info()["cuda"]:
        raise MegatrainError("device='cuda': this build of megatrain_torch has no CUDA part "
                             "(nvcc was not found when it was built); rebuild with nvcc on PATH")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
