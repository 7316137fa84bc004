"""mt.stream: an ordinary module becomes a streamed one, in place; mt.unstream: and back.

Nothing is changed before everything that can be refused has been. The class of the model, of its
modules and the identity of its parameters stay; what is added lives in instance attributes, which
deepcopy and pickle turn back into an ordinary model.
"""
from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _core
from ..base import patches
from ..base.arguments import check_count, check_dtype
from ..base.errors import MegatrainError
from ..base.formats import check_states
from ..base.limits import parse_bytes
from ..base.modes import DISK, HOMES, MODES
from ..base.testing import Doors, opened
from ..base.units import Group, find, group, stored_dtype
from ..fused.compiled import compiled_of
from ..fused.deferred import give_head, head_of
from ..fused.layer import template_of, wanted
from ..graph.door import Door
from ..graph.window import Installed, Window, method_of
from ..optim import astray
from ..plans import planner
from ..plans.cost import LENT
from ..plans.planner import Plan
from ..plans.preflight import (
    SETTLED,
    TRIM_BYTES,
    Asked,
    Room,
    check_device,
    check_loading,
    check_weights,
    give_back,
    loads,
    own_bytes,
    settled_last,
    to_disk,
)
from ..store import gradient
from ..store.disk import SPILLED, Disk, check_room, file_bytes
from ..store.guard import StreamedParameter
from ..store.mapped import Mapped
from ..store.records import DTYPES, Record
from ..store.state import BoundParameters, Given, HostBuffers
from . import hf
from .planning import Limits, Planning
from .registry import find_runtime, note, runtime_of, runtimes
from .runtime import Runtime

_PLAN_KEYS = {"activations", "states", "homes", "slots", "grads", "lent", "threads"}
_pid = 0
_registrations = 0


def _count_registration(module: nn.Module, *_: Any) -> None:
    """Something was put into a module: of a streamed model, the next pass looks what."""
    global _registrations
    if torch.compiler.is_compiling():        # a plain model's graph would be guarded against the lives of others
        return
    if module in runtimes:
        _registrations += 1


