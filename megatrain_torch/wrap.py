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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import _core, astray, gradient, hf, patches
from .arguments import check_count, check_dtype
from .budget import Cap
from .compiled import compiled_of
from .cost import LENT
from .deferred import give_head, head_of
from .disk import SPILLED, Disk, check_room, file_bytes
from .door import Door
from .errors import MegatrainError
from .formats import check_states
from .fused import template_of, wanted
from .guard import StreamedParameter
from .limits import parse_bytes
from .mapped import Mapped
from .modes import DISK, HOMES, MODES
from .placement import OVERHEAD
from .planner import Plan
from .preflight import (
    SETTLED,
    TRIM_BYTES,
    Asked,
    Room,
    check_device,
    check_loading,
    give_back,
    own_bytes,
    to_disk,
)
from .records import DTYPES, Record
from .registry import find_runtime, note, runtime_of, runtimes
from .runtime import Runtime
from .state import BoundParameters, Given, HostBuffers
from .units import Group, find, group, stored_dtype
from .window import Installed, Window, method_of

_PLAN_KEYS = {"activations", "states", "homes", "slots", "speculate", "grads", "lent", "threads", "debug"}
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


def stream(module: nn.Module, device: str | torch.device | None = None, *, dtype: torch.dtype | None = None,
           plan: Plan | dict[str, Any] | None = None, vram: int | str | None = None, host: int | str | None = None,
           nvme: str | dict[str, Any] | None = None, units: list[str | nn.Module] | None = None,
           compute: str = "auto", masters: bool = False) -> nn.Module:
    """Moves a model's parameters to streamed storage in host memory; returns the same object.

    From here on the model's own forward runs on `device` with weights that are there only while
    they are needed. Parameters stay where they were found (`model.parameters()`, `state_dict()`),
    as host tensors. Call it before `get_peft_model`'s result is trained, that is: last.

    Args:
        module: any `torch.nn.Module`; its parameters dense, real, of plain `Parameter` type.
        device: where to compute; None: CUDA if there is one, else the CPU device.
        dtype: convert floating parameters to this type; None: each keeps its own.
        plan: what mt.plan gave: that is what runs. Or by hand a dict of
            "activations": one of these for all windows, or {window name: ...}:
                "saved" keeps them; "replay" runs the window's forward again in backward; "selective" (fused layers)
                keeps all but the largest; "attention" (fused layers) attention's output alone; "linked" (fused layers)
                that in place of the input, which the layer before makes again: every second layer, where all are
                asked; "whole" replays in one node (see whole.py); "auto": fused layers keep what fits, others save on
                the CPU and replay on CUDA. "saved+host", "replay+host" and so on: what is kept, the input too, waits
                in host memory behind compute; "saved+split": without the input. "saved+disk" and so on: in a file
                (nvme=), by way of a few blocks of host memory.
            "homes": "ram", "vram", "arrive", "through", "disk" or "disk+weights" for all units, or {unit name: ...}:
                where weights, gradients and AdamW's states live. What is at home in VRAM never crosses the bus and is
                updated there,
                to the same bits. "arrive": the same, but AdamW's states are at home in RAM, and on the device from the
                last windows of backward to the first of the next forward: for what the next forward needs first, the
                embedding and first layers. "through": at home in RAM, but updated on the device, states streaming up
                and back beside the host's own updates: where the host is what binds. "disk": at home in RAM but for
                AdamW's states, which are in a file (nvme=). "disk+weights": weights are there too, and each fetch
                reads them: where host memory is too short even for those; "states" is then how AdamW keeps its own.
                Default "ram"; with nvme= as many units on "disk", last ones first, as host memory cannot hold.
            "speculate": True, or a list of unit names: their updates begin during backward, as if nothing were
                clipped, and are taken back where that was wrong; to the same bits. Only units at home in RAM, at 12
                bytes more of host memory per trained parameter (fp16: 14). Default False.
            "grads": "ram": gradients wait for their update, in RAM or where the unit is at home; "none": they are used
                as they come and kept nowhere: for mt.AdamW(in_backward=True) without clipping, one backward per step.
                `p.grad` stays None, and 2 bytes per bf16 parameter of host memory, or VRAM, are not taken. Default
                "ram". "lent": buffers that they pass through, of the size of the largest unit, there and on the device:
                1 to 3, default 3; with fewer a backward waits for the updates of the last units.
            "states": how mt.AdamW will keep its states, one of its formats: so that limits count them. Default: as
                mt.AdamW is told.
            "slots": ring size (>= 2, default 3). "threads": host threads of the optimizer.
        vram: limit for what is used of the device (bytes or "24GiB"): weights must fit, and what fused layers keep
            between forward and backward is chosen to fit.
        host: limit for host memory: all planes, AdamW's states counted in. None: what is there, by every limit that
            is known (`megatrain doctor` prints them), asked now for the weights and by mt.AdamW for its states.
        nvme: directory for what is at home on "disk", and for activations with "+disk"; or {"path": directory,
            "limit": "200GiB"}. Room for the former is reserved at once, and for activations as far as a plan of
            mt.plan says how much. Files are removed by mt.unstream, at the end of the process, or, after a crash, by
            the next run that is given the directory.
        units: names or modules to be streamed as one piece each; None: found from the model.
        compute: "eager": the modules' own code; "fused": layers that a template covers run as one node with an
            explicit backward, the others as they are, and the head makes no logits where the loss is
            `F.cross_entropy`, unless somebody reads them, until the next optimizer step (mt.explain says which);
            "compile": windows run as torch.compile's graphs of their own code, compiled once for all of one structure,
            those that dynamo cannot take as they are, and the head too; no templates;
            "auto": fused on CUDA for 16-bit weights, else eager. Fused and compiled results differ from the module's
            own code in the last bits.
        masters: where `dtype` makes fp32 parameters 16-bit ones, mt.AdamW's fp32 masters begin with their own values.
            They are kept until its first step: no memory where they are mapped from a file, which must stay as it is.

    Raises:
        MegatrainError: the model cannot be streamed rightly, it does not fit, or the disk refuses its file; nothing was
            changed. Only where memory is gone between check and use, or a warning is an error, weights may have been
            taken over already: then the model is an ordinary one again with all its values, but these weights have the
            type that `dtype` gave them, and are on the CPU. A drive that fails while weights go there takes those with
            it.
    """
    choices = _choices(plan, compute, vram, nvme)
    _refuse_model(module)
    check_dtype(dtype)
    where, found = _device(device), find(module, units)
    _check_windows(choices.options.get("activations"), [name or type(module).__name__ for name, _ in found.windows])
    asked, sizes, room = _check(_asked(module, group(module, found), dtype, where, choices), where, choices,
                                parse_bytes(host, "host"))
    rt = Runtime(module, where, _engine(where, choices.options))
    try:
        rt.compute, rt.vram, rt.room = choices.compute, choices.vram, room
        _open(rt, asked, sizes, choices)
        _declare(rt, asked.groups, dtype)
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

