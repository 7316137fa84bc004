"""Small doors: what a streamed model is made of, what it did, and its fp32 values."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..base.formats import SHOWN
from ..base.limits import show_bytes
from ..base.modes import GRADS, HOMES, MODES
from ..base.products import PRODUCTS
from ..figures.report import COUNTED, StepReport
from ..model.registry import runtime_of
from ..optim.masters import master
from ..plans.machine import Machine
from ..store.bases import BASES
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

    "template" is a layer's explicit forward and backward (compute="fused"), with products="fp8" also which of its
    products are not in fp8; else the module's own code runs, with the reason where a template was wanted.
    The head is "fused with the loss", or its own code runs. Below, how AdamW's states are kept, where not in fp32; and
    what was planned for, where mt.stream plans itself; and which of several processes this is, and
    how weights come to it.

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
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(n) for c, n in zip(r, widths)).rstrip() for r in rows]
    lines += [f"AdamW's states: {rt.states.format}"] * (rt.states.format != "fp32")
    lines += [str(rt.ranks), str(rt.delivery)] if rt.ranks is not None else []
    return "\n".join(lines + [str(rt.planning)] * (rt.planning is not None))


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
        rt.reads.forget()
        if takes:
            rt.door.leave()


def measure_machine(device: str | None = None, *, gpus: int = 1, disk: str | None = None, out: str | Path | None = None,
                    say: Callable[[str], None] = lambda _: None) -> tuple[Machine, str, Path]:
    """Measures what this machine can do, and keeps it for plans, as `megatrain doctor` does.

    Args:
        device: "cuda" or "cpu"; None: the GPU, where there is one. gpus: between so many links are measured; on the
            CPU device, between as many processes.
        disk: a directory on the drive that states may go to; None: the drive is described, not measured.
        out: the file to write; None: where plans look for it.
        say: is told what is measured next.

    Returns:
        The machine, a table of what was found, and the file's path.
    """
    # Not at the top: processes that measure links run `python -m` of that module, which nobody may have imported then.
    from ..plans import doctor, links

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine, limits = doctor.measure(torch.device(device), say, disk)
    if gpus > 1:
        say(f"links between {gpus} {'GPUs' if device == 'cuda' else 'processes'}")
        machine = links.linked(machine, links.measure(device, gpus))
    return machine, doctor.report(machine, limits), doctor.store(machine, None if out is None else Path(out))


def choices(argument: str) -> tuple[str, ...]:
    """The words that an argument of mt.plan or mt.stream takes, for programs that offer them to people.

    Args:
        argument: "states", "products", "base", "grads", "homes" or "activations".
    """
    return {"states": SHOWN, "products": PRODUCTS, "base": BASES, "grads": GRADS, "homes": HOMES,
            "activations": MODES}[argument]