def _count_registrations() -> Callable[[], None]:
    handles = [nn.modules.module.register_module_parameter_registration_hook(_count_registration),
               nn.modules.module.register_module_module_registration_hook(_count_registration)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def stream(module: nn.Module, device: str | torch.device | None = None, *, tokens: int | None = None,
           seq: int | None = None, vram: int | str | None = None, host: int | str | None = None,
           nvme: str | dict[str, Any] | None = None, states: str | None = None, dtype: torch.dtype | None = None,
           units: list[str | nn.Module] | None = None, compute: str = "auto",
           plan: Plan | dict[str, Any] | None = None, masters: bool = False) -> nn.Module:
    """Moves a model's parameters to streamed storage in host memory; returns the same object.

    From here on the model's own forward runs on `device` with weights that are there only while
    they are needed. Parameters stay where they were found (`model.parameters()`, `state_dict()`),
    as host tensors. Call it before `get_peft_model`'s result is trained, that is: last.

    Args:
        module: any `torch.nn.Module`; its parameters dense, real, of plain `Parameter` type.
        device: where to compute; None: CUDA if there is one, else the CPU device.
        tokens, seq: of a training step, in sequences of `seq`: mt.plan's choice for these is made at once. None: it is
            made at the first forward that records gradients, for what that is given, and again where the loop goes on
            to longer batches or more micro-batches (docs/plans.md). On the CPU device only where `vram` is given.
        vram: limit for what is used of the device (bytes or "24GiB").
        host: limit for host memory: all planes, AdamW's states counted in. None: what is there, by every limit that
            is known (`megatrain doctor` prints them), asked now for the weights and by mt.AdamW for its states.
        nvme: directory for states, weights and activations that host memory does not hold; or {"path": directory,
            "limit": "200GiB"}. Files are removed by mt.unstream, at the end of the process, or, after a crash, by the
            next run that is given the directory.
        states: how mt.AdamW will keep its states, one of its formats, so that limits and plans count them. None: as
            mt.AdamW is told.
        dtype: convert floating parameters to this type; None: each keeps its own.
        units: names or modules to be streamed as one piece each; None: found from the model.
        compute: "eager": the modules' own code; "fused": layers that a template covers run as one node with an
            explicit backward, the others as they are, and the head makes no logits where the loss is
            `F.cross_entropy`, unless somebody reads them, until the next optimizer step (mt.explain says which);
            "compile": windows run as torch.compile's graphs of their own code, compiled once for all of one structure,
            those that dynamo cannot take as they are, and the head too; no templates;
            "auto": fused on CUDA for 16-bit weights, else eager. Fused and compiled results differ from the module's
            own code in the last bits.
        plan: what mt.plan gave: that is what runs, and stays. Or a dict by hand: docs/plans.md has its keys.
        masters: where `dtype` makes fp32 parameters 16-bit ones, mt.AdamW's fp32 masters begin with their own values.
            They are kept until its first step: no memory where they are mapped from a file, which must stay as it is.

    Raises:
        MegatrainError: the model cannot be streamed rightly, it does not fit, or the disk refuses its file; nothing was
            changed. Only where memory is gone between check and use, or a warning is an error, weights may have been
            taken over already: then the model is an ordinary one again with all its values, but these weights have the
            type that `dtype` gave them, and are on the CPU. A drive that fails while weights go there takes those with
            it.
    """
    where = _device(device)
    _refuse_model(module)
    check_dtype(dtype)
    limits = Limits(parse_bytes(vram, "vram"), parse_bytes(host, "host"), Disk.parse(nvme), units)
    asked_for = _planned(module, where, tokens, seq, limits, states, dtype, compute, plan)
    choices = _choices(asked_for, compute, vram, nvme, states)
    choices.itself = plan is None and (where.type == "cuda" or vram is not None)
    found = find(module, units)
    _check_windows(choices.options.get("activations"), [name or type(module).__name__ for name, _ in found.windows])
    asked, ring, room = _check(_asked(module, group(module, found), dtype, where, choices), where, choices, limits.host)
    rt = Runtime(module, where, _engine(where, choices))
    try:
        rt.compute, rt.room = choices.compute, room
        if choices.itself:
            rt.planning = Planning(weakref.proxy(rt), limits, asked_for)
        _declare(rt, asked, dtype)
        _open(rt, asked, ring, choices)
        _to_disk(rt, asked, choices)
        _place(rt, asked, choices)
        _fill(rt, asked.groups, masters)         # from here on the model changes, and nothing is checked any more
        room.let_go()
        _install(rt, module, found)
        rt.warn_unlocked()
    except BaseException:
        _give_back(rt, module)
        raise
    return module


def unstream(module: nn.Module) -> nn.Module:
    """Gives the ordinary module back, on the CPU, with its current weights; returns the same object.

    Optimizers over its parameters keep working if they are torch's own; mt.AdamW's states for
    them are dropped with the store. Waits for all work under way.

    Raises:
        MegatrainError: the module is not streamed, or is only a part of what was; or a worker failed.
    """
    rt = runtime_of(module)
    root = rt.root()
    if root is not module:
        raise MegatrainError("unstream the model that was given to mt.stream, not a part of it")
    rt.finish_save()
    rt.drain()
    if rt.trace is not None:
        rt.trace.finish()
        rt.trace.stop()
    _give_back(rt, module)
    return module


# ---- what is asked for, and whether it fits ------------------------------------------------------

@dataclass
class _Choices:
    """A plan of mt.plan, or arguments by hand, in one form.

    Attributes:
        options: a plan's dict. vram: bytes. micro, besides: as in preflight.Asked. spilled: bytes of activations on
            disk, as far as known.
        whole: what a training step takes is known, not its weights alone. itself: mt.stream plans, or has planned, and
            will again where the loop outgrows that. doors: of the engine, for tests.
    """

    options: dict[str, Any]
    compute: str
    vram: int | None
    disk: Disk | None
    micro: int = 1
    besides: tuple[tuple[str, int], ...] = ()
    whole: bool = False
    spilled: int = 0
    itself: bool = False
    doors: Doors = field(default_factory=opened)

    @property
    def spills(self) -> bool:
        """Does any window keep what it keeps on disk?"""
        modes = self.options.get("activations", "auto")
        return any(mode in DISK for mode in (modes.values() if isinstance(modes, dict) else (modes,)))


def _planned(module: nn.Module, where: torch.device, tokens: int | None, seq: int | None, limits: Limits,
             states: str | None, dtype: torch.dtype | None, compute: str, plan: Plan | dict[str, Any] | None) -> Any:
    """The plan to begin with, or what was given for one."""
    if tokens is None and seq is None:
        return plan
    if plan is not None:
        raise MegatrainError("tokens=, seq= and plan=: a plan knows its tokens; give one of the two")
    if tokens is None or seq is None:
        raise MegatrainError("tokens= and seq= go together: tokens of a training step, in sequences of seq")
    disk = limits.disk
    return planner.plan(module, machine=None if where.type == "cuda" else "cpu", tokens=tokens, seq=seq,
                        vram=limits.vram, host=limits.host, states=states or "fp32",
                        compute="eager" if compute == "compile" else compute, dtype=dtype, units=limits.units,
                        nvme=None if disk is None else disk.as_given())


def _choices(plan: Plan | dict[str, Any] | None, compute: str, vram: int | str | None,
             nvme: str | dict[str, Any] | None, states: str | None) -> _Choices:
    """What is given beside a plan counts instead of the plan's."""
    disk = Disk.parse(nvme)
    if disk is not None:
        disk.room()                          # refuses a directory that is not there
    if not isinstance(plan, Plan):
        options = _options(plan, compute)
        if states is not None and options.setdefault("states", check_states(states)) != states:
            raise MegatrainError(f"states={states!r}, and the plan's are {options['states']!r}: give one of the two")
        return _Choices(options, compute, parse_bytes(vram, "vram"), disk)
    if states is not None and states != plan.states:
        raise MegatrainError(f"states={states!r}, and the plan is for {plan.states!r} ones: give them to mt.plan")
    options = {"activations": plan.activations, "homes": plan.homes, "slots": plan.slots, "grads": plan.grads,
               "states": plan.states, "lent": plan.lent}
    compute = plan.compute if compute == "auto" else compute
    vram = plan.machine.vram_bytes if vram is None else vram
    return _Choices(_options(options, compute), compute, parse_bytes(vram, "vram"), plan.nvme if disk is None else disk,
                    plan.micro, plan.besides, True, plan.disk.get(SPILLED, 0))


def _asked(module: nn.Module, groups: list[Group], dtype: torch.dtype | None, where: torch.device,
           choices: _Choices) -> Asked:
    options = choices.options
    homes = _homes(options.get("homes", "ram"), groups)
    return Asked(type(module).__name__, groups, dtype, homes, options.get("slots", 3), choices.micro,
                 where.type == "cpu", choices.besides, options.get("grads", "ram") == "ram",
                 options.get("states", "fp32"), options.get("lent", LENT))


def _check(asked: Asked, where: torch.device, choices: _Choices, host: int | None) -> tuple[Asked, list[int], Room]:
    """Homes, where they are left open; sizes of the ring's slots. Refuses what does not fit."""
    free = _free(where)
    most = min((n for n in (free, choices.vram) if n is not None), default=None)
    if choices.itself and not choices.whole:
        asked = _provisional(asked, host, most)
    elif choices.disk is not None and "homes" not in choices.options:
        asked = to_disk(asked, host)
    sizes = check_device(asked, free, choices.vram)
    check_room(asked, choices.disk, choices.spills, choices.spilled)
    if not choices.itself or choices.whole:
        check_loading(asked, host, choices.whole, most)
    return asked, sizes[:len(sizes) - len(_at(asked, *SETTLED))], Room(asked, host)


def _provisional(asked: Asked, host: int | None, most: int | None) -> Asked:
    """Until the first plan: weights in host memory; last units' on the device where they are too many. Raises: they fit
    neither way."""
    try:
        check_weights(asked, host, most)
    except MegatrainError:
        for tried in settled_last(asked):
            if most is None or sum(tried.device().values()) > most:
                break
            if loads(tried, host):
                return tried
        raise
    return asked


def _options(plan: dict[str, Any] | None, compute: str) -> dict[str, Any]:
    if compute not in ("auto", "eager", "fused", "compile"):
        raise MegatrainError(f"compute={compute!r}: use 'auto', 'eager', 'fused' or 'compile'")
    if not isinstance(plan, dict | None):
        raise MegatrainError(f"plan={plan!r}: give what mt.plan made, or a dict of {sorted(_PLAN_KEYS)}")
    options = dict(plan or {})
    unknown = set(options) - _PLAN_KEYS
    if unknown:
        raise MegatrainError(f"plan: unknown key {sorted(unknown)[0]!r}; known: {sorted(_PLAN_KEYS)}")
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
    return options


def _device(device: str | torch.device | None) -> torch.device:
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


def _refuse_model(module: nn.Module) -> None:
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
        problem = _problem(p)
        if problem:
            raise MegatrainError(f"parameter {name!r} {problem}")
    for name, m in module.named_modules():
        if getattr(m, "sparse", False) is True and isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            raise MegatrainError(f"module {name!r} makes sparse gradients; build it with sparse=False")


def _problem(p: nn.Parameter) -> str:
    if isinstance(p, nn.parameter.UninitializedTensorMixin):
        return "has no shape yet: run one forward first, then mt.stream"
    if type(p) is not nn.Parameter:
        return (f"is of {type(p).__name__}, a subclass of Parameter, and only plain ones are streamed; if the model is "
                "quantised, load it without that: a frozen bf16 parameter takes 2 bytes of host memory")
    if p.is_meta:
        return "is on the meta device: load its weights first"
    if p.is_complex():
        return f"is complex ({p.dtype}); complex parameters are not supported"
    if p.layout != torch.strided:
        return f"has layout {p.layout}; only dense parameters are supported"
    if p.dtype not in DTYPES:
        return f"has type {p.dtype}; supported: {', '.join(str(d) for d in DTYPES)}"
    return ""


# ---- units and memory ----------------------------------------------------------------------------

def _engine(where: torch.device, choices: _Choices) -> _core.Engine:
    threads, doors = choices.options.get("threads") or max(1, _core.build_info()["cpus"] - 1), choices.doors
    core = _core.Engine(where.type, where.index or 0, threads, doors.delay_us, doors.seed)
    if doors.lock is not None:
        core.lock_limit(doors.lock)
    return core


def _open(rt: Runtime, asked: Asked, ring: list[int], choices: _Choices) -> None:
    """Slots; nothing is in the units' planes yet."""
    rt.activations = choices.options.get("activations", "auto")
    rt.limit_device(choices.vram, asked.at_home())
    rt.open_slots(ring, _at(asked, *SETTLED), {})


def _place(rt: Runtime, asked: Asked, choices: _Choices) -> None:
    """What is at home elsewhere than weights, or goes another way; the units are there, without values."""
    core = rt.core
    rt.invite(_at(asked, "arrive"))
    for unit in _at(asked, "through"):
        core.through(unit, True)
    if choices.disk is not None and choices.spills:
        rt.spill_to(choices.disk, choices.spilled, file_bytes(asked), choices.doors.spill)
    if not asked.keeps:
        core.lend_most(asked.lent)
    rt.passing = frozenset() if asked.keeps else frozenset(range(len(asked.groups)))
    for unit in rt.passing:
        core.pass_gradients(unit)
    core.debug(choices.doors.skip, choices.doors.poison, choices.doors.sync)       # of all that is there by now


def _to_disk(rt: Runtime, asked: Asked, choices: _Choices) -> None:
    """The file, where units have states there. With weights it is laid out at once, for states as they will be kept.
    """
    options, weights = choices.options, _at(asked, "disk+weights")
    if "states" in options or weights:
        rt.choose_states(options.get("states", "fp32"))
    if choices.disk is not None and asked.on_disk():
        rt.keep_on_disk(choices.disk, _at(asked, "disk"), weights, choices.doors.disk)


def _check_windows(activations: str | dict[str, str] | None, names: list[str]) -> None:
    for name in activations if isinstance(activations, dict) else ():
        if name not in names:
            raise MegatrainError(f"plan: activations names {name!r}, and there is no such window; "
                                 f"windows: {', '.join(names)}")


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


def _at(asked: Asked, *homes: str) -> list[int]:
    """Numbers of the units that are at home there."""
    return [i for i, home in enumerate(asked.homes) if home in homes]


def _free(where: torch.device) -> int | None:
    """Bytes of the device that may still be taken; None on the CPU device, whose memory is the host's."""
    if where.type != "cuda":
        return None
    gc.collect()                             # models that were dropped, and their slots
    return torch.cuda.mem_get_info(where)[0] + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)


