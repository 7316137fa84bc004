"""mt.stream: an ordinary module becomes a streamed one, in place; mt.unstream: and back; mt.from_pretrained: a saved
transformers model becomes one, with one model in host memory at the most; mt.stream_trainer: a trainer's model does.

Nothing is changed before everything that can be refused has been. The class of the model, of its
modules and the identity of its parameters stay; what is added lives in instance attributes, which
deepcopy and pickle turn back into an ordinary model.
"""
from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _core
from ..base.codes import coded
from ..base.errors import MegatrainError, check_dtype
from ..base.limits import cpus, show_bytes
from ..base.modes import check_layers
from ..base.units import Group, find, stored_dtype
from ..base.units import group as grouped
from ..fused.layer import codable
from ..fused.trl import defer, trainers
from ..graph.exchange import Exchange
from ..group.between import Between
from ..group.control import calling
from ..group.ranks import Ranks, as_one, ranks_of, shared, watch_torchrun
from ..plans.planner import Plan
from ..plans.room import Room, shortage
from ..plans.shapes import shaped
from ..plans.tally import ALONE, Fleet, check_homes
from ..store.bases import expands, with_base
from .choices import Choices, check_model, choose, compute_device, fitted
from .filling import Origins, declare, empty, fill
from .install import install, move_buffers, remove
from .planning import Planning
from .registry import runtime_of
from .runtime import Runtime

_LOOK_S = 1.0
_LAST_STEP_S = 10.0          # in which nothing moves: they do not go on, and this one does not wait


@calling("mt.stream")
def stream(module: nn.Module, device: str | torch.device | None = None, *, tokens: int | None = None,
           seq: int | None = None, vram: int | str | None = None, host: int | str | None = None,
           nvme: str | dict[str, Any] | None = None, states: str | None = None, dtype: torch.dtype | None = None,
           units: list[str | nn.Module] | None = None, compute: str = "auto",
           products: str | None = None, plan: Plan | dict[str, Any] | None = None, masters: bool = False,
           group: Any = None, reduce: str = "mean") -> nn.Module:
    """Moves a model's parameters to host memory, from which they are streamed; returns the same object.

    From here on the model's own forward runs on `device`. A layer's weights are there only while it runs.
    `model.parameters()` and `state_dict()` have the same names as before, and give tensors in host memory. Call
    mt.stream last: after `get_peft_model`, and after every other change of the model.

    Args:
        module: any `torch.nn.Module` with dense, real parameters. Frozen ones may be quantized (docs/low-precision.md).
        device: where to compute; None: CUDA if there is one, else the CPU device.
        tokens, seq: tokens of a training step, and of a sequence. With them the model is planned at once. None: it is
            planned at the first forward with gradients, for that batch, and again for longer batches or more
            micro-batches (docs/plans.md). On the CPU device it is planned only if `vram` is given.
        vram: limit for what this process uses of the device (bytes or "24GiB").
        host: limit for host memory: weights, gradients and AdamW's states. None: what is free, by all limits that
            `megatrain doctor` prints. mt.stream checks it for the weights, mt.AdamW for its states.
        nvme: directory for states, weights and activations that host memory does not hold; or {"path": directory,
            "limit": "200GiB"}, of all processes of a machine. The files have no names, and go with
            mt.unstream or the end of the process, in whatever way it ends.
        states: format in which mt.AdamW will keep its states, so that limits and plans count them. None: as mt.AdamW
            is told.
        dtype: convert floating parameters to this type; None: each keeps its own.
        units: names or modules to be streamed as one unit each; None: found from the model.
        compute: "eager": the modules' own code. "fused": a template runs a layer, if it has one, as one autograd node
            with an explicit backward; mt.explain says which layers. If the loss is `F.cross_entropy`, the head makes
            no logits unless somebody reads them before the next optimizer step. "auto": fused on CUDA for 16-bit
            weights, else eager. Fused results differ from those of the module's own code in the last bits.
        products: matrix products of decoder layers that a template runs. "bf16": in the weights' type. "fp8": operands
            are rounded to 8 bits with a scale for each row, sums are fp32. docs/numerics.md says what that changes,
            mt.explain which layers have it. None: a plan's, else "bf16".
        plan: what mt.plan returned; it stays in force. Or a dict by hand, with the keys in docs/plans.md.
        masters: if `dtype` turns fp32 parameters into 16-bit ones, mt.AdamW's fp32 masters begin with the fp32 values.
            These are kept until its first step. If they are mapped from a file, they take no memory; the file must
            stay as it is until then.
        group: processes that train the model together, each on its own data: a ProcessGroup. None: all processes of
            torch.distributed, if that is initialized (docs/several-gpus.md). All get the first one's weights and
            buffers. On a machine, processes other than the first may have the model on the meta device.
        reduce: what becomes of the processes' gradients: "mean" as with DistributedDataParallel, or "sum".

    Raises:
        MegatrainError: the model cannot be streamed or does not fit, or the disk refuses its file; nothing was changed.
            Weights may have moved already if memory is gone between check and use, or a warning is an error. Then the
            model is an ordinary one again with all its values. But these weights have the type that `dtype` gave
            them, and are on the CPU. If a drive fails while weights go there, these weights are lost.
    """
    stream_of(ranks_of(group), module, device, masters, reduce, tokens=tokens, seq=seq, vram=vram, host=host,
              nvme=nvme, states=states, dtype=dtype, units=units, compute=compute, products=products, plan=plan)
    return module