@dataclass(frozen=True)
class _Choices:
    """A plan of mt.plan, or arguments by hand, in one form.

    Attributes:
        options: a plan's dict. vram: bytes. micro, besides: as in preflight.Asked. spilled: bytes of activations on
            disk, as far as known.
        whole: what a training step takes is known, not its weights alone.
    """

    options: dict[str, Any]
    compute: str
    vram: int | None
    disk: Disk | None
    micro: int = 1
    besides: tuple[tuple[str, int], ...] = ()
    whole: bool = False
    spilled: int = 0

    @property
    def spills(self) -> bool:
        """Does any window keep what it keeps on disk?"""
        modes = self.options.get("activations", "auto")
        return any(mode in DISK for mode in (modes.values() if isinstance(modes, dict) else (modes,)))


def _choices(plan: Plan | dict[str, Any] | None, compute: str, vram: int | str | None,
             nvme: str | dict[str, Any] | None) -> _Choices:
    """What is given beside a plan counts instead of the plan's."""
    disk = Disk.parse(nvme)
    if disk is not None:
        disk.room()                          # refuses a directory that is not there
    if not isinstance(plan, Plan):
        return _Choices(_options(plan, compute), compute, parse_bytes(vram, "vram"), disk)
    options = {"activations": plan.activations, "homes": plan.homes, "slots": plan.slots, "speculate": plan.speculate,
               "grads": plan.grads, "states": plan.states, "lent": plan.lent}
    compute = plan.compute if compute == "auto" else compute
    vram = plan.machine.vram_bytes if vram is None else vram
    besides = tuple((what, n) for what, n in plan.host.items() if what != OVERHEAD)
    return _Choices(_options(options, compute), compute, parse_bytes(vram, "vram"), plan.nvme if disk is None else disk,
                    plan.micro, besides, True, plan.disk.get(SPILLED, 0))


def _asked(module: nn.Module, groups: list[Group], dtype: torch.dtype | None, where: torch.device,
           choices: _Choices) -> Asked:
    options = choices.options
    homes = _homes(options.get("homes", "ram"), groups)
    speculated = _speculated(options.get("speculate", False), groups, homes)
    return Asked(type(module).__name__, groups, dtype, homes, speculated, options.get("slots", 3), choices.micro,
                 where.type == "cpu", choices.besides, options.get("grads", "ram") == "ram",
                 options.get("states", "fp32"), options.get("lent", LENT))


def _check(asked: Asked, where: torch.device, choices: _Choices, host: int | None) -> tuple[Asked, list[int], Room]:
    """With as many units on disk as must be there, where that is left open; sizes of slots. Refuses what does not
    fit."""
    free = _free(where)
    sizes = check_device(asked, free, choices.vram)
    if choices.disk is not None and "homes" not in choices.options:
        asked = to_disk(asked, host)
    check_room(asked, choices.disk, choices.spills, choices.spilled)
    check_loading(asked, host, choices.whole, min((n for n in (free, choices.vram) if n is not None), default=None))
    return asked, sizes, Room(asked, host)