def _declare(rt: Runtime, asked: Asked, dtype: torch.dtype | None) -> None:
    """Units in the store, without planes."""
    global _pid
    for name, params in asked.groups:
        kinds = [DTYPES[stored_dtype(p, dtype)] for _, p in params]
        unit = rt.core.add_unit(name, kinds, [p.numel() for _, p in params], [p.requires_grad for _, p in params])
        records = [_record(rt, unit, name, i, _pid + i, full, p, dtype) for i, (full, p) in enumerate(params)]
        _pid += len(params)
        rt.units.append(records)
        rt.unit_names.append(name)


def _fill(rt: Runtime, groups: list[Group], masters: bool) -> None:
    """Weights in their planes; each old tensor is freed as its values are in. What is at home on the device or on disk
    goes there at once: host memory has one such unit at a time."""
    given, files, filed = 0, Mapped(), set(_at(rt.room.asked, "disk+weights"))
    for unit, (records, own) in enumerate(zip(rt.units, own_bytes(groups))):
        with torch.no_grad():
            for hi, value in files.fill([(r.view("HI"), r.param.detach()) for r in records]):
                hi.copy_(value)
        for r in records:
            _adopt(rt, r, masters)
        if unit in rt.settled:
            rt.take(unit)
        if unit in filed:
            rt.file_weights(unit)
        given += own
        if given >= TRIM_BYTES:          # malloc would keep it, and we would hold weights twice
            give_back()
            given = 0