def stream_of(ranks: Ranks | None, module: nn.Module, device: str | torch.device | None, masters: bool, reduce: str,
              **asked: Any) -> None:
    """mt.stream by these processes. asked: of choices.choose."""
    try:
        _stream(ranks, module, device, masters, reduce, asked)
    except BaseException:
        if ranks is not None:
            ranks.leave(failed=True)
        raise


@contextlib.contextmanager
def _importing_tracer(rt: Runtime) -> Iterator[None]:
    """Templates are proved by torch's tracer, which takes a second to import: weights are copied meanwhile."""
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo.backends.debugging",))
    if comes := rt.is_cuda and rt.compute != "eager":
        thread.start()
    yield
    if comes:
        thread.join()


def _stream(ranks: Ranks | None, module: nn.Module, device: str | torch.device | None, masters: bool, reduce: str,
            asked: dict[str, Any]) -> None:
    with as_one(ranks):
        where = compute_device(device)
    if ranks is not None:
        ranks.connect(where)
    with as_one(ranks):
        dtype = asked["dtype"]
        check_dtype(dtype)
        check_model(module, where, dtype, bare=ranks is not None and ranks.rank != ranks.mates[0])
        fleet = ALONE if ranks is None else Fleet(len(ranks.mates), len(set(ranks.machines)))
        choices = choose(module, where, fleet, **asked)
        found = find(module, choices.units)
        names, modes = [name or type(module).__name__ for name, _ in found.windows], choices.activations
        for name in modes if isinstance(modes, dict) else ():
            if name not in names:
                raise MegatrainError(f"plan: activations names {name!r}, and there is no such window; "
                                     f"windows: {', '.join(names)}")
        groups = grouped(module, found)
        if choices.products == "fp8":
            layers = codable(found.windows)
            kinds = {stored_dtype(p, dtype) for m in layers for p in m.parameters() if p.ndim > 1}
            check_layers(type(module).__name__, layers, kinds)
    if ranks is not None:
        check(ranks, module, groups, choices, reduce)
    with as_one(ranks):
        wanted = fitted(choices.asked(type(module).__name__, groups, where), where, choices)
    room = Room(wanted, choices.host, ranks)     # refuses planes that come later
    rt = Runtime(module, where, engine(where, choices, ranks), room, choices.compute, ranks, reduce, choices.products)
    if ranks is not None:
        machines = Between(ranks, rt.core, where, choices.doors.delay_us) if ranks.apart else None
        rt.leave = weakref.finalize(rt, leaves_in_order, rt.core, ranks, machines)
        if where.type == "cuda" and ranks.nccl():
            threading.Thread(target=watch, args=(weakref.ref(rt.exchange), rt.core, ranks), daemon=True).start()
    rt.delivery.shards = choices.options.get("delivery") == "shards"
    if choices.itself:
        rt.planning = Planning(weakref.proxy(rt), choices)
    origins = None if ranks is None else Origins(ranks, module, groups)
    try:
        with as_one(ranks):
            declare(rt, wanted, choices)
        with _importing_tracer(rt):                  # from here on the model changes; nothing is checked any more
            fill(rt, groups, origins, masters)
        with torch._C.DisableTorchFunctionSubclass():        # nothing is under way that a parameter waits for
            room.let_go()
            install(rt, module, found, choices.activations)
        for m in module.modules():
            move_buffers(rt, m)
        rt.keeps.plan = choices.plan
        if ranks is not None:
            own = list(module.buffers())         # the first rank's from now on, as weights are
            for buffer, is_meta in zip(own, ranks.gather([b.is_meta for b in own])[0]):
                if not is_meta:
                    ranks.control.give(buffer)
        rt.warn_unlocked()
    except BaseException:
        remove(module)
        empty(rt, together=False)
        rt.close()
        raise


