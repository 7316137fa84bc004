"""mt.stream: an ordinary module becomes a streamed one, in place; mt.unstream: and back.

Nothing is changed before everything that can be refused has been. The class of the model, of its
modules and the identity of its parameters stay; what is added lives in instance attributes, which
deepcopy and pickle turn back into an ordinary model.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..base import patches
from ..base.arguments import check_dtype
from ..base.errors import MegatrainError
from ..base.limits import parse_bytes
from ..base.products import check_layers
from ..base.units import find, stored_dtype
from ..base.units import group as grouped
from ..fused.layer import codable
from ..group.ranks import Ranks, as_one, ranks_of
from ..group.waits import calling
from ..plans.fleet import Fleet
from ..plans.planner import Plan
from ..store.disk import Disk
from .asking import Limits
from .choices import Choices, choose, compute_device
from .filling import declare, empty, engine, fill
from .fitting import Fit, fitted
from .install import install, remove
from .origins import origins
from .planning import Planning
from .registry import find_runtime, runtime_of
from .runtime import Runtime
from .streamable import check_model, refuse_codes, refuse_packed, refuse_wrapped
from .together import between, check, check_copies, fleet_of, leaves_in_order, same_buffers, watch


@calling("mt.stream")
def stream(module: nn.Module, device: str | torch.device | None = None, *, tokens: int | None = None,
           seq: int | None = None, vram: int | str | None = None, host: int | str | None = None,
           nvme: str | dict[str, Any] | None = None, states: str | None = None, dtype: torch.dtype | None = None,
           units: list[str | nn.Module] | None = None, compute: str = "auto",
           products: str | None = None, plan: Plan | dict[str, Any] | None = None, masters: bool = False,
           group: Any = None, reduce: str = "mean") -> nn.Module:
    """Moves a model's parameters to streamed storage in host memory; returns the same object.

    From here on the model's own forward runs on `device` with weights that are there only while
    they are needed. Parameters stay where they were found (`model.parameters()`, `state_dict()`),
    as host tensors. Call it before `get_peft_model`'s result is trained, that is: last.

    Args:
        module: any `torch.nn.Module`; its parameters dense, real, plain, or frozen codes (docs/low-precision.md).
        device: where to compute; None: CUDA if there is one, else the CPU device.
        tokens, seq: of a training step, in sequences of `seq`: mt.plan's choice for these is made at once. None: it is
            made at the first forward that records gradients, for what that is given, and again where the loop goes on
            to longer batches or more micro-batches (docs/plans.md). On the CPU device only where `vram` is given.
        vram: limit for what this process uses of the device (bytes or "24GiB").
        host: limit for host memory: all planes, AdamW's states counted in. None: what is there, by every limit that
            is known (`megatrain doctor` prints them), asked now for the weights and by mt.AdamW for its states.
        nvme: directory for states, weights and activations that host memory does not hold; or {"path": directory,
            "limit": "200GiB"}, of all processes of a machine. Files are removed by mt.unstream, at the end of the
            process, or, after a crash, by the next run that is given the directory; several processes' have no names.
        states: how mt.AdamW will keep its states, one of its formats, so that limits and plans count them. None: as
            mt.AdamW is told.
        dtype: convert floating parameters to this type; None: each keeps its own.
        units: names or modules to be streamed as one unit each; None: found from the model.
        compute: "eager": the modules' own code; "fused": layers that a template covers run as one node with an
            explicit backward, the others as they are, and the head makes no logits where the loss is
            `F.cross_entropy`, unless somebody reads them, until the next optimizer step (mt.explain says which);
            "auto": fused on CUDA for 16-bit weights, else eager. Fused results differ from the module's own
            code in the last bits.
        products: of decoder layers that a template runs: "bf16", as the weights are; "fp8": of operands rounded to 8
            bits with a scale for each row, summed in fp32 (docs/numerics.md says what that changes; mt.explain, which
            layers have them). None: a plan's, else "bf16".
        plan: what mt.plan gave: that is what runs, and stays. Or a dict by hand: docs/plans.md has its keys.
        masters: where `dtype` makes fp32 parameters 16-bit ones, mt.AdamW's fp32 masters begin with their own values.
            They are kept until its first step: no memory where they are mapped from a file, which must stay as it is.
        group: processes that train the model together, each with data of its own: a ProcessGroup, or a DeviceMesh of
            one dimension; None: all of torch.distributed's, where that is initialized (docs/several-gpus.md). Weights
            and buffers are the first one's from then on; on a machine, processes beside the first may leave the model
            on the meta device.
        reduce: what becomes of their gradients, "mean" as with DistributedDataParallel, or "sum".

    Raises:
        MegatrainError: the model cannot be streamed rightly, it does not fit, or the disk refuses its file; nothing was
            changed. Only where memory is gone between check and use, or a warning is an error, weights may have been
            taken over already: then the model is an ordinary one again with all its values, but these weights have the
            type that `dtype` gave them, and are on the CPU. A drive that fails while weights go there takes those with
            it.
    """
    stream_of(ranks_of(group), module, device, vram=vram, host=host, nvme=nvme, units=units, masters=masters,
              reduce=reduce, tokens=tokens, seq=seq, states=states, dtype=dtype, compute=compute, products=products,
              plan=plan)
    return module


def stream_of(ranks: Ranks | None, module: nn.Module, device: str | torch.device | None, *, vram: int | str | None,
              host: int | str | None, nvme: str | dict[str, Any] | None, units: list[str | nn.Module] | None,
              masters: bool, reduce: str, dtype: torch.dtype | None, **asked: Any) -> None:
    """As `stream`, by these processes. asked: of choices.choose."""
    with as_one(ranks):
        where = compute_device(device)
    if ranks is not None:
        ranks.connect(where)
    with as_one(ranks):
        check_model(module, ranks is not None and ranks.rank != ranks.mates[0])
        check_dtype(dtype)
        refuse_codes(module, dtype)
        refuse_packed(module, where)
        refuse_wrapped(module)
        limits = Limits(parse_bytes(vram, "vram"), parse_bytes(host, "host"), Disk.parse(nvme), units, *fleet_of(ranks))
        choices = choose(module, where, limits, dtype=dtype, **asked)
    _stream(module, where, limits, choices, dtype, masters, ranks, reduce)


def _stream(module: nn.Module, where: torch.device, limits: Limits, choices: Choices, dtype: torch.dtype | None,
            masters: bool, ranks: Ranks | None, reduce: str) -> None:
    with as_one(ranks):
        found = find(module, limits.units)
        choices.check_windows([name or type(module).__name__ for name, _ in found.windows])
        groups = grouped(module, found)
        if choices.products == "fp8":
            _check_codes(module, codable(found.windows), dtype)
    if ranks is not None:
        check(ranks, module, groups, choices, reduce)
    asked = choices.asked(type(module).__name__, groups, dtype, where, Fleet(*fleet_of(ranks)))
    with as_one(ranks):
        fit = fitted(asked, where, choices, limits.host)
    fit.room.ranks = ranks
    rt = Runtime(module, where, engine(where, choices, ranks), fit.room, choices.compute, ranks, reduce,
                 choices.products)
    if ranks is not None:
        machines = between(ranks, rt.core, where, choices.doors.delay_us)
        rt.leave = weakref.finalize(rt, leaves_in_order, rt.core, ranks, machines)
        if where.type == "cuda" and ranks.nccl():
            threading.Thread(target=watch, args=(weakref.ref(rt.exchange), rt.core, ranks), daemon=True).start()
    rt.delivery.shards = choices.options.get("delivery") == "shards"
    if choices.itself:
        rt.planning = Planning(weakref.proxy(rt), limits, choices.plan)
    _build(rt, module, found, fit, choices, masters)


def _check_codes(module: nn.Module, layers: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
    check_layers(type(module).__name__, layers,
                 {stored_dtype(p, dtype) for m in layers for p in m.parameters() if p.ndim > 1})


def _build(rt: Runtime, module: nn.Module, found: Any, fit: Fit, choices: Choices, masters: bool) -> None:
    values = origins(rt.ranks, module, fit.asked.groups)
    try:
        with as_one(rt.ranks):
            declare(rt, fit, choices)
        fill(rt, fit.asked.groups, values, masters)      # from here on the model changes; nothing is checked any more
        fit.room.let_go()
        install(rt, module, found, choices.activations)
        rt.keeps.plan = choices.plan
        if rt.ranks is not None:
            same_buffers(rt.ranks, module)
            rt.homes.reach(rt.ranks)
        rt.forwards.warn_unlocked()
    except BaseException:
        _give_back(rt, module)
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
    alone = rt.homes.settled or rt.homes.on_disk or rt.planes.apart          # others read what this one alone has
    ranks = rt.ranks if alone else None
    with as_one(ranks):
        if rt.ranks is not None:
            check_copies(rt.ranks, rt.records)
        rt.saves.finish()
        rt.drain()
        rt.trace.finish()
        rt.trace.stop()
    with as_one(ranks):
        _take_out(rt, module)
    rt.close()
    return module


def _give_back(rt: Runtime, module: nn.Module) -> None:
    _take_out(rt, module, together=False)
    rt.close()


def _take_out(rt: Runtime, module: nn.Module, together: bool = True) -> None:
    """The model is an ordinary one again, as far as it was streamed."""
    remove(module)
    empty(rt, together)
    patches.release(rt)


__all__ = ["find_runtime", "runtime_of", "stream", "unstream"]