def _record(rt: Runtime, unit: int, unit_name: str, index: int, pid: int, full: str, p: nn.Parameter,
            dtype: torch.dtype | None) -> Record:
    r = Record(rt, unit, unit_name, index, pid, full, p)
    r.dtype = stored_dtype(p, dtype)
    r.nbytes = r.numel * r.dtype.itemsize
    return r


def _adopt(rt: Runtime, r: Record, masters: bool) -> None:
    """The HI plane has the parameter's values; it becomes a view of that."""
    p, hi = r.param, r.view("HI")
    if masters and p.dtype == torch.float32 and r.dtype in (torch.bfloat16, torch.float16) and p.requires_grad:
        r.exact = p.detach()
    with torch.no_grad():
        grad = None if p.grad is None else p.grad.to("cpu", r.dtype)
        p.grad = None
        p.data = hi
    r.host = p.detach()
    rt.records.append(r)                 # from here on it is given back when something fails
    r.address, r.offset, r.version = hi.data_ptr(), rt.core.offset(r.unit, r.index), r.host._version
    p.grad = grad
    p.__class__ = StreamedParameter
    p._mt, p._mt_runtime = r, rt


# ---- installing ----------------------------------------------------------------------------------

def _install(rt: Runtime, root: nn.Module, found: Any) -> None:
    patches.hold(rt)
    patches.once("registrations", _count_registrations)
    astray.watch()
    by_param = {id(r.param): r for r in rt.records}
    for m in root.modules():
        records = {n: by_param[id(p)] for n, p in m._parameters.items() if p is not None}
        if records:
            m.__dict__["_parameters"] = BoundParameters(m._parameters, records)
        note(m, rt)
        _put(m, "_apply", _applier(rt, m))
        _put(m, "load_state_dict", _loader(m))
        _put(m, "share_memory", _refuser("share_memory() would copy the store; mt.unstream(model) first"))
    head = head_of(root, found.windows)
    for name, m in found.windows:
        records = sorted((by_param[id(p)] for p in m.parameters()), key=lambda r: (r.unit, r.index))
        w = Window(rt, name or type(root).__name__, m, records)
        w.mode = rt.activations.get(name, "auto") if isinstance(rt.activations, dict) else "auto"
        w.mode = "saved" if w.draws_unseen else w.mode
        w.fused = template_of(rt, w, m)
        w.compiled = compiled_of(rt, w, m) if m is not head else None
        if m is head and wanted(rt.compute, rt.is_cuda, [r.dtype for r in records]):
            give_head(w, m)
        rt.add_window(w)
        _put(m, "forward", w)
        if w.fused is not None or w.head is not None:
            rt.proofs.watch.add(w, m)
    if isinstance(rt.activations, dict):
        rt.activations = "auto"
    for _, m in found.containers:
        _put(m, "forward", _container(rt, m))
    hf.prepare(rt, root, _put)
    _put(root, "zero_grad", _zero_grad(root))
    _put(root, "_replicate_for_data_parallel", _refuser("DataParallel over a streamed model is not supported"))
    rt.check_tree = _tree_check(root)
    for m in root.modules():
        _move_buffers(rt, m)
    rt._refresh()