def unstream(module: nn.Module) -> nn.Module:
    """Gives the ordinary module back, on the CPU, with its current weights; returns the same object.

    Optimizers over its parameters keep working if they are torch's own; mt.AdamW's states for
    them are dropped with the store. Waits for all work under way.

    Raises:
        MegatrainError: the module is not streamed, or is only a part of what was; or a worker failed. Of several
            processes each gets a model of its own: there is no memory for so many.
    """
    rt = runtime_of(module)
    root = rt.root()
    if root is not module:
        raise MegatrainError("unstream the model that was given to mt.stream, not a part of it")
    alone = rt.homes.settled or rt.homes.on_disk or rt.apart          # others read what this one alone has
    ranks = rt.ranks if alone else None
    with as_one(ranks):
        if rt.ranks is not None:
            one, many = sum(r.nbytes for r in rt.records if r.param is not None), len(rt.ranks.mates)
            if (bound := shortage(one * many)) is not None:
                raise MegatrainError(f"mt.unstream gives each of {many} processes weights of its own, "
                                     f"{show_bytes(one)}, and {show_bytes(bound.free)} of host memory are free "
                                     f"({bound.what}): let the processes end without it; mt.save, and state_dict() "
                                     "on one rank, need no copies")
        rt.finish_save()
        rt.drain()
        rt.trace.finish()
        rt.trace.stop()
    with as_one(ranks):
        remove(module)
        empty(rt)
    rt.close()
    return module


def stream_trainer(kind: Callable[..., Any], model: nn.Module, args: Any, *,
                   optimizer: Callable[[nn.Module], Optimizer] | None = None, stream_with: dict[str, Any] | None = None,
                   **kw: Any) -> Any:
    """A trainer whose model is streamed: `kind(model, args=args, **kw)`, ready for `trainer.train()`.

    The trainer is made first, since trainers of TRL add a head or adapters to the model. It does not move the plain
    model to the GPU. Then its model is streamed, and its reference model if it has one. The optimizer is made last,
    because it needs streamed parameters.

    Args:
        kind: transformers.Trainer, or a trainer of TRL.
        model: with its adapters, and not streamed.
        args: the trainer's arguments.
        optimizer: is given the streamed model; None: the trainer makes its own when it trains.
        stream_with: keyword arguments for `mt.stream`.
        kw: for the trainer, as `train_dataset`, `processing_class`, `peft_config`.

    Example:
        trainer = mt.stream_trainer(DPOTrainer, model, DPOConfig(folder, bf16=False), train_dataset=pairs,
                                    optimizer=lambda m: mt.AdamW(m.parameters(), lr=5e-7))
        trainer.train()
    """
    own = type(args)
    # A property of the class, which Trainer asks once: does the trainer move the model?
    args.__class__ = type(own.__name__, (own,), {"place_model_on_device": False})
    try:
        trainer = kind(model, args=args, **kw)
    finally:
        args.__class__ = own                         # a class that a checkpoint's pickle can name
    stream_with = {"device": args.device} | (stream_with or {})
    trainers[trainer.model] = weakref.ref(trainer)
    stream(trainer.model, **stream_with)
    if isinstance(reference := getattr(trainer, "ref_model", None), nn.Module):
        limits = {k: v for k, v in stream_with.items() if k in ("device", "vram", "host")}
        stream(reference.requires_grad_(False), **limits)
    defer(trainer)
    if optimizer is not None:
        trainer.optimizer = optimizer(trainer.model)
    return trainer


# ---- saved models ----

