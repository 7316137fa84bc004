"""Doors to a streamed model: its windows, its bytes in each memory, its last step, its fp32 values."""
from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import _core
from ..base.limits import host_limits, show_bytes
from ..base.modes import GRADS, HOMES, MODES, PRODUCTS, SHOWN
from ..figures.report import COUNTED, Shown, StepReport, Table, Tier, as_text, bytes_table
from ..model.runtime import runtime_of
from ..optim.states import master
from ..plans.machine import Machine
from ..plans.tally import PLANES_OF
from ..store.bases import BASES
from ..store.disk import SPILLED
from ..store.state import enter, in_backward, leave


def last_step(model: nn.Module) -> StepReport:
    """What bound the last step, inside of `mt.trace(model)`; else bytes and waits since the call before.

    Without a trace, or before a step of it is finished, call it once a step: its seconds are those between the calls.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    finished = rt.trace.steps(1)
    now, stats = time.perf_counter(), rt.core.stats()
    before, old = rt.reported
    rt.reported = (now, stats)
    if finished:
        return finished[0]
    diff = {k: v - old.get(k, 0) for k, v in stats.items()}
    return StepReport(now - before, diff["h2d_bytes"], diff["d2h_bytes"], diff["fetches"], diff["demand_fetches"],
                      diff["await_ns"] * 1e-9, rt.core.host_bytes(),
                      {"host update": diff["update_ns"] * 1e-9, "disk update": diff["disk_update_ns"] * 1e-9},
                      **{k: diff[k] for k in (*COUNTED, "disk_read_bytes", "disk_written_bytes")})


def explain(model: nn.Module) -> str:
    """A table of windows: their units, bytes, what is done about activations, and whose code runs them.

    "template": an explicit forward and backward of ours runs the layer (compute="fused"). With products="fp8" the row
    names products that are not in fp8. "its own": the module's own code runs, with the reason if a template was wanted.
    The head is "fused with the loss", or its own code runs. Lines below the table say how AdamW's states are kept, if
    not in fp32, and for which batch mt.stream has planned. With several processes they say which one this is, and how
    weights come to it.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    rows = [("window", "units", "bytes", "activations", "trained", "code")]
    for w in rt.windows:
        nbytes = sum(r.nbytes for r in w.records)
        trained = sum(r.numel for r in w.records if r.was_trainable)
        rows.append((w.name, ", ".join(rt.unit_names[u] for u in w.units), show_bytes(nbytes), w.keeps, f"{trained:,}",
                     w.code))
    lines = [as_text(("", rows), right=())]
    lines += [f"AdamW's states: {rt.states}"] * (rt.states != "fp32")
    lines += [str(rt.ranks), str(rt.delivery)] if rt.ranks is not None else []
    return "\n".join(lines + [str(rt.planning)] * (rt.planning is not None))


@dataclass(frozen=True)
class Storage(Shown):
    """Bytes that the engine holds for a model. In a notebook it shows itself.

    Attributes:
        model: its class.
        homes: how many units are at home where.
        tiers: (title, bytes by what they hold, bytes there are) of each kind of memory.
    """

    model: str
    homes: dict[str, int]
    tiers: list[Tier]

    def _head(self) -> str:
        return f"{self.model}: units at home " + ", ".join(f"in {home} {n}" for home, n in self.homes.items())

    def _tables(self) -> list[Table]:
        return [bytes_table(*tier) for tier in self.tiers]


def storage(model: nn.Module) -> Storage:
    """What the engine holds for a streamed model: weights, masters, moments and gradients, tier by tier.

    Planes are made when they are first needed: before a step of mt.AdamW there are weights alone.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    host = {what: sum(rt.core.host_bytes(_core.PLANES[p]) for p in planes) for what, planes in PLANES_OF.items()}
    host["activations"] = rt.core.swap_bytes()[0]
    device = {"slots": sum(s.nbytes for s in rt.ring.slots), "at home": rt.core.device_bytes()}
    there = torch.cuda.mem_get_info(rt.device)[1] if rt.is_cuda else host_limits().in_all
    tiers = [("device memory" if rt.is_cuda else "host memory, as the device's", device, there),
             ("host memory", host, host_limits().in_all)]
    files = {what: file for what, file in (("states", rt.core.disk_file()), (SPILLED, rt.core.swap_file())) if file}
    if files:
        parts = {what: file[1] for what, file in files.items()}
        path = str(Path(next(iter(files.values()))[0]).parent)
        tiers.append(("disk", parts, sum(parts.values()) + _core.disk_room(path)))
    held = [(title, {what: n for what, n in parts.items() if n}, most) for title, parts, most in tiers]
    return Storage(type(rt.root()).__name__, dict(Counter(rt.room.asked.homes)), held)


def masters(model: nn.Module) -> dict[str, Tensor]:
    """fp32 values of all parameters by name: masters where training made them, else the weights widened.

    Each is a copy: [shape] fp32 on the CPU. Waits for the pending updates.

    Raises:
        MegatrainError: the model is not streamed.
    """
    runtime_of(model)
    return {name: master(p) for name, p in model.named_parameters()}


@contextlib.contextmanager
def gather(module: nn.Module) -> Iterator[nn.Module]:
    """Inside, reading a parameter of a streamed module gives a copy on the compute device.

    For weights used outside of any forward: `with mt.gather(model.lm_head): F.linear(h, model.lm_head.weight)`.
    Gradients flow back to the parameter.

    Args:
        module: a streamed model, or any module inside one.

    Raises:
        MegatrainError: the module is not streamed.
    """
    rt = runtime_of(module)
    takes = rt.door.enter(in_backward())
    enter()
    try:
        yield module
    finally:
        leave()
        rt.forget_reads()
        if takes:
            rt.door.leave()


def measure_machine(device: str | None = None, *, disk: str | None = None, out: str | Path | None = None,
                    say: Callable[[str], None] = lambda _: None) -> tuple[Machine, str, Path]:
    """Measures what this machine can do, and keeps it for plans, as `megatrain doctor` does.

    Args:
        device: "cuda" or "cpu"; None: the GPU, where there is one.
        disk: a directory on the drive that states may go to; None: the drive is described, not measured.
        out: the file to write; None: where plans look for it.
        say: is told what is measured next.

    Returns:
        The machine, a table of what was found, and the file's path.
    """
    from ..plans import doctor  # torch's timer, which nothing else needs, takes long to import

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = doctor.measure(torch.device(device), say, disk)
    return machine, doctor.report(machine), doctor.store(machine, None if out is None else Path(out))


def choices(argument: str) -> tuple[str, ...]:
    """The words that an argument of mt.plan or mt.stream takes, for programs that offer them to people.

    Args:
        argument: "states", "products", "base", "grads", "homes" or "activations".
    """
    return {"states": SHOWN, "products": PRODUCTS, "base": BASES, "grads": GRADS, "homes": HOMES,
            "activations": MODES}[argument]