def _options(plan: dict[str, Any] | None, compute: str) -> dict[str, Any]:
    if compute not in ("auto", "eager", "fused", "compile"):
        raise MegatrainError(f"compute={compute!r}: use 'auto', 'eager', 'fused' or 'compile'")
    if not isinstance(plan, dict | None):
        raise MegatrainError(f"plan={plan!r}: give what mt.plan made, or a dict of {sorted(_PLAN_KEYS - {'debug'})}")
    options = dict(plan or {})
    unknown = set(options) - _PLAN_KEYS
    if unknown:
        raise MegatrainError(f"plan: unknown key {sorted(unknown)[0]!r}; known: {sorted(_PLAN_KEYS - {'debug'})}")
    modes = options.get("activations", "auto")
    for mode in modes.values() if isinstance(modes, dict) else (modes,):
        if mode not in ("auto", "whole", *MODES):
            raise MegatrainError(f"plan: activations={mode!r}; use 'auto', 'whole', {', '.join(map(repr, MODES))}")
    if options.get("grads", "ram") not in ("ram", "none"):
        raise MegatrainError(f"plan: grads={options['grads']!r}; use 'ram' or 'none'")
    if options.get("grads") == "none" and options.get("speculate"):
        raise MegatrainError("plan: speculate=..., grads='none': updates that may be taken back need their gradients")
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

def _engine(where: torch.device, options: dict[str, Any]) -> _core.Engine:
    threads, debug = options.get("threads") or max(1, _core.build_info()["cpus"] - 1), options.get("debug", {})
    core = _core.Engine(where.type, where.index or 0, threads, debug.get("delay_us", 0), debug.get("seed", 0))
    if "lock" in debug:
        core.lock_limit(debug["lock"])
    return core


def _open(rt: Runtime, asked: Asked, sizes: list[int], choices: _Choices) -> None:
    """Slots; there are no units yet."""
    rt.activations, rt.speculated = choices.options.get("activations", "auto"), asked.speculated
    rt.store_bytes = sum(n for what, n in asked.device().items() if what.startswith("at home"))
    rt.cap = Cap(rt.device, rt.vram, rt.store_bytes)
    rt.open_slots(sizes, _at(asked, *SETTLED))


def _place(rt: Runtime, asked: Asked, choices: _Choices) -> None:
    """What is at home elsewhere than weights, or goes another way; the units are there, without values."""
    options, core = choices.options, rt.core
    rt.invite(_at(asked, "arrive"))
    for unit in _at(asked, "through"):
        core.through(unit, True)
    debug = {k: v for k, v in options.get("debug", {}).items() if k not in ("delay_us", "seed", "lock", "disk")}
    blocks = debug.pop("spill", {})
    if choices.disk is not None and choices.spills:
        rt.spill_to(choices.disk, choices.spilled, file_bytes(asked), blocks)
    if not asked.keeps:
        core.lend_most(asked.lent)
    rt.passing = frozenset() if asked.keeps else frozenset(range(len(asked.groups)))
    for unit in rt.passing:
        core.pass_gradients(unit)
    if debug:
        core.debug(**debug)


def _to_disk(rt: Runtime, asked: Asked, choices: _Choices) -> None:
    """The file, where units have states there. With weights it is laid out at once, for states as they will be kept.
    """
    options, weights = choices.options, _at(asked, "disk+weights")
    if "states" in options or weights:
        rt.choose_states(options.get("states", "fp32"))
    if choices.disk is not None and asked.on_disk():
        rt.keep_on_disk(choices.disk, _at(asked, "disk"), weights, options.get("debug", {}).get("disk", {}))


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


def _speculated(asked: bool | list[str], groups: list[Group], homes: tuple[str, ...]) -> frozenset[int]:
    """Numbers of the units in host memory whose updates may begin during backward."""
    names = [name for name, _ in groups]
    chosen = names if asked is True else asked or []
    if not isinstance(chosen, list) or not set(chosen) <= set(names):
        raise MegatrainError(f"plan: speculate={asked!r}; use True, False, or a list of units: {', '.join(names)}")
    return frozenset(i for i, name in enumerate(names) if name in chosen and homes[i] == "ram")


def _free(where: torch.device) -> int | None:
    """Bytes of the device that may still be taken; None on the CPU device, whose memory is the host's."""
    if where.type != "cuda":
        return None
    gc.collect()                             # models that were dropped, and their slots
    return torch.cuda.mem_get_info(where)[0] + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)


def _declare(rt: Runtime, groups: list[Group], dtype: torch.dtype | None) -> None:
    """Units in the store; nothing is in their planes."""
    global _pid
    for name, params in groups:
        kinds = [DTYPES[stored_dtype(p, dtype)] for _, p in params]
        unit = rt.core.add_unit(name, kinds, [p.numel() for _, p in params], [p.requires_grad for _, p in params])
        records = [_record(rt, unit, name, i, _pid + i, full, p, dtype) for i, (full, p) in enumerate(params)]
        _pid += len(params)
        if unit in rt.settled:
            rt.core.settle(unit, rt.settled[unit])
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