def _put(module: nn.Module, name: str, call: Any) -> None:
    """In the place of a method. The module has it, so `call` holds no module."""
    if name == "forward" and "torch._dynamo" in sys.modules:
        call = torch._dynamo.disable(call)          # torch.compile(model): our own code is not for tracing
    module.__dict__[name] = Installed(module, name, call)


def _method(module: nn.Module, name: str) -> Callable[[], Any]:
    """Gives the module's method, without holding the module."""
    own = getattr(module, name)
    return weakref.WeakMethod(own) if method_of(own, module) else lambda: own


def _container(rt: Runtime, module: nn.Module) -> Any:
    inner, who = _method(module, "forward"), weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with rt.entered(who(), args, kwargs) as (args, kwargs):
            return inner()(*args, **kwargs)

    Door.forwards |= {forward.__code__}
    return forward


def _loader(module: nn.Module) -> Any:
    own = _method(module, "load_state_dict")

    def load_state_dict(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise MegatrainError("load_state_dict(assign=True) would put tensors in the place of streamed parameters; "
                                 "leave assign out: values are copied into the store")
        return own()(state_dict, strict=strict)

    return load_state_dict


def _applier(rt: Runtime, module: nn.Module) -> Any:
    who = weakref.ref(module)
    return lambda fn, recurse=True: _apply(rt, who(), fn)


def _zero_grad(module: nn.Module) -> Any:
    """As torch's, which reads each `.grad`, and so would wait for its update (Trainer calls it after each step). With
    set_to_none=True, as by default, this waits for nothing."""
    who = weakref.ref(module)

    def zero_grad(set_to_none: bool = True) -> None:
        gradient.clear(who().parameters(), set_to_none)

    return zero_grad


def _refuser(text: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MegatrainError(text)
    return refuse


def _move_buffers(rt: Runtime, m: nn.Module) -> None:
    buffers = {k: b.to(rt.device) if isinstance(b, Tensor) and not b.is_meta else b for k, b in m._buffers.items()}
    m.__dict__["_buffers"] = HostBuffers(buffers) if rt.is_cuda else buffers


def _apply(rt: Runtime, module: nn.Module, fn: Any) -> nn.Module:
    """`.to`, `.cuda`, `.half`, ...: a change of type is refused before anything changed, a change of device
    changes nothing: parameters stay in the store, buffers on the compute device."""
    tensors = [(n, t) for n, t in module.named_parameters()] + [(n, t) for n, t in module.named_buffers()]
    for name, t in tensors:
        probe = torch.empty(0, dtype=t.dtype)
        out = fn(probe)
        if out.dtype != t.dtype and isinstance(t, StreamedParameter):
            raise MegatrainError(f"{name}: {t.dtype} to {out.dtype}: a streamed model's types are fixed; "
                                 "convert it before mt.stream, or give mt.stream(dtype=...); bf16_full_eval and "
                                 "fp16_full_eval of TrainingArguments ask for this: leave them out")
    for m in module.modules():
        for k, b in m._buffers.items():
            if isinstance(b, Tensor):
                wanted = fn(torch.empty(0, dtype=b.dtype)).dtype
                m._buffers[k] = b.to(rt.device, wanted)
    return module


def _tree_check(root: nn.Module) -> Any:
    seen = _registrations
    ref = weakref.ref(root)

    def check(rt: Runtime) -> None:
        nonlocal seen
        if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise MegatrainError("DistributedDataParallel over a streamed model is not supported: its reducer would "
                                 "see no gradients; run one process with one streamed model")
        root = ref()
        if seen == _registrations or root is None:           # None: a part of it is all that is left
            return
        for name, p in _in_their_places(root):
            if not isinstance(p, StreamedParameter) or p._mt.runtime is not rt:
                raise MegatrainError(f"parameter {name!r} was put into the model after mt.stream: "
                                     "change the model first (get_peft_model, load_adapter, new heads), then stream "
                                     "it; SFTTrainer(peft_config=...) changes it too late, and DPOTrainer adds an "
                                     "adapter of its own to LoRA: make the trainer first there")
        _bind_anew(rt, root)
        seen = _registrations

    return check


def _in_their_places(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by name, without what functional_call has put there."""
    given = {id(m._parameters[n]) for m in root.modules() if isinstance(m._parameters, BoundParameters)
             for n, r in m._parameters.records.items() if type(r) is Given}
    for name, p in root.named_parameters():
        if id(p) not in given or isinstance(p, nn.Parameter):
            yield name, p


def _bind_anew(rt: Runtime, root: nn.Module) -> None:
    """Modules were put in: parameters that moved into them (parametrizations), or changed names, are streamed there."""
    for m in root.modules():
        note(m, rt)
        records = {n: p._mt for n, p in m._parameters.items() if isinstance(p, StreamedParameter)}
        if isinstance(m._parameters, BoundParameters):
            m._parameters.bind(records)
        elif records:
            m.__dict__["_parameters"] = BoundParameters(m._parameters, records)
    for window in rt.windows:
        window.look()


# ---- giving back ---------------------------------------------------------------------------------

def _restore(r: Record) -> None:
    p = r.param
    if p is None:                        # nobody has it any more
        return
    value = r.host.clone()
    gradient.release(r)
    with torch._C.DisableTorchFunctionSubclass():
        grad, p.grad = p.grad, None
    p.__dict__.pop("_mt", None)
    p.__dict__.pop("_mt_runtime", None)
    p.__class__ = nn.Parameter
    p.data = value
    p.grad = grad


def _give_back(rt: Runtime, root: nn.Module) -> None:
    for m in root.modules():
        for value in [v for v in m.__dict__.values() if isinstance(v, Installed)]:
            value.remove()
        if isinstance(m._parameters, BoundParameters):
            m.__dict__["_parameters"] = dict(m._parameters)
        m.__dict__["_buffers"] = {k: b.cpu() if isinstance(b, Tensor) else b for k, b in m._buffers.items()}
        runtimes.pop(m, None)
    for unit, records in itertools.groupby(rt.records, lambda r: r.unit):
        if rt.away(unit):                # it comes home, through host memory that is one unit's at a time
            rt.core.wait_updates(unit)
            rt.core.wait_grads(unit)
        for r in records:
            _restore(r)
        if rt.away(unit):
            rt.take(unit)
    patches.release(rt)
    rt.close()


__all__ = ["find_runtime", "runtime_of", "stream", "unstream"]
