"""What is asked of mt.stream: which models can be streamed, how this one is to be, and whether it fits so.

Nothing of the model is changed here.
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _core
from ..base.codes import KNOWN, coded, format_of, strands_of
from ..base.errors import MegatrainError, check_count
from ..base.limits import parse_bytes
from ..base.modes import DISK, HOMES, MODES, check_products, check_states
from ..base.testing import Doors, opened
from ..base.units import Group, usual_experts
from ..plans import planner
from ..plans.planner import Plan
from ..plans.room import check_device, check_loading, check_weights, loads, to_disk
from ..plans.tally import LENT, Asked, Fleet, check_delivery
from ..store.disk import SPILLED, Disk, check_room
from ..store.records import DTYPES
from .runtime import runtimes

PLAN_KEYS = {"activations", "states", "homes", "slots", "grads", "lent", "threads", "experts", "delivery"}


# ---- which models ----

def check_model(module: nn.Module, where: torch.device, dtype: torch.dtype | None, bare: bool) -> None:
    """Raises: the module cannot be streamed on this device, or converted to this type. bare: another process has the
    values, and parameters may be on the meta device."""
    if not isinstance(module, nn.Module):
        way = ("; mt.from_pretrained(AutoModelForCausalLM, path) loads a model and streams it"
               if isinstance(module, str | Path) else "")
        raise MegatrainError(f"mt.stream takes a torch.nn.Module, not {module!r:.80}{way}")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise MegatrainError(f"{type(module).__name__} is not supported: one streamed model uses one GPU; "
                             "stream the module inside it")
    if any(m in runtimes for m in module.modules()):
        raise MegatrainError("the model, or a part of it, is streamed already; mt.unstream it first")
    for name, p in module.named_parameters():
        if problem := _problem(p, bare):
            raise MegatrainError(f"parameter {name!r} {problem}")
        if dtype is not None and (format_of(p) is not None or p.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)):
            raise MegatrainError(f"dtype={dtype}: {name} is quantised, and codes and scales keep their "
                                 "types: leave it out")
    for name, m, p, format in coded(module):
        strands_of(name, p, m, format)
    for name, m in module.named_modules():
        if getattr(m, "sparse", False) is True and isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            raise MegatrainError(f"module {name!r} makes sparse gradients; build it with sparse=False")
        # A load on the CPU gave a linear layer of gptqmodel's (GPTQ, AWQ) a kernel for that.
        if where.type != "cpu" and "qweight" in m._buffers and any(
                c.__module__.partition(".")[0] == "gptqmodel" for c in type(m).__mro__):
            raise MegatrainError(f"module {name!r} ({type(m).__name__}) keeps its codes in buffers, which are not "
                                 "streamed: all of them would lie on the GPU, and no plan counts them. Take the "
                                 "checkpoint of 16 bits: mt.from_pretrained(..., base='nf4') makes codes that stream")


def _problem(p: nn.Parameter, bare: bool) -> str:
    if isinstance(p, nn.parameter.UninitializedTensorMixin):
        return "has no shape yet: run one forward first, then mt.stream"
    if type(p) is not nn.Parameter:
        if format_of(p) is not None:
            return "is quantised, and so it must be frozen: p.requires_grad_(False)" if p.requires_grad else ""
        return (f"is of {type(p).__module__}.{type(p).__name__}, a subclass of Parameter that is not known; if the "
                f"model is quantised, these formats stream: {KNOWN}; or load it without that: a frozen bf16 parameter "
                "takes 2 bytes of host memory")
    if p.is_meta and not bare:
        return "is on the meta device: load its weights first"
    if p.is_complex():
        return f"is complex ({p.dtype}); complex parameters are not supported"
    if p.layout != torch.strided:
        return f"has layout {p.layout}; only dense parameters are supported"
    if p.dtype not in DTYPES:
        return f"has type {p.dtype}; supported: {', '.join(str(d) for d in DTYPES)}"
    return ""


# ---- how ----

@dataclass
class Choices:
    """What the user said beside the model, by a plan or by arguments, in one form."""

    options: dict[str, Any]     # a plan's dict
    compute: str
    products: str
    dtype: torch.dtype | None
    units: list[str | nn.Module] | None
    vram: int | None            # bytes, as the user said
    cap: int | None             # bytes of the device that may be used: those, or a plan's
    host: int | None            # bytes
    disk: Disk | None
    fleet: Fleet                # the processes that stream it together
    plan: Plan | None           # None: options were given by hand, or not at all: what a step takes is not known
    itself: bool                # mt.stream plans, or has planned, and will again where the loop outgrows that
    doors: Doors = field(default_factory=opened)        # of the engine, for tests

    @property
    def activations(self) -> str | dict[str, str]:
        """What windows keep: all the same, or by name."""
        return self.options.get("activations") or "auto"

    @property
    def spills(self) -> bool:
        """Does any window keep what it keeps on disk?"""
        modes = self.activations
        return any(mode in DISK for mode in (modes.values() if isinstance(modes, dict) else (modes,)))

    @property
    def spilled(self) -> int:
        """Bytes of activations on disk, as far as known."""
        return 0 if self.plan is None else self.plan.disk.get(SPILLED, 0)

    def asked(self, name: str, groups: list[Group], where: torch.device) -> Asked:
        """For a model of this name and these units, as room.py takes it."""
        options, plan = self.options, self.plan
        names, homes = [unit for unit, _ in groups], options.get("homes", "ram")
        if not isinstance(homes, str | dict):
            raise MegatrainError(f"plan: homes={homes!r}; use {', '.join(map(repr, HOMES))}, or {{unit name: a home}}")
        by_name = dict.fromkeys(names, homes) if isinstance(homes, str) else homes
        for unit, home in by_name.items():
            if unit not in names:
                raise MegatrainError(f"plan: homes names {unit!r}, and there is no such unit; units: "
                                     f"{', '.join(names)}")
            if home not in HOMES:
                raise MegatrainError(f"plan: homes[{unit!r}]={home!r}; use {', '.join(map(repr, HOMES[:-1]))} "
                                     f"or {HOMES[-1]!r}")
        return Asked(name, groups, self.dtype, tuple(by_name.get(unit, "ram") for unit in names),
                     options.get("slots", 3), 1 if plan is None else plan.micro, where.type == "cpu",
                     () if plan is None else plan.besides, options.get("grads", "ram") == "ram",
                     options.get("states", "fp32"), options.get("lent", LENT), fleet=self.fleet,
                     experts=options.get("experts", 0))


def choose(module: nn.Module, where: torch.device, fleet: Fleet, *, tokens: int | None, seq: int | None,
           vram: int | str | None, host: int | str | None, nvme: str | dict[str, Any] | None, states: str | None,
           dtype: torch.dtype | None, units: list[str | nn.Module] | None, compute: str,
           plan: Plan | dict[str, Any] | None, products: str | None) -> Choices:
    """Arguments of mt.stream, and what is planned for tokens and seq, where these are given. What is given beside a
    plan counts instead of the plan's. Raises: some do not go together, or mean nothing; or no plan fits."""
    cap = most = parse_bytes(vram, "vram")
    host_bytes, disk = parse_bytes(host, "host"), Disk.parse(nvme)
    if products is None:
        products = plan.products if isinstance(plan, Plan) else "bf16"
    check_products(products, compute, where)
    compute, given = "fused" if products == "fp8" else compute, plan
    if tokens is not None or seq is not None:
        if plan is not None:
            raise MegatrainError("tokens=, seq= and plan=: a plan knows its tokens; give one of the two")
        if tokens is None or seq is None:
            raise MegatrainError("tokens= and seq= go together: tokens of a training step, in sequences of seq")
        given = planner.plan(module, machine=None if where.type == "cuda" else "cpu", tokens=tokens, seq=seq,
                             vram=most, host=host_bytes, states=states or "fp32", compute=compute, products=products,
                             dtype=dtype, units=units, nvme=disk, gpus=fleet.gpus, machines=fleet.machines)
    if disk is not None:
        disk.room()                          # refuses a directory that is not there
    if isinstance(given, Plan):
        if given.fleet != fleet:
            raise MegatrainError(f"plan= is for {given.fleet}, and here are {fleet}: "
                                 "mt.plan(gpus=, machines=) says how many")
        fleet = given.fleet                  # which knows whether GPUs are linked
        if states is not None and states != given.states:
            raise MegatrainError(f"states={states!r}, and the plan is for {given.states!r} ones: give them to mt.plan")
        compute = given.compute if compute == "auto" else compute
        options = _options({key: getattr(given, key) for key in PLAN_KEYS - {"threads"}}, compute)
        disk = disk or given.nvme
        cap = parse_bytes(given.machine.vram_bytes, "vram") if most is None else most
    else:
        options, given = _options(given, compute), None
        if states is not None and options.setdefault("states", check_states(states)) != states:
            raise MegatrainError(f"states={states!r}, and the plan's are {options['states']!r}: give one of the two")
        check_delivery(fleet, options.get("delivery"))
    itself = plan is None and (where.type == "cuda" or most is not None)
    return Choices(options, compute, products, dtype, units, most, cap, host_bytes, disk, fleet, given, itself)