@calling("mt.from_pretrained")
def from_pretrained(cls: Any, path: str | Path, *, device: str | torch.device | None = None, tokens: int | None = None,
                    seq: int | None = None, vram: int | str | None = None, host: int | str | None = None,
                    nvme: str | dict[str, Any] | None = None, states: str | None = None,
                    dtype: torch.dtype | None = None, units: list[str | nn.Module] | None = None, compute: str = "auto",
                    products: str | None = None, plan: Plan | dict[str, Any] | None = None, group: Any = None,
                    reduce: str = "mean", base: str | None = None, adapter: Any = None, **kwargs: Any) -> Any:
    """`cls.from_pretrained(path)` and `mt.stream` of it.

    transformers does its part as ever: names, ties, experts put together, what is missing or unexpected reported. It
    builds the model on the meta device and maps the files; their bytes are then read straight into the store
    (store/tensorfiles.py). What it has to convert is in memory for that long, of several processes of a machine in the
    first.

    Args:
        cls: AutoModelForCausalLM, or any class with from_pretrained. path: a folder, or what it takes.
        dtype: of the streamed weights; None: the files'. From fp32 files to torch.bfloat16, mt.AdamW has exact fp32
            masters.
        device, tokens, seq, vram, host, nvme, states, units, compute, products, plan, group, reduce: as for mt.stream.
        base: frozen weights of linear layers as codes, quantized a tensor at a time while they are read. "nf4" and
            "int8" are bitsandbytes', "nf4" of experts in one tensor too. "fp8" has blocks of 128 by 128. "fp8" and
            "mxfp4" keep what a checkpoint has so.
        adapter: a config of PEFT's: the model gets that adapter before it is streamed.
        kwargs: for cls.from_pretrained. With output_loading_info=True its report is returned too.

    Returns:
        The streamed model; (model, report) with output_loading_info=True.

    Raises:
        MegatrainError: as mt.stream.
    """
    ranks = ranks_of(group)
    with as_one(ranks):
        if base is None:
            values = ranks is None or ranks.rank == ranks.mates[0]
            found = read_pretrained(cls, path, values=values, **kwargs)
        else:
            found, dtype = with_base(cls, path, base, dtype, **kwargs), None
    model, *report = found if isinstance(found, tuple) else (found,)
    if adapter is not None:
        model = importlib.import_module("peft").get_peft_model(model, adapter)
    stream_of(ranks, model, device, True, reduce, tokens=tokens, seq=seq, vram=vram, host=host, nvme=nvme,
              states=states, dtype=dtype, units=units, compute=compute, products=products, plan=plan)
    return (model, *report) if report else model


def from_config(config: Any, *, base: str | None = None, layers: int | None = None) -> nn.Module:
    """A language model of a transformers config on the meta device: to plan for, or to find places for adapters.

    Args:
        base: linear weights have the form of codes, as for mt.from_pretrained. layers: instead of the config's number.

    Raises:
        MegatrainError: as mt.from_pretrained of `base`.
    """
    return shaped(config, base, layers)


def read_pretrained(cls: Any, path: str | Path, *, base: str | None = None, dtype: Any = "auto", values: bool = True,
                    **kwargs: Any) -> Any:
    """`cls.from_pretrained(path)` on the CPU, not streamed: for mt.stream_trainer, or to be changed before mt.stream.

    Args:
        base: frozen weights of linear layers as codes, as for mt.from_pretrained; "whole": weights of 16 bits, where
            the files have codes of them.
        dtype: of the weights; "auto": the files'.
        values: False: the model may be left on the meta device: another process has its values.
        kwargs: for cls.from_pretrained.

    Raises:
        MegatrainError: as mt.from_pretrained of `base`.
    """
    if base not in (None, "whole"):
        return with_base(cls, path, base, None if dtype == "auto" else dtype, **kwargs)
    if base == "whole":
        kwargs |= expands(importlib.import_module("transformers").AutoConfig.from_pretrained(path))
    tf = sys.modules.get("transformers")
    stock = tf is not None and isinstance(cls, type) and (       # transformers knows how to leave it on the meta device
        issubclass(cls, tf.PreTrainedModel) or cls.__module__.startswith("transformers.models.auto."))
    if not values and stock and not kwargs.keys() & {
            "device_map", "quantization_config", "gguf_file", "state_dict", "tp_plan"}:
        with contextlib.suppress(Exception):             # what it raises is said by the way that all know
            found = cls.from_pretrained(path, dtype=dtype, **kwargs, device_map="meta")
            if not any(True for _ in coded(found[0] if isinstance(found, tuple) else found)):     # no codes are there
                return found
    return cls.from_pretrained(path, dtype=dtype, **kwargs)


# ---- several processes stream one model ----