def _options(plan: dict[str, Any] | None, compute: str) -> dict[str, Any]:
    if compute not in ("auto", "eager", "fused"):
        raise MegatrainError(f"compute={compute!r}: use 'auto', 'eager' or 'fused'")
    if not isinstance(plan, dict | None):
        raise MegatrainError(f"plan={plan!r}: give what mt.plan made, or a dict of {sorted(PLAN_KEYS)}")
    options = dict(plan or {})
    if unknown := sorted(set(options) - PLAN_KEYS):
        raise MegatrainError(f"plan: unknown key {unknown[0]!r}; known: {sorted(PLAN_KEYS)}")
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


def compute_device(device: str | torch.device | None) -> torch.device:
    """Raises: there is no such device, or no CUDA part in this build."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = None
    with contextlib.suppress(RuntimeError, TypeError):
        where = torch.device(device)
    if where is None or where.type not in ("cpu", "cuda"):
        raise MegatrainError(f"device={str(device)!r}: 'cuda' or 'cpu'")
    if where.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MegatrainError("device='cuda': torch sees no CUDA device here; use device='cpu'")
    if not _core.build_info()["cuda"]:
        raise MegatrainError("device='cuda': this build of megatrain_torch has no CUDA part "
                             "(nvcc was not found when it was built); rebuild with nvcc on PATH")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)


# ---- does it fit ----

def fitted(asked: Asked, where: torch.device, choices: Choices) -> Asked:
    """What is asked for, with homes and slots where they were left open. Raises: what does not fit, and what would."""
    host = choices.host
    free = None                              # of the device; not known on the CPU device, whose memory is the host's
    if where.type == "cuda":
        gc.collect()                         # models that were dropped, and their slots
        free = torch.cuda.mem_get_info(where)[0] + torch.cuda.memory_reserved(where) \
            - torch.cuda.memory_allocated(where)
    most = min((n for n in (free, choices.cap) if n is not None), default=None)
    if choices.itself and choices.plan is None:
        # Until the first plan weights are in host memory; those of last units on the device where that is too small.
        if most is not None and not loads(asked, host):
            fit = itertools.takewhile(lambda a: sum(a.device().values()) <= most, asked.moved("ram", "vram"))
            asked = next((a for a in fit if loads(a, host)), asked)
        check_weights(asked, host, most)
    elif choices.disk is not None and "homes" not in choices.options:
        asked = to_disk(asked, host)
    if "experts" not in choices.options and most is not None:
        # A few experts at a time, where slots for all of a layer's would be refused.
        experts = max([usual_experts(own) for _, own in asked.groups], default=0)
        if experts and sum(dataclasses.replace(asked, ring=2).device().values()) > most:
            asked = dataclasses.replace(asked, experts=experts)
    asked = check_device(asked, free, choices.cap)
    check_room(asked, choices.disk, choices.spills, choices.spilled)
    if not choices.itself or choices.plan is not None:
        check_loading(asked, host, choices.plan is not None, most)
    return asked