def check(ranks: Ranks, module: nn.Module, groups: list[Group], choices: Choices, reduce: str) -> None:
    """Raises on every rank: they do not stream the same model in the same way, or what is asked for is for one."""
    homes = choices.options.get("homes", "ram")
    with as_one(ranks):
        if reduce not in ("mean", "sum"):
            raise MegatrainError(f"reduce={reduce!r}: use 'mean' or 'sum'")
        if ranks.size != choices.fleet.count:
            raise MegatrainError(f"{ranks}: each machine has to have equally many")
        check_homes(choices.fleet, [homes] if isinstance(homes, str) else homes.values(),
                    choices.options.get("grads", "ram"))
    ranks.agree("reduce=", reduce)
    ranks.agree("products=", choices.products)
    ranks.agree("delivery", choices.options.get("delivery"))
    ranks.agree("where units are at home", sorted(homes.items()) if isinstance(homes, dict) else homes)
    ranks.agree("the model", [(unit, [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in params])
                              for unit, params in groups])
    ranks.agree("what buffers the model has",
                [f"{name}: {b.dtype} {list(b.shape)}" for name, b in module.named_buffers()])


def engine(where: torch.device, choices: Choices, ranks: Ranks | None) -> _core.Engine:
    """With nothing in it yet; of several processes on the memory that all of this machine share."""
    threads, doors = choices.options.get("threads") or max(1, cpus() - 1), choices.doors
    device = where.type, where.index or 0
    if ranks is None:
        core = _core.Engine(*device, threads, doors.delay_us, doors.seed)
    else:
        watch_torchrun()
        nodes = ranks.gather(_node(where.index) if where.type == "cuda" else -1)
        before = os.sched_getaffinity(0)
        near = processors([nodes[r] for r in ranks.mates], nodes[ranks.rank], before)
        fd = shared(ranks, _core.share() if ranks.rank == ranks.mates[0] else -1)
        try:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, near)        # threads that begin now stay on these
            core = _core.Engine(*device, max(1, threads // len(ranks.mates)), doors.delay_us, doors.seed, share=fd,
                                rank=ranks.rank, ranks=ranks.size, speakers=ranks.speakers() if ranks.apart else ())
        finally:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)
            os.close(fd)
    if doors.lock is not None:
        core.lock_limit(doors.lock)
    return core


def processors(nodes: list[int], own: int, allowed: set[int], sysfs: Path = Path("/sys")) -> set[int]:
    """Beside a rank's GPU, for the engine's threads: what they touch first, states of the rank's own portion, lies in
    the memory there (csrc/core/arena.h). All that are allowed, unless each node of the machine has equally many of its
    ranks' GPUs: some nodes would have nothing to do else. nodes: of the GPUs of this machine's ranks; -1: not known.
    own: of this one's. allowed: to this process."""
    found = {int(node.name[4:]): {int(cpu.name[3:]) for cpu in node.glob("cpu[0-9]*")} & allowed
             for node in sysfs.glob("devices/system/node/node[0-9]*")}
    many = Counter(nodes)
    even = many.keys() == {node for node, own in found.items() if own} and len(set(many.values())) == 1
    return found[own] if even else allowed


def _node(index: int) -> int:
    """Of memory, that a GPU is beside; -1: not known."""
    p = torch.cuda.get_device_properties(index)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        name = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        return int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
    return -1


def leaves_in_order(core: _core.Engine, ranks: Ranks, machines: Between | None) -> None:
    """The process ends: the others may await its part of the last step, or read what is on its device; but not where it
    failed, as they will then."""
    failed, orderly, alone = getattr(sys, "last_value", None) is not None, True, False
    with contextlib.suppress(Exception):
        if not failed:
            core.watchdog(_LAST_STEP_S)      # raises where mt.unstream has closed it, when all was over
            orderly = False
            core.drain()
            core.stay(_LAST_STEP_S)
            orderly, alone = True, any(died for *_, died in core.gone())         # who ended before it
    with contextlib.suppress(Exception):
        if (failed or not orderly) and core.gone():
            ranks.give_up()
        core.close()                         # else what this rank says has no end
    # What this rank said goes first, to those who still hear it. Where that has no end groups are aborted, so that our
    # threads that look at pieces end: they must not come back to Python later.
    ended = machines is None or machines.finish(_LAST_STEP_S)
    ranks.leave(failed or alone or not (orderly and ended))
    if not ended:
        machines.finish(_LAST_STEP_S)


def watch(exchange: weakref.ref[Exchange], core: _core.Engine, ranks: Ranks) -> None:
    """In a thread of its own. NCCL's kernels that wait for a process that is gone are ended, and so all ends that waits
    behind them on the device: this process comes to where it is told."""
    waits = False
    while (alive := exchange()) is not None:
        try:
            gone = core.gone()
        except MegatrainError:                   # the engine is closed
            return
        before, waits = waits, any(died or alive.began for _, _, died in gone)
        if before and waits:                     # else this one may be about to leave its last backward
            ranks.give_up()
            return
        del alive
        time.sleep(_LOOK_S)
